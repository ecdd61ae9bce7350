-- Schedules: messages that are sent at planned times. Nobody is in charge of them: who claims for a consumer of the stream, or maintains it,
-- sends what is due, if nobody else is about to. The message, and when the next one is due, are one transaction: so each time has one message,
-- whoever dies. Times that passed while nobody looked have one together.
--
-- A consumer's row says whether its stream has schedules: where there are none, nobody looks.

-- When the next schedule of a stream is due; null: never.
create or replace function pgqueue._schedule_due(p_stream_id int) returns timestamptz
language plpgsql stable
as $$
begin
    return (select due_at from pgqueue.schedule_turns where stream_id = p_stream_id order by version desc limit 1);
end $$;

-- Sends what is due of a stream's schedules, a bounded number, unless somebody else does. Waits for nobody.
-- Locks, to the end of the transaction: the stream's schedules; the publish lock, shared.
create or replace function pgqueue._run_schedules(p_stream_id int) returns void
language plpgsql
as $$
declare
    v_now      timestamptz := clock_timestamp();
    v_stream   pgqueue.streams;
    v_schedule pgqueue.schedules;
begin
    if (pgqueue._schedule_due(p_stream_id) <= v_now) is not true
       or not pg_try_advisory_xact_lock(pgqueue._lock_class_schedules(), p_stream_id) then
        return;
    end if;
    select * into v_stream from pgqueue.streams where stream_id = p_stream_id;
    for v_schedule in
        select * from pgqueue.schedules where stream_id = p_stream_id and not paused and next_at <= v_now
        order by next_at, name limit pgqueue._limit_schedules()
    loop
        perform pgqueue._send_scheduled(v_stream, v_schedule, v_now);
    end loop;
    perform pgqueue._note_turn(p_stream_id);
end $$;

-- Sends the message of a schedule, and plans the next one. A message that cannot be sent is passed over, and says so: it must not fail the claim
-- that comes upon it; a time that cannot be told any more, because the server lost the time zone, pauses it. Needs the lock of the stream's schedules.
create or replace function pgqueue._send_scheduled(p_stream pgqueue.streams, p_schedule pgqueue.schedules, p_now timestamptz) returns void
language plpgsql
as $$
declare
    v_new pgqueue.schedules := p_schedule;
begin
    v_new.sent_at := clock_timestamp();
    v_new.planned_at := p_schedule.next_at;
    v_new.last_error := null;
    begin
        v_new.next_at := null;
        v_new.next_at := pgqueue._next_time(p_schedule, p_now);
        v_new.seq := nextval(('pgqueue.seq_' || p_stream.stream_id)::regclass);
        insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
        values (v_new.seq, p_stream.stream_id, p_schedule.key, p_schedule.data, p_schedule.data_bytes, pgqueue._scheduled_headers(p_schedule));
        perform pgqueue._publish(p_stream, int8multirange(int8range(v_new.seq, v_new.seq, '[]')), 1, p_schedule.priority, null,
                                 case when p_schedule.consumers is not null then array(
                                     select consumer_id from pgqueue.consumers where stream_id = p_stream.stream_id and name = any (p_schedule.consumers)) end);
    exception when others then
        if left(sqlstate, 2) in ('40', '53', '55', '57', '58') then
            raise;  -- no fault of the schedule's: later it will do
        end if;
        v_new.seq := null;
        v_new.last_error := sqlerrm;
    end;
    update pgqueue.schedules
    set sent_at = v_new.sent_at, planned_at = v_new.planned_at, seq = v_new.seq, last_error = v_new.last_error,
        next_at = coalesce(v_new.next_at, 'infinity'), paused = paused or v_new.next_at is null
    where stream_id = p_schedule.stream_id and name = p_schedule.name;
end $$;

