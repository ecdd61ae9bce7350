"""The samples of a query that `watch` has collected."""

from __future__ import annotations

from datetime import datetime

from spark_pgqueue.watching.progress import Query, Sample, samples


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
        active = (
            self._query.isActive
        )  # asked first, so that the progress has all that the query did
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
