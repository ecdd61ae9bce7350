"""Publishing: send and send_batch, to whom, in whose transaction, and who is notified."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import internals
from tests.sql.queue import (
    Conn,
    acked,
    call,
    consumer,
    one,
    publish,
    receive,
    send,
    send_all,
    seqs_of,
    stage,
    value,
)

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_a_batch_becomes_visible_as_one_publication_in_the_order_given(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, [str(i) for i in range(500)])
    assert sent == sorted(sent)
    assert internals.count(conn, "publications") == 1
    assert [r.data for r in receive(conn, 1000)] == [str(i) for i in range(500)]
    assert send_all(conn, []) == []
    assert internals.count(conn, "publications") == 1


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_a_batch_whose_numbers_others_interrupt_knows_its_own(
    conn: Conn, url: str, level: str
) -> None:
    consumer(conn)

    def produce(name: str) -> dict[int, str]:
        """What was sent, by the numbers that were returned."""
        data = [f"{name}{i}" for i in range(3000)]
        with connection.connect(url) as own:
            own.execute(f"begin transaction isolation level {level}".encode())
            own.execute("savepoint s")
            seqs = send_all(own, data)
            own.execute("commit")
        assert seqs == sorted(seqs)
        return dict(zip(seqs, data, strict=True))

    for _ in range(50):
        with ThreadPoolExecutor(3) as pool:
            sent = list(pool.map(produce, "abc"))
        received = {row.seq: row.data for row in receive(conn, 10_000)}
        assert received == sent[0] | sent[1] | sent[2]
        if any(max(each) - min(each) >= 3000 for each in sent):
            return
    pytest.fail("the producers never got into each other's way")


def test_every_consumer_gets_every_message_unless_it_was_sent_to_others(conn: Conn) -> None:
    for name in "abc":
        consumer(conn, name)
    everyone = send(conn)
    two = send(conn, p_consumers=["a", "b", "a"])
    batch = send_all(conn, ["x", "y"], p_consumers=["b"])
    consumer(conn, "late")
    assert acked(conn, "s", "a") == [everyone, two]
    assert acked(conn, "s", "b") == [everyone, two, *batch]
    assert acked(conn, "s", "c") == acked(conn, "s", "late") == [everyone]


def test_sending_is_part_of_the_callers_transaction(conn: Conn, url: str) -> None:
    consumer(conn)
    conn.execute("create table orders (id int)")
    with connection.connect(url) as other:
        with other.transaction(force_rollback=True):
            other.execute("insert into orders values (1)")
            send(other)
            send_all(other, ["x", "y"])
        assert receive(conn) == []
        with other.transaction():
            other.execute("insert into orders values (2)")
            sent = send(other, "kept")
            with other.transaction(force_rollback=True):
                send(other, "of a savepoint that is rolled back")
            assert receive(conn) == []
    assert seqs_of(receive(conn)) == [sent]
    assert one(conn, "select array_agg(id) from orders") == [2]


def test_each_publication_notifies_once_and_none_when_the_stream_says_so(
    conn: Conn, stream: int
) -> None:
    quiet = value(conn, "create_stream", "quiet", p_notify=False)
    heard: list[str] = []
    conn.add_notify_handler(lambda notify: heard.append(notify.channel))
    for id_ in (stream, quiet):
        conn.execute(f"listen pgqueue_{id_}".encode())
    channel = f"pgqueue_{stream}"
    publications: list[Callable[[], Any]] = [
        lambda: send(conn),
        lambda: send_all(conn, ["x"] * 10),
        lambda: publish(conn, stream, [stage(conn, stream, 2), stage(conn, stream, 2)], 4),
    ]
    for publication in publications:
        publication()
        conn.execute("select 1")
        assert heard == [channel]
        heard.clear()
    with conn.transaction(force_rollback=True):
        send(conn)
    send_all(conn, [])
    stage(conn, stream, 1, 1)
    publish(conn, stream, [], 0, 2)
    value(conn, "send", "quiet", "x")
    call(conn, "send_batch", "quiet", ["x", "y"])
    publish(conn, quiet, [stage(conn, quiet, 1)], 1)
    conn.execute("select 1")
    assert heard == []


# Limits of a stream

MB = 1 << 20


def nested(levels: int) -> str:
    """Headers with so many objects in each other."""
    return '{"":' * levels + "1" + "}" * levels


def test_a_message_as_large_as_its_stream_allows_is_taken_and_a_larger_one_refused(
    conn: Conn,
) -> None:
    """By each way in: alone, together, and by COPY into the stream's table."""
    for kind, column in (("text", "data"), ("json", "data"), ("binary", "data_bytes")):
        stream = value(conn, "create_stream", kind, kind, p_max_bytes=10, p_max_header_bytes=20)
        for size in (10, 11):
            data = "1" * size if kind != "binary" else b"1" * size
            one = {"p_data": None, f"p_{column}": data}
            many = {"p_data": None, f"p_{column}": [data]}
            copy = f"insert into pgqueue.messages_{stream} (seq, {column}) values (%s, %s)"
            ways = [
                lambda one=one, kind=kind: value(conn, "send", p_stream=kind, **one),
                lambda many=many, kind=kind: value(conn, "send_batch", p_stream=kind, **many),
                lambda copy=copy, size=size, data=data: conn.execute(copy.encode(), [-size, data]),
            ]
            for way in ways:
                if size == 10:
                    way()
                else:
                    with pytest.raises(psycopg.Error) as caught:
                        way()
                    assert caught.value.sqlstate == ("23514" if way is ways[2] else "PQ004")
                    assert "111" not in str(caught.value.diag.message_primary)


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("fits", "too_much"),
    [('{"h": "123456789012"}', '{"h": "1234567890123"}'), (nested(100), nested(101))],
    ids=["long", "deep"],
)
def test_headers_as_large_and_deep_as_allowed_are_taken_and_others_refused(
    conn: Conn, fits: str, too_much: str
) -> None:
    limit = len(fits) if "h" in fits else 65536
    stream = value(conn, "create_stream", "h", p_max_header_bytes=limit)
    copy = f"insert into pgqueue.messages_{stream} (seq, data, headers) values (%s, 'x', %s)"
    value(conn, "send", "h", "x", p_headers=fits)
    conn.execute("select pgqueue.send_batch('h', '{x}', p_headers => array[%s::jsonb])", [fits])
    conn.execute(copy.encode(), [-1, fits])
    for statement, sqlstate in (
        ("select pgqueue.send('h', 'x', p_headers => %s::jsonb)", "PQ003"),
        ("select pgqueue.send_batch('h', '{x}', p_headers => array[%s::jsonb])", "PQ003"),
        (copy.replace("%s, 'x'", "-2, 'x'"), "23514"),
    ):
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(statement.encode(), [too_much])
        assert caught.value.sqlstate == sqlstate
        if sqlstate == "PQ003":
            assert caught.value.diag.column_name == "p_headers"


