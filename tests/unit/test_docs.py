"""What is generated is what `make docs` would write now, and what it says of options is so."""

import re
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import pytest

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.checking import BATCH, CONNECTION, STREAMING, Option
from spark_pgqueue.spark.options.sink import SINK_OPTIONS, parse_sink
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS, parse_source
from spark_pgqueue.spark.options.stream_source import STREAM_SOURCE_OPTIONS, parse_stream_source
from spark_pgqueue.spark.options.table import TABLE_OPTIONS, parse_table
from tests.docs import comments, hooks, options, promises, rows, settings, sql, stub
from tests.docs.headers import Item, parse
from tests.endure import tally

STALE = "it is not what the code says now: make docs"

# A value for each option, by its name or else by its type. The values go together where the options
# do.
VALUES = {
    "url": "host=h", "streams": "s,t", "startingOffsets": "earliest", "endingOffsets": "latest",
    "keyOrder": "column", "startingPosition": "latest", "ordering": "key", "table": "stats",
    "columns": "seq", "where": "seq > 1", "action": "ack", "compareRepeats": "count",
    "archive": "auto", "archiveOptions": "{}", "typed": "failfast",
}  # fmt: skip
OF_TYPE = {
    "string": "s", "names": "s", "pattern": "s.*", "timestamp": "0", "boolean": "true",
    "integer": "1", "size": "1k", "duration": "1s",
}  # fmt: skip

STREAMS = {"stream", "streams", "streamPattern"}
"""One of which is needed, but for tables."""

Parse = Callable[[Mapping[str, str], bool], Any]
SIDES: list[tuple[str, tuple[Option, ...], dict[str, str], Parse]] = [
    ("source", SOURCE_OPTIONS, {}, lambda given, _: parse_source(given)),
    (
        "cursor",
        STREAM_SOURCE_OPTIONS,
        {},
        lambda given, stream: parse_stream_source(given, streaming=stream),
    ),
    ("table", TABLE_OPTIONS, {}, lambda given, _: parse_table(given)),
    ("sink", SINK_OPTIONS, {}, lambda given, stream: parse_sink(given, streaming=stream)),
]
each_side = pytest.mark.parametrize(
    ("table", "base", "parse_side"), [side[1:] for side in SIDES], ids=[side[0] for side in SIDES]
)


def test_the_reference_of_the_sql_is_what_the_schema_and_its_comments_say(conn):
    assert sql.PAGE.read_text() == sql.page(conn), STALE


def test_the_rows_on_the_page_are_those_that_its_calls_leave(conn):
    text = rows.PAGE.read_text()
    assert text == rows.page(conn, text), STALE


def test_the_tables_of_options_and_columns_are_what_the_code_says():
    text = options.PAGE.read_text()
    assert text == options.page(text), STALE


def test_the_tally_of_the_long_run_on_the_page_of_guarantees_is_the_one_in_its_file():
    text = tally.PAGE.read_text()
    assert text == tally.page(text, tally.load()), STALE


def test_the_map_of_promises_is_what_the_marks_of_the_tests_say():
    assert promises.PAGE.read_text() == promises.page(), STALE


def test_the_stub_of_the_client_for_asyncio_has_what_the_client_has():
    assert stub.FILE.read_text() == stub.stub(), STALE


def test_the_comments_of_functions_are_the_first_sentences_of_their_headers():
    assert comments.FILE.read_text() == comments.file(), STALE


def test_the_table_of_settings_names_the_functions_that_read_each_and_its_tests():
    assert settings.page(settings.PAGE.read_text()) == settings.PAGE.read_text(), "run make docs"


def test_each_setting_is_read_by_a_function_and_is_in_a_test():
    for name, functions, tests in settings.rows():
        assert functions, f"no function reads {name}: 'A setting of a consumer' in sql/changing.md"
        assert tests, f"no test names {name}: write one of its effect in tests/sql/"


def test_each_option_is_read_and_is_in_a_test():
    root = settings.ROOT
    code = "".join(file.read_text() for file in root.glob("spark_pgqueue/spark/**/*.py"))
    tests = "".join(
        file.read_text()
        for file in root.glob("tests/**/*.py")
        if not file.samefile(__file__) and "docs" not in file.parts
    )
    options = {*SOURCE_OPTIONS, *STREAM_SOURCE_OPTIONS, *TABLE_OPTIONS, *SINK_OPTIONS}
    for option in options - {*CONNECTION}:  # those are combined into one url
        field = option.field
        read = re.search(rf"\.{field}\b", code)
        assert read, f"no code in spark_pgqueue/spark/ reads {field}, of option {option.name}"
        assert re.search(rf"\b{option.name}\b", tests), (
            f"no test names option {option.name}: write one of its effect in tests/spark/"
        )


def test_the_hooks_do_what_the_files_of_features_say():
    text = hooks.FILE.read_text()
    assert text == hooks.file(text), STALE


