"""Commands that show messages and claims without claiming."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line import completion
from spark_pgqueue.command_line.app import app, connect, sub_app
from spark_pgqueue.command_line.arguments import (
    AnyConsumer,
    AnyStream,
    ConsumerName,
    Json,
    Max,
    StreamName,
    Url,
    Yes,
    default_of,
)
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import (
    count_of,
    details,
    json_of_row,
    line_of,
    report,
    section,
    show,
)

claim_app: typer.Typer = sub_app("claim", "List the claims that workers and Spark queries hold.")


@app.command()
def peek(
    stream: StreamName,
    consumer: Annotated[
        str | None,
        typer.Argument(
            metavar="CONSUMER",
            show_default="none: messages by number",
            autocompletion=completion.consumers,
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Without CONSUMER: from this number on. Default: 1.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--max", min=1, max=100_000, help="At most this many.")
    ] = default_of(client.Client.peek, "max_messages"),
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print the next messages of a consumer, or messages of a stream by seq, without claiming them.

    A line has seq, of a consumer also where the message is (ready, new, waiting, delayed, ...), key
    and data, as `receive` prints them.
    """
    if consumer is not None and seq is not None:
        raise typer.BadParameter("--seq is for messages of the stream: omit CONSUMER")
    with connect(url) as queue:
        if consumer is None:
            found = queue.peek_at(stream, 1 if seq is None else seq, limit)
        else:
            found = queue.peek(stream, consumer, limit)
    for message in found:
        print(json_of_row(message) if as_json else line_of(message))
    if not found:
        print("Nothing to show.", file=sys.stderr)


@app.command()
def describe(
    stream: StreamName,
    consumer: AnyConsumer = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Describe a stream, or a consumer of it, in full."""
    with connect(url) as queue:
        if consumer is None:
            found = queue.describe_stream(stream)
        else:
            found = queue.describe_consumer(stream, consumer)
    if as_json:
        print(json_of_row(found))
    elif isinstance(found, client.ConsumerDescription):
        details(found.consumer)
        details(found.position)
        details(found.stats, "stream", "consumer", "ordering", "paused", "status", "because")
        details(found.health, "stream", "consumer", "backlog", "max_backlog")
    else:
        details(found.stream, "consumers")
        details(found.retention, "stream", "bytes")
        section("Consumers", found.consumers, client.ConsumerStats)
        section("Groups", found.groups, client.GroupStats)
        section("Bindings", found.bindings, client.Binding)
        section("Captures", found.captures, client.Capture)
        section("Schedules", found.schedules, client.Schedule)


@claim_app.command("list")
def claim_list(
    stream: AnyStream = None,
    consumer: AnyConsumer = None,
    limit: Max = default_of(client.Client.open_claims, "limit"),
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List open claims with their workers, ordered by lease end.

    The owner is the application_name of the session that claimed.
    """
    with connect(url) as queue:
        if stream is not None and consumer is not None:
            queue.position(stream, consumer)  # an unknown one is an error
        show(queue.open_claims(stream, consumer, limit=limit), client.OpenClaim, as_json)


@app.command()
def purge(
    stream: StreamName,
    consumer: ConsumerName,
    yes: Yes = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Discard all unfinished messages of a consumer, also claimed ones; its claims end.

    As `consumer seek STREAM CONSUMER latest`. Dead letters, other consumers and the messages of the
    stream stay; `consumer replay` brings back what is stored.
    """
    with connect(url) as queue:
        for each in queue.stats(stream):
            if each.consumer == consumer:
                question = f"Let consumer {consumer!r} of stream {stream!r} forget "
                question += "about " if each.estimated else ""
                question += count_of(each.backlog + each.claimed)
                if each.claims:
                    question += f", {each.claimed} of them in {each.claims} claims that end"
                confirm(f"{question}?", yes)
        count = queue.seek(stream, consumer, "latest")
    report(
        as_json, f"{count_of(count)} forgotten", stream=stream, consumer=consumer, forgotten=count
    )
