-- The Spark sink's side: tasks write messages and stage them; the driver's commit makes the batch visible, once.

-- A stream to write to, by name, with the consumers to publish to. Errors: PQ001, PQ002, PQ003.
create or replace function pgqueue.open_sink(p_stream text, p_consumers text[] default null) returns table (stream_id int, kind text)
language plpgsql stable
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
begin
    perform pgqueue._consumer_ids(v_stream.stream_id, p_consumers);
    return query select v_stream.stream_id, v_stream.kind;
end $$;

-- Whether a sink is a query, which publishes a batch once, wherever; others do so once to each stream.
create or replace function pgqueue._is_query(p_sink text) returns boolean
language sql immutable
as $$ select p_sink not like 'txn:%' and p_sink not like 'write:%' $$;

-- Whether a sink's batch, or a later one, was published.
--   p_stream_id  to this stream; null: to several
create or replace function pgqueue.is_published(p_sink text, p_stream_id int, p_batch bigint) returns boolean
language sql stable
as $$
    select exists (select from pgqueue.sink_batches
                   where sink = p_sink and batch >= p_batch and (stream_id = coalesce(p_stream_id, 0) or (stream_id >= 0 and pgqueue._is_query(p_sink))))
$$;

-- Takes new sequence numbers of a stream, for messages that the caller writes itself, and stages, in this transaction.
-- Returns p_count of them, nearly always one range. Errors: PQ001, PQ003. Locks: the numbers of the stream, until it returns.
create or replace function pgqueue.reserve(p_stream_id int, p_count int) returns int8multirange
language plpgsql
as $$
declare
    v_stream_id int := (pgqueue._stream_of(p_stream_id)).stream_id;
    v_set       int8multirange;
begin
    if (p_count > 0) is not true then
        raise exception 'p_count is at least 1, not %', coalesce(p_count::text, 'null') using errcode = 'PQ003', column = 'p_count';
    end if;
    v_set := pgqueue._set_of_taken(pgqueue._take_seqs(v_stream_id, p_count));
    insert into pgqueue.reservations (stream_id, xid, seqs) values (p_stream_id, pg_current_xact_id(), v_set);
    return v_set;
end $$;

-- The reservation of messages that this transaction wrote itself, all of them and such as the stream takes. Only its own numbers: others
-- may be published, or be somebody else's. Errors: PQ003, PQ004.
create or replace function pgqueue._written_reservation(p_stream pgqueue.streams, p_seqs int8multirange) returns bigint
language plpgsql
as $$
declare
    v_reservation bigint;
begin
    if (isempty(p_seqs) or lower_inf(p_seqs) or upper_inf(p_seqs)) is not false then
        raise exception 'p_seqs is a set of some numbers, not %', coalesce(left(p_seqs::text, 100), 'null') using errcode = 'PQ003', column = 'p_seqs';
    end if;
    v_reservation := (select reservation_id from pgqueue.reservations
                      where xid = pg_current_xact_id_if_assigned() and stream_id = p_stream.stream_id and p_seqs <@ seqs limit 1);
    if v_reservation is null then
        raise exception 'p_seqs is a set of numbers that this transaction reserved together, not %', left(p_seqs::text, 100)
            using errcode = 'PQ003', column = 'p_seqs', hint = 'Call pgqueue.reserve, write the messages and publish or stage them in one transaction.';
    end if;
    perform pgqueue._check_written(p_stream, p_seqs);
    return v_reservation;
end $$;

-- Publishes messages that the caller reserved numbers for and wrote into the stream's table, in this transaction: as send_batch does, for
-- those who have so many that COPY is worth it.
--   p_seqs        of one reservation
--   p_dedup_keys  one per message in the order of their numbers, null for a message without, or null; duplicates are deleted
--   the rest as in send
-- Returns how many messages were published; and, where there are dedup keys, the number of each message, of a duplicate that of the first.
-- Errors: PQ001, PQ002; PQ003, also when a message is not written; PQ004. Locks: as send.
create or replace function pgqueue.publish_written(p_stream text, p_seqs int8multirange, p_priority int default 0, p_deliver_at timestamptz default null,
                                                   p_consumers text[] default null, p_dedup_keys text[] default null, p_expires_at timestamptz default null)
