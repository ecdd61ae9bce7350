-- A consumer's cursor (tables/consumers.sql has its fields): reading it, storing it, and its hints where the line
-- begins.

-- Whether the delay of a run is over, and no claim has ended it yet.
--   p_due_from  the cursor's due_from: no delayed run is due before that time
create or replace function _pgqueue.is_due(p_consumer_id int, p_due_from timestamptz) returns boolean
language plpgsql volatile
as $$
begin
    return ((select not_visible_until from pgqueue.consumer_messages
             where consumer_id = p_consumer_id and state = 'delayed' and not_visible_until >= p_due_from
             order by not_visible_until limit 1) <= clock_timestamp()) is true;
end $$;

-- Reads a consumer's cursor. Errors: PQ002 when the consumer was dropped meanwhile.
create or replace function _pgqueue.cursor(p_consumer_id int) returns pgqueue.consumer_cursors
language plpgsql stable
as $$
declare
    v_cursor pgqueue.consumer_cursors := (select c from pgqueue.consumer_cursors c
                                          where c.consumer_id = p_consumer_id order by c.version desc limit 1);
begin
    if v_cursor.consumer_id is null then
        raise exception 'the consumer was dropped' using errcode = 'PQ002', hint = 'Create it again.';
    end if;
    return v_cursor;
end $$;

-- Stores a cursor if it differs from the stored cursor: inserts a new version and deletes the one before.
--   p_busy  something was claimed or settled. Otherwise a look alone is worth no write, except for look_anew().
-- Needs the consumer's lock.
create or replace function _pgqueue.save_cursor(p_stored pgqueue.consumer_cursors, p_cursor pgqueue.consumer_cursors,
                                                p_busy boolean) returns void
language plpgsql
as $$
begin
    if not p_busy and p_cursor.looked_at = p_stored.looked_at then
        p_cursor.lease_probe := p_stored.lease_probe;
        p_cursor.leases_from := p_stored.leases_from;
    end if;
    if not p_busy then
        p_cursor.gaps_probe := p_stored.gaps_probe;
    end if;
    -- Who has changed something may have put it before the slots. (Who knows better has set this time himself.)
    if p_cursor.slots_until = p_stored.slots_until then
        p_cursor.slots_until := '-infinity';
    end if;
    if p_cursor is distinct from p_stored then
        delete from pgqueue.consumer_cursors where consumer_id = p_stored.consumer_id and version = p_stored.version;
        p_cursor.version := p_stored.version + 1;
        insert into pgqueue.consumer_cursors select p_cursor.*;
    end if;
end $$;

-- Notes that runs became ready at these places: claims look at the line from there on, or from where they did before.
-- Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.lower_scan_from(p_cursor pgqueue.consumer_cursors, p_places pgqueue.line_place[])
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_beyond int;
begin
    if coalesce(cardinality(p_places), 0) = 0 then
        return p_cursor;
    elsif p_cursor.scan_from = '{}' and cardinality(p_places) = 1 and p_cursor.scan_lanes_from is null then
        p_cursor.scan_from := p_places;
        return p_cursor;
    end if;
    select array_agg((f.lane, f.line_no, f.first_seq)::pgqueue.line_place order by f.lane)
               filter (where f.i <= _pgqueue.limit_lanes()),
           min(f.lane) filter (where f.i > _pgqueue.limit_lanes())
    into p_cursor.scan_from, v_beyond
    from (select distinct on (lane) lane, line_no, first_seq, dense_rank() over (order by lane) as i
          from unnest(p_cursor.scan_from || p_places)
          where lane < p_cursor.scan_lanes_from is not false
          order by lane, line_no, first_seq) f;
    p_cursor.scan_from := coalesce(p_cursor.scan_from, '{}');
    p_cursor.scan_lanes_from := least(p_cursor.scan_lanes_from, v_beyond);
    return p_cursor;
end $$;

