"""The published set-ups run, and a message that is lost or comes twice fails the run."""

import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from tests.benchmarks.compare.counts import CountError
from tests.benchmarks.compare.sides import Delivery, Ours
from tests.benchmarks.harness import run
from tests.benchmarks.published import harness, report
from tests.benchmarks.published.jobs import Jobs
from tests.benchmarks.published.measure import altered, measure
from tests.benchmarks.published.setups import PGQUE, PLANETSCALE, SETUPS, overlapping
from tests.docs.figures import PAGE
from tests.processes import wait_until

SMALL = replace(
    PLANETSCALE, rate=50, producers=2, workers=2, hold=partial(overlapping, queries=3, seconds=0.9)
)
SMALL_HELD = replace(PGQUE, rate=50, producers=2, workers=2, bystanders=0, settings={})


@pytest.mark.parametrize(
    ("setup", "side"),
    [
        (SMALL, Ours()),
        pytest.param(SMALL, Ours("one call", one_call=True), marks=pytest.mark.longer),
        pytest.param(SMALL, Jobs(), marks=pytest.mark.longer),
        pytest.param(SMALL_HELD, Ours(), marks=pytest.mark.longer),
        pytest.param(SMALL_HELD, Jobs(by_update=True), marks=pytest.mark.longer),
    ],
)
def test_a_run_counts_each_message(empty_url, tmp_path, setup, side):
    found = measure(empty_url, setup, side, minutes=2, minute=1)
    assert found["sent"] == pytest.approx(100, abs=30)
    assert len(found["minutes"]) == 2
    assert sum(each["done"] for each in found["minutes"]) > 0
    for minute in found["minutes"]:
        assert minute["tables"] > 0
        assert minute["indexes"] > 0
        assert 0 < minute["p50"] <= minute["p99"]
        assert 0 < minute["claim_p50"] <= minute["claim_p99"]
        if sys.platform == "linux" and not os.environ.get("PGQUEUE_TEST_URL"):
            assert minute["cpu"] > 0
    path = report.write(tmp_path, found)
    assert report.read(tmp_path, setup.name) == [json.loads(path.read_text())]


# What must fail the run


class Loses(Jobs):
    """Deletes the first job of a claim of several without giving it to anybody."""

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        delivery = super().receive(conn, size, consumer, done)
        return Delivery(delivery.numbers[len(delivery.numbers) > 1 :], delivery.handle)

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        return super().ack(conn, delivery, consumer) and len(delivery.numbers)


class Doubles(Jobs):
    """Sends each message twice."""

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        super().send(conn, data, key)
        super().send(conn, data, key)


@pytest.mark.parametrize(
    ("side", "said"),
    [
        (Loses(), "lost"),
        pytest.param(Doubles(), "received twice", marks=pytest.mark.longer),
    ],
    ids=["lost", "doubled"],
)
def test_a_wrong_count_fails_the_run(empty_url, side, said):
    slow = replace(SMALL, rate=100, work=0.1)  # so that claims have several messages
    with pytest.raises((CountError, RuntimeError), match=said):
        measure(empty_url, slow, side, minutes=1, minute=1)


def test_the_queries_hold_the_horizon_and_end(empty_url):
    sql = (
        "select min(backend_xmin::text::bigint) from pg_stat_activity"
        " where query like 'select count(*), pg_sleep%' and datname = current_database()"
    )
    with psycopg.connect(empty_url, autocommit=True) as conn:
        with overlapping(empty_url, queries=2, seconds=60):
            wait_until(lambda: run(conn, sql)[0][0] is not None)
            run(conn, "create table t()")
            ((now,),) = run(conn, "select pg_current_xact_id()::text::bigint")
            assert run(conn, sql)[0][0] < now
        wait_until(lambda: run(conn, sql)[0][0] is None)


