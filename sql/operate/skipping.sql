-- Skipping: retention removes messages from a consumer before they are done.

-- The messages that retention removed from a consumer before they were done.
-- on drop_consumer
create table if not exists pgqueue.skips (
    consumer_id   int            primary key,
    seqs          int8multirange not null,
    message_count bigint         not null,
    skipped_at    timestamptz    not null
);

-- Whether a consumer has unfinished messages of a set, outside of claims whose lease has not ended.
create or replace function _pgqueue.has_to_skip(p_consumer_id int, p_seqs int8multirange) returns boolean
language plpgsql stable set enable_seqscan = off set jit = off as $$
begin
    return exists (select from _pgqueue.unfinished(p_consumer_id, upper(p_seqs)) m
                   where _pgqueue.meets(m.seqs, p_seqs)
                     and (m.state <> 'claimed' or m.lease_until <= clock_timestamp()));
end $$;

-- Removes messages from a consumer, except those in a claim whose lease has not ended, and counts them. (Unfiltered
-- messages count too, although the filter might refuse them: to find out, all of them would have to be read.)
--   p_seqs  the messages
--   p_upto  the last publication that has some of them
-- Returns whether it did something, so that there may be more; false also if another session has the consumer's lock,
-- or dropped the consumer. Locks, if it did something: the consumer, its expired claims.
create or replace function _pgqueue.skip(p_consumer pgqueue.consumers, p_seqs int8multirange, p_upto bigint)
returns boolean language plpgsql as $$
declare
    v_cursor pgqueue.consumer_cursors;
begin
    select * into v_cursor from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id
    order by version desc limit 1;
    if not found or (v_cursor.next_publication > p_upto and not _pgqueue.gap_ids(v_cursor) && int8range(1, p_upto, '[]')
                     and not _pgqueue.has_to_skip(p_consumer.consumer_id, p_seqs)) then
        return false;
    end if;
    if not _pgqueue.try_lock_consumer(p_consumer.consumer_id) then
        return false;
    end if;
    if not _pgqueue.skip_locked(p_consumer, p_seqs, p_upto) then
        raise exception using errcode = 'PQ099';
    end if;
    return true;
exception when sqlstate 'PQ099' then
    return false;  -- the exception releases the lock: the rest of the transaction may take long
end $$;

-- Does the work of skip() with the consumer's lock. Returns whether it did something.
create or replace function _pgqueue.skip_locked(p_consumer pgqueue.consumers, p_seqs int8multirange, p_upto bigint)
returns boolean language plpgsql as $$
declare
    v_until   timestamptz := clock_timestamp() + _pgqueue.filter_time();
    v_stored  pgqueue.consumer_cursors;
    v_cursor  pgqueue.consumer_cursors;
    v_before  pgqueue.consumer_cursors;
    v_more    boolean := false;
    v_due     record;
    v_passed  record;
    v_removed record;
begin
    if not exists (select from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id) then
        return false;
    end if;
    p_consumer := _pgqueue.consumer_now(p_consumer);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_cursor := v_stored;
    for i in 1..10 loop
        exit when v_cursor.next_publication > p_upto and not _pgqueue.gap_ids(v_cursor) && int8range(1, p_upto, '[]');
        v_before := v_cursor;
        v_cursor := (_pgqueue.take(p_consumer, v_cursor, greatest(p_upto, v_cursor.next_publication - 1),
                                   _pgqueue.limit_take())).o_cursor;
        v_more := (v_cursor.hints).was_cut;
        exit when (v_cursor.next_publication = v_before.next_publication and not v_more)
            or (_pgqueue.is_screened(p_consumer) and clock_timestamp() > v_until);
    end loop;
    v_due := _pgqueue.release_due(p_consumer, v_cursor, p_seqs, _pgqueue.limit_expired());
    v_passed := _pgqueue.delete_passed(p_consumer, v_due.o_cursor);  -- what a group has processed is not skipped
    v_removed := _pgqueue.remove_unclaimed(p_consumer, v_passed.o_cursor, p_seqs);
    if v_removed.o_gone <> '{}' then
        insert into pgqueue.skips as s (consumer_id, seqs, message_count, skipped_at)
        values (p_consumer.consumer_id, v_removed.o_gone, _pgqueue.cardinality(v_removed.o_gone), clock_timestamp())
        on conflict (consumer_id) do update
        set seqs = s.seqs + excluded.seqs, message_count = s.message_count + excluded.message_count,
            skipped_at = excluded.skipped_at;
    end if;
    perform _pgqueue.save_cursor(v_stored, v_removed.o_cursor, true);
    return v_due.o_count > 0 or v_passed.o_count > 0 or v_removed.o_count > 0
        or v_cursor.next_publication > v_stored.next_publication or v_cursor.taken > v_stored.taken
        or v_more or _pgqueue.gap_ids(v_cursor) <> _pgqueue.gap_ids(v_stored);
end $$;
