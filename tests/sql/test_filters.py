"""Consumers that get some messages only, and streams that are copied to others."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker, internals, limits
from tests.sql.cases import for_each
from tests.sql.cost import GROWTH, cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("allowed_afterwards")


# Topics

TOPICS: list[tuple[str, list[str | None], list[str | None]]] = [
    ("orders.*.eu", ["orders.new.eu", "orders..eu"], ["orders.eu", "orders.a.b.eu", "orders.a.us"]),
    ("orders.#", ["orders", "orders.a", "orders.a.b"], ["order", "ordersx", "a.orders"]),
    ("#.eu", ["eu", "a.eu", "a.b.eu"], ["eu.a", "xeu", None]),
    ("a.#.b.#.c", ["a.b.c", "a.x.b.y.z.c"], ["a.c", "a.b", "b.c"]),
    ("#", [None, "", "a", "a.b"], []),
    ("*", ["a", "A b"], [None, "", "a.b"]),
    ("a+(b)[c]{1}|$^\\", ["a+(b)[c]{1}|$^\\"], ["aab", "a"]),
    ("Ä-ö_1", ["Ä-ö_1"], ["ä-ö_1", "Ä-ö_1.x"]),
]


@pytest.mark.all_versions
def test_a_topic_is_of_words(conn: Conn, stream: int) -> None:
    """As in AMQP: * is a word, # any number of them; all else is as it is."""
    for topic, keys, others in TOPICS:
        assert [key for key in keys if not value(conn, "test_topic", topic, key)] == [], topic
        assert [key for key in others if value(conn, "test_topic", topic, key)] == [], topic


# Filters


@pytest.mark.small_limits
@for_each("ordering", ORDERINGS)
@pytest.mark.promise("concepts: transitions of a message")
def test_a_filtered_consumer_gets_what_passes_in_its_order(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering, p_topic="orders.*.eu")
    sent = send_keys(conn, *["orders.1.eu", "orders.1.us", None, "orders.2.eu", "orders.1.eu"] * 3)
    sent += [send_key(conn, "orders.1.eu"), send_key(conn, "x")]
    eu = [s for i, s in enumerate(sent[:15]) if i % 5 in (0, 3, 4)] + [sent[15]]
    checker.check(conn)
    got: list[int] = []
    for i in range(20):
        found = receive(conn, 3)
        if i % 4 == 0:
            checker.check(conn)
        got += seqs_of(found)
        if found:
            value(conn, "ack", claim_of(found))
    assert sorted(got) == eu
    for key in range(3):
        mine = [s for s in eu if (s - sent[0]) % 5 == key]
        assert [s for s in got if s in mine] == mine
    assert stats(conn).backlog == 0


@pytest.mark.small_limits
@for_each("ordering", ["key", "stream"])
def test_what_is_redriven_comes_behind_what_is_not_judged_yet(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering, p_topic="a")
    first = send_key(conn, "a")
    value(conn, "dead_letter", claim_of(receive(conn, 1)))
    many = one(conn, "select _pgqueue.limit_filter()") * 2 + 1
    later = send_keys(conn, *["a"] * many)
    taken = seqs_of(receive(conn, 1))
    assert any(each.state == "unfiltered" for each in internals.bundles(conn))
    assert value(conn, "redrive", "s", "c") == 1
    checker.check(conn)
    for each in internals.claims(conn):
        value(conn, "ack", each.claim_id)
    checks = iter(range(5))  # each reads all of the queue
    while found := receive(conn, 10_000):
        taken += seqs_of(found)
        value(conn, "ack", claim_of(found))
        if next(checks, None) is not None:
            checker.check(conn)
    assert taken == [*later, first]


@for_each("ordering", ORDERINGS)
def test_a_claim_filters_for_a_bounded_time(conn: Conn, ordering: str) -> None:
    """Of large messages, this is a few. The next claims go on, also past what fails the filter."""
    limits.set_constant(conn, "filter_time", "0 s")
    consumer(
        conn,
        ordering=ordering,
        p_where='$.data == "x" || $.data.datetime() < "2026-01-01T00:00:00Z".datetime()',
    )
    fails, keys = "2025-01-01T00:00:00", ["a", "b", None]
    sent = send_all(conn, ["x", "y", fails] * 6, p_keys=keys * 6)
    urgent = send_all(conn, [fails, "x", "y", "x"], p_priority=3)
    wanted = [*urgent[1::2], *sent[::3]] if ordering == "none" else [*sent[::3], *urgent[1::2]]
    got: list[int] = []
    left = calls = 0
    while len(got) < len(wanted):
        before, left = left, stats(conn).new
        assert before - left <= 3, "more than a message for each pass"
        calls += 1
        assert calls < 99
        found = receive(conn, 3)
        checker.check(conn)
        if found:
            got += seqs_of(found)
            value(conn, "ack", claim_of(found))
        else:
            assert value(conn, "next_due", "s", "c") is not None, "nobody asks again"
    assert got == wanted
    assert calls >= len(sent) / 3
    assert acked(conn, "s", "c") == []


