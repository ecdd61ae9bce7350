"""The README, and the pages that it leads to, say what the code does."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import psycopg
import pytest

from tests.docs import figures, promises
from tests.docs.defaults import restated
from tests.pages import blocks_of, environment_of, readers_pages, words_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = blocks_of(README)
IN_THE_SHELL = "from pyspark.sql import SparkSession\nspark = SparkSession.builder.getOrCreate()\n"
SUBSCRIBE = "select pgqueue.create_consumer('invoices', 'test', 'earliest')"
RECEIVE = "select key, data from pgqueue.receive('invoices', 'test')"


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


def test_readers_pages_do_not_grow():
    """32,000 words in all. The list of changes grows with each release."""
    pages = [page for page in readers_pages() if page.name != "CHANGELOG.md"]
    assert sum(words_of(page.read_text()) for page in pages) <= 32_000
    shown = "-- => g\n```output\nh\n```\n"
    assert words_of(f"a `b` [c d](e.md) - f=1 | `tests/g.py::h`\n{shown}") == 5


def test_it_is_read_in_a_few_minutes():
    """What is python, sql or sh is run: here, and by tests/test_newcomers.py."""
    assert len(README.splitlines()) <= 110
    assert len(re.findall(r"\]\(", README)) <= 25, "links"
    assert [tag for tag, _ in BLOCKS] == ["sh", "python", "python", "sh", "output", "sql", "python"]
    assert {"make demo", "make test"} <= set(re.findall(r"`(make \w+)`", README))


def test_any_language_can_call_the_sql_behind_the_worker(conn):
    conn.execute("select pgqueue.create_stream('orders', 'json')")
    conn.execute("select pgqueue.create_consumer('orders', 'billing', p_ordering => 'key')")
    (statements,) = [text for tag, text in BLOCKS if tag == "sql"]
    answers = [conn.execute(line.encode()) for line in statements.splitlines()]
    seq, message, acknowledged = [answer.fetchone() for answer in answers]
    assert seq == (1,)
    assert '{"order": 8, "total": 5}' in message
    assert acknowledged == (0,)  # it was of another claim


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark_environment")
def test_spark_publishes_what_it_reads_in_the_pyspark_shell(url, conn, tmp_path):
    conn.execute("select pgqueue.create_stream('orders'), pgqueue.create_stream('invoices')")
    conn.execute("select pgqueue.create_consumer('orders', 'invoicing')")
    conn.execute(SUBSCRIBE)
    conn.execute("select pgqueue.send('orders', '{\"total\": 12}', 'customer 7')")
    script = f"{IN_THE_SHELL}{BLOCKS[-1][1]}\nimport time; time.sleep(600)\n"  # it stays open
    with running(script, url, tmp_path) as process:
        assert received(process, conn, tmp_path) == ("customer 7", '{"TOTAL": 12}')


def test_the_commands_and_files_that_it_names_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE)):
        assert f"\n{target}:" in makefile, target
    for name in set(re.findall(r"`((?:sql|tests|notebooks)/[\w./]+)`", README)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("file", figures.FILES)
def test_pages_state_the_figures_that_are_kept(file):
    assert file.read_text() == figures.page(file), "`make docs` writes the figures"


def test_a_figure_of_a_page_is_one_of_the_kept_run(tmp_path, monkeypatch):
    """A page that lacks its sentence, and a run that lacks a case, are errors."""
    run = figures.kept()
    lost = run.cases.pop(run.cases.index(figures.case_of(run, figures.HEADLINES[0])))
    monkeypatch.setattr(figures, "kept", lambda: run)
    with pytest.raises(LookupError, match=lost.line):
        figures.page(figures.README)
    with pytest.raises(LookupError, match="lacks"):
        restated("page", "On 2 machines", r"On (\d+) cores", ["2"])


def test_each_promise_that_a_page_lists_is_the_mark_of_a_test():
    marked = promises.marked()
    for kind, names in promises.listed().items():
        assert len(names) > 15, kind
        assert [name for name in names if f"{kind}: {name}" not in marked] == []
    page = (ROOT / "sql/guide/guarantees.md").read_text()
    numbers = re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)
    assert numbers == [str(number + 1) for number in range(len(numbers))]


def test_both_pictures_are_the_same_but_for_their_colours():
    pictures = ROOT / "spark_pgqueue/guide/pictures"
    light, dark = [
        re.sub(r"#[0-9a-f]{6}", "#", (pictures / f"overview-{theme}.svg").read_text())
        for theme in ("light", "dark")
    ]
    assert light == dark
    assert ElementTree.fromstring(light).tag.endswith("svg")


def test_every_row_of_a_table_is_shown_as_one():
    """A line between rows would end the table; a row has as many cells as its heading."""
    wrong = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in {*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/guide/*.md")}
        for line in broken_tables(page.read_text())
    ]
    assert wrong == []
    split = "| a | b |\n|---|---|\n| c \\| d | `|` |\n| e |\n\n| f | g |\n"
    assert broken_tables(split) == ["| e |", "| f | g |"]


def broken_tables(page: str) -> list[str]:
    """The first lines of tables without a heading, and rows with too few or too many cells."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = table.splitlines()
        if len(rows) < 2 or not re.fullmatch(r"\|(?:[ :]*-+[ :]*\|)+", rows[1]):
            found.append(rows[0])
            continue
        found += [row for row in rows if cells_of(row) != cells_of(rows[0])]
    return found


def cells_of(row: str) -> int:
    return re.sub(r"`[^`]*`|\\\|", "", row).count("|")


def test_every_page_is_in_the_index_of_pages():
    index = ROOT / "sql/guide/README.md"
    linked = {
        (index.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#]+\.md)", index.read_text())
    }
    assert {*ROOT.glob("*/guide/*.md")} - linked == {index}


def named_tests_in(text: str) -> list[tuple[str, str]]:
    """The files and functions that a text calls tests."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


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
    tests: dict[str, set[str]] = {}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/guide/*.md")]
    for page in pages:
        for file, test in named_tests_in(page.read_text()):
            if file not in tests:
                text = (ROOT / file).read_text()
                tests[file] = set(re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE))
            assert test in tests[file], f"{page.name}: {file} has no {test}"
    assert len(tests) > 20


def test_other_pages_link_to_figures_and_repeat_none():
    """What is not written from the kept run would be old after the next one."""
    stated = figures.stated(figures.kept())
    for page in (ROOT / "sql/guide").glob("*.md"):
        written = stated.get(page, [])
        known = {value for _, values in written for value in values} | {"1,000"}  # of examples
        repeated = re.findall(r"(\d+,\d{3}) (?:messages )?a second", page.read_text())
        assert {*repeated} <= known, page
