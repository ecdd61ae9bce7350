"""`python -m tests.benchmarks.kills`: millions of messages through kill -9 after kill -9.

A query copies one stream to another, exactly once, while a producer fills the first. In each round
something dies at a random moment: the application, its JVM, a Python worker, an executor, the
source's process, the backends, Postgres. In the end each message must be in the second stream once.
With --table, the commits of the query also merge rows into a table, which must be equal to what the
messages say.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import psycopg
import typer

import spark_pgqueue
from spark_pgqueue import embedded, java
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements
from tests.processes import Child

APPLICATION = """
    import sys
    from tests.sessions import session
    url, checkpoint, master, batch, table, trigger = sys.argv[1:]
    spark = session(master)
    source = spark.readStream.format("pgqueue").options(
        url=url, stream="in", consumer="c", minPartitions=2, visibilityTimeout="10s",
        maxMessagesPerTrigger=batch,
    )
    rows = source.load().select("key", "data")
    into = {}
    if table == "table":
        rows = rows.selectExpr("*", "struct(cast(data as bigint) % 9973 as id,"
                               " cast(data as bigint) as version, data % 5 = 0 as gone) as row")
        into = {"table": "public.rows", "mergeKeys": "id", "sequenceBy": "version"}
        into["deleteWhen"] = "gone"
    sink = rows.writeStream.format("pgqueue").options(
        url=url, stream="out", checkpointLocation=checkpoint, **into
    )
    query = (sink.trigger(availableNow=True) if trigger == "now" else sink).start()
    query.awaitTermination()
"""

# The table, as far as it differs from what the messages say: the last one of each id counts.
WRONG_ROWS = """
with said as (
    select n %% 9973 as id, max(n) as version from generate_series(1, %s::int8) n
    group by 1 having max(n) %% 5 <> 0
)
select count(*) from (
    (select * from said except select id, version from public.rows)
    union all
    (select id, version from public.rows except select * from said)) w
