"""A network that loses the packets of one direction, or of both, beside a query that copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network import LOST, Network, a_network
from tests.processes import Child, wait_until
from tests.spark.conftest import Queue
from tests.spark.test_crash import APPLICATION, Traffic, check, wait_for_more

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]


@pytest.fixture
def network(servers_home: Path) -> Iterator[Network]:
    with a_network(servers_home / "spark-network") as made:
        yield made


@pytest.mark.promise("fault: the network loses packets: requests, answers, or both")
def test_a_query_whose_packets_are_lost_goes_on_and_copies_each_message_once(
    network: Network, tmp_path: Path
) -> None:
    queue = Queue(network.server.url, tmp_path)
    queue.create("in", "c")
    queue.create("out")
    through = (network.url, queue.checkpoint(), "always")
    with Traffic(queue) as traffic, network.run(lambda: Child(APPLICATION, *through)) as child:
        wait_for_more(queue, child)
        for direction in LOST:
            with network.losing(direction):
                wait_until(lambda: network.sessions() == 0)  # the source, the tasks, the sink
            wait_for_more(queue, child)
        traffic.stop()
        wait_until(lambda: queue.backlog("in", "c") == 0, 150)
    check(queue, traffic)
