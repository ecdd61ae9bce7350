-- Back pressure: when a consumer has a backlog of max_backlog messages, sends fail (on_full=reject), or the consumer
-- drops its oldest messages (on_full=drop_oldest).
--
-- To count the backlog costs too much for each send. So a send that counts also notes, in a sequence of the consumer,
-- the last number of the stream less its count: the numbers that come after the note are the most that the backlog can
-- have. A send counts again only when these are too many; and when the consumer is full, only after a moment, noted
-- there as a negative time. The note is in a sequence because nobody waits for another session that writes it, and
-- because it stays when the send fails. Messages of open transactions are in no count but their own.

-- The name of that sequence.
create or replace function _pgqueue.room_of(p_consumer_id int) returns text
language sql immutable parallel safe as $$ select 'pgqueue.room_' || p_consumer_id $$;

-- Whether a consumer has room, if the note tells: it cannot be full, or somebody just counted that it is. From here on
-- the sequence stays until the transaction ends.
--   p_last  the last number that its stream gave out
--   p_more  messages that are not, or may not be, among the numbers up to p_last
-- Returns null when the backlog has to be counted; also of a consumer that was dropped since the caller saw it.
create or replace function _pgqueue.recorded_backlog(p_consumer pgqueue.consumers, p_last bigint, p_more bigint)
returns boolean language plpgsql as $$
declare
    v_noted bigint;
begin
    begin
        v_noted := pg_sequence_last_value(to_regclass(_pgqueue.room_of(p_consumer.consumer_id)));
    exception when internal_error or undefined_table then  -- maintain() dropped it after its name was looked up
        if to_regclass(_pgqueue.room_of(p_consumer.consumer_id)) is not null then
            raise;
        end if;
    end;
    if v_noted < 0 then
        return case when _pgqueue.not_yet(to_timestamp(-v_noted / 1000000.0)) then false end;
    end if;
    return case when p_last - v_noted + p_more <= p_consumer.max_backlog then true end;
end $$;

-- Notes the backlog of a consumer.
--   p_backlog  its messages, with those that are about to be published; null: the consumer is full
--   p_last     the last number that its stream had given out before the count
--   p_since    when the count began: nobody counts again before four times as long has passed, and a second at most
create or replace function _pgqueue.record_backlog(p_consumer_id int, p_backlog bigint, p_last bigint,
                                                   p_since timestamptz) returns void
language plpgsql as $$
begin
    perform setval(to_regclass(_pgqueue.room_of(p_consumer_id)),
                   case when p_backlog is null  -- (greatest() passes over nulls)
                        then -(extract(epoch from clock_timestamp()
                                       + least(4 * (clock_timestamp() - p_since), interval '1 s')) * 1000000)::bigint
                        else greatest(p_last - p_backlog, 0) end);
end $$;

-- Raises PQ013 when messages that are about to be published are too many for one of their consumers. Locks nothing
-- that anybody waits for.
--   p_late  their numbers may have been given out long ago: the backlog is counted, whatever the note says
create or replace function _pgqueue.check_room(p_stream pgqueue.streams, p_count bigint, p_consumers int[],
                                               p_late boolean default false) returns void
language plpgsql as $$
declare
    v_last     bigint := _pgqueue.last_seq(p_stream.stream_id);
    v_consumer pgqueue.consumers;
    v_room     boolean;
    v_since    timestamptz;
    v_backlog  bigint;
