"""Installs the SQL, and checks that the versions of the database and this package match."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from spark_pgqueue.postgres import features, owners
from spark_pgqueue.postgres.errors import (
    INSTALL_HINT,
    SCHEMA_VERSION,
    PgQueueError,
    how_to_install,
    translated,
)
from spark_pgqueue.postgres.loading import plain
from spark_pgqueue.postgres.owners import Look
from spark_pgqueue.printable import counted, warn

# The logger has the package's name, because users filter by it.

Ask = Callable[[LiteralString], tuple[Any, ...] | None]
"""Runs a statement, and returns its first row."""

ATTEMPTS = 10
"""The maximum number of attempts to install while other sessions hold locks that it needs."""

PAUSE = 1.0
"""Seconds between two attempts, in which other sessions proceed."""

PGMQ = "pgmq/install.sql"
"""The file that creates the schema pgmq, an interface for clients of pgmq."""

_FRAME = ("begin isolation", "commit;")
"""Prefixes of the lines that begin and commit the transaction of a file."""

_shipped_version: int | None = None


def ship_version() -> None:
    """Store the version of the SQL files, for copies of this module that are pickled by value."""
    global _shipped_version
    _shipped_version = expected_version()


def sql_directory() -> Path:
    """The folder of the SQL files: inside the installed package, or beside it in a checkout.

    For a package in a zip it is a `Traversable`, a folder in that zip.
    """
    package = resources.files("spark_pgqueue")
    for folder in (package / "sql", Path(__file__).parents[2] / "sql"):
        if (folder / "install.sql").is_file():
            return folder  # type: ignore[return-value]
    raise PgQueueError(
        "the SQL files of spark-pgqueue are missing from its installation",
        hint=f"reinstall it: {how_to_install(option='--force-reinstall')}",
    )


def sql_files(name: str = "install.sql") -> list[Path]:
    r"""The files that sql/install.sql, or another file, runs by its `\ir` lines, in that order."""
    main = sql_directory() / name
    names = re.findall(r"^\\ir\s+(\S+)\s*$", main.read_text(), re.MULTILINE)
    return [main.parent / name for name in names]


def script(*, transaction: bool = True, pgmq: bool = False, without: Collection[str] = ()) -> str:
    r"""All of sql/install.sql as one file that is only SQL: without psql's own commands.

    Args:
        pgmq: the interface for pgmq instead, see `install`.
        transaction: whether the script begins and commits a transaction; False for tools that run
            each file in a transaction of their own.
        without: features to leave out, see `install`.

    Raises:
        PgQueueError: an unknown feature.
    """
    name = PGMQ if pgmq else "install.sql"
    return "\n".join(text for _, text in _parts(name, transaction, features.known(without)))


def _parts(name: str, transaction: bool, without: frozenset[str]) -> Iterator[tuple[Path, str]]:
    r"""The parts of a file, in order: its own lines, and the files that its `\ir` lines name."""
    main, own = sql_directory() / name, list[str]()
    left_out = {
        feature: [f.read_text() for f in sql_files(name) if f.parent.name == feature]
        for feature in without
    }
    for line in main.read_text().splitlines():
        command = line.split()
        if command[:1] == ["\\ir"]:
            yield main, "\n".join(own) + "\n"
            own = []
            file = main.parent / command[1]
            if (feature := file.parent.name) not in without:
                text = file.read_text()
                is_hooks = file.name == "hooks.sql"
                yield file, features.hooks_without(text, without) if is_hooks else text
            elif texts := left_out.pop(feature, None):  # in place of its first file
                yield file, features.removal(feature, texts)
        elif not line.startswith("\\") and (transaction or not line.startswith(_FRAME)):
            own.append(line)
    yield main, "\n".join(own) + "\n"


def _messages(name: str, without: frozenset[str]) -> Iterator[tuple[Path, str]]:
    """The parts of a file, those of one folder together, which saves round trips.

    The file's own first lines are separate, as they set how the server parses the rest.
    """
    parts = [part for part in _parts(name, False, without) if part[1].strip()]
    own = sql_directory() / name
    for (_, folder), of in groupby(parts, key=lambda part: (part[0] == own, part[0].parent)):
        yield folder, "".join(text for _, text in of)


def execute(
    conn: psycopg.Connection, name: str, without: frozenset[str], after: Callable[[], object]
) -> None:
    """Run a file of the folder in the open transaction, and call `after` at each part's end."""
    for folder, text in _messages(name, without):
        try:
            # Without parameters psycopg sends the text as it is, with all statements.
            conn.execute(text.encode(), prepare=False)
        except psycopg.Error as error:
            error.add_note(f"in {folder}")
            raise
        after()


