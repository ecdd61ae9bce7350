"""Text for people: escape sequences in names or keys do not reach a terminal."""

from __future__ import annotations

import base64
import logging
import re
import unicodedata
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

_SECRET = re.compile(
    r"""(?ix) (password | secret | scram_(?:client|server)_key)
        \s* = \s* (?: '(?:\\.|[^'\\])*'? | (?:\\.|\S)+ )"""
)
_BEFORE_PASSWORD = re.compile(r"\w://[^:/@\s]*:")
_PORT = re.compile(r"\d{1,5}/")

LONGEST = 100_000
"""Characters of a text that `redact` shows."""

_LONGEST = 2000  # characters of a reason, and of each part of a traceback

# Control characters, format characters (which can reverse the direction of text), surrogates, and
# separators of lines and paragraphs.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with escapes such as `\x1b` instead of invisible characters.

    Args:
        text: any text.
        keep: characters to leave as they are, such as a newline.
    """
    if text.isprintable():
        return text
    return text.translate(_ESCAPES.setdefault(keep, _Escapes(keep)))


class _Escapes(dict[int, str]):
    """The table of `str.translate`: the text for each character, computed on first use."""

    def __init__(self, keep: str):
        self._keep = keep

    def __missing__(self, code: int) -> str:
        each = chr(code)
        is_shown = each in self._keep or unicodedata.category(each) not in _ESCAPED
        self[code] = each if is_shown else repr(each)[1:-1]
        return self[code]


_ESCAPES: dict[str, _Escapes] = {}  # by keep; a functools.cache is not pickled by value


def redact(text: str, at_most: int = LONGEST) -> str:
    """The text with `***` instead of every password in a URI or conninfo string.

    In doubt it hides too much: the end of a password is not always clear, and a text may end within
    one. The time is linear in the length of the text.

    Args:
        text: any text, of any length.
        at_most: the number of characters that the result is made of. The rest only decides whether
            the cut is within a password.
    """
    *lines, last = text[:at_most].split("\n")
    end = text.find("\n", at_most)
    goes_on = text.find("@", at_most, end if end >= 0 else len(text)) >= 0
    lines = [_without_password(line, line.rfind("@")) for line in lines]
    until = len(last) if goes_on else last.rfind("@")
    shown = "\n".join([*lines, _without_part(_without_password(last, until))])
    return _SECRET.sub(r"\1=***", shown)


def _without_password(line: str, until: int) -> str:
    """The line without the password that begins in a URI and may extend to `until`."""
    begin = _BEFORE_PASSWORD.search(line, 0, max(until, 0))
    return line if begin is None else f"{line[: begin.end()]}***{line[until:]}"


def _without_part(line: str) -> str:
    """The line without the beginning of a password of a URI whose end was cut off."""
    for begin in _BEFORE_PASSWORD.finditer(line, max(line.rfind("@"), 0)):
        if not _PORT.match(line, begin.end()):
            return f"{line[: begin.end()]}***"
    return line


def clean(text: str) -> str:
    """The text as Postgres can store it: without passwords, and not too long."""
    return printable(redact(text, _LONGEST), keep="\n\t")[:_LONGEST]


def summary(error: BaseException) -> str:
    """The type and the text of an error, as `clean` returns it."""
    try:
        text = clean(str(error))
    except Exception as other:  # a handler's error may be of any class
        text = f"its text cannot be made: {type(other).__name__}"
    return f"{type(error).__name__}: {text}".rstrip(": ")


def warn(
    message: str,
    *arguments: Any,
    logger: str = "spark_pgqueue",
    level: int = logging.WARNING,
    more: str = "",
) -> None:
    """Log a warning, with each of its arguments printable. An error of logging, for example of a
    filter of the application, is ignored.

    If logging is not configured, Python prints the warning on standard error.

    Args:
        message: as for logging.
        arguments: its values: a number as it is, any other as `text_of` returns it.
        logger: the name of the logger.
        level: of logging.
        more: text of several lines, which is printable, to follow the message.
    """
    with suppress(Exception):
        shown = [each if isinstance(each, int | float) else text_of(each) for each in arguments]
        if more:
            message, shown = message + "\n%s", [*shown, more]
        logging.getLogger(logger).log(level, message, *shown, stacklevel=2)


def counted(count: int | None, one: str, many: str) -> str:
    """A number with its noun: `1 call`, `2 calls`."""
    return f"{count or 0} {one if count == 1 else many}"


def for_json(value: Any) -> Any:
    """A value for `json.dumps`, of a type that JSON lacks: base64 of bytes, seconds, or text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, datetime) else str(value)


def text_of(value: Any) -> str:
    """A value for a line of a log. For an error, its text in one line; with its class, unless it is
    a database error with a text.
    """
    if not isinstance(value, BaseException):
        return printable(str(value))
    said = " ".join(summary(value).split())
    if hasattr(value, "sqlstate"):  # of PgQueueError and psycopg: the text suffices
        return said.partition(": ")[2] or said
    return said
