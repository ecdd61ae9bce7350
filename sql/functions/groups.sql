-- Groups: workers that share a stream by key, each with partitions of its own, and in their own transactions note how far they are.
--
-- A group is a consumer with partitions. It takes what is new as any other (core/take.sql), under its lock, into runs in one line; these nobody
-- claims. They are the same for all partitions, and so are two numbers, the place of a message: line_no, the take that it came by, and
-- seq. So all messages of the group have one order, in which each partition has its own place; to read is to look up what comes next, and to
-- commit is to write two numbers. That a late commit is not lost, that gaps are looked into once, lag, moving the group, and
-- that retention keeps what is owed: all of that is the consumer's. (With a consumer for each partition, sixteen would do it all.)
--
--   * A key is in one partition, by its hash and the number of partitions, which therefore never changes. A message without a key is in any.
--   * A worker has a lease, which it renews; it has partitions, each with a lease_id, which changes whenever another worker gets the partition.
--     Who commits gives the lease_id: when it is another one now, nothing is committed (PQ012), and the worker's transaction fails with all
--     that it did. So a message is done once, in order, whatever dies or oversleeps: if the work is in that transaction.
--   * The end of a lease takes nothing away by itself: a worker that is back before another one needed its partitions keeps them. A
--     partition that is being committed is left to its worker; so commit at the end of a transaction.
--   * Each worker is due the same number of partitions, give or take one. Who has more is told which to release, and does so when it is done
--     with what it is at; who has fewer takes what is free. So nobody stops while the partitions move.

-- Creates a group.
--   p_partitions     1 to 1,024: so many workers can share it. It never changes: a key stays in its partition
--   p_start          as for create_consumer
--   p_if_not_exists  return the id of an existing one with as many partitions, instead of failing
-- Returns its id, which is a consumer's. Errors: PQ001, PQ003; PQ006 when there is a consumer of that name, or a group with other partitions.
-- Locks: none that others wait for.
create or replace function pgqueue.create_group(p_stream text, p_group text, p_partitions int default 16, p_start text default 'latest',
                                                p_if_not_exists boolean default false) returns int
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_group  pgqueue.consumers;
begin
    perform pgqueue._check_number('p_partitions', p_partitions, 1, pgqueue._max_partitions());
    select * into v_group from pgqueue.consumers where stream_id = v_stream.stream_id and name = p_group;
    if found then
        if v_group.partitions is null then
            raise exception 'consumer % of stream % exists already, and is no group', quote_literal(p_group), quote_literal(p_stream) using errcode = 'PQ006';
        elsif v_group.partitions <> p_partitions then
            raise exception 'group % of stream % exists already, with % partitions, not %: the number never changes, because keys would change their partitions',
                            quote_literal(p_group), quote_literal(p_stream), v_group.partitions, p_partitions
                using errcode = 'PQ006', column = 'p_partitions', hint = 'Give that number; or make a new group, and drop this one when it has caught up.';
        elsif not p_if_not_exists then
            raise exception 'group % of stream % exists already', quote_literal(p_group), quote_literal(p_stream) using errcode = 'PQ006';
        end if;
        return v_group.consumer_id;
    end if;
    v_group.consumer_id := pgqueue.create_consumer(p_stream, p_group, p_start, 'key');
    update pgqueue.consumers set partitions = p_partitions where consumer_id = v_group.consumer_id;
    insert into pgqueue.group_partitions (consumer_id, partition, version, line_no, seq)
    select v_group.consumer_id, p, 1, 0, 0 from generate_series(0, p_partitions - 1) p;
    return v_group.consumer_id;
end $$;

-- Deletes a group. Its workers are told when they come back. Errors: PQ001, PQ002, PQ006; 55P03 as drop_consumer. Locks: the group's.
create or replace function pgqueue.drop_group(p_stream text, p_group text) returns void
language plpgsql
as $$
begin
    perform pgqueue._group(p_stream, p_group);
    perform pgqueue.drop_consumer(p_stream, p_group);
end $$;

-- Moves a group to a position, as seek does a consumer: its workers go on from there, without a stop. What they have read before they may still
-- commit.
--   p_to  earliest, latest, a timestamp, seq and a number, or an offset
-- Returns how many messages it forgot: those it had taken and not all partitions had passed, and those it skips; about.
-- Errors: PQ001, PQ002, PQ003, PQ006, PQ007; 55P03 as seek. Locks: as seek.
create or replace function pgqueue.reset_group(p_stream text, p_group text, p_to text) returns bigint
language plpgsql
as $$
begin
    perform pgqueue._group(p_stream, p_group);
    return pgqueue.seek(p_stream, p_group, p_to);
