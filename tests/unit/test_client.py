import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.string import TextLoader

import spark_pgqueue
from spark_pgqueue.client import Claim, Client, Message, copying
from spark_pgqueue.postgres import connection, retrying, schema
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.loading import KINDS
from tests.conftest import user_of
from tests.sql import internals
from tests.unit.conftest import end_session

SECRET = "s3cr3t"
SECOND = timedelta(seconds=1)


def received(queue, n=1, stream="s", consumer="c", **options) -> Claim:
    claim = queue.receive(stream, consumer, n, **options)
    assert claim is not None
    return claim


@pytest.mark.previous_version
@pytest.mark.all_versions
def test_a_worker_receives_what_was_sent(queue):
    before = datetime.now(UTC)
    seq = queue.send("s", "one", key="k", headers={"a": "ü", "b": [1, None]}, priority=7)
    others = queue.send_batch("s", ["two", 'th\\r"e{e},', ""], keys=["x", None, "z"])
    claim = received(queue, 10)
    assert [m.seq for m in claim.messages] == [seq, *others]
    assert [m.data for m in claim.messages] == ["one", "two", 'th\\r"e{e},', ""]
    assert [m.key for m in claim.messages] == ["k", "x", None, "z"]
    first = claim.messages[0]
    assert first == Message(seq, "k", "one", {"a": "ü", "b": [1, None]}, 7, 1, first.inserted_at)
    assert abs(first.inserted_at - before) < timedelta(minutes=1)
    assert claim.messages[1].headers == {}
    assert queue.receive("s", "c") is None
    assert claim.ack() == 4
    assert queue.stats()[0].claims == 0


@pytest.fixture(params=["array", "copy"])
def way(request, monkeypatch):
    """How a batch is sent: as a small one is, or as a large one."""
    monkeypatch.setattr(copying, "WORTH_IT", 0 if request.param == "copy" else 1 << 60)
    return request.param


@pytest.mark.previous_version
@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("text", ["", "a\tb\nc\\N", "ü€𐍈"]),
        ("json", ["1", '{"a": "\\u00e4"}', " []"]),
        ("binary", [b"", b"\0\xff", b"\\x00"]),
    ],
)
@pytest.mark.promise("feature: many at once")
def test_a_batch_arrives_as_it_was_sent_whether_it_is_large_or_small(queue, way, kind, data):
    queue.create_stream("t", kind)
    for consumer in ("c", "d"):
        queue.create_consumer("t", consumer)
    keys, headers = ["k", None, "x\n"], [None, {"ü": ['"', None]}, {}]
    options = {"keys": keys, "headers": headers, "priority": -7, "consumers": ["c"]}
    seqs = queue.send_batch("t", data, **options)
    claim = received(queue, 10, "t")
    assert [(m.seq, m.data, m.key, m.headers, m.priority) for m in claim.messages] == [
        (*each, h or {}, -7) for *each, h in zip(seqs, data, keys, headers, strict=True)
    ]
    assert queue.receive("t", "d") is None
    late = datetime.now(UTC) + timedelta(hours=1)
    queue.send_batch("t", data, keys=[None] * 3, deliver_at=late)
    assert queue.receive("t", "c") is None
    (stats,) = [s for s in queue.stats("t") if s.consumer == "c"]
    assert stats.delayed == 3
    rows = queue._statements.rows("select key from pgqueue.messages where key = 'k'")
    assert len(rows) == 1


@pytest.mark.previous_version
def test_what_was_sent_with_a_dedup_key_is_not_sent_again_large_or_small(queue, way):
    with pytest.raises(PgQueueError, match="has no dedup_window") as caught:
        queue.send("s", "a", dedup_key="k")
    assert caught.value.sqlstate == "PQ003"
    queue.alter_stream("s", {"dedup_window": timedelta(hours=1)})
    first = queue.send("s", "a", dedup_key="k")
    assert queue.send("s", "b", dedup_key="k") == first
    seqs = queue.send_batch("s", list("cdef"), dedup_keys=["k", "l", None, "l"])
    assert (seqs[0], seqs[3]) == (first, seqs[1])
    claim = received(queue, 10)
    assert [(m.seq, m.data) for m in claim.messages] == [
        (first, "a"), (seqs[1], "d"), (seqs[2], "e")
    ]  # fmt: skip
    for keys in (["k"], ["k", ""], ["k", 1]):
        with pytest.raises(PgQueueError, match="dedup_key"):
            queue.send_batch("s", ["x", "y"], dedup_keys=keys)
    assert queue.receive("s", "c") is None


