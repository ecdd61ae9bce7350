"""The arguments and options of commands: their syntax, and their values."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from spark_pgqueue.command_line import completion


class Kind(StrEnum):
    """The kind of a stream's messages."""

    text = "text"
    json = "json"
    binary = "binary"


class Ordering(StrEnum):
    """The ordering of a consumer."""

    none = "none"
    key = "key"
    stream = "stream"


class Unread(StrEnum):
    """Whether retention keeps messages that a consumer is not done with."""

    keep = "keep"
    drop = "drop"


class Group(StrEnum):
    """A group role."""

    producer = "producer"
    consumer = "consumer"
    observer = "observer"
    admin = "admin"


def duration(text: str, wanted: str = "a duration longer than 0") -> timedelta:
    from spark_pgqueue.spark.options import values

    try:
        return values.duration(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not {wanted} with a unit: 500ms, 30s or '5 minutes'"
        ) from None


def delay(text: str) -> timedelta:
    """A duration, or 0, with or without a unit."""
    if re.fullmatch(r"0\s*[a-z]*", text.strip()):
        return timedelta()
    return duration(text, "0, nor a duration")


def size(text: str) -> int:
    from spark_pgqueue.spark.options import values

    try:
        return values.size(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a size: 1000000, 500MB or 10GB") from None


def moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a time such as 2026-01-31T12:00:00") from None


def address(text: str) -> str:
    """An address to listen on."""
    from spark_pgqueue import serving

    try:
        serving.address(text, 0)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


POSITION = "earliest|latest|TIME|'seq N'|OFFSET"


def position(text: str) -> datetime | str | dict[str, Any]:
    if text in ("earliest", "latest") or text.startswith("seq "):
        return text
    try:
        offset = json.loads(text)
    except (ValueError, RecursionError):
        offset = None
    if isinstance(offset, dict):
        return offset
    try:
        return moment(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(
            f"{error.message}, and not earliest, latest, 'seq N' or an OFFSET"
        ) from None


def lasting(
    help: str, *names: str, parser: Callable[[str], timedelta] = duration, **more: Any
) -> Any:
    """An option whose value is a duration."""
    return typer.Option(*names, parser=parser, metavar="DURATION", help=help, **more)


def at(help: str) -> Any:
    """An option whose value is a time."""
    return typer.Option(parser=moment, metavar="TIME", help=help)


def default_of(method: Callable[..., Any], name: str) -> Any:
    """The default of an argument of a client's method, which its command has, too."""
    return inspect.signature(method).parameters[name].default


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is a word of JavaScript")


def json_value(text: str) -> Any:
    from spark_pgqueue.client.arguments import JsonText

    try:
        # Only to check it: Python's numbers have other limits than those of Postgres.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_constant)
        return JsonText(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}") from None


def header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def setting(text: str) -> tuple[str, str | None]:
    """NAME=VALUE; the database reads the value. None, the default, for NAME= alone."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE, or NAME= for the default")
    return name.replace("-", "_"), value or None


START = (
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


StreamName = Annotated[
    str,
    typer.Argument(metavar="STREAM", show_default=False, autocompletion=completion.streams),
]


AnyStream = Annotated[
    str | None,
    typer.Argument(metavar="STREAM", show_default="all streams", autocompletion=completion.streams),
]


ConsumerName = Annotated[
    str,
    typer.Argument(metavar="CONSUMER", show_default=False, autocompletion=completion.consumers),
]


AnyConsumer = Annotated[
    str | None,
    typer.Argument(metavar="CONSUMER", show_default="all", autocompletion=completion.consumers),
]


GroupName = Annotated[
    str, typer.Argument(metavar="GROUP", show_default=False, autocompletion=completion.consumers)
]


Topic = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]


ToStream = Annotated[
    str,
    typer.Argument(metavar="TO_STREAM", show_default=False, autocompletion=completion.streams),
]


Settings = Annotated[
    list[Any],
    typer.Argument(
        parser=setting, metavar="NAME=VALUE...", show_default=False, help="NAME= for the default."
    ),
]


OptionalSettings = Annotated[
    list[Any] | None,
    typer.Argument(parser=setting, metavar="NAME=VALUE", show_default=False, help="As for `set`."),
]


Position = Annotated[
    Any,
    typer.Argument(
        parser=position,
        metavar=POSITION,
        show_default=False,
        help="TIME is ISO 8601, local; OFFSET is JSON, as `pgqueue tail --no-follow` prints it.",
    ),
]


ClaimId = Annotated[int, typer.Argument(metavar="CLAIM", show_default=False, min=1)]


Json = Annotated[bool, typer.Option("--json", help="Print JSON: an object per line.")]


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


IfNotExists = Annotated[bool, typer.Option("--if-not-exists", help="Succeed if it already exists.")]


IfExists = Annotated[bool, typer.Option("--if-exists", help="Succeed if it does not exist.")]


Seq = Annotated[int, typer.Argument(metavar="SEQ", show_default=False, min=1)]


SeqList = Annotated[list[int], typer.Argument(metavar="SEQ", show_default=False, min=1)]


Seqs = Annotated[
    list[int] | None,
    typer.Option("--seq", min=1, help="Only this message of the claim; can be repeated."),
]


OnlySeqs = Annotated[
    list[int] | None, typer.Option("--seq", min=1, help="Only this message; can be repeated.")
]


Max = Annotated[int, typer.Option("--max", min=1, help="At most this many.")]


Key = Annotated[str | None, typer.Option(help="The message key, for ordering by key.")]


Headers = Annotated[
    list[Any] | None, typer.Option(parser=header, metavar="NAME=VALUE", help="Can be repeated.")
]


Priority = Annotated[int, typer.Option(help="Higher priorities are delivered first.")]


Consumers = Annotated[
    list[str] | None,
    typer.Option(help="Publish only to this consumer; can be repeated. Default: all."),
]
