"""Schedules: each of their times has one message, whoever looks, and whoever dies."""

import contextlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import clock, internals, limits
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

BERLIN = "Europe/Berlin"
SPRING = "2026-03-29 00:00+00"  # Berlin: from 02:00 to 03:00, at 01:00 UTC
AUTUMN = "2026-10-25 00:00+00"  # from 03:00 back to 02:00, at 01:00 UTC


def schedule(conn: Conn, name: str = "h", **options: Any) -> datetime:
    """Create a schedule of the stream s, each hour unless told otherwise; returns its next time."""
    if "p_cron" not in options:
        options = {"p_every": timedelta(hours=1), **options}
    return value(conn, "create_schedule", "s", name, **{"p_data": "x", **options})


def row(conn: Conn, name: str = "h") -> Any:
    """What is shown of a schedule."""
    cur = conn.cursor(row_factory=namedtuple_row)
    return cur.execute(
        "select * from pgqueue.stream_schedules where schedule = %s", [name]
    ).fetchone()


def times(conn: Conn, cron: str | None = None, count: int = 3, **options: Any) -> list[str]:
    """The next times, in UTC."""
    found = call(conn, "schedule_times", cron, p_count=count, **options)
    return [f"{at:%m-%d %H:%M}" for (at,) in found]


def refused(conn: Conn, function: str, *args: Any, **named: Any) -> tuple[str | None, str | None]:
    """The error of a call: its code, and the argument that it names."""
    with pytest.raises(psycopg.Error) as caught:
        call(conn, function, *args, **named)
    return caught.value.sqlstate, caught.value.diag.column_name


# When


CRON = [
    ("*/20 9-10 * * *", "2026-01-01 10:30", ["01-01 10:40", "01-02 09:00", "01-02 09:20"]),
    ("5,4 0 1 * *", "2026-01-01 00:04", ["01-01 00:05", "02-01 00:04", "02-01 00:05"]),
    ("0 0 * * Mon-wed", "2026-01-01", ["01-05 00:00", "01-06 00:00", "01-07 00:00"]),
    ("0 0 * * 5-7", "2026-01-01", ["01-02 00:00", "01-03 00:00", "01-04 00:00"]),
    ("0 0 * * fri-sun/2", "2026-01-01", ["01-02 00:00", "01-04 00:00", "01-09 00:00"]),
    ("0 0 1 jan,DEC 0", "2026-11-30", ["12-01 00:00", "12-06 00:00", "12-13 00:00"]),
    ("0 0 29 2 *", "2026-01-01", ["02-29 00:00"] * 3),
    ("@Monthly", "2026-01-01", ["02-01 00:00", "03-01 00:00", "04-01 00:00"]),
    # in either day, where both are told; but a field that begins with a star is none
    ("0 0 13 * 5", "2026-01-01", ["01-02 00:00", "01-09 00:00", "01-13 00:00"]),
    ("0 0 */10 * 0", "2026-01-01", ["01-11 00:00", "02-01 00:00", "03-01 00:00"]),
    ("0 0 13 * *", "2026-01-13 00:00", ["02-13 00:00", "03-13 00:00", "04-13 00:00"]),
]


def test_a_cron_expression_means_what_it_means_to_cron(conn: Conn) -> None:
    for cron, after, expected in CRON:
        assert times(conn, cron, p_after=f"{after}+00") == expected, cron


CLOCKS = [
    # a time of the day: once a day, at the end of the gap and at the first of two
    ("30 2 * * *", SPRING, ["03-29 01:00", "03-30 00:30"]),
    ("0,30 2 * * *", SPRING, ["03-29 01:00", "03-30 00:00"]),
    ("30 2 * * *", AUTUMN, ["10-25 00:30", "10-26 01:30"]),
    ("15,30 2 * * *", "2026-10-25 01:20+00", ["10-26 01:15", "10-26 01:30"]),
    # all the time: by the hours that pass
    ("30 * * * *", SPRING, ["03-29 00:30", "03-29 01:30"]),
    ("*/30 2 * * *", SPRING, ["03-30 00:00", "03-30 00:30"]),
    ("30 * * * *", AUTUMN, ["10-25 00:30", "10-25 01:30"]),
    ("*/40 2 * * *", AUTUMN, ["10-25 00:40", "10-25 01:00", "10-25 01:40", "10-26 01:00"]),
]


