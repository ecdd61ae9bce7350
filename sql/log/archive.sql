-- The archive: readers without a consumer read on in files what was trimmed from Postgres.
--
-- An exporter writes each sealed segment to files (upkeep/export.sql). Only then may the segment be trimmed
-- (claim/archive.sql): its publications move to archive_publications, and count as trimmed for all consumers. For a
-- reader without a consumer they count as if nothing had happened. An offset is a set of publications, and its reader
-- needs their ids, sets and counts, which both tables have. So a plan is the same before and after, and the files only
-- answer what the message of a number says. Where publications are many, a row of archive_packs has some thousands.

-- The publications, or parts of some, of a row of archive_packs, in order.
create or replace function _pgqueue.unpacked(p_pack pgqueue.archive_packs)
returns table (publication_id bigint, message_count bigint, data_bytes bigint, published_at timestamptz,
               seqs int8multirange, consumers int[])
language sql stable
as $$
    select p_pack.first_publication + e.id, e.n, e.bytes, p_pack.published_at + e.later * interval '1 microsecond',
           coalesce(e.seqs::int8multirange, int8multirange(int8range(e.lo, e.lo + e.n))), e.consumers::int[]
    from (select u.i, u.n, u.bytes, u.seqs, u.consumers, (sum(u.id) over upto)::bigint as id,
                 (sum(u.later) over upto)::bigint as later, (sum(u.lo) over upto)::bigint as lo
          from unnest(p_pack.ids, p_pack.times, p_pack.first_seqs, p_pack.message_counts, p_pack.data_bytes,
                      p_pack.seqs, p_pack.consumers) with ordinality u (id, later, lo, n, bytes, seqs, consumers, i)
          window upto as (order by u.i rows unbounded preceding)) e
    order by e.i
$$;

-- The publications in the archive of a stream, from an id on and below another one.
-- on read: return query select * from _pgqueue.archived_from(p_stream_id, p_from, p_below);
create or replace function _pgqueue.archived_from(p_stream_id int, p_from bigint, p_below bigint)
returns table (publication_id bigint, message_count bigint, data_bytes bigint, published_at timestamptz,
               seqs int8multirange, consumers int[])
language plpgsql stable
as $$
#variable_conflict use_column
begin
    return query
        select publication_id, message_count, data_bytes, published_at, seqs, consumers
        from pgqueue.archive_publications
        where stream_id = p_stream_id and publication_id >= p_from and publication_id < p_below
        union all
        select u.*
        from pgqueue.archive_packs k cross join lateral _pgqueue.unpacked(k) u
        where k.stream_id = p_stream_id and k.last_publication >= p_from and k.first_publication < p_below
          and u.publication_id >= p_from and u.publication_id < p_below;
end $$;

-- The first of these, in no order: at least p_rows, and the other parts of the last one. (Each pack but the first has
-- limit_packed() publications or more from p_from on.)
-- on read_first: return query select * from _pgqueue.first_in_archive(p_stream_id, p_from, p_below, p_rows);
create or replace function _pgqueue.first_in_archive(p_stream_id int, p_from bigint, p_below bigint, p_rows bigint)
returns table (publication_id bigint, message_count bigint, published_at timestamptz, seqs int8multirange,
               consumers int[])
language plpgsql stable
as $$
#variable_conflict use_column
begin
    return query
        (select publication_id, message_count, published_at, seqs, consumers from pgqueue.archive_publications
         where stream_id = p_stream_id and publication_id >= p_from and publication_id < p_below
         order by publication_id fetch first (p_rows) rows with ties)
        union all
        (select u.publication_id, u.message_count, u.published_at, u.seqs, u.consumers
         from (select * from pgqueue.archive_packs
               where stream_id = p_stream_id and last_publication >= p_from and first_publication < p_below
               order by last_publication limit p_rows / _pgqueue.limit_packed() + 2) k
         cross join lateral _pgqueue.unpacked(k) u
         where u.publication_id >= p_from and u.publication_id < p_below);
end $$;

-- The last of these below an id, in the same way.
-- on read_last: return query select * from _pgqueue.last_in_archive(p_stream_id, p_below, p_rows);
create or replace function _pgqueue.last_in_archive(p_stream_id int, p_below bigint, p_rows bigint)
returns table (publication_id bigint, published_at timestamptz, seqs int8multirange)
language plpgsql stable
as $$
#variable_conflict use_column
begin
    return query
        (select publication_id, published_at, seqs from pgqueue.archive_publications
         where stream_id = p_stream_id and publication_id < p_below
         order by publication_id desc fetch first (p_rows) rows with ties)
        union all
        (select u.publication_id, u.published_at, u.seqs
         from (select * from pgqueue.archive_packs
               where stream_id = p_stream_id and first_publication < p_below
               order by first_publication desc limit p_rows / _pgqueue.limit_packed() + 2) k
         cross join lateral _pgqueue.unpacked(k) u
         where u.publication_id < p_below);
end $$;

-- The numbers of the segments of a stream that are in files.
-- on trim: + _pgqueue.archive_ranges(p_stream_id)
create or replace function _pgqueue.archive_ranges(p_stream_id int) returns int8multirange
language plpgsql stable
as $$
begin
    return (select coalesce(range_agg(int8range(lo, hi)), '{}') from pgqueue.archive_segments
            where stream_id = p_stream_id);
end $$;

-- The first message of a stream that is in files; null: none is.
-- on first_seq: , _pgqueue.first_in_files(p_stream_id)
create or replace function _pgqueue.first_in_files(p_stream_id int) returns bigint
language sql stable
as $$
    select min((f ->> 'lo')::bigint) from pgqueue.archive_segments a cross join jsonb_array_elements(a.files) f
    where a.stream_id = p_stream_id
$$;
