"""The embedded Postgres beside other users: nobody leads its user astray, or keeps it waiting."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_pgqueue import embedded
from spark_pgqueue.postgres import binaries, connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import Child

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")

SECRET = "a secret of root's: host all all 127.0.0.1/32 trust\nhost all all ::1/128 trust\n"

START = """
    import sys
    from spark_pgqueue import embedded
    from spark_pgqueue.postgres.errors import PgQueueError
    try:
        embedded.start(sys.argv[1], settings={"nonsense": 1} if "fail" in sys.argv else {}).close()
        print("started")
    except PgQueueError as error:
        print(f"refused: {error}")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of a server that ran and stopped."""
    embedded.start(tmp_path / "pg").close()
    yield tmp_path / "pg"
    if (tmp_path / "pg" / "data" / "postmaster.pid").exists():
        pid = (tmp_path / "pg" / "data" / "postmaster.pid").read_text().split()[0]
        os.kill(int(pid), signal.SIGQUIT)


def a_link(place: Path, target: Path) -> None:
    place.symlink_to(target)


def a_second_name(place: Path, target: Path) -> None:
    os.link(target, place)


def a_pipe(place: Path, target: Path) -> None:
    os.mkfifo(place)
    if os.geteuid() == 0:
        shutil.chown(place, binaries.ROOT_RUNS_AS)


def a_folder(place: Path, target: Path) -> None:
    place.mkdir()


@only_root
@pytest.mark.parametrize("trap", [a_link, a_second_name, a_pipe, a_folder])
@pytest.mark.parametrize("name", ["pg_hba.conf", "server.log", "PG_VERSION"])
def test_root_follows_no_trap_that_the_servers_user_lays(
    directory: Path, tmp_path: Path, name: str, trap: Callable[[Path, Path], None]
) -> None:
    """What root reads and writes in the data directory is a file of the server's user."""
    target = tmp_path / "roots"
    target.write_text(SECRET)
    target.chmod(0o600)
    (directory / "data" / name).unlink(missing_ok=True)
    trap(directory / "data" / name, target)
    with Child(START, str(directory), "fail" if name == "server.log" else "") as child:
        assert child.wait(60) == 0, child.output
        assert "secret" not in child.output
        assert "refused: " in child.output
    assert target.read_text() == SECRET
    assert target.stat().st_uid == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


@only_root
@pytest.mark.parametrize("name", ["lock", "users", "kept", "socket"])
def test_root_follows_no_trap_in_a_directory_of_another_user(tmp_path: Path, name: str) -> None:
    """Who owns a directory can put anything in the place of what is in it: so root stays away."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    target = tmp_path / "roots"
    target.write_text(SECRET)
    (theirs / "lock").touch()
    (theirs / name).unlink(missing_ok=True)
    (theirs / name).symlink_to(target)
    shutil.chown(theirs, binaries.ROOT_RUNS_AS)
    with pytest.raises(PgQueueError, match="belongs to pgserver"):
        embedded.start(theirs)
    assert target.read_text() == SECRET
    assert sorted(each.name for each in theirs.iterdir()) == sorted({"lock", name})


@pytest.mark.parametrize("name", ["lock", "users"])
def test_no_other_user_can_hold_what_starts_and_stops_wait_for(directory: Path, name: str) -> None:
    """Also in a directory of an earlier version, where everybody could read these files."""
    for _ in range(2):
        with embedded.start(directory):
            assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
        (directory / name).chmod(0o644)


@only_root
def test_nobody_else_keeps_a_server_from_being_started(directory: Path, tmp_path: Path) -> None:
    for folder in (directory, *directory.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    with embedded.start(directory):
        pass
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(pwd.getpwnam("nobody").pw_uid)
        try:
            file = os.open(directory / "lock", os.O_RDONLY)
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(writing, b"held")
        except PermissionError:
            os.write(writing, b"denied")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 10) == b"denied"
    with embedded.start(directory) as server:
        connection.connect(server.url).close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name it differently")
def test_files_of_its_own_user_are_read_and_written_as_ever(directory: Path) -> None:
    rules = directory / "data" / "pg_hba.conf"
    rules.write_text(rules.read_text().replace("reject", "trust"))
    with embedded.start(directory) as server:
        connection.connect(server.url).close()
    assert "trust" not in "".join(
        line for line in rules.read_text().splitlines() if line.startswith("host")
    )
    with pytest.raises(PgQueueError, match="unrecognized configuration parameter"):
        embedded.start(directory, settings={"nonsense": 1})
