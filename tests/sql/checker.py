"""Verify that a queue is in a state that its invariants allow, whatever happened before.

Every committed state has to pass, with anybody at it: `check` looks at one snapshot. It speaks of
messages, claims, leases and keys; `core` reads who holds what, and adds the rules of its tables.
The numbers are those of the invariants in `test_invariants`, in its order.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo
from psycopg.rows import namedtuple_row

from spark_pgqueue.postgres import connection
from tests.sql import core, form
from tests.sql.core import numbers

CONSUMERS = """
select c.consumer_id, c.stream_id, c.ordering, c.partitions,
       (s.of ->> 'per_key_limit')::int as most,
       (s.of ->> 'per_key_capacity')::int as capacity,
       coalesce((s.of ->> 'per_key_latest')::boolean, false) as latest,
       (s.of ->> 'per_key_limit') is not null or (s.of ->> 'per_key_interval') is not null
           or coalesce((s.of ->> 'fair')::boolean, false) as limits_keys,
       coalesce((select k.message_count from pgqueue.skips k
                 where k.consumer_id = c.consumer_id), 0) as skipped
from pgqueue.consumers c cross join lateral (select to_jsonb(c) as of) s
order by consumer_id
"""

_looking = weakref.WeakKeyDictionary[psycopg.Connection, psycopg.Connection]()


@dataclass
class Consumer:
    """What is known of a consumer.

    Attributes:
        consumer_id, stream_id, ordering: as it was made.
        held: what it holds, and has not taken.
        skipped: how many messages were skipped for it.
        partitions: of a group.
        by_key: whether messages of a key wait for each other.
        per_key_limit, per_key_capacity, per_key_latest: its settings.
        newest: by key, for per_key_latest.
        entries: its messages with a key, for per_key_capacity.
        publication_of: by message, for that.
        places: of a group, how far its partitions are.
        published: what was published to it.
        untaken: of that, what it has not taken.
        dead: how often each message is a dead letter.
        keys: of the messages of its stream, hashed.
        trimmed: ranges of messages that are gone.
    """

    consumer_id: int
    stream_id: int
    ordering: str
    held: core.Held
    skipped: int
    partitions: int | None = None
    by_key: bool = False
    per_key_limit: int | None = None
    per_key_capacity: int | None = None
    per_key_latest: bool = False
    newest: dict[int, int] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)
    publication_of: dict[int, int] = field(default_factory=dict)
    places: list[Any] = field(default_factory=list)
    published: set[int] = field(default_factory=set)
    untaken: set[int] = field(default_factory=set)
    dead: Counter[int] = field(default_factory=Counter)
    keys: dict[int, int | None] = field(default_factory=dict)
    trimmed: list[Any] = field(default_factory=list)

    @property
    def parts(self) -> list[core.Part]:
        """All that it holds."""
        return self.held.parts

    @property
    def tables(self) -> form.Tables:
        """The rows that say so, for the rules of `form` alone."""
        return self.held.tables

    @property
    def owed(self) -> set[int]:
        """What it is not done with."""
        return self.untaken | set(self.dead) | {s for part in self.parts for s in part.seqs}

    def of(self, *states: str) -> set[int]:
        """The messages in these states."""
        return {s for part in self.parts if part.state in states for s in part.seqs}


def read(conn: psycopg.Connection) -> list[Consumer]:
    """Read all consumers of a database, from one snapshot.

    In another session, which the next look has too: a new one takes as long as the look.
    """
    if other := _looking.pop(conn, None):
        with suppress(psycopg.OperationalError):  # as of a session that was ended
            begin(other)
    if other is None or other.closed:
        url = make_conninfo(conn.info.dsn, password=conn.info.password or None)
        other = connection.connect(url, autocommit=False)
        weakref.finalize(conn, other.close)
        begin(other)
    try:
        return read_here(other)
    finally:
        other.rollback()
        _looking[conn] = other


def begin(conn: psycopg.Connection) -> None:
    """Begin a transaction with a snapshot of all there is.

    Postgres empties a table also for those whose snapshot is older (`truncate`). So no segment may
    be emptied between the snapshot and a look at the messages: the snapshot would have
    publications of messages that nobody sees. A lock that comes before the snapshot keeps them.
    """
    conn.isolation_level = IsolationLevel.REPEATABLE_READ
    conn.execute("lock table pgqueue.messages in access share mode")  # takes no snapshot
    conn.execute("select from pgqueue.messages limit 0")  # and locks segments that were just made


def read_here(conn: psycopg.Connection) -> list[Consumer]:
    """Read all consumers of a database, in the connection's transaction."""
    cur: Any = conn.cursor(row_factory=namedtuple_row)
    held = core.read(conn)
    consumers = {
        c.consumer_id: Consumer(
            c.consumer_id, c.stream_id, c.ordering, held.pop(c.consumer_id), c.skipped,
            c.partitions, c.ordering != "none" or c.limits_keys, c.most, c.capacity, c.latest,
        )
        for c in cur.execute(CONSUMERS).fetchall()
    }  # fmt: skip
    assert not held, f"held by no consumer: {held}"
    for place in cur.execute("select * from pgqueue.group_partitions").fetchall():
        assert place.consumer_id in consumers, f"a partition of no group: {place}"
        consumers[place.consumer_id].places.append(place)
    keys: dict[int, dict[int, int | None]] = defaultdict(dict)
    for row in cur.execute(
        "select stream_id, seq, hashtextextended(key, 0) as key from pgqueue.messages"
    ).fetchall():
        keys[row.stream_id][row.seq] = row.key
    trimmed = dict(cur.execute("select stream_id, seqs from pgqueue.trims").fetchall())
    for c in consumers.values():
        c.keys = keys[c.stream_id]
        c.trimmed = list(trimmed.get(c.stream_id, ()))
    passing = cur.execute(
        "select c.consumer_id, _pgqueue.passing(c, range_agg(p.seqs)) as seqs"
        " from pgqueue.consumers c join pgqueue.publications p using (stream_id)"
        " where c.filtered group by c.consumer_id"
    ).fetchall()
    filters = {row.consumer_id: numbers(row.seqs) for row in passing}
    for p in cur.execute("select * from pgqueue.publications").fetchall():
        published = numbers(p.seqs)
        assert len(published) == p.message_count, f"{p}"
        for c in consumers.values():
            seqs = published & filters.get(c.consumer_id, published)
            if c.stream_id == p.stream_id and (p.consumers is None or c.consumer_id in p.consumers):
                assert not c.published & seqs, f"published twice: {c.published & seqs}"
                c.published |= seqs
                if c.per_key_capacity is not None:
                    c.publication_of.update((seq, p.publication_id) for seq in seqs)
                if p.publication_id >= c.held.next_publication:
                    c.untaken |= seqs
                elif any(p.publication_id in r for r in c.held.gaps):
                    c.untaken |= seqs - c.held.kept
    for entry in cur.execute("select * from pgqueue.key_backlog").fetchall():
        if entry.consumer_id in consumers:  # of what is sent while it is dropped some are left
            consumers[entry.consumer_id].entries.append(entry)
    for newest in cur.execute(
        "select consumer_id, hashtextextended(key, 0) as key, seq from pgqueue.newest_of_keys"
    ).fetchall():
        consumers[newest.consumer_id].newest[newest.key] = newest.seq
    lost = cur.execute(
        "select d.* from pgqueue.dedup_keys d"
        " join pgqueue.messages m on m.stream_id = d.stream_id and m.seq = d.seq"
        " where not exists (select from pgqueue.publications p"
        " where p.stream_id = d.stream_id and p.seqs @> d.seq)"
        # a publication is trimmed before the segment with its messages is emptied
        " and not exists (select from pgqueue.segments l where l.stream_id = d.stream_id"
        " and d.seq >= l.lo and d.seq < l.hi and l.closed_at is not null)"
    ).fetchall()
    assert not lost, f"dedup keys of messages that were not published: {lost[:20]}"
    for d in cur.execute("select * from pgqueue.dead_messages").fetchall():
        seqs = numbers(d.seqs)
        assert len(seqs) == d.message_count, f"{d}"
        consumers[d.consumer_id].dead.update(seqs)
    return list(consumers.values())


