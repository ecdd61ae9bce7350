"""What a database in use owes by each feature, and whether it is settled once after a change.

Claims, limits and queries of Spark are in `test_migrated_claims`.

Each feature is a generator: up to its `yield` it leaves something behind in streams of its own, and
after it looks that everything owed is delivered, or settled by who holds it, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb

from tests.sql import clock, internals
from tests.sql.core import rows
from tests.sql.queue import Conn, acked, call, claim_of, one, publish, seqs_of, stage, value

Feature = Callable[[Conn], Iterator[None]]
HOUR = timedelta(hours=1)
LONG = "100 days"
OWED = """
select stream, consumer, seq, state, priority, deliver_count, claim_id, last_error
from pgqueue.message_states order by 1, 2, 3
"""


def use_features(conn: Conn, *features: Feature) -> Callable[[], None]:
    """Leave behind what features leave, all or these; returns the check of it, for afterwards."""
    begun = [feature(conn) for feature in features or FEATURES]
    for each in begun:
        next(each)

    def check() -> None:
        for each in begun:
            assert next(each, "over") == "over"

    return check


def owed_of_all(conn: Conn) -> list[Any]:
    """What each consumer of each stream is not done with, and who holds it."""
    return rows(conn, OWED)


def make(conn: Conn, stream: str, ordering: str = "none", **settings: Any) -> int:
    """A stream with the consumer c; returns the consumer's id."""
    value(conn, "create_stream", stream)
    given = Jsonb({"backoff_jitter": 0, "visibility_timeout": LONG, **settings})
    return value(conn, "create_consumer", stream, "c", "earliest", ordering, p_settings=given)


def send(conn: Conn, stream: str, *keys: str | None, **more: Any) -> list[int]:
    """Send a message of each key, alone; returns their numbers."""
    return [value(conn, "send", stream, "x", key, **more) for key in keys]


def take(conn: Conn, stream: str, size: int = 1, **more: Any) -> tuple[int, list[int]]:
    """Receive messages, which must be there; returns the claim and their numbers."""
    found = call(conn, "receive", stream, "c", size, **more)
    return claim_of(found), seqs_of(found)


def settle(conn: Conn, held: list[tuple[int, list[int]]]) -> list[int]:
    """Acknowledge claims, each of which has what its owner believes; returns their messages."""
    for claim, seqs in held:
        assert value(conn, "ack", claim) == len(seqs), f"{claim} has not {seqs}"
        assert value(conn, "ack", claim) == 0, f"{claim} was acknowledged twice"
    return [seq for _, seqs in held for seq in seqs]


def rest(conn: Conn, stream: str, sent: list[int], *done: int) -> None:
    """All but what is done comes now, or in a day, and once."""
    got = acked(conn, stream, "c")
    clock.pass_time(conn, timedelta(days=1))
    got += acked(conn, stream, "c")
    assert sorted([*got, *done]) == sorted(sent), f"{stream}: {got} and {done} of {sent}"


def filters(conn: Conn) -> Iterator[None]:
    """A topic and a condition, over messages that were judged and others that were not."""
    value(conn, "create_stream", "filtered", "json")
    value(conn, "create_consumer", "filtered", "c", "earliest", "key", p_topic="a.*",
          p_where="$.data.n < 5")  # fmt: skip

    def say(key: str, n: int) -> int:
        return value(conn, "send", "filtered", f'{{"n": {n}}}', key)

    sent = [say("a.1", 1), say("a.2", 2)]
    say("b.1", 1)
    say("a.1", 9)
    held = [take(conn, "filtered")]
    sent.append(say("a.3", 3))
    say("c", 3)
    yield
    say("a.3", 7)
    sent.append(say("a.4", 4))
    rest(conn, "filtered", sent, *settle(conn, held))


def conditions(conn: Conn) -> Iterator[None]:
    """A claim of `receive_where`, and one in the same call as an acknowledgement."""
    make(conn, "where")
    sent = [value(conn, "send", "where", "x", p_headers=Jsonb({"n": n})) for n in range(8)]
    found = call(conn, "receive_where", "where", "c", "$.headers.n >= 5", 2)
    held = [(claim_of(found), seqs_of(found))]
    first, done = take(conn, "where", 2)
    held.append(take(conn, "where", 2, p_ack=first))
    yield
    found = call(conn, "receive_where", "where", "c", "$.headers.n == 7", 2)
    held.append((claim_of(found), seqs_of(found)))
    rest(conn, "where", sent, *done, *settle(conn, held))


