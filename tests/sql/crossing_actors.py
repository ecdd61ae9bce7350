"""The actors of the crossing: each is a thread with a connection of its own, which may be killed.

An actor repeats `step` until the round is over. What may happen to it is in `EXPECTED`; any other
error is a finding.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import psycopg
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import core
from tests.sql.crossing_ledger import OTHERWISE
from tests.sql.queue import call, one, value

STREAMS = ("s", "t")  # what s has of topic a.* is copied to t
SCRATCH = "scratch"  # a stream that comes and goes
KEYS = [f"{word}.{n}" for word in "ab" for n in range(6)]

# What an actor may be told, and by whom.
EXPECTED = {
    "57P01": "terminated", "57P02": "the server crashed", "57P03": "the server starts",
    "08006": "the connection was lost", "57014": "cancelled",
    "40001": "a writer at another isolation level", "PQ001": "the stream is gone",
    "PQ002": "the consumer is gone", "PQ012": "another worker has the partition",
    "PQ006": "it exists; or it delivers by key", "PQ013": "the consumer is full",
    "25P02": "the transaction failed", "55P03": "a lock was held",
    "0A000": "a transaction that notified is not prepared", OTHERWISE: "less than believed",
}  # fmt: skip

# What follows from what others do at that moment.
REFUSED = (
    "unknown schedule", "while it is paused", "prepared transaction with identifier",
    "p_settings: ",  # of a consumer that was dropped and created again, with another ordering
)  # fmt: skip


@dataclass
class Round:
    """What the actors of a round share."""

    url: str
    seed: int
    over: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    names: list[tuple[str, str]] = field(default_factory=list)  # of consumers: stream, name
    restarting: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, who: str, what: object) -> None:
        self.failures.append(f"{who}: {what}")


class Actor(threading.Thread):
    """A thread that does something at random, again and again."""

    pause = (0.0, 0.002, 0.01)

    def __init__(self, round_: Round, name: str):
        super().__init__(name=name, daemon=True)
        self.round = round_
        self.rng = random.Random(f"{round_.seed} {name}")
        self._conn: psycopg.Connection | None = None

    @property
    def conn(self) -> psycopg.Connection:
        if self._conn is None or self._conn.closed:
            self._conn = connection.connect(self.round.url)
            self._conn.execute("set client_min_messages = error")
            self._conn.execute("set statement_timeout = '30s'")  # longer than any wait of a round
            durable = self.rng.random() < 0.5
            self._conn.execute(f"set synchronous_commit = {'on' if durable else 'off'}".encode())
        return self._conn

    def run(self) -> None:
        while not self.round.over.is_set():
            try:
                self.step()
                self.round.counts[self.name.split()[0]] += 1
            except psycopg.Error as error:
                self.heed(error)
            except Exception as error:
                self.round.fail(self.name, repr(error))
            time.sleep(self.rng.choice(self.pause))
        if self._conn is not None:
            self._conn.close()

    def heed(self, error: psycopg.Error) -> None:
        """Go on after an expected error, and write down any other one."""
        lost = self._conn is None or self._conn.closed
        known = error.sqlstate in EXPECTED
        known = known or (error.sqlstate is None and isinstance(error, psycopg.OperationalError))
        known = known or any(text in str(error) for text in REFUSED)
        if not known or "statement timeout" in str(error):
            self.round.fail(self.name, f"{error.sqlstate} {str(error)[:1000]}")
        self.round.counts[f"{error.sqlstate}"] += 1
        if self._conn is not None and not lost:
            try:
                self._conn.execute("rollback")
            except psycopg.Error:
                self._conn.close()
        if lost:
            time.sleep(0.05)

    def step(self) -> None:
        raise NotImplementedError

    def stop_transaction(self, over: float = 0.2) -> None:
        """Commit, or go back; now and then leave it to the resolver as a prepared transaction."""
        if self.rng.random() < over:
            self.conn.execute("rollback")
        else:
            self.conn.execute("commit")


class Producer(Actor):
    """Sends in every way: alone, in transactions, at any isolation, with savepoints, prepared."""

    n = 0

    def send(self, stream: str | None = None) -> int | None:
        rng = self.rng
        self.n += 1
        stream = stream or rng.choice([*STREAMS, "s", SCRATCH])
        options: dict[str, Any] = {"priority": rng.choice([0, 0, 5, -3])}
        if rng.random() < 0.05:
            options["delay"] = rng.choice(["20 ms", "300 ms"])
        elif rng.random() < 0.03:
            options["expires"] = rng.choice(["-1 s", "1 s", "1 hour"])
        if rng.random() < 0.1 and stream != SCRATCH:
            options["dedup_key"] = f"d{rng.randrange(400)}"
        names = [name for of, name in self.round.names if of == stream]
        if rng.random() < 0.1 and names:
            options["consumers"] = rng.sample(names, rng.randint(1, len(names)))
        key = None if rng.random() < 0.1 else rng.choice(KEYS)
        arguments = [stream, f"{self.name} {self.n}", int(self.name.split()[1]), self.n, key,
                     rng.randrange(10), Jsonb(options)]  # fmt: skip
        return value(self.conn, "ledger.send", *arguments)

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            self.send()
            return
        level = rng.choice(["read committed", "repeatable read", "serializable"])
        self.conn.execute(f"begin transaction isolation level {level}".encode())
        for _ in range(rng.choice([1, 2, 5, 20])):
            if rng.random() < 0.2:
                self.conn.execute("savepoint one")
                self.send()
                self.conn.execute(rng.choice([b"rollback to one", b"release one"]))
            self.send()
            time.sleep(rng.choice([0, 0, 0, 0.01]))
        if rng.random() < 0.15:
            self.conn.execute("update ledger.sent set late = true where xid = pg_current_xact_id()")
            gid = f"{self.conn.info.dbname} {uuid.uuid4()}"
            self.conn.execute(f"prepare transaction '{gid}'".encode())
        else:
            self.stop_transaction()


class Sink(Actor):
    """Spark's sink: stages, publishes, and publishes again when it does not know whether it did."""

    pause = (0.02, 0.1)
    batch = 0
    n = 0

    def step(self) -> None:
        rng = self.rng
        size = rng.choice([1, 3, 30])
        tokens = [f"{self.name} {self.n + i}" for i in range(size)]
        keys = [rng.choice(KEYS) for _ in range(size)]
        about = (self.name, self.batch, rng.choice(STREAMS))
        made_up = (tokens, keys, int(self.name.split()[1]), self.n)
        self.n += size
        chunk = value(self.conn, "ledger.stage", *about, *made_up)
        if rng.random() < 0.1:
            return  # staged, and staged again
        for _ in range(20):
            try:
                value(self.conn, "ledger.publish_staged", *about, chunk, *made_up)
                if rng.random() < 0.8:
                    break
            except psycopg.Error as error:
                self.heed(error)
                if error.sqlstate in ("PQ013", "PQ008"):
                    return  # the batch is run again
                time.sleep(0.1)
        self.batch += 1


