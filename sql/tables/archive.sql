-- The archive: old messages of a stream in files, and what Postgres keeps of them. (The history of a consumer, in
-- archived_messages, is something else.)

-- Where a stream's old messages go. A stream without a row has no archive.
-- on drop_stream
-- on retain: union all select stream_id from pgqueue.archives
create table if not exists pgqueue.archives (
    stream_id int     primary key,
    uri       text,                             -- the folder of new files; null: no more segments go there
    keep_for  interval,                         -- files, from the last message in them; null: for ever
    dropped   boolean not null default false    -- maintain() takes all of it away
);

-- Files that no segment names: an exporter writes them, or has written them and died, or their segment has left the
-- archive. Exporters delete them.
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
--     perform _pgqueue.leave_files(a) from pgqueue.archive_segments a where a.stream_id = p_stream_id;
--     delete from pgqueue.archive_segments where stream_id = p_stream_id;
-- on numbers:
--     union all values
--         ('seq_%s', true, 'select max(hi) - 1 from pgqueue.archive_segments where stream_id = %1$s'),
--         ('publication_%s', true, 'select max(last_publication) from pgqueue.archive_segments where stream_id = %1$s')
-- on recover: delete from pgqueue.archive_attempts;  -- their files may be another server's now
create table if not exists pgqueue.archive_segments (
    stream_id        int         not null,
    segment          int         not null,
    lo               bigint      not null,
    hi               bigint      not null,
    attempt          uuid        not null,
    uri              text        not null,
    folder           text        not null,
    incarnation      uuid        not null,      -- of the stream, when it was written
    files            jsonb       not null,      -- of each what end_export() takes; of 0.1.0 without digests
    message_count    bigint      not null,
    bytes            bigint      not null,      -- of the files
    last_publication bigint      not null,      -- all its publications have ids up to this one
    newest_at        timestamptz not null,      -- when the last of them was published
    archived_at      timestamptz not null default clock_timestamp(),
    primary key (stream_id, segment)
);

-- Publications that were trimmed, and whose messages are all in files: what readers without a consumer need of them.
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

-- Many of these as one row, which takes a tenth of the space: maintain() packs them. No two packs of a stream have
-- publications of the same range of ids; single rows may lie in that range, too.
-- on clear_stream
-- on numbers:
--     union all values
--         ('publication_%s', true, 'select max(last_publication) from pgqueue.archive_packs where stream_id = %1$s')
create table if not exists pgqueue.archive_packs (
    stream_id         int         not null,
    first_publication bigint      not null,
    last_publication  bigint      not null,
    published_at      timestamptz not null,     -- of the first one
    -- of each publication, or part of one: how far it is behind the one before, ...
    ids               bigint[]    not null,
    times             bigint[]    not null,     -- in microseconds
    first_seqs        bigint[]    not null,     -- ... by its lowest number, or 0 without messages; the first one from 0
    message_counts    bigint[]    not null,     -- and as it is
    data_bytes        bigint[]    not null,
    seqs              text[],                   -- an element is null where the numbers are one range
    consumers         text[],
    primary key (stream_id, first_publication),
    unique (stream_id, last_publication)
);
