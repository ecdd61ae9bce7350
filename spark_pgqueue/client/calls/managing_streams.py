"""Managing streams, and the schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

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
        return self._call(
            "create_stream",
            name=name,
            kind=kind,
            if_not_exists=if_not_exists,
            settings={} if settings is None else settings,
        )

    def alter_stream(self, stream: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a stream while it is in use, for messages sent from then on.

            >>> queue.alter_stream("orders", {"max_bytes": 100_000, "dedup_window": None})

        Args:
            stream: the stream's name.
            settings: the new value of each, None for the default:
                notify: each publication wakes clients that wait; otherwise they poll once a second.
                While clients wait, a producer's commit takes a lock of the whole server.
                max_bytes: of a payload, 16 MB by default.
                max_header_bytes: of a message's headers, as JSON text, 64 kB by default.
                dedup_window: for that time after a message, no other message with its dedup key is
                published. Longer than the longest transaction that sends; by default, messages
                have no dedup keys.
                schema: of a json stream, the columns of its payloads in Spark's DDL, such as
                "id bigint not null, name string". Other payloads are refused (PQ004). Later changes
                may only add nullable columns.

        Raises:
            PgQueueError: PQ003 an unknown setting, or a value that is not allowed; or the stream
                would allow more than a stream that it is copied to, or less than a stream that is
                copied to it; or the schema would refuse payloads that the previous one allowed.
        """
        self._call("alter_stream", stream=stream, settings=settings)

    def drop_stream(self, name: str) -> None:
        """Delete a stream with its messages and consumers, and the files of its archive.

        >>> queue.drop_stream("orders")
        """
        self._long_rows("drop_stream", "", name=name)

    def streams(self) -> list[Stream]:
        """All streams, by name.

        >>> [(stream.name, stream.kind, stream.sent) for stream in queue.streams()]
        [('orders', 'text', 2)]
        """
        return self._figures(Stream, "stream_stats", "stream", name="stream")

    def kind(self, stream: str) -> str:
        """The kind of the messages of a stream: "text", "json" or "binary".

        >>> queue.kind("orders")
        'text'
        """
        return self._call("open_stream", "kind", stream=stream)

    def schema_of(self, stream: str) -> dict[str, Any] | None:
        """The columns of a stream's schema, for Spark's `StructType.fromJson`; None without one.

        >>> stream_id = queue.create_stream("rows", "json", settings={"schema": "id bigint"})
        >>> [(column["name"], column["type"]) for column in queue.schema_of("rows")["fields"]]
        [('id', 'long')]
        """
        return self._call("schema_of", stream=stream)

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
        """Set how long the messages of a stream are kept; without any limit, forever.

        A message may be trimmed as soon as one limit allows it; `maintain` trims it. Each call
        replaces all limits: an argument that is left out removes that limit.

            >>> queue.set_retention("orders", keep_for=timedelta(days=7), unread="drop")

        Args:
            stream: the stream's name.
            keep_for: how long a message is kept after its publication.
            messages: a message is kept while fewer messages than this follow it.
            size: a message is kept while the messages after it take fewer bytes than this on disk.
            done: a message is kept only until every consumer is done with it.
            unread: "keep" messages that a consumer is not done with; or "drop" them: they count as
                skipped, and are not removed from a live claim.
            keep_dead: how long dead letters are kept; None forever. The messages of dead letters
                are kept, too.
        """
        self._call(
            "set_retention",
            stream=stream,
            keep_for=keep_for,
            messages=messages,
            size=size,
            done=done,
            unread=unread,
            keep_dead=keep_dead,
        )

    def retention(self, stream: str | None = None) -> list[Retention]:
        """How long the messages of a stream, or of all streams, are kept, and what is stored.

        >>> [(each.stream, each.keep_for) for each in queue.retention()]
        [('orders', None)]
        """
        return self._view(Retention, "stream_retention", "stream", {"stream": stream})

    def set_archive(
        self, stream: str, uri: str | None, *, keep_for: timedelta | None = None
    ) -> None:
        """Archive the messages of a stream in files before retention deletes them.

        `pgqueue archive run` writes the files. Spark reads them without a consumer.

            >>> queue.set_archive("orders", "/var/lib/orders-archive", keep_for=timedelta(days=365))

        Args:
            stream: the stream's name.
            uri: a folder that the exporter and all readers can access, such as `/path` or
                `s3://bucket/path`; None to stop archiving and keep the files.
            keep_for: how long files are kept, from their last message; None forever.
        """
        self._call("set_archive", stream=stream, uri=uri, keep_for=keep_for)

    def drop_archive(self, stream: str) -> None:
        """Delete the archive of a stream with all its messages.

        `maintain` removes it, and the next `pgqueue archive run` deletes the files.

            >>> queue.set_archive("orders", "/var/lib/orders-archive")
            >>> queue.drop_archive("orders")
        """
        self._call("drop_archive", stream=stream)

    def archives(self, stream: str | None = None) -> list[Archive]:
        """What is in the archive of a stream, or in those of all streams.

        >>> queue.archives()
        []
        """
        return self._view(Archive, "stream_archives", "stream", {"stream": stream})

    def bind(self, stream: str, topic: str, to_stream: str) -> None:
        """Copy messages of a stream to another stream from now on, in the sender's transaction.

        A message is copied once for each path of bindings, however many topics match. Safe to
        repeat.

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
        self._call("bind", stream=stream, topic=topic, to_stream=to_stream)

    def unbind(self, stream: str, topic: str, to_stream: str) -> bool:
        """Remove a binding; returns whether it existed.

        >>> stream_id = queue.create_stream("eu")
        >>> queue.bind("orders", "orders.*.eu", "eu")
        >>> queue.unbind("orders", "orders.*.eu", "eu")
        True
        """
        return self._call("unbind", stream=stream, topic=topic, to_stream=to_stream)

    def bindings(self, stream: str | None = None) -> list[Binding]:
        """The bindings of a stream, or of all.

        >>> queue.bindings("orders")
        []
        """
        order = "stream, to_stream, topic"
        return self._view(Binding, "stream_bindings", order, {"stream": stream})

    def test_topic(self, pattern: str, key: str | None) -> bool:
        """Whether a key matches a topic.

        >>> queue.test_topic("orders.*.eu", "orders.books.eu")
        True
        """
        return self._call("test_topic", pattern=pattern, key=key)

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
        update, delete, truncate), time and transaction. For a table that is already captured, the
        arguments replace the previous ones.

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
        self._call(
            "capture",
            table=table,
            stream=stream,
            keys=keys,
            columns=columns,
            old=old,
            outbox=outbox,
        )

    def release(self, table: str, stream: str) -> None:
        """Stop capturing a table. Arguments and errors as in `capture`.

        >>> queue.capture("bills", "orders")
        >>> queue.release("bills", "orders")
        """
        self._call("release", table=table, stream=stream)

    def captures(self) -> list[Capture]:
        """All tables that are captured, by name.

        >>> queue.capture("bills", "orders")
        >>> [(capture.table, capture.stream) for capture in queue.captures()]
        [('public.bills', 'orders')]
        """
        return self._view(Capture, "captures", '"table", stream')

    def install(self, *, pgmq: bool = False, without: Collection[str] = ()) -> int:
        """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat.

            >>> version = queue.install()

        Args:
            pgmq: also make the schema pgmq, whose functions let clients of pgmq use this queue.
            without: features to leave out: schedules, capture, archive, table_sink (Spark's sink
                into tables), typed (schemas of payloads). An installed feature is removed if it is
                not in use. By default all features are installed.

        Returns:
            its version.

        Raises:
            PgQueueError: the database has a newer schema, the role lacks a permission, or a
                feature to leave out is in use or unknown. Nothing is changed then.
        """
        return self._statements.install(pgmq=arguments.flag("pgmq", pgmq), without=without)

    def maintain(
        self,
        staged_age: timedelta = timedelta(days=1),
        reader_age: timedelta = timedelta(days=30),
    ) -> dict[str, int]:
        """Trim messages according to retention, and delete the chunks of failed writers.

        The call also deletes abandoned checkpoints. It runs many short transactions. Call it about
        every 30 seconds if streams have a retention. Do not call it inside `transaction`, which
        would hold all its locks.

            >>> deleted = queue.maintain()

        Args:
            staged_age: a time longer than any Spark query takes to write a batch.
            reader_age: a time longer than any Spark query pauses before it is started again.

        Returns:
            how many were deleted, by kind.
        """
        deleted: Counter[str] = Counter()
        for _ in range(_MAINTAIN_CALLS):
            done = dict(
                self._long_rows(
                    "maintain", "what, deleted", staged_age=staged_age, reader_age=reader_age
                )
            )
            unfinished = done.pop("unfinished")
            deleted.update(done)
            if not unfinished:
                break
        return dict(deleted)

    def recover(self) -> dict[str, int]:
        """Begin a new incarnation of each stream, after a restore or the promotion of a standby.

        Call it once, before producers start again. Offsets after the restored messages are refused
        from then on; all other offsets stay valid.

            >>> queue.recover()
            {'orders': 1}

        Returns:
            by stream, the last publication that counts as restored.

        Raises:
            PgQueueError: the server is a standby, or a session is publishing (55P03).
        """
        return dict(self._long_rows("recover", "stream, last_publication"))
