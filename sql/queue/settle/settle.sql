-- Settling: messages leave a live claim for good. All calls that settle use this file, except those that return
-- messages (queue/settle/return.sql) and Spark's writes (spark/actions.sql).

-- Acknowledges or dead-letters messages of a live claim. Returns how many messages these were.
--   p_set      null: all
--   p_details  the details of dead letters; otherwise the result
create or replace function _pgqueue.settle(p_claim_id bigint, p_set int8multirange, p_dead boolean, p_reason text,
                                           p_details jsonb) returns bigint
language plpgsql as $$
declare
    v_bundles pgqueue.consumer_messages[];
begin
    perform _pgqueue.check_isolation();
    v_bundles := _pgqueue.lock_claim(p_claim_id, false);
    if v_bundles is null then
        return 0;
    end if;
    return _pgqueue.finish(v_bundles, p_claim_id, p_set, p_dead, p_reason, p_details);
end $$;

-- Deletes messages from the bundles of a claim, and stores them as dead letters if p_dead. Returns how many messages
-- these were. Needs the claim's lock.
create or replace function _pgqueue.finish(p_bundles pgqueue.consumer_messages[], p_claim_id bigint,
                                           p_set int8multirange, p_dead boolean, p_reason text, p_details jsonb)
returns bigint language plpgsql as $$
declare
    v_taken  pgqueue.consumer_messages[] := _pgqueue.remove_messages(p_bundles, p_set);
    v_bundle pgqueue.consumer_messages;
begin
    if p_dead then
        foreach v_bundle in array v_taken loop
            continue when v_bundle.message_count = 0;
            v_bundle.deliver_count := _pgqueue.one_more(v_bundle.deliver_count);
            perform _pgqueue.dead_letter(v_bundle, v_bundle.seqs, coalesce(p_reason, 'rejected'), p_details, p_claim_id,
                                         v_bundle.owner);
        end loop;
    elsif p_bundles[1].token & 1 = 0 then
        perform _pgqueue.record_done(p_bundles[1], p_claim_id, _pgqueue.seqs_of(v_taken), _pgqueue.count_of(v_taken),
                                     (select max(_pgqueue.one_more(b.deliver_count)) from unnest(v_taken) b),
                                     p_details);
    end if;
    return _pgqueue.count_of(v_taken);
end $$;

-- Acknowledges a whole claim, for ack and claim, which have checked the isolation level. Returns how many messages it
-- had.
create or replace function _pgqueue.ack(p_claim_id bigint, p_result jsonb default null) returns bigint
language plpgsql as $$
declare
    v_count   bigint;
    v_deleted pgqueue.consumer_messages[];
begin
    if p_claim_id & 1 = 1 then  -- the acknowledgement records nothing
        delete from pgqueue.consumer_messages m  -- lock: bundle
        where bundle_no & 1048575 = _pgqueue.number_in(p_claim_id) and token = _pgqueue.token_in(p_claim_id)
        returning message_count, case when members is not null or lane = _pgqueue.lane_long() then array[m] end
        into v_count, v_deleted;
        if v_deleted is not null then
            with deleted as (
                delete from pgqueue.consumer_messages m
                where bundle_no & 1048575 = any (array(select n & 1048575 from unnest(v_deleted[1].members) n))
                  and bundle_no = any (v_deleted[1].members) and token = _pgqueue.token_in(p_claim_id)
                returning message_count, m as bundle
            )
            select v_count + coalesce(sum(message_count), 0), v_deleted || array_agg(bundle) into v_count, v_deleted
            from deleted;
            perform _pgqueue.record_freed(v_deleted);
        end if;
        if v_count is not null then
            return v_count;
        end if;
    end if;
    return _pgqueue.settle(p_claim_id, null, false, null, p_result);
end $$;
