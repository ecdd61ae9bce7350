"""A database of an earlier version, in use, becomes one of the next version and keeps its promises.

`versions/` has the SQL of each released version (`freeze.py`): what it installed, and did, is
brought to this version. And a version after this one is made up here: a copy of `sql/` in which a
column has another name, a stream has one more, and a function one more argument.
"""

import hashlib
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import wait_until
from tests.sql import checker, freeze, internals
from tests.sql.catalogue import catalogue, offered
from tests.sql.owing import assert_delivers, make_streams, owed, use
from tests.sql.owing_features import FEATURES, owed_of_all, pgmq, use_features
from tests.sql.queue import *
from tests.sql.table_writes import Write, content, staged_tables, target, write

DIGESTS = {
    1: "641bcafe71e12953618066fd85946700552b725ba791d822266bb0c170794c64",
    2: "47ec82cb67fa9f3d009eb851582f9e2bf437c0c193157347400e5c5dc71fc07d",
}
"""SHA-256 of each file of `versions/`."""

THIS = schema.expected_version()
MIGRATION = f"""
-- From version {THIS}: words that explain themselves.
do $$
begin
    if (select max(version) from pgqueue.installed) >= {THIS + 1} is not false then
        return;
    end if;
    alter table pgqueue.consumer_cursors rename column delivered_at to delivered_when;
    alter table pgqueue.streams add column colour text;
    update pgqueue.streams set colour = 'blue ' || name;
    alter table pgqueue.streams
        alter column colour set not null, alter column colour set default 'red';
end $$;
"""


COLOUR = "    colour text not null default 'red',\n    bound "
PAUSE = "pause(p_stream text, p_consumer text, p_why text default '')"


def make_next_version(folder: Path) -> None:
    """Change a copy of the SQL as somebody would to whom the README says how."""

    def change(name: str, old: str, new: str) -> None:
        text = (folder / name).read_text()
        assert old in text, f"{name} has changed: {old}"
        (folder / name).write_text(text.replace(old, new))

    for file in folder.rglob("*.sql"):
        file.write_text(re.sub(r"\bdelivered_at\b", "delivered_when", file.read_text()))
    migration = f"migrations/{THIS + 1}.sql"
    change("schema.sql", f"pgqueue.version = {THIS};", f"pgqueue.version = {THIS + 1};")
    last = f"\\ir migrations/{THIS}.sql\n"
    change("install.sql", last, f"{last}\\ir {migration}\n")
    change("base/streams.sql", "    bound ", COLOUR)
    change("operate/seek.sql", "pause(p_stream text, p_consumer text)", PAUSE)
    (folder / migration).write_text(MIGRATION)


@pytest.fixture
def old(empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Conn]:
    """A database of this version; what is installed from here on is the next one."""
    with connection.connect(empty_url) as conn:
        schema.install(conn)
        folder = tmp_path / "sql"
        shutil.copytree(schema.sql_directory(), folder)
        make_next_version(folder)
        monkeypatch.setattr(schema, "sql_directory", lambda: folder)
        yield conn


def assert_alike(upgraded: dict[str, list[str]], fresh: dict[str, list[str]], version: int) -> None:
    """What is in the schema after an upgrade is what a new installation has."""
    for what, rows in fresh.items():
        lacks = sorted({*rows} - {*upgraded[what]})
        has = sorted({*upgraded[what]} - {*rows})
        assert upgraded[what] == rows, (
            f"{what}: an upgraded database lacks {lacks}, and has {has}. What this version "
            f"stores is also in sql/migrations/{version}.sql: see 'A migration' in sql/changing.md"
        )


def make_anew(conn: Conn) -> None:
    """Install what is installed from here on, with the streams and consumers of `use`."""
    schema.uninstall(conn)
    schema.install(conn)
    make_streams(conn)
    for name in [*ORDERINGS, "reader", "untouched"]:
        value(conn, "create_consumer", "s", name, "earliest")


