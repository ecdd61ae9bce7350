"""The executor's side of the source: a task reads its partition, by COPY into Arrow.

Arrow is imported inside the functions that use it, here and in the sink. For every micro-batch
Spark starts driver-side processes that import this package and need no Arrow; the import would cost
each of them 100 ms.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import TaskContext
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.adbc import call, kept_connection, let_go
from spark_pgqueue.postgres.errors import CODES, DATA_LOSS, LEASE_LOST, PgQueueError
from spark_pgqueue.postgres.payloads import expression, headers_map, set_up
from spark_pgqueue.postgres.retrying import Attempts, raise_clear, with_backoff
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import VALUE
from spark_pgqueue.spark.executor.typed import stored, typed
from spark_pgqueue.spark.options.source import SourceOptions
from spark_pgqueue.spark.partitions import ClaimedPartition, MessagePartition, Range, cut_behind
from spark_pgqueue.spark.platform.pyspark_compat import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

A = TypeVar("A")
R = TypeVar("R", bound=tuple)

RANGES_PER_STATEMENT = 20_000
"""A statement with this many ranges has about 500 kB of text."""

FEW_RANGES = 16
"""Fewer ranges are read one by one. (Postgres makes no hash table of fewer than 9 numbers.)"""

WALKED = 4
"""Walking past this many messages costs less than looking up one range in the index."""

FAILURES_IN_A_ROW = 5
"""How often in a row a read may break off without progress."""


def read_claimed(
    options: SourceOptions, partition: ClaimedPartition, schema: StructType, query_id: str | None
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition that a checkpoint reader has claimed, in order.

    By the query's id, the database notices two readers of one consumer in a query.

    Raises:
        PgQueueError: messages are gone, and failOnDataLoss is true; the query reads the consumer
            twice; the lease ended and another claimer has messages of the batch; or Postgres stayed
            away too long.
    """
    url, patience = options.url, options.retry_timeout.total_seconds()

    def check_query(cursor: dbapi.Cursor) -> None:
        if partition.index == 0 and query_id is not None:
            sql = "select pgqueue.reader_query($1::text::uuid, $2::text) is null"
            call(cursor, sql, (partition.batch.reader, query_id))
            cursor.connection.commit()

    # A task that failed for a lost lease fails again before it reads anything.
    _check_lease(url, patience, partition)
    rows = 0
    for batch in read_rows(url, patience, partition, schema, prepare=check_query):
        rows += batch.num_rows
        yield batch
    if partition.buckets > 1 and partition.index == 0:
        # The first partition counts for all: no partition sees from its own keys what is missing.
        rows = asked(
            lambda cursor: count_messages(cursor, partition.stream_id, partition.ranges),
            url,
            patience,
        )
    if partition.buckets == 1 or partition.index == 0:
        check_complete(partition, rows, options.fail_on_data_loss)
    _check_lease(url, patience, partition)


def asked(ask: Callable[[dbapi.Cursor], A], url: str | None, patience: float) -> A:
    """The result of `ask`, which is called again over another connection if one breaks."""

    def attempt() -> A:
        with kept_connection(url, patience=0) as conn, conn.cursor() as cursor:
            return ask(cursor)

    return with_backoff(attempt, url, patience)


