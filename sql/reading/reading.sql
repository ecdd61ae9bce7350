-- Reading on from an offset, and closing its gaps.
--
-- A read waits for nobody: a publication that is not visible when somebody reads is in a gap, and is read as soon as
-- it is visible.
--
-- Gaps are closed by the rule of log/gaps.sql. An offset holds what a consumer has in a row: the transactions that may
-- still fill a gap. So reading writes nothing, and two offset readers know nothing of each other. The rule is stricter
-- here:
--   * A look first notes the last publication id that was given out, then the transactions that have the publish lock.
--     Only then it looks, no further than to that id. A transaction that got one of these ids had the lock before.
--     Either it still has the lock, or it is over and this very look sees what it published.
--   * So a look that finds nobody with the lock closes all gaps, new ones too: the offset is one number. Otherwise a
--     gap stays until none of the publishers that were noted with it has the lock any more.
--   * Gaps are of two ages. New gaps join the younger one, whose publishers are then all of that moment. The younger
--     one becomes the older one when that is closed. So an offset has two sets and two lists at most, and no gap stays
--     open for longer than two transactions that publish, one after the other.
--   * Sometimes the publishers are not known, and the gap says so (publishers null): with an old snapshot (isolation
--     above read committed), which may be older than the note; and on a standby, which does not know the locks of its
--     primary. A standby closes what was decided on the primary (decided_ids()): it has the cursors of consumers and
--     the note of maintain(), and so all that these saw.

-- Walks publications of a set of ids, in the order of ids, until p_max messages are full.
--   p_archive  whether in the archive, too
--   p_rows  at most this many publications, or parts of them
-- Returns the publications that were read whole; the one that was cut, and how many of its messages were read; how
-- many messages were read in all; the last id that was walked; and whether a limit ended the walk.
create or replace function _pgqueue.walk(p_stream_id int, p_archive boolean, p_ids int8multirange, p_max bigint,
                                         p_rows int, out o_read int8multirange, out o_cut bigint,
                                         out o_cut_messages bigint, out o_messages bigint, out o_last bigint,
                                         out o_limited boolean)