class Consumer(Actor):
    """Claims and settles in every way, and believes of each claim what it was told."""

    def __init__(self, round_: Round, name: str, stream: str, consumer: str):
        super().__init__(round_, name)
        self.of = (stream, consumer)
        self.held: tuple[int, int, dict[int, str]] | None = None  # consumer_id, claim, tokens

    def receive(self) -> None:
        rng = self.rng
        where = "$.headers.n < 7" if rng.random() < 0.1 else None
        acked: tuple[Any, ...] = (None, None, None, None)
        if self.held is not None:
            consumer_id, claim, tokens = self.held
            acked = (consumer_id, claim, list(tokens), list(tokens.values()))
        self.held = None
        size = rng.choice([1, 1, 3, 10, 100, 1000])
        in_transaction = rng.random() < 0.2
        if in_transaction:
            self.conn.execute("begin")
            if rng.random() < 0.3:
                self.conn.execute("savepoint one")
                self.ask(size, where, acked)
                self.conn.execute("rollback to one")
        rows = self.ask(size, where, acked)
        if in_transaction:
            time.sleep(rng.choice([0, 0, 0.02]))
            if rng.random() < 0.2:
                self.conn.execute("rollback")
                return
            self.conn.execute("commit")
        if rows:
            tokens = {r.seq: r.token for r in rows}
            self.held = (rows[0].consumer_id, rows[0].claim_id, tokens)

    def ask(self, size: int, where: str | None, acked: tuple[Any, ...]) -> list[Any]:
        return call(self.conn, "ledger.receive", *self.of, size, where, *acked)

    def ack(self, part: dict[int, str], whole: bool = False) -> int:
        assert self.held is not None
        return value(self.conn, "ledger.ack", *self.held[:2], list(part), [*part.values()], whole)

    def refresh(self) -> None:
        """Believe what the tables say: a part went back, or was cancelled."""
        if self.held is not None:
            consumer_id, claim, tokens = self.held
            left = {s: tokens[s] for s in core.held_by(self.conn, claim)}
            self.held = (consumer_id, claim, left) if left else None

    def step(self) -> None:
        self.receive()
        if self.held is None:
            time.sleep(0.01)
            return
        if self.rng.random() < 0.1:
            return  # acknowledged with the next claim
        try:
            self.settle()
        finally:
            self.held = None

    def settle(self) -> None:
        rng, conn = self.rng, self.conn
        assert self.held is not None
        _, claim, tokens = self.held
        part = dict(rng.sample(list(tokens.items()), rng.randint(1, len(tokens))))
        what = rng.random()
        if what < 0.45:
            self.ack(tokens, whole=True)
            return
        if what < 0.6:
            if rng.random() < 0.3:
                conn.execute("begin")
                self.ack(part)
                self.stop_transaction(0.4)
            else:
                self.ack(part)
        elif what < 0.75:
            value(conn, "nack", claim, list(part), rng.choice([None, "0", "50 ms"]), "no")
        elif what < 0.8:
            value(conn, "defer", claim, list(part), rng.choice(["0", "50 ms"]), Jsonb({"a": 1}))
        elif what < 0.85:
            value(conn, "dead_letter", claim, list(part), rng.choice([None, "bad"]))
        elif what < 0.9:
            value(conn, "extend", claim)
        elif what < 0.95:
            time.sleep(rng.choice([0.3, 0.9]))  # too late, perhaps
        else:
            return  # forgotten: the lease ends
        self.refresh()
        if self.held is not None:
            self.ack(self.held[2], whole=rng.random() < 0.5)