end $$;

-- Notes how far a reader is that keeps its offset itself, as a query of Spark does: the group is then as far. So its lag is to be seen, and
-- retention waits for it.
--   p_group   of one partition, which no worker has, or has committed: it is this reader's alone
--   p_offset  as read_to returned it
-- Errors: PQ001, PQ002, PQ003, PQ005, PQ006, PQ007; 55P03 as seek. Locks, to the end of the transaction, so make it one of its own: as seek.
create or replace function pgqueue.note_offset(p_stream text, p_group text, p_offset jsonb) returns void
language plpgsql
as $$
declare
    v_group  pgqueue.consumers := pgqueue._group(p_stream, p_group);
    v_stored pgqueue.group_partitions;
    v_noted  pgqueue.group_partitions;
    v_has    text;
begin
    if jsonb_typeof(p_offset) is distinct from 'object' then
        perform pgqueue._refuse_offset('p_offset', 'no object', p_offset);
    end if;
    perform pgqueue._lock_consumer(v_group.consumer_id);
    select * into v_stored from pgqueue._partitions(v_group) limit 1;
    v_has := case when v_group.partitions > 1 then v_group.partitions || ' partitions'
                  when v_stored.worker is not null then 'a worker, ' || quote_literal(v_stored.worker)
                  when v_stored.line_no > 0 then 'had workers' end;
    if v_has is not null then
        raise exception 'group % of stream % is not for a reader that keeps its offset itself: it has %', quote_literal(p_group), quote_literal(p_stream), v_has
            using errcode = 'PQ006', column = 'p_group', hint = 'Make a group of one partition for this reader alone.';
    end if;
    perform pgqueue._seek(v_group, p_offset::text, 'p_offset');
    v_noted := v_stored;
    v_noted.committed_at := clock_timestamp();
    perform pgqueue._save_partition(v_stored, v_noted);
end $$;

-- The group of a name. Errors: PQ001, PQ002, PQ006.
create or replace function pgqueue._group(p_stream text, p_group text) returns pgqueue.consumers
language plpgsql stable
as $$
declare
    v_group pgqueue.consumers;
begin
    select c.* into v_group
    from pgqueue.consumers c join pgqueue.streams s using (stream_id)
    where s.name = p_stream and c.name = p_group;
    if not found then
        perform pgqueue._refuse_unknown(p_stream, p_group, 'group');
    elsif v_group.partitions is null then
        raise exception 'consumer % of stream % is no group: its messages are claimed', quote_literal(p_group), quote_literal(p_stream)
            using errcode = 'PQ006', hint = 'Call receive; or create_group, with another name.';
    end if;
    return v_group;
end $$;

-- Raises PQ006: a group was asked for messages as a consumer that claims is.
create or replace function pgqueue._refuse_group(p_consumer pgqueue.consumers) returns void
language plpgsql
as $$
begin
    raise exception '% is a group: its messages are not claimed, but read by partitions', quote_literal(p_consumer.name)
        using errcode = 'PQ006', hint = 'Call lease_partitions and read_partitions; or create_consumer, with another name.';
end $$;

-- The partitions of a group as they are.
create or replace function pgqueue._partitions(p_group pgqueue.consumers) returns setof pgqueue.group_partitions
language sql stable
as $$
    select n.*
    from generate_series(0, p_group.partitions - 1) p
    cross join lateral (select * from pgqueue.group_partitions where consumer_id = p_group.consumer_id and partition = p order by version desc limit 1) n
$$;

-- Stores a partition if it is still as it was. Waits for who is changing it.
-- Returns whether it was stored.
create or replace function pgqueue._save_partition(p_stored pgqueue.group_partitions, p_partition pgqueue.group_partitions) returns boolean
language plpgsql
as $$
begin
    delete from pgqueue.group_partitions
    where consumer_id = p_stored.consumer_id and partition = p_stored.partition and version = p_stored.version;
    if not found then
        return false;
    end if;
    p_partition.version := p_stored.version + 1;
    insert into pgqueue.group_partitions select p_partition.*;
    return true;
end $$;

