"""A look into the queue's tables, and states that take too long to reach through its functions.

What the views `message_states` and `consumer_stats` say is asked there (`queue.states`, `stats`),
and what consumers hold in `core`. With these, `clock` and `checker`, this is the only file that
names columns of internal tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from tests.sql.core import bits_in_ids as bits_in_ids
from tests.sql.core import bundles as bundles
from tests.sql.core import claims as claims
from tests.sql.core import held_by as held_by
from tests.sql.core import last_claim as last_claim
from tests.sql.core import lock_claim as lock_claim
from tests.sql.core import lock_messages as lock_messages
from tests.sql.core import name_as_member as name_as_member
from tests.sql.core import pass_numbers as pass_numbers
from tests.sql.core import rows as rows


def messages_published(conn: psycopg.Connection, stream_id: int) -> set[int]:
    """The numbers of the messages of all publications of a stream that are there."""
    found = rows(conn, "select seqs from pgqueue.publications where stream_id = %s", stream_id)
    return {n for row in found for r in row.seqs for n in range(r.lower, r.upper)}


def segments(conn: psycopg.Connection, stream: str, since: int) -> tuple[list[str], list[str]]:
    """The tables of a stream, of numbers as data: with messages from `since` on, and the others."""
    names = rows(
        conn,
        "select t.name::text from pgqueue.streams s, _pgqueue.message_tables(s.stream_id) t"
        " where s.name = %s order by 1",
        stream,
    )
    found: tuple[list[str], list[str]] = [], []
    for (name,) in names:
        ((some,),) = rows(conn, f"select exists (select from {name} where data::int >= {since})")
        found[not some].append(name)
    return found


def skipped(conn: psycopg.Connection, consumer_id: int) -> set[int]:
    """The messages that retention ever took from a consumer before it was done with them."""
    found = rows(conn, "select seqs from pgqueue.skips where consumer_id = %s", consumer_id)
    return {n for row in found for r in row.seqs for n in range(r.lower, r.upper)}


def expired(conn: psycopg.Connection, consumer_id: int) -> set[int]:
    """The messages that a consumer gave up because they had expired."""
    found = rows(
        conn,
        "select seqs from pgqueue.dead_messages where consumer_id = %s and reason = 'expired'",
        consumer_id,
    )
    return {n for row in found for r in row.seqs for n in range(r.lower, r.upper)}


def file_of_payloads(conn: psycopg.Connection, stream: str) -> str:
    """Where a stream without segments has its long payloads, below the data directory."""
    [[path]] = rows(
        conn,
        "select pg_relation_filepath(c.reltoastrelid) from pgqueue.streams s,"
        " _pgqueue.message_tables(s.stream_id) t, pg_class c where s.name = %s and c.oid = t.name",
        stream,
    )
    return path


def tables(conn: psycopg.Connection) -> list[str]:
    """The names of all tables of the schema, without those of single streams."""
    query = (
        "select relname from pg_class where relnamespace = 'pgqueue'::regnamespace"
        " and relkind in ('r', 'p') and not relispartition order by 1"
    )
    return [row.relname for row in rows(conn, query)]


def vacuum(conn: psycopg.Connection) -> None:
    """Vacuum and analyze all tables of the schema."""
    names = ", ".join(f"pgqueue.{table}" for table in tables(conn))
    conn.execute(f"vacuum (analyze) {names}".encode())


def count(conn: psycopg.Connection, table: str) -> int:
    """How many rows there are of a table."""
    return rows(conn, f"select count(*) from pgqueue.{table}")[0][0]


def index_of(conn: psycopg.Connection, table: str) -> str:
    """The name of an index of a table that is no constraint."""
    (row,) = rows(
        conn,
        "select min(indexrelid::regclass::text) as name from pg_index where not indisunique"
        " and indrelid = %s::regclass",
        f"pgqueue.{table}",
    )
    return row.name


def dead_letters(conn: psycopg.Connection) -> list[Any]:
    """The dead letters, oldest first, one per run that died."""
    return rows(
        conn,
        "select message_count, priority, deliver_count, reason, details, claim_id, note, owner"
        " from pgqueue.dead_messages order by dead_id",
    )


def sent_earlier(conn: psycopg.Connection, stream: int, seq: int, by: Any) -> None:
    """As if a message had been sent earlier."""
    conn.execute(
        f"update pgqueue.messages_{stream} set inserted_at = inserted_at - %s"
        " where seq = %s".encode(),
        [by, seq],
    )


def forget_claimers(conn: psycopg.Connection, consumer_id: int) -> None:
    """As if nobody had claimed for an hour."""
    conn.execute(
        "update pgqueue.consumer_cursors set hints.probe_at = (hints).probe_at - interval '1 hour'"
        " where consumer_id = %s",
        [consumer_id],
    )


def readers(conn: psycopg.Connection) -> list[Any]:
    """What is known of Spark's readers: claims that are not acknowledged, and messages lost."""
    return rows(
        conn,
        "select (select count(*) from pgqueue.reader_claims c"
        " where c.reader = r.reader and c.claim_id > r.acked_claim) as claims_ahead, lost"
        " from pgqueue.readers r",
    )


