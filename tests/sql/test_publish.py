"""Publishing: send and send_batch, to whom, in whose transaction, and who is notified."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.multirange import Multirange

from spark_pgqueue.postgres import connection
from tests.sql import internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_a_batch_becomes_visible_as_one_publication_in_the_order_given(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, [str(i) for i in range(500)])
    assert sent == sorted(sent)
    assert internals.count(conn, "publications") == 1
    assert [r.data for r in receive(conn, 1000)] == [str(i) for i in range(500)]
    assert send_all(conn, []) == []
    assert internals.count(conn, "publications") == 1


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_a_batch_whose_numbers_others_interrupt_knows_its_own(
    conn: Conn, url: str, level: str
) -> None:
    consumer(conn)
    over = Event()

    def produce(name: str) -> dict[int, str]:
        """What was sent, by the numbers that were returned."""
        data = [f"{name}{i}" for i in range(3000)]
        with connection.connect(url) as own:
            own.execute(f"begin transaction isolation level {level}".encode())
            own.execute("savepoint s")
            seqs = send_all(own, data)
            own.execute("commit")
        assert seqs == sorted(seqs)
        return dict(zip(seqs, data, strict=True))

    def interrupt() -> dict[int, str]:
        with connection.connect(url) as own:
            sent = {}
            while not over.is_set():
                sent[send(own, "alone")] = "alone"
        return sent

    interrupted = False
    with ThreadPoolExecutor(4) as pool:
        alone = pool.submit(interrupt)
        batches: dict[int, str] = {}
        try:
            for _ in range(50):
                sent = list(pool.map(produce, "ab"))
                batches |= sent[0] | sent[1]
                interrupted = any(max(each) - min(each) >= 3000 for each in sent)
                if interrupted:
                    break
        finally:
            over.set()
    received = {row.seq: row.data for row in receive(conn, 1_000_000)}
    assert received == batches | alone.result()
    assert interrupted


@pytest.mark.parametrize("way", ["send_batch", "reserve"])
def test_who_takes_many_numbers_gets_one_range_beside_others_who_do(
    conn: Conn, url: str, stream: int, way: str
) -> None:
    """Sets of messages stay small: one that has every second number costs as many ranges."""
    rounds, count = 6, 3000 if way == "send_batch" else 50_000

    def take(_: int) -> list[int]:
        """How many ranges each call got."""
        with connection.connect(url) as own:
            if way == "send_batch":
                sent = [send_all(own, ["x"] * count) for _ in range(rounds)]
                assert all(len(seqs) == count for seqs in sent)
                return [1 + sum(b - a > 1 for a, b in pairwise(seqs)) for seqs in sent]
            return [len(value(own, "reserve", stream, count)) for _ in range(rounds)]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(take, range(3))) == [[1] * rounds] * 3


@pytest.mark.all_versions
@pytest.mark.parametrize("way", ["send_batch", "reserve"])
@pytest.mark.promise("guarantee: Independent producers")
def test_numbers_are_locked_for_as_long_as_they_are_taken(
    conn: Conn, session: Session, stream: int, way: str
) -> None:
    """Not to the end of the transaction, to which Postgres says who has some: retention asks it.

    Who locks them for long keeps nobody from sending.
    """

    def take(own: Conn) -> None:
        if way == "send_batch":
            send_all(own, ["x"] * 1000)
        else:
            value(own, "reserve", stream, 1000)

    with conn.transaction():
        take(conn)
        assert not internals.seqs_are_locked(conn, stream)
        assert internals.writers(conn, stream) == 1
    assert internals.writers(conn, stream) == 0
    locking = session()
    with locking.transaction():
        internals.lock_seqs(locking, stream)
        take(conn)
        assert internals.seqs_are_locked(conn, stream)


@pytest.mark.promise("feature: a message to many")
def test_every_consumer_gets_every_message_unless_it_was_sent_to_others(conn: Conn) -> None:
    for name in "abc":
        consumer(conn, name)
    everyone = send(conn)
    two = send(conn, p_consumers=["a", "b", "a"])
    batch = send_all(conn, ["x", "y"], p_consumers=["b"])
    consumer(conn, "late")
    assert acked(conn, "s", "a") == [everyone, two]
    assert acked(conn, "s", "b") == [everyone, two, *batch]
    assert acked(conn, "s", "c") == acked(conn, "s", "late") == [everyone]


@pytest.mark.promise("guarantee: Atomic publication", "feature: in the caller's transaction")
def test_sending_is_part_of_the_callers_transaction(conn: Conn, url: str) -> None:
    consumer(conn)
    conn.execute("create table orders (id int)")
    with connection.connect(url) as other:
        with other.transaction(force_rollback=True):
            other.execute("insert into orders values (1)")
            send(other)
            send_all(other, ["x", "y"])
        assert receive(conn) == []
        with other.transaction():
            other.execute("insert into orders values (2)")
            sent = send(other, "kept")
            with other.transaction(force_rollback=True):
                send(other, "of a savepoint that is rolled back")
            assert receive(conn) == []
    assert seqs_of(receive(conn)) == [sent]
    assert one(conn, "select array_agg(id) from orders") == [2]


@pytest.mark.promise("guarantee: Notifications")
def test_each_publication_notifies_once_who_waits_and_nobody_when_the_stream_says_so(
    conn: Conn, stream: int, url: str
) -> None:
    quiet = value(conn, "create_stream", "quiet", p_settings='{"notify": false}')
    publications: list[Callable[[], Any]] = [
        lambda: send(conn),
        lambda: send_all(conn, ["x"] * 10),
        lambda: publish(conn, stream, [stage(conn, stream, 2), stage(conn, stream, 2)], 4),
    ]
    heard: list[str] = []
    with connection.connect(url) as worker:
        worker.add_notify_handler(lambda notify: heard.append(notify.channel))
        ((channel, publishers),) = call(worker, "start_waiting", "s")
        assert (channel, publishers) == (f"pgqueue_{stream}", [])
        assert call(worker, "start_waiting", "quiet") == [(None, [])]
        worker.execute(f"listen pgqueue_{quiet}".encode())
        for publication in publications:
            publication()
            worker.execute("select 1")
            assert heard == [channel]
            heard.clear()
        with conn.transaction(force_rollback=True):
            send(conn)
        send_all(conn, [])
        stage(conn, stream, 1, 1)
        publish(conn, stream, [], 0, 0, "other")
        value(conn, "send", "quiet", "x")
        call(conn, "send_batch", "quiet", ["x", "y"])
        publish(conn, quiet, [stage(conn, quiet, 1, 3)], 1, 3)
        worker.execute("select 1")
        assert heard == []
        for waits in (True, False):  # it goes on listening, and is not notified
            assert value(worker, "stop_waiting", "s") is waits
        send(conn)
        worker.execute("select 1")
        assert heard == []


# Limits of a stream


def nested(levels: int) -> str:
    """Headers with so many objects in each other."""
    return '{"":' * levels + "1" + "}" * levels


@pytest.mark.promise("guarantee: Sizes")
def test_a_message_as_large_as_its_stream_allows_is_taken_and_a_larger_one_refused(
    conn: Conn,
) -> None:
    """By each way in: alone, together, and written into the stream's table and staged."""
    for kind, column in (("text", "data"), ("json", "data"), ("binary", "data_bytes")):
        stream = value(
            conn,
            "create_stream",
            kind,
            kind,
            p_settings='{"max_bytes": 10, "max_header_bytes": 20}',
        )
        for size in (10, 11):
            data = "1" * size if kind != "binary" else b"1" * size
            one = {"p_data": None, f"p_{column}": data}
            many = {"p_data": None, f"p_{column}": [data]}
            ways = [
                lambda one=one, kind=kind: value(conn, "send", p_stream=kind, **one),
                lambda many=many, kind=kind: value(conn, "send_batch", p_stream=kind, **many),
                lambda stream=stream, column=column, data=data: written(
                    conn, stream, **{column: data}
                ),
            ]
            for way in ways:
                if size == 10:
                    way()
                else:
                    with raises("PQ004") as caught:
                        way()
                    assert "111" not in str(caught.value.diag.message_primary)


