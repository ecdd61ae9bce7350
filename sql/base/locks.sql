-- Locks, and the one order in which they are taken.
--
-- A function that waits for a lock holds no lock of a later place, so no two calls wait for each other. A function that
-- skips what others hold (skip locked, a try) waits for nothing, and may take any lock at any time. Each lock of the
-- code names its place in a comment (-- lock: bundle); tests/sql/test_lock_order.py compares the code with this list.
--
-- But skip locked and nowait may wait, rarely: if the version of a row that was read is updated just then, Postgres
-- waits for the transaction that has locked the newest version (heap_lock_updated_tuple()). Only bundles are updated so
-- often. A claim may have locked a bundle that it does not claim, and wait for the consumer, whose holder then waits
-- for the claim: see lock_consumer_soon().
--
-- Locks are held to the end of the transaction, except seqs, waiting, and those of an exception block that failed. The
-- order holds within one call. A transaction of several calls can violate it: Postgres then aborts one of the two
-- transactions as a deadlock, after a second.
--
-- A function waits only by await(): for a minute, or as long as the list says, or for the session's lock_timeout if
-- that is shorter. tests/sql/test_lock_waits.py checks each lock, and runs each public function beside an open
-- transaction. On the fast path of single messages await() would cost too much: there "as Postgres does" means a wait
-- that only the session's lock_timeout limits. "In tries" means that the call releases all its locks and pauses between
-- two tries.
--
-- 1. install  Advisory 1885826420. Guards the schema against a second installer (schema.sql), which waits for 60 s.
--        The installer then locks tables: it waits for them for 40 ms at a time, and for 30 s in all (upgrade.sql).
-- 2. bindings  The table pgqueue.bindings, share row exclusive. Guards the graph of bound streams and their limits.
--        bind, unbind, drop_stream, and alter_stream when it changes a limit.
-- 3. target  A table that a query writes to, row exclusive. Keeps its columns unchanged until the batch is committed.
--        apply_table_batch waits for others that change the table, as Postgres does.
-- 4. batch  The row of a batch in sink_batches, by its primary key. Makes each batch of a sink commit once.
--        begin_batch() waits for another commit of the same batch. maintain deletes old batches, and skips locked ones.
-- 5. merge  Advisory, by the hash of the table's oid. Lets one batch at a time merge into a table: two of them would
--        lock its rows in different orders. begin_table_batch() waits.
-- 6. target row  A row of such a table. apply_table_batch waits for others that hold it, as Postgres does, and takes
--        rows in the order of the merge keys.
-- 7. table write  A row of table_writes, by its primary key. Lets one task create the table of staged rows.
--        open_table_write waits for it. drop_table_write and maintain skip a locked row.
-- 8. reservation  A row of reservations. Guards numbers of a stream that are reserved and not published.
--        use_reservation() takes them in the order of their ids, and waits for another commit or for maintain.
--        maintain skips locked ones.
-- 9. sink stream  A row of sink_streams, by its primary key. Records to which streams a query writes. record_stream()
--        waits for another batch of the query that records the same stream. maintain skips locked rows.
-- 10. seqs  Advisory, by the id of the stream. Lets one call after the other take many numbers, so that those of a
--        call are one range. take_seqs() waits for a second, then continues without the lock. It releases the lock
--        when it has the numbers.
-- 11. dedup  A row of dedup_keys, by its primary key. Makes a message with a dedup key be published once. A producer
--        waits, as Postgres does, for an open transaction that sent the same key, or deletes it (maintain). Keys are
--        taken in their order, the streams of a batch in the order of their ids. maintain skips locked keys.
-- 12. publish  Advisory, by the id of the stream, shared. Shows consumers which transactions may still publish
--        (log/gaps.sql). Each producer takes it before its publication id. No function of the queue takes it
--        exclusively, so a producer waits only if another program does.
-- 13. chunk  A row of staged_chunks. Guards what a task has staged. publish_chunks() deletes it and waits for
--        maintain, as Postgres does; maintain deletes abandoned chunks, and skips locked ones.
-- 14. maintain  Advisory, by the id of the stream. Lets one maintain at a time trim a stream and change its segments
--        (retain()). A second one skips the stream; drop_stream waits, in tries. It also guards the rows of
--        segments, trims and retention; set_retention holds a row of retention, which retain() skips.
-- 15. history  Advisory, by the id of the stream. Keeps old publications while a transaction relies on them:
--        create_consumer, seek and replay share it. trim() tries to take it exclusively, and else trims nothing.
-- 16. stream  A row of streams. Guards the settings of a stream, its schedules, and its tables while they are
--        changed. alter_stream, bind, unbind, recover, end_export and create_consumer (by the foreign key) wait; in
--        tries drop_stream, create_schedule and the like, and alter_consumer with a limit of the backlog. capture and
--        release share it, and wait for 100 ms at a time; maintain shares it if it can. maintain_segments() skips a
--        locked stream.
-- 17. schedules  Advisory, by the id of the stream. Makes each time of a schedule send one message. create_schedule
--        and the like wait, in tries. While another session has it, run_schedules() sends nothing, and
--        reset_scheduled() and correct_schedules() of maintain do nothing.
-- 18. settings  A row of consumers. Guards the settings of a consumer. create_consumer (by the unique name), pause,
--        resume, and create_schedule and the like wait; in tries alter_consumer and drop_consumer. maintain skips
--        locked ones.
-- 19. reader  Advisory, by the hash of the reader's id. Lets one session at a time move a checkpoint reader:
--        reader_claim, reader_resume, reader_ack, reader_release and reader_fork wait.
--        delete_readers() skips a locked reader.
-- 20. reader claim  A row of reader_claims. Guards what is stored of a reader's claim. settle_messages waits for
--        those of a query, in the order of ids; reader_claim, reader_resume, reader_ack and reader_release wait for
--        those of their reader.
-- 21. consumer  Advisory, by the id of the consumer. Guards the cursor, its gaps, skips, newest_of_keys and
--        group_workers: a session with it takes publications, assigns keys and frees bundles. These wait: claims that
--        find nothing free; all claims of a consumer with per_key_interval, per_key_latest, max_in_flight or
--        rate_limit, or whose backlog may be full; claims by receive_where that continue with the lock (these claims
--        get nothing if one transaction keeps it, see lock_consumer_soon()); nack, defer, redrive, purge_dead, retry,
--        replay, settle_messages, recover; lease_partitions, leave_group, note_offset; reader_claim, reader_resume and
--        reader_release. In tries: alter_consumer with a limit of keys or per_key_latest; seek, cancel, postpone and
--        drop_consumer, for 10 s. claim_locked(), prefetch(), skip(), take_for_group(),
--        try_delete_passed(), maintain_newest(), maintain_tokens() and delete_readers() try, and continue without it.
-- 22. new  Advisory, by the id of the consumer. Guards what is new for it. Claims ahead of the cursor try to share it.
--        A session that takes with the cursor tries to have it exclusively, and else takes publications one by one
--        (catch_up()). These wait, in tries: seek, replay, cancel, postpone, drop_consumer, and alter_consumer with a
--        limit of keys or per_key_latest; and reads of pgmq with a condition or by groups, for half a second. So no
--        wait for it is long, and it may be taken at any time.
-- 23. publication  Advisory, by a hash of the consumer's and the publication's ids. Of two claims ahead of the cursor,
--        one takes a publication. No call waits for it.
-- 24. bundle  A row of consumer_messages. Guards messages that are alike, and the claim that holds them: the head's row
--        locks all bundles of a claim. Claims take free bundles, and skip locked ones. ack and extend wait as Postgres
--        does; nack, defer, dead_letter and ack of messages wait. Bundles that wait, are delayed or are unassigned
--        change only with the consumer's lock. Calls that change all bundles of a consumer wait, in tries, for claims
--        that are being made: seek, drop_consumer and alter_consumer. So do cancel and postpone, for claims of their
--        messages. A release of expired claims skips those that are being settled.
-- 25. partition  A row of group_partitions. Guards the offset of a partition of a group. commit_offset holds it to the
--        end of the worker's transaction. lease_partitions and leave_group skip a locked one. note_offset, and a second
--        commit_offset, wait as Postgres does.
-- 26. reader row  A row of readers, by its primary key and by its query. reader_query waits for another reader that
--        names the same query.
-- 27. captured  A table whose changes are captured, share row exclusive; access exclusive where triggers are
--        dropped. capture and release wait for 100 ms at a time, for 30 s in all; maintain for 50 ms, then it leaves
--        the partition for the next call.
-- 28. resolved  A row of resolved. Records up to which publication all are resolved. maintain updates the row, and
--        skips a locked one. Where there is no row yet, the second of two maintains that insert it waits for the first.
-- 29. dead  A row of dead_messages. redrive, purge_dead and trim_dead() of maintain skip a locked one. No call waits
--        for it.
-- 30. table  The tables, sequences and functions of a stream, when they are created, changed or dropped; up to access
--        exclusive on pgqueue.messages, for which all senders wait. maintain waits for 50 ms and then skips the step.
--        create_stream waits.
-- 31. staged rows  A table of staged rows, access exclusive. drop_table_write waits a second for sessions that use it,
--        and maintain 50 ms.
-- 32. entry  A row of key_backlog. Counts the messages of a key. No call waits for it: deletes of entries skip locked
--        ones.
-- 33. completed  A row of completed_messages. maintain deletes old ones, and skips locked ones. No call waits for it.
-- 34. waiting  Advisory, by the id of the stream, shared by sessions that wait for publications. A producer tries to
--        have it exclusively, releases it at once, and notifies if it failed (is_waited_for()). No call waits for it.
-- 35. export  Advisory, by the id of the stream. Lets one exporter at a time write a stream's messages to its archive:
--        its transaction has the lock for as long as it writes. No call waits for it: another exporter skips the
--        stream.
--
-- Exceptions: functions that wait for a place while they hold a later one. "f: bundle before consumer" means: f takes a
-- bundle, then waits for a consumer, which is an earlier place.
--
-- The function has the lock already, or has released the later one, or does only one of the two:
--   pgqueue.ack: bundle before consumer.  It calls lock_claim() without the consumer.
--   _pgqueue.claim: bundle before consumer.  It has a free bundle that does not match, for which others wait only in
--     tries, or where skip locked waits: lock_consumer_soon() does not.
--   _pgqueue.claim_locked: bundle before consumer.  As _pgqueue.claim; the bundles of the last acknowledgement are
--     locked after the consumer.
--   _pgqueue.claim_where: bundle before consumer.  An exception block releases the bundles.
--   _pgqueue.set_consumer: settings, consumer, bundle before stream.  Where it needs the stream's row, it locks that
--     first.
--   _pgqueue.set_consumer: bundle before consumer.  It changes lanes or limits, not both.
--   _pgqueue.run_actions: consumer, bundle before reader claim.  It settles messages or revives them, not both.
--   _pgqueue.run_actions: bundle before consumer.  For the same reason.
--   pgqueue.create_consumer: settings before stream.  Where set_consumer() needs the stream's row, the call has it.
--   pgqueue.create_group: consumer, bundle before settings.  The group is new.
--   pgqueue.receive: bundle before consumer.  As _pgqueue.claim.
--   pgqueue.receive_where: bundle before consumer.  As _pgqueue.claim_where.
--   pgqueue.change_capture: captured before stream.  It has locked the stream's row before.
--   _pgqueue.delete_staged: chunk before reservation.  It has locked the reservation, without waiting, before it
--     deletes numbers of it.
--   pgqueue.unstage: chunk before reservation.  As maintain.
--   _pgqueue.end_earlier_writes: chunk before reservation.  As maintain.
--
-- In tries, each of which is shorter than the second after which Postgres checks for deadlocks:
--   _pgqueue.drop_consumer: consumer before settings.
--   _pgqueue.drop_consumer: settings, consumer before stream.
--   pgqueue.maintain: staged rows before table.
--
-- No session that has the earlier place waits for the later one:
--   pgqueue.note_offset: consumer before history.  It has the history already.
--   pgqueue.maintain: captured, resolved before bundle.  It takes only waiting bundles, with the consumer's lock.
--
-- settle_messages takes reader claims, the consumer and bundles of one consumer after the other, in the order of their
-- ids, and so does recover: no other call takes such locks of two consumers, except maintain, which waits for none of
-- them.
--
-- Any role that may connect can hold an advisory lock. So the error of a wait for such a lock names the session that
-- holds it.

