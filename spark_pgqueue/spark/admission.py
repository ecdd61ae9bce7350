"""How much a micro-batch takes, and when: rules that both sources share."""

from __future__ import annotations

MAX_TRIGGER_DELAY = 15 * 60.0
"""Seconds to wait for minMessagesPerTrigger, unless maxTriggerDelay says otherwise; as Kafka's."""


def wait_for_more(have: int, at_least: int | None, waited: float, at_most: float | None) -> float:
    """Whether a micro-batch waits for more messages, and how long.

    Args:
        have: messages that there are.
        at_least: minMessagesPerTrigger; None: any will do.
        waited: seconds since the last micro-batch.
        at_most: maxTriggerDelay in seconds; None for the default.

    Returns:
        seconds to wait for more, at most; 0: take what there is.
    """
    if at_least is None or have >= at_least:
        return 0.0
    return max(0.0, (MAX_TRIGGER_DELAY if at_most is None else at_most) - waited)


def shares(available: list[int], limit: int) -> list[int]:
    """How many messages of each stream a micro-batch takes: as evenly as can be.

    Args:
        available: how many each has.
        limit: for all of them.

    Returns:
        as many for each, and more only for those that have more than others take.
    """
    taken = [0] * len(available)
    left = limit
    # Those with the fewest first: what they do not need is there for the others.
    order = sorted(range(len(available)), key=lambda index: available[index])
    for done, index in enumerate(order):
        taken[index] = min(available[index], -(-left // (len(order) - done)))
        left -= taken[index]
    return taken
