-- Waiting for publications, instead of asking again and again.
--
-- Commits that notify queue up for a lock of the whole server, so a producer notifies only when somebody waits. A
-- waiting session holds a shared advisory lock by the stream's id. A producer that cannot get this lock alone, for a
-- moment, notifies. No publication is missed:
--   * A producer takes the publish lock before it asks whether somebody waits, and holds it until its transaction is
--     over for every new snapshot.
--   * A session that begins to wait takes its lock first, and looks then at the sessions that have the publish lock:
--     only those may not have seen it.
--   * So it claims once after it began to wait, and again each time that one of those is over. All other producers
--     notify.
-- The lock goes with the session, however that ends. A session that holds it for nothing makes producers notify for
-- nothing.
--
-- From any language, on a connection of its own (a transaction pooler would give the lock to others):
--   1. receive; if there is nothing, start_waiting, and receive again: what was published in between has notified
--      nobody
--   2. until there is something: wait for a notification on the channel, until next_due at most, and for a second,
--      because a delay or a lease that ends notifies nobody; then receive. While there are publishers left, ask
--      still_publishing every few milliseconds, and receive when they are fewer.
--   3. stop_waiting when there is much to do: until then, 2. is enough

-- Begins to wait for publications of a stream: this session listens from now on, and producers notify it.
-- Safe to repeat.
--   p_pid  the server process of the connection, as the client was told when it connected; null: as it is. Behind a
--          pooler it is another one, and what belongs to a session would be left with somebody else's session: nothing
--          is done then
-- Returns the channel; null when nobody will notify: the stream's setting notify is off, there is a pooler, or the
-- server is a standby. And the transactions that may be publishing now without notifying, see still_publishing.
-- Errors: PQ001. Locks: as above, to the end of the session or stop_waiting. The session hears notifications once this
-- transaction has ended.
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
        perform pg_sleep(0.001);  -- a producer is asking; or somebody keeps the lock, and nobody can be told
    end loop;
end $$;

-- Returns which of some transactions may still be publishing to a stream.
-- When one of them is over, the messages that it published can be received.
--   p_publishers  as start_waiting or this function returned them
-- Errors: PQ001. Locks: none.
create or replace function pgqueue.still_publishing(p_stream text, p_publishers text[]) returns text[]
language plpgsql as $$
declare
    v_publishers text[] := _pgqueue.publishers((_pgqueue.stream(p_stream)).stream_id);
begin
    return array(select p from unnest(p_publishers) p where p = any (v_publishers));
end $$;

-- Returns when a consumer that got nothing should claim again: the next delay or lease ends, or a schedule is due.
-- A time that is over: now. Null: when something is published. Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.next_due(p_stream text, p_consumer text) returns timestamptz
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    return _pgqueue.next_due(v_consumer, _pgqueue.cursor(v_consumer.consumer_id), true);
end $$;

-- Stops waiting: producers need not notify this session any more. It goes on listening, as others may notify.
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
    return exists (select from pg_locks
                   where locktype = 'advisory' and classid = _pgqueue.lock_class_waiting()::oid
                     and objid = p_stream_id::oid and objsubid = 2
                     and mode = 'ShareLock' and pid = pg_backend_pid()
                     and database = (select oid from pg_database where datname = current_database()));
end $$;
