-- Streams that were dropped. drop_stream() deletes a stream and its consumers, and leaves its tables: a session that
-- has seen the stream just before may send to it, seek in it, or copy messages to it, and would come upon a table or a
-- sequence that is gone. maintain() drops them when the transactions are over that were open after the stream had gone.
-- So no call fails halfway, and drop_stream() waits for no sender.

-- Deletes what tables of several streams have of a stream that was dropped; or, while transactions are open that may be
-- at work with the stream, notes these. Returns whether drop_tables() may follow. Locks: the maintenance of the stream,
-- if nobody has it.
create or replace function _pgqueue.clear_dropped(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_dropped pgqueue.dropped_streams;
    v_open    text[];
begin
    if not pg_try_advisory_xact_lock(_pgqueue.lock_class_maintain(), p_stream_id) then  -- lock: maintain
        return false;
    end if;
    -- a transaction that begins after the snapshot of this statement does not see the stream
    select * into v_dropped from pgqueue.dropped_streams where stream_id = p_stream_id;
    if not found or v_dropped.dropped_by = pg_current_xact_id_if_assigned() then
        return false;
    end if;
    v_open := _pgqueue.open_transactions(false);
    if v_dropped.transactions is null then
        update pgqueue.dropped_streams set transactions = v_open where stream_id = p_stream_id;
    else
        v_open := array(select t from unnest(v_open) t where t = any (v_dropped.transactions));
    end if;
    if v_open <> '{}' then
        return false;
    end if;
    -- no other session needs these rows any more
    perform _pgqueue.on_clear_stream(p_stream_id);
    return true;
end $$;

-- Drops the tables of a stream that was dropped. The sequences come first: their locks wait for prepared transactions
-- that have a number of the stream. Behind the last lock, of messages, the senders of all streams wait. Locks: these.
create or replace function _pgqueue.drop_tables(p_stream_id int) returns void
language plpgsql as $$
begin
    execute format('drop sequence pgqueue.seq_%1$s, pgqueue.publication_%1$s', p_stream_id);  -- lock: table
    execute format('lock table pgqueue.messages_%s in access exclusive mode', p_stream_id);  -- lock: table
    execute format('alter table pgqueue.messages detach partition pgqueue.messages_%s', p_stream_id);  -- lock: table
    execute format('drop function if exists _pgqueue.payloads_%1$s, _pgqueue.payload_%1$s', p_stream_id);
    execute format('drop table pgqueue.messages_%s', p_stream_id);  -- lock: table
    delete from pgqueue.dropped_streams where stream_id = p_stream_id;
end $$;
