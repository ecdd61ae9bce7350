"""Retention while everybody is at work: senders, claimers, new consumers, killed maintainers."""

import os
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.multirange import Int8Multirange
from psycopg.types.range import Int8Range

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock
from tests.sql.queue import Conn, call, consumer, maintain, one, value

# On a busy machine little is trimmed in a few seconds: a race goes on until enough was.
pytestmark = [pytest.mark.longer, pytest.mark.timeout(900)]
PATIENCE = 6  # times as long, then it gives up
ENOUGH = 3

# Leaves of a few kB, trimmed a few publications at a time; what was trimmed is written down.
SMALL = """
create or replace function _pgqueue.segment_bytes_at_once() returns bigint
    language sql immutable as 'select 32768::bigint';
create or replace function _pgqueue.trim_at_once() returns int
    language sql immutable as 'select 100';
create table public.gone (publication_id bigint, seqs int8multirange);
create function public.note() returns trigger language plpgsql security definer as
    $$ begin insert into public.gone values (old.publication_id, old.seqs); return null; end $$;
create trigger note after delete on pgqueue.publications
    for each row execute function public.note();
"""


class Race:
    """Threads that work on the stream s until the time is up, and what they wrote down.

    Attributes:
        progress: how often what the race is about has happened: it goes on until that is ENOUGH,
            or until it has gone on for PATIENCE times as long.
    """

    progress: Callable[[], int]

    def __init__(self, conn: Conn, url: str, run_for: float):
        self.conn, self.url = conn, url
        self.stream: int = value(conn, "create_stream", "s", p_settings='{"notify": false}')
        self.began = time.monotonic()
        self.ends = self.began + run_for
        self.gives_up = self.began + run_for * PATIENCE
        self.sent: set[int] = set()
        self.done: dict[str, list[int]] = defaultdict(list)
        self.maintainers: list[int] = []
        self.passes = 0
        self.chance = random.Random(7)

    def over(self) -> bool:
        return time.monotonic() > self.ends

    def watch(self) -> None:
        """Go on while too little has happened to say anything."""
        while not self.over():
            if self.progress() < ENOUGH and time.monotonic() < self.gives_up:
                self.ends = max(self.ends, time.monotonic() + 2)
            time.sleep(0.5)

    def assert_progress(self, what: str) -> None:
        """A run in which nothing was at stake is no success."""
        trimmed = one(self.conn, "select coalesce(sum(message_count), 0) from pgqueue.trims")
        report = (
            f"{what}: {self.progress()}; {len(self.sent)} messages were sent and {trimmed} trimmed"
            f" in {time.monotonic() - self.began:.0f} s, at a load of {os.getloadavg()[0]:.0f}"
        )
        print(report)
        assert self.progress(), f"this run says nothing. {report}"

    def send(self) -> None:
        """By each way to publish, some rolled back, some prepared first, some open for a while."""
        with connection.connect(self.url) as conn:
            while not self.over():
                way = self.chance.random()
                prepared = f"p{uuid.uuid4().hex}" if self.chance.random() < 0.1 else None
                conn.execute("begin")
                if way < 0.5:
                    seqs = [value(conn, "send", "s", "x" * 100, str(self.chance.randrange(9)))]
                elif way < 0.8:
                    data = ["x" * 100] * self.chance.randrange(1, 30)
                    seqs = [s for (s,) in call(conn, "send_batch", "s", data)]
                else:
                    numbers = value(conn, "reserve", self.stream, 40)
                    seqs = [s for r in numbers for s in range(r.lower, r.upper)]
                    copy = f"copy pgqueue.messages_{self.stream} (seq, data) from stdin"
                    with conn.cursor().copy(copy.encode()) as rows:
                        for s in seqs:
                            rows.write_row((s, "x" * 100))
                    value(conn, "publish_written", "s", numbers)
                if self.chance.random() < 0.1:
                    time.sleep(self.chance.random() / 5)
                if self.chance.random() < 0.2:
                    conn.execute("rollback")
                    continue
                if prepared:
                    conn.execute(f"prepare transaction '{prepared}'".encode())
                    time.sleep(self.chance.random() / 10)
                    conn.execute(f"commit prepared '{prepared}'".encode())
                else:
                    conn.execute("commit")
                self.sent |= set(seqs)

    def work(self, name: str, hold: float = 0.0) -> None:
        """Receive and acknowledge; now and then return some, or hold them for a while."""
        with connection.connect(self.url) as conn:
            idle = 0
            while idle < 3:
                rows = call(conn, "receive", "s", name, self.chance.choice([1, 10, 300]))
                idle = 0 if rows else idle + self.over()
                if not rows:
                    time.sleep(0.02)
                    continue
                received = time.monotonic()
                if hold and not self.over():
                    time.sleep(self.chance.random() * hold)
                if self.chance.random() < 0.05 and not self.over():
                    value(conn, "nack", rows[0].claim_id)
                    continue
                acked = value(conn, "ack", rows[0].claim_id)
                if acked == len(rows):
                    self.done[name] += [row.seq for row in rows]
                    continue
                took = time.monotonic() - received
                assert took > 20, self.about(name, rows, acked)  # or the lease has expired
                assert acked == 0

    def about(self, name: str, rows: list[Any], acked: int) -> str:
        """What there is to know of a claim that is not as it was received."""
        seqs = sorted(row.seq for row in rows)
        around = Int8Multirange([Int8Range(seqs[0] - 100, seqs[-1] + 100)])
        found = {
            what: self.conn.execute(f"select * from {what} where seqs && %s".encode(), [around])
            for what in ("pgqueue.publications", "public.gone", "pgqueue.consumer_messages")
        }
        segments = self.conn.execute("select * from pgqueue.segments order by lo")
        return "\n".join(
            [f"{name} received {seqs} as {rows[0].claim_id}, acknowledged {acked}"]
            + [f"{what}: {cursor.fetchall()}" for what, cursor in found.items()]
            + [f"segments: {segments.fetchall()}"]
        )

    def maintain(self) -> None:
        """Housekeeping whose backend is killed again and again."""
        while not self.over():
            with suppress(psycopg.OperationalError), connection.connect(self.url) as conn:
                self.maintainers.append(conn.info.backend_pid)
                while not self.over():
                    call(conn, "maintain")
                    self.passes += 1

    def kill(self) -> None:
        """Every other time only after a complete pass: a busy machine would never get to one."""
        with connection.connect(self.url) as conn:
            while not self.over():
                awaited = self.passes + self.chance.choice([0, 1])
                while self.passes < awaited and not self.over():
                    time.sleep(0.01)
                time.sleep(self.chance.random() / 5)
                if self.maintainers:
                    pid = self.maintainers.pop(0)
                    conn.execute("select pg_terminate_backend(%s)", [pid])

    def look(self) -> None:
        """Somebody who holds an old snapshot, and has looked at messages in some of them."""
        with connection.connect(self.url) as conn:
            while not self.over():
                with conn.transaction():
                    conn.execute("set transaction isolation level repeatable read")
                    conn.execute("select count(*) from pgqueue.publications")
                    if self.chance.random() < 0.3:
                        conn.execute("select count(*) from pgqueue.messages")
                    time.sleep(self.chance.random() / 3)

    def run(self, *work: Callable[[], Any]) -> None:
        with ThreadPoolExecutor(len(work) + 1) as pool:
            for future in [pool.submit(w) for w in (self.watch, *work)]:
                future.result()


