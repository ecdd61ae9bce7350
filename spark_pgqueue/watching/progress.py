"""The progress of a query, for each of its sources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol


class Query(Protocol):
    """The part of a `StreamingQuery` that is needed here, classic or of Spark Connect."""

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
class Sample:
    """The figures of one source in one progress event: a micro-batch, or a moment without one.

    Attributes:
        at: when the trigger began.
        batch: the number of the micro-batch, or of the next one where there was none.
        source: `stream / consumer`; for other formats their description.
        stream: the stream; None for other formats.
        consumer: the consumer; None for other formats, and for a stream without a consumer.
        messages: how many messages the micro-batch had.
        per_second: messages processed per second.
        seconds: the duration of the trigger.
        backlog: messages that were not claimed yet; None where the source does not report them.
        is_estimate: whether backlog is an estimate; None where not reported.
        lag_seconds: the age of the oldest message of the backlog that could be delivered; None
            where not reported.
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
    is_estimate: bool | None
    lag_seconds: float | None


def samples(progress: Iterable[Any]) -> list[Sample]:
    """A sample for each source of each progress event, in order."""
    events = [json.loads(each.json) for each in progress]
    return [_sample(event, source) for event in events for source in event["sources"]]


def _sample(event: dict[str, Any], source: dict[str, Any]) -> Sample:
    latest = _object(source.get("latestOffset"))
    names = [latest[name] for name in ("stream", "consumer") if latest.get(name)]
    seconds = event.get("batchDuration", 0) / 1000
    return Sample(
        at=datetime.fromisoformat(event["timestamp"]),
        batch=event["batchId"],
        source=" / ".join(names) or source["description"],
        stream=latest.get("stream"),
        consumer=latest.get("consumer"),
        messages=source["numInputRows"],
        per_second=round(source["numInputRows"] / seconds, 1) if seconds else 0.0,
        seconds=seconds,
        backlog=latest.get("backlog"),
        is_estimate=latest.get("backlogIsEstimate"),
        lag_seconds=latest.get("lagSeconds"),
    )


def _object(offset: Any) -> dict[str, Any]:
    # Offsets of other sources are numbers, or missing; some versions of Spark give JSON as text.
    value = json.loads(offset) if isinstance(offset, str) else offset
    return value if isinstance(value, dict) else {}


class ProgressHistory:
    """All samples of a query since the watching began, and the query's state.

    Attributes:
        headline: the query's name and whether it runs.
    """

    def __init__(self, query: Query):
        self._query = query
        self._samples: dict[tuple[datetime, int, str], Sample] = {}
        self.headline: str = ""
        self.update()

    def update(self) -> bool:
        """Collect new samples; returns whether the query still runs."""
        active = self._query.isActive  # read first, or the last progress could be missed
        for sample in samples(self._query.recentProgress):
            self._samples[sample.at, sample.batch, sample.source] = sample
        error = None if active else self._query.exception()
        what = "is running" if active else "has ended"
        if error is not None:
            what = "has failed: " + str(error).strip().splitlines()[0]
        self.headline = f"query {self._query.name or self._query.id} {what}"
        return active

    def sources(self) -> dict[str, list[Sample]]:
        """The samples of each source, the oldest first."""
        found: dict[str, list[Sample]] = {}
        for sample in self._samples.values():
            found.setdefault(sample.source, []).append(sample)
        return found

    def done(self, source: str) -> float:
        """The part of the source's work that is done, 0 to 1, since the first sample."""
        seen = self.sources()[source]
        done, left = sum(each.messages for each in seen), seen[-1].backlog or 0
        return done / (done + left) if done else 1.0 - bool(left)


def count(value: float | None) -> str:
    """A number for people; empty where it is not known."""
    return "" if value is None else f"{value:,.0f}"


def backlog_of(sample: Sample) -> str:
    """The backlog for people, with `~` before an estimate."""
    return ("~" if sample.is_estimate else "") + count(sample.backlog)


def duration(seconds: float | None) -> str:
    """Seconds for people; empty where they are not known."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
