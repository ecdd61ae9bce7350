"""Staging rows, on executors, and publishing what was staged, on the driver."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import BinaryType, StructType

from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.errors import (
    NOT_ALLOWED,
    UNFIT_DATA,
    UNKNOWN_STREAM,
    PgQueueError,
    Said,
    sqlstate_of,
    translate,
)
from spark_pgqueue.postgres.retrying import with_backoff
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.acting import Action, Actions, as_json, merged
from spark_pgqueue.spark.columns import READ_ALONG, check_columns, check_kind
from spark_pgqueue.spark.options import SINK_NAMES, SinkOptions
from spark_pgqueue.spark.rows import ahead, chunks, group, numbers, to_messages

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver.

    Attributes:
        sink: the sink's identity.
        staged: the ids of its staged chunks.
        rows: how many rows they hold.
        actions: what other rows want to be done, and with which messages.
        query_id: the Spark query's whose write it is; None where that is not known.
        is_repeated: whether nothing was staged because the batch, or a later one, was published
            before.
    """

    sink: str
    staged: tuple[int, ...]
    rows: int
    actions: tuple[tuple[Action, str], ...] = ()
    query_id: str | None = None
    is_repeated: bool = False


@dataclass(frozen=True)
class To:
    """A stream that rows are sent to."""

    name: str
    stream_id: int
    kind: str


