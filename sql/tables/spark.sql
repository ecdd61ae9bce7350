-- Spark's side. The checkpoint readers, one per checkpoint.
-- on drop_consumer
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
    -- the process that last planned a batch, and the batch: another process that plans it again ...
    planned_by  uuid,
    planned_to  bigint      not null default 0,  -- ... delivers it again
    begun       int         not null default 0,  -- processes that began this batch, ...
    begun_at    timestamptz,                     -- ... the first one then
    alone       boolean     not null default true,   -- no other reader of its query had messages at the last start
    asks_alone  boolean     not null default false,  -- its last message is to be tried so (spark/quarantine.sql)
    unique (consumer_id, query_id)               -- two readers of one query would each get half of the messages
);

-- The claims of checkpoint readers: each with the set that it had at first, until its reader has moved past it, so that
-- an offset (reader, claim) names the same messages for ever. What it holds now is in bundles (its head has the token).
-- on drop_consumer
create table if not exists pgqueue.reader_claims (
    reader        uuid           not null,
    claim_id      bigint         not null,
    consumer_id   int            not null,
    head          bigint         not null,            -- the first bundle of the claim
    token         bigint         not null,            -- of its bundles
    message_count bigint         not null,            -- messages at the start
    settled       bigint         not null default 0,  -- messages settled by the owner, one way or the other
    seqs          int8multirange not null,            -- the original set ...
    arrival_nos   int8multirange not null,            -- ... and when its bundles arrived: where they would stand again;
                                                      -- empty: its consumer was moved, and nothing of it comes back
    acted         pgqueue.acted_run[],                -- of seqs, what its query settled by actions; null: nothing
    primary key (reader, claim_id)
);

-- The numbers that tasks took to write messages with, and that are not published yet: one row per chunk, until all of
-- it is published, or deleted by maintain(). A sink publishes or deletes only such messages.
-- on clear_stream
create table if not exists pgqueue.reservations (
    reservation_id bigint         generated always as identity primary key,
    stream_id      int            not null,
    xid            xid8           not null,  -- the transaction that took them: nobody else stages them
    seqs           int8multirange not null,
    reserved_at    timestamptz    not null default clock_timestamp()
);

-- The messages that were written and are not published yet; and the batches that were published.
-- on clear_stream
create table if not exists pgqueue.staged_chunks (
    staged_id     bigint         generated always as identity primary key,
    stream_id     int            not null,
    sink          text           not null,
    batch         bigint         not null,
    priority      int            not null,
    deliver_at    timestamptz,
    seqs          int8multirange not null,
    message_count bigint         not null,
    staged_at     timestamptz    not null default clock_timestamp(),
    staged_by     text           not null default session_user,
    reservation_id bigint        not null,
    -- one per number of seqs in their order, null for a message without; null: no message has one
    dedup_keys    text[],
    consumers     int[],                     -- null: all
    expires_at    timestamptz,
    routed        boolean        not null default false,  -- its batch may have other streams too
    digest        numeric,                   -- of a query: a sum over its messages, whatever their order
    write_no      bigint                     -- of begin_write(); null: not told
);
create sequence if not exists pgqueue.write_numbers;

-- on clear_stream
create table if not exists pgqueue.sink_batches (
    sink          text        not null,
    stream_id     int         not null,      -- 0: several, by a column
    consumer_id   int         not null,      -- 0: what was published; else what actions did (spark/actions.sql): ...
    revived       boolean     not null,      -- ... they settled messages of this consumer, or revived them
    batch         bigint      not null,
    message_count bigint      not null,
    digest        numeric,                   -- of these messages; null: not known
    published_at  timestamptz not null default clock_timestamp(),
    done_by       text        not null default session_user,  -- a sink belongs to one role
    target        text        not null default '',  -- the table that its rows were written to, as SQL; '': messages
    primary key (sink, stream_id, consumer_id, revived, batch, target)
);

-- The streams to which queries write. Published batches are forgotten with a stream. This is not, so that a query
-- notices when another stream has the name of its own.
create table if not exists pgqueue.sink_streams (
    sink      text not null,
    name      text not null,
    stream_id int  not null,
    noted_at  timestamptz not null default clock_timestamp(),
    primary key (sink, name)
);
