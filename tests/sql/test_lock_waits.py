"""Each wait for a lock is `_pgqueue.await`, which ends, and sooner where the session says so."""
# ruff: noqa: E501  a call is a line

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.sql import test_lock_order as order
from tests.sql.internals import lock_consumer, rows
from tests.sql.limits import set_constant
from tests.sql.queue import Conn, Session, call, claim_of, consumer, receive, send, value

LOCKED_PLACES = {"keep_newest", "mark_firsts", "cut_next", "end_delays"}
"""Functions that join rows by their places: they have the consumer's lock, without which nobody changes such rows."""

AS_POSTGRES = {
    "_pgqueue.delete_duplicates": "each send",
    "_pgqueue.take_dedup_key": "each send",
    "pgqueue.ack": "each acknowledgement",
    "_pgqueue.lock_bundles": "the claim is the caller's own; it has waited for the head before",
    "_pgqueue.lock_members": "who locks their head waits; who assigns messages has one for a moment",
    "_pgqueue.take_unfiltered": "nobody holds an unfiltered bundle without the consumer's lock",
    "_pgqueue.take_unassigned": "nobody holds a bundle of the line without the consumer's lock",
    "pgqueue.extend": "a worker's heartbeat; the claim is its own",
    "pgqueue.reader_extend": "a query's heartbeat; the claims are its own",
    "_pgqueue.save_partition": "the end of a worker's transaction; the partition is its own",
    "_pgqueue.publish_chunks": "many rows, for which only maintain() may be at work",
    "_pgqueue.end_delays": "nobody holds a delayed bundle without the consumer's lock",
    "pgqueue.reader_claim": "the reader's row, whose lock the call has",
    "pgqueue.create_group": "the consumer is new",
    "pgqueue.create_consumer": "the consumer is new",
    "pgqueue.bind": "rows of a table that the call has locked",
}
"""Functions that wait as Postgres does, by the session's lock_timeout alone: why."""

GUARDED = {
    "bindings": "by the lock of the table",
    "schedules": "by the lock of the schedules",
    "schedule_turns": "by the lock of the schedules",
    "consumer_cursors": "by the consumer's lock",
    "consumer_messages": "by the lock of the claim, or of the consumer; claimers pass over them",
    "readers": "by the reader's lock",
    "group_partitions": "by the worker's lease",
}
"""Tables whose rows nobody locks without another lock, for which all others wait first."""

OF_CALLERS = {
    *("capture.sql", "capture_triggers.sql", "table_apply.sql"),
    *("upgrade.sql", "schema.sql", "indexes.sql"),
}
"""Files that wait with the rights of others than the schema's owner, or before await() is there."""

