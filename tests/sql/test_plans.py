"""Index probes only: what a claim costs depends on what it touches, and on nothing else.

Costs are blocks of shared memory that a call reads, nested statements included, and not times:
they hold on a busy machine. Each is compared with the same call on a small queue.
"""

from __future__ import annotations

import statistics

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql.queue import call, claim_of, one, value

MANY = 1_000_000
# A page or two more per level of a larger index, in each of some fifty probes of a claim.
GROWTH = 1.6


def cost(conn: psycopg.Connection, query: str, *args: object) -> int:
    """The blocks that a statement reads, written ones not counted twice."""
    plan = one(conn, "explain (analyze, buffers, format json) " + query, *args)
    root = plan[0]["Plan"]
    return root["Shared Hit Blocks"] + root["Shared Read Blocks"]


def claim_cost(conn: psycopg.Connection, consumer: str, size: int = 1, n: int = 9,
               settle: str | None = "ack") -> tuple[float, float]:  # fmt: skip
    """The median blocks of a claim and of settling it."""
    claims, settled = [], []
    for _ in range(n):
        claims.append(cost(conn, "select * from pgqueue.claim('s', %s, %s)", consumer, size))
        if settle:
            claim_id = one(
                conn,
                "select max(claim_id) from pgqueue.claims join pgqueue.consumers"
                " using (consumer_id) where name = %s",
                consumer,
            )
            assert claim_id is not None, "nothing was claimed"
            settled.append(cost(conn, f"select pgqueue.{settle}(%s)", claim_id))
    # Without the first ones, which also fill the caches of the session.
    return statistics.median(claims[3:]), statistics.median(settled[3:] or [0])


def bulk(conn: psycopg.Connection, n: int, keys: str = "null") -> None:
    """Publish n messages with one row of publications, without their way through Python."""
    conn.execute(
        (
            "with m as (insert into pgqueue.messages (seq, stream_id, key, data)"
            f" select nextval('pgqueue.seq_1'), 1, {keys}, 'x' from generate_series(1, {n}) i"
            " returning seq)"
            " select pgqueue.stage('bulk', nextval('pgqueue.claims_claim_id_seq'), 1,"
            " int8multirange(int8range(min(seq), max(seq), '[]'))) from m"
        ).encode()
    )
    conn.execute(
        "select pgqueue.publish_staged('bulk', batch, 1, array[staged_id], n)"
        " from pgqueue.staged_writes"
    )


def singles(conn: psycopg.Connection, n: int, start: str = "null") -> None:
    """Publish n messages with a row of publications each. (Nobody reads their payloads.)"""
    conn.execute(
        (
            "insert into pgqueue.publications (publication_id, n, published_at, deliver_at,"
            " stream_id, priority, seqs) select nextval('pgqueue.publication_1'), 1, now(),"
            f" {start}, 1, 0, int8multirange(int8range(s, s, '[]'))"
            f" from (select nextval('pgqueue.seq_1') as s from generate_series(1, {n}) i) x"
        ).encode()
    )


@pytest.fixture
def stream(conn: psycopg.Connection) -> int:
    return value(conn, "create_stream", "s")


def consumer(conn: psycopg.Connection, name: str, ordering: str = "none") -> int:
    return value(conn, "create_consumer", "s", name, "earliest", ordering, None, "1 day")


def assert_flat(what: str, few: tuple[float, float], many: tuple[float, float]) -> None:
    for name, a, b in zip(("claim", "settlement"), few, many, strict=True):
        assert b <= a * GROWTH + 15, f"{what}: a {name} reads {a} blocks, and with many {b}"


