"""What a worker's handlers do, as figures: for OpenTelemetry, and as OpenMetrics."""

from __future__ import annotations

import time
import urllib.request
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import spark_pgqueue
from spark_pgqueue import Consumer, Reject, Retry
from spark_pgqueue.client import Client
from spark_pgqueue.worker import meter
from tests.sql.queue import AT_ONCE
from tests.unit.test_supervision import free_address

CONSUMER = {"settings": AT_ONCE}
OF = {"messaging_destination_name": "s", "messaging_consumer_group_name": "c"}


def handle(message: Any) -> None:
    """Done, rejected, or done at the second time."""
    if message.data == "slow":
        time.sleep(0.3)
    if message.data == "reject":
        raise Reject("no such customer")
    if message.data == "retry" and message.deliver_count == 1:
        raise Retry(delay=timedelta(0))


async def handle_async(message: Any) -> None:
    handle(message)


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """By name, error and bucket."""
    return {
        (each.name, each.labels.get("error_type", ""), each.labels.get("le", "")): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if OF.items() <= each.labels.items()
    }


def counted(found: dict[tuple[str, str, str], float]) -> dict[str, float]:
    name = "messaging_process_duration_seconds_count"
    return {error: found[n, error, le] for n, error, le in found if n == name}


@pytest.mark.parametrize(
    ("handler", "options"),
    [(handle, {}), (handle, {"processes": 2}), (handle_async, {"concurrency": 3})],
    ids=["threads", "processes", "tasks"],
)
def test_calls_are_counted_by_their_end_and_in_buckets_of_their_duration(
    queue: Client, url: str, handler: Any, options: dict[str, Any]
) -> None:
    queue.send_batch("s", ["done", "reject", "retry", "slow"])
    worker = Consumer(url, "s", "c")
    assert worker.run(handler, wait=timedelta(milliseconds=200), **options) == 3
    found = samples(meter.text([worker._meter]))
    assert counted(found) == {"": 3, "retry": 1, "reject": 1}
    bucket = "messaging_process_duration_seconds_bucket"
    assert found[bucket, "", "0.25"] == 2
    assert found[bucket, "", "+Inf"] == 3
    assert 0.3 <= found["messaging_process_duration_seconds_sum", "", ""] < 2
    assert found["pgqueue_process_redelivered_total", "", ""] == 1
    assert found["pgqueue_process_in_flight", "", ""] == 0


def test_figures_go_on_in_the_next_run_of_a_worker(queue: Client, url: str) -> None:
    worker = Consumer(url, "s", "c")
    for _ in range(2):
        queue.send("s", "done")
        worker.run(handle, wait=timedelta(0))
    assert counted(samples(meter.text([worker._meter]))) == {"": 2}


def test_a_running_worker_answers_with_its_figures(queue: Client, url: str) -> None:
    where = free_address()
    worker = Consumer(url, "s", "c")
    queue.send_batch("s", ["x"] * 5)
    seen: list[dict[tuple[str, str, str], float]] = []

    def look(message: Any) -> None:
        with urllib.request.urlopen(f"http://{where}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            seen.append(samples(answer.read().decode()))

    with spark_pgqueue.supervised(worker, health=where):
        assert worker.run(look, wait=timedelta(0)) == 5
    in_flight = [each["pgqueue_process_in_flight", "", ""] for each in seen]
    assert max(in_flight) >= 1
    assert counted(seen[0]) == {"": 0}


def test_opentelemetry_has_the_same(
    queue: Client, url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Once, however many workers there are."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(api, "get_meter", provider.get_meter)
    meter._instruments.cache_clear()
    request.addfinalizer(meter._instruments.cache_clear)
    queue.send_batch("s", ["done", "reject", "retry"])
    Consumer(url, "s", "another of the process")
    Consumer(url, "s", "c").run(handle, wait=timedelta(milliseconds=200))
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found: dict[str, Any] = {each.name: each for each in scope.metrics}
    assert len(found) == len(scope.metrics) == 3
    points = found["messaging.process.duration"].data.data_points
    assert found["messaging.process.duration"].unit == "s"
    assert {each.attributes.get("error.type"): each.count for each in points} == {
        None: 2,
        "retry": 1,
        "reject": 1,
    }
    assert tuple(points[0].explicit_bounds) == meter.BOUNDS
    assert (
        dict(points[0].attributes).items()
        >= {
            "messaging.system": "pgqueue",
            "messaging.operation.type": "process",
            "messaging.destination.name": "s",
            "messaging.consumer.group.name": "c",
        }.items()
    )
    for name, value in (("pgqueue.process.redelivered", 1), ("pgqueue.process.in_flight", 0)):
        (point,) = found[name].data.data_points
        assert point.value == value
