"""The demo, act by act: each prints a sentence, and adds figures to compare."""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import spark_pgqueue
from spark_pgqueue.client import Client
from spark_pgqueue.command_line.demo import desk, flights, picture, queries
from spark_pgqueue.command_line.demo.flights import Days, Figures
from spark_pgqueue.command_line.demo.process import Worker
from spark_pgqueue.command_line.demo.screen import Bars, Screen
from spark_pgqueue.command_line.demo.session import Interrupts, Query, spark_session
from spark_pgqueue.command_line.demo.tally import Tally
from spark_pgqueue.postgres import connection, embedded
from spark_pgqueue.postgres.errors import PgQueueError

STREAMS = ("flights", "notices")
ATTEMPTS = 3  # of the desk, for a message
LEASE = "5 s"  # the desk's visibility timeout, after which the messages of a killed one come again
# Durability does not matter here, and small transactions are faster without it.
SETTINGS = {"synchronous_commit": "off"}


def run(
    directory: Path | None = None,
    url: str | None = None,
    rows: int | None = None,
    picture_file: Path | None = None,
) -> bool:
    """Run the demo, with progress on the terminal.

    Args:
        directory: the folder of the embedded Postgres. Its database pgqueue_demo, which each run
            creates again, remains afterwards. None for a temporary folder.
        url: a database to use instead. The streams flights and notices and the schema pgqueue_demo
            are created there, and dropped at the end.
        rows: the number of flights; None for all.
        picture_file: a PNG, SVG or PDF to draw the delays of each day in.

    Returns:
        whether the figures of the consumers are those of the file.

    Raises:
        PgQueueError: an argument is wrong, one of the streams exists already, the flights, a Java
            or Postgres are missing, or a query failed.
    """
    _check(directory, url, rows, picture_file)
    screen = Screen()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-demo-")))
        screen.whisper("Reading the flights, starting Postgres and Spark ...")
        table = flights.read_file(rows)
        flights.write_files(table, folder / "files")
        given = url is not None
        if url is None:
            server = embedded.start(directory or folder / "postgres", settings=SETTINGS)
            url = new_database(stack.enter_context(server))
        queue = stack.enter_context(spark_pgqueue.connect(url))
        queue.install()
        office = desk.Desk(stack.enter_context(connection.connect(url)))
        story = Story(url, queue, office, table, folder, screen)
        create(story, stack if given else None)
        with story.workers:
            with Interrupts() as interrupts, spark_session(folder, interrupts) as spark:
                story.stream(spark, interrupts)
            story.dead_letters()
            story.history()
            story.retention()
        same = screen.compare(story.seen, flights.told_by(table))
        picture.draw(story.days, screen.console)
        end(story, directory, picture_file)
        return same


def _check(directory: Path | None, url: str | None, rows: int | None, file: Path | None) -> None:
    if directory is not None and url is not None:
        raise PgQueueError("directory and url exclude each other", hint="give one of them")
    if rows is not None and rows < 1:
        raise PgQueueError(f"rows must be at least 1, not {rows}")
    if file is not None:
        picture.check(file)