def test_a_skip_filters_for_a_bounded_time(conn: Conn) -> None:
    """Retention skips what is too old with the consumer's lock, and goes on in its next call."""
    limits.set_constant(conn, "filter_time", "0 s")
    consumer(conn, p_topic="a")
    sent = send_keys(conn, *["a", "b"] * 10)
    skip = "select _pgqueue.skip(c, %s::int8multirange, 1000) from pgqueue.consumers c"
    assert one(conn, skip, f"{{[{sent[0]},{sent[1]})}}") is True
    assert stats(conn).new == 19, "others were filtered meanwhile"
    checker.check(conn)
    assert [seq for _ in range(20) for seq in acked(conn, "s", "c")] == sent[2::2]


DOCUMENTS = [
    ("$.data.total > 100", [3, 4]),
    ("$.data ? (@.total > 100)", [3, 4]),
    ("$.data.urgent", [4]),
    ('$.headers.kind == "a" && $.data.total < 200', [1, 3]),
    ('$.key starts with "k"', [1, 2, 4]),
    ('$.data.total.double() > 100 || $.key == "$\\"x"', [3, 4]),
    ("$.nothing", []),
    ("$.data.total / 0 > 1", []),
    ("strict $.data.total > 100", [3, 4]),
    ('$.data.total > 100 || $.data.at.datetime() < "2026-01-01T00:00:00Z".datetime()', [3, 4]),
]


@pytest.mark.all_versions
@pytest.mark.promise("feature: filters", "concepts: transitions of a message")
def test_a_condition_is_asked_of_key_headers_and_data(conn: Conn, stream: int) -> None:
    """What cannot be asked, or not be read, does not pass, and is in nobody's way."""
    value(conn, "create_stream", "j", "json")
    for path, _ in DOCUMENTS:
        value(conn, "create_consumer", "j", path, "earliest", p_where=path)
    documents: list[tuple[str | None, str, dict[str, str] | None]] = [
        ("k1", '{"total": 50, "at": "2025-01-01T00:00:00"}', {"kind": "a"}),
        ("k2", '{"total": "many"}', None),
        (None, '{"total": 150, "urgent": false}', {"kind": "a"}),
        ("k4", '{"total": 1e3, "urgent": true}', {"kind": "b"}),
        ("no", '"\\u0000"', None),
        ("no", "1e999999", None),
    ]
    for key, data, headers in documents:
        value(conn, "send", "j", data, p_key=key, p_headers=headers and json.dumps(headers))
    assert [(path, acked(conn, "j", path)) for path, _ in DOCUMENTS] == DOCUMENTS


def test_text_and_bytes_have_conditions_too(conn: Conn) -> None:
    consumer(conn, p_where='$.data like_regex "^err"')
    assert acked(conn, "s", "c") == []
    sent = send_all(conn, ["error", "fine", "errand", "{"])
    assert acked(conn, "s", "c") == [sent[0], sent[2]]
    value(conn, "create_stream", "b", "binary")
    value(conn, "create_consumer", "b", "c", p_where="$.headers.a == 1")
    value(conn, "send", "b", None, p_data_bytes=b"x")
    second = value(conn, "send", "b", None, p_data_bytes=b"x", p_headers='{"a": 1}')
    assert acked(conn, "b", "c") == [second]


def test_topic_and_condition_priority_and_delay_go_together(conn: Conn) -> None:
    consumer(conn, p_topic="a.*", p_where='$.data == "x"')
    low = send(conn, p_key="a.1")
    send(conn, "y", p_key="a.1", p_priority=9)
    send(conn, p_key="b.1", p_priority=9)
    high = send(conn, p_key="a.2", p_priority=5)
    later = send(conn, p_key="a.3", p_deliver_at=one(conn, "select now() + interval '1 h'"))
    assert seqs_of(receive(conn)) == [high, low]
    assert states(conn) == {low: "claimed", high: "claimed", later: "delayed"}


def test_an_urgent_message_is_not_behind_what_is_filtered_and_ready(conn: Conn) -> None:
    consumer(conn, p_topic="a")
    sent = send_keys(conn, *"aaaa")
    assert seqs_of(receive(conn, 1)) == sent[:1]
    urgent = send(conn, p_key="a", p_priority=1)
    assert seqs_of(receive(conn, 1)) == [urgent]


