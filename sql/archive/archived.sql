-- The archive: readers without a consumer continue to read trimmed messages from files.
--
-- An exporter writes each sealed segment to files (archive/export.sql). Only then may the segment be trimmed
-- (archive/aging.sql): its publications move to archive_publications, and count as trimmed for all consumers. Readers
-- without a consumer still read them. An offset is a set of publications, and its reader needs their ids, sets and
-- counts, which both tables have. So a plan is the same before and after, and the files only provide the payloads. A
-- row of archive_packs has some thousands of publications.

-- The archives of streams. A stream without a row has none.
-- in use: select format('the archive of stream %s', s.name)
--     from pgqueue.archives join pgqueue.streams s using (stream_id)
-- on drop_stream
-- on retain:
--     union all select stream_id from pgqueue.archives
--     union all select s.stream_id from pgqueue.streams s
--               where exists (select from pgqueue.archive_segments a where a.stream_id = s.stream_id)
create table if not exists pgqueue.archives (
    stream_id int     primary key,
    uri       text,                             -- the folder of new files; null: no new segments are archived
    keep_for  interval,                         -- time that files are kept, from their last message; null: no limit
    dropped   boolean not null default false    -- maintain() removes all segments
);

-- Files that no segment refers to: an exporter is writing them, or has failed, or their segment has left the archive.
-- Exporters delete them.
create table if not exists pgqueue.archive_attempts (
    attempt   uuid        primary key,
    stream_id int         not null,
    segment   int         not null,
    uri       text        not null,
    folder    text        not null,             -- below the uri; the names of the files begin with the attempt
    begun_at  timestamptz not null default clock_timestamp()
);

-- The segments that are in files: the manifest.
-- on drop_stream:
--     perform _pgqueue.discard_files(a) from pgqueue.archive_segments a where a.stream_id = p_stream_id;
--     delete from pgqueue.archive_segments where stream_id = p_stream_id;
-- on numbers:
--     union all values
--         ('seq_%s', true, 'select max(hi) - 1 from pgqueue.archive_segments where stream_id = %1$s'),
--         ('publication_%s', true, 'select max(last_publication) from pgqueue.archive_segments where stream_id = %1$s')
-- on trim:
--     + (select coalesce(range_agg(int8range(lo, hi)), '{}') from pgqueue.archive_segments
--        where stream_id = p_stream_id)
-- on first_seq:
--     , (select min((f ->> 'lo')::bigint)
--        from pgqueue.archive_segments a cross join jsonb_array_elements(a.files) f where a.stream_id = p_stream_id)
-- on recover: delete from pgqueue.archive_attempts;  -- another server may use their files now
create table if not exists pgqueue.archive_segments (
    stream_id        int         not null,
    segment          int         not null,
    lo               bigint      not null,
    hi               bigint      not null,
    attempt          uuid        not null,
    uri              text        not null,
    folder           text        not null,
    incarnation      uuid        not null,      -- of the stream, when it was written
    files            jsonb       not null,      -- as in end_export(); of 0.1.0 without digests
    message_count    bigint      not null,
    bytes            bigint      not null,      -- of the files
    last_publication bigint      not null,      -- all its publications have ids up to this one
    newest_at        timestamptz not null,      -- when the last of them was published
    archived_at      timestamptz not null default clock_timestamp(),
    primary key (stream_id, segment)
);

-- Trimmed publications whose messages are all in files: the columns that readers without a consumer need.
-- on clear_stream
-- on numbers:
--     union all values
--         ('seq_%s', false, 'select max(upper(seqs)) - 1 from pgqueue.archive_publications where stream_id = %1$s'),
--         ('publication_%s', true, 'select max(publication_id) from pgqueue.archive_publications '
--                                  'where stream_id = %1$s'),
--         ('consumers_consumer_id_seq', false, 'select max(c) from pgqueue.archive_publications cross join lateral '
--                                              'unnest(consumers) c')
create table if not exists pgqueue.archive_publications (
    publication_id bigint         not null,
    message_count  bigint         not null,
    data_bytes     bigint         not null,     -- of the data of its messages
    published_at   timestamptz    not null,
    stream_id      int            not null,
    part           int            not null,
    seqs           int8multirange not null,
    consumers      int[],                       -- null: all
    primary key (stream_id, publication_id, part)
);

