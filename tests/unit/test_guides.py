"""The pages of sql/guide do what they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spark_pgqueue import embedded
from tests.pages import blocks_of, environment_of, run, run_commands

GUIDE = Path(__file__).parents[2] / "sql" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_reader_can_type_all_of_it(page, url, tmp_path, monkeypatch):
    """Block after block, from an empty queue: psql, a shell, and one session of Python.

    Python has the page's blocks run here, so that what a block imported and made is there for the
    next one.
    """
    psql = shutil.which("psql") or str(embedded.find_binaries(18) / "psql")
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    python: dict[str, object] = {"__name__": "__main__"}
    for number, (language, text) in enumerate(blocks_of(page.read_text())):
        if language == "sql":
            run([psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", url], url, tmp_path, stdin=text)
        elif language == "sh":
            run_commands(text, url, tmp_path)
        elif language == "python":
            exec(compile(text, f"{page.name}, block {number + 1}", "exec"), python)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_block_is_of_a_known_kind(page):
    """What is sql, sh or python is run; a drawing, or what is printed, is text."""
    assert {tag for tag, _ in blocks_of(page.read_text())} <= {"sql", "sh", "python", "text"}
