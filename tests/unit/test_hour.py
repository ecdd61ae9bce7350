"""The hour finds what grows and what is lost, runs, and draws."""

import json
import os
from pathlib import Path

import numpy as np
import psycopg
import pytest

from tests.benchmarks.hour import report
from tests.benchmarks.hour.judge import DEAD, SIZE, counted, counts, growth
from tests.benchmarks.hour.plan import (
    ANY_ORDER,
    BY_KEY,
    Plan,
    failures,
    is_dead,
    is_purged,
    payload,
)
from tests.benchmarks.hour.run import LINES, measure, prepare
from tests.benchmarks.hour.samples import Sampler, grouped, read
from tests.benchmarks.hour.shared import Shared, delays, percentile
from tests.benchmarks.hour.sides import SIDES, Ours

HOUR = Plan("pgqueue", "", "", minutes=60, rate=1000, began=0)
MB = 1 << 20


def looks(**figures) -> list[dict]:
    """An hour of looks at relations, of which each figure is a function of the time."""
    return [
        {
            "at": float(at),
            "held": False,
            "relations": {name: [*map(int, of(at)), 1] for name, of in figures.items()},
            "backlog": {ANY_ORDER: 2000 + at % 7 * 100},
        }
        for at in range(0, 3601, 10)
    ]


def test_what_grows_in_the_last_third_is_found():
    lines = looks(
        grows=lambda at: (at * 10_000, 0, 0),
        dies=lambda at: (MB, 300_000 + at * 200, 0),
        creeps=lambda at: (50 * MB + at * 300, 0, 10_000 + at * 0.5),
        saws=lambda at: (at * 30_000 - at % 60 * MB + 60 * MB, 0, 0),
    )
    found = {(each.name, each.what) for each in growth(HOUR, lines)}
    assert found == {
        *(("grows", SIZE), ("dies", DEAD), ("creeps", SIZE), ("creeps", "live rows")),
        ("saws", SIZE),
    }


def test_a_sawtooth_and_what_grew_before_are_no_growth():
    saw = looks(
        vacuumed=lambda at: (40 * MB, at % 60 * 3000 + at * 7 % 20_000, 1000),
        segments=lambda at: (180 * MB + at % 37 * 0.6 * MB, 0, 300_000 + at % 37 * 1000),
        bloated=lambda at: ((100 if at > 1600 else 3) * MB, 0, 0),
    )
    assert list(growth(HOUR, saw)) == []


def test_a_backlog_that_grows_is_found():
    lines = looks()
    for line in lines:
        line["backlog"][BY_KEY] = line["at"] * 100
    assert [each.name for each in growth(HOUR, lines)] == [BY_KEY]


def test_a_run_that_ended_early_is_not_judged():
    with pytest.raises(ValueError, match="last third"):
        list(growth(HOUR, looks()[:200]))


def test_a_table_that_grows_is_seen(conn: psycopg.Connection, tmp_path):
    plan = Plan("pgqueue", "", str(tmp_path), minutes=0.2, rate=1, began=0)
    conn.execute("create table pgqueue.planted_17 (filler text)")
    path = tmp_path / LINES
    sampler = Sampler(conn, Ours(), path, lambda: {"test": [os.getpid()]})
    for at in range(13):
        conn.execute(
            "insert into pgqueue.planted_17 select repeat('x', 500) from generate_series(1, 2000)"
        )
        sampler.look(at, held=False)
    found = [str(each) for each in growth(plan, read(path)) if each.what == SIZE]
    assert len(found) == 1
    assert found[0].startswith("pgqueue.planted_*: bytes grow from ")
    assert read(path)[-1]["cpu"]["test"] > 0


def test_tables_by_numbers_are_one():
    assert grouped("pgqueue.messages_12_3_pkey") == "pgqueue.messages_*_*_pkey"


def test_losses_and_doubles_are_counted(tmp_path):
    plan = Plan("pgqueue", "", str(tmp_path), minutes=0.2, rate=10, began=0)
    workers = [Shared(plan, f"{ANY_ORDER} {index}") for index in range(2)]
    for number in range(10):
        workers[0].due[number] = 1.0
        workers[number % 2].done[number] = 1
    for worker in workers:
        worker.events[0] += 2
    assert counted(tmp_path, ANY_ORDER).ok
    workers[0].done[4] = 0  # nobody has it
    workers[1].done[6] = 1  # the other one has it, too
    workers[0].done[11] = 1  # nobody has sent it
    Shared(plan, "").dropped[4] = 0
    found = counted(tmp_path, ANY_ORDER)
    assert not found.ok
    assert (found.once, found.lost, found.doubled, found.unknown) == (8, 1, 1, 1)
    assert found.failed == 4
    Shared(plan, "").dropped[4] = 1
    assert counted(tmp_path, ANY_ORDER).lost == 0


def test_fates_have_their_shares():
    numbers = range(200_000)
    assert sum(map(is_dead, numbers)) / len(numbers) == pytest.approx(0.0001, rel=0.6)
    assert len({is_purged(number) for number in numbers if is_dead(number)}) == 2
    failing = [failures(number) for number in numbers if failures(number)]
    assert len(failing) / len(numbers) == pytest.approx(0.02, rel=0.1)
    assert set(failing) == {1, 2}
    assert 480 <= len(json.dumps(json.loads(payload(7)))) <= 520


def test_delays_are_by_minute(tmp_path, monkeypatch):
    plan = Plan("pgqueue", "", str(tmp_path), minutes=2, rate=10, began=1000.0)
    shared = Shared(plan, f"{ANY_ORDER} 0")
    for number in range(100):
        shared.due[number] = 1060.0
    for number in range(100):
        monkeypatch.setattr("time.time", lambda n=number: 1060.001 + (n == 99))
        shared.note_delay(number)
    buckets = delays(tmp_path, ANY_ORDER)
    assert buckets.sum(axis=1).tolist()[:3] == [0, 100, 0]
    assert percentile(buckets[1], 0.99) == pytest.approx(0.001, rel=0.1)
    assert percentile(buckets[1], 1) == pytest.approx(1.001, rel=0.1)


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_a_few_seconds_of_it_run(side, empty_url, tmp_path):
    shared, folder = tmp_path / "shared", tmp_path / side
    shared.mkdir()
    folder.mkdir()
    plan = Plan(side, empty_url, str(shared), 0.15, 100, 0, spark=False)
    prepare(plan)
    measure(plan, folder / "plan.json")
    report.summarize(plan, shared, folder)
    found = counts(shared)
    assert [each for each in found if not each.ok] == []
    assert found[0].sent > 500
    assert found[0].failed > 0
    report.tell(folder)
    report.draw([folder, folder], tmp_path / "hour.svg")
    size = (tmp_path / "hour.svg").stat().st_size
    assert size < 200_000
    before = (tmp_path / "hour.svg").read_bytes()
    report.draw([folder, folder], tmp_path / "hour.svg")
    assert (tmp_path / "hour.svg").read_bytes() == before
    effects = next(shared.glob(f"done {BY_KEY} 0"))
    np.zeros(plan.numbers, "u1").tofile(effects)
    assert counted(shared, BY_KEY).lost > 0
    assert Path(folder / LINES).exists()
