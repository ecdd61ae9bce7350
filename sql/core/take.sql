-- Taking: publications that are new for a consumer become its runs. New is what is beyond the last publication that it took,
-- and what has appeared in its gaps (core/gaps.sql).

-- What comes next, if it is as plain as nearly always: at most p_limit publications without a gap among their ids, all of the same kind,
-- and their messages one range, or those of a single publication.
--   p_first  the first part of the next one
-- Returns the last one, how many they are, and their messages; nulls when it is not so.
create or replace function pgqueue._next_plain(p_first pgqueue.publications, p_upto bigint, p_limit int,
                                               out o_last bigint, out o_count bigint, out o_message_count bigint, out o_seqs int8multirange)
language plpgsql
as $$
declare
    v_all record;
begin
    -- is there another one, or another part of it?
    perform from pgqueue.publications
    where stream_id = p_first.stream_id and (publication_id, part) > (p_first.publication_id, 0)
      and publication_id < p_first.publication_id + p_limit and publication_id <= coalesce(p_upto, 9223372036854775807)
    order by publication_id, part limit 1;
    if not found then
        o_last := p_first.publication_id;
        o_count := 1;
        o_message_count := p_first.message_count;
        o_seqs := p_first.seqs;
        return;
    end if;
    select count(*) as count, max(publication_id) as last, sum(message_count)::bigint as message_count, min(lower(seqs)) as lo, max(upper(seqs)) as hi,
           bool_and(part = 0 and priority = p_first.priority and deliver_at is not distinct from p_first.deliver_at
                    and consumers is not distinct from p_first.consumers and expires_at is not distinct from p_first.expires_at) as alike
    into v_all
    from pgqueue.publications
    where stream_id = p_first.stream_id and publication_id >= p_first.publication_id and publication_id < p_first.publication_id + p_limit
      and publication_id <= coalesce(p_upto, 9223372036854775807);
    if v_all.alike and v_all.last - p_first.publication_id + 1 = v_all.count and v_all.hi - v_all.lo = v_all.message_count then
        o_last := v_all.last;
        o_count := v_all.count;
        o_message_count := v_all.message_count;
        o_seqs := int8multirange(int8range(v_all.lo, v_all.hi));
    end if;
end $$;

-- Takes what comes next into one run, if it is plain (_next_plain) and there is no gap before it.
-- Returns the cursor, null when it is not so and nothing was done; and how many messages became ready. Needs the consumer's lock.
create or replace function pgqueue._take_plain(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_upto bigint, p_limit int,
                                               out o_cursor pgqueue.consumer_cursors, out o_messages bigint)
language plpgsql
as $$
declare
    v_next  bigint := p_cursor.next_publication;
    v_first pgqueue.publications;
    v_plain record;
    v_run   pgqueue.consumer_messages;
begin
    o_messages := 0;
    select * into v_first from pgqueue.publications
    where stream_id = p_consumer.stream_id and publication_id = v_next and part = 0 and v_next <= coalesce(p_upto, v_next);
    if not found then
        return;
    end if;
    v_plain := pgqueue._next_plain(v_first, p_upto, p_limit);
    if v_plain.o_last is null then
        return;
    end if;
    -- What is visible beyond has a gap before it, unless the limit cut it off
    if v_plain.o_count < p_limit and v_plain.o_last < coalesce(p_upto, 9223372036854775807) and exists (
        select from pgqueue.publications where stream_id = p_consumer.stream_id and publication_id >= v_next + p_limit
                                           and publication_id <= coalesce(p_upto, 9223372036854775807)) then
        return;
    end if;

    o_cursor := p_cursor;
    o_cursor.next_publication := v_plain.o_last + 1;
    o_cursor.last_line_no := p_cursor.last_line_no + 1;
    o_cursor.take_was_cut := v_plain.o_count = p_limit;
    if not pgqueue._is_for(v_first.consumers, p_consumer.consumer_id) then
        return;
    end if;
    v_run.not_visible_until := case when v_first.deliver_at > clock_timestamp() then v_first.deliver_at end;
    v_run.consumer_id := p_consumer.consumer_id;
    v_run.state := case when p_consumer.filtered then 'unsifted'
                        when v_run.not_visible_until is not null and p_consumer.ordering = 'none' then 'delayed' else 'ready' end;
    v_run.lane := case when p_consumer.by_key then 1 else -v_first.priority end;
    v_run.priority := v_first.priority;
    v_run.deliver_count := 0;
    v_run.arrival_no := o_cursor.last_line_no;
    v_run.line_no := o_cursor.last_line_no;
    v_run.note := case when v_first.expires_at is not null then pgqueue._expiry(v_first.expires_at) end;
    o_cursor.taken := o_cursor.taken + pgqueue._store_run(v_run, v_plain.o_seqs);
    if v_run.state = 'ready' then
        o_cursor := pgqueue._lower_scan_from(o_cursor, array[(v_run.lane, v_run.line_no, 0)::pgqueue.line_place]);
        o_messages := v_plain.o_message_count;
    elsif v_run.state = 'delayed' then
        o_cursor.due_from := least(o_cursor.due_from, v_run.not_visible_until);
    end if;
