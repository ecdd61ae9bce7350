"""Checks all models, also those that take minutes: `python -m tests.specification`."""

import tempfile
import time
from pathlib import Path

from tests.specification.checker import RUNS, check

if __name__ == "__main__":
    for run in RUNS:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            states, error = check(run, Path(folder))
        how = "a sample of" if run.is_sample else "all"
        print(f"{run.name}: {error or 'ok'}, {how} {states:,} states,", end=" ")
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
