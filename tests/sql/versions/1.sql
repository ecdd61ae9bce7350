-- The schema of version 1, in one file: what its installer ran, for the tests of upgrading.
-- schema version: 1
--
-- The schema, and the rule that an older installer never touches a newer schema.

do $$
begin
    if current_setting('server_version_num')::int < 150000 then
        raise exception 'pgqueue needs PostgreSQL 15 or later; this server is %', current_setting('server_version')
            using errcode = 'PQ011', hint = 'Upgrade the server.';
    end if;
end $$;

-- two installers at once would trip over each other's "create"
do $$ begin perform pg_advisory_xact_lock(hashtextextended('pgqueue install', 0)); end $$;

create schema if not exists pgqueue;

create table if not exists pgqueue.installed (
    version      int         not null primary key,
    installed_at timestamptz not null default clock_timestamp()
);

do $$
begin
    if (select max(version) from pgqueue.installed) > 1 then
        raise exception 'the schema pgqueue is version %, newer than this installer (version 1)',
                        (select max(version) from pgqueue.installed)
            using errcode = 'PQ011', hint = 'Install the newer spark-pgqueue; nothing was changed.';
    end if;
end $$;

-- The tables. A message is written once and never changes; everything that a consumer does to it is a set of
-- sequence numbers (int8multirange) somewhere else.
--
-- Only the database's clock is used. The hot tables have no foreign keys: a check per row would lock the
-- consumer's row for every claim. drop_stream and drop_consumer delete what belongs to them.

create table if not exists pgqueue.streams (
    stream_id  int         generated always as identity primary key,
    name       text        not null unique,
    kind       text        not null check (kind in ('text', 'json', 'binary')),
    notify     boolean     not null,  -- wake up waiting readers at each publication; off, they find it within their wait
    created_at timestamptz not null default clock_timestamp()
);

-- One partition a stream, made by create_stream: messages_<stream_id>, with primary key (seq) and the checks of the
-- stream's kind; its sequences are seq_<stream_id> and publication_<stream_id>.
create table if not exists pgqueue.messages (
    seq         bigint      not null,
    inserted_at timestamptz not null default statement_timestamp(),
    stream_id   int         not null,
    key         text,
    data        text,
    data_bytes  bytea,
    headers     jsonb
) partition by list (stream_id);

-- What became visible, when, to whom: one id per publishing statement, one part of it per priority and time.
create table if not exists pgqueue.publications (
    publication_id bigint         not null,
    n              bigint         not null,
    published_at   timestamptz    not null,
    deliver_at     timestamptz,                 -- null: at once
    stream_id      int            not null,
    part           int            not null default 0,
    priority       int            not null,
    seqs           int8multirange not null,
    consumers      int[],                       -- null: all, also those that do not exist yet
    primary key (stream_id, publication_id, part)
);

create table if not exists pgqueue.consumers (
    consumer_id        int         generated always as identity primary key,
    stream_id          int         not null references pgqueue.streams,
    name               text        not null,
    ordering           text        not null check (ordering in ('none', 'key', 'stream')),
    max_deliver_count  int         check (max_deliver_count > 0),
    visibility_timeout interval    not null check (visibility_timeout > interval '0'),
    created_at         timestamptz not null default clock_timestamp(),
    unique (stream_id, name)
);

do $$
begin
    if to_regtype('pgqueue.floor') is null then
        create type pgqueue.floor as (rank int, turn bigint, first_seq bigint);
    end if;
end $$;

-- A consumer's cursor. Never updated: a new version is inserted and the one before deleted, and the newest is
-- read first, so that dead versions behind a long transaction elsewhere cost nothing.
create table if not exists pgqueue.consumer_cursors (
    consumer_id    int             not null,
    version        bigint          not null,
    seen           int8multirange  not null,                    -- publication ids taken, or known to be dead
    watched        int8multirange  not null default '{}',       -- holes in it that may still become visible ...
    watched_below  xid8,                                        -- ... unless all transactions up to this one are over
    parked         int8multirange  not null default '{}',       -- holes that an old transaction keeps open
    parked_below   xid8,
    parked_probe   timestamptz,                                 -- look at the parked ones again from then on
    more           boolean         not null default false,      -- the last take was cut by its limit
    turn           bigint          not null default 0,          -- the last place given out in the line
    floors         pgqueue.floor[] not null default '{}',       -- per rank: no ready run stands before this place
    due_floor      timestamptz     not null default '-infinity',-- no delayed run is due before this, also if the clock is set back
    lease_probe    timestamptz     not null default '-infinity',-- look for expired leases again from then on
    -- ordered consumers only:
    open_claims    int             not null default 0,          -- claims with messages
    first_claim    bigint          not null default 0,          -- no older claim is open: a floor, as those above
    aside          bigint          not null default 0,          -- runs set aside for a key of their own
    mixed_claim    bigint,                                      -- the one open claim whose runs are not yet split by key
    heads_first    boolean         not null default true,       -- who is served first by the next claim, see _serve_ordered
    primary key (consumer_id, version)
);

-- The runs: what a consumer has taken and not finished. All messages of a run are in the same state.
create table if not exists pgqueue.consumer_messages (
    consumer_id       int            not null,
    state             text           not null,  -- ready, delayed, waiting or claimed; a check would be parsed again by each statement
    rank              int            not null,  -- the line it stands in: -priority; ordered: 0, a key's own head -1
    priority          int            not null,
    deliver_count     int            not null,
    position          bigint         not null,  -- order of arrival, kept for life
    turn              bigint         not null,  -- place in the line
    first_seq         bigint         not null,  -- lower(seqs)
    n                 bigint         not null,
    seqs              int8multirange not null,
    key               text,                     -- ordered consumers: set once the run stands for one key alone
    claim_id          bigint,
    not_visible_until timestamptz,
    last_delivered_at timestamptz,
    last_error        text
);
-- One index per question asked. No predicate follows from the conditions of another question: Postgres may take any partial
-- index whose predicate a query implies, and then reads all of it.
create index if not exists consumer_messages_ready on pgqueue.consumer_messages (consumer_id, rank, turn, first_seq)
    where state = 'ready';
create index if not exists consumer_messages_due on pgqueue.consumer_messages (consumer_id, not_visible_until)
    where state = 'delayed';
create index if not exists consumer_messages_claim on pgqueue.consumer_messages (claim_id)
    where claim_id is not null;
create index if not exists consumer_messages_busy on pgqueue.consumer_messages (consumer_id, key, claim_id)
    where state = 'claimed' and key is not null;
create index if not exists consumer_messages_aside on pgqueue.consumer_messages (consumer_id, key, position, first_seq)
    where state <> 'claimed' and key is not null;

-- The lease is on the claim, not on its messages. A worker's claim is deleted when it ends; a Spark reader's is kept,
-- with its original set, until the reader has moved past it.
create table if not exists pgqueue.claims (
    claim_id           bigint      generated always as identity primary key,
    consumer_id        int         not null,
    ordered            boolean     not null,
    live               boolean     not null default true,   -- false: it has nothing left, or the lease ended and another claimer took over
    claimed_at         timestamptz not null,
    lease_until        timestamptz not null,
    visibility_timeout interval    not null,
    n                  bigint      not null,                -- messages at the start
    remaining          bigint      not null,                -- messages not settled
    settled            bigint      not null default 0,      -- messages settled by the owner, one way or the other
    reader             uuid,
    seqs               int8multirange                       -- readers: the original set
);
create index if not exists claims_lease on pgqueue.claims (consumer_id, lease_until) where live;
create index if not exists claims_ordered on pgqueue.claims (consumer_id, claim_id) where live and ordered;
create index if not exists claims_reader on pgqueue.claims (reader, claim_id) where reader is not null;

create table if not exists pgqueue.dead_messages (
    dead_id       bigint         generated always as identity primary key,
    stream_id     int            not null,
    consumer_id   int            not null,
    seqs          int8multirange not null,
    n             bigint         not null,
    priority      int            not null,
    deliver_count int            not null,
    reason        text,
    details       jsonb,
    claim_id      bigint,
    died_at       timestamptz    not null default clock_timestamp()
);
create index if not exists dead_messages_consumer on pgqueue.dead_messages (consumer_id, dead_id);

-- Spark's side: one reader per checkpoint ...
create table if not exists pgqueue.readers (
    reader      uuid        primary key,
    consumer_id int         not null,
    acked_claim bigint      not null default 0,
    last_claim  bigint      not null default 0,
    messages    bigint      not null default 0,  -- claimed in all
    lost        bigint      not null default 0,  -- acknowledged after the lease was lost
    query_id    text,
    created_at  timestamptz not null default clock_timestamp(),
    unique (consumer_id, query_id)               -- two readers of one query would each get half of the messages
);

-- ... what its tasks have written and not yet published, and the batches that were.
create table if not exists pgqueue.staged_writes (
    staged_id  bigint         generated always as identity primary key,
    stream_id  int            not null,
    sink       text           not null,
    batch      bigint         not null,
    priority   int            not null,
    deliver_at timestamptz,
    seqs       int8multirange not null,
    n          bigint         not null,
    staged_at  timestamptz    not null default clock_timestamp()
);
create index if not exists staged_writes_batch on pgqueue.staged_writes (sink, stream_id, batch);

create table if not exists pgqueue.sink_batches (
    sink         text        not null,
    stream_id    int         not null,
    batch        bigint      not null,
    n            bigint      not null,
    published_at timestamptz not null default clock_timestamp(),
    primary key (sink, stream_id, batch)
);

-- What an older schema lacks. "create table if not exists" leaves a table of an earlier version as it is, so each
-- version that changes a table adds its steps here, guarded by what was installed, oldest first:
--
--     do $$ begin
--         if (select max(version) from pgqueue.installed) < 2 then
--             alter table pgqueue.consumers add column filter jsonb;
--         end if;
--     end $$;
--
-- Functions and views need no steps: they are replaced by every installation, except those whose arguments change (what was
-- granted on them has to be granted again).

drop function if exists pgqueue.claim(text, text, int, interval), pgqueue.receive(text, text, int, interval);
do $$ begin
    if exists (select from pg_constraint where conrelid = 'pgqueue.consumer_messages'::regclass and contype = 'c') then
        alter table pgqueue.consumer_messages drop constraint consumer_messages_state_check;
    end if;
end $$;

-- Arithmetic on sets of sequence numbers.
--
-- What is called for every claim is written in plpgsql, here and below: it keeps its plans, while a function in SQL that
-- cannot be inlined is planned again by each call (50 us).

-- The number of elements of a set.
create or replace function pgqueue._cardinality(p_set int8multirange) returns bigint
language plpgsql immutable strict parallel safe
as $$
begin
    return (select coalesce(sum(upper(r) - lower(r)), 0)::bigint from unnest(p_set) r);
end $$;

-- The set of the given numbers. Null for null. Errors: PQ003 when one of them is null, or they have dimensions.
create or replace function pgqueue._set_of(p_seqs bigint[]) returns int8multirange
language plpgsql immutable strict parallel safe
as $$
begin
    if array_ndims(p_seqs) > 1 then
        raise exception 'p_seqs has one dimension, not %', array_ndims(p_seqs) using errcode = 'PQ003';
    elsif array_position(p_seqs, null) is not null then
        raise exception 'p_seqs holds a null' using errcode = 'PQ003', hint = 'Give the numbers of messages, or no array for the whole claim.';
    end if;
    return (select coalesce(range_agg(int8range(s, s, '[]')), '{}') from unnest(p_seqs) s);
end $$;

-- The elements of a set below p_below.
create or replace function pgqueue._below(p_set int8multirange, p_below bigint) returns int8multirange
language sql immutable parallel safe
as $$ select p_set * int8multirange(int8range(null, p_below)) $$;

-- The bound below which a set has exactly p_n elements; p_n is positive and not more than the set has.
create or replace function pgqueue._bound_of(p_set int8multirange, p_n bigint) returns bigint
language plpgsql immutable parallel safe
as $$
declare
    v_range int8range;
    v_left  bigint := p_n;
begin
    for v_range in select unnest(p_set) loop
        if upper(v_range) - lower(v_range) >= v_left then
            return lower(v_range) + v_left;
        end if;
        v_left := v_left - (upper(v_range) - lower(v_range));
    end loop;
    raise exception 'the set has fewer than % elements', p_n;
end $$;

-- A set cut into sets of at most 64 ranges, in order: taking elements out of a set costs in proportion to its ranges.
create or replace function pgqueue._chunks(p_set int8multirange)
returns table (seqs int8multirange, n bigint, first_seq bigint)
language sql immutable parallel safe
as $$
    select range_agg(x.r), sum(upper(x.r) - lower(x.r))::bigint, min(lower(x.r))
    from (select r, (row_number() over (order by lower(r)) - 1) / 64 as chunk from unnest(p_set) r) x
    group by x.chunk
    order by x.chunk
$$;

-- Streams and consumers.

-- The stream of a name, or an error that says what to do. Locks nothing.
create or replace function pgqueue._stream(p_name text) returns pgqueue.streams
language plpgsql stable
as $$
declare
    v_stream pgqueue.streams;
begin
    select * into v_stream from pgqueue.streams where name = p_name;
    if not found then
        raise exception 'unknown stream %', coalesce(quote_literal(p_name), 'null')
            using errcode = 'PQ001',
                  hint = format('Create it: select pgqueue.create_stream(%L). There are: %s.', p_name,
                                coalesce((select string_agg(quote_literal(s.name), ', ')
                                          from (select name from pgqueue.streams order by name limit 10) s), 'none'));
    end if;
    return v_stream;
end $$;

-- The consumer of a name, or an error that says what to do. Locks nothing.
create or replace function pgqueue._consumer(p_stream text, p_name text) returns pgqueue.consumers
language plpgsql stable
as $$
declare
    v_consumer pgqueue.consumers;
begin
    select c.* into v_consumer
    from pgqueue.consumers c join pgqueue.streams s using (stream_id)
    where s.name = p_stream and c.name = p_name;
    if not found then
        perform pgqueue._stream(p_stream);
        raise exception 'unknown consumer % of stream %', coalesce(quote_literal(p_name), 'null'), quote_literal(p_stream)
            using errcode = 'PQ002',
                  hint = format('Create it: select pgqueue.create_consumer(%L, %L). There are: %s.', p_stream, p_name,
                                coalesce((select string_agg(quote_literal(c.name), ', ')
                                          from (select c.name
                                                from pgqueue.consumers c join pgqueue.streams s using (stream_id)
                                                where s.name = p_stream order by c.name limit 10) c), 'none'));
    end if;
    return v_consumer;
end $$;

-- The ids of a list of consumers of a stream; null for null. An unknown name and an empty list are errors.
create or replace function pgqueue._consumer_ids(p_stream_id int, p_names text[]) returns int[]
language plpgsql stable
as $$
declare
    v_ids     int[];
    v_unknown text;
begin
    if p_names is null then
        return null;
    end if;
    select array_agg(distinct c.consumer_id order by c.consumer_id),
           min(coalesce(quote_literal(x.name), 'null')) filter (where c.consumer_id is null)
    into v_ids, v_unknown
    from unnest(p_names) x (name)
    left join pgqueue.consumers c on c.stream_id = p_stream_id and c.name = x.name;
    if v_unknown is not null then
        raise exception 'unknown consumer % in p_consumers', v_unknown
            using errcode = 'PQ002', hint = 'Name consumers of this stream, or pass null to publish to all.';
    elsif v_ids is null then
        raise exception 'p_consumers is empty: the messages would reach nobody'
            using errcode = 'PQ003', hint = 'Name consumers of this stream, or pass null to publish to all.';
    end if;
    return v_ids;
end $$;

-- Raises PQ003 unless the name of a stream or consumer has 1 to 200 characters.
create or replace function pgqueue._check_name(p_what text, p_name text) returns void
language plpgsql immutable
as $$
begin
    if p_name is null or length(p_name) not between 1 and 200 or p_name <> btrim(p_name) then
        raise exception 'the name of a % is 1 to 200 characters without spaces around, not %', p_what,
                        coalesce(quote_literal(left(p_name, 210)), 'null') using errcode = 'PQ003';
    end if;
end $$;

-- Creates a stream.
--   p_name           1 to 200 characters, unique
--   p_kind           what its messages hold: text, json (checked) or binary
--   p_if_not_exists  return the id of an existing one of the same kind instead of failing
--   p_notify         notify waiting readers of each publication. Commits that notify queue up for a lock of the whole
--                    server: turn it off for very many small producers, and readers find messages within their wait.
-- Returns the stream's id. Errors: PQ003, PQ006.
-- Locks: a share-update-exclusive lock on messages to attach the partition; sends and reads go on.
create or replace function pgqueue.create_stream(p_name text, p_kind text default 'text', p_if_not_exists boolean default false,
                                                 p_notify boolean default true) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '10s'
