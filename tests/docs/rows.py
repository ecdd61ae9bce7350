"""The page that shows the rows of a consumer after each call: `sql/rows.md`.

The table below each block of SQL is what the block leaves in `pgqueue.consumer_messages`.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg.rows import dict_row
from psycopg.types.multirange import Multirange

from spark_pgqueue.postgres import schema

PAGE = schema.sql_directory() / "rows.md"

BLOCK = re.compile(r"(```sql\n(.*?)```\n)(?:\n(?:\|.*\n)+|\nNo rows\.\n)?", re.DOTALL)
LANES = ("assigned", "unassigned", "delayed", "long", "waiting", "unfiltered", "freed")
# No claim gets old, however slow the machine is.
FREEZE = (
    "create or replace function _pgqueue.move_long_claims(p_consumer pgqueue.consumers,"
    " p_hints pgqueue.claim_hints, p_now timestamptz, p_below bigint default null)"
    " returns pgqueue.claim_hints language sql as 'select p_hints'"
)
ROWS = (
    "select m.*, ordering"
    " from pgqueue.consumer_messages m join pgqueue.consumers using (consumer_id) where"
    " consumer_id = (select max(consumer_id) from pgqueue.consumers) order by bundle_no"
)


def page(conn: psycopg.Connection, text: str) -> str:
    """The page, with the rows after each block; they are those of the newest consumer."""
    conn.execute(FREEZE)
    names = conn.execute(
        f"select {', '.join(f'_pgqueue.lane_{each}()' for each in LANES)}".encode()
    )
    lanes = dict(zip(names.fetchone() or (), LANES, strict=True))
    hashes = "select hashtextextended(key, 0), key from unnest(array['a', 'b', 'c']) key"
    keys: dict[int, str] = dict(conn.execute(hashes).fetchall())
    tokens: dict[int, str] = {}

    def cells(row: dict[str, Any]) -> dict[str, str]:
        lane, token, of = row["lane"], row["token"], row["keys"] or [row["key"]]
        has_order = row["ordering"] != "none" or lane > 0
        return {
            "bundle_no": str(row["bundle_no"]),
            "lane": lanes[lane] if has_order else f"priority {-lane}",
            "seqs": numbers(row["seqs"]),
            "deliver_count": str(row["deliver_count"]),
            "keys": ", ".join(sorted(keys[each] for each in of if each is not None)),
            "predecessor": str(row["predecessor"] or ""),
            "token": "" if token is None else tokens.setdefault(token, f"token {len(tokens) + 1}"),
            "members": ", ".join(map(str, row["members"] or [])),
        }

    def after(found: re.Match[str]) -> str:
        conn.execute(found[2].encode())
        rows = [cells(each) for each in conn.cursor(row_factory=dict_row).execute(ROWS)]
        return f"{found[1]}\n{table(rows)}"

    return BLOCK.sub(after, text)


def numbers(seqs: Multirange[int]) -> str:
    """Numbers of messages, as people write them."""
    ends = [(each.lower or 0, (each.upper or 0) - 1) for each in seqs]
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ends)


def table(rows: list[dict[str, str]]) -> str:
    """Rows in Markdown, without the columns that are empty."""
    if not rows:
        return "No rows.\n"
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in rows)]
    return "".join(re.sub(" +", " ", f"| {' | '.join(line)} |\n") for line in lines)
