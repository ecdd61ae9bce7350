"""The wheel, installed into an environment of its own: what a user or a cluster gets."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path

import pyarrow
import pytest
from psycopg.conninfo import conninfo_to_dict

from spark_pgqueue.postgres import binaries
from tests import pages, release
from tests.pages import blocks_of

ROOT = Path(__file__).parents[1]

# As the triggerer does: it makes the trigger anew of what was stored, and asks for its events.
AIRFLOW = """
import asyncio, importlib, os, sys
from unittest.mock import AsyncMock, MagicMock
import spark_pgqueue
from airflow.sdk.execution_time import task_runner
task_runner.SUPERVISOR_COMMS = MagicMock(asend=AsyncMock())  # without it, aget_connection fails
exec(open(sys.argv[1]).read())
path, given = trigger.serialize()
assert "secret" not in str(given)
async def events():
    queue = await spark_pgqueue.connect_async(os.environ["PGQUEUE_URL"])
    module, name = path.rsplit(".", 1)
    waiting = getattr(importlib.import_module(module), name)(**given).run()
    for data in ("a", "b"):
        await queue.send("orders", data, key="k")
        event = await asyncio.wait_for(anext(waiting), 60)
        stats = (await queue.stats("orders"))[0]
        print(event.payload["messages"][0]["data"], stats.claimed, stats.settled)
    await waiting.aclose()
    waiting = getattr(importlib.import_module(module), name)(**given | {"conn_id": None}).run()
    await queue.send("orders", "c", key="k")  # and now by PGQUEUE_URL
    event = await asyncio.wait_for(anext(waiting), 60)
    print(event.payload["messages"][0]["data"])
    await waiting.aclose()
asyncio.run(events())
"""

# Spark finds the format by itself: there is no call of register(), and no checkout to import from.
SCRIPT = """
import sys
from pyspark.sql import SparkSession
url, checkpoint = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
options = {"url": url, "stream": "s"}
spark.range(10).selectExpr("cast(id as string) as data").write.format("pgqueue").options(
    **options).mode("append").save()
frame = spark.readStream.format("pgqueue").options(**options, consumer="c").load()
copy = frame.selectExpr("data").writeStream.format("pgqueue").option("url", url)
query = copy.option("stream", "copy").option("checkpointLocation", checkpoint).trigger(
    availableNow=True).start()
query.awaitTermination()
"""


# The environments are used once: most of what pip compiles would never run.
FEW_FILES = {"PIP_NO_COMPILE": "1"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("folder")
    release.build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def folder(built: Path) -> Path:
    """Those, and what they need: what somebody without a network is given."""
    (wheel,) = built.glob("spark_pgqueue-*.whl")
    run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", built, wheel, cwd=built)
    return built


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A clean environment with the wheel in it, and without PySpark: from that folder alone."""
    return environment(tmp_path_factory.mktemp("wheel"), folder, "spark-pgqueue")


def environment(directory: Path, folder: Path, what: str | Path) -> Path:
    """The Python of a new environment, in which pip has installed something from a folder."""
    venv.create(directory / "venv")
    python = directory / "venv" / "bin" / "python"
    alone = ("--quiet", "--no-index", "--find-links", folder)
    nowhere = "http://127.0.0.1:1/"  # if pip asked an index all the same
    run(*pip(python), "install", *alone, what, cwd=directory, PIP_INDEX_URL=nowhere, **FEW_FILES)
    return python


def pip(python: Path) -> tuple[str | Path, ...]:
    """This environment's pip, at work for another one: to make it one of its own takes long."""
    return sys.executable, "-m", "pip", "--python", python


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_the_client_and_the_command_line_need_no_spark(python: Path, empty_url: str, tmp_path):
    installed = run(*pip(python), "list", cwd=tmp_path)
    assert "spark_pgqueue" in installed.replace("-", "_")
    assert "pyspark" not in installed

    pgqueue = python.with_name("pgqueue")
    for command in (
        ("install",),
        ("stream", "create", "s"),
        ("consumer", "create", "s", "c"),
        ("send", "s", "--data", "hello"),
    ):
        run(pgqueue, *command, cwd=tmp_path, PGQUEUE_URL=empty_url)
    received = run(pgqueue, "receive", "s", "c", cwd=tmp_path, PGQUEUE_URL=empty_url)
    assert "hello" in received


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_http_is_served_with_the_extra_web(
    uv: Path, folder: Path, python: Path, empty_url: str, tmp_path
):
    """Without it: figures as text, and an error that says what to install."""
    wheel = next(folder.glob("spark_pgqueue-*.whl"))
    pgqueue = python.with_name("pgqueue")
    run(pgqueue, "install", cwd=tmp_path, PGQUEUE_URL=empty_url)
    assert "pgqueue_up 1" in run(pgqueue, "metrics", cwd=tmp_path, PGQUEUE_URL=empty_url)
    command = (pgqueue, "metrics", "--listen", ":0", "--url", empty_url)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "spark-pgqueue[web]" in done.stderr) == (1, True), done.stderr

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = (uv, "pip", "install", "--quiet", "--python", python, "--find-links", folder)
    run(*install, f"{wheel}[web]", cwd=tmp_path)
    command = (python.with_name("pgqueue"), *command[1:])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[2].rstrip(",")
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert "pgqueue_up 1" in answer.read().decode()
        finally:
            process.kill()


