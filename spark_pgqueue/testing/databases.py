"""Databases for tests, each a copy of one that is prepared once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from psycopg import sql
from psycopg.conninfo import make_conninfo

from spark_pgqueue.postgres import connection, schema


@contextmanager
def template(server: str, prepare: Callable[[str], object]) -> Iterator[str]:
    """A database with the schema, to make others from.

    Args:
        server: the url of a database of the server, of a role that may create databases.
        prepare: called with the url of the database, after the schema was installed.

    Yields:
        its name.
    """
    with database(server, "template0") as url:
        with connection.connect(url) as conn:
            name = conn.info.dbname
            schema.install(conn)
            # A copy is not taken for its template: the database of which is not noted.
            conn.execute("update pgqueue.servers set database = null")
        prepare(url)
        end_sessions(server, name)
        yield name


def end_sessions(server: str, database: str) -> None:
    """End those that a pool keeps: no copy is made of a database with sessions."""
    with closing(connection.connect(server)) as admin:
        # Not an autovacuum worker, which only a superuser may end: the copy ends it itself.
        admin.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where datname = %s and backend_type = 'client backend'",
            [database],
        )


@contextmanager
def database(server: str, template: str) -> Iterator[str]:
    """A database that is dropped afterwards, with its sessions.

    Args:
        server: as for `template`.
        template: the database that it is a copy of.

    Yields:
        its url.
    """
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    with closing(connection.connect(server)) as admin:
        # The files as they are: to log each page takes longer, and lets the log grow.
        create = "create database {} template {} strategy file_copy"
        admin.execute(sql.SQL(create).format(sql.Identifier(name), sql.Identifier(template)))
    try:
        yield make_conninfo(server, dbname=name)
    finally:
        with closing(connection.connect(server)) as admin:
            drop = "drop database if exists {} with (force)"
            admin.execute(sql.SQL(drop).format(sql.Identifier(name)))
