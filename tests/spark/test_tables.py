"""`spark.read`: every table says what SQL says, in any number of partitions; nothing changes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.datasource import PgQueueDataSource
from spark_pgqueue.spark.options.table import CONSUMER_OF
from spark_pgqueue.spark.table_source.reader import PgQueueTableReader
from spark_pgqueue.spark.table_source.tables import HELD, TABLES
from tests.spark.conftest import Queue
from tests.spark.tables import Look, look
from tests.sql import owing
from tests.sql.queue import Conn, acked, call, claim_of, maintain, value
from tests.sql.test_bad_input import content

NASTY = ["", "o'clock", "back\\slash", "'; drop table x; --", "§ü€😀", "%_", "line\nbreak", "k"]


def asked(conn: Conn, query: str, *args: Any) -> list[dict[str, Any]]:
    return conn.cursor(row_factory=dict_row).execute(query.encode(), args or None).fetchall()


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    def plain(value: Any) -> Any:
        return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value

    def all_of(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(repr(sorted((name, plain(row[name])) for name in row)) for row in rows)

    assert all_of(found) == all_of(expected)
    return bool(expected)


@pytest.fixture
def used(conn: Conn, url: str) -> owing.Known:
    """A database in use, with every state in it, history and dead letters."""
    return owing.use_with_history(conn, url)


MESSAGE = "m.key, m.data, m.headers, m.inserted_at"


def test_tables_say_what_the_views_say(conn: Conn, url: str, used: owing.Known) -> None:
    for more in ({}, {"maxRecordsPerPartition": 3}):
        check_tables(conn, url, used, more)


def check_tables(conn: Conn, url: str, used: owing.Known, more: dict[str, int]) -> None:
    of = f"join pgqueue.messages_{used.stream} m using (seq)"
    published = f"select seq, {MESSAGE}, priority from pgqueue.peek_at('s', 1, 1000) m"
    assert same(look(url, "messages", **more), asked(conn, published))
    states = (
        f"select consumer, x.seq, {MESSAGE}, state, priority, deliver_count, not_visible_until,"
        " x.lease_until, last_error as error, c.owner from pgqueue.message_states x"
        f" {of} left join pgqueue.open_claims c using (stream, consumer, claim_id)"
        " where state <> 'dead' and consumer = %s"
    )
    seen = set()
    for name in (*used.consumers, "keeper", "moved"):
        pending = look(url, "pending", consumer=name, **more)
        assert same(pending, asked(conn, states, name)), name
        seen |= {row["state"] for row in pending}
    assert seen == {"new", "ready", "delayed", "waiting", "claimed"}
    claimed = (
        f"select x.consumer, x.seq, {MESSAGE}, claim_id, owner, claimed_at, c.lease_until,"
        " priority, deliver_count, last_error as error from pgqueue.message_states x"
        f" {of} join pgqueue.open_claims c using (claim_id) where state = 'claimed'"
    )
    assert same(look(url, "claimed", **more), asked(conn, claimed))
    dead = (
        "select c.consumer, d.seq, key, data, headers, reason, error, details::text, priority,"
        " deliver_count, owner, died_at, inserted_at from pgqueue.consumer_settings c"
        " cross join lateral pgqueue.read_dead('s', c.consumer) d where c.stream = 's'"
    )
    assert same(look(url, "dead", **more), asked(conn, dead))
    some = look(url, "dead", consumer="keeper", columns="seq,reason,details,consumer", **more)
    assert some == [
        {"seq": 3, "reason": "bad", "details": '{"field": "total"}', "consumer": "keeper"}
    ]
    history = (
        f"select h.consumer, m.seq, {MESSAGE}, result::text, deliver_count, owner, claimed_at,"
        f" done_at from pgqueue.message_history h join pgqueue.messages_{used.stream} m"
        " on h.seqs @> m.seq"
    )
    assert same(look(url, "archived", **more), asked(conn, history))
    publications = (
        "select publication_id, part, published_at, deliver_at, expires_at, priority,"
        " message_count, lower(seqs) as first_seq, upper(seqs) - 1 as last_seq,"
        " array(select name from pgqueue.consumers where consumer_id = any (consumers))"
        " as consumers"
        f" from pgqueue.publications where stream_id = {used.stream}"
    )
    expected = [row | {"consumers": row["consumers"] or None} for row in asked(conn, publications)]
    assert same(look(url, "publications", **more), expected)
    stats = "select * from pgqueue.consumer_stats"
    assert same(look(url, "stats", stream=None), asked(conn, stats))
    assert same(
        look(url, "stats", consumer="key"), [asked(conn, stats + " where consumer = 'key'")[0]]
    )
    assert look(url, "stats", stream="j") == []


def test_partitions_are_as_many_and_as_large_as_options_say(
    conn: Conn, url: str, used: owing.Known
) -> None:
    for table, more in {
        "messages": {},
        "pending": {"consumer": "untouched"},
        "claimed": {},
        "dead": {},
        "archived": {},
        "publications": {},
    }.items():
        whole = look(url, table, **more)
        for options in (
            {"minPartitions": 3},
            {"maxRecordsPerPartition": 2},
            {"maxRecordsPerPartition": 1, "maxConnections": 2},
        ):
            found = Look(url, table=table, stream="s", **options, **more)
            sizes = [sum(batch.num_rows for batch in some) for some in found.batches()]
            assert sum(sizes) == len(whole) > 0, table
            if "minPartitions" in options:
                assert len(sizes) >= min(3, len(whole)), table
            elif "maxConnections" in options:
                assert len(sizes) == min(2, len(whole)), table
            else:
                assert max(sizes) <= 2, table
        assert len(Look(url, table=table, stream="s", **more).parts) == 1, table


def test_what_was_planned_is_read_whatever_happens_meanwhile(
    conn: Conn, url: str, used: owing.Known
) -> None:
    planned = [
        Look(url, stream="s", minPartitions=3, **more)
        for more in (
            {"table": "messages"},
            {"table": "pending", "consumer": "none"},
            {"table": "claimed", "consumer": "none"},
        )
    ]
    before = [each.rows() for each in planned]
    for claim in used.claims["none"]:
        value(conn, "ack", claim)
    acked(conn, "s", "none")
    value(conn, "send", "s", "later")
    assert [each.rows() for each in planned] == before
    assert all(before)
    assert len(look(url, "messages")) == len(before[0]) + 1
    assert len(look(url, "pending", consumer="none")) < len(before[1])


def test_looking_changes_nothing_and_needs_no_right_to(
    conn: Conn, url: str, used: owing.Known
) -> None:
    """... in the whole database, and in sessions that may not write."""
    reading = make_conninfo(url, options="-c default_transaction_read_only=on")
    before = content(conn)
    for table, rule in CONSUMER_OF.items():
        more = {"consumer": "keeper"} if rule != "refused" else {}
        assert look(reading, table, **more) or table == "claimed"
    assert content(conn) == before


@pytest.fixture
def members(new_role: Callable[..., str]) -> dict[str, str]:
    """The urls of a role that may look, of one that may receive, and of one that may do both."""
    groups = {"observer": ["observer"], "consumer": ["consumer"], "both": ["observer", "consumer"]}
    return {name: new_role(*each) for name, each in groups.items()}


def test_who_may_look_needs_more_only_for_what_messages_hold(
    conn: Conn, url: str, used: owing.Known, members: dict[str, str]
) -> None:
    for table, rule in CONSUMER_OF.items():
        more = {"consumer": "key"} if rule == "required" else {}
        names = [each for each in TABLES[table].columns if each not in HELD]
        columns = ",".join(names)
        assert look(members["observer"], table, columns=columns, **more), table
        assert look(members["both"], table, **more), table
        if table in ("publications", "stats"):
            continue
        with pytest.raises(PgQueueError, match="may not read what messages of stream s hold") as no:
            look(members["observer"], table, **more)
        assert "pgqueue grant consumer ROLE" in str(no.value)
        assert "key, data, headers, inserted_at" in str(no.value)
    for table in ("claimed", "stats"):  # the ids of others' claims, and the views
        with pytest.raises(PgQueueError, match="permission denied"):
            look(members["consumer"], table)
    assert look(members["consumer"], "pending", consumer="key")


def test_what_was_deleted_is_missed_where_it_was_promised(
    conn: Conn, url: str, used: owing.Known, caplog: pytest.LogCaptureFixture
) -> None:
    messages = Look(url, table="messages", stream="s")
    lenient = Look(url, table="messages", stream="s", failOnDataLoss="false")
    (dead,) = look(url, "dead", consumer="keeper")
    before = look(url, "archived", consumer="keeper")
    conn.execute(f"delete from pgqueue.messages_{used.stream} where seq <= 3".encode())
    with pytest.raises(PgQueueError, match="3 messages of stream s were deleted") as lost:
        messages.rows()
    assert "failOnDataLoss" in str(lost.value)
    assert min(row["seq"] for row in lenient.rows()) == 4
    assert "3 messages of stream s were deleted" in caplog.text
    held = dict.fromkeys(("key", "data", "headers", "inserted_at"))
    assert look(url, "dead", consumer="keeper") == [dead | held]
    after = look(url, "archived", consumer="keeper")
    assert same(after, [row | held if row["seq"] <= 3 else row for row in before])
    planned = [Look(url, table=table, stream="s") for table in ("messages", "claimed")]
    planned.append(Look(url, table="dead", stream="s", consumer="keeper"))
    kept = Look(url, table="messages", stream="s", where="key = 'k'", failOnDataLoss="false")
    assert {row["key"] for row in kept.rows()} == {"k"}
    value(conn, "drop_stream", "s")
    call(conn, "maintain")
    for each in planned:
        with pytest.raises(PgQueueError, match=r"the stream was dropped|unknown stream 's'"):
            each.rows()


def test_what_is_deleted_while_it_is_read_comes_once(conn: Conn, url: str) -> None:
    """Of what outlives its messages: with what they held, or without, and not both."""
    value(conn, "create_stream", "s")
    value(conn, "send_batch", "s", ["1", "2", "3"])
    for name in ("c", "d"):
        value(conn, "create_consumer", "s", name, "earliest")
        value(conn, "dead_letter", claim_of(call(conn, "receive", "s", name, 3)))
    conn.execute("delete from pgqueue.messages where seq = 1")
    source = PgQueueDataSource({"url": url, "table": "dead", "stream": "s"})
    reader: Any = source.reader(source.schema())
    (part,) = reader.partitions()
    batches = iter(reader.read(part))
    found = next(batches).to_pylist()
    conn.execute("delete from pgqueue.messages where seq = 2")
    found += [row for batch in batches for row in batch.to_pylist()]
    held = sorted((row["seq"], row["data"]) for row in found)
    assert held == sorted([(1, None), (2, "2"), (3, "3")] * 2)


def test_a_connection_that_breaks_loses_nothing_and_repeats_nothing(
    conn: Conn, url: str, used: owing.Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a partition, between any two of its messages."""
    monkeypatch.setattr("spark_pgqueue.spark.executor.reading.RANGES_PER_STATEMENT", 2)
    monkeypatch.setattr("spark_pgqueue.postgres.payloads.BATCH_BYTES", 1)  # a message
    original, calls = PgQueueTableReader._made, [0]

    def breaking(self: Any, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise OSError("[libpq] connection lost")
        return original(self, *given)

    looks = [
        {"table": table, "consumer": "keeper", "where": where}
        for table in ("pending", "dead", "archived")
        for where in (None, "seq <> 2 and data is not null")
    ]
    expected = [look(url, **each) for each in looks]
    monkeypatch.setattr(PgQueueTableReader, "_made", breaking)
    for each, rows in zip(looks, expected, strict=True):
        assert same(look(url, **each), rows), each
    assert calls[0] > 100


@pytest.fixture
def filtered(conn: Conn, url: str) -> str:
    """Messages with keys of all kinds, sent at several times, some of them dead."""
    value(conn, "create_stream", "s")
    for name in ("c", "o'c"):
        value(conn, "create_consumer", "s", name, "earliest")
    for n, key in enumerate([*NASTY, None], 1):
        data = "5" if key else "x"
        value(conn, "send", "s", data, key, p_headers=Jsonb({"of": str(n)}))
        claim = claim_of(call(conn, "receive", "s", "c"))
        value(conn, "dead_letter", claim, p_reason=f"reason {key}")
    call(conn, "receive", "s", "o'c", 3)
    return url


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


CONDITIONS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    *((f"key = {quoted(key)}", lambda row, key=key: row["key"] == key) for key in NASTY),
    ("key is null", lambda row: row["key"] is None),
    ("key ~ '^[bk]' or seq = 1", lambda row: row["seq"] in (1, 3, 8)),
    ("seq > 3 and seq <= 5", lambda row: 3 < row["seq"] <= 5),
    ("seq % 2 = 0", lambda row: row["seq"] % 2 == 0),
    ("seq < 0", lambda row: False),
    ("consumer = 'c'", lambda row: row["consumer"] == "c"),
    ("consumer = 'nobody' and key = 'k'", lambda row: False),
    ("reason like '%o''clock'", lambda row: row["reason"].endswith("o'clock")),
    ("reason = concat('reason ', key)", lambda row: row["key"] is not None),
    ("died_at >= inserted_at and died_at < now() + interval '1 day'", lambda row: True),
    ("inserted_at > now() or deliver_count > 1", lambda row: False),
    (
        "headers ->> 'of' = '3' or case when key <> '' then data::jsonb = '5' end",
        lambda row: row["data"] == "5",
    ),
    ("details is null and owner is not null", lambda row: True),
]  # fmt: skip


