-- Bundles and claims. A bundle is a row of consumer_messages: messages of a consumer that are alike. A claim is one
-- bundle with a token, or several bundles with the same token: a head, which has the lease, and the members that it
-- lists.
--
-- The lane of a bundle says its state, so one index, consumer_messages_lane, finds what is next, due, expired or
-- waiting:
--
--   lane               place                  the bundles
--   -priority          arrival_no             without an order: ready, or recently claimed
--   lane_assigned()    bundle_no, or before   by key: assigned; ready, recently claimed, or waiting for a predecessor
--   lane_unassigned()  arrival_no             by key: ready and not assigned, keys mixed
--   lane_delayed()     a time                 due then: a delay ends, or tokens of the key come back
--   lane_long()        the end of the lease   claimed for longer than a second
--   lane_waiting()     queue/keys/waiting.sql by key: wait for a bundle, or may be assigned
--   lane_unfiltered()  unfiltered_place()     taken; not screened yet by the filter or per_key_latest
--   lane_freed()       a time                 by key: no messages; says that a claim in lane_long() has freed the key
--
-- A claim is one update of the first free bundle of a lane, which locks only that row, and its acknowledgement is one
-- delete. A bundle is free when it has no token and, by key, when its predecessor is deleted. Only a delete makes a
-- bundle invisible, so at READ COMMITTED no session sees a free bundle while an earlier message of its key is
-- elsewhere. A call that returns, delays or splits a bundle either keeps its number, or moves the bundles that follow
-- it to lane_waiting() in the same transaction.
--
-- The id of a worker's claim consists of 20 bits of the number of its head and the token, of 43 bits. The token is odd
-- unless the acknowledgement must record something (records_ends()). A bundle is found by these only with is_head().

-- The bundles: what a consumer has taken and not finished. All messages of a bundle are alike. A bundle with a token is
-- claimed. Claims change only the columns from token on, which are in no index: so each page keeps space for a second
-- version of its rows, and the WAL records of claims contain no other column.
create table if not exists pgqueue.consumer_messages (
    consumer_id        int            not null,
    bundle_no          bigint         not null,  -- from the sequence claim_numbers
    lane               int            not null,
    place              bigint         not null,
    first_seq          bigint         not null,  -- no message has a lower number
    arrival_no         bigint         not null,  -- the order in which bundles were taken
    priority           int            not null,
    deliver_count      int            not null,  -- without the claim that holds it
    key                bigint,                   -- the hash of the key: of waiting, delayed, long and freed bundles
    predecessor        bigint,                   -- of an assigned bundle: the one that must be deleted first
    not_visible_until  timestamptz,
    last_delivered_at  timestamptz,
    -- error: the last error; attempts: the last failed deliveries; at_most: the size of a claim with one of the
    -- messages; expires; saved; spark: deliveries to Spark, which max_deliver_count and backoff do not count
    note               jsonb,
    keys               bigint[],                 -- of an assigned bundle and its claim: the hashes of its keys;
                                                 -- without an order one per message. Null by key: any key
    shrunk             boolean        not null default false,  -- some of these keys may no longer be in it
    message_count      bigint         not null,
    seqs               int8multirange not null,
    token              bigint,                   -- the random bits of the claim's id; null: not claimed
    claimed_at         timestamptz,
    lease_until        timestamptz,              -- of the head of a claim
    visibility_timeout interval,
    owner              text,                     -- the application_name of the session that claimed
    members            bigint[],                 -- of a head: the other bundles of its claim
    head               bigint,                   -- of a member: the first bundle of its claim
    reader             uuid                      -- the Spark reader whose claim it is
) with (fillfactor = 50);

-- The numbers of bundles, from which the ids of claims are made; also used for the claims of checkpoint readers.
create sequence if not exists pgqueue.claim_numbers;

-- The secret from which keep_secret() makes the tokens of claims and the numbers of table writes: the last value of a
-- sequence, because then a claim reads no table for it. Only the owner of the schema can read it.
create sequence if not exists pgqueue.claim_secret;

-- The id of a claim.
create or replace function _pgqueue.claim_id(p_bundle_no bigint, p_token bigint) returns bigint
language sql immutable parallel safe as $$ select (p_bundle_no & 1048575) << 43 | p_token $$;

