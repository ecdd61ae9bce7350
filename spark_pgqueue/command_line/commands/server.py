"""Commands about a private Postgres: start it in a folder, with the schema, and stop it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from psycopg.conninfo import conninfo_to_dict

from spark_pgqueue.command_line.app import app, connect
from spark_pgqueue.command_line.arguments import Json
from spark_pgqueue.command_line.output import report
from spark_pgqueue.postgres import embedded

NEWEST = 18

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="[DIR]", help="Its data directory: a new one, or that of an earlier run."
    ),
]


@app.command()
def up(
    folder: Folder = Path("pgqueue-data"),
    export: Annotated[
        bool,
        typer.Option(
            "--export", help='Print commands for the shell: eval "$(pgqueue up --export)".'
        ),
    ] = False,
    version: Annotated[
        int | None,
        typer.Option(
            help=f"The version of Postgres. By default {NEWEST}, or that of the folder's data."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start Postgres in a folder, unless it is running, and install the schema.

    It stays up when this command has ended: `pgqueue down` stops it. It listens on a socket in the
    folder, which nobody but its user can reach.
    """
    server = embedded.start(
        folder, version=version or embedded.version_in(folder) or NEWEST, keep=True
    )
    server.keep_up()
    with connect(server.url) as queue:
        queue.install()
    if export and not as_json:
        # libpq's too: psql, the client and Spark then find the database without a url.
        given = {f"PG{name.upper()}": value for name, value in conninfo_to_dict(server.url).items()}
        given["PGDATABASE"] = given.pop("PGDBNAME")
        for name, value in {"PGQUEUE_URL": server.url, **given}.items():
            print(f"export {name}={shlex.quote(str(value))}")
        return
    where = "" if folder == Path("pgqueue-data") else f" {shlex.quote(str(folder))}"
    said = (
        f"PostgreSQL {server.version} runs in {server.directory}, with the schema pgqueue.\n"
        f"url: {server.url}\n"
        f'For this shell: eval "$(pgqueue up{where} --export)". To stop it: pgqueue down{where}'
    )
    report(
        as_json,
        said,
        url=server.url,
        version=server.version,
        folder=str(server.directory),
    )


@app.command()
def down(folder: Folder = Path("pgqueue-data"), as_json: Json = False) -> None:
    """Stop the Postgres of a folder, even while it is in use. Its data stays."""
    version = embedded.version_in(folder)
    running = (folder / "data" / "postmaster.pid").exists()
    if running and version is not None:
        embedded.start(folder, version=version, keep=True).stop()
    said = f"PostgreSQL in {folder.resolve()} " + ("is stopped." if running else "does not run.")
    report(as_json, said, folder=str(folder.resolve()), stopped=running)
