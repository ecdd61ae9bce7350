-- The Spark sink: tasks write messages and stage them; the driver's commit makes the batch visible, once.

-- Begins a write of a batch of a sink, and returns its number, which tasks pass to stage.
-- A later write of the batch has a higher number. Each call of stage then deletes a part of the chunks of earlier
-- writes, whose application was killed.
create or replace function pgqueue.begin_write() returns bigint
language sql volatile as $$ select nextval('pgqueue.write_numbers') $$;

-- Reserves new numbers of a stream for messages that the caller writes and stages, or publishes, in this transaction.
-- The caller writes them into pgqueue.written (stream_id, seq, key, data, data_bytes, headers), which accepts no other
-- numbers.
--   p_count  1 to 10,000,000
-- Returns p_count numbers, nearly always one range. Errors: PQ001, PQ003, PQ011. Locks: the numbers of the stream,
-- until it returns.
create or replace function pgqueue.reserve(p_stream_id int, p_count int) returns int8multirange
language plpgsql as $$
declare
    v_stream_id int := (_pgqueue.stream_of(p_stream_id)).stream_id;
    v_set       int8multirange;
begin
    if (p_count between 1 and _pgqueue.max_reserved()) is not true then
        raise exception 'p_count must be 1 to %, not %', _pgqueue.max_reserved(), coalesce(p_count::text, 'null')
            using errcode = 'PQ003', column = 'p_count', hint = 'Write and stage messages in parts.';
    end if;
    v_set := _pgqueue.set_of_taken(_pgqueue.take_seqs(v_stream_id, p_count));
    perform _pgqueue.refuse_behind('stream ' || p_stream_id) where lower(v_set) < 1;
    insert into pgqueue.reservations (stream_id, xid, seqs) values (p_stream_id, pg_current_xact_id(), v_set);
    perform _pgqueue.record_reserved(p_stream_id, v_set);
    return v_set;
end $$;

-- The reservation of messages that this transaction wrote; all of them must be stored, and fit the stream. Only numbers
-- of this transaction are allowed: others may be published, or belong to another writer. Also returns the digest of the
-- messages, if p_digest. Errors: PQ003, PQ004.
create or replace function _pgqueue.written_reservation(p_stream pgqueue.streams, p_seqs int8multirange,
                                                        p_digest boolean, out o_reservation bigint,
                                                        out o_digest numeric)
language plpgsql as $$
begin
    if (isempty(p_seqs) or lower_inf(p_seqs) or upper_inf(p_seqs)) is not false then
        raise exception 'p_seqs must be a set of some numbers, not %', coalesce(left(p_seqs::text, 100), 'null')
            using errcode = 'PQ003', column = 'p_seqs';
    end if;
    o_reservation := (select reservation_id from pgqueue.reservations
                      where xid = pg_current_xact_id_if_assigned() and stream_id = p_stream.stream_id
                        and p_seqs <@ seqs limit 1);
    if o_reservation is null then
        raise exception 'p_seqs must be a set of numbers that this transaction reserved together, not %',
                        left(p_seqs::text, 100)
            using errcode = 'PQ003', column = 'p_seqs',
                  hint = 'Call pgqueue.reserve, write the messages and publish or stage them in one transaction.';
    end if;
    o_digest := _pgqueue.check_written(p_stream, p_seqs, p_digest);
end $$;

-- Publishes messages that the caller wrote, with numbers that it reserved in this transaction. Like send_batch, for
-- large numbers of messages, which the caller writes by COPY.
--   p_seqs        of one reservation
--   p_dedup_keys  one per message in the order of their numbers, null for a message without a key, or null; duplicates
--                 are deleted
--   the rest as in send
-- Returns how many messages were published; and, with dedup keys, the number of each message, for a duplicate that of
-- the first one. Errors: PQ001, PQ002; PQ003, also when a message is not written; PQ004, PQ013. Locks: as send.
create or replace function pgqueue.publish_written(p_stream text, p_seqs int8multirange, p_priority int default 0,
                                                   p_deliver_at timestamptz default null,
                                                   p_consumers text[] default null, p_dedup_keys text[] default null,
                                                   p_expires_at timestamptz default null)
