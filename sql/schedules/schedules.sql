-- Schedules: messages that are sent at planned times. There is no background process: a claim for a consumer of the
-- stream, or maintain(), sends the due messages, unless another session is doing so. The message and the next time are
-- written in one transaction, so each time has one message, also after a crash. Missed times share one message.
--
-- consumers.scheduled says whether the stream has schedules: without schedules, claims do not check. maintain() also
-- resets it while all are paused.

-- in use: select format('schedule %s of stream %s', h.name, s.name)
--     from pgqueue.schedules h join pgqueue.streams s using (stream_id)
-- on drop_stream
-- on numbers: union all values ('seq_%s', false, 'select max(seq) from pgqueue.schedules where stream_id = %1$s')
create table if not exists pgqueue.schedules (
    stream_id  int         not null,
    name       text        not null,
    cron       text,                             -- when: a cron expression, ...
    every      interval,                         -- ... or at start_at, and each interval after it
    start_at   timestamptz,
    time_zone  text        not null,
    data       text,                             -- what is sent
    data_bytes bytea,
    key        text,
    headers    jsonb,
    priority   int         not null,
    consumers  text[],                           -- their names; null: all
    paused     boolean     not null default false,
    next_at    timestamptz not null,             -- its next time, or the first missed one
    sent_at    timestamptz,                      -- its last message: when it was sent, ...
    planned_at timestamptz,                      -- ... for which time, ...
    -- ... and its number; null: the message could not be sent, ...
    seq        bigint,
    last_error text,                             -- ... because of this
    created_at timestamptz not null default clock_timestamp(),
    timed_at   timestamptz not null default clock_timestamp(),  -- when its times were set, but for a message
    primary key (stream_id, name)
);
do $$
begin
    if not exists (select from pg_attribute
                   where attrelid = 'pgqueue.schedules'::regclass and attname = 'timed_at') then  -- of version 1 or 2
        alter table pgqueue.schedules  -- lock: table
            add column timed_at timestamptz not null default clock_timestamp();
    end if;
end $$;

-- When the next schedule of a stream is due, if it has any. Rows are never updated, as those of consumer_cursors: the
-- newest version counts, and claims find it first, however many dead rows a long transaction keeps.
-- on drop_stream
create table if not exists pgqueue.schedule_turns (
    stream_id int    not null,
    version   bigint not null,
    due_at    timestamptz,     -- null: all are paused
    primary key (stream_id, version)
);

-- When the next schedule of a stream is due; null: never.
create or replace function _pgqueue.schedule_due(p_stream_id int) returns timestamptz
language plpgsql stable as $$
begin
    return (select due_at from pgqueue.schedule_turns where stream_id = p_stream_id order by version desc limit 1);
end $$;

-- When a claim should send the next message of a schedule; null: never. A second later while another session is sending
-- what is due: a claim would send nothing.
-- on due: , _pgqueue.schedules_sendable(p_stream_id)
create or replace function _pgqueue.schedules_sendable(p_stream_id int) returns timestamptz
language plpgsql stable as $$
declare
    v_due timestamptz := _pgqueue.schedule_due(p_stream_id);
begin
    if v_due <= clock_timestamp()
       and exists (select from _pgqueue.advisory_locks(_pgqueue.lock_class_schedules(), p_stream_id)
                   where pid is distinct from pg_backend_pid()) then
        return clock_timestamp() + interval '1 s';
    end if;
    return v_due;
end $$;

-- Sends a bounded number of due messages of a stream's schedules, unless another session is doing so. It does not wait.
-- Locks, to the end of the transaction: the stream's schedules; the publish lock, shared.
-- on claim: perform _pgqueue.run_schedules(p_stream_id);
-- on maintained:
--     perform _pgqueue.run_task('select 0 from _pgqueue.run_schedules($1::int)', t.stream_id)
--     from (select distinct stream_id from pgqueue.schedules
--           where not paused and next_at <= clock_timestamp() and stream_id = any (p_stream_ids)) t;
create or replace function _pgqueue.run_schedules(p_stream_id int) returns void
language plpgsql as $$
declare
    v_now      timestamptz := clock_timestamp();
    v_stream   pgqueue.streams;
    v_schedule pgqueue.schedules;
