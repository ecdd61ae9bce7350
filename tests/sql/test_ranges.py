"""Rows of ranges: each range is looked up by itself, whatever the planner knows of the table."""

import re
import time

import psutil
import psycopg
import pytest

from spark_pgqueue.postgres import schema
from tests.sql.queue import Conn, consumer, receive

RANGE = re.compile(r">=\s*lower\(")
KEPT = re.compile(r"offset 0|order by|limit|for update|count\(\*\)|exists \(|fetch first", re.I)
"""With one of these a subquery stays one, and so is executed for each range."""


def subqueries(text: str) -> list[str]:
    """What is in parentheses behind lateral; literals that follow each other are one."""
    text = re.sub(r"'\s*\n\s*'", "", re.sub(r"--.*", "", text))
    found = []
    for start in re.finditer(r"lateral \(", text):
        depth, end = 1, start.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(text[start.end() : end - 1])
    return found


def test_each_lookup_of_ranges_stays_a_loop_over_the_ranges() -> None:
    """Else a table that was analyzed when it was empty is read once, and compared with each."""
    loose = {
        f"{path.name}: {' '.join(query.split())[:120]}"
        for path in schema.sql_directory().rglob("*.sql")
        for query in subqueries(path.read_text())
        if RANGE.search(query) and not KEPT.search(query)
    }
    assert not loose


def test_no_join_compares_rows_with_ranges() -> None:
    joins = [
        f"{path.name}: {found.group()}"
        for path in schema.sql_directory().rglob("*.sql")
        for found in re.finditer(r"join [\w.%]+ \w+ on \S+ >= lower\(.*", path.read_text())
    ]
    assert not joins


def test_a_claim_of_a_stream_that_was_analyzed_with_one_message_is_as_fast(
    conn: Conn, stream: int
) -> None:
    """In seconds of the server's processor. The planner took each message with each range."""
    consumer(conn, ordering="key")
    conn.execute("select pgqueue.send('s', 'x', 'first')")
    conn.execute("analyze")
    conn.execute(
        "select count(pgqueue.send('s', 'x', 'k' || i, p_deliver_at =>"
        " now() + make_interval(hours => 1, secs => i * 0.001))) from generate_series(1, 6000) i"
    )
    try:
        backend = psutil.Process(conn.info.backend_pid)
    except (psutil.Error, psycopg.Error):
        pytest.skip("the server is not on this machine")
    before, began = sum(backend.cpu_times()[:2]), time.monotonic()
    assert len(receive(conn, 100)) == 1
    took = sum(backend.cpu_times()[:2]) - before
    assert took < 1.5, f"{took} s, of {time.monotonic() - began}"
