-- A consumer's cursor (log/cursors.sql has its columns): reading and storing it, and its hints.

-- When the first bundle in lane_delayed() is due, from p_from on; null: none is.
create or replace function _pgqueue.first_due(p_consumer_id int, p_from timestamptz) returns timestamptz
language plpgsql stable as $$
begin
    return (select _pgqueue.time_of(place) from pgqueue.consumer_messages
            where consumer_id = p_consumer_id and lane = _pgqueue.lane_delayed()
              and place >= _pgqueue.place_at(p_from)
            order by place limit 1);
end $$;

-- When the next delay of a consumer ends, or a time before that, if the bundles that were due then were removed; null:
-- nothing is delayed.
--   p_leases  also when the first lease ends, or ended. Claims of the last second are few, and are read one by one
create or replace function _pgqueue.next_end(p_consumer_id int, p_hints pgqueue.claim_hints, p_leases boolean)
returns timestamptz language plpgsql stable as $$
declare
    v_due timestamptz := p_hints.due_from;
begin
    if v_due <= clock_timestamp() then
        v_due := _pgqueue.first_due(p_consumer_id, v_due);
    end if;
    if not p_leases then
        return v_due;
    end if;
    return least(
        v_due,
        (select _pgqueue.time_of(place) from pgqueue.consumer_messages
         where consumer_id = p_consumer_id and lane = _pgqueue.lane_long()
           and place >= _pgqueue.place_at(p_hints.long_from)
         order by place limit 1),
        (select min(m.lease_until) from unnest(p_hints.lanes) l
         cross join lateral (select lease_until, token from pgqueue.consumer_messages
                             where consumer_id = p_consumer_id and lane = l.lane
                               and (place, first_seq) >= (l.low_place, l.low_seq)
                             order by place, first_seq limit _pgqueue.limit_long()) m
         where m.token is not null));
end $$;

-- Reads a consumer's cursor, with hints. Errors: PQ002 if the consumer was dropped meanwhile; 40001 if an alter table
-- rewrote the table meanwhile, which is then empty for an older snapshot.
create or replace function _pgqueue.cursor(p_consumer_id int) returns pgqueue.consumer_cursors
language plpgsql stable as $$
declare
    v_cursor pgqueue.consumer_cursors := (select c from pgqueue.consumer_cursors c
                                          where c.consumer_id = p_consumer_id order by c.version desc limit 1);
    v_hints  pgqueue.claim_hints := v_cursor.hints;
begin
    if v_cursor.consumer_id is null then
        if exists (select from pgqueue.consumers where consumer_id = p_consumer_id) then  -- of the same snapshot
            raise exception 'the cursors of consumers were rewritten meanwhile'
                using errcode = 'serialization_failure', hint = 'Call again.';
        end if;
        raise exception 'the consumer was dropped' using errcode = 'PQ002', hint = 'Create it again.';
    elsif v_hints.lanes is null then
        v_hints := _pgqueue.rebuild_hints(v_cursor);
        v_hints.rebuilt_at := '-infinity';  -- the next claim rebuilds the hints again, and stores them
        v_cursor.hints := v_hints;
    end if;
    return v_cursor;
end $$;

-- Stores a cursor if it differs from the stored one: inserts a new version and deletes the version before. Needs the
-- consumer's lock.
--   p_busy  something was claimed or settled. Otherwise new hints alone are not stored, unless rebuild_hints() made
--           them
create or replace function _pgqueue.save_cursor(p_stored pgqueue.consumer_cursors, p_cursor pgqueue.consumer_cursors,
                                                p_busy boolean) returns void
language plpgsql as $$
declare
    v_before pgqueue.claim_hints := p_stored.hints;
    v_hints  pgqueue.claim_hints := p_cursor.hints;
    v_same   pgqueue.consumer_cursors := p_cursor;
