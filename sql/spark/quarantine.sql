-- Quarantine: a micro-batch that makes its query fail at each start is bisected, until the failing message is alone,
-- and becomes a dead letter.
--
-- A start of a batch is counted whenever a process plans it (readers.starts, since first_start). If p_quarantine_after
-- processes started it and none finished it, its second half is returned, and its first half is replayed; each further
-- failed start bisects the batch again. Both halves get a note (at_most): no claim has more of these messages. So
-- suspects are not mixed with other messages again, and are bisected after their first failed start. A message that
-- failed alone becomes a dead letter with the reason poison.
--
-- A micro-batch of a query with several sources has messages of each, and a failed start does not show which source
-- failed. So a reader with one message left sets isolate, and the other readers of its query return all that they hold.
-- Its message is dead-lettered after a start with only this message in the whole micro-batch has failed.
--
-- A batch that a sink of this database has published is not suspected: it was finished, but not recorded in Spark's
-- log. Nor is one that a write in foreachBatch has published, whatever failed afterwards: the write is skipped when the
-- batch is replayed, so the other half, in a batch of its own, would be published again. Actions prevent nothing: in
-- another batch they find their messages settled.

-- Bisects the micro-batch of a checkpoint reader, if it is suspected: the messages that the reader holds, without those
-- that it lost and claims back. Needs the locks of the reader and the consumer. Locks its claims.
--   p_reader            its row before this start, which is by another process than the last start
--   p_quarantine_after  as of reader_resume; null: nothing is done
-- Returns the cursor, how many messages were returned, how many became dead letters, and the new value of isolate.
-- (More than 60 lines: the steps for each claim of the batch, in their order.)
create or replace function _pgqueue.quarantine(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                               p_reader pgqueue.readers, p_start_claim bigint, p_end_claim bigint,
                                               p_quarantine_after bigint, out o_returned bigint, out o_poison bigint,
                                               out o_isolate boolean)
language plpgsql as $$
declare
    v_claim  pgqueue.reader_claims;
    v_holds  bigint;  -- messages that it holds
    v_locked pgqueue.consumer_messages[];
    v_left   bigint;
    v_keep   bigint;
    v_set    int8multirange;
    v_note   jsonb;
    v_aside  boolean;  -- another reader needs to be alone in the micro-batch
begin
    o_returned := 0;
    o_poison := 0;
    o_isolate := false;
    if p_quarantine_after is null then
        return;
    end if;
    v_left := (select sum(_pgqueue.remaining(c)) from pgqueue.reader_claims c
               where reader = p_reader.reader and claim_id > p_start_claim and claim_id <= p_end_claim);
    v_aside := exists (select from _pgqueue.sibling_readers(p_reader) where isolate);
    if not (v_aside or _pgqueue.is_suspect(p_reader, p_start_claim, p_end_claim, p_quarantine_after))
       or exists (select from pgqueue.sink_batches
                  where published_at >= p_reader.first_start
                    and (sink = p_reader.query_id or (query_id = p_reader.query_id and consumer_id = 0))) then
        return;
    elsif v_left = 1 and not v_aside and not p_reader.alone then
        o_isolate := true;
        return;
    end if;
    v_keep := case when v_aside then 0 else v_left / 2 + v_left % 2 end;
    v_note := jsonb_build_object('at_most', v_keep, 'error', format(
        'its micro-batch was started %s, but never finished',
        case p_reader.starts when 1 then 'once' else p_reader.starts || ' times' end));
    for v_claim in
        select * from pgqueue.reader_claims
        where reader = p_reader.reader and claim_id > p_start_claim and claim_id <= p_end_claim
        order by claim_id
    loop
        v_locked := _pgqueue.lock_bundles(v_claim.head, v_claim.token);
        v_holds := _pgqueue.count_of(v_locked);
        continue when v_holds = 0;
        if not v_aside then
            update pgqueue.consumer_messages set note = _pgqueue.merged_note(note, v_note)
            where ctid = any (_pgqueue.tids(array(select l.bundle_no from unnest(v_locked) l)));
            v_locked := _pgqueue.lock_bundles(v_claim.head, v_claim.token);
        end if;
        v_set := _pgqueue.messages_after(v_claim, v_keep);
        v_keep := greatest(0, v_keep - v_holds);
        if v_left = 1 and not v_aside then
            o_poison := _pgqueue.finish(v_locked, v_claim.claim_id, null, true, 'poison', null);
            v_set := v_claim.seqs;
        elsif v_set is not null then
            o_returned := o_returned + _pgqueue.cardinality(v_set);
            p_cursor := _pgqueue.return(p_consumer, p_cursor, v_locked, v_set,
                                        case when v_aside then 'not_failed' else 'one_failed' end, clock_timestamp(),
                                        null, null);
        end if;
        -- From now on the claim is the remaining part: returned messages are not lost, and are not claimed back.
        -- Messages that the query settled are done, and replays no longer have them.
        update pgqueue.reader_claims c
        set settled_early = null, seqs = seqs - v_set, message_count = message_count - (v_holds - _pgqueue.remaining(c))
        where reader = v_claim.reader and claim_id = v_claim.claim_id and v_set is not null;
    end loop;
end $$;

-- The other readers of a reader's query that hold messages.
create or replace function _pgqueue.sibling_readers(p_reader pgqueue.readers) returns setof pgqueue.readers
language sql stable as $$
    select * from pgqueue.readers r
    where r.query_id = p_reader.query_id and r.reader <> p_reader.reader
      and exists (select from pgqueue.reader_claims c where c.reader = r.reader and _pgqueue.remaining(c) > 0)
$$;

-- Whether a micro-batch is to be bisected: it was started p_quarantine_after times; or it has suspects, and was started
-- before. A single message must also have been delivered so many times.
create or replace function _pgqueue.is_suspect(p_reader pgqueue.readers, p_start_claim bigint, p_end_claim bigint,
                                               p_quarantine_after bigint) returns boolean
language sql stable as $$
    select coalesce(sum(m.message_count) > 0
                    and (p_reader.starts >= p_quarantine_after or bool_or(m.note ? 'at_most' is true))
                    and (sum(m.message_count) > 1 or max(_pgqueue.one_more(m.deliver_count)) >= p_quarantine_after),
                    false)
    from pgqueue.reader_claims c cross join lateral _pgqueue.bundles_of(c.head, c.token) m
    where c.reader = p_reader.reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim
$$;

-- The messages of a claim after its first p_keep, in the order of delivery; null: none.
create or replace function _pgqueue.messages_after(p_claim pgqueue.reader_claims, p_keep bigint) returns int8multirange
language sql stable as $$
    select range_agg(case when before >= p_keep then seqs
                          else seqs - _pgqueue.below(seqs, _pgqueue.bound_of(seqs, p_keep - before)) end)
    from (select range_agg(seqs) as seqs, sum(message_count) as message_count,
                 (sum(sum(message_count)) over (order by place) - sum(message_count))::bigint as before
          from (select seqs, message_count,
                       case when c.ordering = 'none' then array[-h.priority, h.arrival_no] else array[h.arrival_no] end
                       as place
                from _pgqueue.bundles_of(p_claim.head, p_claim.token) h join pgqueue.consumers c using (consumer_id)
                where message_count > 0) p
          group by place) m
    where before + message_count > p_keep
$$;
