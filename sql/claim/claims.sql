-- Making a claim: quickly, from the ready messages (claim_pieces(), claim_quickly()); or in turn, with the consumer's
-- lock (claim_in_turn()): refresh() does the work that is due, and fill() gets the messages.

-- Claims pieces that are ready, as long as nothing is due: that needs no lock of the consumer. Messages that were
-- published meanwhile come after these pieces. Returns as claim_quickly(). Locks: the pieces.
create or replace function _pgqueue.claim_pieces(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 p_claim_id bigint, p_max int)
returns pgqueue.served
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_served pgqueue.served;
begin
    if v_cursor.consumer_id is null then
        v_cursor := _pgqueue.cursor(p_consumer.consumer_id);  -- raises PQ002
    end if;
    v_served.message_count := 0;
    v_served.done := false;
    if v_cursor.tokens_from <= clock_timestamp() or _pgqueue.is_due(v_cursor.consumer_id, v_cursor.due_from) then
        return v_served;
    elsif (v_cursor.scan_from[1]).lane = 0 and _pgqueue.need_not_look(v_cursor.lease_probe) then
        v_served := _pgqueue.serve_ready(v_cursor.consumer_id, v_cursor.scan_from, p_claim_id, p_max, null, 0);
        v_served.done := v_served.message_count > 0 and random() * _pgqueue.limit_behind() >= v_served.runs
            and (v_served.ended or 2 * v_served.message_count > p_max or _pgqueue.has_ready_piece(v_cursor));
    elsif p_consumer.ordering = 'stream' and v_cursor.slots_low is not null
          and _pgqueue.need_not_look(v_cursor.lease_probe) then
        v_served.done := exists (  -- while the one slot is claimed, nothing else can be had
            select from pgqueue.slots
            where consumer_id = v_cursor.consumer_id and slot >= v_cursor.slots_low and token is not null);
    elsif v_cursor.scan_from = '{}' and not v_cursor.take_was_cut then
        v_served.done := not _pgqueue.may_have_freed(v_cursor) and _pgqueue.is_idle(p_consumer, v_cursor);
    end if;
    return v_served;
end $$;

-- Serves a claim under the consumer's lock, as far as the limits of the consumer leave room: from the ready messages;
-- if they do not suffice, from all others that can be had.
--   p_want  messages at most
--   p_upto  no publication after this one; null: all
--   p_held  messages that the claim has already
--   p_where, p_look, p_seen  only messages that pass this condition, see serve_matching(); null: any
--   p_cuts   if slots of p_want messages can be cut, or by key are there, serve nothing: then the cursor's slots_until
--            is set
-- Returns the cursor, which the caller stores, and how many messages the claim has.
-- (More than 60 lines: one loop serves claims with a condition and claims without. A function for what differs would
-- cost every claim a call.)
create or replace function _pgqueue.fill(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                         p_claim_id bigint, p_want bigint, p_upto bigint, p_held bigint default 0,
                                         p_where jsonpath default null, p_look int default null,
                                         p_seen int8multirange default null, p_cuts boolean default false,
                                         out o_cursor pgqueue.consumer_cursors, out o_count bigint)
language plpgsql
as $$
declare
    v_served record;
    v_room   record;
    v_look   record;
