"""Names go into SQL in one way: each text that the queue's functions put together is looked at."""

import re
from collections.abc import Iterator

from spark_pgqueue.postgres import schema

STATEMENT = re.compile(
    r"E?['$](?:q\$)?\s*(?:alter|and|as|below_|comment|create|delete|drop|grant|insert|json_build\w+\("
    r"|listen|lock|revoke|select|truncate|update|with|\(select|\(\(|\(\$1\)|if v_lo|%1\$I|%I"
    r"|%s(?:\(| operator))"
)
"""How a text begins that is SQL, or a part of it; all others are for people, or values."""

SAFE = {
    r"(?:\w+\.)*\w*(?:stream_id|consumer_id)": "a number",
    r"(?:\w+\.)?(?:lo|hi|p_lo|v_hi|p_partitions|v_next)": "a number",
    r"coalesce\(p_lo::text, 'minvalue'\)": "a number, or a word",
    r"(?:lower|upper)\(p_seqs\)": "a number",
    r"p_stream\.max_(?:header_)?bytes|_pgqueue\.max_\w+\(\)": "a number",
    r"to_hex\(.*\)": "hexadecimal digits",
    r".*::reg(?:class|procedure)(?:::text)?(?:, ', '(?: order by \w+)?\))?": "quoted by Postgres",
    r"_pgqueue\.(?:sql_name|partition_sql|each_column|key_of)\(.*\)": "SQL, quoted there",
    r"(?:format|string_agg\(\s*format)\(.*": "from a format that is looked at itself",
    r"_pgqueue\.(?:by_segment|by_stream|table_query)\(.*\)": "SQL, put together there",
    r"t\.(?:event|kind|rows)|kind": "one of several texts",
    r"string_agg\(substr\(g\.object, length\(k\.kind\) \+ 2\), .*": "a reg name as text",
    r"\(select string_agg\(' set ' \|\| setting, '' order by .*": "texts of access.sql",
    r"v_base ->> 'relation'": "quoted by object_names",
    r"\$q\$.*|max\(upper\(c\.seqs\)\) into v_lo": "a text",
}
"""Which arguments may stand for %s in a statement: the pattern of their text, and why."""

VARIABLES = {
    **dict.fromkeys(
        (
            *("v_made.name", "v_made.parameters", "v_made.returns", "v_args"),
            "regexp_replace(v_made.returns, '^setof ', '')",
        ),
        ("stream_functions.sql", "a text of the list stream_functions()"),
    ),
    "p_function": ("capture_triggers.sql", "object_names() quotes it"),
    "p_query": ("views.sql", "a text of an installer's file"),
    "v_rows": ("scan.sql", "a text of table_query(), with formats with %I"),
    "v_columns": ("scan.sql", "formats with %I"),
    "v_part": ("capture_triggers.sql", "a text with words in braces, for fill_template()"),
    "k.kind": ("roles.sql", "a kind of object, of grants()"),
    "g.object": ("roles.sql", "a reg name as text, and quote_ident()"),
    "g.grantee": ("roles.sql", "public, or quote_ident()"),
    "a.pid": ("roles.sql", "a number"),
    "v_grant.object": ("roles.sql", "a reg name as text, and quote_ident()"),
    "v_grant.grantee": ("roles.sql", "public, or quote_ident()"),
    "v_table.name": ("capture.sql", "a format with %I"),
    "v_function.name": ("function_settings.sql", "a regprocedure as text"),
    "v_setting": ("function_settings.sql", "a text of access.sql"),
    "v_plan.condition": ("group_workers.sql", "a format with %L, or a text"),
    "v_index[2]": ("indexes.sql", "a text of that file"),
    "v_type": ("limits.sql", "a text of that file"),
    "v_sequence": ("back_pressure.sql", "of backlog_sequence(): with a number"),
    "v_name": ("migrations/2.sql", "a format with a number"),
    "h.query": ("numbers.sql", "a text of that file, or a format with %I"),
    "v_one.query": ("numbers.sql", "made of those"),
    "v_one.name": ("numbers.sql", "a regclass as text"),
}
"""Variables with SQL: the file where each is used, and where its text comes from."""

MERGES = (
    r"v_(?:chunks|names|values|rows|winners|stored|last|gone)",
    r"v_key\.\w+",
    r"p_plan ->> 'relation'",
    r"'[^']*' \|\| v_gone \|\| '[^']*'",
    r"coalesce\('update set ' \|\| v_set .*",
)
"""The same in table_sink.sql: numbers, and formats with %I there; table_plan() quotes relations."""

