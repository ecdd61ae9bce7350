-- Claims of slots (queue/slots.sql), for consumers that are quick: they have no order and no special settings. A claim
-- of as many messages as a slot has is one update. When no slot is left, or something may come before the slots, a
-- claim cuts new ones with the consumer's lock.

-- Whether the slots of a consumer come next: nothing is due, and nothing more urgent was published.
create or replace function _pgqueue.slots_are_next(p_stream_id int, p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
as $$
begin
    return _pgqueue.need_not_look(p_cursor.slots_until)
       and (p_cursor.take_was_cut
            or not exists (select from pgqueue.publications
                           where stream_id = p_stream_id and publication_id >= p_cursor.next_publication
                             and priority > 0 and priority > p_cursor.slots_priority));
end $$;

-- Claims the first free slot, if it has as many messages as the claim wants. Returns the claim; its id is null when
-- there is no such slot. Locks: the slot.
create or replace function _pgqueue.claim_slot(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_max int, p_visibility_timeout interval) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_claim   pgqueue.claimed;
    v_now     timestamptz := clock_timestamp();
    v_timeout interval := coalesce(p_visibility_timeout, p_consumer.visibility_timeout);
    v_token   bigint := _pgqueue.new_token();
begin
    update pgqueue.slots
    set token = v_token, claimed_at = v_now, lease_until = v_now + v_timeout, timeout = v_timeout,
        owner = current_setting('application_name')
    where ctid = (select ctid from pgqueue.slots
                  where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from and slot < p_cursor.slots_to
                    and token is null
                  order by slot limit 1
                  for update skip locked)  -- lock: run
      and message_count = p_max
    returning _pgqueue.slot_claim(slot, token), message_count into v_claim.claim_id, v_claim.message_count;
    v_claim.stream_id := p_consumer.stream_id;
    return v_claim;
end $$;

-- Whether there is a free slot, of whatever size; one that another session is claiming counts.
create or replace function _pgqueue.has_slot(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
as $$
begin
    return exists (select from pgqueue.slots
                   where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from
                     and slot < p_cursor.slots_to and token is null);
end $$;

-- Takes ready messages that may be cut from the front of the line: they were never delivered, came together, and are
-- alike. Their runs are deleted.
--   p_want  messages; the last run may have more
-- Returns the first run, and the messages of all, in few ranges; nulls when there are none. Locks: the runs.
create or replace function _pgqueue.take_front(p_cursor pgqueue.consumer_cursors, p_want bigint,
                                               out o_first pgqueue.consumer_messages, out o_seqs int8multirange)
language plpgsql
as $$
declare
    v_place pgqueue.line_place := p_cursor.scan_from[1];
    v_run   pgqueue.consumer_messages;
    v_count bigint := 0;
begin
    while v_count < p_want loop
        delete from pgqueue.consumer_messages
        where ctid = (select ctid from pgqueue.consumer_messages
                      where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = v_place.lane
                        and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
                      order by line_no, first_seq limit 1
                      for update skip locked)  -- lock: run
          and deliver_count = 0 and note is null
          and (o_seqs is null or (arrival_no = o_first.arrival_no and first_seq = upper(o_seqs)
                                  and upper(seqs) - first_seq = message_count))
        returning * into v_run;
        exit when not found;
        if o_seqs is null then
            o_first := v_run;
        end if;
        o_seqs := coalesce(o_seqs, '{}') + v_run.seqs;
        v_count := v_count + v_run.message_count;
    end loop;
end $$;

-- The first messages of a set, in p_count parts of p_size messages each.
create or replace function _pgqueue.parts(p_seqs int8multirange, p_size bigint, p_count bigint)
returns int8multirange[]
language plpgsql immutable
as $$
declare
    v_lo    bigint := lower(p_seqs);
    v_parts int8multirange[] := '{}';
begin
    if p_seqs = int8multirange(range_merge(p_seqs)) then
        return array(select int8multirange(int8range(v_lo + i * p_size, v_lo + (i + 1) * p_size))
                     from generate_series(0, p_count - 1) i order by i);
    end if;
    for i in 1..p_count loop
        v_parts := v_parts || _pgqueue.below(p_seqs, _pgqueue.bound_of(p_seqs, p_size));
        p_seqs := p_seqs - v_parts[i];
    end loop;
    return v_parts;
end $$;

-- Cuts slots of p_max messages from the front of the line, if its first runs are enough for two. Messages of less than a slot stay in the line, and so do
-- messages with a priority below 0. What is claimed of the slots before the last ones becomes claims of the usual kind:
-- so few slots have to be looked at. Returns the cursor. Needs the consumer's lock; the consumer has no free slots.
create or replace function _pgqueue.cut(p_cursor pgqueue.consumer_cursors, p_max int)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_place pgqueue.line_place := p_cursor.scan_from[1];
    v_want  bigint := p_max::bigint * coalesce(p_cursor.slots_ahead, _pgqueue.limit_slots());
    v_front record;
    v_parts int8multirange[];
    v_count bigint;
    v_from  bigint;
    v_to    bigint;
begin
    if p_cursor.scan_lanes_from is not null or (v_place.lane <= 0) is not true
       or (select sum(f.message_count) >= 2 * p_max
           from (select message_count from pgqueue.consumer_messages
                 where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = v_place.lane
                   and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
                 order by line_no, first_seq limit 2) f) is not true then
        return p_cursor;
    end if;
    v_front := _pgqueue.take_front(p_cursor, v_want);
    if v_front.o_seqs is null then
        return p_cursor;
    end if;
    v_count := least(v_want, _pgqueue.cardinality(v_front.o_seqs)) / p_max;
    v_parts := _pgqueue.parts(v_front.o_seqs, p_max, v_count);
    perform _pgqueue.store_run(v_front.o_first, v_front.o_seqs - coalesce(
        (select range_agg(p) from unnest(v_parts) p), '{}'));
    if v_count = 0 then
        return p_cursor;
    end if;
    with cut as (
        insert into pgqueue.slots (slot, arrival_no, consumer_id, priority, message_count, seqs)
        select nextval('pgqueue.claim_numbers'), (v_front.o_first).arrival_no, p_cursor.consumer_id,
               (v_front.o_first).priority, p_max, p.seqs
        from (select seqs from unnest(v_parts) with ordinality u (seqs, i) order by i) p
        returning slot
    )
    select min(slot), max(slot) + 1 into v_from, v_to from cut;
    perform _pgqueue.promote(array(
        select ctid from pgqueue.slots
        where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low and slot < p_cursor.slots_block
          and token is not null
        for update skip locked));  -- lock: run
    p_cursor.slots_low := (select slot from pgqueue.slots
                           where consumer_id = p_cursor.consumer_id and slot >= coalesce(p_cursor.slots_low, v_from)
                           order by slot limit 1);
    p_cursor.slots_block := v_from;
    p_cursor.slots_from := least(p_cursor.slots_from, v_from);
    p_cursor.slots_to := v_to;
    p_cursor.slots_priority := (v_front.o_first).priority;
    p_cursor.slots_ahead := v_count;
    p_cursor.slots_until := least(
        p_cursor.lease_probe,
        case when p_cursor.gaps <> '{}' and not p_cursor.take_was_cut then p_cursor.gaps_probe end,
        (select not_visible_until from pgqueue.consumer_messages
         where consumer_id = p_cursor.consumer_id and state = 'delayed' and not_visible_until >= p_cursor.due_from
         order by not_visible_until limit 1));
    return p_cursor;
end $$;

-- Claims a slot with the consumer's lock: of those that another claimer has just cut, or of new ones, once the work that
-- is due is done.
--   p_ack  a claim to acknowledge before; null: none
-- Returns as claim_slot(); without a claim where nothing could be cut. Locks: the claim p_ack, the consumer, the slot.
create or replace function _pgqueue.claim_ahead(p_consumer pgqueue.consumers, p_max int, p_visibility_timeout interval,
                                                p_ack bigint) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_claim  pgqueue.claimed;
begin
    perform _pgqueue.lock_claims(array[p_ack]) where p_ack is not null;  -- in the order of locks
    perform _pgqueue.lock_consumer(p_consumer.consumer_id);
    perform _pgqueue.ack(p_ack) where p_ack is not null;
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    if v_stored.slots_from is not null and _pgqueue.slots_are_next(p_consumer.stream_id, v_stored) then
        v_claim := _pgqueue.claim_slot(p_consumer, v_stored, p_max, p_visibility_timeout);
        if v_claim.claim_id is not null then
            return v_claim;
        end if;
    end if;
    v_stored.slots_until := '-infinity';  -- what cut() sets is new, and save_cursor() keeps it
    v_cursor := _pgqueue.refresh(p_consumer, _pgqueue.flush(v_stored), 0, false,
                                 p_max::bigint * _pgqueue.limit_slots(), null);
    v_cursor := _pgqueue.cut(_pgqueue.raise_scan_from(v_cursor), p_max);
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
    return _pgqueue.claim_slot(p_consumer, v_cursor, p_max, p_visibility_timeout);
end $$;
