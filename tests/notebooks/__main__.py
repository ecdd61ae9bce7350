"""Run all notebooks, and store them with their outputs."""

from tests.notebooks import NOTEBOOKS, store

for path in sorted(NOTEBOOKS.glob("*.ipynb")):
    print(path.name)
    store(path)
