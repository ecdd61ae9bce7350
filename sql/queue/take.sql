-- Taking: publications that are new for a consumer become its runs. New are the publications beyond the last one that
-- it took, and those that have appeared in its gaps (log/gaps.sql).

-- The next publications, if they are plain, as they nearly always are: at most p_limit, without a gap among their ids,
-- with the same priority, time, expiry and consumers, and with messages that are one range. A single publication in one
-- part is plain whatever its messages are.
--   p_first  the first part of the next publication
-- Returns the last publication, how many there are, and their messages; nulls when the publications are not plain.
create or replace function _pgqueue.next_plain(p_first pgqueue.publications, p_upto bigint, p_limit int,
                                               out o_last bigint, out o_count bigint, out o_message_count bigint,
                                               out o_seqs int8multirange)
language plpgsql
as $$
declare
    v_all record;
begin
    -- is there another publication, or another part of this one?
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
    select count(*) as count, max(publication_id) as last, sum(message_count)::bigint as message_count,
           min(lower(seqs)) as lo, max(upper(seqs)) as hi,
           bool_and(part = 0 and priority = p_first.priority and deliver_at is not distinct from p_first.deliver_at
                    and consumers is not distinct from p_first.consumers
                    and expires_at is not distinct from p_first.expires_at) as alike
    into v_all
    from pgqueue.publications
    where stream_id = p_first.stream_id and publication_id >= p_first.publication_id
      and publication_id < p_first.publication_id + p_limit
      and publication_id <= coalesce(p_upto, 9223372036854775807);
    if v_all.alike and v_all.last - p_first.publication_id + 1 = v_all.count
       and v_all.hi - v_all.lo = v_all.message_count then
        o_last := v_all.last;
        o_count := v_all.count;
        o_message_count := v_all.message_count;
        o_seqs := int8multirange(int8range(v_all.lo, v_all.hi));
    end if;
end $$;

-- Takes the next publications, if they are plain (next_plain()) and no gap is before them, and stores their messages as
-- one run, or as several runs that are alike. Returns the cursor, and how many messages became ready; with an ordering
-- these include messages whose deliver_at is to come, which look() does not count. The cursor is null when nothing was
-- taken: there is no next publication, or a gap is before it, or the next publications are not plain. Needs the
-- consumer's lock.
create or replace function _pgqueue.take_plain(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_upto bigint, p_limit int, out o_cursor pgqueue.consumer_cursors,
                                               out o_messages bigint)
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
    where stream_id = p_consumer.stream_id and publication_id = v_next and part = 0
      and v_next <= coalesce(p_upto, v_next);
    if not found then
        return;
    end if;
    v_plain := _pgqueue.next_plain(v_first, p_upto, p_limit);
    if v_plain.o_last is null then
        return;
    end if;
    -- publications that are visible further on have a gap before them, unless the limit cut them off
    if v_plain.o_count < p_limit and v_plain.o_last < coalesce(p_upto, 9223372036854775807) and exists (
        select from pgqueue.publications where stream_id = p_consumer.stream_id and publication_id >= v_next + p_limit
                                           and publication_id <= coalesce(p_upto, 9223372036854775807)) then
        return;
    end if;

    o_cursor := p_cursor;
    o_cursor.next_publication := v_plain.o_last + 1;
    o_cursor.last_line_no := p_cursor.last_line_no + 1;
    o_cursor.take_was_cut := v_plain.o_count = p_limit;
    if not _pgqueue.is_for(v_first.consumers, p_consumer.consumer_id) then
        return;
    end if;
    v_run.not_visible_until := case when v_first.deliver_at > clock_timestamp() then v_first.deliver_at end;
    v_run.consumer_id := p_consumer.consumer_id;
    v_run.state := case when _pgqueue.judges(p_consumer) then 'unfiltered'
                        when v_run.not_visible_until is not null and p_consumer.ordering = 'none' then 'delayed'
                        else 'ready' end;
    v_run.lane := case when _pgqueue.is_keyed(p_consumer.way) then 1 else -v_first.priority end;
    v_run.priority := v_first.priority;
    v_run.deliver_count := 0;
    v_run.arrival_no := o_cursor.last_line_no;
    v_run.line_no := o_cursor.last_line_no;
    v_run.note := case when v_first.expires_at is not null then _pgqueue.expiry(v_first.expires_at) end;
    o_cursor.taken := o_cursor.taken + _pgqueue.store_run(v_run, v_plain.o_seqs);
    if v_run.state = 'ready' then
        o_cursor := _pgqueue.lower_scan_from(o_cursor, array[(v_run.lane, v_run.line_no, 0)::pgqueue.line_place]);
        o_messages := v_plain.o_message_count;
    elsif v_run.state = 'delayed' then
        o_cursor.due_from := least(o_cursor.due_from, v_run.not_visible_until);
    end if;
