"""`make compare` runs, and a message that is lost or comes twice fails it."""

import json
import os
import sys
from pathlib import Path

import psycopg
import pytest
import typer

from tests.benchmarks.compare import backlog, peers, pgmq, report
from tests.benchmarks.compare.__main__ import PICTURE, SCENARIOS, compare, paths_of
from tests.benchmarks.compare.compare import Compare, Effort
from tests.benchmarks.compare.counts import CountError, Log, acknowledge, check, check_order
from tests.benchmarks.compare.crew import Crew, connect
from tests.benchmarks.compare.report import OURS, Case, Report
from tests.benchmarks.compare.rows import Rows, RowsByFunctions
from tests.benchmarks.compare.sides import Delivery, Ours, payload
from tests.benchmarks.server_cpu import ServerCpu, between, nanoseconds
from tests.docs.figures import PAGE
from tests.processes import wait_until

TINY = Effort(
    "tiny", rounds=1, seconds=0.05, share=0.005, held=0.4, rated=0.2, wakes=3, thorough=False
)


def run_tiny(url: str, *scenarios: str) -> Report:
    figures = Report()
    compare(url, scenarios, TINY, figures)
    return figures


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=[] if name == "wake" else pytest.mark.longer) for name in SCENARIOS],
)
def test_a_scenario_measures_every_side(empty_url, scenario):
    figures = run_tiny(empty_url, scenario)
    assert figures.cases
    for case in figures.cases:
        assert OURS in case.values
        assert case.theirs
        assert all(case.value(side) >= 0 for side in case.values), case
    assert_cpu(figures)
    sides = {side for case in figures.cases for side in case.values}
    assert pgmq.is_installed() == any(side.startswith("pgmq") for side in sides)


def assert_cpu(figures: Report) -> None:
    """Where the server's CPU can be seen, each side has a figure of it."""
    with_cpu = [case for case in figures.cases if case.work is not None]
    if sys.platform == "linux" and not os.environ.get("PGQUEUE_TEST_URL"):
        assert with_cpu
    for case in with_cpu:
        busy = {side for side, values in case.values.items() if min(values) > 0}
        assert busy <= case.cpu.keys() <= case.values.keys(), case


@pytest.mark.longer
def test_without_pgmq_the_rest_is_measured(empty_url, monkeypatch, capsys):
    monkeypatch.setattr(pgmq, "is_installed", lambda: False)
    figures = run_tiny(empty_url, "wake")
    assert "pgmq is left out" in capsys.readouterr().out
    assert {peer for case in figures.cases for peer in case.theirs} == {"bare LISTEN"}


@pytest.mark.parametrize("name", [name for name in peers.NAMES if name != "pgmq"])
def test_a_peer_delivers_what_was_sent(empty_url, name):
    """PGQUE_SQL: the SQL of PgQue, which no package has."""
    sql = {"pgque": Path(path)} if (path := os.environ.get("PGQUE_SQL")) else {}
    found = peers.find([name], sql)
    if found.missing:
        pytest.skip(found.missing[0])
    (side,) = found.sides
    with connect(empty_url) as conn:
        for _ in range(2):  # made again after it was dropped
            side.install(conn)
            side.create(conn, 1, by_key=False)
            side.send(conn, payload(0), None)
            side.fill(conn, 1, ["a"] * 5)
            first = side.receive(conn, 1, 0, None)
            assert 0 in first.numbers or name == "pgque", "the oldest"
            assert side.left(conn, 0) == 6, "what was received is not acknowledged"
            log = Log(deliveries=[(0, 0, first.numbers)])
            if first.numbers:
                acknowledge(side, conn, first, 0)
            while (rest := side.receive_rest(conn, 0)).numbers:
                acknowledge(side, conn, rest, 0)
                log.deliveries.append((0, 0, rest.numbers))
            check(side, conn, range(6), [log])
            side.drop(conn)


def test_a_peer_that_is_not_there_is_left_out_with_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    found = peers.find(["absurd", "pgque"])
    assert not found.sides
    assert [sentence.partition(" is left out: ")[0] for sentence in found.missing] == [
        "absurd",
        "pgque",
    ]
    with pytest.raises(typer.BadParameter, match="there is no file"):
        paths_of([f"pgque={tmp_path}/none.sql"])
    with pytest.raises(typer.BadParameter, match="there are pgque"):
        paths_of([f"pgmq={tmp_path}"])


# What must fail the run


class Loses(Rows):
    """Acknowledges the first message of a delivery without giving it to anybody."""

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        delivery = super().receive(conn, size, consumer, done)
        return Delivery(delivery.numbers[1:], delivery.handle)

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        return super().ack(conn, delivery, consumer) and len(delivery.numbers)


class Doubles(Rows):
    """Sends all messages twice."""

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        super().fill(conn, first, keys)
        super().fill(conn, first, keys)