def forget_readers(conn: psycopg.Connection) -> None:
    """Spark's readers are unknown, as in a database that was restored to before their time."""
    conn.execute("delete from pgqueue.readers")


# What is published


def publications(conn: psycopg.Connection) -> list[Any]:
    """The parts of all publications, by priority and time: their size, and for when they are."""
    return rows(
        conn,
        "select message_count, priority, deliver_at::text from pgqueue.publications p"
        " order by priority, p.deliver_at",
    )


def published(conn: psycopg.Connection) -> set[int]:
    """The numbers of all messages that are published."""
    found = rows(
        conn,
        "select s from pgqueue.publications p, unnest(p.seqs) g,"
        " generate_series(lower(g), upper(g) - 1) s",
    )
    return {row.s for row in found}


def data_published(conn: psycopg.Connection, stream: str) -> list[str]:
    """The data of every published message as text, sorted; one published twice is there twice."""
    found = rows(
        conn,
        "select convert_from(coalesce(data_bytes, convert_to(data, 'utf8')), 'utf8') as data"
        " from pgqueue.streams s join pgqueue.publications p using (stream_id)"
        " cross join lateral unnest(p.seqs) g join pgqueue.messages m"
        " on m.stream_id = s.stream_id and m.seq >= lower(g) and m.seq < upper(g)"
        " where s.name = %s",
        stream,
    )
    return sorted(row.data for row in found)


def set_published_at(conn: psycopg.Connection, seconds: list[int]) -> None:
    """The first publications noted these seconds of midnight, on the first day of 2001 (UTC)."""
    for publication_id, second in enumerate(seconds, 1):
        conn.execute(
            "update pgqueue.publications set published_at = '2001-01-01 00:00+00'::timestamptz"
            " + make_interval(secs => %s) where publication_id = %s",
            [second, publication_id],
        )


def ranges_trimmed(conn: psycopg.Connection) -> int:
    """In how many ranges it is noted which publications were trimmed."""
    return rows(conn, "select count(*)::int as n from pgqueue.trims t, unnest(t.publication_ids)")[
        0
    ].n


def staged_chunks(conn: psycopg.Connection) -> list[int]:
    """The ids of what is staged and not published."""
    found = rows(conn, "select staged_id from pgqueue.staged_chunks order by staged_id")
    return [row.staged_id for row in found]


def sink_batches(conn: psycopg.Connection) -> list[str]:
    """The sinks of the batches that are remembered, sorted."""
    return [row.sink for row in rows(conn, "select sink from pgqueue.sink_batches order by sink")]


def insert_messages(
    conn: psycopg.Connection, stream: int, n: int, key: str = "null", data: str = "x"
) -> list[int]:
    """Write messages that nobody sees yet, as a task of Spark's sink does; returns the numbers.

    Args:
        conn: in a transaction, or the numbers belong to messages that are never staged.
        stream: the id of a text stream.
        n: how many.
        key: an SQL expression over i, which counts from 1.
        data: of each message.
    """
    insert = INSERT_RESERVED.format(stream=stream, n=n, key=key, data=data)
    found = rows(conn, f"{insert} select seq from m")
    return [row.seq for row in found]