@pytest.mark.promise("tables: Allowed conditions")
def test_where_keeps_the_rows_for_which_it_is_true(conn: Conn, filtered: str) -> None:
    """... in any number of partitions, with the wanted columns alone."""
    whole = look(filtered, "dead")
    for where, holds in CONDITIONS:
        expected = [row for row in whole if holds(row)]
        for more in ({}, {"maxRecordsPerPartition": 2}):
            found = look(filtered, "dead", where=where, **more)
            assert same(found, expected) == bool(expected), where
        found = look(filtered, "dead", where=where, columns="died_at,seq")
        assert same(
            found, [{name: row[name] for name in ("died_at", "seq")} for row in expected]
        ) == bool(expected), where


def test_where_of_every_table(conn: Conn, url: str, used: owing.Known) -> None:
    """... with every column that it has, and one that the query does not want."""
    numbers = {"publications": "publication_id", "stats": "taken"}
    for table, rule in CONSUMER_OF.items():
        more = {"consumer": "untouched"} if rule == "required" else {}
        names = list(TABLES[table].columns)
        number = numbers.get(table, "seq")
        whole = look(url, table, columns=",".join(names), **more)
        for some in (whole[0], whole[-1]):
            nulls = [f"{name} is {'' if some[name] is None else 'not '}null" for name in names]
            expected = [
                {number: row[number]}
                for row in whole
                if all((row[name] is None) == (some[name] is None) for name in names)
            ]
            for size in ({}, {"maxRecordsPerPartition": 3}):
                where = " and ".join(nulls)
                assert same(look(url, table, where=where, columns=number, **more, **size), expected)


