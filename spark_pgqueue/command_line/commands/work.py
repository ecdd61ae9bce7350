"""`pgqueue work`: a worker, with the user's handler."""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from spark_pgqueue.command_line.app import app
from spark_pgqueue.command_line.arguments import ConsumerName, Json, StreamName, Url, duration
from spark_pgqueue.command_line.output import count_of, told
from spark_pgqueue.worker import Consumer
from spark_pgqueue.worker.importing import import_handler

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


# Longer than 60 lines: Typer reads the options from the parameters.
@app.command()
def work(
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:HANDLER",
            show_default=False,
            help="A function that takes a message, such as app.jobs:bill.",
        ),
    ],
    stream: StreamName,
    consumer: ConsumerName,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Calls at a time: threads, or tasks of asyncio.")
    ] = 1,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Calls at a time, each in a process.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="The handler takes a list of at most this many.")
    ] = None,
    prefetch: Annotated[
        int, typer.Option(min=0, help="Claim at most this many messages ahead.")
    ] = 500,
    transactional: Annotated[
        bool,
        typer.Option(
            "--transactional",
            help="The handler also takes a connection, whose transaction acknowledges.",
        ),
    ] = False,
    timeout: Annotated[
        timedelta | None,
        typer.Option(parser=duration, metavar="DURATION", help="A longer call has failed."),
    ] = None,
    grace: Annotated[
        Any,
        typer.Option(
            parser=duration, metavar="DURATION", help="The time for running calls after a stop."
        ),
    ] = "25s",
    wait: Annotated[
        timedelta | None,
        typer.Option(
            parser=duration, metavar="DURATION", help="End after this long without a message."
        ),
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Call your function for each message, until SIGTERM or Ctrl-C.

    Then what was not begun is given back, and calls that run may end. What happens is logged to
    standard error.
    """
    logging.basicConfig(level=logging.INFO, format=_FORMAT)
    function = import_handler(handler)
    failures: list[BaseException] = []
    handled = Consumer(url, stream, consumer).run(
        function,
        concurrency=concurrency,
        processes=processes,
        batch=batch,
        prefetch=prefetch,
        transactional=transactional,
        timeout=timeout,
        grace=grace,
        wait=wait,
        on_failure=lambda _, error: failures.append(error),
    )
    failed = f"; {count_of(len(failures), 'call')} failed" if failures else ""
    print(f"{count_of(handled)} handled{failed}", file=sys.stderr)
    if as_json:
        told(as_json, stream=stream, consumer=consumer, handled=handled, failed=len(failures))
