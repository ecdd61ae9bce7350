"""A call of the handler, and the outcome that the call has for its messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from logging import ERROR
from typing import TYPE_CHECKING, Any, Literal, LiteralString

import psycopg
from psycopg.rows import tuple_row

from spark_pgqueue import calling
from spark_pgqueue.client.messages import Message
from spark_pgqueue.postgres.connection import LeftOpenError, in_open_transaction, odd_settings
from spark_pgqueue.postgres.errors import PgQueueError, translated
from spark_pgqueue.postgres.retrying import is_passing
from spark_pgqueue.printable import summary
from spark_pgqueue.worker.log import warn
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.verdicts import (
    Defer,
    DeliveryState,
    Outcome,
    Reject,
    Result,
    Retry,
    Verdict,
    of_error,
    of_result,
    trace,
)

if TYPE_CHECKING:
    from spark_pgqueue.client.client import Client

RESET: LiteralString = (
    "set constraints all immediate; reset session authorization; reset role; reset all; close all;"
    " unlisten *; discard temp; discard sequences; deallocate all;"
    " select pg_catalog.pg_advisory_unlock_all();"
)
"""Resets the session for the next handler. Unlike DISCARD ALL, it can run in a transaction, and it
keeps plans. Deferred constraints of the handler are checked first, with the handler's role."""

ACK: LiteralString = RESET + " select pgqueue.ack(%s::bigint, %s::bigint[], %s::jsonb)"
"""The acknowledgement, the last statement of a handler's transaction. It needs a client cursor,
because it is several statements; the last result is the acknowledgement's."""

_MOST_LOSSES = 3
"""The number of losses after which a message has failed, counted by each thread."""

_PAUSE = timedelta(seconds=1)  # before the next delivery, after a lost connection

_KEPT = ("row_factory", "cursor_factory", "server_cursor_factory", "prepare_threshold",
         "prepared_max")  # fmt: skip
_CALLBACKS = ("_notice_handlers", "_notify_handlers")


def kept(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> dict[str, Any]:
    """The attributes of a connection that a handler may change, with their values."""
    return {
        **{name: getattr(conn, name) for name in _KEPT},
        **{name: getattr(conn, name)[:] for name in _CALLBACKS},
        "_adapters": None,  # psycopg makes it at its first use, from the program's adapters
    }


def set_again(
    conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], before: dict[str, Any]
) -> None:
    """Restore the values of `kept`. psycopg forgets prepared statements: they are deallocated."""
    conn._prepared.clear()
    for name, value in before.items():
        setattr(conn, name, value)


class Hooks:
    """Calls the user's hooks after each call of the handler. An error of a hook is logged.

    Args:
        of: the stream and the consumer, for the log.
        options: the worker's options.
    """

    def __init__(self, of: str, options: Options):
        self.of: str = of
        self._options = options

    def run(self, name: Literal["on_start", "on_stop"]) -> None:
        """Call the hook for the begin or the end of a run, if there is one. Its error is raised."""
        if (hook := getattr(self._options, name)) is not None:
            calling.call(hook)

    async def run_async(self, name: Literal["on_start", "on_stop"]) -> None:
        """As `run`, in the running loop."""
        if (hook := getattr(self._options, name)) is not None:
            await calling.call_async(hook)

    def after(self, messages: Sequence[Message], outcome: Outcome, result: Any) -> None:
        """Call the hook for an outcome; `result` is the handler's return value, or its error."""
        if hook := self._hook_of(outcome):
            try:
                calling.call(hook, self._given(messages), result)
            except BaseException as error:  # also what would end the thread
                self._tell_of(messages, hook, error)

    async def after_async(self, messages: Sequence[Message], outcome: Outcome, result: Any) -> None:
        """As `after`, in the running loop."""
        if hook := self._hook_of(outcome):
            try:
                await calling.call_async(hook, self._given(messages), result)
            except BaseException as error:
                task = asyncio.current_task()
                ends = isinstance(error, asyncio.CancelledError)
                if ends and task is not None and task.cancelling():
                    raise
                self._tell_of(messages, hook, error)

    def _hook_of(self, outcome: Outcome) -> Callable[[Any, Any], Any] | None:
        if outcome in (DeliveryState.done, DeliveryState.settled) or isinstance(outcome, Result):
            return self._options.on_success
        return self._options.on_failure if isinstance(outcome, Retry | Reject) else None

    def _given(self, messages: Sequence[Message]) -> Any:
        return messages[0] if self._options.batch is None else list(messages)

    def _tell_of(self, messages: Sequence[Message], hook: Any, error: BaseException) -> None:
        name = "on_success" if hook is self._options.on_success else "on_failure"
        # A traceback of logging's own would show passwords, and texts of any length.
        said = name_of(self.of, messages), name, summary(error)
        warn("%s: a hook failed: %s: %s", *said, more=trace(error), level=ERROR)


