"""The hint for an unknown name: a similar name, or all names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping


def hint(name: str, names: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """The hint for an unknown name.

    Case and punctuation do not count: maxRetries, max-retries and max_retries are one.

    Args:
        name: the unknown name.
        names: the known names.
        others: hints for names that other software uses.
    """
    foreign = {_plain(each): text for each, text in (others or {}).items()}
    if text := foreign.get(_plain(name)):
        return text
    known = {_plain(each): each for each in names}
    if near := difflib.get_close_matches(_plain(name), known, n=1):
        return f"did you mean {known[near[0]]}?"
    return f"there are: {', '.join(known.values()) or 'none'}"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name[:100].lower())
