-- Waiting by key: messages that are behind others of their key, or over a limit of it, are in lane_waiting(), in
-- bundles of one key each, so that claims do not read them. Of each waiting key, one bundle is the first, with one of
-- these places:
--
--   * The number of an open bundle with the key, when it may be assigned once that bundle is deleted
--     (queue/keys/assigning.sql).
--   * That number plus place_behind_long(), if the open bundle is in lane_long(). The session that deletes a long claim
--     records this in lane_freed(), so assignments need not read all long claims.
--   * A place from place_of_free() on, the later the higher, if no bundle with the key is open.
--
-- The place of all other bundles is place_behind(). If the first message of a key is delayed, or the tokens of the key
-- are spent, it is in lane_delayed(), and all others wait. mark_firsts() restores this after each change.
--
-- The places of both kinds rise, and the cursor's hints have the first ones: so bundles that were assigned cost nothing
-- if a long transaction elsewhere keeps their dead rows.

-- Records in the hints that the first message of a key is at a place of lane_waiting(). Returns the hints.
create or replace function _pgqueue.record_first(p_hints pgqueue.claim_hints, p_place bigint)
returns pgqueue.claim_hints language plpgsql immutable as $$
begin
    if p_place >= 0 then
        p_hints.waits_from := least(p_hints.waits_from, p_place);
    elsif p_place < _pgqueue.place_behind() then
        p_hints.free_from := least(p_hints.free_from, p_place);
    end if;
    return p_hints;
end $$;

-- Whether a claim in lane_long() has freed a key, and no assignment has read that yet.
create or replace function _pgqueue.has_freed(p_consumer_id int, p_hints pgqueue.claim_hints) returns boolean
language sql stable as $$
    select exists (select from pgqueue.consumer_messages
                   where consumer_id = p_consumer_id and lane = _pgqueue.lane_freed() and place >= p_hints.freed_from)
$$;

-- Whether a consumer may have bundles with a key that wait, are delayed or are long claims, after
-- raise_waiting_hints(). True also if that cannot be decided without reading many others.
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

-- The last open bundle of each of some keys: assigned, or a long claim. No row: the key is not in use.
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

-- The waiting bundles of some keys whose places must change: the first one, and one that was the first before. The new
-- place of the first one is null if it may be assigned and has no such place yet. Arguments: as mark_firsts().
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
                                 and m.place <> _pgqueue.place_behind()
                                 and (arrival_no, first_seq) >= (k.arrival_no, k.first_seq)
                               order by arrival_no, first_seq limit 1) o on p_had_first
        ), decided as (
            select f.tid, f.place as was, case when f.delayed then _pgqueue.place_behind() else o.place end as place,
                   f.old
            from first f left join open o using (key)
        )
        select d.tid, d.place from decided d
        where d.was is distinct from d.place and (d.place is not null or d.was >= _pgqueue.place_behind())
        union all
        select d.old, _pgqueue.place_behind() from decided d where d.old <> d.tid;
end $$;

-- Marks the first waiting bundle of each of some keys with the bundle for which it waits. Returns the hints. Needs the
-- consumer's lock.
--   p_had_first  false: none of the waiting bundles is marked as the first
--   p_after      for each key a bundle that waited before all others; null: unknown
--   p_open       also without an order, they wait for a bundle that is open. Such a key may have several, or wait for
--                tokens: so an assignment decides instead, unless it is the caller
create or replace function _pgqueue.mark_firsts(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                p_keys bigint[], p_had_first boolean default true,
                                                p_after pgqueue.consumer_messages[] default null,
                                                p_open boolean default false) returns pgqueue.claim_hints
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
        from _pgqueue.firsts(p_consumer.consumer_id, p_hints, p_keys, p_had_first, p_after,
                              p_open or p_consumer.ordering <> 'none') f
        where m.ctid = f.tid
        returning m.place
    loop
        p_hints := _pgqueue.record_first(p_hints, v_place);
    end loop;
    p_hints.any_waiting := true;
    return p_hints;
end $$;

