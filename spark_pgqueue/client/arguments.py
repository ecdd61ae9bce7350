"""The arguments of the client: their checks, and their types and names in SQL.

The checks are for errors that only Python can make: wrong types. The database decides which values
are allowed. `name` is the argument's name, for the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from spark_pgqueue.postgres.errors import PgQueueError

T = TypeVar("T")


Check = Callable[[str, Any], Any]
"""Checks an argument: returns the value as psycopg takes it, or raises PgQueueError."""


def name_of(sql_name: str) -> str:
    """The client's name for an argument of an SQL function."""
    return _CLIENT_NAMES.get(sql_name, sql_name.removeprefix("p_"))


def check(name: str, value: Any, kind: type, wanted: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PgQueueError(f"{name} must be {wanted}, not {type(value).__name__}")


def maybe(check: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    return None if value is None else check(name, value)


def text(name: str, value: str, wanted: str = "a str") -> str:
    check(name, value, str, wanted)
    if "\0" in value:
        raise PgQueueError(f"{name} holds a NUL character, which Postgres cannot store in a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PgQueueError(f"{name} is not Unicode text: {error}") from None
    return value


def flag(name: str, value: bool) -> bool:
    check(name, value, bool, "True or False")
    return value


def number(name: str, value: int, low: int = 1, high: int = 2**31 - 1) -> int:
    check(name, value, int, "an int")
    if not low <= value <= high:
        raise PgQueueError(f"{name} must be from {low} to {high}, not {value}")
    return value


def long(name: str, value: int) -> int:
    check(name, value, int, "an int")
    if not -(2**63) <= value < 2**63:
        raise PgQueueError(f"{name} is too large: {value}")
    return value


def duration(name: str, value: timedelta) -> timedelta:
    check(name, value, timedelta, "a timedelta")
    return value


def patience(name: str, value: timedelta) -> float:
    seconds = duration(name, value).total_seconds()
    if seconds < 0:
        raise PgQueueError(f"{name} must be at least 0, not {value}")
    return seconds


def time(name: str, value: datetime) -> datetime:
    check(name, value, datetime, "a datetime")
    if value.tzinfo is None:
        raise PgQueueError(
            f"{name} must have a time zone: {value.isoformat()} is ambiguous",
            hint="pass, for example, datetime.now(UTC) + timedelta(minutes=5)",
        )
    return value


def position(name: str, value: str | datetime | dict[str, Any]) -> str:
    """A position as text: a word, a time with its zone, or an offset of a reader."""
    if isinstance(value, datetime):
        return time(name, value).isoformat()
    if isinstance(value, dict):
        return json_text(name, value)
    return text(name, value, "a str, a datetime or an offset")


def listed(name: str, value: Iterable[Any]) -> list[Any]:
    return list(iterated(name, value))


def iterated(name: str, value: Iterable[Any]) -> Iterable[Any]:
    """Items that may be too many to be held at once."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise PgQueueError(f"{name} must be a list, not {type(value).__name__}")
    return value


def items(name: str, value: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{i}]", item) for i, item in enumerate(listed(name, value)))


def texts(name: str, value: Iterable[str]) -> list[str]:
    return [text(item_name, item) for item_name, item in items(name, value)]


def maybe_texts(name: str, value: Iterable[str | None]) -> list[str | None]:
    listed_value = listed(name, value)
    if not _is_text([each for each in listed_value if each is not None]):
        for item_name, item in items(name, listed_value):
            maybe(text, item_name, item)
    return listed_value


def payloads(name: str, value: Iterable[Any]) -> list[str] | list[bytes]:
    """Payloads as SQL takes them, all text or all bytes; a dict or a list becomes JSON text."""
    all_of_them = listed(name, value)
    binary = bool(all_of_them) and isinstance(all_of_them[0], bytes)
    if binary or not _is_text(all_of_them):
        if any(isinstance(each, dict | list) for each in all_of_them):
            all_of_them = [
                json_text(item_name, item) if isinstance(item, dict | list) else item
                for item_name, item in items(name, all_of_them)
            ]
        for item_name, item in items(name, all_of_them):
            if binary:
                check(item_name, item, bytes, f"bytes, as {name}[0] is")
            else:
                text(item_name, item, "a str, or all must be bytes for a binary stream")
    return all_of_them


def _is_text(values: list[Any]) -> bool:
    """Whether all values are valid text, in a tenth of the time of checking each."""
    try:
        whole = "".join(values)
        whole.encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return "\0" not in whole


class JsonText(str):
    """JSON that was written elsewhere. It is sent as it is: a float has fewer digits than a number
    of Postgres.
    """


def json_text(name: str, value: Any) -> str:
    try:
        is_text = isinstance(value, JsonText)
        written = text(name, value) if is_text else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PgQueueError(f"{name} must be serializable as JSON: {error}") from None
    if "\\u0000" in written.replace("\\\\", ""):
        raise PgQueueError(f"{name} holds a NUL character, which Postgres cannot store in JSON")
    if "\\ud" in written.lower():  # half of a character beyond U+FFFF; both halves are a character
        try:
            json.dumps(json.loads(written, parse_int=str), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise PgQueueError(
                f"{name} holds a lone surrogate, which Postgres cannot store in JSON"
            ) from None
    return written


def settings(name: str, value: Mapping[str, Any]) -> str:
    """Settings and their values as JSON; a timedelta as Postgres reads it."""
    check(name, value, Mapping, "a dict")
    return json_text(name, {key: _setting(each) for key, each in value.items()})


def _setting(value: Any) -> Any:
    if isinstance(value, timedelta):
        microseconds = value // timedelta(microseconds=1)
        return f"{microseconds // 1_000_000} seconds {microseconds % 1_000_000} microseconds"
    return value


def headers(name: str, value: Mapping[str, Any] | None) -> str | None:
    if value is None:
        return None
    check(name, value, Mapping, "a dict")
    return json_text(name, dict(value))


def claim_id(name: str, value: int) -> int:
    return number(name, value, 1, 2**63 - 1)


def seqs(name: str, value: Iterable[int]) -> list[int]:
    """Numbers of messages."""
    return [number(item_name, seq, 1, 2**63 - 1) for item_name, seq in items(name, value)]


def offset(name: str, value: dict[str, Any]) -> str:
    check(name, value, dict, "an offset, which is a dict")
    return json_text(name, value)


def interval(name: str, value: timedelta | str) -> timedelta | str:
    return text(name, value) if isinstance(value, str) else duration(name, value)


def payload(value: Any) -> dict[str, Any]:
    """A payload, as the two arguments that it has in SQL; a dict or a list becomes JSON text."""
    if isinstance(value, bytes):
        return {"data": None, "data_bytes": value}
    if isinstance(value, dict | list):
        return {"data": json_text("data", value), "data_bytes": None}
    wanted = "a str, a dict or a list, or bytes for a binary stream"
    return {"data": text("data", value, wanted), "data_bytes": None}


def earliest(deliver_at: datetime | None, delay: timedelta | None) -> dict[str, Any]:
    """When a message is delivered at the earliest: the one of both arguments that was given."""
    if delay is None:
        return {"deliver_at": deliver_at}
    if deliver_at is not None:
        raise PgQueueError(
            "delay is relative and deliver_at a point in time: only one of them can be given"
        )
    return {"delay": delay}


def _each_headers(name: str, value: Iterable[Mapping[str, Any] | None]) -> list[str | None]:
    return [headers(item_name, item) for item_name, item in items(name, value)]


_KINDS: dict[str, tuple[Check | None, bool, str]] = {
    name: (check, may_be_none, in_sql)
    for check, may_be_none, in_sql, names in [
        (text, False, "%s::text", "stream consumer name kind ordering unread topic to_stream"),
        (text, False, "%s::text", "pattern time_zone"),
        (text, True, "%s::text", "create_consumer.topic key dedup_key reason cron uri"),
        (text, False, "%s::text::regclass", "table"),
        (text, True, "pgqueue.as_jsonpath('p_where', %s::text)", "where"),
        (position, False, "%s::text", "start to"),
        (texts, True, "%s::text[]", "consumers keys columns"),
        (flag, False, "%s::boolean", "if_not_exists done old outbox backoff reset replace"),
        (number, False, "%s::int", "max_messages limit look partitions"),
        (number, True, "%s::int", "redrive.max_messages purge_dead.max_messages"),
        (number, True, "%s::bigint", "read_to.max_messages"),
        (partial(number, high=1000), False, "%s::int", "count"),
        (partial(number, low=-32768, high=32767), False, "%s::int", "priority"),
        (long, False, "%s::bigint", "seq"),
        (long, True, "%s::bigint", "messages size"),
        (claim_id, False, "%s::bigint", "claim_id outcome.seq"),
        (claim_id, True, "%s::bigint", "ack"),
        (seqs, True, "%s::bigint[]", "seqs"),
        (seqs, False, "%s::bigint[]", "cancel.seqs postpone.seqs"),
        (duration, True, "%s::interval", "keep_for keep_dead delay by"),
        (duration, True, "%s::interval", "visibility_timeout"),
        (duration, False, "%s::interval", "defer.delay staged_age reader_age"),
        (
            duration,
            False,
            "clock_timestamp() + %s::interval",
            "send.delay send_batch.delay publish_written.delay",
        ),
        (interval, True, "pgqueue.as_interval('p_every', %s::text)", "every"),
        (time, True, "%s::timestamptz", "deliver_at expires_at before after"),
        (time, True, "%s::timestamptz", "create_schedule.start schedule_times.start"),
        (time, False, "%s::timestamptz", "until"),
        (headers, True, "%s::jsonb", "headers"),
        (settings, False, "%s::jsonb", "settings"),
        (json_text, True, "%s::jsonb", "result state details"),
        (offset, False, "%s::jsonb", "offset first last"),
        (json_text, False, "%s::jsonb", "note_offset.offset"),
        (None, True, "%s::text", "data"),
        (None, True, "%s::bytea", "data_bytes"),
        (None, True, "%s::int", "pid stream_id reserve.count"),
        (None, True, "%s::int8multirange", "publish_written.seqs"),
        (None, True, "%s::bigint", "read_dead.after"),
        # An array in binary format is three times as fast as one in text.
        (None, True, "%b::text[]", "send_batch.data publish_written.dedup_keys"),
        (None, True, "%b::bytea[]", "send_batch.data_bytes"),
        (maybe_texts, True, "%b::text[]", "send_batch.keys send_batch.dedup_keys"),
        (_each_headers, True, "%s::jsonb[]", "send_batch.headers"),
    ]
    for name in names.split()
}
"""The check of each argument, None where its value was checked before; whether it may be None; and
its placeholder. By `name`, or by `function.name` where the argument of one SQL function differs."""

_SQL_NAMES = {
    "limit": "max",
    "max_messages": "max",
    "keep_for": "for",
    "set_archive.keep_for": "keep",
    "keep_dead": "dead",
    "size": "bytes",
    "first": "from",
    "last": "to",
    "replay.start": "from",
    "create_group.name": "group",
    "note_offset.name": "group",
    "send.delay": "deliver_at",
    "send_batch.delay": "deliver_at",
    "publish_written.delay": "deliver_at",
}
"""The names of arguments in SQL, without `p_`, where they differ."""

_CLIENT_NAMES = {f"p_{theirs}": ours.split(".")[-1] for ours, theirs in _SQL_NAMES.items()}
_CLIENT_NAMES |= {"p_data_bytes": "data", "p_to": "to", "p_deliver_at": "deliver_at"}


def described(function: str, name: str) -> tuple[Check | None, bool, str]:
    """An argument of an SQL function: its check, whether it may be None, and how a call gives it by
    name.
    """
    own = f"{function}.{name}"
    check, may_be_none, in_sql = _KINDS.get(own) or _KINDS[name]
    theirs = _SQL_NAMES.get(own) or _SQL_NAMES.get(name, name)
    return check, may_be_none, f"p_{theirs} => {in_sql}"
