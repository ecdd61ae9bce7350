"""Faults that the explorer has to find: each takes away what one rule of the queue rests on.

They are faults of this core: another one has others.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from tests.explore.cases import Case


@dataclass(frozen=True)
class Mutant:
    """A fault in a function, and the case that shows it."""

    name: str
    function: str
    old: str
    new: str
    case: Case

    def plant(self, conn: psycopg.Connection) -> None:
        """Put the fault into a database, before its functions get their pauses."""
        found = conn.execute(
            "select pg_get_functiondef(oid) from pg_proc where oid::regproc::text = %s"
            " and prosrc like %s",
            [self.function, f"%{self.old}%"],
        ).fetchall()
        assert len(found) == 1, f"{self.name}: {len(found)} functions"
        conn.execute(found[0][0].replace(self.old, self.new).encode())


MUTANTS = [
    Mutant(
        "claim: two claimers may take at once",
        "_pgqueue.lock_consumer_soon",
        "if _pgqueue.try_lock_consumer",
        "if true or _pgqueue.try_lock_consumer",
        Case(("receive", "receive")),
    ),
    Mutant(
        "ack: it does not lock its claim",
        "_pgqueue.lock_bundles",
        "for update skip locked",
        "",
        Case(("ack_one", "receive"), ordering="stream", beside="expiry", limited=True),
    ),
    Mutant(
        "move_long_claims: a claim that is being settled is moved too",
        "_pgqueue.move_long_claims",
        "for update skip locked",
        "",
        Case(("ack_one", "receive"), ordering="stream", beside="expiry", limited=True),
    ),
    Mutant(
        "claims: an open one is claimed again",
        "_pgqueue.lock_ready",
        "and token is null",
        "",
        Case(("receive+receive", "receive_all")),
    ),
    Mutant(
        "keys: nobody asks whether the bundle before is gone",
        "_pgqueue.lock_assigned",
        "predecessor is null or _pgqueue.is_deleted(predecessor)",
        "true",
        Case(("receive", "receive"), ordering="stream"),
    ),
    Mutant(
        "gaps: nobody is known to publish",
        "_pgqueue.publishers",
        "order by virtualtransaction)",
        "order by virtualtransaction) filter (where false)",
        Case(("send", "send+receive_all+receive_all"), warm=True),
    ),
    Mutant(
        "keys: a return of messages does not lock the consumer",
        "_pgqueue.lock_claim",
        "perform _pgqueue.lock_consumer_and(p_claim_id, v_id) where v_id is not null",
        "null",
        Case(("nack", "receive"), ordering="stream", limited=True),
    ),
]
