-- Maintenance. Nothing waits for it, but a stream with a retention keeps all its messages until maintain() is called,
-- best every half minute.

-- Counts the rounds of maintain(): each handles some of the streams, see streams_in_turn().
create sequence if not exists pgqueue.maintain_turns;

-- Deletes what failed writers left behind, trims streams by their retention, and deletes abandoned readers.
-- It deletes: staged chunks of batches that were published without them; staged chunks and reservations older than
-- p_staged_age, with their messages; staged rows for tables of the same age; all but the last ten batches of each sink;
-- records of batch writes without a txnAppId, whose names are used once; dedup keys whose window has passed; history
-- older than its consumer keeps; finished entries of per_key_capacity; returned tokens of per_key_interval; and records
-- of newest messages, for per_key_latest, older than p_staged_age. Apart from retention, it deletes no published
-- message, only messages that a reservation still has. It creates the triggers of new partitions of captured tables,
-- for direct writes. It records which publication ids were assigned, and up to which id all are visible or dead. It
-- drops the tables of dropped streams, and trims streams with a retention (operate/retention.sql). Each call does a
-- bounded part of this work. Call it again while it returns that something is unfinished, as maintain_all(), the client
-- and the command line do.
--   p_staged_age  longer than any batch takes from its first write to its commit
--   p_reader_age  longer than any Spark query is stopped: readers that were not used for this long are deleted, and
--                 their messages go to other claims; the same age applies to sinks of dropped streams
-- Returns what was deleted and how much. unfinished is the number of streams that have more to trim or delete, or were
-- not checked: each call checks the next limit_maintained() streams. Errors: PQ003, PQ007. Locks: the staged chunks and
-- reservations that it deletes; the rows of streams that published; of streams with a retention the locks of retain():
-- end the transaction at once. A task that fails is rolled back alone: silently if it did not get a lock, else with a
-- warning. (More than 60 lines: a list of tasks, in their order.)
create or replace function pgqueue.maintain(p_staged_age interval default '1 day',
                                            p_reader_age interval default '30 days')
returns table (what text, deleted bigint)
language plpgsql as $$
declare
    v_ages      jsonb := jsonb_build_array(p_staged_age::text, p_reader_age::text);
    v_staged    jsonb;
    v_keys      jsonb;
    v_history   jsonb;
    v_batches   jsonb;
    v_readers   jsonb;
    v_retained  jsonb := '[0, 0, 0]';
    v_count     bigint := 0;
    v_dead      bigint := 0;
    v_stream_id int;
    v_turn      record := _pgqueue.streams_in_turn();
