-- Receiving with a condition.

-- Claims and reads messages that match a condition, and leaves the others as they are.
-- The claim gets at most p_max messages: the first by priority and arrival. The others do not count as delivered. The
-- claim examines the first p_look ready messages; messages behind these are found once the first ones are settled.
--   p_where  a jsonpath on {key, headers, data}, as for a consumer with a filter
--   p_look   the maximum number of messages to examine: 1 to 1,000,000
--   p_visibility_timeout, p_ack  as in claim
-- Returns as receive. Errors: PQ001, PQ002, PQ003, PQ006 for a group, an ordered consumer, or one with limits of keys,
-- PQ007. Locks, until the end of the transaction: those of ack; the claimed messages; the consumer, if no free message
-- passes, or work is due.
create or replace function pgqueue.receive_where(p_stream text, p_consumer text, p_where jsonpath, p_max int default 1,
                                                 p_visibility_timeout interval default null, p_look int default 10000,
                                                 p_ack bigint default null) returns setof pgqueue.received
language plpgsql as $$
declare
    v_consumer pgqueue.consumers;
    v_claim    pgqueue.claimed;
begin
    perform _pgqueue.check_number('p_look', p_look, 1, 1000000);
    if p_where is null then
        raise exception 'p_where must be a jsonpath such as $.data.total > 100, not null'
            using errcode = 'PQ003', column = 'p_where', hint = 'To receive without a condition, use receive.';
    end if;
    perform _pgqueue.check_condition(p_where);
    v_consumer := _pgqueue.begin_claim('where', p_max, p_visibility_timeout, p_stream, p_consumer);
    if v_consumer.paused then
        perform pgqueue.ack(p_ack) where p_ack is not null;
        return;
    end if;
    v_claim := _pgqueue.claim_where(v_consumer, p_where, p_max, p_look, p_ack);
    if v_claim.claim_id is not null then
        return query select * from _pgqueue.payloads(v_consumer.stream_id, v_claim.claim_id, v_claim.seqs,
                                                     v_claim.priority, v_claim.bundles);
    end if;
end $$;

-- Claims free messages that pass a condition, without the consumer's lock, if nothing has to be done first. If none
-- passes, claims with the lock, which also finds messages that are due or new. Returns the claim; its id is null if no
-- message passes.
--   p_ack  a claim to acknowledge; null: none
create or replace function _pgqueue.claim_where(p_consumer pgqueue.consumers, p_where jsonpath, p_max int, p_look int,
                                                p_ack bigint) returns pgqueue.claimed
language plpgsql as $$
declare
    v_cursor pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_claim  pgqueue.claimed;
begin
    if not _pgqueue.always_locks(p_consumer) and _pgqueue.not_yet((v_cursor.hints).idle_until)
       and not _pgqueue.has_new(p_consumer.stream_id, v_cursor, false) then
        begin
            v_claim := (_pgqueue.collect_matching(p_consumer, v_cursor.hints, p_where, p_max, p_look)).o_claimed;
            if v_claim.claim_id is null then
                raise exception using errcode = 'PQ099';
            end if;
            perform pgqueue.ack(p_ack) where p_ack is not null;
            return v_claim;
        exception when sqlstate 'PQ099' then
            null;  -- releases the locks of examined bundles before it waits for the consumer's
        end;
    end if;
    return _pgqueue.claim_locked(p_consumer, p_max, p_ack, p_where, p_look);
end $$;
