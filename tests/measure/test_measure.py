"""What `make measure` prints."""

from __future__ import annotations

import re

import pytest

from tests.measure import figures, functions
from tests.measure.ways import KINDS, ways


def numbers_in(lines: list[str]) -> list[int]:
    return [int(found) for line in lines for found in re.findall(r"\s(\d+)\b", line)]


def test_the_figures_are_of_all_functions() -> None:
    found = functions.read()
    *folders, everything = [numbers_in([line]) for line in figures.sizes(found)][1:]
    assert [sum(column) for column in zip(*folders, strict=True)] == everything
    calls = sum(len(each.calls) for each in found.values())
    assert sum(numbers_in(list(figures.floors(found)))) == calls > 1000
    assert sum(": " in line for line in figures.calls(found)) > 3 * figures.LONGEST


@pytest.mark.longer
def test_the_ways_of_each_kind_of_consumer_are_counted() -> None:
    lines = list(ways())
    assert len(lines) == len(KINDS) + 3
    assert all(int(line.split()[-4]) >= 5 for line in lines[1:-1])
