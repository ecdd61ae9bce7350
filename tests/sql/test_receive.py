"""What a worker receives: payloads, priorities, messages that are for later."""

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from tests.sql import clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


@pytest.mark.each_version
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.promise("concepts: transitions of a message")
def test_messages_go_from_sending_to_acknowledging(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = [send(conn, d, p_key="k") for d in "ab"] + send_all(conn, ["c", "d"], p_keys=["k", "l"])
    got = receive(conn)
    assert [(row.seq, row.data, row.key, row.deliver_count) for row in got] == [
        (seq, data, key, 1) for seq, data, key in zip(sent, "abcd", "kkkl", strict=True)
    ]
    assert set(states(conn).values()) == {"claimed"}
    assert receive(conn) == []
    assert value(conn, "nack", claim_of(got), sent[1:]) == 3
    assert value(conn, "ack", claim_of(got)) == 1
    again = receive(conn)
    assert [(row.data, row.deliver_count) for row in again] == [("b", 2), ("c", 2), ("d", 2)]
    assert value(conn, "ack", claim_of(again)) == 3
    assert states(conn) == {}
    assert internals.claims(conn) == []
    assert internals.count(conn, "messages") == 4, "messages are kept"


@pytest.mark.promise("feature: priority")
def test_higher_priorities_come_first_and_equal_ones_in_order_of_arrival(conn: Conn) -> None:
    consumer(conn)
    sent = {p: [send(conn, p_priority=p) for _ in range(2)] for p in (0, 32767, -32768, 5)}
    assert [(r.priority, r.seq) for r in receive(conn)] == [
        (p, seq) for p in (32767, 5, 0, -32768) for seq in sent[p]
    ]


@pytest.mark.parametrize(
    ("kind", "data", "data_bytes"),
    [("text", "", None), ("json", ' {"b":1, "a":[null]}', None), ("binary", None, b"\x00\xff")],
)
def test_a_payload_of_each_kind_arrives_as_it_was_sent(
    conn: Conn, kind: str, data: str | None, data_bytes: bytes | None
) -> None:
    value(conn, "create_stream", kind, kind)
    value(conn, "create_consumer", kind, "c")
    headers = {"trace": "é", "n": [1, {"deep": None}]}
    value(conn, "send", kind, data, p_key="k", p_headers=Jsonb(headers), p_data_bytes=data_bytes)
    call(
        conn,
        "send_batch",
        kind,
        None if data is None else [data, data],
        p_keys=[None, "k"],
        p_headers=[Jsonb(headers), None],
        p_data_bytes=None if data_bytes is None else [data_bytes, data_bytes],
    )
    got = call(conn, "receive", kind, "c", 10)
    assert [(r.key, r.headers, r.data, r.data_bytes) for r in got] == [
        ("k", headers, data, data_bytes),
        (None, headers, data, data_bytes),
        ("k", None, data, data_bytes),
    ]
    assert all(r.inserted_at is not None for r in got)


@pytest.mark.promise("feature: delayed, scheduled", "concepts: transitions of a message")
def test_a_message_is_not_delivered_before_its_time(conn: Conn) -> None:
    consumer(conn)
    due = now(conn) + seconds(60)
    late = send(conn, p_deliver_at=due)
    past = send(conn, p_deliver_at=due - seconds(69))
    assert seqs_of(receive(conn)) == [past]
    assert state(conn, late).state == "delayed"
    assert state(conn, late).not_visible_until == due
    assert receive(conn) == []
    clock.pass_time(conn, timedelta(seconds=60))
    assert seqs_of(receive(conn)) == [late]


def test_a_consumer_is_not_dropped_while_its_table_is_rewritten(
    conn: Conn, session: Session
) -> None:
    """Postgres shows a rewritten table as empty to an older snapshot; workers repeat the call."""
    consumer(conn)
    old = session()
    old.execute("begin isolation level repeatable read; select")
    conn.execute("alter table pgqueue.consumer_cursors set unlogged")
    conn.execute("alter table pgqueue.consumer_cursors set logged")
    with raises("40001", "rewritten meanwhile"):
        value(old, "next_due", "s", "c")
    old.execute("rollback")
    sent = send(conn)
    assert acked(old, "s", "c") == [sent]
    value(conn, "drop_consumer", "s", "c")
    with raises("PQ002"):
        value(old, "next_due", "s", "c")