class Reader(Actor):
    """A Spark query: a checkpoint that goes from batch to batch, and starts again after a crash."""

    def __init__(self, round_: Round, name: str, stream: str, consumer: str):
        super().__init__(round_, name)
        self.of = (stream, consumer)
        self.forget()

    def forget(self) -> None:
        """A new checkpoint."""
        self.id, self.claim, self.messages = uuid.uuid4(), 0, 0
        self.consumer_id: int | None = None
        self.last: dict[int, str] = {}  # of the batch that is done
        self.end: tuple[int, int] | None = None  # of the batch that is planned
        self.planned: dict[int, str] | None = None

    def step(self) -> None:
        if self.consumer_id is None:
            (row,) = call(self.conn, "open_consumer", *self.of)
            self.consumer_id = row.consumer_id
        if self.end is None:
            (row,) = call(
                self.conn, "ledger.reader_claim", self.id, self.consumer_id, self.claim,
                self.messages, self.rng.choice([1, 10, 500]), list(self.last),
                [*self.last.values()],
            )  # fmt: skip
            if row.claim_id == self.claim:
                return
            self.end, self.planned = (row.claim_id, row.messages), None
        self.plan()
        if self.planned is not None and self.rng.random() < 0.8:  # or else it starts again
            self.claim, self.messages = cast("tuple[int, int]", self.end)
            self.last, self.end, self.planned = self.planned, None, None

    def plan(self) -> None:
        assert self.end is not None
        at = (self.id, self.consumer_id, self.claim, self.end[0])
        (resumed,) = call(self.conn, "reader_resume", *at, uuid.uuid4())
        ranges = call(self.conn, "reader_plan", self.id, self.claim, self.end[0])
        seqs = [s for r in ranges for s in range(r.lo, r.hi)]
        found = dict(
            self.conn.execute(
                "select seq, data from pgqueue.messages where stream_id = (select stream_id"
                " from pgqueue.open_stream(%s)) and seq = any (%s)", [self.of[0], seqs],
            ).fetchall()
        )  # fmt: skip
        if set(found) != set(seqs):
            self.round.fail(self.name, f"planned and not stored: {set(seqs) - set(found)}")
        complete = resumed.taken_over + resumed.gone == 0
        if complete and self.planned not in (None, found):
            self.round.fail(self.name, f"a batch had {self.planned}, and has {found}")
        self.planned = found

    def heed(self, error: psycopg.Error) -> None:
        if error.sqlstate in ("PQ002", "PQ005") or "too late" in str(error):
            self.forget()
        if error.sqlstate != "PQ005":
            super().heed(error)


