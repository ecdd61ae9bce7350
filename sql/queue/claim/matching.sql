-- Claims with a condition, for consumers without an order: messages that pass are claimed out of the free bundles, and
-- the others keep their place.

-- Claims messages that pass a condition, in the order of the lanes. Bundles that other sessions are claiming are
-- skipped. Expired bundles become dead letters, a bounded number.
--   p_max   messages to claim at most
--   p_look  messages to examine at most
-- Returns the hints, and the claim; its id is null if no message passes. Locks: the bundles of the claimed messages.
create or replace function _pgqueue.collect_matching(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                     p_where jsonpath, p_max bigint, p_look bigint,
                                                     out o_hints pgqueue.claim_hints, out o_claimed pgqueue.claimed)
language plpgsql as $$
declare
    v_lane     pgqueue.lane_hint;
    v_found    pgqueue.consumer_messages[];
    v_examined int8multirange;
    v_match    int8multirange;
    v_taken    pgqueue.consumer_messages[];
    v_parts    pgqueue.consumer_messages[] := '{}';
    v_expired  int := 0;
    v_bundle   pgqueue.consumer_messages;
begin
    o_hints := p_hints;
    <<lanes>>
    foreach v_lane in array p_hints.lanes loop
        continue when v_lane.place is null;
        loop
            v_found := _pgqueue.first_free(p_consumer.consumer_id, v_lane);
            exit when v_found = '{}';
            v_lane.place := v_found[cardinality(v_found)].place;
            v_lane.first_seq := v_found[cardinality(v_found)].first_seq + 1;
            v_examined := '{}';
            foreach v_bundle in array v_found loop
                if not _pgqueue.has_expired(v_bundle.note) then
                    v_examined := v_examined + v_bundle.seqs;
                elsif v_expired < _pgqueue.limit_due() then
                    v_expired := v_expired + 1;
                    perform _pgqueue.give_up_expired(b) from _pgqueue.lock_free(v_bundle) b
                    where b.bundle_no is not null;
                end if;
            end loop;
            v_examined := v_examined - _pgqueue.seqs_of(v_parts);  -- these are in the lane too, as bundles
            continue when v_examined = '{}';
            v_examined := _pgqueue.below(v_examined, _pgqueue.bound_of(
                v_examined, least(p_look, _pgqueue.cardinality(v_examined))));
            p_look := p_look - _pgqueue.cardinality(v_examined);
            while v_examined <> '{}' loop
                v_match := (_pgqueue.matching(
                    p_consumer.stream_id,
                    array(select g
                          from unnest(v_found) b cross join lateral unnest(_pgqueue.common(b.seqs, v_examined)) g
                          order by b.place, g),
                    null, p_where, p_max - _pgqueue.count_of(v_parts)))[1];
                v_taken := _pgqueue.take_matching(v_found, v_match, v_parts <> '{}');
                v_parts := v_parts || v_taken;
                exit when _pgqueue.count_of(v_taken) = _pgqueue.cardinality(v_match)
                    or v_parts[cardinality(v_parts)].note ? 'at_most';
                v_examined := v_examined - v_match;  -- other claims have some of these
            end loop;
            exit lanes when _pgqueue.count_of(v_parts) >= p_max or p_look <= 0
                or v_parts[cardinality(v_parts)].note ? 'at_most';
        end loop;
    end loop;
    if v_parts <> '{}' then
        o_claimed := _pgqueue.claim_bundles(p_consumer, v_parts);
        o_hints := _pgqueue.keep_in_reach(p_consumer, o_hints, v_parts[1].bundle_no);
    end if;
end $$;

-- The first free bundles of a lane, as many as are examined at once. Locks nothing.
create or replace function _pgqueue.first_free(p_consumer_id int, p_from pgqueue.lane_hint)
returns pgqueue.consumer_messages[] language plpgsql stable as $$
begin
    return array(
        select w.m
        from (select m, sum(m.message_count) over (order by m.place, m.first_seq) - m.message_count as before
              from (select * from pgqueue.consumer_messages r
                    where r.consumer_id = p_consumer_id and r.lane = p_from.lane
                      and (r.place, r.first_seq) >= (p_from.place, p_from.first_seq) and r.token is null
                    order by r.place, r.first_seq limit _pgqueue.limit_looked_for()) m) w
        where w.before < _pgqueue.limit_looked_for() order by (w.m).place, (w.m).first_seq);
end $$;

-- Locks a free bundle and returns its current row; nulls if it is no longer free at its place, or another session is
-- claiming it. (A claim may have returned it with a delay since it was read.)
create or replace function _pgqueue.lock_free(p_bundle pgqueue.consumer_messages) returns pgqueue.consumer_messages
language plpgsql as $$
declare
    v_bundle pgqueue.consumer_messages;
begin
    select * into v_bundle from pgqueue.consumer_messages
    where _pgqueue.is_bundle(bundle_no, p_bundle.bundle_no) and token is null
      and lane = p_bundle.lane and place = p_bundle.place
    for update skip locked;  -- lock: bundle
    return v_bundle;
end $$;

-- Takes messages out of free bundles, as bundles of their own, for a claim. From a bundle with at_most it takes no more
-- than that, and only for a claim that has nothing else. Returns these bundles, locked.
--   p_more  the claim has other messages; null: ignore at_most, as for Spark readers
create or replace function _pgqueue.take_matching(p_bundles pgqueue.consumer_messages[], p_match int8multirange,
                                                  p_more boolean) returns pgqueue.consumer_messages[]
language plpgsql as $$
declare
    v_seen    pgqueue.consumer_messages;
    v_bundle  pgqueue.consumer_messages;
    v_part    int8multirange;
    v_at_most bigint;
    v_parts   pgqueue.consumer_messages[] := '{}';
begin
    foreach v_seen in array p_bundles loop
        continue when not _pgqueue.meets(v_seen.seqs, p_match);
        v_bundle := _pgqueue.lock_free(v_seen);
        v_at_most := case when p_more is not null then (v_bundle.note ->> 'at_most')::bigint end;
        exit when v_at_most is not null and (p_more or v_parts <> '{}');
        v_part := _pgqueue.common(v_bundle.seqs, p_match);
        continue when coalesce(v_part, '{}') = '{}';
        v_part := _pgqueue.below(v_part, _pgqueue.bound_of(v_part, least(v_at_most, _pgqueue.cardinality(v_part))));
        if v_part <> v_bundle.seqs then
            perform _pgqueue.delete_bundle(v_bundle.bundle_no);
            perform _pgqueue.store(v_bundle, v_bundle.seqs - v_part);
            v_parts := v_parts || _pgqueue.stored(v_bundle, v_part);
        else
            v_parts := v_parts || v_bundle;
        end if;
        exit when v_at_most is not null;
    end loop;
    return v_parts;
end $$;
