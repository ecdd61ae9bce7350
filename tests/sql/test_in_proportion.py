"""Calls about many scattered messages, of many keys or of one, take CPU in proportion to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spark_pgqueue.archive.exporter import export
from tests.benchmarks.server_cpu import nanoseconds
from tests.sql import clock, internals
from tests.sql.queue import *

FEW, MANY = 1_000, 6_000
GROWTH = 10
"""Six times as many cost six times as much; a cost that grows with their square, 36 times."""

ODD = "array(select i from generate_series(1, {n}, 2) i)"
LATER = "clock_timestamp() + interval '1 hour'"
CLAIMED = {
    "ack": f"pgqueue.ack({{claim}}, {ODD})",
    "nack": f"pgqueue.nack({{claim}}, {ODD})",
    "nack all": "pgqueue.nack({claim})",
    "defer": f"pgqueue.defer({{claim}}, {ODD}, '1 hour')",
    "dead_letter": f"pgqueue.dead_letter({{claim}}, {ODD})",
    "extend": "pgqueue.extend({claim})",
}
"""Calls of the owner of a claim of all messages."""

AFTERWARDS = {
    "redrive": ("dead_letter", "pgqueue.redrive('s', 'c', p_max => {n})"),
    "purge_dead": ("dead_letter", "pgqueue.purge_dead('s', 'c')"),
    "retry": ("defer", "pgqueue.retry('s', 'c')"),
    "replay": ("ack", "pgqueue.replay('s', 'c', 'earliest', 'latest')"),
    "seek": ("ack", "pgqueue.seek('s', 'c', 'earliest')"),
    "receive what failed": ("nack", "count(*) from pgqueue.receive('s', 'c', {n})"),
}
"""What follows such a call."""

UNCLAIMED = {
    "cancel": f"pgqueue.cancel('s', 'c', {ODD})",
    "postpone": f"pgqueue.postpone('s', 'c', {ODD}, {LATER})",
    "receive": "count(*) from pgqueue.receive('s', 'c', {n})",
    "receive by 10": "count(*) from generate_series(1, {n} / 10) i"
    " cross join lateral (select from pgqueue.receive('s', 'c', least(i + 9, 10))) r",
}
"""Calls about messages that nobody has claimed."""


def cpu(conn: Conn, call: Callable[[], object]) -> int:
    """Nanoseconds of the session."""
    pid = conn.info.backend_pid
    if not Path(f"/proc/{pid}/schedstat").exists():
        pytest.skip("the server is on another machine")
    before = nanoseconds(pid)
    call()
    return nanoseconds(pid) - before


def check(what: str, costs: dict[int, int]) -> None:
    (_, few), (n, many) = sorted((n, cost / 1e6) for n, cost in costs.items())[-2:]
    assert many < GROWTH * few + 10, f"{what}: {n // 6:,} take {few:.0f} ms, {n:,} take {many:.0f}"


@pytest.mark.parametrize(
    ("ordering", "keys", "latest", "singly"),
    [
        ("none", 0, False, False),
        ("none", 0, False, True),
        ("key", MANY, True, False),
        ("key", MANY, False, False),
        pytest.param("key", 10, False, False, marks=pytest.mark.longer),
        pytest.param("key", 10, False, True, marks=pytest.mark.longer),
        pytest.param("key", MANY, True, True, marks=pytest.mark.longer),
    ],
)
def test_scattered_messages_cost_in_proportion(
    conn: Conn, ordering: str, keys: int, latest: bool, singly: bool
) -> None:
    """Every second one, as a batch fails, or as a query over payloads finds them; published by one
    call, or by a call for each.
    """
    costs: dict[str, dict[int, int]] = {}

    def run(name: str, sql: str, n: int, claim: int | None = None) -> None:
        statement = f"select {sql.format(n=n, claim=claim)}".encode()
        costs.setdefault(name, {})[n] = cpu(conn, lambda: conn.execute(statement))

    def begin(n: int, claims: bool = True) -> int | None:
        conn.execute("select pgqueue.drop_stream(stream) from pgqueue.stream_stats")
        stream = value(conn, "create_stream", "s")
        consumer(conn, ordering=ordering, max_deliver_count=9, per_key_latest=latest)
        if singly:
            internals.publish_singly(conn, stream, n, f"'k' || i % {keys}" if keys else "null")
        else:
            sent = [f"k{i % keys}" for i in range(n)] if keys else None
            call(conn, "send_batch", "s", ["x"] * n, sent)
        return claim_of(receive(conn, n)) if claims else None

    conn.execute("select pgqueue.drop_stream(stream) from pgqueue.stream_stats")
    internals.vacuum(conn)  # of an empty table, all indexes look equally good to the planner
    for n in (2, FEW, MANY):  # what the first one plans, the session keeps
        for name, sql in CLAIMED.items():
            run(name, sql, n, begin(n))
        for name, (before, sql) in AFTERWARDS.items():
            run(before, CLAIMED[before], n, begin(n))
            run(name, sql, n)
        for name, sql in UNCLAIMED.items():
            begin(n, claims=False)
            run(name, sql, n)
        begin(n)
        clock.end_leases(conn)
        run("receive what expired", UNCLAIMED["receive"], n)
    for name, each in costs.items():
        check(name, each)


EACH = (
    "select {} from generate_series(1, {}) i"
    " cross join lateral pgqueue.receive('s', 'c', least(i, 1)) r"
)
"""A call for each message. (It depends on i: otherwise Postgres would call it once.)"""

SINGLY = {
    "cancel claimed": ("r.claim_id", UNCLAIMED["cancel"]),
    "cancel delayed": ("pgqueue.defer(r.claim_id, null, '1 hour')", UNCLAIMED["cancel"]),
    "postpone delayed": ("pgqueue.defer(r.claim_id, null, '1 hour')", UNCLAIMED["postpone"]),
    "retry delayed": (
        "pgqueue.defer(r.claim_id, null, '1 hour')",
        f"pgqueue.retry('s', 'c', {ODD})",
    ),
    "redrive": ("pgqueue.dead_letter(r.claim_id)", f"pgqueue.redrive('s', 'c', {ODD})"),
}
"""What each message went through by a call of its own, and the call about every second one."""


@pytest.mark.parametrize("ordering", ["none", pytest.param("key", marks=pytest.mark.longer)])
def test_messages_settled_singly_cost_in_proportion(conn: Conn, ordering: str) -> None:
    for name, (each, then) in SINGLY.items():
        costs = {}
        for n in (FEW, MANY):
            conn.execute("select pgqueue.drop_stream(stream) from pgqueue.stream_stats")
            stream = value(conn, "create_stream", "s")
            consumer(conn, ordering=ordering)
            internals.publish_singly(conn, stream, n, f"'k' || i % {MANY}")
            conn.execute(EACH.format(each, n).encode())
            statement = f"select {then.format(n=n)}".encode()
            costs[n] = cpu(conn, partial(conn.execute, statement))
        check(name, costs)


def test_what_moves_to_the_archive_costs_in_proportion(
    conn: Conn, stream: int, url: str, tmp_path: Path
) -> None:
    costs = {}
    tmp_path.chmod(0o755)
    value(conn, "set_archive", "s", str(tmp_path))
    value(conn, "set_retention", "s", p_messages=1)
    for n in (FEW, MANY):
        internals.publish_singly(conn, stream, n, "null")
        maintain(conn)
        send(conn)
        export(url)
        costs[n] = cpu(conn, lambda: maintain(conn))
    assert internals.count(conn, "archive_packs") == 1
    check("trim", costs)
