-- Taking: new publications become bundles of a consumer. New are publications beyond the last one that it took, those
-- that have become visible in its gaps (log/gaps.sql), and those that claims ahead of the cursor left.

-- The next publications, if no gap is before them and they are plain, as nearly always: at most p_limit, without a gap
-- between their ids, with the same priority, time, expiry and consumers, and with messages in one range. A single
-- publication in one part is always plain. Returns the first publication, the id of the last, how many there are, and
-- their messages; nulls if there is none or they are not plain.
create or replace function _pgqueue.next_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_upto bigint, p_limit int, out o_first pgqueue.publications,
                                             out o_last bigint, out o_count bigint, out o_message_count bigint,
                                             out o_seqs int8multirange)
language plpgsql as $$
declare
    v_next  bigint := p_cursor.next_publication;
    v_upto  bigint := coalesce(p_upto, 9223372036854775807);
    v_other bigint;
    v_all   record;
begin
    if p_cursor.gaps <> '{}' then
        return;
    end if;
    select * into o_first from pgqueue.publications
    where stream_id = p_consumer.stream_id and publication_id = v_next and part = 0 and v_next <= v_upto;
    if not found then
        return;
    end if;
    -- another publication, or another part of the first
    v_other := (select publication_id from pgqueue.publications
                where stream_id = p_consumer.stream_id and (publication_id, part) > (v_next, 0)
                  and publication_id <= v_upto
                order by publication_id, part limit 1);
    if v_other is null then
        o_last := v_next;
        o_count := 1;
        o_message_count := o_first.message_count;
        o_seqs := o_first.seqs;
    elsif v_other < v_next + p_limit then
        select count(*) as count, max(publication_id) as last, sum(message_count)::bigint as message_count,
               min(lower(seqs)) as lo, max(upper(seqs)) as hi,
               bool_and(part = 0 and priority = o_first.priority and deliver_at is not distinct from o_first.deliver_at
                        and consumers is not distinct from o_first.consumers
                        and expires_at is not distinct from o_first.expires_at) as alike
        into v_all
        from pgqueue.publications
        where stream_id = p_consumer.stream_id and publication_id >= v_next
          and publication_id < v_next + p_limit and publication_id <= v_upto;
        -- visible publications further on have a gap before them, unless the limit excluded them
        if v_all.alike and v_all.last - v_next + 1 = v_all.count and v_all.hi - v_all.lo = v_all.message_count
           and (v_all.count = p_limit or v_all.last = v_upto or not exists (
                    select from pgqueue.publications
                    where stream_id = p_consumer.stream_id and publication_id >= v_next + p_limit
                      and publication_id <= v_upto)) then
            o_last := v_all.last;
            o_count := v_all.count;
            o_message_count := v_all.message_count;
            o_seqs := int8multirange(int8range(v_all.lo, v_all.hi));
        end if;
    end if;
end $$;

-- Takes the next publications, if they are plain and no gap is before them, and stores their messages as one bundle, or
-- as several alike. Returns the cursor, null if nothing was taken, and how many messages became ready. Needs the
-- consumer's lock.
create or replace function _pgqueue.take_plain(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_upto bigint, p_limit int, out o_cursor pgqueue.consumer_cursors,
                                               out o_messages bigint)
language plpgsql as $$
declare
    v_new    record := _pgqueue.next_new(p_consumer, p_cursor, p_upto, p_limit);
    v_first  pgqueue.publications := v_new.o_first;
    v_hints  pgqueue.claim_hints := p_cursor.hints;
    v_bundle pgqueue.consumer_messages;
begin
    o_messages := 0;
    if v_new.o_last is null then
        return;
    end if;
    o_cursor := p_cursor;
    o_cursor.next_publication := v_new.o_last + 1;
    v_hints.was_cut := v_new.o_count = p_limit;
    if _pgqueue.is_for(v_first.consumers, p_consumer.consumer_id) then
        o_cursor.last_arrival := p_cursor.last_arrival + 1;
        o_cursor.taken := o_cursor.taken + v_new.o_message_count;
        v_bundle := _pgqueue.taken_bundle(p_consumer, o_cursor.last_arrival, v_first.priority, v_first.deliver_at,
                                          v_first.expires_at, v_new.o_seqs);
        v_hints := _pgqueue.store_placed(v_hints, v_bundle, v_new.o_seqs);
        if v_bundle.lane < _pgqueue.lane_delayed() and v_bundle.not_visible_until is null then
            o_messages := v_new.o_message_count;
        end if;
    end if;
    o_cursor.hints := v_hints;
end $$;