begin
    o_cursor := p_cursor;
    o_count := p_held;
    if p_consumer.max_backlog is not null and p_consumer.on_full = 'drop_oldest' then
        o_cursor := _pgqueue.drop_oldest(p_consumer, o_cursor);
    end if;
    if _pgqueue.is_throttled(p_consumer) then
        v_room := _pgqueue.room(p_consumer, o_cursor, p_claim_id, p_want, p_held);
        o_cursor := v_room.p_cursor;
        p_want := v_room.o_want;
        if p_want <= p_held then
            return;
        end if;
    end if;
    if p_consumer.per_key_latest then  -- what is published from now on comes later
        p_upto := least(p_upto, (select max(publication_id) from pgqueue.publications
                                 where stream_id = p_consumer.stream_id));
    end if;
    <<passes>>
    -- two passes; more only to get past publications that have nothing for this consumer, or nothing for now
    for v_pass in 1..greatest(2, _pgqueue.limit_takes()) loop
        o_cursor := _pgqueue.refresh(
            p_consumer, o_cursor, o_count, v_pass > 1,
            case when p_where is null then p_want - o_count else p_look - _pgqueue.cardinality(p_seen) end, p_upto);
        if p_consumer.per_key_latest and _pgqueue.is_behind(p_consumer, o_cursor, p_upto) then
            o_cursor.take_was_cut := true;  -- the next claim goes on
            exit when v_pass > 2 or o_count > 0;
            continue;
        end if;
        if p_cuts and v_pass = 1 and not _pgqueue.is_keyed(p_consumer.way) and o_cursor.scan_from <> '{}' then
            o_cursor := _pgqueue.cut(_pgqueue.raise_scan_from(o_cursor), p_want::int);
            exit when o_cursor.slots_until > '-infinity';
        end if;
        if _pgqueue.is_keyed(p_consumer.way) then
            v_served := _pgqueue.serve_ordered(p_consumer, o_cursor, p_claim_id, p_want - o_count, o_count,
                                               p_cuts and o_count = 0);
            o_cursor := v_served.o_cursor;
            o_count := o_count + v_served.o_count;
            exit when v_served.o_ended or (p_cuts and o_cursor.slots_until > '-infinity');
        elsif o_cursor.scan_from <> '{}' or o_cursor.scan_lanes_from is not null then
            for v_try in 0..5 loop
                if p_where is null then
                    v_served := _pgqueue.serve_ready(
                        p_consumer.consumer_id, o_cursor.scan_from, p_claim_id, p_want - o_count, p_want, o_count);
                else
                    v_look := _pgqueue.serve_matching(p_consumer, o_cursor, p_claim_id, p_where, p_want, p_look,
                                                      p_seen, true);
                    v_served := v_look.o_served;
                    p_seen := v_look.p_seen;
                end if;
                o_count := o_count + v_served.message_count;
                o_cursor := _pgqueue.raise_scan_from(o_cursor);
                exit passes when v_served.ended;
                -- (v_served.done is null after serve_ready(), which does not set it)
                exit when o_count > 0 or o_cursor.scan_from = '{}' or v_try = 5 or v_served.done;
                -- All ready messages are held by other claims, which are about to leave some or all of them: look
                -- again. (To wait for the row would follow it to a later version, whose owner may be settling it while
                -- it waits for the lock that is held here.)
                perform pg_sleep(0.0001 * 2 ^ v_try) where v_try > 0;
            end loop;
        end if;
        exit when o_count >= p_want or (o_count > 0 and not o_cursor.take_was_cut);
        if v_pass > 1 then
            exit when o_count > 0 or not o_cursor.take_was_cut;
            -- the claim has looked at enough messages that wait, or are for others: the next claim goes on
            exit when v_pass > 2
                and (_pgqueue.is_keyed(p_consumer.way) or p_consumer.filtered
                     or o_cursor.next_publication - p_cursor.next_publication
                        >= _pgqueue.limit_take() * _pgqueue.limit_takes());
            -- stop if ready messages are left that another claim holds: a further take would bring later messages
            o_cursor := _pgqueue.raise_scan_from(o_cursor);
            exit when o_cursor.scan_from <> '{}';
        end if;
    end loop;
    if _pgqueue.is_throttled(p_consumer) then
        o_cursor := _pgqueue.note_delivered(p_consumer, o_cursor, o_count - p_held);
    end if;
end $$;

-- Records a claim, of a checkpoint reader with the set that it has at first. The lease is computed here, after all
-- waiting.
--   p_reader  null: a worker's claim
create or replace function _pgqueue.open_claim(p_consumer pgqueue.consumers, p_claim_id bigint, p_count bigint,
                                               p_visibility_timeout interval, p_reader uuid) returns void
language plpgsql
as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_timeout interval := coalesce(p_visibility_timeout, p_consumer.visibility_timeout);
    v_set     record;
