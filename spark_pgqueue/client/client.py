"""The client: one method for each public function of the schema pgqueue."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, LiteralString
from weakref import WeakSet

import psycopg
from psycopg.rows import class_row

from spark_pgqueue.client import arguments, consuming, copying, reading
from spark_pgqueue.client.groups import Group
from spark_pgqueue.client.results import (
    Batch,
    Binding,
    Capture,
    Claim,
    Consumer,
    ConsumerStats,
    GroupStats,
    Message,
    PartitionStats,
    Retention,
    StoredMessage,
    Stream,
)
from spark_pgqueue.client.waiting import Waiting
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn

_MAINTAIN_CALLS = 10_000  # of one maintain(), where there is always more to do


def connect(url: str | None = None, *, patience: float = PATIENCE) -> Client:
    """Connect to the database of a queue.

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        patience: seconds to go on trying for while Postgres may be restarting; 0 to try once.

    Returns:
        a client with a connection of its own, which it replaces when it is lost.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    statements = _make_statements(url=url, patience=patience)
    return Client(statements.connection(), _statements=statements)


class Client:
    """A queue, over one connection. Made by `connect`, or with a connection of the caller.

    On the caller's connection each call takes part in the caller's transaction, if there is one:
    what is sent becomes visible with its commit, and what is claimed stays locked until then.

    The database must have the schema version that this package needs; the first call checks that.
    Threads can share a client, and then wait for each other; `transaction` is for one thread.

    Args:
        connection: an open connection of psycopg. `close` leaves it open.

    Raises:
        PgQueueError: it is no such connection. All other methods raise it too: for each error that
            the database's functions define (sqlstate PQ...), for an argument of the wrong type, a
            missing permission, a missing or different schema, and a lost connection.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], *, _statements: Statements | None = None
    ):
        if not isinstance(connection, psycopg.Connection):
            raise PgQueueError(
                f"connection must be a psycopg.Connection, not {type(connection).__name__}",
                hint="to connect by url, use spark_pgqueue.connect(url)",
            )
        self._statements = _statements or _make_statements(connection=connection)
        self._waiting = Waiting(self._statements)

    # Streams and consumers

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

    def set_dedup_window(self, stream: str, window: timedelta | None) -> None:
        """Say for how long a stream remembers the dedup keys of its messages.

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
        """Delete a stream with its messages and consumers."""
        self._value("select pgqueue.drop_stream(%s::text)", arguments.text("name", name))

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
        """How long the messages of a stream, or of all streams, are kept, and what is stored."""
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
        """Copy nothing of a topic to another stream any more; whether it was bound."""
        return self._value(
            "select pgqueue.unbind(%s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("topic", topic),
            arguments.text("to_stream", to_stream),
        )

    def bindings(self, stream: str | None = None) -> list[Binding]:
        """The bindings of a stream, or of all."""
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, topic, to_stream, bound_at from pgqueue.stream_bindings"
            " where stream = coalesce(%s::text, stream) order by stream, to_stream, topic",
            [stream],
            row_factory=class_row(Binding),
        )

    def test_topic(self, pattern: str, key: str | None) -> bool:
        """Whether a key is of a topic."""
        return self._value(
            "select pgqueue.test_topic(%s::text, %s::text)",
            arguments.text("pattern", pattern),
            arguments.maybe(arguments.text, "key", key),
        )

    def create_consumer(
        self,
        stream: str,
        name: str,
        *,
        start: str | datetime = "latest",
        ordering: str = "none",
        max_deliver_count: int | None = None,
        visibility_timeout: timedelta = timedelta(seconds=30),
        if_not_exists: bool = False,
        topic: str | None = None,
        where: str | None = None,
    ) -> int:
        """Create a consumer of a stream.

        Args:
            stream: the stream's name.
            name: 1 to 200 characters.
            start: "earliest" for all messages that there are, "latest" for what is published from
                now on, a time (with its zone) for what was published since, or "seq 41" for the
                messages from that number on.
            ordering: "none"; "key": the messages of a key one after the other; "stream": all so.
            max_deliver_count: dead-letter a message that failed so often; None for never.
            visibility_timeout: how long a claim is held without being extended.
            if_not_exists: accept an existing one of the same ordering and filter.
            topic: only messages whose key is of this topic, such as "orders.*.eu": words with dots
                between them; * stands for one word, # for any number of them.
            where: only messages for which this jsonpath finds something, neither false nor null,
                in {key, headers, data}: "$.data.total > 100".

        Returns:
            its id.
        """
        return self._value(
            "select pgqueue.create_consumer(%s::text, %s::text, %s::text, %s::text, %s::int,"
            " %s::interval, %s::boolean, %s::text, pgqueue._jsonpath('p_where', %s::text))",
            arguments.text("stream", stream),
            arguments.text("name", name),
            arguments.position("start", start),
            arguments.text("ordering", ordering),
            arguments.maybe(arguments.number, "max_deliver_count", max_deliver_count),
            arguments.duration("visibility_timeout", visibility_timeout),
            arguments.flag("if_not_exists", if_not_exists),
            arguments.maybe(arguments.text, "topic", topic),
            arguments.maybe(arguments.text, "where", where),
        )

    def drop_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer with all that it has not finished; its claims end."""
        self._value(
            "select pgqueue.drop_consumer(%s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("name", name),
        )

    def seek(self, stream: str, consumer: str, to: str | datetime) -> int:
        """Move a consumer, as if it were created there.

        What it has taken and not finished it forgets, and its claims end: their owners are told
        when they come back. Dead letters stay dead.

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            to: as `start` of `create_consumer`.

        Returns:
            how many messages it forgot: what it had in hand, and what it skips; about, where that
            is very many.

        Raises:
            PgQueueError: PQ003 no position; 55P03 a transaction that holds some of it stays open
                for 10 s.
        """
        return self._value(
            "select pgqueue.seek(%s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.position("to", to),
        )

    def replay(
        self, stream: str, consumer: str, start: str | datetime, to: str | datetime = "latest"
    ) -> int:
        """Deliver messages once more that a consumer has finished, or skipped.

        They arrive again at the end of its line. What it has in hand, or not taken yet, comes as it
        would; dead letters stay dead.

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            start: the first position, as `start` of `create_consumer`.
            to: the position behind the last one.

        Returns:
            how many messages these are; about, where that is very many.
        """
        return self._value(
            "select pgqueue.replay(%s::text, %s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.position("start", start),
            arguments.position("to", to),
        )

    def pause(self, stream: str, consumer: str) -> None:
        """Let a consumer claim nothing, until `resume`. What is claimed is settled as ever."""
        self._value(
            "select pgqueue.pause(%s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
        )

    def resume(self, stream: str, consumer: str) -> None:
        """Let a paused consumer claim again."""
        self._value(
            "select pgqueue.resume(%s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
        )

    def streams(self) -> list[Stream]:
        """All streams, by name."""
        return self._statements.rows(
            "select stream as name, kind, created_at, consumers, messages, bytes"
            " from pgqueue.stream_stats order by stream",
            row_factory=class_row(Stream),
        )

    def kind(self, stream: str) -> str:
        """What the messages of a stream hold: "text", "json" or "binary"."""
        sql = "select kind from pgqueue.open_stream(%s::text)"
        return self._value(sql, arguments.text("stream", stream))

    def consumers(self, stream: str | None = None) -> list[Consumer]:
        """The consumers of a stream, or of all streams, by name."""
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, consumer as name, ordering, max_deliver_count, visibility_timeout,"
            " created_at, paused, topic, condition::text as where from pgqueue.consumer_settings"
            " where stream = coalesce(%s::text, stream) order by stream, consumer",
            [stream],
            row_factory=class_row(Consumer),
        )

    def stats(self, stream: str | None = None) -> list[ConsumerStats]:
        """What the consumers of a stream, or of all streams, have before them; counts no rows."""
        self._must_exist(stream)
        return self._statements.rows(
            "select stream, consumer, ordering, new, ready, delayed, waiting, claimed, dead,"
            " backlog, claims, expired, next_expiry, skipped from pgqueue.consumer_stats"
            " where stream = coalesce(%s::text, stream) order by stream, consumer",
            [stream],
            row_factory=class_row(ConsumerStats),
        )

    # Messages

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
    ) -> int:
        """Publish a message.

        Args:
            stream: the stream's name.
            data: the payload: bytes for a binary stream, str for others (JSON text for json).
            key: what ordering "key" goes by; None for in no order with others.
            headers: values that JSON can hold, by name.
            priority: -32768 to 32767; higher is earlier, for consumers with ordering "none".
            deliver_at: not before this time (with its zone); None for at once.
            consumers: names of those that get it; None for all.
            dedup_key: publish nothing where a message with this key was sent within the stream's
                dedup window; None for none.

        Returns:
            its seq, or that of the first message with its dedup key.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range,
                PQ004 data that does not fit the stream's kind; an argument of the wrong type.
        """
        binary = isinstance(data, bytes)
        if not isinstance(data, bytes):
            arguments.text("data", data, "a str, or bytes for a binary stream")
        return self._value(
            "select pgqueue.send(%s::text, %s::text, %s::text, %s::jsonb, %s::int,"
            " %s::timestamptz, %s::text[], %s::bytea, %s::text)",
            arguments.text("stream", stream),
            None if binary else data,
            arguments.maybe(arguments.text, "key", key),
            arguments.headers("headers", headers),
            arguments.number("priority", priority, -32768, 32767),
            arguments.maybe(arguments.time, "deliver_at", deliver_at),
            arguments.maybe(arguments.texts, "consumers", consumers),
            data if binary else None,
            arguments.maybe(arguments.text, "dedup_key", dedup_key),
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
    ) -> list[int]:
        """Publish messages together: they become visible at once, in the order given.

        Args:
            stream: the stream's name.
            data: a payload per message, as in `send`.
            keys: a key, or None, per message; None for no keys.
            headers: headers, or None, per message; None for no headers.
            priority: as in `send`, for all of them.
            deliver_at: as in `send`, for all of them.
            consumers: as in `send`, for all of them.
            dedup_keys: a dedup key, or None, per message; None for no dedup keys. Also of two of
                these messages with one key only the first is published.

        Returns:
            their seqs, in that order, of a duplicate that of the first; none for no data.

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
        given = (payloads, all_keys, all_headers, all_dedup_keys)
        counts = {len(each) for each in given if each is not None}
        if sum(map(len, payloads)) >= copying.WORTH_IT and len(counts) == 1:
            seqs = copying.copy_messages(self._statements, stream, *given, *of_all)
            if seqs is not None:
                return seqs
        # An array in binary format is three times as fast as one in text.
        rows = self._statements.rows(
            "select * from pgqueue.send_batch(%s::text, %b::text[], %b::text[], %s::jsonb[],"
            " %s::int, %s::timestamptz, %s::text[], %b::bytea[], %b::text[])",
            [
                stream,
                None if binary else payloads,
                all_keys,
                all_headers,
                *of_all,
                payloads if binary else None,
                all_dedup_keys,
            ],
        )
        return [seq for (seq,) in rows]

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
        """Capture a table no more. Arguments and errors as in `capture`."""
        self._value(
            "select pgqueue.release(%s::text::regclass, %s::text)",
            arguments.text("table", table),
            arguments.text("stream", stream),
        )

    def captures(self) -> list[Capture]:
        """All tables that are captured, by name."""
        return self._statements.rows(
            'select "table", stream, owner, options, outbox, uncaptured_partitions'
            ' from pgqueue.captures order by "table", stream',
            row_factory=class_row(Capture),
        )

    def receive(
        self,
        stream: str,
        consumer: str,
        max_messages: int = 1,
        *,
        visibility_timeout: timedelta | None = None,
        ack: Claim | int | None = None,
        wait: timedelta | None = None,
    ) -> Claim | None:
        """Claim messages for a consumer, and read them.

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            max_messages: claim at most so many.
            visibility_timeout: after how long other workers may take them over, unless `extend` is
                called; None for the consumer's.
            ack: a claim, or its number, to acknowledge first, whole, in the same transaction and
                round trip; None for none. A warning is logged for one that is not live.
            wait: when there is nothing, wait so long for a message; None for not at all. It ends
                at once with a publication, within a second with a delay or another worker's lease
                that is over; behind a pooler it looks once a second. Other threads that share
                the client wait too. The connection goes on listening to the stream.

        Returns:
            the claim, or None when there is nothing to deliver now, or was nothing in that time. A
            message of it that cannot be read has an `error`; the others are there all the same.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range,
                PQ007 a transaction that is not read committed; an argument of the wrong type;
                `wait` inside a transaction, or on a connection of the caller's.
        """
        patience = arguments.maybe(arguments.patience, "wait", wait)
        if patience is not None:
            self._check_can_wait()
        claim_now = partial(self._claim, stream, consumer, max_messages, visibility_timeout)
        if patience:
            first, again = partial(claim_now, ack), partial(claim_now, None)
            return self._waiting.first(stream, first, again, patience)
        return claim_now(ack)

    def consume(
        self,
        stream: str,
        consumer: str,
        *,
        prefetch: int = 100,
        visibility_timeout: timedelta | None = None,
        wait: timedelta | None = None,
    ) -> Iterator[Message]:
        """Iterate over messages one at a time, claimed many at a time: for work on single messages.

            for message in queue.consume("orders", "billing", wait=timedelta(minutes=1)):
                bill(message.data)

        A message is done when the next one is asked for. Those of a claim are acknowledged
        together, in the call that makes the next claim; so after a worker that died, another one
        gets up to `prefetch` messages again which were done. The claim is extended while messages
        of it are left, unless one takes longer than the visibility timeout: then they go to other
        workers, and the iteration goes on with others. Who leaves the loop, by break or by an
        error, returns the message at hand and those behind it, as `nack` does.

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            prefetch: claim at most so many messages at once.
            visibility_timeout: as in `receive`; None for the consumer's.
            wait: as in `receive`: the iteration ends when there was nothing for so long; None for
                as soon as there is nothing.

        Raises:
            PgQueueError: as `receive`.
        """
        arguments.number("prefetch", prefetch, 1, 2**31 - 1)
        timeout = visibility_timeout
        if timeout is None:
            timeout = self._value(
                "select visibility_timeout from pgqueue.open_consumer(%s::text, %s::text)",
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
            )
        arguments.duration("visibility_timeout", timeout)
        arguments.maybe(arguments.patience, "wait", wait)
        return consuming.consume(self, stream, consumer, prefetch, timeout, wait)

    # Reading without claiming

    def read(
        self,
        stream: str,
        offset: dict[str, Any] | str | datetime | None = None,
        *,
        max_messages: int = 10_000,
        wait: timedelta | None = None,
    ) -> Iterator[Batch]:
        """Iterate over the messages after an offset, in batches, without claiming them.

            for batch in queue.read("orders", offset):
                work(batch.messages)
                offset = batch.offset  # to be kept, with the work, by whoever reads

        Any number of readers read the same messages, and know nothing of each other. The messages
        between two offsets are the same for ever. A transaction that stays open keeps nobody
        waiting: what it publishes comes after its commit, in a batch of then.

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
        """The messages between two offsets, the same for ever: a batch once more."""
        return reading.read_between(self._statements, stream, first, last)

    # Groups

    def create_group(
        self,
        stream: str,
        name: str,
        *,
        partitions: int = 16,
        start: str | datetime = "latest",
        if_not_exists: bool = False,
    ) -> int:
        """Create a group: workers that share a stream by partitions of its keys.

        Args:
            stream: the stream's name.
            name: 1 to 200 characters, none of a consumer of the stream.
            partitions: so many workers can share it, 1 to 1,024. It never changes.
            start: as in `create_consumer`.
            if_not_exists: accept an existing one with as many partitions.

        Returns:
            its id.
        """
        return self._value(
            "select pgqueue.create_group(%s::text, %s::text, %s::int, %s::text, %s::boolean)",
            arguments.text("stream", stream),
            arguments.text("name", name),
            arguments.number("partitions", partitions),
            arguments.position("start", start),
            arguments.flag("if_not_exists", if_not_exists),
        )

    def drop_group(self, stream: str, name: str) -> None:
        """Delete a group; its workers are told when they come back."""
        self._value(
            "select pgqueue.drop_group(%s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("name", name),
        )

    def reset_group(self, stream: str, name: str, to: str | datetime) -> int:
        """Move a group to another position of its stream; its workers go on from there.

        Args:
            stream: the stream's name.
            name: the group's name.
            to: "earliest", "latest", a time (with its zone), or "seq" and a number.

        Returns:
            how many messages it forgot and skipped, about.
        """
        return self._value(
            "select pgqueue.reset_group(%s::text, %s::text, %s::text)",
            arguments.text("stream", stream),
            arguments.text("name", name),
            arguments.position("to", to),
        )

    def group(self, stream: str, name: str) -> Group:
        """A group, to work in: see `Group.run`.

        Raises:
            PgQueueError: the client is on a connection of the caller's.
        """
        self._check_can_wait()
        return Group(
            self._statements,
            self._waiting,
            arguments.text("stream", stream),
            arguments.text("name", name),
            self._statements.another,
        )

    def groups(self, stream: str | None = None) -> list[GroupStats]:
        """The groups of a stream, or of all streams, and how far behind they are."""
        self._must_exist(stream)
        return self._statements.rows(
            'select stream, "group" as name, count(*)::int as partitions,'
            " count(distinct worker)::int as workers, max(behind) as behind"
            " from pgqueue.group_stats where stream = coalesce(%s::text, stream)"
            ' group by stream, "group" order by stream, "group"',
            [stream],
            row_factory=class_row(GroupStats),
        )

    def partitions(self, stream: str, name: str) -> list[PartitionStats]:
        """The partitions of a group: who has them, and how far behind they are."""
        found = self._statements.rows(
            "select partition, worker, lease_until, committed_at, behind from pgqueue.group_stats"
            ' where stream = %s::text and "group" = %s::text order by partition',
            [arguments.text("stream", stream), arguments.text("name", name)],
            row_factory=class_row(PartitionStats),
        )
        if not found:
            self._must_exist(stream)
            raise PgQueueError(
                f"stream {stream!r} has no group {name!r}",
                hint="create it, or see which there are: pgqueue group list",
                sqlstate="PQ002",
            )
        return found

    def _check_can_wait(self) -> None:
        if not self._statements.can_wait:
            raise PgQueueError(
                "wait needs a connection of the client's own, outside a transaction",
                hint="leave wait out, or make the client with spark_pgqueue.connect(url)",
            )

    def _claim(
        self,
        stream: str,
        consumer: str,
        max_messages: int,
        visibility_timeout: timedelta | None,
        ack: Claim | int | None,
    ) -> Claim | None:
        rows = self._statements.rows(
            "select claim_id, seq, key, data, data_bytes, headers::text, priority, deliver_count,"
            " inserted_at from pgqueue.receive(%s::text, %s::text, %s::int, %s::interval,"
            " %s::bigint)",
            [
                arguments.text("stream", stream),
                arguments.text("consumer", consumer),
                arguments.number("max_messages", max_messages, 1, 2**31 - 1),
                arguments.maybe(arguments.duration, "visibility_timeout", visibility_timeout),
                arguments.maybe(
                    arguments.claim_id, "ack", ack.claim_id if isinstance(ack, Claim) else ack
                ),
            ],
        )
        if not rows:
            return None
        messages = tuple(_message(*row[1:]) for row in rows)
        return Claim(rows[0][0], messages, self)

    def ack(self, claim_id: int, seqs: Iterable[int] | None = None) -> int:
        """Acknowledge a claim: its messages are done.

        Args:
            claim_id: the claim's number.
            seqs: those of its messages alone; numbers that it does not hold are passed over.

        Returns:
            how many messages that were. 0, and a warning is logged, for a claim that was settled
            before, or that another worker took over.

        Raises:
            PgQueueError: PQ007 a transaction that is not read committed; an argument of the wrong
                type.
        """
        return self._value(
            "select pgqueue.ack(%s::bigint, %s::bigint[])", *arguments.target(claim_id, seqs)
        )

    def nack(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta = timedelta(),
        reason: str | None = None,
    ) -> int:
        """Return a claim, to be delivered again.

        A message that was delivered its consumer's max_deliver_count times is dead-lettered. With
        ordering, later messages of the same keys in the claim go back too, not counted as failed.

        Args:
            claim_id: the claim's number.
            seqs: those of its messages alone; numbers that it does not hold are passed over.
            delay: deliver them after this time, not before.
            reason: kept as their last error.

        Returns:
            how many messages left the claim; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 a delay below 0, and as `ack`.
        """
        return self._value(
            "select pgqueue.nack(%s::bigint, %s::bigint[], %s::interval, %s::text)",
            *arguments.target(claim_id, seqs),
            arguments.duration("delay", delay),
            arguments.maybe(arguments.text, "reason", reason),
        )

    def extend(self, claim_id: int, by: timedelta | None = None) -> int:
        """Hold a claim longer.

        Args:
            claim_id: the claim's number.
            by: from now on at least so long; None for its visibility timeout.

        Returns:
            how many messages it holds; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 not longer than 0, and as `ack`.
        """
        return self._value(
            "select pgqueue.extend(%s::bigint, %s::interval)",
            arguments.target(claim_id, None)[0],
            arguments.maybe(arguments.duration, "by", by),
        )

    def dead_letter(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int:
        """Give up on a claim: its messages are kept as dead, and not delivered again.

        Args:
            claim_id: the claim's number.
            seqs: those of its messages alone; numbers that it does not hold are passed over.
            reason: why, for people.
            details: why, for programs: a value that JSON can hold.

        Returns:
            how many messages that were; 0 as in `ack`.

        Raises:
            PgQueueError: as `ack`.
        """
        return self._value(
            "select pgqueue.dead_letter(%s::bigint, %s::bigint[], %s::text, %s::jsonb)",
            *arguments.target(claim_id, seqs),
            arguments.maybe(arguments.text, "reason", reason),
            arguments.maybe(arguments.json_text, "details", details),
        )

    # Everything else

    def install(self) -> int:
        """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat.

        Returns:
            its version.

        Raises:
            PgQueueError: the database has a newer schema, or the role lacks a permission. Nothing
                is changed then.
        """
        return self._statements.install()

    def maintain(
        self,
        staged_age: timedelta = timedelta(days=1),
        reader_age: timedelta = timedelta(days=30),
    ) -> dict[str, int]:
        """Trim what need not be kept, and delete what failed writers left.

        Housekeeping, in many short transactions, which also forgets abandoned checkpoints. Streams
        with a retention need it every half minute or so. Not inside of `transaction`, which would
        hold all its locks.

        Args:
            staged_age: longer than any batch of a Spark query takes to be written.
            reader_age: longer than any Spark query stays away from its checkpoint.

        Returns:
            how much was deleted, by what it was.
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

        To be called once, before producers come back. Offsets that have read what was not restored
        are refused from then on; all others go on.

        Returns:
            by stream, the last publication that counts as restored.

        Raises:
            PgQueueError: the server is a standby, or somebody publishes (55P03).
        """
        return dict(self._statements.rows("select stream, last_publication from pgqueue.recover()"))

    @contextmanager
    def transaction(self) -> Iterator[Client]:
        """Make the calls inside one transaction: all of them take effect at its end, or none.

        Keep it short: what it claims or settles stays locked until its end. A connection that is
        lost inside is not replaced; nothing took effect then.

        Raises:
            PgQueueError: the connection is lost.
        """
        with self._statements.transaction():
            yield self

    def close(self) -> None:
        """Close the connection, if it is the client's own. Safe to repeat."""
        self._statements.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _must_exist(self, stream: str | None) -> None:
        if stream is not None:
            self._value("select pgqueue.open_stream(%s::text)", arguments.text("stream", stream))

    def _value(self, sql: LiteralString, *parameters: Any) -> Any:
        return self._statements.rows(sql, parameters)[0][0]


def _message(
    seq: int, key: str | None, text: str | None, binary: bytes, headers: str | None, *others: Any
) -> Message:
    """A message; what is wrong with its headers is its own `error`, and none of the claim's."""
    data = binary if text is None else text
    try:
        return Message(seq, key, data, json.loads(headers) if headers else {}, *others)
    except (ValueError, RecursionError) as error:
        why = f"its headers cannot be read: {error}"
        return Message(seq, key, data, {}, *others, error=why)


def _make_statements(**where: Any) -> Statements:
    return Statements(**where, names=arguments.name_of, prepare=_log_warnings_of)


# Notices come to handlers of a connection; one is enough, however many clients use it.
_logged: WeakSet[psycopg.Connection] = WeakSet()


def _log_warnings_of(connection: psycopg.Connection) -> None:
    if connection not in _logged:
        connection.add_notice_handler(_log_warning)
        _logged.add(connection)


def _log_warning(notice: psycopg.errors.Diagnostic) -> None:
    ours = "pgqueue." in (notice.context or "")
    if ours and notice.severity_nonlocalized == "WARNING":
        warn("%s", notice.message_primary, logger="spark_pgqueue.client")
