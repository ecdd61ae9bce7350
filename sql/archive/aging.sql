-- Retention and the archive of a stream: retention trims only messages that are in files, and moves their publications
-- to the archive, where they are packed later. Segments leave the archive when their files are older than its keep_for,
-- or when the archive was dropped.

-- Packs the next publications in the archive of a stream into one row. Returns whether there were enough. Late ones,
-- with ids below the last pack, are not packed. Locks: none; the caller holds the maintenance of the stream.
create or replace function _pgqueue.pack(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_from bigint := coalesce((select max(last_publication) + 1 from pgqueue.archive_packs
                               where stream_id = p_stream_id), 1);
begin
    with next as materialized (
        select publication_id from pgqueue.archive_publications
        where stream_id = p_stream_id and publication_id >= v_from
        order by publication_id
        fetch first (_pgqueue.limit_packed()) rows with ties
    ), gone as (
        delete from pgqueue.archive_publications
        where stream_id = p_stream_id and publication_id >= v_from
          and publication_id <= (select max(publication_id) from next having count(*) >= _pgqueue.limit_packed())
        returning *
    ), packed as (
        select p.*, publication_id - lag(publication_id, 1, publication_id) over by_id as id,
               published_at - lag(published_at, 1, published_at) over by_id as later,
               first_seq - lag(first_seq, 1, 0::bigint) over by_id as lo
        from (select g.*, coalesce(lower(seqs), 0) as first_seq, upper(seqs) - lower(seqs) = message_count as is_range
              from gone g) p
        window by_id as (order by publication_id, part)
    )
    insert into pgqueue.archive_packs (stream_id, first_publication, last_publication, published_at, ids, times,
                                       first_seqs, message_counts, data_bytes, seqs, consumers)
    select p_stream_id, min(publication_id), max(publication_id), (array_agg(published_at))[1], array_agg(id),
           array_agg((extract(epoch from later) * 1000000)::bigint), array_agg(lo), array_agg(message_count),
           array_agg(data_bytes),
           case when not bool_and(is_range is true)
                then array_agg(case when is_range then null else seqs::text end) end,
           case when count(consumers) > 0 then array_agg(consumers::text) end
    from (select * from packed order by publication_id, part) p having count(*) > 0;
    return found;
end $$;

-- Unpacks one pack that has publications of a segment, if there is one.
create or replace function _pgqueue.unpack(p_segment pgqueue.archive_segments) returns void
language sql as $$
    with old as (
        delete from pgqueue.archive_packs k
        where (stream_id, first_publication) = (
            select k.stream_id, k.first_publication from pgqueue.archive_packs k
            where k.stream_id = p_segment.stream_id and k.first_publication <= p_segment.last_publication
              and exists (select from _pgqueue.unpacked(k) u where u.seqs && int8range(p_segment.lo, p_segment.hi))
            order by k.first_publication limit 1)
        returning k
    )
    insert into pgqueue.archive_publications
        (publication_id, message_count, data_bytes, published_at, stream_id, part, seqs, consumers)
    select u.publication_id, u.message_count, u.data_bytes, u.published_at, p_segment.stream_id,
           row_number() over (partition by u.publication_id order by lower(u.seqs)) - 1, u.seqs, u.consumers
    from old cross join lateral _pgqueue.unpacked(old.k) u
$$;

-- Why a due segment of a stream cannot be trimmed: its exporter has not written it. Null: it can.
-- on hold: , _pgqueue.awaits_export(p_stream_id, p_segment)
create or replace function _pgqueue.awaits_export(p_stream_id int, p_segment int) returns text
language sql stable as $$
    select 'the archive, to which it has not been exported'
    where exists (select from pgqueue.archives
                  where stream_id = p_stream_id and uri is not null and not dropped)
      and not exists (select from pgqueue.archive_segments where stream_id = p_stream_id and segment = p_segment)
$$;

-- Moves trimmed publications to the archive. All their messages are in files, and are still stored.
-- on trimmed: perform _pgqueue.move_to_archive(p_stream_id, p_publications);
create or replace function _pgqueue.move_to_archive(p_stream_id int, p_publications pgqueue.publications[]) returns void
language plpgsql as $$
declare
    v_bytes bigint[] := _pgqueue.data_bytes(p_stream_id, array(select seqs from unnest(p_publications) with ordinality p
                                                               order by p.ordinality));
begin
    insert into pgqueue.archive_publications
        (publication_id, message_count, data_bytes, published_at, stream_id, part, seqs, consumers)
    select p.publication_id, p.message_count, v_bytes[p.ordinality], p.published_at, p.stream_id, p.part, p.seqs,
           p.consumers
    from unnest(p_publications) with ordinality p;
end $$;

-- Removes a bounded part of expired segments from the archive of a stream. A publication of several segments is removed
-- with the first of them. The files remain until an exporter deletes them (pgqueue.archive_attempts). A segment without
-- an archive expires too: its exporter recorded it after the archive was dropped and removed. Returns whether there may
-- be more. Locks, to the end of the transaction: the history, if it is free; else it does nothing.
-- on retained:
--     v_more := _pgqueue.expire_archive(p_stream_id) or v_more;
--     v_more := _pgqueue.pack(p_stream_id) or v_more;
create or replace function _pgqueue.expire_archive(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_old  pgqueue.archive_segments;
    v_gone int8multirange;
begin
    select a.* into v_old from pgqueue.archive_segments a left join pgqueue.archives v using (stream_id)
    where stream_id = p_stream_id
      and (v.dropped is not false  -- null: there is no archive
           or (a.newest_at < clock_timestamp() - v.keep_for
               -- else an exporter would write it again
               and not exists (select from pgqueue.segments s
                               where s.stream_id = a.stream_id and s.segment = a.segment and not s.emptied)))
    order by a.lo limit 1;
    if not found then
        delete from pgqueue.archives a
        where a.stream_id = p_stream_id
          and (a.dropped
               or (a.uri is null
                   -- else the segment of an exporter that is still writing would expire
                   and not exists (select from pgqueue.archive_attempts t where t.stream_id = p_stream_id)))
          and not exists (select from pgqueue.archive_segments s where s.stream_id = p_stream_id);
        return false;
    elsif not _pgqueue.try_lock_history_alone(p_stream_id) then
        return false;
    end if;
    perform _pgqueue.unpack(v_old);
    with old as materialized (
        select publication_id from pgqueue.archive_publications
        where stream_id = p_stream_id and publication_id <= v_old.last_publication
          and seqs && int8range(v_old.lo, v_old.hi)
        order by publication_id
        fetch first (_pgqueue.limit_unarchived()) rows with ties
    ), gone as (
        delete from pgqueue.archive_publications
        where stream_id = p_stream_id and publication_id in (select publication_id from old)
        returning publication_id
    )
    select range_agg(int8range(publication_id, publication_id, '[]')) into v_gone from gone;
    if v_gone is not null then
        update pgqueue.trims
        set archive_ids = (archive_ids - v_gone) * int8multirange(int8range(least(
            (select min(publication_id) from pgqueue.archive_publications where stream_id = p_stream_id),
            (select min(first_publication) from pgqueue.archive_packs where stream_id = p_stream_id)), null))
        where stream_id = p_stream_id;
        return true;
    end if;
    perform _pgqueue.discard_files(v_old);
    delete from pgqueue.archive_segments where stream_id = p_stream_id and segment = v_old.segment;
    return true;
end $$;

-- Marks the files of a segment for deletion by exporters. Files of an earlier incarnation remain: after a restore,
-- another server may use them.
create or replace function _pgqueue.discard_files(p_segment pgqueue.archive_segments) returns void
language sql as $$
    insert into pgqueue.archive_attempts (attempt, stream_id, segment, uri, folder)
    select p_segment.attempt, p_segment.stream_id, p_segment.segment, p_segment.uri, p_segment.folder
    from pgqueue.streams s
    where s.stream_id = p_segment.stream_id and s.incarnation = p_segment.incarnation
      and jsonb_array_length(p_segment.files) > 0
$$;
