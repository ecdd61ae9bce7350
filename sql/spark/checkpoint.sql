-- Functions for the checkpoint of a Spark query, called from outside the query or at its end.

-- Acknowledges what a Spark query has finished, up to an offset of Spark's commit log. These are the claims of the
-- checkpoint reader up to p_start_claim. Returns how many messages were acknowledged, and how many messages of these
-- claims were lost to other claims. Safe to repeat, also while the query runs. Errors: PQ002, PQ003, PQ005, PQ007,
-- PQ010. Locks: the reader, its claims.
create or replace function pgqueue.reader_ack(p_reader uuid, p_consumer_id int, p_start_claim bigint)
returns table (acked bigint, lost bigint)
language plpgsql as $$
declare
    v_acked record;
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_offset(p_reader, p_start_claim, 0);
    perform _pgqueue.consumer_of(p_consumer_id);
    perform _pgqueue.lock_reader(p_reader);
    perform _pgqueue.check_reader(p_reader, p_consumer_id, p_start_claim, p_start_claim);
    perform _pgqueue.lock_claims_of(p_reader);  -- waits for calls that settle a part of them
    v_acked := _pgqueue.acknowledge_upto(p_reader, p_start_claim);
    acked := v_acked.o_acked;
    lost := v_acked.o_lost;
    if v_acked.o_any then
        perform _pgqueue.commit_durably();
        update pgqueue.readers r
        set acked_claim = p_start_claim, lost = r.lost + v_acked.o_lost, used_at = clock_timestamp()
        where reader = p_reader;
    end if;
    return next;
end $$;

-- Returns the state of a checkpoint reader, compared with its checkpoint; no row for an unknown reader.
--   p_finished  the last claim that its query has finished
--   p_last      the last claim in its checkpoint
-- Returns the stream, consumer and query of the reader; its last acknowledged claim; how many messages it holds that
-- its query has finished, that are in the unfinished micro-batch, and that are in no checkpoint; when its last lease
-- ends; and when it was last active. Locks nothing.
create or replace function pgqueue.reader_state(p_reader uuid, p_finished bigint, p_last bigint)
returns table (stream text, consumer text, consumer_id int, query_id text, acked_claim bigint, finished bigint,
               unfinished bigint, unlogged bigint, lease_until timestamptz, seen_at timestamptz)
language sql stable as $$
    select c.stream_name, c.name, c.consumer_id, r.query_id, r.acked_claim,
           coalesce(sum(_pgqueue.remaining(l)) filter (where l.claim_id <= p_finished), 0)::bigint,
           coalesce(sum(_pgqueue.remaining(l)) filter (where l.claim_id > p_finished and l.claim_id <= p_last),
                    0)::bigint,
           coalesce(sum(_pgqueue.remaining(l)) filter (where l.claim_id > p_last), 0)::bigint,
           max(h.lease_until), greatest(r.used_at, max(h.lease_until - h.visibility_timeout))
    from pgqueue.readers r
    join pgqueue.consumers c using (consumer_id)
    left join pgqueue.reader_claims l using (reader)
    left join lateral _pgqueue.bundles_of(l.head, l.token) h on h.head is null
    where r.reader = p_reader group by c.consumer_id, r.reader
$$;

-- Returns the messages that a Spark query holds, and deletes its checkpoint reader. First it acknowledges what the
-- query has finished. The checkpoint cannot be used any more. The returned messages do not count as delivered, and can
-- be claimed at once. Returns how many messages were acknowledged, and how many were returned. Errors: PQ002, PQ003,
-- PQ005, PQ007, PQ010; 55006 while its query runs: it holds messages, and has extended its leases recently. Locks: the
-- reader, the consumer, its claims.
create or replace function pgqueue.reader_release(p_reader uuid, p_consumer_id int, p_start_claim bigint)
returns table (acked bigint, released bigint)
language plpgsql as $$
declare
    v_consumer pgqueue.consumers;
    v_beat     record;
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_offset(p_reader, p_start_claim, 0);
    v_consumer := _pgqueue.own_reader(p_reader, p_consumer_id);
    perform _pgqueue.check_reader(p_reader, p_consumer_id, p_start_claim, p_start_claim);
    select max(h.lease_until - h.visibility_timeout) as at, max(h.visibility_timeout) / 3 + interval '5 s' as every
    into v_beat
    from pgqueue.reader_claims c cross join lateral _pgqueue.bundles_of(c.head, c.token) h where c.reader = p_reader;
    if v_beat.at > clock_timestamp() - v_beat.every then
        raise exception 'the query of this checkpoint is running, or stopped recently: it extended its leases % ago',
                        date_trunc('second', clock_timestamp() - v_beat.at)
            using errcode = '55006',
                  hint = format('Stop it, and try again after %s.', (v_beat.at + v_beat.every)::timestamptz(0));
    end if;
    acked := (_pgqueue.acknowledge_upto(p_reader, p_start_claim)).o_acked;
    released := _pgqueue.delete_reader(v_consumer, p_reader, 'not_failed', null);
    return next;
end $$;

-- Creates a checkpoint reader for a copy of a checkpoint, with the position of the original. From then on the two share
-- the consumer's messages. The original keeps the messages that it holds.
--   p_start_claim, p_start_messages  the offset that its query has finished
-- Returns the new reader. Errors: PQ002, PQ003, PQ005, PQ010. Locks: the reader.
create or replace function pgqueue.reader_fork(p_reader uuid, p_consumer_id int, p_start_claim bigint,
                                               p_start_messages bigint) returns uuid
language plpgsql as $$
declare
    v_fork uuid := gen_random_uuid();
begin
    perform _pgqueue.check_offset(p_reader, p_start_claim, p_start_messages);
    perform _pgqueue.consumer_of(p_consumer_id);
    perform _pgqueue.lock_reader(p_reader);
    perform _pgqueue.check_reader(p_reader, p_consumer_id, p_start_claim, p_start_claim);
    insert into pgqueue.readers (reader, consumer_id, acked_claim, last_claim, messages)
    values (v_fork, p_consumer_id, p_start_claim, p_start_claim, p_start_messages);
    return v_fork;
end $$;