begin
    for v_consumer in
        select * from pgqueue.consumers
        where stream_id = p_stream.stream_id and max_backlog is not null and on_full = 'reject'
          and _pgqueue.is_for(p_consumers, consumer_id)
    loop
        v_room := _pgqueue.recorded_backlog(v_consumer, v_last, p_count);
        continue when v_room and not p_late;
        v_backlog := null;
        if v_room is distinct from false then
            v_since := clock_timestamp();
            v_backlog := _pgqueue.backlog_of(v_consumer.consumer_id, v_consumer.max_backlog + 1);
            v_room := v_backlog + p_count <= v_consumer.max_backlog;
            perform _pgqueue.record_backlog(v_consumer.consumer_id,
                                            case when v_room then v_backlog + p_count
                                                 when v_backlog < v_consumer.max_backlog then v_backlog end,
                                            v_last, v_since);
        end if;
        if not v_room then
            raise exception 'stream % takes no % now: consumer % has % before it that nobody claimed, '
                            'and max_backlog is %', _pgqueue.called(p_stream),
                            case p_count when 1 then 'message' else p_count || ' messages' end,
                            _pgqueue.called(p_stream, v_consumer),
                            coalesce(case when v_backlog <= v_consumer.max_backlog then v_backlog::text end,
                                     v_consumer.max_backlog || ' or more'), v_consumer.max_backlog
                using errcode = 'PQ013',
                      hint = case when p_count > v_consumer.max_backlog then 'Send fewer at once. Nothing was sent.'
                                  else 'Nothing was sent. Send it later, let more workers claim, '
                                       'or raise max_backlog with alter_consumer.' end;
        end if;
    end loop;
end $$;

-- Whether a claim need not drop messages first.
create or replace function _pgqueue.has_room(p_consumer pgqueue.consumers) returns boolean
language plpgsql as $$
begin
    return p_consumer.on_full = 'reject' or p_consumer.max_backlog is null
        or _pgqueue.recorded_backlog(p_consumer, _pgqueue.last_seq(p_consumer.stream_id), 0) is not null;
end $$;

-- The backlog of a consumer: consumer_backlog(), with a plan that does not read what other consumers have.
create or replace function _pgqueue.backlog_of(p_consumer_id int, p_enough bigint) returns bigint
language plpgsql stable set enable_seqscan = off set jit = off as $$
begin
    return pgqueue.consumer_backlog(p_consumer_id, p_enough);
end $$;

-- Makes what changed settings max_backlog and on_full need: the consumer's sequence, and the note at its stream.
create or replace function _pgqueue.limit_backlog(p_consumer pgqueue.consumers) returns void
language plpgsql as $$
begin
    if p_consumer.max_backlog is not null and to_regclass(_pgqueue.room_of(p_consumer.consumer_id)) is null then
        execute format('create sequence %s minvalue -9223372036854775807', _pgqueue.room_of(p_consumer.consumer_id));
        perform _pgqueue.revoke_defaults(array[_pgqueue.room_of(p_consumer.consumer_id)::regclass]);
    end if;
    perform _pgqueue.record_limited(p_consumer.stream_id);
end $$;

-- Notes whether sends to a stream may fail because of a consumer. Locks the stream's row. Sends read the row all the
-- same. Of two calls that change limits at the same time, the second one sees the changes of the first.
create or replace function _pgqueue.record_limited(p_stream_id int) returns void
language plpgsql as $$
begin
    perform _pgqueue.lock_stream(p_stream_id);
    update pgqueue.streams s set limited = l.limited, keys_limited = l.keys_limited
    from (select count(*) filter (where c.max_backlog is not null and c.on_full = 'reject') > 0 as limited,
                 count(*) filter (where c.per_key_capacity is not null) > 0 as keys_limited
          from pgqueue.consumers c where c.stream_id = p_stream_id) l
    where s.stream_id = p_stream_id and (s.limited, s.keys_limited) <> (l.limited, l.keys_limited);
end $$;

-- Drops the sequences of consumers that were dropped, for maintain(). Locks: those sequences.
-- on maintained: perform _pgqueue.run_task('select 0 from _pgqueue.delete_backlogs()');
create or replace function _pgqueue.delete_backlogs() returns void
language plpgsql as $$
declare
    v_name name;
begin
    for v_name in
        select c.relname from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'S' and c.relname ~ '^room_[0-9]+$'
          and not exists (select from pgqueue.consumers o where o.consumer_id = substr(c.relname, 6)::int)
    loop
        begin
            execute format('drop sequence pgqueue.%I', v_name);  -- lock: table
        exception when undefined_table or lock_not_available then
            null;  -- another maintain() drops it, or an open sender has looked at it
        end;
    end loop;
end $$;
