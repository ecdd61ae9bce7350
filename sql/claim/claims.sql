-- Making a claim, from its beginning (begin_claim()) to its record. Without waiting, from slots and the ready messages
-- (claim_unlocked()); or in turn, with the consumer's lock (claim_in_turn()): refresh() does the work that is due, and
-- fill() gets the messages.

-- Claims pieces that are ready, as long as nothing is due: that needs no lock of the consumer. Messages that were
-- published meanwhile come after these pieces. Returns as claim_quickly(). Locks: the pieces.
create or replace function _pgqueue.claim_pieces(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 p_claim_id bigint, p_max int)
returns pgqueue.served
language plpgsql
as $$
declare
    v_served pgqueue.served;
begin
    if p_cursor.consumer_id is null then
        p_cursor := _pgqueue.cursor(p_consumer.consumer_id);  -- raises PQ002
    end if;
    v_served.message_count := 0;
    v_served.done := false;
    if p_cursor.tokens_from <= clock_timestamp() or _pgqueue.is_due(p_cursor.consumer_id, p_cursor.due_from) then
        return v_served;
    elsif (p_cursor.scan_from[1]).lane = 0 and _pgqueue.need_not_look(p_cursor.lease_probe) then
        v_served := _pgqueue.serve_ready(p_cursor.consumer_id, p_cursor.scan_from, p_claim_id, p_max, null, 0);
        v_served.done := v_served.message_count > 0 and random() * _pgqueue.limit_behind() >= v_served.runs
            and (v_served.ended or 2 * v_served.message_count > p_max or _pgqueue.has_ready_piece(p_cursor));
    elsif p_consumer.ordering = 'stream' and p_cursor.slots_low is not null
          and _pgqueue.need_not_look(p_cursor.lease_probe) then
        v_served.done := exists (  -- while the one slot is claimed, nothing else can be had
            select from pgqueue.slots
            where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low and token is not null);
    elsif p_cursor.scan_from = '{}' and not p_cursor.take_was_cut then
        v_served.done := not _pgqueue.may_have_freed(p_cursor) and _pgqueue.is_idle(p_consumer, p_cursor);
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

-- Claims messages: the common part of claim and receive. For arguments, errors and locks see claim. Returns the claim;
-- message_count is 0 or null when nothing was claimed, and then no row of claims was written.
create or replace function _pgqueue.claim(p_stream text, p_consumer text, p_max int, p_visibility_timeout interval,
                                          p_ack bigint) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_cursor   pgqueue.consumer_cursors;
    v_in_turn  boolean;  -- the claim needs the consumer's lock
    v_acked    bigint;   -- null: p_ack is still to be acknowledged
    v_fits     boolean;  -- slots come next, and have the size that the claim wants
    v_claim    pgqueue.claimed;
begin
    -- (a row as one value: column by column costs twice as much)
    v_consumer := c from pgqueue.consumers c where c.stream_name = p_stream and c.name = p_consumer;
    if v_consumer.scheduled is not false or v_consumer.partitions is not null or p_max is null or p_max < 1
       or p_visibility_timeout is not null or current_setting('transaction_isolation') <> 'read committed' then
        v_consumer := _pgqueue.begin_claim('claim', p_max, p_visibility_timeout, p_stream, p_consumer);
    end if;
    if not _pgqueue.is_simple(v_consumer.way) then  -- (each question costs a little; nearly all consumers need none)
        if v_consumer.paused then
            perform _pgqueue.ack(p_ack) where p_ack is not null;
            return null;
        end if;
        v_in_turn := _pgqueue.claims_in_turn(v_consumer);
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
                v_claim := _pgqueue.claim_slot(v_consumer.stream_id, _pgqueue.is_keyed(v_consumer.way), v_cursor, p_max,
                                               v_consumer.visibility_timeout, v_cursor.slots_priority);
                if v_claim.claim_id is not null then
                    return v_claim;  -- nearly all claims end here
                end if;
                v_fits := true;
            end if;
            v_claim := _pgqueue.claim_unlocked(v_consumer, v_cursor, p_max, v_fits);
        exception when sqlstate 'PQ099' then  -- (PQ000 would stand for all of class PQ)
            -- This takes back the acknowledgement, and unlocks what it looked at, before it waits. The session that has
            -- the lock may wait for such a row although it skips locked ones: where Postgres follows a row's versions.
            v_acked := case when v_acked = 0 then 0 end;  -- an ack of 0 messages has warned, and is not repeated
            v_in_turn := true;
        end;
    end if;
    if v_in_turn then
        v_claim := _pgqueue.claim_in_turn(v_consumer, _pgqueue.new_claim_id(), p_max, 0,
                                          case when v_acked is null then p_ack end);
    end if;
    if v_claim.message_count > 0 and not _pgqueue.is_slot(v_claim.claim_id) then
        v_claim.claim_id := _pgqueue.record_claim(
            _pgqueue.new_claim(v_consumer, v_claim.claim_id, v_claim.message_count));
    end if;
    return v_claim;
