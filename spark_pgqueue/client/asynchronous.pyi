"""The client for asyncio, for type checkers. Written by: make docs."""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from psycopg import AsyncConnection

from spark_pgqueue.client.calls.sending import Payload
from spark_pgqueue.client.descriptions import ConsumerDescription, StreamDescription
from spark_pgqueue.client.groups import Handler
from spark_pgqueue.client.messages import (
    Batch,
    DeadLetters,
    DeadMessage,
    Done,
    Explanation,
    Failure,
    Message,
    Outcome,
    PeekedMessage,
    PublishedMessage,
    StoredMessage,
)
from spark_pgqueue.client.results import (
    Archive,
    Binding,
    Capture,
    ConsumerHealth,
    ConsumerInfo,
    ConsumerStats,
    GroupStats,
    KeyStats,
    Look,
    OpenClaim,
    PartitionStats,
    Position,
    Retention,
    Schedule,
    Stream,
)

async def connect_async(
    url: str | None = None, *, patience: float = ..., connections: int = 10
) -> AsyncClient:
    """Connect to the database of a queue, for asyncio."""

class AsyncClaim:
    """A claim, for asyncio: see `Claim`. Its methods have the same arguments, and are awaited."""

    claim_id: int
    messages: tuple[Message, ...]

    async def ack(self, messages: Iterable[Message] | None = None, *, result: Any = None) -> int:
        """Acknowledge: see `Client.ack`. `messages`: None for all of them."""

    async def dead_letter(
        self,
        messages: Iterable[Message] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int:
        """Dead-letter: see `Client.dead_letter`. `messages`: None for all of them."""

    async def defer(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta = ...,
        state: Any = None,
    ) -> int:
        """Deliver later, with a state: see `Client.defer`. `messages`: None for all of them."""

    async def extend(self, by: timedelta | None = None) -> int:
        """Extend the lease: see `Client.extend`."""

    async def nack(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
    ) -> int:
        """Return for another delivery: see `Client.nack`. `messages`: None for all of them."""

class AsyncClient:
    """A queue, for asyncio: see `Client`. Made by `connect_async`, or with a connection of the
    caller, in whose transaction each call then takes part.

    It has all methods of `Client`, with the same arguments. Methods are awaited; methods that
    iterate are for `async for`. Methods of claims are awaited, too: `await claim.ack()`.

    Tasks may share a client. Calls that do not wait for messages share one connection, one at a
    time. A call that waits uses another connection and delays no other task; when all `connections`
    of `connect_async` are in use, it waits for one. An iteration with `wait`, and the run of a
    group, have a connection of their own, which does not count there.

    `transaction` is for one task. A cancelled call may have taken effect, but a claim that its
    caller did not receive is returned.

        >>> async def main():
        ...     async with await psycopg.AsyncConnection.connect(url) as connection:
        ...         await connection.execute("insert into bills values (3, 12)")
        ...         return await AsyncClient(connection).send("orders", "order 3")
        >>> asyncio.run(main())
        3

    Args:
        connection: an open AsyncConnection of psycopg. `close` leaves it open.

    Raises:
        PgQueueError: the connection is not psycopg's, or not asynchronous."""

    def __init__(self, connection: AsyncConnection[Any]): ...
    @asynccontextmanager
    def transaction(self) -> AsyncIterator[AsyncClient]:
        """Make the calls inside one transaction: see `Client.transaction`."""

    async def close(self) -> None:
        """Close the connections. Calls that wait return as after a timeout."""

    async def __aenter__(self) -> AsyncClient: ...
    async def __aexit__(self, *_: object) -> None: ...
    async def ack(
        self, claim_id: int, seqs: Iterable[int] | None = None, *, result: Any = None
    ) -> int:
        """Acknowledge a claim: its messages are done."""

    async def ack_message(self, message: Message, *, result: Any = None) -> None:
        """Acknowledge a message in the transaction in which its handler writes: exactly once."""

    async def alter_consumer(self, stream: str, name: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a consumer while it is in use."""

    async def alter_stream(self, stream: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a stream while it is in use, for messages sent from then on."""

    async def archives(self, stream: str | None = None) -> list[Archive]:
        """What is in the archive of a stream, or in those of all streams."""

    async def bind(self, stream: str, topic: str, to_stream: str) -> None:
        """Copy messages of a stream to another stream from now on, in the sender's transaction."""

    async def bindings(self, stream: str | None = None) -> list[Binding]:
        """The bindings of a stream, or of all."""

    async def cancel(self, stream: str, consumer: str, seqs: Iterable[int]) -> int:
        """Cancel unfinished messages of a consumer, in any state."""

    async def capture(
        self,
        table: str,
        stream: str,
        *,
        keys: Iterable[str] | None = None,
        columns: Iterable[str] | None = None,
        old: bool = False,
        outbox: bool = False,
    ) -> None:
        """Turn the changes of a table into messages, in the transaction that changes it."""

    async def captures(self) -> list[Capture]:
        """All tables that are captured, by name."""

    def consume(
        self,
        stream: str,
        consumer: str,
        *,
        prefetch: int = 100,
        visibility_timeout: timedelta | None = None,
        wait: timedelta | None = None,
    ) -> AsyncIterator[Message]:
        """Iterate over single messages, which are claimed many at a time."""

    async def consumers(self, stream: str | None = None) -> list[ConsumerInfo]:
        """The consumers of a stream, or of all streams, by name."""

    async def create_consumer(
        self,
        stream: str,
        name: str,
        *,
        start: str | datetime | dict[str, Any] = "latest",
        ordering: str = "none",
        if_not_exists: bool = False,
        topic: str | None = None,
        where: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> int:
        """Create a consumer of a stream."""

    async def create_group(
        self,
        stream: str,
        name: str,
        *,
        partitions: int = 16,
        start: str | datetime | dict[str, Any] = "latest",
        if_not_exists: bool = False,
    ) -> int:
        """Create a group: workers that share a stream, partitioned by key."""

    async def create_schedule(
        self,
        stream: str,
        name: str,
        data: str | bytes,
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        time_zone: str = "UTC",
        start: datetime | None = None,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        priority: int = 0,
        consumers: Iterable[str] | None = None,
        replace: bool = False,
    ) -> datetime:
        """Send a message at the times of a cron expression or an interval."""

    async def create_stream(
        self,
        name: str,
        kind: str = "text",
        *,
        if_not_exists: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> int:
        """Create a stream."""

    async def dead_letter(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int:
        """Dead-letter the messages of a claim: they are kept, and not delivered again."""

    async def dead_letters(
        self, stream: str | None = None, consumer: str | None = None, *, limit: int = 1000
    ) -> list[DeadLetters]:
        """The dead letters of consumers, newest first; one entry for those dead-lettered together."""

    async def defer(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta = ...,
        state: Any = None,
    ) -> int:
        """Deliver the messages of a claim later. This counts neither as a failure nor a delivery."""

    async def describe_consumer(self, stream: str, consumer: str) -> ConsumerDescription:
        """A consumer with its settings, its position and its figures."""

    async def describe_stream(self, stream: str) -> StreamDescription:
        """A stream with its settings, its sizes, and everything that belongs to it."""

    async def drop_archive(self, stream: str) -> None:
        """Delete the archive of a stream with all its messages."""

    async def drop_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer or a group. Its claims end; its unfinished messages are discarded."""

    async def drop_schedule(self, stream: str, name: str) -> None:
        """Delete a schedule. Messages that it has sent are kept."""

    async def drop_stream(self, name: str) -> None:
        """Delete a stream with its messages and consumers, and the files of its archive."""

    async def explain(self, stream: str, consumer: str, seq: int) -> Explanation:
        """Why a message is in its state, for one consumer."""

    async def extend(self, claim_id: int, by: timedelta | None = None) -> int:
        """Extend the lease of a claim."""

    async def failures(self, stream: str, consumer: str, seq: int) -> list[Failure]:
        """The last ten failed deliveries of an unfinished message or a dead letter."""

    async def group(self, stream: str, name: str) -> AsyncGroup:
        """A group, whose messages `Group.run` handles."""

    async def groups(self, stream: str | None = None) -> list[GroupStats]:
        """The groups of a stream, or of all streams, and how far behind they are."""

    async def health(self, stream: str | None = None) -> list[ConsumerHealth]:
        """The health of the consumers of a stream, or of all: which need attention, and why."""

    async def history(
        self, stream: str, consumer: str, *, since: datetime | None = None, limit: int = 100
    ) -> list[Done]:
        """The last acknowledgements of a consumer with the setting `keep_history`."""

    async def install(self, *, pgmq: bool = False, without: Collection[str] = ...) -> int:
        """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat."""

    async def key_stats(self, stream: str, consumer: str, *, limit: int = 100) -> list[KeyStats]:
        """The keys with the most messages that a consumer has taken and not finished."""

    async def kind(self, stream: str) -> str:
        """The kind of the messages of a stream: "text", "json" or "binary"."""

    async def look(self) -> Look:
        """All figures of all streams, from counters, for a display that polls."""

    async def maintain(
        self, staged_age: timedelta = ..., reader_age: timedelta = ...
    ) -> dict[str, int]:
        """Trim messages according to retention, and delete the chunks of failed writers."""

    async def nack(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
        backoff: bool = False,
    ) -> int:
        """Return a claim: its messages are delivered again."""

    async def note_offset(self, stream: str, name: str, offset: dict[str, Any]) -> None:
        """Store the offset of a reader, which keeps its own offset, as the position of a group."""

    async def open_claims(
        self, stream: str | None = None, consumer: str | None = None, *, limit: int = 1000
    ) -> list[OpenClaim]:
        """The open claims of all consumers, or of one, in the order in which their leases end."""

    async def outcome(self, stream: str, consumer: str, seq: int) -> Outcome:
        """The outcome of a message, for one consumer."""

    async def partitions(self, stream: str, name: str) -> list[PartitionStats]:
        """The partitions of a group, with their workers, and how far behind they are."""

    async def pause(self, stream: str, consumer: str) -> None:
        """Suspend claims for a consumer until `resume`. Claimed messages can still be settled."""

    async def pause_schedule(self, stream: str, name: str) -> None:
        """Suspend a schedule until it is resumed. Safe to repeat."""

    async def peek(self, stream: str, consumer: str, max_messages: int = 10) -> list[PeekedMessage]:
        """The next messages of a consumer, with their content, without claiming them."""

    async def peek_at(self, stream: str, seq: int, max_messages: int = 1) -> list[PublishedMessage]:
        """Messages of a stream by their numbers, with their content, of any consumer."""

    async def position(self, stream: str, consumer: str) -> Position:
        """The position of a consumer in its stream."""

    async def postpone(
        self, stream: str, consumer: str, seqs: Iterable[int], until: datetime
    ) -> int:
        """Change the time of the next delivery of messages that are not claimed."""

    async def purge_dead(
        self,
        stream: str,
        consumer: str,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        before: datetime | None = None,
        max_messages: int | None = None,
    ) -> int:
        """Delete dead letters: they are not delivered again."""

    def read(
        self,
        stream: str,
        offset: dict[str, Any] | str | datetime | None = None,
        *,
        max_messages: int = 10000,
        wait: timedelta | None = None,
    ) -> AsyncIterator[Batch]:
        """Iterate over the messages after an offset, in batches, without claiming them."""

    async def read_between(
        self, stream: str, first: dict[str, Any], last: dict[str, Any]
    ) -> list[StoredMessage]:
        """The messages between two offsets. They never change, so a batch can be read again."""

    def read_dead(
        self,
        stream: str,
        consumer: str,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        before: datetime | None = None,
    ) -> AsyncIterator[DeadMessage]:
        """Read dead letters of a consumer with their content, in the order of their numbers."""

    async def read_to(
        self, stream: str, offset: dict[str, Any], max_messages: int | None = None
    ) -> dict[str, Any]:
        """The offset after the next messages, without reading them."""

    async def receive(
        self,
        stream: str,
        consumer: str,
        max_messages: int = 1,
        *,
        visibility_timeout: timedelta | None = None,
        ack: AsyncClaim | int | None = None,
        wait: timedelta | None = None,
        where: str | None = None,
        look: int = 10000,
    ) -> AsyncClaim | None:
        """Claim messages for a consumer, and read them."""

    async def recover(self) -> dict[str, int]:
        """Begin a new incarnation of each stream, after a restore or the promotion of a standby."""

    async def redrive(
        self,
        stream: str,
        consumer: str,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        before: datetime | None = None,
        max_messages: int | None = 1000,
        reset: bool = True,
    ) -> int:
        """Deliver dead letters of a consumer to it again."""

    async def release(self, table: str, stream: str) -> None:
        """Stop capturing a table. Arguments and errors as in `capture`."""

    async def replay(
        self,
        stream: str,
        consumer: str,
        start: str | datetime | dict[str, Any],
        to: str | datetime | dict[str, Any] = "latest",
    ) -> int:
        """Deliver messages again that a consumer has finished or skipped."""

    async def resume(self, stream: str, consumer: str) -> None:
        """Resume a paused consumer."""

    async def resume_schedule(self, stream: str, name: str) -> datetime:
        """Resume a paused schedule; returns its next time."""

    async def retention(self, stream: str | None = None) -> list[Retention]:
        """How long the messages of a stream, or of all streams, are kept, and what is stored."""

    async def retry(self, stream: str, consumer: str, seqs: Iterable[int] | None = None) -> int:
        """End the delays of messages that are not claimed, for instance after an outage."""

    async def schedule_times(
        self,
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        time_zone: str = "UTC",
        start: datetime | None = None,
        after: datetime | None = None,
        count: int = 5,
    ) -> list[datetime]:
        """The next times of a hypothetical schedule: arguments as in `create_schedule`."""

    async def schedules(self, stream: str | None = None) -> list[Schedule]:
        """The schedules of a stream, or of all, by name."""

    async def schema_of(self, stream: str) -> dict[str, Any] | None:
        """The columns of a stream's schema, for Spark's `StructType.fromJson`; None without one."""

    async def seek(self, stream: str, consumer: str, to: str | datetime | dict[str, Any]) -> int:
        """Move a consumer, as if it were created at that position."""

    async def send(
        self,
        stream: str,
        data: Payload,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        priority: int = 0,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_key: str | None = None,
        expires_at: datetime | None = None,
    ) -> int:
        """Publish a message."""

    async def send_batch(
        self,
        stream: str,
        data: Iterable[Payload],
        *,
        keys: Iterable[str | None] | None = None,
        headers: Iterable[Mapping[str, Any] | None] | None = None,
        priority: int = 0,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_keys: Iterable[str | None] | None = None,
        expires_at: datetime | None = None,
    ) -> list[int]:
        """Publish messages together: they become visible at the same time, in the order given."""

    async def set_archive(
        self, stream: str, uri: str | None, *, keep_for: timedelta | None = None
    ) -> None:
        """Archive the messages of a stream in files before retention deletes them."""

    async def set_retention(
        self,
        stream: str,
        *,
        keep_for: timedelta | None = None,
        messages: int | None = None,
        size: int | None = None,
        done: bool = False,
        unread: str = "keep",
        keep_dead: timedelta | None = None,
    ) -> None:
        """Set how long the messages of a stream are kept; without any limit, forever."""

    async def start_offset(self, stream: str, start: str | datetime = "earliest") -> dict[str, Any]:
        """The offset at which a reader begins. The position of an offset never changes."""

    async def stats(self, stream: str | None = None) -> list[ConsumerStats]:
        """The figures of the consumers of a stream, or of all streams, from counters."""

    async def streams(self) -> list[Stream]:
        """All streams, by name."""

    async def test_topic(self, pattern: str, key: str | None) -> bool:
        """Whether a key matches a topic."""

    async def unbind(self, stream: str, topic: str, to_stream: str) -> bool:
        """Remove a binding; returns whether it existed."""

    async def wait_for(self, stream: str, consumer: str, seq: int, timeout: timedelta) -> Outcome:
        """Wait until a message is done or dead-lettered for a consumer; return its outcome."""

class AsyncGroup:
    """A group, for asyncio: see `Group`. Made by `AsyncClient.group`."""

    async def run(
        self,
        handler: Handler,
        *,
        worker: str | None = None,
        lease: timedelta = ...,
        max_messages: int = 1000,
        wait: timedelta | None = None,
    ) -> int:
        """Handle messages, as one of the workers of the group."""

    def stop(self) -> None:
        """End `run` after the current call of the handler; or the next `run`, if none has begun."""
