-- The locks, in the order in which they are taken:
--
--     history   advisory, of a stream: shared by those who rely on old publications being there
--     reader    advisory: one session at a time moves a Spark reader
--     claim     its row: whoever settles, extends or releases it
--     consumer  advisory: taking, dealing, and whatever becomes ready
--     run       its row
--
-- All are held to the end of the transaction. Who holds the consumer's lock never waits for a claim: it passes over locked ones.
-- The publish lock of a stream is shared by its producers; nobody waits for it (see core/gaps.sql). The lock of its numbers is the
-- exception to all that: it is let go when the numbers are taken, and who does not get it within a second goes on without.
--
-- Anybody who may connect can hold an advisory lock, so waiting for one ends: with an error that says who holds it.

-- Locks a consumer. Errors: 55P03 when somebody holds it for a minute.
create or replace function pgqueue._lock_consumer(p_consumer_id int) returns void
language plpgsql
as $$
begin
    if not pg_try_advisory_xact_lock(pgqueue._lock_class_consumer(), p_consumer_id) then
        perform pgqueue._await_lock(pgqueue._lock_class_consumer(), p_consumer_id, false);
    end if;
end $$;

-- The same if nobody has it. Returns whether the caller has it now.
create or replace function pgqueue._try_lock_consumer(p_consumer_id int) returns boolean
language plpgsql
as $$
begin
    return pg_try_advisory_xact_lock(pgqueue._lock_class_consumer(), p_consumer_id);
end $$;

