"""The Python client: the functions of the schema pgqueue, with Python's types.

    with spark_pgqueue.connect("postgresql://me@host/db") as queue:
        queue.create_stream("orders", if_not_exists=True)
        queue.create_consumer("orders", "billing", if_not_exists=True)
        queue.send("orders", "order 1", key="customer 7")

        while claim := queue.receive("orders", "billing", max_messages=100):
            for message in claim.messages:
                bill(message.data)
            claim.ack()

Each call is one statement (one that waits makes several), and a transaction of its own unless it is
made inside of `with queue.transaction():`. To send in the same transaction as other work, use the
connection that does this work: `Client(connection).send(...)`.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, LiteralString, TypeVar
from weakref import WeakSet

import psycopg
from psycopg.rows import RowFactory, class_row, tuple_row
from psycopg.sql import SQL, Identifier

from spark_pgqueue import connection as _connection
from spark_pgqueue import schema
from spark_pgqueue.errors import PgQueueError, sqlstate_of, translate

T = TypeVar("T")

_log = logging.getLogger(__name__)


def connect(url: str | None = None, *, patience: float = _connection.PATIENCE) -> Client:
    """Connect to the database of a queue.

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        patience: seconds to go on trying for while Postgres may be restarting; 0 to try once.

    Returns:
        a client with a connection of its own, which it replaces when it is lost.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    return Client(
        _connection.connect(url, patience=patience),
        _reconnect=lambda: _connection.connect(url, patience=patience),
    )


@dataclass(frozen=True)
class Message:
    """A message as it was received.

    Attributes:
        seq: its number in the stream.
        key: what ordering "key" goes by, or None.
        data: the payload: bytes in a binary stream, str in others.
        headers: what its sender gave; empty when nothing.
        priority: as it was published, -32768 to 32767; higher is earlier.
        deliver_count: how many times it was delivered, this time included.
        inserted_at: when it was sent, by the database's clock.
    """

    seq: int
    key: str | None
    data: str | bytes
    headers: dict[str, Any]
    priority: int
    deliver_count: int
    inserted_at: datetime


