-- Positions: places in a stream at which a consumer or an offset reader begins.
--
--   earliest         before all messages that the stream has
--   latest           after all that was visible at some moment of the call
--   a timestamp      after the publications that were begun before it
--   seq N            after the messages with lower numbers; a publication that has lower and higher ones is cut
--   an offset        after the messages that it has read: its JSON, see reading/offsets.sql
--
-- A publication that is not visible yet counts as later than any position: its transaction is open. So a position is a
-- set of publication ids, and the cut publications among them; cursor_from() makes a consumer's cursor of it.
--
-- The history is not read. Publication ids are given out in the order in which publishing begins, and the time is
-- noted right afterwards. So a time is found by halves: among publications, because "since" asks what became visible,
-- and a sink writes messages long before it publishes them. Whether an id that is not visible is dead is known from
-- the publish lock (log/gaps.sql): it is, when no transaction has the lock that had it before; from consumers that
-- have taken the id or passed it; and from the notes of maintain() (record_decided()).

-- What is before an offset that is given as text; see seen_from() for the results. Needs the history's lock. Errors:
-- PQ003; PQ005, also when the offset has read a publication that this snapshot does not see, and has to.
create or replace function _pgqueue.seen_by(p_stream_id int, p_offset text, p_argument text, p_archive boolean,
                                            out o_seen int8multirange, out o_next bigint, out o_publishers text[],
                                            out o_cut int8multirange)
language plpgsql as $$
declare
    v_stream  pgqueue.streams := _pgqueue.stream_of(p_stream_id);
    v_json    jsonb;
    v_offset  pgqueue.reading_offset;
    v_trimmed int8multirange := (_pgqueue.trimmed(p_stream_id)).o_publications;
    v_unsure  int8multirange := '{}';
begin
    begin
        v_json := p_offset::jsonb;
    exception when invalid_text_representation or untranslatable_character or program_limit_exceeded then
        perform _pgqueue.refuse_offset(p_argument, 'no JSON', to_jsonb(p_offset));
    end;
    v_stream.name := (select name from pgqueue.streams where stream_id = p_stream_id);
    v_offset := _pgqueue.parse_offset(v_stream, p_argument, v_json, p_archive);
    o_seen := int8multirange(int8range(1, v_offset.next_publication)) - _pgqueue.unread(v_offset);
    -- the next publication itself may be cut, and none after it
    o_next := greatest(v_offset.next_publication, (select max(c) + 1 from unnest(v_offset.cut_publications) c));
    -- Others go by the cursor that is made of this: decided_ids(). So what may become visible later is not
    -- before the offset, whatever the offset says. (A standby makes no cursors.)
    if not pg_is_in_recovery() then
        v_unsure := o_seen - v_trimmed - (_pgqueue.decided(p_stream_id, o_next)).o_seen;
    end if;
    o_publishers := _pgqueue.publishers(p_stream_id);
    if current_setting('transaction_isolation') = 'read committed' then
        o_seen := o_seen - v_unsure;
    elsif o_publishers <@ _pgqueue.own_ids() then
        v_unsure := '{}';  -- visible to others, or dead
    end if;
    if exists (select from unnest(v_offset.cut_publications) c
               where not v_trimmed @> c
                 and not exists (select from pgqueue.publications
                                 where stream_id = p_stream_id and publication_id = c))
       or o_seen && v_unsure then
        raise exception '% has read publications that this transaction does not see', p_argument
            using errcode = 'PQ005', column = p_argument,
                  hint = 'Use it in a transaction with isolation read committed, '
                         'and not on a standby that is behind.';
    end if;
    if v_offset.cut_publications <> '{}' then
        o_cut := _pgqueue.before_cut(p_stream_id, v_offset);
    end if;
end $$;

-- The offset at a position. Errors: PQ003. Locks: the history, shared.
create or replace function _pgqueue.offset_at(p_stream pgqueue.streams, p_start text, p_argument text,
                                              p_archive boolean default false) returns pgqueue.reading_offset
language plpgsql as $$
declare
    v_seen   record := _pgqueue.seen_from(p_stream.stream_id, p_start, p_argument, p_archive);
    v_offset pgqueue.reading_offset;
