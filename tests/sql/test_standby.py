"""A real standby: read from, and promoted without the last commits."""

from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue import embedded
from spark_pgqueue.command_line import cli
from spark_pgqueue.postgres import connection
from tests.failover import a_pair
from tests.processes import wait_until
from tests.sql.queue import *
from tests.sql.test_reading import read, read_all

pytestmark = pytest.mark.longer


@pytest.fixture
def pair() -> Iterator[tuple[embedded.Server, embedded.Server]]:
    """A primary with the stream s, and its standby."""
    with a_pair() as servers:
        with connection.connect(servers.primary.url) as conn:
            value(conn, "create_stream", "s")
        servers.follow()
        yield servers.primary, servers.standby


def follow(primary: Conn, standby: Conn) -> None:
    """Until the standby has what the primary has."""
    lsn = one(primary, "select pg_current_wal_flush_lsn()")
    wait_until(lambda: one(standby, "select pg_last_wal_replay_lsn() >= %s::pg_lsn", lsn))


@pytest.mark.promise("restore: a hot standby")
def test_a_standby_is_read_from_and_promoted(pair: tuple[embedded.Server, embedded.Server]) -> None:
    """It reads no gap as closed that its primary may still fill; and after it was promoted without
    the last commits, who has read those is refused."""
    primary, standby = pair
    conn, slow = connection.connect(primary.url), connection.connect(primary.url)
    there = connection.connect(standby.url)
    assert one(there, "select pg_is_in_recovery()")
    cursor_consumer(conn)
    dead_publication(conn)
    early = send(conn)
    slow.execute("begin")
    late = send(slow)
    latest = send(conn)
    conn.execute("select pg_switch_wal()")
    follow(conn, there)
    got, offset = read_all(there, None)
    assert got == [early, latest]
    assert offset["gaps"] == [{"ids": "{[1,2),[3,4)}", "publishers": None}]
    assert acked(conn, "s", "c") == [early, latest]
    begin = value(there, "start_offset", "s", "latest")
    slow.execute("commit")
    conn.execute("select pg_switch_wal()")
    follow(conn, there)
    assert read(there, offset)[0] == [late]
    assert read(there, begin)[0] == [late]
    while cursor_gaps(conn):
        acked(conn, "s", "c")
    conn.execute("select pg_switch_wal()")
    follow(conn, there)
    _, offset = read_all(there, offset)
    assert set(offset) == {"stream", "incarnation", "next", "messages"}, "by the consumer's cursor"
    dead_publication(conn)
    noted = send(conn)
    conn.execute("select pg_switch_wal()")
    follow(conn, there)
    got, offset = read_all(there, offset)
    assert (got, "gaps" in offset) == ([noted], True)
    maintain(conn)
    conn.execute("select pg_switch_wal()")
    follow(conn, there)
    _, offset = read_all(there, offset)
    assert "gaps" not in offset, "by the note of maintain()"
    assert acked(conn, "s", "c") == [noted]
    conn.execute("select pg_switch_wal()")
    follow(conn, there)
    with pytest.raises(psycopg.Error, match="standby"):
        value(there, "recover")

    there.execute("alter system set primary_conninfo = ''")
    there.execute("select pg_reload_conf()")
    wait_until(lambda: not one(there, "select count(*) from pg_stat_wal_receiver"))
    lost = send(conn)
    seqs, beyond = read(conn, offset)
    assert seqs == [lost]
    slow.close()
    conn.close()
    primary.stop("immediate")
    there.execute("select pg_promote()")
    assert value(there, "is_restored") is True
    value(there, "recover")
    assert value(there, "is_restored") is False
    sent: list[int] = []
    for _ in range(40):  # a promoted standby goes on after up to 32 numbers that nobody had
        sent.append(send(there))
        with raises("PQ005", "beyond the state"):
            read(there, beyond)
    assert sent[-1] in read(there, offset)[0]
    assert len(acked(there, "s", "c")) == 40
    there.close()


def cursor_gaps(conn: Conn) -> list[int]:
    return one(conn, "select gaps from pgqueue.consumer_cursors order by version desc limit 1")


READING = [
    "tail s --no-follow", "peek s", "peek s c", "stats", "metrics", "explain s c 1",
    "outcome s c 1", "describe s", "describe s c", "stream list", "consumer list s",
    "claim list", "dead list s c", "history s c", "schedule list", "doctor",
]  # fmt: skip


def test_all_that_only_reads_does_so_on_a_standby(
    pair: tuple[embedded.Server, embedded.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for messages there asks for them: nobody is notified."""
    primary, standby = pair
    with connection.connect(primary.url) as conn, connection.connect(standby.url) as there:
        consumer(conn)
        send(conn, "first")
        follow(conn, there)
        monkeypatch.setenv("PGQUEUE_URL", standby.url)
        for command in READING:
            done = CliRunner().invoke(cli.app, command.split())
            assert done.exit_code == 0, (command, done.output)
        with spark_pgqueue.connect(standby.url) as client:
            batches = client.read("s", wait=timedelta(seconds=60))
            got = [message.data for message in next(batches).messages]
            send(conn, "second")
            got += [message.data for message in next(batches).messages]
        assert got == ["first", "second"]