@pytest.mark.longer
def test_settings_of_a_publication_are_set_and_reset(empty_url):
    with psycopg.connect(empty_url, autocommit=True) as conn:
        before = run(conn, "show autovacuum_naptime")
        with altered(conn, {"autovacuum_naptime": "7s"}):
            wait_until(lambda: run(conn, "show autovacuum_naptime") == [("7s",)])
        wait_until(lambda: run(conn, "show autovacuum_naptime") == before)


# What is shown


@pytest.fixture
def runs() -> list[report.Run]:
    minute = dict.fromkeys(report.COLUMNS, 1.0) | {"seconds": 60, "done": 47_400, "backlog": 7}
    minute |= {"tables": 2**20, "indexes": 2**21, "bystander": None}
    about = {
        "setup": "planetscale",
        "held": True,
        "rate": 800,
        "date": "2026-12-01",
        "postgres": "18.1",
    }
    sides = ["pgmq", "pgqueue", "jobs, locked"]
    return [{**about, "side": side, "minutes": [minute, minute]} for side in sides]


def test_a_table_has_theirs_and_ours(runs):
    lines = report.markdown(PLANETSCALE, runs).splitlines()
    head = "published 2026-04-11; 2 minutes, PostgreSQL 18.1, 2026-12-01"
    columns = "theirs: plain queue | theirs: one query at a time | ours | pgmq | jobs, locked"
    assert lines[0] == f"| planetscale, {head} | {columns} |"
    assert "| messages done, /s |  |  | 790 | 790 | 790 |" in lines
    assert "| backlog at the end | 155,000 | 0 | 7 | 7 | 7 |" in lines
    assert "| ... with what the producers owe |  |  | 1,200 | 1,200 | 1,200 |" in lines
    assert "| tables and indexes at the end, MiB |  |  | 3 | 3 | 3 |" in lines
    assert not any("bystander" in line for line in lines)


def test_minutes_are_shown(runs):
    shown = report.table(runs[0])
    assert shown.row_count == 2
    assert "bystander" not in [column.header for column in shown.columns]


def test_the_page_has_a_place_for_each_set_up(runs, tmp_path):
    report.write(tmp_path, runs[1])
    copy = tmp_path / "README.md"
    copy.write_text(PAGE.read_text())
    report.page(copy, tmp_path)
    report.page(copy, tmp_path)
    text = copy.read_text()
    for setup in SETUPS.values():
        assert all(text.count(mark) == 1 for mark in report.marks(setup))
    assert "| theirs: plain queue | theirs: one query at a time | ours |" in text


# The public harness


def test_the_harness_gets_adapters_without_docker(tmp_path, monkeypatch):
    adapters = SimpleNamespace(
        ADAPTERS={},
        AdapterEntry=SimpleNamespace,
        LaunchSpec=SimpleNamespace,
        _base_env=lambda manifest, overrides: {"DATABASE_URL": manifest, **overrides},
    )
    harness.register(adapters, tmp_path)
    ours = adapters.ADAPTERS["spark-pgqueue"]
    assert json.loads((ours.bench_dir / "adapter.json").read_text()) == harness.MANIFEST
    started = ours.launcher("a url", {"WORKER_COUNT": "4"})
    assert started.argv == [sys.executable, "-m", "tests.benchmarks.public_harness"]
    assert {"DATABASE_URL": "a url", "WORKER_COUNT": "4"}.items() <= started.env.items()
    theirs = adapters.ADAPTERS["procrastinate"]
    assert (
        theirs.launcher("", {}).cwd
        == str(tmp_path / "procrastinate-bench")
        == str(theirs.bench_dir)
    )
    monkeypatch.setenv("PATH", os.environ["PATH"])
    harness.stand_in(tmp_path)
    assert Path(shutil.which("docker") or "") == tmp_path / "docker"


def test_without_a_checkout_the_harness_says_what_it_needs(tmp_path):
    with pytest.raises(SystemExit, match="port 15555"):
        harness.main([str(tmp_path), "run"])
