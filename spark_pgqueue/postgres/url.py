"""What to connect to, and how to show it: a password is in no message.

A connection is described by `url`: any libpq URI (`postgresql://user@host/db?sslmode=require`) or
conninfo string (`host=... dbname=...`). Without one, libpq's own environment (`PGHOST`, `PGSERVICE`
and so on), service files and password file decide.
"""

from __future__ import annotations

import re

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
