-- Settling: acknowledge, return, extend, dead-letter. Each is fenced by the live claim: a claim that ended changes
-- nothing, answers 0 and warns.
--
-- A claim whose lease is over is live until another claimer released it: the owner that comes back first keeps it.

-- Warns that a claim is not live.
create or replace function pgqueue._warn_not_live(p_claim_id bigint) returns void
language plpgsql
as $$
begin
    raise warning 'claim % is not live: it was settled, or its visibility timeout passed and another claimer took over; nothing was changed',
                  coalesce(p_claim_id::text, 'null');
end $$;

-- Locks a live claim, for ordered consumers (and with p_line, for what puts runs back in the line) after the consumer's
-- lock. Returns the claim; null and a warning when it is not live.
create or replace function pgqueue._lock_claim(p_claim_id bigint, p_line boolean) returns pgqueue.claims
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    select * into v_claim from pgqueue.claims where claim_id = p_claim_id;
    if found and (p_line or v_claim.ordered) then
        perform pgqueue._lock_consumer(v_claim.consumer_id);
    end if;
    select * into v_claim from pgqueue.claims where claim_id = p_claim_id for update;
    if not found or not v_claim.live then
        perform pgqueue._warn_not_live(p_claim_id);
        return null;
    end if;
    return v_claim;
end $$;

-- Records that the claim has p_left messages now, and ends it when it has none.
--   p_keys  keys of an ordered consumer that may have become idle
-- Returns the cursor; the caller stores it. Needs the claim's lock, and for ordered consumers the consumer's.
create or replace function pgqueue._shrink_claim(p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims, p_left bigint, p_keys text[])
returns pgqueue.consumer_cursors
language plpgsql
as $$
begin
    if p_claim.reader is null and p_left = 0 then
        delete from pgqueue.claims where claim_id = p_claim.claim_id;
    else
        update pgqueue.claims set live = p_left > 0, remaining = p_left, settled = settled + p_claim.remaining - p_left
        where claim_id = p_claim.claim_id;
    end if;
    if p_claim.ordered then
        if p_left = 0 and p_claim.remaining > 0 then
            p_cursor.open_claims := p_cursor.open_claims - 1;
            p_cursor.mixed_claim := nullif(p_cursor.mixed_claim, p_claim.claim_id);
            if p_cursor.first_claim = p_claim.claim_id then
                p_cursor.first_claim := coalesce(
                    (select claim_id from pgqueue.claims
                     where consumer_id = p_claim.consumer_id and live and ordered and claim_id > p_claim.claim_id
                     order by claim_id limit 1), p_claim.claim_id);
            end if;
        end if;
        p_cursor := pgqueue._promote(p_cursor, p_keys);
    end if;
    return p_cursor;
end $$;

-- Takes messages out of a live claim for good: the common part of ack and dead_letter.
create or replace function pgqueue._settle(p_claim_id bigint, p_seqs bigint[], p_dead boolean, p_reason text, p_details jsonb) returns bigint
language plpgsql
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_claim  pgqueue.claims;
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_set    int8multirange := pgqueue._set_of(p_seqs);
    v_run    pgqueue.consumer_messages;
    v_part   int8multirange;
    v_left   bigint;
    v_keys   text[] := '{}';
begin
    perform pgqueue._check_isolation();
    v_claim := pgqueue._lock_claim(p_claim_id, false);
    if v_claim.claim_id is null then
        return 0;
    end if;
    v_left := v_claim.remaining;
    for v_run in
        delete from pgqueue.consumer_messages
        where claim_id = p_claim_id and state = 'claimed' and (v_set is null or seqs && v_set)
        returning *
    loop
        v_part := case when v_set is null then v_run.seqs else v_run.seqs * v_set end;
        v_left := v_left - v_run.n;
        if v_part <> v_run.seqs then
            v_left := v_left + pgqueue._insert_run(v_run, v_run.seqs - v_part);
        end if;
        if p_dead then
            perform pgqueue._bury(v_run, v_part, p_reason, p_details);
        end if;
        if v_run.key is not null then
            v_keys := v_keys || v_run.key;
        end if;
    end loop;
    if v_claim.ordered then
        v_stored := pgqueue._cursor(v_claim.consumer_id);
    end if;
    v_cursor := pgqueue._shrink_claim(v_stored, v_claim, v_left, v_keys);
    if v_claim.ordered then
        perform pgqueue._save_cursor(v_stored, v_cursor, true);
    end if;
    return v_claim.remaining - v_left;
