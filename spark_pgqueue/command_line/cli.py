"""The command line `pgqueue`. Each command is one or two calls of the client.

Results go to standard output, everything else to standard error. The exit code is 0 for success, 1
for an error, which is one line and a hint, and 2 for a command line that makes no sense.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import psycopg
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from spark_pgqueue import __version__, client
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError, how_to_install
from spark_pgqueue.postgres.url import redact
from spark_pgqueue.printable import printable
from spark_pgqueue.spark import options

# Hints of the database in this program's words.
_AS_COMMANDS = {
    r"select pgqueue\.create_stream\(('.*?')\)": r"pgqueue stream create \1",
    r"select pgqueue\.set_dedup_window\(('.*?'), ('.*?')\)": r"pgqueue stream dedup \1 \2",
    r"select pgqueue\.create_consumer\(('.*?'), ('.*?')\)": r"pgqueue consumer create \1 \2",
    r"pass null to publish": "leave --consumer away to publish",
}

_BATCH = 10_000  # lines that `send --lines` holds at once
_TAIL = 1_000  # messages that `tail` holds at once


class _Commands(TyperGroup):
    """The commands, with errors as one line and a hint instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        if sys.stdout is None:  # what was received would be acknowledged, and seen by nobody
            _fail("standard output is closed", hint="for no output, give > /dev/null")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # where it is not UTF-8
        try:
            return super().invoke(ctx)
        except PgQueueError as error:
            _fail(error.message, error.hint)
        except psycopg.Error as error:
            _fail(error.diag.message_primary or str(error), error.diag.message_hint)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # typer ends without a word
        except OSError as error:
            _fail(str(error))
        except Exception as error:
            if hasattr(error, "format_message") and hasattr(error, "message"):
                _clarify(error)
            raise


# No pretty exceptions: they show local variables, and a url may hold a password.
_PLAIN: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_HELP = (
    "A message queue and stream in Postgres.\n\n"
    "A command takes its database from --url, else from PGQUEUE_URL, else from libpq's own "
    "environment (PGHOST, PGSERVICE, ...). Other users of the machine see a command line, and so a "
    "password in --url: keep it in PGQUEUE_URL, a password file (~/.pgpass, or PGPASSFILE) or a "
    "service."
)
app = typer.Typer(cls=_Commands, help=_HELP, **_PLAIN)
stream_app = typer.Typer(help="Create, drop and list streams.", **_PLAIN)
consumer_app = typer.Typer(help="Create, drop and list the consumers of streams.", **_PLAIN)
app.add_typer(stream_app, name="stream")
app.add_typer(consumer_app, name="consumer")
group_app = typer.Typer(help="Create, drop, list and move groups of workers.", **_PLAIN)
app.add_typer(group_app, name="group")


class Kind(StrEnum):
    """What a stream's messages hold."""

    text = "text"
    json = "json"
    binary = "binary"


class Ordering(StrEnum):
    """What a consumer delivers one after the other."""

    none = "none"
    key = "key"
    stream = "stream"


class Unread(StrEnum):
    """What becomes of messages that may go, and that a consumer still owes."""

    keep = "keep"
    drop = "drop"


class Group(StrEnum):
    """What a role may do."""

    producer = "producer"
    consumer = "consumer"
    observer = "observer"
    admin = "admin"


