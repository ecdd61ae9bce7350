-- Reading from an offset on, and closing its gaps.
--
-- A read waits for no other session: a publication that is not visible is in a gap of the offset, and is read as soon
-- as it is visible.
--
-- Gaps are closed by the rule of log/gaps.sql. An offset contains the transactions that may still fill a gap, which a
-- consumer has in a row. So reading writes nothing, and offset readers are independent of each other. The rule is
-- stricter here:
--   * A read first determines the last assigned publication id, then the transactions that have the publish lock. Only
--     then it reads, up to that id. A transaction that got one of these ids had the lock before. Either it still has
--     the lock, or it has ended and this read sees its publication.
--   * So a read that finds no transaction with the lock closes all gaps, new ones too: the offset is one number.
--     Otherwise a gap stays until none of the publishers that were recorded with it has the lock any more.
--   * Gaps are of two ages. New gaps join the younger one, whose publishers are then all publishers of that moment. The
--     younger one becomes the older one when that is closed. So an offset has at most two sets and two lists, and no
--     gap stays open for longer than two consecutive transactions that publish.
--   * Sometimes the publishers are not known, and are null in the gap: with an old snapshot (isolation above read
--     committed), which may be older than the list of publishers; and on a standby, which does not see the locks of its
--     primary. A standby closes gaps that were resolved on the primary (resolved_ids()), because it has the cursors of
--     consumers and the record of maintain().

-- Scans publications of a set of ids, in the order of ids, and reads their messages.
--   p_offset  without a cut; only its messages and its cut change
--   p_goal    the number of messages of the offset at which the scan ends
--   p_rows    at most this many publications, or parts of them
-- Returns the offset; the publications that were read completely; the last id that was scanned; and whether a limit
-- ended the scan.
create or replace function _pgqueue.scan_publications(p_stream_id int, inout p_offset pgqueue.reading_offset,
                                                      p_ids int8multirange, p_goal bigint, p_rows int,
                                                      out o_read int8multirange, out o_last bigint,
                                                      out o_limited boolean)
language plpgsql as $$
declare
    v_max bigint := p_goal - p_offset.messages;
