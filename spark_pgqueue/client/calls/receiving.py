"""Receiving messages, and settling them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from spark_pgqueue.client import arguments, consuming
from spark_pgqueue.client.calls.base import Calls, statement
from spark_pgqueue.client.messages import Claim, Message
from spark_pgqueue.client.reading import headers_of, json_of
from spark_pgqueue.client.unseen import undeliver
from spark_pgqueue.postgres.errors import PgQueueError

_COLUMNS = (
    "claim_id, seq, key, data, data_bytes, headers::text, priority, deliver_count, inserted_at,"
    " saved::text"
)


class Receiving(Calls):
    """Receiving messages, and settling them."""

    def receive(
        self,
        stream: str,
        consumer: str,
        max_messages: int = 1,
        *,
        visibility_timeout: timedelta | None = None,
        ack: Claim | int | None = None,
        wait: timedelta | None = None,
        where: str | None = None,
        look: int = 10_000,
    ) -> Claim | None:
        """Claim messages for a consumer, and read them.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> [message.data for message in claim.messages]
            ['order 1', 'order 2']
            >>> claim.ack()
            2
            >>> queue.receive("orders", "billing", wait=timedelta(milliseconds=10)) is None
            True

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            max_messages: claim at most this many messages.
            visibility_timeout: the time after which other workers may take the messages over,
                unless `extend` is called; None for the consumer's.
            ack: a claim, or its number, to acknowledge first, as a whole, in the same transaction
                and round trip; None for none. A claim that is not live logs a warning. A call that
                fails acknowledges nothing.
            wait: how long to wait for a message when there is none; None not to wait. The wait ends
                at a publication, at the end of a delay or of another worker's lease, or at the
                time of a schedule. Behind a pooler, the client polls once a second. Other threads
                that share the client wait, too. The connection keeps listening.
            where: claim only messages for which this jsonpath, on {key, headers, data}, returns a
                value that is neither false nor null: "$.data.total > 100". The other messages are
                not changed. Only for ordering "none".
            look: with `where`, examine at most this many ready messages.

        Returns:
            the claim; None when no message can be delivered now, or none arrived in time. A message
            that cannot be read has an `error`, and does not affect the others.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown consumer, PQ003 a value out of range,
                PQ007 a transaction that is not read committed; an argument of the wrong type;
                `wait` inside a transaction, or on the caller's connection.
        """
        rows: list[Any] = []
        claim_now = partial(
            *(self._claim, rows, stream, consumer, max_messages, visibility_timeout),
            where=where,
            look=look,
        )
        first, again = partial(claim_now, ack), partial(claim_now, None)
        return self._first(rows, stream, consumer, wait, first, again)

    def consume(
        self,
        stream: str,
        consumer: str,
        *,
        prefetch: int = 100,
        visibility_timeout: timedelta | None = None,
        wait: timedelta | None = None,
    ) -> Iterator[Message]:
        """Iterate over single messages, which are claimed many at a time.

        A message is done when the loop requests the next. The messages of a claim are acknowledged
        together, by the call that makes the next claim; if that call fails, by a separate call. So
        if a worker crashes, up to `prefetch` finished messages are delivered again. The claim is
        extended while it has messages left, unless one message takes longer than the visibility
        timeout: then the remaining messages go to other workers, and the iteration continues with
        new messages. Leaving the loop, by break or by an error, returns the current message as
        `nack` does, and the messages after it as not delivered; so does closing the client.

            >>> for message in queue.consume("orders", "billing", wait=timedelta(0)):
            ...     print(message.data)
            order 1
            order 2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            prefetch: claim at most this many messages at once.
            visibility_timeout: as in `receive`; None for the consumer's.
            wait: as in `receive`: the iteration ends when no message arrived for this time; None to
                end at once when there is no message.

        Raises:
            PgQueueError: as `receive`.
        """
        arguments.number("prefetch", prefetch, 1, 2**31 - 1)
        timeout = visibility_timeout
        if timeout is None:
            columns = "visibility_timeout"
            timeout = self._call("open_consumer", columns, stream=stream, consumer=consumer)
        arguments.duration("visibility_timeout", timeout)
        arguments.maybe(arguments.patience, "wait", wait)

        rows: list[Any] = []
        claim = partial(self._claim, rows, stream, consumer, prefetch, timeout)
        first = partial(self._first, rows, stream, consumer, wait)
        messages = consuming.consume(claim, first, timeout)
        self._consuming.add(messages)
        return messages

    def _first(
        self,
        rows: list[Any],
        stream: str,
        consumer: str,
        patience: timedelta | None,
        look: Callable[[], Claim | None],
        look_again: Callable[[], Claim | None],
    ) -> Claim | None:
        """Poll until messages are found or `patience` has passed. If the caller is interrupted, the
        claim, whose rows are in `rows`, is returned to the queue.
        """
        seconds = arguments.maybe(arguments.patience, "wait", patience)
        if seconds is not None:
            self._check_can_wait()
        rows.clear()
        try:
            if not seconds:
                return look()
            due = partial(self._due, stream, consumer)
            return self._long_poll.first(stream, look, look_again, seconds, due=due)
        except BaseException:
            if rows:
                undeliver(self._claim_of(rows))
            raise

    def _due(self, stream: str, consumer: str) -> float | None:
        seconds = "extract(epoch from next_due - clock_timestamp())::float8"
        return self._call("next_due", seconds, stream=stream, consumer=consumer)

    def _claim(
        self,
        rows: list[Any],
        stream: str,
        consumer: str,
        max_messages: int,
        visibility_timeout: timedelta | None,
        ack: Claim | int | None,
        *,
        where: str | None = None,
        look: int = 0,
    ) -> Claim | None:
        given = {
            "stream": stream,
            "consumer": consumer,
            "max_messages": max_messages,
            "visibility_timeout": visibility_timeout,
            "ack": ack.claim_id if isinstance(ack, Claim) else ack,
        }
        if where is None:
            call = statement("receive", _COLUMNS, given)
        else:
            call = statement("receive_where", _COLUMNS, given | {"where": where, "look": look})
        self._statements.rows(*call, into=rows)
        if not rows:
            return None
        claim = self._claim_of(rows)
        del rows[1:]  # one is enough to return the claim
        return claim

    def _claim_of(self, rows: list[Any]) -> Claim:
        return Claim(rows[0][0], tuple(_message(*row) for row in rows), self)

    def ack(self, claim_id: int, seqs: Iterable[int] | None = None, *, result: Any = None) -> int:
        """Acknowledge a claim: its messages are done.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.ack(claim.claim_id, [1])
            1
            >>> queue.ack(claim.claim_id)
            1

        Args:
            claim_id: the claim's number.
            seqs: only these messages of the claim; numbers that it does not hold are ignored.
            result: a result for the history, where the consumer has the setting `keep_history`: a
                value that JSON can hold.

        Returns:
            how many messages were acknowledged. 0, and a warning in the log, for a claim that was
            settled before or that another worker has taken over.

        Raises:
            PgQueueError: PQ007 a transaction that is not read committed; an argument of the wrong
                type.
        """
        return self._call("ack", claim_id=claim_id, seqs=seqs, result=result)

    def ack_message(self, message: Message, *, result: Any = None) -> None:
        """Acknowledge a message in the transaction in which its handler writes: exactly once.

        For a handler of a worker that writes by a connection of its own, such as a session of an
        ORM. Create the client on that connection, and call this last: the commit ends the delivery,
        and after a rollback the message is redelivered. The worker then does not acknowledge it.

            >>> def bill(message):
            ...     with psycopg.connect(url) as connection:
            ...         connection.execute("insert into bills values (%s, 12)", [message.seq])
            ...         Client(connection).ack_message(message)
            >>> spark_pgqueue.Consumer(url, "orders", "billing").run(bill, wait=timedelta(0))
            2

        Args:
            message: the message that the handler was called with.
            result: as in `ack`.

        Raises:
            PgQueueError: the claim does not hold the message any more: another worker took it over,
                or it was cancelled. Let the transaction roll back. Or as `ack`.
        """
        arguments.check("message", message, Message, "a Message")
        seqs = [message.seq]
        if message.claim_id is None or not self.ack(message.claim_id, seqs, result=result):
            raise PgQueueError(
                f"claim {message.claim_id} does not hold message {message.seq}",
                hint="roll back: another worker took it over, or it was settled or cancelled",
            )
        object.__setattr__(message, "_is_acked", True)  # the worker does not settle it

    def nack(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
        backoff: bool = False,
    ) -> int:
        """Return a claim: its messages are delivered again.

        With ordering, later messages of the same keys in the claim are returned, too, and do not
        count as failed. A message that was delivered max_deliver_count times is dead-lettered
        instead, if it is given in `seqs` or is the only message of its claim. When a whole claim of
        several messages fails for the second time, they are delivered in smaller claims, until the
        failing message is isolated.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.nack(claim.claim_id, [2], delay=timedelta(minutes=1), reason="no answer")
            1

        Args:
            claim_id: the claim's number.
            seqs: only these messages of the claim; numbers that it does not hold are ignored.
            delay: the time until the next delivery; None for the consumer's backoff.
            reason: stored as the last error of the messages.
            backoff: without a delay, where the consumer's backoff is constant without a base, it is
                exponential, from 1 s.

        Returns:
            how many messages left the claim; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 a delay below 0, and as `ack`.
        """
        return self._call(
            "nack", claim_id=claim_id, seqs=seqs, delay=delay, reason=reason, backoff=backoff
        )

    def defer(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta = timedelta(),
        state: Any = None,
    ) -> int:
        """Deliver the messages of a claim later. This counts neither as a failure nor a delivery.

        With ordering, later messages of the same keys in the claim are returned, too, and wait.

            >>> claim = queue.receive("orders", "billing")
            >>> queue.defer(claim.claim_id, delay=timedelta(0), state={"step": 2})
            1
            >>> queue.receive("orders", "billing").messages[0].saved
            {'step': 2}

        Args:
            claim_id: the claim's number.
            seqs: only these messages of the claim; numbers that it does not hold are ignored.
            delay: the time until the next delivery.
            state: a value that JSON can hold, which later deliveries have as `Message.saved`. None
                keeps the previously saved state.

        Returns:
            how many messages left the claim; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 a delay below 0, and as `ack`.
        """
        return self._call("defer", claim_id=claim_id, seqs=seqs, delay=delay, state=state)

    def extend(self, claim_id: int, by: timedelta | None = None) -> int:
        """Extend the lease of a claim.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.extend(claim.claim_id, timedelta(minutes=5))
            2

        Args:
            claim_id: the claim's number.
            by: at least this time from now on; None for the claim's visibility timeout.

        Returns:
            how many messages the claim holds; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 not longer than 0, and as `ack`.
        """
        return self._call("extend", claim_id=claim_id, by=by)

    def dead_letter(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        reason: str | None = None,
        details: Any = None,
    ) -> int:
        """Dead-letter the messages of a claim: they are kept, and not delivered again.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.dead_letter(claim.claim_id, [1], reason="no such customer")
            1

        Args:
            claim_id: the claim's number.
            seqs: only these messages of the claim; numbers that it does not hold are ignored.
            reason: a short reason.
            details: further details: a value that JSON can hold.

        Returns:
            how many messages were dead-lettered; 0 as in `ack`.

        Raises:
            PgQueueError: as `ack`.
        """
        return self._call(
            "dead_letter", claim_id=claim_id, seqs=seqs, reason=reason, details=details
        )


def _message(
    claim_id: int,
    seq: int,
    key: str | None,
    text: str | None,
    binary: bytes,
    headers: str | None,
    priority: int,
    deliver_count: int,
    inserted_at: datetime,
    saved: str | None,
) -> Message:
    """A message. Unreadable headers become its `error`; the claim has no error."""
    data = binary if text is None else text
    found, why = headers_of(headers)
    state, why_not = (None, None) if saved is None else json_of("saved state", saved)
    others = priority, deliver_count, inserted_at
    said = why or why_not
    return Message(seq, key, data, found, *others, said, saved=state, claim_id=claim_id)
