-- Claiming back: a checkpoint reader claims the free messages of a claim that it lost.

-- Claims the free messages of a lost claim for its checkpoint reader. Needs the consumer's lock. Messages that another
-- claim holds, or that were returned with a delay, are not claimed, and neither are messages of an ordered consumer
-- that wait for them. Returns the cursor. Locks the bundles.
create or replace function _pgqueue.claim_back(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_claim pgqueue.reader_claims) returns pgqueue.consumer_cursors
language plpgsql as $$
declare
    v_hints          pgqueue.claim_hints := p_cursor.hints;
    -- messages that its query has returned are for other claims
    v_seqs           int8multirange := p_claim.seqs - _pgqueue.seqs_settled_early(p_claim);
    v_all_unassigned boolean;  -- by key, the messages are unassigned again, as before the claim
    v_bundles        pgqueue.consumer_messages[];
    v_claimed        pgqueue.claimed;
    v_back           record;
begin
    if v_hints.all_keys then
        v_hints.all_keys := _pgqueue.holds_all_keys(p_consumer.consumer_id, v_hints);
    end if;
    v_all_unassigned := p_consumer.ordering <> 'none' and v_hints.all_keys is not true
        and _pgqueue.none_assigned(p_consumer.consumer_id, v_hints)
        and (p_consumer.ordering = 'stream'
             or not exists (select from pgqueue.consumer_messages
                            where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_unassigned()
                              and p_claim.arrival_nos @> arrival_no and not_visible_until > clock_timestamp()));
    if p_consumer.ordering = 'none' or v_all_unassigned then
        v_bundles := _pgqueue.take_matching(_pgqueue.free_bundles_of(p_consumer, p_claim, v_seqs), v_seqs, null);
    elsif v_hints.all_keys is not true then
        v_back := _pgqueue.assign_back(p_consumer, v_hints, p_claim, v_seqs);
        v_hints := v_back.o_hints;
        v_bundles := v_back.o_bundles;
    end if;
    if v_bundles <> '{}' then
        v_claimed := _pgqueue.claim_bundles(p_consumer, v_bundles, p_claim.reader);
        if v_all_unassigned then
            v_hints := _pgqueue.move_all_to_long(v_hints, v_bundles);
        else
            v_hints := _pgqueue.keep_in_reach(p_consumer, v_hints, v_bundles[1].bundle_no);
        end if;
        update pgqueue.reader_claims
        set head = v_bundles[1].bundle_no, token = _pgqueue.token_in(v_claimed.claim_id),
            settled = least(settled, message_count - v_claimed.message_count)
        where reader = p_claim.reader and claim_id = p_claim.claim_id;
    end if;
    p_cursor.hints := v_hints;
    return p_cursor;
end $$;

-- The free bundles that have messages of a lost claim, at their places before the claim: in all lanes, or in the
-- unassigned lane up to the first delayed message.
create or replace function _pgqueue.free_bundles_of(p_consumer pgqueue.consumers, p_claim pgqueue.reader_claims,
                                                    p_seqs int8multirange) returns pgqueue.consumer_messages[]
language plpgsql stable as $$
begin
    return array(
        with recursive lane (lane) as (  -- the existing lanes, without a read of all bundles
            select min(lane) from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and lane < _pgqueue.lane_delayed()
            union all
            select (select min(lane) from pgqueue.consumer_messages
                    where consumer_id = p_consumer.consumer_id and lane > l.lane and lane < _pgqueue.lane_delayed())
            from lane l where l.lane is not null
        )
        select f.b
        from (select m.b, m.lane, m.place, m.first_seq,
                     bool_or((m.b).not_visible_until > clock_timestamp()) over (order by m.lane, m.place, m.first_seq)
                     as later
              from lane l cross join unnest(p_claim.arrival_nos) r
              cross join lateral (select b, lane, place, first_seq from pgqueue.consumer_messages b
                                  where consumer_id = p_consumer.consumer_id and lane = l.lane
                                    and place >= lower(r) and place < upper(r) and token is null offset 0) m
              where p_consumer.ordering = 'none' or m.lane = _pgqueue.lane_unassigned()) f
        where _pgqueue.meets((f.b).seqs, p_seqs) and f.later is not true
        order by f.lane, f.place, f.first_seq);
