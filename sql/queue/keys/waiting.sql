-- Waiting by key: messages that are behind others of their key, or over a limit of it, stand in lane_waiting(), in
-- bundles of one key each; so claims do not walk over them. Of each key that waits, one bundle is the first: its place
-- is the number of an open bundle with the key, and it may be assigned when that bundle is gone
-- (queue/keys/assigning.sql). To the number of one in lane_long() place_behind_long() is added: who deletes that one
-- notes it in lane_freed(), so the assigners need not look at all that is held. If no bundle with the key is open, its
-- place is from place_of_free() on, the later the higher. The places of all others are -2. Where the first message of a
-- key is delayed, or tokens of the key are spent, it stands in lane_delayed(), and all others wait. mark_firsts()
-- restores that after any change.
--
-- Both kinds of places rise, and the cursor's hints say where the first ones are: so what was assigned costs nothing
-- where a long transaction elsewhere keeps its dead rows.

-- Notes that the first message of a key stands at a place of lane_waiting(). Returns the hints.
create or replace function _pgqueue.first_waits_at(p_hints pgqueue.claim_hints, p_place bigint)
returns pgqueue.claim_hints language plpgsql immutable as $$
begin
    if p_place >= 0 then
        p_hints.waits_from := least(p_hints.waits_from, p_place);
    elsif p_place < -2 then
        p_hints.free_from := least(p_hints.free_from, p_place);
    end if;
    return p_hints;
end $$;

-- Whether a claim in lane_long() has let go of a key, and no assigner has looked at it.
create or replace function _pgqueue.has_freed(p_consumer_id int, p_hints pgqueue.claim_hints) returns boolean
language sql stable as $$
    select exists (select from pgqueue.consumer_messages
                   where consumer_id = p_consumer_id and lane = _pgqueue.lane_freed() and place >= p_hints.freed_from)
$$;

-- Whether bundles of a consumer may be waiting or delayed, or held with a key, after raise_waiting_hints() has moved
-- the hints: true also where it would have to look at many that are not.
create or replace function _pgqueue.may_have_waiting(p_consumer_id int, p_hints pgqueue.claim_hints) returns boolean
language sql stable as $$
    select least(p_hints.waits_from, p_hints.free_from) < 9223372036854775807
        or _pgqueue.has_freed(p_consumer_id, p_hints)
        or exists (select from unnest(array[_pgqueue.lane_delayed(), _pgqueue.lane_long()],
                                      array[_pgqueue.place_at(p_hints.due_from), _pgqueue.place_at(p_hints.long_from)])
                               l (lane, place)
                   cross join lateral (select m.key, row_number() over () as n
                                       from (select key from pgqueue.consumer_messages
                                             where consumer_id = p_consumer_id and lane = l.lane and place >= l.place
                                             order by place limit _pgqueue.limit_small()) m) f
                   where f.key is not null or f.n >= _pgqueue.limit_small())
$$;

-- The last open bundle with each of some keys: assigned, or held for long. No row: the key is not in use.
--   place  where the first message of the key waits for that bundle
create or replace function _pgqueue.open_tails(p_consumer_id int, p_hints pgqueue.claim_hints, p_keys bigint[])
returns table (key bigint, place bigint)
language sql stable as $$
    select o.key, coalesce(max(o.bundle_no) filter (where not o.is_long),
                           max(o.bundle_no) + _pgqueue.place_behind_long())
    from (select k as key, m.bundle_no, false as is_long
          from _pgqueue.assigned(p_consumer_id, _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned())) m
          cross join lateral unnest(m.keys) k
          where k = any (p_keys)
          union all
          select k, m.bundle_no, true
          from unnest(p_keys) k
          cross join lateral (select bundle_no from pgqueue.consumer_messages
                              where consumer_id = p_consumer_id and key = k and lane = _pgqueue.lane_long()
                              offset 0) m) o
    group by o.key
$$;

-- Of some keys the bundles that wait whose places are to change: the first one, and one that was the first. The place
-- of the first one is null where it may be assigned and has no such place yet. Arguments: as mark_firsts().
create or replace function _pgqueue.firsts(p_consumer_id int, p_hints pgqueue.claim_hints, p_keys bigint[],
                                           p_had_first boolean, p_after pgqueue.consumer_messages[], p_open boolean)
