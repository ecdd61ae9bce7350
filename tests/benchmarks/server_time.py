"""How much of the server's CPU each operation takes, beside an earlier commit: none gets slower.

    make bench-check     fail where an operation takes 8% more than at the commit that was kept last
    make bench-check ARGS="--against COMMIT"    ... than at this commit
    make bench-check ARGS="--against COMMIT --table"    show all, as ratios with their quartiles
    make bench-check ARGS=--keep    measure, and keep the figures as those of this commit

A figure is the CPU time of the session's backend, as the kernel counts it (/proc/PID/schedstat).
That hardly depends on what else the machine does, but it depends on the machine. So the SQL of the
earlier commit is installed beside that of today, and the two take turns; the least of several
rounds counts. Figures that are kept are divided by the time of a reference, too: rows of a plain
table that are inserted, updated and deleted in PL/pgSQL.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from tests.benchmarks.harness import SETTINGS
from tests.benchmarks.server_cpu import nanoseconds

KEPT = Path(__file__).with_suffix(".json")
"""The figures of past commits, the last one last."""

ALLOWED = 1.08
ROUNDS = 7
ROUNDS_OF_A_SUSPECT = 25
PARTS = 3
GIT = ["git", "-C", str(KEPT.parents[2])]

REFERENCE = """
create table reference (id bigint primary key, at timestamptz, data text) with (fillfactor = 50);
create or replace function reference_work(p_rows int) returns void language plpgsql as $$
begin
    for i in 1..p_rows loop
        insert into reference values (i, clock_timestamp(), 'x');
        update reference set at = clock_timestamp() where id = i;
        delete from reference where id = i;
    end loop;
