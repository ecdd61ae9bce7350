"""Tables in bulk: shares hold everything once, and are of one size.

That scans say what the views say is for `tests/spark/test_tables.py`.
"""

from collections import Counter
from itertools import pairwise, product

from tests.sql import internals, owing
from tests.sql.internals import rows
from tests.sql.queue import Conn, call, consumer, one, scanned, send_all, value

WHOLE = {
    "dead": "select consumer, seq from pgqueue.message_states where state = 'dead'",
    "archived": "select consumer, lower(g) + i from pgqueue.message_history, unnest(seqs) g,"
    " generate_series(0, upper(g) - lower(g) - 1) i",
    "publications": "select publication_id, part from pgqueue.publications join pgqueue.streams"
    " using (stream_id) where name = 's'",
}


def test_shares_have_everything_once_and_are_of_one_size(conn: Conn, url: str) -> None:
    owing.use_with_history(conn, url)
    for (table, query), count in product(WHOLE.items(), [1, 2, 3, 7, 1000]):
        what = {"publication_id": "bigint"} if table == "publications" else {"consumer": "text"}
        expected = Counter(tuple(row) for row in rows(conn, query))
        found: Counter[tuple] = Counter()
        sizes = []
        total = value(conn, "scan_bounds", "s", table)
        some = min(count, total)
        divided = call(conn, "scan_bounds", "s", table, None, some)
        assert {row.total for row in divided} == {total}
        bounds = [None, *(row.bound for row in divided if row.bound), None]
        for within in pairwise(bounds):
            share = scanned(conn, table, None, *within, **what)
            mine = Counter((row[2], seq) for row in share for seq in range(row.lo, row.hi))
            sizes.append(mine.total())
            found += mine
        assert found == expected != Counter(), table
        assert (total, len(sizes)) == (expected.total(), some)
        assert max(sizes) - min(sizes) <= 1
    for table in ("dead", "archived"):
        (row,) = call(conn, "scan_bounds", "s", table, "keeper")
        some = scanned(conn, table, "keeper", consumer="text")
        assert sum(each.hi - each.lo for each in some) == row.total > 0
        assert {each.consumer for each in some} == {"keeper"}


def test_less_that_is_asked_for_comes_as_fewer_ranges(conn: Conn, url: str) -> None:
    """Also with times beyond those that Python can hold."""
    known = owing.use(conn, url, internals.insert_messages)
    value(conn, "send", "s", "far", p_consumers=["none"], p_deliver_at="20000-01-01")
    bare = scanned(conn, "messages")
    usual = scanned(conn, "messages", priority="int")
    more = scanned(conn, "messages", deliver_at="timestamptz", consumers="text[]", priority="int")
    assert len(bare) < len(usual) < len(more)
    assert [(row.deliver_at.year, row.consumers) for row in more if row.consumers] == [
        (9999, ["none"])
    ]
    for found in (bare, usual, more):
        assert [row.lo for row in found] == sorted(row.lo for row in found)
        assert sum(row.hi - row.lo for row in found) == one(
            conn,
            "select sum(message_count) from pgqueue.publications where stream_id = %s",
            known.stream,
        )


def test_what_was_trimmed_is_not_there(conn: Conn, stream: int) -> None:
    consumer(conn)
    assert scanned(conn, "messages") == scanned(conn, "pending", "c") == []
    assert [tuple(row) for row in call(conn, "scan_bounds", "s", "dead")] == [(0, None)]
    send_all(conn, ["a"] * 5)
    conn.execute("select pgqueue.set_retention('s', p_messages => 1, p_unread => 'drop')")
    call(conn, "maintain")
    send_all(conn, ["b"] * 5)
    call(conn, "maintain")
    there = {row.seq for row in rows(conn, f"select seq from pgqueue.messages_{stream}")}
    for found in (scanned(conn, "messages"), scanned(conn, "pending", "c")):
        assert {seq for row in found for seq in range(row.lo, row.hi)} == there
