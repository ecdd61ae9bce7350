-- What ends by time: leases and delays. The claims themselves end them, a bounded number at a time. (Spent tokens come
-- back in queue/key_tokens.sql.)

-- Whether a consumer without anything ready, new or due has nothing else to do either: no publication is far ahead, no
-- lease has ended, and no claim of a slot was rolled back.
create or replace function _pgqueue.is_idle(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns boolean
language plpgsql
as $$
begin
    if p_cursor.slots_from is not null then
        perform from pgqueue.slots
        where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from and token is null
        limit 1 for update skip locked;  -- lock: slot
        if found then
            return false;
        end if;
    end if;
    return _pgqueue.looked_lately(p_cursor)
        and not _pgqueue.has_new(p_consumer.stream_id, p_cursor, true)
        and (_pgqueue.next_expiry(p_cursor) <= clock_timestamp()) is not true;
end $$;

-- When the first lease of a consumer ends or ended; null: the consumer has no claims. The leases of slots are in no
-- index: slots that can be claimed are few (queue/slots.sql).
create or replace function _pgqueue.next_expiry(p_cursor pgqueue.consumer_cursors) returns timestamptz
language plpgsql stable
as $$
declare
    v_lease timestamptz := (select lease_until from pgqueue.claims
                            where consumer_id = p_cursor.consumer_id and live and lease_until >= p_cursor.leases_from
                            order by lease_until limit 1);
begin
    if p_cursor.slots_low is not null then
        v_lease := least(v_lease, (select min(lease_until) from pgqueue.slots
                                   where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low));
    end if;
    return v_lease;
end $$;

-- Looks for leases that have ended, and releases their claims. Once a minute it tells all hints of the cursor anew: so
-- it finds leases that end before those it knows of, because the clock was set back, or because a claim was committed
-- long after its lease ended.
-- Returns the cursor, which says when to look again. Needs the consumer's lock.
create or replace function _pgqueue.probe_leases(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_past  timestamptz := v_now - interval '2 s';  -- a claim may be committed a moment after its lease ended
    v_lease timestamptz;
begin
    if not _pgqueue.looked_lately(p_cursor) then
        p_cursor := _pgqueue.flush(_pgqueue.look_anew(p_cursor));
    end if;
    v_lease := _pgqueue.next_expiry(p_cursor);
    p_cursor.lease_probe := v_now + least(interval '1 s', p_consumer.visibility_timeout / 2);
    p_cursor.leases_from := least(v_lease, v_past);
    if v_lease <= v_now then
        p_cursor := _pgqueue.expire(p_consumer, p_cursor, v_now);
    end if;
    return p_cursor;
end $$;

-- Releases the expired claims of a consumer, a bounded number. Expired slots become such claims first. Needs the
-- consumer's lock; locks those claims and slots.
create or replace function _pgqueue.expire(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                           p_now timestamptz)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_claim  pgqueue.claims;
begin
    if p_cursor.slots_low is not null then
        perform _pgqueue.promote(array(
            select ctid from pgqueue.slots
            where consumer_id = p_consumer.consumer_id and slot >= p_cursor.slots_low and lease_until <= p_now
            for update skip locked));  -- lock: slot
    end if;
    for v_claim in
        select * from pgqueue.claims
        where consumer_id = p_consumer.consumer_id and live and lease_until >= p_cursor.leases_from
          and lease_until <= p_now
        order by lease_until limit _pgqueue.limit_expired()
        -- lock: claim
        for update skip locked  -- a claim that is locked is being settled or extended
    loop
        v_cursor := _pgqueue.release(p_consumer, v_cursor, v_claim);
    end loop;
    return v_cursor;
end $$;

-- Releases an expired claim. A message that was alone in the claim is noted as a suspect, see is_suspected(): it may
-- kill its worker. Returns the cursor. Needs the claim's lock and the consumer's.
create or replace function _pgqueue.release(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                            p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    p_cursor := _pgqueue.return(p_consumer, p_cursor, p_claim, null, 'unnamed', p_claim.lease_until, null,
        jsonb_build_object('error', 'the visibility timeout passed')
            || case when p_claim.remaining = 1 and p_claim.reader is null then '{"at_most": 1}' else '{}' end::jsonb);
    -- A reader's claim is kept, so that the reader can tell "taken over" from "gone". A worker's claim was deleted with
    -- its last message.
    update pgqueue.claims set live = false, settled = p_claim.settled where claim_id = p_claim.claim_id;
    return p_cursor;
end $$;

-- Makes the delayed runs that are due ready, a bounded number. Of a consumer that goes by key such a run waits, and its
-- key is noted as free. Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.end_delays(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_places pgqueue.line_place[];
    v_freed  pgqueue.waiting_place[];
    v_last   timestamptz;
    v_count  int;
begin
    if not _pgqueue.is_due(p_cursor.consumer_id, p_cursor.due_from) then
        return p_cursor;
    end if;
    with due as (
        select ctid, not_visible_until from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'delayed'
          and not_visible_until >= p_cursor.due_from and not_visible_until <= v_now
        order by not_visible_until limit _pgqueue.limit_due()
        for update  -- lock: run
    ), ended as (
        -- by key the run waits, and its key is free: as if a piece had held the run, and were gone
        update pgqueue.consumer_messages m
        set state = case when m.key is null then 'ready' else 'waiting' end, not_visible_until = null
        from due
        where m.ctid = due.ctid
        returning m.lane, m.line_no, m.first_seq, m.key, m.arrival_no, due.not_visible_until
    )
    select array_agg((lane, line_no, first_seq)::pgqueue.line_place) filter (where key is null),
           array_agg((key, arrival_no, first_seq)::pgqueue.waiting_place) filter (where key is not null),
           max(not_visible_until), count(*)
    into v_places, v_freed, v_last, v_count
    from ended;
    p_cursor := _pgqueue.note_freed(p_cursor, v_freed);
    p_cursor := _pgqueue.lower_scan_from(p_cursor, v_places);
    p_cursor.due_from := case when v_count < _pgqueue.limit_due() then v_now else v_last end;
    return p_cursor;
end $$;
