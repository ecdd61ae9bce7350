"""One word for the condition of a consumer: consumer_stats has it, and all faces show it."""

import json
from datetime import timedelta

import psycopg
import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue import metrics
from spark_pgqueue.client import Client
from spark_pgqueue.command_line.cli import app
from spark_pgqueue.command_line.doctor import _REMEDIES
from spark_pgqueue.command_line.doctor import _postgres as doctor
from spark_pgqueue.serving import Request
from spark_pgqueue.web.server import Page
from tests.sql import clock

HOUR = timedelta(hours=1)
TIMEOUT = timedelta(seconds=30)


def full(queue: Client, conn: psycopg.Connection) -> None:
    paused(queue, conn)
    queue.send("s", "x")
    queue.alter_consumer("s", "c", {"max_backlog": 1})


def paused(queue: Client, conn: psycopg.Connection) -> None:
    stuck(queue, conn)
    queue.pause("s", "c")


def unattended(queue: Client, conn: psycopg.Connection) -> None:
    failing(queue, conn)
    clock.pass_time(conn, timedelta(minutes=2))
    queue.send("s", "x")


def stuck(queue: Client, conn: psycopg.Connection) -> None:
    failing(queue, conn)
    extended(queue, conn, 11)


def failing(queue: Client, conn: psycopg.Connection) -> None:
    queue.send_batch("s", ["x"] * 50)
    claim = queue.receive("s", "c", 100)
    assert claim
    claim.dead_letter(reason="no such customer")


def dead_letters(queue: Client, conn: psycopg.Connection) -> None:
    failing(queue, conn)
    clock.pass_time(conn, 2 * HOUR)


def ok(queue: Client, conn: psycopg.Connection) -> None:
    extended(queue, conn, 9)


def extended(queue: Client, conn: psycopg.Connection, times: int) -> None:
    """A claim that is extended for so many visibility timeouts."""
    queue.send("s", "x")
    claim = queue.receive("s", "c")
    assert claim
    for _ in range(times):
        clock.pass_time(conn, TIMEOUT)
        claim.extend()


@pytest.fixture
def queue(url: str):
    with spark_pgqueue.connect(url) as queue:
        yield queue


STATES = (full, paused, unattended, stuck, failing, dead_letters, ok)


@pytest.mark.parametrize("reach", STATES, ids=lambda each: each.__name__)
def test_every_face_shows_the_same_word(
    reach, queue: Client, conn: psycopg.Connection, url: str
) -> None:
    """Each state also has what leads to those after it, so the order of the words counts."""
    queue.create_stream("s")
    queue.create_consumer("s", "c", settings={"visibility_timeout": TIMEOUT})
    reach(queue, conn)
    word = reach.__name__
    (health,) = queue.health()
    assert (health.status, "extended beyond ten" in health.because) == (
        word, reach in (full, paused, stuck),
    )  # fmt: skip
    (stats,) = queue.stats()
    assert (stats.status, stats.because) == (health.status, health.because)
    page = Page(queue, "test", allow_actions=False)
    for path, query in (("look", {}), ("consumer", {"stream": "s", "consumer": "c"})):
        answer = json.loads(page.answer(Request("GET", f"/api/{path}", query, {}, b"")).body)
        seen = answer["consumers"][0] if path == "look" else answer["health"]
        assert seen["status"] == word, path
    assert f'pgqueue_consumer_status{{stream="s",consumer="c",status="{word}"}} 1' in (
        metrics.look_at(queue)
    )
    checks = [each.status for each in doctor(url) if each.name == "consumer 'c' of 's'"]
    assert checks == ["warn"] * (word not in ("ok", "paused"))
    assert (word in _REMEDIES) == bool(checks)
    if reach is stuck:
        for command in (("top", "--count", "1"), ("stats",), ("consumer", "health")):
            assert " stuck" in CliRunner().invoke(app, [*command, "--url", url]).stdout, command


def test_the_error_of_a_message_that_fails_often_is_looked_for_only_if_there_is_one(
    queue: Client, conn: psycopg.Connection
) -> None:
    """By a function that reads all bundles."""
    queue.create_stream("s")
    queue.create_consumer("s", "c", settings={"backoff": "constant"})
    queue.send("s", "x")
    conn.execute("set track_functions = 'all'")
    for often, expected in ((False, []), (True, [(1,)])):
        for _ in range(10 if often else 1):
            claim = queue.receive("s", "c")
            assert claim is not None
            claim.nack()
        conn.execute("select * from pgqueue.consumer_stats").fetchall()
        conn.execute("select pg_stat_force_next_flush()")
        calls = "select calls from pg_stat_user_functions where funcname = 'error_of_most'"
        assert conn.execute(calls).fetchall() == expected
