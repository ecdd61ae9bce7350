-- Trimming: what a stream need not keep any more is taken away, in short transactions, and what was taken is noted.
--
-- A leaf is due when it is closed and the rules of its stream say so. Of the publications that have messages in it, those go whose messages
-- are all in leaves that are due or empty, and which nobody needs:
--   * every consumer has taken it, it is in no gap, and no message of it is in a run or a dead letter. All that is read in one statement,
--     and so as of one moment; what is settled then stays so, because whoever makes old publications new for somebody
--     (create_consumer and the like) has the history lock of the stream, shared, until he is done, and trimming goes on only while nobody has;
--   * where the rules say drop, consumers are first made to be done with it: under their lock, but never out of a live claim (_skip).
-- When no publication is left of it, the leaf is emptied (core/leaves.sql).

-- Publications that one transaction looks at.
create or replace function pgqueue._trim_at_once() returns int language sql immutable parallel safe as 'select 10000';

-- What was trimmed of a stream, as publication ids and seqs; both empty: nothing. A publication that is neither visible nor in this set was
-- rolled back, or is not committed yet.
create or replace function pgqueue._trimmed(p_stream_id int, out o_publications int8multirange, out o_seqs int8multirange)
language plpgsql stable
as $$
begin
    select publication_ids, seqs into o_publications, o_seqs from pgqueue.trims where stream_id = p_stream_id;
    o_publications := coalesce(o_publications, '{}');
    o_seqs := coalesce(o_seqs, '{}');
end $$;

-- Notes what was trimmed.
create or replace function pgqueue._note_trim(p_stream_id int, p_publications int8multirange, p_seqs int8multirange, p_count bigint) returns void
language sql
as $$
    insert into pgqueue.trims as t (stream_id, publication_ids, seqs, message_count, trimmed_at)
    values (p_stream_id, p_publications, p_seqs, p_count, clock_timestamp())
    on conflict (stream_id) do update
    set publication_ids = t.publication_ids + excluded.publication_ids, seqs = t.seqs + excluded.seqs,
        message_count = t.message_count + excluded.message_count, trimmed_at = excluded.trimmed_at
$$;

-- The leaves that the rules of a stream do not ask to keep, the first ones first.
-- Returns also why: over (the leaves after it have as much as is to be kept), aged, done (it is to go when every consumer is done).
create or replace function pgqueue._due_leaves(p_stream_id int)
returns table (leaf int, lo bigint, hi bigint, closed_publication bigint, last_publication bigint, over boolean, aged boolean, done boolean)
language sql stable
as $$
    with sized as (
        select l.*, coalesce(l.last_seq, least(pgqueue._last_seq(p_stream_id), l.hi - 1)) - l.lo + 1 as messages,
               pg_total_relation_size(to_regclass(format('pgqueue.%I', pgqueue._leaf_name(p_stream_id, l.leaf)))) as bytes
        from pgqueue.leaves l
        where l.stream_id = p_stream_id and l.opened_at is not null
    ), later as (
        select s.*, sum(messages) over later as later_messages, sum(bytes) over later as later_bytes
        from sized s
        window later as (order by lo rows between 1 following and unbounded following)
    ), judged as (
        select l.*, (l.later_messages >= r.keep_messages or l.later_bytes >= r.keep_bytes) is true as over,
               -- its last message, nearly; what was published later than the numbers near it is looked at one by one
               (coalesce((select p.published_at from pgqueue.publications p
                          where p.stream_id = p_stream_id and p.publication_id <= l.closed_publication order by p.publication_id desc limit 1), '-infinity')
                < clock_timestamp() - r.keep_for) is true as aged,
               r.until_done and exists (select from pgqueue.consumers c where c.stream_id = p_stream_id) as done
        from later l join pgqueue.retention r using (stream_id)
        where l.closed_at is not null and not l.emptied
    )
    select leaf, lo, hi, closed_publication, last_publication, over, aged, done from judged where over or aged or done order by lo
