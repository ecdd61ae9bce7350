"""The messages that the client returns, their claims, and their outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from spark_pgqueue.client import arguments
from spark_pgqueue.client.shown import shortened, table
from spark_pgqueue.postgres.errors import PgQueueError


def _parsed(message: Any) -> Any:
    try:
        return json.loads(message.data)
    except (TypeError, ValueError, RecursionError) as error:
        raise PgQueueError(f"the data of message {message.seq} is not JSON: {error}") from None


@dataclass(frozen=True)
class Message:
    """A message as it was received.

    Attributes:
        seq: the message's number in the stream.
        key: the key for ordering "key", or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: the sender's headers; empty for none.
        priority: the priority of the publication, -32768 to 32767; higher is delivered first.
        deliver_count: how many times the message was delivered, this time included.
        inserted_at: when the message was sent, by the database's clock. A time that Python cannot
            represent (infinity, or after the year 9999) becomes the nearest one that it can.
        error: None, or why the headers cannot be read (they are nested too deeply, or hold a number
            with too many digits for Python). The headers are empty then; everything else is as
            sent. Call `nack` or `dead_letter` for the message, or handle it without its headers.
        saved: the state that `defer` saved with the message; None without.
        claim_id: the number of the claim that holds it; None for a message of `for_test`.
    """

    seq: int
    key: str | None
    data: str | bytes
    headers: dict[str, Any]
    priority: int
    deliver_count: int
    inserted_at: datetime
    error: str | None = None
    saved: Any = None
    claim_id: int | None = field(default=None, compare=False)

    _is_acked = False  # by `Client.ack_message`; no field

    def __repr__(self) -> str:
        parts = (f"{name}={shortened(getattr(self, name))}" for name in ("key", "data"))
        return f"<message {self.seq}: {', '.join(parts)}, deliver_count={self.deliver_count}>"

    @classmethod
    def for_test(
        cls,
        data: Any,
        *,
        seq: int = 1,
        key: str | None = None,
        deliver_count: int = 1,
        **others: Any,
    ) -> Message:
        """A message that was not received, to call a handler with in a test.

            >>> spark_pgqueue.Message.for_test({"order": 1}, key="customer 7").data
            '{"order": 1}'

        Args:
            data: the payload: bytes, a str, or a value for JSON.
            seq: as the attribute; so are `key` and `deliver_count`.
            key: ...
            deliver_count: ...
            others: headers (by default {}), priority (0), inserted_at (now), error, saved.
        """
        if not isinstance(data, str | bytes):
            data = arguments.json_text("data", data)
        given = {"headers": {}, "priority": 0, "inserted_at": datetime.now(UTC)} | others
        return cls(seq=seq, key=key, data=data, deliver_count=deliver_count, **given)

    def json(self) -> Any:
        """The payload as the value of its JSON. Raises PgQueueError if it is not JSON."""
        return _parsed(self)


class StoredMessage(NamedTuple):
    """A message as it is stored, read without a claim.

    Attributes:
        seq: the message's number in the stream.
        key: the key for ordering "key", or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: the sender's headers; None for none.
        inserted_at: as in `Message`.
        error: as in `Message`.
    """

    seq: int
    key: str | None
    data: str | bytes
    headers: dict[str, Any] | None
    inserted_at: datetime
    error: str | None = None

    def json(self) -> Any:
        """The payload as the value of its JSON. Raises PgQueueError if it is not JSON."""
        return _parsed(self)


@dataclass(frozen=True)
class Batch:
    """Messages that were read without a claim.

    Attributes:
        messages: at least one, in order of seq. A later batch may have lower numbers, if their
            messages were published later.
        offset: the offset to read on from: a dict that JSON can hold.
    """

    messages: list[StoredMessage]
    offset: dict[str, Any]

    def _repr_html_(self) -> str:
        return table("seq key data headers inserted_at", self.messages)


@dataclass(frozen=True)
class Claim:
    """Messages that this worker holds until it settles them or their visibility timeout expires.

    The methods settle the whole claim or the given messages, and return how many messages they
    changed. For a claim that another worker has taken over they change nothing, return 0 and log a
    warning.

        >>> claim = queue.receive("orders", "billing", max_messages=100)
        >>> claim.nack(claim.messages[1:], reason="no answer")
        1
        >>> claim.ack()
        1

    Attributes:
        claim_id: the claim's number, with which another process can settle it (`Client.ack`, ...).
        messages: in the order of delivery; at least one.
    """

    claim_id: int
    messages: tuple[Message, ...]
    _client: Any = field(repr=False, compare=False)

    def __repr__(self) -> str:
        first, more = self.messages[0], len(self.messages) - 1
        return f"<claim {self.claim_id} of {first}{f' and {more} more' if more else ''}>"

    def _repr_html_(self) -> str:
        return table("seq key data headers deliver_count inserted_at", self.messages)

    def ack(self, messages: Iterable[Message] | None = None, *, result: Any = None) -> int:
        """Acknowledge: see `Client.ack`. `messages`: None for all of them."""
        return self._client.ack(self.claim_id, _seqs_of(messages), result=result)

    def nack(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
    ) -> int:
        """Return for another delivery: see `Client.nack`. `messages`: None for all of them."""
        return self._client.nack(self.claim_id, _seqs_of(messages), delay=delay, reason=reason)

    def defer(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta = timedelta(),
        state: Any = None,
    ) -> int:
        """Deliver later, with a state: see `Client.defer`. `messages`: None for all of them."""
        return self._client.defer(self.claim_id, _seqs_of(messages), delay=delay, state=state)

    def extend(self, by: timedelta | None = None) -> int:
        """Extend the lease: see `Client.extend`."""
        return self._client.extend(self.claim_id, by)

    def dead_letter(
        self,
        messages: Iterable[Message] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int:
        """Dead-letter: see `Client.dead_letter`. `messages`: None for all of them."""
        seqs = _seqs_of(messages)
        return self._client.dead_letter(self.claim_id, seqs, reason=reason, details=details)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a message, for one consumer.

    Attributes:
        state: "done", "cancelled", "replaced", "dead"; or the current state: "new", "ready",
            "delayed", "waiting", "claimed", ...
        result: the worker's result, or the details of a dead letter, or {"replaced_by": seq}. None
            without, and where the consumer keeps no history.
        reason: of a dead letter, the reason in a word.
        error: the last error.
        deliver_count: how many times the message was delivered; None where this is not known.
        owner: the application_name of the last worker that claimed the message.
        claimed_at: when that worker claimed it.
        ended_at: when the message was done or dead-lettered.
        due_at: when its delay or its lease ends: the earliest time of the next delivery.
    """

    state: str
    result: Any
    reason: str | None
    error: str | None
    deliver_count: int | None
    owner: str | None
    claimed_at: datetime | None
    ended_at: datetime | None
    due_at: datetime | None

    @property
    def is_final(self) -> bool:
        """Whether the state is final."""
        return self.state in _FINAL


