-- Calls of a group's workers: they lease partitions, read messages, and commit offsets.

-- Starts or renews a worker's lease in a group, and assigns free partitions to it, up to its share.
--   p_worker  the worker's name, used by one process alone
--   p_lease   the duration of the lease, up to a day: renew it several times in that time, also while the worker
--             processes messages
-- Returns the worker's partitions: the lease_id for reads and commits; whether to release the partition, because it is
-- another worker's share; and the committed offset. No row while others have all partitions.
-- Errors: PQ001, PQ002, PQ003, PQ006, PQ007. Locks, to the end of the transaction, so make it a transaction of its own:
-- the group's.
create or replace function pgqueue.lease_partitions(p_stream text, p_group text, p_worker text,
                                                    p_lease interval default '30 s')
returns table (partition int, lease_id bigint, to_release boolean, committed bigint[])
language plpgsql as $$
declare
    v_group pgqueue.consumers := _pgqueue.group(p_stream, p_group);
    v_due   int;
    v_held  int;
    v_free  pgqueue.group_partitions;
begin
    perform _pgqueue.check_isolation();
    perform pgqueue.check_timeout('p_lease', p_lease);
    if p_lease > _pgqueue.max_lease() then
        raise exception 'p_lease must be at most %, not %', _pgqueue.max_lease(), quote_literal(p_lease)
            using errcode = 'PQ003', column = 'p_lease',
                  hint = 'Until it ends, no other worker can take over the partitions of a crashed worker: '
                         'renew it regularly.';
    end if;
    if p_worker is null or length(p_worker) not between 1 and 200 then
        raise exception 'p_worker must be 1 to 200 characters, not %',
                        coalesce(quote_literal(left(p_worker, 210)), 'null')
            using errcode = 'PQ003', column = 'p_worker';
    end if;
    perform _pgqueue.lock_consumer(v_group.consumer_id);
    insert into pgqueue.group_workers as w (consumer_id, worker, lease_until)
    values (v_group.consumer_id, p_worker, clock_timestamp() + p_lease)
    on conflict (consumer_id, worker) do update set lease_until = excluded.lease_until;
    delete from pgqueue.group_workers where consumer_id = v_group.consumer_id and lease_until < clock_timestamp();
    v_due := _pgqueue.partition_share(v_group, p_worker);
    v_held := (select count(*) from _pgqueue.partitions(v_group) p where p.worker = p_worker);
    for v_free in
        select p.* from _pgqueue.partitions(v_group) p
        where p.worker is null
          or p.worker not in (select w.worker from pgqueue.group_workers w where w.consumer_id = v_group.consumer_id)
        order by p.partition
    loop
        exit when v_held >= v_due;
        v_held := v_held + _pgqueue.assign_partition(v_free, p_worker)::int;
    end loop;
    return query
        select p.partition, p.lease_id, row_number() over (order by p.partition) > v_due, array[p.arrival_no, p.seq]
        from _pgqueue.partitions(v_group) p where p.worker = p_worker order by 1;
end $$;

-- A worker's share of partitions: the same number for all. The remainder goes to the workers that have most, so that
-- few partitions move.
create or replace function _pgqueue.partition_share(p_group pgqueue.consumers, p_worker text) returns int
language sql stable as $$
    select p_group.partitions / count + (place <= p_group.partitions % count)::int
    from (select w.worker, count(*) over ()::int as count,
                 row_number() over (order by (select count(*) from _pgqueue.partitions(p_group) p
                                              where p.worker = w.worker) desc, w.joined_at, w.worker) as place
          from pgqueue.group_workers w where w.consumer_id = p_group.consumer_id) d
    where worker = p_worker
$$;

-- Ends a worker of a group: its partitions are free, except those that it is committing. Safe to repeat.
-- Errors: PQ001, PQ002, PQ006. Locks, to the end of the transaction: the group's.
create or replace function pgqueue.leave_group(p_stream text, p_group text, p_worker text) returns void
language plpgsql as $$
declare
    v_group pgqueue.consumers := _pgqueue.group(p_stream, p_group);
begin
    perform _pgqueue.lock_consumer(v_group.consumer_id);
    delete from pgqueue.group_workers where consumer_id = v_group.consumer_id and worker = p_worker;
    perform _pgqueue.assign_partition(p, null) from _pgqueue.partitions(v_group) p where p.worker = p_worker;
end $$;

