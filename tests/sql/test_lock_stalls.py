"""A call that changes a stream or consumer meets an open transaction: others go on meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.processes import wait_until
from tests.sql import clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")

WAITING = "select exists (select from pg_locks where pid = %s and not granted)"
BUNDLE = "select from pgqueue.consumer_messages where token is null for update"


@pytest.fixture
def aside(url: str) -> Callable[..., Aside]:
    """Calls a function in a session of its own, beside the test."""
    return lambda *args, **named: Aside(url, args, named)


class Aside(threading.Thread):
    """A call of a function; `error` is what it raised."""

    def __init__(self, url: str, args: tuple, named: dict) -> None:
        super().__init__(daemon=True)
        self.url, self.args, self.named = url, args, named
        self.error: psycopg.Error | None = None
        self.start()

    def run(self) -> None:
        with connection.connect(self.url) as mine:
            try:
                value(mine, *self.args, **self.named)
            except psycopg.Error as error:
                self.error = error

    def ends(self) -> None:
        """Wait until it is done, without an error."""
        self.join(20)
        assert not self.is_alive()
        assert self.error is None


def longest(of: Callable[[], object], seconds: float) -> tuple[int, float]:
    """How often something can be done for so long, and the longest that it takes."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        of()
        times.append(time.monotonic() - began)
    return len(times), max(times)


@pytest.mark.parametrize("what", ["duplicate", "reservation", "message"])
def test_a_stream_is_dropped_beside_its_senders_and_its_tables_after_them(
    conn: Conn, opened: Session, stream: int, what: str
) -> None:
    value(conn, "create_stream", "other")
    value(conn, "alter_stream", "s", '{"dedup_window": "1 day"}')
    send(conn, p_dedup_key="k")
    busy = opened()
    value(busy, "send", "other", "x")
    if what == "reservation":
        value(busy, "reserve", stream, 10)
    else:
        send(busy, p_dedup_key="k" if what == "duplicate" else None)
    value(conn, "drop_stream", "s")
    with pytest.raises(psycopg.Error, match="unknown stream"):
        send(conn)
    for _ in range(2):
        call(conn, "maintain")
    assert one(conn, "select count(*) from pgqueue.dropped_streams") == 1
    count, most = longest(lambda: value(conn, "send", "other", "x"), 0.5)
    assert count > 10
    assert most < 0.5
    busy.execute("commit")
    call(conn, "maintain")
    for table in ("dropped_streams", "dedup_keys", "reservations"):
        assert one(conn, f"select count(*) from pgqueue.{table}") == 0
    assert one(conn, "select to_regclass('pgqueue.messages_1')") is None


def test_the_tables_of_a_dropped_stream_do_not_wait_for_autovacuum(
    conn: Conn, session: Session
) -> None:
    busy = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and backend_type = 'autovacuum worker' and query like '%slowly%'"
    )
    conn.execute(
        "create table slowly with (autovacuum_vacuum_threshold = 0,"
        " autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 100,"
        " autovacuum_vacuum_cost_limit = 1) as select generate_series(1, 200000) as n"
    )
    conn.execute("alter system set autovacuum_naptime = '1 s'")
    try:
        conn.execute("select pg_reload_conf()")
        session().execute("delete from slowly")
        end = time.monotonic() + 120
        while not one(conn, busy):
            assert time.monotonic() < end, "autovacuum did not begin"
            time.sleep(0.1)
        value(conn, "drop_stream", "s")
        call(conn, "maintain")
        assert one(conn, busy) > 0, "autovacuum was too quick"
    finally:
        conn.execute("alter system reset autovacuum_naptime")
        conn.execute("select pg_reload_conf()")
    assert one(conn, "select count(*) from pgqueue.dropped_streams") == 0


def test_who_has_seen_a_stream_that_is_dropped_comes_upon_no_table_that_is_gone(
    conn: Conn, session: Session
) -> None:
    value(conn, "create_stream", "other")
    call(conn, "bind", "other", "*", "s")
    opened = session()
    opened.execute("begin isolation level repeatable read")
    opened.execute("select count(*) from pgqueue.streams")
    value(conn, "drop_stream", "s")
    call(conn, "maintain")
    value(opened, "send", "s", "x")
    value(opened, "send", "other", "x", p_key="a")  # and a copy
    opened.execute("commit")
    call(conn, "maintain")
    assert one(conn, "select count(*) from pgqueue.dropped_streams") == 0
    assert one(conn, "select count(*) from pgqueue.publications where stream_id = 1") == 0


def test_a_chore_that_fails_is_undone_alone(conn: Conn) -> None:
    warned: list[str] = []
    conn.add_notice_handler(lambda notice: warned.append(str(notice.message_primary)))
    value(conn, "create_stream", "t")
    for name in ("s", "t"):
        value(conn, "set_retention", name, p_messages=1)
    conn.execute(
        "create or replace function _pgqueue.delete_history(out o_deleted bigint, out "
        "o_unfinished bigint) language plpgsql as $$ begin raise exception 'broken'; end $$"
    )
    conn.execute("alter table pgqueue.messages_1 rename to vanished")
    call(conn, "maintain")
    assert any("delete_history" in text and "broken" in text for text in warned)
    made = one(conn, "select array_agg(distinct stream_id) from pgqueue.segments")
    assert made == [2], "the other stream is tended"


