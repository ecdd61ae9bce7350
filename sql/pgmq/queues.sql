-- Queues: creating, dropping, listing and measuring them. As in pgmq, the name of a queue is used in lower case, for
-- its stream.

-- The consumer of a queue. Errors: 42P01 when there is no such queue.
create or replace function pgmq._consumer(queue_name text) returns pgqueue.consumers
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers;
begin
    select * into v_consumer from pgqueue.consumers where stream_name = lower(queue_name) and name = 'pgmq';
    if not found then
        perform pgmq.format_table_name(queue_name, 'q');  -- another error for a name that no queue can have
        raise exception 'relation "pgmq.q_%" does not exist', coalesce(lower(queue_name), '')
            using errcode = 'undefined_table', hint = case
                when exists (select from pgmq.meta m where lower(m.queue_name) = lower(_consumer.queue_name))
                then 'Its stream or its consumer pgmq was dropped. Call pgmq.drop_queue, which also deletes the '
                     'archive, then pgmq.create.'
                else format('Queue %s does not exist: create it with pgmq.create.',
                            coalesce(quote_literal(queue_name), 'null')) end;
    end if;
    return v_consumer;
end $$;

-- Raises the error of pgmq for a missing queue, or a wrong interval of its notifications.
--   what  the queue, for the error
create or replace function pgmq._check_queue(queue_name text, what text, throttle_interval_ms integer default 0)
returns void language plpgsql stable as $$
begin
    if (throttle_interval_ms >= 0) is not true then
        raise exception 'throttle_interval_ms must be non-negative, got: %',
            coalesce(throttle_interval_ms::text, 'null') using errcode = 'P0001';
    elsif coalesce(queue_name, '') = '' then
        raise exception 'queue_name cannot be NULL or empty' using errcode = 'P0001';
    elsif not exists (select from pgqueue.consumers where stream_name = lower(queue_name) and name = 'pgmq') then
        raise exception 'Queue "%" does not exist. Create % first using pgmq.create()', queue_name, what
            using errcode = 'P0001';
    end if;
end $$;

-- Raises an error for a name that is not allowed.
create or replace function pgmq.validate_queue_name(queue_name text) returns void
language plpgsql immutable as $$
begin
    if queue_name = '' or queue_name is null then
        raise exception 'queue_name must be a name, not %', coalesce(quote_literal(queue_name), 'null')
            using errcode = 'P0001';
    elsif length(queue_name) > 47 then
        raise exception 'queue name is too long, maximum length is 47 characters: % has %',
            quote_literal(queue_name), length(queue_name) using errcode = 'P0001';
    elsif queue_name ~ '[$;'']|--' then
        raise exception 'queue name contains invalid characters: $, ;, --, or \'' in %', queue_name
            using errcode = 'P0001';
    end if;
end $$;

-- The name of a queue's table in pgmq, and of its view here.
create or replace function pgmq.format_table_name(queue_name text, prefix text) returns text
language plpgsql as $$
begin
    if queue_name ~ '[$;'']|--' then
        perform pgmq.validate_queue_name(queue_name);
    end if;
    return lower(prefix || '_' || queue_name);
end $$;

-- Locks the name of a queue to the end of the transaction, for programs that call it as in pgmq.
create or replace function pgmq.acquire_queue_lock(queue_name text) returns void
language plpgsql as $$ begin perform pg_advisory_xact_lock(hashtext('pgmq.queue_' || queue_name)); end $$;

-- Creates a queue; an existing one is not changed. maintain() trims its finished messages. Locks: the queue's name, so
-- that of two programs that start at the same time, both succeed.
create or replace function pgmq._create(queue_name text, partitioned boolean, unlogged boolean) returns void
language plpgsql as $$
declare
    v_stream text := lower(queue_name);
begin
    perform pgmq.validate_queue_name(queue_name);
    perform pgmq.acquire_queue_lock(v_stream);
    if exists (select from pgmq.meta m where lower(m.queue_name) = v_stream) then
        perform pgmq._consumer(queue_name);  -- not a queue whose stream was dropped, which would stay so
        raise notice 'queue % already exists, skipping', quote_literal(queue_name);
        return;
    end if;
    if to_regclass('pgmq.' || quote_ident('q_' || v_stream)) is not null then
        raise exception 'the first 61 bytes of the queue name % are those of another queue', quote_literal(queue_name)
            using errcode = 'PQ006', hint = 'Postgres cuts longer names of views. Choose another name.';
    end if;
    perform pgqueue.create_stream(v_stream, 'json');
    -- as in pgmq: messages that are not deleted are read again at once, without a limit
    perform pgqueue.create_consumer(v_stream, 'pgmq', p_start => 'earliest', p_settings =>
        '{"max_deliver_count": "never", "backoff": "constant", "backoff_jitter": 0}');
    perform pgqueue.set_retention(v_stream, p_done => true);
    insert into pgmq.meta (queue_name, is_partitioned, is_unlogged) values (queue_name, partitioned, unlogged);
    execute format('create view pgmq.%I as select * from pgmq._rows(%L)', 'q_' || v_stream, queue_name);
    execute format('create view pgmq.%I as select msg_id, read_ct, enqueued_at, last_read_at, archived_at, vt, '
                   'message, headers from pgmq._archived where queue_name = %L', 'a_' || v_stream, queue_name);
    perform _pgqueue.revoke_defaults(array['pgmq.' || quote_ident('q_' || v_stream),
                                           'pgmq.' || quote_ident('a_' || v_stream)]::regclass[]::oid[]);
    perform pgmq._grant();
end $$;

create or replace function pgmq.create(queue_name text) returns void
language plpgsql as $$ begin perform pgmq._create(queue_name, false, false); end $$;

