"""Whoever has a claim's id may settle the claim: nobody guesses one, and a reader's is no key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spark_pgqueue.postgres import schema
from tests.sql import clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("allowed_afterwards")

BITS = range(1, 43)
"""Bits of an id that nobody knows: so the right one is found after 2^41 tries on average. The last
bit says whether the end of its messages is to be noted."""

IDS = 32

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


@pytest.fixture
def owners(conn: Conn, stream: int) -> None:
    """The consumer c and the group g, with enough messages for an id of each function."""
    consumer(conn)
    send_all(conn, ["x"] * IDS * len(GIVES_IDS))
    value(conn, "create_group", "s", "g", 1)


def given(conn: Conn, function: str) -> int:
    """An id that a function gives."""
    id_ = one(conn, GIVES_IDS[function])
    value(conn, "leave_group", "s", "g", "w")
    return id_


@pytest.mark.promise("operations: ids of claims")
def test_nobody_guesses_an_id(conn: Conn, owners: None, session: Session) -> None:
    """Neither from ids that were given out just before, nor who seeds random().

    Not of this session, nor of another one that has the same seed and the same number.
    """
    sessions = [conn, session()]
    for n, function in enumerate(GIVES_IDS):
        ids = []
        for i in range(n * IDS, (n + 1) * IDS):
            each = sessions[i % 2]
            # what varies of the 20 bits of the number is random
            one(each, f"select setval('pgqueue.claim_numbers', {(i << 20) + 1})")
            one(each, "select setseed(0.5)::text")
            ids.append(given(each, function))
        assert min(ids) > 0
        assert len(set(ids)) == IDS
        for bit in BITS:
            varies = {id_ >> bit & 1 for id_ in ids} == {0, 1}
            assert varies, f"{function}: bit {bit} is always the same"


def test_the_number_in_an_id_starts_anew(conn: Conn, owners: None) -> None:
    """The id has 20 bits of it, above the random ones; no id is below 0."""
    for n, function in enumerate(GIVES_IDS, 1):
        one(conn, f"select setval('pgqueue.claim_numbers', {n * 2**20 - 4})")
        ids = [given(conn, function) for _ in range(8)]
        assert min(ids) > 0, function
        assert len(set(ids)) == 8, function


@pytest.mark.promise("operations: ids of claims")
def test_who_has_a_readers_claim_id_has_nothing(conn: Conn, reader: Reader) -> None:
    """Its ids rise, so fewer of their bits are random; a reader is known by its uuid."""
    sent = send_all(conn, ["x", "y"])
    consumer(conn, "other", p_start="latest")
    end = reader.ask()

    def stored() -> list[Any]:
        return [*rows(conn, "select * from pgqueue.open_claims"), *internals.bundles(conn)]

    before = stored()
    for function, query in TAKES_IDS.items():
        assert one(conn, query, end.claim_id) is None, function
        assert stored() == before, function
    assert reader.plan(end) == sent


def waiting_members(conn: Conn, before: int = 0) -> list[int]:
    """Two free messages, in the order of delivery: one claim of both has two bundles.

    Their numbers have the same bits in the claim's id, as after a million bundles. The second
    message is stored first, so a search by these bits finds the member before the head.

    Args:
        conn: of the test.
        before: how many numbers are used before the first message is stored.
    """
    second = send(conn)
    assert value(conn, "defer", claim_of(receive(conn, 1))) == 1
    internals.pass_numbers(conn, before)
    return [send(conn, p_priority=1), second]


def claim_of_members(conn: Conn) -> tuple[int, list[int]]:
    """A claim of `waiting_members`, and its messages."""
    consumer(conn)
    sent = waiting_members(conn)
    claim = receive(conn, 2)
    assert seqs_of(claim) == sent
    assert len(internals.bundles(conn)) == 2
    assert len(internals.bits_in_ids(conn)) == 1
    return claim_of(claim), sent


@pytest.mark.parametrize("function", ["ack", "extend", "nack", "defer", "dead_letter"])
def test_a_member_may_have_the_bits_of_its_head(conn: Conn, stream: int, function: str) -> None:
    claim_id, sent = claim_of_members(conn)
    assert value(conn, function, claim_id) == 2
    assert internals.held_by(conn, claim_id) == (sent[::-1] if function == "extend" else [])


def test_messages_of_such_a_claim_are_settled_one_by_one(conn: Conn, stream: int) -> None:
    claim_id, sent = claim_of_members(conn)
    assert [value(conn, "ack", claim_id, [seq]) for seq in sent] == [1, 1]
    assert internals.bundles(conn) == []


def test_such_a_claim_expires_whole(conn: Conn, stream: int) -> None:
    claim_id, sent = claim_of_members(conn)
    clock.end_leases(conn)
    assert seqs_of(again := receive(conn, 100)) == sent
    assert value(conn, "ack", claim_id) == 0
    assert value(conn, "ack", claim_of(again)) == 2


def test_such_a_claim_may_be_of_a_reader(conn: Conn, reader: Reader) -> None:
    sent = waiting_members(conn, 1)  # its claim has a number
    end = reader.ask()
    assert len(internals.bits_in_ids(conn)) == 1
    assert reader.plan(end) == sent
    reader.move(end)
    reader.ask()
    assert internals.bundles(conn) == []


def test_an_acknowledgement_leaves_what_has_another_token(conn: Conn, stream: int) -> None:
    claim_id, _ = claim_of_members(conn)
    send(conn)
    other = claim_of(rows := receive(conn, 1))
    internals.name_as_member(conn, other, claim_id)
    assert value(conn, "ack", claim_id) == 2
    assert internals.held_by(conn, other) == seqs_of(rows)
    assert value(conn, "ack", other) == 1


ALLOWED_BITS = {
    "sql/indexes.sql": 1,  # the index for these
    "sql/log/stream_functions.sql": 1,  # as is_bundle()
    "sql/queue/state/consumer_messages.sql": 3,  # claim_id(), is_bundle(), is_head()
}
"""Where the code uses the bits of a bundle's number that are in the ids of claims."""


