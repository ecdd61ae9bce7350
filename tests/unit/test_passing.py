"""The errors that pass end no worker and no group: they are in one table."""

import signal
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import spark_pgqueue
from spark_pgqueue.command_line.app import repeat
from spark_pgqueue.postgres import connection, retrying
from spark_pgqueue.worker import Consumer
from tests.processes import wait_until
from tests.unit.test_worker import running

CONNECTIONS = [each.ljust(5, "0") for each in retrying.PASSING_SQLSTATES]


def error_of(url: str, sqlstate: str) -> psycopg.Error:
    with connection.connect(url) as conn, pytest.raises(psycopg.Error) as caught:
        conn.execute(f"do $$ begin raise 'x' using errcode = '{sqlstate}'; end $$".encode())
    return caught.value


def test_an_error_of_the_table_is_tried_again_by_all_and_a_cancelled_statement_once(server):
    for sqlstate in (*CONNECTIONS, *retrying.STATEMENT_SQLSTATES):
        error, tries = error_of(server.url, sqlstate), []
        assert retrying.is_worth_a_retry(error)
        assert retrying.is_passing(error) == (sqlstate in CONNECTIONS)

        def attempt(error=error, tries=tries):
            tries.append(error)
            if len(tries) < 3:
                raise error
            return "done"

        if sqlstate == "57014":
            with pytest.raises(psycopg.errors.QueryCanceled):
                retrying.with_backoff(attempt, server.url, 5)
            assert len(tries) == 2
        else:
            assert retrying.with_backoff(attempt, server.url, 5) == "done"


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


def test_other_errors_are_not_tried_again(server):
    for sqlstate in ("42601", "22003", "28P01", "XX000", "57P04"):
        assert not retrying.is_worth_a_retry(error_of(server.url, sqlstate))


@pytest.mark.parametrize(
    ("kind", "sqlstates"),
    [
        ("worker", [*CONNECTIONS, *retrying.STATEMENT_SQLSTATES]),
        ("group", retrying.STATEMENT_SQLSTATES),
        ("handler", CONNECTIONS),  # its other errors end the run
    ],
)
def test_a_worker_goes_on_after_each_error_that_passes(url, conn, sqlstates, kind):
    """The error comes from the server, for the first handling of a message alone."""
    table, when, only = {
        "worker": (
            "pgqueue.consumer_messages",
            "after insert or update of token",
            "when (new.token is not null)",
        ),
        "group": ("pgqueue.group_partitions", "before insert", "when (new.arrival_no > 0)"),
        "handler": ("handled", "before insert", ""),
    }[kind]  # of a worker, its claim; of a group, its commit
    conn.execute("create sequence tries")
    conn.execute("create table handled (seq bigint)")
    with spark_pgqueue.connect(url) as queue:
        for sqlstate in sqlstates:
            queue.create_stream(sqlstate)
            create = queue.create_consumer if kind == "worker" else queue.create_group
            create(sqlstate, "c", start="earliest")
            conn.execute("alter sequence tries restart")
            conn.execute(
                "create or replace function fail() returns trigger language plpgsql as $$ begin"
                " if nextval('public.tries') = 1 then"
                f" raise 'x' using errcode = '{sqlstate}'; end if; return new; end $$".encode()
            )
            conn.execute(
                f"create or replace trigger fail {when} on {table} for each row {only}"
                " execute function fail()".encode()
            )
            queue.send(sqlstate, "x")
            assert handled(queue, url, sqlstate, kind) == 1, sqlstate
            last = conn.execute("select last_value > 1 from tries").fetchone()
            assert last == (True,), sqlstate


def handled(queue, url, stream, kind):
    """How many messages a run handles that ends with the first."""
    wait = timedelta(seconds=30)  # for one that never comes again
    if kind == "worker":
        worker = Consumer(url, stream, "c")
        return worker.run(lambda message: worker.stop(), wait=wait)
    group, calls = queue.group(stream, "c"), []

    def handle(messages, conn):
        conn.execute("insert into handled values (%s)", [messages[0].seq])
        calls.append(messages)
        if kind == "handler" or len(calls) == 2:
            group.stop()

    return group.run(handle, wait=wait)


def test_a_command_that_repeats_its_work_outlives_errors_of_adbc(url, capsys):
    """As of a segment that the exporter of an archive reads while Postgres restarts."""
    times = []

    def work():
        times.append(1)
        if len(times) == 3:
            raise KeyboardInterrupt
        with closing(connection.connect_adbc(url)) as conn, conn.cursor() as cursor:
            cursor.execute("select * from no_such_table")

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            repeat(work, timedelta(milliseconds=1), lambda _: True)
    finally:
        signal.signal(signal.SIGTERM, before)  # a command is alone in its process
    assert capsys.readouterr().err.count("no_such_table") >= 2


@pytest.mark.parametrize("kind", ["worker", "group"])
def test_a_worker_survives_idle_session_timeout(url, kind):
    short = make_conninfo(url, options="-c idle_session_timeout=100")
    got = []
    with spark_pgqueue.connect(url) as queue, spark_pgqueue.connect(short) as mine:
        queue.create_stream("s")
        queue.create_consumer("s", "c", start="earliest")
        queue.create_group("s", "g", start="earliest")
        worker = Consumer(short, "s", "c") if kind == "worker" else mine.group("s", "g")
        with running(worker, lambda *given: got.append(given)) as run:
            for n in range(1, 3):
                time.sleep(0.3)
                queue.send("s", "x")
                wait_until(lambda n=n: run.done() or len(got) >= n)


def test_a_group_survives_a_restart_longer_than_its_patience(url, server):
    """With patience=0, also the renewal of its lease after the error fails."""
    got = []
    with spark_pgqueue.connect(url, patience=0) as queue:
        queue.create_stream("s")
        queue.create_group("s", "g", start="earliest")
        group = queue.group("s", "g")
        with running(group, lambda messages, conn: got.extend(messages)) as run:
            time.sleep(0.5)
            server.restart("immediate")
            with spark_pgqueue.connect(url) as other:
                other.send("s", "x")
            wait_until(lambda: run.done() or got, 60)
