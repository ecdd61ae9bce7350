-- Positions: places in a stream at which a consumer or a reader begins.
--
--   earliest         before all that the stream has
--   latest           after all that was visible at some moment of the call
--   a timestamp      after what was begun to be published before it
--   seq N            after the messages with lower numbers; a publication that has both is cut
--   an offset        after what it has read: its JSON, see core/offsets.sql
--
-- What is not visible yet counts as later, wherever one begins: its transaction is running. So a position is a set of publication ids,
-- and what of it is cut; _cursor_from makes a consumer's cursor of it.
--
-- The history is not read. Publication ids are given out in the order in which publishing begins, and the time is noted right afterwards,
-- so a time is found by halves: in publications, because "since" asks what became visible, and a sink writes messages long before. What is not
-- visible below an id is known from the publish lock (core/gaps.sql): nothing, when nobody has it who had it before; or what no consumer took; and
-- from what maintain() noted (_note_decided).

-- Publications that may be under way at once: that have numbers of messages, and no publication id yet. So further apart than that,
-- publications stand in the order of their numbers, but for what a sink wrote long before it published it.
create or replace function pgqueue._max_under_way() returns int language sql immutable parallel safe as 'select 10000';

-- What a position says: a time, infinite for earliest and latest, or a number. Errors: PQ003.
--   p_argument  its name
create or replace function pgqueue._position(p_stream_id int, p_position text, p_argument text, out o_time timestamptz, out o_seq bigint)
language plpgsql stable
as $$
declare
    v_next  bigint := pgqueue._last_seq(p_stream_id) + 1;
    v_first bigint;
begin
    o_seq := substring(p_position from '^seq +([0-9]{1,18})$')::bigint;
    if o_seq is null then
        begin
            o_time := case p_position when 'earliest' then '-infinity' when 'latest' then 'infinity' else p_position::timestamptz end;
        exception when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
            null;
        end;
        if o_time is null then
            raise exception '% is earliest, latest, a timestamp, seq and a number, or an offset, not %', p_argument, coalesce(quote_literal(left(p_position, 100)), 'null')
                using errcode = 'PQ003', column = p_argument;
        end if;
        return;
    end if;
    execute format('select min(seq) from pgqueue.messages_%s', p_stream_id) into v_first;
    if o_seq not between coalesce(v_first, 1) and v_next then
        raise exception '%, as a number, is seq % to seq %, the first message that there is to the next one, not %', p_argument, coalesce(v_first, 1), v_next,
                        quote_literal(p_position)
            using errcode = 'PQ003', column = p_argument, hint = 'For all that there is, say earliest.';
    end if;
end $$;