returns table (published bigint, first_seqs bigint[])
language plpgsql
as $$
declare
    v_stream    pgqueue.streams := pgqueue._stream(p_stream);
    v_consumers int[] := pgqueue._consumer_ids(v_stream.stream_id, p_consumers);
    v_seqs      int8multirange := p_seqs;
begin
    perform pgqueue._check_publication(p_priority, p_deliver_at, p_expires_at);
    -- of this transaction, so that nobody else has it
    perform pgqueue._use_reservation(pgqueue._written_reservation(v_stream, p_seqs), p_seqs);
    if p_dedup_keys is not null then
        select k.seqs, k.first_seqs into v_seqs, first_seqs from pgqueue._keep_first(v_stream, p_seqs, p_dedup_keys) k;
    end if;
    published := pgqueue._cardinality(v_seqs);
    if published > 0 then
        perform pgqueue._publish(v_stream, v_seqs, published, p_priority, p_deliver_at, v_consumers, pgqueue._whole_second(p_expires_at));
    end if;
    return next;
end $$;

-- Records messages that a task has written, in the transaction that reserved their numbers and wrote them. Nobody sees them yet.
--   p_seqs        of one reservation
--   p_deliver_at, p_expires_at  rounded up to a second by the writer, so that a row each does not become a publication each
--   p_dedup_keys  one per message in the order of their numbers, null for a message without, or null; publish_staged looks for duplicates
--   p_consumers   to these only; null: to all
--   p_routed      whether the batch may have messages of several streams
-- Returns the id of the staged block. Errors: PQ001, PQ002; PQ003, also when a message is not written; PQ004 for one that does not fit the
-- stream. Locks: none.
create or replace function pgqueue.stage(p_sink text, p_batch bigint, p_stream_id int, p_seqs int8multirange, p_priority int default 0,
                                         p_deliver_at timestamptz default null, p_dedup_keys text[] default null, p_consumers text[] default null,
                                         p_expires_at timestamptz default null, p_routed boolean default false) returns bigint
language plpgsql
as $$
declare
    v_stream      pgqueue.streams := pgqueue._stream_of(p_stream_id);
    v_consumers   int[] := pgqueue._consumer_ids(p_stream_id, p_consumers);
    v_reservation bigint;
    v_id          bigint;
begin
    perform pgqueue._check_batch(p_sink, p_batch);
    perform pgqueue._check_publication(p_priority, p_deliver_at, p_expires_at);
    v_reservation := pgqueue._written_reservation(v_stream, p_seqs);
    if p_dedup_keys is not null then
        perform pgqueue._check_dedup_keys(v_stream, p_dedup_keys, pgqueue._cardinality(p_seqs));
    end if;
    perform pgqueue._commit_durably();
    insert into pgqueue.staged_writes (stream_id, sink, batch, priority, deliver_at, seqs, message_count, reservation_id, dedup_keys, consumers,
                                       expires_at, routed)
    values (p_stream_id, p_sink, p_batch, p_priority, p_deliver_at, p_seqs, pgqueue._cardinality(p_seqs), v_reservation, p_dedup_keys, v_consumers,
            pgqueue._whole_second(p_expires_at), p_routed)
    returning staged_id into v_id;
    return v_id;
end $$;

-- Whether a sink's batch is one that was published before, and is run again. A batch write with a txnAppId may repeat any; of a query
-- Spark runs only the last one again, with the same rows: all else is another history of the query, from a checkpoint that was restored.
--   p_home  the stream; 0: several; below: what the batch does besides (spark/actions.sql)
-- Errors: PQ010 for that.
create or replace function pgqueue._is_repeat(p_sink text, p_home int, p_batch bigint, p_rows bigint) returns boolean
language plpgsql
as $$
declare
    v_last pgqueue.sink_batches;
