"""An adapter for the public harness hardbyte/postgresql-job-queue-benchmarking.

    python -m tests.benchmarks.public_harness --manifest    print the harness's adapter.json
    python -m tests.benchmarks.public_harness               what the harness starts

The harness starts this process with settings in its environment, and reads records from its
standard output: one that describes the adapter, then figures, a line of JSON each. The log goes to
standard error. On SIGTERM the process tells its last figures and ends.

The worker acknowledges a message within 5 ms after its job; a job counts as completed when it is
over.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

import spark_pgqueue
from spark_pgqueue import Consumer, PgQueueError
from spark_pgqueue.client import AsyncClient, Message
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.retrying import is_worth_a_retry
from spark_pgqueue.version import VERSION

SYSTEM = "spark-pgqueue"
STREAM = "long_horizon_bench"
CONSUMER = "bench_consumer"
# What was not acknowledged comes again at once, and for ever.
SETTINGS = {"max_deliver_count": "never", "backoff": "constant", "backoff_jitter": 0}

MANIFEST: dict[str, Any] = {
    "system": SYSTEM,
    "display_name": "spark-pgqueue (Python)",
    "db_name": "spark_pgqueue_bench",
    "event_tables": ["pgqueue.publications", "pgqueue.consumer_messages"],
    "event_indexes": [],
    "extensions": [],
}
"""What the harness knows before it starts the adapter."""

TABLES = """
select oid::regclass::text from pg_class
where relkind = 'r' and relnamespace = 'pgqueue'::regnamespace order by 1
"""
WINDOW = 30
"""Seconds that percentiles are of."""

MAINTAIN_EVERY = 60
"""Seconds between two calls of maintain(), which the first process of several makes."""

GRACE = timedelta(seconds=2)
"""For running jobs, after SIGTERM: the harness waits 5 seconds."""


PATIENCE = 2
"""Seconds that a call waits for Postgres, which the harness restarts. The next call waits again."""


@dataclass(frozen=True)
class Settings:
    """What the harness sets in the environment.

    Attributes:
        url: the database.
        instance: which of several processes this is; only the first tells what is common to all.
        mode: "fixed", by `rate`; or "depth-target", as many as keep `depth` messages waiting.
        by_harness: whether the harness paces a fixed rate, by lines on standard input.
        rate: messages a second.
        rate_file: a file with the current rate; it stands in place of `rate`.
        depth: messages.
        most: messages of a batch.
        pause: seconds between two batches.
        workers: how many jobs run at a time.
        size: characters of a payload.
        work: seconds of a job.
        every: seconds between two reports.
    """

    url: str
    instance: int
    mode: str
    by_harness: bool
    rate: float
    rate_file: str | None
    depth: int
    most: int
    pause: float
    workers: int
    size: int
    work: float
    every: float

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Settings:
        """The settings of an environment.

        Raises:
            SystemExit: a scenario that the adapter does not know.
        """
        if (scenario := given.get("SCENARIO", "long_horizon")) != "long_horizon":
            sys.exit(f"the scenario is long_horizon, not {scenario}")
        return cls(
            url=given["DATABASE_URL"],
            instance=int(given.get("BENCH_INSTANCE_ID", "0")),
            mode=given.get("PRODUCER_MODE", "fixed"),
            by_harness=given.get("PRODUCER_PACING") == "harness",
            rate=float(given.get("PRODUCER_RATE", "800")),
            rate_file=given.get("PRODUCER_RATE_CONTROL_FILE"),
            depth=int(given.get("TARGET_DEPTH", "1000")),
            most=int(given.get("PRODUCER_BATCH_MAX", "128")),
            pause=float(given.get("PRODUCER_BATCH_MS", "10")) / 1000,
            workers=int(given.get("WORKER_COUNT", "32")),
            size=int(given.get("JOB_PAYLOAD_BYTES", "256")),
            work=float(given.get("JOB_WORK_MS", "1")) / 1000,
            every=float(given.get("SAMPLE_EVERY_S", "5")),
        )

    def current_rate(self) -> float:
        """The rate at the moment."""
        try:
            return float(Path(self.rate_file).read_text()) if self.rate_file else self.rate
        except (OSError, ValueError):  # it is being written
            return self.rate


class Latencies:
    """Times of the last seconds, with three digits each: so they take little memory."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, Counter[float]]] = deque()

    def add(self, seconds: float, count: int = 1) -> None:
        """Note a time, of `count` messages."""
        self._forget()
        now = int(time.monotonic())
        if not self._slices or self._slices[-1][0] != now:
            self._slices.append((now, Counter()))
        self._slices[-1][1][float(f"{seconds * 1000:.3g}")] += count

    def percentiles(self) -> dict[str, float]:
        """The milliseconds that 50, 95 and 99% do not exceed; 0 where there are none."""
        self._forget()
        total = sum((counts for _, counts in self._slices), Counter())
        left = {share: share / 100 * total.total() for share in (50, 95, 99)}
        found = dict.fromkeys(left, 0.0)
        seen = 0
        for value, count in sorted(total.items()):
            for share, wanted in left.items():
                if seen < wanted:
                    found[share] = value
            seen += count
        return {f"p{share}_ms": value for share, value in found.items()}

    def _forget(self) -> None:
        while self._slices and self._slices[0][0] < time.monotonic() - WINDOW:
            self._slices.popleft()


