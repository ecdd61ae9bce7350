"""What a call costs, in the blocks of shared memory that it reads, nested statements included.

Not in time: blocks hold on a busy machine. Each cost is compared with that of the same call on a
small queue.
"""

from __future__ import annotations

import statistics

from tests.sql.queue import Conn, one

# A page or two more per level of a larger index, in each of some fifty probes of a claim.
GROWTH = 1.6


def cost(conn: Conn, query: str, *args: object) -> int:
    """The blocks that a statement reads, written ones not counted twice."""
    plan = one(conn, "explain (analyze, buffers, format json) " + query, *args)
    root = plan[0]["Plan"]
    return root["Shared Hit Blocks"] + root["Shared Read Blocks"]


# The claim says which it is: to look for it in the table takes a second among a million messages.
CLAIM = (
    "select set_config('pgqueue_test.claim', max(claim_id)::text, false)"
    " from pgqueue.claim('s', %s, %s)"
)


def cost_of_claim(conn: Conn, consumer: str, size: int) -> tuple[int, int]:
    """The blocks of a claim, and its id."""
    blocks = cost(conn, CLAIM, consumer, size)
    claim_id = one(conn, "select current_setting('pgqueue_test.claim')")
    assert claim_id, "nothing was claimed"
    return blocks, int(claim_id)


def claim_cost(conn: Conn, consumer: str, size: int = 1, n: int = 9,
               settle: str | None = "ack") -> tuple[float, float]:  # fmt: skip
    """The median blocks of a claim and of settling it."""
    claims, settled = [], []
    for _ in range(n):
        blocks, claim_id = cost_of_claim(conn, consumer, size)
        claims.append(blocks)
        if settle:
            settled.append(cost(conn, f"select pgqueue.{settle}(%s)", claim_id))
    # Without the first ones, which also fill the caches of the session.
    return statistics.median(claims[3:]), statistics.median(settled[3:] or [0])


def assert_flat(what: str, few: tuple[float, float], many: tuple[float, float]) -> None:
    for name, a, b in zip(("claim", "settlement"), few, many, strict=True):
        assert b <= a * GROWTH + 15, f"{what}: a {name} reads {a} blocks, and with many {b}"
