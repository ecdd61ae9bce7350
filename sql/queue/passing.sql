-- What claims have taken ahead of a consumer's cursor (claim/ahead.sql), and the cursor itself.

-- Locks what is new for a consumer, alone; but not while somebody shares the lock for longer than it takes to commit.
-- Returns whether the caller has it now.
create or replace function _pgqueue.lock_new_soon(p_consumer_id int) returns boolean
language plpgsql
as $$
begin
    if not _pgqueue.try_lock_new(p_consumer_id) then
        perform _pgqueue.await('what is new',
                               'select 0 from pg_advisory_xact_lock(($2 -> 0)::int, $1::int)',  -- lock: new
                               p_consumer_id, jsonb_build_array(_pgqueue.lock_class_new()),
                               p_limit => interval '20 ms');
    end if;
    return true;
exception when lock_not_available or deadlock_detected then
    return false;
end $$;

-- Locks a publication for a consumer if nobody holds the lock. Returns whether the caller has it now.
create or replace function _pgqueue.try_lock_publication(p_consumer_id int, p_publication_id bigint) returns boolean
language sql
as $$
    select pg_try_advisory_xact_lock(_pgqueue.lock_class_publication(),  -- lock: publication
                                     hashint8extended(p_publication_id, p_consumer_id)::bit(32)::int)
$$;

-- Moves the cursor past what was taken ahead of it.
--   p_all  the caller has the lock of what is new alone: what lies between becomes a gap. False: up to the first
--          publication that is not taken
-- Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.pass_taken(p_cursor pgqueue.consumer_cursors, p_all boolean)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_next   bigint := p_cursor.next_publication;
    v_passed record;
    v_bundle record;
begin
    select max(publication_id) as last, count(*) as count, sum(message_count)::bigint as message_count,
           max(place) as place, range_agg(int8range(publication_id, publication_id, '[]')) as ids
    into v_passed
    from (select *, publication_id - row_number() over (order by publication_id) as before
          from pgqueue.taken_ahead where consumer_id = p_cursor.consumer_id and publication_id >= v_next) a
    where p_all or before = v_next - 1;
    if v_passed.last is null then
        return p_cursor;
    end if;
    for v_bundle in
        with gone as (delete from pgqueue.taken_ahead
                      where consumer_id = p_cursor.consumer_id and publication_id <= v_passed.last returning *)
        select distinct on (lane) lane, place, first_seq from gone order by lane, place, first_seq
    loop
        p_cursor.hints := _pgqueue.stands(p_cursor.hints, v_bundle.lane, v_bundle.place, v_bundle.first_seq, false);
    end loop;
    p_cursor.next_publication := v_passed.last + 1;
    p_cursor.taken := p_cursor.taken + v_passed.message_count;
    p_cursor.last_arrival := greatest(p_cursor.last_arrival, v_passed.place);
    if v_passed.count < p_cursor.next_publication - v_next then
        p_cursor := _pgqueue.note_gap(p_cursor, int8multirange(int8range(v_next, p_cursor.next_publication))
                                                - v_passed.ids,
                                      _pgqueue.publishers((select stream_id from pgqueue.consumers
                                                           where consumer_id = p_cursor.consumer_id)), true);
    end if;
    return p_cursor;
end $$;

-- Makes a cursor ready for a take: nobody takes publications ahead of it until the transaction ends, and it is past
-- those that were. Or else, where claims of new messages stay open, the take may only look into gaps.
-- Returns the cursor, and up to which publication it may take; null: all. Needs the consumer's lock. Locks: what is
-- new.
create or replace function _pgqueue.catch_up(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                             inout p_upto bigint)
language plpgsql
as $$
begin
    if p_consumer.ordering <> 'none' then
        return;  -- nothing is taken ahead
    elsif _pgqueue.lock_new_soon(p_consumer.consumer_id) then
        p_cursor := _pgqueue.pass_taken(p_cursor, true);
    else
        p_cursor := _pgqueue.pass_taken(p_cursor, false);
        p_upto := p_cursor.next_publication - 1;
    end if;
end $$;
