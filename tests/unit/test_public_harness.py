"""The adapter for the public harness speaks its protocol: a process, lines of JSON, SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import spark_pgqueue
from tests.benchmarks.public_harness import CONSUMER, MANIFEST, STREAM, SYSTEM, Latencies
from tests.processes import wait_until

ADAPTER = [sys.executable, "-m", "tests.benchmarks.public_harness"]
PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")
OF_ONE = {"queue_depth", "producer_target_rate"}
"""Figures that only the first of several processes tells."""
FIGURES = {"enqueue_rate", "completion_rate"} | {
    f"{name}_{percentile}"
    for name in ("producer", "claim", "subscriber", "end_to_end")
    for percentile in PERCENTILES
}


@contextmanager
def adapter(url: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """The process, started as the harness starts it."""
    environment = {
        "DATABASE_URL": url,
        "SCENARIO": "long_horizon",
        "WORKER_COUNT": "4",
        "JOB_PAYLOAD_BYTES": "100",
        "SAMPLE_EVERY_S": "1",
        "BENCH_INSTANCE_ID": "0",
        **settings,
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        ADAPTER, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def records(process: subprocess.Popen[str]) -> Iterator[dict]:
    """The lines, each of which is JSON, until the process ends."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def window_of(metric: str) -> float:
    """The seconds that a figure is of."""
    if metric in OF_ONE:
        return 0
    return 1 if metric.endswith("_rate") else 30


def settled(queue: spark_pgqueue.Client) -> int:
    (stats,) = queue.stats(STREAM)
    return stats.settled


@pytest.mark.longer
def test_the_manifest_is_what_the_harness_reads_before():
    done = subprocess.run([*ADAPTER, "--manifest"], capture_output=True, text=True, check=True)
    manifest = json.loads(done.stdout)
    assert manifest == MANIFEST
    assert manifest["system"] == SYSTEM


@pytest.mark.parametrize(
    ("settings", "instance"),
    [
        ({"PRODUCER_MODE": "fixed", "PRODUCER_PACING": "harness"}, 0),
        pytest.param(
            {"PRODUCER_MODE": "fixed", "PRODUCER_RATE": "500"}, 1, marks=pytest.mark.longer
        ),
        pytest.param(
            {"PRODUCER_MODE": "depth-target", "TARGET_DEPTH": "20"}, 0, marks=pytest.mark.longer
        ),
    ],
    ids=["paced by the harness", "paced by the adapter", "a depth"],
)
def test_it_is_run_as_the_harness_runs_it(empty_url, settings, instance):
    with adapter(empty_url, BENCH_INSTANCE_ID=str(instance), **settings) as process:
        told = records(process)
        described = next(told)
        assert described["kind"] == "descriptor"
        assert set(described["event_tables"]) >= set(MANIFEST["event_tables"])
        assert set(described["extensions"]) >= set(MANIFEST["extensions"])
        assert described["version"]
        assert process.stdin is not None
        samples, positive = [], set()
        while not positive >= FIGURES:  # a second without a message has a rate of 0
            if settings.get("PRODUCER_PACING") == "harness":
                process.stdin.write("ENQUEUE 30\nENQUEUE 70\n")
                process.stdin.flush()
            samples.append(next(told))
            positive |= {each["metric"] for each in samples[-1:] if each["value"] > 0}
        with spark_pgqueue.connect(empty_url) as queue:
            wait_until(lambda: settled(queue) >= 100)
        process.send_signal(signal.SIGTERM)
        samples += told
        assert process.wait() == 0
    expected = FIGURES | (OF_ONE if instance == 0 else set())
    assert {sample["metric"] for sample in samples} == expected
    for sample in samples:
        assert (sample["kind"], sample["subject_kind"]) == ("adapter", "adapter")
        assert (sample["system"], sample["instance_id"]) == (SYSTEM, instance)
        assert sample["value"] >= 0
        assert sample["window_s"] == window_of(sample["metric"])
    with spark_pgqueue.connect(empty_url) as queue:
        (stats,) = [each for each in queue.stats(STREAM) if each.consumer == CONSUMER]
        assert stats.claims == 0, "the worker has given back what it had not begun"


def test_percentiles_take_little_memory_and_have_three_digits():
    latencies = Latencies()
    for number in range(1, 1001):
        latencies.add(number / 1000)
    found = [latencies.percentiles()[percentile] for percentile in PERCENTILES]
    assert found == [500, 950, 990]
    for number in range(100_000):
        latencies.add(1 + number / 1e6)
    kept = [counts for _, counts in latencies._slices]
    assert sum(map(len, kept)) < 2_500
