"""Whatever happens between a claim and its report: there is a report, and the run goes on."""

import asyncio
import inspect
import logging
import os
import pickle
import re
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pydantic
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader

import spark_pgqueue
from spark_pgqueue import Consumer, Defer, Message, Reject, Retry
from spark_pgqueue.postgres import connection
from spark_pgqueue.worker import attempts, tasks, threads
from spark_pgqueue.worker.by_name import by_name
from spark_pgqueue.worker.job_queue import WorkerSlot
from spark_pgqueue.worker.options import Options
from tests.unit.test_worker import each_way, either, result

MOMENT = timedelta(milliseconds=100)
CONSUMER = {"settings": {"max_deliver_count": 1}}


class NoText(Exception):
    """Its text is none."""

    def __str__(self) -> Any:
        return 3


class Bare(Retry):
    """Calls no other constructor."""

    def __init__(self):
        pass


class BareReject(Reject):
    """As `Bare`."""

    def __init__(self):
        self.reason = "a\0b\ud800"


class Odd(BaseException):
    """Of the user, and no Exception; lies about its cause."""

    @property
    def __notes__(self):  # type: ignore[override]
        raise MemoryError


class OddDict(dict):  # type: ignore[type-arg]
    """JSON can hold it once: then it changes while it is read, as by another thread."""

    was_read = False

    def items(self):  # type: ignore[override]
        if self.was_read:
            raise RuntimeError("dictionary changed size during iteration")
        self.was_read = True
        return super().items()

    def __repr__(self) -> str:
        raise ValueError("no text")


def deep():
    return deep()


def fail(message):
    """Fail as the message says."""
    what = message.data
    if what == "recursion":
        deep()
    if what == "exit":
        raise SystemExit(3)
    if what == "die" and os.environ.get("PGQUEUE_TEST_MAY_DIE"):
        os._exit(3)
    errors = {
        "no text": NoText(),
        "bare": Bare(),
        "bare reject": BareReject(),
        "odd details": Reject("odd", details=OddDict(a=1)),
        "odd state": Defer(timedelta(days=1), state=OddDict(a=1)),
        "odd": Odd("odd"),
        "interrupt": KeyboardInterrupt(),
        "memory": MemoryError(),
        "unencodable": ValueError("nul \0 and \ud800"),
        "stop": StopIteration(),
        "group": BaseExceptionGroup("g", [SystemExit(1), KeyboardInterrupt()]),
    }
    if what in errors:
        raise errors[what]


FAULTS = ["recursion", "exit", "die", "no text", "bare", "bare reject", "odd details",
          "odd state", "odd", "interrupt", "memory", "unencodable", "stop", "group"]  # fmt: skip


async def fail_async(message):
    """As `fail`, and ends the task of the call."""
    if message.data == "good":
        asyncio.current_task().cancel()  # type: ignore[union-attr]
    fail(message)


def fail_in_transaction(message, connection):
    """As `fail`."""
    fail(message)


@contextmanager
def replaced(message):
    """Replaces what comes by an error of its own."""
    try:
        yield
    except BaseException:
        raise NoText from None


def end(*_):
    """A hook that ends what calls it."""
    raise SystemExit(2)


WAYS = {
    "threads": (fail, {}),
    "transactional": (fail_in_transaction, {"transactional": True}),
    "tasks": (fail_async, {}),
    "processes": (fail, {"processes": 1}),
    "wrapped": (fail, {"wrap": replaced}),
}


@pytest.fixture
def no_logging():
    """Logging that fails."""

    class Fails(logging.Filter):
        def filter(self, record):
            raise MemoryError

    at, fails = logging.getLogger("spark_pgqueue.worker"), Fails()
    at.addFilter(fails)
    yield
    at.removeFilter(fails)


@pytest.mark.usefixtures("no_logging")
@pytest.mark.parametrize("way", WAYS)
def test_whatever_a_handler_does_its_message_is_reported_and_the_run_goes_on(
    queue, url, way, monkeypatch
):
    handler, options = WAYS[way]
    if way == "processes":
        monkeypatch.setenv("PGQUEUE_TEST_MAY_DIE", "1")
    expected = [each for each in FAULTS if each != "die" or way == "processes"]
    queue.send_batch("s", [*expected, "good"])
    hooks = {"on_failure": end, "on_success": end}
    assert Consumer(url, "s", "c").run(handler, wait=MOMENT, **hooks, **options) == 1
    (stats,) = queue.stats()
    assert (stats.backlog, stats.claims) == (0, 0)
    dead = queue.dead_letters("s", "c")
    assert sum(each.messages for each in dead) == len(expected)
    assert not [each.error for each in dead if "slot" in (each.error or "")], "the last resort"


