-- The messages, and which of them are visible. A message is written once and never changes. The state of messages for a
-- consumer is stored in other tables, as sets of sequence numbers (int8multirange).

-- The messages. create_stream creates a partition for each stream: messages_<stream_id>, with primary key (seq) and
-- the checks of the stream's kind. Its sequences are seq_<stream_id> and publication_<stream_id>: see log/numbers.sql.
create table if not exists pgqueue.messages (
    seq         bigint      not null,
    inserted_at timestamptz not null default statement_timestamp(),
    stream_id   int         not null,
    key         text,
    data        text,
    data_bytes  bytea,
    headers     jsonb
) partition by list (stream_id);

-- The publications: what became visible, when, and to which consumers. One id per publishing statement, and one part
-- of it per priority and time.
-- on clear_stream
create table if not exists pgqueue.publications (
    publication_id bigint         not null,
    message_count  bigint         not null,
    published_at   timestamptz    not null,
    deliver_at     timestamptz,                 -- null: at once
    stream_id      int            not null,
    part           int            not null default 0,
    priority       int            not null,
    seqs           int8multirange not null,
    consumers      int[],                       -- null: all, also later ones
    expires_at     timestamptz,                 -- claims from then on make it a dead letter; null: never
    primary key (stream_id, publication_id, part)
);

-- Up to which id all publications of a stream are resolved: visible or dead, for every later read. maintain() records
-- it, for resolve_position().
-- on drop_stream: delete from pgqueue.resolved where stream_id = p_stream_id;  -- lock: resolved
create table if not exists pgqueue.resolved (
    stream_id  int    primary key,
    below      bigint not null,  -- ids below it are
    next_below bigint not null,  -- and those below this one will be, when none of the publishers is open any more
    publishers text[] not null
);
