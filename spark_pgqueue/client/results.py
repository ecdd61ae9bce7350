"""What the client returns: messages and claims, streams, consumers and their figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from spark_pgqueue.client import arguments


@dataclass(frozen=True)
class Message:
    """A message as it was received.

    Attributes:
        seq: its number in the stream.
        key: what ordering "key" goes by, or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: what its sender gave; empty when nothing.
        priority: as it was published, -32768 to 32767; higher is earlier.
        deliver_count: how many times it was delivered, this time included.
        inserted_at: when it was sent, by the database's clock. A time that Python cannot hold
            (infinity, or after the year 9999) is the nearest that it can.
        error: None, or why the headers cannot be read (they are nested too deeply, or hold a number
            of too many digits for Python). They are empty then; all else is as it was sent. Such a
            message is for `nack` or `dead_letter`, or to be worked on without its headers.
    """

    seq: int
    key: str | None
    data: str | bytes
    headers: dict[str, Any]
    priority: int
    deliver_count: int
    inserted_at: datetime
    error: str | None = None


class Settles(Protocol):
    """What a claim needs to be settled: `Client` is one."""

    def ack(self, claim_id: int, seqs: Iterable[int] | None = None) -> int: ...
    def nack(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta = timedelta(),
        reason: str | None = None,
    ) -> int: ...
    def extend(self, claim_id: int, by: timedelta | None = None) -> int: ...
    def dead_letter(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int: ...


@dataclass(frozen=True)
class Claim:
    """Messages that are this worker's until it settles them or its visibility timeout passes.

    The methods settle the whole claim or those of its messages that are given, and answer how many
    messages they changed. On a claim that another worker has taken over they change nothing, answer
    0 and log a warning.

    Attributes:
        claim_id: its number, for another process to settle it with `Client.ack` and its like.
        messages: in the order of delivery; at least one.
    """

    claim_id: int
    messages: tuple[Message, ...]
    _client: Settles = field(repr=False, compare=False)

    def ack(self, messages: Iterable[Message] | None = None) -> int:
        """Acknowledge: see `Client.ack`. `messages`: None for all of them."""
        return self._client.ack(self.claim_id, _seqs_of(messages))

    def nack(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta = timedelta(),
        reason: str | None = None,
    ) -> int:
        """Return for another delivery: see `Client.nack`. `messages`: None for all of them."""
        return self._client.nack(self.claim_id, _seqs_of(messages), delay=delay, reason=reason)

    def extend(self, by: timedelta | None = None) -> int:
        """Hold the claim longer: see `Client.extend`."""
        return self._client.extend(self.claim_id, by)

    def dead_letter(
        self,
        messages: Iterable[Message] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int:
        """Give up on them: see `Client.dead_letter`. `messages`: None for all of them."""
        seqs = _seqs_of(messages)
        return self._client.dead_letter(self.claim_id, seqs, reason=reason, details=details)


@dataclass(frozen=True)
class Stream:
    """A stream.

    Attributes:
        name: its name.
        kind: what its messages hold: "text", "json" or "binary".
        created_at: when it was created.
        consumers: how many there are.
        messages: how many are stored, by the planner's estimate.
        bytes: what they take on disk.
    """

    name: str
    kind: str
    created_at: datetime
    consumers: int
    messages: int
    bytes: int


@dataclass(frozen=True)
class Consumer:
    """A consumer.

    Attributes:
        stream: the stream's name.
        name: its name.
        ordering: "none", "key" or "stream".
        max_deliver_count: a message that failed so often is dead-lettered; None for never.
        visibility_timeout: how long a claim is held without being extended.
        created_at: when it was created.
    """

    stream: str
    name: str
    ordering: str
    max_deliver_count: int | None
    visibility_timeout: timedelta
    created_at: datetime


@dataclass(frozen=True)
class ConsumerStats:
    """What a consumer has before it: numbers of messages, except where it says otherwise.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        ordering: "none", "key" or "stream".
        new: published and not looked at yet; an estimate where that is very many publications.
        ready: to be delivered.
        delayed: to be delivered later.
        waiting: behind an earlier message of their key.
        claimed: held by workers.
        dead: dead-lettered.
        backlog: new, ready, delayed and waiting together.
        claims: how many claims there are.
        expired: of these, how many are past their visibility timeout.
        next_expiry: when the first of them is; None without claims.
    """

    stream: str
    consumer: str
    ordering: str
    new: int
    ready: int
    delayed: int
    waiting: int
    claimed: int
    dead: int
    backlog: int
    claims: int
    expired: int
    next_expiry: datetime | None


def _seqs_of(messages: Iterable[Message] | None) -> list[int] | None:
    if messages is None:
        return None
    chosen = list(arguments.items("messages", messages))
    for name, message in chosen:
        arguments.check(name, message, Message, "a Message")
    return [message.seq for _, message in chosen]


@dataclass(frozen=True)
class Capture:
    """A table whose changes become messages.

    Attributes:
        table: its name, with its schema.
        stream: where they go.
        owner: the role that owns the table, and as which it sends.
        options: key and columns when it was captured, in words.
        outbox: whether only inserts are captured, and the rows deleted again.
        uncaptured_partitions: partitions to which what is written directly is not captured.
    """

    table: str
    stream: str
    owner: str
    options: str | None
    outbox: bool
    uncaptured_partitions: int
