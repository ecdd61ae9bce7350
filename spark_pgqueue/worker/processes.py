"""Calls of the handler in a process of their own, which may be killed, or die."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from spark_pgqueue.client.messages import Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.forks import OfThisProcess, after_fork
from spark_pgqueue.printable import summary
from spark_pgqueue.worker.attempts import Attempt, name_of, timed_out
from spark_pgqueue.worker.log import warn
from spark_pgqueue.worker.signals import stopped_by_signals
from spark_pgqueue.worker.verdicts import Outcome, Retry, Verdict, plain

_PATIENCE = 60.0  # seconds for a process to import the handler's modules
_PAUSE = 1.0  # seconds after a failed start of a process
_LOOK = 1.0  # seconds between two checks of whether the worker's process exists


class Child:
    """Calls the handler in a process, which is replaced when it dies. One thread uses it.

    The process is the first of its session: what it has started is killed together with it. It
    ends when the worker's process does, however that ends.

    Args:
        attempt: called in the process.
        timeout: of a call, for error messages.

    Raises:
        PgQueueError: the handler cannot be sent to another process.
    """

    def __init__(self, attempt: Attempt, timeout: timedelta | None):
        try:
            pickle.dumps(attempt)
        except Exception as error:
            raise PgQueueError(
                f"the handler cannot be sent to another process: {error}",
                hint="use functions of a module (also for wrap), not a lambda or an inner function",
            ) from None
        self._attempt = attempt
        self._timeout = timeout
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_interrupted = False
        _children.add(self)

    def start(self) -> None:
        """Start the process, unless there is one.

        Raises:
            PgQueueError: the system makes no process, it ended, or was not ready within a minute.
        """
        if self._is_interrupted and not _is_ending:  # just after the last call had ended
            self._is_interrupted = False
            if self._process is not None:
                self._reap(has_died=True)
        if self._process is not None:
            return
        if _is_ending:
            raise PgQueueError(
                "a process for the handler could not be started: the program is ending"
            )
        context = multiprocessing.get_context("spawn")  # this process has threads
        try:
            self._pipe, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._attempt), name="pgqueue worker", daemon=True
            )
            process.start()
        except OSError as error:
            raise PgQueueError(f"a process for the handler could not be started: {error}") from None
        self._process = process
        theirs.close()  # otherwise the end of the process would not be noticed
        try:
            if self._pipe.poll(_PATIENCE) and self._pipe.recv():
                return
        except (EOFError, OSError):
            pass
        raise PgQueueError(
            f"a process for the handler could not be started: {self._reap()}",
            hint='in a script, run the worker under if __name__ == "__main__":',
        )

    def __call__(self, claim_id: int, messages: Sequence[Message]) -> tuple[Outcome, Any]:
        """Call the handler; see `Attempt`. Of an error, only the verdict comes back."""
        try:
            self.start()
            assert self._pipe is not None
            self._pipe.send((claim_id, messages))
            outcome, packed = self._pipe.recv()
        except (EOFError, OSError):
            how = self._reap(has_died=True)
            if self._is_interrupted:
                self._is_interrupted = False
                outcome = timed_out(self._attempt.of, messages, self._timeout)
            else:
                outcome = Retry(reason=f"the worker process crashed: {how}")
                warn("%s: %s", name_of(self._attempt.of, messages), outcome.reason)
            return outcome, outcome
        except Exception as error:  # no process could be started
            warn("%s: %s", name_of(self._attempt.of, messages), error)
            time.sleep(_PAUSE)
            outcome = Retry(reason=summary(error))
            return outcome, outcome
        return outcome, _unpacked(packed, outcome)

    def interrupt(self) -> bool:
        """Kill the process, and those that it has started."""
        process = self._process
        if process is not None:
            self._is_interrupted = True
            with suppress(ValueError):  # it has died, and was reaped
                _kill(process)
        return True

    def close(self) -> None:
        """End the process, after the running call."""
        if self._process is not None:
            self._reap()

    def _reap(self, *, has_died: bool = False) -> str:
        """Let the process end, and forget it; returns how it ended.

        Args:
            has_died: whether its call has failed, so that what the call started has to end, too.
        """
        process, self._process = self._process, None
        assert process is not None
        assert self._pipe is not None
        self._pipe.close()
        process.join(1)
        if has_died or process.exitcode is None:
            _kill(process)
            process.join()
        code = process.exitcode or 0
        process.close()
        known = {each.value: each.name for each in signal.Signals}  # without the real-time signals
        return f"exit code {code}" if code >= 0 else known.get(-code, f"signal {-code}")


def _kill(process: BaseProcess) -> None:
    """Kill a process and those that it has started, unless these have left its group."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:  # it has no group yet
        process.kill()


_children: OfThisProcess[Child] = OfThisProcess()
_is_ending = False


@atexit.register
def _end_all() -> None:
    """Kill the processes of runs that last to the end of the program, which waits for them."""
    global _is_ending
    _is_ending = True
    for child in list(_children):
        child.interrupt()


after_fork(_children.clear)


def _serve(pipe: Connection, attempt: Attempt) -> None:
    """Call the handler for each request, in the child process."""
    # A session of its own, which the terminal's Ctrl-C does not reach.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # For the worker it is a daemon. A daemon could not start processes itself.
    multiprocessing.current_process().daemon = False
    # Stopping a service signals all of its processes. The worker decides when this one ends.
    with stopped_by_signals(lambda _: None):
        try:
            pipe.send(True)
            while True:
                claim_id, messages = pipe.recv()
                outcome, result = attempt(claim_id, messages)
                packed = _packed(outcome if isinstance(result, BaseException) else result)
                pipe.send((plain(outcome), packed))
        except (EOFError, OSError):  # the worker has ended
            attempt.close()


def _end_with_parent() -> None:
    """Kill this process, and those that it has started, when the worker's process is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A fork of the worker may hold the other end of the sentinel.
    while not wait([parent.sentinel], _LOOK) and os.getppid() == parent.pid:
        pass
    os.killpg(0, signal.SIGKILL)


def _packed(value: Any) -> bytes:
    """The argument of a hook, pickled: a verdict, or the handler's return value or its repr."""
    with suppress(BaseException):
        return pickle.dumps(value)
    with suppress(BaseException):
        return pickle.dumps(plain(value) if isinstance(value, Verdict) else repr(value))
    return pickle.dumps(object.__repr__(value))


def _unpacked(packed: bytes, outcome: Outcome) -> Any:
    """The argument of a hook. Loading it may fail, if this process lacks what it needs."""
    try:
        return pickle.loads(packed)
    except BaseException as error:  # also SystemExit, which would end the thread
        known = isinstance(outcome, Verdict)
        return outcome if known else f"what cannot be read here: {type(error).__name__}: {error}"
