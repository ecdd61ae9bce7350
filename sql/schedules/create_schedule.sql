-- Schedules: messages at the times of a cron expression or an interval.

-- Sends a message at each time of a cron expression or an interval.
-- The next claim for a consumer of the stream, or the next call of maintain(), sends it, so it is slightly late. If
-- there is no claim for some time, one message is sent for all missed times.
--   p_name       1 to 200 characters, unique in the stream
--   p_cron       minute, hour, day of the month, month, day of the week, as in Vixie cron, or @hourly, @daily, ...; or
--   p_every      an interval of whole seconds
--   p_time_zone  the name of the time zone for p_cron, and for the days and months of p_every. For daylight saving time
--                see schedules/cron.sql
--   p_start      the first time of p_every; null: one interval from now
--   p_data, p_data_bytes, p_key, p_headers, p_priority, p_consumers  the message, as for send. It has two additional
--       headers: schedule, the name; and planned_at, its time (the first of missed ones) in UTC as
--       2026-01-31T12:00:00Z. If one of p_consumers is dropped, the others still get the message
--   p_replace    replace an existing schedule. If its times are the same, it keeps its next time
-- Returns its next time. Errors: PQ001, PQ002, PQ003, PQ004, PQ006, PQ007. Locks: the stream's schedules, and the
-- stream's row, against the creation of consumers.
create or replace function pgqueue.create_schedule(p_stream text, p_name text, p_cron text default null,
                                                   p_every interval default null, p_time_zone text default 'UTC',
                                                   p_data text default null, p_key text default null,
                                                   p_headers jsonb default null, p_priority int default 0,
                                                   p_consumers text[] default null, p_data_bytes bytea default null,
                                                   p_start timestamptz default null, p_replace boolean default false)
returns timestamptz language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_now    timestamptz := date_trunc('second', clock_timestamp());
    v_new    pgqueue.schedules;
    v_old    pgqueue.schedules;
begin
    perform _pgqueue.check_name('schedule', p_name);
    v_new := _pgqueue.timed_schedule(p_cron, p_every, p_time_zone, p_start, v_now);
    perform _pgqueue.check_publication(p_priority, null);
    perform _pgqueue.consumer_ids(v_stream.stream_id, p_consumers);
    v_new.stream_id := v_stream.stream_id;
    v_new.name := p_name;
    v_new.data := p_data;
    v_new.data_bytes := p_data_bytes;
    v_new.key := p_key;
    v_new.headers := p_headers;
    v_new.priority := p_priority;
    v_new.consumers := p_consumers;
    v_new.next_at := _pgqueue.next_time(v_new, v_now);
    perform _pgqueue.check_payload(v_stream, p_data, p_data_bytes, p_key, p_headers);
    perform _pgqueue.check_payload(v_stream, p_data, p_data_bytes, p_key, _pgqueue.scheduled_headers(v_new));

    perform _pgqueue.lock_schedules(p_stream);
    delete from pgqueue.schedules where stream_id = v_stream.stream_id and name = p_name returning * into v_old;
    if found and p_replace is not true then
        raise exception 'schedule % of stream % already exists', quote_literal(p_name), quote_literal(p_stream)
            using errcode = 'PQ006', column = 'p_replace', hint = 'To change it, set p_replace.';
    end if;
    v_new.paused := coalesce(v_old.paused, false);
    v_new.created_at := coalesce(v_old.created_at, clock_timestamp());
    v_new.timed_at := v_now;
    v_new.sent_at := v_old.sent_at;
    v_new.planned_at := v_old.planned_at;
    v_new.seq := v_old.seq;
    -- (as text: 30 days equal a month, and 24 hours a day)
    if (v_old.cron, v_old.every::text, v_old.time_zone) is not distinct from (p_cron, p_every::text, p_time_zone)
        and (p_start = v_old.start_at) is not false then
        v_new.start_at := v_old.start_at;
        v_new.next_at := v_old.next_at;
        v_new.timed_at := v_old.timed_at;
    end if;
    insert into pgqueue.schedules select v_new.*;
    perform _pgqueue.record_schedules(v_stream.stream_id);
    return v_new.next_at;
