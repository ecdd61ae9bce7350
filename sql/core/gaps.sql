-- Gaps: what a consumer has not taken of the publications before the last one that it took.
--
-- Commits do not come in the order of publication ids. A take that sees publication 7 and not 5 and 6 notes the gap {5, 6}:
-- their transactions are running, or were rolled back. It must look for them again, and know when it need not:
--   * A producer has the publish lock of the stream, shared, before its publication id, and until it is over for every new
--     snapshot. So right after the look, whoever may still fill the gap holds that lock, or is over and seen by the next look.
--     They are noted with the gap: its publishers.
--   * The next take looks once more, for those that ended in between. After that nothing can have changed in the gap while all of
--     its publishers hold the lock, and it is not looked at.
--   * When none of them held it before a look began, that look is the last: what it does not see was rolled back.
-- Nothing depends on transaction ids, so that an idle transaction anywhere costs nothing, and a restore changes nothing. A prepared
-- transaction keeps its lock; after a restart of the server it has another virtual id, -1/..., and so counts for every gap.

-- What a take has to look into.
--   p_publishers  who holds the publish lock, after the snapshot of the look
-- Returns the rows of the gaps, null when none needs a look.
create or replace function pgqueue._gaps_to_look_into(p_cursor pgqueue.consumer_cursors, p_publishers text[]) returns pgqueue.consumer_gaps[]
language plpgsql
as $$
begin
    return (select array_agg(g) from pgqueue.consumer_gaps g
            where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps)
              and (look or not publishers <@ p_publishers));
end $$;

-- Notes what a look into gaps found.
--   p_looked      the rows that it looked into
--   p_found       the publication ids that it took
--   p_publishers  who held the publish lock before it
--   p_was_cut     it stopped at a limit, and has not seen all
-- Returns the cursor.
create or replace function pgqueue._shrink_gaps(p_cursor pgqueue.consumer_cursors, p_looked pgqueue.consumer_gaps[], p_found int8multirange,
                                                p_publishers text[], p_was_cut boolean) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_gap  pgqueue.consumer_gaps;
    v_left int8multirange;
    v_who  text[];
begin
    foreach v_gap in array p_looked loop
        v_left := v_gap.publication_ids - p_found;
        v_who := case when p_was_cut then v_gap.publishers
                      else array(select w from unnest(p_publishers) w where w = any (v_gap.publishers) or w like '-1/%') end;
        continue when v_gap.look = p_was_cut and v_left = v_gap.publication_ids and v_who = v_gap.publishers;
        p_cursor := pgqueue._forget_gap(p_cursor, v_gap.gap_no);
        if v_left <> '{}' and (p_was_cut or v_who <> '{}') then
            if v_gap.kept is not null and v_left <> v_gap.publication_ids then
                -- of what has left it nothing is kept any more: it may come back
                v_gap.kept := v_gap.kept - coalesce((select range_agg(p.seqs) from unnest(v_gap.publication_ids * p_found) g
                                                     cross join lateral (select seqs from pgqueue.publications
                                                                         where stream_id = (select stream_id from pgqueue.consumers
                                                                                            where consumer_id = p_cursor.consumer_id)
                                                                           and publication_id >= lower(g) and publication_id < upper(g)
                                                                           and seqs && v_gap.kept) p), '{}');
            end if;
            p_cursor := pgqueue._note_gap(p_cursor, v_left, v_who, p_was_cut, v_gap.kept);
        end if;
    end loop;
    return p_cursor;
end $$;

-- Notes a gap. Returns the cursor.
--   p_kept  messages in it that are not to be taken; null: none
create or replace function pgqueue._note_gap(p_cursor pgqueue.consumer_cursors, p_ids int8multirange, p_publishers text[], p_look boolean,
                                             p_kept int8multirange default null)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_gap_no bigint := nextval('pgqueue.gap_numbers');
begin
    insert into pgqueue.consumer_gaps (consumer_id, gap_no, publication_ids, range_count, publishers, look, kept)
    values (p_cursor.consumer_id, v_gap_no, p_ids, (select count(*) from unnest(p_ids)), p_publishers, p_look, nullif(p_kept, '{}'));
    p_cursor.gaps := p_cursor.gaps || v_gap_no;
    return p_cursor;
end $$;

-- Forgets a gap. Returns the cursor.
create or replace function pgqueue._forget_gap(p_cursor pgqueue.consumer_cursors, p_gap_no bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    delete from pgqueue.consumer_gaps where consumer_id = p_cursor.consumer_id and gap_no = p_gap_no;
    p_cursor.gaps := array_remove(p_cursor.gaps, p_gap_no);
    return p_cursor;
end $$;

-- Merges small gaps with the same publishers; and when that leaves too many, all small ones: it looks then, and waits, for the publishers
-- of all of them. A large one is left alone, so that a gap which grows for long is not written anew by every take. Done only when
-- all that a look found has left its gaps: a row that is merged before would bring it back.
-- Returns the cursor.
create or replace function pgqueue._merge_gaps(p_cursor pgqueue.consumer_cursors) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_merged record;
begin
    for v_by_publishers in 0..1 loop
        for v_merged in
            select array_agg(gap_no) as gap_nos, range_agg(publication_ids) as ids, bool_or(look) as look,
                   array(select distinct w from unnest(string_to_array(string_agg(array_to_string(publishers, ','), ','), ',')) w
                         where w <> '' order by w) as who
            from pgqueue.consumer_gaps
            where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps) and range_count < pgqueue._limit_gap_ranges() and kept is null
            group by case when v_by_publishers = 0 then publishers end
            having count(*) > 1
        loop
            delete from pgqueue.consumer_gaps where consumer_id = p_cursor.consumer_id and gap_no = any (v_merged.gap_nos);
            p_cursor.gaps := array(select g from unnest(p_cursor.gaps) g where g <> all (v_merged.gap_nos));
            insert into pgqueue.consumer_gaps (consumer_id, gap_no, publication_ids, range_count, publishers, look)
            values (p_cursor.consumer_id, nextval('pgqueue.gap_numbers'), v_merged.ids, (select count(*) from unnest(v_merged.ids)), v_merged.who, v_merged.look)
            returning p_cursor.gaps || gap_no into p_cursor.gaps;
        end loop;
        exit when cardinality(p_cursor.gaps) <= 4 * pgqueue._limit_gaps();
    end loop;
    return p_cursor;
end $$;

-- The messages in a consumer's gaps that are not to be taken; null: none.
create or replace function pgqueue._kept(p_cursor pgqueue.consumer_cursors) returns int8multirange
language plpgsql stable
as $$
begin
    return (select range_agg(kept) from pgqueue.consumer_gaps where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps));
end $$;

-- All that a consumer has not taken below the end of what it took.
create or replace function pgqueue._gap_ids(p_cursor pgqueue.consumer_cursors) returns int8multirange
language plpgsql stable
as $$
begin
    return (select coalesce(range_agg(publication_ids), '{}') from pgqueue.consumer_gaps
            where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps));
end $$;