EXECUTED = {
    "stream_lifecycle.sql": ["'drop function if exists ' || "],  # names of functions_of()
    "table_apply.sql": ["v_statement"],  # of table_statements(), whose formats are looked at
    "locks.sql": ["p_statement"],  # await(): texts, see test_lock_waits.py
    "capture.sql": ["v_statement"],  # capture_script(), or a format with %I
    "roles.sql": ["v_revoke"],  # a format
    "function_settings.sql": ["v_alter"],  # a format
    "scan.sql": ["v_query", "_pgqueue.scan_query("],
    "segments.sql": ["p_statement"],  # try_drop(): formats with %I, or a name of functions_of()
    "upgrade.sql": [
        "(select 'drop view ' || string_agg(oid::regclass::text, ', ' order by relname)",
        "(select 'drop routine ' || string_agg(oid::regprocedure::text, ', ')",
    ],
    "version.sql": ["'drop routine ' || v_function"],  # a regprocedure as text
    "views.sql": ["'create view _pgqueue.new_view as ' || p_query"],  # a text of that file
}
"""What is executed beside a text of its own and a format: how it begins, by file."""


def test_what_is_put_into_a_statement_is_quoted_or_a_number() -> None:
    wrong, formats = [], 0
    for file, text in files():
        for start in (found.end() for found in re.finditer(r"\bformat\(", text)):
            template, *arguments = arguments_of(text, start)
            if not STATEMENT.match(template):
                continue
            formats += 1
            for place in sorted(places_of(template)):
                argument = " ".join(arguments[place - 1].split())
                line = text.count("\n", 0, start) + 1
                known_in = VARIABLES.get(argument, ("?",))[0]
                if not (
                    any(re.fullmatch(pattern, argument) for pattern in SAFE)
                    or is_choice(argument)
                    or file.endswith(known_in)
                    or (
                        file.endswith("table_sink.sql")
                        and any(re.fullmatch(pattern, argument) for pattern in MERGES)
                    )
                ):
                    wrong.append(f"{file}:{line}: %s is {argument}")
    assert not wrong, "\n".join(wrong)
    assert formats > 60, "they are looked at"


def test_a_choice_is_of_texts_only() -> None:
    assert is_choice("case when p_x then 'a' 'b' else 'c' end")
    assert not is_choice("case when p_x then p_name else 'c' end")
    assert not is_choice("case p_x when 'a' then 'b' else p_name end")


def test_what_is_executed_is_a_text_or_a_format() -> None:
    wrong = []
    for file, text in files():
        for found in re.finditer(r"^[^'\n]*\bexecute (?!procedure|on\b|function\b)", text, re.M):
            expression = text[found.end() :].partition(";")[0]
            allowed = EXECUTED.get(file.rpartition("/")[2], [])
            plain = re.match(r"(?:\(select )?format\(|'[^']*'(?:;| into| using|$)", expression)
            if plain is None and not expression.startswith(tuple(allowed) or "?"):
                line = text.count("\n", 0, found.start()) + 1
                wrong.append(f"{file}:{line}: execute {expression[:60]}")
    assert not wrong, "\n".join(wrong)


def test_texts_are_composed_of_parts_by_one_function_only() -> None:
    """No name is put in the place of a word by replace(), which would look for words in names."""
    wrong = [
        f"{file}:{text.count(chr(10), 0, found.start()) + 1}"
        for file, text in files()
        for found in re.finditer(r"\breplace\([^;]*'\{", text)
    ]
    assert not wrong, "\n".join(wrong)


def files() -> Iterator[tuple[str, str]]:
    """Each file of the SQL, without its comments."""
    folder = schema.sql_directory()
    for file in [*schema.sql_files(), folder / "uninstall.sql"]:
        text = re.sub(r"(?m)^\s*--[^\n]*|(?<=[\s;,])-- [^\n]*$", "", file.read_text())
        yield str(file.relative_to(folder)), text


def arguments_of(text: str, start: int) -> list[str]:
    """The arguments of a call, from behind its bracket on."""
    depth, arguments, begin = 0, [], start
    for found in re.finditer(r"'(?:[^']|'')*'|\$q\$.*?\$q\$|[()\[\],]", text[start:], re.DOTALL):
        token, at = found[0], start + found.start()
        if token in "([":
            depth += 1
        elif token in ")]" and depth:
            depth -= 1
        elif token in "),]" and depth == 0:
            arguments.append(text[begin:at].strip())
            begin = at + 1
            if token == ")":
                return arguments
    raise AssertionError("a call without an end")


def is_choice(argument: str) -> bool:
    """Whether it is one of several texts: all that it can be are texts, quoted or of a format."""
    plain = re.sub(r"'(?:[^']|'')*'", "''", argument)
    while (inner := re.sub(r"\([^()]*\)", "", plain)) != plain:
        plain = inner
    values = re.findall(r"\b(?:then|else) (.*?)(?= when | else | end$)", plain)
    text = r"(?:''\s*)+|quote_literal|format"  # calls: without their arguments
    return plain.startswith("case ") and all(re.fullmatch(text, value) for value in values)


def places_of(template: str) -> set[int]:
    """Which arguments a format puts in as they are."""
    places, number = set(), 0
    for position, kind in re.findall(r"%(?:(\d+)\$)?([sIL%])", template):
        if kind != "%" and not position:
            number += 1
        if kind == "s":
            places.add(int(position) if position else number)
    return places
