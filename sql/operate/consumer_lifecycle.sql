-- Consumers: creating, changing and dropping them.

-- Locks the row of a stream if settings of a consumer can make sends fail: record_limited() locks it for these. The row
-- is locked before the consumer's, as in calls that change schedules.
create or replace function _pgqueue.lock_stream_for(p_settings jsonb, p_stream_id int) returns void
language plpgsql as $$
begin
    if p_settings ?| '{max_backlog, on_full, per_key_capacity}' then
        perform _pgqueue.lock_stream(p_stream_id);
    end if;
end $$;

-- Stores settings that were checked; null resets one to its default.
-- Locks, until the caller commits: the consumer's row, which claims still read; before it the stream's row, for
-- settings that can make sends fail.
create or replace function _pgqueue.set_consumer(p_consumer_id int, p_settings jsonb) returns void
language plpgsql as $$
declare
    v_before   pgqueue.consumers;
    v_consumer pgqueue.consumers;
begin
    if p_settings = '{}' then
        return;
    end if;
    perform _pgqueue.lock_stream_for(p_settings, (select stream_id from pgqueue.consumers
                                                  where consumer_id = p_consumer_id));
    -- lock: settings
    select * into v_before from pgqueue.consumers where consumer_id = p_consumer_id for no key update;
    v_consumer := jsonb_populate_record(v_before, _pgqueue.stored_settings('consumer', p_settings));
    v_consumer.given := _pgqueue.given_names(v_before.given, p_settings);
    perform _pgqueue.check_conflicts(v_consumer);
    execute (select format('update pgqueue.consumers set given = ($1).given, %s where consumer_id = ($1).consumer_id '
                           'returning *', string_agg(format('%1$I = ($1).%1$I', k), ', '))
             from jsonb_object_keys(p_settings) k) into v_consumer using v_consumer;
    if _pgqueue.is_keyed(v_consumer.profile) <> _pgqueue.is_keyed(v_before.profile) then
        perform _pgqueue.change_lanes(v_consumer);
    elsif p_settings ?| '{fair, per_key_limit, per_key_interval, per_key_burst}'
          and _pgqueue.is_keyed(v_consumer.profile) then
        perform _pgqueue.change_limits(v_consumer);
    end if;
    if v_consumer.per_key_latest <> v_before.per_key_latest then
        perform _pgqueue.change_latest(v_consumer);
    end if;
    if p_settings ?| '{max_backlog, on_full}' then
        perform _pgqueue.apply_max_backlog(v_consumer);
    end if;
    if p_settings ? 'per_key_capacity' then
        perform _pgqueue.apply_key_capacity(v_consumer, v_before.per_key_capacity is null);
    end if;
end $$;

-- Creates a consumer of a stream: a queue of its own over the stream's messages.
--   p_start          earliest: all messages of the stream; latest: messages that become visible from now on; a
--                    timestamp: messages that were published since then; seq N: messages from this number on; an offset
--                    of a reader that does not claim, as text: messages that this reader has not read. Open
--                    transactions count as later. See reading/positions.sql.
--   p_ordering       none; key: the messages of a key in order; stream: all messages in order
--   p_if_not_exists  return the id of an existing consumer with the same ordering and filter, whatever its settings,
--                    instead of an error
--   p_topic          only messages whose key matches this topic: words separated by dots, * for one word, # for any
--                    number of words
--   p_where          only messages for which this jsonpath, without variables, returns a value other than false and
--                    null in {key, headers, data}
--   p_settings       an object with the value of each setting, as for alter_consumer
-- Returns the consumer's id. Errors: PQ001, PQ003, PQ005 for an offset of something else, PQ006, PQ011. Locks: the
-- history, shared; with settings that can make sends fail, the stream's row, for which changes of the stream wait.
-- (More than 60 lines: most are checks of its arguments.)
create or replace function pgqueue.create_consumer(p_stream text, p_name text, p_start text default 'latest',
                                                   p_ordering text default 'none',
                                                   p_if_not_exists boolean default false, p_topic text default null,
                                                   p_where jsonpath default null, p_settings jsonb default '{}')
