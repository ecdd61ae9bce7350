"""Run all notebooks, or those that are named, and store them with their outputs."""

import sys

from tests.notebooks import NOTEBOOKS, store

for path in sorted(NOTEBOOKS.glob("*.ipynb")):
    if path.stem in sys.argv[1:] or not sys.argv[1:]:
        print(path.name)
        store(path)
