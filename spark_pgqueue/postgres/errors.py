"""The package's only exception, and the translation of database errors into it.

Every `PgQueueError` has the object and what to do about the error, and never a password. Database
errors without a known remedy are raised unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from spark_pgqueue.printable import printable
from spark_pgqueue.version import VERSION


class Code(NamedTuple):
    """A SQLSTATE of this project.

    Attributes:
        meaning: the cause, for all errors with this code.
        way_out: what to do; the hint of an error without a hint of its own.
    """

    meaning: str
    way_out: str | None


INSTALL_HINT = "run `pgqueue install` (with --url, or PGQUEUE_URL set) as the owner of the database"
"""The hint if the schema is missing."""

UNKNOWN_STREAM = "PQ001"
UNKNOWN_CONSUMER = "PQ002"
NOT_ALLOWED = "PQ003"
UNFIT_DATA = "PQ004"
FOREIGN_CHECKPOINT = "PQ005"
READ_TWICE = "PQ009"
DATA_LOSS = "PQ010"
SCHEMA_VERSION = "PQ011"
LEASE_LOST = "PQ012"
FULL = "PQ013"

NO_PERMISSION = "42501"
"""Postgres's own."""

CODES = {
    UNKNOWN_STREAM: Code(
        "there is no such stream, or it was dropped",
        "create it, and give queries that used the dropped one a new checkpoint",
    ),
    UNKNOWN_CONSUMER: Code(
        "the stream has no such consumer, or it was dropped",
        "create it, and give queries that used the dropped one a new checkpoint",
    ),
    # The message says what is allowed.
    NOT_ALLOWED: Code("an argument, option or column has a value that is not allowed", None),
    UNFIT_DATA: Code(
        "a payload does not match the kind or the schema of the stream",
        "text for a text stream, valid JSON text for a json stream, bytes for a binary stream; and "
        "of a stream with a schema, an object with its columns",
    ),
    FOREIGN_CHECKPOINT: Code(
        "the checkpoint or offset belongs to another consumer, stream, database or version",
        "give the query a checkpointLocation of its own, or start again without the offset",
    ),
    "PQ006": Code(
        "the name is already in use, with another kind or ordering",
        "use another name",
    ),
    "PQ007": Code(
        "claiming and settling require a transaction that sees earlier commits",
        "begin transaction isolation level read committed",
    ),
    "PQ008": Code("a part of the staged batch is missing", "run the batch again"),
    READ_TWICE: Code(
        "one query, or one application, reads the consumer twice",
        "read the consumer once and derive both sides from that, or use two consumers",
    ),
    DATA_LOSS: Code(
        "messages were deleted before the query read them, or the checkpoint was restored",
        "use the latest checkpoint, or a new one",
    ),
    SCHEMA_VERSION: Code(
        "the schema pgqueue or the server is missing, too old or too new",
        INSTALL_HINT,
    ),
    LEASE_LOST: Code(
        "a lease expired during processing, and other workers took the messages over",
        "restart the query, which continues without the lost messages; a longer visibilityTimeout "
        "helps; a worker of a group rolls back and continues",
    ),
    FULL: Code(
        "a consumer of the stream has reached its max_backlog or per_key_capacity; nothing was "
        "sent",
        "send later, or add workers",
    ),
}
"""All SQLSTATEs of class PQ that the SQL and this package raise."""


class PgQueueError(Exception):
    """An error of this package.

    Attributes:
        message (str): the cause: what was given, and what is allowed.
        hint (str | None): what to do about it.
        sqlstate (str | None): five characters; those of class PQ are in `CODES`. None when the
            error did not come from the database.
        argument (str | None): the argument of the SQL function that caused the error, such as
            `p_deliver_at`, if the database named one.
    """

    __module__ = "spark_pgqueue"  # users import it from here, and tracebacks show this name

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        sqlstate: str | None = None,
        argument: str | None = None,
    ):
        # Names come from users and may hold escape sequences; errors go to terminals.
        message, hint = _shown(message), _shown(hint) if hint else None
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.sqlstate = sqlstate
        self.argument = argument

    def __str__(self) -> str:
        code = f"[{self.sqlstate}] " if self.sqlstate else ""
        hint = f"\nHint: {self.hint}" if self.hint else ""
        return f"{code}{self.message}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception pickles only positional arguments.
        return _rebuild, (self.message, self.hint, self.sqlstate, self.argument)


def _rebuild(
    message: str, hint: str | None, sqlstate: str | None, argument: str | None
) -> PgQueueError:
    return PgQueueError(message, hint=hint, sqlstate=sqlstate, argument=argument)


