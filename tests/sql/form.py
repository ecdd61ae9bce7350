"""What the tables of this core promise beside what every core does: runs, slots, pieces, the line.

It goes with them (see `core`). A breach of these rules loses nothing yet, and would later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sql.checker import Consumer


@dataclass
class Tables:
    """The rows of a consumer."""

    cursor: Any
    max_ranges: int
    runs: list[Any] = field(default_factory=list)
    claims: list[Any] = field(default_factory=list)
    slots: list[Any] = field(default_factory=list)
    pieces: list[Any] = field(default_factory=list)
    freed: list[Any] = field(default_factory=list)  # keys that the next dealer deals
    tokens: list[Any] = field(default_factory=list)  # spent ones, of keys
    scan_from: list[Any] = field(default_factory=list)

    @cached_property
    def by_number(self) -> dict[int, Any]:
        """The pieces."""
        return {piece.piece: piece for piece in self.pieces}

    @cached_property
    def spent(self) -> set[int]:
        """The keys with spent tokens."""
        return {token.key for token in self.tokens}

    @cached_property
    def from_(self) -> list[tuple[int, int, int]]:
        """By lane, where the line begins."""
        return [(place.lane, place.line_no, place.first_seq) for place in self.scan_from]

    def notes(self) -> list[str]:
        """All of it, for who looks for a fault."""
        found = sorted(self.runs, key=lambda r: (r.arrival_no, r.first_seq))[:50]
        return [f"{row}"[:400] for row in (*found, *self.claims[:20])] + [
            f"{self.cursor} scan_from={self.from_}"
        ]


def numbers(multirange: Any) -> set[int]:
    """The elements of an int8multirange."""
    return {n for r in multirange or () for n in range(r.lower, r.upper)}


def coming(slot: Any) -> list[set[int]]:
    """What a slot goes on with, part by part."""
    return [numbers(part) for part in reversed((slot.rest or [])[: slot.parts])]  # None: one range


def check(c: Consumer) -> None:
    """Raise AssertionError unless the rows of a consumer go together."""
    t = c.tables
    check_runs(c)
    check_line(c)
    check_slots(c)
    for freed in t.freed:
        check_freed(c, freed)
    for token in t.tokens:
        check_token(c, token)
    for place in c.places:
        assert 0 <= place.line_no <= t.cursor.last_line_no, f"beyond the line: {place}"
    if c.partitions is not None:
        assert all((run.state, run.lane) == ("ready", 1) for run in t.runs), f"{t.runs}"
    if c.ordering != "none":
        check_order(c)
    elif c.by_key:
        check_pieces(c)


def check_runs(c: Consumer) -> None:
    """A run is not empty, not too large, and begins where it says; a claim knows its order."""
    t = c.tables
    for run in t.runs:
        assert run.first_seq == min(numbers(run.seqs), default=None), f"first_seq of {run}"
        assert len(run.seqs) <= t.max_ranges, f"a run of {len(run.seqs)} ranges: {run}"
        assert (run.claim_id is not None) == (run.state == "claimed"), f"a claim of {run}"
    for claim in t.claims:
        assert claim.ordered == c.by_key or not claim.live
    cursor = t.cursor
    assert sorted(cursor.gaps) == sorted(cursor.gap_nos), "gaps that the cursor does not know"
    assert len(numbers(cursor.gap_ids)) == cursor.total, "an id in two gaps"


def check_line(c: Consumer) -> None:
    """1 no loss: what is ready or delayed will be found by a claim."""
    t = c.tables
    now: datetime = t.cursor.now
    for run in t.runs:
        assert run.line_no <= t.cursor.last_line_no, f"a place not given out yet: {run}"
        assert run.arrival_no <= t.cursor.last_line_no, f"an arrival not given out yet: {run}"
        if run.state == "unfiltered":
            assert t.cursor.filter_from is not None, f"nobody will filter {run}"
            assert t.cursor.filter_from <= run.line_no, f"before {t.cursor.filter_from}: {run}"
            assert t.cursor.take_was_cut, f"nobody will look for {run}"
        if run.state == "ready" and not any(run.seqs == slot.seqs for slot in t.slots):
            place = [f for f in t.from_ if f[0] == run.lane]
            beyond = t.cursor.scan_lanes_from is not None and run.lane >= t.cursor.scan_lanes_from
            assert place or beyond, f"a ready run in a lane that is not looked at: {run}"
            if place:
                assert (run.line_no, run.first_seq) >= place[0][1:], f"before {place[0]}: {run}"
        if run.state == "delayed":
            assert run.not_visible_until is not None, f"delayed for ever: {run}"
            assert run.not_visible_until >= t.cursor.due_from, f"before due_from: {run}"
        if not c.by_key:
            assert run.key is None, f"a key: {run}"
            assert run.state != "waiting", f"waiting for nothing: {run}"
            assert run.lane == -run.priority, f"the lane of {run}"
            if run.state == "ready" and run.not_visible_until is not None:
                assert run.not_visible_until <= now, f"ready too early: {run}"
    lanes = [f[0] for f in t.from_]
    assert lanes == sorted(set(lanes)), f"a lane twice, or out of order: {t.from_}"
    if t.cursor.scan_lanes_from is not None:
        assert all(lane < t.cursor.scan_lanes_from for lane in lanes), f"{t.from_}"


def check_slots(c: Consumer) -> None:
    """1 no loss: a free slot is found, at once or by the next claim that is in need."""
    t = c.tables
    free = [slot for slot in t.slots if slot.token is None]
    for slot in t.slots:
        assert t.cursor.slots_low is not None, f"nobody knows of {slot}"
        assert t.cursor.slots_low <= slot.slot, f"before {t.cursor.slots_low}: {slot}"
        claimed = (slot.claimed_at, slot.lease_until, slot.timeout)
        assert all((each is None) == (slot.token is None) for each in claimed), f"{slot}"
        assert slot.token is None or slot.token % 2 == 1, f"a token of no slot: {slot}"
    for slot in free:
        assert t.cursor.slots_from is not None, f"no claim will look for {slot}"
        assert t.cursor.slots_from <= slot.slot, f"before {t.cursor.slots_from}: {slot}"
    if c.by_key:
        check_slots_by_key(c)
    served = [slot for slot in free if slot.slot < t.cursor.slots_to] if free else []
    if c.by_key or not served or t.cursor.slots_until <= t.cursor.now:
        return
    first = min(served, key=lambda slot: slot.slot)
    places = [(-slot.priority, slot.arrival_no, min(numbers(slot.seqs)))
              for slot in sorted(served, key=lambda slot: slot.slot)]  # fmt: skip
    assert places == sorted(places), f"slots are out of order: {served}"
    for run in t.runs:
        if run.state == "ready":
            place = (run.lane, run.line_no, run.first_seq)
            assert place >= places[0], f"{run} comes before the slots, which begin with {first}"
        if run.state == "delayed":
            assert run.not_visible_until >= t.cursor.slots_until, f"nobody will notice {run}"


def check_slots_by_key(c: Consumer) -> None:
    """5 order: a slot has messages of its piece; what comes next of its key is in no other slot."""
    t = c.tables
    pieces: dict[int, list[Any]] = defaultdict(list)
    for slot in t.slots:
        parts = coming(slot)
        assert bool(parts) == (slot.rest is not None), f"parts: {slot}"
        assert {len(part) for part in parts[:-1]} <= {slot.size}, f"parts of another size: {slot}"
        assert all(max(a) < min(b) for a, b in pairwise(parts)), f"parts out of order: {slot}"
        if slot.whole:
            check_whole(c, slot)
            continue
        if slot.piece is not None:  # else from before it went by key
            if slot.token is None or c.ordering != "none" or c.per_key_limit is not None:
                assert slot.piece in t.by_number, f"not known: {slot}"
            pieces[slot.piece].append(slot)
    for piece, slots in pieces.items():
        if piece not in t.by_number or not t.by_number[piece].singly:
            (slot,) = slots
            holding = {s for run in t.runs if run.piece == piece for s in numbers(run.seqs)}
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
    t = c.tables
    assert t.slots == [slot], f"not the only slot: {t.slots}"
    assert c.ordering == "stream", f"of all keys: {slot}"
    assert [piece.whole for piece in t.by_number.values()] == [True], f"{t.pieces}"
    assert slot.piece in t.by_number, f"not known: {slot}"
    now, next_ = numbers(slot.seqs), set().union(*coming(slot))
    assert not next_ or max(now) < min(next_), f"out of order: {slot}"
    (place,) = [f for f in t.from_ if f[0] == 1]
    assert place[1:] <= (slot.arrival_no, min(now)), f"before {place}: {slot}"
    for run in t.runs:
        if not numbers(run.seqs) <= now | next_:
            assert (run.state, run.lane) == ("ready", 1), f"beside {slot}: {run}"
            last = (slot.arrival_no, max(now | next_))
            assert (run.line_no, run.first_seq) > last, f"comes before {slot}: {run}"


def check_token(c: Consumer, token: Any) -> None:
    """Spent tokens say how many messages of a key were delivered lately, and will come back."""
    t = c.tables
    assert c.by_key, f"a token without delivery by key: {token}"
    assert token.spent > 0, f"{token}"
    assert t.cursor.tokens_from is not None, f"it will not come back: {token}"
    assert token.returns_at >= t.cursor.tokens_from, f"before tokens_from: {token}"


def check_freed(c: Consumer, freed: Any) -> None:
    """The next dealer will find the keys that are noted as free."""
    t = c.tables
    assert c.by_key, f"free keys without delivery by key: {freed}"
    assert freed.keys, f"{freed}"
    assert t.cursor.freed_from is not None, f"no dealer will look: {freed}"
    assert t.cursor.freed_from <= freed.place <= t.cursor.last_line_no, f"{freed}"


def check_pieces(c: Consumer) -> None:
    """Without order, by key: what waits will be freed, and no key has more than it may have."""
    t = c.tables
    kept = {key for p in (*t.by_number.values(), *t.freed) for key in p.keys}
    in_flight: Counter[int | None] = Counter()
    for run in t.runs:
        keys = [c.keys.get(s) for s in numbers(run.seqs)]
        if run.state == "waiting":
            assert set(keys) == {run.key}, f"keys {keys} in {run}"
            assert run.key in kept | t.spent, f"key {run.key} is stuck: {run}"
            assert t.cursor.waits, f"no dealer would free the key of {run}"
            continue
        assert run.key is None, f"a key: {run}"
        if run.piece is not None:
            assert run.lane == 0, f"the lane of {run}"
            in_flight.update(keys)
            if run.state == "ready" or c.per_key_limit is not None:
                assert run.piece in t.by_number, f"not known: {run}"
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


def check_order(c: Consumer) -> None:
    """5 order: of each key come first those in a piece, then those that wait, then the line."""
    t = c.tables
    in_pieces: dict[int, set[int]] = defaultdict(set)  # by key, the pieces
    messages: dict[int, list[list[tuple[int, int]]]] = defaultdict(lambda: [[], [], [], []])
    whole = [p.piece for p in t.by_number.values() if p.whole]
    for run in t.runs:
        place = check_ordered_run(c, run)
        for s in numbers(run.seqs):
            key = 0 if c.ordering == "stream" else c.keys.get(s)
            if key is not None:
                messages[key][place].append((run.arrival_no, s))
                if place == 0:
                    in_pieces[key].add(run.piece)
    open_pieces = {run.piece for run in t.runs if run.piece is not None}
    assert open_pieces <= t.by_number.keys(), f"not known: {open_pieces - t.by_number.keys()}"
    assert all(p.place >= t.cursor.pieces_from for p in t.by_number.values()), (
        f"before {t.cursor.pieces_from}"
    )
    if set(whole) & open_pieces:
        assert len(open_pieces) == 1, f"{open_pieces} are open beside all keys, {whole}"

    delayed: dict[int, list[int]] = defaultdict(list)  # by key, where it waits for its own time
    upto: Counter[tuple[int, int]] = Counter()  # by key and arrival, the last message
    for run in sorted(t.runs, key=lambda run: run.first_seq):
        if run.state == "delayed" and run.key is not None:
            delayed[run.key].append(run.first_seq)
        if run.key is not None:  # a dealer takes such a run whole
            line = run.key, run.arrival_no
            assert upto[line] < run.first_seq, f"another run of its key has messages behind {run}"
            upto[line] = max(numbers(run.seqs))
    freed = {key for f in t.freed for key in f.keys}
    kept = Counter(key for p in t.by_number.values() for key in p.keys)
    assert all(n == 1 for n in kept.values()), f"keys in several pieces: {kept}"
    for p in t.by_number.values():
        gone = {key for key in p.keys if p.piece not in in_pieces.get(key, ())}
        held = sum(run.message_count for run in t.runs if run.piece == p.piece)
        assert not gone or held < p.message_count, f"no dealer will see that {gone} left {p}"
    if not whole:
        check_limit(c, Counter({key: len(places[0]) for key, places in messages.items()}))
    for key, pieces in in_pieces.items():
        assert len(pieces) == 1, f"key {key} is in the pieces {pieces}"
        (piece,) = pieces
        assert piece in whole or key in t.by_number[piece].keys, f"{piece} does not name key {key}"
    for key, (in_piece, waiting, line, unfiltered) in messages.items():
        if key in delayed:
            assert key not in kept, f"key {key} is delayed and in a piece"
            assert delayed[key] == [min(run.first_seq for run in t.runs if run.key == key
                                        and run.arrival_no == min(waiting)[0])]  # fmt: skip
        else:
            assert not waiting or key in kept or key in freed | t.spent, f"key {key} is stuck"
        for before, after in combinations((in_piece, waiting, line, unfiltered), 2):
            if before and after:
                assert max(before) < min(after), f"key {key}: {max(before)} before {min(after)}"


def check_ordered_run(c: Consumer, run: Any) -> int:
    """Look at a run of an ordered consumer.

    Returns: 0 it is a piece, 1 it waits, 2 it is in the line, 3 it is not filtered.
    """
    t = c.tables
    if run.state == "unfiltered":
        assert (run.lane, run.line_no, run.piece) == (1, run.arrival_no, None), f"{run}"
        return 3
    keys = {c.keys.get(s) for s in numbers(run.seqs)}
    if run.state == "waiting" or (run.state == "delayed" and run.key is not None):
        assert run.piece is None, f"it waits in a piece: {run}"
        assert keys == {run.key}, f"keys {keys} in {run}"
        for kept in (p for p in (*t.by_number.values(), *t.freed) if run.key in p.keys):
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
