"""Workers: processes of their own, which begin together."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from ctypes import c_longlong
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any

import psycopg
from psycopg.types.json import set_json_loads

from tests.benchmarks.server_cpu import ServerCpu, between

PATIENCE = 180
"""Seconds that a job may take."""


def connect(url: str) -> psycopg.Connection:
    """A connection that prepares each statement and leaves JSON as it came, for every side."""
    conn = psycopg.connect(url, autocommit=True)
    conn.prepare_threshold = 0
    set_json_loads(lambda text: text.decode() if isinstance(text, bytes) else text, conn)
    return conn


@dataclass
class Seat:
    """What a job is given in its process.

    Attributes:
        index: which of the crew's workers this is.
        url: of the database.
        counters: of all workers; each counts up its own, of messages sent or acknowledged.
    """

    index: int
    url: str
    counters: Any
    _parent: Connection
    _connection: psycopg.Connection | None = field(default=None)

    @property
    def connection(self) -> psycopg.Connection:
        """The worker's connection, which it keeps."""
        if self._connection is None:
            self._connection = connect(self.url)
        return self._connection

    def begin(self) -> float:
        """Wait until all are ready. Returns the time, by a clock that all processes share."""
        self._parent.send(("ready", None))
        self._parent.recv()
        return time.perf_counter()

    def count(self, messages: int) -> None:
        self.counters[self.index] += messages


Job = Callable[[Seat], Any]


class Crew:
    """Processes that do jobs. They are started when they are first needed, and kept.

    Attributes:
        url: of the database.
        cpu: counts what the server works.
        worked: the seconds of CPU that the server has had during the last run; None where that
            cannot be seen.
    """

    def __init__(self, url: str, cpu: ServerCpu, most: int = 16):
        self.url = url
        self.cpu = cpu
        self.worked: float | None = None
        self._context = multiprocessing.get_context("spawn")
        self.counters: Any = self._context.Array(c_longlong, most, lock=False)
        self._workers: list[tuple[SpawnProcess, Connection]] = []

    def run(self, jobs: Sequence[Job], meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """Do jobs at the same time, each in a process of its own.

        Args:
            jobs: functions that can be pickled; each calls `begin` of its seat, once.
            meanwhile: called when all have begun.

        Returns:
            what they returned, in the order given.

        Raises:
            RuntimeError: one failed, with what it said. The crew cannot be used any more.
        """
        while len(self._workers) < len(jobs):
            self._start()
        busy = list(zip(self._workers, jobs, strict=False))
        for index in range(len(self.counters)):
            self.counters[index] = 0
        for (_, pipe), job in busy:
            pipe.send(job)
        for worker, _ in busy:
            self._answer(worker, "ready")
        before = self.cpu.seconds()
        for (_, pipe), _ in busy:
            pipe.send("go")
        if meanwhile is not None:
            meanwhile()
        answers = [self._answer(worker, "done") for worker, _ in busy]
        self.worked = between(before, self.cpu.seconds())
        return answers

    def flush(self) -> None:
        """Let all workers tell the server's statistics what they did."""
        self.run([_flush] * len(self._workers))

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        args = (len(self._workers), self.url, self.counters, theirs)
        process = self._context.Process(target=_serve, args=args, daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def _answer(self, worker: tuple[SpawnProcess, Connection], expected: str) -> Any:
        process, pipe = worker
        if not pipe.poll(PATIENCE):
            raise RuntimeError(f"a worker did not answer within {PATIENCE} s")
        try:
            kind, value = pipe.recv()
        except EOFError:
            raise RuntimeError(f"a worker ended with {process.exitcode}") from None
        if kind != expected:
            raise RuntimeError(f"a worker failed:\n{value}")
        return value

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, pipe in self._workers:
            pipe.close()
            if kind is not None:
                process.terminate()
        for process, _ in self._workers:
            process.join(PATIENCE)


def _flush(seat: Seat) -> None:
    seat.begin()
    seat.connection.execute("select pg_stat_force_next_flush()")


def _serve(index: int, url: str, counters: Any, parent: Connection) -> None:
    """Do jobs until the crew is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends the others
    seat = Seat(index, url, counters, parent)
    try:
        while True:
            job = parent.recv()
            try:
                answer = ("done", job(seat))
            except (EOFError, BrokenPipeError):
                raise
            except BaseException:
                answer = ("failed", traceback.format_exc())
            parent.send(answer)
    except (EOFError, OSError):
        pass  # the parent has closed its end, or is gone
