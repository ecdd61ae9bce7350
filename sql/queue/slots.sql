-- Slots: messages of a consumer that were cut ahead for small claims (claim/slots.sql). They stand at the front of the
-- line, and nothing that is ready comes before them. A claim of a free slot is one update of its row, without any lock
-- but the row's. By key, slots are pieces, or parts of one (queue/pieces.sql).
--
-- Slots by key stand beside pieces, and only where a consumer is simple. The alternative was to let pieces go. But a
-- claimed slot that becomes a claim of the usual kind, as for a retry, still has to hold its keys: its row would stay,
-- with the keys, until a dealer finds that the claim is gone. That is what a row of pieces is; and one such row serves
-- all slots of a deal. Spark's readers, rates of keys, and claims of more than a slot need these rows, too.
--
-- Whoever looks at, or moves, what is ready of a consumer puts the slots back first: flush(). Who needs the consumer's
-- claims as well lets claimed slots become claims of the usual kind: own_consumer().

-- Whether a consumer has free slots that come before its ready runs, as far as its cursor says. Not so where other
-- sessions were claiming all that was left when the slots were put back.
create or replace function _pgqueue.has_slots(p_cursor pgqueue.consumer_cursors) returns boolean
language sql immutable
as $$ select p_cursor.slots_from is not null and p_cursor.slots_to > p_cursor.slots_from $$;

-- Stores messages that were never delivered as ready runs of a consumer with ordering=none. Returns their place.
create or replace function _pgqueue.put_in_line(p_consumer_id int, p_priority int, p_arrival_no bigint,
                                                p_seqs int8multirange) returns pgqueue.line_place
language plpgsql
as $$
declare
    v_run pgqueue.consumer_messages;
begin
    v_run.consumer_id := p_consumer_id;
    v_run.state := 'ready';
    v_run.lane := -p_priority;
    v_run.priority := p_priority;
    v_run.deliver_count := 0;
    v_run.arrival_no := p_arrival_no;
    v_run.line_no := p_arrival_no;
    perform _pgqueue.store_run(v_run, p_seqs);
    return (v_run.lane, v_run.line_no, lower(p_seqs))::pgqueue.line_place;
end $$;

