"""The outcomes of a message: the verdicts that handlers raise, and the outcomes without one."""

from __future__ import annotations

import json
import traceback
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

from spark_pgqueue.client import arguments
from spark_pgqueue.client.messages import Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.printable import clean, summary
from spark_pgqueue.worker.log import warn

_PARTS = 100  # of a traceback: a line of code with its place, or a message


class Verdict(Exception):
    """Raised by a handler: what the worker does with the message. All arguments except the first
    are keywords.

    Attributes:
        reason: a short reason.
        seqs: for a batch, the messages of the verdict; None for all of them. The other messages of
            the batch are acknowledged. If the batch is a transaction, which is rolled back, they
            are returned.
    """

    # The values of a subclass that does not call `__init__`.
    reason: str | None = None
    seqs: frozenset[int] | None = None

    holds_followers = True
    """Whether later messages of the same key wait for the message."""

    def __init__(self, reason: str | None, messages: Iterable[Message] | None):
        super().__init__(reason or "")
        self.reason = None if reason is None else clean(arguments.text("reason", reason))
        if messages is not None:
            self.seqs = frozenset(each.seq for each in arguments.listed("messages", messages))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__)

    def as_group(self) -> tuple[Any, ...]:
        """A key that is equal for verdicts that one call can settle."""
        return type(self), self.reason


class Retry(Verdict):
    """The message has failed: it is redelivered, or dead-lettered, by the consumer's settings.

    The log has the traceback of an error that `raise Retry(...) from error` names.

        >>> def bill(message):
        ...     raise spark_pgqueue.Retry("no answer", delay=timedelta(minutes=1))
        >>> spark_pgqueue.Consumer(url, "orders", "billing").run(bill, wait=timedelta(0))
        0
        >>> queue.stats("orders")[0].delayed
        2

    Args:
        reason: stored as the last error of the message; by default the error after `from`.
        delay: the time until the next delivery; None for the consumer's backoff. Where that is
            constant without a base, it is exponential, from 1 s up to backoff_cap.
        messages: for a batch, the messages that have failed; None for the whole batch.
    """

    delay: timedelta | None = None

    def __init__(
        self,
        reason: str | None = None,
        *,
        delay: timedelta | None = None,
        messages: Iterable[Message] | None = None,
    ):
        super().__init__(reason, messages)
        self.delay = arguments.maybe(arguments.duration, "delay", delay)

    def as_group(self) -> tuple[Any, ...]:
        return *super().as_group(), self.delay


class Reject(Verdict):
    """The message can never be handled: it is dead-lettered at once.

    The log has the traceback of an error that `raise Reject(...) from error` names, and the details
    have it as "error".

        >>> def bill(message):
        ...     raise spark_pgqueue.Reject("no such customer", details={"customer": message.key})
        >>> spark_pgqueue.Consumer(url, "orders", "billing").run(bill, wait=timedelta(0))
        0
        >>> queue.stats("orders")[0].dead
        2

    Args:
        reason: a short reason; by default "rejected".
        details: further details: a value that JSON can hold.
        messages: for a batch, the messages to dead-letter; None for the whole batch.
    """

    holds_followers = False
    details: Any = None

    def __init__(
        self,
        reason: str | None = None,
        *,
        details: Any = None,
        messages: Iterable[Message] | None = None,
    ):
        super().__init__(reason, messages)
        if details is not None:
            arguments.json_text("details", details)
        self.details = details

    def as_group(self) -> tuple[Any, ...]:
        return *super().as_group(), _key(self.details)


class Defer(Verdict):
    """The message is delivered later. A deferral does not count as a failure.

        >>> def bill(message):
        ...     if message.saved is None:
        ...         raise spark_pgqueue.Defer(timedelta(0), state={"step": 2})
        ...     print(message.data, message.saved)
        ...     billing.stop()
        >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
        >>> count = billing.run(bill)
        order 1 {'step': 2}

    Args:
        delay: the time until the next delivery.
        state: a value that JSON can hold. Later deliveries of the message have it as
            `Message.saved`. None keeps the state that was saved before.
        messages: for a batch, the messages to defer; None for the whole batch.
    """

    delay: timedelta = timedelta()
    state: Any = None

    def __init__(
        self,
        delay: timedelta = timedelta(),
        *,
        state: Any = None,
        messages: Iterable[Message] | None = None,
    ):
        super().__init__(None, messages)
        self.delay = arguments.duration("delay", delay)
        if state is not None:
            arguments.json_text("state", state)
        self.state = state

    def as_group(self) -> tuple[Any, ...]:
        return *super().as_group(), self.delay, _key(self.state)


