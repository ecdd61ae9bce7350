"""The reference of the SQL: `sql/guide/reference.md`, from an installed schema and its files."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.rows import class_row

from tests.docs.headers import Block, Code, Header, Item, headers_in

SQL = Path(__file__).parents[2] / "sql"
PAGE = SQL / "guide" / "reference.md"

# In the order of the page: a topic, the pages that show it in use, and its files.
TOPICS: dict[str, tuple[str, str]] = {
    "Streams": (
        "settings retention",
        "operate/stream_lifecycle.sql typed/schemas.sql operate/retention.sql"
        " archive/set_archive.sql",
    ),
    "Consumers": ("settings positions", "operate/consumer_lifecycle.sql operate/seek.sql"),
    "Sending": ("sending settings delays", "queue/send/send.sql"),
    "Receiving": (
        "workers filters",
        "queue/claim/receive.sql queue/claim/receive_where.sql queue/claim/listen.sql"
        " base/conditions.sql",
    ),
    "Settling": (
        "failures delays",
        "queue/settle/acknowledge.sql operate/cancel.sql operate/postpone.sql",
    ),
    "Dead letters": ("failures", "operate/dead_letters.sql"),
    "Reading without claiming": ("reading", "reading/read.sql"),
    "Groups": ("reading", "groups/groups.sql groups/group_workers.sql"),
    "Routing by topics": ("filters", "operate/bindings.sql"),
    "Schedules": ("delays", "schedules/create_schedule.sql"),
    "Capture of tables": ("capture", "capture/capture.sql capture/capture_function.sql"),
    "Looking": (
        "monitoring failures",
        "operate/explain.sql operate/outcome.sql operate/peek.sql",
    ),
    "Upkeep": (
        "retention restore",
        "operate/maintain.sql operate/recover.sql roles.sql version.sql",
    ),
    "For the Spark source": (
        "",
        "spark/source.sql archive/archive_files.sql spark/admission.sql spark/checkpoint.sql"
        " spark/quarantine.sql log/trims.sql queue/send/backlog.sql operate/consumer_lag.sql"
        " base/checks.sql",
    ),
    "For the Spark sink": (
        "",
        "spark/batches.sql spark/unstage.sql spark/sink.sql spark/actions.sql"
        " table_sink/table_sink.sql table_sink/table_apply.sql",
    ),
    "For tables in Spark": ("", "operate/scan.sql operate/scan_where.sql"),
    "For the exporter of an archive": ("", "archive/export.sql"),
}

_WIDTH = 120
"""Characters of a line of a signature."""

_FUNCTIONS: LiteralString = """
    select p.proname as name, p.prokind = 'p' as is_procedure, p.proretset as returns_set,
           format_type(p.prorettype, null) as result,
           obj_description(p.oid, 'pg_proc') as comment,
           array(select array[coalesce(p.proargmodes[a.n]::text, 'i'), p.proargnames[a.n],
                              format_type(a.type, null),
                              pg_get_function_arg_default(p.oid, a.n::int)]
                 from unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]))
                      with ordinality a(type, n) order by a.n) as arguments,
           array(select array['t', a.attname::text, format_type(a.atttypid, null), null]
                 from pg_type t join pg_attribute a on a.attrelid = t.typrelid and a.attnum > 0
                 where t.oid = p.prorettype and t.typnamespace = 'pgqueue'::regnamespace
                 order by a.attnum) as columns,
           coalesce((select roles from _pgqueue.listed() where function = p.oid), '{}') as roles
    from pg_proc p
    where p.pronamespace = 'pgqueue'::regnamespace
    order by p.proname, p.oid"""

_VIEWS: LiteralString = """
    select c.relname as name, obj_description(c.oid, 'pg_class') as comment,
           array(select array[a.attname::text, format_type(a.atttypid, null),
                              coalesce(col_description(c.oid, a.attnum), '')]
                 from pg_attribute a
                 where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                 order by a.attnum) as columns
    from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v'
    order by c.relname"""

_SETTINGS: LiteralString = """
    select of_what, name, type, coalesce(default_value, 'none'),
           _pgqueue.allowed_values(type, low, high, choices, no_value)
    from _pgqueue.settings()"""


@dataclass
class Function:
    """A public function, as the catalogue has it.

    An argument has its mode, name, type and default; so have columns, of a type of the schema.
    """

    name: str
    is_procedure: bool
    returns_set: bool
    result: str
    comment: str
    arguments: list[list[str | None]]
    columns: list[list[str | None]]
    roles: list[str]


@dataclass
class View:
    """A public view, as the catalogue has it: of each column name, type and comment."""

    name: str
    comment: str
    columns: list[list[str]]


def page(conn: psycopg.Connection[Any]) -> str:
    """The page, of the schema that is installed in a database."""
    functions = conn.cursor(row_factory=class_row(Function)).execute(_FUNCTIONS).fetchall()
    views = conn.cursor(row_factory=class_row(View)).execute(_VIEWS).fetchall()
    headers = headers_in(SQL)
    public = {function.name for function in functions}
    by_topic = {
        topic: [
            function
            for file in files.split()
            for name in (name for name, header in headers.items() if header.file == file)
            for function in functions
            if function.name == name
        ]
        for topic, (_, files) in TOPICS.items()
    }
    missing = public - {function.name for some in by_topic.values() for function in some}
    if missing:
        raise LookupError(f"functions of no topic, or without a header: {sorted(missing)}")
    parts = [_TOP, _contents(by_topic, views)]
    for topic, some in by_topic.items():
        parts.append(f"## {topic}")
        if links := TOPICS[topic][0].split():
            parts.append("In use: " + ", ".join(f"[{_title(name)}]({name}.md)" for name in links))
        parts += [_function(each, headers[each.name]) for each in some]
    parts += ["## Settings", _settings(conn), "## Views", _VIEWS_TEXT, *map(_view, views)]
    parts += ["## Errors", _ERRORS_TEXT, _errors()]
    names = [*public, *(view.name for view in views)]
    return "\n\n".join(_linked(part, names) for part in parts) + "\n"


def _linked(part: str, names: list[str]) -> str:
    """A part of the page, in which names of functions and views lead to them.

    Only names with an underscore: no other word is written so.
    """
    itself = part.splitlines()[0].removeprefix("### ")
    known = "|".join(name for name in names if "_" in name and name != itself)
    code, lines = False, []
    for line in part.splitlines():
        code ^= line.startswith("```")
        if not code and not line.startswith(("#", "| [")):
            pattern = rf"(?<![\w`\[#/.=])({known})(?![\w`(\]./])"
            line = re.sub(pattern, r"[\1](#\1)", line)
        lines.append(line)
    return "\n".join(lines)


_TOP = """# SQL reference

