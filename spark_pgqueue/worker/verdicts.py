"""What becomes of a message: what handlers raise, and what else there is."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

from spark_pgqueue.client import arguments
from spark_pgqueue.client.results import Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import redact
from spark_pgqueue.printable import printable, warn

_LONGEST = 2000  # characters of a reason


class Verdict(Exception):
    """Raised by a handler: what becomes of its message. Arguments are keywords but the first.

    Attributes:
        reason: why, for people.
        seqs: of a batch, the messages that it is about; None for all. The others are done; or, where
            the batch is a transaction, which is undone, given back.
    """

    takes_followers = True
    """Whether later messages of its key leave the claim with it."""

    def __init__(self, reason: str | None, messages: Iterable[Message] | None):
        super().__init__(reason or "")
        self.reason: str | None = (
            None if reason is None else clean(arguments.text("reason", reason))
        )
        self.seqs: frozenset[int] | None = None
        if messages is not None:
            self.seqs = frozenset(each.seq for each in arguments.listed("messages", messages))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__)

    def as_group(self) -> tuple[Any, ...]:
        """The same for verdicts that one call can settle."""
        return type(self), self.reason


class Retry(Verdict):
    """The message has failed: it is delivered again, or dies as its consumer says.

        >>> def bill(message):
        ...     raise spark_pgqueue.Retry("no answer", delay=timedelta(minutes=1))
        >>> spark_pgqueue.Consumer(url, "orders", "billing").run(bill, wait=timedelta(0))
        2
        >>> queue.stats("orders")[0].delayed
        2

    Args:
        reason: kept as its last error.
        delay: deliver it after that; None: as the consumer's backoff says.
        messages: of a batch, those that have failed; None for the whole batch.
    """

    def __init__(
        self,
        reason: str | None = None,
        *,
        delay: timedelta | None = None,
        messages: Iterable[Message] | None = None,
    ):
        super().__init__(reason, messages)
        self.delay: timedelta | None = arguments.maybe(arguments.duration, "delay", delay)

    def as_group(self) -> tuple[Any, ...]:
        return *super().as_group(), self.delay


class Reject(Verdict):
    """The message will never do: it is dead-lettered at once.

        >>> def bill(message):
        ...     raise spark_pgqueue.Reject("no such customer", details={"customer": message.key})
        >>> spark_pgqueue.Consumer(url, "orders", "billing").run(bill, wait=timedelta(0))
        2
        >>> queue.stats("orders")[0].dead
        2

    Args:
        reason: why, for people.
        details: why, for programs: a value that JSON can hold.
        messages: of a batch, those that will not do; None for the whole batch.
    """

    takes_followers = False

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
        return *super().as_group(), repr(self.details)


class Defer(Verdict):
    """The message is put off: it is delivered later. That is no failure, and counts as none.

        >>> def bill(message):
        ...     if message.saved is None:
        ...         raise spark_pgqueue.Defer(timedelta(0), state={"step": 2})
        ...     print(message.data, message.saved)
        ...     billing.stop()
        >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
        >>> count = billing.run(bill)
        order 1 {'step': 2}

    Args:
        delay: deliver it after that, not before.
        state: comes back with it, as `Message.saved`, from then on: a value that JSON can hold.
            None: what was saved before.
        messages: of a batch, those to put off; None for the whole batch.
    """

    def __init__(
        self,
        delay: timedelta = timedelta(),
        *,
        state: Any = None,
        messages: Iterable[Message] | None = None,
    ):
        super().__init__(None, messages)
        self.delay: timedelta = arguments.duration("delay", delay)
        if state is not None:
            arguments.json_text("state", state)
        self.state = state

    def as_group(self) -> tuple[Any, ...]:
        return *super().as_group(), self.delay, repr(self.state)


class Fate(Enum):
    """What becomes of a message without a word of the handler's."""

    done = "handled: to be acknowledged"
    settled = "acknowledged in the handler's transaction"
    unstarted = "not begun: to be given back"
    gone = "not this worker's any more"


class Result(NamedTuple):
    """Handled, with something to keep in the consumer's history.

    Attributes:
        json: what the handler returned.
    """

    json: str


Outcome = Verdict | Fate | Result


def of_result(value: Any) -> Outcome:
    """What it means that a handler returned something."""
    if value is None:
        return Fate.done
    try:
        return Result(arguments.json_text("what the handler returned", value))
    except PgQueueError as error:  # the work is done; it must not be done again for that
        warn("%s: it is not kept", error.message, logger="spark_pgqueue.worker")
        return Fate.done


def of_error(error: BaseException) -> Verdict:
    """What an error of a handler means."""
    if isinstance(error, Verdict):
        return error
    return Retry(reason=f"{type(error).__name__}: {clean(str(error))}".rstrip(": "))


def clean(reason: str) -> str:
    """Text that Postgres can store, without passwords, and not too long."""
    return redact(printable(reason, keep="\n\t"))[:_LONGEST]


def _rebuild(kind: type[Verdict], fields: dict[str, Any]) -> Verdict:
    verdict = kind.__new__(kind, fields["reason"] or "")
    verdict.__dict__.update(fields)
    return verdict