begin
    select range_agg(seqs) as seqs, range_agg(int8range(arrival_no, arrival_no, '[]')) as arrival_nos,
           array_agg(distinct lane) as lanes
    into v_set
    from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed' and p_reader is not null;
    insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout,
                                message_count, remaining, owner, archive, reader, seqs, arrival_nos, lanes)
    values (p_claim_id, p_consumer.consumer_id, _pgqueue.is_keyed(p_consumer.way), v_now, v_now + v_timeout, v_timeout,
            p_count, p_count, current_setting('application_name'), _pgqueue.notes_ends(p_consumer), p_reader,
            v_set.seqs, v_set.arrival_nos, v_set.lanes);
end $$;

-- Claims messages: the common part of claim and receive. For arguments, errors and locks see claim. Returns the claim;
-- message_count is 0 or null when nothing was claimed, and then no row of claims was written. (More than 60 lines: to
-- call a function takes as long as most of the questions here, for each message that is claimed alone.)
create or replace function _pgqueue.claim(p_stream text, p_consumer text, p_max int, p_visibility_timeout interval,
                                          p_ack bigint)
returns pgqueue.claimed
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_claim    pgqueue.claimed;
    v_in_turn  boolean;          -- the claim needs the consumer's lock
    v_acked    bigint;           -- null: p_ack is still to be acknowledged
    v_quick    pgqueue.served;
    v_cursor   pgqueue.consumer_cursors;
    v_slots    boolean;          -- the consumer has free slots, as far as is known
    v_next     boolean;          -- they come next, and have the size that the claim wants
    v_slot     pgqueue.claimed;
    v_max      int;              -- claim_in_turn() may reach so many, as the quick claim ended at a suspect; or null
    v_now      timestamptz;
    v_timeout  interval;