def test_a_released_version_stays_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `freeze` replaces none, wherever it runs: a tag of git is not asked."""
    for version, digest in DIGESTS.items():
        monkeypatch.setattr(schema, "expected_version", lambda version=version: version)
        with pytest.raises(SystemExit, match="is kept: a change of the schema is a new version"):
            freeze.main()
        kept = (freeze.VERSIONS / f"{version}.sql.xz").read_bytes()
        assert hashlib.sha256(kept).hexdigest() == digest
    assert sorted(DIGESTS) == freeze.released(), "a new version is recorded in DIGESTS"
    monkeypatch.setattr(freeze, "VERSIONS", tmp_path)
    freeze.main()
    assert freeze.sql_of(max(DIGESTS)) == schema.script(transaction=False)


@pytest.mark.each_version
@pytest.mark.parametrize("version", freeze.released())
def test_a_released_version_becomes_this_one_and_owes_the_same(
    version: int, empty_url: str, conn: Conn
) -> None:
    """Whoever changes what is stored writes a migration: `sql/changing.md`."""
    with connection.connect(empty_url) as old:
        freeze.install(old, version)
        known = use(old, empty_url, internals.insert_messages)
        before = owed(old)
        schema.install(old)
        make_anew(conn)
        assert schema.installed_version(old) == schema.expected_version()
        assert_alike(catalogue(old), catalogue(conn), THIS)
        assert owed(old) == before
        checker.check(old)
        assert_delivers(old, known, before)


@pytest.fixture
def owner(empty_url: str) -> Iterator[str]:
    """The url of a role that owns the database, and is no superuser."""
    role = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    with connection.connect(empty_url) as conn:
        conn.execute(f"create role {role} login".encode())
        conn.execute(f"grant create on database {conn.info.dbname} to {role}".encode())
        yield make_conninfo(empty_url, user=role)
        conn.execute(f"drop owned by {role} cascade".encode())
        conn.execute(f"drop role {role}".encode())


def test_consumers_and_streams_of_the_first_version_keep_their_settings(empty_url: str) -> None:
    """Those that nobody set, too, where the default has changed; new ones have the new default."""
    with connection.connect(empty_url) as old:
        freeze.install(old, 1)
        columns = "select attname from pg_attribute where attrelid = 'pgqueue.%s'::regclass"
        known = dict[str, dict[str, Any]]()  # what version 1 has
        for what, each in SETTINGS.items():
            names = {row[0] for row in old.execute((columns % f"{what}s").encode())}
            known[what] = {name: each[name] for name in each if name in names}
        for name in known["stream"]:
            value(old, "create_stream", name, "json")
            value(old, "alter_stream", name, Jsonb({name: known["stream"][name]}))
        value(old, "create_stream", "s")
        value(old, "create_group", "s", "group", 2)
        given = {name: NEEDS.get(name, {}) | {name: v} for name, v in known["consumer"].items()}
        given["plain"] = {}
        given["max_deliver_count"] = {"max_deliver_count": 3}  # "never" was no word of it
        for name, settings in given.items():
            value(old, "create_consumer", "s", name, p_settings=Jsonb(settings))
        value(old, "create_consumer", "s", "aged", p_settings='{"ageing": "1 s"}')
        sent = [value(old, "send", "s", "x", p_priority=each) for each in (0, 3, 0, 7, 5)]
        held = call(old, "receive", "s", "aged", 1)
        schema.install(old)
        value(old, "create_consumer", "s", "new")
        given |= {name: {"backoff": "constant"} for name in ("aged", "group")}
        settings = {
            row.consumer: row.settings
            for row in internals.rows(old, "select * from pgqueue.consumer_settings")
        }
        expected = {name: AT_ONCE | each for name, each in given.items()}
        assert settings == expected | {"group": {}, "new": {}}
        for row in internals.rows(old, "select * from pgqueue.stream_stats"):
            each = known["stream"].get(row.stream)
            assert row.settings == ({} if each is None else {row.stream: each})
        left = [sent[4], sent[1], sent[0], sent[2]]
        assert (seqs_of(held), acked(old, "s", "aged")) == ([sent[3]], left)
        assert value(old, "ack", claim_of(held)) == 1


def test_the_recorded_backlog_of_a_consumer_is_kept(empty_url: str) -> None:
    with connection.connect(empty_url) as old:
        freeze.install(old, 2)
        value(old, "create_stream", "s")
        id_ = value(old, "create_consumer", "s", "c", p_settings='{"max_backlog": 2}')
        value(old, "send", "s", "x")
        schema.install(old)
        names = "select relname from pg_class where relkind = 'S' and relname ~ '^(room|backlog)_'"
        assert [row.relname for row in internals.rows(old, names)] == [f"backlog_{id_}"]
        value(old, "send", "s", "x")
        with pytest.raises(psycopg.Error, match="has a backlog of 2"):
            value(old, "send", "s", "x")


def test_a_batch_that_was_being_written_to_a_table_is_written_by_the_new_version(
    empty_url: str,
) -> None:
    """Its number is above those of version 2, whose counter had other bits."""
    with connection.connect(empty_url) as old:
        freeze.install(old, 2)
        old.execute("create table public.bills (id int)")
        given = target("public.bills", {"id": "int"})
        killed = [Write(old, given, batch=batch).stage((1,)) for batch in range(3)]
        schema.install(old)
        for batch, each in enumerate(killed):
            with pytest.raises(psycopg.Error, match="is not a number that open_table") as caught:
                each.stage((1,))
            assert caught.value.sqlstate == "PQ008"
            assert write(old, given, (batch + 10,), batch=batch)
        assert content(old, "bills") == [(10,), (11,), (12,)]
        assert staged_tables(old) == set()


APART = ("per_key_capacity", "max_deliver_count")  # the first one contradicts on_full=drop_oldest
PAUSED = ("fair", "per_key_limit", "per_key_interval", "per_key_burst", "per_key_latest")
CHANGED = [
    [name for name in SETTINGS["consumer"] if name not in (*APART, *PAUSED)],
    [*APART, *SETTINGS["stream"]],
]
"""Settings whose defaults may change, together: all but those that need a pause of the consumer."""


@pytest.mark.parametrize("changed", CHANGED)
def test_a_new_default_reaches_who_was_given_no_other_value(
    changed: list[str], empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that it has not finished; and a value that was given stays, if it is the default."""
    new = SETTINGS["consumer"] | {"max_deliver_count": 3} | SETTINGS["stream"]
    folder = tmp_path / "sql"
    shutil.copytree(schema.sql_directory(), folder)
    with connection.connect(empty_url) as conn:
        schema.install(conn)
        own: dict[str, Any] = {}
        for of_what, name, default in internals.rows(
            conn, "select of_what, name, default_value from _pgqueue.settings()"
        ):
            if name in changed:
                text = (folder / "base/settings.sql").read_text()
                old = "null" if default is None else f"'{default}'"
                line = rf"(\('{of_what}', +'{name}', +'\w+', +){old},"
                text, found = re.subn(line, rf"\g<1>'{new[name]}',", text)
                assert found == 1, name
                (folder / "base/settings.sql").write_text(text)
                if default is not None and of_what == "consumer":
                    own[name] = default
        value(conn, "create_stream", "s", "json")
        value(conn, "create_group", "s", "group", 2)
        for name, settings in (("plain", {}), ("own", own)):
            value(conn, "create_consumer", "s", name, "earliest", p_settings=Jsonb(settings))
        seqs = [value(conn, "send", "s", '{"id": 1}', p_key=key) for key in ("a", "b", None)]
        shown = "select settings, defaults from pgqueue.consumer_settings where consumer = %s"
        before = {name: conn.execute(shown, [name]).fetchone() for name in ("plain", "own")}
        monkeypatch.setattr(schema, "sql_directory", lambda: folder)
        schema.install(conn)
        for name, (given, defaults) in ((n, b) for n, b in before.items() if b is not None):
            now = {s: new[s] if s in changed else v for s, v in defaults.items()}
            assert conn.execute(shown, [name]).fetchone() == (given, now), name
        (given, now) = conn.execute(
            "select settings, defaults from pgqueue.stream_stats"
        ).fetchall()[0]
        assert given == {}
        assert {s: now[s] for s in now if s in changed} == {s: new[s] for s in now if s in changed}
        checker.check(conn)
        assert acked(conn, "s", "plain") == acked(conn, "s", "own") == seqs


