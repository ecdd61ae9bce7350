-- Deleting staged messages that will not be published.

-- Deletes staged chunks of a batch that failed, with their messages.
-- A failed query calls it, so that repeated failures leave nothing for maintain(). It never deletes messages that are
-- published, or are being published.
--   p_sink, p_batch  as of publish_staged
--   p_staged         chunks of the caller's own attempt, because other attempts may still run. Chunks of other roles
--                    are not deleted
-- Returns the number of deleted messages. Errors: PQ003. Locks: the chunks and their reservations; it skips those that
-- another session holds.
create or replace function pgqueue.unstage(p_sink text, p_batch bigint, p_staged bigint[]) returns bigint
language plpgsql as $$
begin
    perform _pgqueue.check_batch(p_sink, p_batch);
    if p_staged is null then
        raise exception 'p_staged must be a list of chunks, not null' using errcode = 'PQ003', column = 'p_staged';
    end if;
    return (
        with chunk as (
            select * from pgqueue.staged_chunks
            where staged_id = any (p_staged) and sink = p_sink and batch = p_batch and staged_by = session_user
            order by staged_id
            -- lock: chunk
            for update skip locked  -- a commit that holds it publishes it
        )
        select coalesce(sum(_pgqueue.delete_chunk(c)), 0) from chunk c);
end $$;

-- Deletes chunks that earlier writes of a batch have staged, a few in each call. Spark repeats the batch, so these
-- writes were killed, and must not be committed. A query has one write per batch; a batch write has one for each
-- stream, or for all streams of a column. For arguments and locks see stage. Errors: PQ008 for a write that is not the
-- latest: of a task or driver that outlived its application.
create or replace function _pgqueue.end_earlier_writes(p_sink text, p_batch bigint, p_stream_id int, p_routed boolean,
                                                       p_write_no bigint) returns void
language plpgsql as $$
declare
    v_later   boolean;
    v_earlier bigint[];
    v_chunk   pgqueue.staged_chunks;
begin
    select bool_or(write_no > p_write_no), array_agg(staged_id) filter (where write_no < p_write_no)
    into v_later, v_earlier from pgqueue.staged_chunks
    where sink = p_sink and batch = p_batch and staged_by = session_user
      and (_pgqueue.is_query(p_sink) or (routed = p_routed and (p_routed or stream_id = p_stream_id)));
    perform _pgqueue.refuse_write(p_sink, p_batch) where v_later;
    for v_chunk in
        select * from pgqueue.staged_chunks where staged_id = any (v_earlier) order by staged_id limit 10
        -- lock: chunk
        for update skip locked  -- another task of this write deletes it, or a commit publishes it
    loop
        perform _pgqueue.delete_chunk(v_chunk);
    end loop;
end $$;

-- Raises PQ008: a later write of the batch has begun.
create or replace function _pgqueue.refuse_write(p_sink text, p_batch bigint) returns void
language plpgsql as $$
begin
    raise exception 'a later write of batch % of sink % has begun', p_batch, p_sink
        using errcode = 'PQ008',
              hint = 'Two drivers run the same query: stop one of them. Or this is a task of an application that was '
                     'killed. Nothing was staged.';
end $$;

-- Deletes a staged chunk with its messages. Needs the chunk's lock. Returns the number of deleted messages; null, and
-- nothing is deleted, if a commit holds the reservation.
create or replace function _pgqueue.delete_chunk(p_chunk pgqueue.staged_chunks) returns bigint
language plpgsql as $$
declare
    v_reservation pgqueue.reservations;
    v_count       bigint;
begin
    -- so a commit of another chunk of this reservation has ended, or not begun
    select * into v_reservation from pgqueue.reservations where reservation_id = p_chunk.reservation_id
    for update skip locked;  -- lock: reservation
    if not found and exists (select from pgqueue.reservations where reservation_id = p_chunk.reservation_id) then
        return null;
    end if;
    v_count := _pgqueue.delete_reserved(v_reservation, p_chunk.seqs);
    delete from pgqueue.staged_chunks where staged_id = p_chunk.staged_id;
    return v_count;
end $$;

-- Deletes messages that a reservation still has, and removes them from it. Needs its lock. Returns the number of
-- messages.
create or replace function _pgqueue.delete_reserved(p_reservation pgqueue.reservations, p_seqs int8multirange)
returns bigint language plpgsql as $$
declare
    v_seqs    int8multirange := p_seqs * p_reservation.seqs;
    v_range   int8range;
    v_count   bigint;
    v_deleted bigint := 0;
begin
    if v_seqs is null or v_seqs = '{}' then
        return 0;
    end if;
    for v_range in select unnest(v_seqs) loop
        execute format('delete from pgqueue.messages_%s where seq >= $1 and seq < $2', p_reservation.stream_id)
            using lower(v_range), upper(v_range);
        get diagnostics v_count = row_count;
        v_deleted := v_deleted + v_count;
    end loop;
    perform _pgqueue.use_reservation(p_reservation.reservation_id, v_seqs);
    return v_deleted;
end $$;

-- Removes numbers from a reservation, whose messages are being published or deleted. Returns whether the reservation
-- had all of them; if not, nothing is changed. Locks: the reservation.
create or replace function _pgqueue.use_reservation(p_reservation_id bigint, p_seqs int8multirange) returns boolean
language plpgsql as $$
declare
    v_left int8multirange;
begin
    perform _pgqueue.await(
        'reservation ' || p_reservation_id,
        'select 0 from pgqueue.reservations where reservation_id = $1 for update',  -- lock: reservation
        p_reservation_id);
    v_left := (select seqs from pgqueue.reservations where reservation_id = p_reservation_id);
    if (p_seqs <@ v_left) is not true then
        return false;
    elsif v_left = p_seqs then
        delete from pgqueue.reservations where reservation_id = p_reservation_id;
    else
        update pgqueue.reservations set seqs = v_left - p_seqs where reservation_id = p_reservation_id;
    end if;
    return true;
end $$;
