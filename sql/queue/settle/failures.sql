-- The consequences of a failure: whether messages are dead-lettered, and how long they are delayed.

-- The consequences for messages that are returned, see return() in queue/settle/return.sql.
do $$
begin
    if to_regtype('pgqueue.failure') is null then
        create type pgqueue.failure as (
            certain     boolean,      -- they are known to have failed: dead-lettered after too many deliveries
            counted     boolean,      -- it counts as a delivery
            happened_at timestamptz,
            returned_at timestamptz,  -- a delay that ends before is none
            delay       interval,     -- null: according to the consumer's settings
            chance      float8,       -- 0 to 1
            note        jsonb);       -- keys to add to their notes
    end if;
end $$;

-- How many deliveries of a message count for max_deliver_count and the backoff: all but those to Spark, whose query
-- processes many messages and, when it ends, does not say which one failed. spark/quarantine.sql handles a message that
-- stops its query.
create or replace function _pgqueue.counted_deliveries(p_deliver_count int, p_note jsonb) returns int
language sql immutable parallel safe as $$ select p_deliver_count - coalesce((p_note ->> 'spark')::int, 0) $$;

-- Until when a returned message is delayed; null: not at all. The delay after the first failure is backoff_base. With
-- backoff=linear the delays are 2, 3, 4 ... times that for later failures, with exponential 2, 4, 8 ... times.
-- backoff_cap is the longest delay. The delay is shortened at random, by at most backoff_jitter of it.
--   p_counted  counted_deliveries() of the message
create or replace function _pgqueue.retry_at(p_consumer pgqueue.consumers, p_counted int, p_failure pgqueue.failure)
returns timestamptz language plpgsql stable as $$
declare
    v_delay interval := p_failure.delay;
begin
    if v_delay is null then
        if p_consumer.backoff = 'constant' and coalesce(p_consumer.backoff_base, '0') = '0' then
            return null;
        end if;
        v_delay := make_interval(secs => (1 - p_consumer.backoff_jitter * p_failure.chance) * least(
            extract(epoch from p_consumer.backoff_cap)::float8,
            extract(epoch from coalesce(p_consumer.backoff_base, '1 s'))::float8
                * case p_consumer.backoff when 'linear' then greatest(p_counted, 1)
                                          when 'exponential' then power(2, least(greatest(p_counted, 1) - 1, 60))
                                          else 1 end));
    end if;
    -- the lease may have ended long ago
    return case when v_delay > '0' and p_failure.happened_at + v_delay > p_failure.returned_at
                then p_failure.happened_at + v_delay end;
end $$;

-- Whether a returned message is dead-lettered.
--   p_counted  its counted_deliveries()
create or replace function _pgqueue.deliveries_exhausted(p_consumer pgqueue.consumers, p_counted int,
                                                         p_failure pgqueue.failure) returns boolean
language sql immutable as $$ select coalesce(p_failure.certain and p_counted >= p_consumer.max_deliver_count, false) $$;

-- The consequences for messages of a claim that are returned: whether the delivery counts, whether they are known to
-- have failed, how long they are delayed, and their note. See return().
--   p_most  the highest number of deliveries among the messages
create or replace function _pgqueue.failure(p_bundles pgqueue.consumer_messages[], p_how text, p_from timestamptz,
                                            p_delay interval, p_note jsonb, p_most int) returns pgqueue.failure
language plpgsql as $$
declare
    v_failure pgqueue.failure;
    v_head    pgqueue.consumer_messages := p_bundles[1];
    v_count   bigint := _pgqueue.count_of(p_bundles);
begin
    v_failure.counted := p_how <> 'not_failed';
    v_failure.certain := p_how = 'failed' or (p_how = 'one_failed' and v_count = 1 and v_head.reader is null);
    v_failure.happened_at := p_from;
    v_failure.returned_at := clock_timestamp();  -- the same for all messages
    -- messages that a Spark reader lost are for the next claimer, or for the reader itself when it runs again
    v_failure.delay := coalesce(p_delay, case
        when p_how = 'not_failed' or (p_how = 'one_failed' and v_head.reader is not null) then '0'::interval end);
    v_failure.chance := random();  -- the same for all messages, so that a bundle stays one bundle
    v_failure.note := p_note;
    if v_failure.counted then
        -- by the second: messages that fail alike within a second stay alike
        v_failure.note := coalesce(p_note, '{}') || jsonb_build_object('attempt', jsonb_strip_nulls(jsonb_build_object(
            'at', extract(epoch from p_from)::bigint, 'owner', v_head.owner,
            'error', left(p_note ->> 'error', _pgqueue.limit_error()))));
    end if;
    if p_how = 'one_failed' and v_head.reader is not null then
        v_failure.note := v_failure.note || '{"spark": 1}';
    end if;
    if p_how = 'one_failed' and v_head.reader is null and p_most > 1 then
        v_failure.note := v_failure.note || jsonb_build_object('at_most', (v_count + 1) / 2);
    end if;
    return v_failure;
end $$;
