"""The errors that pass end no worker and no group: they are in one table."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import spark_pgqueue
from spark_pgqueue.postgres import connection, retrying
from spark_pgqueue.worker import Consumer
from tests.processes import wait_until

CONNECTIONS = [each.ljust(5, "0") for each in retrying.PASSING_SQLSTATES]


def error_of(url: str, sqlstate: str) -> psycopg.Error:
    with connection.connect(url) as conn, pytest.raises(psycopg.Error) as caught:
        conn.execute(f"do $$ begin raise 'x' using errcode = '{sqlstate}'; end $$".encode())
    return caught.value


@pytest.mark.parametrize("sqlstate", CONNECTIONS)
def test_an_error_of_the_table_is_tried_again_by_all(url, sqlstate):
    failures = [error_of(url, sqlstate)]
    assert retrying.is_worth_a_retry(failures[0])

    def attempt():
        if failures:
            raise failures.pop()
        return "done"

    assert retrying.with_backoff(attempt, url, 5) == "done"


@pytest.mark.parametrize("sqlstate", retrying.STATEMENT_SQLSTATES)
def test_an_error_of_one_statement_is_tried_again_and_a_cancelled_one_once(url, sqlstate):
    error, times = error_of(url, sqlstate), 0
    assert retrying.is_worth_a_retry(error)
    assert not retrying.is_passing(error)

    def attempt():
        nonlocal times
        times += 1
        if times < 3:
            raise error
        return "done"

    if sqlstate == "57014":
        with pytest.raises(psycopg.errors.QueryCanceled):
            retrying.with_backoff(attempt, url, 5)
        assert times == 2
    else:
        assert retrying.with_backoff(attempt, url, 5) == "done"


def test_only_this_table_says_which_errors_pass():
    """No other module has a SQLSTATE of the table, or judges errors by classes of psycopg."""
    listed = [*retrying.PASSING_SQLSTATES, *retrying.STATEMENT_SQLSTATES]
    states = {each for each in listed if len(each) == 5} - {"25006"}  # its hint is another one
    names = {
        "LockNotAvailable": "schema.py",  # an installation tries again, with a hint of its own
        "DeadlockDetected": "schema.py",
        **dict.fromkeys(("QueryCanceled", "SerializationFailure", "AdminShutdown"), ""),
    }
    found = []
    for file in Path(spark_pgqueue.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if file.name != "retrying.py":
            found += [(file.name, each) for each in states if f'"{each}"' in text]
            found += [
                (file.name, n) for n, only in names.items() if n in text and file.name != only
            ]
    assert found == []


def test_other_errors_are_not_tried_again(url):
    for sqlstate in ("42601", "22003", "28P01", "XX000", "57P04"):
        assert not retrying.is_worth_a_retry(error_of(url, sqlstate))


@pytest.mark.parametrize(
    ("kind", "sqlstate"),
    [
        *(("worker", each) for each in [*CONNECTIONS, *retrying.STATEMENT_SQLSTATES]),
        *(("group", each) for each in retrying.STATEMENT_SQLSTATES),
        *(("handler", each) for each in CONNECTIONS),  # its other errors end the run
    ],
)
def test_a_worker_goes_on_after_each_error_that_passes(url, conn, sqlstate, kind):
    """The error comes from the server, for the first handling alone."""
    conn.execute("create sequence tries")
    only = ""
    with spark_pgqueue.connect(url) as queue:
        queue.create_stream("s")
        if kind == "worker":
            queue.create_consumer("s", "c", start="earliest")
            table, when = "pgqueue.claims", "after insert"
        else:
            queue.create_group("s", "c", start="earliest")
            table, when = "handled", "before insert"
        if kind == "group":
            table, only = "pgqueue.group_partitions", "when (new.line_no > 0)"  # its commit
        conn.execute("create table handled (seq bigint)")
        conn.execute(
            "create function fail() returns trigger language plpgsql as $$ begin"
            f" if nextval('public.tries') = 1 then raise 'x' using errcode = '{sqlstate}'; end if;"
            " return new; end $$".encode()
        )
        conn.execute(
            f"create trigger fail {when} on {table} for each row {only} execute function"
            " fail()".encode()
        )
        queue.send("s", "x")
        # Each ends when the message is handled; the wait is for one that never comes again.
        wait = timedelta(seconds=30)
        if kind == "worker":
            worker = Consumer(url, "s", "c")
            assert worker.run(lambda message: worker.stop(), wait=wait) == 1
        else:
            group = queue.group("s", "c")

            def handle(messages, conn):
                conn.execute("insert into handled values (%s)", [messages[0].seq])
                calls.append(messages)
                if kind == "handler" or len(calls) == 2:
                    group.stop()

            calls = []
            assert group.run(handle, wait=wait) == 1
        assert conn.execute("select last_value > 1 from tries").fetchone() == (True,)


@pytest.mark.parametrize("kind", ["worker", "group"])
def test_a_worker_survives_idle_session_timeout(url, kind):
    short = make_conninfo(url, options="-c idle_session_timeout=100")
    got, failed = [], []
    with spark_pgqueue.connect(url) as queue, spark_pgqueue.connect(short) as mine:
        queue.create_stream("s")
        queue.create_consumer("s", "c", start="earliest")
        queue.create_group("s", "g", start="earliest")
        worker = Consumer(short, "s", "c") if kind == "worker" else mine.group("s", "g")

        def run():
            try:
                worker.run(lambda *given: got.append(given))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            for n in range(1, 4):
                threading.Event().wait(0.4)
                queue.send("s", "x")
                wait_until(lambda n=n: failed or len(got) >= n)
        finally:
            worker.stop()
            thread.join(30)
    assert failed == []


def test_a_group_survives_a_restart_longer_than_its_patience(url, server):
    """With patience=0, also the renewal of its lease after the error fails."""
    got, failed = [], []
    with spark_pgqueue.connect(url, patience=0) as queue:
        queue.create_stream("s")
        queue.create_group("s", "g", start="earliest")
        group = queue.group("s", "g")

        def run():
            try:
                group.run(lambda messages, conn: got.extend(messages))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            threading.Event().wait(0.5)
            server.restart("immediate")
            with spark_pgqueue.connect(url) as other:
                other.send("s", "x")
            wait_until(lambda: failed or got, 60)
        finally:
            group.stop()
            thread.join(30)
    assert failed == []
