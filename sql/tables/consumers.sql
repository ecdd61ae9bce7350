-- Consumers: what each has taken from its stream, and what it has not finished of that.

create table if not exists pgqueue.consumers (
    consumer_id        int         generated always as identity primary key,
    stream_id          int         not null references pgqueue.streams,
    name               text        not null,
    ordering           text        not null check (ordering in ('none', 'key', 'stream')),
    max_deliver_count  int         check (max_deliver_count > 0),
    visibility_timeout interval    not null check (visibility_timeout > interval '0'),
    backoff            text        not null default 'constant',  -- how the delay of a message that failed grows: constant, linear, exponential
    backoff_base       interval,                                 -- null: 0 if it is constant, else 1 s
    backoff_cap        interval    not null default '1 hour',
    backoff_jitter     float8      not null default 0,
    keep_history       interval,                                 -- for how long what was acknowledged is known; null: not at all
    notify_done        boolean     not null default false,  -- notify of what is acknowledged or dead
    created_at         timestamptz not null default clock_timestamp(),
    paused             boolean     not null default false,  -- it claims nothing
    partitions         int,                                      -- of a group, see functions/groups.sql; null: its messages are claimed
    filtered           boolean     not null default false,  -- it gets only what passes its filter
    max_backlog        bigint,                                   -- messages that it may have before it, see core/back_pressure.sql; null: any
    on_full            text        not null default 'reject',  -- or drop_oldest
    per_key_limit      int,                                      -- messages of a key that may be in flight; null: any
    per_key_capacity   int,                                      -- messages of a key that it may be not done with, see core/key_capacity.sql; null: any
    per_key_interval   interval,                                 -- in each such time ...
    per_key_burst      int         not null default 1,           -- ... so many messages of a key are delivered at most; null interval: any
    fair               boolean     not null default false,       -- keys are served in turns
    max_in_flight      int,                                      -- messages that may be in open claims, see core/throttle.sql; null: any
    rate_limit         int,                                      -- so many messages are delivered at most ...
    rate_interval      interval,                                 -- ... within any such time; null: any
    ageing             interval,                                 -- so much longer waiting is worth a priority; null: nothing is
    -- whether it deals by key, and whether it has limits of keys
    by_key             boolean     generated always as (ordering <> 'none' or per_key_limit is not null or per_key_interval is not null or fair) stored,
    limits_keys        boolean     generated always as (per_key_limit is not null or per_key_interval is not null or fair) stored,
    throttled          boolean     generated always as (max_in_flight is not null or rate_limit is not null) stored,
    scheduled          boolean     not null default false,  -- its stream has schedules
    -- whether claims have more to ask than what is ready, and whether acknowledgements have more to do than to forget
    special            boolean     generated always as (partitions is not null or paused or scheduled or max_backlog is not null
                                                        or per_key_interval is not null or max_in_flight is not null or rate_limit is not null
                                                        or ordering = 'stream') stored,
    archives           boolean     generated always as (keep_history is not null or notify_done or per_key_capacity is not null) stored,
    unique (stream_id, name)
);

-- The filters of consumers, see core/filters.sql.
create table if not exists pgqueue.consumer_filters (
    consumer_id int primary key,
    topic       text,      -- of the messages' keys; null: any
    topic_regex text,
    condition   jsonpath   -- what the messages hold; null: anything
);

-- A place in the line of ready runs.
do $$
begin
    if to_regtype('pgqueue.line_place') is null then
        create type pgqueue.line_place as (lane int, line_no bigint, first_seq bigint);
    end if;
end $$;

