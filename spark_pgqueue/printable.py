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
    return "".join(
        repr(each)[1:-1] if each not in keep and unicodedata.category(each) in _ESCAPED else each
        for each in text
    )


def warn(message: str, *arguments: Any, logger: str = "spark_pgqueue") -> None:
    """Log a warning, with each of its arguments printable.

    Where logging was not set up, Python prints it on standard error.
    """
    shown = [each if isinstance(each, int) else printable(str(each)) for each in arguments]
    logging.getLogger(logger).warning(message, *shown, stacklevel=2)
