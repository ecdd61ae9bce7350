"""What a page of the documentation tells its readers to type, and how to type it."""

from __future__ import annotations

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


def words_of(page: str) -> int:
    """What a reader reads: words of text, tables and examples that have a letter or a digit.

    Not: what `make docs` writes, the names of tests, and where links lead.
    """
    text = re.sub(r"<!-- written by make docs.*?<!-- to here -->", "", page, flags=re.DOTALL)
    text = re.split(r"^## Tests$", text, flags=re.MULTILINE)[0]
    text = re.sub(r"`tests/\S+::\w+`|(?<=\])\([^)]*\)", "", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def environment_of(url: str) -> dict[str, str]:
    """Of a reader who has activated the environment, and has told libpq where the database is."""
    given = {f"PG{k.upper()}": str(v) for k, v in conninfo_to_dict(url).items()}
    given["PGDATABASE"] = given.pop("PGDBNAME")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **given, "PATH": path, "PGQUEUE_URL": url}


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


def type_all(page: Path, url: str, folder: Path, python: dict[str, Any]) -> None:
    """Block after block of a page: psql, a shell, and one session of Python.

    Python has the page's blocks run here, in the environment of the tests, so that what a block
    imported and made is there for the next one.
    """
    psql = shutil.which("psql") or str(binaries.find_binaries(18) / "psql")
    for number, (language, text) in enumerate(blocks_of(page.read_text())):
        if language == "sql":
            run([psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", url], url, folder, stdin=text)
        elif language == "sh":
            run_commands(text, url, folder)
        elif language == "python":
            code = compile(text, f"{page.name}, block {number + 1}", "exec", dont_inherit=True)
            exec(code, python)