end $$;

-- Assigns at most the number of messages that a claim examines, while there are unassigned messages before the places
-- of a lost claim. Then the messages of the lost claim are assigned separately, for each free key, if no earlier
-- message of the key is left. Returns the hints, and these bundles, which are locked.
create or replace function _pgqueue.assign_back(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                p_claim pgqueue.reader_claims, p_seqs int8multirange,
                                                out o_hints pgqueue.claim_hints,
                                                out o_bundles pgqueue.consumer_messages[])
language plpgsql as $$
declare
    v_assign   record;
    v_examined bigint := 0;
    v_heads    pgqueue.keyed_messages;
    v_assigned pgqueue.lane_hint;
begin
    o_hints := p_hints;
    while v_examined < _pgqueue.limit_inspected() loop
        v_assign := _pgqueue.assign(p_consumer, o_hints, _pgqueue.limit_small());
        o_hints := v_assign.o_hints;
        v_examined := v_examined + v_assign.o_examined;
        exit when v_assign.o_examined = 0 or not exists (
            select from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_unassigned()
              and place < upper(p_claim.arrival_nos));
    end loop;
    o_hints := _pgqueue.unassign(p_consumer, o_hints);
    o_hints := _pgqueue.raise_waiting_hints(p_consumer.consumer_id, o_hints);
    v_heads := _pgqueue.take_waiting(p_consumer, o_hints, _pgqueue.cardinality(p_seqs));
    if v_heads.keys is null then
        return;
    end if;
    o_hints := (_pgqueue.assign_within_limits(p_consumer, o_hints, _pgqueue.split_heads(v_heads, p_seqs, true),
                                              _pgqueue.cardinality(p_seqs))).o_hints;
    o_hints := (_pgqueue.assign_within_limits(p_consumer, o_hints, _pgqueue.split_heads(v_heads, p_seqs, false),
                                              _pgqueue.limit_small())).o_hints;
    o_hints := _pgqueue.mark_firsts(p_consumer, o_hints, v_heads.keys, false);
    o_hints.size := p_hints.size;
    v_assigned := _pgqueue.lane_of(o_hints, _pgqueue.lane_assigned());
    o_bundles := array(
        select b from pgqueue.consumer_messages b
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
          and (place, first_seq) >= (v_assigned.place, v_assigned.first_seq) and token is null
          and _pgqueue.less(seqs, p_seqs) = '{}'
          and (predecessor is null or _pgqueue.is_deleted(predecessor))
        order by place, first_seq for update skip locked);  -- lock: bundle
end $$;

-- Of messages by key, those of keys whose first messages are in a set, split at the end of the set (p_mine); or those
-- of the other keys.
create or replace function _pgqueue.split_heads(p_keyed pgqueue.keyed_messages, p_seqs int8multirange, p_mine boolean)
returns pgqueue.keyed_messages language plpgsql stable as $$
begin
    select array_agg(no order by i, j), array_agg(key order by i, j), array_agg(seqs order by i, j),
           array_agg(_pgqueue.cardinality(seqs) order by i, j)
    into p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts
    from (select e.i, e.no, e.key, c.j, c.seqs
          from unnest(p_keyed.nos, p_keyed.keys, p_keyed.seqs) with ordinality e (no, key, seqs, i)
          cross join lateral (select _pgqueue.common(e.seqs, p_seqs) as inside, _pgqueue.less(e.seqs, p_seqs) as outside
                              offset 0) p
          cross join lateral (select p.inside <> '{}' and (upper(p.inside) <= lower(p.outside)) is not false as mine) m
          cross join lateral (values (1, case when m.mine then p.inside else e.seqs end),
                                     (2, case when m.mine then p.outside else '{}' end)) c (j, seqs)
          where m.mine = p_mine and c.seqs <> '{}') k;
    return p_keyed;
end $$;
