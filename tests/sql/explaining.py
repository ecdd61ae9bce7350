"""What `explain_message` and `scan` say, against what the view `message_states` says."""

from __future__ import annotations

import psycopg

from tests.sql.queue import rows

# Of a message that is in none of a consumer's lists.
ELSEWHERE = {
    "unknown", "unpublished", "not for it", "filtered out", "skipped", "trimmed", "done",
    "cancelled", "replaced",
}  # fmt: skip


def check_explanations(conn: psycopg.Connection, at_most: int = 40) -> None:
    """Each of the last messages of each stream, and the number after it, has the right state.

    Only what is claimed has a claim and a lease.
    """
    found = rows(
        conn,
        "select s.stream, c.consumer, g.seq, v.state as seen, e.state, e.because"
        " from pgqueue.stream_stats s join pgqueue.consumer_settings c using (stream)"
        " cross join lateral generate_series(greatest(1, s.last_seq - %s), s.last_seq + 1) g (seq)"
        " left join pgqueue.message_states v on (v.stream, v.consumer, v.seq) ="
        " (s.stream, c.consumer, g.seq)"
        " cross join lateral pgqueue.explain_message(s.stream, c.consumer, g.seq) e",
        at_most,
    )
    for row in found:
        assert row.because, f"no reason: {row}"
        if row.seen is None:
            assert row.state in ELSEWHERE, f"{row}"
        else:
            assert row.state == row.seen, f"{row}"
    wrong = rows(
        conn,
        "with pending as ("
        " select c.stream, c.consumer, q.seq, p.state, p.owner, p.lease_until"
        " from pgqueue.stream_stats s join pgqueue.consumer_settings c using (stream)"
        " cross join lateral pgqueue.scan(c.stream, 'pending', c.consumer,"
        "  '{state, owner, lease_until}') p (lo bigint, hi bigint, state text, owner text,"
        "  lease_until timestamptz)"
        " cross join lateral generate_series(greatest(p.lo, s.last_seq - %s), p.hi - 1) q (seq)"
        ") select stream, consumer, seq, v.state, p.state as pending, p.owner, p.lease_until,"
        " v.claim_id, v.lease_until as seen_until from pending p"
        " full join (select v.* from pgqueue.message_states v join pgqueue.stream_stats s"
        "  using (stream) where v.state <> 'dead' and v.seq >= s.last_seq - %s) v"
        " using (stream, consumer, seq)"
        " where (p.state is null) <> (v.state is null) or (p.state = 'new') <> (v.state = 'new')"
        " or (v.state = 'claimed') <> (v.claim_id is not null)"
        " or (v.state = 'claimed') <> (v.lease_until is not null)"
        " or (p.state = 'claimed') <> (p.lease_until is not null)"
        " or (p.owner is not null and p.state <> 'claimed')",
        at_most, at_most,
    )  # fmt: skip
    assert not wrong, "new or claimed for one of the two: " + str(wrong)
