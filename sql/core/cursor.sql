-- A consumer's cursor (its fields: tables/consumers.sql): reading it, storing it, and its hints where to look in the line.

-- A consumer's cursor. Errors: PQ002 when the consumer was dropped meanwhile.
create or replace function pgqueue._cursor(p_consumer_id int) returns pgqueue.consumer_cursors
language plpgsql stable
as $$
declare
    v_cursor pgqueue.consumer_cursors := (select c from pgqueue.consumer_cursors c where c.consumer_id = p_consumer_id order by c.version desc limit 1);
begin
    if v_cursor.consumer_id is null then
        raise exception 'the consumer was dropped' using errcode = 'PQ002', hint = 'Create it again.';
    end if;
    return v_cursor;
end $$;

-- Stores a cursor if it is not the stored one any more: a new version, and the one before deleted.
--   p_busy  something was claimed or settled; otherwise that somebody looked is worth no write, except at leases once a minute
-- Needs the consumer's lock.
create or replace function pgqueue._save_cursor(p_stored pgqueue.consumer_cursors, p_cursor pgqueue.consumer_cursors,
                                                p_busy boolean) returns void
language plpgsql
as $$
begin
    if not p_busy and date_trunc('minute', p_cursor.leases_from) = date_trunc('minute', p_stored.leases_from) then
        p_cursor.lease_probe := p_stored.lease_probe;
        p_cursor.leases_from := p_stored.leases_from;
    end if;
    if not p_busy then
        p_cursor.gaps_probe := p_stored.gaps_probe;
    end if;
    if p_cursor is distinct from p_stored then
        delete from pgqueue.consumer_cursors where consumer_id = p_stored.consumer_id and version = p_stored.version;
        p_cursor.version := p_stored.version + 1;
        insert into pgqueue.consumer_cursors select p_cursor.*;
    end if;
end $$;

-- Notes that runs became ready at these places: the line is looked at from there, or from where it was before.
-- Returns the cursor. Needs the consumer's lock.
create or replace function pgqueue._lower_scan_from(p_cursor pgqueue.consumer_cursors, p_places pgqueue.line_place[]) returns pgqueue.consumer_cursors
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
    select array_agg((f.lane, f.line_no, f.first_seq)::pgqueue.line_place order by f.lane) filter (where f.i <= pgqueue._limit_lanes()),
           min(f.lane) filter (where f.i > pgqueue._limit_lanes())
    into p_cursor.scan_from, v_beyond
    from (select distinct on (lane) lane, line_no, first_seq, dense_rank() over (order by lane) as i
          from unnest(p_cursor.scan_from || p_places)
          where lane < p_cursor.scan_lanes_from is not false
          order by lane, line_no, first_seq) f;
    p_cursor.scan_from := coalesce(p_cursor.scan_from, '{}');
    p_cursor.scan_lanes_from := least(p_cursor.scan_lanes_from, v_beyond);
    return p_cursor;
end $$;

-- Moves the places from which the line is looked at to the first ready runs that are there. Exact, because runs become ready only
-- under the consumer's lock; a run that another claimer is cutting is still seen where it was. Needs that lock.
-- Returns the cursor: scan_from is empty when nothing is ready.
create or replace function pgqueue._raise_scan_from(p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
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
    while p_cursor.scan_lanes_from is not null and cardinality(p_cursor.scan_from) < pgqueue._limit_lanes() loop
        select lane, line_no, first_seq into v_next from pgqueue.consumer_messages
        where consumer_id = p_cursor.consumer_id and state = 'ready' and lane >= p_cursor.scan_lanes_from
        order by lane, line_no, first_seq limit 1;
        p_cursor.scan_lanes_from := v_next.lane + 1;  -- null when there is none
        if v_next.lane is not null then
            p_cursor.scan_from := p_cursor.scan_from || v_next;
        end if;
    end loop;
    return p_cursor;
end $$;
