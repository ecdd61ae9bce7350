"""Tables that a query writes: staged by tasks, and written once as a batch."""
# ruff: noqa: E501  a case is a line

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.embedded import Server
from tests.failover import a_pair
from tests.pooler import pooled
from tests.sql.internals import age_writes
from tests.sql.queue import Conn, Session, maintain, one, publish, stage, value, wait_for_a_lock
from tests.sql.table_writes import Write, content, refusal, staged_tables, target, write

pytestmark = pytest.mark.all_versions


def test_rows_are_seen_when_the_batch_is_done_and_once(conn: Conn) -> None:
    conn.execute("create table public.bills (id bigint, note text default 'none')")
    given = target("public.bills", {"id": "bigint"})
    one = Write(conn, given).stage((1,), (2,)).stage((3,))
    one.stage((9,), wins=False)  # another attempt of a task
    assert content(conn, "bills") == []
    assert one.apply() is True
    assert one.apply() is False
    assert one.drop() is True
    assert one.drop() is False
    assert content(conn, "bills") == [(1, "none"), (2, "none"), (3, "none")]
    assert write(conn, given, (1,), (2,), (3,)) is False, "Spark repeats the batch"
    assert "2 rows, and has 1 now" not in str(refusal(lambda: write(conn, given, (1,))))
    assert refusal(lambda: write(conn, given, (1,))).sqlstate == "PQ010"
    assert len(content(conn, "bills")) == 3


def test_a_merge_keeps_the_last_row_of_a_key_and_deletes_what_is_gone(
    conn: Conn, bills: dict
) -> None:
    assert write(
        conn,
        bills,
        (1, "1.00", 1, False),
        (2, "2.00", 1, None),
        (2, "2.50", 3, False),
        (2, "2.20", 2, True),
    )
    assert content(conn, "bills") == [(1, 1, 1), (2, 2.5, 3)]
    assert write(
        conn, bills, (1, "9.00", 1, False), (2, None, 3, True), (3, "3.00", 1, False), batch=1
    )
    assert content(conn, "bills") == [(1, 1, 1), (3, 3, 1)], (
        "an equal version changes nothing, but deletes"
    )
    conn.execute("update bills set version = null where id = 1")
    assert write(conn, bills, (1, "7.00", 0, False), batch=2)
    assert content(conn, "bills") == [(1, 7, 0), (3, 3, 1)]
    assert write(conn, bills, (5, "1.00", 1, False), (5, "1.00", 1, True), batch=3)
    assert content(conn, "bills") == [(1, 7, 0), (3, 3, 1)], "of equal versions a delete wins"
    assert staged_tables(conn) == set()


def test_without_a_sequence_a_key_is_there_once(conn: Conn) -> None:
    conn.execute("create table public.bills (id bigint primary key, note text)")
    merge = target("public.bills", {"id": "bigint", "note": "string"}, ["id"])
    assert write(conn, merge, (1, "a"), (2, "b"))
    assert write(conn, merge, (1, None), batch=1)
    assert content(conn, "bills") == [(1, None), (2, "b")], "null is null"
    assert refusal(lambda: write(conn, merge, (3, "c"), (3, "d"), batch=2)).sqlstate == "21000"
    deletes = target(
        "public.bills",
        {"id": "bigint", "note": "string", "gone": "boolean"},
        ["id"],
        delete_when="gone",
    )
    for twice in (False, True):
        error = refusal(
            lambda twice=twice: write(conn, deletes, (1, "c", True), (1, "d", twice), batch=3)
        )
        assert error.sqlstate == "21000"
        assert "two rows of one key" in str(error)
    assert write(conn, deletes, (1, "c", True), (3, "d", None), (4, "e", True), batch=3)
    assert content(conn, "bills") == [(2, "b"), (3, "d")]


