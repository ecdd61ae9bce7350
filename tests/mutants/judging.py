"""Judging a fault: it is found if a test fails on it that passes twice without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.calls import ROOT
from tests.mutants.faults import Fault, name_of

FOUND = Path(__file__).with_name("found.json")
SECONDS = 1800  # of the tests of one fault
PATIENCE = 180  # seconds: a test that hangs is ended


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

    def __init__(self, folder: Path, patience: int = PATIENCE):
        self._folder, self._patience = folder, patience
        others = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=others, dirs_exist_ok=True)

    def judge(self, fault: Fault, tests: list[str]) -> Verdict:
        """Run tests on a fault until one fails that passes without it."""
        left = list(tests)
        while failed := self.finds(fault, left):
            if self._first_failure([failed]) is None and self._first_failure([failed]) is None:
                return Verdict(fault, failed, len(tests))
            left = [test for test in left if test != failed]
        return Verdict(fault, None, len(tests))

    def finds(self, fault: Fault, tests: list[str]) -> str | None:
        """The first of the tests that fails on a fault; None without tests."""
        fault.plant(self._folder / "sql")
        try:
            return self._first_failure(tests) if tests else None
        finally:
            shutil.copy2(ROOT / "sql" / fault.file, self._folder / "sql" / fault.file)

    def _first_failure(self, tests: Iterable[str]) -> str | None:
        """The first test that fails; the first of all where the tests cannot even begin."""
        names = list(tests)
        chosen = self._folder / "chosen.txt"
        chosen.write_text("\n".join(names))
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-m", ""]
        command += [f"--timeout={self._patience}", "-p", "no:cacheprovider", f"@{chosen}"]
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=environment, text=True, timeout=SECONDS,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return names[0]
        if done.returncode in (0, pytest.ExitCode.USAGE_ERROR):  # passed, or there is no such test
            return None
        lines = [line.split(" - ")[0] for line in done.stdout.splitlines()]
        failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return failed[0] if failed else names[0]


def found() -> dict[str, str]:
    """The test that found each fault, by the fault's name."""
    return json.loads(FOUND.read_text())


def keep(verdict: Verdict) -> None:
    """Keep which test found a fault, and forget one that lives now."""
    kept = found()
    kept.pop(name := name_of(verdict.fault), None)
    if verdict.found_by is not None:
        kept[name] = verdict.found_by
    FOUND.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