def latest(conn: Conn) -> Iterator[None]:
    """Of a key the newest message, also beside one that is claimed."""
    make(conn, "latest", "key", per_key_latest=True)
    send(conn, "latest", "a", "b", "a", None)
    held = take(conn, "latest")
    newer = send(conn, "latest", "a", "b", "c", "c")
    yield
    newest = send(conn, "latest", "c")
    done = settle(conn, [held])
    got = acked(conn, "latest", "c")
    assert len(got) == len(set(got)), "delivered twice"
    assert not set(got) & set(done), "delivered again"
    assert {newer[0], newer[1], newest[0]} <= set(got), "the newest of a key"
    assert newer[2] not in got, "what a newer one replaced"


def history(conn: Conn) -> Iterator[None]:
    """What was done stays known, and what is done now becomes so."""
    make(conn, "history", keep_history=LONG)
    stream = one(conn, "select stream_id from pgqueue.streams where name = 'history'")
    sent = send(conn, "history", "a", "b", "c")
    claim, (done,) = take(conn, "history")
    value(conn, "ack", claim, None, Jsonb({"n": 1}))
    claim, (dead,) = take(conn, "history")
    value(conn, "dead_letter", claim, None, "bad")
    held = take(conn, "history")
    yield
    internals.sent_earlier(conn, stream, done, timedelta(days=50))  # as all else: `pass_time`
    (known,) = call(conn, "outcome", "history", "c", done)
    assert (known.state, known.result, known.deliver_count) == ("done", {"n": 1}, 1)
    (known,) = call(conn, "outcome", "history", "c", dead)
    assert (known.state, known.reason) == ("dead", "bad")
    settle(conn, [held])
    assert call(conn, "outcome", "history", "c", held[1][0])[0].state == "done"
    assert acked(conn, "history", "c") == []
    assert value(conn, "redrive", "history", "c") == 1
    assert acked(conn, "history", "c") == [dead]
    assert sorted([done, dead, *held[1]]) == sorted(sent)


def groups(conn: Conn) -> Iterator[None]:
    """A worker that has a batch; one that committed a part; and a captured table that sends."""
    value(conn, "create_stream", "grouped")
    value(conn, "create_group", "grouped", "g", 2, "earliest")
    leases = [row.lease_id for row in call(conn, "lease_partitions", "grouped", "g", "w")]
    sent = send(conn, "grouped", *"abcdef")
    got: list[int] = []

    def work(rows: list[Any]) -> None:
        for row in rows:
            if row.seq is None:
                value(conn, "commit_offset", row.lease_id, row.next_offset)
            else:
                got.append(row.seq)

    work(call(conn, "read_partitions", "grouped", "g", leases, 1))
    batch = call(conn, "read_partitions", "grouped", "g", leases, 1)
    sent += send(conn, "grouped", *"abc")
    conn.execute("create schema theirs create table captured (id int primary key)")
    value(conn, "capture", "theirs.captured", "grouped")
    yield
    work(batch)
    conn.execute("insert into theirs.captured values (1)")
    while rows := call(conn, "read_partitions", "grouped", "g", leases):
        work(rows)
    assert len(got) == len(set(got)), "worked off twice"
    assert set(sent) < set(got), "the captured row is one more"
    assert len(got) == len(sent) + 1
    value(conn, "release", "theirs.captured", "grouped")
    value(conn, "drop_stream", "grouped")


def schedules(conn: Conn) -> Iterator[None]:
    """A schedule that becomes due, and one that is paused."""
    make(conn, "scheduled")
    value(conn, "create_schedule", "scheduled", "hourly", p_every=HOUR, p_data="tick")
    value(conn, "create_schedule", "scheduled", "paused", p_every=HOUR, p_data="no")
    value(conn, "pause_schedule", "scheduled", "paused")
    yield
    clock.pass_time(conn, HOUR * 1.5)
    conn.execute("call pgqueue.maintain_all()")
    data = [row.data for row in call(conn, "receive", "scheduled", "c", 10)]
    assert set(data) == {"tick"}