-- Commits the offset of a partition of a group, in the worker's own transaction.
-- Call it at the end of that transaction, because the partition is locked from then on.
--   p_lease_id  that of lease_partitions
--   p_offset    the next_offset of read_partitions, up to which all messages of the partition are processed; null:
--               unchanged
--   p_release   release the partition
-- Errors: PQ003 for an invalid offset, or one that is not after the committed one; PQ012, roll back, when the lease has
-- expired and another worker has the partition, or the group was dropped. Locks: the partition, to the end of the
-- transaction. No other session waits for it.
create or replace function pgqueue.commit_offset(p_lease_id bigint, p_offset bigint[], p_release boolean default false)
returns void language plpgsql as $$
declare
    v_partition pgqueue.group_partitions;
begin
    if p_offset is not null
        and (array_ndims(p_offset) is distinct from 1 or cardinality(p_offset) <> 2
             or array_position(p_offset, null) is not null) then
        raise exception 'p_offset must be a pair of numbers, not %', p_offset
            using errcode = 'PQ003', column = 'p_offset', hint = 'Pass a next_offset that read_partitions returned.';
    end if;
    loop
        select * into v_partition from pgqueue.group_partitions
        where lease_id = p_lease_id order by version desc limit 1;
        if not found then
            raise exception 'lease % has been lost: another worker may have its partition',
                            coalesce(p_lease_id::text, 'null')
                using errcode = 'PQ012',
                      hint = 'Roll back: the lease expired, or the group was dropped. Renew leases with '
                             'lease_partitions, also during processing, or use a longer p_lease.';
        end if;
        if p_offset is not null then
            if p_offset <= array[v_partition.arrival_no, v_partition.seq] then
                raise exception 'p_offset is %, but partition % is already committed up to %',
                    p_offset, v_partition.partition, array[v_partition.arrival_no, v_partition.seq]
                    using errcode = 'PQ003', column = 'p_offset',
                          hint = 'Roll back: another process uses this lease.';
            elsif p_offset[1] > (_pgqueue.cursor(v_partition.consumer_id)).last_arrival
                  or p_offset[2] > (select _pgqueue.last_seq(stream_id) from pgqueue.consumers
                                    where consumer_id = v_partition.consumer_id) then  -- recover() relies on it
                raise exception 'p_offset is %, which read_partitions has not returned', p_offset
                    using errcode = 'PQ003', column = 'p_offset';
            end if;
            v_partition.arrival_no := p_offset[1];
            v_partition.seq := p_offset[2];
            v_partition.committed_at := clock_timestamp();
        end if;
        if p_release then
            v_partition.lease_id := null;
            v_partition.worker := null;
        end if;
        exit when _pgqueue.save_partition(v_partition);
    end loop;
end $$;

-- Returns the next messages of a group's worker, as ranges [lo, hi) of seq in the order of delivery.
-- These are the messages that read_partitions would return, for a worker that reads the payloads itself.
--   p_lease_ids  of the worker's partitions; partitions of other workers are ignored
--   p_max        the maximum number of messages, of all partitions of the group: 1 to 1,000,000
-- Returns one row, or none if there are no messages: the ranges, and the arrival_no of each; the leases of the
-- partitions that are furthest behind, whose messages these are; a condition on the columns key and seq that selects
-- their messages; and the offset to commit for each of these leases when they are processed. Errors: PQ001, PQ002,
-- PQ003, PQ006, PQ007. Locks: as read_partitions.
create or replace function pgqueue.plan_partitions(p_stream text, p_group text, p_lease_ids bigint[],
                                                   p_max int default 1000)
returns table (stream_id int, lo bigint[], hi bigint[], arrival_nos bigint[], lease_ids bigint[], condition text,
               next_offset bigint[])
language plpgsql as $$
declare
    v_group pgqueue.consumers := _pgqueue.begin_claim('group', p_max, null, p_stream, p_group);
    v_here  bigint[];  -- the place of the partitions that are furthest behind ...
    v_until bigint[];  -- ... and of the next ones
    v_mine  int[];
begin
    if p_lease_ids is null then
        raise exception 'p_lease_ids must be an array of lease ids, not null'
            using errcode = 'PQ003', column = 'p_lease_ids',
                  hint = 'Pass those that lease_partitions returned, or an empty array.';
    end if;
    select min(p.place), array_agg(p.lease_id order by p.partition) filter (where p.place = p.first),
           array_agg(p.partition order by p.partition) filter (where p.place = p.first),
           min(p.place) filter (where p.place > p.first)
    into v_here, lease_ids, v_mine, v_until
    from (select n.*, array[n.arrival_no, n.seq] as place, min(array[n.arrival_no, n.seq]) over () as first
          from _pgqueue.partitions(v_group) n where n.lease_id = any (p_lease_ids)) p;
    if v_mine is null or v_group.paused then
        return;
    end if;
    for v_took in 0..1 loop
        select n.o_lo, n.o_hi, n.o_arrival_nos, coalesce(n.o_end, v_until) into lo, hi, arrival_nos, next_offset
        from _pgqueue.next_of_group(v_group.consumer_id, v_here, v_until, p_max) n;
        exit when next_offset is not null or v_took = 1;
        perform _pgqueue.take_for_group(v_group);
    end loop;
    stream_id := v_group.stream_id;
    condition := case when cardinality(v_mine) = v_group.partitions then 'true'
                      else format('%s operator(pg_catalog.=) any (%L::pg_catalog.int8[])',
                                  _pgqueue.partition_sql(v_group.partitions), v_mine) end;
    if next_offset is not null then
        return next;
    end if;
