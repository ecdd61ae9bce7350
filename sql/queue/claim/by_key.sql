-- Claims by key: of assigned bundles; and, with the consumer's lock, of what is assigned now, or of all unassigned
-- messages.

-- Locks the first free assigned bundles, with at most p_want messages. Expired ones become dead letters, a bounded
-- number.
--   p_alone  the caller has the consumer's lock. False: bundles with a note are skipped
create or replace function _pgqueue.lock_assigned(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                  p_want bigint, p_alone boolean default true)
returns pgqueue.consumer_messages[] language plpgsql as $$
declare
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_only     bigint;
    v_next     refcursor;
    v_bundle   pgqueue.consumer_messages;
    v_bundles  pgqueue.consumer_messages[] := '{}';
    v_got      bigint := 0;
    v_expired  int := 0;
    v_before   int;
    v_again    boolean := v_assigned.place is not null;
begin
    while v_again loop
        v_before := v_expired;
        v_only := case when p_consumer.ordering = 'stream'
                       then _pgqueue.first_of_stream(p_consumer.consumer_id, v_assigned) end;
        open v_next for
            select * from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
              and (place, first_seq) >= (v_assigned.place, v_assigned.first_seq) and token is null
              and message_count <= p_want
              and (v_only is null or bundle_no = v_only)
              and (predecessor is null or _pgqueue.is_deleted(predecessor))
              and (p_alone or note is null)
            order by place, first_seq for update skip locked;  -- lock: bundle
        loop
            fetch v_next into v_bundle;
            exit when not found;
            if v_bundle.note is not null and _pgqueue.has_expired(v_bundle.note) then
                perform _pgqueue.give_up_expired(v_bundle);
                v_expired := v_expired + 1;
                exit when v_only is not null or v_expired >= _pgqueue.limit_due();
                continue;
            end if;
            exit when v_got > 0 and (v_got + v_bundle.message_count > p_want or v_bundle.note ? 'at_most' is true);
            v_bundles := v_bundles || v_bundle;
            v_got := v_got + v_bundle.message_count;
            exit when 2 * v_got > p_want or v_bundle.note ? 'at_most';
        end loop;
        close v_next;
        -- what follows an expired bundle can be claimed now
        v_again := v_bundles = '{}' and v_expired > v_before and v_expired < _pgqueue.limit_due();
    end loop;
    return v_bundles;
end $$;

-- The only assigned bundle that can be claimed with ordering=stream: the first unclaimed one, because all others follow
-- it. Null: there is none; or its predecessor is unclaimed too, which should not happen: then claims try all.
create or replace function _pgqueue.first_of_stream(p_consumer_id int, p_assigned pgqueue.lane_hint) returns bigint
language plpgsql stable as $$
begin
    return (select f.bundle_no
            from (select bundle_no, predecessor from pgqueue.consumer_messages
                  where consumer_id = p_consumer_id and lane = _pgqueue.lane_assigned()
                    and (place, first_seq) >= (p_assigned.place, p_assigned.first_seq) and token is null
                  order by place, first_seq limit 1) f
            where f.predecessor is null
               or (select token from pgqueue.consumer_messages
                   where _pgqueue.is_bundle(bundle_no, f.predecessor) limit 1) is not null
               or _pgqueue.is_deleted(f.predecessor));
end $$;

-- If the first free assigned bundle has more messages than a claim wants, makes it wait, to be assigned again: if
-- claims skipped it, later messages would always come before it. If other bundles follow it, or few are assigned, all
-- are made to wait; otherwise only this one, since claims of several sizes in turns would each pay for all. Returns the
-- hints. Needs the consumer's lock. Locks the bundle.
create or replace function _pgqueue.unassign_too_large(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                       p_want bigint) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_only     bigint := case when p_consumer.ordering = 'stream'
                              then _pgqueue.first_of_stream(p_consumer.consumer_id, v_assigned) end;
    v_first    pgqueue.consumer_messages;
