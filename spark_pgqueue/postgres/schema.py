"""Installing the SQL, and checking that the database and this package fit each other."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
from psycopg.rows import tuple_row

from spark_pgqueue.postgres.errors import (
    INSTALL_HINT,
    SCHEMA_VERSION,
    PgQueueError,
    how_to_install,
    translated,
)


def sql_directory() -> Path:
    """The folder of the SQL files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "sql", package.parent / "sql"):
        if (folder / "install.sql").is_file():
            return folder
    raise PgQueueError(
        "the SQL files of spark-pgqueue are missing from its installation",
        hint=f"reinstall it: {how_to_install(option='--force-reinstall')}",
    )


def sql_files() -> list[Path]:
    r"""The files that sql/install.sql runs by its `\ir` lines, in that order."""
    folder = sql_directory()
    names = re.findall(r"^\\ir\s+(\S+)\s*$", (folder / "install.sql").read_text(), re.MULTILINE)
    return [folder / name for name in names]


def expected_version() -> int:
    """The schema version that this package needs: the line `-- schema version: N` of its SQL."""
    for file in sql_files():
        if found := re.search(r"^-- schema version: (\d+)\s*$", file.read_text(), re.MULTILINE):
            return int(found[1])
    raise PgQueueError(f"no line '-- schema version: N' in the SQL files of {sql_directory()}")


def installed_version(conn: psycopg.Connection) -> int | None:
    """The schema version of the database, or None when nothing is installed.

    Raises:
        PgQueueError: the role may not use the schema pgqueue.
    """
    # Plain rows, whatever the rows of the caller's connection are.
    with translated(), psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
        row = cursor.execute("select to_regprocedure('pgqueue.schema_version()')").fetchone()
        if row is None or row[0] is None:
            return None
        row = cursor.execute("select pgqueue.schema_version()").fetchone()
        return row[0] if row else None


def install(conn: psycopg.Connection) -> int:
    """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat.

    Args:
        conn: a connection as the role that owns, or will own, the schema.

    Returns:
        the version installed.

    Raises:
        PgQueueError: the database has a newer schema, or the role lacks a permission. Nothing
            is changed then.
    """
    with translated(), conn.transaction():
        for file in sql_files():
            try:
                # No parameters: psycopg then sends the file as it is, with all of its statements.
                conn.execute(file.read_text().encode(), prepare=False)
            except psycopg.Error as error:
                error.add_note(f"in {file}")
                raise
    return expected_version()


def check(conn: psycopg.Connection) -> None:
    """Check that the database has the schema version that this package needs.

    Raises:
        PgQueueError: PQ011, when the schema is missing, older or newer.
    """
    installed, expected = installed_version(conn), expected_version()
    if installed is None:
        raise PgQueueError(
            f"the schema pgqueue is not installed in database {conn.info.dbname}",
            hint=INSTALL_HINT,
            sqlstate=SCHEMA_VERSION,
        )
    if installed < expected:
        way_out = INSTALL_HINT.replace("database", "schema")
    elif installed > expected:
        way_out = f"upgrade the package here: {how_to_install(option='--upgrade')}"
    else:
        return
    raise PgQueueError(
        f"database {conn.info.dbname} has version {installed} of the schema pgqueue, and this "
        f"package needs version {expected}",
        hint=way_out,
        sqlstate=SCHEMA_VERSION,
    )
