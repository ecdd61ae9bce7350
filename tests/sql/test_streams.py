"""Streams and consumers: making them again, where a consumer starts, and dropping them."""

import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_creating_again_answers_the_same_id_if_asked_to(conn: Conn, stream: int) -> None:
    assert value(conn, "create_stream", "s", p_if_not_exists=True) == stream
    made = consumer(conn, ordering="key")
    assert consumer(conn, ordering="key", p_if_not_exists=True) == made
    assert consumer(conn, "new", p_if_not_exists=True) != made
    assert value(conn, "create_stream", "new", "json", p_if_not_exists=True) != stream
    value(conn, "create_group", "s", "group", 4)
    with raises("PQ006", "partitions of a group: 4"):
        consumer(conn, "group", "key", p_if_not_exists=True)


def test_the_same_consumer_name_is_another_consumer_in_another_stream(conn: Conn) -> None:
    value(conn, "create_stream", "other")
    mine, other = consumer(conn), value(conn, "create_consumer", "other", "c")
    assert mine != other
    seq = send(conn)
    assert call(conn, "receive", "other", "c") == []
    assert seqs_of(receive(conn)) == [seq]


def test_names_are_looked_up_with_what_the_source_and_sink_need(conn: Conn, stream: int) -> None:
    id_ = consumer(conn, ordering="key", visibility_timeout=seconds(7))
    assert call(conn, "open_stream", "s") == [(stream, "text")]
    (found,) = call(conn, "open_consumer", "s", "c")
    assert found[:5] == (stream, "text", id_, "key", seconds(7))
    assert found.channel == f"pgqueue_{stream}"
    assert found.identity.endswith(f"-{id_}") or f"-{id_}-" in found.identity
    assert call(conn, "open_sink", "s") == [(stream, "text")]
    assert call(conn, "open_sink", "s", ["c"]) == [(stream, "text")]


@pytest.mark.parametrize("others", [False, True])
def test_a_new_consumer_starts_exactly(
    conn: Conn, session: Session, stream: int, others: bool
) -> None:
    """What runs while it is made counts as later, what was committed as before."""
    before = [send_key(conn), send_key(conn)]
    early, late = session(), session()
    early.execute("begin")
    running = [send_key(early)]
    dead_publication(conn)
    before.append(send_key(conn))
    if others:
        consumer(conn, "other")
        acked(conn, "s", "other")
        before.append(send_key(conn))
    since = str(one(conn, "select clock_timestamp()"))
    for start in ("latest", "earliest", since):
        consumer(conn, start, p_start=start)
    late.execute("begin")
    running.append(send_key(late))
    after = [send_key(conn)]
    early.execute("commit")
    late.execute("commit")
    after.append(send_key(conn))
    for start in ("latest", "earliest", since):
        expected = {*after, *running, *(before if start == "earliest" else [])}
        assert sorted(acked(conn, "s", start)) == sorted(expected), start
        assert acked(conn, "s", start) == []


def test_consumers_made_while_producers_run_get_each_message_once(
    conn: Conn, url: str, stream: int
) -> None:
    """Each published message was visible when the consumer was made, or is delivered once."""
    stop = threading.Event()

    def produce(seed: int) -> None:
        rng = random.Random(seed)
        with connection.connect(url) as other:
            while not stop.is_set():
                other.execute("begin")
                send_key(other)
                time.sleep(rng.choice([0.001, 0.001, 0.005]))
                send_key(other)
                other.execute(rng.choice(["commit", "commit", "rollback"]))

    pool = ThreadPoolExecutor(4)
    producers = [pool.submit(produce, seed) for seed in range(4)]
    skipped: dict[str, set[int]] = {}
    delivered: dict[str, list[int]] = {}
    visible = "select seq from pgqueue.messages"
    try:
        with connection.connect(url) as maker:
            maker.autocommit = False
            maker.isolation_level = IsolationLevel.REPEATABLE_READ
            for i in range(6):
                seen = {row[0] for row in maker.execute(visible).fetchall()}
                consumer(maker, f"c{i}", ["none", "key"][i % 2], p_start="latest")
                maker.commit()
                skipped[f"c{i}"], delivered[f"c{i}"] = seen, []
                for name, got in delivered.items():
                    if rows := call(conn, "receive", "s", name, 7):
                        value(conn, "ack", claim_of(rows))
                        got += seqs_of(rows)
    finally:
        stop.set()
        pool.shutdown()
    assert not any(each.exception() for each in producers)
    published = {row[0] for row in conn.execute(visible).fetchall()}
    for name, got in delivered.items():
        got += acked(conn, "s", name)
        assert len(got) == len(set(got)), f"{name}: delivered twice"
        assert set(got) == published - skipped[name], name


