"""Commands about tables whose changes become messages."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line import completion
from spark_pgqueue.command_line.app import app, connect
from spark_pgqueue.command_line.arguments import Json, StreamName, Url
from spark_pgqueue.command_line.output import report, show


@app.command()
def capture(
    table: Annotated[
        str | None, typer.Argument(show_default="none: list what is captured", metavar="TABLE")
    ] = None,
    stream: Annotated[
        str | None,
        typer.Argument(metavar="STREAM", show_default=False, autocompletion=completion.streams),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="A column of the key; can be repeated. Default: the primary key."),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Publish this column; can be repeated. Default: all.")
    ] = None,
    old: Annotated[
        bool, typer.Option("--old", help="Also publish rows as they were before the change.")
    ] = False,
    outbox: Annotated[
        bool, typer.Option("--outbox", help="Capture inserts, and delete the rows again.")
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Capture the changes of a table as messages of a stream, or list the captured tables."""
    with connect(url) as queue:
        if table is None:
            show(queue.captures(), client.Capture, as_json)
        elif stream is None:
            raise typer.BadParameter("to capture a table, STREAM is required")
        else:
            queue.capture(
                table,
                stream,
                keys=key or None,
                columns=column or None,
                old=old,
                outbox=outbox,
            )
            report(as_json, table=table, stream=stream)


@app.command()
def release(
    table: Annotated[str, typer.Argument(metavar="TABLE", show_default=False)],
    stream: StreamName,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Stop capturing a table; its messages stay."""
    with connect(url) as queue:
        queue.release(table, stream)
        report(as_json, table=table, stream=stream)
