-- Claims, step by step: without the consumer's lock (queue/claim/free.sql: claim_free()); or with it (claim_locked()),
-- when serve_claim() first has due work done (queue/claim/due_work.sql: do_due_work()), then finds messages.

-- Finds the messages of a claim with the consumer's lock, within the limits of the consumer: first what is free; if
-- that does not suffice, everything else that can be claimed.
--   p_want    messages at most
--   p_upto    no publication after this one; null: all
--   p_reader  the Spark reader whose claim it is; null: a worker's
--   p_where, p_look  only messages that pass this condition, see collect_matching(); null: any
-- Returns the cursor, which the caller stores, and the claim; its id is null if there is nothing. (More than 60 lines:
-- the steps of a claim, in order.)
create or replace function _pgqueue.serve_claim(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                p_want bigint, p_upto bigint default null, p_reader uuid default null,
                                                p_where jsonpath default null, p_look int default null,
                                                out o_cursor pgqueue.consumer_cursors, out o_claimed pgqueue.claimed)
language plpgsql as $$
declare
    v_limited record;
    v_got     record;
    v_until   timestamptz := clock_timestamp() + _pgqueue.filter_time();
begin
    o_cursor := p_cursor;
    if p_consumer.max_backlog is not null and p_consumer.on_full = 'drop_oldest' then
        o_cursor := _pgqueue.drop_oldest(p_consumer, o_cursor);
    end if;
    if _pgqueue.is_throttled(p_consumer) then
        v_limited := _pgqueue.left_by_limits(p_consumer, o_cursor, p_want);
        o_cursor := v_limited.p_cursor;
        p_want := v_limited.o_want;
        if p_want <= 0 then
            return;
        end if;
    end if;
    if p_consumer.per_key_latest then  -- later publications have to wait
        p_upto := least(p_upto, (select max(publication_id) from pgqueue.publications
                                 where stream_id = p_consumer.stream_id));
    end if;
    -- pass 1: what is free; pass 2: all that is due or new; later: past what is not for this consumer, or not for now
    for v_pass in 1..greatest(2, _pgqueue.limit_takes()) loop
        o_cursor := _pgqueue.do_due_work(p_consumer, o_cursor, v_pass > 1);
        if p_consumer.profile = 'simple' and p_where is null and p_reader is null and p_upto is null then
            o_claimed := _pgqueue.claim_new_ahead(p_consumer, o_cursor, p_want,
                                                   _pgqueue.next_ahead(p_consumer, o_cursor));
            if o_claimed.claim_id is not null then
                o_cursor := _pgqueue.pass_taken(o_cursor, false);
                exit;
            end if;
        end if;
        if v_pass = 1 then
            v_got := _pgqueue.catch_up(p_consumer, o_cursor, p_upto);
            o_cursor := v_got.p_cursor;
            p_upto := v_got.p_upto;
        end if;
        if v_pass = 1 and not _pgqueue.claims_in_turn(p_consumer) and _pgqueue.has_free(o_cursor.hints) then
            o_cursor := _pgqueue.raise_hints(p_consumer, o_cursor);  -- claims without the lock do not
        end if;
        if p_where is null then
            v_got := _pgqueue.claim_new(p_consumer, o_cursor, p_want, p_upto, p_reader);
            o_cursor := v_got.o_cursor;
            o_claimed := v_got.o_claimed;
            exit when o_claimed.claim_id is not null;
        end if;
        o_cursor := _pgqueue.take_new(p_consumer, o_cursor, v_pass > 1, coalesce(p_look, p_want), p_upto);
        if p_consumer.per_key_latest and _pgqueue.has_unscreened(p_consumer, o_cursor, p_upto) then
            o_cursor.hints.was_cut := true;  -- the next claim continues
            exit when v_pass > 2 or clock_timestamp() > v_until;
            continue;
        end if;
        if _pgqueue.is_keyed(p_consumer.profile) then
            v_got := _pgqueue.collect_by_key(p_consumer, o_cursor.hints, p_want, p_reader);
        elsif p_where is null then
            v_got := _pgqueue.collect(p_consumer, o_cursor.hints, p_want, p_reader);
        else
            v_got := _pgqueue.collect_matching(p_consumer, o_cursor.hints, p_where, p_want, p_look);
        end if;
        o_cursor.hints := v_got.o_hints;
        o_claimed := v_got.o_claimed;
        o_cursor := _pgqueue.raise_hints(p_consumer, o_cursor);
        exit when o_claimed.claim_id is not null
            or ((o_cursor.hints).filter_from is not null and clock_timestamp() > v_until);
        if v_pass > 1 then
            exit when not (o_cursor.hints).was_cut and not _pgqueue.has_unassigned(p_consumer, o_cursor.hints);
            -- the claim has examined enough messages that wait or are for others: the next claim continues
            exit when v_pass > 2
                and (_pgqueue.is_keyed(p_consumer.profile) or p_consumer.filtered
                     or o_cursor.next_publication - p_cursor.next_publication
                        >= _pgqueue.limit_take() * _pgqueue.limit_takes());
            -- stop if another claim is taking the free messages that are left: a further take would bring later
            -- messages
            exit when _pgqueue.has_free(o_cursor.hints) and not _pgqueue.has_unassigned(p_consumer, o_cursor.hints);
        end if;
    end loop;
    if o_claimed.claim_id is not null and _pgqueue.is_throttled(p_consumer) then
        o_cursor := _pgqueue.record_delivered(p_consumer, o_cursor, o_claimed.message_count);
    end if;
    if o_claimed.claim_id is not null and p_consumer.per_key_interval is not null then
        o_cursor.hints := _pgqueue.spend_tokens(p_consumer, o_cursor.hints,
                                                array(select b from _pgqueue.claimed_bundles(o_claimed) b));
    end if;
