"""Commands of `pgqueue consumer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line.app import connect, consumer_app
from spark_pgqueue.command_line.arguments import (
    POSITION,
    AnyStream,
    ConsumerName,
    IfExists,
    IfNotExists,
    Json,
    OptionalSettings,
    Ordering,
    Position,
    Settings,
    StreamName,
    Url,
    Yes,
    position,
)
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import count_of, report, show


@consumer_app.command("create")
def consumer_create(
    stream: StreamName,
    name: ConsumerName,
    settings: OptionalSettings = None,
    start: Annotated[
        Any,
        typer.Option(
            parser=position,
            metavar=POSITION,
            help="Start with all stored messages, new messages only, messages published since TIME "
            "(ISO 8601, local unless it has a zone), or messages from seq N on.",
        ),
    ] = "latest",
    ordering: Annotated[
        Ordering, typer.Option(help="Which messages to deliver one after the other.")
    ] = Ordering.none,
    if_not_exists: IfNotExists = False,
    topic: Annotated[
        str | None,
        typer.Option(help="Only messages whose key matches this topic: 'orders.*.eu', 'orders.#'."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="JSONPATH",
            help="Only messages that match this condition on key, headers and data: '$.data.total "
            "> 100'.",
        ),
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Create a consumer of a stream: `consumer create orders billing max_deliver_count=5`."""
    with connect(url) as queue:
        queue.create_consumer(
            stream,
            name,
            start=start,
            ordering=ordering.value,
            if_not_exists=if_not_exists,
            topic=topic,
            where=where,
            settings=dict(settings or ()),
        )
        report(as_json, stream=stream, consumer=name)


@consumer_app.command("set")
def consumer_set(
    stream: StreamName,
    name: ConsumerName,
    settings: Settings,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Change settings of a consumer while it is in use: max_deliver_count=5."""
    with connect(url) as queue:
        queue.alter_consumer(stream, name, dict(settings))
        report(as_json, stream=stream, consumer=name, settings=dict(settings))


@consumer_app.command("drop")
def consumer_drop(
    stream: StreamName,
    name: ConsumerName,
    yes: Yes = False,
    if_exists: IfExists = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Delete a consumer or a group, with its unfinished messages and dead letters."""
    with connect(url) as queue:
        if any((each.stream, each.name) == (stream, name) for each in queue.consumers()):
            confirm(f"Delete consumer {name!r} of stream {stream!r}?", yes)
        elif if_exists:
            report(as_json, stream=stream, consumer=name, dropped=False)
            return
        queue.drop_consumer(stream, name)
        report(as_json, stream=stream, consumer=name, dropped=True)


@consumer_app.command("seek")
def consumer_seek(
    stream: StreamName, name: ConsumerName, to: Position, as_json: Json = False, url: Url = None
) -> None:
    """Move a consumer or a group, as if it were created there; its claims end.

    Dead letters stay. The workers of a group continue from there.
    """
    with connect(url) as queue:
        count = queue.seek(stream, name, to)
    report(as_json, f"{count_of(count)} forgotten", stream=stream, consumer=name, forgotten=count)


@consumer_app.command("replay")
def consumer_replay(
    stream: StreamName,
    name: ConsumerName,
    start: Position,
    to: Annotated[Any, typer.Argument(parser=position, metavar="TO", show_default=True)] = "latest",
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Deliver messages again that a consumer has finished or skipped."""
    with connect(url) as queue:
        count = queue.replay(stream, name, start, to)
    report(
        as_json, f"{count_of(count)} to be redelivered", stream=stream, consumer=name, again=count
    )


@consumer_app.command("pause")
def consumer_pause(
    stream: StreamName, name: ConsumerName, as_json: Json = False, url: Url = None
) -> None:
    """Stop a consumer from claiming messages until it is resumed."""
    with connect(url) as queue:
        queue.pause(stream, name)
        report(as_json, stream=stream, consumer=name, paused=True)


@consumer_app.command("resume")
def consumer_resume(
    stream: StreamName, name: ConsumerName, as_json: Json = False, url: Url = None
) -> None:
    """Let a paused consumer claim again."""
    with connect(url) as queue:
        queue.resume(stream, name)
        report(as_json, stream=stream, consumer=name, paused=False)


@consumer_app.command("health")
def consumer_health(
    stream: AnyStream = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Show which consumers of a stream, or of all, need attention, and why."""
    with connect(url) as queue:
        show(queue.health(stream), client.ConsumerHealth, as_json)


@dataclass(frozen=True)
class _Listed(client.ConsumerInfo):
    """A consumer, with its status as in consumer_health."""

    status: str


@consumer_app.command("list")
def consumer_list(
    stream: AnyStream = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the consumers of a stream, or of all."""
    with connect(url) as queue:
        status = {(each.stream, each.consumer): each.status for each in queue.health(stream)}
        rows = [
            _Listed(**vars(each), status=status.get((each.stream, each.name), ""))
            for each in queue.consumers(stream)
        ]
    show(rows, _Listed, as_json)