$$;

-- Trims what is due of a stream: a bounded part of it.
-- Returns how many messages are trimmed, whether there may be more, and whether it made consumers be done with some, whose locks it has.
-- Locks, to the end of the transaction: the history lock, if nobody has it; where unread messages are dropped the consumers of which some were taken, if
-- nobody has them: then there may be more.
create or replace function pgqueue._trim(p_stream_id int, out o_count bigint, out o_more boolean, out o_skipped boolean)
language plpgsql
as $$
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
    select coalesce(range_agg(int8range(lo, hi)) filter (where over or done), '{}') as now, coalesce(range_agg(int8range(lo, hi)), '{}') as aged,
           coalesce(range_agg(int8range(lo, hi)) filter (where over or d.aged), '{}') as drop,
           max(last_publication) as upto, min(closed_publication) as late_from
    into v_due
    from pgqueue._due_leaves(p_stream_id) d where last_publication is not null;
    if v_due.upto is null then
        perform pgqueue._note_holders(p_stream_id);
        return;
    elsif not pgqueue._try_lock_history_alone(p_stream_id) then
        perform pgqueue._note_holders(p_stream_id, pgqueue._history_holders(p_stream_id));
        return;
    end if;
    if v_rules.unread = 'drop' and v_due.drop <> '{}' then
        -- what was published long after its number was given out is not old yet
        v_due.drop := v_due.drop - coalesce((select range_agg(p.seqs) from pgqueue.publications p
                                             where p.stream_id = p_stream_id and p.publication_id > v_due.late_from and p.publication_id <= v_due.upto
                                               and p.published_at >= clock_timestamp() - v_rules.keep_for and not p.seqs <@ v_due.now), '{}');
        o_skipped := coalesce((select bool_or(pgqueue._skip(c, v_due.drop, v_due.upto)) from pgqueue.consumers c where c.stream_id = p_stream_id), false);
        o_more := o_skipped;
    end if;
    v_due.now := v_due.now + (pgqueue._trimmed(p_stream_id)).o_seqs;
    v_due.aged := v_due.aged + v_due.now;
    v_issued := pgqueue._last_publication_id(p_stream_id);
    v_decided := case when pgqueue._publishers(p_stream_id) = '{}' then int8multirange(int8range(1, v_issued + 1))
                      else pgqueue._taken_by_some(p_stream_id)
                           + coalesce((select int8multirange(int8range(1, below)) from pgqueue.decided where stream_id = p_stream_id), '{}') end;
    v_trim := pgqueue._delete_publications(p_stream_id, v_rules.trim_from, v_due.upto, v_due.now, v_due.aged, clock_timestamp() - v_rules.keep_for,
                                           v_decided);
    if v_trim.o_ids <> '{}' then
        perform pgqueue._note_trim(p_stream_id, v_trim.o_ids, '{}', v_trim.o_count);
    end if;
    o_count := v_trim.o_count;
    update pgqueue.retention set trim_from = coalesce(v_trim.o_next, 1) where stream_id = p_stream_id and trim_from <> coalesce(v_trim.o_next, 1);
    if v_trim.o_next is not null then
        o_more := true;
    elsif not o_more then
        perform pgqueue._note_holders(p_stream_id);
    end if;
end $$;

-- Deletes the publications between two ids that nobody needs, at most _trim_at_once() of them. The look is one statement.
--   p_now, p_aged  messages that may go; these if they were published before p_before
--   p_decided      publications that are visible or dead, known before the look
-- Returns which, with the dead ones before and among them, so that what is noted of the past is one range; how many messages they had; and from
-- which one to go on; null: that was the last.
create or replace function pgqueue._delete_publications(p_stream_id int, p_from bigint, p_upto bigint, p_now int8multirange, p_aged int8multirange,
                                                        p_before timestamptz, p_decided int8multirange, out o_ids int8multirange, out o_count bigint, out o_next bigint)
