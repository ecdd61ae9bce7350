"""A publication for all tables (Debezium, an upgrade by logical replication) stops no call."""

from tests.sql import clock, owing
from tests.sql.internals import insert_messages, rows
from tests.sql.queue import Conn, call, claim_of, consumer, receive, send_keys, seqs_of

WITHOUT = """
    select c.relname from pg_class c
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and c.relreplident <> 'f'
      and not (c.relreplident = 'd'
               and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary))
    order by 1
"""


def test_every_table_says_which_row_a_change_is_about(conn: Conn, stream: int) -> None:
    call(conn, "set_retention", "s", p_messages=10)
    while call(conn, "maintain")[-1].deleted:
        pass
    assert rows(conn, WITHOUT) == []


def test_a_publication_for_all_tables_stops_no_call(conn: Conn, url: str) -> None:
    conn.execute("set client_min_messages = error")  # a server that does not replicate says so
    conn.execute("create publication everything for all tables")
    owing.use(conn, url, insert_messages)
    consumer(conn, "limited", per_key_interval="1 s", per_key_capacity=5, keep_history="1 us")
    send_keys(conn, "a", "a", "b")
    received = receive(conn, 10, "limited")
    assert call(conn, "ack", claim_of(received), seqs_of(received)[:1])
    clock.end_leases(conn)
    receive(conn, 10, "limited")
    call(conn, "maintain")
    for name in ["limited", "key", "stream", "none"]:
        call(conn, "seek", "s", name, "latest")
    call(conn, "drop_stream", "s")
