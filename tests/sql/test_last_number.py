"""The largest bigint, in the place of a message's number: no message has it."""

from __future__ import annotations

import psycopg
import pytest

from tests.sql.queue import Conn, call, claim_of, consumer, send, value

LAST = 2**63 - 1


@pytest.mark.usefixtures("stream", "allowed_afterwards")
def test_no_message_has_the_last_number(conn: Conn) -> None:
    """Each function that takes numbers of messages is called."""
    found = conn.execute(
        "select proname, p_seqs from pg_proc cross join lateral (select a.type = 'int8[]'::regtype"
        " from unnest(proargnames, proargtypes::oid[]) a (name, type)"
        " where (a.name, a.type) in (('p_seq', 'int8'::regtype), ('p_seqs', 'int8[]'::regtype)))"
        " a (p_seqs) where pronamespace = 'pgqueue'::regnamespace and prokind = 'f' order by 1"
    ).fetchall()
    names = {name for name, _ in found}
    assert names > {"ack", "cancel", "outcome", "read_dead"}
    for ordering in ("none", "key"):
        consumer(conn, ordering, ordering, keep_history="1 day")
    numbers = [send(conn) for _ in range(4)]
    for ordering in ("none", "key"):
        claim = claim_of(call(conn, "receive", "s", ordering, 4))
        for name, several in found:
            of = [claim] if name in ("ack", "nack", "defer", "dead_letter") else ["s", ordering]
            if name == "peek_at":
                of = ["s"]
            refused = None
            try:
                more = {"p_until": "2100-01-01"} if name == "postpone" else {}
                call(conn, name, *of, [LAST] if several else LAST, **more)
            except psycopg.Error as error:
                refused = error.sqlstate
            assert refused in (None, "PQ003"), name
        assert value(conn, "ack", claim, [numbers[0], LAST]) == 1
        assert value(conn, "nack", claim, [numbers[1], LAST]) == 1
        assert value(conn, "ack", claim) == 2
