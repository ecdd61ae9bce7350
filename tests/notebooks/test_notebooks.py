"""The notebooks: each runs from nothing, and is stored with its outputs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, execute

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def outputs_of(notebook):
    return [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]


def kinds_of(notebook):
    """What it shows: text, tables, pictures."""
    return {kind for each in outputs_of(notebook) for kind in each.get("data", {})}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
@each_notebook
def test_it_runs_and_leaves_nothing_behind(path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    stored = kinds_of(notebook)
    # Not tmp_path: another pytest of root shuts that to the user of the embedded server.
    with tempfile.TemporaryDirectory(prefix="pgqueue-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        execute(notebook, Path(folder))
        left = {path.name for path in Path(folder).glob("pgqueue-*")}
        # The seats of Spark's sources: empty files, which the next source deletes.
        assert left <= {f"pgqueue-spark-{os.getuid()}"}
    assert kinds_of(notebook) == stored


@each_notebook
def test_it_is_stored_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run from top to bottom, once"
    outputs = outputs_of(notebook)
    assert outputs
    assert all(each.output_type != "error" and each.get("name") != "stderr" for each in outputs)


@each_notebook
def test_it_shows_nothing_of_the_machine_it_ran_on(path):
    text = path.read_text()
    for place in (str(Path.home()), tempfile.gettempdir() + "/pgqueue", "/site-packages/"):
        assert place not in text


def test_the_quickstart_has_a_picture():
    assert "image/png" in kinds_of(nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4))


def test_every_notebook_is_in_the_table():
    text = (NOTEBOOKS / "README.md").read_text()
    assert [path.name for path in PATHS if f"| `{path.name}` |" not in text] == []
