"""Messages that are looked at, and messages as lines: nothing is claimed, and all is there."""

from __future__ import annotations

import json
import time
from typing import Any

import psycopg
import pytest

from tests.sql.queue import (
    ORDERINGS,
    Conn,
    Session,
    acked,
    call,
    claim_of,
    consumer,
    publish,
    receive,
    send,
    send_all,
    send_keys,
    seqs_of,
    stage,
    value,
)

pytestmark = pytest.mark.usefixtures("allowed_afterwards")


def peek(conn: Conn, size: int = 100, name: str = "c") -> list[tuple[int, str]]:
    return [(row.seq, row.state) for row in call(conn, "peek", "s", name, size)]


def lines(conn: Conn, size: int | None = None, stream: str = "s", **options: Any) -> list[str]:
    """All lines, so many at a time."""
    got: list[str] = []
    place = None
    while rows := call(conn, "export_lines", stream, place, size, **options):
        got += [row.line for row in rows if row.line is not None]
        assert place != rows[-1].place, "it does not go on"
        place = rows[-1].place
        if size is None and not options:
            break
    return got


def import_lines(conn: Conn, given: list[str], stream: str = "t") -> tuple[int, int]:
    (row,) = call(conn, "import_lines", stream, given)
    return row.sent, row.duplicates


@pytest.mark.small_limits
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_what_is_peeked_is_what_is_delivered_next(
    conn: Conn, stream: int, session: Session, ordering: str
) -> None:
    """In its order, each once, whatever was taken; and looking changes nothing."""
    consumer(conn, ordering=ordering)
    send_keys(conn, "a", "b", "a", None)
    send(conn, p_priority=5)
    late = session()
    late.execute("begin")
    send_keys(late, "c")
    send_keys(conn, "b", "b")
    for size in (1, 3):
        told = peek(conn)
        assert peek(conn) == told
        assert [seq for seq, _ in peek(conn, 2)] == [seq for seq, _ in told][:2]
        got = receive(conn, size)
        # of an ordered consumer, what is dealt depends on who asks
        assert set(seqs_of(got)) <= {seq for seq, _ in told}
        if ordering == "none":
            assert seqs_of(got) == [seq for seq, _ in told[: len(got)]]
        value(conn, "ack", got[0].claim_id)
    late.execute("commit")
    left = [seq for seq, _ in peek(conn)]
    assert len(left) == len(set(left))
    assert sorted(left) == sorted(acked(conn, "s", "c"))
    assert peek(conn) == []


def test_peek_tells_where_each_message_is(conn: Conn, stream: int) -> None:
    """With the payload and the last error; what is claimed, dead or for others is not there."""
    consumer(conn, ordering="key")
    consumer(conn, "other")
    send_keys(conn, "a", "a", "b")
    value(conn, "nack", claim_of(receive(conn, 1)), p_delay="1 hour", p_reason="no")
    send(conn, "x", p_consumers=["other"])
    send(conn, "later", p_deliver_at="2222-01-01")
    rows = {row.seq: row for row in call(conn, "peek", "s", "c", 10)}
    assert {seq: row.state for seq, row in rows.items()} == {
        1: "delayed", 2: "waiting", 3: "ready", 5: "delayed",
    }  # fmt: skip
    assert (rows[1].error, rows[1].deliver_count, rows[1].data) == ("no", 1, "x")
    assert seqs_of(receive(conn, 5)) == [3]
    assert 3 not in {seq for seq, _ in peek(conn)}


def test_a_filtered_consumer_is_shown_what_passes(conn: Conn, stream: int) -> None:
    consumer(conn, p_topic="a.*")
    send_keys(conn, "a.1", "b.1", "a.2", "a.3")
    assert peek(conn) == [(1, "new"), (3, "new"), (4, "new")]
    assert seqs_of(receive(conn, 1)) == [1]
    assert [seq for seq, _ in peek(conn)] == [3, 4]


def test_messages_are_looked_up_by_number(conn: Conn, stream: int) -> None:
    """Also what was for others; not what is staged, or was rolled back."""
    consumer(conn, "other")
    send_all(conn, ["a", "b"], p_priority=3)
    conn.execute("begin")
    send(conn)
    conn.execute("rollback")
    send(conn, "c", p_consumers=["other"])
    stage(conn, stream, 1)
    rows = call(conn, "peek_at", "s", 2, 10)
    assert [(row.seq, row.data, row.priority, row.consumers) for row in rows] == [
        (2, "b", 3, None),
        (4, "c", 0, ["other"]),
    ]
    assert call(conn, "peek_at", "s", 6, 10) == []


def test_the_position_of_a_consumer(conn: Conn, stream: int) -> None:
    consumer(conn)
    assert call(conn, "consumer_position", "s", "c") == [(1, None, 0)]
    send_all(conn, ["a", "b"])
    send(conn, "c")
    (told,) = call(conn, "consumer_position", "s", "c")
    assert (told.next_seq, told.published_at is None) == (1, False)
    receive(conn, 1)
    assert call(conn, "consumer_position", "s", "c") == [(4, None, 0)]