def test_a_payload_is_never_in_an_error(conn: Conn) -> None:
    value(conn, "create_stream", "j", "json", p_max_bytes=30)
    secret = "{secret"
    calls = [
        ("send", ["j", secret]),
        ("send_batch", ["j", ["1", secret]]),
        ("send", ["j", f'"{"secret" * 9}"']),
        ("send", ["j", "1", None, '"secret"']),
    ]
    for function, arguments in calls:
        with pytest.raises(psycopg.Error) as caught:
            call(conn, function, *arguments)
        diag = caught.value.diag
        fields = (diag.message_primary, diag.message_detail, diag.message_hint)
        assert "secret" not in str(fields)


def test_a_transaction_that_sent_can_be_prepared_only_without_notifications(conn: Conn) -> None:
    value(conn, "create_stream", "quiet", p_notify=False)
    for stream, name in (("s", "loud"), ("quiet", "silent")):
        value(conn, "create_consumer", stream, "c", "earliest")
        conn.execute("begin")
        value(conn, "send", stream, "x")
        if stream == "s":
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
                conn.execute(f"prepare transaction '{name}'".encode())
            conn.execute("rollback")
        else:
            conn.execute(f"prepare transaction '{name}'".encode())
            assert acked(conn, stream, "c") == []
            conn.execute(f"commit prepared '{name}'".encode())
            assert acked(conn, stream, "c") == [1]
