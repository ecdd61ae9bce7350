"""How much of the server's CPU each operation takes, kept by commit: performance does not rot.

    make bench-check     measure, and fail where an operation takes 8% more than it did last
    make bench-check ARGS=--keep    measure, and keep the figures as those of this commit

A figure is the CPU time of the session's backend, as the kernel counts it (/proc/PID/schedstat).
That hardly depends on what else the machine does; it depends on the machine. So each figure is
divided by the time of a reference, rows of a plain table that are inserted, updated and deleted in
PL/pgSQL, which is measured right beside it. The least of several rounds counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
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
ONE_KEY = "select pgqueue.ack(claim_id) from pgqueue.receive_where('s', 'c', '$.key == \"k1\"')"


def of_one(name: str, setup: Work, ordering: str = "none", **settings: Any) -> Operation:
    """Messages that are received and acknowledged one by one."""
    return Operation(name, take(1), 40, setup, ordering, settings)


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
    Operation("receive 10, ack", take(10), 10, filled(100, singly=True)),
    Operation("receive 10, ack, by key", take(10), 10, filled(100, True, 1000), "key"),
    Operation("receive 100, ack", take(100), 4, filled(400)),
    Operation("receive 100, ack, by key", take(100), 4, filled(400, keys=1000), "key"),
    Operation("receive 10,000, ack", take(10_000), 1, filled(10_000)),
    Operation("receive_where, ack", sql(ONE_KEY), 10, filled(100, keys=10)),
    Operation("receive 4, ack each", take_in_parts, 10, SINGLE),
    Operation("receive 1, nack", take(1, "nack"), 20, filled(20, singly=True)),
    Operation("receive 1, dead_letter", take(1, "dead_letter"), 20, filled(20, singly=True)),
    Operation("extend", extend, 40, hold),
    Operation("read 100 by offset", read_on, 4, filled(400)),
    Operation("redrive", sql("select pgqueue.redrive('s', 'c', p_max => 1)"), 10, dead(10)),
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


def figure(s: Session, operation: Operation, rounds: int) -> tuple[float, float]:
    """The microseconds of an operation, and as a multiple of the reference: the least of both."""
    prepare(s, operation)
    costs, references = [], []
    for _ in range(rounds + 1):
        operation.setup(s)
        references.append(s.reference())
        costs.append(
            s.cost(lambda: [operation.work(s) for _ in range(operation.count)]) / operation.count
        )
    # the first round fills the caches of the session
    return min(costs[1:]) / 1000, min(costs[1:]) / min(references[1:])


def measure(url: str, operations: list[Operation], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """By name of the operation: microseconds, and times the reference."""
    s = Session(url)
    with connection.connect(url) as conn:
        conn.execute(f"drop table if exists reference; {REFERENCE}".encode())
    for _ in range(5):
        s.reference()
    return {each.name: [round(n, 3) for n in figure(s, each, rounds)] for each in operations}


def last() -> dict[str, Any]:
    """What was kept last; empty before the first time."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else []
    return kept[-1] if kept else {}


def slower(url: str, operations: list[Operation], allowed: float) -> list[str]:
    """The operations that twice took more than was kept, by more than is allowed."""
    kept = last()["figures"]
    named = {each.name: each for each in operations if each.name in kept}

    def suspects(figures: dict[str, list[float]]) -> list[str]:
        return [
            name for name, (_, n) in figures.items() if name in kept and n > kept[name][1] * allowed
        ]

    found = suspects(measure(url, list(named.values())))
    again = measure(url, [named[name] for name in found], ROUNDS_OF_A_SUSPECT) if found else {}
    commit = last()["commit"]
    return [
        f"{name}: {again[name][1]:.2f} times the reference, {kept[name][1]:.2f} at {commit}"
        for name in suspects(again)
    ]


def main(
    keep: Annotated[bool, typer.Option(help="Keep the figures as those of this commit.")] = False,
) -> None:
    """Measure, and compare with the figures that were kept last."""
    with (
        tempfile.TemporaryDirectory(prefix="pgqueue-bench-") as folder,
        embedded.start(Path(folder) / "data", settings=SETTINGS) as server,
    ):
        with connection.connect(server.url) as conn:
            schema.install(conn)
        if not keep:
            found = slower(server.url, OPERATIONS, ALLOWED)
            print("\n".join(found) or f"no operation takes more than at {last()['commit']}")
            sys.exit(bool(found))
        figures = measure(server.url, OPERATIONS)
    show(figures)
    write(figures)


def show(figures: dict[str, list[float]]) -> None:
    table = Table("operation", "µs of the server", "times the reference", "kept last")
    kept = last().get("figures", {})
    for name, (micros, times) in figures.items():
        was = f"{kept[name][1]:.2f}" if name in kept else ""
        table.add_row(name, f"{micros:.0f}", f"{times:.2f}", was)
    Console().print(table)


def write(figures: dict[str, list[float]]) -> None:
    git = ["git", "-C", str(KEPT.parent)]
    commit = subprocess.check_output([*git, "describe", "--always", "--dirty"], text=True).strip()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else []
    entry = {"commit": commit, "day": time.strftime("%Y-%m-%d"), "figures": figures}
    lines = [json.dumps(each, ensure_ascii=False) for each in [*kept, entry]]
    KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
