-- Streams, and what streams are copied to. Their messages, and which of them are visible: log/messages.sql.
--
-- Only the database's clock is used. The hot tables have no foreign keys: a check per row would lock the consumer's
-- row for every claim. drop_stream and drop_consumer delete the rows that belong to them, as hooks.sql says.

create table if not exists pgqueue.streams (
    stream_id  int         generated always as identity primary key,
    name       text        not null unique,
    kind       text        not null check (kind in ('text', 'json', 'binary')),
    -- notify waiting workers at each publication; off: they find it within their wait
    notify     boolean     not null,
    created_at timestamptz not null default clock_timestamp(),
    -- the settings that somebody gave it, by name, as of consumers
    given            text[] not null default '{}',
    max_bytes        int not null,    -- of a payload
    max_header_bytes int not null,    -- of the headers of a message, as text
    -- of its numbers: offsets outside of the database say to which incarnation they belong
    incarnation      uuid not null default gen_random_uuid(),
    bound      boolean     not null default false, -- what is sent to it is copied to others, see bindings
    dedup_window interval,            -- for how long a dedup_key is remembered; null: it takes none
    -- the columns that payloads have, in Spark's DDL; null: any JSON. And the jsonpath that is true of such payloads
    schema      text,
    schema_path jsonpath,
    -- numbers that were passed over when segments were closed: no message has them
    passed_over bigint not null default 0,
    limited    boolean not null default false, -- sends fail when a consumer has its max_backlog before it
    keys_limited boolean not null default false, -- ... or its per_key_capacity of the message's key
    -- whether publishing has more to do than to publish
    special    boolean generated always as (limited or keys_limited or bound) stored,
    -- its sequences: to find them by their names takes a twentieth of a send
    message_numbers     regclass,
    publication_numbers regclass,
    -- publication ids below this one were given out: maintain() notes it, and a send compares (log/numbers.sql)
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

-- Incarnations of streams that have ended: the database was restored, and numbers that were given out after that state
-- are given out again.
-- on drop_stream
create table if not exists pgqueue.incarnations (
    incarnation      uuid        primary key,
    stream_id        int         not null,
    last_publication bigint      not null,  -- the last one that was restored: offsets up to it are as good as ever
    ended_at         timestamptz not null default clock_timestamp(),
    -- the order in which they ended: a clock may be set back
    ended_no         bigint      not null generated always as identity
);

-- The servers that this database was on, as recover() and the installer noted them: the last one is where it should
-- be. See operate/recover.sql.
create table if not exists pgqueue.servers (
    server_no         bigint      generated always as identity primary key,
    system_identifier bigint,
    timeline          int,
    database          oid,          -- a dump that is restored in the same server has another one
    files_since       bigint,       -- the data directory is what it is since then (epoch); null: not known
    noted_at          timestamptz not null default clock_timestamp()
);

-- Streams that were dropped, and whose tables are still there.
create table if not exists pgqueue.dropped_streams (
    stream_id    int    primary key,
    dropped_by   xid8   not null,  -- the transaction
    transactions text[]            -- maintain() waits for these, which were open when it saw the row; null: not yet
);