begin
    if not pgqueue._is_query(p_sink) then
        return pgqueue.is_published(p_sink, p_home, p_batch);
    end if;
    select * into v_last from pgqueue.sink_batches
    where sink = p_sink and (stream_id = p_home or (stream_id >= 0 and p_home >= 0)) order by batch desc limit 1;
    if not found or v_last.batch < p_batch then
        return false;
    elsif v_last.batch > p_batch then
        raise exception 'batch % of query % comes after its batch % was published', p_batch, p_sink, v_last.batch
            using errcode = 'PQ010', hint = 'Its checkpoint was restored to an earlier state, or is a copy. Use the latest one; or start with a new '
                                            'checkpoint, and know that what it reads again is published again.';
    elsif v_last.message_count <> p_rows then
        raise exception 'batch % of query % was published with % messages, and has % now', p_batch, p_sink, v_last.message_count, p_rows
            using errcode = 'PQ010', hint = 'Its checkpoint was restored to an earlier state; or the query gives other rows each time it is run, or was '
                                            'changed. Start with a new checkpoint, and know that what it reads again is published again.';
    end if;
    return true;
end $$;

-- Begins what a batch of a sink does once, with p_rows rows; for p_home and errors see _is_repeat.
-- Returns false when it was done before. Locks: the batch, against another one who begins it.
create or replace function pgqueue._begin_batch(p_sink text, p_home int, p_batch bigint, p_rows bigint) returns boolean
language plpgsql
as $$
begin
    if pgqueue._is_repeat(p_sink, p_home, p_batch, p_rows) then
        return false;
    end if;
    perform pgqueue._commit_durably();
    insert into pgqueue.sink_batches (sink, stream_id, batch, message_count) values (p_sink, p_home, p_batch, p_rows) on conflict do nothing;
    if not found then  -- meanwhile
        perform pgqueue._is_repeat(p_sink, p_home, p_batch, p_rows);
        return false;
    end if;
    return true;
end $$;

-- Notes that a query writes to a stream. Errors: PQ001 when it wrote to another one of that name before.
create or replace function pgqueue._note_stream(p_sink text, p_stream pgqueue.streams) returns void
language plpgsql
as $$
declare
    v_known int;
begin
    if not pgqueue._is_query(p_sink) then
        return;
    end if;
    select stream_id into v_known from pgqueue.sink_streams where sink = p_sink and name = p_stream.name;
    if v_known <> p_stream.stream_id then
        raise exception 'stream % was dropped and made again since query % wrote to it', quote_literal(p_stream.name), p_sink
            using errcode = 'PQ001', hint = 'Start the query with a new checkpoint to write to the new stream.';
    elsif v_known is null then
        insert into pgqueue.sink_streams (sink, stream_id, name) values (p_sink, p_stream.stream_id, p_stream.name) on conflict do nothing;
    end if;
end $$;

-- Publishes a sink's batch: all staged blocks that are named become visible together.
--   p_sink       a query's id; or txn: and a txnAppId, or write: and a name used once, for batch writes
--   p_stream_id  the stream of all of them; null: they may be of several, and were staged so
--   p_staged     the blocks of the tasks that won; those of other attempts are left to maintain()
--   p_rows       how many messages they have, as the tasks counted
-- Returns true; false when this batch (of a batch write: or a later one) was published before, and nothing was done.
-- Errors: PQ001, PQ003; PQ008 when a block is missing, or one of its messages was published with another; PQ010 for a query's batch
-- that is not the next one, nor the last one with as many messages; PQ013. Locks: the batch against another commit of it, the reservations of
-- its blocks, and dedup keys as send_batch. What is a duplicate is deleted.
create or replace function pgqueue.publish_staged(p_sink text, p_batch bigint, p_stream_id int, p_staged bigint[], p_rows bigint) returns boolean
language plpgsql
as $$
declare
    v_used      record;
    v_stream_id int;
    v_published record;
    v_blocks    bigint := 0;
    v_rows      bigint := 0;