def test_where_reads_bytes_and_lists(conn: Conn, url: str) -> None:
    value(conn, "create_stream", "b", "binary")
    value(conn, "create_consumer", "b", "c", "earliest")
    for data in (b"\x00\xff", b"\x01"):
        value(conn, "send", "b", None, p_data_bytes=data, p_consumers=["c"])
        value(conn, "send", "b", None, p_data_bytes=data)
    found = look(url, "messages", stream="b", where="data = '\\x00ff' and consumers = '{c}'")
    assert [(row["seq"], row["data"]) for row in found] == [(1, b"\x00\xff")]
    found = look(url, "messages", stream="b", columns="seq", where="length(data) = 1 and seq > 1")
    assert [row["seq"] for row in found] == [3, 4]


def test_where_needs_no_more_rights_than_its_columns(
    conn: Conn, url: str, used: owing.Known, members: dict[str, str]
) -> None:
    """It asks as the role that reads, in the tables that this role may read."""
    observer = members["observer"]
    for where in ("seq > 0", "reason is null or seq > 0"):
        assert look(observer, "dead", columns="seq,consumer", where=where), where
    with pytest.raises(PgQueueError, match="may not read what messages of stream s hold: key"):
        look(observer, "dead", columns="seq", where="key is null")


def test_where_finds_what_outlives_its_messages_and_misses_what_does_not(
    conn: Conn, url: str, used: owing.Known
) -> None:
    messages = Look(url, table="messages", stream="s", where="key is null or key is not null")
    numbers = Look(url, table="messages", stream="s", columns="seq", where="seq > 0")
    before = [row["seq"] for row in numbers.rows()]
    conn.execute(f"delete from pgqueue.messages_{used.stream} where seq <= 3".encode())
    with pytest.raises(PgQueueError, match="3 messages of stream s were deleted"):
        messages.rows()
    assert [row["seq"] for row in numbers.rows()] == before, "it reads no messages"
    for where in ("seq = 3", "key is null and seq = 3", "seq = 3 and reason = 'bad'"):
        (dead,) = look(url, "dead", consumer="keeper", where=where)
        assert (dead["seq"], dead["data"], dead["reason"]) == (3, None, "bad"), where
    assert look(url, "dead", consumer="keeper", where="seq = 3 and key is not null") == []