begin
    if not p_busy and v_hints.rebuilt_at is not distinct from v_before.rebuilt_at then
        v_hints.probe_at := v_before.probe_at;
        v_hints.long_from := v_before.long_from;
        v_hints.gaps_probe := v_before.gaps_probe;
        v_hints.idle_until := v_before.idle_until;
        v_same.hints := v_hints;
    end if;
    if v_same is distinct from p_stored then
        delete from pgqueue.consumer_cursors where consumer_id = p_stored.consumer_id and version = p_stored.version;
        p_cursor.version := p_stored.version + 1;
        insert into pgqueue.consumer_cursors select p_cursor.*;
    end if;
end $$;

-- Records in the hints that a bundle, free (p_free) or claimed, is at a place of a lane. Returns the hints. Needs the
-- consumer's lock.
create or replace function _pgqueue.record_place(p_hints pgqueue.claim_hints, p_lane int, p_place bigint,
                                                 p_first_seq bigint, p_free boolean default true)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_lane pgqueue.lane_hint;
begin
    if p_lane >= p_hints.lanes_from then
        return p_hints;
    end if;
    for i in 1..cardinality(p_hints.lanes) loop
        v_lane := p_hints.lanes[i];
        if v_lane.lane = p_lane then
            if p_free and (v_lane.place is null or (p_place, p_first_seq) < (v_lane.place, v_lane.first_seq)) then
                v_lane.place := p_place;
                v_lane.first_seq := p_first_seq;
            end if;
            if (p_place, p_first_seq) < (v_lane.low_place, v_lane.low_seq) then
                v_lane.low_place := p_place;
                v_lane.low_seq := p_first_seq;
            end if;
            p_hints.lanes[i] := v_lane;
            return p_hints;
        end if;
    end loop;
    v_lane := (p_lane, case when p_free then p_place end, case when p_free then p_first_seq end, p_place, p_first_seq);
    p_hints.lanes := p_hints.lanes || v_lane;
    if cardinality(p_hints.lanes) > 1 then
        p_hints.lanes := array(select l::pgqueue.lane_hint from unnest(p_hints.lanes) l order by l.lane);
        if cardinality(p_hints.lanes) > _pgqueue.limit_lanes() then
            p_hints.lanes_from := (p_hints.lanes[_pgqueue.limit_lanes() + 1]).lane;
            p_hints.lanes := p_hints.lanes[:_pgqueue.limit_lanes()];
        end if;
    end if;
    return p_hints;
end $$;

-- The first lane in which the hints have a free bundle.
create or replace function _pgqueue.first_lane(p_hints pgqueue.claim_hints) returns pgqueue.lane_hint
language plpgsql immutable as $$
begin
    for i in 1..cardinality(p_hints.lanes) loop
        if (p_hints.lanes[i]).place is not null then
            return p_hints.lanes[i];
        end if;
    end loop;
    return null;
end $$;

-- The hint for a lane; null: no bundle is in it.
create or replace function _pgqueue.lane_of(p_hints pgqueue.claim_hints, p_lane int) returns pgqueue.lane_hint
language plpgsql immutable as $$
begin
    for i in 1..cardinality(p_hints.lanes) loop
        if (p_hints.lanes[i]).lane = p_lane then
            return p_hints.lanes[i];
        end if;
    end loop;
    return null;
end $$;

-- The first bundle of a lane from a place on, as a hint for the lane; null: there is none. A bundle that another
-- session is claiming counts as free, because its claim may be rolled back.
create or replace function _pgqueue.first_in_lane(p_consumer_id int, p_lane int, p_place bigint, p_first_seq bigint)
returns pgqueue.lane_hint language plpgsql stable as $$
declare
    v_lane pgqueue.lane_hint;
begin
    v_lane.lane := p_lane;
    select place, first_seq into v_lane.low_place, v_lane.low_seq from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and lane = p_lane and (place, first_seq) >= (p_place, p_first_seq)
    order by place, first_seq limit 1;
    if not found then
        return null;
    end if;
    select place, first_seq into v_lane.place, v_lane.first_seq from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and lane = p_lane
      and (place, first_seq) >= (v_lane.low_place, v_lane.low_seq) and token is null
    order by place, first_seq limit 1;
    return v_lane;
end $$;

-- Raises the hint before which a lane has no bundle to the first bundle. Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.raise_low(p_consumer_id int, p_hints pgqueue.claim_hints, p_lane int)
returns pgqueue.claim_hints language plpgsql stable as $$
declare
    v_lane pgqueue.lane_hint;