_FINAL = (
    *("done", "cancelled", "replaced", "dead"),
    *("not for it", "filtered out", "skipped", "trimmed"),
)


@dataclass(frozen=True)
class Done:
    """An acknowledgement of a claim or of some of its messages; or a cancellation or replacement.

    Attributes:
        seqs: the numbers of the messages, as pairs of first and last.
        message_count: how many messages there are.
        deliver_count: the highest deliver_count among them.
        result: the worker's result; of replaced messages {"replaced_by": seq}.
        owner: the application_name of the worker; None for replaced messages.
        claim_id: the claim's number; None for cancelled and replaced messages.
        claimed_at: when the worker claimed them; None for cancelled and replaced messages.
        done_at: when they were acknowledged, cancelled or replaced.
    """

    seqs: list[tuple[int, int]]
    message_count: int
    deliver_count: int
    result: Any
    owner: str | None
    claim_id: int | None
    claimed_at: datetime | None
    done_at: datetime


@dataclass(frozen=True)
class DeadLetters:
    """Messages of a consumer that were dead-lettered together.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        reason: "max deliveries" or another word of the queue, or the worker's reason; by default
            "rejected".
        error: the last error; None without.
        messages: how many messages there are.
        first_seq: the lowest number.
        last_seq: the highest number.
        deliver_count: how many times they were delivered.
        owner: the application_name of the last worker.
        died_at: when they were dead-lettered.
    """

    stream: str
    consumer: str
    reason: str
    error: str | None
    messages: int
    first_seq: int
    last_seq: int
    deliver_count: int
    owner: str | None
    died_at: datetime