def test_a_consumer_is_dropped_beside_an_open_sender(
    conn: Conn, opened: Session, aside: Callable[..., Aside]
) -> None:
    consumer(conn, "limited", max_backlog=100)
    busy = opened()
    send(busy)
    aside("drop_consumer", "s", "limited").ends()
    assert longest(lambda: send(conn), 0.3)[1] < 0.2
    send(busy)
    call(conn, "maintain")
    busy.execute("commit")
    call(conn, "maintain")
    assert one(conn, "select count(*) from pg_class where relname like 'room%%'") == 0


def test_what_a_hung_transaction_keeps_from_a_consumer_names_its_session(
    url: str, conn: Conn, new_role: Callable[..., str]
) -> None:
    """By whatever an operator asks, and in the log of the claim that gets nothing."""
    value(conn, "create_consumer", "s", "c", p_ordering="key")
    sent = [value(conn, "send", "s", "x", p_key=str(i)) for i in range(6)]
    warned: list[str] = []
    with connection.connect(url) as hung:
        hung.execute("set application_name to 'hung app'")
        hung.execute("begin")
        call(hung, "receive", "s", "c", 2)
        name = f"process {hung.info.backend_pid} ({hung.info.user}, hung app)"
        time.sleep(2.1)
        conn.add_notice_handler(lambda notice: warned.append(str(notice.message_primary)))
        clock_of = "select because from pgqueue.consumer_health"
        assert f"; the consumer is locked by {name}, in a transaction since " in one(conn, clock_of)
        with connection.connect(new_role("observer")) as observer:
            assert f"; the consumer is locked by process {hung.info.backend_pid} (" in one(
                observer, clock_of
            )
        (explained,) = call(conn, "explain_message", "s", "c", sent[-1])
        assert f"; the consumer is locked by {name}, in a transaction since " in explained.because
        assert call(conn, "receive", "s", "c", 2) == []
        (warning,) = warned
        assert warning.startswith(
            "nothing can be claimed now: consumer 'c' of stream 's' is locked"
        )
        assert warning.endswith(name)
        for args in (
            ("cancel", "s", "c", [sent[-1]]),
            ("seek", "s", "c", "latest"),
            ("postpone", "s", "c", [sent[-1]], now(conn) + timedelta(hours=1)),
            ("drop_consumer", "s", "c"),
            ("alter_consumer", "s", "c", Jsonb({"per_key_limit": 1})),
            ("retry", "s", "c"),
        ):
            conn.execute("set lock_timeout to 300")
            with pytest.raises(psycopg.Error, match=re.escape(f"held by {name}")):
                value(conn, str(args[0]), *args[1:])
        hung.execute("rollback")
    conn.execute("reset lock_timeout")
    (explained,) = call(conn, "explain_message", "s", "c", sent[-1])
    assert "locked" not in explained.because


def test_a_claim_makes_no_deadlock_with_who_waits_for_a_bundle_that_it_does_not_claim(
    conn: Conn, opened: Session
) -> None:
    """A claim may lock a bundle and not claim it. `skip locked` waits for it where the row was
    updated just then; a plain lock, as here, waits always.
    """
    consumer_id = consumer(conn)
    for _ in range(2):
        value(conn, "send", "s", "x", p_expires_at=now(conn) + timedelta(hours=1))
    receive(conn, 1)  # the other message is in a bundle that only a claim with the lock claims
    busy, warned = opened(), []
    internals.lock_consumer(busy, consumer_id)
    conn.add_notice_handler(lambda notice: warned.append(notice.message_primary))
    claiming = conn.info.backend_pid

    def lock_bundle() -> None:
        wait_until(lambda: one(busy, WAITING, claiming))
        busy.execute(BUNDLE)

    other = threading.Thread(target=lock_bundle)
    with conn.transaction():
        conn.execute(BUNDLE)
        other.start()
        began = time.monotonic()
        assert receive(conn, 1) == []
        assert time.monotonic() - began < 0.9, "less than the second that a deadlock takes"
    other.join(20)
    assert not other.is_alive()
    busy.execute("commit")
    assert warned == [], "nobody has to do anything"
    assert len(receive(conn, 1)) == 1


def test_workers_go_on_beside_a_seek_that_waits_for_an_open_claim(
    conn: Conn, opened: Session, aside: Callable[..., Aside]
) -> None:
    consumer(conn)
    send(conn)
    send(conn)
    receive(conn, 1)
    busy = opened()
    assert len(receive(busy, 1)) == 1
    moved = aside("seek", "s", "c", "latest")

    def work() -> None:
        send(conn)
        receive(conn, 10)

    count, _ = longest(work, 1)
    assert moved.is_alive()
    assert count > 15, "it was 6 a second"
    busy.execute("commit")
    moved.ends()


