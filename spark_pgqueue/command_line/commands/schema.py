"""Commands about the schema: install, print and remove it, and grant rights."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Annotated

import typer

from spark_pgqueue.command_line.app import app, connect
from spark_pgqueue.command_line.arguments import Group, Json, Url, Yes
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import report
from spark_pgqueue.postgres import connection, features, schema
from spark_pgqueue.postgres import dry_run as rehearsal

Without = Annotated[
    str,
    typer.Option(
        metavar="FEATURES",
        help=f"Leave out features, separated by commas: {', '.join(features.FEATURES)}.",
        show_default=False,
    ),
]


def names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


@app.command()
def install(
    pgmq: Annotated[
        bool, typer.Option("--pgmq", help="Also make the schema pgmq, for clients of pgmq.")
    ] = False,
    without: Without = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Roll the installation back, and print what it changes, which locks of tables it "
            "takes, and for how long. It takes them for this time.",
        ),
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Install or upgrade the schema pgqueue. Safe to repeat."""
    if dry_run:
        with connection.connect(url, patience=0) as conn:
            done = rehearsal.dry_run(conn, pgmq=pgmq, without=names(without))
            report(as_json, summary(done, conn.info.dbname), **asdict(done))
        return
    with connect(url) as queue:
        version = queue.install(pgmq=pgmq, without=names(without))
    report(as_json, f"The schema pgqueue is installed, version {version}.", version=version)


def summary(done: rehearsal.DryRun, database: str) -> str:
    """What a dry run found, as lines."""
    into = f"version {done.version} of the schema pgqueue in database {database!r}"
    if done.installed is None:
        said = f"This would install {into}."
    elif done.installed < done.version:
        said = f"This would upgrade version {done.installed} to {into}."
    else:
        said = f"This would install {into} again."
    lines = [f"{said} Nothing was changed.", f"duration: {done.seconds:.1f} s"]
    for mode, locks in groupby(sorted(done.locks, key=by_mode), by_mode):
        of = list(locks)
        held = max(lock.seconds for lock in of)
        tables = shortened([lock.table for lock in of])
        lines.append(f"locks, {mode}, for at most {held:.1f} s: {tables}")
    for change in ("created", "dropped", "changed"):
        for kind, objects in getattr(done, change).items():
            lines.append(f"{kind}, {change}: {shortened(objects)}")
    if done.rows:
        written = [f"{table} {count:,}" for table, count in done.rows.items()]
        lines.append(f"rows written: {shortened(written)}")
    return "\n".join(lines)


by_mode = attrgetter("mode")


def shortened(names: list[str], most: int = 5) -> str:
    """The first names of a list, and how many others there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f", and {left} more (--json has all)" if left > 0 else "")


@app.command("sql")
def print_sql(
    transaction: Annotated[
        bool,
        typer.Option(
            "--transaction/--no-transaction",
            help="Run in one transaction. Use --no-transaction for tools that begin their own, "
            "such as Flyway.",
        ),
    ] = True,
    pgmq: Annotated[
        bool,
        typer.Option("--pgmq", help="Also print the schema pgmq, as install --pgmq installs it."),
    ] = False,
    without: Without = "",
) -> None:
    """Print what `install` runs, as one file: for `psql <`, Flyway, or `docker exec`."""
    print(schema.script(transaction=transaction, pgmq=pgmq, without=names(without)), end="")


@app.command()
def uninstall(yes: Yes = False, as_json: Json = False, url: Url = None) -> None:
    """Delete the schema pgqueue with all streams, unless other objects depend on it."""
    with connection.connect(url, patience=0) as conn:
        content = schema.content(conn)
        if content is None:
            print("There is no schema pgqueue.", file=sys.stderr)
            report(as_json, uninstalled=False, content=None)
            return
        confirm(f"Delete the schema pgqueue in database {conn.info.dbname!r}: {content}?", yes)
        schema.uninstall(conn)
    said = f"Deleted: {content}. The group roles, if any, belong to the server, and stay."
    report(as_json, said, uninstalled=True, content=content)


@app.command()
def grant(
    group: Annotated[Group, typer.Argument(show_default=False, help="What it may do.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", show_default=False)],
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Allow a role to send, receive, monitor, or create and drop, in all streams."""
    with connection.connect(url, patience=0) as conn:
        schema.check(conn)
        schema.grant(conn, group.value, role)
        report(as_json, f"granted {group.value} to {role}", role=role, group=group.value)