language plpgsql
set enable_seqscan = off  -- what other streams' consumers have is not read, whatever the statistics say
set jit = off
as $$
begin
    with consumer as materialized (
        select c.consumer_id, k.next_publication, pgqueue._gap_ids(k) as gaps
        from pgqueue.consumers c
        cross join lateral (select * from pgqueue.consumer_cursors where consumer_id = c.consumer_id order by version desc limit 1) k
        where c.stream_id = p_stream_id
    ), looked as materialized (
        select publication_id, message_count, seqs, published_at from pgqueue.publications
        where stream_id = p_stream_id and publication_id >= p_from and publication_id <= p_upto
        order by publication_id
        fetch first (pgqueue._trim_at_once()) rows with ties
    ), around as materialized (
        select min(lower(seqs)) as lo, max(upper(seqs)) as hi from looked
    ), owed as materialized (
        select coalesce((select min(next_publication) from consumer), 9223372036854775807) as from_publication,
               coalesce((select range_agg(gaps) from consumer), '{}') as gaps,
               coalesce((select range_agg(o.seqs)
                         from (select m.seqs from around a cross join consumer cross join lateral pgqueue._owed(consumer.consumer_id, a.hi) m
                               where m.seqs && int8range(a.lo, a.hi)
                               union all
                               select d.seqs from consumer join pgqueue.dead_messages d using (consumer_id)) o), '{}') as seqs
    ), judged as (
        select l.publication_id, sum(l.message_count) as message_count,
               bool_and((l.seqs <@ p_now or (l.seqs <@ p_aged and l.published_at < p_before)) is true
                        and case when range_merge(l.seqs) && o.seqs then not l.seqs && o.seqs else true end) as unneeded  -- a range is looked up, a set is not
        from looked l cross join owed o
        where l.publication_id < o.from_publication and not o.gaps @> l.publication_id
        group by l.publication_id
    ), gone as (
        delete from pgqueue.publications p
        using judged j
        where j.unneeded and p.stream_id = p_stream_id and p.publication_id = j.publication_id
        returning p.publication_id, p.message_count
    )
    select coalesce((select range_agg(int8range(publication_id, publication_id, '[]'))
                            + (int8multirange(int8range(p_from, max(publication_id)))
                               - (select range_agg(int8range(publication_id, publication_id, '[]')) from looked)) * p_decided
                     from gone), '{}'),
           coalesce((select sum(message_count) from gone), 0),
           case when count(*) >= pgqueue._trim_at_once() and max(publication_id) < least(p_upto, (select from_publication - 1 from owed))
                then max(publication_id) + 1 end
    into o_ids, o_count, o_next
    from looked;
end $$;

-- What a consumer has in its runs, of those that begin before a number: by the indexes of their states, so that nothing else is read.
create or replace function pgqueue._owed(p_consumer_id int, p_below bigint) returns setof pgqueue.consumer_messages
language sql stable
as $$
    select * from pgqueue._unclaimed(p_consumer_id) where first_seq < p_below
    union all
    select m.* from pgqueue.claims c join pgqueue.consumer_messages m on m.claim_id = c.claim_id and m.state = 'claimed'
    where c.consumer_id = p_consumer_id and c.live and m.first_seq < p_below
$$;

-- Whether a consumer has messages that it is to be made done with, except in a claim whose lease has not ended.
create or replace function pgqueue._has_to_skip(p_consumer_id int, p_seqs int8multirange) returns boolean
language plpgsql stable
set enable_seqscan = off
set jit = off
as $$
begin
    return exists (select from pgqueue._owed(p_consumer_id, upper(p_seqs)) m
                   where m.seqs && p_seqs
                     and (m.state <> 'claimed'
                          or exists (select from pgqueue.claims c where c.claim_id = m.claim_id and c.lease_until <= clock_timestamp())));
end $$;