@dataclass
class Story:
    """The parts of the demo, and the figures so far.

    Attributes:
        url: the database.
        queue: a client of it.
        office: the tables of the desk.
        table: the flights.
        folder: for checkpoints, files and logs.
        screen: the output.
        rarest: the airline that the desk lacks at first; None if no flight is badly delayed.
        days: the result of `daily`.
        seen: the figures of the consumers.
        took: seconds, by the name of the step.
        workers: ends the processes of workers.
    """

    url: str
    queue: Client
    office: desk.Desk
    table: pa.Table
    folder: Path
    screen: Screen
    days: Days = field(default_factory=dict)
    seen: Figures = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    workers: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self):
        self.rarest = flights.rarest_of(self.table)
        self.desk: Worker | None = None
        self._delayed = flights.delayed_of(self.table)
        self._refunds = Tally("notices", "refunds")
        known = flights.counts_of(self._delayed, "carrier")
        self._known = self._delayed.num_rows - (known[self.rarest] if self.rarest else 0)
        self._is_killed = self._known == 0  # without messages there is nothing to interrupt

    # The acts

    def stream(self, spark: SparkSession, interrupts: Interrupts) -> None:
        """Publish, aggregate, route, rebook, refund; and kill the desk while it works."""
        self.screen.act(
            f"A Spark query publishes {self.table.num_rows:,} flights. Each consumer receives "
            "every flight once: daily aggregates, router sends delayed and cancelled flights to "
            "the stream notices, by topic. There, the desk receives delayed.*, in the order of "
            "each aircraft, and refunds receives cancelled.*.",
            "sql/guide/filters.md",
        )
        self.start_desk()
        starts = {
            "daily": lambda: queries.daily(spark, self.url, self.folder / "daily", self.days),
            "router": lambda: queries.router(spark, self.url, self.folder / "router"),
            "publisher": lambda: queries.publisher(
                spark, self.url, self.folder / "files", self.folder / "publisher"
            ),
        }
        running: dict[str, Query] = {}
        began = 0.0
        for name, start in starts.items():
            interrupts.check()
            began = time.monotonic()  # the last value is the start of the publisher
            running[name] = Query(name, start, self.screen.whisper)
        published = self._watch(running, interrupts)
        ended = time.monotonic()
        for query in running.values():
            query.finish()
        self.took |= {"published": published - began, "all read, routed, settled": ended - began}
        self.seen["publisher: flights"] = running["publisher"].rows()
        self.seen |= {f"{name}: messages": running[name].rows() for name in ("daily", "router")}
        self.seen |= flights.daily_figures(self.days)
        self.seen |= self._refunds.figures("cancelled")

    def dead_letters(self) -> None:
        """Show the desk's dead letters, add the missing airline, redrive them; stop the desk."""
        self.seen["desk: dead, redriven"] = self._redrive(self.rarest) if self.rarest else 0
        if self.desk is not None:
            self.desk.stop()
        self.seen |= self.office.figures(self.rarest)

    def history(self) -> None:
        """Add a consumer that begins at the first message; retention keeps its messages."""
        rows = self.table.num_rows
        began = time.monotonic()
        self.queue.create_consumer("flights", "airports", start="earliest")
        made = time.monotonic() - began
        self.screen.act(
            "A new consumer can start at the first flight, and nothing is copied. Creating "
            f"airports took {1000 * made:.0f} ms, and its backlog is {rows:,} flights. The "
            "stream's retention keeps messages that a consumer has not finished.",
            "sql/guide/positions.md",
        )
        self.queue.set_retention("flights", done=True, messages=rows)
        self.queue.maintain()
        (kept,) = self.queue.retention("flights")
        self.screen.say(
            f"{_megabytes(kept.bytes)} kept, because of {', '.join(kept.held_by) or 'nobody'}"
        )
        airports = Tally("flights", "airports")
        with self.screen.bars({"airports": rows}) as bars:
            airports.work(self.queue, lambda done: bars.show({"airports": done}))
        self.took["history read"] = time.monotonic() - began
        self.seen |= airports.figures("flights")

    def retention(self) -> None:
        """Trim the messages that all consumers have finished."""
        (before,) = self.queue.retention("flights")
        self.queue.maintain()
        (after,) = self.queue.retention("flights")
        self.screen.act(
            "All consumers have finished every flight. maintain() deletes the messages, whole "
            "tables at a time: the disk space is free at once.",
            "sql/guide/retention.md",
        )
        self.screen.say(f"{_megabytes(before.bytes)} before, {_megabytes(after.bytes)} after")
        self.seen["retention: messages gone"] = after.trimmed

    # Steps of the acts

    def _watch(self, running: dict[str, Query], interrupts: Interrupts) -> float:
        """Show progress, and refund, until every message is settled.

        Returns:
            the time of the publisher's end, by `time.monotonic`.

        Raises:
            PgQueueError: a query or the desk failed.
            KeyboardInterrupt: Ctrl-C.
        """
        rows: int = self.table.num_rows
        cancelled: int = flights.cancelled_of(self.table).num_rows
        totals: dict[str, int] = dict.fromkeys(running, rows)
        ended = None
        totals |= {"desk": self._delayed.num_rows, "refunds": cancelled}
        with self.screen.bars(totals) as bars:
            while True:
                interrupts.check()
                active = {name: query.is_active() for name, query in running.items()}
                if ended is None and not active["publisher"]:
                    ended = time.monotonic()
                self._refunds.work(self.queue)
                # Spark acknowledges a micro-batch when it is finished and in the checkpoint.
                left = sum(s.backlog + s.claimed for s in self.queue.stats())
                is_killed = self.kill_desk()
                self._show(bars, running)
                if ended is not None and left == 0 and is_killed:
                    return ended
                time.sleep(0.2)

    def _show(self, bars: Bars, running: dict[str, Query]) -> None:
        bars.show({name: query.rows() for name, query in running.items()})
        bars.show({"desk": self.office.count(), "refunds": self._refunds.counts.total()})

    def start_desk(self) -> None:
        """Start the desk: a process that hangs after a third of its work."""
        self.desk = self._worker("desk 1", {desk.STALL: str(self._known // 3)})

    def kill_desk(self) -> bool:
        """Kill the desk once it hangs, and start another one.

        Returns:
            whether that is done.

        Raises:
            PgQueueError: the desk ended by itself.
        """
        assert self.desk is not None
        self.desk.check()
        if self._is_killed:
            return True
        done = self.office.count()
        held = sum(claim.remaining for claim in self.queue.open_claims("notices", "desk"))
        if done < self._known // 3 or held == 0:
            return False
        self.desk.kill()
        self.desk = self._worker("desk 2", {})
        self._is_killed = True
        self.screen.act(
            f"kill -9: desk 1 has rebooked {done:,} flights, is in the middle of a transaction, "
            f"and holds {held:,} claimed messages. Committed work stays; the open transaction is "
            f"rolled back. desk 2 continues, and receives those {held:,} when the visibility "
            f"timeout ({LEASE}) expires.",
            "sql/guide/workers.md",
        )
        return True

    def _redrive(self, airline: str) -> int:
        """Redrive the dead letters of the missing airline; returns their number."""
        self.screen.act(
            f"The desk does not know the airline {airline}. A message that fails {ATTEMPTS} times "
            "is dead-lettered with the reason: it blocks no other message, and is not lost.",
            "sql/guide/failures.md",
        )
        for each in itertools.islice(self.queue.read_dead("notices", "desk"), 3):
            self.screen.say(f"{each.key}: {each.deliver_count} times {each.error!r}")
        name = flights.read_airlines()[airline]
        self.office.tell(airline, name)
        count = self.queue.redrive("notices", "desk", max_messages=None)
        self.wait_for_desk()
        self.screen.say(f"The desk now knows {airline} as {name}: {count} redriven and rebooked.")
        return count

    def _worker(self, name: str, environment: dict[str, str]) -> Worker:
        """A process of the desk."""
        handler = f"{desk.rebook.__module__}:{desk.rebook.__name__}"
        options = ["--transactional", "--concurrency", "4", "--wait", "10m"]
        arguments = [handler, "notices", "desk", *options]
        worker = Worker(name, self.url, arguments, self.folder / f"{name}.log", environment)
        self.workers.callback(worker.kill)
        return worker

    def wait_for_desk(self) -> None:
        """Wait until all notices are settled, or dead.

        Raises:
            PgQueueError: the desk ended by itself.
        """
        while any(
            each.backlog + each.claimed
            for each in self.queue.stats("notices")
            if each.consumer == "desk"
        ):
            if self.desk is not None:
                self.desk.check()
            time.sleep(0.05)


def create(story: Story, drop: ExitStack | None) -> None:
    """Create the streams, their consumers, and the tables of the desk.

    Args:
        story: what they are for.
        drop: gets callbacks that drop them; None if they stay.
    """
    for name in STREAMS:
        story.queue.create_stream(name, "json")
        if drop is not None:
            drop.callback(story.queue.drop_stream, name)
    names = flights.read_airlines()
    story.office.create({code: name for code, name in names.items() if code != story.rarest})
    if drop is not None:
        drop.callback(story.office.drop)
    story.queue.create_consumer("flights", "daily")
    story.queue.create_consumer("flights", "router", ordering="key")
    story.queue.create_consumer(
        "notices",
        "desk",
        ordering="key",
        topic="delayed.*",
        settings={
            "max_deliver_count": ATTEMPTS,
            "visibility_timeout": LEASE,
            "backoff_base": "0 s",  # for a short demo
        },
    )
    story.queue.create_consumer("notices", "refunds", topic="cancelled.*")


def new_database(server: embedded.Server) -> str:
    """The url of an empty database of the server, which replaces that of an earlier run."""
    with connection.connect(server.url) as conn:
        conn.execute("drop database if exists pgqueue_demo with (force)")
        conn.execute("create database pgqueue_demo")
    return server.url_of("pgqueue_demo")


def end(story: Story, directory: Path | None, picture_file: Path | None) -> None:
    """Print the throughput, and where the data is."""
    console = story.screen.console
    console.print()
    for what, seconds in story.took.items():
        rate = story.table.num_rows / seconds
        console.print(f"{what} in {seconds:.1f} s: {rate:,.0f} flights/s")
    if picture_file is not None:
        picture.write(story.days, picture_file, story.folder)
        story.screen.whisper(f"every day of it: {picture_file}")
    if directory is not None:
        again = f'embedded.start("{directory}").url_of("pgqueue_demo")'
        story.screen.whisper(f"to look at it: {again}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
