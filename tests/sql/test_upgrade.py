"""A database of an earlier version, in use, becomes one of this version and keeps its promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.sql import checker, clock, internals
from tests.sql.catalogue import catalogue
from tests.sql.owing import assert_delivers, make_streams, owed, use
from tests.sql.queue import ORDERINGS, Conn, acked, call, claim_of, one, seqs_of, value

VERSIONS = sorted((Path(__file__).parent / "versions").glob("*.sql"))


@pytest.fixture(params=VERSIONS, ids=lambda file: f"from_{file.stem}")
def old(request: pytest.FixtureRequest, empty_url: str) -> Iterator[Conn]:
    """A database of an earlier version."""
    with connection.connect(empty_url) as conn:
        conn.execute(request.param.read_bytes())
        yield conn


def write(conn: Conn, stream: int, n: int) -> list[int]:
    """Messages that nobody sees, as version 1 had them written."""
    found = conn.execute(
        "insert into pgqueue.messages (seq, stream_id, data) select"
        f" nextval('pgqueue.seq_{stream}'), {stream}, 'staged' from generate_series(1, {n})"
        " returning seq".encode()
    ).fetchall()
    return [seq for (seq,) in found]


def test_there_is_a_version_before_each_migration() -> None:
    folder = schema.sql_directory() / "migrations"
    targets = {int(file.stem) for file in folder.glob("[0-9]*.sql")}
    assert targets == set(range(2, schema.expected_version() + 1))
    assert {int(file.stem) + 1 for file in VERSIONS} == targets


@pytest.mark.all_versions
def test_an_upgraded_database_is_like_a_new_one(old: Conn, empty_url: str, conn: Conn) -> None:
    use(old, empty_url, write)
    make_streams(conn)
    for name in [*ORDERINGS, "reader", "untouched"]:
        value(conn, "create_consumer", "s", name, "earliest")
    schema.install(old)
    upgraded, fresh = catalogue(old), catalogue(conn)
    for what in fresh:
        assert upgraded[what] == fresh[what]
    schema.install(old)
    assert catalogue(old) == upgraded


@pytest.mark.all_versions
def test_an_upgraded_database_delivers_exactly_what_it_owed(old: Conn, empty_url: str) -> None:
    known = use(old, empty_url, write)
    before = owed(old)
    states = {state for each in before.values() for state in each.values()}
    assert states == {"new", "ready", "delayed", "waiting", "claimed", "dead"}
    schema.install(old)
    # what was set aside is in the line again, until it is dealt
    after = owed(old)
    for name in ("key", "stream"):
        for seq in [s for s, state in before[name].items() if state == "waiting"]:
            assert after[name][seq] in ("ready", "delayed")
            before[name][seq] = after[name][seq]
    assert after == before
    checker.check(old)
    assert_delivers(old, known, before)


def test_what_was_staged_before_an_upgrade_takes_no_published_message_along(
    old: Conn, empty_url: str
) -> None:
    stream = make_streams(old)
    value(old, "create_consumer", "s", "c", "earliest")
    value(old, "send", "s", "x")
    value(old, "stage", "x", 1, stream, "{[1,9223372036854775807)}")
    schema.install(old)
    clock.pass_time(old, timedelta(days=2))
    call(old, "maintain")
    assert internals.count(old, "staged blocks") == 0
    assert acked(old, "s", "c") == [1]


@pytest.mark.all_versions
def test_functions_of_the_version_before_are_gone(old: Conn) -> None:
    old.execute("create function pgqueue._of_old(int) returns int language sql as 'select 1'")
    schema.install(old)
    old.execute("create function pgqueue.claim(text, text) returns int language sql as 'select 1'")
    schema.install(old)
    assert one(old, "select to_regprocedure('pgqueue._of_old(int)')") is None
    twice = (
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
        " group by proname having count(*) > 1"
    )
    assert old.execute(twice).fetchall() == []


@pytest.mark.parametrize("what", ["view", "function"])
def test_where_others_depend_on_the_old_version_nothing_is_changed(old: Conn, what: str) -> None:
    make_streams(old)
    of = {
        "view": "select stream from pgqueue.stream_stats",
        "function": "select pgqueue.schema_version()",
    }
    old.execute(f"create view public.mine as {of[what]}".encode())
    before = catalogue(old)
    with pytest.raises((psycopg.Error, PgQueueError), match="other objects depend on"):
        schema.install(old)
    assert catalogue(old) == before


def test_upgrading_while_sessions_are_at_work_ends_well(old: Conn, empty_url: str) -> None:
    """Senders and workers of before may fail once, with an error, and lose nothing."""
    stream = make_streams(old)
    consumer = value(old, "create_consumer", "s", "none", "earliest")
    over = threading.Event()
    sent: list[int] = []
    got: list[int] = []
    upgraded = threading.Event()
    goes_on = [threading.Event() for _ in range(4)]

    def send(done: threading.Event) -> None:
        with connection.connect(empty_url) as conn:
            while not over.is_set():
                try:
                    sent.append(value(conn, "send", "s", "x", "k"))
                except psycopg.Error:
                    assert not done.is_set(), "after the upgrade nothing fails"
                if upgraded.is_set():
                    done.set()

    def work(done: threading.Event) -> None:
        with connection.connect(empty_url) as conn:
            while not over.is_set():
                try:
                    with conn.transaction():
                        found = call(conn, "receive", "s", "none", 5)
                        if found:
                            value(conn, "ack", claim_of(found))
                    got.extend(seqs_of(found))
                except psycopg.Error:
                    assert not done.is_set(), "after the upgrade nothing fails"
                if upgraded.is_set():
                    done.set()

    threads = [
        threading.Thread(target=what, args=[event])
        for what, event in zip([send, send, work, work], goes_on, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        while len(got) < 20:
            assert any(thread.is_alive() for thread in threads)
        schema.install(old)
        upgraded.set()
        assert all(event.wait(20) for event in goes_on)
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    got += acked(old, "s", "none")
    assert sorted(got) == sorted(sent)
    assert stream
    checker.check(old, {consumer: set(got)})


@pytest.mark.longer
def test_an_upgrade_behind_a_transaction_that_stays_open_fails_and_changes_nothing(
    old: Conn, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And meanwhile workers go on."""
    make_streams(old)
    value(old, "create_consumer", "s", "none", "earliest")
    monkeypatch.setattr(schema, "ATTEMPTS", 1)
    before = catalogue(old)
    failed: list[PgQueueError] = []

    def install() -> None:
        with connection.connect(empty_url) as conn:
            try:
                schema.install(conn)
            except PgQueueError as error:
                failed.append(error)

    with connection.connect(empty_url) as idle, connection.connect(empty_url) as worker:
        idle.execute("begin")
        value(idle, "send", "s", "x")
        installer = threading.Thread(target=install)
        installer.start()
        worked = 0
        while installer.is_alive():
            value(worker, "send", "s", "y")
            worked += len(acked(worker, "s", "none"))
        installer.join()
    (error,) = failed
    assert "in use" in error.message
    assert "idle" in (error.hint or "")
    assert worked > 5
    assert catalogue(old) == before