def check(
    conn: psycopg.Connection,
    done: Mapping[int, set[int]] | None = None,
    consumers: list[Consumer] | None = None,
) -> None:
    """Raise AssertionError unless every consumer is in a state that the invariants allow.

    Args:
        conn: of the database; a second connection like it looks at what is committed.
        done: by consumer_id, what was acknowledged, or skipped when the consumer was made.
            Without it, nobody is told when a message is lost.
        consumers: what `read` returned, instead of reading.
    """
    for c in read(conn) if consumers is None else consumers:
        try:
            check_places(c, None if done is None else done.get(c.consumer_id, set()))
            check_claims(c)
            check_group(c)
            check_keys(c)
            check_capacity(c)
            check_newest(c)
            form.check(c)
        except AssertionError as error:
            error.add_note(f"in consumer {c.consumer_id}, ordering={c.ordering}")
            for note in c.tables.notes():
                error.add_note(note)
            raise


def check_places(c: Consumer, done: set[int] | None) -> None:
    """1 no loss, 2 exclusive: each message is in exactly one place."""
    places: Counter[int] = Counter(c.untaken)
    for part in c.parts:
        assert part.seqs, f"of no messages: {part}"
        assert part.count == len(part.seqs), f"{part.count} are {len(part.seqs)}: {part}"
        places.update(part.seqs & c.published if part.state == "unfiltered" else part.seqs)
    settled = c.held.left - c.skipped - sum(part.count for part in c.parts)
    assert settled >= c.dead.total(), f"settled {settled}, of which {c.dead.total()} are dead"
    places.update(c.dead)
    twice = sorted(s for s, n in places.items() if n > 1)
    assert not twice, f"in two places: {twice[:20]}"
    trimmed = [s for s in places if any(s in r for r in c.trimmed)]
    assert not trimmed, f"trimmed, but still there: {trimmed[:20]}"
    assert places.keys() <= c.published, f"not published to it: {places.keys() - c.published}"
    if done is not None:
        again = sorted(places.keys() & done)
        assert not again, f"acknowledged, but still there: {again[:20]}"
        lost = sorted(c.published - places.keys() - done)
        assert not lost, f"lost: {lost[:20]}"
    gaps = numbers(c.held.gaps)
    assert all(1 <= g < c.held.next_publication for g in gaps), "a gap beyond what was taken"


