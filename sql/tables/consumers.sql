-- Consumers: what each has taken from its stream, and what it has not finished of that.

create table if not exists pgqueue.consumers (
    consumer_id        int         generated always as identity primary key,
    stream_id          int         not null references pgqueue.streams,
    stream_name        text        not null,                     -- the stream's, so that claims look for no stream
    name               text        not null,
    ordering           text        not null check (ordering in ('none', 'key', 'stream')),
    max_deliver_count  int         default 25 check (max_deliver_count > 0),  -- null: never, the setting's other word
    visibility_timeout interval    not null default '30 s' check (visibility_timeout > interval '0'),
    -- How the delay of a failed message grows: constant, linear or exponential. A null base is 0 if constant, else 1 s.
    backoff            text        not null default 'exponential',
    backoff_base       interval,
    backoff_cap        interval    not null default '1 hour',
    backoff_jitter     float8      not null default 0.2,
    keep_history       interval,                                 -- how long acknowledgements are kept; null: not at all
    notify_done        boolean     not null default false,       -- notify of what is acknowledged or dead
    created_at         timestamptz not null default clock_timestamp(),
    paused             boolean     not null default false,       -- it claims nothing
    partitions         int,                                      -- of a group, see functions/groups.sql
    filtered           boolean     not null default false,       -- it gets only messages that pass its filter
    max_backlog        bigint,                                   -- messages before it (back_pressure.sql); null: any
    on_full            text        not null default 'reject',    -- or drop_oldest
    per_key_limit      int,                                      -- messages of a key that may be in flight; null: any
    per_key_capacity   int,                                      -- unfinished ones (key_capacity.sql); null: any
    per_key_interval   interval,                                 -- in each such time, of a key at most ...
    per_key_burst      int         not null default 1,           -- ... so many are delivered; null interval: any
    per_key_latest     boolean     not null default false,       -- of a key, only the newest waits (newest.sql)
    fair               boolean     not null default false,       -- keys are served in turns
    max_in_flight      int,                                      -- messages in open claims (throttle.sql); null: any
    rate_limit         int,                                      -- so many messages are delivered at most ...
    rate_interval      interval,                                 -- ... within any such time; null: any
    -- whether it deals by key, and whether it has limits of keys
    by_key             boolean     generated always as (ordering <> 'none' or per_key_limit is not null
                                                        or per_key_interval is not null or fair) stored,
    limits_keys        boolean     generated always as (per_key_limit is not null or per_key_interval is not null
                                                        or fair) stored,
    throttled          boolean     generated always as (max_in_flight is not null or rate_limit is not null) stored,
    scheduled          boolean     not null default false,       -- its stream has schedules
    -- whether claims have more to ask than what is ready, and whether acknowledgements have more to do than to forget
    special            boolean     generated always as (partitions is not null or paused or scheduled
                                                        or max_backlog is not null or per_key_interval is not null
                                                        or max_in_flight is not null or rate_limit is not null
                                                        or per_key_latest) stored,
    archives           boolean     generated always as (keep_history is not null or notify_done
                                                        or per_key_capacity is not null) stored,
    -- whether small claims of it are cut ahead (slots.sql)
    quick              boolean     generated always as (
        not (partitions is not null or paused or scheduled or max_backlog is not null
             or (ordering <> 'none' and (per_key_limit is not null or fair)) or per_key_interval is not null
             or max_in_flight is not null or rate_limit is not null or filtered
             or keep_history is not null or notify_done or per_key_capacity is not null or per_key_latest)) stored,
    -- whether its messages are judged before they are ready: by its filter, or as the newest of their keys
    judged             boolean     generated always as (filtered or per_key_latest) stored,
    unique (stream_id, name),
    unique (stream_name, name)
);

-- The filters of consumers, see queue/filters.sql.
create table if not exists pgqueue.consumer_filters (
    consumer_id int primary key,
    topic       text,      -- of the messages' keys; null: any
    topic_regex text,
    condition   jsonpath   -- what the messages hold; null: anything
);

