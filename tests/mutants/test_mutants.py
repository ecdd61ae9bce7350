"""A sample of `make mutants`: tests find most of the faults that somebody plants in the SQL."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.calls import kept
from tests.mutants.faults import draw
from tests.mutants.judging import ROOT, Copy


@pytest.mark.longer
@pytest.mark.timeout(900)
def test_a_few_short_tests_find_most_faults(tmp_path: Path) -> None:
    """Of 20 faults, by the tests that `make mutants` kept of their functions."""
    seed = int(os.environ.get("PGQUEUE_TEST_SEED") or random.randrange(10_000))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    collected = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    exist = set(collected.stdout.splitlines())
    tests = {name: [each for each in of if each in exist] for name, of in kept().items()}
    copy = Copy(tmp_path)
    lives = []
    for fault in draw(seed, 20, of=lambda fault: bool(tests.get(fault.function))):
        if not copy.finds(fault, tests[fault.function]):
            lives.append(str(fault))
    assert len(lives) <= 10, f"seed {seed}"
