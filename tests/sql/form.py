"""What the tables of this core promise beside what every core does: bundles, lanes, hints.

It goes with them (see `core`). A breach of these rules loses nothing yet, and would later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sql.checker import Consumer

DEALT, LINE, DELAYED, HELD, WAITING, UNFILTERED = 0, 1, 1000001, 1000002, 1000003, 1000004
PLACE_OF_HELD = 1 << 61


@dataclass
class Tables:
    """The rows of a consumer."""

    cursor: Any
    max_ranges: int
    bundles: list[Any] = field(default_factory=list)
    claims: list[Any] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)  # spent ones, of keys
    lanes: list[Any] = field(default_factory=list)  # the hints of these
    ahead: list[Any] = field(default_factory=list)  # publications that were taken ahead

    @cached_property
    def by_number(self) -> dict[int, Any]:
        """The bundles."""
        return {bundle.bundle_no: bundle for bundle in self.bundles}

    def notes(self) -> list[str]:
        """All of it, for who looks for a fault."""
        found = sorted(self.bundles, key=lambda b: (b.arrival_no, b.first_seq))[:50]
        return [f"{row}"[:500] for row in (*found, *self.claims[:20])] + [
            f"{self.cursor} lanes={[tuple(lane)[1:] for lane in self.lanes]}"
        ]


def numbers(multirange: Any) -> set[int]:
    """The elements of an int8multirange."""
    return {n for r in multirange or () for n in range(r.lower, r.upper)}


def check(c: Consumer) -> None:
    """Raise AssertionError unless the rows of a consumer go together."""
    cursor = c.tables.cursor
    assert sorted(cursor.gaps) == sorted(cursor.gap_nos), "gaps that the cursor does not know"
    assert len(numbers(cursor.stored_ids)) == cursor.total, "an id in two gaps"
    for bundle in c.tables.bundles:
        check_bundle(c, bundle)
        check_claimed(c, bundle)
        check_place(c, bundle)
        if c.by_key:
            check_key(c, bundle)
    check_hints(c)
    for token in c.tables.tokens:
        check_token(c, token)
    for place in c.places:
        assert 0 <= place.arrival_no <= cursor.last_arrival, f"beyond the line: {place}"
    if c.partitions is not None:
        assert all((b.state, b.lane) == ("ready", LINE) for b in c.tables.bundles)
    elif c.by_key:
        check_firsts(c)
        check_limit(c)


def check_bundle(c: Consumer, b: Any) -> None:
    """A bundle has messages, and not too many ranges while it is free; and arrived by now."""
    seqs = numbers(b.seqs)
    assert seqs or b.members, f"empty: {b}"
    assert not seqs or b.first_seq <= min(seqs), f"first_seq of {b}"
    assert b.token is not None or b.first_seq == min(seqs), f"first_seq of {b}"
    assigned = c.by_key and b.lane == DEALT
    few = b.token is not None or assigned or b.lane == WAITING or len(b.seqs) <= c.tables.max_ranges
    assert few, f"{len(b.seqs)} ranges: {b}"
    assert b.arrival_no <= c.tables.cursor.last_arrival, f"an arrival not given out yet: {b}"


def check_claimed(c: Consumer, b: Any) -> None:
    """3 fenced: the head of a claim has its lease and names the members, and they name it."""
    claimed = b.token is not None
    assert (b.claimed_at is not None) == claimed, f"{b}"
    assert (b.visibility_timeout is not None) == claimed, f"{b}"
    assert (b.lease_until is not None) == (claimed and b.head is None), f"{b}"
    assert claimed or (b.owner, b.members, b.head, b.reader) == (None, None, None, None), f"{b}"
    if b.head is not None:
        head = c.tables.by_number.get(b.head)
        assert head is not None, f"no head: {b}"
        assert head.token == b.token, f"of another claim than {b}: {head}"
        assert head.head is None, f"a member: {head}"
        assert b.bundle_no in (head.members or ()), f"{head} without {b}"
    if b.reader is not None and b.head is None:
        known = [claim for claim in c.tables.claims if claim.claim_id == b.claim_id]
        assert len(known) == 1, f"not noted as the reader's: {b}"
        assert known[0].message_count is not None, f"not noted as the reader's: {b}"


def check_place(c: Consumer, b: Any) -> None:
    """1 no loss: the lane says the state, and the place when it ends."""
    if b.lane == HELD:
        assert b.token is not None, f"held by nobody: {b}"
    elif b.token is not None:
        assert b.lane < DELAYED, f"claimed in no lane of claims: {b}"
    if b.lane == UNFILTERED:
        assert c.tables.cursor.filter_from is not None or not c.tables.cursor.hinted, f"{b}"
    elif b.lane == DELAYED and b.state == "delayed":
        assert b.not_visible_until is not None, f"delayed for ever: {b}"
    elif b.lane < DELAYED and c.by_key:
        assert b.lane in (DEALT, LINE), f"the lane of {b}"
        # (what came back keeps its place, before what was assigned after it)
        assert b.place == b.arrival_no or b.lane == DEALT, f"the place of {b}"
        assert b.place <= b.bundle_no or b.lane == LINE, f"the place of {b}"
    elif b.lane < DELAYED:
        assert (b.lane, b.place) == (-b.priority, b.arrival_no), f"the place of {b}"
    if c.by_key and b.lane == HELD and b.key is not None:
        assert b.keys == [b.key], f"has another key: {b}"
    if not c.by_key:
        assert b.lane != WAITING, f"waiting for nothing: {b}"
        assert (b.key, b.predecessor, b.keys) == (None, None, None), f"a key: {b}"
        if b.state == "ready" and b.not_visible_until is not None:
            assert b.not_visible_until <= c.tables.cursor.now, f"ready too early: {b}"


def check_hints(c: Consumer) -> None:
    """1 no loss: no hint hides a bundle that a claim may have, or that is to be judged."""
    cursor = c.tables.cursor
    assert cursor.is_ahead is not False, f"taken ahead, and behind: {c.tables.ahead}"
    if not cursor.hinted:
        return
    lanes = {lane.lane: lane for lane in c.tables.lanes}
    assert [lane.lane for lane in c.tables.lanes] == sorted(lanes), f"{c.tables.lanes}"
    assert cursor.lanes_from is None or all(lane < cursor.lanes_from for lane in lanes), f"{lanes}"
    quiet = cursor.idle_until is not None and cursor.idle_until > cursor.now
    for b in c.tables.bundles:
        if b.lane == DELAYED:
            assert b.due >= cursor.due_from, f"before due_from: {b}"
            assert not quiet or b.due >= cursor.idle_until, f"nobody will notice {b}"
        elif b.lane == UNFILTERED:
            assert cursor.filter_from <= b.place, f"before {cursor.filter_from}: {b}"
            assert cursor.was_cut, f"nobody will look for {b}"
        elif b.lane < DELAYED:
            lane = lanes.get(b.lane)
            if b.token is not None and is_noted_ahead(c, b):
                continue
            if lane is None:
                from_ = cursor.lanes_from
                seen = from_ is not None and (b.lane >= from_ or b.token is not None)
                assert seen, f"in a lane that is not looked at: {b}"
                continue
            place = (b.place, b.first_seq)
            assert place >= (lane.low_place, lane.low_seq), f"before {lane}: {b}"
            if b.token is None:
                assert lane.place is not None, f"{lane} has no free bundle: {b}"
                assert place >= (lane.place, lane.first_seq), f"before {lane}: {b}"
        if b.key is not None:
            assert cursor.any_waiting, f"nobody looks for {b}"
        if b.lane == WAITING and b.place != -2:
            from_ = cursor.waits_from if b.place >= 0 else cursor.free_from
            assert b.place >= from_, f"before {from_}: {b}"
        if c.by_key and b.lane == HELD and (b.key, b.keys) == (None, None):
            assert cursor.all_keys, f"has all keys, and nobody knows: {b}"


def is_noted_ahead(c: Consumer, b: Any) -> bool:
    """Whether the hints will know of a bundle when the cursor passes what was taken ahead."""
    at = (b.place, b.first_seq)
    return any(a.lane == b.lane and (a.place, a.first_seq) <= at for a in c.tables.ahead)


def check_token(c: Consumer, token: Any) -> None:
    """Spent tokens say how many messages of a key were delivered lately, and will come back."""
    assert c.by_key, f"a token without delivery by key: {token}"
    assert token.spent > 0, f"{token}"


def keys_of(c: Consumer, b: Any) -> list[int]:
    """The keys of a bundle's messages, as hashes; once for each message."""
    keys = [0 if c.ordering == "stream" else c.keys.get(seq) for seq in numbers(b.seqs)]
    return [key for key in keys if key is not None]