end $$;

-- Records messages of a run as dead.
create or replace function pgqueue._bury(p_run pgqueue.consumer_messages, p_seqs int8multirange, p_reason text, p_details jsonb) returns void
language sql
as $$
    insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, n, priority, deliver_count, reason, details, claim_id)
    select c.stream_id, c.consumer_id, p_seqs, pgqueue._cardinality(p_seqs), p_run.priority, p_run.deliver_count, p_reason, p_details, p_run.claim_id
    from pgqueue.consumers c
    where c.consumer_id = p_run.consumer_id
$$;

-- Acknowledges a whole claim: what ack and claim have in common. Returns how many messages that were.
create or replace function pgqueue._ack(p_claim_id bigint) returns bigint
language plpgsql
as $$
declare
    v_n bigint;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        -- the common case, in two statements: the second one sees what was committed before the first had the lock
        delete from pgqueue.claims
        where claim_id = p_claim_id
          and case when live and not ordered then reader is null end  -- opaque: or else a partial index is read for it
        returning remaining into v_n;
        if found then
            delete from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed';
            return v_n;
        end if;
    end if;
    return pgqueue._settle(p_claim_id, null, false, null, null);
end $$;

-- Acknowledges a claim, or the messages of it that are given. Numbers that it does not hold are passed over.
-- Returns how many messages that were. Errors: PQ003, PQ007. Locks: the claim; for ordered consumers the consumer's lock.
create or replace function pgqueue.ack(p_claim_id bigint, p_seqs bigint[] default null) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return case when p_seqs is null then pgqueue._ack(p_claim_id)
                else pgqueue._settle(p_claim_id, p_seqs, false, null, null) end;
end $$;

-- Dead-letters a claim, or the messages of it that are given.
-- Returns how many messages that were. Errors: PQ007. Locks: as ack.
create or replace function pgqueue.dead_letter(p_claim_id bigint, p_seqs bigint[] default null, p_reason text default null, p_details jsonb default null)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
begin
    return pgqueue._settle(p_claim_id, p_seqs, true, p_reason, p_details);
end $$;

-- Holds a claim longer: its lease ends p_by from now; null: its visibility timeout from now.
-- Returns how many messages it holds. Errors: PQ003, PQ007. Locks: the claim.
create or replace function pgqueue.extend(p_claim_id bigint, p_by interval default null) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_n bigint;
begin
    perform pgqueue._check_isolation();
    if p_by is not null then
        perform pgqueue._check_timeout('p_by', p_by);
    end if;
    update pgqueue.claims set lease_until = clock_timestamp() + coalesce(p_by, visibility_timeout)
    where claim_id = p_claim_id and live
    returning remaining into v_n;
    if not found then
        perform pgqueue._warn_not_live(p_claim_id);
    end if;
    return coalesce(v_n, 0);
end $$;