-- The bits of a bundle's number that are in a claim's id. An index finds the bundle by these.
create or replace function _pgqueue.number_in(p_claim_id bigint) returns bigint
language sql immutable parallel safe as $$ select p_claim_id >> 43 $$;

-- The token in a claim's id.
create or replace function _pgqueue.token_in(p_claim_id bigint) returns bigint
language sql immutable parallel safe as $$ select p_claim_id & 8796093022207 $$;

-- Creates the secret (claim_secret), unless there is one. A dump without data has none.
create or replace function _pgqueue.keep_secret() returns void
language plpgsql as $$
begin
    if pg_sequence_last_value('pgqueue.claim_secret') is null then
        perform setval('pgqueue.claim_secret',
                       greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9223372036854775807, 1));
    end if;
end $$;

-- 64 bits that cannot be guessed, even with knowledge of others: from the secret and the time in microseconds. (Two
-- calls in one microsecond return the same; the id of a claim also has a number.) random() is not suitable: a user who
-- sets its seed can predict it. gen_random_uuid() would cost a tenth of a small claim, so it is used only where a
-- restore lost the secret.
create or replace function _pgqueue.unguessable() returns bigint
language sql volatile as $$
    select hashtextextended(sha256(
               int8send(coalesce(pg_sequence_last_value('pgqueue.claim_secret'),
                                 uuid_hash_extended(gen_random_uuid(), 0)))
               || timestamptz_send(clock_timestamp()))::text, 0)
$$;

-- A new token.
--   p_notes  an acknowledgement must record something
create or replace function _pgqueue.new_token(p_notes boolean default false) returns bigint
language sql volatile as $$
    select (_pgqueue.unguessable() & 4398046511103) << 1 | case when p_notes then 0 else 1 end
$$;

-- A new id for the lease of a group's partition. The id contains the time, so an id that a crash lost is not used again
-- (with synchronous_commit = off, a sequence may lose its last numbers).
create or replace function _pgqueue.new_lease_id() returns bigint
language sql volatile as $$ select _pgqueue.claim_id(nextval('pgqueue.claim_numbers'), _pgqueue.new_token()) $$;

-- A new id for a claim of a checkpoint reader. These ids rise: an offset stands for all claims of its reader up to one.
-- 23 random bits make ids unique although a crash may lose numbers, as above. The id gives no right: all calls about
-- such a claim also name the reader.
create or replace function _pgqueue.new_reader_claim_id() returns bigint
language sql volatile as $$
    select (nextval('pgqueue.claim_numbers') << 24) | ((_pgqueue.unguessable() & 8388607) << 1)
$$;

-- A time as a place in a lane, in microseconds. (In UTC: an expression that depends on no setting can be inlined.)
create or replace function _pgqueue.place_at(p_time timestamptz) returns bigint
language sql immutable parallel safe as $$ select (extract(epoch from p_time at time zone 'UTC') * 1000000)::bigint $$;

-- The time of a place.
create or replace function _pgqueue.time_of(p_place bigint) returns timestamptz
language sql immutable parallel safe as $$
    select (timestamp 'epoch' + p_place * interval '1 microsecond') at time zone 'UTC'
$$;

-- The place of an unfiltered bundle. Bundles are screened in the order in which they will be delivered.
create or replace function _pgqueue.unfiltered_place(p_keyed boolean, p_priority int, p_arrival_no bigint)
returns bigint language sql immutable parallel safe as $$
    select case when p_keyed then 0 else (32767 - p_priority)::bigint << 46 end + p_arrival_no
$$;

-- Whether a bundle has this number. An index finds it by the bits that are in the ids of claims. (The function is
-- inlined.)
create or replace function _pgqueue.is_bundle(p_bundle_no bigint, p_number bigint) returns boolean
language sql immutable parallel safe as $$
    select p_bundle_no & 1048575 = p_number & 1048575 and p_bundle_no = p_number
$$;

-- Whether a bundle is the head of the claim with this number and token. The number may be only the bits in the claim's
-- id. A member of the claim has the same token, and may have the same bits; but it names its head. (The function is
-- inlined.)
create or replace function _pgqueue.is_head(p_bundle_no bigint, p_token bigint, p_head bigint, p_number bigint,
                                            p_claim_token bigint) returns boolean