end $$;
"""


class Session:
    """A connection that counts what its calls cost."""

    def __init__(self, url: str):
        self.conn = psycopg.connect(url, autocommit=True, prepare_threshold=0)
        self.pid = self.conn.info.backend_pid
        self.held: int | None = None  # a claim
        self.at: str | None = None  # an offset
        self.batch = 0

    def ask(self, query: str, *values: Any) -> list[Any]:
        cursor = self.conn.execute(query.encode(), values)
        return cursor.fetchall() if cursor.description else []

    def cost(self, work: Callable[[], Any]) -> int:
        before = nanoseconds(self.pid)
        work()
        return nanoseconds(self.pid) - before

    def reference(self) -> float:
        """What inserting, updating and deleting a row takes, in nanoseconds."""
        return self.cost(lambda: self.ask("select reference_work(300)")) / 300


Work = Callable[[Session], None]


@dataclass(frozen=True)
class Operation:
    """What is measured: `work`, so many times in a round, on what `setup` has made."""

    name: str
    work: Work
    count: int = 40
    setup: Work = lambda s: None
    ordering: str | None = "none"  # of the consumer c; None: there is none
    settings: dict[str, Any] | None = None


def sql(query: str) -> Work:
    return lambda s: void(s.ask(query))


def void(_: Any) -> None:
    return None


def filled(n: int, singly: bool = False, keys: int = 0) -> Work:
    """So many messages in the stream before a round."""
    key = f"'k' || mod(i, {keys})" if keys else "null"

    def fill(s: Session) -> None:
        if singly:
            for i in range(n):
                s.ask(
                    "select pgqueue.send('s', 'x', p_key => %s)", f"k{i % keys}" if keys else None
                )
        else:
            s.ask(
                f"select count(*) from pgqueue.send_batch('s', array(select 'x' from"
                f" generate_series(1, {n})), array(select {key} from generate_series(1, {n}) i))"
            )

    return fill


def take(n: int, settle: str = "ack") -> Work:
    """A claim of so many, and its end."""

    def work(s: Session) -> None:
        rows = s.ask(f"select claim_id from pgqueue.receive('s', 'c', {n})")
        s.ask(f"select pgqueue.{settle}(%s)", rows[0][0])

    return work


def in_turn(key: str = "null") -> Work:
    """A message is sent, received and acknowledged before the next one is sent."""
    return lambda s: void((s.ask(f"select pgqueue.send('s', 'x', {key})"), take(1)(s)))


def acknowledge_with_the_next(s: Session) -> None:
    rows = s.ask("select claim_id from pgqueue.receive('s', 'c', 1, p_ack => %s)", s.held)
    s.held = rows[0][0] if rows else None


def take_in_parts(s: Session) -> None:
    rows = s.ask("select claim_id, seq from pgqueue.receive('s', 'c', 4)")
    for claim_id, seq in rows:
        s.ask("select pgqueue.ack(%s, %s)", claim_id, [seq])


def hold(s: Session) -> None:
    filled(5)(s)
    rows = s.ask("select claim_id from pgqueue.receive('s', 'c', 5)")
    s.held = rows[0][0]


def extend(s: Session) -> None:
    s.ask("select pgqueue.extend(%s)", s.held)


def dead(n: int) -> Work:
    """So many dead letters."""

    def fill(s: Session) -> None:
        filled(n)(s)
        for _ in range(n):
            take(1, "dead_letter")(s)

    return fill


def read_on(s: Session) -> None:
    rows = s.ask("select next_offset::text from pgqueue.read('s', %s, 100)", s.at)
    s.at = rows[-1][0] if rows else None


def publish_staged(s: Session) -> None:
    s.batch += 1
    stream = s.ask("select stream_id from pgqueue.open_stream('s')")[0][0]
    batch = [f"bench{s.pid}", s.batch, stream]
    with s.conn.transaction():
        ((seqs,),) = s.ask("select pgqueue.reserve(%s, 1000)::text", stream)
        s.ask(
            f"insert into pgqueue.messages_{stream} (seq, data)"
            " select generate_series(lower(r), upper(r) - 1), 'x'"
            " from unnest(%s::int8multirange) r",
            seqs,
        )
        ((chunk,),) = s.ask("select pgqueue.stage(%s, %s, %s, %s::int8multirange)", *batch, seqs)
    s.ask("select pgqueue.publish_staged(%s, %s, %s, %s, 1000)", *batch, [chunk])


SEND = "select pgqueue.send('s', 'x'"
SEND_ONCE = f"{SEND}, p_dedup_key => gen_random_uuid()::text)"
SEND_LATER = f"{SEND}, p_deliver_at => now() + interval '1 hour')"
CREATE = "select pgqueue.create_consumer('s', gen_random_uuid()::text)"
ONE_KEY = "select pgqueue.ack(claim_id) from pgqueue.receive_where('s', 'c', '$.key == \"k1\"')"


def of_one(name: str, setup: Work, ordering: str = "none", **settings: Any) -> Operation:
    """Messages that are received and acknowledged one by one."""
    return Operation(name, take(1), 40, setup, ordering, settings)


# What failed comes again at once, also at a commit that knows no `never`.
AT_ONCE = {"max_deliver_count": 2**31 - 1, "backoff": "constant", "backoff_jitter": 0}
SINGLE, BULK, KEYS = filled(40, singly=True), filled(40), filled(40, singly=True, keys=1000)
TEN_KEYS = filled(40, singly=True, keys=10)

OPERATIONS = [
    Operation("send", sql(f"{SEND})")),
    Operation("send, a key", sql(f"{SEND}, p_key => 'k')")),
    Operation("send, a dedup key", sql(SEND_ONCE), settings={"stream": {"dedup_window": "1 day"}}),
    Operation("send, delayed", sql(SEND_LATER)),
    Operation("send, max_backlog", sql(f"{SEND})"), settings={"max_backlog": 1_000_000}),
    Operation("send_batch of 100", filled(100), 10),
    Operation("send_batch of 10,000", filled(10_000), 1),
    Operation("publish 1,000 staged", publish_staged, 4),
    Operation("receive nothing", sql("select * from pgqueue.receive('s', 'c', 1)")),
    of_one("receive 1, ack", SINGLE),
    of_one("... published in bulk", BULK),
    Operation("... acknowledged with the next", acknowledge_with_the_next, 40, SINGLE),
    of_one("... by key", KEYS, "key"),
    of_one("... by key, of ten keys", TEN_KEYS, "key"),
    of_one("... in the stream's order", SINGLE, "stream"),
    of_one("... with max_in_flight", SINGLE, max_in_flight=1000),
    of_one("... with keep_history", SINGLE, keep_history="1 day"),
    of_one("... with per_key_limit", KEYS, per_key_limit=2),
    of_one("... with per_key_interval", KEYS, per_key_interval="1 ms", per_key_burst=1000),
    of_one("... with per_key_latest", KEYS, per_key_latest=True),
    Operation("send, receive, ack in turn", in_turn()),
    Operation("... in turn, by key", in_turn("'k'"), ordering="key"),
    Operation("receive 10, ack", take(10), 10, filled(100, singly=True)),
    Operation("receive 10, ack, by key", take(10), 10, filled(100, True, 1000), "key"),
    Operation("receive 100, ack", take(100), 4, filled(400)),
    Operation("receive 100, ack, by key", take(100), 4, filled(400, keys=1000), "key"),
    Operation("receive 10,000, ack", take(10_000), 1, filled(10_000)),
    Operation("receive_where, ack", sql(ONE_KEY), 10, filled(100, keys=10)),
    Operation("receive 4, ack each", take_in_parts, 10, SINGLE),
    Operation("receive 1, nack", take(1, "nack"), 20, filled(20, singly=True), settings=AT_ONCE),
    Operation("receive 1, dead_letter", take(1, "dead_letter"), 20, filled(20, singly=True)),
    Operation("extend", extend, 40, hold),
    Operation("read 100 by offset", read_on, 4, filled(400)),
    Operation("redrive", sql("select pgqueue.redrive('s', 'c', p_max => 1)"), 10, dead(10)),
    Operation("create_consumer", sql(CREATE), 10),
    Operation("consumer_stats", sql("select * from pgqueue.consumer_stats"), 10, filled(10)),
    Operation("maintain, idle", sql("select * from pgqueue.maintain()"), 4),
]


SHORT = {"send", "receive 1, ack", "... by key", "receive 10, ack", "receive 100, ack"}


def prepare(s: Session, operation: Operation) -> None:
    """A stream s, and its consumer c."""
    s.ask("select pgqueue.drop_stream(stream) from pgqueue.stream_stats")
    given = dict(operation.settings or {})
    of_stream = given.pop("stream", {})
    s.ask("select pgqueue.create_stream('s', p_settings => %s)", json.dumps(of_stream))
    if operation.ordering is not None:
        s.ask(
            "select pgqueue.create_consumer('s', 'c', 'earliest', %s, p_settings => %s)",
            operation.ordering, json.dumps(given),
        )  # fmt: skip
    s.held = s.at = None


def costs(sessions: list[Session], operation: Operation, rounds: int) -> list[list[float]]:
    """For each session, the least microseconds of an operation, and of the reference."""
    for s in sessions:
        prepare(s, operation)
    found: list[list[list[float]]] = [[] for _ in sessions]
    for _ in range(rounds + 1):
        for s, of_session in zip(sessions, found, strict=True):
            operation.setup(s)
            reference = s.reference()
            cost = s.cost(lambda s=s: [operation.work(s) for _ in range(operation.count)])
            of_session.append([cost / operation.count / 1000, reference / 1000])
    # the first round fills the caches of the session
    return [[min(each) for each in zip(*of_session[1:], strict=True)] for of_session in found]


def ratios(url: str, then: str, operation: Operation, rounds: int) -> list[float]:
    """What an operation costs, divided by what it costs at `then`, in alternating rounds."""
    found: list[float] = []
    for _ in range(PARTS):  # in sessions of their own: the plans that a session keeps may differ
        sessions = [session(url), session(then)]
        for s in sessions:
            prepare(s, operation)
        for i in range(rounds // PARTS + 1):
            cost = {}
            for s in sessions if i % 2 else sessions[::-1]:
                operation.setup(s)
                cost[s.pid] = s.cost(
                    lambda s=s: [operation.work(s) for _ in range(operation.count)]
                )
            found += [cost[sessions[0].pid] / cost[sessions[1].pid]] if i else []
        for s in sessions:
            s.conn.close()
    return found


def compare(url: str, then: str, operations: list[Operation]) -> None:
    """Print the median of the ratios of each operation, and their quartiles."""
    for operation in operations:
        low, middle, high = statistics.quantiles(
            ratios(url, then, operation, ROUNDS_OF_A_SUSPECT), n=4
        )
        print(f"{operation.name:36} {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)


def session(url: str) -> Session:
    s = Session(url)
    with psycopg.ClientCursor(s.conn) as cursor:
        cursor.execute(f"drop table if exists reference; {REFERENCE}".encode())
    for _ in range(5):
        s.reference()
    return s


def measure(url: str, operations: list[Operation], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """By name of the operation: microseconds, and times the reference."""
    s = session(url)
    figures = {}
    for operation in operations:
        ((micros, reference),) = costs([s], operation, rounds)
        figures[operation.name] = [round(micros, 3), round(micros / reference, 3)]
    return figures


def kept() -> list[dict[str, Any]]:
    """The figures of past commits."""
    return json.loads(KEPT.read_text())


def last() -> dict[str, Any] | None:
    """What was kept last, of a commit that this clone has."""

    def known(each: dict[str, Any]) -> bool:
        commit = f"{each['commit']}^{{commit}}"
        return not subprocess.run([*GIT, "cat-file", "-e", commit], capture_output=True).returncode

    return next(filter(known, reversed(kept())), None)


@contextmanager
def installed(url: str, commit: str) -> Iterator[str]:
    """Another database of the server, with the queue of a commit, installed by that commit."""
    database = f"then_{os.getpid()}"
    then = make_conninfo(url, dbname=database)
    with (
        psycopg.connect(url, autocommit=True) as conn,
        tempfile.TemporaryDirectory(prefix="pgqueue-then-") as folder,
    ):
        archive = [*GIT, "archive", commit, "spark_pgqueue", "sql"]
        packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x"], input=packed, cwd=folder, check=True)
        conn.execute(f"create database {database}".encode())
        try:
            install = [sys.executable, "-m", "spark_pgqueue", "install", "--url", then]
            env = {**os.environ, "PYTHONPATH": folder}
            subprocess.run(install, cwd=folder, env=env, check=True, capture_output=True)
            yield then
        finally:
            conn.execute(f"drop database {database} with (force)".encode())


def slower(url: str, then: str, operations: list[Operation], allowed: float) -> list[str]:
    """The operations that take more than is allowed at each of three looks, beside `then`.

    Each look is made in sessions of its own: the plans that a session keeps may differ by chance.
    """
    told = {each.name: "" for each in operations}
    for rounds in (ROUNDS, ROUNDS_OF_A_SUSPECT, ROUNDS_OF_A_SUSPECT):
        sessions = [session(url), session(then)]
        for operation in [each for each in operations if each.name in told]:
            (now, _), (before, _) = costs(sessions, operation, rounds)
            if now > before * allowed:
                told[operation.name] = f"{operation.name}: {now:.0f} µs, {before:.0f} before"
            else:
                del told[operation.name]
        for each in sessions:
            each.conn.close()
    return list(told.values())


def earlier(commit: str | None) -> tuple[str, list[Operation]]:
    """A commit, or the one that was kept last, and the operations that can be compared with it."""
    if commit:
        return commit, OPERATIONS
    if (then := last()) is None:
        raise typer.BadParameter(f"this clone has no commit of {KEPT.name}: name one by --against")
    return then["commit"], [each for each in OPERATIONS if each.name in then["figures"]]


def main(
    keep: Annotated[bool, typer.Option(help="Keep the figures as those of this commit.")] = False,
    against: Annotated[str | None, typer.Option(help="A commit; else the last one kept.")] = None,
    table: Annotated[bool, typer.Option(help="Show the ratio of each operation.")] = False,
) -> None:
    """Measure, and compare with an earlier commit."""
    with (
        tempfile.TemporaryDirectory(prefix="pgqueue-bench-") as folder,
        embedded.start(Path(folder) / "data", settings=SETTINGS) as server,
    ):
        with connection.connect(server.url) as conn:
            schema.install(conn)
        if not keep:
            commit, operations = earlier(against)
            with installed(server.url, commit) as then:
                if table:
                    compare(server.url, then, operations)
                    sys.exit()
                found = slower(server.url, then, operations, ALLOWED)
            print("\n".join(found) or f"no operation takes more than at {commit}")
            sys.exit(bool(found))
        figures = measure(server.url, OPERATIONS)
    show(figures)
    write(figures)


def show(figures: dict[str, list[float]]) -> None:
    table = Table("operation", "µs of the server", "times the reference", "kept last")
    was = kept()[-1]["figures"]
    for name, (micros, times) in figures.items():
        before = f"{was[name][1]:.2f}" if name in was else ""
        table.add_row(name, f"{micros:.0f}", f"{times:.2f}", before)
    Console().print(table)


def write(figures: dict[str, list[float]]) -> None:
    commit = subprocess.check_output([*GIT, "describe", "--always", "--dirty"], text=True).strip()
    entry = {"commit": commit, "day": time.strftime("%Y-%m-%d"), "figures": figures}
    lines = [json.dumps(each, ensure_ascii=False) for each in [*kept(), entry]]
    KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