class Adapter:
    """Produces messages, works them off, and reports figures.

    Args:
        settings: what the harness wants.
        queue: the client that produces and looks.
    """

    def __init__(self, settings: Settings, queue: AsyncClient):
        self._settings = settings
        self._queue = queue
        self._sent = self._done = 0
        self._sending, self._claiming, self._whole = Latencies(), Latencies(), Latencies()
        self._reported = (time.monotonic(), 0, 0)
        self._rest = "x" * settings.size

    async def run(self) -> None:
        """Work until SIGTERM or SIGINT, which the worker hears."""
        settings = self._settings
        worker = Consumer(settings.url, STREAM, CONSUMER)
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(each) for each in (self._produce(), self._report())]
            await worker.run_async(self._handle, concurrency=settings.workers, grace=GRACE)
            for other in others:
                other.cancel()
        await self._tell()

    async def _handle(self, message: Message) -> None:
        sent_at = float(str(message.data).split(" ", 1)[0])
        self._claiming.add(time.time() - sent_at)
        await asyncio.sleep(self._settings.work)
        self._whole.add(time.time() - sent_at)
        self._done += 1

    async def _produce(self) -> None:
        settings = self._settings
        if settings.mode == "depth-target":
            while True:
                if not await self._send(settings.depth - await self._depth()):
                    await asyncio.sleep(settings.pause)
        elif settings.by_harness:
            lines = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(lines)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
            while line := await lines.readline():
                word, _, count = line.decode().partition(" ")
                if word == "ENQUEUE":
                    await self._send(int(count))
        else:
            owed, before = 0.0, time.monotonic()
            while True:
                await asyncio.sleep(settings.pause)
                now = time.monotonic()
                owed, before = owed + (now - before) * settings.current_rate(), now
                owed -= await self._send(int(owed))

    async def _send(self, count: int) -> int:
        """Send a batch; returns how many messages it has."""
        count = min(count, self._settings.most)
        if count <= 0:
            return 0
        data = f"{time.time():.6f} {self._rest}"[: max(self._settings.size, 18)]
        began = time.monotonic()
        try:
            await self._queue.send_batch(STREAM, [data] * count)
        except (PgQueueError, psycopg.Error) as error:  # the harness breaks connections
            await self._survive(error)
            return 0
        self._sending.add((time.monotonic() - began) / count, count)
        self._sent += count
        return count

    async def _depth(self) -> int:
        """How many messages no worker has claimed."""
        try:
            (stats,) = await self._queue.stats(STREAM)
            return stats.backlog
        except (PgQueueError, psycopg.Error) as error:
            await self._survive(error)
            return self._settings.depth

    async def _survive(self, error: Exception) -> None:
        if not is_worth_a_retry(error):
            raise error
        print(error, file=sys.stderr)
        await asyncio.sleep(0.1)

    async def _report(self) -> None:
        every = self._settings.every
        maintained = time.monotonic()
        while True:
            await asyncio.sleep(every - time.time() % every)  # as all adapters, at the same time
            await self._tell()
            if self._settings.instance == 0 and time.monotonic() > maintained + MAINTAIN_EVERY:
                maintained = time.monotonic()
                try:
                    await self._queue.maintain()
                except (PgQueueError, psycopg.Error) as error:
                    await self._survive(error)

    async def _tell(self) -> None:
        """Report what happened since the report before."""
        settings, now = self._settings, time.monotonic()
        before, sent, done = self._reported
        self._reported = now, self._sent, self._done
        seconds = max(now - before, 1e-3)
        figures: dict[str, tuple[float, float]] = {
            "enqueue_rate": ((self._sent - sent) / seconds, settings.every),
            "completion_rate": ((self._done - done) / seconds, settings.every),
        }
        latencies = {
            "producer": self._sending,
            "claim": self._claiming,
            "subscriber": self._claiming,  # the same by the name that others have for it, too
            "end_to_end": self._whole,
        }
        for name, of in latencies.items():
            for percentile, value in of.percentiles().items():
                figures[f"{name}_{percentile}"] = value, WINDOW
        if settings.instance == 0:
            figures["queue_depth"] = await self._depth(), 0
            rate = settings.current_rate() if settings.mode == "fixed" else 0
            figures["producer_target_rate"] = rate, 0
        for metric, (value, window) in figures.items():
            self._emit_figure(metric, value, window)

    def _emit_figure(self, metric: str, value: float, window: float) -> None:
        subject = {"subject_kind": "adapter", "subject": "", "metric": metric}
        said = {"t": _now(), "kind": "adapter", **subject, "value": value, "window_s": window}
        emit(said, self._settings.instance)


def emit(record: dict[str, Any], instance: int) -> None:
    """Write a record."""
    print(json.dumps({**record, "system": SYSTEM, "instance_id": instance}), flush=True)


def prepare(settings: Settings) -> None:
    """Install the schema and make the queue, where they are not there; describe the adapter."""
    with connection.connect(settings.url) as conn:
        version = schema.install(conn)
        tables = [table for (table,) in conn.execute(TABLES).fetchall()]
        database = conn.info.dbname
    with spark_pgqueue.connect(settings.url) as queue:
        queue.create_stream(STREAM, if_not_exists=True)
        queue.create_consumer(
            STREAM, CONSUMER, start="earliest", if_not_exists=True, settings=SETTINGS
        )
    described = {
        "kind": "descriptor",
        "event_tables": tables,
        "extensions": MANIFEST["extensions"],
        "version": VERSION,
        "schema_version": str(version),
        "db_name": database,
        "started_at": _now(),
    }
    emit(described, settings.instance)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def main(manifest: Annotated[bool, typer.Option(help="Print adapter.json.")] = False) -> None:
    """Speak to the public harness."""
    if manifest:
        print(json.dumps(MANIFEST, indent=2))
        return
    settings = Settings.of(os.environ)
    prepare(settings)

    async def work() -> None:
        async with await spark_pgqueue.connect_async(settings.url, patience=PATIENCE) as queue:
            await Adapter(settings, queue).run()

    asyncio.run(work())


if __name__ == "__main__":
    typer.run(main)
