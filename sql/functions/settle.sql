-- Settling: acknowledge, return, extend, dead-letter. Each is fenced by the live claim: on a claim that ended it changes nothing,
-- answers 0 and warns.
--
-- A claim whose lease is over is live until another claimer released it: the owner that comes back first keeps it.

-- Acknowledges a claim, or the messages of it that are given. Numbers that it does not hold are passed over.
-- Returns how many messages that were. Errors: PQ003, PQ007. Locks: the claim.
create or replace function pgqueue.ack(p_claim_id bigint, p_seqs bigint[] default null) returns bigint
language plpgsql
as $$
begin
    return case when p_seqs is null then pgqueue._ack(p_claim_id)
                else pgqueue._settle(p_claim_id, pgqueue._set_of(p_seqs), false, null, null) end;
end $$;

-- Returns a claim, or the messages of it that are given, to be delivered again. A message that was delivered
-- max_deliver_count times is dead-lettered instead. In an ordered consumer, the later messages of the same keys in the
-- claim go back too, without counting as failed.
--   p_delay   not before then; at least 0
--   p_reason  kept as the message's last error
-- Returns how many messages left the claim. Errors: PQ003, PQ007. Locks: the claim, then the consumer.
create or replace function pgqueue.nack(p_claim_id bigint, p_seqs bigint[] default null, p_delay interval default '0', p_reason text default null)
returns bigint
language plpgsql
as $$
declare
    v_claim    pgqueue.claims;
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
begin
    perform pgqueue._check_isolation();
    if p_delay is null or p_delay < interval '0' or p_delay > pgqueue._max_interval() then
        raise exception 'p_delay is an interval from 0 to 10 years, not %', coalesce(quote_literal(p_delay), 'null')
            using errcode = 'PQ003', column = 'p_delay';
    end if;
    v_claim := pgqueue._lock_claim(p_claim_id, true);
    if v_claim.claim_id is null then
        return 0;
    end if;
    select * into v_consumer from pgqueue.consumers where consumer_id = v_claim.consumer_id;
    v_stored := pgqueue._cursor(v_claim.consumer_id);
    v_cursor := pgqueue._return(v_consumer, v_stored, v_claim, pgqueue._set_of(p_seqs), p_delay, p_reason);
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    return v_claim.remaining - coalesce((select remaining from pgqueue.claims where claim_id = p_claim_id), 0);
end $$;

-- Holds a claim longer: its lease ends p_by from now, or when it did if that is later; null: its visibility timeout from now.
-- Returns how many messages it holds. Errors: PQ003, PQ007. Locks: the claim.
create or replace function pgqueue.extend(p_claim_id bigint, p_by interval default null) returns bigint
language plpgsql
as $$
declare
    v_count bigint;
begin
    perform pgqueue._check_isolation();
    if p_by is not null then
        perform pgqueue._check_timeout('p_by', p_by);
    end if;
    update pgqueue.claims set lease_until = greatest(lease_until, clock_timestamp() + coalesce(p_by, visibility_timeout))
    where claim_id = p_claim_id and live
    returning remaining into v_count;
    if not found then
        perform pgqueue._warn_not_live(p_claim_id);
    end if;
    return coalesce(v_count, 0);
end $$;

-- Dead-letters a claim, or the messages of it that are given.
-- Returns how many messages that were. Errors: PQ003, PQ007. Locks: as ack.
create or replace function pgqueue.dead_letter(p_claim_id bigint, p_seqs bigint[] default null, p_reason text default null, p_details jsonb default null)
returns bigint
language plpgsql
as $$
begin
    return pgqueue._settle(p_claim_id, pgqueue._set_of(p_seqs), true, p_reason, p_details);
end $$;
