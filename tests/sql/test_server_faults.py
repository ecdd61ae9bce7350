"""What a fault of the server leaves: a disk that cannot be read, a crash that forgets commits."""

import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.conftest import GivenServer, Server
from tests.sql import checker, internals
from tests.sql.queue import Conn, acked, call, dead_publication, one, send, value


@pytest.mark.parametrize("fault", ["closed", "damaged"])
@pytest.mark.promise("fault: tables cannot be written or read")
def test_what_the_server_cannot_read_for_a_moment_is_not_forgotten(
    server: Server, url: str, fault: str
) -> None:
    """A payload is stored apart, in a file that the server may not open, or that lacks a part."""
    if isinstance(server, GivenServer):
        pytest.skip("PGQUEUE_TEST_URL names a server whose files tests cannot reach")
    with connection.connect(url) as conn:
        value(conn, "create_stream", "j", "json")
        value(conn, "create_consumer", "j", "c", "earliest", p_where="$.data.total > 100")
        noise = one(conn, "select string_agg(md5(i::text), '') from generate_series(1, 500) i")
        sent = value(conn, "send", "j", json.dumps({"total": 150, "noise": noise}))
        path = server.directory / "data" / internals.file_of_payloads(conn, "j")
    server.restart()  # or else the server has it in its memory
    whole, mode = path.read_bytes(), path.stat().st_mode
    if fault == "closed":
        path.chmod(0)
    else:
        os.truncate(path, 0)
    with connection.connect(url) as conn:
        for _ in range(2):
            with pytest.raises(psycopg.Error, match=r"could not (open|read)"):
                acked(conn, "j", "c")
    path.chmod(mode)
    with path.open("r+b") as file:
        file.write(whole)
    with connection.connect(url) as conn:
        assert acked(conn, "j", "c") == [sent]
        checker.check(conn)


def read(conn: Conn, offset: Any) -> tuple[list[int], Any]:
    """What is after an offset, and the offset after that."""
    rows = call(conn, "read", "s", Jsonb(offset), 10_000)
    return [row.seq for row in rows if row.seq is not None], rows[-1].next_offset


# How an offset leaves the database, behind all that there is.
LOOKS = {
    "read": lambda conn, start: read(conn, start)[1],
    "read_to": lambda conn, start: value(conn, "read_to", "s", Jsonb(start)),
    "start_offset": lambda conn, start: value(conn, "start_offset", "s", "latest"),
    "end_offset": lambda conn, start: value(conn, "end_offset", "s", Jsonb(start), "latest"),
}

IS_UNFLUSHED = "select pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("look", "how"),
    [
        *((look, "committed") for look in LOOKS),
        ("read", "rolled back"),
        *(pytest.param(look, "rolled back", marks=pytest.mark.longer) for look in [*LOOKS][1:]),
    ],
)
@pytest.mark.promise("guarantee: Asynchronous commit", "operations: synchronous_commit = off")
def test_a_crash_forgets_nothing_that_an_offset_has_read(
    server: Server, url: str, look: str, how: str
) -> None:
    """Its producers had synchronous_commit off; their numbers would be given out again."""
    with connection.connect(url) as conn:
        conn.execute("alter system set wal_writer_delay = '10 s'")
        conn.execute("select pg_reload_conf()")
        value(conn, "create_stream", "s")
        start = value(conn, "start_offset", "s")
        for _ in range(50):
            conn.execute("checkpoint")
            seen = [send(conn)] if how == "committed" else []
            for _ in range(70):  # more numbers than a sequence notes ahead
                if how == "committed":
                    seen.append(send(conn))
                else:
                    dead_publication(conn)
            if one(conn, IS_UNFLUSHED):
                break
            time.sleep(0.1)
        else:
            pytest.fail("all was on disk at once")
        offset = LOOKS[look](conn, start)
    server.restart("immediate")
    with connection.connect(url) as conn:
        conn.execute("alter system reset wal_writer_delay")
        conn.execute("select pg_reload_conf()")
        conn.execute("set synchronous_commit = on")
        later = [send(conn) for _ in range(100)]
        assert read(conn, offset)[0] == later
        assert set(seen) <= set(read(conn, start)[0])


def test_every_function_that_hands_out_an_offset_is_tried_here(conn: Conn) -> None:
    def callers(function: str) -> set[str]:
        found = conn.execute(
            "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
            " and prosrc like %s",
            [f"%_pgqueue.{function}(%"],
        )
        return {name for (name,) in found}

    assert callers("durable_offset") == set(LOOKS)
    assert callers("offset_json") == {"end_after"}, "its two offsets have left before"


@pytest.mark.longer
def test_a_reader_has_what_is_stored_and_all_of_it_whenever_the_server_crashes(
    server: Server, url: str
) -> None:
    """Beside producers with synchronous_commit off, some of whose sends are rolled back."""
    with connection.connect(url) as conn:
        value(conn, "create_stream", "s")
        offset = value(conn, "start_offset", "s")
    over = threading.Event()

    def produce(number: int) -> None:
        rng = random.Random(number)
        while not over.is_set():
            with suppress(psycopg.Error), connection.connect(url) as mine:
                mine.execute("set synchronous_commit = off")
                while not over.is_set():
                    with mine.transaction(force_rollback=rng.random() < 0.2):
                        for _ in range(rng.choice([1, 1, 3])):
                            send(mine)

    got: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        producers = [pool.submit(produce, number) for number in range(3)]
        try:
            for crash in range(6):
                with connection.connect(url) as conn:
                    until = time.monotonic() + 0.5 + crash / 10
                    while time.monotonic() < until:
                        seqs, offset = read(conn, offset)
                        got += seqs
                server.restart("immediate")
        finally:
            over.set()
        for producer in producers:
            producer.result(30)
    with connection.connect(url) as conn:
        got += read(conn, offset)[0]
        assert sorted(got) == sorted(internals.published(conn))
    assert len(got) > 100


@pytest.mark.all_versions
def test_a_look_at_what_is_on_disk_writes_nothing_and_a_read_only_transaction_may_look(
    conn: Conn,
) -> None:
    value(conn, "create_stream", "s")
    start = value(conn, "start_offset", "s")
    written = []
    for _ in range(5):  # the server writes by itself now and then
        send(conn)
        conn.execute("set synchronous_commit = on")
        send(conn)
        read(conn, start)  # what is read first may be noted in the pages
        before = one(conn, "select pg_current_wal_insert_lsn()")
        read(conn, start)
        written.append(one(conn, "select pg_current_wal_insert_lsn() - %s", before))
    assert 0 in written
    conn.execute("set synchronous_commit = off")
    send(conn)
    conn.execute("begin read only")
    read(conn, start)
    conn.execute("commit")
    assert one(conn, "show synchronous_commit") == "off"
