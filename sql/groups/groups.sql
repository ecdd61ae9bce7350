-- Groups: workers that share a stream by key. Each worker has its own partitions, and commits their offsets in its own
-- transactions.
--
-- A group is a consumer with partitions. Like any consumer, it takes new messages with its lock (queue/take/take.sql),
-- into bundles of one lane. These bundles are not claimed; all partitions share them. A message's place is two numbers
-- that are the same for all partitions: the arrival_no of its bundle, and seq. So all messages of the group have one
-- order, and the offset of a partition is a place in it. A read returns the next messages; a commit writes two numbers.
-- Gaps, lag, seek and retention work as for any consumer, once for all partitions. (A consumer for each partition would
-- do this work sixteen times.)
--
--   * The hash of a key and the number of partitions determine the partition of the key, so the number never changes. A
--     message without a key is in any partition.
--   * A worker renews its lease. It has partitions, each with a lease_id, which changes whenever another worker gets
--     the partition. A commit names the lease_id: if the partition has another one now, nothing is committed (PQ012),
--     and the worker's transaction is rolled back. So if the work is done in that transaction, each message is
--     processed exactly once, in order, also if workers die or their leases end.
--   * The end of a lease has no effect by itself: a worker that renews it before another one needs its partitions keeps
--     them. A partition with an open commit stays with its worker, so commit at the end of a transaction.
--   * The shares of the workers differ by at most one partition. A worker with more learns by lease_partitions which to
--     release, and the worker does so after its batch; a worker with fewer gets free ones. So no worker stops while
--     partitions move.

-- The partitions of a group, with their offsets. Rows are never updated, as those of consumer_cursors: the newest
-- version counts.
-- on drop_consumer
create table if not exists pgqueue.group_partitions (
    consumer_id  int         not null,
    partition    int         not null,
    version      bigint      not null,
    arrival_no   bigint      not null,  -- all messages up to this place are processed: by bundle ...
    seq          bigint      not null,  -- ... and of that one up to this number
    lease_id     bigint,                -- needed to commit
    worker       text,                  -- null: no worker has it
    committed_at timestamptz,           -- with arrival_no 0: by an offset reader (note_offset)
    primary key (consumer_id, partition, version)
);

-- The workers of a group, with their leases.
-- on drop_consumer
create table if not exists pgqueue.group_workers (
    consumer_id int         not null,
    worker      text        not null,
    lease_until timestamptz not null,
    joined_at   timestamptz not null default clock_timestamp(),
    primary key (consumer_id, worker)
);

-- Creates a group: workers that share a stream, partitioned by key.
--   p_partitions     1 to 1,024, the maximum number of workers. It cannot be changed: a key stays in its partition
--   p_start          as for create_consumer
--   p_if_not_exists  return the id of an existing group with as many partitions, instead of an error
-- Returns the group's id, which is a consumer's. Errors: PQ001, PQ003; PQ006 when there is a consumer of that name, or
-- a group with another number of partitions. Locks: none that others wait for.
create or replace function pgqueue.create_group(p_stream text, p_group text, p_partitions int default 16,
                                                p_start text default 'latest', p_if_not_exists boolean default false)
returns int language plpgsql as $$
declare
    v_id int;
begin
    perform _pgqueue.check_number('p_partitions', p_partitions, 1, _pgqueue.max_partitions());
    v_id := _pgqueue.existing_group(p_stream, p_group, p_partitions, p_if_not_exists);
    if v_id is not null then
        return v_id;
    end if;
    begin
        v_id := pgqueue.create_consumer(p_stream, p_group, p_start, 'key');
    exception when sqlstate 'PQ006' then  -- another session has created it in the meantime
        v_id := _pgqueue.existing_group(p_stream, p_group, p_partitions, p_if_not_exists);
        if v_id is null then
            raise;
        end if;
        return v_id;
    end;
    update pgqueue.consumers set partitions = p_partitions where consumer_id = v_id;  -- lock: settings
    insert into pgqueue.group_partitions (consumer_id, partition, version, arrival_no, seq)
    select v_id, p, 1, 0, 0 from generate_series(0, p_partitions - 1) p;
    return v_id;
end $$;

-- The id of an existing group, for create_group; null: there is none. Errors: PQ001; PQ006 unless it may be used as it
-- is.
create or replace function _pgqueue.existing_group(p_stream text, p_group text, p_partitions int,
                                                   p_if_not_exists boolean) returns int
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_group  pgqueue.consumers;
begin
    select * into v_group from pgqueue.consumers where stream_id = v_stream.stream_id and name = p_group;
    if not found or (p_if_not_exists and v_group.partitions = p_partitions) then
        return v_group.consumer_id;
    elsif v_group.partitions <> p_partitions then
        raise exception 'group % of stream % already exists, with %, not %: the number cannot change, '
                        'because keys would move to other partitions',
                        quote_literal(p_group), quote_literal(p_stream),
                        _pgqueue.counted(v_group.partitions, 'partition'), p_partitions
            using errcode = 'PQ006', column = 'p_partitions',
                  hint = 'Pass that number, or create a new group and drop this one when it has caught up.';
    end if;
    raise exception '% % of stream % already exists',
        case when v_group.partitions is null then 'a consumer that is not a group,' else 'group' end,
        quote_literal(p_group), quote_literal(p_stream)
        using errcode = 'PQ006', column = 'p_if_not_exists', hint = case
            when v_group.partitions is null then 'Use another name.'
            else 'Set p_if_not_exists to use it as it is.' end;
