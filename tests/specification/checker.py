"""Runs Spin on the models of this folder: every order of their steps, or as many as fit.

Spin writes a program in C for a model, gcc compiles the program, and the program walks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
TOOLS = ("spin", "gcc")


class Run(NamedTuple):
    """A model with its constants.

    Attributes:
        model: the name of a file of this folder, without its ending.
        constants: of the model; the model has a default for each.
        is_long: whether the walk takes longer than half a minute.
        is_sample: whether the states are too many: those that hash to the same bit count as one.
    """

    model: str
    constants: dict[str, int]
    is_long: bool = False
    is_sample: bool = False

    @property
    def name(self) -> str:
        """The model and its constants, for people."""
        return " ".join([self.model, *(f"{name}={n}" for name, n in self.constants.items())])


RUNS = (
    Run("gaps", {"PRODUCERS": 3, "ROUNDS": 1, "CONSUMERS": 1}),
    Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 1, "LIMIT": 1}),
    Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 1, "LIMIT": 2, "UNSEEN": 1}),
    Run("gaps", {"PRODUCERS": 2, "ROUNDS": 1, "CONSUMERS": 1, "CRASHES": 1}),
    Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 0, "READERS": 1}),
    Run("gaps", {"PRODUCERS": 2, "ROUNDS": 1, "CONSUMERS": 0, "READERS": 1, "CRASHES": 1}),
    Run("claims", {"WORKERS": 2}),
    Run("claims", {"WORKERS": 3, "CALLS": 1}),
    Run("claims", {"WORKERS": 2, "CALLS": 1, "CRASHES": 1}),
    Run("order", {"MESSAGES": 3, "WORKERS": 2}),
    Run("gaps", {"PRODUCERS": 2, "ROUNDS": 1, "CONSUMERS": 2}, is_long=True),
    Run("gaps", {"PRODUCERS": 3, "CONSUMERS": 1}, is_long=True),
    Run("gaps", {"PRODUCERS": 2, "ROUNDS": 1, "CONSUMERS": 1, "READERS": 1}, is_long=True),
    Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 0, "READERS": 1, "CRASHES": 1}, is_long=True),
    Run("claims", {"WORKERS": 3, "CALLS": 1, "CRASHES": 1}, is_long=True),
    Run(
        "gaps",
        {"PRODUCERS": 3, "CONSUMERS": 2, "READERS": 1, "CRASHES": 1},
        is_long=True,
        is_sample=True,
    ),
)

# Faults, and where Spin finds each.
FAULTS = {
    "gaps are selected before the look":
        Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 1, "FAULT": 1}),
    "gaps shrink by the holders after the look":
        Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 1, "FAULT": 2}),
    "nobody looks into a new gap":
        Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 1, "FAULT": 3}),
    "the publication id comes before the lock":
        Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 1, "FAULT": 4}),
    "the lock ends before the commit is visible":
        Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 1, "FAULT": 5}),
    "an offset leaves before the log is on disk":
        Run("gaps", {"PRODUCERS": 2, "ROUNDS": 1, "CONSUMERS": 0, "READERS": 1, "CRASHES": 1,
                     "FAULT": 6}),
    "a reader asks for publishers before the last id":
        Run("gaps", {"PRODUCERS": 2, "CONSUMERS": 0, "READERS": 1, "FAULT": 7}),
    "the id of a claim is the number of its bundle":
        Run("claims", {"WORKERS": 2, "CALLS": 1, "CRASHES": 1, "FAULT": 1}),
    "an acknowledgement does not judge the token again":
        Run("claims", {"WORKERS": 2, "CALLS": 1, "FAULT": 2}),
    "a claim that is held for long gets another token":
        Run("claims", {"WORKERS": 2, "CALLS": 1, "FAULT": 3}),
    "nack locks the bundle before the consumer":
        Run("claims", {"WORKERS": 2, "CALLS": 1, "FAULT": 4}),
    **{
        fault: Run("order", {"MESSAGES": 2, "WORKERS": 2, "FAULT": number})
        for number, fault in enumerate((
            "what is behind a bundle that goes back stays assigned",
            "an assigner does not see bundles that are claimed",
            "a bundle is gone when its acknowledgement has begun",
            "messages wait for nothing while one of their key is delayed",
            "a claim that is held for long gets another number",
        ), 1)
    },
}  # fmt: skip


class Found(NamedTuple):
    """What a walk has found.

    Attributes:
        states: how many states it has seen.
        error: the promise that was broken, as Spin says it; None for none.
    """

    states: int
    error: str | None


def missing() -> list[str]:
    """The tools that this machine does not have."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def check(run: Run, folder: Path) -> Found:
    """Walk through all states of a model.

    Args:
        run: the model and its constants.
        folder: for what Spin and gcc write.

    Raises:
        RuntimeError: the walk ended early, because of its memory or depth.
    """
    for each in FOLDER.glob("*.pml"):  # a model includes others
        shutil.copy(each, folder)
    defined = [f"-D{name}={n}" for name, n in run.constants.items()]
    _call(folder, "spin", "-a", *defined, f"{run.model}.pml")
    # Kept without loss where all states are walked: a hash of them could hide one.
    kept = ["-DBITSTATE"] if run.is_sample else ["-DCOLLAPSE"]
    # A fault is found within a second; to optimize its program takes four.
    how = "-O0" if "FAULT" in run.constants else "-O1"
    _call(folder, "gcc", how, "-w", "-DSAFETY", "-DMEMLIM=8000", *kept, "-o", "pan", "pan.c")
    said = _call(folder, "./pan", "-n", "-m100000", "-w32" if run.is_sample else "-w24")
    states = re.search(r"([\d.e+]+) states, stored", said)
    if states is None or "max search depth too small" in said or "out of memory" in said:
        raise RuntimeError(f"{run.name}: the walk ended early: {said[-1000:]}")
    broken = re.search(r"^pan:1: (.*) \(at depth", said, re.MULTILINE)
    return Found(int(float(states[1])), broken and broken[1])


def _call(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return done.stdout
