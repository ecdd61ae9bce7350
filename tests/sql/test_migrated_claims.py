"""What consumers hold in a database of an earlier version is the same, to the word, in this one.

`test_upgrade` has one of each feature. Here workers and queries did very many things, at random,
and a ledger that is kept outside of the database knows what is left to be done.
"""

import random
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection, schema
from tests.conftest import Server, _database
from tests.sql import checker, clock, core, freeze, limits
from tests.sql.core import rows
from tests.sql.owing_features import owed_of_all
from tests.sql.queue import AT_ONCE, ORDERINGS, Conn, call, claim_of, one, seqs_of, value

HOUR = timedelta(hours=1)
LONG = "100 days"
ACTIONS = ["ack", "ack", "ack", "nack", "nack", "defer", "dead_letter", "extend"]
FAILS = ["nack", "ack"]
LONGER = [(0, 2), (2, 2), (3, 2), *((seed, 1) for seed in range(4))]  # seeds and versions


@dataclass
class Kind:
    """A consumer, of a stream of its own, and how it is used.

    Attributes:
        ordering, settings: how it is made.
        actions: what becomes of claims.
        sizes: of claims.
        plain: nothing is late or more urgent, and claims are settled whole.
        topic: of its filter, which every message with a key passes.
    """

    ordering: str
    settings: dict[str, Any] = field(default_factory=dict)
    actions: list[str] = field(default_factory=lambda: ACTIONS)
    sizes: list[int] = field(default_factory=lambda: [1, 1, 2, 2, 5, 40])
    plain: bool = False
    topic: str | None = None


KINDS = {
    **{ordering: Kind(ordering) for ordering in ORDERINGS},
    **{f"noted_{each}": Kind(each, {"keep_history": LONG}) for each in ORDERINGS},
    **{f"slots_{each}": Kind(each, {}, ["ack"], [2], True) for each in ORDERINGS},
    **{f"failing_{each}": Kind(each, {}, FAILS, [8], True) for each in ORDERINGS},
    **{f"large_{each}": Kind(each, sizes=[1000]) for each in ORDERINGS},
    **{f"filtered_{each}": Kind(each, topic="*") for each in ORDERINGS},
    "capacity": Kind("key", {"per_key_capacity": 500}),
    "limit": Kind("none", {"per_key_limit": 2}),
    "limit_key": Kind("key", {"per_key_limit": 3}),
    "interval": Kind("none", {"per_key_interval": "30 min", "per_key_burst": 3}),
    "interval_key": Kind("key", {"per_key_interval": "30 min", "per_key_burst": 3}),
    "fair": Kind("none", {"fair": True}),
    "fair_key": Kind("key", {"fair": True}),
    "in_flight": Kind("none", {"max_in_flight": 60}),
}

HELD = """
select m.consumer_id, s, m.note, m.not_visible_until, m.arrival_no
from pgqueue.consumer_messages m cross join unnest(m.seqs) g
cross join generate_series(lower(g), upper(g) - 1) s
"""
OLD_CLAIMS = """
select claim_id, lease_until, visibility_timeout, owner from pgqueue.claims where live
union all
select _pgqueue.slot_claim(slot, token), lease_until, timeout, owner from pgqueue.slots
where token is not null
"""
NEW_CLAIMS = f"""
select l.claim_id, l.lease_until, b.visibility_timeout, l.owner
from {core.CLAIMS} l join {core.BUNDLES} b using (claim_id) where live and b.head is null
"""
KEPT = [
    "select consumer_id, next_publication, gaps, taken, forgotten from pgqueue.consumer_cursors"
    " order by 1",
    "select consumer_id, key, spent, returns_at from pgqueue.key_tokens order by 1, 2, 3, 4",
    "select * from pgqueue.key_backlog order by 1, 2, 3",
    "select * from pgqueue.consumer_gaps order by 1, 2",
    "select * from pgqueue.readers order by 1",
    "select * from pgqueue.dead_messages order by dead_id",
]


