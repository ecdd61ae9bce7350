"""After a restore: offsets outside of the database go on, or are refused where they are wrong."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from tests.sql import clock, internals
from tests.sql.queue import *
from tests.sql.test_reading import read


@pytest.fixture(autouse=True)
def _checked(allowed_afterwards: None) -> None: ...


def lose(conn: Conn, publications: int) -> None:
    """What a restore to an earlier state leaves, without these last publications."""
    conn.execute(
        "with gone as (delete from pgqueue.publications where publication_id > (select"
        " max(publication_id) from pgqueue.publications) - %s returning seqs)"
        " delete from pgqueue.messages m using gone where gone.seqs @> m.seq",
        [publications],
    )
    for name, column, table in (
        ("publication_1", "publication_id", "publications"), ("seq_1", "seq", "messages"),
    ):  # fmt: skip
        conn.execute(
            f"select setval('pgqueue.{name}', (select max({column}) from pgqueue.{table}))".encode()
        )


def test_an_offset_of_what_was_restored_goes_on(conn: Conn, stream: int) -> None:
    send(conn)
    _, offset = read(conn)
    send(conn)
    assert call(conn, "recover") == [("s", 2)]
    third = send(conn)
    seqs, following = read(conn, offset)
    assert seqs == [2, third]
    assert following["incarnation"] != offset["incarnation"]
    assert read(conn, following) == ([], following)


def test_an_offset_beyond_what_was_restored_is_refused(conn: Conn, stream: int) -> None:
    """Also when its numbers were given out again since, and also after another restore."""
    send(conn)
    _, before = read(conn)
    send(conn)
    _, beyond = read(conn, before)
    lose(conn, 1)
    with raises("PQ005", "ahead of the database"):
        read(conn, beyond)
    value(conn, "recover")
    again: list[int] = []
    for _ in range(2):
        again.append(send(conn))
        with raises("PQ005", "beyond the state to which") as error:
            read(conn, beyond)
        assert "start at that time" in (error.value.diag.message_hint or "")
    seqs, _ = read(conn, before)
    assert seqs == again
    value(conn, "recover")
    with pytest.raises(psycopg.DatabaseError, match="beyond the state to which"):
        read(conn, beyond)
    assert read(conn, before)[0] == seqs


def test_what_is_kept_from_a_consumer_is_not_missing(conn: Conn) -> None:
    consumer(conn)
    value(conn, "cancel", "s", "c", [send(conn)])
    conn.execute("delete from pgqueue.messages")
    with warned(conn) as said:
        call(conn, "recover")
    assert said == []


def test_an_offset_amid_a_publication_that_was_not_restored_is_refused(
    conn: Conn, stream: int
) -> None:
    send(conn)
    send_all(conn, ["x"] * 3)
    seqs, offset = read(conn, None, 2)
    assert (len(seqs), "cut" in offset) == (2, True)
    lose(conn, 1)
    call(conn, "recover")
    send_all(conn, ["y"] * 3)
    with raises("PQ005", "beyond the state"):
        read(conn, offset)


def test_an_offset_behind_which_all_is_trimmed_goes_on(conn: Conn, stream: int) -> None:
    """What retention took was restored, too: it is no reason to refuse who had read it."""
    value(conn, "set_retention", "s", timedelta(hours=1))
    maintain(conn)
    send(conn)
    send(conn)
    _, offset = read(conn)
    for _ in range(2):
        clock.pass_time(conn, timedelta(hours=1))
        maintain(conn)
    assert internals.count(conn, "publications") == 0
    assert call(conn, "recover") == [("s", 2)]
    third = send(conn)
    assert read(conn, offset)[0] == [third]


def test_a_second_restore_is_later_also_by_a_clock_that_was_set_back(
    conn: Conn, stream: int
) -> None:
    for _ in range(3):
        send(conn)
    _, offset = read(conn)
    value(conn, "recover")
    clock.pass_time(conn, timedelta(days=-1))  # the server's clock was ahead
    lose(conn, 2)
    value(conn, "recover")
    with pytest.raises(psycopg.DatabaseError, match="beyond the state to which"):
        read(conn, offset)


def test_an_old_snapshot_recovers_nothing(conn: Conn, stream: int, session: Session) -> None:
    """It lacks what was published since, which offsets may have read."""
    other = session()
    with other.transaction():
        other.execute("set transaction isolation level repeatable read")
        other.execute("select count(*) from pgqueue.publications")
        send(conn)
        _, offset = read(conn)
        with raises("PQ007"), other.transaction():
            value(other, "recover")
    assert read(conn, offset) == ([], offset)


def test_recover_comes_before_producers(conn: Conn, stream: int, session: Session) -> None:
    """It refuses beside one, and changes nothing; what was prepared before is no obstacle."""
    producer = session()
    producer.execute("begin")
    send(producer)
    send(conn)
    _, offset = read(conn)
    with raises("55P03", "already publish to stream 's'"):
        value(conn, "recover")
    producer.execute("commit")
    assert read(conn, offset)[0] == [1]


def test_it_is_noticed_that_the_database_was_restored(conn: Conn, stream: int) -> None:
    assert value(conn, "is_restored") is False
    conn.execute("update pgqueue.servers set system_identifier = system_identifier + 1")
    assert value(conn, "is_restored") is True
    value(conn, "recover")
    assert value(conn, "is_restored") is False
    conn.execute("update pgqueue.servers set timeline = timeline - 1")
    assert value(conn, "is_restored") is True


def test_a_checkpoint_that_names_an_unknown_claim_is_refused(conn: Conn, stream: int) -> None:
    """Though a later one was made since: it has the number, but not the random half, of the one."""
    consumer_id = consumer(conn)
    reader = uuid.uuid4()
    send(conn)
    (first,) = call(conn, "reader_claim", reader, consumer_id, 0, 0)
    lost = first.claim_id - 1
    for function, arguments in [("reader_resume", (0, lost)), ("reader_claim", (lost, 1))]:
        with raises("PQ005", "ahead of the database") as error:
            call(conn, function, reader, consumer_id, *arguments)
        assert "new checkpoint" in (error.value.diag.message_hint or "")
    assert call(conn, "reader_resume", reader, consumer_id, 0, first.claim_id)[0].planned == 1
    assert [each.live for each in internals.claims(conn)] == [True]


def test_messages_that_are_not_stored_are_passed_over_also_in_a_consumer_that_is_in_use(
    conn: Conn, session: Session
) -> None:
    """A dump that was made beside maintain() may lack what its consumers owe."""
    consumer(conn, ordering="stream")
    first, lost, last = send_all(conn, ["x"] * 3)
    conn.execute(b"delete from pgqueue.messages where seq = %s", [lost])
    worker = session()
    with warned(conn) as said, ThreadPoolExecutor(1) as pool:
        with worker.transaction():
            claim = receive(worker, 1)
            recovering = pool.submit(call, conn, "recover")
            wait_for_a_lock(worker)
        recovering.result()
    assert (
        [text for text in said if "skips 1 message that the stream does not store" in text]
        == said
        != []
    )
    value(conn, "ack", claim_of(claim))
    assert (seqs_of(claim), acked(conn, "s", "c", 1)) == ([first], [last])