-- Returns a claim, or the messages of it that are given, to be delivered again. A message that was delivered
-- max_deliver_count times is dead-lettered instead. In an ordered consumer, the later messages of the same keys in the
-- claim go back too, without counting as failed.
--   p_delay   not before then; at least 0
--   p_reason  kept as the message's last error
-- Returns how many messages left the claim. Errors: PQ003, PQ007. Locks: the consumer's lock, the claim.
create or replace function pgqueue.nack(p_claim_id bigint, p_seqs bigint[] default null, p_delay interval default '0', p_reason text default null)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_claim    pgqueue.claims;
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_left     bigint;
begin
    perform pgqueue._check_isolation();
    if p_delay is null or p_delay < interval '0' or p_delay > interval '10 years' then
        raise exception 'p_delay is an interval from 0 to 10 years, not %', coalesce(quote_literal(p_delay), 'null') using errcode = 'PQ003';
    end if;
    v_claim := pgqueue._lock_claim(p_claim_id, true);
    if v_claim.claim_id is null then
        return 0;
    end if;
    select * into v_consumer from pgqueue.consumers where consumer_id = v_claim.consumer_id;
    v_stored := pgqueue._cursor(v_claim.consumer_id);
    v_cursor := pgqueue._return(v_consumer, v_stored, v_claim, pgqueue._set_of(p_seqs), p_delay, p_reason);
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    v_left := (select remaining from pgqueue.claims where claim_id = p_claim_id);
    return v_claim.remaining - coalesce(v_left, 0);
end $$;

-- Puts messages of a claim back to be delivered again, or buries them: the common part of nack and expiry.
--   p_set  the failed messages; null: all
-- Returns the cursor; the caller stores it. Needs the consumer's lock and the claim's.
create or replace function pgqueue._return(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims,
                                           p_set int8multirange, p_delay interval, p_reason text) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_until  timestamptz := case when p_delay > interval '0' then clock_timestamp() + p_delay end;
    v_run    pgqueue.consumer_messages;
    v_part   int8multirange;
    v_places pgqueue.floor[] := '{}';
    v_back   record;
    v_keys   text[];