begin
    v_offset.next_publication := v_seen.o_next;
    -- publishers are not known: the first look finds them
    v_offset.old_ids := int8multirange(int8range(1, v_seen.o_next)) - v_seen.o_seen;
    v_offset.new_ids := '{}';
    v_offset.messages := 0;
    v_offset.in_archive := p_archive is true;
    select coalesce(array_agg(c.publication_id order by c.publication_id), '{}'),
           coalesce(array_agg(c.n order by c.publication_id), '{}')
    into v_offset.cut_publications, v_offset.cut_messages
    from (select p.publication_id, sum(_pgqueue.cardinality(p.seqs * v_seen.o_cut))::bigint as n
          from unnest(v_offset.old_ids) g
          cross join lateral (select * from _pgqueue.readable(p_stream.stream_id, p_archive, lower(g), upper(g))
                              offset 0) p
          where v_seen.o_cut is not null and p.seqs && v_seen.o_cut and p.consumers is null
          group by p.publication_id) c;
    return v_offset;
end $$;

-- The publication of a message; no row when it is not visible, or trimmed. The search begins where the message's
-- number points. A message that a sink wrote long before it published it is found by reading all publications since.
create or replace function _pgqueue.publication_of(p_stream_id int, p_seq bigint) returns setof pgqueue.publications
language plpgsql stable as $$
declare
    v_from bigint := _pgqueue.below_position(p_stream_id, null, p_seq);
begin
    return query
        select * from pgqueue.publications
        where stream_id = p_stream_id and publication_id >= v_from and seqs @> p_seq
        order by publication_id limit 1;
end $$;

-- What a position says: a time, infinite for earliest and latest, or a number. Errors: PQ003.
--   p_argument  the name of the argument, for errors
create or replace function _pgqueue.position(p_stream_id int, p_position text, p_argument text, p_archive boolean,
                                             out o_time timestamptz, out o_seq bigint)
language plpgsql stable as $$
declare
    v_next  bigint := _pgqueue.last_seq(p_stream_id) + 1;
    v_first bigint;
begin
    o_seq := substring(p_position from '^seq +([0-9]{1,18})$')::bigint;
    if o_seq is null then
        begin
            o_time := case p_position when 'earliest' then '-infinity' when 'latest' then 'infinity'
                           else p_position::timestamptz end;
        exception when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
            null;
        end;
        if o_time is null then
            raise exception '% is earliest, latest, a timestamp, seq and a number, or an offset, not %', p_argument,
                            coalesce(quote_literal(left(p_position, 100)), 'null')
                using errcode = 'PQ003', column = p_argument;
        end if;
        return;
    end if;
    execute format('select min(seq) from pgqueue.messages_%s', p_stream_id) into v_first;
    if p_archive then
        v_first := least(v_first, _pgqueue.on_first_seq(p_stream_id));
    end if;
    if o_seq not between coalesce(v_first, 1) and v_next then
        raise exception '%, as a number, is seq % to seq %, the first message that there is to the next one, not %',
                        p_argument, coalesce(v_first, 1), v_next, quote_literal(p_position)
            using errcode = 'PQ003', column = p_argument, hint = 'For all that there is, say earliest.';
    end if;
end $$;

