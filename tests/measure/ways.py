"""How many functions a receive and an acknowledgement go through, by the kind of consumer."""

from __future__ import annotations

import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from tests.sql.queue import call, claim_of, value

CALLED = (
    "select schemaname || '.' || funcname, calls from pg_stat_xact_user_functions"
    " where schemaname in ('pgqueue', '_pgqueue', 'pgmq') and funcname !~ '^(limit|max)_'"
)
ROUNDS = 24

# Of a consumer: its ordering, settings, how many messages wait, and the size of a claim.
Kind = tuple[str, dict[str, Any], int, int]
KINDS: dict[str, Kind] = {
    "none, new": ("none", {}, 0, 1),
    "none": ("none", {}, 50, 1),
    "none, 10": ("none", {}, 1000, 10),
    "none, 1000": ("none", {}, 5000, 1000),
    "key, new": ("key", {}, 0, 1),
    "key": ("key", {}, 50, 1),
    "key, 10": ("key", {}, 1000, 10),
    "key, 1000": ("key", {}, 5000, 1000),
    "stream": ("stream", {}, 50, 1),
    "stream, 1000": ("stream", {}, 5000, 1000),
    "per_key_limit": ("none", {"per_key_limit": 2}, 50, 1),
    "per_key_interval": ("none", {"per_key_interval": "1 s"}, 50, 1),
    "key, per_key_limit": ("key", {"per_key_limit": 2}, 50, 1),
    "fair": ("none", {"fair": True}, 50, 1),
    "per_key_latest": ("none", {"per_key_latest": True}, 50, 1),
    "per_key_capacity": ("none", {"per_key_capacity": 1000}, 50, 1),
    "max_in_flight": ("none", {"max_in_flight": 10}, 50, 1),
    "rate_limit": ("none", {"rate_limit": 1000, "rate_interval": "1 s"}, 50, 1),
    "max_backlog": ("none", {"max_backlog": 100_000}, 50, 1),
    "keep_history": ("none", {"keep_history": "1 day"}, 50, 1),
}


def called(conn: psycopg.Connection, operation: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Do it in a transaction; what it returned, and how often each function was called.

    Args:
        conn: in no transaction, with `track_functions = 'all'`.
        operation: what is counted.
    """
    with conn.transaction():
        before = Counter(dict(conn.execute(CALLED).fetchall()))
        result = operation()
        after = Counter(dict(conn.execute(CALLED).fetchall()))
    return result, after - before


def fill(conn: psycopg.Connection, stream: str, count: int) -> None:
    """Send messages: one by one, or where there are many together."""
    keys = [f"key {n % 97}" for n in range(count)]
    if count > 100:
        call(conn, "send_batch", stream, ["x"] * count, p_keys=keys)
    for key in keys if count <= 100 else []:
        value(conn, "send", stream, "x", key, Jsonb({"a": 1}))


def claimed(conn: psycopg.Connection, stream: str, size: int) -> tuple[Counter[str], Counter[str]]:
    """What a receive and its acknowledgement call."""
    rows, receives = called(conn, lambda: call(conn, "receive", stream, "c", size))
    _, acks = called(conn, lambda: value(conn, "ack", claim_of(rows)))
    return receives, acks


def read(conn: psycopg.Connection, stream: str) -> tuple[Counter[str], Counter[str]]:
    """What a micro-batch of Spark calls to claim, and to be planned."""
    consumer, reader = value(conn, "create_consumer", stream, "r", "earliest"), uuid.uuid4()
    (end,), claims = called(conn, lambda: call(conn, "reader_claim", reader, consumer, 0, 0, 1000))
    _, plans = called(conn, lambda: (
        call(conn, "reader_resume", reader, consumer, 0, end.claim_id),
        call(conn, "reader_plan", reader, 0, end.claim_id),
    ))  # fmt: skip
    return claims, plans


def measure(conn: psycopg.Connection) -> Iterator[tuple[str, Counter[str], Counter[str]]]:
    """By kind, what a receive and an ack usually call."""
    conn.execute("set track_functions = 'all'")
    for number, (name, (ordering, settings, before, size)) in enumerate(KINDS.items()):
        stream = f"s{number}"
        value(conn, "create_stream", stream)
        value(conn, "create_consumer", stream, "c", "earliest", ordering,
              p_settings=Jsonb(settings))  # fmt: skip
        fill(conn, stream, before)
        seen: Counter[Any] = Counter()
        for _ in range(ROUNDS if size < 100 else 4):
            fill(conn, stream, 0 if before else 1)
            receives, acks = claimed(conn, stream, size)
            seen[tuple(sorted(receives.items())), tuple(sorted(acks.items()))] += 1
        ((receives, acks), _) = seen.most_common(1)[0]
        yield name, Counter(dict(receives)), Counter(dict(acks))
        if name == "none, 1000":
            yield "reader of Spark", *read(conn, stream)


def ways() -> Iterator[str]:
    """The figures, from a server that is started for them."""
    yield f"{'':<20}{'receive':>9}{'calls':>7}{'ack':>9}{'calls':>7}"
    union: set[str] = set()
    with (
        tempfile.TemporaryDirectory() as folder,
        embedded.start(Path(folder) / "data") as server,
        connection.connect(server.url) as conn,
    ):
        schema.install(conn)
        for name, receives, acks in measure(conn):
            union |= receives.keys() | acks.keys()
            yield (
                f"{name:<20}{len(receives):>9}{receives.total():>7}{len(acks):>9}{acks.total():>7}"
            )
    yield f"{len(union)} functions in all"
