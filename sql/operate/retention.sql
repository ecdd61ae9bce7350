-- Trimming: messages that a stream no longer needs to keep are deleted in short transactions, and recorded in trims.
--
-- A segment is due when it is closed and the rules of its stream allow it. A publication is trimmed when all its
-- messages are in segments that are due or empty, and nothing needs it:
--   * Every consumer has taken it, it is in no gap, and none of its messages is in a bundle or a dead letter. One
--     statement reads all of this, with one snapshot. A message that is settled in this snapshot remains settled: a
--     call that makes old publications new for a consumer (create_consumer, seek, replay) shares the history lock of
--     the stream to the end of its transaction, and trimming needs that lock exclusively.
--   * Nothing else holds its segments: with an archive, their messages are in files (archive/aging.sql: on hold).
--   * If the rules are to drop unread messages, consumers skip it first: with their lock, but never out of a claim
--     whose lease has not ended (skip()).
-- When no publication of a segment is left, the segment is emptied (log/segments.sql).

-- The retention rules of a stream. A stream without a row keeps all messages.
-- on drop_stream
create table if not exists pgqueue.retention (
    stream_id      int         primary key,
    keep_for       interval,
    keep_messages  bigint,
    keep_bytes     bigint,
    until_done     boolean     not null,             -- only until every consumer has finished them
    unread         text        not null,             -- keep, or drop: unfinished messages
    keep_dead      interval,                         -- dead letters; null: no limit
    trim_from      bigint      not null default 1,   -- publications before this one were checked in this round
    maintained_at  timestamptz                       -- the last maintain(), to a minute
);

-- Sets how long the messages of a stream are kept; without limits, the default, they are never deleted. Each call sets
-- all limits: an omitted argument removes the limit of an earlier call. A message is due as soon as one of the limits
-- allows it, and maintain() deletes it. Messages are deleted in segments of about an eighth of what is kept, so up to
-- that much more is stored.
--   p_for       time since its publication
--   p_messages  number of messages after it (approximate: rolled-back numbers count)
--   p_bytes     size of the messages after it, with their indexes
--   p_done      only until every consumer has finished it; without a consumer, all messages are kept
--   p_unread    what to do with a due message that a consumer has not finished: keep it; or drop it, unless it is in a
--               live claim, and count it
--   p_dead      time that dead letters are kept, with their messages; null: no limit
-- Errors: PQ001, PQ003. Locks: none that others wait for.
create or replace function pgqueue.set_retention(p_stream text, p_for interval default null,
                                                 p_messages bigint default null, p_bytes bigint default null,
                                                 p_done boolean default false, p_unread text default 'keep',
                                                 p_dead interval default null) returns void
language plpgsql as $$
declare
    v_id int := (_pgqueue.stream(p_stream)).stream_id;
begin
    perform _pgqueue.check_age('p_for', p_for);
    perform _pgqueue.check_age('p_dead', p_dead);
    perform _pgqueue.check_positive('p_messages', p_messages);
    perform _pgqueue.check_positive('p_bytes', p_bytes);
    perform _pgqueue.check_choice('p_done', p_done::text, '{true, false}');
    perform _pgqueue.check_choice('p_unread', p_unread, '{keep, drop}');
    if p_unread = 'drop' and p_for is null and p_messages is null and p_bytes is null then
        raise exception 'p_unread is drop, which requires an age, a count or a size'
            using errcode = 'PQ003', column = 'p_unread',
                  hint = 'Give one of these, or use keep: messages are stored until consumers have finished them.';
    end if;
    perform _pgqueue.await('the retention of stream ' || quote_literal(p_stream), case
        when coalesce(p_for, p_dead) is null and coalesce(p_messages, p_bytes) is null and not p_done then
            'delete from pgqueue.retention where stream_id = $1 returning 0'  -- lock: maintain
        else
            'insert into pgqueue.retention select r.* from jsonb_populate_record(null::pgqueue.retention, $2) r '
            'on conflict (stream_id) do update '  -- lock: maintain
            'set (keep_for, keep_messages, keep_bytes, until_done, unread, keep_dead) = (excluded.keep_for, '
            'excluded.keep_messages, excluded.keep_bytes, excluded.until_done, excluded.unread, excluded.keep_dead) '
            'returning 0' end,
        v_id, jsonb_build_object('stream_id', v_id, 'keep_for', p_for, 'keep_messages', p_messages,
                                 'keep_bytes', p_bytes, 'until_done', p_done, 'unread', p_unread, 'keep_dead', p_dead,
                                 'trim_from', 1));
