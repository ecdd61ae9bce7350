"""What a server of 64 cores carries, and what ends first: an estimate, nobody measured it.

    python -m tests.benchmarks.scale.model [--cores 64] [--sync-us 100] [--wal-mb 1000] ...

It computes with measured.json: the CPU and WAL of each operation, and the work under a lock that
only one session has. What the other server is like is assumed, see `Server`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks.scale.figures import MEASURED

Values = dict[str, float]


@dataclass(frozen=True)
class Server:
    """What is assumed of the server: none of it was measured.

    Attributes:
        cores: each as fast as one of the machine that measured.
        usable: the part of them that is left for backends, when all are busy.
        sync: microseconds until a write of the log is on the disk.
        wal: bytes of the log that the disk writes in a second.
        sessions: connections that work at once.
    """

    cores: int = 64
    usable: float = 0.6
    sync: float = 100.0
    wal: float = 1e9
    sessions: int = 300

    def by_cpu(self, each: float) -> float:
        """Messages a second, if one takes so many microseconds of CPU."""
        return self.cores * self.usable * 1e6 / each

    def by_sessions(self, cpu: float, commits: float) -> float:
        """... if one takes so much CPU and so many commits, which sessions wait for."""
        return self.sessions * 1e6 / (cpu + commits * self.sync)


@dataclass(frozen=True)
class Estimate:
    """How much of a workload a server carries.

    Attributes:
        workload: what is done.
        limits: what ends it, and messages a second at which it does.
        arithmetic: how the limits were computed.
    """

    workload: str
    limits: Values
    arithmetic: str

    @property
    def first(self) -> str:
        """What ends first."""
        return min(self.limits, key=self.limits.__getitem__)

    def __str__(self) -> str:
        others = ", ".join(
            f"{name} {rounded(limit)}/s"
            for name, limit in self.limits.items()
            if name != self.first
        )
        return (
            f"estimate: {self.workload}: {rounded(self.limits[self.first])}/s, then: {self.first}\n"
            f"    ({self.arithmetic}; later: {others or 'nothing known'})"
        )


def rounded(value: float) -> str:
    """Two digits: an estimate has no more."""
    return f"{float(f'{value:.2g}'):,.0f}"


def sending(measured: Values, server: Server) -> Iterator[Estimate]:
    """Messages of all streams together."""
    for name, size in (("send", 1), ("send_batch of 100", 100), ("send_batch of 10,000", 10_000)):
        cpu, wal = measured[f"{name}, µs"], measured[f"{name}, bytes of WAL"]
        limits = {
            "the CPU": server.by_cpu(cpu),
            "the log's disk": server.wal / wal,
            "the sessions": server.by_sessions(cpu, 1 / size),
        }
        if size > 100:
            numbers = measured["seqs lock, numbers of a large batch, µs"]
            limits["the numbers of one stream"] = 1e6 / numbers
        sums = f"{cpu:.3g} µs of {server.cores} cores x {server.usable}; {wal:.0f} bytes of WAL"
        yield Estimate(f"{name}, nobody waits", limits, sums)
    cpu = measured["send, µs"]
    yield Estimate(
        "send to streams for which a session waits (NOTIFY), of a whole server",
        {"the lock of commits that notify": 1e6 / (server.sync + cpu)},
        f"one commit at a time: {server.sync:.0f} µs of the disk + at most {cpu:.0f} µs",
    )


def claiming(measured: Values, server: Server) -> Iterator[Estimate]:
    """Messages of one consumer, and of all."""
    for ordering in ("none", "key", "stream"):
        for size in (1, 10, 100):
            name = f"ordering={ordering}, claims of {size}"
            cpu = measured[f"{name}, µs"]
            locked, locks = measured[f"{name}, µs with the lock"], measured[f"{name}, locks"]
            serial = locked + locks * server.sync
            limits = {
                "the lock of one consumer": 1e6 / serial if serial else float("inf"),
                "the CPU": server.by_cpu(cpu),
                "the sessions": server.by_sessions(cpu, 2 / size),
            }
            if ordering == "stream":  # as each key of a consumer with ordering=key
                limits["one claim after the other"] = 1e6 / (cpu + 2 * server.sync / size)
            yield Estimate(
                f"receive and ack, {name}",
                limits,
                f"{cpu:.3g} µs; one consumer's lock: {locked:.3g} µs"
                f" + {locks:.3g} x {server.sync:.0f} µs",
            )


def through(measured: Values, server: Server) -> Iterator[Estimate]:
    """A message from its sending to its acknowledgements."""
    for size, consumers in ((1, 1), (100, 1), (100, 10)):
        send = "send" if size == 1 else f"send_batch of {size}"
        claim = measured[f"ordering=none, claims of {size}, µs"]
        cpu = measured[f"{send}, µs"] + consumers * claim
        wal = measured[f"{send}, bytes of WAL"]
        wal += consumers * measured[f"receive {size} and ack, bytes of WAL"]
        commits = (1 + 2 * consumers) / size
        yield Estimate(
            f"a message through a stream with {consumers} consumers, by {size}",
            {
                "the CPU": server.by_cpu(cpu),
                "the log's disk": server.wal / wal,
                "the sessions": server.by_sessions(cpu, commits),
            },
            f"{cpu:.3g} µs, {wal:.0f} bytes of WAL, {commits:.3g} commits",
        )


def spark(measured: Values, driver: Values, server: Server) -> Iterator[Estimate]:
    """What the server and the driver do for Spark; the executors are elsewhere."""
    reads = measured["COPY of a task that reads, µs"]
    writes = (
        measured["COPY of a task that writes, µs"] + measured["stage, a task's call, µs a message"]
    )
    wal = measured["send_batch of 10,000, bytes of WAL"]
    numbers = measured["seqs lock, numbers of a large batch, µs"]
    yield Estimate(
        "Spark reads",
        {"the CPU of the server": server.by_cpu(reads)},
        f"{reads:.3g} µs a message, whatever reads it",
    )
    yield Estimate(
        "Spark writes",
        {
            "the CPU of the server": server.by_cpu(writes),
            "the log's disk": server.wal / (wal + 100),
            "the numbers of one stream": 1e6 / numbers,
        },
        f"{writes:.3g} µs, {wal:.0f} bytes of WAL + 100 of payload, {numbers:.3g} µs for a number",
    )
    for tasks in (1, 8, 64):
        name = f"{tasks} tasks of a message each"
        if f"{name}: triggerExecution, ms" in driver:
            alone = driver[f"{name}: triggerExecution, ms"] - driver[f"{name}: addBatch, ms"]
            yield Estimate(
                f"micro-batches of a query with {tasks} tasks that take no time",
                {"the driver": 1e3 / alone},
                f"{alone:.0f} ms for what the driver does before and after the tasks",
            )


def estimates(path: Path, server: Server) -> Iterator[Estimate]:
    """All of them, from the figures of a file."""
    single = json.loads(path.read_text())["single"]
    measured = single["serial"]
    yield from sending(measured, server)
    yield from claiming(measured, server)
    yield from through(measured, server)
    yield from spark(measured, single.get("spark", {}), server)


def main(
    cores: int = 64,
    usable: float = 0.6,
    sync_us: float = 100,
    wal_mb: float = 1000,
    sessions: int = 300,
    json: Annotated[Path, typer.Option(help="The measured figures.")] = MEASURED,
) -> None:
    """Estimate what a server carries, and what ends first."""
    server = Server(cores, usable, sync_us, wal_mb * 1e6, sessions)
    print(f"assumed: {server}")
    for each in estimates(json, server):
        print(each)


if __name__ == "__main__":
    typer.run(main)
