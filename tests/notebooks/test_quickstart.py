"""The notebook quickstart: it runs from nothing, and is stored with its outputs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, execute

QUICKSTART = NOTEBOOKS / "quickstart.ipynb"


def outputs_of(notebook):
    return [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_it_runs(monkeypatch):
    notebook = nbformat.read(QUICKSTART, as_version=4)
    # Not tmp_path: another pytest of root shuts that to the user of the embedded server.
    with tempfile.TemporaryDirectory(prefix="pgqueue-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        execute(notebook, Path(folder))
        assert list(Path(folder).glob("pgqueue-quickstart-*")) == []
    assert any("image/png" in each.get("data", {}) for each in outputs_of(notebook))


def test_it_is_stored_with_its_outputs():
    notebook = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run from top to bottom, once"
    outputs = outputs_of(notebook)
    assert any("image/png" in each.get("data", {}) for each in outputs)
    assert all(each.output_type != "error" and each.get("name") != "stderr" for each in outputs)


def test_it_shows_nothing_of_the_machine_it_ran_on():
    text = QUICKSTART.read_text()
    for place in (str(Path.home()), tempfile.gettempdir() + "/pgqueue", "/site-packages/"):
        assert place not in text
