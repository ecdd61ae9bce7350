"""The README says what the code does."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection
from spark_pgqueue.spark.columns import ACTION_COLUMNS, MESSAGE_COLUMNS
from spark_pgqueue.spark.options import (
    CURSOR_OPTIONS,
    SINK_OPTIONS,
    SOURCE_OPTIONS,
    TABLE_OPTIONS,
)
from tests.pages import GIVEN_URL, blocks_of, environment_of, run_commands

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = blocks_of(README)
IN_THE_SHELL = "from pyspark.sql import SparkSession\nspark = SparkSession.builder.getOrCreate()\n"
SUBSCRIBE = "select pgqueue.create_consumer('invoices', 'test', 'earliest')"
RECEIVE = "select key, data from pgqueue.receive('invoices', 'test')"


def snippet(language: str, holds: str) -> str:
    """The only block of a language that holds a text."""
    (found,) = [text for tag, text in BLOCKS if tag == language and holds in text]
    return found


COMMANDS = snippet("sh", "pgqueue install")


@contextmanager
def running(script: str, url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script, until the test has seen its effect; what it prints is in script.log."""
    (folder / "script.py").write_text(script)
    with (
        (folder / "script.log").open("wb") as log,
        subprocess.Popen(
            ["python", "script.py"],
            env=environment_of(url),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def received(process: subprocess.Popen[bytes], conn: psycopg.Connection, folder: Path) -> tuple:
    """The first message that comes to the consumer test while the process runs."""
    end = time.monotonic() + 150
    while (message := conn.execute(RECEIVE).fetchone()) is None:
        log = (folder / "script.log").read_text()
        assert process.poll() is None, f"it ended with {process.returncode}:\n{log}"
        assert time.monotonic() < end, log
        time.sleep(0.1)
    return message


def test_every_block_is_of_a_known_kind():
    """What is python, sql or sh is run below; a table or a drawing is text."""
    assert [tag for tag, _ in BLOCKS].count("python") == 4
    assert [tag for tag, _ in BLOCKS].count("sql") == 1
    assert [tag for tag, _ in BLOCKS].count("sh") == 2
    assert {tag for tag, _ in BLOCKS} == {"python", "sql", "sh", "text"}


def test_the_commands_lead_from_an_empty_database_to_a_message(empty_url, tmp_path):
    assert "schema pgqueue: version" in run_commands(COMMANDS, empty_url, tmp_path)
    with connection.connect(empty_url) as conn:
        rows = conn.execute("select key, data from pgqueue.receive('orders', 'billing')").fetchall()
    assert rows == [("customer 7", '{"total": 12}')]


def test_the_sql_runs_from_an_empty_queue(url):
    with connection.connect(url) as conn:
        answers = [conn.execute(line.encode()) for line in snippet("sql", "send").splitlines()]
        *_, seq, message, acknowledged = [answer.fetchone() for answer in answers]
    assert seq == (1,)
    assert message is not None
    assert '{"total": 12}' in message
    assert acknowledged == (0,)  # it was of another claim


def test_the_client_receives_what_it_sends(empty_url, tmp_path):
    run_commands(COMMANDS, empty_url, tmp_path)
    (tmp_path / "script.py").write_text(snippet("python", "queue.receive"))
    said = run_commands("python script.py", empty_url, tmp_path)
    assert said == '1 customer 7 {"total": 12}\n2 customer 7 order 1\n'


def test_the_embedded_server_is_there_for_the_commands(tmp_path):
    (tmp_path / "script.py").write_text(snippet("python", "embedded.start"))
    try:
        export = run_commands("python script.py", "dbname=none", tmp_path).strip()
        commands = COMMANDS.replace(f"export PGQUEUE_URL={GIVEN_URL}", export)
        assert export in commands
        assert "schema pgqueue: version" in run_commands(commands, "dbname=none", tmp_path)
    finally:
        embedded.start(tmp_path / "my-data").stop()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark_environment")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(
            IN_THE_SHELL + snippet("python", "invoices.option"),
            '{"TOTAL": 12}',
            marks=pytest.mark.longer,
        ),
        (snippet("python", "awaitTermination"), '{"seq":1,"data":"{\\"total\\": 12}"}'),
    ],
    ids=["in the pyspark shell", "as a script"],
)
def test_spark_publishes_what_it_reads(empty_url, tmp_path, script, expected):
    run_commands(COMMANDS, empty_url, tmp_path)
    with connection.connect(empty_url) as conn:
        conn.execute(SUBSCRIBE)
        if "awaitTermination" not in script:
            script += "\nimport time; time.sleep(600)\n"  # the shell stays open
        with running(script, empty_url, tmp_path) as process:
            assert received(process, conn, tmp_path) == ("customer 7", expected)