-- Whether the next probe, at p_when, is not due yet: p_when is in the future, but less than 2 s away. A later time was
-- recorded before the clock was set back; waiting for it could take long, so the result is false.
create or replace function _pgqueue.not_yet(p_when timestamptz) returns boolean
language sql volatile as $$ select p_when > clock_timestamp() and p_when < clock_timestamp() + interval '2 s' $$;

-- Locks a consumer. Errors: 55P03 when another transaction holds the lock for a minute.
create or replace function _pgqueue.lock_consumer(p_consumer_id int) returns void
language sql as $$ select _pgqueue.await_lock(_pgqueue.lock_class_consumer(), p_consumer_id, false) $$;

-- Tries to lock a consumer, without waiting. Returns whether the caller has the lock.
create or replace function _pgqueue.try_lock_consumer(p_consumer_id int) returns boolean
language plpgsql as $$
begin
    return pg_try_advisory_xact_lock(_pgqueue.lock_class_consumer(), p_consumer_id);  -- lock: consumer
end $$;

-- Locks a consumer, and what is new for it, so that no other session claims new messages. For callers in tries: a
-- session that has claimed new messages may need the consumer's lock next. Errors: as lock_consumer().
create or replace function _pgqueue.lock_consumer_alone(p_consumer_id int) returns void
language plpgsql as $$
begin
    perform _pgqueue.lock_consumer(p_consumer_id);
    perform _pgqueue.await_lock(_pgqueue.lock_class_new(), p_consumer_id, false);