returns table (published bigint, first_seqs bigint[])
language plpgsql as $$
declare
    v_stream    pgqueue.streams := _pgqueue.stream(p_stream);
    v_consumers int[] := _pgqueue.consumer_ids(v_stream.stream_id, p_consumers);
    v_seqs      int8multirange := p_seqs;
begin
    perform _pgqueue.check_publication(p_priority, p_deliver_at, p_expires_at);
    -- the reservation is of this transaction, so no other session holds it
    perform _pgqueue.use_reservation((_pgqueue.written_reservation(v_stream, p_seqs, false)).o_reservation, p_seqs);
    if p_dedup_keys is not null then
        select k.seqs, k.first_seqs into v_seqs, first_seqs
        from _pgqueue.delete_duplicates(v_stream, p_seqs, p_dedup_keys) k;
    end if;
    published := _pgqueue.cardinality(v_seqs);
    if published > 0 then
        perform _pgqueue.publish(v_stream, v_seqs, published, p_priority, p_deliver_at, v_consumers,
                                 _pgqueue.round_up_to_second(p_expires_at));
    end if;
    return next;
end $$;

-- Records messages that a task of a sink has written, before they are visible. It is called in the transaction that
-- reserved their numbers and wrote them.
--   p_seqs        of one reservation
--   p_deliver_at, p_expires_at  rounded up to a second by the writer, so that messages share publications
--   p_dedup_keys  one per message in the order of their numbers, null for a message without a key, or null;
--                 publish_staged deletes duplicates
--   p_consumers   the consumers to publish to; null: all
--   p_routed      whether the batch may have messages of several streams
--   p_write_no    the number of begin_write; null: not known
-- Returns the id of the staged chunk. Errors: PQ001, PQ002; PQ003, also when a message is not written; PQ004 for a
-- message that does not fit the stream; PQ008 when a later write of the batch has begun to stage. Locks: the chunks of
-- earlier writes, and their reservations; it skips those that another session holds.
create or replace function pgqueue.stage(p_sink text, p_batch bigint, p_stream_id int, p_seqs int8multirange,
                                         p_priority int default 0, p_deliver_at timestamptz default null,
                                         p_dedup_keys text[] default null, p_consumers text[] default null,
                                         p_expires_at timestamptz default null, p_routed boolean default false,
                                         p_write_no bigint default null) returns bigint
language plpgsql as $$
declare
    v_stream    pgqueue.streams := _pgqueue.stream_of(p_stream_id);
    v_consumers int[] := _pgqueue.consumer_ids(p_stream_id, p_consumers);
    v_written   record;
    v_id        bigint;
begin
    perform _pgqueue.check_batch(p_sink, p_batch);
    perform _pgqueue.check_publication(p_priority, p_deliver_at, p_expires_at);
    if p_write_no is not null
       and (p_write_no <= pg_sequence_last_value('pgqueue.write_numbers')) is not true then  -- recover() relies on it
        raise exception 'p_write_no must be a number of begin_write(), not %', p_write_no
            using errcode = 'PQ003', column = 'p_write_no';
    end if;
    v_written := _pgqueue.written_reservation(v_stream, p_seqs, _pgqueue.is_query(p_sink));
    if p_dedup_keys is not null then
        perform _pgqueue.check_dedup_keys(v_stream, p_dedup_keys, _pgqueue.cardinality(p_seqs));
    end if;
    perform _pgqueue.end_earlier_writes(p_sink, p_batch, p_stream_id, p_routed, p_write_no)
    where p_write_no is not null;
    perform _pgqueue.commit_durably();
    insert into pgqueue.staged_chunks (stream_id, sink, batch, priority, deliver_at, seqs, message_count,
                                       reservation_id, dedup_keys, consumers, expires_at, routed, digest, write_no)
    values (p_stream_id, p_sink, p_batch, p_priority, p_deliver_at, p_seqs, _pgqueue.cardinality(p_seqs),
            v_written.o_reservation, p_dedup_keys, v_consumers, _pgqueue.round_up_to_second(p_expires_at), p_routed,
            v_written.o_digest, p_write_no)
    returning staged_id into v_id;
    return v_id;