end $$;

-- Raises PQ003 unless an age is positive, or null. (Unlike a timeout, it may exceed ten years.)
create or replace function _pgqueue.check_age(p_argument text, p_age interval) returns void
language plpgsql as $$
begin
    if not isfinite(clock_timestamp() + p_age) or not isfinite(clock_timestamp() - p_age) or p_age <= interval '0' then
        raise exception '% must be an interval longer than 0, not %', p_argument, quote_literal(p_age)
            using errcode = 'PQ003', column = p_argument;
    end if;
exception when datetime_field_overflow then
    raise exception '% is too long: %', p_argument, quote_literal(p_age) using errcode = 'PQ003', column = p_argument;
end $$;

-- Empties a sealed segment all of whose publications are trimmed. Returns whether there was one. Locks: the segment.
create or replace function _pgqueue.empty_segment(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_segment pgqueue.segments;
begin
    update pgqueue.segments set emptied = true, held_by = '{}'
    where stream_id = p_stream_id and segment = (
        select l.segment from pgqueue.segments l
        where stream_id = p_stream_id and last_publication is not null and not emptied
          and not exists (select from pgqueue.publications p
                          where p.stream_id = p_stream_id and p.publication_id <= l.last_publication
                            and p.seqs && int8range(l.lo, l.hi))
        order by l.lo limit 1)
    returning * into v_segment;
    if not found then
        return false;
    end if;
    execute format('truncate pgqueue.%I', _pgqueue.segment_name(p_stream_id, v_segment.segment));  -- lock: table
    perform _pgqueue.record_trim(p_stream_id, '{}', int8multirange(int8range(v_segment.lo, v_segment.hi)), 0);
    return true;
end $$;

-- The number of publications that one transaction checks.
create or replace function _pgqueue.trim_at_once() returns int language sql immutable parallel safe as 'select 10000';

-- The segments that the rules of a stream do not keep, in order. Also returns the reason: over (the segments after it
-- contain as much as is to be kept), aged, done (it is trimmed once every consumer has finished it). A segment that is
-- not sealed, or that is on hold, is not trimmable.
create or replace function _pgqueue.due_segments(p_stream_id int)
returns table (segment int, lo bigint, hi bigint, closed_publication bigint, last_publication bigint, over boolean,
               aged boolean, done boolean, trimmable boolean)
language sql stable as $$
    with sized as (
        select l.*, coalesce(l.last_seq, least(_pgqueue.last_seq(p_stream_id), l.hi - 1)) - l.lo + 1 as messages,
               pg_total_relation_size(to_regclass(format('pgqueue.%I',
                                                         _pgqueue.segment_name(p_stream_id, l.segment)))) as bytes
        from pgqueue.segments l
        where l.stream_id = p_stream_id and l.opened_at is not null
    ), later as (
        select s.*, sum(messages) over later as later_messages, sum(bytes) over later as later_bytes
        from sized s
        window later as (order by lo rows between 1 following and unbounded following)
    ), judged as (
        select l.*, (l.later_messages >= r.keep_messages or l.later_bytes >= r.keep_bytes) is true as over,
               -- approximately the time of its last message; publications that came later than the numbers near
               -- them are checked one by one
               (coalesce((select p.published_at from pgqueue.publications p
                          where p.stream_id = p_stream_id and p.publication_id <= l.closed_publication
                          order by p.publication_id desc limit 1), '-infinity')
                < clock_timestamp() - r.keep_for) is true as aged,
               r.until_done and exists (select from pgqueue.consumers c where c.stream_id = p_stream_id) as done
        from later l join pgqueue.retention r using (stream_id)
        where l.closed_at is not null and not l.emptied
    )
    select segment, lo, hi, closed_publication, last_publication, over, aged, done,
           last_publication is not null and _pgqueue.on_hold(p_stream_id, segment) is null
    from judged
    where over or aged or done order by lo
$$;

-- Trims a bounded part of the messages of a stream that are due. Returns how many messages it trimmed, whether there
-- may be more, and whether it skipped messages of consumers, whose locks it then has. Locks, to the end of the
-- transaction: the history, if it is free; these consumers, if their locks are free: then there may be more.
create or replace function _pgqueue.trim(p_stream_id int, out o_count bigint, out o_more boolean, out o_skipped boolean)
language plpgsql as $$
declare
    v_rules   pgqueue.retention;
    v_due     record;
    v_issued  bigint;
    v_decided int8multirange;
    v_trim    record;
begin
    o_count := 0;
    o_more := false;
    o_skipped := false;
    select * into v_rules from pgqueue.retention where stream_id = p_stream_id;
    select coalesce(range_agg(int8range(lo, hi)) filter (where over or done), '{}') as now,
           coalesce(range_agg(int8range(lo, hi)), '{}') as aged,
           coalesce(range_agg(int8range(lo, hi)) filter (where over or d.aged), '{}') as drop,
           max(last_publication) as upto, min(closed_publication) as late_from
    into v_due
    from _pgqueue.due_segments(p_stream_id) d where trimmable;
    if v_due.upto is null then
        perform _pgqueue.record_holders(p_stream_id);
        return;
    elsif not _pgqueue.try_lock_history_alone(p_stream_id) then
        perform _pgqueue.record_holders(p_stream_id, _pgqueue.history_holders(p_stream_id));
        return;
    end if;
    if v_rules.unread = 'drop' and v_due.drop <> '{}' then
        -- a publication that came long after its numbers were assigned is not old yet
        v_due.drop := v_due.drop - coalesce((select range_agg(p.seqs) from pgqueue.publications p
                                             where p.stream_id = p_stream_id and p.publication_id > v_due.late_from
                                               and p.publication_id <= v_due.upto
                                               and p.published_at >= clock_timestamp() - v_rules.keep_for
                                               and _pgqueue.less(p.seqs, v_due.now) <> '{}'), '{}');
        o_skipped := coalesce((select bool_or(_pgqueue.skip(c, v_due.drop, v_due.upto)) from pgqueue.consumers c
                               where c.stream_id = p_stream_id), false);
    end if;
    v_due.now := v_due.now + (_pgqueue.trimmed(p_stream_id)).o_seqs;
    v_due.aged := v_due.aged + v_due.now;
    v_issued := _pgqueue.last_publication_id(p_stream_id);
    v_decided := case when _pgqueue.publishers(p_stream_id) = '{}' then int8multirange(int8range(1, v_issued + 1))
                      else _pgqueue.resolved_ids(p_stream_id) end;
    v_trim := _pgqueue.delete_publications(p_stream_id, v_rules.trim_from, v_due.upto, v_due.now, v_due.aged,
                                           clock_timestamp() - v_rules.keep_for, v_decided);
    if v_trim.o_ids <> '{}' then
        perform _pgqueue.record_trim(p_stream_id, v_trim.o_ids, '{}', v_trim.o_count, v_trim.o_archived,
                                     v_trim.o_hidden);
    end if;
    o_count := v_trim.o_count;
    update pgqueue.retention set trim_from = coalesce(v_trim.o_next, 1)
    where stream_id = p_stream_id and trim_from <> coalesce(v_trim.o_next, 1);
    o_more := o_skipped or v_trim.o_next is not null;
    if not o_more then
        perform _pgqueue.record_holders(p_stream_id);
    end if;
end $$;

-- Deletes the publications between two ids that no consumer needs, at most trim_at_once() of them. Those whose messages
-- are all stored elsewhere too are moved there (on_trimmed()). One statement checks all.
--   p_now, p_aged  messages that may be deleted; those of p_aged only if they were published before p_before
--   p_decided      publications that were known to be visible or dead before
-- Returns the deleted ids, with the dead ones before and among them, so that trims has one range; how many messages
-- they had; the id to continue from, null: none is left; the ids of which no message is lost; and those that readers
-- without a consumer do not read. (More than 60 lines: one statement, with one snapshot.)
create or replace function _pgqueue.delete_publications(p_stream_id int, p_from bigint, p_upto bigint,
                                                        p_now int8multirange, p_aged int8multirange,
                                                        p_before timestamptz, p_decided int8multirange,
                                                        out o_ids int8multirange, out o_count bigint, out o_next bigint,
                                                        out o_archived int8multirange, out o_hidden int8multirange)
language plpgsql
set enable_seqscan = off  -- rows of other streams' consumers are not read, whatever the statistics are
set jit = off
as $$
declare
    v_kept  int8multirange := _pgqueue.on_trim(p_stream_id);
    v_whole pgqueue.publications[];
begin
    with consumer as materialized (
        select c.consumer_id, e.next_publication,
               _pgqueue.new_ids(k) * int8multirange(int8range(1, e.next_publication)) as gaps
        from pgqueue.consumers c
        cross join lateral (select * from pgqueue.consumer_cursors where consumer_id = c.consumer_id
                            order by version desc limit 1) k
        cross join lateral (select _pgqueue.end_of_taken(k) as next_publication) e
        where c.stream_id = p_stream_id
    ), next as materialized (
        select publication_id, message_count, seqs, published_at,
               sum(message_count) over (order by publication_id range between unbounded preceding and 1 preceding)
                   as before
        from (select * from pgqueue.publications
              where stream_id = p_stream_id and publication_id >= p_from and publication_id <= p_upto
              order by publication_id
              fetch first (_pgqueue.trim_at_once()) rows with ties) p
    ), checked as materialized (
        -- messages that are stored elsewhere are read for their size
        select * from next where v_kept = '{}' or coalesce(before, 0) < _pgqueue.limit_archived()
    ), unfinished as materialized (
        select coalesce((select min(next_publication) from consumer), 9223372036854775807) as from_publication,
               coalesce((select range_agg(gaps) from consumer), '{}') as gaps,
               coalesce((select range_agg(o.seqs)
                         from (select m.seqs
                               from (select min(lower(seqs)) as lo, max(upper(seqs)) as hi from checked) a
                               cross join consumer
                               cross join lateral (select seqs from _pgqueue.unfinished(consumer.consumer_id, a.hi)
                                                   where seqs && int8range(a.lo, a.hi) offset 0) m
                               union all
                               select d.seqs from consumer
                               join pgqueue.dead_messages d using (consumer_id)) o), '{}') as seqs
    ), judged as (
        select l.publication_id, sum(l.message_count) as message_count,
               bool_and((_pgqueue.less(l.seqs, p_now) = '{}'
                         or (_pgqueue.less(l.seqs, p_aged) = '{}' and l.published_at < p_before)) is true
                        and not _pgqueue.meets(l.seqs, o.seqs)) as unneeded
        from checked l cross join unfinished o
        where l.publication_id < o.from_publication and not o.gaps @> l.publication_id
        group by l.publication_id
    ), gone as (
        delete from pgqueue.publications p
        using judged j
        where j.unneeded and p.stream_id = p_stream_id and p.publication_id = j.publication_id
        returning p.publication_id, p.message_count, p.seqs, p.consumers, p as publication
    ), archived as materialized (  -- (joined with itself, it would cost its square)
        select publication, publication_id,
               bool_and(_pgqueue.less(seqs, v_kept) = '{}') over (partition by publication_id) as is_whole
        from gone where v_kept <> '{}'
    )
    select coalesce((select range_agg(int8range(publication_id, publication_id, '[]'))
                            + (int8multirange(int8range(p_from, max(publication_id)))
                               - (select range_agg(int8range(publication_id, publication_id, '[]')) from checked))
                              * p_decided
                     from gone), '{}'),
           coalesce((select sum(message_count) from gone), 0),
           case when (count(*) >= _pgqueue.trim_at_once() or count(*) < (select count(*) from next))
               and max(publication_id) < least(p_upto, (select from_publication - 1 from unfinished))
                then max(publication_id) + 1 end,
           (select range_agg(int8range(publication_id, publication_id, '[]')) from archived where not is_whole),
           (select range_agg(int8range(publication_id, publication_id, '[]')) from gone where consumers is null),
           (select array_agg(publication) from archived where is_whole)
    into o_ids, o_count, o_next, o_archived, o_hidden, v_whole
    from checked;
    o_hidden := o_ids - coalesce(o_hidden, '{}');
    -- a dead one is not lost, either
    o_archived := case when v_kept = '{}' then '{}' else o_ids - coalesce(o_archived, '{}') end;
    perform _pgqueue.on_trimmed(p_stream_id, v_whole) where v_whole is not null;
end $$;

-- The sessions that rely on old publications of a stream, so that it is not trimmed.
create or replace function _pgqueue.history_holders(p_stream_id int) returns text[]
language sql as $$
    select array(
        select case when l.pid is not null then format('open transaction of process %s', l.pid)
                    else format('prepared transaction%s', coalesce(' ' || quote_literal(p.gid), '')) end
               || ', which created or moved a consumer or began to read'
        from pg_locks l
        left join pg_locks x on x.locktype = 'transactionid' and x.granted and x.pid is null
            and x.virtualtransaction = l.virtualtransaction
        left join pg_prepared_xacts p on p.transaction = x.transactionid
        where l.locktype = 'advisory' and l.granted and l.classid = _pgqueue.lock_class_history()::oid
          and l.objid = p_stream_id::oid and l.objsubid = 2
          and l.database = (select oid from pg_database where datname = current_database())
          and l.pid is distinct from pg_backend_pid())
$$;

-- Records in the rows of due segments why they are still kept. A gap whose transactions are open is theirs; any other
-- gap is the consumer's, whose next claim closes it.
--   p_others  other holders of all segments
create or replace function _pgqueue.record_holders(p_stream_id int, p_others text[] default '{}') returns void
language sql set enable_seqscan = off set jit = off as $$
    with open_gaps as materialized (
        select c.consumer_id, range_agg(g.publication_ids) as ids
        from pgqueue.consumers c join pgqueue.consumer_gaps g using (consumer_id)
        where c.stream_id = p_stream_id and g.publishers && (select _pgqueue.publishers(p_stream_id))
        group by c.consumer_id
    ), held as materialized (
        select d.segment,
               array(select format('consumer %s', c.name)
                     from pgqueue.consumers c cross join lateral _pgqueue.cursor(c.consumer_id) k
                     where c.stream_id = p_stream_id
                       and (_pgqueue.end_of_taken(k) <= d.last_publication
                            or _pgqueue.gap_ids(k) - coalesce((select ids from open_gaps g
                                                               where g.consumer_id = c.consumer_id), '{}')
                               && int8range(1, d.last_publication, '[]')
                            or exists (select from _pgqueue.published(p_stream_id, _pgqueue.new_ids(k) * int8multirange(
                                                                      int8range(1, d.last_publication, '[]'))))
                            or exists (select from _pgqueue.unfinished(c.consumer_id, d.hi) m
                                       where m.seqs && int8range(d.lo, d.hi)))
                     union all
                     select format('dead letters of consumer %s', c.name) from pgqueue.consumers c
                     where c.stream_id = p_stream_id
                       and exists (select from pgqueue.dead_messages m
                                   where m.consumer_id = c.consumer_id and m.seqs && int8range(d.lo, d.hi))
                     union all
                     select 'transactions or sinks that have not yet published'
                     where d.last_publication is null
                        or exists (select from open_gaps where ids && int8range(1, d.last_publication, '[]'))
                     union all
                     select _pgqueue.on_hold(p_stream_id, d.segment)
                     where d.last_publication is not null and not d.trimmable
                     union all
                     select unnest(p_others)
                     order by 1) as by
        from _pgqueue.due_segments(p_stream_id) d
    )
    update pgqueue.segments l set held_by = h.by from held h
    where l.stream_id = p_stream_id and l.segment = h.segment and l.held_by <> h.by
$$;

-- Deletes a bounded number of dead letters of a stream that are older than its rules allow. Returns the number of
-- messages.
create or replace function _pgqueue.trim_dead(p_stream_id int) returns bigint
language sql as $$
    with gone as (
        delete from pgqueue.dead_messages
        where dead_id = any (array(
            select dead_id from pgqueue.dead_messages
            where dead_id = any (array(
                select d.dead_id
                from pgqueue.retention r join pgqueue.consumers c using (stream_id)
                cross join lateral (select dead_id, died_at from pgqueue.dead_messages
                                    where consumer_id = c.consumer_id order by dead_id limit _pgqueue.trim_at_once()) d
                where r.stream_id = p_stream_id and d.died_at < clock_timestamp() - r.keep_dead))
            for update skip locked))  -- lock: dead
        returning message_count
    )
    select coalesce(sum(message_count), 0)::bigint from gone
$$;

-- Deletes what groups have processed, if it keeps segments that are due, so that the next call of trim() can trim them.
-- Returns whether it deleted something. Locks, to the end of the transaction: these groups, if their locks are free.
create or replace function _pgqueue.delete_passed_due(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_due int8multirange;
begin
    if not exists (select from pgqueue.consumers where stream_id = p_stream_id and partitions is not null) then
        return false;
    end if;
    v_due := (select range_agg(int8range(lo, hi)) from _pgqueue.due_segments(p_stream_id) where trimmable);
    return v_due is not null
           and coalesce((select bool_or(_pgqueue.try_delete_passed(c)) from pgqueue.consumers c
                         where c.stream_id = p_stream_id and c.partitions is not null
                           and _pgqueue.has_to_skip(c.consumer_id, v_due)), false);
end $$;

-- Applies a bounded part of the retention of a stream; nothing while another session does so. Returns how many messages
-- and dead letters it trimmed, and whether there may be more. Locks: as trim(), maintain_segments() and
-- delete_passed_due().
create or replace function _pgqueue.retain(p_stream_id int, out o_count bigint, out o_dead bigint, out o_more boolean)
language plpgsql as $$
declare
    v_trim record;
begin
    o_count := 0;
    o_dead := 0;
    o_more := false;
    if not pg_try_advisory_xact_lock(_pgqueue.lock_class_maintain(), p_stream_id) then  -- lock: maintain
        return;
    end if;
    -- if set_retention is changing it, the statements below would wait with the history's lock
    perform from pgqueue.retention where stream_id = p_stream_id for no key update skip locked;  -- lock: maintain
    if not found and exists (select from pgqueue.retention where stream_id = p_stream_id) then
        return;
    end if;
    perform _pgqueue.check_numbers('stream ' || p_stream_id, _pgqueue.sequences_of(p_stream_id));
    o_dead := _pgqueue.trim_dead(p_stream_id);
    v_trim := _pgqueue.trim(p_stream_id);
    o_count := v_trim.o_count;
    update pgqueue.retention set maintained_at = clock_timestamp()
    where stream_id = p_stream_id and (maintained_at > clock_timestamp() - interval '1 minute') is not true;
    o_more := _pgqueue.on_retained(p_stream_id) or v_trim.o_more or o_dead > 0 or o_count > 0;
    -- not with locks of consumers
    if not v_trim.o_skipped
       and (o_count = 0
            or exists (select from pgqueue.retention where stream_id = p_stream_id and unread = 'keep')) then
        o_more := _pgqueue.maintain_segments(p_stream_id) or o_more;
    end if;
    -- last, because it locks groups: one that is at work may have processed something before each call
    if not o_more then
        o_more := _pgqueue.delete_passed_due(p_stream_id);
    end if;
end $$;
