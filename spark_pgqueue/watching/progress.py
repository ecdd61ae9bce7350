"""What a query's progress says of its sources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol


class Query(Protocol):
    """What is needed of a `StreamingQuery`, classic or of Spark Connect."""

    @property
    def name(self) -> str | None: ...
    @property
    def id(self) -> str: ...
    @property
    def isActive(self) -> bool: ...
    @property
    def recentProgress(self) -> list[Any]: ...
    def exception(self) -> Exception | None: ...


@dataclass(frozen=True)
class Look:
    """What one micro-batch, or a moment without one, says of one source.

    Attributes:
        at: when the trigger began.
        batch: the number of the micro-batch, or of the next one where there was none.
        source: `stream / consumer`; of other formats their description.
        stream: the stream; None for other formats.
        consumer: the consumer; None for other formats, and where a stream is read without one.
        messages: how many the micro-batch had.
        per_second: messages processed per second.
        seconds: how long the trigger took.
        backlog: messages that were not claimed yet; None where the source does not say it.
        lag_seconds: how old the oldest of these was that could be delivered; None likewise.
    """

    at: datetime
    batch: int
    source: str
    stream: str | None
    consumer: str | None
    messages: int
    per_second: float
    seconds: float
    backlog: int | None
    lag_seconds: float | None


def looks(progress: Iterable[Any]) -> list[Look]:
    """A look for each source of each progress event, in their order."""
    events = [json.loads(each.json) for each in progress]
    return [_look(event, source) for event in events for source in event["sources"]]


def _look(event: dict[str, Any], source: dict[str, Any]) -> Look:
    latest = _object(source.get("latestOffset"))
    names = [latest[name] for name in ("stream", "consumer") if latest.get(name)]
    seconds = event.get("batchDuration", 0) / 1000
    return Look(
        at=datetime.fromisoformat(event["timestamp"]),
        batch=event["batchId"],
        source=" / ".join(names) or source["description"],
        stream=latest.get("stream"),
        consumer=latest.get("consumer"),
        messages=source["numInputRows"],
        per_second=round(source["numInputRows"] / seconds, 1) if seconds else 0.0,
        seconds=seconds,
        backlog=latest.get("backlog"),
        lag_seconds=latest.get("lagSeconds"),
    )


def _object(offset: Any) -> dict[str, Any]:
    # Other sources have numbers, or nothing; some versions of Spark give JSON as text.
    value = json.loads(offset) if isinstance(offset, str) else offset
    return value if isinstance(value, dict) else {}