end $$;

-- Records that a query writes to a stream. Errors: PQ001 when it wrote to another stream of that name before.
create or replace function _pgqueue.record_stream(p_sink text, p_stream pgqueue.streams) returns void
language plpgsql as $$
declare
    v_name  text := (select name from pgqueue.streams where stream_id = p_stream.stream_id);
    v_known int;
begin
    if not _pgqueue.is_query(p_sink) then
        return;
    end if;
    select stream_id into v_known from pgqueue.sink_streams where sink = p_sink and name = v_name;
    if v_known <> p_stream.stream_id then
        raise exception 'stream % was dropped and created again since query % wrote to it',
                        _pgqueue.error_name(p_stream), p_sink
            using errcode = 'PQ001', hint = 'Start the query with a new checkpoint to write to the new stream.';
    elsif v_known is null then
        perform _pgqueue.await(
            'the streams of sink ' || p_sink,
            'insert into pgqueue.sink_streams (sink, stream_id, name) values ($2 ->> 0, $1, $2 ->> 1) '
            'on conflict do nothing returning 0',  -- lock: sink stream
            p_stream.stream_id, jsonb_build_array(p_sink, v_name));
    end if;
end $$;

-- Publishes the staged chunks of a batch of a sink, once: they become visible together.
--   p_sink       a query's id; for batch writes txn: and a txnAppId, or write: and a name used once
--   p_stream_id  the stream of all chunks; null: they may be of several streams, and were staged with p_routed
--   p_staged     the chunks of the successful tasks; maintain() deletes those of other attempts. A query also publishes
--                a batch without any, so that a restored database is known to lack batches
--   p_rows       the number of their messages, as the tasks counted
--   p_compare    whether a repeated batch of a query must have the same messages (data, key and headers); else only
--                their number is compared. If the chunks were deleted, as in a second call, only the number is compared
-- Returns true; false if this batch (of a batch write: or a later one) was published before, and nothing was changed.
-- Errors: PQ001, PQ003; 42501 for the sink of another role; PQ008 when a chunk is missing, or one of its messages was
-- published with another; PQ005 when a chunk is missing after a restore or a failover, until recover() is called; PQ010
-- for a query's batch that is neither later nor a repetition of the last one, with the same messages to the same
-- streams, and after recover() for one that is not the next; PQ013. Locks: the batch against another commit of it, the
-- reservations of its chunks, and dedup keys as send_batch. Duplicates are deleted. (More than 60 lines: one commit,
-- from its checks to its errors.)
create or replace function pgqueue.publish_staged(p_sink text, p_batch bigint, p_stream_id int, p_staged bigint[],
                                                  p_rows bigint, p_compare boolean default true) returns boolean
language plpgsql as $$
declare
    v_staged    pgqueue.staged_chunks[];
    v_used      record;
    v_stream_id int;
    v_published record;
    v_chunks    bigint := 0;
    v_rows      bigint := 0;
