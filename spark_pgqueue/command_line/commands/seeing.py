"""Commands that show figures, once or repeatedly, and explain single messages."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spark_pgqueue import client, metrics, serving, web
from spark_pgqueue.client import ConsumerStats, Look, Rates, Stream
from spark_pgqueue.command_line.app import app, connect, consumer_app, end_at_sigterm, one_line
from spark_pgqueue.command_line.arguments import (
    AnyStream,
    ConsumerName,
    Json,
    Seq,
    StreamName,
    Url,
    default_of,
)
from spark_pgqueue.command_line.output import (
    figure,
    json_of_fields,
    per_second,
    show,
    span,
)
from spark_pgqueue.postgres.url import describe
from spark_pgqueue.printable import printable

Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")]

AllRates = dict[tuple[str, str], Rates]
Cells = dict[str, Callable[[ConsumerStats, Look, Rates], str]]


def _count(name: str) -> Callable[[ConsumerStats, Look, Rates], str]:
    return lambda each, look, rates: figure(each, name)


def _age(since: datetime | None, look: Look) -> str:
    return span(None if since is None else max(0.0, (look.at - since).total_seconds()))


# By heading, in the order of the columns. A terminal is 80 columns wide.
NAMES: Cells = {
    "stream": lambda each, look, rates: printable(each.stream),
    "consumer": lambda each, look, rates: printable(each.consumer),
}
RATES: Cells = {
    "sent/s": lambda each, look, rates: per_second(rates.sent),
    "settled/s": lambda each, look, rates: per_second(rates.settled),
}
OLDEST: Cells = {"oldest": lambda each, look, rates: _age(each.oldest_at, look)}
STATUS: Cells = {"status": lambda each, look, rates: each.status}
COUNTS: Cells = {
    name: _count(name)
    for name in ("new", "ready", "delayed", "waiting", "claimed", "dead", "backlog", "expired")
}
TOP: Cells = {
    **NAMES,
    "backlog": _count("backlog"),
    **RATES,
    "empty in": lambda each, look, rates: span(rates.empty_in),
    **OLDEST,
    "claimed": _count("claimed"),
    "held": lambda each, look, rates: _age(each.oldest_claim_at, look),
    "dead": _count("dead"),
    **STATUS,
}


class Sorting(StrEnum):
    """The order of consumers in `top`."""

    backlog = "backlog"
    age = "age"
    sent = "sent"
    settled = "settled"
    claimed = "claimed"
    dead = "dead"


@app.command()
def stats(
    stream: AnyStream = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until Ctrl-C, with rates.")
    ] = False,
    interval: Interval = 2.0,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Show the figures of each consumer. Counts no messages, and so costs little.

    oldest: since when a message waits that could be delivered now. With --watch, also how many
    messages per second are sent to the consumer's stream, and settled: acknowledged, or dead.
    """
    with connect(url) as queue:
        rows = queue.stats(stream)  # an unknown stream is an error
        if as_json and not watch:
            show(rows, ConsumerStats, as_json)
            return

        def table(look: Look, rates: AllRates) -> Table:
            shown = [each for each in look.consumers if stream in (None, each.stream)]
            return _table({**NAMES, **COUNTS, **OLDEST, **STATUS, **(RATES if watch else {})},
                          shown, look, rates)  # fmt: skip

        if not watch and not rows:
            show(rows, ConsumerStats, as_json)
        elif not as_json:
            _show_again(queue, table, interval, None if watch else 1)
        else:
            for look, rates in _looks(queue, interval):
                for each in look.consumers:
                    if stream in (None, each.stream):
                        print(_json_of(each, look, rates), flush=True)
        _name_without_consumer(each for each in queue.streams() if stream in (None, each.name))


def _name_without_consumer(streams: Iterable[Stream]) -> None:
    """Name the streams with messages that no consumer gets; doctor says what to do."""
    names = [printable(each.name) for each in streams if each.sent and not each.consumers]
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        shown = f"{', '.join(names[:5])}{more}"
        print(f"No consumer receives the messages of {shown}: see pgqueue doctor.", file=sys.stderr)


@app.command()
def top(
    by: Annotated[Sorting, typer.Option(help="The figure to sort by.")] = Sorting.backlog,
    interval: Interval = 2.0,
    looks: Annotated[
        int | None, typer.Option("--count", min=1, help="Stop after this many updates.")
    ] = None,
    url: Url = None,
) -> None:
    """Watch the consumers of all streams, the largest backlog first, until Ctrl-C.

    empty in: when the backlog will be empty at the current rate. oldest: since when a message waits
    that could be delivered now. held: since when the oldest claim is held.
    """
    console = Console()

    def table(look: Look, rates: AllRates) -> Table:
        def size(each: ConsumerStats) -> float:
            rate = rates[each.stream, each.consumer]
            if by == Sorting.age:
                since = each.oldest_at or look.at
                return (look.at - since).total_seconds()
            if by in (Sorting.sent, Sorting.settled):
                return getattr(rate, by.value) or 0.0
            return getattr(each, by.value)

        rows = sorted(look.consumers, key=size, reverse=True)
        return _table(TOP, rows[: max(1, console.height - 2)], look, rates)

    with connect(url) as queue:
        _show_again(queue, table, interval, looks)


_AGAIN = {
    "now": "retry {} --seq {}",
    "later": "postpone {} {} --until TIME",
    "never": "cancel {} {}",
}
_WAYS_ON = dict.fromkeys(("ready", "delayed", "waiting"), _AGAIN) | {
    "dead": {"now": "dead redrive {} --seq {}", "never": "dead purge {} --seq {}"}
}
"""What a person can do with a message that has failed, by its state: the arguments of `pgqueue`."""