def written(conn: Conn, stream: int, **columns: Any) -> int:
    """Write a message as a task of Spark's sink does, and stage it; returns the block."""
    with conn.transaction():
        (seqs,) = value(conn, "reserve", stream, 1)
        names = sql.SQL(", ").join(map(sql.Identifier, ["seq", *columns]))
        values = [seqs.lower, *columns.values()]
        conn.execute(
            sql.SQL("insert into {} ({}) values ({})").format(
                sql.Identifier("pgqueue", f"messages_{stream}"),
                names,
                sql.SQL(", ").join(map(sql.Literal, values)),
            )
        )
        return value(conn, "stage", "sink", 0, stream, Multirange([seqs]))


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("text", {"data": "x", "data_bytes": b"x"}, "PQ004"),
    ("text", {"data": "x", "key": "k" * 1025}, "PQ003"),
    ("text", {"data": "x", "headers": "[]"}, "PQ003"),
    ("json", {"data": "{secret"}, "PQ004"),
    ("json", {"data": "1", "data_bytes": b"x"}, "PQ004"),
    ("binary", {"data_bytes": b"x", "data": "x"}, "PQ004"),
]


def test_what_does_not_fit_a_stream_cannot_be_staged(conn: Conn) -> None:
    """A producer may write what it likes into the table; nobody sees it unless it was staged."""
    streams = {
        kind: value(conn, "create_stream", kind, kind) for kind in ("text", "json", "binary")
    }
    for kind, columns, sqlstate in UNFIT:
        with raises(sqlstate) as caught:
            written(conn, streams[kind], **columns)
        assert "secret" not in str(caught.value.diag.message_primary)