begin
    perform _pgqueue.check_batch(p_sink, p_batch);
    if p_staged is null or (p_rows >= 0) is not true then
        raise exception 'p_staged must be a list of chunks and p_rows their number of messages, not % and %',
                        coalesce(p_staged::text, 'null'), coalesce(p_rows::text, 'null')
            using errcode = 'PQ003', column = 'p_staged, p_rows';
    elsif p_staged = '{}' and not _pgqueue.is_query(p_sink)  -- lower versions of a batch write would count as repeated
          and p_batch > 1 + coalesce((select max(batch) from pgqueue.sink_batches where sink = p_sink), -1) then
        raise exception 'p_batch must be at most the next batch if p_staged is empty, not %', p_batch
            using errcode = 'PQ003', column = 'p_batch, p_staged',
                  hint = 'A batch that has no messages need not be published.';
    end if;
    perform _pgqueue.stream_of(p_stream_id) where p_stream_id is not null;
    -- first, so that a second commit of the batch waits here
    if not _pgqueue.begin_batch(row(
        p_sink, coalesce(p_stream_id, 0), 0, false, p_batch, p_rows,
        (select sum(digest) from _pgqueue.staged(p_sink, p_batch, p_stream_id, p_staged)
         having count(*) = cardinality(p_staged) and p_compare), null, null, '', _pgqueue.writing_query())) then
        return false;
    end if;
    v_staged := array(select w from _pgqueue.staged(p_sink, p_batch, p_stream_id, p_staged) w);
    -- then the reservations, in the order of their ids
    for v_used in
        select w.reservation_id, range_agg(g) as seqs, sum(upper(g) - lower(g)) as message_count
        from unnest(v_staged) w cross join lateral unnest(w.seqs) g group by w.reservation_id order by w.reservation_id
    loop
        if _pgqueue.cardinality(v_used.seqs) <> v_used.message_count
           or not _pgqueue.use_reservation(v_used.reservation_id, v_used.seqs) then
            raise exception 'batch % of sink % has messages that were staged twice, or were published before', p_batch,
                            p_sink
                using errcode = 'PQ008', hint = 'Stage each message once. Nothing was published.';
        end if;
    end loop;
    -- and the streams in the order of their ids, because a transaction may wait for a dedup key
    for v_stream_id in select distinct stream_id from unnest(v_staged) order by stream_id loop
        v_published := _pgqueue.publish_chunks(_pgqueue.stream_of(v_stream_id), p_sink,
                                               array(select w from unnest(v_staged) w where stream_id = v_stream_id));
        v_chunks := v_chunks + v_published.o_chunks;
        v_rows := v_rows + v_published.o_rows;
    end loop;
    if v_chunks < cardinality(p_staged) and _pgqueue.is_elsewhere() then
        raise exception 'batch % of sink % is ahead of the database: it has % of its % staged chunks', p_batch,
                        p_sink, v_chunks, cardinality(p_staged)
            using errcode = 'PQ005',
                  hint = 'The database was restored to an earlier state, or a standby that lacked the last commits was '
                         'promoted. Nothing was published. Call recover(), and restart the query: an error says '
                         'whether it needs a new checkpoint.';
    elsif v_chunks <> cardinality(p_staged) or v_rows <> p_rows then
        raise exception 'batch % of sink % is not complete: it has % of % staged chunks, % of % messages', p_batch,
                        p_sink, v_chunks, cardinality(p_staged), v_rows, p_rows
            using errcode = 'PQ008',
                  hint = 'Either a later write of the batch deleted the chunks: then two drivers run the same query, '
                         'and you must stop one. Or maintain() deleted them as too old. Nothing was published; run '
                         'the batch again.';
    end if;
    return true;
end $$;

-- The given chunks that belong to a batch. For arguments see publish_staged.
create or replace function _pgqueue.staged(p_sink text, p_batch bigint, p_stream_id int, p_staged bigint[])
returns setof pgqueue.staged_chunks language sql stable as $$
    select * from pgqueue.staged_chunks
    where staged_id = any (p_staged) and sink = p_sink and batch = p_batch and routed = (p_stream_id is null)
      and (p_stream_id is null or stream_id = p_stream_id)
$$;

-- Publishes staged chunks of a stream together; see publish_staged. Returns the number of chunks and their messages.
-- (More than 60 lines: one publication, from its duplicates to its notification.)
create or replace function _pgqueue.publish_chunks(p_stream pgqueue.streams, p_sink text,
                                                   p_chunks pgqueue.staged_chunks[], out o_chunks bigint,
                                                   out o_rows bigint)
language plpgsql as $$
declare
    v_id         bigint;
    v_seqs       int8multirange;  -- the messages with dedup keys, ...
    v_dedup_keys text[];          -- ... and the keys
    v_duplicates int8multirange := '{}';
    v_one        record;
    v_entries    pgqueue.key_backlog[] := '{}';