as $$
declare
    v_stream pgqueue.streams;
begin
    perform pgqueue._check_name('stream', p_name);
    if p_kind is null or p_kind not in ('text', 'json', 'binary') then
        raise exception 'p_kind is text, json or binary, not %', coalesce(quote_literal(p_kind), 'null') using errcode = 'PQ003';
    end if;
    insert into pgqueue.streams (name, kind, notify) values (p_name, p_kind, coalesce(p_notify, true))
    on conflict (name) do nothing
    returning * into v_stream;
    if not found then
        select * into v_stream from pgqueue.streams where name = p_name;
        if p_if_not_exists and v_stream.kind = p_kind then
            return v_stream.stream_id;
        end if;
        raise exception 'stream % exists already, with kind %', quote_literal(p_name), v_stream.kind using errcode = 'PQ006';
    end if;

    execute format('create sequence pgqueue.seq_%s', v_stream.stream_id);
    execute format('create sequence pgqueue.publication_%s cache 1', v_stream.stream_id);
    -- "create table ... partition of" would wait for every writer of every stream; attaching does not
    execute format(
        'create table pgqueue.messages_%1$s (like pgqueue.messages including defaults, primary key (seq), '
        'check (%2$s and (key is null or octet_length(key) <= 1024) and (headers is null or jsonb_typeof(headers) = ''object'')))',
        v_stream.stream_id,
        case p_kind when 'text' then 'data_bytes is null' when 'json' then 'data_bytes is null and data::json is not null' else 'data is null' end);
    execute format('alter table pgqueue.messages_%1$s alter %2$s set not null', v_stream.stream_id,
                   case p_kind when 'binary' then 'data_bytes' else 'data' end);
    execute format('alter table pgqueue.messages_%1$s alter stream_id set default %1$s', v_stream.stream_id);
    execute format('alter table pgqueue.messages attach partition pgqueue.messages_%1$s for values in (%1$s)', v_stream.stream_id);
    return v_stream.stream_id;
end $$;

-- Creates a consumer of a stream.
--   p_start               earliest: every message that the stream has; latest: what becomes visible from now on;
--                         a timestamp: what was published since. Transactions that are still running count as later.
--   p_ordering            none; key: the messages of a key one after the other; stream: all of them so
--   p_max_deliver_count   dead-letter a message that failed this many times; null: never
--   p_visibility_timeout  how long a claim is held without being extended
--   p_if_not_exists       return the id of an existing one of the same ordering instead of failing
-- Returns the consumer's id. Errors: PQ001, PQ003, PQ006. Locks: none that others wait for.
create or replace function pgqueue.create_consumer(
    p_stream text, p_name text, p_start text default 'latest', p_ordering text default 'none',
    p_max_deliver_count int default null, p_visibility_timeout interval default '30 s',
    p_if_not_exists boolean default false) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_stream   pgqueue.streams := pgqueue._stream(p_stream);
    v_consumer pgqueue.consumers;
    v_since    timestamptz;
    v_known    int8multirange;
    v_seen     int8multirange := '{}';
begin
    perform pgqueue._check_name('consumer', p_name);
    if p_ordering is null or p_ordering not in ('none', 'key', 'stream') then
        raise exception 'p_ordering is none, key or stream, not %', coalesce(quote_literal(p_ordering), 'null') using errcode = 'PQ003';
    end if;
    if p_max_deliver_count < 1 then
        raise exception 'p_max_deliver_count is null or at least 1, not %', p_max_deliver_count using errcode = 'PQ003';
    end if;
    perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    if p_start is distinct from 'earliest' then
        begin
            v_since := case when p_start = 'latest' then 'infinity' else p_start::timestamptz end;
        exception when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
            v_since := null;
        end;
        if v_since is null then
            raise exception 'p_start is earliest, latest or a timestamp, not %', coalesce(quote_literal(p_start), 'null') using errcode = 'PQ003';
        end if;
    end if;

    insert into pgqueue.consumers (stream_id, name, ordering, max_deliver_count, visibility_timeout)
    values (v_stream.stream_id, p_name, p_ordering, p_max_deliver_count, p_visibility_timeout)
    on conflict (stream_id, name) do nothing
    returning * into v_consumer;
    if not found then
        select * into v_consumer from pgqueue.consumers where stream_id = v_stream.stream_id and name = p_name;
        if p_if_not_exists and v_consumer.ordering = p_ordering then
            return v_consumer.consumer_id;
        end if;
        raise exception 'consumer % of stream % exists already, with ordering %', quote_literal(p_name),
                        quote_literal(p_stream), v_consumer.ordering using errcode = 'PQ006';
    end if;

    -- One statement, so one snapshot: what is visible in it is before the start, what is not will be new. What the
    -- other consumers have seen is either visible or dead, and saves reading all publications.
    if p_start = 'latest' then
        select coalesce(range_agg(c.seen), '{}') into v_known
        from pgqueue.consumers o
        cross join lateral (select seen from pgqueue.consumer_cursors
                            where consumer_id = o.consumer_id order by version desc limit 1) c
        where o.stream_id = v_stream.stream_id and o.consumer_id <> v_consumer.consumer_id;
        select v_known + coalesce(range_agg(int8range(p.publication_id, p.publication_id, '[]')), '{}') into v_seen
        from unnest(int8multirange(int8range(1, null)) - v_known) g
        cross join lateral (select publication_id from pgqueue.publications
                            where stream_id = v_stream.stream_id and publication_id >= lower(g)
                              and publication_id < coalesce(upper(g), 9223372036854775807)) p;
    elsif v_since is not null then
        select coalesce(range_agg(int8range(publication_id, publication_id, '[]')), '{}') into v_seen
        from pgqueue.publications where stream_id = v_stream.stream_id and published_at < v_since;
    end if;
    insert into pgqueue.consumer_cursors (consumer_id, version, seen) values (v_consumer.consumer_id, 1, v_seen);
    return v_consumer.consumer_id;
end $$;

-- Raises PQ003 unless the interval is longer than nothing.
create or replace function pgqueue._check_timeout(p_argument text, p_value interval) returns void
language plpgsql immutable
as $$
begin
    if p_value is null or p_value <= interval '0' or p_value > interval '10 years' then
        raise exception '% is an interval longer than 0 and up to 10 years, not %', p_argument, coalesce(quote_literal(p_value), 'null')
            using errcode = 'PQ003';
    end if;
end $$;

-- The lock under which a consumer takes, and an ordered one changes anything. Held to the end of the transaction.
-- Advisory, because a row lock would give the transaction an id before it has looked (see _take).
create or replace function pgqueue._lock_consumer(p_consumer_id int) returns void
language plpgsql
as $$
begin
    perform pg_advisory_xact_lock(1885826421, p_consumer_id);
end $$;

-- The same if nobody has it. Returns whether the caller has it now.
create or replace function pgqueue._try_lock_consumer(p_consumer_id int) returns boolean
language plpgsql
as $$
begin
    return pg_try_advisory_xact_lock(1885826421, p_consumer_id);
end $$;

