-- Settling: messages leave a live claim, for good (_settle) or to be delivered again (_return). All that settles comes through here.

-- Takes messages out of a live claim for good: acknowledged, or kept as dead letters. Returns how many.
--   p_set      null: all
--   p_details  of dead letters; else the result
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
    v_seqs  int8multirange;
    v_most  int;
begin
    if p_set is null and not p_dead then
        with gone as (
            delete from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed'
            returning message_count, deliver_count, case when p_claim.archive then seqs end as seqs
        )
        select coalesce(sum(message_count), 0), max(deliver_count), range_agg(seqs) into v_count, v_most, v_seqs from gone;
    else
        for v_run in select * from pgqueue._take_out(p_claim.claim_id, p_set) loop
            if p_dead then
                perform pgqueue._dead_letter(v_run, v_run.seqs, coalesce(p_reason, 'rejected'), p_details, p_claim.owner);
            elsif p_claim.archive then
                v_seqs := coalesce(v_seqs, '{}') + v_run.seqs;
                v_most := greatest(v_most, v_run.deliver_count);
            end if;
            v_count := v_count + v_run.message_count;
        end loop;
    end if;
    if p_claim.archive and not p_dead then
        perform pgqueue._note_done(p_claim, v_seqs, v_count, v_most, p_details);
    end if;
    return v_count;
end $$;

-- Acknowledges a whole claim: what ack and claim have in common. Returns how many messages that were.
create or replace function pgqueue._ack(p_claim_id bigint, p_result jsonb default null) returns bigint
language plpgsql
as $$
declare
    v_count bigint;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        -- the common case, in two statements: the second one sees what was committed before the first had the lock
        delete from pgqueue.claims
        where claim_id = p_claim_id
          and case when live and not archive then reader is null end  -- opaque: or else a partial index is read for it
        returning remaining into v_count;
        if found then
            delete from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed';
            return v_count;
        end if;
    end if;
    return pgqueue._settle(p_claim_id, null, false, null, p_result);
end $$;

-- Puts messages of a claim back to be delivered again, or gives them up: the common part of all that does.
--
-- Whom to blame. A message is given up when it was delivered max_deliver_count times, and it is certain that it failed: it was named, or it was
-- the last one in its claim. Where some of a claim failed and nobody knows which, all go back; if one of them had failed before, with a note
-- that no claim has more than half as many with one of these (at_most). So one message that kills its worker is alone after some log2(n) failures more, and
-- those beside it are delivered. The claim of a Spark reader, which holds what a whole query works on, says nothing of its messages.
--   p_set    the messages; null: all
--   p_how    named: these failed; unnamed: some of them did; uncounted: none did, and this was no delivery
--   p_from   when it happened: delays count from then
--   p_delay  not before then; null: as the consumer's settings say, if they failed
--   p_note   keys for their notes, such as {"error": ...}; null takes a key away
-- Returns the cursor; the caller stores it. Needs the claim's lock and the consumer's.
create or replace function pgqueue._return(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims, p_set int8multirange,
                                           p_how text, p_from timestamptz, p_delay interval, p_note jsonb) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor  pgqueue.consumer_cursors := p_cursor;
    v_failure pgqueue.failure;
    v_most    int;          -- deliveries of what was delivered most often
    v_delayed timestamptz;  -- until when that one is
    v_run     pgqueue.consumer_messages;
    v_places  pgqueue.line_place[] := '{}';
