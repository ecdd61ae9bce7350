-- What may be assigned: messages that waited for keys that are free now, and the first unassigned messages.

-- The waiting keys that may be assigned, about p_most of them: the bundle for which the first message of the key waited
-- is deleted. No message of the key waits before (arrival_no, first_seq).
create or replace function _pgqueue.free_keys(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints, p_most bigint)
returns table (key bigint, arrival_no bigint, first_seq bigint)
language plpgsql stable as $$
#variable_conflict use_column
declare
    v_ready boolean := _pgqueue.limits_only_unclaimed(p_consumer);
begin
    return query
        select m.key, m.arrival_no, m.first_seq from pgqueue.consumer_messages m
        where m.consumer_id = p_consumer.consumer_id and m.lane = _pgqueue.lane_waiting()
          and m.place >= p_hints.free_from and m.place < _pgqueue.place_behind()
        order by m.place limit p_most;
    return query
        with recursive blocker (number) as (
            (select place from pgqueue.consumer_messages
             where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_waiting()
               and place >= p_hints.waits_from and place < _pgqueue.place_behind_long()
             order by place limit 1)
            union all
            select (select place from pgqueue.consumer_messages
                    where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_waiting()
                      and place > b.number and place < _pgqueue.place_behind_long()
                    order by place limit 1)
            from blocker b where b.number is not null
        ), cleared as materialized (
            select b.number from blocker b
            where b.number is not null
              and (_pgqueue.is_deleted(b.number)
                   or (v_ready and (select token is not null from _pgqueue.bundles(array[b.number]))))
        )
        select f.* from cleared b
        cross join lateral (select m.key, m.arrival_no, m.first_seq from pgqueue.consumer_messages m
                            where m.consumer_id = p_consumer.consumer_id and m.lane = _pgqueue.lane_waiting()
                              and m.place = b.number offset 0) f
        limit p_most;
    if p_consumer.ordering = 'none' and p_consumer.per_key_limit > 1 then
        -- a key may have more than one open bundle: the first one that is deleted frees a place
        return query
            select u.key, 0::bigint, 0::bigint from _pgqueue.in_use(p_consumer.consumer_id, p_hints, null) u
            where u.n < p_consumer.per_key_limit
              and exists (select from pgqueue.consumer_messages w
                          where w.consumer_id = p_consumer.consumer_id and w.key = u.key
                            and w.lane = _pgqueue.lane_waiting());
    end if;
end $$;

-- Whether a waiting key may be assigned, or an assigned bundle may have lost a key.
create or replace function _pgqueue.has_free_key(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns boolean language plpgsql stable as $$
begin
    return _pgqueue.has_freed(p_consumer.consumer_id, p_hints)
        or exists (select from _pgqueue.assigned(p_consumer.consumer_id,
                                                 _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned()))
                   where shrunk)
        or exists (select from _pgqueue.free_keys(p_consumer, p_hints, 1));
end $$;

-- Deletes the messages that waited first for the keys that may be assigned from where they wait: of each key about
-- p_most messages that are alike, in order. Returns them, a bundle for each key; nulls if there are none.
create or replace function _pgqueue.take_waiting(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                 p_most bigint) returns pgqueue.keyed_messages language plpgsql as $$
declare
    v_keyed pgqueue.keyed_messages;
    v_tids  tid[];