end $$;

-- Sets a group to the offset of a reader that keeps its own offset, as a Spark query does.
-- This makes the reader's lag visible, and retention waits for the reader.
--   p_group   a group of this reader only, with one partition that no worker has leased or committed
--   p_offset  as returned by read_to
-- Errors: PQ001, PQ002, PQ003, PQ005, PQ006, PQ007; 55P03 as seek. Locks, to the end of the transaction, so make it a
-- transaction of its own: as seek.
create or replace function pgqueue.note_offset(p_stream text, p_group text, p_offset jsonb) returns void
language plpgsql as $$
declare
    v_group     pgqueue.consumers := _pgqueue.group(p_stream, p_group);
    v_partition pgqueue.group_partitions;
    v_has       text;
begin
    if jsonb_typeof(p_offset) is distinct from 'object' then
        perform _pgqueue.refuse_offset('p_offset', 'it is not an object', p_offset);
    end if;
    perform _pgqueue.lock_history(v_group.stream_id);  -- before the consumer, for which others wait
    perform _pgqueue.lock_consumer(v_group.consumer_id);
    select * into v_partition from _pgqueue.partitions(v_group) limit 1;
    v_has := case when v_group.partitions > 1 then v_group.partitions || ' partitions'
                  when v_partition.worker is not null then 'a worker, ' || quote_literal(v_partition.worker)
                  when v_partition.arrival_no > 0 then 'had workers' end;
    if v_has is not null then
        raise exception 'group % of stream % cannot follow a reader that keeps its own offset: it has %',
            quote_literal(p_group), quote_literal(p_stream), v_has
            using errcode = 'PQ006', column = 'p_group', hint = 'Create a group of one partition for this reader only.';
    end if;
    perform _pgqueue.seek(v_group, p_offset::text, 'p_offset');
    v_partition.committed_at := clock_timestamp();
    perform _pgqueue.save_partition(v_partition);
end $$;

-- The group of a name. Errors: PQ001, PQ002, PQ006.
create or replace function _pgqueue.group(p_stream text, p_group text) returns pgqueue.consumers
language plpgsql stable as $$
begin
    return _pgqueue.check_kind('group', _pgqueue.consumer(p_stream, p_group, 'group'));
end $$;

-- The current partitions of a group.
create or replace function _pgqueue.partitions(p_group pgqueue.consumers) returns setof pgqueue.group_partitions
language sql stable as $$
    select n.*
    from generate_series(0, p_group.partitions - 1) p
    cross join lateral (select * from pgqueue.group_partitions
                        where consumer_id = p_group.consumer_id and partition = p order by version desc limit 1) n
$$;

-- Stores a new version of a partition, unless another transaction has changed its version. Waits for a transaction that
-- is changing it. Returns whether it was stored.
create or replace function _pgqueue.save_partition(p_partition pgqueue.group_partitions) returns boolean
language plpgsql as $$
begin
    delete from pgqueue.group_partitions  -- lock: partition
    where (consumer_id, partition, version) = (p_partition.consumer_id, p_partition.partition, p_partition.version);
    if not found then
        return false;
    end if;
    p_partition.version := p_partition.version + 1;
    insert into pgqueue.group_partitions select p_partition.*;
    return true;
end $$;

-- Assigns a partition to a worker, with a new lease; null: to none. A partition with an open commit stays with its
-- worker. Needs the group's lock. Returns whether the partition changed.
create or replace function _pgqueue.assign_partition(p_partition pgqueue.group_partitions, p_worker text)
returns boolean language plpgsql as $$
begin
    perform from pgqueue.group_partitions
    where (consumer_id, partition, version) = (p_partition.consumer_id, p_partition.partition, p_partition.version)
    for update skip locked;  -- lock: partition
    if not found then
        return false;
    end if;
    p_partition.worker := p_worker;
    p_partition.lease_id := case when p_worker is not null then _pgqueue.new_lease_id() end;
    return _pgqueue.save_partition(p_partition);
end $$;

-- The number of messages that a group has taken and that come after a place, of all keys.
create or replace function _pgqueue.group_lag(p_consumer_id int, p_arrival_no bigint, p_seq bigint) returns bigint
language sql stable as $$
    select coalesce(sum(case when place > p_arrival_no then message_count
                             else _pgqueue.cardinality(seqs * int8multirange(int8range(p_seq + 1, null))) end),
                    0)::bigint
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and lane = _pgqueue.lane_unassigned() and place >= p_arrival_no
$$;
