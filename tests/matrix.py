"""`make matrix`: quick tests with every supported version of Python, PySpark and PostgreSQL.

Each Python with each PySpark gets an environment in .matrix, from PyPI by uv, or by pip where there
is no uv. There the tests of `TESTS` run with each PostgreSQL. The table says of each combination
how it went, or that it cannot be had on this machine, and below it why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

ROOT = Path(__file__).parent.parent
HOME = ROOT / ".matrix"

PYTHONS = ("3.11", "3.12", "3.13")
PYSPARKS = ("4.0", "4.1", "4.2", "4.3")
POSTGRES = ("15", "16", "17", "18", "19")

TESTS = (
    "tests/sql/test_claim.py",
    "tests/unit/test_client.py",
    "tests/spark/test_source.py::test_a_message_becomes_a_row_of_the_documented_columns",
    "tests/spark/test_source.py::test_with_ordering_key_a_key_is_in_one_partition_and_in_order",
    "tests/spark/test_source.py::test_a_running_query_survives_terminated_backends",
    "tests/spark/test_sink.py::test_rows_become_messages_with_key_headers_priority_and_time",
    "tests/spark/test_sink.py::test_what_the_sink_writes_the_source_reads",
    "tests/spark/test_offset_source.py::test_a_batch_reads_a_range_once_and_touches_nothing",
    "tests/spark/test_versions.py",
)
"""What is to hold everywhere; all else is tested with the newest versions alone."""

LONGER = (
    "tests/spark/test_versions.py::test_everything_is_copied_once",
    "tests/spark/test_versions.py::test_a_run_that_cannot_acknowledge_its_batch_says_so",
)
"""Of these, the ones that take minutes, of applications that are killed and started again."""

FIND_POSTGRES = """
import sys
from spark_pgqueue.postgres.errors import PgQueueError
from tests import fetched
try:
    print(fetched.find(int(sys.argv[1])))
except PgQueueError as error:
    sys.exit(error.message)
