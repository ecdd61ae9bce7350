"""What hooks do for features: no table of theirs keeps anything of what was dropped."""

from __future__ import annotations

from tests.sql.queue import Conn, maintain, one, rows, value

OF = """
select c.relname::text as name,
       array(select a.attname::text from pg_attribute a
             where a.attrelid = c.oid and a.attname in ('stream_id', 'consumer_id')
             order by 1) as ids,
       array(select array[quote_ident(a.attname), format_type(a.atttypid, null)]
             from pg_attribute a
             where a.attrelid = c.oid and a.attnum > 0 and a.attnotnull and not a.atthasdef
               and a.attidentity = '' and a.attname not in ('stream_id', 'consumer_id')) as others
from pg_class c
where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and not c.relispartition
  and c.relname not in ('streams', 'consumers', 'dropped_streams')
  and exists (select from pg_attribute a
              where a.attrelid = c.oid and a.attname in ('stream_id', 'consumer_id'))
order by 1"""
"""The tables that have something of a stream or a consumer, and what a row of theirs needs."""

MADE_UP = {  # by column, or by type
    "state": "'ready'",
    "text": "'t{n}'",
    "text[]": "'{{}}'",
    "integer": "{n}",
    "bigint": "{n}",
    "bigint[]": "'{{}}'",
    "boolean": "false",
    "interval": "'1 day'",
    "int8multirange": "'{{[{n},{n}]}}'",
    "jsonb": "'[]'",
    "regclass": "'pg_class'",
    "timestamp with time zone": "now()",
    "uuid": "gen_random_uuid()",
    "xid8": "pg_current_xact_id()",
}

STAY = {
    "archive_attempts": "files, which an exporter deletes",
    "sink_streams": "by which a query notices that another stream has the name",
}


def left(conn: Conn) -> tuple[set[str], set[str]]:
    """The tables that keep something of a dropped consumer, and of a dropped stream.

    Each has a row of these before, and one of another consumer, and one of another stream, which
    stay.
    """
    streams = [value(conn, "create_stream", name) for name in ("dropped", "other")]
    ids = [
        (stream, value(conn, "create_consumer", name, c))
        for stream, name, c in zip(
            [streams[0], *streams], ["dropped", "dropped", "other"], "abc", strict=True
        )
    ]
    tables = rows(conn, OF)
    for table in tables:
        for n, (stream_id, consumer_id) in enumerate(ids, 1):
            given = {"stream_id": stream_id, "consumer_id": consumer_id}
            given = {name: given[name] for name in table.ids}
            for name, type_ in table.others:
                given[name] = MADE_UP.get(name, MADE_UP[type_]).format(n=n)
            conn.execute(
                f"insert into pgqueue.{table.name} ({', '.join(given)})"
                f" values ({', '.join(map(str, given.values()))}) on conflict do nothing".encode()
            )

    def having(column: str, value: int) -> set[str]:
        query = f"select exists (select from pgqueue.{{}} where {column} = {value})"
        return {t.name for t in tables if column in t.ids and one(conn, query.format(t.name))}

    def all_of(column: str) -> set[str]:
        return {t.name for t in tables if column in t.ids}

    assert all(having("consumer_id", c) == all_of("consumer_id") for _, c in ids)
    assert all(having("stream_id", s) == all_of("stream_id") for s in streams)
    others = having("stream_id", streams[1]), having("consumer_id", ids[2][1])
    value(conn, "drop_consumer", "dropped", "a")
    value(conn, "drop_stream", "dropped")
    assert others == (having("stream_id", streams[1]), having("consumer_id", ids[2][1]))
    maintain(conn)
    dropped = having("consumer_id", ids[0][1]), having("stream_id", streams[0])
    return dropped[0] | having("consumer_id", ids[1][1]), dropped[1]


def test_what_is_dropped_leaves_no_row_in_any_table(conn: Conn) -> None:
    of_consumers, of_streams = left(conn)
    assert of_consumers == set()
    assert of_streams == STAY.keys()


def test_a_feature_that_forgets_what_is_dropped_is_found(conn: Conn) -> None:
    conn.execute("create table pgqueue.forgetful (consumer_id int not null, stream_id int)")
    of_consumers, of_streams = left(conn)
    assert of_consumers == {"forgetful"}
    assert of_streams == {"forgetful", *STAY}
