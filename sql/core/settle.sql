-- Settling: messages leave a live claim, for good (_settle) or to be delivered again (_return). All that settles comes through here.

-- Takes messages out of a live claim for good: acknowledged, or kept as dead letters. Returns how many.
--   p_set  null: all
create or replace function pgqueue._settle(p_claim_id bigint, p_set int8multirange, p_dead boolean, p_reason text, p_details jsonb) returns bigint
language plpgsql
as $$
declare
    v_claim  pgqueue.claims;
    v_cursor pgqueue.consumer_cursors;
    v_done   record;
begin
    perform pgqueue._check_isolation();
    v_claim := pgqueue._lock_claim(p_claim_id, false);
    if v_claim.claim_id is null then
        return 0;
    end if;
    v_done := pgqueue._finish(v_claim, p_set, p_dead, p_reason, p_details);
    if v_claim.ordered then
        v_cursor := pgqueue._cursor(v_claim.consumer_id);
    end if;
    perform pgqueue._save_cursor(v_cursor, pgqueue._shrink_claim(v_cursor, v_claim, v_claim.remaining - v_done.o_count, v_done.o_keys), true);
    return v_done.o_count;
end $$;

-- Deletes messages from a claim's runs, keeping them as dead letters if p_dead. Returns how many, and their keys where they have runs
-- of their own. Needs the claim's lock, and for ordered consumers the consumer's.
create or replace function pgqueue._finish(p_claim pgqueue.claims, p_set int8multirange, p_dead boolean, p_reason text, p_details jsonb,
                                           out o_count bigint, out o_keys text[])
language plpgsql
as $$
declare
    v_run pgqueue.consumer_messages;
begin
    if p_set is null and not p_dead then
        with gone as (
            delete from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed' returning message_count, key
        )
        select coalesce(sum(message_count), 0), array_agg(distinct key) filter (where key is not null) into o_count, o_keys from gone;
        return;
    end if;
    o_count := 0;
    o_keys := '{}';
    for v_run in select * from pgqueue._take_out(p_claim.claim_id, p_set) loop
        if p_dead then
            perform pgqueue._dead_letter(v_run, v_run.seqs, p_reason, p_details);
        end if;
        o_count := o_count + v_run.message_count;
        if v_run.key is not null then
            o_keys := o_keys || v_run.key;
        end if;
    end loop;
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
          and case when live and not ordered then reader is null end  -- opaque: or else a partial index is read for it
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
    v_back   record;
    v_keys   text[];
begin
    if p_claim.ordered and (p_set is not null or v_cursor.open_claims > 1 or v_cursor.blocked > 0) then
        v_back := pgqueue._return_by_key(p_consumer, v_cursor, p_claim, p_set, v_until, p_reason);
        v_keys := v_back.o_keys;
        v_places := v_back.o_places;
        v_cursor.blocked := v_cursor.blocked + v_back.o_blocked;
    else
        for v_run in select * from pgqueue._take_out(p_claim.claim_id, p_set) loop
            if v_run.deliver_count >= p_consumer.max_deliver_count then
                perform pgqueue._dead_letter(v_run, v_run.seqs, coalesce(p_reason, 'returned'), null);
                continue;
            end if;
            -- an ordered consumer's run goes back into the line with its delay: the line waits for it
            v_run.state := case when v_until is not null and not p_claim.ordered then 'delayed' else 'ready' end;
            v_run.lane := case when p_claim.ordered then 0 else v_run.lane end;
            v_run.key := null;
            v_run.claim_id := null;
            v_run.line_no := v_run.arrival_no;
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
    return pgqueue._shrink_claim(v_cursor, p_claim, pgqueue._held_by(p_claim.claim_id), v_keys);
end $$;