end $$;

-- Claims without waiting for the consumer's lock: slots, or what is ready. If that does not suffice, and nobody has the
-- lock, the claim goes on with it. Beside another claimer, who works on the line, slots of other sizes, or messages
-- that are ready, suffice.
--   p_fits  slots come next, and have the size that the claim wants; but there was none
-- Returns the claim; its message_count is 0 when there is nothing. Only that of a slot is recorded. Errors: PQ099 when
-- who waits for the lock may find something: the caller has to let go of what this looked at. Locks: slots, runs; maybe
-- the consumer.
create or replace function _pgqueue.claim_unlocked(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                   p_max int, p_fits boolean) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_claim  pgqueue.claimed;
    v_slot   pgqueue.claimed;
    v_slots  boolean := _pgqueue.has_slots(p_cursor);  -- the consumer has free slots, as far as is known
    v_served pgqueue.served;
begin
    if v_slots and _pgqueue.is_simple(p_consumer.way)
       and (p_fits or (not _pgqueue.is_keyed(p_consumer.way) and p_max <= _pgqueue.limit_slice_size()))
       and _pgqueue.slots_are_next(p_consumer.stream_id, p_cursor) then
        if not _pgqueue.is_keyed(p_consumer.way) and (p_max > 1 or p_cursor.slots_size > 1) then
            v_slot := _pgqueue.claim_of_slots(p_consumer.stream_id, p_cursor, p_max, p_consumer.visibility_timeout);
            if v_slot.claim_id is not null then
                return v_slot;  -- of some slots, or of a part of one
            end if;
        end if;
        v_slots := _pgqueue.has_slot(p_cursor);
    end if;
    v_claim.claim_id := _pgqueue.new_claim_id();
    v_claim.stream_id := p_consumer.stream_id;
    if _pgqueue.is_keyed(p_consumer.way) then
        v_served := _pgqueue.claim_pieces(p_consumer, p_cursor, v_claim.claim_id, p_max);
    elsif v_slots is not true then
        v_served := _pgqueue.claim_quickly(p_consumer, p_cursor, v_claim.claim_id, p_max);
    end if;
    v_claim.message_count := coalesce(v_served.message_count, 0);
    if v_served.seqs is not null then
        return (v_claim.claim_id | 1, v_claim.message_count, v_claim.stream_id, v_served.seqs, v_served.priority);
    elsif v_served.done is not true and _pgqueue.try_lock_consumer(p_consumer.consumer_id) then
        return _pgqueue.claim_in_turn(p_consumer, v_claim.claim_id,
                                      case when v_served.ended then v_claim.message_count::int else p_max end,
                                      v_claim.message_count, null);
    elsif v_served.done is not true and v_claim.message_count = 0 then  -- somebody has the lock
        if v_slots and _pgqueue.is_simple(p_consumer.way) then
            v_slot := _pgqueue.claim_slot(p_consumer.stream_id, _pgqueue.is_keyed(p_consumer.way), p_cursor, p_max,
                                          p_consumer.visibility_timeout);
            if v_slot.claim_id is not null then
                return v_slot;
            end if;
        end if;
        v_claim.message_count := (_pgqueue.serve_ready(
            p_consumer.consumer_id, (_pgqueue.cursor(p_consumer.consumer_id)).scan_from, v_claim.claim_id, p_max,
            case when not _pgqueue.is_keyed(p_consumer.way) then p_max end, 0)).message_count;
        if v_claim.message_count = 0 then
            raise exception using errcode = 'PQ099';
        end if;
    end if;
    return v_claim;  -- that is all: what it wants, or what there is
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
                                                  p_claim_id bigint, p_max int)
returns pgqueue.served
language plpgsql
as $$
declare
    v_new    pgqueue.publications;  -- the next one; null when there is none or nobody looked
    v_calm   boolean;  -- see below
    v_cuts   boolean;  -- a run that is too large is cut into slots, with the lock
    v_served pgqueue.served;
