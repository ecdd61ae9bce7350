"""Writing to a table that is captured, against writing to one that is not."""

from __future__ import annotations

from functools import partial

import psycopg

from tests.benchmarks.harness import Bench, Target, alternate, run, timed

ROWS = 10_000
TABLES = {"plain": None, "captured": "", "captured with old rows": ", p_old => true"}

GOAL = ("captured", "insert", ROWS)

TABLE = """
drop table if exists {table};
create table {table} (
    id    bigint      primary key,
    name  text        not null,
    price numeric     not null,
    at    timestamptz not null default statement_timestamp()
)"""

# Of the same rows, so that a round leaves nothing for the next one.
STATEMENTS = {
    "insert": "insert into {table} select i, 'name ' || i, i * 0.01 from generate_series(1, {n}) i",
    "update": "update {table} set price = price + 1",
    "delete": "delete from {table}",
}
ONE_ROW = {
    "insert": "insert into {table} values ({i}, 'name', 1.5)",
    "update": "update {table} set price = price + 1 where id = {i}",
    "delete": "delete from {table} where id = {i}",
}


def capture(bench: Bench) -> None:
    """What a row costs: of statements that write 10,000, and of those that write one."""
    with bench.connect() as conn:
        run(conn, "select pgqueue.create_stream('captured', 'json')")
        names = {name: f"table_{i}" for i, name in enumerate(TABLES)}
        for name, arguments in TABLES.items():
            run(conn, TABLE.format(table=names[name]))
            if arguments is not None:
                run(conn, f"select pgqueue.capture('{names[name]}', 'captured'{arguments})")
        measure(bench, conn, names, "10,000 rows a statement", ROWS, whole)
        measure(bench, conn, names, "a row a statement", 200 if bench.quick else 500, one_by_one)
        for name in list(names.values())[1:]:
            run(conn, f"select pgqueue.release('{name}', 'captured')")
        run(conn, f"drop table {', '.join(names.values())}")
        run(conn, "select pgqueue.drop_stream('captured')")


def measure(bench: Bench, conn: psycopg.Connection, names: dict, way: str, rows: int, do) -> None:
    """All three kinds of statements, in each round one after the other."""
    sides = {
        (name, kind): partial(do, conn, table, kind, rows)
        for kind in STATEMENTS
        for name, table in names.items()
    }
    taken = alternate(sides, 5 if bench.quick else 15)
    for (name, kind), seconds in taken.items():
        if name != "plain":
            bench.report.ratio(
                f"write to a table, {way}, against one that is not captured; per row",
                f"{kind}, {name}",
                [each / rows for each in seconds],
                [each / rows for each in taken["plain", kind]],
                "us",
                target=Target(least=0.2) if (name, kind, rows) == GOAL else None,
            )


def whole(conn: psycopg.Connection, table: str, kind: str, rows: int) -> float:
    """One statement, which finds its table as the round before left it."""
    statement = STATEMENTS[kind].format(table=table, n=rows)
    return timed(partial(run, conn, statement))


def one_by_one(conn: psycopg.Connection, table: str, kind: str, rows: int) -> float:
    """A statement per row, prepared as an application has them."""
    statement = ONE_ROW[kind].format(table=table, i="%s").encode()

    def work() -> None:
        for i in range(rows):
            conn.execute(statement, [i])

    return timed(work)
