"""The embedded Postgres beside other users: nobody leads its user astray, or keeps it waiting."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import stat
import sys
import tempfile
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


def as_nobody(work: Callable[[], None]) -> None:
    """Do something as another user, who must be able to."""
    pid = os.fork()
    if pid == 0:
        user = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in /tmp in which everybody may write."""
    made = Path(tempfile.mkdtemp(prefix="pgqueue-test-", dir="/tmp"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@only_root
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
@pytest.mark.parametrize("name", ["lock", "users", "kept", "socket", "data", "data.new"])
def test_root_starts_nothing_where_others_may_write(shared: Path, name: str, mode: int) -> None:
    target = shared / "roots"
    target.write_text(SECRET)
    target.chmod(0o600)
    folder = shared / "pg"
    folder.mkdir()
    folder.chmod(mode)
    as_nobody(lambda: (folder / "lock").touch())
    if name == "lock":
        (folder / "lock").unlink()
    as_nobody(lambda: (folder / name).symlink_to(target))
    assert (folder / name).is_symlink()
    with pytest.raises(
        PgQueueError, match=r"other users may write in .*, and this is root"
    ) as said:
        embedded.start(folder)
    assert "chmod go-w" in str(said.value.hint)
    assert target.read_text() == SECRET
    assert len(list(folder.iterdir())) == 2 - (name == "lock")


@only_root
def test_root_starts_nothing_in_a_folder_of_a_folder_where_others_may_write(shared: Path) -> None:
    """They may put another folder in its place; not in one like /tmp, which has the sticky bit."""
    with pytest.raises(PgQueueError, match=f"other users may write in {shared}, and this is root"):
        embedded.start(shared / "pg")
    shared.chmod(0o1777)
    embedded.start(shared / "pg").close()
    os.chown(shared, 0, pwd.getpwnam("nobody").pw_gid)
    shared.chmod(0o775)
    with pytest.raises(PgQueueError, match=f"other users may write in {shared}"):
        embedded.start(shared / "pg")
    os.chown(shared, 0, 0)
    embedded.start(shared / "pg").close()


@only_root
@pytest.mark.parametrize("mode", [0o755, 0o1755])
@pytest.mark.parametrize("below", ["pg", "a/b/pg"])
def test_root_starts_nothing_below_a_folder_of_another_user(
    shared: Path, below: str, mode: int
) -> None:
    """Its owner may write there, and put another folder in the place of root's."""
    (shared / below).mkdir(parents=True)
    shutil.chown(shared, "nobody")
    shared.chmod(mode)
    with pytest.raises(PgQueueError, match=f"{shared} belongs to nobody, and this is root"):
        embedded.start(shared / below)
    assert list((shared / below).iterdir()) == []


@pytest.mark.parametrize("umask", [0, 0o077])
def test_what_a_start_makes_is_its_users_alone(tmp_path: Path, umask: int) -> None:
    """Whatever the umask: nobody else can lay traps later."""
    before = os.umask(umask)
    try:
        with embedded.start(tmp_path / "a folder, whose path has quotes '") as server:
            server.keep_up()
            connection.connect(server.url).close()
            server.stop()
            for each in (server.directory, *server.directory.iterdir()):
                assert not each.stat().st_mode & 0o022, each
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["kept", "socket"])
def test_a_link_in_the_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    """Also of a user who is not root, whose folder a group may share."""
    target = tmp_path / "target"
    target.write_text("/nowhere")
    target.chmod(0o400)
    stamp = target.stat().st_mtime_ns
    with embedded.start(tmp_path / "a folder, with a comma") as server:
        (server.directory / name).unlink(missing_ok=True)
        (server.directory / name).symlink_to(target)
        with pytest.raises(PgQueueError, match="is not a plain file"):
            (server.keep_up if name == "kept" else server.is_running)()
        (server.directory / name).unlink()
        server.keep_up()
        server.stop()
    assert (target.read_text(), target.stat().st_mtime_ns) == ("/nowhere", stamp)
