-- The publications that a reader without a consumer can read: those that are stored, and those that were trimmed and
-- are in the archive, in one order.

-- The publications that a reader of a stream can read, from an id on and below another one.
--   p_archive  whether it also reads the archive: the trimmed publications that on_read() and the like return. (These
--              are in PL/pgSQL: SQL functions would be inlined into each caller's statement, and planned and started
--              even if p_archive is false. That took a third of the time of a read of 100 messages.)
-- (In SQL, so that it is inlined into the caller's statement, as the next two.)
create or replace function _pgqueue.readable(p_stream_id int, p_archive boolean, p_from bigint, p_below bigint)
returns table (publication_id bigint, message_count bigint, published_at timestamptz, seqs int8multirange,
               consumers int[])
language sql stable as $$
    select publication_id, message_count, published_at, seqs, consumers
    from pgqueue.publications
    where stream_id = p_stream_id and publication_id >= p_from and publication_id < p_below
    union all
    select publication_id, message_count, published_at, seqs, consumers
    from _pgqueue.on_read(p_stream_id, p_from, p_below) where p_archive
$$;

-- The first of these, in the order of ids: p_rows, and the other parts of the last one. (Each table has its own limit,
-- so that no more is read than needed, even with wrong statistics.)
create or replace function _pgqueue.first_readable(p_stream_id int, p_archive boolean, p_from bigint, p_below bigint,
                                                   p_rows bigint)
returns table (publication_id bigint, message_count bigint, published_at timestamptz, seqs int8multirange,
               consumers int[])
language sql stable as $$
    select * from (
        (select publication_id, message_count, published_at, seqs, consumers from pgqueue.publications
         where stream_id = p_stream_id and publication_id >= p_from and publication_id < p_below
         order by publication_id fetch first (p_rows) rows with ties)
        union all
        select * from _pgqueue.on_read_first(p_stream_id, p_from, p_below, p_rows) where p_archive) p
    order by publication_id fetch first (p_rows) rows with ties
$$;

-- The last of these below an id, in descending order.
create or replace function _pgqueue.last_readable(p_stream_id int, p_archive boolean, p_below bigint, p_rows bigint)
returns table (publication_id bigint, published_at timestamptz, seqs int8multirange)
language sql stable as $$
    select * from (
        (select publication_id, published_at, seqs from pgqueue.publications
         where stream_id = p_stream_id and publication_id < p_below
         order by publication_id desc fetch first (p_rows) rows with ties)
        union all
        select * from _pgqueue.on_read_last(p_stream_id, p_below, p_rows) where p_archive) p
    order by publication_id desc fetch first (p_rows) rows with ties
$$;

-- The bytes of data of each of some sets of messages. The data itself is not read.
create or replace function _pgqueue.data_bytes(p_stream_id int, p_sets int8multirange[]) returns bigint[]
language plpgsql stable as $$
declare
    v_bytes bigint[];
begin
    execute format(
        'select array_agg(b.bytes order by s.i) from unnest($1) with ordinality s (seqs, i) cross join lateral ('
        'select coalesce(sum(coalesce(octet_length(m.data), octet_length(m.data_bytes))), 0)::bigint as bytes '
        'from unnest(s.seqs) g cross join lateral (select x.data, x.data_bytes from pgqueue.messages_%s x '
        'where x.seq >= lower(g) and x.seq < upper(g) and x.seq >= $2 and x.seq < $3 offset 0) m) b',
        p_stream_id)  -- the bounds of all sets are for the planner, which excludes other segments
    into v_bytes
    using p_sets, (select min(lower(s)) from unnest(p_sets) s), (select max(upper(s)) from unnest(p_sets) s);
    return v_bytes;
end $$;
