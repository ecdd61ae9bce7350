"""A small model of the queue, and the steps by which hypothesis compares the queue with it.

The model knows what may be delivered and in which order. After every step the views say what it
says, and what is held passes the checker. Time is the test's: the stored times move, and nobody
waits.
"""

from __future__ import annotations

import sys
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.processes import wait_until
from tests.sql import checker, clock, core, internals
from tests.sql.explaining import check_explanations
from tests.sql.model_limits import CHANGES, LIMITS, SOME_LIMITS, Limits
from tests.sql.model_views import STATES, check_views
from tests.sql.queue import AT_ONCE, call, claim_of, one, seqs_of, value

LONG = "10 days"
PARTITIONS = 3  # of the group
KEEP_DEAD = 2  # hours
EMPTY_CLAIMS = 20  # by how many claims at most something is found with small limits
KEYS = st.sampled_from(["a", "b", "c", None])
TOPICS = st.sampled_from([None, None, "a", "*"])
DEDUP_KEYS = st.sampled_from([None, None, None, "d", "e"])
HOURS = st.sampled_from([None, None, None, None, -1, 1, 2])
SIZES = st.sampled_from([1, 1, 2, 3, 5, 100, 300])
BACKOFFS: Any = st.sampled_from([
    {}, {}, {}, {"backoff_base": "1 hour"},
    {"backoff": "linear", "backoff_base": "1 hour", "backoff_cap": "2 hours"},
    {"backoff": "exponential", "backoff_base": "1 hour", "backoff_cap": "3 hours"},
])  # fmt: skip
MODES = st.sampled_from(["auto", "auto", "auto", "wrote", "savepoint", "rollback"])

WORK: Any = {
    "data": st.data(),
    "keys": st.lists(KEYS, min_size=1, max_size=3),
    "size": SIZES,
    "whole": st.booleans(),
    "action": st.sampled_from(["ack", "nack", "nack", "defer", "extend"]),
    "hours": st.sampled_from([None, 0, 1]),
}


@dataclass
class Message:
    """What a consumer knows of a message."""

    seq: int
    key: str | None
    priority: int
    not_before: int | None
    state: str = "new"  # new, queued, claimed, dead, acked
    position: tuple[int, int] = (0, 0)  # the claim that took it, and the order within that
    deliver_count: int = 0
    spark: int = 0  # of these, to Spark, which do not count
    dead_hours: int = 0
    at_most: int | None = None  # no claim with it has more
    saved: int | None = None  # what comes back with it
    came_back: bool = False  # from a claim
    expires: int | None = None  # from this hour on nobody gets it

    @property
    def place(self) -> tuple[int, int, int]:
        return *self.position, self.seq

    @property
    def counted(self) -> int:
        """The deliveries that make a failure dead, or its delay longer."""
        return self.deliver_count - self.spark


@dataclass
class Claim:
    claim_id: int
    consumer: Consumer
    held: set[int]
    original: set[int]
    reader: Reader | None = None
    live: bool = True
    expired: bool = False
    ended: int = 0  # when its lease did
    moved: bool = False  # its consumer was
    settled: int = 0


@dataclass
class Reader:
    reader: uuid.UUID
    claim: int = 0
    messages: int = 0
    end: tuple[int, int] | None = None  # of the batch that is being processed
    lost: int = 0


@dataclass
class Consumer:
    name: str
    consumer_id: int
    ordering: str
    max_deliver_count: int | None
    topic: str | None = None  # of its messages alone: a key, or * for those that have one
    backoff: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    bounded: bool = False  # it had limits of keys, so a claim may hold less than there is
    messages: dict[int, Message] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    claims: dict[int, Claim] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)
    takes: int = 0
    newest: dict[str, int] | None = None  # by key, with per_key_latest

    def is_replaced(self, m: Message) -> bool:
        """Whether a newer message of its key was taken."""
        return self.newest is not None and m.key is not None and m.seq < self.newest.get(m.key, 0)

    def key(self, m: Message) -> str | None:
        """What orders the message; None: nothing."""
        return {"none": None, "key": m.key, "stream": ""}[self.ordering]

    def passes(self, key: str | None) -> bool:
        return self.topic is None or (key is not None and self.topic in ("*", key))

    def is_owed(self) -> bool:
        """Whether it is to get a message, or has one."""
        return any(m.state not in ("acked", "dead") for m in self.messages.values())

    def give_up(self, m: Message) -> bool:
        return self.max_deliver_count is not None and m.counted >= self.max_deliver_count

    def delay(self, m: Message) -> int:
        """The hours after which a failed message comes again."""
        constant = 1 if self.backoff.get("backoff_base") else 0
        return {"constant": constant, "linear": min(m.counted, 2),
                "exponential": min(2 ** (m.counted - 1), 3)}[
                    self.backoff["backoff"]]  # fmt: skip

    def in_flight(self) -> Counter[str | None]:
        """By key, how many messages are in claims."""
        return Counter(m.key for m in self.messages.values() if m.state == "claimed")

    def with_room(self, clock: int) -> list[Message]:
        """What is deliverable, and of a key that is not at its limits."""
        in_flight = self.in_flight()
        return [m for m in self.deliverable(clock) if self.limits.has_room(m.key, in_flight, clock)]

    def deliverable(self, clock: int, expired: bool = False) -> list[Message]:
        """What a claim of any size has to return, in the order of delivery within each key.

        Args:
            clock: the time.
            expired: also what has expired; else it is behind that of its key, which nobody has
                come upon yet.
        """
        busy = {self.key(m) for m in self.messages.values() if m.state == "claimed"} - {None}
        queued = [m for m in self.messages.values() if m.state == "queued"]
        found = []
        blocked = set(busy)
        for m in sorted(queued, key=lambda m: m.place):
            key, due = self.key(m), m.not_before is None or m.not_before <= clock
            due = due and (expired or m.expires is None or m.expires > clock)
            if due and (key is None or key not in blocked):
                found.append(m)
            else:
                blocked.add(key)
        if self.ordering == "none" and not self.limits:
            found.sort(key=lambda m: (-m.priority, *m.place))
        return found


@dataclass
class Publication:
    """Something sent, perhaps in a transaction that is still running."""

    messages: list[tuple[int, str | None]]
    priority: int
    not_before: int | None
    consumers: set[int] | None
    firsts: dict[str, int] = field(default_factory=dict)
    expires: int | None = None