class DeliveryState(Enum):
    """The state of a delivery for which the handler gave no verdict."""

    done = "handled: to be acknowledged"
    settled = "acknowledged in the handler's transaction"
    unstarted = "not started: to be returned"


class Result(NamedTuple):
    """The message was handled, and the consumer's history keeps a result.

    Attributes:
        json: the handler's return value.
    """

    json: str


Outcome = Verdict | DeliveryState | Result


def of_result(value: Any, messages: Iterable[Message]) -> Outcome:
    """The outcome for a return value of a handler, which may have acknowledged its messages."""
    if all(message._is_acked for message in messages):
        return DeliveryState.settled
    if value is None:
        return DeliveryState.done
    try:
        return Result(arguments.json_text("what the handler returned", value))
    except PgQueueError as error:  # the handler has done its work, and must not repeat it
        warn("%s: the result was not stored", error.message)
        return DeliveryState.done


def of_error(error: BaseException) -> Verdict:
    """The verdict for an error of a handler; a group of one error counts as that error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, Retry | Reject | Defer):
        return _pinned(error if error.__cause__ is None else _with_cause(error))
    return Retry(reason=summary(error))


def _pinned(verdict: Verdict) -> Verdict:
    """A verdict with a copy of its JSON, which is settled later, by another thread: until then,
    the handler may change the original. A value that JSON cannot hold fails the message.
    """
    # A subclass may have an attribute of the other name, which is its own.
    name = "details" if isinstance(verdict, Reject) else "state"
    if isinstance(verdict, Retry) or (value := getattr(verdict, name)) is None:
        return verdict
    made = plain(verdict)
    assert isinstance(made, Verdict)
    made.__cause__ = verdict.__cause__
    try:
        setattr(made, name, json.loads(arguments.json_text(name, value)))
    except Exception as error:  # such as of a method of the value's class
        made = Retry(reason=summary(error))
        made.seqs = verdict.seqs
    return made


def _key(value: Any) -> object:
    """Equal for equal JSON, which may be nested too deep for the stack of this thread."""
    try:
        return repr(value)
    except RecursionError:
        return id(value)


def _with_cause(verdict: Verdict) -> Verdict:
    """A verdict that also stores what this one was raised from."""
    made, cause = plain(verdict), verdict.__cause__
    assert isinstance(made, Verdict)
    made.__cause__ = cause
    if cause is not None and isinstance(made, Retry) and made.reason is None:
        made.reason = summary(cause)
    elif cause is not None and isinstance(made, Reject) and isinstance(made.details, dict | None):
        made.details = {"error": summary(cause), **(made.details or {})}
    return made


def trace(error: BaseException) -> str:
    """The traceback of an error, and of those that led to it, for the log.

    Each part is as `clean` returns it; of many parts, it has the last ones.
    """
    try:
        parts = deque(traceback.TracebackException.from_exception(error).format(), _PARTS)
        return "\n".join(clean(part.rstrip("\n")) for part in parts)
    except Exception as other:  # an error of any class may fail here
        return f"no traceback can be made: {type(other).__name__}"


def plain(outcome: Outcome) -> Outcome:
    """The outcome without the additions of a subclass, which pickle may not be able to load."""
    for kind in (Retry, Reject, Defer):
        if isinstance(outcome, kind):
            fields = {name: getattr(outcome, name) for name in {"seqs", *vars(kind())}}
            return _rebuild(kind, fields)
    return outcome


def _rebuild(kind: type[Verdict], fields: dict[str, Any]) -> Verdict:
    verdict = kind.__new__(kind, fields["reason"] or "")
    verdict.__dict__.update(fields)
    return verdict