def test_the_wheel_and_the_sdist_hold_what_is_needed(built: Path):
    (wheel,), (sdist,) = built.glob("spark_pgqueue-*.whl"), built.glob("spark_pgqueue-*.tar.gz")
    within = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        *("py.typed", "client/asynchronous.pyi", "grafana.json", "web/page.html"),
        *("deploy/systemd.service", "deploy/kubernetes.yaml", "deploy/roles.sql"),
        *(
            "sql/install.sql",
            "sql/queue/take/take.sql",
            "sql/guide/reference.md",
            "guide/options.md",
        ),
        "sql/pgmq/install.sql",
    ):
        assert f"spark_pgqueue/{name}" in within
    assert "pyspark_pgqueue.py" in within
    assert not [name for name in within if name.startswith("tests")]
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "README.md", "pyproject.toml", "sql/install.sql"} <= names
    assert {"Makefile", "tests/quick.txt", "notebooks/README.md", "CONTRIBUTING.md"} <= names
    assert "sql/pgmq/install.sql" in names


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_the_sdist_builds_and_works_without_a_network(folder: Path, empty_url: str, tmp_path):
    """With nothing but the folder, in which the build tools are then too."""
    tools = [f"--dest={folder}", "hatchling>=1.27"]
    run(sys.executable, "-m", "pip", "download", "--quiet", *tools, cwd=tmp_path)
    (sdist,) = folder.glob("spark_pgqueue-*.tar.gz")
    pgqueue = environment(tmp_path, folder, sdist).with_name("pgqueue")
    assert "create schema" in run(pgqueue, "sql", cwd=tmp_path)
    run(pgqueue, "install", cwd=tmp_path, PGQUEUE_URL=empty_url)
    said = run(pgqueue, "doctor", cwd=tmp_path, PGQUEUE_URL=empty_url)
    assert "schema pgqueue" in said, said


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_the_sdist_passes_its_tests_alone(folder: Path, tmp_path):
    """Those of maps and of generated files, which read all of the checkout, and some of the queue.

    In this environment, and with what the sdist holds: no checkout, no git.
    """
    (sdist,) = folder.glob("spark_pgqueue-*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (there,) = tmp_path.glob("spark_pgqueue-*")
    some = ("tests/unit/test_maps.py", "tests/unit/test_docs.py", "tests/sql/test_settle.py")
    environment = {"PYTHONPATH": str(there), "PGQUEUE_TEST_VERSIONS": "18"}
    said = run(sys.executable, "-m", "pytest", "-q", *some, cwd=there, **environment)
    assert " passed" in said, said


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv, in an environment of its own."""
    directory = tmp_path_factory.mktemp("uv")
    venv.create(directory / "venv")
    python = directory / "venv" / "bin" / "python"
    run(*pip(python), "install", "--quiet", "uv>=0.9", cwd=directory)
    return python.with_name("uv")


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_uvx_runs_the_command_line_of_the_wheel(uv: Path, folder: Path, empty_url: str, tmp_path):
    (wheel,) = folder.glob("spark_pgqueue-*.whl")
    pgqueue = (uv, "tool", "run", "--quiet", "--python", sys.executable, "--from", wheel, "pgqueue")
    assert "installed" in run(*pgqueue, "install", cwd=tmp_path, PGQUEUE_URL=empty_url)
    assert run(*pgqueue, "--version", cwd=tmp_path)


@pytest.mark.longer
@pytest.mark.timeout(900)
def test_airflow_finds_the_trigger_and_gets_an_event_for_each_claim(
    uv: Path, folder: Path, url: str, conn, tmp_path
):
    """With the program of the page. A claim is acknowledged when the next event is asked for."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = folder.glob("spark_pgqueue-*.whl")
    run(uv, "pip", "install", "--quiet", "--python", python, f"{wheel}[airflow]", cwd=tmp_path)
    page = (ROOT / "sql/guide/delays.md").read_text()
    (dag,) = [text for _, text in blocks_of(page) if "DAG" in text]
    (tmp_path / "dag.py").write_text(dag)
    (tmp_path / "triggerer.py").write_text(AIRFLOW)
    conn.execute("select pgqueue.create_stream('orders')")
    conn.execute("select pgqueue.create_consumer('orders', 'reports')")
    at = conninfo_to_dict(url)
    uri = f"postgresql://{at['user']}:secret@/{at['dbname']}?host={at['host']}&port={at['port']}"
    environment = {"AIRFLOW_HOME": str(tmp_path), "PGQUEUE_URL": url, "AIRFLOW_CONN_QUEUE": uri}
    said = run(python, "triggerer.py", "dag.py", cwd=tmp_path, PYTHONPATH="", **environment)
    assert said.splitlines()[-3:] == ["a 1 0", "b 1 1", "c"], said


@pytest.mark.longer
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["testing", "frameworks", "pgmq", "deploy"])
def test_a_page_is_typed_in_an_environment_with_what_it_installs(
    uv: Path, folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
):
    """And nothing else: each block of Python is a program of its own."""
    text = (ROOT / f"sql/guide/{page}.md").read_text()
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = folder.glob("spark_pgqueue-*.whl")
    lines = re.findall(r"^pip install (.*)$", text, re.MULTILINE)
    words = [word for line in lines for word in shlex.split(line, comments=True)]
    asked = {"/path/to/spark-pgqueue[web]", *words}
    packages = [re.sub(r"^/path/to/spark-pgqueue(?=$|\[)", str(wheel), each) for each in asked]
    run(uv, "pip", "install", "--quiet", "--python", python, *packages, cwd=tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", str(python))  # whose programs the page finds
    psql = shutil.which("psql") or str(binaries.find_binaries(18) / "psql")
    programs = {"python": [str(python), "-c"], "sql": [psql, "-Xq", "-v", "ON_ERROR_STOP=1", "-c"]}
    for language, block in blocks_of(text):
        if language == "sh":
            pages.run_commands(block, url, tmp_path)
        elif language in programs:
            pages.run([*programs[language], block], url, tmp_path)


def test_an_index_can_show_what_the_package_says_of_itself(built: Path):
    release.check(built)


@pytest.mark.timeout(600)
def test_a_type_checker_knows_the_type_of_all_that_is_public(folder: Path, tmp_path):
    """As pyright sees an installed wheel; but for the modules of the program pgqueue."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    where = (python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    there, here = Path(run(*where, cwd=tmp_path).strip()), Path(pyarrow.__file__).parents[1]
    (wheel,) = folder.glob("spark_pgqueue-*.whl")
    zipfile.ZipFile(wheel).extractall(there)
    (there / "needed.pth").write_text(str(here))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pyright", "--outputjson"),
            *("--verifytypes", "spark_pgqueue", "--ignoreexternal"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    assert len(symbols) > 1500
    unknown = {each["name"] for each in symbols if not each["isTypeKnown"]}
    # Airflow, whose classes those of this package extend, is not there.
    without = ("spark_pgqueue.command_line.", "spark_pgqueue.airflow.")
    assert {name for name in unknown if not name.startswith(without)} == set()


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.usefixtures("spark_environment")
@pytest.mark.timeout(600)
def test_spark_finds_the_format_by_itself(python: Path, url: str, conn, tmp_path):
    conn.execute("select pgqueue.create_stream('s'), pgqueue.create_stream('copy')")
    conn.execute("select pgqueue.create_consumer('s', 'c')")
    conn.execute("select pgqueue.create_consumer('copy', 'c')")
    import pyspark

    # the PySpark that is here, in place of a download of 400 MB: a cluster has its own, too
    there = run(
        *(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"), cwd=tmp_path
    )
    here = Path(pyspark.__file__).parents[1]
    for name in ("pyspark", "py4j"):
        (Path(there.strip()) / name).symlink_to(here / name)
    (tmp_path / "job.py").write_text(SCRIPT)
    run(
        *(python, "job.py", url, tmp_path / "checkpoint"),
        cwd=tmp_path,
        PYSPARK_PYTHON=str(python),
        PYTHONPATH="",
    )
    copied = conn.execute("select data from pgqueue.receive('copy', 'c', 100)").fetchall()
    assert sorted(row[0] for row in copied) == [str(i) for i in range(10)]