# Messages with reserved numbers; key is an expression over i, which counts from 1.
INSERT_RESERVED = """
with r as materialized (select pgqueue.reserve({stream}, {n}) as seqs),
n as materialized (select seq, row_number() over (order by seq) as i
      from r, unnest(seqs) g, generate_series(lower(g), upper(g) - 1) seq),
w as (insert into pgqueue.written (seq, stream_id, key, data)
      select seq, {stream}, {key}, '{data}' from n order by seq),
m as (select seq from n order by seq)
"""


# The cursor, and gaps in what was taken


@dataclass
class Cursor:
    """Which publications a consumer has taken, as multiranges of their ids.

    Attributes:
        taken: taken, or known to be dead.
        gaps: not visible when it looked, and watched since.
        rows: how many rows the gaps are stored in.
    """

    taken: Multirange[int]
    gaps: Multirange[int]
    rows: int


def cursor_of(conn: psycopg.Connection, consumer: str = "c") -> Cursor:
    """The cursor of the one consumer of this name."""
    (row,) = rows(
        conn,
        "select int8multirange(int8range(1, next_publication)) - g.ids as taken, g.ids as gaps,"
        " cardinality(k.gaps) as rows"
        " from pgqueue.consumer_cursors k join pgqueue.consumers using (consumer_id)"
        " cross join lateral (select coalesce(range_agg(publication_ids), '{}') as ids"
        " from pgqueue.consumer_gaps x where x.consumer_id = k.consumer_id) g where name = %s",
        consumer,
    )
    return Cursor(row.taken, row.gaps, row.rows)


def ids(first: int, last: int) -> Multirange[int]:
    """The ids from first to last, as `Cursor` has them."""
    return Multirange([Range(first, last + 1)])


def leave_gap(conn: psycopg.Connection, first: int, last: int) -> None:
    """The only consumer takes back that it has taken these publications."""
    conn.execute(
        "with gap as (insert into pgqueue.consumer_gaps (consumer_id, gap_no, publication_ids,"
        " range_count, publishers, look) select consumer_id, nextval('pgqueue.gap_numbers'),"
        " int8multirange(int8range(%s, %s, '[]')), 1, '{}', true from pgqueue.consumers"
        " returning gap_no)"
        " update pgqueue.consumer_cursors set gaps = gaps || gap_no from gap",
        [first, last],
    )


# One take of at most so many publications, as a claim does it but smaller.
TAKE = """
do $$
declare
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
begin
    select * into v_consumer from pgqueue.consumers where name = 'c';
    perform _pgqueue.lock_consumer(v_consumer.consumer_id);
    v_stored := _pgqueue.cursor(v_consumer.consumer_id);
    perform _pgqueue.save_cursor(
        v_stored, (_pgqueue.take(v_consumer, v_stored, null, {})).o_cursor, true);
end $$
"""


def look_into_gaps_after(conn: psycopg.Connection, seconds: float) -> None:
    """Let all consumers look into their gaps again after a time, at most two seconds."""
    conn.execute(
        "update pgqueue.consumer_cursors"
        " set hints.gaps_probe = clock_timestamp() + make_interval(secs => %s),"
        " hints.idle_until = case when (hints).idle_until > '-infinity'"
        " then clock_timestamp() + make_interval(secs => %s) else (hints).idle_until end"
        " where (hints).lanes is not null",
        [seconds, seconds],
    )


def take(conn: psycopg.Connection, limit: int) -> None:
    """Let the consumer c take what is new, at most so many publications, and claim nothing."""
    conn.execute(TAKE.format(limit).encode())


def hints(conn: psycopg.Connection) -> set[str]:
    """The names of all hints of a cursor."""
    found = rows(
        conn,
        "select attname from pg_attribute a join pg_type t on t.typrelid = a.attrelid"
        " where t.oid = 'pgqueue.claim_hints'::regtype",
    )
    return {row.attname for row in found}


def set_hint(conn: psycopg.Connection, name: str, to: str) -> None:
    """The cursors of all consumers say something else, an expression of SQL."""
    conn.execute(f"update pgqueue.consumer_cursors set hints.{name} = {to}".encode())