-- Puts the free slots of a consumer back into the line, as ready runs, but those that somebody is claiming. By key they
-- become ready pieces, and runs that wait. How many slots are cut next time goes by how many of these were used.
-- Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.flush(p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_part   record;
    v_free   bigint := 0;
    v_places pgqueue.line_place[] := '{}';
begin
    if p_cursor.slots_low is null then
        return p_cursor;
    end if;
    for v_part in
        with gone as (
            delete from pgqueue.slots where ctid = any (array(
                select ctid from pgqueue.slots
                where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low and token is null
                for update skip locked))  -- lock: slot
            returning *
        ), by_key as (
            insert into pgqueue.consumer_messages
            select r.* from gone g cross join lateral _pgqueue.runs_of_slot(g::pgqueue.slots) r
            where g.piece is not null
            returning state, lane, line_no
        )
        select priority, arrival_no, range_agg(seqs) as seqs, count(*) as slots, null::int as lane,
               null::bigint as place
        from gone where piece is null group by 1, 2
        union all
        select null, null, null, 0, lane, min(line_no) from by_key where state = 'ready' group by lane
    loop
        if v_part.slots > 0 then
            v_places := v_places || _pgqueue.put_in_line(p_cursor.consumer_id, v_part.priority, v_part.arrival_no,
                                                         v_part.seqs);
            v_free := v_free + v_part.slots;
        else
            v_places := v_places || (v_part.lane, v_part.place, 0)::pgqueue.line_place;
        end if;
    end loop;
    p_cursor := _pgqueue.lower_scan_from(p_cursor, v_places);
    p_cursor.slots_ahead := coalesce(p_cursor.slots_ahead, _pgqueue.limit_slots());
    p_cursor.slots_ahead := least(_pgqueue.limit_slots(),
                                  greatest(2, p_cursor.slots_ahead / 2, 2 * (p_cursor.slots_ahead - v_free)));
    p_cursor := _pgqueue.raise_slots(p_cursor);
    p_cursor.slots_to := p_cursor.slots_from;  -- somebody has all that are left
    return p_cursor;
end $$;

-- Moves the places from which claims look at slots up to the first slots that are there. Returns the cursor, for which
-- nobody knows what comes before the slots. Needs the consumer's lock.
create or replace function _pgqueue.raise_slots(p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    -- also a slot that a claim takes now: that claim may be rolled back; and one that goes on, and is free then. (No
    -- slot before slots_from becomes free.)
    p_cursor.slots_from := (select slot from pgqueue.slots
                            where consumer_id = p_cursor.consumer_id and (token is null or rest is not null)
                              and slot >= coalesce(p_cursor.slots_from, p_cursor.slots_block, p_cursor.slots_low)
                            order by slot limit 1);
    p_cursor.slots_to := 9223372036854775807;
    p_cursor.slots_low := (select slot from pgqueue.slots
                           where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low
                           order by slot limit 1);
    p_cursor.slots_until := '-infinity';
    return p_cursor;
end $$;

-- When the next delay of a consumer ends; null: nothing of it is delayed.
create or replace function _pgqueue.next_delayed(p_cursor pgqueue.consumer_cursors) returns timestamptz
language plpgsql stable
as $$
begin
    return (select not_visible_until from pgqueue.consumer_messages
            where consumer_id = p_cursor.consumer_id and state = 'delayed' and not_visible_until >= p_cursor.due_from
            order by not_visible_until limit 1);
end $$;

-- By key: whether the slots of a consumer have the size that a claim wants, or come near it.
create or replace function _pgqueue.slots_fit(p_size int, p_max int) returns boolean
language sql immutable parallel safe
as $$ select p_max <= _pgqueue.limit_slice_size() and p_size between (p_max + 1) / 2 and p_max $$;

-- Whether there is a free slot, of whatever size, that no other session is claiming; or slots may have been cut since
-- the cursor was read. Locks: a slot.
--   p_over  only slots of more messages
create or replace function _pgqueue.has_slot(p_cursor pgqueue.consumer_cursors, p_over int default 0) returns boolean
language plpgsql
as $$
begin
    perform from pgqueue.slots
    where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_from and slot < p_cursor.slots_to
      and token is null and message_count > p_over
    limit 1 for update skip locked;  -- lock: slot
    if found then
        return true;
    end if;
    return not exists (select from pgqueue.consumer_cursors
                       where consumer_id = p_cursor.consumer_id and version = p_cursor.version);
end $$;

-- Stores a claim as a slot.
--   p_token  the random bits of its id
create or replace function _pgqueue.store_claimed_slot(p_consumer_id int, p_slot bigint, p_token bigint,
                                                       p_arrival_no bigint, p_priority int, p_seqs int8multirange,
                                                       p_count bigint, p_timeout interval) returns void
language plpgsql
as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    insert into pgqueue.slots (slot, arrival_no, token, claimed_at, lease_until, consumer_id, priority, message_count,
                               seqs, timeout, owner)
    values (p_slot, p_arrival_no, p_token, v_now, v_now + p_timeout, p_consumer_id, p_priority, p_count, p_seqs,
            p_timeout, current_setting('application_name'));
end $$;

-- Begins a block of slots, with this number. What is claimed of the slots before the last block becomes claims of the
-- usual kind: so few slots have to be looked at. Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.begin_block(p_cursor pgqueue.consumer_cursors, p_from bigint)
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    perform _pgqueue.promote(array(
        select ctid from pgqueue.slots
        where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low and slot < p_cursor.slots_block
          and token is not null
        for update skip locked));  -- lock: slot
    p_cursor.slots_low := coalesce((select slot from pgqueue.slots
                                    where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low
                                    order by slot limit 1), p_from);
    p_cursor.slots_block := p_from;
    return p_cursor;
end $$;

-- Begins a block of slots by key, with this number, as begin_block(). But what is claimed becomes claims of the usual
-- kind only if it was claimed a second ago: what comes next of its key waits from then on. Only the first slots are
-- looked at, so that dead rows behind them cost nothing.
create or replace function _pgqueue.begin_block_by_key(p_cursor pgqueue.consumer_cursors, p_from bigint)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_first pgqueue.slots;
begin
    loop
        select * into v_first from pgqueue.slots
        where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low order by slot limit 1;
        p_cursor.slots_low := coalesce(v_first.slot, p_from);
        exit when v_first.slot is null
            or (v_first.slot < p_cursor.slots_block and v_first.claimed_at < clock_timestamp() - interval '1 s'
                and _pgqueue.promote(array(select ctid from pgqueue.slots
                                           where consumer_id = p_cursor.consumer_id and slot = v_first.slot
                                           for update skip locked)) > 0) is not true;  -- lock: slot
    end loop;
    p_cursor.slots_block := p_from;
    return p_cursor;
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

-- Stores free slots: messages that come next in the line, of which nothing that is ready comes before. Returns the
-- cursor. Needs the consumer's lock. The block has begun (begin_block()).
--   p_arrivals  the arrival_no of each slot
--   p_size      messages of a slot
--   p_parts     the messages of each slot
create or replace function _pgqueue.lay_slots(p_cursor pgqueue.consumer_cursors, p_arrivals bigint[], p_priority int,
                                              p_size int, p_parts int8multirange[])
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    insert into pgqueue.slots (slot, arrival_no, consumer_id, priority, message_count, seqs)
    select nextval('pgqueue.claim_numbers'), p.arrival_no, p_cursor.consumer_id, p_priority, p_size, p.seqs
    from (select arrival_no, seqs from unnest(p_arrivals, p_parts) with ordinality u (arrival_no, seqs, i)
          order by i) p;
    p_cursor.slots_to := currval('pgqueue.claim_numbers') + 1;
    -- also a slot that a claim takes now: that claim may be rolled back
    p_cursor.slots_from := (select slot from pgqueue.slots
                            where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low and token is null
                            order by slot limit 1);
    p_cursor.slots_more := p_cursor.slots_to - (cardinality(p_parts) + 3) / 4;
    p_cursor.slots_priority := case when not p_cursor.take_was_cut then p_priority end;
    p_cursor.slots_size := p_size;
    p_cursor.slots_until := least(
        p_cursor.lease_probe,
        case when p_cursor.gaps <> '{}' and not p_cursor.take_was_cut then p_cursor.gaps_probe end,
        _pgqueue.next_delayed(p_cursor));
    return p_cursor;
end $$;

-- Puts the slots of a consumer back, and lets those that are claimed become claims of the usual kind; but those that
-- somebody is claiming or settling. Needs the consumer's lock.
create or replace function _pgqueue.without_slots(p_consumer_id int) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors := (select c from pgqueue.consumer_cursors c
                                          where c.consumer_id = p_consumer_id order by c.version desc limit 1);
begin
    if v_stored.slots_low is not null then
        perform _pgqueue.promote(array(
            select ctid from pgqueue.slots
            where consumer_id = p_consumer_id and slot >= v_stored.slots_low and token is not null
            for update skip locked));  -- lock: slot
        perform _pgqueue.save_cursor(v_stored, _pgqueue.flush(v_stored), true);
    end if;
end $$;

-- Locks a consumer for a caller that needs all its runs and claims as rows of consumer_messages and claims. Of a
-- consumer that was dropped, it takes the lock alone. Errors: as lock_consumer(). Locks: the consumer; it waits for no
-- slot.
create or replace function _pgqueue.own_consumer(p_consumer_id int) returns void
language plpgsql
as $$
begin
    perform _pgqueue.lock_consumer(p_consumer_id);
    perform _pgqueue.without_slots(p_consumer_id);
end $$;

-- The same for a caller that changes how the consumer claims: it waits for claimers that are taking slots, too. Returns
-- the cursor; null while the consumer is being created.
create or replace function _pgqueue.own_consumer_and_slots(p_consumer_id int) returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    perform _pgqueue.lock_consumer(p_consumer_id);
    perform from pgqueue.slots where consumer_id = p_consumer_id for update;  -- lock: slot
    perform _pgqueue.without_slots(p_consumer_id);
    return (select c from pgqueue.consumer_cursors c where consumer_id = p_consumer_id order by version desc limit 1);
end $$;