def test_all_code_finds_a_claim_as_one_function_does() -> None:
    """A search by bits and token that is not is_head() would find members too."""
    folder = Path(__file__).parents[2]
    found = {}
    for file in folder.glob("sql/**/*.sql"):
        code = [line.split("--")[0] for line in file.read_text().splitlines()]
        uses = sum("& 1048575" in line for line in code)
        if uses and file.parent.name != "migrations":
            found[str(file.relative_to(folder))] = uses
    assert found == ALLOWED_BITS


def test_a_readers_ids_differ_after_a_crash_that_gave_numbers_back(
    conn: Conn, reader: Reader
) -> None:
    given = set()
    for _ in range(8):
        one(conn, "select setval('pgqueue.claim_numbers', 1)")
        one(conn, "select setseed(0.5)::text")
        given.add(one(conn, "select _pgqueue.new_reader_claim_id()"))
    assert len(given) == 8
    assert all(id_ % 2 == 0 and id_ >> 24 == 2 for id_ in given)


def test_without_the_secret_ids_are_as_good(conn: Conn, stream: int) -> None:
    """A dump of the schema alone has no secret; the next installation makes one."""
    secret = one(conn, "select last_value from pgqueue.claim_secret")
    conn.execute("alter sequence pgqueue.claim_secret restart")  # as pg_dump --schema-only
    assert one(conn, "select pg_sequence_last_value('pgqueue.claim_secret')") is None
    consumer(conn)
    send_all(conn, ["x"] * 8)
    ids = [one(conn, "select claim_id from pgqueue.claim('s', 'c', 1)") for _ in range(8)]
    assert len({id_ & 2**43 - 1 for id_ in ids}) == 8
    assert [value(conn, "ack", id_) for id_ in ids] == [1] * 8
    schema.install(conn)
    made = one(conn, "select last_value from pgqueue.claim_secret")
    assert made not in (1, secret)
    schema.install(conn)
    assert one(conn, "select last_value from pgqueue.claim_secret") == made


ALLOWED_RANDOM = {
    "sql/queue/send/key_capacity.sql": 1,  # where maintain() begins
    "sql/queue/settle/failures.sql": 1,  # jitter
    "sql/operate/maintain.sql": 3,  # the order of streams, and when to begin again
    "sql/table_sink/table_sink.sql": 1,  # the order of abandoned writes
    "spark_pgqueue/postgres/retrying.py": 1,  # jitter
    "spark_pgqueue/spark/executor/stale_plan.py": 1,  # when to tidy up
}
"""Where a number that the caller can seed does: nothing is known by it, and nobody has a right."""


def test_nothing_is_known_by_a_number_that_a_caller_can_seed() -> None:
    """No token, id or number of a chunk: those are of the secret, gen_random_uuid or secrets."""
    folder = Path(__file__).parents[2]
    found = {}
    for file in [*folder.glob("sql/**/*.sql"), *folder.glob("spark_pgqueue/**/*.py")]:
        comment = "--" if file.suffix == ".sql" else "#"
        code = [line.split(comment)[0] for line in file.read_text().splitlines()]
        uses = len(re.findall(r"\brandom(?:\.\w+)?\(|\brandom_normal\(", "\n".join(code)))
        if uses:
            found[str(file.relative_to(folder))] = uses
    assert found == ALLOWED_RANDOM