def check_group(c: Consumer) -> None:
    """Nobody claims what a group has taken, and each of its partitions has one place in it."""
    partitions = sorted(place.partition for place in c.places)
    assert partitions == list(range(c.partitions or 0)), f"partitions {partitions}"
    leases = [place.lease_id for place in c.places if place.lease_id is not None]
    assert len(set(leases)) == len(leases), f"a lease of two partitions: {c.places}"
    for place in c.places:
        assert (place.lease_id is None) == (place.worker is None), f"{place}"
    if c.partitions is not None:
        assert not c.held.claims, f"claims of a group: {c.held.claims}"
        assert {part.state for part in c.parts} <= {"ready"}, f"{c.parts}"


def check_claims(c: Consumer) -> None:
    """2 exclusive, 3 fenced: a claimed message has one live claim, which counts it."""
    held: Counter[int] = Counter()
    at_most: dict[int, list[int]] = defaultdict(list)
    for part in c.parts:
        assert part.claim_id is None or part.state == "claimed", f"a claim of {part}"
        if part.state == "claimed":
            assert part.claim_id is not None, f"claimed by nobody: {part}"
            held[part.claim_id] += part.count
            at_most[part.claim_id] += [] if part.at_most is None else [part.at_most]
    for claim in c.held.claims:
        assert claim.holds == held.pop(claim.claim_id, 0), f"what {claim} holds"
        assert claim.live or claim.holds == 0, f"a claim that ended holds messages: {claim}"
        if claim.had is not None:
            assert claim.holds + (claim.settled or 0) <= claim.had, f"{claim}"
        assert claim.reader is not None or claim.holds > 0, f"an empty claim: {claim}"
        early = claim.settled_early
        assert len(set(early)) == len(early), f"settled twice: {claim}"
        assert set(early) <= claim.seqs, f"settled what it did not have: {claim}"
        assert len(early) <= (claim.settled or 0), f"settled early, and not counted: {claim}"
        most = min(at_most[claim.claim_id], default=claim.holds)
        assert claim.reader is not None or claim.holds <= most, f"more than {most}: {claim}"
    assert not held, f"claimed by no claim: {held}"