begin
    perform _pgqueue.check_isolation();
    perform pgqueue.check_timeout('p_staged_age', p_staged_age);
    perform pgqueue.check_timeout('p_reader_age', p_reader_age);
    v_staged := _pgqueue.run_task('select jsonb_build_array(o_chunks, o_messages) '
                                  'from _pgqueue.delete_staged(($2 ->> 0)::interval)', null, v_ages);
    v_keys := _pgqueue.run_task('select jsonb_build_array(o_deleted, o_unfinished) from _pgqueue.delete_dedup_keys()');
    v_history := _pgqueue.run_task('select jsonb_build_array(o_deleted, o_unfinished) from _pgqueue.delete_history()');
    v_batches := _pgqueue.run_task('select jsonb_build_array(n) from _pgqueue.delete_batches(($2 ->> 0)::interval) n',
                                   null, v_ages);
    v_readers := _pgqueue.run_task('select jsonb_build_array(n) from _pgqueue.delete_readers(($2 ->> 1)::interval) n',
                                   null, v_ages);
    perform _pgqueue.run_task('select 0 from _pgqueue.delete_sink_streams(($2 ->> 1)::interval)', null, v_ages);
    perform _pgqueue.on_maintain();
    perform _pgqueue.run_task('select 0 from _pgqueue.record_numbers($1::int), _pgqueue.record_resolved($1::int)', id)
    from unnest(v_turn.o_ids) id;  -- before anything is trimmed

    -- Trimming ends with the first stream that has more to do, so the locks of its segments are not held while other
    -- streams are trimmed. The order is random, so that all streams are trimmed.
    for v_stream_id in
        select stream_id from (select stream_id from pgqueue.retention union select stream_id from pgqueue.segments
                               union select * from _pgqueue.on_retain()) s
        where stream_id = any (v_turn.o_ids)
        order by random()
    loop
        v_retained := _pgqueue.run_task('select jsonb_build_array(o_count, o_dead, o_more::int) '
                                        'from _pgqueue.retain($1::int)', v_stream_id);
        v_count := v_count + (v_retained -> 0)::bigint;
        v_dead := v_dead + (v_retained -> 1)::bigint;
        exit when v_retained -> 2 <> '0';
    end loop;
    perform _pgqueue.on_maintained(v_turn.o_ids, p_staged_age);
    perform _pgqueue.run_task('select 0 from _pgqueue.reset_scheduled($1::int)', c.stream_id)
    from (select distinct stream_id from pgqueue.consumers where scheduled and stream_id = any (v_turn.o_ids)) c
    where _pgqueue.on_due(c.stream_id) is null;
    perform _pgqueue.run_task('select 0 from _pgqueue.drop_tables(($2 -> 0)::int)', null, jsonb_build_array(stream_id))
    from (select stream_id from pgqueue.dropped_streams order by random() limit _pgqueue.limit_maintained()) d;
    -- last, because these tasks keep locks of consumers
    perform _pgqueue.run_task('select 0 from _pgqueue.maintain_newest(($2 ->> 0)::interval)', null, v_ages);
    perform _pgqueue.run_task('select 0 from _pgqueue.maintain_tokens()');
    -- sometimes also when there is more to do, so that other streams do not have to wait for the end of it
    perform nextval('pgqueue.maintain_turns') where v_retained -> 2 = '0' or random() < 0.1;
    return query values ('staged chunks', (v_staged -> 0)::bigint), ('unpublished messages', (v_staged -> 1)::bigint),
                        ('old sink batches', (v_batches -> 0)::bigint),
                        ('abandoned readers', (v_readers -> 0)::bigint), ('old dedup keys', (v_keys -> 0)::bigint),
                        ('old history', (v_history -> 0)::bigint), ('trimmed messages', v_count),
                        ('old dead letters', v_dead),
                        ('unfinished', (v_retained -> 2)::bigint + v_turn.o_later + (v_keys -> 1)::bigint
                                       + (v_history -> 1)::bigint);
end $$;

-- The streams of the current round of maintain(): limit_maintained() of them, in the order of their ids, because locks
-- of all streams could exceed the lock table of the server. All callers of maintain() share the rounds; after the last
-- streams come the first. Also returns how many streams come after these.
create or replace function _pgqueue.streams_in_turn(out o_ids int[], out o_later bigint)
language plpgsql as $$
declare
    v_count bigint := (select count(*) from pgqueue.streams);
    v_from  bigint := coalesce(pg_sequence_last_value('pgqueue.maintain_turns'), 0)
        % greatest(ceil(v_count::numeric / _pgqueue.limit_maintained())::bigint, 1) * _pgqueue.limit_maintained();
begin
    o_ids := array(select stream_id from pgqueue.streams order by stream_id
                   offset v_from limit _pgqueue.limit_maintained());
    o_later := greatest(v_count - v_from - _pgqueue.limit_maintained(), 0);
end $$;

-- Runs a task of maintain(). If it fails, it is rolled back, and the other tasks run. It waits only 50 ms for a lock,
-- because maintain() is called again. It raises no warning for a stream that was dropped in the meantime.
--   p_statement  see await(); p_id is a stream
-- Returns what the statement returned; zeros when the task failed.
create or replace function _pgqueue.run_task(p_statement text, p_id bigint default null, p_more jsonb default null)
returns jsonb language plpgsql as $$
begin
    return _pgqueue.await('what a task needs', p_statement, p_id, p_more, p_limit => interval '50 ms');
