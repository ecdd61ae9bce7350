"""The outcomes of messages: the history, and waiting until a message is done."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.messages import Done, Outcome


class OutcomeCalls(Calls):
    """The outcomes of messages: the history, and waiting until a message is done."""

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
        (found,) = self._statements.rows(
            "select state, result, reason, error, deliver_count, owner, claimed_at, ended_at,"
            " due_at from pgqueue.outcome(%s::text, %s::text, %s::bigint)",
            [
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
                arguments.number("seq", seq, 1, 2**63 - 1),
            ],
            row_factory=class_row(Outcome),
        )
        return found

    def wait_for(self, stream: str, consumer: str, seq: int, timeout: timedelta) -> Outcome:
        """Wait until a consumer is done with a message, or the message died; return its outcome.

        Where the consumer has the setting `notify_done`, the outcome arrives at once. Else the
        client asks repeatedly, after a while once a second.

            >>> queue.wait_for("orders", "billing", 1, timedelta(milliseconds=10)).state
            'new'

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seq: the message's number.
            timeout: how long to wait.

        Returns:
            the outcome; its state is not final when the time was over before.

        Raises:
            PgQueueError: as `outcome`; or inside a transaction, or on the caller's connection.
        """
        seconds = arguments.patience("timeout", timeout)
        self._check_can_wait()
        look = partial(self.outcome, stream, consumer, seq)
        listen = partial(
            self._value,
            "select pgqueue.listen_done(%s::text, %s::text, %s::int)",
            stream,
            consumer,
            self._statements.connection().info.backend_pid,
        )
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
            since: only from this time on (with its zone); None for all that is kept.
            limit: return at most this many acknowledgements.

        Returns:
            the acknowledgements, the last one first.
        """
        rows = self._statements.rows(
            "select array(select array[lower(r), upper(r) - 1] from unnest(seqs) r), message_count,"
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


def _done(ranges: list[list[int]], *others: Any) -> Done:
    return Done([(first, last) for first, last in ranges], *others)
