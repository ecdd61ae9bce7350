"""The streams, consumers, groups and their figures that the client returns."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any


@dataclass(frozen=True)
class Stream:
    """A stream.

    Attributes:
        name: the stream's name.
        kind: the kind of its messages: "text", "json" or "binary".
        created_at: when it was created.
        consumers: how many consumers it has.
        messages: how many messages are stored, by the planner's estimate, or by what was sent.
        bytes: the size of the messages on disk.
        sent: how many messages were sent in total, including rolled-back transactions; None for a
            moment while `maintain` skips numbers.
        settings: the settings that the stream was given, as `alter_stream` takes them.
        defaults: its other settings, which have their defaults.
    """

    name: str
    kind: str
    created_at: datetime
    consumers: int
    messages: int
    bytes: int
    sent: int | None
    settings: dict[str, Any]
    defaults: dict[str, Any]


@dataclass(frozen=True)
class Retention:
    """How long the messages of a stream are kept, and how much is stored.

    Attributes:
        stream: the stream's name.
        keep_for: how long a message is kept after its publication; None for no such limit, as in
            the next two.
        keep_messages: a message is kept while fewer messages than this came after it.
        keep_bytes: a message is kept while the messages after it take fewer bytes than this on
            disk.
        until_done: a message is kept only until every consumer is done with it.
        unread: "keep" or "drop": what happens to messages that a consumer is not done with.
        keep_dead: how long dead letters are kept; None for ever.
        bytes: the size of the messages on disk.
        oldest_at: when the oldest message was published; None without messages.
        trimmed: how many messages were trimmed in total.
        held_bytes: bytes on disk that should be trimmed but cannot be.
        held_by: what prevents trimming them.
        maintained_at: when `maintain` was last called, to the minute.
        advice: what to do; None where nothing needs to be done.
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
class Archive:
    """The archive of a stream: files with its old messages.

    Attributes:
        stream: the stream's name.
        uri: the folder of new files; None where no more segments are archived.
        keep_for: how long files are kept, from their last message; None for ever.
        segments: how many segments are in files.
        messages: how many messages these segments have.
        bytes: the size of the files.
        newest_at: when the last of the messages was published; None without messages.
        archived_at: when the last segment was written.
        waiting: how many segments are closed and not yet written.
        waiting_since: when the first of them was closed.
        attempts: how many attempts are running or have left unreferenced files.
        advice: what to do; None where nothing needs to be done.
    """

    stream: str
    uri: str | None
    keep_for: timedelta | None
    segments: int
    messages: int
    bytes: int
    newest_at: datetime | None
    archived_at: datetime | None
    waiting: int
    waiting_since: datetime | None
    attempts: int
    advice: str | None


@dataclass(frozen=True)
class Binding:
    """A binding: messages of a stream are copied to another stream.

    Attributes:
        stream: the stream's name.
        topic: the topic of the keys that are copied.
        to_stream: the other stream's name.
        bound_at: when the binding was made.
    """

    stream: str
    topic: str
    to_stream: str
    bound_at: datetime


@dataclass(frozen=True)
class Schedule:
    """A schedule, which sends a message at each of its times.

    Attributes:
        stream: the stream's name.
        name: the schedule's name.
        cron: a cron expression, or None.
        every: or an interval, as Postgres prints it.
        time_zone: the time zone of `cron` and `every`.
        next_at: the next time; None while the schedule is paused.
        paused: whether the schedule sends nothing until it is resumed.
        last_planned_at: the planned time of the last message; None before the first.
        last_sent_at: when that message was sent.
        last_seq: the number of that message; None where it could not be sent ...
        last_error: ... and the reason for that.
        key: the key of its messages.
        data: their payload.
        headers: their headers, without those that name the schedule.
        priority: their priority.
        consumers: the names of the consumers that get them; None for all.
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
        name: the consumer's name.
        ordering: "none", "key" or "stream".
        max_deliver_count: a message that failed this often is dead-lettered; None for never.
        visibility_timeout: how long a claim is held without being extended.
        created_at: when the consumer was created.
        paused: whether the consumer claims nothing until it is resumed.
        topic: the topic of the keys of its messages; None for all.
        where: a jsonpath that its messages pass; None for all.
        settings: the settings that the consumer was given, as `alter_consumer` takes them.
        defaults: its other settings, which have their defaults.
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
    defaults: dict[str, Any]


@dataclass(frozen=True)
class ConsumerStats:
    """The figures of a consumer: numbers of messages, unless stated otherwise.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        ordering: "none", "key" or "stream".
        new: published, not yet taken by the consumer.
        ready: can be delivered now.
        delayed: delivered later.
        waiting: behind an earlier message of the same key.
        claimed: held by workers.
        dead: dead letters.
        backlog: new, ready, delayed and waiting together.
        claims: how many claims there are.
        expired: how many claims are past their visibility timeout.
        next_expiry: when the first claim expires; None without claims.
        skipped: how many unread messages retention has dropped, in total.
        paused: whether the consumer claims nothing until it is resumed.
        taken: how many messages it has taken, in total; messages after a seek count again.
        settled: how many messages were acknowledged or dead-lettered, in total; the difference
            between two calls is a rate.
        oldest_at: when the oldest message was sent that can be delivered now; None without.
        oldest_claim_at: when the oldest claim was made; None without.
        estimated: whether new and backlog are estimates, because very many publications are new.
        stuck: how many claims were extended beyond ten visibility timeouts: their workers may hang.
        status: as in `ConsumerHealth`.
        because: the reason for the status, for people.
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
    estimated: bool
    stuck: int
    status: str
    because: str


