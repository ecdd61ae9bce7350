"""Messages of a consumer by their numbers, without a claim: retried, cancelled, postponed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls


class NumberCalls(Calls):
    """Messages of a consumer by their numbers, without a claim: retried, cancelled, postponed."""

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