returns table (tid tid, new_place bigint)
language plpgsql stable as $$
#variable_conflict use_column
begin
    return query
        with open as materialized (
            select * from _pgqueue.open_tails(p_consumer_id, p_hints, p_keys) where p_open
        ), first as materialized (
            select k.key, f.tid, f.place, o.tid as old,
                   (select true from pgqueue.consumer_messages
                    where consumer_id = p_consumer_id and key = k.key and lane = _pgqueue.lane_delayed()
                      and (arrival_no, first_seq) >= (k.arrival_no, k.first_seq)
                    order by arrival_no desc, first_seq desc limit 1) as delayed
            from (select asked as key, coalesce(arrival_no, 0) as arrival_no, coalesce(first_seq, 0) as first_seq
                  from unnest(p_keys, p_after) a (asked)) k
            cross join lateral (select ctid as tid, m.place from pgqueue.consumer_messages m
                                where consumer_id = p_consumer_id and key = k.key and lane = _pgqueue.lane_waiting()
                                  and (arrival_no, first_seq) >= (k.arrival_no, k.first_seq)
                                order by arrival_no, first_seq limit 1) f
            left join lateral (select ctid as tid from pgqueue.consumer_messages m
                               where consumer_id = p_consumer_id and key = k.key and lane = _pgqueue.lane_waiting()
                                 and m.place <> -2 and (arrival_no, first_seq) >= (k.arrival_no, k.first_seq)
                               order by arrival_no, first_seq limit 1) o on p_had_first
        ), judged as (
            select f.tid, f.place as was, case when f.delayed then -2 else o.place end as place, f.old
            from first f left join open o using (key)
        )
        select j.tid, j.place from judged j
        where j.was is distinct from j.place and (j.place is not null or j.was >= -2)
        union all
        select j.old, -2::bigint from judged j where j.old <> j.tid;
end $$;

-- Says of each of some keys which bundle is the first that waits, and for what. Returns the hints. Needs the consumer's
-- lock.
--   p_had_first  false: none of the bundles that wait is known as the first
--   p_after      of each key a bundle that waited before all others; null: not known
--   p_open       false: they wait for no bundle, whatever is open
create or replace function _pgqueue.mark_firsts(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                p_keys bigint[], p_had_first boolean default true,
                                                p_after pgqueue.consumer_messages[] default null,
                                                p_open boolean default true) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_place bigint;
begin
    if coalesce(p_keys, '{}') = '{}' then
        return p_hints;
    end if;
    for v_place in
        update pgqueue.consumer_messages m
        set place = coalesce(f.new_place, _pgqueue.place_of_free() + nextval('pgqueue.claim_numbers'))
        from _pgqueue.firsts(p_consumer.consumer_id, p_hints, p_keys, p_had_first, p_after, p_open) f
        where m.ctid = f.tid
        returning m.place
    loop
        p_hints := _pgqueue.first_waits_at(p_hints, v_place);
    end loop;
    p_hints.any_waiting := true;
    return p_hints;
end $$;

