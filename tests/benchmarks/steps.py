"""What one receive and its acknowledgement cost, function by function: `sql/README.md` has it.

    .venv/bin/python -m tests.benchmarks.steps

Times are those of functions themselves, without those that they call (pg_stat_user_functions), per
message; blocks and WAL are those of a single call. The server is an embedded one, with its usual
settings.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from statistics import median

import psycopg

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema

CALLS = 2_000
RECEIVE = "select claim_id from pgqueue.receive('s', 'c', 1)"
ACK = "select pgqueue.ack(%s)"

Case = tuple[str, str, int]
CASES: list[Case] = [
    ("none, a new message", "none", 1),
    ("none, a ready message", "none", 0),
    ("key, an assigned message", "key", 0),
    ("key, one of two new messages, which are assigned", "key", 2),
]
"""What is measured: its name, the consumer's ordering, and how many messages are sent before each
receive; 0: all are sent before."""


def main() -> None:
    """Measure all cases, each on a new stream."""
    with (
        tempfile.TemporaryDirectory(prefix="pgqueue-steps-") as folder,
        embedded.start(Path(folder) / "data") as server,
        connection.connect(server.url) as conn,
    ):
        schema.install(conn)
        for case in CASES:
            measure(conn, *case)


def measure(conn: psycopg.Connection, name: str, ordering: str, fresh: int) -> None:
    """Measure one case, and print it."""
    conn.execute("select pgqueue.drop_stream(stream) from pgqueue.stream_stats")
    conn.execute("select pgqueue.create_stream('s')")
    conn.execute("select pgqueue.create_consumer('s', 'c', p_ordering => %s)", [ordering])
    if fresh == 0:
        for number in range(2 * CALLS):
            send(conn, number)

    def one(number: int) -> None:
        for i in range(fresh):
            send(conn, fresh * number + i)
        (claim,) = conn.execute(RECEIVE).fetchall()
        conn.execute(ACK, claim)
        if fresh > 1:  # the others are not counted
            conn.execute("set track_functions = 'none'")
            clear(conn)
            conn.execute("set track_functions = 'all'")

    for number in range(CALLS // 10):
        one(number)
    conn.execute("set track_functions = 'all'")
    conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select pg_stat_reset()")
    for number in range(CALLS):
        one(number)
    conn.execute("select pg_stat_force_next_flush()")
    found = conn.execute(
        "select schemaname || '.' || funcname, calls, self_time * 1000, total_time * 1000"
        " from pg_stat_user_functions where funcname not in ('send', 'publish')"
        " and calls > %s order by total_time desc",
        [CALLS // 20],
    ).fetchall()
    conn.execute("set track_functions = 'none'")
    print(f"\n{name}\n  {'function':34}{'calls':>7}{'self us':>9}{'total us':>9}")
    for function, calls, own, total in found:
        print(f"  {function:34}{calls / CALLS:7.2f}{own / CALLS:9.1f}{total / CALLS:9.1f}")
    costs = [cost(conn, fresh) for _ in range(20)]
    for what, at in (("receive", 0), ("ack", 1)):
        blocks, records, size = (median(each[at][i] for each in costs) for i in range(3))
        print(f"  {what}: {blocks:.0f} blocks, {records:.0f} WAL records of {size:.0f} bytes")


def send(conn: psycopg.Connection, number: int) -> None:
    """Send a small message; a thousand keys take turns."""
    conn.execute("select pgqueue.send('s', 'a message', p_key => %s)", [f"key {number % 1000}"])


def clear(conn: psycopg.Connection) -> None:
    """Receive and acknowledge all that is left."""
    while claims := conn.execute(RECEIVE).fetchall():
        conn.execute(ACK, claims[0])


def cost(conn: psycopg.Connection, fresh: int) -> list[list[int]]:
    """Blocks, WAL records and their bytes: of a receive, and of its acknowledgement."""
    for number in range(fresh):
        send(conn, number)
    received = explained(conn, RECEIVE)
    (claim,) = conn.execute("select claim_id from pgqueue.open_claims").fetchall()
    found = [received, explained(conn, f"select pgqueue.ack({claim[0]})")]
    if fresh > 1:
        clear(conn)
    return found


def explained(conn: psycopg.Connection, query: str) -> list[int]:
    """What a statement reads and writes."""
    lines = conn.execute(f"explain (analyze, buffers, wal, costs off) {query}".encode()).fetchall()
    plan = "\n".join(line for (line,) in lines)
    patterns = (r"shared hit=(\d+)", r"records=(\d+)", r"bytes=(\d+)")
    return [int(found[1]) if (found := re.search(each, plan)) else 0 for each in patterns]


if __name__ == "__main__":
    main()
