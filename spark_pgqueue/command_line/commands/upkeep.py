"""Commands for maintenance, and the demo."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from spark_pgqueue.command_line.app import app, as_commands, connect, fail, one_line, repeat
from spark_pgqueue.command_line.arguments import Json, Url, Yes, lasting
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import report
from spark_pgqueue.postgres.errors import PgQueueError, how_to_install
from spark_pgqueue.postgres.retrying import is_worth_a_retry
from spark_pgqueue.printable import printable


@app.command()
def recover(yes: Yes = False, as_json: Json = False, url: Url = None) -> None:
    """Recover after a restore or a failover: run it once, before producers restart.

    From then on, offsets beyond the restored state are refused; all others stay valid.
    """
    with connect(url) as queue:
        confirm("Was the database restored, or a standby promoted, and are producers stopped?", yes)
        for stream, last in queue.recover().items():
            said = f"{printable(stream)}: restored up to publication {last}"
            report(as_json, said, stream=stream, last_publication=last)


@app.command()
def maintain(
    staged_age: Annotated[
        timedelta, lasting("Longer than any Spark query takes to write a batch.")
    ] = "1 day",  # type: ignore[assignment]
    reader_age: Annotated[
        timedelta, lasting("Longer than any Spark query pauses before it is started again.")
    ] = "30 days",  # type: ignore[assignment]
    every: Annotated[timedelta | None, lasting("Repeat at this interval.")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Trim messages, and delete the chunks of failed writers. Run it regularly.

    With --every, it continues until it is interrupted, also while the database is down, and prints
    only what it did. A permanent error, such as a missing privilege, ends it.
    """

    def delete() -> None:
        with connect(url) as queue:
            for what, count in queue.maintain(staged_age, reader_age).items():
                if count or every is None:
                    report(as_json, f"{what}: {count} deleted", what=what, deleted=count)

    repeat(delete, every, is_worth_a_retry)


@app.command()
def demo(
    directory: Annotated[
        Path | None,
        typer.Option(help="The directory of its embedded Postgres, for inspection afterwards."),
    ] = None,
    # Not from PGQUEUE_URL: the demo must not use a database of another application.
    url: Annotated[str | None, typer.Option(help="A database to use instead.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Use only this many flights.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the delays of each day: a PNG, SVG or PDF.")
    ] = None,
) -> None:
    """Send a year of flights through Postgres and Spark, and check what comes out.

    Two Spark queries and workers consume them; one worker is killed in the middle, a dead letter
    redriven, a consumer added over history, and in the end retention takes all of it.
    """
    try:
        from spark_pgqueue.command_line.demo.story import run
    except ModuleNotFoundError as error:
        raise PgQueueError(
            f"the demo needs the module {error.name}", hint=how_to_install("demo")
        ) from None
    if not run(directory, url, rows, picture):
        fail("the output does not match the input")


@app.command()
def doctor(as_json: Json = False, url: Url = None) -> None:
    """Check Java, Spark, the libraries, Postgres and the schema, and suggest fixes."""
    from spark_pgqueue.command_line import doctor

    console, failed = Console(soft_wrap=True, highlight=False), False
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in doctor.checks(url):
        failed = failed or check.status == "fail"
        if as_json:
            report(
                as_json, **{each: one_line(value or "") for each, value in asdict(check).items()}
            )
            continue
        line = Text(f"{check.status:4} ", styles[check.status])
        line.append(f"{one_line(check.name)}: {one_line(check.found)}", "default")
        console.print(line)
        if check.advice:
            console.print(Text(f"     -> {one_line(as_commands(check.advice))}"))
    if failed:
        raise typer.Exit(1)
