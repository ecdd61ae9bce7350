"""The options of what writes a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.checking import BATCH, CONNECTION, RETRY_TIMEOUT, Option, parse
from spark_pgqueue.spark.options.values import ACTIONS, a_name, action, names, not_negative


@dataclass(frozen=True)
class SinkOptions:
    """The sink's options, parsed. The fields are those of `SINK_OPTIONS`."""

    url: str | None = field(repr=False)  # it may hold a password
    stream: str | None
    consumers: tuple[str, ...] | None
    action: str | None
    consumer: str | None
    txn_app_id: str | None
    txn_version: int | None
    retry_timeout: timedelta


def parse_sink(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check and convert the options of `writeStream` (streaming) or `write`.

    Raises:
        PgQueueError: an option is unknown, missing or malformed, or two do not fit together.
    """
    options = SinkOptions(**parse(given, SINK_OPTIONS, "sink"))
    if options.action is not None and options.consumers is not None:
        raise PgQueueError(
            "option consumers is for what is sent, and with option action nothing is",
            hint="remove consumers, or name the one whose messages these are by option consumer",
        )
    if (options.txn_app_id is None) != (options.txn_version is None):
        raise PgQueueError(
            "options txnAppId and txnVersion must be given together",
            hint="txnAppId names the writing application, txnVersion numbers its writes",
        )
    if streaming and options.txn_app_id is not None:
        raise PgQueueError(
            "options txnAppId and txnVersion are for batch writes (df.write)",
            hint="remove them: a stream write is exactly-once by its query id and batch id",
        )
    return options


SINK_OPTIONS = (
    *CONNECTION,
    Option(
        "stream",
        a_name,
        "a stream's name",
        None,
        "The stream to write; of rows with an action, the stream of their messages. With a column "
        "stream, only for rows where that is null.",
    ),
    Option(
        "consumers",
        names,
        "names of consumers of the stream, with commas between them",
        None,
        "Publish to these consumers alone, but for rows with a column consumers that is not null. "
        "By default to all.",
        excludes=("action",),
    ),
    Option(
        "action",
        action,
        ", ".join(ACTIONS),
        None,
        "What all rows want to be done with messages; nothing is sent. By row: the column action.",
    ),
    Option(
        "consumer",
        a_name,
        "a consumer's name",
        None,
        "Of rows with an action, whose messages these are, but for rows with a column consumer "
        "that is not null.",
    ),
    Option(
        "txnAppId",
        a_name,
        "a name",
        None,
        "Names the writing application: its writes are published once by their txnVersion, and "
        "their actions done once. One with the last published version or a lower one writes "
        "nothing, and logs a warning. By default a write that is repeated is published again.",
        needs=("txnVersion",),
        only=BATCH,
    ),
    Option(
        "txnVersion",
        not_negative,
        "a whole number of at least 0",
        None,
        "The number of a write of a txnAppId, higher than those of all writes before it.",
        needs=("txnAppId",),
        only=BATCH,
    ),
    RETRY_TIMEOUT,
)

# What the user calls the arguments of SQL functions.
SINK_NAMES = {
    "p_stream": "option stream",
    "p_consumers": "option consumers",
    "p_sink": "option txnAppId",
    "p_batch": "option txnVersion",
    "p_priority": "column priority",
    "p_deliver_at": "column deliver_at",
    "p_key": "column key",
    "p_headers": "column headers",
    "p_data": "column data",
    "p_dedup_key": "column dedup_key",
    "p_expires_at": "column expires_at",
    "p_action": "column action",
    "p_seqs": "column seq",
    "p_delay": "column delay",
}
