"""Producers and workers go on while the schema is upgraded."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.postgres import connection, schema
from tests.processes import wait_until
from tests.sql import checker, freeze
from tests.sql.queue import *

pytestmark = [pytest.mark.longer, pytest.mark.promise("operations: rolling upgrade")]


CONSUMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {"concurrency": 4}),
    "key": ("key", {}),
    "stream": ("stream", {}),
    "in transactions": ("none", {"transactional": True}),
    "in batches": ("key", {"batch": 10}),
}
"""The ordering of each consumer, and the options of its worker."""


@pytest.fixture
def old(empty_url: str, request: pytest.FixtureRequest) -> Iterator[Conn]:
    """A database of a released version, with the stream s and its consumers."""
    with connection.connect(empty_url) as conn:
        freeze.install(conn, request.param)
        value(conn, "create_stream", "s")
        for name, (ordering, _) in CONSUMERS.items():
            value(conn, "create_consumer", "s", name, "earliest", ordering)
        yield conn


def assert_complete(conn: Conn, sent: list[int], got: dict[str, list[int]]) -> None:
    for name in CONSUMERS:
        assert sorted(got[name]) == sorted(sent), name
    checker.check(conn)


@pytest.mark.parametrize("old", [schema.expected_version() - 1], indirect=True)
def test_clients_and_workers_of_this_package_see_no_error(old: Conn, empty_url: str) -> None:
    """They were deployed before the upgrade."""
    over, sent = threading.Event(), list[int]()
    got: dict[str, list[int]] = {name: [] for name in CONSUMERS}

    def send() -> None:
        with spark_pgqueue.connect(empty_url) as queue:
            while not over.wait(0.01):
                sent.extend(queue.send_batch("s", ["x", "y", "z"], keys=["a", "b", None]))

    def work(name: str) -> int:
        def note(given: Any, *transaction: psycopg.Connection) -> None:
            messages = given if "batch" in options else [given]
            got[name].extend(message.seq for message in messages)
            for conn in transaction:
                conn.execute("insert into public.done values (%s)", [given.seq])

        options = CONSUMERS[name][1]
        worker = spark_pgqueue.Consumer(empty_url, "s", name)
        return worker.run(note, wait=timedelta(seconds=4), **options)

    old.execute("create table public.done (seq bigint)")
    with ThreadPoolExecutor(10) as pool:
        sender, *workers = pool.submit(send), *(pool.submit(work, name) for name in CONSUMERS)
        try:
            wait_until(lambda: min(map(len, got.values())) >= 100)
            schema.install(old)
            count = len(sent)
            wait_until(lambda: min(map(len, got.values())) >= count + 100)
        finally:
            over.set()
        sender.result()
        assert {worker.result() for worker in workers} == {len(sent)}
    # a transaction that the upgrade cut off was rolled back, and its message came again
    got["in transactions"] = [seq for (seq,) in old.execute("select seq from public.done")]
    assert_complete(old, sent, got)


@pytest.mark.parametrize("old", freeze.released(), indirect=True)
def test_a_session_that_calls_the_functions_fails_once_at_most(old: Conn, empty_url: str) -> None:
    over, sent = threading.Event(), list[int]()
    got: dict[str, list[int]] = {name: [] for name in CONSUMERS}

    def repeat(step: Callable[[Conn], None]) -> None:
        failed = 0
        with connection.connect(empty_url) as conn:
            while not over.wait(0.01):
                try:
                    step(conn)
                except psycopg.Error:
                    failed += 1
        assert failed <= 1

    def send(conn: Conn) -> None:
        sent.append(value(conn, "send", "s", "x", "k"))

    def work(name: str) -> Callable[[Conn], None]:
        def step(conn: Conn) -> None:
            with conn.transaction():
                found = call(conn, "receive", "s", name, 20)
                if found:
                    value(conn, "ack", claim_of(found))
            got[name].extend(seqs_of(found))

        return step

    with ThreadPoolExecutor(10) as pool, ExitStack() as ending:
        ending.callback(over.set)
        steps = [send, send, *(work(name) for name in CONSUMERS)]
        running = [pool.submit(repeat, step) for step in steps]
        wait_until(lambda: min(map(len, got.values())) >= 20)
        schema.install(old)
        count = len(sent)
        wait_until(lambda: min(map(len, got.values())) >= count + 20)
        ending.close()
        for each in running:
            each.result()
    for name in CONSUMERS:
        got[name] += acked(old, "s", name)
    assert_complete(old, sent, got)
