-- Quarantine: a micro-batch that makes its query fail at each start is cut into halves, until the message that is to blame is alone and dead.
--
-- A batch counts as begun whenever a process plans it (readers.begun, since begun_at). If it was begun p_quarantine_after times and never finished, the
-- second half of it goes back to where it was in the line, and the first half is replayed; each further start that fails halves again. What
-- went back, and what is left, has a note (at_most): no claim has more of these, so what is suspected is not mixed with others again, and is cut
-- when its first start failed. A message that is left alone, and failed alone, is a dead letter with the reason poison.
--
-- What a sink of this database has published is no suspect: then the batch was finished, and only Spark's log does not say so.

-- Cuts the micro-batch of a reader, if it is time: what it holds of it, and has not had back yet where it lost some. Needs the
-- reader's lock, the locks of its claims and the consumer's.
--   p_reader  as it was before this start, which is by another process than the last one
-- Returns the cursor, how many messages went back, and how many are dead letters now.
create or replace function pgqueue._quarantine(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors, p_reader pgqueue.readers,
                                               p_start_claim bigint, p_end_claim bigint, p_quarantine_after bigint, out o_returned bigint, out o_poison bigint)
language plpgsql
as $$
declare
    v_error jsonb := jsonb_build_object('error', format('its micro-batch was begun %s, and not finished',
                                                             case p_reader.begun when 1 then 'once' else p_reader.begun || ' times' end));
    v_claim pgqueue.claims;
    v_left  bigint;
    v_keep  bigint;
    v_set   int8multirange;
    v_note  jsonb;
begin
    o_returned := 0;
    o_poison := 0;
    v_left := (select sum(remaining) from pgqueue.claims where reader = p_reader.reader and claim_id > p_start_claim and claim_id <= p_end_claim);
    if not pgqueue._is_suspect(p_reader, p_start_claim, p_end_claim, p_quarantine_after)
       or exists (select from pgqueue.sink_batches where sink = p_reader.query_id and published_at >= p_reader.begun_at) then
        return;
    end if;
    v_keep := v_left / 2 + v_left % 2;
    v_note := v_error || jsonb_build_object('at_most', v_keep);
    for v_claim in
        select * from pgqueue.claims
        where reader = p_reader.reader and claim_id > p_start_claim and claim_id <= p_end_claim and remaining > 0 order by claim_id
    loop
        update pgqueue.consumer_messages set note = pgqueue._noted(note, v_note)
        where claim_id = v_claim.claim_id and state = 'claimed';
        v_set := pgqueue._held_behind(v_claim.claim_id, v_keep);
        v_keep := greatest(0, v_keep - v_claim.remaining);
        if v_left = 1 then
            o_poison := pgqueue._finish(v_claim, null, true, 'poison', null);
            perform pgqueue._shrink_claim(v_claim, 0);
            v_set := v_claim.seqs;
        elsif v_set is not null then
            o_returned := o_returned + pgqueue._cardinality(v_set);
            p_cursor := pgqueue._return(p_consumer, p_cursor, v_claim, v_set, 'unnamed', clock_timestamp(), null, null);
        end if;
        -- from now on the claim is what is left: what went back is not lost, and is never had back. What its query acted on is done, and no replay
        -- has the same messages any more
        update pgqueue.claims
        set acted = null, seqs = seqs - v_set, message_count = message_count - (v_claim.remaining - remaining),
            settled = settled - (v_claim.remaining - remaining)
        where claim_id = v_claim.claim_id and v_set is not null;
    end loop;
end $$;

-- Whether a micro-batch is to be cut: it was begun too often; or some of it is suspected, and it was begun before. A message that is alone has to have
-- been delivered as often.
create or replace function pgqueue._is_suspect(p_reader pgqueue.readers, p_start_claim bigint, p_end_claim bigint, p_quarantine_after bigint) returns boolean
language plpgsql stable
as $$
declare
    v_batch record;
begin
    select coalesce(sum(m.message_count), 0) as messages, coalesce(bool_or(m.note ? 'at_most'), false) as noted, max(m.deliver_count) as most
    into v_batch
    from pgqueue.claims c join pgqueue.consumer_messages m on m.claim_id = c.claim_id and m.state = 'claimed'
    where c.reader = p_reader.reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim;
    return v_batch.messages > 0 and (v_batch.noted or p_reader.begun >= p_quarantine_after)
        and (v_batch.messages > 1 or v_batch.most >= p_quarantine_after);
end $$;

-- What a claim holds behind its first p_keep messages, in the order of delivery; null: nothing.
create or replace function pgqueue._held_behind(p_claim_id bigint, p_keep bigint) returns int8multirange
language sql stable
as $$
    select range_agg(case when before >= p_keep then seqs else seqs - pgqueue._below(seqs, pgqueue._bound_of(seqs, p_keep - before)) end)
    from (select range_agg(seqs) as seqs, sum(message_count) as message_count,
                 (sum(sum(message_count)) over (order by lane, arrival_no) - sum(message_count))::bigint as before
          from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed' group by lane, arrival_no) m
    where before + message_count > p_keep
$$;