-- Renews a worker's lease, or begins it, and takes the partitions that it is due and that are free.
--   p_worker  its name: of one process alone
--   p_lease   for how long others leave its partitions to it: renew it a few times in that time, also while it works
-- Returns the partitions that it has: the lease_id to read and commit with; whether to release it, because another worker is due it; and how far
-- it is. None while others have all that there are.
-- Errors: PQ001, PQ002, PQ003, PQ006, PQ007. Locks, to the end of the transaction, so make it one of its own: the group's.
create or replace function pgqueue.lease_partitions(p_stream text, p_group text, p_worker text, p_lease interval default '30 s')
returns table (partition int, lease_id bigint, to_release boolean, committed bigint[])
language plpgsql
as $$
declare
    v_group pgqueue.consumers := pgqueue._group(p_stream, p_group);
    v_due   int;
    v_held  int;
    v_free  pgqueue.group_partitions;
    v_mine  pgqueue.group_partitions;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_timeout('p_lease', p_lease);
    if p_worker is null or length(p_worker) not between 1 and 200 then
        raise exception 'p_worker is 1 to 200 characters, not %', coalesce(quote_literal(left(p_worker, 210)), 'null') using errcode = 'PQ003', column = 'p_worker';
    end if;
    perform pgqueue._lock_consumer(v_group.consumer_id);
    insert into pgqueue.group_workers as w (consumer_id, worker, lease_until) values (v_group.consumer_id, p_worker, clock_timestamp() + p_lease)
    on conflict (consumer_id, worker) do update set lease_until = excluded.lease_until;
    delete from pgqueue.group_workers where consumer_id = v_group.consumer_id and lease_until < clock_timestamp();
    v_due := pgqueue._due_partitions(v_group, p_worker);
    v_held := (select count(*) from pgqueue._partitions(v_group) p where p.worker = p_worker);
    for v_free in
        select p.* from pgqueue._partitions(v_group) p
        where p.worker is null or p.worker not in (select w.worker from pgqueue.group_workers w where w.consumer_id = v_group.consumer_id)
        order by p.partition
    loop
        exit when v_held >= v_due;
        -- who commits it now keeps it
        perform from pgqueue.group_partitions p
        where p.consumer_id = v_free.consumer_id and p.partition = v_free.partition and p.version = v_free.version
        for update skip locked;
        continue when not found;
        v_mine := v_free;
        v_mine.worker := p_worker;
        v_mine.lease_id := pgqueue._new_claim_id();
        v_held := v_held + pgqueue._save_partition(v_free, v_mine)::int;
    end loop;
    return query
        select p.partition, p.lease_id, row_number() over (order by p.partition) > v_due, array[p.line_no, p.seq]
        from pgqueue._partitions(v_group) p where p.worker = p_worker order by 1;
end $$;

-- How many partitions a worker is due: all the same, and what is left over goes to those who have most, so that little moves.
create or replace function pgqueue._due_partitions(p_group pgqueue.consumers, p_worker text) returns int
language sql stable
as $$
    select p_group.partitions / count + (place <= p_group.partitions % count)::int
    from (select w.worker, count(*) over ()::int as count,
                 row_number() over (order by (select count(*) from pgqueue._partitions(p_group) p where p.worker = w.worker) desc, w.joined_at, w.worker) as place
          from pgqueue.group_workers w where w.consumer_id = p_group.consumer_id) d
    where worker = p_worker
$$;

-- Ends a worker: its partitions are free, except those that it is committing. Safe to repeat.
-- Errors: PQ001, PQ002, PQ006. Locks, to the end of the transaction: the group's.
create or replace function pgqueue.leave_group(p_stream text, p_group text, p_worker text) returns void
language plpgsql
as $$
declare
    v_group pgqueue.consumers := pgqueue._group(p_stream, p_group);
    v_mine  pgqueue.group_partitions;
    v_free  pgqueue.group_partitions;
begin
    perform pgqueue._lock_consumer(v_group.consumer_id);
    delete from pgqueue.group_workers where consumer_id = v_group.consumer_id and worker = p_worker;
    for v_mine in select * from pgqueue._partitions(v_group) p where p.worker = p_worker loop
        perform from pgqueue.group_partitions p
        where p.consumer_id = v_mine.consumer_id and p.partition = v_mine.partition and p.version = v_mine.version
        for update skip locked;
        continue when not found;
        v_free := v_mine;
        v_free.worker := null;
        v_free.lease_id := null;
        perform pgqueue._save_partition(v_mine, v_free);
    end loop;
end $$;