begin
    select max(deliver_count) into v_most
    from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed' and (p_set is null or seqs && p_set);
    v_failure := pgqueue._failure(p_consumer, p_claim, p_how, p_from, p_delay, p_note, v_most);
    v_delayed := pgqueue._delayed_until(p_consumer, v_most, v_failure);
    if p_claim.ordered and p_consumer.ordering <> 'none' and (p_set is not null or p_consumer.per_key_interval is not null or (v_delayed is not null and exists (
            select from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed' and lane = 0))) then
        v_places := pgqueue._return_by_key(p_consumer, p_claim, coalesce(p_set, (
            select range_agg(seqs) from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed')), v_failure);
    else
        for v_run in select * from pgqueue._take_out(p_claim.claim_id, p_set) loop
            v_run.note := pgqueue._noted(v_run.note, v_failure.note);
            if pgqueue._is_hopeless(p_consumer, v_run.deliver_count, v_failure) then
                perform pgqueue._dead_letter(v_run, v_run.seqs, 'max deliveries', null, p_claim.owner);
                continue;
            end if;
            v_run.not_visible_until := pgqueue._delayed_until(p_consumer, v_run.deliver_count, v_failure);
            v_run.deliver_count := v_run.deliver_count - (not v_failure.counted)::int;
            if p_claim.ordered and (v_run.lane = 1 or p_consumer.ordering = 'none') then
                v_run.piece := null;
                v_run.lane := 1;
                v_run.line_no := v_run.arrival_no;  -- back into the line, also with a delay: what follows it of its key waits for it
                v_run.state := 'ready';
            else
                v_run.state := case when v_run.not_visible_until is null then 'ready' else 'delayed' end;
            end if;
            v_run.claim_id := null;
            perform pgqueue._store_run(v_run, v_run.seqs);
            if v_run.state = 'ready' then
                v_places := v_places || (v_run.lane, v_run.line_no, v_run.first_seq)::pgqueue.line_place;
            end if;
        end loop;
    end if;
    v_cursor := pgqueue._lower_scan_from(v_cursor, v_places);
    if v_delayed is not null then
        v_cursor.due_from := least(v_cursor.due_from, pgqueue._delayed_until(p_consumer, 1, v_failure), v_delayed);
    end if;
    perform pgqueue._shrink_claim(p_claim, pgqueue._held_by(p_claim.claim_id));
    return v_cursor;
end $$;

-- What it means for messages of a claim that they are returned: see _return.
--   p_most  deliveries of the one that was delivered most often
create or replace function pgqueue._failure(p_consumer pgqueue.consumers, p_claim pgqueue.claims, p_how text, p_from timestamptz, p_delay interval, p_note jsonb,
                                            p_most int) returns pgqueue.failure
language plpgsql
as $$
declare
    v_failure pgqueue.failure;
begin
    v_failure.counted := p_how <> 'uncounted';
    v_failure.certain := p_how = 'named' or (p_how = 'unnamed' and p_claim.remaining = 1 and p_claim.reader is null);
    v_failure.happened_at := p_from;
    -- what a reader lost is for who asks next, or for itself when it is back
    v_failure.delay := coalesce(p_delay, case when p_how = 'uncounted' or (p_how = 'unnamed' and p_claim.reader is not null) then '0'::interval end);
    v_failure.chance := random();  -- one for all, so that a run stays a run
    v_failure.note := p_note;
    if p_how = 'unnamed' and p_claim.reader is null and p_most > 1 then
        v_failure.note := coalesce(p_note, '{}') || jsonb_build_object('at_most', (p_claim.remaining + 1) / 2);
    end if;
    return v_failure;
end $$;

-- Whether a message that was returned is given up.
create or replace function pgqueue._is_hopeless(p_consumer pgqueue.consumers, p_deliver_count int, p_failure pgqueue.failure) returns boolean
language sql immutable
as $$ select coalesce(p_failure.certain and p_deliver_count >= p_consumer.max_deliver_count, false) $$;

-- Until when a message that was returned is delayed; null: it is not. The delay of its first failure is backoff_base; with backoff=linear
-- it is twice that for the second, three times for the third; with exponential twice that, four times, and so on, up to backoff_cap. Chance makes it
-- shorter, by backoff_jitter of it at most.
create or replace function pgqueue._delayed_until(p_consumer pgqueue.consumers, p_deliver_count int, p_failure pgqueue.failure) returns timestamptz
language plpgsql stable
as $$
declare
    v_delay interval := p_failure.delay;
begin
    if v_delay is null then
        if p_consumer.backoff = 'constant' and coalesce(p_consumer.backoff_base, '0') = '0' then
            return null;
        end if;
        v_delay := make_interval(secs => (1 - p_consumer.backoff_jitter * p_failure.chance) * least(
            extract(epoch from p_consumer.backoff_cap)::float8,
            extract(epoch from coalesce(p_consumer.backoff_base, '1 s'))::float8
                * case p_consumer.backoff when 'linear' then p_deliver_count when 'exponential' then power(2, least(p_deliver_count - 1, 60)) else 1 end));
    end if;
    -- a lease may have ended long ago; the same is now for all that failed at once
    return case when v_delay > '0' and p_failure.happened_at + v_delay > statement_timestamp() then p_failure.happened_at + v_delay end;
end $$;