-- Deletes a consumer with all that it has not finished. Its claims end; their owners are told when they come back.
-- Errors: PQ001, PQ002; 55P03 when a transaction that holds some of it stays open for 10 s. Locks: the consumer's.
create or replace function pgqueue.drop_consumer(p_stream text, p_name text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id    int := (pgqueue._consumer(p_stream, p_name)).consumer_id;
    v_until timestamptz := clock_timestamp() + interval '10 s';
begin
    loop
        begin
            perform pgqueue._drop_consumer(v_id);
            return;
        exception when lock_not_available or deadlock_detected then
            -- a claimer may hold what this needs, and need the lock that this had: it is let go here
            if clock_timestamp() > v_until then
                raise;
            end if;
        end;
    end loop;
end $$;

-- One try to delete a consumer; see drop_consumer.
create or replace function pgqueue._drop_consumer(p_consumer_id int) returns void
language plpgsql
set lock_timeout = '300ms'
as $$
begin
    perform pgqueue._lock_consumer(p_consumer_id);
    delete from pgqueue.consumers where consumer_id = p_consumer_id;
    loop  -- claims without that lock may be under way, and leave claims and pieces of runs
        delete from pgqueue.consumer_messages where consumer_id = p_consumer_id;
        delete from pgqueue.claims where consumer_id = p_consumer_id;
        exit when not exists (select from pgqueue.consumer_messages where consumer_id = p_consumer_id);
    end loop;
    delete from pgqueue.consumer_cursors where consumer_id = p_consumer_id;
    delete from pgqueue.dead_messages where consumer_id = p_consumer_id;
    delete from pgqueue.readers where consumer_id = p_consumer_id;
end $$;

-- Deletes a stream with its consumers and messages. Errors: PQ001.
-- Locks: its consumers', and for a moment all of messages to detach the partition (gives up after 10 s).
create or replace function pgqueue.drop_stream(p_name text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '10s'
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_name);
begin
    perform pgqueue.drop_consumer(p_name, name)
    from pgqueue.consumers where stream_id = v_stream.stream_id order by consumer_id;
    execute format('alter table pgqueue.messages detach partition pgqueue.messages_%s', v_stream.stream_id);
    execute format('drop table pgqueue.messages_%s', v_stream.stream_id);
    execute format('drop sequence pgqueue.seq_%1$s, pgqueue.publication_%1$s', v_stream.stream_id);
    delete from pgqueue.publications where stream_id = v_stream.stream_id;
    delete from pgqueue.staged_writes where stream_id = v_stream.stream_id;
    delete from pgqueue.sink_batches where stream_id = v_stream.stream_id;
    delete from pgqueue.streams where stream_id = v_stream.stream_id;
end $$;

-- Publishing: the messages, and one row that says they are visible. Nothing is written per consumer.

-- Makes messages visible: the last step of send and send_batch.
-- Returns the publication id. Locks: none that another producer needs (notify takes its global lock at commit).
create or replace function pgqueue._publish(p_stream pgqueue.streams, p_seqs int8multirange, p_n bigint, p_priority int,
                                            p_deliver_at timestamptz, p_consumers int[]) returns bigint
language plpgsql
as $$
declare
    v_id bigint;
begin
    perform pg_current_xact_id();  -- before the publication id: consumers rely on it to tell running from dead
    v_id := nextval(format('pgqueue.publication_%s', p_stream.stream_id)::regclass);
    insert into pgqueue.publications (publication_id, n, published_at, deliver_at, stream_id, priority, seqs, consumers)
    values (v_id, p_n, clock_timestamp(), p_deliver_at, p_stream.stream_id, p_priority, p_seqs, p_consumers);
    if p_stream.notify then
        perform pg_notify('pgqueue_' || p_stream.stream_id, '');
    end if;
    return v_id;
end $$;

-- Raises PQ003 for a priority or time that cannot be.
create or replace function pgqueue._check_publication(p_priority int, p_deliver_at timestamptz) returns void
language plpgsql immutable
as $$
begin
    if p_priority is null or p_priority not between -32768 and 32767 then
        raise exception 'p_priority is -32768 to 32767, not %', coalesce(p_priority::text, 'null') using errcode = 'PQ003';
    elsif not isfinite(p_deliver_at) then
        raise exception 'p_deliver_at is a time, not %', p_deliver_at using errcode = 'PQ003';
    end if;
end $$;

-- Raises PQ003 for a key that is too long: keys are indexed.
create or replace function pgqueue._refuse_key(p_key text) returns text
language plpgsql
as $$
begin
    raise exception 'p_key, or one of p_keys, is longer than 1,024 bytes: % (%...)', octet_length(p_key), quote_literal(left(p_key, 50)) using errcode = 'PQ003';
end $$;

-- Raises PQ004 unless the payload is one for the stream's kind, and PQ003 for other headers than an object and for a key
-- that is too long. The partition checks it too, for whoever writes there
-- directly; this one names the stream. (No exception block around the insert: a subtransaction with an id for every
-- message would slow down every snapshot of the server.)
create or replace function pgqueue._check_payload(p_stream pgqueue.streams, p_data text, p_data_bytes bytea, p_key text, p_headers jsonb)
returns void
language plpgsql immutable
as $$
begin
    if jsonb_typeof(p_headers) <> 'object' then
        raise exception 'p_headers is a JSON object or null, not %', left(p_headers::text, 100) using errcode = 'PQ003';
    elsif octet_length(p_key) > 1024 then
        perform pgqueue._refuse_key(p_key);
    end if;
    if p_stream.kind = 'binary' then
        if p_data_bytes is null or p_data is not null then
            raise exception 'a message of stream % (binary) has p_data_bytes, and p_data is null', quote_literal(p_stream.name)
                using errcode = 'PQ004';
        end if;
        return;
    end if;
    if p_data is null or p_data_bytes is not null then
        raise exception 'a message of stream % (%) has p_data, not null, and p_data_bytes is null', quote_literal(p_stream.name), p_stream.kind
            using errcode = 'PQ004';
    end if;
    if p_stream.kind = 'json' then
        perform p_data::json;
    end if;
exception when invalid_text_representation or untranslatable_character then
    raise exception 'a message of stream % (json) is not valid JSON: %', quote_literal(p_stream.name), left(p_data, 100)
        using errcode = 'PQ004', detail = sqlerrm;
end $$;

-- Publishes a message, in the caller's transaction.
--   p_data        the payload of a text or json stream; p_data_bytes that of a binary one
--   p_key         what ordering=key goes by, up to 1,024 bytes; null: in no order with others
--   p_headers     a JSON object, or null
--   p_priority    -32768 to 32767, higher is earlier; consumers with ordering=none go by it
--   p_deliver_at  not before; null: at once
--   p_consumers   to these only; null: to all
-- Returns its seq. Errors: PQ001, PQ002, PQ003, PQ004. Locks: none that another producer needs.
create or replace function pgqueue.send(
    p_stream text, p_data text, p_key text default null, p_headers jsonb default null, p_priority int default 0,
    p_deliver_at timestamptz default null, p_consumers text[] default null, p_data_bytes bytea default null)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_stream pgqueue.streams;
    v_seq    bigint;
begin
    select * into v_stream from pgqueue.streams where name = p_stream;
    if not found then
        perform pgqueue._stream(p_stream);
    end if;
    if p_priority is distinct from 0 or p_deliver_at is not null then
        perform pgqueue._check_publication(p_priority, p_deliver_at);
    end if;
    if v_stream.kind <> 'text' or p_data is null or p_data_bytes is not null or octet_length(p_key) > 1024
       or jsonb_typeof(p_headers) <> 'object' then
        perform pgqueue._check_payload(v_stream, p_data, p_data_bytes, p_key, p_headers);
    end if;
    insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
    values (nextval(format('pgqueue.seq_%s', v_stream.stream_id)::regclass), v_stream.stream_id, p_key, p_data, p_data_bytes, p_headers)
    returning seq into v_seq;
    perform pgqueue._publish(v_stream, int8multirange(int8range(v_seq, v_seq, '[]')), 1, p_priority, p_deliver_at,
                             case when p_consumers is not null then pgqueue._consumer_ids(v_stream.stream_id, p_consumers) end);
    return v_seq;
end $$;

-- Publishes messages together, in the caller's transaction: they become visible at once, in the order given.
--   p_data, p_keys, p_headers, p_data_bytes  of one length, or null
--   the rest as in send
-- Returns their seqs in that order. Errors: PQ001, PQ002, PQ003, PQ004. Locks: none that another producer needs.
create or replace function pgqueue.send_batch(
    p_stream text, p_data text[], p_keys text[] default null, p_headers jsonb[] default null, p_priority int default 0,
    p_deliver_at timestamptz default null, p_consumers text[] default null, p_data_bytes bytea[] default null)
returns setof bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan  -- a custom plan would hold the arrays as constants
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_n      int := coalesce(cardinality(p_data), cardinality(p_data_bytes));
    v_id     int := v_stream.stream_id;  -- these two are looked up once, not for each message
    v_names  regclass := format('pgqueue.seq_%s', v_stream.stream_id);
    v_before bigint;  -- the last number given out before
    v_last   bigint;
    v_seqs   bigint[];
    v_ids    int[] := pgqueue._consumer_ids(v_stream.stream_id, p_consumers);
begin
    perform pgqueue._check_publication(p_priority, p_deliver_at);
    if v_n is null then
        raise exception 'p_data is null' using errcode = 'PQ003', hint = 'Give an array of payloads.';
    end if;
    if greatest(array_ndims(p_data), array_ndims(p_keys), array_ndims(p_headers), array_ndims(p_data_bytes)) > 1 then
        raise exception 'p_data, p_keys, p_headers and p_data_bytes have one dimension' using errcode = 'PQ003';
    end if;
    if cardinality(p_keys) <> v_n or cardinality(p_headers) <> v_n or cardinality(p_data_bytes) <> v_n then
        raise exception 'p_keys, p_headers and p_data_bytes have one element per message or are null: % messages, % keys, % headers, % bytes',
                        v_n, cardinality(p_keys), cardinality(p_headers), cardinality(p_data_bytes) using errcode = 'PQ003';
    end if;
    if v_n = 0 then
        return;
    end if;
    if v_stream.kind <> 'text' or array_position(p_data, null) is not null or p_data_bytes is not null or p_headers is not null then
        perform pgqueue._check_payload(v_stream, m.data, m.data_bytes, m.key, m.headers)
        from unnest(p_data, p_data_bytes, p_keys, p_headers) m (data, data_bytes, key, headers);
    end if;
    v_before := coalesce(pg_sequence_last_value(v_names), 0);
    insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
    select nextval(v_names), v_id, case when octet_length(m.key) > 1024 then pgqueue._refuse_key(m.key) else m.key end,
           m.data, m.data_bytes, m.headers
    from (select unnest(p_keys) as key, unnest(p_data) as data, unnest(p_data_bytes) as data_bytes, unnest(p_headers) as headers) m;
    v_last := currval(v_names);
    if v_last - v_before = v_n then
        perform pgqueue._publish(v_stream, int8multirange(int8range(v_before + 1, v_last, '[]')), v_n, p_priority, p_deliver_at, v_ids);
        return query select generate_series(v_before + 1, v_last);
        return;
    end if;
    -- another producer took numbers in between: this statement's are those whose rows have the same xmin as the last one
    execute format('select array_agg(seq order by seq) from pgqueue.messages_%1$s where seq > $1 and seq <= $2 '
                   'and xmin = (select xmin from pgqueue.messages_%1$s where seq = $2)', v_stream.stream_id)
    into v_seqs using v_before, v_last;
    perform pgqueue._publish(v_stream, pgqueue._set_of(v_seqs), v_n, p_priority, p_deliver_at, v_ids);
    return query select unnest(v_seqs);
end $$;

-- Taking what is new, exactly.
--
-- Commits do not come in the order of ids. A consumer keeps the set of publication ids that it has seen; new is what
-- is beyond its end, and what has appeared in its holes. A hole is closed once nothing that could fill it is running:
--   * A publisher has its transaction id before its publication id. So a transaction that looked, did not see
--     publication h, saw a later one, and only then got an id of its own, has a greater id than h's publisher.
--   * When that id is below every running transaction, the publisher is over: h is visible to the next look, or dead.
--     This is decided before that look, never after.

-- A transaction id younger than every one that existed until now, of a transaction that may have an older one: the id
-- of a subtransaction, which is rolled back.
create or replace function pgqueue._fresh_xid() returns xid8
language plpgsql
as $$
declare
    v_own bigint := pg_current_xact_id()::text::bigint;
    v_sub bigint;
begin
    begin
        insert into pgqueue.consumer_cursors (consumer_id, version, seen) values (0, v_own, '{}')
        returning xmin::text::bigint into v_sub;
        raise exception using errcode = 'PQ099';
    exception when sqlstate 'PQ099' then
        null;
    end;
    v_sub := (v_own >> 32 << 32) + v_sub;  -- xmin has 32 bits
    return (case when v_sub < v_own then v_sub + (1::bigint << 32) else v_sub end)::text::xid8;
end $$;

-- Whether all transactions up to p_below are over. An id that this cluster has not reached comes from another one, by
-- a restore, and all of its transactions are over; unless the caller has written before and so may have set it itself.
create or replace function pgqueue._is_over(p_below xid8, p_snapshot pg_snapshot, p_first_write boolean) returns boolean
language sql immutable
as $$
    select p_below < pg_snapshot_xmin(p_snapshot)
           or (p_first_write and p_below >= pg_snapshot_xmax(p_snapshot))
$$;

-- Takes what comes next into one run, if it is as plain as nearly always: at most p_limit publications without a hole among
-- their ids, all of the same kind, and their messages one range (or those of a single publication). There is no hole before them.
-- Returns the cursor; null when it is not so, and nothing was done. Needs the consumer's lock.
create or replace function pgqueue._take_plain(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_next bigint,
                                               p_upto bigint, p_limit int) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_first pgqueue.publications;
    v_all   record;
    v_run   pgqueue.consumer_messages;
begin
    select * into v_first from pgqueue.publications
    where stream_id = p_consumer.stream_id and publication_id = p_next and part = 0 and p_next <= coalesce(p_upto, p_next);
    if not found then
        return null;
    end if;
    select count(*) as count, max(publication_id) as last, sum(n)::bigint as n, min(lower(seqs)) as lo, max(upper(seqs)) as hi,
           bool_and(part = 0 and priority = v_first.priority and deliver_at is not distinct from v_first.deliver_at
                    and consumers is not distinct from v_first.consumers) as alike
    into v_all
    from pgqueue.publications
    where stream_id = p_consumer.stream_id and publication_id >= p_next and publication_id < p_next + p_limit
      and publication_id <= coalesce(p_upto, 9223372036854775807);
    if not v_all.alike or v_all.last - p_next + 1 <> v_all.count or (v_all.hi - v_all.lo <> v_all.n and v_all.count > 1) then
        return null;
    end if;
    -- What is visible beyond has a hole before it, unless the limit cut it off
    if v_all.count < p_limit and v_all.last < coalesce(p_upto, 9223372036854775807) and exists (
        select from pgqueue.publications where stream_id = p_consumer.stream_id and publication_id >= p_next + p_limit
                                           and publication_id <= coalesce(p_upto, 9223372036854775807)) then
        return null;
    end if;

    p_cursor.seen := p_cursor.seen + int8multirange(int8range(p_next, v_all.last, '[]'));
    p_cursor.turn := p_cursor.turn + 1;
    p_cursor.more := v_all.count = p_limit;
    p_cursor.watched := '{}';
    p_cursor.parked := '{}';
    if not (v_first.consumers is null or p_consumer.consumer_id = any (v_first.consumers)) then
        return p_cursor;
    end if;
    v_run.not_visible_until := case when v_first.deliver_at > clock_timestamp() then v_first.deliver_at end;
    v_run.consumer_id := p_consumer.consumer_id;
    v_run.state := case when v_run.not_visible_until is not null and p_consumer.ordering = 'none' then 'delayed' else 'ready' end;
    v_run.rank := case when p_consumer.ordering = 'none' then -v_first.priority else 0 end;
    v_run.priority := v_first.priority;
    v_run.deliver_count := 0;
    v_run.position := p_cursor.turn;
    v_run.turn := p_cursor.turn;
    perform pgqueue._insert_run(v_run, case when v_all.count = 1 then v_first.seqs else int8multirange(int8range(v_all.lo, v_all.hi)) end);
    if v_run.state = 'ready' then
        p_cursor.floors := pgqueue._lower_floors(p_cursor.floors, array[(v_run.rank, v_run.turn, 0)::pgqueue.floor]);
    else
        p_cursor.due_floor := least(p_cursor.due_floor, v_run.not_visible_until);
    end if;
    return p_cursor;
end $$;

-- Takes at most p_limit publications (and as many in holes) into runs.
--   p_upto  no publication after this one; null: all
-- Returns the cursor as it is then; the caller stores it. Needs the consumer's lock.
create or replace function pgqueue._take(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                         p_upto bigint, p_limit int) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor     pgqueue.consumer_cursors := p_cursor;
    v_next       bigint := coalesce(upper(p_cursor.seen), 1);
    v_gaps       int8multirange := int8multirange(int8range(1, coalesce(upper(p_cursor.seen), 1))) - p_cursor.seen;
    v_snapshot   pg_snapshot;
    v_close      int8multirange := '{}';
    v_has_id     boolean := pg_current_xact_id_if_assigned() is not null;
    v_now        timestamptz := clock_timestamp();
    v_taken      int8multirange;
    v_in_gaps    int;
    v_beyond     int;
    v_ranks      int[];
    v_due        timestamptz;
begin
    if v_gaps = '{}' then
        v_cursor := pgqueue._take_plain(p_consumer, p_cursor, v_next, p_upto, p_limit);
        if v_cursor.consumer_id is not null then
            return v_cursor;
        end if;
        v_cursor := p_cursor;
    else
        v_snapshot := pg_current_snapshot();  -- before the look
        if v_cursor.watched <> '{}' and pgqueue._is_over(v_cursor.watched_below, v_snapshot, not v_has_id) then
            v_close := v_cursor.watched;
        end if;
        if v_cursor.parked <> '{}' then
            if pgqueue._is_over(v_cursor.parked_below, v_snapshot, not v_has_id) then
                v_close := v_close + v_cursor.parked;
            elsif v_now < v_cursor.parked_probe and p_consumer.ordering = 'none' then  -- for order, holes come first
                v_gaps := v_gaps - v_cursor.parked;
            else
                v_cursor.parked_probe := v_now + interval '1 s';
            end if;
        end if;
    end if;

    -- The look, and the runs for what it saw. The transaction gets its id here, after the statement's snapshot. Nearly always
    -- ids and seqs are contiguous; merging them one by one, range_agg, costs more than all the rest and is left out then.
    with held as materialized (
        select true as in_gap, p.publication_id, p.part, p.n, p.seqs, p.priority, p.deliver_at, p.consumers
        from unnest(v_gaps) g
        cross join lateral (select * from pgqueue.publications
                            where stream_id = p_consumer.stream_id
                              and publication_id >= lower(g) and publication_id < upper(g)
                            order by publication_id) p
        order by p.publication_id
        fetch first p_limit rows with ties
    ), new as materialized (
        select * from held
        union all
        (select false, publication_id, part, n, seqs, priority, deliver_at, consumers
         from pgqueue.publications
         where stream_id = p_consumer.stream_id
           and publication_id >= v_next and publication_id <= coalesce(p_upto, 9223372036854775807)
           and (select count(*) from held) < p_limit  -- or else what is left in the holes comes first
         order by publication_id
         fetch first p_limit rows with ties)
    ), grouped as materialized (
        select priority, case when deliver_at > v_now then deliver_at end as due,
               consumers is null or p_consumer.consumer_id = any (consumers) as mine,
               count(*) filter (where in_gap) as in_gaps, count(*) filter (where not in_gap) as beyond,
               count(*) filter (where part = 0) as ids, min(publication_id) as id_lo, max(publication_id) as id_hi,
               sum(n) as n, min(lower(seqs)) as lo, max(upper(seqs)) as hi
        from new
        group by 1, 2, 3
    ), id as materialized (
        select coalesce(sum(in_gaps), 0) as in_gaps, coalesce(sum(beyond), 0) as beyond, sum(ids) as n, min(id_lo) as lo, max(id_hi) as hi from grouped
    ), merged as (
        select priority, due, int8multirange(int8range(lo, hi)) as seqs
        from grouped
        where mine and not exists (select from grouped where mine and hi - lo <> n)
        union all
        select priority, case when deliver_at > v_now then deliver_at end, range_agg(seqs)
        from new
        where exists (select from grouped where mine and hi - lo <> n)
          and (consumers is null or p_consumer.consumer_id = any (consumers))
        group by 1, 2
    ), run as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn,
                                               first_seq, n, seqs, not_visible_until)
        select p_consumer.consumer_id,
               case when m.due is not null and p_consumer.ordering = 'none' then 'delayed' else 'ready' end,
               case when p_consumer.ordering = 'none' then -m.priority else 0 end,
               m.priority, 0, v_cursor.turn + 1, v_cursor.turn + 1, c.first_seq, c.n, c.seqs, m.due
        from merged m cross join lateral pgqueue._chunks(m.seqs) c
        returning state, rank, not_visible_until
    )
    select case when id.n = id.hi - id.lo + 1 then int8multirange(int8range(id.lo, id.hi, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from new) end,
           id.in_gaps, id.beyond,
           (select array_agg(distinct rank) from run where state = 'ready'), (select min(not_visible_until) from run where state = 'delayed')
    into v_taken, v_in_gaps, v_beyond, v_ranks, v_due
    from id;

    if v_taken is not null then
        v_cursor.seen := v_cursor.seen + v_taken;
        v_cursor.turn := v_cursor.turn + 1;
        v_cursor.floors := pgqueue._lower_floors(
            v_cursor.floors, array(select (r, v_cursor.turn, 0)::pgqueue.floor from unnest(v_ranks) r
                                   where r <> all (array(select rank from unnest(v_cursor.floors)))));
    end if;
    v_cursor.due_floor := least(v_cursor.due_floor, v_due);
    v_cursor.more := greatest(v_in_gaps, v_beyond) >= p_limit;

    if v_in_gaps >= p_limit then
        return v_cursor;  -- not all holes were looked into: none may be closed or watched
    end if;
    if v_close <> '{}' then
        v_cursor.seen := v_cursor.seen + v_close;
        v_cursor.watched := v_cursor.watched - v_close;
        v_cursor.parked := v_cursor.parked - v_close;
    end if;
    if v_taken is null and v_close = '{}' and v_gaps = '{}' then
        return v_cursor;
    end if;

    v_gaps := int8multirange(int8range(1, coalesce(upper(v_cursor.seen), 1))) - v_cursor.seen;
    v_cursor.watched := v_cursor.watched * v_gaps;
    v_cursor.parked := v_cursor.parked * v_gaps;
    if v_cursor.watched <> '{}' and (select count(*) from unnest(v_gaps - v_cursor.parked)) > 64 then
        -- an old transaction keeps them open: do not pay for them with every claim
        v_cursor.parked := v_cursor.parked + v_cursor.watched;
        v_cursor.parked_below := greatest(v_cursor.parked_below, v_cursor.watched_below);
        v_cursor.parked_probe := v_now + interval '1 s';
        v_cursor.watched := '{}';
    end if;
    if v_cursor.watched = '{}' and v_gaps - v_cursor.parked <> '{}' then
        v_cursor.watched := v_gaps - v_cursor.parked;
        v_cursor.watched_below := case when v_has_id then pgqueue._fresh_xid() else pg_current_xact_id() end;
    end if;
    return v_cursor;
end $$;

-- The floors, not above the given places.
create or replace function pgqueue._lower_floors(p_floors pgqueue.floor[], p_places pgqueue.floor[]) returns pgqueue.floor[]
language plpgsql immutable
as $$
begin
    if coalesce(cardinality(p_places), 0) = 0 then
        return p_floors;
    elsif p_floors = '{}' and cardinality(p_places) = 1 then
        return p_places;
    end if;
    return (select array_agg((f.rank, f.turn, f.first_seq)::pgqueue.floor order by f.rank)
            from (select distinct on (rank) rank, turn, first_seq
                  from unnest(p_floors || p_places) order by rank, turn, first_seq) f);
end $$;

-- A consumer's cursor. Errors: PQ002 when the consumer was dropped meanwhile.
create or replace function pgqueue._cursor(p_consumer_id int) returns pgqueue.consumer_cursors
language plpgsql stable
as $$
declare
    v_cursor pgqueue.consumer_cursors;
begin
    select * into v_cursor from pgqueue.consumer_cursors where consumer_id = p_consumer_id order by version desc limit 1;
    if not found then
        raise exception 'the consumer was dropped' using errcode = 'PQ002', hint = 'Create it again.';
    end if;
    return v_cursor;
end $$;

-- Stores a cursor if it is not the stored one any more: a new version, and the one before deleted.
--   p_busy  something was claimed or settled; otherwise that leases were looked at is not worth a write
-- Needs the consumer's lock.
create or replace function pgqueue._save_cursor(p_stored pgqueue.consumer_cursors, p_cursor pgqueue.consumer_cursors,
                                                p_busy boolean) returns void
language plpgsql
as $$
begin
    if not p_busy then
        p_cursor.lease_probe := p_stored.lease_probe;
    end if;
    if p_cursor is distinct from p_stored then
        delete from pgqueue.consumer_cursors where consumer_id = p_stored.consumer_id and version = p_stored.version;
        p_cursor.version := p_stored.version + 1;
        insert into pgqueue.consumer_cursors select p_cursor.*;
    end if;
end $$;

-- Claiming: ready runs, in the order of the line, become a claim's.

-- Raises PQ007 unless each statement sees what was committed before it: claims and settlements decide by what they see
-- after they have a lock.
create or replace function pgqueue._check_isolation() returns void
language plpgsql stable
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claims and settlements need transaction isolation read committed, not %', current_setting('transaction_isolation')
            using errcode = 'PQ007', hint = 'begin transaction isolation level read committed';
    end if;
end $$;

-- What is due for a consumer before anything is claimed: expired leases are released, delays that are over end, and
-- new publications are taken, all bounded.
--   p_short  what was ready did not suffice. Otherwise leases are looked at once a second, and while more publications
--            wait than one take takes, none is taken: they are behind what is ready.
--   p_want   take until about this many messages came in, if there are so many
--   p_upto   no publication after this one; null: all
-- Returns the cursor as it is then; the caller stores it. Needs the consumer's lock.
create or replace function pgqueue._refresh(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_short boolean,
                                            p_want bigint, p_upto bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_now    timestamptz := clock_timestamp();
    v_lease  timestamptz;
    v_due    timestamptz;
    v_new    boolean;
    v_seen   int8multirange;
    v_wanted bigint := p_want;
begin
    if p_short or v_cursor.lease_probe <= v_now then
        v_lease := pgqueue._next_expiry(p_consumer.consumer_id);
        v_cursor.lease_probe := v_now + least(interval '1 s', p_consumer.visibility_timeout / 2);
        if v_lease <= v_now then
            v_cursor := pgqueue._expire(p_consumer, v_cursor, v_now);
        end if;
    end if;
    select (select not_visible_until from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and state = 'delayed' and not_visible_until >= v_cursor.due_floor
            order by not_visible_until limit 1),
           v_cursor.seen <> int8multirange(int8range(1, upper(v_cursor.seen)))
           or exists (select from pgqueue.publications
                      where stream_id = p_consumer.stream_id and publication_id >= coalesce(upper(v_cursor.seen), 1))
    into v_due, v_new;
    if v_due <= v_now then
        v_cursor := pgqueue._end_delays(p_consumer, v_cursor, v_now);
    end if;
    if v_new and (p_short or not v_cursor.more) then
        for i in 1..100 loop
            v_seen := v_cursor.seen;
            v_cursor := pgqueue._take(p_consumer, v_cursor, p_upto, 10000);
            v_wanted := v_wanted - 10000;
            exit when not v_cursor.more or v_cursor.seen = v_seen or v_wanted <= 0;
        end loop;
    end if;
    return v_cursor;
end $$;

-- When the first lease of a consumer ends or ended; null: it has no claims.
create or replace function pgqueue._next_expiry(p_consumer_id int) returns timestamptz
language plpgsql stable
as $$
begin
    return (select lease_until from pgqueue.claims where consumer_id = p_consumer_id and live order by lease_until limit 1);
end $$;

-- Releases the expired claims of a consumer, at most 100. Needs the consumer's lock; locks those claims.
create or replace function pgqueue._expire(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_now timestamptz)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_claim  pgqueue.claims;
begin
    for v_claim in
        select * from pgqueue.claims
        where consumer_id = p_consumer.consumer_id and live and lease_until <= p_now
        order by lease_until limit 100
        for update skip locked  -- one that is locked is being settled or extended
    loop
        v_cursor := pgqueue._return(p_consumer, v_cursor, v_claim, null, interval '0', 'the visibility timeout passed');
        -- a reader's claim is kept, so that it can tell "taken over" from "gone"; a worker's was deleted with its last message
        update pgqueue.claims set live = false, settled = v_claim.settled where claim_id = v_claim.claim_id;
    end loop;
    return v_cursor;
end $$;

-- Makes the delayed runs that are due ready, at most 1,000. Needs the consumer's lock.
create or replace function pgqueue._end_delays(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_now timestamptz) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_places pgqueue.floor[];
    v_last   timestamptz;
    v_n      int;
begin
    with due as (
        select ctid, key, not_visible_until from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'delayed'
          and not_visible_until >= v_cursor.due_floor and not_visible_until <= p_now
        order by not_visible_until limit 1000
        for update
    ), ended as (
        update pgqueue.consumer_messages m
        set state = case when (select true from pgqueue.consumer_messages b
                               where b.consumer_id = p_consumer.consumer_id and b.key = due.key and b.state = 'claimed'
                                 and b.claim_id >= v_cursor.first_claim limit 1)
                         then 'waiting' else 'ready' end,
            turn = case when due.key is null then m.position else v_cursor.turn + 1 end,
            not_visible_until = null
        from due
        where m.ctid = due.ctid
        returning m.state, m.rank, m.turn, m.first_seq, due.not_visible_until
    )
    select array_agg((rank, turn, first_seq)::pgqueue.floor) filter (where state = 'ready'), max(not_visible_until), count(*)
    into v_places, v_last, v_n
    from ended;
    v_cursor.turn := v_cursor.turn + 1;
    v_cursor.floors := pgqueue._lower_floors(v_cursor.floors, v_places);
    v_cursor.due_floor := case when v_n < 1000 then p_now else v_last end;
    return v_cursor;
end $$;

-- Serves a claim from the ready runs of a consumer with ordering=none, in the order of the line.
--   p_want  messages at most
-- Passes over runs that other claimers hold. Returns how many messages it got. Locks the runs it takes, one at a time.
create or replace function pgqueue._serve(p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint) returns bigint
language plpgsql
as $$
declare
    v_floor pgqueue.floor;
    v_run   record;
    v_n     bigint := 0;
begin
    foreach v_floor in array p_cursor.floors loop
        while v_n < p_want loop
            update pgqueue.consumer_messages
            set state = 'claimed', claim_id = p_claim_id, deliver_count = deliver_count + 1, not_visible_until = null,
                last_delivered_at = clock_timestamp()
            where ctid = (select ctid from pgqueue.consumer_messages
                          where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = v_floor.rank
                            and (turn, first_seq) >= (v_floor.turn, v_floor.first_seq)
                          order by turn, first_seq limit 1
                          for update skip locked)
              and n <= p_want - v_n
            returning n, turn, first_seq into v_run;
            if found then
                v_n := v_n + v_run.n;
                v_floor.turn := v_run.turn;
                v_floor.first_seq := v_run.first_seq + 1;
                continue;
            end if;
            -- there is none, or it is too big
            select ctid, n into v_run from pgqueue.consumer_messages
            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = v_floor.rank
              and (turn, first_seq) >= (v_floor.turn, v_floor.first_seq)
            order by turn, first_seq limit 1 for update skip locked;
            exit when not found;
            if v_run.n > p_want - v_n then
                perform pgqueue._cut(v_run.ctid, p_want - v_n);  -- now the same place holds a run that fits
            end if;
        end loop;
        exit when v_n >= p_want;
    end loop;
    return v_n;
end $$;

-- Waits a moment for the first ready run of a consumer with ordering=none, which another claimer holds: that claimer may itself wait for
-- the lock that the caller has. Returns whether the run was let go. Locks it, if it is still ready.
create or replace function pgqueue._await_run(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
set lock_timeout = '200ms'
as $$
begin
    perform from pgqueue.consumer_messages
    where ctid = (select ctid from pgqueue.consumer_messages
                  where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = p_cursor.floors[1].rank
                    and (turn, first_seq) >= (p_cursor.floors[1].turn, p_cursor.floors[1].first_seq)
                  order by turn, first_seq limit 1)
    for update;
    return true;
exception when lock_not_available or deadlock_detected then
    return false;
end $$;

-- Inserts a run like p_run with other messages, in runs of at most 64 ranges; nothing if there are none.
-- Returns the number of messages.
create or replace function pgqueue._insert_run(p_run pgqueue.consumer_messages, p_seqs int8multirange) returns bigint
language plpgsql
as $$
declare
    v_n bigint;
begin
    if p_seqs = int8multirange(range_merge(p_seqs)) and p_seqs <> '{}' then
        p_run.seqs := p_seqs;
        p_run.first_seq := lower(p_seqs);
        p_run.n := upper(p_seqs) - lower(p_seqs);
        insert into pgqueue.consumer_messages select p_run.*;
        return p_run.n;
    end if;
    with run as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs, key,
                                               claim_id, not_visible_until, last_delivered_at, last_error)
        select p_run.consumer_id, p_run.state, p_run.rank, p_run.priority, p_run.deliver_count, p_run.position, p_run.turn,
               c.first_seq, c.n, c.seqs, p_run.key, p_run.claim_id, p_run.not_visible_until, p_run.last_delivered_at, p_run.last_error
        from pgqueue._chunks(p_seqs) c
        returning n
    )
    select coalesce(sum(n), 0) into v_n from run;
    return v_n;
end $$;

-- Cuts pieces of p_n messages off the front of a ready run: one, and for small claims some more, so that the next
-- claimers find runs that fit, and other claimers runs that are not locked. Locks the run.
create or replace function pgqueue._cut(p_ctid tid, p_n bigint) returns void
language plpgsql
as $$
declare
    v_run   pgqueue.consumer_messages;
    v_rest  int8multirange;
    v_parts int8multirange[];
    v_count int;
begin
    delete from pgqueue.consumer_messages where ctid = p_ctid returning * into v_run;
    v_count := least((v_run.n - 1) / p_n, case when p_n <= 256 then 64 else 1 end);
    if upper(v_run.seqs) - v_run.first_seq = v_run.n then
        v_parts := array(select int8multirange(int8range(v_run.first_seq + i * p_n, v_run.first_seq + (i + 1) * p_n))
                         from generate_series(0, v_count - 1) i);
        v_rest := int8multirange(int8range(v_run.first_seq + v_count * p_n, upper(v_run.seqs)));
    else
        v_rest := v_run.seqs;
        for i in 1..v_count loop
            v_parts[i] := pgqueue._below(v_rest, pgqueue._bound_of(v_rest, p_n));
            v_rest := v_rest - v_parts[i];
        end loop;
    end if;
    insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs,
                                           last_delivered_at, last_error)
    select v_run.consumer_id, v_run.state, v_run.rank, v_run.priority, v_run.deliver_count, v_run.position, v_run.turn,
           lower(p.seqs), case when i <= v_count then p_n else v_run.n - v_count * p_n end, p.seqs,
           v_run.last_delivered_at, v_run.last_error
    from unnest(v_parts || v_rest) with ordinality p (seqs, i);
