-- What leaves an archive: segments whose files are older than its keep_for, and all of an archive that was dropped.

-- Takes a bounded part of that out of the archive of a stream. A publication of several segments goes with the first of
-- them. The files stay until an exporter deletes them (pgqueue.archive_attempts). Returns whether there may be more.
-- Locks, to the end of the transaction: the history, if nobody has it; else it does nothing.
create or replace function _pgqueue.expire_archive(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_archive pgqueue.archives;
    v_old     pgqueue.archive_segments;
    v_gone    int8multirange;
begin
    select * into v_archive from pgqueue.archives where stream_id = p_stream_id;
    if not found then
        return false;
    end if;
    select a.* into v_old from pgqueue.archive_segments a
    where a.stream_id = p_stream_id
      and (v_archive.dropped
           or (a.newest_at < clock_timestamp() - v_archive.keep_for
               -- else an exporter would write it again
               and not exists (select from pgqueue.segments s
                               where s.stream_id = a.stream_id and s.segment = a.segment and not s.emptied)))
    order by a.lo limit 1;
    if not found then
        delete from pgqueue.archives a
        where a.stream_id = p_stream_id and (a.dropped or a.uri is null)
          and not exists (select from pgqueue.archive_segments s where s.stream_id = p_stream_id);
        return false;
    elsif not _pgqueue.try_lock_history_alone(p_stream_id) then
        return false;
    end if;
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
        set archive_ids = coalesce(
                (archive_ids - v_gone)
                * (select int8multirange(int8range(min(publication_id), null)) from pgqueue.archive_publications
                   where stream_id = p_stream_id having count(*) > 0), '{}')
        where stream_id = p_stream_id;
        return true;
    end if;
    perform _pgqueue.leave_files(v_old);
    delete from pgqueue.archive_segments where stream_id = p_stream_id and segment = v_old.segment;
    return true;
end $$;

-- Has exporters delete the files of a segment. Those of an earlier incarnation stay: after a restore, another server
-- may go on with them.
create or replace function _pgqueue.leave_files(p_segment pgqueue.archive_segments) returns void
language sql
as $$
    insert into pgqueue.archive_attempts (attempt, stream_id, segment, uri, folder)
    select p_segment.attempt, p_segment.stream_id, p_segment.segment, p_segment.uri, p_segment.folder
    from pgqueue.streams s
    where s.stream_id = p_segment.stream_id and s.incarnation = p_segment.incarnation
      and jsonb_array_length(p_segment.files) > 0
$$;
