"""Verify from the tables that a queue is in a state that its invariants allow.

Every committed state has to pass, whatever happened before and whoever is at work: `check` looks
at one snapshot. The numbers are those of the invariants in `test_invariants`, in its order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import namedtuple_row

from tests.sql.limits import limit


def numbers(multirange: Any) -> set[int]:
    """The elements of an int8multirange."""
    return {n for r in multirange or () for n in range(r.lower, r.upper)}


@dataclass
class Consumer:
    """What the tables say about a consumer."""

    consumer_id: int
    stream_id: int
    ordering: str
    cursor: Any
    floors: list[tuple[int, int, int]]
    max_ranges: int
    runs: list[Any] = field(default_factory=list)
    claims: list[Any] = field(default_factory=list)
    published: set[int] = field(default_factory=set)
    untaken: set[int] = field(default_factory=set)
    dead: Counter[int] = field(default_factory=Counter)
    keys: dict[int, str | None] = field(default_factory=dict)

    def of(self, *states: str) -> set[int]:
        """The sequence numbers in runs of these states."""
        return {s for run in self.runs if run.state in states for s in numbers(run.seqs)}


def read(conn: psycopg.Connection) -> list[Consumer]:
    """Read all consumers of a database, from one snapshot."""
    with psycopg.connect(conn.info.dsn, password=conn.info.password or None) as other:
        other.isolation_level = IsolationLevel.REPEATABLE_READ
        return read_here(other)


def read_here(conn: psycopg.Connection) -> list[Consumer]:
    """Read all consumers of a database, in the connection's transaction."""
    cur: Any = conn.cursor(row_factory=namedtuple_row)
    consumers = {}
    max_ranges = limit(conn, "ranges", 64)
    for row in cur.execute("select * from pgqueue.consumers order by consumer_id").fetchall():
        cursors = cur.execute(
            "select seen, watched, parked, turn, open_claims, aside, mixed_claim, first_claim,"
            " greatest(due_floor, '2000-01-01') as due_floor, clock_timestamp() as now"
            " from pgqueue.consumer_cursors where consumer_id = %s",
            [row.consumer_id],
        ).fetchall()
        assert len(cursors) == 1, f"consumer {row.consumer_id} has {len(cursors)} cursors"
        floors = cur.execute(
            "select (f).* from pgqueue.consumer_cursors, unnest(floors) f where consumer_id = %s",
            [row.consumer_id],
        ).fetchall()
        consumers[row.consumer_id] = Consumer(
            row.consumer_id, row.stream_id, row.ordering, cursors[0],
            [tuple(f) for f in floors], max_ranges,
        )  # fmt: skip
    keys: dict[int, dict[int, str | None]] = defaultdict(dict)
    for row in cur.execute("select stream_id, seq, key from pgqueue.messages").fetchall():
        keys[row.stream_id][row.seq] = row.key
    for c in consumers.values():
        c.keys = keys[c.stream_id]
    for run in cur.execute("select * from pgqueue.consumer_messages").fetchall():
        assert run.consumer_id in consumers, f"a run of no consumer: {run}"
        consumers[run.consumer_id].runs.append(run)
    for claim in cur.execute("select * from pgqueue.claims").fetchall():
        assert claim.consumer_id in consumers, f"a claim of no consumer: {claim}"
        consumers[claim.consumer_id].claims.append(claim)
    for p in cur.execute("select * from pgqueue.publications").fetchall():
        seqs = numbers(p.seqs)
        assert len(seqs) == p.n, f"publication {p.publication_id} counts {p.n}: {p.seqs}"
        for c in consumers.values():
            if c.stream_id == p.stream_id and (p.consumers is None or c.consumer_id in p.consumers):
                assert not c.published & seqs, f"published twice: {c.published & seqs}"
                c.published |= seqs
                if not any(p.publication_id in r for r in c.cursor.seen):
                    c.untaken |= seqs
    for d in cur.execute("select * from pgqueue.dead_messages").fetchall():
        seqs = numbers(d.seqs)
        assert len(seqs) == d.n, f"a dead letter counts {d.n}: {d.seqs}"
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
            check_sets(c, None if done is None else done.get(c.consumer_id, set()))
            check_claims(c)
            check_line(c)
            if c.ordering != "none":
                check_order(c)
        except AssertionError as error:
            error.add_note(f"in consumer {c.consumer_id}, ordering={c.ordering}")
            for run in sorted(c.runs, key=lambda r: (r.position, r.first_seq))[:50]:
                error.add_note(f"{run}")
            for claim in c.claims[:20]:
                error.add_note(f"{claim}")
            error.add_note(f"{c.cursor} floors={c.floors}")
            raise


