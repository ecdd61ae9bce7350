"""The offsets of the offset source, as Spark's checkpoint stores them.

`{"streams": {"orders": {"incarnation": "6fd9...", "next": 7, "messages": 12}}}`: for each stream,
in the order of the names, the offset that `pgqueue.read_to` returned, without the name. The order
of all keys is fixed, because Spark compares offsets as text.

The beginning of a query (such as "latest") is determined at its first read, and Spark stores only
the ends of micro-batches. So an end has the beginning of a stream as `from`, unless both are equal,
until Spark's log has an offset with the stream. From then on that offset is the start of a replayed
batch. (With asynchronous progress tracking, Spark does not store every end.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, PgQueueError
from spark_pgqueue.spark.driver.checkpoint import unknown_offset

Position = dict[str, Any]
"""A position in a stream: an offset of the database without the stream's name."""

_FIELDS = ("incarnation", "next", "messages", "cut", "gaps")


def position_of(offset: Mapping[str, Any]) -> Position:
    """The position of a database offset, with its keys in their fixed order."""
    return {name: offset[name] for name in _FIELDS if name in offset}


@dataclass(frozen=True)
class StreamOffsets:
    """Positions in streams."""

    positions: Mapping[str, Position] = field(default_factory=dict)  # the end of each stream
    # the beginning of each stream that Spark's log may not have yet
    begun: Mapping[str, Position] = field(default_factory=dict)

    @classmethod
    def parse(cls, offset: Any) -> StreamOffsets:
        """The offsets that Spark read in the checkpoint; those of another source are an error."""
        streams = offset.get("streams") if isinstance(offset, dict) else None
        if isinstance(offset, dict) and "reader" in offset:
            raise PgQueueError(
                "the checkpoint belongs to a query that reads a consumer, but this query has none",
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
        """The form in which Spark stores the offsets."""
        return {
            "streams": {
                name: self.positions[name]
                | ({"from": self.begun[name]} if name in self.begun else {})
                for name in sorted(self.positions)
            }
        }

    @property
    def messages(self) -> int:
        """The number of messages that were read, of all streams."""
        return sum(each["messages"] for each in self.positions.values())

    def beginning_at(self, begun: Mapping[str, Position]) -> StreamOffsets:
        """The same end of a micro-batch, with the beginnings that the log may not have."""
        moved = {
            name: place
            for name, place in begun.items()
            if name in self.positions and place != self.positions[name]
        }
        return StreamOffsets(self.positions, moved)

    def spans(self, start: StreamOffsets) -> dict[str, tuple[Position, Position]]:
        """The start and the end of each stream in the batch between `start` and this end."""
        spans = {
            name: (start.positions.get(name) or self.begun.get(name) or end, end)
            for name, end in self.positions.items()
        }
        return {name: (first, end) for name, (first, end) in spans.items() if first != end}