create or replace function pgmq.create_non_partitioned(queue_name text) returns void
language plpgsql as $$ begin perform pgmq._create(queue_name, false, false); end $$;

-- (The stream is logged nevertheless.)
create or replace function pgmq.create_unlogged(queue_name text) returns void
language plpgsql as $$ begin perform pgmq._create(queue_name, false, true); end $$;

-- Creates a queue that keeps messages for a time, or a number of messages, whether they were read or not.
-- partition_interval and premake are ignored, because streams choose their segments.
create or replace function pgmq.create_partitioned(queue_name text, partition_interval text default '10000',
                                                   retention_interval text default '100000', premake integer default 4)
returns void language plpgsql as $$
declare
    v_is_new boolean;
begin
    perform pgmq.validate_queue_name(queue_name);
    perform pgmq.acquire_queue_lock(lower(queue_name));
    v_is_new := not exists (select from pgmq.meta m where lower(m.queue_name) = lower(create_partitioned.queue_name));
    perform pgmq._create(queue_name, true, false);
    if v_is_new then  -- an existing queue could lose unread messages
        perform pgqueue.set_retention(
            lower(queue_name), p_unread => 'drop',
            p_messages => case when retention_interval ~ '^[0-9]+$' then retention_interval::bigint end,
            p_for => case when retention_interval !~ '^[0-9]+$' then retention_interval::interval end);
    end if;
end $$;

-- Drops a queue with all its messages, including archived ones. Returns whether there was one. Locks: the queue's name.
create or replace function pgmq.drop_queue(queue_name text) returns boolean
language plpgsql as $$
declare
    v_stream text := lower(queue_name);
begin
    perform pgmq.format_table_name(queue_name, 'q');
    perform pgmq.acquire_queue_lock(v_stream);
    delete from pgmq.meta m where lower(m.queue_name) = v_stream;
    if not found then
        raise notice 'queue % does not exist, skipping', coalesce(quote_literal(queue_name), 'null');
        return false;
    end if;
    execute format('drop view if exists pgmq.%I, pgmq.%I', 'q_' || v_stream, 'a_' || v_stream);
    perform pgqueue.drop_stream(v_stream) where exists (select from pgqueue.streams where name = v_stream);
    return true;
end $$;

create or replace function pgmq.drop_queue(queue_name text, partitioned boolean) returns boolean
language plpgsql as $$ begin return pgmq.drop_queue(queue_name); end $$;

create or replace function pgmq.list_queues() returns setof pgmq.queue_record
language sql stable as $$
    select queue_name, is_partitioned, is_unlogged, created_at from pgmq.meta order by created_at, queue_name
$$;

-- Deletes all messages of a queue, including claimed ones. Returns the number of messages.
create or replace function pgmq.purge_queue(queue_name text) returns bigint
language plpgsql as $$
begin
    perform pgmq._consumer(queue_name);
    return pgqueue.seek(lower(queue_name), 'pgmq', 'latest');
end $$;

-- The metrics of a queue, from sums of the consumer's rows and of at most 3,000 new publications. With more
-- publications the lengths are estimates.
create or replace function pgmq.metrics(queue_name text) returns pgmq.metrics_result
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers := pgmq._consumer(queue_name);
    v_cursor   pgqueue.consumer_cursors := _pgqueue.cursor(v_consumer.consumer_id);
    v_now      timestamptz := clock_timestamp();
    v_new      record;
    v_runs     record;
    v_guess    record := _pgqueue.estimate_new(v_consumer.consumer_id);
    v_last     bigint := _pgqueue.last_seq(v_consumer.stream_id);
begin
    select coalesce(sum(_pgqueue.cardinality(n.seqs)) filter (where n.deliver_at > v_now), 0) as later,
           min(lower(n.seqs)) as first, max(upper(n.seqs)) - 1 as last
    into v_new
    from _pgqueue.new_sets(v_consumer, v_cursor, _pgqueue.limit_shown()) n;
    select coalesce(sum(m.message_count), 0) as count, min(m.first_seq) as first, max(upper(m.seqs)) - 1 as last,
           coalesce(sum(m.message_count) filter (
               where coalesce(m.lease_until, m.not_visible_until, '-infinity') <= v_now), 0) as visible
    into v_runs
    from _pgqueue.unfinished(v_consumer.consumer_id) m;
    return (queue_name, v_runs.count + v_guess.o_count,
            extract(epoch from v_now - _pgqueue.sent_at(v_consumer.stream_id, case
                when v_guess.o_estimated then v_last else greatest(v_runs.last, v_new.last) end))::int,
            extract(epoch from v_now - _pgqueue.sent_at(v_consumer.stream_id, least(v_runs.first, v_new.first)))::int,
            v_last, v_now, v_runs.visible + v_guess.o_count - v_new.later, null)::pgmq.metrics_result;
end $$;

create or replace function pgmq.metrics_all() returns setof pgmq.metrics_result
language sql stable as $$
    select m.* from pgmq.meta q cross join lateral pgmq.metrics(q.queue_name) m order by q.created_at, q.queue_name
$$;

-- Functions of pgmq that are not needed here.

create or replace function pgmq.create_fifo_index(queue_name text) returns void
language plpgsql as $$ begin perform pgmq._consumer(queue_name); end $$;

create or replace function pgmq.create_fifo_indexes_all() returns void
language plpgsql as $$ begin null; end $$;

create or replace function pgmq.detach_archive(queue_name text) returns void
language plpgsql as $$ begin raise warning 'detach_archive does nothing'; end $$;

create or replace function pgmq.convert_archive_partitioned(table_name text, partition_interval text default '10000',
                                                            retention_interval text default '100000',
                                                            leading_partition int default 10) returns void
language plpgsql as $$ begin raise notice 'archives of this queue are not partitioned'; end $$;
