"""What `watch` has seen of a query so far."""

from __future__ import annotations

from datetime import datetime

from spark_pgqueue.watching.progress import Look, Query, looks


class Sight:
    """All looks at a query since watching began, and what it was last.

    Attributes:
        headline: the query's name and whether it runs.
    """

    def __init__(self, query: Query):
        self._query = query
        self._looks: dict[tuple[datetime, int, str], Look] = {}
        self.headline: str = ""
        self.update()

    def update(self) -> bool:
        """Look again; returns whether the query still runs."""
        active = self._query.isActive  # asked first: what it did until then is in its progress
        for look in looks(self._query.recentProgress):
            self._looks[look.at, look.batch, look.source] = look
        error = None if active else self._query.exception()
        what = "is running" if active else "has ended"
        if error is not None:
            what = "has failed: " + str(error).strip().splitlines()[0]
        self.headline = f"query {self._query.name or self._query.id} {what}"
        return active

    def sources(self) -> dict[str, list[Look]]:
        """The looks at each source, the oldest first."""
        found: dict[str, list[Look]] = {}
        for look in self._looks.values():
            found.setdefault(look.source, []).append(look)
        return found

    def done(self, source: str) -> float:
        """Which part of what the source had to do is done, 0 to 1, since the first look."""
        seen = self.sources()[source]
        done, left = sum(each.messages for each in seen), seen[-1].backlog or 0
        return done / (done + left) if done else 1.0 - bool(left)


def count(value: float | None) -> str:
    """A number as people read it; nothing where it is not known."""
    return "" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as people read them; nothing where they are not known."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
