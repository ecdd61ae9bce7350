"""The client for asyncio, for type checkers. Written by: make docs."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any

from spark_pgqueue.client.groups import Handler
from spark_pgqueue.client.results import (
    Batch,
    Binding,
    Capture,
    ConsumerDescription,
    ConsumerHealth,
    ConsumerInfo,
    ConsumerStats,
    DeadLetters,
    DeadMessage,
    Done,
    Explanation,
    GroupStats,
    Imported,
    KeyStats,
    Look,
    Message,
    OpenClaim,
    Outcome,
    PartitionStats,
    PeekedMessage,
    Position,
    PublishedMessage,
    Retention,
    Schedule,
    StoredMessage,
    Stream,
    StreamDescription,
)

async def connect_async(url: str | None = None, *, patience: float = ...) -> AsyncClient:
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
        """Give up on them: see `Client.dead_letter`. `messages`: None for all of them."""

    async def defer(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta = ...,
        state: Any = None,
    ) -> int:
        """Put off, with a state: see `Client.defer`. `messages`: None for all of them."""

    async def extend(self, by: timedelta | None = None) -> int:
        """Hold the claim longer: see `Client.extend`."""

    async def nack(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
    ) -> int:
        """Return for another delivery: see `Client.nack`. `messages`: None for all of them."""

class AsyncClient:
    """A queue, over one connection, for asyncio: see `Client`. Made by `connect_async`.

    Each method of `Client` is one of these, with the same arguments, and is awaited; those that
    iterate are for `async for`. So are the methods of claims: `await claim.ack()`.

    Tasks can share a client, and then wait for each other; `transaction` is for one task. A call
    that is cancelled may have taken effect; but a claim that nobody heard of is given back."""

    @asynccontextmanager
    def transaction(self) -> AsyncIterator[AsyncClient]:
        """Make the calls inside one transaction: see `Client.transaction`."""

    async def close(self) -> None:
        """Close the connection. Safe to repeat."""

    async def __aenter__(self) -> AsyncClient: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    async def ack(
        self, claim_id: int, seqs: Iterable[int] | None = None, *, result: Any = None
    ) -> int:
        """Acknowledge a claim: its messages are done."""

    async def alter_consumer(self, stream: str, name: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a consumer while it is in use."""

    async def alter_stream(self, stream: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a stream while it is in use: what is sent from then on goes by them."""

    async def bind(self, stream: str, topic: str, to_stream: str) -> None:
        """Copy what is sent to a stream from now on to another one, in the sender's transaction."""

    async def bindings(self, stream: str | None = None) -> list[Binding]:
        """The bindings of a stream, or of all."""

    async def cancel(self, stream: str, consumer: str, seqs: Iterable[int]) -> int:
        """Take messages from a consumer that has not finished them, wherever it has them."""

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
        """Let what is written to a table become messages, in the transaction that writes it."""

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
        """Iterate over messages one at a time, claimed many at a time: for work on single messages."""

    async def consumers(self, stream: str | None = None) -> list[ConsumerInfo]:
        """The consumers of a stream, or of all streams, by name."""

    async def create_consumer(
        self,
        stream: str,
        name: str,
        *,
        start: str | datetime | dict[str, Any] = "latest",
        ordering: str = "none",
        max_deliver_count: int | None = None,
        visibility_timeout: timedelta = ...,
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
        """Create a group: workers that share a stream by partitions of its keys."""

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
        """Send a message at each time that a cron expression, or an interval, says."""

    async def create_stream(
        self,
        name: str,
        kind: str = "text",
        *,
        if_not_exists: bool = False,
        notify: bool = True,
        max_bytes: int = ...,
        max_header_bytes: int = ...,
        dedup_window: timedelta | None = None,
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
        """Give up on a claim: its messages are kept as dead, and not delivered again."""

    async def dead_letters(
        self, stream: str | None = None, consumer: str | None = None, *, limit: int = 1000
    ) -> list[DeadLetters]:
        """The dead letters of consumers, those that died together as one; the newest first."""

    async def defer(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta = ...,
        state: Any = None,
    ) -> int:
        """Put a claim off: deliver it later. That is no failure, and counts as no delivery."""

    async def describe_consumer(self, stream: str, consumer: str) -> ConsumerDescription:
        """A consumer with its settings, where it is, and what it has before it."""

    async def describe_stream(self, stream: str) -> StreamDescription:
        """A stream with its settings, its sizes, and all that belongs to it."""

    async def drop_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer with all that it has not finished; its claims end."""

    async def drop_group(self, stream: str, name: str) -> None:
        """Delete a group; its workers are told when they come back."""

    async def drop_schedule(self, stream: str, name: str) -> None:
        """Delete a schedule; what it sent stays."""

    async def drop_stream(self, name: str) -> None:
        """Delete a stream with its messages and consumers."""

    async def explain(self, stream: str, consumer: str, seq: int) -> Explanation:
        """Why a message is where it is, for one consumer."""

    def export_lines(self, stream: str) -> AsyncIterator[str]:
        """Iterate over the messages of a stream as lines of JSON, in the order of publication."""

    async def extend(self, claim_id: int, by: timedelta | None = None) -> int:
        """Hold a claim longer."""

    async def group(self, stream: str, name: str) -> AsyncGroup:
        """A group, to work in: see `Group.run`."""

    async def groups(self, stream: str | None = None) -> list[GroupStats]:
        """The groups of a stream, or of all streams, and how far behind they are."""

    async def health(self, stream: str | None = None) -> list[ConsumerHealth]:
        """How the consumers of a stream, or of all streams, fare: which need somebody, and why."""

    async def history(
        self, stream: str, consumer: str, *, since: datetime | None = None, limit: int = 100
    ) -> list[Done]:
        """What was acknowledged last, of a consumer with the setting `keep_history`."""

    async def import_lines(self, stream: str, lines: Iterable[str]) -> Imported:
        """Publish messages that are written as lines of JSON, in their order: all, or none."""

    async def install(self) -> int:
        """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat."""

    async def key_stats(self, stream: str, consumer: str, *, limit: int = 100) -> list[KeyStats]:
        """The keys of which a consumer has most in hand, those with most of it first."""

    async def kind(self, stream: str) -> str:
        """What the messages of a stream hold: "text", "json" or "binary"."""

    async def look(self) -> Look:
        """All figures of all streams, for who shows them again and again: it counts no messages."""

    async def maintain(
        self, staged_age: timedelta = ..., reader_age: timedelta = ...
    ) -> dict[str, int]:
        """Trim what need not be kept, and delete what failed writers left."""

    async def nack(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
    ) -> int:
        """Return a claim, to be delivered again."""

    async def note_offset(self, stream: str, name: str, offset: dict[str, Any]) -> None:
        """Note how far a reader is that keeps its offset itself: the group is then as far."""

    async def open_claims(
        self, stream: str | None = None, consumer: str | None = None, *, limit: int = 1000
    ) -> list[OpenClaim]:
        """The claims that are held, those first whose lease ends first; of all, or of one consumer."""

    async def outcome(self, stream: str, consumer: str, seq: int) -> Outcome:
        """What became of a message, for one consumer."""

    async def partitions(self, stream: str, name: str) -> list[PartitionStats]:
        """The partitions of a group: who has them, and how far behind they are."""

    async def pause(self, stream: str, consumer: str) -> None:
        """Let a consumer claim nothing, until `resume`. What is claimed is settled as ever."""

    async def pause_schedule(self, stream: str, name: str) -> None:
        """Let a schedule send nothing, until it is resumed. Safe to repeat."""

    async def peek(self, stream: str, consumer: str, max_messages: int = 10) -> list[PeekedMessage]:
        """What a consumer has before it, with what it holds, without claiming it."""

    async def peek_at(self, stream: str, seq: int, max_messages: int = 1) -> list[PublishedMessage]:
        """Messages of a stream by their numbers, with what they hold, whoever is to get them."""

    async def position(self, stream: str, consumer: str) -> Position:
        """Where a consumer is in its stream."""

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
        """Delete dead letters: nobody gets them any more."""

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
        """The messages between two offsets, the same for ever: a batch once more."""

    def read_dead(
        self,
        stream: str,
        consumer: str,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        before: datetime | None = None,
    ) -> AsyncIterator[DeadMessage]:
        """Read dead letters of a consumer with what they hold, in the order of their numbers."""

    async def read_to(
        self, stream: str, offset: dict[str, Any], max_messages: int | None = None
    ) -> dict[str, Any]:
        """The offset after the next messages, which are not read."""

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
        """Deliver dead letters again, to the consumer that gave them up and to no other."""

    async def release(self, table: str, stream: str) -> None:
        """Capture a table no more. Arguments and errors as in `capture`."""

    async def replay(
        self,
        stream: str,
        consumer: str,
        start: str | datetime | dict[str, Any],
        to: str | datetime | dict[str, Any] = "latest",
    ) -> int:
        """Deliver messages once more that a consumer has finished, or skipped."""

    async def reset_group(self, stream: str, name: str, to: str | datetime | dict[str, Any]) -> int:
        """Move a group to another position of its stream; its workers go on from there."""

    async def resume(self, stream: str, consumer: str) -> None:
        """Let a paused consumer claim again."""

    async def resume_schedule(self, stream: str, name: str) -> datetime:
        """Let a paused schedule send again, from its next time on, which is returned."""

    async def retention(self, stream: str | None = None) -> list[Retention]:
        """How long the messages of a stream, or of all streams, are kept, and what is stored."""

    async def retry(self, stream: str, consumer: str, seqs: Iterable[int] | None = None) -> int:
        """End the delays of messages that nobody has claimed: after an outage, say."""

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
        """The next times of a schedule that is not made yet: arguments as in `create_schedule`."""

    async def schedules(self, stream: str | None = None) -> list[Schedule]:
        """The schedules of a stream, or of all, by name."""

    async def seek(self, stream: str, consumer: str, to: str | datetime | dict[str, Any]) -> int:
        """Move a consumer, as if it were created there."""

    async def send(
        self,
        stream: str,
        data: str | bytes,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        priority: int = 0,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_key: str | None = None,
        expires_at: datetime | None = None,
    ) -> int:
        """Publish a message."""

    async def send_batch(
        self,
        stream: str,
        data: Iterable[str] | Iterable[bytes],
        *,
        keys: Iterable[str | None] | None = None,
        headers: Iterable[Mapping[str, Any] | None] | None = None,
        priority: int = 0,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_keys: Iterable[str | None] | None = None,
        expires_at: datetime | None = None,
    ) -> list[int]:
        """Publish messages together: they become visible at once, in the order given."""

    async def set_dedup_window(self, stream: str, window: timedelta | None) -> None:
        """Say for how long a stream remembers the dedup keys of its messages."""

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
        """Set how long the messages of a stream are kept; without any limit, for ever."""

    async def start_offset(self, stream: str, start: str | datetime = "earliest") -> dict[str, Any]:
        """The offset at which a reader begins; to keep, so that it begins there for ever."""

    async def stats(self, stream: str | None = None) -> list[ConsumerStats]:
        """What the consumers of a stream, or of all streams, have before them; counts no rows."""

    async def streams(self) -> list[Stream]:
        """All streams, by name."""

    async def test_topic(self, pattern: str, key: str | None) -> bool:
        """Whether a key is of a topic."""

    async def unbind(self, stream: str, topic: str, to_stream: str) -> bool:
        """Copy nothing of a topic to another stream any more; whether it was bound."""

    async def wait_for(self, stream: str, consumer: str, seq: int, timeout: timedelta) -> Outcome:
        """Wait until a consumer is done with a message, or gave it up, and say what became of it."""

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
        """Work off messages, as one of the workers of the group."""

    def stop(self) -> None:
        """End `run`, from another thread or a signal, after the call of the handler at hand."""