def test_when_the_clocks_are_changed(conn: Conn) -> None:
    for cron, after, expected in CLOCKS:
        found = times(conn, cron, len(expected), p_after=after, p_time_zone=BERLIN)
        assert found == expected, (cron, after)


def matches(cron: str, local: datetime) -> bool:
    """Whether an expression of numbers and stars allows a local time."""
    fields = cron.split()

    def allowed(field: str, value: int, lo: int) -> bool:
        if field.startswith("*"):
            return (value - lo) % int(field[2:] or 1) == 0
        return str(value) in field.split(",")

    in_days = [allowed(fields[2], local.day, 1), allowed(fields[4], local.isoweekday() % 7, 0)]
    either = not fields[2].startswith("*") and not fields[4].startswith("*")
    return (
        allowed(fields[0], local.minute, 0)
        and allowed(fields[1], local.hour, 0)
        and allowed(fields[3], local.month, 1)
        and (any(in_days) if either else all(in_days))
    )


CHANGES_OF_CLOCKS = [
    (BERLIN, "2026-03-29 01:00+00"),
    (BERLIN, "2026-10-25 01:00+00"),
    ("Australia/Lord_Howe", "2026-04-04 15:00+00"),  # by half an hour
    ("Australia/Lord_Howe", "2026-10-03 15:30+00"),
    ("Pacific/Apia", "2011-12-30 10:00+00"),  # a whole day is left out
]


def test_it_is_what_a_walk_through_all_minutes_finds(conn: Conn) -> None:
    for zone, middle in CHANGES_OF_CLOCKS:
        walk(conn, zone, middle)


def walk(conn: Conn, zone: str, middle: str) -> None:
    """A day and a half on either side of a change of the clocks; for random expressions."""
    minutes = conn.execute(
        "select g at time zone 'UTC', g at time zone %(zone)s from generate_series("
        "%(middle)s::timestamptz - interval '36 hours', %(middle)s::timestamptz + '36 hours',"
        " '1 minute') g",
        {"zone": zone, "middle": middle},
    ).fetchall()
    chance = random.Random(middle)
    for _ in range(4):
        hours = "*" if chance.random() < 0.3 else f"{chance.randrange(24)},{chance.randrange(5)}"
        cron = f"{chance.choice(['*/25', '7', '0,30', '59'])} {hours} " + chance.choice(
            ["* * *", "*/2 * *", "* * 0,6", "29,3 * 1", f"* {minutes[0][1].month} *"]
        )
        by_clock = not any(field.startswith("*") for field in cron.split()[:2])
        expected = []
        shown = minutes[0][1] - timedelta(minutes=1)  # the latest that a clock has shown so far
        for utc, local in minutes:
            passed = [local]
            if by_clock:  # what it shows now for the first time, and what it has passed over
                steps = (local - shown) // timedelta(minutes=1)
                passed = [shown + timedelta(minutes=i + 1) for i in range(steps)]
            if any(matches(cron, each) for each in passed):
                expected.append(utc)
            shown = max(shown, local)
        begin = chance.choice([0, 0, 30 * 60, 36 * 60 + chance.randrange(-90, 90)])
        found = conn.execute(
            "select t at time zone 'UTC' from pgqueue.schedule_times(%s, p_time_zone => %s,"
            " p_after => %s::timestamp at time zone 'UTC', p_count => 20) t",
            [cron, zone, minutes[begin][0]],
        ).fetchall()
        later = [utc for utc in expected if utc > minutes[begin][0]]
        within = [utc for (utc,) in found if utc <= minutes[-1][0]]
        assert within == later[: len(found)], f"{cron} after {minutes[begin][0]}"


EVERY: list[tuple[dict[str, str], list[str]]] = [
    ({"p_every": "90 minutes"}, ["10-24 11:30", "10-24 13:00", "10-24 14:30"]),
    # days and months by the calendar of the time zone, hours by the clock
    ({"p_every": "1 day"}, ["10-25 11:00", "10-26 11:00", "10-27 11:00"]),
    ({"p_every": "24 hours"}, ["10-25 10:00", "10-26 10:00", "10-27 10:00"]),
    ({"p_every": "1 month", "p_start": "2025-07-31 00:30+02"},
     ["10-30 23:30", "11-29 23:30", "12-30 23:30"]),
    ({"p_every": "1 week", "p_start": "2027-01-01 00:00+00"},
     ["01-01 00:00", "01-08 00:00", "01-15 00:00"]),
]  # fmt: skip