-- A consumer's cursor. Never updated: a new version is inserted and the one before deleted, and the newest is read first, so
-- that dead versions behind a long transaction elsewhere cost nothing.
create table if not exists pgqueue.consumer_cursors (
    consumer_id      int                  not null,
    version          bigint               not null,
    -- What was taken. Every publication id below next_publication was taken, is dead, or is in one of the gaps.
    next_publication bigint               not null,
    gaps             bigint[]             not null default '{}',         -- the consumer's rows of consumer_gaps
    take_was_cut     boolean              not null default false,        -- the last take stopped at its limit: more is there
    -- How many messages became runs of it, in all; and how many of these left without being settled: sifted out, or forgotten by seek. So what
    -- it has settled is told without counting it (functions/seeing.sql).
    taken            bigint               not null default 0,
    forgotten        bigint               not null default 0,
    -- The line. Numbers in it only rise.
    last_line_no     bigint               not null default 0,            -- the last one given out
    -- Where to look, so that dead rows before it cost nothing. Hints: too early costs time, too late would lose messages.
    scan_from        pgqueue.line_place[] not null default '{}',         -- by lane: no ready run of that lane stands before this place ...
    scan_lanes_from  int,                                                -- ... and no run is ready in other lanes below this one; null: in none
    due_from         timestamptz          not null default '-infinity',  -- no delayed run is due before this, also if the clock is set back
    lease_probe      timestamptz          not null default '-infinity',  -- look for expired leases again from then on
    leases_from      timestamptz          not null default '-infinity',  -- no lease ended before this: nearly always, see core/leases.sql
    gaps_probe       timestamptz          not null default '-infinity',  -- while something is ready, look into the gaps again from then on
    -- Filtered consumers only.
    sift_from        bigint,                                             -- something is unsifted, nothing of it before this line_no; null: nothing is
    -- With rate_limit only: how many messages were delivered lately, and up to when. See core/throttle.sql.
    delivered        int[],
    delivered_at     timestamptz[],
    -- Ordered consumers only.
    pieces_from      bigint               not null default 0,            -- no piece has an earlier place
    dealt_until      timestamptz          not null default '-infinity',  -- another claimer was turned away: until then no claim takes all keys
    primary key (consumer_id, version)
);

-- The gaps in what a consumer has taken: publication ids below the end that were not visible when it looked. They are looked
-- for again when a transaction that may fill them has ended, and closed when all of these have. See core/gaps.sql.
-- A row is never updated, and found by the numbers in the cursor.
create table if not exists pgqueue.consumer_gaps (
    consumer_id     int            not null,
    gap_no          bigint         not null,
    publication_ids int8multirange not null,
    range_count     int            not null,
    publishers      text[]         not null,  -- virtual ids of the transactions that may still fill it
    look            boolean        not null,  -- look at the next take, whoever has ended
    kept            int8multirange,           -- messages in it that are not to be taken: it was moved there (core/positions.sql). Null: none
    primary key (consumer_id, gap_no)
);
do $$
begin
    if to_regclass('pgqueue.gap_numbers') is null then
        create sequence pgqueue.gap_numbers;
    end if;
end $$;

-- The runs: what a consumer has taken and not finished. All messages of a run are in the same state.
create table if not exists pgqueue.consumer_messages (
    consumer_id       int            not null,
    state             text           not null,  -- unsifted, ready, delayed, waiting or claimed; a check would be parsed again by each statement
    lane              int            not null,  -- lanes are served in their order: -priority; ordered: 0 for pieces, 1 for the line
    priority          int            not null,
    deliver_count     int            not null,
    arrival_no        bigint         not null,  -- order of arrival, kept for life
    line_no           bigint         not null,  -- place in the lane
    first_seq         bigint         not null,  -- lower(seqs)
    message_count     bigint         not null,
    seqs              int8multirange not null,
    claim_id          bigint,
    not_visible_until timestamptz,
    last_delivered_at timestamptz,
    note              jsonb,                    -- what is known of them beside: error, the last one; at_most, no claim has more with one of them
    key               bigint,                   -- ordered consumers: the hash of the key of what waits for it, or is delayed, ...
    piece             bigint                    -- ... and the piece that is ready or claimed
);

-- What claims get. Named: a function that returns columns of its own has them looked up at each call, for a fifth of the cost of a small claim.
do $$
begin
    if to_regtype('pgqueue.served') is null then
        create type pgqueue.served as (
            message_count bigint,
            runs          int,
            ended         boolean,    -- the claim ends there: at a run with at_most
            done          boolean);   -- that is all; or else the caller goes on with the consumer's lock
        create type pgqueue.claimed as (claim_id bigint, message_count bigint, stream_id int);
        create type pgqueue.received as (
            claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int, deliver_count int,
            inserted_at timestamptz, saved jsonb);
    end if;
end $$;

