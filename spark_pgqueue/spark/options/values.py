"""What the values of options may be: a function for each kind, and how errors call it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

NUMBER = "a whole number of at least 1"
DURATION = "a duration longer than 0 with a unit, such as '500ms', '30s' or '5 minutes'"
BOOLEAN = "true or false"


def duration(text: str) -> timedelta:
    """A positive duration such as '30s', '500 ms', '5 minutes' or '1 hour 30 minutes'.

    Raises:
        ValueError: it is not one.
    """
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


def positive(text: str) -> int:
    """A whole number of at least 1. Raises ValueError."""
    value = int(text)
    if not 1 <= value < 2**63:
        raise ValueError
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0. Raises ValueError."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise ValueError
    return value


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
    """Names with commas between them. Raises ValueError."""
    return tuple(a_name(name).strip() for name in text.split(","))


def ordering(text: str) -> str:
    """One of none, key and stream. Raises ValueError."""
    if text.strip().lower() not in ("none", "key", "stream"):
        raise ValueError
    return text.strip().lower()


def position(text: str) -> str:
    """Earliest, latest, or a time with a time zone. Raises ValueError."""
    position = text.strip()
    if position.lower() in ("earliest", "latest"):
        return position.lower()
    if datetime.fromisoformat(position).tzinfo is None:
        raise ValueError
    return position


ACTIONS = ("ack", "nack", "dead_letter", "redrive", "retry")
"""What the rows of a write can want to be done with messages."""

REVIVING = ("redrive", "retry")
"""Those of them that bring messages back."""


def action(text: str) -> str:
    """One of `ACTIONS`. Raises ValueError."""
    if text.strip().lower() not in ACTIONS:
        raise ValueError
    return text.strip().lower()
