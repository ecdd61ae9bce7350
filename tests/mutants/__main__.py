"""`make mutants`: plants single faults in the SQL, and counts those that a test finds.

A fault is found if a test fails on it that passes twice without it. Only tests that call the
faulty function are run, the shortest first: `calls.py` records them in a first run of all tests.
What is equivalent is argued beside the score, not in it.

python -m tests.mutants --seed 1 --count 34      34 faults of a seed
python -m tests.mutants --list                   the faults alone
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer

from tests.mutants.calls import Calls
from tests.mutants.faults import Fault, draw

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "build" / "mutants"
SECONDS = 1800  # of the tests of one fault
PATIENCE = 180  # seconds: a test that hangs is ended
NOT_HERE = ("tests/mutants/", "tests/test_wheel.py", "tests/test_newcomers.py", "tests/notebooks/")
"""Tests that take another copy of the SQL, or all of it."""


@dataclass(frozen=True)
class Verdict:
    """What became of a fault: the test that found it; None where it lives."""

    fault: Fault
    found_by: str | None
    tests: int

    def __str__(self) -> str:
        said = f"found by {self.found_by}" if self.found_by else f"LIVES ({self.tests} tests)"
        return f"{said}: {self.fault}"


class Copy:
    """A copy of the checkout, in which faults are planted and tests run."""

    def __init__(self, folder: Path):
        self._folder = folder
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
        ).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def judge(self, fault: Fault, tests: list[str]) -> Verdict:
        """Run tests on a fault until one fails that passes without it."""
        left = list(tests)
        while left:
            fault.plant(self._folder / "sql")
            try:
                failed = self._first_failure(left)
            finally:
                shutil.copy2(ROOT / "sql" / fault.file, self._folder / "sql" / fault.file)
            if failed is None:
                break
            if self._first_failure([failed]) is None and self._first_failure([failed]) is None:
                return Verdict(fault, failed, len(tests))
            left = [test for test in left if test != failed]
        return Verdict(fault, None, len(tests))

    def _first_failure(self, tests: Iterable[str]) -> str | None:
        """The first test that fails; the first of all where the tests cannot even begin."""
        names = list(tests)
        chosen = self._folder / "chosen.txt"
        chosen.write_text("\n".join(names))
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-m", ""]
        command += [f"--timeout={PATIENCE}", "-p", "no:cacheprovider", f"@{chosen}"]
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=environment, text=True, timeout=SECONDS,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return names[0]
        if done.returncode == 0:
            return None
        lines = [line.split(" - ")[0] for line in done.stdout.splitlines()]
        failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return failed[0] if failed else names[0]


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


def chosen(calls: Calls, fault: Fault) -> list[str]:
    """The tests that call the function of a fault, the shortest first, within `SECONDS`."""
    tests, left = [], SECONDS / 2
    for test in calls.tests_of(fault.function):
        left -= calls.seconds[test]
        if left > 0 and not test.startswith(NOT_HERE):
            tests.append(test)
    return tests


def main(
    seed: Annotated[list[int], typer.Option(help="Repeat it for several draws.")] = [1],  # noqa: B006
    count: Annotated[int, typer.Option(min=1, help="Faults of each seed.")] = 34,
    workers: Annotated[int, typer.Option(min=1, help="Faults at a time.")] = 2,
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
                return copy.judge(fault, chosen(calls, fault))
            finally:
                free.put(copy)

        for verdict in pool.map(judged, faults):
            verdicts.append(verdict)
            print(verdict, flush=True)
    found = sum(verdict.found_by is not None for verdict in verdicts)
    print(f"{found} of {len(verdicts)} faults are found: {found / len(verdicts):.0%}")
    RECORDS.with_suffix(".json").write_text(json.dumps([str(each) for each in verdicts], indent=1))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
