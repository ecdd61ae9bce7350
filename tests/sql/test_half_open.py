"""A network that loses the packets of one direction, or of both, beside all that clients do.

`tests/unit/test_silence.py` has the time that passes until a lost network is noticed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

import spark_pgqueue
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import is_passing
from tests.network import LOST, Network, a_network
from tests.parties import Parties
from tests.processes import wait_until
from tests.sql import checker, clock
from tests.sql.queue import acked, call, seqs_of, value

pytestmark = [pytest.mark.longer, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def network(servers_home: Path) -> Iterator[Network]:
    with a_network(servers_home / "network") as made:
        yield made


@pytest.mark.promise(
    "fault: the network loses packets: requests, answers, or both",
    "operations: a network that loses packets",
)
def test_a_network_that_loses_packets_in_one_direction_loses_and_repeats_nothing(
    network: Network,
) -> None:
    with network.run(lambda: Parties(network.url, network.server.url)) as parties:
        network.run(parties.start)
        for direction in LOST:
            told = len(parties.unsure)
            with network.losing(direction):
                wait_until(lambda told=told: parties.failures or len(parties.unsure) > told)
                wait_until(lambda: parties.failures or network.sessions() == 0)
            parties.go_on()
        parties.stop()
    with connection.connect(network.server.url) as conn:
        parties.check(conn)
    assert all(map(is_passing, parties.unsure))


@pytest.mark.parametrize("direction", ["requests", "answers"])
@pytest.mark.promise(
    "fault: the network loses packets while a transaction is open",
    "operations: a network that loses packets",
)
def test_a_commit_without_an_answer_is_not_known_and_holds_up_nobody(
    network: Network, direction: str
) -> None:
    """Without its request it is undone, once the server misses its client, and else it is done."""
    stream = f"commit {direction}"
    ready, lost = threading.Event(), threading.Event()

    def commit() -> PgQueueError:
        with spark_pgqueue.connect(network.url, patience=0) as client:
            try:
                with client.transaction():
                    claim = client.receive(stream, "c", 10)
                    assert claim is not None
                    claim.ack()
                    client.send_batch(stream, ["x" * 1000] * 3000)
                    ready.set()
                    assert lost.wait(30)
            except PgQueueError as error:
                return error
            raise AssertionError("it was committed")

    with connection.connect(network.server.url) as conn, ThreadPoolExecutor() as pool:
        value(conn, "create_stream", stream)
        value(conn, "create_consumer", stream, "c", "earliest")
        value(conn, "create_consumer", stream, "d")
        first = [value(conn, "send", stream, "x") for _ in range(10)]
        client = pool.submit(network.run, commit)
        assert ready.wait(30)
        with network.losing(direction):
            lost.set()
            later = value(conn, "send", stream, "y")
            assert later in seqs_of(call(conn, "receive", stream, "d", 10_000)), (
                "what is open is passed by"
            )
            said = client.result(60)
            assert "whether the call took effect is not known" in str(said)
            assert is_passing(said)
            wait_until(lambda: network.sessions() == 0)
        clock.end_leases(conn)
        got = set(acked(conn, stream, "c", 10_000))
        is_done = direction == "answers"
        assert got >= {later}
        assert len(got - {later}) == (3000 if is_done else 10)
        assert got.isdisjoint(first) == is_done
        checker.check(conn)


@pytest.mark.promise("fault: the network loses packets: requests, answers, or both")
def test_who_waits_for_messages_notices_that_the_answers_are_lost(network: Network) -> None:
    """A minute of waiting without a message looks the same, but for the network's own packets."""
    long = timedelta(minutes=5)
    waits: list[Callable[[spark_pgqueue.Client], object]] = [
        lambda client: client.receive("quiet", "c", wait=long),
        lambda client: next(client.consume("quiet", "c", wait=long)),
    ]

    def wait(call: Callable[[spark_pgqueue.Client], object]) -> PgQueueError:
        with spark_pgqueue.connect(network.url, patience=0) as client:
            try:
                found = call(client)
            except PgQueueError as error:
                return error
            raise AssertionError(f"it found {found}")

    with connection.connect(network.server.url) as conn, ThreadPoolExecutor() as pool:
        value(conn, "create_stream", "quiet")
        value(conn, "create_consumer", "quiet", "c", "earliest")
        clients = [pool.submit(network.run, partial(wait, call)) for call in waits]
        wait_until(lambda: network.sessions() == len(waits))
        time.sleep(1)  # until they wait: whatever they do is lost in the end
        with network.losing("answers"):
            assert all(is_passing(client.result(60)) for client in clients)
