"""Whatever becomes of a message, no other message of its claim is lost, or waits for a timeout."""

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue import Client, Consumer, Defer, Reject, Retry
from spark_pgqueue.worker.attempts import Attempt
from spark_pgqueue.worker.in_flight import InFlightClaim
from spark_pgqueue.worker.job_queue import WorkerSlot, next_call
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.processes import Child
from spark_pgqueue.worker.verdicts import DeliveryState
from tests.sql.queue import ORDERINGS
from tests.unit.test_worker import each_way, either, left, result

SOON = timedelta(seconds=0.3)
LATER = timedelta(minutes=1)

pytestmark = pytest.mark.usefixtures("allowed_afterwards")
CONSUMER = None

ACKS = {"commit", "commit and raise", "roll back", "roll back and raise"}
CANCELS = {"cancel", "cancel and raise"}
RAISES = {"raise": RuntimeError, "retry none": lambda: Retry(messages=[]), "reject": Reject,
          "defer": Defer}  # fmt: skip
OUTCOMES = ["return", *ACKS, *CANCELS, *RAISES]


class Judge:
    """A handler that does what its message says, and knows which messages are over."""

    def __init__(self, url: str, queue: Client):
        self.url, self.queue = url, queue
        self.begun: Counter[int] = Counter()
        self.over: Counter[int] = Counter()
        self._turn = threading.Lock()  # of the client

    def __call__(self, message):
        self.begun[message.seq] += 1
        what = message.data if self.begun[message.seq] == 1 else "return"
        if what in ACKS:
            with psycopg.connect(self.url) as conn:
                Client(conn).ack_message(message)
                if what.startswith("roll back"):
                    conn.rollback()
        elif what in CANCELS:
            with self._turn:
                self.queue.cancel("s", "c", [message.seq])
        else:
            time.sleep(random.random() / 50)
        if what == "return" or what.startswith(("commit", "cancel")):
            self.over[message.seq] += 1
        if what.endswith("raise"):
            raise RuntimeError(what)
        if what in RAISES:
            raise RAISES[what]()


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_each_message_is_handled_whatever_becomes_of_those_beside_it(queue, url, ordering, most):
    settings = {"max_deliver_count": most, "backoff_base": "0 s", "visibility_timeout": "1 s"}
    queue.create_consumer("s", "c", ordering=ordering, settings=settings)
    for seed in range(2):
        chance, judge = random.Random(seed), Judge(url, queue)
        acts = OUTCOMES * 4
        chance.shuffle(acts)
        sent = queue.send_batch("s", acts, keys=[f"k{chance.randrange(6)}" for _ in acts])
        Consumer(url, "s", "c").run(judge, concurrency=4, wait=timedelta(seconds=1.5))
        dead = {each.seq for each in queue.read_dead("s", "c")}
        assert left(queue)[:2] == (0, 0)
        acted = dict(zip(sent, acts, strict=True))
        assert not {s: acted[s] for s in sent if not judge.begun[s]}, "lost without a call"
        assert not {s: acted[s] for s in sent if not (judge.over[s] or s in dead)}, "lost"


def test_an_acknowledgement_that_was_rolled_back_is_not_made_for_another_message(queue, url):
    queue.create_consumer("s", "c", settings={"visibility_timeout": "1 s", "backoff_base": "0 s"})
    first, _ = queue.send_batch("s", ["roll back", "slow"])
    got = []

    def handle(message):
        got.append(message.seq)
        if message.data == "slow":
            time.sleep(0.3)  # it ends the claim of both
        elif message.deliver_count == 1:
            with psycopg.connect(url) as conn:
                Client(conn).ack_message(message)
                conn.rollback()

    Consumer(url, "s", "c").run(handle, concurrency=2, wait=timedelta(seconds=2))
    assert got.count(first) == 2
    assert left(queue) == (0, 0, 0)


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_what_follows_a_dead_letter_comes_at_once(queue, url, ordering, most, caplog):
    settings = {"max_deliver_count": most, "visibility_timeout": LATER, "backoff_base": "1 ms"}
    queue.create_consumer("s", "c", ordering=ordering, settings=settings)
    queue.send_batch("s", ["bad", "x", "x", "slow"], keys=["a", "a", "a", "b"])
    got = []

    def handle(message):
        got.append(message.seq)
        if message.data == "bad":
            raise RuntimeError
        if message.data == "slow":
            time.sleep(0.2)

    began = time.monotonic()
    assert Consumer(url, "s", "c").run(handle, concurrency=4, wait=SOON) == 3
    assert time.monotonic() - began < 30
    assert [seq for seq in got if seq != 4] == [1] * most + [2, 3]
    assert left(queue) == (0, 0, 1)
    assert "is not live" not in caplog.text


