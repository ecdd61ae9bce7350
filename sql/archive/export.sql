-- Exporting: the functions with which `pgqueue archive run` writes segments to the files of an archive.
--
-- An exporter has two connections. The first one has a transaction with the export lock of the stream, from
-- lock_export() to end_export(), so that a dead exporter blocks no other. On the second one
--   1. begin_export() selects the first sealed segment that is in no file, and commits an attempt, which names its
--      files;
--   2. export_slices() divides the segment, and for each slice export_ranges() returns the publications of the
--      messages. The exporter reads the messages by COPY and writes them. A sealed segment does not change, and it is
--      not trimmed before it is in the archive.
-- After the files are closed and read back, end_export() compares them with the publications, and records the segment.
-- If the exporter dies before that commit, no segment refers to the files of the attempt, and the next exporter deletes
-- them.

-- Returns the streams with something to export or to delete, including dropped ones.
create or replace function pgqueue.export_streams() returns table (stream_id int, stream text)
language sql stable as $$
    select i.id, s.name
    from (select a.stream_id from pgqueue.archives a where a.uri is not null
          union select t.stream_id from pgqueue.archive_attempts t) i (id)
    left join pgqueue.streams s on s.stream_id = i.id
    order by i.id
$$;

-- Locks the export of a stream to the end of the transaction, if no other exporter holds it. Returns whether the caller
-- holds the lock. Errors: none. Locks: the export.
create or replace function pgqueue.lock_export(p_stream_id int) returns boolean
language sql as $$
    select pg_try_advisory_xact_lock(_pgqueue.lock_class_export(), p_stream_id)  -- lock: export
$$;

-- Begins the export of the next segment of a stream; returns no row if there is none. The names of the files begin with
-- the attempt. The caller has the export lock, on another connection. Errors: none. Locks: none.
create or replace function pgqueue.begin_export(p_stream_id int)
returns table (attempt uuid, segment int, uri text, folder text, kind text)
language sql as $$
    with next as (
        select s.stream_id, g.segment, a.uri, format('%s/%s', s.incarnation, g.segment) as folder, s.kind
        from pgqueue.archives a
        join pgqueue.streams s using (stream_id)
        join pgqueue.segments g using (stream_id)
        where a.stream_id = p_stream_id and a.uri is not null and g.last_publication is not null and not g.emptied
          and not exists (select from pgqueue.archive_segments x
                          where x.stream_id = g.stream_id and x.segment = g.segment)
        order by g.lo limit 1
    ), attempt as (
        insert into pgqueue.archive_attempts (attempt, stream_id, segment, uri, folder)
        select gen_random_uuid(), n.stream_id, n.segment, n.uri, n.folder from next n
        returning archive_attempts.attempt
    )
    select o.attempt, n.segment, n.uri, n.folder, n.kind from next n cross join attempt o
$$;

-- The segment of an attempt. Errors: PQ008 when another exporter has ended the attempt, or the segment is gone.
create or replace function _pgqueue.segment_of(p_attempt uuid) returns pgqueue.segments
language plpgsql stable as $$
declare
    v_segment pgqueue.segments;
begin
    select g.* into v_segment
    from pgqueue.archive_attempts t join pgqueue.segments g using (stream_id, segment)
    where t.attempt = p_attempt and not g.emptied;
    if not found then
        raise exception 'another exporter has ended this attempt, or its segment is no longer stored'
            using errcode = 'PQ008', hint = 'Run the export again: the next attempt writes the remaining segments.';
    end if;
    return v_segment;
end $$;

-- The publications of a sealed segment, which are complete.
create or replace function _pgqueue.publications_in(p_segment pgqueue.segments, p_from bigint default 1)
returns table (publication_id bigint, part int, published_at timestamptz, deliver_at timestamptz,
               expires_at timestamptz, priority int, consumers int[], seqs int8multirange)