def noted_full(conn: psycopg.Connection, consumer_id: int) -> bool:
    """Whether a sender or a claim noted that this consumer is full: for a moment nobody counts."""
    query = "select pg_sequence_last_value(_pgqueue.backlog_sequence(%s)) < 0"
    [[noted]] = rows(conn, query, consumer_id)
    return noted


def wait_until_counted_again(conn: psycopg.Connection) -> None:
    """Until nobody takes a consumer for full because somebody noted that it is."""
    conn.execute(
        "select pg_sleep_until(to_timestamp(-pg_sequence_last_value(oid) / 1000000.0))"
        " from pg_class where relkind = 'S' and relname ~ '^backlog_'"
        " and pg_sequence_last_value(oid) < 0"
    )


def note_full(conn: psycopg.Connection, consumer_id: int, later: str) -> None:
    """A sender noted that this consumer is full, when the clock was so much later."""
    conn.execute(
        "select setval(_pgqueue.backlog_sequence(%s)::regclass,"
        " -(extract(epoch from clock_timestamp() + %s::interval) * 1000000)::bigint)",
        [consumer_id, later],
    )


# What other sessions may be at


def lock_consumer(conn: psycopg.Connection, consumer_id: int) -> None:
    """Hold a consumer to the end of the transaction, as a claimer does."""
    conn.execute("select _pgqueue.lock_consumer(%s)", [consumer_id])


def lock_publish_alone(conn: psycopg.Connection, stream: int) -> None:
    """Let nobody publish to a stream until the end of the transaction."""
    conn.execute("select pg_advisory_xact_lock(_pgqueue.lock_class_publish(), %s::int)", [stream])


def streams_maintained(conn: psycopg.Connection) -> int:
    """Of how many streams this transaction has the lock under which they are maintained."""
    sql = (
        "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        " and classid = _pgqueue.lock_class_maintain()::oid"
    )
    return rows(conn, sql)[0][0]


def lock_seqs(conn: psycopg.Connection, stream_id: int) -> None:
    """Lock the numbers of a stream to the end of the transaction, which nobody should."""
    conn.execute("select _pgqueue.lock_seqs(%s)", [stream_id])


def seqs_are_locked(conn: psycopg.Connection, stream_id: int) -> bool:
    """Whether somebody has that lock."""
    sql = (
        "select exists (select from pg_locks where locktype = 'advisory'"
        " and classid = _pgqueue.lock_class_seqs()::oid and objid = %s::oid)"
    )
    row = conn.execute(sql, [stream_id]).fetchone()
    return row is not None and row[0]


def writers(conn: psycopg.Connection, stream_id: int) -> int:
    """How many transactions may have numbers of a stream and are not over."""
    row = conn.execute("select cardinality(_pgqueue.writers(%s))", [stream_id]).fetchone()
    return 0 if row is None else row[0]


def lock_dead_letter(conn: psycopg.Connection, seq: int) -> None:
    """Hold a dead letter to the end of the transaction, as maintain() does that deletes it."""
    conn.execute("select from pgqueue.dead_messages where seqs @> %s::bigint for update", [seq])


def age_writes(conn: psycopg.Connection, writes: list[int], age: str) -> None:
    """Let writes to tables have begun earlier."""
    conn.execute(
        "update pgqueue.table_writes set staged_at = staged_at - %s::interval"
        " where write_no = any (%s)",
        [age, writes],
    )


def lock_sink_batches(conn: psycopg.Connection) -> None:
    """Let no batch of a sink be published until the end of the transaction."""
    conn.execute("lock table pgqueue.sink_batches in share mode")


def delete_entries_of(conn: psycopg.Connection, consumer: str, key: str, seqs: list[int]) -> None:
    """What a producer does who took messages of a key for gone."""
    rows(
        conn,
        "select _pgqueue.delete_entries(c, array[hashtextextended(%s, 0)],"
        " _pgqueue.set_of(%s))::text from pgqueue.consumers c where c.name = %s",
        key,
        seqs,
        consumer,
    )


def note_trim(conn: psycopg.Connection, stream_id: int, seqs: list[int]) -> None:
    """Note that these messages of a stream were trimmed, and their publication."""
    conn.execute(
        "select _pgqueue.record_trim(%s, '{}', (select range_agg(int8range(s, s, '[]'))"
        " from unnest(%s::bigint[]) s), %s)",
        [stream_id, seqs, len(seqs)],
    )


