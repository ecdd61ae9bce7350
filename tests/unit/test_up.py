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


@pytest.mark.longer  # the first hour's pages type the beginning
def test_from_nothing_to_the_first_message_and_down_again(type_, tmp_path: Path):
    folder = tmp_path / "pgqueue-data"
    found = json.loads(type_("pgqueue up --json"))
    with embedded.start(folder) as server:
        assert found == {"url": server.url, "version": 18, "folder": str(folder)}
    assert server.is_running(), "it stays up, whoever used it and ended"
    assert type_("pgqueue up").startswith(f"PostgreSQL 18 runs in {folder}, with the schema")
    assert "here" in type_(
        """
        eval "$(pgqueue up --export)"
        pgqueue stream create orders
        python -c 'import spark_pgqueue; spark_pgqueue.connect().send("orders", "here")'
        env -u PGQUEUE_URL pgqueue peek orders
        """
    ), "libpq is told, too"
    assert type_("pgqueue down") == f"PostgreSQL in {folder} is stopped.\n"
    assert not server.is_running()
    assert type_("pgqueue down") == f"PostgreSQL in {folder} does not run.\n"
    again = type_('eval "$(pgqueue up --export)"; pgqueue stream list; pgqueue down --json')
    assert "orders" in again, "its data stays"
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


def test_it_keeps_the_version_of_its_data(run):
    embedded.start(Path("old"), version=16).close()
    try:
        assert json.loads(run("up old --json"))["version"] == 16
    finally:
        assert run("down old").endswith(" is stopped.\n")