def test_an_interval_is_counted_from_its_start(conn: Conn) -> None:
    for options, expected in EVERY:
        after = "2026-10-24 10:00+00"
        found = times(conn, None, 3, p_after=after, p_time_zone=BERLIN, **options)
        assert found == expected, options


SENSELESS: list[tuple[str, dict[str, Any]]] = [
    ("p_cron", {"p_cron": "0 0 31 2,4 *"}),
    ("p_cron", {"p_cron": "60 * * * *"}),
    ("p_cron", {"p_cron": "* * * *"}),
    ("p_cron", {"p_cron": "* * * * * *"}),
    ("p_cron", {"p_cron": "*/0 * * * *"}),
    ("p_cron", {"p_cron": "5/10 * * * *"}),
    ("p_cron", {"p_cron": "* 5-3 * * *"}),
    ("p_cron", {"p_cron": "* * , * *"}),
    ("p_cron", {"p_cron": "* * * * mon,day"}),
    ("p_cron", {"p_cron": "@reboot"}),
    ("p_cron", {"p_cron": ""}),
    ("p_cron, p_every", {}),
    ("p_cron, p_every", {"p_cron": "@daily", "p_every": "1 day"}),
    ("p_every", {"p_every": "0"}),
    ("p_every", {"p_every": "-1 hour"}),
    ("p_every", {"p_every": "1500 ms"}),
    ("p_every", {"p_every": "11 years"}),
    ("p_every", {"p_every": "-1 day 25:00"}),
    ("p_start, p_every, p_cron", {"p_cron": "@daily", "p_start": "2026-01-01"}),
    ("p_start", {"p_every": "1 day", "p_start": "infinity"}),
    ("p_time_zone", {"p_cron": "@daily", "p_time_zone": "Europe/Berln"}),
    ("p_time_zone", {"p_cron": "@daily", "p_time_zone": "UTC+2"}),
    ("p_time_zone", {"p_cron": "@daily", "p_time_zone": None}),
]


def test_what_never_comes_or_makes_no_sense_is_refused(conn: Conn) -> None:
    for argument, options in SENSELESS:
        error = ("PQ003", argument)
        assert refused(conn, "schedule_times", **options) == error, options
        assert refused(conn, "create_schedule", "s", "h", p_data="x", **options) == error, options
        assert row(conn) is None


UNSENDABLE: list[tuple[tuple[str, str | None], dict[str, Any]]] = [
    (("PQ003", "p_name"), {"p_name": " h"}),
    (("PQ004", "p_data, p_data_bytes"), {"p_data": None}),
    (("PQ003", "p_headers"), {"p_headers": "[]"}),
    (("PQ003", "p_key, p_keys"), {"p_key": "k" * 2000}),
    (("PQ003", "p_priority"), {"p_priority": 40000}),
    (("PQ002", "p_consumers"), {"p_consumers": ["nobody"]}),
    (("PQ001", None), {"p_stream": "nowhere"}),
]


def test_what_could_not_be_sent_is_refused(conn: Conn) -> None:
    for error, options in UNSENDABLE:
        given = {"p_stream": "s", "p_name": "h", "p_data": "x", "p_cron": "@daily", **options}
        assert refused(conn, "create_schedule", **given) == error, options


# What is sent


def test_whoever_claims_sends_what_is_due_and_gets_it(conn: Conn) -> None:
    """With the schedule's name and the time; and in the transaction that claims."""
    for name in ORDERINGS:
        consumer(conn, name, name)
    more = {"p_key": "k", "p_headers": '{"a": 1, "schedule": "mine"}', "p_priority": 3}
    for name in ORDERINGS:
        at = schedule(conn, name, p_consumers=[name], **more)
        assert receive(conn, name=name) == []
        clock.pass_time(conn, timedelta(hours=1))
        planned = f"{at - timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"
        conn.execute("begin")
        assert len(receive(conn, name=name)) == 1
        conn.execute("rollback")
        (message,) = receive(conn, name=name)
        assert (message.data, message.key, message.priority) == ("x", "k", 3)
        assert message.headers == {"a": 1, "schedule": name, "planned_at": planned}
        assert receive(conn, name=name) == []
        shown = row(conn, name)
        assert (shown.last_seq, shown.last_error) == (message.seq, None)
        assert shown.next_at - shown.last_planned_at == timedelta(hours=1)
        value(conn, "drop_schedule", "s", name)


