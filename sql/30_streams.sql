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