-- What is before a position.
--   p_argument  the name of the argument, for errors
--   p_archive   for a reader that reads the archive, too; false: for consumers, and for readers of Postgres alone.
--               They are warned when earliest passes over messages that only the archive has
-- Returns the state of one moment (READ COMMITTED: some moment of the call; else the caller's snapshot):
--   o_seen        the publication ids that count as seen: visible ones and dead ones
--   o_next        all ids from here on are after the position. An id below it that is missing in o_seen is after the
--                 position too, or not visible yet
--   o_publishers  the transactions that may still publish the missing ids
--   o_cut         messages that count as seen, of publications that do not: their other messages are after the
--                 position. Null: none
-- Errors: PQ003; PQ005 for an offset of another stream or state. Locks: the history (see lock_history()), which the
-- caller holds for as long as it relies on the result.
create or replace function _pgqueue.seen_from(p_stream_id int, p_position text, p_argument text,
                                              p_archive boolean default false, out o_seen int8multirange,
                                              out o_next bigint, out o_publishers text[], out o_cut int8multirange)
language plpgsql as $$
declare
    v_gone    record;
    v_trimmed int8multirange;
    v_first   bigint;
begin
    perform _pgqueue.lock_history(p_stream_id);
    if p_position ~ E'^\\s*{' then
        select s.* into o_seen, o_next, o_publishers, o_cut
        from _pgqueue.seen_by(p_stream_id, p_position, p_argument, p_archive) s;
    else
        select s.* into o_seen, o_next, o_publishers, o_cut
        from _pgqueue.seen_at(p_stream_id, p_position, p_argument, p_archive) s;
    end if;
    -- trimmed publications are missing, but neither under way nor dead: they are before every position
    v_gone := _pgqueue.trimmed(p_stream_id, p_archive);
    if p_position = 'earliest' and not p_archive and v_gone.o_archive <> '{}' then
        execute format('select min(seq) from pgqueue.messages_%s', p_stream_id) into v_first;
        raise warning '% earliest begins with %: earlier messages are in the archive alone, which Spark reads without '
                      'a consumer', p_argument, coalesce('message ' || v_first, 'the next message');
    end if;
    v_trimmed := v_gone.o_publications - o_seen;
    if v_trimmed <> '{}' then
        o_seen := o_seen + v_trimmed;
        if upper(o_seen) > o_next then
            o_next := upper(o_seen);
            o_publishers := _pgqueue.publishers(p_stream_id);
        end if;
    end if;
end $$;

-- The same for a position that is not an offset, without regard to trimmed publications. Needs the history's lock.
-- (More than 60 lines: each kind of position corrects what the one before it said, in this order.)
create or replace function _pgqueue.seen_at(p_stream_id int, p_position text, p_argument text, p_archive boolean,
                                            out o_seen int8multirange, out o_next bigint, out o_publishers text[],
                                            out o_cut int8multirange)
language plpgsql as $$
declare
    v_position record;
    v_below    bigint;  -- ids below are before it, if they are visible
    v_cut      record;
    v_near     record;
begin
    v_position := _pgqueue.position(p_stream_id, p_position, p_argument, p_archive);
    if v_position.o_time = '-infinity' then
        v_below := 1;
    elsif v_position.o_time = 'infinity' then
        v_below := null;
    else
        v_below := _pgqueue.below_position(p_stream_id, v_position.o_time, v_position.o_seq, p_archive);
    end if;
    select d.o_seen, d.o_publishers into o_seen, o_publishers from _pgqueue.decided(p_stream_id, v_below) d;
    if p_archive then
        o_seen := o_seen + (_pgqueue.trimmed(p_stream_id)).o_archive * int8multirange(int8range(1, v_below));
    end if;
    o_next := coalesce(upper(o_seen), 1);
    if v_position.o_seq is not null then
        -- the numbers around it
        select range_agg(int8range(n.publication_id, n.publication_id, '[]'))
                   filter (where p.last < v_position.o_seq) as seen,
               range_agg(_pgqueue.below(p.seqs, v_position.o_seq)) filter (where p.last >= v_position.o_seq) as cut,
               max(n.publication_id) as last
        into v_cut
        from (select distinct publication_id
              from _pgqueue.first_readable(p_stream_id, p_archive, v_below, 9223372036854775807,
                                           _pgqueue.max_under_way()) near
              where lower(seqs) < v_position.o_seq) n
        cross join lateral (select range_agg(seqs) as seqs, max(upper(seqs)) - 1 as last
                            from _pgqueue.readable(p_stream_id, p_archive, n.publication_id,
                                                   n.publication_id + 1)) p;
        o_seen := o_seen + coalesce(v_cut.seen, '{}');
        o_next := greatest(v_below, v_cut.last + 1);
        o_cut := v_cut.cut;
        if o_next > v_below then
            o_publishers := _pgqueue.publishers(p_stream_id);  -- after the look
        end if;
    end if;
    if isfinite(v_position.o_time) then
        -- some publications overtook others: each is judged by its own time
        select coalesce(range_agg(int8range(publication_id, publication_id, '[]'))
                        filter (where published_at < v_position.o_time), '{}') as before,
               coalesce(range_agg(int8range(publication_id, publication_id, '[]'))
                        filter (where published_at >= v_position.o_time), '{}') as since,
               max(publication_id) filter (where published_at < v_position.o_time) as last
        into v_near
        from (select publication_id, max(published_at) as published_at
              from (select publication_id, published_at
                    from _pgqueue.last_readable(p_stream_id, p_archive, v_below, 1000)
                    union all
                    select publication_id, published_at
                    from _pgqueue.first_readable(p_stream_id, p_archive, v_below, 9223372036854775807, 1000)) n
              group by publication_id) p;
        o_seen := o_seen + v_near.before - v_near.since;
        if v_near.last >= o_next then
            o_next := v_near.last + 1;
            o_publishers := _pgqueue.publishers(p_stream_id);  -- after the look
        end if;
    end if;
end $$;

-- An id below which all publications were noted before a time, or have lower numbers only; found by halves. The result
-- is not exact about publications that were under way at once: the caller looks at those near it.
create or replace function _pgqueue.below_position(p_stream_id int, p_time timestamptz, p_seq bigint,
                                                   p_archive boolean default false) returns bigint
language plpgsql as $$
declare
    v_lo   bigint := 0;  -- is before
    -- this id and those above it are not below the position, or not known to be
    v_hi   bigint := _pgqueue.last_publication_id(p_stream_id) + 1;
    v_mid  bigint;
    v_look record;
    v_back bigint;
begin
    loop
        while v_lo + 1 < v_hi loop
            v_mid := (v_lo + v_hi) / 2;
            -- by number it asks several publications at once: a single one may have been published late
            select min(publication_id) as first, max(publication_id) as last,
                   case when p_seq is null then min(published_at) < p_time
                        else max(upper(seqs)) <= p_seq end as is_before
            into v_look
            from _pgqueue.first_readable(p_stream_id, p_archive, v_mid, v_hi,
                                         case when p_seq is null then 1 else 64 end) p;
            if v_look.is_before then
                v_lo := v_look.last;
            else
                v_hi := v_mid;
            end if;
        end loop;
        exit when p_seq is null;
        -- many publications that were published late would look like the place
        select min(publication_id) into v_back
        from _pgqueue.last_readable(p_stream_id, p_archive, v_lo + 1, _pgqueue.max_under_way()) p
        where upper(seqs) > p_seq;
        exit when v_back is null;
        v_lo := 0;
        v_hi := v_back;
    end loop;
    return v_lo + 1;
end $$;

-- The publication ids below a bound that are visible or dead, and the transactions that may still publish the others.
--   p_below  null: all ids that were given out
-- (More than 60 lines: one look, whose reads are right in this order only.)
create or replace function _pgqueue.decided(p_stream_id int, p_below bigint, out o_seen int8multirange,
                                            out o_publishers text[])
language plpgsql as $$
declare
    -- read before the publishers
    v_issued  bigint := _pgqueue.last_publication_id(p_stream_id);
    v_below   bigint := least(p_below, v_issued + 1);
    v_open    text[];
    v_range   int8range;
    v_visible record;
begin
    -- An id that was given out belongs to a transaction that has the publish lock now, or is visible to a new
    -- snapshot, or is dead. This transaction sees its own. (A standby does not know the locks of its primary.)
    if current_setting('transaction_isolation') = 'read committed' and not pg_is_in_recovery() then
        v_open := array(select p from unnest(_pgqueue.publishers(p_stream_id)) p where p <> all (_pgqueue.own_ids()));
        if v_open = '{}' then
            o_seen := int8multirange(int8range(1, v_below));
            o_publishers := '{}';
            return;
        end if;
    end if;
    o_seen := _pgqueue.decided_ids(p_stream_id) * int8multirange(int8range(1, p_below));
    if v_open <> '{}' and v_below - 1 - _pgqueue.cardinality(o_seen) > _pgqueue.max_under_way() then
        -- to read so many ids takes longer than most transactions
        for v_try in 1..10 loop
            perform pg_sleep(0.001);
            v_open := array(select p from unnest(_pgqueue.publishers(p_stream_id)) p where p = any (v_open));
            if v_open = '{}' then
                o_seen := int8multirange(int8range(1, v_below));
                o_publishers := '{}';
                return;
            end if;
        end loop;
    end if;
    for v_range in select unnest(int8multirange(int8range(1, p_below)) - o_seen) loop
        select count(*) filter (where part = 0) as count, min(publication_id) as first, max(publication_id) as last
        into v_visible
        from pgqueue.publications
        where stream_id = p_stream_id and publication_id >= lower(v_range)
          and publication_id < coalesce(upper(v_range), 9223372036854775807);
        continue when v_visible.count = 0;
        if v_visible.last - v_visible.first + 1 = v_visible.count then
            o_seen := o_seen + int8multirange(int8range(v_visible.first, v_visible.last, '[]'));
        else
            o_seen := o_seen
                + (select range_agg(int8range(publication_id, publication_id, '[]')) from pgqueue.publications
                   where stream_id = p_stream_id and publication_id >= v_visible.first
                     and publication_id <= v_visible.last);
        end if;
    end loop;
    o_publishers := _pgqueue.publishers(p_stream_id);  -- after the look
end $$;

-- Notes the last publication id that was given out, for sends (log/numbers.sql). Locks: the stream's row, if nobody
-- has it.
create or replace function _pgqueue.record_numbers(p_stream_id int) returns void
language sql as $$
    update pgqueue.streams s set publications_from = l.last + 1
    from (select stream_id, _pgqueue.last_publication_id(stream_id) as last from pgqueue.streams
          where stream_id = p_stream_id and publications_from <= _pgqueue.last_publication_id(stream_id)
          for no key update skip locked) l  -- lock: stream
    where s.stream_id = l.stream_id
$$;

-- Notes up to which id all publications of a stream are visible or dead. So a position is found without reading the
-- history, even while somebody publishes. Does nothing while another session notes the same.
create or replace function _pgqueue.record_decided(p_stream_id int) returns void
language plpgsql as $$
declare
    v_decided pgqueue.decided;
    v_issued  bigint;
    v_open    text[];
begin
    -- first the earlier note, then the last id, then the publishers
    select * into v_decided from pgqueue.decided where stream_id = p_stream_id for update skip locked;  -- lock: decided
    if not found then
        insert into pgqueue.decided (stream_id, below, next_below, publishers)
        select p_stream_id, 1, 1, '{}' where not exists (select from pgqueue.decided where stream_id = p_stream_id)
        on conflict do nothing returning * into v_decided;  -- lock: decided
    end if;
    v_issued := _pgqueue.last_publication_id(p_stream_id);
    if v_decided.below <= v_issued then  -- there is something to decide, and nobody else at it
        v_open := _pgqueue.publishers(p_stream_id);
        if not exists (select from unnest(v_open) w where w = any (v_decided.publishers) or w like '-1/%') then
            update pgqueue.decided
            set below = case when v_open = '{}' then v_issued + 1 else v_decided.next_below end,
                next_below = v_issued + 1, publishers = v_open
            where stream_id = p_stream_id;
        end if;
    end if;
end $$;

-- The virtual ids of this transaction.
create or replace function _pgqueue.own_ids() returns text[]
language sql stable as $$
    select array(select distinct virtualtransaction from pg_locks where pid = pg_backend_pid())
$$;

-- A cursor that goes on from a position.
--   p_cursor  without gaps
--   p_seen    what is before the position, see seen_from()
--   p_next    ids from here on are new for the consumer; at most the position's o_next
--   p_kept    messages that are new, below p_next, and not for the consumer: settled, or in its hands; null: none
-- Returns the cursor, whose gaps are stored.
create or replace function _pgqueue.cursor_from(p_cursor pgqueue.consumer_cursors, p_seen int8multirange, p_next bigint,
                                                p_publishers text[], p_kept int8multirange default null)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_missing int8multirange := int8multirange(int8range(1, p_next)) - p_seen;
begin
    p_cursor.next_publication := p_next;
    if v_missing <> '{}' then
        p_cursor := _pgqueue.record_gap(p_cursor, v_missing, p_publishers, true, p_kept);
    end if;
    return p_cursor;
end $$;