class QueueMachine(RuleBasedStateMachine):
    """A stream, its consumers, and transactions that take their time.

    Attributes:
        url: of the database.
        ordering: of the consumers.
        bounded: the limits are small, so a claim need not take, release and find everything; then
            what it has taken and released is read from the tables, and it may return too little.
            But nothing wrong, and in the end everything. So also where retention skips, which
            takes and releases what it needs.
        unread: what retention does with what a consumer owes.
        latest: of each consumer only the newest message of a key waits. What it has judged is read
            from the tables; what that replaces is not.
        limited: each consumer has limits of keys, at first, and most messages have the same key;
            nobody reads beside them.
    """

    url: str
    ordering: str
    bounded: bool = False
    unread: str = "keep"
    latest: bool = False
    limited: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.conn = connection.connect(self.url)
        self.conn.execute("set client_min_messages = error")
        self.conn.execute("set statement_timeout = '20s'")
        self.stream = f"s{uuid.uuid4().hex[:8]}"
        self.stream_id = value(self.conn, "create_stream", self.stream)
        self.clock = 0
        self.consumers: list[Consumer] = []
        self.published: list[Publication] = []
        self.slow: list[tuple[psycopg.Connection, list[Publication]]] = []
        self.names = 0
        self.retains = False
        self.trimmed: set[int] = set()
        self.was_overtaken = False  # perhaps, who reads
        self.offset: Any = None  # of somebody who reads without claiming
        self.was_read: set[int] = set()
        self.was_grouped: list[int] = []  # worked off by the group, in order
        call(self.conn, "alter_stream", self.stream, Jsonb({"dedup_window": str(LONG)}))
        self.firsts: dict[str, int] = {}  # the first message of each dedup key

    # ------------------------------------------------------------------ helpers

    def run(self, mode: str, operation: Any, conn: psycopg.Connection | None = None) -> Any:
        """Do it in one of the ways that a transaction can go; None: it was rolled back."""
        conn = conn or self.conn
        if mode == "auto":
            return operation()
        conn.execute("begin")
        try:
            if mode == "wrote":
                conn.execute("select pg_current_xact_id()")
                result = operation()
            elif mode == "savepoint":
                conn.execute("savepoint one")
                operation()
                conn.execute("rollback to one")
                result = operation()
            else:
                operation()
                result = None
        except BaseException:
            conn.execute("rollback")
            raise
        conn.execute("rollback" if mode == "rollback" else "commit")
        return result

    def is_bounded(self, c: Consumer) -> bool:
        """Whether a claim of it may hold less than there is."""
        return self.bounded or c.bounded

    def publish(self, p: Publication) -> None:
        self.published.append(p)
        for c in self.consumers:
            self.deliver(c, p)

    @staticmethod
    def deliver(c: Consumer, p: Publication) -> None:
        if p.consumers is None or c.consumer_id in p.consumers:
            for seq, key in p.messages:
                if c.passes(key):
                    c.messages[seq] = Message(seq, key, p.priority, p.not_before, expires=p.expires)

    def send_on(self, conn: psycopg.Connection, keys: Any, priority: int, hours: int | None,
                named: bool, dedup_keys: Any = None,
                lives: int | None = None) -> Publication:  # fmt: skip
        """Send; answers what was published, without duplicates."""
        if self.limited:
            keys = ["a" if key == "c" else key for key in keys]
        if named:
            names = [c.name for c in self.consumers[::2]]
            ids = {c.consumer_id for c in self.consumers[::2]}
        else:
            names, ids = None, None
        deliver_at = None
        if hours is not None:
            deliver_at = one(conn, "select clock_timestamp() + %s * interval '1 hour'", hours)
        if lives is not None and lives <= (hours or 0):
            lives = None
        expires_at = lives and one(
            conn, "select clock_timestamp() + (%s - 0.5) * interval '1 hour'", lives
        )
        arguments = {
            "p_priority": priority,
            "p_deliver_at": deliver_at,
            "p_consumers": names,
            "p_expires_at": expires_at,
        }
        if len(keys) == 1:
            dedup_key = dedup_keys[0] if dedup_keys else None
            seqs = [value(conn, "send", self.stream, "x", p_key=keys[0], p_dedup_key=dedup_key,
                          **arguments)]  # fmt: skip
        else:
            rows = call(conn, "send_batch", self.stream, ["x"] * len(keys), p_keys=list(keys),
                        p_dedup_keys=dedup_keys, **arguments)  # fmt: skip
            seqs = [row[0] for row in rows]
        firsts, messages = dict(self.firsts), []
        for seq, key, dedup_key in zip(seqs, keys, dedup_keys or [None] * len(keys), strict=True):
            if dedup_key is None or dedup_key not in firsts:
                messages.append((seq, key))
                firsts[dedup_key or ""] = seq
            else:
                assert seq == firsts[dedup_key], f"{dedup_key} was sent as {firsts[dedup_key]}"
        not_before = None if hours is None else self.clock + hours
        expires = None if lives is None else self.clock + lives
        return Publication(messages, priority, not_before, ids, firsts, expires)

    def done(self) -> dict[int, set[int]]:
        return {
            c.consumer_id: c.skipped | {m.seq for m in c.messages.values() if m.state == "acked"}
            for c in self.consumers
        }

    def take(self, c: Consumer) -> None:
        """A claim takes all that is published, or with small limits what the tables say."""
        c.takes += 1
        if c.newest is not None:
            self.judge(c)
            left = [m.seq for m in c.messages.values() if m.state == "new"]
            assert not left or self.is_bounded(c), f"not judged: {left}"
            return
        taken = core.arrivals(self.conn, c.consumer_id) if self.is_bounded(c) else None
        for m in c.messages.values():
            if m.state == "new" and (taken is None or m.seq in taken):
                m.state = "queued"
                m.position = c.takes, 0 if taken is None else taken[m.seq]

    def judge(self, c: Consumer) -> None:
        """What was judged comes into the line, and replaces older messages there."""
        (table,) = [t for t in checker.read_here(self.conn) if t.consumer_id == c.consumer_id]
        arrived = core.arrivals(self.conn, c.consumer_id)
        assert c.newest is not None
        for m in c.messages.values():
            if m.state == "new" and m.seq not in table.untaken | table.of("unfiltered"):
                m.state = "queued"
                m.position = c.takes, arrived.get(m.seq, 0) if self.is_bounded(c) else 0
                if m.key is not None:
                    c.newest[m.key] = max(m.seq, c.newest.get(m.key, 0))
        for m in c.messages.values():
            if m.state == "queued" and c.is_replaced(m):
                m.state = "acked"

    def put_back(self, claim: Claim, failed: set[int], hours: int | None, named: bool,
                 expiry: bool = False, saved: int | None = None) -> int:  # fmt: skip
        """Failed messages of a claim go back or die; returns how many left the claim.

        Args:
            claim: the claim.
            failed: those that failed, or of which some did.
            hours: they come again after; None: as the consumer's settings say.
            named: they failed; else nobody knows which, unless there is only one.
            expiry: its lease ended, some time ago.
            saved: they did not fail: they were put off, with this.
        """
        c = claim.consumer
        worker = claim.reader is None
        certain = named or (len(claim.held) == 1 and worker)
        suspect = None
        counts = [m.deliver_count for s in claim.held if not c.is_replaced(m := c.messages[s])]
        if worker and not named and max(counts, default=0) > 1:
            suspect = (len(claim.held) + 1) // 2
        if worker and expiry and len(claim.held) == 1:
            suspect = 1  # for workers with several claims
        since = claim.ended if expiry else self.clock
        failing = set()
        left = 0
        for m in sorted((c.messages[s] for s in claim.held), key=lambda m: m.place):
            key = c.key(m)
            fails = m.seq in failed
            if c.is_replaced(m) and fails:
                m.state = "acked"
            elif fails and certain and saved is None and c.give_up(m):
                m.state = "dead"
            elif fails or (key is not None and key in failing):
                failing.add(key)
                m.state, m.came_back = "queued", True
                if fails:
                    policy = c.delay(m) if worker or named else 0
                    delay = policy if hours is None else hours
                    m.not_before = since + delay if delay and since + delay > self.clock else None
                    m.at_most = suspect or m.at_most
                    m.saved = m.saved if saved is None else saved
                    m.deliver_count -= saved is not None
                    m.spark += not worker and not named
                else:
                    m.not_before = None
                    m.deliver_count -= 1
            else:
                continue
            claim.held.discard(m.seq)
            left += 1
        claim.live = bool(claim.held)
        if not expiry:
            claim.settled += left
        return left

    @staticmethod
    def finish(claim: Claim, part: set[int], state: str) -> None:
        """Messages of a claim are done with."""
        claim.held -= part
        claim.settled += len(part)
        claim.live = bool(claim.held)
        for s in part:
            claim.consumer.messages[s].state = state

    def expire(self, c: Consumer) -> None:
        """What a claimer in need does first."""
        kept = set()
        if self.is_bounded(c):
            kept = {x.claim_id for x in core.claims(self.conn) if x.live}
        for claim in [x for x in c.claims.values() if x.expired and x.live]:
            if claim.claim_id in kept:
                continue
            self.put_back(claim, set(claim.held), None, named=False, expiry=True)

    def hand_out(self, c: Consumer, seqs: list[int], size: int) -> list[int]:
        """Check what a claim got; returns it."""
        over = [m for m in c.messages.values() if m.state in ("new", "queued")
                and m.expires is not None and m.expires <= self.clock]  # fmt: skip
        given_up = internals.expired(self.conn, c.consumer_id) if over else set()
        for m in over:
            if m.seq in given_up:
                m.state = "dead"
        expected = c.deliverable(self.clock)
        allowed = {m.seq for m in expected}
        assert set(seqs) <= allowed, f"not deliverable: {sorted(set(seqs) - allowed)}"
        most = min(size, len(expected))
        alone = [m.at_most for m in expected if m.at_most is not None]
        bounded = self.is_bounded(c)
        enough = len(seqs) <= most if bounded or alone or over else len(seqs) == most
        assert seqs or bounded or not most, f"nothing of {len(expected)}"
        assert enough, f"{len(seqs)} of {size}, {len(expected)}"
        for s in seqs:
            limit = c.messages[s].at_most
            assert limit is None or len(seqs) <= limit, f"{seqs}, with {s} at most {limit}"
        c.limits.deliver([c.messages[s].key for s in seqs], c.in_flight(), self.clock)
        if c.limits and c.ordering == "none":
            self.check_arrivals(c, expected, seqs)
        elif c.ordering == "none":
            # What is taken together has one place, and may be in several runs.
            got = [(-c.messages[s].priority, c.messages[s].position) for s in seqs]
            first = [(-m.priority, m.position) for m in expected][: len(seqs)]
            assert got == (sorted(got) if bounded else first)
        per_key: dict[Any, list[int]] = defaultdict(list)
        for m in expected:
            if c.key(m) is not None:
                per_key[c.key(m)].append(m.seq)
        for key, line in per_key.items():
            got = [s for s in seqs if c.key(c.messages[s]) == key]
            assert got == line[: len(got)], f"key {key!r}: {got}, not the first of {line}"
        for s in seqs:
            m = c.messages[s]
            m.state, m.not_before = "claimed", None
            m.deliver_count += 1
        return seqs

    @staticmethod
    def check_arrivals(c: Consumer, expected: list[Message], seqs: list[int]) -> None:
        """With limits and without order, what did not come back comes in order of arrival.

        What is taken together has one arrival, and bundles have one priority and expiry.
        """
        per_kind: dict[Any, list[int]] = defaultdict(list)
        for m in expected:
            if m.key is not None and not m.came_back and m.not_before is None:
                per_kind[m.key, m.priority, m.expires].append(m.seq)
        for kind, line in per_kind.items():
            got = {s for s in seqs if s in line}
            assert got == set(line[: len(got)]), f"of {kind} {got}, not the first of {line}"

    def open_claims(self) -> list[Claim]:
        return [x for c in self.consumers for x in c.claims.values() if x.held and x.live]

    # ------------------------------------------------------------------ rules

    @initialize(more=st.booleans(), limit=st.sampled_from([None, 1, 2, 3]), topic=TOPICS,
                unread=st.sampled_from(["keep", "keep", "drop"]), backoff=BACKOFFS,
                limits=LIMITS, some=SOME_LIMITS)  # fmt: skip
    def start(self, more: bool, limit: int | None, topic: str | None, unread: str,
              backoff: Any, limits: Any, some: Any) -> None:  # fmt: skip
        limits = some if self.limited else limits
        self.unread, self.bounded = unread, self.bounded or unread == "drop"
        self.add_consumer("earliest", limit, None, backoff, limits)
        if more:
            self.add_consumer("latest", None, topic, {}, some if self.limited else {})
        self.group_id = value(self.conn, "create_group", self.stream, "group", PARTITIONS,
                              "earliest")  # fmt: skip

    def add_consumer(self, begin: str, limit: int | None, topic: str | None,
                     backoff: dict[str, Any], limits: dict[str, Any]) -> None:  # fmt: skip
        if self.ordering == "stream":
            limits = {}
        self.names += 1
        name = f"c{self.names}"
        backoff = AT_ONCE | backoff
        own: dict[str, Any] = {"visibility_timeout": LONG}
        if limit is not None:
            backoff["max_deliver_count"] = limit
        own["per_key_latest"] = self.latest
        consumer_id = value(self.conn, "create_consumer", self.stream, name, begin, self.ordering,
                            p_topic=topic, p_settings=Jsonb(own | backoff | limits))  # fmt: skip
        c = Consumer(name, consumer_id, self.ordering, limit, topic, backoff, Limits(limits),
                     bool(limits))  # fmt: skip
        c.newest = {} if self.latest else None
        for p in self.published:
            if p.consumers is not None:
                continue
            if begin == "earliest":
                self.deliver(c, p)
            else:
                c.skipped |= {seq for seq, key in p.messages if c.passes(key)}
        self.consumers.append(c)

    @precondition(lambda self: len(self.consumers) < 3)
    @rule(begin=st.sampled_from(["earliest", "latest"]), limit=st.sampled_from([None, 2]),
          topic=TOPICS, backoff=BACKOFFS, limits=LIMITS)  # fmt: skip
    def create_consumer(self, begin: str, limit: int | None, topic: str | None,
                        backoff: Any, limits: Any) -> None:  # fmt: skip
        self.add_consumer(begin, limit, topic, backoff, limits)

    @rule(data=st.data(), changes=CHANGES, mode=MODES)
    def alter_consumer(self, data: Any, changes: dict[str, Any], mode: str) -> None:
        """Settings change while it is in use; whether it goes by key, while it is paused."""
        c = data.draw(st.sampled_from(self.consumers))
        limits = {k: v for k, v in changes.items() if k == "fair" or k.startswith("per_key")}
        after = Limits(c.limits.settings | limits)
        held = any(m.state == "claimed" for m in c.messages.values())
        turns = self.ordering == "none" and bool(after) != bool(c.limits)
        refused = (
            c.limits.contradictory(limits)
            or (self.ordering == "stream" and bool(after))
            or (turns and held)
        )
        call(self.conn, "pause", self.stream, c.name)

        def alter() -> bool:
            value(self.conn, "alter_consumer", self.stream, c.name, Jsonb(changes))
            return True

        try:
            altered = self.run(mode, alter)
            assert not refused, f"not refused: {changes}"
        except psycopg.Error as error:
            if error.sqlstate != "PQ003" or not refused:
                raise
            altered = False
        call(self.conn, "resume", self.stream, c.name)
        if not altered:
            return
        c.limits.change(limits, self.clock)
        c.bounded = c.bounded or bool(c.limits)
        c.backoff |= {k: v for k, v in changes.items() if k.startswith("backoff")}
        if "max_deliver_count" in changes:
            c.max_deliver_count = {None: 25, "never": None}.get(
                given := changes["max_deliver_count"], given)  # fmt: skip

    @precondition(lambda self: self.latest)
    @rule(data=st.data(), mode=MODES)
    def change_latest(self, data: Any, mode: str) -> None:
        """A consumer begins to keep the newest message of each key, or ceases to."""
        c = data.draw(st.sampled_from(self.consumers))
        held = any(m.state == "claimed" for m in c.messages.values())
        settings = Jsonb({"per_key_latest": c.newest is None})
        call(self.conn, "pause", self.stream, c.name)
        try:
            altered = self.run(
                mode, lambda: call(self.conn, "alter_consumer", self.stream, c.name, settings)
            )
            assert not held, "not refused"
        except psycopg.Error as error:
            if error.sqlstate != "PQ003" or not held:
                raise
            altered = None
        call(self.conn, "resume", self.stream, c.name)
        if altered is not None:
            self.judge_changed(c)

    def judge_changed(self, c: Consumer) -> None:
        """A consumer has begun to keep the newest message of each key, or has ceased to."""
        (table,) = [t for t in checker.read_here(self.conn) if t.consumer_id == c.consumer_id]
        unjudged = [m for m in c.messages.values() if m.seq in table.of("unfiltered")]
        if c.newest is not None:  # they are the next, before all that is taken later
            c.newest, arrived = None, core.arrivals(self.conn, c.consumer_id)
            c.takes += 1
            for m in unjudged:
                m.state, m.position = "queued", (c.takes, arrived[m.seq])
            return
        for m in unjudged:
            m.state = "new"
        c.newest = {}
        queued = [m for m in c.messages.values() if m.state == "queued"]
        for m in queued:
            if m.key is not None:
                c.newest[m.key] = max(m.seq, c.newest.get(m.key, 0))
        for m in queued:
            if c.is_replaced(m):
                m.state = "acked"

    def history(self, c: Consumer) -> dict[int, tuple[Publication, str | None]]:
        """All that was published to a consumer, also before it was made."""
        return {
            seq: (p, key)
            for p in self.published
            if p.consumers is None or c.consumer_id in p.consumers
            for seq, key in p.messages
            if c.passes(key)
        }

    def draw_position(self, data: Any, c: Consumer) -> tuple[str, int]:
        """A position, and the number of the first message after it."""
        sent = sorted(self.history(c))
        position = data.draw(st.sampled_from(["earliest", "latest", *(f"seq {s}" for s in sent)]))
        ends = {"earliest": 0, "latest": 10**18}
        return position, ends[position] if position in ends else int(position[4:])

    @rule(data=st.data(), mode=MODES)
    def seek(self, data: Any, mode: str) -> None:
        c = data.draw(st.sampled_from(self.consumers))
        position, first = self.draw_position(data, c)
        forgotten = self.run(mode, lambda: value(self.conn, "seek", self.stream, c.name, position))
        if forgotten is None:
            return
        owed = [m for m in c.messages.values() if m.state not in ("acked", "dead")]
        expected = sum(m.state != "new" or m.seq < first for m in owed)
        unknown = c.topic or self.latest  # how many are not judged
        assert forgotten >= expected if unknown else forgotten == expected
        c.newest = None if c.newest is None else {}
        dead = {m.seq: m for m in c.messages.values() if m.state == "dead"}
        history = self.history(c)
        c.skipped = {seq for seq in history if seq < first}
        c.messages = {
            seq: dead.get(seq) or Message(seq, key, p.priority, p.not_before, expires=p.expires)
            for seq, (p, key) in history.items()
            if seq >= first or seq in dead
        }
        c.skipped -= dead.keys()
        for claim in list(c.claims.values()):
            claim.held, claim.live, claim.moved = set(), False, True
            if claim.reader is None:
                del c.claims[claim.claim_id]

    @rule(data=st.data(), mode=MODES)
    def replay(self, data: Any, mode: str) -> None:
        c = data.draw(st.sampled_from(self.consumers))
        start, first = self.draw_position(data, c)
        end, last = self.draw_position(data, c)
        count = self.run(mode, lambda: value(self.conn, "replay", self.stream, c.name, start, end))
        if count is None:
            return
        again = {
            seq: Message(seq, key, p.priority, p.not_before, expires=p.expires)
            for seq, (p, key) in self.history(c).items()
            if first <= seq < last and (seq not in c.messages or c.messages[seq].state == "acked")
        }
        assert count >= len(again) if c.topic else count == len(again)
        c.messages |= again
        c.skipped -= again.keys()
        if c.newest is not None:
            held = {m.seq for m in c.messages.values() if m.state in ("queued", "claimed")}
            c.newest = {key: seq for key, seq in c.newest.items() if seq in held}

    @precondition(lambda self: any(c.messages for c in self.consumers))
    @rule(data=st.data(), mode=MODES)
    def cancel(self, data: Any, mode: str) -> None:
        """Whatever the consumer has of these is gone, but for what is dead or a reader's."""
        c = data.draw(st.sampled_from([c for c in self.consumers if c.messages]))
        some = st.sampled_from(sorted(c.messages))
        seqs = data.draw(st.lists(some, min_size=1, max_size=3, unique=True))
        count = self.run(
            mode, lambda: value(self.conn, "cancel", self.stream, c.name, [*seqs, 10**9])
        )
        if count is None:
            return
        gone = {s for s in seqs if c.messages[s].state in ("new", "queued")}
        for claim in c.claims.values():
            part = claim.held & set(seqs)
            if part and claim.live and claim.reader is None:
                self.finish(claim, part, "acked")
                gone |= part
        assert count == len(gone), f"cancelled {count} of {gone}"
        for s in gone:
            c.messages[s].state = "acked"

    @precondition(lambda self: any(c.messages for c in self.consumers))
    @rule(data=st.data(), hours=st.sampled_from([-1, 1, 2]), mode=MODES)
    def postpone(self, data: Any, hours: int, mode: str) -> None:
        """What nobody has claimed of these comes later; what is new is taken for it."""
        c = data.draw(st.sampled_from([c for c in self.consumers if c.messages]))
        some = st.sampled_from(sorted(c.messages))
        seqs = data.draw(st.lists(some, min_size=1, max_size=3, unique=True))
        until = one(self.conn, "select clock_timestamp() + %s * interval '1 hour'", hours)
        count = self.run(
            mode, lambda: value(self.conn, "postpone", self.stream, c.name, [*seqs, 10**9], until)
        )
        if count is None:
            return
        if c.newest is not None:
            c.takes += 1
            self.judge(c)
        chosen = [c.messages[s] for s in seqs if c.messages[s].state in ("new", "queued")]
        assert count == len(chosen), f"postponed {count} of {[m.seq for m in chosen]}"
        taken = core.arrivals(self.conn, c.consumer_id)
        c.takes += 1
        for m in c.messages.values():
            if m.state == "new" and m.seq in taken and c.newest is None:
                m.state = "queued"
                m.position = c.takes, taken[m.seq] if self.is_bounded(c) else 0
        for m in chosen:
            m.not_before = self.clock + hours

    @precondition(lambda self: len(self.consumers) == 3 and len(self.published) % 4 == 3)
    @rule()
    def drop_consumer(self) -> None:
        gone = self.consumers.pop(0)
        value(self.conn, "drop_consumer", self.stream, gone.name)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6), priority=st.sampled_from([0, 0, 1, -1]),
          hours=HOURS, named=st.sampled_from([False, False, True]), mode=MODES,
          dedup=st.lists(DEDUP_KEYS, min_size=6, max_size=6) | st.none(),
          lives=st.sampled_from([None, None, None, 1, 2]))  # fmt: skip
    def send(self, keys: Any, priority: int, hours: int | None, named: bool, mode: str,
             dedup: list[str | None] | None, lives: int | None) -> None:  # fmt: skip
        once = dedup[: len(keys)] if dedup else None
        p = self.run(
            mode, lambda: self.send_on(self.conn, keys, priority, hours, named, once, lives)
        )
        if p is not None:
            self.publish(p)
            self.firsts = p.firsts

    @precondition(lambda self: len(self.slow) < 2)
    @rule(keys=st.lists(KEYS, min_size=1, max_size=3), isolation=st.booleans())
    def begin_slow_send(self, keys: Any, isolation: bool) -> None:
        conn = connection.connect(self.url)
        level = "repeatable read" if isolation else "read committed"
        conn.execute(f"begin transaction isolation level {level}")  # type: ignore[arg-type]
        conn.execute("savepoint one")
        self.send_on(conn, keys, 0, None, False)
        conn.execute("rollback to one")
        self.slow.append((conn, [self.send_on(conn, keys, 0, None, False)]))

    @precondition(lambda self: self.slow)
    @rule(commit=st.booleans())
    def end_slow_send(self, commit: bool) -> None:
        conn, publications = self.slow.pop(0)
        conn.execute("commit" if commit else "rollback")
        conn.close()
        if commit:
            for p in publications:
                self.publish(p)

    @rule(data=st.data(), size=SIZES, mode=MODES, acks=st.booleans())
    def receive(self, data: Any, size: int, mode: str, acks: bool) -> None:
        c = data.draw(st.sampled_from(self.consumers))
        workers = [x for x in self.open_claims() if x.reader is None]
        done = data.draw(st.sampled_from(workers or [None])) if acks else None
        self.claim(c, size, mode, done)

    def claim(self, c: Consumer, size: int, mode: str, done: Claim | None = None) -> bool:
        """Claim what there is, after an acknowledgement; returns whether there was something."""
        arguments = {"p_ack": done.claim_id} if done else {}
        rows = self.run(
            mode, lambda: call(self.conn, "receive", self.stream, c.name, size, **arguments)
        )
        if rows is None:
            return False
        if done:
            self.finish(done, set(done.held), "acked")
        self.expire(c)
        self.take(c)
        seqs = self.hand_out(c, seqs_of(rows), size)
        for row in rows:
            m = c.messages[row.seq]
            assert (row.key, row.priority, row.deliver_count, row.saved) == (
                m.key,
                m.priority,
                m.deliver_count,
                m.saved,
            )
        if rows:
            claim = Claim(claim_of(rows), c, set(seqs), set(seqs))
            c.claims[claim.claim_id] = claim
        return bool(rows)

    def keyed(self) -> list[Consumer]:
        """Consumers that go by key, and have no expired claim: when it is released is not said."""
        return [c for c in self.consumers if (c.limits or c.ordering == "key")
                and not any(x.expired and x.live for x in c.claims.values())]  # fmt: skip

    @precondition(lambda self: self.keyed())
    @rule(data=st.data(), size=st.sampled_from([1, 2, 3]))
    def receive_all(self, data: Any, size: int) -> None:
        """Claims until no key has a message that may be delivered beside them, and none is left."""
        c = data.draw(st.sampled_from(self.keyed()))
        empty = 0
        while empty < EMPTY_CLAIMS:
            empty = 0 if self.claim(c, size, "auto") else empty + 1
        left = c.with_room(self.clock)
        assert not left or core.has_all_keys(self.conn, c.consumer_id), f"not delivered: {left}"

    @precondition(lambda self: self.open_claims())
    @rule(data=st.data(), whole=st.booleans(), mode=MODES,
          action=st.sampled_from(["ack", "ack", "nack", "nack", "defer", "dead_letter"]),
          hours=st.sampled_from([None, None, 0, 0, 1, 2]))  # fmt: skip
    def settle(self, data: Any, whole: bool, mode: str, action: str, hours: int | None) -> None:
        claim = data.draw(st.sampled_from(self.open_claims()))
        part = set(claim.held)
        if not whole:
            part = data.draw(st.sets(st.sampled_from(sorted(claim.held)), min_size=1))
        if claim.reader is not None:
            self.settle_of_reader(claim, part, "nack" if action == "defer" else action, hours, mode)
            return
        arguments: list[Any] = [claim.claim_id, None if whole else sorted(part)]
        if action == "nack":
            arguments += [None if hours is None else f"{hours} hours", "no"]
        if action == "defer":
            arguments += [f"{hours or 0} hours", str(self.clock)]
        n = self.run(mode, lambda: value(self.conn, action, *arguments))
        if n is None:
            return
        if action == "nack":
            assert n == self.put_back(claim, part, hours, named=not whole or len(part) == 1)
            return
        if action == "defer":
            assert n == self.put_back(claim, part, hours or 0, named=True, saved=self.clock)
            return
        assert n == len(part)
        self.finish(claim, part, "acked" if action == "ack" else "dead")

    def works(self, data: Any, keys: Any, size: int, whole: bool, action: str,
              hours: int | None) -> None:  # fmt: skip
        """The usual way of messages, under two names: of many rules hypothesis leaves some out."""
        self.send(keys, 0, None, False, "auto", None, None)
        self.receive(data, size, "auto", False)
        self.check()
        if action == "extend" and self.open_claims():
            self.extend(data, "auto")
        elif self.open_claims():
            self.settle(data, whole, "auto", action, hours)

    work = rule(**WORK)(works)
    work_on = rule(**WORK)(works)

    def settle_of_reader(
        self, claim: Claim, part: set[int], action: str, hours: int | None, mode: str
    ) -> None:
        """What rows of a write do with messages of a micro-batch, by their numbers."""
        delay = None if hours is None else f"{hours} hours"
        seqs = "{" + ",".join(f"[{seq},{seq + 1})" for seq in sorted(part)) + "}"
        wanted = {"action": action, "stream": self.stream, "consumer": claim.consumer.name,
                  "seqs": seqs, "delay": delay, "reason": "no"}  # fmt: skip
        rows = self.run(
            mode,
            lambda: call(self.conn, "settle_messages", f"write:{uuid.uuid4()}", 0, Jsonb([wanted]),
                         p_replayed=False),
        )  # fmt: skip
        if rows is None:
            return
        assert tuple(rows[0]) == (True, len(part), 0)
        if action == "nack":
            self.put_back(claim, part, hours, named=True)
        else:
            self.finish(claim, part, "acked" if action == "ack" else "dead")

    @precondition(lambda self: self.open_claims())
    @rule(data=st.data())
    def lease_ends(self, data: Any) -> None:
        claim = data.draw(st.sampled_from(self.open_claims()))
        claim.expired, claim.ended = True, self.clock
        clock.end_lease(self.conn, claim.claim_id)

    @rule(data=st.data(), mode=MODES, n=st.sampled_from([None, 1, 2]), whole=st.booleans(),
          function=st.sampled_from(["redrive", "redrive", "purge_dead"]))  # fmt: skip
    def settle_dead(self, data: Any, mode: str, n: int | None, whole: bool, function: str) -> None:
        """Dead letters arrive anew, those with the lowest numbers first; or are gone."""
        c = data.draw(st.sampled_from(self.consumers))
        dead = sorted(m.seq for m in c.messages.values() if m.state == "dead")
        chosen = dead if whole else dead[::2]
        arguments = [self.stream, c.name, None if whole else chosen]
        count = self.run(mode, lambda: value(self.conn, function, *arguments, p_max=n))
        if count is None:
            return
        chosen = chosen[:n]
        assert count == len(chosen)
        arrived: dict[int, int] = {}
        if self.is_bounded(c):
            arrived = core.arrivals(self.conn, c.consumer_id)
        c.takes += 1
        for seq in chosen:
            old = c.messages[seq]
            new = Message(seq, old.key, old.priority, None, "acked")
            if function == "redrive":
                new.state = "queued" if c.newest is None else "new"
                new.position = c.takes, arrived[seq] if self.is_bounded(c) else 0
            c.messages[seq] = new

    @rule(data=st.data(), mode=MODES)
    def retry(self, data: Any, mode: str) -> None:
        """What failed comes at once, and as much of it in a claim as there is."""
        c = data.draw(st.sampled_from(self.consumers))
        n = self.run(mode, lambda: value(self.conn, "retry", self.stream, c.name))
        if n is None:
            return
        failed = [m for m in c.messages.values() if m.state == "queued" and m.deliver_count > 0]
        delayed = [m for m in failed if m.not_before is not None and m.not_before > self.clock]
        assert n == len(delayed) + sum(m.at_most is not None for m in failed if m not in delayed)
        for m in failed:
            m.not_before = m.at_most = None

    @precondition(lambda self: any(c.claims for c in self.consumers))
    @rule(data=st.data(), mode=MODES)
    def extend(self, data: Any, mode: str) -> None:
        claims = [x for c in self.consumers for x in c.claims.values()]
        claim = data.draw(st.sampled_from(claims))
        n = self.run(mode, lambda: value(self.conn, "extend", claim.claim_id))
        if n is None:
            return
        worker = claim.reader is None
        assert n == (len(claim.held) if claim.live and worker else 0)
        claim.expired = claim.expired and not worker

    @precondition(lambda self: any(x.reader is not None or not (x.held and x.live)
                                   for c in self.consumers for x in c.claims.values()))  # fmt: skip
    @rule(data=st.data(), action=st.sampled_from(["ack", "nack", "defer", "dead_letter"]))
    def settle_again(self, data: Any, action: str) -> None:
        """A claim that ended changes nothing, nor does one of a reader."""
        over = [x for c in self.consumers for x in c.claims.values()
                if x.reader is not None or not (x.held and x.live)]  # fmt: skip
        claim = data.draw(st.sampled_from(over))
        before = core.rows(self.conn, STATES, self.stream)
        assert value(self.conn, action, claim.claim_id) == 0
        assert core.rows(self.conn, STATES, self.stream) == before

    @precondition(lambda self: not self.limited)
    @rule(data=st.data(), size=st.sampled_from([None, 1, 2, 3, 100]), crash=st.booleans(),
          max_bytes=st.sampled_from([None, None, 1, 2, 4]), mode=MODES)  # fmt: skip
    def reader_claim(
        self, data: Any, size: int | None, crash: bool, max_bytes: int | None, mode: str
    ) -> None:
        """The data of each message is a byte, so max_bytes is as good as size."""
        c = data.draw(st.sampled_from(self.consumers))
        if c.limits:
            with pytest.raises(psycopg.Error, match="which Spark queries do not support"):
                call(self.conn, "reader_claim", uuid.uuid4(), c.consumer_id, 0, 0)
            return
        if len(c.readers) < 2:
            c.readers.append(Reader(uuid.uuid4()))
        r = data.draw(st.sampled_from(c.readers))
        start = r.end if r.end and not crash else (r.claim, r.messages)
        rows = self.run(mode, lambda: call(self.conn, "reader_claim", r.reader, c.consumer_id,
                                           *start, size, p_max_bytes=max_bytes))  # fmt: skip
        if rows is None:
            return
        (got,) = rows
        assert got.lost == self.finish_batches(c, r, start)[1]
        later = [x for x in c.claims.values() if x.reader is r]
        if later:
            for claim in later:
                claim.expired = claim.expired and not claim.live
            assert (got.claim_id, got.messages) == r.end, "the batch has changed"
            assert got.claimed == r.end[1] - r.messages
            return
        self.expire(c)
        self.take(c)
        seqs: list[int] = []
        if got.claim_id != r.claim:
            seqs = core.held_by(self.conn, got.claim_id)
        seqs = self.hand_out(c, seqs, min(size or 10**9, max_bytes or 10**9))
        assert got.claimed == len(seqs)
        assert got.bytes in (None, len(seqs))
        assert got.messages == r.messages + len(seqs)
        r.end = None
        if seqs:
            r.end = got.claim_id, got.messages
            c.claims[got.claim_id] = Claim(got.claim_id, c, set(seqs), set(seqs), reader=r)

    @precondition(lambda self: any(r.end for c in self.consumers for r in c.readers))
    @rule(data=st.data(), mode=MODES)
    def reader_ack(self, data: Any, mode: str) -> None:
        """Spark has the batch in its log; and so says somebody who looked into that."""
        c, r = data.draw(st.sampled_from([(c, r) for c in self.consumers for r in c.readers
                                          if r.end]))  # fmt: skip
        assert r.end is not None
        end = r.end
        rows = self.run(mode, lambda: call(self.conn, "reader_ack", r.reader, c.consumer_id,
                                           end[0]))  # fmt: skip
        if rows is not None:
            assert (rows[0].acked, rows[0].lost) == self.finish_batches(c, r, end)
            r.end = None

    @staticmethod
    def finish_batches(c: Consumer, r: Reader, end: tuple[int, int]) -> tuple[int, int]:
        """A reader has finished up to there; returns what that acknowledged, and had lost."""
        r.claim, r.messages = end
        acked = lost = 0
        for claim in [x for x in c.claims.values() if x.reader is r and x.claim_id <= r.claim]:
            acked += len(claim.held)
            lost += len(claim.original) - claim.settled - len(claim.held)
            for s in claim.held:
                c.messages[s].state = "acked"
            claim.held, claim.live = set(), False
            del c.claims[claim.claim_id]
        return acked, lost

    @precondition(lambda self: any(r.end for c in self.consumers for r in c.readers))
    @rule(data=st.data(), mode=MODES)
    def reader_resume(self, data: Any, mode: str) -> None:
        c, r = data.draw(st.sampled_from([(c, r) for c in self.consumers for r in c.readers
                                          if r.end]))  # fmt: skip
        assert r.end is not None
        end = r.end[0]
        if c.limits:
            with pytest.raises(psycopg.Error, match="which Spark queries do not support"):
                call(self.conn, "reader_resume", r.reader, c.consumer_id, r.claim, end)
            return
        rows = self.run(mode, lambda: call(self.conn, "reader_resume", r.reader, c.consumer_id,
                                           r.claim, end))  # fmt: skip
        if rows is None:
            return
        (got,) = rows
        claim = c.claims[end]
        claim.expired = False
        plan = call(self.conn, "reader_plan", r.reader, r.claim, end)
        planned = [s for row in plan for s in range(row.lo, row.hi)]
        if claim.live:
            assert set(planned) == claim.held
        else:
            back = set(planned)
            free = {m.seq for m in c.deliverable(self.clock, expired=True)} & claim.original
            if claim.moved or claim.settled == len(claim.original):
                free = set()  # its owner settled it all
            assert back <= free, "taken back from another claim"
            if c.ordering == "none" and not self.is_bounded(c):
                assert back == free, "what was free was not taken back"
            claim.live, claim.held = bool(back), back
            for s in back:
                m = c.messages[s]
                m.state, m.not_before = "claimed", None
                m.deliver_count += 1
        assert got.planned == len(planned)
        claim.settled = min(claim.settled, len(claim.original) - len(claim.held))
        assert got.taken_over + got.gone == (len(claim.original) - claim.settled - len(claim.held))
        assert got.gone <= len(claim.original & internals.skipped(self.conn, c.consumer_id))
        per_key: dict[Any, list[Message]] = defaultdict(list)
        for s in planned:
            m = c.messages[s]
            if c.key(m) is not None:
                per_key[c.key(m)].append(m)
        for messages in per_key.values():
            assert messages == sorted(messages, key=lambda m: m.place)

    @rule(mode=MODES, calls=st.sampled_from([1, 3, 9]))
    def maintain(self, mode: str, calls: int) -> None:
        """Retention of one message: all goes that nobody owes and nothing came after; with drop,
        also what is owed and in no live claim. And dead letters that are old."""
        if self.retains is False:
            call(self.conn, "set_retention", self.stream, p_messages=1, p_unread=self.unread,
                 p_dead=timedelta(hours=KEEP_DEAD))  # fmt: skip
            self.retains = True
        for _ in range(calls):
            self.run(mode, lambda: call(self.conn, "maintain"))
        if mode != "rollback":
            self.lose_what_is_old()
        kept = internals.messages_published(self.conn, self.stream_id)
        for p in self.published[:]:
            seqs = {seq for seq, _ in p.messages}
            if seqs & kept:
                assert seqs <= kept, "a part of a publication was trimmed"
                continue
            for c in self.consumers:
                owed = {s for s in seqs & c.messages.keys() if c.messages[s].state != "acked"}
                assert not owed, f"{c.name} still owes {owed}, which were trimmed"
            self.published.remove(p)
            self.was_overtaken = True
            self.trimmed |= seqs if p.consumers is None else set()

    def lose_what_is_old(self) -> None:
        """What retention has taken from the consumers, as the tables say; if it may."""
        tables = {table.consumer_id: table for table in checker.read_here(self.conn)}
        for c in self.consumers:
            table = tables[c.consumer_id]
            for m in c.messages.values():
                if m.state == "dead" and m.seq not in table.dead:
                    assert m.dead_hours >= KEEP_DEAD, f"{m} is not old"
                    m.state = "acked"
                assert m.state != "dead" or m.dead_hours <= KEEP_DEAD, f"{m} is too old"
            if self.unread == "keep":
                continue
            self.expire(c)
            self.take(c)
            skipped = internals.skipped(self.conn, c.consumer_id)
            left = table.untaken | table.of("ready", "delayed", "waiting", "claimed", "unfiltered")
            for m in c.messages.values():
                if m.state in ("new", "queued", "claimed") and m.seq not in left:
                    assert m.seq in skipped, f"{m} is nowhere, and not counted"
                    assert m.state != "claimed", f"{m} was taken out of a live claim"
                    m.state = "acked"

    @rule()
    def an_hour_passes(self) -> None:
        self.clock += 1
        for m in [m for c in self.consumers for m in c.messages.values() if m.state == "dead"]:
            m.dead_hours += 1
        clock.pass_time(self.conn, timedelta(hours=1))

    @rule()
    def a_moment_passes(self) -> None:
        """Two seconds: claims look again for leases, and what is held by then is held for long."""
        clock.pass_time(self.conn, timedelta(seconds=2))

    def for_all(self) -> set[int]:
        """What was ever published, and not to named consumers."""
        found = {seq for p in self.published if p.consumers is None for seq, _ in p.messages}
        return found | self.trimmed

    @precondition(lambda self: not self.limited)
    @rule(size=SIZES, mode=MODES)
    def read(self, size: int, mode: str) -> None:
        offset = None if self.offset is None else Jsonb(self.offset)
        if offset is None:
            self.was_read = set(self.trimmed)
        try:
            rows = self.run(mode, lambda: call(self.conn, "read", self.stream, offset, size))
        except psycopg.Error as error:
            if error.sqlstate != "PQ010" or not self.was_overtaken:  # by retention
                raise
            self.offset, self.was_overtaken = None, False
            return
        if rows is None:
            return
        seqs = {row.seq for row in rows if row.seq is not None}
        assert len(seqs) <= size
        assert not seqs & self.was_read, "read twice"
        self.was_read |= seqs
        assert self.was_read <= self.for_all()
        if len(seqs) < size and not self.bounded:
            assert self.was_read == self.for_all(), "not read, though it is there"
        self.offset = rows[0].next_offset

    @precondition(lambda self: not self.limited)
    @rule(size=SIZES, mode=MODES, worker=st.sampled_from(["w1", "w2", "w3"]),
          sleeps=st.sampled_from([False, False, False, True]))  # fmt: skip
    def work_in_group(self, size: int, mode: str, worker: str, sleeps: bool) -> None:
        """A worker works off what it reads; one that sleeps too long undoes it."""
        leases = call(self.conn, "lease_partitions", self.stream, "group", worker)
        for each in leases:
            if each.to_release:
                value(self.conn, "commit_offset", each.lease_id, None, True)
        ids = [each.lease_id for each in leases if not each.to_release]
        rows = call(self.conn, "read_partitions", self.stream, "group", ids, size)
        if sleeps and rows:
            clock.end_worker_lease(self.conn, worker)
            for other in {"w1", "w2", "w3"} - {worker}:
                call(self.conn, "lease_partitions", self.stream, "group", other)

        def commit() -> bool:
            for row in rows:
                if row.seq is None:
                    value(self.conn, "commit_offset", row.lease_id, row.next_offset)
            return True

        try:
            committed = self.run(mode, commit)
        except psycopg.DatabaseError as error:
            # Some of its partitions may have gone on before one was found to be lost.
            if not sleeps or error.sqlstate != "PQ012":
                raise
            committed = mode == "auto"
            rows = [] if mode != "auto" else self.committed_of(rows)
        if committed:
            self.was_grouped += [row.seq for row in rows if row.seq is not None]
            assert len(set(self.was_grouped)) == len(self.was_grouped), "worked off twice"

    def committed_of(self, rows: list[Any]) -> list[Any]:
        """Of what a worker read, the messages of those partitions whose offset was committed."""
        ends = {row.lease_id: row.next_offset for row in rows if row.seq is None}
        kept = internals.rows(
            self.conn,
            "select partition, array[arrival_no, seq] as at from pgqueue.group_partitions",
        )
        at = {row.partition: row.at for row in kept}
        return [row for row in rows if at[row.partition] == ends[row.lease_id]]

    def work_off_the_group(self) -> None:
        for worker in ("w1", "w2", "w3"):
            value(self.conn, "leave_group", self.stream, "group", worker)
        leases = call(self.conn, "lease_partitions", self.stream, "group", "w1")
        ids = [each.lease_id for each in leases]
        assert len(ids) == PARTITIONS
        empty = 0
        while empty <= (EMPTY_CLAIMS if self.bounded else 0):
            rows = call(self.conn, "read_partitions", self.stream, "group", ids, 7)
            empty = 0 if rows else empty + 1
            for row in rows:
                if row.seq is None:
                    value(self.conn, "commit_offset", row.lease_id, row.next_offset)
                else:
                    self.was_grouped.append(row.seq)
        assert len(set(self.was_grouped)) == len(self.was_grouped), "worked off twice"
        skipped = internals.skipped(self.conn, self.group_id)
        assert set(self.was_grouped) | skipped == self.for_all()
        assert not skipped or self.unread == "drop"

    def in_order(self) -> list[Consumer]:
        return sorted(self.consumers, key=lambda c: c.consumer_id)

    def check(self) -> None:
        tables = checker.read_here(self.conn)
        checker.check(self.conn, None, [c for c in tables if c.partitions is not None])
        consumers = [c for c in tables if c.partitions is None]
        for c, table in zip(self.in_order(), consumers, strict=True):
            if table.per_key_limit is not None:
                most = max(c.in_flight().values(), default=0)  # under an earlier limit
                table.per_key_limit = max(c.limits.most, most)  # type: ignore[assignment]
        checker.check(self.conn, self.done(), consumers)
        for c, table in zip(self.in_order(), consumers, strict=True):
            if c.limits and not any(part.next for part in table.parts):
                c.limits.settle()
        check_views(self.conn, self.stream, self.consumers, self.clock)

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        self.check()
        super().check_invariants(*args, **kwargs)

    def is_dropped(self) -> bool:
        """Whether maintain has cleared up after the stream, which it is asked to do."""
        call(self.conn, "maintain")
        return internals.count(self.conn, "dropped_streams") == 0

    def teardown(self) -> None:
        """Work everything off, unless a step has failed: then that is what is to be seen."""
        try:
            if sys.exc_info()[0] is not None:
                return
            check_explanations(self.conn)
            for conn, publications in self.slow:
                conn.execute("commit")
                conn.close()
                for p in publications:
                    self.publish(p)
            self.slow = []
            for _ in range(3):
                self.an_hour_passes()
            clock.end_leases(self.conn)
            for claim in [x for c in self.consumers for x in c.claims.values()]:
                claim.expired, claim.ended = True, self.clock
            for c in self.consumers:
                empty = 0
                while empty <= (EMPTY_CLAIMS if self.is_bounded(c) and c.is_owed() else 3):
                    rows = call(self.conn, "receive", self.stream, c.name, 7)
                    self.expire(c)
                    self.take(c)
                    self.hand_out(c, seqs_of(rows), 7)
                    if not rows:
                        empty += 1
                        if empty % 4 == 1 and (not c.limits or not c.with_room(self.clock)):
                            self.an_hour_passes()
                        continue
                    empty = 0
                    value(self.conn, "ack", claim_of(rows))
                    for row in rows:
                        c.messages[row.seq].state = "acked"
                assert not c.is_owed()
            self.check()
            while self.was_read != self.for_all():
                before = self.offset
                self.read(7, "auto")
                assert self.offset != before, "stalled"
            self.work_off_the_group()
            value(self.conn, "drop_stream", self.stream)
            wait_until(self.is_dropped)  # (autovacuum may have a transaction open)
            for table in set(internals.tables(self.conn)) - {"installed", "servers"}:
                assert internals.count(self.conn, table) == 0, table
        finally:
            for conn, _ in self.slow:
                conn.close()
            self.conn.close()
