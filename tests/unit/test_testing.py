"""What `spark_pgqueue.testing` gives to the tests of those who build on the queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg.types.string import TextLoader

from spark_pgqueue import Defer, PgQueueError, Reject, Retry, handler
from spark_pgqueue.client.messages import Message
from spark_pgqueue.postgres import connection
from spark_pgqueue.testing import QueueTester, databases

pytest_plugins = "pytester"


@pytest.fixture
def pgqueue(url: str) -> Iterator[QueueTester]:
    with QueueTester(url) as tester:
        prepare(tester)
        yield tester


def prepare(tester: QueueTester) -> None:
    tester.client.create_stream("orders")
    settings = {"max_deliver_count": 3, "keep_history": timedelta(days=1)}
    tester.client.create_consumer("orders", "billing", settings=settings)
    tester.client.create_stream("invoices")
    tester.client.create_consumer("invoices", "mailing")


@pytest.fixture(params=["a database", "a transaction"])
def tester(request: pytest.FixtureRequest, url: str) -> Iterator[QueueTester]:
    """On a database, and on a connection of the caller's whose transaction is open, and which has
    a row factory and loaders of its own.
    """
    if request.param == "a database":
        with QueueTester(url) as tester:
            prepare(tester)
            yield tester
        return
    with psycopg.Connection[DictRow].connect(url, row_factory=dict_row) as conn:
        conn.adapters.register_loader("jsonb", TextLoader)
        conn.execute("create table before (id int)")
        tester = QueueTester(conn)
        prepare(tester)
        yield tester
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        conn.rollback()
        found = conn.execute("select count(*) from pgqueue.streams").fetchone()
        assert found == {"count": 0}


def test_a_handler_gets_all_messages_in_order_and_each_outcome_is_shown(
    tester: QueueTester,
) -> None:
    seen = []

    def bill(message: Message) -> str | bytes:
        seen.append(message.data)
        match message.data:
            case "reject":
                raise Reject("no such customer")
            case "defer":
                raise Defer(timedelta(hours=1))
            case "retry":
                raise Retry("no answer")
            case "wrong":
                raise ValueError("wrong")
        return message.data

    sent = ["done", "reject", "defer", "retry", "wrong"]
    tester.client.send_batch("orders", sent)
    drained = tester.drain(bill, "orders", "billing")
    assert seen == sent
    assert drained.handled == 1
    assert [type(each) for each in drained.errors] == [Reject, Defer, Retry, ValueError]
    assert tester.outcomes("orders", "billing") == {
        1: "done",
        2: "dead",
        3: "delayed",
        4: "delayed",
        5: "delayed",
    }
    assert [each.data for each in tester.sent("orders")] == sent
    assert tester.client.outcome("orders", "billing", 1).result == "done"


def test_what_is_not_there_is_an_error(pgqueue: QueueTester) -> None:
    for stream, consumer, sqlstate in (("no", "c", "PQ001"), ("orders", "no", "PQ002")):
        with pytest.raises(PgQueueError, match=sqlstate):
            pgqueue.outcomes(stream, consumer)
    assert pgqueue.outcomes("orders", "billing") == {}


def test_a_function_without_the_decorator_needs_a_stream_and_a_consumer(
    pgqueue: QueueTester,
) -> None:
    hint = r"or pass drain the function with its stream and consumer$"
    for function in (len, partial(len), json):
        with pytest.raises(PgQueueError, match=hint):
            pgqueue.drain(function)
    with pytest.raises(PgQueueError, match=hint):
        pgqueue.drain(len, "orders")


def test_what_is_due_later_comes_when_time_has_passed(tester: QueueTester) -> None:
    tester.client.send("orders", "later", delay=timedelta(hours=1))
    assert tester.drain(print, "orders", "billing").handled == 0
    tester.advance(minutes=59)
    assert tester.drain(print, "orders", "billing").handled == 0
    tester.advance(timedelta(minutes=2))
    assert tester.drain(print, "orders", "billing").handled == 1


@pytest.mark.promise("feature: tests of one's own code")
def test_retries_follow_without_waiting_until_the_message_is_done_or_dead(
    tester: QueueTester,
) -> None:
    counts = []

    def bill(message: Message) -> None:
        counts.append((message.data, message.deliver_count))
        if message.data == "never" or message.deliver_count < 2:
            raise Retry

    tester.client.send_batch("orders", ["never", "second"])
    assert tester.drain(bill, "orders", "billing", later=True).handled == 1
    assert sorted(counts) == [("never", n) for n in (1, 2, 3)] + [("second", n) for n in (1, 2)]
    assert tester.outcomes("orders", "billing") == {1: "dead", 2: "done"}


def test_a_lease_ends_when_time_has_passed(tester: QueueTester) -> None:
    tester.client.send("orders", "order 1")
    assert tester.client.receive("orders", "billing")
    assert tester.drain(print, "orders", "billing").handled == 0
    tester.advance(hours=1)
    assert tester.drain(print, "orders", "billing").handled == 1


def test_schedules_send_when_time_has_passed(pgqueue: QueueTester) -> None:
    pgqueue.client.create_schedule("orders", "daily", "report", every=timedelta(days=1))
    pgqueue.client.maintain()
    assert pgqueue.sent("orders") == []
    pgqueue.advance(days=1)
    pgqueue.client.maintain()
    assert [each.data for each in pgqueue.sent("orders")] == ["report"]


def test_a_schedule_does_not_keep_a_drain_of_what_is_due_later_going(pgqueue: QueueTester) -> None:
    """It is due later for ever. A message that fails is tried again all the same."""
    pgqueue.client.create_schedule("orders", "daily", "report", every=timedelta(days=1))
    pgqueue.client.send("orders", "order 1")
    seen: list[str | bytes] = []

    def bill(message: Message) -> None:
        seen.append(message.data)
        if seen == ["order 1"]:
            raise Retry

    assert pgqueue.drain(bill, "orders", "billing", later=True).handled == 1
    assert seen == ["order 1"] * 2


def test_what_is_held_back_ends_a_drain(pgqueue: QueueTester) -> None:
    """By a pause, and by a limit that a claim of the test has reached."""
    pgqueue.client.send_batch("orders", ["order 1", "order 2"])
    pgqueue.client.pause("orders", "billing")
    assert pgqueue.drain(print, "orders", "billing", later=True).handled == 0
    pgqueue.client.resume("orders", "billing")
    pgqueue.client.alter_consumer("orders", "billing", {"max_in_flight": 1})
    assert pgqueue.client.receive("orders", "billing")
    assert pgqueue.drain(print, "orders", "billing").handled == 0
    assert pgqueue.drain(print, "orders", "billing", later=True).handled == 2


@handler("orders", "billing")
def bill_marked(message: Message) -> None:
    assert tester_of_module is not None
    tester_of_module.client.send("invoices", f"invoice of {message.data}")


@handler("invoices", "mailing", batch=10)
async def mail_marked(messages: list[Message]) -> None:
    mailed.extend(message.data for message in messages)


tester_of_module: QueueTester | None = None
mailed: list[str | bytes] = []


@pytest.mark.parametrize("handled", [__name__, "the module", "a function"])
def test_all_handlers_of_a_module_run_until_none_has_a_message(
    tester: QueueTester, handled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one sends what the second one handles."""
    import sys

    monkeypatch.setattr(sys.modules[__name__], "tester_of_module", tester)
    mailed.clear()
    tester.client.send_batch("orders", ["order 1", "order 2"])
    if handled == "a function":
        assert tester.drain(bill_marked).handled == 2
        assert tester.drain(mail_marked).handled == 2
    else:
        module = sys.modules[__name__] if handled == "the module" else handled
        assert tester.drain(module).handled == 4
    assert mailed == ["invoice of order 1", "invoice of order 2"]


