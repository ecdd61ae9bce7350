"""Compares what came with what was sent, by SQL alone: see ledger.sql."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg.rows import class_row

LARGEST = 50_000  # messages of a step of reading


@dataclass(frozen=True)
class Verdict:
    """What came to one way to consume in a round.

    Attributes:
        who: its name.
        delivered: messages that came, each time counted.
        lost: messages that were sent and did not come.
        twice: deliveries of messages that had come before.
        unsent: messages that came and were not sent, or rolled back.
        disordered: messages that came after a later one of their key, where that is promised.
    """

    who: str
    delivered: int
    lost: int
    twice: int
    unsent: int
    disordered: int

    @property
    def ok(self) -> bool:
        return not (self.lost or self.twice or self.unsent or self.disordered)


@dataclass(frozen=True)
class Judgement:
    """Of a round.

    Attributes:
        sent: messages that were sent.
        verdicts: one for each way to consume.
        replayed: micro-batches of the query without a consumer that were tried again.
        changed: those of them that had other messages then.
    """

    sent: int
    verdicts: list[Verdict]
    replayed: int
    changed: int

    @property
    def ok(self) -> bool:
        return not self.changed and all(verdict.ok for verdict in self.verdicts)


def read_outputs(conn: psycopg.Connection) -> None:
    """Note what Spark has written to streams since the last time, in its order there."""
    for (stream,) in conn.execute("select stream from endure.read").fetchall():
        read = LARGEST
        while read == LARGEST:
            read = conn.execute(
                "with news as materialized ("
                " select * from pgqueue.read(%(stream)s,"
                " (select upto from endure.read where stream = %(stream)s), %(most)s)),"
                " noted as (update endure.read set upto = (select next_offset from news limit 1)"
                " where stream = %(stream)s)"
                " insert into endure.delivered (who, n, key) select %(stream)s, data::bigint, key"
                " from news where seq is not null order by seq",
                {"stream": stream, "most": LARGEST},
            ).rowcount


def judge(conn: psycopg.Connection) -> Judgement:
    """Judge what is noted of the round."""
    with conn.cursor(row_factory=class_row(Verdict)) as cursor:
        verdicts = cursor.execute("select * from endure.verdicts()").fetchall()
    replayed, changed = _row(conn, "select * from endure.replays()")
    (sent,) = _row(conn, "select count(*) from endure.sent")
    return Judgement(sent, verdicts, replayed, changed)


def begin_next_round(conn: psycopg.Connection) -> None:
    """Forget the round. Micro-batches stay: Spark may repeat the last one after any crash."""
    with conn.transaction():
        conn.execute(
            "update endure.state s set round = round + 1, judged_batch = coalesce((select"
            " max(batch) from endure.batches b where b.checkpoint = s.checkpoint), -1)"
        )
        conn.execute(
            "delete from endure.batches b using endure.state s where b.checkpoint < s.checkpoint"
            " or b.batch < s.judged_batch"
        )
        conn.execute("truncate endure.sent, endure.delivered")


def left(conn: psycopg.Connection) -> int:
    """How many messages are left to do, of all ways to consume together.

    The ledger, which costs more to look at, is looked at last: when no consumer has anything left.
    """
    (of_consumers,) = _row(
        conn,
        "select (select coalesce(sum(backlog + claimed), 0)::bigint from pgqueue.consumer_stats s"
        " where s.stream = 'in' and s.consumer <> 'g')"
        " + (select coalesce(sum(behind), 0)::bigint from pgqueue.group_stats)",
    )
    (of_cursor,) = (0,) if of_consumers else _row(
        conn,
        "select greatest((select count(*) from endure.sent)"
        " - (select coalesce(sum(cardinality(n)), 0) from endure.first_tries), 0)::bigint",
    )  # fmt: skip
    return of_consumers + of_cursor


def _row(conn: psycopg.Connection, query: str) -> tuple:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row
