"""Faults that the model has to find: what a core could do wrong, in terms of the functions alone.

Each is put before a public function, which goes on to be called as NAME_as_it_is. So they are the
same for any core.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

HELD = """
array(select seq from pgqueue.message_states
      where claim_id = p_claim_id and state = 'claimed' and (p_seqs is null or seq = any (p_seqs))
      order by seq)
"""
OWED = """
perform pgqueue.cancel(m.stream, m.consumer, array[m.seq])
from (select * from pgqueue.message_states where state in ('new', 'ready')
      and consumer <> 'group' order by seq limit 1) m;
"""


@dataclass(frozen=True)
class Fault:
    """A fault of a function.

    Attributes:
        name: what goes wrong.
        function: of the schema pgqueue.
        body: in PL/pgSQL, with the function's arguments, and v_seqs for messages.
        ordering: of the consumers that show it.
        what: limited or latest, as the model's consumers are.
    """

    name: str
    function: str
    body: str
    ordering: str = "none"
    what: str = ""

    def plant(self, conn: psycopg.Connection) -> None:
        """Put the fault before the function, in a database."""
        found = conn.execute(
            "select pg_get_function_identity_arguments(oid), pg_get_function_arguments(oid),"
            " pg_get_function_result(oid) from pg_proc"
            " where proname = %s and pronamespace = 'pgqueue'::regnamespace",
            [self.function],
        ).fetchall()
        ((identity, arguments, result),) = found
        kept = f"{self.function}_as_it_is"
        conn.execute(
            f"alter function pgqueue.{self.function}({identity}) rename to {kept}".encode()
        )
        conn.execute(
            f"""create function pgqueue.{self.function}({arguments}) returns {result}
            language plpgsql as $$
            #variable_conflict use_column
            declare v_seqs bigint[]; begin {self.body} end $$""".encode()
        )


FAULTS = (
    Fault("an acknowledgement leaves out a message", "ack", f"""
        v_seqs := {HELD};
        perform pgqueue.ack_as_it_is(p_claim_id, v_seqs[least(2, cardinality(v_seqs)):], p_result);
        return cardinality(v_seqs);
    """),
    Fault("an acknowledgement takes one message more", "ack", f"""
        {OWED} return pgqueue.ack_as_it_is(p_claim_id, p_seqs, p_result);
    """),
    Fault("a claim takes what is claimed", "receive", """
        perform pgqueue.nack(claim_id, p_delay => '0')
        from (select distinct claim_id from pgqueue.message_states
              where stream = p_stream and consumer = p_consumer and state = 'claimed') m;
        return query select * from pgqueue.receive_as_it_is(
            p_stream, p_consumer, p_max, p_visibility_timeout, p_ack);
    """),
    Fault("nobody keeps the order of a key", "create_consumer", """
        return pgqueue.create_consumer_as_it_is(
            p_stream, p_name, p_start, 'none', p_if_not_exists, p_topic, p_where, p_settings);
    """, "key"),
    Fault("nobody keeps a limit of a key", "create_consumer", """
        return pgqueue.create_consumer_as_it_is(
            p_stream, p_name, p_start, p_ordering, p_if_not_exists, p_topic, p_where,
            p_settings - 'per_key_limit');
    """, what="limited"),
    Fault("what is returned is lost", "nack", f"""
        v_seqs := {HELD};
        return pgqueue.ack(p_claim_id, v_seqs[:1])
               + pgqueue.nack_as_it_is(p_claim_id, v_seqs[2:], p_delay, p_reason, p_backoff);
    """),
    Fault("what is returned comes at once", "nack", """
        return pgqueue.nack_as_it_is(p_claim_id, p_seqs, '0', p_reason, p_backoff);
    """),
    Fault("a lease that ended ends the messages", "receive", """
        perform pgqueue.ack(claim_id)
        from (select distinct claim_id from pgqueue.message_states
              where lease_until < clock_timestamp() and state = 'claimed') m;
        return query select * from pgqueue.receive_as_it_is(
            p_stream, p_consumer, p_max, p_visibility_timeout, p_ack);
    """),
    Fault("a retention takes what is owed", "maintain", f"""
        {OWED} return query select * from pgqueue.maintain_as_it_is();
    """),
    Fault("a move to the beginning leaves out a message", "seek", f"""
        declare v_count bigint := pgqueue.seek_as_it_is(p_stream, p_consumer, p_to);
        begin {OWED} return v_count; end;
    """),
)  # fmt: skip
