"""Claiming and receiving, and acknowledging, against a row for each message and consumer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, Protocol

import psycopg

from tests.benchmarks.harness import Bench, Target, alternate, low, run
from tests.benchmarks.publish import BATCH, create_stream, drop_streams
from tests.sql import internals

CONSUMERS = 3
WORKERS = 4

# The design as it is usually published. Its claims also serve what expired, as ours do. (With an
# index on a state in place of visible_at they are a quarter faster, and do not.)
#
# Everything is vacuumed before each size of claims, and not meanwhile: that takes seconds, and
# autovacuum looks once a minute. What the rows gain by a vacuum before each block is shown too.
ROWS = """
create table {table} (
    consumer_id   int         not null,
    message_id    bigint      not null,
    visible_at    timestamptz not null default now(),
    deliver_count int         not null default 0,
    claimed_by    int,
    primary key (consumer_id, message_id)
);
create index on {table} (consumer_id, visible_at, message_id);
create table {table}_messages (
    message_id bigint generated always as identity primary key,
    data       text   not null
);
"""

FILL_ROWS = """
with sent as (
    insert into {table}_messages (data) select 'x' from generate_series(1, %s) returning message_id
)
insert into {table} (consumer_id, message_id)
select c, message_id from sent cross join generate_series(1, {consumers}) c
"""

NEXT_ROWS = """
with {ack}next as materialized (
    select message_id from {table}
    where consumer_id = 1 and visible_at <= now()
    order by visible_at, message_id limit {size} for update skip locked
)"""

UPDATE_ROWS = """
update {table} m
set visible_at = now() + interval '30 s', deliver_count = deliver_count + 1,
    claimed_by = pg_backend_pid()
from next
where m.consumer_id = 1 and m.message_id = next.message_id and m.visible_at <= now()
returning m.message_id
"""

CLAIM_ROWS = NEXT_ROWS + UPDATE_ROWS

RECEIVE_ROWS = f"""{NEXT_ROWS}, claimed as ({UPDATE_ROWS})
select message_id, data from claimed join {{table}}_messages using (message_id) order by message_id
"""

ACK_ROWS = "delete from {table} where consumer_id = 1 and message_id = any(%s)"
ACK_ROWS_FIRST = f"done as ({ACK_ROWS}), "

SEND_TOGETHER = """
select count(*) from pgqueue.send_batch(%s, array_fill('x'::text, array[%s]),
    (select array_agg('key ' || g %% 5000) from generate_series(1, %s) g))