begin
    perform pgqueue._check_batch(p_sink, p_batch);
    if p_staged is null or (p_rows >= 0) is not true then
        raise exception 'p_staged is a list of blocks and p_rows their number of messages, not % and %',
                        coalesce(p_staged::text, 'null'), coalesce(p_rows::text, 'null') using errcode = 'PQ003', column = 'p_staged, p_rows';
    end if;
    perform pgqueue._stream_of(p_stream_id) where p_stream_id is not null;
    -- first, so that a second commit of the batch waits here
    if not pgqueue._begin_batch(p_sink, coalesce(p_stream_id, 0), p_batch, p_rows) then
        return false;
    end if;
    -- then what each reservation has left, in one order
    for v_used in
        select reservation_id, range_agg(seqs) as seqs, sum(message_count) as message_count
        from (select w.reservation_id, g as seqs, upper(g) - lower(g) as message_count
              from pgqueue._staged(p_sink, p_batch, p_stream_id, p_staged) w cross join lateral unnest(w.seqs) g) b
        group by reservation_id order by reservation_id
    loop
        if pgqueue._cardinality(v_used.seqs) <> v_used.message_count or not pgqueue._use_reservation(v_used.reservation_id, v_used.seqs) then
            raise exception 'batch % of sink % has messages that were staged twice, or were published before', p_batch, p_sink
                using errcode = 'PQ008', hint = 'Stage each message once. Nothing was published.';
        end if;
    end loop;
    -- and the streams in one order too: dedup keys are waited for
    for v_stream_id in select distinct stream_id from pgqueue._staged(p_sink, p_batch, p_stream_id, p_staged) order by stream_id loop
        v_published := pgqueue._publish_blocks(
            pgqueue._stream_of(v_stream_id), p_sink,
            array(select w from pgqueue._staged(p_sink, p_batch, p_stream_id, p_staged) w where w.stream_id = v_stream_id));
        v_blocks := v_blocks + v_published.o_blocks;
        v_rows := v_rows + v_published.o_rows;
    end loop;
    if v_blocks <> cardinality(p_staged) or v_rows <> p_rows then
        raise exception 'batch % of sink % is not complete: % of % staged blocks, % of % messages are there', p_batch, p_sink,
                        v_blocks, cardinality(p_staged), v_rows, p_rows
            using errcode = 'PQ008', hint = 'The blocks were older than maintain() keeps them. Nothing was published; run the batch again.';
    end if;
    return true;
end $$;

-- The blocks of a batch, of these that are named. For arguments see publish_staged.
create or replace function pgqueue._staged(p_sink text, p_batch bigint, p_stream_id int, p_staged bigint[]) returns setof pgqueue.staged_writes
language sql stable
as $$
    select * from pgqueue.staged_writes
    where staged_id = any (p_staged) and sink = p_sink and batch = p_batch and routed = (p_stream_id is null)
      and (p_stream_id is null or stream_id = p_stream_id)
$$;

-- Publishes blocks of a stream together. Returns how many there were, and their messages; see publish_staged.
create or replace function pgqueue._publish_blocks(p_stream pgqueue.streams, p_sink text, p_blocks pgqueue.staged_writes[], out o_blocks bigint, out o_rows bigint)
language plpgsql
as $$
declare
    v_id         bigint;
    v_seqs       int8multirange;  -- what has dedup keys, ...
    v_dedup_keys text[];          -- ... and these
    v_duplicates int8multirange := '{}';
    v_one        record;
    v_entries    pgqueue.key_backlog[] := '{}';
