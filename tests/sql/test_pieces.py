"""Ordering by key beside the model: pieces half settled, many at once, several sessions."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.sql import internals
from tests.sql.cost import cost
from tests.sql.queue import (
    Conn,
    Session,
    acked,
    claim_of,
    consumer,
    now,
    receive,
    seconds,
    send_keys,
    seqs_of,
    value,
    wait_for_a_lock,
)

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


@pytest.fixture
def keyed(conn: Conn, stream: int) -> int:
    """The consumer c with ordering=key; its id."""
    return consumer(conn, ordering="key", visibility_timeout=seconds(60))


@pytest.mark.small_limits
def test_a_key_that_left_a_piece_is_free_also_when_the_piece_is_cut_for_smaller_claims(
    conn: Conn, keyed: int
) -> None:
    a1, b1, c1 = send_keys(conn, "a", "b", "c")
    claim = claim_of(receive(conn, 3))
    a2, a3 = send_keys(conn, "a", "a")
    assert receive(conn) == [], "a2 and a3 wait for a1"
    value(conn, "ack", claim, [a1])
    value(conn, "nack", claim)
    (a4,) = send_keys(conn, "a")
    assert sorted(acked(conn, "s", "c", 1)) == [b1, c1, a2, a3, a4]


def test_a_piece_may_end_while_a_dealer_looks_at_what_it_lost(
    conn: Conn, keyed: int, session: Session
) -> None:
    a, b = send_keys(conn, "a", "b")
    claim = claim_of(receive(conn, 2))
    send_keys(conn, "c")
    other = claim_of(receive(conn, 1))
    later = send_keys(conn, "a", "b", "c")
    assert receive(conn, 1) == []
    value(conn, "ack", claim, [a])
    value(conn, "ack", other)
    with session() as holder, ThreadPoolExecutor(1) as pool:
        holder.execute("begin")
        holder.execute("select from pgqueue.pieces for update")  # the dealer waits in mid-look
        dealer = pool.submit(acked, session(), "s", "c", 1)
        wait_for_a_lock(conn)
        value(conn, "ack", claim, [b])
        holder.execute("rollback")
        assert sorted(dealer.result(20)) == later


def held(conn: Conn, keys: list[str], size: int) -> list[int]:
    """The claims of new messages of these keys."""
    send_keys(conn, *keys)
    claims = []
    while rows := receive(conn, size):
        claims.append(claim_of(rows))
    return claims


def settled(conn: Conn, sent: list[int], size: int) -> bool:
    """Receives and acknowledges these messages; a claim looks at a part, and may find nothing."""
    left = set(sent)
    for _ in range(100):
        left -= set(acked(conn, "s", "c", size))
        if not left:
            return True
    return False


@pytest.mark.small_limits
def test_many_old_pieces_that_end_together_free_their_keys(
    conn: Conn, keyed: int, has_small_limits: bool
) -> None:
    """Such as those of a Spark batch, while workers deal thousands beside it."""
    many, more, size = (8, 6, 1) if has_small_limits else (11_000, 1_300, 64)
    keys, others = [[f"{name}{i}" for i in range(n)] for name, n in (("k", many), ("o", more))]
    short = held(conn, others, size)
    claims = held(conn, keys, size)
    passing, later = send_keys(conn, *others), send_keys(conn, *keys)
    assert receive(conn) == []
    for claim in short:
        value(conn, "ack", claim)
    # more pieces at once than those that make a piece old
    assert settled(conn, passing, 1)
    for claim in claims:
        value(conn, "ack", claim)
    assert settled(conn, later, 1000)


def test_many_scheduled_messages_cost_a_claim_nothing(
    conn: Conn, keyed: int, has_small_limits: bool
) -> None:
    """Each of a key and a time of its own; and to deal them costs the same for each of them."""
    scheduled = 100 if has_small_limits else 5000

    def claim_cost(keys: str) -> int:
        send_keys(conn, *keys)
        return cost(conn, "select pgqueue.ack(claim_id) from pgqueue.claim('s', 'c', 2)")

    claim_cost("ab")
    few = claim_cost("cd")
    conn.execute(
        "select pgqueue.send('s', 'x', p_key => i::text,"
        " p_deliver_at => clock_timestamp() + interval '1 hour' + i * interval '1 ms')"
        " from generate_series(1, %s) i",
        [scheduled],
    )
    deals = 200 if has_small_limits else 3
    dealt = sum(cost(conn, "select pgqueue.claim('s', 'c', 10)") for _ in range(deals))
    assert receive(conn, 10) == []
    assert has_small_limits or dealt < 50 * scheduled
    many = [claim_cost(keys) for keys in ("ef", "gh", "ij")]
    assert min(many) <= few * 1.5 + 40, (few, many)
    value(conn, "drop_stream", "s")  # the checker would take long with as many


# Races


def work(conn: Conn, seed: int, until: float) -> tuple[list[Any], list[Any]]:
    """Claims of all sizes, settled in part, returned or forgotten; what was given and settled."""
    rng = random.Random(seed)
    given: list[Any] = []
    settled: list[Any] = []
    conn.execute("set client_min_messages = error")
    while time.monotonic() < until:
        rows = receive(conn, rng.choice([1, 1, 3, 10, 100, 2000]))
        if not rows:
            time.sleep(0.002)
            continue
        at, claim, seqs = now(conn), claim_of(rows), seqs_of(rows)
        given.append((at, claim, seqs))
        part = rng.sample(seqs, rng.randrange(1, len(seqs) + 1))
        what = rng.random()
        if what < 0.1:
            continue
        if what < 0.4:
            value(conn, "nack", claim, part[:5], rng.choice(["0", "0", "0.05 s"]))
            part = internals.held_by(conn, claim)
        elif what < 0.7:
            part = seqs
        before = now(conn)
        if part and value(conn, "ack", claim, part):
            settled.append((before, claim, part))
        if what > 0.9:
            value(conn, "nack", claim)
    return given, settled


@pytest.mark.small_limits
@pytest.mark.slow
def test_claims_of_all_sizes_that_are_settled_in_part_keep_the_order_of_keys(
    conn: Conn, session: Session
) -> None:
    consumer(conn, ordering="key", visibility_timeout=seconds(0.3))
    rng, until = random.Random(1), time.monotonic() + 3
    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, session(), seed, until) for seed in range(3)]
        while time.monotonic() < until - 1:
            send_keys(conn, *(rng.choice("aaabcdefgh") for _ in range(rng.choice([1, 2, 20]))))
            time.sleep(0.01)
        logs = [worker.result() for worker in workers]
    given = [g for log in logs for g in log[0]]
    settled = [done for log in logs for done in log[1]]
    keys = dict(conn.execute("select seq, key from pgqueue.messages").fetchall())
    end = time.monotonic() + 20
    while len(done := [s for _, _, seqs in settled for s in seqs]) < len(keys):
        assert time.monotonic() < end, "something is stuck"
        if rows := receive(conn, 100):
            given.append((now(conn), claim_of(rows), seqs_of(rows)))
            settled.append((now(conn), claim_of(rows), seqs_of(rows)))
            value(conn, "ack", claim_of(rows))
    assert sorted(done) == sorted(keys), "each is acknowledged once"
    # An acknowledgement is written down before it is made, and a delivery after: by these records,
    # what precedes a message was acknowledged before, or is in the same claim.
    when = {s: at for at, _, seqs in settled for s in seqs}
    for at, claim, seqs in given:
        for s in seqs:
            ahead = [e for e in keys if e < s and keys[e] == keys[s] and e not in seqs]
            late = [e for e in ahead if when[e] > at]
            assert not late, f"claim {claim} got {s} of key {keys[s]} before {late}"