def test_where_is_refused_before_anything_is_read(conn: Conn, filtered: str) -> None:
    for where, says in (
        ("raeson = 'x'", "option where must name columns of the table, which has no column raeson"),
        ("true) or (true", "option where must be one expression over columns"),
        ("seq in (select 1)", "no column select"),
        ("", "option where is ''"),
    ):
        with pytest.raises(PgQueueError, match=re.escape(says)):
            Look(filtered, table="dead", stream="s", where=where).rows()
    for where, says in (  # each is a comparison of columns, and it is for Postgres to say
        ("seq + 1", "must be type boolean"),
        ("key > 5", "operator does not exist: text > integer"),
        ("seq > 'x'", "invalid input syntax for type bigint"),
        ("key = = 'x'", "syntax error"),
        ("key key", "syntax error"),
        ("lower(key, key) is null", "function lower(text, text) does not exist"),
    ):
        with pytest.raises(PgQueueError, match=re.escape(says)) as error:
            Look(filtered, table="dead", stream="s", where=where)
        assert f"option where is {where!r}" in str(error.value)


def test_where_that_fails_for_a_row_says_so(conn: Conn, filtered: str) -> None:
    look_at = Look(filtered, table="dead", stream="s", where="data::jsonb is not null and seq > 3")
    with pytest.raises(PgQueueError, match="invalid input syntax for type json") as error:
        look_at.rows()
    assert "option where" in str(error.value)


