-- A slot as a claim: its id, and how it becomes a claim of the usual kind; and locking a claim of either kind.
--
-- The id of a slot's claim has 20 bits of the slot's number, and a token of 43 bits: 6 times a number that nobody
-- knows, and 1 or, if the slot goes on (go_on()), 3. So the last bit is 1; that of all other ids of claims is 0.

-- The id of the claim that a slot is with a token.
create or replace function _pgqueue.slot_claim(p_slot bigint, p_token bigint) returns bigint
language sql immutable parallel safe
as $$ select (p_slot & 1048575) << 43 | p_token $$;

-- Makes the secret (tables/consumers.sql), unless there is one. A dump without data has none.
create or replace function _pgqueue.keep_secret() returns void
language plpgsql
as $$
begin
    if pg_sequence_last_value('pgqueue.claim_secret') is null then
        perform setval('pgqueue.claim_secret',
                       greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9223372036854775807, 1));
    end if;
end $$;

-- 64 bits that nobody can guess, also who knows others: from the secret and the time, in microseconds. (Two of one time
-- are the same: ids of claims have a number, too.) random() will not do: who sets its seed knows what follows.
-- gen_random_uuid() would cost a small claim a tenth of its time, so it serves only where a restore lost the secret.
create or replace function _pgqueue.unguessable() returns bigint
language sql volatile
as $$
    select hashtextextended(sha256(
               int8send(coalesce(pg_sequence_last_value('pgqueue.claim_secret'),
                                 uuid_hash_extended(gen_random_uuid(), 0)))
               || timestamptz_send(clock_timestamp()))::text, 0)
$$;

-- A token that nobody knows, of a slot that does not go on.
create or replace function _pgqueue.new_token() returns bigint
language sql volatile
as $$ select (_pgqueue.unguessable() & 1099511627775) * 6 + 1 $$;

-- The bits of a slot's number that are in a claim's id: by these, the slot is in an index.
create or replace function _pgqueue.place_in(p_claim_id bigint) returns bigint
language sql immutable parallel safe
as $$ select p_claim_id >> 43 $$;

-- The token in a claim's id.
create or replace function _pgqueue.token_in(p_claim_id bigint) returns bigint
language sql immutable parallel safe
as $$ select p_claim_id & 8796093022207 $$;

-- Whether the slot of a claim's id goes on once it is acknowledged.
create or replace function _pgqueue.goes_on(p_claim_id bigint) returns boolean
language sql immutable parallel safe
as $$ select _pgqueue.token_in(p_claim_id) % 6 = 3 $$;

-- Whether a claim's id is one of a slot. The slot may be a claim of the usual kind by now, with the same id.
create or replace function _pgqueue.is_slot(p_claim_id bigint) returns boolean
language sql immutable parallel safe
as $$ select p_claim_id & 1 = 1 $$;

-- The claim that a claimed slot is, as a row of claims.
create or replace function _pgqueue.claim_of(p_slot pgqueue.slots) returns pgqueue.claims
language sql immutable
as $$
    select (_pgqueue.slot_claim(p_slot.slot, p_slot.token), p_slot.consumer_id, p_slot.piece is not null, true,
            p_slot.claimed_at,
            p_slot.lease_until, p_slot.timeout, p_slot.message_count, p_slot.message_count, 0, null, p_slot.owner,
            false, null, null, null, null)::pgqueue.claims
$$;

-- Cuts a set of messages into what a slot has of it: the first p_size; as rest, those of more claims, in slots.parts
-- parts; and what comes later, which is too much for a slot.
create or replace function _pgqueue.cut_parts(p_seqs int8multirange, p_size bigint)
returns table (first int8multirange, rest int8multirange[], parts int, later int8multirange)
language sql immutable parallel safe
as $$
    -- one range takes no more room the longer it is
    select _pgqueue.below(p_seqs, lower(p_seqs) + p_size),
           nullif(array[p_seqs * int8multirange(int8range(
                      lower(p_seqs) + p_size, lower(p_seqs) + 8 * p_size * _pgqueue.limit_parts()))],
                  array['{}'::int8multirange]),
           null::int,
           p_seqs * int8multirange(int8range(lower(p_seqs) + 8 * p_size * _pgqueue.limit_parts(), null))
    where p_seqs = int8multirange(range_merge(p_seqs))
    union all
    select int8multirange(variadic e[:p_size]),
           nullif(array(select int8multirange(variadic e[no * p_size + 1:(no + 1) * p_size])
                        from generate_series(c.parts, 1, -1) no), '{}'),
           c.parts, p_seqs * int8multirange(int8range(upper(e[cardinality(e)]), null))
    from (select array(select int8range(n, n + 1)
                       from (select generate_series(lower(r), upper(r) - 1) as n from unnest(p_seqs) r
                             limit p_size * _pgqueue.limit_parts()) n) as e
          offset 0) a  -- (offset 0: the array is made once)
    cross join lateral (select ((cardinality(e) - 1) / p_size)::int as parts) c
    where p_seqs <> int8multirange(range_merge(p_seqs))
$$;

