-- Consumers: what each has taken from its stream, and what it has not finished of that.

create table if not exists pgqueue.consumers (
    consumer_id        int         generated always as identity primary key,
    stream_id          int         not null references pgqueue.streams,
    stream_name        text        not null,                     -- the stream's, so that claims look for no stream
    name               text        not null,
    ordering           text        not null check (ordering in ('none', 'key', 'stream')),
    filtered           boolean     not null default false,       -- it gets only messages that pass its filter
    partitions         int,                                      -- of a group, see functions/groups.sql
    paused             boolean     not null default false,       -- it claims nothing
    scheduled          boolean     not null default false,       -- its stream has schedules
    created_at         timestamptz not null default clock_timestamp(),
    -- The settings that somebody gave it, by name. All others have the default of base/settings.sql, and follow it.
    given              text[]      not null default '{}',
    max_deliver_count  int         check (max_deliver_count > 0),  -- null: never, the setting's other word
    visibility_timeout interval    not null check (visibility_timeout > interval '0'),
    -- How the delay of a failed message grows: constant, linear or exponential. A null base is 0 if constant, else 1 s.
    backoff            text        not null,
    backoff_base       interval,
    backoff_cap        interval    not null,
    backoff_jitter     float8      not null,
    keep_history       interval,                                 -- how long acknowledgements are kept; null: not at all
    notify_done        boolean     not null,                     -- notify of what is acknowledged or dead
    max_backlog        bigint,                                   -- messages before it (back_pressure.sql); null: any
    on_full            text        not null,                     -- reject or drop_oldest
    per_key_limit      int,                                      -- messages of a key that may be in flight; null: any
    per_key_capacity   int,                                      -- unfinished ones (key_capacity.sql); null: any
    per_key_interval   interval,                                 -- in each such time, of a key at most ...
    per_key_burst      int         not null,                     -- ... so many are delivered; null interval: any
    per_key_latest     boolean     not null,                     -- of a key, only the newest waits (newest.sql)
    fair               boolean     not null,                     -- keys are served in turns
    max_in_flight      int,                                      -- messages in open claims (throttle.sql); null: any
    rate_limit         int,                                      -- so many messages are delivered at most ...
    rate_interval      interval,                                 -- ... within any such time; null: any
    -- How its messages are served. 'careful': claims have more to ask than what is ready, or acknowledgements more to
    -- do than to forget; else 'simple'. And 'keyed': by key. base/ways.sql has what else functions ask.
    way                text        not null generated always as (
        case when partitions is not null or paused or scheduled or filtered or keep_history is not null or notify_done
                  or max_backlog is not null or per_key_capacity is not null or per_key_latest
                  or per_key_interval is not null or (ordering <> 'none' and (per_key_limit is not null or fair))
                  or max_in_flight is not null or rate_limit is not null
             then 'careful' else 'simple' end
        || case when ordering <> 'none' or per_key_limit is not null or per_key_interval is not null or fair
                then ' keyed' else '' end) stored,
    unique (stream_id, name),
    unique (stream_name, name)
);

-- The filters of consumers, see queue/filters.sql.
-- on drop_consumer
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
    if to_regtype('pgqueue.received') is null then
        create type pgqueue.received as (
            claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int,
            deliver_count int, inserted_at timestamptz, saved jsonb);
        -- what it means for messages that they are returned, see return() in queue/return.sql
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
    if to_regtype('pgqueue.claimed') is null then
        create type pgqueue.claimed as (
            claim_id bigint,      -- null: there is no claim, ...
            message_count bigint, -- ... and then 0: there is nothing to claim
            stream_id int,
            -- of a claim whose messages are alike; else null
            seqs int8multirange, priority int, deliver_count int, saved jsonb,
            bundles bigint[]);    -- of another claim: its bundles, in the order of delivery
        -- where claims look in a lane: no free bundle stands before a place (null: none is free), and none at all
        -- before another one
        create type pgqueue.lane_hint as (lane int, place bigint, first_seq bigint, low_place bigint, low_seq bigint);
        -- Where claims of a consumer look, so that they pass over dead rows and over what is claimed. Hints may be
        -- lost: a hint that is too early costs time. One that is too late hides bundles: so all hints are read from
        -- what is stored once a minute, see look_anew().
        create type pgqueue.claim_hints as (
            lanes       pgqueue.lane_hint[],  -- of ready bundles, in the order in which they are served, ...
            lanes_from  int,          -- ... and no bundle is in other lanes below this one; null: in no other lane
            due_from    timestamptz,  -- no delayed bundle is due before; null: none is delayed
            held_from   timestamptz,  -- no lease of a bundle in lane_held() ended before: nearly always
            probe_at    timestamptz,  -- claims look for leases that ended from then on,
            looked_at   timestamptz,  -- all hints were read from what is stored then,
            gaps_probe  timestamptz,  -- and while something is ready, claims look into the gaps again from then on
            quiet_until timestamptz,  -- until then, nothing that is known comes before the first free bundle
            was_cut     boolean,      -- the last take stopped at its limit
            filter_from bigint,       -- the place of the first unfiltered bundle, or one before; null: there is none
            more        bigint,       -- who claims a bundle from this number on cuts, or deals, ahead; null: nobody
            size        int,          -- messages of the bundles that were cut or dealt last
            parks       boolean,      -- by key: bundles may be waiting or delayed, or held with a key
            waits_from  bigint,       -- in lane_waiting no key is behind a bundle before this place, ...
            free_from   bigint,       -- ... and none that may be dealt stands before this one
            freed_from  bigint,       -- the place of the first bundle in lane_freed, when all hints were read
            tokens_from timestamptz,  -- no spent token of a key came back before
            whole       boolean,      -- by key: a claim may hold all keys
            dealt_until timestamptz); -- another claimer was turned away: until then no claim takes all keys
    end if;
