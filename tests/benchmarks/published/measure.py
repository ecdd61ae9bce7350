"""A run of a set-up with one side: a look at the server each minute, and every message counted."""

from __future__ import annotations

import shlex
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import psycopg

from tests.benchmarks.compare import pgmq, report
from tests.benchmarks.compare.counts import check, drain
from tests.benchmarks.compare.crew import Crew, connect
from tests.benchmarks.compare.sides import Ours, Side
from tests.benchmarks.harness import run
from tests.benchmarks.published.setups import Setup
from tests.benchmarks.published.work import (
    BYSTANDERS,
    BYSTANDERS_ROWS,
    Bystand,
    Produce,
    Track,
    Work,
)
from tests.benchmarks.server_cpu import ServerCpu, between

SHOWN = ("fsync", "synchronous_commit", "full_page_writes", "autovacuum", "shared_buffers")
BYSTANDERS_RATE = 100
"""Queries a second of each bystander."""

# Dead rows of the tables of a side and of what belongs to them; those of the catalog apart, as
# tables may come and go.
STORAGE = """
select coalesce(sum(n_dead_tup) filter (where is_side), 0)::bigint,
       coalesce(sum(n_dead_tup) filter (where not is_side), 0)::bigint,
       coalesce(sum(pg_table_size(relid)) filter (where schemaname = %(schema)s), 0)::bigint,
       coalesce(sum(pg_indexes_size(relid)) filter (where schemaname = %(schema)s), 0)::bigint
from pg_stat_all_tables s cross join lateral (
    select s.schemaname = %(schema)s or exists (
        select from pg_class c where c.reltoastrelid = s.relid
          and c.relnamespace = %(schema)s::regnamespace) as is_side) o
where is_side or schemaname = 'pg_catalog'
"""


@dataclass(frozen=True)
class Look:
    """A look at the server and the clients' counters.

    Attributes:
        at: the time.
        sent, done: messages so far.
        cpu: the server's seconds of CPU so far; None where they cannot be seen.
        dead: rows of the side that are dead.
        catalog: the same of the catalog.
        tables, indexes: bytes.
    """

    at: float
    sent: int
    done: int
    cpu: float | None
    dead: int
    catalog: int
    tables: int
    indexes: int


@dataclass(frozen=True)
class Minute:
    """What happened between two looks, and how things stood at the later one.

    Attributes:
        seconds: between the looks.
        sent, done: messages.
        backlog: messages sent and not acknowledged, at the end.
        p50, p99: milliseconds from commit to a worker, of messages that came.
        claim_p50, claim_p99: milliseconds of a claim that found something.
        bystander: milliseconds of a bystander's query, on average.
        cpu: microseconds of the server for a message done.
        dead, catalog, tables, indexes: as of a look.
    """

    seconds: float
    sent: int
    done: int
    backlog: int
    p50: float | None
    p99: float | None
    claim_p50: float | None
    claim_p99: float | None
    bystander: float | None
    cpu: float | None
    dead: int
    catalog: int
    tables: int
    indexes: int


def measure(
    url: str, setup: Setup, side: Side, minutes: float, minute: float = 60, held: bool = True
) -> dict[str, Any]:
    """Run a set-up in an empty database.

    Args:
        minutes: how many.
        minute: the seconds of one: less in a test.
        held: whether something holds the horizon.

    Returns:
        what a JSON file has.

    Raises:
        RuntimeError, CountError: a client failed, or messages were lost or came twice.
    """
    with connect(url) as conn, altered(conn, setup.settings):
        prepare(conn, setup, side)
        with Crew(url, ServerCpu(conn)) as crew:
            hold = setup.hold(url) if held else nullcontext()
            with hold:
                looks, tracks = clients(conn, crew, setup, side, minutes, minute)
        producers, workers, bystanders = split(setup, tracks)
        sent = [number for track in producers for number in track.numbers]
        rest = drain(side, conn, 0)
        check(side, conn, sent, [*(track.log() for track in workers), rest])
        found = minutes_of(looks, producers, workers, bystanders)
        ((postgres,),) = run(conn, "show server_version")
        names = (*SHOWN, *setup.settings)
        settings = {name: run(conn, f"show {name}")[0][0] for name in names}
        side.drop(conn)
    versions = {"pgmq": pgmq.version()} if side.schema == "pgmq" else {}
    return {
        **report.machine(
            postgres.split()[0], settings, "full" if minute == 60 else "short", versions
        ),
        "setup": setup.name,
        "side": side.name,
        "held": held,
        "rate": setup.rate,
        "command": shlex.join(["python", "-m", "tests.benchmarks.published", *sys.argv[1:]]),
        "sent": len(sent),
        "drained": sum(len(numbers) for *_, numbers in rest.deliveries),
        "minutes": [asdict(each) for each in found],
    }