end $$;

-- Whether new publications may wait while runs are ready: fewer than limit_waiting() are new, all ready runs are in one
-- lane, and no new publication is more urgent than that lane.
create or replace function _pgqueue.can_wait(p_stream_id int, p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
as $$
begin
    return cardinality(p_cursor.scan_from) = 1
       and (select count(*) < _pgqueue.limit_waiting() and max(priority) <= -(p_cursor.scan_from[1]).lane
            from (select priority from pgqueue.publications
                  where stream_id = p_stream_id and publication_id >= p_cursor.next_publication
                    and publication_id < p_cursor.next_publication + _pgqueue.limit_unseen()
                  order by publication_id limit _pgqueue.limit_waiting()) p);
end $$;

-- Looks for new publications, in the gaps and beyond, from the cursor's next_publication on, and stores their messages
-- as runs. Nearly always ids and seqs are contiguous. Then range_agg is left out: merging them one by one costs more
-- than all the rest. The statement reads which gaps to look into after its snapshot. Read before the snapshot, the list
-- could lack a gap whose producer commits just then. If that producer published once more and committed before the
-- snapshot, its later publication, beyond, would be taken, and its earlier one, in the gap, not yet. Returns the gaps
-- that it looked into (null: none), the publication ids that it took (null: none), how many parts of publications it
-- found in gaps and how many beyond, the lanes in which runs are ready now, when the first delayed run is due, how many
-- messages became ready, and how many became runs. (More than 60 lines: one statement, and so one snapshot.)
create or replace function _pgqueue.look(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_upto bigint,
                                         p_limit int, out o_gaps pgqueue.consumer_gaps[], out o_taken int8multirange,
                                         out o_in_gaps int, out o_beyond int, out o_lanes int[], out o_due timestamptz,
                                         out o_messages bigint, out o_count bigint)
language plpgsql
as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_line_no bigint := p_cursor.last_line_no + 1;
begin
    with gap as materialized (
        select g from unnest(_pgqueue.gaps_to_look_into(p_cursor, _pgqueue.publishers(p_consumer.stream_id))) g
        where p_cursor.gaps <> '{}'
    ), held as materialized (
        select true as in_gap, p.publication_id, p.part, p.message_count, p.seqs, p.priority, p.deliver_at, p.consumers,
               p.expires_at
        from gap
        cross join lateral unnest((gap.g).publication_ids) r
        cross join lateral (select * from pgqueue.publications
                            where stream_id = p_consumer.stream_id
                              and publication_id >= lower(r) and publication_id < upper(r)
                              and publication_id <= coalesce(p_upto, 9223372036854775807)
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
           and (select count(*) from held) < p_limit  -- otherwise what is left in the gaps comes first
         order by publication_id
         fetch first p_limit rows with ties)
    ), grouped as materialized (
        select priority, case when deliver_at > v_now then deliver_at end as due,
               _pgqueue.is_for(consumers, p_consumer.consumer_id) as mine, expires_at,
               count(*) filter (where in_gap) as in_gaps, count(*) filter (where not in_gap) as beyond,
               count(*) filter (where part = 0) as ids, min(publication_id) as id_lo, max(publication_id) as id_hi,
               sum(message_count) as message_count, min(lower(seqs)) as lo, max(upper(seqs)) as hi
        from new
        group by 1, 2, 3, 4
    ), id as materialized (
        select coalesce(sum(in_gaps), 0) as in_gaps, coalesce(sum(beyond), 0) as beyond, sum(ids) as ids,
               min(id_lo) as lo, max(id_hi) as hi
        from grouped
    ), merged as (
        select priority, due, expires_at, int8multirange(int8range(lo, hi)) as seqs
        from grouped
        where mine and not exists (select from grouped where mine and hi - lo <> message_count)
        union all
        select priority, case when deliver_at > v_now then deliver_at end, expires_at, range_agg(seqs)
        from new
        where exists (select from grouped where mine and hi - lo <> message_count)
          and _pgqueue.is_for(consumers, p_consumer.consumer_id)
        group by 1, 2, 3
    ), kept as (
        select coalesce(range_agg(k), '{}') as seqs from gap cross join lateral unnest((gap.g).kept) k
    ), run as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, not_visible_until, note)
        select p_consumer.consumer_id,
               case when _pgqueue.judges(p_consumer) then 'unfiltered'
                    when m.due is not null and p_consumer.ordering = 'none' then 'delayed' else 'ready' end,
               case when _pgqueue.is_keyed(p_consumer.way) then 1 else -m.priority end,
               m.priority, 0, v_line_no, v_line_no, c.first_seq, c.message_count, c.seqs, m.due,
               case when m.expires_at is not null then _pgqueue.expiry(m.expires_at) end
        from merged m cross join kept k cross join lateral _pgqueue.split_set(m.seqs - k.seqs) c
        returning state, lane, message_count, not_visible_until
    )
    select (select array_agg(gap.g) from gap),
           case when id.ids = id.hi - id.lo + 1 then int8multirange(int8range(id.lo, id.hi, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from new) end,
           id.in_gaps, id.beyond,
           (select array_agg(distinct lane) from run where state = 'ready'),
           (select min(not_visible_until) from run where state = 'delayed'),
           (select coalesce(sum(message_count), 0) from run where state = 'ready' and not_visible_until is null),
           (select coalesce(sum(message_count), 0) from run)
    into o_gaps, o_taken, o_in_gaps, o_beyond, o_lanes, o_due, o_messages, o_count
    from id;
end $$;

-- Stores new publications as runs: at most p_limit from gaps, and at most p_limit beyond. If a consumer has unfiltered
-- runs, the call filters some of these instead, and takes nothing.
--   p_upto  no publication after this one; null: all
-- Returns the cursor, which the caller stores, and how many messages became ready. Needs the consumer's lock.
create or replace function _pgqueue.take(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_upto bigint,
                                         p_limit int, out o_cursor pgqueue.consumer_cursors, out o_messages bigint)
language plpgsql
as $$
declare
    v_taken record;
begin
    if p_cursor.filter_from is null then
        v_taken := _pgqueue.take_runs(p_consumer, p_cursor, p_upto, p_limit);
        if _pgqueue.judges(p_consumer) and (v_taken.o_cursor).last_line_no > p_cursor.last_line_no then
            v_taken.o_cursor.filter_from := (v_taken.o_cursor).last_line_no;
            v_taken.o_cursor.take_was_cut := true;
        end if;
    else
        v_taken := _pgqueue.apply_filter(p_consumer, p_cursor);
    end if;
    o_cursor := v_taken.o_cursor;
    o_messages := v_taken.o_messages;
end $$;

-- Stores new publications as runs, see take(). (More than 60 lines: all steps use the result of one look.)
create or replace function _pgqueue.take_runs(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                              p_upto bigint, p_limit int, out o_cursor pgqueue.consumer_cursors,
                                              out o_messages bigint)
language plpgsql
as $$
declare
    v_publishers text[];
    v_issued     bigint;  -- publication ids up to this one were given out before the look
    v_look       record;
    v_plain      record;
    v_taken      int8multirange;
    v_end        bigint;  -- ids up to this one were looked at
begin
    if p_cursor.gaps = '{}' then
        v_plain := _pgqueue.take_plain(p_consumer, p_cursor, p_upto, p_limit);
        o_cursor := v_plain.o_cursor;
        o_messages := v_plain.o_messages;
        if o_cursor.consumer_id is not null then
            return;
        end if;
    else
        v_publishers := _pgqueue.publishers(p_consumer.stream_id);  -- before the look
    end if;
    o_cursor := p_cursor;
    v_issued := least(_pgqueue.last_publication_id(p_consumer.stream_id), p_upto);
    v_look := _pgqueue.look(p_consumer, p_cursor, p_upto, p_limit);
    v_taken := coalesce(v_look.o_taken, '{}');
    o_messages := v_look.o_messages;
    if v_taken <> '{}' then
        o_cursor.last_line_no := p_cursor.last_line_no + 1;
        o_cursor := _pgqueue.lower_scan_from(
            o_cursor, array(select (l, o_cursor.last_line_no, 0)::pgqueue.line_place from unnest(v_look.o_lanes) l
                            where l <> all (array(select lane from unnest(p_cursor.scan_from)))));
        o_cursor.due_from := least(o_cursor.due_from, v_look.o_due);
        o_cursor.taken := o_cursor.taken + v_look.o_count;
    end if;
    o_cursor.take_was_cut := greatest(v_look.o_in_gaps, v_look.o_beyond) >= p_limit;

    if v_look.o_gaps is not null then
        o_cursor := _pgqueue.shrink_gaps(o_cursor, v_look.o_gaps, v_taken, v_publishers,
                                         v_look.o_in_gaps >= p_limit
                                         or coalesce(p_upto < p_cursor.next_publication - 1, false));
    end if;
    if v_look.o_beyond > 0 then
        v_end := upper(v_taken) - 1;
    end if;
    -- many ids in a row that are not visible become a gap, so that not each claim walks over them again
    if not o_cursor.take_was_cut
       and v_issued - coalesce(v_end, p_cursor.next_publication - 1) >= _pgqueue.limit_unseen() then
        v_end := v_issued;
    end if;
    if v_end >= p_cursor.next_publication then
        o_cursor.next_publication := v_end + 1;
        if _pgqueue.cardinality(v_taken * int8multirange(int8range(p_cursor.next_publication, v_end, '[]')))
           <= v_end - p_cursor.next_publication then
            o_cursor := _pgqueue.note_gap(
                o_cursor, int8multirange(int8range(p_cursor.next_publication, v_end, '[]')) - v_taken,
                _pgqueue.publishers(p_consumer.stream_id), true);
        end if;
    end if;
    if cardinality(o_cursor.gaps) > _pgqueue.limit_gaps() then
        o_cursor := _pgqueue.merge_gaps(o_cursor);
    end if;
    if o_cursor.gaps <> '{}' then
        o_cursor.gaps_probe := clock_timestamp() + interval '10 ms';
    end if;
end $$;

-- Whether a take may find something: the consumer has gaps, or messages that are not filtered yet, or a publication
-- beyond the last one that it took.
--   p_far  true: look also beyond limit_unseen() ids that are not visible
-- Errors, where it looks far and finds nothing near: PQ011.
create or replace function _pgqueue.has_new(p_stream_id int, p_cursor pgqueue.consumer_cursors, p_far boolean)
returns boolean
language plpgsql stable
as $$
declare
    v_last bigint;
begin
    if p_cursor.gaps <> '{}' or p_cursor.filter_from is not null
       or exists (select from pgqueue.publications
                  where stream_id = p_stream_id and publication_id >= p_cursor.next_publication
                    and publication_id < p_cursor.next_publication + _pgqueue.limit_unseen()) then
        return true;
    elsif not p_far then
        return false;
    end if;
    v_last := coalesce(pg_sequence_last_value(format('pgqueue.publication_%s', p_stream_id)::regclass), 0);
    if v_last + 1 < p_cursor.next_publication then
        perform _pgqueue.refuse_to_look(p_stream_id);
    end if;
    return v_last >= p_cursor.next_publication + _pgqueue.limit_unseen();
end $$;
