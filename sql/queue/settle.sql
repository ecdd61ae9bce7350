-- Settling: messages leave a live claim, for good (settle()) or to be delivered again (return()). All calls that settle
-- come through here.

-- Takes messages out of a live claim for good: acknowledged, or kept as dead letters. Returns how many messages these
-- were.
--   p_set      null: all
--   p_details  of dead letters their details; otherwise the result
create or replace function _pgqueue.settle(p_claim_id bigint, p_set int8multirange, p_dead boolean, p_reason text,
                                           p_details jsonb)
returns bigint
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
    v_count bigint;
begin
    perform _pgqueue.check_isolation();
    if p_set is not null and not p_dead and _pgqueue.is_slot(p_claim_id) then
        v_count := _pgqueue.shrink_slot(p_claim_id, p_set);
        if v_count is not null then
            return v_count;
        end if;
    end if;
    v_claim := _pgqueue.lock_claim(p_claim_id, false);
    if v_claim.claim_id is null then
        return 0;
    end if;
    v_count := _pgqueue.finish(v_claim, p_set, p_dead, p_reason, p_details);
    perform _pgqueue.shrink_claim(v_claim, v_claim.remaining - v_count);
    return v_count;
end $$;

-- Deletes messages from a claim's runs, and keeps them as dead letters if p_dead. Returns how many messages these were.
-- Needs the claim's lock.
create or replace function _pgqueue.finish(p_claim pgqueue.claims, p_set int8multirange, p_dead boolean, p_reason text,
                                           p_details jsonb)
returns bigint
language plpgsql
as $$
declare
    v_run   pgqueue.consumer_messages;
    v_count bigint := 0;
    v_seqs  int8multirange;
    v_most  int;
begin
    if p_set is null and not p_dead then
        with gone as (
            delete from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed'
            returning message_count, deliver_count, case when p_claim.archive then seqs end as seqs
        )
        select coalesce(sum(message_count), 0), max(deliver_count), range_agg(seqs) into v_count, v_most, v_seqs
        from gone;
    else
        for v_run in select * from _pgqueue.take_out(p_claim.claim_id, p_set) loop
            if p_dead then
                perform _pgqueue.dead_letter(v_run, v_run.seqs, coalesce(p_reason, 'rejected'), p_details,
                                             p_claim.owner);
            elsif p_claim.archive then
                v_seqs := coalesce(v_seqs, '{}') + v_run.seqs;
                v_most := greatest(v_most, v_run.deliver_count);
            end if;
            v_count := v_count + v_run.message_count;
        end loop;
    end if;
    if p_claim.archive and not p_dead then
        perform _pgqueue.note_done(p_claim, v_seqs, v_count, v_most, p_details);
    end if;
    return v_count;
end $$;

-- Acknowledges a whole claim, for ack and claim, which have checked the isolation. Returns how many messages it had.
create or replace function _pgqueue.ack(p_claim_id bigint, p_result jsonb default null) returns bigint
language plpgsql
as $$
declare
    v_count bigint;
begin
    if _pgqueue.is_slot(p_claim_id) then
        if _pgqueue.goes_on(p_claim_id) then
            v_count := _pgqueue.go_on(p_claim_id);
        else
            delete from pgqueue.slots  -- lock: slot
            where slot & 1048575 = _pgqueue.place_in(p_claim_id) and token = _pgqueue.token_in(p_claim_id)
            returning message_count into v_count;
        end if;
        if v_count is not null then
            return v_count;
        end if;
    end if;
    -- the common case, in two statements: the second sees what was committed before the first had the lock
    delete from pgqueue.claims  -- lock: claim
    where claim_id = p_claim_id
      -- opaque: otherwise a partial index is read for it
      and case when live and not archive then reader is null end
    returning remaining into v_count;
    if found then
        delete from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed';
        return v_count;
    end if;
    return _pgqueue.settle(p_claim_id, null, false, null, p_result);
end $$;

