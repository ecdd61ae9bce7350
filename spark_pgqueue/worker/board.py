"""What passes between the thread that has the connection and those that call the handler."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_pgqueue.client.results import Message
from spark_pgqueue.postgres.wake import Wake
from spark_pgqueue.worker.hand import Held
from spark_pgqueue.worker.verdicts import Fate, Outcome, Verdict

Messages = Sequence[Message]


@dataclass(slots=True, eq=False)
class Job:
    """What one slot works on: calls of the handler, one after the other.

    Attributes:
        claim: that all of the messages are of.
        calls: the messages of each. More than one call where they have a key in common: when one
            has failed, the queue takes back what follows it.
    """

    claim: Held
    calls: Sequence[Messages]


class Report(NamedTuple):
    """What became of messages of a job.

    Attributes:
        job: the job.
        messages: these messages.
        outcome: what became of all of them.
        seconds: that the call took; None when there was none.
        has_ended: whether the job is over.
    """

    job: Job
    messages: Messages
    outcome: Outcome
    seconds: float | None
    has_ended: bool


class Board:
    """Jobs to do, and reports of what was done.

    Args:
        wake: wakes the thread that has the connection.
    """

    def __init__(self, wake: Wake):
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
        """Give jobs to who waits for one."""
        self.todo.extend(jobs)
        with self._changed:
            if self._waiting:
                self._changed.notify(min(len(jobs), self._waiting))

    def take_back(self, claim: Held | None = None) -> list[Job]:
        """The jobs that nobody has begun, which nobody will begin now; of a claim, or all."""
        taken: list[Job] = []
        for _ in range(len(self.todo)):
            try:
                job = self.todo.popleft()
            except IndexError:  # a slot was faster
                break
            (taken if claim in (None, job.claim) else self.todo).append(job)
        return taken

    def close(self) -> None:
        """Let nobody begin anything more."""
        self.is_closed = True
        with self._changed:
            self._changed.notify_all()

    def arm(self, few: int, each_report: bool) -> bool:
        """Before a wait: wake it when no more than `few` jobs are left, or at a report.

        Returns:
            whether to wait: neither is so already.
        """
        self._few, self._each_report = few, each_report
        self._is_armed = True
        return not self._is_ringing()

    def disarm(self) -> None:
        """After a wait: leave the thread alone."""
        self._is_armed = False

    # For the slots

    def take(self) -> Job | None:
        """The next job, waited for; None when there will be none."""
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
        """Say what became of messages."""
        self.reports.append(report)
        if self._is_armed and self._is_ringing():
            self._is_armed = False
            self._wake.set()

    def _is_ringing(self) -> bool:
        return len(self.todo) <= self._few or (self._each_report and bool(self.reports))


class Slot:
    """One who works on jobs, a call at a time."""

    def __init__(self, board: Board):
        self._board = board
        self.at: tuple[Job, Messages, float] | None = None
        """The call at hand, and since when by the monotonic clock."""
        self.is_given_up = False
        """Whether nobody waits for the call at hand any more: it is the slot's last one."""

    def calls(self, job: Job) -> Generator[Messages, Outcome, None]:
        """The messages of each call of a job; takes what became of them, and reports that."""
        for i, messages in enumerate(job.calls):
            rest = job.calls[i + 1 :]
            began = time.monotonic()
            self.at = (job, messages, began)
            # By then the claim may be another worker's: the connection was lost for so long.
            if self._board.is_closed or self.is_given_up or began > job.claim.until:
                self._report_rest(job, job.calls[i:], Fate.unstarted)
                break
            outcome = yield messages
            if self.is_given_up:
                return
            taken = time.monotonic() - began
            self._board.report(Report(job, messages, outcome, taken, not rest))
            if rest and (
                outcome is Fate.gone or (isinstance(outcome, Verdict) and outcome.takes_followers)
            ):
                self._report_rest(job, rest, Fate.gone)
                break
        self.at = None

    def _report_rest(self, job: Job, calls: Iterable[Messages], outcome: Outcome) -> None:
        messages = [message for call in calls for message in call]
        self._board.report(Report(job, messages, outcome, None, True))