end $$;

-- Takes what comes next and claims at most p_want messages of it at once, for a consumer with ordering=none that has nothing ready and nothing
-- due: if it is plain, one range, for this consumer, for now, and all that is new.
--   p_cursor  as it was before; nothing is done when it is another one now
--   p_first   the first part of the next publication
-- Returns how many messages the claim got; 0 when it is not so, or somebody else has the consumer's lock. Locks the consumer.
create or replace function pgqueue._claim_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_first pgqueue.publications,
                                              p_claim_id bigint, p_want bigint) returns bigint
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_plain  record := pgqueue._next_plain(p_first, null, pgqueue._limit_take());
    v_lane   int := -p_first.priority;
    v_lo     bigint := lower(v_plain.o_seqs);
    v_hi     bigint := upper(v_plain.o_seqs);
    v_to     bigint := least(v_lo + p_want, v_hi);
begin
    if p_consumer.filtered or v_plain.o_count = pgqueue._limit_take() or (v_hi - v_lo = v_plain.o_message_count) is not true
       or p_first.deliver_at > clock_timestamp() or p_first.expires_at is not null or not pgqueue._is_for(p_first.consumers, p_consumer.consumer_id)
       or not pgqueue._try_lock_consumer(p_consumer.consumer_id) then
        return 0;
    end if;
    if v_cursor.scan_from <> '{}' then
        if cardinality(v_cursor.scan_from) > 1 or (pgqueue._next_ready(p_consumer.consumer_id, v_cursor.scan_from[1])).run_ctid is not null then
            return 0;
        end if;
        v_cursor.scan_from := '{}';
    end if;
    delete from pgqueue.consumer_cursors where consumer_id = p_cursor.consumer_id and version = p_cursor.version;
    if not found then
        return 0;  -- another claimer was faster
    end if;
    v_cursor.version := v_cursor.version + 1;
    v_cursor.next_publication := v_plain.o_last + 1;
    v_cursor.last_line_no := v_cursor.last_line_no + 1;
    v_cursor.taken := v_cursor.taken + v_hi - v_lo;
    insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs,
                                           claim_id, last_delivered_at)
    values (p_consumer.consumer_id, 'claimed', v_lane, p_first.priority, 1, v_cursor.last_line_no, v_cursor.last_line_no, v_lo, v_to - v_lo,
            int8multirange(int8range(v_lo, v_to)), p_claim_id, clock_timestamp());
    if v_to < v_hi then
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs)
        select p_consumer.consumer_id, 'ready', v_lane, p_first.priority, 0, v_cursor.last_line_no, v_cursor.last_line_no, lo, hi - lo,
               int8multirange(int8range(lo, hi))
        from pgqueue._pieces(v_to, v_hi, p_want);
        v_cursor.scan_from := array[(v_lane, v_cursor.last_line_no, v_to)::pgqueue.line_place];
    end if;
    insert into pgqueue.consumer_cursors select v_cursor.*;
    return v_to - v_lo;
end $$;

