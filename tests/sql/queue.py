"""The queue's functions as Python calls, thin enough to be read as SQL.

`call` and `value` reach every function; the others are for what most tests do, with the stream s
and its consumer c, which the fixture `stream` and `consumer` make. Test files import all that is in
`__all__`: it is the vocabulary of these tests.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from spark_pgqueue.client import arguments
from tests.sql import clock, internals
from tests.sql.internals import rows

__all__ = [
    "AT_ONCE", "NEEDS", "ORDERINGS", "SETTINGS", "TAKEN_OVER", "Conn", "Reader", "Session",
    "acked", "action", "age_claims", "alter", "call", "claim_of", "claim_one", "consumer",
    "cursor_consumer", "dead_publication", "delivered", "maintain", "now", "one", "publish",
    "raises", "receive", "rows", "scanned", "seconds", "send", "send_all", "send_key",
    "send_keys", "seqs_of", "settle", "stage", "state", "states", "stats", "value",
    "wait_for_a_lock", "warned",
]  # fmt: skip

Conn = psycopg.Connection
Session = Callable[[], Conn]

ORDERINGS = ["none", "key", "stream"]
TAKEN_OVER = "the visibility timeout expired"

AT_ONCE = {"max_deliver_count": "never", "backoff": "constant", "backoff_jitter": 0}
"""Settings by which what failed comes again at once, and for ever."""

SETTINGS: dict[str, dict[str, Any]] = {
    "consumer": {
        "visibility_timeout": "00:01:00",
        "max_deliver_count": "never",
        "backoff": "linear",
        "backoff_base": "00:00:02",
        "backoff_cap": "02:00:00",
        "backoff_jitter": 0.5,
        "max_backlog": 1000,
        "on_full": "drop_oldest",
        "max_in_flight": 1000,
        "rate_limit": 1000,
        "rate_interval": "00:00:01",
        "fair": True,
        "per_key_limit": 1000,
        "per_key_capacity": 1000,
        "per_key_interval": "00:00:01",
        "per_key_burst": 1000,
        "per_key_latest": True,
        "keep_history": "1 day",
        "notify_done": True,
    },
    "stream": {
        "notify": False,
        "max_bytes": 1000,
        "max_header_bytes": 1000,
        "dedup_window": "1 day",
        "schema": "id bigint",
    },
}
"""A value of each setting that is not its default, as Postgres shows it.

