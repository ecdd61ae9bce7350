-- Positions: places in a stream at which a consumer or an offset reader starts.
--
--   earliest         before all messages of the stream
--   latest           after all messages that were visible at some moment of the call
--   a timestamp      after the publications that began before it
--   seq N            after the messages with lower numbers; a publication that has lower and higher ones is cut
--   an offset        after the messages that it has read: its JSON, see reading/offsets.sql
--
-- A publication that is not visible yet is after any position: its transaction is open. So a position is a set of
-- publication ids, and the cut publications among them; cursor_from() makes a consumer's cursor of it.
--
-- The history is not read. Publication ids are assigned in the order in which publishing begins, and the time is stored
-- right afterwards. So a binary search finds a time. It searches publications, because a position means what became
-- visible, and a sink writes messages long before it publishes them. An id that is not visible is dead if all
-- transactions that had the publish lock (log/gaps.sql) have ended. Consumers that have taken or passed the id show the
-- same, and so does the record of maintain() (record_resolved()).

-- Resolves an offset given as text; see resolve_position() for the results. Needs the history's lock. Errors: PQ003;
-- PQ005, also when the offset has read a publication that this snapshot must see, and does not.
create or replace function _pgqueue.resolve_offset(p_stream_id int, p_offset text, p_argument text, p_archive boolean,
                                                   out o_seen int8multirange, out o_next bigint,
                                                   out o_publishers text[], out o_cut int8multirange)
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
        perform _pgqueue.refuse_offset(p_argument, 'it is not JSON', to_jsonb(p_offset));
    end;
    v_stream.name := (select name from pgqueue.streams where stream_id = p_stream_id);
    v_offset := _pgqueue.parse_offset(v_stream, p_argument, v_json, p_archive);
    o_seen := int8multirange(int8range(1, v_offset.next_publication)) - _pgqueue.unread(v_offset);
    -- the next publication may be cut, and none after it
    o_next := greatest(v_offset.next_publication, (select max(c) + 1 from unnest(v_offset.cut_publications) c));
    -- The result becomes a cursor on which resolved_ids() relies. So a publication that may become visible later is not
    -- before the position, even if the offset contains it. (A standby creates no cursors.)
    if not pg_is_in_recovery() then
        v_unsure := o_seen - v_trimmed - (_pgqueue.resolved(p_stream_id, o_next)).o_seen;
    end if;
    o_publishers := _pgqueue.publishers(p_stream_id);
    if current_setting('transaction_isolation') = 'read committed' then
        o_seen := o_seen - v_unsure;
    elsif o_publishers <@ _pgqueue.own_ids() then
        v_unsure := '{}';  -- visible to others, or dead
    end if;
    if o_seen && v_unsure or exists (
        select from unnest(v_offset.cut_publications) c
        where not v_trimmed @> c
          and not exists (select from pgqueue.publications where stream_id = p_stream_id and publication_id = c)) then
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
    v_place  record := _pgqueue.resolve_position(p_stream.stream_id, p_start, p_argument, p_archive);
    -- publishers are not known: the first read finds them
    v_offset pgqueue.reading_offset := row(v_place.o_next,
                                           int8multirange(int8range(1, v_place.o_next)) - v_place.o_seen, null, '{}',
                                           null, '{}', '{}', 0, p_archive is true)::pgqueue.reading_offset;
begin
    if v_place.o_cut is not null then
        select coalesce(array_agg(c.publication_id order by c.publication_id), '{}'),
               coalesce(array_agg(c.n order by c.publication_id), '{}')
        into v_offset.cut_publications, v_offset.cut_messages
        from (select p.publication_id, sum(_pgqueue.cardinality(p.seqs * v_place.o_cut))::bigint as n
              from unnest(v_offset.old_ids) g
              cross join lateral (select * from _pgqueue.readable(p_stream.stream_id, p_archive, lower(g), upper(g))
                                  offset 0) p
              where p.seqs && v_place.o_cut and p.consumers is null
              group by p.publication_id) c;
    end if;
    return v_offset;
end $$;

-- The publication of a message; no row when it is not visible, or trimmed. The search starts at publications with
-- similar numbers. For a message that a sink wrote long before publishing it, all later publications are read.
create or replace function _pgqueue.publication_of(p_stream_id int, p_seq bigint) returns setof pgqueue.publications
language sql stable as $$
    select p.*
    from _pgqueue.search_publication(p_stream_id, null, p_seq) f (id)
    cross join lateral (select * from pgqueue.publications
                        where stream_id = p_stream_id and publication_id >= f.id and seqs @> p_seq
                        order by publication_id limit 1) p
