-- Claiming and receiving: the calls of every worker.

-- Claims at most p_max messages for a consumer, without reading their payloads.
-- A claim is bounded: it takes about 10,000 new publications at most, or 1,000,000 if none has a message for this
-- consumer.
--   p_visibility_timeout  null: the consumer's
--   p_ack                 a claim to acknowledge first, as ack does, in the same transaction; null: none
-- Returns the claim and its number of messages; no row if there is nothing that no other session is claiming. Errors:
-- PQ001, PQ002, PQ003, PQ006 for a group, PQ007. Locks, until the end of the transaction: those of ack; the claimed
-- messages; and the consumer, unless a free bundle has the size of the claim, or the claim takes new messages ahead of
-- the cursor, or free messages beside another claim that has the consumer's lock. If that lock is free, some claims
-- take it to cut bundles for later claims, or to move the cursor. A claim that needs the lock waits for it; if one
-- transaction keeps the lock for a second, the claim gets nothing. With per_key_interval, per_key_latest,
-- max_in_flight, rate_limit, or a backlog that may be full, all claims need it.
create or replace function pgqueue.claim(p_stream text, p_consumer text, p_max int default 1,
                                         p_visibility_timeout interval default null, p_ack bigint default null)
returns table (claim_id bigint, message_count bigint)
language plpgsql as $$
declare
    v_claim pgqueue.claimed := _pgqueue.claim(p_stream, p_consumer, p_max, p_visibility_timeout, p_ack);
begin
    if v_claim.message_count > 0 then
        claim_id := v_claim.claim_id;
        message_count := v_claim.message_count;
        return next;
    end if;
end $$;

-- Claims at most p_max messages for a consumer and reads them, in the order of delivery.
--   p_visibility_timeout, p_ack  as in claim
-- Returns a row for each message, all with the same claim; saved is what defer saved with the message. Messages that
-- are no longer stored, as after restoring a dump that was made during maintain(), become dead letters; if a claim has
-- no others, the call returns nothing. Errors and locks: as claim.
create or replace function pgqueue.receive(p_stream text, p_consumer text, p_max int default 1,
                                           p_visibility_timeout interval default null, p_ack bigint default null)
returns setof pgqueue.received language plpgsql as $$
declare
    v_claim pgqueue.claimed := _pgqueue.claim(p_stream, p_consumer, p_max, p_visibility_timeout, p_ack);
    v_row   pgqueue.received;
begin
    if v_claim.message_count = 1 then
        v_row := _pgqueue.payload(v_claim.stream_id, v_claim.claim_id, lower(v_claim.seqs), v_claim.priority,
                                  v_claim.deliver_count, v_claim.saved);
        if v_row.seq is not null then
            return next v_row;
            return;
        end if;
    elsif v_claim.message_count > 1 then
        return query select * from _pgqueue.payloads(v_claim.stream_id, v_claim.claim_id, v_claim.seqs,
                                                     v_claim.priority, v_claim.bundles);
        if found then
            return;
        end if;
    else
        return;
    end if;
    raise warning 'dead-lettered % for consumer % of stream %, no longer stored',
        _pgqueue.counted(v_claim.message_count, 'message'), quote_literal(p_consumer), quote_literal(p_stream);
    perform _pgqueue.settle(v_claim.claim_id, null, true, 'not stored', null);
    perform _pgqueue.wake(v_claim.stream_id);  -- sessions that wait can claim the next messages
end $$;
