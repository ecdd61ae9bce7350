"""Texts that others chose, in SQL: of any length, they take time in proportion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import schema
from tests.sql.queue import Conn, consumer, one

pytestmark = pytest.mark.usefixtures("stream")

SOON = "20s"
"""A statement that takes longer fails: what grows with the square takes hours, and the rest ms."""

LITERAL = r"(?:E?'(?:[^'\\]|''|\\.)*')"
LITERALS = rf"{LITERAL}(?:\s*(?:\|\|\s*)?{LITERAL})*"
USE = re.compile(
    rf"(?:!?~\*?\s+|\bregexp_\w+\((?:[^'();]|\([^()']*\))*?,\s*|\bfrom\s+(?=E?'[\^,[]))({LITERALS})"
)
"""A regular expression in SQL, beside what uses it."""

ATOMS = [
    *("a", "0", " ", "\\", "'", '"', "@", ":", "/", "-", ".", "_", "[", "(", "{", "`", ",", "*"),
    *("#", "$", "%", "1e", "'\"", '\\"', "\\u", "\\ud800", "\\u0000", "now (", "now", "--", '$"'),
    *("a.", "seq ", "://", "''", "{a", "`a"),
]


def patterns() -> dict[str, str]:
    """The regular expressions of the SQL files, with a place of each."""
    found = {}
    for path in schema.sql_directory().rglob("*.sql"):
        if "migrations" in path.parts:
            continue
        text = re.sub(r"^\s*--.*$", "", path.read_text(), flags=re.MULTILINE)
        for use in USE.finditer(text):
            found[literal(use[1])] = path.name
    return found


def literal(sql: str) -> str:
    """What some literals beside each other mean."""
    parts = re.findall(r"(E?)'((?:[^'\\]|''|\\.)*)'", sql)
    plain = [(escaped, text.replace("''", "'")) for escaped, text in parts]
    return "".join(re.sub(r"\\(.)", r"\1", text) if escaped else text for escaped, text in plain)


def test_each_regular_expression_takes_time_in_proportion(conn: Conn) -> None:
    found = patterns()
    assert {"[?#]", "[*#]", "^seq +([0-9]{1,18})$"} <= found.keys()
    assert len(found) > 45
    conn.execute("set statement_timeout = '2 s'")  # of 40 texts, in each of which 1/16 s is much
    for pattern, where in found.items():
        # A pattern that is tried at each character takes a second for each 20,000 of them.
        for begin, end in (("", "!"), ('"', "")):
            try:
                conn.execute(
                    "select sum(regexp_count(%(b)s || repeat(a, 5000 / length(a)) || %(e)s, %(p)s))"
                    " from unnest(%(atoms)s::text[]) a",
                    {"b": begin, "e": end, "p": pattern, "atoms": ATOMS},
                )
            except psycopg.errors.QueryCanceled:
                pytest.fail(f"{where}: {pattern}")
            except psycopg.errors.InvalidRegularExpression:
                assert where == "capture_function.sql", pattern  # a text with SQL in it


CALLS = [
    "pgqueue.schedule_times('* * * * ' || repeat('1,', {n}))",
    "pgqueue.schedule_times(repeat('*/1 ', {n} / 4))",
    "pgqueue.scan_where(repeat('(', {n}), '{{a}}')",
    "pgqueue.scan_where('a', array[repeat('b', {n})])",
    "pgqueue.alter_stream('s', jsonb_build_object('schema', repeat('a int, ', {n})))",
    "pgqueue.alter_stream('s', jsonb_build_object('schema', repeat('array<', {n})))",
    "pgqueue.alter_stream('s', jsonb_build_object(repeat('dedup_window', {n}), 1))",
    "pgqueue.receive_where('s', 'c', ('$.\"' || repeat('\\\"', {n}) || '\"')::jsonpath)",
    "pgqueue.as_interval('p_every', repeat('1 day ', {n}))",
    "pgqueue.as_jsonpath('p_where', repeat('$.**', {n}))",
    "pgqueue.set_archive('s', 's3://' || repeat('a@', {n}))",
    "_pgqueue.as_jsonb('[' || repeat('1e200000,', {n}) || '1]')",
    "_pgqueue.as_jsonb('[\"' || repeat('\\\"', {n}) || '\\u0000\"]')",
]
"""Calls whose texts a rule reads by regular expressions, or item by item."""

PAIRS = [
    ("#.a." * 255 + "#", "a." * 511 + "b"),
    ("*.#." * 255 + "*", "." * 1024),
    ("#.a.b." * 170 + "c", "a.b." * 255 + "d"),
    ("#.\u00e9." * 200 + "z", "\u00e9." * 330),
]
"""Topics and keys of the most bytes that they may have."""


def test_a_call_with_a_long_text_takes_a_moment(conn: Conn) -> None:
    consumer(conn)
    conn.execute(f"set statement_timeout = '{SOON}'".encode())
    for sql in CALLS:
        code = "PQ003"  # or it is read
        try:
            conn.execute(f"select * from {sql.format(n=1 << 20)}".encode())
        except psycopg.Error as error:
            code = error.sqlstate
        assert code == "PQ003", sql


def test_a_topic_takes_a_moment_for_any_key(conn: Conn) -> None:
    conn.execute(f"set statement_timeout = '{SOON}'".encode())
    asked = "select _pgqueue.words(%s) ~ _pgqueue.topic_regex('p_topic', %s)"
    for topic, key in PAIRS:
        conn.execute(asked, [key, topic])
    schema.install(conn, pgmq=True)
    for pattern, key in (("a#." * 84 + "b", "a." * 127 + "a"), ("#a" * 127, "ab" * 127)):
        conn.execute("select pgmq.create('q'), pgmq.bind_topic(%s, 'q')", [pattern])
        conn.execute("select * from pgmq.test_routing(%s)", [key])


FUNCTIONS = """
select format('%s.%s', n.nspname, p.proname), p.proargnames[1:p.pronargs],
       array(select format_type(u.t, null) from unnest(p.proargtypes) with ordinality u (t, i)
             order by i), p.pronargs - p.pronargdefaults
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname in ('pgqueue', 'pgmq') and p.prokind = 'f' and p.prorettype <> 'trigger'::regtype
  and p.proname !~ '^_' order by 1, 2
