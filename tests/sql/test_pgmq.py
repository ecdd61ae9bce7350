"""The face of pgmq: what its clients call gives the same here as in pgmq itself."""

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.conftest import _database
from tests.sql import checker, internals, limits
from tests.sql.cost import cost
from tests.sql.internals import rows
from tests.sql.queue import AT_ONCE, Reader, raises, wait_for_a_lock

Conn = psycopg.Connection


@pytest.fixture
def pgmq(server: Any, template: str) -> Iterator[Conn]:
    """Another database of the same server, with pgmq itself."""
    install = pytest.importorskip("pgmq.install", reason="pgmq is not installed")
    for url in _database(server, template):
        with connection.connect(url) as conn:
            conn.execute(install.get_embedded_install_sql())
            yield conn


def client_of(conn: Conn) -> Any:
    """The client of PyPI, unchanged, with one connection."""
    module = pytest.importorskip("pgmq", reason="pgmq is not installed")

    class Pool:
        def connection(self) -> Any:
            return _Given(conn)

    class _Given:
        def __init__(self, conn: Conn) -> None:
            self.conn = conn

        def __enter__(self) -> Conn:
            return self.conn

        def __exit__(self, *_: object) -> None:
            pass

    return module.PGMQueue(
        conn_string=f"host=localhost dbname={conn.info.dbname} user=x password=x",
        init_extension=False,
        pool=Pool(),
    )