-- Of ordered consumers: where messages of a key may wait; and messages by key: of which key each set is (null: of none), and of which run.
do $$
begin
    if to_regtype('pgqueue.waiting_place') is null then
        create type pgqueue.waiting_place as (key bigint, arrival_no bigint, first_seq bigint);
        create type pgqueue.keyed_messages as (runs pgqueue.consumer_messages[], run_nos int[], keys bigint[], seqs int8multirange[], message_counts bigint[],
                                               held boolean[]);
    end if;
end $$;

-- The open pieces of ordered consumers, and those that are gone and were not closed yet. No key is in two of them, and each key that
-- messages wait for is in one, or its first message is delayed, or it has a gate: core/key_limits.sql.
create table if not exists pgqueue.pieces (
    consumer_id   int    not null,
    place         bigint not null,  -- its number, until it is old: then a newer one, so that the cursor's pieces_from goes on
    piece         bigint not null,
    message_count bigint not null,  -- when its keys were told
    keys          bigint[],         -- null: all. Of ordering=none one for each of its messages
    arrival_no    bigint,           -- nothing of these keys waits before this place
    first_seq     bigint,
    claimed       boolean not null default false  -- of ordering=none: it is known that all that is left of it is claimed
);

-- Of consumers with per_key_capacity: the messages with a key that they may be not done with. See core/key_capacity.sql.
create table if not exists pgqueue.key_backlog (
    consumer_id    int    not null,
    key            bigint not null,  -- its hash
    seq            bigint not null,
    publication_id bigint not null   -- that made it visible; 0: the consumer had taken it before it was noted
);

-- Messages of a Spark reader's claim on which its query has acted, as they were: they are of its micro-batch still (spark/actions.sql).
-- And what rows of a write want to be done with messages: action is ack, nack, dead_letter, redrive or retry.
do $$
begin
    if to_regtype('pgqueue.acted_run') is null then
        create type pgqueue.acted_run as (lane int, arrival_no bigint, priority int, deliver_count int, seqs int8multirange);
        create type pgqueue.action as (action text, stream text, consumer text, seqs int8multirange, delay interval, reason text, details jsonb);
    end if;
end $$;

-- A worker's claim is deleted when it ends; a Spark reader's is kept, with its original set, until the reader has moved past it.
-- The lease is on the claim, not on its messages. A claim's id is a rising number and random low bits (see _new_claim_id).
create table if not exists pgqueue.claims (
    claim_id           bigint      primary key,
    consumer_id        int         not null,
    ordered            boolean     not null,
    live               boolean     not null default true,   -- false: it has nothing left, or the lease ended and another claimer took over
    claimed_at         timestamptz not null,
    lease_until        timestamptz not null,
    visibility_timeout interval    not null,
    message_count      bigint      not null,                -- messages at the start
    remaining          bigint      not null,                -- messages not settled
    settled            bigint      not null default 0,      -- messages settled by the owner, one way or the other
    reader             uuid,
    owner              text,                                -- the application_name of who claimed it
    archive            boolean     not null default false,  -- its consumer keeps history, notifies, or counts keys
    seqs               int8multirange,                      -- readers: the original set ...
    arrival_nos        int8multirange,                      -- ... and where its runs stand in the line
    lanes              int[],
    acted              pgqueue.acted_run[]                  -- of seqs, what its query settled by actions; null: nothing
);
do $$
begin
    if to_regclass('pgqueue.claim_numbers') is null then
        create sequence pgqueue.claim_numbers;
    end if;
end $$;

create table if not exists pgqueue.dead_messages (
    dead_id       bigint         generated always as identity primary key,
    stream_id     int            not null,
    consumer_id   int            not null,
    seqs          int8multirange not null,
    message_count bigint         not null,
    priority      int            not null,
    deliver_count int            not null,
    reason        text,           -- max deliveries, expired, poison, dropped; or what the worker said, by default rejected
    details       jsonb,
    claim_id      bigint,
    died_at       timestamptz    not null default clock_timestamp(),
    note          jsonb,          -- as it was in the run
    owner         text            -- of the claim
);

-- What it means for messages that they are returned, see _return in core/settle.sql.
do $$
begin
    if to_regtype('pgqueue.failure') is null then
        create type pgqueue.failure as (
            certain     boolean,      -- that they failed: they are given up when they did so too often
            counted     boolean,      -- it was a delivery
            happened_at timestamptz,
            delay       interval,     -- null: as the consumer's settings say
            chance      float8,       -- 0 to 1
            note        jsonb);       -- keys for their notes
    end if;
end $$;
