-- Back pressure: a consumer that has max_backlog messages before it makes sends fail (on_full=reject), or drops its oldest (on_full=drop_oldest).
--
-- To count what a consumer has before it costs too much for each send. So who counts notes, in a sequence of the consumer's own, the last number of
-- its stream less what it counted: as many as the numbers that come after that are the most that it can have. Only when these are too many somebody counts
-- again, and when it is full not before a moment has passed, noted there as a negative time. It is a sequence because nobody waits for another one who
-- notes something, and because what is noted stays when the send fails. What open transactions send is in no count but their own.

-- The name of that sequence.
create or replace function pgqueue._room_of(p_consumer_id int) returns text
language sql immutable parallel safe
as $$ select 'pgqueue.room_' || p_consumer_id $$;

-- Whether it is surely not yet time to count what a consumer has before it: it cannot be full, or somebody just counted that it is.
--   p_last   the last number that its stream gave out
--   p_more   messages that are not among the numbers up to that one, or may not be
-- Returns null when it has to be counted, else whether there is room.
create or replace function pgqueue._noted_room(p_consumer pgqueue.consumers, p_last bigint, p_more bigint) returns boolean
language plpgsql
as $$
declare
    v_noted bigint := pg_sequence_last_value(pgqueue._room_of(p_consumer.consumer_id)::regclass);
begin
    if v_noted < 0 then
        return case when pgqueue._is_soon(to_timestamp(-v_noted / 1000000.0)) then false end;
    end if;
    return case when p_last - v_noted + p_more <= p_consumer.max_backlog then true end;
end $$;

-- Notes what a consumer had before it.
--   p_backlog  how much, with what is about to be published; null: it is full
--   p_last     the last number that its stream had given out before it was counted
--   p_since    when the counting began: it is not counted again before four times as long has passed, and a second at most
create or replace function pgqueue._note_room(p_consumer_id int, p_backlog bigint, p_last bigint, p_since timestamptz) returns void
language plpgsql
as $$
begin
    perform setval(pgqueue._room_of(p_consumer_id)::regclass,
                   coalesce(greatest(p_last - p_backlog, 0),
                            -(extract(epoch from clock_timestamp() + least(4 * (clock_timestamp() - p_since), interval '1 s')) * 1000000)::bigint));
end $$;

-- Raises PQ013 when messages that are about to be published are too many for one of their consumers. Locks: none that anybody waits for.
--   p_late  their numbers may have been given out long ago: it is counted whatever is noted
create or replace function pgqueue._check_room(p_stream pgqueue.streams, p_count bigint, p_consumers int[], p_late boolean default false) returns void
language plpgsql
as $$
declare
    v_last     bigint := coalesce(pg_sequence_last_value(format('pgqueue.seq_%s', p_stream.stream_id)::regclass), 0);
    v_consumer pgqueue.consumers;
    v_room     boolean;
    v_since    timestamptz;
    v_backlog  bigint;
begin
    for v_consumer in
        select * from pgqueue.consumers
        where stream_id = p_stream.stream_id and max_backlog is not null and on_full = 'reject' and pgqueue._is_for(p_consumers, consumer_id)
    loop
        v_room := pgqueue._noted_room(v_consumer, v_last, p_count);
        continue when v_room and not p_late;
        v_backlog := null;
        if v_room is distinct from false then
            v_since := clock_timestamp();
            v_backlog := pgqueue._backlog_of(v_consumer.consumer_id);
            v_room := v_backlog + p_count <= v_consumer.max_backlog;
            perform pgqueue._note_room(v_consumer.consumer_id, case when v_room then v_backlog + p_count when v_backlog < v_consumer.max_backlog then v_backlog end,
                                       v_last, v_since);
        end if;
        if not v_room then
            raise exception 'stream % takes no % now: consumer % has % before it that nobody claimed, and max_backlog is %', quote_literal(p_stream.name),
                            case p_count when 1 then 'message' else p_count || ' messages' end, quote_literal(v_consumer.name),
                            coalesce(v_backlog::text, v_consumer.max_backlog || ' or more'), v_consumer.max_backlog
                using errcode = 'PQ013', hint = case when p_count > v_consumer.max_backlog then 'Send fewer at once. Nothing was sent.'
                                                     else 'Nothing was sent. Send it later, let more workers claim, or raise it with alter_consumer.' end;
        end if;
    end loop;
end $$;

-- Whether a claim need not drop anything first.
create or replace function pgqueue._has_room(p_consumer pgqueue.consumers) returns boolean
language plpgsql
as $$
begin
    return p_consumer.on_full = 'reject' or p_consumer.max_backlog is null
        or pgqueue._noted_room(p_consumer, coalesce(pg_sequence_last_value(format('pgqueue.seq_%s', p_consumer.stream_id)::regclass), 0), 0) is not null;
