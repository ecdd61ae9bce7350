"""The queue between the thread that has the connection and the threads that call the handler."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import NamedTuple

from spark_pgqueue.postgres import clock
from spark_pgqueue.postgres.wake_event import WakeEvent
from spark_pgqueue.printable import summary
from spark_pgqueue.worker.in_flight import InFlightClaim, Messages
from spark_pgqueue.worker.log import warn
from spark_pgqueue.worker.verdicts import DeliveryState, Outcome, Retry, Verdict

_END_AGAIN = 1.0  # seconds after which a call that was interrupted is interrupted again


@dataclass(slots=True, eq=False)
class Job:
    """The work of one slot: calls of the handler, one after the other.

    Attributes:
        claim: the claim of all messages.
        calls: the messages of each call. A job has several calls when their messages share a key:
            after one has failed, the messages behind it are returned.
    """

    claim: InFlightClaim
    calls: Sequence[Messages]

    def note_failure(self, messages: Messages, outcome: Outcome) -> None:
        """Record the outcome of a call, without which the calls behind it do not begin."""
        self.claim.note(messages, outcome)
        for behind in dropwhile(lambda call: call is not messages, self.calls):
            self.claim.note(behind, DeliveryState.unstarted)


class Report(NamedTuple):
    """The outcome of messages of a job.

    Attributes:
        job: the job.
        messages: the messages.
        outcome: the outcome, the same for all of them.
        seconds: the duration of the call; None when the handler was not called.
        has_ended: whether the job is over.
    """

    job: Job
    messages: Messages
    outcome: Outcome
    seconds: float | None
    has_ended: bool


class JobQueue:
    """Jobs to do, and reports of the jobs that were done.

    Args:
        wake: wakes the thread that has the connection.
    """

    def __init__(self, wake: WakeEvent):
        self.todo: deque[Job] = deque()
        self.reports: deque[Report] = deque()
        self.is_closed: bool = False
        self._wake = wake
        self._changed = threading.Condition()
        self._waiting = 0
        self._is_armed = self._each_report = False
        self._few = -1

    # For the thread that has the connection

    def put(self, jobs: Sequence[Job]) -> None:
        """Add jobs, and wake as many waiting slots."""
        self.todo.extend(jobs)
        with self._changed:
            if self._waiting:
                self._changed.notify(min(len(jobs), self._waiting))

    def take_back(self, claim: InFlightClaim | None = None) -> list[Job]:
        """Remove the jobs that no slot has begun: those of a claim, or all. Returns them."""
        taken: list[Job] = []
        for _ in range(len(self.todo)):
            try:
                job = self.todo.popleft()
            except IndexError:  # a slot was faster
                break
            (taken if claim in (None, job.claim) else self.todo).append(job)
        return taken

    def close(self) -> None:
        """Prevent slots from beginning another job."""
        self.is_closed = True
        with self._changed:
            self._changed.notify_all()

    def arm(self, few: int, each_report: bool) -> bool:
        """Prepare a wait of the poller: a report wakes it when at most `few` jobs are left.

        Args:
            few: how many jobs.
            each_report: whether every report wakes the poller.

        Returns:
            whether to wait: False if there is already a reason to wake.
        """
        self._few, self._each_report = few, each_report
        self._is_armed = True
        return not self._is_ringing()

    def disarm(self) -> None:
        """Stop waking the poller by reports, after its wait."""
        self._is_armed = False

    # For the slots

    def take(self) -> Job | None:
        """Wait for the next job; None when there will be no more."""
        while not self.is_closed:
            try:
                return self.todo.popleft()
            except IndexError:
                pass
            with self._changed:
                if not self.todo and not self.is_closed:
                    self._waiting += 1
                    try:
                        self._changed.wait()
                    finally:
                        self._waiting -= 1
        return None

    def report(self, report: Report) -> None:
        """Report the outcome of messages."""
        self.reports.append(report)
        if self._is_armed and self._is_ringing():
            self._is_armed = False
            self._wake.set()

    def _is_ringing(self) -> bool:
        return len(self.todo) <= self._few or (self._each_report and bool(self.reports))


class WorkerSlot:
    """Works on jobs, one call at a time."""

    def __init__(self, queue: JobQueue):
        self._queue = queue
        self._lock = threading.Lock()
        self.job: Job | None = None
        """The job, until all of its messages are reported."""
        self.at: tuple[Job, Messages, float] | None = None
        """The running call, and its begin by the monotonic clock."""
        self.interrupted_at: float | None = None
        """When the running call was interrupted."""
        self.is_given_up: bool = False
        """Whether the poller has given up the running call, which is the slot's last."""

    def take(self) -> Job | None:
        """As `JobQueue.take`."""
        self.job = self._queue.take()
        return self.job

    def give_up(self, at: tuple[Job, Messages, float], interrupt: Callable[[], bool]) -> bool:
        """End a call, or give it up: then no report comes, and the slot ends.

        Args:
            at: the call, which may have ended in the meantime.
            interrupt: ends it if that is possible; returns whether it is.

        Returns:
            whether the call was given up.
        """
        with self._lock:
            if self.at is not at:
                return False
            if interrupt():
                self.interrupted_at = clock.now()
                return False
            self.is_given_up = True
            return True

    def end_at(self, at: tuple[Job, Messages, float], timeout: float) -> float:
        """When to end a call: after its timeout, and once more a second after each interrupt.

        The call lasts until its hook has ended; or its process was only starting.
        """
        interrupted_at = self.interrupted_at
        return at[2] + timeout if interrupted_at is None else interrupted_at + _END_AGAIN

    def lose(self, error: BaseException) -> None:
        """Report the rest of the job, which an error outside of the handler has ended. Without a
        report, the job's claim would be extended without limit.
        """
        if (job := self.job) is None or self.is_given_up:
            return
        begun = None if self.at is None else self.at[1]
        rest = [messages for messages in job.calls if messages is not begun]
        self._report_rest(job, rest, DeliveryState.unstarted, has_ended=begun is None)
        if begun is not None:
            verdict = Retry(reason=f"the worker slot failed: {summary(error)}")
            self._queue.report(Report(job, begun, verdict, None, True))
        self.at = self.job = None
        warn("a worker slot continues after %s", error)

    def calls(self, job: Job) -> Generator[Messages, Outcome, None]:
        """Yield the messages of each call of a job. The caller sends outcomes by `next_call`."""
        for i, messages in enumerate(job.calls):
            rest = job.calls[i + 1 :]
            began = clock.now()
            self.interrupted_at = None
            self.at = (job, messages, began)
            # The connection may have been lost for so long that another worker has the claim now.
            if self._queue.is_closed or self.is_given_up or began > job.claim.until:
                self._report_rest(job, job.calls[i:], DeliveryState.unstarted)
                break
            outcome = yield messages
            with self._lock:
                if self.is_given_up:
                    return
                self.at = None
            taken = clock.now() - began
            ends = outcome is DeliveryState.unstarted or (
                isinstance(outcome, Verdict) and outcome.holds_followers
            )
            if rest and ends:
                # The database may return these, too. Those that it leaves in the claim, such as
                # behind a dead letter, must not stay there. First: the poller may settle at once,
                # and without these the claim may be over then.
                self._report_rest(job, rest, DeliveryState.unstarted, has_ended=False)
            self._queue.report(Report(job, messages, outcome, taken, ends or not rest))
            if ends:
                break
        self.at = self.job = None

    def _report_rest(
        self, job: Job, calls: Iterable[Messages], outcome: Outcome, *, has_ended: bool = True
    ) -> None:
        messages = [message for call in calls for message in call]
        self._queue.report(Report(job, messages, outcome, None, has_ended))


def next_call(calls: Generator[Messages, Outcome, None], outcome: Outcome) -> Messages | None:
    """Report the outcome of a call of `WorkerSlot.calls`.

    Returns:
        the messages of the next call; None after the last one.
    """
    try:
        return calls.send(outcome)
    except StopIteration:
        return None
