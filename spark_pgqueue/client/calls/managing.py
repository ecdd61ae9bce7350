"""Managing consumers, and messages by their numbers; and streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
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
            start: "earliest" for all messages that there are, "latest" for what is published from
                now on, a time (with its zone) for what was published since, "seq 41" for the
                messages from that number on, or the offset of a reader (see `read`) for what that
                has not read.
            ordering: "none"; "key": the messages of a key one after the other; "stream": all so.
            if_not_exists: accept an existing one of the same ordering and filter, whatever its
                settings.
            topic: only messages whose key is of this topic, such as "orders.*.eu": words with dots
                between them; * stands for one word, # for any number of them.
            where: only messages for which this jsonpath finds something, neither false nor null,
                in {key, headers, data}: "$.data.total > 100".
            settings: as in `alter_consumer`.

        Returns:
            its id.
        """
        return self._value(
            "select pgqueue.create_consumer(%s::text, %s::text, %s::text, %s::text,"
            " %s::boolean, %s::text, pgqueue.as_jsonpath('p_where', %s::text), %s::jsonb)",
            arguments.text("stream", stream),
            arguments.text("name", name),
            arguments.position("start", start),
            arguments.text("ordering", ordering),
            arguments.flag("if_not_exists", if_not_exists),
            arguments.maybe(arguments.text, "topic", topic),
            arguments.maybe(arguments.text, "where", where),
            arguments.settings("settings", {} if settings is None else settings),
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
                also that of later versions.

        Raises:
            PgQueueError: PQ003 an unknown setting, a value that is not allowed, or one that
                contradicts another setting; nothing was changed.
        """
        self._value(
            "select pgqueue.alter_consumer(%s::text, %s::text, %s::jsonb)",
            arguments.text("stream", stream),
            arguments.text("name", name),
            arguments.settings("settings", settings),
        )

    def drop_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer or a group with its unfinished messages; its claims end.

        >>> queue.drop_consumer("orders", "billing")
        """
        self._value(
            "select pgqueue.drop_consumer(%s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("name", name),
        )

    def consumers(self, stream: str | None = None) -> list[ConsumerInfo]:
        """The consumers of a stream, or of all streams, by name.

        >>> [(consumer.name, consumer.ordering) for consumer in queue.consumers("orders")]
        [('billing', 'none')]
        """
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, consumer as name, ordering, max_deliver_count, visibility_timeout,"
            " created_at, paused, topic, condition::text as where, settings, defaults"
            " from pgqueue.consumer_settings"
            " where stream = coalesce(%s::text, stream) order by stream, consumer",
            [stream],
            row_factory=class_row(ConsumerInfo),
        )

    def stats(self, stream: str | None = None) -> list[ConsumerStats]:
        """The figures of the consumers of a stream, or of all streams; the call counts no rows.

        >>> [(stats.consumer, stats.backlog) for stats in queue.stats("orders")]
        [('billing', 2)]
        """
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, consumer, ordering, new, ready, delayed, waiting, claimed, dead,"
            " backlog, claims, expired, next_expiry, skipped, paused, taken, settled, oldest_at,"
            " oldest_claim_at, estimated, stuck, status, because from pgqueue.consumer_stats"
            " where stream = coalesce(%s::text, stream) order by stream, consumer",
            [stream],
            row_factory=class_row(ConsumerStats),
        )

    def health(self, stream: str | None = None) -> list[ConsumerHealth]:
        """The health of the consumers of a stream, or of all: which need attention, and why.

        >>> for health in queue.health("orders"):
        ...     print(health.status, "-", health.because)
        unattended - 2 are new or ready and no lease has ended, and there was no claim yet
        """
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, consumer, status, because, backlog, max_backlog, attended_at, estimated"
            " from pgqueue.consumer_health"
            " where stream = coalesce(%s::text, stream) order by stream, consumer",
            [stream],
            row_factory=class_row(ConsumerHealth),
        )

    def seek(self, stream: str, consumer: str, to: str | datetime | dict[str, Any]) -> int:
        """Move a consumer, as if it were created at that position.

        The consumer forgets messages that it has taken and not finished, and its claims end: their
        workers notice it at their next call. Dead letters stay dead. The workers of a group go on
        from the position.

            >>> queue.seek("orders", "billing", "latest")
            2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            to: as `start` of `create_consumer`.

        Returns:
            how many messages it forgot or skips; an estimate for very many.

        Raises:
            PgQueueError: PQ003 not a position; 55P03 a transaction that locks some of the messages
                stays open for 10 s.
        """
        return self._value(
            "select pgqueue.seek(%s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.position("to", to),
        )

    def replay(
        self,
        stream: str,
        consumer: str,
        start: str | datetime | dict[str, Any],
        to: str | datetime | dict[str, Any] = "latest",
    ) -> int:
        """Deliver messages again that a consumer has finished or skipped.

        They arrive at the end of its line. Messages that it has not finished, or not taken yet,
        come as before; dead letters stay dead.

            >>> queue.receive("orders", "billing", max_messages=100).ack()
            2
            >>> queue.replay("orders", "billing", "earliest")
            2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            start: the first position, as `start` of `create_consumer`.
            to: the position behind the last message.

        Returns:
            how many messages come again; an estimate for very many.
        """
        return self._value(
            "select pgqueue.replay(%s::text, %s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.position("start", start),
            arguments.position("to", to),
        )

    def pause(self, stream: str, consumer: str) -> None:
        """Let a consumer claim nothing until `resume`. Claimed messages can be settled as before.

        >>> queue.pause("orders", "billing")
        >>> queue.receive("orders", "billing") is None
        True
        """
        self._value(
            "select pgqueue.pause(%s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
        )

    def resume(self, stream: str, consumer: str) -> None:
        """Let a paused consumer claim again.

        >>> queue.resume("orders", "billing")
        """
        self._value(
            "select pgqueue.resume(%s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
        )

    def retry(self, stream: str, consumer: str, seqs: Iterable[int] | None = None) -> int:
        """End the delays of messages that are not claimed, for instance after an outage.

        They come in large claims again, also the messages of claims that failed as a whole.

            >>> queue.receive("orders", "billing").nack(delay=timedelta(hours=1))
            1
            >>> queue.retry("orders", "billing")
            1

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: only these messages, and with ordering the messages that wait behind them; None
                for all messages that were delivered before.

        Returns:
            how many delays were ended.
        """
        return self._value(
            "select pgqueue.retry(%s::text, %s::text, %s::bigint[])",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.maybe(arguments.seqs, "seqs", seqs),
        )

    def cancel(self, stream: str, consumer: str, seqs: Iterable[int]) -> int:
        """Take unfinished messages from a consumer, in whatever state they are.

        Claimed messages leave their claim. The worker is not stopped; it sees smaller numbers when
        it extends or settles the claim. All or nothing. Dead letters, and messages that a Spark
        query has claimed, are passed over.

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
        return self._value(
            "select pgqueue.cancel(%s::text, %s::text, %s::bigint[])",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.seqs("seqs", seqs),
        )

    def postpone(self, stream: str, consumer: str, seqs: Iterable[int], until: datetime) -> int:
        """Deliver messages that nobody has claimed later, or sooner than they would come.

        With ordering, later messages of the same keys wait. Claimed messages and dead letters are
        passed over: for a claim see `defer`.

            >>> queue.postpone("orders", "billing", [1], datetime.now(UTC) + timedelta(hours=1))
            1

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: the numbers of the messages.
            until: not before then, with a time zone; a time that has passed: they are due at once.

        Returns:
            how many messages were postponed.

        Raises:
            PgQueueError: 55P03 a transaction that claims some of them stays open for 10 s; PQ006 a
                group.
        """
        return self._value(
            "select pgqueue.postpone(%s::text, %s::text, %s::bigint[], %s::timestamptz)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.seqs("seqs", seqs),
            arguments.time("until", until),
        )
