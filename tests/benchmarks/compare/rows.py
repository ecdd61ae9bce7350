"""The usual design: a row for each message and consumer, claimed by `for update skip locked`.

Written as well as we can. A message is written once, beside a narrow row for each consumer, whose
only index is the primary key: so a claim is a HOT update (fillfactor 70 leaves room), and finds the
row by its place. (With an index on visible_at it was slower by a quarter.) It is not fenced: who
comes too late deletes what another worker holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from tests.benchmarks.compare.sides import CHUNK, NUMBERED, Delivery, number_of
from tests.benchmarks.harness import run

DATA = 2
"""Which column of a claim the payload is."""

TABLES = """
create table {schema}.messages (
    message_id  bigint      generated always as identity primary key,
    inserted_at timestamptz not null default now(),
    key         text,
    data        text        not null
);
create table {schema}.deliveries (
    consumer_id   int         not null,
    message_id    bigint      not null,
    key           text,
    visible_at    timestamptz not null default now(),
    deliver_count int         not null default 0,
    primary key (consumer_id, message_id)
) with (fillfactor = 70);
create table {schema}.consumers (consumer_id int primary key);
"""

# The key is in the narrow row too only where it is needed.
INSERT = """
with sent as (
    insert into {schema}.messages (key, data) {rows} returning message_id, key
), delivered as (
    insert into {schema}.deliveries (consumer_id, message_id, key)
    select consumer_id, message_id, {key} from sent cross join {schema}.consumers
    order by consumer_id, message_id
)
select {result} from sent
"""

CLAIM = """
with claimed as (
    update {schema}.deliveries
    set visible_at = now() + interval '30 s', deliver_count = deliver_count + 1
    where ctid = any(array(
              select ctid from {schema}.deliveries
              where consumer_id = %s and visible_at <= now()
              order by message_id limit {size} for update skip locked))
      and visible_at <= now()
    returning message_id, deliver_count
)
select m.message_id, m.key, m.data, c.deliver_count, m.inserted_at
from claimed c join {schema}.messages m using (message_id)
order by message_id
"""

ACK = "delete from {schema}.deliveries where consumer_id = %s and message_id = any(%s)"

# By key: what stands at the front of the table is looked at, and more of it while nothing is free
# there. So the cost does not grow with the backlog. Of many keys the first messages are taken: rows
# whose key has no earlier one, an index probe each. Of few keys more messages each, so that others
# find free keys: the first of a key among the rows at the front is the first of that key.
#
# Who has locked a key's first row has the key: others skip it, or find its visible_at changed. What
# of a key is taken together has no gap: a row that somebody else holds ends it (that one was the
# first, until a lower number was committed late).
FIFO = """
create index on {schema}.deliveries (consumer_id, key, message_id);
create function {schema}.claim(p_consumer int, p_max int)
returns table (message_id bigint, key text, data text, deliver_count int, inserted_at timestamptz)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    v_window int := 4 * p_max + 20;
    v_front  bigint;
    v_keys   int;
    v_places tid[] := '{{}}';
begin
    loop
        select max(message_id), count(distinct key) into v_front, v_keys from (
            select message_id, key from {schema}.deliveries where consumer_id = p_consumer
            order by message_id limit v_window) f;
        if p_max = 1 or v_keys >= 2 * p_max then
            v_places := array(
                select d.ctid from {schema}.deliveries d
                where consumer_id = p_consumer and message_id <= v_front and visible_at <= now()
                  and not exists (select 1 from {schema}.deliveries e
                                  where e.consumer_id = p_consumer and e.key = d.key
                                    and e.message_id < d.message_id)
                order by message_id limit p_max for update skip locked);
        else
            v_places := array(
                with front as materialized (
                    select d.ctid as place, key, message_id,
                           row_number() over (partition by key order by message_id) as nth,
                           min(message_id) over by_key as head,
                           bool_and(visible_at <= now()) over by_key as is_free
                    from {schema}.deliveries d
                    where consumer_id = p_consumer and message_id <= v_front
                    window by_key as (partition by key)
                ), wanted as (
                    select * from front where is_free order by head, message_id limit p_max
                ), locked as materialized (
                    select w.place, w.key, w.message_id, w.nth
                    from wanted w join {schema}.deliveries d on d.ctid = w.place
                    where d.visible_at <= now() for update of d skip locked
                )
                select place from (
                    select place, nth,
                           row_number() over (partition by key order by message_id) as is_nth
                    from locked) l
                where nth = is_nth);
        end if;
        exit when v_places <> '{{}}' or v_window >= 1500;
        v_window := v_window * 8;
    end loop;
    return query
    with claimed as (
        update {schema}.deliveries
        set visible_at = now() + interval '30 s', deliver_count = deliver_count + 1
        where ctid = any(v_places)
        returning message_id, deliver_count
    )
    select m.message_id, m.key, m.data, c.deliver_count, m.inserted_at
    from claimed c join {schema}.messages m using (message_id) order by m.message_id;