def test_times_that_were_missed_have_one_message_together(conn: Conn) -> None:
    """With the first of them, and the next one is to come."""
    consumer(conn)
    schedule(conn)
    clock.pass_time(conn, timedelta(hours=5, minutes=30))
    first = row(conn).next_at
    (message,) = receive(conn)
    assert message.headers["planned_at"] == f"{first:%Y-%m-%dT%H:%M:%SZ}"
    assert now(conn) < row(conn).next_at <= now(conn) + timedelta(hours=1)
    assert receive(conn) == []
    assert value(conn, "next_due", "s", "c") > now(conn), "who waits does not ask all the time"


def test_everybody_who_looks_after_a_stream_sends_what_is_due(
    conn: Conn, reader: Reader, url: str
) -> None:
    """Spark's readers, groups, consumers that are paused, and maintain()."""
    value(conn, "create_group", "s", "g", 1)
    consumer(conn, "idle")
    value(conn, "pause", "s", "idle")
    schedule(conn)

    def due() -> None:
        clock.pass_time(conn, timedelta(hours=1))
        assert row(conn).next_at <= now(conn)

    due()
    assert reader.ask().claimed == 1
    due()
    leases = [r.lease_id for r in call(conn, "lease_partitions", "s", "g", "w")]
    assert len([r for r in call(conn, "read_partitions", "s", "g", leases) if r.seq]) == 2
    due()
    assert receive(conn, name="idle") == []
    assert row(conn).last_seq == 3
    due()
    maintain(conn)
    assert row(conn).last_seq == 4
    due()
    # who waits, and does nothing else, is told when
    assert value(conn, "next_due", "s", "idle") is None
    assert value(conn, "next_due", "s", "c") <= now(conn)


def test_a_message_of_a_schedule_goes_where_it_is_told(conn: Conn) -> None:
    """Also when one of those consumers is gone."""
    for name in ("a", "b", "c"):
        consumer(conn, name)
    schedule(conn, p_consumers=["a", "b"])
    value(conn, "drop_consumer", "s", "b")
    clock.pass_time(conn, timedelta(hours=1))
    assert receive(conn, name="c") == []
    assert len(receive(conn, name="a")) == 1


def test_what_cannot_be_sent_any_more_fails_no_claim(conn: Conn) -> None:
    """It is passed over, and the schedule says why."""
    consumer(conn)
    send(conn)
    for name in ("none", "nowhere", "fine"):
        schedule(conn, name)
    conn.execute("update pgqueue.schedules set data = null where name = 'none'")
    conn.execute(
        "update pgqueue.schedules set time_zone = 'X/Y', cron = '@daily' where name = 'nowhere'"
    )
    clock.pass_time(conn, timedelta(hours=1))
    assert len(receive(conn)) == 2
    failed, lost = row(conn, "none"), row(conn, "nowhere")
    assert "must have text as p_data, not null" in failed.last_error
    assert failed.last_seq is None
    assert failed.next_at > now(conn)
    assert "X/Y" in lost.last_error
    assert lost.paused
    assert row(conn, "fine").last_error is None


@pytest.mark.parametrize(
    ("limit", "message", "said"),
    [
        ("max_bytes", {"p_data": "x" * 2000}, "at most 1000 bytes, not 2000"),
        ("max_header_bytes", {"p_headers": Jsonb({"h": "x" * 2000})}, "object of at most 1000"),
    ],
)
def test_a_message_that_the_limits_of_its_stream_no_longer_allow_is_not_sent(
    conn: Conn, limit: str, message: dict[str, Any], said: str
) -> None:
    """Nor copied to a stream with these limits."""
    consumer(conn)
    schedule(conn, **message)
    value(conn, "alter_stream", "s", Jsonb({limit: 1000}))
    value(conn, "create_stream", "t", p_settings=Jsonb({limit: 1000}))
    value(conn, "bind", "s", "#", "t")
    clock.pass_time(conn, timedelta(hours=1))
    assert receive(conn) == []
    assert said in row(conn).last_error
    assert one(conn, "select count(*) from pgqueue.messages") == 0
    value(conn, "alter_stream", "t", Jsonb({limit: 9000}))
    value(conn, "alter_stream", "s", Jsonb({limit: 9000}))
    clock.pass_time(conn, timedelta(hours=1))
    assert len(receive(conn)) == 1
    assert row(conn).last_error is None


