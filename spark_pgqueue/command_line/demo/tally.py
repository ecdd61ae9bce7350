"""A consumer without Spark that counts flights by airport, in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from spark_pgqueue.client import Client
from spark_pgqueue.command_line.demo.flights import Figures

AT_ONCE = 10_000  # messages of a claim


class Tally:
    """Receives flights, and counts them by the airport that they leave from.

    Args:
        stream: the stream's name.
        consumer: the consumer's name.
    """

    def __init__(self, stream: str, consumer: str):
        self.counts: Counter[str] = Counter()
        self._stream = stream
        self._consumer = consumer

    def work(self, queue: Client, tell: Callable[[int], None] | None = None) -> None:
        """Receive and acknowledge all messages; `tell` is called with the number so far."""
        claim = queue.receive(self._stream, self._consumer, AT_ONCE)
        while claim is not None:
            self.counts.update(json.loads(each.data)["origin"] for each in claim.messages)
            claim = queue.receive(self._stream, self._consumer, AT_ONCE, ack=claim)
            if tell is not None:
                tell(self.counts.total())

    def figures(self, what: str) -> Figures:
        """The figures; `what` names the counted messages."""
        return {
            f"{self._consumer}: of airports": dict(self.counts),
            f"{self._consumer}: {what}": self.counts.total(),
        }