-- Whether what is new may wait while something is ready, if something is: it is little, and not more urgent than all that may be ready.
create or replace function pgqueue._can_wait(p_stream_id int, p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
as $$
begin
    return cardinality(p_cursor.scan_from) = 1
       and (select count(*) < pgqueue._limit_waiting() and max(priority) <= -(p_cursor.scan_from[1]).lane
            from (select priority from pgqueue.publications
                  where stream_id = p_stream_id and publication_id >= p_cursor.next_publication
                    and publication_id < p_cursor.next_publication + pgqueue._limit_unseen()
                  order by publication_id limit pgqueue._limit_waiting()) p);
end $$;

-- The look of a take, and the runs for what it saw: one statement, and so one snapshot, of more than 60 lines. Nearly always ids and seqs
-- are contiguous; merging them one by one, range_agg, costs more than all the rest and is left out then.
-- It looks into gaps, and beyond from the cursor's next_publication. Which gaps is told after its snapshot: a producer that goes on and commits in
-- between would otherwise be seen with what is beyond, and not with what is in a gap.
-- Returns the gaps it looked into (null: none), the ids it took (null: none), how many of them were in gaps and beyond, the lanes in which runs are ready
-- now, when the first delayed one is due, how many messages became ready, and how many became runs.
create or replace function pgqueue._look(
    p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_upto bigint, p_limit int,
    out o_gaps pgqueue.consumer_gaps[], out o_taken int8multirange, out o_in_gaps int, out o_beyond int, out o_lanes int[], out o_due timestamptz,
    out o_messages bigint, out o_count bigint)
language plpgsql
as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_line_no bigint := p_cursor.last_line_no + 1;
begin
    with gap as materialized (
        select g from unnest(pgqueue._gaps_to_look_into(p_cursor, pgqueue._publishers(p_consumer.stream_id))) g
        where p_cursor.gaps <> '{}'
    ), held as materialized (
        select true as in_gap, p.publication_id, p.part, p.message_count, p.seqs, p.priority, p.deliver_at, p.consumers, p.expires_at
        from gap
        cross join lateral unnest((gap.g).publication_ids) r
        cross join lateral (select * from pgqueue.publications
                            where stream_id = p_consumer.stream_id
                              and publication_id >= lower(r) and publication_id < upper(r) and publication_id <= coalesce(p_upto, 9223372036854775807)
                            order by publication_id
                            fetch first p_limit rows with ties) p
        order by p.publication_id
        fetch first p_limit rows with ties
    ), new as materialized (
        select * from held
        union all
        (select false, publication_id, part, message_count, seqs, priority, deliver_at, consumers, expires_at
         from pgqueue.publications
         where stream_id = p_consumer.stream_id
           and publication_id >= p_cursor.next_publication and publication_id <= coalesce(p_upto, 9223372036854775807)
           and (select count(*) from held) < p_limit  -- or else what is left in the gaps comes first
         order by publication_id
         fetch first p_limit rows with ties)
    ), grouped as materialized (
        select priority, case when deliver_at > v_now then deliver_at end as due,
               pgqueue._is_for(consumers, p_consumer.consumer_id) as mine, expires_at,
               count(*) filter (where in_gap) as in_gaps, count(*) filter (where not in_gap) as beyond,
               count(*) filter (where part = 0) as ids, min(publication_id) as id_lo, max(publication_id) as id_hi,
               sum(message_count) as message_count, min(lower(seqs)) as lo, max(upper(seqs)) as hi
        from new
        group by 1, 2, 3, 4
    ), id as materialized (
        select coalesce(sum(in_gaps), 0) as in_gaps, coalesce(sum(beyond), 0) as beyond, sum(ids) as ids, min(id_lo) as lo, max(id_hi) as hi from grouped
    ), merged as (
        select priority, due, expires_at, int8multirange(int8range(lo, hi)) as seqs
        from grouped
        where mine and not exists (select from grouped where mine and hi - lo <> message_count)
        union all
        select priority, case when deliver_at > v_now then deliver_at end, expires_at, range_agg(seqs)
        from new
        where exists (select from grouped where mine and hi - lo <> message_count)
          and pgqueue._is_for(consumers, p_consumer.consumer_id)
        group by 1, 2, 3
    ), kept as (
        select coalesce(range_agg(k), '{}') as seqs from gap cross join lateral unnest((gap.g).kept) k
    ), run as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, not_visible_until, note)
        select p_consumer.consumer_id,
               case when p_consumer.filtered then 'unsifted' when m.due is not null and p_consumer.ordering = 'none' then 'delayed' else 'ready' end,
               case when p_consumer.by_key then 1 else -m.priority end,
               m.priority, 0, v_line_no, v_line_no, c.first_seq, c.message_count, c.seqs, m.due,
               case when m.expires_at is not null then pgqueue._expiry(m.expires_at) end
        from merged m cross join kept k cross join lateral pgqueue._chunks(m.seqs - k.seqs) c
        returning state, lane, message_count, not_visible_until
    )
    select (select array_agg(gap.g) from gap),
           case when id.ids = id.hi - id.lo + 1 then int8multirange(int8range(id.lo, id.hi, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from new) end,
           id.in_gaps, id.beyond,
           (select array_agg(distinct lane) from run where state = 'ready'), (select min(not_visible_until) from run where state = 'delayed'),
           (select coalesce(sum(message_count), 0) from run where state = 'ready' and not_visible_until is null),
           (select coalesce(sum(message_count), 0) from run)
    into o_gaps, o_taken, o_in_gaps, o_beyond, o_lanes, o_due, o_messages, o_count
    from id;
end $$;

-- Takes at most p_limit publications (and as many in gaps) into runs; or, of a filtered consumer, sifts some of what it took before.
--   p_upto  no publication after this one; null: all
-- Returns the cursor, which the caller stores, and how many messages became ready. Needs the consumer's lock.
create or replace function pgqueue._take(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_upto bigint, p_limit int,
                                         out o_cursor pgqueue.consumer_cursors, out o_messages bigint)
language plpgsql
as $$
declare
    v_taken record;
begin
    if p_cursor.sift_from is null then
        v_taken := pgqueue._take_runs(p_consumer, p_cursor, p_upto, p_limit);
        if p_consumer.filtered and (v_taken.o_cursor).last_line_no > p_cursor.last_line_no then
            v_taken.o_cursor.sift_from := (v_taken.o_cursor).last_line_no;
            v_taken.o_cursor.take_was_cut := true;
        end if;
    else
        v_taken := pgqueue._sift(p_consumer, p_cursor);
    end if;
    o_cursor := v_taken.o_cursor;
    o_messages := v_taken.o_messages;
end $$;

-- Takes at most p_limit publications (and as many in gaps) into runs; see _take.
create or replace function pgqueue._take_runs(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_upto bigint, p_limit int,
                                         out o_cursor pgqueue.consumer_cursors, out o_messages bigint)
language plpgsql
as $$
declare
    v_publishers text[];
    v_issued     bigint;  -- publication ids up to it were given out before the look
    v_look       record;
    v_plain      record;
    v_taken      int8multirange;
    v_end        bigint;  -- ids up to it were looked at
begin
    if p_cursor.gaps = '{}' then
        v_plain := pgqueue._take_plain(p_consumer, p_cursor, p_upto, p_limit);
        o_cursor := v_plain.o_cursor;
        o_messages := v_plain.o_messages;
        if o_cursor.consumer_id is not null then
            return;
        end if;
    else
        v_publishers := pgqueue._publishers(p_consumer.stream_id);  -- before the look
    end if;
    o_cursor := p_cursor;
    v_issued := least(pg_sequence_last_value(format('pgqueue.publication_%s', p_consumer.stream_id)::regclass), p_upto);
    v_look := pgqueue._look(p_consumer, p_cursor, p_upto, p_limit);
    v_taken := coalesce(v_look.o_taken, '{}');
    o_messages := v_look.o_messages;
    if v_taken <> '{}' then
        o_cursor.last_line_no := p_cursor.last_line_no + 1;
        o_cursor := pgqueue._lower_scan_from(
            o_cursor, array(select (l, o_cursor.last_line_no, 0)::pgqueue.line_place from unnest(v_look.o_lanes) l
                            where l <> all (array(select lane from unnest(p_cursor.scan_from)))));
        o_cursor.due_from := least(o_cursor.due_from, v_look.o_due);
        o_cursor.taken := o_cursor.taken + v_look.o_count;
    end if;
    o_cursor.take_was_cut := greatest(v_look.o_in_gaps, v_look.o_beyond) >= p_limit;

    if v_look.o_gaps is not null then
        o_cursor := pgqueue._shrink_gaps(o_cursor, v_look.o_gaps, v_taken, v_publishers,
                                         v_look.o_in_gaps >= p_limit or coalesce(p_upto < p_cursor.next_publication - 1, false));
    end if;
    if v_look.o_beyond > 0 then
        v_end := upper(v_taken) - 1;
    end if;
    -- Many ids in a row that are not visible: they are not walked over again by each claim
    if not o_cursor.take_was_cut and v_issued - coalesce(v_end, p_cursor.next_publication - 1) >= pgqueue._limit_unseen() then
        v_end := v_issued;
    end if;
    if v_end >= p_cursor.next_publication then
        o_cursor.next_publication := v_end + 1;
        if pgqueue._cardinality(v_taken * int8multirange(int8range(p_cursor.next_publication, v_end, '[]'))) <= v_end - p_cursor.next_publication then
            o_cursor := pgqueue._note_gap(o_cursor, int8multirange(int8range(p_cursor.next_publication, v_end, '[]')) - v_taken,
                                          pgqueue._publishers(p_consumer.stream_id), true);
        end if;
    end if;
    if cardinality(o_cursor.gaps) > pgqueue._limit_gaps() then
        o_cursor := pgqueue._merge_gaps(o_cursor);
    end if;
    if o_cursor.gaps <> '{}' then
        o_cursor.gaps_probe := clock_timestamp() + interval '10 ms';
    end if;
end $$;

-- Whether a consumer has something to take: what was published since it last did, or in its gaps.
--   p_far  also when it comes after many ids that are not visible
create or replace function pgqueue._has_new(p_stream_id int, p_cursor pgqueue.consumer_cursors, p_far boolean) returns boolean
language plpgsql stable
as $$
begin
    return p_cursor.gaps <> '{}' or p_cursor.sift_from is not null
        or exists (select from pgqueue.publications
                   where stream_id = p_stream_id and publication_id >= p_cursor.next_publication
                     and publication_id < p_cursor.next_publication + pgqueue._limit_unseen())
        or (p_far and pg_sequence_last_value(format('pgqueue.publication_%s', p_stream_id)::regclass) >= p_cursor.next_publication + pgqueue._limit_unseen());
end $$;
