"""Sequences that are behind their rows: after a replication or a restore without their values."""

import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from spark_pgqueue.command_line import doctor
from tests.sql import checker, clock, internals
from tests.sql.cost import cost
from tests.sql.internals import cursor_of
from tests.sql.owing import SINK, assert_delivers, owed, use
from tests.sql.queue import *
from tests.sql.table_writes import Write, target

SQL = Path(__file__).parents[2] / "sql"

COUNTS_NO_ROWS = {
    "claim_secret": "no row has it; without one, recover() makes one",
    "maintain_turns": "whose turn it is: any value will do",
    "reserved_from": "kept in the session alone",
    "reserved_until": "kept in the session alone",
    "reserved_for": "kept in the session alone",
    "backlog_": "the backlog of a consumer, which is counted again",
}

SEQUENCES = """
    select c.oid::regclass::text as name, c.relname from pg_class c
    where c.relkind = 'S' and c.relnamespace::regnamespace::text in ('pgqueue', '_pgqueue', 'pgmq')
    order by 1"""


def forget(conn: Conn, *like: str) -> None:
    """As in a copy that has the tables and not the values of these sequences."""
    for row in internals.rows(conn, SEQUENCES):
        if any(re.fullmatch(pattern, row.relname) for pattern in like):
            conn.execute(f"alter sequence {row.name} restart".encode())


def refused(attempt: Callable[[], Any]) -> None:
    """The call fails, and says what to do."""
    with pytest.raises(psycopg.Error) as caught:
        attempt()
    assert caught.value.sqlstate == "PQ011", caught.value
    assert "recover()" in (caught.value.diag.message_hint or "")


@pytest.mark.usefixtures("face")
@pytest.mark.promise("restore: sequences without their values")
def test_each_sequence_is_compared_and_moved(conn: Conn, url: str, bills: dict[str, Any]) -> None:
    """All that the catalogue has, in a database in use; and none moves back."""
    known = use(conn, url, internals.insert_messages)
    known.consumers["limited"] = consumer(conn, "limited", max_backlog=1000)
    table_write = Write(conn, bills)
    table_write.stage()
    send(conn)
    conn.execute("select pgmq.create('q'), pgmq.send('q', '{}')")
    assert call(conn, "numbers_behind") == []
    call(conn, "recover")
    before = owed(conn)
    last = dict(
        conn.execute("select sequence::text, last_number from _pgqueue.numbers()").fetchall()
    )
    named = {row.name: row.relname for row in internals.rows(conn, SEQUENCES)}
    left_out = {n for n, r in named.items() if r.startswith(tuple(COUNTS_NO_ROWS))}
    assert set(last) | left_out == set(named)
    assert not set(last) & left_out
    assert call(conn, "numbers_behind") == []

    forget(conn, ".*")
    behind = call(conn, "numbers_behind")
    highest = {row.sequence: row.highest for row in behind}
    used = {n for n, number in last.items() if number > 0}
    # of these, all rows that had a number are gone
    assert used - set(highest) <= {"pgqueue.gap_numbers"}
    assert all(row.last_number < row.highest <= last[row.sequence] for row in behind)
    checks = {check.name: check for check in doctor.checks(url)}
    assert checks["numbers"].status == "fail"
    assert "pgqueue recover" in (checks["numbers"].advice or "")

    call(conn, "recover")
    assert one(conn, "select pg_sequence_last_value('pgqueue.claim_secret') > 0")
    assert call(conn, "numbers_behind") == []
    assert Write(conn, bills).write_no >> 24 == (table_write.write_no >> 24) + 1
    for name, number in highest.items():
        assert one(conn, f"select nextval('{name}')") > number
    assert_delivers(conn, known, before)


def test_a_tables_write_is_compared_by_its_number_alone(conn: Conn) -> None:
    """Without what signs it: else recover() moved the sequence so far that no write followed."""
    conn.execute("create table bills (id int)")
    given = target("public.bills", {"id": "int"})
    for forgotten in (False, True):
        Write(conn, given, f"sink {forgotten}").stage((1,))
        if forgotten:
            forget(conn, "table_write_numbers")
            ((sequence, last, highest),) = call(conn, "numbers_behind")
            assert (sequence, last, highest) == ("pgqueue.table_write_numbers", 0, 2)
        else:
            assert call(conn, "numbers_behind") == []
        call(conn, "recover")
        assert call(conn, "numbers_behind") == []
    later = Write(conn, given, "later").stage((3,), (4,))
    assert later.apply()
    assert one(conn, "select count(*) from bills") == 2