# Changing them


def test_a_paused_schedule_sends_nothing_and_makes_up_for_nothing(conn: Conn) -> None:
    consumer(conn)
    schedule(conn)
    value(conn, "pause_schedule", "s", "h")
    clock.pass_time(conn, timedelta(hours=3))
    assert receive(conn) == []
    assert row(conn).next_at is None
    assert value(conn, "next_due", "s", "c") is None
    at = value(conn, "resume_schedule", "s", "h")
    assert at > now(conn)
    assert value(conn, "resume_schedule", "s", "h") == at
    assert receive(conn) == []
    clock.pass_time(conn, timedelta(hours=1))
    assert len(receive(conn)) == 1


def test_a_schedule_is_replaced_only_when_told_and_keeps_its_times(conn: Conn) -> None:
    """An application can say at each start what it wants, and no time is lost by it."""
    consumer(conn)
    first = schedule(conn)
    again = refused(conn, "create_schedule", "s", "h", p_every="1 hour", p_data="y")
    assert again == ("PQ006", "p_replace")
    assert schedule(conn, p_data="y", p_replace=True) == first
    value(conn, "pause_schedule", "s", "h")
    assert schedule(conn, p_data="z", p_replace=True) == first
    assert row(conn).paused
    value(conn, "resume_schedule", "s", "h")
    clock.pass_time(conn, timedelta(hours=1))
    schedule(conn, p_data="z", p_replace=True)
    assert [m.data for m in receive(conn)] == ["z"]
    assert schedule(conn, p_cron="@yearly", p_replace=True).month == 1
    for before, after in (("1 month", "30 days"), ("1 day", "24 hours")):  # equal for Postgres
        schedule(conn, p_every=before, p_replace=True)
        schedule(conn, p_every=after, p_replace=True)
        conn.execute(
            "update pgqueue.schedules set start_at = '2026-01-31Z', next_at = '2026-03-31Z'"
        )
        assert schedule(conn, p_every=before, p_replace=True) > datetime(2026, 4, 1, tzinfo=UTC)
    value(conn, "drop_schedule", "s", "h")
    for name in ("drop_schedule", "pause_schedule", "resume_schedule"):
        assert refused(conn, name, "s", "h") == ("PQ003", "p_name")


def test_consumers_look_only_while_their_stream_has_schedules(conn: Conn) -> None:
    """And those that are made later do."""
    value(conn, "create_stream", "other")
    value(conn, "create_consumer", "other", "c")
    flags = "select array_agg(scheduled order by consumer_id) from pgqueue.consumers"
    consumer(conn, "a")
    assert one(conn, flags) == [False, False]
    schedule(conn)
    schedule(conn, "h2")
    consumer(conn, "b")
    assert one(conn, flags) == [False, True, True]
    value(conn, "drop_schedule", "s", "h")
    assert one(conn, flags) == [False, True, True]
    value(conn, "pause_schedule", "s", "h2")
    consumer(conn, "d")
    value(conn, "resume_schedule", "s", "h2")
    assert one(conn, flags) == [False, True, True, True]
    value(conn, "drop_schedule", "s", "h2")
    assert one(conn, flags) == [False, False, False, False]
    value(conn, "drop_stream", "s")
    assert one(conn, "select count(*) from pgqueue.schedule_turns") == 0
    value(conn, "create_stream", "s")


def test_a_consumer_that_is_made_meanwhile_looks_too(conn: Conn, session: Session) -> None:
    """Whoever of the two is first."""
    other = session()
    with ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            consumer(conn, "a")
            made = pool.submit(schedule, other)
            wait_for_a_lock(conn)
        made.result()
        with conn.transaction():
            value(conn, "drop_schedule", "s", "h")
            schedule(conn)
            made = pool.submit(consumer, other, "b")
            wait_for_a_lock(conn)
        made.result()
    value(conn, "drop_schedule", "s", "h")
    with conn.transaction():
        conn.execute("set transaction isolation level repeatable read")
        assert one(conn, "select count(*) from pgqueue.schedules") == 0
        schedule(other)
        consumer(conn, "c")
    assert one(conn, "select bool_and(scheduled) from pgqueue.consumers")


