import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg.conninfo import make_conninfo

from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.conftest import user_of

pytestmark = pytest.mark.all_versions


def test_install_is_idempotent_and_records_its_version(empty_url):
    with connection.connect(empty_url) as conn:
        assert schema.installed_version(conn) is None
        with pytest.raises(PgQueueError, match="not installed in database") as caught:
            schema.check(conn)
        assert caught.value.sqlstate == "PQ011"
        assert schema.install(conn) == schema.expected_version()
        before = objects(conn)
        assert schema.install(conn) == schema.expected_version()
        assert objects(conn) == before
        assert schema.installed_version(conn) == schema.expected_version()
        schema.check(conn)


def objects(conn):
    return conn.execute(
        "select 'r', oid::regclass::text from pg_class where relnamespace = 'pgqueue'::regnamespace"
        " union all select 'f', oid::regprocedure::text from pg_proc"
        " where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace) order by 1, 2"
    ).fetchall()


def test_psql_alone_installs_the_same(server, empty_url, url):
    """The parsing of install.sql must not differ from psql's."""
    psql = binaries.find_binaries(18) / "psql"
    command = [psql, "-X", "-q", "-f", schema.sql_directory() / "install.sql", empty_url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with connection.connect(empty_url) as by_psql, connection.connect(url) as by_python:
        assert objects(by_psql) == objects(by_python)
        schema.check(by_psql)


def test_every_sql_file_is_run_once():
    listed = schema.sql_files() + schema.sql_files(schema.PGMQ)
    assert len(set(listed)) == len(listed)
    folder = schema.sql_directory()
    run = {folder / name for name in ("install.sql", "uninstall.sql", schema.PGMQ)}
    there = set(folder.rglob("*.sql")) - run
    assert there == set(listed)


def test_two_installations_at_once_both_succeed(empty_url):
    def install(_: int) -> None:
        with connection.connect(empty_url) as conn:
            schema.install(conn)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(install, range(4)))


@pytest.mark.parametrize(("shift", "way_out"), [(1, "pip install --upgrade"), (-1, "pgqueue inst")])
@pytest.mark.promise("operations: versions")
def test_another_version_in_the_database_is_refused(conn, shift, way_out):
    conn.execute("update pgqueue.installed set version = version + %s", [shift])
    with pytest.raises(PgQueueError, match="requires version") as caught:
        schema.check(conn)
    assert way_out in (caught.value.hint or "")
    assert caught.value.sqlstate == "PQ011"


@pytest.mark.promise("operations: versions")
def test_an_older_package_does_not_touch_a_newer_schema(conn):
    conn.execute("update pgqueue.installed set version = version + 1")
    conn.execute("drop view pgqueue.message_states")
    with pytest.raises(PgQueueError, match="newer") as caught:
        schema.install(conn)
    assert caught.value.sqlstate == "PQ011"
    assert conn.execute("select to_regclass('pgqueue.message_states')").fetchone() == (None,)


def test_without_permission_nothing_is_installed_and_it_says_who_may(empty_url, new_role):
    theirs = make_conninfo(empty_url, user=user_of(new_role()))
    with connection.connect(empty_url) as conn, connection.connect(theirs) as stranger:
        with pytest.raises(PgQueueError, match="permission denied for database") as caught:
            schema.install(stranger)
        assert "owner" in (caught.value.hint or "")
        assert schema.installed_version(conn) is None
        schema.install(conn)
        with pytest.raises(PgQueueError, match="permission denied") as caught:
            schema.check(stranger)
        assert "pgqueue" in (caught.value.hint or "")