@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_what_a_verdict_has_stays_as_it_was_when_it_was_raised(queue, url, way):
    seqs, shared = queue.send_batch("s", ["x"] * 20), {}

    def judge(message):
        shared["seq"] = message.seq
        if message.saved is None:
            raise Defer(timedelta(0), state=shared)
        raise Reject("judged", details={"saved": message.saved, "now": shared})

    async def judge_async(message):
        judge(message)

    Consumer(url, "s", "c").run(judge if way == "threads" else judge_async, wait=MOMENT)
    details = {each.seq: each.details for each in queue.read_dead("s", "c")}
    assert details == {seq: {"saved": {"seq": seq}, "now": {"seq": seq}} for seq in seqs}


def test_details_too_deep_for_the_thread_that_settles_fail_their_message(queue, url):
    queue.send_batch("s", ["x"] * 3)

    def reject(message):
        details: list[Any] = []
        for _ in range(700):
            details = [details]
        raise Reject("deep", details=details)

    def run(depth):
        return run(depth - 1) if depth else Consumer(url, "s", "c").run(reject, wait=MOMENT)

    assert run(500) == 0
    assert sum(each.messages for each in queue.dead_letters("s", "c")) == 3


def test_a_timeout_that_a_wrap_swallows_is_a_failure(queue, url):
    async def handle(message):
        await asyncio.sleep(60)

    @contextmanager
    def deaf(message):
        with suppress(asyncio.CancelledError):
            yield

    queue.send("s", "x")
    options = {"timeout": timedelta(milliseconds=50), "wait": MOMENT, "wrap": deaf}
    assert Consumer(url, "s", "c").run(handle, **options) == 0
    (dead,) = queue.dead_letters("s", "c")
    assert "timed out" in dead.error


def plant(monkeypatch, where):
    """A defect of ours: an error once, where none is expected."""
    once = ["x"]

    def broken(original):
        def broken(*given):
            if once:
                once.clear()
                raise MemoryError(where)
            return original(*given)

        return broken

    if where == "the loop of a slot":
        monkeypatch.setattr(threads.Threads, "_do", broken(threads.Threads._do))
        monkeypatch.setattr(tasks.Tasks, "_work", broken(tasks.Tasks._work))
    elif where == "after a call":
        monkeypatch.setattr(threads.Hooks, "after", broken(threads.Hooks.after))
        monkeypatch.setattr(threads.Hooks, "after_async", broken(threads.Hooks.after_async))
    else:  # the thread dies without a report
        plant(monkeypatch, "the loop of a slot")
        monkeypatch.setattr(WorkerSlot, "lose", broken(WorkerSlot.lose))
        once.append("x")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", ["threads", "tasks"])
@pytest.mark.parametrize("where", ["the loop of a slot", "after a call", "the report"])
def test_the_claim_of_a_slot_that_died_is_given_back(queue, url, where, way, monkeypatch):
    if (where, way) == ("the report", "tasks"):
        pytest.skip("the loop reports for its tasks")
    queue.create_consumer("s", "d")
    queue.send_batch("s", ["x", "y"])
    plant(monkeypatch, where)
    got = []

    async def handle_async(message):
        got.append(message.seq)

    handler = handle_async if way == "tasks" else lambda message: got.append(message.seq)
    Consumer(url, "s", "d").run(handler, wait=timedelta(seconds=1))
    with connection.connect(url) as conn:
        assert conn.execute("select count(*) from pgqueue.open_claims").fetchone() == (0,)
    assert set(got) == {1, 2}


def test_a_poller_with_a_defect_gives_back_what_it_has(queue, url, monkeypatch):
    queue.send_batch("s", ["x", "y"])

    def extend(poller, now):
        if poller._claims:
            raise ZeroDivisionError

    monkeypatch.setattr("spark_pgqueue.worker.poller.Poller._extend", extend)
    with pytest.raises(ZeroDivisionError):
        Consumer(url, "s", "c").run(lambda message: None)
    (stats,) = queue.stats()
    assert stats.claims == 0


@each_way
def test_a_stop_before_a_run_ends_that_run_and_no_other(queue, url, awaited):
    async def handle(message):
        pass

    queue.send("s", "x")
    worker = Consumer(url, "s", "c")
    worker.stop()
    assert worker.run(either(awaited, handle)) == 0
    assert worker.run(either(awaited, handle), wait=MOMENT) == 1


def test_what_is_claimed_ahead_has_a_bound_in_bytes(queue, url):
    """The first calls tell how large messages are."""
    queue.send_batch("s", ["x" * 100_000] * 40)
    most = []
    with spark_pgqueue.connect(url) as other:

        def handle(message):
            time.sleep(0.006)  # until what was handled before is settled
            most.append(other.stats()[0].claimed)

        Consumer(url, "s", "c").run(handle, wait=MOMENT, prefetch_bytes=300_000)
    assert len(most) == 40
    assert max(most) <= 6, "messages of 3 claims of at most 4"