def _run(conn: psycopg.Connection, name: str, without: frozenset[str] = frozenset()) -> None:
    """Run a file of the folder in one transaction."""
    in_transaction(conn, partial(execute, conn, name, without, lambda: None))


def in_transaction(conn: psycopg.Connection, work: Callable[[], object]) -> None:
    """Do the work in one transaction, with retries while other sessions hold locks.

    Each attempt has a short lock timeout, so that it does not block sessions that wait behind it.
    """
    if conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        raise PgQueueError(
            "the schema is installed and removed in its own transaction, but the connection has an "
            "open one",
            hint="commit or roll back first",
        )
    for left in reversed(range(ATTEMPTS)):
        try:
            with translated(), conn.transaction():
                conn.execute("set transaction isolation level read committed read write")
                work()
            return
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            said = f"the schema pgqueue is in use: {error.diag.message_primary}"
            if not left:
                raise PgQueueError(
                    f"{said}; tried {ATTEMPTS} times, and nothing was changed",
                    hint=error.diag.message_hint
                    or "end idle transactions, or stop workers and queries, and try again",
                    sqlstate=error.sqlstate,
                ) from None
            tries = counted(left, "time", "times")
            warn("%s; trying again, up to %s", said, tries, logger="spark_pgqueue.schema")
            time.sleep(PAUSE)


def expected_version() -> int:
    """The schema version that this package needs: `set local pgqueue.version = N` of its SQL."""
    if _shipped_version is not None:
        return _shipped_version
    text = (sql_directory() / "schema.sql").read_text()
    if found := re.search(r"^set local pgqueue\.version = (\d+);$", text, re.MULTILINE):
        return int(found[1])
    raise PgQueueError(f"schema.sql in {sql_directory()} sets no pgqueue.version")


def installed_version(conn: psycopg.Connection) -> int | None:
    """The schema version of the database; None when nothing is installed.

    Raises:
        PgQueueError: the role may not use the schema pgqueue or does not trust its owner.
    """
    with translated():
        return _version_by(partial(first_row, conn), owners.check(conn))


def first_row(conn: psycopg.Connection, sql: LiteralString) -> tuple[Any, ...] | None:
    # Plain rows, whatever row factory and loaders the caller's connection has.
    with plain(psycopg.Cursor(conn, row_factory=tuple_row)) as cursor:
        return cursor.execute(sql).fetchone()


def _version_by(ask: Ask, look: Look) -> int | None:
    found = ask("select pgqueue.schema_version()") if look.is_installed else None
    return found[0] if found else None


def install(conn: psycopg.Connection, *, pgmq: bool = False, without: Collection[str] = ()) -> int:
    """Install or upgrade the schema pgqueue, in one transaction. Safe to repeat.

    Args:
        conn: a connection as the role that owns, or will own, the schema, in no transaction.
        pgmq: also create the schema pgmq for clients of pgmq, in a separate transaction.
        without: features of `FEATURES` to leave out, or to remove. All others are installed.

    Returns:
        the version installed.

    Raises:
        PgQueueError: the database has a newer schema or another owner's schema pgqueue, the role
            lacks a permission, another session holds locks, or a feature to leave out is in use or
            unknown. Nothing is changed then.
    """
    _run(conn, "install.sql", features.known(without))
    if pgmq:
        _run(conn, PGMQ)
    return expected_version()


