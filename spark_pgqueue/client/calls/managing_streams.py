"""Managing streams, and the schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

from psycopg.rows import class_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.results import Archive, Binding, Capture, Retention, Stream

_MAINTAIN_CALLS = 10_000  # the limit of one maintain(), where there is always more to do


class ManagingStreams(Calls):
    """Managing streams, and the schema."""

    def create_stream(
        self,
        name: str,
        kind: str = "text",
        *,
        if_not_exists: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> int:
        """Create a stream.

            >>> settings = {"dedup_window": timedelta(days=1)}
            >>> stream_id = queue.create_stream("invoices", "json", settings=settings)
            >>> queue.kind("invoices")
            'json'

        Args:
            name: 1 to 200 characters.
            kind: what its messages hold: "text", "json" (checked) or "binary".
            if_not_exists: accept an existing one of the same kind.
            settings: as in `alter_stream`.

        Returns:
            its id.
        """
        return self._value(
            "select pgqueue.create_stream(%s::text, %s::text, %s::boolean, %s::jsonb)",
            arguments.text("name", name),
            arguments.text("kind", kind),
            arguments.flag("if_not_exists", if_not_exists),
            arguments.settings("settings", {} if settings is None else settings),
        )

    def alter_stream(self, stream: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a stream while it is in use, for messages sent from then on.

            >>> queue.alter_stream("orders", {"max_bytes": 100_000, "dedup_window": None})

        Args:
            stream: the stream's name.
            settings: the new value of each, None for the default:
                notify: wake up who waits at each publication; without, they look once a second.
                Where somebody waits, it costs producers a lock of the whole server at commit.
                max_bytes: of a payload, 16 MB by default.
                max_header_bytes: of a message's headers, as JSON text, 64 kB by default.
                dedup_window: within that time after a message, no other one with its dedup key is
                published. Longer than the longest transaction that sends; by default, messages
                have no dedup keys.
                schema: of a json stream, the columns of its payloads in Spark's DDL, such as
                "id bigint not null, name string". What does not fit is refused (PQ004). Later, only
                columns that may be null are added.

        Raises:
            PgQueueError: PQ003 an unknown setting, or a value that is not allowed; or the stream
                would allow more than a stream that it is copied to, or less than a stream that is
                copied to it; or a schema would not take all that the one before it took.
        """
        self._value(
            "select pgqueue.alter_stream(%s::text, %s::jsonb)",
            arguments.text("stream", stream),
            arguments.settings("settings", settings),
        )

    def drop_stream(self, name: str) -> None:
        """Delete a stream with its messages and consumers, and the files of its archive.

        >>> queue.drop_stream("orders")
        """
        self._value("select pgqueue.drop_stream(%s::text)", arguments.text("name", name))

    def streams(self) -> list[Stream]:
        """All streams, by name.

        >>> [(stream.name, stream.kind, stream.sent) for stream in queue.streams()]
        [('orders', 'text', 2)]
        """
        return self._statements.rows(
            "select stream as name, kind, created_at, consumers, messages, bytes, sent, settings,"
            " defaults from pgqueue.stream_stats order by stream",
            row_factory=class_row(Stream),
        )

    def kind(self, stream: str) -> str:
        """The kind of the messages of a stream: "text", "json" or "binary".

        >>> queue.kind("orders")
        'text'
        """
        sql = "select kind from pgqueue.open_stream(%s::text)"
        return self._value(sql, arguments.text("stream", stream))

    def schema_of(self, stream: str) -> dict[str, Any] | None:
        """The columns of a stream's schema, for Spark's `StructType.fromJson`; None without one.

        >>> stream_id = queue.create_stream("rows", "json", settings={"schema": "id bigint"})
        >>> [(column["name"], column["type"]) for column in queue.schema_of("rows")["fields"]]
        [('id', 'long')]
        """
        sql = "select pgqueue.schema_of(%s::text)"
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

        A message may be trimmed as soon as one limit allows it; `maintain` trims it. Each call sets
        all limits anew: an argument that is left out is no limit, whatever an earlier call has set.

            >>> queue.set_retention("orders", keep_for=timedelta(days=7), unread="drop")

        Args:
            stream: the stream's name.
            keep_for: how long a message is kept after its publication.
            messages: a message is kept while fewer messages than this came after it.
            size: a message is kept while the messages after it take fewer bytes than this on disk.
            done: a message is kept only until every consumer is done with it.
            unread: "keep" messages that a consumer is not done with; or "drop" them: they count as
                skipped, and are not taken out of a live claim.
            keep_dead: how long dead letters are kept after their death; None for ever. Dead letters
                keep their messages.
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

    def set_archive(
        self, stream: str, uri: str | None, *, keep_for: timedelta | None = None
    ) -> None:
        """Have the old messages of a stream written to files, before retention takes them away.

        `pgqueue archive run` writes the files. Spark reads them, without a consumer.

            >>> queue.set_archive("orders", "/var/lib/orders-archive", keep_for=timedelta(days=365))

        Args:
            stream: the stream's name.
            uri: a folder that the exporter and all readers reach: `/path`, `s3://bucket/path` and
                the like; None to archive no more, and keep what is there.
            keep_for: how long files are kept, from their last message; None for ever.
        """
        self._value(
            "select pgqueue.set_archive(%s::text, %s::text, %s::interval)",
            arguments.text("stream", stream),
            arguments.maybe(arguments.text, "uri", uri),
            arguments.maybe(arguments.duration, "keep_for", keep_for),
        )

    def drop_archive(self, stream: str) -> None:
        """End the archive of a stream, with all that is in it.

        `maintain` takes it away, and the next `pgqueue archive run` deletes the files.

            >>> queue.set_archive("orders", "/var/lib/orders-archive")
            >>> queue.drop_archive("orders")
        """
        self._value("select pgqueue.drop_archive(%s::text)", arguments.text("stream", stream))

    def archives(self, stream: str | None = None) -> list[Archive]:
        """What is in the archive of a stream, or in those of all streams.

        >>> queue.archives()
        []
        """
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, uri, keep_for, segments, messages, bytes, newest_at, archived_at,"
            " waiting, waiting_since, attempts, advice from pgqueue.stream_archives"
            " where stream = coalesce(%s::text, stream) order by stream",
            [stream],
            row_factory=class_row(Archive),
        )

    def bind(self, stream: str, topic: str, to_stream: str) -> None:
        """Copy messages of a stream to another stream from now on, in the sender's transaction.

        A message is copied once, also where several bindings match. Safe to repeat.

            >>> stream_id = queue.create_stream("eu")
            >>> queue.bind("orders", "orders.*.eu", "eu")
            >>> queue.send("orders", "order 3", key="orders.books.eu")
            3
            >>> [message.data for message in queue.peek_at("eu", 1)]
            ['order 3']

        Args:
            stream: the stream's name.
            topic: the topic of the keys to copy, such as "orders.*.eu", or "#" for all messages.
            to_stream: the other stream's name; of the same kind, with limits at least as wide.

        Raises:
            PgQueueError: PQ003 not a topic; another kind; or the bindings would form a cycle.
        """
        self._value(
            "select pgqueue.bind(%s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("topic", topic),
            arguments.text("to_stream", to_stream),
        )

    def unbind(self, stream: str, topic: str, to_stream: str) -> bool:
        """Remove a binding; returns whether it existed.

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
        """Whether a key matches a topic.

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
        """Turn the changes of a table into messages, in the transaction that changes it.

        A message has the row as JSON in `data`, its key, and the headers table, operation (insert,
        update, delete, truncate), time and transaction. For a table that is captured already, the
        arguments replace the old ones.

            >>> queue.capture("bills", "orders", columns=["id", "total"])

        Args:
            table: a table of this role, as SQL writes it: "orders" or 'app."Orders"'.
            stream: the stream's name; of kind "json" or "text".
            keys: columns whose values are the key; None for the primary key; [] for no key.
            columns: columns of the row to publish; None for all.
            old: `data` is {"old": ..., "new": ...}.
            outbox: capture inserts, and delete the rows again.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ003 a table, column or stream that cannot be
                captured like this. An unknown table is psycopg's UndefinedTable.
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
        """Stop capturing a table. Arguments and errors as in `capture`.

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

    def install(self, *, pgmq: bool = False, without: Collection[str] = ()) -> int:
        """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat.

            >>> version = queue.install()

        Args:
            pgmq: also make the schema pgmq, whose functions let clients of pgmq use this queue.
            without: features to leave out: schedules, capture, archive, table_sink (Spark's sink
                into tables), typed (schemas of payloads). One that is there and not in use is
                removed; without the argument, all are there afterwards.

        Returns:
            its version.

        Raises:
            PgQueueError: the database has a newer schema, the role lacks a permission, or a
                feature to leave out is in use, or is none. Nothing is changed then.
        """
        return self._statements.install(pgmq=arguments.flag("pgmq", pgmq), without=without)

    def maintain(
        self,
        staged_age: timedelta = timedelta(days=1),
        reader_age: timedelta = timedelta(days=30),
    ) -> dict[str, int]:
        """Trim messages that need not be kept, and delete the chunks of failed writers.

        The call also forgets abandoned checkpoints. It runs many short transactions. Streams with a
        retention need it about every half minute. Do not call it inside of `transaction`, which
        would hold all its locks.

            >>> deleted = queue.maintain()

        Args:
            staged_age: a time longer than any Spark query takes to write a batch.
            reader_age: a time longer than any Spark query pauses before it is started again.

        Returns:
            how many were deleted, by kind.
        """
        ages = [
            arguments.duration("staged_age", staged_age),
            arguments.duration("reader_age", reader_age),
        ]
        deleted: Counter[str] = Counter()
        for _ in range(_MAINTAIN_CALLS):
            done = dict(
                self._statements.rows(
                    "select what, deleted from pgqueue.maintain(%s::interval, %s::interval)", ages
                )
            )
            unfinished = done.pop("unfinished")
            deleted.update(done)
            if not unfinished:
                break
        return dict(deleted)

    def recover(self) -> dict[str, int]:
        """Begin a new incarnation of each stream, after a restore or the promotion of a standby.

        Call it once, before producers come back. Offsets that are past the restored messages are
        refused from then on; all others go on.

            >>> queue.recover()
            {'orders': 1}

        Returns:
            by stream, the last publication that counts as restored.

        Raises:
            PgQueueError: the server is a standby, or a session is publishing (55P03).
        """
        return dict(self._statements.rows("select stream, last_publication from pgqueue.recover()"))
