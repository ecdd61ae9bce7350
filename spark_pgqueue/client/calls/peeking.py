"""Looking at messages."""

from __future__ import annotations

from typing import Any

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.messages import PeekedMessage, PublishedMessage
from spark_pgqueue.client.reading import headers_of


class PeekCalls(Calls):
    """Looking at messages, and messages as lines of JSON."""

    def peek(self, stream: str, consumer: str, max_messages: int = 10) -> list[PeekedMessage]:
        """The next messages of a consumer, with their content, without claiming them.

        They come about in the order of delivery; last are messages that wait for their key, and
        delayed messages. Claimed messages and dead letters are left out. The call is for people:
        it may read all messages that the consumer has taken and not finished.

            >>> [(message.state, message.data) for message in queue.peek("orders", "billing")]
            [('new', 'order 1'), ('new', 'order 2')]

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            max_messages: return at most this many messages, up to 100,000.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range.
        """
        rows = self._statements.rows(
            "select seq, state, key, data, data_bytes, headers::text, priority, deliver_count,"
            " not_visible_until, error, inserted_at from pgqueue.peek(%s::text, %s::text, %s::int)",
            [
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
                arguments.number("max_messages", max_messages),
            ],
        )
        return [
            PeekedMessage(seq, state, key, _data(text, binary), *_headers(headers, *others))
            for seq, state, key, text, binary, headers, *others in rows
        ]

    def peek_at(self, stream: str, seq: int, max_messages: int = 1) -> list[PublishedMessage]:
        """Messages of a stream by their numbers, with their content, for whichever consumers.

            >>> [message.data for message in queue.peek_at("orders", 2)]
            ['order 2']

        Args:
            stream: the stream's name.
            seq: the first number. Messages that were trimmed, or are not published, are left out.
            max_messages: return at most this many messages, up to 100,000.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ003 a value out of range.
        """
        rows = self._statements.rows(
            "select seq, key, data, data_bytes, headers::text, priority, inserted_at,"
            " published_at, deliver_at, consumers"
            " from pgqueue.peek_at(%s::text, %s::bigint, %s::int)",
            [
                arguments.text("stream", stream),
                arguments.long("seq", seq),
                arguments.number("max_messages", max_messages),
            ],
        )
        return [
            PublishedMessage(seq, key, _data(text, binary), *_headers(headers, *others))
            for seq, key, text, binary, headers, *others in rows
        ]


def _data(text: str | None, binary: bytes | None) -> str | bytes:
    return (binary or b"") if text is None else text


def _headers(headers: str | None, *others: Any) -> tuple[Any, ...]:
    found, error = headers_of(headers)
    return found, *others, error
