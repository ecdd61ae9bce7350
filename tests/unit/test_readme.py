"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spark_pgqueue.spark.options import SINK_OPTIONS, SOURCE_OPTIONS

README = (Path(__file__).parents[2] / "README.md").read_text()


def options_of(section: str) -> dict[str, tuple[str, str]]:
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    table = text.split("| option | value | default | |\n")[1].split("\n\n")[0]
    rows = [re.split(r" \| ", line.strip("| \n")) for line in table.splitlines()[1:]]
    return {row[0].strip("`"): (row[1], row[-1]) for row in rows}


@pytest.mark.parametrize(
    ("section", "options"), [("The source", SOURCE_OPTIONS), ("The sink", SINK_OPTIONS)]
)
def test_every_option_is_in_the_table(section, options):
    assert options_of(section) == {each.name: (each.allowed, each.help) for each in options}


def test_the_commands_are_in_the_makefile():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE)):
        assert f"\n{target}:" in makefile, target


def test_the_files_it_names_exist():
    for name in set(re.findall(r"`((?:sql|tests|notebooks)/[\w./]+)`", README)):
        assert (Path(__file__).parents[2] / name).exists(), name