begin
    select * into v_first from pgqueue.consumer_messages
    where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
      and (place, first_seq) >= (v_assigned.place, v_assigned.first_seq) and token is null
      and (v_only is null or bundle_no = v_only) and (predecessor is null or _pgqueue.is_deleted(predecessor))
    order by place, first_seq limit 1 for update skip locked;  -- lock: bundle
    if (v_first.message_count > p_want) is not true then
        return p_hints;
    elsif exists (select from _pgqueue.assigned(p_consumer.consumer_id, v_assigned)
                  where predecessor = v_first.bundle_no)
        or (select count(*) from (select from _pgqueue.assigned(p_consumer.consumer_id, v_assigned)
                                  where token is null limit 9) d) < 9 then
        return _pgqueue.unassign(p_consumer, p_hints);
    end if;
    return _pgqueue.unassign(p_consumer, p_hints, v_first.bundle_no);
end $$;

-- Claims assigned bundles, and assigns if these do not suffice or have another size. Returns the hints, and the claim;
-- its id is null if nothing may be claimed. The call examines a bounded number of messages. If all of these must wait,
-- the next claim examines later ones. Needs the consumer's lock.
create or replace function _pgqueue.collect_by_key(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                   p_want bigint, p_reader uuid, out o_hints pgqueue.claim_hints,
                                                   out o_claimed pgqueue.claimed)
language plpgsql as $$
declare
    v_all      record := _pgqueue.claim_all_keys(p_consumer, p_hints, p_want, p_reader);
    v_size     bigint := case p_consumer.ordering when 'stream' then p_want
                                                  else least(p_want, _pgqueue.limit_small()) end;
    v_bundles  pgqueue.consumer_messages[] := '{}';
    v_assign   record;
    v_examined bigint := 0;
    v_assigned bigint := 0;
    v_before   bigint;
    v_least    bigint := case when _pgqueue.limits_keys(p_consumer) then p_want else 1 end;  -- enough to stop
begin
    o_hints := v_all.o_hints;
    o_claimed := v_all.o_claimed;
    if o_claimed.claim_id is not null or o_hints.all_keys then
        return;
    end if;
    if (_pgqueue.lane_of(o_hints, _pgqueue.lane_assigned())).place is not null then
        o_hints := case when 2::bigint * o_hints.size <= v_size then _pgqueue.unassign(p_consumer, o_hints)
                        else _pgqueue.unassign_too_large(p_consumer, o_hints, p_want) end;
        if 2::bigint * o_hints.size > v_size and o_hints.any_waiting and exists (
            select from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_waiting()
              and place >= o_hints.free_from and place < _pgqueue.place_behind()) then
            -- assign keys that are free, beside the assigned bundles: some may have waited for a long time, or failed
            o_hints := (_pgqueue.assign(p_consumer, o_hints, p_want, true)).o_hints;
        end if;
        v_bundles := _pgqueue.lock_assigned(p_consumer, o_hints, p_want);
    end if;
    for i in 1.._pgqueue.limit_takes() loop  -- again, if all that it assigned has expired
        exit when 2 * _pgqueue.count_of(v_bundles) > p_want or v_bundles[1].note ? 'at_most'
            -- (with ordering=stream, newly assigned bundles would follow those that are assigned already)
            or (v_bundles = '{}' and p_consumer.ordering = 'stream' and exists (
                    select from _pgqueue.assigned(p_consumer.consumer_id,
                                                  _pgqueue.lane_of(o_hints, _pgqueue.lane_assigned()))));
        v_before := v_assigned;
        loop
            v_assign := _pgqueue.assign(p_consumer, o_hints, p_want, false,
                                        case when v_assigned < v_least
                                             then least(3 * v_examined, _pgqueue.limit_inspected() - v_examined)
                                             else 0 end);
            o_hints := v_assign.o_hints;
            v_examined := v_examined + v_assign.o_examined;
            v_assigned := v_assigned + v_assign.o_assigned;
            -- (waiting messages are read again at the next assignment; only the unassigned ones become fewer)
            exit when v_assign.o_examined = 0 or v_examined >= _pgqueue.limit_inspected()
                or (v_examined >= p_want and (v_assigned >= v_least or not v_assign.o_any_unassigned))
                or (v_bundles <> '{}' and p_want <= _pgqueue.limit_small());
        end loop;
        exit when v_examined = 0;
        v_bundles := _pgqueue.lock_assigned(p_consumer, o_hints, p_want);
        exit when v_bundles <> '{}' or v_assigned = v_before or v_examined >= _pgqueue.limit_inspected();
    end loop;
    if v_bundles <> '{}' then
        o_claimed := _pgqueue.claim_bundles(p_consumer, v_bundles, p_reader);
    end if;