end $$;

-- The floors raised to the first ready runs that are there. Exact, because runs become ready only under the
-- consumer's lock; a run that another claimer is cutting is still seen where it was. Needs that lock.
create or replace function pgqueue._raise_floors(p_cursor pgqueue.consumer_cursors) returns pgqueue.floor[]
language plpgsql stable
as $$
begin
    return (
        select coalesce(array_agg((f.rank, m.turn, m.first_seq)::pgqueue.floor order by f.rank), '{}')
        from unnest(p_cursor.floors) f
        cross join lateral (select turn, first_seq from pgqueue.consumer_messages
                            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = f.rank
                              and (turn, first_seq) >= (f.turn, f.first_seq)
                            order by turn, first_seq limit 1) m);
end $$;

-- Serves a claim under the consumer's lock: from what is ready; then, if that is short, from what else can be had.
--   p_want  messages at most
--   p_upto  no publication after this one; null: all
-- Returns the cursor, which the caller stores, and how many messages the claim got.
create or replace function pgqueue._fill(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint,
                                         p_want bigint, p_upto bigint,
                                         out o_cursor pgqueue.consumer_cursors, out o_n bigint)
language plpgsql
as $$
declare
    v_n    bigint;
    v_stop timestamptz;  -- no more waiting from then on: well before deadlock_timeout
begin
    o_cursor := p_cursor;
    o_n := 0;
    for v_pass in 1..100 loop  -- two; more only to get past publications of which nothing is for this consumer, or for now
        o_cursor := pgqueue._refresh(p_consumer, o_cursor, v_pass > 1, p_want - o_n, p_upto);
        if p_consumer.ordering <> 'none' then
            o_cursor := pgqueue._serve_ordered(p_consumer, o_cursor, p_claim_id, p_want - o_n);
            o_n := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed');
        elsif o_cursor.floors <> '{}' then
            v_n := pgqueue._serve(o_cursor, p_claim_id, p_want - o_n);
            o_cursor.floors := pgqueue._raise_floors(o_cursor);
            -- all that is ready is held by other claimers: wait for what they leave
            while v_n = 0 and o_n = 0 and o_cursor.floors <> '{}' loop
                v_stop := coalesce(v_stop, clock_timestamp() + interval '300 ms');
                exit when clock_timestamp() > v_stop;
                if not pgqueue._await_run(o_cursor) then
                    v_stop := '-infinity';
                end if;
                v_n := pgqueue._serve(o_cursor, p_claim_id, p_want);
                o_cursor.floors := pgqueue._raise_floors(o_cursor);
            end loop;
            o_n := o_n + v_n;
        end if;
        exit when o_n >= p_want or (o_n > 0 and not o_cursor.more);
        -- what is ready and could not be had (behind another claim) stays in the way of what would be taken
        exit when v_pass > 1 and (o_n > 0 or not o_cursor.more or pgqueue._raise_floors(o_cursor) <> '{}');
    end loop;
end $$;

-- Records a claim. Its lease is computed here, after all waiting.
create or replace function pgqueue._open_claim(p_consumer pgqueue.consumers, p_claim_id bigint, p_n bigint,
                                               p_visibility_timeout interval, p_reader uuid) returns void