-- Types. (Claims get named ones: a function that returns columns of its own has them looked up at each call, for a
-- fifth of the cost of a small claim.)
do $$
begin
    if to_regtype('pgqueue.line_place') is null then
        -- a place in the line of ready runs
        create type pgqueue.line_place as (lane int, line_no bigint, first_seq bigint);
        create type pgqueue.served as (
            message_count bigint,
            runs          int,
            ended         boolean,    -- the claim ends there: at a run with at_most
            done          boolean,    -- that is all; otherwise the caller goes on with the consumer's lock
            seqs          int8multirange, priority int);  -- of a claim that is a slot
        create type pgqueue.claimed as (
            claim_id bigint, message_count bigint, stream_id int,
            seqs int8multirange, priority int);           -- of a claim that is a slot
        create type pgqueue.received as (
            claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int,
            deliver_count int, inserted_at timestamptz, saved jsonb);
        -- what it means for messages that they are returned, see return() in queue/settle.sql
        create type pgqueue.failure as (
            certain     boolean,      -- they are known to have failed: given up when they did so too often
            counted     boolean,      -- it was a delivery
            happened_at timestamptz,
            returned_at timestamptz,  -- what is due by then is not delayed
            delay       interval,     -- null: as the consumer's settings say
            chance      float8,       -- 0 to 1
            note        jsonb);       -- keys for their notes
        -- messages of a Spark reader's claim on which its query has acted, as they were: they still belong to its
        -- micro-batch (spark/actions.sql)
        create type pgqueue.acted_run as (
            lane int, arrival_no bigint, priority int, deliver_count int, seqs int8multirange);
        -- what rows of a write want to be done with messages: action is ack, nack, dead_letter, redrive or retry
        create type pgqueue.action as (
            action text, stream text, consumer text, seqs int8multirange, delay interval, reason text, details jsonb);
    end if;
end $$;

-- A consumer's cursor. It is never updated: a new version is inserted and the version before is deleted. The newest
-- version is read first, so that dead versions behind a long transaction elsewhere cost nothing.
create table if not exists pgqueue.consumer_cursors (
    consumer_id      int                  not null,
    version          bigint               not null,
    -- What was taken. Every publication id below next_publication was taken, is dead, or is in one of the gaps.
    next_publication bigint               not null,
    gaps             bigint[]             not null default '{}',         -- the consumer's rows of consumer_gaps
    take_was_cut     boolean              not null default false,        -- the last take stopped at its limit
    -- How many messages became runs of it, in all; and how many of these left without being settled: filtered out, or
    -- forgotten by seek. From these two the number of settled messages follows, without counting (inspect/views.sql).
    taken            bigint               not null default 0,
    forgotten        bigint               not null default 0,
    -- The line. Numbers in it only rise.
    last_line_no     bigint               not null default 0,            -- the last number given out
    -- Hints where to look, so that dead rows before these places cost nothing. A hint that is too early costs time. A
    -- hint that is too late hides rows: so all hints are told from what is stored once a minute, see look_anew().
    -- By lane: no ready run of that lane stands before this place ...
    scan_from        pgqueue.line_place[] not null default '{}',
    -- ... and no run is ready in other lanes below this one; null: in no other lane.
    scan_lanes_from  int,
    -- No delayed run is due before this time, not even if the clock is set back.
    due_from         timestamptz          not null default '-infinity',
    -- No spent token of a key comes back before this time; null: none is spent. See queue/key_tokens.sql.
    tokens_from      timestamptz,
    -- From then on claims look for expired leases again; and no lease ended before leases_from: nearly always, see
    -- queue/leases.sql.
    lease_probe      timestamptz          not null default '-infinity',
    leases_from      timestamptz          not null default '-infinity',
    -- When all hints were told from what is stored.
    looked_at        timestamptz          not null default '-infinity',
    -- While something is ready, claims look into the gaps again from then on.
    gaps_probe       timestamptz          not null default '-infinity',
    -- Filtered consumers only: something is unfiltered, and nothing of it stands before this line_no; null: nothing is.
    filter_from      bigint,
    -- With rate_limit only: how many messages were delivered lately, and until when they count. See queue/throttle.sql.
    delivered        int[],
    delivered_at     timestamptz[],
    -- Consumers that go by key only.
    pieces_from      bigint               not null default 0,            -- no piece has an earlier place
    freed_from       bigint,                                             -- nor have freed_keys; null: there are none
    waits            boolean              not null default false,        -- ordering=none: messages of keys may wait
    -- Another claimer was turned away: until then no claim takes all keys.
    dealt_until      timestamptz          not null default '-infinity',
    -- Slots (queue/slots.sql): no slot is below slots_low; null: there are none. Those that were cut last, and what is
    -- left of those before, are from slots_block on. Free ones are from slots_from on, and below slots_to; null: none
    -- is free. Until slots_until, nothing that is known comes before them.
    slots_low        bigint,
    slots_block      bigint,
    slots_from       bigint,
    slots_to         bigint,
    slots_until      timestamptz          not null default '-infinity',
    slots_priority   int,
    slots_size       int,                                                -- messages of a slot
    slots_ahead      int,                                                -- so many are cut next; null: as many as may
    slots_more       bigint,  -- a claim of a slot from this one on cuts, or deals, ahead; null: none does
    primary key (consumer_id, version)
);

