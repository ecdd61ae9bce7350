-- Settling: acknowledge, return, defer, extend and dead-letter; and retry. Only the owner of a live claim can settle
-- it: for a claim that has ended, a call changes nothing, returns 0 and warns. (retry and is_suspected need no live
-- claim.) Claims of checkpoint readers are settled only by the calls in spark/.
--
-- A claim whose lease is over is live until another claimer has released it: an owner that comes first keeps its claim.

-- Acknowledges a claim, or the given messages of it: they are done.
-- Numbers that the claim does not hold are ignored.
--   p_result  stored in the history of the messages, with keep_history
-- Returns how many messages it acknowledged. Errors: PQ003, PQ007. Locks: the claim.
create or replace function pgqueue.ack(p_claim_id bigint, p_seqs bigint[] default null, p_result jsonb default null)
returns bigint language plpgsql as $$
declare
    v_count   bigint;
    v_deleted pgqueue.consumer_messages[];
begin
    -- a whole claim, whose acknowledgement records nothing, as nearly all
    if p_seqs is null and p_claim_id & 1 = 1 and current_setting('transaction_isolation') = 'read committed' then
        delete from pgqueue.consumer_messages m  -- lock: bundle
        where _pgqueue.is_head(bundle_no, token, head, _pgqueue.number_in(p_claim_id), _pgqueue.token_in(p_claim_id))
        returning message_count, case when members is not null or lane = _pgqueue.lane_long() then array[m] end
        into v_count, v_deleted;
        if v_deleted is not null then
            if v_deleted[1].members is not null then
                v_deleted := v_deleted || _pgqueue.lock_members(v_deleted[1].members, _pgqueue.token_in(p_claim_id));
                delete from pgqueue.consumer_messages
                where ctid = any (_pgqueue.tids(v_deleted[1].members)) and token = _pgqueue.token_in(p_claim_id);
                v_count := _pgqueue.count_of(v_deleted);
            end if;
            perform _pgqueue.record_freed(v_deleted);
        end if;
        if v_count is not null then
            return v_count;
        end if;
    end if;
    return _pgqueue.settle(p_claim_id, _pgqueue.set_of(p_seqs), false, null, p_result);
end $$;

-- Returns a claim, or the given messages of it, for another delivery: they failed.
-- In an ordered consumer, the later messages of the same keys in the claim are returned too, and do not count as
-- failed. A message that was delivered max_deliver_count times is dead-lettered instead, if it is given, or is the only
-- one in its claim. If a whole claim of several messages fails for the second time, the claim is bisected: its messages
-- come in smaller claims until the failing one is alone.
--   p_delay    not before then; at least 0. Null: according to the consumer's backoff
--   p_reason   stored as the last error of the messages
--   p_backoff  true: if p_delay is null and backoff is constant without a base, use an exponential backoff from 1 s
-- Returns how many messages left the claim. Errors: PQ003, PQ007. Locks: the consumer, then the claim.
create or replace function pgqueue.nack(p_claim_id bigint, p_seqs bigint[] default null, p_delay interval default null,
                                        p_reason text default null, p_backoff boolean default false) returns bigint
language plpgsql as $$
begin
    perform _pgqueue.check_isolation();
    if p_delay < interval '0' or p_delay > _pgqueue.max_interval() then
        raise exception 'p_delay must be null or an interval from 0 to 10 years, not %', quote_literal(p_delay)
            using errcode = 'PQ003', column = 'p_delay';
    end if;
    return _pgqueue.give_back(p_claim_id, _pgqueue.set_of(p_seqs),
                              case when p_seqs is null then 'one_failed' else 'failed' end, p_delay,
                              jsonb_build_object('error', p_reason), p_backoff);
end $$;

-- Defers a claim, or the given messages of it, without a failure: they are delivered later.
-- The delivery does not count. In an ordered consumer, the later messages of the same keys in the claim are returned
-- too, and wait for the given ones.
--   p_delay  not before then; at least 0
--   p_state  delivered with the messages, in the column saved of receive, at each later delivery; null: keep an earlier
--            state; a JSON null: no state
-- Returns how many messages left the claim. Errors: PQ003, PQ007. Locks: the consumer, then the claim.
create or replace function pgqueue.defer(p_claim_id bigint, p_seqs bigint[] default null, p_delay interval default '0',
                                         p_state jsonb default null) returns bigint
language plpgsql as $$
begin
    perform _pgqueue.check_isolation();
    if (p_delay between interval '0' and _pgqueue.max_interval()) is not true then
        raise exception 'p_delay must be an interval from 0 to 10 years, not %',
                        coalesce(quote_literal(p_delay), 'null')
            using errcode = 'PQ003', column = 'p_delay';
    end if;
    return _pgqueue.give_back(p_claim_id, _pgqueue.set_of(p_seqs), 'not_failed', p_delay,
                              case when p_state is not null then jsonb_build_object('saved', p_state) end);
end $$;

-- Returns whether a claim holds messages that may kill their worker.
-- Earlier claims of these messages failed, or their leases ended. A worker with several claims should return the others
-- while it works on such a claim; otherwise these also look as if they had killed the worker. False for a claim that is
-- not live. Locks nothing.
create or replace function pgqueue.is_suspected(p_claim_id bigint) returns boolean
language plpgsql stable as $$
begin
    return exists (select from _pgqueue.bundles_of(_pgqueue.number_in(p_claim_id), _pgqueue.token_in(p_claim_id))
                   where note ? 'at_most');
end $$;

-- Returns messages of a claim, for nack and defer.
--   p_set, p_how, p_delay, p_note  as in return()
--   p_backoff                      as in nack
-- Returns how many messages left the claim. Locks: the consumer, then the claim.
create or replace function _pgqueue.give_back(p_claim_id bigint, p_set int8multirange, p_how text, p_delay interval,
                                              p_note jsonb, p_backoff boolean default false) returns bigint
