"""Reading messages without claiming them, their outcomes, and groups."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from spark_pgqueue.client import arguments, reading
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.groups import Group
from spark_pgqueue.client.messages import (
    Batch,
    Done,
    Outcome,
    PeekedMessage,
    PublishedMessage,
    StoredMessage,
)
from spark_pgqueue.client.reading import headers_of
from spark_pgqueue.client.results import GroupStats, PartitionStats
from spark_pgqueue.postgres.errors import PgQueueError


class Reading(Calls):
    """Reading messages without claiming them, their outcomes, and groups."""

    def read(
        self,
        stream: str,
        offset: dict[str, Any] | str | datetime | None = None,
        *,
        max_messages: int = 10_000,
        wait: timedelta | None = None,
    ) -> Iterator[Batch]:
        """Iterate over the messages after an offset, in batches, without claiming them.

        Any number of readers can read the same messages, independently of each other. The messages
        between two offsets never change. An open transaction delays no reader: its messages are
        in a batch after its commit.

            >>> offset = "earliest"
            >>> for batch in queue.read("orders", offset):
            ...     print([message.data for message in batch.messages])
            ...     offset = batch.offset  # to be stored by the reader, with its work
            ['order 1', 'order 2']
            >>> list(queue.read("orders", offset))
            []

        Args:
            stream: the stream's name.
            offset: the offset of the last batch; or, to begin, "earliest" (or None), "latest", or
                a time (with its zone) for messages published since.
            max_messages: the most messages of a batch.
            wait: how long to wait for a message when there is none, as in `receive`; None not to
                wait. The iteration ends when no message arrived.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ003 not an offset, PQ005 an offset of another
                stream, or of the database before it was restored; `wait` inside a transaction, or
                on the caller's connection. Some are raised when the first batch is requested.
        """
        arguments.number("max_messages", max_messages)
        if offset is not None and not isinstance(offset, dict):
            arguments.position("offset", offset)
        patience = arguments.maybe(arguments.patience, "wait", wait)
        if patience is not None:
            self._check_can_wait()
        return self._batches(stream, offset, max_messages, patience)

    def _batches(
        self,
        stream: str,
        offset: dict[str, Any] | str | datetime | None,
        max_messages: int,
        seconds: float | None,
    ) -> Iterator[Batch]:
        stream_id, kind = self._id_and_kind(stream)
        if not isinstance(offset, dict):
            offset = self.start_offset(stream, "earliest" if offset is None else offset)

        def look() -> Batch | None:
            nonlocal offset
            upto = None
            while True:
                # One statement for both, so that a batch takes two statements.
                rows = self._statements.rows(
                    "with following as materialized (select o from pgqueue.read_to(%s::text,"
                    " %s::jsonb, %s::bigint, %s::bigint) o) select o, lo, hi from following"
                    " left join lateral pgqueue.read_plan(%s::text, %s::jsonb, o) on true",
                    [stream, Jsonb(offset), max_messages, upto, stream, Jsonb(offset)],
                )
                following = rows[0][0]
                ranges = [(lo, hi) for _, lo, hi in rows if lo is not None]
                unchanged, offset = following == offset, following
                if ranges:
                    found = reading.all_messages(self._statements, stream, stream_id, kind, ranges)
                    return Batch(found, following)
                if unchanged:
                    return None
                # Messages for named consumers were passed, of a limited number of publications.
                # Go on to the last one that is there now: later ones could keep the loop going.
                if upto is None:
                    last = "select pgqueue.last_publication(%s::int)"
                    (upto,) = self._statements.row(last, [stream_id])

        while True:
            batch = self._long_poll.first(stream, look, look, seconds) if seconds else look()
            if batch is None:
                return
            yield batch

    def _id_and_kind(self, stream: str) -> tuple[int, str]:
        ((stream_id, kind),) = self._rows("open_stream", "stream_id, kind", stream=stream)
        return stream_id, kind

    def start_offset(self, stream: str, start: str | datetime = "earliest") -> dict[str, Any]:
        """The offset at which a reader begins. The position of an offset never changes.

            >>> offset = queue.start_offset("orders", "latest")
            >>> list(queue.read("orders", offset))
            []

        Args:
            stream: the stream's name.
            start: "earliest", "latest" for messages that become visible from now on, or a time
                (with its zone) for messages published since.

        Returns:
            a dict that JSON can hold.
        """
        return self._call("start_offset", stream=stream, start=start)

    def read_to(
        self, stream: str, offset: dict[str, Any], max_messages: int | None = None
    ) -> dict[str, Any]:
        """The offset after the next messages, without reading them.

            >>> first = queue.start_offset("orders")
            >>> last = queue.read_to("orders", first, max_messages=1)
            >>> [message.data for message in queue.read_between("orders", first, last)]
            ['order 1']

        Args:
            stream: the stream's name.
            offset: where to begin.
            max_messages: advance by at most this many messages; None for all messages.

        Returns:
            the next offset; the same offset when there are no messages.
        """
        return self._call("read_to", stream=stream, offset=offset, max_messages=max_messages)

    def read_between(
        self, stream: str, first: dict[str, Any], last: dict[str, Any]
    ) -> list[StoredMessage]:
        """The messages between two offsets. They never change, so a batch can be read again.

        >>> first, last = (queue.start_offset("orders", each) for each in ("earliest", "latest"))
        >>> [message.data for message in queue.read_between("orders", first, last)]
        ['order 1', 'order 2']
        """
        ranges = self._rows("read_plan", "lo, hi", stream=stream, first=first, last=last)
        return reading.all_messages(self._statements, stream, *self._id_and_kind(stream), ranges)

    def peek(self, stream: str, consumer: str, max_messages: int = 10) -> list[PeekedMessage]:
        """The next messages of a consumer, with their content, without claiming them.

        They are approximately in the order of delivery; messages that wait for their key, and
        delayed messages, are last. Claimed messages and dead letters are left out. The call is for
        interactive use: it may read all messages that the consumer has taken and not finished.

            >>> [(message.state, message.data) for message in queue.peek("orders", "billing")]
            [('new', 'order 1'), ('new', 'order 2')]

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            max_messages: return at most this many messages, up to 100,000.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range.
        """
        rows = self._rows(
            "peek",
            "seq, state, key, data, data_bytes, headers::text, priority, deliver_count,"
            " not_visible_until, error, inserted_at",
            stream=stream,
            consumer=consumer,
            max_messages=max_messages,
        )
        return [
            PeekedMessage(seq, state, key, _data(text, binary), *_headers(headers, *others))
            for seq, state, key, text, binary, headers, *others in rows
        ]

    def peek_at(self, stream: str, seq: int, max_messages: int = 1) -> list[PublishedMessage]:
        """Messages of a stream by their numbers, with their content, of any consumer.

            >>> [message.data for message in queue.peek_at("orders", 2)]
            ['order 2']

        Args:
            stream: the stream's name.
            seq: the first number. Messages that were trimmed, or are not published, are left out.
            max_messages: return at most this many messages, up to 100,000.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ003 a value out of range.
        """
        rows = self._rows(
            "peek_at",
            "seq, key, data, data_bytes, headers::text, priority, inserted_at, published_at,"
            " deliver_at, consumers",
            stream=stream,
            seq=seq,
            max_messages=max_messages,
        )
        return [
            PublishedMessage(seq, key, _data(text, binary), *_headers(headers, *others))
            for seq, key, text, binary, headers, *others in rows
        ]

    def outcome(self, stream: str, consumer: str, seq: int) -> Outcome:
        """The outcome of a message, for one consumer.

            >>> queue.receive("orders", "billing").ack()
            1
            >>> queue.outcome("orders", "billing", 1).state
            'done'

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seq: the message's number.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer.
        """
        (found,) = self._read("outcome", Outcome, stream=stream, consumer=consumer, seq=seq)
        return found

    def wait_for(self, stream: str, consumer: str, seq: int, timeout: timedelta) -> Outcome:
        """Wait until a message is done or dead-lettered for a consumer; return its outcome.

        If the consumer has the setting `notify_done`, the outcome arrives at once. Otherwise the
        client polls, with growing pauses of up to a second.

            >>> queue.wait_for("orders", "billing", 1, timedelta(milliseconds=10)).state
            'new'

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seq: the message's number.
            timeout: how long to wait.

        Returns:
            the outcome; its state is not final after a timeout.

        Raises:
            PgQueueError: as `outcome`; or inside a transaction, or on the caller's connection.
        """
        seconds = arguments.patience("timeout", timeout)
        self._check_can_wait()
        look = partial(self.outcome, stream, consumer, seq)
        pid = self._statements.connection().info.backend_pid
        listen = partial(self._call, "listen_done", stream=stream, consumer=consumer, pid=pid)
        return self._long_poll.until(look, lambda found: found.is_final, listen, seconds)

    def history(
        self,
        stream: str,
        consumer: str,
        *,
        since: datetime | None = None,
        limit: int = 100,
    ) -> list[Done]:
        """The last acknowledgements of a consumer with the setting `keep_history`.

            >>> queue.alter_consumer("orders", "billing", {"keep_history": timedelta(days=1)})
            >>> queue.receive("orders", "billing").ack(result={"invoice": 17})
            1
            >>> [(done.seqs, done.result) for done in queue.history("orders", "billing")]
            [([(1, 1)], {'invoice': 17})]

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            since: only from this time on (with its zone); None for the whole history.
            limit: return at most this many acknowledgements.

        Returns:
            the acknowledgements, the last one first.
        """
        rows = self._statements.rows(
            "select array(select array[pg_catalog.lower(r), pg_catalog.upper(r) - 1]"
            " from pg_catalog.unnest(seqs) r), message_count,"
            " deliver_count, result, owner, claim_id, claimed_at, done_at"
            " from pgqueue.message_history"
            " where stream = %s::text and consumer = %s::text"
            " and done_at >= coalesce(%s::timestamptz, '-infinity')"
            " order by done_at desc limit %s::int",
            [
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
                arguments.maybe(arguments.time, "since", since),
                arguments.number("limit", limit),
            ],
        )
        return [_done(*row) for row in rows]

    def create_group(
        self,
        stream: str,
        name: str,
        *,
        partitions: int = 16,
        start: str | datetime | dict[str, Any] = "latest",
        if_not_exists: bool = False,
    ) -> int:
        """Create a group: workers that share a stream, partitioned by key.

            >>> group_id = queue.create_group("orders", "mailing", partitions=4, start="earliest")

        Args:
            stream: the stream's name.
            name: 1 to 200 characters, none of a consumer of the stream.
            partitions: the maximum number of workers, 1 to 1,024. It cannot be changed.
            start: as in `create_consumer`.
            if_not_exists: accept an existing group with as many partitions.

        Returns:
            the group's id.
        """
        return self._call(
            "create_group",
            stream=stream,
            name=name,
            partitions=partitions,
            start=start,
            if_not_exists=if_not_exists,
        )

    def note_offset(self, stream: str, name: str, offset: dict[str, Any]) -> None:
        """Store the offset of a reader, which keeps its own offset, as the position of a group.

        This makes the reader's lag visible, and retention waits for the reader.

            >>> group_id = queue.create_group("orders", "report", partitions=1, start="earliest")
            >>> for batch in queue.read("orders"):
            ...     queue.note_offset("orders", "report", batch.offset)
            >>> [group.behind for group in queue.groups("orders")]
            [0]

        Args:
            stream: the stream's name.
            name: the name of a group of one partition without workers, for this reader alone.
            offset: the reader's offset.

        Raises:
            PgQueueError: PQ003 not an offset, PQ005 an offset of another stream, PQ006 a group with
                workers, PQ007 another isolation than read committed.
        """
        self._call("note_offset", stream=stream, name=name, offset=offset)

    def group(self, stream: str, name: str) -> Group:
        """A group, whose messages `Group.run` handles.

            >>> group_id = queue.create_group("orders", "mailing", start="earliest")
            >>> mailing = queue.group("orders", "mailing")
            >>> mailing.run(lambda messages, connection: None, wait=timedelta(0))
            2

        Raises:
            PgQueueError: the client uses the caller's connection.
        """
        self._check_can_wait()
        return Group(
            self._statements,
            self._long_poll,
            arguments.text("stream", stream),
            arguments.text("name", name),
            self._statements.another,
        )

    def groups(self, stream: str | None = None) -> list[GroupStats]:
        """The groups of a stream, or of all streams, and how far behind they are.

        >>> group_id = queue.create_group("orders", "mailing", partitions=4, start="earliest")
        >>> [(group.name, group.partitions, group.behind) for group in queue.groups("orders")]
        [('mailing', 4, 2)]
        """
        self._must_exist(stream)
        return self._statements.rows(
            'select stream, "group" as name, count(*)::int as partitions,'
            " pg_catalog.count(distinct worker)::int as workers,"
            " pg_catalog.max(behind) as behind, bool_or(estimated) as estimated"
            " from pgqueue.group_stats where stream = coalesce(%s::text, stream)"
            ' group by stream, "group" order by stream, "group"',
            [stream],
            row_factory=class_row(GroupStats),
        )

    def partitions(self, stream: str, name: str) -> list[PartitionStats]:
        """The partitions of a group, with their workers, and how far behind they are.

        >>> group_id = queue.create_group("orders", "mailing", partitions=2)
        >>> [(each.partition, each.worker) for each in queue.partitions("orders", "mailing")]
        [(0, None), (1, None)]
        """
        found = self._statements.rows(
            "select partition, worker, lease_until, committed_at, behind, estimated"
            " from pgqueue.group_stats"
            ' where stream = %s::text and "group" = %s::text order by partition',
            [arguments.text("stream", stream), arguments.text("name", name)],
            row_factory=class_row(PartitionStats),
        )
        if not found:
            self._must_exist(stream)
            raise PgQueueError(
                f"stream {stream!r} has no group {name!r}",
                hint="create it, or list the groups: pgqueue group list",
                sqlstate="PQ002",
            )
        return found


def _data(text: str | None, binary: bytes | None) -> str | bytes:
    return (binary or b"") if text is None else text


def _headers(headers: str | None, *others: Any) -> tuple[Any, ...]:
    found, error = headers_of(headers)
    return found, *others, error


def _done(ranges: list[list[int]], *others: Any) -> Done:
    return Done([(first, last) for first, last in ranges], *others)
