"""Messages read without claiming them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from spark_pgqueue.client import arguments, reading
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.messages import Batch, StoredMessage


class ReadCalls(Calls):
    """Messages read without claiming them."""

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
        between two offsets never change. A transaction that stays open delays no reader: its
        messages come in a batch after its commit.

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
            wait: how long to wait for a message when there is none, as in `receive`; None for not
                at all. The iteration ends when no message came.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ003 not an offset, PQ005 an offset of another
                stream, or of the database before it was restored; `wait` inside a transaction, or
                on the caller's connection. Some are raised when the first batch is asked for.
        """
        arguments.number("max_messages", max_messages, 1, 2**31 - 1)
        if offset is not None and not isinstance(offset, dict):
            arguments.position("offset", offset)
        patience = arguments.maybe(arguments.patience, "wait", wait)
        if patience is not None:
            self._check_can_wait()
        return reading.read(
            self._statements, self._long_poll, stream, offset, max_messages, patience
        )

    def start_offset(self, stream: str, start: str | datetime = "earliest") -> dict[str, Any]:
        """The offset at which a reader begins. A stored offset stays the same place for ever.

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
        return reading.start_offset(self._statements, stream, start)

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
            max_messages: how many messages to pass, if there are as many; None for all messages.

        Returns:
            the next offset; the same offset when there are no messages.
        """
        return reading.read_to(self._statements, stream, offset, max_messages)

    def read_between(
        self, stream: str, first: dict[str, Any], last: dict[str, Any]
    ) -> list[StoredMessage]:
        """The messages between two offsets, which never change: so a batch can be read again.

        >>> first, last = (queue.start_offset("orders", each) for each in ("earliest", "latest"))
        >>> [message.data for message in queue.read_between("orders", first, last)]
        ['order 1', 'order 2']
        """
        return reading.read_between(self._statements, stream, first, last)
