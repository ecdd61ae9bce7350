"""A message that kills its worker ends alone in the dead letters; the others are delivered."""

from collections import Counter

import pytest
from psycopg.types.json import Jsonb

from tests.sql import checker, clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def fail(conn: Conn, claim: int, how: str) -> None:
    """The worker dies with the claim, or returns all of it."""
    if how == "crash":
        clock.end_lease(conn, claim)
    else:
        assert value(conn, "nack", claim, p_reason="who knows why")


def work(conn: Conn, poison: set[int], size: int, how: str) -> tuple[list[int], Counter[int]]:
    """Receive until there is nothing; a claim with poison in it fails.

    Returns: what was acknowledged, and how often a claim with each poison in it failed.
    """
    done: list[int] = []
    failures: Counter[int] = Counter()
    while rows := call(conn, "claim", "s", "c", size):
        claim = rows[0].claim_id
        seqs = internals.held_by(conn, claim)
        if poison & set(seqs):
            failures.update(poison & set(seqs))
            assert failures.total() < 100, "it is never found"
            fail(conn, claim, how)
        else:
            done += seqs
            value(conn, "ack", claim)
    return done, failures


@pytest.mark.small_limits
@pytest.mark.parametrize(
    ("ordering", "how", "max_deliver_count"),
    [  # each two of them together
        *(("none", "crash", 1), ("none", "nack", 5), ("key", "crash", 5)),
        *(("key", "nack", 1), ("stream", "crash", 1), ("stream", "nack", 5)),
    ],
)
@pytest.mark.promise("guarantee: No collateral dead letters")
def test_of_a_claim_only_the_message_to_blame_dies(
    conn: Conn, ordering: str, how: str, max_deliver_count: int
) -> None:
    consumer(conn, ordering=ordering, max_deliver_count=max_deliver_count)
    sent = send_all(conn, ["x"] * 100, p_keys=[f"k{i % 7}" for i in range(100)])
    done, failures = work(conn, {sent[37]}, 100, how)
    assert sorted(done) == [seq for seq in sent if seq != sent[37]]
    assert failures[sent[37]] <= max(max_deliver_count, 7 + 2)
    assert states(conn) == {sent[37]: "dead"}
    (dead,) = internals.dead_letters(conn)
    assert dead.reason == "max deliveries"
    if ordering == "stream":
        assert done == sorted(done)


@pytest.mark.parametrize(
    ("ordering", "how"),
    [
        ("key", "nack"),
        *(pytest.param(each, "crash", marks=pytest.mark.longer) for each in ("none", "stream")),
    ],
)
@pytest.mark.promise("guarantee: No collateral dead letters")
def test_one_poisonous_message_among_3000_ends_alone(conn: Conn, ordering: str, how: str) -> None:
    """It takes some log2(n) failures, and nobody else is given up, though delivered as often."""
    consumer(conn, ordering=ordering, max_deliver_count=3)
    conn.execute(
        "select count(*) from pgqueue.send_batch('s', array_fill('x'::text, '{3000}'),"
        " (select array_agg('k' || i % 270) from generate_series(1, 3000) i))"
    )
    done, failures = work(conn, {2345}, 3000, how)
    assert len(done) == 2999
    assert failures[2345] <= 12 + 2
    assert states(conn) == {2345: "dead"}


def test_the_first_failure_of_a_claim_returns_it_as_it_was_and_the_second_halves_it(
    conn: Conn,
) -> None:
    consumer(conn)
    send_all(conn, ["x"] * 100)
    sizes = []
    for _ in range(9):
        ((claim, n),) = call(conn, "claim", "s", "c", 1000)
        sizes.append(n)
        value(conn, "nack", claim)
    assert sizes == [100, 100, 50, 25, 13, 7, 4, 2, 1]


def claims_of(conn: Conn, name: str) -> list[list[int]]:
    """What the next claims of five messages have, each of which is acknowledged."""
    claims = []
    while rows := receive(conn, 5, name):
        claims.append(seqs_of(rows))
        checker.check(conn)
        value(conn, "ack", claim_of(rows))
    return claims


def test_a_claim_has_nothing_beside_messages_that_may_be_to_blame(conn: Conn) -> None:
    """Neither those before nor after them, ready or new."""
    for name in ORDERINGS:
        consumer(conn, name, name)
    sent = send_all(conn, ["x"] * 4, p_keys=list("abcd"))
    for name in ORDERINGS * 2:
        clock.end_lease(conn, claim_of(receive(conn, name=name)))
    new = send_all(conn, ["x"] * 4, p_keys=list("efgh"))
    for name in ORDERINGS:
        assert sorted(claims_of(conn, name)) == [sent[:2], sent[2:], new], name


def test_what_was_retried_does_not_take_others_along_that_may_be_to_blame(conn: Conn) -> None:
    """Though it stands before them in the line."""
    for name in ORDERINGS:
        consumer(conn, name, name)
    sent = send_all(conn, ["x"] * 4, p_keys=list("abcd"))
    for name in ORDERINGS:
        for size in (2, 4):
            value(conn, "nack", claim_of(receive(conn, size, name)))
        assert value(conn, "retry", "s", name, sent[:1]) in (1, 2)
        claims = claims_of(conn, name)
        assert max(len(claim) for claim in claims) == 2
        assert sorted(seq for claim in claims for seq in claim) == sent