begin
    -- limited twice, per range and in all, so that no more is read than needed
    with part as materialized (
        select p.*
        from unnest(p_ids) r
        cross join lateral (select publication_id, message_count, consumers
                            from _pgqueue.first_readable(p_stream_id, p_offset.in_archive, lower(r), upper(r),
                                                         p_rows)) p
        order by p.publication_id
        fetch first p_rows rows with ties
    ), publication as materialized (
        select publication_id, coalesce(sum(message_count) filter (where consumers is null), 0) as n
        from part
        group by publication_id
    ), scanned as materialized (
        select publication_id, n, upto
        from (select publication_id, n, sum(n) over (order by publication_id rows unbounded preceding) as upto
              from publication) w
        where upto - n < v_max
    ), total as (
        select count(*) filter (where upto <= v_max) as count, min(publication_id) as first,
               max(publication_id) filter (where upto <= v_max) as last_whole, max(publication_id) as last,
               coalesce(max(upto), 0) as messages,
               array_agg(publication_id) filter (where upto > v_max) as cut,
               array_agg(v_max - (upto - n)) filter (where upto > v_max) as cut_messages
        from scanned
    )
    select case when count = 0 then '{}'
                when last_whole - first + 1 = count then int8multirange(int8range(first, last_whole, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from scanned
                      where upto <= v_max) end,
           last, messages >= v_max or (select count(*) from part) >= p_rows,
           least(p_offset.messages + messages, p_goal), coalesce(cut, '{}'), coalesce(cut_messages, '{}')
    into o_read, o_last, o_limited, p_offset.messages, p_offset.cut_publications, p_offset.cut_messages
    from total;
end $$;

-- The offset after the next messages: at most p_max, and no publications after p_upto (null: all).
create or replace function _pgqueue.advance_offset(p_stream pgqueue.streams, p_offset pgqueue.reading_offset,
                                                   p_max bigint, p_upto bigint) returns pgqueue.reading_offset
language plpgsql as $$
declare
    v_upto  bigint := greatest(least(_pgqueue.last_publication_id(p_stream.stream_id), p_upto), 0);
    -- after these ids were assigned, before the read; null: not known
    v_who   text[] := case when current_setting('transaction_isolation') = 'read committed' and not pg_is_in_recovery()
                           then _pgqueue.publishers(p_stream.stream_id) end;
    v_known int8multirange := case when pg_is_in_recovery() then _pgqueue.resolved_ids(p_stream.stream_id) end;
    v_goal  bigint := p_offset.messages + least(p_max, 9223372036854775807 - p_offset.messages);
    v_scan  record;
begin
    if p_offset.cut_publications <> '{}' then
        p_offset := _pgqueue.advance_cut(p_stream, p_offset, v_goal);
    end if;
    if p_offset.messages < v_goal and _pgqueue.unread(p_offset) <> '{}' then
        v_scan := _pgqueue.scan_publications(p_stream.stream_id, p_offset,
                                             _pgqueue.below(_pgqueue.unread(p_offset), v_upto + 1), v_goal,
                                             _pgqueue.limit_read());
        p_offset := _pgqueue.close_gaps(v_scan.p_offset, v_scan.o_read,
                                        case when not v_scan.o_limited and v_upto >= p_offset.next_publication - 1
                                             then v_who end, v_known);
        if v_scan.o_limited then
            return p_offset;
        end if;
    end if;
    return _pgqueue.advance_next(p_stream, p_offset, v_goal, v_upto, v_who, v_known);
end $$;

-- Reads the rest of the publications that were cut, until the offset has p_goal messages.
create or replace function _pgqueue.advance_cut(p_stream pgqueue.streams, p_offset pgqueue.reading_offset,
                                                p_goal bigint) returns pgqueue.reading_offset
language plpgsql as $$
declare
    v_cut  bigint;
    v_rest bigint;
    v_left bigint;
begin
    while p_offset.messages < p_goal and p_offset.cut_publications <> '{}' loop
        v_cut := p_offset.cut_publications[1];
        -- 0: trimmed, see check_not_trimmed()
        select greatest(coalesce(sum(message_count), 0) - p_offset.cut_messages[1], 0) into v_rest
        from _pgqueue.readable(p_stream.stream_id, p_offset.in_archive, v_cut, v_cut + 1)
        where consumers is null;
        v_left := p_goal - p_offset.messages;
        p_offset.messages := p_offset.messages + least(v_rest, v_left);
        if v_rest > v_left then
            p_offset.cut_messages[1] := p_offset.cut_messages[1] + v_left;
            return p_offset;
        end if;
        p_offset.cut_publications := p_offset.cut_publications[2:];
        p_offset.cut_messages := p_offset.cut_messages[2:];
        p_offset.next_publication := greatest(p_offset.next_publication, v_cut + 1);
        p_offset := _pgqueue.close_gaps(p_offset, int8multirange(int8range(v_cut, v_cut, '[]')), null, null);
    end loop;
    return p_offset;
end $$;

-- Removes publications from the gaps of an offset, and closes the gaps that no transaction can fill any more.
--   p_who    the transactions that had the publish lock before all gaps were read; null: not known, or not all gaps
--            were read
--   p_known  publications that were resolved before the read; null: not determined
create or replace function _pgqueue.close_gaps(p_offset pgqueue.reading_offset, p_read int8multirange, p_who text[],
                                               p_known int8multirange) returns pgqueue.reading_offset
language plpgsql as $$
begin
    p_read := p_read + coalesce(p_known, '{}');
    p_offset.old_ids := p_offset.old_ids - p_read;
    p_offset.new_ids := p_offset.new_ids - p_read;
    if p_who is not null then
        p_offset.old_publishers := _pgqueue.still_open(p_offset.old_publishers, p_who);
        p_offset.new_publishers := _pgqueue.still_open(p_offset.new_publishers, p_who);
        p_offset.old_ids := case when p_offset.old_publishers = '{}' then '{}' else p_offset.old_ids end;
        p_offset.new_ids := case when p_offset.new_publishers = '{}' then '{}' else p_offset.new_ids end;
    end if;
    if p_offset.old_ids = '{}' then
        p_offset.old_ids := p_offset.new_ids;
        p_offset.old_publishers := p_offset.new_publishers;
        p_offset.new_ids := '{}';
    end if;
    p_offset.old_publishers := case when p_offset.old_ids <> '{}' then p_offset.old_publishers end;
    p_offset.new_publishers := case when p_offset.new_ids <> '{}' then p_offset.new_publishers end;
    return p_offset;
end $$;

-- Reads from the next publication on, until the offset has p_goal messages.
create or replace function _pgqueue.advance_next(p_stream pgqueue.streams, p_offset pgqueue.reading_offset,
                                                 p_goal bigint, p_upto bigint, p_who text[], p_known int8multirange)
returns pgqueue.reading_offset language plpgsql as $$
declare
    v_rows    bigint := 64;  -- increases: the number of publications for p_goal is not known
    v_scanned bigint := 0;
    v_next    bigint;
    v_free    bigint;
    v_scan    record;
    v_holes   int8multirange;
begin
    while p_offset.messages < p_goal and v_scanned < _pgqueue.limit_read() and p_offset.next_publication <= p_upto loop
        v_free := _pgqueue.max_offset_ranges() - (select count(*) from unnest(_pgqueue.unread(p_offset)));
        v_scan := _pgqueue.scan_publications(p_stream.stream_id, p_offset,
                                             int8multirange(int8range(p_offset.next_publication, p_upto, '[]')), p_goal,
                                             v_rows::int);
        v_next := coalesce((v_scan.p_offset).cut_publications[1], v_scan.o_last + 1);
        if v_next is null then  -- nothing is left but what was trimmed: the caller notices a loss now
            v_scan.o_read := (_pgqueue.trimmed(p_stream.stream_id)).o_publications
                * int8multirange(int8range(p_offset.next_publication, p_upto, '[]'));
            v_next := upper(v_scan.o_read);
            exit when v_next is null;
        end if;
        v_holes := int8multirange(int8range(p_offset.next_publication, v_next)) - v_scan.o_read
                   - coalesce(p_known, '{}');
        if p_who = '{}' then
            v_holes := '{}';
        elsif (select count(*) from unnest(v_holes)) > v_free then
            if p_known is null then
                -- resolved after this read: the publications are read again
                p_known := _pgqueue.resolved_ids(p_stream.stream_id);
            else
                exit when v_free <= 0;
                v_rows := v_free;  -- so many publications have no more gaps
            end if;
            continue;
        end if;
        p_offset := v_scan.p_offset;
        p_offset.next_publication := v_next;
        if p_offset.old_ids = '{}' and v_holes <> '{}' then
            p_offset.old_ids := v_holes;
            p_offset.old_publishers := p_who;
        elsif v_holes <> '{}' then
            p_offset.new_ids := p_offset.new_ids + v_holes;
            p_offset.new_publishers := p_who;
        end if;
        v_scanned := v_scanned + v_rows;
        exit when not v_scan.o_limited;
        v_rows := least(v_rows * 8, _pgqueue.limit_read());
    end loop;
    perform _pgqueue.warn_of_gaps(p_stream, p_offset);
    return p_offset;
end $$;

-- Warns about an offset with many gaps, and names the sessions that cause them.
create or replace function _pgqueue.warn_of_gaps(p_stream pgqueue.streams, p_offset pgqueue.reading_offset) returns void
language plpgsql as $$
declare
    v_ranges bigint := (select count(*) from unnest(_pgqueue.unread(p_offset)));
begin
    if v_ranges >= _pgqueue.limit_gap_ranges() then
        raise warning 'the offset has % gaps, because transactions that publish to stream % stay open while many '
                      'others roll back: %', v_ranges, quote_literal(p_stream.name),
            coalesce((select string_agg(distinct coalesce('process ' || pid, 'a prepared transaction'), ', ')
                      from pg_locks
                      where locktype = 'advisory'
                        and virtualtransaction = any (p_offset.old_publishers || p_offset.new_publishers)),
                     'unknown on this server')
            using hint = format('End these transactions: at %s gaps, reading stops until they have ended.',
                                _pgqueue.max_offset_ranges());
    end if;
end $$;

-- The publications that are visible or dead for any later read: consumers of the stream have taken or passed them, or
-- maintain() has recorded it (record_resolved()).
create or replace function _pgqueue.resolved_ids(p_stream_id int) returns int8multirange
language plpgsql stable as $$
begin
    return (select coalesce(range_agg(d.ids), '{}')
            from (select int8multirange(int8range(1, c.next_publication)) - _pgqueue.gap_ids(c) as ids
                  from pgqueue.consumers o
                  cross join lateral (select * from pgqueue.consumer_cursors where consumer_id = o.consumer_id
                                      order by version desc limit 1) c
                  where o.stream_id = p_stream_id
                  union all
                  select int8multirange(int8range(1, below)) from pgqueue.resolved where stream_id = p_stream_id) d);
end $$;
