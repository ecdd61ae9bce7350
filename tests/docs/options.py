"""The tables of `spark_pgqueue/guide/options.md`: options and columns, from where they are defined.

The page is written by hand, but for what is between `<!-- written by make docs: NAME -->` and
`<!-- to here -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from pyspark.sql.types import StructType

from spark_pgqueue.spark.columns import (
    ABOUT,
    ACTION_COLUMNS,
    MESSAGE_COLUMNS,
    Taken,
    source_schema,
    stream_source_schema,
)
from spark_pgqueue.spark.options.checking import Option
from spark_pgqueue.spark.options.sink import SINK_OPTIONS
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS
from spark_pgqueue.spark.options.stream_source import STREAM_SOURCE_OPTIONS
from spark_pgqueue.spark.options.table import TABLE_OPTIONS
from spark_pgqueue.spark.options.values import shown
from spark_pgqueue.spark.table_source.tables import TABLES, Table, column

PAGE = Path(__file__).parents[2] / "spark_pgqueue" / "guide" / "options.md"

_PART = re.compile(r"(<!-- written by make docs: ([\w ]+) -->\n).*?(<!-- to here -->)", re.DOTALL)


def page(text: str) -> str:
    """The page, with its tables written anew.

    Raises:
        LookupError: a table has no place in the page.
    """
    tables = _tables()
    missing = tables.keys() - {found[2] for found in _PART.finditer(text)}
    if missing:
        raise LookupError(f"{PAGE.name} has no place for {', '.join(sorted(missing))}")
    return _PART.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def _tables() -> dict[str, str]:
    return {
        "columns of the source": _read(source_schema("text", True, has_arrival=True)),
        "options of the source": _options(SOURCE_OPTIONS),
        "columns without a consumer": _read(stream_source_schema("text", True, has_several=True)),
        "options without a consumer": _options(STREAM_SOURCE_OPTIONS),
        "options of tables": _options(TABLE_OPTIONS),
        "columns of tables": "\n\n".join(
            f"**`{name}`**: a row for each {table.rows}.\n\n{_columns_of(table)}"
            for name, table in TABLES.items()
        ),
        "columns of the sink": _taken(MESSAGE_COLUMNS),
        "columns of actions": _taken(ACTION_COLUMNS),
        "options of the sink": _options(SINK_OPTIONS),
    }


def _table(titles: str, rows: Iterable[Iterable[str]]) -> str:
    top = f"| {titles} |"
    line = "|---" * titles.count("|") + "|---|"
    return "\n".join([top, line, *(f"| {' | '.join(row)} |" for row in rows)])


def _options(options: tuple[Option, ...]) -> str:
    named = {each: f"`{each}`" for each in sorted((o.name for o in options), key=len, reverse=True)}
    beside = {
        option.name: [*option.excludes, *(o.name for o in options if option.name in o.excludes)]
        for option in options
    }
    rows = []
    for option in options:
        text, default = _default(option)
        text = _marked(text, {name: code for name, code in named.items() if _is_camel(name)})
        for title, word, names in (
            ("Needs", "and", option.needs),
            ("Not with", "or", beside[option.name]),
        ):
            if names:
                text += f" {title} {f' {word} '.join(f'`{name}`' for name in names)}."
        if option.only:
            text += f" Only in {option.only}."
        rows.append([named[option.name], option.type, default, option.allowed, text])
    return _table("option | type | default | allowed |", rows)


def _is_camel(name: str) -> bool:
    return name != name.lower()


def _marked(text: str, names: dict[str, str]) -> str:
    """A text with names of options marked as code."""
    if not names:
        return text
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[0]], text)


def _default(option: Option) -> tuple[str, str]:
    """What an option does, and its default."""
    if option.required:
        return option.help, "required"
    if option.default is not None:
        return re.sub(r" By default [^.]+\.$", "", option.help), shown(option.default)
    text, _, default = option.help.partition(" By default ")
    return text, default.removesuffix(".")


def _read(schema: StructType) -> str:
    return _columns(schema, {each.name: ABOUT[each.name] for each in schema})


def _columns_of(table: Table) -> str:
    later = "; only if option `columns` names it"
    texts = {n: column(n)[1] + (later if n in table.asked_for else "") for n in table.columns}
    return _columns(table.schema(list(table.columns), "text"), texts)


def _columns(schema: StructType, texts: dict[str, str]) -> str:
    """A row for each; those of one type and text that follow each other are one."""
    named = (
        (
            f"`{each.name}`",
            each.dataType.simpleString().replace("bigint", "long"),
            texts[each.name],
        )
        for each in schema
    )
    grouped = groupby(named, key=lambda row: row[1:])
    return _table(
        "column | type |", ([", ".join(n for n, *_ in some), *of] for of, some in grouped)
    )


def _taken(columns: dict[str, Taken]) -> str:
    rows = ([f"`{name}`", column.words, column.help] for name, column in columns.items())
    return _table("column | type |", rows)
