"""The processes of a run: started, watched, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.benchmarks.hour.plan import CONSUMERS, PRODUCERS, READY, WORKERS, Plan

ROOT = Path(__file__).parents[3]
PATIENCE, SPARK_STARTS = 60.0, 300.0
"""Seconds that a process may take to end, and Spark to start."""


class Crew:
    """All processes, by role. What they print goes to a file of each role.

    Args:
        plan: the plan.
        path: its file.
    """

    def __init__(self, plan: Plan, path: Path):
        self._plan, self._path = plan, path
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self) -> None:
        """Start what receives, what maintains, and what sends."""
        for consumer in CONSUMERS:
            for index in range(WORKERS.get(consumer, 1)):
                self._start(consumer, "tests.benchmarks.hour.actors", consumer, str(index))
        if self._plan.side == "pgqueue":
            every = f"{self._plan.maintained:g}s"
            self._start("maintain", "spark_pgqueue", "maintain", "--every", every, plan=False)
        if self._plan.side == "rows":
            self._start("maintain", "tests.benchmarks.hour.actors", "trim", "0")
        for index in range(PRODUCERS):
            self._start("producer", "tests.benchmarks.hour.actors", "producer", str(index))

    def start_spark(self) -> None:
        """Start the query, and wait until it runs."""
        self._start("spark", "tests.benchmarks.hour.query")
        end = time.monotonic() + SPARK_STARTS
        while not (Path(self._plan.folder) / READY).exists():
            self.sending()
            if time.monotonic() > end:
                raise RuntimeError(f"Spark did not start:\n{self.log('spark')}")
            time.sleep(0.5)

    def pids(self) -> dict[str, list[int]]:
        """Of all processes, by role."""
        found: dict[str, list[int]] = {}
        for role, process in self._processes:
            found.setdefault(role, []).append(process.pid)
        return found

    def sending(self) -> bool:
        """Whether producers run; raises RuntimeError if something has failed."""
        running = False
        for role, process in self._processes:
            code = process.poll()
            if code is not None and (code or role != "producer"):
                raise RuntimeError(f"{role} ended with {code}:\n{self.log(role)}")
            running |= role == "producer" and code is None
        return running

    def log(self, role: str) -> str:
        """The end of what a role printed."""
        return (self._path.parent / f"{role}.log").read_text(errors="replace")[-4000:]

    def stop(self, roles: Sequence[str] | None = None) -> None:
        """Stop processes by SIGTERM; those that do not end are killed."""
        ending = [each for each in self._processes if roles is None or each[0] in roles]
        for _, process in ending:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        end = time.monotonic() + PATIENCE
        for role, process in ending:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{role} did not end")
            self._kill(process)
        self._processes = [each for each in self._processes if each not in ending]

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process, if it has not ended, and what it started."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.wait()

    def _start(self, role: str, *arguments: str, plan: bool = True) -> None:
        command = [sys.executable, "-m", *arguments, *([str(self._path)] if plan else [])]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PGQUEUE_URL": self._plan.url}
        with (self._path.parent / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._processes.append((role, process))

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
