"""Lines and calls of the SQL, as text to be printed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from spark_pgqueue.postgres import schema
from tests.measure.functions import Function, callers, code

LONGEST = 12


def floor(file: str) -> str:
    """The folder of a file of `sql/`."""
    return file.rpartition("/")[0].partition("/")[0] or "."


def sizes(functions: dict[str, Function]) -> Iterator[str]:
    """By folder: files, lines, those of code (no blank ones, no comments), and functions."""
    folder = schema.sql_directory()
    found: dict[str, list[int]] = defaultdict(lambda: [0] * 5)
    for path in folder.rglob("*.sql"):
        text = path.read_text()
        row = found[floor(str(path.relative_to(folder)))]
        row[0] += 1
        row[1] += text.count("\n")
        row[2] += sum(bool(line.strip()) for line in code(text).splitlines())
    for each in functions.values():
        found[floor(each.file)][3] += 1
        found[floor(each.file)][4] += each.lines
    yield f"{'folder':<12}{'files':>7}{'lines':>8}{'code':>8}{'functions':>11}{'their lines':>13}"
    for name, (files, lines, coded, count, inside) in sorted(found.items()):
        yield f"{name:<12}{files:>7}{lines:>8}{coded:>8}{count:>11}{inside:>13}"
    files, lines, coded, count, inside = (sum(row[i] for row in found.values()) for i in range(5))
    yield f"{'all':<12}{files:>7}{lines:>8}{coded:>8}{count:>11}{inside:>13}"


def calls(functions: dict[str, Function]) -> Iterator[str]:
    """How long functions are, who calls many, who is called by many, and who by one."""
    called_by = callers(functions.values())
    lengths = sorted(each.lines for each in functions.values())
    middle, most = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    yield f"lines of a function: median {middle}, nine of ten up to {most}, at most {lengths[-1]}"
    inner = [each for each in functions.values() if each.name.startswith("_")]
    single = [each for each in inner if len(called_by[each.name]) == 1]
    yield f"{len(inner)} internal functions, of which {len(single)} have one caller"
    for title, ranked in {
        "longest": Counter({name: each.lines for name, each in functions.items()}),
        "calls most": Counter({name: len(each.calls) for name, each in functions.items()}),
        "called by most": Counter({name: len(found) for name, found in called_by.items()}),
    }.items():
        yield ""
        yield title
        for name, count in ranked.most_common(LONGEST):
            yield f"{count:>5}  {functions[name].file}: {name}"


def floors(functions: dict[str, Function]) -> Iterator[str]:
    """How many calls go from a folder (down) to another one (across)."""
    found = Counter(
        (floor(each.file), floor(functions[name].file))
        for each in functions.values()
        for name in each.calls
    )
    names = list(dict.fromkeys(floor(each.file) for each in functions.values()))
    yield f"{'calls':<12}" + "".join(f"{name:>11}" for name in names)
    for name in names:
        yield f"{name:<12}" + "".join(f"{found[name, other] or '':>11}" for other in names)