def check_keys(c: Consumer) -> None:
    """5 order: what is claimed, or may be next, has no earlier message of its key elsewhere.

    And with a limit, no more messages of a key are claimed than it allows.
    """
    lines: dict[Any, list[tuple[int, int, core.Part]]] = defaultdict(list)
    for part in c.parts:
        for s in part.seqs:
            key = 0 if c.ordering == "stream" else c.keys.get(s)
            if key is not None:
                lines[key].append((part.arrival, s, part))
    for key, line in lines.items():
        claimed = sum(part.claim_id is not None for _, _, part in line)
        most = claimed if c.per_key_limit is None else c.per_key_limit
        assert claimed <= most, f"{claimed} of key {key} are claimed, and {most} may be"
        if c.ordering == "none":
            continue
        line.sort(key=lambda each: each[:2])
        first = line[0][2]
        for _, s, part in line:
            if part.claim_id is not None or part.next:
                same = part is first or (
                    part.claim_id is not None and part.claim_id == first.claim_id
                )
                assert same, f"{s} of key {key} in {part}, while {line[0][1]} is in {first}"


def check_capacity(c: Consumer) -> None:
    """With per_key_capacity, what a consumer owes of a key is entered; the rest does no harm."""
    if c.per_key_capacity is None:
        return
    owed = c.untaken | {s for part in c.parts for s in part.seqs & c.published}
    missing = {s for s in owed if c.keys.get(s) is not None} - {e.seq for e in c.entries}
    assert not missing, f"not entered for its key: {sorted(missing)[:20]}"
    for e in c.entries:
        if e.seq in owed:
            assert e.key == c.keys[e.seq], f"another key: {e}"
            known = c.publication_of[e.seq]
            assert e.publication_id in (0, known), f"published with {known}: {e}"
    known_new = {e.seq for e in c.entries if e.publication_id}
    missing = {s for s in c.untaken if c.keys.get(s) is not None} - known_new
    assert not missing, f"entered as if taken: {sorted(missing)[:20]}"


def check_newest(c: Consumer) -> None:
    """With per_key_latest, of a key only the newest message that was taken waits."""
    assert c.per_key_latest or not c.newest, f"newest messages that nobody needs: {c.newest}"
    if c.per_key_latest:
        for part in c.parts:
            for s in part.seqs if part.state != "unfiltered" else ():
                key = c.keys.get(s)
                newest = None if key is None else c.newest.get(key)
                assert key is None or newest is not None, f"{s} of {part} is not noted"
                is_right = newest is None or s == newest or (part.state == "claimed" and s < newest)
                assert is_right, f"the newest of the key of {s} is {newest}: {part}"


def stuck(consumers: list[Consumer]) -> list[tuple[int, set[int]]]:
    """The consumers that have something left, and what."""
    return [
        (c.consumer_id, left)
        for c in consumers
        if (left := c.untaken | c.of("ready", "delayed", "waiting", "claimed"))
    ]