CHANGES = [
    ("alter table bills rename amount to price", "has no column amount"),
    ("alter table bills alter amount type text", "is decimal(10,2), and must fit"),
    ("alter table bills alter version type bigint", "a column, a type or an index is different"),
    ("alter table bills drop version, add version int", "a column, a type or an index is different"),
    ("alter table bills drop constraint bills_pkey", "p_merge_keys must be the columns of a unique index"),
    ("drop table bills; create table bills (id bigint primary key, amount numeric(10, 2), version int)", "is different"),
    ("drop table bills", "table public.bills was dropped"),
    ("alter table bills rename to invoices", "table public.bills was dropped"),
    ("alter schema public rename to other", "table public.bills was dropped"),
]  # fmt: skip


def test_a_table_that_was_changed_since_the_tasks_staged_is_not_written(
    conn: Conn, bills: dict
) -> None:
    one = Write(conn, bills).stage((1, "1.00", 1, False))
    for change, says in CHANGES:
        with conn.transaction(force_rollback=True):
            conn.execute(change.encode())
            error = refusal(one.apply)
        assert error.sqlstate == "PQ008"
        assert says in str(error)
    assert one.apply()


def test_a_change_waits_for_the_commit_and_a_column_more_does_no_harm(
    conn: Conn, session: Session, bills: dict
) -> None:
    one = Write(conn, bills).stage((1, "1.00", 1, False))
    conn.execute("alter table bills add note text default 'new'")
    other = session()
    other.execute("set lock_timeout = '100ms'")
    with conn.transaction():
        assert one.apply()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("alter table bills rename amount to price")
    assert content(conn, "bills") == [(1, 1, 1, "new")]


def test_staged_rows_that_are_gone_fail_the_batch_and_a_restart_repeats_it(
    conn: Conn, bills: dict
) -> None:
    """As after a crash of Postgres, which empties unlogged tables."""
    one = Write(conn, bills).stage((1, "1.00", 1, False), (2, "2.00", 1, False))
    conn.execute(f"truncate pgqueue.{one.staged}".encode())
    error = refusal(one.apply)
    assert error.sqlstate == "PQ008"
    assert "it has 0 of 2 staged rows for table public.bills" in str(error)
    assert one.drop()
    assert refusal(one.apply).sqlstate == "PQ008"
    assert content(conn, "bills") == []
    assert write(conn, bills, (1, "1.00", 1, False), (2, "2.00", 1, False))
    assert len(content(conn, "bills")) == 2


def test_of_two_commits_of_a_batch_one_does_nothing(
    conn: Conn, session: Session, bills: dict
) -> None:
    rows = [(n, "1.00", 1, False) for n in range(3)]
    first, second = Write(session(), bills).stage(*rows), Write(session(), bills)
    with ThreadPoolExecutor(1) as pool:
        with first._conn.transaction():
            assert first.apply() is True
            slower = pool.submit(second.stage(*rows).apply)
            wait_for_a_lock(conn)
        assert slower.result() is False
    assert len(content(conn, "bills")) == 3


def test_a_later_try_of_a_batch_ends_the_earlier_ones(conn: Conn, bills: dict) -> None:
    killed = Write(conn, bills).stage((1, "1.00", 1, False))
    other = Write(conn, bills, sink="another").stage((1, "1.00", 1, False))
    again = Write(conn, bills).stage((2, "2.00", 1, False))
    assert staged_tables(conn) == {
        again.staged,
        other.staged,
        f"noted {again.write_no}",
        f"noted {other.write_no}",
    }
    for late in (lambda: killed.stage((1, "1.00", 1, False)), killed.apply):
        assert refusal(late).sqlstate == "PQ008"
    assert again.apply()
    assert content(conn, "bills") == [(2, 2, 1)]


def test_a_batch_write_counts_once_for_each_table(conn: Conn) -> None:
    for name in "ab":
        conn.execute(f"create table public.{name} (id int)".encode())
    a, b = (target(f"public.{name}", {"id": "int"}) for name in "ab")
    assert write(conn, a, (1,), sink="txn:x", batch=7)
    assert value(conn, "is_published", "txn:x", None, 7, "public.a") is True
    assert value(conn, "is_published", "txn:x", None, 7, "public.b") is False
    assert value(conn, "is_published", "txn:x", None, 7) is False, "to no stream"
    assert write(conn, b, (1,), sink="txn:x", batch=7)
    for version in (6, 7):
        assert write(conn, a, (2,), (3,), sink="txn:x", batch=version) is False
    assert content(conn, "a") == content(conn, "b") == [(1,)]


