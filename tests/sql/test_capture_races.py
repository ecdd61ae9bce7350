"""Capture beside others: writers, other captures, and those who alter, rename or drop the table."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql.queue import Conn, Session, call, consumer, one, raises, wait_for_a_lock
from tests.sql.test_capture import TABLE, apply, content, messages

pytestmark = pytest.mark.usefixtures("allowed_afterwards")

FUNCTIONS = "select count(*) from pg_proc where proname like 'pgqueue\\_%'"
TRIGGERS = "select count(*) from pg_trigger where tgname like 'pgqueue\\_%'"


@pytest.fixture(autouse=True)
def prepared(conn: Conn, stream: int) -> None:
    """The table t, and a consumer c that gets everything in its order."""
    consumer(conn, ordering="stream")
    conn.execute(TABLE)


def test_a_stream_to_which_a_table_is_being_captured_is_not_dropped(
    conn: Conn, session: Session
) -> None:
    """drop_stream() waits for the capture, and finds it then."""
    other = session()
    with ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            call(conn, "capture", "t", "s")
            dropped = pool.submit(call, other, "drop_stream", "s")
            wait_for_a_lock(conn)
        with raises("2BP01", "table public.t is captured to stream 's'"):
            dropped.result(20)
    conn.execute("insert into t values (1)")
    assert len(messages(conn)) == 1


class Writer:
    """A session that does anything to a few rows of t, in transactions of any shape."""

    def __init__(self, url: str, number: int) -> None:
        self.chance, self.number = Random(number), number
        self.conn = connection.connect(url)
        # they do block each other
        self.conn.execute("set deadlock_timeout = '5ms'")

    def statement(self) -> str:
        chance = self.chance
        a, b = chance.randrange(12), chance.randrange(12)
        rows = f"from generate_series({min(a, b)}, {max(a, b)}) i"
        return chance.choice([
            f"insert into t select i, 'by {self.number}', 0 {rows}"
            " on conflict (id) do update set price = t.price + 1",
            f"insert into t select i, 'new' {rows} on conflict do nothing",
            f"insert into t values ({a})",
            f"update t set name = 'at ' || id, price = {b} where id in ({a}, {b})",
            f"update t set name = 'all' where id > {a}",
            f"update t set id = id + 3 where id in ({a}, {b})",
            f"update t set id = -id where abs(id) > {a}",
            f"delete from t where id = {a}",
            f"delete from t where id between {min(a, b)} and {max(a, b)}",
            "truncate t" if chance.random() < 0.3 else "delete from t where id < 0",
        ])  # fmt: skip

    def transaction(self) -> None:
        """Some statements; some are undone, after an error or without one."""
        if self.chance.random() < 0.3:
            self.attempt(self.statement())
            return
        self.conn.execute("begin")
        for _ in range(self.chance.randint(1, 4)):
            self.conn.execute("savepoint s")
            if not self.attempt(self.statement()) or self.chance.random() < 0.3:
                self.conn.execute("rollback to s")
        self.conn.execute(self.chance.choice([b"commit", b"commit", b"rollback"]))

    def attempt(self, statement: str) -> bool:
        try:
            self.conn.execute(statement.encode())
        except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
            return False
        return True


@contextmanager
def writing(pool: ThreadPoolExecutor, url: str, writers: int) -> Iterator[None]:
    """So many writers, beside the test."""
    over = threading.Event()

    def write(number: int) -> None:
        writer = Writer(url, number)
        with writer.conn:
            while not over.is_set():
                writer.transaction()

    writes = [pool.submit(write, number) for number in range(writers)]
    try:
        yield
    finally:
        over.set()
    for each in writes:
        each.result()


@pytest.mark.parametrize("columns", [None, ["id", "price"]], ids=["whole rows", "some columns"])
def test_a_copy_made_from_the_messages_is_the_table_whatever_sessions_do(
    conn: Conn, url: str, columns: list[str] | None
) -> None:
    """Random statements, savepoints, rollbacks, deadlocks; the copy is kept meanwhile."""
    call(conn, "capture", "t", "s", None, columns)
    copy: dict[str | None, Any] = {}
    with ThreadPoolExecutor(4) as pool, writing(pool, url, 4):
        end = time.monotonic() + 60
        while one(conn, "select last_value from pgqueue.seq_1") < 400 and time.monotonic() < end:
            apply(copy, messages(conn))
    apply(copy, messages(conn))
    rows = content(conn)
    if columns:
        rows = {key: {c: row[c] for c in columns} for key, row in rows.items()}
    assert copy == rows
    assert one(conn, "select last_value > 100 from pgqueue.seq_1"), "much was written"


@pytest.mark.promise("feature: changes of tables with the rows that were there")
def test_a_copy_begun_beside_writers_is_the_table(conn: Conn, url: str, session: Session) -> None:
    """Capture, then copy, then apply what was captured since."""
    with ThreadPoolExecutor(2) as pool, writing(pool, url, 2):
        for _ in range(3):
            call(session(), "capture", "t", "s")
            copy: dict[str | None, Any] = {**content(conn)}
            for _ in range(10):
                apply(copy, messages(conn))
            call(session(), "release", "t", "s")
            apply(copy, messages(conn))
    assert (one(conn, FUNCTIONS), one(conn, TRIGGERS)) == (0, 0)
    call(conn, "capture", "t", "s")
    copy = {**content(conn)}
    conn.execute("insert into t values (100), (101); delete from t where id = 100")
    apply(copy, messages(conn))
    assert copy == content(conn)


def test_capture_begins_after_those_who_are_writing(conn: Conn, session: Session) -> None:
    """What they write is in the table when capture returns, and all that comes later is sent."""
    writer, other = session(), session()
    writer.execute("begin")
    writer.execute("insert into t values (1)")
    with ThreadPoolExecutor(1) as pool:
        capturing = pool.submit(call, other, "capture", "t", "s")
        wait_for_a_lock(conn)
        writer.execute("commit")
        capturing.result(timeout=20)
    conn.execute("insert into t values (2)")
    assert [key for key, *_ in messages(conn)] == ["2"]


def test_a_transaction_whose_snapshot_is_older_than_the_capture_sends(
    conn: Conn, session: Session
) -> None:
    writer = session()
    writer.execute("begin isolation level repeatable read")
    writer.execute("select 1")
    call(conn, "capture", "t", "s")
    writer.execute("insert into t values (1)")
    writer.execute("commit")
    assert [key for key, *_ in messages(conn)] == ["1"]


def test_release_waits_for_those_who_are_writing_and_what_they_write_is_sent(
    conn: Conn, session: Session
) -> None:
    call(conn, "capture", "t", "s")
    writer, other = session(), session()
    writer.execute("begin")
    writer.execute("insert into t values (1)")
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(call, other, "release", "t", "s")
        wait_for_a_lock(conn)
        conn.execute("insert into t values (2)")
        writer.execute("insert into t values (3)")
        writer.execute("commit")
        releasing.result(timeout=20)
    conn.execute("insert into t values (4)")
    assert sorted(key or "" for key, *_ in messages(conn)) == ["1", "2", "3"]


@pytest.mark.parametrize("fate", ["commit", "rollback"])
def test_of_two_who_capture_a_table_at_once_the_last_one_says_how(
    conn: Conn, session: Session, opened: Session, fate: str
) -> None:
    """Also beside one who reads the table: a capture that is replaced waits for him."""
    first, reader, second = opened(), opened(), session()
    reader.execute("select from t")
    call(first, "capture", "t", "s", None, ["id"])
    with ThreadPoolExecutor(1) as pool:
        capturing = pool.submit(call, second, "capture", "t", "s", ["name"], ["name"])
        wait_for_a_lock(conn)
        first.execute(fate.encode())
        if fate == "commit":
            with pytest.raises(TimeoutError):
                capturing.result(timeout=0.5)
            reader.execute("commit")
        capturing.result(timeout=20)
    conn.execute("insert into t values (1, 'a')")
    assert messages(conn) == [("a", "insert", {"name": "a"})]
    assert one(conn, "select count(*) from pgqueue.captures") == 1
    assert one(conn, FUNCTIONS) == 4
    first.execute("begin isolation level repeatable read")
    with raises("PQ007"):  # it might not see what another did
        call(first, "capture", "t", "s")


@pytest.mark.parametrize(
    ("meanwhile", "code", "says"),
    [
        ("alter table t drop price", "PQ003", "p_columns names price, which is not a column of"),
        ("drop table t", "PQ003", "p_table must be a table, not"),
        ("drop table t; create table t (price int primary key)", "PQ003", "which was dropped"),
        ("alter table t rename to u", None, ""),
        ("alter table t rename to u; create table t (price int primary key)", None, ""),
    ],
)
def test_a_table_that_is_altered_while_capture_waits(
    conn: Conn, session: Session, meanwhile: str, code: str | None, says: str
) -> None:
    altering, other = session(), session()
    altering.execute("begin")
    altering.execute(meanwhile.encode())
    oid = one(conn, "select oid from pg_class where relname = 't'")  # as a statement has it early
    with ThreadPoolExecutor(1) as pool:
        capturing = pool.submit(call, other, "capture", oid, "s", None, ["id", "price"])
        wait_for_a_lock(conn)
        altering.execute("commit")
        if code:
            with raises(code, says):
                capturing.result(timeout=20)
            assert (one(conn, FUNCTIONS), one(conn, TRIGGERS)) == (0, 0)
            return
        capturing.result(timeout=20)
    conn.execute("insert into u values (1)")
    assert messages(conn) == [("1", "insert", {"id": 1, "price": None})]
    assert one(conn, "select tgrelid::regclass::text from pg_trigger where not tgisinternal"
                     " and tgname like '%insert'") == "u"  # fmt: skip


@pytest.mark.longer
def test_capture_gives_up_when_a_writer_stays(conn: Conn, session: Session) -> None:
    """And so does release when a reader stays."""
    conn.execute("create table u (id int primary key)")
    call(conn, "create_stream", "other")  # of one stream, each would wait for the other
    call(conn, "capture", "u", "other")
    writer, reader = session(), session()
    writer.execute("begin")
    writer.execute("insert into t values (1)")
    reader.execute("begin")
    reader.execute("select from u")
    with ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(call, session(), *given)
            for given in (("capture", "t", "s"), ("release", "u", "other"))
        ]
    for wait in waits:
        with raises("55P03", "within 30 s"):
            wait.result()
    writer.execute("commit")
    call(conn, "capture", "t", "s")
    conn.execute("insert into t values (2); insert into u values (3)")
    assert [key for key, *_ in messages(conn)] == ["2"]
    captured = call(conn, "peek_at", "other", 1)
    assert [row.key for row in captured] == ["3"], "u is captured as before"


# The table changes, or goes


def test_what_the_messages_need_is_neither_dropped_nor_changed(conn: Conn) -> None:
    call(conn, "capture", "t", "s", None, ["id", "name"])
    for statement, says in (
        ("alter table t drop id", "pgqueue_1_t_key"),
        ("alter table t drop name", "pgqueue_1_t_row"),
        ("alter table t alter id type bigint", "pgqueue_1_t"),
        ("drop table t", "pgqueue_1_t"),
    ):
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(statement.encode())
        assert says in f"{caught.value} {caught.value.diag.message_detail}"
    with conn.transaction():
        call(conn, "release", "t", "s")
        conn.execute("alter table t alter id type bigint; alter table t drop name")
        call(conn, "capture", "t", "s")
    conn.execute("insert into t values (1, 2)")
    assert messages(conn) == [("1", "insert", {"id": 1, "price": 2})]


def test_with_another_primary_key_messages_keep_the_key_until_it_is_captured_again(
    conn: Conn,
) -> None:
    call(conn, "capture", "t", "s")
    conn.execute("alter table t drop constraint t_pkey, add primary key (name)")
    conn.execute("insert into t values (1, 'a')")
    call(conn, "capture", "t", "s")
    conn.execute("update t set price = 1")
    conn.execute("alter table t rename name to title; alter table t add name text")
    conn.execute("update t set name = 'x'")
    assert [key for key, *_ in messages(conn)] == ["1", "a", "a"]


@pytest.mark.parametrize("then", ["capture", "release"])
def test_what_a_dropped_table_leaves_behind_goes_with_the_next_capture_or_release(
    conn: Conn, then: str
) -> None:
    conn.execute("create table u (id int primary key); create table v (id int primary key)")
    for table in ("t", "u", "v"):
        call(conn, "capture", table, "s")
    conn.execute(
        "create table p (id int primary key, name text) partition by list (id);"
        "create table p1 (name text, id int not null);"
        "alter table p attach partition p1 for values in (1)"
    )
    call(conn, "capture", "p", "s")
    # one whose triggers are only made: as while a dump is restored
    conn.execute("drop trigger pgqueue_1_insert on v; drop trigger pgqueue_1_update on v")
    conn.execute("drop trigger pgqueue_1_delete on v; drop trigger pgqueue_1_truncate on v")
    conn.execute("drop table t cascade; drop table p1 cascade")
    left = "select count(*) from pg_proc where proname ~ '^pgqueue_1_(t|p_[0-9]+)$'"
    assert one(conn, left) == 2
    conn.execute(TABLE)
    call(conn, then, "t" if then == "capture" else "u", "s")
    assert one(conn, left) == (then == "capture")
    assert one(conn, "select count(*) from pg_proc where proname like 'pgqueue\\_1\\_v%'") == 4
    if then == "capture":
        conn.execute("insert into t values (1)")
        assert one(conn, "select oid::regproc::text from pg_proc where proname = 'pgqueue_1_t'")
        assert [key for key, *_ in messages(conn)] == ["1"]
