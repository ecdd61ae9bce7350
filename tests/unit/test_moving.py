"""Moving from pgmq, by the statement of sql/guide/moving.md, beside who works with both."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.postgres import connection
from tests.pages import blocks_of

PAGE = Path(__file__).parents[2] / "sql" / "guide" / "moving.md"
(MOVE,) = [text for tag, text in blocks_of(PAGE.read_text()) if tag == "sql" and "moved as" in text]
COUNT = 400


@pytest.fixture
def both(conn: psycopg.Connection, url: str) -> psycopg.Connection:
    """A database with the queue baskets of pgmq, and the stream carts to replace it."""
    install = pytest.importorskip("pgmq.install", reason="pgmq is not installed")
    conn.execute(install.get_embedded_install_sql())
    conn.execute("select pgmq.create('baskets')")
    with spark_pgqueue.connect(url) as queue:
        queue.create_stream("carts", "json")
        queue.create_consumer("carts", "billing", ordering="key")
    return conn


def rows(conn: psycopg.Connection, sql: Any, *parameters: Any) -> list[Any]:
    return conn.execute(sql, parameters or None).fetchall()


def test_what_is_moved_keeps_its_order_key_headers_and_time(both: psycopg.Connection, url: str):
    send = "select pgmq.send('baskets', %s::jsonb, %s::jsonb, %s)"
    rows(both, send, '{"n": 1}', '{"x-pgmq-group": "ann", "trace": "a"}', 0)
    rows(both, send, '{"n": 2}', None, 0)
    rows(both, send, '{"n": 3}', '{"x-pgmq-group": "ann"}', 3600)
    rows(both, send, '{"n": 4}', '{"x-pgmq-group": "ann"}', 0)
    ((due,),) = rows(both, "select vt from pgmq.q_baskets where msg_id = 3")
    rows(both, "select msg_id from pgmq.read('baskets', 3600, 1)")
    assert rows(both, MOVE) == [(3,)]
    assert rows(both, "select msg_id from pgmq.q_baskets") == [(1,)], "a worker of pgmq has it"
    with spark_pgqueue.connect(url) as queue:
        claim = queue.receive("carts", "billing", 10)
        assert claim is not None
        assert [(m.key, m.data, m.headers) for m in claim.messages] == [
            (None, '{"n": 2}', {}),
            ("ann", '{"n": 4}', {"x-pgmq-group": "ann"}),
        ]
    delayed = "select not_visible_until from pgqueue.message_states where state = 'delayed'"
    ((until,),) = rows(both, delayed)
    assert 0 <= (until - due).total_seconds() < 1


def test_clients_of_pgmq_go_on_after_its_schema_made_room(both: psycopg.Connection, url: str):
    """Renamed, with ours in its place, and the same statement: as sql/guide/moving.md says."""
    for number in (1, 2):
        rows(both, "select pgmq.send('baskets', jsonb_build_object('n', %s::int))", number)
    both.execute("alter schema pgmq rename to pgmq_before")
    with spark_pgqueue.connect(url) as queue:
        queue.install(pgmq=True)
    both.execute("select pgmq.create('baskets')")
    move = MOVE.split(";")[0].replace("pgmq.q_baskets", "pgmq_before.q_baskets")
    move = move.replace("'carts'", "'baskets'")
    assert rows(both, move) == [(2,)]
    read = "select message -> 'n' from pgmq.read('baskets', 30, 10)"
    assert rows(both, read) == [(1,), (2,)]
    both.execute("drop schema pgmq_before cascade")
    assert rows(both, "select queue_length from pgmq.metrics('baskets')") == [(2,)]


@pytest.mark.promise("moving: pgmq: moved beside workers and producers of both")
def test_what_is_moved_from_pgmq_is_worked_once(both: psycopg.Connection, url: str):
    """Beside producers and workers of pgmq, one of which dies with what it had, and our workers."""
    moved = Event()

    send = "select pgmq.send('baskets', jsonb_build_object('n', %s::int))"
    for number in range(10):
        rows(both, send, number)
    rows(both, "select msg_id from pgmq.read('baskets', 1, 5)")  # by who dies now
    assert rows(both, MOVE) == [(5,)]

    def produce() -> None:
        with connection.connect(url) as conn:
            for number in range(10, COUNT):
                rows(conn, send, number)

    def work_with_pgmq() -> list[int]:
        done = []
        read = "select msg_id, message ->> 'n' from pgmq.read('baskets', 60, 3)"
        with connection.connect(url) as conn:
            while not moved.is_set():
                for msg_id, number in rows(conn, read):
                    if rows(conn, "select pgmq.delete('baskets', %s::bigint)", msg_id) == [(True,)]:
                        done.append(int(number))
        return done

    def work() -> list[int]:
        done: list[int] = []
        receive = "select claim_id, data::json ->> 'n' from pgqueue.receive('carts', 'billing', 5)"
        with connection.connect(url) as conn:
            while True:
                is_last = moved.is_set()
                found = rows(conn, receive)
                done += [int(number) for _, number in found]
                if found:
                    rows(conn, "select pgqueue.ack(%s)", found[0][0])
                elif is_last:
                    return done

    with ThreadPoolExecutor() as pool:
        begin: Callable[..., Any] = pool.submit
        producer = begin(produce)
        workers = [begin(work_with_pgmq), begin(work), begin(work)]
        try:
            end = time.monotonic() + 60
            while not (producer.done() and not left(both)):
                rows(both, MOVE)
                assert time.monotonic() < end
        finally:
            moved.set()
        producer.result()
        done = [number for worker in workers for number in worker.result()]
    assert sorted(done) == list(range(COUNT))


def left(conn: psycopg.Connection) -> int:
    """How many messages pgmq still has."""
    return rows(conn, "select count(*) from pgmq.q_baskets")[0][0]
