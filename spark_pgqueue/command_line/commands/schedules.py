"""Commands of `pgqueue schedule`."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Annotated

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line.app import connect, sub_app
from spark_pgqueue.command_line.arguments import (
    AnyStream,
    Consumers,
    Headers,
    IfExists,
    Json,
    Key,
    Priority,
    StreamName,
    Url,
    Yes,
    at,
    default_of,
)
from spark_pgqueue.command_line.input import confirm, payload_of
from spark_pgqueue.command_line.output import report, show

schedule_app: typer.Typer = sub_app("schedule", "Send messages at planned times.")

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Cron = Annotated[
    str | None,
    typer.Option(
        metavar="'M H D M W'",
        help="When: minute, hour, day of the month, month and day of the week; or @daily, ...",
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        metavar="INTERVAL", help="Or an interval: '15 minutes', or '1 month' (calendar month)."
    ),
]
TimeZone = Annotated[
    str, typer.Option(metavar="NAME", help="The time zone, such as Europe/Berlin.")
]
Start = Annotated[datetime | None, at("From when INTERVAL is counted. Default: one from now.")]


@schedule_app.command("create")
def schedule_create(
    stream: StreamName,
    name: Name,
    data: Annotated[str, typer.Option(help="The payload.", show_default=False)],
    cron: Cron = None,
    every: Every = None,
    time_zone: TimeZone = "UTC",
    start: Start = None,
    key: Key = None,
    header: Headers = None,
    priority: Priority = 0,
    consumer: Consumers = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Change an existing schedule.")
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Create a schedule, and print its next time."""
    with connect(url) as queue:
        binary = queue.kind(stream) == "binary"
        at = queue.create_schedule(
            stream,
            name,
            payload_of(os.fsencode(data), binary),
            cron=cron,
            every=every,
            time_zone=time_zone,
            start=start,
            key=key,
            headers=dict(header) if header else None,
            priority=priority,
            consumers=consumer,
            replace=replace,
        )
    report(as_json, at.isoformat(), stream=stream, schedule=name, next_at=at)


@schedule_app.command("drop")
def schedule_drop(
    stream: StreamName,
    name: Name,
    yes: Yes = False,
    if_exists: IfExists = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Delete a schedule; messages that it sent stay."""
    with connect(url) as queue:
        if any(each.name == name for each in queue.schedules(stream)):
            confirm(f"Delete schedule {name!r} of stream {stream!r}?", yes)
        elif if_exists:
            report(as_json, stream=stream, schedule=name, dropped=False)
            return
        queue.drop_schedule(stream, name)
        report(as_json, stream=stream, schedule=name, dropped=True)


@schedule_app.command("list")
def schedule_list(
    stream: AnyStream = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the schedules: when they send next, and sent last."""
    with connect(url) as queue:
        show(queue.schedules(stream), client.Schedule, as_json)


@schedule_app.command("pause")
def schedule_pause(stream: StreamName, name: Name, as_json: Json = False, url: Url = None) -> None:
    """Stop a schedule from sending until it is resumed."""
    with connect(url) as queue:
        queue.pause_schedule(stream, name)
        report(as_json, stream=stream, schedule=name, paused=True)


@schedule_app.command("resume")
def schedule_resume(stream: StreamName, name: Name, as_json: Json = False, url: Url = None) -> None:
    """Let a paused schedule send again, and print its next time."""
    with connect(url) as queue:
        at = queue.resume_schedule(stream, name)
    report(as_json, at.isoformat(), stream=stream, schedule=name, next_at=at)


@schedule_app.command("times")
def schedule_times(
    cron: Cron = None,
    every: Every = None,
    time_zone: TimeZone = "UTC",
    start: Start = None,
    after: Annotated[datetime | None, at("Only times after this one. Default: now.")] = None,
    count: Annotated[int, typer.Option(min=1, max=1000)] = default_of(
        client.Client.schedule_times, "count"
    ),
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print the next times of a schedule that does not exist."""
    with connect(url) as queue:
        for at in queue.schedule_times(
            cron=cron, every=every, time_zone=time_zone, start=start, after=after, count=count
        ):
            report(as_json, at.isoformat(), at=at)
