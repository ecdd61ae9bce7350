"""The options of `spark.read`: which table of a queue, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.checking import (
    CONNECTION,
    INCLUDE_HEADERS,
    MAX_CONNECTIONS,
    MAX_RECORDS_PER_PARTITION,
    MIN_PARTITIONS,
    RETRY_TIMEOUT,
    Connecting,
    check_partitions,
    option,
    options_of,
    parse,
    use,
)
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS
from spark_pgqueue.spark.options.stream_source import STREAM_SOURCE_OPTIONS
from spark_pgqueue.spark.options.values import BOOLEAN, a_name, boolean, names, one_of

REQUIRED, OPTIONAL, REFUSED = "required", "optional", "refused"

CONSUMER_OF = {
    "messages": REFUSED,
    "pending": REQUIRED,
    **dict.fromkeys(("claimed", "dead", "archived"), OPTIONAL),
    "publications": REFUSED,
    "stats": OPTIONAL,
}
"""The tables, and whether option consumer goes with each."""


@dataclass(frozen=True, kw_only=True)
class TableOptions(Connecting):
    """The options of a table, parsed."""

    table: str = option(
        one_of(*CONSUMER_OF),
        "messages, pending, claimed, dead, archived, publications or stats",
        "The table of a queue to read. (For df.write and df.writeStream, table names the table to "
        "write.)",
        required=True,
    )
    stream: str | None = option(
        a_name,
        "a stream's name",
        "The stream of the table. All tables but stats need it. By default all streams.",
    )
    consumer: str | None = option(
        a_name,
        "a consumer's name",
        "The consumer of the table. pending needs it; messages and publications refuse it. By "
        "default all consumers of the stream.",
        needs=("stream",),
    )
    columns: tuple[str, ...] | None = option(
        names,
        "names of columns of the table, with commas between them",
        "Read only these columns. The messages themselves are read from the database only for key, "
        "data, headers and inserted_at.",
    )
    include_headers: bool = use(
        INCLUDE_HEADERS,
        help="Whether there is a column headers. The option has no effect with columns.",
    )
    where: str | None = option(
        a_name,
        "an expression of SQL over columns of the table",
        "Read only the rows for which the database finds this true. The expression may have any "
        "column of the table, literals, operators, types, and functions of Postgres that only "
        "compute. By default all rows.",
    )
    min_partitions: int | None = use(MIN_PARTITIONS)
    max_records_per_partition: int | None = use(MAX_RECORDS_PER_PARTITION)
    max_connections: int | None = use(MAX_CONNECTIONS)
    fail_on_data_loss: bool = option(
        boolean,
        BOOLEAN,
        "Fail when messages were deleted after the query was planned and before it read them; "
        "false logs a warning. Rows of dead and archived then lack only the content of the "
        "message.",
        default=True,
    )
    retry_timeout: timedelta = use(RETRY_TIMEOUT)


def parse_table(given: Mapping[str, str]) -> TableOptions:
    """Check and convert the options of `spark.read` with a table."""
    if found := _of_a_stream(given):
        raise PgQueueError(
            f"option {found} is for reading a stream, but option table reads a table",
            hint=f"remove {found}, or omit table to read the stream",
        )
    options = TableOptions(**parse(given, TABLE_OPTIONS, "batch reader"))
    check_partitions(options.min_partitions, options.max_connections)
    if options.stream is None and (options.table != "stats" or options.consumer is not None):
        of = "a consumer" if options.table == "stats" else f"table {options.table}"
        raise PgQueueError(
            f"option stream is missing: {of} is of a stream",
            hint='add option("stream", ...): a stream\'s name; without it there is only stats',
        )
    rule = CONSUMER_OF[options.table]
    if rule == REQUIRED and options.consumer is None:
        raise PgQueueError(
            f"option consumer is missing: table {options.table} shows one consumer",
            hint='add option("consumer", ...): a consumer\'s name',
        )
    if rule == REFUSED and options.consumer is not None:
        raise PgQueueError(
            f"option consumer is given, but table {options.table} is the same for all consumers",
            hint='remove it; option("table", "pending") shows the messages of a consumer',
        )
    return options


def as_pending(given: Mapping[str, str], columns: list[str]) -> TableOptions:
    """The options of table pending, from those of `readStream` with a consumer, which
    `parse_source` has checked, and the columns of the source.
    """
    if found := _of_a_stream(given):
        raise PgQueueError(
            f"option {found} has no meaning for spark.read, which claims nothing",
            hint="remove it, or use readStream",
        )
    return parse_table({**given, "table": "pending", "columns": ",".join(columns)})


def _of_a_stream(given: Mapping[str, str]) -> str | None:
    """The first given option that only readers of streams have, with a consumer or without."""
    names = {name.lower() for name in given} - {option.name.lower() for option in TABLE_OPTIONS}
    readers = (*STREAM_SOURCE_OPTIONS, *SOURCE_OPTIONS)
    return next((option.name for option in readers if option.name.lower() in names), None)


TABLE_OPTIONS = (*CONNECTION, *options_of(TableOptions))

TABLE_NAMES = {
    "p_stream": "option stream",
    "p_consumer": "option consumer",
    "p_where": "option where",
}
"""The options and columns that set arguments of SQL functions, for errors."""