language sql immutable parallel safe as $$
    select p_bundle_no & 1048575 = p_number & 1048575 and p_token = p_claim_token and p_head is null
$$;

-- Whether the bundle of a number is deleted. (A scalar subquery with a limit: the planner would turn anything else into
-- a join with the whole table.)
create or replace function _pgqueue.is_deleted(p_bundle_no bigint) returns boolean
language sql stable as $$
    select (select true from pgqueue.consumer_messages
            where _pgqueue.is_bundle(bundle_no, p_bundle_no) limit 1) is null
$$;

-- The bundles of these numbers.
create or replace function _pgqueue.bundles(p_numbers bigint[]) returns setof pgqueue.consumer_messages
language sql stable as $$
    select m.* from unnest(p_numbers) n
    cross join lateral (select * from pgqueue.consumer_messages
                        where _pgqueue.is_bundle(bundle_no, n) limit 1) m
$$;

-- Where the bundles of these numbers are, for a statement that changes them: any other condition on many numbers costs
-- their square, or depends on statistics. Needs the locks of the bundles: a place is wrong once another session has
-- updated the row.
create or replace function _pgqueue.tids(p_numbers bigint[]) returns tid[]
language plpgsql stable as $$
begin
    return array(select m.tid from unnest(p_numbers) n
                 cross join lateral (select ctid as tid from pgqueue.consumer_messages
                                     where _pgqueue.is_bundle(bundle_no, n) limit 1) m);
end $$;

-- The assigned bundles of a consumer, whether free or recently claimed. (The function is inlined.)
--   p_lane  the hint for lane_assigned(); null: there are none
create or replace function _pgqueue.assigned(p_consumer_id int, p_lane pgqueue.lane_hint)
returns setof pgqueue.consumer_messages language sql stable as $$
    select * from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and lane = _pgqueue.lane_assigned()
      and (place, first_seq) >= ((p_lane).low_place, (p_lane).low_seq)
$$;

-- The bundles of a claim, the head first; none if the claim is not live.
create or replace function _pgqueue.bundles_of(p_head bigint, p_token bigint) returns setof pgqueue.consumer_messages
language sql stable as $$
    select (h.b).* from (select b from pgqueue.consumer_messages b
                         where _pgqueue.is_head(bundle_no, token, head, p_head, p_token) limit 1) h
    union all
    select m.* from (select members from pgqueue.consumer_messages
                     where _pgqueue.is_head(bundle_no, token, head, p_head, p_token) limit 1) h
    cross join lateral _pgqueue.bundles(h.members) m where m.token = p_token
$$;

-- How many messages are in bundles.
create or replace function _pgqueue.count_of(p_bundles pgqueue.consumer_messages[]) returns bigint
language plpgsql immutable as $$
begin
    if cardinality(p_bundles) = 1 then
        return p_bundles[1].message_count;
    end if;
    return (select coalesce(sum(message_count), 0) from unnest(p_bundles));
end $$;

-- The messages in bundles.
create or replace function _pgqueue.seqs_of(p_bundles pgqueue.consumer_messages[]) returns int8multirange
language sql immutable as $$ select coalesce(range_agg(seqs), '{}') from unnest(p_bundles) $$;

-- Locks members of a claim, and returns them. A session that assigns messages may have locked one, and writes its keys:
-- so they are found by their numbers, which that does not change.
create or replace function _pgqueue.lock_members(p_members bigint[], p_token bigint)
returns pgqueue.consumer_messages[] language sql as $$
    select array(
        select m.b from (select unnest(p_members) as no order by 1) n
        cross join lateral (select b from pgqueue.consumer_messages b
                            where _pgqueue.is_bundle(bundle_no, n.no) and token = p_token
                            limit 1 for update) m)  -- lock: bundle
$$;

-- Locks the bundles of a claim. Returns them, the head first; null if the claim is not live. Errors: as
-- lock_consumer().
create or replace function _pgqueue.lock_bundles(p_head bigint, p_token bigint) returns pgqueue.consumer_messages[]
language plpgsql as $$
declare
    v_head pgqueue.consumer_messages;