class Keeps(Rows):
    """Says that it has acknowledged, and has not."""

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        return len(delivery.numbers)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("side", "said"),
    [
        (Loses(), "lost"),
        (Doubles(), "received twice"),
        (Keeps(), "not acknowledged"),
    ],
    ids=["lost", "doubled", "kept"],
)
def test_a_wrong_count_fails_the_run(empty_url, side, said):
    with connect(empty_url) as conn, Crew(empty_url, ServerCpu(conn)) as crew:
        run = Compare(empty_url, conn, crew, TINY, Report(), has_pgmq=False)
        with pytest.raises((CountError, RuntimeError), match=said), run.queues([side]):
            backlog.turn(run, side, 10, 2)


@pytest.mark.longer
def test_right_counts_pass(empty_url):
    with connect(empty_url) as conn, Crew(empty_url, ServerCpu(conn)) as crew:
        run = Compare(empty_url, conn, crew, TINY, Report(), has_pgmq=False)
        for side in (Ours(), Rows(), RowsByFunctions(), Rows(by_key=True)):
            with run.queues([side]):
                assert backlog.turn(run, side, 10, 2) > 0


@pytest.mark.parametrize(
    ("deliveries", "is_in_order"),
    [
        ([(1, 2, [0, 1]), (3, 4, [2])], True),
        ([(1, 2, [1]), (3, 4, [0])], False),
        ([(1, 4, [0]), (3, 5, [1])], False),
        ([(1, 2, [1, 0])], False),
    ],
    ids=["in order", "the other way round", "two at once", "in one delivery"],
)
def test_a_key_out_of_order_fails_the_run(deliveries, is_in_order):
    logs = [Log(deliveries=[each]) for each in deliveries]
    if is_in_order:
        check_order(Ours(), logs, ["a"] * 3)
    else:
        with pytest.raises(CountError):
            check_order(Ours(), logs, ["a"] * 3)


# What is shown


@pytest.fixture
def figures() -> Report:
    about = report.machine("18", {"synchronous_commit": "on"}, "full", {"pgmq": "1"})
    values = {OURS: [100.0, 200.0], "pgqueue, one call": [400.0], "pgmq": [200.0, 400.0]}
    late = {OURS: [1.0], "pgmq": [3.0]}
    cpu = {OURS: [300.0, 200.0], "pgqueue, one call": [100.0], "pgmq": [400.0]}
    return Report(
        about,
        [
            Case("send", "messages", "1", "/s", values, cpu=cpu),
            Case("send", "messages", "10", "/s", values, cpu=cpu),
            Case("wake-up", "median", "", "ms", late, higher=False),
        ],
    )


def test_the_page_shows_where_we_lose_and_the_servers_cpu(figures, tmp_path):
    text = report.readme_of(figures)
    assert "| median | 1 ms | 3 |" in text
    rows = [line for line in text.splitlines() if line.startswith("| messages")]
    assert rows == [
        "| messages: 1 / 10 | 175 / 175/s | **0.50** / **0.50** |",
        "| messages: 1 / 10; *one call* | 400 / 400/s | 1.14 / 1.14 |",
        "| messages, the server's CPU: 1 / 10 | 225 / 225 µs | 1.78 / 1.78 |",
        "| messages, the server's CPU: 1 / 10; *one call* | 100 / 100 µs | 4 / 4 |",
    ]
    figures.write(tmp_path / "compare.json")
    (first, *_) = json.loads((tmp_path / "compare.json").read_text())["cases"]
    assert first["cpu_ratios"] == {OURS: {"pgmq": 400 / 225}, "pgqueue, one call": {"pgmq": 4.0}}


@pytest.mark.skipif(sys.platform != "linux", reason="CPU is read from /proc")
def test_the_cpu_of_a_server_counts_sessions_that_are_over(server):
    """And does not count what other processes do."""
    with connect(server.url) as conn:
        cpu = ServerCpu(conn)
        before = cpu.seconds()
        if before is None:
            pytest.skip("the server is on another machine")
        with connect(server.url) as other:
            pid = other.info.backend_pid
            other.execute("select count(*) from generate_series(1, 1000000)")
            took = nanoseconds(pid) / 1e9
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        took_in_all = between(before, cpu.seconds())
        assert took_in_all is not None
        assert took_in_all > took - 0.03, "the clock of ended processes ticks each 10 ms"


@pytest.mark.longer
def test_json_and_picture_are_written_and_read(figures, tmp_path):
    figures.write(tmp_path / "compare.json")
    again = report.read(tmp_path / "compare.json")
    assert again.cases == figures.cases
    assert report.readme_of(again) == report.readme_of(figures)
    report.draw(again, tmp_path / "compare.svg")
    assert "<svg" in (tmp_path / "compare.svg").read_text()


def test_the_page_has_a_place_for_the_figures(figures):
    page = PAGE.read_text()
    text = report.written(report.written(page, figures), figures)
    assert text.count(report.readme_of(figures)) == 1
    assert f"({PICTURE.relative_to(PAGE.parent)})" in page
    assert PICTURE.exists()
