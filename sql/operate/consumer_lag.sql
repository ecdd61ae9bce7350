-- The backlog of a consumer, and its age.

-- When the first new message of a consumer that could be delivered now was published; null: there is none, or only far
-- behind messages for other consumers.
create or replace function _pgqueue.oldest_new(p_consumer_id int) returns timestamptz
language sql stable as $$
    select n.published_at  -- in the order of the publications
    from pgqueue.consumers c
    cross join lateral _pgqueue.cursor(c.consumer_id) k
    cross join lateral _pgqueue.new_sets(c, k, _pgqueue.limit_shown()) n
    where c.consumer_id = p_consumer_id and (n.deliver_at > clock_timestamp()) is not true
    limit 1
$$;

-- When a message was sent; null: it was deleted.
create or replace function _pgqueue.sent_at(p_stream_id int, p_seq bigint) returns timestamptz
language plpgsql stable as $$
declare
    v_at timestamptz;
begin
    if p_seq is not null then
        execute format('select inserted_at from pgqueue.messages_%s where seq = $1', p_stream_id) into v_at using p_seq;
    end if;
    return v_at;
end $$;

-- Returns how far a consumer is behind, for the progress of its Spark query.
--   backlog    messages that it has not claimed yet
--   oldest_at  when the oldest of them that could be delivered now was sent; null: there is none, or it was deleted
--   estimated  whether backlog is an estimate, because more than 3,000 publications are new
create or replace function pgqueue.consumer_lag(p_consumer_id int, out backlog bigint, out oldest_at timestamptz,
                                                out estimated boolean)
language sql stable as $$
    select n.o_count + coalesce(u.messages, 0)::bigint,
           least(_pgqueue.oldest_new(c.consumer_id), _pgqueue.sent_at(c.stream_id, u.oldest)), n.o_estimated
    from pgqueue.consumers c
    cross join lateral _pgqueue.estimate_new(c.consumer_id) n
    cross join lateral (
        select sum(message_count) as messages,
               min(first_seq) filter (where (not_visible_until > clock_timestamp()) is not true) as oldest
        from _pgqueue.unfinished(c.consumer_id) where state <> 'claimed') u
    where c.consumer_id = p_consumer_id
$$;

-- Counts the messages that a consumer could claim now, for queries that wait for a number of messages.
-- Messages that wait for their key count; delayed messages do not. Locks nothing.
--   p_enough  the count may stop at this number; null: all are counted
create or replace function pgqueue.consumer_available(p_consumer_id int, p_enough bigint default null) returns bigint
language plpgsql stable as $$
begin
    return _pgqueue.with_new(p_consumer_id, (select coalesce(sum(message_count), 0)::bigint
                                             from _pgqueue.unfinished(p_consumer_id)
                                             where state <> 'claimed'
                                               and (not_visible_until > clock_timestamp()) is not true), p_enough);
end $$;
