"""A dump of a database in use, restored in another cluster, owes what it owed, and to whom."""

import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from spark_pgqueue import embedded
from spark_pgqueue.archive.exporter import export
from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests import conftest, fetched
from tests.conftest import VERSIONS, Server, user_of
from tests.sql import checker, clock, internals
from tests.sql.catalogue import catalogue
from tests.sql.internals import cursor_of
from tests.sql.owing import assert_delivers, owed, use
from tests.sql.queue import *
from tests.sql.test_capture import messages
from tests.sql.test_reading import read

pytestmark = pytest.mark.all_versions

# What a cluster has that is a year old, and one that was just made has not.
USE_TRANSACTION_IDS = (
    "do $$ begin for i in 1..20000 loop perform pg_current_xact_id(); commit; end loop; end $$"
)


@pytest.fixture(scope="module")
def elsewhere(server: Server, servers_home: Path) -> Iterator[embedded.Server]:
    """Another cluster, just made, of the newest version that has a pg_dump.

    For a fetched version it is the same version: no older minor version of pg_dump dumps it.
    """
    theirs = server.version if isinstance(server, embedded.Server) else None
    for version in (theirs,) if theirs in fetched.SUITES else VERSIONS:
        try:
            programs = binaries.find_binaries(version)
        except PgQueueError:
            continue
        if all((programs / name).is_file() for name in ("pg_dump", "pg_dumpall", "psql")):
            break
    else:
        pytest.skip(f"no pg_dump of PostgreSQL {', '.join(map(str, VERSIONS))} on this machine")
    home = servers_home / f"new-{version}"
    with embedded.start(home, version=version, settings=dict(conftest.SETTINGS)) as new:
        yield new
    shutil.rmtree(home)


