"""Processes that are stopped (SIGSTOP), or killed for want of memory (SIGKILL), beside calls.

`tests/unit/test_silence.py` has how long calls wait for a frozen server, and
`tests/unit/test_worker_crashes.py` has workers that are killed.
"""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from spark_pgqueue.postgres import connection
from tests.conftest import GivenServer, Server
from tests.handlers import TABLE
from tests.parties import Parties
from tests.processes import wait_until, worker
from tests.sql.queue import Conn, acked, one, value

pytestmark = [pytest.mark.longer, pytest.mark.timeout(200)]


@pytest.fixture
def parties(conn: Conn, url: str, server: Server) -> Iterator[Parties]:
    """They are told only what a crash of the server keeps."""
    if isinstance(server, GivenServer):
        pytest.skip("PGQUEUE_TEST_URL names a server whose processes tests cannot reach")
    conn.execute(f"alter database {conn.info.dbname} set synchronous_commit = on".encode())
    with Parties(url) as made:
        made.start()
        yield made


def processes(server: Server) -> list[psutil.Process]:
    """The processes of a server; the postmaster is the first."""
    with connection.connect(server.url) as conn:
        file = one(conn, "select pg_read_file('postmaster.pid')")
    postmaster = psutil.Process(int(file.split()[0]))
    return [postmaster, *postmaster.children()]


@contextmanager
def stopped(victims: Iterable[psutil.Process]) -> Iterator[None]:
    """Within the block the processes stand still."""
    victims = list(victims)
    try:
        for each in victims:
            each.suspend()
        yield
    finally:
        for each in victims:
            with suppress(psutil.NoSuchProcess):
                each.resume()


@pytest.mark.promise("fault: Postgres hangs")
def test_calls_go_on_while_a_process_of_the_server_is_stopped(
    parties: Parties, server: Server, conn: Conn
) -> None:
    """Of sessions and io workers, whoever needs them waits, and goes on behind the stop."""
    seen = set()
    for each in processes(server)[1:]:
        with suppress(psutil.NoSuchProcess):
            (name,) = re.findall(r"postgres: ([a-z ]*[a-z])", " ".join(each.cmdline())) or ("",)
            seen.add(name)
            with stopped([each]):
                if name in ("checkpointer", "background writer", "walwriter"):
                    parties.go_on()
                else:
                    time.sleep(0.3)
    assert seen >= {"checkpointer", "background writer", "walwriter", "io worker"}
    with stopped(processes(server)):
        time.sleep(2)
    parties.go_on()
    parties.stop()
    parties.check(conn)


CALLS = ("send", "receive", "ack", "read", "commit_offset")


@pytest.mark.promise("fault: a backend is killed (e.g. by the OOM killer)")
def test_a_session_that_is_killed_in_a_call_ends_nobody_and_loses_nothing(
    parties: Parties, url: str, server: Server
) -> None:
    """As by the kernel, for want of memory. Postgres ends all sessions then, and recovers."""
    for function in CALLS:
        os.kill(caught_in(function, url), signal.SIGKILL)
        parties.go_on()
    parties.stop()
    with connection.connect(url) as conn:
        parties.check(conn)


def caught_in(function: str, url: str) -> int:
    """Stop a session in the midst of a call of a function; returns its process."""
    found: list[int] = []
    at_work = (
        "select pid from pg_stat_activity where datname = current_database()"
        " and state = 'active' and pid <> pg_backend_pid() and query ~ %s"
    )
    call = rf"pgqueue\.{function}\w*\("

    def is_caught() -> bool:
        with connection.connect(url) as conn:
            for _ in range(100):
                for (pid,) in conn.execute(at_work, [call]).fetchall():
                    os.kill(pid, signal.SIGSTOP)
                    if conn.execute(f"{at_work} and pid = %s", [call, pid]).fetchone():
                        found.append(pid)
                        return True
                    os.kill(pid, signal.SIGCONT)
        return False

    wait_until(is_caught)
    return found[0]


@pytest.mark.parametrize(
    ("handler", "options"), [("note", {}), ("note_in_transaction", {"transactional": True})]
)
@pytest.mark.promise("fault: a worker hangs", "fault: a worker hangs in a transaction")
def test_a_worker_that_stood_still_past_its_lease_changes_nothing_that_others_did(
    conn: Conn, url: str, monkeypatch, handler: str, options: dict
) -> None:
    """Its lease is 2 s; another takes over what it had, and finishes that.

    Postgres has to end the transactions that it left open: they hold its claims.
    """
    monkeypatch.setenv("PGQUEUE_TEST_HANDLERS", url)
    limit = "idle_in_transaction_session_timeout = '1 s'"
    conn.execute(f"alter database {conn.info.dbname} set {limit}".encode())
    value(conn, "create_stream", "s")
    value(conn, "create_consumer", "s", "c", "earliest")
    conn.execute(TABLE)
    conn.execute("select count(*) from pgqueue.send_batch('s', array_fill('x'::text, '{2000}'))")
    done = "select count(*) from done"
    left = "select count(*) from pgqueue.message_states where state <> 'dead'"
    with worker(url, handler, concurrency=4, **options) as child:
        wait_until(lambda: one(conn, done) > 150)
        taken_over: list[int] = []
        with stopped([psutil.Process(child.pid)]):
            assert one(conn, "select count(*) from pgqueue.open_claims") > 0

            def is_taken_over() -> bool:
                taken_over.extend(acked(conn, "s", "c"))
                return one(conn, left) == 0

            wait_until(is_taken_over)
        value(conn, "send", "s", "y")
        wait_until(lambda: one(conn, left) == 0)
        assert child.process.poll() is None, child.output
    counts = Counter(seq for (seq,) in conn.execute("select seq from done").fetchall())
    assert set(counts) | set(taken_over) == set(range(1, 2002))
    assert len(taken_over) == len(set(taken_over))
    both = set(counts) & set(taken_over)
    if options:
        assert both == set()
        assert max(counts.values()) == 1
    assert len(both) < 500, "what the worker had in hand, and no more"