begin
    perform _pgqueue.record_stream(p_sink, p_stream);
    select range_agg(int8range(k.seq, k.seq, '[]')), array_agg(k.dedup_key order by k.seq) into v_seqs, v_dedup_keys
    from unnest(p_chunks) w
    cross join lateral unnest(w.dedup_keys,
                              array(select generate_series(lower(r), upper(r) - 1)
                                    from unnest(w.seqs) r)) k (dedup_key, seq)
    where w.dedup_keys is not null;
    if v_seqs is not null then
        v_duplicates := v_seqs - (select k.seqs from _pgqueue.delete_duplicates(p_stream, v_seqs, v_dedup_keys) k);
    end if;
    if p_stream.limited or p_stream.keys_limited then
        -- by consumer, because its messages may be in several chunks
        for v_one in
            select c.consumer_id, n.seqs
            from pgqueue.consumers c
            cross join lateral (select range_agg(w.seqs) - v_duplicates as seqs from unnest(p_chunks) w
                                where _pgqueue.is_for(w.consumers, c.consumer_id)) n
            where c.stream_id = p_stream.stream_id and (c.max_backlog is not null or c.per_key_capacity is not null)
              and n.seqs <> '{}'
            order by c.consumer_id
        loop
            perform _pgqueue.check_backlog(p_stream, _pgqueue.cardinality(v_one.seqs), array[v_one.consumer_id], true);
            v_entries := v_entries || _pgqueue.check_keys(p_stream, v_one.seqs, array[v_one.consumer_id]);
        end loop;
    end if;
    perform _pgqueue.lock_publish(p_stream.stream_id);  -- before the publication id, as publish()
    v_id := nextval(p_stream.publication_numbers);
    perform _pgqueue.refuse_behind('stream ' || _pgqueue.error_name(p_stream))
    where v_id < p_stream.publications_from or exists (select from unnest(p_chunks) w where lower(w.seqs) < 1);
    with chunk as (
        -- lock: chunk
        delete from pgqueue.staged_chunks where staged_id = any (array(select staged_id from unnest(p_chunks)))
        returning priority, deliver_at, consumers, expires_at, seqs, message_count
    ), part as (
        insert into pgqueue.publications (publication_id, part, message_count, published_at, deliver_at, stream_id,
                                          priority, seqs, consumers, expires_at)
        select v_id, row_number() over (order by b.priority, b.deliver_at, b.expires_at, b.consumers) - 1,
               _pgqueue.cardinality(b.seqs), clock_timestamp(),
               b.deliver_at, p_stream.stream_id, b.priority, b.seqs, b.consumers, b.expires_at
        from (select priority, deliver_at, consumers, expires_at, range_agg(seqs) - v_duplicates as seqs
              from chunk group by priority, deliver_at, consumers, expires_at) b
        where b.seqs <> '{}'
    )
    select count(*), coalesce(sum(message_count), 0) into o_chunks, o_rows from chunk;
    insert into pgqueue.key_backlog select e.consumer_id, e.key, e.seq, v_id from unnest(v_entries) e;
    if p_stream.bound then
        -- chunks that were staged after the same bindings, together
        perform _pgqueue.route(p_stream.stream_id, c.seqs, c.priority, c.deliver_at, c.expires_at, c.staged_at)
        from (select w.priority, w.deliver_at, w.expires_at, range_agg(w.seqs) - v_duplicates as seqs,
                     min(w.staged_at) as staged_at
              from unnest(p_chunks) w
              cross join lateral (select count(*) from pgqueue.bindings
                                  where stream_id = p_stream.stream_id and bound_at <= w.staged_at) b (bindings)
              where w.consumers is null
              group by b.bindings, w.priority, w.deliver_at, w.expires_at) c
        where c.seqs <> '{}'
        order by c.staged_at;  -- numbers of copies are assigned in this order
    end if;
    if p_stream.notify and _pgqueue.is_waited_for(p_stream.stream_id) then
        perform pg_notify(_pgqueue.channel(p_stream.stream_id), '');
    end if;
end $$;
