-- Publications that claims have taken ahead of a consumer's cursor (queue/claim/ahead.sql), and the cursor itself.

-- Locks a publication for a consumer if the lock is free. Returns whether the caller has it.
create or replace function _pgqueue.try_lock_publication(p_consumer_id int, p_publication_id bigint) returns boolean
language sql as $$
    select pg_try_advisory_xact_lock(_pgqueue.lock_class_publication(),  -- lock: publication
                                     hashint8extended(p_publication_id, p_consumer_id)::bit(32)::int)
$$;

-- Moves the cursor past publications that were taken ahead of it.
--   p_all  the caller has the exclusive lock of what is new: untaken publications in between become a gap. False: stop
--          at the first publication that is not taken
-- Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.pass_taken(p_cursor pgqueue.consumer_cursors, p_all boolean)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_next   bigint := p_cursor.next_publication;
    v_passed record;
    v_bundle record;
begin
    if not exists (select from pgqueue.taken_ahead
                   where consumer_id = p_cursor.consumer_id and publication_id >= v_next) then
        return p_cursor;  -- nearly always
    end if;
    select max(publication_id) as last, count(*) as count, sum(message_count)::bigint as message_count,
           max(place) as place, range_agg(int8range(publication_id, publication_id, '[]')) as ids
    into v_passed
    from (select *, publication_id - row_number() over (order by publication_id) as before
          from (select * from pgqueue.taken_ahead
                where consumer_id = p_cursor.consumer_id and publication_id >= v_next
                order by publication_id limit case when not p_all then _pgqueue.limit_take() end) l) a
    where p_all or before = v_next - 1;
    if v_passed.last is null then
        return p_cursor;
    end if;
    for v_bundle in
        with deleted as (delete from pgqueue.taken_ahead
                         where consumer_id = p_cursor.consumer_id and publication_id <= v_passed.last returning *)
        select distinct on (lane) lane, place, first_seq from deleted where lane is not null
        order by lane, place, first_seq
    loop
        p_cursor.hints := _pgqueue.record_place(p_cursor.hints, v_bundle.lane, v_bundle.place, v_bundle.first_seq,
                                                false);
    end loop;
    p_cursor.next_publication := v_passed.last + 1;
    p_cursor.taken := p_cursor.taken + v_passed.message_count;
    p_cursor.last_arrival := greatest(p_cursor.last_arrival, v_passed.place);
    if v_passed.count < p_cursor.next_publication - v_next then
        p_cursor := _pgqueue.record_gap(p_cursor, int8multirange(int8range(v_next, p_cursor.next_publication))
                                                  - v_passed.ids,
                                        _pgqueue.publishers((select stream_id from pgqueue.consumers
                                                             where consumer_id = p_cursor.consumer_id)), true);
    end if;
    return p_cursor;
end $$;

-- The publication ids to read ahead of the cursor: the next ones, and those around the last ones that were taken. While
-- an earlier claim stays open, many taken ids may be between these; and many ids behind them may not be visible.
-- Neither are read. The ids end far_ahead() behind all that was taken.
create or replace function _pgqueue.ids_ahead(p_cursor pgqueue.consumer_cursors) returns int8multirange
language plpgsql stable as $$
declare
    v_next  bigint := p_cursor.next_publication;
    v_far   int := _pgqueue.far_ahead();
    v_taken bigint[] := array(select publication_id from pgqueue.taken_ahead
                              where consumer_id = p_cursor.consumer_id and publication_id >= v_next
                              order by publication_id desc limit v_far);
    v_end   bigint := coalesce(v_taken[1] + 1, v_next);
    v_ids   int8multirange;
begin
    if cardinality(v_taken) = v_end - v_next then  -- all ids before v_end were taken, or none was
        return int8multirange(int8range(v_end, v_end + v_far));
    end if;
    v_ids := int8multirange(int8range(v_next, v_next + v_far),
                            int8range(greatest(v_next, v_end - v_far), v_end + v_far));
    return v_ids - coalesce((
        select range_agg(int8range(a.publication_id, a.publication_id, '[]'))
        from unnest(v_ids) g
        cross join lateral (select publication_id from pgqueue.taken_ahead
                            where consumer_id = p_cursor.consumer_id
                              and publication_id >= lower(g) and publication_id < upper(g) offset 0) a), '{}');
end $$;

-- How many ids a claim ahead of the cursor reads.
create or replace function _pgqueue.far_ahead() returns int
language sql immutable parallel safe as $$ select 4 * _pgqueue.limit_ahead() $$;

-- Takes publications one by one while claims ahead of the cursor are open: those that no other session is taking.
-- Returns the cursor. Needs the consumer's lock.
--   p_ids  from the cursor's next_publication on; null: the next ones
create or replace function _pgqueue.take_each(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                              p_ids int8multirange default null)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_next pgqueue.publications[];
    v_part pgqueue.publications;
begin
    for v_next in
        select array_agg(p order by p.part)
        from _pgqueue.published(p_consumer.stream_id, coalesce(p_ids, _pgqueue.ids_ahead(p_cursor))) p
        group by p.publication_id order by p.publication_id
        limit case when p_ids is null then _pgqueue.limit_ahead() end
    loop
        continue when not _pgqueue.try_lock_publication(p_consumer.consumer_id, v_next[1].publication_id);
        -- (a statement of its own, for a snapshot from after the lock)
        continue when exists (select from pgqueue.taken_ahead where consumer_id = p_consumer.consumer_id
                                                                and publication_id = v_next[1].publication_id);
        p_cursor.last_arrival := p_cursor.last_arrival + 1;
        foreach v_part in array v_next loop
            continue when not _pgqueue.is_for(v_part.consumers, p_consumer.consumer_id);
            p_cursor.taken := p_cursor.taken + v_part.message_count;
            p_cursor.hints := _pgqueue.store_placed(p_cursor.hints, _pgqueue.taken_bundle(
                p_consumer, p_cursor.last_arrival, v_part.priority, v_part.deliver_at, v_part.expires_at,
                v_part.seqs), v_part.seqs);
        end loop;
        insert into pgqueue.taken_ahead (consumer_id, publication_id, message_count)
        values (p_consumer.consumer_id, v_next[1].publication_id, 0);
    end loop;
    return p_cursor;
end $$;

-- Prepares a cursor for a take: no session can take publications ahead of it until the transaction ends, and it is past
-- those that were taken ahead. If claims ahead of the cursor are still open, a few publications are taken one by one,
-- and the caller may only read the gaps. Returns the cursor, and up to which publication the caller may take; null:
-- all. Needs the consumer's lock. Locks: what is new.
create or replace function _pgqueue.catch_up(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                             inout p_upto bigint)
language plpgsql as $$
begin
    if p_consumer.ordering <> 'none' then
        return;  -- nothing is taken ahead of the cursor
    -- With per_key_latest, no session claims ahead of the cursor. But one that has just released the consumer's lock
    -- may have the other one still, and an older message would be delivered if the newer one was not taken.
    elsif p_consumer.per_key_latest or _pgqueue.try_lock_new(p_consumer.consumer_id) then
        p_cursor := _pgqueue.pass_taken(p_cursor, true);
    else
        p_cursor := _pgqueue.pass_taken(p_cursor, false);
        if p_upto is null and p_consumer.profile = 'simple' then
            p_cursor := _pgqueue.take_each(p_consumer, p_cursor);
        end if;
        p_upto := p_cursor.next_publication - 1;
    end if;
end $$;
