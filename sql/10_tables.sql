-- The tables. A message is written once and never changes; everything that a consumer does to it is a set of
-- sequence numbers (int8multirange) somewhere else.
--
-- Only the database's clock is used. The hot tables have no foreign keys: a check per row would lock the
-- consumer's row for every claim. drop_stream and drop_consumer delete what belongs to them.

create table if not exists pgqueue.streams (
    stream_id  int         generated always as identity primary key,
    name       text        not null unique,
    kind       text        not null check (kind in ('text', 'json', 'binary')),
    notify     boolean     not null,  -- wake up waiting readers at each publication; off, they find it within their wait
    created_at timestamptz not null default clock_timestamp()
);

-- One partition a stream, made by create_stream: messages_<stream_id>, with primary key (seq) and the checks of the
-- stream's kind; its sequences are seq_<stream_id> and publication_<stream_id>.
create table if not exists pgqueue.messages (
    seq         bigint      not null,
    inserted_at timestamptz not null default statement_timestamp(),
    stream_id   int         not null,
    key         text,
    data        text,
    data_bytes  bytea,
    headers     jsonb
) partition by list (stream_id);

-- What became visible, when, to whom: one id per publishing statement, one part of it per priority and time.
create table if not exists pgqueue.publications (
    publication_id bigint         not null,
    n              bigint         not null,
    published_at   timestamptz    not null,
    deliver_at     timestamptz,                 -- null: at once
    stream_id      int            not null,
    part           int            not null default 0,
    priority       int            not null,
    seqs           int8multirange not null,
    consumers      int[],                       -- null: all, also those that do not exist yet
    primary key (stream_id, publication_id, part)
);

create table if not exists pgqueue.consumers (
    consumer_id        int         generated always as identity primary key,
    stream_id          int         not null references pgqueue.streams,
    name               text        not null,
    ordering           text        not null check (ordering in ('none', 'key', 'stream')),
    max_deliver_count  int         check (max_deliver_count > 0),
    visibility_timeout interval    not null check (visibility_timeout > interval '0'),
    created_at         timestamptz not null default clock_timestamp(),
    unique (stream_id, name)
);

do $$
begin
    if to_regtype('pgqueue.floor') is null then
        create type pgqueue.floor as (rank int, turn bigint, first_seq bigint);
    end if;
end $$;

-- A consumer's cursor. Never updated: a new version is inserted and the one before deleted, and the newest is
-- read first, so that dead versions behind a long transaction elsewhere cost nothing.
create table if not exists pgqueue.consumer_cursors (
    consumer_id    int             not null,
    version        bigint          not null,
    seen           int8multirange  not null,                    -- publication ids taken, or known to be dead
    watched        int8multirange  not null default '{}',       -- holes in it that may still become visible ...
    watched_below  xid8,                                        -- ... unless all transactions up to this one are over
    parked         int8multirange  not null default '{}',       -- holes that an old transaction keeps open
    parked_below   xid8,
    parked_probe   timestamptz,                                 -- look at the parked ones again from then on
    more           boolean         not null default false,      -- the last take was cut by its limit
    turn           bigint          not null default 0,          -- the last place given out in the line
    floors         pgqueue.floor[] not null default '{}',       -- per rank: no ready run stands before this place
    due_floor      timestamptz     not null default '-infinity',-- no delayed run is due before this, also if the clock is set back
    lease_probe    timestamptz     not null default '-infinity',-- look for expired leases again from then on
    -- ordered consumers only:
    open_claims    int             not null default 0,          -- claims with messages
    first_claim    bigint          not null default 0,          -- no older claim is open: a floor, as those above
    aside          bigint          not null default 0,          -- runs set aside for a key of their own
    mixed_claim    bigint,                                      -- the one open claim whose runs are not yet split by key
    heads_first    boolean         not null default true,       -- who is served first by the next claim, see _serve_ordered
    primary key (consumer_id, version)
);

