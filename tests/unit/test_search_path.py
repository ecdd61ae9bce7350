"""What others put into public is not found by what this package sends."""

import ast
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue import serving
from spark_pgqueue.postgres import adbc, connection
from spark_pgqueue.spark.options.stream_source import parse_stream_source
from spark_pgqueue.spark.sink.stream_writer import reserve
from spark_pgqueue.spark.stream_source.streams import Streams
from spark_pgqueue.web import server
from tests.sql.hijack import hijack

HIJACKED = "select lower(int8range(1, 2)), format('%s', 1)"

PINNED = {
    "command_line/doctor.py", "postgres/features.py", "postgres/payloads.py",
    "spark/executor/reading.py", "spark/sink/stream_writer.py", "testing/clock.py",
}  # fmt: skip
"""Files whose statements have a path of their own (`PIN_PATH`), or run only in tests."""

# Functions whose parameters are of any type: an exact match of another schema is preferred.
POLYMORPHIC = """
select distinct proname from pg_proc p
where pronamespace = 'pg_catalog'::regnamespace
  and (provariadic <> 0 or exists (select from unnest(proargtypes) a join pg_type t on t.oid = a
                                   where t.typtype = 'p' and t.typname ~ '^any'))
"""


@pytest.fixture
def hijacked(url: str) -> str:
    """The url of a database with a public that lies in wait."""
    with connection.connect(url) as conn:
        hijack(conn, first=False)
        with pytest.raises(psycopg.Error, match="hijacked"):
            conn.execute(HIJACKED)
    return url


def test_the_client_finds_nothing_in_public(hijacked: str) -> None:
    with spark_pgqueue.connect(hijacked) as queue:
        queue.create_stream("s")
        queue.create_consumer("s", "c", start="earliest", ordering="key")
        queue.send("s", "x", key="k", headers={"h": "1"})
        queue.send_batch("s", ["y", "z"])
        claim = queue.receive("s", "c", 10, wait=timedelta(seconds=1))
        assert claim is not None
        assert claim.nack(delay=timedelta(0)) == 3
        assert [stats.ready + stats.waiting for stats in queue.stats("s")] == [3]
        assert len(queue.streams()) == len(queue.consumers("s")) == 1
        queue.create_group("s", "g", partitions=2)
        assert [group.workers for group in queue.groups("s")] == [0]
        queue.maintain()
        queue.install()
        queue.drop_consumer("s", "c")
        queue.drop_consumer("s", "g")
        queue.drop_stream("s")


def test_a_worker_and_those_who_look_find_nothing_in_public(hijacked: str) -> None:
    settings = {"keep_history": timedelta(days=1), "max_deliver_count": 1}
    with spark_pgqueue.connect(hijacked) as queue:
        queue.create_stream("s")
        queue.create_consumer("s", "c", start="earliest", settings=settings)
        queue.send_batch("s", ["x", "y"])
        consumer = spark_pgqueue.Consumer(hijacked, "s", "c")
        assert consumer.run(lambda _: {"done": 1}, wait=timedelta(0)) == 2
        assert sum(done.message_count for done in queue.history("s", "c")) == 2
        queue.send("s", "z")
        claim = queue.receive("s", "c")
        assert claim is not None
        claim.nack(delay=timedelta(0))
        page = server.Page(queue, "title", False)
        for path in "/api/look", "/api/consumer", "/metrics":
            asked = {"stream": "s", "consumer": "c"}
            answer = page.answer(serving.Request("GET", path, asked, {}, b""))
            assert answer.status == 200, answer.body
    with closing(Streams(parse_stream_source({"url": hijacked, "stream": "s"}), 0)) as streams:
        assert list(streams.find()) == ["s"]


def test_what_tasks_send_finds_nothing_in_public(hijacked: str) -> None:
    with spark_pgqueue.connect(hijacked) as queue:
        stream = queue.create_stream("s")
    for _ in range(2):
        with adbc.kept_connection(hijacked) as conn, conn.cursor() as cursor:
            assert adbc.call(cursor, HIJACKED) == [(1, "1")]
            assert len(reserve(cursor, stream, 3)) == 3


def test_psql_makes_the_roles_of_a_deployment_with_nothing_in_public(hijacked: str) -> None:
    text = (Path(spark_pgqueue.__file__).parent / "deploy" / "roles.sql").read_text()
    names = ", ".join(sorted(set(re.findall(r"'(queue_\w+)'", text))))
    with connection.connect(hijacked) as conn:
        conn.execute(text.encode())
        conn.execute(f"drop owned by {names}; drop role {names}".encode())


def test_functions_that_another_schema_could_match_better_have_their_schema(
    conn: psycopg.Connection,
) -> None:
    polymorphic = {name for (name,) in conn.execute(POLYMORPHIC)}
    root = Path(spark_pgqueue.__file__).parent
    wrong = []
    for path in sorted(root.rglob("*.py")):
        file = str(path.relative_to(root))
        if file in PINNED:
            continue
        for text in texts(ast.parse(path.read_text())):
            # Postgres itself gives `unnest` of several lists, and what SQL spells in its own way,
            # the schema.
            called = re.findall(r"(?<![.\w])([a-z_]\w*)\((?!\*|%s::\S+, )", text)
            if re.search(r"(?i)\bselect\b[^;]*\bfrom\b|\bselect pgqueue[.]", text):
                wrong += [(file, name) for name in called if name in polymorphic]
    assert not wrong


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings in a file, with {} for their fields; not those that document it."""
    skipped: set[int] = set()
    for node in ast.walk(tree):  # from outside to inside
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield "".join(
                str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "" if id(node) in skipped else node.value
