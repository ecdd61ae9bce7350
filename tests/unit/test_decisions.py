"""The records of decisions have one form, are in their index, and name what there is."""

import re
from pathlib import Path

import pytest

from tests.pages import ROOT, words_of
from tests.unit.test_links import links_of
from tests.unit.test_maps import defines, find, places_in

FOLDER = ROOT / "sql/decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
PARTS = ["Context", "Decision", "Rejected", "Consequences", "In code", "Tests"]
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
FILE = re.compile(r"`([\w/]+(?:\.(?:sql|py|pml)|/))`")


def test_the_index_has_each_record_once_and_in_order():
    index = (FOLDER / "README.md").read_text()
    named = [link for link in links_of(index) if link[0].isdigit()]
    assert named == [record.name for record in RECORDS]
    assert [int(name[:2]) for name in named] == list(range(1, len(named) + 1))


@pytest.mark.parametrize("record", RECORDS, ids=[record.stem for record in RECORDS])
def test_a_record_is_short_and_has_its_parts(record: Path):
    text = record.read_text()
    assert text.startswith(f"# {record.name[:2]}. ")
    assert re.findall(r"^\*\*([\w ]+)\.\*\*", text, re.MULTILINE) == PARTS
    assert words_of(text) <= 250


@pytest.mark.parametrize("record", RECORDS, ids=[record.stem for record in RECORDS])
def test_a_record_names_code_and_tests_that_are_there(record: Path):
    text = record.read_text()
    code, _, tests = text.partition("**In code.**")[2].partition("**Tests.**")
    named = TEST.findall(tests)
    assert named
    for file, test in named:
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
    missing = [f"{file}: {name}" for file, name in places_in(code) if not is_defined(file, name)]
    files = [file for file in FILE.findall(code + tests) if not is_there(file)]
    assert missing + files == []


def is_defined(file: str, name: str) -> bool:
    path = find(file)
    return path is not None and defines(path, name)


def is_there(file: str) -> bool:
    return bool(find(file)) or (ROOT / "tests/specification" / file).exists()
