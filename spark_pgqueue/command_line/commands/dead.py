"""Commands of `pgqueue dead`, about dead letters."""

from __future__ import annotations

import sys
from datetime import datetime
from itertools import islice
from typing import Annotated, Any

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line.app import connect, sub_app
from spark_pgqueue.command_line.arguments import (
    AnyConsumer,
    AnyStream,
    ConsumerName,
    Json,
    Max,
    OnlySeqs,
    StreamName,
    Url,
    Yes,
    at,
    default_of,
)
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import count_of, json_of_row, line_of, report, show

dead_app: typer.Typer = sub_app("dead", "List, show, redrive and purge dead letters.")

Reason = Annotated[str | None, typer.Option(help="Only messages dead-lettered for this reason.")]
Before = Annotated[
    datetime | None,
    at("Only messages dead-lettered before (ISO 8601; local unless it has a zone)."),
]


@dead_app.command("list")
def dead_list(
    stream: AnyStream = None,
    consumer: AnyConsumer = None,
    max_rows: Max = default_of(client.Client.dead_letters, "limit"),
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List dead letters, the newest first: the reason, the deliveries, the last worker."""
    with connect(url) as queue:
        rows = queue.dead_letters(stream, consumer, limit=max_rows)
        show(rows, client.DeadLetters, as_json)


@dead_app.command("show")
def dead_show(
    stream: StreamName,
    consumer: ConsumerName,
    seq: OnlySeqs = None,
    reason: Reason = None,
    before: Before = None,
    max_messages: Max = 100,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print dead letters with their payloads.

    A line has seq, key and data as `receive` prints them, then reason, error, deliver_count, and
    the details as JSON, if there are any; --json has everything.
    """
    with connect(url) as queue:
        messages = queue.read_dead(stream, consumer, seq, reason=reason, before=before)
        for message in islice(messages, max_messages):
            print(json_of_row(message) if as_json else line_of(message))
        sys.stdout.flush()


@dead_app.command("redrive")
def dead_redrive(
    stream: StreamName,
    consumer: ConsumerName,
    seq: OnlySeqs = None,
    reason: Reason = None,
    before: Before = None,
    max_messages: Max = default_of(client.Client.redrive, "max_messages"),
    reset: Annotated[bool, typer.Option(help="Reset deliver_count to 0, or keep it.")] = True,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Deliver dead letters again, after the messages that are already waiting."""
    with connect(url) as queue:
        count = queue.redrive(
            stream,
            consumer,
            seq,
            reason=reason,
            before=before,
            max_messages=max_messages,
            reset=reset,
        )
    said = f"{count_of(count)} to be redelivered"
    report(as_json, said, stream=stream, consumer=consumer, again=count)


@dead_app.command("purge")
def dead_purge(
    stream: StreamName,
    consumer: ConsumerName,
    seq: OnlySeqs = None,
    reason: Reason = None,
    before: Before = None,
    yes: Yes = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Delete dead letters permanently."""
    choice: dict[str, Any] = {"reason": reason, "before": before}
    chosen = "" if seq is None and not any(choice.values()) else " that were chosen"
    with connect(url) as queue:
        if queue.dead_letters(stream, consumer, limit=1):
            confirm(f"Delete the dead letters of {consumer!r} of {stream!r}{chosen}?", yes)
        count = queue.purge_dead(stream, consumer, seq, **choice)
    report(as_json, f"{count_of(count)} deleted", stream=stream, consumer=consumer, deleted=count)