def test_a_batch_of_a_query_is_not_written_to_another_table(conn: Conn) -> None:
    """A copy of a checkpoint has the query id of the first."""
    for name in "ab":
        conn.execute(f"create table public.{name} (id int)".encode())
    assert write(conn, target("public.a", {"id": "int"}), (1,))
    error = refusal(lambda: write(conn, target("public.b", {"id": "int"}), (1,)))
    assert error.sqlstate == "PQ010"
    assert "that was to table public.a, and this is to table public.b" in str(error)
    assert write(conn, target("public.b", {"id": "int"}), (1,), batch=1), (
        "the next batch may go elsewhere"
    )


def test_rows_and_messages_appear_together(conn: Conn, stream: int, session: Session) -> None:
    conn.execute("create table public.bills (id bigint)")
    rows, looking = Write(conn, target("public.bills", {"id": "bigint"})).stage((1,)), session()
    chunk = stage(conn, stream, 1)
    with conn.transaction():
        assert rows.apply()
        assert publish(conn, stream, [chunk], 1)
        assert content(looking, "bills") == []
    assert content(looking, "bills") == [(1,)]
    with conn.transaction():
        assert not rows.apply()
        assert not publish(conn, stream, [chunk], 1)


def test_maintain_drops_what_killed_writers_left_and_nothing_of_a_write_at_work(
    conn: Conn, session: Session, bills: dict
) -> None:
    row = (1, "1.00", 1, False)
    done, killed, busy, new = (
        Write(conn, bills, sink=name).stage(row) for name in ("done", "killed", "busy", "new")
    )
    assert done.apply()
    age_writes(conn, [done.write_no], "2 hours")
    age_writes(conn, [killed.write_no, busy.write_no], "2 days")
    at_work = session()
    with at_work.transaction():
        at_work.execute(f"select from pgqueue.{busy.staged}".encode())
        maintain(conn)
    left = {busy.staged, new.staged, f"noted {busy.write_no}", f"noted {new.write_no}"}
    assert staged_tables(conn) == left
    assert busy.apply()
    assert refusal(killed.apply).sqlstate == "PQ008"
    maintain(conn)
    assert staged_tables(conn) == {new.staged, f"noted {new.write_no}"}
    for batch in range(1, 30):
        assert write(conn, bills, row, sink="done", batch=batch)
    maintain(conn)
    assert one(conn, "select count(*) from pgqueue.sink_batches where sink = 'done'") == 10


def test_old_writes_in_use_do_not_keep_a_later_one_from_being_dropped(
    conn: Conn, session: Session, bills: dict
) -> None:
    row = (1, "1.00", 1, False)
    busy = [Write(conn, bills, sink=f"busy {number}").stage(row) for number in range(11)]
    killed = Write(conn, bills, sink="killed").stage(row)
    age_writes(conn, [each.write_no for each in (*busy, killed)], "2 days")
    at_work = session()
    with at_work.transaction():
        for each in busy:
            at_work.execute(f"select from pgqueue.{each.staged}".encode())
        for _ in range(20):  # a call tries ten of the twelve
            maintain(conn)
            if killed.staged not in staged_tables(conn):
                break
        assert staged_tables(conn) >= {each.staged for each in busy}
    assert killed.staged not in staged_tables(conn)


