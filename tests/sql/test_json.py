"""JSON that jsonb cannot hold: every use of a payload reads it, and nothing is lost for it."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_pgqueue.postgres import schema
from tests.sql.queue import Conn, acked, call, one, seqs_of, value
from tests.sql.test_typed import JSON, ODD_JSON, TEMPLATES

NEAREST = [
    (r'"a\u0000\u0000b"', '"ab"'),
    (r'"\\u0000"', r'"\\u0000"'),
    (r'"\\\u0000\""', r'"\\\""'),
    (r'"\ud800"', '""'),
    (r'"\udc00\ud800"', '""'),
    (r'"\ud83d\ude00\ud83d"', r'"\ud83d\ude00"'),
    (r'"\ud83d\ud83d\ude00"', r'"\ud83d\ude00"'),
    (r'"\\ud83d\ude00"', r'"\\ud83d"'),
    (r'{"a\u0000": "\u00e4"}', '{"a": "ä"}'),
    ("1e200000", "1e2000"),
    ("-1.5e+00200000", "-1.5e2000"),
    ("[1, 1e-200000]", "[1, 1e-2000]"),
    ("0e2000000000", "0"),
    ("0." + "1" * 20000, "0." + "1" * 40),
    (r'["1e200000", "\"1e200000", 1e200000]', r'["1e200000", "\"1e200000", 1e2000]'),
]
"""What json takes, and what it is read as where jsonb does not hold it."""

UNHELD = [f'{{"total": 250, "x": {text}}}' for text, _ in NEAREST]
TOO_LARGE = '{"total": 250, "x": "\\u0000%s"}' % ("x" * 40000)  # to be mended
BEYOND = '{"total": 250, "x": %s}' % ("9" * 140000)
TOO_DEEP = '{"total": 250, "x": %s}' % ("[" * 6000 + "]" * 6000)  # with a small stack


def test_what_jsonb_cannot_hold_becomes_the_nearest_that_it_holds(conn: Conn) -> None:
    for text, nearest in NEAREST:
        found = one(conn, "select _pgqueue.as_jsonb(%s) = %s::text::jsonb", text, nearest)
        assert found, (text, one(conn, "select _pgqueue.as_jsonb(%s)::text", text))
    for text in (TOO_LARGE, BEYOND):
        assert one(conn, "select _pgqueue.as_jsonb(%s)", text) is None


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(TEMPLATES), JSON), max_size=20))
def test_all_that_a_stream_takes_is_read(conn: Conn, members: list[tuple[str, str]]) -> None:
    check_read(conn, [template.replace("%s", each) for template, each in members])


def test_odd_values_are_read(conn: Conn) -> None:
    check_read(conn, ODD_JSON)


READ = """
select t, case when is_taken then _pgqueue.as_jsonb(t) is not null or length(t) > 100000 end,
       case when is_held then _pgqueue.as_jsonb(t) = t::jsonb end
from (select t, pg_input_is_valid(t, 'json') as is_taken, pg_input_is_valid(t, 'jsonb') as is_held
      from unnest(%s::text[]) t) x