With these values, a consumer gets a few messages at once.
"""

NEEDS = {
    "rate_limit": {"rate_interval": "00:00:01"},
    "rate_interval": {"rate_limit": 1000},
    "per_key_burst": {"per_key_interval": "00:00:01"},
}
"""Settings of a consumer that others need."""


def call(conn: Conn, function: str, *args: Any, **named: Any) -> list[Any]:
    """Call a function, of the schema pgqueue if it has none; returns its rows as named tuples."""
    arguments = [sql.Placeholder() for _ in args] + [
        sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder()) for name in named
    ]
    schema, _, name = function.rpartition(".")
    query = sql.SQL("select * from {}({})").format(
        sql.Identifier(schema or "pgqueue", name), sql.SQL(", ").join(arguments)
    )
    cur = conn.cursor(row_factory=namedtuple_row)
    return cur.execute(query, [*args, *named.values()]).fetchall()


def value(conn: Conn, function: str, *args: Any, **named: Any) -> Any:
    """Call `pgqueue.<function>` and return its one value; None for no row."""
    found = call(conn, function, *args, **named)
    return found[0][0] if found else None


def scanned(
    conn: Conn, table: str, consumer: str | None = None, /, *bounds: Any, **columns: str
) -> list[Any]:
    """The ranges of a table of the stream s; columns by their names, with their types."""
    types = "".join(f", {name} {type_}" for name, type_ in columns.items())
    given = ["s", *([] if table == "claimed" else [table]), consumer, list(columns), *bounds]
    function = "scan_claimed" if table == "claimed" else "scan"
    return rows(
        conn,
        f"select * from pgqueue.{function}({', '.join(['%s'] * len(given))})"
        f" as m (lo bigint, hi bigint{types})",
        *given,
    )


def one(conn: Conn, query: Any, *args: Any) -> Any:
    """The first value that a query returns."""
    row = conn.execute(query, args or None).fetchone()
    return None if row is None else row[0]


@contextmanager
def raises(
    sqlstate: str, match: str | None = None, column: str | None = None
) -> Iterator[pytest.ExceptionInfo[psycopg.Error]]:
    """A call fails with this code and such a message, and names this argument."""
    with pytest.raises(psycopg.Error, match=match) as caught:
        yield caught
    assert caught.value.sqlstate == sqlstate
    assert column in (None, caught.value.diag.column_name)


@contextmanager
def warned(conn: Conn) -> Iterator[list[str]]:
    """What the server says of calls, besides their answers: warnings and notices."""
    said: list[str] = []

    def note(notice: psycopg.errors.Diagnostic) -> None:
        said.append(notice.message_primary or "")

    conn.add_notice_handler(note)
    yield said
    conn.remove_notice_handler(note)


# Consumers and messages of the stream s


def consumer(conn: Conn, name: str = "c", ordering: str = "none", **options: Any) -> int:
    """Make a consumer that starts at the first message; returns its id.

    An option is an argument, if its name begins with p_, or else a setting. What is not given is as
    AT_ONCE says, unless p_settings are None: then all are the defaults.
    """
    given = {name: option for name, option in options.items() if name.startswith("p_")}
    settings = {name: option for name, option in options.items() if name not in given}
    asked = given.pop("p_settings", {})
    if asked is not None:
        asked = asked.obj if isinstance(asked, Jsonb) else asked
        asked = json.loads(asked) if isinstance(asked, str) else asked
        settings = AT_ONCE | asked | settings
        given["p_settings"] = arguments.settings("settings", settings)
    given = {"p_start": "earliest", "p_ordering": ordering, **given}
    return value(conn, "create_consumer", "s", name, **given)


def alter(conn: Conn, name: str = "c", **settings: Any) -> None:
    """Change settings of a consumer."""
    value(conn, "alter_consumer", "s", name, arguments.settings("settings", settings))


def cursor_consumer(conn: Conn, name: str = "c", **options: Any) -> int:
    """Make a consumer that takes with its cursor alone, and not ahead of it: see test_ahead.py."""
    return consumer(conn, name, notify_done=True, **options)


def send(conn: Conn, data: str = "x", **options: Any) -> int:
    """Send a message, without a key; returns its number."""
    return value(conn, "send", "s", data, **options)


def send_key(conn: Conn, key: str = "k") -> int:
    """Send a message of this key; returns its number."""
    return value(conn, "send", "s", "x", p_key=key)


def send_all(conn: Conn, data: list[str], **options: Any) -> list[int]:
    """Send messages together; returns their numbers."""
    return [row[0] for row in call(conn, "send_batch", "s", data, **options)]


def send_keys(conn: Conn, *keys: str | None) -> list[int]:
    """Send messages of these keys together; returns their numbers."""
    return send_all(conn, ["x"] * len(keys), p_keys=list(keys))


def dead_publication(conn: Conn) -> None:
    """What a publisher that was rolled back leaves: an id that nobody will use."""
    conn.execute("begin")
    send_key(conn)
    conn.execute("rollback")


# Claims


def receive(conn: Conn, size: int = 100, name: str = "c", **options: Any) -> list[Any]:
    """Receive messages."""
    return call(conn, "receive", "s", name, size, **options)


def age_claims(conn: Conn, name: str = "c") -> None:
    """All claims of a consumer become long claims; a message with another key is settled."""
    clock.pass_time(conn, seconds(2))
    seq = send_key(conn, "other")
    rows = receive(conn, 100, name)
    assert seqs_of(rows) == [seq]
    value(conn, "ack", claim_of(rows))


def claim_one(conn: Conn) -> int:
    """Claim a message, with a claim that fits the next run: the cheap way, without a lock."""
    (seq,) = seqs_of(receive(conn, 1))
    return seq


def claim_of(rows: list[Any]) -> int:
    """The claim of what `receive` returned."""
    (claim_id,) = {row.claim_id for row in rows}
    return claim_id


def seqs_of(rows: list[Any]) -> list[int]:
    """The sequence numbers of what `receive` returned, in its order."""
    return [row.seq for row in rows]


def acked(conn: Conn, stream: str, consumer: str, size: int = 1000) -> list[int]:
    """Receive and acknowledge everything that can be had; returns it in the order of delivery."""
    got: list[int] = []
    while found := call(conn, "receive", stream, consumer, size):
        got += seqs_of(found)
        value(conn, "ack", claim_of(found))
    return got


def delivered(conn: Conn, size: int = 100) -> list[Any]:
    """Receive and acknowledge everything; returns the rows in the order of delivery."""
    got: list[Any] = []
    while found := receive(conn, size):
        got += found
        value(conn, "ack", claim_of(found))
    return got


# What the views say


def states(conn: Conn, name: str = "c") -> dict[int, str]:
    """The states of what a consumer is not done with."""
    found = rows(
        conn, "select seq, state from pgqueue.message_states where consumer = %s order by seq", name
    )
    assert len({row.seq for row in found}) == len(found)
    return {row.seq: row.state for row in found}


def state(conn: Conn, seq: int, name: str = "c") -> Any:
    """All that is known of a message."""
    (row,) = rows(
        conn, "select * from pgqueue.message_states where consumer = %s and seq = %s", name, seq
    )
    return row


def stats(conn: Conn, name: str = "c") -> Any:
    """The row of a consumer in consumer_stats."""
    (row,) = rows(conn, "select * from pgqueue.consumer_stats where consumer = %s", name)
    return row


# Time and other sessions


def maintain(conn: Conn, calls: int = 1000) -> dict[str, int]:
    """Call `maintain` until nothing is unfinished; returns what it did in all."""
    done: Counter[str] = Counter()
    for _ in range(calls):
        answer = dict(call(conn, "maintain"))
        done.update(answer)
        if not answer["unfinished"]:
            break
    return done


def now(conn: Conn) -> datetime:
    """The server's clock."""
    return one(conn, "select clock_timestamp()")


