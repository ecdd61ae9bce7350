-- Limits of keys. A consumer limits how many messages of a key may be in flight (per_key_limit) or are delivered within
-- a time (per_key_interval, per_key_burst), or lets keys take turns (fair). Messages within the limits are assigned
-- (queue/keys/assigning.sql). The rest wait (queue/keys/waiting.sql) until the first open bundle with the key is
-- deleted or, if only unclaimed messages count, claimed; or until tokens of the key come back
-- (queue/keys/key_tokens.sql). A message without a key has no limit, and delays no other message.
--
-- Keys take turns because bundles do. With fair, the free assigned bundles have about the share of a key in four
-- claims, so the rest of a key with very many messages waits.

-- Without an order: how many messages of some keys are assigned or in long claims, and how many of these are unclaimed.
create or replace function _pgqueue.in_use(p_consumer_id int, p_hints pgqueue.claim_hints, p_keys bigint[])
returns table (key bigint, n bigint, ready bigint)
language sql stable as $$
    select o.key, sum(o.n)::bigint, coalesce(sum(o.n) filter (where o.free), 0)::bigint
    from (select k as key, 1 as n, m.token is null as free
          from _pgqueue.assigned(p_consumer_id, _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned())) m
          cross join lateral unnest(m.keys) k
          where p_keys is null or k = any (p_keys)
          union all
          select k, m.message_count, false
          from unnest(p_keys) k
          cross join lateral (select message_count from pgqueue.consumer_messages
                              where consumer_id = p_consumer_id and key = k and lane = _pgqueue.lane_long()
                              offset 0) m) o
    group by o.key
$$;

-- Splits messages by key into those that the limits allow now and the rest. One statement, so that everything is
-- counted once. Needs the consumer's lock.
--   p_size  messages of a bundle
--   p_now   messages that are not visible by then are not limited
-- Returns the messages; and the keys without tokens, with the times when the first tokens come back.
create or replace function _pgqueue.apply_key_limits(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                     inout p_keyed pgqueue.keyed_messages, p_size bigint,
                                                     p_now timestamptz, out o_keys bigint[], out o_until timestamptz[])
language plpgsql as $$
declare
    v_burst int := case when p_consumer.per_key_interval is not null then p_consumer.per_key_burst end;
    v_none  boolean := p_consumer.ordering = 'none';
    v_asked bigint[] := array(select distinct k from unnest(p_keyed.keys) k where k is not null);
    v_share bigint := case when p_consumer.fair
                           then greatest(1, ceil(4.0 * p_size / greatest(1, cardinality(v_asked)))) end;
begin
    with entry as materialized (
        select e.*, e.key is null or (s.not_visible_until > p_now is true and (v_none or v_burst is null)) as free
        from unnest(p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts) with ordinality e (no, key, seqs, n, i)
        join unnest(p_keyed.bundles) with ordinality s on s.ordinality = e.no
    ), used as materialized (
        select * from _pgqueue.in_use(p_consumer.consumer_id, p_hints, v_asked) where v_none
    ), allowed as materialized (
        select k as key, t.until,
               least(p_consumer.per_key_limit - coalesce(u.n, 0), v_share - coalesce(u.ready, 0),
                     v_burst - coalesce(u.ready, 0) - t.spent) as allowed,
               v_burst <= t.spent as is_spent
        from unnest(v_asked) k
        left join used u on u.key = k
        cross join lateral (select coalesce(sum(t.spent), 0) as spent, min(t.returns_at) as until
                            from pgqueue.key_tokens t
                            where v_burst is not null and t.consumer_id = p_consumer.consumer_id and t.key = k
                              and t.returns_at > p_now) t
    ), decided as (
        select e.*, case when e.free then e.n
                         else greatest(0, least(e.n, r.allowed - sum(e.n) over (partition by e.key, e.free order by e.i)
                                                     + e.n)) end::bigint as go
        from entry e left join allowed r using (key)
    ), part as (
        select j.*, case when go = 0 then '{}'
                         when go < n then _pgqueue.below(seqs, _pgqueue.bound_of(seqs, go)) else seqs end as part
        from decided j
    ), split as (
        select i, no, key, part as seqs, go as n, false as exceeds from part where go > 0
        union all
        select i, no, key, seqs - part, n - go, true from part where go < n
    )
    select array_agg(no order by i, exceeds), array_agg(key order by i, exceeds), array_agg(seqs order by i, exceeds),
           array_agg(n order by i, exceeds), array_agg(exceeds order by i, exceeds),
           (select array_agg(key order by key) from allowed where is_spent),
           (select array_agg(until order by key) from allowed where is_spent)
    into p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts, p_keyed.over_limit, o_keys, o_until
    from split;