def test_an_urgent_message_is_not_behind_others_that_were_taken(conn: Conn) -> None:
    """Also where what was taken before is of several priorities, and is not claimed yet."""
    consumer(conn, p_topic="a")
    low = send(conn, p_key="a", p_priority=-1)
    sent = send_keys(conn, *"aa")
    assert seqs_of(receive(conn, 1)) == sent[:1]
    urgent = send_all(conn, ["x", "x"], p_keys=["a", "b"], p_priority=1)[0]
    assert seqs_of(receive(conn)) == [urgent, sent[1], low]


def test_a_spark_query_is_told_to_go_on(conn: Conn, stream: int) -> None:
    reader = Reader(conn, consumer(conn, p_topic="last"))
    internals.publish_together(conn, stream, 70_000, "'other'")
    send_key(conn, "last")
    first = reader.ask()
    assert (first.claimed, first.next_due is not None) == (0, True)
    while not (found := reader.ask()).claimed:
        assert found.next_due is not None
    assert found.claimed == 1
    value(conn, "drop_stream", "s")


def test_a_filtered_consumer_beside_a_transaction_that_stays_open(
    conn: Conn, opened: Session
) -> None:
    consumer(conn, p_topic="a")
    early = opened()
    held = [send_key(early, "a"), send_key(early, "b")]
    sent = send_keys(conn, "a", "b")
    assert acked(conn, "s", "c") == sent[:1]
    assert cost(conn, "select * from pgqueue.receive('s', 'c')") < 2000
    early.execute("commit")
    assert acked(conn, "s", "c") == held[:1]


def test_who_has_no_filter_pays_nothing(conn: Conn) -> None:
    """Of the same, beside consumers with filters; and a send pays nothing for any."""
    consumer(conn)
    query = "select pgqueue.send('s', 'x')"
    few = min(cost(conn, query) for _ in range(9))
    for i in range(20):
        consumer(conn, f"f{i}", p_topic=f"t{i}", p_where="$.data == 1")
    assert min(cost(conn, query) for _ in range(9)) <= few + 1


def test_a_filtered_consumer_is_moved_and_replays(conn: Conn) -> None:
    consumer(conn, p_topic="a")
    sent = send_keys(conn, *"abab")
    assert acked(conn, "s", "c") == [sent[0], sent[2]]
    value(conn, "replay", "s", "c", "earliest")
    value(conn, "replay", "s", "c", "earliest")
    assert acked(conn, "s", "c") == [sent[0], sent[2]]
    value(conn, "seek", "s", "c", f"seq {sent[1]}")
    assert acked(conn, "s", "c") == [sent[2]]


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_workers_of_a_filtered_consumer_share_what_passes(
    conn: Conn, url: str, ordering: str
) -> None:
    consumer(conn, ordering=ordering, p_topic="a.#")
    stop = threading.Event()

    def produce() -> None:
        with connection.connect(url) as other:
            for i in range(80):
                other.execute("begin")
                send_keys(other, f"a.{i % 5}", "b", f"a.{i % 3}", "c")
                other.execute("rollback" if i % 7 == 0 else "commit")
        stop.set()

    def work() -> list[int]:
        mine: list[int] = []
        with connection.connect(url) as other:
            while True:
                over = stop.is_set()
                if found := receive(other, 4):
                    mine += seqs_of(found)
                    value(other, "ack", claim_of(found))
                elif over:
                    return mine

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work) for _ in range(3)]
        pool.submit(produce).result()
        got = Counter(seq for worker in workers for seq in worker.result())
    expected = [s for (s,) in conn.execute("select seq from pgqueue.messages where key like 'a.%'")]
    assert got == Counter(expected)


# Bindings


def bind(conn: Conn, topic: str, to: str, stream: str = "s") -> None:
    call(conn, "bind", stream, topic, to)


@pytest.fixture
def targets(conn: Conn, stream: int) -> None:
    for name in ("t", "u"):
        value(conn, "create_stream", name)
        value(conn, "create_consumer", name, "c", "earliest")


@pytest.mark.usefixtures("targets")
@pytest.mark.promise("feature: topics, bindings")
def test_what_matches_is_copied_once_in_the_senders_transaction(conn: Conn) -> None:
    bind(conn, "a.*", "t")
    bind(conn, "#.x", "t")
    bind(conn, "#", "u")
    conn.execute("begin")
    send(conn, "1", p_key="a.x", p_headers='{"h": 1}', p_priority=3)
    conn.execute("rollback")
    send(conn, "2", p_key="a.x", p_headers='{"h": 1}', p_priority=3)
    send_all(conn, ["3", "4", "5"], p_keys=["a.y", "b.y", None])
    consumer(conn)
    send(conn, "6", p_key="a.x", p_consumers=["c"])
    found = [(m.key, m.data, m.headers, m.priority) for m in call(conn, "receive", "t", "c", 9)]
    assert found == [("a.x", "2", {"h": 1}, 3), ("a.y", "3", None, 0)]
    assert [m.data for m in call(conn, "receive", "u", "c", 9)] == ["2", "3", "4", "5"]
    assert value(conn, "unbind", "s", "#", "u") is True
    assert value(conn, "unbind", "s", "#", "u") is False
    send(conn, "7", p_key="a.x")
    assert call(conn, "receive", "u", "c") == []
    assert [m.data for m in call(conn, "receive", "t", "c")] == ["7"]


