"""What a role must not learn: producers no stream that nobody named, observers no payload."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql.queue import Conn, call, consumer, one, raises, scanned, send, value
from tests.sql.table_writes import Write

pytestmark = [pytest.mark.usefixtures("stream"), pytest.mark.all_versions]

Opened = Callable[[str], Conn]

SECRET = "abcxyz"


@pytest.fixture
def opened(face: Conn, new_role: Callable[..., str]) -> Iterator[Opened]:
    """Opens a session of a new role that belongs to a group."""
    with contextlib.ExitStack() as stack:
        yield lambda group: stack.enter_context(connection.connect(new_role(group)))


# Producers, who count ids


@contextlib.contextmanager
def heard(session: Conn) -> Iterator[list[str]]:
    """All that a call says: its error with detail and hint, and notices."""
    said: list[str] = []
    session.add_notice_handler(lambda each: said.append(str(each.message_primary)))
    try:
        with session.transaction():
            yield said
    except psycopg.Error as error:
        diag = error.diag
        said += [str(getattr(diag, part)) for part in dir(diag) if not part.startswith("_")]
        if error.sqlstate in ("42883", "42601"):
            raise  # the call itself is wrong


def written(session: Conn, stream: int, data: str, headers: Any = None) -> Any:
    seqs = value(session, "reserve", stream, 1)
    session.execute(
        "insert into pgqueue.written (stream_id, seq, data, headers) values (%s, %s, %s, %s)",
        [stream, seqs[0].lower, data, headers and Jsonb(headers)],
    )
    return seqs


def staged(session: Conn, stream: int, data: str, sink: str, **more: Any) -> int:
    return value(session, "stage", sink, 0, stream, written(session, stream, data), **more)


def published(session: Conn, stream: int, sink: str, **more: Any) -> None:
    chunk = staged(session, stream, "{}", sink, **more)
    value(session, "publish_staged", sink, 0, stream, [chunk], 1)


LARGE = '{"x": "' + "x" * 3000 + '"}'

TAKES_STREAMS: dict[str, list[Callable[[Conn, int], Any]]] = {
    "send_captured": [
        lambda s, i, data=data, headers=headers: s.execute(
            "select pgqueue.send_captured(%s, %s, %s::json[], %s::jsonb[], '{1}')",
            [i, [None], [data], [Jsonb(headers)]],
        )
        for data in ("1", "{}", LARGE)
        for headers in ({}, [1], {"x": "x" * 3000})
    ],
    "was_truncated": [lambda s, i: value(s, "was_truncated", i, "t")],
    "reserve": [lambda s, i: value(s, "reserve", i, 1), lambda s, i: value(s, "reserve", i, 0)],
    "is_published": [lambda s, i: value(s, "is_published", "own", i, 0)],
    "stage": [
        *(
            lambda s, i, data=data: staged(s, i, data, f"stage {i}")
            for data in ("no json", "1", "{}", LARGE)
        ),
        lambda s, i: staged(s, i, "{}", f"stage {i}", p_dedup_keys=["k"]),
        lambda s, i: value(s, "stage", "own", 0, i, written(s, i, "{}", {"x": "x" * 3000})),
        lambda s, i: value(s, "stage", "own", 0, i, None),
        lambda s, i: staged(s, i, "{}", "own", p_consumers=["no such"]),
    ],
    "publish_staged": [
        lambda s, i: published(s, i, f"txn:{i}"),
        lambda s, i: published(s, i, str(uuid.uuid4())),
        lambda s, i: value(s, "publish_staged", "query", 0, i, [], 0),
        lambda s, i: published(s, i, "query"),
        lambda s, i: value(s, "publish_staged", "query", 0, i, [1, 2, 3], 3),
    ],
}  # fmt: skip
"""The functions of producers that take a stream's number."""


@pytest.fixture
def of_others(conn: Conn) -> list[int]:
    """Streams whose names, schemas and consumers say SECRET, and which refuse much."""
    full = f"{SECRET}_full"
    for name, kind, settings in (
        (f"{SECRET}_text", "text", {"max_bytes": 1000, "max_header_bytes": 1000}),
        (f"{SECRET}_schema", "json", {"schema": f"{SECRET} bigint not null"}),
        (f"{SECRET}_binary", "binary", {"dedup_window": "1 day"}),
        (full, "json", {}),
        (f"{SECRET}_keys", "json", {}),
        (f"{SECRET}_from", "json", {}),
    ):
        value(conn, "create_stream", name, kind, p_settings=Jsonb(settings))
        # a consumer's name is no less a secret
        value(conn, "create_consumer", name, f"{SECRET}_c", "earliest")
    value(conn, "alter_consumer", full, f"{SECRET}_c", Jsonb({"max_backlog": 1}))
    value(conn, "send", full, "{}")
    value(conn, "bind", f"{SECRET}_from", "#", full)
    return [i for (i,) in conn.execute("select stream_id from pgqueue.streams order by 1")]


