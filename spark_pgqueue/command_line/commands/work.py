"""`pgqueue work`: a worker, with a handler of the user's."""

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
        int | None, typer.Option(min=1, help="The handler takes a list of up to so many.")
    ] = None,
    prefetch: Annotated[
        int, typer.Option(min=0, help="Claim at most so many that are not begun.")
    ] = 500,
    transactional: Annotated[
        bool,
        typer.Option(
            "--transactional",
            help="The handler takes a connection too, whose transaction acknowledges.",
        ),
    ] = False,
    timeout: Annotated[
        timedelta | None,
        typer.Option(parser=duration, metavar="DURATION", help="A longer call has failed."),
    ] = None,
    grace: Annotated[
        Any,
        typer.Option(
            parser=duration, metavar="DURATION", help="For the calls that run when it is stopped."
        ),
    ] = "25s",
    wait: Annotated[
        timedelta | None,
        typer.Option(parser=duration, metavar="DURATION", help="End after so long with nothing."),
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Call a function of yours for each message, until SIGTERM or Ctrl-C.

    Then what was not begun is given back, and calls that run may end. What happens is logged to
    standard error.
    """
    logging.basicConfig(level=logging.INFO, format=_FORMAT)
    function = import_handler(handler)
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
    )
    print(f"{count_of(handled)} handled", file=sys.stderr)
    if as_json:
        told(as_json, stream=stream, consumer=consumer, handled=handled)
