"""A database in use, with every state in it that there is, and what it owes to whom.

For what must not change that, such as an upgrade, or a dump that is restored elsewhere.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, internals
from tests.sql.queue import ORDERINGS, Conn, acked, call, claim_of, one, seqs_of, value

STREAMS = {"s": "text", "j": "json", "b": "binary"}

SINK, BATCH = "sink", 5  # of the staged chunk


@dataclass
class Known:
    """What the owners of a database in use know.

    Attributes:
        stream: the id of s.
        consumers: the ids of its consumers, by name.
        claims: by consumer, those that are open, with their messages.
        done: by consumer, what was acknowledged.
        reader: a reader of the consumer of that name, and the end offset of its open batch.
        staged: the block that is staged, and the numbers in it.
    """

    stream: int
    consumers: dict[str, int]
    claims: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    done: dict[str, list[int]] = field(default_factory=dict)
    reader: tuple[uuid.UUID, Any] = (uuid.UUID(int=0), None)
    staged: tuple[int, list[int]] = (0, [])


def make_streams(conn: Conn) -> int:
    """The streams of a database in use; returns the id of s."""
    ids = {name: value(conn, "create_stream", name, kind) for name, kind in STREAMS.items()}
    return ids["s"]


def owed(conn: Conn) -> dict[str, dict[int, str]]:
    """By consumer of s, the messages that it is not done with, and their states."""
    found = internals.rows(
        conn, "select consumer, seq, state from pgqueue.message_states where stream = 's'"
    )
    return {
        name: {row.seq: row.state for row in found if row.consumer == name}
        for name in {row.consumer for row in found}
    }


def use(
    conn: Conn, url: str, write: Callable[[Conn, int, int], list[int]], made: int | None = None
) -> Known:
    """Leave every state behind that there is.

    Args:
        conn: of a database with the schema, and without streams.
        url: the same database.
        write: writes messages of a stream that nobody sees, as `internals.insert_messages` does.
        made: what `make_streams` returned; None: it makes the streams.
    """
    stream = made or make_streams(conn)
    orderings = {**dict.fromkeys(("reader", "untouched"), "none"), **{o: o for o in ORDERINGS}}
    known = Known(
        stream,
        {
            name: value(conn, "create_consumer", "s", name, "earliest", ordering)
            for name, ordering in orderings.items()
        },
    )
    due = one(conn, "select clock_timestamp() + interval '1 hour'")
    with connection.connect(url, autocommit=False) as rolled_back:
        for round_ in range(6):
            conn.execute("select pgqueue.send_batch('s', '{a,b,c,d,e,f}', '{k,k,l,l,m,null}')")
            value(rolled_back, "send", "s", "never")
            if round_ % 2:
                rolled_back.rollback()
            value(conn, "send", "s", "u", p_priority=3 * (round_ % 2), p_headers='{"h": "1"}')
            value(conn, "send", "s", "later", p_key=f"later {round_}", p_deliver_at=due)
            for name in ORDERINGS:
                _work(conn, name, round_, known)
        rolled_back.rollback()
    reader = uuid.uuid4()
    (end,) = call(conn, "reader_claim", reader, known.consumers["reader"], 0, 0, 4)
    known.reader = reader, end
    with conn.transaction():
        seqs = write(conn, stream, 3)
        block = f"{{[{seqs[0]},{seqs[-1] + 1})}}"
        known.staged = value(conn, "stage", SINK, BATCH, stream, block), seqs
    value(conn, "publish_staged", "other", 0, stream, [], 0)
    return known


def use_with_history(conn: Conn, url: str) -> Known:
    """As `use`; and consumers that keep history, replay, and gave up a message with details."""
    known = use(conn, url, internals.insert_messages)
    for name in ("keeper", "moved"):
        value(
            conn, "create_consumer", "s", name, "earliest", p_settings='{"keep_history": "1 day"}'
        )
    value(conn, "send", "s", "for one", p_consumers=["moved"])
    claim = claim_of(call(conn, "receive", "s", "moved", 5))
    value(conn, "dead_letter", claim, [2])
    value(conn, "ack", claim, [3])
    value(conn, "replay", "s", "moved", "earliest", "latest")  # but for what it has, or gave up
    for size in (1, 2, 30):
        claim = claim_of(call(conn, "receive", "s", "keeper", size))
        value(conn, "dead_letter", claim, [3], "bad", Jsonb({"field": "total"}))
        value(conn, "ack", claim, p_result=Jsonb({"of": size}))
    value(conn, "replay", "s", "keeper", "seq 20", "latest")
    value(conn, "ack", claim_of(call(conn, "receive", "s", "keeper", 3)))
    return known


def _work(conn: Conn, name: str, round_: int, known: Known) -> None:
    """What a worker does in a round: it acknowledges, fails, dead-letters, or just holds."""
    if round_ == 1:
        found = call(conn, "receive", "s", name, 2)
        value(conn, "ack", claim_of(found))
        known.done[name] = seqs_of(found)
    if round_ in (2, 3, 4) and (found := call(conn, "receive", "s", name, 5)):
        claim, seqs = claim_of(found), seqs_of(found)
        if round_ == 2:
            value(conn, "nack", claim, [seqs[-1]], timedelta(hours=1), "failed")
            value(conn, "dead_letter", claim, [seqs[0]])
            held = internals.rows(
                conn,
                "select seq from pgqueue.message_states where claim_id = %s and state = 'claimed'",
                claim,
            )
            seqs = [row.seq for row in held]
        known.claims.setdefault(name, {})[claim] = seqs


def assert_delivers(
    conn: Conn, known: Known, before: dict[str, dict[int, str]], sent: Iterable[int] = ()
) -> None:
    """Everything that was owed is delivered once, by those who hold it, and by all others.

    Args:
        conn: of the database.
        known: what the owners know.
        before: what was `owed`.
        sent: what was sent since, to all.
    """
    got: dict[str, list[int]] = {name: list(known.done.get(name, [])) for name in before}
    for name, claims in known.claims.items():
        for claim, seqs in claims.items():
            assert value(conn, "ack", claim) == len(seqs)
            got[name] += seqs
    got["reader"] += _read(conn, known)
    block, seqs = known.staged
    assert value(conn, "publish_staged", SINK, BATCH, known.stream, [block], len(seqs))
    assert value(conn, "publish_staged", "other", 0, known.stream, [], 0) is False
    new = {*sent, *seqs, value(conn, "send", "s", "after")}
    unused = value(conn, "create_consumer", "b", "c", "earliest")
    first = value(conn, "send", "b", None, p_data_bytes=b"of a stream that was never used")
    assert acked(conn, "b", "c") == [first]
    clock.pass_time(conn, timedelta(hours=2))
    for name, delivered in got.items():
        delivered += acked(conn, "s", name)
        alive = {seq for seq, state in before[name].items() if state != "dead"}
        assert sorted(delivered) == sorted(alive | set(known.done.get(name, [])) | new), name
    done = {known.consumers[name]: set(seqs) for name, seqs in got.items()}
    done[unused] = {first}
    checker.check(conn, done, [c for c in checker.read(conn) if c.consumer_id in done])


def _read(conn: Conn, known: Known) -> list[int]:
    """The reader's open batch, as a restarted query replays it, and all that comes next."""
    reader, end = known.reader
    consumer = known.consumers["reader"]
    plan = call(conn, "reader_plan", reader, 0, end.claim_id)
    (next_,) = call(conn, "reader_claim", reader, consumer, end.claim_id, end.messages)
    assert (next_.messages - end.messages, next_.lost) == (next_.claimed, 0)
    plan += call(conn, "reader_plan", reader, end.claim_id, next_.claim_id)
    call(conn, "reader_claim", reader, consumer, next_.claim_id, next_.messages)
    seqs = [seq for r in plan for seq in range(r.lo, r.hi)]
    assert len(seqs) == end.messages + next_.claimed
    return seqs