BAD_INPUT = [
    ({"table": "ded", "stream": "s"}, "option table is 'ded', but must be messages, pending"),
    ({"table": "dead"}, "option stream is missing"),
    ({"table": "stats", "consumer": "c"}, "option stream is missing"),
    ({"table": "pending", "stream": "s"}, "option consumer is missing: table pending"),
    ({"table": "messages", "stream": "s", "consumer": "c"}, "option consumer is given, but"),
    ({"table": "publications", "stream": "s", "consumer": "c"}, 'option("table", "pending")'),
    ({"table": "dead", "stream": "no"}, "unknown stream 'no'"),
    ({"table": "dead", "stream": "s", "consumer": "no"}, "unknown consumer 'no'"),
    ({"table": "dead", "stream": "s", "columns": "seq,raeson"}, "did you mean reason"),
    ({"table": "dead", "stream": "s", "columns": "xyz"}, "available: consumer, seq, key"),
    ({"table": "dead", "stream": "s", "columns": "seq,seq"}, "column seq occurs twice"),
    ({"table": "dead", "stream": "s", "columns": ""}, "option columns is ''"),
    ({"table": "dead", "stream": "s", "minPartitions": "0"}, "at least 1"),
    (
        {"table": "dead", "stream": "s", "minPartitions": "3", "maxConnections": "2"},
        "option minPartitions is 3, and maxConnections 2",
    ),
    ({"table": "dead", "stream": "s", "pushdown": "true"}, "has no option pushdown"),
    ({"table": "dead", "stream": "s", "waitTime": "1s"}, "option waitTime is for reading a stream"),
    (
        {"table": "dead", "stream": "s", "startingOffsets": "earliest"},
        "remove startingOffsets, or omit table to read the stream",
    ),
    ({"table": "dead", "stream": "s", "colums": "seq"}, "did you mean columns"),
    ({"stream": "s", "consumer": "c", "columns": "seq"}, r"it goes with table"),
    (
        {"stream": "s", "consumer": "c", "maxMessagesPerTrigger": "5"},
        "maxMessagesPerTrigger has no",
    ),
    ({"stream": "s", "consumer": "c", "createConsumer": "true"}, "no meaning for spark.read"),
]


