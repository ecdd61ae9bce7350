"""Who may do what: the group roles, one by one, against everything that there is."""

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue import Consumer, Defer, Reject, Retry
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.conftest import user_of
from tests.sql import checker
from tests.sql.catalogue import catalogue
from tests.sql.queue import Conn, acked, call, claim_of, one, seqs_of, value

ROLES = ("producer", "consumer", "observer", "admin")

# Who may call what; nobody may call anything else.
CALLED_BY = {
    "producer consumer observer admin": "schema_version open_stream schema_of outcome server_of",
    "consumer observer admin": "open_consumer scan scan_bounds scan_where read_dead",
    "producer consumer": "listen_done",
    "producer consumer admin": "begin_write_of",
    "producer": """
        send send_batch reserve publish_written send_captured was_truncated capture release
        change_capture execute_as capture_script note_captures open_sink is_published
        begin_write stage publish_staged unstage open_table open_table_write
        begin_table_batch apply_table_batch drop_table_write
    """,
    "consumer": """
        claim receive receive_where ack nack defer extend is_suspected dead_letter start_waiting
        still_publishing stop_waiting next_due last_publication read start_offset end_offset
        read_to read_plan offset_lag size_between open_streams lease_partitions leave_group
        plan_partitions read_partitions commit_offset note_offset reader_claim reader_extend
        reader_resume reader_plan reader_query reader_lost reader_others consumer_backlog
        consumer_lag consumer_available reader_ack reader_state reader_release reader_fork
        recent_size check_timeout end_after settle_messages
    """,
    "consumer admin": "as_jsonpath archive_files peek peek_at",
    "admin": """
        create_group revive_messages redrive purge_dead create_stream alter_stream drop_stream
        set_retention set_archive drop_archive export_streams lock_export begin_export
        export_slices export_ranges end_export export_leftovers forget_leftover bind unbind
        test_topic create_consumer alter_consumer drop_consumer seek replay retry cancel
        postpone pause resume create_schedule drop_schedule pause_schedule resume_schedule
        schedule_times as_interval maintain maintain_all recover
    """,
    "observer admin": """
        explain_message failures key_stats consumer_position scan_claimed is_restored
        numbers_behind
    """,
}
FUNCTIONS = {
    role: {
        name
        for callers, names in CALLED_BY.items()
        if role in callers.split()
        for name in names.split()
    }
    for role in (*ROLES, "stranger")
}
VIEWS = (
    "message_states", "consumer_settings", "dead_letters", "consumer_stats", "open_claims",
    "consumer_health", "stream_bindings", "stream_schedules", "message_history", "stream_stats",
    "stream_retention", "stream_archives", "group_stats", "captures",
)  # fmt: skip

# What each may do with which tables and views; {s} is any stream.
RELATIONS = {
    "producer": {"written": {"insert (stream_id, seq, key, data, data_bytes, headers)"}},
    "consumer": {"messages_{s}": {"select"}},
    "observer": {view: {"select"} for view in VIEWS},
    "admin": {view: {"select"} for view in VIEWS} | {"messages_{s}": {"select"}},
    "stranger": {},
}

pytestmark = pytest.mark.all_versions


@pytest.fixture
def roles(conn: Conn, new_role: Callable[..., str]) -> dict[str, str]:
    """The url of a role in each group, and of a stranger; between two streams being made."""
    value(conn, "create_stream", "before")
    made = {name: new_role(name) for name in ROLES} | {"stranger": new_role()}
    value(conn, "create_stream", "s")
    return made


def allowed_functions(conn: Conn, role: str) -> set[str]:
    found = conn.execute(
        "select pronamespace::regnamespace || '.' || proname from pg_proc"
        " where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)"
        " and has_function_privilege(%s, oid, 'execute')",
        [role],
    ).fetchall()
    return {name.removeprefix("pgqueue.") for (name,) in found}