begin
    if (_pgqueue.schedule_due(p_stream_id) <= v_now) is not true
       or not pg_try_advisory_xact_lock(_pgqueue.lock_class_schedules(), p_stream_id) then  -- lock: schedules
        return;
    end if;
    select * into v_stream from pgqueue.streams where stream_id = p_stream_id;
    for v_schedule in
        select * from pgqueue.schedules where stream_id = p_stream_id and not paused and next_at <= v_now
        order by next_at, name limit _pgqueue.limit_schedules()
    loop
        perform _pgqueue.send_scheduled(v_stream, v_schedule, v_now);
    end loop;
    perform _pgqueue.record_turn(p_stream_id);
end $$;

-- Sends the message of a schedule, and sets its next time. Needs the lock of the stream's schedules. A message that
-- cannot be sent is skipped, and last_error has the error, because it must not make the claim fail. If the next time
-- cannot be computed, because the server no longer has the time zone, the schedule is paused.
create or replace function _pgqueue.send_scheduled(p_stream pgqueue.streams, p_schedule pgqueue.schedules,
                                                   p_now timestamptz) returns void
language plpgsql as $$
declare
    v_sent_at timestamptz := clock_timestamp();
    v_next_at timestamptz;
    v_seq     bigint;
    v_error   text;
begin
    begin
        v_next_at := _pgqueue.next_time(p_schedule, p_now);
        -- the limits and the schema of the stream may be newer than the schedule
        perform _pgqueue.check_payload(p_stream, p_schedule.data, p_schedule.data_bytes, p_schedule.key,
                                       _pgqueue.scheduled_headers(p_schedule));
        v_seq := nextval(p_stream.message_numbers);
        insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
        values (v_seq, p_stream.stream_id, p_schedule.key, p_schedule.data, p_schedule.data_bytes,
                _pgqueue.scheduled_headers(p_schedule));
        perform _pgqueue.publish(p_stream, int8multirange(int8range(v_seq, v_seq, '[]')), 1, p_schedule.priority, null,
                                 case when p_schedule.consumers is not null then array(
                                     select consumer_id from pgqueue.consumers
                                     where stream_id = p_stream.stream_id and name = any (p_schedule.consumers)) end);
    exception when others then
        if left(sqlstate, 2) in ('40', '53', '55', '57', '58') or sqlstate in ('PQ011', '23505') then
            raise;  -- a later try may succeed
        end if;
        v_seq := null;
        v_error := sqlerrm;
    end;
    update pgqueue.schedules
    set sent_at = v_sent_at, planned_at = p_schedule.next_at, seq = v_seq, last_error = v_error,
        next_at = coalesce(v_next_at, 'infinity'), paused = paused or v_next_at is null
    where stream_id = p_schedule.stream_id and name = p_schedule.name;
end $$;

-- Sets the next times of a stream's schedules that have a time of the future: their messages were sent, or they were
-- created, replaced or resumed, while the clock was ahead, and until then they would send nothing. Maybe a time has two
-- messages then. A minute is allowed, by which a clock is corrected now and then. Locks, to the end of the transaction:
-- the stream's schedules, if they are free.
-- on maintained:
--     perform _pgqueue.run_task('select 0 from _pgqueue.correct_schedules($1::int)', t.stream_id)
--     from (select distinct stream_id from pgqueue.schedules
--           where not paused and greatest(sent_at, timed_at) > clock_timestamp() + interval '1 minute'
--             and stream_id = any (p_stream_ids)) t;
create or replace function _pgqueue.correct_schedules(p_stream_id int) returns void
language plpgsql as $$
declare
    v_now      timestamptz := clock_timestamp();
    v_schedule pgqueue.schedules;
    v_some     boolean := false;