def test_each_column_that_keeps_numbers_of_a_stream_is_asked(conn: Conn) -> None:
    """A new table with messages or publications cannot be forgotten."""
    asked = [
        row.query for row in internals.rows(conn, "select query from _pgqueue.number_holders()")
    ]
    columns = internals.rows(
        conn,
        "select c.relname as table, a.attname as column from pg_class c"
        " join pg_attribute a on a.attrelid = c.oid"
        " where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'"
        " and not c.relispartition and a.attnum > 0 and not a.attisdropped and (a.attname in"
        " ('seq', 'seqs', 'hi', 'publication_ids', 'next_publication', 'last_publication',"
        " 'closed_publication', 'publication_id', 'trim_from', 'below', 'next_below')"
        " or a.atttypid in ('int8multirange'::regtype, 'int8range'::regtype))",
    )
    assert len(columns) > 25
    known = {
        ("trims", "archive_ids"),  # among publication_ids
        ("trims", "hidden_ids"),  # among publication_ids
        ("reader_claims", "arrival_nos"),  # places in a line
        ("consumer_gaps", "excluded"),  # what was taken before
        ("archive_packs", "seqs"),  # in a segment of the archive, which is closed
    }
    for row in columns:
        pattern = rf"\b{row.column}\b.* from pgqueue\.{row.table}\b"
        found = any(re.search(pattern, query) for query in asked)
        assert found or (row.table, row.column) in known, tuple(row)


def make_schedule(conn: Conn) -> None:
    value(conn, "create_schedule", "s", "often", p_every="1 minute", p_data="x")


def staged(conn: Conn) -> None:
    publish(conn, 1, [stage(conn, 1, 2, sink=SINK)], 2, sink=SINK)


def written(conn: Conn) -> None:
    with conn.transaction():
        seqs = internals.insert_messages(conn, 1, 2)
        value(conn, "publish_written", "s", f"{{[{seqs[0]},{seqs[-1] + 1})}}")


@pytest.fixture
def prepared(conn: Conn, face: Conn, stream: int) -> None:
    """What each of `SENDS` needs."""
    consumer(conn)
    value(conn, "create_stream", "from")
    value(conn, "bind", "from", "#", "s")
    conn.execute("create table public.captured (id int primary key)")
    value(conn, "capture", "captured", "s")
    conn.execute("select pgmq.create('q')")


SENDS: dict[str, Callable[[Conn], Any]] = {
    "send": send,
    "send_batch": lambda conn: conn.execute("select pgqueue.send_batch('s', '{a,b}')"),
    "send, copied by a binding": lambda conn: value(conn, "send", "from", "x", p_key="a"),
    "publish_staged": staged,
    "publish_written": written,
    "a captured row": lambda conn: conn.execute("insert into public.captured values (1)"),
    "captured rows": lambda conn: conn.execute("insert into public.captured values (2), (3)"),
    "a schedule": lambda conn: receive(conn),
    "pgmq.send": lambda conn: conn.execute("select pgmq.send('q', '{}')"),
}  # fmt: skip


def publishes_again(conn: Conn, how: str) -> None:
    """It is refused and leaves nothing, until recover() was called; then it is delivered."""
    before = one(conn, "select count(*) from pgqueue.publications")
    refused(lambda: SENDS[how](conn))
    assert one(conn, "select count(*) from pgqueue.publications") == before, how
    value(conn, "recover")
    SENDS[how](conn)
    clock.end_leases(conn)
    assert acked(conn, "s", "c") or one(conn, "select pgmq.read('q', 0, 1)"), how
    if how == "a schedule":
        value(conn, "drop_schedule", "s", "often")
    checker.check(conn)


@pytest.mark.parametrize(
    "forgotten",
    [
        "(seq|publication)",
        *(pytest.param(each, marks=pytest.mark.longer) for each in ("seq", "publication")),
    ],
)
@pytest.mark.promise("restore: sequences without their values")
def test_whatever_publishes_is_refused_and_nothing_of_it_is_seen(
    conn: Conn, prepared: None, forgotten: str
) -> None:
    for how in SENDS:
        sent = [send(conn) for _ in range(3)]
        assert acked(conn, "s", "c")[-3:] == sent
        if how == "a schedule":
            make_schedule(conn)
            clock.pass_time(conn, timedelta(minutes=1))
        forget(conn, rf"{forgotten}_([13]|\d+)")
        if how == "send, copied by a binding":
            conn.execute("select setval('pgqueue.seq_2', 5), setval('pgqueue.publication_2', 5)")
        refused(lambda how=how: SENDS[how](conn))
        publishes_again(conn, how)


def test_a_send_is_refused_where_all_that_its_number_named_was_trimmed(
    conn: Conn, stream: int
) -> None:
    """No key is left that would be there twice, and each consumer has passed the number."""
    consumer(conn)
    value(conn, "set_retention", "s", p_done=True)
    maintain(conn)
    for _ in range(5):
        send(conn)
    assert len(acked(conn, "s", "c")) == 5
    for _ in range(3):
        clock.pass_time(conn, timedelta(hours=1))
        maintain(conn)
    assert internals.count(conn, "publications") == 0
    maintain(conn)  # it notes what the one before has trimmed
    conn.execute("select setval('pgqueue.publication_1', 1)")
    refused(lambda: send(conn))
    value(conn, "recover")
    sent = send(conn)
    assert acked(conn, "s", "c") == [sent]
    checker.check(conn)