-- Puts messages of a claim back to be delivered again, or gives them up: the common part of all calls that return
-- messages. (More than 60 lines: most of them say what becomes of one run.)
--
-- Which message is to blame: a message is given up when it was delivered max_deliver_count times and is known to have
-- failed. It is known when the worker named it, or when it was the last message of its claim. When some messages of a
-- claim failed and nobody knows which, all go back. If one of them had failed before, all get a note that no claim may
-- have more than half as many messages with one of them (at_most). So one message that kills its worker is alone after
-- about log2(n) more failures, and the messages beside it are delivered. The claim of a Spark reader holds what a whole
-- query works on, so it says nothing about single messages.
--   p_set    the messages; null: all
--   p_how    named: these messages failed; unnamed: some of them did; uncounted: none did, and this was no delivery
--   p_from   when it happened: delays count from then
--   p_delay  how long they are delayed; null: as the consumer's settings say, if they failed
--   p_note   keys for their notes, such as {"error": ...}; null takes a key away
-- Returns the cursor; the caller stores it. Needs the claim's lock and the consumer's.
create or replace function _pgqueue.return(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                           p_claim pgqueue.claims, p_set int8multirange, p_how text, p_from timestamptz,
                                           p_delay interval, p_note jsonb)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor  pgqueue.consumer_cursors := p_cursor;
    v_failure pgqueue.failure;
    v_most    int;          -- deliveries of the message that was delivered most often,
    v_counted int;          -- and those that count
    v_delayed timestamptz;  -- until when that message is delayed
    v_run     pgqueue.consumer_messages;
    v_places  pgqueue.line_place[] := '{}';
    v_held    int8multirange;
    v_due     timestamptz;  -- when the first of them that is delayed comes back
begin
    if p_consumer.per_key_latest then
        v_cursor := _pgqueue.replace_returned(p_consumer, v_cursor, p_claim, p_set);
    end if;
    select max(deliver_count), max(_pgqueue.counted_deliveries(deliver_count, note)) into v_most, v_counted
    from pgqueue.consumer_messages
    where claim_id = p_claim.claim_id and state = 'claimed' and (p_set is null or seqs && p_set);
    v_failure := _pgqueue.failure(p_claim, p_how, p_from, p_delay, p_note, v_most);
    v_delayed := _pgqueue.delayed_until(p_consumer, v_counted, v_failure);
    if p_claim.ordered and p_consumer.ordering <> 'none'
       and (p_set is not null or p_consumer.per_key_interval is not null
            or (v_delayed is not null and exists (
                select from pgqueue.consumer_messages
                where claim_id = p_claim.claim_id and state = 'claimed' and lane = 0))) then
        if p_set is null or p_consumer.per_key_latest then
            v_held := (select range_agg(seqs) from pgqueue.consumer_messages
                       where claim_id = p_claim.claim_id and state = 'claimed');
        end if;
        v_places := _pgqueue.return_by_key(p_consumer, p_claim, coalesce(p_set, v_held), v_failure);
        if p_consumer.per_key_latest then  -- messages that follow the failed ones came back, too
            v_cursor := (_pgqueue.keep_newest(p_consumer, v_cursor, v_held - coalesce((
                select range_agg(seqs) from pgqueue.consumer_messages
                where claim_id = p_claim.claim_id and state = 'claimed'), '{}'), '{}')).p_cursor;
        end if;
    else
        for v_run in select * from _pgqueue.take_out(p_claim.claim_id, p_set) loop
            v_run.note := _pgqueue.noted(v_run.note, v_failure.note);
            v_counted := _pgqueue.counted_deliveries(v_run.deliver_count, v_run.note);
            if _pgqueue.is_hopeless(p_consumer, v_counted, v_failure) then
                perform _pgqueue.dead_letter(v_run, v_run.seqs, 'max deliveries', null, p_claim.owner);
                continue;
            end if;
            v_run.not_visible_until := _pgqueue.delayed_until(p_consumer, v_counted, v_failure);
            v_run.deliver_count := v_run.deliver_count - (not v_failure.counted)::int;
            if p_claim.ordered and (v_run.lane = 1 or p_consumer.ordering = 'none') then
                v_run.piece := null;
                v_run.lane := 1;
                -- back into the line, also with a delay: later messages of its key wait for it
                v_run.line_no := v_run.arrival_no;
                v_run.state := 'ready';
            else
                v_run.state := case when v_run.not_visible_until is null then 'ready' else 'delayed' end;
            end if;
            v_run.claim_id := null;
            perform _pgqueue.store_run(v_run, v_run.seqs);
            if v_run.state = 'ready' then
                v_places := v_places || (v_run.lane, v_run.line_no, v_run.first_seq)::pgqueue.line_place;
            else
                v_cursor.due_from := least(v_cursor.due_from, v_run.not_visible_until);
                v_due := least(v_due, v_run.not_visible_until);
            end if;
        end loop;
        if v_places = '{}' then  -- nothing comes before the slots now; save_cursor() compares the times
            v_cursor.slots_until := least(v_cursor.slots_until, v_due) - interval '1 microsecond';
        end if;
    end if;
    v_cursor := _pgqueue.lower_scan_from(v_cursor, v_places);
    perform _pgqueue.shrink_claim(p_claim, _pgqueue.held_by(p_claim.claim_id));
    return v_cursor;
end $$;