-- Makes a consumer be done with messages, except those in a live claim whose lease has not ended. They are counted. (So are those that are unsifted,
-- though its filter might not let them pass: to tell, all of them would have to be read.)
--   p_seqs  the messages
--   p_upto  the last publication that has some of them
-- Returns whether something was done, so that there may be more; false also when somebody else has the consumer's lock, or dropped it.
-- Locks, if something was done: the consumer, its expired claims.
create or replace function pgqueue._skip(p_consumer pgqueue.consumers, p_seqs int8multirange, p_upto bigint) returns boolean
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors;
begin
    select * into v_cursor from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id order by version desc limit 1;
    if not found or (v_cursor.next_publication > p_upto and not pgqueue._gap_ids(v_cursor) && int8range(1, p_upto, '[]')
                     and not pgqueue._has_to_skip(p_consumer.consumer_id, p_seqs)) then
        return false;
    end if;
    if not pgqueue._try_lock_consumer(p_consumer.consumer_id) then
        return false;
    end if;
    if not pgqueue._skip_locked(p_consumer, p_seqs, p_upto) then
        raise exception using errcode = 'PQ099';
    end if;
    return true;
exception when sqlstate 'PQ099' then
    return false;  -- and the lock is let go: what comes next in the transaction may take long
end $$;

-- The same with the consumer's lock. Returns whether something was done.
create or replace function pgqueue._skip_locked(p_consumer pgqueue.consumers, p_seqs int8multirange, p_upto bigint) returns boolean
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_before pgqueue.consumer_cursors;
    v_more   boolean := false;
    v_due    record;
    v_away   record;
begin
    select * into v_stored from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id order by version desc limit 1;
    if not found then
        return false;
    end if;
    v_cursor := v_stored;
    for i in 1..10 loop
        exit when v_cursor.next_publication > p_upto and not pgqueue._gap_ids(v_cursor) && int8range(1, p_upto, '[]');
        v_before := v_cursor;
        v_cursor := (pgqueue._take(p_consumer, v_cursor, greatest(p_upto, v_cursor.next_publication - 1), pgqueue._limit_take())).o_cursor;
        v_more := v_cursor.take_was_cut;
        exit when v_cursor.next_publication = v_before.next_publication and not v_more;
    end loop;
    v_due := pgqueue._release_due(p_consumer, v_cursor, p_seqs);
    v_away := pgqueue._take_away(p_consumer, v_due.o_cursor, p_seqs);
    if v_away.o_gone <> '{}' then
        insert into pgqueue.skips as s (consumer_id, seqs, message_count, skipped_at)
        values (p_consumer.consumer_id, v_away.o_gone, pgqueue._cardinality(v_away.o_gone), clock_timestamp())
        on conflict (consumer_id) do update
        set seqs = s.seqs + excluded.seqs, message_count = s.message_count + excluded.message_count, skipped_at = excluded.skipped_at;
    end if;
    perform pgqueue._save_cursor(v_stored, v_away.o_cursor, true);
    return v_due.o_count > 0 or v_away.o_count > 0 or v_cursor.next_publication > v_stored.next_publication or v_cursor.taken > v_stored.taken
        or v_more or pgqueue._gap_ids(v_cursor) <> pgqueue._gap_ids(v_stored);
end $$;

-- Releases the claims of a consumer that have some of these messages and whose lease ended, as a claimer in need does.
-- Returns the cursor, and how many claims that were. Needs the consumer's lock.
create or replace function pgqueue._release_due(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_seqs int8multirange,
                                                out o_cursor pgqueue.consumer_cursors, out o_count int)
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    o_cursor := p_cursor;
    o_count := 0;
    for v_claim in
        select c.* from pgqueue.claims c
        where c.consumer_id = p_consumer.consumer_id and c.live and c.lease_until <= clock_timestamp()
          and exists (select from pgqueue.consumer_messages m where m.claim_id = c.claim_id and m.state = 'claimed' and m.seqs && p_seqs)
        order by c.lease_until limit pgqueue._limit_expired()
        for update of c skip locked
    loop
        o_cursor := pgqueue._release(p_consumer, o_cursor, v_claim);
        o_count := o_count + 1;
    end loop;
