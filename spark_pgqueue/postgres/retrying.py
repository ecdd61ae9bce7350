"""Retries while Postgres restarts, and the errors that allow them."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import psycopg

from spark_pgqueue.postgres.errors import PgQueueError, sqlstate_of, translate
from spark_pgqueue.postgres.url import describe, without_passwords
from spark_pgqueue.printable import LONGEST, warn

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds for which connecting is retried while Postgres may be restarting."""

_SILENT = 1.5
"""Seconds of retries after which a warning is logged."""

# libpq gives no SQLSTATE for a refused connection, only text. These texts mean a restart, a
# failover or temporarily too many connections; all other errors are final.
_PASSING = re.compile(
    r"connection refused|no such file or directory|could not connect|starting up|shutting down"
    r"|recovery|not (yet )?accepting connections|too many (clients|connections)"
    r"|remaining connection slots|no more connections|terminat|closed the connection"
    r"|connection (is )?(closed|lost)|no connection to the server|connection reset|broken pipe"
    r"|time(d )?out|unreachable|no route to host|could not (receive|send) data"
    r"|consuming input failed|ssl syscall error|eof detected|temporary failure"
    r"|session is (not )?read-(only|write)|server conn crashed|server_login_retry"
    r"|server login has been failing",
    re.IGNORECASE,
)
_FINAL = re.compile(
    r"authentication|pg_hba\.conf|no password supplied|(role|database|user) .{1,200} does not exist"
    r"|not permitted to log in|no such (user|database)|permission denied|certificate|root\.crt",
    re.IGNORECASE,
)
PASSING_SQLSTATES: dict[str, str] = {
    "08": "connection exceptions, a class",
    "57P01": "the server was shut down, or ended the session",
    "57P02": "the server crashed",
    "57P03": "the server does not accept connections now",
    "57P05": "idle_session_timeout",
    "25P03": "idle_in_transaction_session_timeout",
    "25P04": "transaction_timeout",
    "53300": "too many connections",
    "25006": "read-only, after a failover to a standby",
}
"""The SQLSTATEs of errors that a new connection resolves."""

STATEMENT_SQLSTATES: dict[str, str] = {
    "40001": "a serialization failure, or a standby that had to cancel a query",
    "40P01": "a deadlock",
    "53100": "a full disk",
    "55P03": "a lock timeout",
    "57014": "a statement timeout, or a statement that an administrator cancelled",
}
"""The SQLSTATEs of errors of one statement, which is retried if it is safe to repeat."""

_CANCELLED = "57014"

_NOT_REACHED = "08001"  # sqlclient_unable_to_establish_sqlconnection


def is_passing(error: BaseException) -> bool:
    """Whether a restart, a failover or a lost connection caused the error.

    A new connection resolves it. Whether the statement took effect is unknown. The error is one of
    psycopg or of ADBC, or the error that `connect` made of it.
    """
    if is_crash(error):
        return True
    sqlstate = sqlstate_of(error)
    if sqlstate is not None:
        return sqlstate.startswith(tuple(PASSING_SQLSTATES))
    if not is_database_error(error):
        return False
    text = str(error)[:LONGEST]
    return bool(_PASSING.search(text)) and not _FINAL.search(text)


def is_crash(error: BaseException) -> bool:
    """Whether the error crashes the server, such as a failure to write its log."""
    diagnostics = getattr(error, "diag", None)
    return getattr(diagnostics, "severity_nonlocalized", None) == "PANIC"


def is_worth_a_retry(error: BaseException) -> bool:
    """Whether a worker or a query continues after the error: it is passing, or of one statement."""
    return is_passing(error) or sqlstate_of(error) in STATEMENT_SQLSTATES


class Attempts:
    """Consecutive attempts at work that is safe to repeat, and the errors that allow another one.

    A cancelled statement is retried once: this resolves a cancellation by an administrator, but not
    a statement_timeout, which would cancel each attempt.
    """

    def __init__(self) -> None:
        self._was_cancelled = False

    def may_go_on(self, error: BaseException) -> bool:
        """Whether to make another attempt after this error."""
        if sqlstate_of(error) == _CANCELLED:
            is_first, self._was_cancelled = not self._was_cancelled, True
            return is_first
        return is_worth_a_retry(error)