-- The gaps in what a consumer has taken: publication ids below the end that were not visible when it looked. The
-- consumer looks for them again when a transaction that may fill them has ended, and closes them when all of these
-- have. See log/gaps.sql. A row is never updated, and is found by the numbers in the cursor.
create table if not exists pgqueue.consumer_gaps (
    consumer_id     int            not null,
    gap_no          bigint         not null,
    publication_ids int8multirange not null,
    range_count     int            not null,
    publishers      text[]         not null,  -- virtual ids of the transactions that may still fill it
    look            boolean        not null,  -- look at the next take, whichever transactions have ended
    kept            int8multirange,           -- messages not taken with it (log/positions.sql); null: none
    primary key (consumer_id, gap_no)
);
create sequence if not exists pgqueue.gap_numbers;

-- The runs: what a consumer has taken and not finished. All messages of a run are in the same state: unfiltered, ready,
-- delayed, waiting or claimed. (A check of the state would be parsed again by each statement.)
create table if not exists pgqueue.consumer_messages (
    consumer_id       int            not null,
    state             text           not null,
    lane              int            not null,  -- served in order: -priority; by key 0: pieces, 1: the line
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
    -- error: the last one; attempts: the last failed deliveries; at_most: messages of a claim with one; expires; saved;
    -- spark: deliveries to Spark, which max_deliver_count and backoff do not count
    note              jsonb,
    key               bigint,                   -- by key: the key's hash, of waiting and delayed messages, ...
    piece             bigint                    -- ... and the piece, of ready and claimed messages
);

-- Of consumers that go by key: the place from which messages of a key may wait; and messages by key: of which key each
-- set is (null: of no key), and of which run.
do $$
begin
    if to_regtype('pgqueue.waiting_place') is null then
        create type pgqueue.waiting_place as (key bigint, arrival_no bigint, first_seq bigint);
        create type pgqueue.keyed_messages as (
            runs pgqueue.consumer_messages[], run_nos int[], keys bigint[], seqs int8multirange[],
            message_counts bigint[], held boolean[]);
    end if;
end $$;

-- The open pieces of consumers that go by key; some may be gone already, but no dealer has closed them yet. With an
-- ordering no key is in two pieces. Each key that messages wait for is in a piece or in freed_keys, or its first
-- message is delayed, or tokens of it are spent.
create table if not exists pgqueue.pieces (
    consumer_id   int    not null,
    place         bigint not null,  -- its number; once it is old a newer one, so that pieces_from moves on
    piece         bigint not null,
    message_count bigint not null,  -- when its keys were noted
    keys          bigint[],         -- null: all keys. With ordering=none a key for each of its messages
    arrival_no    bigint,           -- no message of these keys waits before this place
    first_seq     bigint,
    claimed       boolean not null default false, -- ordering=none: all that is left of it is known to be claimed
    singly        boolean not null default false  -- it was dealt as slots of a key each, or of no key
);

-- Keys that are free although no piece of them was closed: their delay is over, a token came back, or a limit was
-- changed. The next dealer deals the messages that wait for them, and deletes the row.
create table if not exists pgqueue.freed_keys (
    consumer_id int      not null,
    place       bigint   not null,  -- rises, so that the cursor's freed_from moves on
    keys        bigint[] not null,
    arrival_no  bigint   not null,  -- no message of these keys waits before this place
    first_seq   bigint   not null
);