# States that are large. The claims that are made here have negative ids.


def publish_together(conn: psycopg.Connection, stream: int, n: int, key: str = "null") -> None:
    """Publish messages with one row of publications, without their way through Python."""
    with conn.transaction():
        (reserved,) = rows(
            conn,
            INSERT_RESERVED.format(stream=stream, n=n, key=key, data="x")
            + "select seqs::text from r",
        )
        conn.execute(
            "select pgqueue.stage('bulk ' || %s, nextval('pgqueue.claim_numbers'), %s,"
            " %s::int8multirange)",
            [stream, stream, reserved.seqs],
        )
    conn.execute(
        "select pgqueue.publish_staged('bulk ' || stream_id, batch, stream_id, array[staged_id],"
        " message_count) from pgqueue.staged_chunks"
    )


def publish_singly(conn: psycopg.Connection, stream: int, n: int, key: str | None = None) -> None:
    """Publish messages with a row of publications each, as n calls of send do, but faster.

    Args:
        conn: of the database.
        stream: the id of a text stream.
        n: how many.
        key: an SQL expression over i, which counts from 1. Without it only the publications are
            made: for those who read no payload.
    """
    numbers = f"select nextval('pgqueue.seq_{stream}') as seq from generate_series(1, {n}) i"
    if key is not None:
        numbers = (
            "insert into pgqueue.messages (seq, stream_id, key, data)"
            f" select nextval('pgqueue.seq_{stream}'), {stream}, {key}, 'x'"
            f" from generate_series(1, {n}) i returning seq"
        )
    conn.execute(
        (
            f"with sent as ({numbers})"
            " insert into pgqueue.publications (publication_id, message_count, published_at,"
            f" stream_id, priority, seqs) select nextval('pgqueue.publication_{stream}'), 1,"
            f" clock_timestamp(), {stream}, 0, int8multirange(int8range(seq, seq, '[]')) from sent"
        ).encode()
    )


# A bundle of one message; the state goes by lane, place, key and token.
ADD = """
insert into pgqueue.consumer_messages (consumer_id, bundle_no, lane, place, first_seq, arrival_no,
    priority, deliver_count, key, not_visible_until, message_count, seqs, token, claimed_at,
    lease_until, visibility_timeout, keys)
select {consumer}, nextval('pgqueue.claim_numbers'), lane, place, seq, {arrival}, 0, {count},
    key::bigint, case when lane = 1000001 then clock_timestamp() + interval '1 day' end, 1,
    int8multirange(int8range(seq, seq, '[]')), token::bigint, now.now, now.now + day.day, day.day,
    keys::bigint[]
from ({messages}) m (seq, lane, place, key, token, keys)
left join (select clock_timestamp() as now) now on token is not null
left join (select interval '1 day' as day) day on token is not null
"""
LATER = "(extract(epoch from now() + interval '1 day') * 1000000)::bigint"


def add(
    conn: psycopg.Connection,
    messages: str,
    consumer: int = 1,
    count: int = 0,
    arrival: str = "0",
    hinted: bool = False,
) -> None:
    """Messages of a consumer, each in a bundle of its own: a query for their state.

    hinted: the cursor's hints are true of them, too; else it has none afterwards.
    """
    conn.execute(
        ADD.format(messages=messages, consumer=consumer, count=count, arrival=arrival).encode()
    )
    if not hinted:
        conn.execute(
            "update pgqueue.consumer_cursors set hints = null where consumer_id = %s", [consumer]
        )


def add_in_flight(conn: psycopg.Connection, n: int, keyed: bool) -> None:
    """n messages of consumer 1, each in a bundle of its own: claimed and delayed ones in turn.

    keyed: for an ordered consumer; behind each that is delayed, one of its key waits.
    """
    add(
        conn,
        "select -i, case i % 3 when 0 then 1000002 when 1 then 1000001 else 1000003 end,"
        f" case i % 3 when 2 then -2 else {LATER} + i end,"
        f" case when {keyed} and i % 3 > 0 then i / 3 when {keyed} then -i end,"
        " case i % 3 when 0 then 2 * i + 1 end, '{}'::bigint[]"
        f" from generate_series(1, {n}) i where {keyed} or i % 3 < 2",
        count=1,
    )


