"""A claim that a worker has in flight: the outcomes of its messages, and settling them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from spark_pgqueue.client.messages import Claim, Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import is_passing
from spark_pgqueue.worker.log import warn
from spark_pgqueue.worker.verdicts import (
    Defer,
    DeliveryState,
    Outcome,
    Reject,
    Result,
    Retry,
    Verdict,
)

if TYPE_CHECKING:
    from spark_pgqueue.client.client import Client

Messages = Sequence[Message]

# One statement acknowledges messages with different results.
_ACK = (
    "select pg_catalog.count(pgqueue.ack(%s::bigint, seqs::bigint[], result::jsonb))"
    " from rows from (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[]))"
    " u (seqs, result)"
)


def _ignore(seqs: list[int]) -> None: ...


class InFlightClaim:
    """A claim, until all of its messages are settled.

    Args:
        claim: the claim.
        claimed_at: the time of the claim, by the monotonic clock.
        is_batch: whether one call of the handler gets the whole claim.
        is_undone: whether a call that raises has no effect, because its transaction is undone.
        keeps_results: whether the consumer keeps the handlers' return values.

    Attributes:
        claim_id: the claim's number.
        claimed_at: as given.
        until: the time, by the monotonic clock, until which no other worker can have the messages.
        extend_at: when to extend the claim.
    """

    def __init__(
        self,
        claim: Claim,
        claimed_at: float,
        *,
        is_batch: bool,
        is_undone: bool,
        keeps_results: bool,
    ):
        self.claim_id: int = claim.claim_id
        self.claimed_at = claimed_at
        self.until: float = 0.0
        self.extend_at: float = 0.0
        self._messages: Messages = claim.messages
        self._is_batch = is_batch
        self._is_undone = is_undone
        self._keeps_results = keeps_results
        self._open = {message.seq for message in claim.messages}  # those without an outcome
        self._is_handled = True  # so far; a claim with other outcomes is settled by numbers
        self._done: list[int] = []
        self._results: dict[str, list[int]] = {}  # as JSON
        self._unstarted: list[int] = []
        self._verdicts: list[tuple[list[int], Verdict]] = []

    @property
    def open_count(self) -> int:
        """The number of messages without an outcome."""
        return len(self._open)

    @property
    def has_news(self) -> bool:
        """Whether there are outcomes to settle."""
        return bool(self._done or self._results or self._unstarted or self._verdicts)

    @property
    def is_over(self) -> bool:
        """Whether all messages are settled."""
        return not (self._open or self.has_news)

    @property
    def is_done(self) -> bool:
        """Whether acknowledging the whole claim settles everything that is left of it.

        Only if each message was handled. The database decides what a verdict does, and a message
        that a handler has acknowledged is in the claim again if its transaction is rolled back.
        """
        return bool(self._done) and self._is_handled and not (self._open or self._results)

    @property
    def has_returns(self) -> bool:
        """Whether some messages are to be delivered again."""
        return bool(self._unstarted or self._verdicts)

    def hold(self, now: float, timeout: float) -> None:
        """Record that this worker holds the claim for `timeout` more seconds."""
        self.until = now + timeout
        self.extend_at = now + timeout / 3

    def calls(self, ordering: str) -> list[list[Messages]]:
        """The messages as calls of the handler; the calls of one list run one after the other.

        Args:
            ordering: the consumer's ordering.
        """
        messages, self._messages = self._messages, ()  # each is freed when it is reported
        if self._is_batch:
            return [[messages]]
        if ordering == "none":
            return [[(message,)] for message in messages]
        if ordering == "stream":
            return [[(message,) for message in messages]]
        chains: dict[str | int, list[Messages]] = {}
        for message in messages:
            by = message.seq if message.key is None else message.key
            chains.setdefault(by, []).append((message,))
        return list(chains.values())

    def note(self, messages: Iterable[Message], outcome: Outcome) -> int:
        """Record the outcome of messages. A message keeps the first outcome that is recorded.

        Returns:
            how many messages are done.
        """
        seqs = [message.seq for message in messages if message.seq in self._open]
        self._open.difference_update(seqs)
        is_handled = outcome is DeliveryState.done or isinstance(outcome, Result)
        self._is_handled = self._is_handled and is_handled
        if isinstance(outcome, Result) and self._keeps_results:
            self._results.setdefault(outcome.json, []).extend(seqs)
        elif is_handled:
            self._done += seqs
        elif outcome is DeliveryState.unstarted:
            self._unstarted += seqs
        elif isinstance(outcome, Verdict):
            # Only a batch has other messages than those of the call.
            named = set(seqs)
            if self._is_batch and outcome.seqs is not None:
                named &= outcome.seqs
            if named:
                self._verdicts.append((sorted(named), outcome))
            others = [seq for seq in seqs if seq not in named]
            if self._is_undone:
                self._unstarted += others
                return 0
            self._done += others
            return len(others)
        return 0 if outcome is DeliveryState.unstarted else len(seqs)

    def give_up(self) -> None:
        """Return the messages without an outcome: the worker no longer waits for their calls."""
        self._is_handled = self._is_handled and not self._open
        self._unstarted += self._open
        self._open.clear()

    def forget(self) -> None:
        """Record that this worker no longer holds the claim."""
        self.until = 0.0
        self._open.clear()
        self._done, self._results, self._unstarted, self._verdicts = [], {}, [], []

    def settle(self, client: Client, failed: Callable[[list[int]], None] = _ignore) -> None:
        """Settle the recorded outcomes, in few calls. It is always safe to repeat.

        Args:
            client: makes the calls.
            failed: called with messages that were returned because they failed, and with those of a
                batch that were rejected.

        Raises:
            PgQueueError: the connection was lost; the outcomes that were not settled stay recorded.
        """
        if self._done:
            # First: a failed message takes the later messages of its key out of the claim.
            client.ack(self.claim_id, None if self.is_done else self._done)
            self._done = []
        if self._results:
            try:
                seqs = ["{" + ",".join(map(str, each)) + "}" for each in self._results.values()]
                client._statements.rows(_ACK, [self.claim_id, seqs, list(self._results)])
            except PgQueueError as error:  # JSON that Postgres cannot hold
                if is_passing(error):
                    raise
                warn("claim %s: the result of the handler was not stored: %s", self.claim_id, error)
                client.ack(self.claim_id, [s for seqs in self._results.values() for s in seqs])
            self._results = {}
        left = len(self._unstarted) + sum(len(seqs) for seqs, _ in self._verdicts)
        while self._verdicts:
            verdict = self._verdicts[0][1]
            same = [v for v in self._verdicts if v[1].as_group() == verdict.as_group()]
            # A batch failed as a whole: the handler did not name the message.
            unnamed = self._is_batch and verdict.seqs is None
            seqs = None if unnamed else [seq for seqs, _ in same for seq in seqs]
            count, has_failed = self._pass(client, verdict, seqs)
            left -= count
            if has_failed:
                failed([seq for seqs, _ in same for seq in seqs])
            self._verdicts = [v for v in self._verdicts if v not in same]
        if self._unstarted:
            # By key, they left the claim with the failed message before them, unless that became a
            # dead letter. If they were the last ones, the claim is over.
            if self._open or left > 0:
                client.defer(self.claim_id, self._unstarted)
            self._unstarted = []

    def _pass(self, client: Client, verdict: Verdict, seqs: list[int] | None) -> tuple[int, bool]:
        """Apply a verdict; if the database refuses it, the messages have failed.

        Returns:
            how many messages left the claim; and whether to log what becomes of each message: its
            call logged that a single one was rejected.
        """
        count = 0
        try:
            if isinstance(verdict, Reject):
                count = client.dead_letter(
                    self.claim_id, seqs, reason=verdict.reason, details=verdict.details
                )
            elif isinstance(verdict, Defer):
                count = client.defer(self.claim_id, seqs, delay=verdict.delay, state=verdict.state)
            elif isinstance(verdict, Retry):
                count = client.nack(
                    self.claim_id, seqs, delay=verdict.delay, reason=verdict.reason, backoff=True
                )
        except PgQueueError as error:
            if is_passing(error):
                raise
            warn("claim %s: %s", self.claim_id, error)
            return client.nack(self.claim_id, seqs, reason=error.message, backoff=True), True
        is_rejected_batch = isinstance(verdict, Reject) and self._is_batch
        return count, isinstance(verdict, Retry) or is_rejected_batch
