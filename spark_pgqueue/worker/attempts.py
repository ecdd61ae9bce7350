"""One call of the handler, and what it means for the messages. It raises nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from spark_pgqueue.client.results import Message
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.verdicts import (
    Fate,
    Outcome,
    Reject,
    Result,
    Retry,
    Verdict,
    of_error,
    of_result,
)

if TYPE_CHECKING:
    from spark_pgqueue.client.client import Client

ACK = "select pgqueue.ack(%s::bigint, %s::bigint[], %s::jsonb)"
"""What ends the transaction of a handler."""

logger: logging.Logger = logging.getLogger("spark_pgqueue.worker")


class Hooks:
    """What is called after each call of the handler. An error of it is logged.

    Args:
        options: those of the worker.
    """

    def __init__(self, options: Options):
        self._on_success = options.on_success
        self._on_failure = options.on_failure
        self._is_batch = options.batch is not None

    def after(self, messages: Sequence[Message], outcome: Outcome, result: Any) -> None:
        """Call the hook for an outcome; `result` is what was returned, or the error."""
        if outcome in (Fate.done, Fate.settled) or isinstance(outcome, Result):
            hook = self._on_success
        else:
            hook = self._on_failure if isinstance(outcome, Retry | Reject) else None
        if hook is not None:
            try:
                hook(list(messages) if self._is_batch else messages[0], result)
            except Exception:
                logger.exception("a hook failed, for %s", name_of(messages))


class Attempt:
    """Calls a handler, in one thread. It can be pickled before `start`, if the handler can.

    Args:
        handler: called with a message, or with a list of them where there are batches; and with
            a connection, where it is transactional.
        options: those of the worker.
        url: of that connection.
    """

    def __init__(self, handler: Callable[..., Any], options: Options, url: str | None):
        self._handler = handler
        self._is_batch = options.batch is not None
        self._wrap = options.wrap
        self._is_transactional = options.transactional
        self._url = url
        self._client: Client | None = None

    def start(self) -> None:
        """Begin; there is nothing to be begun."""

    def __call__(self, claim_id: int, messages: Sequence[Message]) -> tuple[Outcome, Any]:
        """Call the handler for messages of a claim. It raises nothing.

        Returns:
            what becomes of the messages; and what the handler returned, or its error.
        """
        given = list(messages) if self._is_batch else messages[0]
        try:
            with self._wrap(given) if self._wrap else nullcontext():
                if self._is_transactional:
                    return self._in_transaction(claim_id, messages, given)
                result = self._handler(given)
                return of_result(result), result
        except BaseException as error:  # also one that would end the thread
            return failed(messages, error), error

    def interrupt(self) -> bool:
        """A call in a thread cannot be ended."""
        return False

    def close(self) -> None:
        """Close its connection, if it has one."""
        if self._client is not None:
            self._client.close()

    def _in_transaction(
        self, claim_id: int, messages: Sequence[Message], given: Any
    ) -> tuple[Outcome, Any]:
        from spark_pgqueue.client.client import connect

        client = self._client = self._client or connect(self._url)
        try:
            with client.transaction():
                result = self._handler(given, client._statements.connection())
                seqs = None if self._is_batch else [message.seq for message in messages]
                ack = [claim_id, seqs, json_of(of_result(result))]
                if client._statements.row(ACK, ack)[0] < len(messages):
                    raise _Lost
        except _Lost:
            return lost(messages), None
        return Fate.settled, result


class _Lost(Exception):
    """The claim was taken over, so that the transaction must not be committed."""


def failed(messages: Sequence[Message], error: BaseException) -> Verdict:
    """What an error means; one that is no verdict is logged."""
    if not isinstance(error, Verdict):
        logger.warning("%s: %s", name_of(messages), type(error).__name__, exc_info=error)
    return of_error(error)


def lost(messages: Sequence[Message]) -> Outcome:
    """What becomes of messages whose transaction was undone, as the claim was taken over."""
    logger.warning("%s: undone, another worker has the claim now", name_of(messages))
    return Fate.gone


def json_of(outcome: Outcome) -> str | None:
    """What is kept of an outcome."""
    return outcome.json if isinstance(outcome, Result) else None


def name_of(messages: Sequence[Message]) -> str:
    """What messages are called in the log."""
    first = messages[0].seq
    return f"message {first}" if len(messages) == 1 else f"{len(messages)} messages from {first}"


def is_async(handler: Callable[..., Any]) -> bool:
    """Whether a handler is to be awaited."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004
    )
