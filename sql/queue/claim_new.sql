-- Taking and claiming at once: what was just published, for a consumer with ordering=none that has nothing else to do.

-- The next publications that are alike, as nearly all are: at most limit_slots(), without a gap among their ids. Each
-- is in one part, and all have the same priority, time, expiry and consumers. Those behind a gap are left for later.
--   p_first  the first part of the next publication
-- Returns the last publication, how many messages these have, and their messages; nulls when the first publication is
-- in parts or in many ranges, or when a later one is more urgent.
create or replace function _pgqueue.next_alike(p_first pgqueue.publications, out o_last bigint,
                                               out o_message_count bigint, out o_seqs int8multirange)
language plpgsql
as $$
begin
    perform from pgqueue.publications
    where stream_id = p_first.stream_id and (publication_id, part) > (p_first.publication_id, 0)
      and publication_id <= p_first.publication_id + _pgqueue.limit_unseen()
    order by publication_id, part limit 1;
    if not found then
        o_last := p_first.publication_id;
        o_message_count := p_first.message_count;
        o_seqs := p_first.seqs;
    else
        select max(publication_id), sum(message_count), range_agg(seqs) into o_last, o_message_count, o_seqs
        from (
            select publication_id, message_count, seqs,
                   bool_and(publication_id = p_first.publication_id + i - 1 and (publication_id < after) is not false
                            and priority = p_first.priority and deliver_at is not distinct from p_first.deliver_at
                            and consumers is not distinct from p_first.consumers
                            and expires_at is not distinct from p_first.expires_at) over (order by i) as alike
            from (select *, row_number() over w as i, lead(publication_id) over w as after
                  from pgqueue.publications
                  where stream_id = p_first.stream_id and publication_id >= p_first.publication_id
                    and publication_id < p_first.publication_id + _pgqueue.limit_slots()
                  window w as (order by publication_id, part)) p) q
        where alike;
        if p_first.priority < 0 or exists (
            select from pgqueue.publications
            where stream_id = p_first.stream_id and publication_id > p_first.publication_id
              and priority > 0 and priority > p_first.priority) then
            o_last := null;
        end if;
    end if;
    if o_seqs <> int8multirange(range_merge(o_seqs)) then  -- (the usual case is told without a query)
        if (select count(*) from unnest(o_seqs) g) > _pgqueue.limit_ranges() then
            o_last := null;
        end if;
    end if;
end $$;

-- Begins to take publications for a consumer with ordering=none that has nothing due. They have to be for this
-- consumer, to be delivered now, and without expiry; the consumer has no filter and no ready run.
--   p_cursor  the cursor as the claim has read it
--   p_first   the first of the publications; the others are alike
--   p_last    the last of them
--   p_count   messages that they have
-- Returns the cursor with them taken; its row is deleted, and the caller stores it. Null when nothing was done: the
-- cursor has changed, or another session has the consumer's lock. Locks the consumer.
create or replace function _pgqueue.start_taking(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 p_first pgqueue.publications, p_last bigint, p_count bigint)
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    if _pgqueue.judges(p_consumer) or p_first.deliver_at > clock_timestamp() or p_first.expires_at is not null
       or not _pgqueue.is_for(p_first.consumers, p_consumer.consumer_id)
       or not _pgqueue.try_lock_consumer(p_consumer.consumer_id) then
        return null;
    end if;
    if p_cursor.scan_from <> '{}' then
        if cardinality(p_cursor.scan_from) > 1
           or (_pgqueue.next_ready(p_consumer.consumer_id, p_cursor.scan_from[1])).run_ctid is not null then
            return null;
        end if;
        p_cursor.scan_from := '{}';
    end if;
    delete from pgqueue.consumer_cursors where consumer_id = p_cursor.consumer_id and version = p_cursor.version;
    if not found then
        return null;  -- another claimer was faster
    end if;
    p_cursor.version := p_cursor.version + 1;
    p_cursor.next_publication := p_last + 1;
    p_cursor.last_line_no := p_cursor.last_line_no + 1;
    p_cursor.taken := p_cursor.taken + p_count;
    return p_cursor;
end $$;

-- Takes the next publications and claims at most p_want of their messages at once, if start_taking() can, and if the
-- next publications are plain, are all that is new, and make one range.
--   p_cursor  the cursor as the claim has read it
--   p_first   the first part of the next publication
-- Returns how many messages the claim got; 0 when nothing was done. Locks the consumer.
create or replace function _pgqueue.claim_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                              p_first pgqueue.publications, p_claim_id bigint, p_want bigint)
returns pgqueue.served
language plpgsql
as $$
declare
    v_plain  record := _pgqueue.next_plain(p_first, null, _pgqueue.limit_take());
    v_lane   int := -p_first.priority;
    v_lo     bigint := lower(v_plain.o_seqs);
    v_hi     bigint := upper(v_plain.o_seqs);
    v_to     bigint := least(v_lo + p_want, v_hi);
    v_served pgqueue.served;
