"""Tables in bulk: what scans say is what the views say, and parts share it out."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker, internals, owing
from tests.sql.internals import rows
from tests.sql.queue import Conn, acked, call, claim_of, consumer, maintain, one, send_all, value
from tests.sql.test_bad_input import content

KEEP = json.dumps({"keep_history": "1 day"})
KINDS = ("dead", "archived", "publications")


def unfolded(scanned: list[Any], *columns: str) -> Counter[tuple]:
    """A row per message: its number, and these columns."""
    return Counter(
        (seq, *(hashable(getattr(each, name)) for name in columns))
        for each in scanned
        for seq in range(each.lo, each.hi)
    )


def told(conn: Conn, query: str, *args: Any) -> Counter[tuple]:
    return Counter(tuple(map(hashable, row)) for row in rows(conn, query, *args))


def hashable(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


@pytest.fixture
def used(conn: Conn, url: str) -> owing.Known:
    """A database in use, with every state in it."""
    known = owing.use(conn, url, internals.insert_messages)
    for name in ("keeper", "moved"):
        value(conn, "create_consumer", "s", name, "earliest", p_settings=KEEP)
    value(conn, "send", "s", "for one", p_consumers=["moved"])
    claim = claim_of(call(conn, "receive", "s", "moved", 5))
    value(conn, "dead_letter", claim, [2])
    value(conn, "ack", claim, [3])
    value(conn, "replay", "s", "moved", "earliest", "latest")  # but for what it has, or gave up
    for size in (1, 2, 30, 2, 2, 2, 2):
        claim = claim_of(call(conn, "receive", "s", "keeper", size))
        value(conn, "ack", claim, p_result=Jsonb({"of": size}))
    value(conn, "replay", "s", "keeper", "earliest", "latest")
    acked(conn, "s", "keeper", 3)
    return known


@pytest.mark.all_versions
def test_pending_is_what_message_states_says(conn: Conn, used: owing.Known) -> None:
    columns = ("state", "priority", "deliver_count", "not_visible_until", "lease_until")
    seen = set()
    for name in (*used.consumers, "keeper", "moved"):
        found = call(conn, "scan_pending", "s", name)
        expected = told(
            conn,
            "select seq, state, priority, deliver_count, not_visible_until, lease_until,"
            " last_error from pgqueue.message_states"
            " where stream = 's' and consumer = %s and state <> 'dead'",
            name,
        )
        assert unfolded(found, *columns, "error") == expected, name
        assert {each.consumer for each in found} <= {name}
        assert [each.lo for each in found] == sorted(each.lo for each in found)
        some = call(conn, "scan_pending", "s", name, "{[5,9),[20,22)}")
        assert unfolded(some) == Counter(
            key for key in unfolded(found) if key[0] in {5, 6, 7, 8, 20, 21}
        )
        seen |= {each.state for each in found}
    assert seen == {"new", "ready", "delayed", "waiting", "claimed"}


def test_claimed_is_what_open_claims_say(conn: Conn, used: owing.Known) -> None:
    found = call(conn, "scan_claimed", "s")
    assert unfolded(found, "consumer", "claim_id", "deliver_count") == told(
        conn,
        "select seq, consumer, claim_id, deliver_count from pgqueue.message_states"
        " where state = 'claimed'",
    )
    assert {(c.claim_id, c.owner, c.claimed_at, c.lease_until) for c in found} == {
        tuple(row)
        for row in rows(
            conn,
            "select claim_id, owner, claimed_at, lease_until from pgqueue.open_claims"
            " where remaining > 0",
        )
    }
    some = call(conn, "scan_claimed", "s", "key")
    assert some == [each for each in found if each.consumer == "key"]
    assert some


def test_messages_are_those_that_are_published(conn: Conn, used: owing.Known) -> None:
    """Not what is staged, or was rolled back; each once, with as little or much as is asked."""
    found = unfolded(call(conn, "scan_messages", "s"), "priority")
    peeked = told(conn, "select seq, priority from pgqueue.peek_at('s', 1, 1000)")
    assert found == peeked
    assert not {seq for seq, _ in found} & set(used.staged[1])
    everything = ["priority", "published_at", "deliver_at", "expires_at", "consumers"]
    more = call(conn, "scan_messages", "s", "{[3,)}", everything)
    assert unfolded(more, "published_at", "deliver_at", "consumers") == told(
        conn, "select seq, published_at, deliver_at, consumers from pgqueue.peek_at('s', 3, 1000)"
    )
    bare = call(conn, "scan_messages", "s", None, [])
    assert len(bare) < len(call(conn, "scan_messages", "s")) < len(more)
    assert {seq for (seq,) in unfolded(bare)} == {seq for seq, _ in found}


@pytest.mark.parametrize(("size", "least"), [(1, 1), (2, 1), (3, 1), (1000, 1), (1000, 7)])
def test_parts_hold_everything_once_and_are_not_too_large(
    conn: Conn, used: owing.Known, size: int, least: int
) -> None:
    whole = {
        "dead": "select seq, consumer from pgqueue.message_states where state = 'dead'",
        "archived": "select lower(g) + i, consumer from pgqueue.message_history, unnest(seqs) g,"
        " generate_series(0, upper(g) - lower(g) - 1) i",
    }
    for table, query in whole.items():
        found: Counter[tuple] = Counter()
        parts = call(conn, "scan_parts", "s", table, None, size, least)
        for part in parts:
            seqs = f"{{[{part.from_seq or ''},{part.to_seq or ''})}}"
            place = (part.consumer, part.from_place, part.to_place, seqs)
            mine = unfolded(call(conn, f"scan_{table}", "s", *place), "consumer")
            assert mine.total() == part.message_count <= size
            found += mine
        assert found == told(conn, query) != Counter()
        assert len(parts) >= min(least, found.total())
        (name,) = {part.consumer for part in parts[:1]}
        assert call(conn, "scan_parts", "s", table, name, size, least)
    ids = [
        row.publication_id
        for part in call(conn, "scan_parts", "s", "publications", None, size, least)
        for row in call(conn, "scan_publications", "s", part.from_place, part.to_place)
    ]
    assert ids == [
        row.publication_id
        for row in rows(
            conn,
            "select publication_id from pgqueue.publications join pgqueue.streams using"
            " (stream_id) where name = 's' order by 1",
        )
    ]


def test_dead_letters_and_history_say_why_whose_and_when(conn: Conn, used: owing.Known) -> None:
    everything = (1, 2**62)
    for name in owing.ORDERINGS:
        scanned = call(conn, "scan_dead", "s", name, *everything)
        assert unfolded(scanned, "reason", "deliver_count", "owner", "died_at", "details") == told(
            conn,
            "select seq, reason, deliver_count, owner, died_at, details::text"
            " from pgqueue.read_dead('s', %s)",
            name,
        )
    scanned = call(conn, "scan_archived", "s", "keeper", *everything)
    assert unfolded(scanned, "result", "owner", "claimed_at", "done_at").total() == one(
        conn,
        "select sum(message_count) from pgqueue.message_history where consumer = 'keeper'",
    )
    results = {each.result for each in scanned}
    assert results == {'{"of": 1}', '{"of": 2}', '{"of": 30}', None}
    assert {each.consumer for each in scanned} == {"keeper"}
    assert max(unfolded(scanned).values()) > 1, "delivered again, and so done again"


def test_publications_say_what_went_to_whom_with_times_that_fit(conn: Conn, stream: int) -> None:
    consumer(conn)
    consumer(conn, "d")
    value(conn, "send", "s", "a", p_consumers=["d"], p_priority=4, p_deliver_at="20000-01-01")
    send_all(conn, ["b", "c"])
    first, second = call(conn, "scan_publications", "s", 1, 1000)
    assert (first.consumers, first.priority, first.message_count) == (["d"], 4, 1)
    assert first.deliver_at.year == 9999
    assert (second.consumers, second.first_seq, second.last_seq) == (None, 2, 3)
    (pending,) = call(conn, "scan_pending", "s", "d", "{[1,1]}")
    assert pending.not_visible_until == first.deliver_at
    (told_,) = call(conn, "scan_messages", "s", "{[1,1]}", ["deliver_at", "consumers"])
    assert (told_.deliver_at, told_.consumers, told_.priority) == (first.deliver_at, ["d"], None)


def test_what_was_trimmed_is_not_there(conn: Conn, stream: int) -> None:
    consumer(conn)
    send_all(conn, ["a"] * 5)
    conn.execute("select pgqueue.set_retention('s', p_messages => 1, p_unread => 'drop')")
    maintain(conn)
    send_all(conn, ["b"] * 5)
    maintain(conn)
    there = {seq for (seq,) in conn.execute(f"select seq from pgqueue.messages_{stream}".encode())}
    assert {seq for (seq,) in unfolded(call(conn, "scan_messages", "s"))} == there
    assert {seq for (seq,) in unfolded(call(conn, "scan_pending", "s", "c"))} == there


def test_looking_changes_nothing_and_may_be_done_read_only(
    conn: Conn, url: str, used: owing.Known
) -> None:
    before = content(conn)
    with connection.connect(url) as looker:
        looker.execute("set default_transaction_read_only = on")
        for name in (*used.consumers, "keeper"):
            assert call(looker, "scan_pending", "s", name)
        assert call(looker, "scan_messages", "s")
        assert call(looker, "scan_claimed", "s")
        for table in KINDS:
            parts = call(looker, "scan_parts", "s", table)
            for part in parts:
                at = (part.consumer,) if part.consumer else ()
                place = (*at, part.from_place, part.to_place)
                assert call(looker, f"scan_{table}", "s", *place)
    assert content(conn) == before
    checker.check(conn)


def test_an_empty_stream_has_nothing(conn: Conn, stream: int) -> None:
    consumer(conn)
    assert call(conn, "scan_messages", "s") == []
    assert call(conn, "scan_pending", "s", "c") == []
    assert call(conn, "scan_claimed", "s") == []
    for table in KINDS:
        assert call(conn, "scan_parts", "s", table, None, 1, 5) == []