@pytest.mark.usefixtures("targets")
def test_copies_are_copied_on_and_a_sinks_batch_too(conn: Conn, stream: int) -> None:
    bind(conn, "#", "t")
    bind(conn, "#", "u", "t")
    block = stage(conn, stream, 3)
    assert acked(conn, "t", "c") == []
    publish(conn, stream, [block], 3)
    assert len(acked(conn, "t", "c")) == len(acked(conn, "u", "c")) == 3


@pytest.mark.usefixtures("targets")
def test_each_path_of_bindings_makes_a_copy(conn: Conn) -> None:
    for stream, to in (("s", "t"), ("s", "u"), ("t", "u")):
        bind(conn, "#", to, stream)
        bind(conn, "a", to, stream)
    send_key(conn, "a")
    assert len(acked(conn, "t", "c")) == 1
    assert len(acked(conn, "u", "c")) == 2


@pytest.mark.usefixtures("targets")
def test_what_was_staged_before_a_binding_is_not_copied(conn: Conn, stream: int) -> None:
    """It may not fit the limits by which the binding was allowed. What comes after it is copied."""
    bind(conn, "#", "u")
    large = stage(conn, stream, 1, data="x" * 2000)
    for name in ("s", "t"):
        value(conn, "alter_stream", name, Jsonb({"max_bytes": 1000}))
    bind(conn, "#", "t")
    small = stage(conn, stream, 2, data="small")
    publish(conn, stream, [large, small], 3)
    assert [row.data for row in call(conn, "receive", "u", "c", 9)] == ["x" * 2000] + ["small"] * 2
    assert [row.data for row in call(conn, "receive", "t", "c", 9)] == ["small"] * 2
    publish(conn, stream, [stage(conn, stream, 2, batch=1)], 2, batch=1)
    assert len(acked(conn, "u", "c")) == len(acked(conn, "t", "c")) == 2


@pytest.mark.usefixtures("targets")
def test_a_circle_is_refused_also_by_two_at_once(conn: Conn, session: Session) -> None:
    bind(conn, "#", "t")
    with pytest.raises(psycopg.Error, match=r"circle|not copied"):
        bind(conn, "a", "s", "t")
    one_, other = session(), session()
    one_.execute("begin")
    call(one_, "bind", "t", "a", "u")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(call, other, "bind", "u", "a", "s")
        wait_for_a_lock(conn)
        one_.execute("commit")
        with raises("PQ003"):
            closing.result()


@pytest.mark.usefixtures("targets")
def test_a_copied_message_costs_the_same_whatever_the_stream_has(conn: Conn, stream: int) -> None:
    """Also right after many came, before anybody has analyzed them."""
    bind(conn, "#", "t")
    costs = []
    for size in (1_000, 20_000):
        internals.publish_singly(conn, stream, size, key="i::text")
        costs.append(min(cost(conn, "select pgqueue.send('s', 'x', 'a')") for _ in range(3)))
    assert costs[1] <= costs[0] * GROWTH + 15, f"{costs}"
    value(conn, "drop_stream", "s")  # the checker would read all of it


def test_a_topic_of_many_wildcards_is_asked_at_once(conn: Conn, stream: int) -> None:
    topic = "#." * 500 + "a"
    consumer(conn, p_topic=topic)
    send_key(conn, "b.a")
    send_key(conn, "b.a.b")
    conn.execute("set statement_timeout = '3s'")
    assert seqs_of(receive(conn)) == [1]


@pytest.mark.usefixtures("targets")
def test_a_dropped_stream_is_copied_to_no_more(conn: Conn) -> None:
    bind(conn, "#", "t")
    bind(conn, "#", "u")
    value(conn, "drop_stream", "t")
    send(conn)
    assert len(acked(conn, "u", "c")) == 1
    value(conn, "drop_stream", "u")
    few = cost(conn, "select pgqueue.send('s', 'x')")
    assert internals.count(conn, "bindings") == 0
    assert not one(conn, "select bound from pgqueue.streams")
    assert few > 0