end $$;

-- Drops the oldest of what a consumer has before it, as far as it is too much: they become dead letters. What was not judged by its filter stays.
-- Returns the cursor; the caller stores it. Needs the consumer's lock.
create or replace function pgqueue._drop_oldest(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_last    bigint := coalesce(pg_sequence_last_value(format('pgqueue.seq_%s', p_consumer.stream_id)::regclass), 0);
    v_since   timestamptz := clock_timestamp();
    v_backlog bigint;
    v_set     int8multirange;
begin
    if pgqueue._noted_room(p_consumer, v_last, 0) is not null then
        return p_cursor;
    end if;
    for i in 1..10 loop  -- what is new can be dropped when it was taken
        exit when not pgqueue._has_new(p_consumer.stream_id, p_cursor, true);
        p_cursor := (pgqueue._take(p_consumer, p_cursor, null, pgqueue._limit_take())).o_cursor;
        exit when not p_cursor.take_was_cut;
    end loop;
    v_backlog := (select coalesce(sum(message_count), 0) from pgqueue._unclaimed(p_consumer.consumer_id) where not p_consumer.filtered or state <> 'unsifted');
    if not p_consumer.filtered and p_cursor.take_was_cut then
        v_backlog := v_backlog + pgqueue._messages_in(p_consumer, int8multirange(int8range(p_cursor.next_publication, null)), null, pgqueue._limit_counted());
    end if;
    if v_backlog > p_consumer.max_backlog then
        select range_agg(case when before + message_count > v_backlog - p_consumer.max_backlog
                              then pgqueue._below(seqs, pgqueue._bound_of(seqs, (v_backlog - p_consumer.max_backlog - before)::bigint)) else seqs end)
        into v_set
        from (select seqs, message_count, sum(message_count) over (order by arrival_no, first_seq) - message_count as before
              from pgqueue._unclaimed(p_consumer.consumer_id) where state <> 'unsifted') r
        where before < v_backlog - p_consumer.max_backlog;
        if v_set is not null then
            p_cursor := (pgqueue._take_away(p_consumer, p_cursor, v_set, 'dropped')).o_cursor;
        end if;
        v_backlog := null;
    end if;
    perform pgqueue._note_room(p_consumer.consumer_id, v_backlog, v_last, v_since);
    return p_cursor;
end $$;

-- The runs of a consumer that nobody has claimed, by the indexes of their states.
create or replace function pgqueue._unclaimed(p_consumer_id int) returns setof pgqueue.consumer_messages
language sql stable
as $$
    select * from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'ready'
    union all
    select * from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'delayed'
    union all
    select * from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'unsifted'
    union all
    select * from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'waiting' and key is not null
$$;

-- What a consumer has before it, counted: as reader_backlog, with a plan that does not read what other consumers have.
create or replace function pgqueue._backlog_of(p_consumer_id int) returns bigint
language plpgsql stable
set enable_seqscan = off
set jit = off
as $$
begin
    return pgqueue.reader_backlog(p_consumer_id);
end $$;

-- Makes what a consumer's max_backlog and on_full need, after they were changed: its sequence, and that its stream knows of it.
create or replace function pgqueue._limit_backlog(p_consumer pgqueue.consumers) returns void
language plpgsql
as $$
begin
    if p_consumer.max_backlog is not null and to_regclass(pgqueue._room_of(p_consumer.consumer_id)) is null then
        execute format('create sequence %s minvalue -9223372036854775807', pgqueue._room_of(p_consumer.consumer_id));
    end if;
    perform pgqueue._note_limited(p_consumer.stream_id);
end $$;

-- Notes whether sends to a stream may fail because of a consumer. Locks the stream's row: sends read it all the same, and of two that change limits at the
-- same time the second one sees what the first has done.
create or replace function pgqueue._note_limited(p_stream_id int) returns void
language plpgsql
as $$
begin
    perform from pgqueue.streams where stream_id = p_stream_id for no key update;
    update pgqueue.streams s set limited = l.limited, keys_limited = l.keys_limited
    from (select count(*) filter (where c.max_backlog is not null and c.on_full = 'reject') > 0 as limited,
                 count(*) filter (where c.per_key_capacity is not null) > 0 as keys_limited
          from pgqueue.consumers c where c.stream_id = p_stream_id) l
    where s.stream_id = p_stream_id and (s.limited, s.keys_limited) <> (l.limited, l.keys_limited);
end $$;