def options_of(section: str) -> dict[str, tuple[str, str]]:
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    table = text.split("| option | value | default | |\n")[1].split("\n\n")[0]
    rows = [re.split(r" \| ", line.strip("| \n")) for line in table.splitlines()[1:]]
    return {row[0].strip("`"): (row[1], row[-1]) for row in rows}


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ("The source", SOURCE_OPTIONS),
        ("Reading a stream without a consumer", CURSOR_OPTIONS),
        ("Reading in batches", TABLE_OPTIONS),
        ("The sink", SINK_OPTIONS),
    ],
)
def test_every_option_is_in_the_table(section, options):
    assert options_of(section) == {each.name: (each.allowed, each.help) for each in options}


def test_every_column_of_the_sink_is_in_a_table():
    text = README.split("\n## The sink\n")[1].split("\n## ")[0]
    tables = [table.split("\n\n")[0] for table in text.split("| column | type | |\n")[1:]]
    found = [
        set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", t, re.M)))) for t in tables
    ]
    assert found == [set(MESSAGE_COLUMNS), set(ACTION_COLUMNS)]


def test_the_commands_are_in_the_makefile():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE)):
        assert f"\n{target}:" in makefile, target


def test_the_files_it_names_exist():
    for name in set(re.findall(r"`((?:sql|tests|notebooks)/[\w./]+)`", README)):
        assert (Path(__file__).parents[2] / name).exists(), name


def test_what_stands_beside_the_peers_is_there():
    """Each row names its page, what that page calls it, and tests that exist; or says no."""
    folder = Path(__file__).parents[2]
    table = README.split("\n## Beside its peers\n")[1].split("\n## ")[0].split("|---|\n")[-1]
    rows = [[cell.strip() for cell in row[1:-1].split("|")] for row in table.strip().splitlines()]
    assert {len(row) for row in rows} == {4}
    for feature, peers, here, tests in rows:
        if not peers and not here:
            assert feature.startswith("**"), f"{feature} is no heading"
            continue
        assert peers, feature
        if here.startswith("**no**: "):
            assert not tests, feature
            continue
        pages = re.findall(r"\]\((sql/guide/[\w-]+\.md)", here)
        text = "".join((folder / page).read_text() for page in pages)
        assert [name for name in re.findall(r"`([^`]+)`", here) if name not in text] == [], feature
        assert named_tests_in(tests), f"{feature} names no test"


def named_tests_in(text: str) -> list[tuple[str, str]]:
    """The files and functions that a text calls tests; all of them exist."""
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    for file, test in found:
        defined = ast.walk(ast.parse((Path(__file__).parents[2] / file).read_text()))
        names = [each.name for each in defined if isinstance(each, ast.FunctionDef)]
        assert test in names, f"{file} has no {test}"
    return found


def test_the_tests_exist_that_the_pages_of_spark_name():
    folder = Path(__file__).parents[2] / "spark_pgqueue" / "guide"
    assert [page.stem for page in folder.glob("*.md") if named_tests_in(page.read_text())]


def test_the_package_says_where_each_module_is():
    package = Path(__file__).parents[2] / "spark_pgqueue"
    text = (package / "README.md").read_text()
    modules = {file.stem for file in package.rglob("*.py") if not file.stem.startswith("__")}
    for folder in ("client/calls", "command_line/commands"):  # a file per topic
        modules -= {file.stem for file in (package / folder).glob("*.py")}
    assert [name for name in sorted(modules) if f"`{name}`" not in text] == []
    for name in re.findall(r"`([\w./]+\.(?:py|sql|md))`", text):
        assert (package / name).exists(), name


def test_tests_that_pages_name_are_there():
    folder = Path(__file__).parents[2]
    tests: dict[str, set[str]] = {}
    pages = [*folder.glob("*.md"), *folder.glob("*/*.md"), *folder.glob("*/guide/*.md")]
    for page in pages:
        for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
            if file not in tests:
                defined = ast.walk(ast.parse((folder / file).read_text()))
                tests[file] = {e.name for e in defined if isinstance(e, ast.FunctionDef)}
            assert test in tests[file], f"{page.name}: {file} has no {test}"
    assert len(tests) > 20