-- The headers of a schedule's next message: its own, its name, and the time it is planned for.
create or replace function pgqueue._scheduled_headers(p_schedule pgqueue.schedules) returns jsonb
language sql stable
as $$
    select coalesce(p_schedule.headers, '{}')
        || jsonb_build_object('schedule', p_schedule.name, 'planned_at', to_char(p_schedule.next_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
$$;

-- The first time of a schedule after p_after. Null: there is none.
create or replace function pgqueue._next_time(p_schedule pgqueue.schedules, p_after timestamptz) returns timestamptz
language sql stable
as $$
    select case when p_schedule.cron is not null then pgqueue._next_by_cron(p_schedule.cron, p_schedule.time_zone, p_after)
                else pgqueue._next_by_interval(p_schedule.start_at, p_schedule.every, p_schedule.time_zone, p_after) end
$$;

-- Notes when the next schedule of a stream is due. Needs the lock of its schedules.
create or replace function pgqueue._note_turn(p_stream_id int) returns void
language plpgsql
as $$
declare
    v_version bigint;
begin
    delete from pgqueue.schedule_turns
    where stream_id = p_stream_id and version = (select version from pgqueue.schedule_turns where stream_id = p_stream_id order by version desc limit 1)
    returning version into v_version;
    insert into pgqueue.schedule_turns (stream_id, version, due_at)
    select p_stream_id, coalesce(v_version, 0) + 1, min(next_at) filter (where not paused)
    from pgqueue.schedules where stream_id = p_stream_id
    having count(*) > 0;
end $$;

-- The same, and whether the stream has schedules at all. Needs _lock_schedules.
create or replace function pgqueue._note_schedules(p_stream_id int) returns void
language plpgsql
as $$
declare
    v_any boolean := exists (select from pgqueue.schedules where stream_id = p_stream_id);
begin
    perform pgqueue._note_turn(p_stream_id);
    update pgqueue.consumers set scheduled = v_any where stream_id = p_stream_id and scheduled <> v_any;
end $$;

-- Locks the schedules of a stream, for who changes them; and the stream, so that no consumer is made meanwhile.
-- Returns the stream. Errors: PQ001; 55P03 as _lock_consumer.
create or replace function pgqueue._lock_schedules(p_stream text) returns pgqueue.streams
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
begin
    perform pgqueue._check_isolation();
    perform from pgqueue.streams where stream_id = v_stream.stream_id for update;
    if not pg_try_advisory_xact_lock(pgqueue._lock_class_schedules(), v_stream.stream_id) then
        perform pgqueue._await_lock(pgqueue._lock_class_schedules(), v_stream.stream_id, false);
    end if;
    return v_stream;
end $$;

-- A schedule by its name. Errors: PQ003.
create or replace function pgqueue._schedule(p_stream pgqueue.streams, p_name text) returns pgqueue.schedules
language plpgsql stable
as $$
declare
    v_schedule pgqueue.schedules;
begin
    select * into v_schedule from pgqueue.schedules where stream_id = p_stream.stream_id and name = p_name;
    if not found then
        raise exception 'unknown schedule % of stream %', coalesce(quote_literal(p_name), 'null'), quote_literal(p_stream.name)
            using errcode = 'PQ003', column = 'p_name',
                  hint = format('There are: %s.', coalesce((select string_agg(quote_literal(s.name), ', ')
                                                           from (select name from pgqueue.schedules where stream_id = p_stream.stream_id order by name limit 10) s), 'none'));
    end if;
    return v_schedule;
end $$;

-- Raises PQ003 for a time zone that the server does not know by a name. (What it takes for one beside these, as UTC+2, means the opposite.)
create or replace function pgqueue._check_time_zone(p_time_zone text) returns void
language plpgsql stable
as $$
begin
    if not exists (select from pg_timezone_names where name = p_time_zone) then
        raise exception 'p_time_zone is the name of a time zone, such as Europe/Berlin or UTC, not %', coalesce(quote_literal(left(p_time_zone, 100)), 'null')
            using errcode = 'PQ003', column = 'p_time_zone', hint = 'select name from pg_timezone_names';
    end if;
end $$;

-- Raises PQ003 unless it is told in one way when to send, and that comes.
create or replace function pgqueue._check_times(p_cron text, p_every interval, p_time_zone text, p_start timestamptz) returns void
language plpgsql stable
as $$
begin
    perform pgqueue._check_time_zone(p_time_zone);
    if num_nonnulls(p_cron, p_every) <> 1 then
        raise exception 'either p_cron or p_every says when, not %', case when p_cron is null then 'none' else 'both' end
            using errcode = 'PQ003', column = 'p_cron, p_every';
    elsif p_cron is not null and p_start is not null then
        raise exception 'p_start is where p_every begins, and not for p_cron' using errcode = 'PQ003', column = 'p_start';
    elsif not isfinite(p_start) then
        raise exception 'p_start is a time, not %', p_start using errcode = 'PQ003', column = 'p_start';
    elsif p_every < interval '1 s' or p_every > pgqueue._max_interval() or extract(microseconds from p_every) % 1000000 <> 0
          or pgqueue._calendar_part(p_every) < interval '0' or p_every < pgqueue._calendar_part(p_every) then
        raise exception 'p_every is an interval of whole seconds, from 1 second to 10 years, not %', quote_literal(p_every)
            using errcode = 'PQ003', column = 'p_every';
    end if;
    if p_cron is not null then
        if pgqueue._next_by_cron(p_cron, p_time_zone, clock_timestamp()) is null then
            raise exception 'p_cron never comes: no month that it allows has a day that it allows, in %', quote_literal(p_cron)
                using errcode = 'PQ003', column = 'p_cron';
        end if;
    end if;
end $$;
