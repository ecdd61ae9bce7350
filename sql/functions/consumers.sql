-- Consumers.

-- Creates a consumer of a stream.
--   p_start               earliest: every message that the stream has; latest: what becomes visible from now on;
--                         a timestamp: what was published since; seq N: the messages with that number and higher ones;
--                         an offset of a reader that claims nothing, as text: what that has not read.
--                         Transactions that are still running count as later. See core/positions.sql.
--   p_ordering            none; key: the messages of a key one after the other; stream: all of them so
--   p_max_deliver_count   dead-letter a message that failed this many times; null: never
--   p_visibility_timeout  how long a claim is held without being extended
--   p_topic               only messages whose key is of this topic: words with dots between them, * for one word, # for any number of them
--   p_where               only messages for which this finds something that is neither false nor null in {key, headers, data}; without variables
--   p_if_not_exists       return the id of an existing one of the same ordering, whatever its settings, instead of failing
--   p_settings            these, and others, as alter_consumer takes them: an object with a value for each
-- Returns the consumer's id. Errors: PQ001, PQ003, PQ005 for an offset of something else, PQ006. Locks: the history, shared; none that others wait for.
create or replace function pgqueue.create_consumer(
    p_stream text, p_name text, p_start text default 'latest', p_ordering text default 'none',
    p_max_deliver_count int default null, p_visibility_timeout interval default '30 s',
    p_if_not_exists boolean default false, p_topic text default null, p_where jsonpath default null,
    p_settings jsonb default '{}') returns int
language plpgsql
as $$
declare
    v_settings jsonb;
    v_stream   pgqueue.streams := pgqueue._stream(p_stream);
    v_consumer pgqueue.consumers;
    v_regex    text;
    v_filter   record;
    v_seen     record;
    v_cursor   pgqueue.consumer_cursors;
begin
    perform pgqueue._check_name('consumer', p_name);
    if p_ordering is null or p_ordering not in ('none', 'key', 'stream') then
        raise exception 'p_ordering is none, key or stream, not %', coalesce(quote_literal(p_ordering), 'null') using errcode = 'PQ003', column = 'p_ordering';
    end if;
    perform pgqueue._check_setting('consumer', 'max_deliver_count', to_jsonb(p_max_deliver_count), 'p_max_deliver_count');
    perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    v_settings := pgqueue._checked_settings('consumer', p_settings);
    if p_topic is not null then
        v_regex := pgqueue._topic_regex('p_topic', p_topic);
    end if;
    perform pgqueue._check_condition(p_where);
    v_seen := pgqueue._seen_from(v_stream.stream_id, p_start, 'p_start');

    insert into pgqueue.consumers (stream_id, name, ordering, max_deliver_count, visibility_timeout, filtered)
    values (v_stream.stream_id, p_name, p_ordering, p_max_deliver_count, p_visibility_timeout, p_topic is not null or p_where is not null)
    on conflict (stream_id, name) do nothing
    returning * into v_consumer;
    if not found then
        select * into v_consumer from pgqueue.consumers where stream_id = v_stream.stream_id and name = p_name;
        select topic, condition::text as condition into v_filter from pgqueue.consumer_filters where consumer_id = v_consumer.consumer_id;
        if p_if_not_exists and (v_consumer.ordering, v_filter.topic, v_filter.condition) is not distinct from (p_ordering, p_topic, p_where::text) then
            return v_consumer.consumer_id;
        end if;
        raise exception 'consumer % of stream % exists already, with ordering %', quote_literal(p_name), quote_literal(p_stream),
                        concat_ws(', ', v_consumer.ordering, 'topic ' || quote_literal(v_filter.topic), 'where ' || quote_literal(v_filter.condition))
            using errcode = 'PQ006';
    end if;
    -- (a statement after the one that locks the stream's row: who creates a schedule has that, too)
    update pgqueue.consumers set scheduled = true
    where consumer_id = v_consumer.consumer_id and exists (select from pgqueue.schedules where stream_id = v_stream.stream_id);
    if v_consumer.filtered then
        insert into pgqueue.consumer_filters values (v_consumer.consumer_id, p_topic, v_regex, p_where);
    end if;
    perform pgqueue._set_consumer(v_consumer.consumer_id, v_settings);

    v_cursor.consumer_id := v_consumer.consumer_id;
    v_cursor.gaps := '{}';
    v_cursor := pgqueue._cursor_from(v_cursor, v_seen.o_seen, v_seen.o_next, v_seen.o_publishers, v_seen.o_cut);
    insert into pgqueue.consumer_cursors (consumer_id, version, next_publication, gaps)
    values (v_consumer.consumer_id, 1, v_cursor.next_publication, v_cursor.gaps);
    if v_settings ? 'per_key_capacity' then
        perform pgqueue._enter_keys(c) from pgqueue.consumers c where c.consumer_id = v_consumer.consumer_id;
    end if;
    return v_consumer.consumer_id;
end $$;

-- Changes settings of a consumer, while it is in use: the next claim, and the next failure of a message, go by the new ones. Claims that are
-- open keep the visibility timeout that they were made with. What cannot be changed (its ordering, its filter) is no setting.
--   p_settings  an object with the new value of each; null: the default. core/settings.sql has all
-- Errors: PQ001, PQ002; PQ003 also when one contradicts another. Locks: other calls of this function; no claim.
create or replace function pgqueue.alter_consumer(p_stream text, p_name text, p_settings jsonb) returns void
language plpgsql
as $$
begin
    perform pgqueue._set_consumer((pgqueue._consumer(p_stream, p_name)).consumer_id, pgqueue._checked_settings('consumer', p_settings));
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
declare
    v_stream_id int;
    v_limited   boolean;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_class_consumer(), p_consumer_id);
    delete from pgqueue.consumers where consumer_id = p_consumer_id
    returning stream_id, max_backlog is not null or per_key_capacity is not null into v_stream_id, v_limited;
    if v_limited then
        perform pgqueue._note_limited(v_stream_id);
    end if;
    if to_regclass(pgqueue._room_of(p_consumer_id)) is not null then
        execute 'drop sequence ' || pgqueue._room_of(p_consumer_id);
    end if;
    perform pgqueue._forget_runs(p_consumer_id);
    delete from pgqueue.consumer_messages where consumer_id = p_consumer_id;
    delete from pgqueue.claims where consumer_id = p_consumer_id;
    delete from pgqueue.consumer_cursors where consumer_id = p_consumer_id;
    delete from pgqueue.consumer_gaps where consumer_id = p_consumer_id;
    delete from pgqueue.group_partitions where consumer_id = p_consumer_id;
    delete from pgqueue.group_workers where consumer_id = p_consumer_id;
    delete from pgqueue.consumer_filters where consumer_id = p_consumer_id;
    delete from pgqueue.dead_messages where consumer_id = p_consumer_id;
    delete from pgqueue.readers where consumer_id = p_consumer_id;
    delete from pgqueue.archived_messages where consumer_id = p_consumer_id;
    perform pgqueue._forget_entries(p_consumer_id);
    delete from pgqueue.skips where consumer_id = p_consumer_id;
end $$;
