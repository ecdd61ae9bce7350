"""The pages of the guide that use Spark do what they say, and all pages together build one shop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pages import ROOT, environment_of, guides, service_of, type_all, uses_spark
from tests.site.navigation import SECTIONS

PAGES = [page for page in guides() if uses_spark(page)]

# What they say is promised has a test of its own.
pytestmark = [pytest.mark.spark, pytest.mark.longer]


@pytest.fixture
def type_page(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> Iterator[Callable[[Path], None]]:
    """Type a page as a reader whose environment names the database, in a Spark session."""
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)
    service_of(url)
    before = str(Path.cwd())
    # Of the reader, Spark was started in that folder: a relative path is one in it.
    jvm: Any = spark.sparkContext._jvm
    system = jvm.java.lang.System

    def type_page(page: Path) -> None:
        folder = tmp_path / page.stem
        folder.mkdir()
        monkeypatch.chdir(folder)
        system.setProperty("user.dir", str(folder))
        type_all(page, url, folder, {"__name__": "__main__", "spark": spark})
        assert not spark.streams.active, "a page ends the queries that it starts"

    yield type_page
    system.setProperty("user.dir", before)
    service_of(None)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_reader_can_type_all_of_it(page: Path, type_page: Callable[[Path], None]) -> None:
    """From an empty queue; what the page shows is printed."""
    type_page(page)


@pytest.mark.timeout(900)
def test_a_reader_who_types_one_page_after_the_other_builds_one_shop(
    type_page: Callable[[Path], None],
) -> None:
    """In one database, in the order of the site; but for a page that begins with pgmq itself."""
    titles = [ROOT / f"{page}.md" for pages in SECTIONS.values() for page in pages.values()]
    read = [page for page in titles if page in guides() and page.stem != "moving"]
    assert len(read) > 30
    for page in read:
        type_page(page)
