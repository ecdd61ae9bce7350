"""Finding the consumer of the source, and creating it."""

from __future__ import annotations

import shlex
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

from spark_pgqueue.postgres.errors import (
    NO_PERMISSION,
    UNKNOWN_CONSUMER,
    PgQueueError,
)
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.columns import Stream
from spark_pgqueue.spark.options.source import SOURCE_NAMES, SourceOptions


@dataclass(frozen=True)
class Consumer(Stream):
    """A consumer of the database. Its identity is unique among all databases."""

    consumer_id: int
    ordering: str
    visibility_timeout: timedelta
    identity: str
    channel: str
    paused: bool
    is_new: bool  # this source has created it


def find_stream(options: SourceOptions) -> Stream:
    """The source's stream. Also checks that the consumer exists, unless it may be created.

    Raises:
        PgQueueError: the stream or the consumer does not exist; or visibilityTimeout is wrong.
    """
    # No patience: this is load(), and a user who mistyped the host waits for the error.
    with closing(Statements(options.url, patience=0, names=SOURCE_NAMES.get)) as statements:
        if options.visibility_timeout is not None:
            statements.row(
                "select pgqueue.check_timeout('option visibilityTimeout', %s)",
                [options.visibility_timeout],
            )
        if not options.create_consumer:
            return open_consumer(statements, options)
        return Stream(
            *statements.row("select stream_id, kind from pgqueue.open_stream(%s)", [options.stream])
        )


def open_consumer(statements: Statements, options: SourceOptions) -> Consumer:
    """The source's consumer, created if it is missing and createConsumer is true.

    Raises:
        PgQueueError: the stream or the consumer does not exist; or the role may not create it.
    """
    find = (
        "select stream_id, kind, consumer_id, ordering, visibility_timeout, identity, channel, "
        "paused from pgqueue.open_consumer(%s, %s)"
    )
    is_new = False
    try:
        row = statements.row(find, [options.stream, options.consumer])
    except PgQueueError as error:
        if not options.create_consumer or error.sqlstate != UNKNOWN_CONSUMER:
            raise
        _create(statements, options)
        row = statements.row(find, [options.stream, options.consumer])
        is_new = True
    consumer = Consumer(*row, is_new=is_new)
    if "ordering" in options.given and options.ordering != consumer.ordering:
        raise PgQueueError(
            f"consumer {options.consumer} has ordering {consumer.ordering}, but option ordering is "
            f"{options.ordering}",
            hint="remove the option, or create another consumer: its ordering cannot be changed",
        )
    return consumer


def _create(statements: Statements, options: SourceOptions) -> None:
    try:
        statements.row(
            "select pgqueue.create_consumer(%s, %s, p_start => %s, p_ordering => %s, "
            "p_if_not_exists => true, "
            "p_settings => pg_catalog.jsonb_build_object('visibility_timeout', %s::interval))",
            [
                options.stream,
                options.consumer,
                options.starting_position,
                options.ordering,
                options.visibility_timeout,
            ],
        )
    except PgQueueError as error:
        if error.sqlstate != NO_PERMISSION:
            raise
        raise PgQueueError(
            f"option createConsumer is true and stream {options.stream!r} has no consumer "
            f"{options.consumer!r}, but the role may not create it: {error.message}",
            hint=f"create it with `pgqueue consumer create {shlex.quote(options.stream)} "
            f"{shlex.quote(options.consumer)}`, or let the role do so: `pgqueue grant admin ROLE`",
            sqlstate=error.sqlstate,
        ) from None
