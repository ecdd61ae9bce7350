"""Processes of an application that stand still (SIGSTOP) for longer than a claim's lease."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_until
from tests.spark.conftest import Queue
from tests.spark.test_crash import Traffic, application, check, wait_for_more

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]


def test_an_application_whose_processes_stand_still_goes_on_and_copies_each_message_once(
    url: str, tmp_path: Path
) -> None:
    """The source's process, the workers of its tasks, the JVM, the whole application."""
    queue = Queue(url, tmp_path)
    queue.create("in", "c")
    queue.create("out")
    traffic = Traffic(queue)
    traffic.every = 1.0
    with traffic, application(queue, "always") as child:
        wait_for_more(queue, child)
        for name in ("streaming", "pyspark.daemon", "java", ""):
            victims = child.descendants(name)
            assert victims, name
            for each in victims:
                with suppress(psutil.NoSuchProcess):
                    each.suspend()
            time.sleep(6)  # a lease is 5 s
            for each in victims:
                with suppress(psutil.NoSuchProcess):
                    each.resume()
            wait_for_more(queue, child)
        traffic.stop()
        wait_until(lambda: queue.backlog("in", "c") == 0, 150)
    check(queue, traffic)