end $$;

-- The bundles of a claim that was just made.
create or replace function _pgqueue.claimed_bundles(p_claim pgqueue.claimed) returns setof pgqueue.consumer_messages
language sql stable as $$
    select * from _pgqueue.bundles_of(_pgqueue.number_in(p_claim.claim_id), _pgqueue.token_in(p_claim.claim_id))
$$;

-- Claims messages, for claim() and receive(). Arguments, errors and locks: as claim(). Returns the claim; its id is
-- null if nothing was claimed.
create or replace function _pgqueue.claim(p_stream text, p_consumer text, p_max int, p_visibility_timeout interval,
                                          p_ack bigint) returns pgqueue.claimed
language plpgsql as $$
declare
    v_consumer   pgqueue.consumers;
    v_cursor     pgqueue.consumer_cursors;
    v_needs_lock boolean;  -- null: not checked yet
    v_acked      bigint;   -- null: p_ack is not acknowledged yet
    v_claim      pgqueue.claimed;
begin
    -- (a row as one value: column by column costs twice as much)
    v_consumer := c from pgqueue.consumers c where c.stream_name = p_stream and c.name = p_consumer;
    if v_consumer.scheduled is not false or v_consumer.partitions is not null or p_max is null or p_max < 1
       or p_visibility_timeout is not null or current_setting('transaction_isolation') <> 'read committed' then
        v_consumer := _pgqueue.begin_claim('claim', p_max, p_visibility_timeout, p_stream, p_consumer);
    end if;
    if not _pgqueue.needs_no_checks(v_consumer.profile) then  -- (each check costs a little)
        if v_consumer.paused then
            perform pgqueue.ack(p_ack) where p_ack is not null;
            return null;
        end if;
        v_needs_lock := _pgqueue.always_locks(v_consumer);
    end if;
    if v_needs_lock is not true then
        v_cursor := c from pgqueue.consumer_cursors c where c.consumer_id = v_consumer.consumer_id
            order by c.version desc limit 1;
        if p_ack is null then
            v_claim := _pgqueue.claim_free(v_consumer, v_cursor, p_max);
            if v_claim.message_count is not null then
                return v_claim;  -- nearly all claims end here
            end if;
        else
            begin
                v_acked := pgqueue.ack(p_ack);
                v_claim := _pgqueue.claim_free(v_consumer, v_cursor, p_max);
                if v_claim.message_count is not null then
                    return v_claim;
                end if;
                raise exception using errcode = 'PQ099';
            exception when sqlstate 'PQ099' then  -- (PQ000 would catch all of class PQ)
                -- rolls the acknowledgement back before it waits for the lock, whose holder may wait for that bundle
                v_acked := case when v_acked = 0 then 0 end;  -- an ack of 0 messages has warned: it is not repeated
            end;
        end if;
    end if;
    return _pgqueue.claim_locked(v_consumer, p_max, case when v_acked is null then p_ack end);