begin
    with waiting as materialized (
        select k.key, m.*
        from (select distinct on (f.key) f.* from _pgqueue.free_keys(p_consumer, p_hints, _pgqueue.limit_assign()) f
              order by f.key, f.arrival_no, f.first_seq) k
        cross join lateral (select ctid as tid, w as bundle, arrival_no, first_seq, priority, deliver_count, note,
                                   not_visible_until, message_count, seqs
                            from pgqueue.consumer_messages w
                            where consumer_id = p_consumer.consumer_id and key = k.key
                              and lane = _pgqueue.lane_waiting()
                              and (arrival_no, first_seq) >= (k.arrival_no, k.first_seq)
                            order by arrival_no, first_seq limit p_most) m
    ), compared as (
        select *, sum(message_count) over in_order - message_count as before,
               count(*) over in_order > 1  -- (the messages of a bundle are in the order of their numbers)
               and ((priority, deliver_count, note, not_visible_until)
                    is distinct from lag((priority, deliver_count, note, not_visible_until)) over in_order
                    or lag(upper(seqs)) over in_order > first_seq) as other
        from waiting
        window in_order as (partition by key order by arrival_no, first_seq)
    ), alike as (
        select *, bool_or(other) over (partition by key order by arrival_no, first_seq) as later from compared
    ), head as (
        select key, array_agg(tid) as tids, min(arrival_no) as arrival_no, min(first_seq) as first_seq,
               sum(message_count)::bigint as n, range_agg(seqs) as seqs,
               (array_agg(bundle order by arrival_no, first_seq))[1] as bundle
        from alike where before < p_most and not later
        group by key
    ), numbered as (
        select *, row_number() over (order by arrival_no, first_seq) as i from head
    )
    select array_agg(bundle order by i), array_agg(i order by i), array_agg(key order by i), array_agg(seqs order by i),
           array_agg(n order by i), (select array_agg(t) from head cross join unnest(tids) t)
    into v_keyed.bundles, v_keyed.nos, v_keyed.keys, v_keyed.seqs, v_keyed.counts, v_tids
    from numbered;
    delete from pgqueue.consumer_messages where ctid = any (v_tids);
    return v_keyed;
end $$;

-- Whether, with ordering=stream, nothing waits behind the messages that take_waiting() returned. Null: it returned
-- none.
create or replace function _pgqueue.took_all_waiting(p_consumer_id int, p_waiting pgqueue.keyed_messages)
returns boolean language plpgsql stable as $$
declare
    v_first pgqueue.consumer_messages := p_waiting.bundles[1];
begin
    return v_first.key is not null and not exists (
        select from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and key = v_first.key and lane = _pgqueue.lane_waiting()
          and (arrival_no, first_seq) >= (v_first.arrival_no, v_first.first_seq));
end $$;

-- Deletes the first unassigned messages, about p_want of them, and returns them as bundles. With ordering=stream they
-- end before a message that is not visible yet. Needs the consumer's lock.
create or replace function _pgqueue.take_unassigned(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                    p_want bigint) returns pgqueue.consumer_messages[]
language plpgsql as $$
declare
    v_lane    pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_unassigned());
    v_stream  boolean := p_consumer.ordering = 'stream';
    v_bundles pgqueue.consumer_messages[];
    v_last    pgqueue.consumer_messages;
    v_tid     tid;
    v_rest    bigint;
    v_bound   bigint;
begin
    if v_lane.place is null then
        return '{}';
    end if;
    with front as materialized (
        select f.*
        from (select m.tid, m.place, m.first_seq, m.message_count,
                     sum(m.message_count) over in_order - m.message_count as before,
                     v_stream and row_number() over in_order > 1 and bool_or(m.other) over in_order as later
              from (select ctid as tid, place, first_seq, message_count,
                           not_visible_until is not null or note is not null or deliver_count > 0 as other
                    from pgqueue.consumer_messages
                    where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_unassigned()
                      and (place, first_seq) >= (v_lane.place, v_lane.first_seq) and token is null
                    order by place, first_seq limit p_want) m
              window in_order as (order by m.place, m.first_seq)) f
        where f.before < p_want and not f.later
    ), deleted as (
        delete from pgqueue.consumer_messages m
        where ctid = any (array(select tid from front where before + message_count <= p_want))
        returning m as bundle, place, first_seq
    )
    select coalesce((select array_agg(bundle order by place, first_seq) from deleted), '{}'),
           (select tid from front where before + message_count > p_want), p_want - (select max(before) from front)
    into v_bundles, v_tid, v_rest;
    if v_tid is not null then  -- cut the last bundle
        select * into v_last from pgqueue.consumer_messages where ctid = v_tid;
        v_bound := _pgqueue.bound_of(v_last.seqs, v_rest);
        update pgqueue.consumer_messages
        set seqs = seqs * int8multirange(int8range(v_bound, null)), message_count = message_count - v_rest,
            first_seq = lower(seqs * int8multirange(int8range(v_bound, null)))
        where ctid = v_tid;
        v_last.seqs := _pgqueue.below(v_last.seqs, v_bound);
        v_last.message_count := v_rest;
        v_bundles := v_bundles || v_last;
    end if;
    return v_bundles;
end $$;