@dataclass(frozen=True)
class Claim:
    """Messages that are this worker's until it settles them or its visibility timeout passes.

    The methods settle the whole claim or those of its messages that are given, and answer how many
    messages they changed. On a claim that another worker has taken over they change nothing, answer
    0 and log a warning.

    Attributes:
        claim_id: its number, for another process to settle it with `Client.ack` and its like.
        messages: in the order of delivery; at least one.
    """

    claim_id: int
    messages: tuple[Message, ...]
    _client: Client = field(repr=False, compare=False)

    def ack(self, messages: Iterable[Message] | None = None) -> int:
        """Acknowledge: see `Client.ack`. `messages`: None for all of them."""
        return self._client.ack(self.claim_id, _seqs_of(messages))

    def nack(
        self,
        messages: Iterable[Message] | None = None,
        *,
        delay: timedelta = timedelta(),
        reason: str | None = None,
    ) -> int:
        """Return for another delivery: see `Client.nack`. `messages`: None for all of them."""
        return self._client.nack(self.claim_id, _seqs_of(messages), delay=delay, reason=reason)

    def extend(self, by: timedelta | None = None) -> int:
        """Hold the claim longer: see `Client.extend`."""
        return self._client.extend(self.claim_id, by)

    def dead_letter(
        self,
        messages: Iterable[Message] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int:
        """Give up on them: see `Client.dead_letter`. `messages`: None for all of them."""
        seqs = _seqs_of(messages)
        return self._client.dead_letter(self.claim_id, seqs, reason=reason, details=details)


@dataclass(frozen=True)
class Stream:
    """A stream.

    Attributes:
        name: its name.
        kind: what its messages hold: "text", "json" or "binary".
        created_at: when it was created.
        consumers: how many there are.
        messages: how many are stored, by the planner's estimate.
        bytes: what they take on disk.
    """

    name: str
    kind: str
    created_at: datetime
    consumers: int
    messages: int
    bytes: int


@dataclass(frozen=True)
class Consumer:
    """A consumer.

    Attributes:
        stream: the stream's name.
        name: its name.
        ordering: "none", "key" or "stream".
        max_deliver_count: a message that failed so often is dead-lettered; None for never.
        visibility_timeout: how long a claim is held without being extended.
        created_at: when it was created.
    """

    stream: str
    name: str
    ordering: str
    max_deliver_count: int | None
    visibility_timeout: timedelta
    created_at: datetime


@dataclass(frozen=True)
class ConsumerStats:
    """What a consumer has before it: numbers of messages, except where it says otherwise.

    Attributes:
        stream: the stream's name.
        consumer: the consumer's name.
        ordering: "none", "key" or "stream".
        new: published and not looked at yet; an estimate where that is very many publications.
        ready: to be delivered.
        delayed: to be delivered later.
        waiting: behind an earlier message of their key.
        claimed: held by workers.
        dead: dead-lettered.
        backlog: new, ready, delayed and waiting together.
        claims: how many claims there are.
        expired: of these, how many are past their visibility timeout.
        next_expiry: when the first of them is; None without claims.
    """

    stream: str
    consumer: str
    ordering: str
    new: int
    ready: int
    delayed: int
    waiting: int
    claimed: int
    dead: int
    backlog: int
    claims: int
    expired: int
    next_expiry: datetime | None


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
        self,
        connection: psycopg.Connection[Any],
        *,
        _reconnect: Callable[[], psycopg.Connection] | None = None,
    ):
        if not isinstance(connection, psycopg.Connection):
            raise PgQueueError(
                f"connection must be a psycopg.Connection, not {type(connection).__name__}",
                hint="to connect by url, use spark_pgqueue.connect(url)",
            )
        _log_warnings_of(connection)
        self._conn = connection
        self._reconnect = _reconnect
        self._transactions = 0
        self._checked = False

    # Streams and consumers

    def create_stream(self, name: str, kind: str = "text", *, if_not_exists: bool = False) -> int:
        """Create a stream.

        Args:
            name: 1 to 200 characters.
            kind: what its messages hold: "text", "json" (checked) or "binary".
            if_not_exists: accept an existing one of the same kind.

        Returns:
            its id.
        """
        return self._value(
            "select pgqueue.create_stream(%s::text, %s::text, %s::boolean)",
            _text("name", name),
            _text("kind", kind),
            _flag("if_not_exists", if_not_exists),
        )

    def drop_stream(self, name: str) -> None:
        """Delete a stream with its messages and consumers."""
        self._value("select pgqueue.drop_stream(%s::text)", _text("name", name))

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
    ) -> int:
        """Create a consumer of a stream.

        Args:
            stream: the stream's name.
            name: 1 to 200 characters.
            start: "earliest" for all messages that there are, "latest" for what is published from
                now on, or a time (with its zone) for what was published since.
            ordering: "none"; "key": the messages of a key one after the other; "stream": all so.
            max_deliver_count: dead-letter a message that failed so often; None for never.
            visibility_timeout: how long a claim is held without being extended.
            if_not_exists: accept an existing one of the same ordering.

        Returns:
            its id.
        """
        since = _time("start", start) if isinstance(start, datetime) else _text("start", start)
        return self._value(
            "select pgqueue.create_consumer(%s::text, %s::text, %s::text, %s::text, %s::int,"
            " %s::interval, %s::boolean)",
            _text("stream", stream),
            _text("name", name),
            since.isoformat() if isinstance(since, datetime) else since,
            _text("ordering", ordering),
            _maybe(_number, "max_deliver_count", max_deliver_count),
            _duration("visibility_timeout", visibility_timeout),
            _flag("if_not_exists", if_not_exists),
        )

    def drop_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer with all that it has not finished; its claims end."""
        self._value(
            "select pgqueue.drop_consumer(%s::text, %s::text)",
            _text("stream", stream),
            _text("name", name),
        )

    def streams(self) -> list[Stream]:
        """All streams, by name."""
        return self._rows(
            "select stream as name, kind, created_at, consumers, messages, bytes"
            " from pgqueue.stream_stats order by stream",
            row_factory=class_row(Stream),
        )

    def consumers(self, stream: str | None = None) -> list[Consumer]:
        """The consumers of a stream, or of all streams, by name."""
        self._must_exist(stream)
        return self._rows(
            "select s.name as stream, c.name, c.ordering, c.max_deliver_count,"
            " c.visibility_timeout, c.created_at"
            " from pgqueue.consumers c join pgqueue.streams s using (stream_id)"
            " where s.name = coalesce(%s::text, s.name) order by s.name, c.name",
            stream,
            row_factory=class_row(Consumer),
        )

    def stats(self, stream: str | None = None) -> list[ConsumerStats]:
        """What the consumers of a stream, or of all streams, have before them; counts no rows."""
        self._must_exist(stream)
        return self._rows(
            "select stream, consumer, ordering, new, ready, delayed, waiting, claimed, dead,"
            " backlog, claims, expired, next_expiry from pgqueue.consumer_stats"
            " where stream = coalesce(%s::text, stream) order by stream, consumer",
            stream,
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

        Returns:
            its seq.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range,
                PQ004 data that does not fit the stream's kind; an argument of the wrong type.
        """
        binary = isinstance(data, bytes)
        if not isinstance(data, bytes):
            _text("data", data, "a str, or bytes for a binary stream")
        return self._value(
            "select pgqueue.send(%s::text, %s::text, %s::text, %s::jsonb, %s::int,"
            " %s::timestamptz, %s::text[], %s::bytea)",
            _text("stream", stream),
            None if binary else data,
            _maybe(_text, "key", key),
            _headers("headers", headers),
            _number("priority", priority, -32768, 32767),
            _maybe(_time, "deliver_at", deliver_at),
            _maybe(_texts, "consumers", consumers),
            data if binary else None,
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

        Returns:
            their seqs, in that order; none for no data.

        Raises:
            PgQueueError: as `send`. Nothing is published then.
        """
        payloads = _list("data", data)
        binary = bool(payloads) and isinstance(payloads[0], bytes)
        for i, payload in enumerate(payloads):
            if binary:
                _check(f"data[{i}]", payload, bytes, "bytes, as data[0] is")
            else:
                _text(f"data[{i}]", payload, "a str, or all must be bytes for a binary stream")
        rows = self._rows(
            "select * from pgqueue.send_batch(%s::text, %s::text[], %s::text[], %s::jsonb[],"
            " %s::int, %s::timestamptz, %s::text[], %s::bytea[])",
            _text("stream", stream),
            None if binary else payloads,
            None if keys is None else [_maybe(_text, n, k) for n, k in _items("keys", keys)],
            None if headers is None else [_headers(n, h) for n, h in _items("headers", headers)],
            _number("priority", priority, -32768, 32767),
            _maybe(_time, "deliver_at", deliver_at),
            _maybe(_texts, "consumers", consumers),
            payloads if binary else None,
        )
        return [seq for (seq,) in rows]

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
                that is over. Other threads that share the client wait too.

        Returns:
            the claim, or None when there is nothing to deliver now, or was nothing in that time.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range,
                PQ007 a transaction that is not read committed; an argument of the wrong type;
                `wait` inside a transaction, or on a connection of the caller's.
        """
        patience = _maybe(_patience, "wait", wait)
        if patience is not None and (self._reconnect is None or self._transactions):
            raise PgQueueError(
                "wait needs a connection of the client's own, outside a transaction",
                hint="leave wait out, or make the client with spark_pgqueue.connect(url)",
            )
        claim_now = partial(self._claim, stream, consumer, max_messages, visibility_timeout)
        claim = claim_now(ack)
        if claim is None and patience:
            return self._wait_for(partial(claim_now, None), stream, patience)
        return claim

    def _claim(
        self,
        stream: str,
        consumer: str,
        max_messages: int,
        visibility_timeout: timedelta | None,
        ack: Claim | int | None,
    ) -> Claim | None:
        rows = self._rows(
            "select claim_id, seq, key, data, data_bytes, headers, priority, deliver_count,"
            " inserted_at from pgqueue.receive(%s::text, %s::text, %s::int, %s::interval,"
            " %s::bigint)",
            _text("stream", stream),
            _text("consumer", consumer),
            _number("max_messages", max_messages, 1, 2**31 - 1),
            _maybe(_duration, "visibility_timeout", visibility_timeout),
            _maybe(_claim_id, "ack", ack.claim_id if isinstance(ack, Claim) else ack),
        )
        if not rows:
            return None
        messages = tuple(
            Message(seq, key, text if text is not None else binary, headers or {}, *others)
            for _, seq, key, text, binary, headers, *others in rows
        )
        return Claim(rows[0][0], messages, self)

    def _wait_for(
        self, claim_now: Callable[[], Claim | None], stream: str, seconds: float
    ) -> Claim | None:
        """Claim at each publication and each second, until there is something or time is over."""
        end = time.monotonic() + seconds
        stream_id = self._value("select stream_id from pgqueue.open_stream(%s::text)", stream)
        channel = Identifier(f"pgqueue_{stream_id}")
        conn = self._conn
        with self._clear_errors():
            conn.execute(SQL("listen {}").format(channel))
            try:
                while (claim := claim_now()) is None and (left := end - time.monotonic()) > 0:
                    list(conn.notifies(timeout=min(left, 1.0), stop_after=1))
                return claim
            finally:
                if not conn.closed:
                    # Else they would pile up, in the server too, until the next wait.
                    conn.execute(SQL("unlisten {}").format(channel))

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
        return self._value("select pgqueue.ack(%s::bigint, %s::bigint[])", *_target(claim_id, seqs))

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
            *_target(claim_id, seqs),
            _duration("delay", delay),
            _maybe(_text, "reason", reason),
        )

    def extend(self, claim_id: int, by: timedelta | None = None) -> int:
        """Hold a claim longer.

        Args:
            claim_id: the claim's number.
            by: from now on so long; None for its visibility timeout.

        Returns:
            how many messages it holds; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 not longer than 0, and as `ack`.
        """
        return self._value(
            "select pgqueue.extend(%s::bigint, %s::interval)",
            _target(claim_id, None)[0],
            _maybe(_duration, "by", by),
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
            *_target(claim_id, seqs),
            _maybe(_text, "reason", reason),
            _maybe(_json, "details", details),
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
        with self._clear_errors():
            version = schema.install(self._connected())
        self._checked = True
        return version

    def maintain(self, staged_age: timedelta = timedelta(days=1)) -> dict[str, int]:
        """Delete what failed writers left. Housekeeping: nothing waits for it to be run.

        Args:
            staged_age: longer than any batch of a Spark query takes to be written.

        Returns:
            how much was deleted, by what it was.
        """
        return dict(
            self._rows(
                "select what, deleted from pgqueue.maintain(%s::interval)",
                _duration("staged_age", staged_age),
            )
        )

    @contextmanager
    def transaction(self) -> Iterator[Client]:
        """Make the calls inside one transaction: all of them take effect at its end, or none.

        Keep it short: what it claims or settles stays locked until its end. A connection that is
        lost inside is not replaced; nothing took effect then.

        Raises:
            PgQueueError: the connection is lost.
        """
        # Errors of the caller's own statements inside are the caller's.
        with ExitStack() as stack:
            with self._clear_errors():
                stack.enter_context(self._connected().transaction())
            self._transactions += 1
            try:
                yield self
            finally:
                self._transactions -= 1
            with self._clear_errors():
                stack.close()

    def close(self) -> None:
        """Close the connection, if it is the client's own. Safe to repeat."""
        if self._reconnect is not None:
            self._reconnect = None
            self._conn.close()

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
            self._rows("select pgqueue.open_stream(%s::text)", _text("stream", stream))

    def _value(self, sql: LiteralString, *parameters: Any) -> Any:
        return self._rows(sql, *parameters)[0][0]

    def _rows(
        self, sql: LiteralString, *parameters: Any, row_factory: RowFactory[Any] = tuple_row
    ) -> list[Any]:
        with self._clear_errors():
            conn = self._connected()
            if not self._checked:
                # It reads rows as tuples, which the caller's connection may not make.
                factory, conn.row_factory = conn.row_factory, tuple_row
                try:
                    schema.check(conn)
                finally:
                    conn.row_factory = factory
                self._checked = True
            # Not conn.cursor(): the caller's connection may have factories of its own.
            with psycopg.Cursor(conn, row_factory=row_factory) as cursor:
                return cursor.execute(sql, parameters).fetchall()

    def _connected(self) -> psycopg.Connection[Any]:
        """The connection; a new one in place of a lost one of the client's own."""
        if self._conn.closed and self._reconnect is not None and not self._transactions:
            self._conn = self._reconnect()
            _log_warnings_of(self._conn)
        return self._conn

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Raise a PgQueueError in place of every database error with a way out."""
        try:
            yield
        except psycopg.Error as error:
            message = error.diag.message_primary or str(error).strip()
            known, sqlstate = translate(error), sqlstate_of(error)
            if known is not None:
                message, hint = known.message, known.hint or _HINTS.get(sqlstate or "")
            elif sqlstate == "25006":
                hint = "connect to the primary, or begin a transaction that is not read-only"
            elif _connection.is_passing(error):
                message = f"the connection to Postgres was lost: {message}"
                hint = "whether the call took effect is not known; "
                hint += "connect again" if self._reconnect is None else "the next call reconnects"
                if self._reconnect is not None:
                    self._conn.close()
            elif isinstance(error, psycopg.DataError):
                message, hint = f"{message}: {error.diag.message_detail or ''}".rstrip(": "), None
            else:
                raise
            # Arguments by the names that they have here.
            message = _SQL_ARGUMENT.sub(r"\1", message)
            raise PgQueueError(message, hint=hint, sqlstate=sqlstate) from None


_SQL_ARGUMENT = re.compile(
    r"(?<!')\bp_(kind|start|ordering|max_deliver_count|visibility_timeout|priority|deliver_at"
    r"|consumers|data|data_bytes|keys?|headers|delay|by|staged_age)\b"
)

_HINTS = {
    "PQ004": "text for a text stream, valid JSON text for a json stream, bytes for a binary stream"
}


# Notices come to handlers of a connection; one is enough, however many clients use it.
_logged: WeakSet[psycopg.Connection] = WeakSet()


def _log_warnings_of(connection: psycopg.Connection) -> None:
    if connection not in _logged:
        connection.add_notice_handler(_log_warning)
        _logged.add(connection)


def _log_warning(notice: psycopg.errors.Diagnostic) -> None:
    ours = "pgqueue." in (notice.context or "")
    if ours and notice.severity_nonlocalized == "WARNING":
        _log.warning("%s", notice.message_primary)


# Arguments are checked here for what Python can get wrong, which is the type; what a value may be
# is the database's to say. `name` is the argument's, for the message.


def _check(name: str, value: Any, kind: type, wanted: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PgQueueError(f"{name} must be {wanted}, not {type(value).__name__}")


def _maybe(check: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    return None if value is None else check(name, value)


def _text(name: str, value: str, wanted: str = "a str") -> str:
    _check(name, value, str, wanted)
    if "\0" in value:
        raise PgQueueError(f"{name} holds a NUL character, which Postgres cannot store in a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PgQueueError(f"{name} is not Unicode text: {error}") from None
    return value


def _flag(name: str, value: bool) -> bool:
    _check(name, value, bool, "True or False")
    return value


def _number(name: str, value: int, low: int = 1, high: int = 2**31 - 1) -> int:
    _check(name, value, int, "an int")
    if not low <= value <= high:
        raise PgQueueError(f"{name} must be from {low} to {high}, not {value}")
    return value


def _duration(name: str, value: timedelta) -> timedelta:
    _check(name, value, timedelta, "a timedelta")
    return value


def _patience(name: str, value: timedelta) -> float:
    seconds = _duration(name, value).total_seconds()
    if seconds < 0:
        raise PgQueueError(f"{name} must be at least 0, not {value}")
    return seconds


def _time(name: str, value: datetime) -> datetime:
    _check(name, value, datetime, "a datetime")
    if value.tzinfo is None:
        raise PgQueueError(
            f"{name} must have a time zone: what {value.isoformat()} means depends on the place",
            hint="give for instance datetime.now(UTC) + timedelta(minutes=5)",
        )
    return value


def _list(name: str, value: Iterable[Any]) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise PgQueueError(f"{name} must be a list, not {type(value).__name__}")
    return list(value)


def _items(name: str, value: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{i}]", item) for i, item in enumerate(_list(name, value)))


def _texts(name: str, value: Iterable[str]) -> list[str]:
    return [_text(item_name, item) for item_name, item in _items(name, value)]


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PgQueueError(f"{name} must hold what JSON can: {error}") from None


def _headers(name: str, value: Mapping[str, Any] | None) -> str | None:
    if value is None:
        return None
    _check(name, value, Mapping, "a dict")
    return _json(name, dict(value))


def _claim_id(name: str, claim_id: int) -> int:
    return _number(name, claim_id, 1, 2**63 - 1)


def _target(claim_id: int, seqs: Iterable[int] | None) -> tuple[int, list[int] | None]:
    """The claim's number and the numbers of messages, as the functions that settle take them."""
    _claim_id("claim_id", claim_id)
    if seqs is None:
        return claim_id, None
    return claim_id, [_number(name, seq, 1, 2**63 - 1) for name, seq in _items("seqs", seqs)]


def _seqs_of(messages: Iterable[Message] | None) -> list[int] | None:
    if messages is None:
        return None
    chosen = _list("messages", messages)
    for i, message in enumerate(chosen):
        _check(f"messages[{i}]", message, Message, "a Message")
    return [message.seq for message in chosen]