def uninstall(conn: psycopg.Connection) -> None:
    """Remove the schema pgqueue with all streams, in one transaction, as the schema's owner.

    Raises:
        PgQueueError: objects of others depend on the schema, the role lacks a permission, or
            another session holds locks. Nothing is changed then.
    """
    try:
        _run(conn, "uninstall.sql")
    except psycopg.errors.DependentObjectsStillExist as error:
        raise PgQueueError(
            str(error.diag.message_primary), hint=error.diag.message_hint, sqlstate=error.sqlstate
        ) from None


def content(conn: psycopg.Connection) -> str | None:
    """A summary of what removing the schema would delete; None without a schema.

    Raises:
        PgQueueError: the role may not read the streams or does not trust the schema's owner.
    """
    with translated(), psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
        owners.check(conn)
        schema = cursor.execute("select pg_catalog.to_regnamespace('pgqueue')").fetchone()
        if schema is None or schema[0] is None:
            return None
        found = cursor.execute(
            "select stream, consumers from pgqueue.stream_stats order by created_at"
        ).fetchall()
    streams = [name for name, _ in found]
    consumers = sum(count for _, count in found)
    names = ", ".join(map(repr, streams[:10])) + (", ..." if len(streams) > 10 else "")
    what = f"{len(streams)} stream{'s' * (len(streams) != 1)}" + (f" ({names})" if streams else "")
    return f"{what}, {consumers} consumer{'s' * (consumers != 1)}, and all messages"


def grant(conn: psycopg.Connection, group: str, role: str) -> None:
    """Make a role a member of a group role: "producer", "consumer", "observer" or "admin".

    It creates the group roles, as the schema's owner, who must be allowed to create roles.

    Raises:
        PgQueueError: the role does not exist, the connection's role may not grant, or does not
            trust the schema's owner.
    """
    with translated(), conn.transaction():
        owners.check(conn)
        conn.execute("select pgqueue.create_roles()")
    # In a second transaction: the group roles are kept if another role has to grant the membership.
    with translated(), conn.transaction():
        try:
            conn.execute(
                SQL("grant {} to {}").format(Identifier(f"pgqueue_{group}"), Identifier(role))
            )
        except (
            psycopg.errors.UndefinedObject,
            psycopg.errors.InvalidGrantOperation,
            psycopg.errors.InsufficientPrivilege,
        ) as error:
            hint = f"create the role first: create role {role} login"
            if isinstance(error, psycopg.errors.InsufficientPrivilege):
                hint = f"an administrator of the role runs: grant pgqueue_{group} to {role}"
            raise PgQueueError(
                str(error.diag.message_primary), hint=hint, sqlstate=error.sqlstate
            ) from None


def check(conn: psycopg.Connection, *, previous: bool = False) -> int:
    """Check that the database has the schema version that this package needs.

    Args:
        conn: the connection.
        previous: whether the version before it serves, too: for the calls of `Client` and workers,
            so that they can be deployed before the schema is upgraded.

    Returns:
        the version installed.

    Raises:
        PgQueueError: PQ011, the schema is missing, older, newer, or of a role that this one does
            not trust (see `owners`); or the role sets array_nulls to off.
    """
    with translated():
        return check_by(partial(first_row, conn), conn.info.dbname, previous)


def check_by(ask: Ask, database: str, previous: bool) -> int:
    """As `check`, on any connection; database errors are not translated."""
    look = owners.judge(ask(owners.LOOK))
    if look.array_nulls == "off":
        raise PgQueueError(
            "array_nulls is off for this role or database: a key that is null would become 'NULL'",
            hint="run alter role ... reset array_nulls, or alter database ... reset array_nulls",
        )
    installed, expected = _version_by(ask, look), expected_version()
    if installed is None:
        raise PgQueueError(
            f"the schema pgqueue is not installed in database {database}",
            hint=INSTALL_HINT,
            sqlstate=SCHEMA_VERSION,
        )
    if installed < expected - previous:
        way_out = INSTALL_HINT.replace("database", "schema")
    elif installed > expected:
        way_out = f"upgrade the package here: {how_to_install(option='--upgrade')}"
    else:
        return installed
    raise PgQueueError(
        f"database {database} has version {installed} of the schema pgqueue, but this package "
        f"requires version {expected}",
        hint=way_out,
        sqlstate=SCHEMA_VERSION,
    )
