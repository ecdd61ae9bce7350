-- Consumers.

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
as $$
declare
    v_stream   pgqueue.streams := pgqueue._stream(p_stream);
    v_consumer pgqueue.consumers;
    v_before   int8multirange;  -- the publications before the start
    v_cursor   pgqueue.consumer_cursors;
begin
    perform pgqueue._check_name('consumer', p_name);
    if p_ordering is null or p_ordering not in ('none', 'key', 'stream') then
        raise exception 'p_ordering is none, key or stream, not %', coalesce(quote_literal(p_ordering), 'null') using errcode = 'PQ003', column = 'p_ordering';
    end if;
    if p_max_deliver_count < 1 then
        raise exception 'p_max_deliver_count is null or at least 1, not %', p_max_deliver_count using errcode = 'PQ003', column = 'p_max_deliver_count';
    end if;
    perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    perform pgqueue._start_time(p_start);

    perform pgqueue._lock_history(v_stream.stream_id);
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

    v_before := pgqueue._published_before(v_stream.stream_id, p_start);
    v_cursor.consumer_id := v_consumer.consumer_id;
    v_cursor.next_publication := coalesce(upper(v_before), 1);
    v_cursor.gaps := '{}';
    v_before := int8multirange(int8range(1, v_cursor.next_publication)) - v_before;
    if v_before <> '{}' then
        v_cursor := pgqueue._note_gap(v_cursor, v_before, pgqueue._publishers(v_stream.stream_id), true);
    end if;
    insert into pgqueue.consumer_cursors (consumer_id, version, next_publication, gaps)
    values (v_consumer.consumer_id, 1, v_cursor.next_publication, v_cursor.gaps);
    return v_consumer.consumer_id;
end $$;

-- The time that a start of a consumer means: -infinity for earliest, infinity for latest. Errors: PQ003.
create or replace function pgqueue._start_time(p_start text) returns timestamptz
language plpgsql stable
as $$
declare
    v_time timestamptz;
begin
    begin
        v_time := case p_start when 'earliest' then '-infinity' when 'latest' then 'infinity' else p_start::timestamptz end;
    exception when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
        null;
    end;
    if v_time is null then
        raise exception 'p_start is earliest, latest or a timestamp, not %', coalesce(quote_literal(p_start), 'null') using errcode = 'PQ003', column = 'p_start';
    end if;
    return v_time;
end $$;

-- The publications before a start, as a set of ids. It is of one snapshot: what is visible in it may be before the start, what is not will
-- be new.
create or replace function pgqueue._published_before(p_stream_id int, p_start text) returns int8multirange
language plpgsql stable
as $$
declare
    v_since timestamptz := pgqueue._start_time(p_start);
    v_known int8multirange;
begin
    if v_since = '-infinity' then
        return (pgqueue._trimmed(p_stream_id)).o_publications;
    elsif v_since < 'infinity' then
        return (select coalesce(range_agg(int8range(publication_id, publication_id, '[]')), '{}')
                from pgqueue.publications where stream_id = p_stream_id and published_at < v_since);
    end if;
    -- what other consumers have taken is visible or dead: it saves reading all publications
    select coalesce(range_agg(int8multirange(int8range(1, c.next_publication)) - pgqueue._gap_ids(c)), '{}') into v_known
    from pgqueue.consumers o
    cross join lateral (select * from pgqueue.consumer_cursors where consumer_id = o.consumer_id order by version desc limit 1) c
    where o.stream_id = p_stream_id;
    return (select v_known + coalesce(range_agg(int8range(p.publication_id, p.publication_id, '[]')), '{}')
            from unnest(int8multirange(int8range(1, null)) - v_known) g
            cross join lateral (select publication_id from pgqueue.publications
                                where stream_id = p_stream_id and publication_id >= lower(g)
                                  and publication_id < coalesce(upper(g), 9223372036854775807)) p);
end $$;

-- Deletes a consumer with all that it has not finished. Its claims end; their owners are told when they come back.
-- Errors: PQ001, PQ002; 55P03 when a transaction that holds some of it stays open for 10 s. Locks: the consumer's.
create or replace function pgqueue.drop_consumer(p_stream text, p_name text) returns void
language plpgsql
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
    perform pg_advisory_xact_lock(pgqueue._lock_class_consumer(), p_consumer_id);
    delete from pgqueue.consumers where consumer_id = p_consumer_id;
    loop  -- claims without that lock may be under way, and leave claims and pieces of runs
        delete from pgqueue.consumer_messages where consumer_id = p_consumer_id;
        delete from pgqueue.claims where consumer_id = p_consumer_id;
        exit when not exists (select from pgqueue.consumer_messages where consumer_id = p_consumer_id);
    end loop;
    delete from pgqueue.consumer_cursors where consumer_id = p_consumer_id;
    delete from pgqueue.consumer_gaps where consumer_id = p_consumer_id;
    delete from pgqueue.pieces where consumer_id = p_consumer_id;
    delete from pgqueue.dead_messages where consumer_id = p_consumer_id;
    delete from pgqueue.readers where consumer_id = p_consumer_id;
    delete from pgqueue.skips where consumer_id = p_consumer_id;
end $$;