end $$
"""


@dataclass(frozen=True)
class Rows:
    """A row for each message and consumer, in no order but that of the rows.

    Attributes:
        by_key: claims go by FIFO of each key.
        variant: for its name.
    """

    by_key: bool = False
    variant: str = ""
    one_call: bool = False

    @property
    def name(self) -> str:
        return f"row per message, {self.variant}" if self.variant else "row per message"

    @property
    def schema(self) -> str:
        return "row_per_message_by_key" if self.by_key else "row_per_message"

    def install(self, conn: psycopg.Connection) -> None:
        run(conn, f"create schema if not exists {self.schema}")

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        run(conn, TABLES.format(schema=self.schema))
        if self.by_key:
            run(conn, FIFO.format(schema=self.schema))
        sql = f"insert into {self.schema}.consumers select generate_series(0, %s)"
        run(conn, sql, (consumers - 1,))

    def drop(self, conn: psycopg.Connection) -> None:
        run(conn, f"drop schema {self.schema} cascade; create schema {self.schema}")

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, self._insert("values (%s, %s)"), (key, data))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        run(conn, self._insert("select * from unnest(%b::text[], %b::text[])"), (keys, data))

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        rows = f"select key, data from ({NUMBERED}) n order by i"
        run(conn, self._insert(rows, "count(message_id)"), (first, keys))

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        if self.by_key:
            rows = run(conn, f"select * from {self.schema}.claim(%s, %s)", (consumer, size))
        else:
            # The size stands in the statement: as a parameter it would be planned for as unknown.
            rows = run(conn, CLAIM.format(schema=self.schema, size=size), (consumer,))
        numbers = [number_of(row[DATA]) for row in rows]
        return Delivery(numbers, [row[0] for row in rows])

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        return self.receive(conn, CHUNK, consumer, None)

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        sql = ACK.format(schema=self.schema)
        return conn.execute(sql.encode(), (consumer, delivery.handle)).rowcount

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        sql = f"select count(*) from {self.schema}.deliveries where consumer_id = %s"
        return run(conn, sql, (consumer,))[0][0]

    def _insert(self, rows: str, result: str = "message_id") -> str:
        key = "key" if self.by_key else "null"
        return INSERT.format(schema=self.schema, rows=rows, key=key, result=result)


# The same statements behind functions by names, as a library has them. Who acknowledges has to name
# the delivery, so that nobody deletes what another worker holds meanwhile.
FUNCTIONS = """
create table {schema}.queues (
    queue       text not null,
    consumer    text not null,
    consumer_id int  not null,
    primary key (queue, consumer)
);
insert into {schema}.queues select '{schema}', 'c' || consumer_id, consumer_id
from {schema}.consumers;
create type {schema}.received as (
    message_id bigint, key text, data text, deliver_count int, inserted_at timestamptz);
create function {schema}.receive(p_queue text, p_consumer text, p_max int)
returns setof {schema}.received
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
declare
    v_consumer_id int;
begin
    select consumer_id into v_consumer_id from {schema}.queues
    where queue = p_queue and consumer = p_consumer;
    return query {claim};
end $$;
create function {schema}.ack(p_queue text, p_consumer text, p_message_ids bigint[],
                             p_deliver_count int) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
declare
    v_count bigint;
begin
    delete from {schema}.deliveries
    where consumer_id = (select consumer_id from {schema}.queues
                         where queue = p_queue and consumer = p_consumer)
      and message_id = any (p_message_ids) and deliver_count = p_deliver_count;
    get diagnostics v_count = row_count;
    return v_count;
end $$;
"""


@dataclass(frozen=True)
class RowsByFunctions(Rows):
    """A row for each message and consumer, behind functions by names."""

    variant: str = "by functions"

    @property
    def schema(self) -> str:
        return "row_per_message_by_functions"

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        super().create(conn, consumers, by_key=by_key)
        claim = CLAIM.format(schema=self.schema, size="p_max").replace("%s", "v_consumer_id")
        run(conn, FUNCTIONS.format(schema=self.schema, claim=claim))

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        sql = f"select * from {self.schema}.receive(%s::text, %s::text, %s::int)"
        rows = run(conn, sql, (self.schema, f"c{consumer}", size))
        numbers = [number_of(row[DATA]) for row in rows]
        counts = rows[0][3] if rows else 0
        return Delivery(numbers, ([row[0] for row in rows], counts))

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        sql = f"select {self.schema}.ack(%s::text, %s::text, %s::bigint[], %s::int)"
        return run(conn, sql, (self.schema, f"c{consumer}", *delivery.handle))[0][0]
