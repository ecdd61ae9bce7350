"""Patience: which errors a restart of Postgres explains, and trying again until it is back."""

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
from spark_pgqueue.printable import warn

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds for which connecting is tried again while Postgres may be restarting."""

_SILENT = 1.5
"""Seconds after which somebody who waits is told so."""

# A connection that is refused has no SQLSTATE in libpq, only text. What a restart, a failover or a
# moment of too many connections explains; everything else is final.
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
    r"authentication|pg_hba\.conf|no password supplied|(role|database|user) .* does not exist"
    r"|not permitted to log in|no such (user|database)|permission denied|certificate|root\.crt",
    re.IGNORECASE,
)
# Class 08: connection exceptions. 57P01 to 57P03: shut down, crashed, cannot connect now. 53300:
# too many connections. 25006: read-only, after a failover to a standby.
_PASSING_SQLSTATES = ("08", "57P01", "57P02", "57P03", "53300", "25006")

_NOT_REACHED = "08001"  # sqlclient_unable_to_establish_sqlconnection


def is_passing(error: BaseException) -> bool:
    """Whether a restart, a failover or a lost connection explains the error.

    Such an error passes with a new connection, and nothing can be said about whether the statement
    that met it took effect.

    Args:
        error: an error of psycopg or of ADBC, or what `connect` made of it.
    """
    sqlstate = sqlstate_of(error)
    if sqlstate is not None:
        return sqlstate.startswith(_PASSING_SQLSTATES)
    if not _is_database_error(error):
        return False
    text = str(error)
    return bool(_PASSING.search(text)) and not _FINAL.search(text)


def with_backoff(attempt: Callable[[], T], url: str | None, patience: float = PATIENCE) -> T:
    """Call `attempt` again, with growing pauses, while it fails by errors that pass.

    Args:
        attempt: connects; when it also does work, the work must be safe to repeat.
        url: what it connects to, for messages.
        patience: seconds from the first failure after which the error is raised.

    Returns:
        what `attempt` returns.

    Raises:
        PgQueueError: a connection error that does not pass, or not in time, or a known database
            error (see `errors.translate`). Other errors come through as they are.
    """
    pause, end = 0.1, None
    with _notice_of(url, patience) as notice:
        while True:
            try:
                return attempt()
            except Exception as error:
                if not is_passing(error):
                    raise_clear(error, url)
                now = time.monotonic()
                end = now + patience if end is None else end
                if now >= end:
                    raise_clear(error, url)
            notice.expect()
            # Jitter: the tasks of a cluster must not all come back at the same moment.
            time.sleep(min(pause * random.uniform(0.5, 1.0), max(end - now, 0.0)))
            pause = min(pause * 2, 2.0)


@contextmanager
def told_if_slow(url: str | None) -> Iterator[None]:
    """Around one attempt to connect: when it takes long, the log says once where to."""
    with _notice_of(url, 0) as notice:
        notice.expect()
        yield
        notice.cancel()


class _Notice:
    """Tells the log once that Postgres is being waited for; by a timer, as who waits cannot."""

    def __init__(self, url: str | None, patience: float):
        self._url = url
        self._patience = patience
        self._timer: threading.Timer | None = None
        self._told = False

    def expect(self) -> None:
        """Tell it in a moment, unless `cancel` comes first."""
        if self._timer is None and not self._told:
            self._timer = threading.Timer(_SILENT, self._tell)
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        self._told = True
        limit = f", for {self._patience:.0f} s" if self._patience else ""
        warn("no connection to Postgres (%s) yet, still trying%s", describe(self._url), limit)


# An attempt of `with_backoff` has attempts to connect in it: only the outermost gives notice. By
# thread, in a dict and no ContextVar: where the package travels with a query it is pickled.
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
        notice.cancel()


def raise_clear(error: Exception, url: str | None) -> NoReturn:
    """Raise the PgQueueError that says what `error` means, or `error` itself if there is none.

    Raises:
        PgQueueError: for a failure to connect, and for what `errors.translate` knows.
    """
    clear = translate(error)
    if clear is None and _is_database_error(error) and sqlstate_of(error) is None:
        reason = without_passwords(str(error).strip(), url)
        clear = PgQueueError(
            f"no connection to Postgres ({describe(url)}): {reason}",
            hint=_hint(reason),
            # So that `is_passing` is as true of it as of the original.
            sqlstate=_NOT_REACHED if is_passing(error) else None,
        )
    # "from None": the original's text may hold a password.
    if clear is not None:
        raise clear from None
    raise error


def _hint(reason: str) -> str:
    if re.search("authentication|password|no such user|role .* does not exist", reason):
        return "check the user and the password (in url, PGPASSWORD, a service file or ~/.pgpass)"
    if re.search("database .* does not exist|no such database", reason):
        return "check dbname, or create the database"
    if re.search("resolve host|translate host", reason):
        return "check the host"
    if _PASSING.search(reason):
        return "check that Postgres runs there and can be reached from this machine"
    return "check url, or libpq's environment (PGHOST, PGSERVICE, ...) if there is none"


def _is_database_error(error: BaseException) -> bool:
    # ADBC's errors by name, so that its driver manager is not loaded for a psycopg error. What
    # comes while its rows are fetched passes through Arrow, which makes it an OSError.
    return (
        isinstance(error, psycopg.Error)
        or type(error).__module__.startswith("adbc_driver_manager")
        or (isinstance(error, OSError) and str(error).startswith("[libpq]"))
    )