begin
    v_served.message_count := 0;
    if v_plain.o_count < _pgqueue.limit_take() and v_hi - v_lo = v_plain.o_message_count then
        p_cursor := _pgqueue.start_taking(p_consumer, p_cursor, p_first, v_plain.o_last, v_hi - v_lo);
    else
        return v_served;
    end if;
    if p_cursor.consumer_id is null then
        return v_served;
    end if;
    insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                           first_seq, message_count, seqs, claim_id, last_delivered_at)
    values (p_consumer.consumer_id, 'claimed', v_lane, p_first.priority, 1, p_cursor.last_line_no,
            p_cursor.last_line_no, v_lo, v_to - v_lo,
            int8multirange(int8range(v_lo, v_to)), p_claim_id, clock_timestamp());
    if v_to < v_hi then
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs)
        select p_consumer.consumer_id, 'ready', v_lane, p_first.priority, 0, p_cursor.last_line_no,
               p_cursor.last_line_no, lo, hi - lo,
               int8multirange(int8range(lo, hi))
        from _pgqueue.slices(v_to, v_hi, p_want);
        p_cursor.scan_from := array[(v_lane, p_cursor.last_line_no, v_to)::pgqueue.line_place];
    end if;
    insert into pgqueue.consumer_cursors select p_cursor.*;
    v_served.message_count := v_to - v_lo;
    return v_served;
end $$;

-- Takes the next publications and claims at most p_want of their messages at once, if start_taking() can, for a
-- consumer that is simple. The claim is a slot, p_claim_id with a last bit of 1. The messages behind it become slots.
--   p_cursor, p_first  as of claim_new()
--   p_claim_id         the last that new_claim_id() gave this session
-- Returns the claim's messages; 0 when nothing was done. Locks the consumer.
create or replace function _pgqueue.claim_new_slot(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                   p_first pgqueue.publications, p_claim_id bigint, p_want int)
returns pgqueue.served
language plpgsql
as $$
declare
    v_new    record := _pgqueue.next_alike(p_first);
    v_slot   bigint := currval('pgqueue.claim_numbers');
    v_parts  int8multirange[];
    v_rest   int8multirange;  -- what is left of the messages
    v_served pgqueue.served;
begin
    v_served.message_count := 0;
    if v_new.o_last is not null then
        p_cursor := _pgqueue.start_taking(p_consumer, p_cursor, p_first, v_new.o_last, v_new.o_message_count);
    end if;
    if v_new.o_last is null or p_cursor.consumer_id is null then
        return v_served;
    end if;
    if p_cursor.slots_low is null or v_slot - p_cursor.slots_block >= _pgqueue.limit_slots() then
        p_cursor := _pgqueue.begin_block(p_cursor, v_slot);
    end if;
    v_served.seqs := v_new.o_seqs;
    v_served.message_count := least(v_new.o_message_count, p_want);
    v_served.priority := p_first.priority;
    if v_new.o_message_count > p_want then
        v_parts := _pgqueue.parts(v_new.o_seqs, p_want, case when p_first.priority < 0 then 1 else least(
            v_new.o_message_count / p_want, 1 + coalesce(p_cursor.slots_ahead, _pgqueue.limit_slots())) end);
        v_served.seqs := v_parts[1];
        v_parts := v_parts[2:];
        if v_parts <> '{}' then
            p_cursor := _pgqueue.lay_slots(
                p_cursor, array_fill(p_cursor.last_line_no, array[cardinality(v_parts)]), p_first.priority, p_want,
                v_parts);
        end if;
        v_rest := v_new.o_seqs - v_served.seqs - coalesce((select range_agg(p) from unnest(v_parts) p), '{}');
        if v_rest <> '{}' then
            p_cursor := _pgqueue.lower_scan_from(p_cursor, array[_pgqueue.put_in_line(
                p_consumer.consumer_id, p_first.priority, p_cursor.last_line_no, v_rest)]);
        else
            p_cursor.slots_more := null;  -- nothing is left to cut ahead
        end if;
    end if;
    if v_parts is null and _pgqueue.has_slots(p_cursor) then  -- used up, but for those that other sessions are claiming
        p_cursor.slots_from := (select slot from pgqueue.slots
                                where consumer_id = p_consumer.consumer_id and slot >= p_cursor.slots_low
                                  and token is null
                                order by slot limit 1);
        p_cursor.slots_until := case when p_cursor.slots_from is null then '-infinity' else p_cursor.slots_until end;
    end if;
    perform _pgqueue.store_claimed_slot(
        p_consumer.consumer_id, v_slot, _pgqueue.token_in(p_claim_id) | 1, p_cursor.last_line_no, p_first.priority,
        v_served.seqs, v_served.message_count, p_consumer.visibility_timeout);
    insert into pgqueue.consumer_cursors select p_cursor.*;
    return v_served;
end $$;
