-- Gaps: publication ids below the cursor's next_publication that the consumer has not taken, because they were not
-- visible, or that it has to take again (replay, seek), except the messages in the column excluded.
--
-- Transactions do not commit in the order of publication ids. A take that sees publication 7, but not 5 and 6, records
-- the gap {5, 6}: their transactions are open, or were rolled back. Later takes must read the gap again, but not each
-- time:
--   * A producer takes the publish lock of the stream, shared, before it takes its publication id, and holds the lock
--     until every new snapshot sees its commit. So right after a read of the gap, a transaction that may still fill it
--     either holds the lock, or has ended and is seen by the next read. The gap is recorded with the transactions that
--     hold the lock: its publishers.
--   * The next take reads the gap once more, for publishers that ended in between. After that, the gap cannot change
--     while all its publishers hold the lock, and takes do not read it.
--   * If no publisher held the lock before a read began, that read is the last one: a publication that it does not see
--     was rolled back.
-- Nothing depends on transaction ids: an idle transaction elsewhere costs nothing, and a restore changes nothing. A
-- prepared transaction keeps its lock. After a restart of the server it has another virtual id, -1/..., and so counts
-- as a publisher of every gap.

-- The publications of a set of ids, without those in the archive. (In SQL, so that it is inlined into the caller's
-- statement.)
create or replace function _pgqueue.published(p_stream_id int, p_ids int8multirange) returns setof pgqueue.publications
language sql stable as $$
    select p.*
    from unnest(p_ids) g
    cross join lateral (select * from pgqueue.publications
                        where stream_id = p_stream_id and publication_id >= lower(g)
                          and publication_id < coalesce(upper(g), 9223372036854775807) offset 0) p
$$;

-- Records the result of reading gaps.
--   p_read        the rows of the gaps
--   p_found       the publication ids that the take found in them
--   p_publishers  the transactions that held the publish lock before the read
--   p_was_cut     the read stopped at a limit, before the end of the gaps
-- Returns the cursor.
create or replace function _pgqueue.shrink_gaps(p_cursor pgqueue.consumer_cursors, p_read pgqueue.consumer_gaps[],
                                                p_found int8multirange, p_publishers text[], p_was_cut boolean)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_gap  pgqueue.consumer_gaps;
    v_left int8multirange;
    v_who  text[];
begin
    foreach v_gap in array p_read loop
        v_left := v_gap.publication_ids - p_found;
        v_who := case when p_was_cut then v_gap.publishers
                      else _pgqueue.still_open(v_gap.publishers, p_publishers) end;
        continue when v_gap.look = p_was_cut and v_left = v_gap.publication_ids and v_who = v_gap.publishers;
        p_cursor := _pgqueue.delete_gaps(p_cursor, array[v_gap.gap_no]);
        if v_left <> '{}' and (p_was_cut or v_who <> '{}') then
            if v_gap.excluded is not null and v_left <> v_gap.publication_ids then
                -- without publications that left the gap: if they are put into a gap again, they are taken whole
                v_gap.excluded := v_gap.excluded
                    - coalesce((select range_agg(p.seqs) from pgqueue.consumers c
                                cross join lateral _pgqueue.published(c.stream_id, v_gap.publication_ids * p_found) p
                                where c.consumer_id = p_cursor.consumer_id
                                  and _pgqueue.meets(p.seqs, v_gap.excluded)), '{}');
            end if;
            p_cursor := _pgqueue.record_gap(p_cursor, v_left, v_who, p_was_cut, v_gap.excluded);
        end if;
    end loop;
    return p_cursor;
end $$;

-- Records a gap, unless it is empty. Returns the cursor.
--   p_excluded  messages in the gap that are not to be taken; null: none
create or replace function _pgqueue.record_gap(p_cursor pgqueue.consumer_cursors, p_ids int8multirange,
                                               p_publishers text[], p_look boolean,
                                               p_excluded int8multirange default null)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_gap_no bigint;
begin
    if p_ids <> '{}' then
        insert into pgqueue.consumer_gaps (consumer_id, gap_no, publication_ids, range_count, publishers, look,
                                           excluded)
        values (p_cursor.consumer_id, nextval('pgqueue.gap_numbers'), p_ids, (select count(*) from unnest(p_ids)),
                p_publishers, p_look, nullif(p_excluded, '{}'))
        returning gap_no into v_gap_no;
        p_cursor.gaps := p_cursor.gaps || v_gap_no;
    end if;
    return p_cursor;
end $$;

-- Deletes gaps. Returns the cursor.
create or replace function _pgqueue.delete_gaps(p_cursor pgqueue.consumer_cursors, p_gap_nos bigint[])
returns pgqueue.consumer_cursors language plpgsql as $$
begin
    delete from pgqueue.consumer_gaps where consumer_id = p_cursor.consumer_id and gap_no = any (p_gap_nos);
    p_cursor.gaps := array(select g from unnest(p_cursor.gaps) g where g <> all (p_gap_nos));
    return p_cursor;
end $$;

-- Merges small gaps with the same publishers. If too many gaps remain, it merges all small ones: a merged gap is read
-- when a publisher of any part has ended, and closes when the publishers of all parts have. A large gap stays, so that
-- a gap that keeps growing is not rewritten by every take. Call merge_gaps() only after shrink_gaps(): a merge before
-- it would keep ids that were found. Returns the cursor.
create or replace function _pgqueue.merge_gaps(p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql as $$
declare
    v_merged record;
begin
    for v_all in 0..1 loop
        for v_merged in
            select array_agg(gap_no) as gap_nos, range_agg(publication_ids) as ids, bool_or(look) as look,
                   array(select distinct w
                         from unnest(string_to_array(string_agg(array_to_string(publishers, ','), ','), ',')) w
                         where w <> '' order by w) as who
            from pgqueue.consumer_gaps
            where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps)
              and range_count < _pgqueue.limit_gap_ranges() and excluded is null
            group by case when v_all = 0 then publishers end
            having count(*) > 1
        loop
            p_cursor := _pgqueue.delete_gaps(p_cursor, v_merged.gap_nos);
            p_cursor := _pgqueue.record_gap(p_cursor, v_merged.ids, v_merged.who, v_merged.look);
        end loop;
        exit when cardinality(p_cursor.gaps) <= 4 * _pgqueue.limit_gaps();
    end loop;
    return p_cursor;
end $$;

-- The messages in a consumer's gaps that must not be taken; null: none.
create or replace function _pgqueue.excluded(p_cursor pgqueue.consumer_cursors) returns int8multirange
language plpgsql stable as $$
begin
    return (select range_agg(excluded) from pgqueue.consumer_gaps
            where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps));
end $$;

-- All publication ids in a consumer's gaps.
create or replace function _pgqueue.gap_ids(p_cursor pgqueue.consumer_cursors) returns int8multirange
language plpgsql stable as $$
begin
    return (select coalesce(range_agg(publication_ids), '{}') from pgqueue.consumer_gaps
            where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps));
end $$;