def test_every_function_that_takes_a_streams_number_is_tried(conn: Conn) -> None:
    conn.execute("select pgqueue.create_roles()")
    found = conn.execute(
        "select p.proname from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace"
        " and 'p_stream_id' = any (p.proargnames[:p.pronargs])"
        " and has_function_privilege('pgqueue_producer', p.oid, 'execute')"
    )
    assert {name for (name,) in found} == set(TAKES_STREAMS)


@pytest.mark.promise("operations: ids of claims, not by counting ids")
def test_who_counts_numbers_learns_no_names(
    conn: Conn, opened: Opened, of_others: list[int]
) -> None:
    mean = opened("producer")
    for function, attempts in TAKES_STREAMS.items():
        refusals = 0
        for stream in (*of_others, of_others[-1] + 1, 0, -1):
            for attempt in attempts:
                with heard(mean) as said:
                    attempt(mean, stream)
                assert SECRET not in " ".join(said), (function, stream, said)
                refusals += bool(said)
        assert refusals or function in ("was_truncated", "is_published")


def test_who_may_look_or_names_the_stream_is_told_more(
    conn: Conn, opened: Opened, of_others: list[int]
) -> None:
    number = one(conn, f"select stream_id from pgqueue.streams where name = '{SECRET}_schema'")
    with heard(conn) as said:
        TAKES_STREAMS["send_captured"][3](conn, number)
    assert f"a message of stream '{SECRET}_schema' does not fit its schema: column" in " ".join(
        said
    )
    sends = opened("producer")
    with heard(sends) as said:
        value(sends, "send", f"{SECRET}_schema", "{}")
    assert f"column {SECRET} is" in " ".join(said)


def test_a_binding_tells_a_sender_nothing_of_where_it_leads(
    conn: Conn, opened: Opened, of_others: list[int]
) -> None:
    mean = opened("producer")
    value(conn, "create_stream", "from", "json")
    value(conn, "bind", "from", "#", f"{SECRET}_full")
    with heard(mean) as said:
        value(mean, "send", "from", "{}", p_key="k")
    assert "cannot send a message" in " ".join(said)
    assert SECRET not in " ".join(said)


def test_a_producer_of_the_face_of_pgmq_learns_no_queue(conn: Conn, opened: Opened) -> None:
    """Whatever it may call or read there, with what it may know: a routing key."""
    conn.execute(
        f"select pgmq.create('{SECRET}'), pgmq.bind_topic('#', '{SECRET}')".encode(), prepare=False
    )
    mean = opened("producer")
    texts = {"routing_key": "'a'", "pattern": "'#'", "queue_name": "'q'"}
    for statement in calls(mean, "pgmq", texts) + reads(mean, "pgmq"):
        with heard(mean) as said:
            said += [str(row) for row in mean.execute(statement).fetchall()]
        assert SECRET not in " ".join(said), statement.as_string(mean)
    assert one(conn, f"select queue_length from pgmq.metrics('{SECRET}')") > 0
    sent = conn.execute("select queue_name from pgmq.send_batch_topic('a', '{\"{}\"}')").fetchall()
    assert sent == [(SECRET,)]


# Numbers of writes to a table


@pytest.fixture
def bills_of_all(conn: Conn, bills: dict[str, Any]) -> dict[str, Any]:
    conn.execute("grant select, insert, update, delete on public.bills to public")
    return bills


