"""Rows for a table: executors stage them, and the driver writes them in its transaction.

The rules are in SQL (`sql/table_sink/table_plan.sql`, `table_fit.sql`, `table_sink.sql`,
`table_apply.sql`). Rows with a struct column `row` may have columns of messages and actions, too;
otherwise all columns are the table's.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.errors import (
    NOT_ALLOWED,
    UNFIT_DATA,
    PgQueueError,
    Said,
    sqlstate_of,
    translate,
)
from spark_pgqueue.postgres.retrying import with_backoff
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.executor.reading import asked
from spark_pgqueue.spark.options.sink import SinkOptions
from spark_pgqueue.spark.sink.rows import naming_the_column

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_CUT = "22001"
"""The SQLSTATE for text that a table would cut or round."""

ROW = "row"
"""The struct column that has a table's row, where the other columns are of messages and actions."""


@dataclass(frozen=True)
class StagedRows:
    """What a task has staged for a table."""

    write_no: int  # the number of the write
    table: str  # the table's name, as SQL
    chunks: tuple[int, ...] = ()  # random numbers, one for the rows of each COPY
    rows: int = 0  # how many rows the chunks have
    # whether the task staged nothing because the batch was written before
    is_repeated: bool = False


class TableWriter:
    """A table that rows are written into.

    `others` are the columns of messages and actions; none where all are the table's. `name` is the
    table's name, as SQL. `write_no` is 0 before the write has begun, and in a stream's commit.
    """

    def __init__(self, options: SinkOptions, schema: StructType):
        self._url, self._patience = options.url, options.retry_timeout.total_seconds()
        self._acts = options.action is not None
        self._row = next(
            (
                place
                for place, each in enumerate(schema.fields)
                if each.name.lower() == ROW and isinstance(each.dataType, StructType)
            ),
            None,
        )
        columns = schema
        self.others: StructType = StructType([])
        if self._row is None:
            _refuse_messages(options)
        else:
            columns = schema.fields[self._row].dataType
            self.others = StructType([f for n, f in enumerate(schema.fields) if n != self._row])
        assert isinstance(columns, StructType)
        self._names = columns.names
        self._given = json.dumps(
            {
                "table": options.table,
                "columns": [
                    {"name": each.name, "type": each.dataType.simpleString()}
                    for each in columns.fields
                ],
                "merge_keys": options.merge_keys and list(options.merge_keys),
                "sequence_by": options.sequence_by,
                "delete_when": options.delete_when,
                "allow_rounding": options.allow_rounding and list(options.allow_rounding),
            }
        )
        self.name: str = ""
        self.write_no: int = 0

    def begin(self, statements: Statements) -> None:
        """Check the table, the columns, the options and the rights, before tasks run."""
        sql = "select name, write_no from pgqueue.open_table(%s::jsonb)"
        self.name, self.write_no = statements.row(sql, [self._given])

    def task(self, sink: str, batch: int, query_id: str | None, skip_written: bool) -> RowsOfTask:
        """What a task begins with, on an executor; with `skip_written`, the task stages nothing if
        the batch of the sink, or a later one, was written.
        """
        sql, values = (
            "select pgqueue.is_published($1, null::int4, $2, $3, $4)",
            (sink, batch, self.name, query_id),
        )
        is_repeated = skip_written and asked(
            lambda cursor: call(cursor, sql, values)[0][0], self._url, self._patience
        )
        return RowsOfTask(self, sink, batch, is_repeated)

    def split(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """The rows of the table, and those of messages and actions; each row must be used."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._row is None:
            return rows, rows.select([]).slice(0, 0)
        structs = rows.column(self._row)
        there = pc.call_function("is_valid", [structs])
        fields = [each.flatten() for each in structs.filter(there).chunks]
        schema = pa.schema([pa.field(each.name, each.type) for each in structs.type])
        of_table = pa.Table.from_batches(
            [pa.RecordBatch.from_arrays(each, schema=schema) for each in fields], schema
        )
        others = rows.remove_column(self._row).rename_columns(
            [n.lower() for n in self.others.names]
        )
        if self._acts:
            return of_table, others
        says = pa.chunked_array([pa.repeat(False, rows.num_rows)])
        for name in ("data", "action"):
            if name in others.column_names:
                says = pc.call_function("or", [says, pc.call_function("is_valid", [others[name]])])
        idle = rows.filter(
            pc.call_function("invert", [pc.call_function("or", [says, there])])
        ).num_rows
        if idle:
            raise PgQueueError(
                f"column row is null in {idle} of {rows.num_rows} rows that have neither data nor "
                "an action",
                hint="filter these rows out",
                sqlstate=NOT_ALLOWED,
            )
        return of_table, others.filter(says)

    def store(self, rows: pa.Table, sink: str, batch: int) -> int:
        """Copy rows, on an executor; returns the number of their chunk."""
        with naming_the_column(rows):
            return with_backoff(lambda: self._store(rows, sink, batch), self._url, self._patience)

    def _store(self, rows: pa.Table, sink: str, batch: int) -> int:
        import pyarrow as pa

        chunk = secrets.randbits(63)
        try:
            with kept_connection(self._url, patience=0) as conn, conn.cursor() as cursor:
                sql = "select pgqueue.open_table_write($1, $2, $3, $4::text::jsonb)"
                ((staged,),) = call(cursor, sql, (self.write_no, sink, batch, self._given))
                conn.commit()  # other tasks wait for the table of staged rows
            with kept_connection(self._url, patience=0) as conn, conn.cursor() as cursor:
                named = rows.rename_columns([f"c{n}" for n in range(1, rows.num_columns + 1)])
                chunks = pa.repeat(pa.scalar(chunk, pa.int64()), rows.num_rows)
                cursor.adbc_ingest(
                    staged,
                    named.append_column("chunk", chunks),
                    mode="append",
                    db_schema_name="pgqueue",
                )
                conn.commit()
                return chunk
        except Exception as error:
            raise (self._unfit(error) or error) from None

    def apply(self, statements: Statements, staged: StagedRows, sink: str, batch: int) -> bool:
        """Write staged rows, in the driver's transaction; returns whether this call did it."""
        return statements.row(
            "select pgqueue.apply_table_batch(%s, %s, %s, %s, %s::bigint[], %s)",
            [staged.write_no, sink, batch, staged.table, list(staged.chunks), staged.rows],
        )[0]

    @contextmanager
    def refusals(self, table: str) -> Iterator[None]:
        """Around the driver's transaction: an error of the table names it, without its rows."""
        try:
            yield
        except (psycopg.Error, PgQueueError) as error:
            code = sqlstate_of(error) or ""
            # Data, constraints, keys that are there twice, and what triggers raise.
            if not code.startswith(("21", "22", "23", "44", "P0")):
                raise
            said = error.message if isinstance(error, PgQueueError) else Said.by(error).message
            hint = "nothing was written: correct the rows or the table, and start the query again"
            if code.startswith("21"):
                hint = "a batch has one row for each key, or option sequenceBy says which is last"
            elif code == TEXT_CUT:
                hint = "make the column wider; option allowRounding lets digits and times round"
            raise PgQueueError(
                f"table {table} refused the batch: {said}", hint=hint, sqlstate=code
            ) from None

    def _unfit(self, error: Exception) -> PgQueueError | None:
        """The error that names the column, where a staged column refused a value."""
        if (known := translate(error)) is not None:
            return known
        said, code = Said.by(error), sqlstate_of(error)
        place = re.search(r"\bc(\d+)\b", said.column or said.context or "")
        name = self._names[int(place[1]) - 1] if place else None
        if code == "23502" and name:
            return PgQueueError(
                f"column {name} is null in a row, but keys and sequences must not be null",
                hint=f"filter these rows out: where {name} is not null",
                sqlstate=NOT_ALLOWED,
            )
        if code in ("22021", "22P05"):
            return PgQueueError(
                f"a row does not fit table {self.name}: {said.message}"
                + (f" (column {name})" if name else ""),
                hint="text in Postgres must be UTF-8 without NUL characters",
                sqlstate=UNFIT_DATA,
            )
        return None


class RowsOfTask:
    """The rows that a task has for a table; none are staged for a batch that is repeated."""

    def __init__(self, target: TableWriter, sink: str, batch: int, is_repeated: bool):
        self._target, self._sink, self._batch = target, sink, batch
        self._is_repeated = is_repeated
        self._chunks: list[int] = []
        self._rows = 0

    def add(self, read: pa.Table) -> pa.Table:
        """Stage the table's rows; returns those of messages and actions."""
        rows, others = self._target.split(read)
        if rows.num_rows and not self._is_repeated:
            # After a broken connection the rows are staged again, under another number.
            self._chunks.append(self._target.store(rows, self._sink, self._batch))
            self._rows += rows.num_rows
        return others

    def staged(self) -> StagedRows:
        """What the driver needs to write them."""
        about = (self._target.write_no, self._target.name)
        return StagedRows(*about, tuple(self._chunks), self._rows, self._is_repeated)


def _refuse_messages(options: SinkOptions) -> None:
    for name in ("stream", "consumers", "action", "consumer"):
        if getattr(options, name) is not None:
            raise PgQueueError(
                f"option {name} is for messages, but all columns belong to table {options.table}",
                hint="remove it; or put the table's columns into a struct column row: "
                "struct(id, amount) as row",
            )


def drop(statements: Statements, writes: set[int]) -> None:
    """Drop staged rows that are no longer needed, without retries or errors: `maintain` drops what
    is left.
    """
    with suppress(Exception):
        for write_no in writes:
            statements.row("select pgqueue.drop_table_write(%s)", [write_no])


def all_staged(tasks: Iterable[StagedRows]) -> StagedRows | None:
    """What all tasks of a batch have staged; None where no rows are for a table."""
    found = [task for task in tasks if task.chunks]
    if not found:
        return None
    chunks = tuple(chunk for task in found for chunk in task.chunks)
    return StagedRows(found[0].write_no, found[0].table, chunks, sum(task.rows for task in found))