REFUSED = [
    ("nope", ["x"], {}, "PQ001", "unknown stream 'nope'"),
    ("s", ["x"], {"consumers": ["nope"]}, "PQ002", "unknown consumer 'nope'"),
    ("s", ["x"], {"consumers": []}, "PQ003", "consumers is empty"),
    ("s", ["x", "y"], {"keys": ["k", "k" * 1025]}, "PQ003", "longer than 1,024 bytes"),
    ("s", ["x"], {"keys": ["k", "l"]}, "PQ003", "one element per message"),
    ("s", ["x"], {"headers": [{"h": "x" * 70_000}]}, "PQ003", "at most 65536 bytes"),
    ("small", ["x", "four"], {}, "PQ004", "at most 3 bytes, not 4"),
    ("s", [b"x"], {}, "PQ004", "a message of stream 's' (text) must have text as data"),
    ("j", ["1", "{"], {}, "PQ004", "of 1 byte, is not valid JSON"),
    ("b", ["x"], {}, "PQ004", "a message of stream 'b' (binary) must have bytes as data"),
]


def test_a_batch_is_refused_as_a_whole_whether_it_is_large_or_small(queue, way):
    queue.create_stream("small", settings={"max_bytes": 3})
    queue.create_stream("j", "json")
    queue.create_stream("b", "binary")
    for stream, data, options, sqlstate, says in REFUSED:
        with pytest.raises(PgQueueError) as caught:
            queue.send_batch(stream, data, **options)
        assert caught.value.sqlstate == sqlstate, says
        assert says in str(caught.value)
        for table in ("messages", "publications", "reservations"):
            assert queue._statements.row(f"select count(*) from pgqueue.{table}") == (0,), says
    assert queue.send_batch("s", ["x"])


def test_a_batch_is_part_of_the_callers_transaction_whether_it_is_large_or_small(queue, way, url):
    for autocommit in (True, False):
        with psycopg.connect(url, autocommit=autocommit) as conn:
            mine = Client(conn)
            with conn.transaction(force_rollback=True):
                mine.send_batch("s", ["no"])
            with conn.transaction():
                mine.send_batch("s", ["yes"])
                assert queue.receive("s", "c") is None
        assert [m.data for m in received(queue, 10).messages] == ["yes"]
    with psycopg.connect(url, autocommit=True) as conn, conn.pipeline():
        Client(conn).send_batch("s", ["pipelined"])
    assert received(queue, 10).messages[0].data == "pipelined"


def test_who_may_only_call_send_batch_sends_large_batches_too(queue, way, conn, new_role):
    role = user_of(new_role())
    conn.execute(f"grant usage on schema pgqueue to {role}".encode())
    functions = "pgqueue.schema_version, pgqueue.send_batch"
    conn.execute(f"grant execute on function {functions} to {role}".encode())
    conn.execute(f"set role {role}".encode())
    Client(conn).send_batch("s", ["x"])
    conn.execute("reset role")
    assert received(queue, 10).messages[0].data == "x"


def test_threads_that_share_a_client_do_not_get_into_each_others_batches(queue, way):
    """One of them fails all the time; nobody else's messages go with it."""
    queue.create_stream("j", "json")

    def send(i: int) -> int:
        if i % 2:
            with pytest.raises(PgQueueError):
                queue.send_batch("j", ["1", "{"])
            return 0
        return len(queue.send_batch("s", ["x", "y"])) + (queue.send("s", "z") > 0)

    with ThreadPoolExecutor(4) as pool:
        sent = sum(pool.map(send, range(100)))
    assert len(received(queue, 1000).messages) == sent == 150