def test_settings_that_need_all_runs_do_not_deadlock_a_worker(
    conn: Conn, opened: Session, aside: Callable[..., Aside]
) -> None:
    consumer(conn)
    send(conn)
    send(conn)
    receive(conn, 1)
    worker = opened()
    assert len(receive(worker, 1)) == 1
    changed = aside("alter_consumer", "s", "c", '{"fair": true}')
    wait_for_a_lock(conn)
    for _ in range(3):
        send(conn)
        assert len(receive(worker, 10)) == 1, "needs the consumer's lock"
        time.sleep(0.2)
    worker.execute("commit")
    changed.join(20)
    assert changed.error is not None
    assert changed.error.sqlstate == "PQ003", "it has claims"


def test_consumers_are_made_beside_a_retention_that_is_being_set(
    conn: Conn, opened: Session
) -> None:
    value(conn, "set_retention", "s", p_done=True)
    busy = opened()
    value(busy, "set_retention", "s", p_messages=5)
    conn.execute("set statement_timeout = '5 s'")
    call(conn, "maintain")
    consumer(conn)


def test_consumers_are_made_and_changed_while_a_schedules_message_is_uncommitted(
    conn: Conn, opened: Session, aside: Callable[..., Aside]
) -> None:
    consumer(conn)
    value(conn, "create_schedule", "s", "hourly", p_every="1 hour", p_data="x")
    clock.pass_time(conn, timedelta(hours=2))
    worker = opened()
    assert len(receive(worker)) == 1
    waits = aside("create_schedule", "s", "daily", "@daily", p_data="x")
    wait_for_a_lock(conn)
    conn.execute("set statement_timeout = '10 s'")
    consumer(conn, "another")
    value(conn, "alter_consumer", "s", "another", '{"max_backlog": 5}')
    assert waits.is_alive()
    worker.execute("commit")
    waits.ends()


def test_two_services_that_make_consumers_with_limits_do_not_deadlock(
    conn: Conn, opened: Session, aside: Callable[..., Aside]
) -> None:
    limits = Jsonb({"max_backlog": 100})
    starting = opened()
    value(starting, "create_consumer", "s", "a", p_if_not_exists=True, p_settings=limits)
    waits = aside("create_consumer", "s", "b", p_if_not_exists=True, p_settings=limits)
    wait_for_a_lock(conn)
    value(starting, "create_consumer", "s", "b", p_if_not_exists=True, p_settings=limits)
    starting.execute("commit")
    waits.ends()


def test_a_groups_workers_go_on_while_an_offset_waits_for_the_history(
    conn: Conn, opened: Session, stream: int, aside: Callable[..., Aside]
) -> None:
    value(conn, "create_group", "s", "g", 1, "earliest")
    offset = value(conn, "start_offset", "s", "latest")
    trimming = opened()
    trimming.execute("select _pgqueue.try_lock_history_alone(%s)", [stream])
    noted = aside("note_offset", "s", "g", Jsonb(offset))
    wait_for_a_lock(conn)
    conn.execute("set statement_timeout = '5 s'")
    call(conn, "lease_partitions", "s", "g", "me")
    trimming.execute("commit")
    noted.join(20)
    assert noted.error is not None
    assert noted.error.sqlstate == "PQ006", "the group has a worker now"


@pytest.mark.longer
def test_streams_come_and_go_beside_maintain_and_producers(url: str, conn: Conn) -> None:
    """No producer of another stream fails, nor does maintain."""
    over = threading.Event()
    errors: list[str] = []

    def loop(do: Callable[[Conn, int], None]) -> None:
        with connection.connect(url) as mine:
            mine.add_notice_handler(lambda notice: errors.append(str(notice.message_primary)))
            i = 0
            while not over.is_set():
                i += 1
                try:
                    do(mine, i)
                except psycopg.Error as error:
                    errors.append(f"{error.sqlstate} {error}")

    def come_and_go(mine: Conn, i: int) -> None:
        name = f"{threading.get_ident()} {i}"
        value(mine, "create_stream", name, p_settings='{"dedup_window": "1 day"}')
        value(mine, "create_consumer", name, "c", p_settings='{"max_backlog": 1000}')
        value(mine, "set_retention", name, p_messages=1)
        for j in range(5):
            value(mine, "send", name, "x", p_dedup_key=str(j % 3))
        call(mine, "receive", name, "c", 2)
        value(mine, "drop_stream", name)

    def produce(mine: Conn, i: int) -> None:
        value(mine, "send", "s", "x")

    def maintain(mine: Conn, i: int) -> None:
        call(mine, "maintain", "1 us", "1 us")

    threads = [
        threading.Thread(target=loop, args=[do], daemon=True)
        for do in (come_and_go, come_and_go, produce, produce, maintain, maintain)
    ]
    for thread in threads:
        thread.start()
    time.sleep(6)
    over.set()
    for thread in threads:
        thread.join(40)
    assert not errors, errors[:10]