language plpgsql
as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_timeout interval := coalesce(p_visibility_timeout, p_consumer.visibility_timeout);
begin
    insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout, n, remaining, reader, seqs)
    overriding system value
    values (p_claim_id, p_consumer.consumer_id, p_consumer.ordering <> 'none', v_now, v_now + v_timeout, v_timeout, p_n, p_n, p_reader,
            case when p_reader is not null then
                (select range_agg(seqs) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') end);
end $$;

-- The common claim of a consumer with ordering=none, in one statement, all or nothing: no lease has to be looked for, nothing is due
-- or new, and the next run has just this size. It needs no lock of the consumer, since it changes nothing of the cursor.
-- Returns the claim; null when it takes more than that (or the consumer does not exist). Locks the run.
create or replace function pgqueue._claim_next_run(p_stream text, p_consumer text, p_n int, p_visibility_timeout interval) returns bigint
language plpgsql
as $$
declare
    v_claim_id bigint;
begin
    with next as materialized (
        select run.ctid, nextval('pgqueue.claims_claim_id_seq') as claim_id, c.consumer_id,
               coalesce(p_visibility_timeout, c.visibility_timeout) as visibility_timeout
        from pgqueue.streams s
        join pgqueue.consumers c on c.stream_id = s.stream_id and c.name = p_consumer
        cross join lateral (select seen, more, floors[1] as line, due_floor, lease_probe from pgqueue.consumer_cursors
                            where consumer_id = c.consumer_id order by version desc limit 1) cursor
        cross join lateral (select ctid from pgqueue.consumer_messages
                            where consumer_id = c.consumer_id and state = 'ready' and rank = (line).rank
                              and (turn, first_seq) >= ((line).turn, (line).first_seq)
                            order by turn, first_seq limit 1
                            for update skip locked) run
        where s.name = p_stream and c.ordering = 'none' and lease_probe > clock_timestamp()
          and case when more then true
                   else seen = int8multirange(int8range(1, upper(seen)))
                        and not exists (select from pgqueue.publications where stream_id = c.stream_id and publication_id >= upper(seen)) end
          and ((select not_visible_until from pgqueue.consumer_messages
                where consumer_id = c.consumer_id and state = 'delayed' and not_visible_until >= due_floor
                order by not_visible_until limit 1) <= clock_timestamp()) is not true
    ), claimed as (
        update pgqueue.consumer_messages m
        set state = 'claimed', claim_id = next.claim_id, deliver_count = deliver_count + 1, not_visible_until = null,
            last_delivered_at = clock_timestamp()
        from next where m.ctid = next.ctid and m.n = p_n
        returning next.*
    )
    insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout, n, remaining)
    overriding system value
    select claim_id, consumer_id, false, clock_timestamp(), clock_timestamp() + visibility_timeout, visibility_timeout, p_n, p_n
    from claimed
    returning claim_id into v_claim_id;
    return v_claim_id;
end $$;

-- Claims at most p_max messages for a consumer; the payloads are not read. Bounded: a claim takes some 10,000 new
-- publications at most, or 1,000,000 of which nothing is for this consumer.
--   p_visibility_timeout  null: the consumer's
--   p_ack                 a claim to acknowledge first, as ack does, in the same transaction; null: none
-- Returns the claim and its number of messages, or no row when there is nothing.
-- Errors: PQ001, PQ002, PQ003, PQ007. Locks, to the end of the transaction: those of ack; the runs it takes; unless the next run is
-- all that it needs the consumer's lock, except that ordering=none makes do with what is ready while another claimer has it.
create or replace function pgqueue.claim(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                         p_ack bigint default null)
returns table (claim_id bigint, n bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    v_consumer pgqueue.consumers;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._check_isolation();
    end if;
    if p_max is null or p_max < 1 then
        raise exception 'p_max is at least 1, not %', coalesce(p_max::text, 'null') using errcode = 'PQ003';
    end if;
    if p_visibility_timeout is not null then
        perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    end if;
    if p_ack is not null then
        perform pgqueue._ack(p_ack);
    end if;
    begin
        claim_id := pgqueue._claim_next_run(p_stream, p_consumer, p_max, p_visibility_timeout);
        n := p_max;
        if claim_id is null then
            v_consumer := pgqueue._consumer(p_stream, p_consumer);
            claim_id := nextval('pgqueue.claims_claim_id_seq');
            n := 0;
            if v_consumer.ordering = 'none' and not pgqueue._try_lock_consumer(v_consumer.consumer_id) then
                -- another claimer is at it: what is ready will do
                n := pgqueue._serve(pgqueue._cursor(v_consumer.consumer_id), claim_id, p_max);
                if n = 0 then
                    raise exception using errcode = 'PQ099';
                end if;
                perform pgqueue._open_claim(v_consumer, claim_id, n, p_visibility_timeout, null);
            end if;
        end if;
    exception when sqlstate 'PQ099' then  -- (PQ000 would stand for all of class PQ)
        null;  -- unlocks the runs that it looked at and that were somebody else's, before it waits for the lock
    end;
    if n = 0 then
        n := pgqueue._claim_in_turn(v_consumer, claim_id, p_max, p_visibility_timeout);
    end if;
    if n > 0 then
        return next;
    end if;
end $$;

-- Claims with the consumer's lock, whatever is there to be had; see claim. Returns the number of messages.
create or replace function pgqueue._claim_in_turn(p_consumer pgqueue.consumers, p_claim_id bigint, p_max int, p_visibility_timeout interval)
returns bigint
language plpgsql
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_fill   record;
begin
    perform pgqueue._lock_consumer(p_consumer.consumer_id);
    v_stored := pgqueue._cursor(p_consumer.consumer_id);
    v_fill := pgqueue._fill(p_consumer, v_stored, p_claim_id, p_max, null);
    perform pgqueue._save_cursor(v_stored, v_fill.o_cursor, v_fill.o_n > 0);
    if v_fill.o_n > 0 then
        perform pgqueue._open_claim(p_consumer, p_claim_id, v_fill.o_n, p_visibility_timeout, null);
    end if;
    return v_fill.o_n;
end $$;

-- Claims at most p_max messages and reads them, in the order of delivery.
--   p_visibility_timeout, p_ack  as in claim
-- Returns a row per message; the claim is the same in all of them. Errors and locks: as claim.
create or replace function pgqueue.receive(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                           p_ack bigint default null)
returns table (claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int, deliver_count int,
               inserted_at timestamptz)
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_claim_id bigint;
    v_stream   int;
begin
    select c.claim_id into v_claim_id from pgqueue.claim(p_stream, p_consumer, p_max, p_visibility_timeout, p_ack) c;
    if not found then
        return;
    end if;
    v_stream := (select stream_id from pgqueue.streams where name = p_stream);
    -- by name of the partition: a plan over the parent would lock all streams' partitions
    return query execute format($q$
        select r.claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, r.priority, r.deliver_count, m.inserted_at
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral (select * from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)) m
        where r.claim_id = $1 and r.state = 'claimed'
        order by r.rank, r.position, m.seq $q$, v_stream) using v_claim_id;
end $$;

-- Claiming for ordered consumers: a message is not delivered while an earlier one of its key is unsettled elsewhere.
--
-- Runs wait in one line in the order of arrival, their keys mixed. While nobody else has a claim and no key stands
-- aside, a claim takes from the front and needs to know no key: one reader that takes everything, as Spark does, pays
-- nothing for the order. Only when a second claimer comes are the runs of the open claim split by key, and when the line
-- reaches a message whose key is busy, delayed or failed, it is set aside into runs of that key:
--
--     waiting  behind an earlier run of its key, or its key is claimed
--     delayed  the first of its key, which is idle; not visible yet
--     ready    the first of its key, which is idle; has its own turn in the line of rank -1
--
-- Runs are set aside as waiting, and only _promote makes one delayed or ready.
--
-- Whether a key is busy is asked with a "limit 1" in place of "exists", which Postgres would now and then answer by reading
-- and hashing all claimed runs.
--
-- So the messages of a key are, in order: claimed, then aside, then in the line. All transitions hold the consumer's lock.
-- With ordering=stream all messages have one key, ''.

-- The key that orders a message of a consumer, as SQL over a message m.
create or replace function pgqueue._key_of(p_consumer pgqueue.consumers) returns text
language sql immutable
as $$ select case p_consumer.ordering when 'stream' then $q$''::text$q$ else 'm.key' end $$;

-- Splits the mixed runs of a claim by key.
--   p_keys  only these keys leave the mixed runs; null: all
create or replace function pgqueue._split_by_key(p_consumer pgqueue.consumers, p_claim_id bigint, p_keys text[]) returns void
language plpgsql
as $$
begin
    execute format($q$
        with mixed as (
            delete from pgqueue.consumer_messages where claim_id = $1 and state = 'claimed' and key is null returning *
        ), element as (
            select r.*, m.seq, case when $2 is null or %2$s = any ($2) then %2$s end as own_key
            from mixed r
            cross join lateral unnest(r.seqs) g
            cross join lateral (select seq, key from pgqueue.messages_%1$s where seq >= lower(g) and seq < upper(g)) m
        ), run as (
            select consumer_id, state, rank, priority, deliver_count, position, turn, own_key, claim_id, last_delivered_at,
                   last_error, range_agg(int8range(seq, seq, '[]')) as seqs
            from element
            group by consumer_id, state, rank, priority, deliver_count, position, turn, own_key, claim_id, last_delivered_at, last_error
        )
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs,
                                               key, claim_id, last_delivered_at, last_error)
        select consumer_id, state, rank, priority, deliver_count, position, turn, c.first_seq, c.n, c.seqs,
               own_key, claim_id, last_delivered_at, last_error
        from run cross join lateral pgqueue._chunks(run.seqs) c $q$,
        p_consumer.stream_id, pgqueue._key_of(p_consumer)) using p_claim_id, p_keys;
end $$;

-- Makes the first run of each idle key among p_keys ready, or delayed if it is. Needs the consumer's lock.
create or replace function pgqueue._promote(p_cursor pgqueue.consumer_cursors, p_keys text[]) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now timestamptz := clock_timestamp();
    v_n   bigint;
    v_due timestamptz;
begin
    if p_cursor.aside = 0 then
        return p_cursor;
    end if;
    with head as (
        select h.ctid, h.not_visible_until, row_number() over (order by h.position, h.first_seq) as i
        from (select distinct k as key from unnest(p_keys) k where k is not null) k
        cross join lateral (
            select m.ctid, m.state, m.not_visible_until, m.position, m.first_seq from pgqueue.consumer_messages m
            where m.consumer_id = p_cursor.consumer_id and m.key = k.key and m.state <> 'claimed'
            order by m.position, m.first_seq limit 1) h
        where h.state = 'waiting'
          and (select true from pgqueue.consumer_messages b
               where b.consumer_id = p_cursor.consumer_id and b.key = k.key and b.state = 'claimed'
                 and b.claim_id >= p_cursor.first_claim limit 1) is null
    ), promoted as (
        update pgqueue.consumer_messages m
        set state = case when m.not_visible_until > v_now then 'delayed' else 'ready' end, turn = p_cursor.turn + head.i,
            not_visible_until = case when m.not_visible_until > v_now then m.not_visible_until end
        from head where m.ctid = head.ctid
        returning m.not_visible_until
    )
    select count(*), min(not_visible_until) into v_n, v_due from promoted;
    if v_n > 0 then
        p_cursor.due_floor := least(p_cursor.due_floor, v_due);
        p_cursor.floors := pgqueue._lower_floors(p_cursor.floors, array[(-1, p_cursor.turn + 1, 0)::pgqueue.floor]);
        p_cursor.turn := p_cursor.turn + v_n;
    end if;
    return p_cursor;
end $$;

-- Serves a claim of an ordered consumer. Needs the consumer's lock.
--   p_want  messages at most
-- Returns the cursor; the claim counts as open in it if it has any message.
create or replace function pgqueue._serve_ordered(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  p_claim_id bigint, p_want bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_had    bigint;  -- what the claim has, from an earlier pass
    v_got    bigint;
    v_others boolean; -- other claims are open
begin
    v_had := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed');
    v_others := v_cursor.open_claims > (case when v_had > 0 then 1 else 0 end);
    if v_others and p_consumer.ordering = 'stream' then
        return v_cursor;
    end if;
    if v_others and v_cursor.mixed_claim is not null then
        perform pgqueue._split_by_key(p_consumer, v_cursor.mixed_claim, null);
        v_cursor.mixed_claim := null;
    end if;

    -- keys that stand aside and the line are served first in turn, so that neither starves
    if v_cursor.heads_first or p_consumer.ordering = 'stream' then
        v_cursor := pgqueue._serve_heads(v_cursor, p_claim_id, p_want);
        v_got := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') - v_had;
        v_cursor := pgqueue._serve_line(p_consumer, v_cursor, p_claim_id, p_want - v_got, v_others);
    else
        v_cursor := pgqueue._serve_line(p_consumer, v_cursor, p_claim_id, p_want, v_others);
        v_got := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') - v_had;
        v_cursor := pgqueue._serve_heads(v_cursor, p_claim_id, p_want - v_got);
    end if;
    v_got := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') - v_had;

    if v_got > 0 then
        if v_had = 0 then
            v_cursor.first_claim := case when v_others then least(v_cursor.first_claim, p_claim_id) else p_claim_id end;
            v_cursor.open_claims := v_cursor.open_claims + 1;
        end if;
        if not v_others then
            v_cursor.mixed_claim := p_claim_id;
        end if;
        v_cursor.floors := pgqueue._raise_floors(v_cursor);
        v_cursor.heads_first := not v_cursor.heads_first;
    end if;
    return v_cursor;
end $$;

-- Claims keys that stand aside and are ready, each with what follows in it while there is room.
create or replace function pgqueue._serve_heads(p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_left bigint := p_want;
    v_now  timestamptz := clock_timestamp();
    v_tid  tid;
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
begin
    while v_left > 0 and p_cursor.aside > 0 loop
        select m.ctid into v_tid
        from unnest(p_cursor.floors) f
        cross join lateral (select ctid from pgqueue.consumer_messages
                            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = -1
                              and (turn, first_seq) >= (f.turn, f.first_seq)
                            order by turn, first_seq limit 1) m
        where f.rank = -1;
        exit when not found;
        loop
            delete from pgqueue.consumer_messages where ctid = v_tid returning * into v_run;
            v_part := v_run.seqs;
            if v_run.n > v_left then
                v_part := pgqueue._below(v_run.seqs, pgqueue._bound_of(v_run.seqs, v_left));
                v_run.state := 'waiting';
                perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
            else
                p_cursor.aside := p_cursor.aside - 1;
            end if;
            v_left := v_left - least(v_run.n, v_left);
            v_run.state := 'claimed';
            v_run.claim_id := p_claim_id;
            v_run.deliver_count := v_run.deliver_count + 1;
            v_run.not_visible_until := null;
            v_run.last_delivered_at := v_now;
            perform pgqueue._insert_run(v_run, v_part);
            exit when v_left = 0;
            select ctid into v_tid from pgqueue.consumer_messages
            where consumer_id = p_cursor.consumer_id and key = v_run.key and state <> 'claimed'
            order by position, first_seq limit 1;
            exit when not found
                or (select not_visible_until > v_now from pgqueue.consumer_messages where ctid = v_tid);
        end loop;
    end loop;
    return p_cursor;
end $$;

-- Claims from the front of the line.
--   p_others  other claims are open: their keys are busy, and the claim's own runs are split by key
create or replace function pgqueue._serve_line(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint,
                                               p_want bigint, p_others boolean) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_left  bigint := p_want;
    v_slack bigint := least(4 + p_want / 4, 100);  -- as many more, in place of those that are set aside
    v_now   timestamptz := clock_timestamp();
    v_turn  bigint;
    v_n     bigint;
    v_first bigint;  -- where what is left of the turn begins: dead rows lie before it
    v_later bigint;  -- the first message of the turn that may be delayed
    v_below bigint;
    v_walk  record;
begin
    while v_left > 0 loop
        select m.turn, m.first_seq into v_turn, v_first
        from unnest(p_cursor.floors) f
        cross join lateral (select turn, first_seq from pgqueue.consumer_messages
                            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = 0
                              and (turn, first_seq) >= (f.turn, f.first_seq)
                            order by turn, first_seq limit 1) m
        where f.rank = 0;
        exit when not found;
        -- the runs of one turn interleave: they go by seq
        select sum(n), min(first_seq) filter (where not_visible_until > v_now) into v_n, v_later
        from pgqueue.consumer_messages
        where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = 0 and turn = v_turn and first_seq >= v_first;

        if p_consumer.ordering = 'stream' then
            exit when p_cursor.aside > 0 or v_first = v_later;
            v_below := least(pgqueue._line_bound(p_cursor.consumer_id, v_turn, v_first, v_n, v_left), v_later);
            v_left := v_left - pgqueue._claim_below(p_cursor.consumer_id, v_turn, v_first, v_below, p_claim_id);
        elsif p_cursor.aside = 0 and not p_others and v_later is null then
            v_below := pgqueue._line_bound(p_cursor.consumer_id, v_turn, v_first, v_n, v_left);
            v_left := v_left - pgqueue._claim_below(p_cursor.consumer_id, v_turn, v_first, v_below, p_claim_id);
        else
            v_below := pgqueue._line_bound(p_cursor.consumer_id, v_turn, v_first, v_n, v_left + v_slack);
            select * into v_walk from pgqueue._walk(p_consumer, p_cursor, v_turn, v_first, v_below, p_claim_id, v_left, p_others, v_now);
            v_left := v_left - v_walk.o_claimed;
            p_cursor.aside := p_cursor.aside + v_walk.o_aside;
            p_cursor.due_floor := least(p_cursor.due_floor, v_now);  -- what it set aside as delayed is due later than now
            if v_walk.o_keys <> '{}' then
                if not p_others then
                    perform pgqueue._split_by_key(p_consumer, p_claim_id, v_walk.o_keys);
                end if;
                p_cursor := pgqueue._promote(p_cursor, v_walk.o_keys);
            end if;
            exit when v_slack >= 10000 and v_left < p_want;  -- enough for one claim
            v_slack := least(v_slack * 4, 10000);
        end if;
    end loop;
    return p_cursor;
end $$;

-- The bound below which the runs of a turn in the line, from p_first, have p_room messages; beyond all if they have no more.
create or replace function pgqueue._line_bound(p_consumer_id int, p_turn bigint, p_first bigint, p_n bigint, p_room bigint) returns bigint
language plpgsql stable
as $$
declare
    v_below bigint := 9223372036854775807;
begin
    if p_n <= p_room then
        return v_below;
    end if;
    -- from the first runs that suffice; then once more with the runs that begin below that bound
    select pgqueue._bound_of(range_agg(seqs), p_room) into v_below
    from (select seqs, sum(n) over (order by first_seq) - n as before
          from pgqueue.consumer_messages
          where consumer_id = p_consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first) r
    where before < p_room;
    select pgqueue._bound_of(range_agg(seqs), p_room) into v_below
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first and first_seq < v_below;
    return v_below;
end $$;

-- Claims the messages of a turn in the line, from p_first, below a bound, keys mixed. Returns how many.
create or replace function pgqueue._claim_below(p_consumer_id int, p_turn bigint, p_first bigint, p_below bigint, p_claim_id bigint) returns bigint
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
    v_n    bigint := 0;
begin
    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first and first_seq < p_below
        returning *
    loop
        v_part := pgqueue._below(v_run.seqs, p_below);
        if v_part <> v_run.seqs then
            perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
        end if;
        v_run.state := 'claimed';
        v_run.claim_id := p_claim_id;
        v_run.deliver_count := v_run.deliver_count + 1;
        v_run.not_visible_until := null;
        v_run.last_delivered_at := clock_timestamp();
        v_n := v_n + pgqueue._insert_run(v_run, v_part);
    end loop;
    return v_n;
end $$;

-- Walks the messages of a turn in the line, from p_first, below a bound, by seq: claims those whose key is free and sets the others
-- aside, until p_want are claimed.
-- Returns how many were claimed, how many runs were set aside, and for which keys.
create or replace function pgqueue._walk(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_turn bigint, p_first bigint, p_below bigint,
                                         p_claim_id bigint, p_want bigint, p_split boolean, p_now timestamptz,
                                         out o_claimed bigint, out o_aside bigint, out o_keys text[])
language plpgsql
set enable_hashjoin = on
set enable_nestloop = off
as $$
declare
    v_element record;
    v_stop    bigint;
    v_run     pgqueue.consumer_messages;
begin
    -- only this much is planned again by each call
    execute format($q$
        select array_agg(m.seq) as seq, array_agg(%2$s) as key, array_agg(r.priority) as priority,
               array_agg(r.deliver_count) as deliver_count, array_agg(r.position) as position,
               array_agg(r.not_visible_until) as not_visible_until, array_agg(r.last_error) as last_error
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral (select seq, key from pgqueue.messages_%1$s where seq >= lower(g) and seq < least(upper(g), $3)) m
        where r.consumer_id = $1 and r.state = 'ready' and r.rank = 0 and r.turn = $2 and r.first_seq >= $4 and r.first_seq < $3 $q$,
        p_consumer.stream_id, pgqueue._key_of(p_consumer))
    into v_element using p_consumer.consumer_id, p_turn, p_below, p_first;

    with element as materialized (
        select *, coalesce(not_visible_until > p_now, false) as later
        from unnest(v_element.seq, v_element.key, v_element.priority, v_element.deliver_count, v_element.position,
                    v_element.not_visible_until, v_element.last_error)
             e (seq, key, priority, deliver_count, position, not_visible_until, last_error)
    ), busy as materialized (
        select k.key from (select distinct key from element where key is not null) k
        where (select true from pgqueue.consumer_messages c
               where c.consumer_id = p_consumer.consumer_id and c.key = k.key and c.state = 'claimed'
                 and c.claim_id >= p_cursor.first_claim and c.claim_id <> p_claim_id limit 1)
           or (select true from pgqueue.consumer_messages c
               where c.consumer_id = p_consumer.consumer_id and c.key = k.key and c.state <> 'claimed' limit 1)
    ), judged as (
        select e.*,
               case when e.key is null then e.later
                    else bool_or(b.key is not null or e.later) over (partition by e.key order by e.seq) end as blocked
        from element e left join busy b on b.key = e.key
    ), counted as (
        select *, count(*) filter (where not blocked) over (order by seq) as free from judged
    ), walked as materialized (
        select * from counted where free < p_want or (free = p_want and not blocked)
    ), claimed as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n,
                                               seqs, key, claim_id, last_delivered_at, last_error)
        select p_consumer.consumer_id, 'claimed', 0, r.priority, r.deliver_count + 1, r.position, r.position, c.first_seq, c.n, c.seqs,
               r.own_key, p_claim_id, p_now, r.last_error
        from (select priority, deliver_count, position, last_error, case when p_split then key end as own_key,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from walked where not blocked group by 1, 2, 3, 4, 5) r
        cross join lateral pgqueue._chunks(r.seqs) c
        returning n
    ), aside as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n,
                                               seqs, key, not_visible_until, last_error)
        select p_consumer.consumer_id, case when r.key is null then 'delayed' else 'waiting' end, case when r.key is null then 0 else -1 end,
               r.priority, r.deliver_count, r.position, r.position, c.first_seq, c.n, c.seqs, r.key, r.not_visible_until, r.last_error
        from (select priority, deliver_count, position, last_error, key, not_visible_until, island,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by seq)
                           - row_number() over (partition by key, priority, deliver_count, not_visible_until, last_error order by seq) as island
                    from walked where blocked) i
              group by priority, deliver_count, position, last_error, key, not_visible_until, island) r
        cross join lateral pgqueue._chunks(r.seqs) c
        returning key
    )
    select case when (select count(*) from walked where not blocked) < p_want then p_below - 1 else (select max(seq) from walked) end,
           (select coalesce(sum(n), 0) from claimed),
           (select count(*) from aside where key is not null),
           array(select distinct key from aside where key is not null)
    into v_stop, o_claimed, o_aside, o_keys;

    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first and first_seq <= v_stop
        returning *
    loop
        perform pgqueue._insert_run(v_run, v_run.seqs - int8multirange(int8range(null, v_stop, '[]')));
    end loop;