def prepare(conn: psycopg.Connection, setup: Setup, side: Side) -> None:
    """Make the queue, and the table of the bystanders."""
    side.install(conn)
    side.create(conn, 1, by_key=False)
    if setup.bystanders and not run(conn, "select to_regclass('bystanders.accounts')")[0][0]:
        run(conn, BYSTANDERS.replace("%s", str(BYSTANDERS_ROWS)))


@contextmanager
def altered(conn: psycopg.Connection, settings: dict[str, str]) -> Iterator[None]:
    """With settings of the server, as long as this lasts."""
    for name, value in settings.items():
        run(conn, f"alter system set {name} = '{value}'")
    run(conn, "select pg_reload_conf()")
    time.sleep(0.2 if settings else 0)  # until the sessions have them
    try:
        yield
    finally:
        for name in settings:
            run(conn, f"alter system reset {name}")
        run(conn, "select pg_reload_conf()")


def clients(
    conn: psycopg.Connection,
    crew: Crew,
    setup: Setup,
    side: Side,
    minutes: float,
    minute: float,
) -> tuple[list[Look], list[Track]]:
    """Let the clients work, and look at them once a minute."""
    seconds = minutes * minute
    jobs = [
        *(Produce(side, i, setup.rate / setup.producers, seconds) for i in range(setup.producers)),
        *[Work(side, setup.size, setup.work, seconds)] * setup.workers,
        *[Bystand(BYSTANDERS_RATE, seconds)] * setup.bystanders,
    ]
    looks: list[Look] = []

    def watch() -> None:
        began = time.perf_counter()
        looks.append(look(conn, crew, setup, side))
        for each in range(1, round(minutes) + 1):
            time.sleep(max(0.0, began + each * minute - time.perf_counter()))
            looks.append(look(conn, crew, setup, side))
            if isinstance(side, Ours):  # as every worker of ours does, and no other side has it
                run(conn, "select count(*) from pgqueue.maintain()")

    return looks, crew.run(jobs, watch)


def look(conn: psycopg.Connection, crew: Crew, setup: Setup, side: Side) -> Look:
    """How things stand."""
    counters, producers = list(crew.counters), setup.producers
    sent, done = sum(counters[:producers]), sum(counters[producers:])
    at, cpu = time.perf_counter(), crew.cpu.seconds()
    ((dead, catalog, tables, indexes),) = run(conn, STORAGE, {"schema": side.schema})
    return Look(at, sent, done, cpu, dead, catalog, tables, indexes)


def split(setup: Setup, tracks: list[Track]) -> tuple[list[Track], list[Track], list[Track]]:
    """The tracks of producers, workers, and bystanders."""
    first, last = setup.producers, setup.producers + setup.workers
    return tracks[:first], tracks[first:last], tracks[last:]


def minutes_of(
    looks: list[Look], producers: list[Track], workers: list[Track], bystanders: list[Track]
) -> list[Minute]:
    """What happened between each two looks."""
    sent = {n: at for track in producers for n, at in zip(track.numbers, track.at, strict=True)}
    late = sorted(
        (at, max(at - sent[number], 0.0))
        for track in workers
        for number, at in zip(track.numbers, track.at, strict=True)
        if number in sent
    )
    claims = sorted(calls_of(workers))
    queries = sorted(calls_of(bystanders))
    found = []
    for then, now in pairwise(looks):
        done = now.done - then.done
        cpu = between(then.cpu, now.cpu)
        came, claimed = within(late, then, now), within(claims, then, now)
        asked = within(queries, then, now)
        found.append(
            Minute(
                seconds=now.at - then.at,
                sent=now.sent - then.sent,
                done=done,
                backlog=now.sent - now.done,
                p50=share(came, 0.5),
                p99=share(came, 0.99),
                claim_p50=share(claimed, 0.5),
                claim_p99=share(claimed, 0.99),
                bystander=sum(asked) / len(asked) * 1e3 if asked else None,
                cpu=max(cpu, 0.0) / done * 1e6 if cpu is not None and done else None,
                dead=now.dead,
                catalog=now.catalog,
                tables=now.tables,
                indexes=now.indexes,
            )
        )
    return found


def calls_of(tracks: list[Track]) -> Iterator[tuple[float, float]]:
    """When calls ended, and what they took."""
    for track in tracks:
        yield from zip(track.calls, track.took, strict=True)


def within(events: list[tuple[float, float]], then: Look, now: Look) -> list[float]:
    """The values of events between two looks, sorted."""
    first, last = (bisect_left(events, (each.at,)) for each in (then, now))
    return sorted(value for _, value in events[first:last])


def share(values: list[float], part: float) -> float | None:
    """The milliseconds that such a part of sorted values does not exceed."""
    return values[int((len(values) - 1) * part)] * 1e3 if values else None