begin
    if p_claim.ordered and (p_set is not null or v_cursor.open_claims > 1 or v_cursor.aside > 0) then
        v_back := pgqueue._return_by_key(p_consumer, v_cursor, p_claim, p_set, v_until, p_reason);
        v_keys := v_back.o_keys;
        v_places := v_back.o_places;
        v_cursor.aside := v_cursor.aside + v_back.o_aside;
    else
        for v_run in
            delete from pgqueue.consumer_messages
            where claim_id = p_claim.claim_id and state = 'claimed' and (p_set is null or seqs && p_set)
            returning *
        loop
            v_part := case when p_set is null then v_run.seqs else v_run.seqs * p_set end;
            perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
            if v_run.deliver_count >= p_consumer.max_deliver_count then
                perform pgqueue._bury(v_run, v_part, coalesce(p_reason, 'returned'), null);
                continue;
            end if;
            -- an ordered consumer's run goes back into the line with its delay: the line waits for it
            v_run.state := case when v_until is not null and not p_claim.ordered then 'delayed' else 'ready' end;
            v_run.rank := case when p_claim.ordered then 0 else v_run.rank end;
            v_run.key := null;
            v_run.claim_id := null;
            v_run.turn := v_run.position;
            v_run.not_visible_until := v_until;
            v_run.last_error := p_reason;
            perform pgqueue._insert_run(v_run, v_part);
            if v_run.state = 'ready' then
                v_places := v_places || (v_run.rank, v_run.turn, lower(v_part))::pgqueue.floor;
            end if;
        end loop;
    end if;
    v_cursor.floors := pgqueue._lower_floors(v_cursor.floors, v_places);
    v_cursor.due_floor := least(v_cursor.due_floor, v_until);
    return pgqueue._shrink_claim(
        v_cursor, p_claim,
        (select coalesce(sum(n), 0)::bigint from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed'), v_keys);
end $$;

-- Puts messages of an ordered consumer's claim aside: of each key the first failed one and all that follow it in the claim.
-- Returns the keys, how many runs now stand aside, and the places of runs without a key that are back in the line.
create or replace function pgqueue._return_by_key(
    p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims, p_set int8multirange,
    p_until timestamptz, p_reason text, out o_keys text[], out o_aside bigint, out o_places pgqueue.floor[])
language plpgsql
set enable_hashjoin = on
as $$
declare
    v_gone int8multirange;
    v_run  pgqueue.consumer_messages;
begin
    if p_cursor.mixed_claim = p_claim.claim_id then
        if p_set is not null then
            execute format($q$
                select coalesce(array_agg(distinct %2$s) filter (where %2$s is not null), '{}')
                from pgqueue.consumer_messages r
                cross join lateral unnest(r.seqs * $2) g
                cross join lateral (select key from pgqueue.messages_%1$s where seq >= lower(g) and seq < upper(g)) m
                where r.claim_id = $1 and r.state = 'claimed' and r.key is null $q$, p_consumer.stream_id, pgqueue._key_of(p_consumer))
            into o_keys using p_claim.claim_id, p_set;
            -- a key that stood aside was claimed as a run of its own; more of it may have come from the line
            o_keys := o_keys || array(select distinct key from pgqueue.consumer_messages
                                      where claim_id = p_claim.claim_id and state = 'claimed' and key is not null and seqs && p_set);
        end if;
        if o_keys is distinct from '{}' then
            perform pgqueue._split_by_key(p_consumer, p_claim.claim_id, o_keys);
        end if;
    end if;

    with failed as materialized (
        select distinct key from pgqueue.consumer_messages
        where claim_id = p_claim.claim_id and state = 'claimed' and key is not null and (p_set is null or seqs && p_set)
    ), element as (
        select r.key, r.position, r.priority, r.deliver_count, r.last_error, r.claim_id, s as seq,
               coalesce(p_set @> s, true) as failed,
               coalesce(coalesce(p_set @> s, true) and r.deliver_count >= p_consumer.max_deliver_count, false) as dead
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) s
        where r.claim_id = p_claim.claim_id and r.state = 'claimed'
          and (r.key in (select key from failed) or (r.key is null and (p_set is null or r.seqs && p_set)))
    ), judged as (
        select *, case when key is null then failed
                       else bool_or(failed and not dead) over (partition by key order by position, seq) end and not dead as back
        from element
    ), gone as materialized (
        select key, position, priority, last_error, claim_id, seq, failed, dead, deliver_count - (not failed)::int as deliver_count
        from judged where back or dead
    ), buried as (
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, n, priority, deliver_count, reason, claim_id)
        select p_consumer.stream_id, p_consumer.consumer_id, range_agg(int8range(seq, seq, '[]')), count(*), priority, deliver_count,
               coalesce(p_reason, 'returned'), claim_id
        from gone where dead group by priority, deliver_count, claim_id
    ), back as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs,
                                               key, not_visible_until, last_error)
        select p_consumer.consumer_id,
               case when i.key is not null then 'waiting' when i.failed and p_until is not null then 'delayed' else 'ready' end,
               case when i.key is not null then -1 else 0 end,
               i.priority, i.deliver_count, i.position, i.position, c.first_seq, c.n, c.seqs,
               i.key, case when i.failed then p_until end, case when i.failed then p_reason else i.last_error end
        from (select key, position, priority, deliver_count, failed, last_error, island, range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by position, seq)
                              - row_number() over (partition by key, position, priority, deliver_count, failed, last_error order by seq) as island
                    from gone where not dead) e
              group by key, position, priority, deliver_count, failed, last_error, island) i
        cross join lateral pgqueue._chunks(i.seqs) c
        returning state, key, rank, turn, first_seq
    )
    select array(select key from failed), (select count(*) from back where key is not null),
           array(select (rank, turn, first_seq)::pgqueue.floor from back where state = 'ready'),
           (select range_agg(int8range(seq, seq, '[]')) from gone)
    into o_keys, o_aside, o_places, v_gone;

    for v_run in
        delete from pgqueue.consumer_messages
        where claim_id = p_claim.claim_id and state = 'claimed' and seqs && v_gone
        returning *
    loop
        perform pgqueue._insert_run(v_run, v_run.seqs - v_gone);
    end loop;
end $$;
