"""The notebooks: each runs from nothing, and is stored with its outputs."""

from __future__ import annotations

import base64
import os
import re
import tempfile
from contextlib import nullcontext
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, execute
from tests.processes import connect_port
from tests.unit.test_links import anchors_of, links_of

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
QUICK = {"4-replay-and-history"}
PARAMETERS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.longer)
    for path in PATHS
]
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)

JAVA_STACK = re.compile(r"\tat (?:org|java|scala|py4j)\.|Exception in thread|Py4JJavaError")
LARGEST = {"image/png": 60_000, "text/html": 120_000}  # bytes of an output
LARGEST_TEXT = 4_000


def outputs_of(notebook):
    return [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]


def kinds_of(notebook):
    """What it shows: text, tables, pictures."""
    return {kind for each in outputs_of(notebook) for kind in each.get("data", {})}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("spark_environment")
@pytest.mark.parametrize("path", PARAMETERS)
def test_it_runs_and_leaves_nothing_behind(path, monkeypatch):
    """And shows no Java stack to whoever runs it."""
    if path.stem == "8-pipelines":
        pytest.importorskip("pyspark.pipelines", reason="PySpark 4.1 and later have pipelines")
    notebook = nbformat.read(path, as_version=4)
    stored = kinds_of(notebook)
    # Not tmp_path: another pytest of root shuts that to the user of the embedded server.
    with tempfile.TemporaryDirectory(prefix="pgqueue-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        with connect_port() if path.stem == "8-pipelines" else nullcontext():
            errors = execute(notebook, Path(folder))
        left = {path.name for path in Path(folder).glob("pgqueue-*")}
        # The seats of Spark's sources: empty files, which the next source deletes.
        assert left <= {f"pgqueue-{of}-{os.getuid()}" for of in ("spark", "plans")}
    assert kinds_of(notebook) == stored
    assert not JAVA_STACK.search(errors), errors[:4_000]


@each_notebook
def test_it_is_stored_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run from top to bottom, once"
    outputs = outputs_of(notebook)
    assert outputs
    assert all(each.output_type != "error" and each.get("name") != "stderr" for each in outputs)
    assert not JAVA_STACK.search(str(outputs))


@each_notebook
def test_its_outputs_are_small(path):
    for output in outputs_of(nbformat.read(path, as_version=4)):
        assert len(output.get("text", "")) <= LARGEST_TEXT
        for kind, data in output.get("data", {}).items():
            size = len(base64.b64decode(data) if kind == "image/png" else data)
            assert size <= LARGEST.get(kind, LARGEST_TEXT), kind


@each_notebook
def test_it_shows_nothing_of_the_machine_it_ran_on(path):
    text = path.read_text()
    for place in (str(Path.home()), tempfile.gettempdir() + "/pgqueue", "/site-packages/"):
        assert place not in text


@each_notebook
def test_it_is_a_lesson(path):
    """It has a number, says first what is seen and learned, asserts, and cleans up in the end."""
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].source.startswith(f"# {path.stem.partition('-')[0]}. ")
    assert "ou will see " in " ".join(cells[0].source.split())
    assert "\nYou will learn to\n\n- " in cells[0].source
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert "assert" in "".join(code)
    assert code[-1].endswith("queue.close()\nserver.close()\nshutil.rmtree(folder)")


def test_the_lessons_about_what_is_seen_have_pictures():
    for name in ("2-fan-out", "6-workers-by-key", "7-watching"):
        assert "image/png" in kinds_of(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4))


def test_every_notebook_is_in_the_table():
    text = (NOTEBOOKS / "README.md").read_text()
    assert re.findall(r"^\| \[(\S+\.ipynb)\]\(\1\) \|", text, re.M) == [p.name for p in PATHS]
    assert {path.stem for path in PATHS} >= QUICK


@each_notebook
def test_its_links_lead_somewhere(path):
    cells = nbformat.read(path, as_version=4).cells
    for link in links_of("\n".join(c.source for c in cells if c.cell_type == "markdown")):
        target, _, anchor = link.partition("#")
        assert (NOTEBOOKS / target).exists(), link
        if anchor:
            assert anchor in anchors_of((NOTEBOOKS / target).read_text()), link
