"""Staging rows on executors, and publishing the staged chunks on the driver."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import BinaryType, StructType

from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.connection import NO_TIMEOUTS
from spark_pgqueue.postgres.copy_target import COPY_TARGET
from spark_pgqueue.postgres.errors import (
    NOT_ALLOWED,
    UNFIT_DATA,
    UNKNOWN_STREAM,
    PgQueueError,
    Said,
    sqlstate_of,
    translate,
)
from spark_pgqueue.postgres.payloads import numbers
from spark_pgqueue.postgres.retrying import with_backoff
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import READ_ALONG, check_columns, check_kind
from spark_pgqueue.spark.executor.reading import asked
from spark_pgqueue.spark.options.sink import SINK_NAMES, SinkOptions
from spark_pgqueue.spark.sink.actions import Action, Actions, as_json, merged
from spark_pgqueue.spark.sink.rows import (
    ahead,
    check_times,
    joined,
    naming_the_column,
    to_messages,
    to_staged_chunks,
)
from spark_pgqueue.spark.sink.table_writer import StagedRows, TableWriter, all_staged, drop

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi


@dataclass(frozen=True)
class TargetStream:
    """A stream to which rows are sent."""

    name: str  # its name
    stream_id: int  # its id
    kind: str  # text, json or binary
    table: str  # the table that rows are copied into, in the schema pgqueue


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """The message of a task to the driver."""

    sink: str  # the sink's identity
    staged: tuple[int, ...]  # the ids of the task's staged chunks
    rows: int  # how many rows the chunks have
    actions: tuple[tuple[Action, str], ...] = ()  # the actions of other rows, with their messages
    # the id of the Spark query that writes; None where that is not known
    query_id: str | None = None
    # whether the task staged nothing because the batch, or a later one, was published before
    is_repeated: bool = False
    # the id of the stream of all chunks; None where rows name their streams
    home: int | None = None
    table: StagedRows | None = None  # the rows for a table


class StreamWriter:
    """Writes rows to their streams, and to a table.

    A writer that only commits does not begin a write: it makes no query before the commit.
    """

    def __init__(self, options: SinkOptions, schema: StructType, begins: bool = True):
        self._options = options
        self._patience = options.retry_timeout.total_seconds()
        self._table = None if options.table is None else TableWriter(options, schema)
        schema = schema if self._table is None else self._table.others
        self._columns = check_columns(schema, options, self._table is not None)
        self._sends = options.action is None and "data" in self._columns
        # As in Kafka's sink, the option takes precedence.
        self._is_routed = "stream" in self._columns and options.stream is None
        self._is_binary = "data" in self._columns and isinstance(
            schema.fields[self._columns.index("data")].dataType, BinaryType
        )
        self._stream, self._write_no = self._begin() if begins else (None, None)

    def stage(
        self,
        batches: Iterator[pa.RecordBatch],
        sink: str,
        batch: int,
        query_id: str | None,
        skip_published: bool = False,
    ) -> Staged:
        """Copy rows into the tables of their streams, unpublished; collect the rows with an action.

        With `skip_published`, nothing is staged if the batch of the sink, or a later one, was
        published before. For a query's batch, the rows are staged and counted instead, to see
        whether the batch is the same.
        """
        is_repeated = self._sends and skip_published and self._is_published(sink, batch, query_id)
        staged, rows, actions = [], 0, Actions(self._options)
        streams: dict[str, TargetStream] = {}
        table = self._table and self._table.task(sink, batch, query_id, skip_published)
        try:
            for rows_read in ahead(joined(batches)):
                check_times(rows_read)
                read = rows_read if table is None else table.add(rows_read)
                read = read.rename_columns(self._columns)
                sent, with_action = self._split(read)
                with naming_the_column(read):
                    actions.add(with_action)
                    parts = [] if is_repeated else list(self._by_stream(sent, streams))
                for target, some in parts:
                    with naming_the_column(some):
                        messages = to_messages(some, target.kind)
                    # After a broken connection the rows are staged again, even if they were
                    # committed: only the ids that reach `publish` count.
                    staged += with_backoff(
                        lambda messages=messages, target=target: self._store(
                            messages, target, sink, batch
                        ),
                        self._options.url,
                        self._patience,
                    )
                    rows += some.num_rows
        except Exception:
            self._unstage(sink, batch, staged)
            raise
        home = None if self._stream is None else self._stream.stream_id
        return Staged(
            *(sink, tuple(staged), rows, actions.staged(), query_id, is_repeated, home),
            table and table.staged(),
        )

    def abort(self, messages: list[Staged | None], batch: int) -> None:
        """Delete what the tasks of a failed write have staged; what is left, `maintain` deletes."""
        tasks = [message for message in messages if message is not None]
        if tasks:
            staged = [each for task in tasks for each in task.staged]
            self._unstage(tasks[0].sink, batch, staged)
        writes = {task.table.write_no for task in tasks if task.table is not None}
        if self._table is not None and self._table.write_no:  # where no task came to its end
            writes.add(self._table.write_no)
        if writes:
            statements = Statements(self._options.url, patience=0)
            drop(statements, writes)
            statements.close()

    def _unstage(self, sink: str, batch: int, staged: list[int]) -> None:
        """Delete staged chunks of this attempt, without retries or errors: the write has failed
        already, and its own error must be shown.
        """
        if staged:
            statements = Statements(self._options.url, patience=0)
            with suppress(Exception), closing(statements):
                sql = "select pgqueue.unstage(%s, %s, %s::bigint[])"
                statements.row(sql, [sink, batch, staged])

    def publish(self, messages: list[Staged | None], batch: int) -> bool:
        """Publish all staged chunks in one transaction, and perform the actions.

        Returns:
            whether this call did it; False when the batch, or a later one, was published before.
        """
        tasks = [message for message in messages if message is not None]
        staged = [each for task in tasks for each in task.staged]
        actions = merged(task.actions for task in tasks)
        tables = [task.table for task in tasks if task.table is not None]
        table = all_staged(tables)
        # A query's batch without messages is recorded, too: see check_follows() in batches.sql.
        sends = self._sends and any(task.staged or task.sink == task.query_id for task in tasks)
        if not sends and not actions and table is None:
            return not any(each.is_repeated for each in (*tasks, *tables))
        statements = Statements(self._options.url, patience=0, names=self._name)
        rows = sum(task.rows for task in tasks)
        home = next((task.home for task in tasks if task.staged), None)
        compares = self._options.compare_repeats == "content"
        sent = 0

        def publish() -> bool:
            nonlocal sent
            statements.connection()
            sent += 1
            done = []
            refusals = self._table.refusals(table.table) if self._table and table else nullcontext()
            with refusals, statements.transaction():
                statements.rows(NO_TIMEOUTS)
                if tasks[0].query_id is not None and tasks[0].sink.startswith("txn:"):
                    statements.row("select pgqueue.begin_write_of(%s)", [tasks[0].query_id])
                if self._table is not None and table is not None:
                    done.append(self._table.apply(statements, table, tasks[0].sink, batch))
                if sends:
                    done += statements.row(
                        "select pgqueue.publish_staged(%s, %s, %s, %s::bigint[], %s, %s)",
                        [tasks[0].sink, batch, home, staged, rows, compares],
                    )
                for revives in (False, True):  # a role may have the rights for one of these only
                    if some := {each: s for each, s in actions.items() if each.revives == revives}:
                        done.append(self._settle(statements, some, tasks[0], batch))
            # In a second attempt, a batch that is published already was published by the first.
            return any(done) or sent > 1

        with statements.kept():
            is_done = with_backoff(publish, self._options.url, self._patience)
            drop(statements, {table.write_no} if table is not None else set())
            return is_done

    def _settle(
        self, statements: Statements, actions: dict[Action, str], task: Staged, batch: int
    ) -> bool:
        """Perform actions; returns whether this call did it."""
        sql, values = "pgqueue.revive_messages(%s, %s, %s::jsonb, %s)", []
        if not next(iter(actions)).revives:
            sql = "pgqueue.settle_messages(%s, %s, %s::jsonb, %s, %s, %s)"
            may_repeat = task.query_id is not None or task.sink.startswith("txn:")
            values = [task.query_id, may_repeat]  # as a whole, with its batch
        values.append(self._options.compare_repeats == "content")
        done, changed, passed_over = statements.row(
            f"select done, changed, passed_over from {sql}",
            [task.sink, batch, as_json(actions), *values],
        )
        if passed_over:
            warn(
                "%s of %s messages were not changed by %s: they are already done, held by others, "
                "or in a state that does not allow it",
                *(passed_over, changed + passed_over),
                " and ".join(sorted({each.action for each in actions})),
            )
        return done

    def _split(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """The rows to send, with the columns of messages; and the rows with an action."""
        import pyarrow.compute as pc

        if self._options.action is not None:
            return rows.slice(0, 0), rows
        if "action" not in self._columns:
            return rows, rows.slice(0, 0)
        is_sent = pc.call_function("is_null", [rows["action"]])
        sent = rows.filter(is_sent)
        if sent.num_rows and "data" not in self._columns:
            raise PgQueueError(
                f"column action is null in {sent.num_rows} of {rows.num_rows} rows, which are then "
                "sent, but there is no column data",
                hint="select what to send as data, or filter these rows out",
            )
        none_of_it = {"action", "consumer", "seq", "delay", "reason", "details"} | READ_ALONG
        sent = sent.drop_columns([name for name in sent.column_names if name in none_of_it])
        return sent, rows.filter(pc.call_function("invert", [is_sent]))

    def _by_stream(
        self, rows: pa.Table, streams: dict[str, TargetStream]
    ) -> Iterator[tuple[TargetStream, pa.Table]]:
        """The rows for each stream, in their order; new streams are added to `streams`."""
        import pyarrow.compute as pc

        if not rows.num_rows:
            return
        names = rows["stream"] if "stream" in rows.column_names else None
        rows = rows if names is None else rows.drop_columns(["stream"])
        if names is None or not self._is_routed:
            assert self._stream is not None
            yield self._stream, rows
            return
        if names.null_count:
            raise PgQueueError(
                f"column stream is null in {names.null_count} of {rows.num_rows} rows, but there "
                "is no option stream",
                hint="say where these go: coalesce(stream, 'rest') as stream",
            )
        found = pc.call_function("unique", [names]).to_pylist()
        for name in found:
            if name not in streams:
                streams[name] = self._open(name)
        for name in found:
            some = rows
            if len(found) > 1:
                some = rows.filter(pc.call_function("equal", [names, name]))
            yield streams[name], some

    def _open(self, stream: str) -> TargetStream:
        """Find a stream that a row names."""
        sql = f"select stream_id, kind, {COPY_TARGET} from pgqueue.open_sink($1)"
        try:
            target = TargetStream(stream, *self._asked(sql, stream))
        except PgQueueError as error:
            if error.sqlstate != UNKNOWN_STREAM:
                raise
            raise PgQueueError(
                f"{error.message} in column stream", hint=error.hint, sqlstate=UNKNOWN_STREAM
            ) from None
        check_kind(self._is_binary, target.name, target.kind)
        return target

    def _is_published(self, sink: str, batch: int, query_id: str | None) -> bool:
        home = 0 if self._stream is None else self._stream.stream_id
        sql = "select pgqueue.is_published($1, nullif($2, 0)::int4, $3, '', $4)"
        return self._asked(sql, sink, home, batch, query_id)[0]

    def _asked(self, sql: str, *values: Any) -> tuple:
        """The row of a query, on an executor."""
        return asked(lambda cursor: call(cursor, sql, values), self._options.url, self._patience)[0]

    def _store(self, rows: pa.Table, target: TargetStream, sink: str, batch: int) -> list[int]:
        """Copy rows in one transaction; returns the ids of their staged chunks."""
        import pyarrow as pa

        try:
            with kept_connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                seqs = reserve(cursor, target.stream_id, rows.num_rows)
                with naming_the_column(rows):
                    rows, chunks = to_staged_chunks(rows, seqs)
                home = pa.repeat(pa.scalar(target.stream_id, pa.int32()), len(seqs))
                cursor.adbc_ingest(
                    target.table,
                    rows.append_column("seq", seqs).append_column("stream_id", home),
                    mode="append",
                    db_schema_name="pgqueue",
                )
                default = self._options.consumers
                described = json.dumps(
                    [{**asdict(each), "consumers": each.consumers or default} for each in chunks]
                )
                staged = call(
                    cursor,
                    "select pgqueue.stage($1, $2, $3::int4, b.seqs::int8multirange, "
                    "b.priority::int4, to_timestamp(b.deliver_at), b.dedup_keys, b.consumers, "
                    "to_timestamp(b.expires_at), $5, $6) from json_to_recordset($4::text::json) "
                    "as b (seqs text, priority int8, deliver_at int8, dedup_keys text[], "
                    "consumers text[], expires_at int8)",
                    (sink, batch, target.stream_id, described, self._is_routed, self._write_no),
                )
                conn.commit()
                return [chunk for (chunk,) in staged]
        except Exception as error:
            self._raise_unfit(error, target)

    def _begin(self) -> tuple[TargetStream | None, int | None]:
        """The stream of the options, and the number of this write.

        There is no stream where rows name their streams, and neither of the two where no rows are
        sent: the role may then be one that only settles messages.
        """
        options = self._options
        statements = Statements(options.url, patience=self._patience, repeat=True, names=self._name)
        with statements.kept():
            if self._table is not None:
                self._table.begin(statements)
            if options.action is not None or "data" not in self._columns:
                statements.row("select pgqueue.schema_version()")
                return None, None
            if options.stream is None:
                return None, statements.row("select pgqueue.begin_write()")[0]
            target, write_no = self._open_home(statements, options.stream)
        check_kind(self._is_binary, target.name, target.kind)
        return target, write_no

    def _open_home(self, statements: Statements, stream: str) -> tuple[TargetStream, int]:
        """The stream of the options, and the number of this write."""
        given = self._options.consumers
        consumers = None if given is None else list(given)
        try:
            stream_id, kind, table, write_no = statements.row(
                f"select stream_id, kind, {COPY_TARGET}, pgqueue.begin_write() "
                "from pgqueue.open_sink(%s, %s::text[])",
                [stream, consumers],
            )
        except PgQueueError as error:
            if error.argument == "p_consumers":
                error.hint = "name consumers of this stream, or remove the option to publish to all"
            raise
        return TargetStream(stream, stream_id, kind, table), write_no

    def _name(self, argument: str) -> str | None:
        """The user's name for an argument of SQL."""
        if argument == "p_consumers" and "consumers" in self._columns:
            return "column consumers"
        return SINK_NAMES.get(argument)

    def _raise_unfit(self, error: Exception, target: TargetStream) -> NoReturn:
        """Raise an error that names a refused row's column or stream, or the error unchanged."""
        if (known := translate(error, self._name)) is not None:
            raise known from None
        code, said = sqlstate_of(error), Said.by(error)
        if code == "22003":
            raise PgQueueError(
                f"column priority contains a number that is not a priority: {said.message}",
                sqlstate=NOT_ALLOWED,
            ) from None
        # Invalid JSON, invalid text (a NUL character), or a check constraint of the stream's table.
        if code in ("22P02", "22021", "22P05", "23502", "23514", "54001"):
            # The rest of the context quotes the row.
            where = re.search(
                r"^COPY \w+, line \d+, (column \w+)", said.context or "", re.MULTILINE
            )
            raise PgQueueError(
                f"a row does not fit stream {target.name} of kind {target.kind}: "
                f"{said.message}" + (f" ({where[1]})" if where else ""),
                hint="text and json must not contain NUL characters, json must be valid, headers "
                "must be an object and a key must have at most 1024 bytes; a binary stream accepts "
                "any bytes",
                sqlstate=UNFIT_DATA,
            ) from None
        raise error


def reserve(cursor: dbapi.Cursor, stream_id: int, count: int) -> pa.Int64Array:
    """Reserve new sequence numbers of a stream, ascending."""
    ranges = call(
        cursor,
        "select lower(r), upper(r) from unnest(pgqueue.reserve($1::int4, $2::int4)) r",
        (stream_id, count),
    )
    return numbers(ranges)
