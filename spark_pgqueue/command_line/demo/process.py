"""A worker in a separate process, which can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import redact

SECONDS = 60  # for the end of a process after SIGTERM


class Worker:
    """`pgqueue work`, as a shell would start it.

    Args:
        name: the worker's name in claims and dead letters.
        url: the database.
        arguments: of the command: the handler, the stream, the consumer, options.
        log: the file for its output.
        environment: additional environment variables.
    """

    def __init__(
        self, name: str, url: str, arguments: list[str], log: Path, environment: dict[str, str]
    ):
        self.name = name
        self._log = log
        # Not --url: other users see a command line, which would contain the password.
        given = {"PGQUEUE_URL": url, "PGAPPNAME": name, **environment}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spark_pgqueue", "work", *arguments],
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C does not reach it
            )

    def check(self) -> None:
        """Check that the worker runs.

        Raises:
            PgQueueError: it has ended.
        """
        if (code := self._process.poll()) is not None:
            log = self._log.read_text(errors="replace")
            said = redact(log, len(log)).strip().splitlines()
            raise PgQueueError(f"{self.name} ended with {code}: {' / '.join(said[-3:])}")

    def kill(self) -> None:
        """Kill it as kill -9 does, if it runs."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop it after its running calls.

        Raises:
            PgQueueError: it had ended before, failed, or does not end.
        """
        self.check()
        self._process.terminate()
        try:
            code = self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise PgQueueError(f"{self.name} does not end within {SECONDS} s") from None
        if code != 0:
            self.check()
