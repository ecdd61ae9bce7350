"""The executor, as the poller sees it: threads or tasks that call the handler."""

from __future__ import annotations

from spark_pgqueue.worker.job_queue import Job, Messages
from spark_pgqueue.worker.verdicts import Retry

Overdue = tuple[Job, Messages, Retry]
"""A call from which no report will come, and what becomes of its messages."""


class Executor:
    """Threads, or tasks, that work on the jobs of a queue.

    This one does nothing: it is the executor of `listen`, where the caller handles the messages.
    """

    def start(self) -> None:
        """Start the threads, and call the hook for that, before the first job is put.

        Raises:
            PgQueueError: a thread or process could not be started. The hook's error is raised, too.
        """

    def feed(self) -> None:
        """Begin new jobs, unless the threads wait for them."""

    def next_timeout(self) -> float | None:
        """When the next call exceeds its timeout, by the monotonic clock; None for never."""
        return None

    def give_up(self, now: float) -> list[Overdue]:
        """End the calls that exceed their timeout.

        Returns:
            the calls that cannot be ended, and those whose thread has died.
        """
        return []

    def end(self) -> None:
        """End all calls that can be ended. The queue is closed by then."""
