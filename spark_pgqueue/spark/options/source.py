"""The options of a query that reads a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.admission import Admission
from spark_pgqueue.spark.checkpoint import local_folder
from spark_pgqueue.spark.options.admission import (
    ADMISSION_OPTIONS,
    admission_of,
    check_admission,
)
from spark_pgqueue.spark.options.checking import (
    CONNECTION,
    INCLUDE_HEADERS,
    MAX_CONNECTIONS,
    RETRY_TIMEOUT,
    Option,
    check_partitions,
    parse,
)
from spark_pgqueue.spark.options.values import (
    BOOLEAN,
    DURATION,
    NUMBER,
    a_name,
    boolean,
    duration,
    key_order,
    ordering,
    position,
    positive,
)


@dataclass(frozen=True)
class SourceOptions:
    """The source's options, parsed. The fields are those of `SOURCE_OPTIONS`."""

    url: str | None = field(repr=False)  # it may hold a password
    stream: str
    consumer: str
    max_messages_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_messages_per_trigger: int | None
    max_trigger_delay: timedelta | None
    min_partitions: int | None
    max_records_per_partition: int | None
    max_connections: int | None
    key_order: str
    visibility_timeout: timedelta | None
    wait_time: timedelta
    fail_on_data_loss: bool
    include_headers: bool
    create_consumer: bool
    starting_position: str | None
    ordering: str | None
    share_consumer: bool
    quarantine_after: int | None
    checkpoint_location: Path | None
    retry_timeout: timedelta

    @property
    def admission(self) -> Admission:
        """How large its micro-batches are."""
        return admission_of(self)

    @property
    def has_arrival(self) -> bool:
        """Whether there is a column arrival."""
        return self.key_order == "column"


def parse_source(given: Mapping[str, str]) -> SourceOptions:
    """Check and convert the options of `readStream`.

    Raises:
        PgQueueError: an option is unknown, missing or malformed, or two do not fit together.
    """
    options = SourceOptions(**parse(given, SOURCE_OPTIONS, "source"))
    check_admission(options)
    check_partitions(options.min_partitions, options.max_connections)
    if not options.create_consumer:
        for name, value in (
            ("startingPosition", options.starting_position),
            ("ordering", options.ordering),
        ):
            if value is not None:
                raise PgQueueError(
                    f"option {name} has no effect without createConsumer",
                    hint="it is fixed when the consumer is created: add "
                    f'option("createConsumer", "true"), or remove {name}',
                )
    return options


SOURCE_OPTIONS = (
    *CONNECTION,
    Option("stream", a_name, "a stream's name", None, "The stream to read.", required=True),
    Option(
        "consumer",
        a_name,
        "a consumer's name",
        None,
        "The consumer whose messages the query claims and acknowledges.",
        required=True,
    ),
    *ADMISSION_OPTIONS,
    Option(
        "minPartitions",
        positive,
        NUMBER,
        None,
        "Read a micro-batch in at least so many partitions (but never more than messages). By "
        "default by its size.",
    ),
    Option(
        "maxRecordsPerPartition",
        positive,
        NUMBER,
        None,
        "Read at most so many messages in one partition. With ordering by key the messages of one "
        "key stay together even so.",
    ),
    MAX_CONNECTIONS,
    Option(
        "keyOrder",
        key_order,
        "partition or column",
        "partition",
        "With ordering by key, where the order of a key is: in its partition, of which there are "
        "8 at most, of a small micro-batch more; or in a column arrival, for in_key_order(), with "
        "any number of partitions.",
    ),
    Option(
        "visibilityTimeout",
        duration,
        DURATION,
        None,
        "After how long without a sign of life other claimers may take over what the query has "
        "claimed. Renewed every third of it. By default the consumer's.",
    ),
    Option(
        "waitTime",
        duration,
        DURATION,
        timedelta(seconds=1),
        "How long to wait for messages before Spark is told that there are none.",
    ),
    Option(
        "failOnDataLoss",
        boolean,
        BOOLEAN,
        True,
        "Fail when claimed messages were deleted before they could be read; false logs a warning.",
    ),
    INCLUDE_HEADERS,
    Option(
        "createConsumer",
        boolean,
        BOOLEAN,
        False,
        "Create the consumer when the query starts and there is none. The role needs the rights of "
        "an admin for that.",
    ),
    Option(
        "startingPosition",
        position,
        "earliest, latest, or a timestamp with time zone such as 2026-01-31T12:00:00Z",
        None,
        "Where a consumer made by createConsumer starts. By default latest.",
        needs=("createConsumer",),
    ),
    Option(
        "ordering",
        ordering,
        "none, key or stream",
        None,
        "The ordering of a consumer made by createConsumer. By default none.",
        needs=("createConsumer",),
    ),
    Option(
        "shareConsumer",
        boolean,
        BOOLEAN,
        False,
        "Whether other queries of the application may read the consumer too, if they say so as "
        "well: each then gets a part of the messages.",
    ),
    Option(
        "quarantineAfter",
        positive,
        NUMBER,
        None,
        "Cut a micro-batch into halves that was begun so many times and never finished, until the "
        "message that stops the query is alone: then it is a dead letter. By default the query "
        "fails for ever.",
    ),
    Option(
        "checkpointLocation",
        local_folder,
        "a folder of the driver's machine: a path, or file:///path",
        None,
        "The query's checkpointLocation once more, which Spark keeps from its sources: with it, "
        "the last finished micro-batch is acknowledged when the query ends, also with "
        "trigger(once=True).",
    ),
    RETRY_TIMEOUT,
)

# What the user calls the arguments of SQL functions.
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
