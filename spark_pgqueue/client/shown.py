"""How values look in a terminal and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

_LONG = 100  # characters of a value
_MANY = 20  # rows of a table


def shortened(value: Any) -> str:
    """The repr of a value, of a long one its beginning."""
    text = repr(value[:_LONG] if isinstance(value, str | bytes) else value)
    return f"{text[:_LONG]}..." if len(text) > _LONG else text


def table(columns: str, rows: Sequence[Any]) -> str:
    """The first rows as a table in HTML; `columns` names their attributes."""
    names = columns.split()
    lines = [f"<th>{name}</th>" for name in names]
    for row in rows[:_MANY]:
        values = (getattr(row, name) for name in names)
        shown = (html.escape(v if isinstance(v, str) else shortened(v)) for v in map(_cut, values))
        lines += ["</tr><tr>", *(f"<td>{text}</td>" for text in shown)]
    more = len(rows) - _MANY
    return f"<table><tr>{''.join(lines)}</tr></table>" + (f"and {more} more" if more > 0 else "")


def _cut(value: Any) -> Any:
    return f"{value[:_LONG]}..." if isinstance(value, str) and len(value) > _LONG else value