def brief(message: Any) -> Any:
    """What is the same in both: all but times, of which it says how far they are away."""
    away = (message.vt - datetime.now(UTC)).total_seconds()
    tens = max(int((away + 8) // 10), 0)  # both may be looked at some seconds later
    return (message.msg_id, message.read_ct, message.message, message.headers, tens,
            message.last_read_at is not None)  # fmt: skip


def by_number(messages: Any) -> list[Any]:
    found = messages if isinstance(messages, list) else [messages]
    return sorted(found, key=lambda message: message.msg_id)


def briefs(messages: Any) -> list[Any]:
    return [brief(message) for message in by_number(messages)]


def sending(q: Any) -> Iterator[Any]:
    """Each form of send and send_batch, and what is there afterwards."""
    q.create_queue("Work")
    q.create_queue("Work")
    yield q.send("Work", {"a": 1})
    yield q.send("Work", {"a": 2}, headers={"h": [1]})
    yield q.send("Work", {"a": 3}, delay=100)
    yield q.send("Work", {"a": 4}, tz=datetime.now(UTC) + timedelta(seconds=50))
    yield q.send("Work", {"a": 5}, headers={"h": 2}, delay=100)
    yield q.send_batch("Work", [{"b": 1}, {"b": 2}])
    yield q.send_batch("Work", [{"b": 3}, {"b": 4}], headers=[{"h": 1}, {"h": 2}])
    yield q.send_batch("Work", [{"b": 5}], delay=100)
    yield q.send_batch("Work", [{"b": 6}], headers=[{"h": 3}], delay=0)
    yield [(x.queue_name, x.is_partitioned, x.is_unlogged) for x in q.list_queues()]
    yield briefs(q.read_batch("Work", vt=40, batch_size=100))
    yield briefs(q.read_batch("Work", vt=40, batch_size=100) or [])
    yield figures(q, "Work")
    yield q.purge("Work")
    yield figures(q, "Work")
    yield q.drop_queue("Work")
    yield q.list_queues()


def figures(q: Any, queue: str) -> Any:
    m = q.metrics(queue)
    aged = [m.newest_msg_age_sec is not None, m.oldest_msg_age_sec is not None]
    return m.queue_name, m.queue_length, m.total_messages, m.queue_visible_length, aged


def settling(q: Any) -> Iterator[Any]:
    """Delete, archive and set_vt of messages in each state, by whoever knows the number."""
    q.create_queue("s")
    q.send_batch("s", [{"n": n} for n in range(12)])
    yield briefs(q.read("s", vt=30))
    yield briefs(q.read_batch("s", vt=60, batch_size=5))
    yield q.delete("s", 1), q.delete("s", 1), q.delete("s", 99)
    yield sorted(q.delete_batch("s", [2, 8, 99]))
    yield q.archive("s", 3), q.archive("s", 3)
    yield sorted(q.archive_batch("s", [4, 9, 99]))
    yield briefs(q.set_vt("s", 5, 200))
    yield briefs(q.set_vt("s", 10, 100))
    yield briefs(q.set_vt("s", [6, 11], 0))
    yield briefs(q.set_vt("s", 99, 10) or [])
    yield figures(q, "s")
    yield briefs(q.read_batch("s", vt=30, batch_size=100))
    yield briefs(q.set_vt("s", 12, 300))
    yield sorted(q.delete_batch("s", [5, 6, 7, 10, 11, 12]))
    yield figures(q, "s")
    yield briefs(q.pop("s") or [])
    q.send("s", {"last": True})
    q.send_batch("s", [{"n": 1}, {"n": 2}])
    yield [(m.msg_id, m.read_ct, m.message) for m in [q.pop("s")]]
    yield [(m.msg_id, m.read_ct, m.message) for m in q.pop("s", qty=5)]
    yield figures(q, "s")


def timing(q: Any) -> Iterator[Any]:
    """A timeout ends: the message is read again, and its count goes on."""
    q.create_queue("t")
    q.send_batch("t", [{"n": n} for n in range(4)])
    for _ in range(3):
        yield [brief(m)[:4] for m in by_number(q.read_batch("t", vt=1, batch_size=10))]
        time.sleep(1.1)
        yield figures(q, "t")
    yield briefs(q.read_batch("t", vt=60, batch_size=3))
    yield briefs(q.read_batch("t", vt=60, batch_size=3))
    yield briefs(q.read_batch("t", vt=60, batch_size=3) or [])
    q.set_vt("t", [1, 2, 3, 4], 0)
    yield briefs(q.read("t", vt=0))
    yield briefs(q.read_with_poll("t", vt=20, qty=10, max_poll_seconds=3, poll_interval_ms=50))
    yield briefs(q.read_with_poll("t", vt=20, qty=10, max_poll_seconds=1, poll_interval_ms=50))


def groups(q: Any) -> Iterator[Any]:
    """Grouped reads: the order within a group holds, across groups it goes by the form."""
    q.create_queue("g")
    q.create_fifo_index("g")
    keys = ["a", "a", "b", "c", "b", "a", None, "c"]
    headers = [{} if key is None else {"x-pgmq-group": key} for key in keys]
    q.send_batch("g", [{"n": n} for n in range(8)], headers=headers)
    yield [m.msg_id for m in q.read_grouped_rr("g", vt=30, qty=5)]
    yield [m.msg_id for m in q.read_grouped_rr("g", vt=30, qty=5)]
    q.set_vt("g", [1, 2, 3, 4, 5, 6, 7, 8], 0)
    yield briefs(q.read_grouped("g", vt=30, qty=2))
    yield briefs(q.read_grouped("g", vt=30, qty=2))
    yield briefs(q.read_grouped_with_poll("g", 30, 10, max_poll_seconds=1, poll_interval_ms=50))
    yield briefs(q.read_grouped("g", vt=30, qty=2))
    q.delete("g", 1)
    yield briefs(q.read_grouped("g", vt=30, qty=2))
    q.set_vt("g", [2, 3, 4, 5, 6, 7, 8], 0)
    yield [m.msg_id for m in q.read_grouped_rr_with_poll("g", 30, 20)]


def topics(q: Any) -> Iterator[Any]:
    """Routing keys and patterns, and sends to all queues that a pattern binds."""
    for name in ("all", "errors", "app"):
        q.create_queue(name)
    q.bind_topic("#", "all")
    q.bind_topic("*.error", "errors")
    q.bind_topic("*.error", "errors")
    q.bind_topic("app.#", "app")
    q.bind_topic("app.*", "app")
    yield sorted((b.pattern, b.queue_name, b.compiled_regex) for b in q.list_topic_bindings())
    yield [(b.pattern, b.queue_name) for b in q.list_topic_bindings("errors")]
    for key in ("app.error", "app", "app.x.error", "db.error", "db-1.x_y"):
        yield sorted((r.pattern, r.queue_name) for r in q.test_routing(key))
        yield q.send_topic(key, {"key": key})
    yield q.send_topic("app.x", {"n": 1}, headers={"h": 1}, delay=50)
    yield sorted(
        (r.queue_name, r.msg_id) for r in q.send_batch_topic("app.y", [{"n": 2}, {"n": 3}])
    )
    yield sorted((r.queue_name, r.msg_id) for r in q.send_batch_topic(
        "db.error", [{"n": 4}], headers=[{"h": 2}], delay=30))  # fmt: skip
    yield q.unbind_topic("app.#", "app"), q.unbind_topic("app.#", "app")
    for name in ("all", "errors", "app"):
        yield figures(q, name)
        yield briefs(q.read_batch(name, vt=30, batch_size=50))
    for key in ("", ".a", "a.", "a..b", "a b", "a.*", "x" * 256):
        yield refused(q.validate_routing_key, key)
        yield refused(q.validate_topic_pattern, key)
    for pattern in ("**", "a.##", "a*#", "a.#*", "a.*.b", "#"):
        yield refused(q.validate_topic_pattern, pattern)


def conditions(q: Any) -> Iterator[Any]:
    q.create_queue("c")
    q.send_batch("c", [{"kind": k, "n": n} for n, k in enumerate("abab")])
    yield briefs(q.read_batch("c", vt=30, batch_size=1, conditional={"kind": "b"})
                 if "conditional" in q.read_batch.__code__.co_varnames else
                 q.read("c", vt=30, conditional={"kind": "b"}))  # fmt: skip
    yield briefs(q.read("c", vt=30, conditional={"kind": "z"}) or [])
    yield briefs(q.read("c", vt=30))


def notifications(q: Any) -> Iterator[Any]:
    q.create_queue("n")
    q.enable_notify("n", 100)
    yield [(t.queue_name, t.throttle_interval_ms) for t in q.list_notify_throttles()]
    q.update_notify("n", 200)
    yield [(t.queue_name, t.throttle_interval_ms) for t in q.list_notify_throttles()]
    q.disable_notify("n")
    yield q.list_notify_throttles()
    yield refused(q.update_notify, "n", 5), refused(q.enable_notify, "n", -1)


def mistakes(q: Any) -> Iterator[Any]:
    """What both refuse."""
    q.create_queue("m")
    for call in (
        lambda: q.send("none", {}), lambda: q.read("none"), lambda: q.delete("none", 1),
        lambda: q.metrics("none"), lambda: q.create_queue("x" * 48),
        lambda: q.send_batch("m", []), lambda: q.send_batch("m", [{}], headers=[{}, {}]),
        lambda: q.bind_topic("a.*", "none"), lambda: q.bind_topic("a..b", "m"),
        lambda: q.send_topic("a b", {}), lambda: q.validate_queue_name("x" * 48),
    ):  # fmt: skip
        yield refused(call)
    yield q.drop_queue("none")


def refused(call: Callable[..., Any], *args: Any) -> bool:
    try:
        call(*args)
    except Exception:
        return True
    return False


def at_random(q: Any, seed: int) -> Iterator[Any]:
    """A hundred calls of any kind. Reads without groups take all there is: their order differs."""
    rng = random.Random(seed)
    q.create_queue("r")
    for step in range(100):
        some = [rng.randint(1, 60) for _ in range(rng.randint(1, 4))]
        match rng.choice(["send", "send", "delayed", "read", "head", "group", "rr", "delete",
                          "archive", "vt", "vt", "now", "pop", "figures", "where"]):  # fmt: skip
            case "send":
                headers = [{"x-pgmq-group": rng.choice("abc")} for _ in some]
                yield q.send_batch("r", [{"n": step, "i": i % 2} for i in some], headers=headers)
            case "delayed":
                yield q.send("r", {"n": step}, delay=1000)
            case "read" if rng.random() < 0.3:
                yield briefs(q.read_batch("r", vt=800, batch_size=1000) or [])
            case "where":
                condition = {"i": rng.randint(0, 1)}
                read = q.read_with_poll("r", 800, 2, 1, 10, conditional=condition)
                yield briefs(read or [])
            case "group":
                yield briefs(q.read_grouped("r", vt=800, qty=rng.randint(1, 5)) or [])
            case "rr":
                yield [
                    m.msg_id for m in q.read_grouped_rr("r", vt=800, qty=rng.randint(1, 5)) or []
                ]
            case "delete":
                yield sorted(q.delete_batch("r", some)), q.delete("r", some[0])
            case "archive":
                yield sorted(q.archive_batch("r", some)), q.archive("r", some[0])
            case "vt":
                yield briefs(q.set_vt("r", some, rng.choice([400, 900])) or [])
            case "now":
                yield briefs(q.set_vt("r", some, 0) or [])
            case "pop" if rng.random() < 0.2:
                yield sorted(m.msg_id for m in q.pop("r", qty=1000) or [])
            case "figures":
                yield figures(q, "r")
    yield briefs(q.set_vt("r", list(range(1, 300)), 0) or [])
    yield sorted((m.msg_id, m.read_ct) for m in q.read_batch("r", vt=800, batch_size=1000) or [])


SCENARIOS = [sending, settling, timing, groups, topics, conditions, notifications, mistakes]
SEEDS = range(4)


@pytest.mark.longer
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
@pytest.mark.promise("pgmq: the client of PyPI, beside pgmq itself")
def test_the_client_of_pypi_gets_what_pgmq_gives(face: Conn, pgmq: Conn, scenario: Any) -> None:
    """The same calls, side by side, in two databases of one server."""
    here, there = scenario(client_of(face)), scenario(client_of(pgmq))
    for step, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        assert ours == theirs, f"{scenario.__name__}, step {step}"
    checker.check(face)


@pytest.mark.longer
@pytest.mark.parametrize("seed", SEEDS)
def test_any_calls_give_what_pgmq_gives(face: Conn, pgmq: Conn, seed: int) -> None:
    here, there = at_random(client_of(face), seed), at_random(client_of(pgmq), seed)
    for step, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        assert ours == theirs, f"step {step}"
        checker.check(face)


def test_a_message_is_sent_read_and_deleted(face: Conn) -> None:
    """The quick one: the path of most messages, with the shape that clients rely on."""
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.send_batch('q', array['{\"n\": 1}', '{\"n\": 2}']::jsonb[])")
    cursor = face.execute("select * from pgmq.read('q', 30, 2)")
    assert [column.name for column in cursor.description or []] == [
        "msg_id", "read_ct", "enqueued_at", "last_read_at", "vt", "message", "headers",
    ]  # fmt: skip
    assert [(row[0], row[1], row[5]) for row in cursor.fetchall()] == [
        (1, 1, {"n": 1}),
        (2, 1, {"n": 2}),
    ]
    assert rows(face, "select msg_id, read_ct from pgmq.q_q") == [(1, 1), (2, 1)]
    assert rows(face, "select pgmq.delete('q', 1), pgmq.archive('q', 2)") == [(True, True)]
    assert rows(face, "select msg_id, message from pgmq.a_q") == [(2, {"n": 2})]
    assert rows(face, "select queue_length from pgmq.metrics('q')") == [(0,)]
    checker.check(face)


@pytest.mark.promise("pgmq: no other schema is touched, and it goes")
def test_it_is_installed_apart_and_removed(conn: Conn, url: str) -> None:
    """Not by default; again without harm; not into a schema of others; with the queue it goes."""
    there = "select to_regnamespace('pgmq')::text"
    assert rows(conn, there) == [(None,)]
    conn.execute("create schema pgmq")
    with pytest.raises(PgQueueError, match="did not create") as caught:
        schema.install(conn, pgmq=True)
    assert caught.value.sqlstate == "PQ006"
    conn.execute("drop schema pgmq")
    for _ in range(2):
        schema.install(conn, pgmq=True)
        conn.execute("select pgmq.create('q'), pgmq.send('q', '{}')")
    schema.install(conn)
    assert rows(conn, "select queue_length from pgmq.metrics('q')") == [(2,)]
    conn.execute("create view public.mine as select * from pgmq.meta")
    with pytest.raises(PgQueueError, match=r"view public\.mine"):
        schema.uninstall(conn)
    conn.execute("drop view public.mine")
    schema.uninstall(conn)
    assert rows(conn, there) == [(None,)]


def test_without_the_queue_there_is_no_face(empty_url: str) -> None:
    refusal = pytest.raises(psycopg.Error, match="pgqueue is not installed")
    with connection.connect(empty_url) as conn, refusal:
        conn.execute(schema.script(transaction=False, pgmq=True).encode())


# By the bytes of a letter in UTF-8: lengths at which names of views and channels are cut.
NAMES = [
    *(("x", n) for n in (1, 47)),
    *(("é", n) for n in (24, 31, 47)),
    *(("€", n) for n in (16, 24, 47)),
    *(("\U0001f600", n) for n in (12, 16, 47)),
]


def test_a_queue_has_a_name_of_any_letters(face: Conn, url: str) -> None:
    """Names of views and channels have 63 bytes; the longest of a queue has 47 letters."""
    for letter, length in NAMES:
        check_name(face, url, letter * length)


def check_name(face: Conn, url: str, name: str) -> None:
    for call in (
        "create(%s)", "enable_notify_insert(%s, 0)", "bind_topic('a.#', %s)",
    ):  # fmt: skip
        face.execute(f"select pgmq.{call}".encode(), [name])
    with connection.connect(url) as waits:
        waits.execute(f'listen "pgmq.q_{name}.INSERT"'.encode())
        assert rows(face, "select * from pgmq.send(%s, '{}')", name) == [(1,)]
        assert len(list(waits.notifies(timeout=10, stop_after=1))) == 1
    assert rows(face, "select pgmq.send_topic('a.b', '{}')") == [(1,)]
    assert rows(face, f'select msg_id from pgmq."q_{name}"') == [(1,), (2,)]
    assert rows(face, "select msg_id from pgmq.read(%s, 30, 2)", name) == [(1,), (2,)]
    assert rows(face, "select pgmq.archive(%s, 1), pgmq.delete(%s, 2)", name, name) == [
        (True, True)
    ]
    assert rows(face, f'select msg_id from pgmq."a_{name}"') == [(1,)]
    assert rows(face, "select queue_length from pgmq.metrics(%s)", name) == [(0,)]
    if len(name.encode()) > 61 and len(name) == 47:
        with raises("PQ006", "first 61 bytes"):
            face.execute("select pgmq.create(%s)", [name[:-1] + "z"])
    assert rows(face, "select pgmq.drop_queue(%s)", name) == [(True,)]
    assert rows(face, "select count(*) from pg_class where relname ~ '^[qa]_'") == [(0,)]


ROLES = {
    "producer": "send('q', '{}')",
    "consumer": "read('q', 30, 1)",
    "observer": "metrics('q')",
    "admin": "create('other')",
}


@pytest.mark.promise("pgmq: roles")
def test_each_role_may_do_its_part(face: Conn) -> None:
    """And not what is for another; PUBLIC may do nothing; nobody may call what is inside."""
    face.execute("select pgqueue.create_roles()")
    schema.install(face, pgmq=True)
    face.execute("select pgmq.create('q')")
    of = "select oid::regprocedure::text from pg_proc where pronamespace = 'pgmq'::regnamespace"
    granted = f"{of} and exists (select from aclexplode(proacl) where grantee = 0)"
    assert rows(face, granted) == [], "of PUBLIC"
    for role in ROLES:
        face.execute(f"set role pgqueue_{role}")  # type: ignore[arg-type]
        try:
            for other, call in ROLES.items():
                statement = f"select * from pgmq.{call}"
                if other == role or (other, role) == ("observer", "admin"):
                    face.execute(statement)  # type: ignore[arg-type]
                else:
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        face.execute(statement)  # type: ignore[arg-type]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                face.execute("select pgmq._settle(null, null)")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                face.execute("delete from pgmq.meta")
        finally:
            face.execute("reset role")


BAD = [
    ("create(null)", "P0001", ["queue_name", "null"]),
    ("create('')", "P0001", ["queue_name"]),
    ("create('a;b')", "P0001", ["invalid characters", "a;b"]),
    ("create(repeat('x', 48))", "P0001", ["47", "48"]),
    ("create('taken')", "PQ006", ["'taken'"]),
    ("create_partitioned('p', '1', 'soon')", "22007", ["soon"]),
    ("send('no', '{}')", "42P01", ["'no'", "pgmq.create"]),
    ("send(null, '{}')", "42P01", ["null"]),
    ("send('q', null)", "PQ004", ["p_data"]),
    ("send('q', '{}', '[1]'::jsonb)", "PQ003", ["headers"]),
    ("send_batch('q', '{}')", "P0001", ["msgs"]),
    ("send_batch('q', null::jsonb[])", "P0001", ["msgs"]),
    ("send_batch('q', array['{}']::jsonb[], array['{}', '{}']::jsonb[])", "P0001", ["(2)", "(1)"]),
    ("read('no', 30, 1)", "42P01", ["'no'"]),
    ("read('a--b', 30, 1)", "P0001", ["invalid characters", "a--b"]),
    ("send('a;b', '{}')", "P0001", ["invalid characters", "a;b"]),
    ("metrics('a$b')", "P0001", ["invalid characters", "a$b"]),
    ("drop_queue('a;b')", "P0001", ["invalid characters", "a;b"]),
    ("read('q', 2000000000, 1)", "PQ003", ["p_visibility_timeout", "10 years"]),
    ("pop('no')", "42P01", ["'no'"]),
    ("delete('no', 1)", "42P01", ["'no'"]),
    ("archive('no', '{1}'::bigint[])", "42P01", ["'no'"]),
    ("set_vt('no', 1, 5)", "42P01", ["'no'"]),
    ("set_vt('q', 1, 'infinity'::timestamptz)", "P0001", ["vt", "infinity"]),
    ("set_vt('q', 1, null::timestamptz)", "P0001", ["vt", "null"]),
    ("purge_queue('no')", "42P01", ["'no'"]),
    ("metrics('no')", "42P01", ["'no'"]),
    ("create_fifo_index('no')", "42P01", ["'no'"]),
    ("bind_topic('a', 'no')", "P0001", ['"no"', "pgmq.create"]),
    ("bind_topic('a b', 'q')", "P0001", ["pattern", "a b"]),
    ("bind_topic('a.**', 'q')", "P0001", ["pattern", "a.**"]),
    ("unbind_topic('', 'q')", "P0001", ["pattern"]),
    ("test_routing('a.')", "P0001", ["routing_key", "a."]),
    ("send_topic('a.', '{}')", "P0001", ["routing_key", "a."]),
    ("send_topic('a', null)", "P0001", ["msg"]),
    ("send_topic('a', '{}', -1)", "P0001", ["delay", "-1"]),
    ("enable_notify_insert('q', -1)", "P0001", ["throttle_interval_ms", "-1"]),
    ("enable_notify_insert('q', null)", "P0001", ["throttle_interval_ms", "null"]),
    ("update_notify_insert('q', null)", "P0001", ["throttle_interval_ms", "null"]),
    ("update_notify_insert('q', 1)", "P0001", ['"q"', "enable_notify_insert"]),
]


def test_bad_input_is_refused_with_what_is_allowed(face: Conn) -> None:
    face.execute("select pgqueue.create_stream('taken'), pgmq.create('q')")
    face.execute("select pgmq.send('q', '{}')")
    for call, code, words in BAD:
        with pytest.raises(psycopg.Error) as caught:
            face.execute(f"select * from pgmq.{call}")  # type: ignore[arg-type]
        said = f"{caught.value.diag.message_primary} {caught.value.diag.message_hint}"
        assert caught.value.sqlstate == code, (call, said)
        assert "<NULL>" not in said, (call, said)
        assert all(word in said for word in words), (call, said)
    assert rows(face, "select queue_length from pgmq.metrics('q')") == [(1,)]


READ_COMMITTED_ONLY = [
    "read('q', 30, 1)", "read('q', 30, 1, '{\"n\": 1}')", "read_with_poll('q', 30, 1)",
    "read_grouped('q', 30, 1)", "read_grouped_rr('q', 30, 1)", "read_grouped_head('q', 30, 1)",
    "pop('q')", "delete('q', 1)", "archive('q', 1)", "set_vt('q', 1, 5)", "set_vt('q', 1, now())",
    "purge_queue('q')",
]  # fmt: skip


def test_another_isolation_level_is_refused(face: Conn) -> None:
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.send('q', '{\"n\": 1}')")
    for level, call in product(("repeatable read", "serializable"), READ_COMMITTED_ONLY):
        face.execute(f"begin isolation level {level}".encode())
        with pytest.raises(psycopg.Error, match=f"read committed, not {level}") as caught:
            face.execute(f"select * from pgmq.{call}".encode())
        face.execute("rollback")
        assert caught.value.sqlstate == "PQ007", call
    assert rows(face, "select queue_length from pgmq.metrics('q')") == [(1,)]


@pytest.mark.parametrize("size", [1, 7])
def test_workers_that_race_delete_each_message_once(face: Conn, size: int, session: Any) -> None:
    """Two read and delete by numbers; what the one has read, the other may delete."""
    face.execute("select pgmq.create('q')")
    face.execute(
        "select pgmq.send_batch('q', array(select to_jsonb(i) from generate_series(1, 60) i))"
    )
    other = session()
    deleted: list[int] = []
    delete = "select pgmq.delete('q', %s::bigint[])"
    while found := rows(face, f"select msg_id from pgmq.read('q', 60, {size})"):
        theirs = rows(other, f"select msg_id from pgmq.read('q', 60, {size})")
        numbers = [number for (number,) in found + theirs]
        for conn, part in ((other, numbers[::2]), (face, numbers)):
            deleted += [number for (number,) in rows(conn, delete, part)]
        checker.check(face)
    assert sorted(deleted) == list(range(1, 61))


def test_a_number_settles_the_message_of_its_own_queue_also_in_a_claim(face: Conn) -> None:
    """Two queues have the same numbers, and claims of several messages."""
    send = "select pgmq.send_batch(%s, array(select to_jsonb(i) from generate_series(1, 40) i))"
    seen = "select msg_id, vt > now() + interval '1 hour' as held from pgmq.q_{} where vt > now()"
    for name in "ab":
        face.execute("select pgmq.create(%s)", [name])
        face.execute(send.encode(), [name])
        for _ in range(10):
            face.execute("select pgmq.read(%s, 600, 3)", [name])
    held, deleted = 29, 30
    with_it = [each for each in internals.bundles(face) if any(held in r for r in each.seqs)]
    assert [(each.state, each.message_count) for each in with_it] == [("claimed", 3)] * 2
    other = rows(face, seen.format("b"))
    face.execute("select pgmq.set_vt('a', %s, 10000)", [held])
    face.execute("select pgmq.delete('a', %s)", [deleted])
    mine = dict(rows(face, seen.format("a")))
    assert mine == {n: n == held for n in range(1, 30)}
    assert rows(face, seen.format("b")) == other


def test_a_number_takes_no_message_from_a_spark_query(face: Conn) -> None:
    """Nor does it change how long the query has it."""
    face.execute("select pgmq.create('q')")
    sent = rows(face, "select m from pgmq.send_batch('q', array['{}', '{}']::jsonb[]) m")
    ids = rows(face, "select consumer_id from pgqueue.consumers")
    reader = Reader(face, ids[0].consumer_id)
    end = reader.ask()
    for until in ("1 hour", "-1 hour"):
        face.execute("select pgmq.set_vt('q', 1, now() + %s::interval)", [until])
        face.execute("select pgmq.delete('q', 1)")
        assert (reader.lost(end), reader.plan(end)) == (0, [seq for (seq,) in sent])
    checker.check(face)


def test_a_queue_is_read_by_others_and_by_its_names_in_any_case(face: Conn) -> None:
    face.execute("select pgmq.create('Mixed')")
    face.execute("select pgqueue.create_consumer('mixed', 'audit', 'earliest')")
    face.execute("select pgmq.send('MIXED', '{\"n\": 1}', '{\"x-pgmq-group\": \"ann\"}'::jsonb)")
    assert rows(face, "select key from pgqueue.receive('mixed', 'audit')") == [("ann",)]
    assert rows(face, "select msg_id from pgmq.pop('mixed')") == [(1,)]
    assert rows(face, "select pgmq.drop_queue('mixed')") == [(True,)]
    assert rows(face, "select stream from pgqueue.stream_stats") == []


def test_a_queue_that_is_created_beside_an_open_drop_of_it_is_there(face: Conn, url: str) -> None:
    face.execute("select pgmq.create('q')")
    with connection.connect(url) as drops, ThreadPoolExecutor(1) as pool:
        with drops.transaction():
            assert rows(drops, "select pgmq.drop_queue('Q')") == [(True,)]
            creates = pool.submit(rows, face, "select pgmq.create('q')")
            wait_for_a_lock(drops)
        creates.result(20)
        assert rows(drops, "select pgmq.send('q', '{}')") == [(1,)]


def test_a_sender_waits_for_no_other_sender_of_a_queue_with_notifications(
    face: Conn, url: str
) -> None:
    """The open transaction has used up the interval, and will notify."""
    face.execute("select pgmq.create('Orders')")
    for name in ("orders", "Orders"):
        face.execute("select pgmq.enable_notify_insert(%s)", [name])
        face.execute("select pgmq.update_notify_insert(%s, 0)", [name])
    assert rows(face, "select queue_name from pgmq.list_notify_insert_throttles()") == [("Orders",)]
    with connection.connect(url) as other:
        other.execute("set lock_timeout = '1s'")
        with face.transaction():
            face.execute("select pgmq.send('orders', '{}')")
            assert rows(other, "select pgmq.send('Orders', '{}')") == [(2,)]
        other.execute("select pgmq.disable_notify_insert('orders')")
    assert rows(face, "select * from pgmq.list_notify_insert_throttles()") == []


@pytest.mark.parametrize("interval", [0, 60_000])
def test_a_sender_beside_another_that_rolls_back_notifies(
    face: Conn, url: str, interval: int
) -> None:
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.enable_notify_insert('q', %s)", [interval])
    with connection.connect(url) as other:
        other.execute('listen "pgmq.q_q.INSERT"')
        with face.transaction(force_rollback=True):
            face.execute("select pgmq.send('q', '{}')")
            other.execute("select pgmq.send('q', '{}')")
        assert len(list(other.notifies(timeout=0.5, stop_after=2))) == 1
        assert rows(face, "select msg_id from pgmq.read('q', 30, 10)") == [(2,)]


def test_unread_messages_are_deleted_together(face: Conn) -> None:
    """At the cost of one call, however many: one by one, 2,000 took twenty seconds."""
    face.execute("select pgmq.create('q')")
    many = "array(select to_jsonb(i) from generate_series(1, 4000) i)"
    face.execute(f"select count(*) from pgmq.send_batch('q', {many})".encode())
    face.execute("select count(*) from pgmq.read('q', 60, 100)")
    settle = "select pgmq.{}('q', array(select generate_series({}, {}, {}))::bigint[])"
    few = cost(face, settle.format("delete", 201, 204, 1))
    for how, first, last, step in (
        ("delete", 1001, 2000, 2), ("delete", 901, 2100, 1), ("archive", 2001, 3000, 1),
    ):  # fmt: skip
        assert cost(face, settle.format(how, first, last, step)) < few * 10 + 3000
    left = [*range(1, 201), *range(205, 901), *range(3001, 4001)]
    assert rows(face, "select array_agg(msg_id) from pgmq.q_q") == [(left,)]
    assert rows(face, "select min(msg_id), max(msg_id) from pgmq.a_q") == [(2101, 3000)]
    checker.check(face)


def test_of_two_deletes_of_unread_messages_each_returns_what_it_deleted(
    face: Conn, session: Any
) -> None:
    other = session()
    face.execute("select pgmq.create('q')")
    face.execute("select count(*) from pgmq.send_batch('q', '{1,2,3,4,5}'::jsonb[])")
    other.execute("begin")
    assert rows(other, "select pgmq.delete('q', 2)") == [(True,)]
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(rows, face, "select pgmq.delete('q', '{1,2,3,9}'::bigint[])")
        time.sleep(0.3)
        assert not waiter.done()
        other.execute("commit")
        assert waiter.result() == [(1,), (3,)]
    assert rows(face, "select msg_id from pgmq.q_q") == [(4,), (5,)]
    checker.check(face)


def test_a_queue_that_exists_gets_no_retention_from_create_partitioned(face: Conn) -> None:
    """It would lose unread messages."""
    face.execute("select pgmq.create('q'), pgmq.create_partitioned('p', '10', '50')")
    face.execute("select pgmq.create_partitioned('Q', '10', '1'), pgmq.create_partitioned('p')")
    retention = """
        select s.name, r.unread, r.keep_messages from pgqueue.streams s
        join pgqueue.retention r using (stream_id) order by name"""
    assert rows(face, retention) == [("p", "drop", 50), ("q", "keep", None)]


SELECTED = [
    "read('q', 30, 1, '{\"n\": 5}')",
    "read_grouped('q', 30, 1)",
    "read_grouped_rr('q', 30, 3)",
    "read_grouped_head('q', 30, 3)",
]


@pytest.mark.parametrize("isolated", [False, True], ids=["committed", "open"])
@pytest.mark.parametrize("read", SELECTED)
def test_no_message_is_read_twice_when_reads_of_two_kinds_take_turns(
    impatient: Conn, session: Any, read: str, isolated: bool
) -> None:
    """Plain reads take single sends ahead of the cursor, which the other reads move."""
    face, other = impatient, session()
    face.execute("select pgmq.create('q')")
    send = """select pgmq.send('q', jsonb_build_object('n', %s::int),
                               jsonb_build_object('x-pgmq-group', %s::int))"""
    for n in range(1, 9):
        face.execute(send.encode(), [n, n % 3])
    plain = "select message from pgmq.read('q', 30, {})"
    got = rows(face, plain.format(1)) + rows(face, plain.format(1))
    assert rows(face, "select pgmq.delete('q', 2)") == [(True,)]
    if isolated:
        other.execute("begin")
    got += rows(other, f"select message from pgmq.{read}")
    got += rows(face, plain.format(10))
    if isolated:
        other.execute("commit")
    got += rows(face, plain.format(10))
    assert sorted(message["n"] for (message,) in got) == list(range(1, 9))
    checker.check(face)


def test_a_read_with_a_condition_leaves_what_an_open_read_has(
    impatient: Conn, session: Any
) -> None:
    face, other = impatient, session()
    face.execute("select pgmq.create('q')")
    for n in range(1, 9):
        face.execute("select pgmq.send('q', jsonb_build_object('n', %s::int))", [n])
    other.execute("begin")
    assert len(rows(other, "select * from pgmq.read('q', 30, 2)")) == 2
    for read in ("read('q', 30, 2, '{\"n\": 1}')", "read_grouped('q', 30, 1)"):
        assert rows(face, f"select * from pgmq.{read}") == []
    assert rows(face, "select msg_id from pgmq.read('q', 30, 1)") == [(3,)]
    other.execute("rollback")
    assert rows(face, "select msg_id from pgmq.read('q', 30, 9, '{\"n\": 1}')") == [(1,)]
    checker.check(face)


def test_a_message_is_archived_again_when_it_is_delivered_again(face: Conn) -> None:
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.send_batch('q', '{1,2}'::jsonb[])")
    for count in (1, 2):
        face.execute("select pgqueue.seek('q', 'pgmq', 'earliest')")
        for _ in range(count):
            assert len(rows(face, "select * from pgmq.read('q', 0, 2)")) == 2
        assert rows(face, "select pgmq.archive('q', 1)") == [(True,)]
        assert rows(face, "select * from pgmq.archive('q', '{2}'::bigint[])") == [(2,)]
        archived = "select msg_id, read_ct, message from pgmq.a_q order by 1"
        assert rows(face, archived) == [(1, count, 1), (2, count, 2)]


@pytest.mark.parametrize("dropped", ["drop_consumer('q', 'pgmq')", "drop_stream('q')"])
def test_a_queue_whose_stream_was_dropped_is_dropped_and_created(face: Conn, dropped: str) -> None:
    face.execute("select pgmq.create('q')")
    face.execute(f"select pgqueue.{dropped}".encode())
    for call in ("create('q')", "create_partitioned('q')", "send('q', '1')", "read('q', 1, 1)"):
        with pytest.raises(psycopg.errors.UndefinedTable) as caught:
            face.execute(f"select pgmq.{call}".encode())
        assert "Call pgmq.drop_queue" in str(caught.value.diag.message_hint), call
    face.execute("select pgmq.drop_queue('q'), pgmq.create('q')")
    assert rows(face, "select * from pgmq.send('q', '1')") == [(1,)]


def test_a_poll_without_an_end_returns_what_is_there(face: Conn) -> None:
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.send_batch('q', '{1,2}'::jsonb[])")
    for poll in ("read_with_poll", "read_grouped_with_poll"):
        assert len(rows(face, f"select * from pgmq.{poll}('q', 1, 1, null, null)")) == 1


def test_a_read_with_a_condition_behind_many_messages_does_not_stay_in_flight(face: Conn) -> None:
    limits.set_constant(face, "limit_long", 1)
    face.execute("select pgmq.create('q')")
    for n in (0, 0, 0, 1):  # each a bundle of its own
        face.execute("select pgmq.send('q', %s)", [Jsonb({"n": n})])
        assert rows(face, "select pgqueue.receive_where('q', 'pgmq', '$.key == \"x\"')") == []
    face.execute("select pgqueue.pause('q', 'pgmq')")
    face.execute("select pgqueue.alter_consumer('q', 'pgmq', '{\"max_in_flight\": 1}')")
    face.execute("select pgqueue.resume('q', 'pgmq')")
    assert rows(face, "select msg_id from pgmq.read('q', 1, 1, '{\"n\": 1}')") == [(4,)]
    assert rows(face, "select msg_id from pgmq.read('q', 30, 1)") == []
    checker.check(face)
    time.sleep(1.1)
    assert rows(face, "select msg_id from pgmq.read('q', 30, 1)") == [(1,)]


def test_polls_pass_messages_that_expired(face: Conn) -> None:
    """A poll that makes some dead letters ends, and keeps them: the next one reads on."""
    limits.set_constant(face, "limit_due", 2)
    face.execute("select pgmq.create('q')")
    for _ in range(9):  # each a bundle of its own
        face.execute("select pgqueue.send('q', '1', p_expires_at => now() + interval '1 s')")
        assert rows(face, "select pgqueue.receive_where('q', 'pgmq', '$.key == \"x\"')") == []
    face.execute("select pgmq.send('q', '2')")
    time.sleep(2)
    face.execute("set statement_timeout = '5 s'")
    poll = "select msg_id from pgmq.read_with_poll('q', 30, 1, 60, 100)"
    assert [rows(face, poll) for _ in range(3)] == [[], [], [(10,)]]
    assert rows(face, "select count(*) from pgqueue.dead_messages") == [(9,)]


def test_a_poll_continues_beside_dead_letters_of_others(face: Conn, url: str) -> None:
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.send('q', '1')")
    (read,) = rows(face, "select claim_id from pgqueue.receive('q', 'pgmq')")
    (consumer_id,) = rows(face, "select consumer_id from pgqueue.consumers")[0]
    with connection.connect(url) as polls, ThreadPoolExecutor() as pool:
        with face.transaction():
            internals.lock_consumer(face, consumer_id)
            poll = "select msg_id from pgmq.read_grouped_with_poll('q', 30, 1, 10, 50)"
            polled = pool.submit(rows, polls, poll)
            wait_for_a_lock(face)
            face.execute("select pgqueue.dead_letter(%s)", read)
        face.execute("select pgmq.send('q', '2')")
        assert polled.result(20) == [(2,)]


def test_a_poll_keeps_what_its_last_read_took(face: Conn) -> None:
    """The next one need not take it again."""
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.send('q', '1', 100)")
    assert rows(face, "select msg_id from pgmq.read_with_poll('q', 30, 1, 1, 100)") == []
    assert rows(face, "select seqs::text from pgqueue.consumer_messages") == [("{[1,2)}",)]


def test_who_listens_hears_of_sends_but_not_too_often(face: Conn) -> None:
    face.execute("select pgmq.create('q'), pgmq.enable_notify_insert('q', 60000)")
    face.execute('listen "pgmq.q_q.INSERT"')
    for _ in range(3):
        face.execute("select pgmq.send('q', '{}')")
    heard = list(face.notifies(timeout=0.2, stop_after=2))
    assert [each.channel for each in heard] == ["pgmq.q_q.INSERT"]


def test_metrics_read_sums_and_no_messages(face: Conn) -> None:
    """Some ten blocks for a queue, however many messages a publication has."""
    face.execute("select pgmq.create('q')")
    many = "array(select to_jsonb(i) from generate_series(1, 5000) i)"
    for _ in range(2):
        face.execute(f"select count(*) from pgmq.send_batch('q', {many})")
        face.execute("select count(*) from pgmq.read('q', 60, 100)")
    blocks = [cost(face, "select pgmq.metrics('q')") for _ in range(3)]
    assert blocks[-1] < 100, blocks


@pytest.mark.longer
@pytest.mark.promise("pgmq: pgmq-js 1.3.1 of npm, beside pgmq itself (its setVt fails with either)")
def test_the_client_of_npm_gets_the_same_answers(face: Conn, pgmq: Conn, tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("no node and npm (on Debian and Ubuntu: apt install nodejs npm)")
    npm = ["npm", "install", "pgmq-js@1.3.1"]
    there = subprocess.run(npm, cwd=tmp_path, capture_output=True, text=True)
    if there.returncode:
        pytest.skip(f"npm cannot install pgmq-js: {there.stderr[-200:]}")
    program = shutil.copy(Path(__file__).with_name("pgmq_client.js"), tmp_path)
    answers = []
    for conn in (face, pgmq):
        where = [conn.info.host, str(conn.info.port), conn.info.dbname]
        done = subprocess.run(["node", program, *where], capture_output=True, text=True)
        assert done.returncode == 0, (conn is face, done.stdout)
        answers.append(done.stdout.splitlines())
    assert len(answers[0]) == 19
    assert answers[0] == answers[1]


def test_a_read_with_no_time_returns_each_message_once(face: Conn) -> None:
    rows(face, "select pgmq.create('peek')")
    rows(face, "select pgmq.send('peek', to_jsonb(n)) from generate_series(1, 3) n")
    for count in range(1, 8):
        found = rows(face, "select msg_id, read_ct from pgmq.read('peek', %s, 100)", count % 2 - 1)
        assert sorted(found) == [(n, count) for n in (1, 2, 3)]
    assert rows(face, "select pgmq.pop('peek', 2) is null") == [(False,), (False,)]


def test_a_queue_retries_as_that_of_pgmq_at_once_and_without_end(face: Conn) -> None:
    face.execute("select pgmq.create('mine')")
    settings = "select settings from pgqueue.consumer_settings where stream = 'mine'"
    assert face.execute(settings).fetchone() == (AT_ONCE,)


EXCUSED = {"notify_queue_listeners()": "a trigger of a queue's table, which is a view here"}


def test_each_public_function_of_pgmq_is_here(face: Conn, pgmq: Conn) -> None:
    signatures = """
        select p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')' from pg_proc p
        where p.pronamespace = 'pgmq'::regnamespace and p.proname !~ '^_'"""
    here, there = ({name for (name,) in rows(conn, signatures)} for conn in (face, pgmq))
    assert there - here == set(EXCUSED)


READS = [
    "pgmq.read('q', 30, 5)",
    "pgmq.read('q', 30, 5, '{\"n\": 1}')",
    "pgmq.pop('q')",
    "pgmq.read_grouped('q', 30, 5)",
    "pgmq.read_with_poll('q', 30, 5, 1, 10)",
    "pgqueue.receive('q', 'pgmq', 5)",
    "pgqueue.claim('q', 'pgmq', 5)",
    "pgqueue.receive_where('q', 'pgmq', '$.data.n == 1', 5)",
]


@pytest.fixture
def impatient(face: Conn) -> Conn:
    """The face, with claims that wait for a tenth of a second in place of a second."""
    limits.set_constant(face, "claim_patience", "50 ms")
    return face


def test_others_read_what_is_sent_while_a_read_stays_in_an_open_transaction(
    impatient: Conn, session: Any
) -> None:
    face = impatient
    face.execute("select pgmq.create('q')")
    face.execute("select pgmq.send('q', '{}')")
    read = "select msg_id from pgmq.read('q', 30, 1)"
    assert rows(face, read) == [(1,)]
    holder = session()
    holder.execute("begin")
    for msg_id in range(2, 6):
        face.execute("select pgmq.send('q', '{}')")
        assert rows(holder if msg_id == 2 else face, read) == [(msg_id,)]
    assert rows(face, read) == []
    holder.execute("rollback")
    assert rows(face, read) == [(2,)]
    checker.check(face)


@pytest.mark.parametrize(
    "settings", ['{"notify_done": true}', '{"per_key_limit": 1}', '{"max_in_flight": 100}']
)
def test_no_read_waits_for_a_read_in_an_open_transaction(
    impatient: Conn, session: Any, settings: str
) -> None:
    """The open transaction took the new messages. Others get nothing, and do not wait a minute."""
    face = impatient
    face.execute("select pgmq.create('q')")
    face.execute("select pgqueue.pause('q', 'pgmq')")
    face.execute("select pgqueue.alter_consumer('q', 'pgmq', %s)", [settings])
    face.execute("select pgqueue.resume('q', 'pgmq')")
    face.execute("select count(*) from pgmq.send_batch('q', array['{}', '{}', '{}']::jsonb[])")
    held, acked = rows(face, "select claim_id, seq from pgqueue.receive('q', 'pgmq')")[0]
    holder, other = session(), session()
    holder.execute("begin")
    assert len(rows(holder, "select pgmq.read('q', 30, 1)")) == 1
    face.execute("select pgmq.send('q', '{}')")
    holder.execute("select pgmq.read('q', 30, 10)")  # what is new is taken under the lock
    assert rows(
        face,
        "select count(*) from pg_locks where granted and locktype = 'advisory' and pid = %s "
        "and classid = _pgqueue.lock_class_consumer()::oid",
        holder.info.backend_pid,
    ) == [(1,)]
    other.execute("set statement_timeout = '20 s'")
    if "notify_done" in settings:
        face.execute("select pgmq.send('q', '{}')")
    for read in READS[:-1] if "per_key" in settings else READS:
        got = []
        for _ in range(6):  # what is ready they get
            if not (got := rows(other, f"select * from {read}")):
                break
        assert got == [], read
    receive = "select * from pgqueue.receive('q', 'pgmq', p_ack => %s)"
    assert rows(other, receive, held) == []
    assert held not in {each.claim_id for each in internals.claims(face)}
    assert acked not in {n for (n,) in rows(face, "select msg_id from pgmq.q_q")}, "acknowledged"
    notices: list[str] = []
    other.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
    assert rows(other, receive, held) == []
    settled = [notice for notice in notices if notice.startswith(f"claim {held} is not live")]
    assert len(settled) == 1, "a claim that is settled is warned of, once"
    holder.execute("rollback")
    face.execute("select pgmq.send('q', '{}')")
    assert acked not in {n for (n,) in rows(other, "select msg_id from pgmq.read('q', 30, 5)")}
    checker.check(face)


def test_one_transaction_at_a_time_has_the_lock_of_a_queue(face: Conn, session: Any) -> None:
    holder, other = session(), session()
    holder.execute("begin")
    holder.execute("select pgmq.acquire_queue_lock('q')")
    other.execute("select pgmq.acquire_queue_lock('p')")
    other.execute("set lock_timeout = '100 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        other.execute("select pgmq.acquire_queue_lock('q')")
    holder.execute("commit")
    other.execute("select pgmq.acquire_queue_lock('q')")


def test_programs_that_start_at_the_same_time_all_create_their_queue(
    face: Conn, session: Any
) -> None:
    """As workers of Celery do."""
    first, second = session(), session()
    for beginning in ("pgmq.create('q')", "pgmq.enable_notify_insert('q')"):
        first.execute("begin")
        first.execute(f"select {beginning}".encode())
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(second.execute, f"select {beginning}".encode())
            wait_for_a_lock(face)
            first.execute("commit")
            waiter.result()
    second.execute("select pgmq.create('Q'), pgmq.send('q', '{}')")
    assert rows(face, "select queue_length from pgmq.metrics('q')") == [(1,)]


def test_a_claim_waits_while_the_lock_passes_from_one_to_the_next(face: Conn, session: Any) -> None:
    """It gets nothing only beside one transaction that stays open."""
    limits.set_constant(face, "claim_patience", "1 s")
    face.execute("select pgmq.create('q')")
    face.execute("select pgqueue.alter_consumer('q', 'pgmq', '{\"notify_done\": true}')")
    face.execute("select pgmq.send('q', '{}')")
    consumer = rows(face, "select consumer_id from pgqueue.consumers")[0][0]
    first, second, third = session(), session(), session()

    def waiting_since(pid: int) -> Any:
        found = rows(face, "select waitstart from pg_locks where not granted and pid = %s", pid)
        return found[0][0] if found else None

    def waits(pid: int) -> Any:
        while (since := waiting_since(pid)) is None:
            time.sleep(0.01)
        return since

    for conn in (first, second):
        conn.execute("begin")
    internals.lock_consumer(first, consumer)
    with ThreadPoolExecutor() as pool:
        queued = pool.submit(internals.lock_consumer, second, consumer)
        waits(second.info.backend_pid)
        claim = pool.submit(rows, third, "select seq from pgqueue.receive('q', 'pgmq')")
        since = waits(third.info.backend_pid)
        while not claim.done() and waiting_since(third.info.backend_pid) in (None, since):
            time.sleep(0.01)
        since = waiting_since(third.info.backend_pid)
        first.execute("rollback")
        queued.result(30)
        while not claim.done() and waiting_since(third.info.backend_pid) in (None, since):
            time.sleep(0.01)
        second.execute("rollback")
        assert claim.result(30) == [(1,)]


def test_pop_returns_a_message_as_it_was(face: Conn, pgmq: Conn) -> None:
    for conn in (face, pgmq):
        conn.execute("select pgmq.create('p')")
        conn.execute("select pgmq.send_batch('p', array['{}', '{}', '{}']::jsonb[])")
        read = rows(conn, "select msg_id, last_read_at, vt from pgmq.read('p', 0, 2)")
        popped = rows(conn, "select msg_id, last_read_at, vt, read_ct from pgmq.pop('p', 3)")
        assert sorted(row[0] for row in popped) == [1, 2, 3]
        found = {row[0]: row[1:] for row in popped}
        assert found[3][0] is None
        assert found[3][2] == 0
        for msg_id, last_read_at, vt in read:
            assert abs(found[msg_id][0] - last_read_at) < timedelta(seconds=1)
            assert abs(found[msg_id][1] - vt) < timedelta(seconds=1)
            assert found[msg_id][2] == 1
        assert rows(conn, "select count(*) from pgmq.q_p") == [(0,)]


OWN_ERRORS = {
    "create(null)", "create('')", "create('taken')", "send(null, '{}')", "send('q', null)",
    "send('q', '{}', '[1]'::jsonb)", "read('q', 2000000000, 1)", "enable_notify_insert('q', -1)",
    "create_partitioned('p', '1', 'soon')", "set_vt('q', 1, 'infinity'::timestamptz)",
    "set_vt('q', 1, null::timestamptz)", "create_fifo_index('no')",
    "enable_notify_insert('q', null)", "update_notify_insert('q', null)",
}  # fmt: skip
"""What pgmq does not refuse, or in another way: limits of this queue."""


def test_errors_are_those_of_pgmq(face: Conn, pgmq: Conn) -> None:
    """The class, and the message, to which this queue may add what was given."""
    wrong = {}
    calls = [
        *(call for call, _, _ in BAD if call not in OWN_ERRORS),
        "bind_topic('a', '')", "unbind_topic('a', null)", "enable_notify_insert('no')",
        "update_notify_insert('no', 1)", "update_notify_insert('q', -1)", "send_topic('a b', '{}')",
        *(f"validate_topic_pattern('{p}')" for p in ("", ".a", "a.", "a..b", "a.##", "*#", "a!")),
        "validate_routing_key(repeat('x', 256))", "drop_queue('no')",
        "format_table_name('a;', 'q')",
    ]  # fmt: skip
    for conn in (face, pgmq):
        conn.execute("select pgmq.create('q')")
    for call in calls:
        found = []
        for conn in (face, pgmq):
            try:
                conn.execute(f"select pgmq.{call}")  # type: ignore[arg-type]
                found.append(("", ""))
            except psycopg.Error as error:
                found.append((error.sqlstate, str(error.diag.message_primary)))
        (state, text), (their_state, their_text) = found
        if state != their_state or not text.startswith(their_text):
            wrong[call] = found
    assert not wrong
