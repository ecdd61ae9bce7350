"""Those who disturb the actors of the crossing: operators, upkeep, kills, crashes."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb

from tests.sql.crossing_actors import SCRATCH, STREAMS, Actor, Round
from tests.sql.queue import AT_ONCE, ORDERINGS, call, now, one, value

# Steps of operators, and settings, that are left out, to narrow down what was found.
WITHOUT = os.environ.get("PGQUEUE_CROSSING_WITHOUT", "").split(",")


class Restarts(Protocol):
    """A server that can crash."""

    def restart(self, mode: str = "fast") -> None: ...


def settings(rng: random.Random, ordering: str) -> dict[str, Any]:
    """Some settings of a consumer at random, that go together."""
    some: dict[str, Any] = {**AT_ONCE, "visibility_timeout": rng.choice(["0.5 s", "2 s"])}
    if rng.random() < 0.3:
        return some  # so small claims need no lock of the consumer, if it has no filter

    def maybe(chance: float, **more: Any) -> None:
        if rng.random() < chance:
            some.update(more)

    maybe(0.5, backoff=rng.choice(["constant", "linear", "exponential"]),
          backoff_base=rng.choice(["5 ms", "40 ms"]), backoff_cap="0.2 s",
          backoff_jitter=rng.choice([0, 0.5]))  # fmt: skip
    maybe(0.5, max_deliver_count=rng.choice([1, 3, 6]))
    maybe(0.3, max_in_flight=rng.choice([5, 100]))
    maybe(0.2, rate_limit=rng.choice([20, 200]), rate_interval="50 ms")
    maybe(0.3, keep_history=rng.choice(["1 s", "1 hour"]))
    maybe(0.2, notify_done=True)
    if rng.random() < 0.3:
        some.update(max_backlog=rng.choice([40, 400, 4000]),
                    on_full=rng.choice(["reject", "drop_oldest"]))  # fmt: skip
    if some.get("on_full") != "drop_oldest":
        maybe(0.2, per_key_capacity=rng.choice([10, 100]))
    if "per_key_capacity" not in some:
        maybe(0.2, per_key_latest=True)
    by_key = rng.random() < 0.4
    if by_key and ordering != "stream":
        maybe(0.4, fair=True)
        maybe(0.5, per_key_limit=rng.choice([1, 3]))
        maybe(0.3, per_key_interval="5 ms", per_key_burst=rng.choice([1, 4]))
    return {name: given for name, given in some.items() if name not in WITHOUT}


RESET = (
    "backoff", "backoff_base", "backoff_cap", "backoff_jitter", "max_deliver_count",
    "max_in_flight", "rate_limit", "rate_interval", "keep_history", "notify_done", "max_backlog",
    "on_full", "per_key_capacity", "fair", "per_key_limit", "per_key_interval", "per_key_burst",
    "per_key_latest",
)  # fmt: skip


def make(conn: psycopg.Connection, rng: random.Random, stream: str, name: str,
         start: str | None = None, partitions: int | None = None) -> None:  # fmt: skip
    """Make a consumer at random, or a group."""
    ordering = rng.choice([*ORDERINGS, "key"])
    topic = rng.choice([None, None, "a.*"]) if partitions is None else None
    below = rng.choice([10, 10, 6]) if partitions is None else 10
    given = settings(rng, ordering)
    start = start or rng.choice(["earliest", "latest"])
    ordering = "group" if partitions else ordering
    value(conn, "ledger.make", stream, name, start, ordering, topic, below, partitions,
          Jsonb(given))  # fmt: skip


class Operator(Actor):
    """Changes, moves, drops and looks at whatever there is.

    Attributes:
        movable: consumers that are moved and replayed.
        droppable: consumers that are dropped and made anew.
    """

    pause = (0.02, 0.05, 0.1)

    def __init__(self, round_: Round, name: str, claimed: list[tuple[str, str]]):
        super().__init__(round_, name)
        self.claimed = claimed
        self.movable = [c for i, c in enumerate(claimed) if i % 3 == 1]
        self.droppable = [c for i, c in enumerate(claimed) if i % 3 == 2]

    def step(self) -> None:
        rng = self.rng
        what = rng.choice([
            step for step in (
                self.alter, self.alter, self.move, self.drop, self.hold, self.dead, self.dead,
                self.cancel, self.retain, self.schedule, self.scratch, self.drop_stream,
                self.look,
            ) if step.__name__ not in WITHOUT
        ])  # fmt: skip
        in_transaction = what not in (self.alter, self.hold) and rng.random() < 0.2
        if in_transaction:
            self.conn.execute("begin")
        what()
        if in_transaction:
            time.sleep(rng.choice([0, 0.05]))
            self.stop_transaction(0.4)

    def alter(self) -> None:
        stream, name = self.rng.choice(self.claimed)
        (about,) = call(self.conn, "open_consumer", stream, name)
        given = {**dict.fromkeys(RESET), **settings(self.rng, about.ordering)}
        if (stream, name) not in self.movable + self.droppable:
            given.pop("per_key_limit", None)  # what was assigned stays: only with its first limit
        pauses = self.rng.random() < 0.3
        if not pauses:  # only then this may change, and whether it goes by key
            given.pop("per_key_latest", None)
        else:
            value(self.conn, "pause", stream, name)
            time.sleep(self.rng.choice([0.1, 0.5]))
        try:
            value(self.conn, "ledger.alter", stream, name, Jsonb(given))
        finally:
            if pauses:
                value(self.conn, "resume", stream, name)

    def move(self) -> None:
        how = self.rng.choice(["seek", "seek", "replay"])
        to = "earliest" if how == "replay" else self.rng.choice(["earliest", "latest"])
        value(self.conn, "ledger.move_to", *self.rng.choice(self.movable), how, to)

    def drop(self) -> None:
        stream, name = self.rng.choice(self.droppable)
        if self.conn.info.transaction_status == TransactionStatus.INTRANS:
            # Two calls in a transaction: their first lock is that of the second call, or another
            # operator's call deadlocks with them, as base/locks.sql says.
            self.conn.execute(
                "select from pgqueue.streams where name = %s for no key update", [stream]
            )
        value(self.conn, "drop_consumer", stream, name)
        time.sleep(self.rng.choice([0, 0.05]))
        make(self.conn, self.rng, stream, name)

    def hold(self) -> None:
        of = self.rng.choice(self.round.names)
        value(self.conn, "pause", *of)
        time.sleep(self.rng.choice([0, 0.1]))
        value(self.conn, "resume", *of)

    def dead(self) -> None:
        of = self.rng.choice(self.claimed)
        rows = call(self.conn, "read_dead", *of, p_max=self.rng.choice([1, 20, 200]))
        if rows:
            how = self.rng.choice(["redrive", "redrive", "purge_dead"])
            seqs, tokens = [r.seq for r in rows], [r.data for r in rows]
            value(self.conn, "ledger.operate", how, *of, seqs, tokens)

    def cancel(self) -> None:
        of = self.rng.choice(self.claimed)
        rows = call(self.conn, "peek", *of, self.rng.choice([1, 3, 30]))
        if self.rng.random() < 0.3:
            value(self.conn, "retry", *of)
        elif self.rng.random() < 0.4:
            until = now(self.conn) + timedelta(seconds=self.rng.choice([-1, 0.2, 2]))
            value(self.conn, "postpone", *of, [r.seq for r in rows], until)
        elif rows:
            seqs, tokens = [r.seq for r in rows], [r.data for r in rows]
            value(self.conn, "ledger.operate", "cancel", *of, seqs, tokens)

    def retain(self) -> None:
        rng = self.rng
        limits = rng.choice([{}, {"p_done": True}, {"p_messages": 300}, {"p_for": "0.5 s"}])
        unread = rng.choice(["keep", "keep", "drop"])
        limits = {**limits, "p_unread": unread} if set(limits) - {"p_done"} else limits
        value(self.conn, "set_retention", rng.choice(STREAMS), **limits)

    def schedule(self) -> None:
        stream = self.rng.choice(STREAMS)
        if self.rng.random() < 0.6:
            value(self.conn, "create_schedule", stream, "tick", p_every="1 s", p_data="tick",
                  p_headers=Jsonb({"n": 0}), p_replace=True)  # fmt: skip
        else:
            value(self.conn, "drop_schedule", stream, "tick")

    def scratch(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            value(self.conn, "create_stream", SCRATCH, p_if_not_exists=True)
            value(self.conn, "create_consumer", SCRATCH, "c", p_if_not_exists=True)
            value(self.conn, "bind", "s", "b.*", SCRATCH)
        else:
            value(self.conn, "unbind", "s", "b.*", SCRATCH)

    def drop_stream(self) -> None:
        value(self.conn, "drop_stream", SCRATCH)

    def look(self) -> None:
        stream, name = self.rng.choice(self.claimed)
        seq = one(self.conn, "select max(seq) from pgqueue.messages") or 1
        call(self.conn, "explain_message", stream, name, seq)
        call(self.conn, "outcome", stream, name, seq)
        call(self.conn, "key_stats", stream, name)
        self.conn.execute("select * from pgqueue.consumer_stats").fetchall()
        self.conn.execute("select * from pgqueue.stream_stats").fetchall()


class Upkeep(Actor):
    """Calls maintain, which somebody has to."""

    pause = (0.05, 0.3)

    def step(self) -> None:
        call(self.conn, "maintain")


class Resolver(Actor):
    """Ends prepared transactions after a while."""

    pause = (0.05, 0.2)

    def step(self) -> None:
        resolve(self.conn, self.rng)


def resolve(conn: psycopg.Connection, rng: random.Random) -> None:
    """End each prepared transaction of the database, one way or the other."""
    found = conn.execute("select gid from pg_prepared_xacts where database = current_database()")
    for (gid,) in found.fetchall():
        conn.execute(f"{rng.choice(['commit', 'rollback'])} prepared '{gid}'".encode())


class Killer(Actor):
    """Ends backends and cancels statements; once in a round the server crashes."""

    pause = (0.05, 0.2, 0.4)

    def __init__(self, round_: Round, name: str, server: Restarts | None, crash_at: float | None):
        super().__init__(round_, name)
        self.server = server
        self.crash_at = None if crash_at is None else time.monotonic() + crash_at

    def step(self) -> None:
        if self.server and self.crash_at is not None and time.monotonic() > self.crash_at:
            self.crash_at = None
            self.server.restart("immediate")
            self.round.counts["crashes"] += 1
        how = self.rng.choice(["pg_terminate_backend", "pg_cancel_backend", "pg_cancel_backend"])
        self.conn.execute(
            f"select {how}(pid) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and backend_type = 'client backend'"
            " and application_name <> 'judge' order by random() limit 1".encode()
        )