def allowed_relations(conn: Conn, role: str) -> dict[str, set[str]]:
    found = conn.execute(
        "select c.relname, p from pg_class c, unnest('{select,insert,update,delete,truncate,"
        "references,trigger}'::text[]) p where relnamespace = 'pgqueue'::regnamespace"
        " and relkind in ('r', 'p', 'v') and has_table_privilege(%(role)s, c.oid, p)"
        " union all select c.relname, p || ' (' || string_agg(a.attname, ', '"
        " order by array_position('{stream_id,seq,key,data,data_bytes,headers}', a.attname::text),"
        " a.attname) || ')'"
        " from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0"
        " cross join unnest('{select,insert,update,references}'::text[]) p"
        " where relnamespace = 'pgqueue'::regnamespace and relkind in ('r', 'p', 'v')"
        " and not has_table_privilege(%(role)s, c.oid, p)"
        " and has_column_privilege(%(role)s, c.oid, a.attnum, p) group by c.relname, p",
        {"role": role},
    ).fetchall()
    result: dict[str, set[str]] = {}
    for relation, privilege in found:
        result.setdefault(relation, set()).add(privilege)
    return result


@pytest.mark.promise("operations: what each role may do")
def test_each_role_may_do_what_it_needs_and_nothing_else(conn: Conn, roles: dict[str, str]) -> None:
    """Functions, tables, views, sequences and types, one by one, also of a stream made later."""
    streams = [row[0] for row in conn.execute("select stream_id from pgqueue.streams").fetchall()]
    views = "select oid::regproc::text from _pgqueue.view_functions() oid"
    asked_by_views = {row[0].removeprefix("pgqueue.") for row in conn.execute(views).fetchall()}
    for name, url in roles.items():
        role = user_of(url)
        functions = set(FUNCTIONS[name])
        if name in ("observer", "admin"):
            functions |= asked_by_views
        elif name == "producer":
            functions.add("_pgqueue.reserved")  # asked for each row that it writes
        assert allowed_functions(conn, role) == functions, name
        expected = {
            relation.format(s=stream): privileges
            for relation, privileges in RELATIONS[name].items()
            for stream in streams
        }
        assert allowed_relations(conn, role) == expected, name
        sequences = conn.execute(
            "select relname from pg_class, unnest('{usage,select,update}'::text[]) p"
            " where relnamespace = 'pgqueue'::regnamespace and relkind = 'S'"
            " and has_sequence_privilege(%s, oid, p)",
            [role],
        ).fetchall()
        assert sequences == [], name
        types = conn.execute(
            "select typname from pg_type where typnamespace in"
            " ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)"
            " and typelem = 0 and has_type_privilege(%s, oid, 'usage')",
            [role],
        ).fetchall()
        assert types == [], name
        usage = "select has_schema_privilege(%s, %s, %s)"
        assert one(conn, usage, role, "pgqueue", "usage") is (name != "stranger")
        assert one(conn, usage, role, "_pgqueue", "usage") is False
        assert not any(one(conn, usage, role, s, "create") for s in ("pgqueue", "_pgqueue"))