end $$;

-- Settling: acknowledge, return, extend, dead-letter. Each is fenced by the live claim: a claim that ended changes
-- nothing, answers 0 and warns.
--
-- A claim whose lease is over is live until another claimer released it: the owner that comes back first keeps it.

-- Warns that a claim is not live.
create or replace function pgqueue._warn_not_live(p_claim_id bigint) returns void
language plpgsql
as $$
begin
    raise warning 'claim % is not live: it was settled, or its visibility timeout passed and another claimer took over; nothing was changed',
                  coalesce(p_claim_id::text, 'null');
end $$;

-- Locks a live claim, for ordered consumers (and with p_line, for what puts runs back in the line) after the consumer's
-- lock. Returns the claim; null and a warning when it is not live.
create or replace function pgqueue._lock_claim(p_claim_id bigint, p_line boolean) returns pgqueue.claims
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    select * into v_claim from pgqueue.claims where claim_id = p_claim_id;
    if found and (p_line or v_claim.ordered) then
        perform pgqueue._lock_consumer(v_claim.consumer_id);
    end if;
    select * into v_claim from pgqueue.claims where claim_id = p_claim_id for update;
    if not found or not v_claim.live then
        perform pgqueue._warn_not_live(p_claim_id);
        return null;
    end if;
    return v_claim;
end $$;

-- Records that the claim has p_left messages now, and ends it when it has none.
--   p_keys  keys of an ordered consumer that may have become idle
-- Returns the cursor; the caller stores it. Needs the claim's lock, and for ordered consumers the consumer's.
create or replace function pgqueue._shrink_claim(p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims, p_left bigint, p_keys text[])
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    if p_claim.reader is null and p_left = 0 then
        delete from pgqueue.claims where claim_id = p_claim.claim_id;
    else
        update pgqueue.claims set live = p_left > 0, remaining = p_left, settled = settled + p_claim.remaining - p_left
        where claim_id = p_claim.claim_id;
    end if;
    if p_claim.ordered then
        if p_left = 0 and p_claim.remaining > 0 then
            p_cursor.open_claims := p_cursor.open_claims - 1;
            p_cursor.mixed_claim := nullif(p_cursor.mixed_claim, p_claim.claim_id);
            if p_cursor.first_claim = p_claim.claim_id then
                p_cursor.first_claim := coalesce(
                    (select claim_id from pgqueue.claims
                     where consumer_id = p_claim.consumer_id and live and ordered and claim_id > p_claim.claim_id
                     order by claim_id limit 1), p_claim.claim_id);
            end if;
        end if;
        p_cursor := pgqueue._promote(p_cursor, p_keys);
    end if;
    return p_cursor;
end $$;

-- Takes messages out of a live claim for good: the common part of ack and dead_letter.
create or replace function pgqueue._settle(p_claim_id bigint, p_seqs bigint[], p_dead boolean, p_reason text, p_details jsonb) returns bigint
language plpgsql
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_claim  pgqueue.claims;
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_set    int8multirange := pgqueue._set_of(p_seqs);
    v_run    pgqueue.consumer_messages;
    v_part   int8multirange;
    v_left   bigint;
    v_keys   text[] := '{}';
begin
    perform pgqueue._check_isolation();
    v_claim := pgqueue._lock_claim(p_claim_id, false);
    if v_claim.claim_id is null then
        return 0;
    end if;
    v_left := v_claim.remaining;
    for v_run in
        delete from pgqueue.consumer_messages
        where claim_id = p_claim_id and state = 'claimed' and (v_set is null or seqs && v_set)
        returning *
    loop
        v_part := case when v_set is null then v_run.seqs else v_run.seqs * v_set end;
        v_left := v_left - v_run.n;
        if v_part <> v_run.seqs then
            v_left := v_left + pgqueue._insert_run(v_run, v_run.seqs - v_part);
        end if;
        if p_dead then
            perform pgqueue._bury(v_run, v_part, p_reason, p_details);
        end if;
        if v_run.key is not null then
            v_keys := v_keys || v_run.key;
        end if;
    end loop;
    if v_claim.ordered then
        v_stored := pgqueue._cursor(v_claim.consumer_id);
    end if;
    v_cursor := pgqueue._shrink_claim(v_stored, v_claim, v_left, v_keys);
    if v_claim.ordered then
        perform pgqueue._save_cursor(v_stored, v_cursor, true);
    end if;
    return v_claim.remaining - v_left;
end $$;

-- Records messages of a run as dead.
create or replace function pgqueue._bury(p_run pgqueue.consumer_messages, p_seqs int8multirange, p_reason text, p_details jsonb) returns void
language sql
as $$
    insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, n, priority, deliver_count, reason, details, claim_id)
    select c.stream_id, c.consumer_id, p_seqs, pgqueue._cardinality(p_seqs), p_run.priority, p_run.deliver_count, p_reason, p_details, p_run.claim_id
    from pgqueue.consumers c
    where c.consumer_id = p_run.consumer_id
$$;

-- Acknowledges a whole claim: what ack and claim have in common. Returns how many messages that were.
create or replace function pgqueue._ack(p_claim_id bigint) returns bigint
language plpgsql
as $$
declare
    v_n bigint;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        -- the common case, in two statements: the second one sees what was committed before the first had the lock
        delete from pgqueue.claims
        where claim_id = p_claim_id
          and case when live and not ordered then reader is null end  -- opaque: or else a partial index is read for it
        returning remaining into v_n;
        if found then
            delete from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed';
            return v_n;
        end if;
    end if;
    return pgqueue._settle(p_claim_id, null, false, null, null);
end $$;

-- Acknowledges a claim, or the messages of it that are given. Numbers that it does not hold are passed over.
-- Returns how many messages that were. Errors: PQ003, PQ007. Locks: the claim; for ordered consumers the consumer's lock.
create or replace function pgqueue.ack(p_claim_id bigint, p_seqs bigint[] default null) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return case when p_seqs is null then pgqueue._ack(p_claim_id)
                else pgqueue._settle(p_claim_id, p_seqs, false, null, null) end;
end $$;

-- Dead-letters a claim, or the messages of it that are given.
-- Returns how many messages that were. Errors: PQ007. Locks: as ack.
create or replace function pgqueue.dead_letter(p_claim_id bigint, p_seqs bigint[] default null, p_reason text default null, p_details jsonb default null)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
begin
    return pgqueue._settle(p_claim_id, p_seqs, true, p_reason, p_details);
end $$;

-- Holds a claim longer: its lease ends p_by from now; null: its visibility timeout from now.
-- Returns how many messages it holds. Errors: PQ003, PQ007. Locks: the claim.
create or replace function pgqueue.extend(p_claim_id bigint, p_by interval default null) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_n bigint;
begin
    perform pgqueue._check_isolation();
    if p_by is not null then
        perform pgqueue._check_timeout('p_by', p_by);
    end if;
    update pgqueue.claims set lease_until = clock_timestamp() + coalesce(p_by, visibility_timeout)
    where claim_id = p_claim_id and live
    returning remaining into v_n;
    if not found then
        perform pgqueue._warn_not_live(p_claim_id);
    end if;
    return coalesce(v_n, 0);
end $$;

-- Returns a claim, or the messages of it that are given, to be delivered again. A message that was delivered
-- max_deliver_count times is dead-lettered instead. In an ordered consumer, the later messages of the same keys in the
-- claim go back too, without counting as failed.
--   p_delay   not before then; at least 0
--   p_reason  kept as the message's last error
-- Returns how many messages left the claim. Errors: PQ003, PQ007. Locks: the consumer's lock, the claim.
create or replace function pgqueue.nack(p_claim_id bigint, p_seqs bigint[] default null, p_delay interval default '0', p_reason text default null)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_claim    pgqueue.claims;
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_left     bigint;
begin
    perform pgqueue._check_isolation();
    if p_delay is null or p_delay < interval '0' or p_delay > interval '10 years' then
        raise exception 'p_delay is an interval from 0 to 10 years, not %', coalesce(quote_literal(p_delay), 'null') using errcode = 'PQ003';
    end if;
    v_claim := pgqueue._lock_claim(p_claim_id, true);
    if v_claim.claim_id is null then
        return 0;
    end if;
    select * into v_consumer from pgqueue.consumers where consumer_id = v_claim.consumer_id;
    v_stored := pgqueue._cursor(v_claim.consumer_id);
    v_cursor := pgqueue._return(v_consumer, v_stored, v_claim, pgqueue._set_of(p_seqs), p_delay, p_reason);
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    v_left := (select remaining from pgqueue.claims where claim_id = p_claim_id);
    return v_claim.remaining - coalesce(v_left, 0);
end $$;

-- Puts messages of a claim back to be delivered again, or buries them: the common part of nack and expiry.
--   p_set  the failed messages; null: all
-- Returns the cursor; the caller stores it. Needs the consumer's lock and the claim's.
create or replace function pgqueue._return(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims,
                                           p_set int8multirange, p_delay interval, p_reason text) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_until  timestamptz := case when p_delay > interval '0' then clock_timestamp() + p_delay end;
    v_run    pgqueue.consumer_messages;
    v_part   int8multirange;
    v_places pgqueue.floor[] := '{}';
    v_back   record;
    v_keys   text[];
begin
    if p_claim.ordered and (p_set is not null or v_cursor.open_claims > 1 or v_cursor.aside > 0) then
        v_back := pgqueue._return_by_key(p_consumer, v_cursor, p_claim, p_set, v_until, p_reason);
        v_keys := v_back.o_keys;
        v_places := v_back.o_places;
        v_cursor.aside := v_cursor.aside + v_back.o_aside;
    else
        for v_run in
            delete from pgqueue.consumer_messages
            where claim_id = p_claim.claim_id and state = 'claimed' and (p_set is null or seqs && p_set)
            returning *
        loop
            v_part := case when p_set is null then v_run.seqs else v_run.seqs * p_set end;
            perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
            if v_run.deliver_count >= p_consumer.max_deliver_count then
                perform pgqueue._bury(v_run, v_part, coalesce(p_reason, 'returned'), null);
                continue;
            end if;
            -- an ordered consumer's run goes back into the line with its delay: the line waits for it
            v_run.state := case when v_until is not null and not p_claim.ordered then 'delayed' else 'ready' end;
            v_run.rank := case when p_claim.ordered then 0 else v_run.rank end;
            v_run.key := null;
            v_run.claim_id := null;
            v_run.turn := v_run.position;
            v_run.not_visible_until := v_until;
            v_run.last_error := p_reason;
            perform pgqueue._insert_run(v_run, v_part);
            if v_run.state = 'ready' then
                v_places := v_places || (v_run.rank, v_run.turn, lower(v_part))::pgqueue.floor;
            end if;
        end loop;
    end if;
    v_cursor.floors := pgqueue._lower_floors(v_cursor.floors, v_places);
    v_cursor.due_floor := least(v_cursor.due_floor, v_until);
    return pgqueue._shrink_claim(
        v_cursor, p_claim,
        (select coalesce(sum(n), 0)::bigint from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed'), v_keys);
end $$;

-- Puts messages of an ordered consumer's claim aside: of each key the first failed one and all that follow it in the claim.
-- Returns the keys, how many runs now stand aside, and the places of runs without a key that are back in the line.
create or replace function pgqueue._return_by_key(
    p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims, p_set int8multirange,
    p_until timestamptz, p_reason text, out o_keys text[], out o_aside bigint, out o_places pgqueue.floor[])
language plpgsql
set enable_hashjoin = on
as $$
declare
    v_gone int8multirange;
    v_run  pgqueue.consumer_messages;
begin
    if p_cursor.mixed_claim = p_claim.claim_id then
        if p_set is not null then
            execute format($q$
                select coalesce(array_agg(distinct %2$s) filter (where %2$s is not null), '{}')
                from pgqueue.consumer_messages r
                cross join lateral unnest(r.seqs * $2) g
                cross join lateral (select key from pgqueue.messages_%1$s where seq >= lower(g) and seq < upper(g)) m
                where r.claim_id = $1 and r.state = 'claimed' and r.key is null $q$, p_consumer.stream_id, pgqueue._key_of(p_consumer))
            into o_keys using p_claim.claim_id, p_set;
            -- a key that stood aside was claimed as a run of its own; more of it may have come from the line
            o_keys := o_keys || array(select distinct key from pgqueue.consumer_messages
                                      where claim_id = p_claim.claim_id and state = 'claimed' and key is not null and seqs && p_set);
        end if;
        if o_keys is distinct from '{}' then
            perform pgqueue._split_by_key(p_consumer, p_claim.claim_id, o_keys);
        end if;
    end if;

    with failed as materialized (
        select distinct key from pgqueue.consumer_messages
        where claim_id = p_claim.claim_id and state = 'claimed' and key is not null and (p_set is null or seqs && p_set)
    ), element as (
        select r.key, r.position, r.priority, r.deliver_count, r.last_error, r.claim_id, s as seq,
               coalesce(p_set @> s, true) as failed,
               coalesce(coalesce(p_set @> s, true) and r.deliver_count >= p_consumer.max_deliver_count, false) as dead
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) s
        where r.claim_id = p_claim.claim_id and r.state = 'claimed'
          and (r.key in (select key from failed) or (r.key is null and (p_set is null or r.seqs && p_set)))
    ), judged as (
        select *, case when key is null then failed
                       else bool_or(failed and not dead) over (partition by key order by position, seq) end and not dead as back
        from element
    ), gone as materialized (
        select key, position, priority, last_error, claim_id, seq, failed, dead, deliver_count - (not failed)::int as deliver_count
        from judged where back or dead
    ), buried as (
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, n, priority, deliver_count, reason, claim_id)
        select p_consumer.stream_id, p_consumer.consumer_id, range_agg(int8range(seq, seq, '[]')), count(*), priority, deliver_count,
               coalesce(p_reason, 'returned'), claim_id
        from gone where dead group by priority, deliver_count, claim_id
    ), back as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs,
                                               key, not_visible_until, last_error)
        select p_consumer.consumer_id,
               case when i.key is not null then 'waiting' when i.failed and p_until is not null then 'delayed' else 'ready' end,
               case when i.key is not null then -1 else 0 end,
               i.priority, i.deliver_count, i.position, i.position, c.first_seq, c.n, c.seqs,
               i.key, case when i.failed then p_until end, case when i.failed then p_reason else i.last_error end
        from (select key, position, priority, deliver_count, failed, last_error, island, range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by position, seq)
                              - row_number() over (partition by key, position, priority, deliver_count, failed, last_error order by seq) as island
                    from gone where not dead) e
              group by key, position, priority, deliver_count, failed, last_error, island) i
        cross join lateral pgqueue._chunks(i.seqs) c
        returning state, key, rank, turn, first_seq
    )
    select array(select key from failed), (select count(*) from back where key is not null),
           array(select (rank, turn, first_seq)::pgqueue.floor from back where state = 'ready'),
           (select range_agg(int8range(seq, seq, '[]')) from gone)
    into o_keys, o_aside, o_places, v_gone;

    for v_run in
        delete from pgqueue.consumer_messages
        where claim_id = p_claim.claim_id and state = 'claimed' and seqs && v_gone
        returning *
    loop
        perform pgqueue._insert_run(v_run, v_run.seqs - v_gone);
    end loop;