-- The runs: what a consumer has taken and not finished. All messages of a run are in the same state.
create table if not exists pgqueue.consumer_messages (
    consumer_id       int            not null,
    state             text           not null,  -- ready, delayed, waiting or claimed; a check would be parsed again by each statement
    rank              int            not null,  -- the line it stands in: -priority; ordered: 0, a key's own head -1
    priority          int            not null,
    deliver_count     int            not null,
    position          bigint         not null,  -- order of arrival, kept for life
    turn              bigint         not null,  -- place in the line
    first_seq         bigint         not null,  -- lower(seqs)
    n                 bigint         not null,
    seqs              int8multirange not null,
    key               text,                     -- ordered consumers: set once the run stands for one key alone
    claim_id          bigint,
    not_visible_until timestamptz,
    last_delivered_at timestamptz,
    last_error        text
);
-- One index per question asked. No predicate follows from the conditions of another question: Postgres may take any partial
-- index whose predicate a query implies, and then reads all of it.
create index if not exists consumer_messages_ready on pgqueue.consumer_messages (consumer_id, rank, turn, first_seq)
    where state = 'ready';
create index if not exists consumer_messages_due on pgqueue.consumer_messages (consumer_id, not_visible_until)
    where state = 'delayed';
create index if not exists consumer_messages_claim on pgqueue.consumer_messages (claim_id)
    where claim_id is not null;
create index if not exists consumer_messages_busy on pgqueue.consumer_messages (consumer_id, key, claim_id)
    where state = 'claimed' and key is not null;
create index if not exists consumer_messages_aside on pgqueue.consumer_messages (consumer_id, key, position, first_seq)
    where state <> 'claimed' and key is not null;

-- The lease is on the claim, not on its messages. A worker's claim is deleted when it ends; a Spark reader's is kept,
-- with its original set, until the reader has moved past it.
create table if not exists pgqueue.claims (
    claim_id           bigint      generated always as identity primary key,
    consumer_id        int         not null,
    ordered            boolean     not null,
    live               boolean     not null default true,   -- false: it has nothing left, or the lease ended and another claimer took over
    claimed_at         timestamptz not null,
    lease_until        timestamptz not null,
    visibility_timeout interval    not null,
    n                  bigint      not null,                -- messages at the start
    remaining          bigint      not null,                -- messages not settled
    settled            bigint      not null default 0,      -- messages settled by the owner, one way or the other
    reader             uuid,
    seqs               int8multirange                       -- readers: the original set
);
create index if not exists claims_lease on pgqueue.claims (consumer_id, lease_until) where live;
create index if not exists claims_ordered on pgqueue.claims (consumer_id, claim_id) where live and ordered;
create index if not exists claims_reader on pgqueue.claims (reader, claim_id) where reader is not null;

create table if not exists pgqueue.dead_messages (
    dead_id       bigint         generated always as identity primary key,
    stream_id     int            not null,
    consumer_id   int            not null,
    seqs          int8multirange not null,
    n             bigint         not null,
    priority      int            not null,
    deliver_count int            not null,
    reason        text,
    details       jsonb,
    claim_id      bigint,
    died_at       timestamptz    not null default clock_timestamp()
);
create index if not exists dead_messages_consumer on pgqueue.dead_messages (consumer_id, dead_id);

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
    unique (consumer_id, query_id)               -- two readers of one query would each get half of the messages
);

-- ... what its tasks have written and not yet published, and the batches that were.
create table if not exists pgqueue.staged_writes (
    staged_id  bigint         generated always as identity primary key,
    stream_id  int            not null,
    sink       text           not null,
    batch      bigint         not null,
    priority   int            not null,
    deliver_at timestamptz,
    seqs       int8multirange not null,
    n          bigint         not null,
    staged_at  timestamptz    not null default clock_timestamp()
);
create index if not exists staged_writes_batch on pgqueue.staged_writes (sink, stream_id, batch);

create table if not exists pgqueue.sink_batches (
    sink         text        not null,
    stream_id    int         not null,
    batch        bigint      not null,
    n            bigint      not null,
    published_at timestamptz not null default clock_timestamp(),
    primary key (sink, stream_id, batch)
);