class Target:
    """Where rows go, and the columns that they have."""

    def __init__(self, options: SinkOptions, schema: StructType):
        self._options = options
        self._patience = options.retry_timeout.total_seconds()
        self._columns = check_columns(schema, options)
        self._is_routed = "stream" in self._columns and options.action is None
        self._is_binary = "data" in self._columns and isinstance(
            schema.fields[self._columns.index("data")].dataType, BinaryType
        )
        self._to = self._find_stream()

    def stage(
        self,
        batches: Iterator[pa.RecordBatch],
        sink: str,
        batch: int,
        query_id: str | None,
        skip_published: bool = False,
    ) -> Staged:
        """Copy rows into the tables of their streams, unpublished; and note those with an action.

        Args:
            batches: the rows.
            sink: the sink's identity.
            batch: the number of its batch.
            query_id: the Spark query's whose write it is; None where that is not known.
            skip_published: whether to stage nothing where the batch, or a later one, was published
                before. A query's batch is counted once more instead: whether it is the same.
        """
        sends = self._options.action is None
        is_repeated = sends and skip_published and self._is_published(sink, batch)
        staged, rows, actions = [], 0, Actions(self._options)
        streams: dict[str, To] = {}
        for chunk in ahead(chunks(batches)):
            sent, acting = self._split(chunk.rename_columns(self._columns))
            actions.add(acting)
            for to, some in [] if is_repeated else self._by_stream(sent, streams):
                messages = to_messages(some, to.kind)
                # A chunk is staged again when its connection broke, even if it had been committed:
                # only the ids that reach `publish` count.
                staged += with_backoff(
                    lambda messages=messages, to=to: self._store(messages, to, sink, batch),
                    self._options.url,
                    self._patience,
                )
                rows += some.num_rows
        return Staged(sink, tuple(staged), rows, actions.staged(), query_id, is_repeated)

    def publish(self, messages: list[Staged | None], batch: int) -> bool:
        """Make everything that the tasks staged visible at once, and do what else they want.

        Returns:
            whether it was this call; False when the batch, or a later one, was published before.
        """
        tasks = [message for message in messages if message is not None]
        staged = [each for task in tasks for each in task.staged]
        actions = merged(task.actions for task in tasks)
        if not staged and not actions:
            return not any(task.is_repeated for task in tasks)
        statements = Statements(self._options.url, patience=0, names=self._name)
        rows = sum(task.rows for task in tasks)
        home = None if self._is_routed or self._to is None else self._to.stream_id
        sent = 0

        def publish() -> bool:
            nonlocal sent
            statements.connection()
            sent += 1
            done = []
            with statements.transaction():
                if staged:
                    done += statements.row(
                        "select pgqueue.publish_staged(%s, %s, %s, %s::bigint[], %s)",
                        [tasks[0].sink, batch, home, staged, rows],
                    )
                # A role may have the rights for one of these only.
                if some := {each: s for each, s in actions.items() if not each.revives}:
                    done.append(self._act(statements, some, tasks[0], batch))
                if some := {each: s for each, s in actions.items() if each.revives}:
                    done.append(self._act(statements, some, tasks[0], batch))
            # When it is sent again, what was published before is what was sent the first time.
            return any(done) or sent > 1

        try:
            return with_backoff(publish, self._options.url, self._patience)
        finally:
            statements.close()

    def _act(
        self, statements: Statements, actions: dict[Action, str], task: Staged, batch: int
    ) -> bool:
        """Whether it was this call that did it."""
        if next(iter(actions)).revives:
            done, changed, passed_over = statements.row(
                "select done, changed, passed_over from pgqueue.revive_messages(%s, %s, %s::jsonb)",
                [task.sink, batch, as_json(actions)],
            )
        else:
            done, changed, passed_over = statements.row(
                "select done, changed, passed_over "
                "from pgqueue.settle_messages(%s, %s, %s::jsonb, %s, %s)",
                [
                    *(task.sink, batch, as_json(actions), task.query_id),
                    # A write that may be repeated as a whole, with its batch.
                    task.query_id is not None or task.sink.startswith("txn:"),
                ],
            )
        if passed_over:
            warn(
                "%s of %s messages were left as they are by %s: they were done before, or are held "
                "by others, or not in a state for that",
                *(passed_over, changed + passed_over),
                " and ".join(sorted({each.action for each in actions})),
            )
        return done

    def _split(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Those to send, with the columns of messages; and those with an action."""
        import pyarrow.compute as pc

        if self._options.action is not None:
            return rows.slice(0, 0), rows
        if "action" not in self._columns:
            return rows, rows.slice(0, 0)
        is_sent = pc.call_function("is_null", [rows["action"]])
        sent = rows.filter(is_sent)
        if sent.num_rows and "data" not in self._columns:
            raise PgQueueError(
                f"column action is null in {sent.num_rows} of {rows.num_rows} rows, which are to "
                "be sent then, and there is no column data",
                hint="select what to send as data, or leave these rows out",
            )
        none_of_it = {"action", "consumer", "seq", "delay", "reason", "details"} | READ_ALONG
        sent = sent.drop_columns([name for name in sent.column_names if name in none_of_it])
        return sent, rows.filter(pc.call_function("invert", [is_sent]))

    def _by_stream(self, rows: pa.Table, streams: dict[str, To]) -> Iterator[tuple[To, pa.Table]]:
        """The rows for each stream, in their order; those that were found before are `streams`."""
        import pyarrow.compute as pc

        if not rows.num_rows:
            return
        if not self._is_routed:
            assert self._to is not None
            yield self._to, rows
            return
        names = rows["stream"]
        if names.null_count:
            if self._to is None:
                raise PgQueueError(
                    f"column stream is null in {names.null_count} of {rows.num_rows} rows, and "
                    "there is no option stream",
                    hint='say where these go: option("stream", ...)',
                )
            names = names.fill_null(self._to.name)
        rows = rows.drop_columns(["stream"])
        found = pc.call_function("unique", [names]).to_pylist()
        for name in found:
            if name not in streams:
                streams[name] = self._open(name)
        for name in found:
            some = rows
            if len(found) > 1:
                some = rows.filter(pc.call_function("equal", [names, name]))
            yield streams[name], some

    def _open(self, stream: str) -> To:
        """A stream that rows name."""

        def find() -> To:
            with kept_connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                sql = "select stream_id, kind from pgqueue.open_sink($1)"
                return To(stream, *call(cursor, sql, (stream,))[0])

        try:
            to = with_backoff(find, self._options.url, self._patience)
        except PgQueueError as error:
            if error.sqlstate != UNKNOWN_STREAM:
                raise
            raise PgQueueError(
                f"{error.message} in column stream", hint=error.hint, sqlstate=UNKNOWN_STREAM
            ) from None
        check_kind(self._is_binary, to.name, to.kind)
        return to

    def _is_published(self, sink: str, batch: int) -> bool:
        home = None if self._is_routed or self._to is None else self._to.stream_id

        def ask() -> bool:
            with kept_connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                sql = "select pgqueue.is_published($1, nullif($2, 0)::int4, $3)"
                return call(cursor, sql, (sink, home or 0, batch))[0][0]

        return with_backoff(ask, self._options.url, self._patience)

    def _store(self, rows: pa.Table, to: To, sink: str, batch: int) -> list[int]:
        """Copy one chunk in one transaction; returns the ids under which its groups are staged."""
        try:
            with kept_connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                seqs = reserve(cursor, to.stream_id, rows.num_rows)
                rows, groups = group(rows, seqs)
                cursor.adbc_ingest(
                    f"messages_{to.stream_id}",
                    rows.append_column("seq", seqs),
                    mode="append",
                    db_schema_name="pgqueue",
                )
                default = self._options.consumers
                blocks = json.dumps(
                    [{**asdict(each), "consumers": each.consumers or default} for each in groups]
                )
                staged = call(
                    cursor,
                    "select pgqueue.stage($1, $2, $3::int4, b.seqs::int8multirange, "
                    "b.priority::int4, to_timestamp(b.deliver_at), b.dedup_keys, b.consumers, "
                    "to_timestamp(b.expires_at), $5) from json_to_recordset($4::text::json) "
                    "as b (seqs text, priority int8, deliver_at int8, dedup_keys text[], "
                    "consumers text[], expires_at int8)",
                    (sink, batch, to.stream_id, blocks, self._is_routed),
                )
                conn.commit()
                return [block for (block,) in staged]
        except Exception as error:
            self._raise_unfit(error, to)

    def _find_stream(self) -> To | None:
        """The stream of the options; None where rows name theirs, or none is sent to."""
        options = self._options
        statements = Statements(options.url, patience=self._patience, repeat=True, names=self._name)
        try:
            if options.action is not None or options.stream is None:
                statements.row("select pgqueue.schema_version()")
                return None
            consumers = None if options.consumers is None else list(options.consumers)
            to = To(
                options.stream,
                *statements.row(
                    "select stream_id, kind from pgqueue.open_sink(%s, %s::text[])",
                    [options.stream, None if self._is_routed else consumers],
                ),
            )
        except PgQueueError as error:
            if error.argument == "p_consumers":
                error.hint = "name consumers of this stream, or remove the option to publish to all"
            raise
        finally:
            statements.close()
        if "data" in self._columns:
            check_kind(self._is_binary, to.name, to.kind)
        return to

    def _name(self, argument: str) -> str | None:
        """What the user calls an argument of SQL."""
        if argument == "p_consumers" and "consumers" in self._columns:
            return "column consumers"
        return SINK_NAMES.get(argument)

    def _raise_unfit(self, error: Exception, to: To) -> NoReturn:
        """Name column or stream when Postgres refused a row; else raise the error as it is."""
        if (known := translate(error, self._name)) is not None:
            raise known from None
        code, said = sqlstate_of(error), Said.by(error)
        if code == "22003":
            raise PgQueueError(
                f"column priority holds a number that is no priority: {said.message}",
                sqlstate=NOT_ALLOWED,
            ) from None
        # Not valid JSON, not valid text (a NUL character), or a check of the stream's table.
        if code in ("22P02", "22021", "22P05", "23502", "23514"):
            # The rest of the context quotes what is in the row.
            where = re.search(
                r"^COPY \w+, line \d+, (column \w+)", said.context or "", re.MULTILINE
            )
            raise PgQueueError(
                f"a row does not fit stream {to.name} of kind {to.kind}: "
                f"{said.message}" + (f" ({where[1]})" if where else ""),
                hint="text and json hold no NUL character, json must be valid, headers are an "
                "object and a key has at most 1024 bytes; a binary stream takes any bytes",
                sqlstate=UNFIT_DATA,
            ) from None
        raise error


def reserve(cursor: dbapi.Cursor, stream_id: int, count: int) -> pa.Int64Array:
    """So many new sequence numbers of a stream, ascending."""
    ranges = call(
        cursor,
        "select lower(r), upper(r) from unnest(pgqueue.reserve($1::int4, $2::int4)) r",
        (stream_id, count),
    )
    return numbers(ranges)