-- Notes how far a partition has been worked off, in the worker's own transaction: at its end, because the partition is locked from then on.
--   p_lease_id  that of lease_partitions
--   p_offset    the next_offset of read_partitions, up to which all messages of the partition are done; null: as it was
--   p_release   give the partition back
-- Errors: PQ003 when it is no offset, or not after what was committed; PQ012 when the lease has ended and another worker has the partition, or the
-- group was dropped: roll back. Locks: the partition, to the end of the transaction. Nobody else waits for it.
create or replace function pgqueue.commit_offset(p_lease_id bigint, p_offset bigint[], p_release boolean default false) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.group_partitions;
    v_mine   pgqueue.group_partitions;
begin
    if p_offset is not null and (array_ndims(p_offset) is distinct from 1 or cardinality(p_offset) <> 2 or array_position(p_offset, null) is not null) then
        raise exception 'p_offset is a pair of numbers, not %', p_offset
            using errcode = 'PQ003', column = 'p_offset', hint = 'Give a next_offset of read_partitions.';
    end if;
    loop
        select * into v_stored from pgqueue.group_partitions where lease_id = p_lease_id order by version desc limit 1;
        if not found then
            raise exception 'the partition of lease % has another worker now', coalesce(p_lease_id::text, 'null')
                using errcode = 'PQ012', hint = 'Roll back: the lease had ended, or the group was dropped. Renew leases with lease_partitions, also while you work, or take a longer p_lease.';
        end if;
        v_mine := v_stored;
        if p_offset is not null then
            if p_offset <= array[v_stored.line_no, v_stored.seq] then
                raise exception 'p_offset is %, and partition % is done up to % already', p_offset, v_stored.partition, array[v_stored.line_no, v_stored.seq]
                    using errcode = 'PQ003', column = 'p_offset', hint = 'Roll back: another process works with this lease.';
            elsif p_offset[1] > (pgqueue._cursor(v_stored.consumer_id)).last_line_no then
                raise exception 'p_offset is %, which read_partitions has not given', p_offset using errcode = 'PQ003', column = 'p_offset';
            end if;
            v_mine.line_no := p_offset[1];
            v_mine.seq := p_offset[2];
            v_mine.committed_at := clock_timestamp();
        end if;
        if p_release then
            v_mine.lease_id := null;
            v_mine.worker := null;
        end if;
        exit when pgqueue._save_partition(v_stored, v_mine);
    end loop;
end $$;

-- What a worker reads next: the same messages as read_partitions, as ranges [lo, hi) of seq in the order of delivery, for who reads the payloads itself.
--   p_lease_ids  of the worker's partitions; those of other workers are passed over
--   p_max        messages at most, 1 to 1,000,000, of all partitions of the group, that are looked at
-- Returns one row, or none when there is nothing: the ranges, and the line_no of each; the leases of those partitions which are furthest
-- behind, whose messages these are; what these have of the ranges, as a condition on the columns key and seq; and the offset to commit for each
-- of these leases, when all that is done. Errors: PQ001, PQ002, PQ003, PQ006, PQ007. Locks: as read_partitions.
create or replace function pgqueue.plan_partitions(p_stream text, p_group text, p_lease_ids bigint[], p_max int default 1000)
returns table (stream_id int, lo bigint[], hi bigint[], line_nos bigint[], lease_ids bigint[], condition text, next_offset bigint[])
language plpgsql
as $$
declare
    v_group pgqueue.consumers := pgqueue._group(p_stream, p_group);
    v_here  bigint[];  -- the place of those that are furthest behind ...
    v_until bigint[];  -- ... and of the next ones
    v_mine  int[];
    v_plan  record;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_number('p_max', p_max, 1, 1000000);
    if p_lease_ids is null then
        raise exception 'p_lease_ids is an array of lease ids, not null'
            using errcode = 'PQ003', column = 'p_lease_ids', hint = 'Give those that lease_partitions returned; none is an empty array.';
    end if;
    if v_group.scheduled then
        perform pgqueue._run_schedules(v_group.stream_id);
    end if;
    select min(array[p.line_no, p.seq]) into v_here from pgqueue._partitions(v_group) p where p.lease_id = any (p_lease_ids);
    select array_agg(p.lease_id order by p.partition) filter (where array[p.line_no, p.seq] = v_here),
           array_agg(p.partition order by p.partition) filter (where array[p.line_no, p.seq] = v_here),
           min(array[p.line_no, p.seq]) filter (where array[p.line_no, p.seq] > v_here)
    into lease_ids, v_mine, v_until
    from pgqueue._partitions(v_group) p where p.lease_id = any (p_lease_ids);
    if v_mine is null or v_group.paused then
        return;
    end if;
    v_plan := pgqueue._next_in_line(v_group.consumer_id, v_here, v_until, p_max);
    if v_plan.o_end is null and v_until is null then
        perform pgqueue._take_for_group(v_group);
        v_plan := pgqueue._next_in_line(v_group.consumer_id, v_here, null, p_max);
    end if;
    stream_id := v_group.stream_id;
    lo := v_plan.o_lo;
    hi := v_plan.o_hi;
    line_nos := v_plan.o_line_nos;
    next_offset := coalesce(v_plan.o_end, v_until);
    condition := case when cardinality(v_mine) = v_group.partitions then 'true'
                      else format('%s operator(pg_catalog.=) any (%L::pg_catalog.int8[])', pgqueue._partition_sql(v_group.partitions), v_mine) end;
    if next_offset is not null then
        return next;
    end if;