@dataclass(frozen=True)
class DeadMessage:
    """A dead letter of a consumer, with its content.

    Attributes:
        seq: the message's number in the stream.
        key: as in `Message`; so are `data`, `headers`, `priority` and `inserted_at`. None where the
            row of the message was deleted.
        data: ...
        headers: ...
        priority: ...
        inserted_at: ...
        reason: as in `DeadLetters`; so are the others.
        error: ...
        details: the details that the worker gave to `dead_letter`; None without.
        deliver_count: ...
        owner: ...
        died_at: ...
    """

    seq: int
    key: str | None
    data: str | bytes | None
    headers: dict[str, Any]
    priority: int
    inserted_at: datetime | None
    reason: str
    error: str | None
    details: Any
    deliver_count: int
    owner: str | None
    died_at: datetime

    def json(self) -> Any:
        """The payload as the value of its JSON. Raises PgQueueError if it is not JSON."""
        return _parsed(self)


@dataclass(frozen=True)
class Explanation:
    """Why a message is in its state, for one consumer.

    Attributes:
        state: new, unfiltered, ready, delayed, waiting, claimed or dead; or unknown (no message has
            the number, or its transaction has not ended), unpublished, not for it, filtered out,
            skipped, trimmed, done.
        because: what the message waits for, which worker holds it, or what happened to it.
        until: when the state times out: the latest end of a lease, or the earliest end of a delay;
            None where it has no timeout.
    """

    state: str
    because: str
    until: datetime | None


@dataclass(frozen=True)
class Failure:
    """A delivery of a message that failed.

    Attributes:
        failed_at: when the message was returned, or its lease ended; to the second.
        owner: the application_name of the worker that held the message.
        error: the first 500 characters of the error; None for none.
    """

    failed_at: datetime
    owner: str | None
    error: str | None


def _seqs_of(messages: Iterable[Message] | None) -> list[int] | None:
    if messages is None:
        return None
    chosen = list(arguments.items("messages", messages))
    for name, message in chosen:
        arguments.check(name, message, Message, "a Message")
    return [message.seq for _, message in chosen]


@dataclass(frozen=True)
class PeekedMessage:
    """A message that a consumer has not claimed, as it was at the call.

    Attributes:
        seq: the message's number in the stream.
        state: "ready", "unfiltered", "new", "waiting" or "delayed".
        key: the key for ordering "key", or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: the sender's headers; empty for none.
        priority: as in `Message`.
        deliver_count: how many times the message was delivered.
        not_visible_until: the time of the next delivery; None for at once.
        last_error: the error of the last failure.
        inserted_at: as in `Message`.
        error: as in `Message`.
    """

    seq: int
    state: str
    key: str | None
    data: str | bytes
    headers: dict[str, Any]
    priority: int
    deliver_count: int
    not_visible_until: datetime | None
    last_error: str | None
    inserted_at: datetime
    error: str | None = None

    def json(self) -> Any:
        """The payload as the value of its JSON. Raises PgQueueError if it is not JSON."""
        return _parsed(self)


@dataclass(frozen=True)
class PublishedMessage:
    """A published message, as it was at the call, of any consumer.

    Attributes:
        seq: the message's number in the stream.
        key: the key for ordering "key", or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: the sender's headers; empty for none.
        priority: as in `Message`.
        inserted_at: as in `Message`.
        published_at: when the statement that published the message ran.
        deliver_at: not delivered before this time; None for at once.
        consumers: the names of the consumers that get it; None for all.
        error: as in `Message`.
    """

    seq: int
    key: str | None
    data: str | bytes
    headers: dict[str, Any]
    priority: int
    inserted_at: datetime
    published_at: datetime
    deliver_at: datetime | None
    consumers: list[str] | None
    error: str | None = None

    def json(self) -> Any:
        """The payload as the value of its JSON. Raises PgQueueError if it is not JSON."""
        return _parsed(self)
