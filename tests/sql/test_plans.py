"""Index probes only: what a claim costs depends on what it touches, and on nothing else."""

import statistics
from datetime import timedelta

import pytest

from spark_pgqueue.postgres import connection
from tests.sql import clock, internals, queue
from tests.sql.cost import GROWTH, assert_flat, claim_cost, cost, cost_of_claim
from tests.sql.queue import ORDERINGS, Conn, call, claim_of, one, value

MANY = 1_000_000


def bulk(conn: Conn, n: int, keys: str = "null") -> None:
    internals.publish_together(conn, 1, n, keys)


def singles(conn: Conn, n: int) -> None:
    internals.publish_singly(conn, 1, n)


def consumer(conn: Conn, name: str, ordering: str = "none") -> int:
    """One whose claims are held for as long as the test takes."""
    return queue.consumer(conn, name, ordering, visibility_timeout=timedelta(days=1))


@pytest.mark.parametrize("size", [1, pytest.param(100, marks=pytest.mark.longer)])
@pytest.mark.promise("guarantee: Flat cost")
def test_the_backlog_costs_nothing(conn: Conn, stream: int, size: int) -> None:
    for ordering in ORDERINGS:
        consumer(conn, f"few {ordering}", ordering)
    bulk(conn, 1000)
    few = {ordering: claim_cost(conn, f"few {ordering}", size) for ordering in ORDERINGS}
    bulk(conn, 100_000)
    singles(conn, MANY // 40)
    for ordering in ORDERINGS:
        consumer(conn, "many", ordering)
        assert_flat(f"a backlog, {ordering}", few[ordering], claim_cost(conn, "many", size))
        value(conn, "drop_consumer", "s", "many")


@pytest.mark.longer  # with 25,000: the test above
def test_a_backlog_of_a_million_single_messages_costs_nothing(conn: Conn, stream: int) -> None:
    consumer(conn, "c")
    singles(conn, 1000)
    few = claim_cost(conn, "c", 1)
    singles(conn, MANY)
    # The first claim takes up to 10,000 of them; the next ones live on those.
    assert_flat("a backlog", few, claim_cost(conn, "c", 1))


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_what_is_in_flight_delayed_or_waiting_costs_nothing(
    conn: Conn, stream: int, ordering: str
) -> None:
    """50,000 keys claimed one by one, delayed, or behind others."""
    consumer(conn, "c", ordering)
    for _ in range(3):
        bulk(conn, 100, "'k' || i")
    call(conn, "claim", "s", "c", 1)  # with no other claim open, keys are not looked at
    few = claim_cost(conn, "c", 1)
    internals.add_in_flight(conn, 50_000, keyed=ordering == "key")
    many = claim_cost(conn, "c", 1)
    assert_flat("what is in flight", few, many)


def test_runs_that_fit_exactly_leave_nothing_to_walk_over_beside_an_old_snapshot(
    conn: Conn, stream: int, url: str
) -> None:
    consumer(conn, "c")
    bulk(conn, 100)
    call(conn, "claim", "s", "c", 1)
    few = claim_cost(conn, "c", 1)
    internals.add_ready(conn, 1001, 9000)
    with connection.connect(url) as other, other.transaction():
        other.execute("set transaction isolation level repeatable read")
        internals.count(other, "consumer_messages")
        for _ in range(70):
            (row,) = call(conn, "claim", "s", "c", 100)
            call(conn, "ack", row.claim_id)
        assert_flat("what was claimed", few, claim_cost(conn, "c", 1))


def test_a_hundred_consumers_cost_nothing(conn: Conn, stream: int) -> None:
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


Costs = dict[str, tuple[float, ...]]


def everyday(conn: Conn, name: str = "c") -> Costs:
    """The blocks of what is done all day. Nothing is ready for the consumer, before and after."""
    ack_all(conn, name)
    poll = f"select * from pgqueue.claim('s', '{name}', 1)"
    costs: Costs = {"an empty poll": (statistics.median(cost(conn, poll) for _ in range(9)),)}
    send = "select pgqueue.send('s', 'x')"
    costs["a send"] = (statistics.median(cost(conn, send) for _ in range(9)),)
    bulk(conn, 2000)
    for size in (1, 100):
        costs[f"a claim of {size} and its ack"] = claim_cost(conn, name, size)
    costs["a claim and its dead letter"] = claim_cost(conn, name, settle="dead_letter")
    ack_all(conn, name)
    return costs


def ack_all(conn: Conn, name: str) -> None:
    while found := call(conn, "claim", "s", name, 10_000):
        value(conn, "ack", claim_of(found))


def assert_all_flat(what: str, few: Costs, many: Costs) -> None:
    for name, costs in few.items():
        for a, b in zip(costs, many[name], strict=True):
            assert b <= a * GROWTH + 15, f"{name} reads {a} blocks, and {b} with {what}"


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_two_thousand_idle_consumers_cost_nothing(conn: Conn, stream: int) -> None:
    orderings = ("none", "key")
    for each in orderings:
        consumer(conn, each, each)
    few = [everyday(conn, each) for each in orderings]
    internals.add_consumers(conn, 2000)
    for each, costs in zip(orderings, few, strict=True):
        assert_all_flat("2,000 idle consumers", costs, everyday(conn, each))


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_a_million_messages_in_each_state_cost_nothing(conn: Conn, stream: int) -> None:
    """Claimed, delayed, dead and then ready, each in a bundle of its own, and new."""
    consumer(conn, "c")
    clock.stop_looking(conn)  # to add millions takes the test minutes on a busy machine
    few = everyday(conn)
    internals.add_in_flight(conn, 3 * MANY, keyed=False)
    internals.add_dead(conn, MANY)
    assert_all_flat("a million in each state", few, everyday(conn))

    def claims() -> Costs:
        return {f"a claim of {size} and its ack": claim_cost(conn, "c", size) for size in (1, 100)}

    internals.add_ready(conn, 10**9 + 1, 10**9 + 2000)
    clock.pass_a_minute(conn)  # no hint knows of messages that a test puts there
    few = claims()
    internals.add_ready(conn, 10**9 + 2001, 10**9 + MANY)
    singles(conn, MANY)
    assert_all_flat("a million ready", few, claims())


@pytest.mark.promise("guarantee: Flat cost")
def test_an_expiry_costs_what_it_releases(conn: Conn, stream: int) -> None:
    def expiry(name: str) -> float:
        costs = []
        for _ in range(5):
            call(conn, "claim", "s", name, 10)
            clock.end_leases(conn)
            costs.append(cost(conn, "select * from pgqueue.claim('s', %s, 10)", name))
            for claim in internals.claims(conn):
                value(conn, "ack", claim.claim_id)
        return statistics.median(costs[2:])

    orderings = ("none", "key")
    for each in orderings:
        consumer(conn, each, each)
    bulk(conn, 4000, "'k' || i")  # more than one claim cuts ahead
    few = [expiry(each) for each in orderings]
    bulk(conn, 50_000, "'k' || i")
    for each, less in zip(orderings, few, strict=True):
        many = expiry(each)
        assert many <= less * GROWTH + 15, f"{each}: an expiry reads {less} blocks, now {many}"


def traffic(conn: Conn, rounds: int, behind: bool) -> list[int]:
    """100 published and 100 claimed over 5,000 keys; the costs of the claims."""
    costs = []
    held: list[int] = []
    for i in range(rounds):
        keys = [f"k{(i * 100 + j) * 7919 % 5000}" for j in range(100)]
        call(conn, "send_batch", "s", ["x"] * 100, p_keys=keys)
        blocks, claim_id = cost_of_claim(conn, "c", 100)
        costs.append(blocks)
        held.append(claim_id)
        if len(held) > (2 if behind else 0):  # some are in flight all the time
            value(conn, "ack", held.pop(0))
    for claim_id in held:
        value(conn, "ack", claim_id)
    return costs


@pytest.mark.parametrize(
    "behind", [False, pytest.param(True, marks=pytest.mark.longer)], ids=["alone", "others"]
)
@pytest.mark.parametrize("ordering", ["none", "key"])
@pytest.mark.promise("guarantee: Flat cost", "operations: dead rows")
def test_dead_rows_that_an_old_snapshot_holds_cost_nothing(
    conn: Conn, url: str, stream: int, ordering: str, behind: bool
) -> None:
    """Thousands of claims beside a REPEATABLE READ transaction."""
    consumer(conn, "c", ordering)
    with connection.connect(url) as old:
        few = statistics.median(traffic(conn, 40, behind)[10:])
        old.execute("begin transaction isolation level repeatable read")
        internals.count(old, "consumers")
        costs = traffic(conn, 200, behind)
        many = statistics.median(costs[-40:])
        old.execute("commit")
    assert many <= few * GROWTH + 50, f"a claim read {few} blocks, and {many} in the end"


WORK = """
do $$ declare v_claim bigint; begin
    for i in 1 .. 400 loop
        select claim_id into strict v_claim from pgqueue.claim('s', '{}', 1);
        commit;
        perform pgqueue.ack(v_claim);
        commit;
    end loop;
end $$"""


def test_single_claims_beside_an_old_snapshot_cost_nothing(
    conn: Conn, url: str, stream: int
) -> None:
    orderings = ("none", "key")
    for each in orderings:
        consumer(conn, each, each)
    bulk(conn, 20_000, "'k' || i")
    # a claim passes over the bundles of its own cut that are done, as far as that had come
    block = one(conn, "select _pgqueue.limit_cut()")
    with connection.connect(url) as old:
        few = [claim_cost(conn, each, 1, 20) for each in orderings]
        old.execute("begin transaction isolation level repeatable read")
        internals.count(old, "consumers")
        for each, (claim, ack) in zip(orderings, few, strict=True):
            conn.execute(WORK.format(each).encode())
            assert_flat("dead rows", (claim + block, ack), claim_cost(conn, each, 1, 20))


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_polling_an_empty_queue_writes_nothing(conn: Conn, stream: int, ordering: str) -> None:
    consumer(conn, "c", ordering)
    bulk(conn, 10)
    value(conn, "ack", claim_of(call(conn, "receive", "s", "c", 1000)))
    call(conn, "receive", "s", "c")
    for _ in range(20):
        conn.execute("begin")
        assert call(conn, "receive", "s", "c") == []
        assert one(conn, "select pg_current_xact_id_if_assigned()") is None
        conn.execute("commit")


def test_a_hot_key_costs_the_others_nothing(conn: Conn, stream: int) -> None:
    """The line behind a busy key is set aside once, and then not looked at again."""
    consumer(conn, "c", "key")
    bulk(conn, 20_000, "'hot'")
    bulk(conn, 1000, "'k' || i")
    rows = call(conn, "receive", "s", "c", 1)
    assert rows[0].key == "hot"
    hot = claim_of(rows)
    costs = [cost(conn, "select * from pgqueue.claim('s', 'c', 1)") for _ in range(30)]
    assert statistics.median(costs[10:]) < 1000, costs
    assert one(conn, "select count(*) from pgqueue.open_claims") == 31
    assert cost(conn, "select pgqueue.ack(%s)", hot) < 300


def test_trimming_reads_nothing_of_what_consumers_have_beyond(conn: Conn, stream: int) -> None:
    """Only the index entries of a stream's own consumers: not their runs, nor those of others."""
    c = consumer(conn, "c")
    value(conn, "create_stream", "t")
    other = value(conn, "create_consumer", "t", "other")
    value(conn, "set_retention", "s", timedelta(hours=1), p_unread="drop")
    queue.maintain(conn)
    queue.send(conn)
    queue.receive(conn, 1)  # so it looks each time at what it may skip, and trim
    clock.pass_time(conn, timedelta(minutes=9))
    queue.maintain(conn)
    clock.pass_time(conn, timedelta(hours=1))
    queue.maintain(conn)

    def blocks() -> int:
        found = [cost(conn, "select * from pgqueue.maintain()") for _ in range(5)]
        return int(statistics.median(found))

    few = blocks()
    runs = 20_000
    internals.add_backlog(conn, other, 0, runs)
    assert blocks() <= few * GROWTH + 15, "it reads what consumers of other streams have"
    internals.add_backlog(conn, c, 1 << 40, runs)
    many = blocks()
    assert many <= few + runs / 25, f"it reads {few} blocks, and {many} with {runs} runs beyond"
    assert queue.stats(conn).claimed == 1
