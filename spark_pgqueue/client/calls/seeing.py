"""Figures of streams and consumers, and why a message is in its state."""

from __future__ import annotations

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.consumers import ConsumerCalls
from spark_pgqueue.client.calls.streams import StreamCalls
from spark_pgqueue.client.messages import Explanation, Failure
from spark_pgqueue.client.results import KeyStats, Look, OpenClaim, PartitionStats


class SeeCalls(StreamCalls, ConsumerCalls):
    """Figures of streams and consumers, and why a message is in its state."""

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
            the state, the reason, and the end of the state. The call is for people: it may read all
            messages that the consumer has taken and not finished.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 no number.
        """
        (found,) = self._statements.rows(
            "select state, because, until"
            " from pgqueue.explain_message(%s::text, %s::text, %s::bigint)",
            [
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
                arguments.long("seq", seq),
            ],
            row_factory=class_row(Explanation),
        )
        return found

    def failures(self, stream: str, consumer: str, seq: int) -> list[Failure]:
        """The failed deliveries of a message that a consumer has or gave up: the last ten.

            >>> queue.receive("orders", "billing").nack(delay=timedelta(0), reason="no answer")
            1
            >>> [failure.error for failure in queue.failures("orders", "billing", 1)]
            ['no answer']

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seq: the message's number.

        Returns:
            the failures in their order; none for a message that is done. The call is for people: it
            may read all messages that the consumer has taken and not finished.
        """
        return self._statements.rows(
            "select failed_at, owner, error from pgqueue.failures(%s::text, %s::text, %s::bigint)",
            [
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
                arguments.long("seq", seq),
            ],
            row_factory=class_row(Failure),
        )

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
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, consumer, claim_id, owner, query, claimed_at, lease_until, expired,"
            " messages, remaining, first_seq from pgqueue.open_claims"
            " where stream = coalesce(%s::text, stream) and consumer = coalesce(%s::text, consumer)"
            " order by lease_until limit %s",
            [
                stream,
                arguments.maybe(arguments.text, "consumer", consumer),
                arguments.number("limit", limit),
            ],
            row_factory=class_row(OpenClaim),
        )

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
        return self._statements.rows(
            "select key, waiting, delayed, in_flight, first_seq, until, unfinished"
            " from pgqueue.key_stats(%s::text, %s::text, %s::int)",
            [
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
                arguments.number("limit", limit),
            ],
            row_factory=class_row(KeyStats),
        )

    def look(self) -> Look:
        """All figures of all streams, for a display that polls: the call counts no messages.

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
