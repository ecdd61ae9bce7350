"""The files that `pgqueue deploy` prints: formats, commands and roles, each by what reads it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import typer.main
import yaml
from psycopg.conninfo import make_conninfo

import spark_pgqueue
from spark_pgqueue.command_line import cli
from spark_pgqueue.command_line.arguments import duration
from spark_pgqueue.command_line.commands.deploy import FOLDER, Where
from spark_pgqueue.postgres import embedded
from tests import conftest
from tests.pages import environment_of, run_commands
from tests.processes import started, wait_until
from tests.unit.test_supervision import free_address, probe

UNITS = ("systemd", "systemd-maintain")
PROGRAM = Path(sys.executable).with_name("pgqueue")


def text_of(where: str) -> str:
    (path,) = FOLDER.glob(f"{where}.*")
    return path.read_text()


def documents(where: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(text_of(where))]


def unit(where: str) -> dict[str, list[str]]:
    """The values of each key of a unit."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text_of(where), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The containers of the manifest, each with its pod."""
    for each in documents("kubernetes"):
        pod = each["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield pod, container


def services() -> dict[str, dict[str, Any]]:
    """Those of the compose file that run `pgqueue`."""
    (found,) = documents("compose")
    return {name: each for name, each in found["services"].items() if "command" in each}


def commands() -> Iterator[tuple[list[str], float | None]]:
    """Each command of the files, and the seconds that it has to stop."""
    for where in UNITS:
        (line,), stop = unit(where)["ExecStart"], unit(where).get("TimeoutStopSec")
        yield shlex.split(line), duration(stop[0]).total_seconds() if stop else None
    for pod, container in containers():
        yield container["command"] + container["args"], pod.get("terminationGracePeriodSeconds")
    for service in services().values():
        stop = service.get("stop_grace_period")
        yield service["command"], duration(stop).total_seconds() if stop else None


def parsed(words: list[str]) -> Any:
    """The context of a command line, as `pgqueue` reads it; it fails where `pgqueue` refuses it."""
    group: Any = typer.main.get_command(cli.app)
    name, command, rest = group.resolve_command(group.make_context("pgqueue", words), words)
    return command.make_context(name, rest)


def test_each_file_has_its_word(run: Callable[..., str]) -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {each.value for each in Where}
    for each in Where:
        assert run("deploy", each) == text_of(each)


@pytest.mark.promise("deploy: pgqueue takes the commands in them")
def test_every_command_is_one_that_pgqueue_takes_and_ends_in_time() -> None:
    """Of the calls that run, and before who started it ends it by SIGKILL."""
    found = [*commands()]
    assert len(found) == 2 + 2 + 3
    for (program, *words), seconds in found:
        assert Path(program).name == "pgqueue"
        given = parsed(words).params
        assert (seconds is not None) == (words[0] == "work")
        if seconds is not None:
            assert given["grace"].total_seconds() + 10 <= seconds
            assert given["handler"] == "app.jobs"


def test_passwords_come_from_secrets_and_files_that_others_do_not_read() -> None:
    for words, _ in commands():
        assert not [word for word in words if "://" in word or "url" in word.lower()]
    for where in UNITS:
        (file,) = unit(where)["EnvironmentFile"]
        assert file.startswith("/etc/pgqueue/")
        assert not [each for each in unit(where)["Environment"] if "PASSWORD" in each.upper()]
    for _, container in containers():
        (source,) = container["envFrom"]
        assert source["secretRef"]["name"] in text_of("kubernetes").split("apiVersion")[0]
        assert not [each for each in container.get("env", []) if "value" in each]
    given = re.findall(r"^ +\w*PASSWORD: (.*)$", text_of("compose"), re.MULTILINE)
    assert len(given) == 2
    assert all(each.startswith("${PGPASSWORD:?") for each in given)
    assert " .env" not in text_of("compose").split("COPY")[1]
    assert "password '" not in text_of("roles").lower()


@pytest.mark.parametrize("where", UNITS)
@pytest.mark.promise("deploy: systemd, Kubernetes and compose take the files")
def test_systemd_takes_the_units(where: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")
    name = re.findall(r"/etc/systemd/system/(\S+\.service)", text_of(where))[0]
    text = text_of(where).replace("/opt/app/.venv/bin/pgqueue", str(PROGRAM))
    for path, said in ((tmp_path / name, ""), (tmp_path / f"odd-{name}", "Unknown key")):
        path.write_text(text)
        text = text.replace("Restart=", "Restrat=")
        done = subprocess.run(
            ["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        assert said or not done.stderr, done.stderr


def test_a_unit_waits_for_what_the_worker_says() -> None:
    """And SIGTERM goes to the worker alone, because a program of a handler would end by it."""
    found = unit("systemd")
    assert found["Type"] == ["notify"]
    assert found["KillMode"] == ["mixed"]
    assert found["TimeoutStartSec"] == ["infinity"]  # of on_start, as without systemd
    assert duration(found["WatchdogSec"][0]).total_seconds() > 2
    assert found["Restart"] == unit("systemd-maintain")["Restart"] == ["on-failure"]


@pytest.mark.promise("deploy: systemd, Kubernetes and compose take the files")
def test_kubernetes_takes_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = documents("kubernetes")
    for each in found:
        validate.validate(each, validate.latest_version(), strict=True)
        template = each["spec"]["template"]
        assert each["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    found[0]["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(validate.ValidationError):
        validate.validate(found[0], validate.latest_version(), strict=True)


@pytest.mark.promise("deploy: systemd, Kubernetes and compose take the files")
def test_docker_compose_takes_its_file(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(text_of("compose"))
    command = ["docker", "compose", "--file", str(tmp_path / "compose.yaml"), "config", "--quiet"]
    if (
        shutil.which("docker")
        and not subprocess.run(
            ["docker", "compose", "version"], capture_output=True, check=False
        ).returncode
    ):
        environment = {**os.environ, "PGPASSWORD": "x"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    read = pytest.importorskip("compose_spec").PyCompose.from_yaml
    text = yaml.safe_dump(documents("compose")[0])  # without the anchors, which it does not know
    assert {*services()} < {*read(text).services}
    with pytest.raises(ValueError, match="stop_grace"):
        read(text.replace("stop_grace_period", "stop_grace"))


JOBS = """
from spark_pgqueue import handler

@handler("orders", "billing")
def bill(message):
    print("billed", message.data, flush=True)
"""


@pytest.fixture
def url_of_the_services(servers_home: Path) -> Iterator[str]:
    """A server on which the script of the compose file ran; the url of the services' role."""
    (file,) = documents("compose")
    postgres = file["services"]["postgres"]
    (mounted,) = postgres["configs"]
    assert re.fullmatch(r"/docker-entrypoint-initdb\.d/\w+\.sh", mounted["target"])
    script = file["configs"][mounted["source"]]["content"].replace("$$", "$")
    role = file["x-app"]["environment"]
    with embedded.start(servers_home / "compose", settings=dict(conftest.SETTINGS)) as server:
        given = {"POSTGRES_PASSWORD": 'it\'s "one"'}
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env={**environment_of(server.url), **given}, check=True, timeout=60,
        )  # fmt: skip
        yield make_conninfo(server.url_of(role["PGDATABASE"]), user=role["PGUSER"])
    shutil.rmtree(servers_home / "compose")


@pytest.mark.longer
@pytest.mark.promise("deploy: pgqueue takes the commands in them")
def test_the_services_of_the_compose_file_do_their_work(
    url_of_the_services: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as it says, without the containers; and not as a superuser."""
    url = url_of_the_services
    with psycopg.connect(url) as conn:
        role = "select rolsuper, rolcreaterole, rolcreatedb from pg_roles where rolname = user"
        assert conn.execute(role).fetchone() == (False, False, False)
        owner = "select pg_get_userbyid(datdba) = user from pg_database where datname = 'queue'"
        assert conn.execute(owner).fetchone() == (True,)
    with psycopg.connect(make_conninfo(url, user="postgres")) as conn:
        passwords = "select rolname, rolpassword like 'SCRAM%' from pg_authid where rolcanlogin"
        assert dict(conn.execute(passwords).fetchall()) == {"postgres": None, "queue": True}
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    where = free_address()
    given = {
        name: [word.replace("127.0.0.1:8080", where) for word in each["command"][1:]]
        for name, each in services().items()
    }
    test = services()["worker"]["healthcheck"]["test"]
    assert test[:3] == ["CMD", "python", "-c"]
    check = [sys.executable, "-c", test[3].replace("127.0.0.1:8080", where)]
    with started(*given["install"], url=url) as process:
        assert process.wait(60) == 0
    with (
        started(*given["worker"], url=url) as worker,
        started(*given["maintain"], url=url) as maintain,
        spark_pgqueue.connect(url) as queue,
    ):
        wait_until(lambda: subprocess.run(check, capture_output=True).returncode == 0)
        queue.send("orders", "order 1")
        wait_until(lambda: queue.stats("orders")[0].settled == 1)
        queue.set_retention("orders", done=True)
        wait_until(lambda: queue.retention("orders")[0].maintained_at is not None)
        for process in (worker, maintain):
            process.terminate()
            said, _ = process.communicate(timeout=30)
            assert process.returncode == 0
            assert ("billed order 1" in said) == (process is worker)
    assert subprocess.run(check, capture_output=True).returncode != 0


def test_the_probes_of_kubernetes_are_answered(queue: Any, url: str) -> None:
    """At the port and the paths of the manifest."""
    (worker,) = [each for _, each in containers() if "livenessProbe" in each]
    port = worker["ports"][0]["containerPort"]
    assert f"0.0.0.0:{port}" in worker["args"]
    where = free_address()
    consumer = spark_pgqueue.Consumer(url, "s", "c")
    for name, code in (("livenessProbe", 200), ("readinessProbe", 503)):
        asked = worker[name]["httpGet"]
        assert asked["port"] == worker["ports"][0]["name"]
        with spark_pgqueue.supervised(consumer, health=where):
            assert probe(where, asked["path"])[0] == code


@pytest.mark.promise("deploy: the first process of a container")
def test_the_first_process_of_a_container_ends_by_sigterm(queue: Any, url: str) -> None:
    """Linux ignores it there unless the program handles it."""
    apart = ["unshare", "--fork", "--pid", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("a namespace of processes cannot be made: run the tests as root")
    queue.set_retention("s", done=True)
    command = [*apart, sys.executable, "-m", "spark_pgqueue", "maintain", "--every", "50ms"]
    with subprocess.Popen(command, env={**os.environ, "PGQUEUE_URL": url}) as process:
        try:
            wait_until(lambda: queue.retention("s")[0].maintained_at is not None)
            (first,) = psutil.Process(process.pid).children()
            first.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.fixture
def roles(url: str, conn: psycopg.Connection, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The url of each role of the file, which psql runs twice."""
    names = sorted(set(re.findall(r"'(queue_\w+)'", text_of("roles"))))
    (tmp_path / "roles.sql").write_text(text_of("roles"))
    try:
        for _ in range(2):
            run_commands("psql -q -X -v ON_ERROR_STOP=1 -f roles.sql >/dev/null", url, tmp_path)
        yield {name.removeprefix("queue_"): make_conninfo(url, user=name) for name in names}
    finally:
        for name in names:
            conn.execute(f"drop owned by {name}; drop role if exists {name}".encode())


@pytest.mark.promise("deploy: roles")
def test_each_role_does_its_part_and_no_other(
    queue: Any, url: str, roles: dict[str, str], conn: psycopg.Connection
) -> None:
    queue.set_retention("s", done=True)
    done: dict[tuple[str, str], bool] = {}
    commands = {
        "send": ["send", "s", "--data", "x"],
        "work": ["work", "tests.handlers:upper", "s", "c", "--wait", "0"],
        "maintain": ["maintain"],
        "metrics": ["metrics"],
    }
    for role, address in roles.items():
        for name, words in commands.items():
            with started(*words, url=address) as process:
                said = process.communicate(timeout=60)[1]
            done[role, name] = process.returncode == 0
            assert done[role, name] or "permission denied" in said, said
    allowed = {
        ("producer", "send"), ("worker", "send"), ("worker", "work"), ("maintain", "maintain"),
        ("maintain", "metrics"), ("metrics", "metrics"),
    }  # fmt: skip
    assert {each for each, is_done in done.items() if is_done} == allowed