returns int language plpgsql as $$
declare
    v_stream   pgqueue.streams := _pgqueue.stream(p_stream);
    v_id       int;
    v_columns  text := (select string_agg(name, ', ') from _pgqueue.settings() where of_what = 'consumer');
    v_regex    text;
    v_found    record;
    v_is_same  boolean;
    v_seen     record;
    v_cursor   pgqueue.consumer_cursors;
begin
    perform _pgqueue.check_name('consumer', p_name);
    perform _pgqueue.check_choice('p_ordering', p_ordering, '{none, key, stream}');
    perform _pgqueue.check_settings('consumer', p_settings);
    if p_topic is not null then
        v_regex := _pgqueue.topic_regex('p_topic', p_topic);
    end if;
    perform _pgqueue.check_condition(p_where);
    perform _pgqueue.check_numbers('consumers, or of stream ' || quote_literal(p_stream),
                                   _pgqueue.sequences_of(v_stream.stream_id) || '{consumers_consumer_id_seq}'::text[]);
    v_seen := _pgqueue.resolve_position(v_stream.stream_id, p_start, 'p_start');

    perform _pgqueue.lock_stream_for(p_settings, v_stream.stream_id);
    v_id := _pgqueue.await(
        'the name of the consumer, or stream ' || quote_literal(p_stream),
        'with held as (select stream_id, name from pgqueue.streams '
        'where stream_id = $1 for key share) '  -- lock: stream
        'insert into pgqueue.consumers (stream_id, stream_name, name, ordering, filtered, ' || v_columns
        || ') select h.stream_id, h.name, $2 ->> 0, $2 ->> 1, ($2 -> 2)::boolean, ' || v_columns
        || ' from held h cross join jsonb_populate_record(null::pgqueue.consumers, $2 -> 3) '
        'where not exists (select from pgqueue.consumers c '  -- else it would use up an id
        'where c.stream_id = h.stream_id and c.name = $2 ->> 0) '
        'on conflict do nothing returning consumer_id',  -- lock: settings
        v_stream.stream_id, jsonb_build_array(p_name, p_ordering, p_topic is not null or p_where is not null,
                                              _pgqueue.defaults('consumer')))::int;
    if v_id is null then
        perform _pgqueue.stream(p_stream);  -- it may have been dropped in the meantime
        select c.consumer_id, c.ordering, c.partitions, f.topic, f.condition::text as condition into v_found
        from pgqueue.consumers c left join pgqueue.consumer_filters f using (consumer_id)
        where c.stream_id = v_stream.stream_id and c.name = p_name;
        v_is_same := v_found.partitions is null and (v_found.ordering, v_found.topic, v_found.condition)
                     is not distinct from (p_ordering, p_topic, p_where::text);
        if p_if_not_exists and v_is_same then
            return v_found.consumer_id;
        end if;
        raise exception 'consumer % of stream % already exists, with ordering %',
            quote_literal(p_name), quote_literal(p_stream),
            concat_ws(', ', v_found.ordering, 'topic ' || quote_literal(v_found.topic),
                      'where ' || quote_literal(v_found.condition), 'partitions of a group: ' || v_found.partitions)
            using errcode = 'PQ006', column = 'p_if_not_exists', hint = case when v_is_same
                then 'Set p_if_not_exists to use it as it is; to change its settings, use alter_consumer.'
                else 'The ordering and the filter of a consumer cannot change: use another name.' end;
    end if;
    -- a statement after the one that locks the stream's row, because create_schedule locks this row too
    update pgqueue.consumers set scheduled = true  -- lock: settings
    where consumer_id = v_id  -- an older snapshot may lack the schedule: then claims look for one
      and (_pgqueue.on_due(v_stream.stream_id) is not null
           or current_setting('transaction_isolation') <> 'read committed');
    insert into pgqueue.consumer_filters
    select v_id, p_topic, v_regex, p_where where p_topic is not null or p_where is not null;
    perform _pgqueue.set_consumer(v_id, p_settings);

    v_cursor.consumer_id := v_id;
    v_cursor.gaps := '{}';
    v_cursor := _pgqueue.cursor_from(v_cursor, v_seen.o_seen, v_seen.o_next, v_seen.o_publishers, v_seen.o_cut);
    insert into pgqueue.consumer_cursors (consumer_id, version, next_publication, gaps)
    values (v_id, 1, v_cursor.next_publication, v_cursor.gaps);
    if p_settings ? 'per_key_capacity' then
        perform _pgqueue.enter_keys(c) from pgqueue.consumers c where c.consumer_id = v_id;
    end if;
    return v_id;
