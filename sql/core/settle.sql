-- Settling: messages leave a live claim, for good (_settle) or to be delivered again (_return). All that settles comes through here.

-- Takes messages out of a live claim for good: acknowledged, or kept as dead letters. Returns how many.
--   p_set  null: all
create or replace function pgqueue._settle(p_claim_id bigint, p_set int8multirange, p_dead boolean, p_reason text, p_details jsonb) returns bigint
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
    v_count bigint;
begin
    perform pgqueue._check_isolation();
    v_claim := pgqueue._lock_claim(p_claim_id, false);
    if v_claim.claim_id is null then
        return 0;
    end if;
    v_count := pgqueue._finish(v_claim, p_set, p_dead, p_reason, p_details);
    perform pgqueue._shrink_claim(v_claim, v_claim.remaining - v_count);
    return v_count;
end $$;

-- Deletes messages from a claim's runs, keeping them as dead letters if p_dead. Returns how many. Needs the claim's lock.
create or replace function pgqueue._finish(p_claim pgqueue.claims, p_set int8multirange, p_dead boolean, p_reason text, p_details jsonb) returns bigint
language plpgsql
as $$
declare
    v_run   pgqueue.consumer_messages;
    v_count bigint := 0;
begin
    if p_set is null and not p_dead then
        with gone as (
            delete from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed' returning message_count
        )
        select coalesce(sum(message_count), 0) into v_count from gone;
        return v_count;
    end if;
    for v_run in select * from pgqueue._take_out(p_claim.claim_id, p_set) loop
        if p_dead then
            perform pgqueue._dead_letter(v_run, v_run.seqs, p_reason, p_details);
        end if;
        v_count := v_count + v_run.message_count;
    end loop;
    return v_count;
end $$;

-- Acknowledges a whole claim: what ack and claim have in common. Returns how many messages that were.
create or replace function pgqueue._ack(p_claim_id bigint) returns bigint
language plpgsql
as $$
declare
    v_count bigint;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        -- the common case, in two statements: the second one sees what was committed before the first had the lock
        delete from pgqueue.claims
        where claim_id = p_claim_id
          and case when live then reader is null end  -- opaque: or else a partial index is read for it
        returning remaining into v_count;
        if found then
            delete from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed';
            return v_count;
        end if;
    end if;
    return pgqueue._settle(p_claim_id, null, false, null, null);
end $$;

-- Puts messages of a claim back to be delivered again; those that were delivered max_deliver_count times become dead letters: the common
-- part of nack and expiry.
--   p_set  the failed messages; null: all
-- Returns the cursor; the caller stores it. Needs the claim's lock and the consumer's.
create or replace function pgqueue._return(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims,
                                           p_set int8multirange, p_delay interval, p_reason text) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_until  timestamptz := case when p_delay > interval '0' then clock_timestamp() + p_delay end;
    v_run    pgqueue.consumer_messages;
    v_places pgqueue.line_place[] := '{}';
begin
    if p_claim.ordered and p_consumer.ordering <> 'none' and (p_set is not null or p_consumer.per_key_interval is not null or (v_until is not null and exists (
            select from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed' and lane = 0))) then
        v_places := pgqueue._return_by_key(p_consumer, p_claim, coalesce(p_set, (
            select range_agg(seqs) from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed')), v_until, p_reason);
    else
        for v_run in select * from pgqueue._take_out(p_claim.claim_id, p_set) loop
            if v_run.deliver_count >= p_consumer.max_deliver_count then
                perform pgqueue._dead_letter(v_run, v_run.seqs, coalesce(p_reason, 'returned'), null);
                continue;
            end if;
            if p_claim.ordered and (v_run.lane = 1 or p_consumer.ordering = 'none') then
                v_run.piece := null;
                v_run.lane := 1;
                v_run.line_no := v_run.arrival_no;  -- back into the line, also with a delay: what follows it of its key waits for it
                v_run.state := 'ready';
            else
                v_run.state := case when v_until is null then 'ready' else 'delayed' end;
            end if;
            v_run.claim_id := null;
            v_run.not_visible_until := v_until;
            v_run.last_error := p_reason;
            perform pgqueue._store_run(v_run, v_run.seqs);
            if v_run.state = 'ready' then
                v_places := v_places || (v_run.lane, v_run.line_no, v_run.first_seq)::pgqueue.line_place;
            end if;
        end loop;
    end if;
    v_cursor := pgqueue._lower_scan_from(v_cursor, v_places);
    v_cursor.due_from := least(v_cursor.due_from, v_until);
    perform pgqueue._shrink_claim(p_claim, pgqueue._held_by(p_claim.claim_id));
    return v_cursor;
end $$;