begin
    if current_setting('transaction_isolation') <> 'read committed' or p_max is null or p_max < 1
       or p_visibility_timeout is not null then
        perform _pgqueue.check_claim(p_max, p_visibility_timeout);
    end if;
    -- (a row as one value: column by column costs twice as much)
    v_consumer := c from pgqueue.consumers c where c.stream_name = p_stream and c.name = p_consumer;
    v_timeout := coalesce(p_visibility_timeout, v_consumer.visibility_timeout);
    if _pgqueue.is_simple(v_consumer.way) is not true then  -- (each question costs a little; nearly all need none)
        if v_consumer.consumer_id is null then
            v_consumer := _pgqueue.consumer(p_stream, p_consumer);  -- it raises, or somebody made it meanwhile
            v_timeout := coalesce(p_visibility_timeout, v_consumer.visibility_timeout);
        end if;
        if v_consumer.partitions is not null then
            perform _pgqueue.refuse_group(v_consumer);
        end if;
        if v_consumer.scheduled then
            perform _pgqueue.on_claim(v_consumer.stream_id);
        end if;
        if v_consumer.paused then
            perform _pgqueue.ack(p_ack) where p_ack is not null;
            return null;
        end if;
        v_in_turn := v_consumer.per_key_interval is not null or v_consumer.per_key_latest
            or _pgqueue.is_throttled(v_consumer)
            or (v_consumer.max_backlog is not null and _pgqueue.has_room(v_consumer) is not true);
    end if;
    if v_in_turn is not true then
        v_cursor := c from pgqueue.consumer_cursors c where c.consumer_id = v_consumer.consumer_id
            order by c.version desc limit 1;
        begin
            if p_ack is not null then
                v_acked := _pgqueue.ack(p_ack);
            end if;
            if _pgqueue.is_simple(v_consumer.way) and _pgqueue.need_not_look(v_cursor.slots_until)
               and (v_cursor.slots_size = p_max
                    or (_pgqueue.is_keyed(v_consumer.way) and _pgqueue.slots_fit(v_cursor.slots_size, p_max))) then
                if _pgqueue.is_keyed(v_consumer.way) then
                    v_slot := _pgqueue.claim_slot_by_key(v_consumer.stream_id, v_cursor, p_max, v_timeout);
                else
                    v_slot := _pgqueue.claim_slot(v_consumer.stream_id, v_cursor, p_max, v_timeout,
                                                  v_cursor.slots_priority);
                    if (_pgqueue.place_in(v_slot.claim_id) - v_cursor.slots_more) & 1048575 < 524288 then
                        perform _pgqueue.cut_ahead(v_cursor, p_max);
                    end if;
                end if;
                if v_slot.claim_id is not null then
                    return v_slot;
                end if;
                v_next := true;
            end if;
            v_slots := _pgqueue.has_slots(v_cursor);
            if v_slots and _pgqueue.is_simple(v_consumer.way)
               and (v_next or (not _pgqueue.is_keyed(v_consumer.way) and p_max <= _pgqueue.limit_slice_size()))
               and _pgqueue.slots_are_next(v_consumer.stream_id, v_cursor) then
                if not _pgqueue.is_keyed(v_consumer.way) and (p_max > 1 or v_cursor.slots_size > 1) then
                    v_slot := _pgqueue.claim_of_slots(v_consumer.stream_id, v_cursor, p_max, v_timeout);
                    if v_slot.claim_id is not null then
                        return v_slot;
                    end if;
                end if;
                v_slots := _pgqueue.has_slot(v_cursor);
            end if;
            v_claim.claim_id := _pgqueue.new_claim_id();
            v_claim.stream_id := v_consumer.stream_id;
            if _pgqueue.is_keyed(v_consumer.way) then
                v_quick := _pgqueue.claim_pieces(v_consumer, v_cursor, v_claim.claim_id, p_max);
            elsif v_slots is not true then
                v_quick := _pgqueue.claim_quickly(v_consumer, v_cursor, v_claim.claim_id, p_max, v_timeout);
                if v_quick.seqs is not null then
                    return (v_claim.claim_id | 1, v_quick.message_count, v_claim.stream_id, v_quick.seqs,
                            v_quick.priority);
                end if;
            end if;
            v_claim.message_count := coalesce(v_quick.message_count, 0);
            v_in_turn := v_quick.done is not true;
            if v_in_turn then
                if v_quick.ended then
                    v_max := v_claim.message_count;
                end if;
                if not _pgqueue.try_lock_consumer(v_consumer.consumer_id) then
                    -- another claimer works on the line: the slots, or the ready messages, suffice
                    if v_slots and _pgqueue.is_simple(v_consumer.way) and v_claim.message_count = 0 then
                        v_slot := _pgqueue.claim_a_slot(v_consumer, v_cursor, p_max, v_timeout);
                        if v_slot.claim_id is not null then
                            return v_slot;
                        end if;
                    end if;
                    if v_claim.message_count = 0 then
                        v_quick := _pgqueue.serve_ready(
                            v_consumer.consumer_id,
                            (_pgqueue.cursor(v_consumer.consumer_id)).scan_from,
                            v_claim.claim_id, p_max, case when not _pgqueue.is_keyed(v_consumer.way) then p_max end, 0);
                        v_claim.message_count := v_quick.message_count;
                    end if;
                    if v_claim.message_count = 0 then
                        raise exception using errcode = 'PQ099';
                    end if;
                    v_in_turn := false;
                end if;
            end if;
        exception when sqlstate 'PQ099' then  -- (PQ000 would stand for all of class PQ)
            -- This unlocks the slots and the runs of other claims that it looked at, before it waits for the lock; and
            -- takes back the acknowledgement. The session that has the lock may come upon those rows, and wait for them
            -- although it skips locked ones, where Postgres follows a row to its last version.
            v_acked := case when v_acked = 0 then 0 end;  -- an ack of 0 messages has warned, and is not repeated
        end;
    end if;
    if v_in_turn then
        v_claim.claim_id := coalesce(v_claim.claim_id, _pgqueue.new_claim_id());
        v_claim.stream_id := v_consumer.stream_id;
        v_slot := _pgqueue.claim_in_turn(v_consumer, v_claim.claim_id, coalesce(v_max, p_max),
                                         coalesce(v_claim.message_count, 0), case when v_acked is null then p_ack end,
                                         p_visibility_timeout);
        if _pgqueue.is_slot(v_slot.claim_id) then
            return v_slot;
        end if;
        v_claim.message_count := v_slot.message_count;
    end if;
    if v_claim.message_count > 0 then
        v_now := clock_timestamp();  -- after all waiting
        insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout,
                                    message_count, remaining, owner, archive)
        values (v_claim.claim_id, v_consumer.consumer_id, _pgqueue.is_keyed(v_consumer.way), v_now, v_now + v_timeout,
                v_timeout, v_claim.message_count, v_claim.message_count, current_setting('application_name'),
                _pgqueue.notes_ends(v_consumer));
    end if;
    return v_claim;