@pytest.fixture
def race(conn: Conn, url: str, run_for: float) -> Race:
    conn.execute(SMALL.encode())
    return Race(conn, url, run_for)


@pytest.fixture
def run_for() -> float:
    """For how many seconds the race goes on at least."""
    return 15


@pytest.mark.promise("operations: maintain: two at once, maintain_all, nobody")
def test_keep_loses_nothing_but_what_everybody_was_done_with(race: Race) -> None:
    """New consumers at earliest get all that was not trimmed before they were there."""
    conn = race.conn
    for ordering in ("none", "key"):
        consumer(conn, ordering, ordering)
    value(conn, "set_retention", "s", p_done=True)
    maintain(conn)  # the first segment: on a busy machine it is long in coming. (Not so below.)
    before: dict[str, set[int]] = {}

    def create() -> None:
        with connection.connect(race.url) as other:
            while not race.over():
                time.sleep(race.chance.random() / 2)
                if len(before) == 3 and not one(other, "select count(*) from public.gone"):
                    continue  # each has all to do: on a busy machine nothing would ever be done
                name = f"new {len(before)}"
                with other.transaction():
                    consumer(other, name)
                    gone = one(other, "select range_agg(seqs) from public.gone")
                    before[name] = checker.numbers(gone)
                workers.submit(race.work, name)

    race.progress = lambda: sum(map(bool, before.values()))
    with ThreadPoolExecutor(64) as workers:
        race.run(
            race.send, race.send, race.send,
            lambda: race.work("none"), lambda: race.work("none"), lambda: race.work("key"),
            lambda: race.work("key"), race.maintain, race.maintain, race.kill, race.look, create,
        )  # fmt: skip
    for name in ("none", "key", *before):
        race.work(name)  # what was committed last
    for name, seqs in race.done.items():
        assert len(seqs) == len(set(seqs)), f"{name} was given some twice"
        missing = race.sent - set(seqs) - before.get(name, set())
        assert not missing, f"{name} lost {sorted(missing)[:10]}"
        assert not set(seqs) - race.sent
    assert len(before) >= 3
    race.assert_progress("consumers made after something was trimmed")
    checker.check(conn)
    everything_goes(conn)


