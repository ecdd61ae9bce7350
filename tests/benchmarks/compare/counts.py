"""Every message is received and acknowledged once, or the run fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import psycopg

from tests.benchmarks.compare.sides import Delivery, Side, Store


class CountError(Exception):
    """A side lost a message, delivered one twice, or broke the order of a key."""


@dataclass
class Log:
    """What a worker did.

    Attributes:
        seconds: from its beginning to its end.
        messages: how many it settled in that time; those of before are only in `deliveries`.
        deliveries: when each came, when its acknowledgement began, and its numbers.
    """

    seconds: float = 0.0
    messages: int = 0
    deliveries: list[tuple[float, float, list[int]]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Messages per second."""
        return self.messages / self.seconds if self.messages else 0.0


def acknowledge(side: Store, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> None:
    """Acknowledge a delivery, all of it.

    Raises:
        CountError: some of it was not acknowledged.
    """
    count = side.ack(conn, delivery, consumer)
    if count != len(delivery.numbers):
        raise CountError(f"{side.name}: acknowledged {count} of {len(delivery.numbers)} messages")


def drain(side: Store, conn: psycopg.Connection, consumer: int) -> Log:
    """Receive and acknowledge all that there is."""
    log = Log()
    while (delivery := side.receive_rest(conn, consumer)).numbers:
        acknowledge(side, conn, delivery, consumer)
        log.deliveries.append((0, 0, delivery.numbers))
    return log


def check(
    side: Store,
    conn: psycopg.Connection,
    sent: Iterable[int],
    logs: Iterable[Log],
    consumer: int = 0,
) -> None:
    """Compare what was sent with what was received and acknowledged.

    Raises:
        CountError: they differ.
    """
    left = side.left(conn, consumer)
    given = Counter(n for log in logs for *_, numbers in log.deliveries for n in numbers)
    wanted = set(sent)
    wrong = {
        "lost": sorted(wanted - given.keys()),
        "received twice": sorted(number for number, count in given.items() if count > 1),
        "received and never sent": sorted(given.keys() - wanted),
    }
    said = [f"{len(found)} {what}, as {found[0]}" for what, found in wrong.items() if found]
    if left:
        said.append(f"{left} not acknowledged")
    if said:
        raise CountError(f"{side.name}: of {len(wanted)} messages " + ", ".join(said))


def check_order(side: Side, logs: Iterable[Log], keys: Sequence[str]) -> None:
    """See that a key's messages came in the order sent, each after the one before was settled.

    Args:
        side: who delivered them.
        logs: of the workers.
        keys: by number of message.

    Raises:
        CountError: they did not.
    """
    events = [
        (received, place, settled, number)
        for log in logs
        for received, settled, numbers in log.deliveries
        for place, number in enumerate(numbers)
    ]
    last: dict[str, tuple[float, float, int]] = {}
    for received, _, settled, number in sorted(events):
        before = last.get(keys[number])
        if before is not None:
            is_same = before[0] == received
            if before[2] > number or not (is_same or before[1] <= received):
                raise CountError(
                    f"{side.name}: message {number} of {keys[number]} came while {before[2]} was at"
                    " work, or before it"
                )
        last[keys[number]] = (received, settled, number)
