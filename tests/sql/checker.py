"""Verify from the tables that a queue is in a state that its invariants allow.

Every committed state has to pass, whatever happened before and whoever is at work: `check` looks
at one snapshot. The numbers are those of the invariants in `test_invariants`, in its order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import combinations, pairwise
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo
from psycopg.rows import namedtuple_row

from spark_pgqueue.postgres import connection
from tests.sql import internals
from tests.sql.limits import limit


def numbers(multirange: Any) -> set[int]:
    """The elements of an int8multirange."""
    return {n for r in multirange or () for n in range(r.lower, r.upper)}


def coming(slot: Any) -> list[set[int]]:
    """What a slot goes on with, part by part."""
    return [numbers(part) for part in reversed((slot.rest or [])[: slot.parts])]  # None: one range


@dataclass
class Consumer:
    """What the tables say about a consumer."""

    consumer_id: int
    stream_id: int
    ordering: str
    cursor: Any
    scan_from: list[tuple[int, int, int]]
    max_ranges: int
    partitions: int | None = None  # of a group
    by_key: bool = False
    per_key_limit: int | None = None
    per_key_capacity: int | None = None
    per_key_latest: bool = False
    newest: dict[int, int] = field(default_factory=dict)  # by key, for that
    entries: list[Any] = field(default_factory=list)  # its messages with a key, for that
    publication_of: dict[int, int] = field(default_factory=dict)
    spent: set[int] = field(default_factory=set)  # keys with spent tokens
    freed: list[Any] = field(default_factory=list)  # keys that the next dealer deals
    places: list[Any] = field(default_factory=list)  # how far they are
    runs: list[Any] = field(default_factory=list)
    claims: list[Any] = field(default_factory=list)
    slots: list[Any] = field(default_factory=list)
    published: set[int] = field(default_factory=set)
    untaken: set[int] = field(default_factory=set)
    pieces: dict[int, Any] = field(default_factory=dict)
    dead: Counter[int] = field(default_factory=Counter)
    keys: dict[int, int | None] = field(default_factory=dict)
    trimmed: list[Any] = field(default_factory=list)

    def of(self, *states: str) -> set[int]:
        """The sequence numbers in runs of these states."""
        return {s for run in self.runs if run.state in states for s in numbers(run.seqs)}


def read(conn: psycopg.Connection) -> list[Consumer]:
    """Read all consumers of a database, from one snapshot."""
    url = make_conninfo(conn.info.dsn, password=conn.info.password or None)
    with connection.connect(url, autocommit=False) as other:
        begin(other)
        return read_here(other)


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
    consumers = {}
    max_ranges = limit(conn, "ranges", 64)
    for row in cur.execute("select * from pgqueue.consumers order by consumer_id").fetchall():
        cursors = cur.execute(
            "select k.next_publication, k.gaps, k.take_was_cut, k.last_line_no, k.scan_lanes_from,"
            " k.pieces_from, k.freed_from, k.waits, k.taken, k.forgotten,"
            " k.slots_low, k.slots_block, k.slots_from, k.slots_to, k.slots_priority,"
            " greatest(k.slots_until, '2000-01-01') as slots_until,"
            " case when tokens_from >= '2000-01-01' then tokens_from"
            " when tokens_from < '2000-01-01' then '2000-01-01' end as tokens_from,"
            " (select coalesce(sum(s.message_count), 0) from pgqueue.skips s"
            " where s.consumer_id = k.consumer_id) as skipped,"
            " g.gap_nos, g.ids as gap_ids, g.total, g.kept, k.filter_from,"
            " greatest(due_from, '2000-01-01') as due_from, clock_timestamp() as now"
            " from pgqueue.consumer_cursors k cross join lateral ("
            " select coalesce(array_agg(gap_no), '{}') as gap_nos,"
            " coalesce(range_agg(publication_ids), '{}') as ids,"
            " coalesce(range_agg(kept), '{}') as kept,"
            " coalesce(sum(_pgqueue.cardinality(publication_ids)), 0) as total"
            " from pgqueue.consumer_gaps x where x.consumer_id = k.consumer_id) g"
            " where k.consumer_id = %s",
            [row.consumer_id],
        ).fetchall()
        assert len(cursors) == 1, f"consumer {row.consumer_id} has {len(cursors)} cursors"
        scan_from = cur.execute(
            "select (f).* from pgqueue.consumer_cursors, unnest(scan_from) f"
            " where consumer_id = %s",
            [row.consumer_id],
        ).fetchall()
        consumers[row.consumer_id] = Consumer(
            row.consumer_id, row.stream_id, row.ordering, cursors[0],
            [tuple(f) for f in scan_from], max_ranges, row.partitions, "keyed" in row.way,
            row.per_key_limit, row.per_key_capacity, row.per_key_latest,
        )  # fmt: skip
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
    for piece in cur.execute(
        "select p.consumer_id, p.place, p.piece, p.message_count, p.keys is null as whole,"
        " coalesce(p.keys, '{}') as keys, p.arrival_no, p.first_seq, p.singly from pgqueue.pieces p"
    ).fetchall():
        consumers[piece.consumer_id].pieces[piece.piece] = piece
    for freed in cur.execute("select * from pgqueue.freed_keys").fetchall():
        assert freed.consumer_id in consumers, f"free keys of no consumer: {freed}"
        check_freed(consumers[freed.consumer_id], freed)
    for token in cur.execute("select * from pgqueue.key_tokens").fetchall():
        assert token.consumer_id in consumers, f"a token of no consumer: {token}"
        check_token(consumers[token.consumer_id], token)
    for slot in cur.execute("select * from pgqueue.slots").fetchall():
        assert slot.consumer_id in consumers, f"a slot of no consumer: {slot}"
        consumers[slot.consumer_id].slots.append(slot)
    for run in cur.execute(f"select * from {internals.RUNS} m").fetchall():
        assert run.consumer_id in consumers, f"a run of no consumer: {run}"
        consumers[run.consumer_id].runs.append(run)
    for claim in cur.execute(
        "select *, array(select a.seqs from unnest(acted) a) as acted_seqs"
        f" from {internals.CLAIMS} l"
    ).fetchall():
        assert claim.consumer_id in consumers, f"a claim of no consumer: {claim}"
        consumers[claim.consumer_id].claims.append(claim)
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
                    c.publication_of.update(dict.fromkeys(seqs, p.publication_id))
                if p.publication_id >= c.cursor.next_publication:
                    c.untaken |= seqs
                elif any(p.publication_id in r for r in c.cursor.gap_ids):
                    c.untaken |= seqs - numbers(c.cursor.kept)
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
            check_sets(c, None if done is None else done.get(c.consumer_id, set()))
            check_claims(c)
            check_group(c)
            check_line(c)
            check_slots(c)
            check_capacity(c)
            check_newest(c)
            if c.ordering != "none":
                check_order(c)
            elif c.by_key:
                check_pieces(c)
        except AssertionError as error:
            error.add_note(f"in consumer {c.consumer_id}, ordering={c.ordering}")
            for run in sorted(c.runs, key=lambda r: (r.arrival_no, r.first_seq))[:50]:
                error.add_note(f"{run}"[:400])
            for claim in c.claims[:20]:
                error.add_note(f"{claim}"[:400])
            error.add_note(f"{c.cursor} scan_from={c.scan_from}")
            raise


def check_sets(c: Consumer, done: set[int] | None) -> None:
    """1 no loss, 2 exclusive: each message is in exactly one place."""
    places: Counter[int] = Counter(c.untaken)
    for run in c.runs:
        seqs = numbers(run.seqs)
        assert seqs, f"an empty run: {run}"
        assert run.message_count == len(seqs), f"a run of {len(seqs)}: {run}"
        assert run.first_seq == min(seqs), f"first_seq of {run}"
        assert len(run.seqs) <= c.max_ranges, f"a run of {len(run.seqs)} ranges: {run}"
        places.update(seqs & c.published if run.state == "unfiltered" else seqs)
    in_hand = sum(run.message_count for run in c.runs)
    settled = c.cursor.taken - c.cursor.forgotten - c.cursor.skipped - in_hand
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
    gaps = numbers(c.cursor.gap_ids)
    assert sorted(c.cursor.gaps) == sorted(c.cursor.gap_nos), "gaps that the cursor does not know"
    assert len(gaps) == c.cursor.total, "an id in two gaps"
    assert all(1 <= g < c.cursor.next_publication for g in gaps), "a gap beyond what was taken"


def check_group(c: Consumer) -> None:
    """What a group has taken is in its line, and each of its partitions has one place in it."""
    partitions = sorted(place.partition for place in c.places)
    assert partitions == list(range(c.partitions or 0)), f"partitions {partitions}"
    leases = [place.lease_id for place in c.places if place.lease_id is not None]
    assert len(set(leases)) == len(leases), f"a lease of two partitions: {c.places}"
    for place in c.places:
        assert (place.lease_id is None) == (place.worker is None), f"{place}"
        assert 0 <= place.line_no <= c.cursor.last_line_no, f"beyond the line: {place}"
    if c.partitions is not None:
        assert not c.claims, f"claims of a group: {c.claims}"
        assert all((run.state, run.lane) == ("ready", 1) for run in c.runs), f"{c.runs}"


def check_claims(c: Consumer) -> None:
    """2 exclusive: a claimed run has one live claim, which counts it."""
    held: Counter[int] = Counter()
    for run in c.runs:
        assert (run.claim_id is not None) == (run.state == "claimed"), f"a claim of {run}"
        if run.claim_id is not None:
            held[run.claim_id] += run.message_count
    for claim in c.claims:
        assert claim.remaining == held.pop(claim.claim_id, 0), f"remaining of {claim}"
        assert claim.live or claim.remaining == 0, f"a claim that ended holds messages: {claim}"
        accounted = claim.remaining + claim.settled
        assert accounted <= claim.message_count, f"{claim}"
        assert claim.reader is not None or claim.remaining > 0, f"an empty claim: {claim}"
        assert claim.ordered == c.by_key or not claim.live
        acted = [seq for seqs in claim.acted_seqs for seq in numbers(seqs)]
        assert len(set(acted)) == len(acted), f"acted upon twice: {claim}"
        assert set(acted) <= numbers(claim.seqs), f"acted upon what it did not have: {claim}"
        assert len(acted) <= claim.settled, f"acted upon, and not settled: {claim}"
        suspects = [run for run in c.runs if run.claim_id == claim.claim_id and run.note]
        at_most = [run.note["at_most"] for run in suspects if "at_most" in run.note]
        if claim.reader is None and at_most:
            assert claim.remaining <= min(at_most), f"more than {at_most}: {claim}"
    assert not held, f"claimed by no claim: {held}"


def check_line(c: Consumer) -> None:
    """1 no loss: what is ready or delayed will be found by a claim."""
    now: datetime = c.cursor.now
    for run in c.runs:
        assert run.line_no <= c.cursor.last_line_no, f"a place not given out yet: {run}"
        assert run.arrival_no <= c.cursor.last_line_no, f"an arrival not given out yet: {run}"
        if run.state == "unfiltered":
            assert c.cursor.filter_from is not None, f"nobody will filter {run}"
            assert c.cursor.filter_from <= run.line_no, f"before {c.cursor.filter_from}: {run}"
            assert c.cursor.take_was_cut, f"nobody will look for {run}"
        if run.state == "ready" and not any(run.seqs == slot.seqs for slot in c.slots):
            place = [f for f in c.scan_from if f[0] == run.lane]
            beyond = c.cursor.scan_lanes_from is not None and run.lane >= c.cursor.scan_lanes_from
            assert place or beyond, f"a ready run in a lane that is not looked at: {run}"
            if place:
                assert (run.line_no, run.first_seq) >= place[0][1:], f"before {place[0]}: {run}"
        if run.state == "delayed":
            assert run.not_visible_until is not None, f"delayed for ever: {run}"
            assert run.not_visible_until >= c.cursor.due_from, f"before due_from: {run}"
        if not c.by_key:
            assert run.key is None, f"a key: {run}"
            assert run.state != "waiting", f"waiting for nothing: {run}"
            assert run.lane == -run.priority, f"the lane of {run}"
            if run.state == "ready" and run.not_visible_until is not None:
                assert run.not_visible_until <= now, f"ready too early: {run}"
    lanes = [f[0] for f in c.scan_from]
    assert lanes == sorted(set(lanes)), f"a lane twice, or out of order: {c.scan_from}"
    if c.cursor.scan_lanes_from is not None:
        assert all(lane < c.cursor.scan_lanes_from for lane in lanes), f"{c.scan_from}"


def check_slots(c: Consumer) -> None:
    """1 no loss: a free slot is found, at once or by the next claim that is in need."""
    free = [slot for slot in c.slots if slot.token is None]
    for slot in c.slots:
        assert c.cursor.slots_low is not None, f"nobody knows of {slot}"
        assert c.cursor.slots_low <= slot.slot, f"before {c.cursor.slots_low}: {slot}"
        claimed = (slot.claimed_at, slot.lease_until, slot.timeout)
        assert all((each is None) == (slot.token is None) for each in claimed), f"{slot}"
        assert slot.token is None or slot.token % 2 == 1, f"a token of no slot: {slot}"
    for slot in free:
        assert c.cursor.slots_from is not None, f"no claim will look for {slot}"
        assert c.cursor.slots_from <= slot.slot, f"before {c.cursor.slots_from}: {slot}"
    if c.by_key:
        check_slots_by_key(c)
    served = [slot for slot in free if slot.slot < c.cursor.slots_to] if free else []
    if c.by_key or not served or c.cursor.slots_until <= c.cursor.now:
        return
    first = min(served, key=lambda slot: slot.slot)
    places = [(-slot.priority, slot.arrival_no, min(numbers(slot.seqs)))
              for slot in sorted(served, key=lambda slot: slot.slot)]  # fmt: skip
    assert places == sorted(places), f"slots are out of order: {served}"
    for run in c.runs:
        if run.state == "ready":
            place = (run.lane, run.line_no, run.first_seq)
            assert place >= places[0], f"{run} comes before the slots, which begin with {first}"
        if run.state == "delayed":
            assert run.not_visible_until >= c.cursor.slots_until, f"nobody will notice {run}"


def check_slots_by_key(c: Consumer) -> None:
    """5 order: a slot has messages of its piece; what comes next of its key is in no other slot."""
    pieces: dict[int, list[Any]] = defaultdict(list)
    for slot in c.slots:
        parts = coming(slot)
        assert bool(parts) == (slot.rest is not None), f"parts: {slot}"
        assert {len(part) for part in parts[:-1]} <= {slot.size}, f"parts of another size: {slot}"
        assert all(max(a) < min(b) for a, b in pairwise(parts)), f"parts out of order: {slot}"
        if slot.whole:
            check_whole(c, slot)
            continue
        if slot.piece is not None:  # else from before it went by key
            if slot.token is None or c.ordering != "none" or c.per_key_limit is not None:
                assert slot.piece in c.pieces, f"not known: {slot}"
            pieces[slot.piece].append(slot)
    for piece, slots in pieces.items():
        if piece not in c.pieces or not c.pieces[piece].singly:
            (slot,) = slots
            holding = {s for run in c.runs if run.piece == piece for s in numbers(run.seqs)}
            assert holding == numbers(slot.seqs), f"a piece that is elsewhere, too: {slot}"
            assert slot.rest is None, f"of several keys, and goes on: {slot}"
            continue
        for slot in slots:
            now, next_ = numbers(slot.seqs), set().union(*coming(slot))
            assert not next_ or max(now) < min(next_), f"out of order: {slot}"
            assert {c.keys.get(seq) for seq in now | next_} <= {slot.key, None}, f"key of {slot}"
        keys = Counter(slot.key for slot in slots if slot.key is not None)
        assert all(n == 1 for n in keys.values()), f"slots of one key: {slots}"


def check_whole(c: Consumer, slot: Any) -> None:
    """5 order: a slot with all keys has the front of the line, and no claim has another message."""
    assert c.slots == [slot], f"not the only slot: {c.slots}"
    assert c.ordering == "stream", f"of all keys: {slot}"
    assert [piece.whole for piece in c.pieces.values()] == [True], f"other pieces: {c.pieces}"
    assert slot.piece in c.pieces, f"not known: {slot}"
    now, next_ = numbers(slot.seqs), set().union(*coming(slot))
    assert not next_ or max(now) < min(next_), f"out of order: {slot}"
    (place,) = [f for f in c.scan_from if f[0] == 1]
    assert place[1:] <= (slot.arrival_no, min(now)), f"before {place}: {slot}"
    for run in c.runs:
        if not numbers(run.seqs) <= now | next_:
            assert (run.state, run.lane) == ("ready", 1), f"beside {slot}: {run}"
            last = (slot.arrival_no, max(now | next_))
            assert (run.line_no, run.first_seq) > last, f"comes before {slot}: {run}"


def check_token(c: Consumer, token: Any) -> None:
    """Spent tokens say how many messages of a key were delivered lately, and will come back."""
    assert c.by_key, f"a token, and nothing goes by key: {token}"
    assert token.spent > 0, f"{token}"
    assert c.cursor.tokens_from is not None, f"it will not come back: {token}"
    assert token.returns_at >= c.cursor.tokens_from, f"before tokens_from: {token}"
    c.spent.add(token.key)


def check_freed(c: Consumer, freed: Any) -> None:
    """The next dealer will find the keys that are noted as free."""
    assert c.by_key, f"free keys, and nothing goes by key: {freed}"
    assert freed.keys, f"{freed}"
    assert c.cursor.freed_from is not None, f"no dealer will look: {freed}"
    assert c.cursor.freed_from <= freed.place <= c.cursor.last_line_no, f"{freed}"
    c.freed.append(freed)


def check_pieces(c: Consumer) -> None:
    """Without order, by key: what waits will be freed, and no key has more than it may have."""
    kept = {key for p in (*c.pieces.values(), *c.freed) for key in p.keys}
    in_flight: Counter[int | None] = Counter()
    for run in c.runs:
        keys = [c.keys.get(s) for s in numbers(run.seqs)]
        if run.state == "waiting":
            assert set(keys) == {run.key}, f"keys {keys} in {run}"
            assert run.key in kept | c.spent, f"key {run.key} is stuck: {run}"
            assert c.cursor.waits, f"no dealer would free the key of {run}"
            continue
        assert run.key is None, f"a key: {run}"
        if run.piece is not None:
            assert run.lane == 0, f"the lane of {run}"
            in_flight.update(keys)
            if run.state == "ready" or c.per_key_limit is not None:
                assert run.piece in c.pieces, f"not known: {run}"
        else:
            assert (run.state, run.lane) in {
                ("ready", 1), ("delayed", 1), ("unfiltered", 1)
            }, f"{run}"  # fmt: skip
            assert run.state != "ready" or run.line_no == run.arrival_no, f"{run}"
    check_limit(c, in_flight)


def check_limit(c: Consumer, in_flight: Counter[int | None]) -> None:
    """No key has more messages in pieces than its limit allows."""
    if c.per_key_limit is not None:
        over = {k: n for k, n in in_flight.items() if k is not None and n > c.per_key_limit}
        assert not over, f"beyond the limit of {c.per_key_limit}: {over}"


def check_capacity(c: Consumer) -> None:
    """With per_key_capacity, what a consumer owes of a key is entered; the rest does no harm."""
    if c.per_key_capacity is None:
        return
    owed = c.untaken | {s for run in c.runs for s in numbers(run.seqs) & c.published}
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
        for run in c.runs:
            for s in numbers(run.seqs) if run.state != "unfiltered" else ():
                key = c.keys.get(s)
                newest = None if key is None else c.newest.get(key)
                assert key is None or newest is not None, f"{s} of {run} is not noted"
                is_right = newest is None or s == newest or (run.state == "claimed" and s < newest)
                assert is_right, f"the newest of the key of {s} is {newest}: {run}"


def check_order(c: Consumer) -> None:
    """5 order: of each key come first those in a piece, then those that wait, then the line."""
    in_pieces: dict[int, set[int]] = defaultdict(set)  # by key, the pieces
    messages: dict[int, list[list[tuple[int, int]]]] = defaultdict(lambda: [[], [], [], []])
    whole = [p.piece for p in c.pieces.values() if p.whole]
    for run in c.runs:
        place = check_ordered_run(c, run)
        for s in numbers(run.seqs):
            key = 0 if c.ordering == "stream" else c.keys.get(s)
            if key is not None:
                messages[key][place].append((run.arrival_no, s))
                if place == 0:
                    in_pieces[key].add(run.piece)
    open_pieces = {run.piece for run in c.runs if run.piece is not None}
    assert open_pieces <= c.pieces.keys(), f"not known: {open_pieces - c.pieces.keys()}"
    assert all(p.place >= c.cursor.pieces_from for p in c.pieces.values()), (
        f"before {c.cursor.pieces_from}"
    )
    if set(whole) & open_pieces:
        assert len(open_pieces) == 1, f"{open_pieces} are open beside all keys, {whole}"

    delayed: dict[int, list[int]] = defaultdict(list)  # by key, where it waits for its own time
    upto: Counter[tuple[int, int]] = Counter()  # by key and arrival, the last message
    for run in sorted(c.runs, key=lambda run: run.first_seq):
        if run.state == "delayed" and run.key is not None:
            delayed[run.key].append(run.first_seq)
        if run.key is not None:  # a dealer takes such a run whole
            line = run.key, run.arrival_no
            assert upto[line] < run.first_seq, f"another run of its key has messages behind {run}"
            upto[line] = max(numbers(run.seqs))
    freed = {key for f in c.freed for key in f.keys}
    kept = Counter(key for p in c.pieces.values() for key in p.keys)
    assert all(n == 1 for n in kept.values()), f"keys in several pieces: {kept}"
    for p in c.pieces.values():
        gone = {key for key in p.keys if p.piece not in in_pieces.get(key, ())}
        held = sum(run.message_count for run in c.runs if run.piece == p.piece)
        assert not gone or held < p.message_count, f"no dealer will see that {gone} left {p}"
    if not whole:
        check_limit(c, Counter({key: len(places[0]) for key, places in messages.items()}))
    for key, pieces in in_pieces.items():
        assert len(pieces) == 1, f"key {key} is in the pieces {pieces}"
        (piece,) = pieces
        assert piece in whole or key in c.pieces[piece].keys, f"key {key} is not told of {piece}"
    for key, (in_piece, waiting, line, unfiltered) in messages.items():
        if key in delayed:
            assert key not in kept, f"key {key} is delayed and in a piece"
            assert delayed[key] == [min(run.first_seq for run in c.runs if run.key == key
                                        and run.arrival_no == min(waiting)[0])]  # fmt: skip
        else:
            assert not waiting or key in kept or key in freed | c.spent, f"key {key} is stuck"
        for before, after in combinations((in_piece, waiting, line, unfiltered), 2):
            if before and after:
                assert max(before) < min(after), f"key {key}: {max(before)} before {min(after)}"


def check_ordered_run(c: Consumer, run: Any) -> int:
    """Look at a run of an ordered consumer.

    Returns: 0 it is a piece, 1 it waits, 2 it is in the line, 3 it is not filtered.
    """
    if run.state == "unfiltered":
        assert (run.lane, run.line_no, run.piece) == (1, run.arrival_no, None), f"{run}"
        return 3
    keys = {c.keys.get(s) for s in numbers(run.seqs)}
    if run.state == "waiting" or (run.state == "delayed" and run.key is not None):
        assert run.piece is None, f"it waits in a piece: {run}"
        assert keys == {run.key}, f"keys {keys} in {run}"
        for kept in (p for p in (*c.pieces.values(), *c.freed) if run.key in p.keys):
            place = (kept.arrival_no, kept.first_seq)
            assert (run.arrival_no, run.first_seq) >= place, f"before {place}: {run}"
        return 1
    assert run.key is None, f"a key: {run}"
    if run.state == "delayed":
        assert (run.piece, keys) == (None, {None}), f"in a piece, or with a key: {run}"
        return 2
    if run.piece is None:
        assert (run.state, run.lane) == ("ready", 1), f"in no piece and not in the line: {run}"
        assert run.line_no == run.arrival_no, f"the place in the line of {run}"
        return 2
    assert run.lane == 0 or run.state == "claimed", f"the lane of {run}"
    assert run.lane == 1 or run.line_no <= run.piece, f"the place of {run}"
    return 0


def stuck(consumers: list[Consumer]) -> list[tuple[int, set[int]]]:
    """The consumers that have something left, and what."""
    return [
        (c.consumer_id, left)
        for c in consumers
        if (left := c.untaken | c.of("ready", "delayed", "waiting", "claimed"))
    ]
