"""Sending messages to a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from spark_pgqueue.client import arguments, copying
from spark_pgqueue.client.calls.base import Calls


class SendCalls(Calls):
    """Sending messages to a stream."""

    def send(
        self,
        stream: str,
        data: str | bytes,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        priority: int = 0,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_key: str | None = None,
        expires_at: datetime | None = None,
    ) -> int:
        """Publish a message.

            >>> queue.send("orders", "order 3", key="customer 7", headers={"shop": 4})
            3

        Args:
            stream: the stream's name.
            data: the payload: bytes for a binary stream, str for others (JSON text for json).
            key: the key for ordering "key"; None for a message without an order.
            headers: values that JSON can hold, by name.
            priority: -32768 to 32767; higher is earlier, for consumers with ordering "none".
            deliver_at: not delivered before this time (with its zone); None for at once.
            consumers: the names of the consumers that get it; None for all.
            dedup_key: publish nothing if a message with this key was sent within the stream's
                dedup window; None for no key.
            expires_at: from this time on (with its zone) the message is dead-lettered, as
                "expired", and not delivered; rounded up to the second. None for never.

        Returns:
            the seq of the message, or of the first message with the same dedup key.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range,
                PQ004 data that does not fit the stream's kind; an argument of the wrong type.
        """
        binary = isinstance(data, bytes)
        if not isinstance(data, bytes):
            arguments.text("data", data, "a str, or bytes for a binary stream")
        return self._value(
            "select pgqueue.send(%s::text, %s::text, %s::text, %s::jsonb, %s::int,"
            " %s::timestamptz, %s::text[], %s::bytea, %s::text, %s::timestamptz)",
            arguments.text("stream", stream),
            None if binary else data,
            arguments.maybe(arguments.text, "key", key),
            arguments.headers("headers", headers),
            arguments.number("priority", priority, -32768, 32767),
            arguments.maybe(arguments.time, "deliver_at", deliver_at),
            arguments.maybe(arguments.texts, "consumers", consumers),
            data if binary else None,
            arguments.maybe(arguments.text, "dedup_key", dedup_key),
            arguments.maybe(arguments.time, "expires_at", expires_at),
        )

    def send_batch(
        self,
        stream: str,
        data: Iterable[str] | Iterable[bytes],
        *,
        keys: Iterable[str | None] | None = None,
        headers: Iterable[Mapping[str, Any] | None] | None = None,
        priority: int = 0,
        deliver_at: datetime | None = None,
        consumers: Iterable[str] | None = None,
        dedup_keys: Iterable[str | None] | None = None,
        expires_at: datetime | None = None,
    ) -> list[int]:
        """Publish messages together: they become visible at once, in the order given.

            >>> queue.send_batch("orders", ["order 3", "order 4"], keys=["customer 7", None])
            [3, 4]

        Args:
            stream: the stream's name.
            data: a payload for each message, as in `send`.
            keys: a key, or None, for each message; None for no keys.
            headers: headers, or None, for each message; None for no headers.
            priority: as in `send`, for all messages.
            deliver_at: as in `send`, for all messages.
            consumers: as in `send`, for all messages.
            dedup_keys: a dedup key, or None, for each message; None for no dedup keys. If two of
                these messages have the same key, only the first is published.
            expires_at: as in `send`, for all messages.

        Returns:
            the seqs, in the same order; for a duplicate, the seq of the first message.

        Raises:
            PgQueueError: as `send`. Nothing is published then.
        """
        payloads = arguments.payloads("data", data)
        binary = bool(payloads) and isinstance(payloads[0], bytes)
        stream = arguments.text("stream", stream)
        all_keys = arguments.maybe(arguments.maybe_texts, "keys", keys)
        all_headers = (
            None
            if headers is None
            else [arguments.headers(n, h) for n, h in arguments.items("headers", headers)]
        )
        all_dedup_keys = arguments.maybe(arguments.maybe_texts, "dedup_keys", dedup_keys)
        of_all = (
            arguments.number("priority", priority, -32768, 32767),
            arguments.maybe(arguments.time, "deliver_at", deliver_at),
            arguments.maybe(arguments.texts, "consumers", consumers),
        )
        expires = arguments.maybe(arguments.time, "expires_at", expires_at)
        given = (payloads, all_keys, all_headers, all_dedup_keys)
        counts = {len(each) for each in given if each is not None}
        if sum(map(len, payloads)) >= copying.WORTH_IT and len(counts) == 1:
            seqs = copying.copy_messages(self._statements, stream, *given, *of_all, expires)
            if seqs is not None:
                return seqs
        # An array in binary format is three times as fast as one in text.
        rows = self._statements.rows(
            "select * from pgqueue.send_batch(%s::text, %b::text[], %b::text[], %s::jsonb[],"
            " %s::int, %s::timestamptz, %s::text[], %b::bytea[], %b::text[], %s::timestamptz)",
            [
                stream,
                None if binary else payloads,
                all_keys,
                all_headers,
                *of_all,
                payloads if binary else None,
                all_dedup_keys,
                expires,
            ],
        )
        return [seq for (seq,) in rows]