end $$;

-- Takes messages from a consumer that nobody claimed. Runs that somebody is claiming are left for the next time.
--   p_reason  they become dead letters, of this reason; null: nothing is kept of them
-- Returns the cursor, the messages, of how many runs they were, and how often the one was delivered that was so most often. Needs the consumer's lock.
create or replace function pgqueue._take_away(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_seqs int8multirange,
                                              p_reason text default null, out o_cursor pgqueue.consumer_cursors, out o_count int,
                                              out o_gone int8multirange, out o_most int)
language plpgsql
as $$
declare
    v_taken record := pgqueue._take_unclaimed(p_consumer, p_cursor, p_seqs);
begin
    o_cursor := v_taken.o_cursor;
    select count(*), coalesce(range_agg(seqs), '{}'), coalesce(max(deliver_count), 0) into o_count, o_gone, o_most from unnest(v_taken.o_runs);
    if p_reason is not null then
        perform pgqueue._dead_letter(r, r.seqs, p_reason, null) from unnest(v_taken.o_runs) r;
    end if;
end $$;

-- Takes messages that nobody claimed out of a consumer's runs, for who says what becomes of them. Runs that somebody is claiming are left.
-- Returns the cursor, and the messages as runs, as they were. Needs the consumer's lock.
create or replace function pgqueue._take_unclaimed(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_seqs int8multirange,
                                                   out o_cursor pgqueue.consumer_cursors, out o_runs pgqueue.consumer_messages[])
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
begin
    o_cursor := p_cursor;
    o_runs := '{}';
    for v_run in
        delete from pgqueue.consumer_messages
        where ctid = any (  -- by the indexes of their states
            array(select ctid from pgqueue.consumer_messages
                  where consumer_id = p_consumer.consumer_id and state = 'ready' and first_seq < upper(p_seqs) and seqs && p_seqs for update skip locked)
            || array(select ctid from pgqueue.consumer_messages
                     where consumer_id = p_consumer.consumer_id and state = 'delayed' and first_seq < upper(p_seqs) and seqs && p_seqs for update skip locked)
            || array(select ctid from pgqueue.consumer_messages
                     where consumer_id = p_consumer.consumer_id and state = 'unsifted' and first_seq < upper(p_seqs) and seqs && p_seqs for update skip locked)
            || array(select ctid from pgqueue.consumer_messages
                     where consumer_id = p_consumer.consumer_id and state = 'waiting' and key is not null
                       and first_seq < upper(p_seqs) and seqs && p_seqs for update skip locked))
        returning *
    loop
        v_part := v_run.seqs * p_seqs;
        if pgqueue._store_run(v_run, v_run.seqs - v_part) = 0 and v_run.state = 'delayed' and v_run.key is not null then
            -- what waits for it is free, as if a piece had held it and were gone (see _end_delays)
            o_cursor.last_line_no := o_cursor.last_line_no + 1;
            insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq)
            values (p_consumer.consumer_id, o_cursor.last_line_no, o_cursor.last_line_no, 0, array[v_run.key], v_run.arrival_no, v_run.first_seq);
        end if;
        v_run.seqs := v_part;
        v_run.first_seq := lower(v_part);
        v_run.message_count := pgqueue._cardinality(v_part);
        o_runs := o_runs || v_run;
    end loop;
end $$;

-- Who relies on old publications of a stream, so that nothing of it is trimmed.
create or replace function pgqueue._history_holders(p_stream_id int) returns text[]
language plpgsql
as $$
begin
    return array(
        select case when l.pid is not null then format('open transaction of process %s', l.pid)
                    else format('prepared transaction%s', coalesce(' ' || quote_literal(p.gid), '')) end
               || ', which created or moved a consumer or began to read'
        from pg_locks l
        left join pg_locks x on x.locktype = 'transactionid' and x.granted and x.pid is null and x.virtualtransaction = l.virtualtransaction
        left join pg_prepared_xacts p on p.transaction = x.transactionid
        where l.locktype = 'advisory' and l.granted and l.classid = pgqueue._lock_class_history()::oid and l.objid = p_stream_id::oid and l.objsubid = 2
          and l.database = (select oid from pg_database where datname = current_database()) and l.pid is distinct from pg_backend_pid());