def test_a_message_that_is_not_written_cannot_be_staged(conn: Conn, stream: int) -> None:
    """Or else its number could be filled in later, with anything."""
    conn.execute("begin")
    (seqs,) = value(conn, "reserve", stream, 2)
    insert = f"insert into pgqueue.messages_{stream} (seq, data) values (%s, 'x')"
    conn.execute(insert.encode(), [seqs.lower])
    with pytest.raises(
        psycopg.Error, match="has 2 numbers, but messages are written for 1"
    ) as caught:
        value(conn, "stage", "sink", 0, stream, Multirange([seqs]))
    conn.execute("rollback")
    assert caught.value.sqlstate == "PQ003"


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("fits", "too_much"),
    [('{"h": "123456789012"}', '{"h": "1234567890123"}'), (nested(100), nested(101))],
    ids=["long", "deep"],
)
@pytest.mark.promise("guarantee: Sizes")
def test_headers_as_large_and_deep_as_allowed_are_taken_and_others_refused(
    conn: Conn, fits: str, too_much: str
) -> None:
    limit = len(fits) if "h" in fits else 65536
    stream = value(conn, "create_stream", "h", p_settings=json.dumps({"max_header_bytes": limit}))
    ways: list[Callable[[str], Any]] = [
        lambda headers: value(conn, "send", "h", "x", p_headers=headers),
        lambda headers: conn.execute(
            "select pgqueue.send_batch('h', '{x}', p_headers => array[%s::jsonb])", [headers]
        ),
        lambda headers: written(conn, stream, data="x", headers=headers),
    ]
    for way in ways:
        way(fits)
        with raises("PQ003") as caught:
            way(too_much)
        assert caught.value.diag.column_name == "p_headers"


def test_a_payload_is_never_in_an_error(conn: Conn) -> None:
    value(conn, "create_stream", "j", "json", p_settings='{"max_bytes": 30}')
    secret = "{secret"
    calls = [
        ("send", ["j", secret]),
        ("send_batch", ["j", ["1", secret]]),
        ("send", ["j", f'"{"secret" * 9}"']),
        ("send", ["j", "1", None, '"secret"']),
    ]
    for function, arguments in calls:
        with pytest.raises(psycopg.Error) as caught:
            call(conn, function, *arguments)
        diag = caught.value.diag
        fields = (diag.message_primary, diag.message_detail, diag.message_hint)
        assert "secret" not in str(fields)


@pytest.mark.promise("guarantee: Two-phase commit")
def test_a_transaction_that_sent_can_be_prepared_only_without_notifications(
    conn: Conn, url: str
) -> None:
    """So where nobody waits, or the stream says so."""
    value(conn, "create_stream", "quiet", p_settings='{"notify": false}')
    with connection.connect(url) as worker:
        call(worker, "start_waiting", "s")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
            prepare_one_that_sends(conn, "s")
        call(worker, "stop_waiting", "s")
    for stream in ("s", "quiet"):
        value(conn, "create_consumer", stream, "c", "earliest")
        prepare_one_that_sends(conn, stream)
        assert acked(conn, stream, "c") == []
        conn.execute(f"commit prepared '{stream}'".encode())
        assert len(acked(conn, stream, "c")) == 1


def prepare_one_that_sends(conn: Conn, stream: str) -> None:
    """A transaction that is prepared under the stream's name."""
    conn.execute("begin")
    try:
        value(conn, "send", stream, "x")
        conn.execute(f"prepare transaction '{stream}'".encode())
    except psycopg.Error:
        conn.execute("rollback")
        raise


def test_a_stream_or_consumer_that_is_made_while_it_is_looked_for_is_used(conn: Conn) -> None:
    """It is made between the quick look for a name and the look that raises."""
    for kind, make in (
        ("stream", "pgqueue.create_stream($1, p_if_not_exists => true)"),
        ("consumer", "pgqueue.create_consumer($1, $2, p_if_not_exists => true)"),
    ):
        names = "text" if kind == "stream" else "text, text, text"
        default = "" if kind == "stream" else " default 'consumer'"
        given = "$1" if kind == "stream" else "$1, $2"
        conn.execute(
            f"alter function _pgqueue.{kind}({names}) rename to {kind}_that_is_there;"
            f"create function _pgqueue.{kind}({names}{default}) returns pgqueue.{kind}s"
            f" language plpgsql as $f$ begin perform {make} where $1 in ('made', 's');"
            f" return _pgqueue.{kind}_that_is_there({given}); end $f$".encode()
        )
    assert value(conn, "send", "made", "x") == 1
    assert receive(conn, name="made") == []
    send(conn, "y")
    assert [row.data for row in receive(conn, name="made")] == ["y"]