CALLS = {
    "send": "'s', 'x', p_key => 'k'",
    "send_batch": "'s', array['x', 'y']",
    "reserve": "{stream}, 10",
    "claim": "'s', 'c', 10",
    "receive": "'s', 'k', 10",
    "receive_where": "'s', 'c', '$.data == \"x\"', 10",
    "nack": "{claim}",
    "defer": "{claim}, p_delay => '1 s'",
    "dead_letter": "{claim}",
    "lease_partitions": "'s', 'g', 'me'",
    "leave_group": "'s', 'g', 'me'",
    "read_partitions": "'s', 'g', '{{}}'",
    "note_offset": "'s', 'g', pgqueue.start_offset('s', 'latest')::jsonb",
    "create_group": "'s', 'new', 1",
    "reader_claim": "'{reader}', {consumer}, 0, 0, 10",
    "reader_resume": "'{reader}', {consumer}, 0, {readers_claim}",
    "reader_query": "'{reader}', 'query'",
    "reader_ack": "'{reader}', {consumer}, 0",
    "reader_release": "'{reader}', {consumer}, 0",
    "reader_fork": "'{reader}', {consumer}, 0, 0",
    "publish_staged": "'txn:a', 1, {stream}, '{{}}', 0",
    "settle_messages": '\'txn:a\', 1, \'[{{"action": "ack", "stream": "s", "consumer": "c", "seqs": "{{[1,9)}}"}}]\'',
    "redrive": "'s', 'c'",
    "purge_dead": "'s', 'c'",
    "create_stream": "'new'",
    "alter_stream": "'s', '{{\"max_bytes\": 1000}}'",
    "drop_stream": "'s'",
    "set_retention": "'s', p_messages => 5",
    "set_archive": "'s', '/archive'",
    "drop_archive": "'s'",
    "bind": "'s', 'a', 't'",
    "unbind": "'s', '#', 't'",
    "create_consumer": "'s', 'new', 'earliest', p_settings => '{{\"max_backlog\": 5}}'",
    "alter_consumer": "'s', 'k', '{{\"max_backlog\": 5, \"per_key_limit\": 5}}'",
    "drop_consumer": "'s', 'c'",
    "seek": "'s', 'c', 'earliest'",
    "replay": "'s', 'c', 'earliest'",
    "retry": "'s', 'c'",
    "cancel": "'s', 'c', '{{1,2}}'",
    "postpone": "'s', 'c', '{{1,2}}', now()",
    "pause": "'s', 'c'",
    "resume": "'s', 'k'",
    "create_schedule": "'s', 'daily', '@daily', p_data => 'x', p_replace => true",
    "pause_schedule": "'s', 'daily'",
    "resume_schedule": "'s', 'daily'",
    "drop_schedule": "'s', 'daily'",
    "maintain": "'1 us', '1 us'",
    "recover": "",
}
"""What may wait for a lock: a call of each public function."""


def test_one_function_says_for_how_long_to_wait(conn: Conn) -> None:
    found = rows(
        conn,
        "select proname from pg_proc where pronamespace in ('pgqueue'::regnamespace, "
        "'_pgqueue'::regnamespace) and (array_to_string(proconfig, ' ') ~ 'lock_timeout' "
        "or prosrc ~ 'set_config\\(''lock_timeout') order by 1",
    )
    named = {row.proname for row in found}
    assert named == {"await", "change_capture", "capture_partitions"}


def test_every_lock_that_is_waited_for_is_waited_for_in_one_way() -> None:
    functions, executed, callers = {}, set(), {}
    for file, lines in order._lines().items():
        if file.rpartition("/")[2] in OF_CALLERS:
            continue
        text = "\n".join(lines)
        for part in re.split(r"^(?=create or replace |do \$\$)", text, flags=re.MULTILINE):
            for literal in order.EXECUTED.findall(part):
                executed |= set(re.findall(r"(_pgqueue\.\w+)\(", literal))
            if start := order.DEFINED.match(part):
                functions.setdefault(start[1], []).append((file, part[start.end() :]))
                for called in order.CALLED.findall(part[start.end() :]):
                    callers.setdefault(called, set()).add(start[1])
    steps = set(order.CALLED_BY_NAME["_pgqueue.maintain_segments"])

    def is_awaited(name: str, seen: frozenset[str] = frozenset()) -> bool:
        by = callers.get(name, set()) - {name}
        return name in executed | steps or (
            name not in seen and bool(by) and all(is_awaited(each, seen | {name}) for each in by)
        )

    wrong = []
    for name, parts in functions.items():
        for file, part in parts:
            lines = part.split("\n")
            for i, line in enumerate(lines):
                code = line.partition("--")[0].strip()
                if not code or order._name_of(lines, i) is None or order.PASSED_OVER.search(code):
                    continue
                is_text = code.startswith("'") or re.search(r"(then|else|,) '(select|with) ", code)
                if not (is_text or is_awaited(name) or name in AS_POSTGRES):
                    wrong.append(f"{file}: {name}: {code}")
    assert not wrong, "\n".join(wrong)