end $$;

-- Deletes a schedule; its messages remain.
-- Errors: PQ001, PQ003, PQ007. Locks: as create_schedule.
create or replace function pgqueue.drop_schedule(p_stream text, p_name text) returns void
language plpgsql as $$
declare
    v_id int := (_pgqueue.locked_schedule(p_stream, p_name)).stream_id;
begin
    delete from pgqueue.schedules where stream_id = v_id and name = p_name;
    perform _pgqueue.record_schedules(v_id);
end $$;

-- Pauses a schedule: it sends nothing until it is resumed. Errors, locks: as drop_schedule.
create or replace function pgqueue.pause_schedule(p_stream text, p_name text) returns void
language plpgsql as $$
declare
    v_id int := (_pgqueue.locked_schedule(p_stream, p_name)).stream_id;
begin
    update pgqueue.schedules set paused = true where stream_id = v_id and name = p_name;
    perform _pgqueue.record_schedules(v_id);
end $$;

-- Resumes a paused schedule at its next time; times during the pause are skipped.
-- Returns its next time. Errors, locks: as drop_schedule.
create or replace function pgqueue.resume_schedule(p_stream text, p_name text) returns timestamptz
language plpgsql as $$
declare
    v_schedule pgqueue.schedules := _pgqueue.locked_schedule(p_stream, p_name);
begin
    if v_schedule.paused then
        v_schedule.next_at := _pgqueue.next_time(v_schedule, clock_timestamp());
        update pgqueue.schedules
        set paused = false, next_at = v_schedule.next_at,
            timed_at = case when next_at = v_schedule.next_at then timed_at else clock_timestamp() end
        where stream_id = v_schedule.stream_id and name = p_name;
        perform _pgqueue.record_schedules(v_schedule.stream_id);
    end if;
    return v_schedule.next_at;
end $$;

-- Returns the next times of a cron expression or an interval, without a schedule.
--   p_cron, p_every, p_time_zone, p_start  as in create_schedule
--   p_after  times after this one; null: now
--   p_count  the number of times, 1 to 1,000
-- Errors: PQ003. Locks nothing.
create or replace function pgqueue.schedule_times(p_cron text default null, p_every interval default null,
                                                  p_time_zone text default 'UTC', p_after timestamptz default null,
                                                  p_count int default 5, p_start timestamptz default null)
returns setof timestamptz language plpgsql stable as $$
declare
    v_schedule pgqueue.schedules;
    v_at       timestamptz := coalesce(p_after, clock_timestamp());
begin
    perform _pgqueue.check_number('p_count', p_count, 1, 1000);
    if not isfinite(v_at) then
        raise exception 'p_after must be a finite time, not %', p_after using errcode = 'PQ003', column = 'p_after';
    end if;
    v_schedule := _pgqueue.timed_schedule(p_cron, p_every, p_time_zone, p_start, v_at);
    for i in 1..p_count loop
        v_at := _pgqueue.next_time(v_schedule, v_at);
        return next v_at;
    end loop;
end $$;

-- One row per schedule.
do $view$ begin perform _pgqueue.make_view('stream_schedules', $query$
    select s.name as stream, h.name as schedule, h.cron, h.every, h.time_zone,
           case when not h.paused then h.next_at end as next_at, h.paused,
           h.planned_at as last_planned_at, h.sent_at as last_sent_at, h.seq as last_seq, h.last_error,
           h.key, h.data, h.data_bytes, h.headers, h.priority, h.consumers, h.start_at, h.created_at
    from pgqueue.schedules h join pgqueue.streams s using (stream_id)
$query$); end $view$;

-- An interval from text; an error about the text names the argument. Postgres's own error names no argument. Errors:
-- PQ003.
create or replace function pgqueue.as_interval(p_argument text, p_text text) returns interval
language plpgsql stable as $$
begin
    return p_text::interval;
exception when data_exception then
    raise exception '% must be an interval with a unit: 500 ms, 30 s or 5 minutes, not %', p_argument,
                    quote_literal(left(p_text, 100)) using errcode = 'PQ003', column = p_argument;
end $$;