def read_rows(
    url: str | None,
    patience: float,
    partition: MessagePartition,
    schema: StructType,
    constant: dict[str, Any] | None = None,
    prepare: Callable[[dbapi.Cursor], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition, in order; resumes behind the last row if the connection breaks.

    `constant` has columns with the same value in every row, which are not stored with messages;
    `prepare` is called with each connection before it reads.
    """
    target = arrow_schema(schema)
    ranges, last = partition.ranges, None

    def rest() -> Generator[pa.RecordBatch]:
        nonlocal ranges, last
        if last is not None:
            (_, ranges), last = cut_behind(ranges, last), None
        if not ranges:
            return
        with kept_connection(url, patience) as conn, conn.cursor() as cursor:
            if prepare is not None:
                prepare(cursor)
            for batch in _select(cursor, partition, ranges, target, constant or {}):
                last = batch["seq"][-1].as_py()
                yield batch

    return going_on(rest, url, f"stream {partition.stream}")


def closing_after(
    batches: Iterator[pa.RecordBatch], url: str | None, max_connections: int | None
) -> Iterator[pa.RecordBatch]:
    """The batches. With maxConnections, the connection is closed afterwards, and not kept."""
    try:
        yield from batches
    finally:
        if max_connections is not None:
            let_go(url)
        if TaskContext.get() is not None:
            keep_modules()


def keep_modules() -> None:
    """Exclude the objects that this process has loaded so far from later garbage collections.

    After each task, a Python worker of Spark collects garbage, which visits all objects. pandas,
    Arrow and PySpark have 95,000: that takes 55 ms of a CPU, in which a task reads 200,000 messages
    of an archive. Once is enough for a process: later objects are visited as before.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def going_on(
    rest: Callable[[], Generator[pa.RecordBatch]], url: str | None, what: str
) -> Iterator[pa.RecordBatch]:
    """Arrow batches, resumed after a broken connection: each call of `rest` reads what the previous
    calls have not read. `what` names the data, for the log.
    """
    failures, attempts = 0, Attempts()
    while True:
        try:
            with closing(rest()) as batches:
                for batch in batches:
                    failures, attempts = 0, Attempts()
                    yield batch
            return
        except Exception as error:
            failures += 1
            # A connection that breaks during a COPY raises an OSError without a code.
            passing = isinstance(error, OSError) or attempts.may_go_on(error)
            final = isinstance(error, PgQueueError)  # also where connecting took too long
            if final or not passing or failures > FAILURES_IN_A_ROW:
                raise_clear(error, url)
            warn("reading %s was interrupted and continues: %s", what, error)


def _check_lease(url: str | None, patience: float, partition: ClaimedPartition) -> None:
    """Fail when the reader has lost messages since the batch was planned."""
    batch = partition.batch
    sql = "select pgqueue.reader_lost($1::text::uuid, $2, $3)"
    values = (batch.reader, batch.after, batch.end)
    ((lost,),) = asked(lambda cursor: call(cursor, sql, values), url, patience)
    if lost > batch.lost:
        raise PgQueueError(
            f"{lost - batch.lost} messages of this batch of stream {partition.stream} were taken "
            "over by another claimer, because the query's lease expired while the batch was read",
            hint=CODES[LEASE_LOST].way_out,
            sqlstate=LEASE_LOST,
        )


def check_complete(partition: MessagePartition, rows: int, fail: bool) -> None:
    """Fail, with PQ010, or warn when a partition had fewer rows than messages."""
    if rows < partition.messages:
        report_loss(partition.messages - rows, partition.stream, fail)


def report_loss(count: int, stream: str, fail: bool) -> None:
    """Fail, with PQ010, or warn because messages were deleted before they could be read."""
    message = f"{count} messages of stream {stream} were deleted before they could be read"
    if fail:
        raise PgQueueError(
            message,
            hint='to continue without them, set option("failOnDataLoss", "false")',
            sqlstate=DATA_LOSS,
        )
    warn("%s", message)


def _select(
    cursor: dbapi.Cursor,
    partition: MessagePartition,
    ranges: tuple[Range, ...],
    target: pa.Schema,
    given: dict[str, Any],
) -> Iterator[pa.RecordBatch]:
    set_up(cursor)
    for some in slices(ranges):
        # Nearly always all messages have one value, which COPY need not repeat in every row.
        constant = given | {
            name: values.pop()
            for name in ("priority", "deliver_count")
            if len(values := {getattr(each, name) for each in some}) == 1
        }
        cursor.execute(select_sql(partition, some, stored(target.names, constant)))
        for batch in cursor.fetch_record_batch():
            if batch.num_rows:
                yield as_spark(batch, constant, target, partition.stream)


def slices(ranges: tuple[R, ...]) -> Iterator[tuple[R, ...]]:
    """The ranges in lists, one for each statement."""
    for first in range(0, len(ranges), RANGES_PER_STATEMENT):
        yield ranges[first : first + RANGES_PER_STATEMENT]


def select_sql(partition: MessagePartition, ranges: tuple[Range, ...], columns: list[str]) -> str:
    """The statement that reads ranges in order, without parameters: COPY takes none."""
    of_ranges = {"arrival": "m.seq + r.shift as arrival"} | {
        name: f"r.{name}" for name in ("priority", "deliver_count")
    }
    # Nearly always all ranges have one shift; then it is a constant.
    if len({each.shift for each in ranges}) == 1:
        of_ranges["arrival"] = f"m.seq + {ranges[0].shift} as arrival"
    listed = [of_ranges.get(name) or expression(name, partition.kind) for name in columns]
    wanted = [name for name in ("priority", "deliver_count") if name in columns]
    if "r.shift" in of_ranges["arrival"] and "arrival" in columns:
        wanted.append("shift")
    source = _walk_sql(partition.stream_id, ranges) if not wanted else None
    if source is None:
        rows = [(each.lo, each.hi, *(getattr(each, name) for name in wanted)) for each in ranges]
        types = {name: "int8" if name == "shift" else "int4" for name in wanted}
        source = ranges_sql(partition.stream_id, rows, **types) + " where true"
    if partition.buckets > 1:  # a message without a key may go to any partition
        hashed = "(hashtext(coalesce(m.key, m.seq::text))::int8 & 2147483647)"
        source += f" and {hashed} % {partition.buckets} = {partition.index}"
    return f"select {', '.join(listed)} from {source}"


def _walk_sql(stream_id: int, ranges: Sequence[tuple[int, ...]]) -> str | None:
    """The from clause for one walk along the index: m, the messages in order.

    None where no such walk exists, or where it would read too many unwanted messages. An index
    lookup for each range costs as much as about five messages of the walk.
    """
    lo, hi = ranges[0][0], ranges[-1][1]
    count, end = 0, lo
    for each in ranges:
        if each[0] < end:
            return None
        end = each[1]
        count += end - each[0]
    if len(ranges) < FEW_RANGES or hi - lo > WALKED * len(ranges) or count > WALKED * len(ranges):
        return None
    seqs = ",".join(str(seq) for each in ranges for seq in range(each[0], each[1]))
    # "+ 0" makes Postgres search for the numbers in a hash table, and not in the index.
    return (
        f"(select * from pgqueue.messages_{stream_id} where seq >= {lo} and seq < {hi}"
        f" and seq + 0 = any ('{{{seqs}}}'::int8[]) order by seq) m where true"
    )


def ranges_sql(stream_id: int, ranges: Sequence[tuple[int, ...]], **more: str) -> str:
    """The from clause for ranges: r, the ranges, and m, the messages of each, in order.

    A range has lo, hi and the values of `more`, which are names and types of further columns of r.
    """
    names = {"lo": "int8", "hi": "int8", **more}
    lists = ", ".join(
        f"'{{{','.join(str(value) for value in values)}}}'::{type_}[]"
        for values, type_ in zip(zip(*ranges, strict=True), names.values(), strict=True)
    )
    # The bounds of all ranges let the planner leave out the other segments of the stream.
    lo, hi = min(r[0] for r in ranges), max(r[1] for r in ranges)
    return (
        f"unnest({lists}) as r ({', '.join(names)}) cross join lateral "
        f"(select * from pgqueue.messages_{stream_id} "
        f"where seq >= r.lo and seq < r.hi and seq >= {lo} and seq < {hi} order by seq) m"
    )


def count_messages(
    cursor: dbapi.Cursor, stream_id: int, ranges: tuple[tuple[Any, ...], ...]
) -> int:
    """How many messages of the ranges exist, of all keys."""
    count = 0
    set_up(cursor)
    for some in slices(ranges):
        source = _walk_sql(stream_id, some) or ranges_sql(stream_id, [r[:2] for r in some])
        cursor.execute(f"select count(*) as n from {source}")
        count += cursor.fetchall()[0][0]
    return count


def as_spark(
    batch: pa.RecordBatch, constant: dict[str, Any], target: pa.Schema, stream: str
) -> pa.RecordBatch:
    """The columns with exactly Spark's types; data that has its type already is not copied."""
    import pyarrow as pa

    def column(field: pa.Field) -> pa.Array:
        if field.name in constant:
            return pa.repeat(pa.scalar(constant[field.name], field.type), batch.num_rows)
        if field.name == VALUE:
            return typed(batch, target, stream)
        found = batch[field.name]
        if field.name == "headers" and not pa.types.is_map(found.type):
            return headers_map(found, field.type)
        return found.cast(field.type)

    return pa.RecordBatch.from_arrays([column(field) for field in target], schema=target)