-- Lets the next assigner look at the keys that claims in lane_long() have let go of, a bounded number. Returns the
-- hints.
-- Needs the consumer's lock.
create or replace function _pgqueue.take_freed(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_keys bigint[];
begin
    with gone as (
        delete from pgqueue.consumer_messages
        where ctid = any (array(select ctid from pgqueue.consumer_messages
                                where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_freed()
                                  and place >= p_hints.freed_from
                                order by place limit _pgqueue.limit_assign()))
        returning key
    )
    select array_agg(distinct key) into v_keys from gone;
    -- without an order a key may have more than one open bundle: the first one to be gone makes room
    return _pgqueue.mark_firsts(p_consumer, p_hints, v_keys, p_open => p_consumer.ordering <> 'none');
end $$;

-- Lets the assigned bundles of some keys that nobody has claimed wait: what is before them goes back, or is held for
-- long. Nobody can have claimed them, for they stand behind that. Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.unassign_followers(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                       p_keys bigint[]) returns pgqueue.claim_hints
language plpgsql as $$
begin
    if p_consumer.ordering <> 'none' then
        update pgqueue.consumer_messages
        set lane = _pgqueue.lane_waiting(), place = -2, key = keys[1], keys = null, predecessor = null
        where ctid = any (array(
            select m.ctid
            from unnest(p_hints.lanes) l
            cross join lateral (select ctid from pgqueue.consumer_messages
                                where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
                                     and (place, first_seq) >= (l.low_place, l.low_seq) and token is null
                                     and predecessor is not null and keys[1] = any (p_keys)
                                for update skip locked) m  -- lock: bundle
            where l.lane = _pgqueue.lane_assigned()));
    end if;
    return _pgqueue.mark_firsts(p_consumer, p_hints, p_keys);
end $$;

-- Reads again which keys are in assigned bundles of which some messages have left. Returns the hints. Needs the
-- consumer's lock.
create or replace function _pgqueue.reread_keys(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_bundle   pgqueue.consumer_messages;
    v_keys     bigint[];
    v_gone     bigint[] := '{}';
begin
    for v_bundle in
        select * from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
          and (place, first_seq) >= (v_assigned.low_place, v_assigned.low_seq) and shrunk
        for update skip locked  -- lock: bundle
    loop
        v_keys := _pgqueue.keys_in(p_consumer, v_bundle);
        update pgqueue.consumer_messages set keys = v_keys, shrunk = false
        where bundle_no & 1048575 = v_bundle.bundle_no & 1048575 and bundle_no = v_bundle.bundle_no;
        v_gone := v_gone || array(select distinct k from unnest(v_bundle.keys) k
                                  where p_consumer.ordering = 'none' or k <> all (v_keys));
    end loop;
    return _pgqueue.unassign_followers(p_consumer, p_hints, v_gone);
end $$;

-- Takes messages that are in no claim out of a consumer's bundles, for a caller that settles them. Bundles that another
-- session is claiming are left. Needs the consumer's lock. Returns the hints, and the messages as bundles, as they
-- were.
create or replace function _pgqueue.take_unclaimed(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                   p_seqs int8multirange, out o_hints pgqueue.claim_hints,
                                                   out o_bundles pgqueue.consumer_messages[])
language plpgsql as $$
declare
    v_found    pgqueue.consumer_messages[] := array(
        select b from pgqueue.consumer_messages b
        where consumer_id = p_consumer.consumer_id and token is null and first_seq < upper(p_seqs) and seqs && p_seqs
        for update skip locked);  -- lock: bundle
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_gone     pgqueue.consumer_messages;
begin
    o_hints := p_hints;
    o_bundles := _pgqueue.remove_messages(v_found, p_seqs);
    for v_gone in
        select b.* from unnest(o_bundles) b where b.predecessor is not null and _pgqueue.is_deleted(b.bundle_no)
        order by b.bundle_no desc
    loop  -- what stood behind it stands behind the one before
        update pgqueue.consumer_messages set predecessor = v_gone.predecessor
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
          and (place, first_seq) >= (v_assigned.low_place, v_assigned.low_seq) and predecessor = v_gone.bundle_no;
    end loop;
    if _pgqueue.is_keyed(p_consumer.profile) and o_bundles <> '{}' then
        o_hints := _pgqueue.reread_keys(p_consumer, o_hints);
        o_hints := _pgqueue.mark_firsts(p_consumer, o_hints, array(
            select distinct key from unnest(o_bundles) where key is not null));
    end if;
end $$;

-- Takes the assigned bundles of a consumer that nobody has claimed back, to be assigned again: in another size, or
-- beside messages that go back. Returns the hints. Needs the consumer's lock.
--   p_bundle  only this one, behind which none stands; null: all
create or replace function _pgqueue.unassign(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                             p_bundle bigint default null) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_bundles  pgqueue.consumer_messages[] := array(
        select b from pgqueue.consumer_messages b
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
          and (place, first_seq) >= (v_assigned.place, v_assigned.first_seq) and token is null
          and (p_bundle is null or bundle_no = p_bundle)
        order by place, first_seq for update skip locked);  -- lock: bundle
    v_bundle   pgqueue.consumer_messages;
    v_keyed    pgqueue.keyed_messages;
    v_keys     bigint[] := '{}';
begin
    if v_bundles = '{}' then
        return p_hints;
    elsif p_consumer.ordering = 'none' then  -- each message goes by its own
        foreach v_bundle in array v_bundles loop
            v_bundle := _pgqueue.placed(p_consumer, v_bundle);
            perform _pgqueue.replace(v_bundle);
            p_hints := _pgqueue.stands(p_hints, v_bundle.lane, v_bundle.place, v_bundle.first_seq);
        end loop;
        return p_hints;
    end if;
    perform _pgqueue.remove_messages(v_bundles, null);
    v_keyed := _pgqueue.by_key(p_consumer, v_bundles);
    for i in 1..cardinality(v_keyed.keys) loop
        v_bundle := v_bundles[v_keyed.nos[i]];
        if v_keyed.keys[i] is null then
            p_hints := _pgqueue.store_placed(p_hints, _pgqueue.placed(p_consumer, v_bundle), v_keyed.seqs[i]);
        else
            v_bundle.lane := _pgqueue.lane_waiting();
            v_bundle.place := -2;
            v_bundle.key := v_keyed.keys[i];
            v_bundle.keys := null;
            v_bundle.predecessor := null;
            v_bundle.shrunk := false;
            perform _pgqueue.store(v_bundle, v_keyed.seqs[i]);
            v_keys := v_keys || v_bundle.key;
        end if;
    end loop;
    return _pgqueue.mark_firsts(p_consumer, p_hints, array(select distinct k from unnest(v_keys) k));
end $$;