def test_drop_lets_each_message_be_acknowledged_or_skipped(race: Race) -> None:
    """None both, none neither, and none out of a live claim."""
    conn = race.conn
    for ordering in ("none", "key", "stream"):
        consumer(conn, ordering, ordering)
    value(conn, "set_retention", "s", p_messages=500, p_unread="drop")

    def skipped() -> int:
        with connection.connect(race.url) as other:
            return one(other, "select coalesce(sum(message_count), 0)::int from pgqueue.skips")

    race.progress = lambda: skipped() // 100
    race.run(
        race.send, race.send,
        *(lambda name=name: race.work(name, 0.2) for name in ("none", "key", "stream", "key")),
        race.maintain, race.maintain, race.kill,
    )  # fmt: skip
    for name in ("none", "key", "stream"):
        race.work(name)
    race.assert_progress("hundreds of messages skipped")
    skips = {
        name: set(seqs)
        for name, seqs in conn.execute(
            "select c.name, array(select s from unnest(k.seqs) r,"
            " generate_series(lower(r), upper(r) - 1) s)"
            " from pgqueue.skips k join pgqueue.consumers c using (consumer_id)"
        )
    }
    for name in ("none", "key", "stream"):
        done = race.done[name]
        assert len(done) == len(set(done)), f"{name} was given some twice"
        assert not set(done) & skips.get(name, set()), f"{name}: acknowledged and skipped"
        assert set(done) | skips.get(name, set()) == race.sent, name
    checker.check(conn)


def everything_goes(conn: Conn) -> None:
    """Nobody is at work any more: all that is not needed is trimmed, a few segments are left."""
    for _ in range(3):
        clock.pass_time(conn, timedelta(days=2))
        maintain(conn)
    assert one(conn, "select count(*) from pgqueue.messages") == 0
    assert one(conn, "select count(*) from pgqueue.publications") == 0
    assert one(conn, "select count(*) from pgqueue.segments") <= 4
