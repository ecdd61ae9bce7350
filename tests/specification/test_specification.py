"""The models hold, the models find planted faults, and their steps are functions of the SQL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.specification.checker import FAULTS, FOLDER, RUNS, Run, check, missing

SQL = Path(__file__).parents[2] / "sql"

needs_spin = pytest.mark.skipif(
    bool(missing()), reason=f"apt-get install spin gcc: no {', '.join(missing())} on this machine"
)


@pytest.mark.longer
@needs_spin
@pytest.mark.parametrize("run", [run for run in RUNS if not run.is_long], ids=lambda run: run.name)
def test_no_order_of_steps_breaks_a_promise(run: Run, tmp_path: Path):
    states, error = check(run, tmp_path)
    print(f"{run.name}: {states:,} states")
    assert error is None
    assert states > 100_000  # not a model that stops at its first step


@pytest.mark.longer
@needs_spin
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path):
    assert check(FAULTS[fault], tmp_path).error is not None


@pytest.mark.parametrize("model", ["claims", "gaps", "order"])
def test_each_step_is_a_function_of_the_sql(model: str):
    """Of the models, and of the core that there is."""
    sql = "\n".join(file.read_text() for file in SQL.rglob("*.sql"))
    files = [FOLDER / f"{model}.pml", *FOLDER.glob(f"{model}_core.pml")]
    named = set(re.findall(r"\b_?pgqueue\.\w+", "".join(file.read_text() for file in files)))
    assert len(named) >= 8
    assert {name for name in named if f"function {name}(" not in sql} == set()
