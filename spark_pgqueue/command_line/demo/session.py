"""A quiet Spark session, and queries that are restarted after a timeout of Spark."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import spark_pgqueue
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import redact
from spark_pgqueue.spark.platform import java

STARTS = 10  # the highest number of starts of a query
LOG_SHOWN = 10_000  # characters of the end of Spark's log

# Only errors, on standard error; without failed queries, which the caller reports.
LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
logger.query.name = org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution
logger.query.level = off
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


class Interrupts:
    """Records Ctrl-C, to raise it between two calls of Spark. For the main thread.

    Py4J logs a stack when it is interrupted in a call. A second Ctrl-C is raised immediately.
    """

    def __init__(self):
        self._is_noted = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Interrupts:
        self.catch()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def catch(self) -> None:
        """Record interrupts from now on, also if another handler was set."""
        signal.signal(signal.SIGINT, self._note)

    def check(self) -> None:
        """Raise KeyboardInterrupt, if there was an interrupt."""
        if self._is_noted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: object) -> None:
        self.check()
        self._is_noted = True


@contextmanager
def spark_session(folder: Path, interrupts: Interrupts | None = None) -> Iterator[SparkSession]:
    """A quiet Spark session on this machine; running queries end with it.

    Standard error of Spark and its Python workers goes to the file spark.log, and is shown after an
    error. (Cancelled tasks print a stack, too, which is no failure.)

    Args:
        folder: for its files.
        interrupts: the handler of Ctrl-C, which PySpark replaces.
    """
    java.ensure_java_home()
    os.environ["PYSPARK_PYTHON"] = sys.executable  # not the python3 of the PATH
    log = folder / "spark.log"
    try:
        with _errors_in(log):
            spark = _session(folder)
        try:
            if interrupts is not None:
                interrupts.catch()  # PySpark has a handler of its own
                interrupts.check()
            spark_pgqueue.register(spark)
            yield spark
        finally:
            with _errors_in(log):  # PySpark prints a stack for each cancelled task
                spark.sparkContext.setLogLevel("OFF")  # stopped queries would be logged as errors
                for query in spark.streams.active:
                    query.stop()
                spark.stop()
    except Exception:
        said = log.read_text(errors="replace")
        sys.stderr.write(redact(said, len(said))[-LOG_SHOWN:])
        raise


def _session(folder: Path) -> SparkSession:
    log4j = folder / "log4j2.properties"
    log4j.write_text(LOG4J)
    return (
        SparkSession.builder.master("local[*]")
        .appName("pgqueue demo")
        .config("spark.driver.extraJavaOptions", f'"-Dlog4j2.configurationFile={log4j.as_uri()}"')
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.python.authenticate.socketTimeout", "120s")  # for a busy machine
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.numRecentProgressUpdates", "10000")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )


@contextmanager
def _errors_in(log: Path) -> Iterator[None]:
    """Redirect standard error of this process, and of processes that it starts, to a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


class Query:
    """A query that is restarted after a timeout of Spark.

    Spark waits 10 s for the process of a Python source, which no setting changes, and on a busy
    machine that may not be enough. A query resumes from its checkpoint: restarting it is safe.

    Args:
        name: the query's name.
        start: starts the query.
        say: prints a sentence about a restart.
    """

    def __init__(self, name: str, start: Callable[[], StreamingQuery], say: Callable[[str], None]):
        self._name = name
        self._say = say
        self._start = start
        self._starts = 0
        self._earlier = 0
        self._begin()
        # Wait for its source, so that the next query's start does not compete with this one's.
        while self.is_active() and self._query.status["message"].startswith("Initializing"):
            time.sleep(0.05)

    def is_active(self) -> bool:
        """Whether the query runs. It is restarted after a timeout of Spark.

        Raises:
            PgQueueError: it failed with another error, or too often.
        """
        active, error = self._query.isActive, self._query.exception()  # in this order
        if error is None:
            return active
        if "failed to connect back" not in str(error) or self._starts >= STARTS:
            # The message of a PgQueueError, without the traceback before it and the plan after it.
            why = str(error).split("PgQueueError: ")[-1].split("SQLSTATE: ")[0]
            raise PgQueueError(f"the query {self._name} failed: {why.split(' === ')[0].strip()}")
        self._say(f"Busy machine: starting {self._name} again ...")
        self._earlier = self.rows()
        self._begin()
        return True

    def finish(self) -> None:
        """Stop the query after its last micro-batch, which may be one without data (a watermark).

        Raises:
            PgQueueError: as `is_active`.
        """
        with suppress(StreamingQueryException):  # is_active raises it
            self._query.processAllAvailable()
        self.is_active()
        self._query.stop()

    def rows(self) -> int:
        """The number of rows that the query has read."""
        return self._earlier + sum(each.numInputRows for each in self._query.recentProgress)

    def _begin(self) -> None:
        self._starts += 1
        self._query = self._start()