def test_what_is_known_to_have_failed_dies_by_itself_and_blames_nobody(conn: Conn) -> None:
    consumer(conn, max_deliver_count=2)
    bad = send_all(conn, ["x"] * 5)[0]
    for _ in range(2):
        value(conn, "nack", claim_of(receive(conn)), [bad])
        clock.end_leases(conn)
    assert states(conn)[bad] == "dead"
    while rows := receive(conn):
        value(conn, "ack", claim_of(rows))
    assert states(conn) == {bad: "dead"}


def test_the_last_message_of_a_claim_is_the_one_to_blame(conn: Conn) -> None:
    """A worker that acknowledges one by one, and dies with the one at hand."""
    consumer(conn, max_deliver_count=1)
    sent = send_all(conn, ["x"] * 3)
    claim = claim_of(receive(conn))
    value(conn, "ack", claim, sent[:2])
    clock.end_lease(conn, claim)
    assert receive(conn) == []
    assert states(conn) == {sent[2]: "dead"}


def test_who_has_several_claims_is_told_which_one_may_kill_it(conn: Conn) -> None:
    """A message that was alone in a claim that expired, and what was halved."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 4)
    first, second = receive(conn, 1), receive(conn, 3)
    assert not any(value(conn, "is_suspected", claim_of(rows)) for rows in (first, second))
    value(conn, "nack", claim_of(second))
    clock.end_lease(conn, claim_of(first))
    first = receive(conn, 4)
    assert seqs_of(first) == sent[:1], "it is a claim of its own"
    assert value(conn, "is_suspected", claim_of(first))
    second = receive(conn, 4)
    assert not value(conn, "is_suspected", claim_of(second))
    clock.end_lease(conn, claim_of(second))
    assert value(conn, "is_suspected", claim_of(receive(conn, 4)))
    assert not value(conn, "is_suspected", 0)


@pytest.mark.promise("guarantee: Deliveries to Spark")
def test_the_claim_of_a_spark_reader_is_neither_halved_nor_given_up(conn: Conn) -> None:
    c = consumer(conn, max_deliver_count=1)
    sent = send_all(conn, ["x"] * 4)
    reader = "00000000-0000-0000-0000-000000000001"
    for i in range(3):
        (end,) = call(conn, "reader_claim", reader[:-1] + str(i), c, 0, 0)
        assert end.claimed == 4
        clock.end_lease(conn, end.claim_id)
    assert seqs_of(receive(conn)) == sent


DELAYS = [
    ({"backoff_base": "1 hour"}, [1, 1, 1]),
    ({"backoff": "linear", "backoff_base": "1 hour", "backoff_cap": "1 day"}, [1, 2, 3]),
    ({"backoff": "exponential", "backoff_base": "1 h", "backoff_cap": "3 h"}, [1, 2, 3]),
]


@pytest.mark.small_limits
@pytest.mark.promise("feature: retry with backoff", "concepts: transitions of a message")
def test_a_failure_delays_as_the_settings_say(conn: Conn) -> None:
    """Each ordering, way to fail and kind of delay with each of the others."""
    for i, how in enumerate(["named", "unnamed", "crash"]):
        for j, (settings, delays) in enumerate(DELAYS):
            name, ordering = f"{how} {j}", ORDERINGS[(i + j) % 3]
            consumer(conn, name, ordering, p_settings=Jsonb(settings))
            seq = send(conn, p_key="k", p_consumers=[name])
            for hours in delays:
                claim = claim_of(receive(conn, name=name))
                if how == "crash":
                    clock.end_lease(conn, claim)
                else:
                    value(conn, "nack", claim, [seq] if how == "named" else None)
                assert receive(conn, name=name) == []
                assert state(conn, seq, name).state == "delayed"
                clock.pass_time(conn, seconds(3600 * hours - 100))
                assert receive(conn, name=name) == [], (name, hours)
                clock.pass_time(conn, seconds(100))
            (last,) = receive(conn, name=name)
            assert last.seq == seq
            value(conn, "ack", last.claim_id)


@pytest.mark.promise("concepts: transitions of a message")
def test_a_nack_says_its_own_delay_and_0_says_now(conn: Conn) -> None:
    consumer(conn, p_settings=Jsonb({"backoff": "exponential"}))
    seq = send(conn)
    value(conn, "nack", claim_of(receive(conn)), None, seconds(0))
    value(conn, "nack", claim_of(receive(conn)), None, seconds(3600))
    assert receive(conn) == []
    clock.pass_time(conn, seconds(3600))
    value(conn, "nack", claim_of(receive(conn)))
    assert state(conn, seq).state == "delayed"


def test_jitter_shortens_a_delay_by_chance_and_leaves_a_run_a_run(conn: Conn) -> None:
    consumer(conn, p_settings=Jsonb({"backoff_base": "1 hour", "backoff_jitter": 0.5}))
    sent = send_all(conn, ["x"] * 10)
    value(conn, "nack", claim_of(receive(conn)))
    (run,) = internals.bundles(conn)
    left = (run.not_visible_until - run.last_delivered_at).total_seconds()
    assert 1800 <= left < 3601
    times = {state(conn, seq).not_visible_until for seq in sent}
    assert len(times) == 1


def test_a_suspect_that_is_behind_others_comes_in_a_claim_of_its_own(conn: Conn) -> None:
    consumer(conn)
    suspect = send(conn)
    clock.end_lease(conn, claim_of(receive(conn, 1)))
    assert seqs_of(receive(conn, 10)) == [suspect]
    clock.end_leases(conn)
    urgent = [send(conn, p_priority=5), send(conn, p_priority=5)]
    claims = [seqs_of(rows) for rows in iter(lambda: receive(conn, 10), [])]
    assert claims == [urgent, [suspect]]