@app.command()
def explain(
    stream: StreamName,
    consumer: ConsumerName,
    seq: Seq,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Explain the state of a message for one consumer, and how long it lasts."""
    with connect(url) as queue:
        found = queue.explain(stream, consumer, seq)
        failures = queue.failures(stream, consumer, seq)
    if as_json:
        listed = [dataclasses.asdict(failure) for failure in failures]
        print(json_of_fields(dataclasses.asdict(found) | {"failures": listed}))
    else:
        until = f" (until {found.until:%Y-%m-%d %H:%M:%S %Z})" if found.until else ""
        print(f"{found.state}: {one_line(found.because)}{until}")
        for each in failures:
            error = f"{each.owner or 'a worker'}: {each.error or 'no reason given'}"
            print(f"failed {each.failed_at:%Y-%m-%d %H:%M:%S %Z}  {one_line(error)}")
        of = shlex.join([stream, consumer])
        failed = failures or found.state == "dead"
        for word, command in (_WAYS_ON.get(found.state, {}) if failed else {}).items():
            print(one_line(f"{word:7}pgqueue {command.format(of, seq)}"))


@consumer_app.command("keys")
def consumer_keys(
    stream: StreamName,
    consumer: ConsumerName,
    limit: Annotated[
        int, typer.Option("--max", min=1, help="At most this many keys.")
    ] = default_of(client.Client.key_stats, "limit"),
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the keys with the most waiting, delayed and claimed messages of a consumer."""
    with connect(url) as queue:
        show(queue.key_stats(stream, consumer, limit=limit), client.KeyStats, as_json)


Listen = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Serve them on this address until Ctrl-C. Without a host, only to this machine; "
        "0.0.0.0:PORT for all.",
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A host name that clients may use for it; can be repeated."),
]


@app.command("metrics")
def print_metrics(
    listen: Listen = None,
    allow_host: AllowHost = None,
    grafana: Annotated[
        bool, typer.Option("--grafana", help="Print a Grafana dashboard to import.")
    ] = False,
    url: Url = None,
) -> None:
    """Print all figures as OpenMetrics text; or serve them at /metrics, for Prometheus."""
    if grafana:
        print(metrics.DASHBOARD.read_text(), end="")
        return
    with connect(url) as queue:
        if listen is None:
            print(metrics.look_at(queue), end="")
            return
        where = address_of(listen, metrics.PORT)
        queue.look()  # before it listens: an error now would not go away
        with metrics.serve(lambda: queue, where, tuple(allow_host or ())) as server:
            serve(server, where, "metrics")


@app.command("web")
def serve_page(
    listen: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="The address to listen on. Without a host, only for this machine; 0.0.0.0:PORT "
            "for all.",
        ),
    ] = str(web.PORT),
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions",
            help="Allow the page to pause, move, redrive, retry, postpone and cancel.",
        ),
    ] = False,
    allow_host: AllowHost = None,
    url: Url = None,
) -> None:
    """Serve a page with live figures, until Ctrl-C.

    It has no password: anyone who can reach it sees what the role of --url may see, and with
    --allow-actions can do what that role may do.
    """
    where = address_of(listen, web.PORT)
    with connect(url) as queue:
        queue.look()  # before it listens: an error now would not go away
        with web.serve(
            queue,
            where,
            title=describe(url),
            names=tuple(allow_host or ()),
            allow_actions=allow_actions,
        ) as server:
            serve(server, where)


def address_of(text: str, port: int) -> serving.Address:
    try:
        return serving.address(text, port)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--listen") from None


def serve(server: serving.Server, where: serving.Address, path: str = "") -> None:
    """Print the address and its audience, and answer until Ctrl-C."""
    to = "this machine only" if where.is_local else "anyone who can reach it, without a password"
    print(f"Listening at {server.url}{path}, to {to}.", file=sys.stderr, flush=True)
    end_at_sigterm()
    server.serve_forever()


def _show_again(
    queue: client.Client,
    table: Callable[[Look, AllRates], Table],
    interval: float,
    looks: int | None,
) -> None:
    """Show a table for each look: in a terminal the same one, otherwise one after the other."""
    with ExitStack() as stack:
        live = stack.enter_context(Live(auto_refresh=False)) if sys.stdout.isatty() else None
        for number, (look, rates) in enumerate(_looks(queue, interval), 1):
            if live:
                live.update(table(look, rates), refresh=True)
            else:  # a file or a pipe is not cut to 80 columns
                Console(width=250).print(table(look, rates))
                sys.stdout.flush()
            if number == looks:
                return


def _looks(queue: client.Client, interval: float) -> Iterator[tuple[Look, AllRates]]:
    """Endless looks, each with the rates since the previous look."""
    before = None
    while True:
        look = queue.look()
        yield look, client.rates(before, look)
        before = look
        time.sleep(interval)


def _table(cells: Cells, rows: list[ConsumerStats], look: Look, rates: AllRates) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in cells:
        if name in NAMES:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for each in rows:
        rate = rates[each.stream, each.consumer]
        table.add_row(*(Text(cell(each, look, rate)) for cell in cells.values()))
    return table


def _json_of(each: ConsumerStats, look: Look, rates: AllRates) -> str:
    rate = rates[each.stream, each.consumer]
    more = {"at": look.at, "sent_per_second": rate.sent, "settled_per_second": rate.settled}
    return json_of_fields(dataclasses.asdict(each) | more)
