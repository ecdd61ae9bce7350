"""Text for people: no name or key can make a terminal obey an escape sequence."""

from __future__ import annotations

import logging
import unicodedata
from typing import Any

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
    """What `str.translate` asks: the text for a character, found once for each."""

    def __init__(self, keep: str):
        self._keep = keep

    def __missing__(self, code: int) -> str:
        each = chr(code)
        is_shown = each in self._keep or unicodedata.category(each) not in _ESCAPED
        self[code] = each if is_shown else repr(each)[1:-1]
        return self[code]


_ESCAPES: dict[str, _Escapes] = {}  # by keep; a functools.cache is not pickled by value


def warn(message: str, *arguments: Any, logger: str = "spark_pgqueue") -> None:
    """Log a warning, with each of its arguments printable.

    Where logging was not set up, Python prints it on standard error.
    """
    shown = [each if isinstance(each, int) else printable(str(each)) for each in arguments]
    logging.getLogger(logger).warning(message, *shown, stacklevel=2)
