"""What the views say of a consumer, beside what the model knows of it: after each call."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import psycopg

from tests.sql.core import rows

if TYPE_CHECKING:
    from tests.sql.model import Consumer

STATES = "select * from pgqueue.message_states where stream = %s"
STATS = """
select consumer, claims, expired, claimed, dead, backlog, estimated
from pgqueue.consumer_stats where stream = %s
"""


def check_views(conn: psycopg.Connection, stream: str, consumers: list[Consumer], now: int) -> None:
    """Raise AssertionError unless the views say what the model does.

    Args:
        conn: of the database.
        stream: the name of the stream.
        consumers: all of it, without groups.
        now: the time of the model.
    """
    seen: dict[str, list[Any]] = defaultdict(list)
    for row in rows(conn, STATES, stream):
        seen[row.consumer].append(row)
    stats = {row.consumer: row for row in rows(conn, STATS, stream)}
    for c in consumers:
        check_states(c, seen[c.name], now)
        check_stats(c, stats[c.name], len(seen[c.name]))


def check_states(c: Consumer, seen: list[Any], now: int) -> None:
    """None is lost, held twice, or held by another claim than the one that got it."""
    twice = [seq for seq, n in Counter(row.seq for row in seen).items() if n > 1]
    assert not twice, f"{c.name} has twice: {twice}"
    held: dict[int, set[int]] = defaultdict(set)
    for row in seen:
        if row.state == "claimed":
            held[row.claim_id].add(row.seq)
    expected = {x.claim_id: x.held for x in c.claims.values() if x.live and x.held}
    assert held == expected, f"{c.name} has the claims {dict(held)}, and not {expected}"
    states = {row.seq: row for row in seen}
    for m in c.messages.values():
        row = states.get(m.seq)
        if m.state == "acked":
            assert row is None, f"{c.name} is done with {row}"
            continue
        assert row is not None, f"{c.name} has lost {m}"
        assert (row.state == "dead") == (m.state == "dead"), f"{row} is {m}"
        if m.state != "new":
            assert row.deliver_count == m.deliver_count, f"{row} is {m}"
        if m.state == "queued" and m.not_before is not None and m.not_before > now:
            assert row.state in ("delayed", "unfiltered"), f"{row} is {m}"


def check_stats(c: Consumer, stats: Any, seen: int) -> None:
    """The counts are those of the messages and claims that there are."""
    claims = [x for x in c.claims.values() if x.live and x.held]
    claimed = sum(len(x.held) for x in claims)
    dead = sum(m.state == "dead" for m in c.messages.values())
    found = stats.claims, stats.expired, stats.claimed, stats.dead
    expected = len(claims), sum(x.expired for x in claims), claimed, dead
    assert found == expected, f"{c.name}: {stats}, and not {expected}"
    backlog = seen - claimed - dead
    assert stats.estimated or stats.backlog == backlog, f"{c.name}: {stats}, and not {backlog}"
