-- Waiting for publications, instead of polling.
--
-- Commits that notify queue up for a lock of the whole server, so a producer notifies only if a session waits. A
-- waiting session holds a shared advisory lock for the stream. A producer that cannot get this lock exclusively, for a
-- moment, notifies. No publication is missed:
--   * A producer takes the publish lock before it checks whether a session waits, and holds it until all new snapshots
--     see its transaction as ended.
--   * A session that starts to wait takes its lock first, and then reads which sessions have the publish lock: only
--     those may have missed it.
--   * So the session claims once after it has started to wait, and again whenever one of those has ended. All other
--     producers notify.
-- The lock ends with the session. A session that holds it without need makes producers notify without need.
--
-- From any language, on a connection of its own (a transaction pooler would give the lock to other clients):
--   1. Call receive. If it returns nothing, call start_waiting, and receive again: publications in between have not
--      notified.
--   2. Until it returns something: wait for a notification on the channel, but not longer than until next_due, nor
--      than a second, because delays and leases end without a notification; then call receive. While publishers are
--      left, call still_publishing every few milliseconds, and receive when there are fewer of them.
--   3. Call stop_waiting when there is much to do. Until then, step 2 is enough.

-- Starts to wait for publications of a stream: this session listens, and producers notify it.
-- Safe to repeat.
--   p_pid  the server process that the client got when it connected; null: do not compare. Behind a pooler it is
--          another process, and the lock would stay with the session of another client: then the call does nothing
-- Returns the channel; null if there are no notifications: the setting notify of the stream is off, there is a pooler,
-- or the server is a standby. Also returns the transactions that may be publishing without notifying, see
-- still_publishing.
-- Errors: PQ001. Locks: as above, until the session ends or calls stop_waiting. The session receives notifications
-- after this transaction has ended.
create or replace function pgqueue.start_waiting(p_stream text, p_pid int default null, out channel text,
                                                 out publishers text[])
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    publishers := '{}';
    if not v_stream.notify or p_pid <> pg_backend_pid() or pg_is_in_recovery() then
        return;
    end if;
    execute format('listen %I', _pgqueue.channel(v_stream.stream_id));
    for v_try in 1..100 loop
        if _pgqueue.waits(v_stream.stream_id)
            -- lock: waiting
            or pg_try_advisory_lock_shared(_pgqueue.lock_class_waiting(), v_stream.stream_id) then
            channel := _pgqueue.channel(v_stream.stream_id);
            publishers := _pgqueue.publishers(v_stream.stream_id);
            return;
        end if;
        perform pg_sleep(0.001);  -- a producer is checking; or a session keeps the lock exclusively
    end loop;
end $$;

-- Returns which of some transactions may still be publishing to a stream.
-- When one of them has ended, its messages can be received.
--   p_publishers  as returned by start_waiting or this function
-- Errors: PQ001. Locks: none.
create or replace function pgqueue.still_publishing(p_stream text, p_publishers text[]) returns text[]
language plpgsql as $$
declare
    v_publishers text[] := _pgqueue.publishers((_pgqueue.stream(p_stream)).stream_id);
begin
    return array(select p from unnest(p_publishers) p where p = any (v_publishers));
end $$;

-- Returns when a consumer that received nothing should claim again: when a delay or lease ends, or a schedule is due.
-- A time in the past means now; null means when something is published. Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.next_due(p_stream text, p_consumer text) returns timestamptz
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    return _pgqueue.next_due(v_consumer, _pgqueue.cursor(v_consumer.consumer_id), true);
end $$;

-- Stops waiting: producers need not notify this session. It still receives notifications that others cause.
-- Returns whether it waited. Errors: PQ001. Locks: releases that of start_waiting.
create or replace function pgqueue.stop_waiting(p_stream text) returns boolean
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    return _pgqueue.waits(v_stream.stream_id)
        and pg_advisory_unlock_shared(_pgqueue.lock_class_waiting(), v_stream.stream_id);
end $$;

-- Whether this session waits for publications of a stream.
create or replace function _pgqueue.waits(p_stream_id int) returns boolean
language plpgsql as $$
begin
    return exists (select from _pgqueue.advisory_locks(_pgqueue.lock_class_waiting(), p_stream_id)
                   where mode = 'ShareLock' and pid = pg_backend_pid());
end $$;
