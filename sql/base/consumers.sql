-- Consumers, their settings and their filters. log/cursors.sql stores how far each consumer has taken its stream, and
-- queue/state/consumer_messages.sql the messages that it has taken and not finished.

create table if not exists pgqueue.consumers (
    consumer_id        int         generated always as identity primary key,
    stream_id          int         not null references pgqueue.streams,
    stream_name        text        not null,                     -- so that a claim need not read streams
    name               text        not null,
    ordering           text        not null check (ordering in ('none', 'key', 'stream')),
    filtered           boolean     not null default false,       -- it gets only messages that pass its filter
    partitions         int,                                      -- of a group (groups/groups.sql)
    paused             boolean     not null default false,       -- it claims nothing
    scheduled          boolean     not null default false,       -- its stream may have schedules
    created_at         timestamptz not null default clock_timestamp(),
    -- The names of the settings that were set. All others have their defaults from base/settings.sql.
    given              text[]      not null default '{}',
    max_deliver_count  int         check (max_deliver_count > 0),  -- null: no limit, the setting's value "never"
    visibility_timeout interval    not null check (visibility_timeout > interval '0'),
    -- How the delay after a failure grows: constant, linear or exponential. A null base is 0 if constant, else 1 s.
    backoff            text        not null,
    backoff_base       interval,
    backoff_cap        interval    not null,
    backoff_jitter     float8      not null,
    keep_history       interval,                                 -- how long acknowledgements are kept; null: not at all
    notify_done        boolean     not null,                     -- notify of acknowledged and dead messages
    max_backlog        bigint,                                   -- backlog (back_pressure.sql); null: no limit
    on_full            text        not null,                     -- reject or drop_oldest
    per_key_limit      int,                                      -- messages of a key in flight; null: no limit
    per_key_capacity   int,                                      -- unfinished messages of a key (key_capacity.sql)
    per_key_interval   interval,                                 -- within such a time, of each key at most ...
    per_key_burst      int         not null,                     -- ... this many are delivered; null interval: no limit
    per_key_latest     boolean     not null,                     -- of a key, only the newest waits (newest.sql)
    fair               boolean     not null,                     -- keys take turns
    max_in_flight      int,                                      -- messages in claims (throttle.sql); null: no limit
    rate_limit         int,                                      -- at most this many messages are delivered ...
    rate_interval      interval,                                 -- ... within any such time; null: no limit
    -- What claims and acknowledgements must check. 'simple': a claim only searches for free bundles, and an
    -- acknowledgement only deletes; else 'careful'. ' keyed' is added for a consumer that delivers by key.
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

-- The filters of consumers (queue/take/filters.sql).
-- on drop_consumer
create table if not exists pgqueue.consumer_filters (
    consumer_id int primary key,
    topic       text,      -- a pattern for the keys of messages; null: any key
    topic_regex text,
    condition   jsonpath   -- on the content of messages; null: no condition
);

-- What the settings of a consumer imply, one function for each condition. The column profile has the conditions that
-- each claim checks first.

-- Whether claims only search for free bundles, and acknowledgements only delete. Null: there is no such consumer.
create or replace function _pgqueue.needs_no_checks(p_profile text) returns boolean
language sql immutable as $$ select p_profile in ('simple', 'simple keyed') $$;

-- Whether a consumer delivers by key: it has an ordering, or limits of keys.
create or replace function _pgqueue.is_keyed(p_profile text) returns boolean
language sql immutable as $$ select p_profile in ('simple keyed', 'careful keyed') $$;

-- Whether a consumer limits its keys. Such a consumer is keyed, with or without an ordering.
create or replace function _pgqueue.limits_keys(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$
    select p_consumer.per_key_limit is not null or p_consumer.per_key_interval is not null or p_consumer.fair
$$;

-- Whether a consumer limits how many messages are in flight, or are delivered within a time (queue/claim/throttle.sql).
create or replace function _pgqueue.is_throttled(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$ select p_consumer.max_in_flight is not null or p_consumer.rate_limit is not null $$;

-- Whether settings require that each claim has the consumer's lock: concurrent claims could exceed a limit, or deliver
-- what has to wait.
create or replace function _pgqueue.claims_in_turn(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$
    select p_consumer.per_key_interval is not null or p_consumer.per_key_latest or _pgqueue.is_throttled(p_consumer)
$$;

-- Whether messages are screened before they are ready: by the consumer's filter, or for the newest message of each key.
create or replace function _pgqueue.is_screened(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$ select p_consumer.filtered or p_consumer.per_key_latest $$;

-- Whether an acknowledgement must do more than delete: keep history, notify, or delete entries of key_backlog.
create or replace function _pgqueue.records_ends(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$
    select p_consumer.keep_history is not null or p_consumer.notify_done or p_consumer.per_key_capacity is not null
$$;

-- Whether the limits of keys count only unclaimed messages.
create or replace function _pgqueue.limits_only_unclaimed(p_consumer pgqueue.consumers) returns boolean
language sql immutable as $$ select p_consumer.ordering = 'none' and p_consumer.per_key_limit is null $$;
