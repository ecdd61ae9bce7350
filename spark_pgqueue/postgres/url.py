"""The url of a connection, and its description without a password for messages.

A connection is described by `url`: any libpq URI (`postgresql://user@host/db?sslmode=require`) or
conninfo string (`host=... dbname=...`). Without a url, libpq's own environment (`PGHOST`,
`PGSERVICE` and so on), service files and password file decide.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.printable import redact

# Without these limits, a connection whose server or network fails silently would wait for minutes
# or forever: to receive (keepalives), or to send (tcp_user_timeout, in milliseconds).
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
}

# The encoding of all text, whatever the role, the database or the environment set: Arrow's text is
# UTF-8, and ADBC does not convert it.
_ENCODING = {"client_encoding": "UTF8"}

# `with_credentials` adds this for a password file, which is read at each connection.
_PASSWORD_FILE = re.compile(r" passwordfile='([^'\\]*(?:\\.[^'\\]*)*)'\Z", re.DOTALL)


def with_credentials(
    url: str | None, user: str | None, password: str | None, password_file: str | None
) -> str | None:
    """The `url` with user and password, which may be in a file that is read at each connection.

    Raises:
        PgQueueError: the url is not valid, or user or password are given twice.
    """
    given = parse(url)
    for name, value in (("user", user), ("password", password), ("password", password_file)):
        if value is not None and given.get(name):
            raise PgQueueError(
                f"the {name} is given twice: in url, and by its own option",
                hint="give it in one of them",
            )
    if password is not None and password_file is not None:
        raise PgQueueError(
            "options password and passwordFile are both given",
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
            hint="the file must exist and be readable on the driver and the executors",
        ) from None
    if not password:
        raise PgQueueError(f"the passwordFile {file} is empty", hint="write the password into it")
    return password


def conninfo(url: str | None) -> str:
    """The complete conninfo string for `url`, as psycopg and ADBC both take it.

    It adds an application name and time limits if neither `url` nor the environment has them. The
    encoding is always UTF-8. The string has the password of `url`: in messages use `describe(url)`.

    Raises:
        PgQueueError: the url is not a valid libpq URI or conninfo string.
    """
    given = parse(url)
    defaults = {"fallback_application_name": "spark-pgqueue"}
    # The settings of a service file are unknown here, and a parameter would override them.
    if "service" not in given:
        defaults |= _DEFAULTS
    return make_conninfo("", **{**defaults, **_environment(defaults), **given, **_ENCODING})


def describe(url: str | None) -> str:
    """The target of `url`, for messages: host, port, dbname, user and service, without secrets."""
    shown = ("service", "host", "hostaddr", "port", "dbname", "user")
    target = {**_environment(shown), **parse(url)}
    if "user" in target:  # in user=me:secret, the user meant a password
        target["user"] = re.sub(":.*", ":***", target["user"], flags=re.DOTALL)
    given = [f"{key}={redact(target[key])}" for key in shown if target.get(key)]
    return " ".join(given) or "libpq's defaults"


def without_passwords(text: str, url: str | None) -> str:
    """The text without the passwords of `url` and of other urls in it."""
    given = parse(url)
    for secret in (given.get("password"), given.get("user", "").partition(":")[2]):
        text = text.replace(secret, "***") if secret else text
    return redact(text)


def parse(url: str | None) -> dict[str, str]:
    """The parameters in `url` itself.

    Raises:
        PgQueueError: the url is not valid. The text in quotes of libpq's message is left out, as it
            may be a part of the password.
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
        # The hint repeats only host, port and database.
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
    except UnicodeError:  # whose text quotes it
        raise PgQueueError("url is not valid: it is not UTF-8", hint=hint) from None
    # "postgres://u:p@ss@host" and "postgres://u:p/ss@host" are valid, with a part of the password
    # as host, port or dbname.
    if "@" in given.get("host", "") or re.match(r"\w+://[^/?]*/[^?]*@", url or ""):
        raise PgQueueError("url is not valid: it contains one '@' too many", hint=hint)
    if not re.fullmatch(r"\d*(,\d*)*", given.get("port", "")):
        raise PgQueueError("url is not valid: its port is not a number", hint=hint)
    return given


def _environment(keys) -> dict[str, str]:
    """The values that libpq's environment and service file set for `keys`."""
    return {
        option.keyword.decode(): option.val.decode()
        for option in psycopg.pq.Conninfo.get_defaults()
        if option.val and option.keyword.decode() in keys
    }
