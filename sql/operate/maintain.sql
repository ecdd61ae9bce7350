-- Housekeeping. Nothing waits for it, but a stream with a retention keeps all its messages until it is called: every
-- half minute is good.

-- Counts the turns of maintain(): each is for some of the streams, see streams_in_turn().
create sequence if not exists pgqueue.maintain_turns;

-- Deletes what failed writers left, trims what retention need not keep, and forgets abandoned readers.
-- It deletes staged chunks of batches that were published without them; staged chunks and reservations older than
-- p_staged_age, with their messages; rows for tables that are staged for as long; all but the last ten batches of each
-- sink; notes of batch writes without a txnAppId, whose names are used once; dedup keys whose window passed; history
-- that its consumer keeps no longer; entries of keys for per_key_capacity that are done; spent tokens of keys, for
-- per_key_interval, that came back; and notes of newest messages, for per_key_latest, that are older than p_staged_age.
-- It deletes no published message, only messages that a reservation still has. It makes the triggers of new partitions
-- of captured tables, for statements that write straight to them. It notes which publication ids were given out, and up
-- to which all are visible or dead. It drops the tables of dropped streams. And it trims streams with a retention
-- (operate/retention.sql). One call does a bounded part of all that, which takes a moment: while it answers that
-- something is unfinished, call it again. maintain_all() does so, and so do the client and the command line.
--   p_staged_age  longer than any batch may take from its first write to its commit
--   p_reader_age  longer than any Spark query stays away from its checkpoint: readers that were not used for so long
--                 are forgotten, and what they hold goes to others; so are sinks of dropped streams
-- Returns what was deleted and how much; unfinished is how many streams have more to trim or to forget, or were not
-- looked at: one call looks at limit_maintained() of them, the next call at the next ones. Errors: PQ003, PQ007.
-- Locks: the staged chunks and reservations that it deletes; the rows of streams that published; of streams with a
-- retention the locks of trim() and maintain_segments(): end the transaction at once.
-- Each task is undone alone if it fails: for a lock that it has no time to wait for, or with a warning. (More than 60
-- lines: a list of tasks, in their order.)
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

    -- Trimming ends with the first stream that has more to do. The streams come in a random order. So locks of that
    -- stream's segments are not kept while other streams are trimmed, and every stream has its turn.
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
    perform _pgqueue.run_task('select 0 from _pgqueue.drop_tables(($2 -> 0)::int)', null, jsonb_build_array(stream_id))
    from (select stream_id from pgqueue.dropped_streams limit _pgqueue.limit_maintained()) d;
    -- the last tasks, because they keep locks of consumers
    perform _pgqueue.run_task('select 0 from _pgqueue.maintain_newest(($2 ->> 0)::interval)', null, v_ages);
    perform _pgqueue.run_task('select 0 from _pgqueue.maintain_tokens()');
    -- sometimes also when there is more to do: so the other streams have their turn before all of it is done
    perform nextval('pgqueue.maintain_turns') where v_retained -> 2 = '0' or random() < 0.1;
    return query values ('staged chunks', (v_staged -> 0)::bigint), ('unpublished messages', (v_staged -> 1)::bigint),
                        ('old sink batches', (v_batches -> 0)::bigint),
                        ('abandoned readers', (v_readers -> 0)::bigint), ('old dedup keys', (v_keys -> 0)::bigint),
                        ('old history', (v_history -> 0)::bigint), ('trimmed messages', v_count),
                        ('old dead letters', v_dead),
                        ('unfinished', (v_retained -> 2)::bigint + v_turn.o_later + (v_keys -> 1)::bigint
                                       + (v_history -> 1)::bigint);
end $$;

-- The streams for which it is maintain()'s turn: limit_maintained() of them, in the order of their ids. A transaction
-- that has locks of all streams would need more than the server has. The next turn is for the next ones, also where
-- others call maintain(), and after the last come the first. Returns how many streams come after these, too.
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

-- Runs a task of maintain() by itself: if it fails, it is undone, and the others go on. It waits only a moment for a
-- lock, because maintain() is called again. It raises no warning for a stream that was dropped meanwhile.
--   p_statement  see await(); p_id is a stream
-- Returns what the statement returned; zeros when the task failed.
create or replace function _pgqueue.run_task(p_statement text, p_id bigint default null, p_more jsonb default null)
returns jsonb language plpgsql as $$
begin
    return _pgqueue.await('what a task needs', p_statement, p_id, p_more, p_limit => interval '50 ms');
exception when others then
    if sqlstate not in ('55P03', '40P01')  -- a lock was not available, or a deadlock
        and (p_id is null or exists (select from pgqueue.streams where stream_id = p_id)) then
        raise warning 'maintain() goes on without a task, %: % (%)', p_statement, sqlerrm, sqlstate;
    end if;
    return '[0, 0, 0]';
end $$;

-- Deletes staged chunks and reservations that failed writers left, see maintain(). Each is locked before its messages
-- go: a commit that takes it is either done or finds nothing. Locks: those that it deletes.
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

-- Deletes all but the last ten batches of each sink, and notes of batch writes that are older than p_age. Returns how
-- many. Locks: those that it deletes; it waits for no session.
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

-- Deletes notes of queries that wrote to streams that were dropped. Locks: these notes, if they are free.
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
-- It runs with the rights of the caller, who may call maintain, and not in a transaction block, because a procedure
-- that commits cannot do otherwise. Arguments, errors and locks: as maintain.
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
