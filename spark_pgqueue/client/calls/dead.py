"""Dead letters of consumers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.messages import DeadLetters, DeadMessage
from spark_pgqueue.client.reading import headers_of

PAGE = 500  # messages that are read at once


class DeadCalls(Calls):
    """Dead letters of consumers."""

    def dead_letters(
        self, stream: str | None = None, consumer: str | None = None, *, limit: int = 1000
    ) -> list[DeadLetters]:
        """The dead letters of consumers, the newest first; one entry for those that died together.

            >>> queue.receive("orders", "billing", max_messages=100).dead_letter(reason="too late")
            2
            >>> [(dead.reason, dead.messages) for dead in queue.dead_letters("orders", "billing")]
            [('too late', 2)]

        Args:
            stream: the stream's name; None for all.
            consumer: the consumer's name; None for all.
            limit: return at most this many entries.
        """
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, consumer, reason, error, message_count as messages, first_seq,"
            " last_seq, deliver_count, owner, died_at from pgqueue.dead_letters"
            " where stream = coalesce(%s::text, stream) and consumer = coalesce(%s::text, consumer)"
            " order by died_at desc, first_seq limit %s",
            [
                stream,
                arguments.maybe(arguments.text, "consumer", consumer),
                arguments.number("limit", limit),
            ],
            row_factory=class_row(DeadLetters),
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

        The call changes nothing. It reads 500 messages at a time, when they are asked for.

            >>> queue.receive("orders", "billing").dead_letter(reason="no such customer")
            1
            >>> [(dead.data, dead.reason) for dead in queue.read_dead("orders", "billing")]
            [('order 1', 'no such customer')]

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: only these messages; None for all.
            reason: only messages that died of this reason; None for any.
            before: only messages that died before this time; None for any.
        """
        given = _choice(stream, consumer, seqs, reason, before)
        return self._dead_pages(given)

    def _dead_pages(self, given: list[Any]) -> Iterator[DeadMessage]:
        after = 0
        while True:
            rows = self._statements.rows(
                "select seq, key, data, data_bytes, headers::text, priority, inserted_at, reason,"
                " error, details, deliver_count, owner, died_at from pgqueue.read_dead(%s::text,"
                " %s::text, %s::bigint[], %s::text, %s::timestamptz, %s, %s)",
                [*given, PAGE, after],
            )
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
        """Deliver dead letters again, only to the consumer that gave them up.

        They arrive at the end of its line, in the order of their numbers. If several clients call
        this at once, each message comes once.

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
            reset: whether their deliver_count begins anew. If not, and the consumer has a
                max_deliver_count, their next failure is the last.

        Returns:
            how many messages are delivered again.
        """
        return self._value(
            "select pgqueue.redrive(%s::text, %s::text, %s::bigint[], %s::text, %s::timestamptz,"
            " %s::int, %s::boolean)",
            *_choice(stream, consumer, seqs, reason, before),
            arguments.maybe(arguments.number, "max_messages", max_messages),
            arguments.flag("reset", reset),
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
        return self._value(
            "select pgqueue.purge_dead(%s::text, %s::text, %s::bigint[], %s::text,"
            " %s::timestamptz, %s::int)",
            *_choice(stream, consumer, seqs, reason, before),
            arguments.maybe(arguments.number, "max_messages", max_messages),
        )


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


def _choice(
    stream: str,
    consumer: str,
    seqs: Iterable[int] | None,
    reason: str | None,
    before: datetime | None,
) -> list[Any]:
    return [
        arguments.text("stream", stream),
        arguments.text("consumer", consumer),
        arguments.maybe(arguments.seqs, "seqs", seqs),
        arguments.maybe(arguments.text, "reason", reason),
        arguments.maybe(arguments.time, "before", before),
    ]