"""

GIVEN: dict[str, str] = {
    "p_stream": "'s'", "p_consumer": "'c'", "integer": "1", "bigint": "1", "boolean": "true",
    "text": "'a'", "jsonb": "'{}'", "text[]": "'{a}'", "interval": "'1 s'", "bigint[]": "'{1}'",
    "timestamp with time zone": "now()", "int8multirange": "'{}'", "uuid": "gen_random_uuid()",
    "regclass": "'pg_class'", "bytea": "'x'::bytea",
}  # fmt: skip

FORMS = {
    "text": "{}",
    "text[]": "array[{}]",
    "jsonb": "jsonb_build_object('schema', {}, 'name', {})",
}


def calls(conn: Conn) -> Iterator[Any]:
    """Each text argument of each function, with a long text of some atoms."""
    for name, names, types, required in conn.execute(FUNCTIONS.encode()).fetchall():
        for k, form in enumerate(map(FORMS.get, types)):
            for atom in ("a", "1,", '"') if form else ():
                long = f"repeat('{atom}', {100_000 // len(atom)})"
                given = {
                    each: GIVEN.get(each, GIVEN.get(kind, "null"))
                    for each, kind in zip(names[:required], types, strict=False)
                }
                given[names[k]] = str(form).format(long, long)
                arguments = ", ".join(f"{each} => {text}" for each, text in given.items())
                yield f"select * from {name}({arguments})"


def test_no_argument_of_a_function_takes_long_for_its_length(conn: Conn) -> None:
    consumer(conn)
    schema.install(conn, pgmq=True)
    conn.execute("set statement_timeout = '5 s'; set client_min_messages = error")
    tried = 0
    for statement in calls(conn):
        try:
            conn.execute(f"rollback; begin; {statement}".encode())
        except psycopg.errors.QueryCanceled:
            pytest.fail(statement)
        except psycopg.Error:
            pass
        tried += 1
    conn.execute("rollback")
    assert tried > 800
    assert one(conn, "select count(*) from pgqueue.streams") == 1
