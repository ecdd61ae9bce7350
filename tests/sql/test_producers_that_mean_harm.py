"""A producer that means harm: what it may write, and whose sinks it may use."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.copy_target import COPY_TARGET
from tests.conftest import user_of
from tests.sql.queue import *

pytestmark = [pytest.mark.usefixtures("stream", "allowed_afterwards"), pytest.mark.all_versions]

WRITE = b"insert into pgqueue.written (stream_id, seq, data) values (%s, %s, 'x')"


@pytest.fixture
def producers(new_role: Callable[..., str]) -> Iterator[list[Conn]]:
    """Sessions of two roles that are producers."""
    with ExitStack() as stack:
        yield [stack.enter_context(connection.connect(new_role("producer"))) for _ in range(2)]


# Numbers


def refused(conn: Conn, stream: int, seq: int | None) -> None:
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        conn.execute(WRITE, [stream, seq])
    assert caught.value.sqlstate in ("PQ003", "55000"), caught.value


@pytest.mark.promise("operations: producers learn no names, write only reserved numbers")
def test_a_producer_writes_only_numbers_that_its_transaction_reserved(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    other, mean = producers
    second = value(conn, "create_stream", "t")
    first = send(conn)
    refused(mean, stream, first + 1)
    with other.transaction():
        (theirs,) = value(other, "reserve", stream, 10)
        with mean.transaction():
            (own,) = value(mean, "reserve", stream, 10)
            for seq in (own.lower, own.upper - 1):
                mean.execute(WRITE, [stream, seq])
            for seq in (
                *(theirs.lower, theirs.upper - 1, own.lower - 1, own.upper, first),
                *(own.upper + 5, 0, -1, 2**62, 2**63 - 1, -(2**63), None),
            ):
                refused(mean, stream, seq)
            refused(mean, second, own.lower + 1)
            refused(mean, 99, own.lower + 1)
        refused(mean, stream, own.lower + 1)  # the transaction that reserved it is over
        other.execute(WRITE, [stream, theirs.lower])
    assert send(conn) == own.upper
    call(conn, "set_retention", "s", p_for="1 hour")
    call(conn, "maintain")


def test_sinks_of_all_but_the_owner_copy_to_where_numbers_are_checked(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    mean, _ = producers
    assert one(conn, f"select {COPY_TARGET}") == "messages"
    assert one(mean, f"select {COPY_TARGET}") == "written"


def test_a_copy_that_goes_on_keeps_nobody_waiting(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    """Rows are checked as they come, and not at the end of the statement."""
    mean, _ = producers
    mean.execute("begin")
    (own,) = value(mean, "reserve", stream, 1)

    def write() -> None:
        with mean.cursor().copy(b"copy pgqueue.written (stream_id, seq, data) from stdin") as rows:
            for seq in range(own.lower, own.lower + 100_000):
                rows.write_row((stream, seq, "x"))
            conn.execute("set lock_timeout = '5s'")
            assert [send(conn) for _ in range(10)] == list(range(own.upper, own.upper + 10))

    with pytest.raises(psycopg.Error, match="was not reserved"):
        write()
    mean.execute("rollback")


def test_each_range_of_a_reservation_may_be_written(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    """Where others took numbers in between, rows are looked up one by one."""
    mean, _ = producers
    with mean.transaction():
        conn.execute(  # the next reservation has holes: somebody sends meanwhile
            "create or replace function _pgqueue.take_seqs(p_stream_id int, p_count int)"
            " returns bigint[] language sql"
            " as $$ select array_agg(n) from (select nextval('pgqueue.seq_' || $1) n"
            " from generate_series(1, 2 * $2)) s where n % 2 = 0 $$"
        )
        ranges = value(mean, "reserve", stream, 3)
        assert len(ranges) == 3
        for each in ranges:
            mean.execute(WRITE, [stream, each.lower])
            refused(mean, stream, each.lower + 1)
        assert value(mean, "stage", "sink", 0, stream, ranges) is not None


def test_the_path_of_a_producer_changes_nothing(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    mean, _ = producers
    (role,) = mean.execute("select current_user::text").fetchone() or ("",)
    conn.execute(f"create schema evil authorization {role}".encode())
    mean.execute(
        "create function evil.yes(bigint, bigint) returns boolean language sql as 'select true';"
        "create operator evil.>= (leftarg = bigint, rightarg = bigint, function = evil.yes);"
        "create operator evil.< (leftarg = bigint, rightarg = bigint, function = evil.yes);"
        "create function evil.currval(regclass) returns bigint language sql as 'select 1';"
        "set search_path = evil, pg_catalog"
    )
    with mean.transaction():
        (own,) = call(mean, "reserve", stream, 1)[0][0]
        refused(mean, stream, own.upper)


def test_so_many_numbers_cannot_be_reserved(conn: Conn, stream: int) -> None:
    for count in (0, -1, 10_000_001, 2**31 - 1):
        with raises("PQ003", "p_count must be 1 to 10000000"):
            value(conn, "reserve", stream, count)


# Sinks


@pytest.mark.promise("operations: a sink's role")
def test_a_sink_belongs_to_the_role_that_used_it_first(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    """Else a producer could say of a batch of another role's query that it was published."""
    owner, mean = producers
    block = stage(owner, stream, 1, sink="txn:nightly")
    assert publish(owner, stream, [block], 1, sink="txn:nightly") is True
    block = stage(mean, stream, 1, 10**11, sink="txn:nightly")
    for attempt in (
        lambda: publish(mean, stream, [block], 1, 10**11, "txn:nightly"),
        lambda: publish(mean, stream, [], 0, 1, "txn:nightly"),
        lambda: publish(mean, stream, [], 0, 0, "txn:nightly"),
        lambda: value(mean, "is_published", "txn:nightly", stream, 0),
    ):
        with raises("42501", "sink txn:nightly belongs to role"):
            attempt()
    block = stage(owner, stream, 1, 1, "txn:nightly")
    assert publish(owner, stream, [block], 1, 1, "txn:nightly") is True
    # members of the role, and the owner of the schema
    of_owner, of_mean = (one(each, "select session_user::text") for each in producers)
    assert value(conn, "is_published", "txn:nightly", stream, 1) is True
    conn.execute(f"grant {of_owner} to {of_mean}".encode())
    assert value(mean, "is_published", "txn:nightly", stream, 1) is True
    block = stage(mean, stream, 1, 2, "txn:nightly")
    assert publish(mean, stream, [block], 1, 2, "txn:nightly") is True


