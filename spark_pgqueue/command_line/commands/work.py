"""`pgqueue work`: a worker, with the user's handler."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any

import typer

from spark_pgqueue.command_line import completion
from spark_pgqueue.command_line.app import app, connect
from spark_pgqueue.command_line.arguments import Json, Url, address, delay, lasting
from spark_pgqueue.command_line.output import count_of, report
from spark_pgqueue.worker.handlers import Handling, handlings, is_marked, run_all
from spark_pgqueue.worker.importing import import_handler, import_named
from spark_pgqueue.worker.options import Options

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


# Longer than 60 lines: Typer reads the options from the parameters.
@app.command()
def work(
    context: typer.Context,
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE[:HANDLER]",
            show_default=False,
            help="A function that takes a message, such as app.jobs:bill; or a module, for all of"
            " its functions with the decorator @spark_pgqueue.handler.",
        ),
    ],
    stream: Annotated[
        str | None,
        typer.Argument(
            metavar="STREAM",
            show_default=False,
            autocompletion=completion.streams,
            help="By default from the decorator, like the consumer.",
        ),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Argument(metavar="CONSUMER", show_default=False, autocompletion=completion.consumers),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="The number of concurrent calls: threads, or asyncio tasks.")
    ] = Options.concurrency,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="The number of concurrent calls, each in its own process."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Pass the handler a list of at most this many messages."),
    ] = None,
    prefetch: Annotated[
        int, typer.Option(min=0, help="Prefetch at most this many messages.")
    ] = Options.prefetch,
    prefetch_bytes: Annotated[
        int, typer.Option(min=0, help="Prefetch at most about this many bytes of data.")
    ] = Options.prefetch_bytes,
    transactional: Annotated[
        bool,
        typer.Option(
            "--transactional",
            help="Also pass the handler a connection, whose transaction acknowledges the message.",
        ),
    ] = False,
    timeout: Annotated[timedelta | None, lasting("Fail a call that takes longer.")] = None,
    grace: Annotated[
        timedelta | None,
        lasting(
            "How long running calls may take after a stop signal.",
            parser=delay,
            show_default=f"{Options.grace.total_seconds():g}s",
        ),
    ] = None,
    visibility_timeout: Annotated[
        timedelta | None,
        lasting("How long until other workers take over after a crash. Default: the consumer's."),
    ] = None,
    wait: Annotated[
        timedelta | None,
        lasting("Stop after this long without a message; 0: when none is left.", parser=delay),
    ] = None,
    health: Annotated[
        str | None,
        typer.Option(
            parser=address,
            metavar="[HOST:]PORT",
            show_default=False,
            help="Serve GET /live and /ready on this address. Without a host, only to this "
            "machine; 0.0.0.0:PORT for Kubernetes probes.",
        ),
    ] = None,
    create: Annotated[
        bool,
        typer.Option("--create", help="Create missing streams, of kind text, and consumers."),
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Call your function for each message, until SIGTERM or Ctrl-C.

    It then returns messages that it has not started, and lets running calls finish. It logs to
    standard error. It notifies systemd (Type=notify, WatchdogSec).
    """
    logging.basicConfig(level=logging.INFO, format=_FORMAT)
    given = {
        name: value
        for name, value in context.params.items()
        if name in Options.__dataclass_fields__
        and getattr(context.get_parameter_source(name), "name", None) == "COMMANDLINE"
    }
    handled = [_counted(each, given) for each in _handlings(handler, stream, consumer)]
    if create:
        with connect(url) as queue:
            for each, _ in handled:
                queue.create_stream(each.stream, if_not_exists=True)
                queue.create_consumer(
                    each.stream, each.consumer, start="earliest", if_not_exists=True
                )
    counts = run_all(url, [each for each, _ in handled], health)
    failures = [next(each) for _, each in handled]
    total = sum(failures)
    said = f"; {count_of(total, 'call')} failed" if total else ""
    print(f"{count_of(sum(counts))} handled{said}", file=sys.stderr)
    for (each, _), count, failed in zip(handled, counts, failures, strict=True):
        fields = {"stream": each.stream, "consumer": each.consumer, "handled": count}
        report(as_json, **fields, failed=failed)


def _handlings(name: str, stream: str | None, consumer: str | None) -> list[Handling]:
    """The handlers that a command line names; a decorator's options stay in any case."""
    if stream is None:
        return handlings(import_handler(name) if ":" in name else import_named(name))
    if consumer is None:
        raise typer.BadParameter("STREAM is given without CONSUMER", param_hint="CONSUMER")
    function = import_handler(name)
    handled = handlings(function) if is_marked(function) else [Handling(function, "", "", {})]
    names = [(each.stream, each.consumer) for each in handled]
    chosen = handled[names.index((stream, consumer)) if (stream, consumer) in names else 0]
    return [chosen._replace(stream=stream, consumer=consumer)]


def _counted(each: Handling, given: dict[str, Any]) -> tuple[Handling, Iterator[int]]:
    """A handler with the options of the command line, and the counter of its failures."""
    options = {**each.options, **given}
    failures = itertools.count()  # a step is atomic; the errors themselves would keep messages
    before = options.get("on_failure")

    def count(messages: Any, error: BaseException) -> Any:
        next(failures)
        return None if before is None else before(messages, error)

    return each._replace(options={**options, "on_failure": count}), failures