class Group(Actor):
    """A worker of a group, which commits offsets beside its work."""

    sizes = (1, 5, 100)

    def __init__(self, round_: Round, name: str, stream: str, group: str):
        super().__init__(round_, name)
        self.of = (stream, group)

    def step(self) -> None:
        (about,) = call(self.conn, "open_consumer", *self.of)
        leases = call(self.conn, "lease_partitions", *self.of, self.name, p_lease="1 s")
        ids = [row.lease_id for row in leases]
        rows = call(self.conn, "read_partitions", *self.of, ids, self.rng.choice(self.sizes))
        if self.rng.random() < 0.05:
            time.sleep(1.2)  # longer than the lease
        done: dict[int, list[Any]] = {}
        for row in rows:
            done.setdefault(row.lease_id, []).append(row)
        self.conn.execute("begin")
        for lease in sorted(done):
            of = [row for row in done[lease] if row.seq is not None]
            value(
                self.conn, "ledger.commit_offset", about.consumer_id, lease,
                done[lease][-1].next_offset, [r.seq for r in of], [r.data for r in of],
            )  # fmt: skip
        self.stop_transaction()
        for row in leases:
            if row.to_release:
                value(self.conn, "commit_offset", row.lease_id, None, True)
        if self.rng.random() < 0.03:
            value(self.conn, "leave_group", *self.of, self.name)


class OffsetReader(Actor):
    """Reads without a consumer, keeps its offset itself, and sees each message once."""

    pause = (0.005, 0.02)

    def __init__(self, round_: Round, name: str, stream: str):
        super().__init__(round_, name)
        self.stream = stream
        self.offset: Any = None
        self.seen: Counter[str] = Counter()
        self.skipped = False  # retention was faster

    def step(self) -> None:
        try:
            self.read()
        except psycopg.errors.Error as error:
            if error.sqlstate != "PQ010":
                raise
            self.skipped = True
            offset = value(self.conn, "read_to", self.stream, self.at(), 1, p_skip_trimmed=True)
            seqs = self.plan(offset, True)
            self.note(seqs, offset)

    def at(self) -> Any:
        return None if self.offset is None else Jsonb(self.offset)

    def read(self) -> None:
        if self.rng.random() < 0.5:
            rows = call(self.conn, "read", self.stream, self.at(), self.rng.choice([1, 10, 1000]))
            self.seen.update(r.data for r in rows if r.seq is not None)
            self.offset = rows[-1].next_offset
            return
        offset = value(self.conn, "read_to", self.stream, self.at(), self.rng.choice([1, 50, None]))
        self.note(self.plan(offset, False), offset)

    def plan(self, offset: Any, skip: bool) -> list[str]:
        start = self.offset or one(self.conn, "select pgqueue.start_offset(%s)", self.stream)
        rows = self.conn.execute(
            "select m.data from pgqueue.read_plan(%s, %s, %s, %s) r"
            " join pgqueue.messages m on m.seq >= r.lo and m.seq < r.hi"
            " and m.stream_id = (select stream_id from pgqueue.open_stream(%s))",
            [self.stream, Jsonb(start), Jsonb(offset), skip, self.stream],
        ).fetchall()
        # Retention may have emptied a table between the plan and the look: then this says so.
        call(self.conn, "read_plan", self.stream, Jsonb(start), Jsonb(offset), skip)
        return [row[0] for row in rows]

    def note(self, tokens: list[str], offset: Any) -> None:
        self.seen.update(tokens)
        self.offset = offset
