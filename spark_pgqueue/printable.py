"""What people read: nothing in it is obeyed by a terminal, whatever a name or a key holds."""

from __future__ import annotations

import logging
import unicodedata
from typing import Any

# Control and format characters (which turn the direction of text), halves of characters, and
# separators of lines and paragraphs.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str, *, keep: str = "") -> str:
    r"""`text` with escapes such as `\x1b` in place of what is no character to be seen.

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