-- Notes that this transaction publishes to a stream. Returns whether it has: not while somebody keeps all others from it, whom
-- _lock_publish waits for. (In SQL, so that it becomes a part of the caller's expression.)
create or replace function pgqueue._try_lock_publish(p_stream_id int) returns boolean
language sql
as $$ select pg_try_advisory_xact_lock_shared(pgqueue._lock_class_publish(), p_stream_id) $$;

-- The same, and waits. Errors: as _lock_consumer.
create or replace function pgqueue._lock_publish(p_stream_id int) returns void
language plpgsql
as $$
begin
    if not pgqueue._try_lock_publish(p_stream_id) then
        perform pgqueue._await_lock(pgqueue._lock_class_publish(), p_stream_id, true);
    end if;
end $$;

-- Waits for an advisory lock that could not be had at once.
create or replace function pgqueue._await_lock(p_class int, p_id int, p_shared boolean) returns void
language plpgsql
set lock_timeout = '60s'
as $$
begin
    if p_shared then
        perform pg_advisory_xact_lock_shared(p_class, p_id);
    else
        perform pg_advisory_xact_lock(p_class, p_id);
    end if;
exception when lock_not_available then
    raise exception 'the % was held for a minute by %',
        case p_class when pgqueue._lock_class_consumer() then 'lock of ' || pgqueue._consumer_name(p_id)
                     when pgqueue._lock_class_history() then 'history of stream ' || p_id
                     when pgqueue._lock_class_schedules() then 'schedules of stream ' || p_id
                     else 'publish lock of stream ' || p_id end,
        coalesce((select string_agg(case when l.pid is null then 'a prepared transaction'
                                         else format('process %s (%s, %s)', l.pid, coalesce(a.usename, '?'),
                                                     coalesce(nullif(a.application_name, ''), '?')) end, ', ')
                  from pg_locks l left join pg_stat_activity a on a.pid = l.pid
                  where l.locktype = 'advisory' and l.granted and l.classid = p_class::oid and l.objid = p_id::oid and l.objsubid = 2
                    and l.database = (select oid from pg_database where datname = current_database())), 'a transaction that is over now')
        using errcode = 'lock_not_available', hint = 'Keep transactions that claim short; or end that process with pg_terminate_backend.';
end $$;

-- Locks the numbers of a stream against others who take many. Who cannot have the lock within a second goes on without: only their order suffers.
create or replace function pgqueue._lock_seqs(p_stream_id int) returns void
language plpgsql
as $$
begin
    if not pg_try_advisory_xact_lock(pgqueue._lock_class_seqs(), p_stream_id) then
        perform pgqueue._await_seqs(p_stream_id);
    end if;
end $$;

-- Waits for that lock.
create or replace function pgqueue._await_seqs(p_stream_id int) returns void
language plpgsql
set lock_timeout = '1s'
as $$
begin
    perform pg_advisory_xact_lock(pgqueue._lock_class_seqs(), p_stream_id);
exception when lock_not_available or deadlock_detected then
    null;
end $$;

-- Keeps the old publications of a stream, and their messages, while this transaction relies on them. Errors: as _lock_consumer.
create or replace function pgqueue._lock_history(p_stream_id int) returns void
language plpgsql
as $$
begin
    if not pg_try_advisory_xact_lock_shared(pgqueue._lock_class_history(), p_stream_id) then
        perform pgqueue._await_lock(pgqueue._lock_class_history(), p_stream_id, true);
    end if;
end $$;

-- Keeps others from relying on old publications, to delete some; only if nobody does. Returns whether the caller may.
create or replace function pgqueue._try_lock_history_alone(p_stream_id int) returns boolean
language plpgsql
as $$
begin
    return pg_try_advisory_xact_lock(pgqueue._lock_class_history(), p_stream_id);
end $$;

-- The virtual ids of the transactions that may have published to a stream and are not over.
create or replace function pgqueue._publishers(p_stream_id int) returns text[]
language plpgsql stable
as $$
begin
    return (select coalesce(array_agg(virtualtransaction order by virtualtransaction), '{}') from pg_locks
            where locktype = 'advisory' and classid = pgqueue._lock_class_publish()::oid and objid = p_stream_id::oid and objsubid = 2
              and database = (select oid from pg_database where datname = current_database()));
end $$;

-- Whether somebody waits for publications of a stream (functions/waiting.sql). Two who ask at the same moment may both be told so.
create or replace function pgqueue._is_waited_for(p_stream_id int) returns boolean
language sql
as $$
    select not case when pg_try_advisory_lock(pgqueue._lock_class_waiting(), p_stream_id)
                    then pg_advisory_unlock(pgqueue._lock_class_waiting(), p_stream_id) else false end
$$;

-- Locks a reader.
create or replace function pgqueue._lock_reader(p_reader uuid) returns void
language sql
as $$ select pg_advisory_xact_lock(hashtextextended('pgqueue reader ' || p_reader::text, 0)) $$;

-- The same if nobody has it. Returns whether the caller has it now.
create or replace function pgqueue._try_lock_reader(p_reader uuid) returns boolean
language sql
as $$ select pg_try_advisory_xact_lock(hashtextextended('pgqueue reader ' || p_reader::text, 0)) $$;

-- Locks a live claim; then with p_line, for what puts runs back in the line, the consumer.
-- Returns the claim; null and a warning when it is not live.
create or replace function pgqueue._lock_claim(p_claim_id bigint, p_line boolean) returns pgqueue.claims
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    select * into v_claim from pgqueue.claims where claim_id = p_claim_id for update;
    if not found or not v_claim.live then
        perform pgqueue._warn_not_live(p_claim_id);
        return null;
    end if;
    if p_line then
        perform pgqueue._lock_consumer(v_claim.consumer_id);
    end if;
    return v_claim;
end $$;

-- Warns that a claim is not live.
create or replace function pgqueue._warn_not_live(p_claim_id bigint) returns void
language plpgsql
as $$
begin
    raise warning 'claim % is not live: it was settled, or its visibility timeout passed and another claimer took over; nothing was changed',
                  coalesce(p_claim_id::text, 'null');
end $$;

-- Spark's log goes on from what the database said, so the caller's commit is on disk when it returns, also where
-- synchronous_commit is off. (All that was committed before is on disk then, too.)
create or replace function pgqueue._commit_durably() returns void
language plpgsql
as $$
begin
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'local', true);
    end if;
end $$;