<!-- written by: make docs -->
Every function and view of the schema `pgqueue` that people and programs call. An argument with a
default can be left out, and is best given by its name: `p_key => 'customer 7'`. A function runs in
the caller's transaction, with the rights of the schema's owner. The roles are those of
`pgqueue grant` and of `create_roles()`; the owner of the schema may call all. Locks are named as in
[the order of locks](../README.md#locks)."""

_VIEWS_TEXT = "Roles: observer, admin."

_ERRORS_TEXT = """An error of the queue has one of these SQLSTATEs. It says what was given and what
is allowed, names the argument in the field COLUMN, and often has a hint."""


def _title(name: str) -> str:
    return name.replace("-", " ")


def _contents(by_topic: dict[str, list[Function]], views: list[View]) -> str:
    rows = [
        f"| [{topic}](#{_anchor(topic)}) | {_links(each.name for each in some)} |"
        for topic, some in by_topic.items()
    ]
    rows += [
        "| [Settings](#settings) | of consumers and streams |",
        f"| [Views](#views) | {_links(view.name for view in views)} |",
        "| [Errors](#errors) | their SQLSTATEs |",
    ]
    return "\n".join(["| | |", "|---|---|", *rows])


def _links(names: Iterable[str]) -> str:
    return ", ".join(f"[`{name}`](#{name})" for name in names)


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _function(function: Function, header: Header) -> str:
    parts = [f"### {function.name}", f"```text\n{_signature(function)}\n```"]
    parts += [_block(block) for block in header.about]
    if header.arguments:
        are_arguments = header.arguments[0].name.startswith("p_")
        parts.append(_list("argument" if are_arguments else "", header.arguments))
    parts += [_block(block) for block in header.rest]
    roles = ", ".join(function.roles) or "the owner of the schema alone"
    parts.append(f"Roles: {roles}. In [{header.file}](../{header.file}).")
    return "\n\n".join(parts)


def _signature(function: Function) -> str:
    given = [each for each in function.arguments if each[0] in ("i", "b", "v")]
    returned = [each for each in function.arguments if each[0] in ("o", "t", "b")]
    returned += function.columns
    arguments = [*map(_argument, given)]
    if function.is_procedure:
        result = ""
    elif returned:
        columns = ", ".join(f"{name} {_type(kind)}" for _, name, kind, _ in returned)
        result = f" returns {'table ' if function.returns_set else ''}({columns})"
    else:
        result = f" returns {'setof ' if function.returns_set else ''}{_type(function.result)}"
    name = f"call {function.name}" if function.is_procedure else function.name
    text = f"{name}({', '.join(arguments)}){result}"
    if len(text) <= _WIDTH:
        return text
    within = ",\n    ".join(arguments)
    end = textwrap.fill(f"){result}", _WIDTH, subsequent_indent="    ")
    return f"{name}(\n    {within}\n{end}" if arguments else f"{name}({end}"


def _argument(argument: list[str | None]) -> str:
    _, name, kind, default = argument
    text = f"{name} {_type(kind)}"
    if default is not None:
        value = re.sub(r"::[a-z ]+(\[\])?$", "", default).replace("NULL", "null")
        text += f" default {value}"
    return text


def _type(name: str | None) -> str:
    shorter = {"timestamp with time zone": "timestamptz", "double precision": "float8"}
    name = (name or "").removeprefix("pgqueue.")
    array = "[]" * name.endswith("[]")
    name = name.removesuffix("[]")
    return shorter.get(name, name) + array


def _block(block: Block) -> str:
    if isinstance(block, Code):
        return f"```text\n{block.text}\n```"
    return _text(block) if isinstance(block, str) else _list("", block)


def _list(title: str, items: Iterable[Item]) -> str:
    rows = []
    for item in items:
        parts = "".join(f"<br>{_names(part.name)}: {_text(part.text)}" for part in item.parts)
        rows.append(f"| {_names(item.name)} | {_text(item.text)}{parts} |")
    return "\n".join([f"| {title} | |", "|---|---|", *rows])


def _names(names: str) -> str:
    """Names as code; what is a sentence stays one."""
    words = names.split(", ")
    if all(re.fullmatch(r"[\w=]+", word) for word in words):
        return ", ".join(f"`{word}`" for word in words)
    return _text(names)


def _text(text: str) -> str:
    """Text of a comment as Markdown: what is code is marked, files are links."""
    text = re.sub(r" *\([^()]*60 lines[^()]*\)", "", text.strip())  # for who reads the SQL
    text = re.sub(r"([*|<>])", r"\\\1", text)
    text = re.sub(r"=\\>", "=>", text)
    text = re.sub(
        r"(?<![\w/`])((?:p_\w+|_\w+)(?:\(\))?|\w+\(\))", lambda found: f"`{found[0]}`", text
    )
    return re.sub(r"(?<![\w/])((?:\w+/)\w+\.sql)", r"[\1](../\1)", text)


def _settings(conn: psycopg.Connection[Any]) -> str:
    rows = [
        f"| {of_what} | `{name}` | {default} | {allowed} |"
        for of_what, name, _, default, allowed in conn.execute(_SETTINGS).fetchall()
    ]
    top = "[Settings](settings.md) says what each is for. A setting that is null is the default."
    return "\n".join(
        [top, "", "| of a | setting | default | allowed |", "|---|---|---|---|", *rows]
    )


def _view(view: View) -> str:
    rows = []
    for name, kind, comment in view.columns:
        if not comment:
            raise LookupError(f"column {name} of view {view.name} has no comment")
        rows.append(f"| `{name}` | {_type(kind)} | {_text(comment)} |")
    table = "\n".join(["| column | type | |", "|---|---|---|", *rows])
    return f"### {view.name}\n\n{_text(view.comment)}\n\n{table}"


def _errors() -> str:
    """The table of the README beside the SQL."""
    table = (SQL / "README.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return "\n".join(line for line in rows if "PQ099" not in line)
