-- Claims of slots (queue/slots.sql), for consumers that are simple: they have no special settings. A claim
-- of as many messages as a slot has is one update. When no slot is left, or something may come before the slots, a
-- claim cuts new ones with the consumer's lock.

-- Whether the slots of a consumer come next: nothing is due, and nothing more urgent was published. (By key, and while
-- takes are cut, there is no slots_priority: nothing is urgent.)
create or replace function _pgqueue.slots_are_next(p_stream_id int, p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
as $$
begin
    return _pgqueue.need_not_look(p_cursor.slots_until)
       and (p_cursor.slots_priority is null
            or not exists (select from pgqueue.publications
                           where stream_id = p_stream_id and publication_id >= p_cursor.next_publication
                             and priority > 0 and priority > p_cursor.slots_priority));
end $$;

-- Deals more slots by key while others are left, so that no claimer has to wait for who deals; if nobody has the
-- consumer's lock, nothing is due, and no piece is ready. Locks: the consumer, if nobody has it.
--   p_cursor  the cursor as the caller read it: if another claimer has dealt since, nothing is done
create or replace function _pgqueue.deal_ahead(p_cursor pgqueue.consumer_cursors) returns void
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
begin
    begin
        if not _pgqueue.try_lock_consumer(p_cursor.consumer_id) then
            return;
        end if;
        v_consumer := (select c from pgqueue.consumers c where c.consumer_id = p_cursor.consumer_id);
        v_stored := _pgqueue.cursor(p_cursor.consumer_id);
        if v_stored.slots_more is distinct from p_cursor.slots_more
           or not _pgqueue.slots_are_next(v_consumer.stream_id, v_stored) then
            raise exception using errcode = 'PQ099';
        end if;
    exception when sqlstate 'PQ099' then
        return;  -- and the lock is let go: the transaction may take long
    end;
    v_cursor := _pgqueue.refresh(v_consumer, v_stored, 1, false, v_stored.slots_size, null);
    v_cursor.slots_more := null;
    v_stored.slots_until := '-infinity';  -- save_cursor() keeps what is set below
    if (v_cursor.scan_from[1]).lane = 0 then
        v_cursor.slots_until := '-infinity';
    else
        v_cursor := (_pgqueue.deal(v_consumer, v_cursor, null, v_cursor.slots_size, 1, true)).o_cursor;
        v_cursor.slots_until := least(v_cursor.lease_probe, _pgqueue.next_delayed(v_cursor));
    end if;
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
end $$;

-- Claims the first free slot of a consumer, if it has as many messages as the claim wants; by key, the first one that
-- has no more, if slots come near that size. A claim of one of the last slots, by key of the last half, cuts or deals
-- more. Returns the claim; its id is null when there is no such slot. Locks: the slot; maybe the consumer.
--   p_priority  only if nothing more urgent than this was published that the cursor has not taken; null: whatever was.
--               (Asked by the same statement, this costs two thirds of what it costs alone)
create or replace function _pgqueue.claim_slot(p_stream_id int, p_by_key boolean, p_cursor pgqueue.consumer_cursors,
                                               p_max int, p_timeout interval, p_priority int default null)
returns pgqueue.claimed
language plpgsql
as $$
declare
    v_claim pgqueue.claimed;
begin
    if not p_by_key then
        update pgqueue.slots
        set token = _pgqueue.new_token(), claimed_at = clock_timestamp(), lease_until = clock_timestamp() + p_timeout,
            timeout = p_timeout, owner = current_setting('application_name')
        where ctid = (select ctid from pgqueue.slots
                      where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from
                        and slot < p_cursor.slots_to and token is null
                      order by slot limit 1
                      for update skip locked)  -- lock: slot
          and message_count = p_max
          and (p_priority is null
               or not exists (select from pgqueue.publications
                              where stream_id = p_stream_id and publication_id >= p_cursor.next_publication
                                and priority > 0 and priority > p_priority))
        returning _pgqueue.slot_claim(slot, token), message_count, p_stream_id, seqs, priority into v_claim;
    elsif _pgqueue.slots_fit(p_cursor.slots_size, p_max) then
        update pgqueue.slots
        set token = _pgqueue.new_token() + case when rest is null then 0 else 2 end, claimed_at = clock_timestamp(),
            lease_until = clock_timestamp() + p_timeout, timeout = p_timeout,
            owner = current_setting('application_name')
        -- (by its number, for the slot may have gone on since this statement began)
        where consumer_id = p_cursor.consumer_id
          and slot = (select slot from pgqueue.slots
                      where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from
                        and slot < p_cursor.slots_to and token is null and message_count <= p_max
                      order by slot limit 1
                      for update skip locked)  -- lock: slot
        returning _pgqueue.slot_claim(slot, token), message_count, p_stream_id, seqs, priority into v_claim;
    end if;
    if (_pgqueue.place_in(v_claim.claim_id) - p_cursor.slots_more) & 1048575 < 524288 then
        if p_by_key then
            perform _pgqueue.deal_ahead(p_cursor);
        else
            perform _pgqueue.cut_ahead(p_cursor, p_max);
        end if;
    end if;
    return v_claim;
end $$;

-- Claims as many messages as the claim wants out of the first free slots, if these are larger or smaller: as a slot of
-- their own. Of a slot that has too many messages the rest stays free. Returns the claim; its id is null when the slots
-- do not suffice. Locks: the slots.
create or replace function _pgqueue.claim_of_slots(p_stream_id int, p_cursor pgqueue.consumer_cursors, p_max int,
                                                   p_timeout interval) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_slots pgqueue.slots[] := array(
        select s from pgqueue.slots s
        where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from and slot < p_cursor.slots_to
          and token is null
        order by slot limit (p_max + p_cursor.slots_size - 2) / p_cursor.slots_size + 1
        for update skip locked);  -- lock: slot
    v_slot  pgqueue.slots;
    v_all   int8multirange := '{}';
    v_count bigint := 0;
    v_last  int := 0;
    v_mine  int8multirange;
    v_no    bigint;
    v_token bigint;
begin
    foreach v_slot in array v_slots loop
        exit when v_count >= p_max
            or (v_slot.arrival_no, v_slot.priority) <> (v_slots[1].arrival_no, v_slots[1].priority);
        v_all := v_all + v_slot.seqs;
        v_count := v_count + v_slot.message_count;
        v_last := v_last + 1;
    end loop;
    if v_count < p_max or (select count(*) from unnest(v_all) r) > _pgqueue.limit_ranges() then
        return null;
    end if;
    v_slot := v_slots[v_last];  -- it keeps what is too much
    delete from pgqueue.slots where consumer_id = p_cursor.consumer_id
        and slot = any (array(select s.slot from unnest(v_slots[:v_last]) s))
        and (slot <> v_slot.slot or v_count = p_max);
    v_mine := case when v_count = p_max then v_all
                   else _pgqueue.below(v_all, _pgqueue.bound_of(v_all, p_max)) end;
    update pgqueue.slots set seqs = v_all - v_mine, message_count = v_count - p_max
    where consumer_id = p_cursor.consumer_id and slot = v_slot.slot;
    v_no := nextval('pgqueue.claim_numbers');
    v_token := _pgqueue.new_token();
    perform _pgqueue.store_claimed_slot(p_cursor.consumer_id, v_no, v_token, v_slot.arrival_no, v_slot.priority,
                                        v_mine, p_max, p_timeout);
    return (_pgqueue.slot_claim(v_no, v_token), p_max::bigint, p_stream_id, v_mine, v_slot.priority);
end $$;

-- Claims messages that pass a condition out of the free slots, as runs of a claim of the usual kind; the others stay in
-- their slots. Slots that other sessions are claiming are passed over.
--   p_max   messages to claim at most
--   p_look  messages to look at, at most
-- Returns how many messages it claimed, and at how many it looked. Errors: PQ099 where the rest of a slot would have
-- too many ranges. Locks: the slots of the claimed messages.
create or replace function _pgqueue.claim_matching_slots(p_stream_id int, p_cursor pgqueue.consumer_cursors,
                                                         p_claim_id bigint, p_where jsonpath, p_max bigint,
                                                         p_look bigint, out o_count bigint, out o_looked bigint)
language plpgsql
as $$
declare
    v_free  int8multirange := coalesce((
        select range_agg(seqs) from pgqueue.slots
        where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from and slot < p_cursor.slots_to
          and token is null), '{}');
    v_match int8multirange;
    v_rest  int8multirange;
    v_slot  pgqueue.slots;
begin
    o_count := 0;
    o_looked := least(p_look, _pgqueue.cardinality(v_free));
    v_free := case when o_looked > 0 then _pgqueue.below(v_free, _pgqueue.bound_of(v_free, o_looked)) else '{}' end;
    v_match := _pgqueue.matching(p_stream_id, array(select g from unnest(v_free) g order by g), null, p_where, p_max);
    foreach v_slot in array array(
        select s from pgqueue.slots s
        where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from and slot < p_cursor.slots_to
          and token is null and seqs && v_match
        order by slot for update skip locked)  -- lock: slot
    loop
        v_rest := v_slot.seqs - v_match;
        if (select count(*) from unnest(v_rest) r) > _pgqueue.limit_ranges() then
            raise exception using errcode = 'PQ099';
        end if;
        o_count := o_count + _pgqueue.claim_run(r, v_slot.seqs * v_match, p_claim_id)
            from _pgqueue.runs_of_slot(v_slot) r;
        delete from pgqueue.slots
        where consumer_id = p_cursor.consumer_id and slot = v_slot.slot and v_rest = '{}';
        update pgqueue.slots set seqs = v_rest, message_count = _pgqueue.cardinality(v_rest)
        where consumer_id = p_cursor.consumer_id and slot = v_slot.slot;
    end loop;
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
    v_rest  int8multirange;
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
            if upper(v_run.seqs) - v_run.first_seq > v_run.message_count then  -- it may have messages on both sides of
                v_rest := v_run.seqs * int8multirange(int8range(coalesce((     -- one that was returned
                    select first_seq from pgqueue.consumer_messages
                    where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = v_place.lane
                      and line_no = v_run.line_no and first_seq between v_run.first_seq and upper(v_run.seqs)
                    order by first_seq limit 1), upper(v_run.seqs)), null));
                perform _pgqueue.store_run(v_run, v_rest);
                v_run.seqs := v_run.seqs - v_rest;
                v_run.message_count := _pgqueue.cardinality(v_run.seqs);
            end if;
        end if;
        o_seqs := coalesce(o_seqs, '{}') + v_run.seqs;
        v_count := v_count + v_run.message_count;
    end loop;
end $$;

-- Whether cut() finds enough at the front of the line, as far as the cursor says.
create or replace function _pgqueue.can_cut(p_cursor pgqueue.consumer_cursors, p_max int) returns boolean
language plpgsql
as $$
declare
    v_place pgqueue.line_place := p_cursor.scan_from[1];
begin
    return p_cursor.scan_lanes_from is null and v_place.lane <= 0
       and (select sum(f.message_count) >= 2 * p_max
            from (select message_count from pgqueue.consumer_messages
                  where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = v_place.lane
                    and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
                  order by line_no, first_seq limit 2) f) is true;
end $$;

-- Cuts slots of p_max messages from the front of the line, if its first runs are enough for two. Messages of less than
-- a slot stay in the line, and so do messages with a priority below 0. Returns the cursor. Needs the consumer's lock;
-- if the consumer has free slots, the line goes on behind them.
create or replace function _pgqueue.cut(p_cursor pgqueue.consumer_cursors, p_max int)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_want     int := coalesce(p_cursor.slots_ahead, _pgqueue.limit_slots());
    v_front    record;
    v_cut      int8multirange[];
    v_rest     int8multirange;
    v_parts    int8multirange[] := '{}';
    v_arrivals bigint[] := '{}';
    v_priority int;
begin
    if not _pgqueue.can_cut(p_cursor, p_max) then
        return p_cursor;
    end if;
    while cardinality(v_parts) < v_want loop  -- what was taken at different times is cut together
        v_front := _pgqueue.take_front(p_cursor, (v_want - cardinality(v_parts)) * p_max::bigint);
        exit when v_front.o_seqs is null;
        v_priority := (v_front.o_first).priority;
        v_cut := _pgqueue.parts(v_front.o_seqs, p_max, least(v_want - cardinality(v_parts),
                                                             _pgqueue.cardinality(v_front.o_seqs) / p_max));
        v_parts := v_parts || v_cut;
        v_arrivals := v_arrivals || array_fill((v_front.o_first).arrival_no, array[cardinality(v_cut)]);
        v_rest := v_front.o_seqs * int8multirange(int8range(upper(v_cut[cardinality(v_cut)]), null));
        perform _pgqueue.store_run(v_front.o_first, v_rest);
        exit when v_rest <> '{}';
    end loop;
    if v_parts <> '{}' then
        p_cursor := _pgqueue.begin_block(p_cursor, nextval('pgqueue.claim_numbers'));
        p_cursor := _pgqueue.lay_slots(p_cursor, v_arrivals, v_priority, p_max, v_parts);
        p_cursor.slots_ahead := cardinality(v_parts);
        p_cursor.slots_more := case when v_front.o_seqs is not null then p_cursor.slots_more end;
    end if;
    return p_cursor;
end $$;

-- Cuts more slots behind those that are there, for a claim that has one of their last: so other claimers need not wait
-- for that. Does nothing while another session has the consumer's lock, or when the cursor has changed. Locks: the
-- consumer, if it cuts.
--   p_cursor  the cursor as the claim has read it: nothing comes before its slots
create or replace function _pgqueue.cut_ahead(p_cursor pgqueue.consumer_cursors, p_max int) returns void
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors;
begin
    -- first whether there is something: the transaction may keep the lock for long
    if _pgqueue.can_cut(p_cursor, p_max) and _pgqueue.try_lock_consumer(p_cursor.consumer_id) then
        v_cursor := _pgqueue.cursor(p_cursor.consumer_id);
        if v_cursor.version = p_cursor.version then
            v_cursor.slots_ahead := least(2 * v_cursor.slots_ahead, _pgqueue.limit_slots());  -- nearly all were used
            v_cursor := _pgqueue.cut(_pgqueue.raise_scan_from(v_cursor), p_max);
            if v_cursor.slots_to > p_cursor.slots_to then
                p_cursor.slots_until := '-infinity';  -- cut() has set it, and save_cursor() keeps that
                perform _pgqueue.save_cursor(p_cursor, v_cursor, true);
                return;
            end if;
        end if;
        raise exception using errcode = 'PQ099';
    end if;
exception when sqlstate 'PQ099' then
    null;  -- and the lock is let go
end $$;
