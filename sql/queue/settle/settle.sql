-- Settling: messages leave a consumer for good. All calls that settle a live claim use this file, except those that
-- return messages (queue/settle/return.sql) and Spark's writes (spark/actions.sql). Messages that no claim holds are
-- removed by remove_unclaimed().

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

-- Removes messages that no claim holds from a consumer. Bundles that another session is claiming are skipped. Needs the
-- consumer's lock.
--   p_reason  the messages become dead letters with this reason; null: they do not
-- Returns the cursor, the messages, the number of their bundles, and the highest number of deliveries among them.
create or replace function _pgqueue.remove_unclaimed(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                     p_seqs int8multirange, p_reason text default null,
                                                     out o_cursor pgqueue.consumer_cursors, out o_count int,
                                                     out o_gone int8multirange, out o_most int)
language plpgsql as $$
declare
    v_taken record := _pgqueue.take_unclaimed(p_consumer, p_cursor.hints, p_seqs);
begin
    o_cursor := p_cursor;
    o_cursor.hints := v_taken.o_hints;
    select count(*), coalesce(range_agg(seqs), '{}'), coalesce(max(deliver_count), 0) into o_count, o_gone, o_most
    from unnest(v_taken.o_bundles);
    if p_reason is not null then
        perform _pgqueue.dead_letter(b, b.seqs, p_reason, null) from unnest(v_taken.o_bundles) b;
    end if;
end $$;