def test_a_dropped_stream_leaves_nothing_and_touches_no_other(conn: Conn, stream: int) -> None:
    objects = "select count(*) from pg_class where relnamespace = 'pgqueue'::regnamespace"
    tables = [
        row[0]
        for row in conn.execute(
            "select oid::regclass::text from pg_class where relkind in ('r', 'p')"
            " and relnamespace = 'pgqueue'::regnamespace and not relispartition"
        ).fetchall()
    ]

    def sizes() -> dict[str, int]:
        return {t: one(conn, f"select count(*) from {t}") for t in tables}

    value(conn, "drop_stream", "s")
    value(conn, "create_stream", "kept")
    value(conn, "create_consumer", "kept", "c", p_start="earliest")
    value(conn, "send", "kept", "x")
    maintain(conn)
    before, objects_before = sizes(), one(conn, objects)
    new = value(conn, "create_stream", "s")
    id_ = consumer(conn)
    consumer(conn, "by key", "key")
    consumer(conn, "delays", "key")
    remembers = {"keep_history": "1 day", "per_key_capacity": 9}
    consumer(conn, "remembers", p_settings=Jsonb(remembers))
    consumer(conn, "slow", "key", p_settings=Jsonb({"per_key_interval": "1 hour"}))
    value(conn, "set_retention", "s", seconds(60), p_unread="drop")
    send_all(conn, ["x"])
    maintain(conn)
    clock.pass_time(conn, seconds(100))
    assert maintain(conn)["trimmed messages"] == 1
    send_all(conn, ["x"] * 4)
    receive(conn, 1)
    receive(conn, 1, name="by key")
    value(conn, "ack", claim_of(receive(conn, 1, name="remembers")))
    value(conn, "dead_letter", claim_of(receive(conn, 1)))
    call(conn, "reader_claim", uuid.uuid4(), id_, 0, 0, 1)
    send_all(conn, ["x"] * 4)
    for _ in range(2):
        receive(conn, 1)  # the second claims what the first one has cut
    stage(conn, new, 2)
    publish(conn, new, [stage(conn, new, 1)], 1)
    dead_publication(conn)  # leaves a gap in what is taken next
    value(conn, "alter_stream", "s", '{"dedup_window": "1 day"}')
    send_all(conn, ["x", "y"], p_keys=["k", "k"], p_dedup_keys=["k1", "k2"])
    assert len(receive(conn, 100)) > 1
    receive(conn, 100, name="slow")  # spends a token
    held = receive(conn, 100, name="delays")
    value(conn, "nack", claim_of(held), None, "1 hour")
    receive(conn, 1, name="delays")  # delays them
    value(conn, "cancel", "s", "delays", [held[-2].seq])  # frees its key
    call(conn, "bind", "s", "never", "kept")
    call(conn, "create_schedule", "s", "daily", "@daily", p_data="x")
    consumer(conn, "filtered", p_topic="a")
    consumer(conn, "latest", p_settings=Jsonb({"per_key_latest": True}))
    receive(conn, 1, name="latest")
    value(conn, "create_group", "s", "group", 1)
    assert call(conn, "lease_partitions", "s", "group", "worker")
    value(conn, "drop_stream", "s")
    maintain(conn)
    after = sizes()
    # by which a query notices that another stream has the name of its own
    del before["pgqueue.sink_streams"], after["pgqueue.sink_streams"]
    assert after == before
    assert one(conn, objects) == objects_before
    assert len(call(conn, "receive", "kept", "c")) == 1


