-- What is done with the checkpoint of a Spark query from outside of it, or at its end.

-- Acknowledges a reader's claims up to one that its query has finished: up to an offset that is in Spark's commit log.
-- Returns how many messages were acknowledged, and how many of the same claims other claimers have or had.
-- Safe to repeat, and beside the query itself. Errors: PQ002, PQ003, PQ005, PQ007, PQ010. Locks: the reader, its claims.
create or replace function pgqueue.reader_ack(p_reader uuid, p_consumer_id int, p_start_claim bigint) returns table (acked bigint, lost bigint)
language plpgsql
as $$
declare
    v_reader pgqueue.readers;
    v_acked  record;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_offset(p_reader, p_start_claim, 0);
    perform pgqueue._lock_reader(p_reader);
    perform from pgqueue.claims c where c.reader = p_reader order by c.claim_id for update;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_start_claim);
    v_acked := pgqueue._acknowledge_upto(p_reader, p_start_claim);
    acked := v_acked.o_acked;
    lost := v_acked.o_lost;
    if v_acked.o_any then
        perform pgqueue._commit_durably();
        update pgqueue.readers r set acked_claim = p_start_claim, lost = r.lost + v_acked.o_lost, used_at = clock_timestamp() where reader = p_reader;
    end if;
    return next;
end $$;

-- Ends a reader's claims up to one, with what they still have. Returns whether there were any, how many messages they had, and how many they had
-- lost before. Needs the locks of the reader and its claims.
create or replace function pgqueue._acknowledge_upto(p_reader uuid, p_claim bigint, out o_any boolean, out o_acked bigint, out o_lost bigint)
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    o_any := false;
    o_acked := 0;
    o_lost := 0;
    for v_claim in select * from pgqueue.claims where reader = p_reader and claim_id <= p_claim order by claim_id loop
        o_any := true;
        o_acked := o_acked + v_claim.remaining;
        o_lost := o_lost + v_claim.message_count - v_claim.settled - v_claim.remaining;
        perform pgqueue._acknowledge(v_claim);
    end loop;
end $$;
