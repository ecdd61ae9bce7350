-- What a consumer has taken of its stream: its cursor, the gaps in it, and what was taken ahead of it.

-- (Claims get named types: a function that returns columns of its own has them looked up at each call, for a fifth of
-- the cost of a small claim.)

-- Where claims of a consumer look, so that they pass over dead rows and over what is claimed. Hints may be
-- lost: a hint that is too early costs time. One that is too late hides bundles: so all hints are read from
-- what is stored once a minute, see rebuild_hints().
do $$
begin
    if to_regtype('pgqueue.claim_hints') is null then
        -- no free bundle of a lane stands before a place (null: none is free), and none at all before another one
        create type pgqueue.lane_hint as (lane int, place bigint, first_seq bigint, low_place bigint, low_seq bigint);
        create type pgqueue.claim_hints as (
            lanes          pgqueue.lane_hint[],  -- of ready bundles, in the order in which they are served, ...
            lanes_from     int,                -- ... and no bundle is in other lanes below; null: in none
            due_from       timestamptz,        -- no delayed bundle is due before; null: none is delayed
            long_from      timestamptz,        -- no lease of a bundle in lane_long() ended before: nearly always
            probe_at       timestamptz,        -- claims look for leases that ended from then on,
            rebuilt_at     timestamptz,        -- all hints were read from what is stored then,
            gaps_probe     timestamptz,        -- and, while something is ready, into the gaps
            idle_until     timestamptz,        -- until then, nothing that is known comes before the first free bundle
            was_cut        boolean,            -- the last take stopped at its limit
            filter_from    bigint,             -- where the first unfiltered bundle is, or before; null: none
            prefetch_at    bigint,             -- a claim of a bundle from this number on prefetches; null: none
            size           int,                -- messages of the bundles that were cut or assigned last
            any_waiting    boolean,            -- by key: bundles may be waiting or delayed, or held with a key
            waits_from     bigint,             -- in lane_waiting no key is behind a bundle before this place, ...
            free_from      bigint,             -- ... and none that may be assigned stands before this one
            freed_from     bigint,             -- the place of the first bundle in lane_freed, when all hints were read
            tokens_from    timestamptz,        -- no spent token of a key came back before
            all_keys       boolean,            -- by key: a claim may hold all keys
            assigned_until timestamptz);       -- another claimer was turned away: until then no claim takes all keys
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
    -- by seek. From these two the number of settled messages follows, without counting (operate/views.sql).
    taken            bigint               not null default 0,
    forgotten        bigint               not null default 0,
    last_arrival     bigint               not null default 0,            -- the last arrival_no that was given out
    -- With rate_limit only: how many messages were delivered lately, and until when they count. See
    -- queue/claim/throttle.sql.
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
    excluded        int8multirange,           -- messages not taken with it (reading/positions.sql); null: none
    primary key (consumer_id, gap_no)
);
create sequence if not exists pgqueue.gap_numbers;

-- The publications that claims took ahead of a consumer's cursor, without its lock (queue/claim/ahead.sql). Who moves
-- the cursor past them deletes them. A row is never updated.
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
