"""Commands about the outcomes of messages."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line.app import app, connect, fail
from spark_pgqueue.command_line.arguments import (
    ConsumerName,
    Json,
    Seq,
    StreamName,
    Url,
    at,
    default_of,
    lasting,
)
from spark_pgqueue.command_line.output import show


@app.command()
def outcome(
    stream: StreamName,
    consumer: ConsumerName,
    seq: Seq,
    wait: Annotated[
        timedelta | None, lasting("Wait this long for the message to be done or dead-lettered.")
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print the outcome of a message for a consumer."""
    with connect(url) as queue:
        if wait is None:
            found = queue.outcome(stream, consumer, seq)
        else:
            found = queue.wait_for(stream, consumer, seq, wait)
    if wait is not None and not found.is_final:
        fail(f"message {seq} is not done: it is {found.state}")
    show([found], client.Outcome, as_json)


@app.command()
def history(
    stream: StreamName,
    consumer: ConsumerName,
    since: Annotated[datetime | None, at("Only from then on (ISO 8601, local).")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = default_of(
        client.Client.history, "limit"
    ),
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the last acknowledgements of a consumer with keep_history."""
    with connect(url) as queue:
        show(queue.history(stream, consumer, since=since, limit=limit), client.Done, as_json)
