"""PgQue, by its SQL, which no package ships: a log, of which a ticker makes batches."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.benchmarks.compare.sides import Delivery, number_of, payload
from tests.benchmarks.harness import run

QUEUE = "compare"
PAYLOAD = 3
"""Which column of a message the payload is."""

MOST = 1_000_000
"""Messages of a batch at most: an acknowledgement is for all of a batch, received or not."""

TRIES = 100

SEND = "select pgque.send(%s, %s::jsonb)"
SEND_BATCH = "select pgque.send_batch(%s, 'default', %b::jsonb[])"
RECEIVE = "select * from pgque.receive(%s, %s, %s)"
RECEIVE_SHARED = "select * from pgque.receive_coop(%s, %s, %s, %s)"
LEFT = """
select (select count(*) from pgque.event_template
        where not pg_visible_in_snapshot(ev_txid, t.tick_snapshot))
       + (select count(*) from pgque.subscription m, pgque.get_batch_events(m.sub_batch)
          where m.sub_role = 'coop_member' and m.sub_batch is not null)
from pgque.subscription s
join pgque.consumer c on c.co_id = s.sub_consumer
join pgque.tick t on t.tick_queue = s.sub_queue and t.tick_id = s.sub_last_tick
where c.co_name = %s
"""


def version(sql: Path) -> str:
    """The version of its SQL."""
    found = re.search(r"function pgque\.version\(\).*?return '(.*?)'", sql.read_text(), re.DOTALL)
    return found[1] if found else "of an unknown version"


@dataclass(frozen=True)
class PgQue:
    """A queue and its consumers.

    Nothing is delivered before a tick. While messages come, `ticking` makes them as its own
    scheduler does; each tick makes a batch of what is new, however little that is.

    Attributes:
        sql: its `sql/pgque.sql`.
        shared: workers take turns for batches of one consumer (`receive_coop`).
        batch: messages to a tick, when the queue is filled before.
        period: seconds from tick to tick, of which 0.1 is its default.
        variant: for its name.
    """

    sql: Path
    shared: bool = False
    batch: int = 1
    period: float = 0.1
    variant: str = ""
    one_call: bool = False
    schema: str = "pgque"

    @property
    def name(self) -> str:
        return f"PgQue, {self.variant}" if self.variant else "PgQue"

    def install(self, conn: psycopg.Connection) -> None:
        if not run(conn, "select 1 from pg_namespace where nspname = 'pgque'"):
            run(conn, self.sql.read_text())

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        run(conn, "select pgque.create_queue(%s)", (QUEUE,))
        run(conn, "select pgque.set_queue_config(%s, 'ticker_max_count', '1')", (QUEUE,))
        for number in range(consumers):
            if self.shared:
                sql = "select pgque.subscribe_subconsumer(%s, %s, 'first')"
            else:
                sql = "select pgque.subscribe(%s, %s)"
            run(conn, sql, (QUEUE, f"c{number}"))

    def drop(self, conn: psycopg.Connection) -> None:
        run(conn, "drop schema pgque cascade")  # it drops no queue that has workers

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, SEND, (QUEUE, data))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        run(conn, SEND_BATCH, (QUEUE, data))

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        numbers = range(first, first + len(keys))
        for begin in range(0, len(keys), self.batch):
            some = numbers[begin : begin + self.batch]
            self.send_batch(conn, [payload(number) for number in some], [])
            tick(conn)

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        """A batch, whatever its size is."""
        if self.shared:
            worker = str(conn.info.backend_pid)
            rows = run(conn, RECEIVE_SHARED, (QUEUE, f"c{consumer}", worker, MOST))
        else:
            rows = run(conn, RECEIVE, (QUEUE, f"c{consumer}", MOST))
        return Delivery([number_of(row[PAYLOAD]) for row in rows], rows[0][1] if rows else None)

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        for _ in range(TRIES):  # batches may be empty
            delivery = self.receive(conn, MOST, consumer, None)
            if delivery.numbers or not self.left(conn, consumer):
                return delivery
            tick(conn)
        return Delivery([], None)

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        found = run(conn, "select pgque.ack(%s)", (delivery.handle,))[0][0]
        return found * len(delivery.numbers)

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        return run(conn, LEFT, (f"c{consumer}",))[0][0]


def tick(conn: psycopg.Connection) -> None:
    """Let the ticker have its turn, in a transaction of its own."""
    run(conn, "select pgque.ticker()")


@contextmanager
def ticking(url: str, side: object) -> Iterator[None]:
    """With a session that ticks; without one for sides of other systems."""
    if not isinstance(side, PgQue):
        yield
        return
    over = threading.Event()

    def work() -> None:
        with psycopg.connect(url, autocommit=True, prepare_threshold=0) as conn:
            following = time.perf_counter()
            while not over.wait(max(following - time.perf_counter(), 0)):
                tick(conn)
                following = max(following + side.period, time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
