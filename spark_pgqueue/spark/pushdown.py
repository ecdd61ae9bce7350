"""Filters that a table evaluates instead of Spark.

Values of users never become text of a statement as they are: numbers are compared with seq, texts
become hexadecimal digits, and times are written by Python.

Spark (4.1 to 4.3) keeps the plan with the last pushed filters for everything that is read of one
`load()`: another query would be read with the filters of the first. `Pushed` refuses that query
where this can be noticed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from uuid import uuid4

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.types import BooleanType, IntegerType, LongType, StringType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.filters import MOST, Filters, Seqs, both
from spark_pgqueue.spark.registration import own_folder
from spark_pgqueue.spark.tables import HELD, Table

MOST_VALUES = 1000
"""Spark evaluates a list with more values itself."""

REMEMBERED = 86_400.0
"""Seconds for which the machine remembers pushed filters, and the queries that read with them."""

_COMPARED = {LessThan: "<", LessThanOrEqual: "<=", GreaterThan: ">", GreaterThanOrEqual: ">="}


def push(filters: Iterable[Filter], table: Table) -> tuple[Filters, list[Filter]]:
    """The filters that a table takes over, and the filters that are left to Spark."""
    taken, left = Filters(), []
    for each in filters:
        narrowed = _narrowed(taken, each, table)
        if narrowed is None:
            left.append(each)
        else:
            taken = narrowed
    return taken, left


@dataclass(frozen=True)
class Pushed:
    """The filters that were taken over for one `load()`, and the query that reads with them.

    Spark pushes filters in a process for each query, all on the driver's machine, and reads in
    processes of executors. Files of the user, on each machine, say what happened before.

    Attributes:
        load: an id that no other `load()` has.
        plan: an id that no other plan with filters has.
    """

    load: str
    plan: str = field(default_factory=lambda: str(uuid4()))

    def note(self, taken: Filters) -> None:
        """Note that a query has these filters, or none.

        Raises:
            PgQueueError: another query of the same `load()` has other filters.
        """
        if not _is_only(self.load, sha256(repr(taken).encode()).hexdigest()):
            raise _refusal("another query has pushed other filters into what this load() returned")

    def check(self, execution: str | None) -> None:
        """Check that no other query reads with these filters, as far as this machine knows.

        Args:
            execution: Spark's id of the query that reads.

        Raises:
            PgQueueError: another query has read with these filters before.
        """
        with contextlib.suppress(OSError):  # no folder to write to
            if not _is_only(self.plan, str(execution)):
                raise _refusal("filters were pushed by another query of what this load() returned")


def _refusal(what: str) -> PgQueueError:
    return PgQueueError(
        f"{what}, and Spark would read with these: rows would be missing, or too many",
        hint="load() again for each query, and for each side of a union or join (also to collect "
        "the same DataFrame twice); or leave option pushdown out",
    )


def _is_only(group: str, value: str) -> bool:
    """Whether this is the first or only value of a group."""
    folder = own_folder("pgqueue-pushed")
    old = time.time() - REMEMBERED
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < old:
                path.unlink()
    mine = folder / f"{group}.{value}"
    mine.touch(0o600)
    if all(each == mine for each in folder.glob(f"{group}.*")):
        return True
    mine.unlink(missing_ok=True)
    return False


def _narrowed(filters: Filters, given: Filter, table: Table) -> Filters | None:
    """The filters with one more; None where Spark evaluates it."""
    name, values = _named(given), _values(given)
    if values is not None and name in HELD and table.of_messages:
        condition = _condition(name, given, values)
        if condition is None:
            return None
        return replace(filters, conditions=(*filters.conditions, condition))
    if values is None or name not in [each.name for each in table.columns]:
        return None
    if name == "seq":
        seqs = _numbers(given, values)
        return seqs if seqs is None else replace(filters, seqs=both(filters.seqs, seqs))
    simple = (StringType, IntegerType, LongType, BooleanType)
    if isinstance(given, EqualTo | In) and isinstance(table[name].type, simple):
        return replace(filters, told=(*filters.told, (name, tuple(values))))
    return None


def _named(given: Filter) -> str:
    attribute = getattr(given, "attribute", ())
    return attribute[0] if len(attribute) == 1 else ""


def _values(given: Filter) -> list | None:
    """The values that a filter compares with; None for other filters, or one with null."""
    if isinstance(given, In):
        values = list(given.value)
    elif isinstance(given, (EqualTo, StringStartsWith, *_COMPARED)):
        values = [given.value]  # type: ignore[attr-defined]
    else:
        return None
    return values if len(values) <= MOST_VALUES and None not in values else None


def _numbers(given: Filter, values: list) -> Seqs | None:
    if not all(type(each) is int for each in values):
        return None
    value = values[0] if values else 0
    if isinstance(given, EqualTo | In):
        return tuple((each, each + 1) for each in sorted(set(values)) if 1 <= each < MOST)
    bounds = {
        LessThan: (1, value),
        LessThanOrEqual: (1, value + 1),
        GreaterThan: (value + 1, MOST),
        GreaterThanOrEqual: (value, MOST),
    }
    return (bounds[type(given)],) if type(given) in bounds else None


def _condition(name: str, given: Filter, values: list) -> str | None:
    """A condition on m that holds for the same messages as the filter; None where none exists."""
    if name == "inserted_at":
        if not all(isinstance(each, datetime) and each.tzinfo for each in values):
            return None
        return _compared("m.inserted_at", given, [f"'{each.isoformat()}'" for each in values])
    if name != "key":
        return None
    # Bytes are equal where Spark's texts are equal, whatever the collation. Spark itself evaluates
    # comparisons of less and more.
    texts = [_bytes(each) for each in values]
    if any(each is None for each in texts):
        return None
    key = "convert_to(m.key, 'UTF8')"
    known = [f"decode('{each}', 'hex')" for each in texts]
    if isinstance(given, StringStartsWith):
        return f"substr({key}, 1, {len(texts[0] or '') // 2}) = {known[0]}"
    return _compared(key, given, known) if isinstance(given, EqualTo | In) else None


def _compared(column: str, given: Filter, values: list[str]) -> str | None:
    if isinstance(given, EqualTo | In):
        return f"{column} in ({', '.join(values)})" if values else "false"
    operator = _COMPARED.get(type(given))
    return operator and f"{column} {operator} {values[0]}"


def _bytes(value: object) -> str | None:
    """A text in hexadecimal digits; None for a text that Postgres cannot store."""
    try:
        return value.encode().hex() if isinstance(value, str) and "\0" not in value else None
    except UnicodeEncodeError:
        return None
