"""A claim that a worker has in hand: what became of its messages, and settling that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from spark_pgqueue.client.results import Claim, Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import is_passing
from spark_pgqueue.printable import warn
from spark_pgqueue.worker.verdicts import Defer, Fate, Outcome, Reject, Result, Retry, Verdict

if TYPE_CHECKING:
    from spark_pgqueue.client.client import Client

Messages = Sequence[Message]

# Messages with results of their own, in one statement.
_ACK = (
    "select count(pgqueue.ack(%s::bigint, seqs::bigint[], result::jsonb))"
    " from rows from (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[]))"
    " u (seqs, result)"
)


class Held:
    """A claim, until all of its messages are settled.

    Args:
        claim: the claim.
        claimed_at: by the monotonic clock.
        is_batch: whether all of it is one call of the handler.
        is_undone: whether a call that raises has done nothing, as its transaction is undone.
        keeps_results: whether the consumer keeps what handlers return.

    Attributes:
        claim_id: its number.
        claimed_at: as given.
        until: by the monotonic clock, until when its messages are surely this worker's.
        extend_at: when to hold it longer.
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
        self._messages = claim.messages
        self._is_batch = is_batch
        self._is_undone = is_undone
        self._keeps_results = keeps_results
        self._open = {message.seq for message in claim.messages}  # of which nothing is known
        self._done: list[int] = []
        self._results: dict[str, list[int]] = {}  # as JSON
        self._unstarted: list[int] = []
        self._verdicts: list[tuple[list[int], Verdict]] = []

    @property
    def open_count(self) -> int:
        """Messages of which nothing is known yet."""
        return len(self._open)

    @property
    def has_news(self) -> bool:
        """Whether there is something to settle."""
        return bool(self._done or self._results or self._unstarted or self._verdicts)

    @property
    def is_over(self) -> bool:
        """Whether all of it is settled."""
        return not (self._open or self.has_news)

    @property
    def is_done(self) -> bool:
        """Whether all that is left of it is to be acknowledged, as a whole."""
        return bool(self._done) and not (
            self._open or self._results or self._unstarted or self._verdicts
        )

    @property
    def has_returns(self) -> bool:
        """Whether something of it is to be delivered again."""
        return bool(self._unstarted or self._verdicts)

    def hold(self, now: float, timeout: float) -> None:
        """Note that it is this worker's for so many seconds."""
        self.until = now + timeout
        self.extend_at = now + timeout / 3

    def calls(self, ordering: str) -> list[list[Messages]]:
        """Its messages as calls of the handler: those of a list are made one after the other.

        Args:
            ordering: the consumer's.
        """
        if self._is_batch:
            return [[self._messages]]
        if ordering == "none":
            return [[(message,)] for message in self._messages]
        if ordering == "stream":
            return [[(message,) for message in self._messages]]
        chains: dict[str | int, list[Messages]] = {}
        for message in self._messages:
            by = message.seq if message.key is None else message.key
            chains.setdefault(by, []).append((message,))
        return list(chains.values())

    def note(self, messages: Iterable[Message], outcome: Outcome) -> int:
        """Note what became of messages; what is known of one already is not changed.

        Returns:
            how many were handled.
        """
        seqs = [message.seq for message in messages if message.seq in self._open]
        self._open.difference_update(seqs)
        if isinstance(outcome, Result) and self._keeps_results:
            self._results.setdefault(outcome.json, []).extend(seqs)
        elif outcome is Fate.done or isinstance(outcome, Result):
            self._done += seqs
        elif outcome is Fate.unstarted:
            self._unstarted += seqs
        elif isinstance(outcome, Verdict):
            named = [seq for seq in seqs if outcome.seqs is None or seq in outcome.seqs]
            others = self._unstarted if self._is_undone else self._done
            others += [seq for seq in seqs if seq not in set(named)]
            if named:
                self._verdicts.append((named, outcome))
        return 0 if outcome in (Fate.unstarted, Fate.gone) else len(seqs)

    def give_up(self) -> None:
        """Note that nobody waits for what is still open: it is given back."""
        self._unstarted += self._open
        self._open.clear()

    def forget(self) -> None:
        """Note that nothing of it is this worker's any more."""
        self.until = 0.0
        self._open.clear()
        self._done, self._results, self._unstarted, self._verdicts = [], {}, [], []

    def settle(self, client: Client) -> None:
        """Settle what is known, in few calls. It is safe to repeat, whatever took effect before.

        Raises:
            PgQueueError: the connection was lost: what was not settled is still known.
        """
        if self._done:
            # First: what fails takes with it what follows of its key and is still in the claim.
            client.ack(self.claim_id, None if self.is_done else self._done)
            self._done = []
        if self._results:
            client._statements.rows(_ACK, [self.claim_id, *self._result_arrays()])
            self._results = {}
        while self._verdicts:
            verdict = self._verdicts[0][1]
            same = [v for v in self._verdicts if v[1].as_group() == verdict.as_group()]
            # Nobody knows which of a batch has failed.
            unnamed = self._is_batch and verdict.seqs is None
            seqs = None if unnamed else [seq for seqs, _ in same for seq in seqs]
            self._pass(client, verdict, seqs)
            self._verdicts = [v for v in self._verdicts if v not in same]
        if self._unstarted:
            client.defer(self.claim_id, self._unstarted)
            self._unstarted = []

    def _result_arrays(self) -> tuple[list[str], list[str]]:
        seqs = ["{" + ",".join(map(str, each)) + "}" for each in self._results.values()]
        return seqs, list(self._results)

    def _pass(self, client: Client, verdict: Verdict, seqs: list[int] | None) -> None:
        """Do with messages what their handler said; what is not possible is a failure of them."""
        try:
            if isinstance(verdict, Reject):
                client.dead_letter(
                    self.claim_id, seqs, reason=verdict.reason, details=verdict.details
                )
            elif isinstance(verdict, Defer):
                client.defer(self.claim_id, seqs, delay=verdict.delay, state=verdict.state)
            elif isinstance(verdict, Retry):
                client.nack(self.claim_id, seqs, delay=verdict.delay, reason=verdict.reason)
        except PgQueueError as error:
            if is_passing(error):
                raise
            warn("claim %s: %s", self.claim_id, error, logger="spark_pgqueue.worker")
            client.nack(self.claim_id, seqs, reason=error.message)
