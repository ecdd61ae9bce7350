"""Streams: what they hold, how long they keep it, what goes on to others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.results import (
    Binding,
    Capture,
    Retention,
    Stream,
)


class StreamCalls(Calls):
    """Streams: what they hold, how long they keep it, what goes on to others."""

    def create_stream(
        self,
        name: str,
        kind: str = "text",
        *,
        if_not_exists: bool = False,
        notify: bool = True,
        max_bytes: int = 16 << 20,
        max_header_bytes: int = 64 << 10,
        dedup_window: timedelta | None = None,
    ) -> int:
        """Create a stream.

            >>> stream_id = queue.create_stream("invoices", "json", dedup_window=timedelta(days=1))
            >>> queue.kind("invoices")
            'json'

        Args:
            name: 1 to 200 characters.
            kind: what its messages hold: "text", "json" (checked) or "binary".
            if_not_exists: accept an existing one of the same kind.
            notify: wake up who waits at each publication; without, they look once a second. Where
                somebody waits, it costs producers a lock of the whole server at commit.
            max_bytes: of a payload.
            max_header_bytes: of a message's headers, as JSON text.
            dedup_window: as in `set_dedup_window`.

        Returns:
            its id.
        """
        return self._value(
            "select pgqueue.create_stream(%s::text, %s::text, %s::boolean, %s::boolean, %s::int,"
            " %s::int, %s::interval)",
            arguments.text("name", name),
            arguments.text("kind", kind),
            arguments.flag("if_not_exists", if_not_exists),
            arguments.flag("notify", notify),
            arguments.number("max_bytes", max_bytes),
            arguments.number("max_header_bytes", max_header_bytes),
            arguments.maybe(arguments.duration, "dedup_window", dedup_window),
        )

    def alter_stream(self, stream: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a stream while it is in use: what is sent from then on goes by them.

            >>> queue.alter_stream("orders", {"max_bytes": 100_000, "dedup_window": None})

        Args:
            stream: the stream's name.
            settings: the new value of notify, max_bytes, max_header_bytes or dedup_window, as in
                `create_stream`; None for the default.

        Raises:
            PgQueueError: PQ003 an unknown setting, or a value that is not allowed; it would take
                more than a stream that it is copied to, or less than one that is copied to it.
        """
        self._value(
            "select pgqueue.alter_stream(%s::text, %s::jsonb)",
            arguments.text("stream", stream),
            arguments.settings("settings", settings),
        )

    def set_dedup_window(self, stream: str, window: timedelta | None) -> None:
        """Say for how long a stream remembers the dedup keys of its messages.

            >>> queue.set_dedup_window("orders", timedelta(days=1))
            >>> [queue.send("orders", "order 3", dedup_key="3") for _ in range(2)]
            [3, 3]

        Args:
            stream: the stream's name.
            window: within that time after a message, no other one with its dedup key is published.
                Longer than the longest transaction that sends; None: messages have no dedup keys.
        """
        self._value(
            "select pgqueue.set_dedup_window(%s::text, %s::interval)",
            arguments.text("stream", stream),
            arguments.maybe(arguments.duration, "window", window),
        )

    def drop_stream(self, name: str) -> None:
        """Delete a stream with its messages and consumers.

        >>> queue.drop_stream("orders")
        """
        self._value("select pgqueue.drop_stream(%s::text)", arguments.text("name", name))

    def streams(self) -> list[Stream]:
        """All streams, by name.

        >>> [(stream.name, stream.kind, stream.sent) for stream in queue.streams()]
        [('orders', 'text', 2)]
        """
        return self._statements.rows(
            "select stream as name, kind, created_at, consumers, messages, bytes, sent, settings"
            " from pgqueue.stream_stats order by stream",
            row_factory=class_row(Stream),
        )

    def kind(self, stream: str) -> str:
        """What the messages of a stream hold: "text", "json" or "binary".

        >>> queue.kind("orders")
        'text'
        """
        sql = "select kind from pgqueue.open_stream(%s::text)"
        return self._value(sql, arguments.text("stream", stream))

    def set_retention(
        self,
        stream: str,
        *,
        keep_for: timedelta | None = None,
        messages: int | None = None,
        size: int | None = None,
        done: bool = False,
        unread: str = "keep",
        keep_dead: timedelta | None = None,
    ) -> None:
        """Set how long the messages of a stream are kept; without any limit, for ever.

        A message may go as soon as one limit allows it, and goes when `maintain` is called.

            >>> queue.set_retention("orders", keep_for=timedelta(days=7), unread="drop")

        Args:
            stream: its name.
            keep_for: from a message's publication.
            messages: as long as not so many came after it.
            size: as long as what came after it does not take so many bytes on disk.
            done: only until every consumer is done with it.
            unread: "keep" what a consumer still owes, or "drop" it: count it as skipped, and take
                it out of no live claim.
            keep_dead: dead letters, from their death. None: for ever; they keep their messages.
        """
        self._value(
            "select pgqueue.set_retention(%s::text, %s::interval, %s::bigint, %s::bigint,"
            " %s::boolean, %s::text, %s::interval)",
            arguments.text("stream", stream),
            arguments.maybe(arguments.duration, "keep_for", keep_for),
            arguments.maybe(arguments.long, "messages", messages),
            arguments.maybe(arguments.long, "size", size),
            arguments.flag("done", done),
            arguments.text("unread", unread),
            arguments.maybe(arguments.duration, "keep_dead", keep_dead),
        )

    def retention(self, stream: str | None = None) -> list[Retention]:
        """How long the messages of a stream, or of all streams, are kept, and what is stored.

        >>> [(each.stream, each.keep_for) for each in queue.retention()]
        [('orders', None)]
        """
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, keep_for, keep_messages, keep_bytes, until_done, unread, keep_dead,"
            " bytes, oldest_at, trimmed, held_bytes, held_by, maintained_at, advice"
            " from pgqueue.stream_retention"
            " where stream = coalesce(%s::text, stream) order by stream",
            [stream],
            row_factory=class_row(Retention),
        )

    def bind(self, stream: str, topic: str, to_stream: str) -> None:
        """Copy what is sent to a stream from now on to another one, in the sender's transaction.

        A message is copied once, however many bindings say so. Safe to repeat.

            >>> stream_id = queue.create_stream("eu")
            >>> queue.bind("orders", "orders.*.eu", "eu")
            >>> queue.send("orders", "order 3", key="orders.books.eu")
            3
            >>> [message.data for message in queue.peek_at("eu", 1)]
            ['order 3']

        Args:
            stream: the stream's name.
            topic: of the keys of what is copied, such as "orders.*.eu", or "#" for everything.
            to_stream: the other stream's name; of the same kind, with limits as wide.

        Raises:
            PgQueueError: PQ003 no topic; another kind; messages would go round in a circle.
        """
        self._value(
            "select pgqueue.bind(%s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("topic", topic),
            arguments.text("to_stream", to_stream),
        )

    def unbind(self, stream: str, topic: str, to_stream: str) -> bool:
        """Copy nothing of a topic to another stream any more; whether it was bound.

        >>> stream_id = queue.create_stream("eu")
        >>> queue.bind("orders", "orders.*.eu", "eu")
        >>> queue.unbind("orders", "orders.*.eu", "eu")
        True
        """
        return self._value(
            "select pgqueue.unbind(%s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("topic", topic),
            arguments.text("to_stream", to_stream),
        )

    def bindings(self, stream: str | None = None) -> list[Binding]:
        """The bindings of a stream, or of all.

        >>> queue.bindings("orders")
        []
        """
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, topic, to_stream, bound_at from pgqueue.stream_bindings"
            " where stream = coalesce(%s::text, stream) order by stream, to_stream, topic",
            [stream],
            row_factory=class_row(Binding),
        )

    def test_topic(self, pattern: str, key: str | None) -> bool:
        """Whether a key is of a topic.

        >>> queue.test_topic("orders.*.eu", "orders.books.eu")
        True
        """
        return self._value(
            "select pgqueue.test_topic(%s::text, %s::text)",
            arguments.text("pattern", pattern),
            arguments.maybe(arguments.text, "key", key),
        )

    def capture(
        self,
        table: str,
        stream: str,
        *,
        keys: Iterable[str] | None = None,
        columns: Iterable[str] | None = None,
        old: bool = False,
        outbox: bool = False,
    ) -> None:
        """Let what is written to a table become messages, in the transaction that writes it.

        A message has the row as JSON in `data`, its key, and the headers table, operation (insert,
        update, delete, truncate), time and transaction. For a table that is captured, the
        arguments take the place of the old ones.

            >>> queue.capture("bills", "orders", columns=["id", "total"])

        Args:
            table: a table of this role's, as SQL writes it: "orders" or 'app."Orders"'.
            stream: the stream's name; of kind "json" or "text".
            keys: columns whose values are the key; None for the primary key; [] for no key.
            columns: columns of the row to publish; None for all.
            old: `data` is {"old": ..., "new": ...}.
            outbox: capture inserts, and delete the rows again.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ003 a table, column or stream that cannot be
                captured so. An unknown table is psycopg's UndefinedTable.
        """
        self._value(
            "select pgqueue.capture(%s::text::regclass, %s::text, %s::text[], %s::text[],"
            " %s::boolean, %s::boolean)",
            arguments.text("table", table),
            arguments.text("stream", stream),
            arguments.maybe(arguments.texts, "keys", keys),
            arguments.maybe(arguments.texts, "columns", columns),
            arguments.flag("old", old),
            arguments.flag("outbox", outbox),
        )

    def release(self, table: str, stream: str) -> None:
        """Capture a table no more. Arguments and errors as in `capture`.

        >>> queue.capture("bills", "orders")
        >>> queue.release("bills", "orders")
        """
        self._value(
            "select pgqueue.release(%s::text::regclass, %s::text)",
            arguments.text("table", table),
            arguments.text("stream", stream),
        )

    def captures(self) -> list[Capture]:
        """All tables that are captured, by name.

        >>> queue.capture("bills", "orders")
        >>> [(capture.table, capture.stream) for capture in queue.captures()]
        [('public.bills', 'orders')]
        """
        return self._statements.rows(
            'select "table", stream, owner, options, outbox, uncaptured_partitions'
            ' from pgqueue.captures order by "table", stream',
            row_factory=class_row(Capture),
        )