"""


class Side(Protocol):
    """Something that has a backlog for consumer 1, and can claim and acknowledge from it."""

    def create(self, conn: psycopg.Connection) -> None: ...

    def fill(self, conn: psycopg.Connection, count: int) -> None:
        """Publish so many messages, to all consumers."""
        ...

    @property
    def reads(self) -> bool:
        """Whether a claim brings the payloads."""
        ...

    def claim(self, conn: psycopg.Connection, size: int, done: Any = None) -> tuple[int, Any]:
        """Claim so many messages, and acknowledge in the same statement those that are done.

        Returns:
            how many there were, and what to give as `done`.
        """
        ...

    def ack(self, conn: psycopg.Connection, done: Any) -> None: ...

    def tables(self) -> list[str]:
        """What to vacuum."""
        ...


@dataclass(frozen=True)
class Rows:
    """A row for each message and consumer."""

    table: str
    reads: bool = False
    ordering: str = "none"

    def create(self, conn: psycopg.Connection) -> None:
        run(conn, ROWS.format(table=self.table))

    def fill(self, conn: psycopg.Connection, count: int) -> None:
        run(conn, FILL_ROWS.format(table=self.table, consumers=CONSUMERS), (count,))

    def claim(self, conn: psycopg.Connection, size: int, done: Any = None) -> tuple[int, Any]:
        ack = "" if done is None else ACK_ROWS_FIRST.format(table=self.table)
        sql = RECEIVE_ROWS if self.reads else CLAIM_ROWS
        sql = sql.format(table=self.table, size=size, ack=ack)
        ids = [row[0] for row in run(conn, sql, None if done is None else (done,))]
        return len(ids), ids

    def ack(self, conn: psycopg.Connection, done: Any) -> None:
        run(conn, ACK_ROWS.format(table=self.table), (done,))

    def tables(self) -> list[str]:
        return [self.table, f"{self.table}_messages"]


@dataclass(frozen=True)
class Queue:
    """A consumer of a stream."""

    stream: str
    singly: bool = False
    ordering: str = "none"
    reads: bool = False

    def create(self, conn: psycopg.Connection) -> None:
        create_stream(conn, self.stream, CONSUMERS, ordering=self.ordering)

    def fill(self, conn: psycopg.Connection, count: int) -> None:
        if self.singly:
            sql = "select stream_id from pgqueue.streams where name = %s"
            ((stream_id,),) = run(conn, sql, (self.stream,))
            internals.publish_singly(conn, stream_id, count, "'key ' || i % 5000")
            return
        for _ in range(count // BATCH):
            run(conn, SEND_TOGETHER, (self.stream, BATCH, BATCH))

    def claim(self, conn: psycopg.Connection, size: int, done: Any = None) -> tuple[int, Any]:
        if self.reads:
            sql = "select * from pgqueue.receive(%s, 'c1', %s, p_ack => %s)"
            rows = run(conn, sql, (self.stream, size, done))
            return len(rows), rows[0][0] if rows else None
        sql = "select message_count, claim_id from pgqueue.claim(%s, 'c1', %s, p_ack => %s)"
        return next(iter(run(conn, sql, (self.stream, size, done))), (0, None))

    def ack(self, conn: psycopg.Connection, done: Any) -> None:
        run(conn, "select pgqueue.ack(%s)", (done,))

    def tables(self) -> list[str]:
        return [
            f"pgqueue.{name}" for name in ("consumer_messages", "consumer_cursors", "publications")
        ]


class Backlog:
    """One side, whose backlog has a size again after each block of claims that is measured."""

    def __init__(self, conn: psycopg.Connection, side: Rows | Queue, size: int):
        self.conn, self.side = conn, side
        self.above = 0
        side.create(conn)
        side.fill(conn, size)

    def vacuum(self) -> None:
        for table in self.side.tables():
            run(self.conn, f"vacuum (analyze, index_cleanup on) {table}")

    def block(
        self, size: int, count: int, *, is_vacuumed: bool = False, reads: bool = False
    ) -> float:
        """Seconds for one claim of `size` messages and its acknowledgement, of `count` in a row.

        Of fewer, if these take longer than a second. What they claim is published before, which
        is not timed. (After a pause, the first claim takes a millisecond longer on either side.)
        """
        while self.above < size * count:
            self.side.fill(self.conn, BATCH)
            self.above += BATCH
        if is_vacuumed:
            self.vacuum()
        side = replace(self.side, reads=reads)
        began, messages, done = time.perf_counter(), 0, None
        while messages < size * count and time.perf_counter() < began + 1:
            claimed, done = side.claim(self.conn, size, done)
            # by key, what was assigned for smaller claims fits no better
            if claimed != size and (side.ordering == "none" or not claimed):
                raise RuntimeError(f"{self.side}: claimed {claimed} of {size} messages")
            messages += claimed
        self.side.ack(self.conn, done)
        taken = time.perf_counter() - began
        self.above -= messages
        return taken * size / messages


SIZES = {10_000: (10, 8), 100: (200, 8), 1: (500, 6)}
"""Messages in a claim; claims in a block, and how many blocks are measured."""

SIDES = {
    "rows": Rows("rows"),
    "in bulk": Queue("in_bulk"),
    "one by one": Queue("one_by_one", singly=True),
    "by key": Queue("by_key", ordering="key"),
}

VACUUMED = "rows, just vacuumed"

Seconds = dict[tuple[str, str, int, bool], float]
"""By side, backlog, messages in a claim, and whether an old snapshot was held."""


def claims(bench: Bench) -> None:
    """Claims of 10,000, 100 and 1, and the same with the payloads (`receive`, what users call).

    At two backlogs; claims also with an old snapshot held elsewhere.
    """
    backlogs = {"10k": 10_000, "100k" if bench.quick else "1M": 100_000 if bench.quick else 10**6}
    with bench.connect() as conn:
        filled = {
            (name, label): Backlog(conn, side_at(side, label), size)
            for label, size in backlogs.items()
            for name, side in SIDES.items()
        }
        for each in filled.values():
            each.vacuum()
        seconds: Seconds = {}
        received: dict[tuple[str, str, int], list[float]] = {}
        for is_held in (False, True):
            with held_snapshot(bench, is_held):
                for size, (count, blocks) in SIZES.items():
                    blocks = 3 if bench.quick else blocks
                    works = {k: partial(each.block, size, count) for k, each in filled.items()}
                    taken = alternate(works, blocks)
                    if not is_held:
                        for key in [key for key in works if key[0] == "rows"]:
                            work = partial(filled[key].block, size, count, is_vacuumed=True)
                            taken[VACUUMED, key[1]] = alternate({key: work}, blocks)[key]
                        reading = {
                            key: partial(each.block, size, count, reads=True)
                            for key, each in filled.items()
                        }
                        for key, each in alternate(reading, blocks).items():
                            received[(*key, size)] = each
                    seconds |= {(*key, size, is_held): low(each) for key, each in taken.items()}
                    for each in filled.values():
                        each.vacuum()
        report(bench, seconds, *backlogs)
        report_received(bench, received)
        for each in filled.values():
            each.vacuum()  # now that no snapshot is held
        workers(bench, conn, list(backlogs)[1])
        drop_streams(conn)


def side_at(side: Rows | Queue, label: str) -> Rows | Queue:
    """The same with tables or a stream of its own for a size of backlog."""
    if isinstance(side, Rows):
        return replace(side, table=f"{side.table}_{label}")
    return replace(side, stream=f"{side.stream}_{label}")


@contextmanager
def held_snapshot(bench: Bench, is_held: bool) -> Iterator[None]:
    """With a REPEATABLE READ transaction open in another session, whose snapshot is from before."""
    if not is_held:
        yield
        return
    with bench.connect() as other:
        run(other, "begin isolation level repeatable read")
        run(other, "select count(*) from pgqueue.streams")
        yield
        run(other, "rollback")


def report(bench: Bench, seconds: Seconds, small: str, large: str) -> None:
    """Add the lines: against a row per message, then against itself under easier conditions."""
    targets = {("in bulk", 10_000): 100, ("one by one", 10_000): 10}
    targets |= {("in bulk", 100): 5, ("one by one", 100): 5}
    cases = [(backlog, is_held) for is_held in (False, True) for backlog in (small, large)]
    for name in list(SIDES)[1:]:
        what = "ordering=key" if name == "by key" else f"published {name}"
        for size in SIZES:
            for backlog, is_held in cases:
                least = targets.get((name, size))
                bench.report.ratio(
                    f"claim and acknowledge, {what}, against a row per message and consumer",
                    f"claims of {size:,}, backlog {backlog}"
                    + (", an old snapshot held" if is_held else ""),
                    [seconds[name, backlog, size, is_held]],
                    [seconds["rows", backlog, size, is_held]],
                    "ms",
                    target=Target(least=least) if least else None,
                )
    for size in SIZES:
        for backlog in (small, large):
            bench.report.ratio(
                "claim and acknowledge, published in bulk, against just vacuumed rows",
                f"claims of {size:,}, backlog {backlog}",
                [seconds["in bulk", backlog, size, False]],
                [seconds[VACUUMED, backlog, size, False]],
                "ms",
            )
    for name in SIDES:
        for size in SIZES:
            # Within 20%, for claims of 10,000.
            is_promised = size == 10_000 and name in ("in bulk", "one by one")
            for how, hard, easy in (
                (f"backlog {large}, against {small}", (large, size, False), (small, size, False)),
                ("an old snapshot held, against none", (large, size, True), (large, size, False)),
            ):
                bench.report.ratio(
                    f"claims under strain, {name}",
                    f"claims of {size:,}, {how}",
                    [seconds[name, *hard]],
                    [seconds[name, *easy]],
                    "ms",
                    target=Target(least=0.83) if is_promised else None,
                )


def report_received(bench: Bench, taken: dict[tuple[str, str, int], list[float]]) -> None:
    """Add the lines of what users call: claims that bring the payloads."""
    for name in list(SIDES)[1:]:
        what = "ordering=key" if name == "by key" else f"published {name}"
        for side, backlog, size in taken:
            if side == name:
                bench.report.ratio(
                    f"receive and acknowledge, {what}, against a row per message and consumer",
                    f"{size:,} at a time, backlog {backlog}",
                    taken[side, backlog, size],
                    taken["rows", backlog, size],
                    "ms",
                )


def workers(bench: Bench, conn: psycopg.Connection, label: str) -> None:
    """Four processes at once, with claims of one message and of 100."""
    period = 1.0 if bench.quick else 2.0
    sides = {name: side_at(side, label) for name, side in SIDES.items()}
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:

        def speed(side: Side, size: int, count: int) -> float:
            """Seconds per message, of all workers together."""
            side.fill(conn, WORKERS * size * count)
            jobs = [pool.submit(work, bench.url, side, size, count, period) for _ in range(WORKERS)]
            return 1 / sum(job.result() for job in jobs)

        for size, count in ((1, 10_000), (100, 500)):
            for reads, what in ((False, "claims of"), (True, "receiving")):
                works = {
                    name: partial(speed, replace(side, reads=reads), size, count)
                    for name, side in sides.items()
                }
                taken = alternate(works, 3)
                for name in list(SIDES)[1:]:
                    bench.report.ratio(
                        f"{WORKERS} workers, {what} {size}, against a row per message and consumer",
                        "ordering=key" if name == "by key" else f"published {name}",
                        taken[name],
                        taken["rows"],
                        "1/s",
                    )


def work(url: str, side: Side, size: int, count: int, period: float) -> float:
    """Claim and acknowledge so often, or for so many seconds; how many messages per second.

    In two calls. In one statement, claims of the rows deadlock: a claimer that finds a row changed
    under it leaves the row out, but keeps its lock on it, in the way of that row's acknowledgement.
    """
    with psycopg.connect(url, autocommit=True) as conn:
        conn.prepare_threshold = 0
        side.ack(conn, side.claim(conn, size)[1])
        began, times, messages = time.perf_counter(), 0, 0
        while times < count and time.perf_counter() < began + period:
            claimed, done = side.claim(conn, size)
            side.ack(conn, done)
            messages += claimed
            times += 1
        return messages / (time.perf_counter() - began)
