-- Moving consumers, and holding them.

-- Moves a consumer to a position, as if it were created there: what it has taken and not finished it forgets, and its claims end.
-- Owners are told when they come back; a Spark query at it fails tasks that read (PQ012), and goes on from there. Dead letters stay dead.
--   p_to  earliest, latest, a timestamp, seq and a number, or an offset: as p_start of create_consumer
-- Returns how many messages it forgot: those it had taken and not finished, which come again only where they are after the position,
-- and those it skips; of very many publications that it skips, about.
-- Errors: PQ001, PQ002, PQ003, PQ007; PQ005 for an offset of something else; 55P03 when a transaction that holds some of it stays open for 10 s.
-- Locks, to the end of the transaction: the history, shared; the consumer, its claims and its runs.
create or replace function pgqueue.seek(p_stream text, p_consumer text, p_to text) returns bigint
language plpgsql
as $$
begin
    return pgqueue._seek(pgqueue._consumer(p_stream, p_consumer), p_to, 'p_to');
end $$;

-- The same for a consumer that is known.
--   p_argument  what the caller calls p_to
create or replace function pgqueue._seek(p_consumer pgqueue.consumers, p_to text, p_argument text) returns bigint
language plpgsql
as $$
declare
    v_seen  record;
    v_until timestamptz := clock_timestamp() + interval '10 s';
begin
    perform pgqueue._check_isolation();
    v_seen := pgqueue._seen_from(p_consumer.stream_id, p_to, p_argument);
    loop
        begin
            return pgqueue._move(p_consumer, v_seen.o_seen, v_seen.o_next, v_seen.o_publishers, v_seen.o_cut);
        exception when lock_not_available or deadlock_detected then
            -- a claimer may hold what this needs, and need the lock that this had: it is let go here
            if clock_timestamp() > v_until then
                raise;
            end if;
        end;
    end loop;
end $$;

-- One try to move a consumer; see seek, and for what is given _seen_from.
create or replace function pgqueue._move(p_consumer pgqueue.consumers, p_seen int8multirange, p_next bigint, p_publishers text[], p_cut int8multirange)
returns bigint
language plpgsql
set lock_timeout = '300ms'
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_new    int8multirange;  -- the publications that it had not taken
    v_count  bigint;
    v_dead   int8multirange;
    v_next   bigint := p_next;
    v_who    text[] := p_publishers;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_class_consumer(), p_consumer.consumer_id);
    v_stored := pgqueue._cursor(p_consumer.consumer_id);
    v_count := pgqueue._forget_runs(p_consumer.consumer_id);
    v_cursor.taken := v_stored.taken;
    v_cursor.forgotten := v_stored.forgotten + v_count;
    v_new := pgqueue._gap_ids(v_stored) + int8multirange(int8range(v_stored.next_publication, null));
    v_count := v_count + pgqueue._messages_in(p_consumer, p_seen * v_new, pgqueue._kept(v_stored), pgqueue._max_under_way())
        + coalesce((select sum(pgqueue._cardinality(p.seqs * p_cut - coalesce(pgqueue._kept(v_stored), '{}')))
                    from unnest((int8multirange(int8range(1, p_next)) - p_seen) * v_new) g
                    cross join lateral (select seqs from pgqueue.publications
                                        where stream_id = p_consumer.stream_id and publication_id >= lower(g) and publication_id < upper(g)
                                          and seqs && p_cut and pgqueue._is_for(consumers, p_consumer.consumer_id)) p
                    where p_cut is not null), 0);
    delete from pgqueue.consumer_gaps where consumer_id = p_consumer.consumer_id;
    v_dead := (select range_agg(seqs) from pgqueue.dead_messages where consumer_id = p_consumer.consumer_id);
    v_cursor.consumer_id := p_consumer.consumer_id;
    v_cursor.version := v_stored.version;
    v_cursor.gaps := '{}';
    v_cursor.take_was_cut := false;
    v_cursor.last_line_no := v_stored.last_line_no;
    v_cursor.scan_from := '{}';
    v_cursor.due_from := '-infinity';
    v_cursor.lease_probe := '-infinity';
    v_cursor.leases_from := '-infinity';
    v_cursor.gaps_probe := '-infinity';
    v_cursor.pieces_from := 0;
    v_cursor.dealt_until := '-infinity';
    v_cursor.delivered := v_stored.delivered;
    v_cursor.delivered_at := v_stored.delivered_at;
    -- what is kept of it is kept in a gap: so all that it took before is one, where something of it is dead
    if v_dead is not null and v_stored.next_publication > p_next then
        v_next := v_stored.next_publication;
        v_who := pgqueue._publishers(p_consumer.stream_id);  -- taken since the position was told, so there are others
    end if;
    v_cursor := pgqueue._cursor_from(v_cursor, p_seen, v_next, v_who, coalesce(v_dead + p_cut, v_dead, p_cut));
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    perform pgqueue._enter_keys(p_consumer);
    return v_count;
