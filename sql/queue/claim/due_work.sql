-- What a claim with the consumer's lock does first: due work, and new publications; and when the next claim makes
-- sense.

-- When the next claim makes sense: when the next delay ends or the next schedule is due. After a claim that got nothing
-- also when the next lease ends; when the limits of the consumer allow messages again; or now, if the claim has
-- examined as many messages as one claim may, and the next claim will examine others. Null: when something is
-- published.
create or replace function _pgqueue.next_due(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_got_nothing boolean) returns timestamptz
language plpgsql as $$
declare
    v_hints      pgqueue.claim_hints := p_cursor.hints;
    v_unassigned pgqueue.lane_hint;
    v_until      timestamptz;
begin
    if _pgqueue.is_throttled(p_consumer) and p_got_nothing and not p_consumer.paused then
        v_until := _pgqueue.throttled_until(p_consumer, p_cursor);
        if v_until is not null then
            return v_until;
        end if;
    end if;
    if p_got_nothing and _pgqueue.is_keyed(p_consumer.profile) and v_hints.all_keys is not true then
        v_unassigned := _pgqueue.lane_of(v_hints, _pgqueue.lane_unassigned());
    end if;
    return case when not p_consumer.paused then least(
        _pgqueue.next_end(p_consumer.consumer_id, v_hints, p_got_nothing),
        -- with ordering=stream the first unassigned message is not visible yet; or no claim has examined the unassigned
        -- ones
        (select coalesce(case p_consumer.ordering when 'stream' then m.not_visible_until end, clock_timestamp())
         from pgqueue.consumer_messages m
         where m.consumer_id = p_consumer.consumer_id and m.lane = _pgqueue.lane_unassigned()
           and (m.place, m.first_seq) >= (v_unassigned.place, v_unassigned.first_seq)
         order by m.place, m.first_seq limit 1),
        case when p_got_nothing
            and ((v_hints.was_cut
                  and (p_consumer.per_key_latest
                       or (_pgqueue.is_keyed(p_consumer.profile) and p_consumer.ordering <> 'stream')))
                 or v_hints.filter_from is not null)
             then clock_timestamp() end,
        case when p_consumer.scheduled then _pgqueue.on_due(p_consumer.stream_id) end) end;
end $$;

-- Does the due work of a consumer: releases expired claims and ends delays, a bounded number of each. Returns the
-- cursor. Needs the consumer's lock.
--   p_short  the free messages did not suffice (second pass). False: leases are checked only once a second
create or replace function _pgqueue.do_due_work(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                p_short boolean) returns pgqueue.consumer_cursors
language plpgsql as $$
begin
    if p_short or not _pgqueue.not_yet((p_cursor.hints).probe_at) then
        p_cursor := _pgqueue.probe_leases(p_consumer, p_cursor);
    end if;
    if (p_cursor.hints).lanes_from is not null then
        p_cursor.hints := _pgqueue.uncover_lanes(p_consumer, p_cursor.hints);
    end if;
    return _pgqueue.end_delays(p_consumer, p_cursor);
end $$;

-- Takes new publications, a bounded number. Returns the cursor. Needs the consumer's lock, and catch_up().
--   p_short  as in do_due_work(). False: if the last take stopped at its limit, nothing is taken while free messages
--            suffice, because these come first
--   p_want   take until about this many messages are ready; with per_key_latest all
--   p_upto   no publication after this one; null: all
create or replace function _pgqueue.take_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_short boolean, p_want bigint, p_upto bigint)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_before pgqueue.consumer_cursors;
    v_take   record;
    v_cut    boolean := (p_cursor.hints).was_cut;
    v_until  timestamptz := clock_timestamp() + _pgqueue.filter_time();
begin
    -- (the first pass has read far ahead, unless the last take stopped at its limit)
    if (v_cut and not p_short and not p_consumer.per_key_latest
        and _pgqueue.suffices(p_consumer.consumer_id, p_cursor.hints, p_want))
       or not _pgqueue.has_new(p_consumer.stream_id, p_cursor, not p_short or v_cut) then
        return p_cursor;
    end if;
    for i in 1.._pgqueue.limit_takes() loop
        v_before := p_cursor;
        v_take := _pgqueue.take_alone(p_consumer, p_cursor, p_upto, _pgqueue.limit_take());
        p_cursor := v_take.o_cursor;
        p_want := p_want - v_take.o_messages;
        exit when not (p_cursor.hints).was_cut or (p_want <= 0 and not p_consumer.per_key_latest)
            or (p_cursor.next_publication = v_before.next_publication and p_cursor.gaps = v_before.gaps
                and (v_before.hints).filter_from is null)
            or (_pgqueue.is_screened(p_consumer)
                and (i >= _pgqueue.limit_filters() or clock_timestamp() > v_until));
    end loop;
    return p_cursor;
end $$;
