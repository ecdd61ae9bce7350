"""What to connect to, and how to show it: a password is in no message.

A connection is described by `url`: any libpq URI (`postgresql://user@host/db?sslmode=require`) or
conninfo string (`host=... dbname=...`). Without one, libpq's own environment (`PGHOST`, `PGSERVICE`
and so on), service files and password file decide.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_pgqueue.postgres.errors import PgQueueError

# Without these a connection whose server or network went away silently is never given up.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}

_SECRET = re.compile(
    r"""(?ix) \b (\w*password | \w*secret | scram_\w+_key)
        \s* = \s* (?: '(?:\\.|[^'\\])*'? | (?:\\.|\S)+ )"""
)
_USERINFO = re.compile(r"(\w+://[^:/@\s]*):.*@")


# What `with_credentials` adds for a password that is to be read whenever somebody connects.
_PASSWORD_FILE = re.compile(r" passwordfile='((?:\\.|[^'\\])*)'\Z", re.DOTALL)


def with_credentials(
    url: str | None, user: str | None, password: str | None, password_file: str | None
) -> str | None:
    """`url` with these in it, as all of this package takes it.

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment.
        user: the user, unless None.
        password: the password, unless None.
        password_file: a file that holds the password, read at each connection; unless None.

    Raises:
        PgQueueError: it is not valid, has a user or password already, or both are given.
    """
    given = parse(url)
    for name, value in (("user", user), ("password", password), ("password", password_file)):
        if value is not None and given.get(name):
            raise PgQueueError(
                f"the {name} is given twice: in url, and by an option of its own",
                hint="give it in one of them",
            )
    if password is not None and password_file is not None:
        raise PgQueueError(
            "options password and passwordFile are given both",
            hint="give one of them",
        )
    added = {name: value for name, value in (("user", user), ("password", password)) if value}
    if added:
        url = make_conninfo("", **{**given, **added})
    if password_file is not None:
        quoted = re.sub(r"(['\\])", r"\\\1", password_file)
        url = f"{make_conninfo('', **parse(url))} passwordfile='{quoted}'"
    return url


def _password_in(file: str) -> str:
    try:
        password = Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PgQueueError(
            f"the passwordFile {file} cannot be read on {platform.node()}: {reason}",
            hint="it has to be there, and readable, on the driver and the executors",
        ) from None
    if not password:
        raise PgQueueError(f"the passwordFile {file} is empty", hint="write the password into it")
    return password


def conninfo(url: str | None) -> str:
    """The complete conninfo string for `url`, as psycopg and ADBC both take it.

    Adds an application name and time limits where neither `url` nor the environment has them.
    It holds the password if `url` does: do not show it, show `describe(url)`.

    Raises:
        PgQueueError: the url is not a valid libpq URI or conninfo string.
    """
    given = parse(url)
    defaults = {"fallback_application_name": "spark-pgqueue"}
    # What a service file sets cannot be seen here, and a parameter would override it.
    if "service" not in given:
        defaults |= _DEFAULTS
    return make_conninfo("", **{**defaults, **_environment(defaults), **given})


def describe(url: str | None) -> str:
    """Where `url` leads, for messages: host, port, dbname, user and service, and nothing secret."""
    shown = ("service", "host", "hostaddr", "port", "dbname", "user")
    target = {**_environment(shown), **parse(url)}
    if "user" in target:  # who writes user=me:secret means a password
        target["user"] = re.sub(":.*", ":***", target["user"], flags=re.DOTALL)
    given = [f"{key}={redact(target[key])}" for key in shown if target.get(key)]
    return " ".join(given) or "libpq's defaults"


def redact(text: str) -> str:
    """`text` with `***` in place of every password that a URI or conninfo string in it holds.

    Rather hides too much than too little: the end of an unquoted password cannot always be told.
    """
    return _SECRET.sub(r"\1=***", _USERINFO.sub(r"\1:***@", text))


def without_passwords(text: str, url: str | None) -> str:
    """`text` without the passwords of `url`, and without those that any url in it holds."""
    given = parse(url)
    for secret in (given.get("password"), given.get("user", "").partition(":")[2]):
        text = text.replace(secret, "***") if secret else text
    return redact(text)


def parse(url: str | None) -> dict[str, str]:
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
    if url is not None and (file := _PASSWORD_FILE.search(url)):
        plain = parse(url[: file.start()])
        return {**plain, "password": _password_in(re.sub(r"\\(.)", r"\1", file[1]))}
    if url is not None and re.match(r"\s*jdbc:", url, re.IGNORECASE):
        # Only what is surely a host, a port and a database is repeated.
        same = re.match(r"\s*jdbc:(postgresql://[\w.:-]+(?:/[\w-]+)?)(?![^?])", url, re.IGNORECASE)
        instead = same[1] if same else "postgresql://host:5432/dbname"
        raise PgQueueError(
            "url is not valid: it is for JDBC",
            hint=f"give {instead} as a libpq URI, with user@ in front of the host",
        )
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