end $$;

-- Reads the next messages of a worker's partitions, in order.
--   p_lease_ids  that lease_partitions returned; those that other workers have now are passed over
--   p_max        messages at most, 1 to 1,000,000, of all partitions of the group, that are looked at; those of these partitions are returned
-- Returns a row per message: its partition and lease, and the offset to commit when it is done. Then one for each of the leases that were read,
-- without a message (seq is null): its offset is that to commit when all are done, also where there was none. Nothing: there is nothing new.
-- Partitions that are behind are read first, alone. It reads the same again until something is committed.
-- Errors: PQ001, PQ002, PQ003, PQ006, PQ007. Locks, to the end of the transaction, so make it one of its own: the group's, if it takes what is
-- new; while another worker does, it waits for a moment, and then makes do with what was taken.
create or replace function pgqueue.read_partitions(p_stream text, p_group text, p_lease_ids bigint[], p_max int default 1000)
returns table (partition int, lease_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, inserted_at timestamptz,
               next_offset bigint[])
language plpgsql
as $$
declare
    v_group pgqueue.consumers := pgqueue._group(p_stream, p_group);
    v_plan  record;
begin
    select * into v_plan from pgqueue.plan_partitions(p_stream, p_group, p_lease_ids, p_max);
    if not found then
        return;
    end if;
    return query execute format(
        'select m.partition, ($4)[m.partition + 1], m.seq, m.key, m.data, m.data_bytes, m.headers, m.inserted_at, array[r.line_no, m.seq] '
        'from unnest($1, $2, $3) r (lo, hi, line_no) '
        'cross join lateral (select *, %s::int as partition from pgqueue.messages_%s x where x.seq >= r.lo and x.seq < r.hi and %s order by x.seq) m',
        pgqueue._partition_sql(v_group.partitions), v_group.stream_id, v_plan.condition)
    using v_plan.lo, v_plan.hi, v_plan.line_nos, array(select p.lease_id from pgqueue._partitions(v_group) p order by p.partition);
    return query
        select p.partition, p.lease_id, null::bigint, null::text, null::text, null::bytea, null::jsonb, null::timestamptz, v_plan.next_offset
        from pgqueue._partitions(v_group) p where p.lease_id = any (v_plan.lease_ids) order by p.partition;
end $$;

-- The partition of a message, as an expression in its key and seq. The hash is that of Postgres, which hash partitions of tables rely on, too.
create or replace function pgqueue._partition_sql(p_partitions int) returns text
language sql immutable parallel safe
as $$
    select format('((pg_catalog.hashtextextended(coalesce(key, seq::pg_catalog.text), 0) operator(pg_catalog.&) 9223372036854775807)'
                  ' operator(pg_catalog.%%) %s)', p_partitions)
$$;

-- The messages of a line after a place, p_max at most and no further than p_until (null: all).
-- Returns them as ranges in order, with the line_no of each, and the place of the last one; nulls when there are none.
create or replace function pgqueue._next_in_line(p_consumer_id int, p_after bigint[], p_until bigint[], p_max bigint,
                                                 out o_lo bigint[], out o_hi bigint[], out o_line_nos bigint[], out o_end bigint[])
language plpgsql stable
as $$
declare
    v_run  record;
    v_line record;
    v_left bigint := p_max;
    v_set  int8multirange := '{}';
    v_no   bigint;
