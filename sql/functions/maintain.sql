-- Housekeeping. Nothing waits for it, but streams with a retention keep what they need not until it is called: every half minute is good.

-- Deletes what failed writers left: staged blocks of batches that were published without them, and staged blocks and reservations
-- older than p_staged_age, with their messages; all but the last ten batches of each sink; and what was noted of batch writes
-- without a txnAppId, whose names are used once; dedup keys whose window passed; history that its consumer keeps no longer; and what was noted of keys for
-- per_key_capacity and is done. It deletes no published message: only what its reservation still has. It lets new partitions of captured tables be captured
-- when they are written to directly, and notes up to which publication all are visible or dead.
-- And trims what the retention of streams need not keep (core/retention.sql): one call does a bounded part of all that, which takes a moment; while it
-- answers that something is unfinished, call it again. maintain_all() does, so do the client and the command line.
--   p_staged_age  longer than any batch may take from its first write to its commit
--   p_reader_age  longer than any Spark query stays away from its checkpoint: readers that were not used for so long are forgotten, and
--                 what they hold goes to others; so are sinks of dropped streams
-- Returns what was deleted and how much; unfinished is how many streams have more to trim, or to forget. Errors: PQ003, PQ007. Locks: the staged blocks
-- and reservations that it deletes; of streams with a retention what _trim and _tend_leaves say: end the transaction at once.
create or replace function pgqueue.maintain(p_staged_age interval default '1 day', p_reader_age interval default '30 days')
returns table (what text, deleted bigint)
language plpgsql
as $$
declare
    v_block       pgqueue.staged_writes;
    v_reservation pgqueue.reservations;
    v_count       bigint;
    v_blocks      bigint := 0;
    v_messages    bigint := 0;
    v_dead        bigint := 0;
    v_unfinished  bigint := 0;
    v_stream_id   int;
    v_done        record;
    v_keys        record;
    v_history     record;
begin  -- a list of chores, and so longer than 60 lines
    perform pgqueue._check_isolation();
    perform pgqueue._check_timeout('p_staged_age', p_staged_age);
    perform pgqueue._check_timeout('p_reader_age', p_reader_age);
    for v_block in
        select w.* from pgqueue.staged_writes w
        where w.staged_at < clock_timestamp() - p_staged_age or pgqueue.is_published(w.sink, case when not w.routed then w.stream_id end, w.batch)
        order by w.staged_id
        for update skip locked  -- locked before its messages go: a commit that takes it is either done or finds nothing
    loop
        -- a commit of another block of it is either done or not begun
        select * into v_reservation from pgqueue.reservations where reservation_id = v_block.reservation_id for update skip locked;
        continue when not found and exists (select from pgqueue.reservations where reservation_id = v_block.reservation_id);
        v_messages := v_messages + pgqueue._delete_reserved(v_reservation, v_block.seqs);
        delete from pgqueue.staged_writes where staged_id = v_block.staged_id;
        v_blocks := v_blocks + 1;
    end loop;
    for v_reservation in
        select r.* from pgqueue.reservations r
        where r.reserved_at < clock_timestamp() - p_staged_age
          and not exists (select from pgqueue.staged_writes w where w.reservation_id = r.reservation_id)
        order by r.reservation_id
        for update skip locked
    loop
        v_messages := v_messages + pgqueue._delete_reserved(v_reservation, v_reservation.seqs);
    end loop;
    return query values ('staged blocks', v_blocks), ('unpublished messages', v_messages);

    delete from pgqueue.sink_batches b
    where b.batch < (select max(m.batch) from pgqueue.sink_batches m where m.sink = b.sink and m.stream_id = b.stream_id) - 10
       or (b.sink like 'write:%' and b.published_at < clock_timestamp() - p_staged_age);
    get diagnostics v_count = row_count;
    delete from pgqueue.sink_streams k
    where k.noted_at < clock_timestamp() - p_reader_age and not exists (select from pgqueue.streams s where s.stream_id = k.stream_id);
    v_keys := pgqueue._forget_dedup_keys();
    v_history := pgqueue._forget_history();
    return query values ('old sink batches', v_count), ('abandoned readers', pgqueue._forget_readers(p_reader_age)), ('old dedup keys', v_keys.o_deleted),
                        ('old history', v_history.o_deleted);
    perform pgqueue._tend_key_backlog();
    perform pgqueue._capture_partitions();
    perform pgqueue._note_decided(stream_id) from pgqueue.streams;

    v_count := 0;
    -- by chance, because a stream that always has more to do ends it for the others: locks of its leaves are not kept while others are looked at
    for v_stream_id in
        select stream_id from (select stream_id from pgqueue.retention union select stream_id from pgqueue.leaves) s order by random()
    loop
        v_done := pgqueue._retain(v_stream_id);
        v_count := v_count + v_done.o_count;
        v_dead := v_dead + v_done.o_dead;
        v_unfinished := v_done.o_more::int;
        exit when v_done.o_more;
    end loop;
    perform pgqueue._run_schedules(t.stream_id) from (select distinct stream_id from pgqueue.schedules where not paused and next_at <= clock_timestamp()) t;
    return query values ('trimmed messages', v_count), ('old dead letters', v_dead), ('unfinished', v_unfinished + v_keys.o_unfinished + v_history.o_unfinished);
end $$;

-- Calls maintain() until nothing is unfinished, each time in a transaction of its own: for pg_cron, or psql.
--     select cron.schedule('pgqueue', '30 seconds', 'call pgqueue.maintain_all()');
-- It runs with the rights of the caller, who may call maintain, and not in a transaction block: a procedure that commits cannot do else.
-- Arguments, errors and locks: as maintain.
create or replace procedure pgqueue.maintain_all(p_staged_age interval default '1 day', p_reader_age interval default '30 days')
language plpgsql
as $$
declare
    v_unfinished bigint;
begin
    for i in 1..10000 loop
        select m.deleted into v_unfinished
        from pgqueue.maintain(p_staged_age, p_reader_age) m where m.what operator(pg_catalog.=) 'unfinished'::pg_catalog.text;
        commit;
        exit when v_unfinished operator(pg_catalog.=) 0::bigint;
    end loop;
end $$;

-- Deletes messages that a reservation still has, and takes them out of it. Needs its lock. Returns how many there were.
create or replace function pgqueue._delete_reserved(p_reservation pgqueue.reservations, p_seqs int8multirange) returns bigint
language plpgsql
as $$
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
        execute format('delete from pgqueue.messages_%s where seq >= $1 and seq < $2', p_reservation.stream_id) using lower(v_range), upper(v_range);
        get diagnostics v_count = row_count;
        v_deleted := v_deleted + v_count;
    end loop;
    perform pgqueue._use_reservation(p_reservation.reservation_id, v_seqs);
    return v_deleted;
end $$;
