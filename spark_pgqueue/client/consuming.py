"""Messages one at a time, claimed many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from datetime import timedelta

from spark_pgqueue.client.messages import Claim, Message
from spark_pgqueue.client.unseen import undeliver
from spark_pgqueue.postgres import clock

Look = Callable[[], Claim | None]


class Asked(asyncio.CancelledError):
    """Thrown in when the next message was asked for, and the question was cancelled before this
    iteration got it: the last message is done.
    """


def consume(
    claim: Callable[[Claim | None], Claim | None],
    first: Callable[[Look, Look], Claim | None],
    visibility_timeout: timedelta,
) -> Generator[Message, None, None]:
    """Iterate over the messages of claim after claim. See `Client.consume`.

    Args:
        claim: acknowledges the claim that it is given, and makes the next claim; None when there
            are no messages.
        first: calls its first argument, and then waits: calls its second argument until this
            returns a claim. Returns the claim; None when the wait is over.
        visibility_timeout: of the claims.
    """
    done: Claim | None = None
    while (found := _next(claim, first, done)) is not None:
        is_ours = yield from _each(found, visibility_timeout.total_seconds() / 3)
        done = found if is_ours else None


def _next(
    claim: Callable[[Claim | None], Claim | None],
    first: Callable[[Look, Look], Claim | None],
    done: Claim | None,
) -> Claim | None:
    """Make the next claim; the first look acknowledges `done`, whose handling is over.

    A look that fails takes its acknowledgement back. The claim is then acknowledged alone.
    """
    owed = done

    def look() -> Claim | None:
        nonlocal owed
        found, owed = claim(done), None
        return found

    try:
        return first(look, lambda: claim(None))
    except BaseException:
        if owed is not None:
            undeliver(owed, len(owed.messages), len(owed.messages))
        raise


def _each(claim: Claim, renew_after: float) -> Generator[Message, None, bool]:
    """Yield the messages of a claim, and extend it; returns whether the claim is still this
    worker's.
    """
    renewed = clock.now()
    done = begun = 0
    try:
        for message in claim.messages:
            if clock.now() - renewed > renew_after:
                if not claim.extend():
                    return False
                renewed = clock.now()
            begun += 1
            yield message
            done += 1
    except asyncio.CancelledError as error:  # thrown in by the asynchronous client
        done = begun if isinstance(error, Asked) else done
        undeliver(claim, done, done)
        raise
    except BaseException:
        undeliver(claim, done, begun)
        raise
    return True