def check_sets(c: Consumer, done: set[int] | None) -> None:
    """1 no loss, 2 exclusive: each message is in exactly one place."""
    places: Counter[int] = Counter(c.untaken)
    for run in c.runs:
        seqs = numbers(run.seqs)
        assert seqs, f"an empty run: {run}"
        assert run.n == len(seqs), f"a run of {len(seqs)} counts {run.n}: {run}"
        assert run.first_seq == min(seqs), f"first_seq of {run}"
        assert len(run.seqs) <= c.max_ranges, f"a run of {len(run.seqs)} ranges: {run}"
        places.update(seqs)
    places.update(c.dead)
    twice = sorted(s for s, n in places.items() if n > 1)
    assert not twice, f"in two places: {twice[:20]}"
    assert places.keys() <= c.published, f"not published to it: {places.keys() - c.published}"
    if done is not None:
        again = sorted(places.keys() & done)
        assert not again, f"acknowledged, but still there: {again[:20]}"
        lost = sorted(c.published - places.keys() - done)
        assert not lost, f"lost: {lost[:20]}"
    holes = numbers(c.cursor.watched), numbers(c.cursor.parked)
    assert not holes[0] & holes[1], "holes both watched and parked"
    for name, hole in zip(("watched", "parked"), holes, strict=True):
        assert not any(h in r for h in hole for r in c.cursor.seen), f"seen, but still {name}"


def check_claims(c: Consumer) -> None:
    """2 exclusive: a claimed run has one live claim, which counts it."""
    held: Counter[int] = Counter()
    for run in c.runs:
        assert (run.claim_id is not None) == (run.state == "claimed"), f"a claim of {run}"
        if run.claim_id is not None:
            held[run.claim_id] += run.n
    for claim in c.claims:
        assert claim.remaining == held.pop(claim.claim_id, 0), f"remaining of {claim}"
        assert claim.live or claim.remaining == 0, f"a claim that ended holds messages: {claim}"
        assert claim.remaining + claim.settled <= claim.n, f"{claim}"
        assert claim.reader is not None or claim.remaining > 0, f"an empty claim: {claim}"
        assert claim.ordered == (c.ordering != "none")
    assert not held, f"claimed by no claim: {held}"


def check_line(c: Consumer) -> None:
    """1 no loss: what is ready or delayed will be found by a claim."""
    now: datetime = c.cursor.now
    for run in c.runs:
        assert run.turn <= c.cursor.turn, f"a place not given out yet: {run}"
        assert run.position <= c.cursor.turn, f"a position not given out yet: {run}"
        if run.state == "ready":
            floor = [f for f in c.floors if f[0] == run.rank]
            assert floor, f"no floor for the rank of a ready run: {run}"
            assert (run.turn, run.first_seq) >= floor[0][1:], f"below the floor {floor[0]}: {run}"
        if run.state == "delayed":
            assert run.not_visible_until is not None, f"delayed for ever: {run}"
            assert run.not_visible_until >= c.cursor.due_floor, f"below the due floor: {run}"
        if c.ordering == "none":
            assert run.key is None, f"a key: {run}"
            assert run.state != "waiting", f"waiting for nothing: {run}"
            assert run.rank == -run.priority, f"the rank of {run}"
            if run.state == "ready" and run.not_visible_until is not None:
                assert run.not_visible_until <= now, f"ready too early: {run}"
    assert len({f[0] for f in c.floors}) == len(c.floors), f"two floors of a rank: {c.floors}"


