"""Messages one at a time, claimed many at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from spark_pgqueue.client.results import Claim, Message

if TYPE_CHECKING:
    from spark_pgqueue.client.calls.claiming import ClaimCalls


def consume(
    client: ClaimCalls,
    stream: str,
    consumer: str,
    prefetch: int,
    visibility_timeout: timedelta,
    wait: timedelta | None,
) -> Iterator[Message]:
    """See `Client.consume`. `visibility_timeout` is that of the claims."""
    claim: Claim | None = None
    while True:
        claim = client.receive(
            stream,
            consumer,
            prefetch,
            visibility_timeout=visibility_timeout,
            ack=claim,
            wait=wait,
        )
        if claim is None:
            return
        if not (yield from _each(claim, visibility_timeout.total_seconds() / 3)):
            claim = None


def _each(claim: Claim, renew_after: float) -> Iterator[Message]:
    """Yield the messages of a claim, and keep it; returns whether it is still this worker's."""
    renewed = time.monotonic()
    for done, message in enumerate(claim.messages):
        if time.monotonic() - renewed > renew_after:
            if not claim.extend():
                return False
            renewed = time.monotonic()
        try:
            yield message
        except GeneratorExit:
            claim.ack(claim.messages[:done])
            claim.nack()
            raise
    return True
