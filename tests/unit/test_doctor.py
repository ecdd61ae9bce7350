import json
import os
import re
import subprocess
import sys
import tomllib
import uuid
from datetime import timedelta

import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from spark_pgqueue.command_line import cli, doctor
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import how_to_install
from spark_pgqueue.printable import printable
from tests.processes import EACH, ROOT
from tests.sql import clock
from tests.unit.test_java import fake_java

SECRET = "s3cr3t"


def look(name, url=None):
    """What is said of one thing, without looking at those after it."""
    return next(check for check in doctor.checks(url) if check.name == name)


def looks_at(url):
    """What is said of the database: without a start of Java, and of Spark's Python."""
    return {check.name: check for check in doctor._postgres(url)}


@pytest.mark.all_versions
def test_a_database_in_order(url):
    """A line each, and success."""
    result = CliRunner().invoke(cli.app, ["doctor", "--url", url])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert all(line[:5] in ("ok   ", "warn ", "     ") for line in lines)
    found = dict(line[5:].split(": ", 1) for line in lines if line.startswith("ok"))
    assert {"psycopg", "pyarrow", "adbc_driver_postgresql", "permissions"} <= found.keys()
    assert found["schema pgqueue"] == f"version {schema.expected_version()}"
    assert "host=" in found["Postgres"]


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A Java and a Python of Spark's processes that answer at once."""
    fake_java(tmp_path / "17", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "17"))
    monkeypatch.setenv("PYSPARK_PYTHON", "/bin/true")


@pytest.mark.usefixtures("quick")
def test_no_schema_fails_with_what_to_run(empty_url):
    result = CliRunner().invoke(cli.app, ["doctor", "--url", empty_url])
    assert result.exit_code == 1
    assert "fail schema pgqueue: the schema pgqueue is not installed" in result.output
    assert "-> run `pgqueue install` (with --url, or PGQUEUE_URL set)" in result.output


@pytest.mark.promise("operations: maintain: two at once, maintain_all, nobody")
def test_a_stream_that_nobody_trims_is_warned_of(conn, url):
    conn.execute("select pgqueue.create_stream('s')")
    assert "stream 's'" not in looks_at(url)
    conn.execute("select pgqueue.send('s', 'x')")
    assert "no consumer receives its messages" in str(looks_at(url)["stream 's'"].advice)
    conn.execute("select pgqueue.create_consumer('s', 'paused'), pgqueue.pause('s', 'paused')")
    assert "stream 's'" not in looks_at(url)
    conn.execute("select pgqueue.set_retention('s', p_for => '1 day')")
    check = looks_at(url)["stream 's'"]
    assert check.status == "warn"
    assert "maintain() has not run" in str(check.advice)


def test_a_consumer_that_needs_somebody_is_a_warning(conn, url):
    settings = '{"max_backlog": 1}'
    conn.execute("select pgqueue.create_stream('s')")
    conn.execute("select pgqueue.create_consumer('s', 'c', p_settings => %s)", [settings])
    assert "consumer 'c' of 's'" not in looks_at(url)
    conn.execute("select pgqueue.send('s', 'x')")
    check = looks_at(url)["consumer 'c' of 's'"]
    assert check.status == "warn"
    assert "max_backlog is 1" in check.found
    assert "workers" in str(check.advice)
    conn.execute("select pgqueue.alter_consumer('s', 'c', '{\"max_backlog\": null}')")
    assert "no claim yet" in looks_at(url)["consumer 'c' of 's'"].found


@pytest.mark.usefixtures("quick")
def test_the_command_prints_no_control_character(conn, url):
    name = "\x1b]0;title\x07\x1b[2J\u202e"
    settings = '{"max_backlog": 1}'
    conn.execute("select pgqueue.create_stream(%s)", [name])
    conn.execute("select pgqueue.create_consumer(%(n)s, %(n)s, p_settings => %(s)s)",
                 {"n": name, "s": settings})  # fmt: skip
    conn.execute("select pgqueue.send(%s, 'x')", [name])
    for options in [], ["--json"]:
        shown = CliRunner().invoke(cli.app, ["doctor", "--url", url, *options]).output
        assert "max_backlog is 1" in shown
        assert printable(shown, keep="\n") == shown