begin
    for v_run in  -- and one more row, by which the last line ends
        (select m.line_no, m.seqs from pgqueue.consumer_messages m
         where m.consumer_id = p_consumer_id and m.state = 'ready' and m.lane = 1 and m.line_no >= p_after[1]
           and (p_until is null or m.line_no <= p_until[1])
         order by m.line_no, m.first_seq)
        union all select null, null
    loop
        if v_no is distinct from v_run.line_no and v_set <> '{}' then
            v_line := pgqueue._first_in_line(v_set, v_left);
            o_lo := o_lo || v_line.o_lo;
            o_hi := o_hi || v_line.o_hi;
            o_line_nos := o_line_nos || array_fill(v_no, array[cardinality(v_line.o_lo)]);
            o_end := array[v_no, v_line.o_last];
            v_left := v_left - v_line.o_count;
            v_set := '{}';
        end if;
        exit when v_left = 0 or v_run.line_no is null;
        v_no := v_run.line_no;
        v_set := v_set + v_run.seqs * int8multirange(int8range(case when v_no = p_after[1] then p_after[2] + 1 end,
                                                               case when v_no = p_until[1] then p_until[2] + 1 end));
    end loop;
end $$;

-- The first p_max messages of a set, as ranges; how many these are; and the last one.
create or replace function pgqueue._first_in_line(p_set int8multirange, p_max bigint,
                                                  out o_lo bigint[], out o_hi bigint[], out o_count bigint, out o_last bigint)
language plpgsql immutable
as $$
begin
    o_count := pgqueue._cardinality(p_set);
    if o_count > p_max then
        p_set := pgqueue._below(p_set, pgqueue._bound_of(p_set, p_max));
        o_count := p_max;
    end if;
    o_last := upper(p_set) - 1;
    select array_agg(lower(g)), array_agg(upper(g)) into o_lo, o_hi from unnest(p_set) g;
end $$;

-- Takes what is new for a group, and deletes what all partitions have passed. While another worker is at it, waits for him for a moment, because
-- nobody wakes up those who find nothing: a publication woke all of them at once, and one took it.
create or replace function pgqueue._take_for_group(p_group pgqueue.consumers) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_take   record;
begin
    for v_try in 0..8 loop
        exit when pgqueue._try_lock_consumer(p_group.consumer_id);
        if v_try = 8 or not pgqueue._has_new(p_group.stream_id, pgqueue._cursor(p_group.consumer_id), true) then
            return;
        end if;
        perform pg_sleep(0.001 * 2 ^ v_try);
    end loop;
    v_stored := pgqueue._cursor(p_group.consumer_id);
    v_cursor := v_stored;
    if pgqueue._has_new(p_group.stream_id, v_cursor, true) then
        for i in 1..pgqueue._limit_takes() loop
            v_take := pgqueue._take(p_group, v_cursor, null, pgqueue._limit_take());
            v_cursor := v_take.o_cursor;
            exit when v_cursor.last_line_no > v_stored.last_line_no or not v_cursor.take_was_cut;
        end loop;
    end if;
    v_cursor := pgqueue._delete_passed(p_group, v_cursor);
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
end $$;

-- Deletes the runs that all partitions of a group have passed. Returns the cursor. Needs the consumer's lock.
create or replace function pgqueue._delete_passed(p_group pgqueue.consumers, p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_from   pgqueue.line_place := p_cursor.scan_from[1];
    v_passed bigint[];
begin
    if v_from is null then
        return p_cursor;
    end if;
    select min(array[p.line_no, p.seq]) into v_passed from pgqueue._partitions(p_group) p;
    delete from pgqueue.consumer_messages
    where consumer_id = p_group.consumer_id and state = 'ready' and lane = 1
      and line_no >= v_from.line_no and line_no <= v_passed[1] and array[line_no, upper(seqs) - 1] <= v_passed;
    if found then
        p_cursor := pgqueue._raise_scan_from(p_cursor);
    end if;
    return p_cursor;
end $$;

-- How many messages of a group, of all keys, come after a place: those that it has taken.
create or replace function pgqueue._behind(p_consumer_id int, p_line_no bigint, p_seq bigint) returns bigint
language sql stable
as $$
    select coalesce(sum(case when line_no > p_line_no then message_count
                             else pgqueue._cardinality(seqs * int8multirange(int8range(p_seq + 1, null))) end), 0)::bigint
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and state = 'ready' and lane = 1 and line_no >= p_line_no
$$;