def _duration(text: str) -> timedelta:
    try:
        return options.duration(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a duration longer than 0 with a unit: 500ms, 30s or '5 minutes'"
        ) from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([kMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size: 1000000, 500MB or 10GB")
    return int(found[1]) << 10 * " kmgt".index(found[2].lower() or " ")


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a time such as 2026-01-31T12:00:00") from None


_POSITION = "earliest|latest|TIME|'seq N'"


def _start(text: str) -> datetime | str:
    if text in ("earliest", "latest") or text.startswith("seq "):
        return text
    try:
        return _time(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, and not earliest, latest or 'seq N'") from None


def _place(text: str) -> datetime | str | dict[str, Any]:
    try:
        offset = json.loads(text)
    except (ValueError, RecursionError):
        offset = None
    return offset if isinstance(offset, dict) else _start(text)


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


_START = (
    "All messages that there are, those from now on, those published since TIME (ISO 8601, local "
    "unless it has a zone), or those from a number on."
)

Url = Annotated[
    str | None,
    typer.Option(
        envvar="PGQUEUE_URL",
        show_default=False,
        help="The database: a libpq URI or conninfo string. Without it, libpq's own environment "
        "(PGHOST, PGSERVICE, ...) decides. A password in it shows in `ps`: see pgqueue --help.",
    ),
]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", show_default=False)]
ConsumerName = Annotated[str, typer.Argument(metavar="CONSUMER", show_default=False)]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", show_default=False)]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
ToStream = Annotated[str, typer.Argument(metavar="TO_STREAM", show_default=False)]
Position = Annotated[
    Any,
    typer.Argument(
        parser=_start, metavar=_POSITION, show_default=False, help="TIME is ISO 8601, local."
    ),
]
ClaimId = Annotated[int, typer.Argument(metavar="CLAIM", show_default=False, min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
IfNotExists = Annotated[bool, typer.Option("--if-not-exists", help="Accept an existing one.")]
IfExists = Annotated[bool, typer.Option("--if-exists", help="Accept that there is none.")]
Seqs = Annotated[
    list[int] | None,
    typer.Option("--seq", min=1, help="Only this message of the claim; can be repeated."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pgqueue {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None: ...


@app.command()
def install(url: Url = None) -> None:
    """Install or upgrade the schema pgqueue. Safe to repeat."""
    with _connect(url) as queue:
        print(f"The schema pgqueue is installed, version {queue.install()}.")


@app.command("sql")
def print_sql(
    transaction: Annotated[
        bool,
        typer.Option(
            "--transaction/--no-transaction",
            help="Begin and commit one; not for Flyway and others that begin their own.",
        ),
    ] = True,
) -> None:
    """Print what `install` runs, as one file: for `psql <`, Flyway, or `docker exec`."""
    print(schema.script(transaction=transaction), end="")


@app.command()
def uninstall(yes: Yes = False, url: Url = None) -> None:
    """Delete the schema pgqueue with all streams, unless others' objects depend on it."""
    with connection.connect(url, patience=0) as conn:
        content = schema.content(conn)
        if content is None:
            print("There is no schema pgqueue.", file=sys.stderr)
            return
        _confirm(f"Delete the schema pgqueue in database {conn.info.dbname!r}: {content}?", yes)
        schema.uninstall(conn)
        print(f"Deleted: {content}. The group roles, if there are any, are the server's, and stay.")


@app.command()
def grant(
    group: Annotated[Group, typer.Argument(show_default=False, help="What it may do.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", show_default=False)],
    url: Url = None,
) -> None:
    """Let a role send, receive, look, or create and drop; in all streams."""
    with connection.connect(url, patience=0) as conn:
        schema.check(conn)
        schema.grant(conn, group.value, role)


@stream_app.command("create")
def stream_create(
    name: StreamName,
    kind: Annotated[Kind, typer.Option(help="What its messages hold.")] = Kind.text,
    if_not_exists: IfNotExists = False,
    notify: Annotated[bool, typer.Option(help="Wake up who waits at each publication.")] = True,
    max_bytes: Annotated[int, typer.Option(help="Bytes of a payload.")] = 16 << 20,
    max_header_bytes: Annotated[
        int, typer.Option(help="Bytes of a message's headers, as JSON.")
    ] = 64 << 10,
    dedup_window: Annotated[
        timedelta | None,
        typer.Option(
            parser=_duration, metavar="DURATION", help="Remember dedup keys so long. Default: none."
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Create a stream."""
    with _connect(url) as queue:
        queue.create_stream(
            name,
            kind.value,
            if_not_exists=if_not_exists,
            notify=notify,
            max_bytes=max_bytes,
            max_header_bytes=max_header_bytes,
            dedup_window=dedup_window,
        )


@stream_app.command("dedup")
def stream_dedup(
    name: StreamName,
    window: Annotated[
        str,
        typer.Argument(metavar="DURATION|off", show_default=False, help="How long: '1 day'."),
    ],
    url: Url = None,
) -> None:
    """Say for how long a stream remembers dedup keys: no other message with one is published."""
    with _connect(url) as queue:
        queue.set_dedup_window(name, None if window == "off" else _duration(window))


@stream_app.command("drop")
def stream_drop(
    name: StreamName, yes: Yes = False, if_exists: IfExists = False, url: Url = None
) -> None:
    """Delete a stream with its messages and consumers."""
    with _connect(url) as queue:
        if any(each.name == name for each in queue.streams()):
            _confirm(f"Delete stream {name!r} with its messages and consumers?", yes)
        elif if_exists:
            return
        queue.drop_stream(name)


@stream_app.command("retention")
def stream_retention(
    name: StreamName,
    keep_for: Annotated[
        timedelta | None,
        typer.Option("--for", parser=_duration, metavar="DURATION", help="From publication: 7d."),
    ] = None,
    messages: Annotated[
        int | None, typer.Option(help="As long as not so many came after it.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            "--bytes", parser=_bytes, metavar="SIZE", help="As long as what came after: 10GB."
        ),
    ] = None,
    done: Annotated[bool, typer.Option("--done", help="Until all consumers are done.")] = False,
    unread: Annotated[
        Unread, typer.Option(help="What a consumer still owes when it may go.")
    ] = Unread.keep,
    keep_dead: Annotated[
        timedelta | None,
        typer.Option("--dead", parser=_duration, metavar="DURATION", help="Dead letters."),
    ] = None,
    forever: Annotated[bool, typer.Option("--forever", help="Keep all, as at first.")] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Set how long messages are kept, or show it; `pgqueue maintain` does it.

    The options are all that is kept to then: what is not given is no limit.
    """
    limits = (keep_for, messages, size, keep_dead)
    with _connect(url) as queue:
        if forever and (done or any(limit is not None for limit in limits)):
            _fail("--forever is no limit, and another one was given")
        if forever or done or unread != Unread.keep or any(limit is not None for limit in limits):
            queue.set_retention(
                name,
                keep_for=keep_for,
                messages=messages,
                size=size,
                done=done,
                unread=unread.value,
                keep_dead=keep_dead,
            )
        for each in queue.retention(name):
            if as_json:
                print(_as_json(each))
                continue
            for field in dataclasses.fields(each):
                value = getattr(each, field.name)
                if value not in (None, []) and field.name != "stream":
                    print(f"{field.name.replace('_', ' ')}: {_cell(value)}")


@stream_app.command("list")
def stream_list(as_json: Json = False, url: Url = None) -> None:
    """List the streams; the number of messages is an estimate."""
    with _connect(url) as queue:
        _show(queue.streams(), client.Stream, as_json)


@stream_app.command("bind")
def stream_bind(stream: StreamName, topic: Topic, to_stream: ToStream, url: Url = None) -> None:
    """Copy what is sent from now on, and has a key of this topic, to another stream."""
    with _connect(url) as queue:
        queue.bind(stream, topic, to_stream)


@stream_app.command("unbind")
def stream_unbind(stream: StreamName, topic: Topic, to_stream: ToStream, url: Url = None) -> None:
    """Copy nothing of this topic any more."""
    with _connect(url) as queue:
        if not queue.unbind(stream, topic, to_stream):
            _fail(f"{topic!r} of stream {stream!r} is not bound to {to_stream!r}")


@stream_app.command("bindings")
def stream_bindings(
    stream: Annotated[str | None, typer.Argument(show_default="all streams")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List what is copied to other streams."""
    with _connect(url) as queue:
        _show(queue.bindings(stream), client.Binding, as_json)


@consumer_app.command("create")
def consumer_create(
    stream: StreamName,
    name: ConsumerName,
    start: Annotated[
        Any,
        typer.Option(
            parser=_start,
            metavar=_POSITION,
            help="All messages that there are, those from now on, those published since TIME "
            "(ISO 8601, local unless it has a zone), or those from number N on.",
        ),
    ] = "latest",
    ordering: Annotated[
        Ordering, typer.Option(help="What to deliver one after the other.")
    ] = Ordering.none,
    max_deliver_count: Annotated[
        int | None,
        typer.Option(min=1, help="Dead-letter a message that failed so often. Default: never."),
    ] = None,
    visibility_timeout: Annotated[
        timedelta,
        typer.Option(parser=_duration, metavar="DURATION", help="How long a claim is held."),
    ] = "30s",  # type: ignore[assignment]  # typer parses the default
    if_not_exists: IfNotExists = False,
    topic: Annotated[
        str | None,
        typer.Option(help="Only messages whose key is of this topic: 'orders.*.eu', 'orders.#'."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="JSONPATH",
            help="Only messages that pass this: '$.data.total > 100'; of key, headers and data.",
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Create a consumer of a stream."""
    with _connect(url) as queue:
        queue.create_consumer(
            stream,
            name,
            start=start,
            ordering=ordering.value,
            max_deliver_count=max_deliver_count,
            visibility_timeout=visibility_timeout,
            if_not_exists=if_not_exists,
            topic=topic,
            where=where,
        )


@consumer_app.command("drop")
def consumer_drop(
    stream: StreamName,
    name: ConsumerName,
    yes: Yes = False,
    if_exists: IfExists = False,
    url: Url = None,
) -> None:
    """Delete a consumer with all that it has not finished."""
    with _connect(url) as queue:
        if any((each.stream, each.name) == (stream, name) for each in queue.consumers()):
            _confirm(f"Delete consumer {name!r} of stream {stream!r}?", yes)
        elif if_exists:
            return
        queue.drop_consumer(stream, name)


@consumer_app.command("seek")
def consumer_seek(stream: StreamName, name: ConsumerName, to: Position, url: Url = None) -> None:
    """Move a consumer, as if it were created there; its claims end. Dead letters stay dead."""
    with _connect(url) as queue:
        print(f"{_messages(queue.seek(stream, name, to))} forgotten")


@consumer_app.command("replay")
def consumer_replay(
    stream: StreamName,
    name: ConsumerName,
    start: Position,
    to: Annotated[Any, typer.Argument(parser=_start, metavar="TO", show_default=True)] = "latest",
    url: Url = None,
) -> None:
    """Deliver messages once more that a consumer has finished or skipped."""
    with _connect(url) as queue:
        print(f"{_messages(queue.replay(stream, name, start, to))} to arrive again")


@consumer_app.command("pause")
def consumer_pause(stream: StreamName, name: ConsumerName, url: Url = None) -> None:
    """Let a consumer claim nothing, until it is resumed."""
    with _connect(url) as queue:
        queue.pause(stream, name)


@consumer_app.command("resume")
def consumer_resume(stream: StreamName, name: ConsumerName, url: Url = None) -> None:
    """Let a paused consumer claim again."""
    with _connect(url) as queue:
        queue.resume(stream, name)


@consumer_app.command("list")
def consumer_list(
    stream: Annotated[str | None, typer.Argument(show_default="all streams")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the consumers of a stream, or of all."""
    with _connect(url) as queue:
        _show(queue.consumers(stream), client.Consumer, as_json)


@group_app.command("create")
def group_create(
    stream: StreamName,
    name: GroupName,
    partitions: Annotated[
        int, typer.Option(help="So many workers can share it. It never changes.")
    ] = 16,
    start: Annotated[Any, typer.Option(parser=_start, metavar=_POSITION, help=_START)] = "latest",
    if_not_exists: IfNotExists = False,
    url: Url = None,
) -> None:
    """Create a group: workers that share a stream by partitions of its keys."""
    with _connect(url) as queue:
        queue.create_group(
            stream, name, partitions=partitions, start=start, if_not_exists=if_not_exists
        )


@group_app.command("drop")
def group_drop(
    stream: StreamName,
    name: GroupName,
    yes: Yes = False,
    if_exists: IfExists = False,
    url: Url = None,
) -> None:
    """Delete a group."""
    with _connect(url) as queue:
        if any((each.stream, each.name) == (stream, name) for each in queue.groups()):
            _confirm(f"Delete group {name!r} of stream {stream!r}?", yes)
        elif if_exists:
            return
        queue.drop_group(stream, name)


@group_app.command("list")
def group_list(
    stream: Annotated[str | None, typer.Argument(show_default="all streams")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the groups, and how far the slowest partition of each is behind."""
    with _connect(url) as queue:
        _show(queue.groups(stream), client.GroupStats, as_json)


@group_app.command("lag")
def group_lag(stream: StreamName, name: GroupName, as_json: Json = False, url: Url = None) -> None:
    """Show who has which partition, and how far behind each is, in messages of all keys."""
    with _connect(url) as queue:
        _show(queue.partitions(stream, name), client.PartitionStats, as_json)


@group_app.command("reset")
def group_reset(
    stream: StreamName,
    name: GroupName,
    to: Annotated[
        Any,
        typer.Option("--to", parser=_start, metavar=_POSITION, help=_START),
    ],
    yes: Yes = False,
    url: Url = None,
) -> None:
    """Move a group to another position; its workers go on from there."""
    with _connect(url) as queue:
        _confirm(f"Move group {name!r} of stream {stream!r} to {to}?", yes)
        count = queue.reset_group(stream, name, to)
        print(f"{count} {'message' if count == 1 else 'messages'} forgotten or skipped")


@app.command()
def send(
    stream: StreamName,
    data: Annotated[
        str | None, typer.Option(help="The payload. Default: all of standard input, as it is.")
    ] = None,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="A message per line of standard input, all or none of them."),
    ] = False,
    key: Annotated[str | None, typer.Option(help="What ordering by key goes by.")] = None,
    header: Annotated[
        list[Any] | None,
        typer.Option(parser=_header, metavar="NAME=VALUE", help="Can be repeated."),
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher is earlier.")] = 0,
    deliver_at: Annotated[
        datetime | None,
        typer.Option(
            parser=_time, metavar="TIME", help="Not before (ISO 8601, local unless it has a zone)."
        ),
    ] = None,
    consumer: Annotated[
        list[str] | None, typer.Option(help="Only to this one; can be repeated. Default: all.")
    ] = None,
    dedup_key: Annotated[
        str | None,
        typer.Option(help="Publish nothing where a message with this key was sent not long ago."),
    ] = None,
    url: Url = None,
) -> None:
    """Publish a message, and print its seq; or a message per line, and print how many."""
    if lines and data is not None:
        raise typer.BadParameter("--lines reads standard input: leave --data away")
    if lines and dedup_key is not None:
        raise typer.BadParameter("--dedup-key is of one message: leave --lines away")
    headers = dict(header) if header else None
    publish = {"priority": priority, "deliver_at": deliver_at, "consumers": consumer}
    given = b""
    if data is not None:
        given = os.fsencode(data)
    elif not lines:
        given = _standard_input()
    with _connect(url) as queue:
        binary = queue.kind(stream) == "binary"
        if not lines:
            payload = _payload(given, binary)
            print(
                queue.send(
                    stream, payload, key=key, headers=headers, dedup_key=dedup_key, **publish
                )
            )
            return
        sent = 0
        with queue.transaction():
            for batch in _batches(binary):
                publish["keys"] = [key] * len(batch)
                publish["headers"] = [headers] * len(batch)
                sent += len(queue.send_batch(stream, batch, **publish))
    print(f"{_messages(sent)} sent")


@app.command()
def capture(
    table: Annotated[
        str | None, typer.Argument(show_default="none: list what is captured", metavar="TABLE")
    ] = None,
    stream: Annotated[str | None, typer.Argument(show_default=False, metavar="STREAM")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="A column of the key; can be repeated. Default: the primary key."),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Publish this column; can be repeated. Default: all.")
    ] = None,
    old: Annotated[bool, typer.Option("--old", help="Rows as they were before, too.")] = False,
    outbox: Annotated[
        bool, typer.Option("--outbox", help="Capture inserts, and delete the rows again.")
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Let what is written to a table become messages of a stream; or list the tables that do."""
    with _connect(url) as queue:
        if table is None:
            _show(queue.captures(), client.Capture, as_json)
        elif stream is None:
            raise typer.BadParameter("a table is captured to a STREAM")
        else:
            queue.capture(
                table,
                stream,
                keys=key or None,
                columns=column or None,
                old=old,
                outbox=outbox,
            )


@app.command()
def release(
    table: Annotated[str, typer.Argument(metavar="TABLE", show_default=False)],
    stream: StreamName,
    url: Url = None,
) -> None:
    """Capture a table no more; what was captured stays."""
    with _connect(url) as queue:
        queue.release(table, stream)


@app.command()
def receive(
    stream: StreamName,
    consumer: ConsumerName,
    max_messages: Annotated[int, typer.Option("--max", min=1, help="Claim at most so many.")] = 1,
    visibility_timeout: Annotated[
        timedelta | None,
        typer.Option(
            parser=_duration,
            metavar="DURATION",
            help="With --no-ack: how long they are yours. Default: the consumer's.",
        ),
    ] = None,
    no_ack: Annotated[
        bool,
        typer.Option("--no-ack", help="Keep the claim, for `pgqueue ack` or `pgqueue nack`."),
    ] = False,
    wait: Annotated[
        timedelta | None,
        typer.Option(parser=_duration, metavar="DURATION", help="Wait so long if there is none."),
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Receive messages, print them, and acknowledge them.

    A line has seq, key and data, with tabs between them and unprintable characters escaped; --json
    has everything as it is, binary data in base64.
    """
    with _connect(url) as queue:
        claim = queue.receive(
            stream, consumer, max_messages, visibility_timeout=visibility_timeout, wait=wait
        )
        if claim is None:
            print("Nothing to receive.", file=sys.stderr)
            return
        try:
            for message in claim.messages:
                print(_as_json(message, claim.claim_id) if as_json else _as_line(message))
            sys.stdout.flush()
        except BaseException:
            claim.nack(reason="pgqueue receive could not print it")
            raise
        if no_ack:
            if not as_json:
                print(f"Claim {claim.claim_id}: pgqueue ack {claim.claim_id}", file=sys.stderr)
        elif claim.ack() < len(claim.messages):
            _fail("not acknowledged: these messages will be delivered again")


@app.command()
def tail(
    stream: StreamName,
    start: Annotated[
        Any,
        typer.Option(
            "--from",
            parser=_place,
            metavar=_POSITION + "|OFFSET",
            help="Messages from now on, all that there are, those published since TIME (ISO 8601, "
            "local unless it has a zone), or those after an offset, as JSON.",
        ),
    ] = "latest",
    max_messages: Annotated[
        int | None, typer.Option("--max", min=1, help="End after so many.")
    ] = None,
    follow: Annotated[
        bool, typer.Option(help="Wait for more, until Ctrl-C; else end with what there is.")
    ] = True,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print the messages of a stream, without claiming them: nobody else misses one.

    As `receive` prints them. --no-follow prints the offset where it ended to standard error.
    """
    left = max_messages
    with _connect(url) as queue:
        offset = start if isinstance(start, dict) else queue.start_offset(stream, start)
        wait = timedelta(days=1) if follow else None
        while left is None or left > 0:
            size = min(left or _TAIL, _TAIL)
            batch = next(queue.read(stream, offset, max_messages=size, wait=wait), None)
            if batch is None and not follow:
                break
            if batch is not None:
                for message in batch.messages:
                    print(_stored_as_json(message) if as_json else _as_line(message))
                sys.stdout.flush()
                offset = batch.offset
                left = None if left is None else left - len(batch.messages)
    if not follow:
        print(f"Offset: {json.dumps(offset)}", file=sys.stderr)


@app.command()
def ack(claim: ClaimId, seq: Seqs = None, url: Url = None) -> None:
    """Acknowledge a claim, or messages of it."""
    with _connect(url) as queue:
        _settled(queue.ack(claim, seq), claim, "acknowledged")


@app.command()
def nack(
    claim: ClaimId,
    seq: Seqs = None,
    delay: Annotated[
        timedelta | None,
        typer.Option(parser=_duration, metavar="DURATION", help="Deliver it again after that."),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Kept as the last error.")] = None,
    url: Url = None,
) -> None:
    """Return a claim, or messages of it, to be delivered again."""
    with _connect(url) as queue:
        count = queue.nack(claim, seq, delay=delay or timedelta(), reason=reason)
        _settled(count, claim, "returned")


@app.command()
def stats(
    stream: Annotated[str | None, typer.Argument(show_default="all streams")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between looks, with --watch.")
    ] = 2.0,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Show what each consumer has before it. Counts no messages, and so costs little."""
    with _connect(url) as queue:
        if watch and not as_json and sys.stdout.isatty():
            with Live(auto_refresh=False) as live:
                while True:
                    live.update(_table(queue.stats(stream), client.ConsumerStats), refresh=True)
                    time.sleep(interval)
        _show(queue.stats(stream), client.ConsumerStats, as_json)
        while watch:
            time.sleep(interval)
            _show(queue.stats(stream), client.ConsumerStats, as_json)


@app.command()
def recover(yes: Yes = False, url: Url = None) -> None:
    """Begin anew after a restore or a failover: once, before producers come back.

    Offsets that have read what was not restored are refused from then on; all others go on.
    """
    with _connect(url) as queue:
        _confirm("Was the database restored, or a standby promoted, and do producers wait?", yes)
        for stream, last in queue.recover().items():
            print(f"{printable(stream)}: restored up to publication {last}")


@app.command()
def maintain(
    staged_age: Annotated[
        timedelta,
        typer.Option(
            parser=_duration,
            metavar="DURATION",
            help="Longer than any batch of a Spark query takes to be written.",
        ),
    ] = "1 day",  # type: ignore[assignment]
    reader_age: Annotated[
        timedelta,
        typer.Option(
            parser=_duration,
            metavar="DURATION",
            help="Longer than any Spark query stays away from its checkpoint.",
        ),
    ] = "30 days",  # type: ignore[assignment]
    every: Annotated[
        timedelta | None,
        typer.Option(parser=_duration, metavar="DURATION", help="Again and again, so often."),
    ] = None,
    url: Url = None,
) -> None:
    """Trim what need not be kept, and delete what failed writers left. Run it now and then.

    With --every it goes on until it is interrupted, also while the database is away, and prints
    only what it did.
    """
    while True:
        begun = time.monotonic()
        try:
            with _connect(url) as queue:
                for what, count in queue.maintain(staged_age, reader_age).items():
                    if count or every is None:
                        print(f"{what}: {count} deleted", flush=True)
        except (PgQueueError, psycopg.Error) as error:
            if every is None:
                raise
            print(f"pgqueue: {redact(str(error))}", file=sys.stderr, flush=True)
        if every is None:
            return
        time.sleep(max(0.0, every.total_seconds() - (time.monotonic() - begun)))


@app.command()
def demo(
    directory: Annotated[
        Path | None,
        typer.Option(help="Where its embedded Postgres lives, to look at afterwards."),
    ] = None,
    # Not from PGQUEUE_URL: the demo must not take a database that is meant for something else.
    url: Annotated[str | None, typer.Option(help="A database to use in its place.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Only so many flights.")] = None,
) -> None:
    """Send a year of flights through Postgres and Spark, and check what comes out."""
    try:
        from spark_pgqueue.command_line.demo import run
    except ModuleNotFoundError as error:
        raise PgQueueError(
            f"the demo needs the module {error.name}", hint=how_to_install("demo")
        ) from None
    if not run(directory, url, rows):
        _fail("what came out is not what went in")


@app.command()
def doctor(url: Url = None) -> None:
    """Check Java, Spark, the libraries, Postgres and the schema, and say what to do."""
    from spark_pgqueue.command_line import doctor

    console, failed = Console(soft_wrap=True, highlight=False), False
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in doctor.checks(url):
        line = Text(f"{check.status:4} ", styles[check.status])
        line.append(f"{check.name}: {_one_line(check.found)}", "default")
        console.print(line)
        if check.advice:
            console.print(Text(f"     -> {_one_line(check.advice)}"))
        failed = failed or check.status == "fail"
    if failed:
        raise typer.Exit(1)


def _connect(url: str | None) -> client.Client:
    # No patience: whoever types a command wants to hear at once that Postgres is away.
    return client.connect(url, patience=0)


def _fail(message: str, hint: str | None = None) -> NoReturn:
    print("pgqueue:", _one_line(message), file=sys.stderr)
    if hint:
        for sql, command in _AS_COMMANDS.items():
            hint = re.sub(sql, command, hint)
        print("hint:", _one_line(hint), file=sys.stderr)
    raise typer.Exit(1)


def _clarify(error: Any) -> None:
    """Put right the message of an error about the command line itself."""
    # A url in the wrong place: "Got unexpected extra argument (postgresql://...)".
    error.message = printable(redact(error.message))
    context = getattr(error, "ctx", None)
    if context and context.command.name == "send" and "extra argument" in error.message:
        error.message += ": give the payload with --data"


def _one_line(text: str) -> str:
    return printable(redact(" ".join(text.split())))


def _confirm(question: str, yes: bool) -> None:
    if not yes:
        if sys.stdin is None:
            _fail("standard input is closed, so nobody can be asked", hint="give --yes")
        typer.confirm(question, abort=True, err=True)


def _settled(count: int, claim: int, done: str) -> None:
    if count == 0:
        _fail(f"claim {claim}: no message {done}")
    print(f"{count} {'message' if count == 1 else 'messages'} {done}")


def _open_input() -> BinaryIO:
    if sys.stdin is None:
        _fail("standard input is closed, so there is nothing to send", hint="give --data")
    return sys.stdin.buffer


def _standard_input() -> bytes:
    file = _open_input()
    if sys.stdin.isatty():
        print("Type the message, and end it with Ctrl-D:", file=sys.stderr)
    # Where it holds nothing, as in a job of cron, a message was hardly meant.
    data = file.read()
    if not data:
        _fail("standard input is empty", hint="for an empty message, give --data ''")
    return data


def _batches(binary: bool) -> Iterator[list[Any]]:
    lines = (_payload(line.removesuffix(b"\n"), binary) for line in _open_input())
    while batch := list(islice(lines, _BATCH)):
        yield batch


def _messages(count: int) -> str:
    return f"{count} message" if count == 1 else f"{count} messages"


def _payload(data: bytes, binary: bool) -> str | bytes:
    if binary:
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PgQueueError(
            f"the data is not UTF-8 text: {error}", hint="a stream of kind binary takes any bytes"
        ) from None


def _as_line(message: client.Message | client.StoredMessage) -> str:
    data = message.data
    shown = data if isinstance(data, str) else f"\\x{data.hex()}"
    return "\t".join([str(message.seq), printable(message.key or ""), printable(shown)])


def _as_json(row: Any, claim_id: int | None = None) -> str:
    fields = {} if claim_id is None else {"claim_id": claim_id}
    return _json_of(fields | dataclasses.asdict(row))


def _stored_as_json(message: client.StoredMessage) -> str:
    return _json_of(message._asdict() | {"headers": message.headers or {}})


def _json_of(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, default=_plain, ensure_ascii=False)
    if text.isprintable() and sys.stdout.encoding.lower() == "utf-8":
        return text
    # All escapes that JSON has, which are exact: also of U+009B, which it otherwise leaves alone.
    return json.dumps(fields, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.total_seconds() if isinstance(value, timedelta) else value.isoformat()


def _show(rows: list[Any], kind: type, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(_as_json(row), flush=True)
    elif not rows:
        print("Nothing to show.", file=sys.stderr)
    else:
        # Not cut to 80 columns in a file or a pipe.
        Console(width=None if sys.stdout.isatty() else 250).print(_table(rows, kind))


# Told by other columns, or by --json; a terminal is 80 columns wide.
_HIDDEN = {client.ConsumerStats: ("ordering", "claims", "next_expiry", "skipped")}


def _table(rows: list[Any], kind: type) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    names = [f.name for f in dataclasses.fields(kind) if f.name not in _HIDDEN.get(kind, ())]
    for name in names:
        if rows and isinstance(getattr(rows[0], name), int):
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(getattr(row, name))) for name in names))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else printable(str(value))


if __name__ == "__main__":
    app(prog_name="pgqueue")
