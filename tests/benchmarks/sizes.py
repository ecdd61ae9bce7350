"""What messages take on the disk, in the write-ahead log, and in a consumer's tables.

Bytes do not depend on what else the machine does, so each is measured once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

import spark_pgqueue
from tests.benchmarks.harness import Bench, Line, run
from tests.benchmarks.publish import create_stream, drop_streams

STORED = "bytes of a message with 100 bytes of data and a key of 10, stored with its index"
LOGGED = "bytes of write-ahead log for each message"
HELD = "bytes in a consumer's tables for each message, with their indexes"
DATA = "x" * 100
TOGETHER = """
select count(*) from pgqueue.send_batch('sizes', array_fill(%s::text, array[%s]),
    (select array_agg('key ' || lpad(g::text, 6, '0')) from generate_series(1, %s) g))
"""
ONE = "select pgqueue.send('sizes', %s, 'key 000001')"
RECEIVE = "select distinct claim_id from pgqueue.receive('sizes', 'c0', %s)"
ACK = "select pgqueue.ack(%s)"


def sizes(bench: Bench) -> None:
    """Run all of it."""
    count = 2_000 if bench.quick else 20_000
    with bench.connect() as conn:
        _stored(bench, conn, count)
        _worked(bench, conn, count)
        _held(bench, conn, count)


def _stored(bench: Bench, conn: psycopg.Connection, count: int) -> None:
    """What sending writes, by how it is sent."""

    def batches() -> None:
        for _ in range(count // 1000):
            run(conn, TOGETHER, (DATA, 1000, 1000))

    def singly() -> None:
        for _ in range(count):
            run(conn, ONE, (DATA,))

    def by_copy() -> None:
        with spark_pgqueue.connect(bench.url) as queue:
            keys = [f"key {i:06}" for i in range(count)]
            queue.send_batch("sizes", [DATA] * count, keys=keys)

    logged: dict[str, float] = {}
    for name, send in (("in batches of 1,000", batches), ("by COPY", by_copy), ("singly", singly)):
        create_stream(conn, "sizes", 3)
        before, began = _sizes(conn), _log(conn)
        send()
        ended, after = _log(conn), _sizes(conn)
        table = _message_table(conn)
        grown = {each: after[each] - before.get(each, 0) for each in after}
        _add(bench, STORED, f"sent {name}", grown[table] / count)
        if name == "singly":
            _add(bench, STORED, "... and its publication", grown["publications"] / count)
        logged[name] = (ended - began) / count
        drop_streams(conn)
    for name, value in logged.items():
        _add(bench, LOGGED, f"sent {name}", value)


def _worked(bench: Bench, conn: psycopg.Connection, count: int) -> None:
    """What claims and acknowledgements write."""
    for size in (1, 10, 100, 1000):
        create_stream(conn, "sizes", 1)
        run(conn, TOGETHER, (DATA, count, count))
        began = _log(conn)
        for _ in range(count // size):
            ((claim,),) = run(conn, RECEIVE, (size,))
            run(conn, ACK, (claim,))
        _add(
            bench,
            LOGGED,
            f"claimed and acknowledged, {size} at a time",
            (_log(conn) - began) / count,
        )
        drop_streams(conn)


def _held(bench: Bench, conn: psycopg.Connection, count: int) -> None:
    """What a consumer's state takes, by what it is."""

    def claim(size: int) -> None:
        for _ in range(count // size):
            run(conn, RECEIVE, (size,))

    def settle_singly(call: str) -> None:
        ((claim_id,),) = run(conn, RECEIVE, (count,))
        seqs = run(conn, "select seq from pgqueue.message_states where state = 'claimed'")
        for number, (seq,) in enumerate(seqs):
            run(
                conn,
                call,
                (claim_id, [seq], number) if call.count("%s") == 3 else (claim_id, [seq]),
            )

    delay = "select pgqueue.nack(%s, %s, make_interval(secs => 3600 + %s))"
    die = "select pgqueue.dead_letter(%s, %s)"
    ack = "select pgqueue.ack(%s, %s, '{}')"
    cases: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "new, whatever the number of consumers": (lambda: None, {}),
        "claimed, 100 at a time": (lambda: claim(100), {}),
        "claimed, 1 at a time": (lambda: claim(1), {}),
        "delayed, each by its own time": (lambda: settle_singly(delay), {}),
        "dead, one by one": (lambda: settle_singly(die), {}),
        "in the history, one by one": (lambda: settle_singly(ack), {"keep_history": "1 day"}),
    }
    for name, (work, settings) in cases.items():
        create_stream(conn, "sizes", 1)
        run(conn, "select pgqueue.alter_consumer('sizes', 'c0', %s)", (Jsonb(settings),))
        run(conn, TOGETHER, (DATA, count, count))
        before = _packed(conn)
        work()
        _add(bench, HELD, name, (_packed(conn) - before) / count)
        drop_streams(conn)
    create_stream(conn, "sizes", 1)
    run(conn, """select pgqueue.alter_stream('sizes', '{"dedup_window": "1 day"}')""")
    before = _packed(conn)
    send = "select count(*) from pgqueue.send_batch('sizes', %s, p_dedup_keys => %s)"
    run(conn, send, ([DATA] * count, [f"a dedup key of 30 bytes {i:06}" for i in range(count)]))
    _add(bench, HELD, "of a stream: a dedup key of 30 bytes", (_packed(conn) - before) / count)
    drop_streams(conn)


def _sizes(conn: psycopg.Connection) -> dict[str, int]:
    """Bytes of each table of the schema, with indexes and what is stored beside it."""
    sql = """select relname, pg_total_relation_size(oid) from pg_class
             where relnamespace = 'pgqueue'::regnamespace and relkind = 'r'"""
    return dict(run(conn, sql))  # type: ignore[arg-type]


def _packed(conn: psycopg.Connection) -> int:
    """Bytes of all tables but those of messages, without what is dead in them."""
    total = 0
    for name in _sizes(conn):
        if not name.startswith("messages_"):
            conn.execute(f"vacuum full pgqueue.{name}".encode())
            total += _sizes(conn)[name]
    return total


def _message_table(conn: psycopg.Connection) -> str:
    ((name,),) = run(conn, "select format('messages_%s', stream_id) from pgqueue.streams")
    return name


def _log(conn: psycopg.Connection) -> int:
    """How much was ever written to the log."""
    return int(run(conn, "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])


def _add(bench: Bench, group: str, name: str, value: float) -> None:
    bench.report.add(Line(group, name, value, "bytes"))
