"""The filters of a table that the database evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

MOST = 2**63 - 1

Seqs = tuple[tuple[int, int], ...]
"""Numbers from lo to below hi, in ascending order."""


@dataclass(frozen=True)
class Filters:
    """The rows of a table that a query wants.

    Attributes:
        seqs: only messages with these numbers.
        told: allowed values of columns that the database knows of ranges.
        conditions: SQL conditions on the content of a message m; all are false for null.
    """

    seqs: Seqs = ((1, MOST),)
    told: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    conditions: tuple[str, ...] = ()

    def within(self, lo: int | None, hi: int | None) -> str:
        """The numbers of `seqs` from lo to below hi, as the text of an int8multirange."""
        found = both(self.seqs, ((lo or 1, MOST if hi is None else hi),))
        return "{" + ",".join(f"[{lo},{hi})" for lo, hi in found) + "}"

    def of(self, rows: pa.Table) -> pa.Table:
        """The rows whose known columns have the allowed values."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for name, values in self.told:
            column = rows[name]
            wanted = pa.array(values, column.type)
            rows = rows.filter(pc.call_function("is_in", [column], pc.SetLookupOptions(wanted)))
        return rows


def both(some: Seqs, others: Seqs) -> Seqs:
    """The numbers that are in both."""
    found = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return tuple((lo, min(hi, MOST)) for lo, hi in sorted(found) if lo < hi)
