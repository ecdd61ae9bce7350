"""A call that has read a consumer, and then waits for its lock, follows the settings of after that.

They say where messages are stored: a message that is stored elsewhere is never found.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest

from tests.sql import checker
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")

DONE, DEAD, FAILED, LEFT = [1, 2], [3, 4], [5, 6], [7, 8, 9, 10]
POSTPONED = "select pgqueue.postpone('s', 'c', '{7,8}', clock_timestamp() + interval '0.2 s')"

CALLS: dict[str, tuple[Callable[[Conn], Any], list[int]]] = {
    "redrive": (lambda conn: value(conn, "redrive", "s", "c"), DEAD + FAILED + LEFT),
    "retry": (lambda conn: value(conn, "retry", "s", "c"), FAILED + LEFT),
    "cancel": (lambda conn: value(conn, "cancel", "s", "c", [7, 8]), [*FAILED, 9, 10]),
    "postpone": (lambda conn: conn.execute(POSTPONED), FAILED + LEFT),
    "seek": (lambda conn: value(conn, "seek", "s", "c", "earliest"), DONE + FAILED + LEFT),
    "replay": (lambda conn: value(conn, "replay", "s", "c", "earliest"), DONE + FAILED + LEFT),
    "receive": (lambda conn: receive(conn, 2), FAILED + LEFT),
    "where": (lambda conn: call(conn, "receive_where", "s", "c", "$.data"), FAILED + LEFT),
}
"""By name: a call, and what the consumer gets from then on."""


# A condition is refused by a consumer that delivers by key, before any wait.
@for_each("name, fair", [case for case in product(CALLS, [True, None]) if case != ("where", None)])
def test_a_call_that_waits_for_a_change_of_settings_follows_them(
    conn: Conn, session: Session, name: str, fair: bool | None
) -> None:
    consumer(conn, fair=None if fair else True)
    assert send_keys(conn, *"ababababab") == DONE + DEAD + FAILED + LEFT
    claims = dict(iter(lambda: claimed(conn), (0, 0)))
    for settle, seqs in (("ack", DONE), ("dead_letter", DEAD), ("nack", FAILED), ("defer", LEFT)):
        for seq in seqs:
            value(conn, settle, claims[seq])
    other, (act, expected) = session(), CALLS[name]
    with ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            value(conn, "pause", "s", "c")
            alter(conn, fair=fair)
            value(conn, "resume", "s", "c")
            acting = pool.submit(act, other)
            wait_for_a_lock(session())
        answer = None
        with raises("PQ006") if name == "where" else nullcontext():
            answer = acting.result()
    seen = set()
    if name == "receive" and answer:
        seen |= set(seqs_of(answer))
        value(conn, "ack", claim_of(answer))
    end = time.monotonic() + 5
    while set(states(conn).values()) - {"dead"}:
        assert time.monotonic() < end, (seen, states(conn))
        seen |= set(acked(conn, "s", "c"))
    assert seen == set(expected)
    checker.check(conn)


def claimed(conn: Conn) -> tuple[int, int]:
    """A message and its claim; zeros when there is no other."""
    found = receive(conn, 1)
    return (found[0].seq, found[0].claim_id) if found else (0, 0)


# All such calls

LOCKS = re.compile(r"\b(?:try_)?lock_consumer(?:_alone|_soon)?\(")
ROW = re.compile(r"\b(?!from\b)\w+ +pgqueue\.consumers\b")
READS = re.compile(r"consumer_now\(|consumer_of\(|from pgqueue\.consumers\b")

OTHERS = {
    "change_latest": "set_consumer() has the row's lock, and passes the row",
    "change_lanes": "set_consumer() has the row's lock, and passes the row",
    "change_limits": "set_consumer() has the row's lock, and passes the row",
    "skip": "skip_locked() reads it",
    "skip_missing": "skip_locked() reads it",
    "lease_partitions": "no setting of a group says where messages are",
    "leave_group": "no setting of a group says where messages are",
    "note_offset": "no setting of a group says where messages are",
    "take_for_group": "no setting of a group says where messages are",
}
"""Functions that go on with the row that they have, and why."""


def test_each_call_reads_the_consumer_after_it_has_the_lock(conn: Conn) -> None:
    stale = set()
    for name, source, definition in conn.execute(
        "select proname, prosrc, pg_get_functiondef(oid) from pg_proc where prokind = 'f'"
        " and pronamespace::regnamespace::text in ('pgqueue', '_pgqueue', 'pgmq')"
    ):
        does = re.sub("--.*", "", source)
        lock = LOCKS.search(does)
        if lock and ROW.search(definition) and not READS.search(does, lock.end()):
            stale.add(name)
    assert stale == OTHERS.keys()
