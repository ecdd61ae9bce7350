"""`pgqueue up` and `down`: a Postgres of one's own in a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spark_pgqueue import embedded
from spark_pgqueue.command_line import cli


@pytest.fixture
def type_(tmp_path: Path):
    """Type into a shell in an empty folder; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def type_(commands: str, code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-c", "set -e\n" + commands],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout

    yield type_
    type_("for each in */data; do pgqueue down $(dirname $each); done")


@pytest.mark.longer  # the first hour's pages type the same
def test_from_nothing_to_the_first_message_and_down_again(type_, tmp_path: Path):
    said = type_(
        """
        eval "$(pgqueue up --export)"
        pgqueue stream create orders
        pgqueue consumer create orders billing
        pgqueue send orders --data hello
        pgqueue receive orders billing
        python -c 'import spark_pgqueue; spark_pgqueue.connect().send("orders", "from Python")'
        env -u PGQUEUE_URL pgqueue receive orders billing
        """
    )
    assert "hello" in said
    assert "from Python" in said, "libpq is told, too"
    folder = tmp_path / "pgqueue-data"
    with embedded.start(folder) as server:
        assert server.is_running()
    assert server.is_running(), "it stays up, whoever used it and ended"

    found = json.loads(type_("pgqueue up --json"))
    assert found == {"url": server.url, "version": 18, "folder": str(folder)}
    assert type_("pgqueue up").startswith(f"PostgreSQL 18 runs in {folder}, with the schema")
    assert type_("pgqueue down") == f"PostgreSQL in {folder} is stopped.\n"
    assert not server.is_running()
    assert type_("pgqueue down") == f"PostgreSQL in {folder} does not run.\n"
    again = type_('eval "$(pgqueue up --export)"; pgqueue stats; pgqueue down --json')
    assert "billing" in again, "its data stays"
    assert '"stopped": true' in again


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `pgqueue` in that folder; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli.app, arguments.split())
        assert done.exit_code == code, done.output
        return done.stderr if code else done.stdout

    return run


def test_a_folder_with_something_else_in_it_is_refused_and_stays_as_it_is(run, tmp_path: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert "neither empty nor the directory of an embedded Postgres" in run("up photos", 1)
    assert run("down photos") == f"PostgreSQL in {tmp_path / 'photos'} does not run.\n"
    assert [each.name for each in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_it_keeps_the_version_of_its_data(run):
    embedded.start(Path("old"), version=16).close()
    try:
        assert json.loads(run("up old --json"))["version"] == 16
    finally:
        assert run("down old").endswith(" is stopped.\n")