def test_bad_input_is_refused_by_name(conn: Conn, filtered: str) -> None:
    for given, says in BAD_INPUT:
        with pytest.raises(PgQueueError, match=re.escape(says)):
            Look(filtered, **given)


def test_a_schema_cannot_be_chosen_and_a_table_is_not_streamed(conn: Conn, filtered: str) -> None:
    source = PgQueueDataSource({"url": filtered, "table": "dead", "stream": "s"})
    with pytest.raises(PgQueueError, match="the schema of a table cannot be chosen"):
        source.reader(StructType().add("seq", "long").add("why", "string"))
    with pytest.raises(PgQueueError, match="has no option table") as error:
        source.streamReader(source.schema()).initialOffset()
    assert "spark.read" in str(error.value)


def test_a_consumer_without_a_table_is_read_as_what_it_has_pending(
    conn: Conn, filtered: str, caplog: pytest.LogCaptureFixture
) -> None:
    """... with the columns of readStream, and it says that it claims nothing."""
    with caplog.at_level(logging.WARNING):
        found = Look(filtered, stream="s", consumer="o'c")
    assert "claims nothing" in caplog.text
    assert (
        found.schema.names
        == PgQueueDataSource({"url": filtered, "stream": "s", "consumer": "o'c"}).schema().names
    )
    assert [row["seq"] for row in found.rows()] == list(range(1, len(NASTY) + 2))
    bare = Look(filtered, stream="s", consumer="o'c", includeHeaders="false")
    assert "headers" not in bare.schema.names
    assert "headers" not in bare.rows()[0]


def test_a_binary_stream_has_bytes_and_other_columns_when_asked_for(conn: Conn, url: str) -> None:
    value(conn, "create_stream", "b", "binary")
    value(conn, "create_consumer", "b", "c", "earliest")
    due = datetime(2100, 1, 1, tzinfo=UTC)
    for more in ({"p_consumers": ["c"], "p_deliver_at": due}, {"p_headers": Jsonb({"a": "1"})}):
        value(conn, "send", "b", None, p_data_bytes=b"\x00\xff", **more)
    columns = "data,consumers,deliver_at,published_at,headers"
    rows = look(url, "messages", stream="b", columns=columns)
    assert [row["data"] for row in rows] == [b"\x00\xff"] * 2
    assert [row["consumers"] for row in rows] == [["c"], None]
    assert [row["deliver_at"] for row in rows] == [due, None]
    assert [row["headers"] for row in rows] == [None, {"a": "1"}]
    assert all(row["published_at"] > due - timedelta(days=40_000) for row in rows)