-- What a slot goes on with; null: nothing.
create or replace function _pgqueue.rest_of(p_slot pgqueue.slots) returns int8multirange
language sql immutable parallel safe
as $$ select range_agg(r) from unnest(p_slot.rest[:coalesce(p_slot.parts, 1)]) r $$;

-- The runs that a slot is, as rows of consumer_messages: ready, or claimed, and by key a piece; and what comes next of
-- its key, which waits. Of a slot with all keys, all but what is claimed is ready, in the line.
create or replace function _pgqueue.runs_of_slot(p_slot pgqueue.slots) returns setof pgqueue.consumer_messages
language sql immutable
as $$
    select p_slot.consumer_id,
           case when p_slot.token is not null and not r.rest then 'claimed'
                when r.rest and p_slot.whole is null then 'waiting' else 'ready' end,
           case when p_slot.whole then 1 when p_slot.piece is null then -p_slot.priority else 0 end,
           p_slot.priority, (p_slot.token is not null and not r.rest)::int, p_slot.arrival_no,
           case when r.rest or p_slot.whole then p_slot.arrival_no else coalesce(p_slot.piece, p_slot.arrival_no) end,
           c.first_seq, c.message_count, c.seqs,
           case when not r.rest then _pgqueue.slot_claim(p_slot.slot, p_slot.token) end, null::timestamptz,
           case when not r.rest then p_slot.claimed_at end, null::jsonb,
           case when r.rest then p_slot.key end,
           case when not r.rest and (p_slot.whole is null or p_slot.token is not null) then p_slot.piece end
    from unnest(array[false, true], array[p_slot.seqs, _pgqueue.rest_of(p_slot)]) r (rest, seqs)
    -- a piece with an order stays one run: it is small, and two runs might have messages of one key
    cross join lateral (
        select * from _pgqueue.split_set(r.seqs) where r.rest or p_slot.message_count > _pgqueue.limit_piece_by_key()
        union all
        select r.seqs, p_slot.message_count, lower(r.seqs)
        where not r.rest and p_slot.message_count <= _pgqueue.limit_piece_by_key()) c
$$;

-- Makes claims of the usual kind of claimed slots: rows of claims, and runs. Their ids stay. What they would have gone
-- on with becomes runs that wait, or that are ready in the line.
--   p_tids  where they are in their table: the caller has locked them; and the consumer, if it goes by key
-- Returns how many.
create or replace function _pgqueue.promote(p_tids tid[]) returns bigint
language plpgsql
as $$
declare
    v_count bigint;
begin
    with gone as (
        delete from pgqueue.slots where ctid = any (p_tids) and token is not null returning *
    ), run as (
        insert into pgqueue.consumer_messages
        select r.* from gone g cross join lateral _pgqueue.runs_of_slot(g::pgqueue.slots) r
    ), claim as (
        insert into pgqueue.claims select (_pgqueue.claim_of(g::pgqueue.slots)).* from gone g
    )
    select count(*) into v_count from gone;
    return v_count;
end $$;

-- Makes a claim of the usual kind of the slot of an id, if it is still a slot. Returns how many it made.
--   p_and_consumer  lock the consumer, too, as by key has to be: before the slot, because whoever has that lock may
--                   come upon the slot
-- Errors: PQ099 when the slot was gone after the consumer was locked. Locks: the slot, for which it waits as Postgres
-- does.
create or replace function _pgqueue.promote_slot(p_claim_id bigint, p_and_consumer boolean) returns bigint
language plpgsql
as $$
declare
    v_count bigint;
begin
    if p_and_consumer then
        perform _pgqueue.lock_consumer(consumer_id) from pgqueue.slots
        where slot & 1048575 = _pgqueue.place_in(p_claim_id) and token = _pgqueue.token_in(p_claim_id);
        p_and_consumer := found;
    end if;
    v_count := _pgqueue.promote(array(
        select ctid from pgqueue.slots
        where slot & 1048575 = _pgqueue.place_in(p_claim_id) and token = _pgqueue.token_in(p_claim_id)
        for update));  -- lock: slot
    if p_and_consumer and v_count = 0 then
        raise exception using errcode = 'PQ099';  -- who waits for its claim has not locked the consumer
    end if;
    return v_count;
end $$;

-- Locks claims, in the order of their ids; those that do not exist are passed over. Errors: as lock_consumer().
create or replace function _pgqueue.lock_claims(p_claim_ids bigint[]) returns void
language plpgsql
as $$
declare
    v_locked bigint;
begin
    -- lock: claim
    perform from pgqueue.claims where claim_id = any (p_claim_ids) order by claim_id for update skip locked;
    get diagnostics v_locked = row_count;
    if v_locked = cardinality(p_claim_ids) then
        return;
    elsif v_locked < (select count(*) from pgqueue.claims where claim_id = any (p_claim_ids)) then
        perform _pgqueue.await('one of the claims ' || array_to_string(p_claim_ids, ', '),
            'select count(*) from (select from pgqueue.claims where claim_id in '
            '(select jsonb_array_elements_text($2)::bigint) order by claim_id for update) c',  -- lock: claim
            null, to_jsonb(p_claim_ids));
    end if;
