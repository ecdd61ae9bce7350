"""The options of a query that reads a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.admission import (
    MAX_BYTES_PER_TRIGGER,
    MAX_MESSAGES_PER_TRIGGER,
    MAX_TRIGGER_DELAY,
    MIN_MESSAGES_PER_TRIGGER,
    WAIT_TIME,
    Admitting,
)
from spark_pgqueue.spark.options.checking import (
    CONNECTION,
    INCLUDE_HEADERS,
    MAX_CONNECTIONS,
    RETRY_TIMEOUT,
    TYPED,
    Connecting,
    check_partitions,
    option,
    options_of,
    parse,
    use,
)
from spark_pgqueue.spark.options.values import (
    BOOLEAN,
    DURATION,
    NUMBER,
    a_name,
    boolean,
    duration,
    key_order,
    local_folder,
    ordering,
    position,
    positive,
)


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Connecting, Admitting):
    """The options of the source, parsed."""

    stream: str = option(a_name, "a stream's name", "The stream to read.", required=True)
    consumer: str = option(
        a_name,
        "a consumer's name",
        "The consumer whose messages the query claims and acknowledges.",
        required=True,
    )
    max_messages_per_trigger: int | None = use(
        MAX_MESSAGES_PER_TRIGGER,
        help="At most this many messages in a micro-batch. By default all messages of up to "
        "1,000,000 publications.",
    )
    max_bytes_per_trigger: int | None = use(MAX_BYTES_PER_TRIGGER)
    min_messages_per_trigger: int | None = use(MIN_MESSAGES_PER_TRIGGER)
    max_trigger_delay: timedelta = use(MAX_TRIGGER_DELAY)
    min_partitions: int | None = option(
        positive,
        NUMBER,
        "Read a micro-batch in at least this many partitions, but never in more partitions than "
        "messages. By default by its size.",
    )
    max_records_per_partition: int | None = option(
        positive,
        NUMBER,
        "Read at most this many messages in one partition. With ordering by key, all messages of a "
        "key stay in one partition nevertheless.",
    )
    max_connections: int | None = use(MAX_CONNECTIONS)
    key_order: str = option(
        key_order,
        "partition or column",
        "With ordering by key, where the order of a key is kept. partition: in the rows of a "
        "partition; a micro-batch then has at most 8 partitions, or more if it is small. column: "
        "in a column arrival, for in_key_order(), with any number of partitions.",
        default="partition",
    )
    visibility_timeout: timedelta | None = option(
        duration,
        DURATION,
        "How long after the last heartbeat of the query other claimers may take over its messages. "
        "The query extends its claims every third of that time. By default the consumer's.",
    )
    wait_time: timedelta = use(WAIT_TIME)
    fail_on_data_loss: bool = option(
        boolean,
        BOOLEAN,
        "Fail when claimed messages were deleted before the query could read them; false logs a "
        "warning.",
        default=True,
    )
    include_headers: bool = use(INCLUDE_HEADERS)
    typed: str | None = use(TYPED)
    create_consumer: bool = option(
        boolean,
        BOOLEAN,
        "Create the consumer when the query starts and the consumer does not exist. The role must "
        "be an admin.",
        default=False,
    )
    starting_position: str = option(
        position,
        "earliest, latest, a timestamp with time zone such as 2026-01-31T12:00:00Z, seq and a "
        "number, or an offset of the stream",
        "Where a consumer made by createConsumer starts. By default {default}.",
        default="latest",
        needs=("createConsumer",),
    )
    ordering: str = option(
        ordering,
        "none, key or stream",
        "The ordering of a consumer made by createConsumer. By default {default}.",
        default="none",
        needs=("createConsumer",),
    )
    share_consumer: bool = option(
        boolean,
        BOOLEAN,
        "Whether other queries of the application that also set shareConsumer may read the "
        "consumer too. The queries then share its messages.",
        default=False,
    )
    quarantine_after: int | None = option(
        positive,
        NUMBER,
        "Bisect a micro-batch that was started that often and never finished, until the message "
        "that stops the query is alone; dead-letter that message. By default the query fails at "
        "each start.",
    )
    checkpoint_location: Path | None = option(
        local_folder,
        "a folder of the driver's machine: a path, or file:///path",
        "The query's checkpointLocation again, because Spark does not pass it to its sources. With "
        "it, the source acknowledges the last finished micro-batch when the query ends, also with "
        "trigger(once=True).",
    )
    retry_timeout: timedelta = use(RETRY_TIMEOUT)

    @property
    def has_arrival(self) -> bool:
        """Whether there is a column arrival."""
        return self.key_order == "column"


def parse_source(given: Mapping[str, str]) -> SourceOptions:
    """Check and convert the options of `readStream`."""
    options = SourceOptions(**parse(given, SOURCE_OPTIONS, "source"))
    options.check_admission()
    check_partitions(options.min_partitions, options.max_connections)
    if not options.create_consumer:
        for name in ("startingPosition", "ordering"):
            if name in options.given:
                raise PgQueueError(
                    f"option {name} has no effect without createConsumer",
                    hint=f"{name} is fixed when the consumer is created: add "
                    f'option("createConsumer", "true"), or remove {name}',
                )
    return options


SOURCE_OPTIONS = (*CONNECTION, *options_of(SourceOptions))

SOURCE_NAMES = {
    "p_stream": "option stream",
    "p_consumer": "option consumer",
    "p_name": "option consumer",
    "p_start": "option startingPosition",
    "p_ordering": "option ordering",
    "p_visibility_timeout": "option visibilityTimeout",
    "p_max": "option maxMessagesPerTrigger",
    "p_max_bytes": "option maxBytesPerTrigger",
    "p_quarantine_after": "option quarantineAfter",
}
"""The options and columns that set arguments of SQL functions, for errors."""