language sql stable as $$
    select p.publication_id, p.part, p.published_at, p.deliver_at, p.expires_at, p.priority, p.consumers,
           p.seqs * int8multirange(int8range(p_segment.lo, p_segment.hi))
    from pgqueue.publications p
    where p.stream_id = p_segment.stream_id and p.publication_id >= p_from
      and p.publication_id <= p_segment.last_publication and p.seqs && int8range(p_segment.lo, p_segment.hi)
$$;

-- Divides the segment of an attempt into slices of limit_exported() numbers, with the publication ids of each. A stream
-- that was filled before its first maintain() has one segment, of any size.
-- Errors: PQ008. Locks: none.
create or replace function pgqueue.export_slices(p_attempt uuid)
returns table (lo bigint, hi bigint, from_publication bigint, to_publication bigint)
language sql stable as $$
    select k * size, (k + 1) * size, min(p.publication_id), max(p.publication_id)
    from _pgqueue.segment_of(p_attempt) s cross join _pgqueue.limit_exported() size
    cross join lateral _pgqueue.publications_in(s) p
    cross join lateral unnest(p.seqs) g
    cross join lateral generate_series(lower(g) / size, (upper(g) - 1) / size) k
    group by k, size order by k
$$;

-- Returns the messages of a slice as ranges in order, with columns of their publications. Consumers are names; null:
-- all. Errors: PQ008. Locks: none.
create or replace function pgqueue.export_ranges(p_attempt uuid, p_lo bigint, p_hi bigint, p_from bigint, p_to bigint)
returns table (lo bigint, hi bigint, publication_id bigint, published_at timestamptz, deliver_at timestamptz,
               expires_at timestamptz, priority int, consumers text[])
language sql stable as $$
    select greatest(lower(g), p_lo), least(upper(g), p_hi), p.publication_id, _pgqueue.clamp(p.published_at),
           _pgqueue.clamp(p.deliver_at), _pgqueue.clamp(p.expires_at), p.priority, _pgqueue.consumer_names(p.consumers)
    from _pgqueue.segment_of(p_attempt) s
    cross join lateral _pgqueue.publications_in(s, p_from) p
    cross join lateral unnest(p.seqs) g
    where p.publication_id <= p_to and lower(g) < p_hi and upper(g) > p_lo
    order by 1
$$;

-- Raises PQ003 unless files are described as by the exporter of an attempt, because readers rely on it.
-- Errors: PQ003.
create or replace function _pgqueue.check_files(p_attempt uuid, p_segment pgqueue.segments, p_files jsonb) returns void
language plpgsql as $$
declare
    v_file jsonb;
    v_n    bigint;
    v_from bigint := p_segment.lo;
begin
    if jsonb_typeof(p_files) is distinct from 'array' then
        raise exception 'p_files must be an array of files, not %', coalesce(left(p_files::text, 100), 'null')
            using errcode = 'PQ003', column = 'p_files';
    end if;
    for v_file, v_n in select x.f, x.n from jsonb_array_elements(p_files) with ordinality x (f, n) order by x.n loop
        if _pgqueue.is_file(v_file)
           and v_file ->> 'name' = format('%s-%s.parquet', p_attempt, v_n)
           and (v_file ->> 'lo')::bigint >= v_from
           and (v_file ->> 'hi')::bigint <= p_segment.hi
           and (v_file ->> 'messages')::bigint between 1 and (v_file ->> 'hi')::bigint - (v_file ->> 'lo')::bigint
           and (v_file ->> 'footer_bytes')::bigint between 1 and (v_file ->> 'bytes')::bigint then
            v_from := (v_file ->> 'hi')::bigint;
        else
            raise exception 'p_files must be files as the exporter of attempt % writes them, but file % is: %',
                            p_attempt, v_n, left(v_file::text, 500)
                using errcode = 'PQ003', column = 'p_files';
        end if;
    end loop;
end $$;

