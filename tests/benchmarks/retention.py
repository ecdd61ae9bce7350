"""A stream with a retention beside one without: the same ingest, and what it costs to keep it flat.

Both sides are sent the same messages by COPY at the same pace, and single ones by `send`; a worker
receives some of them. maintain() is called every two seconds.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg

from spark_pgqueue.postgres import connection
from tests.benchmarks.harness import Bench, Line, Target
from tests.benchmarks.server_cpu import nanoseconds

RATE = 200 << 20
"""Bytes of payload a minute, as the page of the guide says."""

PAYLOAD = "x" * 1000
CHUNK = 1000


@dataclass
class Side:
    """What was seen of one stream. Times in seconds, CPU in seconds of its server processes."""

    name: str
    cpu: dict[str, float] = field(default_factory=dict)
    sends: list[tuple[float, float]] = field(default_factory=list)
    receives: list[tuple[float, float]] = field(default_factory=list)
    copies: list[tuple[float, float]] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)


def retention(bench: Bench) -> None:
    """Ingest with retention by age: disk, sends and claims flat, and its cost beside the ingest.

    PGQUEUE_RETENTION_SECONDS says how long each of the two goes on; 1800 is worth a night.
    """
    seconds = float(os.environ.get("PGQUEUE_RETENTION_SECONDS", 20 if bench.quick else 60))
    url = bench.url
    sides = [Side("plain"), Side("kept")]
    with connection.connect(url) as conn:
        for side in sides:
            conn.execute("select pgqueue.create_stream(%s)", [side.name])
            conn.execute("select pgqueue.create_consumer(%s, 'c')", [side.name])
        conn.execute(
            "select pgqueue.set_retention('kept', p_for => make_interval(secs => %s))",
            [_keep(seconds)],
        )
    for side in sides:  # one after the other: what is measured of one is not the other's
        _ingest(url, side, seconds)
    _report(bench, sides, seconds)
    with connection.connect(url) as conn:
        for side in sides:
            conn.execute("select pgqueue.drop_stream(%s)", [side.name])


def _keep(seconds: float) -> float:
    """For how many seconds messages are kept."""
    return min(max(seconds / 10, 30), seconds / 2)


def _ingest(url: str, side: Side, seconds: float) -> None:
    begun = time.monotonic()
    work = (_copy, _send, _receive, _maintain, _look)
    threads = [threading.Thread(target=w, args=(url, side, begun, begun + seconds)) for w in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def _worker(url: str, side: Side, name: str) -> Iterator[psycopg.Connection]:
    with connection.connect(url) as conn:
        yield conn
        side.cpu[name] = nanoseconds(conn.info.backend_pid) / 1e9


def _paced(begun: float, ends: float, every: float, step: Callable[[], None]) -> None:
    number = 0
    while (now := time.monotonic()) < ends:
        step()
        number += 1
        time.sleep(max(0.0, begun + number * every - now))


def _timed(step: Callable[[], object], into: list[tuple[float, float]]) -> None:
    begun = time.monotonic()
    step()
    into.append((begun, time.monotonic() - begun))


def _copy(url: str, side: Side, begun: float, ends: float) -> None:
    with _worker(url, side, "copy") as conn:
        (stream,) = conn.execute(
            "select stream_id from pgqueue.streams where name = %s", [side.name]
        ).fetchone() or (0,)
        copy = f"copy pgqueue.messages_{stream} (seq, data) from stdin".encode()

        def step() -> None:
            with conn.transaction():
                (seqs,) = conn.execute(
                    "select pgqueue.reserve(%s, %s)", [stream, CHUNK]
                ).fetchone() or ((),)
                with conn.cursor().copy(copy) as rows:
                    text = "".join(
                        f"{seq}\t{PAYLOAD}\n" for r in seqs for seq in range(r.lower, r.upper)
                    )
                    rows.write(text)
                conn.execute("select pgqueue.publish_written(%s, %s)", [side.name, seqs])

        every = 60 * CHUNK * len(PAYLOAD) / RATE
        _paced(begun, ends, every, lambda: _timed(step, side.copies))


def _send(url: str, side: Side, begun: float, ends: float) -> None:
    with _worker(url, side, "send") as conn:
        send = "select pgqueue.send(%s, %s)"

        def step() -> None:
            _timed(lambda: conn.execute(send, [side.name, PAYLOAD]), side.sends)

        _paced(begun, ends, 0.01, step)


def _receive(url: str, side: Side, begun: float, ends: float) -> None:
    """One message each 10 ms; and all that is there now and then, so that it keeps up."""
    with _worker(url, side, "receive") as conn:
        one = "select claim_id from pgqueue.receive(%s, 'c', 1)"
        rest = "select claim_id from pgqueue.claim(%s, 'c', 1000000)"

        def step() -> None:
            found: list[tuple[int]] = []
            _timed(lambda: found.extend(conn.execute(one, [side.name]).fetchall()), side.receives)
            if len(side.receives) % 20 == 0:
                found += conn.execute(rest, [side.name]).fetchall()
            for (claim,) in found:
                conn.execute("select pgqueue.ack(%s)", [claim])

        _paced(begun, ends, 0.01, step)


def _maintain(url: str, side: Side, begun: float, ends: float) -> None:
    with _worker(url, side, "maintain") as conn:

        def step() -> None:
            conn.execute("call pgqueue.maintain_all()")

        _paced(begun, ends, 2, step)


def _look(url: str, side: Side, begun: float, ends: float) -> None:
    size = "select bytes from pgqueue.stream_retention where stream = %s"
    with connection.connect(url) as conn:

        def step() -> None:
            (found,) = conn.execute(size, [side.name]).fetchone() or (0,)
            side.sizes.append((time.monotonic() - begun, found))

        _paced(begun, ends, 0.5, step)


def _report(bench: Bench, sides: list[Side], seconds: float) -> None:
    plain, kept = sides
    group = f"retention: {RATE >> 20} MB/min for {seconds:.0f} s, kept for {_keep(seconds):.0f} s"

    def add(name: str, value: float, unit: str, target: Target | None = None) -> None:
        bench.report.add(Line(group, name, value, unit, target))

    later = [size for at, size in kept.sizes if at > seconds / 2]
    add("disk, largest / smallest in the second half", max(later) / min(later), "", Target(most=2))
    add("disk at the end", kept.sizes[-1][1] / plain.sizes[-1][1], "of all")
    ingest = kept.cpu["copy"] + kept.cpu["send"]
    cost = (kept.cpu["maintain"] - plain.cpu["maintain"]) / ingest
    add("cost of maintain, of the ingest's", 100 * cost, "% CPU", Target(most=10))
    for name in ("sends", "receives", "copies"):
        ours, theirs = getattr(kept, name), getattr(plain, name)
        add(f"{name}, longest", 1000 * max(t for _, t in ours), "ms", Target(most=100))
        add(f"{name}, longest without retention", 1000 * max(t for _, t in theirs), "ms")
        half = len(ours) // 2
        early, late = (statistics.median(t for _, t in part) for part in (ours[:half], ours[half:]))
        add(f"{name}, second half / first half", late / early, "", Target(most=1.2))
        medians = [statistics.median(t for _, t in side) for side in (ours, theirs)]
        add(f"{name}, median / without retention", medians[0] / medians[1], "")
