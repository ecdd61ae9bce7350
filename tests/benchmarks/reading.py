"""Reading without claiming from Python, against a plain COPY; and groups, of one and four workers.

Both sides of the first make a tuple of Python for each row, with the same columns.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

import spark_pgqueue
from spark_pgqueue.postgres import connection
from tests.benchmarks.harness import Bench, Line, Target, alternate, timed
from tests.benchmarks.source import fill

COLUMNS = "seq, key, data, headers, inserted_at"
PARTITIONS = 16


def reading(bench: Bench) -> None:
    """By offset, in batches of 10,000 and 1,000; and by a group, whose handlers do nothing."""
    rows = 100_000 if bench.quick else 400_000
    with bench.connect() as conn, spark_pgqueue.connect(bench.url) as queue:
        fill(conn, rows)
        (stream,) = conn.execute(
            "select stream_id from pgqueue.streams where name = 'source'"
        ).fetchone() or (0,)
        copy = f"copy (select {COLUMNS} from pgqueue.messages_{stream}) to stdout".encode()

        def plain() -> None:
            with conn.cursor() as cursor, cursor.copy(copy) as out:
                assert sum(1 for _ in out.rows()) == rows

        def read(size: int) -> None:
            batches = queue.read("source", max_messages=size)
            assert sum(len(batch.messages) for batch in batches) == rows

        taken = alternate(
            {
                "plain": lambda: timed(plain),
                "10,000": lambda: timed(lambda: read(10_000)),
                "1,000": lambda: timed(lambda: read(1000)),
            },
            3 if bench.quick else 8,
        )
        for size, target in (("10,000", Target(least=0.8)), ("1,000", None)):
            bench.report.ratio(
                "reading without claiming, against a plain COPY to Python rows",
                f"batches of {size}",
                taken[size],
                taken["plain"],
                f"{rows}/s",
                target=target,
            )
        for workers in (1, 4):
            seconds = min(_work_off(bench.url, workers, rows) for _ in range(2))
            bench.report.add(
                Line("groups, 16 partitions, handlers that do nothing", f"{workers} workers",
                     rows / seconds, "/s")
            )  # fmt: skip
        queue.drop_stream("source")
        conn.execute("drop table plain")


def _work_off(url: str, workers: int, rows: int) -> float:
    """How long a group takes, from when it may begin, with workers that have their partitions."""
    context = get_context("spawn")
    ended: Queue[tuple[int, float]] = context.Queue()
    with connection.connect(url) as conn:
        conn.execute("select pgqueue.create_group('source', 'group', %s, 'earliest')", [PARTITIONS])
        conn.execute("select pgqueue.pause('source', 'group')")
        processes = [context.Process(target=_worker, args=(url, ended)) for _ in range(workers)]
        for process in processes:
            process.start()
        shares = "select count(*) from (select from pgqueue.group_stats where worker is not null"
        shares += " group by worker having count(*) = %s) w"
        while conn.execute(shares, [PARTITIONS // workers]).fetchone() != (workers,):
            time.sleep(0.05)
        begun = time.time()
        conn.execute("select pgqueue.resume('source', 'group')")
        found = [ended.get() for _ in processes]
        for process in processes:
            process.join()
        conn.execute("select pgqueue.drop_consumer('source', 'group')")
    assert sum(count for count, _ in found) == rows
    return max(at for _, at in found) - begun


def _worker(url: str, ended: Queue[tuple[int, float]]) -> None:
    last = 0.0

    def handle(*_: Any) -> None:
        nonlocal last
        last = time.time()

    with spark_pgqueue.connect(url) as queue:
        group = queue.group("source", "group")

        def stop_when_all_is_done() -> None:
            while not last or time.time() - last < 1:
                time.sleep(0.1)
            group.stop()

        threading.Thread(target=stop_when_all_is_done, daemon=True).start()
        count = group.run(handle, max_messages=5000, wait=timedelta(minutes=1))
    ended.put((count, last))
