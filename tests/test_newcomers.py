"""The first hour of a new user: README.md and sql/guide/first-hour.md, typed as they stand.

In an environment with nothing in it, but for what a machine has. What is printed has to be what the
page shows. Where the page makes an environment and installs into it, the one of the tests is used;
`test_a_fresh_checkout` makes a new one, as the page says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "sql/guide/first-hour.md").read_text()

# What a wheel is built of.
PACKAGE = ("pyproject.toml", "README.md", "LICENSE", "spark_pgqueue", "sql")

# A machine's own, which pip and Spark may need.
OF_THE_MACHINE = r"PIP_\w+|\w+_proxy|\w+_PROXY|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|JAVA_HOME"

# By which Spark starts in half the time in the environment of the tests, see conftest.py.
OF_THE_TESTS = r"SPARK_HOME|SPARK_SUBMIT_OPTS"

MAKES_AN_ENVIRONMENT = ("python3 -m venv", "pip install")

pytestmark = pytest.mark.timeout(600)  # on a busy machine, each command may take seconds

FOLDER = "/home/me/spark-pgqueue"
"""What the pages call the folder of the checkout."""


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, what it says, and the file it is to be saved as."""

    language: str
    text: str
    file: str | None


def passage(page: str, heading: str) -> list[Block]:
    """The blocks of a section, without those of its subsections."""
    text = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks, before = [], ""
    for part in re.split(r"(```\w+\n.*?```\n)", text, flags=re.DOTALL):
        if found := re.fullmatch(r"```(\w+)\n(.*?)```\n", part, re.DOTALL):
            saved = re.findall(r"Save\s+this\s+as\s+`([\w.]+)`", before)
            blocks.append(Block(found[1], found[2], saved[-1] if saved else None))
        before = part
    return blocks


@dataclass
class Newcomer:
    """Somebody with a shell in a folder, who types what a page says.

    Attributes:
        folder: where the shell is; the checkout, where a new environment is made.
        home: the home directory, empty at first.
        installs: whether commands that make an environment are run; else the tests' one is used.
        typed: the commands so far.
        urls: what the reader has in place of urls that a page gives as examples.
    """

    folder: Path
    home: Path
    installs: bool = False
    typed: list[str] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)

    def type(self, commands: str, *, with_errors: bool = True, timeout: int = 300) -> str:
        """Type commands into the shell, one after the other; returns what they print.

        The shell keeps its environment from one call to the next, and goes on after an error.
        """
        for name, url in self.urls.items():
            commands = commands.replace(name, shlex.quote(url))
        lines = [
            line for line in commands.splitlines()
            if self.installs or not line.startswith(MAKES_AN_ENVIRONMENT)
        ]  # fmt: skip
        self.typed += lines
        kept = self.home / ".exported"
        script = ["[ ! -e ~/.exported ] || . ~/.exported", *lines, f"export -p > {kept}"]
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else subprocess.PIPE,
            text=True,
            timeout=timeout,
        )
        self.last_errors = done.stderr or ""
        return done.stdout.replace(str(self.folder), FOLDER)

    def _environment(self) -> dict[str, str]:
        names = OF_THE_MACHINE if self.installs else f"{OF_THE_MACHINE}|{OF_THE_TESTS}"
        own = {k: v for k, v in os.environ.items() if re.fullmatch(names, k)}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        if not self.installs:
            path = f"{Path(sys.executable).parent}:{path}"
        elif not shutil.which("python3", path=path):
            path = f"{Path(sys.base_prefix) / 'bin'}:{path}"
        return {**own, "HOME": str(self.home), "PATH": path}

    def follow(self, blocks: list[Block], *, with_errors: bool = True) -> None:
        """Do what blocks say, and compare what is printed with what they show."""
        printed = ""
        for block in blocks:
            if block.language == "sh":
                printed = self.type(block.text, with_errors=with_errors)
            elif block.language == "output":
                assert printed == block.text, self.last_errors
                printed = ""
            elif block.file:
                (self.folder / block.file).write_text(block.text)
            else:
                pytest.fail(f"nobody says what to do with {block}")
        assert printed == "", "it prints what the page does not show"


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    """Somebody in an empty folder, with the environment of the tests."""
    yield from _newcomer(installs=False)