class Attempt:
    """Calls a handler, in one thread. Before `start` it can be pickled, if the handler can.

    Args:
        of: the stream and the consumer, for the log.
        handler: called with a message, or with a list of messages for batches; a transactional
            handler also gets a connection.
        options: the worker's options.
        url: the database of that connection.
    """

    def __init__(self, of: str, handler: Callable[..., Any], options: Options, url: str | None):
        self.of: str = of
        self._handler = handler
        self._is_batch = options.batch is not None
        self._wrap = options.wrap
        self._is_transactional = options.transactional
        self._url = url
        self._client: Client | None = None
        self._losses = Losses(of)

    def start(self) -> None:
        """Do nothing: a call in the same process needs no preparation."""

    def __call__(self, claim_id: int, messages: Sequence[Message]) -> tuple[Outcome, Any]:
        """Call the handler for messages of a claim. The method raises nothing.

        Returns:
            the outcome for the messages; and the handler's return value, or its error.
        """
        given = list(messages) if self._is_batch else messages[0]
        result = None
        try:
            with ExitStack() as stack:
                calling.enter(stack, self._wrap, given)
                if self._is_transactional:
                    return self._in_transaction(claim_id, messages, given)
                result = calling.call(self._handler, given)
            return of_result(result, messages), result
        except BaseException as error:  # also SystemExit, which would end the thread
            return failed(self.of, messages, error), error

    def interrupt(self) -> bool:
        """Return False: a call in a thread cannot be ended."""
        return False

    def close(self) -> None:
        """Close the connection, if there is one, and the thread's loop."""
        if self._client is not None:
            self._client.close()
        calling.end_loop()

    def _in_transaction(
        self, claim_id: int, messages: Sequence[Message], given: Any
    ) -> tuple[Outcome, Any]:
        from spark_pgqueue.client.client import connect

        conn: psycopg.Connection[Any] | None = None
        before: dict[str, Any] = {}
        is_settled = False
        try:
            client = self._client = self._client or connect(self._url)
            with client.transaction():
                conn = client._statements.connection()
                before = kept(conn)
                with in_open_transaction(conn):
                    result = calling.call(self._handler, given, conn)
                ack = ack_of(claim_id, messages, self._is_batch, result)
                set_again(conn, before)
                with translated():
                    cursor = psycopg.ClientCursor(conn, row_factory=tuple_row).execute(ACK, ack)
                while cursor.nextset():
                    pass
                (count,) = cursor.fetchone() or (0,)
                if count < len(messages):
                    raise ClaimLostError
            is_settled = True
        except Exception as error:
            return self._losses.outcome(messages, error, conn), error
        finally:
            if conn is not None and not conn.closed:
                self._reset(conn, before, is_settled)
        return DeliveryState.settled, result

    def _reset(
        self, conn: psycopg.Connection[Any], before: dict[str, Any], is_settled: bool
    ) -> None:
        try:
            if not is_settled:
                set_again(conn, before)
                conn.execute(RESET)
            if odd := odd_settings(conn.info):
                conn.execute(odd)
        except Exception:  # the next call gets another connection
            conn.close()


class ClaimLostError(Exception):
    """The claim has not all of the messages, so the transaction must not be committed."""

    def __str__(self) -> str:
        return "messages were taken over by another worker, or cancelled"


class Losses:
    """Judges errors of transactional handlers: a lost connection or claim is no failure.

    The transaction was undone then, or was committed with its acknowledgement. But a message whose
    handler loses its connection or messages several times has failed: it may be what ends the
    connection, or cancels them.

    Args:
        of: the stream and the consumer, for the log.
    """

    def __init__(self, of: str):
        self._of = of
        self._times: Counter[int] = Counter()  # by the first message of a call

    def outcome(
        self,
        messages: Sequence[Message],
        error: Exception,
        conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None,
    ) -> Verdict:
        """The verdict for messages.

        Args:
            messages: the messages of a call.
            error: the error that the call raised.
            conn: the handler's connection; None when the handler was not called.
        """
        is_claim = isinstance(error, ClaimLostError)
        is_lost = is_claim or (is_passing(error) if conn is None else conn.closed)
        if isinstance(error, Verdict | LeftOpenError) or not is_lost:
            return failed(self._of, messages, error)
        first = messages[0].seq
        if conn is not None:
            self._times[first] += 1
            if self._times[first] > _MOST_LOSSES:
                del self._times[first]
                return failed(self._of, messages, error)
        lost = "rolled back" if is_claim else "returned, the connection of its transaction was lost"
        warn("%s: %s: %s", name_of(self._of, messages), lost, error)
        return Defer() if is_claim else Defer(_PAUSE)


def failed(of: str, messages: Sequence[Message], error: BaseException) -> Verdict:
    """The verdict for an error of the handler, which is logged, but for a deferral."""
    verdict = of_error(error)
    if not isinstance(error, Verdict):
        warn("%s: %s", name_of(of, messages), summary(error), more=trace(error))
    elif not isinstance(verdict, Defer):
        said = "rejected" if isinstance(verdict, Reject) else "to be retried"
        more = "" if verdict.__cause__ is None else trace(verdict.__cause__)
        given = verdict.reason or "no reason given"
        warn("%s: %s: %s", name_of(of, messages), said, given, more=more)
    return verdict


def timed_out(of: str, messages: Sequence[Message], timeout: timedelta | None) -> Verdict:
    """The verdict for a call that took longer than the option timeout, which is logged."""
    verdict = Retry(reason=f"timed out after {timeout}")
    warn("%s: %s", name_of(of, messages), verdict.reason)
    return verdict


def ack_of(claim_id: int, messages: Sequence[Message], is_batch: bool, result: Any) -> list[Any]:
    """The parameters of `ACK`; `result` is the handler's return value, which the history stores."""
    outcome = of_result(result, messages)
    if outcome is DeliveryState.settled:
        raise PgQueueError("ack_message is for handlers without the option transactional")
    stored = outcome.json if isinstance(outcome, Result) else None
    return [claim_id, None if is_batch else [each.seq for each in messages], stored]


def name_of(of: str, messages: Sequence[Message]) -> str:
    """The name of messages in the log, with the number of the delivery.

    Args:
        of: their stream and consumer.
        messages: at least one.
    """
    first = messages[0]
    said = "message" if len(messages) == 1 else f"{len(messages)} messages from"
    return f"{of}: {said} {first.seq} (delivery {first.deliver_count})"