@pytest.mark.previous_version
@pytest.mark.promise("feature: waiting without polling")
def test_waiting_ends_with_the_publication(queue, url):
    """The best of three, sent just after a look: the next look is nearly a second away."""
    latencies = []
    for data in "abc":
        sent = []

        def send(data=data, sent=sent):
            with spark_pgqueue.connect(url) as producer:
                producer.send("s", data)
            sent.append(time.monotonic())

        timer = threading.Timer(0.2, send)
        timer.start()
        claim = received(queue, wait=20 * SECOND)
        latencies.append(time.monotonic())
        timer.join()
        latencies[-1] -= sent[0]
        assert [message.data for message in claim.messages] == [data]
        assert claim.ack() == 1
    assert min(latencies) < 0.4


def test_waiting_ends_with_a_delay_or_a_schedule_at_once(queue):
    """Both notify nobody: the client asks when they are due, and not each second only."""
    at = queue.send("s", "late", deliver_at=datetime.now(UTC) + 1.3 * SECOND)
    claim = received(queue, wait=20 * SECOND)
    assert claim.messages[0].seq == at
    late = datetime.now(UTC) - claim.messages[0].inserted_at
    assert late < 1.7 * SECOND
    planned = queue.create_schedule("s", "h", "x", every=2 * SECOND, headers={"a": 1})
    (message,) = received(queue, ack=claim, wait=20 * SECOND).messages
    assert message.headers == {"a": 1, "schedule": "h", "planned_at": f"{planned:%Y-%m-%dT%XZ}"}
    assert timedelta() <= message.inserted_at - planned < 0.4 * SECOND
    (schedule,) = queue.schedules("s")
    assert (schedule.every, schedule.data, schedule.last_seq) == ("00:00:02", "x", message.seq)
    assert schedule.next_at == planned + 2 * SECOND
    again = queue.schedule_times(every="2 s", start=planned, after=planned, count=1)
    assert again == [schedule.next_at]


@pytest.mark.previous_version
@pytest.mark.parametrize("notify", [True, False])
@pytest.mark.promise("feature: waiting for a result")
def test_waiting_for_a_message_ends_when_it_is_done(queue, url, notify):
    """At once where the consumer notifies; else by asking again."""
    queue.alter_consumer("s", "c", {"keep_history": "1 day", "notify_done": notify})
    seq, dead, left = queue.send_batch("s", ["x", "y", "z"])
    assert not queue.wait_for("s", "c", seq, 0.1 * SECOND).is_final

    def work():
        with spark_pgqueue.connect(url) as worker:
            for message in (claim := received(worker, 2)).messages:
                time.sleep(0.5)
                if message.seq == seq:
                    claim.ack([message], result={"total": 12})
                else:
                    claim.dead_letter([message], reason="bad", details=[1])

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        done = queue.wait_for("s", "c", seq, 20 * SECOND)
        assert (done.state, done.result, done.is_final) == ("done", {"total": 12}, True)
        if notify:
            assert datetime.now(UTC) - done.ended_at < 0.3 * SECOND
        gone = queue.wait_for("s", "c", dead, 20 * SECOND)
        assert (gone.state, gone.result, gone.reason) == ("dead", [1], "bad")
        working.result()
    assert queue.wait_for("s", "c", left, timedelta()).state == "ready"
    (kept,) = queue.history("s", "c", since=datetime.now(UTC) - timedelta(hours=1))
    assert (kept.seqs, kept.result, kept.done_at) == ([(seq, seq)], {"total": 12}, done.ended_at)
    with queue.transaction(), pytest.raises(PgQueueError, match=r"^wait requires a connection"):
        queue.wait_for("s", "c", left, SECOND)


def test_waiting_is_over_in_time_and_acknowledges_first(queue):
    queue.send("s", "one")
    claim = received(queue)
    began = time.monotonic()
    assert queue.receive("s", "c", ack=claim, wait=0.3 * SECOND) is None
    assert 0.3 <= time.monotonic() - began < 10
    assert queue.stats()[0].claims == 0
    assert queue.receive("s", "c", wait=timedelta()) is None


def test_waiting_for_a_stream_that_is_dropped_says_so(queue, url):
    def drop():
        with spark_pgqueue.connect(url) as other:
            other.drop_stream("s")

    timer = threading.Timer(0.2, drop)
    timer.start()
    with pytest.raises(PgQueueError, match="s") as error:
        queue.receive("s", "c", wait=20 * SECOND)
    timer.join()
    assert error.value.sqlstate == "PQ001"


