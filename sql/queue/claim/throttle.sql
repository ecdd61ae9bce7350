-- Limits of a whole consumer: how many messages may be in open claims (max_in_flight), and how many are delivered
-- within a time (rate_limit, rate_interval). All claims of such a consumer hold its lock until their commit, so each
-- sees those before it. A consumer without these settings pays nothing.
--
-- In flight are the messages of open claims, also after the end of a lease, until the claim is released. The cursor
-- records how many messages were delivered lately, and until when they count. That time is rounded up to a twentieth of
-- the interval, so that there are few of them.

-- How many messages a claim may have: as many as it wants, or as the limits allow. Before it returns fewer, it checks
-- for ended leases. Returns the cursor, and the number. Needs the consumer's lock.
create or replace function _pgqueue.left_by_limits(p_consumer pgqueue.consumers,
                                                   inout p_cursor pgqueue.consumer_cursors, p_want bigint,
                                                   out o_want bigint)
language plpgsql as $$
begin
    o_want := p_want;
    if p_consumer.max_in_flight is not null then
        o_want := least(p_want, _pgqueue.left_in_flight(p_consumer, p_cursor.hints));
        if o_want < p_want then
            p_cursor := _pgqueue.probe_leases(p_consumer, p_cursor);
            o_want := least(p_want, _pgqueue.left_in_flight(p_consumer, p_cursor.hints));
        end if;
    end if;
    if p_consumer.rate_limit is not null then
        o_want := least(o_want, _pgqueue.left_in_rate(p_consumer, p_cursor));
    end if;
end $$;

-- How many more messages may be in flight; negative if a lowered limit is exceeded.
create or replace function _pgqueue.left_in_flight(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns bigint language plpgsql as $$
declare
    v_lane pgqueue.lane_hint;
    v_left bigint := p_consumer.max_in_flight - (
        select coalesce(sum(message_count), 0) from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_long()
          and place >= _pgqueue.place_at(p_hints.long_from));
begin
    foreach v_lane in array p_hints.lanes loop
        v_left := v_left - (
            select coalesce(sum(message_count), 0) from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
              and (place, first_seq) >= (v_lane.low_place, v_lane.low_seq) and token is not null);
    end loop;
    return v_left;
end $$;

-- How many more messages may be delivered now.
create or replace function _pgqueue.left_in_rate(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns bigint language plpgsql as $$
begin
    return p_consumer.rate_limit - (select coalesce(sum(d.n), 0)
                                    from unnest(p_cursor.delivered, p_cursor.delivered_at) d (n, at)
                                    where _pgqueue.counts(p_consumer, d.at));
end $$;

-- Whether messages that were delivered at a time still count. (A time in the future means that the clock was set back.)
create or replace function _pgqueue.counts(p_consumer pgqueue.consumers, p_at timestamptz) returns boolean
language sql volatile as $$
    select p_at > clock_timestamp() - p_consumer.rate_interval
       and p_at <= clock_timestamp() + p_consumer.rate_interval / 10
$$;

-- Records a delivery of p_count messages, with rate_limit. Returns the cursor.
create or replace function _pgqueue.record_delivered(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                     p_count bigint) returns pgqueue.consumer_cursors
language plpgsql as $$
declare
    v_step float8 := extract(epoch from p_consumer.rate_interval)::float8 / 20;
    v_at   timestamptz := to_timestamp(ceil(extract(epoch from clock_timestamp())::float8 / v_step) * v_step);
begin
    if p_consumer.rate_limit is null or p_count = 0 then
        return p_cursor;
    end if;
    select array_agg(d.n order by d.at), array_agg(d.at order by d.at)
    into p_cursor.delivered, p_cursor.delivered_at
    from (select sum(n)::int as n, at
          from (select * from unnest(p_cursor.delivered, p_cursor.delivered_at) o (n, at)
                where _pgqueue.counts(p_consumer, o.at)
                union all
                select p_count, v_at) a
          group by at) d;
    return p_cursor;
end $$;

-- Until when the limits of a consumer allow no message; null: they allow some. Messages in flight may be settled at any
-- moment without a notification, so then the claimer should ask again soon.
create or replace function _pgqueue.throttled_until(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns timestamptz language plpgsql as $$
begin
    return greatest(
        case when p_consumer.max_in_flight is not null and _pgqueue.left_in_flight(p_consumer, p_cursor.hints) <= 0
             then clock_timestamp() + interval '25 ms' end,
        case when p_consumer.rate_limit is not null and _pgqueue.left_in_rate(p_consumer, p_cursor) <= 0
             then (select min(d.at) from unnest(p_cursor.delivered_at) d (at) where _pgqueue.counts(p_consumer, d.at))
                  + p_consumer.rate_interval end);
end $$;