end $$;

-- Reads the next messages of a worker's partitions, in order.
--   p_lease_ids  that lease_partitions returned; partitions that other workers have now are ignored
--   p_max        the maximum number of messages to read, of all partitions of the group: 1 to 1,000,000; only those of
--                these partitions are returned
-- Returns a row per message: its partition and lease, and the offset to commit when the message is processed. Then a
-- row without a message (seq is null) for each lease that was read: its offset is the one to commit when all messages
-- are processed, or if there was none. No rows: there are no new messages. Partitions that are further behind are read
-- first. A call returns the same messages again until an offset is committed.
-- Errors: PQ001, PQ002, PQ003, PQ006, PQ007. Locks, to the end of the transaction, so make it a transaction of its own:
-- the group's, if the call takes new messages. While another worker takes them, the call waits up to 255 ms, and
-- returns what was taken.
create or replace function pgqueue.read_partitions(p_stream text, p_group text, p_lease_ids bigint[],
                                                   p_max int default 1000)
returns table (partition int, lease_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb,
               inserted_at timestamptz, next_offset bigint[])
language plpgsql as $$
declare
    v_group pgqueue.consumers;
    v_plan  record;
begin
    select * into v_plan from pgqueue.plan_partitions(p_stream, p_group, p_lease_ids, p_max);
    if not found then
        return;
    end if;
    v_group := _pgqueue.group(p_stream, p_group);
    return query execute format(
        'select m.partition, ($4)[m.partition + 1], m.seq, m.key, m.data, m.data_bytes, m.headers, m.inserted_at, '
        'array[r.arrival_no, m.seq] '
        'from unnest($1, $2, $3) r (lo, hi, arrival_no) '
        'cross join lateral (select *, %s::int as partition from pgqueue.messages_%s x '
        'where x.seq >= r.lo and x.seq < r.hi and %s order by x.seq) m where ($4)[m.partition + 1] is not null',
        _pgqueue.partition_sql(v_group.partitions), v_group.stream_id, v_plan.condition)
    using v_plan.lo, v_plan.hi, v_plan.arrival_nos,
        array(select case when p.lease_id = any (v_plan.lease_ids) then p.lease_id end  -- others may have some now
              from _pgqueue.partitions(v_group) p order by p.partition);
    return query
        select p.partition, p.lease_id, null::bigint, null::text, null::text, null::bytea, null::jsonb,
               null::timestamptz, v_plan.next_offset
        from _pgqueue.partitions(v_group) p where p.lease_id = any (v_plan.lease_ids) order by p.partition;
end $$;

-- The partition of a message, as an expression of its key and seq. The hash is the one that Postgres uses for hash
-- partitions of tables, so it will not change.
create or replace function _pgqueue.partition_sql(p_partitions int) returns text
language sql immutable parallel safe as $$
    select format('((pg_catalog.hashtextextended(coalesce(key, seq::pg_catalog.text), 0) operator(pg_catalog.&)'
                  ' 9223372036854775807)'
                  ' operator(pg_catalog.%%) %s)', p_partitions)
$$;

-- The messages of a group after a place, at most p_max and up to p_until (null: all).
-- Returns them as ranges in order, with the arrival_no of each, and the place of the last message; nulls if there are
-- none.
create or replace function _pgqueue.next_of_group(p_consumer_id int, p_after bigint[], p_until bigint[], p_max bigint,
                                                  out o_lo bigint[], out o_hi bigint[], out o_arrival_nos bigint[],
                                                  out o_end bigint[])
language plpgsql stable as $$
declare
    v_run  record;
    v_left bigint := p_max;
    v_set  int8multirange := '{}';
    v_no   bigint;
