-- The archive: readers without a consumer read on in files what was trimmed from Postgres.
--
-- An exporter writes each sealed segment to files (upkeep/export.sql). Only then may the segment be trimmed
-- (claim/retention.sql): its publications move to archive_publications, and count as trimmed for all consumers. For a
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
-- (In PL/pgSQL, as the next two: in SQL, it would become a part of each caller's statement, which the server makes
-- ready also where p_archive is false. That took a third of the time of a read of 100 messages.)
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

-- The publications that a reader of a stream can read, from an id on and below another one.
--   p_archive  whether it reads the archive, too
-- (In SQL, so that it becomes a part of the caller's statement, as the next two.)
create or replace function _pgqueue.readable(p_stream_id int, p_archive boolean, p_from bigint, p_below bigint)
returns table (publication_id bigint, message_count bigint, published_at timestamptz, seqs int8multirange,
               consumers int[])
language sql stable
as $$
    select publication_id, message_count, published_at, seqs, consumers
    from pgqueue.publications
    where stream_id = p_stream_id and publication_id >= p_from and publication_id < p_below
    union all
    select publication_id, message_count, published_at, seqs, consumers
    from _pgqueue.archived_from(p_stream_id, p_from, p_below) where p_archive
$$;

-- The first of these, in the order of ids: p_rows, and the other parts of the last one. (Each table is limited for
-- itself, so that no more is read than is wanted, whatever the statistics say.)
create or replace function _pgqueue.first_readable(p_stream_id int, p_archive boolean, p_from bigint, p_below bigint,
                                                   p_rows bigint)
returns table (publication_id bigint, message_count bigint, published_at timestamptz, seqs int8multirange,
               consumers int[])
language sql stable
as $$
    select * from (
        (select publication_id, message_count, published_at, seqs, consumers from pgqueue.publications
         where stream_id = p_stream_id and publication_id >= p_from and publication_id < p_below
         order by publication_id fetch first (p_rows) rows with ties)
        union all
        select * from _pgqueue.first_in_archive(p_stream_id, p_from, p_below, p_rows) where p_archive) p
    order by publication_id fetch first (p_rows) rows with ties
$$;

-- The last of these below an id, in the same way, the last one first.
create or replace function _pgqueue.last_readable(p_stream_id int, p_archive boolean, p_below bigint, p_rows bigint)
returns table (publication_id bigint, published_at timestamptz, seqs int8multirange)
language sql stable
as $$
    select * from (
        (select publication_id, published_at, seqs from pgqueue.publications
         where stream_id = p_stream_id and publication_id < p_below
         order by publication_id desc fetch first (p_rows) rows with ties)
        union all
        select * from _pgqueue.last_in_archive(p_stream_id, p_below, p_rows) where p_archive) p
    order by publication_id desc fetch first (p_rows) rows with ties
$$;

-- The numbers of the segments of a stream that are in files.
create or replace function _pgqueue.archive_ranges(p_stream_id int) returns int8multirange
language plpgsql stable
as $$
begin
    return (select coalesce(range_agg(int8range(lo, hi)), '{}') from pgqueue.archive_segments
            where stream_id = p_stream_id);
end $$;

-- The bytes of data that sets of messages have, each for itself. The data itself is not read.
create or replace function _pgqueue.data_bytes(p_stream_id int, p_sets int8multirange[]) returns bigint[]
language plpgsql stable
as $$
declare
    v_bytes bigint[];
begin
    execute format(
        'select array_agg(b.bytes order by s.i) from unnest($1) with ordinality s (seqs, i) cross join lateral ('
        'select coalesce(sum(coalesce(octet_length(m.data), octet_length(m.data_bytes))), 0)::bigint as bytes '
        'from unnest(s.seqs) g cross join lateral (select x.data, x.data_bytes from pgqueue.messages_%s x '
        'where x.seq >= lower(g) and x.seq < upper(g) and x.seq >= $2 and x.seq < $3 offset 0) m) b',
        p_stream_id)  -- the bounds of all are for the planner: it leaves out the other tables of the stream
    into v_bytes
    using p_sets, (select min(lower(s)) from unnest(p_sets) s), (select max(upper(s)) from unnest(p_sets) s);
    return v_bytes;
end $$;
