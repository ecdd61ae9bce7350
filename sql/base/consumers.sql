-- Consumers, their settings and filters. What each has taken from its stream: log/cursors.sql; and what it has not
-- finished of that: queue/state/consumer_messages.sql.

create table if not exists pgqueue.consumers (
    consumer_id        int         generated always as identity primary key,
    stream_id          int         not null references pgqueue.streams,
    stream_name        text        not null,                     -- the stream's, so that claims look for no stream
    name               text        not null,
    ordering           text        not null check (ordering in ('none', 'key', 'stream')),
    filtered           boolean     not null default false,       -- it gets only messages that pass its filter
    partitions         int,                                      -- of a group, see groups/groups.sql
    paused             boolean     not null default false,       -- it claims nothing
    scheduled          boolean     not null default false,       -- its stream has schedules
    created_at         timestamptz not null default clock_timestamp(),
    -- The settings that somebody gave it, by name. All others have the default of base/settings.sql, and follow it.
    given              text[]      not null default '{}',
    max_deliver_count  int         check (max_deliver_count > 0),  -- null: never, the setting's other word
    visibility_timeout interval    not null check (visibility_timeout > interval '0'),
    -- How the delay of a failed message grows: constant, linear or exponential. A null base is 0 if constant, else 1 s.
    backoff            text        not null,
    backoff_base       interval,
    backoff_cap        interval    not null,
    backoff_jitter     float8      not null,
    keep_history       interval,                                 -- how long acknowledgements are kept; null: not at all
    notify_done        boolean     not null,                     -- notify of what is acknowledged or dead
    max_backlog        bigint,                                   -- messages before it (back_pressure.sql); null: any
    on_full            text        not null,                     -- reject or drop_oldest
    per_key_limit      int,                                      -- messages of a key that may be in flight; null: any
    per_key_capacity   int,                                      -- unfinished ones (key_capacity.sql); null: any
    per_key_interval   interval,                                 -- in each such time, of a key at most ...
    per_key_burst      int         not null,                     -- ... so many are delivered; null interval: any
    per_key_latest     boolean     not null,                     -- of a key, only the newest waits (newest.sql)
    fair               boolean     not null,                     -- keys are served in turns
    max_in_flight      int,                                      -- messages in open claims (throttle.sql); null: any
    rate_limit         int,                                      -- so many messages are delivered at most ...
    rate_interval      interval,                                 -- ... within any such time; null: any
    -- How its messages are served. 'careful': claims have more to ask than what is ready, or acknowledgements more to
    -- do than to forget; else 'simple'. And 'keyed': by key.
    profile                text        not null generated always as (
        case when partitions is not null or paused or scheduled or filtered or keep_history is not null or notify_done
                  or max_backlog is not null or per_key_capacity is not null or per_key_latest
                  or per_key_interval is not null or (ordering <> 'none' and (per_key_limit is not null or fair))
                  or max_in_flight is not null or rate_limit is not null
             then 'careful' else 'simple' end
        || case when ordering <> 'none' or per_key_limit is not null or per_key_interval is not null or fair
                then ' keyed' else '' end) stored,
    unique (stream_id, name),
    unique (stream_name, name)
);

-- The filters of consumers, see queue/take/filters.sql.
-- on drop_consumer
create table if not exists pgqueue.consumer_filters (
    consumer_id int primary key,
    topic       text,      -- of the messages' keys; null: any
    topic_regex text,
    condition   jsonpath   -- what the messages hold; null: anything
);

-- What a consumer's settings ask of those who serve it: each question has its function. consumers.profile answers what
-- each claim asks first.

-- Whether claims have nothing to ask but what is ready, and acknowledgements nothing to do but to forget. Null: there
-- is no such consumer.
create or replace function _pgqueue.is_simple(p_profile text) returns boolean
language sql immutable as $$ select p_profile in ('simple', 'simple keyed') $$;

-- Whether a consumer delivers by key: it has an ordering, or limits of keys.
create or replace function _pgqueue.is_keyed(p_profile text) returns boolean
language sql immutable as $$ select p_profile in ('simple keyed', 'careful keyed') $$;

-- Whether a consumer limits its keys: it is keyed then, also without an ordering.
create or replace function _pgqueue.limits_keys(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$
    select p_consumer.per_key_limit is not null or p_consumer.per_key_interval is not null or p_consumer.fair
$$;

-- Whether a consumer limits how many of its messages are in flight, or delivered in a time (queue/claim/throttle.sql).
create or replace function _pgqueue.is_throttled(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$ select p_consumer.max_in_flight is not null or p_consumer.rate_limit is not null $$;

-- Whether messages are judged before they are ready: by the consumer's filter, or as the newest of their keys.
create or replace function _pgqueue.is_screened(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$ select p_consumer.filtered or p_consumer.per_key_latest $$;

-- Whether an acknowledgement has more to do than to forget: to keep history, to notify, or to free a place of a key.
create or replace function _pgqueue.notes_ends(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$
    select p_consumer.keep_history is not null or p_consumer.notify_done or p_consumer.per_key_capacity is not null
$$;

-- Whether only messages that nobody has claimed count for the limits of keys.
create or replace function _pgqueue.counts_ready(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$ select p_consumer.ordering = 'none' and p_consumer.per_key_limit is null $$;
