"""Iterates over single messages, which are claimed in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from datetime import timedelta

from spark_pgqueue.client.messages import Claim, Message
from spark_pgqueue.client.unseen import undeliver
from spark_pgqueue.postgres import clock
from spark_pgqueue.postgres.forks import Origin

Look = Callable[[], Claim | None]


class Asked(asyncio.CancelledError):
    """Thrown into the iteration when the request for the next message was cancelled before it
    reached the iteration. The previous message is done.
    """


class _Mine:
    """The current claim of an iteration.

    Attributes:
        claim: the claim, or None.
        done: how many of its messages, from the first, are done.
        begun: how many of them the iteration has yielded.
        origin: the process of the iteration.
    """

    def __init__(self) -> None:
        self.claim: Claim | None = None
        self.done = self.begun = 0
        self.origin = Origin()

    def got(self, claim: Claim | None) -> Claim | None:
        """Record the next claim. The call that made it acknowledged the previous claim."""
        self.done = self.begun = 0
        self.claim = claim
        return claim

    def leave(self) -> None:
        """Settle the claim: the iteration is over."""
        if self.claim is not None and self.origin.is_here:
            undeliver(self.claim, self.done, self.begun)


def consume(
    claim: Callable[[Claim | None], Claim | None],
    first: Callable[[Look, Look], Claim | None],
    visibility_timeout: timedelta,
) -> Generator[Message, None, None]:
    """Iterate over the messages of claim after claim. See `Client.consume`.

    Args:
        claim: acknowledges the given claim and makes the next one; None without messages. If the
            caller does not receive the claim, its messages are returned.
        first: calls its first argument, then its second argument repeatedly, until one of them
            returns a claim. Returns the claim; None after a timeout.
        visibility_timeout: the visibility timeout of the claims.
    """
    mine = _Mine()
    renew_after = visibility_timeout.total_seconds() / 3
    try:
        # A failed call rolls back its acknowledgement, so only the first call acknowledges.
        while first(lambda: mine.got(claim(mine.claim)), lambda: mine.got(claim(None))) is not None:
            yield from _each(mine, renew_after)
    except asyncio.CancelledError as error:  # thrown in by the asynchronous client
        if isinstance(error, Asked):
            mine.done = mine.begun
        mine.begun = mine.done
        mine.leave()
        raise
    except BaseException:
        mine.leave()
        raise


def _each(mine: _Mine, renew_after: float) -> Generator[Message, None, None]:
    """Yield the messages of a claim, and extend it."""
    claim, renewed = mine.claim, clock.now()
    assert claim is not None
    for message in claim.messages:
        mine.origin.check("the iteration", "iterate with a client that the child makes")
        if clock.now() - renewed > renew_after:
            if not claim.extend():
                mine.got(None)
                return
            renewed = clock.now()
        mine.begun += 1
        yield message
        mine.done += 1
