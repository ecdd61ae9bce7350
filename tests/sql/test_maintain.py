"""maintain(): what failed writers left is deleted, and nothing else."""

from __future__ import annotations

import time
from datetime import timedelta

import psycopg
import pytest

from tests.sql import clock, internals
from tests.sql.queue import (
    Conn,
    acked,
    call,
    claim_of,
    consumer,
    publish,
    receive,
    seconds,
    send,
    stage,
    value,
)

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_maintain_deletes_what_failed_writers_left_and_nothing_else(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    old = stage(conn, stream, 5, 3)
    clock.pass_time(conn, timedelta(days=2))
    won, lost_attempt = stage(conn, stream, 2, 1), stage(conn, stream, 3, 1)
    assert publish(conn, stream, [won], 2, 1)
    fresh = stage(conn, stream, 4, 2)
    assert dict(call(conn, "maintain")) == {
        "staged blocks": 2,
        "unpublished messages": 8,
        "old sink batches": 0,
    }
    assert internals.staged_blocks(conn) == [fresh]
    assert internals.count(conn, "messages") == 6
    assert lost_attempt != fresh
    assert publish(conn, stream, [fresh], 4, 2)
    assert len(acked(conn, "s", "c")) == 6
    with pytest.raises(psycopg.Error) as caught:
        publish(conn, stream, [old], 5, 3)
    assert caught.value.sqlstate == "PQ008"
    assert dict(call(conn, "maintain"))["staged blocks"] == 0


def test_maintain_forgets_all_but_the_last_batches_of_a_sink(conn: Conn, stream: int) -> None:
    for batch in range(30):
        publish(conn, stream, [], 0, batch)
    publish(conn, stream, [], 0, 3, "another")
    assert dict(call(conn, "maintain"))["old sink batches"] == 19
    assert value(conn, "is_published", "sink", stream, 0) is True, "the later ones say so"
    assert publish(conn, stream, [], 0, 29) is False
    assert value(conn, "is_published", "another", stream, 3) is True


def test_maintain_forgets_batch_writes_whose_name_is_used_once(conn: Conn, stream: int) -> None:
    for sink in ("write:1", "txn:a", "5e0e5a3f", "write:2"):
        if sink == "write:2":
            clock.pass_time(conn, timedelta(days=2))
        publish(conn, stream, [stage(conn, stream, 1, sink=sink)], 1, sink=sink)
    assert dict(call(conn, "maintain"))["old sink batches"] == 1
    assert internals.sink_batches(conn) == ["5e0e5a3f", "txn:a", "write:2"]


def test_maintain_releases_no_claim(conn: Conn) -> None:
    consumer(conn, p_visibility_timeout=seconds(0.01))
    send(conn)
    claim = claim_of(receive(conn))
    time.sleep(0.05)
    call(conn, "maintain", seconds(0.01))
    assert value(conn, "ack", claim) == 1
