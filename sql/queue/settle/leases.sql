-- What ends by time: leases and delays. Claims end them, a bounded number at a time.

-- Whether a consumer has nothing to claim among what it has taken: nothing is free, no delay has ended, and no key is
-- free.
--   p_leases  and no lease has ended
create or replace function _pgqueue.is_idle(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                            p_leases boolean) returns boolean
language plpgsql as $$
declare
    v_hints pgqueue.claim_hints := p_cursor.hints;
begin
    return v_hints.rebuilt_at is not null and _pgqueue.rebuilt_lately(v_hints) and not v_hints.was_cut
        and not _pgqueue.has_free(v_hints)
        and (v_hints.any_waiting is not true or not _pgqueue.has_free_key(p_consumer, v_hints))
        and (_pgqueue.next_end(p_consumer.consumer_id, v_hints, p_leases) <= clock_timestamp()) is not true;
end $$;

-- Releases claims whose leases have ended, and moves claims older than a second to lane_long(). Once a minute it
-- rebuilds all hints, and so finds leases that end before those it knows of, because the clock was set back, or a claim
-- was committed long after its lease ended. Returns the cursor, whose hints say when to check again. Needs the
-- consumer's lock.
create or replace function _pgqueue.probe_leases(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_past  timestamptz := v_now - interval '2 s';  -- a claim may be committed a moment after its lease ended
    v_hints pgqueue.claim_hints;
begin
    if not _pgqueue.rebuilt_lately(p_cursor.hints) then
        p_cursor.hints := _pgqueue.rebuild_hints(p_cursor);
    end if;
    p_cursor.hints := _pgqueue.move_long_claims(p_consumer, p_cursor.hints, v_now);
    p_cursor := _pgqueue.expire(p_consumer, p_cursor, v_now);
    v_hints := p_cursor.hints;
    v_hints.probe_at := v_now + least(interval '1 s', p_consumer.visibility_timeout / 2);
    v_hints.long_from := least(v_past, _pgqueue.time_of((
        select place from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_long()
          and place >= _pgqueue.place_at(v_hints.long_from)
        order by place limit 1)));
    p_cursor.hints := v_hints;
    return p_cursor;
end $$;

-- Releases expired claims of a consumer in lane_long(), a bounded number. If a lease was extended, corrects the place
-- of the claim. Needs the consumer's lock; locks those claims.
create or replace function _pgqueue.expire(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                           p_now timestamptz) returns pgqueue.consumer_cursors
language plpgsql as $$
declare
    v_head    pgqueue.consumer_messages;
    v_bundles pgqueue.consumer_messages[];
begin
    for v_head in
        select * from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_long()
          and place >= _pgqueue.place_at((p_cursor.hints).long_from) and place <= _pgqueue.place_at(p_now)
        order by place limit _pgqueue.limit_expired()
        for update skip locked  -- lock: bundle
    loop
        if v_head.lease_until > p_now then
            update pgqueue.consumer_messages set place = _pgqueue.place_at(lease_until)
            where _pgqueue.is_bundle(bundle_no, v_head.bundle_no);
            continue;
        end if;
        v_bundles := _pgqueue.lock_bundles(v_head.bundle_no, v_head.token);
        p_cursor := _pgqueue.release(p_consumer, p_cursor, v_bundles);
    end loop;
    return p_cursor;
end $$;

-- Releases an expired claim. If it had a single message, the message gets the note at_most, because it may kill its
-- worker (is_suspected()). Returns the cursor. Needs the claim's lock and the consumer's.
create or replace function _pgqueue.release(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                            p_bundles pgqueue.consumer_messages[]) returns pgqueue.consumer_cursors
language plpgsql as $$
begin
    return _pgqueue.return(p_consumer, p_cursor, p_bundles, null, 'one_failed', p_bundles[1].lease_until, null,
        jsonb_build_object('error', 'the visibility timeout expired')
            || case when _pgqueue.count_of(p_bundles) = 1 and p_bundles[1].reader is null then '{"at_most": 1}'
                    else '{}' end::jsonb);
end $$;

-- Releases the expired claims of a consumer that hold some of these messages. Returns the cursor, and how many claims
-- it released. Needs the consumer's lock.
create or replace function _pgqueue.release_due(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                p_seqs int8multirange, out o_cursor pgqueue.consumer_cursors,
                                                out o_count int)
language plpgsql as $$
declare
    v_head    bigint;
    v_bundles pgqueue.consumer_messages[];
begin
    o_cursor := p_cursor;
    o_count := 0;
    for v_head in
        select distinct coalesce(m.head, m.bundle_no)
        from pgqueue.consumer_messages m
        where m.consumer_id = p_consumer.consumer_id and m.token is not null and m.first_seq < upper(p_seqs)
          and _pgqueue.meets(m.seqs, p_seqs)
        limit _pgqueue.limit_expired()
    loop
        v_bundles := array(select b from pgqueue.consumer_messages b
                           where _pgqueue.is_bundle(bundle_no, v_head)
                             and lease_until <= clock_timestamp()
                           for update skip locked);  -- lock: bundle
        continue when v_bundles = '{}';
        o_cursor := _pgqueue.release(p_consumer, o_cursor, _pgqueue.lock_bundles(v_head, v_bundles[1].token));
        o_count := o_count + 1;
    end loop;
end $$;

-- Makes delayed bundles that are due ready, a bounded number. By key, such a bundle then waits as the first of its key.
-- Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.end_delays(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_hints  pgqueue.claim_hints := p_cursor.hints;
    v_row    record;
    v_last   bigint;
    v_keys   bigint[] := '{}';
    v_firsts pgqueue.consumer_messages[] := '{}';
begin
    if (v_hints.due_from <= v_now) is not true then
        return p_cursor;
    end if;
    for v_row in
        with due as (
            select ctid, place as was from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_delayed()
              and place >= _pgqueue.place_at(v_hints.due_from) and place <= _pgqueue.place_at(v_now)
            order by place limit _pgqueue.limit_due()
            for update  -- lock: bundle
        )
        update pgqueue.consumer_messages m
        set lane = case when m.key is not null then _pgqueue.lane_waiting()
                        when _pgqueue.is_keyed(p_consumer.profile) then _pgqueue.lane_unassigned() else -m.priority end,
            place = case when m.key is not null then _pgqueue.place_behind() else m.arrival_no end,
            not_visible_until = case when m.not_visible_until > v_now then m.not_visible_until end
        from due
        where m.ctid = due.ctid
        returning m.lane, m.place, m.first_seq, m.key, due.was, m as bundle
    loop
        v_last := greatest(v_last, v_row.was);
        if v_row.key is null then
            v_hints := _pgqueue.record_place(v_hints, v_row.lane, v_row.place, v_row.first_seq);
        else
            v_keys := v_keys || v_row.key;
            v_firsts := v_firsts || v_row.bundle;
        end if;
    end loop;
    v_hints := _pgqueue.mark_firsts(p_consumer, v_hints, v_keys, false, v_firsts);
    v_hints.due_from := _pgqueue.first_due(p_consumer.consumer_id,
                                           coalesce(_pgqueue.time_of(v_last), v_hints.due_from));
    p_cursor.hints := v_hints;
    return p_cursor;
end $$;