@pytest.mark.parametrize("ordering", ["none", "key", "stream"])
@pytest.mark.parametrize("size", [1, 100])
def test_the_backlog_costs_nothing(
    conn: psycopg.Connection, stream: int, ordering: str, size: int
) -> None:
    consumer(conn, "few", ordering)
    bulk(conn, 1000)
    few = claim_cost(conn, "few", size)
    bulk(conn, 200_000 if ordering == "key" else 50_000)
    singles(conn, MANY // 2)
    consumer(conn, "many", ordering)
    assert_flat("a backlog", few, claim_cost(conn, "many", size))


def test_a_backlog_of_a_million_single_messages_costs_nothing(
    conn: psycopg.Connection, stream: int
) -> None:
    consumer(conn, "c")
    singles(conn, 1000)
    few = claim_cost(conn, "c", 1)
    singles(conn, MANY)
    # The first claim takes up to 10,000 of them; the next ones live on those.
    assert_flat("a backlog", few, claim_cost(conn, "c", 1))


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_what_is_in_flight_delayed_or_waiting_costs_nothing(
    conn: psycopg.Connection, stream: int, ordering: str
) -> None:
    """100,000 keys claimed one by one, delayed, or behind others."""
    consumer(conn, "c", ordering)
    for _ in range(3):
        bulk(conn, 100, "'k' || i")
    call(conn, "claim", "s", "c", 1)  # with no other claim open, keys are not looked at
    few = claim_cost(conn, "c", 1)
    state = "state, rank, priority, deliver_count, position, turn, first_seq, n, seqs, key"
    in_flight = "m.state, 0, 0, 1, 0, 0, -i, 1, int8multirange(int8range(-i, -i, '[]')), m.key"
    conn.execute(
        (
            f"insert into pgqueue.consumer_messages (consumer_id, {state}, claim_id,"
            " not_visible_until)"
            f" select 1, {in_flight}, case when m.state = 'claimed' then i + 1000000 end,"
            " case when m.state = 'delayed' then now() + interval '1 day' end"
            " from generate_series(1, 100000) i cross join lateral"
            " (select case i % 3 when 0 then 'claimed' when 1 then 'delayed' else 'waiting' end"
            "  as state,"
            f"  case when {ordering == 'key'} then 'other' || i / 3 end as key) m"
            f" where {ordering == 'key'} or i % 3 < 2"
        ).encode()
    )
    conn.execute(
        "insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until,"
        " visibility_timeout, n, remaining) overriding system value"
        " select claim_id, 1, %s, now(), now() + interval '1 day', interval '1 day', 1, 1"
        " from pgqueue.consumer_messages where claim_id > 1000000",
        [ordering == "key"],
    )
    if ordering == "key":
        conn.execute(
            "update pgqueue.consumer_cursors set aside ="
            " (select count(*) from pgqueue.consumer_messages where key is not null"
            "  and state <> 'claimed'),"
            " open_claims = (select count(*) from pgqueue.claims)"
        )
    many = claim_cost(conn, "c", 1)
    assert_flat("what is in flight", few, many)


def test_runs_that_fit_exactly_leave_nothing_to_walk_over_beside_an_old_snapshot(
    conn: psycopg.Connection, stream: int, url: str
) -> None:
    consumer(conn, "c")
    bulk(conn, 100)
    call(conn, "claim", "s", "c", 1)
    few = claim_cost(conn, "c", 1)
    conn.execute(
        "insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count,"
        " position, turn, first_seq, n, seqs) select 1, 'ready', 0, 0, 0, 2, 2, i, 1,"
        " int8multirange(int8range(i, i, '[]')) from generate_series(1001, 9000) i"
    )
    with connection.connect(url) as other, other.transaction():
        other.execute("set transaction isolation level repeatable read")
        other.execute("select count(*) from pgqueue.consumer_messages")
        for _ in range(70):
            (row,) = call(conn, "claim", "s", "c", 100)
            call(conn, "ack", row.claim_id)
        assert_flat("what was claimed", few, claim_cost(conn, "c", 1))


def test_a_hundred_consumers_cost_nothing(conn: psycopg.Connection, stream: int) -> None:
    consumer(conn, "c")
    bulk(conn, 1000)
    few = claim_cost(conn, "c")
    send = statistics.median(cost(conn, "select pgqueue.send('s', 'x')") for _ in range(9))
    for i in range(100):
        consumer(conn, f"c{i}")
        call(conn, "claim", "s", f"c{i}", 10)
    assert_flat("a hundred consumers", few, claim_cost(conn, "c"))
    after = statistics.median(cost(conn, "select pgqueue.send('s', 'x')") for _ in range(9))
    assert after <= send + 2, f"a send reads {send} blocks, and {after} with a hundred consumers"


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_an_expiry_costs_what_it_releases(
    conn: psycopg.Connection, stream: int, ordering: str
) -> None:
    consumer(conn, "c", ordering)

    def expiry() -> float:
        costs = []
        for _ in range(5):
            call(conn, "claim", "s", "c", 10)
            conn.execute(
                "update pgqueue.claims set lease_until = now() - interval '1 s';"
                "update pgqueue.consumer_cursors set lease_probe = '-infinity'"
            )
            costs.append(cost(conn, "select * from pgqueue.claim('s', 'c', 10)"))
            conn.execute("select pgqueue.ack(claim_id) from pgqueue.claims")
        return statistics.median(costs[2:])

    bulk(conn, 1000, "'k' || i")
    few = expiry()
    bulk(conn, 100_000, "'k' || i")
    many = expiry()
    assert many <= few * GROWTH + 15, f"an expiry reads {few} blocks, and {many} with a backlog"


def traffic(conn: psycopg.Connection, rounds: int, behind: bool) -> list[int]:
    """100 published and 100 claimed over 5,000 keys; the costs of the claims."""
    costs = []
    held: list[int] = []
    for i in range(rounds):
        keys = [f"k{(i * 100 + j) * 7919 % 5000}" for j in range(100)]
        call(conn, "send_batch", "s", ["x"] * 100, p_keys=keys)
        costs.append(cost(conn, "select * from pgqueue.claim('s', 'c', 100)"))
        held.append(one(conn, "select max(claim_id) from pgqueue.claims"))
        if len(held) > (2 if behind else 0):  # some are in flight all the time
            value(conn, "ack", held.pop(0))
    for claim_id in held:
        value(conn, "ack", claim_id)
    return costs


@pytest.mark.parametrize("behind", [False, True], ids=["alone", "others"])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_dead_rows_that_an_old_snapshot_holds_cost_nothing(
    conn: psycopg.Connection, url: str, stream: int, ordering: str, behind: bool
) -> None:
    """Thousands of claims beside a REPEATABLE READ transaction."""
    consumer(conn, "c", ordering)
    with connection.connect(url) as old:
        few = statistics.median(traffic(conn, 40, behind)[10:])
        old.execute("begin transaction isolation level repeatable read")
        old.execute("select count(*) from pgqueue.consumers")
        costs = traffic(conn, 600, behind)
        many = statistics.median(costs[-40:])
        old.execute("commit")
    assert many <= few * GROWTH + 50, f"a claim read {few} blocks, and {many} in the end"


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_single_claims_beside_an_old_snapshot_cost_nothing(
    conn: psycopg.Connection, url: str, stream: int, ordering: str
) -> None:
    consumer(conn, "c", ordering)
    bulk(conn, 20_000, "'k' || i")
    with connection.connect(url) as old:
        few = claim_cost(conn, "c", 1, 20)
        old.execute("begin transaction isolation level repeatable read")
        old.execute("select count(*) from pgqueue.consumers")
        for _ in range(3000):
            rows = call(conn, "claim", "s", "c", 1)
            value(conn, "ack", claim_of(rows))
        many = claim_cost(conn, "c", 1, 20)
        old.execute("commit")
    assert_flat("dead rows", few, many)


@pytest.mark.parametrize("ordering", ["none", "key", "stream"])
def test_polling_an_empty_queue_writes_nothing(
    conn: psycopg.Connection, stream: int, ordering: str
) -> None:
    consumer(conn, "c", ordering)
    bulk(conn, 10)
    value(conn, "ack", claim_of(call(conn, "receive", "s", "c", 1000)))
    call(conn, "receive", "s", "c")
    for _ in range(20):
        conn.execute("begin")
        assert call(conn, "receive", "s", "c") == []
        assert one(conn, "select pg_current_xact_id_if_assigned()") is None
        conn.execute("commit")


def test_a_hot_key_costs_the_others_nothing(conn: psycopg.Connection, stream: int) -> None:
    """The line behind a busy key is set aside once, and then not looked at again."""
    consumer(conn, "c", "key")
    bulk(conn, 20_000, "'hot'")
    bulk(conn, 1000, "'k' || i")
    rows = call(conn, "receive", "s", "c", 1)
    assert rows[0].key == "hot"
    hot = claim_of(rows)
    costs = [cost(conn, "select * from pgqueue.claim('s', 'c', 1)") for _ in range(30)]
    assert statistics.median(costs[10:]) < 1000, costs
    assert one(conn, "select count(*) from pgqueue.claims") == 31
    assert cost(conn, "select pgqueue.ack(%s)", hot) < 300