def test_a_consumer_that_was_made_with_an_older_snapshot_looks_no_longer_than_needed(
    conn: Conn, session: Session
) -> None:
    flags = "select array_agg(scheduled order by consumer_id) from pgqueue.consumers"
    for level, name in (("repeatable read", "a"), ("serializable", "b")):
        with conn.transaction():
            conn.execute(f"set transaction isolation level {level}".encode())
            consumer(conn, name)
    assert one(conn, flags) == [True, True]
    other = session()
    with conn.transaction():
        conn.execute("select from pgqueue.consumers where name = 'a' for share")
        maintain(other)
        assert one(other, flags) == [True, False], "it waits for nobody"
    maintain(conn)
    assert one(conn, flags) == [False, False]
    assert one(conn, "select array_agg(distinct profile) from pgqueue.consumers") == ["simple"]


def test_maintain_beside_a_new_schedule_leaves_that_consumers_look(
    conn: Conn, session: Session
) -> None:
    other = session()
    with conn.transaction():
        conn.execute("set transaction isolation level repeatable read")
        consumer(conn, "a")
    with conn.transaction():
        schedule(conn)
        maintain(other)
    maintain(conn)
    assert one(conn, "select scheduled from pgqueue.consumers")
    value(conn, "pause_schedule", "s", "h")
    maintain(conn)
    value(conn, "resume_schedule", "s", "h")
    assert one(conn, "select scheduled from pgqueue.consumers")


# Others


def test_a_transaction_that_stays_open_with_a_schedule_keeps_nobody_waiting(
    conn: Conn, session: Session
) -> None:
    """Others claim what there is; when it is rolled back, they send it."""
    consumer(conn)
    consumer(conn, "other")
    schedule(conn)
    send(conn)
    clock.pass_time(conn, timedelta(hours=1))
    open_one = session()
    open_one.execute("begin")
    assert len(receive(open_one, name="other")) == 2
    conn.execute("set lock_timeout = '2s'")
    assert len(receive(conn)) == 1
    assert now(conn) < value(conn, "next_due", "s", "c") <= now(conn) + seconds(1)
    assert value(open_one, "next_due", "s", "c") > now(conn) + seconds(1), "it has sent it"
    open_one.execute("rollback")
    assert value(conn, "next_due", "s", "c") <= now(conn)
    assert len(receive(conn)) == 1


def test_dead_rows_behind_a_long_transaction_cost_a_claim_nothing(
    conn: Conn, session: Session
) -> None:
    consumer(conn)
    schedule(conn)
    assert receive(conn) == []
    before = cost(conn, "select * from pgqueue.claim('s', 'c')")
    old = session()
    old.execute("begin isolation level repeatable read")
    old.execute("select 1")
    for _ in range(300):
        conn.execute("update pgqueue.schedules set next_at = now()")
        conn.execute("select _pgqueue.record_turn(stream_id) from pgqueue.streams")
    maintain(conn)
    acked(conn, "s", "c")
    assert receive(conn) == []
    assert cost(conn, "select * from pgqueue.claim('s', 'c')") <= before + 10


@pytest.mark.promise("feature: recurring, by cron or interval")
def test_each_time_comes_once_however_many_claim_and_die(conn: Conn, url: str) -> None:
    """Three consumers, six claimers, and backends that are killed at it."""
    names = ["a", "b", "c"]
    for name in names:
        consumer(conn, name)
    for i in range(20):
        schedule(conn, f"h{i}", p_every="1 s")
    over = threading.Event()
    got: dict[str, Counter[int]] = {name: Counter() for name in names}
    pids: list[int] = []

    def work(name: str) -> None:
        while not over.is_set():
            lost = (psycopg.OperationalError, psycopg.InterfaceError)
            with contextlib.suppress(*lost), connection.connect(url) as worker:
                pids.append(worker.info.backend_pid)
                while not over.is_set():
                    for message in receive(worker, 1, name):
                        got[name][message.seq] += 1
                        value(worker, "ack", message.claim_id)

    pool = ThreadPoolExecutor(6)
    claimers = [pool.submit(work, name) for name in names * 2]
    chance = random.Random(5)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        time.sleep(0.03)
        if pids:
            conn.execute("select pg_terminate_backend(%s)", [chance.choice(pids[-6:])])
    over.set()
    for each in claimers:
        each.result(30)
    planned = conn.execute(
        "select headers ->> 'schedule', headers ->> 'planned_at', count(*)"
        " from pgqueue.messages group by 1, 2"
    ).fetchall()
    assert len(planned) >= 40  # 20 schedules of a second each
    assert [each for each in planned if each[2] > 1] == []
    conn.execute("select pgqueue.pause_schedule('s', schedule) from pgqueue.stream_schedules")
    clock.end_leases(conn)
    for name in names:
        got[name].update(acked(conn, "s", name))
        assert len(got[name]) == sum(n for _, _, n in planned)