def test_a_consumer_that_fails_is_seen_behind_idle_ones(conn, url):
    """Those that fail come first, and the others are counted."""
    conn.execute("select pgqueue.create_stream('s')")
    conn.execute("select pgqueue.create_consumer('s', 'idle ' || i) from generate_series(1, 12) i")
    conn.execute("select pgqueue.create_consumer('s', 'bad')")
    conn.execute("select pgqueue.send('s', 'x')")
    conn.execute(
        "select pgqueue.dead_letter(claim_id, null, 'no') from pgqueue.receive('s', 'bad')"
    )
    found = looks_at(url)
    assert "1 dead-lettered in the last hour, the last: no" in found["consumer 'bad' of 's'"].found
    assert found["consumers"].found == "3 more need attention"
    assert found["consumers"].advice == "pgqueue consumer health"


def test_a_stream_whose_dedup_keys_nobody_deletes_is_warned_of(conn, url):
    conn.execute(
        "select pgqueue.create_stream('s', p_settings => '{\"dedup_window\": \"1 hour\"}')"
    )
    conn.execute("select pgqueue.create_consumer('s', 'paused'), pgqueue.pause('s', 'paused')")
    conn.execute("select pgqueue.send('s', 'x', p_dedup_key => 'k')")
    clock.pass_time(conn, timedelta(hours=24))
    assert "stream 's'" not in looks_at(url)
    clock.pass_time(conn, timedelta(hours=2))
    assert "old dedup keys" in str(looks_at(url)["stream 's'"].advice)
    conn.execute("select pgqueue.maintain()")
    assert "stream 's'" not in looks_at(url)


def test_an_owner_whom_other_roles_do_not_trust_is_named(empty_url):
    owner = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    mine = make_conninfo(empty_url, user=owner)
    with connection.connect(empty_url) as admin:
        admin.execute(f"create role {owner} login".encode())
        admin.execute(f"grant create on database {admin.info.dbname} to {owner}".encode())
        with connection.connect(mine) as conn:
            schema.install(conn)
        check = looks_at(mine)["permissions of others"]
        assert (check.status, f"no functions of {owner}" in check.found) == ("warn", True)
        assert f"grant pgqueue_owner to {owner}" in str(check.advice)
        (before,) = admin.execute("select current_user").fetchone() or ("",)
        admin.execute(f"alter database {admin.info.dbname} owner to {owner}".encode())
        assert "permissions of others" not in looks_at(mine)
        admin.execute(f"alter database {admin.info.dbname} owner to {before}".encode())
        admin.execute(f"drop owned by {owner} cascade; drop role {owner}".encode())


@pytest.mark.parametrize(("older", "status"), [(1, "warn"), (2, "fail")])
def test_an_older_schema_fails_and_the_previous_one_serves_clients(conn, url, older, status):
    conn.execute("update pgqueue.installed set version = version - %s", [older])
    check = looks_at(url)["schema pgqueue"]
    assert check.status == status
    assert ("except clients and workers" in str(check.found)) == (status == "warn")
    assert "pgqueue install" in (check.advice or "")


def test_what_it_tells_to_grant_suffices(conn, url):
    conn.execute("select pgqueue.create_stream('s'), pgqueue.create_consumer('s', 'c')")
    conn.execute('create role "doctor\'s patient" login')
    patient = make_conninfo(url, user="doctor's patient")
    try:
        check = looks_at(patient)["permissions"]
        assert check.status == "fail"
        assert check.advice is not None
        assert "create role" not in check.advice  # of a superuser, create_roles() makes them
        asked = re.fullmatch(
            r"as postgres: (select .*); then as postgres: (grant pgqueue_producer to \"[^\"]+\")"
            r" to send, or (pgqueue_consumer) .*, (pgqueue_observer) .*",
            check.advice,
        )
        assert asked is not None, check.advice
        conn.execute(asked[1])
        check = looks_at(patient)["permissions"]
        assert "create_roles" not in str(check.advice)  # which was done
        conn.execute(asked[2])
        assert "may send, and not receive" in looks_at(patient)["permissions"].found
        for group in asked[3], asked[4]:
            conn.execute(asked[2].replace("pgqueue_producer", group))
        check = looks_at(patient)["permissions"]
        assert check.status == "ok"
        assert "may send, receive, look, and not create and drop streams" in check.found
        assert "ask postgres" in check.found
        assert looks_at(patient)["schema pgqueue"].status == "ok"
        with connection.connect(patient) as theirs:
            theirs.execute("select pgqueue.send('s', 'x')")
            assert theirs.execute("select data from pgqueue.receive('s', 'c')").fetchone() == ("x",)
            theirs.execute("select * from pgqueue.consumer_stats")
    finally:
        conn.execute('drop owned by "doctor\'s patient"')
        conn.execute('drop role "doctor\'s patient"')


