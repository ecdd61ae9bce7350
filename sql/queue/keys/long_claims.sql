-- Long claims: claims older than a second move to lane_long(), so that other claims do not read them.

-- Moves claims that are older than a second, or whose lease has ended, to lane_long(), except those that a session is
-- settling. Returns the hints. Needs the consumer's lock.
--   p_below  by key: also claims of bundles below this number
--   p_all    read all bundles of the lanes, not only the first limit_long()
create or replace function _pgqueue.move_long_claims(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                     p_now timestamptz, p_below bigint default null,
                                                     p_all boolean default false)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_lane   pgqueue.lane_hint;
    v_bundle pgqueue.consumer_messages;
    v_keys   bigint[] := '{}';
begin
    for i in 1..cardinality(p_hints.lanes) loop
        v_lane := p_hints.lanes[i];
        for v_bundle in
            select * from pgqueue.consumer_messages
            where ctid = any (array(
                select o.ctid
                from (select ctid, bundle_no, token, claimed_at, lease_until from pgqueue.consumer_messages
                      where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
                        and (place, first_seq) >= (v_lane.low_place, v_lane.low_seq)
                      order by place, first_seq limit case when not p_all then _pgqueue.limit_long() end) o
                where o.token is not null and (o.claimed_at < p_now - interval '1 s' or o.lease_until <= p_now
                                               or o.bundle_no < p_below)))
              and token is not null
            for update skip locked  -- lock: bundle
        loop
            -- a session that settles the claim locks its head first, then the members
            continue when v_bundle.head is not null and not exists (
                select from pgqueue.consumer_messages
                where _pgqueue.is_bundle(bundle_no, v_bundle.head)
                for update skip locked);  -- lock: bundle
            v_keys := v_keys || v_bundle.keys;
            perform _pgqueue.move_to_long(p_consumer, v_bundle);
            p_hints.long_from := least(p_hints.long_from, v_bundle.lease_until);
        end loop;
        select place, first_seq into v_lane.low_place, v_lane.low_seq from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
          and (place, first_seq) >= (v_lane.low_place, v_lane.low_seq)
        order by place, first_seq limit 1;
        p_hints.lanes[i] := v_lane;
    end loop;
    p_hints.lanes := array(select l::pgqueue.lane_hint from unnest(p_hints.lanes) l
                           where l.low_place is not null order by l.lane);
    if not _pgqueue.limits_only_unclaimed(p_consumer) then
        p_hints := _pgqueue.unassign_followers(p_consumer, p_hints, array(select distinct k from unnest(v_keys) k));
    end if;
    return p_hints;
end $$;

-- Moves a claim that was just made to lane_long() if many bundles are before it in its lane: move_long_claims() and
-- next_end() read only the first ones, and those may stay free for long. (Not as many as these read: a few more bundles
-- may come before it within the next second.) Returns the hints; a caller without the consumer's lock cannot store
-- them, and need not: claims whose leases end in the future are behind long_from. By key it does nothing, because
-- bundles that follow the claim would have to wait. Needs the bundle's lock.
--   p_head  the number of the claim's head; its members have no leases
create or replace function _pgqueue.keep_in_reach(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                  p_head bigint) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_head pgqueue.consumer_messages := (select b from _pgqueue.bundles(array[p_head]) b);
    v_lane pgqueue.lane_hint := _pgqueue.lane_of(p_hints, v_head.lane);
begin
    if not _pgqueue.is_keyed(p_consumer.profile)
       and (v_lane.lane is null or exists (  -- (claims in a lane without a hint are not read)
                select from (select place, first_seq from pgqueue.consumer_messages
                             where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
                               and (place, first_seq) >= (v_lane.low_place, v_lane.low_seq)
                             order by place, first_seq offset _pgqueue.limit_long() / 2 limit 1) l
                where (l.place, l.first_seq) < (v_head.place, v_head.first_seq))) then
        perform _pgqueue.move_to_long(p_consumer, v_head);
        p_hints.long_from := least(p_hints.long_from, v_head.lease_until);
    end if;
    return p_hints;
end $$;

