"""What commands print: lines, JSON objects and tables."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
from datetime import datetime, timedelta
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spark_pgqueue import client
from spark_pgqueue.command_line.app import fail
from spark_pgqueue.printable import printable


def told(as_json: bool, text: str | None = None, /, **fields: Any) -> None:
    """Say what a command did: an object with --json, else a line, or nothing where all is said."""
    if as_json:
        print(json_of_fields(fields), flush=True)
    elif text is not None:
        print(text, flush=True)


def settled(count: int, claim: int, done: str, as_json: bool = False) -> None:
    if count == 0:
        fail(f"claim {claim}: no message {done}")
    told(as_json, f"{count_of(count)} {done}", **{"claim_id": claim, done: count})


def count_of(count: int) -> str:
    return f"{count} message" if count == 1 else f"{count} messages"


class _Shown(Protocol):
    """A message, however it was come by."""

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
    return "\t".join(map(printable, cells))


def json_of_row(row: Any, claim_id: int | None = None) -> str:
    fields = {} if claim_id is None else {"claim_id": claim_id}
    return json_of_fields(fields | dataclasses.asdict(row))


def json_of_stored(message: client.StoredMessage) -> str:
    return json_of_fields(message._asdict() | {"headers": message.headers or {}})


def json_of_fields(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, default=_plain, ensure_ascii=False)
    if text.isprintable() and sys.stdout.encoding.lower() == "utf-8":
        return text
    # All escapes that JSON has, which are exact: also of U+009B, which it otherwise leaves alone.
    return json.dumps(fields, default=_plain)


def ascii_json(text: str) -> str:
    """JSON that says the same, in characters that any terminal and any encoding takes."""
    return re.sub(r"[^\x00-\x7e]", lambda found: json.dumps(found[0])[1:-1], text)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.total_seconds() if isinstance(value, timedelta) else value.isoformat()


def show(rows: list[Any], kind: type, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json_of_row(row), flush=True)
    elif not rows:
        print("Nothing to show.", file=sys.stderr)
    else:
        # Not cut to 80 columns in a file or a pipe.
        Console(width=None if sys.stdout.isatty() else 250).print(table(rows, kind))


def section(title: str, rows: list[Any], kind: type) -> None:
    """A table under a heading; nothing where it has no rows."""
    if rows:
        print(f"\n{title}")
        show(rows, kind, as_json=False)


def details(row: Any, *hidden: str) -> None:
    """What a row has, a line each; without what is empty."""
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if value not in (None, [], {}) and field.name not in hidden:
            print(f"{field.name.replace('_', ' ')}: {_cell(value, field.name)}")


# Told by other columns, or by --json; a terminal is 80 columns wide.
_HIDDEN = {
    client.ConsumerStats: (
        "ordering", "claims", "next_expiry", "skipped", "paused", "taken", "settled", "oldest_at",
        "oldest_claim_at",
    ),
    client.OpenClaim: ("query", "messages", "first_seq"),
    client.Schedule: ("key", "data", "headers", "priority", "consumers", "last_sent_at"),
}  # fmt: skip


def table(rows: list[Any], kind: type) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    names = [f.name for f in dataclasses.fields(kind) if f.name not in _HIDDEN.get(kind, ())]
    for name in names:
        first = getattr(rows[0], name) if rows else None
        if isinstance(first, int) and not isinstance(first, bool):
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(getattr(row, name), name)) for name in names))
    return table


def span(seconds: float | None) -> str:
    """A time that passed, in two digits or three."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def per_second(rate: float | None) -> str:
    """A rate, in digits that can be read while they change."""
    if rate is None:
        return ""
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


def _cell(value: Any, name: str = "") -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):  # the number of something, as other commands take it, or how many
        return str(value) if name.endswith(("_id", "seq")) else f"{value:,}"
    if name == "seqs":  # pairs of first and last
        return ", ".join(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in value)
    if isinstance(value, dict):
        value = " ".join(f"{name}={each}" for name, each in value.items())
    return "" if value is None else printable(str(value))