def test_a_dropped_consumer_leaves_nothing_and_the_others_go_on(conn: Conn) -> None:
    for name in "ab":
        consumer(conn, name)
    sent = send_all(conn, ["x"] * 3)
    for name in "ab":
        value(conn, "dead_letter", claim_of(receive(conn, 1, name)))
    lost, kept = receive(conn, 1, "a"), receive(conn, 1, "b")
    value(conn, "drop_consumer", "s", "a")
    with warned(conn) as warnings:
        assert value(conn, "ack", claim_of(lost)) == 0
    assert len(warnings) == 1
    assert f"claim {claim_of(lost)} is not live" in warnings[0]
    assert value(conn, "ack", claim_of(kept)) == 1
    assert states(conn, "a") == {}
    assert states(conn, "b") == {sent[0]: "dead", sent[2]: "ready"}
    assert internals.count(conn, "consumers") == 1
    consumer(conn, "a")
    assert acked(conn, "s", "a") == sent, "made again, it begins again"


@pytest.mark.parametrize("locked", [False, True])
def test_a_consumer_that_is_dropped_while_it_is_claimed_from_leaves_nothing(
    conn: Conn, url: str, locked: bool
) -> None:
    """The drop waits for a claim that is being made, longer than a single try does."""
    consumer(conn)
    send_all(conn, ["x"] * 50)
    if not locked:
        value(conn, "ack", claim_of(receive(conn, 1)))  # what comes next needs no lock
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            assert len(receive(conn, 1)) == 1
            dropped = pool.submit(value, other, "drop_consumer", "s", "c")
            wait_for_a_lock(conn)
            time.sleep(0.3)
            assert not dropped.done()
        dropped.result()
    assert internals.claims(conn) == []
    assert internals.count(conn, "consumer_messages") == 0


def test_a_consumer_that_is_dropped_while_a_run_is_cut_leaves_no_pieces(
    conn: Conn, url: str
) -> None:
    consumer_id = consumer(conn)
    send_all(conn, ["x"] * 1000)
    value(conn, "ack", claim_of(receive(conn, 300)))
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        with other.transaction():
            internals.lock_consumer(other, consumer_id)
            conn.execute("begin")
            assert len(receive(conn, 10)) == 10, "without the lock: from what is ready"
        dropped = pool.submit(value, other, "drop_consumer", "s", "c")
        wait_for_a_lock(conn)
        conn.execute("commit")
        dropped.result()
    assert internals.count(conn, "consumer_messages") == 0
    assert internals.claims(conn) == []


def test_making_what_is_there_takes_no_number(conn: Conn) -> None:
    """A service that makes its streams at each start would use up the ids, which are ints."""
    made = {"create_stream": ["n"], "create_consumer": ["n", "c"], "create_group": ["n", "g"]}
    ids = {name: value(conn, name, *given) for name, given in made.items()}
    for _ in range(3):
        for name, given in made.items():
            assert value(conn, name, *given, p_if_not_exists=True) == ids[name]
    assert value(conn, "create_stream", "t") == ids["create_stream"] + 1
    assert value(conn, "create_consumer", "t", "c") == ids["create_group"] + 1


@pytest.mark.parametrize("notify", [True, False])
def test_a_stream_that_does_not_notify_leaves_each_call_to_a_prepared_transaction(
    conn: Conn, notify: bool
) -> None:
    """Postgres prepares no transaction that has notified."""
    value(conn, "create_stream", "q", p_settings=Jsonb({"notify": notify}))
    value(conn, "create_consumer", "q", "c", p_ordering="key")
    seqs = [value(conn, "send", "q", "x", "k") for _ in range(4)]
    value(conn, "dead_letter", claim_of(call(conn, "receive", "q", "c", 1)))
    value(conn, "ack", claim_of(call(conn, "receive", "q", "c", 1)))
    calls = {"redrive": ["q", "c"], "resume": ["q", "c"], "cancel": ["q", "c", seqs[3:]]}
    for name, given in calls.items():
        conn.execute("begin")
        call(conn, name, *given)
        if notify:
            with pytest.raises(psycopg.errors.FeatureNotSupported):
                conn.execute("prepare transaction 'q'")
            conn.execute("rollback")
        else:
            conn.execute("prepare transaction 'q'")
            conn.execute("commit prepared 'q'")