begin
    v_served.message_count := 0;
    v_served.done := false;
    if p_cursor.consumer_id is null then
        p_cursor := _pgqueue.cursor(p_consumer.consumer_id);  -- raises PQ002
    end if;
    -- no delay is over; scan_from has all lanes with ready runs; and no gap needs a look now: there are none, or the
    -- last look was less than 10 ms ago, or the last take was cut
    v_calm := (p_cursor.take_was_cut or p_cursor.gaps = '{}' or _pgqueue.need_not_look(p_cursor.gaps_probe))
        and p_cursor.scan_lanes_from is null and not _pgqueue.is_due(p_cursor.consumer_id, p_cursor.due_from);
    if v_calm and not p_cursor.take_was_cut then
        select * into v_new from pgqueue.publications
        where stream_id = p_consumer.stream_id and publication_id >= p_cursor.next_publication
          and publication_id < p_cursor.next_publication + _pgqueue.limit_unseen()
        order by publication_id, part limit 1;
        if not found and p_cursor.scan_from = '{}' and _pgqueue.is_idle(p_consumer, p_cursor) then
            v_served.done := true;
            return v_served;
        end if;
    end if;

    if v_calm and _pgqueue.need_not_look(p_cursor.lease_probe) then
        if p_cursor.scan_from <> '{}'
           and (v_new.publication_id is null or _pgqueue.can_wait(p_consumer.stream_id, p_cursor)) then
            v_cuts := _pgqueue.is_simple(p_consumer.way) and p_max <= _pgqueue.limit_slice_size();
            v_served := _pgqueue.serve_ready(p_cursor.consumer_id, p_cursor.scan_from, p_claim_id, p_max,
                                             case when not v_cuts then p_max end, 0);
            -- now and then the place where the line begins is stored anew, so that claims do not walk over all runs
            -- that were claimed
            v_served.done := (v_served.message_count = p_max or v_served.ended
                              or (v_served.message_count > 0 and v_new.publication_id is null
                                  and not p_cursor.take_was_cut
                                  and not (v_cuts and _pgqueue.has_ready(p_cursor))))
                and random() * _pgqueue.limit_behind() >= v_served.runs;
        end if;
        if v_served.message_count = 0 and p_cursor.gaps = '{}' and v_new.publication_id = p_cursor.next_publication then
            if _pgqueue.is_simple(p_consumer.way) and p_max <= _pgqueue.limit_slice_size() then
                v_served := _pgqueue.claim_new_slot(p_consumer, p_cursor, v_new, p_claim_id, p_max);
            else
                v_served := _pgqueue.claim_new(p_consumer, p_cursor, v_new, p_claim_id, p_max);
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
                                                  p_where jsonpath default null, p_look int default null,
                                                  p_seen int8multirange default null)
returns pgqueue.claimed
language plpgsql
as $$
declare
    v_locked boolean;
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_fill   record;
    v_cuts   boolean := _pgqueue.is_simple(p_consumer.way) and p_held = 0 and p_where is null
        and p_max <= _pgqueue.largest_piece(p_consumer);
    v_claim  pgqueue.claimed;
begin
    perform _pgqueue.lock_claims(array[p_ack]) where p_ack is not null;  -- in the order of locks
    v_locked := _pgqueue.lock_consumer_soon(p_consumer.consumer_id);
    perform _pgqueue.ack(p_ack) where p_ack is not null;
    if not v_locked then  -- a claim in a transaction that stays open has it
        return (p_claim_id, p_held, p_consumer.stream_id, null, null)::pgqueue.claimed;
    end if;
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    if v_stored.slots_low is not null and not _pgqueue.is_simple(p_consumer.way) then  -- older than its settings
        perform _pgqueue.without_slots(p_consumer.consumer_id);
        v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    end if;
    -- another claimer may have cut some a moment ago
    if v_cuts and _pgqueue.has_slots(v_stored) and _pgqueue.slots_are_next(p_consumer.stream_id, v_stored) then
        v_claim := _pgqueue.claim_slot(p_consumer.stream_id, _pgqueue.is_keyed(p_consumer.way), v_stored, p_max,
                                       p_consumer.visibility_timeout);
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
        v_claim := _pgqueue.claim_slot(p_consumer.stream_id, _pgqueue.is_keyed(p_consumer.way), v_fill.o_cursor, p_max,
                                       p_consumer.visibility_timeout);
        if v_claim.claim_id is not null then
            return v_claim;
        end if;
        v_cuts := false;  -- a slot of another size comes first: its claimer rolled back
        v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    end loop;
    return (p_claim_id, v_fill.o_count, p_consumer.stream_id, null, null)::pgqueue.claimed;
end $$;
