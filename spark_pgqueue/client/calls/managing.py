"""Managing consumers, and messages by their numbers; and streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from spark_pgqueue.client.calls.managing_streams import ManagingStreams
from spark_pgqueue.client.results import ConsumerHealth, ConsumerInfo, ConsumerStats


class Managing(ManagingStreams):
    """Managing consumers, and messages by their numbers; and streams."""

    def create_consumer(
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
        """Create a consumer of a stream.

            >>> settings = {"max_deliver_count": 5, "backoff": "exponential"}
            >>> consumer_id = queue.create_consumer(
            ...     "orders", "shipping", start="earliest", ordering="key", settings=settings
            ... )

        Args:
            stream: the stream's name.
            name: 1 to 200 characters.
            start: "earliest" for all stored messages, "latest" for messages published from now on,
                a time (with its zone) for messages published since, "seq 41" for messages from that
                number on, or the offset of a reader (see `read`) for messages that it has not read.
            ordering: "none"; "key": one message of each key at a time; "stream": one message at a
                time.
            if_not_exists: accept an existing consumer of the same ordering and filter, whatever its
                settings.
            topic: only messages whose key matches this topic, such as "orders.*.eu": words
                separated by dots; * matches one word, # any number of words.
            where: only messages for which this jsonpath on {key, headers, data} returns a value
                other than false and null: "$.data.total > 100".
            settings: as in `alter_consumer`.

        Returns:
            its id.
        """
        return self._call(
            "create_consumer",
            stream=stream,
            name=name,
            start=start,
            ordering=ordering,
            if_not_exists=if_not_exists,
            topic=topic,
            where=where,
            settings={} if settings is None else settings,
        )

    def alter_consumer(self, stream: str, name: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a consumer while it is in use.

        The next claim, and the next failure of a message, use the new settings. Open claims keep
        their visibility timeout.

            >>> queue.alter_consumer("orders", "billing", {"max_deliver_count": 5})

        Args:
            stream: the stream's name.
            name: the consumer's name.
            settings: the new value of each: a number, bool, str or timedelta; None for the default,
                which a later version may change.

        Raises:
            PgQueueError: PQ003 an unknown setting, a value that is not allowed, or one that
                contradicts another setting; nothing was changed.
        """
        self._call("alter_consumer", stream=stream, name=name, settings=settings)

    def drop_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer or a group. Its claims end; its unfinished messages are discarded.

        >>> queue.drop_consumer("orders", "billing")
        """
        self._long_rows("drop_consumer", "", stream=stream, name=name)

    def consumers(self, stream: str | None = None) -> list[ConsumerInfo]:
        """The consumers of a stream, or of all streams, by name.

        >>> [(consumer.name, consumer.ordering) for consumer in queue.consumers("orders")]
        [('billing', 'none')]
        """
        columns = {"name": "consumer", "where": "condition::text"}
        return self._view(
            ConsumerInfo, "consumer_settings", "stream, consumer", {"stream": stream}, **columns
        )

    def stats(self, stream: str | None = None) -> list[ConsumerStats]:
        """The figures of the consumers of a stream, or of all streams, from counters.

        >>> [(stats.consumer, stats.backlog) for stats in queue.stats("orders")]
        [('billing', 2)]
        """
        return self._figures(ConsumerStats, "consumer_stats", "stream, consumer", stream)

    def health(self, stream: str | None = None) -> list[ConsumerHealth]:
        """The health of the consumers of a stream, or of all: which need attention, and why.

        >>> for health in queue.health("orders"):
        ...     print(health.status, "-", health.because)
        unattended - 2 new or ready, no expired claims, no claim yet
        """
        return self._figures(ConsumerHealth, "consumer_health", "stream, consumer", stream)

    def seek(self, stream: str, consumer: str, to: str | datetime | dict[str, Any]) -> int:
        """Move a consumer, as if it were created at that position.

        The consumer discards the messages that it has taken and not finished. Its claims end, which
        their workers notice at their next call. Dead letters are kept. The workers of a group
        continue from the position.

            >>> queue.seek("orders", "billing", "latest")
            2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            to: as `start` of `create_consumer`.

        Returns:
            how many messages it discards or skips; an estimate for large numbers.

        Raises:
            PgQueueError: PQ003 not a position; 55P03 a transaction that locks some of the messages
                stays open for 10 s.
        """
        return self._long_call("seek", stream=stream, consumer=consumer, to=to)

    def replay(
        self,
        stream: str,
        consumer: str,
        start: str | datetime | dict[str, Any],
        to: str | datetime | dict[str, Any] = "latest",
    ) -> int:
        """Deliver messages again that a consumer has finished or skipped.

        They are delivered after all other messages. Unfinished messages, and messages not yet
        taken, are delivered as before. Dead letters are kept.

            >>> queue.receive("orders", "billing", max_messages=100).ack()
            2
            >>> queue.replay("orders", "billing", "earliest")
            2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            start: the first position, as `start` of `create_consumer`.
            to: the position after the last message.

        Returns:
            how many messages are delivered again; an estimate for large numbers.
        """
        return self._long_call("replay", stream=stream, consumer=consumer, start=start, to=to)

    def pause(self, stream: str, consumer: str) -> None:
        """Suspend claims for a consumer until `resume`. Claimed messages can still be settled.

        >>> queue.pause("orders", "billing")
        >>> queue.receive("orders", "billing") is None
        True
        """
        self._call("pause", stream=stream, consumer=consumer)

    def resume(self, stream: str, consumer: str) -> None:
        """Resume a paused consumer.

        >>> queue.resume("orders", "billing")
        """
        self._call("resume", stream=stream, consumer=consumer)

    def retry(self, stream: str, consumer: str, seqs: Iterable[int] | None = None) -> int:
        """End the delays of messages that are not claimed, for instance after an outage.

        They are delivered in large claims again, even after claims that failed as a whole.

            >>> queue.receive("orders", "billing").nack(delay=timedelta(hours=1))
            1
            >>> queue.retry("orders", "billing")
            1

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: only these messages, and with ordering the messages that wait for them; None for
                all messages that were delivered before.

        Returns:
            how many delays were ended.
        """
        return self._long_call("retry", stream=stream, consumer=consumer, seqs=seqs)

    def cancel(self, stream: str, consumer: str, seqs: Iterable[int]) -> int:
        """Cancel unfinished messages of a consumer, in any state.

        Claimed messages are removed from their claim. The worker is not stopped, but extending or
        settling the claim returns smaller numbers. All or nothing. Dead letters, and messages that
        a Spark query has claimed, are skipped.

            >>> queue.cancel("orders", "billing", [1, 2])
            2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: the numbers of the messages.

        Returns:
            how many messages were cancelled.

        Raises:
            PgQueueError: 55P03 a transaction that claims or settles some of them stays open for
                10 s; PQ006 a group.
        """
        return self._call("cancel", stream=stream, consumer=consumer, seqs=seqs)

    def postpone(self, stream: str, consumer: str, seqs: Iterable[int], until: datetime) -> int:
        """Change the time of the next delivery of messages that are not claimed.

        With ordering, later messages of the same keys wait. Claimed messages and dead letters are
        skipped: for a claim see `defer`.

            >>> queue.postpone("orders", "billing", [1], datetime.now(UTC) + timedelta(hours=1))
            1

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: the numbers of the messages.
            until: the earliest time of the delivery (with its zone); a time in the past for now.

        Returns:
            how many messages were postponed.

        Raises:
            PgQueueError: 55P03 a transaction that claims some of them stays open for 10 s; PQ006 a
                group.
        """
        return self._call("postpone", stream=stream, consumer=consumer, seqs=seqs, until=until)