def with_backoff(attempt: Callable[[], T], url: str | None, patience: float = PATIENCE) -> T:
    """Call `attempt` repeatedly, with growing pauses, while it fails with passing errors.

    Args:
        attempt: connects. Other work in it must be safe to repeat, and not be part of an open
            transaction.
        url: the database, for messages.
        patience: seconds after the first failure until the error is raised.

    Returns:
        the return value of `attempt`.

    Raises:
        PgQueueError: a connection error that is final, or lasts longer than `patience`; or a known
            database error (see `errors.translate`). Other errors are raised unchanged.
    """
    pause, end, attempts = 0.1, None, Attempts()
    with _notice_of(url, patience) as notice:
        while True:
            try:
                return attempt()
            except Exception as error:
                if not attempts.may_go_on(error):
                    raise_clear(error, url)
                now = time.monotonic()
                end = now + patience if end is None else end
                if now >= end:
                    raise_clear(error, url)
                if is_passing(error):
                    notice.failed(error)
            # Jitter: the tasks of a cluster must not all reconnect at the same moment.
            time.sleep(min(pause * random.uniform(0.5, 1.0), max(end - now, 0.0)))
            pause = min(pause * 2, 2.0)


class _Notice:
    """Logs one warning, with its cause, when a thread keeps failing to connect."""

    def __init__(self, url: str | None, patience: float):
        self._url = url
        self._patience = patience
        self._since: float | None = None
        self._is_given = False

    def failed(self, error: Exception) -> None:
        """Record a failed attempt; log the warning if the first failure was some time ago."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if self._is_given or now - self._since < _SILENT:
            return
        self._is_given = True
        cause = without_passwords(str(getattr(error, "message", None) or error).strip(), self._url)
        said = "no connection to Postgres (%s) yet, retrying for %s s: %s"
        warn(said, describe(self._url), f"{self._patience:.0f}", cause[:LONGEST])


# An attempt of `with_backoff` may contain attempts to connect; only the outermost logs. The notices
# are in a dict by thread, not in a ContextVar, which cannot be pickled by value.
_notices: dict[int, _Notice] = {}


@contextmanager
def _notice_of(url: str | None, patience: float) -> Iterator[_Notice]:
    thread = threading.get_ident()
    if thread in _notices:
        yield _notices[thread]
        return
    notice = _notices[thread] = _Notice(url, patience)
    try:
        yield notice
    finally:
        del _notices[thread]


def raise_clear(error: Exception, url: str | None) -> NoReturn:
    """Raise the PgQueueError that explains `error`, or `error` itself if there is none.

    Errors of drivers that cannot convert a value have no SQLSTATE either, but are not failures to
    connect.

    Raises:
        PgQueueError: for a failure to connect, and for errors that `errors.translate` knows.
    """
    clear = translate(error)
    is_lost = is_passing(error) or isinstance(error, psycopg.OperationalError)
    if clear is None and is_lost and sqlstate_of(error) is None:
        reason = without_passwords(str(error).strip(), url)
        clear = PgQueueError(
            f"no connection to Postgres ({describe(url)}): {reason}",
            hint=_hint(reason),
            # `is_passing` must return the same for this error as for the original.
            sqlstate=_NOT_REACHED if is_passing(error) else None,
        )
    # "from None": the text of the original may hold a password.
    if clear is not None:
        raise clear from None
    raise error


def _hint(reason: str) -> str:
    if re.search("authentication|password|no such user|role .{1,200} does not exist", reason):
        return "check the user and the password (in url, PGPASSWORD, a service file or ~/.pgpass)"
    if re.search("database .{1,200} does not exist|no such database", reason):
        return "check dbname, or create the database"
    if re.search("resolve host|translate host", reason):
        return "check the host"
    if _PASSING.search(reason):
        return "check that Postgres runs there and can be reached from this machine"
    return "check url, or libpq's environment (PGHOST, PGSERVICE, ...) if there is none"


def is_database_error(error: BaseException) -> bool:
    """Whether it is an error of psycopg or of ADBC."""
    # ADBC's errors are recognized by name, so that its driver manager need not be imported. Arrow
    # converts errors of ADBC during a fetch to OSError.
    return (
        isinstance(error, psycopg.Error)
        or type(error).__module__.startswith("adbc_driver_manager")
        or (isinstance(error, OSError) and str(error).startswith("[libpq]"))
    )