def run(server: embedded.Server, program: str, url: str, *arguments: str, stdin: str = "") -> str:
    """What a program of a server's version prints."""
    path = binaries.find_binaries(server.version) / program
    done = subprocess.run(
        [path, *arguments, "-d", url], capture_output=True, text=True, timeout=120, input=stdin
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def restore(source: str, elsewhere: embedded.Server, *options: str) -> str:
    """Dump a database with its roles, and restore it; returns the url of the new one."""
    name = f"restored_{uuid.uuid4().hex[:12]}"
    with connection.connect(elsewhere.url) as conn:
        conn.execute(f"create database {name}".encode())
        # In SQL, which it is: those that are there already (postgres) are passed over.
        roles = run(elsewhere, "pg_dumpall", source, "--roles-only")
        run(elsewhere, "psql", elsewhere.url, "-X", "-q", stdin=roles)
    dump = run(elsewhere, "pg_dump", source, *options)
    strictly = ("-X", "-q", "-v", "ON_ERROR_STOP=1", "--single-transaction")
    run(elsewhere, "psql", elsewhere.url_of(name), *strictly, stdin=dump)
    return elsewhere.url_of(name)


@pytest.fixture
def app(new_role: Callable[..., str]) -> str:
    """A role that is a producer, and nothing else."""
    return user_of(new_role("producer"))


@pytest.mark.each_version
@pytest.mark.promise("restore: a restored dump")
def test_a_dump_that_is_restored_delivers_everything_once(
    conn: Conn, url: str, session: Session, app: str, elsewhere: embedded.Server
) -> None:
    """The new cluster has lower transaction ids, and a producer that is open has one of them."""
    if conn.info.server_version // 10000 > elsewhere.version:
        pytest.skip(f"no pg_dump of PostgreSQL {conn.info.server_version // 10000} on this machine")
    known = use(conn, url, internals.insert_messages)
    value(conn, "alter_stream", "j", Jsonb({"schema": "id decimal(9, 2) not null, at timestamp"}))
    known.consumers["gaps"] = value(conn, "create_consumer", "s", "gaps", "earliest")
    producer = session()
    producer.execute("begin")
    never = send_key(producer)
    send_key(conn)
    known.done["gaps"] = acked(conn, "s", "gaps")
    conn.execute(USE_TRANSACTION_IDS.encode())
    assert cursor_of(conn, "gaps").gaps
    before = owed(conn)
    states = {state for each in before.values() for state in each.values()}
    assert states == {"new", "ready", "delayed", "waiting", "claimed", "dead"}

    copy = restore(url, elsewhere)
    producer.execute("commit")
    with connection.connect(copy) as restored, connection.connect(copy) as late:
        now, then = (one(c, "select pg_current_xact_id()::text::int8") for c in (restored, conn))
        assert now < then - 10_000
        assert owed(restored) == before
        checker.check(restored)
        is_newer = elsewhere.version > conn.info.server_version // 10000  # what is granted differs
        whole, dumped = catalogue(conn), catalogue(restored)
        # A dump has no word on who may use a type that is a table's row: installing tells it again.
        assert is_newer or {**dumped, "types": whole["types"]} == whole

        late.execute("begin")
        first = send_key(late)
        second = send_key(restored)
        assert acked(restored, "s", "gaps") == [second]
        for _ in range(3):
            assert acked(restored, "s", "gaps") == []
        late.execute("commit")
        assert acked(restored, "s", "gaps") == [first]
        assert not cursor_of(restored, "gaps").gaps, "nobody can fill those of the dump"
        known.done["gaps"] += [second, first]

        schema.install(restored)
        assert is_newer or catalogue(restored) == whole
        with connection.connect(make_conninfo(copy, user=app)) as theirs:
            third = value(theirs, "send", "s", "of the role")
            assert value(theirs, "send", "j", '{"id": 1.25}')
            with pytest.raises(psycopg.Error, match="column id is decimal"):
                value(theirs, "send", "j", '{"id": 1.255}')
            with pytest.raises(Exception, match="permission denied for function receive"):
                call(theirs, "receive", "s", "gaps")
        sent = {first, second, third}
        assert never not in sent
        assert_delivers(restored, known, before, sent)


def test_offsets_after_a_restore(
    conn: Conn, url: str, stream: int, elsewhere: embedded.Server
) -> None:
    """Those of before the dump go on, in a group too; those of after it are refused."""
    if conn.info.server_version // 10000 != elsewhere.version:
        pytest.skip("one version is enough")
    value(conn, "create_group", "s", "g", 2, "earliest")
    leases = [row.lease_id for row in call(conn, "lease_partitions", "s", "g", "w")]
    first = send_key(conn)
    rows = call(conn, "read_partitions", "s", "g", leases)
    for row in rows:
        if row.seq is None:
            value(conn, "commit_offset", row.lease_id, row.next_offset)
    _, before = read(conn)
    second = send_key(conn)
    copy = restore(url, elsewhere)
    third = send_key(conn)
    _, beyond = read(conn, before)
    with connection.connect(copy) as restored:
        assert value(restored, "is_restored") is True
        value(restored, "recover")
        assert value(restored, "is_restored") is False
        again = send_key(restored)
        assert again == third
        with pytest.raises(psycopg.DatabaseError, match="beyond the state"):
            read(restored, beyond)
        assert read(restored, before)[0] == [second, again]
        rows = call(restored, "read_partitions", "s", "g", leases)
        assert [row.seq for row in rows if row.seq is not None] == [second, again]
        assert first not in [row.seq for row in rows]
        schema.install(restored)
        assert value(restored, "is_restored") is False


LACKING = "stream 's' does not store 4 published messages: they count as trimmed"


@pytest.mark.parametrize(
    ("ordering", "recovered"), [("none", True), ("key", False)], ids=["recovered", "not recovered"]
)
@pytest.mark.promise("restore: a dump beside maintain()")
def test_a_dump_beside_maintain_may_owe_what_it_lacks_and_stops_nobody(
    conn: Conn,
    url: str,
    session: Session,
    stream: int,
    elsewhere: embedded.Server,
    ordering: str,
    recovered: bool,
) -> None:
    """A table that was emptied is empty for the dump, whose older consumers owe its messages."""
    if conn.info.server_version // 10000 != elsewhere.version:
        pytest.skip("one version is enough")
    value(conn, "set_retention", "s", p_done=True)
    maintain(conn)
    for name in ("taken", "new"):
        consumer(conn, name, ordering)
    lost = send_keys(conn, *"abab")
    value(conn, "nack", claim_of(receive(conn, 2, "taken")))
    clock.pass_time(conn, timedelta(hours=1))
    maintain(conn)
    [kept] = send_keys(conn, "a")
    dumping = session()
    dumping.execute("begin isolation level repeatable read")
    snapshot = one(dumping, "select pg_export_snapshot()")
    dumping.execute("lock table only pgqueue.messages_1 in access share mode")  # dropped later
    for name in ("taken", "new"):
        while rows := receive(conn, 100, name):
            value(conn, "ack", claim_of(rows), lost)
    for _ in range(2):
        clock.pass_time(conn, timedelta(hours=1))
        maintain(conn)
    assert one(conn, "select min(seq) from pgqueue.messages") == kept
    copy = restore(url, elsewhere, f"--snapshot={snapshot}")
    with connection.connect(copy) as restored, warned(restored) as said:
        if recovered:
            value(restored, "recover")
            *skipped, trimmed = said
            assert len(skipped) == 2
            assert all("skips 4 messages that the stream does not" in text for text in skipped)
            assert trimmed == LACKING
        new = send_keys(restored, "b")
        for name in ("taken", "new"):
            # where nothing of a claim is stored, the call says so and is empty
            got = [seq for _ in range(4) for seq in acked(restored, "s", name, 2)]
            assert got == [kept, *new]
        assert (
            recovered
            or "dead-lettered 2 messages for consumer 'taken' of stream 's', no longer stored"
            in said[0]
        )
        checker.check(restored)


def test_what_a_dump_beside_maintain_lacks_stops_no_exporter_and_no_reader(
    conn: Conn,
    url: str,
    session: Session,
    stream: int,
    elsewhere: embedded.Server,
    tmp_path: Path,
) -> None:
    """No consumer owes these messages, and the dump does not know of their files yet."""
    if conn.info.server_version // 10000 != elsewhere.version:
        pytest.skip("one version is enough")
    value(conn, "set_retention", "s", p_done=True)
    value(conn, "set_archive", "s", str(tmp_path / "archive"))
    maintain(conn)
    consumer(conn)
    lost = send_keys(conn, *"abab")
    assert acked(conn, "s", "c") == lost
    clock.pass_time(conn, timedelta(hours=1))
    maintain(conn)
    [kept] = send_keys(conn, "a")
    dumping = session()
    dumping.execute("begin isolation level repeatable read")
    snapshot = one(dumping, "select pg_export_snapshot()")
    dumping.execute("lock table only pgqueue.messages_1 in access share mode")  # dropped later
    for _ in range(2):
        export(url)
        clock.pass_time(conn, timedelta(hours=1))
        maintain(conn)
    assert one(conn, "select min(seq) from pgqueue.messages") == kept
    copy = restore(url, elsewhere, f"--snapshot={snapshot}")
    with connection.connect(copy) as restored, warned(restored) as said:
        with pytest.raises(PgQueueError, match="published, but not stored"):
            export(copy)
        value(restored, "recover")
        assert said == [LACKING]
        assert read(restored)[0] == [kept]
        assert acked(restored, "s", "c") == [kept]
        clock.pass_time(restored, timedelta(hours=1))
        maintain(restored)
        new = send_keys(restored, "b")
        maintain(restored)
        assert export(copy)
        assert acked(restored, "s", "c") == new
        checker.check(restored)


def test_captured_tables_are_captured_after_a_restore(
    conn: Conn, url: str, stream: int, app: str, elsewhere: embedded.Server
) -> None:
    """And what a dump restores is sent once: by the messages in it, not by the triggers."""
    if conn.info.server_version // 10000 > elsewhere.version:
        pytest.skip(f"no pg_dump of PostgreSQL {conn.info.server_version // 10000} on this machine")
    consumer(conn, ordering="stream")
    conn.execute(
        "create table whole (id int primary key, name text);"
        "create table parts (id int, name text, primary key (id)) partition by list (id);"
        "create table part_1 partition of parts for values in (1);"
        "create table part_2 (name text, id int not null);"
        "alter table parts attach partition part_2 for values in (2);"
        "create table outbox (id int primary key, event text)"
    )
    conn.execute(
        f"alter table whole owner to {app}; grant create on schema public to {app}".encode()
    )
    call(conn, "capture", "whole", "s", None, ["id", "name"], p_old=True)
    call(conn, "capture", "parts", "s")
    call(conn, "capture", "outbox", "s", p_outbox=True)
    conn.execute("insert into whole values (1, 'a'); insert into parts values (1, 'b'), (2, 'c')")
    triggers = (
        "select array_agg(t order by t) from pg_trigger cross join lateral"
        " format('%s %s', tgrelid::regclass, tgname) t where tgname like 'pgqueue\\_%'"
    )
    before = one(conn, triggers)
    copy = restore(url, elsewhere)
    with connection.connect(copy) as restored:
        assert one(restored, triggers) == before
        schema.install(restored)
        restored.execute("update whole set name = 'd'; update whole set id = 7")
        restored.execute("insert into outbox values (1, 'paid'); truncate part_2")
        restored.execute("insert into part_2 values ('e', 2)")
        found = [(key, operation) for key, operation, _ in messages(restored)]
        assert found == [
            *(("1", "insert"), ("1", "insert"), ("2", "insert")),  # of before the dump
            *(("1", "update"), ("1", "delete"), ("7", "insert")),
            *(("1", "insert"), ("2", "delete"), ("2", "insert")),
        ]
        assert one(restored, "select count(*) from outbox") == 0
        for table in ("whole", "parts", "outbox"):
            call(restored, "capture", table, "s")
            call(restored, "release", table, "s")
        assert one(restored, "select count(*) from pg_proc where proname like 'pgqueue\\_%'") == 0


def test_a_captured_table_restored_beside_another_queue_sends_nothing_there(
    conn: Conn, url: str, stream: int, elsewhere: embedded.Server
) -> None:
    """Only the schema of the table is restored, where another stream has the number."""
    if conn.info.server_version // 10000 != elsewhere.version:
        pytest.skip("one version is enough")
    conn.execute("create schema app; create table app.orders (id int primary key)")
    call(conn, "capture", "app.orders", "s")
    conn.execute("insert into app.orders values (1)")
    name = f"staging_{uuid.uuid4().hex[:12]}"
    with connection.connect(elsewhere.url) as there:
        there.execute(f"create database {name}".encode())
    with connection.connect(elsewhere.url_of(name)) as staging:
        schema.install(staging)
        assert value(staging, "create_stream", "invoices", "json") == stream
        dump = run(elsewhere, "pg_dump", url, "-n", "app")
        run(elsewhere, "psql", elsewhere.url_of(name), "-X", "-v", "ON_ERROR_STOP=1", stdin=dump)
        with raises("PQ003", "app.orders has triggers of a capture, but is not captured to"):
            staging.execute("insert into app.orders values (2)")
        call(staging, "release", "app.orders", "invoices")
        staging.execute("insert into app.orders values (2)")
        assert one(staging, "select count(*) from app.orders") == 2
        assert one(staging, "select count(*) from pgqueue.messages") == 0


SEQUENCES = (
    *("seq_*", "publication_*", "*_seq", "claim_numbers", "gap_numbers"),
    *("write_numbers", "table_write_numbers"),
)


@pytest.mark.parametrize(
    "sequences",
    [pytest.param(True, marks=pytest.mark.longer), False],  # a whole dump has them too: see above
    ids=["with sequences", "without"],
)
@pytest.mark.promise("restore: data alone, or some tables")
def test_data_alone_without_its_sequences_is_noticed_and_recovered(
    conn: Conn, url: str, elsewhere: embedded.Server, sequences: bool
) -> None:
    """A schema and its data, restored one after the other; the data by tables, or whole."""
    if conn.info.server_version // 10000 != elsewhere.version:
        pytest.skip("one version is enough")
    known = use(conn, url, internals.insert_messages)
    before = owed(conn)
    copy = restore(url, elsewhere, "--schema-only")
    left_out = [] if sequences else [f"--exclude-table=pgqueue.{name}" for name in SEQUENCES]
    data = run(elsewhere, "pg_dump", url, "--data-only", *left_out)
    run(elsewhere, "psql", copy, "-X", "-q", "-v", "ON_ERROR_STOP=1", stdin=data)
    with connection.connect(copy) as restored:
        assert bool(call(restored, "numbers_behind")) is not sequences
        if not sequences:
            with raises("PQ011", "behind its rows"):
                value(restored, "send", "s", "x")
            value(restored, "recover")
        assert owed(restored) == before
        assert_delivers(restored, known, before, [value(restored, "send", "s", "new")])