-- Lets the next assignment read the keys that claims in lane_long() have freed, a bounded number. Returns the hints.
-- Needs the consumer's lock.
create or replace function _pgqueue.take_freed(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_keys bigint[];
begin
    with deleted as (
        delete from pgqueue.consumer_messages
        where ctid = any (array(select ctid from pgqueue.consumer_messages
                                where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_freed()
                                  and place >= p_hints.freed_from
                                order by place limit _pgqueue.limit_assign()))
        returning key
    )
    select array_agg(distinct key) into v_keys from deleted;
    return _pgqueue.mark_firsts(p_consumer, p_hints, v_keys);
end $$;

-- Moves unclaimed assigned bundles of some keys to lane_waiting(), because their predecessors are returned or became
-- long claims. No session can have claimed them. Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.unassign_followers(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                       p_keys bigint[]) returns pgqueue.claim_hints
language plpgsql as $$
begin
    if p_consumer.ordering <> 'none' then
        update pgqueue.consumer_messages
        set lane = _pgqueue.lane_waiting(), place = _pgqueue.place_behind(), key = keys[1], keys = null,
            predecessor = null
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

-- Reads the keys of assigned bundles that have lost messages. Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.reread_keys(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_bundle   pgqueue.consumer_messages;
    v_keys     bigint[];
    v_lost     bigint[] := '{}';
begin
    for v_bundle in
        select * from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
          and (place, first_seq) >= (v_assigned.low_place, v_assigned.low_seq) and shrunk
        for update skip locked  -- lock: bundle
    loop
        v_keys := _pgqueue.keys_in(p_consumer, v_bundle);
        update pgqueue.consumer_messages set keys = v_keys, shrunk = false
        where _pgqueue.is_bundle(bundle_no, v_bundle.bundle_no);
        v_lost := v_lost || array(select distinct k from unnest(v_bundle.keys) k
                                  where p_consumer.ordering = 'none' or k <> all (v_keys));
    end loop;
    return _pgqueue.unassign_followers(p_consumer, p_hints, v_lost);
end $$;

-- Takes messages that no claim holds out of a consumer's bundles, for a caller that settles or removes them. Bundles
-- that another session is claiming are skipped. Returns the hints, and the messages as bundles, as they were. Needs the
-- consumer's lock.
create or replace function _pgqueue.take_unclaimed(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                   p_seqs int8multirange, out o_hints pgqueue.claim_hints,
                                                   out o_bundles pgqueue.consumer_messages[])
language plpgsql as $$
declare
    v_found    pgqueue.consumer_messages[] := array(
        select b from pgqueue.consumer_messages b
        where consumer_id = p_consumer.consumer_id and token is null and first_seq < upper(p_seqs)
          and _pgqueue.meets(seqs, p_seqs)
        for update skip locked);  -- lock: bundle
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_deleted  pgqueue.consumer_messages;
begin
    o_hints := p_hints;
    o_bundles := _pgqueue.remove_messages(v_found, p_seqs);
    for v_deleted in
        select b.* from unnest(o_bundles) b where b.predecessor is not null and _pgqueue.is_deleted(b.bundle_no)
        order by b.bundle_no desc
    loop  -- the bundles that follow it get its predecessor
        update pgqueue.consumer_messages set predecessor = v_deleted.predecessor
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
          and (place, first_seq) >= (v_assigned.low_place, v_assigned.low_seq) and predecessor = v_deleted.bundle_no;
    end loop;
    if _pgqueue.is_keyed(p_consumer.profile) and o_bundles <> '{}' then
        o_hints := _pgqueue.reread_keys(p_consumer, o_hints);
        o_hints := _pgqueue.mark_firsts(p_consumer, o_hints, array(
            select distinct key from unnest(o_bundles) where key is not null));
    end if;
end $$;

-- Makes the unclaimed assigned bundles of a consumer wait again (without an order: unassigned), to be assigned in
-- another size, or beside messages that are returned. Returns the hints. Needs the consumer's lock.
--   p_bundle  only this bundle, which no bundle follows; null: all
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
    elsif p_consumer.ordering = 'none' then  -- without an order, no message waits for another
        foreach v_bundle in array v_bundles loop
            v_bundle := _pgqueue.placed(p_consumer, v_bundle);
            if _pgqueue.has_few_ranges(v_bundle.seqs) then
                perform _pgqueue.replace(v_bundle);
                p_hints := _pgqueue.record_place(p_hints, v_bundle.lane, v_bundle.place, v_bundle.first_seq);
            else
                perform _pgqueue.delete_bundle(v_bundle.bundle_no);
                p_hints := _pgqueue.store_placed(p_hints, v_bundle, v_bundle.seqs);
            end if;
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
            v_bundle.place := _pgqueue.place_behind();
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
