-- Publishing: one row says that messages are visible. Nothing is written per consumer.

-- Makes messages visible: the last step of send and send_batch.
-- Returns the publication id. Locks: the publish lock, shared (notify takes its global lock at commit).
create or replace function pgqueue._publish(p_stream pgqueue.streams, p_seqs int8multirange, p_count bigint, p_priority int,
                                            p_deliver_at timestamptz, p_consumers int[]) returns bigint
language plpgsql
as $$
declare
    v_id bigint;
begin
    perform pgqueue._lock_publish(p_stream.stream_id);  -- before the publication id: consumers rely on it to tell running from dead
    v_id := nextval(format('pgqueue.publication_%s', p_stream.stream_id)::regclass);
    insert into pgqueue.publications (publication_id, message_count, published_at, deliver_at, stream_id, priority, seqs, consumers)
    values (v_id, p_count, clock_timestamp(), p_deliver_at, p_stream.stream_id, p_priority, p_seqs, p_consumers);
    if p_stream.notify then
        perform pg_notify(pgqueue._channel(p_stream.stream_id), '');
    end if;
    return v_id;
end $$;