def test_each_role_works_with_what_it_has(conn: Conn, roles: dict[str, str]) -> None:
    with ExitStack() as stack:
        opened = {name: stack.enter_context(connection.connect(url)) for name, url in roles.items()}
        admin, producer, consumer = opened["admin"], opened["producer"], opened["consumer"]
        stream = value(admin, "create_stream", "t")
        ids = {o: value(admin, "create_consumer", "t", o, "earliest", o) for o in ("none", "key")}
        value(producer, "send", "t", "a", "k", p_consumers=["none", "key"])
        call(producer, "send_batch", "t", ["b", "c"], ["k", "l"])
        with producer.transaction():
            seqs = value(producer, "reserve", stream, 1)
            (numbers,) = list(seqs)
            copy = b"copy pgqueue.written (stream_id, seq, data) from stdin"
            with producer.cursor().copy(copy) as written:
                written.write_row((stream, numbers.lower, "x"))
            staged = value(producer, "stage", "sink", 0, stream, seqs)
        assert value(producer, "publish_staged", "sink", 0, stream, [staged], 1) is True
        for name in ("none", "key"):
            claim = claim_of(call(consumer, "receive", "t", name, 10))
            assert value(consumer, "extend", claim) == 4
            assert value(consumer, "dead_letter", claim, [4]) == 1
            assert value(consumer, "nack", claim, [3], "0 s") == 1
            assert value(consumer, "ack", claim) == 2
            assert len(acked(consumer, "t", name)) == 1
        value(producer, "send", "t", "d")
        reader = uuid.uuid4()
        (end,) = call(consumer, "reader_claim", reader, ids["none"], 0, 0)
        assert end.claimed == 1
        value(consumer, "reader_query", reader, "q")
        (range_,) = call(consumer, "reader_plan", reader, 0, end.claim_id)
        read = (
            f"copy (select data from pgqueue.messages_{stream} where seq = {range_.lo}) to stdout"
        )
        with consumer.cursor().copy(read.encode()) as found:
            assert list(found.rows()) == [("d",)]
        call(consumer, "reader_resume", reader, ids["none"], 0, end.claim_id)
        (done,) = call(consumer, "reader_ack", reader, ids["none"], end.claim_id)
        assert tuple(done) == (1, 0)
        assert value(consumer, "consumer_available", ids["none"]) == 0
        assert call(consumer, "reader_state", reader, 0, end.claim_id)[0].stream == "t"
        fork = value(consumer, "reader_fork", reader, ids["none"], end.claim_id, 1)
        assert tuple(call(consumer, "reader_release", fork, ids["none"], end.claim_id)[0]) == (0, 0)
        assert value(consumer, "recent_size", stream) == 1
        call(consumer, "reader_claim", reader, ids["none"], end.claim_id, end.messages)
        for name in ("observer", "admin"):
            for view in VIEWS:
                opened[name].execute(f"select * from pgqueue.{view}".encode()).fetchall()
        (stats,) = (
            opened["observer"]
            .execute("select ready + new, dead from pgqueue.consumer_stats where consumer = 'key'")
            .fetchall()
        )
        assert stats == (1, 1)
        call(admin, "set_retention", "t", timedelta(days=1))
        call(admin, "maintain")
        admin.execute("call pgqueue.maintain_all()")
        for name in ROLES:
            schema.check(opened[name])
        value(admin, "drop_consumer", "t", "key")
        value(admin, "drop_stream", "t")
        with pytest.raises(PgQueueError, match="permission denied"):
            schema.check(opened["stranger"])
    checker.check(conn)


