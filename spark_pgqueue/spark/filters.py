"""Which rows of a table are wanted."""

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
    """Which rows of a table are wanted.

    Attributes:
        seqs: messages of these numbers.
        told: for each of some columns that are told of ranges its values.
        conditions: SQL conditions on what a message m holds; all of them are false for null.
    """

    seqs: Seqs = ((1, MOST),)
    told: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    conditions: tuple[str, ...] = ()

    def within(self, lo: int | None, hi: int | None) -> str:
        """Those of the numbers from lo to below hi, as the text of an int8multirange."""
        found = both(self.seqs, ((lo or 1, MOST if hi is None else hi),))
        return "{" + ",".join(f"[{lo},{hi})" for lo, hi in found) + "}"

    def of(self, rows: pa.Table) -> pa.Table:
        """The rows that have what is wanted of columns that are told."""
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
