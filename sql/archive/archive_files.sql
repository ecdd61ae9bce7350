-- Reading the archive: where the payloads of a stream's old messages are.

-- Returns the archived segments of a stream, in order: their numbers from lo to below hi, and their files.
-- Each file has a name, below uri and folder; the numbers from lo to below hi; its messages; its bytes and sha256; and
-- the same of its footer. (A file of 0.1.0 has no digests.) What is in the archive may also be stored in Postgres,
-- until it is trimmed.
--   p_lo, p_hi  segments with these numbers alone, from p_lo to below p_hi; null: all
-- Errors: none. Locks: none.
create or replace function pgqueue.archive_files(p_stream_id int, p_lo bigint default null, p_hi bigint default null)
returns table (lo bigint, hi bigint, uri text, folder text, files jsonb)
language sql stable as $$
    select a.lo, a.hi, a.uri, a.folder, a.files from pgqueue.archive_segments a
    where a.stream_id = p_stream_id and a.lo < coalesce(p_hi, 9223372036854775807) and a.hi > coalesce(p_lo, 0)
    order by a.lo
$$;