end $$;

-- Lets the next assignments read all waiting keys, because the limits of the consumer have changed. Locks: the
-- consumer; its long claims, if claims did not count before.
create or replace function _pgqueue.change_limits(p_consumer pgqueue.consumers) returns void
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_hints  pgqueue.claim_hints;
    v_bundle pgqueue.consumer_messages;
    v_until  timestamptz;
begin
    perform _pgqueue.lock_consumer(p_consumer.consumer_id);
    if not exists (select from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id) then
        return;  -- the consumer is being created
    end if;
    v_until := clock_timestamp() + p_consumer.per_key_interval;
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_cursor := v_stored;
    v_hints := _pgqueue.unassign(p_consumer, v_cursor.hints);
    for v_bundle in  -- while only unclaimed messages counted, long claims did not get their keys
        select * from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_long() and key is null and keys <> '{}'
          and not _pgqueue.limits_only_unclaimed(p_consumer)
        for update  -- lock: bundle
    loop
        perform _pgqueue.move_to_long(p_consumer, v_bundle);
    end loop;
    if p_consumer.per_key_interval is null then
        delete from pgqueue.key_tokens where consumer_id = p_consumer.consumer_id;
    end if;
    -- a shorter interval holds for earlier deliveries too
    update pgqueue.key_tokens set returns_at = v_until
    where consumer_id = p_consumer.consumer_id and returns_at > v_until;
    -- whatever waits for tokens is due, also beyond a delay of its own, and so is whatever waits for bundles
    update pgqueue.consumer_messages
    set lane = _pgqueue.lane_waiting(), place = _pgqueue.place_of_free() + bundle_no
    where consumer_id = p_consumer.consumer_id
      and ((lane = _pgqueue.lane_delayed() and key is not null
            and (place <= _pgqueue.place_at(not_visible_until)) is not true)
           or (lane = _pgqueue.lane_waiting() and place > 0));
    v_hints.any_waiting := true;
    v_hints.free_from := _pgqueue.place_of_free();
    v_hints.idle_until := null;
    v_cursor.hints := v_hints;
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
end $$;

-- Changes whether a consumer with ordering=none delivers by key: messages that it has taken and that no claim holds
-- become unassigned, or move back to the lanes of their priorities. Errors: PQ003 unless the consumer is paused and has
-- no claims. Locks: the consumer.
create or replace function _pgqueue.change_lanes(p_consumer pgqueue.consumers) returns void
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_bundle pgqueue.consumer_messages;
begin
    perform _pgqueue.lock_consumer_alone(p_consumer.consumer_id);
    if not exists (select from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id) then
        return;  -- the consumer is being created
    end if;
    perform _pgqueue.check_idle(p_consumer, 'fair, per_key_limit and per_key_interval of a consumer with '
                                            'ordering=none are set or reset only');
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    -- these have no messages, and no assignment will read them
    delete from pgqueue.consumer_messages
    where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_freed();
    for v_bundle in select * from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id loop
        v_bundle.not_visible_until := case when v_bundle.not_visible_until > clock_timestamp()
                                           then v_bundle.not_visible_until end;
        if v_bundle.lane = _pgqueue.lane_unfiltered() then
            v_bundle.place := _pgqueue.unfiltered_place(_pgqueue.is_keyed(p_consumer.profile), v_bundle.priority,
                                                        v_bundle.arrival_no);
        else
            v_bundle := _pgqueue.placed(p_consumer, v_bundle);
        end if;
        perform _pgqueue.replace(v_bundle);
    end loop;
    delete from pgqueue.key_tokens where consumer_id = p_consumer.consumer_id
        and not _pgqueue.is_keyed(p_consumer.profile);
    v_cursor := v_stored;
    v_cursor.hints := null;
    v_cursor.hints := _pgqueue.rebuild_hints(v_cursor);
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
end $$;
