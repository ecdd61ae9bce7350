"""A look at all tables and indexes, backlogs, and the CPU of each part: a line of JSON each."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.benchmarks.harness import run
from tests.benchmarks.hour.sides import Side
from tests.benchmarks.server_cpu import ServerCpu

# TOAST tables and their indexes go by the name of their table. What is dropped meanwhile has no
# size.
SIZES = """
with named as (
    select c.oid, c.relkind, n.nspname || '.' || c.relname as name, c.reltoastrelid, n.nspname
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = any(%s)
), toasted as (
    select oid, relkind, name from named where relkind in ('r', 'i', 'm')
    union all
    select t.oid, t.relkind, n.name || ' toast' from named n join pg_class t
    on t.oid = n.reltoastrelid
    union all
    select i.indexrelid, 'i', n.name || ' toast index' from named n join pg_index i
    on i.indrelid = n.reltoastrelid
)
select name, relkind::text, coalesce(pg_relation_size(t.oid), 0),
       coalesce(s.n_dead_tup, 0), coalesce(s.n_live_tup, 0)
from toasted t left join pg_stat_all_tables s on s.relid = t.oid
"""
SHARED_SCHEMAS = ("public", "pg_catalog")
"""A queue that makes tables writes to the catalogs, too."""

WAL = "select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"


def grouped(name: str) -> str:
    """The name of a relation; tables that come and go, by numbers, have one name."""
    return re.sub(r"\d+", "*", name)


def sizes(conn: psycopg.Connection, schemas: tuple[str, ...]) -> dict[str, list[int]]:
    """By relation or group of them: bytes, dead rows, live rows, and how many they are."""
    found: dict[str, list[int]] = {}
    for name, _, size, dead, live in run(conn, SIZES, ([*schemas, *SHARED_SCHEMAS],)):
        if not size and name.startswith("pg_catalog."):
            continue
        figures = found.setdefault(grouped(name), [0, 0, 0, 0])
        for place, value in enumerate((size, dead, live, 1)):
            figures[place] += value
    return found


def cpu_of(pid: int) -> float:
    """Seconds of a process and its children, those that ended too."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        parts = [process.cpu_times()]
        for each in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                parts.append(each.cpu_times())
        return sum(p.user + p.system + p.children_user + p.children_system for p in parts)
    return 0.0


class Sampler:
    """Writes the lines.

    Args:
        conn: a connection of its own.
        side: whose tables are looked at.
        path: of the lines.
        pids: of processes, by their role.
    """

    def __init__(
        self,
        conn: psycopg.Connection,
        side: Side,
        path: Path,
        pids: Callable[[], dict[str, list[int]]],
    ):
        self._conn, self._side, self._path, self._pids = conn, side, path, pids
        self._server = ServerCpu(conn)

    def look(self, at: float, *, held: bool) -> dict[str, Any]:
        """Write a line, and return it.

        Args:
            at: seconds since the beginning.
            held: whether the snapshot is held.
        """
        began = time.perf_counter()
        ((wal,),) = run(self._conn, WAL)
        line: dict[str, Any] = {
            "at": round(at, 1),
            "held": held,
            "relations": sizes(self._conn, self._side.schemas),
            "backlog": self._side.backlog(self._conn),
            "wal": wal,
            "cpu": {role: sum(map(cpu_of, pids)) for role, pids in self._pids().items()},
        }
        line["cpu"]["server"] = self._server.seconds() or 0.0
        line["cpu"] = {role: round(seconds, 2) for role, seconds in line["cpu"].items()}
        line["look"] = round(time.perf_counter() - began, 3)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line


def read(path: Path) -> list[dict[str, Any]]:
    """All lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
