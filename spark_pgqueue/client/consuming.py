"""Messages one at a time, claimed many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from spark_pgqueue.client.messages import Claim, Message
from spark_pgqueue.postgres import clock


def consume(
    receive: Callable[[Claim | None], Claim | None], visibility_timeout: timedelta
) -> Iterator[Message]:
    """Iterate over the messages of claim after claim. See `Client.consume`.

    Args:
        receive: acknowledges the claim that it is given, and makes the next claim; None when there
            are no messages.
        visibility_timeout: of the claims.
    """
    claim: Claim | None = None
    while (claim := receive(claim)) is not None:
        if not (yield from _each(claim, visibility_timeout.total_seconds() / 3)):
            claim = None


def _each(claim: Claim, renew_after: float) -> Iterator[Message]:
    """Yield the messages of a claim, and extend it; returns whether the claim is still this
    worker's.
    """
    renewed = clock.now()
    for done, message in enumerate(claim.messages):
        if clock.now() - renewed > renew_after:
            if not claim.extend():
                return False
            renewed = clock.now()
        try:
            yield message
        except GeneratorExit:
            claim.ack(claim.messages[:done])
            claim.nack()
            raise
    return True
