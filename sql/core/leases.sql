-- What ends by time: leases and delays. Both are looked after by the claims themselves, a bounded number at a time.

-- When the first lease of a consumer ends or ended; null: it has no claims.
--   p_from  none ended before
create or replace function pgqueue._next_expiry(p_consumer_id int, p_from timestamptz) returns timestamptz
language plpgsql stable
as $$
begin
    return (select lease_until from pgqueue.claims where consumer_id = p_consumer_id and live and lease_until >= p_from order by lease_until limit 1);
end $$;

-- Whether a time at which to look again is still to come; not so after the clock was set back, or it would not be reached for long.
create or replace function pgqueue._is_soon(p_when timestamptz) returns boolean
language sql volatile
as $$ select p_when > clock_timestamp() and p_when < clock_timestamp() + interval '2 s' $$;

-- Looks for expired leases, and releases their claims. Once a minute it looks from the beginning: a clock that was set back, or a claim
-- that was committed long after its lease ended, may have made leases that end before those of which it knows.
-- Returns the cursor, which says when to look again. Needs the consumer's lock.
create or replace function pgqueue._probe_leases(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_past  timestamptz := v_now - interval '2 s';  -- a claim may be committed a moment after its lease ended
    v_lease timestamptz;
begin
    v_lease := pgqueue._next_expiry(p_consumer.consumer_id,
        case when date_trunc('minute', v_past) = date_trunc('minute', p_cursor.leases_from) then p_cursor.leases_from else '-infinity' end);
    p_cursor.lease_probe := v_now + least(interval '1 s', p_consumer.visibility_timeout / 2);
    p_cursor.leases_from := least(v_lease, v_past);
    if v_lease <= v_now then
        p_cursor := pgqueue._expire(p_consumer, p_cursor, v_now);
    end if;
    return p_cursor;
end $$;

-- Releases the expired claims of a consumer, a bounded number. Needs the consumer's lock; locks those claims.
create or replace function pgqueue._expire(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_now timestamptz)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_claim  pgqueue.claims;
begin
    for v_claim in
        select * from pgqueue.claims
        where consumer_id = p_consumer.consumer_id and live and lease_until >= p_cursor.leases_from and lease_until <= p_now
        order by lease_until limit pgqueue._limit_expired()
        for update skip locked  -- one that is locked is being settled or extended
    loop
        v_cursor := pgqueue._release(p_consumer, v_cursor, v_claim);
    end loop;
    return v_cursor;
end $$;

-- Releases an expired claim. Returns the cursor. Needs the claim's lock and the consumer's.
-- A message that was alone in it is noted as one that may kill its worker, see is_suspected.
create or replace function pgqueue._release(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    p_cursor := pgqueue._return(p_consumer, p_cursor, p_claim, null, 'unnamed', p_claim.lease_until, null,
        jsonb_build_object('error', 'the visibility timeout passed')
            || case when p_claim.remaining = 1 and p_claim.reader is null then '{"at_most": 1}' else '{}' end::jsonb);
    -- a reader's claim is kept, so that it can tell "taken over" from "gone"; a worker's was deleted with its last message
    update pgqueue.claims set live = false, settled = p_claim.settled where claim_id = p_claim.claim_id;
    return p_cursor;
end $$;

-- Whether a delay of a consumer is over and its end not noted: one from p_due_from on, see the cursor.
create or replace function pgqueue._is_due(p_consumer_id int, p_due_from timestamptz) returns boolean
language plpgsql volatile
as $$
begin
    return ((select not_visible_until from pgqueue.consumer_messages
             where consumer_id = p_consumer_id and state = 'delayed' and not_visible_until >= p_due_from
             order by not_visible_until limit 1) <= clock_timestamp()) is true;
end $$;

-- Makes the delayed runs that are due ready, a bounded number. Needs the consumer's lock.
create or replace function pgqueue._end_delays(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_places pgqueue.line_place[];
    v_last   timestamptz;
    v_count  int;
    v_freed  int;
begin
    if not pgqueue._is_due(p_cursor.consumer_id, p_cursor.due_from) then
        return p_cursor;
    end if;
    with due as (
        select ctid, not_visible_until from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'delayed'
          and not_visible_until >= p_cursor.due_from and not_visible_until <= v_now
        order by not_visible_until limit pgqueue._limit_due()
        for update
    ), gate as (
        delete from pgqueue.consumer_messages m using due where m.ctid = due.ctid and m.message_count = 0
        returning m.key, m.line_no as arrival_no, m.first_seq, due.not_visible_until
    ), ended as (
        -- by key it waits, and its key is free: as if a piece had held it, and were gone
        update pgqueue.consumer_messages m
        set state = case when m.key is null then 'ready' else 'waiting' end, not_visible_until = null
        from due
        where m.ctid = due.ctid and m.message_count > 0
        returning m.lane, m.line_no, m.first_seq, m.key, m.arrival_no, due.not_visible_until
    ), freed as (
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq)
        select p_consumer.consumer_id, p_cursor.last_line_no + i, p_cursor.last_line_no + i, 0, array[key], arrival_no, first_seq
        from (select *, row_number() over () as i
              from (select key, arrival_no, first_seq from ended where key is not null
                    union all
                    select key, min(arrival_no), min(first_seq) from gate group by key) k) e
        returning 1
    ), over_now as (
        select lane, line_no, first_seq, key, not_visible_until from ended
        union all
        select null, null, null, key, not_visible_until from gate
    )
    select array_agg((lane, line_no, first_seq)::pgqueue.line_place) filter (where key is null), max(not_visible_until), count(*),
           (select count(*) from freed)
    into v_places, v_last, v_count, v_freed
    from over_now;
    p_cursor.last_line_no := p_cursor.last_line_no + v_freed;
    p_cursor := pgqueue._lower_scan_from(p_cursor, v_places);
    p_cursor.due_from := case when v_count < pgqueue._limit_due() then v_now else v_last end;
    return p_cursor;
end $$;

-- When it makes sense to claim again: the next delayed message, or schedule, is due; and, for who got nothing, the next lease ends, or at once
-- where a claim has looked at as much of what waits as it may, and the next one goes on; or when its limits leave room. Null: when something is published.
create or replace function pgqueue._next_due(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_got_nothing boolean)
returns timestamptz
language plpgsql
as $$
declare
    v_until timestamptz;
begin
    if p_consumer.throttled and p_got_nothing and not p_consumer.paused then
        v_until := pgqueue._throttled_until(p_consumer, p_cursor);
        if v_until is not null then
            return v_until;
        end if;
    end if;
    return case when not p_consumer.paused then least(
        (select not_visible_until from pgqueue.consumer_messages
         where consumer_id = p_consumer.consumer_id and state = 'delayed' and not_visible_until >= p_cursor.due_from
         order by not_visible_until limit 1),
        -- of an ordered consumer the line is left: its front is not visible yet, or was not looked at
        (select coalesce(m.not_visible_until, clock_timestamp())
         from unnest(p_cursor.scan_from) f cross join lateral pgqueue._next_ready(p_consumer.consumer_id, f) m
         where p_got_nothing and p_consumer.by_key and f.lane = 1 and m.run_ctid is not null
           and not exists (select from pgqueue.pieces where consumer_id = p_consumer.consumer_id and place >= p_cursor.pieces_from and keys is null)),
        case when p_got_nothing and ((p_cursor.take_was_cut and p_consumer.by_key and p_consumer.ordering <> 'stream') or p_cursor.sift_from is not null)
             then clock_timestamp() end,
        case when p_consumer.scheduled then pgqueue._schedule_due(p_consumer.stream_id) end,
        case when p_got_nothing then pgqueue._next_expiry(p_consumer.consumer_id, p_cursor.leases_from) end) end;
end $$;