def stays(conn: Conn) -> Iterator[None]:
    """Messages that are late, expire, or were postponed or cancelled; copies; a paused consumer."""
    make(conn, "stays")
    make(conn, "copies")
    value(conn, "alter_stream", "stays", Jsonb({"dedup_window": "10 days"}))
    value(conn, "bind", "stays", "copy", "copies")
    due = one(conn, "select clock_timestamp() + interval '3 hours'")
    (first,) = send(conn, "stays", "a", p_dedup_key="once")
    sent = [first, *send(conn, "stays", "b", p_deliver_at=due), *send(conn, "stays", "c")]
    expired = send(conn, "stays", "d", p_expires_at=due)
    cancelled = send(conn, "stays", "e")
    value(conn, "postpone", "stays", "c", sent[2:], due)
    assert value(conn, "cancel", "stays", "c", cancelled) == 1
    sent += send(conn, "stays", "copy", p_priority=5)
    value(conn, "pause", "stays", "c")
    yield
    assert call(conn, "receive", "stays", "c", 10) == [], "it is paused"
    value(conn, "resume", "stays", "c")
    assert send(conn, "stays", "a", p_dedup_key="once") == [first]
    clock.pass_time(conn, HOUR * 4)
    rest(conn, "stays", sent)
    assert [row.seq for row in call(conn, "read_dead", "stays", "c")] == expired
    assert len(acked(conn, "copies", "c")) == 1


def retention(conn: Conn) -> Iterator[None]:
    """Messages that are trimmed, an exporter that has begun, and a stream that was dropped."""
    make(conn, "trimmed")
    make(conn, "archived")
    value(conn, "create_stream", "left")
    value(conn, "set_archive", "archived", str(Path("/nowhere")))
    for stream in ("trimmed", "archived"):
        value(conn, "set_retention", stream, p_messages=10)
        for _ in range(4):
            call(conn, "send_batch", stream, ["x"] * 30)
            assert len(acked(conn, stream, "c")) == 30
            clock.pass_time(conn, HOUR)
            conn.execute("call pgqueue.maintain_all()")
    assert one(conn, "select count(*) from pgqueue.trims") == 1, "of an archive nothing is written"
    stream_id = one(conn, "select stream_id from pgqueue.streams where name = 'archived'")
    (begun,) = call(conn, "begin_export", stream_id)
    owed = send(conn, "archived", "a"), send(conn, "trimmed", "a")
    value(conn, "drop_stream", "left")  # and not swept yet
    yield
    (again,) = call(conn, "begin_export", stream_id)
    assert (again.segment, again.folder) == (begun.segment, begun.folder), "not exported yet"
    rest(conn, "archived", owed[0])
    rest(conn, "trimmed", owed[1])
    for stream in ("archived", "trimmed"):
        value(conn, "drop_stream", stream)
    conn.execute("call pgqueue.maintain_all()")
    assert one(conn, "select count(*) from pgqueue.dropped_streams") == 0


def sinks(conn: Conn) -> Iterator[None]:
    """A query that has published batch 5; in version 0.1, it left out those without messages."""
    stream = value(conn, "create_stream", "sunk")
    assert publish(conn, stream, [stage(conn, stream, 1, 5, "query")], 1, 5, "query")
    yield
    assert publish(conn, stream, [stage(conn, stream, 1, 8, "query")], 1, 8, "query")


FEATURES: tuple[Feature, ...] = (
    sinks, retention, filters, conditions, latest, groups, schedules, stays, history,
)  # fmt: skip


def pgmq(conn: Conn) -> Iterator[None]:
    """A queue of pgmq, with a message that a worker has."""
    conn.execute("select pgmq.create('theirs')")
    for n in range(3):
        conn.execute("select pgmq.send('theirs', %s)", [Jsonb({"n": n})])
    (held,) = call(conn, "pgmq.read", "theirs", 100, 1)
    yield
    assert value(conn, "pgmq.delete", "theirs", held.msg_id) is True
    left = [row.message["n"] for row in call(conn, "pgmq.read", "theirs", 100, 5)]
    assert left == [1, 2]
