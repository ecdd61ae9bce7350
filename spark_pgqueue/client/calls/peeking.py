"""Looking at messages, and exporting and importing messages as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from psycopg.pq import TransactionStatus

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.messages import Imported, PeekedMessage, PublishedMessage
from spark_pgqueue.client.reading import headers_of

_LINES = 10_000  # the most lines of a call ...
_SIZE = 8 << 20  # ... and characters or bytes, but at least one line: neither side holds more


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

    def export_lines(self, stream: str) -> Iterator[str]:
        """Iterate over the messages of a stream as lines of JSON, in the order of publication.

        The lines have all messages that are published when the first line is asked for, if no
        message is trimmed meanwhile. A line is an object with seq, key, data (or data_base64, for a
        binary stream), headers, priority, deliver_at, expires_at, consumers, inserted_at, and
        dedup_key, which identifies the message and its stream; absent values are left out. A few
        MB are held in memory at a time.

            >>> with open("orders.jsonl", "w") as file:
            ...     file.writelines(f"{line}\\n" for line in queue.export_lines("orders"))

        Args:
            stream: the stream's name.

        Raises:
            PgQueueError: PQ001 unknown stream, when the first line is asked for.
        """
        name, place = arguments.text("stream", stream), None
        while rows := self._statements.rows(
            "select line, place from pgqueue.export_lines(%s::text, %s::bigint[], %s::int,"
            " %s::bigint)",
            [name, place, _LINES, _SIZE],
        ):
            yield from (line for line, _ in rows if line is not None)
            place = rows[-1][1]

    def import_lines(self, stream: str, lines: Iterable[str]) -> Imported:
        """Publish messages from lines of JSON, in order: all of them, or none.

        Where the stream has a dedup window, a line whose dedup_key was sent within it is skipped.
        So lines of `export_lines` come in once, however often they are imported.

            >>> queue.import_lines("orders", ['{"data": "order 3", "key": "customer 7"}'])
            Imported(sent=1, duplicates=0)

        Args:
            stream: the stream's name; of a kind that the messages fit.
            lines: objects with data (or data_base64, for a binary stream), and the other values
                that `export_lines` writes; seq, inserted_at, unknown values and empty lines are
                ignored.

        Returns:
            how many messages were sent, and how many lines were duplicates.

        Raises:
            PgQueueError: PQ001 unknown stream; PQ002, PQ003 or PQ004 with the number of a line.
        """
        name, sent, duplicates, first = arguments.text("stream", stream), 0, 0, 1
        with self._statements.turn, self._together():
            for batch in _batches(lines):
                row = self._statements.row(
                    "select sent, duplicates"
                    " from pgqueue.import_lines(%s::text, %b::text[], %s::bigint)",
                    [name, batch, first],
                )
                sent, duplicates, first = sent + row[0], duplicates + row[1], first + len(batch)
            if first == 1:
                self._must_exist(name)
        return Imported(sent, duplicates)

    def _together(self) -> AbstractContextManager[None]:
        """A transaction, unless one is open."""
        conn = self._statements.connection()
        alone = conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE
        return self._statements.transaction() if alone else nullcontext()


def _batches(lines: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for number, line in enumerate(arguments.iterated("lines", lines), 1):
        batch.append(arguments.text(f"lines[{number - 1}]", line))
        size += len(line)
        if len(batch) == _LINES or size >= _SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _data(text: str | None, binary: bytes | None) -> str | bytes:
    return (binary or b"") if text is None else text


def _headers(headers: str | None, *others: Any) -> tuple[Any, ...]:
    found, error = headers_of(headers)
    return found, *others, error
