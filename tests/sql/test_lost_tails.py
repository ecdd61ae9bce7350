"""A crash that forgets the last commits, after each call: nothing contradicts itself afterwards.

`synchronous_commit` is off, and all processes of the server are killed. `test_server_faults` has
what an offset has read, and `test_claim_ids` the ids of claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from spark_pgqueue.postgres import connection
from tests.conftest import Server
from tests.sql import checker, clock, internals
from tests.sql.queue import *
from tests.sql.test_processes_that_fail import processes

pytestmark = [pytest.mark.longer, pytest.mark.timeout(200)]

KEPT = {"stage", "publish_staged", "reader_claim", "reader_claim acknowledges"}
"""What Spark is told is on disk before."""


class Scenario:
    """Calls of every kind, each in one transaction.

    Attributes:
        claims: by name, the claim, or the lease of a partition, of the call that was last told so.
    """

    def __init__(self, conn: Conn):
        self.stream = value(conn, "create_stream", "s", p_settings='{"dedup_window": "1 hour"}')
        for name, ordering in (("c", "none"), ("k", "key")):
            consumer(conn, name, ordering)
        self.reader = Reader(conn, consumer(conn, "r"))
        value(conn, "create_group", "s", "g", 1, "earliest")
        self.claims: dict[str, int] = {}
        self.end: Any = None
        self.blocks: list[int] = []

    def calls(self) -> dict[str, Callable[[Conn], object]]:
        """The calls, in order."""

        def settle(function: str, name: str, **how: Any) -> Callable[[Conn], object]:
            return lambda conn: value(conn, function, self.claims[name], **how)

        return {
            "send": lambda conn: send(conn, p_dedup_key="a"),
            "send_batch": lambda conn: send_keys(conn, *("abc" * 10)),
            "receive": lambda conn: self.claim("c", receive(conn, 5)),
            "receive one": lambda conn: self.claim("one", receive(conn, 1)),
            "receive by key": lambda conn: self.claim("k", receive(conn, 5, "k")),
            "extend": settle("extend", "c"),
            "ack": settle("ack", "c"),
            "ack one": settle("ack", "one"),
            "nack": settle("nack", "k"),
            "receive again": lambda conn: self.claim("k", receive(conn, 5, "k")),
            "defer": settle("defer", "k"),
            "lease_partitions": self.lease,
            "commit_offset": self.commit,
            "reader_claim": self.ask,
            "reader_claim acknowledges": self.ask_again,
            "stage": lambda conn: self.blocks.append(stage(conn, self.stream, 5, len(self.blocks))),
            "publish_staged": lambda conn: publish(
                conn, self.stream, self.blocks[-1:], 5, len(self.blocks) - 1
            ),
        }

    def claim(self, name: str, rows: list[Any]) -> None:
        self.claims[name] = claim_of(rows)

    def lease(self, conn: Conn) -> None:
        (row,) = call(conn, "lease_partitions", "s", "g", "worker")
        self.claims["g"] = row.lease_id

    def commit(self, conn: Conn) -> None:
        rows = call(conn, "read_partitions", "s", "g", [self.claims["g"]], 5)
        value(conn, "commit_offset", self.claims["g"], rows[-1].next_offset)

    def ask(self, conn: Conn) -> None:
        self.reader.conn = conn
        self.end = self.reader.ask(5)

    def ask_again(self, conn: Conn) -> None:
        self.reader.conn = conn
        self.reader.move(self.end)
        self.end = self.reader.ask(5)


def look(conn: Conn) -> list[Any]:
    """What the database knows."""
    return [
        internals.bundles(conn),
        internals.published(conn),
        [(row.claim_id, row.live) for row in internals.claims(conn)],
        conn.execute("select worker, behind from pgqueue.group_stats").fetchall(),
        internals.staged_chunks(conn),
        internals.sink_batches(conn),
        [tuple(row) for row in internals.readers(conn)],
    ]


@pytest.fixture
def kill(own_server: Server, url: str) -> Iterator[Callable[[], None]]:
    """Kills a server that writes its log late, and starts it again."""

    def set_up(change: str) -> None:
        with connection.connect(own_server.url) as conn:
            conn.execute(f"alter system {change}".encode())
            conn.execute("select pg_reload_conf()")

    def run() -> None:
        victims = processes(own_server)
        for action in (psutil.Process.suspend, psutil.Process.kill):
            for each in victims:
                with suppress(psutil.NoSuchProcess):
                    action(each)
        psutil.wait_procs(victims, timeout=20)
        own_server.restart("immediate")

    set_up("set wal_writer_delay = '10 s'")
    yield run
    set_up("reset wal_writer_delay")


@pytest.mark.promise(
    "guarantee: Asynchronous commit", "fault: Postgres crashes with synchronous_commit = off"
)
def test_a_crash_forgets_a_call_or_keeps_it_and_no_token_comes_back(
    url: str, kill: Callable[[], None]
) -> None:
    with connection.connect(url) as conn:
        conn.execute("set synchronous_commit = on")
        scenario = Scenario(conn)
        send_keys(conn, *("abcde" * 6))
    forgotten = set()
    for name, make in scenario.calls().items():
        with connection.connect(url) as conn:
            before, had = look(conn), dict(scenario.claims)
            conn.execute("set synchronous_commit = off")
            with conn.transaction():
                make(conn)
            after, told = look(conn), dict(scenario.claims)
        kill()
        with connection.connect(url) as conn:
            conn.execute("set synchronous_commit = on")
            now = look(conn)
            assert now == after or (now == before and name not in KEPT), name
            checker.check(conn)
            if now == after:
                continue
            forgotten.add(name)
            lost = {token for key, token in told.items() if had.get(key) != token}
            for token in lost:
                if name.startswith("receive"):
                    assert value(conn, "ack", token) == 0
                    assert value(conn, "nack", token) == 0
            assert look(conn) == before
            make(conn)
            assert lost.isdisjoint(scenario.claims.values()), f"{name} told another the same"
            for token in lost:
                if name.startswith("receive"):
                    assert value(conn, "ack", token) == 0
            checker.check(conn)
    assert len(forgotten) > 8, forgotten
    with connection.connect(url) as conn:
        conn.execute("set synchronous_commit = off")
        for make in scenario.calls().values():
            make(conn)
    kill()
    with connection.connect(url) as conn:
        checker.check(conn)
        clock.end_leases(conn)
        for name in "ck":
            got = acked(conn, "s", name)
            assert len(got) == len(set(got))
            assert (
                one(conn, "select count(*) from pgqueue.open_claims where consumer = %s", name) == 0
            )
        checker.check(conn)