$$;

-- Parses a position that is not an offset: a time, infinite for earliest and latest, or a number. Errors: PQ003.
--   p_argument  the name of the argument, for errors
create or replace function _pgqueue.parse_position(p_stream_id int, p_position text, p_argument text, p_archive boolean,
                                                   out o_time timestamptz, out o_seq bigint)
language plpgsql stable as $$
declare
    v_next  bigint := _pgqueue.last_seq(p_stream_id) + 1;
    v_first bigint;
begin
    o_seq := substring(p_position from '^seq +([0-9]{1,18})$')::bigint;
    if o_seq is not null then
        v_first := coalesce(least(_pgqueue.first_seq(p_stream_id),
                                  case when p_archive then _pgqueue.on_first_seq(p_stream_id) end), 1);
        if o_seq not between v_first and v_next then
            raise exception '%, as a number, must be seq % to seq %, from the first stored message to the next one, '
                            'not %',
                            p_argument, v_first, v_next, quote_literal(p_position)
                using errcode = 'PQ003', column = p_argument, hint = 'For all messages, use earliest.';
        end if;
        return;
    end if;
    o_time := case p_position when 'earliest' then '-infinity' when 'latest' then 'infinity'
                   else coalesce(p_position, '')::timestamptz end;
exception when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
    raise exception '% must be earliest, latest, a timestamp, seq and a number, or an offset, not %', p_argument,
                    coalesce(quote_literal(left(p_position, 100)), 'null')
        using errcode = 'PQ003', column = p_argument;
end $$;

