"""The site has all pages, by reader and task, and no link of it leads nowhere."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.pages import ROOT, all_pages
from tests.site import navigation
from tests.site.__main__ import build


def test_each_page_is_in_the_navigation_once():
    named = [page for pages in navigation.SECTIONS.values() for page in pages.values()]
    pages = [str(page.relative_to(ROOT).with_suffix("")) for page in all_pages()]
    pages = [page for page in pages if page in navigation.BELOW or not is_below(page)]
    assert sorted([*named, "README"]) == sorted(pages)


def is_below(page: str) -> bool:
    return any(fnmatch(f"/{page}", pattern) for pattern in navigation.BELOW.values())


@pytest.mark.longer
@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path: Path):
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    made = {str(page.relative_to(tmp_path).with_suffix("")) for page in tmp_path.rglob("*.html")}
    notebooks = {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in all_pages()}
    assert {"index", "search", *pages, *notebooks} <= made
    assert "visibl" in (tmp_path / "searchindex.js").read_text()  # the stem of a word of the pages
    assert "https://" not in "".join(
        line for line in (tmp_path / "README.html").read_text().splitlines() if "<script" in line
    ), "a page loads nothing from elsewhere"


@pytest.mark.longer
def test_a_link_that_leads_nowhere_fails_the_site(tmp_path: Path):
    targets = ["nowhere.md", "#nothing", "missing.svg"]
    links = " ".join(f"![a picture]({target}) [a link]({target})" for target in targets)
    (tmp_path / "README.md").write_text(f"# A page\n\n{links}\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert [each for each in targets if each.strip("#") not in built.stderr] == []


PICTURES = [
    path for folder in ("spark_pgqueue", "sql") for end in ("svg", "png")
    for path in (ROOT / folder).rglob(f"*.{end}")
]  # fmt: skip


@pytest.mark.parametrize("picture", PICTURES, ids=[path.stem for path in PICTURES])
def test_a_picture_is_small_and_loads_nothing(picture: Path):
    """`python -m tests.site.pictures` makes it anew."""
    content = picture.read_bytes()
    assert len(content) < 150_000
    assert not re.search(rb"(?:url\(|href=|src=)[\"']?https?:", content)