-- Whether a JSON object has the names and types of a file.
create or replace function _pgqueue.is_file(p_file jsonb) returns boolean
language sql immutable as $$
    select count(*) = 8 and bool_and(case
        when e.key in ('lo', 'hi', 'messages', 'bytes', 'footer_bytes') then e.value::text ~ '^[0-9]{1,18}$'
        when e.key in ('sha256', 'footer_sha256') then e.value::text ~ '^"[0-9a-f]{64}"$'
        else e.key = 'name' end)
    from jsonb_each(case when jsonb_typeof(p_file) = 'object' then p_file end) e
$$;

-- Records that the segment of an attempt is in files, which were read back. Returns the number of messages.
--   p_files  an array of objects, one for each file in order: name, which is <attempt>-<n>.parquet with n from 1 on; lo
--            and hi of its numbers; messages; bytes and sha256 of it; footer_bytes and footer_sha256 of its footer
-- Errors: PQ003; PQ008 when the files do not have all messages of the segment, or another exporter has ended the
-- attempt; 55P03 when another exporter has the export lock. Locks: the export; the stream.
create or replace function pgqueue.end_export(p_attempt uuid, p_files jsonb) returns bigint
language plpgsql as $$
declare
    v_segment   pgqueue.segments := _pgqueue.segment_of(p_attempt);
    v_stored    record;
    v_published record;
begin
    perform _pgqueue.check_files(p_attempt, v_segment, p_files);
    if not pgqueue.lock_export(v_segment.stream_id) then
        raise exception 'another exporter is writing this stream' using errcode = 'lock_not_available';
    end if;
    -- so that drop_stream() sees the segment: nothing would remove it afterwards
    perform _pgqueue.await('stream ' || v_segment.stream_id,
                           'select 0 from pgqueue.streams where stream_id = $1 for key share',  -- lock: stream
                           v_segment.stream_id);
    v_segment := _pgqueue.segment_of(p_attempt);  -- again: the stream may be gone, or the attempt
    select coalesce(sum((f ->> 'messages')::bigint), 0) as messages, coalesce(sum((f ->> 'bytes')::bigint), 0) as bytes
    into v_stored from jsonb_array_elements(p_files) f;
    select coalesce(sum(_pgqueue.cardinality(p.seqs)), 0) as messages, max(p.published_at) as newest_at
    into v_published from _pgqueue.publications_in(v_segment) p;
    if v_stored.messages <> v_published.messages then
        raise exception 'the files contain %, but segment % contains %',
                        _pgqueue.counted(v_stored.messages::bigint, 'message'), v_segment.segment, v_published.messages
            using errcode = 'PQ008', hint = 'Nothing was recorded. The next attempt writes the segment again.';
    end if;
    insert into pgqueue.archive_segments (stream_id, segment, lo, hi, attempt, uri, folder, incarnation, files,
                                          message_count, bytes, last_publication, newest_at)
    select s.stream_id, t.segment, v_segment.lo, v_segment.hi, t.attempt, t.uri, t.folder, s.incarnation, p_files,
           v_stored.messages, v_stored.bytes, v_segment.last_publication,
           coalesce(v_published.newest_at, clock_timestamp())
    from pgqueue.archive_attempts t join pgqueue.streams s using (stream_id) where t.attempt = p_attempt;
    delete from pgqueue.archive_attempts where attempt = p_attempt;
    return v_stored.messages;
end $$;

-- Returns the attempts of a stream whose files no segment refers to, for the caller to delete. None if the database is
-- on another server than recorded, because the archive may be in use there (recover()). The caller has the export lock.
-- Errors: none. Locks: none.
create or replace function pgqueue.export_leftovers(p_stream_id int) returns table (attempt uuid, uri text, folder text)
language sql stable as $$
    select t.attempt, t.uri, t.folder from pgqueue.archive_attempts t
    where t.stream_id = p_stream_id and not _pgqueue.is_elsewhere()
$$;

-- Deletes the record of an attempt whose files were deleted. Errors: none. Locks: none that others wait for.
create or replace function pgqueue.forget_leftover(p_attempt uuid) returns void
language sql as $$ delete from pgqueue.archive_attempts where attempt = p_attempt $$;
