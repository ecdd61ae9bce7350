"""What is asked of a consumer costs what that consumer has, and not what other consumers have.

Each function that names a consumer is called once beside a consumer of another stream that has
nothing, and once more when that one has very much. The blocks that the call reads stay the same.
"""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from tests.sql import internals, queue
from tests.sql.cost import GROWTH, cost
from tests.sql.queue import Conn, one, receive, rows, send_all, value

RUNS = 12_000

LEASES = "pgqueue.lease_partitions('s', 'g', 'worker')"
READER = "'11111111-1111-1111-1111-111111111111', 1"

SCANNED = ("pending", "dead", "archived")

# A call of each function that names a consumer.
CALLS = {
    "alter_consumer": """alter_consumer('s', 'k', '{"per_key_limit": 3}')""",
    "cancel": "cancel('s', 'c', '{4}')",
    "postpone": "postpone('s', 'c', '{4}', now())",
    "claim": "claim('s', 'c', 1)",
    "consumer_available": "consumer_available(1)",
    "consumer_backlog": "consumer_backlog(1)",
    "consumer_lag": "consumer_lag(1)",
    "consumer_position": "consumer_position('s', 'c')",
    "create_group": "create_group('s', 'another group')",
    "drop_consumer": "drop_consumer('s', 'c')",
    "explain_message": "explain_message('s', 'c', 30)",
    "failures": "failures('s', 'c', 30)",
    "key_stats": "key_stats('s', 'k')",
    "lease_partitions": "lease_partitions('s', 'g', 'worker')",
    "leave_group": "leave_group('s', 'g', 'worker')",
    "listen_done": "listen_done('s', 'c')",
    "next_due": "next_due('s', 'c')",
    "note_offset": "note_offset('s', 'noted', pgqueue.start_offset('s', 'latest'))",
    "open_consumer": "open_consumer('s', 'c')",
    "outcome": "outcome('s', 'c', 30)",
    "pause": "pause('s', 'c')",
    "peek": "peek('s', 'c')",
    "plan_partitions": f"plan_partitions('s', 'g', (select array_agg(lease_id) from {LEASES}))",
    "purge_dead": "purge_dead('s', 'c', p_max => 1)",
    "read_dead": "read_dead('s', 'c')",
    "read_partitions": f"read_partitions('s', 'g', (select array_agg(lease_id) from {LEASES}))",
    "reader_ack": f"reader_ack({READER}, 0)",
    "reader_claim": f"reader_claim({READER}, 0, 0, 1)",
    "reader_fork": f"reader_fork({READER}, 0, 0)",
    "reader_others": f"reader_others({READER})",
    "reader_release": f"reader_release({READER}, 0)",
    "reader_resume": f"reader_resume({READER}, 0, 0)",
    "receive": "receive('s', 'c', 1)",
    "receive_where": "receive_where('s', 'c', '$.data == \"x\"', 1)",
    "redrive": "redrive('s', 'c', p_max => 1)",
    "replay": "replay('s', 'c', 'earliest')",
    "resume": "resume('s', 'c')",
    "retry": "retry('s', 'c')",
    **{f"scan, {table}": f"scan('s', '{table}', 'c') m (lo int8, hi int8)" for table in SCANNED},
    "scan_bounds": "scan_bounds('s', 'dead', 'c')",
    "scan_claimed": "scan_claimed('s', 'c') m (lo int8, hi int8)",
    "seek": "seek('s', 'c', 'latest')",
}

# Views, asked for one consumer.
VIEWS = ["consumer_health", "consumer_stats", "dead_letters", "message_states", "open_claims"]


def test_each_function_that_names_a_consumer_has_a_call(conn: Conn) -> None:
    named = rows(
        conn,
        "select distinct proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
        " and proargnames && '{p_consumer, p_consumer_id, p_group}'",
    )
    called = {name.partition(",")[0] for name in CALLS}
    assert {name for (name,) in named} == called - {"alter_consumer", "drop_consumer"}


