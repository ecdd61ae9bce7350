"""Running the notebooks. `python -m tests.notebooks` stores them with new outputs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = ROOT / "notebooks"


def execute(notebook: Any, folder: Path) -> None:
    """Run a notebook in a folder, with the package of this checkout; keeps outputs but no stderr.

    Raises:
        CellExecutionError: a cell failed.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    try:
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=300, resources=where).execute()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]


def store(path: Path) -> None:
    """Run a notebook, and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
