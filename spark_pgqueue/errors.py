"""The package's one exception, and how errors of the database become it.

Everything that ends in a `PgQueueError` names the thing and the way out, and never holds a
password. Errors of the database that have no clear way out pass through unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

SCHEMA_VERSION = "PQ011"
"""SQLSTATE of a missing, older or newer schema; the other PQ codes are raised by the SQL."""

INSTALL_HINT = "run `pgqueue install` (with --url, or PGQUEUE_URL set) as the owner of the database"
"""What to do where the schema is missing."""

# `permission denied for <kind> <name>`: what to grant for each kind.
_GRANTS = {
    "schema": "grant usage on schema {name} to <role>",
    "database": "grant connect, create on database {name} to <role>",
    "table": "grant select, insert, update, delete on table pgqueue.{name} to <role>",
    "view": "grant select on pgqueue.{name} to <role>",
    "sequence": "grant usage on sequence pgqueue.{name} to <role>",
    "function": "grant execute on function pgqueue.{name} to <role>",
}


class PgQueueError(Exception):
    """An error with a way out.

    Attributes:
        message (str): what is wrong: what was given, and what is allowed.
        hint (str | None): what to do about it.
        sqlstate (str | None): five characters; class PQ are this project's own. None when the
            error did not come from the database.
    """

    def __init__(self, message: str, *, hint: str | None = None, sqlstate: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.sqlstate = sqlstate

    def __str__(self) -> str:
        code = f"[{self.sqlstate}] " if self.sqlstate else ""
        hint = f"\nHint: {self.hint}" if self.hint else ""
        return f"{code}{self.message}{hint}"

    def __reduce__(self):
        # Exception pickles its positional arguments alone, which would lose hint and sqlstate.
        return _rebuild, (self.message, self.hint, self.sqlstate)


def _rebuild(message: str, hint: str | None, sqlstate: str | None) -> PgQueueError:
    return PgQueueError(message, hint=hint, sqlstate=sqlstate)


def how_to_install(extra: str = "", option: str = "") -> str:
    """The command that installs this package, for a hint. No index has it.

    Args:
        extra: with this extra; empty for none.
        option: an option for pip.
    """
    from spark_pgqueue import __version__

    pip = " ".join(["pip install", option]).strip()
    extras = f"[{extra}]" if extra else ""
    wheel = f"spark_pgqueue-{__version__}-py3-none-any.whl"
    return f'in a checkout {pip} ".{extras}", or with the wheel {pip} "./{wheel}{extras}"'


def translate(error: BaseException) -> PgQueueError | None:
    """What an error of the database means to a user of this package.

    Args:
        error: an error of psycopg or of ADBC (anything else is not translated).

    Returns:
        the error to raise in its place, or None when no clear way out can be named.
    """
    sqlstate = sqlstate_of(error)
    if sqlstate is None or isinstance(error, PgQueueError):
        return None
    message, hint = _message_and_hint(error)
    if sqlstate.startswith("PQ"):
        return PgQueueError(message, hint=hint, sqlstate=sqlstate)
    if sqlstate == "42501":
        return PgQueueError(message, hint=_grant_hint(message), sqlstate=sqlstate)
    if sqlstate in ("3F000", "42P01", "42883") and "pgqueue" in message:
        if re.search(r"pgqueue\.(messages|seq)_\d+", message):
            return PgQueueError(
                f"the stream was dropped: {message}",
                hint="create the stream again, and start with a new checkpoint",
                sqlstate="PQ001",
            )
        return PgQueueError(
            f"the pgqueue schema is missing or older than this package: {message}",
            hint=INSTALL_HINT,
            sqlstate=SCHEMA_VERSION,
        )
    return None


@contextmanager
def translated() -> Iterator[None]:
    """Raise `PgQueueError` in place of the database errors that `translate` knows.

    Raises:
        PgQueueError: for those; every other error passes through as it is.
    """
    try:
        yield
    except Exception as error:
        known = translate(error)
        if known is None:
            raise
        # The database's error has nothing to add, and its traceback hides the message.
        raise known from None


def sqlstate_of(error: BaseException) -> str | None:
    """The five characters of SQLSTATE that psycopg or ADBC give with an error, or None."""
    sqlstate = getattr(error, "sqlstate", None)
    return sqlstate if isinstance(sqlstate, str) and sqlstate.strip("\0") else None


def _message_and_hint(error: BaseException) -> tuple[str, str | None]:
    diagnostic = getattr(error, "diag", None)  # psycopg
    if diagnostic is not None and diagnostic.message_primary:
        return diagnostic.message_primary, diagnostic.message_hint
    # ADBC gives the fields of the server's message as pairs of bytes.
    details = dict(getattr(error, "details", None) or [])
    primary = details.get(b"PG_DIAG_MESSAGE_PRIMARY")
    hint = details.get(b"PG_DIAG_MESSAGE_HINT")
    message = primary.decode() if primary else str(error).strip()
    return message, hint.decode() if hint else None


def _grant_hint(message: str) -> str:
    denied = re.search(r"for (\w+) \"?([\w.]+)\"?$", message)
    if denied and denied[1] in _GRANTS:
        return "as the owner: " + _GRANTS[denied[1]].format(name=denied[2])
    return "connect as the owner of the schema pgqueue, or as a role that was granted this"