begin
    for v_run in  -- and one more row, which ends the last arrival
        (select m.place as arrival_no, m.seqs from pgqueue.consumer_messages m
         where m.consumer_id = p_consumer_id and m.lane = _pgqueue.lane_unassigned() and m.place >= p_after[1]
           and (p_until is null or m.place <= p_until[1])
         order by m.place, m.first_seq)
        union all select null, null
    loop
        if v_no is distinct from v_run.arrival_no and v_set <> '{}' then
            if _pgqueue.cardinality(v_set) > v_left then
                v_set := _pgqueue.below(v_set, _pgqueue.bound_of(v_set, v_left));
            end if;
            o_lo := o_lo || array(select lower(g) from unnest(v_set) g);
            o_hi := o_hi || array(select upper(g) from unnest(v_set) g);
            o_arrival_nos := o_arrival_nos || array(select v_no from unnest(v_set));
            o_end := array[v_no, upper(v_set) - 1];
            v_left := v_left - _pgqueue.cardinality(v_set);
            v_set := '{}';
        end if;
        exit when v_left = 0 or v_run.arrival_no is null;
        v_no := v_run.arrival_no;
        v_set := v_set + v_run.seqs * int8multirange(int8range(case when v_no = p_after[1] then p_after[2] + 1 end,
                                                               case when v_no = p_until[1] then p_until[2] + 1 end));
    end loop;
end $$;

-- Takes new messages for a group, and deletes bundles that all partitions have processed. While another worker does so,
-- the call waits up to 255 ms: a publication wakes up all workers at once, one of them takes it, and nothing wakes up
-- the others again.
create or replace function _pgqueue.take_for_group(p_group pgqueue.consumers) returns void
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
begin
    for v_try in 0..8 loop
        exit when _pgqueue.try_lock_consumer(p_group.consumer_id);
        if v_try = 8 or not _pgqueue.has_new(p_group.stream_id, _pgqueue.cursor(p_group.consumer_id), true) then
            return;
        end if;
        perform pg_sleep(0.001 * 2 ^ v_try);
    end loop;
    v_stored := _pgqueue.cursor(p_group.consumer_id);
    v_cursor := v_stored;
    if _pgqueue.has_new(p_group.stream_id, v_cursor, true) then
        for i in 1.._pgqueue.limit_takes() loop
            v_cursor := (_pgqueue.take(p_group, v_cursor, null, _pgqueue.limit_take())).o_cursor;
            exit when v_cursor.last_arrival > v_stored.last_arrival or not (v_cursor.hints).was_cut;
        end loop;
    end if;
    if not _pgqueue.rebuilt_lately(v_cursor.hints) then
        v_cursor.hints := _pgqueue.rebuild_hints(v_cursor);
    end if;
    v_cursor := (_pgqueue.delete_passed(p_group, v_cursor)).o_cursor;
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
end $$;

-- Deletes the bundles of a group that all its partitions have processed. Returns the cursor, and how many it deleted;
-- none of a consumer that is not a group. Needs the group's lock.
create or replace function _pgqueue.delete_passed(p_group pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  out o_cursor pgqueue.consumer_cursors, out o_count int)
language plpgsql as $$
declare
    v_passed bigint[] := (select min(array[p.arrival_no, p.seq]) from _pgqueue.partitions(p_group) p);
begin
    o_cursor := p_cursor;
    delete from pgqueue.consumer_messages
    where consumer_id = p_group.consumer_id and lane = _pgqueue.lane_unassigned()
      and place >= (_pgqueue.lane_of(p_cursor.hints, _pgqueue.lane_unassigned())).place
      and place <= v_passed[1] and array[place, upper(seqs) - 1] <= v_passed;
    get diagnostics o_count = row_count;
    if o_count > 0 then
        o_cursor := _pgqueue.raise_hints(p_group, p_cursor);
    end if;
end $$;

-- Deletes what a group has processed, for retention: the last messages would stay until a worker takes new ones.
-- Returns whether it deleted something; false also if another session has the group's lock. Locks, if it deleted
-- something: the group.
create or replace function _pgqueue.try_delete_passed(p_group pgqueue.consumers) returns boolean
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_passed record;
begin
    if not _pgqueue.try_lock_consumer(p_group.consumer_id) then
        return false;
    end if;
    if exists (select from pgqueue.consumers where consumer_id = p_group.consumer_id) then  -- it was not dropped
        v_stored := _pgqueue.cursor(p_group.consumer_id);
        v_passed := _pgqueue.delete_passed(p_group, v_stored);
        if v_passed.o_count > 0 then
            perform _pgqueue.save_cursor(v_stored, v_passed.o_cursor, true);
            return true;
        end if;
    end if;
    raise exception using errcode = 'PQ099';
exception when sqlstate 'PQ099' then
    return false;  -- the exception releases the lock, as in skip()
end $$;