def settled_by(queue, monkeypatch, in_flight):
    """The names of the calls by which a claim is settled."""
    calls = []

    def noting(name: str, call: Any) -> Any:
        def note(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return call(*given, **named)

        return note

    for name in ("ack", "nack", "defer", "dead_letter"):
        monkeypatch.setattr(queue, name, noting(name, getattr(queue, name)))
    in_flight.settle(queue)
    monkeypatch.undo()
    assert in_flight.is_over
    return calls


def in_flight_of(claim, **options):
    given = {"is_batch": False, "is_undone": False, "keeps_results": False} | options
    return InFlightClaim(claim, time.monotonic(), **given)


def delivered(queue):
    """The messages with the number of their delivery, in the order in which they come."""
    got = []
    while (claim := queue.receive("s", "c", 9, wait=timedelta(seconds=1))) is not None:
        got += [(message.seq, message.deliver_count) for message in claim.messages]
        claim.ack()
    return got


@pytest.mark.parametrize("ordering", ["key", "stream"])
@pytest.mark.parametrize(
    ("most", "verdict", "calls", "after"),
    [
        (5, Retry(delay=SOON), ["ack", "nack"], [(2, 2), (3, 1), (4, 1), (5, 1)]),
        (5, Defer(SOON), ["ack", "defer"], [(2, 1), (3, 1), (4, 1), (5, 1)]),
        (1, Retry(delay=SOON), ["ack", "nack", "defer"], [(3, 1), (4, 1), (5, 1)]),
    ],
    ids=["failed", "deferred", "dead"],
)
def test_what_a_failed_message_takes_out_of_its_claim_is_not_returned_again(
    queue, ordering, most, verdict, calls, after, caplog, monkeypatch
):
    """The claim is over then, and a call for it would warn that another worker took it over."""
    queue.create_consumer("s", "c", ordering=ordering, settings={"max_deliver_count": most})
    queue.send_batch("s", ["x"] * 5, keys=["a"] * 5)
    claim = queue.receive("s", "c", 5)
    first, second, *rest = claim.messages
    in_flight = in_flight_of(claim)
    in_flight.note([first], DeliveryState.done)
    in_flight.note([second], verdict)
    in_flight.note(rest, DeliveryState.unstarted)
    assert settled_by(queue, monkeypatch, in_flight) == calls
    assert delivered(queue) == after
    assert "is not live" not in caplog.text


@pytest.mark.parametrize("others", ["open", "unstarted"])
def test_what_a_failed_message_leaves_in_its_claim_is_returned(queue, others, caplog, monkeypatch):
    """Messages of another key, whose calls still run, or which did not begin."""
    queue.create_consumer("s", "c", ordering="key")
    queue.send_batch("s", ["x"] * 6, keys=["a", "a", "a", "b", "b", "b"])
    claim = queue.receive("s", "c", 6)
    messages = claim.messages
    in_flight = in_flight_of(claim)
    in_flight.note(messages[1:3], DeliveryState.unstarted)
    in_flight.note(messages[:1], Retry(delay=timedelta(0)))
    if others == "unstarted":
        in_flight.note(messages[3:], DeliveryState.unstarted)
        assert settled_by(queue, monkeypatch, in_flight) == ["nack", "defer"]
    else:
        in_flight.settle(queue)
        in_flight.note(messages[4:], DeliveryState.unstarted)
        in_flight.note(messages[3:4], Defer())
        assert settled_by(queue, monkeypatch, in_flight) == ["defer"]
    assert sorted(delivered(queue)) == [(1, 2), *((seq, 1) for seq in range(2, 7))]
    assert "is not live" not in caplog.text


@pytest.mark.parametrize("named", [[0], [1], [1, 3], [0, 4], [4]])
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_batch_that_names_its_failed_messages_is_returned_in_its_order(
    queue, ordering, named, caplog, monkeypatch
):
    """It was undone, as a transaction: the others come again, and have not failed."""
    queue.create_consumer("s", "c", ordering=ordering)
    queue.send_batch("s", ["x"] * 5, keys=["a"] * 5)
    claim = queue.receive("s", "c", 5)
    in_flight = in_flight_of(claim, is_batch=True, is_undone=True)
    failed = [claim.messages[i] for i in named]
    in_flight.note(claim.messages, Retry(messages=failed, delay=timedelta(0)))
    settled_by(queue, monkeypatch, in_flight)
    got = delivered(queue)
    assert sorted(got) == [(seq, 1 + (seq - 1 in named)) for seq in range(1, 6)]
    assert ordering == "none" or got == sorted(got)
    assert "is not live" not in caplog.text


@each_way
def test_a_cancelled_message_of_a_transactional_batch_holds_up_no_other(queue, url, awaited):
    """The transaction is undone, and the others come again: that is no failure of theirs."""
    settings = {"max_deliver_count": 1, "visibility_timeout": LATER}
    queue.create_consumer("s", "c", settings=settings)
    queue.send_batch("s", ["x"] * 10)
    sizes = []

    async def handle(messages, connection):
        sizes.append(len(messages))
        await result(connection.execute("select 1"))
        if len(sizes) == 1:
            queue.cancel("s", "c", [messages[3].seq])

    worker = Consumer(url, "s", "c")
    assert worker.run(either(awaited, handle), batch=10, transactional=True, wait=SOON) == 9
    assert sizes == [10, 9]
    assert left(queue) == (0, 0, 0)


@each_way
def test_a_handler_that_cancels_its_message_in_its_transaction_fails_in_the_end(
    queue, url, awaited
):
    """Each time, the cancellation is undone with the transaction."""
    queue.create_consumer("s", "c", settings={"max_deliver_count": 2, "backoff_base": "0 s"})
    queue.send("s", "x")
    calls = []

    async def handle(message, connection):
        calls.append(message.deliver_count)
        cancel = "select pgqueue.cancel('s', 'c', array[%s::bigint])"
        await result(connection.execute(cancel, [message.seq]))

    Consumer(url, "s", "c").run(either(awaited, handle), transactional=True, wait=SOON)
    assert calls == [1] * 4 + [2] * 4
    assert left(queue) == (0, 0, 1)
    assert "cancelled" in next(queue.read_dead("s", "c")).error


def test_the_hook_of_a_call_that_was_given_up_holds_up_nothing_else(queue, url):
    queue.create_consumer("s", "c", settings={"max_deliver_count": 1})
    queue.send("s", "slow")
    release, late, seen = threading.Event(), threading.Event(), []

    def handle(message):
        if message.data == "slow":
            release.wait(20)
        late.set()

    def report(message, error):
        with spark_pgqueue.connect(url) as other:
            other.send("s", "x")
        seen.append((str(error), late.wait(10)))
        release.set()

    moment = timedelta(milliseconds=200)
    worker = Consumer(url, "s", "c")
    worker.run(handle, concurrency=2, timeout=moment, wait=SOON, on_failure=report)
    assert seen == [("timed out after 0:00:00.200000", True)]
    assert left(queue) == (0, 0, 1)


def test_a_call_that_ends_at_its_timeout_is_reported_or_given_up_and_never_neither():
    """Of a call that has just ended, the next one is neither interrupted nor given up."""
    queue: Any = SimpleNamespace(is_closed=False, reports=[])

    def report(each):
        assert at is not None
        assert not slot.give_up(at, lambda: False), "it is reported"
        queue.reports.append(each)

    queue.report = report
    slot = WorkerSlot(queue)
    job: Any = SimpleNamespace(claim=SimpleNamespace(until=float("inf")), calls=[["a"], ["b"]])
    calls = slot.calls(job)
    next(calls)
    at = slot.at
    assert at is not None
    assert next_call(calls, DeliveryState.done) == ["b"]
    interrupted = []
    assert not slot.give_up(at, lambda: not interrupted.append("b"))
    assert not interrupted
    assert slot.at is not None
    assert not slot.give_up(slot.at, lambda: True), "it was ended, and reports that"
    assert slot.give_up(slot.at, lambda: False)
    assert next_call(calls, DeliveryState.done) is None
    assert [each.messages for each in queue.reports] == [["a"]], "of what is given up, the poller"


def test_what_waits_for_a_failed_message_is_reported_before_it():
    """Otherwise, the poller may settle the claim in between, and the claim is over then."""
    queue: Any = SimpleNamespace(is_closed=False, reports=[])
    queue.report = queue.reports.append
    slot = WorkerSlot(queue)
    job: Any = SimpleNamespace(
        claim=SimpleNamespace(until=float("inf")), calls=[["a"], ["b"], ["c"]]
    )
    calls = slot.calls(job)
    next(calls)
    assert next_call(calls, DeliveryState.done) == ["b"]
    assert next_call(calls, Retry()) is None
    seen = [(each.messages, each.has_ended) for each in queue.reports]
    assert seen == [(["a"], False), (["c"], False), (["b"], True)]


def test_a_call_that_was_interrupted_is_interrupted_again_a_second_later():
    """Its process may have been starting. Until then, the poller has nothing to do with it."""
    queue: Any = SimpleNamespace(is_closed=False, reports=[])
    queue.report = queue.reports.append
    slot = WorkerSlot(queue)
    job: Any = SimpleNamespace(claim=SimpleNamespace(until=float("inf")), calls=[["a"], ["b"]])
    calls = slot.calls(job)
    next(calls)
    at = slot.at
    assert at is not None
    assert slot.end_at(at, 0.25) == at[2] + 0.25
    before = time.monotonic()
    assert not slot.give_up(at, lambda: True)
    assert before + 1 <= slot.end_at(at, 0.25) <= time.monotonic() + 1
    assert next_call(calls, DeliveryState.done) == ["b"]
    assert slot.at is not None
    assert slot.end_at(slot.at, 0.25) == slot.at[2] + 0.25


def succeed(message):
    """A handler."""


def test_the_process_of_a_call_that_ended_in_time_is_replaced_before_the_next_call():
    """It was killed for its timeout just after it had sent what it returned."""
    child = Child(Attempt("s, c", succeed, Options(), None), timedelta(seconds=1))
    message: Any = SimpleNamespace(seq=1, deliver_count=1, _is_acked=False)
    try:
        assert child(1, [message])[0] is DeliveryState.done
        child.interrupt()
        assert child(1, [message])[0] is DeliveryState.done
    finally:
        with suppress(Exception):
            child.close()
