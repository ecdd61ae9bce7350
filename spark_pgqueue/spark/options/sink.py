"""The options of the sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.checking import (
    BATCH,
    CONNECTION,
    RETRY_TIMEOUT,
    STREAMING,
    Connecting,
    option,
    options_of,
    parse,
    use,
)
from spark_pgqueue.spark.options.values import (
    ACTIONS,
    a_name,
    action,
    compared,
    names,
    not_negative,
)


@dataclass(frozen=True, kw_only=True)
class SinkOptions(Connecting):
    """The options of the sink, parsed."""

    stream: str | None = option(
        a_name,
        "a stream's name",
        "The stream to write. As in Kafka's sink, it takes precedence over a column stream. For "
        "rows with an action: the stream of their messages, where a column stream is null.",
    )
    consumers: tuple[str, ...] | None = option(
        names,
        "names of consumers of the stream, with commas between them",
        "Publish only to these consumers. A row with a column consumers that is not null is "
        "published to the consumers of that column. By default to all.",
        excludes=("action",),
    )
    action: str | None = option(
        action,
        ", ".join(ACTIONS),
        "The action of all rows: they settle messages, and nothing is sent. The column action sets "
        "it for each row.",
    )
    consumer: str | None = option(
        a_name,
        "a consumer's name",
        "For rows with an action, the consumer of their messages. A column consumer that is not "
        "null takes precedence.",
    )
    table: str | None = option(
        a_name,
        "a table with its schema, quoted as in SQL, such as public.bills",
        "The table to write rows into, once. All columns are the table's; or, where there is a "
        "struct column row, its fields are, and the other columns are those of messages and "
        "actions. By default no rows are for a table.",
    )
    merge_keys: tuple[str, ...] | None = option(
        names,
        "names of columns of the DataFrame, with commas between them",
        "Merge by these columns of a unique index of table: a row with a new key is inserted, "
        "another updates the columns that the DataFrame has. By default rows are appended.",
        needs=("table",),
    )
    sequence_by: str | None = option(
        a_name,
        "a column's name, of numbers or times that are never null",
        "The highest value of a key wins, stored rows included. By default a batch has one row for "
        "each key, and the latest batch wins.",
        needs=("table", "mergeKeys"),
    )
    delete_when: str | None = option(
        a_name,
        "a boolean column's name",
        "A row where the column is true deletes the row of its key. The column is not stored. By "
        "default no row is deleted.",
        needs=("table", "mergeKeys"),
    )
    allow_rounding: tuple[str, ...] | None = option(
        names,
        "names of columns of the DataFrame, with commas between them",
        "The columns whose values the table may round or cut, such as a double in a numeric(10,2). "
        "Never one of mergeKeys or sequenceBy. By default a column that could round is refused.",
        needs=("table",),
    )
    txn_app_id: str | None = option(
        a_name,
        "a name",
        "The name of the writing application. Its writes are published once for each txnVersion "
        "and stream or table, and their actions happen once for each consumer. A write with the "
        "last published txnVersion or a lower one writes nothing, and logs a warning; in "
        "foreachBatch of another query or checkpoint, it fails with PQ010. By default a write that "
        "is repeated is published again.",
        needs=("txnVersion",),
        only=BATCH,
    )
    txn_version: int | None = option(
        not_negative,
        "a whole number of at least 0",
        "The number of a write of txnAppId, higher than the numbers of all writes before it.",
        needs=("txnAppId",),
        only=BATCH,
    )
    compare_repeats: str = option(
        compared,
        "content or count",
        "How a repeated micro-batch is compared: its rows must be the same in number and in data, "
        "key and headers (with an action: in action and seq), or the query fails with PQ010. count "
        "compares only the number, for a query whose rows differ each time (uuid, rand, "
        "deliver_count). Rows of a table are always compared by number. By default {default}.",
        default="content",
        only=STREAMING,
    )
    retry_timeout: timedelta = use(RETRY_TIMEOUT)


def parse_sink(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check and convert the options of `writeStream` (streaming) or `write`."""
    options = SinkOptions(**parse(given, SINK_OPTIONS, "sink"))
    if options.action is not None and options.consumers is not None:
        raise PgQueueError(
            "option consumers is for rows that are sent, but with option action no rows are sent",
            hint="remove consumers; option consumer names the consumer whose messages these are",
        )
    if (options.txn_app_id is None) != (options.txn_version is None):
        raise PgQueueError(
            "options txnAppId and txnVersion must be given together",
            hint="txnAppId names the writing application, txnVersion numbers its writes",
        )
    for each in SINK_OPTIONS:
        for other in each.needs if each.name in options.given else ():
            if other not in options.given:
                raise PgQueueError(
                    f"option {each.name} needs option {other}",
                    hint="table names the table to write, mergeKeys the columns of its key",
                )
    if streaming and options.txn_app_id is not None:
        raise PgQueueError(
            "options txnAppId and txnVersion are for batch writes (df.write)",
            hint="remove them: a stream write is exactly-once by its query id and batch id",
        )
    if not streaming and "compareRepeats" in options.given:
        raise PgQueueError(
            "option compareRepeats is for stream writes (df.writeStream)",
            hint="remove it: a batch write with txnAppId and txnVersion may repeat any of them",
        )
    return options


SINK_OPTIONS = (*CONNECTION, *options_of(SinkOptions))

SINK_NAMES = {
    "p_stream": "option stream",
    "p_table": "option table",
    "p_merge_keys": "option mergeKeys",
    "p_sequence_by": "option sequenceBy",
    "p_delete_when": "option deleteWhen",
    "p_allow_rounding": "option allowRounding",
    "p_consumers": "option consumers",
    "p_sink": "option txnAppId",
    "p_batch": "option txnVersion",
    "p_seqs": "column seq",
    **{
        f"p_{name}": f"column {name}"
        for name in (
            *("data", "key", "headers", "priority", "deliver_at", "expires_at", "dedup_key"),
            *("action", "delay"),
        )
    },
}
"""The options and columns that set arguments of SQL functions, for errors."""
