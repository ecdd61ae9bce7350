-- Back pressure: when a consumer has a backlog of max_backlog messages, sends fail (on_full=reject), or the consumer
-- drops its oldest messages (on_full=drop_oldest).
--
-- Counting the backlog for each send would cost too much. So a send that counts also records, in a sequence of the
-- consumer, the last number of the stream minus the backlog. The numbers after the recorded one are an upper bound of
-- the backlog, and a send counts again only when this bound exceeds max_backlog. When the consumer is full, the
-- sequence has a negative value: the time until which no send counts again. A sequence is used because no session waits
-- for another one that writes it, and because its value survives a send that fails. A transaction does not count the
-- messages of other open transactions.

-- The name of that sequence.
create or replace function _pgqueue.backlog_sequence(p_consumer_id int) returns text
language sql immutable parallel safe as $$ select 'pgqueue.backlog_' || p_consumer_id $$;

-- Whether a consumer has capacity for more messages, if the recorded value answers that. From here on the sequence
-- stays until the transaction ends.
--   p_last  the last number that its stream has assigned
--   p_more  how many messages to add, which need not have numbers up to p_last
-- Returns null when the backlog has to be counted, and for a consumer that was dropped since the caller read it.
create or replace function _pgqueue.has_capacity(p_consumer pgqueue.consumers, p_last bigint, p_more bigint)
returns boolean language plpgsql as $$
declare
    v_recorded bigint;
begin
    begin
        v_recorded := pg_sequence_last_value(to_regclass(_pgqueue.backlog_sequence(p_consumer.consumer_id)));
    exception when internal_error or undefined_table then  -- maintain() dropped it after its name was looked up
        if to_regclass(_pgqueue.backlog_sequence(p_consumer.consumer_id)) is not null then
            raise;
        end if;
    end;
    if v_recorded < 0 then
        return case when _pgqueue.not_yet(to_timestamp(-v_recorded / 1000000.0)) then false end;
    end if;
    return case when p_last - v_recorded + p_more <= p_consumer.max_backlog then true end;
end $$;

-- Records the backlog of a consumer.
--   p_backlog  its messages, including those that are about to be published; null: the consumer is full
--   p_last     the last number that its stream had assigned before the count
--   p_since    when the count began: the next count is made after four times its duration, but at most a second later
create or replace function _pgqueue.record_backlog(p_consumer_id int, p_backlog bigint, p_last bigint,
                                                   p_since timestamptz) returns void
language plpgsql as $$
begin
    perform setval(to_regclass(_pgqueue.backlog_sequence(p_consumer_id)),
                   case when p_backlog is null  -- (greatest() ignores nulls)
                        then -(extract(epoch from clock_timestamp()
                                       + least(4 * (clock_timestamp() - p_since), interval '1 s')) * 1000000)::bigint
                        else greatest(p_last - p_backlog, 0) end);
end $$;

-- Raises PQ013 when messages that are about to be published exceed the max_backlog of one of their consumers. Locks
-- nothing for which other sessions wait.
--   p_recount  their numbers may have been assigned long ago: count the backlog even if the recorded value allows them
create or replace function _pgqueue.check_backlog(p_stream pgqueue.streams, p_count bigint, p_consumers int[],
                                                  p_recount boolean default false) returns void
language plpgsql as $$
declare
    v_last     bigint := _pgqueue.last_seq(p_stream.stream_id);
    v_consumer pgqueue.consumers;
    v_fits     boolean;
    v_since    timestamptz;
    v_backlog  bigint;
begin
    for v_consumer in
        select * from pgqueue.consumers
        where stream_id = p_stream.stream_id and max_backlog is not null and on_full = 'reject'
          and _pgqueue.is_for(p_consumers, consumer_id)
    loop
        v_fits := _pgqueue.has_capacity(v_consumer, v_last, p_count);
        continue when v_fits and not p_recount;
        v_backlog := null;
        if v_fits is distinct from false then
            v_since := clock_timestamp();
            v_backlog := _pgqueue.backlog_of(v_consumer.consumer_id, v_consumer.max_backlog + 1);
            v_fits := v_backlog + p_count <= v_consumer.max_backlog;
            perform _pgqueue.record_backlog(v_consumer.consumer_id,
                                            case when v_fits then v_backlog + p_count
                                                 when v_backlog < v_consumer.max_backlog then v_backlog end,
                                            v_last, v_since);
        end if;
        if not v_fits then
            raise exception 'cannot send % to stream %: consumer % has a backlog of %, and max_backlog is %',
                            case p_count when 1 then 'a message' else p_count || ' messages' end,
                            _pgqueue.error_name(p_stream), _pgqueue.error_name(p_stream, v_consumer),
                            coalesce(case when v_backlog <= v_consumer.max_backlog then v_backlog::text end,
                                     v_consumer.max_backlog || ' or more'), v_consumer.max_backlog
                using errcode = 'PQ013',
                      hint = 'Nothing was sent. ' || case when p_count > v_consumer.max_backlog
                          then 'Send fewer messages at once.'
                          else 'Try again later, add workers, or raise max_backlog with alter_consumer.' end;
        end if;
    end loop;
end $$;

-- The backlog of a consumer: consumer_backlog(), with a plan that does not read the bundles of other consumers.
create or replace function _pgqueue.backlog_of(p_consumer_id int, p_enough bigint) returns bigint
language plpgsql stable set enable_seqscan = off set jit = off as $$
begin
    return pgqueue.consumer_backlog(p_consumer_id, p_enough);
end $$;

-- Applies changed settings max_backlog and on_full: creates the consumer's sequence, and marks its stream.
create or replace function _pgqueue.apply_max_backlog(p_consumer pgqueue.consumers) returns void
language plpgsql as $$
declare
    v_sequence text := _pgqueue.backlog_sequence(p_consumer.consumer_id);
begin
    if p_consumer.max_backlog is not null and to_regclass(v_sequence) is null then
        execute format('create sequence %s minvalue -9223372036854775807', v_sequence);
        perform _pgqueue.revoke_defaults(array[v_sequence::regclass]);
    end if;
    perform _pgqueue.record_limited(p_consumer.stream_id);
end $$;

-- Records whether sends to a stream can fail because of a consumer. Locks the stream's row, which sends read without
-- waiting. Of two concurrent calls that change limits, the second one sees the changes of the first.
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
-- on maintained: perform _pgqueue.run_task('select 0 from _pgqueue.drop_backlog_sequences()');
create or replace function _pgqueue.drop_backlog_sequences() returns void
language plpgsql as $$
declare
    v_name name;
begin
    for v_name in
        select c.relname from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'S' and c.relname ~ '^backlog_[0-9]+$'
          and not exists (select from pgqueue.consumers o where o.consumer_id = substr(c.relname, 9)::int)
    loop
        begin
            perform _pgqueue.try_drop(format('drop sequence pgqueue.%I', v_name));  -- lock: table
        exception when undefined_table or lock_not_available then
            null;  -- another maintain() drops it, or an open transaction that sends has read it
        end;
    end loop;
end $$;
