-- Schedules: messages that are sent at planned times. See publish/schedules.sql.

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
    next_at    timestamptz not null,             -- its next time, or of those that were missed the first
    sent_at    timestamptz,                      -- its last message: when it was sent, ...
    planned_at timestamptz,                      -- ... for which time, ...
    -- ... and its number; null: the message could not be sent, ...
    seq        bigint,
    last_error text,                             -- ... because of this
    created_at timestamptz not null default clock_timestamp(),
    primary key (stream_id, name)
);

-- When the next schedule of a stream is due, if it has any. Rows are never updated, as those of consumer_cursors: the
-- newest version counts, and claims find it first, however many dead versions a long transaction elsewhere keeps.
-- on drop_stream
create table if not exists pgqueue.schedule_turns (
    stream_id int    not null,
    version   bigint not null,
    due_at    timestamptz,     -- null: all are paused
    primary key (stream_id, version)
);

-- A cron expression: what each field allows.
do $$
begin
    if to_regtype('pgqueue.cron') is null then
        create type pgqueue.cron as (minutes int[], hours int[], days int[], months int[], weekdays int[],
                                     either_day boolean, by_clock boolean);
    end if;
end $$;