def test_waiting_on_a_lost_connection_says_so_and_the_next_call_connects(queue, conn):
    timer = threading.Timer(0.2, end_session, [conn, queue])
    timer.start()
    with pytest.raises(PgQueueError, match="lost") as error:
        queue.receive("s", "c", wait=20 * SECOND)
    timer.join()
    assert "reconnects" in str(error.value)
    assert queue.receive("s", "c", wait=0.1 * SECOND) is None


def test_waiting_where_nothing_could_be_heard_is_an_error(queue, url):
    with queue.transaction(), pytest.raises(PgQueueError, match=r"^wait requires a connection"):
        queue.receive("s", "c", wait=SECOND)
    with connection.connect(url) as conn, pytest.raises(PgQueueError, match=r"^wait requires"):
        Client(conn).receive("s", "c", wait=SECOND)
    with pytest.raises(PgQueueError, match=r"^wait must be at least 0"):
        queue.receive("s", "c", wait=-SECOND)
    with pytest.raises(PgQueueError, match=r"^wait must be a timedelta, not int"):
        queue.receive("s", "c", wait=5)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("p_max", "max_messages"), ("p_data_bytes", "data"), ("p_by", "by")]
)
def test_an_argument_that_the_database_names_is_named_as_here(queue, theirs, ours):
    sql = "do $$ begin raise '% is wrong', '{0}' using errcode = 'PQ003', column = '{0}'; end $$"
    with pytest.raises(PgQueueError) as error:
        queue._value(sql.format(theirs).replace("%", "%%"))
    assert (error.value.message, error.value.argument) == (f"{ours} is wrong", theirs)


@pytest.mark.previous_version
def test_parts_of_a_claim_are_settled_by_their_messages(queue):
    queue.send_batch("s", ["done", "failed", "hopeless", "rest"])
    claim = received(queue, 4)
    done, failed, hopeless, _ = claim.messages
    assert claim.ack([done]) == 1
    assert claim.ack([done]) == 0  # not held any more
    assert claim.ack([]) == 0
    assert claim.nack([failed], delay=SECOND * 0, reason="try again") == 1
    assert claim.dead_letter([hopeless], reason="no", details={"line": 3}) == 1
    assert claim.extend(SECOND * 60) == 1
    assert received(queue).messages[0].deliver_count == 2
    states = queue._statements.rows(
        "select state, last_error from pgqueue.message_states order by seq"
    )
    assert states == [("claimed", "try again"), ("dead", "no"), ("claimed", None)]
    dead = internals.dead_letters(queue._statements.connection())
    assert [row.details for row in dead] == [{"line": 3}]


@pytest.mark.previous_version
def test_a_stale_claim_answers_0_and_logs_a_warning(queue, caplog):
    queue.send("s", "x")
    claim = received(queue, visibility_timeout=SECOND / 1000)
    time.sleep(1.1)  # expired leases are looked for once a second
    other = received(queue)
    for settle in (claim.ack, claim.nack, claim.extend, claim.dead_letter):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert settle() == 0
        assert f"claim {claim.claim_id} is not live" in caplog.text
        assert caplog.records[0].name == "spark_pgqueue.client"
    caplog.clear()
    assert other.ack() == 1
    assert not caplog.records


def test_one_warning_whatever_the_number_of_clients_and_none_of_other_code(conn, caplog):
    clients = [Client(conn) for _ in range(3)]
    conn.execute("do $$ begin raise warning 'of the caller'; end $$")
    assert clients[0].ack(999) == 0
    assert len(caplog.records) == 1


@pytest.mark.previous_version
def test_dead_letters_are_read_redriven_and_purged(queue):
    queue.create_consumer("s", "d")
    queue.send_batch("s", ["x"] * 1203, headers=[{"h": 1}] * 1203)
    claim = queue.receive("s", "d", 2000)
    claim.dead_letter(reason="no such user", details=["any", "thing"])
    found = list(queue.read_dead("s", "d"))
    assert [each.seq for each in found] == [each.seq for each in claim.messages]
    assert (found[0].data, found[0].headers, found[0].reason) == ("x", {"h": 1}, "no such user")
    assert (found[0].details, found[0].deliver_count) == (["any", "thing"], 1)
    (group,) = queue.dead_letters("s", "d")
    assert (group.messages, group.first_seq, group.last_seq) == (
        1203, found[0].seq, found[-1].seq,
    )  # fmt: skip
    with pytest.raises(PgQueueError, match="time zone"):
        queue.read_dead("s", "d", before=datetime(2026, 1, 1))
    assert queue.redrive("s", "d", before=found[0].died_at) == 0
    assert queue.redrive("s", "d") == 1000
    assert queue.purge_dead("s", "d", [found[-1].seq]) == 1
    assert queue.redrive("s", "d", max_messages=None, reset=False) == 202
    assert len(queue.receive("s", "d", 2000).messages) == 1202