def test_no_row_is_changed_by_the_place_where_it_was_read_without_a_lock() -> None:
    """PostgreSQL 15.5 does not judge a join by ctid again after a wait: it would change a newer row."""
    found = set()
    for lines in order._lines().values():
        name = ""
        for line in lines:
            name = start[1] if (start := order.DEFINED.match(line)) else name
            if re.search(r"\b\w+\.(ctid|tid) = \w+\.(ctid|tid)\b", line):
                found.add(name)
    assert found == {f"_pgqueue.{each}" for each in LOCKED_PLACES}


OF_LOCKED = {
    "pgqueue.ack": "bundles that lock_members() has locked",
    "_pgqueue.move_all_to_long": "bundles that the transaction has claimed",
    "_pgqueue.claim_bundles": "bundles that the claim has locked",
    "_pgqueue.remove_messages": "bundles that the caller has locked",
    "pgqueue.reader_resume": "a reader's bundles, with the lock of the consumer",
    "_pgqueue.quarantine": "bundles that lock_bundles() has locked",
}
"""Functions that change bundles by their places (tids()), and why no session changes these bundles."""


def test_bundles_are_changed_by_their_places_only_with_their_locks() -> None:
    """A statement that waits for a row by its place passes over it, if it has another place then."""
    found = set()
    for lines in order._lines().values():
        name = ""
        for line in lines:
            name = start[1] if (start := order.DEFINED.match(line)) else name
            if "_pgqueue.tids(" in line and name != "_pgqueue.tids":
                found.add(name)
    assert found == set(OF_LOCKED)


@pytest.fixture
def known(conn: Conn, stream: int) -> dict[str, Any]:
    """A stream with a row in each table that calls change; names and ids for CALLS."""
    value(conn, "alter_stream", "s", '{"dedup_window": "1 day"}')
    value(conn, "create_stream", "t")
    value(conn, "bind", "s", "#", "t")
    value(conn, "set_retention", "s", p_messages=3, p_dead="1 day")
    value(conn, "set_archive", "s", "/archive")
    value(conn, "create_schedule", "s", "daily", "@daily", p_data="x")
    hour = timedelta(hours=1)  # no lease ends meanwhile
    ids = {name: consumer(conn, name, visibility_timeout=hour) for name in ("c", "r")}
    ids["k"] = consumer(conn, "k", "key", keep_history="1 day")
    value(conn, "pause", "s", "k")
    group = value(conn, "create_group", "s", "g", 1, "earliest")
    reader = uuid.uuid4()
    for _ in range(6):
        send(conn, p_key="k", p_dedup_key=str(uuid.uuid4()))
    value(conn, "dead_letter", claim_of(receive(conn, 1)))
    of_reader = call(conn, "reader_claim", reader, ids["r"], 0, 0, 2)[0].claim_id
    claim = claim_of(receive(conn, 2))
    value(conn, "maintain")
    return {
        "stream": stream,
        "consumer": ids["r"],
        **{f"consumer_{name}": id_ for name, id_ in {**ids, "g": group}.items()},
        "claim": claim,
        "reader": reader,
        "readers_claim": of_reader,
    }


def hold_everything(holder: Conn, known: dict[str, Any]) -> None:
    """Lock each row, the bindings, and each advisory lock, in a transaction that stays open."""
    holder.execute("begin")
    value(holder, "create_consumer", "t", "new")
    for table in tables(holder):
        hold_rows(holder, table)
    for lock in [*WAITERS, "lock seqs"]:
        if not lock.startswith("rows"):
            hold(holder, lock, known)


def tables(conn: Conn) -> list[str]:
    """All tables of the schema, those of messages too."""
    found = rows(
        conn,
        "select oid::regclass::text as name from pg_class "
        "where relnamespace = 'pgqueue'::regnamespace and relkind = 'r' order by 1",
    )
    return [row.name for row in found]


def hold_rows(holder: Conn, table: str) -> None:
    """Lock all rows of a table."""
    holder.execute(f"select from {table} for update")  # type: ignore


