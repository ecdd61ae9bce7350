"""The crossing: feature against feature, at random, beside kills and crashes.

Each round has a new database, with consumers whose settings are drawn, and some fifteen threads
that send, claim, settle, read, move, alter, drop and kill (`crossing_actors`,
`crossing_operators`). All the time a judge compares snapshots of the queue with the ledger, which
knows what was committed (`crossing_judge`, `crossing_ledger`); in the end everything is worked off.

PGQUEUE_CROSSING_SEED draws the same rounds again: the same consumers and the same steps of each
actor, though not the same moments. PGQUEUE_CROSSING_SECONDS is how long it goes on.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection, schema
from tests.conftest import Server
from tests.sql import clock, crossing_ledger, limits
from tests.sql.crossing_actors import (
    STREAMS,
    Actor,
    Consumer,
    Group,
    OffsetReader,
    Producer,
    Reader,
    Round,
    Sink,
)
from tests.sql.crossing_judge import Judge
from tests.sql.crossing_operators import Killer, Operator, Resolver, Upkeep, make, resolve
from tests.sql.queue import Conn, call, claim_of, maintain, one, value

SECONDS = float(os.environ.get("PGQUEUE_CROSSING_SECONDS", "24"))
SEED = int(os.environ.get("PGQUEUE_CROSSING_SEED", "0")) or random.randrange(1, 10**6)
ROUND = 6.0  # seconds of work, without working off
PATIENCE = 60  # seconds until everything that is left was worked off


def lay_out(url: str, rng: random.Random) -> dict[str, list[tuple[str, str]]]:
    """Make streams and consumers at random; returns these by kind: stream and name."""
    consumers: dict[str, list[tuple[str, str]]] = {"claimed": [], "readers": [], "groups": []}
    with connection.connect(url) as conn:
        crossing_ledger.make(conn)
        notify = rng.random() < 0.5
        for name in STREAMS:
            given = {"dedup_window": "1 hour", "notify": notify}
            value(conn, "create_stream", name, p_settings=Jsonb(given))
        value(conn, "bind", "s", "a.*", "t")
        made = [("claimed", stream, f"c{i}", None) for i in range(3) for stream in STREAMS]
        made += [("readers", "s", "r0", None), ("groups", rng.choice(STREAMS), "g0", 4)]
        for kind, stream, name, partitions in made:
            make(conn, rng, stream, name, "earliest", partitions)
            consumers[kind].append((stream, name))
    return consumers


def cross(url: str, server: Server | None, seed: int, seconds: float) -> Round:
    """A round: everybody works, then everything is worked off; raises what the judge finds."""
    round_, rng = Round(url, seed), random.Random(seed)
    consumers = lay_out(url, rng)
    round_.names = [each for kind in consumers.values() for each in kind]
    readers = [OffsetReader(round_, f"offsets {i}", s) for i, s in enumerate(STREAMS)]
    claimers: list[Actor] = [Consumer(round_, f"claimer {i} {c}", *c) for i in range(2)
                             for c in consumers["claimed"]]  # fmt: skip
    claimers += [Reader(round_, f"reader {c}", *c) for c in consumers["readers"]]
    claimers += [Group(round_, f"worker {i}", *c) for i in (1, 2) for c in consumers["groups"]]
    crash_at = seconds / 2 if server is not None and rng.random() < 0.4 else None
    others = [
        *(Producer(round_, f"producer {i}") for i in range(3)), Sink(round_, "sink 100"),
        Operator(round_, "operator 1", consumers["claimed"]),
        Operator(round_, "operator 2", consumers["claimed"]),
        Upkeep(round_, "upkeep"), Resolver(round_, "resolver"),
        Killer(round_, "killer", server, crash_at),
    ]  # fmt: skip
    actors = [*others, *readers, *claimers]
    for actor in actors:
        actor.start()
    judge, end = Judge(url), time.monotonic() + seconds
    try:
        while time.monotonic() < end and not round_.failures:
            time.sleep(rng.uniform(0.2, 1))
            with suppress(psycopg.OperationalError):  # the server starts
                judge.look()
    finally:
        round_.over.set()
        for actor in actors:
            actor.join(45)
    assert not [a.name for a in actors if a.is_alive()], "an actor does not end"
    assert not round_.failures, "\n".join(round_.failures[:10])
    work_off(url, rng, consumers, readers)
    judge.look(drained=True)
    round_.counts["looks"] = judge.looks
    judge_readers(url, readers)
    return round_


def work_off(url: str, rng: random.Random, consumers: dict[str, list[tuple[str, str]]],
             readers: list[OffsetReader]) -> None:  # fmt: skip
    """End what is open, and receive until nothing is left, first with the settings as they are."""
    last = Round(url, 0)
    with connection.connect(url) as conn:
        resolve(conn, rng)
        for stream in STREAMS:
            with suppress(psycopg.Error):
                value(conn, "drop_schedule", stream, "tick")
        there = set(
            conn.execute("select stream, consumer from pgqueue.consumer_settings").fetchall()
        )
        for kind in consumers.values():
            kind[:] = [of for of in kind if of in there]  # an operator was killed while it made one
            for of in kind:
                value(conn, "resume", *of)
    actors: list[Actor] = [Drain(last, f"drain {of}", *of) for kind in ("claimed", "readers")
                           for of in consumers[kind]]  # fmt: skip
    actors += [DrainGroup(last, "drain", *of) for of in consumers["groups"]]
    for actor in actors:
        actor.start()
    end = time.monotonic() + PATIENCE
    try:
        with connection.connect(url) as conn:
            while left := unfinished(conn):
                if time.monotonic() > end:
                    raise AssertionError(f"still not delivered after {PATIENCE} s: {left}")
                assert not last.failures, last.failures
                time.sleep(0.2)
    finally:
        last.over.set()
        for actor in actors:
            actor.join(45)
    for reader in readers:
        seen = -1
        while seen != reader.seen.total():
            seen = reader.seen.total()
            for _ in range(5):
                reader.step()


def unfinished(conn: psycopg.Connection) -> list[str]:
    """The consumers that have something left, and how much of what."""
    found = conn.execute(
        "select stream || '/' || consumer || ' ' || backlog || ' in all, ' || ready || ' ready, '"
        " || delayed || ' delayed, ' || waiting || ' waiting, ' || claimed || ' claimed'"
        " from pgqueue.consumer_stats where stream <> 'scratch'"
        " and backlog + claimed > 0"
    )
    return [row[0] for row in found.fetchall()]


class Drain(Consumer):
    """Acknowledges all that it gets."""

    def settle(self) -> None:
        assert self.held is not None
        self.ack(self.held[2], whole=True)


class DrainGroup(Group):
    """Commits all that there is."""

    sizes = (10_000,)

    def stop_transaction(self, over: float = 0.0) -> None:
        super().stop_transaction(0.0)


def judge_readers(url: str, readers: list[OffsetReader]) -> None:
    """Who reads by offsets has seen all that was committed, and each message once."""
    with connection.connect(url) as conn:
        ids = dict(conn.execute("select name, stream_id from pgqueue.streams").fetchall())
        sent = conn.execute("select stream_id, token, key from ledger.sent where consumers is null")
        of: dict[str, set[str]] = {name: set() for name in STREAMS}
        for stream_id, token, key in sent.fetchall():
            if stream_id == ids["s"]:
                of["s"].add(token)
            if stream_id == ids["t"] or (stream_id == ids["s"] and (key or "").startswith("a.")):
                of["t"].add(token)
    for reader in readers:
        reader.seen.pop("tick", None)
        twice = [token for token, n in reader.seen.items() if n > 1]
        assert not twice, f"{reader.name} saw twice: {twice[:10]}"
        made_up = reader.seen.keys() - of[reader.stream]
        assert not made_up, f"{reader.name} saw what was not committed: {sorted(made_up)[:10]}"
        missed = of[reader.stream] - reader.seen.keys()
        assert reader.skipped or not missed, f"{reader.name} missed {sorted(missed)[:10]}"


def test_the_judge_sees_messages_that_retention_takes_away_meanwhile(conn: Conn, url: str) -> None:
    """It looks while the later of two segments is emptied, and the earlier one is kept."""
    crossing_ledger.make(conn)
    for name in STREAMS:
        value(conn, "create_stream", name)
    value(conn, "bind", "s", "a.*", "t")
    value(conn, "set_retention", "t", p_for="1 hour")
    value(conn, "create_consumer", "t", "c")
    for n, end in enumerate(("dead_letter", "ack")):
        maintain(conn)
        value(conn, "ledger.send", "s", f"producer {n}", 0, n, "a.0", 0, Jsonb({}))
        value(conn, end, claim_of(call(conn, "receive", "t", "c")))
        clock.pass_time(conn, timedelta(minutes=10))
    maintain(conn)
    clock.pass_time(conn, timedelta(hours=2))
    judge = Judge(url)
    with judge.begin() as looking:
        maintain(conn, 5)
        judge.judge(looking)
    maintain(conn)
    left = "select count(*) from pgqueue.messages m join pgqueue.streams using (stream_id)"
    assert one(conn, f"{left} where name = 't'") == 1


@pytest.mark.longer
@pytest.mark.timeout(0)
@pytest.mark.promise("guarantee: No loss")
def test_features_cross_and_nothing_is_lost(server: Server) -> None:
    print(f"PGQUEUE_CROSSING_SEED={SEED}")
    counts: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    seed = SEED
    while time.monotonic() < end:
        name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
        with connection.connect(server.url) as conn:
            conn.execute(f"create database {name}".encode())
        url = server.url_of(name)
        try:
            with connection.connect(url) as conn:
                schema.install(conn)
                if seed % 3 == 0:
                    limits.shrink(conn)
            counts += cross(url, server, seed, ROUND).counts
        except BaseException as error:
            error.add_note(f"PGQUEUE_CROSSING_SEED={seed}")
            raise
        finally:
            with connection.connect(url) as conn:
                resolve(conn, random.Random(seed))
            with connection.connect(server.url) as conn:
                conn.execute(f"drop database if exists {name} with (force)".encode())
        counts["rounds"] += 1
        seed += 1
    print(dict(counts))
    assert counts["looks"] > counts["rounds"]