@pytest.mark.parametrize("seqs", [True, pytest.param(False, marks=pytest.mark.longer)])
def test_a_number_of_before_that_nothing_has_is_refused(
    conn: Conn, prepared: None, session: Session, seqs: bool
) -> None:
    """Of a rollback: no key is there twice, and each consumer has passed the number."""
    q = one(conn, "select max(stream_id) from pgqueue.streams")
    names = [f"{name}_{id_}" for id_ in (1, q) for name in ("publication", "seq")[: 1 + seqs]]
    last = "select coalesce(pg_sequence_last_value(%s::regclass), 0)"
    for how in SENDS if seqs else ["send"]:
        if how == "a schedule":
            make_schedule(conn)
        before = {name: one(conn, last, f"pgqueue.{name}") for name in names}
        for _ in range(3):
            with session() as other, other.transaction(force_rollback=True):
                for _ in range(2):
                    send(other)
                    other.execute("select pgmq.send('q', '{}')")
            sent = send(conn)
            conn.execute("select pgmq.send('q', '{}')")
            while sent not in acked(conn, "s", "c"):
                pass
        maintain(conn)
        clock.pass_time(conn, timedelta(minutes=1))
        for name, number in before.items():
            conn.execute("select setval(%s, %s)", [f"pgqueue.{name}", number + 3])
        publishes_again(conn, how)


def test_a_claim_that_finds_nothing_says_that_sends_would_be_lost(
    conn: Conn, stream: int, session: Session
) -> None:
    """At once, also where maintain() has not seen the numbers."""
    consumer(conn)
    send(conn)
    with session() as other, other.transaction(force_rollback=True):
        send(other)
    sent = send(conn)
    while sent not in acked(conn, "s", "c"):
        pass
    while cursor_of(conn, "c").gaps:
        receive(conn)
    conn.execute("select setval('pgqueue.publication_1', 1)")
    refused(lambda: receive(conn))
    value(conn, "recover")
    sent = send(conn)
    assert acked(conn, "s", "c") == [sent]
    checker.check(conn)


def test_what_relies_on_the_last_number_is_refused(conn: Conn, stream: int) -> None:
    consumer(conn)
    sent = [send(conn) for _ in range(3)]
    value(conn, "set_retention", "s", p_messages=10)
    assert acked(conn, "s", "c") == sent
    clock.pass_time(conn, timedelta(minutes=2))
    forget(conn, "publication_1", "streams_stream_id_seq", "consumers_consumer_id_seq")
    for attempt in (
        lambda: value(conn, "create_stream", "t"),
        lambda: value(conn, "create_consumer", "s", "d"),
        lambda: value(conn, "create_group", "s", "g"),
        lambda: receive(conn),
    ):
        refused(attempt)
    with warned(conn) as said:
        call(conn, "maintain")
    assert any("sequences of stream 1" in text for text in said)
    value(conn, "recover")
    value(conn, "create_stream", "t")
    value(conn, "create_consumer", "s", "d")
    value(conn, "create_group", "s", "g")
    assert send(conn) > max(sent)


def test_a_reader_gets_no_claim_before_those_that_its_checkpoint_names(
    conn: Conn, stream: int
) -> None:
    """It would count as acknowledged at once."""
    reader, consumer_id = uuid.uuid4(), consumer(conn)
    for _ in range(3):
        send(conn)
    (first,) = call(conn, "reader_claim", reader, consumer_id, 0, 0, 1)
    (second,) = call(conn, "reader_claim", reader, consumer_id, first.claim_id, 1, 1)
    forget(conn, "claim_numbers")
    refused(lambda: call(conn, "reader_claim", reader, consumer_id, second.claim_id, 2, 1))
    value(conn, "recover")
    (third,) = call(conn, "reader_claim", reader, consumer_id, second.claim_id, 2, 1)
    assert third.claim_id > second.claim_id
    assert third.claimed == 1


def test_each_place_that_takes_a_publication_id_compares_it() -> None:
    """In the sources: a new one cannot be forgotten."""
    found = 0
    for path in SQL.glob("**/*.sql"):
        text = path.read_text()
        for match in re.finditer(r"nextval\(p_stream\.publication_numbers\)", text):
            assert "refuse_behind" in text[match.end() : match.end() + 250], path
            found += 1
        assert not re.search(r"nextval\([^)]*publication_%", text), path
    assert found == 2


@pytest.mark.usefixtures("stream")
def test_doctor_reads_the_same_whatever_the_backlog(conn: Conn) -> None:
    consumer(conn)
    read = "select * from pgqueue.numbers_behind(true)"
    for _ in range(3):
        send(conn)
    before = cost(conn, read)
    for _ in range(2000):
        send(conn)
    for seq in range(1, 300):
        value(conn, "dead_letter", claim_of(receive(conn, 1)), p_reason=f"{seq}")
    conn.execute("vacuum analyze")
    assert cost(conn, read) < before * 1.5 + 20