def check_key(c: Consumer, b: Any) -> None:
    """5 order: by its columns a bundle is found by each of its keys."""
    keys = keys_of(c, b)
    if b.lane in (DELAYED, WAITING) and (b.key is not None or b.lane == WAITING):
        assert set(keys) <= {b.key}, f"keys {keys} in {b}"
        assert c.ordering != "none" or b.lane == WAITING or keys, f"{b}"
        assert (b.keys, b.predecessor) == (None, None), f"assigned, and waits: {b}"
    elif b.lane == DEALT and b.keys is not None:
        wanted = keys if c.ordering == "none" else sorted(set(keys))
        if b.shrunk:
            assert not Counter(wanted) - Counter(b.keys), f"keys {keys} in {b}"
        else:
            assert sorted(b.keys) == sorted(wanted), f"keys {keys} in {b}"
    elif b.lane == LINE:
        assert (b.key, b.predecessor, b.keys) == (None, None, None), f"not of the line: {b}"
    if b.predecessor is not None and b.predecessor in c.tables.by_number:
        before = c.tables.by_number[b.predecessor]
        assert before.lane in (DEALT, HELD), f"behind one that is not assigned: {b}"
        assert before.bundle_no < b.bundle_no, f"behind a later one: {b}"


def check_firsts(c: Consumer) -> None:
    """1 no loss: of each key that waits one bundle is the first, and it will be found."""
    firsts: dict[int, list[Any]] = defaultdict(list)
    waiting: dict[int, list[Any]] = defaultdict(list)
    for b in c.tables.bundles:
        if b.key is not None and b.lane in (DELAYED, WAITING):
            waiting[b.key].append(b)
            if b.lane == DELAYED or b.place != -2:
                firsts[b.key].append(b)
    for key, all_ in waiting.items():
        assert len(firsts[key]) == 1, f"key {key} has {len(firsts[key])} firsts of {len(all_)}"
        (first,) = firsts[key]
        assert min((b.arrival_no, b.first_seq) for b in all_) == (
            first.arrival_no, first.first_seq,
        ), f"not the first of its key: {first}"  # fmt: skip
        if first.lane == WAITING and first.place >= PLACE_OF_HELD:
            held = c.tables.by_number.get(first.place - PLACE_OF_HELD)
            known = held is not None and (held.lane, held.key) == (HELD, key)
            assert known or key in c.tables.cursor.freed, f"nobody will look at {first}"
        line: dict[int, int] = {}
        for b in sorted(all_, key=lambda b: (b.arrival_no, b.first_seq)):
            if c.ordering != "none":
                upto = line.get(b.arrival_no, -1)
                assert upto < b.first_seq, f"another bundle of its key has messages behind {b}"
                line[b.arrival_no] = max(numbers(b.seqs))


def check_limit(c: Consumer) -> None:
    """No key has more messages claimed, or free to be claimed, than its limit allows."""
    if c.per_key_limit is None:
        return
    counts: Counter[int] = Counter()
    for b in c.tables.bundles:
        if b.token is not None or (b.lane == DEALT and b.state == "ready"):
            counts.update(keys_of(c, b))
    over = {key: n for key, n in counts.items() if n > c.per_key_limit}
    assert not over, f"beyond the limit of {c.per_key_limit}: {over}"