end $$;

-- Claims for a consumer with ordering=none. A few probes tell the cases that nearly all claims are:
--   * nothing is due or more urgent, and something is ready: it is claimed. That changes nothing of the cursor, and
--     needs no lock of the consumer;
--   * nothing is due or ready, but something was published: it is taken and claimed at once;
--   * there is nothing.
-- Returns the number of messages that the claim got; whether that is all, or the caller goes on with the consumer's
-- lock; and whether the claim ends there, as serve_ready() does. Locks: the runs it takes; maybe the consumer.
--   p_cursor  the cursor; it has no free slots
create or replace function _pgqueue.claim_quickly(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  p_claim_id bigint, p_max int, p_timeout interval)
returns pgqueue.served
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_new    pgqueue.publications;  -- the next one; null when there is none or nobody looked
    v_calm   boolean;  -- see below
    v_cuts   boolean;  -- a run that is too large is cut into slots, with the lock
    v_served pgqueue.served;
begin
    v_served.message_count := 0;
    v_served.done := false;
    if v_cursor.consumer_id is null then
        v_cursor := _pgqueue.cursor(p_consumer.consumer_id);  -- raises PQ002
    end if;
    -- no delay is over; scan_from has all lanes with ready runs; and no gap needs a look now: there are none, or the
    -- last look was less than 10 ms ago, or the last take was cut
    v_calm := (v_cursor.take_was_cut or v_cursor.gaps = '{}' or _pgqueue.need_not_look(v_cursor.gaps_probe))
        and v_cursor.scan_lanes_from is null and not _pgqueue.is_due(v_cursor.consumer_id, v_cursor.due_from);
    if v_calm and not v_cursor.take_was_cut then
        select * into v_new from pgqueue.publications
        where stream_id = p_consumer.stream_id and publication_id >= v_cursor.next_publication
          and publication_id < v_cursor.next_publication + _pgqueue.limit_unseen()
        order by publication_id, part limit 1;
        if not found and v_cursor.scan_from = '{}' and _pgqueue.is_idle(p_consumer, v_cursor) then
            v_served.done := true;
            return v_served;
        end if;
    end if;

    if v_calm and _pgqueue.need_not_look(v_cursor.lease_probe) then
        if v_cursor.scan_from <> '{}'
           and (v_new.publication_id is null or _pgqueue.can_wait(p_consumer.stream_id, v_cursor)) then
            v_cuts := _pgqueue.is_simple(p_consumer.way) and p_max <= _pgqueue.limit_slice_size();
            v_served := _pgqueue.serve_ready(v_cursor.consumer_id, v_cursor.scan_from, p_claim_id, p_max,
                                             case when not v_cuts then p_max end, 0);
            -- now and then the place where the line begins is stored anew, so that claims do not walk over all runs
            -- that were claimed
            v_served.done := (v_served.message_count = p_max or v_served.ended
                              or (v_served.message_count > 0 and v_new.publication_id is null
                                  and not v_cursor.take_was_cut
                                  and not (v_cuts and _pgqueue.has_ready(v_cursor))))
                and random() * _pgqueue.limit_behind() >= v_served.runs;
        end if;
        if v_served.message_count = 0 and v_cursor.gaps = '{}' and v_new.publication_id = v_cursor.next_publication then
            if _pgqueue.is_simple(p_consumer.way) and p_max <= _pgqueue.limit_slice_size() then
                v_served := _pgqueue.claim_new_slot(p_consumer, v_cursor, v_new, p_claim_id, p_max, p_timeout);
            else
                v_served := _pgqueue.claim_new(p_consumer, v_cursor, v_new, p_claim_id, p_max);
            end if;
            v_served.done := v_served.message_count > 0;
        end if;
    end if;
    return v_served;
