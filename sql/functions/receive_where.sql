-- Receiving with a condition: the claim gets ready messages that pass it, and leaves the others as they are.

-- Claims and reads messages that pass a condition, and leaves the others as they are.
-- The claim gets at most p_max messages: those that come first by priority and arrival. For the others this was no
-- delivery. The claim looks at the first p_look ready messages; messages behind these are found once the first ones are
-- gone.
--   p_where  a jsonpath on {key, headers, data}, as that of a consumer with a filter
--   p_look   messages to look at, at most: 1 to 1,000,000
--   p_visibility_timeout, p_ack  as in claim
-- Returns as receive. Errors: PQ001, PQ002, PQ003, PQ006 for a group, an ordered consumer, or one with limits of keys,
-- PQ007. Locks, to the end of the transaction: those of ack; the runs of claimed messages; the consumer, if no ready
-- message passed, or something was due.
create or replace function pgqueue.receive_where(p_stream text, p_consumer text, p_where jsonpath, p_max int default 1,
                                                 p_visibility_timeout interval default null, p_look int default 10000,
                                                 p_ack bigint default null) returns setof pgqueue.received
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_claim_id bigint := _pgqueue.new_claim_id();
    v_count    bigint;
begin
    perform _pgqueue.check_number('p_look', p_look, 1, 1000000);
    if p_where is null then
        raise exception 'p_where is a jsonpath such as $.data.total > 100, not null'
            using errcode = 'PQ003', column = 'p_where', hint = 'receive has no condition.';
    end if;
    perform _pgqueue.check_condition(p_where);
    v_consumer := _pgqueue.begin_claim('where', p_max, p_visibility_timeout, p_stream, p_consumer);
    if v_consumer.paused then
        perform _pgqueue.ack(p_ack) where p_ack is not null;
        return;
    end if;
    v_count := _pgqueue.claim_where(v_consumer, v_claim_id, p_where, p_max, p_look, p_ack);
    if v_count > 0 then
        perform _pgqueue.record_claim(_pgqueue.new_claim(v_consumer, v_claim_id, v_count));
        return query select * from _pgqueue.payloads(v_consumer.stream_id, v_claim_id);
    end if;
end $$;

-- Claims messages that pass a condition: ready ones, without the consumer's lock, if nothing else has to be done first.
-- If none of them passes, the claim goes on with the consumer's lock, as claim_in_turn() does, and finds messages that
-- are due or new, too.
--   p_ack  a claim to acknowledge; null: none
-- Returns how many messages it claimed.
create or replace function _pgqueue.claim_where(p_consumer pgqueue.consumers, p_claim_id bigint, p_where jsonpath,
                                                p_max int, p_look int, p_ack bigint) returns bigint
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_look   record;
    v_slots  record;
    v_count  bigint := 0;
    v_left   int := p_look;
    v_ended  boolean := false;
    v_seen   int8multirange := '{}';  -- messages that were looked at in vain
begin
    perform _pgqueue.lock_claims(array[p_ack]) where p_ack is not null;  -- in the order of locks
    if _pgqueue.is_calm(p_consumer, v_cursor) then
        begin
            if _pgqueue.has_slots(v_cursor) then
                v_slots := _pgqueue.claim_matching_slots(p_consumer.stream_id, v_cursor, p_claim_id, p_where, p_max,
                                                         p_look);
                v_count := v_slots.o_count;
                v_left := p_look - v_slots.o_looked;
                v_ended := v_left = 0;
            end if;
            if v_count < p_max and v_left > 0 then
                v_look := _pgqueue.serve_matching(p_consumer, v_cursor, p_claim_id, p_where, p_max - v_count, v_left,
                                                  v_seen, false);
                v_count := v_count + (v_look.o_served).message_count;
                v_ended := (v_look.o_served).ended;
            end if;
            if v_count > 0 or v_ended then
                perform _pgqueue.ack(p_ack) where p_ack is not null;
                return v_count;
            end if;
            v_seen := coalesce(v_look.p_seen, '{}');
            raise exception using errcode = 'PQ099';
        exception when sqlstate 'PQ099' then
            null;  -- unlocks runs of other claimers that it looked at, before it waits for the lock: as claim() does
        end;
    end if;
    return (_pgqueue.claim_in_turn(p_consumer, p_claim_id, p_max, 0, p_ack, p_where, p_look, v_seen)).message_count;
end $$;

-- Whether a claim with a condition may look at ready messages at once: no lease may have ended, nothing is due or more
-- urgent, and no limit has to be kept.
create or replace function _pgqueue.is_calm(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns boolean
language plpgsql
as $$
begin
    return not _pgqueue.claims_in_turn(p_consumer) and p_cursor.scan_lanes_from is null
        and (not _pgqueue.has_slots(p_cursor) or _pgqueue.slots_are_next(p_consumer.stream_id, p_cursor))
        and _pgqueue.need_not_look(p_cursor.lease_probe)
        and not _pgqueue.is_due(p_cursor.consumer_id, p_cursor.due_from)
        and (not _pgqueue.has_new(p_consumer.stream_id, p_cursor, false)
             or _pgqueue.can_wait(p_consumer.stream_id, p_cursor));
end $$;