def test_a_producer_can_neither_read_acknowledge_nor_delete(
    conn: Conn, roles: dict[str, str]
) -> None:
    value(conn, "create_consumer", "s", "c", "earliest")
    value(conn, "send", "s", "secret")
    claim = claim_of(call(conn, "receive", "s", "c"))
    stream = one(conn, "select stream_id from pgqueue.streams where name = 's'")
    with connection.connect(roles["producer"]) as producer:
        for statement in (
            f"select data from pgqueue.messages_{stream}",
            f"select seq from pgqueue.messages_{stream}",
            "select * from pgqueue.messages",
            f"delete from pgqueue.messages_{stream}",
            f"update pgqueue.messages_{stream} set data = 'x'",
            f"insert into pgqueue.messages_{stream} (seq, data) values (-1, 'x')",
            "insert into pgqueue.messages (stream_id, seq, data) values (1, 100, 'x')",
            "insert into pgqueue.written (seq, data) values (-1, 'x') returning data",
            "insert into pgqueue.written (seq, inserted_at) values (-1, now())",
            "select setval('pgqueue.reserved_from', 1)",
            "select currval('pgqueue.reserved_from')",
            "select _pgqueue.reserved(1, 1)",
            f"truncate pgqueue.messages_{stream}",
            "insert into pgqueue.publications select * from pgqueue.publications",
            f"select pgqueue.ack({claim})",
            "select * from pgqueue.receive('s', 'c')",
            "select pgqueue.drop_stream('s')",
            "select * from pgqueue.maintain('1 us')",
            f"select nextval('pgqueue.seq_{stream}')",
            f"select setval('pgqueue.seq_{stream}', 1)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                producer.execute(statement.encode())
    assert value(conn, "ack", claim) == 1


def test_a_caller_cannot_slip_in_functions_of_its_own(
    conn: Conn, url: str, roles: dict[str, str]
) -> None:
    """Functions with the owner's rights find nothing in the path of their caller."""
    role = user_of(roles["observer"])
    conn.execute(f"create schema evil authorization {role}".encode())
    value(conn, "create_consumer", "s", "c", "earliest", p_settings='{"keep_history": "1 day"}')
    value(conn, "create_group", "s", "g", 1)
    value(conn, "bind", "s", "#", "before")
    value(conn, "create_schedule", "s", "h", "@daily", p_data="x")
    value(conn, "set_archive", "s", "/archive")
    for _ in "dead", "done", "claimed":
        value(conn, "send", "s", "x")
        claim = claim_of(call(conn, "receive", "s", "c"))
        value(conn, "dead_letter", claim, [1])
        value(conn, "ack", claim, [2])
    conn.execute("create table captured (id int primary key)")
    call(conn, "capture", "captured", "s")
    with connection.connect(roles["observer"]) as observer:
        body = "language plpgsql as 'begin raise exception ''hijacked''; end'"
        for function, returns in (
            ("format(text, int)", "text"),
            ("unnest(int8multirange)", "setof int8range"),
            ("upper(int8range)", "bigint"),
            ("lower(int8range)", "bigint"),
        ):
            observer.execute(f"create function evil.{function} returns {returns} {body}".encode())
        observer.execute(
            f"create function evil.eq(int, int) returns boolean {body};"
            " create operator evil.= (leftarg = int, rightarg = int, function = evil.eq)".encode()
        )
        observer.execute("set search_path = evil, pg_catalog")
        for view in VIEWS:
            assert observer.execute(f"select * from pgqueue.{view}".encode()).fetchall()
        (answer,) = call_plainly(observer, "select stream_id from pgqueue.open_stream('s')")
        assert answer


def call_plainly(conn: Conn, statement: str) -> tuple[int]:
    (row,) = conn.execute(statement.encode()).fetchall()
    return row


@pytest.mark.promise("operations: installing again")
def test_installing_again_keeps_what_was_granted_and_grants_nothing_twice(
    conn: Conn, roles: dict[str, str]
) -> None:
    role = user_of(roles["stranger"])
    conn.execute(f"grant usage on schema pgqueue to {role}".encode())
    conn.execute(f"grant execute on function pgqueue.schema_version() to {role}".encode())
    before = catalogue(conn)
    schema.install(conn)
    assert catalogue(conn) == before
    members = {row.role: row.members for row in call(conn, "create_roles")}
    assert catalogue(conn) == before
    assert set(members) == {f"pgqueue_{name}" for name in ROLES}
    for name in ROLES:
        assert user_of(roles[name]) in members[f"pgqueue_{name}"]


def test_without_the_group_roles_nothing_is_granted(conn: Conn) -> None:
    """Those of another database of the server are no reason to grant here."""
    before = catalogue(conn)["relations"]
    assert not any("pgqueue_producer" in row for row in before)
    value(conn, "create_stream", "s")
    assert not any("pgqueue_producer" in row for row in catalogue(conn)["relations"])


def test_a_role_of_such_a_name_that_is_no_group_is_refused(conn: Conn, roles: object) -> None:
    before = catalogue(conn)
    with conn.transaction(force_rollback=True):
        conn.execute("alter role pgqueue_observer createrole")
        with pytest.raises(psycopg.Error, match="not a plain group") as caught, conn.transaction():
            call(conn, "create_roles")
    assert caught.value.sqlstate == "PQ006"
    assert catalogue(conn) == before


def test_hints_of_who_may_not_create_roles_name_only_what_is_missing(
    conn: Conn, roles: object
) -> None:
    who = "A superuser, or a role with CREATEROLE"
    hints: list[str | None] = []

    def note(said: psycopg.errors.Diagnostic) -> None:
        if said.severity_nonlocalized == "WARNING" and said.message_hint:
            hints.append(said.message_hint)

    conn.add_notice_handler(note)
    with conn.transaction(force_rollback=True):
        conn.execute("create role poor")
        if value(conn, "pg_catalog.to_regrole", "pgqueue_owner"):
            conn.execute("alter role pgqueue_owner rename to other_owner")
        conn.execute("alter role pgqueue_consumer rename to other_consumer")
        for name in ("pgqueue", "_pgqueue"):
            conn.execute(f"grant all on schema {name} to poor".encode())
            conn.execute(f"grant all on all routines in schema {name} to poor".encode())
        conn.execute("alter schema pgqueue owner to poor; set local role poor")
        with pytest.raises(psycopg.Error, match="create the role") as caught, conn.transaction():
            call(conn, "create_roles")
        conn.execute("select _pgqueue.complete_roles()")
        conn.execute("reset role; create role pgqueue_owner; set local role poor")
        conn.execute("select _pgqueue.complete_roles()")
    conn.remove_notice_handler(note)
    missing = "create role pgqueue_consumer nologin"
    assert (
        caught.value.diag.message_hint == f"{who}, runs: {missing}. Then call create_roles again."
    )
    assert hints == [
        f"{who}, runs: create role pgqueue_owner nologin; grant pgqueue_owner to poor.",
        f"{who} that administers pgqueue_owner, runs: grant pgqueue_owner to poor.",
    ]


def test_who_may_not_create_roles_is_told_so(conn: Conn, roles: dict[str, str]) -> None:
    with (
        connection.connect(roles["admin"]) as admin,
        pytest.raises(PgQueueError, match="permission denied"),
    ):
        schema.grant(admin, "producer", user_of(roles["stranger"]))
    with pytest.raises(PgQueueError, match="does not exist") as caught:
        schema.grant(conn, "producer", "nobody at all")
    assert "create role" in (caught.value.hint or "")


def test_who_may_look_can_list_everything_with_the_client(
    conn: Conn, roles: dict[str, str]
) -> None:
    value(conn, "create_consumer", "s", "c", "earliest", "key")
    value(conn, "send", "s", "x", "k")
    for group in ("observer", "admin"):
        with spark_pgqueue.connect(roles[group]) as client:
            assert [stream.name for stream in client.streams()] == ["before", "s"]
            (listed,), (counted,) = client.consumers("s"), client.stats("s")
            assert (listed.stream, listed.name, listed.ordering) == ("s", "c", "key")
            assert (counted.consumer, counted.new) == ("c", 1)


def test_notifications_and_names_of_sessions_are_the_callers(
    conn: Conn, roles: dict[str, str]
) -> None:
    """SECURITY DEFINER changes the user, and nothing else of the session."""
    with (
        connection.connect(roles["producer"]) as producer,
        connection.connect(roles["consumer"]) as consumer,
    ):
        call(consumer, "start_waiting", "s")
        producer.execute("set application_name = 'app'")
        producer.execute("begin")
        value(producer, "send", "s", "x")
        look = (
            "select a.usename || ' ' || a.application_name from pg_locks l"
            " join pg_stat_activity a using (pid) where l.locktype = 'advisory' and a.pid = %s"
        )
        assert one(conn, look, producer.info.backend_pid) == f"{user_of(roles['producer'])} app"
        producer.execute("commit")
        (notified,) = consumer.notifies(timeout=10, stop_after=1)
        assert notified.pid == producer.info.backend_pid
    value(conn, "create_consumer", "s", "c", "earliest")
    assert seqs_of(call(conn, "receive", "s", "c")) == [1]


def test_a_consumer_may_run_a_worker(conn: Conn, roles: dict[str, str]) -> None:
    value(conn, "create_consumer", "s", "c", "earliest")
    for what in ("done", "retry", "reject", "defer"):
        value(conn, "send", "s", what)

    def handle(message, connection=None):
        if message.data == "reject":
            raise Reject
        if message.data == "defer" and message.saved is None:
            raise Defer(state=1)
        if message.data == "retry" and message.deliver_count == 1:
            raise Retry(delay=timedelta(0))

    for transactional in (False, True):
        worker = Consumer(roles["consumer"], "s", "c")
        handled = worker.run(handle, transactional=transactional, wait=timedelta(milliseconds=50))
        assert handled == (1 if transactional else 3)
        value(conn, "send", "s", "done")
