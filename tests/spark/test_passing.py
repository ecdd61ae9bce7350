"""Errors that pass end no query: those of connections, and those of one statement."""

from __future__ import annotations

import time

import pytest
from psycopg.conninfo import make_conninfo

from tests.spark.conftest import Queue, wait_until

FAILURES = ["57014", "40001", "57P05", "25P04"]


@pytest.mark.longer
def test_a_query_goes_on_after_errors_that_pass(queue: Queue):
    """Idle sessions are ended all the time, and every other claim fails, each time otherwise."""
    queue.create("s", "c")
    queue.create("out", "d")
    queue.sql("create sequence tries")
    queue.sql(
        "create function fail() returns trigger language plpgsql as $$"
        " declare n bigint := nextval('public.tries');"
        f" begin if n %% 2 = 1 and n < {2 * len(FAILURES)} then"
        "   raise 'x' using errcode = (array['" + "', '".join(FAILURES) + "'])[n / 2 + 1];"
        " end if; return new; end $$"
    )
    queue.sql(
        "create trigger fail after insert on pgqueue.reader_claims"
        " for each row execute function fail()"
    )
    short = make_conninfo(queue.url, options="-c idle_session_timeout=300")
    frame = queue.load("s", "c", url=short).select("data")
    query = queue.publish(frame, "out", available_now=False, url=short)
    for n in range(len(FAILURES) + 1):
        queue.send("s", n, n)
        wait_until(lambda n=n: len(queue.sent("out")) == n + 1, query)
        time.sleep(0.5)
    query.stop()
    assert queue.sent("out") == [str(n) for n in range(len(FAILURES) + 1)]
    assert queue.sql("select last_value >= %s from tries", 2 * len(FAILURES)) == [(True,)]
