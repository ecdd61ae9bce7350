"""A copy of a database that is started as it is gives out numbers again: it is noticed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_pgqueue import embedded
from spark_pgqueue.command_line import doctor
from spark_pgqueue.postgres import binaries, connection, schema
from tests.conftest import SETTINGS, GivenServer, Server, _folder_in_memory, user_of
from tests.sql import internals
from tests.sql.queue import Conn, call, one, raises, send, value
from tests.sql.test_reading import read


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder that everybody may walk through: the servers' user has to."""
    home = Path(tempfile.mkdtemp(prefix="pgqueue-test-", dir=_folder_in_memory() or "/tmp"))
    home.chmod(0o755)
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def original(home: Path) -> Iterator[embedded.Server]:
    """A server with the schema and the stream s."""
    with embedded.start(home / "original", version=18, settings=dict(SETTINGS)) as server:
        with connection.connect(server.url) as conn:
            schema.install(conn)
            value(conn, "create_stream", "s")
        time.sleep(1)  # Postgres has the times of files in seconds
        yield server


def base_backup(server: embedded.Server, data: Path) -> None:
    """As pg_basebackup makes it."""
    program = binaries.find_binaries(18) / "pg_basebackup"
    if not program.exists():
        pytest.skip(f"there is no {program}")
    command = [program, "-d", server.url, "-D", data, "-c", "fast"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def folder(server: embedded.Server, data: Path) -> None:
    """As `cp -a` or `tar` makes it, of a server that is stopped: each file keeps its time."""
    server.stop()
    shutil.copytree(server.directory / "data", data, copy_function=shutil.copy2)
    server.restart()


def start(copy: Path) -> embedded.Server:
    """Start a copied data directory, as the servers' user."""
    data = copy / "data"
    data.chmod(0o700)
    for left in (*data.glob(".s.PGSQL*"), *data.glob("postmaster.*")):
        if left.name != "postmaster.opts":
            left.unlink()
    (copy / "lock").touch(mode=0o600)
    if os.geteuid() == 0:
        user = pwd.getpwnam(binaries.ROOT_RUNS_AS)
        os.chown(copy, 0, user.pw_gid)
        for place in (data, *data.rglob("*")):
            os.chown(place, user.pw_uid, user.pw_gid, follow_symlinks=False)
    return embedded.start(copy, version=18, settings=dict(SETTINGS))


@pytest.mark.parametrize(("copied", "mode"), [(base_backup, "fast"), (folder, "immediate")])
@pytest.mark.promise("restore: a copy that is started as it is")
def test_a_copy_of_the_server_that_is_started_as_it_is(
    original: embedded.Server,
    home: Path,
    copied: Callable[[embedded.Server, Path], None],
    mode: str,
) -> None:
    """It is noticed, and the original is not taken for one, also after restarts of every kind."""
    copy = home / copied.__name__
    copy.mkdir()
    with connection.connect(original.url) as conn:
        send(conn)
        _, before = read(conn)
    copied(original, copy / "data")
    with connection.connect(original.url) as conn:
        send(conn)
        _, beyond = read(conn, before)
    with start(copy) as server:
        with connection.connect(server.url) as conn:
            assert value(conn, "is_restored") is True
        checks = {check.name: check for check in doctor.checks(server.url)}
        assert checks["incarnation"].status == "warn"
        assert "pgqueue recover" in (checks["incarnation"].advice or "")
        server.restart(mode)
        with connection.connect(server.url) as conn:
            assert value(conn, "is_restored") is True
            with raises("PQ005", "ahead of the database"):
                read(conn, beyond)
            value(conn, "recover")
            assert value(conn, "is_restored") is False
            again = send(conn)
            with raises("PQ005", "beyond the state"):
                read(conn, beyond)
            assert read(conn, before)[0] == [again]
        server.restart()
        with connection.connect(server.url) as conn:
            assert value(conn, "is_restored") is False
    original.restart(mode)
    with connection.connect(original.url) as conn:
        assert value(conn, "is_restored") is False


@pytest.mark.promise("restore: a copy that is started as it is")
def test_a_copy_of_the_database_in_the_same_server(
    url: str, conn: Conn, stream: int, server: Server
) -> None:
    """By `create database ... template`, or as a dump that is restored beside the original."""
    if isinstance(server, GivenServer):
        pytest.skip("a copy needs a database that nobody is connected to")
    name = f"copy_{uuid.uuid4().hex[:12]}"
    database = conn.info.dbname
    call(conn, "recover")  # notes the database, which the fixture's template does not
    conn.close()
    with connection.connect(server.url) as admin:
        admin.execute(f"create database {name} template {database}".encode())
    with connection.connect(server.url_of(name)) as copy:
        assert value(copy, "is_restored") is True
        value(copy, "recover")
        assert value(copy, "is_restored") is False
    with connection.connect(url) as again:
        assert value(again, "is_restored") is False
    with connection.connect(server.url) as admin:
        admin.execute(f"drop database {name}".encode())


def test_each_sign_that_is_noted_is_compared(conn: Conn) -> None:
    """Where it is known; what was not noted, as by version 1, says nothing."""
    assert internals.rows(conn, "select * from pgqueue.servers") != []
    for column in ("system_identifier", "timeline", "database", "files_since"):
        conn.execute(f"update pgqueue.servers set {column} = 99".encode())
        assert value(conn, "is_restored") is True, column
        conn.execute(f"update pgqueue.servers set {column} = null".encode())
        assert value(conn, "is_restored") is False, column


def test_an_owner_that_may_not_look_at_files_notes_none(
    conn: Conn, new_role: Callable[..., str]
) -> None:
    role = user_of(new_role())
    conn.execute(f"grant create on database {conn.info.dbname} to {role}".encode())
    conn.execute("drop schema pgqueue, _pgqueue cascade")
    conn.execute(f"set session authorization {role}".encode())
    schema.install(conn)
    assert one(conn, "select files_since from pgqueue.servers") is None
    assert value(conn, "is_restored") is False
    conn.execute("reset session authorization")
