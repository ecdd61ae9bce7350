"""The pages of the guide do what they say. Those with Spark: tests/spark/test_guides.py."""

import re

import pytest

from spark_pgqueue import metrics
from tests.pages import blocks_of, environment_of, guides, type_all, uses_spark

PAGES = [page for page in guides() if not uses_spark(page)]


@pytest.mark.longer
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_reader_can_type_all_of_it(page, url, tmp_path, monkeypatch):
    """From an empty queue; what the page shows is printed."""
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    type_all(page, url, tmp_path, {"__name__": "__main__"})


@pytest.mark.parametrize("page", guides(), ids=[page.stem for page in guides()])
def test_every_block_is_of_a_known_kind(page):
    """What is sql, sh or python is run, and prints what is output; text is a drawing or a file."""
    others = {"js", "java", "go"} if page.stem == "languages" else set()  # test_languages.py
    known = {"sql", "sh", "python", "output", "text"} | others
    assert {tag for tag, _ in blocks_of(page.read_text())} <= known


def test_the_metrics_that_pages_name_are_there():
    """A counter with the suffix that Prometheus has it by, so that an alert can be pasted."""
    names = {"pgqueue_up"}
    for family in metrics.FAMILIES:
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    named = re.compile(r"pgqueue_(?:up|(?:stream|consumer|group)_[a-z_]+[a-z])\b")
    found = {(name, page.stem) for page in guides() for name in named.findall(page.read_text())}
    assert [each for each in sorted(found) if each[0] not in names] == []
    assert len(found) > 8
