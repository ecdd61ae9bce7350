"""A schema without some of the features that stand beside the queue."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_pgqueue import PgQueueError
from spark_pgqueue.postgres import connection, features, schema
from tests.sql.queue import Conn, acked, maintain, one, value

ROOT = Path(__file__).parents[2]

OBJECTS = """
select format('%s.%s', n.nspname, o.name)
from (select pronamespace as home, proname as name from pg_proc
      union all select relnamespace, relname from pg_class where relkind in ('r', 'p', 'v', 'c')) o
join pg_namespace n on n.oid = o.home where n.nspname in ('pgqueue', '_pgqueue')"""

# What uses each feature, and its words in the error.
USES: dict[str, tuple[Callable[[Conn], Any], str]] = {
    "schedules": (
        lambda conn: value(conn, "create_schedule", "s", "often", p_every="1 hour", p_data="1"),
        "schedule often of stream s",
    ),
    "capture": (
        lambda conn: conn.execute(
            "create table public.things (id int primary key);"
            "select pgqueue.capture('public.things', 's')"
        ),
        "the capture of table public.things",
    ),
    "archive": (
        lambda conn: value(conn, "set_archive", "s", "file:///tmp/a"),
        "the archive of stream s",
    ),
    "table_sink": (
        lambda conn: conn.execute(
            "insert into pgqueue.table_writes (write_no, sink, batch, given, plan, role)"
            " values (7, 'sink', 0, '{}', '{}', 'r')"
        ),
        "the staged rows of write 7",
    ),
    "typed": (
        lambda conn: value(conn, "alter_stream", "s", p_settings='{"schema": "a int"}'),
        "the schema of stream s",
    ),
}


def made_by(*names: str) -> set[str]:
    """The functions, tables and views of features, by the text of their files."""
    made = re.compile(  # a sequence goes with its table
        r"^ *create (?:or replace )?(?!sequence)\w+(?: if not exists)? (_?pgqueue\.\w+)", re.M
    )
    view = re.compile(r"make_view\('(\w+)'")
    found = set[str]()
    for file in schema.sql_files():
        if file.parent.name in names:
            text = file.read_text()
            found |= {*made.findall(text), *(f"pgqueue.{each}" for each in view.findall(text))}
    return found


def objects(conn: Conn) -> set[str]:
    return {row[0] for row in conn.execute(OBJECTS)}


def use_the_queue(conn: Conn) -> None:
    """Sends, claims, retention, maintain() and drops: whatever has hooks of features."""
    value(conn, "create_stream", "q", p_kind="json")
    value(conn, "create_consumer", "q", "c", p_settings='{"keep_history": "1 day"}')
    sent = value(conn, "send", "q", "1")
    assert acked(conn, "q", "c") == [sent]
    value(conn, "set_retention", "q", p_messages=1)
    maintain(conn)
    read = "select count(*) from pgqueue.read('q', pgqueue.start_offset('q', 'earliest'))"
    assert one(conn, read) == 1
    value(conn, "recover")
    value(conn, "drop_consumer", "q", "c")
    value(conn, "drop_stream", "q")
    maintain(conn)


LEFT_OUT = [
    features.FEATURES,
    *(pytest.param((each,), marks=pytest.mark.longer) for each in features.FEATURES),
]


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=" ".join)
def test_a_schema_without_features_has_nothing_of_them(
    empty_url: str, left_out: tuple[str, ...]
) -> None:
    """And the next installation adds them."""
    with connection.connect(empty_url) as conn:
        schema.install(conn, without=left_out)
        assert objects(conn) & made_by(*left_out) == set()
        assert objects(conn) >= made_by(*(set(features.FEATURES) - set(left_out)))
        use_the_queue(conn)
        schema.install(conn)
        assert objects(conn) >= made_by(*features.FEATURES)
        use_the_queue(conn)


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=" ".join)
def test_what_is_not_in_use_is_removed(conn: Conn, left_out: tuple[str, ...]) -> None:
    before = objects(conn)
    schema.install(conn, without=left_out)
    assert before - objects(conn) == made_by(*left_out) & before
    use_the_queue(conn)
    schema.install(conn)
    assert objects(conn) == before


def test_what_is_in_use_stays(conn: Conn) -> None:
    value(conn, "create_stream", "s", p_kind="json")
    for use, _ in USES.values():
        use(conn)
    before = objects(conn)
    for feature in features.FEATURES:
        with pytest.raises(PgQueueError, match=USES[feature][1]) as caught:
            schema.install(conn, without=[feature])
        assert caught.value.sqlstate == "PQ006"
        assert objects(conn) == before


def test_what_is_in_use_stays_though_a_table_is_missing(conn: Conn) -> None:
    """As in an older version, which does not have all tables of the feature."""
    value(conn, "create_stream", "s")
    USES["archive"][0](conn)
    conn.execute("drop table pgqueue.archive_packs cascade")
    with pytest.raises(PgQueueError, match="the archive of stream s"):
        schema.install(conn, without=["archive"])
    assert one(conn, "select count(*) from pgqueue.archives") == 1


def test_hooks_lose_the_lines_of_a_feature_alone() -> None:
    lines = "{0}    -- archive/a.sql\n    1;\n    2;\n    -- queue/send/b.sql\n    3;\n    -- end\n"
    first = "    -- on maintain\n"
    left = "    -- queue/send/b.sql\n    3;\n    -- end\n"
    assert features.hooks_without(lines.format(first), {"archive"}) == first + left
    assert features.hooks_without(lines.format(first), {"typed"}) == lines.format(first)


def test_a_text_in_place_of_names_is_refused(conn: Conn) -> None:
    with pytest.raises(PgQueueError, match="a list of names of features, not the text 'capture'"):
        schema.install(conn, without="capture")


def test_a_name_of_no_feature_is_refused(conn: Conn) -> None:
    with pytest.raises(PgQueueError, match="'archives'") as caught:
        schema.install(conn, without=["archives"])
    assert caught.value.hint == "did you mean archive?"


CORE = [
    "claim", "settle", "leases", "filters", "retention", "reading", "groups", "dead_letters",
    "sink", "actions", "views", "history", "publish", "streams",
]  # fmt: skip


@pytest.mark.longer
@pytest.mark.timeout(1200)
def test_the_tests_of_the_core_pass_without_any_feature() -> None:
    """But for one, which drops a stream that has all features, and for races and costs.

    Those call what others call, and take a quarter of the time. `test_hooks` reads all code.
    """
    tests = [f"tests/sql/test_{name}.py" for name in CORE]
    without = "not (touches_no_other or race or kill or dies or workers or many or cost)"
    options = ["-q", "-n", "2", "-p", "no:cacheprovider", "-k", without]
    env = {**os.environ, "PGQUEUE_TEST_WITHOUT": " ".join(features.FEATURES)}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
