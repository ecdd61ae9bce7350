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
        "_pgqueue.lock_claim",
        "for update skip locked",
        "",
        Case(("ack_one", "receive"), ordering="stream", beside="expiry", limited=True),
    ),
    Mutant(
        "expire: a claim that is being settled is released too",
        "_pgqueue.expire",
        "for update skip locked",
        "",
        Case(("ack_one", "receive"), ordering="stream", beside="expiry", limited=True),
    ),
    Mutant(
        "expire: whether a lease has ended is judged before the claim is locked",
        "_pgqueue.expire",
        """    for v_claim in
        select * from pgqueue.claims
        where consumer_id = p_consumer.consumer_id and live and lease_until >= p_cursor.leases_from
          and lease_until <= p_now
        order by lease_until limit _pgqueue.limit_expired()
""",
        """    perform set_config('explore.ended', array(
        select claim_id from pgqueue.claims
        where consumer_id = p_consumer.consumer_id and live and lease_until <= p_now)::text, true);
    for v_claim in
        select * from pgqueue.claims
        where live and claim_id = any (current_setting('explore.ended')::bigint[])
""",
        Case(("extend", "receive"), ordering="stream", beside="expiry", limited=True),
    ),
    Mutant(
        "claims: an open one is put back, too",
        "_pgqueue.flush",
        "and token is null\n                for update skip locked",
        "for update skip locked",
        Case(("receive", "receive_all")),
    ),
    Mutant(
        "gaps: nobody is known to publish",
        "_pgqueue.publishers",
        "objsubid = 2",
        "objsubid = 2 and false",
        Case(("send", "send+receive_all+receive_all"), warm=True),
    ),
    Mutant(
        "keys: a return of messages does not lock the consumer",
        "_pgqueue.lock_claim",
        "if p_and_consumer then",
        "if false then",
        Case(("nack", "receive"), ordering="stream", limited=True),
    ),
]
