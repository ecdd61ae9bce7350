"""What a test does with a queue: run handlers at once, let time pass, ask for outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg

from spark_pgqueue import calling
from spark_pgqueue.client import arguments
from spark_pgqueue.client.client import Client, connect
from spark_pgqueue.client.messages import Message, PublishedMessage
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.testing import clock
from spark_pgqueue.worker.attempts import Attempt, Hooks
from spark_pgqueue.worker.consumer import check_annotations, options_of
from spark_pgqueue.worker.handlers import Handling, handlings
from spark_pgqueue.worker.importing import import_named
from spark_pgqueue.worker.in_flight import InFlightClaim

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PAGE = 100_000  # the most messages that one call reads
_MOST_CALLS = 10_000
_MOST_IDLE = 24  # the most times that time passes and no message comes
_UNFINISHED: LiteralString = """
select exists (select from pgqueue.message_states
               where stream = %s and consumer = %s and state <> 'dead')"""


@dataclass
class Drained:
    """What handlers did in one `QueueTester.drain`.

    Attributes:
        handled: how many messages were handled and acknowledged.
        errors: what the handlers raised, in the order of the calls: also `Retry`, `Reject` and
            `Defer`.
    """

    handled: int = 0
    errors: list[BaseException] = field(default_factory=list)


class QueueTester:
    """A queue in a test. The fixture `pgqueue` is one.

        >>> pgqueue = QueueTester(url)
        >>> pgqueue.drain(lambda message: print(message.data), "orders", "billing").handled
        order 1
        order 2
        2
        >>> pgqueue.outcomes("orders", "billing")
        {1: 'done', 2: 'done'}

    Args:
        on: the url of a database that is for tests; or an open connection of psycopg, whose
            transaction the caller may roll back.

    Attributes:
        client (Client): the client: of that database, or on that connection.
        url (str | None): the url that was given.
    """

    def __init__(self, on: str | psycopg.Connection[Any]):
        self.url: str | None = on if isinstance(on, str) else None
        self.client: Client = connect(on) if isinstance(on, str) else Client(on)

    def __enter__(self) -> QueueTester:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def sent(self, stream: str) -> list[PublishedMessage]:
        """The messages of a stream, in the order of their numbers."""
        found: list[PublishedMessage] = []
        while page := self.client.peek_at(stream, found[-1].seq + 1 if found else 1, _PAGE):
            found += page
        return found

    def outcomes(self, stream: str, consumer: str) -> dict[int, str]:
        """The state of each message for a consumer, by its number: see `Outcome.state`.

        For the result, the reason or the error of one, call `client.outcome`.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer.
        """
        self.client._call("open_consumer", "1", stream=stream, consumer=consumer)
        return {
            each.seq: self.client.outcome(stream, consumer, each.seq).state
            for each in self.sent(stream)
        }

    def advance(self, by: timedelta = timedelta(), **units: float) -> None:
        """Let time pass at once: delays, backoff, leases, schedules and retention become due.

        Schedules send, and retention deletes, at the next `client.maintain()`. The clock of the
        server does not change; the times that the queue has stored move into the past. Use it only
        on a database for tests.

            >>> seq = queue.send("orders", "order 3", delay=timedelta(hours=1))
            >>> pgqueue.advance(hours=1)
            >>> pgqueue.drain(lambda message: None, "orders", "billing").handled
            3

        Args:
            by: the time.
            units: or the arguments of `timedelta`: `hours=1`.

        Raises:
            PgQueueError: the time is negative, or not a timedelta.
        """
        seconds = arguments.patience("by", by + timedelta(**units))
        if self.url is None:
            self.client._value("select 1")  # begins the caller's transaction, if it is not in one
        clock.pass_time(self.client._statements.connection(), timedelta(seconds=seconds))

    def drain(
        self,
        handler: Callable[..., Any] | ModuleType | str,
        stream: str | None = None,
        consumer: str | None = None,
        *,
        later: bool = False,
        **options: Any,
    ) -> Drained:
        """Call handlers until no message is left for them, as a worker would, and without waiting.

        All runs in this thread, one call at a time: what a handler sends to another one's stream
        is handled, too. An error of a handler is a failure of the message; it is in the result, and
        in the log.

        Args:
            handler: a function with the decorator `spark_pgqueue.handler`; or a module with such
                functions, or its name, for all of them; or any function, with stream and consumer.
            stream: the stream's name, for a function without the decorator.
            consumer: the consumer's name, likewise.
            later: also handle what is due later, such as retries: time passes until it is.
            options: as for `Consumer.run`. The handler's own timeout, concurrency and
                processes have no effect.

        Raises:
            PgQueueError: the handlers have no stream and consumer, or there is still a message
                after 10,000 calls; a handler is to be awaited, and this thread runs an event loop;
                PQ001, PQ002.
        """
        arguments.flag("later", later)
        done, before = Drained(), -1
        handled = [
            each._replace(options={**each.options, **options})
            for each in _handlings(handler, stream, consumer)
        ]
        for each in handled:
            _check(each)
        calls = idle = 0
        while calls > before:
            before = calls
            for each in handled:
                for claim_calls in self._calls(each, done):
                    calls += claim_calls
                    if calls > _MOST_CALLS:
                        raise PgQueueError(
                            f"there are still messages after {_MOST_CALLS} calls of the handlers",
                            hint="a message that is always retried or deferred never finishes",
                        )
            idle = idle + 1 if calls == before else 0
            if later and 0 < idle < _MOST_IDLE and (due := self._next_due(handled)) is not None:
                # Longer each time: with a limit of the consumer, the next look is due at once.
                self.advance(seconds=max(due, 0.01) * 2 ** (idle - 1))
                before = -1
        return done

    def _next_due(self, handled: Sequence[Handling]) -> float | None:
        """Seconds until the first message is due; None without one: a schedule does not count."""
        times = [
            self.client._due(each.stream, each.consumer)
            for each in handled
            if self.client._value(_UNFINISHED, each.stream, each.consumer)
        ]
        return min((max(t, 0.0) for t in times if t is not None), default=None)

    def run_query(
        self,
        query: Callable[[DataFrame], DataFrame],
        messages: DataFrame,
        *,
        kind: str = "text",
        output_mode: str = "append",
    ) -> DataFrame:
        """Run a streaming query of Spark over messages to its end, and return its result.

            >>> rows = [("eu", "order 1"), ("us", "order 2")]
            >>> messages = spark.createDataFrame(rows, "key string, data string")
            >>> def of_europe(frame):
            ...     return frame.where("key = 'eu'").select("data")
            >>> pgqueue.run_query(of_europe, messages).collect()
            [Row(data='order 1')]

        The messages are sent to a stream of their own, which the query reads with a consumer.

        Args:
            query: what is tested: from the streaming frame of the source to the frame that is
                written.
            messages: a row for each message, with the columns that the sink takes.
            kind: of the stream: text, json or binary.
            output_mode: of the query: append, update or complete.

        Returns:
            a frame with what the query wrote.

        Raises:
            PgQueueError: the tester is on a connection, from which Spark cannot read.
        """
        from spark_pgqueue.testing.queries import run_query

        if self.url is None:
            raise PgQueueError("Spark cannot read your open transaction: use QueueTester(url)")
        return run_query(query, messages, self.client, self.url, kind, output_mode)

    def _calls(self, each: Handling, done: Drained) -> Iterator[int]:
        """Handle all messages of a consumer; yields the number of calls for each claim."""
        options = options_of(each.options)
        if options.transactional and self.url is None:
            raise PgQueueError(
                "a transactional handler requires its own transaction, but this connection is in "
                "yours",
                hint="use the fixture pgqueue, or QueueTester(url)",
            )
        of = f"{each.stream!r}, {each.consumer!r}"
        hooks, attempt = Hooks(of, options), Attempt(of, each.function, options, self.url)
        hooks.run("on_start")
        try:
            while claim := self.client.receive(each.stream, each.consumer, options.batch or 1):
                in_flight = InFlightClaim(
                    claim,
                    0.0,
                    is_batch=options.batch is not None,
                    is_undone=options.transactional,
                    keeps_results=True,
                )
                calls: list[Sequence[Message]] = list(chain(*in_flight.calls("none")))
                for messages in calls:
                    outcome, result = attempt(claim.claim_id, messages)
                    hooks.after(messages, outcome, result)
                    done.handled += in_flight.note(messages, outcome)
                    if isinstance(result, BaseException):
                        done.errors.append(result)
                in_flight.settle(self.client)
                yield len(calls)
        finally:
            attempt.close()
            hooks.run("on_stop")


def _handlings(
    handler: Callable[..., Any] | ModuleType | str, stream: str | None, consumer: str | None
) -> list[Handling]:
    if stream is not None and consumer is not None and callable(handler):
        return [Handling(handler, stream, consumer, {})]
    found = import_named(handler) if isinstance(handler, str) else handler
    return handlings(found, "pass drain the function with its stream and consumer")


def _check(each: Handling) -> None:
    """Refuse a handler for a reason that is no failure of a message, before the first claim."""
    options = options_of(each.options)
    check_annotations(each.function, options)
    hooks = (options.on_start, options.on_success, options.on_failure, options.on_stop)
    if any(map(calling.is_async, (each.function, options.wrap, *hooks))):
        calling.check_no_loop("await asyncio.to_thread(pgqueue.drain, ...)")
