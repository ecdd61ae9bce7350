-- Where messages stand that are taken, or come back.

-- The lane and place of a bundle that nobody has claimed and that was judged: delayed until its not_visible_until,
-- where no order comes first; or ready, by key in the line.
create or replace function _pgqueue.placed(p_consumer pgqueue.consumers, p_bundle pgqueue.consumer_messages)
returns pgqueue.consumer_messages
language plpgsql
as $$
begin
    if p_bundle.not_visible_until is not null and p_consumer.ordering = 'none' then
        p_bundle.lane := _pgqueue.lane_delayed();
        p_bundle.place := _pgqueue.place_at(p_bundle.not_visible_until);
    else
        p_bundle.lane := case when _pgqueue.is_keyed(p_consumer.way) then _pgqueue.lane_line()
                              else -p_bundle.priority end;
        p_bundle.place := p_bundle.arrival_no;
    end if;
    p_bundle.key := null;
    p_bundle.behind := null;
    p_bundle.keys := null;
    p_bundle.shrunk := false;
    return p_bundle;
end $$;

-- Notes that a bundle is due at a place of lane_delayed(). Returns the hints.
create or replace function _pgqueue.due_at(p_hints pgqueue.claim_hints, p_place bigint) returns pgqueue.claim_hints
language plpgsql
as $$
begin
    p_hints.due_from := least(p_hints.due_from, _pgqueue.time_of(p_place));
    return p_hints;
end $$;

-- Stores messages of such a bundle. Returns the hints.
create or replace function _pgqueue.store_placed(p_hints pgqueue.claim_hints, p_bundle pgqueue.consumer_messages,
                                                 p_seqs int8multirange) returns pgqueue.claim_hints
language plpgsql
as $$
begin
    if _pgqueue.store(p_bundle, p_seqs) = 0 then
        return p_hints;
    elsif p_bundle.lane = _pgqueue.lane_delayed() then
        p_hints := _pgqueue.due_at(p_hints, p_bundle.place);
    elsif p_bundle.lane = _pgqueue.lane_unfiltered() then
        p_hints.filter_from := least(p_hints.filter_from, p_bundle.place);
        p_hints.was_cut := true;
    elsif p_bundle.lane < _pgqueue.lane_delayed() then
        p_hints := _pgqueue.stands(p_hints, p_bundle.lane, p_bundle.place, lower(p_seqs));
    end if;
    return p_hints;
end $$;

-- A bundle of messages that are taken now, for store(): unfiltered, delayed, ready, or by key in the line.
--   p_due  not before then; null: at once
create or replace function _pgqueue.taken_bundle(p_consumer pgqueue.consumers, p_arrival_no bigint, p_priority int,
                                                 p_due timestamptz, p_note jsonb) returns pgqueue.consumer_messages
language plpgsql
as $$
declare
    v_bundle pgqueue.consumer_messages;
    v_keyed  boolean := _pgqueue.is_keyed(p_consumer.way);
begin
    v_bundle.consumer_id := p_consumer.consumer_id;
    v_bundle.arrival_no := p_arrival_no;
    v_bundle.priority := p_priority;
    v_bundle.deliver_count := 0;
    v_bundle.not_visible_until := p_due;
    v_bundle.note := p_note;
    if _pgqueue.judges(p_consumer) then
        v_bundle.lane := _pgqueue.lane_unfiltered();
        v_bundle.place := _pgqueue.unfiltered_place(v_keyed, p_priority, p_arrival_no);
    else
        v_bundle := _pgqueue.placed(p_consumer, v_bundle);
    end if;
    return v_bundle;
end $$;