def test_a_lock_is_no_error_of_a_schedule(conn: Conn, stream: int, session: Session) -> None:
    """A claim that cannot send its message fails; the next one sends it."""
    consumer(conn)
    schedule(conn)
    clock.pass_time(conn, timedelta(hours=1))
    conn.execute("set lock_timeout = '100ms'")
    other = session()
    with other.transaction():
        internals.lock_publish_alone(other, stream)
        with raises("55P03"):
            receive(conn)
    assert len(receive(conn)) == 1
    assert row(conn).last_error is None


def test_one_claim_sends_the_messages_of_a_bounded_number_of_schedules(conn: Conn) -> None:
    limits.shrink(conn)
    most = limits.limit(conn, "schedules", 0)
    consumer(conn)
    for name in "abcdef":
        schedule(conn, name)
    clock.pass_time(conn, timedelta(hours=1))
    receive(conn)
    assert one(conn, "select count(*) from pgqueue.messages") == most < 6
    acked(conn, "s", "c")
    assert one(conn, "select count(*) from pgqueue.messages") == 6


# The cost of a next time

PARTS = [0, 1, 2, 29, 30, 31]


def test_the_next_time_of_any_interval_is_found_in_few_steps(conn: Conn) -> None:
    """Wherever the interval begins; an interval with a negative part is refused."""
    conn.execute("create table calls (n bigint); insert into calls values (0)")
    conn.execute(
        "alter function _pgqueue.nth_time rename to nth;"
        "create sequence public.steps;"
        "create function _pgqueue.nth_time(p_start timestamptz, p_every interval, p_zone text,"
        " p_n bigint) returns timestamptz language sql volatile as $$"
        " select _pgqueue.nth($1, $2, $3, $4) from (select nextval('public.steps') offset 0) s $$"
    )
    rng = random.Random(7)
    found = 0
    for _ in range(40):
        months, days, seconds = (rng.choice(PARTS) * rng.choice([1, 1, 1, -1]) for _ in range(3))
        every = f"{months} months {days} days {seconds * rng.choice([1, 3600])} seconds"
        start = rng.choice(
            ["4713-01-01 00:00 BC", "0001-02-28", "1970-01-31", "2024-02-29 02:30", "2200-01-01"]
        )
        before = one(conn, "select nextval('public.steps')")
        try:
            times = call(
                conn, "schedule_times", p_every=every, p_start=start, p_count=2,
                p_time_zone=rng.choice([BERLIN, "UTC"]), p_after="2026-11-01 00:00+00",
            )  # fmt: skip
        except psycopg.Error as error:
            assert error.sqlstate == "PQ003", every  # noqa: PT017
            allowed = one(
                conn, "select %s::interval between interval '1 s' and interval '10 years'", every
            )
            assert min(months, days, seconds) < 0 or not allowed, every
            continue
        found += 1
        assert min(months, days, seconds) >= 0, every
        assert one(conn, "select nextval('public.steps')") - before < 150, (every, start)
        assert len(times) == 2
    assert found > 7