@pytest.mark.promise("operations: numbers of table writes")
def test_a_write_to_a_table_takes_only_numbers_of_its_own(
    conn: Conn, opened: Opened, bills_of_all: dict[str, Any]
) -> None:
    """Else a producer would block the writes of others: who has a number first keeps it."""
    owner, mean = opened("producer"), opened("producer")
    given = Jsonb(bills_of_all)
    theirs = Write(owner, bills_of_all, "theirs", 0)
    own = Write(mean, bills_of_all, "own", 0)
    for number in (
        *(theirs.write_no, theirs.write_no + 1, own.write_no + 1, own.write_no - 1),
        *((own.write_no >> 24) + 1, 1, 0, -1, 2**63 - 1, None),
        *((each >> 24 << 24) + 2**24 for each in (own.write_no, theirs.write_no)),
    ):
        with pytest.raises(psycopg.Error, match=r"p_write_no .* number .*open_table") as caught:
            value(mean, "open_table_write", number, "own", 0, given)
        assert caught.value.sqlstate == ("PQ008" if (number or 0) > 0 else "PQ003")
        if number is not None:
            assert value(mean, "drop_table_write", number) is False
    assert value(owner, "open_table_write", theirs.write_no, "theirs", 0, given)
    # also once it is in use: nobody can tell
    with pytest.raises(psycopg.Error, match=r"p_write_no \d+ is not a number that open_table"):
        value(mean, "open_table_write", theirs.write_no, "theirs", 0, given)
    assert value(mean, "drop_table_write", theirs.write_no) is False
    assert value(mean, "open_table_write", own.write_no, "own", 0, given)
    assert value(owner, "drop_table_write", theirs.write_no) is True


def test_a_later_write_has_a_higher_number(conn: Conn, bills: dict[str, Any]) -> None:
    numbers = [Write(conn, bills).write_no for _ in range(20)]
    assert numbers == sorted(numbers)
    conn.execute("select setval('pgqueue.table_write_numbers', 549755813886)")
    assert numbers[-1] < Write(conn, bills).write_no < 2**63
    assert len({number & 0xFFFFFF for number in numbers}) == 20
    with pytest.raises(psycopg.Error, match="reached maximum value of sequence"):
        Write(conn, bills)


@pytest.mark.promise("operations: numbers of table writes")
def test_numbers_that_a_producer_uses_up_are_not_those_of_writes_to_a_table(
    conn: Conn, opened: Opened, bills_of_all: dict[str, Any]
) -> None:
    """A producer can call begin_write() billions of times, in hours."""
    owner = opened("producer")
    before = Write(owner, bills_of_all, "killed", 0)
    for last in (2**31 - 1, 2**32, 2**40):
        conn.execute("select setval('pgqueue.write_numbers', %s)", [last])
        assert value(owner, "begin_write") == last + 1
        later = Write(owner, bills_of_all, f"sink {last}", 0)
        assert later.stage().staged == f"staged_rows_{later.write_no}"
        assert later.write_no >> 24 == (before.write_no >> 24) + 1
        before = later


# Observers, who see no payload

ARGUMENTS = {
    "p_stream": "'s'", "p_consumer": "'c'", "p_seq": "1", "p_table": "'dead'", "p_from": "0",
    "p_to": "9223372036854775807", "p_where": "'true'", "p_n": "10", "p_key": "'k'",
    "p_name": "'c'", "p_argument": "null", "p_servers": "1", "p_consumer_id": "1",
    "p_stream_id": "1", "queue_name": "'q'", "routing_key": "'a'",
}  # fmt: skip


def reads(session: Conn, *schemas: str) -> list[sql.Composed]:
    """A query of each relation that a session may read."""
    found = session.execute(
        "select nspname, relname from pg_class c join pg_namespace n on n.oid = relnamespace"
        " where nspname = any (%s) and relkind in ('r', 'p', 'v', 'S')"
        " and has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select')",
        [list(schemas)],
    ).fetchall()
    return [sql.SQL("select r::text from {} r").format(sql.Identifier(*each)) for each in found]


def calls(session: Conn, schema_: str, given: dict[str, str]) -> list[sql.Composed]:
    """A call of each function that a session may call; arguments by name, or null."""
    found = session.execute(
        "select proname, pronargs - pronargdefaults, coalesce(proargnames[:pronargs], '{}'),"
        " array(select format_type(t, null) from unnest(proargtypes) with ordinality a (t, i)"
        " order by i), prorettype = 'record'::regtype and proargmodes is null"
        " from pg_proc p where pronamespace = %s::regnamespace and prokind = 'f'"
        " and has_function_privilege(p.oid, 'execute')",
        [schema_],
    ).fetchall()
    by_type = {"jsonb": "'{}'", "jsonb[]": "array['{}'::jsonb]", "integer": "0"}
    statements = []
    for name, needed, names, types, of_records in found:
        arguments = [
            f"{given.get(named, by_type.get(type_, 'null'))}::{type_}"
            for named, type_ in list(zip(names, types, strict=False))[:needed]
        ]
        statements.append(
            sql.SQL("select f::text from {}({}) f {}").format(
                sql.Identifier(schema_, name),
                sql.SQL(", ".join(arguments)),  # type: ignore[arg-type]
                sql.SQL("(lo bigint, hi bigint)" if of_records else ""),
            )
        )
    return statements


