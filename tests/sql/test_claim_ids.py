"""Whoever has a claim's id may settle the claim: nobody guesses one, and a reader's is no key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sql import internals
from tests.sql.internals import rows
from tests.sql.queue import Conn, Reader, consumer, one, send_all, value

pytestmark = pytest.mark.usefixtures("allowed_afterwards")

BITS = range(1, 43)
"""Bits of an id that nobody knows: so the right one is found after 2^41 tries on average. The last
bit says whether the claim is a slot."""

IDS = 64

GIVES_IDS = {
    "claim": "select claim_id from pgqueue.claim('s', 'c', 1)",
    "receive": "select claim_id from pgqueue.receive('s', 'c', 1)",
    "receive_where": "select claim_id from pgqueue.receive_where('s', 'c', '$.data == \"x\"')",
    "lease_partitions": "select lease_id from pgqueue.lease_partitions('s', 'g', 'w')",
}
"""The functions that give an id to its owner."""

TAKES_IDS = {
    "claim": "select claim_id from pgqueue.claim('s', 'other', 1, p_ack => %s)",
    "receive": "select claim_id from pgqueue.receive('s', 'other', 1, p_ack => %s)",
    "receive_where": "select claim_id from pgqueue.receive_where('s', 'other', '$', p_ack => %s)",
    "ack": "select nullif(pgqueue.ack(%s), 0)",
    "nack": "select nullif(pgqueue.nack(%s), 0)",
    "defer": "select nullif(pgqueue.defer(%s), 0)",
    "extend": "select nullif(pgqueue.extend(%s), 0)",
    "dead_letter": "select nullif(pgqueue.dead_letter(%s), 0)",
    "is_suspected": "select nullif(pgqueue.is_suspected(%s), false)",
}
"""The functions that take the id of a claim; each query returns something if its call
did something."""


def test_no_function_is_forgotten_here(conn: Conn) -> None:
    """A call that names a claim is in the list, or is about a reader, and names it by its uuid."""
    found = conn.execute(
        "select distinct p.proname from pg_proc p"
        " cross join lateral unnest(p.proargnames[:p.pronargs]) a (name)"
        " where p.pronamespace = 'pgqueue'::regnamespace and a.name ~ '(claim|ack$)'"
        " and 'p_reader' <> all (p.proargnames)"
    )
    assert {name for (name,) in found} == set(TAKES_IDS)


@pytest.mark.parametrize("function", GIVES_IDS)
def test_nobody_guesses_an_id(conn: Conn, stream: int, function: str) -> None:
    """Also not from ids that were given out just before."""
    consumer(conn)
    send_all(conn, ["x"] * IDS)
    value(conn, "create_group", "s", "g", 1)
    ids = []
    for _ in range(IDS):
        one(conn, "select setval('pgqueue.claim_numbers', 1)")  # what varies is random
        ids.append(one(conn, GIVES_IDS[function]))
        value(conn, "leave_group", "s", "g", "w")
    assert min(ids) > 0
    for bit in BITS:
        assert {id_ >> bit & 1 for id_ in ids} == {0, 1}, f"bit {bit} is always the same"


@pytest.mark.parametrize("function", GIVES_IDS)
def test_the_number_in_an_id_starts_anew(conn: Conn, stream: int, function: str) -> None:
    """The id has 20 bits of it, above the random ones; no id is below 0."""
    consumer(conn)
    send_all(conn, ["x"] * 16)
    value(conn, "create_group", "s", "g", 1)
    one(conn, f"select setval('pgqueue.claim_numbers', {2**20 - 4})")
    ids = []
    for _ in range(8):
        ids.append(one(conn, GIVES_IDS[function]))
        value(conn, "leave_group", "s", "g", "w")
    assert min(ids) > 0
    assert len(set(ids)) == 8


@pytest.mark.parametrize("function", TAKES_IDS)
def test_who_has_a_readers_claim_id_has_nothing(conn: Conn, reader: Reader, function: str) -> None:
    """Its ids rise, so fewer of their bits are random; a reader is known by its uuid."""
    sent = send_all(conn, ["x", "y"])
    consumer(conn, "other", p_start="latest")
    end = reader.ask()

    def stored() -> list[Any]:
        return [*rows(conn, "select * from pgqueue.open_claims"), *internals.runs(conn)]

    before = stored()
    assert one(conn, TAKES_IDS[function], end.claim_id) is None
    assert stored() == before
    assert reader.plan(end) == sent