-- Adds hints for lanes that have none. Claims in lanes without a free bundle move to lane_long(), so that these lanes
-- need no hint. Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.uncover_lanes(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql as $$
begin
    if exists (select from unnest(p_hints.lanes) where place is null) then
        p_hints := _pgqueue.move_long_claims(p_consumer, p_hints, clock_timestamp() + interval '1 s');
    end if;
    return _pgqueue.add_lanes(p_consumer.consumer_id, p_hints);
end $$;

-- Moves a claimed bundle to lane_long(), at the end of its lease; a member, which has no lease, to the end of the lane.
-- By key, the bundle gets its key in the column key. If it has several keys, or messages with and without one, the
-- others become members. Needs the bundle's lock.
create or replace function _pgqueue.move_to_long(p_consumer pgqueue.consumers, p_bundle pgqueue.consumer_messages)
returns void language plpgsql as $$
declare
    v_keyed   pgqueue.keyed_messages;
    v_part    pgqueue.consumer_messages := p_bundle;
    v_members bigint[] := '{}';
    v_head    bigint := coalesce(p_bundle.head, p_bundle.bundle_no);
    v_by_key  boolean := p_bundle.keys <> '{}' and p_bundle.message_count > 0
                         and not _pgqueue.limits_only_unclaimed(p_consumer);
begin
    if v_by_key and (p_bundle.message_count > 1 or p_bundle.shrunk) then
        v_keyed := _pgqueue.by_key(p_consumer, array[p_bundle]);
        for i in 2..coalesce(cardinality(v_keyed.keys), 0) loop
            v_part.lane := _pgqueue.lane_long();
            v_part.place := _pgqueue.place_of_members();
            v_part.key := v_keyed.keys[i];
            v_part.keys := array_remove(array[v_keyed.keys[i]], null);
            v_part.predecessor := null;
            v_part.shrunk := false;
            v_part.lease_until := null;
            v_part.members := null;
            v_part.head := v_head;
            v_members := v_members || array(  -- several, if they have many ranges
                select s.bundle_no from unnest(_pgqueue.stored(v_part, v_keyed.seqs[i])) s);
        end loop;
        p_bundle.key := v_keyed.keys[1];
        p_bundle.seqs := v_keyed.seqs[1];
        p_bundle.message_count := v_keyed.counts[1];
    elsif v_by_key then
        p_bundle.key := p_bundle.keys[1];
    end if;
    if v_members <> '{}' and p_bundle.head is not null then
        update pgqueue.consumer_messages set members = members || v_members
        where _pgqueue.is_bundle(bundle_no, v_head) and token = p_bundle.token;
    end if;
    update pgqueue.consumer_messages
    set lane = _pgqueue.lane_long(),
        place = coalesce(_pgqueue.place_at(p_bundle.lease_until), _pgqueue.place_of_members()),
        key = p_bundle.key,
        keys = case when v_by_key then array_remove(array[p_bundle.key], null)
                    when p_bundle.message_count = 0 and keys is not null then '{}' else keys end,
        shrunk = shrunk and v_by_key is not true, predecessor = null, seqs = p_bundle.seqs,
        message_count = p_bundle.message_count,
        members = case when v_members <> '{}' and p_bundle.head is null then coalesce(members, '{}') || v_members
                       else members end
    where _pgqueue.is_bundle(bundle_no, p_bundle.bundle_no);
end $$;

-- Moves claims by key that many others have overtaken to lane_long(), because assignments read all bundles of the lane
-- from the first one on. Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.move_overtaken_claims(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_assigned pgqueue.lane_hint;
    v_below    bigint := pg_sequence_last_value('pgqueue.claim_numbers') - _pgqueue.limit_long();
begin
    p_hints := _pgqueue.raise_low(p_consumer.consumer_id, p_hints, _pgqueue.lane_assigned());
    v_assigned := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    if v_assigned.low_place < v_below and v_assigned.low_place is distinct from v_assigned.place then
        p_hints := _pgqueue.move_long_claims(p_consumer, p_hints, clock_timestamp(), v_below);
    end if;
    return p_hints;
end $$;
