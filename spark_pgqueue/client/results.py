"""What the client returns: messages and claims, streams, consumers and their figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

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
        saved: the state that `defer` saved with it; None without.
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


class StoredMessage(NamedTuple):
    """A message as it is stored, read without a claim.

    Attributes:
        seq: its number in the stream.
        key: what ordering "key" goes by, or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: what its sender gave; None when nothing.
        inserted_at: as in `Message`.
        error: as in `Message`.
    """

    seq: int
    key: str | None
    data: str | bytes
    headers: dict[str, Any] | None
    inserted_at: datetime
    error: str | None = None


@dataclass(frozen=True)
class Batch:
    """Messages that were read without a claim.

    Attributes:
        messages: in order of seq; at least one. A later batch may have lower numbers, of what was
            published later.
        offset: to read on from: a dict that JSON can hold.
    """

    messages: list[StoredMessage]
    offset: dict[str, Any]


class Settles(Protocol):
    """What a claim needs to be settled: `Client` is one."""

    def ack(
        self, claim_id: int, seqs: Iterable[int] | None = None, *, result: Any = None
    ) -> int: ...
    def nack(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
    ) -> int: ...
    def defer(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta = timedelta(),
        state: Any = None,
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

        >>> claim = queue.receive("orders", "billing", max_messages=100)
        >>> claim.nack(claim.messages[1:], reason="no answer")
        1
        >>> claim.ack()
        1

    Attributes:
        claim_id: its number, for another process to settle it with `Client.ack` and its like.
        messages: in the order of delivery; at least one.
    """

    claim_id: int
    messages: tuple[Message, ...]
    _client: Settles = field(repr=False, compare=False)

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
        """Put off, with a state: see `Client.defer`. `messages`: None for all of them."""
        return self._client.defer(self.claim_id, _seqs_of(messages), delay=delay, state=state)

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
        sent: how many were sent in all; what was rolled back counts.
        settings: those that are not the default, as `alter_stream` takes them.
    """

    name: str
    kind: str
    created_at: datetime
    consumers: int
    messages: int
    bytes: int
    sent: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Retention:
    """How long the messages of a stream are kept, and what that comes to.

    Attributes:
        stream: the stream's name.
        keep_for: from a message's publication; None: no such limit, as in the next two.
        keep_messages: as long as not so many came after it.
        keep_bytes: as long as what came after it does not take so many bytes on disk.
        until_done: only until every consumer is done with it.
        unread: "keep" or "drop": what a consumer still owes when it may go.
        keep_dead: dead letters; None: for ever.
        bytes: what the messages take on disk.
        oldest_at: when the oldest of them was published; None: there is none.
        trimmed: how many messages went in all.
        held_bytes: what is kept on disk although it is due.
        held_by: who or what keeps it.
        maintained_at: when `maintain` was last called, within a minute.
        advice: what to do; None when there is nothing to do.
    """

    stream: str
    keep_for: timedelta | None
    keep_messages: int | None
    keep_bytes: int | None
    until_done: bool
    unread: str
    keep_dead: timedelta | None
    bytes: int
    oldest_at: datetime | None
    trimmed: int
    held_bytes: int
    held_by: list[str]
    maintained_at: datetime | None
    advice: str | None


@dataclass(frozen=True)
class Binding:
    """A binding: messages of a stream are copied to another one.

    Attributes:
        stream: the stream's name.
        topic: of the keys of what is copied.
        to_stream: the other stream's name.
        bound_at: since when.
    """

    stream: str
    topic: str
    to_stream: str
    bound_at: datetime


@dataclass(frozen=True)
class Outcome:
    """What became of a message, for one consumer.

    Attributes:
        state: "done", "cancelled", "dead", or where it is: "new", "ready", "delayed", "waiting",
            "claimed", ...
        result: what its worker said: of a dead one the details. None without, and where the
            consumer keeps no history.
        reason: of a dead one: why, in a word.
        error: its last error.
        deliver_count: how often it was delivered; None where that is not known.
        owner: the application_name of who had it last, or has it.
        claimed_at: since when.
        ended_at: when it was done, or died.
    """

    state: str
    result: Any
    reason: str | None
    error: str | None
    deliver_count: int | None
    owner: str | None
    claimed_at: datetime | None
    ended_at: datetime | None

    @property
    def is_final(self) -> bool:
        """Whether nothing more will become of it by itself."""
        return self.state in _FINAL


_FINAL = ("done", "cancelled", "dead", "not for it", "filtered out", "skipped", "trimmed")


@dataclass(frozen=True)
class Done:
    """An acknowledgement: of a claim, or of some of its messages. Or what was cancelled.

    Attributes:
        seqs: their numbers, as pairs of first and last.
        message_count: how many they are.
        deliver_count: of the one that was delivered most often.
        result: what the worker said.
        owner: the application_name of who did.
        claim_id: the claim's number; None: they were cancelled.
        claimed_at: since when it had them; None: they were cancelled.
        done_at: when it acknowledged or cancelled them.
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
class Schedule:
    """A schedule: a message at each of its times.

    Attributes:
        stream: the stream's name.
        name: its name.
        cron: when: a cron expression, or None.
        every: or an interval, in Postgres's words.
        time_zone: in which that is meant.
        next_at: its next time; None while it is paused.
        paused: whether it sends nothing until it is resumed.
        last_planned_at: the time for which it sent its last message; None before the first.
        last_sent_at: when it sent that.
        last_seq: the number of that message; None where it could not be sent ...
        last_error: ... and this is why.
        key: of its messages.
        data: their payload.
        headers: theirs, without those that tell the schedule.
        priority: theirs.
        consumers: names of those that get them; None for all.
    """

    stream: str
    name: str
    cron: str | None
    every: str | None
    time_zone: str
    next_at: datetime | None
    paused: bool
    last_planned_at: datetime | None
    last_sent_at: datetime | None
    last_seq: int | None
    last_error: str | None
    key: str | None
    data: str | bytes | None
    headers: dict[str, Any] | None
    priority: int
    consumers: list[str] | None


