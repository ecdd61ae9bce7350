"""An executor that calls the handler in threads; an attempt makes each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from spark_pgqueue import calling
from spark_pgqueue.worker.attempts import Hooks
from spark_pgqueue.worker.job_queue import Job, JobQueue, Messages, WorkerSlot
from spark_pgqueue.worker.verdicts import Outcome


class Attempts(Protocol):
    """Makes the calls of the handler, in one thread."""

    def start(self) -> None: ...
    def __call__(self, claim_id: int, messages: Messages) -> tuple[Outcome, Any]: ...
    def interrupt(self) -> bool:
        """End the running call, if that is possible; returns whether it is."""
        ...

    def close(self) -> None: ...


class Threads:
    """Runs calls in threads.

    Args:
        queue: holds the jobs.
        count: how many threads.
        attempts: makes the object that calls the handler, for one thread.
        hooks: called after a call.
        timeout: seconds of a call; None for no limit.
    """

    def __init__(
        self,
        queue: JobQueue,
        count: int,
        attempts: Callable[[], Attempts],
        hooks: Hooks,
        timeout: float | None,
    ):
        self._queue = queue
        self._count = count
        self._attempts = attempts
        self._hooks = hooks
        self._timeout = timeout
        self._slots: dict[WorkerSlot, tuple[Attempts, threading.Thread]] = {}

    def start(self) -> None:
        """See `Executor`."""
        ready = [self._attempts() for _ in range(self._count)]
        for attempts in ready:
            attempts.start()
        for attempts in ready:
            self._add(attempts)
        self._hooks.started()

    def feed(self) -> None:
        """See `Executor`: the threads wait for the queue themselves."""

    def next_timeout(self) -> float | None:
        """See `Executor`."""
        if self._timeout is None:
            return None
        begun = [at[2] for slot in self._slots if (at := slot.at) is not None]
        return min(begun) + self._timeout if begun else None

    def give_up(self, now: float) -> list[tuple[Job, Messages]]:
        """See `Executor`. A thread cannot be ended: another thread takes its place."""
        left: list[tuple[Job, Messages]] = []
        if self._timeout is None:
            return left
        for slot in list(self._slots):
            at = slot.at
            if at is None or now < at[2] + self._timeout or self._slots[slot][0].interrupt():
                continue
            slot.is_given_up = True
            if slot.at is at:
                left.append(at[:2])
            del self._slots[slot]
            self._add(self._attempts())
        return left

    def end(self) -> None:
        """See `Executor`."""
        for attempts, _ in self._slots.values():
            attempts.interrupt()
        for slot, (_, thread) in self._slots.items():
            if slot.at is None or slot.is_given_up:
                thread.join(5)

    def _add(self, attempts: Attempts) -> None:
        slot = WorkerSlot(self._queue)
        # A daemon: a call that does not end must not keep the program from ending.
        thread = threading.Thread(
            target=self._work, args=(slot, attempts), name="pgqueue worker", daemon=True
        )
        self._slots[slot] = (attempts, thread)
        thread.start()

    def _work(self, slot: WorkerSlot, attempts: Attempts) -> None:
        try:
            while not slot.is_given_up and (job := self._queue.take()) is not None:
                calls = slot.calls(job)
                messages = next(calls, None)
                while messages is not None:
                    outcome, result = attempts(job.claim.claim_id, messages)
                    if not slot.is_given_up:
                        self._hooks.after(messages, outcome, result)
                    try:
                        messages = calls.send(outcome)
                    except StopIteration:
                        break
        finally:
            attempts.close()
            calling.end_loop()  # of the hooks, where the attempts are processes