end $$;

-- Ends all claims of a consumer and deletes its runs, but no gates: what was delivered lately of a key counts on. A reader's claims are kept, as ones
-- that it lost and cannot have back.
-- Returns how many messages that were. Needs the consumer's lock. Locks the claims and runs, and waits for whoever has them.
create or replace function pgqueue._forget_runs(p_consumer_id int) returns bigint
language plpgsql
as $$
declare
    v_gone  bigint;
    v_count bigint := 0;
begin
    loop  -- claims without that lock may be under way, and leave claims and pieces of runs
        with gone as (
            delete from pgqueue.consumer_messages where consumer_id = p_consumer_id and message_count > 0 returning message_count
        )
        select coalesce(sum(message_count), 0) into v_gone from gone;
        v_count := v_count + v_gone;
        delete from pgqueue.claims where consumer_id = p_consumer_id and reader is null;
        update pgqueue.claims set live = false, remaining = 0, lanes = '{}' where consumer_id = p_consumer_id and (live or lanes <> '{}');
        exit when not exists (select from pgqueue.consumer_messages where consumer_id = p_consumer_id and message_count > 0);
    end loop;
    delete from pgqueue.pieces where consumer_id = p_consumer_id;
    return v_count;
end $$;

-- Delivers messages once more: those between two positions that the consumer has finished or skipped arrive again, at the end of its line. What
-- it has in hand, or has not taken yet, comes as it would; dead letters stay dead.
--   p_from  from this position on, see seek
--   p_to    up to that one, and without what is after it
-- Returns how many messages these are; of very many publications, about.
-- Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007. Locks: the history, shared; then the consumer.
create or replace function pgqueue.replay(p_stream text, p_consumer text, p_from text, p_to text default 'latest') returns bigint
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := pgqueue._consumer(p_stream, p_consumer);
    v_from     record;
    v_to       record;
    v_from_ids int8multirange;  -- the publications that are cut
    v_to_ids   int8multirange;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_less     record;
    v_ids      int8multirange;
    v_kept     int8multirange;
begin
    if v_consumer.partitions is not null then
        -- a message of its line is done for the one partition that has it, and nobody knows here which that is
        raise exception '% is a group, which replays nothing', quote_literal(p_consumer)
            using errcode = 'PQ006', hint = 'Call reset_group: all partitions go on from a position.';
    end if;
    perform pgqueue._check_isolation();
    v_from := pgqueue._seen_from(v_consumer.stream_id, p_from, 'p_from');
    v_to := pgqueue._seen_from(v_consumer.stream_id, p_to, 'p_to');
    v_from_ids := pgqueue._cut_ids(v_consumer.stream_id, int8multirange(int8range(1, v_from.o_next)) - v_from.o_seen, v_from.o_cut);
    v_to_ids := pgqueue._cut_ids(v_consumer.stream_id, int8multirange(int8range(1, v_to.o_next)) - v_to.o_seen, v_to.o_cut);
    v_ids := (v_to.o_seen + v_to_ids) - v_from.o_seen;
    perform pgqueue._lock_consumer(v_consumer.consumer_id);
    v_stored := pgqueue._cursor(v_consumer.consumer_id);
    v_kept := coalesce((select range_agg(seqs) from (select seqs from pgqueue.consumer_messages where consumer_id = v_consumer.consumer_id
                                                     union all
                                                     select seqs from pgqueue.dead_messages where consumer_id = v_consumer.consumer_id) m), '{}');
    v_less := pgqueue._keep_less(v_consumer, v_stored, v_ids,
                                 v_kept + pgqueue._cut_off(v_consumer.stream_id, v_ids, v_from_ids, v_from.o_cut, v_to_ids, v_to.o_cut));
    v_cursor := v_less.p_cursor;
    v_ids := v_ids * int8multirange(int8range(1, v_stored.next_publication)) - pgqueue._gap_ids(v_cursor);
    -- what is kept holds for all gaps: so nothing of a publication that is in another one
    v_kept := v_kept + pgqueue._cut_off(v_consumer.stream_id, v_ids, v_from_ids, v_from.o_cut, v_to_ids, v_to.o_cut);
    if v_ids <> '{}' then
        v_cursor := pgqueue._note_gap(v_cursor, v_ids, '{}', true, v_kept);
    end if;
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    perform pgqueue._enter_keys(v_consumer);
    return v_less.o_count + pgqueue._messages_in(v_consumer, v_ids, v_kept, pgqueue._max_under_way());
