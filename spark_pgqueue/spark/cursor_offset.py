"""The offsets of a query that reads without a consumer: how Spark's checkpoint has them.

`{"streams": {"orders": {"incarnation": "6fd9...", "next": 7, "messages": 12}}}`: for each stream,
in order of the names, what `pgqueue.read_to` returned, but for the name. The order of all keys is
fixed, because Spark compares offsets as text.

Where a query begins ("latest", say) is decided when it first asks for messages, and Spark stores
the end of a micro-batch alone. So an end has as `from` where a stream began, unless that is the
same, until Spark's log has an offset with the stream: from then on that one is the start, whenever
a batch is replayed. (With asynchronous progress tracking, Spark stores not every end.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, PgQueueError
from spark_pgqueue.spark.checkpoint import unknown_offset

Position = dict[str, Any]
"""A position in a stream: an offset of it as the database has it, without the stream's name."""

_FIELDS = ("incarnation", "next", "messages", "cut", "gaps")


def position_of(offset: Mapping[str, Any]) -> Position:
    """The position that an offset of the database says, with its keys in their order."""
    return {name: offset[name] for name in _FIELDS if name in offset}


@dataclass(frozen=True)
class CursorOffset:
    """Positions in streams.

    Attributes:
        positions: up to where each stream was read.
        begun: where those began that the log may not have yet.
    """

    positions: Mapping[str, Position] = field(default_factory=dict)
    begun: Mapping[str, Position] = field(default_factory=dict)

    @classmethod
    def parse(cls, offset: Any) -> CursorOffset:
        """From what Spark read in the checkpoint.

        Raises:
            PgQueueError: another source, or a newer version of this one, has written it.
        """
        streams = offset.get("streams") if isinstance(offset, dict) else None
        if isinstance(offset, dict) and "reader" in offset:
            raise PgQueueError(
                "the checkpoint is of a query that reads a consumer, and this one has none",
                hint='add option("consumer", ...) again, or give the query a checkpointLocation of '
                "its own",
                sqlstate=FOREIGN_CHECKPOINT,
            )
        if not isinstance(streams, dict) or len(offset) > 1:
            raise unknown_offset(offset)
        return cls(
            {name: position_of(each) for name, each in streams.items()},
            {name: position_of(each["from"]) for name, each in streams.items() if "from" in each},
        )

    def as_json(self) -> dict[str, Any]:
        """As Spark is given it."""
        return {
            "streams": {
                name: self.positions[name]
                | ({"from": self.begun[name]} if name in self.begun else {})
                for name in sorted(self.positions)
            }
        }

    @property
    def messages(self) -> int:
        """How many messages were read, of all streams."""
        return sum(each["messages"] for each in self.positions.values())

    def beginning_at(self, begun: Mapping[str, Position]) -> CursorOffset:
        """The same end of a micro-batch, with where streams began that the log may not have."""
        moved = {
            name: place
            for name, place in begun.items()
            if name in self.positions and place != self.positions[name]
        }
        return CursorOffset(self.positions, moved)

    def spans(self, start: CursorOffset) -> dict[str, tuple[Position, Position]]:
        """From where to where each stream is read, in the batch between `start` and this end."""
        spans = {
            name: (start.positions.get(name) or self.begun.get(name) or end, end)
            for name, end in self.positions.items()
        }
        return {name: (first, end) for name, (first, end) in spans.items() if first != end}