@dataclass(frozen=True)
class OpenClaim:
    """A claim that is not settled yet.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        claim_id: the claim's number.
        owner: the application_name of the connection that claimed.
        query: the id of the Spark query that holds the claim; None for a worker.
        claimed_at: when the claim was made.
        lease_until: when its lease ends; afterwards other workers may take it over.
        expired: whether the lease has ended.
        messages: how many messages it holds; of a Spark query's claim, how many it held at first.
        remaining: how many messages are not settled.
        first_seq: the first number of these.
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
    """A key of a consumer: numbers of messages that the consumer has taken and not finished.

    Attributes:
        key: the key; None for messages without one.
        waiting: behind another message of the key.
        delayed: to be delivered later.
        in_flight: in claims.
        first_seq: the lowest number of all these.
        until: when the first delay ends; without delays, when the last lease ends.
        unfinished: all unfinished messages of the key, if the consumer has a `per_key_capacity`;
            otherwise None.
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
    """The figures of all streams at one moment.

    Attributes:
        at: the database's clock.
        streams: the streams, by name.
        consumers: the consumers and groups, by stream and name.
        partitions: the partitions of groups, by stream, group and partition.
    """

    at: datetime
    streams: list[Stream]
    consumers: list[ConsumerStats]
    partitions: list[tuple[str, str, PartitionStats]]


@dataclass(frozen=True)
class ConsumerHealth:
    """The health of a consumer.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        status: the first of these that applies: "full", the backlog has reached max_backlog;
            "paused"; "unattended", messages can be claimed or a lease has ended, and no worker has
            claimed for a minute; "stuck", a worker extends a claim beyond ten visibility timeouts;
            "failing", messages were dead-lettered in the last hour, or delivered ten times without
            a limit; "dead_letters", there are older dead letters; "ok".
        because: the reason for the status, for people.
        backlog: how many messages are not claimed.
        max_backlog: how many messages the backlog may have; None for any number.
        attended_at: when a worker last claimed messages, to about a second; None for never.
        estimated: whether backlog is an estimate; the status never depends on an estimate.
    """

    stream: str
    consumer: str
    status: str
    because: str
    backlog: int
    max_backlog: int | None
    attended_at: datetime | None
    estimated: bool


@dataclass(frozen=True)
class GroupStats:
    """A group.

    Attributes:
        stream: the stream's name.
        name: the group's name.
        partitions: how many partitions it has.
        workers: how many workers have partitions.
        behind: how many messages, of all keys, are after the position of the slowest partition.
        estimated: whether behind is an estimate, because very many publications are new.
    """

    stream: str
    name: str
    partitions: int
    workers: int
    behind: int
    estimated: bool


@dataclass(frozen=True)
class PartitionStats:
    """A partition of a group.

    Attributes:
        partition: the partition's number, from 0.
        worker: the worker that leases the partition; None for none.
        lease_until: when the lease ends; None without a worker.
        committed_at: when its offset was last committed; None for never.
        behind: how many messages of the group, of all keys, are after its position.
        estimated: whether behind is an estimate, because very many publications are new.
    """

    partition: int
    worker: str | None
    lease_until: datetime | None
    committed_at: datetime | None
    behind: int
    estimated: bool


@dataclass(frozen=True)
class Capture:
    """A table whose changes become messages.

    Attributes:
        table: the table's name, with its schema.
        stream: the stream of the messages.
        owner: the role that owns the table, and that sends the messages.
        options: the captured key and columns, as text.
        outbox: whether only inserts are captured, and the rows deleted again.
        uncaptured_partitions: how many partitions do not capture rows that are written to them
            directly.
    """

    table: str
    stream: str
    owner: str
    options: str | None
    outbox: bool
    uncaptured_partitions: int


@dataclass(frozen=True)
class Position:
    """The position of a consumer in its stream.

    Attributes:
        next_seq: the number of the first message that was not taken; without one, at most the
            number of the next message to be sent.
        published_at: when that message was published; None without one.
        in_gaps: earlier publications that were not visible yet, or will be delivered again.
    """

    next_seq: int
    published_at: datetime | None
    in_gaps: int