def test_retention_leaves_what_is_kept(conn: Conn, url: str) -> None:
    value(conn, "create_stream", "s")
    for i in range(6):
        value(conn, "send", "s", str(i))
        conn.execute("select pgqueue.set_retention('s', p_messages => 2)")
        maintain(conn)
    kept = look(url, "messages")
    assert [row["seq"] for row in kept] == [row["first_seq"] for row in look(url, "publications")]
    assert [row["data"] for row in kept][-2:] == ["4", "5"]
    assert len(kept) < 6


@pytest.mark.spark
@pytest.mark.promise("tables: Conditions side by side")
def test_spark_reads_and_filters(queue: Queue) -> None:
    """Through Spark: types, times far away, actions anew, conditions side by side."""
    queue.create("s", "c")
    queue.send("s", 1, 100, deliver_at=None)
    (claim,) = {row[0] for row in queue.sql("select claim_id from pgqueue.receive('s', 'c', 100)")}
    queue.sql("select pgqueue.dead_letter(%s, '{3,5}', 'bad', '{\"at\": 1}')", claim)
    far = "20000-01-01"
    queue.sql("select pgqueue.send('s', 'far', p_deliver_at => %s::timestamptz)", far)

    def load(**options: str) -> DataFrame:
        reader = queue.spark.read.format("pgqueue").option("url", queue.url).option("stream", "s")
        return reader.options(**options).load()

    three, five = (load(table="dead", where=f"seq = {seq}") for seq in (3, 5))
    (row,) = five.where("key = 'k5' and reason = 'bad'").collect()
    assert (row.seq, row.data, row.details, row.deliver_count) == (5, "5", '{"at": 1}', 1)
    # Each load() has its own condition, whatever else the query reads.
    whole = load(table="dead")
    both = three.union(five).union(whole).groupBy("seq").count()
    assert sorted(map(tuple, both.collect())) == [(3, 2), (5, 2)]
    joined = whole.alias("w").join(five.alias("f"), F.expr("w.reason = f.reason"))
    assert sorted(row[0] for row in joined.select("w.seq").collect()) == [3, 5]
    assert [whole.count(), three.count(), five.count()] == [2, 1, 1]
    pending = load(table="pending", consumer="c")
    found = pending.groupBy("state").agg({"*": "count", "not_visible_until": "max"}).collect()
    assert {(row[0], row[1], row[2] and row[2].year) for row in found} == {
        ("claimed", 98, None),
        ("new", 1, 9999),
    }
    queue.sql("select pgqueue.ack(%s)", claim)
    assert pending.count() == 99, "a DataFrame shows what it has shown before"
    assert load(table="pending", consumer="c").count() == 1


@pytest.mark.longer
@pytest.mark.promise("tables: A frame in a streaming query")
def test_a_micro_batch_does_not_read_what_was_planned_for_another(queue: Queue, fails):
    """Spark keeps the plan of a load(): what came later would be missing without a word."""
    queue.create("in", "c", "d")
    queue.create("known")
    queue.send("in", 1, 2)

    def known() -> DataFrame:
        reader = queue.spark.read.format("pgqueue").option("url", queue.url)
        return reader.option("stream", "known").load().withColumnRenamed("data", "known")

    def one_by_one(consumer: str) -> DataFrame:
        return queue.load("in", consumer, maxMessagesPerTrigger="1").select("data")

    joined = one_by_one("c").join(known(), F.expr("data = known"))
    told = fails(queue.collect(joined, "outer"))
    assert "this micro-batch would read stream known as it was planned for" in told
    assert "call load() inside of foreachBatch" in told

    counts: list[int] = []

    def join(batch: DataFrame, batch_id: int) -> None:
        queue.send("known", batch_id + 1, batch_id + 1)
        counts.append(batch.join(known(), F.expr("data = known")).count())

    queue.collect(one_by_one("d"), "inner", each=join).awaitTermination()
    assert counts == [1, 1]
