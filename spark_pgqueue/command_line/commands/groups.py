"""Commands of `pgqueue group`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line.app import connect, sub_app
from spark_pgqueue.command_line.arguments import (
    POSITION,
    START,
    AnyStream,
    GroupName,
    IfNotExists,
    Json,
    StreamName,
    Url,
    default_of,
    position,
)
from spark_pgqueue.command_line.output import report, show

group_app: typer.Typer = sub_app(
    "group", "Create and list groups of workers; `consumer` drops, moves and pauses them."
)


@group_app.command("create")
def group_create(
    stream: StreamName,
    name: GroupName,
    partitions: Annotated[
        int, typer.Option(help="The maximum number of workers. It cannot be changed.")
    ] = default_of(client.Client.create_group, "partitions"),
    start: Annotated[Any, typer.Option(parser=position, metavar=POSITION, help=START)] = "latest",
    if_not_exists: IfNotExists = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Create a group: workers that share a stream, partitioned by key."""
    with connect(url) as queue:
        queue.create_group(
            stream, name, partitions=partitions, start=start, if_not_exists=if_not_exists
        )
        report(as_json, stream=stream, group=name)


@group_app.command("list")
def group_list(
    stream: AnyStream = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the groups, with the lag of the slowest partition of each."""
    with connect(url) as queue:
        show(queue.groups(stream), client.GroupStats, as_json)


@group_app.command("lag")
def group_lag(stream: StreamName, name: GroupName, as_json: Json = False, url: Url = None) -> None:
    """Show the worker and the lag of each partition, in messages of all keys."""
    with connect(url) as queue:
        show(queue.partitions(stream, name), client.PartitionStats, as_json)