def fill(conn: Conn) -> None:
    """Messages in each state, a schedule, a history and a queue, all with payloads of SECRET."""
    consumer(conn, keep_history="1 day", max_deliver_count=1)
    consumer(conn, "later")
    payload: dict[str, Any] = {"data": SECRET, "p_headers": Jsonb({"h": SECRET}), "p_key": "k"}
    for _ in range(6):
        send(conn, **payload)
    held = [one(conn, "select claim_id from pgqueue.claim('s', 'c', 1)") for _ in range(5)]
    value(conn, "nack", held[0])  # of message 1, of which looks ask; it fails, and is dead
    value(conn, "ack", held[1])
    value(conn, "dead_letter", held[2])
    send(conn, p_deliver_at="2100-01-01", **payload)
    value(
        conn, "create_schedule", "s", "daily", "@daily", p_data=SECRET,
        p_headers=Jsonb({"h": SECRET}),
    )  # fmt: skip
    body = f'{{"x": "{SECRET}"}}'
    conn.execute(
        f"select pgmq.create('q'), pgmq.send('q', '{body}', '{body}'::jsonb),"
        f" pgmq.send('q', '{body}'), pgmq.archive('q', 1)".encode()
    )


NOTHING = {
    "group_stats", "stream_bindings", "captures", "stream_archives", "numbers_behind",
    "list_notify_insert_throttles", "list_topic_bindings", "test_routing",
}  # fmt: skip
"""Of these there is nothing to see in `serve_claim`."""

SCANNED = {
    "messages": {},
    "pending": {"owner": "text", "error": "text"},
    "dead": {"reason": "text", "error": "text", "details": "text"},
    "archived": {"owner": "text", "result": "text"},
    "publications": {},
    "claimed": {"claim_id": "bigint", "error": "text"},
}
"""The tables that scans read, each with a query of its own, and columns that hold texts."""


@pytest.mark.promise("operations: observers see no payload")
def test_an_observer_sees_no_payload(conn: Conn, opened: Opened) -> None:
    """Whatever it may read or call; but of dead letters and schedules, as its page says."""
    fill(conn)
    looks = opened("observer")
    seen = {}
    for statement in [
        *reads(looks, "pgqueue", "_pgqueue", "pgmq"),
        *(each for in_ in ("pgqueue", "pgmq") for each in calls(looks, in_, ARGUMENTS)),
    ]:
        text = statement.as_string(looks)
        with heard(looks) as said:
            found = looks.execute(statement).fetchall()
            seen[text] = len(found)
            said += [str(row) for row in found]
        if "read_dead" in text or "stream_schedules" in text:
            continue  # the two exceptions
        everything = " ".join(said)
        assert SECRET not in everything, text
        assert SECRET.encode().hex() not in everything, text
    assert sum(bool(count) for count in seen.values()) > 30
    for some in ("read_dead", "stream_schedules", "message_states", "metrics"):
        assert any(some in text and count for text, count in seen.items()), some
    silent = [text for text, count in seen.items() if not count]
    wrong = [text for text in silent if not any(f'"{name}"' in text for name in NOTHING)]
    assert not wrong, "what shows nothing shows no payload: that says nothing"


def test_an_observer_scans_no_payload(conn: Conn, opened: Opened) -> None:
    fill(conn)
    looks = opened("observer")
    for table, columns in SCANNED.items():
        found = scanned(looks, table, "c", **columns)
        assert found, "what shows nothing shows no payload: that says nothing"
        assert SECRET not in str(found)
        for column in ("data", "data_bytes", "headers", "key", "note"):
            with raises("PQ003", "p_columns must name columns"):
                scanned(looks, table, "c", **{column: "text"})


def test_an_observer_sees_what_its_page_says(conn: Conn, opened: Opened) -> None:
    fill(conn)
    looks = opened("observer")
    assert one(looks, "select data from pgqueue.stream_schedules") == SECRET
    assert {row.data for row in call(looks, "read_dead", "s", "c")} == {SECRET}
    assert SECRET in str(opened("consumer").execute("select * from pgmq.q_q").fetchall())