-- Spent tokens of keys, of consumers with per_key_interval: a delivery of n messages of a key spends n of its
-- per_key_burst tokens, and they come back after per_key_interval. See queue/key_tokens.sql.
create table if not exists pgqueue.key_tokens (
    consumer_id int         not null,
    key         bigint      not null,  -- its hash
    spent       bigint      not null,  -- messages of the key that a claim delivered
    returns_at  timestamptz not null,  -- the tokens come back then
    arrival_no  bigint      not null,  -- no message of the key waits before this place
    first_seq   bigint      not null
);

-- Of consumers with per_key_capacity: the messages with a key that they may not have finished. See
-- publish/key_capacity.sql.
create table if not exists pgqueue.key_backlog (
    consumer_id    int    not null,
    key            bigint not null,  -- its hash
    seq            bigint not null,
    publication_id bigint not null   -- that made it visible; 0: the consumer had taken it before it was noted
);

-- Of consumers with per_key_latest: the newest message of each key that they have taken. See queue/newest.sql. (The key
-- itself, not its hash: with two keys of one hash, a message would be lost without a word.)
create table if not exists pgqueue.newest_of_keys (
    consumer_id int         not null,
    key         text        collate "C" not null,
    seq         bigint      not null,
    noted_at    timestamptz not null,  -- the end of the hour in which it was noted
    primary key (consumer_id, key)
);

-- Consumers whose per_key_capacity was set lately: transactions that did not know of it may still publish messages, or
-- bring some back, that nobody enters in key_backlog. maintain() enters them, and deletes the row when none of the
-- transactions is left.
create table if not exists pgqueue.late_entries (
    late_no      bigint primary key generated always as identity,
    consumer_id  int    not null,
    set_by       xid8   not null,  -- a transaction that begins after its commit knows of the capacity
    transactions text[]            -- the others that are open, by their virtual ids; null: maintain() has not asked yet
);

-- Claims. A worker's claim is deleted when it ends. A Spark reader's claim is kept, with its original set, until the
-- reader has moved past it. The lease is on the claim, not on its messages. What its id is made of: see
-- new_claim_id().
create table if not exists pgqueue.claims (
    claim_id           bigint      primary key,
    consumer_id        int         not null,
    ordered            boolean     not null,
    live               boolean     not null default true,   -- false: nothing is left, or another claimer took over
    claimed_at         timestamptz not null,
    lease_until        timestamptz not null,
    visibility_timeout interval    not null,
    message_count      bigint      not null,                -- messages at the start
    remaining          bigint      not null,                -- messages not settled
    settled            bigint      not null default 0,      -- messages settled by the owner, one way or the other
    reader             uuid,
    owner              text,                                -- the application_name of the session that claimed
    archive            boolean     not null default false,  -- its consumer keeps history, notifies, or counts keys
    seqs               int8multirange,                      -- readers: the original set ...
    arrival_nos        int8multirange,                      -- ... and where its runs stand in the line
    lanes              int[],
    acted              pgqueue.acted_run[]                  -- of seqs, what its query settled by actions; null: nothing
);
create sequence if not exists pgqueue.claim_numbers;

-- The secret from which the tokens of claims and the numbers of table writes are made (base/slots.sql: keep_secret()):
-- the last value of a sequence, because a claim reads no table for it. Only the owner of the schema can read it.
create sequence if not exists pgqueue.claim_secret;

create table if not exists pgqueue.dead_messages (
    dead_id       bigint         generated always as identity primary key,
    stream_id     int            not null,
    consumer_id   int            not null,
    seqs          int8multirange not null,
    message_count bigint         not null,
    priority      int            not null,
    deliver_count int            not null,
    reason        text,           -- max deliveries, expired, poison, dropped; or the worker's, by default rejected
    details       jsonb,
    claim_id      bigint,
    died_at       timestamptz    not null default clock_timestamp(),
    note          jsonb,          -- as it was in the run
    owner         text            -- of the claim
);
