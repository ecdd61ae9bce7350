"""What settings cost who does not have them: nothing.

No function is called for them, no table asked, no row written. That holds on a busy machine; what
it takes is measured by `make bench ARGS=settings`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.sql import internals
from tests.sql.queue import NEEDS, SETTINGS, Conn, call, consumer, send, value

FUNCTIONS = """
select replace(schemaname, 'pgqueue', '') || funcname, calls
from pg_stat_xact_user_functions where schemaname in ('pgqueue', '_pgqueue')
"""
TABLES = """
select relname || ' ' || what, n
from pg_stat_xact_user_tables
cross join lateral (values ('scans', seq_scan + idx_scan),
                           ('writes', n_tup_ins + n_tup_upd + n_tup_del)) v (what, n)
where schemaname = 'pgqueue' and n > 0
"""

# Internal functions have an underscore here.
# A claim of what is ready, its payloads, and the acknowledgement: a bundle is asked for, changed,
# and deleted.
READY = {
    "receive": 1, "_claim": 1, "_payloads": 1, "_payloads_1": 1, "ack": 1,
    "_claim_free": 1, "consumers scans": 1, "consumer_cursors scans": 1, "messages_1 scans": 1,
    "consumer_messages scans": 2, "consumer_messages writes": 2,
}  # fmt: skip
# A claim of the only message, which was just published: taken and claimed at once, ahead of the
# cursor.
NEW = {
    "receive": 1, "_claim": 1, "_claim_free": 1, "_claim_when_idle": 1,
    "_has_free": 1, "_last_publication_id": 1, "_next_ahead": 1,
    "_claim_new_ahead": 1, "_take_ahead": 1,
    "_payload": 1, "_payload_1": 1, "ack": 1,
    "consumers scans": 2, "messages_1 scans": 1, "publications scans": 1,
    "consumer_cursors scans": 2, "taken_ahead scans": 2, "taken_ahead writes": 1,
    "consumer_messages scans": 1, "consumer_messages writes": 2,
}  # fmt: skip

ALL = {name: NEEDS.get(name, {}) | {name: each} for name, each in SETTINGS["consumer"].items()}
"""For each setting a consumer that has it, with what it needs."""


def counts(conn: Conn) -> dict[str, int]:
    """How often this session has called each function, asked each table, and written to it."""
    rows = conn.execute(f"{FUNCTIONS} union all {TABLES}".encode())
    # how large limits are is asked when a statement is planned
    return {name: int(n) for name, n in rows if not name.startswith("_limit")}


def work(conn: Conn, name: str, size: int, before: Callable[[], Any]) -> dict[str, int]:
    """What a claim that is received and acknowledged does; the least of several.

    Now and then one has more to do: the first takes what is new, others store how far they came.
    """
    found = []
    for _ in range(8):
        before()
        with conn.transaction():
            conn.execute("set local track_functions = 'all'")
            then = counts(conn)
            (row, *_) = call(conn, "receive", "s", name, size)
            assert value(conn, "ack", row.claim_id) == size
            found.append({k: n - then.get(k, 0) for k, n in counts(conn).items()})
    return {k: n for k, n in min(found, key=lambda each: sum(each.values())).items() if n}


@pytest.fixture
def others(request: pytest.FixtureRequest, conn: Conn, stream: int) -> None:
    """Consumers of the same stream that have every setting, if the test is given any."""
    if request.param:
        for name, settings in ALL.items():
            consumer(conn, name, p_settings=Jsonb(settings))


@pytest.mark.parametrize("others", [False, True], indirect=True, ids=["alone", "beside"])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_claim_of_what_is_ready(conn: Conn, others: None, ordering: str) -> None:
    consumer(conn, "c", ordering, visibility_timeout=timedelta(days=1))
    internals.publish_together(conn, 1, 1000, "'k' || i")
    also = {"publications scans": 1} if ordering == "none" else {}
    assert work(conn, "c", 10, lambda: None) == READY | also


@pytest.mark.parametrize("others", [False, True], indirect=True, ids=["alone", "beside"])
def test_a_claim_of_what_is_new(conn: Conn, others: None) -> None:
    consumer(conn, "c", visibility_timeout=timedelta(days=1))
    assert work(conn, "c", 1, lambda: send(conn)) == NEW