def test_a_line_for_a_hook_that_there_is_not_is_refused():
    with pytest.raises(LookupError, match="has no hook drop_stream"):
        hooks.file(hooks.FILE.read_text().replace("-- on drop_stream\n", ""))


def test_every_public_function_and_view_is_in_the_reference(conn):
    found = conn.execute(
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
        " union all select relname from pg_class"
        " where relnamespace = 'pgqueue'::regnamespace and relkind = 'v'"
    ).fetchall()
    text = sql.PAGE.read_text()
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(name for (name,) in found)
    links = re.findall(r"\]\(#([\w-]+)\)", text)
    titles = {each.lower().replace(" ", "-") for each in re.findall(r"^##+ (.+)$", text, re.M)}
    assert set(links) <= titles


def test_a_header_is_taken_apart_into_what_it_says():
    header = parse(
        "f.sql",
        "-- Returns a claim. And\n-- so on.\n--   p_a, p_b  these;\n--             or those\n"
        "-- Returns one row:\n--   state  a word; or\n--          not so    something else\n"
        "-- Errors: PQ001 (or so). Locks nothing.\n",
    )
    assert header.about == ("Returns a claim. And so on.",)
    assert header.arguments == (Item("p_a, p_b", "these; or those"),)
    state = Item("state", "a word; or", (Item("not so", "something else"),))
    assert header.rest[:2] == ("Returns one row:", (state,))
    rest = [str(each).strip() for each in header.rest[2:]]
    assert rest == ["Errors: PQ001 (or so).", "Locks nothing."]


def refused(parse_side: Parse, given: Mapping[str, str], streaming: bool) -> bool:
    try:
        parse_side(given, streaming)
    except PgQueueError:
        return True
    return False


def with_needs(option: Option, table: tuple[Option, ...]) -> dict[str, str]:
    """An option with all that it needs."""
    names = {option.name, *option.needs, *(o.name for o in table if o.required)}
    return {each.name: value_of(each) for each in table if each.name in names}


def value_of(option: Option) -> str:
    return VALUES.get(option.name) or OF_TYPE[option.type]


@each_side
def test_options_go_together_as_the_page_says(table, base, parse_side):
    """Any two of them, in streaming queries and in batches: refused exactly where it says so."""
    for one, other in combinations(table, 2):
        for streaming in (True, False):
            given = base | with_needs(one, table) | with_needs(other, table)
            if table is not TABLE_OPTIONS and not STREAMS & given.keys():
                given["stream"] = "s"
            chosen = [option for option in table if option.name in given]
            says = any(set(option.excludes) & given.keys() for option in chosen) or any(
                option.only == (BATCH if streaming else STREAMING) for option in chosen
            )
            assert refused(parse_side, given, streaming) == says, (
                f"{one.name} and {other.name}, streaming={streaming}: refused={says} on the page. "
                "`needs`, `excludes` and `only` of an option say what parse_...() refuses; if a "
                f"value is wrong in {given}, VALUES in this file needs another one"
            )


@each_side
def test_an_option_is_refused_without_what_it_needs(table, base, parse_side):
    for option in table:
        given = base | with_needs(option, table)
        if table is not TABLE_OPTIONS and not STREAMS & given.keys():
            given["stream"] = "s"
        streaming = option.only != BATCH
        assert not refused(parse_side, given, streaming), option.name
        for need in option.needs:
            rest = {name: value for name, value in given.items() if name != need}
            assert refused(parse_side, rest, streaming), f"{option.name} without {need}"


@each_side
def test_a_malformed_value_is_answered_with_what_the_option_does(table, base, parse_side):
    for option in table:
        if option.name in ("url", "checkpointLocation"):
            continue
        wrong = "[" if option.type == "pattern" else " "
        given = base | {o.name: value_of(o) for o in table if o.required} | {option.name: wrong}
        with pytest.raises(PgQueueError, match=f"option {option.name} is") as error:
            parse_side(given, True)
        assert error.value.hint == option.help


def test_every_option_has_a_default_that_is_said():
    """Without a default, the last sentence says what is done; but for how to connect."""
    for option in SOURCE_OPTIONS + STREAM_SOURCE_OPTIONS + TABLE_OPTIONS + SINK_OPTIONS:
        known = option.required or option.default is not None or "By default" in option.help
        assert known or option.name in NO_DEFAULT, (
            f"{option.name} has no `default`: its text ends with a sentence 'By default ...'"
        )
        assert option.help.count("By default") <= 1
        if "By default" in option.help:
            assert re.search(r" By default [^.]+\.$", option.help), option.name


NO_DEFAULT = {
    *("url", "user", "password", "passwordFile"),  # libpq's
    *("stream", "streams", "streamPattern"),  # one of them is needed
    *("startingTimestamp", "endingTimestamp", "columns", "action", "consumer", "txnVersion"),
    *("checkpointLocation", "maxRecordsPerPartition"),
}