"""


def check_read(conn: Conn, texts: list[str]) -> None:
    """as_jsonb() fails for nothing that is JSON, and is ::jsonb where that works."""
    for text, is_read, is_same in conn.execute(READ, [texts]):
        assert is_read is not False, text[:200]
        assert is_same is not False, text[:200]


@pytest.fixture
def sent(conn: Conn) -> list[int]:
    """A json stream with a consumer each for what fits and what does not, and with UNHELD."""
    value(conn, "create_stream", "j", "json")
    for name, least in (("fits", 100), ("misfits", 300)):
        value(conn, "create_consumer", "j", name, "earliest", p_where=f"$.data.total > {least}")
    return [value(conn, "send", "j", data) for data in UNHELD]


def test_what_cannot_be_asked_at_all_is_delivered(conn: Conn, sent: list[int]) -> None:
    """A message that does not pass is forgotten: so somebody is to see it."""
    more = [value(conn, "send", "j", data) for data in (TOO_LARGE, BEYOND, TOO_DEEP)]
    conn.execute("set max_stack_depth = '700kB'")
    with pytest.raises(psycopg.errors.StatementTooComplex):
        conn.execute("select %s::text::jsonb", [TOO_DEEP])
    assert acked(conn, "j", "fits") == [*sent, *more]
    assert acked(conn, "j", "misfits") == more


def test_a_receive_with_a_condition_claims_what_it_fits(conn: Conn, sent: list[int]) -> None:
    value(conn, "create_consumer", "j", "all", "earliest")
    for least, found in ((300, []), (100, sent)):
        path = f"$.data.total > {least}"
        assert seqs_of(call(conn, "receive_where", "j", "all", path, 100)) == found


def test_what_a_binding_copies_is_filtered_alike(conn: Conn) -> None:
    for name in ("a", "b"):
        value(conn, "create_stream", name, "json")
    value(conn, "create_consumer", "b", "c", p_where="$.data.total > 100")
    value(conn, "bind", "a", "#", "b")
    for data in UNHELD:
        value(conn, "send", "a", data, p_key="k")
    assert len(acked(conn, "b", "c")) == len(UNHELD)


def test_all_views_show_messages_with_odd_json(conn: Conn, sent: list[int]) -> None:
    """What shows a payload as a text shows it as it was sent."""
    for query in (
        "select data from pgqueue.peek('j', 'fits', 100)",
        "select data from pgqueue.read('j', null, 100) where seq is not null",
    ):
        assert [row[0] for row in conn.execute(query.encode())] == UNHELD, query
    assert call(conn, "explain_message", "j", "fits", sent[0])


PGMQ_READS = [
    "read('q', 60, 100)",
    "read('q', 60, 100, '{\"total\": 250}')",
    "read_with_poll('q', 60, 100)",
    "read_grouped('q', 60, 100)",
    "read_grouped_rr_with_poll('q', 60, 100)",
    "pop('q', 100)",
]


@pytest.mark.usefixtures("face")
def test_each_way_of_pgmq_reads_all_messages(conn: Conn) -> None:
    sent = pgmq_queue(conn)
    for read in PGMQ_READS:
        with conn.transaction(force_rollback=True):
            query = f"select msg_id, read_ct, message ->> 'total' from pgmq.{read}"
            found = rows_of(conn, query)
        assert [row[0] for row in sorted(found)] == sent, read
        assert {row[1:] for row in found} == {(0 if "pop" in read else 1, "250")}, read


@pytest.mark.usefixtures("face")
def test_pgmq_shows_archives_and_counts_what_jsonb_cannot_hold(conn: Conn) -> None:
    sent = pgmq_queue(conn)
    last = value(conn, "send", one(conn, "select name from pgqueue.streams"), TOO_LARGE)
    query = "select msg_id, read_ct, message #>> '{}' from pgmq.read('q', 60, 100)"
    assert rows_of(conn, query)[-1] == (last, 1, TOO_LARGE)
    assert len(rows_of(conn, "select message from pgmq.q_q")) == len(sent) + 1
    assert one(conn, "select msg_id from pgmq.set_vt('q', %s::bigint, 0)", sent[0]) == sent[0]
    assert one(conn, "select read_ct from pgmq.read('q', 60, 1)") == 2
    assert one(conn, "select pgmq.archive('q', %s::bigint)", sent[0])
    assert len(rows_of(conn, "select message from pgmq.a_q")) == 1


def pgmq_queue(conn: Conn) -> list[int]:
    """A queue of pgmq with UNHELD, which came by its stream."""
    conn.execute("select pgmq.create('q')")
    stream = one(conn, "select name from pgqueue.streams")
    return [value(conn, "send", stream, data) for data in UNHELD]


def rows_of(conn: Conn, query: str) -> list[Any]:
    return conn.execute(query.encode()).fetchall()


ALLOWED = {
    "json.sql": "reads it",
    "checks.sql": "the door of streams with a schema, which jsonb has to hold",
    "publish.sql": "the same door, for COPY",
    "stream_functions.sql": "the quick way, which is tried before as_jsonb()",
}


def test_all_else_reads_payloads_by_one_function() -> None:
    casts = {
        file.name
        for file in [*schema.sql_files(), *schema.sql_files(schema.PGMQ)]
        if re.search(r"data(::|')jsonb|cast\(\S*data as jsonb", file.read_text())
    }
    assert casts == set(ALLOWED)