begin
    perform pgqueue._note_stream(p_sink, p_stream);
    select range_agg(int8range(k.seq, k.seq, '[]')), array_agg(k.dedup_key order by k.seq) into v_seqs, v_dedup_keys
    from unnest(p_blocks) w
    cross join lateral unnest(w.dedup_keys, array(select generate_series(lower(r), upper(r) - 1) from unnest(w.seqs) r)) k (dedup_key, seq)
    where w.dedup_keys is not null;
    if v_seqs is not null then
        v_duplicates := v_seqs - (select k.seqs from pgqueue._keep_first(p_stream, v_seqs, v_dedup_keys) k);
    end if;
    if p_stream.limited or p_stream.keys_limited then
        -- by consumer, because what it gets may be in several blocks
        for v_one in
            select c.consumer_id, n.seqs
            from pgqueue.consumers c
            cross join lateral (select range_agg(w.seqs) - v_duplicates as seqs from unnest(p_blocks) w where pgqueue._is_for(w.consumers, c.consumer_id)) n
            where c.stream_id = p_stream.stream_id and (c.max_backlog is not null or c.per_key_capacity is not null) and n.seqs <> '{}'
            order by c.consumer_id
        loop
            perform pgqueue._check_room(p_stream, pgqueue._cardinality(v_one.seqs), array[v_one.consumer_id], true);
            v_entries := v_entries || pgqueue._check_keys(p_stream, v_one.seqs, array[v_one.consumer_id]);
        end loop;
    end if;
    perform pgqueue._lock_publish(p_stream.stream_id);  -- before the publication id, as _publish
    v_id := nextval(format('pgqueue.publication_%s', p_stream.stream_id)::regclass);
    with block as (
        delete from pgqueue.staged_writes where staged_id = any (array(select staged_id from unnest(p_blocks)))
        returning priority, deliver_at, consumers, expires_at, seqs, message_count
    ), part as (
        insert into pgqueue.publications (publication_id, part, message_count, published_at, deliver_at, stream_id, priority, seqs, consumers, expires_at)
        select v_id, row_number() over (order by b.priority, b.deliver_at, b.expires_at, b.consumers) - 1, pgqueue._cardinality(b.seqs), clock_timestamp(),
               b.deliver_at, p_stream.stream_id, b.priority, b.seqs, b.consumers, b.expires_at
        from (select priority, deliver_at, consumers, expires_at, range_agg(seqs) - v_duplicates as seqs
              from block group by priority, deliver_at, consumers, expires_at) b
        where b.seqs <> '{}'
    )
    select count(*), coalesce(sum(message_count), 0) into o_blocks, o_rows from block;
    insert into pgqueue.key_backlog select e.consumer_id, e.key, e.seq, v_id from unnest(v_entries) e;
    if p_stream.bound then
        perform pgqueue._route(p_stream.stream_id, seqs, priority, deliver_at, expires_at)
        from pgqueue.publications where stream_id = p_stream.stream_id and publication_id = v_id and consumers is null;
    end if;
    if p_stream.notify and pgqueue._is_waited_for(p_stream.stream_id) then
        perform pg_notify(pgqueue._channel(p_stream.stream_id), '');
    end if;
end $$;

-- Takes numbers out of a reservation: their messages are published now, or deleted.
-- Returns whether it had them all; if not, nothing was changed. Locks: the reservation.
create or replace function pgqueue._use_reservation(p_reservation_id bigint, p_seqs int8multirange) returns boolean
language plpgsql
as $$
declare
    v_left int8multirange := (select seqs from pgqueue.reservations where reservation_id = p_reservation_id for update);
begin
    if (p_seqs <@ v_left) is not true then
        return false;
    elsif v_left = p_seqs then
        delete from pgqueue.reservations where reservation_id = p_reservation_id;
    else
        update pgqueue.reservations set seqs = v_left - p_seqs where reservation_id = p_reservation_id;
    end if;
    return true;
end $$;
