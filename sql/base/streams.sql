-- Streams, and the streams that they are copied to. log/messages.sql has their messages and publications.
--
-- Only the database's clock is used. The hot tables have no foreign keys: a check per row would lock the consumer's
-- row for every claim. drop_stream and drop_consumer delete the rows that belong to them, as hooks.sql says.

create table if not exists pgqueue.streams (
    stream_id  int         generated always as identity primary key,
    name       text        not null unique,
    kind       text        not null check (kind in ('text', 'json', 'binary')),
    -- notify waiting workers at each publication; off: they find it by polling
    notify     boolean     not null,
    created_at timestamptz not null default clock_timestamp(),
    -- the names of the settings that were set, as for consumers
    given            text[] not null default '{}',
    max_bytes        int not null,    -- of a payload
    max_header_bytes int not null,    -- of the headers of a message, as text
    -- of its numbers: offsets that are stored outside of the database contain it
    incarnation      uuid not null default gen_random_uuid(),
    bound      boolean     not null default false, -- its messages are copied to other streams, see bindings
    dedup_window interval,            -- for how long a dedup_key is stored; null: it accepts none
    -- the columns of payloads, in Spark's DDL; null: any JSON. And the jsonpath that is true for such payloads
    schema      text,
    schema_path jsonpath,
    -- how many numbers were skipped when segments were closed: no message has them
    unused_seqs bigint not null default 0,
    limited    boolean not null default false, -- sends fail when a consumer has a backlog of max_backlog
    keys_limited boolean not null default false, -- ... or its per_key_capacity of the message's key
    -- whether publish() has more to do than to insert a publication
    special    boolean generated always as (limited or keys_limited or bound) stored,
    -- its sequences: finding them by name takes a twentieth of a send
    message_numbers     regclass,
    publication_numbers regclass,
    -- publication ids below this one are assigned: maintain() records it, and a send compares (log/numbers.sql)
    publications_from   bigint not null default 1
);

-- The streams to which messages are copied, by the topic of their key.
create table if not exists pgqueue.bindings (
    stream_id    int         not null,
    topic        text        not null,
    topic_regex  text        not null,
    to_stream_id int         not null,
    bound_at     timestamptz not null default clock_timestamp(),
    primary key (stream_id, topic, to_stream_id)
);

-- Incarnations of streams that have ended: the database was restored, and numbers that were assigned after that state
-- are assigned again.
-- on drop_stream
create table if not exists pgqueue.incarnations (
    incarnation      uuid        primary key,
    stream_id        int         not null,
    last_publication bigint      not null,  -- the last one that was restored: offsets up to it stay valid
    ended_at         timestamptz not null default clock_timestamp(),
    -- the order in which they ended, which does not depend on a clock
    ended_no         bigint      not null generated always as identity
);

-- The servers that this database was on, as recover() and the installer recorded them: the last one is the expected
-- server. See operate/recover.sql.
create table if not exists pgqueue.servers (
    server_no         bigint      generated always as identity primary key,
    system_identifier bigint,
    timeline          int,
    database          oid,          -- a dump that is restored on the same server has another one
    files_since       bigint,       -- when the data directory was created (epoch); null: not known
    noted_at          timestamptz not null default clock_timestamp()
);

-- Streams that were dropped, and whose tables still exist.
create table if not exists pgqueue.dropped_streams (
    stream_id    int    primary key,
    dropped_by   xid8   not null,  -- the id of the transaction
    transactions text[]            -- maintain() waits for these, which were open when it read the row; null: not yet
);