end $$;

-- Claims with the consumer's lock all that can be had; see claim. A small claim of a simple consumer has a slot: of
-- those that another claimer has just cut, or of new ones. Otherwise the caller records the claim.
--   p_held  messages that the claim has already
--   p_ack   a claim to acknowledge before; null: none
--   p_where, p_look, p_seen  as of fill()
-- Returns the claim, and how many messages it has then: no more where another transaction keeps the lock.
create or replace function _pgqueue.claim_in_turn(p_consumer pgqueue.consumers, p_claim_id bigint, p_max int,
                                                  p_held bigint, p_ack bigint,
                                                  p_visibility_timeout interval default null,
                                                  p_where jsonpath default null, p_look int default null,
                                                  p_seen int8multirange default null)
returns pgqueue.claimed
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_fill   record;
    v_cuts   boolean := _pgqueue.is_simple(p_consumer.way) and p_held = 0 and p_where is null
        and p_max <= _pgqueue.largest_piece(p_consumer);
    v_timeout interval := coalesce(p_visibility_timeout, p_consumer.visibility_timeout);
    v_claim  pgqueue.claimed;
begin
    perform _pgqueue.lock_claims(array[p_ack]) where p_ack is not null;  -- in the order of locks
    if not _pgqueue.lock_consumer_soon(p_consumer.consumer_id) then  -- a claim in a transaction that stays open has it
        perform _pgqueue.ack(p_ack) where p_ack is not null;
        return (p_claim_id, p_held, null, null, null)::pgqueue.claimed;
    end if;
    perform _pgqueue.ack(p_ack) where p_ack is not null;
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    if v_stored.slots_low is not null and not _pgqueue.is_simple(p_consumer.way) then  -- older than its settings
        perform _pgqueue.without_slots(p_consumer.consumer_id);
        v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    end if;
    -- another claimer may have cut some a moment ago
    if v_cuts and _pgqueue.has_slots(v_stored) and _pgqueue.slots_are_next(p_consumer.stream_id, v_stored) then
        v_claim := _pgqueue.claim_a_slot(p_consumer, v_stored, p_max, v_timeout);
        if v_claim.claim_id is not null then
            return v_claim;
        end if;
    end if;
    loop
        v_cursor := v_stored;
        if v_cursor.slots_low is not null then
            v_cursor := case when _pgqueue.is_keyed(p_consumer.way)
                                  and (p_held > 0 or (v_cuts and _pgqueue.slots_fit(v_cursor.slots_size, p_max)
                                                      and not _pgqueue.has_slot(v_cursor, p_max)))
                             then _pgqueue.raise_slots(v_cursor)  -- what is dealt now stands beside them
                             else _pgqueue.flush(v_cursor) end;
        end if;
        v_cursor.slots_until := '-infinity';  -- fill() sets it, and save_cursor() keeps that
        v_stored.slots_until := '-infinity';
        v_fill := _pgqueue.fill(p_consumer, v_cursor, p_claim_id, p_max, null, p_held, p_where, p_look, p_seen, v_cuts);
        v_cuts := v_cuts and (v_fill.o_cursor).slots_until > '-infinity';  -- there are slots
        perform _pgqueue.save_cursor(v_stored, v_fill.o_cursor, v_cuts or v_fill.o_count > 0);
        exit when not v_cuts;
        v_claim := _pgqueue.claim_a_slot(p_consumer, v_fill.o_cursor, p_max, v_timeout);
        if v_claim.claim_id is not null then
            return v_claim;
        end if;
        v_cuts := false;  -- a slot of another size comes first: its claimer rolled back
        v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    end loop;
    return (p_claim_id, v_fill.o_count, null, null, null)::pgqueue.claimed;
end $$;
