"""Links in pages lead to what is there, and nothing else lies about."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT, all_pages

PAGES = all_pages()
LINK = re.compile(
    r"""\]\(([^()\s]+)\)           # [text](target), also of a picture
    | \b(?:src|srcset|href)="([^"]+)\"""",
    re.VERBOSE,
)
NAMED = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:md|pml|py|sql))(?:::\w+)?`")
FOLDERS = [ROOT / each for each in (".", "sql", "tests", "spark_pgqueue", "spark_pgqueue/spark")]
"""A page names a file from the top, from its own folder, or from one of these."""

OF_OTHERS = {"sql/pgque.sql", ".github/SECURITY.md"}
"""Files of another repository, and of a host that is not chosen yet."""


def links_of(page: str) -> list[str]:
    """The targets of the links of a page, without those in code."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    return [one or other for one, other in LINK.findall(text)]


@functools.cache
def anchors_of(page: str) -> set[str]:
    """What a link to a heading of a page ends with, as GitHub makes it."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    anchors: list[str] = re.findall(r'<a (?:id|name)="([^"]+)"', text)
    for heading in re.findall(r"^#+ (.+?)\s*#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        before = anchors.count(anchor)
        anchors.append(anchor if not before else f"{anchor}-{before}")
    return set(anchors)


def test_every_link_leads_to_a_file_and_a_heading():
    wrong = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in links_of(page.read_text())
        if not leads_somewhere(page, target)
    ]
    assert wrong == []


def leads_somewhere(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True  # elsewhere: no test asks the internet
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not (file.is_relative_to(ROOT) and file.exists()):
        return False
    return not anchor or anchor in anchors_of(file.read_text())


def test_every_file_that_a_page_names_is_there():
    """Also where it is no link: a page once explained a file that was gone, with its words."""
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in NAMED.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        if not any((folder / name).exists() for folder in (page.parent, *FOLDERS))
    ]
    assert {each for each in missing if each.split(": ")[1] not in OF_OTHERS} == set()


def test_nothing_lies_about_at_the_top():
    """What a page or a test wrote where it stood would be committed with the rest."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("no git, or no checkout")
    folders = {"spark_pgqueue", "sql", "tests", "notebooks", ".ci"}
    files = {"pyproject.toml", "Makefile", "LICENSE", ".gitignore"}
    files |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert {name.split("/")[0] for name in listed.stdout.splitlines()} <= folders | files


def test_links_are_found():
    page = '[a](b.md#c) ![d](e.svg) <img src="f.png"> `[no](g.md)`\n```sh\n[no](h.md)\n```\n[i](#j)'
    assert links_of(page) == ["b.md#c", "e.svg", "f.png", "#j"]
    assert len(PAGES) > 30


def test_a_heading_has_the_anchor_that_github_gives_it():
    page = "# One: `two`, three\n## [Four](five.md) & six\n## One: two, three\n"
    assert anchors_of(page) == {"one-two-three", "four--six", "one-two-three-1"}
