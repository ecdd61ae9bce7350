"""The state of messages and consumers, and dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import statement
from spark_pgqueue.client.calls.managing import Managing
from spark_pgqueue.client.calls.reading import Reading
from spark_pgqueue.client.calls.sending import Sending
from spark_pgqueue.client.descriptions import ConsumerDescription, StreamDescription
from spark_pgqueue.client.messages import DeadLetters, DeadMessage, Explanation, Failure
from spark_pgqueue.client.reading import headers_of
from spark_pgqueue.client.results import (
    Capture,
    KeyStats,
    Look,
    OpenClaim,
    PartitionStats,
    Position,
    Stream,
)

PAGE = 500  # messages that are read at once

_DEAD = (
    "seq, key, data, data_bytes, headers::text, priority, inserted_at, reason, error, details,"
    " deliver_count, owner, died_at"
)


class Monitoring(Sending, Reading, Managing):
    """The state of messages and consumers, and dead letters."""

    def explain(self, stream: str, consumer: str, seq: int) -> Explanation:
        """Why a message is in its state, for one consumer.

            >>> explained = queue.explain("orders", "billing", 1)
            >>> explained.state, explained.until
            ('new', None)

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seq: the message's number.

        Returns:
            the state, the reason, and the end of the state. The call is for interactive use: it may
            read all messages that the consumer has taken and not finished.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 not a number.
        """
        (found,) = self._read(
            "explain_message", Explanation, stream=stream, consumer=consumer, seq=seq
        )
        return found

    def failures(self, stream: str, consumer: str, seq: int) -> list[Failure]:
        """The last ten failed deliveries of an unfinished message or a dead letter.

            >>> queue.receive("orders", "billing").nack(delay=timedelta(0), reason="no answer")
            1
            >>> [failure.error for failure in queue.failures("orders", "billing", 1)]
            ['no answer']

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seq: the message's number.

        Returns:
            the failures, the oldest first; none for a message that is done. The call is for
            interactive use: it may read all messages that the consumer has taken and not finished.
        """
        return self._read("failures", Failure, stream=stream, consumer=consumer, seq=seq)

    def open_claims(
        self, stream: str | None = None, consumer: str | None = None, *, limit: int = 1000
    ) -> list[OpenClaim]:
        """The open claims of all consumers, or of one, in the order in which their leases end.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> [(each.consumer, each.messages) for each in queue.open_claims("orders")]
            [('billing', 2)]

        Args:
            stream: the stream's name; None for all.
            consumer: the consumer's name; None for all.
            limit: return at most this many claims.
        """
        chosen = {"stream": stream, "consumer": consumer}
        limit = arguments.number("limit", limit)
        return self._view(OpenClaim, "open_claims", "lease_until", chosen, limit)

    def key_stats(self, stream: str, consumer: str, *, limit: int = 100) -> list[KeyStats]:
        """The keys with the most messages that a consumer has taken and not finished.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> [(each.key, each.in_flight) for each in queue.key_stats("orders", "billing")]
            [('customer 7', 1), ('customer 8', 1)]

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            limit: return at most this many keys.

        Raises:
            PgQueueError: PQ006 a consumer with ordering "stream", and as `explain`.
        """
        return self._read("key_stats", KeyStats, stream=stream, consumer=consumer, limit=limit)

    def look(self) -> Look:
        """All figures of all streams, from counters, for a display that polls.

        >>> [(each.stream, each.consumer, each.backlog) for each in queue.look().consumers]
        [('orders', 'billing', 2)]
        """
        rows = self._statements.rows(
            'select stream, "group", partition, worker, lease_until, committed_at, behind,'
            " estimated"
            ' from pgqueue.group_stats order by stream, "group", partition'
        )
        return Look(
            at=self._value("select clock_timestamp()"),
            streams=self.streams(),
            consumers=self.stats(),
            partitions=[(row[0], row[1], PartitionStats(*row[2:])) for row in rows],
        )

    def dead_letters(
        self, stream: str | None = None, consumer: str | None = None, *, limit: int = 1000
    ) -> list[DeadLetters]:
        """The dead letters of consumers, newest first; one entry for those dead-lettered together.

            >>> queue.receive("orders", "billing", max_messages=100).dead_letter(reason="too late")
            2
            >>> [(dead.reason, dead.messages) for dead in queue.dead_letters("orders", "billing")]
            [('too late', 2)]

        Args:
            stream: the stream's name; None for all.
            consumer: the consumer's name; None for all.
            limit: return at most this many entries.
        """
        chosen = {"stream": stream, "consumer": consumer}
        limit, order = arguments.number("limit", limit), "died_at desc, first_seq"
        return self._view(
            DeadLetters, "dead_letters", order, chosen, limit, messages="message_count"
        )

    def read_dead(
        self,
        stream: str,
        consumer: str,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        before: datetime | None = None,
    ) -> Iterator[DeadMessage]:
        """Read dead letters of a consumer with their content, in the order of their numbers.

        The call changes nothing. It reads 500 messages at a time, as the iteration proceeds.

            >>> queue.receive("orders", "billing").dead_letter(reason="no such customer")
            1
            >>> [(dead.data, dead.reason) for dead in queue.read_dead("orders", "billing")]
            [('order 1', 'no such customer')]

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: only these messages; None for all.
            reason: only messages with this reason; None for any.
            before: only messages that were dead-lettered before this time; None for any.
        """
        given = {"stream": stream, "consumer": consumer, "seqs": seqs, "reason": reason}
        given |= {"before": before, "limit": PAGE, "after": 0}
        return self._dead_pages(*statement("read_dead", _DEAD, given))

    def _dead_pages(self, sql: Any, given: list[Any]) -> Iterator[DeadMessage]:
        after = 0
        while True:
            rows = self._statements.rows(sql, [*given[:-1], after])
            for row in rows:
                yield _dead_message(*row)
            if len(rows) < PAGE:
                return
            after = rows[-1][0]

    def redrive(
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
        """Deliver dead letters of a consumer to it again.

        They are delivered after all other messages, in the order of their numbers. If several
        clients call this at once, each message is delivered once.

            >>> queue.receive("orders", "billing", max_messages=100).dead_letter(reason="too late")
            2
            >>> queue.redrive("orders", "billing", reason="too late")
            2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: as in `read_dead`, and so `reason` and `before`.
            reason: ...
            before: ...
            max_messages: at most this many messages, the lowest numbers first; None for all.
            reset: whether their deliver_count starts again at 0. Otherwise, if the consumer has a
                max_deliver_count, the next failure dead-letters them again.

        Returns:
            how many messages are delivered again.
        """
        return self._long_call(
            "redrive",
            stream=stream,
            consumer=consumer,
            seqs=seqs,
            reason=reason,
            before=before,
            max_messages=max_messages,
            reset=reset,
        )

    def purge_dead(
        self,
        stream: str,
        consumer: str,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        before: datetime | None = None,
        max_messages: int | None = None,
    ) -> int:
        """Delete dead letters: they are not delivered again.

            >>> queue.receive("orders", "billing", max_messages=100).dead_letter(reason="too late")
            2
            >>> queue.purge_dead("orders", "billing", [1])
            1

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: as in `read_dead`, and so `reason` and `before`.
            reason: ...
            before: ...
            max_messages: at most this many messages, the lowest numbers first; None for all.

        Returns:
            how many messages were deleted.
        """
        return self._long_call(
            "purge_dead",
            stream=stream,
            consumer=consumer,
            seqs=seqs,
            reason=reason,
            before=before,
            max_messages=max_messages,
        )

    def position(self, stream: str, consumer: str) -> Position:
        """The position of a consumer in its stream.

            >>> queue.position("orders", "billing").next_seq
            1

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer.
        """
        (found,) = self._read("consumer_position", Position, stream=stream, consumer=consumer)
        return found

    def describe_stream(self, stream: str) -> StreamDescription:
        """A stream with its settings, its sizes, and everything that belongs to it.

            >>> described = queue.describe_stream("orders")
            >>> described.stream.kind, [consumer.consumer for consumer in described.consumers]
            ('text', ['billing'])

        Raises:
            PgQueueError: PQ001 unknown stream.
        """
        (info,) = self._figures(Stream, "stream_stats", "stream", stream, name="stream")
        (retention,) = self.retention(stream)
        return StreamDescription(
            stream=info,
            retention=retention,
            consumers=self.stats(stream),
            groups=self.groups(stream),
            bindings=[each for each in self.bindings() if stream in (each.stream, each.to_stream)],
            captures=self._view(Capture, "captures", '"table"', {"stream": stream}),
            schedules=self.schedules(stream),
        )

    def describe_consumer(self, stream: str, consumer: str) -> ConsumerDescription:
        """A consumer with its settings, its position and its figures.

            >>> described = queue.describe_consumer("orders", "billing")
            >>> described.consumer.ordering, described.stats.backlog
            ('none', 2)

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer.
        """
        position = self.position(stream, consumer)
        (info,) = [each for each in self.consumers(stream) if each.name == consumer]
        (stats,) = [each for each in self.stats(stream) if each.consumer == consumer]
        (health,) = [each for each in self.health(stream) if each.consumer == consumer]
        return ConsumerDescription(info, position, stats, health)


def _dead_message(
    seq: int,
    key: str | None,
    text: str | None,
    binary: bytes | None,
    headers: str | None,
    priority: int,
    inserted_at: datetime | None,
    reason: str,
    error: str | None,
    *others: Any,
) -> DeadMessage:
    data = binary if text is None else text
    found, why = headers_of(headers)
    return DeadMessage(seq, key, data, found, priority, inserted_at, reason, error or why, *others)
