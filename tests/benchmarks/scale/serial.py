"""What the model computes with: CPU, WAL, and the parts that only one session does at a time."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass

from tests.benchmarks.scale.figures import Figures
from tests.benchmarks.scale.gauge import Gauge, send_batch, settle

HOLDS = (
    "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    " and classid = _pgqueue.lock_class_consumer()::oid"
)
ORDERINGS = ("none", "key", "stream")
MESSAGES = 20_000
KEYS = 1_000
STAGED = 50_000


@dataclass
class Held:
    """Of claims and their acknowledgements.

    Attributes:
        messages: how many were claimed.
        calls: how many claims there were.
        cpu: microseconds of all calls.
        locked: how many claims took the consumer's lock.
        locked_cpu: microseconds of these.
    """

    messages: int = 0
    calls: int = 0
    cpu: float = 0
    locked: int = 0
    locked_cpu: float = 0


def serial(url: str, figures: Figures) -> None:
    """Each figure is of a message, unless its name says otherwise."""
    gauge = Gauge(url)
    stream = gauge.value("select pgqueue.create_stream('s')")
    gauge.ask("select pgqueue.create_consumer('s', 'c')")
    _sending(gauge, figures)
    _claiming(gauge, figures)
    _staging(gauge, figures, stream)
    numbers = gauge.cpu(lambda: gauge.ask(f"select _pgqueue.take_seqs({stream}, 100000)"))
    figures.note("serial", "seqs lock, numbers of a large batch, µs", numbers / 100_000)
    figures.note("serial", "fdatasync of this disk, µs", _sync())
    gauge.conn.close()


def _sending(gauge: Gauge, figures: Figures) -> None:
    def note(name: str, query: str, messages: int, calls: int) -> None:
        cost = gauge.cost(query, calls)
        figures.note("serial", f"{name}, µs", cost.mean / messages)
        figures.note("serial", f"{name}, bytes of WAL", cost.wal / messages)

    note("send", "select pgqueue.send('s', repeat('x', 100))", 1, 400)
    note("send_batch of 100", send_batch(100), 100, 60)
    note("send_batch of 10,000", send_batch(10_000), 10_000, 6)
    gauge.ask("select pgqueue.seek('s', 'c', 'latest')")
    turns = []
    for _ in range(300):
        gauge.ask("select pgqueue.send('s', 'x')")
        turns.append(gauge.cpu(lambda: gauge.ask(settle(1))))
    figures.note("serial", "receive 1 and ack of the only message, µs", statistics.fmean(turns))
    gauge.ask("select pgqueue.send('s', 'x') from generate_series(1, 4000)")
    for size in (1, 100):
        cost = gauge.cost(settle(size), 300 // size + 5)
        figures.note("serial", f"receive {size} and ack, bytes of WAL", cost.wal / size)


def _claiming(gauge: Gauge, figures: Figures) -> None:
    for ordering in ORDERINGS:
        for size in (1, 10, 100):
            gauge.ask("select pgqueue.drop_consumer('s', 'c')")
            gauge.ask(f"select pgqueue.create_consumer('s', 'c', 'latest', '{ordering}')")
            for _ in range(MESSAGES // 100):
                gauge.ask(send_batch(100, key=f"'k' || (random() * {KEYS})::int"))
            gauge.ask("vacuum analyze pgqueue.publications")
            held = _claims(gauge, size, min(3_000, MESSAGES // size))
            name = f"ordering={ordering}, claims of {size}"
            figures.note("serial", f"{name}, µs", held.cpu / held.messages)
            figures.note("serial", f"{name}, µs with the lock", held.locked_cpu / held.messages)
            figures.note("serial", f"{name}, locks", held.locked / held.messages)


def _claims(gauge: Gauge, size: int, calls: int) -> Held:
    """Claims that are acknowledged, each in a transaction, so that its locks can be seen."""
    held = Held()
    claim = f"select max(claim_id), count(*) from pgqueue.receive('s', 'c', {size})"
    for _ in range(calls):
        found: list[tuple[int, int]] = []
        with gauge.conn.transaction():
            taken = gauge.cpu(lambda found=found: found.extend(gauge.ask(claim)))
            locked = gauge.value(HOLDS)
        claim_id, messages = found[0]
        if not messages:
            break
        ack = gauge.cpu(lambda claim_id=claim_id: gauge.ask(f"select pgqueue.ack({claim_id})"))
        held.messages += messages
        held.calls += 1
        held.cpu += taken + ack
        if locked:
            held.locked += 1
            held.locked_cpu += taken
    return held


def _staging(gauge: Gauge, figures: Figures, stream: int) -> None:
    """What tasks of a Spark write do: they take numbers, copy, and stage; the driver publishes."""
    with gauge.conn.transaction():
        seqs = gauge.value(f"select pgqueue.reserve({stream}, {STAGED})::text")
        first = int(seqs.strip("{}[]()").split(",")[0])

        def copy() -> None:
            with gauge.conn.cursor().copy(
                f"copy pgqueue.messages_{stream} (seq, data) from stdin".encode()
            ) as rows:
                for seq in range(first, first + STAGED):
                    rows.write_row((seq, "x" * 100))

        figures.note("serial", "COPY of a task that writes, µs", gauge.cpu(copy) / STAGED)
        stage = f"select pgqueue.stage('model', 1, {stream}, '{seqs}'::int8multirange)"
        chunks: list[int] = []
        taken = gauge.cpu(lambda: chunks.append(gauge.value(stage)))
        figures.note("serial", "stage, a task's call, µs a message", taken / STAGED)
    publish = f"select pgqueue.publish_staged('model', 1, {stream}, '{{{chunks[0]}}}', {STAGED})"
    taken = gauge.cpu(lambda: gauge.ask(publish))
    figures.note("serial", "publish_staged, a batch's call, µs", taken)
    copy_out = (
        f"copy (select seq, data from pgqueue.messages_{stream}"
        f" where seq >= {first} and seq < {first + STAGED}) to stdout (format binary)"
    )

    def read() -> None:
        with gauge.conn.cursor().copy(copy_out.encode()) as rows:
            for _ in rows:
                pass

    taken = min(gauge.cpu(read) for _ in range(5))
    figures.note("serial", "COPY of a task that reads, µs", taken / STAGED)


def _sync() -> float:
    """Microseconds of a write of 8 kB and its fdatasync, the median."""
    with tempfile.NamedTemporaryFile() as file:
        descriptor = file.fileno()
        os.write(descriptor, bytes(8192 * 200))
        os.fsync(descriptor)
        taken = []
        for i in range(200):
            began = time.perf_counter()
            os.pwrite(descriptor, os.urandom(8192), i * 8192)
            os.fdatasync(descriptor)
            taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)