def test_settings_take_a_timedelta_and_none(queue):
    queue.create_consumer("s", "k", settings={"visibility_timeout": SECOND * 0.25})
    (consumer,) = [each for each in queue.consumers("s") if each.name == "k"]
    assert consumer.settings == {"visibility_timeout": "00:00:00.25"}
    queue.alter_consumer("s", "k", {"visibility_timeout": None, "max_deliver_count": 3})
    (consumer,) = [each for each in queue.consumers("s") if each.name == "k"]
    assert consumer.settings == {"max_deliver_count": 3}
    queue.alter_stream("s", {"max_bytes": 3, "dedup_window": SECOND * 90})
    assert queue.streams()[0].settings == {"max_bytes": 3, "dedup_window": "00:01:30"}
    with pytest.raises(PgQueueError, match="settings must be a dict"):
        queue.alter_stream("s", ["max_bytes"])
    with pytest.raises(PgQueueError, match="settings must be serializable as JSON"):
        queue.alter_consumer("s", "k", {"max_deliver_count": object()})


# Transactions and connections


@pytest.mark.previous_version
def test_a_transaction_takes_effect_as_a_whole(queue, url):
    def backlog():
        with spark_pgqueue.connect(url) as other:
            return other.stats()[0].backlog

    with queue.transaction() as same:
        assert same is queue
        queue.send("s", "one")
        assert backlog() == 0
        queue.send("s", "two")
    assert backlog() == 2

    def fail():
        with queue.transaction():
            queue.send("s", "three")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert backlog() == 2


def test_a_connection_of_the_caller_with_factories_of_its_own(url, queue):
    with psycopg.connect(url, cursor_factory=psycopg.RawCursor) as mine:
        mine.row_factory = dict_row  # type: ignore[assignment]
        client = Client(mine)
        mine.execute("create table orders (id int)")
        client.send("s", "rolled back")
        mine.rollback()
        assert queue.receive("s", "c") is None
        mine.execute("create table orders (id int)")
        client.send("s", "committed")
        assert queue.receive("s", "c") is None
        mine.commit()
        assert received(queue).messages[0].data == "committed"
        client.close()
        assert not mine.closed
        assert mine.execute("select 1 as one").fetchone() == {"one": 1}


class Naive(TimestamptzLoader):
    """Times without a zone, as Django's with USE_TZ=False."""

    def load(self, data):
        return super().load(data).replace(tzinfo=None)


def test_a_connection_of_the_caller_with_loaders_of_its_own(url, queue):
    """As Django's, over which JSON is text."""
    queue.alter_consumer("s", "c", {"keep_history": timedelta(days=1)})
    seq = queue.send("s", "x", headers={"a": 1})
    queue.create_schedule("s", "daily", "x", every=timedelta(days=1), headers={"b": 2})
    received(queue).ack(result={"billed": 7})
    with psycopg.connect(url, autocommit=True) as mine:
        for kind in KINDS:
            mine.adapters.register_loader(kind, TextLoader)
        mine.adapters.register_loader("timestamptz", Naive)
        client = Client(mine)
        assert client.outcome("s", "c", seq).result == {"billed": 7}
        assert list(client.read("s")) == list(queue.read("s")) != []
        for each in ("streams", "consumers", "schedules"):
            assert getattr(client, each)() == getattr(queue, each)() != []
        assert mine.execute("select '{}'::jsonb").fetchone() == ("{}",)


def test_a_lost_connection_is_an_error_and_then_replaced(queue, conn):
    end_session(conn, queue)
    with pytest.raises(PgQueueError, match="was lost") as caught:
        queue.send("s", "x")
    assert "the next call reconnects" in (caught.value.hint or "")
    assert retrying.is_passing(caught.value)
    queue.send("s", "y")
    assert received(queue, 9).messages[0].data == "y"


