-- The lane and place of messages that are taken or returned.

-- Sets the lane and place of a free bundle that needs no more screening: without an order, delayed until its
-- not_visible_until; else ready, by key unassigned.
create or replace function _pgqueue.placed(p_consumer pgqueue.consumers, p_bundle pgqueue.consumer_messages)
returns pgqueue.consumer_messages language plpgsql as $$
begin
    if p_bundle.not_visible_until is not null and p_consumer.ordering = 'none' then
        p_bundle.lane := _pgqueue.lane_delayed();
        p_bundle.place := _pgqueue.place_at(p_bundle.not_visible_until);
    else
        p_bundle.lane := case when _pgqueue.is_keyed(p_consumer.profile) then _pgqueue.lane_unassigned()
                              else -p_bundle.priority end;
        p_bundle.place := p_bundle.arrival_no;
    end if;
    p_bundle.key := null;
    p_bundle.predecessor := null;
    p_bundle.keys := null;
    p_bundle.shrunk := false;
    return p_bundle;
end $$;

-- Records in the hints that a bundle in lane_delayed() is due at a place. Returns the hints.
create or replace function _pgqueue.record_due(p_hints pgqueue.claim_hints, p_place bigint) returns pgqueue.claim_hints
language plpgsql as $$
begin
    p_hints.due_from := least(p_hints.due_from, _pgqueue.time_of(p_place));
    return p_hints;
end $$;

-- Records in the hints that a bundle with a lane from placed() or taken_bundle() is at a place. Returns the hints.
create or replace function _pgqueue.record_placed(p_hints pgqueue.claim_hints, p_lane int, p_place bigint,
                                                  p_first_seq bigint) returns pgqueue.claim_hints
language plpgsql as $$
begin
    if p_lane = _pgqueue.lane_delayed() then
        return _pgqueue.record_due(p_hints, p_place);
    elsif p_lane = _pgqueue.lane_unfiltered() then
        p_hints.filter_from := least(p_hints.filter_from, p_place);
        p_hints.was_cut := true;
        return p_hints;
    end if;
    return case when p_lane < _pgqueue.lane_delayed() then _pgqueue.record_place(p_hints, p_lane, p_place, p_first_seq)
                else p_hints end;
end $$;

-- Stores messages as such a bundle. Returns the hints.
create or replace function _pgqueue.store_placed(p_hints pgqueue.claim_hints, p_bundle pgqueue.consumer_messages,
                                                 p_seqs int8multirange) returns pgqueue.claim_hints
language plpgsql as $$
begin
    return case when _pgqueue.store(p_bundle, p_seqs) = 0 then p_hints
                else _pgqueue.record_placed(p_hints, p_bundle.lane, p_bundle.place, lower(p_seqs)) end;
end $$;

-- Stores such bundles, with their messages. Returns the hints.
create or replace function _pgqueue.store_all_placed(p_hints pgqueue.claim_hints, p_bundles pgqueue.consumer_messages[])
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_first record;
begin
    for v_first in
        with stored as (
            insert into pgqueue.consumer_messages (consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority,
                                                   deliver_count, not_visible_until, last_delivered_at, note,
                                                   message_count, seqs)
            select b.consumer_id, nextval('pgqueue.claim_numbers'), b.lane, b.place, c.first_seq, b.arrival_no,
                   b.priority, b.deliver_count, b.not_visible_until, b.last_delivered_at, b.note, c.message_count,
                   c.seqs
            from unnest(p_bundles) with ordinality b cross join lateral _pgqueue.split_set(b.seqs) c
            order by b.ordinality, c.first_seq
            returning lane, place, first_seq
        )
        select distinct on (lane) * from stored order by lane, place, first_seq
    loop
        p_hints := _pgqueue.record_placed(p_hints, v_first.lane, v_first.place, v_first.first_seq);
    end loop;
    return p_hints;
end $$;

-- A bundle of messages that are being taken, to be stored: unfiltered, delayed, ready, or by key unassigned.
--   p_due, p_expires_at  deliver them not before and not after these times; null: at once, and at any time
--   p_unfiltered         store them as unfiltered; null: if the consumer screens messages
create or replace function _pgqueue.taken_bundle(p_consumer pgqueue.consumers, p_arrival_no bigint, p_priority int,
                                                 p_due timestamptz, p_expires_at timestamptz, p_seqs int8multirange,
                                                 p_unfiltered boolean default null)
returns pgqueue.consumer_messages language plpgsql as $$
declare
    v_bundle pgqueue.consumer_messages;
    v_keyed  boolean := _pgqueue.is_keyed(p_consumer.profile);
begin
    v_bundle.consumer_id := p_consumer.consumer_id;
    v_bundle.arrival_no := p_arrival_no;
    v_bundle.priority := p_priority;
    v_bundle.deliver_count := 0;
    v_bundle.not_visible_until := case when p_due > clock_timestamp() then p_due end;
    v_bundle.note := case when p_expires_at is not null then _pgqueue.expiry(p_expires_at) end;
    v_bundle.seqs := p_seqs;
    if coalesce(p_unfiltered, _pgqueue.is_screened(p_consumer)) then
        v_bundle.lane := _pgqueue.lane_unfiltered();
        v_bundle.place := _pgqueue.unfiltered_place(v_keyed, p_priority, p_arrival_no);
    else
        v_bundle := _pgqueue.placed(p_consumer, v_bundle);
    end if;
    return v_bundle;
end $$;
