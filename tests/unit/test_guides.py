"""The pages of sql/guide do what they say."""

import re
from pathlib import Path

import pytest

from spark_pgqueue import metrics
from tests.pages import blocks_of, environment_of, type_all

FOLDERS = [Path(__file__).parents[2] / folder / "guide" for folder in ("sql", "spark_pgqueue")]
# Those of Spark: tests/spark/test_guides.py. The first hour begins without a database, and shows
# what is printed: tests/test_newcomers.py.
PAGES = sorted(page for page in FOLDERS[0].glob("*.md") if page.stem != "first-hour")
ALL_PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]


@pytest.mark.longer
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_reader_can_type_all_of_it(page, url, tmp_path, monkeypatch):
    """From an empty queue."""
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    type_all(page, url, tmp_path, {"__name__": "__main__"})


def test_pages_that_are_read_one_after_the_other_make_no_name_twice():
    """In any order, in one database: nobody is told that a stream or a table exists already."""
    made: dict[str, str] = {}
    for page in (Path(__file__).parents[2] / "README.md", *ALL_PAGES):
        text = page.read_text().split("\n## A Postgres that is there already\n")[0]
        code = "\n".join(text for _, text in blocks_of(text))
        names = re.findall(r"\b(?:create_stream\([\"']([^\"']+)|stream create (\S+))", code)
        tables = re.findall(r"\bcreate table (\w+)", code)
        for name in {*("stream " + (a or b) for a, b in names), *("table " + t for t in tables)}:
            assert name not in made, f"{page.name} makes {name}, and {made[name]} does"
            made[name] = page.name
    assert len(made) > 50


def test_pages_of_spark_make_no_stream_and_no_folder_twice():
    """They are read one after the other, in one database, by one session: checkpoints too."""
    made: dict[str, str] = {}
    for page in sorted(FOLDERS[1].glob("*.md")):
        code = "\n".join(text for _, text in blocks_of(page.read_text()))
        streams = re.findall(r"\bcreate_stream\('([^']+)", code)
        folders = re.findall(r'(?:checkpointLocation", |abspath\()"([^"]+)"', code)
        for name in {*streams, *folders}:
            assert name not in made, f"{page.name} makes {name}, and {made[name]} does"
            made[name] = page.name
    assert len(made) > 20


@pytest.mark.parametrize("page", ALL_PAGES, ids=[page.stem for page in ALL_PAGES])
def test_every_block_is_of_a_known_kind(page):
    """What is sql, sh or python is run; a drawing, or what is printed, is text."""
    others = {"js", "java", "go"} if page.stem == "languages" else set()  # test_languages.py
    known = {"sql", "sh", "python", "text"} | others
    assert {tag for tag, _ in blocks_of(page.read_text())} <= known


def test_the_metrics_that_pages_name_are_there():
    """A counter with the suffix that Prometheus has it by, so that an alert can be pasted."""
    names = {"pgqueue_up"}
    for family in metrics.FAMILIES:
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    named = re.compile(r"pgqueue_(?:up|(?:stream|consumer|group)_[a-z_]+[a-z])\b")
    found = {(name, page.stem) for page in ALL_PAGES for name in named.findall(page.read_text())}
    assert [each for each in sorted(found) if each[0] not in names] == []
    assert len(found) > 10
