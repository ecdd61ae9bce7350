"""What the hooks do: the bodies of functions of `sql/hooks.sql`, from lines of features' files.

A line is `-- on drop_stream: <statement>`. Lines below it, indented by four, go on with it. Above a
table, `-- on drop_stream` is enough: its rows of the stream are deleted.
"""

from __future__ import annotations

import re
from collections import defaultdict

from spark_pgqueue.postgres import schema
from tests.docs.sql import SQL

FILE = SQL / "hooks.sql"

_ROWS = re.compile(
    r"^-- on (\w+_(\w+))$(?=(?:\n--.*)*\ncreate table if not exists (pgqueue\.\w+))", re.MULTILINE
)
_DELETE = r"-- on \1: delete from \3 where \2_id = p_\2_id;"
_LINE = re.compile(r"^-- on (\w+):(?: (.+))?\n((?:--     .+\n)*)", re.MULTILINE)
_PART = re.compile(r"^( *)-- on (\w+)\n(?:.*\n)*?\1-- end\n", re.MULTILINE)


def file(text: str) -> str:
    """The file, with its bodies written again.

    Raises:
        LookupError: a line is for a hook that the file does not have.
    """
    bodies = _bodies()
    if unknown := bodies.keys() - {part[2] for part in _PART.finditer(text)}:
        raise LookupError(f"{FILE.name} has no hook {', '.join(sorted(unknown))}")
    return _PART.sub(
        lambda part: "".join(
            f"{part[1]}{line}\n" for line in [f"-- on {part[2]}", *bodies[part[2]], "-- end"]
        ),
        text,
    )


def _bodies() -> dict[str, list[str]]:
    """Of each hook its statements, below the names of the files that have them."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in schema.sql_files():
        name = f"-- {path.relative_to(schema.sql_directory())}"
        text = _ROWS.sub(_DELETE, path.read_text())
        for hook, first, more in _LINE.findall(text):
            found[hook] += [name] * (name not in found[hook])
            found[hook] += [first] * bool(first)
            found[hook] += [line.removeprefix("--     ") for line in more.splitlines()]
    return found
