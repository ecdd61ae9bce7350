"""Messages claimed by a consumer's workers, and what becomes of a claim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from spark_pgqueue.client import arguments, consuming
from spark_pgqueue.client.calls.base import Calls
from spark_pgqueue.client.reading import headers_of, json_of
from spark_pgqueue.client.results import (
    Claim,
    Message,
)

_COLUMNS = (
    "select claim_id, seq, key, data, data_bytes, headers::text, priority, deliver_count,"
    " inserted_at, saved::text"
)
_RECEIVE = f"{_COLUMNS} from pgqueue.receive(%s::text, %s::text, %s::int, %s::interval, %s::bigint)"
_RECEIVE_WHERE = (
    f"{_COLUMNS} from pgqueue.receive_where(%s::text, %s::text, p_max => %s::int,"
    " p_visibility_timeout => %s::interval, p_ack => %s::bigint,"
    " p_where => pgqueue._jsonpath('p_where', %s::text), p_look => %s::int)"
)


class ClaimCalls(Calls):
    """Messages claimed by a consumer's workers, and what becomes of a claim."""

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
            max_messages: claim at most so many.
            visibility_timeout: after how long other workers may take them over, unless `extend` is
                called; None for the consumer's.
            ack: a claim, or its number, to acknowledge first, whole, in the same transaction and
                round trip; None for none. A warning is logged for one that is not live.
            wait: when there is nothing, wait so long for a message; None for not at all. It ends
                at once with a publication, with a delay or another worker's lease that is over, or
                with the time of a schedule; behind a pooler it looks once a second. Other threads
                that share the client wait too. The connection goes on listening to the stream.
            where: only messages for which this jsonpath finds something, neither false nor null, in
                {key, headers, data}: "$.data.total > 100". The others stay as they are. For
                ordering "none" alone.
            look: with `where`, look at so many messages that are ready, at most.

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
        claim_now = partial(
            self._claim, stream, consumer, max_messages, visibility_timeout, where=where, look=look
        )
        if patience:
            first, again = partial(claim_now, ack), partial(claim_now, None)
            due = partial(self._due, stream, consumer)
            return self._waiting.first(stream, first, again, patience, due=due)
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

        A message is done when the next one is asked for. Those of a claim are acknowledged
        together, in the call that makes the next claim; so after a worker that died, another one
        gets up to `prefetch` messages again which were done. The claim is extended while messages
        of it are left, unless one takes longer than the visibility timeout: then they go to other
        workers, and the iteration goes on with others. Who leaves the loop, by break or by an
        error, returns the message at hand and those behind it, as `nack` does.

            >>> for message in queue.consume("orders", "billing", wait=timedelta(0)):
            ...     print(message.data)
            order 1
            order 2

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

    def _due(self, stream: str, consumer: str) -> float | None:
        return self._value(
            "select extract(epoch from pgqueue.next_due(%s::text, %s::text) - clock_timestamp())"
            "::float8",
            stream,
            consumer,
        )

    def _claim(
        self,
        stream: str,
        consumer: str,
        max_messages: int,
        visibility_timeout: timedelta | None,
        ack: Claim | int | None,
        *,
        where: str | None,
        look: int,
    ) -> Claim | None:
        given = [
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.number("max_messages", max_messages, 1, 2**31 - 1),
            arguments.maybe(arguments.duration, "visibility_timeout", visibility_timeout),
            arguments.maybe(
                arguments.claim_id, "ack", ack.claim_id if isinstance(ack, Claim) else ack
            ),
        ]
        if where is None:
            rows = self._statements.rows(_RECEIVE, given)
        else:
            given += [arguments.text("where", where), arguments.number("look", look)]
            rows = self._statements.rows(_RECEIVE_WHERE, given)
        if not rows:
            return None
        messages = tuple(_message(*row[1:]) for row in rows)
        return Claim(rows[0][0], messages, self)

    def ack(self, claim_id: int, seqs: Iterable[int] | None = None, *, result: Any = None) -> int:
        """Acknowledge a claim: its messages are done.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.ack(claim.claim_id, [1])
            1
            >>> queue.ack(claim.claim_id)
            1

        Args:
            claim_id: the claim's number.
            seqs: those of its messages alone; numbers that it does not hold are passed over.
            result: what to keep of it, where the consumer has the setting `keep_history`: a value
                that JSON can hold.

        Returns:
            how many messages that were. 0, and a warning is logged, for a claim that was settled
            before, or that another worker took over.

        Raises:
            PgQueueError: PQ007 a transaction that is not read committed; an argument of the wrong
                type.
        """
        return self._value(
            "select pgqueue.ack(%s::bigint, %s::bigint[], %s::jsonb)",
            *arguments.target(claim_id, seqs),
            arguments.maybe(arguments.json_text, "result", result),
        )

    def nack(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta | None = None,
        reason: str | None = None,
    ) -> int:
        """Return a claim, to be delivered again.

        With ordering, later messages of the same keys in the claim go back too, not counted as
        failed. A message that was delivered its consumer's max_deliver_count times is
        dead-lettered instead: if it is given, or the only one in its claim. If a whole claim of
        several fails for the second time, they come in smaller claims from then on, until the one
        to blame is alone.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.nack(claim.claim_id, [2], delay=timedelta(minutes=1), reason="no answer")
            1

        Args:
            claim_id: the claim's number.
            seqs: those of its messages alone; numbers that it does not hold are passed over.
            delay: deliver them after this time, not before; None: as the consumer's backoff says.
            reason: kept as their last error.

        Returns:
            how many messages left the claim; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 a delay below 0, and as `ack`.
        """
        return self._value(
            "select pgqueue.nack(%s::bigint, %s::bigint[], %s::interval, %s::text)",
            *arguments.target(claim_id, seqs),
            arguments.maybe(arguments.duration, "delay", delay),
            arguments.maybe(arguments.text, "reason", reason),
        )

    def retry(self, stream: str, consumer: str, seqs: Iterable[int] | None = None) -> int:
        """End the delays of messages that nobody has claimed: after an outage, say.

        They come in large claims again, also those of claims that failed as a whole.

            >>> queue.receive("orders", "billing").nack(delay=timedelta(hours=1))
            1
            >>> queue.retry("orders", "billing")
            1

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: these messages, with ordering also those that wait together with them; None: all
                that were delivered before.

        Returns:
            how many messages that were.
        """
        return self._value(
            "select pgqueue.retry(%s::text, %s::text, %s::bigint[])",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.maybe(arguments.seqs, "seqs", seqs),
        )

    def cancel(self, stream: str, consumer: str, seqs: Iterable[int]) -> int:
        """Take messages from a consumer that has not finished them, wherever it has them.

        What is claimed leaves its claim, whose owner is told by smaller numbers when it extends or
        settles it, and is not stopped. All or nothing. Dead letters are passed over, and what a
        Spark query has in hand.

            >>> queue.cancel("orders", "billing", [1, 2])
            2

        Args:
            stream: the stream's name.
            consumer: the consumer's name.
            seqs: the numbers of the messages.

        Returns:
            how many messages that were.

        Raises:
            PgQueueError: 55P03 a transaction that claims or settles some of them stays open for
                10 s; PQ006 a group.
        """
        return self._value(
            "select pgqueue.cancel(%s::text, %s::text, %s::bigint[])",
            arguments.text("stream", stream),
            arguments.text("consumer", consumer),
            arguments.seqs("seqs", seqs),
        )

    def defer(
        self,
        claim_id: int,
        seqs: Iterable[int] | None = None,
        *,
        delay: timedelta = timedelta(),
        state: Any = None,
    ) -> int:
        """Put a claim off: deliver it later. That is no failure, and counts as no delivery.

        With ordering, later messages of the same keys in the claim go back too, and wait.

            >>> claim = queue.receive("orders", "billing")
            >>> queue.defer(claim.claim_id, delay=timedelta(0), state={"step": 2})
            1
            >>> queue.receive("orders", "billing").messages[0].saved
            {'step': 2}

        Args:
            claim_id: the claim's number.
            seqs: those of its messages alone; numbers that it does not hold are passed over.
            delay: deliver them after this time, not before.
            state: comes back as `Message.saved`, at each delivery from then on: a value that JSON
                can hold; None for what was saved before.

        Returns:
            how many messages left the claim; 0 as in `ack`.

        Raises:
            PgQueueError: PQ003 a delay below 0, and as `ack`.
        """
        return self._value(
            "select pgqueue.defer(%s::bigint, %s::bigint[], %s::interval, %s::jsonb)",
            *arguments.target(claim_id, seqs),
            arguments.duration("delay", delay),
            arguments.maybe(arguments.json_text, "state", state),
        )

    def extend(self, claim_id: int, by: timedelta | None = None) -> int:
        """Hold a claim longer.

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.extend(claim.claim_id, timedelta(minutes=5))
            2

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

            >>> claim = queue.receive("orders", "billing", max_messages=100)
            >>> queue.dead_letter(claim.claim_id, [1], reason="no such customer")
            1

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


def _message(
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
    """A message; what is wrong with its headers is its own `error`, and none of the claim's."""
    data = binary if text is None else text
    found, why = headers_of(headers)
    state, why_not = (None, None) if saved is None else json_of("saved state", saved)
    others = priority, deliver_count, inserted_at
    return Message(seq, key, data, found, *others, error=why or why_not, saved=state)
