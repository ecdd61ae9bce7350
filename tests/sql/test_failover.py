"""The primary is killed, and its standby promoted, under clients, a worker, a group and a reader.

All of them have a url that names both servers, with target_session_attrs=read-write.
`tests/spark/test_failover.py` has Spark's side.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.failover import Pair, a_pair
from tests.parties import Parties
from tests.sql import checker
from tests.sql.queue import acked, one, publish, send, stage, value

pytestmark = [pytest.mark.longer, pytest.mark.timeout(300)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary and its standby."""
    with a_pair() as servers:
        yield servers


@pytest.mark.promise(
    "fault: the primary dies, its standby is promoted", "restore: synchronous failover"
)
def test_a_synchronous_failover_loses_nothing_and_ends_nobody(pair: Pair) -> None:
    with Parties(pair.url) as parties:
        pair.synchronize()
        parties.start()
        pair.kill()
        time.sleep(1)
        pair.promote()
        parties.go_on()
        parties.stop()
    with connection.connect(pair.primary.url) as conn:
        parties.check(conn)
        assert value(conn, "is_restored") is True
        value(conn, "recover")
        assert value(conn, "is_restored") is False
        assert acked(conn, "s", "c") == []


@pytest.mark.promise("restore: the old primary takes over again")
def test_the_old_primary_is_rewound_and_takes_over_again(pair: Pair) -> None:
    """Asynchronous: what only it had is gone, and who has read that is told so, PQ005."""
    with connection.connect(pair.primary.url) as conn:
        value(conn, "create_stream", "s")
        value(conn, "create_consumer", "s", "c", "earliest")
        kept = [send(conn) for _ in range(10)]
    pair.follow()
    pair.cut()
    with spark_pgqueue.connect(pair.url) as client:
        client.send("s", "lost")
        (batch,) = client.read("s")
        assert len(batch.messages) == 11
        with connection.connect(pair.primary.url) as conn:
            stream = value(conn, "open_stream", "s")
            chunk = stage(conn, stream, 5)
        pair.kill()
        pair.promote()
        with connection.connect(pair.url) as conn, pytest.raises(psycopg.Error) as said:
            publish(conn, stream, [chunk], 5)
        assert said.value.sqlstate == "PQ005", "not that the batch is incomplete, PQ008"
        with pytest.raises(PgQueueError, match="whether the call took effect is not known"):
            client.send("s", "lost too")
        client.recover()
        sent = [client.send("s", "new") for _ in range(40)]  # the numbers are given out again
        with pytest.raises(PgQueueError) as error:
            list(client.read("s", batch.offset))
        assert error.value.sqlstate == "PQ005"

        pair.rewind()
        pair.follow()
        with connection.connect(pair.standby.url) as there:
            assert one(there, "select pg_is_in_recovery()")
            assert one(there, "select count(*) from pgqueue.messages where data = 'lost'") == 0
        pair.synchronize()
        with spark_pgqueue.connect(pair.url) as another:
            sent.append(another.send("s", "new"))
        pair.kill()
        pair.promote()
        with connection.connect(pair.url) as conn:
            sent.append(send(conn))
            assert acked(conn, "s", "c") == [*kept, *sent]
            checker.check(conn)