@pytest.fixture(scope="module")
def settled() -> Iterator[Newcomer]:
    """One who has typed the README and the beginning of the page, which its passages share."""
    for newcomer in _newcomer(installs=False):
        newcomer.follow(the_minute(), with_errors=False)
        newcomer.follow(a_postgres())
        yield newcomer


@pytest.fixture
def stranger() -> Iterator[Newcomer]:
    """Somebody in a fresh checkout, with a Python and nothing installed."""
    yield from _newcomer(installs=True)


def _newcomer(*, installs: bool) -> Iterator[Newcomer]:
    # Not pytest's own directory: another pytest of root takes the server's user its way to it.
    with tempfile.TemporaryDirectory(prefix="pgqueue-test-") as temporary:
        folder, home = Path(temporary) / "spark-pgqueue", Path(temporary) / "home"
        folder.mkdir()
        home.mkdir()
        if installs:
            for name in PACKAGE:
                if (ROOT / name).is_dir():
                    shutil.copytree(
                        ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / name, folder / name)
        try:
            yield Newcomer(folder, home, installs)
        finally:
            if (folder / "pgqueue-data" / "data" / "postmaster.pid").exists():
                embedded.start(folder / "pgqueue-data").stop()


def the_minute() -> list[Block]:
    return passage(README, "Your first worker in one minute")[:5]


def a_postgres() -> list[Block]:
    return passage(PAGE, "Start a Postgres")


# The README


def test_the_minute_of_the_readme(settled: Newcomer):
    assert "python app.py" in settled.typed


@pytest.mark.longer
@pytest.mark.timeout(900)
def test_a_fresh_checkout(stranger: Newcomer):
    """With an environment of its own, as the page says; but PySpark is not downloaded once more."""
    stranger.follow(a_postgres())
    stranger.follow(passage(PAGE, "Send and receive in a shell"))
    assert (stranger.folder / ".venv/bin/pgqueue").exists()


def test_a_first_message_is_handled_with_six_commands():
    """Within a minute of a fresh checkout: the commands are counted, and none of them asks."""
    blocks = the_minute()
    commands = [each for b in blocks if b.language == "sh" for each in b.text.splitlines()]
    assert len(commands) == 6
    assert [b.file for b in blocks if b.language == "python"] == ["jobs.py", "app.py"]
    assert blocks[-1].text == "order 7: billed 12 EUR\n"


# The ways to begin


def test_python(settled: Newcomer):
    settled.follow(passage(PAGE, "Send and receive in Python"))


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.usefixtures("spark_environment")
def test_pyspark_script(settled: Newcomer):
    settled.follow(passage(PAGE, "Read and write with Spark"), with_errors=False)


@pytest.mark.longer
def test_existing_postgres(newcomer: Newcomer, empty_url: str, conn_of_owner: psycopg.Connection):
    for role in ("me", "shop"):
        newcomer.urls[f"postgresql://{role}@host/db"] = make_conninfo(empty_url, user=role)
    newcomer.urls["postgresql://admin@host/db"] = empty_url
    (grant, *rest) = passage(PAGE, "Use an existing Postgres")
    assert grant.language == "sql"
    before = newcomer.type("export PGQUEUE_URL=postgresql://me@host/db; pgqueue install")
    assert "permission denied for database" in before, "it may do nothing yet"
    conn_of_owner.execute(grant.text.replace(" db ", f" {conn_of_owner.info.dbname} ").encode())
    newcomer.follow(rest)


@pytest.fixture
def conn_of_owner(empty_url: str) -> Iterator[psycopg.Connection]:
    """A connection of the owner of a database, on whose server are the roles me and shop."""
    with connection.connect(empty_url) as conn:
        conn.execute("create role me login; create role shop login")
        # Groups of the schema, which roles of the server share, may be there: then an administrator
        # of theirs is who installs.
        for name in conn.execute(
            "select rolname from pg_roles where rolname in"
            " ('pgqueue_producer', 'pgqueue_consumer', 'pgqueue_observer', 'pgqueue_admin')"
        ).fetchall():
            conn.execute(f"grant {name[0]} to me with admin option".encode())
        try:
            yield conn
        finally:
            conn.execute("drop owned by me, shop cascade; drop role me, shop")


def test_each_way_is_typed():
    """No passage of the page is left out."""
    typed = set(re.findall(r'passage\(PAGE, "(.+?)"\)', Path(__file__).read_text()))
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert {each for each in headings if passage(PAGE, each)} == typed
