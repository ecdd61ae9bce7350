"""Those who call the handler, as the keeper of the claims sees them."""

from __future__ import annotations

from typing import Protocol

from spark_pgqueue.worker.board import Job, Messages


class Crew(Protocol):
    """Threads, or tasks, that work on the jobs of a board."""

    def start(self) -> None:
        """Make them; before any job is there.

        Raises:
            PgQueueError: it is not possible.
        """
        ...

    def feed(self) -> None:
        """Hear that there are jobs."""
        ...

    def next_timeout(self) -> float | None:
        """When a call is over its time next, by the monotonic clock."""
        ...

    def give_up(self, now: float) -> list[tuple[Job, Messages]]:
        """End the calls that are over their time; returns those that go on, and count no more."""
        ...

    def end(self) -> None:
        """End the calls that can be ended. The board is closed by now."""
        ...
