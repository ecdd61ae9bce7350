"""The values of options: a function that checks each kind, and the words for it in errors."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

NUMBER = "a whole number of at least 1"
DURATION = "a duration longer than 0 with a unit, such as '500ms', '30s' or '5 minutes'"
SIZE = "a number of bytes of at least 1, such as '1048576', '500k', '100MB' or '10g'"
BOOLEAN = "true or false"
TIMESTAMP = (
    "a timestamp with time zone such as 2026-01-31T12:00:00Z, or milliseconds since 1970 (UTC)"
)


_LONGEST = 1000  # characters of a duration

_SEQ = re.compile("seq +[0-9]{1,18}")


def duration(text: str) -> timedelta:
    """A positive duration: '30s', '500 ms', '5 minutes', '1 hour 30 minutes'. Raises ValueError."""
    if len(text) > _LONGEST:  # it is searched for parts from each of its digits
        raise ValueError
    text = re.sub(r"^interval\s+", "", text.strip().lower())
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-zµ]+)", text)
    if not parts or re.sub(r"\d+(?:\.\d+)?\s*[a-zµ]+[\s,]*", "", text):
        raise ValueError
    try:
        value = sum((float(n) * _UNITS[unit] for n, unit in parts), timedelta())
    except (KeyError, OverflowError):
        raise ValueError from None
    if value <= timedelta():
        raise ValueError
    return value


_UNITS = {
    name: unit
    for names, unit in (
        ("ms msec millisecond milliseconds", timedelta(milliseconds=1)),
        ("s sec secs second seconds", timedelta(seconds=1)),
        ("m min mins minute minutes", timedelta(minutes=1)),
        ("h hr hrs hour hours", timedelta(hours=1)),
        ("d day days", timedelta(days=1)),
    )
    for name in names.split()
}


def shown(value: Any) -> str:
    """The default of an option as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return f"{seconds / 60:g} minutes" if seconds >= 120 else f"{seconds:g}s"
    return str(value)


def at_least(least: int) -> Callable[[str], int]:
    """A function that takes a whole number of at least `least`; ValueError for others."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value < 2**63:
            raise ValueError
        return value

    return parse


positive: Callable[[str], int] = at_least(1)
not_negative: Callable[[str], int] = at_least(0)


def size(text: str) -> int:
    """At least 1 byte, in units of 1024: '1048576', '500k', '100MB', '10g'. Raises ValueError."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)i?b?", text.strip().lower())
    if found is None:
        raise ValueError
    return positive(str(int(found[1]) << 10 * " kmgt".index(found[2] or " ")))


def boolean(text: str) -> bool:
    """True or false. Raises ValueError."""
    value = text.strip().lower()
    if value not in ("true", "false"):
        raise ValueError
    return value == "true"


def a_name(text: str) -> str:
    """A name that is not empty. Raises ValueError."""
    if not text.strip():
        raise ValueError
    return text


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them, or a list as Python writes it. Raises ValueError."""
    if text.strip().startswith("["):
        try:
            given = ast.literal_eval(text.strip())
        except SyntaxError:
            raise ValueError from None
        if not given or not all(isinstance(name, str) for name in given):
            raise ValueError
        return tuple(a_name(name) for name in given)
    return tuple(a_name(name).strip() for name in text.split(","))


def one_of(*words: str) -> Callable[[str], str]:
    """A function that takes one of the words in any case, and raises ValueError for others."""

    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise ValueError
        return text.strip().lower()

    return parse


ordering: Callable[[str], str] = one_of("none", "key", "stream")
key_order: Callable[[str], str] = one_of("partition", "column")
reading_mode: Callable[[str], str] = one_of("permissive", "failfast")
compared: Callable[[str], str] = one_of("content", "count")


def position(text: str) -> str:
    """Earliest, latest, a time with a time zone, "seq 17" or an offset. Raises ValueError."""
    position = text.strip()
    if position.lower() in ("earliest", "latest"):
        return position.lower()
    if _SEQ.fullmatch(position):
        return position
    if position.startswith("{"):
        if not {"stream", "incarnation"} <= json.loads(position).keys():
            raise ValueError
        return position
    return _moment(position)


ACTIONS = ("ack", "nack", "dead_letter", "redrive", "retry")
"""The actions of rows on messages."""

REVIVING = ("redrive", "retry")
"""The actions that bring messages back."""


action: Callable[[str], str] = one_of(*ACTIONS)


def timestamp(text: str) -> str:
    """A time with a time zone, or milliseconds since 1970, for Postgres. Raises ValueError."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,15}", text):
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(text))).isoformat()
    return _moment(text)


def _moment(text: str) -> str:
    """A time with a time zone. Raises ValueError.

    Python reads more forms than Postgres, such as 2026-01-31T12Z, so Postgres gets the longest one.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError
    return moment.isoformat()


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression. Raises ValueError."""
    try:
        return re.compile(a_name(text))
    except re.error:
        raise ValueError from None


def unlike_names(text: str) -> tuple[str, ...]:
    """Different names with commas between them. Raises ValueError."""
    found = names(text)
    if len(set(found)) < len(found):
        raise ValueError
    return found


def local_folder(location: str) -> Path:
    """The folder of a checkpointLocation on this machine.

    A location is no encoded URI: Hadoop's Path takes %20 as these three characters. Raises
    ValueError for another file system.
    """
    if not location.strip():
        raise ValueError
    if not re.match(r"[A-Za-z][\w+.-]*:", location):
        return Path(location)
    path = re.fullmatch(r"file:(?://(?:localhost)?)?(/[^/].*|/)", location, re.IGNORECASE)
    if path is None:
        raise ValueError
    return Path(path[1])


TYPES: dict[Callable[[str], Any], str] = {
    duration: "duration",
    positive: "integer",
    not_negative: "integer",
    size: "size",
    boolean: "boolean",
    names: "names",
    unlike_names: "names",
    timestamp: "timestamp",
    pattern: "pattern",
}
"""The types of values, in a word; the values of other functions are strings."""

Place = str | dict[str, Any]
"""A place in a stream: an offset; or earliest, latest, a time, or "seq" and a number."""


def offsets(text: str) -> str | dict[str, Place]:
    """Earliest or latest for all streams, "seq 17" for the only one, or a place for each by its
    name. Raises ValueError.

    An offset of a query, as its progress shows it, and an offset of a stream, as `read_to` returns
    it, are also places.
    """
    if text.strip().lower() in ("earliest", "latest"):
        return text.strip().lower()
    if _SEQ.fullmatch(text.strip()):
        return text.strip()
    given = json.loads(text)
    if isinstance(given, str):  # progress shows offsets as text, which users encode as JSON again
        given = json.loads(given)
    if not isinstance(given, dict) or not given:
        raise ValueError
    if isinstance(given.get("stream"), str) and isinstance(given.get("incarnation"), str):
        return {given["stream"]: _place(given)}
    streams = given.get("streams")
    if isinstance(streams, dict) and all(isinstance(each, dict) for each in streams.values()):
        given = streams
    return {name: _place(each) for name, each in given.items()}


def _place(given: Any) -> Place:
    if isinstance(given, str):
        if _SEQ.fullmatch(given):
            return given
        return given if given in ("earliest", "latest") else timestamp(given)
    if not isinstance(given, dict) or not isinstance(given.get("incarnation"), str):
        raise ValueError
    return {name: value for name, value in given.items() if name not in ("stream", "from")}
