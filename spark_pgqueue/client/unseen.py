"""Undoes a call whose caller was interrupted before it received the result."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from spark_pgqueue.client.messages import Claim
from spark_pgqueue.printable import warn


def give_back(call: Future[Any] | asyncio.Future[Any]) -> None:
    """Undo a finished call: return the messages of its claim, or roll back its transaction."""
    found = None if call.cancelled() or call.exception() is not None else call.result()
    if isinstance(found, Claim):
        undeliver(found)
    elif isinstance(found, AbstractContextManager):
        found.__exit__(asyncio.CancelledError, asyncio.CancelledError(), None)


def undeliver(claim: Claim, done: int = 0, begun: int = 0) -> None:
    """Settle a claim that its owner abandons. Errors are logged, as the caller raises another.

    Messages that were not handed out are returned as by `defer`, which counts neither as a delivery
    nor as a failure.

    Args:
        claim: the claim.
        done: how many messages, from the first, are done.
        begun: how many messages were handed out; those not done are returned as by `nack`.
    """
    messages = claim.messages
    try:
        if done:
            claim.ack(messages[:done] if done < len(messages) else None)
        if begun < len(messages):
            claim.defer(messages[begun:] if begun else None)
        if done < begun:
            claim.nack(messages[done:begun])
    except Exception as error:
        warn("could not return claim %s: %s", claim.claim_id, error)