@pytest.mark.parametrize(
    "version",
    [pytest.param(v, marks=[pytest.mark.longer] if v > 1 else []) for v in freeze.released()],
)
def test_an_owner_that_is_no_superuser_upgrades(version: int, owner: str) -> None:
    """In one transaction: one that fails at its end has changed nothing."""
    with connection.connect(owner) as old:
        freeze.install(old, version)
        check = use_features(old)
        before = owed_of_all(old), catalogue(old)
        fails = schema.script(transaction=False) + ";select 1 / 0"
        with pytest.raises(psycopg.errors.DivisionByZero), old.transaction():
            old.execute(fails.encode(), prepare=False)
        assert (owed_of_all(old), catalogue(old)) == before
        schema.install(old)
        assert schema.installed_version(old) == THIS
        assert call(old, "numbers_behind") == []
        assert owed_of_all(old) == before[0]
        check()


def test_what_is_stored_and_called_changes_with_the_version_alone(empty_url: str) -> None:
    """Or programs of one version would find two schemas. Before a release: `freeze.py`."""
    version = schema.expected_version()
    if version not in freeze.released():
        pytest.skip(f"version {version} is not released")
    with connection.connect(empty_url) as conn:
        freeze.install(conn, version)
        kept = offered(conn)
        schema.uninstall(conn)
        schema.install(conn)
        now = offered(conn)
    for what in kept:
        assert now[what] == kept[what], "`python -m tests.sql.freeze`, or a new version"