end $$;

-- Claims the first unassigned messages, with all keys: a claim that wants all there is, as Spark's do, need not know
-- the keys. Only while nothing is assigned, waiting or a long claim; and nothing is assigned until the claim ends.
-- The claim ends before a message that is not visible yet, and a bundle with at_most is a claim of its own. Returns the
-- hints, and the claim; its id is null if there is none. Needs the consumer's lock.
create or replace function _pgqueue.claim_all_keys(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                   p_want bigint, p_reader uuid, out o_hints pgqueue.claim_hints,
                                                   out o_claimed pgqueue.claimed)
language plpgsql as $$
declare
    v_bundles pgqueue.consumer_messages[];
begin
    o_hints := p_hints;
    if o_hints.all_keys then
        o_hints.all_keys := _pgqueue.holds_all_keys(p_consumer.consumer_id, o_hints);
        if o_hints.all_keys and p_consumer.ordering = 'key'
           and o_hints.assigned_until < clock_timestamp() + interval '5 s' then
            o_hints.assigned_until := clock_timestamp() + interval '10 s';
        end if;
    end if;
    if o_hints.all_keys or p_consumer.ordering = 'none' or p_want < _pgqueue.limit_claim_all()
       or _pgqueue.limits_keys(p_consumer)
       or o_hints.assigned_until > clock_timestamp() or not _pgqueue.none_assigned(p_consumer.consumer_id, o_hints) then
        return;
    end if;
    v_bundles := (_pgqueue.lock_ready(p_consumer.consumer_id, _pgqueue.lane_of(o_hints, _pgqueue.lane_unassigned()),
                                        p_want, false, true)).o_bundles;
    if v_bundles = '{}' then
        return;
    end if;
    o_claimed := _pgqueue.claim_bundles(p_consumer, v_bundles, p_reader);
    o_hints := _pgqueue.move_all_to_long(o_hints, v_bundles);
end $$;

-- Whether, with ordering=key, unassigned messages are left that the claim has not examined.
create or replace function _pgqueue.has_unassigned(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns boolean language plpgsql stable as $$
begin
    return p_consumer.ordering = 'key'
       and (p_hints.all_keys or p_hints.lanes_from <= _pgqueue.lane_unassigned()) is not true
       and (_pgqueue.lane_of(p_hints, _pgqueue.lane_unassigned())).place is not null;
end $$;

-- Moves claimed unassigned bundles to lane_long(). Returns the hints.
create or replace function _pgqueue.move_all_to_long(p_hints pgqueue.claim_hints, p_bundles pgqueue.consumer_messages[])
returns pgqueue.claim_hints language plpgsql as $$
begin
    update pgqueue.consumer_messages
    set lane = _pgqueue.lane_long(), place = coalesce(_pgqueue.place_at(lease_until), _pgqueue.place_of_members())
    where ctid = any (_pgqueue.tids(array(select b.bundle_no from unnest(p_bundles) b)));
    p_hints.all_keys := true;
    return p_hints;
end $$;

-- Whether by key nothing of a consumer is assigned, waiting, delayed with a key, or a long claim.
create or replace function _pgqueue.none_assigned(p_consumer_id int, p_hints pgqueue.claim_hints) returns boolean
language plpgsql stable as $$
declare
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
begin
    return not exists (select from _pgqueue.assigned(p_consumer_id, v_assigned))
       and not exists (select from pgqueue.consumer_messages
                       where consumer_id = p_consumer_id and lane = _pgqueue.lane_long()
                         and place >= _pgqueue.place_at(p_hints.long_from))
       and (p_hints.any_waiting is not true
            or not exists (select from pgqueue.consumer_messages
                           where consumer_id = p_consumer_id and key is not null));
end $$;