language plpgsql as $$
begin
    -- limited twice, per range and in all, so that no more is read than is wanted
    with part as materialized (
        select p.*
        from unnest(p_ids) r
        cross join lateral (select publication_id, message_count, consumers
                            from _pgqueue.first_readable(p_stream_id, p_archive, lower(r), upper(r), p_rows)) p
        order by p.publication_id
        fetch first p_rows rows with ties
    ), publication as materialized (
        select publication_id, coalesce(sum(message_count) filter (where consumers is null), 0) as n
        from part
        group by publication_id
    ), walked as materialized (
        select publication_id, n, upto
        from (select publication_id, n, sum(n) over (order by publication_id rows unbounded preceding) as upto
              from publication) w
        where upto - n < p_max
    ), all_of_them as (
        select count(*) as count, min(publication_id) as first, max(publication_id) as last,
               coalesce(max(upto), 0) as messages,
               max(publication_id) filter (where upto > p_max) as cut, p_max
                   - max(upto - n) filter (where upto > p_max) as cut_messages
        from walked
    )
    select case when a.count = 0 then '{}'
                when a.last - a.first + 1 = a.count then int8multirange(int8range(a.first, a.last, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from walked) end,
           a.cut, a.cut_messages, least(a.messages, p_max), a.last, a.messages >= p_max
               or (select count(*) from part) >= p_rows
    into o_read, o_cut, o_cut_messages, o_messages, o_last, o_limited
    from all_of_them a;
    if o_cut is not null then
        o_read := o_read - int8multirange(int8range(o_cut, o_cut, '[]'));
    end if;
end $$;

-- The offset after the next messages: at most p_max, and no publication after p_upto (null: all).
create or replace function _pgqueue.read_on(p_stream pgqueue.streams, p_offset pgqueue.reading_offset, p_max bigint,
                                            p_upto bigint) returns pgqueue.reading_offset
language plpgsql as $$
declare
    v_upto   bigint := greatest(least(_pgqueue.last_publication_id(p_stream.stream_id), p_upto), 0);
    -- after those ids were given out, before the look; null where that says nothing about what the look will not see
    v_who    text[] := case when current_setting('transaction_isolation') = 'read committed' and not pg_is_in_recovery()
                            then _pgqueue.publishers(p_stream.stream_id) end;
    v_offset pgqueue.reading_offset := p_offset;
    v_known  int8multirange;
    v_left   bigint := p_max;
    v_walk   record;
begin
    if pg_is_in_recovery() then
        v_known := _pgqueue.decided_ids(p_stream.stream_id);
    end if;
    if v_offset.cut_publications <> '{}' then
        v_offset := _pgqueue.read_cut(p_stream, v_offset, p_max);
        v_left := p_max - (v_offset.messages - p_offset.messages);
        if v_left = 0 then
            return v_offset;
        end if;
    end if;
    if _pgqueue.unread(v_offset) <> '{}' then
        v_walk := _pgqueue.walk(p_stream.stream_id, v_offset.in_archive, _pgqueue.unread(v_offset)
                                * int8multirange(int8range(1, v_upto + 1)), v_left, _pgqueue.limit_read());
        v_offset := _pgqueue.close_gaps(v_offset, v_walk.o_read,
                                        case when not v_walk.o_limited
                                            and v_upto >= v_offset.next_publication - 1 then v_who end, v_known);
        v_offset.messages := v_offset.messages + v_walk.o_messages;
        if v_walk.o_cut is not null then
            v_offset.cut_publications := array[v_walk.o_cut];
            v_offset.cut_messages := array[v_walk.o_cut_messages];
        end if;
        v_left := v_left - v_walk.o_messages;
        if v_walk.o_limited then
            return v_offset;
        end if;
    end if;
    return _pgqueue.read_beyond(p_stream, v_offset, v_left, v_upto, v_who, v_known);
end $$;

-- Reads the rest of the publications that were cut, at most p_max messages.
create or replace function _pgqueue.read_cut(p_stream pgqueue.streams, p_offset pgqueue.reading_offset, p_max bigint)
returns pgqueue.reading_offset language plpgsql as $$
declare
    v_left bigint := p_max;
    v_cut  bigint;
    v_rest bigint;
begin
    while v_left > 0 and p_offset.cut_publications <> '{}' loop
        v_cut := p_offset.cut_publications[1];
        -- 0: trimmed, see check_not_trimmed()
        select greatest(coalesce(sum(message_count), 0) - p_offset.cut_messages[1], 0) into v_rest
        from _pgqueue.readable(p_stream.stream_id, p_offset.in_archive, v_cut, v_cut + 1)
        where consumers is null;
        p_offset.messages := p_offset.messages + least(v_rest, v_left);
        if v_rest > v_left then
            p_offset.cut_messages[1] := p_offset.cut_messages[1] + v_left;
            return p_offset;
        end if;
        v_left := v_left - v_rest;
        p_offset.cut_publications := p_offset.cut_publications[2:];
        p_offset.cut_messages := p_offset.cut_messages[2:];
        p_offset.next_publication := greatest(p_offset.next_publication, v_cut + 1);
        p_offset := _pgqueue.close_gaps(p_offset, int8multirange(int8range(v_cut, v_cut, '[]')), null, null);
    end loop;
    return p_offset;
end $$;

-- Takes publications out of the gaps of an offset, and closes the gaps that nobody can fill any more.
--   p_who    the transactions that had the publish lock before a look into all of the gaps; null: not known, or there
--            was no such look
--   p_known  publications that are visible or dead for sure, known before the look; null: nobody asked
create or replace function _pgqueue.close_gaps(p_offset pgqueue.reading_offset, p_read int8multirange, p_who text[],
                                               p_known int8multirange) returns pgqueue.reading_offset
language plpgsql as $$
begin
    p_read := p_read + coalesce(p_known, '{}');
    p_offset.old_ids := p_offset.old_ids - p_read;
    p_offset.new_ids := p_offset.new_ids - p_read;
    if p_who is not null then
        p_offset.old_publishers := array(select w from unnest(p_who) w
                                         where (w = any (p_offset.old_publishers)) is not false or w like '-1/%');
        p_offset.new_publishers := array(select w from unnest(p_who) w
                                         where (w = any (p_offset.new_publishers)) is not false or w like '-1/%');
        if p_offset.old_publishers = '{}' then
            p_offset.old_ids := '{}';
        end if;
        if p_offset.new_publishers = '{}' then
            p_offset.new_ids := '{}';
        end if;
    end if;
    if p_offset.old_ids = '{}' then
        p_offset.old_ids := p_offset.new_ids;
        p_offset.old_publishers := p_offset.new_publishers;
        p_offset.new_ids := '{}';
    end if;
    if p_offset.new_ids = '{}' then
        p_offset.new_publishers := null;
    end if;
    if p_offset.old_ids = '{}' then
        p_offset.old_publishers := null;
    end if;
    return p_offset;
end $$;

-- Reads on from the next publication, which nobody has looked at.
create or replace function _pgqueue.read_beyond(p_stream pgqueue.streams, p_offset pgqueue.reading_offset, p_max bigint,
                                                p_upto bigint, p_who text[], p_known int8multirange)
returns pgqueue.reading_offset language plpgsql as $$
declare
    v_rows   bigint := 64;  -- more each time: nobody knows before how many publications p_max messages are
    v_left   bigint := p_max;
    v_walked bigint := 0;
    v_end    bigint;
    v_room   bigint;
    v_walk   record;
    v_holes  int8multirange;
begin
    while v_left > 0 and v_walked < _pgqueue.limit_read() and p_offset.next_publication <= p_upto loop
        v_room := _pgqueue.max_offset_ranges() - (select count(*) from unnest(_pgqueue.unread(p_offset)));
        v_walk := _pgqueue.walk(p_stream.stream_id, p_offset.in_archive,
                                int8multirange(int8range(p_offset.next_publication, p_upto, '[]')), v_left,
                                v_rows::int);
        exit when v_walk.o_last is null;
        v_end := coalesce(v_walk.o_cut, v_walk.o_last + 1);
        v_holes := case when v_end > p_offset.next_publication
                          then int8multirange(int8range(p_offset.next_publication, v_end)) else '{}' end
                   - v_walk.o_read - coalesce(p_known, '{}');
        if p_who = '{}' then
            v_holes := '{}';
        elsif (select count(*) from unnest(v_holes)) > v_room then
            if p_known is null then
                -- what becomes known after a look says nothing about the look
                p_known := _pgqueue.decided_ids(p_stream.stream_id);
            else
                exit when v_room <= 0;
                v_rows := v_room;  -- so many have no more gaps
            end if;
            continue;
        end if;
        if v_holes <> '{}' then
            if p_offset.old_ids = '{}' then
                p_offset.old_ids := v_holes;
                p_offset.old_publishers := p_who;
            else
                p_offset.new_ids := p_offset.new_ids + v_holes;
                p_offset.new_publishers := p_who;
            end if;
        end if;
        p_offset.next_publication := v_end;
        if v_walk.o_cut is not null then
            p_offset.cut_publications := array[v_walk.o_cut];
            p_offset.cut_messages := array[v_walk.o_cut_messages];
        end if;
        p_offset.messages := p_offset.messages + v_walk.o_messages;
        v_left := v_left - v_walk.o_messages;
        v_walked := v_walked + v_rows;
        exit when not v_walk.o_limited;
        v_rows := least(v_rows * 8, _pgqueue.limit_read());
    end loop;
    perform _pgqueue.warn_of_gaps(p_stream, p_offset);
    return p_offset;
end $$;

-- Warns of an offset that has many gaps, and names the sessions that are the reason.
create or replace function _pgqueue.warn_of_gaps(p_stream pgqueue.streams, p_offset pgqueue.reading_offset) returns void
language plpgsql as $$
declare
    v_ranges bigint := (select count(*) from unnest(_pgqueue.unread(p_offset)));
begin
    if v_ranges >= _pgqueue.limit_gap_ranges() then
        raise warning 'the offset has % gaps, because transactions that publish to stream % stay open beside many '
                      'that were rolled back: %', v_ranges,
            quote_literal(p_stream.name),
            coalesce((select string_agg(distinct coalesce('process ' || l.pid, 'a prepared transaction'), ', ')
                      from pg_locks l
                      where l.locktype = 'advisory'
                        and l.virtualtransaction = any (p_offset.old_publishers || p_offset.new_publishers)),
                        'not known which, here')
            using hint = format('End them. With %s gaps, reading goes no further until they are over.',
                                _pgqueue.max_offset_ranges());
    end if;
end $$;

-- The publications of which any later look will find that they are visible or dead: consumers of the stream have taken
-- or passed them, or maintain() has noted it (record_decided()).
create or replace function _pgqueue.decided_ids(p_stream_id int) returns int8multirange
language plpgsql stable as $$
begin
    return (select coalesce(range_agg(d.ids), '{}')
            from (select int8multirange(int8range(1, c.next_publication)) - _pgqueue.gap_ids(c) as ids
                  from pgqueue.consumers o
                  cross join lateral (select * from pgqueue.consumer_cursors where consumer_id = o.consumer_id
                                      order by version desc limit 1) c
                  where o.stream_id = p_stream_id
                  union all
                  select int8multirange(int8range(1, below)) from pgqueue.decided where stream_id = p_stream_id) d);
end $$;