end $$;

-- Tries to lock what is new for a consumer, exclusively. Returns whether the caller has the lock.
create or replace function _pgqueue.try_lock_new(p_consumer_id int) returns boolean
language sql as $$ select pg_try_advisory_xact_lock(_pgqueue.lock_class_new(), p_consumer_id) $$;  -- lock: new

-- Takes the publish lock of a stream, shared, without waiting. Returns false while another session has the lock
-- exclusively: then call lock_publish(), which waits. (In SQL, so that it is inlined into the caller's expression.)
create or replace function _pgqueue.try_lock_publish(p_stream_id int) returns boolean
language sql as $$
    select pg_try_advisory_xact_lock_shared(_pgqueue.lock_class_publish(), p_stream_id)  -- lock: publish
$$;

-- Takes the publish lock of a stream, shared, and waits for it. Errors: as lock_consumer().
create or replace function _pgqueue.lock_publish(p_stream_id int) returns void
language sql as $$ select _pgqueue.await_lock(_pgqueue.lock_class_publish(), p_stream_id, true) $$;

-- Waits for locks: executes a statement that takes them, with a limited wait. This is the only place that sets the
-- limit; a shorter lock_timeout of the session has precedence.
--   p_what       what is locked, for the error
--   p_statement  returns one number, or JSON; its parameters are p_id ($1) and p_more ($2)
--   p_try        null: wait in Postgres' queue. For a lock that others would queue for, or that is taken together with
--                locks that others need: how long the first try may wait. A failed try is rolled back, which releases
--                all its locks. A pause of four times as long lets the others continue. Then the next try may wait
--                for twice as long, up to p_most: less than the second after which Postgres checks for deadlocks
--   p_limit      how long to wait in all
--   p_class      the class of an advisory lock with the number p_id: the error names the holders
--   p_session, p_within  of the caller: its lock_timeout, and whether it is a part of a try
-- Returns the result of the statement. Errors: 55P03; those of the statement, which is rolled back then.
create or replace function _pgqueue.await(p_what text, p_statement text, p_id bigint, p_more jsonb default null,
                                          p_try interval default null, p_most interval default '300 ms',
                                          p_limit interval default _pgqueue.patience(), p_class int default null,
                                          p_session text default current_setting('lock_timeout'),
                                          p_within text default current_setting('pgqueue.trying', true)) returns jsonb
language plpgsql
set lock_timeout = 0  -- so the values of set_config() below end with this function, too; for pgqueue.trying, only a
                      -- superuser could do this
as $$
declare
    v_limit  interval := least(p_limit, _pgqueue.patience(), nullif(p_session::interval, '0'));
    v_until  timestamptz := clock_timestamp() + v_limit;
    v_try    interval := coalesce(p_try, v_limit);
    v_result jsonb;
begin
    if p_within = 'yes' and p_try is null then
        -- A part of another try, which rolls back all of it. (With a subtransaction of its own, sessions that wait for
        -- one of its rows would wait until the transaction ends, although the try was rolled back.)
        perform set_config('lock_timeout', p_session, true);
        execute p_statement into v_result using p_id, p_more;
        return v_result;
    end if;
    loop
        begin
            perform set_config('pgqueue.trying', case when p_try is not null then 'yes' else '' end, true);
            perform set_config('lock_timeout',
                               greatest(extract(epoch from least(v_try, v_until - clock_timestamp())) * 1000,
                                        1)::int::text, true);
            execute p_statement into v_result using p_id, p_more;
            perform set_config('pgqueue.trying', coalesce(p_within, ''), true);
            return v_result;
        exception when lock_not_available or deadlock_detected or sqlstate 'PQ099' then
            if sqlstate = '40P01' and p_try is null then
                raise;
            elsif p_try is null or clock_timestamp() >= v_until then
                raise exception 'waited % for %, held by %',
                                case v_limit when interval '1 minute' then 'a minute'
                                             else extract(epoch from v_limit)::real || ' s' end, p_what,
                                case when p_class is null then 'another transaction'
                                     else _pgqueue.holders(p_class, p_id::int) end
                    using errcode = 'lock_not_available',
                          hint = 'Nothing was changed: try again. Keep transactions short, or end the session that '
                                 'holds the lock with pg_terminate_backend.';
            end if;
        end;
        perform pg_sleep_for(least(4 * v_try, v_until - clock_timestamp()));
        v_try := least(2 * v_try, p_most);
    end loop;
end $$;

-- The entries of pg_locks for an advisory lock of this database.
create or replace function _pgqueue.advisory_locks(p_class int, p_id int) returns setof pg_locks
language sql stable as $$
    select * from pg_locks
    where locktype = 'advisory' and classid = p_class::oid and objid = p_id::oid and objsubid = 2
      and database = (select oid from pg_database where datname = current_database())
$$;

-- The holders of an advisory lock, for an error.
create or replace function _pgqueue.holders(p_class int, p_id int) returns text
language sql stable as $$
    select coalesce(string_agg(case when l.pid is null then 'a prepared transaction'
                                    else format('process %s (%s, %s)', l.pid, coalesce(a.usename, '?'),
                                                coalesce(nullif(a.application_name, ''), '?')) end, ', '),
                    'another transaction')
    from _pgqueue.advisory_locks(p_class, p_id) l left join pg_stat_activity a on a.pid = l.pid
    where l.granted
$$;

-- Takes an advisory lock, and waits for it. Errors: 55P03, see await().
create or replace function _pgqueue.await_lock(p_class int, p_id int, p_shared boolean) returns void
language plpgsql as $$
begin
    if (p_shared and pg_try_advisory_xact_lock_shared(p_class, p_id))  -- lock: any
       or (not p_shared and pg_try_advisory_xact_lock(p_class, p_id)) then  -- lock: any
        return;
    end if;
    perform _pgqueue.await(
        case p_class when _pgqueue.lock_class_consumer() then 'the lock of ' || _pgqueue.consumer_name(p_id)
                     when _pgqueue.lock_class_new() then 'what is new for ' || _pgqueue.consumer_name(p_id)
                     when _pgqueue.lock_class_history() then 'the history of stream ' || p_id
                     when _pgqueue.lock_class_schedules() then 'the schedules of stream ' || p_id
                     else 'the publish lock of stream ' || p_id end,
        case when p_shared
             then 'select 0 from pg_advisory_xact_lock_shared(($2 -> 0)::int, $1::int)'  -- lock: any
             else 'select 0 from pg_advisory_xact_lock(($2 -> 0)::int, $1::int)' end,  -- lock: any
        p_id, jsonb_build_array(p_class), p_class => p_class);
end $$;

-- Locks the row of a stream, against changes.
--   p_alone  also against new consumers and captures, which refer to it
create or replace function _pgqueue.lock_stream(p_stream_id int, p_alone boolean default false) returns void
language plpgsql as $$
begin
    perform _pgqueue.await('stream ' || p_stream_id,
        case when p_alone then 'select 0 from pgqueue.streams where stream_id = $1 for update'  -- lock: stream
             else 'select 0 from pgqueue.streams where stream_id = $1 for no key update' end,  -- lock: stream
        p_stream_id);
end $$;

-- Locks the bindings of all streams, against changes.
create or replace function _pgqueue.lock_bindings() returns void
language plpgsql as $$
begin
    perform _pgqueue.await('the table of bindings', 'select 0 from _pgqueue.lock_bindings_now()', null);
end $$;

-- The statement of lock_bindings(): await() needs one that returns a row.
create or replace function _pgqueue.lock_bindings_now() returns void
language plpgsql as $$
begin
    lock table pgqueue.bindings in share row exclusive mode;  -- lock: bindings
end $$;

-- Locks the numbers of a stream against other calls that take many. A caller that does not get the lock within a second
-- continues without it: its numbers may then be several ranges.
create or replace function _pgqueue.lock_seqs(p_stream_id int) returns void
language plpgsql as $$
begin
    if not pg_try_advisory_xact_lock(_pgqueue.lock_class_seqs(), p_stream_id) then  -- lock: seqs
        begin
            perform _pgqueue.await('the numbers',
                'select 0 from pg_advisory_xact_lock(_pgqueue.lock_class_seqs(), $1::int)',  -- lock: seqs
                p_stream_id, p_limit => interval '1 s');
        exception when lock_not_available or deadlock_detected then
            null;
        end;
    end if;
end $$;

-- Keeps the old publications of a stream, and their messages, from being trimmed until this transaction ends. Errors:
-- as lock_consumer().
create or replace function _pgqueue.lock_history(p_stream_id int) returns void
language sql as $$ select _pgqueue.await_lock(_pgqueue.lock_class_history(), p_stream_id, true) $$;

-- Tries to lock the history of a stream exclusively, so that the caller can delete old publications. Returns whether
-- the caller has the lock.
create or replace function _pgqueue.try_lock_history_alone(p_stream_id int) returns boolean
language sql as $$
    select pg_try_advisory_xact_lock(_pgqueue.lock_class_history(), p_stream_id)  -- lock: history
$$;

-- The virtual ids of the open transactions that may have published to a stream.
create or replace function _pgqueue.publishers(p_stream_id int) returns text[]
language plpgsql stable as $$
begin
    return (select coalesce(array_agg(virtualtransaction order by virtualtransaction), '{}')
            from _pgqueue.advisory_locks(_pgqueue.lock_class_publish(), p_stream_id));
end $$;

-- Which of some recorded transactions are still open. A prepared transaction has another virtual id after a restart of
-- the server, -1/..., and so counts as recorded.
--   p_recorded  null: all transactions
--   p_open      the transactions that are open now
create or replace function _pgqueue.still_open(p_recorded text[], p_open text[]) returns text[]
language plpgsql immutable as $$
begin
    return array(select o from unnest(p_open) o where (o = any (p_recorded)) is not false or o like '-1/%');
end $$;

-- The virtual ids of the open transactions of this database, except the caller's own. (Autovacuum, which has no role,
-- calls no function.)
--   p_prepared  also prepared ones
create or replace function _pgqueue.open_transactions(p_prepared boolean) returns text[]
language sql as $$
    select array(select l.virtualxid from pg_locks l join pg_stat_activity a on a.pid = l.pid
                 where l.locktype = 'virtualxid' and l.granted and l.mode = 'ExclusiveLock'
                   and a.datname = current_database() and l.pid <> pg_backend_pid() and a.usesysid is not null
                 union all
                 select l.virtualtransaction from pg_locks l join pg_prepared_xacts p on p.transaction = l.transactionid
                 where p_prepared and l.locktype = 'transactionid' and l.pid is null
                   and p.database = current_database())
