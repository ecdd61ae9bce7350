"""Messages one at a time, claimed many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from spark_pgqueue.client.messages import Claim, Message
from spark_pgqueue.postgres import clock
from spark_pgqueue.printable import warn

Look = Callable[[], Claim | None]


def consume(
    claim: Callable[[Claim | None], Claim | None],
    first: Callable[[Look, Look], Claim | None],
    visibility_timeout: timedelta,
) -> Iterator[Message]:
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
            _acknowledge(owed, len(owed.messages))
        raise


def _each(claim: Claim, renew_after: float) -> Iterator[Message]:
    """Yield the messages of a claim, and extend it; returns whether the claim is still this
    worker's.
    """
    renewed = clock.now()
    for done, message in enumerate(claim.messages):
        if clock.now() - renewed > renew_after:
            try:
                if not claim.extend():
                    return False
            except BaseException:
                _acknowledge(claim, done)
                raise
            renewed = clock.now()
        try:
            yield message
        except GeneratorExit:
            claim.ack(claim.messages[:done])
            claim.nack()
            raise
    return True


def _acknowledge(claim: Claim, count: int) -> None:
    """Acknowledge the first messages of a claim, beside an error that the caller raises."""
    try:
        claim.ack(claim.messages[:count] if count < len(claim.messages) else None)
    except Exception as error:
        warn("%s messages that were handled come again: %s", count, error)
