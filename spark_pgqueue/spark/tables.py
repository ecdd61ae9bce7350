"""The tables of `spark.read`: their columns, and where the columns come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_pgqueue import nearest
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.columns import ABOUT
from spark_pgqueue.spark.consumer import Stream
from spark_pgqueue.spark.options import TABLE_NAMES, TableOptions

HELD = ("key", "data", "headers", "inserted_at")
"""The columns that are stored with a message: to have them, the message must be read."""

_LONG, _INT, _STRING, _TIME = LongType(), IntegerType(), StringType(), TimestampType()
_NAMES = ArrayType(StringType(), containsNull=True)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: the column's name, also in SQL.
        type: the column's type; for `data`, the type for a stream of text.
        help: the meaning of the column, and of null in it.
        nullable: whether the column may be null.
        usual: whether the table has the column when option columns is not given.
    """

    name: str
    type: DataType
    help: str
    nullable: bool = True
    usual: bool = True


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        rows: the meaning of a row.
        columns: all columns, in order.
        shared_out: whether executors look up parts of the table (`pgqueue.scan_parts`).
        of_messages: whether a row is a message, so that the numbers come as ranges.
        outlives: whether rows stay when their messages are deleted.
    """

    rows: str
    columns: tuple[Column, ...]
    shared_out: bool = False
    of_messages: bool = True
    outlives: bool = False

    def __getitem__(self, name: str) -> Column:
        return next(each for each in self.columns if each.name == name)


_SEQ = Column("seq", _LONG, ABOUT["seq"], nullable=False)
_CONSUMER = Column("consumer", _STRING, "the consumer's name", nullable=False)
_PRIORITY = Column("priority", _INT, ABOUT["priority"], nullable=False)
_DELIVER_COUNT = Column("deliver_count", _INT, "how often it was delivered", nullable=False)
_OWNER = Column("owner", _STRING, "who has it, or had it last: an application_name")
_ERROR = Column("error", _STRING, "why it failed last, as the worker said")
_PUBLISHED_AT = Column("published_at", _TIME, "when it became visible", nullable=False)
_DELIVER_AT = Column("deliver_at", _TIME, "not delivered before")
_EXPIRES_AT = Column("expires_at", _TIME, "not delivered after")
_TO = Column("consumers", _NAMES, "to these alone; null: to all")
_CLAIMED_AT = Column("claimed_at", _TIME, "when it was claimed", nullable=False)
_LEASE_UNTIL = Column("lease_until", _TIME, "until when other claimers leave it to its owner")

_OF_THE_VIEW = "as in the view"


def _held(deleted: bool) -> tuple[Column, ...]:
    """The columns with the content of messages, which may be deleted."""
    return (
        Column("key", _STRING, ABOUT["key"]),
        Column("data", _STRING, ABOUT["data"], nullable=deleted),
        Column("headers", MapType(StringType(), StringType()), ABOUT["headers"]),
    )


def _sent(deleted: bool) -> Column:
    return Column("inserted_at", _TIME, ABOUT["inserted_at"], nullable=deleted)


def _is_unusual(column: Column) -> Column:
    return replace(column, usual=False)


TABLES = {
    "messages": Table(
        "published message, to whomever it was sent",
        (
            _SEQ,
            *_held(deleted=False),
            _PRIORITY,
            _sent(deleted=False),
            *map(_is_unusual, (_PUBLISHED_AT, _DELIVER_AT, _EXPIRES_AT, _TO)),
        ),
    ),
    "pending": Table(
        "message that the consumer has not finished",
        (
            _CONSUMER,
            _SEQ,
            *_held(deleted=False),
            Column(
                "state",
                _STRING,
                "new, ready, delayed, waiting, claimed or unfiltered",
                nullable=False,
            ),
            _PRIORITY,
            _DELIVER_COUNT,
            Column("not_visible_until", _TIME, "until when it is delayed"),
            _OWNER,
            _LEASE_UNTIL,
            _ERROR,
            _sent(deleted=False),
        ),
    ),
    "claimed": Table(
        "message in a live claim",
        (
            _CONSUMER,
            _SEQ,
            *_held(deleted=False),
            Column("claim_id", _LONG, "the claim's number", nullable=False),
            _OWNER,
            _CLAIMED_AT,
            replace(_LEASE_UNTIL, nullable=False),
            _PRIORITY,
            _DELIVER_COUNT,
            _ERROR,
            _sent(deleted=False),
        ),
    ),
    "dead": Table(
        "dead letter",
        (
            _CONSUMER,
            _SEQ,
            *_held(deleted=True),
            Column("reason", _STRING, "a short reason for its death"),
            _ERROR,
            Column("details", _STRING, "what was said beside, as JSON"),
            _PRIORITY,
            _DELIVER_COUNT,
            _OWNER,
            Column("died_at", _TIME, "when it died", nullable=False),
            _sent(deleted=True),
        ),
        shared_out=True,
        outlives=True,
    ),
    "archived": Table(
        "acknowledged message, of consumers with `keep_history`; one that was acknowledged twice "
        "comes twice",
        (
            _CONSUMER,
            _SEQ,
            *_held(deleted=True),
            Column("result", _STRING, "what the worker said, as JSON"),
            _DELIVER_COUNT,
            _OWNER,
            _CLAIMED_AT,
            Column("done_at", _TIME, "when it was acknowledged", nullable=False),
            _sent(deleted=True),
        ),
        shared_out=True,
        outlives=True,
    ),
    "publications": Table(
        "publication, or part of one whose messages differ in priority or time",
        (
            Column("publication_id", _LONG, "its number", nullable=False),
            Column("part", _INT, "which part of it", nullable=False),
            _PUBLISHED_AT,
            _DELIVER_AT,
            _EXPIRES_AT,
            _PRIORITY,
            Column("message_count", _LONG, "how many messages it has", nullable=False),
            Column("first_seq", _LONG, "the lowest of their numbers", nullable=False),
            Column("last_seq", _LONG, "the highest", nullable=False),
            _TO,
        ),
        shared_out=True,
        of_messages=False,
    ),
    "stats": Table(
        "consumer, of the stream or of all: the view [consumer_stats]"
        "(../../sql/guide/reference.md#consumer_stats)",
        (
            Column("stream", _STRING, "the stream's name", nullable=False),
            _CONSUMER,
            Column("ordering", _STRING, "none, key or stream", nullable=False),
            *(
                Column(name, _LONG, _OF_THE_VIEW, nullable=False)
                for name in ("new", "ready", "delayed", "waiting", "claimed", "dead", "backlog")
            ),
            Column("claims", _LONG, _OF_THE_VIEW, nullable=False),
            Column("expired", _LONG, _OF_THE_VIEW, nullable=False),
            Column("next_expiry", _TIME, _OF_THE_VIEW),
            Column("skipped", _LONG, _OF_THE_VIEW, nullable=False),
            Column("paused", BooleanType(), _OF_THE_VIEW, nullable=False),
            Column("taken", _LONG, _OF_THE_VIEW, nullable=False),
            Column("settled", _LONG, _OF_THE_VIEW, nullable=False),
            Column("oldest_at", _TIME, _OF_THE_VIEW),
            Column("oldest_claim_at", _TIME, _OF_THE_VIEW),
            Column("estimated", BooleanType(), _OF_THE_VIEW, nullable=False),
            Column("stuck", _LONG, _OF_THE_VIEW, nullable=False),
            Column("status", _STRING, _OF_THE_VIEW, nullable=False),
            Column("because", _STRING, _OF_THE_VIEW, nullable=False),
            Column("max_backlog", _LONG, _OF_THE_VIEW),
            Column("attended_at", _TIME, _OF_THE_VIEW),
        ),
        of_messages=False,
    ),
}


@dataclass(frozen=True)
class Where:
    """Option where, as the database has read it.

    Attributes:
        condition: the expression, as to be asked of a row that has the columns of the table.
        columns: the columns that it names.
    """

    condition: str
    columns: tuple[str, ...]


def find_for(options: TableOptions) -> tuple[Stream | None, Where | None]:
    """The stream of a table, None for all streams, and option where; the consumer exists.

    Raises:
        PgQueueError: PQ001 or PQ002 when the stream or the consumer does not exist; PQ003 for an
            option where that is not allowed; PQ011 for another schema version; or Postgres cannot
            be reached.
    """
    # No patience: this is load(), and a user who mistyped the host waits for the error.
    statements = Statements(options.url, patience=0, names=TABLE_NAMES.get)
    stream, where = None, None
    try:
        if options.stream is None:
            statements.row("select pgqueue.schema_version()")
        elif options.consumer is None:
            found = "select stream_id, kind from pgqueue.open_stream(%s)"
            stream = Stream(*statements.row(found, [options.stream]))
        else:
            found = "select stream_id, kind from pgqueue.open_consumer(%s, %s)"
            stream = Stream(*statements.row(found, [options.stream, options.consumer]))
        if options.where is not None:
            found = "select condition, columns from pgqueue.scan_where(%s, %s)"
            names = [each.name for each in TABLES[options.table].columns]
            condition, columns = statements.row(found, [options.where, names])
            where = Where(condition, tuple(columns))
        return stream, where
    finally:
        statements.close()


def table_schema(options: TableOptions, kind: str | None) -> StructType:
    """The columns that are read.

    Args:
        options: the options of the table.
        kind: the stream's kind: text, json or binary; None for all streams.

    Raises:
        PgQueueError: option columns names an unknown column, or a column twice.
    """
    table = TABLES[options.table]
    names = options.columns
    if names is None:
        names = tuple(
            each.name
            for each in table.columns
            if each.usual and (options.include_headers or each.name != "headers")
        )
    _check_names(names, options.table)
    return StructType(
        [
            StructField(
                name,
                BinaryType() if name == "data" and kind == "binary" else table[name].type,
                table[name].nullable,
            )
            for name in names
        ]
    )


def _check_names(names: Sequence[str], table: str) -> None:
    allowed = [each.name for each in TABLES[table].columns]
    for name in names:
        if name not in allowed:
            raise PgQueueError(
                f"option columns: table {table} has no column {name}",
                hint=nearest.hint(name, allowed),
            )
        if names.count(name) > 1:
            raise PgQueueError(f"option columns: column {name} is there twice")


def check_table_schema(schema: StructType, expected: StructType) -> None:
    """Refuse a schema of the user that is not the table's.

    Raises:
        PgQueueError: it is another schema.
    """

    def types(each: StructType) -> list[tuple]:
        return [(field.name, field.dataType) for field in each.fields]

    if types(schema) != types(expected):
        raise PgQueueError(
            f"the schema of a table cannot be chosen: given {schema.simpleString()}, must be "
            f"{expected.simpleString()}",
            hint="remove schema(...) from read, and use option columns, or select() afterwards",
        )