end $$;

-- The Spark source's side. A reader is one checkpoint; its claims are a fixed, ordered set, so that the offsets
-- (reader, claim) say for ever which messages a micro-batch has.

-- Spark's log goes on from what the database said, so the caller's commit is on disk when it returns, also where
-- synchronous_commit is off. (All that was committed before is on disk then, too.)
create or replace function pgqueue._commit_durably() returns void
language plpgsql
as $$
begin
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'local', true);
    end if;
end $$;

-- A stream by name. Errors: PQ001.
create or replace function pgqueue.open_stream(p_stream text) returns table (stream_id int, kind text)
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select s.stream_id, s.kind from pgqueue._stream(p_stream) s $$;

-- A consumer by name. Errors: PQ001, PQ002.
create or replace function pgqueue.open_consumer(p_stream text, p_consumer text)
returns table (stream_id int, kind text, consumer_id int, ordering text, visibility_timeout interval)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select s.stream_id, s.kind, c.consumer_id, c.ordering, c.visibility_timeout
    from pgqueue._consumer(p_stream, p_consumer) c join pgqueue.streams s using (stream_id)
$$;

-- The last publication of a stream that is visible now; 0: none.
create or replace function pgqueue.last_publication(p_stream_id int) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select coalesce((select publication_id from pgqueue.publications where stream_id = p_stream_id order by publication_id desc limit 1), 0) $$;

-- Locks a reader to the end of the transaction. Advisory, so that it gives no transaction id (see _take). The order of
-- locks is reader, consumer, claim, run.
create or replace function pgqueue._lock_reader(p_reader uuid) returns void
language sql
as $$ select pg_advisory_xact_lock(hashtextextended('pgqueue reader ' || p_reader::text, 0)) $$;

-- Raises PQ002, PQ005 or PQ010 unless the reader's checkpoint belongs to this consumer of this database, in this state.
create or replace function pgqueue._check_reader(p_reader pgqueue.readers, p_consumer_id int, p_start_claim bigint, p_claim bigint) returns void
language plpgsql stable
as $$
begin
    if not exists (select from pgqueue.consumers where consumer_id = p_consumer_id) then
        raise exception 'the consumer of this query was dropped'
            using errcode = 'PQ002', hint = 'Create it again and start the query with a new checkpoint.';
    elsif p_reader.reader is null and p_claim > 0 then
        raise exception 'the checkpoint (at claim %) is of a reader that this database does not know', p_claim
            using errcode = 'PQ005',
                  hint = 'It belongs to another database, or its consumer was dropped. Point url at the right database, or start with a new checkpoint.';
    elsif p_reader.consumer_id <> p_consumer_id then
        raise exception 'the checkpoint is of %, not of %', pgqueue._consumer_name(p_reader.consumer_id), pgqueue._consumer_name(p_consumer_id)
            using errcode = 'PQ005', hint = 'Give the stream and consumer that it was made with, or start with a new checkpoint.';
    elsif p_start_claim < p_reader.acked_claim then
        raise exception 'the checkpoint, at claim %, is older than what its query has acknowledged: up to claim %', p_start_claim, p_reader.acked_claim
            using errcode = 'PQ010', hint = 'Use the latest checkpoint, or a new one.';
    elsif p_claim > p_reader.last_claim then
        raise exception 'the checkpoint is ahead of the database: claim % is not known, the last one is %', p_claim, p_reader.last_claim
            using errcode = 'PQ005', hint = 'The database was restored to an earlier state. Start with a new checkpoint.';
    end if;
end $$;

-- A consumer for an error message.
create or replace function pgqueue._consumer_name(p_consumer_id int) returns text
language sql stable
as $$
    select coalesce((select format('consumer %L of stream %L', c.name, s.name)
                     from pgqueue.consumers c join pgqueue.streams s using (stream_id) where c.consumer_id = p_consumer_id),
                    'a dropped consumer')
$$;

-- Raises PQ003 for an offset that cannot be.
create or replace function pgqueue._check_offset(p_reader uuid, p_claim bigint, p_messages bigint) returns void
language plpgsql immutable
as $$
begin
    if p_reader is null or (p_claim >= 0 and p_messages >= 0) is not true then
        raise exception 'p_reader is not null, and p_start_claim, p_end_claim and p_start_messages are at least 0; not %, %, %',
                        coalesce(p_reader::text, 'null'), coalesce(p_claim::text, 'null'), coalesce(p_messages::text, 'null')
            using errcode = 'PQ003';
    end if;
end $$;

-- The end offset of a reader's next micro-batch. Acknowledges its claims up to the start offset; what it claimed beyond
-- (a crash came between the claim and the offset log) is the batch; otherwise claims what is there.
--   p_start_claim, p_start_messages  the start offset; 0, 0 for a new query
--   p_max                            messages at most; null: what is there (of up to 1,000,000 publications)
--   p_visibility_timeout             null: the consumer's
--   p_upto_publication               nothing that was published after it; null: all
-- Returns the end offset, equal to the start when there is nothing; how many messages were claimed; how many were
-- acknowledged after their lease was lost, so that another claimer may have them too; and when the next delayed
-- message is due or the next lease ends.
-- Repeating it with the same start gives the same end. Errors: PQ002, PQ003, PQ005, PQ007, PQ010.
-- Locks: the reader, the consumer's lock, its claims.
create or replace function pgqueue.reader_claim(
    p_reader uuid, p_consumer_id int, p_start_claim bigint, p_start_messages bigint, p_max bigint default null,
    p_visibility_timeout interval default null, p_upto_publication bigint default null)
returns table (claim_id bigint, messages bigint, claimed bigint, lost bigint, next_due timestamptz)
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_consumer pgqueue.consumers;
    v_reader   pgqueue.readers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_claim    pgqueue.claims;
    v_fill     record;
    v_settled  boolean := false;
begin
    perform pgqueue._check_isolation();
    if p_max < 1 then
        raise exception 'p_max is null or at least 1, not %', p_max using errcode = 'PQ003';
    end if;
    perform pgqueue._check_offset(p_reader, p_start_claim, p_start_messages);
    if p_visibility_timeout is not null then
        perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    end if;
    perform pgqueue._lock_reader(p_reader);
    perform pgqueue._lock_consumer(p_consumer_id);
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_start_claim);
    v_stored := pgqueue._cursor(p_consumer_id);
    v_cursor := v_stored;
    claim_id := p_start_claim;
    messages := p_start_messages;
    claimed := 0;
    lost := 0;

    for v_claim in
        select * from pgqueue.claims c where c.reader = p_reader and c.claim_id <= p_start_claim order by c.claim_id for update
    loop
        lost := lost + v_claim.n - v_claim.settled - v_claim.remaining;
        v_cursor := pgqueue._acknowledge(v_cursor, v_claim);
        v_settled := true;
    end loop;

    if v_reader.last_claim > p_start_claim then
        perform pgqueue.reader_extend(p_reader);
        claim_id := v_reader.last_claim;
        messages := v_reader.messages;
        claimed := messages - p_start_messages;
    else
        v_claim.claim_id := nextval('pgqueue.claims_claim_id_seq');
        v_fill := pgqueue._fill(v_consumer, v_cursor, v_claim.claim_id, least(p_max, 1000000000000), p_upto_publication);
        v_cursor := v_fill.o_cursor;
        if v_fill.o_n > 0 then
            claim_id := v_claim.claim_id;
            claimed := v_fill.o_n;
            messages := p_start_messages + claimed;
            perform pgqueue._open_claim(v_consumer, claim_id, claimed, p_visibility_timeout, p_reader);
        end if;
    end if;

    if v_settled or claimed > 0 then
        perform pgqueue._commit_durably();
        insert into pgqueue.readers as r (reader, consumer_id, acked_claim, last_claim, messages, lost)
        values (p_reader, p_consumer_id, p_start_claim, reader_claim.claim_id, reader_claim.messages, reader_claim.lost)
        on conflict (reader) do update
        set acked_claim = excluded.acked_claim, last_claim = excluded.last_claim, messages = excluded.messages, lost = r.lost + excluded.lost;
    end if;
    perform pgqueue._save_cursor(v_stored, v_cursor, v_settled or claimed > 0);
    next_due := least(
        (select not_visible_until from pgqueue.consumer_messages
         where consumer_id = p_consumer_id and state = 'delayed' and not_visible_until >= v_cursor.due_floor order by not_visible_until limit 1),
        (select m.not_visible_until  -- the head of a consumer with ordering=stream is delayed in its line
         from unnest(v_cursor.floors) f
         cross join lateral (select not_visible_until from pgqueue.consumer_messages
                             where consumer_id = p_consumer_id and state = 'ready' and rank = f.rank and (turn, first_seq) >= (f.turn, f.first_seq)
                             order by turn, first_seq limit 1) m
         where claimed = 0 and v_consumer.ordering = 'stream' and f.rank = 0),
        case when claimed = 0 then pgqueue._next_expiry(p_consumer_id) end);
    return next;
end $$;

