-- Claiming and receiving.

-- Claims at most p_max messages for a consumer; the payloads are not read. Bounded: a claim takes some 10,000 new
-- publications at most, or 1,000,000 of which nothing is for this consumer.
--   p_visibility_timeout  null: the consumer's
--   p_ack                 a claim to acknowledge first, as ack does, in the same transaction; null: none
-- Returns the claim and its number of messages, or no row when there is nothing.
-- Errors: PQ001, PQ002, PQ003, PQ007. Locks, to the end of the transaction: those of ack; the runs it takes; unless the next run is
-- all that it needs the consumer's lock, except that it makes do with what is ready while another claimer has it (not so with ordering=stream).
create or replace function pgqueue.claim(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                         p_ack bigint default null)
returns table (claim_id bigint, message_count bigint)
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._check_isolation();
    end if;
    if p_max is null or p_max < 1 then
        raise exception 'p_max is at least 1, not %', coalesce(p_max::text, 'null') using errcode = 'PQ003', column = 'p_max';
    end if;
    if p_visibility_timeout is not null then
        perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    end if;
    if p_ack is not null then
        perform pgqueue._ack(p_ack);
    end if;
    begin
        select o_claim_id, o_count into claim_id, message_count from pgqueue._claim_next_run(p_stream, p_consumer, p_max, p_visibility_timeout);
        if claim_id is null then
            v_consumer := pgqueue._consumer(p_stream, p_consumer);
            message_count := 0;
            if v_consumer.ordering <> 'stream' and not pgqueue._try_lock_consumer(v_consumer.consumer_id) then
                -- another claimer is at it: what is ready will do
                claim_id := pgqueue._new_claim_id();
                message_count := pgqueue._serve(pgqueue._cursor(v_consumer.consumer_id), claim_id, p_max, case when v_consumer.ordering = 'none' then p_max end);
                if message_count = 0 then
                    raise exception using errcode = 'PQ099';
                end if;
                perform pgqueue._open_claim(v_consumer, claim_id, message_count, p_visibility_timeout, null);
            end if;
        end if;
    exception when sqlstate 'PQ099' then  -- (PQ000 would stand for all of class PQ)
        null;  -- unlocks the runs that it looked at and that were somebody else's, before it waits for the lock
    end;
    if message_count = 0 then
        select o_claim_id, o_count into claim_id, message_count from pgqueue._claim_in_turn(v_consumer, p_max, p_visibility_timeout);
    end if;
    if message_count > 0 then
        return next;
    end if;
end $$;

-- Claims at most p_max messages and reads them, in the order of delivery.
--   p_visibility_timeout, p_ack  as in claim
-- Returns a row per message; the claim is the same in all of them. Errors and locks: as claim.
create or replace function pgqueue.receive(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                           p_ack bigint default null)
returns table (claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int, deliver_count int,
               inserted_at timestamptz)
language plpgsql
as $$
declare
    v_claim_id bigint;
    v_stream   int;
begin
    select c.claim_id into v_claim_id from pgqueue.claim(p_stream, p_consumer, p_max, p_visibility_timeout, p_ack) c;
    if not found then
        return;
    end if;
    v_stream := (select stream_id from pgqueue.streams where name = p_stream);
    -- by name of the partition: a plan over the parent would lock all streams' partitions
    return query execute format($q$
        select r.claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, r.priority, r.deliver_count, m.inserted_at
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral (select * from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)) m
        where r.claim_id = $1 and r.state = 'claimed'
        order by r.lane, r.arrival_no, m.seq $q$, v_stream) using v_claim_id;
end $$;