exception when others then
    if sqlstate not in ('55P03', '40P01')  -- a lock was not available, or a deadlock
        and (p_id is null or exists (select from pgqueue.streams where stream_id = p_id)) then
        raise warning 'maintain() skipped a task, %: % (%)', p_statement, sqlerrm, sqlstate;
    end if;
    return '[0, 0, 0]';
end $$;

-- Deletes staged chunks and reservations that failed writers left behind, see maintain(). Each is locked before its
-- messages are deleted, so a commit that uses it either has ended or finds nothing. Locks: those that it deletes.
create or replace function _pgqueue.delete_staged(p_age interval, out o_chunks bigint, out o_messages bigint)
language plpgsql as $$
begin
    select count(n), coalesce(sum(n), 0) into o_chunks, o_messages
    from (select _pgqueue.delete_chunk(c.w) as n
          from (select w from pgqueue.staged_chunks w
                where w.staged_at < clock_timestamp() - p_age
                  or _pgqueue.is_done(w.sink, case when not w.routed then w.stream_id end, w.batch)
                order by w.staged_id
                for update skip locked) c) d;  -- lock: chunk
    o_messages := o_messages + coalesce((
        select sum(_pgqueue.delete_reserved(c.r, (c.r).seqs))
        from (select r from pgqueue.reservations r
              where r.reserved_at < clock_timestamp() - p_age
                and not exists (select from pgqueue.staged_chunks w where w.reservation_id = r.reservation_id)
              order by r.reservation_id
              for update skip locked) c), 0);  -- lock: reservation
end $$;

-- Deletes all but the last ten batches of each sink, and records of batch writes older than p_age. Returns the number
-- of rows. Locks: those that it deletes; it waits for no session.
create or replace function _pgqueue.delete_batches(p_age interval) returns bigint
language sql as $$
    with gone as (
        delete from pgqueue.sink_batches where ctid = any (array(
            select b.ctid from pgqueue.sink_batches b
            where b.batch <= (select max(m.batch) from pgqueue.sink_batches m
                              where m.sink = b.sink and m.stream_id = b.stream_id and m.consumer_id = b.consumer_id
                                and m.revived = b.revived and m.target = b.target) - 10
               or (b.consumer_id > 0
                   and not exists (select from pgqueue.consumers c where c.consumer_id = b.consumer_id))
               or (b.sink like 'write:%' and b.published_at < clock_timestamp() - p_age)
            for update skip locked))  -- lock: batch
        returning 1)
    select count(*) from gone
$$;

-- Deletes records of queries that wrote to streams that were dropped. Locks: these rows, if they are free.
create or replace function _pgqueue.delete_sink_streams(p_age interval) returns void
language sql as $$
    delete from pgqueue.sink_streams where ctid = any (array(
        select k.ctid from pgqueue.sink_streams k
        where k.noted_at < clock_timestamp() - p_age
          and not exists (select from pgqueue.streams s where s.stream_id = k.stream_id)
        for update skip locked))  -- lock: sink stream
$$;

-- Calls maintain() until nothing is unfinished, each time in a transaction of its own: for pg_cron, or psql.
--     select cron.schedule('pgqueue', '30 seconds', 'call pgqueue.maintain_all()');
-- It runs with the rights of the caller, who needs the right to call maintain, and outside of a transaction block,
-- because it commits. Arguments, errors and locks: as maintain.
create or replace procedure pgqueue.maintain_all(p_staged_age interval default '1 day',
                                                 p_reader_age interval default '30 days')
language plpgsql
as $$
declare
    v_unfinished bigint;
begin
    for i in 1..10000 loop
        select m.deleted into v_unfinished
        from pgqueue.maintain(p_staged_age, p_reader_age) m
        where m.what operator(pg_catalog.=) 'unfinished'::pg_catalog.text;
        commit;
        exit when v_unfinished operator(pg_catalog.=) 0::bigint;
    end loop;
end $$;
