"""What a page of the documentation tells its readers to type, and how to type it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from spark_pgqueue.postgres import binaries

ROOT = Path(__file__).parents[1]
GIVEN_URL = "postgresql://me@host/db"
"""What pages write where the reader has a url."""


RESULT = re.compile(r"(?:--|#) => (.*)")
"""A comment of a block that shows what is printed; `...` stands for what differs each time."""


def all_pages() -> list[Path]:
    """The pages of the checkout; without git, in a copy of it, those of the folders with pages."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    patterns = ("*.md", "sql/**/*.md", "spark_pgqueue/**/*.md", "tests/**/*.md", "notebooks/*.md")
    return sorted(found or [page for pattern in patterns for page in ROOT.glob(pattern)])


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The blocks of a page in Markdown: the language of each, and its text."""
    return re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)


def readers_pages() -> list[Path]:
    """The pages for users, but for the one that is generated."""
    pages = [
        page for folder in ("sql", "spark_pgqueue") for page in ROOT.glob(f"{folder}/guide/*.md")
    ]
    named = [ROOT / name for name in ("README.md", "CHANGELOG.md", "notebooks/README.md")]
    return sorted({*pages, *named} - {ROOT / "sql/guide/reference.md"})


def guides() -> list[Path]:
    """The pages of the guide that a reader types; of the first hour: tests/test_newcomers.py."""
    pages = sorted(ROOT.glob("*/guide/*.md"))
    return [page for page in pages if page.stem not in ("first-hour", "README", "reference")]


def uses_spark(page: Path) -> bool:
    """Whether a block of Python needs a Spark session, `spark`."""
    blocks = [text for tag, text in blocks_of(page.read_text()) if tag == "python"]
    return any(re.search(r"\bspark\.(?:read|range|table)", text) for text in blocks)


def words_of(page: str) -> int:
    """What a reader reads: words of text, tables and examples that have a letter or a digit.

    Not: what `make docs` writes, what examples print, the names of tests, and where links lead.
    """
    text = re.sub(r"<!-- written by make docs.*?<!-- to here -->", "", page, flags=re.DOTALL)
    text = re.sub(r"```output\n.*?```", "", text, flags=re.DOTALL)
    text = re.sub(rf"{RESULT.pattern}|`tests/\S+::\w+`|(?<=\])\([^)]*\)", "", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def steps_of(page: str) -> list[tuple[str, str, list[str]]]:
    """The blocks that a reader types: the language, the text, and the lines that the page shows.

    These are the comments that begin with `=>`, and the lines of a block `output` behind it.
    """
    steps: list[tuple[str, str, list[str]]] = []
    for language, text in blocks_of(page):
        if language == "output":
            steps[-1][2].extend(text.splitlines())
        else:
            steps.append((language, text, RESULT.findall(text)))
    return steps


def missing_line(shown: list[str], printed: str) -> str | None:
    """The first line that a page shows and that was not printed, in this order."""
    lines = iter(printed.splitlines())
    for line in shown:
        pattern = ".*".join(re.escape(part) for part in line.strip().split("..."))
        if not any(re.fullmatch(pattern, each.strip()) for each in lines):
            return line
    return None


def environment_of(url: str) -> dict[str, str]:
    """Of a reader who has activated the environment, and has told libpq where the database is."""
    given = {f"PG{k.upper()}": str(v) for k, v in conninfo_to_dict(url).items()}
    given["PGDATABASE"] = given.pop("PGDBNAME")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **given, "PATH": path, "PGQUEUE_URL": url}


_SERVICE = "pages"
_service_file = Path()


def service_of(url: str | None, folder: Path | None = None) -> dict[str, str]:
    """Name a page's database in a service file; returns the variables that name the file.

    Spark starts its Python processes with the environment that Spark was started with, and a
    session lives longer than a page: the file changes from page to page, and the variables do not.

    Args:
        url: of the page's database; None: none yet.
        folder: where to make the file; None: where it was made before.
    """
    global _service_file
    if folder is not None:
        _service_file = folder / "pg_service.conf"
    given = conninfo_to_dict(url) if url else {}
    lines = [f"{name}={value}\n" for name, value in given.items()]
    _service_file.write_text("".join([f"[{_SERVICE}]\n", *lines]))
    return {"PGSERVICE": _SERVICE, "PGSERVICEFILE": str(_service_file)}


def run_commands(commands: str, url: str, folder: Path) -> str:
    """Run a block of shell commands, but for what is installed here already."""
    lines = [line for line in commands.splitlines() if not line.startswith("pip install")]
    script = "set -eu\n" + "\n".join(lines).replace(GIVEN_URL, f"'{url}'")
    return run(["bash", "-c", script], url, folder)


def run(command: list[str], url: str, folder: Path, stdin: str = "") -> str:
    """Run a program as that reader; returns what it printed. It has to succeed."""
    done = subprocess.run(
        command,
        env=environment_of(url),
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,  # a run of a declarative pipeline starts Spark
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Psql:
    """The reader's psql, from the first block of a page to the last one: its variables stay."""

    def __init__(self, url: str, folder: Path) -> None:
        """Starts psql, which prints rows with bars between the columns."""
        psql = shutil.which("psql") or str(binaries.find_binaries(18) / "psql")
        look = ["-X", "-q", "-A", "-t", "-F", " | ", "-v", "ON_ERROR_STOP=1"]
        self._process = subprocess.Popen(
            [psql, *look, url],
            env=environment_of(url),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, text: str) -> str:
        """Types statements; returns what they print. They have to succeed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended at an error
            stdin.write(f"{text}\n\\echo {self._END}\n")
            stdin.flush()
        printed = []
        for line in stdout:
            if line.strip() == self._END:
                return "".join(printed)
            printed.append(line)
        raise AssertionError("".join(printed))

    _END = "end of the block"

    def close(self) -> None:
        """Ends psql."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait(timeout=60)
        if self._process.stdout:
            self._process.stdout.close()


def type_all(page: Path, url: str, folder: Path, python: dict[str, Any]) -> None:
    """Block after block of a page: one psql, a shell, and one session of Python.

    Python has the page's blocks run here, in the environment of the tests, so that what a block
    imported and made is there for the next one. What the page shows has to be printed.
    """
    with contextlib.closing(Psql(url, folder)) as psql:
        for number, (language, text, shown) in enumerate(steps_of(page.read_text()), 1):
            name = f"{page.name}, block {number}"
            printed = ""
            if language == "sql":
                printed = psql.type(text)
            elif language == "sh":
                printed = run_commands(text, url, folder)
            elif language == "python":
                printed = _run_here(text, name, python)
            missing = missing_line(shown, printed)
            assert missing is None, f"{name} shows {missing!r}, and this came:\n{text}\n{printed}"


def _run_here(text: str, name: str, python: dict[str, Any]) -> str:
    code = compile(text, name, "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, python)
    return printed.getvalue()