def waits(
    conn: Conn, known: dict[str, Any], without: Collection[str] = ()
) -> dict[str, tuple[float, str]]:
    """By function, for how long its call took, and its error."""
    found = {}
    for name, arguments in CALLS.items():
        if name in without:
            continue
        began = time.monotonic()
        error = ""
        conn.execute("begin; set local statement_timeout = '4 s'")
        try:
            conn.execute(f"select * from pgqueue.{name}({arguments.format(**known)})")  # type: ignore
        except psycopg.Error as raised:
            error = f"{raised.sqlstate} {raised.diag.message_primary}"
        conn.execute("rollback")
        found[name] = time.monotonic() - began, error
    return found


ALLOWED = ("55P03", "PQ002", "PQ003", "PQ005", "PQ006", "PQ008", "PQ010", "PQ011", "55006")


WAITERS = {
    "lock history": "create_consumer create_group note_offset replay seek",
    "lock schedules": "create_schedule drop_schedule pause_schedule resume_schedule",
    "lock maintain": "drop_stream",
    "lock publish": "recover send send_batch",
    "consumer r": "drop_stream reader_claim reader_resume",
    "consumer c": "cancel defer drop_consumer drop_stream nack postpone purge_dead redrive replay retry seek "
    "settle_messages",
    "consumer k": "alter_consumer drop_stream",
    "consumer g": "drop_stream lease_partitions leave_group note_offset",
    "reader": "reader_ack reader_claim reader_fork reader_resume",
    "table bindings": "alter_stream bind drop_stream unbind",
    "rows archives": "drop_archive drop_stream set_archive",
    "rows consumer_messages": "cancel dead_letter defer drop_consumer drop_stream nack reader_claim "
    "reader_resume seek",
    "rows consumers": "alter_consumer drop_consumer drop_schedule drop_stream pause resume",
    "rows dead_messages": "drop_consumer drop_stream",
    "rows group_partitions": "drop_stream note_offset",
    "rows reader_claims": "drop_stream reader_ack reader_claim reader_resume",
    "rows retention": "drop_stream set_retention",
    "rows streams": "alter_consumer alter_stream bind create_consumer create_group create_schedule drop_schedule "
    "drop_stream pause_schedule recover resume_schedule unbind",
    "rows of all other tables": "drop_stream",
}
"""Which calls wait for a lock; the others go on beside who holds it."""


def hold(holder: Conn, lock: str, known: dict[str, Any]) -> None:
    """Take a lock of WAITERS in the holder's transaction."""
    kind, _, name = lock.partition(" ")
    if kind == "lock":
        holder.execute(
            f"select pg_advisory_xact_lock(_pgqueue.lock_class_{name}(), {known['stream']})".encode()
        )
    elif kind == "consumer":
        lock_consumer(holder, known[f"consumer_{name}"])
    elif kind == "reader":
        holder.execute("select _pgqueue.lock_reader(%s)", [known["reader"]])
    elif kind == "table":
        holder.execute(f"lock table pgqueue.{name} in share row exclusive mode".encode())
    elif name != "of all other tables":
        hold_rows(holder, f"pgqueue.{name}")
    else:
        others = {*GUARDED, *(each.removeprefix("rows ") for each in WAITERS)}
        for table in tables(holder):
            if table.removeprefix("pgqueue.") not in others:
                hold_rows(holder, table)


def test_a_call_waits_for_the_locks_that_it_needs_and_for_no_others(
    conn: Conn, session: Session, known: dict[str, Any]
) -> None:
    holder, waited, wrong = session(), {}, []
    conn.execute("set lock_timeout = '40 ms'")
    for lock, waiters in WAITERS.items():
        with holder.transaction():
            hold(holder, lock, known)
            # these take long, and wait for few; the last one depends on the clock
            passed_over = {"create_stream", "recover", "reader_release"} - set(waiters.split())
            found = waits(conn, known, passed_over)
        waited[lock] = " ".join(sorted(n for n, (_, e) in found.items() if e.startswith("55P03")))
        wrong += [
            (lock, name, took, error)
            for name, (took, error) in found.items()
            if took > 2 or (error and not error.startswith(ALLOWED))
        ]
    assert waited == WAITERS
    assert not wrong


