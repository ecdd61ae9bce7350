"""The applications of sql/guide/frameworks.md write exactly once, whatever fails in the middle."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue.client import Client
from tests.pages import blocks_of, environment_of, run, run_commands
from tests.processes import Child
from tests.sql import clock

httpx2 = pytest.importorskip("httpx2")

PAGE = Path(__file__).parents[2] / "sql/guide/frameworks.md"
RUNS = re.compile(r"^(python -m pytest|python manage.py test|(\w+=\S+ )?pgqueue work)")
MANY = 60

pytestmark = [pytest.mark.longer, pytest.mark.usefixtures("allowed_afterwards")]

# As the application, but for its ends: in a handler, after the row and before the commit.
ENDS = """
import os, signal, sys
os.chdir(sys.argv[1])
sys.path.insert(0, "")
raises, dies, when = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
written = 0

def end_before_commit():
    global written
    written += 1
    if written == raises:
        raise RuntimeError("in the middle")
    if written == dies and when == "before the commit":
        os.kill(os.getpid(), signal.SIGKILL)

def end_after_commit(*_):
    if written >= dies > 0 and when == "after the commit":
        os.kill(os.getpid(), signal.SIGKILL)
"""
OF_SESSIONS = """
import models
from sqlalchemy import event
from sqlalchemy.orm import Session

@event.listens_for(Session, "before_commit")
def before_commit(session):
    if any(isinstance(each, models.Invoice) for each in session.new):
        session.flush()
        end_before_commit()

event.listen(Session, "after_commit", end_after_commit)
"""
OF_MODELS = """
import shipping.jobs
from django.db import transaction
from django.db.models.signals import post_save
from django.dispatch import receiver

@receiver(post_save, sender=shipping.jobs.Notice)
def saved(**_):
    transaction.on_commit(end_after_commit)
    end_before_commit()
"""
WORK = """
from spark_pgqueue.__main__ import main
sys.argv[1:] = ["work", sys.argv[5]]
main()
"""
SERVE = """
import uvicorn
uvicorn.run("api:app", uds="socket")
"""


@pytest.fixture
def prepare(url: str, tmp_path: Path) -> Callable[[str], Path]:
    """The folder of an application of the page: its files, its tables, its stream. None runs."""

    def prepare(application: str) -> Path:
        for language, text in blocks_of(PAGE.read_text()):
            if language == "sh" and f"cd {application}\n" in text:
                lines = [line for line in text.splitlines() if not RUNS.match(line)]
                run_commands("\n".join(lines), url, tmp_path)
        return tmp_path / application

    return prepare


@pytest.fixture
def begin(url: str) -> Callable[..., Child]:
    """Begin a program in a folder, which raises and dies at these rows of its handler."""

    def begin(
        folder: Path, program: str, *more: str, raises: int = 0, dies: int = 0, when: str = ""
    ):
        given = [str(folder), str(raises), str(dies), when, *more]
        environment = environment_of(url) | {"DJANGO_SETTINGS_MODULE": "logistics.settings"}
        return Child(ENDS + program, *given, environment=environment)

    return begin


def rows(conn: psycopg.Connection, query: str) -> list[int]:
    return [value for (value,) in conn.execute(query.encode()).fetchall()]


def is_done(queue: Client, stream: str) -> bool:
    (stats,) = queue.stats(stream)
    return stats.backlog == stats.claimed == stats.dead == 0


@pytest.fixture
def client(conn: psycopg.Connection) -> Client:
    conn.autocommit = True
    return Client(conn)


WORKERS = {
    "sqlalchemy": ("webshop", OF_SESSIONS, "jobs", "orders", "select order_id from invoices"),
    "django": (
        "logistics",
        OF_MODELS,
        "shipping.jobs",
        "shipments",
        "select shipment_id from shipping_notice",
    ),
}


WHEN = pytest.mark.parametrize("when", ["before the commit", "after the commit"])


@WHEN
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.promise("guarantee: At least once, or exactly once")
def test_a_worker_that_fails_and_is_killed_writes_each_row_once(
    worker, when, prepare, begin, client, conn
):
    application, ends, module, stream, written = WORKERS[worker]
    folder = prepare(application)
    if stream == "shipments":
        conn.execute(
            "insert into shipping_shipment (address) select 'Elm' from generate_series(1, %s)",
            [MANY],
        )
    sent = list(range(1, MANY + 1))
    client.send_batch(stream, [{"id": i, "total": 7, "shipment": i} for i in sent])
    with begin(folder, ends + WORK, module, raises=5, dies=20, when=when) as child:
        assert child.wait() == -signal.SIGKILL, child.output
    assert "in the middle" in child.output
    assert 0 < len(rows(conn, written)) < MANY
    clock.end_leases(conn)
    with begin(folder, ends + WORK, module, raises=5) as child:
        child.wait_until(lambda: is_done(client, stream))
        child.process.terminate()
        assert child.wait() == 0, child.output
    assert Counter(rows(conn, written)) == Counter(sent)


@WHEN
def test_a_server_that_fails_and_is_killed_writes_each_row_once(when, prepare, begin, client, conn):
    folder = prepare("webshop")
    transport = httpx2.HTTPTransport(uds=str(folder / "socket"))
    with httpx2.Client(transport=transport, base_url="http://webshop") as requests:

        def buy(total: int) -> int:
            return requests.post(f"/orders?total={total}").status_code

        def is_up() -> bool:
            with suppress(httpx2.TransportError):
                return requests.get("/docs").status_code == 200
            return False

        answered = 0
        with begin(folder, OF_SESSIONS + SERVE, raises=5, dies=20, when=when) as child:
            child.wait_until(is_up)
            with suppress(httpx2.TransportError):
                while True:
                    assert buy(7) == 201
                    answered += 1
                    assert buy(7000) == 402
            assert child.wait() == -signal.SIGKILL, child.output
        assert "in the middle" in child.output
        ordered = rows(conn, "select id from web_orders")
        assert answered <= len(ordered) <= answered + 1
        assert rows(conn, "select total from web_orders where total > 1000") == []
        clock.end_leases(conn)
        with begin(folder, OF_SESSIONS + SERVE) as child:
            child.wait_until(is_up)
            assert buy(7) == 201
            child.wait_until(lambda: is_done(client, "orders"))
            assert buy(7) == 201
            child.process.terminate()  # it may be in the handler
            child.wait()
        assert "Application shutdown complete" in child.output
        assert "Traceback" not in child.output
    assert client.open_claims("orders", "invoicing") == [], "it has given back what it had"
    ordered = rows(conn, "select id from web_orders")
    with begin(folder, OF_SESSIONS + WORK, "jobs") as child:
        child.wait_until(lambda: is_done(client, "orders"))
    assert Counter(rows(conn, "select order_id from invoices")) == Counter(ordered)


def test_a_view_that_fails_takes_back_the_row_and_the_message(url, prepare, client, conn):
    posts = """
from django.test import Client
client = Client(SERVER_NAME="localhost")
for address in ("Elm", "nowhere"):
    print(client.post("/shipments", {"address": address}).status_code)
"""
    shell = ["python", "manage.py", "shell", "--verbosity", "0", "-c", posts]
    assert "201\n403" in run(shell, url, prepare("logistics"))
    assert rows(conn, "select address from shipping_shipment") == ["Elm"]
    (message,) = client.receive("shipments", "notices", 10).messages
    assert message.json() == {"shipment": 1}