begin
    for i in 1..cardinality(p_hints.lanes) loop
        v_lane := p_hints.lanes[i];
        if v_lane.lane = p_lane then
            select place, first_seq into v_lane.low_place, v_lane.low_seq from pgqueue.consumer_messages
            where consumer_id = p_consumer_id and lane = p_lane
              and (place, first_seq) >= (v_lane.low_place, v_lane.low_seq)
            order by place, first_seq limit 1;
            p_hints.lanes[i] := v_lane;
        end if;
    end loop;
    p_hints.lanes := array(select l::pgqueue.lane_hint from unnest(p_hints.lanes) l
                           where l.low_place is not null order by l.lane);
    return p_hints;
end $$;

-- Adds hints for further lanes, up to limit_lanes(). Returns the hints.
create or replace function _pgqueue.add_lanes(p_consumer_id int, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql stable as $$
begin
    while p_hints.lanes_from is not null and cardinality(p_hints.lanes) < _pgqueue.limit_lanes() loop
        p_hints.lanes_from := (select lane from pgqueue.consumer_messages
                               where consumer_id = p_consumer_id and lane >= p_hints.lanes_from
                                 and lane < _pgqueue.lane_delayed()
                               order by lane limit 1);
        if p_hints.lanes_from is not null then
            p_hints.lanes := p_hints.lanes
                || _pgqueue.first_in_lane(p_consumer_id, p_hints.lanes_from, -9223372036854775808, 0);
            p_hints.lanes_from := p_hints.lanes_from + 1;
        end if;
    end loop;
    return p_hints;
end $$;

-- Raises the hints of the lanes to the first free bundles, and sets until when claims need not look for others. Returns
-- the cursor. Needs the consumer's lock, because bundles become free only under it.
create or replace function _pgqueue.raise_hints(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_hints pgqueue.claim_hints := p_cursor.hints;
    v_lane  pgqueue.lane_hint;
    v_noted boolean;
    v_first pgqueue.lane_hint;  -- the hint for the lane of the first free bundle
    v_note  boolean;            -- that bundle has a note: only a claim with the lock takes it
begin
    for i in 1..cardinality(v_hints.lanes) loop
        v_lane := v_hints.lanes[i];
        continue when v_lane.place is null;
        select place, first_seq, note is not null into v_lane.place, v_lane.first_seq, v_noted
        from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
          and (place, first_seq) >= (v_lane.place, v_lane.first_seq) and token is null
        order by place, first_seq limit 1;
        v_hints.lanes[i] := v_lane;  -- (nulls if there is none)
        if v_first.place is null then
            v_first := v_lane;
            v_note := v_noted;
        end if;
    end loop;
    v_hints.idle_until := case
        when v_first.place is null or v_note
             or (v_first.lane = _pgqueue.lane_unassigned() and _pgqueue.is_keyed(p_consumer.profile)) then null
        else least(v_hints.probe_at,
                   case when p_cursor.gaps <> '{}' and not v_hints.was_cut then v_hints.gaps_probe end,
                   _pgqueue.next_end(p_consumer.consumer_id, v_hints, false)) end;
    p_cursor.hints := v_hints;
    return p_cursor;
end $$;

-- Raises the hints for lane_waiting() to the first waiting keys. Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.raise_waiting_hints(p_consumer_id int, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql stable as $$
begin
    p_hints.waits_from := coalesce((
        select place from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and lane = _pgqueue.lane_waiting() and place >= p_hints.waits_from
        order by place limit 1), 9223372036854775807);
    p_hints.free_from := coalesce((
        select place from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and lane = _pgqueue.lane_waiting() and place >= p_hints.free_from
          and place < _pgqueue.place_behind()
        order by place limit 1), 9223372036854775807);
    return p_hints;
end $$;

-- Whether the hints have a free bundle, or lanes without hints may have one.
create or replace function _pgqueue.has_free(p_hints pgqueue.claim_hints) returns boolean
language plpgsql immutable as $$
begin
    for i in 1..cardinality(p_hints.lanes) loop
        if (p_hints.lanes[i]).place is not null then
            return true;
        end if;
    end loop;
    return p_hints.lanes_from is not null;
end $$;

-- Whether the free bundles have p_want messages.
create or replace function _pgqueue.suffices(p_consumer_id int, p_hints pgqueue.claim_hints, p_want bigint)
returns boolean language plpgsql stable as $$
begin
    return coalesce(sum(m.message_count), 0) >= p_want
    from unnest(p_hints.lanes) l
    cross join lateral (select message_count from pgqueue.consumer_messages
                        where consumer_id = p_consumer_id and lane = l.lane
                          and (place, first_seq) >= (l.place, l.first_seq) and token is null
                        order by place, first_seq limit p_want) m;
end $$;

-- Whether all hints were read from the stored rows within the last minute.
create or replace function _pgqueue.rebuilt_lately(p_hints pgqueue.claim_hints) returns boolean
language sql volatile as $$
    select clock_timestamp() >= p_hints.rebuilt_at and clock_timestamp() < p_hints.rebuilt_at + interval '1 minute'
$$;

-- Reads all hints from the stored rows. This finds whatever wrong hints hide, but also reads dead rows that a long
-- transaction elsewhere keeps. Returns the hints.
create or replace function _pgqueue.rebuild_hints(p_cursor pgqueue.consumer_cursors) returns pgqueue.claim_hints
language plpgsql stable as $$
declare
    v_id        int := p_cursor.consumer_id;
    v_stream_id int := (select stream_id from pgqueue.consumers where consumer_id = v_id);
    v_hints     pgqueue.claim_hints := p_cursor.hints;
begin
    if p_cursor.next_publication > _pgqueue.last_publication_id(v_stream_id) + 1 then
        perform _pgqueue.refuse_behind('stream ' || quote_literal(name))
        from pgqueue.streams where stream_id = v_stream_id;
    end if;
    v_hints.rebuilt_at := clock_timestamp();
    v_hints.lanes := '{}';
    v_hints.lanes_from := -2147483648;
    v_hints := _pgqueue.add_lanes(v_id, v_hints);
    v_hints.due_from := _pgqueue.first_due(v_id, 'epoch');
    v_hints.long_from := coalesce(_pgqueue.time_of((
        select place from pgqueue.consumer_messages
        where consumer_id = v_id and lane = _pgqueue.lane_long() order by place limit 1)), v_hints.rebuilt_at);
    v_hints.filter_from := (select place from pgqueue.consumer_messages
                            where consumer_id = v_id and lane = _pgqueue.lane_unfiltered() order by place limit 1);
    v_hints.was_cut := coalesce(v_hints.was_cut, false) or v_hints.filter_from is not null;
    v_hints.any_waiting := exists (select from pgqueue.consumer_messages where consumer_id = v_id and key is not null);
    v_hints.waits_from := 0;
    v_hints.free_from := _pgqueue.place_of_free();
    v_hints := _pgqueue.raise_waiting_hints(v_id, v_hints);
    -- a session may have recorded a key and not committed yet
    v_hints.freed_from := least(_pgqueue.place_at(v_hints.rebuilt_at - interval '1 minute'), (
        select place from pgqueue.consumer_messages
        where consumer_id = v_id and lane = _pgqueue.lane_freed() order by place limit 1));
    v_hints.tokens_from := '-infinity';
    v_hints.size := coalesce(v_hints.size, (
        select message_count from pgqueue.consumer_messages
        where consumer_id = v_id and lane = _pgqueue.lane_assigned() and token is null order by place limit 1));
    v_hints.all_keys := exists (select from pgqueue.consumer_messages
                                where consumer_id = v_id and lane = _pgqueue.lane_long() and keys is null
                                  and key is null);
    v_hints.idle_until := null;
    v_hints.probe_at := coalesce(v_hints.probe_at, '-infinity');
    v_hints.gaps_probe := coalesce(v_hints.gaps_probe, '-infinity');
    v_hints.assigned_until := coalesce(v_hints.assigned_until, '-infinity');
    return v_hints;
end $$;