-- Ends a reader's claim, with what it still has. Needs the consumer's lock and the claim's.
create or replace function pgqueue._acknowledge(p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_keys text[];
begin
    with gone as (
        delete from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed' returning key
    )
    select array_agg(distinct key) filter (where key is not null) into v_keys from gone;
    p_cursor := pgqueue._shrink_claim(p_cursor, p_claim, 0, v_keys);
    delete from pgqueue.claims where claim_id = p_claim.claim_id;
    return p_cursor;
end $$;

-- The heartbeat: the leases of a reader's live claims start anew.
-- Returns how many claims that were. Locks: those claims.
create or replace function pgqueue.reader_extend(p_reader uuid) returns bigint
language sql
set search_path = pg_catalog, pg_temp
as $$
    with extended as (
        update pgqueue.claims set lease_until = clock_timestamp() + visibility_timeout
        where reader = p_reader and live
        returning 1
    )
    select count(*) from extended
$$;

-- Prepares the messages of a micro-batch to be read, again if need be: extends the reader's claims in (start, end], and claims
-- back what is free of those that it lost.
-- Returns how many messages the batch has now; how many of it other claimers have or had; and how many are gone.
-- Errors: PQ002, PQ003, PQ005, PQ007; PQ010 when the batch was acknowledged before. Locks: the reader, the consumer's lock, its claims.
create or replace function pgqueue.reader_resume(p_reader uuid, p_consumer_id int, p_start_claim bigint, p_end_claim bigint)
returns table (planned bigint, taken_over bigint, gone bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_consumer pgqueue.consumers;
    v_reader   pgqueue.readers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_claim    pgqueue.claims;
    v_held     int8multirange;
    v_there    bigint;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_offset(p_reader, p_start_claim, 0);
    perform pgqueue._check_offset(p_reader, p_end_claim, 0);
    perform pgqueue._lock_reader(p_reader);
    perform pgqueue._lock_consumer(p_consumer_id);
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_end_claim);
    v_stored := pgqueue._cursor(p_consumer_id);
    v_cursor := v_stored;
    planned := 0;
    taken_over := 0;
    gone := 0;
    perform pgqueue.reader_extend(p_reader);
    for v_claim in
        select * from pgqueue.claims c where c.reader = p_reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim order by c.claim_id for update
    loop
        if not v_claim.live and v_claim.settled < v_claim.n then
            v_cursor := pgqueue._claim_back(v_consumer, v_cursor, v_claim);
            select * into v_claim from pgqueue.claims c where c.claim_id = v_claim.claim_id;
        end if;
        planned := planned + v_claim.remaining;
        if v_claim.remaining + v_claim.settled < v_claim.n then
            select coalesce(range_agg(seqs), '{}') into v_held
            from pgqueue.consumer_messages where consumer_messages.claim_id = v_claim.claim_id and state = 'claimed';
            execute format('select count(*) from unnest($1) g cross join lateral (select from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)) m',
                           v_consumer.stream_id) into v_there using v_claim.seqs - v_held;
            gone := gone + pgqueue._cardinality(v_claim.seqs - v_held) - v_there;
            taken_over := taken_over + least(v_there, v_claim.n - v_claim.remaining - v_claim.settled);
        end if;
    end loop;
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    return next;
end $$;

-- Gives a reader back what is free of a claim that it lost; of an ordered consumer only keys that are idle. Needs the
-- consumer's lock and the claim's.
create or replace function pgqueue._claim_back(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
    v_n    bigint := 0;
begin
    for v_run in
        delete from pgqueue.consumer_messages m
        where m.consumer_id = p_consumer.consumer_id and m.state <> 'claimed' and m.seqs && p_claim.seqs
          and case when not p_claim.ordered then true
                   when m.key is null then p_cursor.open_claims = 0
                   else (select true from pgqueue.consumer_messages b
                         where b.consumer_id = m.consumer_id and b.key = m.key and b.state = 'claimed'
                           and b.claim_id >= p_cursor.first_claim limit 1) is null
                        and (select b.seqs && p_claim.seqs from pgqueue.consumer_messages b
                             where b.consumer_id = m.consumer_id and b.key = m.key and b.state <> 'claimed'
                             order by b.position, b.first_seq limit 1) end
        returning *
    loop
        v_part := v_run.seqs * p_claim.seqs;
        if v_part <> v_run.seqs then
            v_run.state := case when v_run.key is not null then 'waiting' else v_run.state end;
            perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
        end if;
        v_run.state := 'claimed';
        v_run.claim_id := p_claim.claim_id;
        v_run.deliver_count := v_run.deliver_count + 1;
        v_run.not_visible_until := null;
        v_run.last_delivered_at := clock_timestamp();
        v_n := v_n + pgqueue._insert_run(v_run, v_part);
    end loop;
    if v_n = 0 then
        return p_cursor;
    end if;
    update pgqueue.claims
    set live = true, remaining = v_n, settled = least(settled, n - v_n), lease_until = clock_timestamp() + visibility_timeout
    where claim_id = p_claim.claim_id;
    if p_claim.ordered then
        p_cursor.first_claim := case when p_cursor.open_claims = 0 then p_claim.claim_id else least(p_cursor.first_claim, p_claim.claim_id) end;
        p_cursor.open_claims := p_cursor.open_claims + 1;
        if p_cursor.open_claims > 1 and p_cursor.mixed_claim is not null then
            perform pgqueue._split_by_key(p_consumer, p_cursor.mixed_claim, null);
            p_cursor.mixed_claim := null;
        end if;
        p_cursor.aside := (select count(*) from pgqueue.consumer_messages
                           where consumer_id = p_consumer.consumer_id and key is not null and state <> 'claimed');
        if p_cursor.aside > 0 then
            perform pgqueue._split_by_key(p_consumer, p_claim.claim_id, null);
        elsif p_cursor.open_claims = 1 then
            p_cursor.mixed_claim := p_claim.claim_id;
        end if;
    end if;
    return p_cursor;
end $$;

-- The messages of a micro-batch as ranges [lo, hi) of seq, in the order of delivery; merged for ordering=none, where
-- no order is promised beyond priority. Locks nothing.
create or replace function pgqueue.reader_plan(p_reader uuid, p_start_claim bigint, p_end_claim bigint)
returns table (lo bigint, hi bigint, priority int, deliver_count int)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with run as (
        select c.ordered, c.claim_id, m.rank, m.position, m.priority, m.deliver_count, m.seqs
        from pgqueue.claims c join pgqueue.consumer_messages m on m.claim_id = c.claim_id and m.state = 'claimed'
        where c.reader = p_reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim
    ), merged as (
        select claim_id, rank, position, priority, deliver_count, seqs from run where ordered
        union all
        select null, rank, null, priority, deliver_count, range_agg(seqs) from run where not ordered group by rank, priority, deliver_count
    )
    select lower(g), upper(g), priority, deliver_count
    from merged cross join lateral unnest(seqs) g
    order by claim_id, rank, position, lower(g)
$$;

-- Records which query a reader belongs to. Errors: PQ009 when another reader of the consumer belongs to the same query, as in
-- a self-join: each would get a part of the messages. Locks: the reader's row.
create or replace function pgqueue.reader_query(p_reader uuid, p_query_id text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    update pgqueue.readers set query_id = p_query_id where reader = p_reader and query_id is distinct from p_query_id;
exception when unique_violation then
    raise exception 'query % reads % twice: each of its two readers would get a part of the messages', p_query_id,
                    (select pgqueue._consumer_name(consumer_id) from pgqueue.readers where reader = p_reader)
        using errcode = 'PQ009', hint = 'Read the consumer once and derive both sides from that, or give each side a consumer of its own.';
end $$;

-- The Spark sink's side: tasks write messages and stage them; the driver's commit makes the batch visible, once.

-- A stream to write to, by name, with the consumers to publish to. Errors: PQ001, PQ002, PQ003.
create or replace function pgqueue.open_sink(p_stream text, p_consumers text[] default null) returns table (stream_id int, kind text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
begin
    perform pgqueue._consumer_ids(v_stream.stream_id, p_consumers);
    return query select v_stream.stream_id, v_stream.kind;
end $$;

-- The stream of an id that a running query holds. Errors: PQ001.
create or replace function pgqueue._stream_of(p_stream_id int) returns pgqueue.streams
language plpgsql stable
as $$
declare
    v_stream pgqueue.streams;
begin
    select * into v_stream from pgqueue.streams where stream_id = p_stream_id;
    if not found then
        raise exception 'the stream of this query was dropped' using errcode = 'PQ001', hint = 'Create it again and restart the query.';
    end if;
    return v_stream;
end $$;

-- Whether a sink's batch, or a later one, was published to a stream.
create or replace function pgqueue.is_published(p_sink text, p_stream_id int, p_batch bigint) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select exists (select from pgqueue.sink_batches where sink = p_sink and stream_id = p_stream_id and batch >= p_batch) $$;

-- Raises PQ003 for a batch that cannot be.
create or replace function pgqueue._check_batch(p_sink text, p_batch bigint) returns void
language plpgsql immutable
as $$
begin
    if p_sink is null or (p_batch >= 0) is not true then
        raise exception 'p_sink is not null and p_batch at least 0, not % and %',
                        coalesce(quote_literal(p_sink), 'null'), coalesce(p_batch::text, 'null') using errcode = 'PQ003';
    end if;
end $$;

-- Takes new sequence numbers of a stream, for messages that the caller writes itself.
-- Returns p_n of them, nearly always one range. Errors: PQ001, PQ003. Locks: none.
create or replace function pgqueue.reserve(p_stream_id int, p_n int) returns int8multirange
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_names regclass := format('pgqueue.seq_%s', (pgqueue._stream_of(p_stream_id)).stream_id);
    v_seqs  bigint[];
begin
    if (p_n > 0) is not true then
        raise exception 'p_n is at least 1, not %', coalesce(p_n::text, 'null') using errcode = 'PQ003';
    end if;
    -- in the select list, generate_series gives its rows one by one; as a table it would store them first
    v_seqs := array(select nextval(v_names) from (select generate_series(1, p_n)) i);
    return case when v_seqs[p_n] - v_seqs[1] = p_n - 1 then int8multirange(int8range(v_seqs[1], v_seqs[p_n], '[]'))
                else pgqueue._set_of(v_seqs) end;
end $$;

-- Records messages that a task has written, in the transaction that wrote them. Nobody sees them yet.
--   p_deliver_at  rounded up to a second by the writer, so that a row each does not become a publication each
-- Returns the id of the staged block. Errors: PQ001, PQ003. Locks: none.
create or replace function pgqueue.stage(p_sink text, p_batch bigint, p_stream_id int, p_seqs int8multirange, p_priority int default 0,
                                         p_deliver_at timestamptz default null) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id bigint;
begin
    perform pgqueue._stream_of(p_stream_id);
    perform pgqueue._check_batch(p_sink, p_batch);
    perform pgqueue._check_publication(p_priority, p_deliver_at);
    if (isempty(p_seqs) or lower_inf(p_seqs) or upper_inf(p_seqs)) is not false then
        raise exception 'p_seqs is a set of some numbers, not %', coalesce(p_seqs::text, 'null') using errcode = 'PQ003';
    end if;
    perform pgqueue._commit_durably();
    insert into pgqueue.staged_writes (stream_id, sink, batch, priority, deliver_at, seqs, n)
    values (p_stream_id, p_sink, p_batch, p_priority, p_deliver_at, p_seqs, pgqueue._cardinality(p_seqs))
    returning staged_id into v_id;
    return v_id;
end $$;

-- Publishes a sink's batch: all staged blocks that are named become visible together.
--   p_staged     the blocks of the tasks that won; those of other attempts are left to maintain()
--   p_rows       how many messages they have, as the tasks counted
--   p_consumers  to these only; null: to all
-- Returns true; false when this batch, or a later one, was published before, and nothing was done.
-- Errors: PQ001, PQ002, PQ003; PQ008 when a block is missing. Locks: the batch against another commit of it.
create or replace function pgqueue.publish_staged(p_sink text, p_batch bigint, p_stream_id int, p_staged bigint[], p_rows bigint,
                                                  p_consumers text[] default null) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_stream    pgqueue.streams := pgqueue._stream_of(p_stream_id);
    v_consumers int[] := pgqueue._consumer_ids(p_stream_id, p_consumers);
    v_id        bigint;
    v_blocks    bigint;
    v_rows      bigint;
begin
    perform pgqueue._check_batch(p_sink, p_batch);
    if p_staged is null or (p_rows >= 0) is not true then
        raise exception 'p_staged is a list of blocks and p_rows their number of messages, not % and %',
                        coalesce(p_staged::text, 'null'), coalesce(p_rows::text, 'null') using errcode = 'PQ003';
    end if;
    if pgqueue.is_published(p_sink, p_stream_id, p_batch) then
        return false;
    end if;
    perform pgqueue._commit_durably();
    -- first, so that a second commit of the batch waits here; and a transaction id before the publication id, see _publish
    insert into pgqueue.sink_batches (sink, stream_id, batch, n) values (p_sink, p_stream_id, p_batch, p_rows) on conflict do nothing;
    if not found then
        return false;
    end if;
    if cardinality(p_staged) > 0 then
        v_id := nextval(format('pgqueue.publication_%s', p_stream_id)::regclass);
    end if;
    with block as (
        delete from pgqueue.staged_writes
        where staged_id = any (p_staged) and stream_id = p_stream_id and sink = p_sink and batch = p_batch
        returning priority, deliver_at, seqs, n
    ), part as (
        insert into pgqueue.publications (publication_id, part, n, published_at, deliver_at, stream_id, priority, seqs, consumers)
        select v_id, row_number() over (order by priority, deliver_at) - 1, sum(n), clock_timestamp(), deliver_at, p_stream_id, priority, range_agg(seqs), v_consumers
        from block group by priority, deliver_at
    )
    select count(*), coalesce(sum(n), 0) into v_blocks, v_rows from block;
    if v_blocks <> cardinality(p_staged) or v_rows <> p_rows then
        raise exception 'batch % of sink % is not complete: % of % staged blocks, % of % messages are there', p_batch, p_sink,
                        v_blocks, cardinality(p_staged), v_rows, p_rows
            using errcode = 'PQ008', hint = 'The blocks were older than maintain() keeps them. Nothing was published; run the batch again.';
    end if;
    if v_id is not null and v_stream.notify then
        perform pg_notify('pgqueue_' || p_stream_id, '');
    end if;
    return true;
end $$;

-- What there is, for people and dashboards.

-- The messages that are new for a consumer: counted in the next 1,000 publications, and estimated from them beyond.
create or replace function pgqueue._new_messages(p_consumer_id int) returns bigint
language sql stable
as $$
    with consumer as (
        select c.consumer_id, c.stream_id, coalesce(upper(k.seen), 1) as next,
               int8multirange(int8range(1, coalesce(upper(k.seen), 1))) - k.seen as gaps
        from pgqueue.consumers c cross join lateral pgqueue._cursor(c.consumer_id) k
        where c.consumer_id = p_consumer_id
    ), gap as (
        select coalesce(sum(p.n), 0) as n
        from consumer c
        cross join lateral (select g from unnest(c.gaps) g limit 100) g
        cross join lateral (select n from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= lower(g.g) and publication_id < upper(g.g)
                              and (consumers is null or c.consumer_id = any (consumers))
                            order by publication_id limit 1000) p
    ), sample as (
        select coalesce(sum(p.n) filter (where p.consumers is null or c.consumer_id = any (p.consumers)), 0) as n,
               count(*) as rows, min(p.publication_id) as first, max(p.publication_id) as last, min(c.stream_id) as stream_id
        from consumer c
        cross join lateral (select publication_id, n, consumers from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= c.next
                            order by publication_id limit 1000) p
    )
    select (gap.n + sample.n * case when sample.rows < 1000 then 1
                                    else 1 + (pgqueue.last_publication(sample.stream_id) - sample.last)::numeric / (sample.last - sample.first + 1)
                               end)::bigint
    from gap, sample
$$;

-- How many messages a consumer has not claimed yet; an estimate where very many publications are new.
create or replace function pgqueue.reader_backlog(p_consumer_id int) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select pgqueue._new_messages(p_consumer_id)
           + coalesce((select sum(n) from pgqueue.consumer_messages where consumer_id = p_consumer_id and state <> 'claimed'), 0)::bigint
$$;

-- One row per message and consumer that is not done with it: new (not taken yet), ready, delayed, waiting (behind an earlier
-- message of its key), claimed or dead. To look into a queue with; it unfolds every set that the query's conditions leave.
create or replace view pgqueue.message_states as
    select s.name as stream, c.name as consumer, x.seq, x.state, x.priority, x.deliver_count, x.not_visible_until, x.claim_id,
           x.lease_until, x.last_error
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    cross join lateral (
        select q.seq, 'new' as state, p.priority, 0 as deliver_count, p.deliver_at as not_visible_until,
               null::bigint as claim_id, null::timestamptz as lease_until, null::text as last_error
        from pgqueue._cursor(c.consumer_id) k
        join pgqueue.publications p on p.stream_id = c.stream_id and not k.seen @> p.publication_id
                                   and (p.consumers is null or c.consumer_id = any (p.consumers))
        cross join lateral unnest(p.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        union all
        select q.seq, case when m.state = 'ready' and m.not_visible_until > clock_timestamp() then 'delayed' else m.state end,
               m.priority, m.deliver_count, m.not_visible_until, m.claim_id, l.lease_until, m.last_error
        from pgqueue.consumer_messages m
        left join pgqueue.claims l on l.claim_id = m.claim_id
        cross join lateral unnest(m.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        where m.consumer_id = c.consumer_id
        union all
        select q.seq, 'dead', d.priority, d.deliver_count, null, d.claim_id, null, d.reason
        from pgqueue.dead_messages d
        cross join lateral unnest(d.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        where d.consumer_id = c.consumer_id
    ) x;

-- One row per consumer. Sums over runs and publications, never over messages; new is estimated where more than 1,000
-- publications are new. backlog: all that is not claimed and not dead.
create or replace view pgqueue.consumer_stats as
    select s.name as stream, c.name as consumer, c.ordering, w.new, r.ready, r.delayed, r.waiting, r.claimed,
           (select coalesce(sum(d.n), 0)::bigint from pgqueue.dead_messages d where d.consumer_id = c.consumer_id) as dead,
           w.new + r.ready + r.delayed + r.waiting as backlog,
           l.claims, l.expired, l.next_expiry
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    cross join lateral (select pgqueue._new_messages(c.consumer_id) as new) w
    cross join lateral (
        select coalesce(sum(n) filter (where state = 'ready' and (not_visible_until > clock_timestamp()) is not true), 0)::bigint as ready,
               coalesce(sum(n) filter (where state = 'delayed' or (state = 'ready' and not_visible_until > clock_timestamp())), 0)::bigint as delayed,
               coalesce(sum(n) filter (where state = 'waiting'), 0)::bigint as waiting,
               coalesce(sum(n) filter (where state = 'claimed'), 0)::bigint as claimed
        from pgqueue.consumer_messages where consumer_id = c.consumer_id) r
    cross join lateral (
        select count(*) as claims, count(*) filter (where lease_until <= clock_timestamp()) as expired, min(lease_until) as next_expiry
        from pgqueue.claims where consumer_id = c.consumer_id and live) l;

-- One row per stream. messages is the planner's estimate of what is stored; last_seq, the last number given out, an exact
-- bound of what was ever sent.
create or replace view pgqueue.stream_stats as
    select s.name as stream, s.kind, s.created_at,
           (select count(*) from pgqueue.consumers c where c.stream_id = s.stream_id) as consumers,
           pgqueue.last_publication(s.stream_id) as last_publication,
           greatest(t.reltuples, 0)::bigint as messages,
           pg_total_relation_size(t.oid) as bytes,
           (select count(*) from pgqueue.staged_writes w where w.stream_id = s.stream_id) as staged_blocks,
           coalesce(pg_sequence_last_value(format('pgqueue.seq_%s', s.stream_id)::regclass), 0) as last_seq
    from pgqueue.streams s
    join pg_catalog.pg_class t on t.oid = to_regclass(format('pgqueue.messages_%s', s.stream_id));

-- Housekeeping. Nothing waits for it: run it now and then, from cron or by hand.

-- Deletes what failed writers left: staged blocks of batches that were published without them, and staged blocks older than
-- p_staged_age, with their messages; all but the last ten batches of each sink; and what was noted of batch writes without a
-- txnAppId, whose names are used once. It releases no claim and deletes no published message.
--   p_staged_age  longer than any batch may take from its first write to its commit
-- Returns what was deleted and how much. Errors: PQ003. Locks: the staged blocks that it deletes.
create or replace function pgqueue.maintain(p_staged_age interval default '1 day') returns table (what text, n bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_block    pgqueue.staged_writes;
    v_range    int8range;
    v_n        bigint;
    v_blocks   bigint := 0;
    v_messages bigint := 0;
begin
    perform pgqueue._check_timeout('p_staged_age', p_staged_age);
    for v_block in
        select w.* from pgqueue.staged_writes w
        where w.staged_at < clock_timestamp() - p_staged_age or pgqueue.is_published(w.sink, w.stream_id, w.batch)
        order by w.staged_id
        for update skip locked  -- locked before its messages go: a commit that takes it is either done or finds nothing
    loop
        for v_range in select unnest(v_block.seqs) loop
            execute format('delete from pgqueue.messages_%s where seq >= $1 and seq < $2', v_block.stream_id) using lower(v_range), upper(v_range);
            get diagnostics v_n = row_count;
            v_messages := v_messages + v_n;
        end loop;
        delete from pgqueue.staged_writes where staged_id = v_block.staged_id;
        v_blocks := v_blocks + 1;
    end loop;
    return query values ('staged blocks', v_blocks), ('unpublished messages', v_messages);

    delete from pgqueue.sink_batches b
    where b.batch < (select max(m.batch) from pgqueue.sink_batches m where m.sink = b.sink and m.stream_id = b.stream_id) - 10
       or (b.sink like 'write:%' and b.published_at < clock_timestamp() - p_staged_age);
    get diagnostics v_n = row_count;
    return query values ('old sink batches', v_n);
end $$;

-- Which version this is, and who may use it: nobody, until the owner grants it.

-- The version of this schema. Locks nothing.
create or replace function pgqueue.schema_version() returns int language sql stable
    set search_path = pg_catalog, pg_temp
as $$ select max(version) from pgqueue.installed $$;

insert into pgqueue.installed (version) values (1) on conflict do nothing;

revoke all on all functions in schema pgqueue from public;

