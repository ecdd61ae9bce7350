"""The checker finds what no core may do, whatever its tables are: here there are none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.sql import checker, form
from tests.sql.checker import Consumer
from tests.sql.core import Claim, Held, Part

KEYS: dict[int, int | None] = {1: 7, 2: 7, 3: 8, 4: None}


def part(*seqs: int, state: str = "ready", claim: int | None = None, **more: Any) -> Part:
    known = {"arrival": 1, "at_most": None, "next": False, **more}
    return Part(frozenset(seqs), len(seqs), state, claim_id=claim, **known)


def claimed(*seqs: int, claim: int = 1, **more: Any) -> Part:
    return part(*seqs, state="claimed", claim=claim, **more)


def claim(claim_id: int = 1, holds: int = 1, live: bool = True, settled: int = 0) -> Claim:
    return Claim(claim_id, live, holds + settled, holds, settled, None, set(), [])


def consumer(*held: Part | Claim, most: int | None = None, ordering: str = "key") -> Consumer:
    """A consumer to whom the messages 1 to 4 were published, 1 and 2 of one key; 4 has no key."""
    parts = [each for each in held if isinstance(each, Part)]
    claims = [each for each in held if isinstance(each, Claim)]
    tables = form.Tables(None, 64)
    taken = sum(each.count for each in parts)
    has = Held(2, (), set(), taken, datetime.now(UTC), tables, parts, claims)
    return Consumer(1, 1, ordering, has, 0, None, True, most, published=set(KEYS), keys=KEYS)


def check(c: Consumer) -> None:
    """What the checker asks of any core; nothing was acknowledged."""
    checker.check_places(c, set())
    checker.check_claims(c)
    checker.check_keys(c)


ALLOWED: dict[str, Callable[[], Consumer]] = {
    "in order": lambda: consumer(part(1, 2, 3, 4, next=True)),
    "the rest of a key waits": lambda: consumer(
        claimed(1), claim(), part(2, state="waiting"), part(3, 4, next=True)
    ),
    "one claim of unlike messages": lambda: consumer(
        claimed(1, 3), claimed(2, 4, at_most=4), claim(holds=4)
    ),
    "within a limit": lambda: consumer(
        claimed(1), claim(), part(2, 3, 4, state="waiting"), most=1, ordering="none"
    ),
}

FAULTS: dict[str, Callable[[], Consumer]] = {
    "lost": lambda: consumer(part(1, 2, 3)),
    "in two places": lambda: consumer(part(1, 2), part(2, 3, 4)),
    "not published": lambda: consumer(part(1, 2, 3, 4), part(5)),
    "claimed by no claim": lambda: consumer(claimed(1, claim=2), part(2, 3, 4)),
    "claim that ended": lambda: consumer(claimed(1), claim(live=False), part(2, 3, 4)),
    "holds": lambda: consumer(claimed(1), claim(holds=2), part(2, 3, 4)),
    "an empty claim": lambda: consumer(claim(holds=0, settled=1), part(1, 2, 3, 4)),
    "more than 1": lambda: consumer(claimed(1, 2, at_most=1), claim(holds=2), part(3, 4)),
    "while 1 is in": lambda: consumer(part(1, state="delayed"), claimed(2), claim(), part(3, 4)),
    "2 of key 7": lambda: consumer(part(1, state="waiting"), part(2, next=True), part(3, 4)),
    "of key 7 in": lambda: consumer(
        claimed(1), claim(), claimed(2, claim=2), claim(2), part(3, 4)
    ),
    "are claimed, and 1 may be": lambda: consumer(
        claimed(1), claim(), claimed(2, claim=2), claim(2), part(3, 4), most=1, ordering="none"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_the_invariants_allow_passes(name: str) -> None:
    check(ALLOWED[name]())


@pytest.mark.parametrize("said", FAULTS)
def test_what_breaks_an_invariant_is_found(said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check(FAULTS[said]())