@pytest.mark.all_versions
@pytest.mark.promise("operations: upgrades")
def test_an_upgraded_database_is_like_a_new_one(old: Conn, empty_url: str, conn: Conn) -> None:
    """And delivers exactly what it owed."""
    known = use(old, empty_url, internals.insert_messages)
    before = owed(old)
    states = {state for each in before.values() for state in each.values()}
    assert states == {"new", "ready", "delayed", "waiting", "claimed", "dead"}
    make_anew(conn)
    assert schema.installed_version(old) == THIS
    schema.install(old)
    assert schema.installed_version(old) == THIS + 1
    colours = old.execute("select colour from pgqueue.streams order by name").fetchall()
    assert colours == [("blue b",), ("blue j",), ("blue s",)]
    upgraded = catalogue(old)
    assert_alike(upgraded, catalogue(conn), THIS + 1)
    schema.install(old)
    assert catalogue(old) == upgraded
    assert owed(old) == before
    checker.check(old)
    assert_delivers(old, known, before)


@pytest.mark.longer
def test_each_feature_owes_in_an_upgraded_database_what_it_owed(old: Conn) -> None:
    schema.install(old, pgmq=True)
    check = use_features(old, pgmq, *FEATURES)
    before = owed_of_all(old)
    schema.install(old, pgmq=True)
    assert owed_of_all(old) == before
    checker.check(old)
    check()


@pytest.mark.all_versions
def test_functions_of_the_version_before_are_gone(old: Conn) -> None:
    """Also one that has another argument now: a call would find two."""
    old.execute("create function _pgqueue.of_old(int) returns int language sql as 'select 1'")
    schema.install(old)
    assert one(old, "select to_regprocedure('_pgqueue.of_old(int)')") is None
    assert one(old, "select to_regprocedure('pgqueue.pause(text, text, text)')")
    old.execute("create function pgqueue.claim(text, text) returns int language sql as 'select 1'")
    schema.install(old)
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


@pytest.mark.promise("operations: upgrades")
def test_upgrading_while_sessions_are_at_work_ends_well(old: Conn, empty_url: str) -> None:
    """Senders and workers of before may fail once, with an error, and lose nothing."""
    make_streams(old)
    consumer = value(old, "create_consumer", "s", "none", "earliest")
    over, upgraded = threading.Event(), threading.Event()
    goes_on = [threading.Event() for _ in range(4)]
    sent: list[int] = []
    got: list[int] = []

    def send(conn: Conn) -> None:
        sent.append(value(conn, "send", "s", "x", "k"))

    def work(conn: Conn) -> None:
        with conn.transaction():
            found = call(conn, "receive", "s", "none", 5)
            if found:
                value(conn, "ack", claim_of(found))
        got.extend(seqs_of(found))

    def run(step: Callable[[Conn], None], done: threading.Event) -> None:
        with connection.connect(empty_url) as conn:
            while not over.is_set():
                try:
                    step(conn)
                except psycopg.Error:
                    if done.is_set():
                        raise  # after the upgrade nothing fails
                if upgraded.is_set():
                    done.set()

    with ThreadPoolExecutor(4) as pool:
        steps = zip([send, send, work, work], goes_on, strict=True)
        running = [pool.submit(run, *each) for each in steps]
        try:
            wait_until(lambda: len(got) >= 20)
            schema.install(old)
            upgraded.set()
            assert all(event.wait(20) for event in goes_on)
        finally:
            over.set()
        for each in running:
            each.result()
    got += acked(old, "s", "none")
    assert sorted(got) == sorted(sent)
    checker.check(old, {consumer: set(got)})


@pytest.mark.longer
@pytest.mark.promise("operations: upgrades")
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