@pytest.fixture
def impatient(conn: Conn) -> None:
    """Calls wait for 0.05 s in place of a minute."""
    set_constant(conn, "patience", "50 ms")


@pytest.mark.usefixtures("impatient")
@pytest.mark.promise("guarantee: A held consumer")
def test_each_function_gives_up_after_a_while(
    conn: Conn, session: Session, known: dict[str, Any]
) -> None:
    hold_everything(session(), known)
    found = waits(conn, known)
    assert not {name: each for name, each in found.items() if each[0] > 2}
    errors = {name: error for name, (_, error) in found.items() if error}
    assert not {n: e for n, e in errors.items() if not e.startswith(ALLOWED)}


@pytest.mark.longer
@pytest.mark.usefixtures("impatient")
def test_each_function_gives_up_whichever_table_is_held(
    conn: Conn, opened: Session, known: dict[str, Any]
) -> None:
    """Where all is held, a call shows only the first lock that it waits for."""
    wrong = {}
    for table in sorted({*tables(conn)} - {f"pgqueue.{name}" for name in GUARDED}):
        holder = opened()
        hold_rows(holder, table)
        found = waits(conn, known)
        holder.execute("rollback")
        for name, (took, error) in found.items():
            if took > 2 or (error and not error.startswith(ALLOWED)):
                wrong[f"{name} behind {table}"] = took, error
    assert not wrong


def test_all_functions_that_may_wait_are_called(conn: Conn) -> None:
    found = rows(
        conn,
        "select distinct proname from pg_proc where pronamespace = 'pgqueue'::regnamespace "
        "and provolatile = 'v' and prokind = 'f'",
    )
    without = {
        # which wait as Postgres does
        "ack", "extend", "reader_extend", "commit_offset",
        # which wait for nothing, or as others of CALLS do
        "publish_written", "begin_write", "begin_write_of", "stage", "plan_partitions", "revive_messages", "create_roles",
        "listen_done",
        # which pass over what others hold
        "unstage",
        # of a table, where the batch waits as publish_staged, and tests/sql/test_table_sink.py has the rest
        "open_table", "open_table_write", "begin_table_batch", "apply_table_batch", "drop_table_write",
        # which read; those with an offset lock the history, as seek does
        "end_after", "end_offset", "offset_lag", "peek", "peek_at", "read",
        "read_plan", "read_to", "size_between", "start_offset",
        # which try to have the export lock; the stream's row is in test_archive.py
        "lock_export", "begin_export", "end_export", "forget_leftover",
        # which wait for publications, not for locks
        "start_waiting", "still_publishing", "stop_waiting",
        # capture, whose waits are its own
        "capture", "release", "change_capture", "execute_as", "capture_script", "note_captures",
        "send_captured", "was_truncated",
    }  # fmt: skip
    names = {row.proname for row in found}
    assert set(CALLS) <= names
    assert sorted(names - set(CALLS) - without) == []


def test_a_circle_of_waits_is_a_deadlock(conn: Conn, session: Session, stream: int) -> None:
    """Its victim is told so, and rolls back; the other one goes on."""
    first, second = (consumer(conn, name) for name in ("first", "second"))
    sessions = session(), session()

    def lock(mine: Conn, consumer_id: int) -> str | None:
        try:
            lock_consumer(mine, consumer_id)
        except psycopg.Error as error:
            mine.execute("rollback")
            return error.sqlstate
        return None

    for mine, id_ in zip(sessions, (first, second), strict=True):
        mine.execute("begin")
        assert lock(mine, id_) is None
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(lock, *each) for each in zip(sessions, (second, first), strict=True)]
    assert {end.result() for end in ends} == {None, "40P01"}
