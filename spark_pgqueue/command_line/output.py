"""The output of commands: lines, JSON objects and tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from spark_pgqueue import client
from spark_pgqueue.command_line.app import fail
from spark_pgqueue.printable import for_json, printable

if TYPE_CHECKING:
    from rich.table import Table


def report(as_json: bool, text: str | None = None, /, **fields: Any) -> None:
    """Print the result of a command: an object with --json; otherwise a line, or nothing."""
    if as_json:
        print(json_of_fields(fields), flush=True)
    elif text is not None:
        print(text, flush=True)


def settled(count: int, claim: int, done: str, as_json: bool = False) -> None:
    if count == 0:
        fail(f"claim {claim}: no message {done}")
    report(as_json, f"{count_of(count)} {done}", **{"claim_id": claim, done: count})


def count_of(count: int, what: str = "message") -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class _Shown(Protocol):
    """The common part of messages of all kinds."""

    @property
    def seq(self) -> int: ...
    @property
    def key(self) -> str | None: ...
    @property
    def data(self) -> str | bytes | None: ...


def line_of(message: _Shown) -> str:
    data = message.data
    shown = f"\\x{data.hex()}" if isinstance(data, bytes) else data or ""
    cells = [str(message.seq), message.key or "", shown]
    if isinstance(message, client.PeekedMessage):
        cells.insert(1, message.state)
    elif isinstance(message, client.DeadMessage):
        cells += [message.reason, message.error or "", str(message.deliver_count)]
        if message.details is not None:
            cells.append(json.dumps(message.details, ensure_ascii=False))
    return "\t".join(map(printable, cells))


def json_of_row(row: Any) -> str:
    return json_of_fields(dataclasses.asdict(row))


def json_of_stored(message: client.StoredMessage) -> str:
    return json_of_fields(message._asdict() | {"headers": message.headers or {}})


def json_of_fields(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, default=for_json, ensure_ascii=False)
    if text.isprintable() and sys.stdout.encoding.lower() == "utf-8":
        return text
    # All escapes of JSON, which are exact; also U+009B, which JSON otherwise does not escape.
    return json.dumps(fields, default=for_json)


def show(rows: list[Any], kind: type, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json_of_row(row), flush=True)
    elif not rows:
        print("Nothing to show.", file=sys.stderr)
    else:
        from rich.console import Console

        # In a file or a pipe the table is not cut to 80 columns.
        Console(width=None if sys.stdout.isatty() else 250).print(table(rows, kind))


def section(title: str, rows: list[Any], kind: type) -> None:
    """A table under a heading; nothing for no rows."""
    if rows:
        print(f"\n{title}")
        show(rows, kind, as_json=False)


def details(row: Any, *hidden: str) -> None:
    """The fields of a row, one on each line, without empty ones."""
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if value not in (None, [], {}) and field.name not in (*hidden, ESTIMATED):
            print(f"{field.name.replace('_', ' ')}: {figure(row, field.name)}")


# Other columns, or --json, show these; a terminal is 80 columns wide.
_HIDDEN = {
    client.ConsumerStats: (
        "ordering", "claims", "next_expiry", "skipped", "paused", "taken", "settled", "oldest_at",
        "oldest_claim_at",
    ),
    client.ConsumerInfo: ("defaults",),
    client.Stream: ("defaults",),
    client.OpenClaim: ("query", "messages", "first_seq"),
    client.Schedule: ("key", "data", "headers", "priority", "consumers", "last_sent_at"),
}  # fmt: skip


ESTIMATED = "estimated"
"""The field that says whether the figures `ESTIMATES` are estimates."""

ESTIMATES = ("new", "backlog", "behind")


def figure(row: Any, name: str) -> str:
    """A field of a row as text, with `~` before an estimate."""
    about = "~" if name in ESTIMATES and getattr(row, ESTIMATED, False) else ""
    return about + _cell(getattr(row, name), name)


def table(rows: list[Any], kind: type) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    hidden = (*_HIDDEN.get(kind, ()), ESTIMATED)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in hidden]
    for name in names:
        first = getattr(rows[0], name) if rows else None
        if isinstance(first, int) and not isinstance(first, bool):
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(figure(row, name)) for name in names))
    return table


def span(seconds: float | None) -> str:
    """A duration in two or three digits."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def per_second(rate: float | None) -> str:
    """A rate in digits that are readable while they change."""
    if rate is None:
        return ""
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


def _cell(value: Any, name: str = "") -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, timedelta):
        return _interval(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):  # an id without separators, as other commands take it, or a count
        return str(value) if name.endswith(("_id", "seq")) else f"{value:,}"
    if name == "seqs":  # pairs of first and last
        return ", ".join(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in value)
    if isinstance(value, dict):
        value = " ".join(f"{k}={'' if each is None else each}" for k, each in value.items())
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return "" if value is None else printable(str(value))


def _interval(value: timedelta) -> str:
    """A duration as Postgres prints an interval, and reads it: 7 days, 1 day 02:30:00."""
    days, rest = divmod(value, timedelta(days=1))
    time = (datetime.min + rest).time().isoformat() if rest or not days else ""
    return " ".join(filter(None, (count_of(days, "day") if days else "", time)))