def seconds(n: float) -> timedelta:
    """So many seconds."""
    return timedelta(seconds=n)


def wait_for_a_lock(conn: Conn, waiters: int = 1) -> None:
    """Until somebody waits for one, or so many do."""
    end = time.monotonic() + 20
    while one(conn, "select count(distinct pid) from pg_locks where not granted") < waiters:
        assert time.monotonic() < end, "nobody waits"
        time.sleep(0.01)


# Spark's sides


def stage(
    conn: Conn, stream: int, n: int, batch: int = 0, sink: str = "sink", data: str = "x",
    **options: Any,
):  # fmt: skip
    """Write n messages and stage them, as a task does. Returns the block."""
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, n, data=data)
        block = f"{{[{seqs[0]},{seqs[-1] + 1})}}"
        return value(conn, "stage", sink, batch, stream, block, **options)


def publish(
    conn: Conn, stream: int | None, blocks: list[int], n: int, batch: int = 0, sink: str = "sink",
    **options: Any,
) -> bool:  # fmt: skip
    """Publish a batch of so many messages; whether it was this call that did."""
    return value(conn, "publish_staged", sink, batch, stream, blocks, n, **options)


def action(action: str, seqs: list[int], name: str = "c", **more: Any) -> dict[str, Any]:
    """What a row of a write says, of these messages."""
    ranges = ",".join(f"[{seq},{seq + 1})" for seq in seqs)
    return {"action": action, "stream": "s", "consumer": name, "seqs": f"{{{ranges}}}", **more}


def settle(
    conn: Conn, *actions: dict[str, Any], batch: int = 0, sink: str = "sink", **options: Any
) -> tuple[bool, int, int]:
    """Settle messages by their numbers: whether it was this call, how many, how many not."""
    (row,) = call(conn, "settle_messages", sink, batch, Jsonb(list(actions)), **options)
    return tuple(row)


class Reader:
    """A checkpoint: what Spark's offset log and the source keep of it."""

    def __init__(self, conn: Conn, consumer_id: int):
        self.conn, self.id, self.consumer_id = conn, uuid.uuid4(), consumer_id
        self.claim_id = self.messages = 0

    def ask(self, size: int | None = None, **options: Any) -> Any:
        """latestOffset, which does not move the checkpoint."""
        (row,) = call(
            self.conn, "reader_claim", self.id, self.consumer_id, self.claim_id, self.messages,
            size, **options,
        )  # fmt: skip
        return row

    def move(self, row: Any) -> None:
        """The batch up to this end offset is done."""
        self.claim_id, self.messages = row.claim_id, row.messages

    def plan(self, end: Any) -> list[int]:
        """The messages of the batch, in order."""
        ranges = call(self.conn, "reader_plan", self.id, self.claim_id, end.claim_id)
        return [seq for r in ranges for seq in range(r.lo, r.hi)]

    def resume(self, end: Any, process: uuid.UUID | None = None) -> Any:
        """planned, taken_over, gone; in a process of Spark, or in none."""
        (row,) = rows(
            self.conn,
            "select planned, taken_over, gone from pgqueue.reader_resume(%s, %s, %s, %s, %s)",
            self.id, self.consumer_id, self.claim_id, end.claim_id, process,
        )  # fmt: skip
        return row

    def start(self, end: Any, quarantine_after: int | None) -> Any:
        """A query starts and replays the batch: planned, taken_over, gone, returned, poison."""
        (row,) = call(
            self.conn, "reader_resume", self.id, self.consumer_id, self.claim_id, end.claim_id,
            uuid.uuid4(), quarantine_after,
        )  # fmt: skip
        return row

    def lost(self, end: Any) -> int:
        """How many messages of the batch it has lost."""
        return value(self.conn, "reader_lost", self.id, self.claim_id, end.claim_id)