@pytest.mark.all_versions
def test_what_is_exported_is_imported_as_it_was(conn: Conn, stream: int) -> None:
    """Data, keys, headers exactly, priorities and times; to whom it went; in the order."""
    consumer(conn, "some")
    sent = ["plain", 'q"uo\\te\n\t\u009b', "", "ä😀", '{"a": 1}']
    headers = ['{"a": 1.50, "b": 12345678901234567890123}', None, "{}", '{"c": "\\n"}', None]
    send_all(conn, sent, p_keys=["k", None, "k", "", "k2"], p_headers=headers)
    send(conn, "urgent", p_priority=7)
    send(conn, "later", p_deliver_at="2222-02-02 00:00+00", p_consumers=["some"])
    send(conn, "stale", p_expires_at="2222-02-02 00:00+00")
    given = lines(conn)
    assert all("\n" not in line and json.loads(line)["seq"] for line in given)
    value(conn, "create_stream", "t")
    for name in ("all", "some"):
        value(conn, "create_consumer", "t", name)
    assert import_lines(conn, given) == (8, 0)
    found = [
        conn.execute(
            "select m.key, m.data, m.headers::text, p.priority, p.deliver_at,"
            " p.expires_at"
            " from pgqueue.messages m join pgqueue.streams s using (stream_id)"
            " join pgqueue.publications p on p.stream_id = s.stream_id and p.seqs @> m.seq"
            " where s.name = %s order by m.seq",
            [name],
        ).fetchall()
        for name in ("s", "t")
    ]
    assert found[0] == found[1]
    assert call(conn, "peek_at", "t", 7)[0].consumers == ["some"]


def test_binary_data_is_exported_in_base64(conn: Conn) -> None:
    for name in ("b", "t"):
        value(conn, "create_stream", name, "binary")
    payload = bytes(range(256)) * 10
    value(conn, "send", "b", None, p_data_bytes=payload)
    assert import_lines(conn, lines(conn, stream="b")) == (1, 0)
    assert call(conn, "peek_at", "t", 1)[0].data_bytes == payload


@pytest.mark.small_limits
def test_an_export_has_every_message_once_whatever_its_pages(conn: Conn, stream: int) -> None:
    """By lines, or by bytes; of publications of one message, of many, and of several parts."""
    for count in (1, 5, 1, 3):
        send_all(conn, ["x" * 100] * count)
    publish(conn, stream, [stage(conn, stream, 3)], 3)
    all_lines = lines(conn)
    assert len(all_lines) == 13
    for size in (1, 2, 3, 7):
        assert lines(conn, size) == all_lines
    for size in (1, 250):
        assert lines(conn, p_max_bytes=size) == all_lines


def test_an_export_ends_with_what_there_was_when_it_began(conn: Conn, stream: int) -> None:
    send_all(conn, ["a", "b"])
    (first,) = call(conn, "export_lines", "s", None, 1)
    send(conn, "c")
    (second,) = call(conn, "export_lines", "s", first.place, 10)
    assert json.loads(second.line)["data"] == "b"
    assert call(conn, "export_lines", "s", second.place, 10) == []


def test_lines_come_in_once_where_dedup_keys_are_remembered(
    conn: Conn, stream: int, session: Session
) -> None:
    """However often, by however many at once."""
    send_all(conn, ["a", "b", "c"])
    given = lines(conn)
    value(conn, "create_stream", "t", p_settings='{"dedup_window": "1 day"}')
    first, second = session(), session()
    first.execute("begin")
    assert import_lines(first, given[:2]) == (2, 0)
    second.execute("set lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        import_lines(second, given)
    first.execute("commit")
    assert import_lines(second, given) == (1, 2)
    assert import_lines(conn, given + given) == (0, 6)
    value(conn, "create_stream", "u")
    assert [import_lines(conn, given, "u") for _ in range(2)] == [(3, 0)] * 2


@pytest.mark.parametrize(
    ("bad", "sqlstate", "said"),
    [
        ("nope", "PQ003", "line 8: it is no JSON object"),
        ("[1]", "PQ003", "line 8: it is no JSON object"),
        ('{"key": "k"}', "PQ003", "line 8: there is no data, which is what stream 't' of kind"),
        ('{"data_base64": "YQ=="}', "PQ003", "line 8: there is no data"),
        ('{"data": "secret", "priority": "high"}', "PQ003", "line 8: it is no JSON object"),
        ('{"data": "secret", "priority": 99999}', "PQ003", "line 8: p_priority is"),
        ('{"data": "secret", "consumers": ["x"]}', "PQ002", "line 8: unknown consumer 'x'"),
        ('{"data": "secret", "headers": [1]}', "PQ003", "line 8: p_headers"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(
    conn: Conn, stream: int, bad: str, sqlstate: str, said: str
) -> None:
    value(conn, "create_stream", "t")
    with pytest.raises(psycopg.Error, match=said) as caught:
        call(conn, "import_lines", "t", ['{"data": "a"}', "", bad, '{"data": "b"}'], 6)
    assert caught.value.sqlstate == sqlstate
    assert caught.value.diag.column_name
    assert "secret" not in str(caught.value)
    assert call(conn, "peek_at", "t", 1, 10) == []


def test_a_page_costs_what_it_holds(conn: Conn, stream: int) -> None:
    """The last page of a large publication as much as the first one."""
    conn.execute(
        "select count(*) from pgqueue.send_batch('s', array_fill('x'::text, array[50000]))"
    )
    began = time.monotonic()
    (first,) = call(conn, "export_lines", "s", None, 1)
    (last,) = call(conn, "export_lines", "s", [first.place[0], 49_999, first.place[2]], 1)
    assert json.loads(last.line)["seq"] == 50_000
    plan = "\n".join(
        row[0]
        for row in conn.execute(
            "explain (analyze, buffers, costs off, timing off)"
            " select * from pgqueue.export_lines('s', %s, 1)",
            [[first.place[0], 40_000, first.place[2]]],
        ).fetchall()
    )
    hits = int(plan.split("shared hit=")[1].split()[0])
    assert hits < 500, f"{plan} after {time.monotonic() - began}"