@dataclass
class Ledger:
    """What is known of a stream and its consumer c.

    Attributes:
        sent: the messages, in their order, with their keys.
        priority: of each message.
        done: acknowledged or dead.
        held: open claims, with their messages.
        counts: how often each message was delivered, and that counts.
        saved: the state that a worker saved with it.
    """

    stream: str
    kind: Kind
    consumer: int
    sent: dict[int, str | None] = field(default_factory=dict)
    priority: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    held: dict[int, list[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    saved: dict[int, Any] = field(default_factory=dict)

    @property
    def left(self) -> set[int]:
        """What has to be delivered once more."""
        return self.sent.keys() - set(self.done)

    def send(self, conn: Conn, rng: random.Random) -> None:
        """A batch, or a message alone."""
        keys = [
            rng.choice([None, *"abcdefgh", "hot", "hot"]) for _ in range(rng.choice([1, 9, 70]))
        ]
        if len(keys) > 1 and (self.kind.plain or rng.random() < 0.7):
            self.send_batch(conn, keys)
            return
        for key in keys[:12]:
            priority, more = rng.choice([0, 0, 0, 3, 7]), {}
            if self.kind.plain:
                priority = 0
            elif rng.random() < 0.15:
                more["p_deliver_at"] = one(conn, "select clock_timestamp() + interval '50 min'")
            elif rng.random() < 0.15:
                more["p_expires_at"] = one(conn, "select clock_timestamp() + interval '90 days'")
            seq = value(conn, "send", self.stream, "x", key, p_priority=priority, **more)
            self.note([seq], [key], priority)

    def send_batch(self, conn: Conn, keys: list[str | None]) -> None:
        """Messages of these keys together."""
        found = call(conn, "send_batch", self.stream, ["x"] * len(keys), keys)
        self.note([row[0] for row in found], keys, 0)

    def note(self, seqs: list[int], keys: list[str | None], priority: int) -> None:
        """What was sent to it."""
        self.sent.update(
            (seq, key) for seq, key in zip(seqs, keys, strict=True) if key or not self.kind.topic
        )
        self.priority.update(dict.fromkeys(seqs, priority))

    def claim(self, conn: Conn, size: int) -> list[int]:
        """Receive messages, and hold them."""
        found = call(conn, "receive", self.stream, "c", size)
        if found:
            seqs = seqs_of(found)
            assert not set(seqs) & set(self.done), "it was done"
            assert not set(seqs) & {s for held in self.held.values() for s in held}, "it is held"
            self.held[claim_of(found)] = seqs
            for row in found:
                assert (row.key, row.priority) == (self.sent[row.seq], self.priority[row.seq])
                assert row.saved == self.saved.get(row.seq), row
                self.counts[row.seq] = row.deliver_count
        return seqs_of(found)

    def settle(self, conn: Conn, rng: random.Random, claim: int, what: str) -> None:
        """Settle a claim, whole or in part, in one way or the other; and look at what is left."""
        seqs = self.held[claim]
        some = None
        if not self.kind.plain and rng.random() < 0.5:
            some = sorted(rng.sample(seqs, rng.randint(1, len(seqs))))
        named = seqs if some is None else some
        if what == "ack":
            assert value(conn, "ack", claim, some) == len(named)
        elif what == "dead_letter":
            assert value(conn, "dead_letter", claim, some, "no") == len(named)
        elif what == "extend":
            assert value(conn, "extend", claim, timedelta(days=200)) == len(seqs)
        elif what == "defer":
            state = {"step": rng.randint(1, 9)}
            assert value(conn, "defer", claim, some, HOUR / 2, Jsonb(state)) >= len(named)
            self.saved.update(dict.fromkeys(named, state))
        else:
            delay = None if self.kind.plain else rng.choice([None, timedelta(), HOUR / 2])
            assert value(conn, "nack", claim, some, delay, "failed") >= len(named)
        if what in ("ack", "dead_letter"):
            self.done += named
        if left := [row.seq for row in rows(conn, IN_CLAIM, self.stream, claim)]:
            self.held[claim] = left
        else:
            del self.held[claim]
            assert value(conn, "ack", claim) == 0, "it has ended"

    def work(self, conn: Conn, rng: random.Random) -> None:
        """A step of somebody who uses it."""
        if rng.random() < 0.3:
            self.send(conn, rng)
        if rng.random() < 0.8:
            self.claim(conn, rng.choice(self.kind.sizes))
        if self.held and rng.random() < 0.6:
            claim = rng.choice(sorted(self.held))
            self.settle(conn, rng, claim, rng.choice(self.kind.actions))

    def keys_of(self, seqs: list[int]) -> set[str]:
        """What orders messages."""
        if self.kind.ordering == "stream":
            return {"all"} if seqs else set()
        return {key for seq in seqs if (key := self.sent[seq]) is not None}

    def drain(self, conn: Conn, rng: random.Random) -> None:
        """All that is left is delivered in order, and settled at once."""
        got: list[int] = []
        for _ in range(40):  # half-hours, until what is delayed or held back has come
            while found := self.claim(conn, rng.choice([1, 3, 30, 1000])):
                assert value(conn, "ack", self.held and next(iter(self.held))) == len(found)
                self.held.clear()
                self.done += found
                got += found
            if not self.left:
                break
            clock.pass_time(conn, HOUR)
        assert not self.left, f"{self.stream}: lost {sorted(self.left)[:20]}"
        assert len(self.done) == len(set(self.done)), f"{self.stream}: delivered again"
        if self.kind.ordering != "none":
            place = {seq: i for i, seq in enumerate(self.sent)}
            lines: dict[str | None, list[int]] = defaultdict(list)
            for seq in got:
                for key in self.keys_of([seq]):
                    lines[key].append(place[seq])
            for key, line in lines.items():
                assert line == sorted(line), f"{self.stream}: the order of {key}"


IN_CLAIM = """
select m.seq from pgqueue.message_states m where m.stream = %s and m.claim_id = %s
and m.state = 'claimed' order by m.seq
"""


@pytest.fixture
def conn(
    request: pytest.FixtureRequest, server: Server, _templates: dict[Any, str]
) -> Iterator[Conn]:
    """A connection to a database of version 2, or of that which the test is parametrized with."""
    version = getattr(request, "param", 2)
    key = server.url, f"version {version}"
    if key not in _templates:
        with connection.connect(next(_database(server, "template0"))) as made:
            freeze.install(made, version)
            if version > 1:  # which notes where its database is
                made.execute("update pgqueue.servers set database = null")  # as in `template`
            _templates[key] = made.info.dbname
    for url in _database(server, _templates[key]):
        with connection.connect(url) as conn:
            yield conn


def make(conn: Conn, stream: str, kind: Kind) -> Ledger:
    """A stream with the consumer c."""
    value(conn, "create_stream", stream)
    never = {k: v for k, v in AT_ONCE.items() if k != "max_deliver_count"} | {
        "max_deliver_count": 2000000000, "visibility_timeout": LONG,
    }  # fmt: skip
    given = Jsonb(never | kind.settings)
    return Ledger(
        stream, kind,
        value(conn, "create_consumer", stream, "c", "earliest", kind.ordering, p_topic=kind.topic,
              p_settings=given),
    )  # fmt: skip


def held(conn: Conn) -> dict[tuple[int, int], tuple[Any, Any]]:
    """The notes of messages that are stored with one, or are due at a time."""
    return {
        (row.consumer_id, row.s): (row.note, row.not_visible_until)
        for row in rows(conn, HELD)
        if row.note is not None or row.not_visible_until is not None
    }


@pytest.mark.parametrize(
    ("seed", "conn"),
    [(1, 2), *(pytest.param(*each, marks=pytest.mark.longer) for each in LONGER)],
    indirect=["conn"],
)
def test_what_was_claimed_waits_or_is_ready_is_so_after_an_upgrade(conn: Conn, seed: int) -> None:
    rng = random.Random(seed)
    if seed % 2:  # all that limits do is met by few messages
        limits.shrink(conn)
    ledgers = [make(conn, name, kind) for name, kind in KINDS.items()]
    for ledger in ledgers:
        ledger.send(conn, rng)
    for step in range(rng.choice([9, 12])):
        for ledger in ledgers:
            ledger.work(conn, rng)
        if step % 8 == 7:
            clock.pass_time(conn, timedelta(seconds=rng.choice([2, 1000])))
    for ledger in ledgers:
        if ledger.kind.actions == FAILS:
            for _ in range(4):  # what fails again and again comes in smaller claims
                if ledger.claim(conn, 8):
                    ledger.settle(conn, rng, [*ledger.held][-1], "nack")
    before, notes = owed_of_all(conn), held(conn)
    kept = [rows(conn, query) for query in KEPT]
    claims = sorted(rows(conn, OLD_CLAIMS))
    assert {c.claim_id for c in claims} == {c for each in ledgers for c in each.held}
    arrivals = {(row.consumer_id, row.s): row.arrival_no for row in rows(conn, HELD)}

    schema.install(conn)

    checker.check(conn)
    assert call(conn, "numbers_behind") == []
    assert same_states(before, owed_of_all(conn), notes)
    assert held(conn) == notes
    assert [rows(conn, query) for query in KEPT] == kept
    assert sorted(rows(conn, NEW_CLAIMS)) == claims
    now = {(row.consumer_id, row.s): row.arrival_no for row in rows(conn, HELD)}
    assert now | arrivals == now
    held_before = [dict(ledger.held) for ledger in ledgers]
    for ledger, before_ in zip(ledgers, held_before, strict=True):
        ledger.saved = {seq: saved for seq, saved in ledger.saved.items() if seq in ledger.left}
        busy = ledger.keys_of([seq for each in before_.values() for seq in each])
        for size in (1, 5, 40):
            got = ledger.claim(conn, size)
            if ledger.kind.ordering != "none":
                assert not busy & ledger.keys_of(got), f"{ledger.stream}: a key that is held"
    checker.check(conn)
    for ledger, before_ in zip(ledgers, held_before, strict=True):
        for claim in sorted(before_):
            ledger.settle(conn, rng, claim, rng.choice(ACTIONS))
    checker.check(conn)
    for ledger in ledgers:
        for claim in list(ledger.held):
            ledger.done += ledger.held.pop(claim)
            assert value(conn, "ack", claim) > 0
        ledger.drain(conn, rng)
    done = {ledger.consumer: ledger.sent.keys() - {
        seq for dead in rows(conn, DEAD, ledger.consumer) for seq in core.numbers(dead.seqs)
    } for ledger in ledgers}  # fmt: skip
    checker.check(conn, done)


RETURNED = """
select m.seq from pgqueue.readers r cross join lateral (
    select seqs, acted from pgqueue.claims where claims.reader = r.reader) c
cross join unnest(c.acted) a cross join unnest(a.seqs) g
cross join generate_series(lower(g), upper(g) - 1) s
join pgqueue.message_states m on m.seq = s and m.stream = %s
where m.state <> 'dead' and m.seq = any(%s) and r.reader = %s
"""
DEAD = "select seqs from pgqueue.dead_messages where consumer_id = %s"


def same_states(before: list[Any], after: list[Any], notes: dict[Any, Any]) -> bool:
    """Messages of a claim that failed may wait for each other, to come in smaller claims."""
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        if old != new:
            assert old._replace(state=None) == new._replace(state=None), f"{old} {new}"
            assert (old.state, new.state) == ("ready", "waiting"), f"{old} {new}"
            alike = [note for (_, seq), (note, _) in notes.items() if seq == old.seq and note]
            assert any("at_most" in note for note in alike), f"{old} {new}"
    return True


FAILED = [*((each, {}) for each in ORDERINGS), ("none", {"fair": True}), ("key", {"fair": True})]


def test_what_was_urgent_cut_or_failed_together_is_so_after_an_upgrade(conn: Conn) -> None:
    """Urgent messages come first; those that failed come in smaller claims."""
    urgent, cut = make(conn, "urgent", Kind("none")), make(conn, "cut", Kind("key"))
    for n in range(60):
        priority = n * 7 % 5 - 2
        urgent.note([value(conn, "send", "urgent", "x", p_priority=priority)], [None], priority)
        if n % 10 == 9:
            found = call(conn, "receive", "urgent", "c", 2)
            value(conn, "nack", claim_of(found), seqs_of(found))
    cut.send_batch(conn, [*"ab" * 200])  # a slot has many ranges of a key, a bundle few
    assert len(cut.claim(conn, 5)) == 5
    failed = [make(conn, f"failed {n}", Kind(*each)) for n, each in enumerate(FAILED)]
    for ledger in failed:
        ledger.send_batch(conn, ["a", "b", "a", "c", None, "b", "a", "d"])
        for _ in range(2):
            assert len(ledger.claim(conn, 8)) == 8
            assert value(conn, "nack", ledger.held.popitem()[0]) == 8
    schema.install(conn)
    checker.check(conn)
    got = urgent.claim(conn, 100)
    assert sorted(got) == sorted(urgent.sent)
    assert [urgent.priority[seq] for seq in got] == sorted(urgent.priority.values())[::-1]
    for ledger in failed:
        assert 0 < len(ledger.claim(conn, 8)) <= 4
    for ledger in (cut, *failed):
        claim, seqs = ledger.held.popitem()
        assert value(conn, "ack", claim) == len(seqs)
        ledger.done += seqs
        ledger.drain(conn, random.Random(0))
    checker.check(conn)


def test_queries_go_on_from_their_checkpoints_after_an_upgrade(conn: Conn) -> None:
    running = [query(conn, *each) for each in product(ORDERINGS, (False, True))]
    for each in running:
        next(each)
    schema.install(conn)
    checker.check(conn)
    for each in running:
        assert next(each, "over") == "over"


def query(conn: Conn, ordering: str, lost: bool) -> Iterator[None]:
    """In the middle of a batch, on which the query acted; which a worker may have taken over."""
    stream = f"{ordering} {lost}"
    ledger = make(conn, stream, Kind(ordering))

    def act(action: str, seq: int, batch: int, replayed: bool) -> None:
        """A row of a write of the query."""
        wanted = {"action": action, "stream": stream, "consumer": "c", "seqs": f"{{[{seq},{seq}]}}"}
        given = [f"write {stream}", batch, Jsonb([wanted])]
        assert call(conn, "settle_messages", *given, p_replayed=replayed)[0].done

    def send() -> None:  # publications that are taken together, of which many runs cross
        for n in range(24):
            key, priority = "abc"[n % 3], n // 2 % 2
            ledger.note(
                [value(conn, "send", stream, "x", key, p_priority=priority)], [key], priority
            )

    def ask(start: Any, size: int | None = None) -> Any:
        at = (start.claim_id, start.messages) if start else (0, 0)
        return call(conn, "reader_claim", reader, ledger.consumer, *at, size)[0]

    send()
    reader, worker, taken = uuid.uuid4(), list[Any](), list[int]()
    end = ask(None, 1000 if ordering != "none" else 18)
    send()
    call(conn, "reader_resume", reader, ledger.consumer, 0, end.claim_id, uuid.uuid4())
    plan = planned(conn, reader, 0, end)
    act("ack", plan[0], 0, True)
    act("dead_letter", plan[1], 1, False)
    act("nack", plan[9], 2, True)
    if lost:
        conn.execute("update pgqueue.claims set lease_until = now() where reader = %s", [reader])
        first = call(conn, "receive", stream, "c", 3)
        value(conn, "ack", claim_of(first))
        worker = call(conn, "receive", stream, "c", 2)
        taken = seqs_of(first) + seqs_of(worker)
    # What was returned is in the batch for ever, as it was, and is for others, too.
    returned = {row.seq for row in rows(conn, RETURNED, stream, plan, reader)} | {plan[9]}
    asked = (reader, 0, end.claim_id)
    before = planned(conn, reader, 0, end), value(conn, "reader_lost", *asked)
    mine = "select * from pgqueue.readers where reader = %s"
    kept = rows(conn, mine, reader)
    yield
    assert rows(conn, mine, reader) == kept
    now = planned(conn, reader, 0, end), value(conn, "reader_lost", *asked)
    assert now == before
    (row,) = call(conn, "reader_resume", reader, ledger.consumer, 0, end.claim_id, uuid.uuid4())
    checker.check(conn)
    again = planned(conn, reader, 0, end)
    assert row.planned == len(again)
    assert row.taken_over == value(conn, "reader_lost", *asked)
    expected = set(plan) - {plan[1]}
    if lost:
        assert plan[0] in again, "it acted on it, and it is in its batch for ever"
        assert set(again) <= expected
        assert not set(again) & set(taken) - returned
        assert row.taken_over >= len(set(taken) & set(plan) - returned)
    else:
        assert again == [seq for seq in plan if seq in set(again)]
        assert set(again) == expected
    next_, later = ask(end), list[int]()
    assert next_.lost == row.taken_over
    while next_.claim_id != end.claim_id:
        later += planned(conn, reader, end.claim_id, next_)
        end, next_ = next_, ask(next_)
    got = seqs_of(worker)
    if worker:
        assert value(conn, "ack", claim_of(worker)) == len(worker)
    while found := ledger.claim(conn, 7):
        assert value(conn, "ack", ledger.held.popitem()[0]) == len(found)
        got += found
    once = [*later, *got, *(set(again) - returned), *(taken[:3] if lost else [])]
    assert len(once) == len(set(once)), "delivered twice"
    assert {*once, plan[1]} == ledger.sent.keys(), "lost"
    checker.check(conn)


def test_a_key_is_held_while_its_claim_has_a_message_of_it(conn: Conn) -> None:
    """Also if the claim was in many ranges, which an acknowledgement has cut."""
    limits.shrink(conn, 1)
    ledger = make(conn, "s", Kind("key", {"keep_history": LONG}))
    ledger.send_batch(conn, [*"aabababa", "a"])
    limits.shrink(conn, 10)
    seqs = ledger.claim(conn, 5)
    (claim,) = ledger.held
    limits.shrink(conn, 1)
    assert value(conn, "ack", claim, [seqs[1], seqs[3]]) == 2  # of which each range is a run
    left = [seqs[0], seqs[2], seqs[4]]
    ledger.held[claim] = list(left)
    schema.install(conn)
    checker.check(conn)
    assert value(conn, "ack", claim, [left.pop()]) == 1
    checker.check(conn)
    keys = ledger.keys_of(left)
    assert not keys & ledger.keys_of(ledger.claim(conn, 9))
    assert value(conn, "ack", claim) == 2
    assert "a" in ledger.keys_of(ledger.claim(conn, 9)) or "a" not in keys


def planned(conn: Conn, reader: uuid.UUID, start: int, end: Any) -> list[int]:
    """The messages of a batch."""
    found = call(conn, "reader_plan", reader, start, end.claim_id)
    return [seq for row in found for seq in range(row.lo, row.hi)]