-- Resolves a position: which publications are before it.
--   p_argument  the name of the argument, for errors
--   p_archive   for a reader that also reads the archive; false: for consumers, and for readers of Postgres alone. They
--               get a warning when earliest skips messages that only the archive has
-- Returns the state of one moment (READ COMMITTED: some moment of the call; else the caller's snapshot):
--   o_seen        the publication ids before the position: visible ones and dead ones
--   o_next        all ids from here on are after the position. An id below it that is missing in o_seen is after the
--                 position too, or not visible yet
--   o_publishers  the transactions that may still publish the missing ids
--   o_cut         messages before the position, of publications that are not in o_seen: their other messages are after
--                 the position. Null: none
-- Errors: PQ003; PQ005 for an offset of another stream or state. Locks: the history (see lock_history()), which the
-- caller holds for as long as it relies on the result.
create or replace function _pgqueue.resolve_position(p_stream_id int, p_position text, p_argument text,
                                                     p_archive boolean default false, out o_seen int8multirange,
                                                     out o_next bigint, out o_publishers text[],
                                                     out o_cut int8multirange)
language plpgsql as $$
declare
    v_gone record;
begin
    perform _pgqueue.lock_history(p_stream_id);
    if p_position ~ E'^\\s*{' then
        select * into o_seen, o_next, o_publishers, o_cut
        from _pgqueue.resolve_offset(p_stream_id, p_position, p_argument, p_archive);
    else
        select * into o_seen, o_next, o_publishers, o_cut
        from _pgqueue.resolve_place(p_stream_id, p_position, p_argument, p_archive);
    end if;
    -- trimmed publications are missing, but not in progress: they are before every position
    v_gone := _pgqueue.trimmed(p_stream_id, p_archive);
    if p_position = 'earliest' and not p_archive and v_gone.o_archive <> '{}' then
        raise warning '% earliest starts with %: earlier messages are only in the archive, which Spark reads without a '
                      'consumer', p_argument,
                      coalesce('message ' || _pgqueue.first_seq(p_stream_id), 'the next message');
    end if;
    o_seen := o_seen + v_gone.o_publications;
    if upper(o_seen) > o_next then
        o_next := upper(o_seen);
        o_publishers := _pgqueue.publishers(p_stream_id);
    end if;
end $$;

-- Resolves a position that is not an offset, without regard to trimmed publications. Needs the history's lock.
create or replace function _pgqueue.resolve_place(p_stream_id int, p_position text, p_argument text, p_archive boolean,
                                                  out o_seen int8multirange, out o_next bigint,
                                                  out o_publishers text[], out o_cut int8multirange)
language plpgsql as $$
declare
    v_place  record := _pgqueue.parse_position(p_stream_id, p_position, p_argument, p_archive);
    -- visible publications below this id are before it; null: all assigned ids
    v_below  bigint := case v_place.o_time when '-infinity' then 1 when 'infinity' then null
                            else _pgqueue.search_publication(p_stream_id, v_place.o_time, v_place.o_seq, p_archive) end;
    v_before int8multirange;
    v_since  int8multirange;
    v_last   bigint;
begin
    select * into o_seen, o_publishers from _pgqueue.resolved(p_stream_id, v_below);
    if p_archive then
        o_seen := o_seen + (_pgqueue.trimmed(p_stream_id)).o_archive * int8multirange(int8range(1, v_below));
    end if;
    if v_place.o_seq is not null then
        -- the publications around the number
        select range_agg(int8range(n.publication_id, n.publication_id, '[]')) filter (where p.last < v_place.o_seq),
               range_agg(_pgqueue.below(p.seqs, v_place.o_seq)) filter (where p.last >= v_place.o_seq),
               max(n.publication_id)
        into v_before, o_cut, v_last
        from (select distinct publication_id
              from _pgqueue.first_readable(p_stream_id, p_archive, v_below, 9223372036854775807,
                                           _pgqueue.max_in_progress()) f
              where lower(seqs) < v_place.o_seq) n
        cross join lateral (select range_agg(seqs) as seqs, max(upper(seqs)) - 1 as last
                            from _pgqueue.readable(p_stream_id, p_archive, n.publication_id,
                                                   n.publication_id + 1)) p;
    elsif isfinite(v_place.o_time) then
        -- ids and times may differ in order: each publication is compared by its own time
        select range_agg(int8range(publication_id, publication_id, '[]')) filter (where published_at < v_place.o_time),
               range_agg(int8range(publication_id, publication_id, '[]')) filter (where published_at >= v_place.o_time),
               max(publication_id) filter (where published_at < v_place.o_time)
        into v_before, v_since, v_last
        from (select publication_id, max(published_at) as published_at
              from (select publication_id, published_at
                    from _pgqueue.last_readable(p_stream_id, p_archive, v_below, 1000)
                    union all
                    select publication_id, published_at
                    from _pgqueue.first_readable(p_stream_id, p_archive, v_below, 9223372036854775807, 1000)) n
              group by publication_id) p;
    end if;
    o_next := coalesce(upper(o_seen), 1);
    o_seen := o_seen + coalesce(v_before, '{}') - coalesce(v_since, '{}');
    if v_last >= o_next then
        o_next := v_last + 1;
        o_publishers := _pgqueue.publishers(p_stream_id);  -- after the read
    end if;
end $$;

-- An id below which all publications are from before a time, or have only lower numbers, by binary search. The result
-- is not exact for publications that were in progress at the same time: the caller compares those near it.
create or replace function _pgqueue.search_publication(p_stream_id int, p_time timestamptz, p_seq bigint,
                                                       p_archive boolean default false) returns bigint
language plpgsql as $$
declare
    v_lo   bigint := 0;  -- before the position
    -- this id and those above it are not before the position, or not known to be
    v_hi   bigint := _pgqueue.last_publication_id(p_stream_id) + 1;
    v_mid  bigint;
    v_read record;
    v_back bigint;
begin
    loop
        while v_lo + 1 < v_hi loop
            v_mid := (v_lo + v_hi) / 2;
            -- by number it reads several publications at once: a single one may have been published late
            select min(publication_id) as first, max(publication_id) as last,
                   case when p_seq is null then min(published_at) < p_time
                        else max(upper(seqs)) <= p_seq end as is_before
            into v_read
            from _pgqueue.first_readable(p_stream_id, p_archive, v_mid, v_hi,
                                         case when p_seq is null then 1 else 64 end) p;
            if v_read.is_before then
                v_lo := v_read.last;
            else
                v_hi := v_mid;
            end if;
        end loop;
        exit when p_seq is null;
        -- many publications that were published late can mislead the search
        select min(publication_id) into v_back
        from _pgqueue.last_readable(p_stream_id, p_archive, v_lo + 1, _pgqueue.max_in_progress()) p
        where upper(seqs) > p_seq;
        exit when v_back is null;
        v_lo := 0;
        v_hi := v_back;
    end loop;
    return v_lo + 1;
end $$;

-- The publication ids below a bound that are resolved: visible or dead; and the transactions that may still publish the
-- others.
--   p_below  null: all assigned ids
create or replace function _pgqueue.resolved(p_stream_id int, p_below bigint, out o_seen int8multirange,
                                             out o_publishers text[])
language plpgsql as $$
declare
    -- read before the publishers
    v_below bigint := least(p_below, _pgqueue.last_publication_id(p_stream_id) + 1);
    v_open  text[];
begin
    -- An assigned id belongs to a transaction that has the publish lock now, or is visible to a new snapshot, or is
    -- dead. This transaction sees its own ids. (A standby does not see the locks of its primary.)
    if current_setting('transaction_isolation') = 'read committed' and not pg_is_in_recovery() then
        v_open := array(select p from unnest(_pgqueue.publishers(p_stream_id)) p where p <> all (_pgqueue.own_ids()));
    end if;
    if (v_open = '{}') is not true then
        o_seen := _pgqueue.resolved_ids(p_stream_id) * int8multirange(int8range(1, p_below));
        -- reading many ids takes longer than most transactions
        for v_try in 1..10 loop
            exit when (v_open <> '{}') is not true
                or v_below - 1 - _pgqueue.cardinality(o_seen) <= _pgqueue.max_in_progress();
            perform pg_sleep(0.001);
            v_open := array(select p from unnest(_pgqueue.publishers(p_stream_id)) p where p = any (v_open));
        end loop;
    end if;
    if v_open = '{}' then
        o_seen := int8multirange(int8range(1, v_below));
        o_publishers := '{}';
        return;
    end if;
    select o_seen + coalesce(range_agg(
               case when v.last - v.first + 1 = v.count then int8multirange(int8range(v.first, v.last, '[]'))
                    else (select range_agg(int8range(publication_id, publication_id, '[]'))
                          from _pgqueue.published(p_stream_id, int8multirange(r))) end), '{}')
    into o_seen
    from unnest(int8multirange(int8range(1, p_below)) - o_seen) r
    cross join lateral (select count(*) filter (where part = 0) as count, min(publication_id) as first,
                               max(publication_id) as last
                        from _pgqueue.published(p_stream_id, int8multirange(r))) v
    where v.count > 0;
    o_publishers := _pgqueue.publishers(p_stream_id);  -- after the read
end $$;

-- Records the last assigned publication id, for sends (log/numbers.sql). Locks: the stream's row, unless it is locked.
create or replace function _pgqueue.record_numbers(p_stream_id int) returns void
language sql as $$
    update pgqueue.streams s set publications_from = l.last + 1
    from (select stream_id, _pgqueue.last_publication_id(stream_id) as last from pgqueue.streams
          where stream_id = p_stream_id and publications_from <= _pgqueue.last_publication_id(stream_id)
          for no key update skip locked) l  -- lock: stream
    where s.stream_id = l.stream_id
$$;

-- Records up to which id all publications of a stream are resolved: visible or dead. So a position is found without
-- reading the history, even while transactions publish. Does nothing while another session records the same.
create or replace function _pgqueue.record_resolved(p_stream_id int) returns void
language plpgsql as $$
declare
    v_resolved pgqueue.resolved;
    v_issued   bigint;
    v_open     text[];
begin
    -- first the previous record, then the last id, then the publishers
    -- lock: resolved
    select * into v_resolved from pgqueue.resolved where stream_id = p_stream_id for update skip locked;
    if not found then
        insert into pgqueue.resolved (stream_id, below, next_below, publishers)
        select p_stream_id, 1, 1, '{}' where not exists (select from pgqueue.resolved where stream_id = p_stream_id)
        on conflict do nothing returning * into v_resolved;  -- lock: resolved
    end if;
    v_issued := _pgqueue.last_publication_id(p_stream_id);
    if v_resolved.below <= v_issued then  -- there is something to record, and no other session records it
        v_open := _pgqueue.publishers(p_stream_id);
        if _pgqueue.still_open(v_resolved.publishers, v_open) = '{}' then
            update pgqueue.resolved
            set below = case when v_open = '{}' then v_issued + 1 else v_resolved.next_below end,
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

-- A cursor that continues from a position.
--   p_cursor  without gaps
--   p_seen    the publications before the position, see resolve_position()
--   p_next    ids from here on are new for the consumer; at most the position's o_next
--   p_excluded  messages of new publications below p_next that the consumer does not get again: settled, unfinished or
--               dead; null: none
-- Returns the cursor, whose gaps are stored.
create or replace function _pgqueue.cursor_from(p_cursor pgqueue.consumer_cursors, p_seen int8multirange, p_next bigint,
                                                p_publishers text[], p_excluded int8multirange default null)
returns pgqueue.consumer_cursors language plpgsql as $$
begin
    p_cursor.next_publication := p_next;
    return _pgqueue.record_gap(p_cursor, int8multirange(int8range(1, p_next)) - p_seen, p_publishers, true, p_excluded);
end $$;