-- What is before a position.
--   p_argument  what the caller calls p_position, for errors
-- Returns, of one moment (READ COMMITTED: of some moment of the call; else of the caller's snapshot):
--   o_seen        the publication ids that count as seen: visible ones and dead ones
--   o_next        all ids from here on are after the position. What is missing in o_seen below it is after it too, or not visible yet
--   o_publishers  the transactions that may still publish what is missing
--   o_cut         messages that count as seen, of publications that do not: what else these have is after the position. Null: none
-- Errors: PQ003; PQ005 for an offset of something else. Locks: the history (see _lock_history), which the caller holds for as long as it relies on it.
create or replace function pgqueue._seen_from(p_stream_id int, p_position text, p_argument text,
                                              out o_seen int8multirange, out o_next bigint, out o_publishers text[], out o_cut int8multirange)
language plpgsql
as $$
declare
    v_trimmed int8multirange;
begin
    perform pgqueue._lock_history(p_stream_id);
    if p_position ~ '^\s*{' then
        select s.* into o_seen, o_next, o_publishers, o_cut from pgqueue._seen_by(p_stream_id, p_position, p_argument) s;
    else
        select s.* into o_seen, o_next, o_publishers, o_cut from pgqueue._seen_at(p_stream_id, p_position, p_argument) s;
    end if;
    -- what was trimmed is missing, and neither under way nor dead: wherever one begins it is before
    v_trimmed := (pgqueue._trimmed(p_stream_id)).o_publications - o_seen;
    if v_trimmed <> '{}' then
        o_seen := o_seen + v_trimmed;
        if upper(o_seen) > o_next then
            o_next := upper(o_seen);
            o_publishers := pgqueue._publishers(p_stream_id);
        end if;
    end if;
end $$;

-- The same for a position that is no offset, whatever was trimmed. Needs the history's lock.
-- (Longer than 60 lines: each kind of position corrects what the one before it said, in this order.)
create or replace function pgqueue._seen_at(p_stream_id int, p_position text, p_argument text,
                                            out o_seen int8multirange, out o_next bigint, out o_publishers text[], out o_cut int8multirange)
language plpgsql
as $$
declare
    v_position record;
    v_below    bigint;  -- ids below are before it, if they are visible
    v_cut      record;
    v_near     record;
begin
    v_position := pgqueue._position(p_stream_id, p_position, p_argument);
    if v_position.o_time = '-infinity' then
        v_below := 1;
    elsif v_position.o_time = 'infinity' then
        v_below := null;
    else
        v_below := pgqueue._below_position(p_stream_id, v_position.o_time, v_position.o_seq);
    end if;
    select d.o_seen, d.o_publishers into o_seen, o_publishers from pgqueue._decided(p_stream_id, v_below) d;
    o_next := coalesce(upper(o_seen), 1);
    if v_position.o_seq is not null then
        -- the numbers around it
        select range_agg(int8range(n.publication_id, n.publication_id, '[]')) filter (where p.last < v_position.o_seq) as seen,
               range_agg(pgqueue._below(p.seqs, v_position.o_seq)) filter (where p.last >= v_position.o_seq) as cut,
               max(n.publication_id) as last
        into v_cut
        from (select distinct publication_id
              from (select publication_id, seqs from pgqueue.publications
                    where stream_id = p_stream_id and publication_id >= v_below
                    order by publication_id limit pgqueue._max_under_way()) near
              where lower(seqs) < v_position.o_seq) n
        cross join lateral (select range_agg(seqs) as seqs, max(upper(seqs)) - 1 as last from pgqueue.publications
                            where stream_id = p_stream_id and publication_id = n.publication_id) p;
        o_seen := o_seen + coalesce(v_cut.seen, '{}');
        o_next := greatest(v_below, v_cut.last + 1);
        o_cut := v_cut.cut;
        if o_next > v_below then
            o_publishers := pgqueue._publishers(p_stream_id);  -- after the look
        end if;
    end if;
    if isfinite(v_position.o_time) then
        -- some overtook others: each by its own time
        select coalesce(range_agg(int8range(publication_id, publication_id, '[]')) filter (where published_at < v_position.o_time), '{}') as before,
               coalesce(range_agg(int8range(publication_id, publication_id, '[]')) filter (where published_at >= v_position.o_time), '{}') as since,
               max(publication_id) filter (where published_at < v_position.o_time) as last
        into v_near
        from (select publication_id, max(published_at) as published_at
              from ((select publication_id, published_at from pgqueue.publications where stream_id = p_stream_id and publication_id < v_below
                     order by publication_id desc fetch first 1000 rows with ties)
                    union all
                    (select publication_id, published_at from pgqueue.publications where stream_id = p_stream_id and publication_id >= v_below
                     order by publication_id fetch first 1000 rows with ties)) n
              group by publication_id) p;
        o_seen := o_seen + v_near.before - v_near.since;
        if v_near.last >= o_next then
            o_next := v_near.last + 1;
            o_publishers := pgqueue._publishers(p_stream_id);  -- after the look
        end if;
    end if;
end $$;

-- Ids below it are of publications that were noted before a time, or have lower numbers only; found by halves. That is not exact about some
-- that were under way at once: for these the caller looks at what is near.
create or replace function pgqueue._below_position(p_stream_id int, p_time timestamptz, p_seq bigint) returns bigint
language plpgsql
as $$
declare
    v_lo   bigint := 0;  -- is before
    v_hi   bigint := coalesce(pg_sequence_last_value(format('pgqueue.publication_%s', p_stream_id)::regclass), 0) + 1;  -- is not, or not known to be
    v_mid  bigint;
    v_look record;
    v_back bigint;
begin
    loop
        while v_lo + 1 < v_hi loop
            v_mid := (v_lo + v_hi) / 2;
            -- by number some are asked at once: a single one may have been published late
            select min(publication_id) as first, max(publication_id) as last,
                   case when p_seq is null then min(published_at) < p_time else max(upper(seqs)) <= p_seq end as is_before
            into v_look
            from (select publication_id, published_at, seqs from pgqueue.publications
                  where stream_id = p_stream_id and publication_id >= v_mid and publication_id < v_hi
                  order by publication_id limit case when p_seq is null then 1 else 64 end) p;
            if v_look.is_before then
                v_lo := v_look.last;
            else
                v_hi := v_mid;
            end if;
        end loop;
        exit when p_seq is null;
        -- many that were published late would look like the place
        select min(publication_id) into v_back
        from (select publication_id, seqs from pgqueue.publications
              where stream_id = p_stream_id and publication_id <= v_lo
              order by publication_id desc limit pgqueue._max_under_way()) p
        where upper(seqs) > p_seq;
        exit when v_back is null;
        v_lo := 0;
        v_hi := v_back;
    end loop;
    return v_lo + 1;
end $$;

-- The publication ids below a bound that are visible or dead, and who may still publish the others.
--   p_below  null: all that there are
create or replace function pgqueue._decided(p_stream_id int, p_below bigint, out o_seen int8multirange, out o_publishers text[])
language plpgsql
as $$
declare
    v_issued  bigint := coalesce(pg_sequence_last_value(format('pgqueue.publication_%s', p_stream_id)::regclass), 0);  -- before who publishes
    v_below   bigint := least(p_below, v_issued + 1);
    v_open    text[];
    v_range   int8range;
    v_visible record;
begin
    -- Ids that were given out are of those who have the publish lock now, or visible to a new snapshot, or dead. This transaction sees its own.
    -- (A standby does not know the locks of its primary.)
    if current_setting('transaction_isolation') = 'read committed' and not pg_is_in_recovery() then
        v_open := array(select p from unnest(pgqueue._publishers(p_stream_id)) p where p <> all (pgqueue._own_ids()));
        if v_open = '{}' then
            o_seen := int8multirange(int8range(1, v_below));
            o_publishers := '{}';
            return;
        end if;
    end if;
    -- what consumers have taken is visible or dead, and what was noted
    select coalesce(range_agg(d.ids), '{}') * int8multirange(int8range(1, p_below)) into o_seen
    from (select int8multirange(int8range(1, c.next_publication)) - pgqueue._gap_ids(c) as ids
          from pgqueue.consumers o
          cross join lateral (select * from pgqueue.consumer_cursors where consumer_id = o.consumer_id order by version desc limit 1) c
          where o.stream_id = p_stream_id
          union all
          select int8multirange(int8range(1, below)) from pgqueue.decided where stream_id = p_stream_id) d;
    if v_open <> '{}' and v_below - 1 - pgqueue._cardinality(o_seen) > pgqueue._max_under_way() then
        -- to read so many takes longer than most transactions
        for v_try in 1..10 loop
            perform pg_sleep(0.001);
            v_open := array(select p from unnest(pgqueue._publishers(p_stream_id)) p where p = any (v_open));
            if v_open = '{}' then
                o_seen := int8multirange(int8range(1, v_below));
                o_publishers := '{}';
                return;
            end if;
        end loop;
    end if;
    for v_range in select unnest(int8multirange(int8range(1, p_below)) - o_seen) loop
        select count(*) filter (where part = 0) as count, min(publication_id) as first, max(publication_id) as last into v_visible
        from pgqueue.publications
        where stream_id = p_stream_id and publication_id >= lower(v_range) and publication_id < coalesce(upper(v_range), 9223372036854775807);
        continue when v_visible.count = 0;
        if v_visible.last - v_visible.first + 1 = v_visible.count then
            o_seen := o_seen + int8multirange(int8range(v_visible.first, v_visible.last, '[]'));
        else
            o_seen := o_seen + (select range_agg(int8range(publication_id, publication_id, '[]')) from pgqueue.publications
                                where stream_id = p_stream_id and publication_id >= v_visible.first and publication_id <= v_visible.last);
        end if;
    end loop;
    o_publishers := pgqueue._publishers(p_stream_id);  -- after the look
end $$;

-- Notes up to where all publications of a stream are visible or dead: so that who begins somewhere need not read the history when somebody
-- publishes at that moment. Nothing while another session is at it.
create or replace function pgqueue._note_decided(p_stream_id int) returns void
language plpgsql
as $$
declare
    v_decided pgqueue.decided;
    v_issued  bigint;
    v_open    text[];
begin
    -- what was noted before, then what was given out, then who publishes
    select * into v_decided from pgqueue.decided where stream_id = p_stream_id for update skip locked;
    if not found then
        insert into pgqueue.decided (stream_id, below, next_below, publishers)
        select p_stream_id, 1, 1, '{}' where not exists (select from pgqueue.decided where stream_id = p_stream_id)
        on conflict do nothing returning * into v_decided;
    end if;
    v_issued := coalesce(pg_sequence_last_value(format('pgqueue.publication_%s', p_stream_id)::regclass), 0);
    if v_decided.below <= v_issued then  -- there is something to decide, and nobody else at it
        v_open := pgqueue._publishers(p_stream_id);
        if not exists (select from unnest(v_open) w where w = any (v_decided.publishers) or w like '-1/%') then
            update pgqueue.decided
            set below = case when v_open = '{}' then v_issued + 1 else v_decided.next_below end, next_below = v_issued + 1, publishers = v_open
            where stream_id = p_stream_id;
        end if;
    end if;
end $$;

-- The virtual ids of this transaction.
create or replace function pgqueue._own_ids() returns text[]
language sql stable
as $$ select array(select distinct virtualtransaction from pg_locks where pid = pg_backend_pid()) $$;

-- A cursor that goes on from a position.
--   p_cursor  without gaps
--   p_seen    what is before the position, see _seen_from
--   p_next    ids from here on are new for it anyway; from the position's o_next on they must be
--   p_kept    messages of what is new below p_next that it does not get: settled, or in its hands; null: none
-- Returns the cursor, whose gaps are stored.
create or replace function pgqueue._cursor_from(p_cursor pgqueue.consumer_cursors, p_seen int8multirange, p_next bigint, p_publishers text[],
                                                p_kept int8multirange default null) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_missing int8multirange := int8multirange(int8range(1, p_next)) - p_seen;
begin
    p_cursor.next_publication := p_next;
    if v_missing <> '{}' then
        p_cursor := pgqueue._note_gap(p_cursor, v_missing, p_publishers, true, p_kept);
    end if;
    return p_cursor;
end $$;
