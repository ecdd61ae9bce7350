"""Each way to claim begins alike: the same checks, in the same order, and the same work first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import schema
from tests.measure import functions as measured
from tests.sql import clock
from tests.sql.queue import Conn, claim_of, consumer, one, receive, send, value

STARTED = datetime(2020, 1, 1, tzinfo=UTC)
LEASES = "current_setting('test.leases', true)::bigint[]"


@dataclass(frozen=True)
class Way:
    """A way to claim: an SQL expression of the messages that it gets, as an array.

    Attributes:
        call: with {max}, {timeout}, and {on}: what it claims from.
        on: that, as it is, of the consumer c; the consumer of an unknown name, of an unknown
            stream; a consumer of a kind that this way refuses.
        unknown: the codes for the unknown ones.
        bad: values of {max} that are refused.
    """

    call: str
    on: str = "'s', 'c'"
    unknown: tuple[tuple[str, str], ...] = (("'s', 'no'", "PQ002"), ("'no', 'c'", "PQ001"))
    wrong: tuple[str, ...] = ("'s', 'g'",)
    bad: tuple[str, ...] = ("0", "-1", "null")

    def ask(self, on: str | None = None, max: str = "1", timeout: str = "null") -> str:
        return "select " + self.call.format(on=on or self.on, max=max, timeout=timeout)


def returned(call: str, seq: str = "seq") -> str:
    return "coalesce((select array_agg(m." + seq + ") from " + call + " m), '{{}}')"


def pgmq(call: str) -> Way:
    return Way(returned(f"pgmq.{call}", "msg_id"), "'q'", (("'no'", "42P01"),), (), ())


CLAIMED = "array_fill(0, array[coalesce((select message_count::int from {}), 0)])"
GROUP = {"on": "'s', 'g'", "wrong": ("'s', 'c'",), "bad": ("0", "1000001", "null")}
WAYS = {
    "claim": Way(CLAIMED.format("pgqueue.claim({on}, {max}, {timeout})")),
    "receive": Way(returned("pgqueue.receive({on}, {max}, {timeout})")),
    "receive, p_ack": Way(
        returned(
            "pgqueue.receive({on}, {max}, {timeout}, (select min(claim_id) from"
            " pgqueue.open_claims where consumer = 'before'))"
        )
    ),
    "receive_where": Way(
        returned("pgqueue.receive_where({on}, '$.data == \"x\"', {max}, {timeout})"),
        wrong=("'s', 'g'", "'s', 'key'", "'s', 'stream'", "'s', 'fair'"),
    ),
    "reader_claim": Way(
        "array_fill(0, array[(select claimed::int from pgqueue.reader_claim("
        "gen_random_uuid(), {on}, 0, 0, {max}, {timeout}))])",
        "(select consumer_id from pgqueue.open_consumer('s', 'c'))",
        (("999", "PQ002"), ("null", "PQ002")),
        tuple(
            f"(select consumer_id from pgqueue.consumers where name = '{name}')"
            for name in ("g", "fair")
        ),
        ("0", "-1"),
    ),
    "plan_partitions": Way(
        "coalesce((select p.lo from pgqueue.plan_partitions({on}, " + LEASES + ", {max}) p"
        " where lo <> '{{}}'), '{{}}')",
        **GROUP,
    ),
    "read_partitions": Way(
        returned("(select * from pgqueue.read_partitions({on}, " + LEASES + ", {max})"
                 " where seq is not null)"),
        **GROUP,
    ),
    "pgmq.read": pgmq("read({on}, 30, 1)"),
    "pgmq.read, a condition": pgmq("read({on}, 30, 1, '{{\"a\": 1}}')"),
    "pgmq.read_grouped": pgmq("read_grouped({on}, 30, 1)"),
    "pgmq.pop": pgmq("pop({on}, 1)"),
}  # fmt: skip
OURS = {name: way for name, way in WAYS.items() if not name.startswith("pgmq")}
CHOOSY = {"pgmq.read, a condition", "pgmq.read_grouped"}
"""These claim messages that they have looked up, and nothing else."""


@pytest.fixture
def there(face: Conn, conn: Conn, stream: int) -> None:
    """What the ways claim from, without messages."""
    consumer(conn)
    for ordering in ("key", "stream"):
        consumer(conn, ordering, ordering)
    consumer(conn, "fair", fair=True)
    value(conn, "create_group", "s", "g", 1, p_start="earliest")
    conn.execute("select pgmq.create('q')")
    leases = "select array_agg(lease_id) from pgqueue.lease_partitions('s', 'g', 'w')"
    conn.execute(f"select set_config('test.leases', ({leases})::text, false)".encode())


@contextmanager
def undone(conn: Conn, level: str = "read committed") -> Iterator[None]:
    conn.execute(f"begin isolation level {level}".encode())
    try:
        yield
    finally:
        conn.execute("rollback")


def refusal(conn: Conn, query: str, level: str = "read committed") -> tuple[str, str]:
    """The code of the error, and the argument that it names."""
    with undone(conn, level):
        try:
            conn.execute(query.encode())
        except psycopg.Error as error:
            return error.sqlstate or "", error.diag.column_name or ""
    return "nothing", ""


def got(conn: Conn, way: Way) -> int:
    """How many messages it gets; nothing is changed."""
    with undone(conn):
        return len(one(conn, way.ask()))


def publish(conn: Conn) -> None:
    """A message for each way."""
    send(conn)
    conn.execute("select pgmq.send('q', '{\"a\": 1}')")


@pytest.mark.usefixtures("there")
def test_each_way_refuses_another_isolation_level_before_anything_else(conn: Conn) -> None:
    for level in ("repeatable read", "serializable"):
        found = {name: refusal(conn, way.ask(), level) for name, way in WAYS.items()}
        assert found == dict.fromkeys(WAYS, ("PQ007", ""))
    for way in OURS.values():
        query = way.ask(way.unknown[0][0], "0", "'0'")
        assert refusal(conn, query, "serializable") == ("PQ007", ""), query


@pytest.mark.usefixtures("there")
def test_each_way_refuses_its_arguments_before_it_looks_for_the_consumer(conn: Conn) -> None:
    for way in OURS.values():
        for on in (way.on, way.unknown[0][0], *way.wrong):
            for most in way.bad:
                assert refusal(conn, way.ask(on, most)) == ("PQ003", "p_max"), way.ask(on, most)
            for timeout in ("'0'", "'-1 s'", "'11 years'") if "{timeout}" in way.call else ():
                query = way.ask(on, timeout=timeout)
                assert refusal(conn, query) == ("PQ003", "p_visibility_timeout"), query


@pytest.mark.usefixtures("there")
def test_each_way_refuses_what_it_cannot_claim_from(conn: Conn) -> None:
    for name, way in WAYS.items():
        cases = [*way.unknown, *((on, "PQ006") for on in way.wrong)]
        assert [(on, refusal(conn, way.ask(on))[0]) for on, _ in cases] == cases, name
    dropped = one(conn, "select consumer_id from pgqueue.consumers where name = 'c'")
    for name in ("c", "g"):
        value(conn, "drop_consumer", "s", name)
    for name, way in OURS.items():
        on = str(dropped) if name == "reader_claim" else way.on
        assert refusal(conn, way.ask(on))[0] == "PQ002", name


@pytest.mark.usefixtures("there")
def test_each_way_gets_nothing_of_a_paused_consumer_and_acknowledges(conn: Conn) -> None:
    publish(conn)
    assert {name: got(conn, way) for name, way in WAYS.items()} == dict.fromkeys(WAYS, 1)
    consumer(conn, "before")
    held = claim_of(receive(conn, 1, "before"))
    for stream, name in (("s", "c"), ("s", "g"), ("q", "pgmq")):
        value(conn, "pause", stream, name)
    assert {name: got(conn, way) for name, way in WAYS.items()} == dict.fromkeys(WAYS, 0)
    for ask in ("receive('s', 'c', p_ack => {})", "receive_where('s', 'c', '$', p_ack => {})"):
        with undone(conn):
            claim = f"select * from pgqueue.{ask.format(held)}"
            assert conn.execute(claim.encode()).fetchall() == []
            assert one(conn, "select count(*) from pgqueue.open_claims") == 0, ask
    for stream, name in (("s", "c"), ("s", "g"), ("q", "pgmq")):
        value(conn, "resume", stream, name)
    assert {got(conn, way) for way in WAYS.values()} == {1}


@pytest.mark.usefixtures("there")
def test_each_way_sends_what_is_due_of_schedules_first(conn: Conn) -> None:
    for stream, data in (("s", "x"), ("q", '{"a": 1}')):
        value(conn, "create_schedule", stream, "h", p_every="1 hour", p_data=data, p_start=STARTED)
    clock.pass_time(conn, timedelta(hours=2))
    assert {name: got(conn, way) for name, way in WAYS.items()} == dict.fromkeys(WAYS, 1)


@pytest.mark.usefixtures("there")
def test_each_way_refuses_a_database_that_lost_its_numbers(conn: Conn) -> None:
    """Messages that are sent from then on would never be taken."""
    for _ in range(3):
        publish(conn)
    value(conn, "ack", claim_of(receive(conn, 10)))
    conn.execute("select pgmq.pop('q', 10)")
    plan = "pgqueue.plan_partitions('s', 'g', " + LEASES + ")"
    conn.execute(f"select pgqueue.commit_offset(lease_ids[1], next_offset) from {plan}".encode())
    for stream in ("s", "q"):
        id_ = one(conn, "select stream_id from pgqueue.open_stream(%s)", stream)
        conn.execute(f"select setval('pgqueue.publication_{id_}', 1)".encode())
    found = {name: refusal(conn, way.ask())[0] for name, way in WAYS.items() if name not in CHOOSY}
    assert found == dict.fromkeys(found, "PQ011")


@pytest.mark.usefixtures("there")
def test_each_way_keeps_to_the_limits_of_the_consumer(conn: Conn) -> None:
    for stream, name in (("s", "c"), ("q", "pgmq")):
        value(conn, "alter_consumer", stream, name, Jsonb({"max_in_flight": 1}))
    for _ in range(2):
        publish(conn)
    without = CHOOSY | {"plan_partitions", "read_partitions"}
    of_consumers = {name: way for name, way in WAYS.items() if name not in without}
    assert {got(conn, way) for way in of_consumers.values()} == {1}
    receive(conn, 1)
    conn.execute("select pgmq.read('q', 30, 1)")
    assert {got(conn, way) for way in of_consumers.values()} == {0}


@pytest.mark.usefixtures("there")
def test_no_role_but_consumers_claims(conn: Conn, writer: Conn) -> None:
    publish(conn)
    for name, way in WAYS.items():
        assert refusal(writer, way.ask())[0] == "42501", name


def test_what_claims_begins_and_records_in_one_place() -> None:
    """Who makes a claim has begun it, and nobody else checks what a beginning does."""
    names = ("claim_free", "claim_bundles", "claim_new", "take_ahead")
    makers = {f"_pgqueue.{name}" for name in names}
    assert callers("_pgqueue.new_token(") == makers | {
        "_pgqueue.new_lease_id",  # of a group's partition
        "pgmq._hold",  # of a part of a claim
    }
    begun = callers("_pgqueue.begin_claim(")
    assert begun == {
        "_pgqueue.claim", "pgqueue.receive_where", "pgqueue.reader_claim",
        "pgqueue.plan_partitions", "pgmq._begin",
    }  # fmt: skip
    begun_by_pgmq = callers("pgmq._begin(") - {"pgmq._begin"}
    assert beginnings(makers, begun | begun_by_pgmq) == {
        "_pgqueue.claim", "pgqueue.receive_where", "pgqueue.reader_claim",
        "pgmq.read", "pgmq._read_grouped",
        "pgqueue.reader_resume",  # a claim that was begun before, and was lost
    }  # fmt: skip
    assert callers("_pgqueue.serve_claim(") == {
        "_pgqueue.claim_locked", "pgqueue.reader_claim", "_pgqueue.serve_claim_within",
    }  # fmt: skip
    assert callers("_pgqueue.check_claim(") == {"_pgqueue.begin_claim"}
    # who can do without the consumer's lock asks whether it may
    assert callers("_pgqueue.always_locks(") == {
        "_pgqueue.claim", "_pgqueue.claim_locked", "_pgqueue.claim_where",
    }  # fmt: skip


def beginnings(makers: set[str], begun: set[str]) -> set[str]:
    """From those who make a claim up to the first who begins it, or whom no function calls."""
    by, found, seen = measured.callers(measured.read().values()), set(), set(makers)
    todo = list(makers)
    while todo:
        name = todo.pop()
        above = set() if name in begun else by[name]
        if not above:
            found.add(name)
        todo += above - seen
        seen |= above
    return found


def callers(code: str) -> set[str]:
    """The functions that have a piece of code."""
    found = set()
    for path in [*schema.sql_files(), *schema.sql_files(schema.PGMQ)]:
        text = re.sub(r"--[^\n]*", "", path.read_text())
        for part in re.split(r"(?m)(?=^create or replace (?:function|procedure) )", text)[1:]:
            name = re.match(r"create or replace \w+ ([\w.]+)", part)
            assert name is not None
            if code in part.partition("as $$")[2]:
                found.add(name[1])
    return found