-- Moves the places from which claims look at the line up to the first ready runs that are there. The places are exact:
-- runs become ready only under the consumer's lock, and a run that another claimer is slicing is still seen where it
-- was. Needs that lock. Returns the cursor; its scan_from is empty when nothing is ready, and no slot has all keys.
create or replace function _pgqueue.raise_scan_from(p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_next pgqueue.line_place;
begin
    p_cursor.scan_from := (
        select coalesce(array_agg((f.lane, m.line_no, m.first_seq)::pgqueue.line_place order by f.lane), '{}')
        from unnest(p_cursor.scan_from) f
        cross join lateral (select line_no, first_seq from pgqueue.consumer_messages
                            where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = f.lane
                              and (line_no, first_seq) >= (f.line_no, f.first_seq)
                            order by line_no, first_seq limit 1) m);
    while p_cursor.scan_lanes_from is not null and cardinality(p_cursor.scan_from) < _pgqueue.limit_lanes() loop
        select lane, line_no, first_seq into v_next from pgqueue.consumer_messages
        where consumer_id = p_cursor.consumer_id and state = 'ready' and lane >= p_cursor.scan_lanes_from
        order by lane, line_no, first_seq limit 1;
        p_cursor.scan_lanes_from := v_next.lane + 1;  -- null when there is none
        if v_next.lane is not null then
            p_cursor.scan_from := p_cursor.scan_from || v_next;
        end if;
    end loop;
    if p_cursor.slots_low is not null then
        -- the slot of a consumer with ordering=stream (cut_line()) stands in the line, too: what it goes on with may
        -- become ready there without this cursor (promote())
        p_cursor := _pgqueue.lower_scan_from(p_cursor, array(
            select (1, arrival_no, lower(seqs))::pgqueue.line_place
            from (select * from pgqueue.slots
                  where consumer_id = p_cursor.consumer_id and slot >= p_cursor.slots_low order by slot limit 1) s
            where whole));
    end if;
    return p_cursor;
end $$;

-- Whether the hints of a cursor were told from what is stored within the last minute.
create or replace function _pgqueue.looked_lately(p_cursor pgqueue.consumer_cursors) returns boolean
language sql volatile
as $$
    select clock_timestamp() >= p_cursor.looked_at and clock_timestamp() < p_cursor.looked_at + interval '1 minute'
$$;

-- Tells all hints of a cursor from what is stored. What a hint hides, for whatever reason, is found then. Reads dead
-- rows that a long transaction elsewhere keeps. Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.look_anew(p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_id        int := p_cursor.consumer_id;
    v_stream_id int := (select stream_id from pgqueue.consumers where consumer_id = v_id);
begin
    if p_cursor.next_publication > _pgqueue.last_publication_id(v_stream_id) + 1 then
        perform _pgqueue.refuse_to_look(v_stream_id);
    end if;
    p_cursor.looked_at := clock_timestamp();
    p_cursor.scan_from := '{}';
    p_cursor.scan_lanes_from := -2147483648;
    p_cursor.slots_low := (select slot from pgqueue.slots where consumer_id = v_id order by slot limit 1);
    p_cursor := _pgqueue.raise_scan_from(p_cursor);
    p_cursor.due_from := coalesce((select not_visible_until from pgqueue.consumer_messages
                                   where consumer_id = v_id and state = 'delayed' order by not_visible_until limit 1),
                                  p_cursor.looked_at);
    p_cursor.tokens_from := (select returns_at from pgqueue.key_tokens
                             where consumer_id = v_id order by returns_at limit 1);
    p_cursor.leases_from := '-infinity';
    p_cursor.filter_from := (select line_no from pgqueue.consumer_messages
                             where consumer_id = v_id and state = 'unfiltered' order by line_no limit 1);
    p_cursor.take_was_cut := p_cursor.take_was_cut or p_cursor.filter_from is not null;
    p_cursor.pieces_from := coalesce((select place from pgqueue.pieces where consumer_id = v_id order by place limit 1),
                                     p_cursor.last_line_no);
    p_cursor.freed_from := (select place from pgqueue.freed_keys where consumer_id = v_id order by place limit 1);
    p_cursor.waits := exists (select from pgqueue.consumer_messages where consumer_id = v_id and key is not null);
    p_cursor.slots_from := (select slot from pgqueue.slots
                            where consumer_id = v_id and (token is null or rest is not null) order by slot limit 1);
    p_cursor.slots_to := 9223372036854775807;
    p_cursor.slots_until := '-infinity';
    return p_cursor;
end $$;

-- Notes keys as free: the next dealer deals the messages that wait for them.
--   p_freed  the keys, each with the place from which messages of it may wait; null: none
-- Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.note_freed(p_cursor pgqueue.consumer_cursors, p_freed pgqueue.waiting_place[])
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    if p_freed <> '{}' then
        p_cursor.last_line_no := p_cursor.last_line_no + 1;
        p_cursor.freed_from := coalesce(p_cursor.freed_from, p_cursor.last_line_no);
        insert into pgqueue.freed_keys (consumer_id, place, keys, arrival_no, first_seq)
        select p_cursor.consumer_id, p_cursor.last_line_no, array_agg(key), arrival_no, first_seq
        from (select *, (row_number() over (partition by arrival_no, first_seq order by key) - 1) / 1000 as part
              from unnest(p_freed)) f
        group by arrival_no, first_seq, part;
    end if;
    return p_cursor;
end $$;

-- Takes messages that are in no claim out of a consumer's runs, for a caller that settles them. Runs that another
-- session is claiming are left. Needs the consumer's lock. Returns the cursor, and the messages as runs, as they were.
create or replace function _pgqueue.take_unclaimed(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                   p_seqs int8multirange, out o_cursor pgqueue.consumer_cursors,
                                                   out o_runs pgqueue.consumer_messages[])
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
begin
    o_cursor := p_cursor;
    o_runs := '{}';
    for v_run in
        delete from pgqueue.consumer_messages
        where ctid = any (  -- by the indexes of their states
            array(select ctid from pgqueue.consumer_messages
                  where consumer_id = p_consumer.consumer_id and state = 'ready' and first_seq < upper(p_seqs)
                    and seqs && p_seqs for update skip locked)  -- lock: run
            || array(select ctid from pgqueue.consumer_messages
                     where consumer_id = p_consumer.consumer_id and state = 'delayed' and first_seq < upper(p_seqs)
                       and seqs && p_seqs for update skip locked)  -- lock: run
            || array(select ctid from pgqueue.consumer_messages
                     where consumer_id = p_consumer.consumer_id and state = 'unfiltered' and first_seq < upper(p_seqs)
                       and seqs && p_seqs for update skip locked)  -- lock: run
            || array(select ctid from pgqueue.consumer_messages
                     where consumer_id = p_consumer.consumer_id and state = 'waiting' and key is not null
                       and first_seq < upper(p_seqs) and seqs && p_seqs for update skip locked))  -- lock: run
        returning *
    loop
        v_part := v_run.seqs * p_seqs;
        if _pgqueue.store_run(v_run, v_run.seqs - v_part) = 0 and v_run.state = 'delayed' and v_run.key is not null then
            -- the messages that wait for this one are free, as if a piece had held its key and were gone (see
            -- end_delays())
            o_cursor := _pgqueue.note_freed(
                o_cursor, array[(v_run.key, v_run.arrival_no, v_run.first_seq)::pgqueue.waiting_place]);
        end if;
        v_run.seqs := v_part;
        v_run.first_seq := lower(v_part);
        v_run.message_count := _pgqueue.cardinality(v_part);
        o_runs := o_runs || v_run;
    end loop;
end $$;