begin
    select * into v_head from pgqueue.consumer_messages
    where _pgqueue.is_head(bundle_no, token, head, p_head, p_token) for update skip locked;  -- lock: bundle
    if not found then
        if exists (select from pgqueue.consumer_messages
                   where _pgqueue.is_head(bundle_no, token, head, p_head, p_token)) then
            perform _pgqueue.await('claim ' || _pgqueue.claim_id(p_head, p_token),
                'select count(*) from (select from pgqueue.consumer_messages '
                'where _pgqueue.is_head(bundle_no, token, head, $1, ($2 -> 0)::bigint) for update) b',  -- lock: bundle
                p_head, jsonb_build_array(p_token));
        end if;
        select * into v_head from pgqueue.consumer_messages
        where _pgqueue.is_head(bundle_no, token, head, p_head, p_token) for update;  -- lock: bundle
    end if;
    if v_head.members is not null then
        return v_head || _pgqueue.lock_members(v_head.members, p_token);
    end if;
    return case when v_head.token is not null then array[v_head] end;
end $$;

-- Locks a consumer and the head of one of its claims, in tries: the session that has locked the claim may keep it, and
-- meanwhile other claims wait for the consumer's lock.
create or replace function _pgqueue.lock_consumer_and(p_claim_id bigint, p_consumer_id int) returns void
language plpgsql as $$
begin
    perform _pgqueue.lock_consumer(p_consumer_id);
    perform from pgqueue.consumer_messages
    where _pgqueue.is_head(bundle_no, token, head, _pgqueue.number_in(p_claim_id), _pgqueue.token_in(p_claim_id))
    for update skip locked;  -- lock: bundle
    if not found and exists (
        select from pgqueue.consumer_messages
        where _pgqueue.is_head(bundle_no, token, head, _pgqueue.number_in(p_claim_id), _pgqueue.token_in(p_claim_id))
    ) then
        raise exception using errcode = 'PQ099';
    end if;
exception when sqlstate 'PQ099' then
    perform _pgqueue.await('claim ' || p_claim_id,
        'select count(*) from (select from pgqueue.consumers c '
        'cross join lateral _pgqueue.lock_consumer(c.consumer_id) '
        'cross join lateral (select from pgqueue.consumer_messages '
        'where _pgqueue.is_head(bundle_no, token, head, _pgqueue.number_in($1), _pgqueue.token_in($1)) '
        'for update) b '  -- lock: bundle
        'where c.consumer_id = ($2 -> 0)::int) l',
        p_claim_id, jsonb_build_array(p_consumer_id), p_try => interval '50 ms');
end $$;

-- Locks a live claim of a worker; with p_and_consumer its consumer first, for a caller that returns messages. Returns
-- the bundles of the claim, the head first; null, with a warning, if the claim is not live or belongs to a checkpoint
-- reader.
create or replace function _pgqueue.lock_claim(p_claim_id bigint, p_and_consumer boolean)
returns pgqueue.consumer_messages[] language plpgsql as $$
declare
    v_bundles pgqueue.consumer_messages[];
    v_id      int;
begin
    if p_and_consumer then
        select consumer_id into v_id from pgqueue.consumer_messages
        where _pgqueue.is_head(bundle_no, token, head, _pgqueue.number_in(p_claim_id), _pgqueue.token_in(p_claim_id));
        perform _pgqueue.lock_consumer_and(p_claim_id, v_id) where v_id is not null;
    end if;
    if v_id is not null or not p_and_consumer then
        v_bundles := _pgqueue.lock_bundles(_pgqueue.number_in(p_claim_id), _pgqueue.token_in(p_claim_id));
    end if;
    if v_bundles is null or v_bundles[1].reader is not null then
        perform _pgqueue.warn_not_live(p_claim_id);
        return null;
    end if;
    return v_bundles;
end $$;

-- Warns that a claim is not live.
create or replace function _pgqueue.warn_not_live(p_claim_id bigint) returns void
language plpgsql as $$
begin
    raise warning 'claim % is not live: it was settled, or its visibility timeout expired and another worker took it '
                  'over; or a Spark query holds it; nothing was changed',
                  coalesce(p_claim_id::text, 'null');
end $$;

do $$ begin perform _pgqueue.keep_secret(); end $$;