@each_way
def test_a_transactional_handler_leaves_nothing_in_its_session(queue, url, awaited):
    look = (
        "select current_setting('work_mem'), current_user, current_setting('role'),"
        " (select count(*) from pg_prepared_statements),"
        " (select count(*) from pg_listening_channels()), to_regclass('pg_temp.t') is null,"
        " (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())"
    )
    seen = []
    change = (
        "set work_mem = '7MB'; listen x; prepare p as select 1;"
        " create temp table t (a int primary key, b int references t initially deferred);"
        " insert into t values (1, 1); select pg_advisory_lock(7); set role pg_monitor"
    )
    failed, notices = set(), []

    async def handle(message, connection):
        notices.clear()
        await result(connection.execute("do $$ begin raise notice 'x'; end $$"))
        seen.append(await result((await result(connection.execute(look))).fetchone()))
        seen[-1] = (*seen[-1], len(notices))
        connection.row_factory = dict_row
        connection.adapters.register_loader("int8", TextLoader)
        connection.add_notice_handler(notices.append)
        await result(connection.execute("do $$ begin raise notice 'x'; end $$"))
        await result(connection.execute(change))
        if message.data == "y" and not failed:
            failed.add(message.seq)
            raise Retry(delay=timedelta())

    queue.create_consumer("s", "d")
    queue.send_batch("s", ["x", "y", "z"])
    role = make_conninfo(url, options=f"-c role={conninfo_to_dict(url)['user']}")
    handler = either(awaited, handle)
    assert Consumer(role, "s", "d").run(handler, transactional=True, wait=MOMENT) == 3
    assert len(seen) == 4
    assert len(set(seen)) == 1


@each_way
def test_the_reset_of_a_session_costs_no_round_trip(queue, url, awaited, monkeypatch):
    """It goes with the acknowledgement, unless the transaction was undone."""
    resets = []
    monkeypatch.setattr(attempts, "RESET", "select 1 / 0")
    monkeypatch.setattr(tasks, "RESET", attempts.RESET)

    async def handle(message, connection):
        resets.append(connection.info.backend_pid)

    queue.send_batch("s", ["x", "y", "z"])
    handler = either(awaited, handle)
    assert Consumer(url, "s", "c").run(handler, transactional=True, wait=MOMENT) == 3
    assert len(set(resets)) == 1, "a reset that fails ends the connection"


def test_what_does_not_fit_a_signature_names_the_field(queue, url, caplog):
    def bill(order: int, shop: str | None = None):
        pass

    for data, said in (
        ('{"shop": "x"}', "'order'"),
        ('{"order": 1, "much": 2}', "'much'"),
        ('{"order": "7"}', "'order' must be int, not str: '7'"),
        ("[1]", "JSON object"),
        ("{", "JSON object"),
    ):
        caplog.clear()
        seq = queue.send("s", data)
        assert Consumer(url, "s", "c").run(by_name(bill, Options()), wait=timedelta()) == 0
        assert said in queue.outcome("s", "c", seq).error
        assert said in caplog.text.splitlines()[0]


@dataclass
class Line:
    product: str
    count: int = 1


@dataclass
class Order:
    lines: list[Line]
    gift: Line | None = None


class Customer(pydantic.BaseModel):
    name: str
    since: date


def test_fields_become_what_the_annotations_say(queue, url):
    """Dataclasses, models of Pydantic, lists of them; and the message where it is asked for."""
    seen = []

    def bill(order: Order, customer: Customer, *, message: Message, retry: bool = False) -> Message:
        seen.append((order, customer, message.seq, retry))
        return message

    customer = {"name": "ann", "since": "2026-11-30"}
    lines = [{"product": "pen", "count": 2}, {"product": "ink"}]
    queue.send("s", {"order": {"lines": lines}, "customer": customer})
    queue.send("s", {"order": {"lines": [], "gift": {"product": "pen"}}, "customer": customer})
    assert Consumer(url, "s", "c").run(by_name(bill, Options()), wait=timedelta()) == 2
    ann = Customer(name="ann", since=date(2026, 11, 30))
    assert seen == [
        (Order([Line("pen", 2), Line("ink")]), ann, 1, False),
        (Order([], Line("pen")), ann, 2, False),
    ]
    for data, said in (
        ({"order": {"lines": [{"product": 7}]}, "customer": customer}, "'order' must be str, not"),
        ({"order": {"line": []}, "customer": customer}, "'order' .*unexpected keyword .*'line'"),
        ({"order": 7, "customer": customer}, "'order' must be Order, not int: 7"),
        ({"order": {"lines": []}, "customer": {"name": "ann"}}, "'customer' 1 validation error"),
    ):
        seq = queue.send("s", data)
        assert Consumer(url, "s", "c").run(by_name(bill, Options()), wait=timedelta()) == 0
        assert re.search(said, queue.outcome("s", "c", seq).error)
    assert len(seen) == 2