def test_the_first_time_after_is_found(conn: Conn) -> None:
    """It is one of the times, and no earlier time is after p_after."""
    rng = random.Random(3)
    for _ in range(12):
        months, days, hours = rng.choice([(1, 0, 0), (0, 1, 0), (1, 1, 3), (3, 0, 0), (12, 0, 0)])
        every = f"{months} months {days} days {hours} hours"
        start = one(conn, "select '2020-01-31'::timestamptz + %s * interval '1 day'",
                    rng.randrange(400))  # fmt: skip
        after = start + timedelta(days=rng.randrange(-10, 400), seconds=rng.randrange(86400))
        most = 410 // (28 * months + days) + 1
        expected = one(
            conn, "select min(t) from (select _pgqueue.nth_time(%s, %s::interval, %s, n) t"
            " from generate_series(0, %s) n) x where t > %s", start, every, BERLIN, most, after,
        )  # fmt: skip
        got = one(
            conn, "select _pgqueue.next_by_interval(%s, %s::interval, %s, %s)",
            start, every, BERLIN, after,
        )  # fmt: skip
        assert got == expected, (start, every, after)


def test_a_schedule_of_0_1_0_with_a_negative_part_holds_up_nobody(conn: Conn) -> None:
    value(conn, "create_schedule", "s", "odd", p_every="1 day", p_data="x", p_start="1970-01-01")
    consumer(conn)
    conn.execute("set statement_timeout = '5s'")
    for every in ("1 mon -29 days", "1 year -300 days", "-1 mon 60 days"):
        with conn.transaction(force_rollback=True):
            conn.execute(
                "update pgqueue.schedules set every = %s::interval, next_at = clock_timestamp()",
                [every],
            )
            conn.execute("select _pgqueue.record_turn(stream_id) from pgqueue.schedules")
            assert len(receive(conn, 10)) == 1, every
            assert one(conn, "select next_at > clock_timestamp() from pgqueue.schedules"), every


def test_the_next_time_of_a_rare_expression_is_bounded(conn: Conn) -> None:
    """Whether it ever comes is known after 41 years, a day at a time within its months."""
    conn.execute("set statement_timeout = '5s'")
    for cron in ("0 0 29 2 *", "0 0 29 2 0", "59 23 31 12 6", "* * 29 2 3"):
        times = [row[0] for row in call(conn, "schedule_times", cron, p_count=2)]
        assert times == sorted(times), cron
    for cron in ("0 0 31 4,6 *", "0 0 30 2 *"):
        assert refused(conn, "schedule_times", cron) == ("PQ003", "p_cron")


def test_a_clock_that_was_ahead_and_is_set_back_stops_no_schedule(conn: Conn) -> None:
    """What was sent in the wrong time was sent; and the rest goes on from now."""
    consumer(conn)
    schedule(conn, "cron", p_cron="0 * * * *")
    schedule(conn, "resumed", p_cron="0 * * * *")
    value(conn, "pause_schedule", "s", "resumed")
    schedule(conn, "replaced", p_cron="@yearly")
    for name in ("later", "later, resumed"):
        schedule(conn, name, p_start=one(conn, "select now() + interval '30 days'"))
    clock.pass_time(conn, timedelta(days=7))
    maintain(conn)
    value(conn, "resume_schedule", "s", "resumed")
    schedule(conn, "replaced", p_replace=True)
    schedule(conn, "every")
    schedule(conn, "from then", p_start=one(conn, "select now() + interval '50 minutes'"))
    value(conn, "pause_schedule", "s", "later, resumed")
    value(conn, "resume_schedule", "s", "later, resumed")
    clock.pass_time(conn, timedelta(days=-7))
    schedule(conn, "new", p_cron="30 * * * *")
    soon = ["cron", "resumed", "replaced", "every", "new"]
    as_said = {name: row(conn, name).next_at for name in ("later", "later, resumed", "from then")}
    for name in soon[:-1]:
        assert row(conn, name).next_at > now(conn) + timedelta(days=6)
    maintain(conn)
    for name in soon:
        assert now(conn) < row(conn, name).next_at <= now(conn) + timedelta(hours=1), name
    for name, at in as_said.items():
        assert row(conn, name).next_at == at, f"{name}: it begins in the future"
    acked(conn, "s", "c")
    clock.pass_time(conn, timedelta(hours=1))
    assert len(acked(conn, "s", "c")) == len(soon), "claims send them"


def test_a_clock_that_is_corrected_by_seconds_sends_no_time_twice(conn: Conn) -> None:
    schedule(conn, p_cron="* * * * *")
    clock.pass_time(conn, timedelta(minutes=1))
    maintain(conn)
    before = row(conn)
    assert before.last_sent_at is not None
    clock.pass_time(conn, timedelta(seconds=-40))
    maintain(conn)
    assert row(conn).next_at == before.next_at + timedelta(seconds=40)