begin
    if not pg_try_advisory_xact_lock(_pgqueue.lock_class_schedules(), p_stream_id) then  -- lock: schedules
        return;
    end if;
    for v_schedule in
        select * from pgqueue.schedules
        where stream_id = p_stream_id and not paused and greatest(sent_at, timed_at) > v_now + interval '1 minute'
    loop
        -- a first time that was one interval from then is one interval from now
        if v_schedule.timed_at > v_now
           and v_schedule.start_at = _pgqueue.nth_time(v_schedule.timed_at, v_schedule.every, v_schedule.time_zone, 1)
        then
            v_schedule.start_at := _pgqueue.nth_time(date_trunc('second', v_now), v_schedule.every,
                                                     v_schedule.time_zone, 1);
        end if;
        update pgqueue.schedules
        set start_at = v_schedule.start_at, next_at = n.at, timed_at = least(timed_at, v_now)
        from (select _pgqueue.next_time(v_schedule, v_now) as at) n
        where stream_id = p_stream_id and name = v_schedule.name and next_at > n.at;
        v_some := v_some or found;
    end loop;
    if v_some then
        perform _pgqueue.record_turn(p_stream_id);
    end if;
end $$;

-- The headers of a schedule's next message: those of the schedule, its name, and the planned time.
create or replace function _pgqueue.scheduled_headers(p_schedule pgqueue.schedules) returns jsonb
language sql stable as $$
    select coalesce(p_schedule.headers, '{}')
        || jsonb_build_object('schedule', p_schedule.name, 'planned_at',
                              to_char(p_schedule.next_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
$$;

-- The first time of a schedule after p_after; null: there is none.
create or replace function _pgqueue.next_time(p_schedule pgqueue.schedules, p_after timestamptz) returns timestamptz
language sql stable as $$
    select case when p_schedule.cron is not null
                  then _pgqueue.next_by_cron(p_schedule.cron, p_schedule.time_zone, p_after)
                else _pgqueue.next_by_interval(p_schedule.start_at, p_schedule.every, p_schedule.time_zone, p_after) end
$$;

-- Records when the next schedule of a stream is due. Needs the lock of the stream's schedules.
create or replace function _pgqueue.record_turn(p_stream_id int) returns void
language plpgsql as $$
declare
    v_version bigint;
begin
    delete from pgqueue.schedule_turns
    where stream_id = p_stream_id
      and version = (select version from pgqueue.schedule_turns where stream_id = p_stream_id
                     order by version desc limit 1)
    returning version into v_version;
    insert into pgqueue.schedule_turns (stream_id, version, due_at)
    select p_stream_id, coalesce(v_version, 0) + 1,
           (select min(next_at) from pgqueue.schedules where stream_id = p_stream_id and not paused)
    where exists (select from pgqueue.schedules where stream_id = p_stream_id);
end $$;

-- Records when the next schedule of a stream is due, and whether the stream has schedules. Needs lock_schedules().
create or replace function _pgqueue.record_schedules(p_stream_id int) returns void
language plpgsql as $$
begin
    perform _pgqueue.record_turn(p_stream_id);
    perform _pgqueue.await('the settings of a consumer of stream ' || p_stream_id,
        'with changed as (update pgqueue.consumers set scheduled = ($2 -> 0)::boolean where stream_id = $1 '
        'and scheduled <> ($2 -> 0)::boolean returning 1) select count(*) from changed',  -- lock: settings
        p_stream_id, jsonb_build_array(exists (select from pgqueue.schedules where stream_id = p_stream_id)));
end $$;

-- Locks the schedules of a stream, for a call that changes them; and the stream, against the creation of consumers.
-- Returns the stream. Errors: PQ001; 55P03 as lock_consumer().
create or replace function _pgqueue.lock_schedules(p_stream text) returns pgqueue.streams
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    perform _pgqueue.check_isolation();
    -- in tries: create_consumer and others wait for the stream's row, and a worker may hold the schedules for long
    perform _pgqueue.await('the schedules of stream ' || quote_literal(p_stream),
                           'select 0 from _pgqueue.lock_schedules_now($1::int)', v_stream.stream_id,
                           p_try => interval '20 ms', p_class => _pgqueue.lock_class_schedules());
    return v_stream;
end $$;

-- One try of lock_schedules().
create or replace function _pgqueue.lock_schedules_now(p_stream_id int) returns void
language plpgsql as $$
begin
    perform _pgqueue.lock_stream(p_stream_id, p_alone => true);
    perform _pgqueue.await_lock(_pgqueue.lock_class_schedules(), p_stream_id, false);
end $$;

-- A schedule by its name. Locks the schedules of its stream. Errors: PQ003, and as lock_schedules().
create or replace function _pgqueue.locked_schedule(p_stream text, p_name text) returns pgqueue.schedules
language plpgsql as $$
declare
    v_stream   pgqueue.streams := _pgqueue.lock_schedules(p_stream);
    v_schedule pgqueue.schedules;
begin
    select * into v_schedule from pgqueue.schedules where stream_id = v_stream.stream_id and name = p_name;
    if not found then
        raise exception 'unknown schedule % of stream %', coalesce(quote_literal(p_name), 'null'),
                        quote_literal(p_stream)
            using errcode = 'PQ003', column = 'p_name',
                  hint = _pgqueue.suggestion(p_name, array(select name from pgqueue.schedules
                                                      where stream_id = v_stream.stream_id
                                                      order by name limit 10));
    end if;
    return v_schedule;
end $$;

-- Returns a schedule in which only the times are set. Errors: PQ003 unless exactly one of p_cron and p_every is given,
-- and has a next time; and for an unknown name of a time zone. (Other texts that the server accepts, such as UTC+2,
-- have the opposite sign.)
--   p_from  if p_start is null, the first time is one interval later
create or replace function _pgqueue.timed_schedule(p_cron text, p_every interval, p_time_zone text, p_start timestamptz,
                                                   p_from timestamptz) returns pgqueue.schedules
language plpgsql stable as $$
declare
    v_schedule pgqueue.schedules;
begin
    if not exists (select from pg_timezone_names where name = p_time_zone) then
        raise exception 'p_time_zone must be the name of a time zone, such as Europe/Berlin or UTC, not %',
                        coalesce(quote_literal(left(p_time_zone, 100)), 'null')
            using errcode = 'PQ003', column = 'p_time_zone', hint = 'The view pg_timezone_names lists them.';
    elsif num_nonnulls(p_cron, p_every) <> 1 then
        raise exception 'exactly one of p_cron and p_every must be given, not %',
                        case when p_cron is null then 'none' else 'both' end
            using errcode = 'PQ003', column = 'p_cron, p_every';
    elsif p_cron is not null and p_start is not null then
        raise exception 'p_start is the first time of p_every, and is not allowed with p_cron'
            using errcode = 'PQ003', column = 'p_start, p_every, p_cron';
    elsif not isfinite(p_start) then
        raise exception 'p_start must be a finite time, not %', p_start using errcode = 'PQ003', column = 'p_start';
    elsif p_every < interval '1 s' or p_every > _pgqueue.max_interval()
          or extract(microseconds from p_every) % 1000000 <> 0
          or least(extract(year from p_every), extract(month from p_every), extract(day from p_every),
                   extract(epoch from p_every - date_trunc('day', p_every))) < 0 then
        raise exception 'p_every must be an interval of whole seconds, from 1 second to 10 years, without negative '
                        'parts, not %',
                        quote_literal(p_every)
            using errcode = 'PQ003', column = 'p_every';
    end if;
    if p_cron is not null and _pgqueue.next_by_cron(p_cron, p_time_zone, clock_timestamp()) is null then
        raise exception 'p_cron never matches: no allowed month has an allowed day, in %',
                        quote_literal(p_cron)
            using errcode = 'PQ003', column = 'p_cron';
    end if;
    v_schedule.cron := p_cron;
    v_schedule.every := p_every;
    v_schedule.time_zone := p_time_zone;
    v_schedule.start_at := date_trunc(
        'second', coalesce(p_start, _pgqueue.nth_time(date_trunc('second', p_from), p_every, p_time_zone, 1)));
    return v_schedule;
end $$;
