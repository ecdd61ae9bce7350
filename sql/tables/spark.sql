-- Spark's side: one reader per checkpoint ...
create table if not exists pgqueue.readers (
    reader      uuid        primary key,
    consumer_id int         not null,
    acked_claim bigint      not null default 0,
    last_claim  bigint      not null default 0,
    messages    bigint      not null default 0,  -- claimed in all
    lost        bigint      not null default 0,  -- acknowledged after the lease was lost
    query_id    text,
    created_at  timestamptz not null default clock_timestamp(),
    used_at     timestamptz not null default clock_timestamp(),  -- within an hour
    planned_by  uuid,                            -- the process that last planned a batch, and which: another one that plans it again ...
    planned_to  bigint      not null default 0,  -- ... delivers it again
    begun       int         not null default 0,  -- processes that began this batch, ...
    begun_at    timestamptz,                     -- ... the first one then
    unique (consumer_id, query_id)               -- two readers of one query would each get half of the messages
);

-- ... the numbers that its tasks took to write messages with, and of these the ones that are not published: one row per chunk,
-- until all of it is published, or deleted by maintain(). Only such messages are ever published by a sink, or deleted ...
create table if not exists pgqueue.reservations (
    reservation_id bigint         generated always as identity primary key,
    stream_id      int            not null,
    xid            xid8           not null,  -- the transaction that took them: nobody else stages them
    seqs           int8multirange not null,
    reserved_at    timestamptz    not null default clock_timestamp()
);

-- ... what was written and not yet published, and the batches that were.
create table if not exists pgqueue.staged_writes (
    staged_id     bigint         generated always as identity primary key,
    stream_id     int            not null,
    sink          text           not null,
    batch         bigint         not null,
    priority      int            not null,
    deliver_at    timestamptz,
    seqs          int8multirange not null,
    message_count bigint         not null,
    staged_at     timestamptz    not null default clock_timestamp(),
    reservation_id bigint        not null,
    dedup_keys    text[],                    -- one per number of seqs in their order, null for those without; null: no message has one
    consumers     int[],                     -- null: all
    expires_at    timestamptz,
    routed        boolean        not null default false  -- its batch may have other streams too
);

create table if not exists pgqueue.sink_batches (
    sink          text        not null,
    stream_id     int         not null,  -- 0: several, by a column. Below: not what it published, but what else it did (spark/actions.sql)
    batch         bigint      not null,
    message_count bigint      not null,
    published_at  timestamptz not null default clock_timestamp(),
    primary key (sink, stream_id, batch)
);

-- Which streams the queries that write were writing to. What was published is forgotten with a stream; this is not, so that a query
-- notices when another stream has the name of one of its own.
create table if not exists pgqueue.sink_streams (
    sink      text not null,
    name      text not null,
    stream_id int  not null,
    noted_at  timestamptz not null default clock_timestamp(),
    primary key (sink, name)
);
