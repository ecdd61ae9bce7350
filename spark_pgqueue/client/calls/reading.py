"""Messages read without claiming them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from spark_pgqueue.client import arguments, reading
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.results import (
    Batch,
    StoredMessage,
)


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

        Any number of readers read the same messages, and know nothing of each other. The messages
        between two offsets are the same for ever. A transaction that stays open keeps nobody
        waiting: what it publishes comes after its commit, in a batch of then.

            >>> offset = "earliest"
            >>> for batch in queue.read("orders", offset):
            ...     print([message.data for message in batch.messages])
            ...     offset = batch.offset  # to be kept, with the work, by whoever reads
            ['order 1', 'order 2']
            >>> list(queue.read("orders", offset))
            []

        Args:
            stream: the stream's name.
            offset: that of the last batch; or, to begin, "earliest" (or None), "latest", or a time
                (with its zone) for what was published since.
            max_messages: of a batch, at most.
            wait: when there is nothing, wait so long for a message, as `receive` does; None for
                not at all. The iteration ends when there was nothing.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ003 no offset, PQ005 an offset of another stream,
                or of the database before it was restored; `wait` inside a transaction, or on a
                connection of the caller's. Some of them when the first batch is asked for.
        """
        arguments.number("max_messages", max_messages, 1, 2**31 - 1)
        if offset is not None and not isinstance(offset, dict):
            arguments.position("offset", offset)
        patience = arguments.maybe(arguments.patience, "wait", wait)
        if patience is not None:
            self._check_can_wait()
        return reading.read(self._statements, self._waiting, stream, offset, max_messages, patience)

    def start_offset(self, stream: str, start: str | datetime = "earliest") -> dict[str, Any]:
        """The offset at which a reader begins; to keep, so that it begins there for ever.

            >>> offset = queue.start_offset("orders", "latest")
            >>> list(queue.read("orders", offset))
            []

        Args:
            stream: the stream's name.
            start: "earliest", "latest" for what becomes visible from now on, or a time (with its
                zone) for what was published since.

        Returns:
            a dict that JSON can hold.
        """
        return reading.start_offset(self._statements, stream, start)

    def read_to(
        self, stream: str, offset: dict[str, Any], max_messages: int | None = None
    ) -> dict[str, Any]:
        """The offset after the next messages, which are not read.

            >>> first = queue.start_offset("orders")
            >>> last = queue.read_to("orders", first, max_messages=1)
            >>> [message.data for message in queue.read_between("orders", first, last)]
            ['order 1']

        Args:
            stream: the stream's name.
            offset: where to begin.
            max_messages: at most, and exactly so many if there are; None for what there is.

        Returns:
            the next offset; the same when there is nothing.
        """
        return reading.read_to(self._statements, stream, offset, max_messages)

    def read_between(
        self, stream: str, first: dict[str, Any], last: dict[str, Any]
    ) -> list[StoredMessage]:
        """The messages between two offsets, the same for ever: a batch once more.

        >>> first, last = (queue.start_offset("orders", each) for each in ("earliest", "latest"))
        >>> [message.data for message in queue.read_between("orders", first, last)]
        ['order 1', 'order 2']
        """
        return reading.read_between(self._statements, stream, first, last)
