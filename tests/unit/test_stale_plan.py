"""Rows that are read with the plan of another query are noticed."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.executor import stale_plan
from spark_pgqueue.spark.executor.stale_plan import PlanGuard


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(stale_plan, "own_folder", lambda _: tmp_path)
    return tmp_path


@pytest.mark.parametrize("first", [("q 0", "1"), ("p 1", "1"), (None, "1")])
def test_a_micro_batch_reads_with_its_own_plan_only(first: tuple[str | None, str]) -> None:
    plan = PlanGuard("table stats")
    plan.compare(*first)
    plan.compare(*first)
    with pytest.raises(PgQueueError, match="would read table stats as it was planned") as caught:
        plan.compare("q 1", "2")
    assert "call load() inside of foreachBatch" in (caught.value.hint or "")
    PlanGuard("table stats").compare("q 1", "2")


def test_an_old_plan_outside_of_streaming_queries_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    plan = PlanGuard("stream s")
    old = replace(plan, made_at=plan.made_at - 61)
    for each, execution in ((old, "1"), (old, "1"), (plan, "2")):
        each.compare(None, execution)
    assert caplog.records == []
    for _ in range(2):
        old.compare(None, "2")
    assert len(caplog.records) == 1
    assert "stream s is read as it was at" in caplog.text


def test_plans_that_nobody_reads_with_are_forgotten(folder: Path, monkeypatch) -> None:
    plans = [PlanGuard("a"), PlanGuard("b")]
    for each in plans:
        each.compare("q 0", "1")
        os.utime(folder / each.plan, (1, 1), follow_symlinks=False)
    plans[0].compare("q 0", "1")
    monkeypatch.setattr(stale_plan.random, "random", lambda: 0.0)
    PlanGuard("c").compare("q 0", "1")
    left = {path.name for path in folder.iterdir()}
    assert plans[0].plan in left
    assert plans[1].plan not in left
    assert len(left) == 2
