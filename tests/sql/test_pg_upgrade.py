"""pg_upgrade to the next major version, as operations.md says."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_pgqueue import embedded
from spark_pgqueue.command_line import doctor
from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests import fetched
from tests.conftest import SETTINGS, VERSIONS, _folder_in_memory
from tests.sql import checker, internals
from tests.sql.owing import assert_delivers, owed, use
from tests.sql.queue import call, value

OLD, NEW = VERSIONS[0], max(fetched.SUITES)


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that everybody may walk through: the servers' user has to."""
    home = Path(tempfile.mkdtemp(prefix="pgqueue-test-", dir=_folder_in_memory() or "/tmp"))
    home.chmod(0o755)
    yield home
    shutil.rmtree(home, ignore_errors=True)


def pg_upgrade(home: Path) -> None:
    """Upgrade the data in `old`, by the newer programs, to that in `new`."""
    here: dict[str, int | list[int]] = {}
    (work := home / "work").mkdir()
    programs = [binaries.find_binaries(version) for version in (OLD, NEW)]
    if os.geteuid() == 0:
        user = pwd.getpwnam(binaries.ROOT_RUNS_AS)
        os.chown(work, user.pw_uid, user.pw_gid)
        here = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        programs = [binaries.for_everybody(each) for each in programs]
    old, new = (home / name / "data" for name in ("old", "new"))
    command = [programs[1] / "pg_upgrade", "-U", "postgres", "-s", work]
    command += ["-b", programs[0], "-B", programs[1], "-d", old, "-D", new]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300, **here)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout


@pytest.mark.longer
@pytest.mark.promise("operations: pg_upgrade")
def test_what_was_owed_is_delivered_after_pg_upgrade(home: Path) -> None:
    """Once `recover()` was called, of which doctor reminds."""
    try:
        fetched.find(NEW)
    except PgQueueError as error:
        pytest.skip(str(error))
    with (
        embedded.start(home / "old", version=OLD, settings=dict(SETTINGS)) as server,
        connection.connect(server.url) as conn,
    ):
        schema.install(conn)
        known = use(conn, server.url, internals.insert_messages)
        before = owed(conn)
    embedded.start(home / "new", version=NEW, settings=dict(SETTINGS)).close()
    pg_upgrade(home)
    with (
        embedded.start(home / "new", version=NEW, settings=dict(SETTINGS)) as server,
        connection.connect(server.url) as conn,
    ):
        checks = {check.name: check.status for check in doctor.checks(server.url)}
        assert (checks["numbers"], checks["incarnation"]) == ("ok", "warn")
        call(conn, "recover")
        checks = {check.name: check.status for check in doctor.checks(server.url)}
        assert checks["incarnation"] == "ok"
        checker.check(conn)
        assert owed(conn) == before
        assert_delivers(conn, known, before, [value(conn, "send", "s", "after the upgrade")])