"""

SENT_TOGETHER = 10_000
PATIENCE = 300.0
"""Seconds after a kill within which the query has to go on."""


class Producer(threading.Thread):
    """Sends the numbers from 1 on; where a commit was cut off, the database says how far it came.

    Args:
        url: the database, with a table `produced (sent bigint)` of one row.
        messages: how many to send.
    """

    def __init__(self, url: str, messages: int):
        super().__init__(daemon=True)
        self._url = url
        self._messages = messages

    def run(self) -> None:
        while True:
            try:
                with connection.connect(self._url) as conn:
                    self._send(conn)
                return
            except (psycopg.Error, PgQueueError):
                time.sleep(0.1)

    def _send(self, conn: psycopg.Connection) -> None:
        ((sent,),) = conn.execute("select sent from produced").fetchall()
        while sent < self._messages:
            upto = min(sent + SENT_TOGETHER, self._messages)
            with conn.transaction():
                conn.execute("update produced set sent = %s", [upto])
                conn.execute(
                    "select count(*) from pgqueue.send_batch('in', array("
                    "select i::text from generate_series(%s::int8, %s) i), array("
                    "select 'k' || i %% 1000 from generate_series(%s::int8, %s) i))",
                    [sent + 1, upto, sent + 1, upto],
                )
            sent = upto


class Query:
    """The application; started again when it has ended."""

    def __init__(self, url: str, home: Path, master: str, batch: int, table: bool):
        kind = "table" if table else "stream"
        self._arguments = (url, str(home / "checkpoint"), master, str(batch), kind)
        self.child = self._start("always")
        self.starts = 1

    def _start(self, trigger: str) -> Child:
        return Child(APPLICATION, *self._arguments, trigger)

    def keep_up(self) -> None:
        """Start it again if it has ended."""
        if self.child.process.poll() is not None:
            self.child.kill()  # what it left behind
            self.child = self._start("always")
            self.starts += 1

    def finish(self) -> None:
        """Stop it, and let another one do the rest."""
        self.child.kill()
        with self._start("now") as child:
            if child.wait(1800) != 0:
                raise SystemExit(f"the last run failed:\n{child.output[-5000:]}")


class Killer:
    """What dies in each round."""

    def __init__(self, server: embedded.Server, query: Query, statements: Statements):
        self._server = server
        self._query = query
        self._statements = statements
        self.ways: dict[str, Callable[[], bool]] = {
            "application": self._application,
            # Also those that plan and commit, and the parents of workers.
            "Python worker": partial(self._process, "pyspark.daemon"),
            "executor": partial(self._process, "CoarseGrainedExecutorBackend"),
            "all backends": self._backends,
            "Postgres, immediate": self._postgres,
            "process of the source": partial(self._process, "python_streaming_source_runner"),
            "JVM of the driver": partial(self._process, "org.apache.spark.deploy.SparkSubmit"),
            "backend by kill -9": self._backend,
        }

    def _application(self) -> bool:
        self._query.child.kill()
        return True

    def _process(self, name: str) -> bool:
        if not (found := self._query.child.descendants(name)):
            return False
        with suppress(psutil.NoSuchProcess):
            random.choice(found).kill()
            return True
        return False

    def _backends(self) -> bool:
        sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity "
        sql += "where backend_type = 'client backend' and pid <> pg_backend_pid()"
        return self._statements.row(sql)[0] > 0

    def _backend(self) -> bool:
        sql = "select pid from pg_stat_activity where backend_type = 'client backend' "
        rows = self._statements.rows(sql + "and pid <> pg_backend_pid()")
        if rows:
            psutil.Process(random.choice(rows)[0]).kill()
        return bool(rows)

    def _postgres(self) -> bool:
        self._server.restart("immediate")
        return True


def rounds_of_kills(
    server: embedded.Server,
    home: Path,
    messages: int,
    rounds: int,
    master: str,
    only: list[str],
    table: bool,
) -> int:
    """Do all rounds; returns how many messages are missing or there twice, and rows wrong."""
    began = time.monotonic()
    statements = Statements(server.url, patience=60, repeat=True)
    query = Query(server.url, home, master, max(1000, messages // 50), table)
    killer = Killer(server, query, statements)
    names = only or list(killer.ways)
    if not only and not master.startswith("local-cluster"):
        names.remove("executor")  # it is the JVM
    producer = Producer(server.url, messages)
    producer.start()

    def done() -> int:
        sql = "select settled from pgqueue.consumer_stats where stream = 'in' and consumer = 'c'"
        return statements.row(sql)[0]

    def wait_for(settled: int) -> int:
        end = time.monotonic() + PATIENCE
        while (now := done()) < settled:
            query.keep_up()
            if time.monotonic() > end:
                raise SystemExit(f"it does not go on:\n{query.child.output[-5000:]}")
            time.sleep(0.1)
        return now

    try:
        for number in range(rounds):
            wait_for(max(1, messages * number // (rounds + 1)))
            name = names[number % len(names)]
            time.sleep(random.uniform(0, 1))
            before, starts, died = done(), query.starts, time.monotonic()
            while not killer.ways[name]():
                query.keep_up()
                time.sleep(0.01)
            wait_for(min(before + 1, messages))
            print(
                f"round {number + 1:2}: {name}, after {died - began:.1f} s, with {before:,} done; "
                f"went on after {time.monotonic() - died:.1f} s"
                + (", started again" if query.starts > starts else ""),
                flush=True,
            )
        producer.join()
    finally:
        query.child.kill()
    query.finish()
    (left,) = statements.row("select backlog + claimed + dead from pgqueue.consumer_stats")
    print(f"{time.monotonic() - began:.0f} s; {left} messages are left to the consumer")
    if table:
        (wrong,) = statements.row(WRONG_ROWS, [messages])
        (rows,) = statements.row("select count(*) from public.rows")
        print(f"{rows:,} rows are in the table, and {wrong:,} are wrong or missing")
        left += wrong
    statements.close()
    return left + count(server.url, messages)


def count(url: str, messages: int) -> int:
    """Read the second stream; returns how many messages are missing, twice or unheard of."""
    seen = bytearray(messages + 1)
    others = 0
    with spark_pgqueue.connect(url) as queue:
        for batch in queue.read("out", max_messages=10_000):
            for message in batch.messages:
                number = int(message.data)
                if 1 <= number <= messages and seen[number] < 255:
                    seen[number] += 1
                else:
                    others += 1
    missing = seen.count(0) - 1
    twice = messages - missing - seen.count(1)
    print(
        f"{messages:,} messages sent: {seen.count(1):,} arrived once, {missing:,} are missing, "
        f"{twice:,} came more than once, {others:,} were never sent"
    )
    return missing + twice + others


def main(
    messages: Annotated[int, typer.Option(help="How many.", min=1000)] = 5_000_000,
    rounds: Annotated[int, typer.Option(help="Of kills.", min=1)] = 10,
    master: Annotated[str, typer.Option(help="Of Spark.")] = "local-cluster[2,1,1024]",
    only: Annotated[
        list[str] | None, typer.Option(help="What dies, in turn, in place of all.")
    ] = None,
    table: Annotated[bool, typer.Option(help="Merge rows into a table, too.")] = False,
    seed: Annotated[int | None, typer.Option(help="For the moments of the kills.")] = None,
) -> None:
    """Kill whatever there is, round after round, and count what arrives."""
    random.seed(seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    java.ensure_java_home()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    home = Path(tempfile.mkdtemp(prefix="pgqueue-kills-"))
    try:
        # What a killed server has written is with the operating system: no need for the disk.
        settings = {"fsync": "off", "max_wal_size": "2GB", "max_connections": 100}
        with embedded.start(home / "postgres", settings=settings) as server:
            with connection.connect(server.url) as conn:
                schema.install(conn)
                conn.execute("select pgqueue.create_stream(s) from unnest('{in,out}'::text[]) s")
                # A late row behind a delete would come back.
                order = "stream" if table else "none"
                conn.execute("select pgqueue.create_consumer('in', 'c', p_ordering => %s)", [order])
                conn.execute("create table public.rows (id int8 primary key, version int8)")
                conn.execute("create table produced as select 0::int8 as sent")
            wrong = rounds_of_kills(server, home, messages, rounds, master, only or [], table)
    finally:
        with suppress(OSError):
            shutil.rmtree(home)
    print("nothing lost, nothing doubled" if not wrong else f"WRONG: {wrong}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
