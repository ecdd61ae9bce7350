"""Small cases: a stream with a few messages, and the calls that sessions make of it at once.

A case is what each session calls (of `CALLS`), an ordering, and what else there is: a retention, a
lease that is over, a transaction that does not commit. The `Ledger` is told what was committed, and
knows what has to come of it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from tests.explore.calls import CALLS, Kind, note_reader_claim, note_staged, planned
from tests.explore.scheduler import Call, Outcome, Transaction
from tests.sql import checker, clock
from tests.sql.queue import AT_ONCE

ORDERINGS = ("none", "key", "stream")
BESIDE = ("", "retention", "expiry", "rollback", "kill")
LEASES = ("claim", "batch", "resting", "leases", "read")
"""Needs of a call that has a lease, which an expiry ends: without one an expiry changes nothing."""

# What a call may meet: the states of the queue that others brought about meanwhile. Of 55P03 only
# that of recover(), which refuses to work beside producers.
MAY_FAIL = ("PQ0", "2BP01", "55006")


@dataclass
class Ledger:
    """What was committed, as the sessions were told."""

    sent: set[int] = field(default_factory=set)
    taken: list[set[int]] = field(default_factory=list)  # of each claim
    acked: Counter[int] = field(default_factory=Counter)
    unsure: set[int] = field(default_factory=set)  # acknowledged, or lost before that
    extended: set[int] = field(default_factory=set)  # of claims that were live then
    ticks: set[int] = field(default_factory=set)  # messages of a schedule that were received
    refused: list[str] = field(default_factory=list)  # as a call may be
    errors: list[str] = field(default_factory=list)

    def outcome(self, outcome: Outcome) -> None:
        error = outcome.error
        if error is None or outcome.name == "kill":
            return
        may = (error.sqlstate or "").startswith(MAY_FAIL)
        may = may or (outcome.name == "recover" and error.sqlstate == "55P03")
        (self.refused if may else self.errors).append(f"{outcome.name}: {error.sqlstate} {error}")

    def settle(self, held: set[int], count: int, may_miss: bool) -> None:
        """So many messages of those that a session held were acknowledged."""
        if count == len(held):
            self.acked.update(held)
        elif count:
            assert may_miss, f"{count} of {held}"
            self.unsure |= held

    def see(self, rows: list[Any]) -> None:
        self.ticks |= {row.seq for row in rows if row.data == "tick"}


@dataclass
class Reader:
    """A checkpoint, as Spark keeps one: offsets are the id of a claim, and messages until then."""

    id: str
    start: tuple[int, int] = (0, 0)
    end: tuple[int, int] = (0, 0)
    held: set[int] = field(default_factory=set)


@dataclass
class Case:
    """Two or more sessions, and what they call: `a+b` in two transactions, `a&b` in one."""

    calls: tuple[str, ...]
    ordering: str = "none"
    beside: str = ""  # retention, expiry, rollback, kill
    warm: bool = False  # the messages were taken, and are ready
    limited: bool = False  # the consumer has a setting by which each claim locks the consumer
    conn: psycopg.Connection[Any] | None = None
    stream: str = ""
    stream_id: int = 0
    consumer_id: int = 0
    published: int = 0  # how often, the batch that is staged before the sessions begin
    ledger: Ledger = field(default_factory=Ledger)
    claims: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    readers: dict[int, Reader] = field(default_factory=dict)
    leases: dict[int, list[int]] = field(default_factory=dict)
    reads: dict[int, list[Any]] = field(default_factory=dict)  # of a group, not committed
    group_done: list[tuple[int, int]] = field(default_factory=list)  # partition, seq
    staged: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # -1: the common batch
    offsets: dict[int, Any] = field(default_factory=dict)
    seen: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    seqs: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        said = [" | ".join(self.calls), self.ordering, self.beside, "limited" * self.limited]
        return ", ".join(filter(None, said))

    @property
    def kinds(self) -> list[Kind]:
        return [kind for call in self.calls for kind in kinds_of(call)]

    @property
    def sink(self) -> str:
        """A query that writes, which no case had before."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, self.stream))

    def may(self, what: str) -> bool:
        return any(getattr(kind, what) for kind in self.kinds)

    def has(self, *needs: str) -> bool:
        return any(kind.needs in needs for kind in self.kinds)

    def who(self, *needs: str) -> list[int]:
        """The sessions that need it."""
        return [
            actor for actor, call in enumerate(self.calls)
            if any(kind.needs in needs for kind in kinds_of(call))
        ]  # fmt: skip

    def ask(self, query: str, *values: Any) -> list[Any]:
        assert self.conn is not None
        cursor = self.conn.cursor(row_factory=namedtuple_row)
        cursor.execute(query.encode(), values)
        return [] if cursor.description is None else cursor.fetchall()

    def reader(self, actor: int) -> Reader:
        name = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.stream} {actor}")
        return self.readers.setdefault(actor, Reader(str(name)))

    # What there is before the sessions begin

    def prepare(self, conn: psycopg.Connection[Any], stream: str) -> None:
        self.conn, self.stream, self.ledger, self.published = conn, stream, Ledger(), 0
        for kept in (self.claims, self.readers, self.leases, self.reads, self.staged):
            kept.clear()
        for kept in (self.group_done, self.offsets, self.seen):
            kept.clear()
        ((self.stream_id,),) = self.ask("select pgqueue.create_stream(%s)", stream)
        if self.has("window"):
            self.ask('select pgqueue.alter_stream(%s, \'{"dedup_window": "1 hour"}\')', stream)
        if self.has("other", "bound"):
            self.ask("select pgqueue.create_stream(%s)", stream + "_other")
        if self.has("bound"):
            self.ask("select pgqueue.bind(%s, '*', %s)", stream, stream + "_other")
        if self.beside == "retention":
            self.ask("select pgqueue.set_retention(%s, p_messages => 1)", stream)
        ((self.consumer_id,),) = self.ask(
            "select pgqueue.create_consumer(%s, 'c', 'earliest', %s,"
            " p_settings => %s)",
            stream, self.ordering,
            json.dumps(AT_ONCE | {"max_deliver_count": 3}
                       | ({"max_in_flight": 100} if self.limited else {})),
        )  # fmt: skip
        if self.has("group", "leases", "read"):
            self.ask("select pgqueue.create_group(%s, 'g', 2, 'earliest')", stream)
        if self.has("offset group"):
            self.ask("select pgqueue.create_group(%s, 'o', 1, 'earliest')", stream)
        if self.has("schedule"):
            self.prepare_schedule()
        if self.has("archive"):
            self.ask("select pgqueue.set_archive(%s, '/nowhere')", stream)
        if self.has("table", "captured"):
            self.ask(f"create table public.{stream} (id serial primary key, x text)")
        if self.has("captured"):
            self.ask("select pgqueue.capture(%s, %s)", f"public.{stream}", stream)
        self.seqs = []
        for keys in (["a", "b"], ["a", "b"]):
            self.seqs += self.send(keys)
        if self.has("dead"):
            (row, *_) = self.ask("select * from pgqueue.receive(%s, 'c', 1)", stream)
            self.ask("select pgqueue.dead_letter(%s)", row.claim_id)
        self.ledger.sent |= set(self.seqs)
        for actor in self.who("claim"):
            self.claim_for(actor)
        self.prepare_readers()
        self.prepare_leases()
        if self.has("staged"):
            text = CALLS["stage"].text.replace("{stream_id}", str(self.stream_id))
            with conn.transaction():
                note_staged(self, -1, self.ask(text, self.sink))
        if self.has("paused"):
            self.ask("select pgqueue.pause(%s, 'c')", stream)
        elif self.warm:
            (row, *_) = self.ask("select * from pgqueue.receive(%s, 'c', 1)", stream)
            self.ask("select pgqueue.nack(%s)", row.claim_id)
        if not self.warm:
            clock.set_hints(conn)

    def send(self, keys: list[str]) -> list[int]:
        rows = self.ask(
            "select * from pgqueue.send_batch(%s, %s, %s)", self.stream, ["x"] * len(keys), keys
        )
        return [row[0] for row in rows]

    def claim_for(self, actor: int) -> None:
        timeout = "1 us" if self.beside == "expiry" else "1 hour"
        rows = self.ask("select * from pgqueue.receive(%s, 'c', 2, %s)", self.stream, timeout)
        if rows:
            self.claims[actor] = rows[0].claim_id, [row.seq for row in rows]
            self.ledger.taken.append({row.seq for row in rows})
        else:
            self.claims[actor] = 0, [0]

    def prepare_schedule(self) -> None:
        """One time of a schedule is due."""
        assert self.conn is not None
        self.ask(
            "select pgqueue.create_schedule(%s, 't', p_every => interval '1 hour', p_key => 'a',"
            " p_data => 'tick')", self.stream
        )  # fmt: skip
        clock.pass_time(self.conn, timedelta(minutes=61))

    def prepare_readers(self) -> None:
        """Queries that have planned a micro-batch; those that rest gave no sign of life lately."""
        assert self.conn is not None
        for actor in self.who("batch", "resting"):
            mine = self.reader(actor)
            rows = self.ask(
                "select * from pgqueue.reader_claim(%s, %s, 0, 0, 2, '1 hour')",
                mine.id, self.consumer_id,
            )  # fmt: skip
            note_reader_claim(self, actor, rows)
            self.ask(
                "select pgqueue.reader_resume(%s, %s, %s, %s, %s)", *planned(self, actor)
            ) if mine.end != mine.start else None
            if self.beside == "expiry" and mine.end != mine.start:
                clock.end_lease(self.conn, mine.end[0])
        if self.who("resting") and self.beside != "expiry":
            clock.pass_time(self.conn, timedelta(minutes=25))

    def prepare_leases(self) -> None:
        assert self.conn is not None
        workers = self.who("leases", "read")
        for actor in workers * 2:
            rows = self.lease(f"worker{actor}")
            self.leases[actor] = [row.lease_id for row in rows if not row.to_release]
            for row in rows:
                if row.to_release:
                    self.ask("select pgqueue.commit_offset(%s, null, true)", row.lease_id)
        for actor in self.who("read"):
            self.reads[actor] = self.ask(
                "select * from pgqueue.read_partitions(%s, 'g', %s, 2)",
                self.stream, self.leases[actor],
            )  # fmt: skip
        for actor in workers if self.beside == "expiry" else []:
            clock.end_worker_lease(self.conn, f"worker{actor}")

    def lease(self, worker: str) -> list[Any]:
        return self.ask("select * from pgqueue.lease_partitions(%s, 'g', %s)", self.stream, worker)

    def plan(self, reader: Reader) -> set[int]:
        rows = self.ask(
            "select lo, hi from pgqueue.reader_plan(%s, %s, %s)",
            reader.id, reader.start[0], reader.end[0],
        )  # fmt: skip
        return {seq for row in rows for seq in range(row.lo, row.hi)}

    def read_all(self, offset: Any = None) -> list[Any]:
        """All messages that are published, in the order in which an offset passes them."""
        found: list[Any] = []
        while rows := self.ask(
            "select * from pgqueue.read(%s, %s)",
            self.stream, None if offset is None else json.dumps(offset),
        ):  # fmt: skip
            found += [row for row in rows if row.seq is not None]
            if rows[-1].next_offset == offset:
                break
            offset = rows[-1].next_offset
        return found

    def programs(self) -> list[list[Transaction]]:
        """What the sessions do. The first one does not commit where the case says so."""
        found = []
        for actor, call in enumerate(self.calls):
            ends = self.beside if actor == 0 and self.beside in {"rollback", "kill"} else "commit"
            found.append([
                Transaction(tuple(self.call(actor, name) for name in names.split("&")), ends)
                for names in call.split("+")
            ])  # fmt: skip
        if self.beside == "retention":
            found.append([Transaction((self.call(len(found), "maintain"),))])
        return found

    def call(self, actor: int, name: str) -> Call:
        kind = CALLS[name]
        note = kind.note
        text = kind.text.replace("{stream}", self.stream)
        return Call(
            name, text.replace("{stream_id}", str(self.stream_id)),
            lambda: kind.values(self, actor),
            None if note is None else lambda rows: note(self, actor, rows),
        )  # fmt: skip

    # What has to be true

    def check(self) -> None:
        """After each end of a transaction."""
        assert not self.ledger.errors, self.ledger.errors
        assert self.conn is not None
        try:
            with self.conn.transaction():
                self.conn.execute("set transaction isolation level repeatable read")
                self.conn.execute("set local lock_timeout = '200ms'")
                consumers = checker.read_here(self.conn)
                new = {row[0] for row in self.ask("select consumer_id from pgqueue.new_capacities")}
        except psycopg.errors.LockNotAvailable:
            return  # a session that is paused has the tables: after its end is time enough
        for consumer in consumers:
            if consumer.consumer_id in new:  # maintain() adds entries of sessions that began before
                consumer.per_key_capacity = None
        checker.check(self.conn, consumers=consumers)

    def check_end(self) -> None:
        """When all sessions are done: the rest is delivered, once and in order; nothing is lost."""
        self.check()
        ledger = self.ledger
        if not self.may("frees"):
            taken = Counter(seq for seqs in ledger.taken for seq in seqs)
            if self.beside == "expiry":
                taken = Counter({seq: taken[seq] for seq in ledger.extended})
            assert all(n == 1 for n in taken.values()), f"delivered to two: {taken}"
        if not self.may("frees") and self.beside != "expiry":
            self.check_plans()
        if self.may("ends") and not self.ask(
            "select from pgqueue.streams where name = %s", self.stream
        ):
            return
        self.check_offsets()
        if self.ask(
            "select from pgqueue.consumers c join pgqueue.streams s using (stream_id)"
            " where s.name = %s and c.name = 'c'", self.stream
        ):  # fmt: skip
            self.check_queue()
        self.check_group()

    def check_plans(self) -> None:
        """The same offsets name the same messages."""
        if self.may("drops") or self.may("acts"):
            return
        for reader in self.readers.values():
            if reader.end != reader.start:
                plan = self.plan(reader)
                assert plan == reader.held, f"{reader}: its plan is {plan}"

    def check_queue(self) -> None:
        ledger = self.ledger
        drained, dead = self.drain()
        if not self.may("repeats"):
            again = {seq for seq, n in (ledger.acked + Counter(drained)).items() if n > 1}
            assert not again, f"acknowledged, and came again: {again}"
        if not self.may("drops"):
            lost = ledger.sent - set(ledger.acked) - set(drained) - dead - ledger.unsure
            assert not lost, f"lost: {lost}; acknowledged {ledger.acked}, came {drained}"
        if not self.may("sends_unseen"):
            unknown = set(drained) - ledger.sent
            assert not unknown, f"nobody sent {unknown}"
        if self.ordering != "none" and not self.may("reorders"):
            for key in range(2):
                mine = [seq for seq in drained if seq in self.seqs[key::2]]
                assert mine == sorted(mine), f"out of order: {drained}"

    def drain(self) -> tuple[list[int], set[int]]:
        """Receive and acknowledge all that is left; and what is dead."""
        assert self.conn is not None
        self.ask("select pgqueue.resume(%s, 'c')", self.stream)
        if self.has("schedule"):
            (count,) = self.ask(
                "select count(*) from pgqueue.schedules where name = 't' and stream_id = %s",
                self.stream_id,
            )
            if count[0]:
                self.ask("select pgqueue.drop_schedule(%s, 't')", self.stream)
        clock.pass_time(self.conn, timedelta(days=1))
        drained: list[int] = []
        for _ in range(3):
            while rows := self.ask("select * from pgqueue.receive(%s, 'c', 10)", self.stream):
                drained += [row.seq for row in rows]
                self.ledger.see(rows)
                self.ask("select pgqueue.ack(%s)", rows[0].claim_id)
            clock.look_again(self.conn)
        self.check()
        assert len(self.ledger.ticks) <= 1, f"a time of a schedule sent {self.ledger.ticks}"
        dead = self.ask("select seq from pgqueue.read_dead(%s, 'c')", self.stream)
        return drained, {row.seq for row in dead}

    def check_offsets(self) -> None:
        """Who reads by offset gets each message once."""
        if self.beside == "retention":
            return
        everything = self.read_all()
        for actor in self.who("offset"):
            seen = self.seen[actor] + [row.seq for row in self.read_all(self.offsets.get(actor))]
            assert sorted(seen) == sorted({row.seq for row in everything}), (
                f"session {actor} read {seen}, and there are {[row.seq for row in everything]}"
            )
            missing = self.ledger.sent - set(seen)
            assert not missing, f"session {actor} did not read {missing}"

    def check_group(self) -> None:
        """Each message was done once, by the worker of its partition, in order."""
        if not self.has("group", "leases", "read"):
            return
        assert self.conn is not None
        clock.pass_time(self.conn, timedelta(days=1))
        done = list(self.group_done)
        leases = [row.lease_id for row in self.lease("last")]
        assert len(leases) == 2, f"the last worker gets {leases}"
        for _ in range(100):
            rows = self.ask(
                "select * from pgqueue.read_partitions(%s, 'g', %s)", self.stream, leases
            )
            if not rows:
                break
            for lease_id in {row.lease_id for row in rows}:
                last = [row.next_offset for row in rows if row.lease_id == lease_id][-1]
                self.ask("select pgqueue.commit_offset(%s, %s)", lease_id, last)
            done += [(row.partition, row.seq) for row in rows if row.seq is not None]
        seqs = [seq for _, seq in done]
        assert len(seqs) == len(set(seqs)), f"done twice: {done}"
        missing = self.ledger.sent - set(seqs)
        assert not missing, f"the group did not get {missing}: {done}"
        if not self.has("schedule"):
            for partition in range(2):
                mine = [seq for p, seq in done if p == partition and seq in self.seqs]
                assert mine == sorted(mine), f"out of order: {done}"

    def clean(self) -> None:
        if self.has("table", "captured"):
            self.ask(f"drop table if exists public.{self.stream} cascade")
        for name in (self.stream, self.stream + "_other", self.stream + "_new"):
            if self.ask("select from pgqueue.streams where name = %s", name):
                self.ask("select pgqueue.drop_stream(%s)", name)


def kinds_of(calls: str) -> list[Kind]:
    """Those of the calls of a session."""
    return [CALLS[name] for name in re.split("[+&]", calls)]