end $$;

-- Locks a live claim; with p_and_consumer also its consumer, for a caller that puts runs back into the line. A slot
-- becomes a claim of the usual kind. Returns the claim; null, with a warning, when the claim is not live, or is a
-- checkpoint reader's.
create or replace function _pgqueue.lock_claim(p_claim_id bigint, p_and_consumer boolean) returns pgqueue.claims
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    if _pgqueue.is_slot(p_claim_id)
       and (p_and_consumer or exists (select from pgqueue.slots
                                      where slot & 1048575 = _pgqueue.place_in(p_claim_id)
                                        and token = _pgqueue.token_in(p_claim_id) and piece is not null)) then
        perform _pgqueue.await('claim ' || p_claim_id, 'select _pgqueue.promote_slot($1, true)', p_claim_id,
                               p_try => '50 ms');
    elsif _pgqueue.is_slot(p_claim_id) then
        perform _pgqueue.promote_slot(p_claim_id, false);
    end if;
    -- lock: claim
    select * into v_claim from pgqueue.claims where claim_id = p_claim_id for update skip locked;
    if not found then
        perform _pgqueue.lock_claims(array[p_claim_id]);
        select * into v_claim from pgqueue.claims where claim_id = p_claim_id;
    end if;
    if v_claim.live is not true or v_claim.reader is not null then
        perform _pgqueue.warn_not_live(p_claim_id);
        return null;
    end if;
    if p_and_consumer then
        perform _pgqueue.lock_consumer(v_claim.consumer_id);
    end if;
    return v_claim;
end $$;

-- Acknowledges a claimed slot by key that goes on with what comes next of its key: the slot is free then. Returns how
-- many messages it had; null when there is no such slot, or another session has just acknowledged some of it. Locks:
-- the slot.
create or replace function _pgqueue.go_on(p_claim_id bigint) returns bigint
language plpgsql
as $$
declare
    v_count bigint;
begin
    update pgqueue.slots s  -- lock: slot
    set seqs = case when parts > 0 then rest[parts] else _pgqueue.below(rest[1], lower(rest[1]) + size) end,
        message_count = case when parts > 1 or size = 1 then size else least(size, _pgqueue.cardinality(rest[1])) end,
        rest = case when parts > 1 then rest
                    when parts is null then nullif(array[rest[1] - _pgqueue.below(rest[1], lower(rest[1]) + size)],
                                                   array['{}'::int8multirange]) end,
        parts = parts - 1,
        token = null, claimed_at = null, lease_until = null, timeout = null, owner = null
    from (select message_count as acked from pgqueue.slots
          where slot & 1048575 = _pgqueue.place_in(p_claim_id) and token = _pgqueue.token_in(p_claim_id)) o
    -- the token once more, which is judged again after a wait for another session that settles the claim (a condition
    -- on ctid is not: PostgreSQL 15.5 would let the slot go on twice); and the count, which that session may have
    -- changed
    where s.slot & 1048575 = _pgqueue.place_in(p_claim_id) and s.token = _pgqueue.token_in(p_claim_id)
      and s.message_count = o.acked
    returning o.acked into v_count;
    return v_count;
end $$;

-- Takes acknowledged messages out of a slot, which stays a slot. Returns how many messages these were; null when there
-- is no such slot, or what is left would have too many ranges. (By key slots are small; and the caller could not lock
-- the consumer after the slot.) Locks: the slot.
create or replace function _pgqueue.shrink_slot(p_claim_id bigint, p_set int8multirange) returns bigint
language plpgsql
as $$
declare
    v_slot pgqueue.slots;
    v_rest int8multirange;
    v_left bigint;
begin
    select * into v_slot from pgqueue.slots
    where slot & 1048575 = _pgqueue.place_in(p_claim_id) and token = _pgqueue.token_in(p_claim_id)
    for update;  -- lock: slot
    v_rest := v_slot.seqs - p_set;
    if v_rest is null
       or (v_slot.piece is null and (select count(*) from unnest(v_rest) r) > _pgqueue.limit_ranges()) then
        return null;
    end if;
    v_left := _pgqueue.cardinality(v_rest);
    if v_left = 0 and _pgqueue.goes_on(p_claim_id) then
        perform _pgqueue.go_on(p_claim_id);
    elsif v_left = 0 then
        delete from pgqueue.slots where consumer_id = v_slot.consumer_id and slot = v_slot.slot;
    else
        update pgqueue.slots set seqs = v_rest, message_count = v_left
        where consumer_id = v_slot.consumer_id and slot = v_slot.slot;
    end if;
    return v_slot.message_count - v_left;
end $$;

-- Warns that a claim is not live.
create or replace function _pgqueue.warn_not_live(p_claim_id bigint) returns void
language plpgsql
as $$
begin
    raise warning 'claim % is not live: it was settled, or its visibility timeout passed and another claimer took '
                  'over; or a Spark query holds it; nothing was changed',
                  coalesce(p_claim_id::text, 'null');
end $$;

do $$ begin perform _pgqueue.keep_secret(); end $$;
