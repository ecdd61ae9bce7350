"""Retries end: by default a message that fails is delayed more and more, and then is dead."""

import uuid
from datetime import timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.sql import clock
from tests.sql.queue import *

LIMIT = 25
DEFAULT = ("exponential", None, 0.2, LIMIT)
stream = pytest.mark.usefixtures("stream", "allowed_afterwards")


def kept(conn: Conn, name: str) -> tuple[Any, ...]:
    """How a consumer retries."""
    (row,) = rows(
        conn,
        "select backoff, backoff_base, backoff_jitter, max_deliver_count from pgqueue.consumers"
        " where name = %s", name,
    )  # fmt: skip
    return tuple(row)


@stream
def test_a_message_that_fails_or_kills_its_workers_is_dead_after_25_deliveries(conn: Conn) -> None:
    names = {"none nack": "none", "stream nack": "stream", "none lease": "none", "key lease": "key"}
    for name, ordering in names.items():
        consumer(conn, name, ordering, p_settings=None)
    seq = send(conn, p_key="k")
    for n in range(1, LIMIT + 1):
        for name in names:
            claim = claim_of(receive(conn, name=name))  # ends the claim before, whose lease is over
            assert state(conn, seq, name).deliver_count == n, name
            if "nack" in name:
                value(conn, "nack", claim, [seq])
                if n < LIMIT:
                    assert state(conn, seq, name).not_visible_until is not None
                    assert receive(conn, name=name) == []
                    value(conn, "retry", "s", name)
        clock.pass_time(conn, timedelta(hours=2))
    for name in names:
        assert receive(conn, name=name) == []
        assert states(conn, name) == {seq: "dead"}
    assert rows(conn, "select reason, deliver_count from pgqueue.dead_messages") == [
        ("max deliveries", LIMIT)
    ] * len(names)
    for name in names:
        value(conn, "redrive", "s", name)
        value(conn, "nack", claim_of(receive(conn, name=name)), [seq])
        assert states(conn, name) != {seq: "dead"}, "it counts from the start"


@stream
def test_what_is_no_failure_counts_never(conn: Conn) -> None:
    consumer(conn, p_settings=None)
    seq = send(conn)
    for _ in range(LIMIT + 2):
        value(conn, "defer", claim_of(receive(conn)))
    assert state(conn, seq).deliver_count == 0


@stream
def test_each_way_to_make_a_consumer_has_the_default_and_never_is_a_setting(conn: Conn) -> None:
    value(conn, "create_consumer", "s", "plain")
    value(conn, "create_consumer", "s", "again", p_settings=Jsonb(AT_ONCE))
    value(conn, "create_consumer", "s", "again", p_if_not_exists=True)  # keeps what it has
    value(conn, "create_group", "s", "group", 2)
    never = ("constant", None, 0, None)
    assert [kept(conn, n) for n in ("plain", "again", "group")] == [DEFAULT, never, DEFAULT]
    settings = "select settings from pgqueue.consumer_settings where consumer = %s"
    assert one(conn, settings, "again") == AT_ONCE
    assert one(conn, settings, "plain") == one(conn, settings, "group") == {}
    value(conn, "alter_consumer", "s", "plain", Jsonb(one(conn, settings, "again")))
    assert kept(conn, "plain") == never
    value(conn, "alter_consumer", "s", "plain", Jsonb(dict.fromkeys(AT_ONCE)))
    assert kept(conn, "plain") == DEFAULT


@stream
def test_deliveries_to_spark_do_not_count(conn: Conn) -> None:
    """Lost leases and restarts; a nack by a row of a write is a failure as any other."""
    made = consumer(conn, p_settings=Jsonb({"max_deliver_count": 2, "backoff_base": "0 s"}))
    seq = send(conn)
    for _ in range(4):
        reader = Reader(conn, made)
        end = reader.ask()
        reader.resume(end, uuid.uuid4())
        reader.resume(end, uuid.uuid4())  # a restart
        clock.pass_time(conn, timedelta(hours=2))
    found = receive(conn)
    assert [each.deliver_count > 2 for each in found] == [True]
    value(conn, "nack", claim_of(found), [seq])
    assert states(conn) == {seq: "ready"}, "the first failure that counts"
    reader = Reader(conn, made)
    end = reader.ask()
    settle(conn, action("nack", [seq]))
    assert states(conn) == {seq: "dead"}, "and the second"