def test_a_connection_lost_in_a_transaction_is_not_replaced_inside(queue, conn):
    def lose(goes_on):
        with queue.transaction():
            queue.send("s", "x")
            end_session(conn, queue)
            if goes_on:
                with pytest.raises(PgQueueError, match="was lost"):
                    queue.send("s", "y")
                queue.send("s", "z")

    for goes_on in (True, False):
        with pytest.raises(PgQueueError, match="was lost"):
            lose(goes_on)
    assert queue.receive("s", "c") is None


def test_a_connection_of_the_caller_is_not_replaced(url, conn):
    with connection.connect(url) as mine:
        client = Client(mine)
        end_session(conn, client)
        for _ in range(2):
            with pytest.raises(PgQueueError, match="was lost") as caught:
                client.send("s", "x")
            assert "connect again" in (caught.value.hint or "")


def test_a_closed_client_stays_closed(url):
    with spark_pgqueue.connect(url) as queue:
        queue.streams()
    queue.close()
    with pytest.raises(PgQueueError, match="the connection is closed"):
        queue.streams()


def test_errors_of_other_code_in_a_transaction_stay_as_they_are(queue):
    with pytest.raises(psycopg.errors.AdminShutdown), queue.transaction():
        raise psycopg.errors.AdminShutdown("of another connection")
    queue.streams()


# The schema


@pytest.mark.parametrize("change", [1, -2])
def test_another_schema_version_is_refused_by_each_new_connection(queue, conn, change):
    """... so a program that an upgrade cut off does not go on with functions that it misreads."""
    assert queue.streams()
    conn.execute("update pgqueue.installed set version = version + %s", [change])
    end_session(conn, queue)
    with pytest.raises(PgQueueError, match="the connection to Postgres was lost"):
        queue.streams()
    with pytest.raises(PgQueueError, match="requires version"):
        queue.streams()


def test_the_previous_schema_version_serves_clients_and_nothing_else(queue, conn):
    conn.execute("update pgqueue.installed set version = version - 1")
    end_session(conn, queue)
    with pytest.raises(PgQueueError, match="the connection to Postgres was lost"):
        queue.streams()
    assert queue.send("s", "x")
    with pytest.raises(PgQueueError, match=f"requires version {schema.expected_version()}"):
        schema.check(conn)


def test_a_url_is_no_connection_and_is_not_shown():
    with pytest.raises(PgQueueError, match="must be a string, not int"):
        spark_pgqueue.connect(7)  # type: ignore[arg-type]
    with pytest.raises(PgQueueError, match=r"psycopg\.Connection, not str"):
        Client(f"postgresql://u:{SECRET}@h/d")  # type: ignore[arg-type]


# Bad input