end $$;

-- Locks a consumer, unless one transaction keeps the lock for longer than claims take. While the lock passes from claim
-- to claim, the call waits, as lock_consumer() does. Returns whether the caller has the lock. The caller may
-- hold a bundle: if the holder of the lock waits for that (base/locks.sql: skip locked), it returns false.
create or replace function _pgqueue.lock_consumer_soon(p_consumer_id int) returns boolean
language plpgsql as $$
declare
    v_until  timestamptz := clock_timestamp() + _pgqueue.patience();
    v_before text;  -- the transaction that had the lock after the previous wait
    v_holder text;
    v_waits  boolean;  -- for this session
begin
    if _pgqueue.try_lock_consumer(p_consumer_id) then
        return true;
    end if;
    loop
        begin
            perform _pgqueue.await('the lock of a consumer',
                                   'select 0 from pg_advisory_xact_lock(($2 -> 0)::int, $1::int)',  -- lock: consumer
                                   p_consumer_id, jsonb_build_array(_pgqueue.lock_class_consumer()),
                                   p_limit => _pgqueue.claim_patience());
            return true;
        exception when lock_not_available then
            select virtualtransaction, pg_backend_pid() = any (pg_blocking_pids(pid)) into v_holder, v_waits
            from _pgqueue.advisory_locks(_pgqueue.lock_class_consumer(), p_consumer_id) where granted;
            if v_waits then
                return false;
            elsif v_holder = v_before or clock_timestamp() > v_until then
                raise warning 'nothing can be claimed now: % is locked by %', _pgqueue.consumer_name(p_consumer_id),
                    _pgqueue.holders(_pgqueue.lock_class_consumer(), p_consumer_id);
                return false;
            end if;
            v_before := v_holder;
        end;
    end loop;
end $$;

-- Claims with the consumer's lock whatever can be claimed, see claim().
--   p_ack  a claim to acknowledge first; null: none
--   p_where, p_look  as in serve_claim()
-- Returns the claim; its id is null if there is nothing, or if another transaction keeps the lock.
create or replace function _pgqueue.claim_locked(p_consumer pgqueue.consumers, p_max int, p_ack bigint default null,
                                                 p_where jsonpath default null, p_look int default null)
returns pgqueue.claimed language plpgsql as $$
declare
    v_locked   boolean := _pgqueue.try_lock_consumer(p_consumer.consumer_id);
    v_stored   pgqueue.consumer_cursors;
    v_served   record;
    v_unlocked pgqueue.claimed;
    v_free     boolean := not v_locked and p_where is null and not _pgqueue.always_locks(p_consumer);
begin
    if v_free then
        v_unlocked := _pgqueue.claim_without_lock(p_consumer, p_max);
        -- (nothing can be claimed; but messages that are still to be acknowledged may be the reason)
        if v_unlocked.message_count > 0 or (v_unlocked.message_count = 0 and p_ack is null) then
            perform pgqueue.ack(p_ack) where p_ack is not null;
            return v_unlocked;
        end if;
    end if;
    v_locked := v_locked or _pgqueue.lock_consumer_soon(p_consumer.consumer_id);
    perform pgqueue.ack(p_ack) where p_ack is not null;
    if not v_locked then  -- a claim in a transaction that stays open has it
        return null;
    end if;
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    p_consumer := _pgqueue.consumer_now(p_consumer);
    if p_consumer.paused then
        return null;
    elsif p_where is not null then
        p_consumer := _pgqueue.check_kind('where', p_consumer);
    end if;
    -- the session before may have left free bundles, or nothing: several claims saw one message
    if v_free and not _pgqueue.claims_in_turn(p_consumer) then
        v_unlocked := _pgqueue.claim_free(p_consumer, v_stored, p_max);
        if v_unlocked.message_count is not null then
            return v_unlocked;
        end if;
    end if;
    v_served := _pgqueue.serve_claim(p_consumer, v_stored, p_max, p_where => p_where, p_look => p_look);
    perform _pgqueue.save_cursor(v_stored, v_served.o_cursor, (v_served.o_claimed).claim_id is not null);
    return v_served.o_claimed;
end $$;
