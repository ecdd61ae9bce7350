-- What a consumer's settings ask of those who serve it: each question has its function. consumers.way answers what each
-- claim asks first: 'simple' or 'careful', and after that 'keyed' if its messages go by key (tables/consumers.sql).

-- Whether claims have nothing to ask but what is ready, and acknowledgements nothing to do but to forget. Null: there
-- is no such consumer.
create or replace function _pgqueue.is_simple(p_way text) returns boolean
language sql immutable
as $$ select p_way in ('simple', 'simple keyed') $$;

-- Whether a consumer delivers by key: it has an ordering, or limits of keys.
create or replace function _pgqueue.is_keyed(p_way text) returns boolean
language sql immutable
as $$ select p_way in ('simple keyed', 'careful keyed') $$;

-- Whether a consumer limits its keys: it is keyed then, also without an ordering.
create or replace function _pgqueue.limits_keys(p_consumer pgqueue.consumers) returns boolean
language sql immutable
as $$
    select p_consumer.per_key_limit is not null or p_consumer.per_key_interval is not null or p_consumer.fair
$$;

-- Whether a consumer limits how many of its messages are in flight, or delivered in a time (queue/throttle.sql).
create or replace function _pgqueue.is_throttled(p_consumer pgqueue.consumers) returns boolean
language sql immutable
as $$ select p_consumer.max_in_flight is not null or p_consumer.rate_limit is not null $$;

-- Whether messages are judged before they are ready: by the consumer's filter, or as the newest of their keys.
create or replace function _pgqueue.judges(p_consumer pgqueue.consumers) returns boolean
language sql immutable
as $$ select p_consumer.filtered or p_consumer.per_key_latest $$;

-- Whether an acknowledgement has more to do than to forget: to keep history, to notify, or to free a place of a key.
create or replace function _pgqueue.notes_ends(p_consumer pgqueue.consumers) returns boolean
language sql immutable
as $$
    select p_consumer.keep_history is not null or p_consumer.notify_done or p_consumer.per_key_capacity is not null
$$;

-- Whether only messages that nobody has claimed count for the limits of keys.
create or replace function _pgqueue.counts_ready(p_consumer pgqueue.consumers) returns boolean
language sql immutable
as $$ select p_consumer.ordering = 'none' and p_consumer.per_key_limit is null $$;
