-- Claiming and receiving.

-- Claims at most p_max messages for a consumer; the payloads are not read. Bounded: a claim takes some 10,000 new
-- publications at most, or 1,000,000 of which nothing is for this consumer.
--   p_visibility_timeout  null: the consumer's
--   p_ack                 a claim to acknowledge first, as ack does, in the same transaction; null: none
-- Returns the claim and its number of messages, or no row when there is nothing.
-- Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007. Locks, to the end of the transaction: those of ack; the runs it takes; unless the next run is
-- all that it needs the consumer's lock, except that it makes do with what is ready while another claimer has it (not so with ordering=stream).
create or replace function pgqueue.claim(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                         p_ack bigint default null)
returns table (claim_id bigint, message_count bigint)
language plpgsql
as $$
declare
    v_claim pgqueue.claimed := pgqueue._claim(p_stream, p_consumer, p_max, p_visibility_timeout, p_ack);
begin
    if v_claim.message_count > 0 then
        claim_id := v_claim.claim_id;
        message_count := v_claim.message_count;
        return next;
    end if;
end $$;

-- Claims at most p_max messages and reads them, in the order of delivery.
--   p_visibility_timeout, p_ack  as in claim
-- Returns a row per message; the claim is the same in all of them. saved: what defer saved with it. Errors and locks: as claim.
create or replace function pgqueue.receive(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                           p_ack bigint default null)
returns setof pgqueue.received
language plpgsql
as $$
declare
    v_claim pgqueue.claimed := pgqueue._claim(p_stream, p_consumer, p_max, p_visibility_timeout, p_ack);
begin
    if v_claim.message_count > 0 then
        return query execute format('select * from pgqueue._payloads_%s($1)', v_claim.stream_id) using v_claim.claim_id;
    end if;
end $$;