def test_three_writers_with_deletes_do_not_lock_each_other_out(
    conn: Conn, session: Session, bills: dict
) -> None:
    """Keys in any order; the highest version of each key wins, whoever wrote it."""
    conns = [session() for _ in range(3)]
    last: dict[int, tuple[int, bool]] = {}
    rng = random.Random(1)

    def run(number: int) -> None:
        for batch in range(15):
            write(conns[number], bills, *plans[number][batch], sink=f"w{number}", batch=batch)

    plans = [[[(rng.randrange(200), "1.00", batch * 3 + number, rng.random() < 0.3) for _ in range(150)]
              for batch in range(15)] for number in range(3)]  # fmt: skip
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    for key, _, version, gone in (row for each in plans for batch in each for row in batch):
        if (version, gone) > last.get(key, (-1, False)):
            last[key] = (version, gone)
    stored = {row[0]: row[2] for row in content(conn, "bills")}
    # a late row behind a delete comes back: nothing remembers deleted keys
    assert {k: v for k, (v, gone) in last.items() if not gone} == {
        k: v for k, v in stored.items() if not last[k][1]
    }


def test_another_programs_lock_is_waited_for_and_a_deadlock_fails_the_batch_alone(
    conn: Conn, session: Session, bills: dict
) -> None:
    assert write(conn, bills, *((n, "1.00", 1, False) for n in range(2)))
    batch, other = Write(session(), bills, batch=1), session()
    batch.stage((0, "2.00", 2, False), (1, "2.00", 2, False))
    other.execute("set deadlock_timeout = '10 s'")
    with ThreadPoolExecutor(1) as pool, other.transaction():
        other.execute("update bills set amount = 5 where id = 1")
        applied = pool.submit(batch.apply)
        wait_for_a_lock(conn)
        other.execute("update bills set amount = 5 where id = 0")
        with pytest.raises(psycopg.errors.DeadlockDetected):
            applied.result()
    assert batch.apply(), "the driver tries again"
    assert content(conn, "bills") == [(0, 2, 2), (1, 2, 2)]


# A crash, a failover, a pooler.


def crash_test(conn: Conn, again: Callable[[], Conn], crash: Callable[[], None]) -> None:
    """Rows that were staged before a crash are gone; what was written stays; a restart repeats."""
    conn.execute("create table public.t (id int primary key)")
    given = target("public.t", {"id": "int"}, ["id"])
    assert write(conn, given, (1,))
    lost = Write(conn, given, batch=1).stage((2,), (3,))
    crash()
    after = again()
    error = refusal(lambda: lost.apply(after))
    assert error.sqlstate == "PQ008"
    assert "0 of 2 staged rows" in str(error)
    assert content(after, "t") == [(1,)]
    assert write(after, given, (1,)) is False
    assert write(after, given, (2,), (3,), batch=1)
    assert content(after, "t") == [(1,), (2,), (3,)]
    assert staged_tables(after) == set()


@pytest.mark.longer
def test_a_crash_of_postgres_before_the_commit_fails_the_batch_which_is_repeated(
    server: Server, url: str
) -> None:
    with ExitStack() as stack:

        def connect() -> Conn:
            return stack.enter_context(connection.connect(url))

        conn = connect()

        def crash() -> None:
            conn.execute("checkpoint")
            server.restart("immediate")

        crash_test(conn, connect, crash)


@pytest.mark.longer
@pytest.mark.timeout(300)
def test_a_failover_before_the_commit_fails_the_batch_which_is_repeated() -> None:
    with a_pair() as pair, ExitStack() as stack:
        pair.synchronize()

        def connect() -> Conn:
            return stack.enter_context(connection.connect(pair.url))

        def crash() -> None:
            pair.kill()
            pair.promote()

        crash_test(connect(), connect, crash)


@pytest.mark.longer
def test_a_batch_is_written_behind_a_pooler(conn: Conn, url: str, bills: dict) -> None:
    """Each statement may have another backend."""
    with pooled(url, "transaction", 4) as through, connection.connect(through) as pooled_conn:
        for batch in range(3):
            rows = [(n, "1.00", batch, n % 2 == batch % 2) for n in range(6)]
            assert write(pooled_conn, bills, *rows, batch=batch)
    assert {row[2] for row in content(conn, "bills")} == {2}
    assert staged_tables(conn) == set()