language plpgsql as $$
declare
    v_bundles  pgqueue.consumer_messages[] := _pgqueue.lock_claim(p_claim_id, true);
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_before   bigint := _pgqueue.count_of(v_bundles);
begin
    if v_bundles is null then
        return 0;
    end if;
    select * into v_consumer from pgqueue.consumers where consumer_id = v_bundles[1].consumer_id;
    if p_backoff and v_consumer.backoff = 'constant' and v_consumer.backoff_base is null then
        v_consumer.backoff := 'exponential';
    end if;
    v_stored := _pgqueue.cursor(v_consumer.consumer_id);
    v_cursor := _pgqueue.return(v_consumer, v_stored, v_bundles, p_set,
                                case when p_how = 'one_failed' and v_before = 1 then 'failed' else p_how end,
                                clock_timestamp(), p_delay, p_note);
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(v_consumer, v_cursor), true);
    if p_set is null then
        return v_before;
    end if;
    return v_before - (select coalesce(sum(message_count), 0)
                       from _pgqueue.bundles_of(v_bundles[1].bundle_no, v_bundles[1].token));
end $$;

-- Ends the delays of failed messages and the bisection of their claims, for example after an outage.
-- Claimed messages are not changed.
--   p_seqs  these messages, by key also those that wait in a bundle with them; null: all that were delivered before
-- Returns how many messages it changed; messages that another session is claiming are skipped. Errors: PQ001, PQ002,
-- PQ003, PQ007. Locks: the consumer.
create or replace function pgqueue.retry(p_stream text, p_consumer text, p_seqs bigint[] default null) returns bigint
language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_set      int8multirange := _pgqueue.set_of(p_seqs);
    v_now      timestamptz := clock_timestamp();
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_hints    pgqueue.claim_hints;
    v_bundle   pgqueue.consumer_messages;
    v_part     int8multirange;
    v_count    bigint := 0;
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.lock_consumer(v_consumer.consumer_id);
    v_consumer := _pgqueue.consumer_now(v_consumer);
    v_stored := _pgqueue.cursor(v_consumer.consumer_id);
    v_cursor := v_stored;
    v_hints := v_cursor.hints;
    for v_bundle in
        select * from pgqueue.consumer_messages
        where consumer_id = v_consumer.consumer_id and token is null and lane <> _pgqueue.lane_unfiltered()
          and (not_visible_until > v_now or note ? 'at_most')
          and case when v_set is null then deliver_count > 0 else _pgqueue.meets(seqs, v_set) end
        for update skip locked  -- lock: bundle
    loop
        v_part := case when _pgqueue.is_keyed(v_consumer.profile) then v_bundle.seqs
                       else coalesce(_pgqueue.common(v_bundle.seqs, v_set), v_bundle.seqs) end;
        if v_part <> v_bundle.seqs then
            perform _pgqueue.store(v_bundle, v_bundle.seqs - v_part);
            v_bundle.seqs := v_part;
            v_bundle.message_count := _pgqueue.cardinality(v_part);
        end if;
        v_bundle.note := _pgqueue.merged_note(v_bundle.note, '{"at_most": null}');
        -- a delayed message is due now: the next claim makes it ready, or assigns it, as any other
        if v_bundle.lane = _pgqueue.lane_delayed() then
            v_bundle.place := _pgqueue.place_at(v_now);
            v_bundle.not_visible_until := v_now;
            v_hints := _pgqueue.record_due(v_hints, v_bundle.place);
        else
            v_bundle.not_visible_until := null;
        end if;
        v_count := v_count + v_bundle.message_count;
        perform _pgqueue.replace(v_bundle);
    end loop;
    v_cursor.hints := v_hints;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(v_consumer, v_cursor), true);
    return v_count;
end $$;

-- Extends the lease of a claim: it ends p_by from now, or later if it would anyway.
--   p_by  null: the claim's visibility timeout
-- Returns how many messages the claim holds. Errors: PQ003, PQ007. Locks: the claim.
create or replace function pgqueue.extend(p_claim_id bigint, p_by interval default null) returns bigint
language plpgsql as $$
declare
    v_claim pgqueue.consumer_messages;
begin
    perform _pgqueue.check_isolation();
    if p_by is not null then
        perform pgqueue.check_timeout('p_by', p_by);
    end if;
    update pgqueue.consumer_messages  -- lock: bundle
    set lease_until = greatest(lease_until, clock_timestamp() + coalesce(p_by, visibility_timeout))
    where _pgqueue.is_head(bundle_no, token, head, _pgqueue.number_in(p_claim_id), _pgqueue.token_in(p_claim_id))
      and reader is null
    returning * into v_claim;
    if not found then
        perform _pgqueue.warn_not_live(p_claim_id);
    elsif v_claim.members is not null then
        return (select sum(message_count) from _pgqueue.bundles_of(v_claim.bundle_no, v_claim.token));
    end if;
    return coalesce(v_claim.message_count, 0);
end $$;

-- Dead-letters a claim, or the given messages of it: they are not delivered again.
--   p_reason   a short reason, which redrive and purge_dead can select; null: rejected
--   p_details  further details
-- Returns how many messages it dead-lettered. Errors: PQ003, PQ007. Locks: as ack.
create or replace function pgqueue.dead_letter(p_claim_id bigint, p_seqs bigint[] default null,
                                               p_reason text default null, p_details jsonb default null) returns bigint
language plpgsql as $$
begin
    return _pgqueue.settle(p_claim_id, _pgqueue.set_of(p_seqs), true, p_reason, p_details);
end $$;