end $$;

-- The publications that a position cuts.
--   p_ids  among these
--   p_cut  messages that are before the position; null: none
create or replace function pgqueue._cut_ids(p_stream_id int, p_ids int8multirange, p_cut int8multirange) returns int8multirange
language sql stable
as $$
    select coalesce(range_agg(int8range(p.publication_id, p.publication_id, '[]')), '{}')
    from unnest(p_ids) g
    cross join lateral (select publication_id, seqs from pgqueue.publications
                        where stream_id = p_stream_id and publication_id >= lower(g) and publication_id < upper(g)) p
    where p_cut is not null and p.seqs && p_cut
$$;

-- What publications have before one position, which cuts some, and from another one on, which cuts others.
create or replace function pgqueue._cut_off(p_stream_id int, p_ids int8multirange, p_from_ids int8multirange, p_from_cut int8multirange,
                                            p_to_ids int8multirange, p_to_cut int8multirange) returns int8multirange
language sql stable
as $$
    select coalesce(range_agg(p.seqs) filter (where p_from_ids @> p.publication_id) * p_from_cut, '{}')
         + coalesce(range_agg(p.seqs) filter (where p_to_ids @> p.publication_id) - p_to_cut, '{}')
    from unnest(p_ids * (p_from_ids + p_to_ids)) g
    cross join lateral (select publication_id, seqs from pgqueue.publications
                        where stream_id = p_stream_id and publication_id >= lower(g) and publication_id < upper(g)) p
$$;

-- What gaps keep because the consumer had it in hand when they were made, and it has finished since, and what is asked for again now: it arrives.
--   p_ids   the publications that are asked for
--   p_kept  what the consumer has in hand now
-- Returns the cursor, and how many of these messages are of publications that are in those gaps.
create or replace function pgqueue._keep_less(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors, p_ids int8multirange,
                                              p_kept int8multirange, out o_count bigint)
language plpgsql
as $$
declare
    v_gap  pgqueue.consumer_gaps;
    v_seqs record;
begin
    o_count := 0;
    for v_gap in
        select * from pgqueue.consumer_gaps
        where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps) and not kept <@ p_kept
    loop
        select coalesce(range_agg(p.seqs), '{}') * (v_gap.kept - p_kept) as again,
               coalesce(range_agg(p.seqs) filter (where v_gap.publication_ids @> p.publication_id), '{}') * (v_gap.kept - p_kept) as here
        into v_seqs
        from unnest(p_ids) g
        cross join lateral (select publication_id, seqs from pgqueue.publications
                            where stream_id = p_consumer.stream_id and publication_id >= lower(g) and publication_id < upper(g)
                              and seqs && (v_gap.kept - p_kept) and pgqueue._is_for(consumers, p_consumer.consumer_id)) p;
        continue when v_seqs.again = '{}';
        p_cursor := pgqueue._forget_gap(p_cursor, v_gap.gap_no);
        p_cursor := pgqueue._note_gap(p_cursor, v_gap.publication_ids, v_gap.publishers, v_gap.look, v_gap.kept - v_seqs.again);
        o_count := o_count + pgqueue._cardinality(v_seqs.here);
    end loop;
end $$;

-- Lets a consumer claim nothing from now on, until it is resumed. What is claimed stays so, and is settled as ever; what is published waits.
-- A claim that is under way may still get something. Safe to repeat.
-- Errors: PQ001, PQ002. Locks: none that others wait for.
create or replace function pgqueue.pause(p_stream text, p_consumer text) returns void
language plpgsql
as $$
begin
    update pgqueue.consumers set paused = true where consumer_id = (pgqueue._consumer(p_stream, p_consumer)).consumer_id and not paused;
end $$;

-- Lets a paused consumer claim again. Safe to repeat; who waits for messages is woken up. Errors: PQ001, PQ002. Locks: none that others wait for.
create or replace function pgqueue.resume(p_stream text, p_consumer text) returns void
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := pgqueue._consumer(p_stream, p_consumer);
begin
    update pgqueue.consumers set paused = false where consumer_id = v_consumer.consumer_id and paused;
    perform pg_notify(pgqueue._channel(v_consumer.stream_id), '');
end $$;