@dataclass
class Cat:
    name: str
    lives: int = 9


@dataclass
class Dog:
    name: str
    barks: bool


class Card(pydantic.BaseModel):
    holder: str | None = None


class Transfer(pydantic.BaseModel):
    iban: str


class Opened(pydantic.BaseModel):
    kind: Literal["opened"]
    since: date


class Closed(pydantic.BaseModel):
    kind: Literal["closed"]
    since: date


Event = Annotated[Opened | Closed, pydantic.Field(discriminator="kind")]
Events = list[Event] | None


def test_a_union_becomes_the_member_that_a_field_fits(queue, url):
    seen = []

    def bill(pet: Cat | Dog, paid: Card | Transfer | None = None, events: Events = None):
        seen.append((pet, paid, events))

    rex = {"name": "rex", "barks": True}
    closed = {"kind": "closed", "since": "2026-11-30"}
    queue.send("s", {"pet": {"name": "tom"}, "paid": {"holder": "ann"}})
    queue.send("s", {"pet": rex, "paid": {"iban": "7"}, "events": [closed]})
    assert Consumer(url, "s", "c").run(by_name(bill, Options()), wait=timedelta()) == 2
    assert seen == [
        (Cat("tom"), Card(holder="ann"), None),
        (Dog("rex", True), Transfer(iban="7"), [Closed(kind="closed", since=date(2026, 11, 30))]),
    ]
    for data, said in (
        ({"pet": {"name": "rex", "barks": "yes"}}, "'pet' .*'barks'.*; must be bool, not str"),
        ({"pet": rex, "events": [{"kind": "closed"}]}, "'events' 1 validation error"),
        ({"pet": 7}, "'pet' must be .*Cat | .*Dog, not int: 7"),
    ):
        seq = queue.send("s", data)
        assert Consumer(url, "s", "c").run(by_name(bill, Options()), wait=timedelta()) == 0
        assert re.search(said, queue.outcome("s", "c", seq).error)


@dataclass
class Unknown:
    """A field is of a type that is imported under TYPE_CHECKING."""

    order: Any


Unknown.__annotations__["order"] = "NotImported"


@pytest.mark.parametrize(
    "annotation", ["NotImported", "list[NotImported]", "re.NotThere", list[Unknown]]
)
def test_a_worker_does_not_start_with_annotations_that_are_unknown(queue, url, annotation):
    def bill(order: int, message: Any = None):
        pass

    async def bill_async(order: int, message: Any = None):
        pass

    queue.send("s", {"order": 1})
    for function in (bill, bill_async):
        function.__annotations__["message"] = annotation
        worker = Consumer(url, "s", "c")
        said = rf"annotation of 'message' in .*{function.__name__} .*Not"
        with pytest.raises(spark_pgqueue.PgQueueError, match=said):
            worker.run(by_name(function, Options()), wait=timedelta())
    (stats,) = queue.stats()
    assert (stats.backlog, stats.dead) == (1, 0)


def test_an_annotation_that_no_field_needs_turns_nothing_off(queue, url):
    """Of the connection, and of what is returned; and a comment in place of one."""
    seen = []

    def bill(connection, order: Order, note="none"):
        seen.append((order, note))

    bill.__annotations__ |= {"connection": "NotImported", "return": "NotImported", "note": "a text"}
    queue.send("s", {"order": {"lines": []}})
    handler = by_name(bill, Options(transactional=True))
    assert Consumer(url, "s", "c").run(handler, wait=timedelta(), transactional=True) == 1
    assert seen == [(Order([]), "none")]


def test_fields_of_a_partial_and_of_an_object_are_converted_too():
    class Bill:
        def __call__(self, order: Order, shop: str = "") -> Any:
            return order, shop

    message: Any = SimpleNamespace(data='{"order": {"lines": []}}')
    for function in (partial(Bill(), shop="x"), partial(Bill.__call__, Bill(), shop="x")):
        assert by_name(function, Options())(message) == (Order([]), "x")


def test_a_signature_is_looked_at_once_and_the_handler_can_be_pickled_after_that(monkeypatch):
    looks = []

    def look(function):
        looks.append(function)
        return SIGNATURE(function)

    handler = by_name(takes_a_lambda, Options())
    monkeypatch.setattr(inspect, "signature", look)
    message: Any = SimpleNamespace(data='{"order": 7}')
    assert [handler(message) for _ in range(3)] == [7] * 3
    assert looks == [takes_a_lambda]
    assert pickle.loads(pickle.dumps(handler))(message) == 7


SIGNATURE = inspect.signature


def takes_a_lambda(order: int, price=lambda: 1):
    """Its signature cannot be pickled."""
    return order