# (method, *arguments) and what the error must say. A pair is a named argument. What the database
# alone judges is here once for each kind: tests/sql/test_bad_input.py has every argument.
BAD = [
    (("create_stream", 7), "name must be a str, not int"),
    (("create_stream", "x\0"), "name holds a NUL character"),
    (("create_stream", "s"), "'s' already exists, with kind text"),
    (("create_stream", "x", None), "kind must be a str, not NoneType"),
    (("create_stream", "x", ("if_not_exists", 1)), "if_not_exists must be True or False, not int"),
    (("drop_stream", "nope"), "unknown stream 'nope'"),
    (("create_consumer", "s", "x", ("start", datetime(2026, 1, 1))), "start must have a time zone"),
    (("create_consumer", "s", "x", ("start", 7)), "start must be a str"),
    (
        ("create_schedule", "s", "x", "y", ("every", "1 parsec")),
        "every must be an interval with a unit: 500 ms, 30 s or 5 minutes, not '1 parsec'",
    ),
    (("schedule_times", ("every", "soon")), "every must be an interval with a unit"),
    (("create_consumer", "s", "x", ("settings", 5)), "settings must be a dict, not int"),
    (("create_consumer", "s", "x", ("where", "$.data >")), "where must be a jsonpath "),
    (("seek", "s", "c", datetime(2026, 1, 1)), "to must have a time zone"),
    (("consumers", "nope"), "unknown stream 'nope'"),
    (("stats", "nope"), "unknown stream 'nope'"),
    (
        ("send", "s", None),
        "data must be a str, a dict or a list, or bytes for a binary stream, not",
    ),
    (("send", "s", {"a": {1}}), "data must be serializable as JSON"),
    (("send", "s", "x", ("delay", 7)), "delay must be a timedelta, not int"),
    (
        (
            "send",
            "s",
            "x",
            ("delay", timedelta()),
            ("deliver_at", datetime(2026, 1, 1, tzinfo=UTC)),
        ),
        "delay is relative and deliver_at a point in time: only one of them can be given",
    ),
    (("send", "s", b"x"), "a message of stream 's' (text)"),
    (("send", "s", "x\0"), "data holds a NUL character"),
    (("send", "s", "\ud800"), "data is not Unicode text"),
    (("send", "s", "x", ("key", 7)), "key must be a str, not int"),
    (("send", "s", "x", ("headers", ["a"])), "headers must be a dict, not list"),
    (("send", "s", "x", ("headers", {"a": SECOND})), "headers must be serializable as JSON"),
    (("send", "s", "x", ("headers", {"a": "\0"})), "headers holds a NUL character"),
    (("send", "s", "x", ("priority", 32768)), "priority must be from -32768 to 32767, not 32768"),
    (("send", "s", "x", ("priority", 1.5)), "priority must be an int, not float"),
    (("send", "s", "x", ("deliver_at", datetime(2026, 1, 1))), "deliver_at must have a time zone"),
    (("send", "s", "x", ("deliver_at", "now")), "deliver_at must be a datetime, not str"),
    (("send", "s", "x", ("consumers", "c")), "consumers must be a list, not str"),
    (("send", "s", "x", ("consumers", [7])), "consumers[0] must be a str"),
    (("send_batch", "s", "xyz"), "data must be a list, not str"),
    (("send_batch", "s", 7), "data must be a list, not int"),
    (("send_batch", "s", ["x", b"y"]), "data[1] must be a str"),
    (("send_batch", "s", [b"x", "y"]), "data[1] must be bytes"),
    (("send_batch", "s", ["x", None]), "data[1] must be a str"),
    (("send_batch", "s", ["x"], ("keys", [7])), "keys[0] must be a str"),
    (("send_batch", "s", ["x"], ("headers", {"a": "b"})), "headers must be a list, not dict"),
    (("send_batch", "s", ["x"], ("headers", [7])), "headers[0] must be a dict"),
    (("send_batch", "nope", []), "unknown stream 'nope'"),
    (("receive", "s", "c", 0), "max_messages must be from 1 to 2147483647, not 0"),
    (("receive", "s", "c", 2**31), "max_messages must be from 1 to 2147483647"),
    (("receive", "s", "c", ("visibility_timeout", -SECOND)), "longer than 0 and up to 10 years"),
    (("receive", "s", "c", ("ack", "one")), "ack must be an int, not str"),
    (("receive", "s", "c", ("ack", 0)), "ack must be from 1 to 9223372036854775807, not 0"),
    (("ack", "1"), "claim_id must be an int, not str"),
    (("ack", 0), "claim_id must be from 1"),
    (("ack", 1, 7), "seqs must be a list, not int"),
    (("ack", 1, [None]), "seqs[0] must be an int, not NoneType"),
    (("nack", 1, ("delay", 5)), "delay must be a timedelta, not int"),
    (("nack", 1, ("reason", 5)), "reason must be a str"),
    (("extend", 1, timedelta()), "by must be an interval longer than 0"),
    (("dead_letter", 1, ("details", {1, 2})), "details must be serializable as JSON"),
    (("maintain", timedelta()), "staged_age must be an interval longer than 0"),
    (("set_archive", "s", "/a", ("keep_for", timedelta())), "keep_for must be "),
    (("key_stats", "s", "c", ("limit", 0)), "limit must be from 1"),
    (
        ("set_retention", "s", ("keep_for", timedelta())),
        "keep_for must be an interval longer than 0",
    ),
    (("set_retention", "s", ("size", 0)), "size must be null or at least 1"),
    (("retention", "no"), "unknown stream 'no'"),
]


