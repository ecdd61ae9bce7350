"""Races: producers and claimers of every kind at once, backends that are killed, and what is left.

Every worker is a process, so that they run at the same time. They write down what they were given
and what they settled, with the database's clock; afterwards that is compared with what was sent.
They go on for PGQUEUE_SOAK_SECONDS (8 by default).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker, internals
from tests.sql.queue import AT_ONCE, call, claim_of, one, seqs_of, value

KEYS = 40
SPAWN = mp.get_context("spawn")


@dataclass
class Log:
    """What a worker did, in its own order."""

    sent: list[int] = field(default_factory=list)
    # (consumer, claim, seqs in order, deliver counts, when the claim was made)
    delivered: list[tuple[str, int, list[int], list[int], float]] = field(default_factory=list)
    # (consumer, claim, seqs, when it was about to be settled)
    acknowledged: list[tuple[str, int, list[int], float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def now(conn: psycopg.Connection) -> float:
    return one(conn, "select extract(epoch from clock_timestamp())::float8")


def produce(url: str, seed: int, until: float, queue: Any) -> None:
    """Send in every way that there is, with random pauses before the commit."""
    rng = random.Random(seed)
    log = Log()
    conn = connection.connect(url)
    while time.time() < until:
        level = rng.choice(["read committed", "repeatable read"])
        try:
            kind = rng.random()
            if kind < 0.4:
                log.sent.append(send(conn, rng))
            elif kind < 0.6:
                n = rng.choice([2, 10, 100])
                keys = [f"k{rng.randrange(KEYS)}" for _ in range(n)]
                rows = call(conn, "send_batch", "s", ["x"] * n, p_keys=keys)
                log.sent += [row[0] for row in rows]
            else:
                conn.execute(f"begin transaction isolation level {level}")  # type: ignore[arg-type]
                if rng.random() < 0.3:
                    conn.execute("select count(*) from pgqueue.messages where false")
                sent = []
                for _ in range(rng.randrange(1, 4)):
                    if rng.random() < 0.3:
                        conn.execute("savepoint one")
                        send(conn, rng)
                        conn.execute("rollback to one")
                    sent.append(send(conn, rng))
                    time.sleep(rng.choice([0, 0, 0.001, 0.02]))
                if rng.random() < 0.3:
                    conn.execute("rollback")
                else:
                    conn.execute("commit")
                    log.sent += sent
        except psycopg.OperationalError as error:
            if conn.closed:
                # killed: whether an autocommit send was committed is for the tables to say
                conn = connection.connect(url)
            else:
                log.errors[type(error).__name__] += 1
                conn.execute("rollback")
        time.sleep(rng.choice([0, 0, 0.001, 0.005]))
    queue.put(log)


def send(conn: psycopg.Connection, rng: random.Random) -> int:
    key = None if rng.random() < 0.05 else f"k{rng.randrange(KEYS)}"
    deliver_at = None
    if rng.random() < 0.05:
        deliver_at = one(conn, "select clock_timestamp() + interval '0.2 s'")
    return value(conn, "send", "s", "x", p_key=key, p_priority=rng.choice([0, 0, 0, 5]),
                 p_deliver_at=deliver_at)  # fmt: skip


def consume(url: str, consumer: str, seed: int, until: float, queue: Any) -> None:
    """Claim and settle in every way that there is, often too late."""
    rng = random.Random(seed)
    log = Log()
    conn = connection.connect(url)
    conn.execute("set client_min_messages = error")
    while time.time() < until:
        try:
            size = rng.choice([1, 1, 10, 10, 1000])
            in_transaction = rng.random() < 0.2
            if in_transaction:
                conn.execute("begin")
            rows = call(conn, "receive", "s", consumer, size)
            if in_transaction:
                time.sleep(rng.choice([0, 0.002, 0.01]))
                if rng.random() < 0.3:
                    conn.execute("rollback")
                    continue
                conn.execute("commit")
            if not rows:
                time.sleep(0.003)
                continue
            claim, seqs = claim_of(rows), seqs_of(rows)
            log.delivered.append(
                (consumer, claim, seqs, [r.deliver_count for r in rows], now(conn))
            )
            settle(conn, consumer, claim, seqs, rng, log)
        except (psycopg.OperationalError, errors.IdleInTransactionSessionTimeout) as error:
            if conn.closed:
                conn = connection.connect(url)
                conn.execute("set client_min_messages = error")
            else:
                log.errors[type(error).__name__] += 1
                conn.execute("rollback")
    queue.put(log)


def settle(conn: psycopg.Connection, consumer: str, claim: int, seqs: list[int],
           rng: random.Random, log: Log) -> None:  # fmt: skip
    def ack(part: list[int] | None) -> None:
        # Written down before: the acknowledgement can succeed and its backend die.
        before = now(conn)
        n = value(conn, "ack", claim, part)
        got = seqs if part is None else part
        if n:
            assert n == len(got), f"{n} of {len(got)} acknowledged"
            log.acknowledged.append((consumer, claim, got, before))

    what = rng.random()
    if what < 0.5:
        ack(None)
    elif what < 0.65 and len(seqs) > 1:
        cut = rng.randrange(1, len(seqs))
        ack(seqs[:cut])
        if rng.random() < 0.5:
            ack(seqs[cut:])
        else:
            value(conn, "nack", claim)
    elif what < 0.75:
        part = rng.sample(seqs, rng.randrange(1, len(seqs) + 1))
        value(conn, "nack", claim, part, rng.choice(["0", "0", "0.05 s"]))
        # what has gone back with them is not known here: take what the claim has left
        if left := internals.held_by(conn, claim):
            ack(left)
    elif what < 0.85:
        value(conn, "extend", claim)
        time.sleep(rng.choice([0.01, 0.05]))
        ack(None)
    elif what < 0.95:
        time.sleep(rng.choice([0.3, 0.6]))  # too late, perhaps
        ack(None)
    # else: forgotten; the lease ends


def hold_an_id(url: str, until: float) -> None:
    """A transaction with an id that is idle, again and again."""
    with connection.connect(url) as conn:
        while time.time() < until:
            conn.execute("begin")
            conn.execute("select pg_current_xact_id()")
            time.sleep(1.5)
            conn.execute("rollback")


def kill_backends(url: str, seed: int, until: float) -> None:
    rng = random.Random(seed)
    with connection.connect(url) as conn:
        while time.time() < until:
            time.sleep(rng.uniform(0.1, 0.3))
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
                " and query like '%pgqueue%' order by random() limit 1"
            )


def race(url: str, seconds: float, consumers: dict[str, str], seed: int) -> None:
    """Run all of them, drain the rest, and compare."""
    with connection.connect(url) as conn:
        value(conn, "create_stream", "s")
        for name, ordering in consumers.items():
            visible = AT_ONCE | {"visibility_timeout": "0.4 s"}
            value(
                conn, "create_consumer", "s", name, "earliest", ordering, p_settings=Jsonb(visible)
            )
    queue = SPAWN.Queue()
    until = time.time() + 2.5 + seconds
    producers = [SPAWN.Process(target=produce, args=(url, seed + i, until - 1, queue))
                 for i in range(3)]  # fmt: skip
    claimers = [SPAWN.Process(target=consume, args=(url, name, seed + 10 * i + j, until, queue))
                for i, name in enumerate(consumers) for j in range(3)]  # fmt: skip
    others = [SPAWN.Process(target=hold_an_id, args=(url, until - 1)),
              SPAWN.Process(target=kill_backends, args=(url, seed, until - 1))]  # fmt: skip
    for process in (*producers, *claimers, *others):
        process.start()
    with connection.connect(url) as conn:
        # while they run, every committed state has to be allowed
        while time.time() < until - 2:
            time.sleep(0.5)
            with suppress(psycopg.OperationalError):  # killed as well
                checker.check(conn)
            if conn.closed:
                conn = connection.connect(url)
    logs = [queue.get(timeout=60) for _ in (*producers, *claimers)]
    for process in (*producers, *claimers, *others):
        process.join(30)
        assert process.exitcode == 0, f"a worker ended with {process.exitcode}"

    with connection.connect(url) as conn:
        drained = {name: drain(conn, name) for name in consumers}
        compare(conn, logs, consumers, drained)


def drain(conn: psycopg.Connection, name: str) -> list[int]:
    got: list[int] = []
    quiet = time.time() + 1.5  # leases of 0.4 s and delays of 0.2 s are over then
    while time.time() < quiet:
        rows = call(conn, "receive", "s", name, 1000)
        if not rows:
            time.sleep(0.05)
            continue
        assert value(conn, "ack", claim_of(rows)) == len(rows)
        got += seqs_of(rows)
        quiet = max(quiet, time.time() + 0.8)
    return got


def compare(conn: psycopg.Connection, logs: list[Log], consumers: dict[str, str],
            drained: dict[str, list[int]]) -> None:  # fmt: skip
    deadlocks = sum(log.errors["DeadlockDetected"] for log in logs)
    assert not deadlocks, f"{deadlocks} deadlocks"
    published = internals.published(conn)
    sent = {s for log in logs for s in log.sent}
    assert sent <= published
    keys = dict(conn.execute("select seq, key from pgqueue.messages").fetchall())
    assert set(keys) == published, "messages without a publication"
    for table in checker.read(conn):
        assert not checker.stuck([table]), "not drained"
    for name, ordering in consumers.items():
        acknowledged = [a for log in logs for a in log.acknowledged if a[0] == name]
        times = Counter(s for _, _, seqs, _ in acknowledged for s in seqs)
        times.update(drained[name])
        twice = [s for s, n in times.items() if n > 1]
        assert not twice, f"{name}: acknowledged twice: {twice[:10]}"
        delivered = [d for log in logs for d in log.delivered if d[0] == name]
        # a killed backend may have acknowledged without an answer
        unknown = published - set(times)
        given = {s for _, _, seqs, _, _ in delivered for s in seqs}
        assert unknown <= given, f"{name}: lost: {sorted(unknown - given)[:10]}"
        if ordering != "none":
            check_order(name, ordering, keys, delivered, acknowledged, drained[name])


def check_order(name: str, ordering: str, keys: dict[int, str | None], delivered: list[Any],
                acknowledged: list[Any], drained: list[int]) -> None:  # fmt: skip
    """A message is not delivered while an earlier one of its key is unsettled elsewhere.

    Which one is earlier follows from the first deliveries. A delivery is written down after it was
    made, and an acknowledgement before: whatever precedes a delivered message was acknowledged, by
    these records, before the delivery, or is in the same delivery before it.
    """
    delivered = sorted(delivered, key=lambda d: d[4])
    place: dict[int, int] = {}
    for _, _, seqs, _, _ in delivered:
        for s in seqs:
            place.setdefault(s, len(place))
    # A killed backend may have acknowledged what nobody wrote down: nothing is known of those.
    settled = {s: float("inf") for s in drained}
    settled |= {s: at for _, _, seqs, at in acknowledged for s in seqs}
    by_key: dict[Any, list[int]] = defaultdict(list)
    for s in place:
        by_key["" if ordering == "stream" else keys[s]].append(s)
    by_key.pop(None, None)
    index = {s: i for line in by_key.values() for i, s in enumerate(line)}
    for _, claim, seqs, _, at in delivered:
        of_key: dict[Any, list[int]] = defaultdict(list)
        for s in seqs:
            of_key["" if ordering == "stream" else keys[s]].append(s)
        of_key.pop(None, None)
        for key, got in of_key.items():
            assert got == sorted(got, key=index.__getitem__), f"{name}, {key!r}: {got}"
            together = set(got)
            for s in by_key[key][: index[got[-1]]]:
                assert s in together or settled.get(s, 0) <= at, (
                    f"{name}, key {key!r}: claim {claim} at {at} delivered {got}"
                    f" before {s} was acknowledged at {settled.get(s)}"
                )


@pytest.mark.longer
@pytest.mark.timeout(0)
def test_nothing_is_lost_or_doubled_in_a_race(url: str) -> None:
    seconds = float(os.environ.get("PGQUEUE_SOAK_SECONDS", "8"))
    race(url, seconds, {each: each for each in ("none", "key", "stream")}, int(time.time()))


def work_singly(url: str, until: float, queue: Any) -> None:
    """Claim single messages and acknowledge each with the next claim, as fast as it goes."""
    count, done, failed = 0, None, None
    with connection.connect(url) as conn:
        while time.time() < until and failed is None:
            try:
                rows = call(conn, "claim", "s", "c", 1, p_ack=done)
            except psycopg.Error as error:
                failed = str(error)
            else:
                count, done = count + len(rows), rows[0].claim_id if rows else None
        if done is not None:
            value(conn, "ack", done)
    queue.put((count, failed))


@pytest.mark.longer
def test_many_workers_of_single_messages_neither_deadlock_nor_share_one(url: str) -> None:
    """They look at the same few runs, and lock what was another's a moment ago."""
    total = 40_000
    with connection.connect(url) as conn:
        value(conn, "create_stream", "s")
        value(conn, "create_consumer", "s", "c", "earliest")
        for _ in range(total // 10_000):
            call(conn, "send_batch", "s", ["x"] * 10_000)
    queue, until = SPAWN.Queue(), time.time() + 3
    workers = [SPAWN.Process(target=work_singly, args=(url, until, queue)) for _ in range(6)]
    for worker in workers:
        worker.start()
    done = [queue.get(timeout=60) for _ in workers]
    assert [failed for _, failed in done if failed] == []
    with connection.connect(url) as conn:
        checker.check(conn)
        left = sum(len(seqs) for _, seqs in checker.stuck(checker.read(conn)))
    assert sum(count for count, _ in done) == total - left
