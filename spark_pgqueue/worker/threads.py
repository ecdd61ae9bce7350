"""An executor that calls the handler in threads; an attempt makes each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from spark_pgqueue import calling
from spark_pgqueue.worker.attempts import Hooks
from spark_pgqueue.worker.executor import Executor, Overdue
from spark_pgqueue.worker.job_queue import Job, JobQueue, Messages, WorkerSlot, next_call
from spark_pgqueue.worker.verdicts import Outcome, Retry

_LOOK_EVERY = 1.0  # seconds between two checks for threads that died


class Attempts(Protocol):
    """Makes the calls of the handler, in one thread."""

    def start(self) -> None: ...
    def __call__(self, claim_id: int, messages: Messages) -> tuple[Outcome, Any]: ...
    def interrupt(self) -> bool:
        """End the running call, if that is possible; returns whether it is."""
        ...

    def close(self) -> None: ...


class Threads(Executor):
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
        self._look_at = 0.0  # for threads that died
        self._slots: dict[WorkerSlot, tuple[Attempts, threading.Thread]] = {}

    def start(self) -> None:
        ready = [self._attempts() for _ in range(self._count)]
        for attempts in ready:
            attempts.start()
        for attempts in ready:
            self._add(attempts)
        self._hooks.run("on_start")

    def next_timeout(self) -> float | None:
        if self._timeout is None:
            return None
        ends = [slot.end_at(at, self._timeout) for slot in self._slots if (at := slot.at)]
        return min(ends, default=None)

    def give_up(self, now: float) -> list[Overdue]:
        """See `Executor`. A thread cannot be ended: another thread takes its place."""
        left = self._dead(now)
        if self._timeout is None:
            return left
        reason = f"timed out after {timedelta(seconds=self._timeout)}"
        for slot in list(self._slots):
            at = slot.at
            if at is None or now < slot.end_at(at, self._timeout):
                continue
            if slot.give_up(at, self._slots[slot][0].interrupt):
                left.append(self._replace(slot, at[0], at[1], reason))
        return left

    def _replace(self, slot: WorkerSlot, job: Job, messages: Messages, reason: str) -> Overdue:
        """Let another thread take the place of a slot, and first call the hook of its call."""
        verdict = Retry(reason=reason)
        del self._slots[slot]
        self._add(self._attempts(), partial(self._hooks.after, messages, verdict, verdict))
        return job, messages, verdict

    def _dead(self, now: float) -> list[Overdue]:
        """The calls of threads that have died, because reporting an error failed, too. Other
        threads take their places.
        """
        dead: list[Overdue] = []
        if now < self._look_at or self._queue.is_closed:
            return dead
        self._look_at = now + _LOOK_EVERY
        for slot, (_, thread) in list(self._slots.items()):
            if not thread.is_alive():
                slot.is_given_up = True
                if (job := slot.job) is not None:
                    at = slot.at[1] if slot.at is not None else job.calls[0]
                    dead.append(self._replace(slot, job, at, "the worker thread crashed"))
                else:
                    del self._slots[slot]
                    self._add(self._attempts())
        return dead

    def end(self) -> None:
        for attempts, _ in self._slots.values():
            attempts.interrupt()
        for slot, (_, thread) in self._slots.items():
            if slot.at is None or slot.is_given_up:
                thread.join(5)

    def _add(self, attempts: Attempts, first: Callable[[], None] = lambda: None) -> None:
        slot = WorkerSlot(self._queue)
        # A daemon: a call that does not end must not keep the program from ending.
        thread = threading.Thread(
            target=self._work, args=(slot, attempts, first), name="pgqueue worker", daemon=True
        )
        thread.start()
        self._slots[slot] = (attempts, thread)

    def _work(self, slot: WorkerSlot, attempts: Attempts, first: Callable[[], None]) -> None:
        try:
            first()
            while not slot.is_given_up:
                with suppress(Exception):  # the call tries it again, and reports why it fails
                    attempts.start()  # not in the time of a call
                if (job := slot.take()) is None:
                    break
                try:
                    self._do(slot, job, attempts)
                except BaseException as error:
                    slot.lose(error)
        finally:
            attempts.close()
            calling.end_loop()  # of the hooks, where the attempts are processes

    def _do(self, slot: WorkerSlot, job: Job, attempts: Attempts) -> None:
        calls = slot.calls(job)
        messages = next(calls, None)
        while messages is not None:
            outcome, result = attempts(job.claim.claim_id, messages)
            if not slot.is_given_up:
                self._hooks.after(messages, outcome, result)
            messages = next_call(calls, outcome)