-- Many archived publications in one row, which needs a tenth of the space: maintain() packs them. The ranges of ids of
-- a stream's packs do not overlap; single rows may be in these ranges too.
-- on clear_stream
-- on numbers:
--     union all values
--         ('publication_%s', true, 'select max(last_publication) from pgqueue.archive_packs where stream_id = %1$s')
create table if not exists pgqueue.archive_packs (
    stream_id         int         not null,
    first_publication bigint      not null,
    last_publication  bigint      not null,
    published_at      timestamptz not null,     -- of the first one
    -- of each publication, or part of one: the difference to the previous one, ...
    ids               bigint[]    not null,
    times             bigint[]    not null,     -- in microseconds
    first_seqs        bigint[]    not null,     -- ... of the lowest number, or 0 without messages; the first one from 0
    message_counts    bigint[]    not null,     -- and the values themselves
    data_bytes        bigint[]    not null,
    seqs              text[],                   -- an element is null where the numbers are one range
    consumers         text[],
    primary key (stream_id, first_publication),
    unique (stream_id, last_publication)
);

-- The publications, or parts of them, in a row of archive_packs, in order.
create or replace function _pgqueue.unpacked(p_pack pgqueue.archive_packs)
returns table (publication_id bigint, message_count bigint, data_bytes bigint, published_at timestamptz,
               seqs int8multirange, consumers int[])
language sql stable as $$
    select p_pack.first_publication + e.id, e.n, e.bytes, p_pack.published_at + e.later * interval '1 microsecond',
           coalesce(e.seqs::int8multirange, int8multirange(int8range(e.lo, e.lo + e.n))), e.consumers::int[]
    from (select u.i, u.n, u.bytes, u.seqs, u.consumers, (sum(u.id) over upto)::bigint as id,
                 (sum(u.later) over upto)::bigint as later, (sum(u.lo) over upto)::bigint as lo
          from unnest(p_pack.ids, p_pack.times, p_pack.first_seqs, p_pack.message_counts, p_pack.data_bytes,
                      p_pack.seqs, p_pack.consumers) with ordinality u (id, later, lo, n, bytes, seqs, consumers, i)
          window upto as (order by u.i rows unbounded preceding)) e
    order by e.i
$$;

-- The publications in the archive of a stream, from an id on and below another one, in no order. With p_rows, at least
-- the first p_rows of these, and the other parts of the last one. (Each pack but the first has limit_packed()
-- publications or more from p_from on.)
-- on read: return query select * from _pgqueue.archived(p_stream_id, p_from, p_below);
-- on read_first:
--     return query select a.publication_id, a.message_count, a.published_at, a.seqs, a.consumers
--                  from _pgqueue.archived(p_stream_id, p_from, p_below, p_rows) a;
create or replace function _pgqueue.archived(p_stream_id int, p_from bigint, p_below bigint,
                                             p_rows bigint default 9223372036854775807)
returns table (publication_id bigint, message_count bigint, data_bytes bigint, published_at timestamptz,
               seqs int8multirange, consumers int[])
language plpgsql stable as $$
#variable_conflict use_column
begin
    return query
        (select publication_id, message_count, data_bytes, published_at, seqs, consumers
         from pgqueue.archive_publications
         where stream_id = p_stream_id and publication_id >= p_from and publication_id < p_below
         order by publication_id fetch first (p_rows) rows with ties)
        union all
        (select u.*
         from (select * from pgqueue.archive_packs
               where stream_id = p_stream_id and last_publication >= p_from and first_publication < p_below
               order by last_publication limit p_rows / _pgqueue.limit_packed() + 2) k
         cross join lateral _pgqueue.unpacked(k) u
         where u.publication_id >= p_from and u.publication_id < p_below);
end $$;

-- The last publications below an id, in the same way.
-- on read_last: return query select * from _pgqueue.last_in_archive(p_stream_id, p_below, p_rows);
create or replace function _pgqueue.last_in_archive(p_stream_id int, p_below bigint, p_rows bigint)
returns table (publication_id bigint, published_at timestamptz, seqs int8multirange)
language plpgsql stable as $$
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