def test_each_kind_of_batch_of_a_sink_belongs_to_the_role_that_does_it(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    """One role publishes the batches of a query, another settles, and the first brings back."""
    consumer(conn)
    seq = send(conn)
    for each in producers:
        for role in ("consumer", "admin"):
            schema.grant(conn, role, one(each, "select session_user::text"))
    kinds = [
        lambda who, batch: publish(who, stream, [], 0, batch),
        lambda who, batch: settle(who, action("ack", [seq]), batch=batch),
        lambda who, batch: call(
            who, "revive_messages", "sink", batch, Jsonb([action("redrive", [seq])])
        ),
    ]
    for batch in range(2):
        for i, kind in enumerate(kinds):
            kind(producers[i % 2], batch)
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="sink belongs to role"):
                kind(producers[(i + 1) % 2], batch + 1)


def test_members_of_one_role_share_a_sink(
    conn: Conn, stream: int, producers: list[Conn], new_role: Callable[..., str]
) -> None:
    """As roles that are made anew each hour, and all belong to one application."""
    first, second = producers
    app = user_of(new_role())
    conn.execute(f"alter role {app} nologin".encode())
    assert publish(first, stream, [stage(first, stream, 1)], 1) is True
    conn.execute(f"grant {app} to {one(first, 'select session_user::text')}".encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        publish(second, stream, [stage(second, stream, 1, 1)], 1, 1)
    conn.execute(f"grant {app} to {one(second, 'select session_user::text')}".encode())
    assert publish(second, stream, [stage(second, stream, 1, 1)], 1, 1) is True
    # in a role with others, but not with the superuser who has another sink
    assert publish(conn, stream, [stage(conn, stream, 1, sink="b")], 1, sink="b") is True
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        value(second, "is_published", "b", stream, 0)


def test_a_sink_that_another_role_used_first_says_so_before_anything_is_dropped(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    owner, mean = producers
    block = stage(mean, stream, 1, 10**11, "txn:nightly")
    assert publish(mean, stream, [block], 1, 10**11, "txn:nightly") is True
    for attempt in (
        lambda: value(owner, "is_published", "txn:nightly", stream, 0),
        lambda: publish(owner, stream, [stage(owner, stream, 1, 0, "txn:nightly")], 1, 0,
                        "txn:nightly"),
    ):  # fmt: skip
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            attempt()


def test_a_role_deletes_no_chunk_that_another_role_has_staged(
    conn: Conn, stream: int, producers: list[Conn]
) -> None:
    owner, mean = producers
    block = stage(owner, stream, 2, sink="txn:new")
    assert value(mean, "unstage", "txn:new", 0, [block]) == 0
    assert publish(owner, stream, [block], 2, sink="txn:new") is True
    block = stage(owner, stream, 2, 1, "txn:new")
    assert value(owner, "unstage", "txn:new", 1, [block]) == 2


def test_an_empty_batch_write_is_the_next_one(conn: Conn, stream: int) -> None:
    """Else all before it would count as repeated. Of a query, these are refused."""
    with raises("PQ003", "p_batch must be at most the next batch"):
        publish(conn, stream, [], 0, 1, "txn:a")
    assert publish(conn, stream, [], 0, 0, "txn:a") is True
    with raises("PQ003", "p_batch must be at most the next batch"):
        publish(conn, stream, [], 0, 2, "txn:a")
    assert publish(conn, stream, [], 0, 0, "txn:a") is False
    assert publish(conn, stream, [], 0, 1, "txn:a") is True
    assert publish(conn, stream, [], 0, 7, "query") is True
    with raises("PQ010", "comes after its batch 7"):
        publish(conn, stream, [stage(conn, stream, 1, 6, "query")], 1, 6, "query")


# Names of others


@pytest.mark.promise("operations: producers learn no names")
def test_who_only_sends_learns_no_names_from_errors(conn: Conn, producers: list[Conn]) -> None:
    value(conn, "create_consumer", "s", "c")
    mean, _ = producers
    for session, knows in (mean, False), (conn, True):
        for unknown, name in (
            (lambda s: value(s, "send", "no such", "x"), "'s'"),
            (lambda s: value(s, "outcome", "s", "no such", 1), "'c'"),
        ):
            with pytest.raises(psycopg.Error) as caught:
                unknown(session)
            hint = caught.value.diag.message_hint or ""
            assert "Create it: " in hint
            assert (f"Available: {name}." in hint) is knows
