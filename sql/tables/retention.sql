-- Retention: how long the messages of a stream are kept, where they are stored then, and which are gone.

-- The rules of a stream. A stream without a row keeps all messages.
-- on drop_stream
create table if not exists pgqueue.retention (
    stream_id      int         primary key,
    keep_for       interval,
    keep_messages  bigint,
    keep_bytes     bigint,
    until_done     boolean     not null,             -- only until every consumer is done
    unread         text        not null,             -- keep, or drop: what a consumer still owes
    keep_dead      interval,                         -- dead letters; null: for ever
    trim_from      bigint      not null default 1,   -- publications before this one were looked at in this round
    maintained_at  timestamptz                       -- maintain() was here, within a minute
);

-- The segments of a stream that has or had a retention: messages_<stream_id>_<segment> for the numbers from lo to
-- below hi. Numbers of no segment are in messages_<stream_id>_rest.
-- on drop_stream
create table if not exists pgqueue.segments (
    stream_id          int         not null,
    segment               int         not null,
    lo                 bigint      not null,
    hi                 bigint      not null,
    opened_at          timestamptz,                     -- from when on numbers of it were given out; null: not yet
    closed_at          timestamptz,                     -- since when no more are
    last_seq           bigint,                          -- closed: the last one that was written
    closed_publication bigint,                          -- closed: the last publication id that was given out then
    -- closed: virtual ids of transactions that may still write or publish some of it; null: none, ...
    writers            text[],
    -- ... and then all its publications have ids up to this one
    last_publication   bigint, emptied            boolean     not null default false,
    held_by            text[]      not null default '{}',  -- due, and who or what keeps it
    primary key (stream_id, segment)
);

-- What was trimmed of a stream: so that a missing publication is taken neither for one that was rolled back, nor for a
-- loss.
-- on drop_stream
create table if not exists pgqueue.trims (
    stream_id       int            primary key,
    publication_ids int8multirange not null,
    seqs            int8multirange not null,
    message_count   bigint         not null,
    trimmed_at      timestamptz    not null,
    archive_ids     int8multirange not null default '{}'  -- those that are in the archive, or dead
);

-- The messages that were taken from a consumer before it was done with them.
-- on drop_consumer
create table if not exists pgqueue.skips (
    consumer_id   int            primary key,
    seqs          int8multirange not null,
    message_count bigint         not null,
    skipped_at    timestamptz    not null
);

-- Counts the turns of maintain(): each is for some of the streams, see streams_in_turn().
create sequence if not exists pgqueue.maintain_turns;
