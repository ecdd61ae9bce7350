-- History: the outcome of messages for a consumer.

-- Returns the outcome of a message for a consumer, or its state.
-- For an unfinished message, the call may read all bundles of the consumer. Returns one row:
--   state          done, cancelled, replaced, dead, or a state of explain_message. Without keep_history, cancelled and
--                  replaced messages are done too, and the other columns are null
--   result         from its worker: p_result of ack, p_details of dead_letter; of a replaced message {"replaced_by":
--                  seq}
--   reason, error  of a dead letter
--   deliver_count  how often it was delivered; owner (application_name), claimed_at and ended_at: its last delivery
--   due_at         when its delay or its lease ends, and it can be delivered again
-- For a message that was delivered again after it was done, the first recorded outcome.
-- Errors: PQ001, PQ002, PQ003. Locks: none.
create or replace function pgqueue.outcome(p_stream text, p_consumer text, p_seq bigint)
returns table (state text, result jsonb, reason text, error text, deliver_count int, owner text, claimed_at timestamptz,
               ended_at timestamptz, due_at timestamptz)
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    perform _pgqueue.check_number('p_seq', p_seq, 1, 9223372036854775807);
    return query
        select _pgqueue.end_of(d), d.result, null::text, null::text, d.deliver_count, d.owner, d.claimed_at, d.done_at,
               null::timestamptz
        from _pgqueue.done_with(v_consumer, p_seq) d;
    if not found then
        return query
            select 'dead', d.details, d.reason, d.note ->> 'error', d.deliver_count, d.owner, null::timestamptz,
                   d.died_at, null::timestamptz
            from pgqueue.dead_messages d where d.consumer_id = v_consumer.consumer_id and d.seqs @> p_seq
            order by d.dead_id limit 1;
    end if;
    if not found then
        return query
            select e.state, null::jsonb, null::text, m.note ->> 'error', m.deliver_count, m.owner, m.claimed_at,
                   null::timestamptz, e.until
            from pgqueue.explain_message(p_stream, p_consumer, p_seq) e
            left join _pgqueue.unfinished(v_consumer.consumer_id) m on m.seqs @> p_seq;
    end if;
end $$;

-- Lists the last ten failed deliveries of an unfinished or dead-lettered message, in their order. A delivery failed if
-- it was returned (nack), or if its visibility timeout ended. If a whole claim failed, each of its messages has the
-- failure. The list is deleted when the message is acknowledged or cancelled, or redriven as never delivered. The call
-- may read all bundles of the consumer.
--   p_seq  the message's number
-- Returns when each delivery failed, to the second; its owner (application_name); and the first 500 characters of the
-- error, null for none. No row if no delivery failed, or if the consumer does not have the message. Errors: PQ001,
-- PQ002, PQ003. Locks: none.
create or replace function pgqueue.failures(p_stream text, p_consumer text, p_seq bigint)
returns table (failed_at timestamptz, owner text, error text)
language plpgsql stable as $$
declare
    v_id int := (_pgqueue.consumer(p_stream, p_consumer)).consumer_id;
begin
    perform _pgqueue.check_number('p_seq', p_seq, 1, 9223372036854775807);
    return query
        select to_timestamp((a.attempt ->> 'at')::bigint), a.attempt ->> 'owner', a.attempt ->> 'error'
        from (select m.note from _pgqueue.unfinished(v_id) m where m.seqs @> p_seq
              union all
              (select d.note from pgqueue.dead_messages d where d.consumer_id = v_id and d.seqs @> p_seq
               order by d.dead_id desc limit 1)) n
        cross join lateral jsonb_array_elements(n.note -> 'attempts') with ordinality a (attempt, i)
        order by a.i;
end $$;

-- Notifies this session when messages of a consumer end, acknowledged or dead.
-- Each transaction that ends messages notifies a channel.
--   p_pid  as in start_waiting
-- Returns the channel; null if there are no notifications, because the consumer's notify_done is off or a pooler is in
-- use: then poll outcome. Errors: PQ001, PQ002. Locks: none. Notifications begin when this transaction has ended.
create or replace function pgqueue.listen_done(p_stream text, p_consumer text, p_pid int default null) returns text
language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    if not v_consumer.notify_done or p_pid <> pg_backend_pid() then
        return null;
    end if;
    execute format('listen %I', _pgqueue.done_channel(v_consumer.consumer_id));
    return _pgqueue.done_channel(v_consumer.consumer_id);
end $$;
