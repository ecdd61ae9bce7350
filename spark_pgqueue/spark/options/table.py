"""The options of `spark.read`: which table of a queue, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.checking import (
    CONNECTION,
    MAX_CONNECTIONS,
    MAX_RECORDS_PER_PARTITION,
    MIN_PARTITIONS,
    RETRY_TIMEOUT,
    Option,
    check_partitions,
    parse,
)
from spark_pgqueue.spark.options.cursor import CURSOR_OPTIONS
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS
from spark_pgqueue.spark.options.values import BOOLEAN, a_name, boolean, names

REQUIRED, OPTIONAL, REFUSED = "required", "optional", "refused"

CONSUMER_OF = {
    "messages": REFUSED,
    "pending": REQUIRED,
    "claimed": OPTIONAL,
    "dead": OPTIONAL,
    "archived": OPTIONAL,
    "publications": REFUSED,
    "stats": OPTIONAL,
}
"""The tables, and whether they are of a consumer."""


@dataclass(frozen=True)
class TableOptions:
    """The options of a table, parsed. The fields are those of `TABLE_OPTIONS`."""

    url: str | None = field(repr=False)  # it may hold a password
    table: str
    stream: str | None
    consumer: str | None
    columns: tuple[str, ...] | None
    include_headers: bool
    pushdown: bool
    min_partitions: int | None
    max_records_per_partition: int | None
    max_connections: int | None
    fail_on_data_loss: bool
    retry_timeout: timedelta


def names_table(given: Mapping[str, str]) -> bool:
    """Whether options are of a table."""
    return any(name.lower() == "table" for name in given)


def parse_table(given: Mapping[str, str]) -> TableOptions:
    """Check and convert the options of `spark.read` with a table.

    Raises:
        PgQueueError: an option is unknown, missing or malformed, or two do not fit together.
    """
    if found := _of_a_stream(given):
        raise PgQueueError(
            f"option {found} is for reading a stream, and a table is looked into as it is",
            hint=f"remove {found}; or leave table out, to read the stream",
        )
    options = TableOptions(**parse(given, TABLE_OPTIONS, "batch reader"))
    check_partitions(options.min_partitions, options.max_connections)
    if options.stream is None and options.table != "stats":
        raise PgQueueError(
            f"option stream is missing: table {options.table} is of a stream",
            hint='add option("stream", ...): a stream\'s name; without it there is only stats',
        )
    if options.consumer is not None and options.stream is None:
        raise PgQueueError(
            "option stream is missing: a consumer is of a stream",
            hint='add option("stream", ...): a stream\'s name',
        )
    rule = CONSUMER_OF[options.table]
    if rule == REQUIRED and options.consumer is None:
        raise PgQueueError(
            f"option consumer is missing: table {options.table} is what one consumer has",
            hint='add option("consumer", ...): a consumer\'s name',
        )
    if rule == REFUSED and options.consumer is not None:
        raise PgQueueError(
            f"option consumer is given, but table {options.table} is the stream's, whoever reads "
            "it",
            hint='remove it, or, for what a consumer has, use option("table", "pending")',
        )
    return options


def as_pending(given: Mapping[str, str], columns: list[str]) -> TableOptions:
    """The options of table pending, from those of `readStream` with a consumer.

    Args:
        given: they were checked by `parse_source`.
        columns: of the source.

    Raises:
        PgQueueError: one of them says how messages are claimed.
    """
    if found := _of_a_stream(given):
        raise PgQueueError(
            f"option {found} has no meaning for spark.read, which claims nothing",
            hint="remove it, or use readStream",
        )
    more = {"table": "pending", "columns": ",".join(columns)}
    return parse_table({**given, **more})


def _of_a_stream(given: Mapping[str, str]) -> str | None:
    """The first of the options that only those have who read a stream, with a consumer or not."""
    names = {name.lower() for name in given} - {option.name.lower() for option in TABLE_OPTIONS}
    readers = (*CURSOR_OPTIONS, *SOURCE_OPTIONS)
    return next((option.name for option in readers if option.name.lower() in names), None)


def a_table(text: str) -> str:
    """The name of a table. Raises ValueError."""
    name = text.strip().lower()
    if name not in CONSUMER_OF:
        raise ValueError
    return name


TABLE_OPTIONS = (
    *CONNECTION,
    Option(
        "table",
        a_table,
        "messages, pending, claimed, dead, archived, publications or stats",
        None,
        "What to read.",
        required=True,
    ),
    Option(
        "stream",
        a_name,
        "a stream's name",
        None,
        "The stream to look into. All tables but stats need it. By default all streams.",
    ),
    Option(
        "consumer",
        a_name,
        "a consumer's name",
        None,
        "Whose: pending needs it, and messages and publications have none. By default those of all "
        "consumers of the stream.",
        needs=("stream",),
    ),
    Option(
        "columns",
        names,
        "names of columns of the table, with commas between them",
        None,
        "Read these alone. What messages hold is not read from the database unless one of "
        "key, data, headers and inserted_at is wanted.",
    ),
    Option(
        "includeHeaders",
        boolean,
        BOOLEAN,
        True,
        "Whether there is a column headers. It has no effect with columns.",
    ),
    Option(
        "pushdown",
        boolean,
        BOOLEAN,
        False,
        "Let the database filter by seq, key, inserted_at, and by what is known without reading a "
        "message, such as consumer, reason and state. Needs "
        "spark.sql.python.filterPushdown.enabled=true in the session.",
    ),
    MIN_PARTITIONS,
    MAX_RECORDS_PER_PARTITION,
    MAX_CONNECTIONS,
    Option(
        "failOnDataLoss",
        boolean,
        BOOLEAN,
        True,
        "Fail when messages were deleted between the look at the queue and their reading; false "
        "logs a warning. Of dead and archived ones only what they held is missing then.",
    ),
    RETRY_TIMEOUT,
)

# What the user calls the arguments of SQL functions.
TABLE_NAMES = {"p_stream": "option stream", "p_consumer": "option consumer"}
