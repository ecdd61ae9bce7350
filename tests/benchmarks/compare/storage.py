"""What messages cost in storage, until the next vacuum."""

from __future__ import annotations

from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.sides import Side
from tests.benchmarks.harness import run

STORAGE = {"WAL": "bytes", "tables and indexes": "bytes", "dead rows": "rows"}
"""What is measured, and its units."""


def storage(compare: Compare, side: Side) -> dict[str, float]:
    """What there is of each."""
    compare.crew.flush()
    run(compare.conn, "select pg_stat_force_next_flush()")
    tables = compare.tables(side)
    sql = (
        "select pg_current_wal_insert_lsn() - '0/0',"
        " (select sum(pg_total_relation_size(t)) from unnest(%s::text[]) t),"
        " (select sum(n_dead_tup) from pg_stat_all_tables where relid::regclass::text = any(%s))"
    )
    return dict(zip(STORAGE, map(float, run(compare.conn, sql, (tables, tables))[0]), strict=True))


def empty_storage(compare: Compare, side: Side) -> dict[str, float]:
    """The same after a vacuum."""
    storage(compare, side)  # what was done before is said before it is vacuumed
    compare.vacuum(side)
    return storage(compare, side)