def test_the_effects_of_a_transactional_handler_are_undone_with_its_failure(
    pgqueue: QueueTester,
) -> None:
    def bill(message: Message, conn: psycopg.Connection) -> None:
        conn.execute("insert into bills values (%s)", [message.data])
        if message.data == "wrong":
            raise Retry

    with connection.connect(pgqueue.url) as conn:
        conn.execute("create table bills (data text)")
        pgqueue.client.send_batch("orders", ["order 1", "wrong"])
        assert pgqueue.drain(bill, "orders", "billing", transactional=True).handled == 1
        assert conn.execute("select data from bills").fetchall() == [("order 1",)]


def test_a_transactional_handler_is_refused_in_the_callers_transaction(url: str) -> None:
    with psycopg.connect(url) as conn:
        tester = QueueTester(conn)
        prepare(tester)
        with pytest.raises(PgQueueError, match="requires its own transaction"):
            tester.drain(lambda message, conn: None, "orders", "billing", transactional=True)


def test_a_message_that_is_never_done_ends_the_drain(
    pgqueue: QueueTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_pgqueue.testing.tester._MOST_CALLS", 50)

    def bill(message: Message) -> None:
        raise Defer(timedelta(hours=1))

    pgqueue.client.send("orders", "order 1")
    with pytest.raises(PgQueueError, match="still messages after 50 calls"):
        pgqueue.drain(bill, "orders", "billing", later=True)


def test_time_does_not_go_back(pgqueue: QueueTester) -> None:
    with pytest.raises(PgQueueError, match="by must be"):
        pgqueue.advance(hours=-1)


def test_time_that_passes_at_the_begin_of_a_transaction_is_undone_with_it(
    pgqueue: QueueTester, url: str
) -> None:
    pgqueue.client.send("orders", "later", delay=timedelta(hours=1))
    with psycopg.connect(url) as conn:
        QueueTester(conn).advance(hours=2)
        conn.rollback()
    assert pgqueue.drain(print, "orders", "billing").handled == 0


def test_a_handler_that_is_awaited_is_refused_where_a_loop_runs(pgqueue: QueueTester) -> None:
    counts = []

    async def bill(message: Message) -> None:
        counts.append(message.deliver_count)

    async def tell(message: Message, result: object) -> None: ...

    async def test() -> None:
        hint = r"await asyncio\.to_thread\(pgqueue\.drain, \.\.\.\)"
        with pytest.raises(PgQueueError, match=hint):
            pgqueue.drain(bill, "orders", "billing", later=True)
        with pytest.raises(PgQueueError, match=hint):
            pgqueue.drain(print, "orders", "billing", on_success=tell)
        await asyncio.to_thread(pgqueue.drain, bill, "orders", "billing")

    pgqueue.client.send("orders", "order 1")
    asyncio.run(test())
    assert counts == [1]


def test_a_handler_whose_annotations_are_unknown_is_refused(pgqueue: QueueTester) -> None:
    def bill(order: int) -> None: ...

    bill.__annotations__["order"] = "Unknown"
    handler("orders", "billing", keywords=True)(bill)
    with pytest.raises(PgQueueError, match="'Unknown'"):
        pgqueue.drain(bill)


def test_a_message_for_a_test_has_what_is_given_and_defaults() -> None:
    message = Message.for_test({"order": 1}, key="customer 7", deliver_count=2)
    assert message.data == '{"order": 1}'
    assert (message.seq, message.key, message.headers, message.deliver_count) == (
        1,
        "customer 7",
        {},
        2,
    )
    assert datetime.now(UTC) - message.inserted_at < timedelta(minutes=1)
    assert Message.for_test(b"\x00").data == b"\x00"
    with pytest.raises(PgQueueError, match="data must be serializable"):
        Message.for_test(object())


def test_a_database_for_a_test_is_a_copy_and_is_dropped(server, url: str) -> None:
    """Also of one in which the user's preparation has left a connection open."""
    left_open = []

    def prepare_all(made: str) -> None:
        left_open.append(psycopg.connect(made))
        with QueueTester(made) as tester:
            prepare(tester)

    with databases.template(server.url, prepare_all) as template:
        with databases.database(server.url, template) as copy, QueueTester(copy) as tester:
            tester.client.send("orders", "order 1")
        with databases.database(server.url, template) as copy, QueueTester(copy) as tester:
            assert tester.sent("orders") == []
    with connection.connect(server.url) as conn:
        left = conn.execute("select from pg_database where datname = %s", [template])
        assert left.rowcount == 0


def test_sessions_that_the_role_may_not_end_are_left(
    new_role: Callable[..., str], conn: psycopg.Connection
) -> None:
    """As an autovacuum worker's, of a role that may only create databases."""
    role = new_role()
    with psycopg.connect(role) as own:
        databases.end_sessions(make_conninfo(role, dbname="postgres"), conn.info.dbname)
        with pytest.raises(psycopg.OperationalError):
            own.execute("select 1")
    assert conn.execute("select 1").fetchone() == (1,)


def test_each_folder_of_tests_has_the_databases_of_its_own_setup(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    @contextmanager
    def template(server: str, prepare: Callable[[str], str]) -> Iterator[str]:
        made.append(prepare(server))
        yield made[-1]

    @contextmanager
    def database(server: str, template: str) -> Iterator[str]:
        yield f"a copy of {template}"

    monkeypatch.setattr(databases, "template", template)
    monkeypatch.setattr(databases, "database", database)
    for name in ("bank", "shop"):
        folder = pytester.mkdir(name)
        (folder / "conftest.py").write_text(
            "import pytest\n"
            "@pytest.fixture(scope='session')\n"
            f"def pgqueue_setup(): return lambda url: f'{name} on {{url}}'\n"
        )
        (folder / f"test_{name}.py").write_text(
            f"def test_one(pgqueue_url): assert pgqueue_url == 'a copy of {name} on URL'\n"
            "test_another = test_one\n"
        )
    known = request.config.pluginmanager.has_plugin("pgqueue")
    plugin = () if known else ("-p", "spark_pgqueue.testing.plugin")
    result = pytester.runpytest_inprocess("--pgqueue-url", "URL", *plugin)
    result.assert_outcomes(passed=4)
    assert sorted(made) == ["bank on URL", "shop on URL"]


def test_time_that_passes_renews_a_rate(pgqueue: QueueTester) -> None:
    settings = {"rate_limit": 2, "rate_interval": timedelta(hours=1)}
    pgqueue.client.alter_consumer("orders", "billing", settings=settings)
    pgqueue.client.send_batch("orders", list("abcde"))
    handle = partial(pgqueue.drain, lambda message: None, "orders", "billing")
    assert handle().handled == 2
    pgqueue.advance(hours=1, minutes=5)
    assert handle().handled == 2
    assert handle(later=True).handled == 1
