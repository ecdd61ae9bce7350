"""`make mutants`: plants single faults in the SQL, and counts those that a test finds.

A fault is found if a test fails on it that passes twice without it. Only tests that call the
faulty function are run: `calls.py` records them in a first run of all tests. What is equivalent is
argued beside the score, not in it.

What is found, and by which test, is kept in found.json: of that the longer tests try a sample.

python -m tests.mutants --seed 1 --count 34      34 faults of a seed
python -m tests.mutants --list                   the faults alone
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer

from tests.mutants.calls import ROOT, Calls
from tests.mutants.faults import Fault, draw, name_of
from tests.mutants.judging import Copy, Verdict, found, keep

RECORDS = ROOT / "build" / "mutants"


def record(workers: int) -> None:
    """Run all tests once, and record what they call."""
    shutil.rmtree(RECORDS, ignore_errors=True)
    RECORDS.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.mutants.calls",
        "-n",
        str(workers),
    ]
    subprocess.run([*command, f"--record-calls={RECORDS}"], cwd=ROOT, check=False)


def main(
    seed: Annotated[list[int], typer.Option(help="Repeat it for several draws.")] = [1],  # noqa: B006
    count: Annotated[int, typer.Option(min=1, help="Faults of each seed.")] = 34,
    workers: Annotated[int, typer.Option(min=1, help="Faults at a time.")] = 2,
    seconds: Annotated[int, typer.Option(min=1, help="Of tests, for a fault that lives.")] = 900,
    list_: Annotated[bool, typer.Option("--list", help="Print the faults alone.")] = False,
) -> None:
    """Plant faults, print what became of each, and the share that was found."""
    faults = [fault for each in seed for fault in draw(each, count)]
    if list_:
        print(*faults, sep="\n")
        return
    if not RECORDS.is_dir():
        record(workers)
    calls = Calls(RECORDS)
    verdicts: list[Verdict] = []
    with (
        tempfile.TemporaryDirectory(prefix="pgqueue-mutants-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(workers):
            free.put(Copy(Path(folder) / str(number)))

        def judged(fault: Fault) -> Verdict:
            copy = free.get()
            try:
                tests = calls.of(fault, seconds)
                if before := found().get(name_of(fault)):
                    tests = [before, *(test for test in tests if test != before)]
                return copy.judge(fault, tests)
            finally:
                free.put(copy)

        for done in as_completed([pool.submit(judged, fault) for fault in faults]):
            verdicts.append(verdict := done.result())
            keep(verdict)
            print(verdict, flush=True)
    score = sum(verdict.found_by is not None for verdict in verdicts)
    print(f"{score} of {len(verdicts)} faults are found: {score / len(verdicts):.0%}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