-- Reads new publications, in the gaps and from the cursor's next_publication on. Nearly always, ids and numbers are
-- contiguous. Then range_agg is avoided, which costs more than all the rest. The statement reads which gaps to read
-- after its snapshot. If it read the list before, the list could lack a gap whose producer commits just then. If that
-- producer had published once more and committed before the snapshot, its later publication, beyond, would be taken
-- before its earlier one, in the gap.
--
-- Returns the gaps that were read (null: none), the publication ids that were found (null: none), how many parts of
-- publications were in gaps and how many beyond, and their messages for this consumer as sets that are alike. By key,
-- the sets are in the order of the stream. (More than 60 lines: one statement, and so one snapshot.)
create or replace function _pgqueue.read_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_upto bigint, p_limit int, out o_gaps pgqueue.consumer_gaps[],
                                             out o_taken int8multirange, out o_in_gaps int, out o_beyond int,
                                             out o_priorities int[], out o_dues timestamptz[],
                                             out o_expiries timestamptz[], out o_seqs int8multirange[])
language plpgsql as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_keyed boolean := _pgqueue.is_keyed(p_consumer.profile);
begin
    with gap as materialized (
        select g from pgqueue.consumer_gaps g
        where p_cursor.gaps <> '{}' and consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps)
          and (look or not publishers <@ (select _pgqueue.publishers(p_consumer.stream_id)))
    ), from_gaps as materialized (
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
        select * from from_gaps
        union all
        (select false, publication_id, part, message_count, seqs, priority, deliver_at, consumers, expires_at
         from pgqueue.publications
         where stream_id = p_consumer.stream_id
           and publication_id >= p_cursor.next_publication and publication_id <= coalesce(p_upto, 9223372036854775807)
           and (select count(*) from from_gaps) < p_limit  -- otherwise the rest of the gaps comes first
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
    ), alike as (
        select priority, due, expires_at, int8multirange(int8range(lo, hi)) as seqs, id_lo as first
        from grouped
        where mine and (select count(*) = 1 or not v_keyed from grouped where mine)
          and not exists (select from grouped where mine and hi - lo <> message_count)
        union all
        select priority, due, expires_at, range_agg(g), min(i)
        from (select *, case when v_keyed then i - row_number() over (partition by priority, due, expires_at order by i)
                        end as island
              from (select priority, case when deliver_at > v_now then deliver_at end as due, expires_at, g,
                           -- (the parts of a publication may interleave, as with rows of a sink that have priorities)
                           row_number() over (order by publication_id, lower(g)) as i
                    from new cross join lateral unnest(seqs) g
                    where _pgqueue.is_for(consumers, p_consumer.consumer_id)) m) n
        where exists (select from grouped where mine and hi - lo <> message_count)
           or (select count(*) > 1 and v_keyed from grouped where mine)
        group by priority, due, expires_at, island
    ), excluded as (
        select coalesce(range_agg(k), '{}') as seqs from gap cross join lateral unnest((gap.g).excluded) k
    )
    select (select array_agg(gap.g) from gap),
           case when id.ids = id.hi - id.lo + 1 then int8multirange(int8range(id.lo, id.hi, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from new) end,
           id.in_gaps, id.beyond, a.*
    into o_gaps, o_taken, o_in_gaps, o_beyond, o_priorities, o_dues, o_expiries, o_seqs
    from id cross join (select array_agg(priority order by first), array_agg(due order by first),
                               array_agg(expires_at order by first),
                               array_agg(_pgqueue.less(alike.seqs, excluded.seqs) order by first)
                        from alike cross join excluded) a;
end $$;

-- Takes new publications, at most p_limit from gaps and at most p_limit beyond, as bundles. If the consumer has
-- unfiltered bundles, filters some of these instead, and takes nothing.
--   p_upto  no publication after this one; null: all
-- Returns the cursor, which the caller stores, and how many messages became ready. Needs the consumer's lock, and
-- catch_up().
create or replace function _pgqueue.take_alone(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_upto bigint, p_limit int, out o_cursor pgqueue.consumer_cursors,
                                               out o_messages bigint)
language plpgsql as $$
declare
    v_taken record;
begin
    if (p_cursor.hints).filter_from is null then
        v_taken := _pgqueue.take_plain(p_consumer, p_cursor, p_upto, p_limit);
        if (v_taken.o_cursor).consumer_id is null then
            v_taken := _pgqueue.take_all(p_consumer, p_cursor, p_upto, p_limit);
        end if;
    else
        v_taken := _pgqueue.apply_filter(p_consumer, p_cursor);
    end if;
    o_cursor := v_taken.o_cursor;
    o_messages := v_taken.o_messages;
end $$;

-- Takes new publications as take_alone() does, after catch_up().
create or replace function _pgqueue.take(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_upto bigint,
                                         p_limit int, out o_cursor pgqueue.consumer_cursors, out o_messages bigint)
language plpgsql as $$
declare
    v_ready record := _pgqueue.catch_up(p_consumer, p_cursor, p_upto);
    v_taken record := _pgqueue.take_alone(p_consumer, v_ready.p_cursor, v_ready.p_upto, p_limit);
begin
    o_cursor := v_taken.o_cursor;
    o_messages := v_taken.o_messages;
end $$;

-- Takes new publications that take_plain() cannot. (More than 60 lines: all steps use the result of one read.)
create or replace function _pgqueue.take_all(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_upto bigint, p_limit int, out o_cursor pgqueue.consumer_cursors,
                                             out o_messages bigint)
language plpgsql as $$
declare
    v_publishers text[];
    v_issued     bigint;  -- publication ids up to this one were assigned before the read
    v_new        record;
    v_taken      int8multirange;
    v_end        bigint;  -- ids up to this one were read
    v_hints      pgqueue.claim_hints := p_cursor.hints;
    v_bundles    pgqueue.consumer_messages[];
begin
    if p_cursor.gaps <> '{}' then
        v_publishers := _pgqueue.publishers(p_consumer.stream_id);  -- before the read
    end if;
    o_cursor := p_cursor;
    o_messages := 0;
    v_issued := least(_pgqueue.last_publication_id(p_consumer.stream_id), p_upto);
    v_new := _pgqueue.read_new(p_consumer, p_cursor, p_upto, p_limit);
    v_taken := coalesce(v_new.o_taken, '{}');
    v_hints.was_cut := greatest(v_new.o_in_gaps, v_new.o_beyond) >= p_limit;
    v_bundles := array(
        select _pgqueue.taken_bundle(
            p_consumer, p_cursor.last_arrival + case when _pgqueue.is_keyed(p_consumer.profile) then i else 1 end,
            priority, due, expires_at, seqs)
        from (select *, row_number() over () as i
              from unnest(v_new.o_priorities, v_new.o_dues, v_new.o_expiries, v_new.o_seqs)
                   n (priority, due, expires_at, seqs) where seqs <> '{}') n);
    if v_bundles <> '{}' then
        v_hints := _pgqueue.store_all_placed(v_hints, v_bundles);
        select max(b.arrival_no), o_cursor.taken + sum(_pgqueue.cardinality(b.seqs)),
               coalesce(sum(_pgqueue.cardinality(b.seqs))
                        filter (where b.lane < _pgqueue.lane_delayed() and b.not_visible_until is null), 0)
        into o_cursor.last_arrival, o_cursor.taken, o_messages
        from unnest(v_bundles) b;
    end if;

    if v_new.o_gaps is not null then
        o_cursor := _pgqueue.shrink_gaps(o_cursor, v_new.o_gaps, v_taken, v_publishers,
                                         v_new.o_in_gaps >= p_limit
                                         or coalesce(p_upto < p_cursor.next_publication - 1, false));
    end if;
    if v_new.o_beyond > 0 then
        v_end := upper(v_taken) - 1;
    end if;
    -- many invisible ids in a row become a gap, so that later claims do not read them again
    if not v_hints.was_cut
       and v_issued - coalesce(v_end, p_cursor.next_publication - 1) >= _pgqueue.limit_unseen() then
        v_end := v_issued;
    end if;
    if v_end >= p_cursor.next_publication then
        o_cursor.next_publication := v_end + 1;
        if _pgqueue.cardinality(v_taken * int8multirange(int8range(p_cursor.next_publication, v_end, '[]')))
           <= v_end - p_cursor.next_publication then
            o_cursor := _pgqueue.record_gap(
                o_cursor, int8multirange(int8range(p_cursor.next_publication, v_end, '[]')) - v_taken,
                _pgqueue.publishers(p_consumer.stream_id), true);
        end if;
    end if;
    if cardinality(o_cursor.gaps) > _pgqueue.limit_gaps() then
        o_cursor := _pgqueue.merge_gaps(o_cursor);
    end if;
    if o_cursor.gaps <> '{}' then
        v_hints.gaps_probe := clock_timestamp() + interval '10 ms';
    end if;
    o_cursor.hints := v_hints;
end $$;

-- Whether a take may find something: the consumer has gaps, unfiltered messages, or a publication beyond the last one
-- that it took.
--   p_far  true: read also beyond limit_unseen() ids that are not visible
-- Errors, with p_far: PQ011.
create or replace function _pgqueue.has_new(p_stream_id int, p_cursor pgqueue.consumer_cursors, p_far boolean)
returns boolean language plpgsql stable as $$
declare
    v_next bigint := p_cursor.next_publication;
    v_last bigint := case when p_far then _pgqueue.last_publication_id(p_stream_id) end;
begin
    if p_cursor.gaps <> '{}' or (p_cursor.hints).filter_from is not null then
        return true;
    elsif v_last < v_next then
        perform _pgqueue.refuse_behind('stream ' || quote_literal(name))
        from pgqueue.streams where stream_id = p_stream_id and v_last < v_next - 1;
        return false;
    end if;
    return exists (select from pgqueue.publications
                   where stream_id = p_stream_id and publication_id >= v_next
                     and publication_id < v_next + _pgqueue.limit_unseen())
        or (p_far and v_last >= v_next + _pgqueue.limit_unseen());
end $$;