end $$;

-- Notes of the leaves that are due who keeps them.
--   p_others  others who keep all of them
create or replace function pgqueue._note_holders(p_stream_id int, p_others text[] default '{}') returns void
language plpgsql
set enable_seqscan = off
set jit = off
as $$
begin
    with held as materialized (
        select d.leaf,
               array(select format('consumer %s', c.name)
                     from pgqueue.consumers c cross join lateral pgqueue._cursor(c.consumer_id) k
                     where c.stream_id = p_stream_id
                       and (k.next_publication <= d.last_publication or pgqueue._gap_ids(k) && int8range(1, d.last_publication, '[]')
                            or exists (select from pgqueue._owed(c.consumer_id, d.hi) m where m.seqs && int8range(d.lo, d.hi)))
                     union all
                     select format('dead letters of consumer %s', c.name) from pgqueue.consumers c
                     where c.stream_id = p_stream_id
                       and exists (select from pgqueue.dead_messages m where m.consumer_id = c.consumer_id and m.seqs && int8range(d.lo, d.hi))
                     union all
                     select 'transactions or sinks that have not published it' where d.last_publication is null
                     union all
                     select unnest(p_others)
                     order by 1) as by
        from pgqueue._due_leaves(p_stream_id) d
    )
    update pgqueue.leaves l set held_by = h.by from held h where l.stream_id = p_stream_id and l.leaf = h.leaf and l.held_by <> h.by;
end $$;

-- Deletes dead letters of a stream that are older than its rules keep them, a bounded number. Returns how many messages that is.
create or replace function pgqueue._trim_dead(p_stream_id int) returns bigint
language sql
as $$
    with gone as (
        delete from pgqueue.dead_messages
        where dead_id = any (array(
            select d.dead_id
            from pgqueue.retention r join pgqueue.consumers c using (stream_id)
            cross join lateral (select dead_id, died_at from pgqueue.dead_messages
                                where consumer_id = c.consumer_id order by dead_id limit pgqueue._trim_at_once()) d
            where r.stream_id = p_stream_id and d.died_at < clock_timestamp() - r.keep_dead))
        returning message_count
    )
    select coalesce(sum(message_count), 0)::bigint from gone
$$;

-- Does a bounded part of what the retention of a stream asks for; nothing while another session is at it.
-- Returns how many messages and dead letters were trimmed, and whether there may be more to do. Locks: as _trim and _tend_leaves.
create or replace function pgqueue._retain(p_stream_id int, out o_count bigint, out o_dead bigint, out o_more boolean)
language plpgsql
as $$
declare
    v_trim record;
begin
    o_count := 0;
    o_dead := 0;
    o_more := false;
    if not pg_try_advisory_xact_lock(pgqueue._lock_class_maintain(), p_stream_id) then
        return;
    end if;
    o_dead := pgqueue._trim_dead(p_stream_id);
    v_trim := pgqueue._trim(p_stream_id);
    o_count := v_trim.o_count;
    update pgqueue.retention set maintained_at = clock_timestamp()
    where stream_id = p_stream_id and (maintained_at > clock_timestamp() - interval '1 minute') is not true;
    o_more := v_trim.o_more or o_dead > 0 or o_count > 0;
    -- not with locks of consumers
    if (o_count = 0 and not v_trim.o_skipped) or exists (select from pgqueue.retention where stream_id = p_stream_id and unread = 'keep') then
        o_more := pgqueue._tend_leaves(p_stream_id) or o_more;
    end if;
end $$;
