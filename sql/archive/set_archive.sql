-- The archive of a stream: starting and ending it, and its view. archive/archived.sql describes how it is read.

-- Starts an archive of a stream: old messages are written to Parquet files before retention deletes them.
-- The command `pgqueue archive run` writes the files, one segment at a time. From this call on, retention trims no
-- segment before it is in files. Readers without a consumer read the files (Spark, option archive); consumers, replay
-- and read only have the messages in Postgres.
--   p_uri   a folder that the exporter and all readers can access: /path, file:///path, s3://bucket/path, or a URI of
--           gs, gcs, abfs, abfss or hdfs; null: no new segments are archived, and readers keep the existing ones
--   p_keep  how long files are kept, from their last message; null: no limit
-- Errors: PQ001; PQ003 also for null if the stream has no archive; PQ006 before maintain() has removed a dropped one.
-- Locks: none that others wait for.
create or replace function pgqueue.set_archive(p_stream text, p_uri text, p_keep interval default null) returns void
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    -- Other roles use the uri with their own credentials. The errors contain no possible secret.
    if p_uri ~ '://.*@' then
        raise exception 'p_uri must not contain a user or a password'
            using errcode = 'PQ003', column = 'p_uri',
                  hint = 'Give the exporter and readers credentials by their environment, or by archiveOptions.';
    elsif p_uri ~ '[?#]' then
        raise exception 'p_uri must not contain options, with ? or #'
            using errcode = 'PQ003', column = 'p_uri',
                  hint = 'Pass options to the exporter with --options, and to Spark with archiveOptions.';
    elsif p_uri !~ '^(/|file:///|(s3|gs|gcs|abfs|abfss|hdfs)://)[^/]' or length(p_uri) > 1000
          or p_uri ~ E'[[:space:][:cntrl:]%\\\\]|[^:/]//|/[.]{1,2}(/|$)' then
        raise exception 'p_uri must be an absolute path, or a URI such as s3://bucket/path of file, s3, gs, gcs, abfs, '
                        'abfss or hdfs, of at most 1,000 characters and without spaces, %%, backslashes, // and .., '
                        'not %', quote_literal(left(p_uri, 100))
            using errcode = 'PQ003', column = 'p_uri';
    elsif p_uri is null then
        perform _pgqueue.check_archive(v_stream);
    end if;
    if exists (select from pgqueue.archives where stream_id = v_stream.stream_id and dropped)
       and exists (select from pgqueue.archive_segments where stream_id = v_stream.stream_id) then
        raise exception 'the archive of stream % was dropped, and still has segments', quote_literal(p_stream)
            using errcode = 'PQ006', column = 'p_stream', hint = 'Call maintain() until these are removed.';
    end if;
    perform _pgqueue.check_age('p_keep', p_keep);
    perform _pgqueue.await(
        'the archive of stream ' || quote_literal(p_stream),
        'insert into pgqueue.archives (stream_id, uri, keep_for) select $1, $2 ->> 0, ($2 ->> 1)::interval '
        'where $2 ->> 0 is not null or exists (select from pgqueue.archives where stream_id = $1) '
        'on conflict (stream_id) do update set uri = excluded.uri, keep_for = excluded.keep_for, dropped = false '
        'returning 0',  -- lock: maintain
        v_stream.stream_id, jsonb_build_array(rtrim(p_uri, '/'), p_keep::text));
end $$;

-- Ends the archive of a stream, and deletes its contents.
-- Calls of maintain() remove the segments, and readers can no longer read them. The next `pgqueue archive run`
-- deletes the files, except those that were written before a recover(). To keep the existing segments without archiving
-- new ones, call set_archive with null.
-- Errors: PQ001; PQ003 for a stream without an archive. Locks: none that others wait for.
create or replace function pgqueue.drop_archive(p_stream text) returns void
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    perform _pgqueue.check_archive(v_stream);
    perform _pgqueue.await(
        'the archive of stream ' || quote_literal(p_stream),
        'update pgqueue.archives set dropped = true, uri = null where stream_id = $1 returning 0',  -- lock: maintain
        v_stream.stream_id);
end $$;

-- Raises PQ003 for a stream without an archive.
create or replace function _pgqueue.check_archive(p_stream pgqueue.streams) returns void
language plpgsql as $$
begin
    if not exists (select from pgqueue.archives where stream_id = p_stream.stream_id) then
        raise exception 'p_stream % has no archive', quote_literal(p_stream.name)
            using errcode = 'PQ003', column = 'p_stream',
                  hint = 'The view pgqueue.stream_archives lists the streams that have one.';
    end if;
end $$;

-- One row per stream with an archive: its folder, its contents, and the segments that are not written yet.
do $view$ begin perform _pgqueue.make_view('stream_archives', $query$
    select s.name as stream, a.uri, a.keep_for, f.segments, f.messages, f.bytes, f.newest_at, f.archived_at,
           w.segments as waiting, w.since as waiting_since, l.attempts,
           case when a.dropped then 'the archive was dropped: maintain() removes its segments'
                when a.uri is null then null
                when not exists (select from pgqueue.segments g where g.stream_id = a.stream_id)
                then 'without a retention, no segment is closed: see set_retention'
                when w.since < clock_timestamp() - interval '1 hour'
                then 'no exporter has written segments for an hour: run pgqueue archive run' end as advice
    from pgqueue.archives a
    join pgqueue.streams s using (stream_id)
    cross join lateral (select count(*) as segments, coalesce(sum(x.message_count), 0)::bigint as messages,
                               coalesce(sum(x.bytes), 0)::bigint as bytes, max(x.newest_at) as newest_at,
                               max(x.archived_at) as archived_at
                        from pgqueue.archive_segments x where x.stream_id = a.stream_id) f
    cross join lateral (select count(*) as segments, min(g.closed_at) as since
                        from pgqueue.segments g
                        where g.stream_id = a.stream_id and a.uri is not null and g.last_publication is not null
                          and not g.emptied
                          and not exists (select from pgqueue.archive_segments x
                                          where x.stream_id = g.stream_id and x.segment = g.segment)) w
    cross join lateral (select count(*) as attempts from pgqueue.archive_attempts x
                        where x.stream_id = a.stream_id) l
$query$); end $view$;
