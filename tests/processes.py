"""Run a script, a worker or `pgqueue` in a process of its own; wait for what others do."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent

WORKER = """
import datetime, sys
from spark_pgqueue import Consumer
from tests import handlers
_, url, handler, options = sys.argv
Consumer(url, "s", "c").run(
    getattr(handlers, handler), visibility_timeout=datetime.timedelta(seconds=2), **eval(options)
)
"""


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Until the condition holds; fails after some time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


@contextmanager
def connect_port() -> Iterator[None]:
    """The port of Spark Connect, fixed where Spark starts the server: one test at a time has it.

    The server of a test before may still be about to end.
    """
    with (Path(tempfile.gettempdir()) / f"pgqueue-connect-{os.getuid()}").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", 15002)) != 0)
        yield


class Child:
    """A Python script running in its own process group.

        with Child("print('ready', flush=True); ...", url) as child:
            child.wait_for("ready")
            child.kill()

    The script sees `arguments` as `sys.argv[1:]`; what it prints is in `output`.
    """

    def __init__(
        self,
        script: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
    ):
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        inherited = {**os.environ, **(environment or {})}
        path = [str(ROOT), inherited.get("PYTHONPATH", "")]
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self.process = subprocess.Popen(
            [python, "-u", "-c", textwrap.dedent(script), *arguments],
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """All that it has printed, errors included."""
        # By position: the child writes through the same open file.
        descriptor = self._output.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Wait until the script has printed `text`; fail when it ends or `timeout` (s) is over."""
        end = time.monotonic() + timeout
        while text not in self.output:
            ended = self.process.poll() is not None
            if (ended and text not in self.output) or time.monotonic() > end:
                state = f"ended with {self.process.returncode}" if ended else "did not print"
                raise AssertionError(f"the child {state} before {text!r}:\n{self.output[-5000:]}")
            time.sleep(0.02)

    def wait_until(self, condition: Callable[[], Any], timeout: float = 180.0) -> None:
        """Wait for a condition; fail when the script ends before, or `timeout` (s) is over."""
        end = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.output[-5000:]
            assert time.monotonic() < end, self.output[-5000:]
            time.sleep(0.1)  # most conditions connect to a database

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for its end; returns the exit code."""
        return self.process.wait(timeout)

    def descendants(self, name: str = "") -> list[psutil.Process]:
        """Its living descendants whose command line contains `name` ("java", "pyspark.daemon")."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill(self) -> None:
        """kill -9 of the script and of all of its descendants, at once."""
        others: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            # Spark's Python workers are in a group of their own, and so not in ours.
            others = self.descendants()
        # Stopped first: nobody reacts to the death of another.
        for action in (psutil.Process.suspend, psutil.Process.kill):
            for process in others:
                with suppress(psutil.NoSuchProcess):
                    action(process)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def kill_alone(self) -> None:
        """kill -9 of the script; its descendants (the JVM) are left to notice."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


# Python starts once for all command lines: it takes longer than they do.
EACH = """
import sys
from spark_pgqueue.__main__ import main
for words in sys.argv[1:]:
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, file=sys.stderr)
"""


def worker(url: str, handler: str, **options: Any) -> Child:
    """A process that works for the consumer c of the stream s, with a function of `handlers`."""
    return Child(WORKER, url, handler, repr(options))


@contextmanager
def started(
    *words: str, url: str, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """`pgqueue` as a process that hears Ctrl-C, what it prints in pipes; killed in the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "spark_pgqueue", *words],
        env={**os.environ, "PGQUEUE_URL": url, "PYTHONUNBUFFERED": "1", **(environment or {})},
        # Where the tests run in a shell's background, Ctrl-C is ignored, and by children too.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        **{"stdout": pipe, "stderr": pipe, "text": True, **options},
    ) as process:
        try:
            yield process
        finally:
            process.kill()
