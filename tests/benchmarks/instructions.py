"""How many instructions a backend takes to receive and acknowledge a message.

    .venv/bin/python -m tests.benchmarks.instructions

Other work of the machine changes none of them. Callgrind counts them (Debian's package valgrind),
in a session that has claimed before, commits included. The kernel's work is not in it. Under
callgrind the server is some forty times as slow: so claims look at what time brings once an hour,
and not each second.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from spark_pgqueue.postgres.binaries import find_binaries, for_everybody, owner_of
from tests.benchmarks.compare.rows import Rows, RowsByFunctions
from tests.benchmarks.compare.sides import Delivery, Ours, Side
from tests.benchmarks.harness import run

CALLS = 1024
"""Calls that are counted, of several blocks of bundles that are cut at once."""

WARM_UP = 530
"""Calls before: plans are made, and blocks have their usual size."""

SETTINGS = ("autovacuum=off", "checkpoint_timeout=30min", "fsync=off", "jit=off",
            "listen_addresses=", "max_wal_size=4GB")  # fmt: skip
RARELY = {
    "probe_leases": ("interval '1 s', p_consumer.visibility_timeout / 2", "interval '1 hour'"),
    "not_yet": ("2 s", "2 hours"),
}
"""What of a function stands for what."""


def consume(side: Side, conn: psycopg.Connection, calls: int) -> None:
    """Receive and acknowledge messages one by one."""
    done: Delivery | None = None
    for _ in range(calls):
        done = side.receive(conn, 1, 0, done)
        assert len(done.numbers) == 1
        if not side.one_call:
            side.ack(conn, done, 0)
            done = None
    if done:
        side.ack(conn, done, 0)


SIDES: list[Side] = [Ours(), Ours("one call", one_call=True), RowsByFunctions(), Rows()]


def main() -> None:
    """Count for each side, in a database of its own."""
    with server() as (url, counted):
        for side in SIDES:
            print(f"{side.name:32}{count(url, counted, side):>10,}", flush=True)


def count(url: str, counted: Callable[[int, Callable[[], None]], int], side: Side) -> int:
    """Instructions of a backend to receive and acknowledge a message."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("drop database if exists counted with (force)")
        conn.execute("create database counted")
    conn = psycopg.connect(url, dbname="counted", autocommit=True)
    side.install(conn)
    for function, (usual, rare) in RARELY.items() if isinstance(side, Ours) else ():
        (definition,) = run(conn, f"select pg_get_functiondef('_pgqueue.{function}'::regproc)")[0]
        assert usual in definition
        run(conn, definition.replace(usual, rare))
    side.create(conn, 1, by_key=False)
    side.fill(conn, 0, ["key"] * (CALLS + 2 * WARM_UP))
    run(conn, "vacuum analyze")
    with psycopg.connect(url, dbname="counted", autocommit=True) as worker:
        worker.prepare_threshold = 0
        consume(side, worker, WARM_UP)
        return counted(worker.info.backend_pid, lambda: consume(side, worker, CALLS)) // CALLS


@contextmanager
def server() -> Iterator[tuple[str, Callable[..., Any]]]:
    """A server under callgrind: its address, and what counts the instructions of a backend."""
    programs = find_binaries(18)
    with tempfile.TemporaryDirectory(prefix="pgqueue-counts-") as name:
        folder = Path(name)
        null = subprocess.DEVNULL
        how: dict[str, Any] = {"cwd": folder, "stdout": null, "stderr": null}
        if os.getuid() == 0:
            how |= {"user": (user := owner_of(folder / "data")), "extra_groups": []}
            programs = for_everybody(programs)
            subprocess.run(["chown", str(user), folder], check=True)
        subprocess.run([programs / "initdb", "-D", "data", "-U", "postgres", "-A", "trust"],
                       check=True, **how)  # fmt: skip
        callgrind = ["valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no",
                     f"--callgrind-out-file={folder}/out.%p"]  # fmt: skip
        settings = [part for setting in SETTINGS for part in ("-c", setting)]
        postgres = [programs / "postgres", "-D", "data", "-k", folder, *settings]
        process = subprocess.Popen([*callgrind, *postgres], **how)
        url = f"postgresql://postgres@/postgres?host={folder}"

        def counted(pid: int, work: Callable[[], None]) -> int:
            for arguments in (["-i", "on"], ["-z"]):
                subprocess.run(["callgrind_control", *arguments, str(pid)], check=True, **how)
            work()
            subprocess.run(["callgrind_control", "-d", str(pid)], check=True, **how)
            (text,) = (path.read_text() for path in folder.glob(f"out.{pid}.*"))
            return int(re.findall(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)[0])

        try:
            while process.poll() is None:
                with suppress(psycopg.OperationalError):
                    psycopg.connect(url).close()
                    break
                time.sleep(0.1)
            yield url, counted
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
