"""Whatever the user gives to be called: its body runs, or the call has failed, or it is refused."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ContextDecorator, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import spark_pgqueue
from spark_pgqueue import Consumer, Defer, PgQueueError, Reject, Retry
from spark_pgqueue.worker.handlers import handlings, run_all
from spark_pgqueue.worker.verdicts import Verdict
from tests import handlers

pytestmark = pytest.mark.usefixtures("allowed_afterwards", "nothing_ran")
CONSUMER = {"settings": {"max_deliver_count": 1}}
NOW = timedelta(0)

ran: list[Any] = []
"""What the bodies were called with."""


@pytest.fixture
def nothing_ran():
    ran.clear()


@pytest.fixture
def group(queue):
    """The name of a group."""
    queue.create_group("s", "g", partitions=1)
    return "g"


# The kinds of functions. All take what any place calls them with.


def body(given=None, connection=None, **fields):
    ran.append(given)


async def coroutine(given=None, connection=None, **fields):
    await asyncio.sleep(0)
    body(given)


def generator(given=None, connection=None, **fields):
    yield body(given)


async def async_generator(given=None, connection=None, **fields):
    yield body(given)


class Methods:
    """Each kind of method, of each kind of function."""

    def plain(self, given=None, connection=None, **fields):
        body(given)

    async def awaited(self, given=None, connection=None, **fields):
        await coroutine(given)

    def generated(self, given=None, connection=None, **fields):
        yield body(given)

    static = staticmethod(coroutine)
    static_generator = staticmethod(async_generator)

    @classmethod
    async def of_class(cls, given=None, connection=None, **fields):
        await coroutine(given)


class Awaitable:
    """Awaited, its body runs."""

    def __init__(self, given):
        self._given = given

    def __await__(self):
        return coroutine(self._given).__await__()


class Endless:
    """An iterator of Python code."""

    def __iter__(self):
        return self

    def __next__(self):
        body()


def object_of(function) -> Any:
    """An object that is called as the function."""
    source = "def __call__(self, given=None, connection=None, **fields): "
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        source = f"async {source}"
    how = "yield" if inspect.isasyncgenfunction(function) else "return await"
    if not source.startswith("async"):
        how = "yield" if inspect.isgeneratorfunction(function) else "return"
    made: dict[str, Any] = {"f": function}
    exec(f"{source} {how} f(given)", made)
    return type("Object", (), {"__call__": made["__call__"]})()


def decorated(function):
    """As most decorators do it: a function that calls another, and returns what that returns."""

    @functools.wraps(function)
    def call(*given, **named):
        return function(*given, **named)

    return call


def undecorated(function):
    """The same without a sign of what is within."""
    return lambda given=None, connection=None, **fields: function(given)


def giving(value):
    """Functions that return a value: one that is called, one that is awaited, and a decorated."""

    async def awaited(given=None, connection=None, **fields):
        return value(given)

    return [undecorated(value), awaited, decorated(awaited)]


async def started(given=None, connection=None, **fields):
    return asyncio.create_task(coroutine(given))


class Called:
    """Its objects are called, and not the class."""

    def __init__(self, given=None, connection=None, **fields):
        pass

    def __call__(self, given):
        body(given)


class Entered(ContextDecorator):
    """Its objects are entered; as a decorator, they are called, too."""

    def __init__(self, given=None, connection=None, **fields):
        pass

    def __enter__(self):
        ran.append("enter")

    def __exit__(self, *_):
        ran.append("leave")


class Bare(Reject):
    """A verdict that forgets to call `__init__` of its base."""

    def __init__(self):
        pass


def _ring() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


THREAD = ThreadPoolExecutor(1)
METHODS = Methods()

FEW: list[Any] = [
    body,
    coroutine,
    functools.partial(object_of(coroutine)),
    decorated(METHODS.awaited),
    undecorated(coroutine),
    started,
    giving(coroutine)[0],
    giving(Awaitable)[1],
    *giving(lambda given: THREAD.submit(body, given))[:2],
]
"""One of each kind of `RUN`: for a place that only has to call as the others do."""

RUN: list[Any] = [
    *FEW,
    functools.partial(functools.partial(METHODS.awaited)),
    METHODS.plain,
    Methods.static,
    Methods.of_class,
    object_of(body),
    decorated(body),
    decorated(decorated(METHODS.awaited)),
    functools.partial(decorated(coroutine)),
    object_of(undecorated(coroutine)),
    *giving(coroutine)[1:],
    *giving(Awaitable)[::2],
    giving(lambda given: THREAD.submit(body, given))[2],
]
"""Their bodies run, unless an async place refuses them."""

REFUSED: list[Any] = [
    generator,
    async_generator,
    functools.partial(functools.partial(async_generator)),
    METHODS.generated,
    Methods.static_generator,
    object_of(generator),
    functools.partial(object_of(async_generator)),
    functools.partial(contextmanager(generator)),
    asynccontextmanager(async_generator),
    functools.partial(Called),
    Entered,
]
"""No call runs their bodies, and one can see it before."""

UNDONE: dict[str, list[Any]] = {
    "an iterator that is never read: generator": [*giving(generator), decorated(generator)],
    "an iterator that is never read: async_generator": giving(async_generator),
    "an iterator that is never read: map": giving(lambda given: map(body, [given])),
    "an iterator that is never read: Endless": giving(lambda given: Endless()),
    "in a list, an awaitable that is never awaited: coroutine": [
        *giving(lambda given: [coroutine(given)]),
        *giving(lambda given: {"a": {"b": [coroutine(given)]}}),
        *giving(lambda given: [_ring(), [coroutine(given)]]),
    ],
    "in a dict, an iterator that is never read: generator": giving(
        lambda given: {"a": generator(given)}
    ),
    "in a tuple, an exception that is never raised: Retry": [
        *giving(lambda given: (1, Retry())),
        *giving(lambda given: [deque([(1, Retry())])]),
    ],
    "in a list, an exception that is never raised: OSError": giving(lambda given: [OSError]),
    "a function that is never called": [
        *giving(lambda given: lambda: body(given)),
        *giving(lambda given: functools.partial(body, given)),
        *giving(lambda given: METHODS.plain),
    ],
    "a context manager that is never entered": giving(contextmanager(generator)),
}
"""Only what they return says that their bodies have not run."""

VERDICTS: dict[tuple[str, str | None, str | None], list[Any]] = {
    ("dead", "max deliveries", "no"): giving(lambda given: Retry("no")),
    ("dead", "max deliveries", None): giving(lambda given: Retry),
    ("dead", "never", None): giving(lambda given: Reject("never")),
    ("dead", "rejected", None): [*giving(lambda given: Reject), *giving(lambda given: Bare())],
    ("dead", "in a group", None): giving(
        lambda given: ExceptionGroup("1", [ExceptionGroup("2", [Reject("in a group")])])
    ),
    ("delayed", None, None): giving(lambda given: Defer(timedelta(hours=1))),
    ("dead", "max deliveries", "ValueError: 7"): giving(lambda given: ValueError(7)),
    ("dead", "max deliveries", "ValueError"): giving(lambda given: ValueError),
    ("dead", "max deliveries", "StopIteration"): giving(lambda given: StopIteration())[:1],
    ("dead", "max deliveries", "SystemExit: 3"): giving(lambda given: SystemExit(3)),
    # No verdict of ours: else nothing would become of its message.
    ("dead", "max deliveries", "Verdict: odd"): giving(lambda given: Verdict("odd", None)),
}
"""What they return becomes of the message, as if they had raised it."""

DONE: list[Any] = [
    *giving(lambda given: body(given) or {"a": [1]}),
    *giving(lambda given: body(given) or object()),
    *giving(lambda given: body(given) or Path("/dev/null").open()),  # noqa: SIM115
    *giving(lambda given: body(given) or [object(), iter]),
]
"""Their work is done, whatever they return."""


# The places where a handler is called


def in_threads(url, handler, **options) -> int:
    return Consumer(url, "s", "c").run(handler, wait=NOW, **options)


def in_tasks(url, handler, **options) -> int:
    return asyncio.run(Consumer(url, "s", "c").run_async(handler, wait=NOW, **options))


def by_keyword(url, handler, **options) -> int:
    mark = spark_pgqueue.handler("s", "c", keywords=True, wait=NOW, **options)
    # A decorator marks what it is given; no other test is to find the mark.
    (handling,) = handlings(mark(functools.partial(handler)))
    return sum(run_all(url, [handling]))


HANDLING: dict[str, tuple[Any, dict[str, Any]]] = {
    "threads": (in_threads, {}),
    "threads, batch": (in_threads, {"batch": 5}),
    "threads, transactional batch": (in_threads, {"transactional": True, "batch": 5}),
    "tasks": (in_tasks, {}),
    "tasks, transactional batch": (in_tasks, {"transactional": True, "batch": 5}),
    "keywords, transactional": (by_keyword, {"transactional": True}),
}

each_place = pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=[pytest.mark.longer] * p.endswith("batch")) for p in HANDLING],
)


@each_place
def test_a_handler_runs_or_has_failed_or_is_refused(queue, url, place):
    work, options = HANDLING[place]

    def outcome_of(handler: Any) -> Any:
        ran.clear()
        seq = queue.send("s", json.dumps({"connection": 1}))
        try:
            count = work(url, handler, **options)
        except PgQueueError as error:
            said = str(error)
            (refused,) = queue.receive("s", "c").messages
            queue.cancel("s", "c", [seq])
            assert (refused.deliver_count, ran) == (1, []), handler
            return said
        found = queue.outcome("s", "c", seq)
        assert count == (found.state == "done"), handler
        assert len(ran) == count, handler
        if found.state == "delayed":
            queue.cancel("s", "c", [seq])
        return found

    # Threads and tasks have all that differs by its kind; all that comes back is judged at one
    # place, of which threads have called and awaited functions, and the others one of a sort.
    few = place.startswith("keywords")
    run = FEW if few else RUN
    which = {"threads": slice(2), "tasks": slice(1, 2)}.get(place, slice(1))
    for handler in [*run, *DONE[which]]:
        found: Any = outcome_of(handler)
        if isinstance(found, str):
            assert place.startswith("tasks"), (handler, found)
            assert "handler must be an async function" in found
            assert handler not in (coroutine, Methods.of_class)
        else:
            assert found.state == "done", (handler, found)
    for handler in REFUSED if place == "threads" else REFUSED[::5]:
        said = outcome_of(handler)
        assert isinstance(said, str), handler
        assert "handler must be a function whose body runs when it is called: " in said
        assert re.search("returns an? ", said), said
    undone = {("dead", "max deliveries", why): handlers for why, handlers in UNDONE.items()}
    for (*expected, error), functions in [*undone.items(), *VERDICTS.items()][:: 1 + 3 * few]:
        for handler in functions[which]:
            found = outcome_of(handler)
            if isinstance(found, str):
                assert "must be an async function" in found
                continue
            assert [found.state, found.reason] == expected, (handler, found)
            if error in UNDONE:
                assert f"returned {error}" in found.error, found.error
            else:
                assert found.error == error, found
    assert queue.stats("s")[0].claimed == 0


# In processes, where a handler travels by pickle


PROCESSED = {
    "note_later": ("done", None),
    "note_by_partial": ("done", None),
    "note_awaitable": ("done", None),
    "note_in_a_map": ("dead", "returned an iterator that is never read: map"),
    "retry_later": ("dead", "no"),
    "rejected": ("dead", None),
    "rejected_by_a_class_of_its_own": ("dead", "its own"),
    "note_and_return_the_unreadable": ("done", None),
}


def test_a_handler_in_a_process_runs_or_has_failed(queue, url, done):
    def run(handler: Any, *data: str) -> tuple[int, dict[int, Any]]:
        before = len(done())
        seqs = queue.send_batch("s", data)
        count = Consumer(url, "s", "c").run(handler, processes=1, wait=NOW)
        noted = {seq for seq, *_ in done()[before:]}
        return count, {seq: (queue.outcome("s", "c", seq), seq in noted) for seq in seqs}

    count, outcomes = run(handlers.do_by_name, *PROCESSED)
    assert count == sum(state == "done" for state, _ in PROCESSED.values())
    for name, (found, is_noted) in zip(PROCESSED, outcomes.values(), strict=True):
        state, said = PROCESSED[name]
        assert found.state == state, (name, found)
        assert (said or "") in (found.error or found.reason or ""), name
        assert is_noted == (state == "done"), name
    count, outcomes = run(handlers.note_by_partial, "x")
    assert (count, [noted for _, noted in outcomes.values()]) == (1, [True])
    with pytest.raises(PgQueueError, match=r"handler must be a function whose body runs"):
        run(functools.partial(async_generator), "x")


# Hooks


HOOKS = ["on_start", "on_success", "on_failure", "on_stop"]


@contextmanager
def wrapping(given):
    ran.append("enter")
    yield
    ran.append("leave")


@asynccontextmanager
async def wrapping_async(given):
    await asyncio.sleep(0)
    ran.append("enter")
    yield
    await asyncio.sleep(0)
    ran.append("leave")


async def wrap_later(given):
    return wrapping(given)


class Span:
    """An asynchronous context manager that is a class."""

    def __init__(self, given):
        pass

    async def __aenter__(self):
        ran.append("enter")

    async def __aexit__(self, *_):
        ran.append("leave")


def handle(message):
    if message.data == "bad":
        raise Retry("no")


async def handle_async(message):
    handle(message)


WAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "threads": (in_threads, handle, {}),
    "processes": (in_threads, handlers.fail_if_bad, {"processes": 1}),
    "tasks": (in_tasks, handle_async, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_runs_or_its_error_is_logged_or_it_is_refused(queue, url, way, caplog):
    work, handler, options = WAYS[way]
    kinds = FEW if way != "processes" else [undecorated(coroutine)]
    for function in kinds:
        if function is started and way != "tasks":
            continue  # its task needs the loop of the hook
        ran.clear()
        queue.send_batch("s", ["good", "bad"])
        assert work(url, handler, **dict.fromkeys(HOOKS, function), **options) == 1
        assert len(ran) == 4, function
    assert "a hook failed" not in caplog.text
    for name in HOOKS:
        for function in REFUSED:
            with pytest.raises(PgQueueError, match=f"^{name} must be a function whose body runs"):
                work(url, handler, **{name: function}, **options)
        with pytest.raises(PgQueueError, match=f"^the {name} .* must accept "):
            work(url, handler, **{name: lambda a, b, c: None}, **options)
    queue.send("s", "good")
    # what comes back is judged at one place; and the hooks of processes run where threads' do
    whys = {"threads": [*UNDONE, "Retry", "ValueError: 7"], "tasks": [*UNDONE][::4]}
    for why in whys.get(way, []):
        functions = giving(lambda given: ValueError(7) if "7" in why else Retry())  # noqa: B023
        for function in UNDONE.get(why, functions)[way == "tasks" :][:1]:
            caplog.clear()
            queue.send("s", "good")
            assert work(url, handler, on_success=function, **options) >= 1
            assert "a hook failed: on_success" in caplog.text
            assert why in caplog.text, function
            with pytest.raises((PgQueueError, Retry, ValueError)):
                work(url, handler, on_start=function, **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_wrap_is_entered_or_the_message_has_failed_or_it_is_refused(queue, url, way):
    work, handler, options = WAYS[way]
    here = [wrapping, functools.partial(wrapping), decorated(wrapping), wrap_later, Entered]
    there = [wrapping_async, functools.partial(wrapping_async), Span]
    if way == "processes":
        here, there = [handlers.wrap_later], [handlers.wrapping_async]
    for function in here + there * (way == "tasks"):
        ran.clear()
        queue.send("s", "good")
        assert work(url, handler, wrap=function, **options) == 1, function
        assert way == "processes" or ran == ["enter", "leave"], function
    for function in there * (way != "tasks"):
        queue.send("s", "good")
        with pytest.raises(PgQueueError, match=r"wrap must return a context manager: .* asynchr"):
            work(url, handler, wrap=function, **options)
        assert queue.receive("s", "c").ack() == 1
    for function in (generator, async_generator, functools.partial(generator)):
        with pytest.raises(PgQueueError, match=r"^wrap must be a function whose body runs"):
            work(url, handler, wrap=function, **options)
    if way == "processes":
        return
    for function, said in (
        (lambda message: None, "returned a NoneType"),
        (lambda message: Reject("odd"), None),
        *(((undecorated(wrapping_async), "returned a _Async"),) if way == "threads" else ()),
    ):
        seq = queue.send("s", "good")
        assert work(url, handler, wrap=function, **options) == 0
        found = queue.outcome("s", "c", seq)
        assert found.state == "dead"
        assert (said or "") in (found.error or "")


@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_a_wrap_that_swallows_an_error_leaves_the_message_done(queue, url, way):
    work, handler, options = WAYS[way]
    queue.send_batch("s", ["bad", "good"])
    assert work(url, handler, wrap=lambda message: suppress(Retry), **options) == 2


# Groups


def in_group(url, handler, wait=timedelta(milliseconds=20)) -> int:
    with spark_pgqueue.connect(url) as queue:
        return queue.group("s", "g").run(handler, wait=wait)


def in_async_group(url, handler) -> int:
    async def work():
        async with await spark_pgqueue.connect_async(url) as queue:
            group = await queue.group("s", "g")
            return await group.run(handler, wait=timedelta(milliseconds=20))

    return asyncio.run(work())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("work", [in_group, in_async_group])
def test_the_handler_of_a_group_runs_or_its_error_ends_the_run(queue, url, work):
    for handler in FEW:
        if handler is started and work is in_group:
            continue
        ran.clear()
        queue.send("s", "x")
        assert work(url, handler) == 1, handler
        assert len(ran) == 1
    queue.send("s", "x")
    ran.clear()
    for handler in REFUSED[::5]:
        with pytest.raises(PgQueueError, match=r"handler must be a function whose body runs"):
            work(url, handler)
    for why in [*UNDONE][::4]:
        with pytest.raises(PgQueueError, match=f"returned {why}"):
            work(url, UNDONE[why][0])
    for handler in giving(lambda given: Retry("no")):
        with pytest.raises(Retry):
            work(url, handler)
    with pytest.raises(PgQueueError, match=r"the handler .* must accept two arguments, the list"):
        work(url, lambda messages: None)
    with pytest.raises(PgQueueError, match="as its first argument and the connection as"):
        work(url, lambda connection, messages: None)
    assert not ran
    assert work(url, body) == 1, "no message was passed over"
    assert len(ran) == 1


@pytest.mark.usefixtures("group")
def test_a_groups_coroutine_runs_in_the_loop_of_its_caller_and_is_cancelled_with_it(queue, url):
    loops: list[asyncio.AbstractEventLoop] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(messages: Any, conn: Any) -> None:
        loops.append(asyncio.get_running_loop())
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def work() -> None:
        async with await spark_pgqueue.connect_async(url) as client:
            group = await client.group("s", "g")
            running = asyncio.create_task(group.run(handle))
            await begun.wait()
            assert loops == [asyncio.get_running_loop()]
            running.cancel()
            await ended.wait()
            with pytest.raises(asyncio.CancelledError):
                await running

    queue.send("s", "x")
    asyncio.run(work())
    assert in_group(url, body, timedelta(seconds=3)) == 1, "what was cancelled was undone"


# Loops


@pytest.mark.parametrize("work", [in_threads, in_tasks])
def test_all_that_is_awaited_runs_in_one_loop(queue, url, work):
    """Of the thread, which ends it; or that of the run."""
    loops = []

    async def note(*_):
        loops.append(asyncio.get_running_loop())

    queue.send_batch("s", ["x"] * 5)
    hooks = {"on_success": note} | ({"on_start": note, "on_stop": note} if work is in_tasks else {})
    assert work(url, undecorated(note) if work is in_threads else note, **hooks) == 5
    assert len(loops) == (10 if work is in_threads else 12)
    (loop,) = set(loops)
    assert loop.is_closed()


def test_a_run_that_is_cancelled_does_not_wait_for_its_first_hook(url, queue):
    async def work() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def start() -> None:
            begun.set()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                ended.set()
                raise

        run = asyncio.create_task(Consumer(url, "s", "c").run_async(coroutine, on_start=start))
        await begun.wait()
        run.cancel()
        await ended.wait()  # by that alone
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_sync_run_in_a_thread_with_a_loop_says_what_it_cannot_do(queue, url):
    async def work() -> None:
        with pytest.raises(PgQueueError, match="this thread already runs an event loop"):
            Consumer(url, "s", "c").run(body, on_start=coroutine)
        with pytest.raises(PgQueueError, match="this thread already runs an event loop"):
            Consumer(url, "s", "c").run(coroutine, wait=NOW)
        queue.send("s", "x")
        assert Consumer(url, "s", "c").run(undecorated(coroutine), wait=NOW) == 1

    asyncio.run(work())


# What a handler returns, where the consumer keeps it


@each_place
def test_a_result_that_postgres_cannot_hold_stops_no_worker(queue, url, place, caplog):
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(200_000)
    queue.alter_consumer("s", "c", {"keep_history": "1 day"})
    work, options = HANDLING[place]

    def kept(value: Any) -> Any:
        (function, awaited, _) = giving(lambda given: value)
        seq = queue.send("s", "{}")
        assert work(url, awaited if "tasks" in place else function, **options) == 1
        found = queue.outcome("s", "c", seq)
        assert found.state == "done"
        return found.result

    try:
        odd: list[Any] = ["\ud800", {"\udc00": 1}, "a\0", [float("nan")], object(), _ring()]
        if "transactional" not in options:  # which fails, and undoes what the handler did
            odd.append(10**140_000)
        for value in odd:
            kept(value)
        assert "what the handler returned must be serializable as JSON" in caplog.text
        assert kept("\ud83d\ude00 \U0001f600") == "\U0001f600 \U0001f600", "a pair is a character"
    finally:
        sys.set_int_max_str_digits(before)