"""


class Missing(Exception):
    """Something cannot be had on this machine; the message says what and why."""


@dataclass
class Outcome:
    """How the tests went in one combination.

    Attributes:
        cell: what the table says of it.
        failed: whether a test failed, or none ran.
        notes: what else has to be told.
    """

    cell: str
    failed: bool = False
    notes: list[str] = field(default_factory=list)


def main(
    python: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PYTHONS)}.")] = None,
    pyspark: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PYSPARKS)}.")] = None,
    postgres: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(POSTGRES)}.")] = None,
    longer: Annotated[bool, typer.Option(help="Also kill applications: minutes each.")] = False,
) -> None:
    """Run quick tests with each version of Python, PySpark and PostgreSQL; each option chooses."""
    rows: dict[tuple[str, str], list[Outcome]] = {}
    programs: dict[str, Path] = {}  # of PostgreSQL: an environment that lacks some borrows them
    versions = postgres or POSTGRES
    for names in product(python or PYTHONS, pyspark or PYSPARKS):
        name = f"Python {names[0]}, PySpark {names[1]}"
        try:
            environment = Environment(*names)
        except Missing as missing:
            print(f"{name}: not here", flush=True)
            rows[names] = [Outcome("not here", notes=[f"{name}: {missing}"])] * len(versions)
            continue
        rows[names] = []
        for version in versions:
            rows[names].append(environment.test(version, programs, longer))
            print(f"{name}, PostgreSQL {version}: {rows[names][-1].cell}", flush=True)
    print("\n" + table(rows, versions))
    if any(outcome.failed for row in rows.values() for outcome in row):
        raise typer.Exit(1)


class Environment:
    """A Python with a PySpark, made when it is missing or pyproject.toml has changed.

    Raises:
        Missing: the Python is not on this machine, or packages for it cannot be had.
    """

    def __init__(self, python: str, pyspark: str):
        self.name = f"python{python}-pyspark{pyspark}"
        self.folder = HOME / self.name
        self.python = self.folder / "bin" / "python"
        stamp = self.folder / "made"
        if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
            self._make(find_python(python), pyspark)
            stamp.touch()

    def _make(self, python: str, pyspark: str) -> None:
        print(f"makes {self.folder}", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        beside = str(Path(sys.executable).parent)
        uv = shutil.which("uv", path=os.pathsep.join([beside, os.environ["PATH"]]))
        if uv:
            made = [uv, "venv", "--quiet", "--python", python, str(self.folder)]
            install = [uv, "pip", "install", "--quiet", "--python", str(self.python)]
        else:
            made = [python, "-m", "venv", str(self.folder)]
            install = [str(self.python), "-m", "pip", "install", "--quiet"]
        packages = ["--editable", f"{ROOT}[test,java]", f"pyspark[connect]=={pyspark}.*"]
        for command in (made, [*install, *packages]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr or done.stdout).strip()
                raise Missing(f"`{' '.join(command)}` failed: {said[-1000:]}")

    def test(self, postgres: str, programs: dict[str, Path], longer: bool) -> Outcome:
        """Run the tests with a version of PostgreSQL.

        Args:
            postgres: its major version.
            programs: where those of each version are, as far as that is known; is added to.
            longer: whether those of `LONGER` run too.
        """
        found = self._run(FIND_POSTGRES, postgres)
        if found.returncode == 0:
            programs.setdefault(postgres, Path(found.stdout.strip()))
        elif postgres not in programs:
            return Outcome("not here", notes=[f"PostgreSQL {postgres}: {found.stderr.strip()}"])
        path = os.pathsep.join([str(programs[postgres]), os.environ["PATH"]])
        log = HOME / f"{self.name}-postgres{postgres}.log"
        report = log.with_suffix(".xml")
        report.unlink(missing_ok=True)
        options = ["--numprocesses=0", "-pno:cacheprovider", "-m", "", f"--junitxml={report}"]
        options += [] if longer else [f"--deselect={each}" for each in LONGER]
        with log.open("w") as file:
            subprocess.run(
                [self.python, "-m", "pytest", *options, *TESTS],
                env={
                    **os.environ,
                    "PATH": path,
                    "PGQUEUE_TEST_VERSIONS": postgres,
                    "PGQUEUE_MATRIX": "1",
                },
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return outcome_of(report, log)

    def _run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def find_python(version: str) -> str:
    """The program of a version of Python on the PATH, or of pyenv.

    Raises:
        Missing: there is none.
    """
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [*os.environ["PATH"].split(os.pathsep), *pyenv.glob(f"versions/{version}.*/bin")]
    for program in (Path(folder) / name for folder in folders):
        # pyenv has a program of each name on the PATH, which may only say that it is not chosen.
        check = [program, "-c", "import venv, ensurepip"]
        if program.exists() and subprocess.run(check, capture_output=True).returncode == 0:
            return str(program)
    raise Missing(f"no {name} with venv, neither on the PATH nor in {pyenv}")


def outcome_of(report: Path, log: Path) -> Outcome:
    """What pytest's report says."""
    if not report.exists():
        end = log.read_text().strip()[-2000:]
        return Outcome("failed", failed=True, notes=[f"{log}: pytest did not run: {end}"])
    (suite,) = ElementTree.parse(report).getroot()
    count, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    notes = [
        f"{log.stem}, {case.attrib['name']}: {told.tag}: {first_line(told.attrib['message'])}"
        for case in suite
        for told in case
        if told.tag in ("skipped", "failure", "error")
    ]
    if failed:
        return Outcome(f"{failed} of {count} failed", failed=True, notes=notes)
    if skipped == count:
        return Outcome("none ran", failed=True, notes=notes or [f"{log}: no test was found"])
    told = f", {skipped} skipped" if skipped else ""
    return Outcome(f"{count - skipped} passed{told}", notes=notes)


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def table(rows: dict[tuple[str, str], list[Outcome]], versions: Iterable[str]) -> str:
    """In Markdown: what happened where, and once each what has to be told."""
    heads = ["Python", "PySpark", *(f"PostgreSQL {version}" for version in versions)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[*names, *(outcome.cell for outcome in row)] for names, row in rows.items()]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = {note: None for row in rows.values() for outcome in row for note in outcome.notes}
    return "\n".join([text, "", *(f"- {note}" for note in notes)])


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
