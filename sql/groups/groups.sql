-- Groups: workers that share a stream by key. Each has partitions of its own, and records in its own transactions how
-- far they are done.
--
-- A group is a consumer with partitions. As any consumer, it takes new messages under its lock (queue/take/take.sql),
-- into bundles of one line. Nobody claims these bundles; all partitions share them. A message's place is two numbers
-- that are the same for all partitions: arrival_no, the arrival_no of its bundle, and seq. So all messages of the group
-- have one order, and each partition has its own place in it. To read is to look up what comes next; to commit is to
-- write two numbers. Everything else is the consumer's: no late commit is lost, gaps are looked into once, lag, moving
-- the group, and retention keeps what is owed. (With a consumer for each partition, sixteen consumers would do all
-- that.)
--
--   * The hash of a key and the number of partitions say which partition a key is in. So that number never changes. A
--     message without a key is in any partition.
--   * A worker renews its lease. It has partitions, each with a lease_id, which changes whenever another worker gets
--     the partition. A commit names the lease_id: when the partition has another one now, nothing is committed (PQ012),
--     and the worker's transaction fails with all that it did. So if the work is in that transaction, a message is done
--     once, in order, whichever worker dies or oversleeps.
--   * The end of a lease takes nothing away by itself: a worker that is back before another one needed its partitions
--     keeps them. A partition that is being committed is left to its worker; so commit at the end of a transaction.
--   * Each worker's share is the same number of partitions, give or take one. A worker that has more is told which to
--     release, and does so when it is done with its batch; a worker that has fewer takes free ones. So no worker stops
--     while partitions move.

-- The partitions of a group, and how far each is done. Rows are never updated, as those of
-- consumer_cursors: the newest version counts.
-- on drop_consumer
create table if not exists pgqueue.group_partitions (
    consumer_id  int         not null,
    partition    int         not null,
    version      bigint      not null,
    arrival_no   bigint      not null,  -- all messages up to this place are done: by bundle ...
    seq          bigint      not null,  -- ... and of that one up to this number
    lease_id     bigint,                -- who has it commits
    worker       text,                  -- null: no worker has it
    committed_at timestamptz,           -- with arrival_no 0: by an offset reader (note_offset)
    primary key (consumer_id, partition, version)
);

-- The workers of a group, and until when each one's lease lasts.
-- on drop_consumer
create table if not exists pgqueue.group_workers (
    consumer_id int         not null,
    worker      text        not null,
    lease_until timestamptz not null,
    joined_at   timestamptz not null default clock_timestamp(),
    primary key (consumer_id, worker)
);

-- Creates a group: workers that share a stream by partitions of its keys.
--   p_partitions     1 to 1,024: so many workers can share it. It never changes: a key stays in its partition
--   p_start          as for create_consumer
--   p_if_not_exists  return the id of an existing group with as many partitions, instead of failing
-- Returns the group's id, which is a consumer's. Errors: PQ001, PQ003; PQ006 when there is a consumer of that name, or
-- a group with another number of partitions. Locks: none that others wait for.
create or replace function pgqueue.create_group(p_stream text, p_group text, p_partitions int default 16,
                                                p_start text default 'latest', p_if_not_exists boolean default false)
returns int language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_group  pgqueue.consumers;
begin
    perform _pgqueue.check_number('p_partitions', p_partitions, 1, _pgqueue.max_partitions());
    select * into v_group from pgqueue.consumers where stream_id = v_stream.stream_id and name = p_group;
    if found then
        if p_if_not_exists and v_group.partitions = p_partitions then
            return v_group.consumer_id;
        elsif v_group.partitions <> p_partitions then
            raise exception 'group % of stream % exists already, with % partitions, not %: the number never changes, '
                            'because keys would change their partitions',
                            quote_literal(p_group), quote_literal(p_stream), v_group.partitions, p_partitions
                using errcode = 'PQ006', column = 'p_partitions',
                      hint = 'Give that number; or make a new group, and drop this one when it has caught up.';
        end if;
        raise exception '% % of stream % exists already',
            case when v_group.partitions is null then 'a consumer that is not a group,' else 'group' end,
            quote_literal(p_group), quote_literal(p_stream) using errcode = 'PQ006';
    end if;
    v_group.consumer_id := pgqueue.create_consumer(p_stream, p_group, p_start, 'key');
    update pgqueue.consumers set partitions = p_partitions where consumer_id = v_group.consumer_id;  -- lock: settings
    insert into pgqueue.group_partitions (consumer_id, partition, version, arrival_no, seq)
    select v_group.consumer_id, p, 1, 0, 0 from generate_series(0, p_partitions - 1) p;
    return v_group.consumer_id;
end $$;

-- Sets a group to the offset of a reader that keeps its own offset, as a Spark query does.
-- So the reader's lag can be seen, and retention waits for the reader.
--   p_group   of one partition, which no worker has, or has committed: it is this reader's alone
--   p_offset  as read_to returned it
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
        raise exception 'group % of stream % is not for a reader that keeps its offset itself: it has %',
            quote_literal(p_group), quote_literal(p_stream), v_has
            using errcode = 'PQ006', column = 'p_group', hint = 'Make a group of one partition for this reader alone.';
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

-- The partitions of a group as they are.
create or replace function _pgqueue.partitions(p_group pgqueue.consumers) returns setof pgqueue.group_partitions
language sql stable as $$
    select n.*
    from generate_series(0, p_group.partitions - 1) p
    cross join lateral (select * from pgqueue.group_partitions
                        where consumer_id = p_group.consumer_id and partition = p order by version desc limit 1) n
$$;

-- Stores a new version of a partition, unless another transaction has changed the one that it was made of. Waits for a
-- transaction that is changing it. Returns whether it was stored.
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

-- Gives a partition to a worker, with a new lease; null: to none. A partition that its worker is committing stays with
-- that worker. Needs the group's lock. Returns whether the partition changed.
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

-- How many messages of a group, of all keys, come after a place, among those that the group has taken.
create or replace function _pgqueue.group_lag(p_consumer_id int, p_arrival_no bigint, p_seq bigint) returns bigint
language sql stable as $$
    select coalesce(sum(case when place > p_arrival_no then message_count
                             else _pgqueue.cardinality(seqs * int8multirange(int8range(p_seq + 1, null))) end),
                    0)::bigint
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and lane = _pgqueue.lane_unassigned() and place >= p_arrival_no
$$;
