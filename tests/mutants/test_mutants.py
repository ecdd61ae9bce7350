"""A sample of `make mutants`: faults in the SQL are found by the tests that found them before."""

import os
import random
from pathlib import Path

import pytest

from tests.mutants.faults import by_name
from tests.mutants.judging import Copy, found


@pytest.mark.longer
@pytest.mark.timeout(900)
def test_faults_are_found_again(tmp_path: Path) -> None:
    """12 of them, but for one: some are found by races. `make mutants` finds others."""
    seed = int(os.environ.get("PGQUEUE_TEST_SEED") or random.randrange(10_000))
    faults = by_name()
    known = sorted(name for name in found() if name in faults)
    assert len(known) >= 20, "run make mutants"
    copy = Copy(tmp_path, patience=30)
    lives = []
    for name in random.Random(seed).sample(known, 12):
        if copy.finds(faults[name], [found()[name]]) is None:
            lives.append(name)
    assert len(lives) <= 1, f"PGQUEUE_TEST_SEED={seed}: {lives}"
