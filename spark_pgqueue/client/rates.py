"""Rates per second, from two snapshots of the counters. The database keeps no history of them."""

from __future__ import annotations

from typing import NamedTuple

from spark_pgqueue.client.results import Look


class Rates(NamedTuple):
    """Messages per second between two calls of `look`.

    Attributes:
        sent: messages sent to the stream; None where the stream or the consumer is missing in one
            of the snapshots, or was created again between them.
        settled: messages that the consumer acknowledged or dead-lettered.
        empty_in: seconds until the backlog is empty at this rate; None where it does not shrink.
    """

    sent: float | None
    settled: float | None
    empty_in: float | None


def rates(before: Look | None, after: Look) -> dict[tuple[str, str], Rates]:
    """The rates of each consumer in the second snapshot, by stream and name.

    >>> before = queue.look()
    >>> count = queue.receive("orders", "billing", max_messages=100).ack()
    >>> rates(before, queue.look())["orders", "billing"].settled > 0
    True
    """
    seconds = (after.at - before.at).total_seconds() if before else 0.0
    sent = {each.name: each.sent for each in before.streams} if before else {}
    earlier = {(s.stream, s.consumer): s for s in before.consumers} if before else {}
    now_sent = {each.name: each.sent for each in after.streams}
    found = {}
    for each in after.consumers:
        name = (each.stream, each.consumer)
        coming = _rate(sent.get(each.stream), now_sent.get(each.stream), seconds)
        was = earlier.get(name)
        going = _rate(was.settled if was else None, each.settled, seconds)
        # not from the rates: a consumer may get only some of the messages of its stream
        less = (was.backlog - each.backlog) / seconds if was and going is not None else 0.0
        found[name] = Rates(coming, going, each.backlog / less if less > 0 else None)
    return found


def _rate(before: int | None, after: int | None, seconds: float) -> float | None:
    # A counter decreases when the stream or consumer was dropped and created, or restored.
    if before is None or after is None or after < before or seconds <= 0:
        return None
    return (after - before) / seconds