@dataclass(frozen=True)
class ConsumerInfo:
    """A consumer.

    Attributes:
        stream: the stream's name.
        name: its name.
        ordering: "none", "key" or "stream".
        max_deliver_count: a message that failed so often is dead-lettered; None for never.
        visibility_timeout: how long a claim is held without being extended.
        created_at: when it was created.
        paused: whether it claims nothing until it is resumed.
        topic: of the keys of its messages; None for all.
        where: a jsonpath that its messages pass; None for all.
        settings: those that are not the default, as `alter_consumer` takes them.
    """

    stream: str
    name: str
    ordering: str
    max_deliver_count: int | None
    visibility_timeout: timedelta
    created_at: datetime
    paused: bool
    topic: str | None
    where: str | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class DeadLetters:
    """Messages that a consumer gave up together.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        reason: "max deliveries" or another word of the queue, or what the worker gave; by default
            "rejected".
        error: the last one; None where nobody gave one.
        messages: how many there are.
        first_seq: the lowest of their numbers.
        last_seq: the highest.
        deliver_count: how many times they were delivered.
        owner: the application_name of who had them last.
        died_at: when.
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
    """A message that a consumer gave up, with what it holds.

    Attributes:
        seq: its number in the stream.
        key: as in `Message`, and so `data`, `headers`, `priority` and `inserted_at`; None where the
            message was deleted by hand.
        data: ...
        headers: ...
        priority: ...
        inserted_at: ...
        reason: as in `DeadLetters`, and so the others.
        error: ...
        details: what the worker gave to `dead_letter`; None without.
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
        skipped: what retention took from it, in all.
        paused: whether it claims nothing until it is resumed.
        taken: what it took in hand, in all, what is delivered once more after a seek included.
        settled: what was acknowledged or died, in all; so the difference of two looks is a rate.
        oldest_at: when the oldest message was sent that could be delivered now; None without.
        oldest_claim_at: since when the oldest claim is held; None without.
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
    skipped: int
    paused: bool
    taken: int
    settled: int
    oldest_at: datetime | None
    oldest_claim_at: datetime | None


@dataclass(frozen=True)
class Explanation:
    """Why a message is where it is, for one consumer.

    Attributes:
        state: new, unsifted, ready, delayed, waiting, claimed or dead; or unknown (no message has
            the number, or its transaction is not over), unpublished, not for it, filtered out,
            skipped, trimmed, done.
        because: what it waits for, who has it, what happened to it.
        until: when that ends by itself: a lease at the latest, a delay at the earliest; None: not
            by time.
    """

    state: str
    because: str
    until: datetime | None


@dataclass(frozen=True)
class OpenClaim:
    """A claim that somebody holds.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        claim_id: its number.
        owner: the application_name of the connection that made it.
        query: the id of the Spark query that has it; None for a worker.
        claimed_at: since when.
        lease_until: until when others leave it to that one.
        expired: whether that is over.
        messages: how many it had at first.
        remaining: how many are not settled.
        first_seq: the first of these.
    """

    stream: str
    consumer: str
    claim_id: int
    owner: str | None
    query: str | None
    claimed_at: datetime
    lease_until: datetime
    expired: bool
    messages: int
    remaining: int
    first_seq: int | None


