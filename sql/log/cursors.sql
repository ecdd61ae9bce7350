-- What a consumer has taken of its stream: its cursor, the gaps in it, and the publications taken ahead of it.

-- (Claims use named types, because Postgres resolves the column types of anonymous records at each call, which costs a
-- fifth of a small claim.)

-- Hints: where claims of a consumer start to read, so that they skip dead rows and claimed bundles. Hints may be lost.
-- A hint that is too early costs time; one that is too late hides bundles. So rebuild_hints() reads all hints from the
-- stored rows once a minute.
do $$
begin
    if to_regtype('pgqueue.claim_hints') is null then
        -- The hint of a lane: no bundle before (place, first_seq) is free (null: no bundle is), and no bundle at all is
        -- before (low_place, low_seq).
        create type pgqueue.lane_hint as (lane int, place bigint, first_seq bigint, low_place bigint, low_seq bigint);
        create type pgqueue.claim_hints as (
            lanes          pgqueue.lane_hint[],  -- of ready bundles, by lane, ...
            lanes_from     int,                -- ... and lanes below this one have no other; null: no lane has
            due_from       timestamptz,        -- no delay ends before; null: nothing is delayed
            long_from      timestamptz,        -- no lease of a bundle in lane_long() ends before; nearly always true
            probe_at       timestamptz,        -- when claims next check for expired leases,
            rebuilt_at     timestamptz,        -- when all hints were last read from the stored rows,
            gaps_probe     timestamptz,        -- and, while messages are ready, when they next read the gaps
            idle_until     timestamptz,        -- until then, no known work is due before the first free bundle
            was_cut        boolean,            -- the last take stopped at its limit
            filter_from    bigint,             -- the first unfiltered bundle is here or later; null: none is
            prefetch_at    bigint,             -- a claim of a bundle of this number or above prefetches; null: none
            size           int,                -- the number of messages of the bundles last cut or assigned
            any_waiting    boolean,            -- by key: bundles may be waiting, delayed, or long claims with a key
            waits_from     bigint,             -- in lane_waiting() no key waits for a bundle before this place, ...
            free_from      bigint,             -- ... and none that may be assigned is before this one
            freed_from     bigint,             -- the first place in lane_freed(), or a minute before rebuilt_at
            tokens_from    timestamptz,        -- no spent token of a key is due before
            all_keys       boolean,            -- by key: a claim may hold all keys
            assigned_until timestamptz);       -- a claim found all keys held: until then no claim takes all keys
    end if;
end $$;

-- A consumer's cursor: its position, and hints. A cursor is never updated: a new version is inserted and the version
-- before is deleted. The newest version is read first, so dead versions that a long transaction elsewhere keeps cost
-- nothing.
-- on drop_consumer
create table if not exists pgqueue.consumer_cursors (
    consumer_id      int                  not null,
    version          bigint               not null,
    -- Every publication id below next_publication was taken, is dead, or is in one of the gaps.
    next_publication bigint               not null,
    gaps             bigint[]             not null default '{}',         -- the consumer's rows of consumer_gaps
    -- How many messages the consumer took in all, and how many of these it removed without settling them: filtered out,
    -- replaced, or skipped by seek. The number of settled messages follows without counting (operate/views.sql).
    taken            bigint               not null default 0,
    forgotten        bigint               not null default 0,
    last_arrival     bigint               not null default 0,            -- the last arrival_no assigned to a bundle
    -- With rate_limit: how many messages were delivered recently, and until when they count (queue/claim/throttle.sql).
    delivered        int[],
    delivered_at     timestamptz[],
    hints            pgqueue.claim_hints,                                -- null: lost
    primary key (consumer_id, version)
);

-- The gaps in what a consumer has taken: publication ids below next_publication that were not visible when the consumer
-- read them. The consumer reads them again when a transaction that may fill them has ended, and closes a gap when all
-- such transactions have. See log/gaps.sql. A row is never updated; the cursor has its number.
-- on drop_consumer
create table if not exists pgqueue.consumer_gaps (
    consumer_id     int            not null,
    gap_no          bigint         not null,
    publication_ids int8multirange not null,
    range_count     int            not null,
    publishers      text[]         not null,  -- virtual ids of the transactions that may still fill it
    look            boolean        not null,  -- read at the next take, even if no transaction has ended
    excluded        int8multirange,           -- messages not to take from it (reading/positions.sql); null: none
    primary key (consumer_id, gap_no)
);
create sequence if not exists pgqueue.gap_numbers;

-- The publications that claims took ahead of a consumer's cursor, without its lock (queue/claim/ahead.sql). The session
-- that moves the cursor past them deletes them. A row is never updated.
-- on drop_consumer
create table if not exists pgqueue.taken_ahead (
    consumer_id    int    not null,
    publication_id bigint not null,
    message_count  bigint not null,  -- not counted in the cursor yet
    lane           int,              -- the lane of the messages, ...
    place          bigint,           -- ... which are not before this place; nulls: the hints have it
    first_seq      bigint,
    primary key (consumer_id, publication_id)
);