def test_bad_input_is_one_clear_error_and_changes_nothing(queue):
    before = len(queue.streams()), queue.consumers(), queue.stats()
    for (method, *arguments), expected in BAD:
        positional = [a for a in arguments if not isinstance(a, tuple)]
        named = dict(a for a in arguments if isinstance(a, tuple))
        with pytest.raises(PgQueueError) as caught:
            getattr(queue, method)(*positional, **named)
        assert expected in caught.value.message, (method, *arguments)
        assert not re.search(r"\bp_", caught.value.message)
    assert (len(queue.streams()), queue.consumers(), queue.stats()) == before


def test_the_hint_for_a_name_in_use_has_the_arguments_of_python(queue):
    with pytest.raises(PgQueueError, match=r"Hint: Set if_not_exists .*, use alter_consumer\."):
        queue.create_consumer("s", "c")
    queue.create_schedule("s", "daily", "x", cron="@daily")
    with pytest.raises(PgQueueError, match=r"Hint: To change it, set replace\."):
        queue.create_schedule("s", "daily", "x", cron="@daily")


def test_data_of_the_wrong_kind_says_what_fits(queue):
    queue.create_stream("j", "json")
    queue.create_stream("b", "binary")
    for stream, data in (("j", "{"), ("j", b"1"), ("b", "x"), ("s", b"x")):
        for send in (queue.send, lambda s, d: queue.send_batch(s, [d])):
            with pytest.raises(PgQueueError, match=f"message of stream '{stream}'") as caught:
                send(stream, data)
            assert caught.value.sqlstate == "PQ004"
            assert "bytes for a binary stream" in (caught.value.hint or "")


def test_claims_take_their_messages_in_a_list(queue):
    queue.send("s", "x")
    claim = received(queue)
    with pytest.raises(PgQueueError, match="messages must be a list, not Message"):
        claim.ack(claim.messages[0])  # type: ignore[arg-type]
    with pytest.raises(PgQueueError, match=r"messages\[0\] must be a Message, not int"):
        claim.ack([claim.messages[0].seq])  # type: ignore[list-item]
    assert claim.ack() == 1


def test_a_read_only_server_says_so(url):
    with connection.connect(url) as conn:
        conn.execute("select pgqueue.create_stream('s')")
        conn.execute("set default_transaction_read_only = on")
        with pytest.raises(PgQueueError, match="read-only") as caught:
            Client(conn).send("s", "x")
        assert "primary" in (caught.value.hint or "")


@pytest.mark.previous_version
def test_a_dict_or_a_list_is_sent_as_json_and_read_as_json(queue):
    """Also beside text in a batch, and by COPY, which takes what is large."""
    sent = [{"order": 1}, [1, "two"], {"text": "x" * (3 << 20)}]
    queue.create_stream("j", "json")
    queue.create_consumer("j", "c")
    assert queue.send("j", sent[0]) == 1
    assert queue.send_batch("j", [*sent[1:], '"text"']) == [2, 3, 4]
    sent.append("text")
    assert [each.json() for each in queue.peek_at("j", 1, 9)] == sent
    assert [each.json() for each in queue.peek("j", "c")] == sent
    assert [each.json() for batch in queue.read("j") for each in batch.messages] == sent
    claim = queue.receive("j", "c", max_messages=9)
    assert [each.json() for each in claim.messages] == sent
    claim.dead_letter()
    assert [each.json() for each in queue.read_dead("j", "c")] == sent


def test_data_that_is_no_json_is_named(queue):
    queue.create_stream("t")
    queue.send("t", "no json")
    with pytest.raises(PgQueueError, match="the data of message 1 is not JSON"):
        queue.peek_at("t", 1)[0].json()


@pytest.mark.parametrize("data", [["x"], ["x" * (3 << 20)]], ids=["call", "copy"])
def test_a_delay_is_from_now_on_by_the_databases_clock(queue, data):
    queue.create_stream("t")
    before = datetime.now(UTC)
    queue.send("t", data[0], delay=timedelta(hours=1))
    queue.send_batch("t", data, delay=timedelta(hours=1))
    for each in queue.peek_at("t", 1, 9):
        assert before <= each.deliver_at - timedelta(hours=1) <= datetime.now(UTC)