@dataclass(frozen=True)
class KeyStats:
    """A key that a consumer is busy with: numbers of messages that it has in hand.

    Attributes:
        key: None for messages without one.
        waiting: behind another one of the key.
        delayed: to be delivered later.
        in_flight: in claims.
        first_seq: the first of all these.
        until: when the first of its delays ends; else when the last of its leases does.
        unfinished: all that the consumer is not done with, where it has a
            `per_key_capacity`; else None.
    """

    key: str | None
    waiting: int
    delayed: int
    in_flight: int
    first_seq: int
    until: datetime | None
    unfinished: int | None


@dataclass(frozen=True)
class Look:
    """What there is at a moment, of all streams.

    Attributes:
        at: the database's clock.
        streams: by name.
        consumers: by stream and name; groups too.
        partitions: of groups, by stream, group and partition.
    """

    at: datetime
    streams: list[Stream]
    consumers: list[ConsumerStats]
    partitions: list[tuple[str, str, PartitionStats]]


@dataclass(frozen=True)
class ConsumerHealth:
    """How a consumer fares.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        status: the first that is so of: "full", it has its max_backlog before it; "paused";
            "unattended", there is something to claim, or a lease ended, and for a minute nobody
            has claimed; "failing", messages died in the last hour; "ok".
        because: why, for people.
        backlog: messages before it that nobody has claimed.
        max_backlog: how many there may be; None for any.
        attended_at: when somebody last claimed something, to a second or so; None for never.
    """

    stream: str
    consumer: str
    status: str
    because: str
    backlog: int
    max_backlog: int | None
    attended_at: datetime | None


@dataclass(frozen=True)
class GroupStats:
    """A group.

    Attributes:
        stream: the stream's name.
        name: its name.
        partitions: how many there are.
        workers: how many have some.
        behind: messages after what the slowest partition has done, of all keys.
    """

    stream: str
    name: str
    partitions: int
    workers: int
    behind: int


@dataclass(frozen=True)
class PartitionStats:
    """A partition of a group.

    Attributes:
        partition: its number, from 0.
        worker: who has it; None for nobody.
        lease_until: until when others leave it to that one; None without.
        committed_at: when something of it was done last; None for never.
        behind: messages of the group after what it has done, of all keys.
    """

    partition: int
    worker: str | None
    lease_until: datetime | None
    committed_at: datetime | None
    behind: int


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


@dataclass(frozen=True)
class PeekedMessage:
    """A message that a consumer has before it, as it was looked at.

    Attributes:
        seq: its number in the stream.
        state: "ready", "unsifted", "new", "waiting" or "delayed".
        key: what ordering "key" goes by, or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: what its sender gave; empty when nothing.
        priority: as in `Message`.
        deliver_count: how many times it was delivered.
        not_visible_until: when it is to be delivered, if not at once.
        last_error: of one that failed.
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


@dataclass(frozen=True)
class PublishedMessage:
    """A message that was published, as it was looked at, whoever is to get it.

    Attributes:
        seq: its number in the stream.
        key: what ordering "key" goes by, or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: what its sender gave; empty when nothing.
        priority: as in `Message`.
        inserted_at: as in `Message`.
        published_at: when it was published: that is when its statement was run.
        deliver_at: when it is to be delivered; None: at once.
        consumers: names of those that get it; None for all.
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


@dataclass(frozen=True)
class Imported:
    """What came of lines.

    Attributes:
        sent: messages that were published.
        duplicates: lines whose dedup_key was sent before.
    """

    sent: int
    duplicates: int


@dataclass(frozen=True)
class Position:
    """Where a consumer is in its stream.

    Attributes:
        next_seq: the number of the first message that it has not taken; or of the next one that
            is sent, at least.
        published_at: when that one was published; None: there is none.
        in_gaps: publications before it that were not visible yet, or are to be delivered again.
    """

    next_seq: int
    published_at: datetime | None
    in_gaps: int


@dataclass(frozen=True)
class StreamDescription:
    """A stream, and all that belongs to it.

    Attributes:
        stream: its kind, settings and sizes.
        retention: how long its messages are kept.
        consumers: what each has before it.
        groups: of workers that share it.
        bindings: by which messages are copied from it, or to it.
        captures: tables whose changes become messages of it.
        schedules: that send to it.
    """

    stream: Stream
    retention: Retention
    consumers: list[ConsumerStats]
    groups: list[GroupStats]
    bindings: list[Binding]
    captures: list[Capture]
    schedules: list[Schedule]


@dataclass(frozen=True)
class ConsumerDescription:
    """A consumer, and how it fares.

    Attributes:
        consumer: its settings.
        position: where it is.
        stats: what it has before it.
        health: whether it needs somebody.
    """

    consumer: ConsumerInfo
    position: Position
    stats: ConsumerStats
    health: ConsumerHealth