@pytest.fixture
def other(conn: Conn, stream: int) -> int:
    """A consumer of another stream; and consumers of s, with messages in each state."""
    long = timedelta(days=1)
    queue.consumer(conn, "c", visibility_timeout=long, max_deliver_count=5, keep_history=long)
    queue.consumer(conn, "k", "key", visibility_timeout=long)
    queue.consumer(conn, "paused")
    value(conn, "create_group", "s", "g", p_start="earliest")
    value(conn, "create_group", "s", "noted", 1)
    value(conn, "create_stream", "t")
    other = value(conn, "create_consumer", "t", "other")
    send_all(conn, ["x"] * 30, p_keys=["k", "l", "m"] * 10)
    for name in "ck":
        value(conn, "ack", receive(conn, 3, name)[0].claim_id)
        value(conn, "dead_letter", receive(conn, 2, name)[0].claim_id)
        value(conn, "nack", receive(conn, 2, name)[0].claim_id, p_delay=long)
        receive(conn, 2, name)
    value(conn, "nack", receive(conn, 30, "paused")[0].claim_id)
    value(conn, "pause", "s", "paused")
    return other


def blocks(conn: Conn, query: str) -> int:
    """The blocks that a call reads, when the session has called it before. It changes nothing."""
    found = 0
    for _ in range(2):
        conn.execute("begin")
        try:
            found = cost(conn, query)
        except psycopg.Error as error:
            raise AssertionError(f"{query}: {error}") from error
        finally:
            conn.execute("rollback")
    return found


def test_what_others_have_costs_nothing(conn: Conn, other: int) -> None:
    queries = {name: f"select * from pgqueue.{each}" for name, each in CALLS.items()}
    of_c = "where stream = 's' and consumer = 'c'"
    queries |= {name: f"select * from pgqueue.{name} {of_c}" for name in VIEWS}
    lanes = """select pgqueue.alter_consumer('s', 'paused', '{"fair": true}')"""
    queries["alter_consumer, lanes"] = lanes
    few = {name: blocks(conn, query) for name, query in queries.items()}
    internals.add_all(conn, other, RUNS)
    for tables in ("new", "analyzed"):
        many = {name: blocks(conn, query) for name, query in queries.items()}
        # a level more of an index or two, at each of its probes
        wrong = {
            name: (few[name], many[name]) for name in queries if many[name] > few[name] * 1.6 + 60
        }
        assert not wrong, f"blocks, and with what others have, {tables}: {wrong}"
        conn.execute("analyze")


def test_the_statistics_of_all_consumers_cost_what_each_has(conn: Conn, stream: int) -> None:
    """Not the square of it: each consumer reads its own runs."""
    n = 50

    def each(name: str, first: int) -> float:
        """Blocks for each consumer, when there are so many more."""
        internals.add_consumers(conn, n, name)
        for consumer_id in range(first, first + n):
            internals.add_backlog(conn, consumer_id, 1, 100)
        found = blocks(conn, "select * from pgqueue.consumer_stats")
        return found / internals.count(conn, "consumers")

    few, many = each("idle", 1), each("more", n + 1)
    assert many <= few * 1.3, f"{few} blocks for each consumer, and {many} beside as many others"


def test_who_asks_for_some_states_reads_little_of_the_others(conn: Conn, other: int) -> None:
    """A lane has what is ready and what was claimed a moment ago: it is read, twice at most."""
    asked = [CALLS["scan_claimed"], "key_stats('s', 'c')", "open_claims where consumer = 'c'"]
    queries = [f"select * from pgqueue.{each}" for each in asked]
    few = [blocks(conn, query) for query in queries]
    internals.add_ready(conn, 1001, 1000 + RUNS)
    conn.execute("analyze")
    many = [blocks(conn, query) for query in queries]
    lanes = one(conn, "select pg_relation_size('pgqueue.consumer_messages') / 8192")
    most = [a * 1.6 + 60 + 3 * lanes for a in few]  # and the index
    assert all(b <= c for b, c in zip(many, most, strict=True)), (few, many, lanes)


def test_the_figures_of_a_long_backlog_cost_what_those_of_a_short_one_do(
    conn: Conn, stream: int
) -> None:
    """Also without max_backlog: nothing counts whether the backlog has reached it."""
    queue.consumer(conn)
    costs = []
    for more in (5_000, 50_000):
        internals.publish_singly(conn, stream, more)
        costs.append(min(cost(conn, "select * from pgqueue.consumer_stats") for _ in range(3)))
    assert costs[1] <= costs[0] * GROWTH, f"{costs} blocks of 5,000 and 55,000 publications"
