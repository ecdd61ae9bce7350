"""The story, act by act; each is a sentence on the screen, and figures to be compared."""

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
LEASE = "5 s"  # the desk's visibility timeout: so long after a kill its messages come again
# Nobody needs a demo after a power failure, and thousands of small transactions are faster so.
SETTINGS = {"synchronous_commit": "off"}


def run(
    directory: Path | None = None,
    url: str | None = None,
    rows: int | None = None,
    picture_file: Path | None = None,
) -> bool:
    """Run the demo, with progress on the terminal.

    Args:
        directory: where the embedded Postgres lives; its database pgqueue_demo, made anew by each
            run, can be looked at afterwards. None for a temporary one.
        url: a database to use in its place. The streams flights and notices and the schema
            pgqueue_demo are made there, and dropped in the end.
        rows: only the first so many flights; None for all.
        picture_file: a PNG, SVG or PDF to draw the delays of each day in.

    Returns:
        whether what was seen is what the file says.

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
        raise PgQueueError(f"rows is {rows}, and must be at least 1")
    if file is not None:
        picture.check(file)


@dataclass
class Story:
    """Who takes part, and what they saw so far.

    Attributes:
        url: the database.
        queue: a client of it.
        office: the tables of the desk.
        table: the flights.
        folder: for checkpoints, files and logs.
        screen: where it is told.
        rarest: the airline that the desk does not know at first; None: no flight is badly delayed.
        days: what `daily` found.
        seen: what everybody saw, by what it is.
        took: seconds, by what took them.
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
        self._is_killed = self._known == 0  # there is nothing to be in the middle of

    # The acts

    def stream(self, spark: SparkSession, interrupts: Interrupts) -> None:
        """Publish, add up, route, rebook, refund; and kill the desk in the middle."""
        self.screen.act(
            f"A Spark query publishes {self.table.num_rows:,} flights. Each of their consumers gets"
            " every flight once: daily adds up, router sends what went wrong to the stream notices,"
            " by topic. There the desk takes delayed.*, in the order of each aircraft, and refunds"
            " takes cancelled.*.",
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
            began = time.monotonic()  # in the end, when the publisher was started
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
        """Show what the desk gave up, mend that, and have it delivered again; end the desk."""
        self.seen["desk: dead, redriven"] = self._redrive(self.rarest) if self.rarest else 0
        if self.desk is not None:
            self.desk.stop()
        self.seen |= self.office.figures(self.rarest)

    def history(self) -> None:
        """Add a consumer over all that there is; and look that retention leaves it that."""
        rows = self.table.num_rows
        began = time.monotonic()
        self.queue.create_consumer("flights", "airports", start="earliest")
        made = time.monotonic() - began
        self.screen.act(
            "A consumer that is created now may begin at the first flight: nothing is copied for"
            f" that. airports took {1000 * made:.0f} ms to make, and has {rows:,} flights before"
            " it. The stream's retention keeps what a consumer still owes.",
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
        """Trim what everybody is done with."""
        (before,) = self.queue.retention("flights")
        self.queue.maintain()
        (after,) = self.queue.retention("flights")
        self.screen.act(
            "Everybody is done with every flight. maintain() deletes what need not be kept, whole"
            " tables at a time: the disk space is free at once.",
            "sql/guide/retention.md",
        )
        self.screen.say(f"{_megabytes(before.bytes)} before, {_megabytes(after.bytes)} after")
        self.seen["retention: messages gone"] = after.trimmed

    # Their parts

    def _watch(self, running: dict[str, Query], interrupts: Interrupts) -> float:
        """Show progress, and refund, until every message is settled.

        Returns:
            when the publisher had ended, by `time.monotonic`.

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
                # Acknowledged by Spark means: the micro-batch is done, and in the checkpoint.
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
        """Start the desk: a process that stands still when it has done a third of its work."""
        self.desk = self._worker("desk 1", {desk.STALL: str(self._known // 3)})

    def kill_desk(self) -> bool:
        """Kill the desk, once it stands still in the middle, and start another.

        Returns:
            whether that is done.

        Raises:
            PgQueueError: it ended by itself.
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
            f"kill -9: desk 1 has rebooked {done:,} flights, stands in the middle of a transaction,"
            f" and has {held:,} messages in its hands. What it had done stays done, what it had"
            f" begun is undone. desk 2 goes on, and gets those {held:,} once the visibility timeout"
            f" ({LEASE}) is over.",
            "sql/guide/workers.md",
        )
        return True

    def _redrive(self, airline: str) -> int:
        """The messages of an airline that the desk did not know: dead, redriven, and handled."""
        self.screen.act(
            f"The desk does not know the airline {airline}. What fails {ATTEMPTS} times is a dead"
            " letter, with the reason: nothing else waits for it, and nothing is lost.",
            "sql/guide/dead-letters.md",
        )
        for each in itertools.islice(self.queue.read_dead("notices", "desk"), 3):
            self.screen.say(f"{each.key}: {each.deliver_count} times {each.error!r}")
        name = flights.read_airlines()[airline]
        self.office.tell(airline, name)
        count = self.queue.redrive("notices", "desk", max_messages=None)
        self.wait_for_desk()
        self.screen.say(f"Now it knows {airline} as {name}: {count} redriven, and rebooked.")
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
        drop: what drops each of them again that was created here; None: they stay.
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
            "backoff_base": "0 s",  # nobody waits for a demo
        },
    )
    story.queue.create_consumer("notices", "refunds", topic="cancelled.*")


def new_database(server: embedded.Server) -> str:
    """The url of an empty database of the server, in place of an earlier run's."""
    with connection.connect(server.url) as conn:
        conn.execute("drop database if exists pgqueue_demo with (force)")
        conn.execute("create database pgqueue_demo")
    return server.url_of("pgqueue_demo")


def end(story: Story, directory: Path | None, picture_file: Path | None) -> None:
    """Say how fast it was, and where to look on."""
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