end $$;

-- A consumer's cursor: its position, and hints. It is never updated: a new version is inserted and the version before
-- is deleted. The newest version is read first, so that dead versions behind a long transaction elsewhere cost nothing.
-- on drop_consumer
create table if not exists pgqueue.consumer_cursors (
    consumer_id      int                  not null,
    version          bigint               not null,
    -- What was taken. Every publication id below next_publication was taken, is dead, or is in one of the gaps.
    next_publication bigint               not null,
    gaps             bigint[]             not null default '{}',         -- the consumer's rows of consumer_gaps
    -- How many messages it took, in all; and how many of these left without being settled: filtered out, or forgotten
    -- by seek. From these two the number of settled messages follows, without counting (inspect/views.sql).
    taken            bigint               not null default 0,
    forgotten        bigint               not null default 0,
    last_arrival     bigint               not null default 0,            -- the last arrival_no that was given out
    -- With rate_limit only: how many messages were delivered lately, and until when they count. See queue/throttle.sql.
    delivered        int[],
    delivered_at     timestamptz[],
    hints            pgqueue.claim_hints,                                -- null: lost
    primary key (consumer_id, version)
);

-- The gaps in what a consumer has taken: publication ids below the end that were not visible when it looked. The
-- consumer looks for them again when a transaction that may fill them has ended, and closes them when all of these
-- have. See log/gaps.sql. A row is never updated, and is found by the numbers in the cursor.
-- on drop_consumer
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

-- The publications that claims took ahead of a consumer's cursor, without its lock (claim/ahead.sql). Who moves the
-- cursor past them deletes them. A row is never updated.
-- on drop_consumer
create table if not exists pgqueue.taken_ahead (
    consumer_id    int    not null,
    publication_id bigint not null,
    message_count  bigint not null,  -- that the cursor does not count yet
    lane           int,              -- where the messages stand: in this lane, ...
    place          bigint,           -- ... not before this place; nulls: the hints know it
    first_seq      bigint,
    primary key (consumer_id, publication_id)
);

-- The bundles: what a consumer has taken and not finished. All messages of a bundle are alike; a bundle with a token is
-- claimed. base/bundles.sql says what its lane and place mean. Claims change the columns from token on, which no index
-- has: so each page keeps room for the second version of its rows, and their records in the WAL have no other column.
create table if not exists pgqueue.consumer_messages (
    consumer_id        int            not null,
    bundle_no          bigint         not null,  -- of claim_numbers
    lane               int            not null,
    place              bigint         not null,
    first_seq          bigint         not null,  -- no message has a lower number
    arrival_no         bigint         not null,  -- when it was taken: the order of arrival
    priority           int            not null,
    deliver_count      int            not null,  -- before the claim that holds it
    key                bigint,                   -- the key's hash: of waiting and delayed bundles by key, ...
    behind             bigint,                   -- ... of a dealt one the bundle that has to be gone before
    not_visible_until  timestamptz,
    last_delivered_at  timestamptz,
    -- error: the last one; attempts: the last failed deliveries; at_most: messages of a claim with one; expires; saved;
    -- spark: deliveries to Spark, which max_deliver_count and backoff do not count
    note               jsonb,
    keys               bigint[],                 -- of a dealt one, and of its claim: the hashes of its keys. Without an
                                                 -- order one for each message. Null by key: all keys may be in it
    shrunk             boolean        not null default false,  -- some of these keys may have left
    message_count      bigint         not null,
    seqs               int8multirange not null,
    token              bigint,                   -- the random bits of the claim's id; null: it is free
    claimed_at         timestamptz,
    lease_until        timestamptz,              -- of the head of a claim
    visibility_timeout interval,
    owner              text,                     -- the application_name of the session that claimed
    members            bigint[],                 -- of a head: the other bundles of its claim
    head               bigint,                   -- of a member: the first bundle of its claim
    reader             uuid                      -- Spark's reader, whose claim it is
) with (fillfactor = 50);

-- Messages of bundles by key: of which key each set is (null: of no key), and of which bundle; and whether the limits
-- of the key hold it back.
do $$
begin
    if to_regtype('pgqueue.keyed_messages') is null then
        create type pgqueue.keyed_messages as (
            bundles pgqueue.consumer_messages[], nos int[], keys bigint[], seqs int8multirange[], counts bigint[],
            held boolean[]);
    end if;
end $$;

-- Spent tokens of keys, of consumers with per_key_interval: a delivery of n messages of a key spends n of its
-- per_key_burst tokens, and they come back after per_key_interval. See queue/key_tokens.sql.
-- on drop_consumer
create table if not exists pgqueue.key_tokens (
    consumer_id int         not null,
    key         bigint      not null,  -- its hash
    spent       bigint      not null,  -- messages of the key that a claim delivered
    returns_at  timestamptz not null   -- the tokens come back then
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
-- on drop_consumer
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

-- The numbers of bundles, of which the ids of claims are made; and those of the claims of checkpoint readers.
create sequence if not exists pgqueue.claim_numbers;

-- The secret from which the tokens of claims and the numbers of table writes are made (base/bundles.sql:
-- keep_secret()): the last value of a sequence, because a claim reads no table for it. Only the owner of the schema can
-- read it.
create sequence if not exists pgqueue.claim_secret;

-- on drop_consumer
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
    note          jsonb,          -- as it was in the bundle
    owner         text            -- of the claim
);
