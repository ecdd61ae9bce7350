"""Actions: rows that settle or revive messages, and are not sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from spark_pgqueue.postgres.errors import NOT_ALLOWED, PgQueueError
from spark_pgqueue.spark.executor.typed import read_json
from spark_pgqueue.spark.options.sink import SinkOptions
from spark_pgqueue.spark.options.values import ACTIONS, REVIVING
from spark_pgqueue.spark.sink.rows import multirange

if TYPE_CHECKING:
    import pyarrow as pa

_SAYS = {
    "delay": ("nack",),
    "reason": ("nack", "dead_letter"),
    "details": ("ack", "dead_letter"),
}
"""Columns with details, and the actions that take them."""

DEEPEST = 1000
"""The levels of details. Postgres reads JSON by recursion, and ends at some thousands."""


class Action(NamedTuple):
    """An action on messages of a consumer; the names of the fields are those of SQL."""

    action: str
    stream: str
    consumer: str
    delay: str | None
    reason: str | None
    details: str | None

    @property
    def revives(self) -> bool:
        """Whether the action brings messages back."""
        return self.action in REVIVING


class Actions:
    """The actions of the rows of a task; options are the defaults for the columns."""

    def __init__(self, options: SinkOptions):
        self._options = options
        self._seqs: dict[Action, list[pa.ChunkedArray]] = {}

    def add(self, rows: pa.Table) -> None:
        """Note the rows that have an action; all rows, if an option sets the action."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not rows.num_rows:
            return
        named = {
            "action": self._column(rows, "action", self._options.action),
            "stream": self._column(rows, "stream", self._options.stream),
            "consumer": self._column(rows, "consumer", self._options.consumer),
        }
        if "delay" in rows.column_names:
            rows = rows.set_column(
                rows.column_names.index("delay"), "delay", rows["delay"].cast(pa.int64())
            )
        said = {name: rows[name] for name in _SAYS if name in rows.column_names}
        seqs = self._column(rows, "seq", None).cast(pa.int64())
        if (highest := pc.call_function("max", [seqs]).as_py()) == 2**63 - 1:
            _refuse("seq", f"is {highest}, which no message can have")
        # One thread keeps the order.
        found = (
            pa.table({**named, **said, "seq": seqs})
            .group_by([*named, *said], use_threads=False)
            .aggregate([("seq", "list")])
        )
        described = found.select([*named, *said]).to_pylist()
        for row in described:
            if row["action"] not in ACTIONS:
                _refuse("action", f"is {row['action']!r}, but must be {', '.join(ACTIONS)} or null")
        for row, some in zip(described, found["seq_list"], strict=True):
            self._seqs.setdefault(_action(row), []).append(pa.chunked_array([some.values]))

    def staged(self) -> tuple[tuple[Action, str], ...]:
        """Each action with its messages, as the text of an int8multirange."""
        import pyarrow as pa
        import pyarrow.compute as pc

        def text(chunks: list[pa.ChunkedArray]) -> str:
            seqs = pc.call_function(
                "unique", [pa.chunked_array([each for some in chunks for each in some.chunks])]
            )
            order = pc.call_function("sort_indices", [seqs], pc.SortOptions())
            return multirange(seqs.take(order))

        return tuple((action, text(chunks)) for action, chunks in self._seqs.items())

    def _column(self, rows: pa.Table, name: str, option: str | None) -> pa.ChunkedArray:
        """A column without nulls: the option takes the place of null."""
        import pyarrow as pa

        if name not in rows.column_names:
            return pa.chunked_array([pa.repeat(option, rows.num_rows)])
        column = rows[name]
        if column.null_count and option is None:
            _refuse(
                name,
                f"is null in {column.null_count} of {rows.num_rows} rows with an action"
                + (f", but there is no option {name}" if name != "seq" else ""),
            )
        return column if option is None else column.fill_null(option)


def merged(tasks: Iterable[tuple[tuple[Action, str], ...]]) -> dict[Action, str]:
    """The actions of all tasks, as the text of multiranges that may overlap."""
    seqs: dict[Action, list[str]] = {}
    for actions in tasks:
        for action, some in actions:
            seqs.setdefault(action, []).append(some.strip("{}"))
    return {action: f"{{{','.join(some)}}}" for action, some in seqs.items()}


def as_json(actions: dict[Action, str]) -> str:
    """The actions as SQL takes them; details as the user wrote them, because a float has fewer
    digits than a number of Postgres.
    """

    def described(action: Action, seqs: str) -> str:
        fields = {name: json.dumps(value) for name, value in action._asdict().items()}
        if action.details is not None:
            fields["details"] = action.details
        fields["seqs"] = json.dumps(seqs)
        return ", ".join(f'"{name}": {value}' for name, value in fields.items())

    return f"[{', '.join(f'{{{described(*each)}}}' for each in actions.items())}]"


def _action(row: dict) -> Action:
    said = {name: row.get(name) for name, to in _SAYS.items() if row["action"] in to}
    for name in ("stream", "consumer"):
        if "\0" in row[name]:
            _refuse(name, "contains a NUL character")
    if "\0" in (said.get("reason") or ""):
        _refuse("reason", "contains a NUL character")
    delay = said.get("delay")
    return Action(
        row["action"],
        row["stream"],
        row["consumer"],
        None if delay is None else f"{delay} microseconds",
        said.get("reason"),
        _json(said.get("details")),
    )


def _json(text: str | None) -> str | None:
    """The same text, if jsonb can hold it: else the commit would fail, at each start."""
    if text is None:
        return None
    try:
        read_json(text)
        outside = re.sub(r'"(?:[^"\\]|\\.)*"|[^][{}]', "", text)
        if max(accumulate((1 if each in "[{" else -1 for each in outside), initial=0)) > DEEPEST:
            raise ValueError("too many levels")
    except (ValueError, ArithmeticError):
        _refuse(
            "details",
            "is not JSON that Postgres can hold",
            "select to_json(struct(...)) as details; jsonb holds no NUL character, no half of a "
            f"surrogate pair, numbers as numeric does, and here at most {DEEPEST} levels",
        )
    return text


def _refuse(column: str, what: str, hint: str | None = None) -> NoReturn:
    raise PgQueueError(f"column {column} {what}", hint=hint, sqlstate=NOT_ALLOWED)
