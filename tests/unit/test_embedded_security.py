"""The embedded Postgres beside other users: nobody leads its user astray, or keeps it waiting."""

import os
import pwd
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_pgqueue import embedded
from spark_pgqueue.postgres import binaries, connection
from spark_pgqueue.postgres.errors import PgQueueError

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")

SECRET = "a secret of root's: host all all 127.0.0.1/32 trust\nhost all all ::1/128 trust\n"


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
@pytest.mark.parametrize("name", ["pg_hba.conf", "server.log", "PG_VERSION"])
def test_root_follows_no_trap_that_the_servers_user_lays(directory: Path, name: str) -> None:
    """What root reads and writes in the data directory is a file of the server's user."""
    target = directory.parent / "roots"
    target.write_text(SECRET)
    target.chmod(0o600)
    place = directory / "data" / name
    for trap in (a_link, a_second_name, a_pipe, a_folder):
        place.rmdir() if place.is_dir() else place.unlink(missing_ok=True)
        trap(place, target)
        with pytest.raises(PgQueueError) as refused:
            embedded.start(directory, settings={"nonsense": 1} if name == "server.log" else {})
        assert "secret" not in f"{refused.value} {refused.value.hint}"
        assert place.lstat(), "it is still there"
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


def test_no_other_user_can_hold_what_starts_and_stops_wait_for(directory: Path) -> None:
    """Also in a directory of an earlier version, where everybody could read these files."""
    files = [directory / "lock", directory / "users"]
    for _ in range(2):
        for each in files:
            each.chmod(0o644)
        with embedded.start(directory):
            assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o600, 0o600]


def as_nobody(work: Callable[[], object]) -> None:
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
def shared(public: Path) -> Path:
    """A folder in which everybody may write."""
    public.chmod(0o777)
    return public


@only_root
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_root_starts_nothing_where_others_may_write(shared: Path, mode: int) -> None:
    target = shared / "roots"
    target.write_text(SECRET)
    target.chmod(0o600)
    folder = shared / "pg"
    folder.mkdir()
    folder.chmod(mode)
    traps = [folder / name for name in ("lock", "users", "kept", "socket", "data", "data.new")]
    as_nobody(lambda: [each.symlink_to(target) for each in traps])
    assert all(each.is_symlink() for each in traps)
    with pytest.raises(
        PgQueueError, match=r"other users may write in .*, but this process runs as root"
    ) as said:
        embedded.start(folder)
    assert "chmod go-w" in str(said.value.hint)
    assert target.read_text() == SECRET
    assert sorted(folder.iterdir()) == sorted(traps)


@only_root
def test_root_starts_nothing_in_a_folder_of_a_folder_where_others_may_write(
    shared: Path, stopped_server: Callable[[Path], Path]
) -> None:
    """They may put another folder in its place; not in one like /tmp, which has the sticky bit."""
    stopped_server(shared / "pg")
    with pytest.raises(
        PgQueueError, match=f"other users may write in {shared}, but this process runs as root"
    ):
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
    with pytest.raises(
        PgQueueError, match=f"{shared} belongs to nobody, but this process runs as root"
    ):
        embedded.start(shared / below)
    assert list((shared / below).iterdir()) == []


@pytest.mark.parametrize("umask", [0, pytest.param(0o077, marks=pytest.mark.longer)])
def test_what_a_start_makes_is_its_users_alone(new_directory: Path, umask: int) -> None:
    """Whatever the umask: nobody else can lay traps later."""
    before = os.umask(umask)
    try:
        with embedded.start(new_directory.with_name("a folder, its path with '")) as server:
            server.keep_up()
            connection.connect(server.url).close()
            server.stop()
            for each in (server.directory, *server.directory.iterdir()):
                assert not each.stat().st_mode & 0o022, each
    finally:
        os.umask(before)


def test_a_link_in_the_folder_is_not_followed(
    new_directory: Path, stopped_server: Callable[[Path], Path]
) -> None:
    """Also of a user who is not root, whose folder a group may share."""
    target = new_directory.with_name("target")
    target.write_text("/nowhere")
    target.chmod(0o400)
    stamp = target.stat().st_mtime_ns
    with embedded.start(stopped_server(new_directory / "a folder, with a comma")) as server:
        for name, use in (("kept", server.keep_up), ("socket", server.is_running)):
            (server.directory / name).unlink(missing_ok=True)
            (server.directory / name).symlink_to(target)
            with pytest.raises(PgQueueError, match="is not a plain file"):
                use()
            (server.directory / name).unlink()
        server.keep_up()
        server.stop()
    assert (target.read_text(), target.stat().st_mtime_ns) == ("/nowhere", stamp)