Names = Callable[[str], str | None]
"""The user's names for arguments of SQL functions: `p_consumers` -> `option consumers`."""


def how_to_install(extra: str = "", option: str = "") -> str:
    """The command that installs this package, for a hint. It is on no package index.

    Args:
        extra: an extra to install; empty for none.
        option: an option for pip.
    """
    pip = " ".join(["pip install", option]).strip()
    extras = f"[{extra}]" if extra else ""
    wheel = f"spark_pgqueue-{VERSION}-py3-none-any.whl"
    return f'in a checkout {pip} ".{extras}", or with the wheel {pip} "./{wheel}{extras}"'


def translate(error: BaseException, names: Names | None = None) -> PgQueueError | None:
    """The error of this package that explains a database error.

    Args:
        error: an error of psycopg or of ADBC; other errors are not translated.
        names: the user's names for the arguments of SQL functions; None for the names in SQL.

    Returns:
        the error to raise instead; None for unknown errors.
    """
    sqlstate = sqlstate_of(error)
    if sqlstate is None or isinstance(error, PgQueueError):
        return None
    said = Said.by(error)
    message, hint = said.message, said.hint
    if sqlstate.startswith("PQ"):
        known = CODES.get(sqlstate)
        hint = hint or (known.way_out if known else None)
        arguments = said.column.split(", ") if said.column else []
        for argument in arguments:
            if here := names(argument) if names else None:
                message = _renamed(argument, here, message)
                hint = _renamed(argument, here, hint) if hint else None
        return PgQueueError(
            message, hint=hint, sqlstate=sqlstate, argument=next(iter(arguments), None)
        )
    if sqlstate == NO_PERMISSION:
        if message.startswith("permission denied for database"):
            hint = "grant the owner of the schema pgqueue `create` on the database"
        hint = hint or (
            "connect as the owner of the schema pgqueue, or as a role with this privilege; "
            "`pgqueue doctor --url ...` lists missing grants"
        )
        return PgQueueError(message, hint=hint, sqlstate=sqlstate)
    if sqlstate in ("3F000", "42P01", "42883") and "pgqueue" in message:
        if re.search(r"pgqueue\.(messages|seq)_\d+", message):
            return PgQueueError(
                f"the stream was dropped: {message}",
                hint="create the stream again, and start with a new checkpoint",
                sqlstate=UNKNOWN_STREAM,
            )
        return PgQueueError(
            f"the pgqueue schema is missing or older than this package: {message}",
            hint=CODES[SCHEMA_VERSION].way_out,
            sqlstate=SCHEMA_VERSION,
        )
    return None


@contextmanager
def translated(names: Names | None = None) -> Iterator[None]:
    """Raise a `PgQueueError` instead of each database error that `translate` knows.

    Raises:
        PgQueueError: for those; every other error is raised as it is.
    """
    try:
        yield
    except Exception as error:
        known = translate(error, names)
        if known is None:
            raise
        # "from None": the traceback of the database error would hide the message.
        raise known from None


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of an error of psycopg or ADBC, five characters; None without one."""
    sqlstate = getattr(error, "sqlstate", None)
    return sqlstate if isinstance(sqlstate, str) and sqlstate.strip("\0") else None


_FIELDS = ("message_primary", "message_detail", "message_hint", "context", "column_name")


class Said(NamedTuple):
    """The fields of an error message of the server; None for a missing field."""

    message: str
    detail: str | None
    hint: str | None
    context: str | None
    column: str | None

    @classmethod
    def by(cls, error: BaseException) -> Said:
        """The fields of an error of psycopg or of ADBC."""
        diagnostic = getattr(error, "diag", None)
        if diagnostic is not None and diagnostic.message_primary:
            return cls(*(getattr(diagnostic, name) for name in _FIELDS))
        # ADBC gives the fields as pairs of bytes.
        details = dict(getattr(error, "details", None) or [])
        found = [details.get(f"PG_DIAG_{name.upper()}".encode()) for name in _FIELDS]
        message, *others = [value.decode() if value else None for value in found]
        return cls(message or str(error).strip(), *others)


def _shown(text: str) -> str:
    return printable(text, keep="\n\t")


def _renamed(name: str, here: str, text: str) -> str:
    """The text with `here` instead of `name`, except in quotes, which contain given values."""
    pattern = rf"'[^']*'|\b{re.escape(name)}\b"
    return re.sub(pattern, lambda found: here if found[0] == name else found[0], text)