def test_a_database_that_cannot_be_reached():
    for url, said in (
        (f"postgresql://u:{SECRET}@127.0.0.1:1/d", "refused"),
        (f"postgresql://u:a@{SECRET}@h/d", "not valid"),
    ):
        check = looks_at(url)["Postgres"]
        assert check.status == "fail"
        assert said in check.found
        assert SECRET not in repr(check)
        assert check.advice


def test_without_any_url_an_unreachable_database_is_no_failure(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    monkeypatch.setenv("PGPORT", "1")
    assert looks_at(None)["Postgres"].status == "fail"
    monkeypatch.delenv("PGHOST")
    monkeypatch.delenv("PGPORT")
    check = looks_at(None)["Postgres"]
    if check.status != "ok":  # this machine may have one on the default socket
        assert check.status == "warn"
        assert "--url" in (check.advice or "")


def test_java(tmp_path, monkeypatch):
    for version in ("21", "17", "11"):
        fake_java(tmp_path / version, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "21"))
    assert look("Java").status == "ok"
    monkeypatch.setenv("PATH", f"{tmp_path}/17/bin:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "11"))
    check = look("Java")  # Spark would take JAVA_HOME's
    assert check.status == "warn"
    assert f"JAVA_HOME={tmp_path / '17'}" in (check.advice or "")
    monkeypatch.delenv("JAVA_HOME")
    assert look("Java").status == "ok"


def test_an_old_pyspark_fails_or_is_told_of(monkeypatch):
    for version, status, said in (
        ("3.5.9", "fail", "3.5.9"),
        ("4.0.0.dev3", "ok", "4.0.0.dev3, which lacks some features: see spark_pgqueue/guide/"),
        ("4.2.0", "ok", "4.2.0"),
    ):
        monkeypatch.setattr("pyspark.__version__", version)
        check = look("PySpark")
        assert check.status == status
        assert check.found.startswith(said)
        assert ("lacks" in check.found) == ("dev" in version)
        assert ('pip install "pyspark>=4.2"' in (check.advice or "")) == (status == "fail")


HIDING = """
import importlib.util as u
def hide(name):
    sys.modules[name] = None
    u.find_spec = lambda n, *a, f=u.find_spec: None if n.split(".")[0] == name else f(n, *a)
hide("pyspark")
"""


def test_without_spark_only_the_client_is_needed_and_without_a_needed_library_it_fails(url):
    script = f"import sys\n{HIDING}{EACH}".replace(
        "    try:",
        "    if len(words.split()) > 1:\n        hide('adbc_driver_postgresql')\n    try:",
    )
    command = [sys.executable, "-c", script, "doctor", "doctor --json"]
    environment = {**os.environ, "PGQUEUE_URL": url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert re.findall("ended with (.)", done.stderr) == ["0", "1"], done.stdout + done.stderr
    assert "warn PySpark: not installed" in done.stdout
    assert 'pip install ".[spark]"' in done.stdout
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    (failed,) = [each for each in found if each["status"] == "fail"]
    assert failed["name"] == "adbc_driver_postgresql"
    assert failed["found"].startswith("cannot be imported")
    assert "Traceback" not in done.stderr


@pytest.fixture
def bare(tmp_path):
    """A Python without any package."""
    program = tmp_path / "bare python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    program.chmod(0o755)
    return str(program)


WORKERS = "Python of Spark's processes"


def test_a_python_of_spark_without_the_package_fails(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert look(WORKERS).status == "ok"
    monkeypatch.setenv("PYSPARK_PYTHON", bare)
    check = look(WORKERS)
    assert check.status == "fail"
    assert f"{bare}, by PYSPARK_PYTHON, lacks spark_pgqueue, psycopg, pyarrow, adbc" in check.found
    assert f"export PYSPARK_PYTHON={sys.executable}" in (check.advice or "")
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "none"))
    assert "does not run" in look(WORKERS).found
    (tmp_path / "python3").symlink_to(bare)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert look(WORKERS).status == "warn"


def test_hints_name_extras_that_exist_and_no_index():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("spark", "embedded", "java", "demo"):
        assert extra in project["optional-dependencies"]
        told = how_to_install(extra)
        assert f'pip install ".[{extra}]"' in told
        assert f"spark_pgqueue-{project['version']}-py3-none-any.whl[{extra}]" in told


def test_a_broken_discovery_fails(tmp_path, monkeypatch):
    (tmp_path / "pyspark_pgqueue.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyspark_pgqueue", raising=False)
    check = look('format("pgqueue")')
    assert check.status == "fail"
    assert "broken" in check.found
