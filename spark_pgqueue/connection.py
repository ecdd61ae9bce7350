"""Connecting to Postgres: what to connect to, patience with a restart, and no password in messages.

A connection is described by `url`: any libpq URI (`postgresql://user@host/db?sslmode=require`) or
conninfo string (`host=... dbname=...`). Without one, libpq's own environment (`PGHOST`, `PGSERVICE`
and so on), service files and password file decide. The functions here hold no state, and
connections rely on no session settings, so that they work behind a transaction pooler.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_pgqueue.errors import PgQueueError, sqlstate_of, translate

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi as adbc

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds for which connecting is tried again while Postgres may be restarting."""

# Without these a connection whose server or network went away silently is never given up.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}

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

_SECRET = re.compile(
    r"""(?ix) \b (\w*password | \w*secret | scram_\w+_key)
        \s* = \s* (?: '(?:\\.|[^'\\])*'? | (?:\\.|\S)+ )"""
)
_USERINFO = re.compile(r"(\w+://[^:/@\s]*):.*@")


def connect(
    url: str | None = None, *, patience: float = PATIENCE, autocommit: bool = True
) -> psycopg.Connection:
    """Connect with psycopg, waiting out a restart of Postgres.

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        patience: seconds to go on trying for while Postgres may be restarting; 0 to try once.
        autocommit: whether each statement is a transaction of its own.

    Returns:
        a connection that makes no server-side prepared statements.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    info = conninfo(url)
    # Prepared statements would not survive the change of backend that a transaction pooler makes.
    return with_backoff(
        lambda: psycopg.connect(info, autocommit=autocommit, prepare_threshold=None), url, patience
    )


def connect_adbc(
    url: str | None = None, *, patience: float = PATIENCE, autocommit: bool = True
) -> adbc.Connection:
    """As `connect`, with ADBC, for COPY from and to Arrow.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    from adbc_driver_postgresql import dbapi

    info = conninfo(url)
    return with_backoff(lambda: dbapi.connect(info, autocommit=autocommit), url, patience)


def conninfo(url: str | None) -> str:
    """The complete conninfo string for `url`, as psycopg and ADBC both take it.

    Adds an application name and time limits where neither `url` nor the environment has them.
    It holds the password if `url` does: do not show it, show `describe(url)`.

    Raises:
        PgQueueError: the url is not a valid libpq URI or conninfo string.
    """
    given = _parse(url)
    defaults = {"fallback_application_name": "spark-pgqueue"}
    # What a service file sets cannot be seen here, and a parameter would override it.
    if "service" not in given:
        defaults |= _DEFAULTS
    return make_conninfo("", **{**defaults, **_environment(defaults), **given})


def describe(url: str | None) -> str:
    """Where `url` leads, for messages: host, port, dbname, user and service, and nothing secret."""
    shown = ("service", "host", "hostaddr", "port", "dbname", "user")
    target = {**_environment(shown), **_parse(url)}
    if "user" in target:  # who writes user=me:secret means a password
        target["user"] = re.sub(":.*", ":***", target["user"], flags=re.DOTALL)
    given = [f"{key}={redact(target[key])}" for key in shown if target.get(key)]
    return " ".join(given) or "libpq's defaults"


def redact(text: str) -> str:
    """`text` with `***` in place of every password that a URI or conninfo string in it holds.

    Rather hides too much than too little: the end of an unquoted password cannot always be told.
    """
    return _SECRET.sub(r"\1=***", _USERINFO.sub(r"\1:***@", text))


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
        # Jitter: the tasks of a cluster must not all come back at the same moment.
        time.sleep(min(pause * random.uniform(0.5, 1.0), max(end - now, 0.0)))
        pause = min(pause * 2, 2.0)


def raise_clear(error: Exception, url: str | None) -> NoReturn:
    """Raise the PgQueueError that says what `error` means, or `error` itself if there is none.

    Raises:
        PgQueueError: for a failure to connect, and for what `errors.translate` knows.
    """
    clear = translate(error)
    if clear is None and _is_database_error(error) and sqlstate_of(error) is None:
        reason = _without_passwords(str(error).strip(), url)
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


def _parse(url: str | None) -> dict[str, str]:
    """The parameters that `url` itself gives.

    Raises:
        PgQueueError: it is not valid. libpq's message quotes pieces of it, which may be of the
            password, so only the part outside quotes is repeated.
    """
    hint = (
        "give a libpq URI (postgresql://user@host:5432/dbname) or conninfo string (host=... "
        "dbname=...); in a URI, percent-encode special characters of the password; in a conninfo "
        "string, put values with spaces in single quotes"
    )
    if url is not None and not isinstance(url, str):
        raise PgQueueError(f"url must be a string, not {type(url).__name__}", hint=hint)
    try:
        given = {key: str(value) for key, value in conninfo_to_dict(url or "").items()}
    except psycopg.ProgrammingError as error:
        reason = re.sub(r'".*"', '"..."', str(error).strip(), flags=re.DOTALL)
        raise PgQueueError(f"url is not valid: {reason}", hint=hint) from None
    # "postgres://u:p@ss@host" and "postgres://u:p/ss@host" parse, into a host, a port or a dbname
    # that holds a piece of the password.
    if "@" in given.get("host", "") or re.match(r"\w+://[^/?]*/[^?]*@", url or ""):
        raise PgQueueError("url is not valid: there is an '@' too many", hint=hint)
    if not re.fullmatch(r"\d*(,\d*)*", given.get("port", "")):
        raise PgQueueError("url is not valid: its port is not a number", hint=hint)
    return given


def _environment(keys) -> dict[str, str]:
    """What libpq's environment and service file set for `keys`."""
    return {
        option.keyword.decode(): option.val.decode()
        for option in psycopg.pq.Conninfo.get_defaults()
        if option.val and option.keyword.decode() in keys
    }


def _without_passwords(text: str, url: str | None) -> str:
    given = _parse(url)
    for secret in (given.get("password"), given.get("user", "").partition(":")[2]):
        text = text.replace(secret, "***") if secret else text
    return redact(text)


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