$$;

-- Whether a session waits for publications of a stream (queue/claim/listen.sql). Of two concurrent calls, one may
-- return true although no session waits: then a notification has no receiver.
create or replace function _pgqueue.is_waited_for(p_stream_id int) returns boolean
language sql as $$
    select not case when pg_try_advisory_lock(_pgqueue.lock_class_waiting(), p_stream_id)  -- lock: waiting
                    then pg_advisory_unlock(_pgqueue.lock_class_waiting(), p_stream_id) else false end
$$;

-- Notifies sessions that wait for messages of a stream, if the setting notify allows it: a transaction that has
-- notified cannot be prepared.
create or replace function _pgqueue.wake(p_stream_id int) returns void
language sql as $$
    select pg_notify(_pgqueue.channel(stream_id), '') from pgqueue.streams where stream_id = p_stream_id and notify
$$;

-- Locks a checkpoint reader. Errors: as lock_consumer().
create or replace function _pgqueue.lock_reader(p_reader uuid) returns void
language plpgsql as $$
begin
    if not _pgqueue.try_lock_reader(p_reader) then
        perform _pgqueue.await('checkpoint reader ' || p_reader,
                               'select 0 from pg_advisory_xact_lock($1)',  -- lock: reader
                               hashtextextended('pgqueue reader ' || p_reader::text, 0));
    end if;
end $$;

-- Tries to lock a checkpoint reader, without waiting. Returns whether the caller has the lock.
create or replace function _pgqueue.try_lock_reader(p_reader uuid) returns boolean
language sql as $$
    select pg_try_advisory_xact_lock(hashtextextended('pgqueue reader ' || p_reader::text, 0))  -- lock: reader
$$;

-- Makes the caller's commit durable when it returns, also with synchronous_commit = off: Spark's log contains the
-- result of the call. (All earlier commits are durable then, too.)
create or replace function _pgqueue.commit_durably() returns void
language sql as $$
    select set_config('synchronous_commit', 'local', true) where current_setting('synchronous_commit') = 'off'
$$;