def add_ready(conn: psycopg.Connection, first: int, last: int) -> None:
    """Messages of consumer 1 that are ready, each in a bundle of its own, at the end."""
    (row,) = rows(
        conn,
        "update pgqueue.consumer_cursors set last_arrival = last_arrival + 1"
        " where consumer_id = 1 returning last_arrival",
    )
    add(
        conn,
        f"select i, 0, {row.last_arrival}, null, null, null"
        f" from generate_series({first}, {last}) i",
        arrival=str(row.last_arrival),
    )


def add_backlog(conn: psycopg.Connection, consumer_id: int, first: int, n: int) -> None:
    """n messages from a number on, each in a bundle of its own: ready ones, and ones that wait."""
    add(
        conn,
        f"select i + {first}, case i % 2 when 0 then 0 else 1000003 end,"
        " case i % 2 when 0 then i else -2 end, case i % 2 when 1 then i end, null, null"
        f" from generate_series(1, {n}) i",
        consumer_id,
        arrival=f"seq - {first}",
    )


def add_dead(conn: psycopg.Connection, n: int, consumer_id: int = 1) -> None:
    """n dead letters of a consumer, each of a run of its own."""
    conn.execute(
        "insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority,"
        " deliver_count, reason) select stream_id, consumer_id,"
        " int8multirange(int8range(-i, -i, '[]')), 1, 0, 1, 'x'"
        " from pgqueue.consumers, generate_series(1::bigint, %s) i where consumer_id = %s",
        [n, consumer_id],
    )


def add_all(conn: psycopg.Connection, consumer_id: int, n: int) -> None:
    """n messages of a consumer in each state, dead letters and history, each by itself."""
    add_backlog(conn, consumer_id, 0, 2 * n)
    add(
        conn,
        "select i + m.no * 1000000, m.lane,"
        f" case m.no when 3 then i else {LATER} + i end, null::bigint,"
        " case m.no when 1 then 2 * i + 1 end, null::bigint[]"
        " from unnest('{1000002, 1000001, 1000004}'::int[]) with ordinality m (lane, no)"
        f" cross join generate_series(1, {n}) i",
        consumer_id,
        count=11,
    )
    add_dead(conn, n, consumer_id)
    conn.execute(
        "insert into pgqueue.completed_messages (consumer_id, done_at, seqs, message_count,"
        " deliver_count) select %s, now(), int8multirange(int8range(i, i, '[]')), 1, 1"
        " from generate_series(1, %s) i",
        [consumer_id, n],
    )


def add_schedules(conn: psycopg.Connection, stream_id: int, n: int) -> None:
    """n schedules of a stream whose time is to come."""
    conn.execute(
        "insert into pgqueue.schedules (stream_id, name, every, start_at, time_zone, data,"
        " priority, next_at) select %s, 's' || i, interval '1 day', now(), 'UTC', 'x', 0,"
        " now() + interval '1 day' from generate_series(1, %s) i",
        [stream_id, n],
    )


def add_consumers(conn: psycopg.Connection, n: int, name: str = "idle") -> None:
    """n consumers of the stream s. Every other one has claimed a message; now all are idle."""
    conn.execute(
        "select pgqueue.create_consumer('s', %s || i, 'earliest') from generate_series(1, %s) i",
        [name, n],
    )
    conn.execute(
        "select c.* from generate_series(1, %s, 2) i, pgqueue.claim('s', %s || i) c", [n, name]
    )


def add_ended_claims(conn: psycopg.Connection, n: int) -> None:
    """n claims of consumer 1 that ended, which an old snapshot still sees."""
    add(
        conn,
        "select -i, 1000002, _pgqueue.place_at(now() - interval '1 min') + i, null, 2 * i + 1, null"
        f" from generate_series(1, {n}) i",
        hinted=True,
    )
    conn.execute("delete from pgqueue.consumer_messages where first_seq < 0")


def delivered_often(conn: psycopg.Connection, deliver_count: int) -> None:
    """The messages that consumers hold were delivered so many times."""
    conn.execute("update pgqueue.consumer_messages set deliver_count = %s", [deliver_count])