def check_order(c: Consumer) -> None:
    """5 order: of each key the claimed come first, then those aside, then those in the line."""
    cursor = c.cursor
    claims_open = [claim for claim in c.claims if claim.remaining > 0]
    assert cursor.open_claims == len(claims_open), f"open_claims {cursor.open_claims}"
    aside_runs = [run for run in c.runs if run.state != "claimed" and run.key is not None]
    assert cursor.aside == len(aside_runs), f"aside is {cursor.aside}, not {len(aside_runs)}"
    if cursor.mixed_claim is not None:
        assert [cursor.mixed_claim] == [claim.claim_id for claim in claims_open], "mixed_claim"
    assert all(claim.claim_id >= cursor.first_claim for claim in claims_open), "first_claim"
    if c.ordering == "stream":
        assert len(claims_open) <= 1, f"{len(claims_open)} claims of a stream are open"

    # by key, (position, seq) and where it is
    claimed: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    line: dict[str, list[tuple[int, int]]] = defaultdict(list)
    aside: dict[str, list[Any]] = defaultdict(list)
    for run in c.runs:
        seqs = numbers(run.seqs)
        keys = {"" if c.ordering == "stream" else c.keys[s] for s in seqs}
        if run.key is not None:
            assert keys == {run.key}, f"keys {keys} in {run}"
        if run.state == "claimed":
            if run.key is None and keys != {None}:
                assert run.claim_id == cursor.mixed_claim, f"not split by key: {run}"
            for s in seqs:
                key = "" if c.ordering == "stream" else c.keys[s]
                if key is not None:
                    claimed[key].append((run.position, s, run.claim_id))
        elif run.key is not None:
            assert run.rank == -1, f"the rank of {run}"
            aside[run.key].append(run)
        else:
            assert run.rank == 0, f"the rank of {run}"
            assert run.turn == run.position, f"the place in the line of {run}"
            assert run.state in ("ready", "delayed"), f"waiting without a key: {run}"
            if run.state == "delayed":
                assert keys == {None}, f"keys {keys} in {run}"
            for s in seqs:
                key = "" if c.ordering == "stream" else c.keys[s]
                if key is not None:
                    line[key].append((run.position, s))

    for key, messages in claimed.items():
        holders = {claim for _, _, claim in messages}
        assert len(holders) == 1, f"key {key!r} is in the claims {holders}"
    for key, runs in aside.items():
        runs.sort(key=lambda r: (r.position, r.first_seq))
        first, *later = runs
        for run in later:
            assert run.state == "waiting", f"key {key!r}: not its first, but {run.state}: {run}"
        if key in claimed:
            assert first.state == "waiting", f"key {key!r} is claimed, but {first.state}: {first}"
        else:
            assert first.state in ("ready", "delayed"), f"key {key!r} is stuck: {first}"
        if first.state == "ready" and first.not_visible_until is not None:
            assert first.not_visible_until <= cursor.now, f"ready too early: {first}"
    for key in claimed.keys() | aside.keys():
        held = [(p, s) for p, s, _ in claimed.get(key, [])]
        set_aside = [(r.position, s) for r in aside.get(key, []) for s in numbers(r.seqs)]
        in_line = line.get(key, [])
        for before, after in ((held, set_aside), (held, in_line), (set_aside, in_line)):
            if before and after:
                assert max(before) < min(after), f"key {key!r}: {max(before)} before {min(after)}"


def stuck(consumers: list[Consumer]) -> list[tuple[int, set[int]]]:
    """The consumers that have something left, and what."""
    return [
        (c.consumer_id, left)
        for c in consumers
        if (left := c.untaken | c.of("ready", "delayed", "waiting", "claimed"))
    ]
