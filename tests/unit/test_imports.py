"""Which modules import which: never a circle, and a lower package never a higher one.

All imports count, also those inside functions and under TYPE_CHECKING.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import spark_pgqueue

ROOT = Path(spark_pgqueue.__file__).parent
PACKAGE = "spark_pgqueue"

FLOORS = (
    ("printable", "nearest", "version"),
    ("openmetrics",),
    ("postgres",),
    ("calling",),
    ("client", "archive", "servers", "serving", "tracing"),
    ("worker", "spark", "watching", "metrics", "airflow"),
    ("web", "testing"),
    ("",),  # the package's own __init__.py
    ("command_line",),
    ("__main__",),
)
"""A package imports packages of the floors before its own, and none of its own floor."""

SPARK_FLOORS = (
    ("options", "platform"),
    ("columns",),
    ("partitions",),
    ("driver", "executor"),
    ("consumer_source", "stream_source", "table_source", "sink"),
    ("datasource", "dataframes"),
    ("discovery",),
    ("",),  # its own __init__.py
)
"""The same within `spark`."""

CLIENTLESS = ("spark", "watching")
"""Spark's side works without the Python client: Spark's processes import this package often."""


def modules() -> dict[str, Path]:
    """All modules of the package, by their names."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each if each in known else node.module or "" for each in whole]
        else:
            continue
        yield from (each for each in names if each.split(".")[0] == PACKAGE and each != name)


def package_of(module: str, parent: str = PACKAGE) -> str:
    return module.removeprefix(parent).removeprefix(".").split(".")[0]


def test_a_module_imports_only_what_is_below_it() -> None:
    """In no circle, only of packages below its own, and on Spark's side nothing of the client."""
    known = modules()
    imports = {name: set(imported(name, path, known)) for name, path in known.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(reversed(error.args[1]))}")
    for parent, floors in ((PACKAGE, FLOORS), (f"{PACKAGE}.spark", SPARK_FLOORS)):
        floor = {package: number for number, packages in enumerate(floors) for package in packages}
        inside = {name for name in imports if f"{name}.".startswith(f"{parent}.")}
        assert {package_of(name, parent) for name in inside} == floor.keys(), "all have a floor"
        upward = [
            f"{name} imports {other}"
            for name in inside
            for other in imports[name] & inside
            if package_of(name, parent) != package_of(other, parent)
            and floor[package_of(other, parent)] >= floor[package_of(name, parent)]
        ]
        assert not upward
    wrong = [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in others
        if package_of(name) in CLIENTLESS and package_of(other) == "client"
    ]
    assert not wrong


def test_a_module_has_at_most_450_lines_and_a_longer_function_than_60_says_why():
    wrong = []
    for name, path in modules().items():
        lines = path.read_text().splitlines()
        wrong += [f"{name}: {len(lines)} lines"] * (len(lines) > 450)
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
                body = node.body[1:]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body
            else:
                continue
            first = min([each.lineno for each in node.decorator_list] + [node.lineno])
            length = (node.end_lineno or first) - body[0].lineno + 1 if body else 0
            length += node.body[0].lineno - node.lineno  # its arguments, without the docstring
            above = "\n".join(lines[max(0, first - 4) : first])
            if length > 60 and "60 lines" not in above:
                wrong.append(f"{name}.{node.name}: {length} lines")
    assert not wrong, "\n".join(wrong)