end $$;

-- Resets consumers.scheduled, for maintain(), if no schedule of the stream can be due: create_consumer() also sets it
-- if its snapshot may lack a schedule. It does nothing while another session has the stream's schedules. Locks: those;
-- the consumers, except those that others have locked.
create or replace function _pgqueue.reset_scheduled(p_stream_id int) returns void
language plpgsql as $$
begin
    if not pg_try_advisory_xact_lock(_pgqueue.lock_class_schedules(), p_stream_id) then  -- lock: schedules
        return;
    end if;
    update pgqueue.consumers set scheduled = false
    where consumer_id = any (array(
        select consumer_id from pgqueue.consumers
        where stream_id = p_stream_id and scheduled and _pgqueue.on_due(p_stream_id) is null
        for no key update skip locked));  -- lock: settings
end $$;

-- Changes settings of a consumer while it is in use.
-- The new settings apply to the next claim, and to the next failure of a message. Open claims keep their visibility
-- timeout. The ordering and the filter are not settings, because they cannot be changed.
--   p_settings  an object with the new value of each setting; null: the default, which may change with the version.
--               base/settings.sql lists all settings
-- Errors: PQ001, PQ002; PQ003 also when settings contradict each other. Locks: other calls of this function; no claim.
create or replace function pgqueue.alter_consumer(p_stream text, p_name text, p_settings jsonb) returns void
language plpgsql as $$
begin
    perform _pgqueue.check_settings('consumer', p_settings);
    -- in tries: it may wait for claims in progress, and other claims for the consumer
    perform _pgqueue.await('a row or the lock of consumer ' || quote_literal(p_name),
                           'select 0 from _pgqueue.set_consumer($1::int, $2)',
                           (_pgqueue.consumer(p_stream, p_name)).consumer_id, p_settings, p_try => interval '5 ms',
                           p_class => _pgqueue.lock_class_consumer());
end $$;

-- Deletes a consumer or a group, with its unfinished messages.
-- Its claims end. Their owners, and the workers of a group, get an error at their next call.
-- Errors: PQ001, PQ002; 55P03 when a transaction that holds some of the consumer's messages stays open for 10 s. Locks:
-- the consumer.
create or replace function pgqueue.drop_consumer(p_stream text, p_name text) returns void
language plpgsql as $$
begin
    -- in tries: a claim may hold what this session needs, and need what it holds
    perform _pgqueue.await('a row or the lock of consumer ' || quote_literal(p_name),
                           'select 0 from _pgqueue.drop_consumer($1::int)',
                           (_pgqueue.consumer(p_stream, p_name)).consumer_id, p_try => interval '5 ms',
                           p_limit => interval '10 s', p_class => _pgqueue.lock_class_consumer());
end $$;

-- One try to delete a consumer; see drop_consumer. Its sequence remains for open transactions that send; maintain()
-- drops it, see drop_backlog_sequences().
create or replace function _pgqueue.drop_consumer(p_consumer_id int) returns void
language plpgsql as $$
declare
    v_stream_id int;
    v_limited   boolean;
begin
    perform _pgqueue.lock_consumer_alone(p_consumer_id);
    delete from pgqueue.consumers where consumer_id = p_consumer_id  -- lock: settings
    returning stream_id, max_backlog is not null or per_key_capacity is not null into v_stream_id, v_limited;
    if v_limited then
        perform _pgqueue.record_limited(v_stream_id);
    end if;
    perform _pgqueue.delete_bundles(p_consumer_id);
    perform _pgqueue.on_drop_consumer(p_consumer_id);
end $$;
