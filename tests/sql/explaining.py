"""What `explain_message` says of each message, against what the views say of all."""

from __future__ import annotations

import psycopg

from tests.sql.queue import rows

# Of a message that is in none of a consumer's lists.
ELSEWHERE = {
    "unknown", "unpublished", "not for it", "filtered out", "skipped", "trimmed", "done",
    "cancelled", "replaced",
}  # fmt: skip


def check_explanations(conn: psycopg.Connection, at_most: int = 40) -> None:
    """Each of the last messages of each stream, and the number after it, has the right state."""
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
