"""The tables of `spark.read`: their columns, where the columns come from, and option where.

`pgqueue.scan_where` has checked the condition of option where. It is evaluated in statements of the
user's role. `kept_connection` pins their search path, so that the condition finds the functions and
operators of Postgres and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import types as t

from spark_pgqueue import nearest
from spark_pgqueue.postgres.adbc import call
from spark_pgqueue.postgres.errors import PgQueueError, Said, sqlstate_of
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.columns import ABOUT, Stream
from spark_pgqueue.spark.options.table import TABLE_NAMES, TableOptions
from spark_pgqueue.spark.partitions import KnownRange

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

HELD = ("key", "data", "headers", "inserted_at")
"""The columns that are stored with a message: to have them, the message must be read."""

_TYPES: dict[str, t.DataType] = {
    "int8": t.LongType(),
    "int4": t.IntegerType(),
    "text": t.StringType(),
    "bytea": t.BinaryType(),
    "timestamptz": t.TimestampType(),
    "bool": t.BooleanType(),
    "jsonb": t.MapType(t.StringType(), t.StringType()),
    "text[]": t.ArrayType(t.StringType(), containsNull=True),
}

_OF_THE_VIEW = "as in the view"

_COLUMNS = {
    "seq": ("int8", ABOUT["seq"]),
    "key": ("text", ABOUT["key"]),
    "data": ("text", ABOUT["data"]),
    "headers": ("jsonb", ABOUT["headers"]),
    "inserted_at": ("timestamptz", ABOUT["inserted_at"]),
    "priority": ("int4", ABOUT["priority"]),
    "published_at": ("timestamptz", "when it became visible"),
    "deliver_at": ("timestamptz", "not delivered before this time"),
    "expires_at": ("timestamptz", "not delivered after this time"),
    "consumers": ("text[]", "published only to these consumers; null: to all"),
    "stream": ("text", ABOUT["stream"]),
    "consumer": ("text", "the consumer's name"),
    "state": ("text", "new, ready, delayed, waiting, claimed or unfiltered"),
    "deliver_count": ("int4", "the number of deliveries"),
    "not_visible_until": ("timestamptz", "the end of its delay"),
    "claim_id": ("int8", "the claim's number"),
    "owner": ("text", "the current or last worker: an application_name"),
    "claimed_at": ("timestamptz", "when it was claimed"),
    "lease_until": ("timestamptz", "the end of its lease: then other workers may take it over"),
    "error": ("text", "the last error, as reported by the worker"),
    "reason": ("text", "why it was dead-lettered, in short"),
    "details": ("text", "further details, as JSON"),
    "died_at": ("timestamptz", "when it was dead-lettered"),
    "result": ("text", "the result from the worker, as JSON"),
    "done_at": ("timestamptz", "when it was acknowledged"),
    "publication_id": ("int8", "the publication's number"),
    "part": ("int4", "the number of the part"),
    "message_count": ("int8", "the number of messages"),
    "first_seq": ("int8", "the lowest message number"),
    "last_seq": ("int8", "the highest message number"),
    "ordering": ("text", "none, key or stream"),
    **dict.fromkeys(("paused", "estimated"), ("bool", _OF_THE_VIEW)),
    **dict.fromkeys(("status", "because"), ("text", _OF_THE_VIEW)),
    **dict.fromkeys(
        ("next_expiry", "oldest_at", "oldest_claim_at", "attended_at"),
        ("timestamptz", _OF_THE_VIEW),
    ),
}
"""The type of each column in SQL, and its meaning."""


@dataclass(frozen=True)
class Table:
    """A table."""

    rows: str  # the meaning of a row
    names: str  # all columns, in order; those with a question mark may be null
    asked_for: tuple[str, ...] = ()  # those that are there only when option columns names them
    # whether executors query shares of the table (`pgqueue.scan_bounds`)
    shared_out: bool = False
    of_messages: bool = True  # whether a row is a message, so that the numbers come as ranges
    outlives: bool = False  # whether rows stay when their messages are deleted

    @property
    def columns(self) -> dict[str, bool]:
        """The names of all columns, in order, and whether they may be null."""
        return {name.rstrip("?"): name.endswith("?") for name in self.names.split()}

    def schema(self, names: Sequence[str], kind: str) -> t.StructType:
        """Some of the columns, for a stream of this kind."""
        columns = self.columns
        return t.StructType(
            [t.StructField(n, _TYPES[column(n, kind)[0]], columns[n]) for n in names]
        )


def column(name: str, kind: str = "text") -> tuple[str, str]:
    """The type of a column in SQL, for a stream of this kind, and its meaning."""
    type, about = _COLUMNS.get(name, ("int8", _OF_THE_VIEW))
    return "bytea" if (name, kind) == ("data", "binary") else type, about


TABLES = {
    "messages": Table(
        "published message, for all consumers",
        "seq key? data headers? priority inserted_at published_at deliver_at? expires_at?"
        " consumers?",
        asked_for=("published_at", "deliver_at", "expires_at", "consumers"),
    ),
    "pending": Table(
        "message that the consumer has not finished",
        "consumer seq key? data headers? state priority deliver_count not_visible_until? owner?"
        " lease_until? error? inserted_at",
    ),
    "claimed": Table(
        "message in a live claim",
        "consumer seq key? data headers? claim_id owner? claimed_at lease_until priority"
        " deliver_count error? inserted_at",
    ),
    "dead": Table(
        "dead letter",
        "consumer seq key? data? headers? reason? error? details? priority deliver_count owner?"
        " died_at inserted_at?",
        shared_out=True,
        outlives=True,
    ),
    "archived": Table(
        "acknowledged message, of consumers with `keep_history`; one that was acknowledged twice "
        "has two rows",
        "consumer seq key? data? headers? result? deliver_count owner? claimed_at done_at"
        " inserted_at?",
        shared_out=True,
        outlives=True,
    ),
    "publications": Table(
        "publication, or part of one whose messages differ in priority or time",
        "publication_id part published_at deliver_at? expires_at? priority message_count first_seq"
        " last_seq consumers?",
        shared_out=True,
        of_messages=False,
    ),
    "stats": Table(
        "consumer, of the stream or of all: the view [consumer_stats]"
        "(../../sql/guide/reference.md#consumer_stats)",
        "stream consumer ordering new ready delayed waiting claimed dead backlog claims expired"
        " next_expiry? skipped paused taken settled oldest_at? oldest_claim_at? estimated stuck"
        " status because max_backlog? attended_at?",
        of_messages=False,
    ),
}


@dataclass(frozen=True)
class Where:
    """Option where, as the database has read it."""

    condition: str  # the expression, over the columns of the table
    columns: tuple[str, ...]  # the columns that it names


def find_for(options: TableOptions) -> tuple[Stream, Where | None]:
    """The stream of a table (of stats, perhaps none), and option where; the consumer exists.

    Raises:
        PgQueueError: the stream or the consumer does not exist; or option where is not allowed.
    """
    # No patience: this is load(), and a user who mistyped the host waits for the error.
    names = [each for each in (options.stream, options.consumer) if each is not None]
    found = (
        "select 0, 'text' from pgqueue.schema_version()",  # of all streams
        "select stream_id, kind from pgqueue.open_stream(%s)",
        "select stream_id, kind from pgqueue.open_consumer(%s, %s)",
    )
    where = None
    with closing(Statements(options.url, patience=0, names=TABLE_NAMES.get)) as statements:
        stream = Stream(*statements.row(found[len(names)], names))
        if options.where is not None:
            condition, columns = statements.row(
                "select condition, columns from pgqueue.scan_where(%s, %s)",
                [options.where, list(TABLES[options.table].columns)],
            )
            where = Where(condition, tuple(columns))
        return stream, where


def table_schema(options: TableOptions, kind: str) -> t.StructType:
    """The columns that are read, for a stream of this kind.

    Raises:
        PgQueueError: option columns names an unknown column, or a column twice.
    """
    table = TABLES[options.table]
    left_out = table.asked_for if options.include_headers else (*table.asked_for, "headers")
    names = options.columns or [name for name in table.columns if name not in left_out]
    for name in names:
        if name not in table.columns:
            raise PgQueueError(
                f"option columns: table {options.table} has no column {name}",
                hint=nearest.hint(name, list(table.columns)),
            )
        if names.count(name) > 1:
            raise PgQueueError(f"option columns: column {name} occurs twice")
    return table.schema(names, kind)


_CAUSES = ("22", "42601", "42703", "42725", "42804", "42846", "42883")
"""The SQLSTATEs of errors of values, of syntax and of types."""

_OTHER_CAUSES = re.compile("cancel|terminat|time ?out|recovery|shutting down", re.IGNORECASE)


@contextmanager
def blamed_on(where: str | None) -> Iterator[None]:
    """Name option where, if there is one, in an error that only the condition explains.

    Raises:
        PgQueueError: the condition is no expression, compares what cannot be compared, or fails for
            the values of a row. Other errors are raised as they are.
    """
    try:
        yield
    except Exception as error:
        sqlstate = sqlstate_of(error) or ""
        said = Said.by(error).message
        # Arrow raises an OSError without a code for an error of the server while rows are fetched.
        fetched = re.search("PGRES_FATAL_ERROR.{0,1000}?: ERROR: +(.*)", said)
        is_cause = sqlstate.startswith(_CAUSES) or (fetched and not _OTHER_CAUSES.search(said))
        if where is None or isinstance(error, PgQueueError) or not is_cause:
            raise
        said = fetched[1] if fetched else said  # no detail, which may quote a message
        raise PgQueueError(f"option where is {where!r}: {said}", sqlstate=sqlstate) from None


def check_types(cursor: dbapi.Cursor, where: Where, kind: str) -> None:
    """Evaluate the condition for a row of nulls, so that an error comes before the first task."""
    nulls = (f"null::{column(name, kind)[0]} as {name}" for name in where.columns)
    row = ", ".join(["1 as one", *nulls])
    call(cursor, f"select 1 from (select {row}) m where ({where.condition})")


def messages_sql(
    table: Table,
    where: Where,
    stream: Stream,
    ranges: Sequence[KnownRange],
    known: pa.Table,
    reads: bool,
) -> str:
    """The from clause for the messages of ranges that pass a condition, in order: m, the messages,
    with the number `no` of their range. `known` has the known columns of the ranges; `reads` is
    whether the content of messages is needed, for the condition or otherwise.
    """
    names = [name for name in where.columns if name in known.column_names]
    values = known.select(["lo", *names]).take([each.no for each in ranges]).to_pylist()
    rows = [more | each._asdict() for each, more in zip(ranges, values, strict=True)]
    types = [f"{name} {column(name)[0]}" for name in names]
    # Texts of users come as digits: no setting of the session changes how these are read.
    digits = json.dumps(rows, default=datetime.isoformat).encode().hex()
    source = (
        f"json_to_recordset(convert_from(decode('{digits}', 'hex'), 'UTF8')::json)"
        f" as r ({', '.join(['lo int8', 'hi int8', 'no int4', *types])})"
    )
    # The bounds of all ranges let the planner leave out the other segments of the stream.
    lo, hi = min(each.lo for each in ranges), max(each.hi for each in ranges)
    messages = f"select * from pgqueue.messages_{stream.stream_id} where seq >= {lo} and seq < {hi}"
    columns = ["r.no", *(f"r.{name}" for name in names)]
    if reads:
        data = "x.data_bytes" if stream.kind == "binary" else "x.data"
        columns += ["x.key", "x.headers", "x.inserted_at", "x.data_bytes", f"{data} as data"]
    if reads and not table.outlives:
        columns.append("x.seq")
        source += f" cross join lateral ({messages} and seq >= r.lo and seq < r.hi order by seq) x"
    else:
        columns.append("s.seq")
        source += " cross join lateral generate_series(r.lo, r.hi - 1) s (seq)"
        if reads:
            source += f" left join lateral ({messages} and seq = s.seq order by seq) x on true"
    return f"(select {', '.join(columns)} from {source}) m where ({where.condition})"
