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


def execute(notebook: Any, folder: Path) -> str:
    """Run a notebook in a folder, with the package of this checkout; keeps outputs but no stderr.

    Returns:
        what the cells, Spark and other processes wrote to standard error.

    Raises:
        CellExecutionError: a cell failed.
    """
    environment = {**os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    )
    # With it, the kernel does not show what other processes write, as it does to a reader.
    environment.pop("PYTEST_CURRENT_TEST", None)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=600, resources=where)
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        client.execute(env=environment, stderr=written)
        written.seek(0)
        errors = written.read()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            shown = (each.text for each in cell.outputs if each.get("name") == "stderr")
            errors += "".join(text for text in shown if text not in errors)
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return errors


def store(path: Path) -> None:
    """Run a notebook, and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        print(execute(notebook, Path(folder)), end="")
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
