-- Actions: the rows of a Spark write settle or revive messages of consumers. A row names messages by their numbers, not
-- by a claim.
--
-- Which messages a write may settle. Any write may settle messages that no claim holds. Messages in a worker's live
-- claim belong to that worker, and the write skips them; if the lease has ended, the write releases the claim first.
-- Messages in the claims of a Spark query can be settled by that query, and by writes whose query is not known (Spark
-- Connect does not report it, and batch writes have none); writes of other queries that read the consumer skip them. A
-- query also skips messages that it has lost, or has settled before, so a repeated action changes nothing.
--
-- A micro-batch keeps the messages that its query settled before the end of the batch: reader_claims.settled_early has
-- them, as they were, until the batch is acknowledged. So a replay of the batch after a crash has the same rows, and
-- these messages count as settled, not as lost.
--
-- An action happens once per batch of a sink and consumer, as a publication once per batch and stream. The two are
-- recorded apart: writes with one txnAppId may publish to one stream, and settle messages of several consumers. An
-- action is an object {"action", "stream", "consumer", "seqs": "{[1,3),[7,8)}", "delay", "reason", "details"}; the last
-- three may be missing.

-- An action of a write: ack, nack, dead_letter, redrive or retry.
do $$
begin
    if to_regtype('pgqueue.action') is null then
        create type pgqueue.action as (
            action text, stream text, consumer text, seqs int8multirange, delay interval, reason text, details jsonb);
    end if;
end $$;

-- Acknowledges, returns or dead-letters messages by their numbers, for a batch of a sink, once for each consumer.
--   ack          the message is done. details: its result, if the consumer keeps history
--   nack         the message is delivered again, as a failure: after delay, or as the consumer's settings say; reason:
--                its last error. In an ordered consumer the later messages of the key in the same claim are returned
--                too, without a failure. Only for messages that a claim of a query holds
--   dead_letter  the message becomes a dead letter, with reason (by default rejected) and details
--   p_query_id   the Spark query of the write, if known
--   p_replayed   whether a micro-batch that has the messages keeps them when it is replayed
--   p_compare    whether a repeated batch of a query must name the same messages for each action; else only their
--                number is compared
-- Returns whether actions were applied, which is false for a repeated batch; how many messages this call changed; and
-- how many it ignored (passed_over): done, dead or not published; held by other claims; for a nack, not claimed; or of
-- a consumer for which the batch was applied before. Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007, PQ010.
-- Locks: the batch; then, consumer by consumer in the order of their ids: claims, the consumer, bundles.
create or replace function pgqueue.settle_messages(p_sink text, p_batch bigint, p_actions jsonb,
                                                   p_query_id text default null, p_replayed boolean default true,
                                                   p_compare boolean default true)
returns table (done boolean, changed bigint, passed_over bigint)
language sql as $$
    select * from _pgqueue.run_actions(p_sink, p_batch, _pgqueue.actions(p_actions, '{ack,nack,dead_letter}'), false,
                                       p_query_id, p_replayed, p_compare)
$$;

-- Redrives or retries messages by their numbers, for a batch of a sink, once for each consumer. Action redrive is for
-- dead letters, retry for delayed messages; see redrive and retry. Arguments, returns, errors and locks: as
-- settle_messages. It ignores messages that are not dead, or not delayed.
create or replace function pgqueue.revive_messages(p_sink text, p_batch bigint, p_actions jsonb,
                                                   p_compare boolean default true)
returns table (done boolean, changed bigint, passed_over bigint)
language sql as $$
    select * from _pgqueue.run_actions(p_sink, p_batch, _pgqueue.actions(p_actions, '{redrive,retry}'), true, null,
                                       null, p_compare)
$$;

-- Runs the actions of a batch, once for each consumer. For arguments, returns, errors and locks see settle_messages.
--   p_revived  the actions are redrive and retry
create or replace function _pgqueue.run_actions(p_sink text, p_batch bigint, p_actions pgqueue.action[],
                                                p_revived boolean, p_query_id text, p_replayed boolean,
                                                p_compare boolean, out done boolean, out changed bigint,
                                                out passed_over bigint)
language plpgsql as $$
declare
    v_begun int[] := '{}';  -- the consumers for which the batch was not applied before
    v_one   record;
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_batch(p_sink, p_batch);
    for v_one in select * from _pgqueue.actions_by_consumer(p_actions) loop
        if _pgqueue.begin_batch(row(
            p_sink, (v_one.consumer).stream_id, (v_one.consumer).consumer_id, p_revived, p_batch,
            _pgqueue.count_named(v_one.actions),
            (select sum(hash_record_extended(row(action, seqs), 0))
             from (select action, range_agg(seqs) as seqs from unnest(v_one.actions) group by action) a
             having p_compare),
            null, null, '', _pgqueue.writing_query())) then
            v_begun := v_begun || (v_one.consumer).consumer_id;
        end if;
    end loop;
    done := v_begun <> '{}';
    changed := 0;
    for v_one in
        select * from _pgqueue.actions_by_consumer(p_actions) o where (o.consumer).consumer_id = any (v_begun)
    loop
        changed := changed + case when p_revived then _pgqueue.revive(v_one.actions)
                                  else _pgqueue.settle_named(v_one.consumer, v_one.actions, p_query_id, p_replayed) end;
    end loop;
    passed_over := case when done then greatest(_pgqueue.count_named(p_actions) - changed, 0) else 0 end;
end $$;

-- Actions by consumer, in the order in which consumers are locked.
create or replace function _pgqueue.actions_by_consumer(p_actions pgqueue.action[])
returns table (consumer pgqueue.consumers, actions pgqueue.action[])
language sql stable as $$
    select c, o.actions
    from (select a.stream, a.consumer, array_agg(a) as actions from unnest(p_actions) a group by a.stream, a.consumer) o
    cross join lateral _pgqueue.consumer(o.stream, o.consumer) c order by c.consumer_id
$$;

-- Redrives and retries messages of one consumer. Returns the number of changed messages.
create or replace function _pgqueue.revive(p_actions pgqueue.action[]) returns bigint
language sql as $$
    select sum(case action when 'redrive' then pgqueue.redrive(stream, consumer, seqs, p_max => null)
                                          else pgqueue.retry(stream, consumer, seqs) end)::bigint
    from (select action, stream, consumer,
                 array(select generate_series(lower(g), upper(g) - 1) from unnest(a.seqs) g) as seqs
          from unnest(p_actions) a order by action) a
$$;

-- The actions of a batch, checked: each message is named by one action. Errors: PQ001, PQ002, PQ003, PQ006.
--   p_allowed  the actions that are allowed
create or replace function _pgqueue.actions(p_actions jsonb, p_allowed text[]) returns pgqueue.action[]
language plpgsql stable as $$
declare
    v_actions pgqueue.action[];
    v_action  pgqueue.action;
    v_other   text;
    -- far more than a batch settles; redrive and retry use an array, which has at most 1 GB
    v_most    bigint := case when 'redrive' = any (p_allowed) then 100000000 else 1000000000000 end;
begin
    if jsonb_typeof(p_actions) is distinct from 'array' then
        raise exception 'p_actions must be a list of objects, not %', coalesce(jsonb_typeof(p_actions), 'null')
            using errcode = 'PQ003', column = 'p_actions';
    end if;
    begin
        v_actions := array(select a from jsonb_populate_recordset(null::pgqueue.action, p_actions) a);
    exception
        when numeric_value_out_of_range then
            raise exception 'p_seqs has a number that no message can have: the last bigint, or a larger one'
                using errcode = 'PQ003', column = 'p_seqs';
        when interval_field_overflow or datetime_field_overflow then
            raise exception 'p_delay must be null or an interval from 0 to 10 years'
                using errcode = 'PQ003', column = 'p_delay';
    end;
    foreach v_action in array v_actions loop
        if (v_action.action = any (p_allowed)) is not true then
            raise exception 'p_action must be %, not %', array_to_string(p_allowed, ', '),
                            coalesce(quote_literal(left(v_action.action, 50)), 'null')
                using errcode = 'PQ003', column = 'p_action';
        elsif (isempty(v_action.seqs) or lower_inf(v_action.seqs) or upper_inf(v_action.seqs)) is not false then
            raise exception 'p_seqs must be a set of some numbers, not %',
                            coalesce(left(v_action.seqs::text, 100), 'null')
                using errcode = 'PQ003', column = 'p_seqs';
        elsif lower(v_action.seqs) < -v_most or _pgqueue.cardinality(v_action.seqs * '{[0,)}') > v_most then
            raise exception 'p_seqs must be a set of at most % numbers, not %', v_most, left(v_action.seqs::text, 100)
                using errcode = 'PQ003', column = 'p_seqs';
        elsif v_action.delay < interval '0' or v_action.delay > _pgqueue.max_interval() then
            raise exception 'p_delay must be null or an interval from 0 to 10 years, not %',
                            quote_literal(v_action.delay)
                using errcode = 'PQ003', column = 'p_delay';
        end if;
    end loop;
    perform _pgqueue.check_kind('claim', c)
    from (select distinct stream, consumer from unnest(v_actions)) o
    cross join lateral _pgqueue.consumer(o.stream, o.consumer) c;
    for v_action.stream, v_action.consumer in
        select stream, consumer from unnest(v_actions) group by stream, consumer
        having sum(_pgqueue.cardinality(seqs)) > _pgqueue.cardinality(range_agg(seqs))
    loop
        select a.action, b.action, a.seqs * b.seqs into v_action.action, v_other, v_action.seqs
        from unnest(v_actions) with ordinality a join unnest(v_actions) with ordinality b using (stream, consumer)
        where a.ordinality < b.ordinality and a.seqs && b.seqs and stream = v_action.stream
          and consumer = v_action.consumer limit 1;
        raise exception 'message % of consumer % of stream % is named by two actions: % and %, '
                        'or with two reasons, delays or details', lower(v_action.seqs),
                        quote_literal(v_action.consumer), quote_literal(v_action.stream), v_action.action, v_other
            using errcode = 'PQ003', column = 'p_actions', hint = 'Name each message once.';
    end loop;
    return v_actions;
end $$;

-- The number of messages that actions name.
create or replace function _pgqueue.count_named(p_actions pgqueue.action[]) returns bigint
language sql immutable as $$ select coalesce(sum(_pgqueue.cardinality(seqs)), 0)::bigint from unnest(p_actions) $$;

-- Settles messages of one consumer; see settle_messages. Returns the number of changed messages. Locks: claims of
-- checkpoint readers, in the order of their ids; the consumer; bundles.
create or replace function _pgqueue.settle_named(p_consumer pgqueue.consumers, p_actions pgqueue.action[],
                                                 p_query_id text, p_replayed boolean) returns bigint
language plpgsql as $$
declare
    v_named  int8multirange := (select range_agg(seqs) from unnest(p_actions));
    v_left   int8multirange := v_named;
    v_reader uuid := (select reader from pgqueue.readers
                      where consumer_id = p_consumer.consumer_id and query_id = p_query_id);
    v_claim  pgqueue.reader_claims;
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_done   record;
    v_count  bigint := 0;
begin
    perform _pgqueue.await('claims of ' || _pgqueue.consumer_name(p_consumer.consumer_id),
        'select count(*) from (select from pgqueue.reader_claims where consumer_id = $1 '
        'and ($2 ->> 0 is null or reader = ($2 ->> 0)::uuid) and seqs && ($2 ->> 1)::int8multirange '
        'order by claim_id for update) c',  -- lock: reader claim
        p_consumer.consumer_id, jsonb_build_array(v_reader, v_named::text));
    perform _pgqueue.lock_consumer(p_consumer.consumer_id);
    p_consumer := _pgqueue.consumer_now(p_consumer);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_cursor := v_stored;
    for v_claim in
        select * from pgqueue.reader_claims
        where consumer_id = p_consumer.consumer_id and (v_reader is null or reader = v_reader) and seqs && v_named
        order by claim_id
    loop
        v_done := _pgqueue.settle_claimed(p_consumer, v_cursor, v_claim, p_actions, p_replayed);
        v_cursor := v_done.o_cursor;
        v_count := v_count + _pgqueue.cardinality(v_done.o_gone * v_named);  -- a nack returns others too
        v_left := v_left - case when v_reader is null then v_done.o_gone else v_claim.seqs end;
    end loop;
    v_left := v_left * _pgqueue.completed_by(p_actions);
    if v_left <> '{}' then
        v_done := _pgqueue.settle_unclaimed(p_consumer, v_cursor, p_actions, v_left);
        v_cursor := v_done.o_cursor;
        v_count := v_count + v_done.o_count;
    end if;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(p_consumer, v_cursor), true);
    return v_count;
end $$;

-- The messages that actions acknowledge or dead-letter.
create or replace function _pgqueue.completed_by(p_actions pgqueue.action[]) returns int8multirange
language sql immutable as $$
    select coalesce(range_agg(seqs), '{}') from unnest(p_actions) where action <> 'nack'
$$;

-- Settles messages in a claim of a checkpoint reader. Needs the locks of the claim and the consumer. Returns the
-- cursor, and the messages that left the claim.
create or replace function _pgqueue.settle_claimed(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                   p_claim pgqueue.reader_claims, p_actions pgqueue.action[],
                                                   p_replayed boolean, out o_cursor pgqueue.consumer_cursors,
                                                   out o_gone int8multirange)
language plpgsql as $$
declare
    v_before pgqueue.consumer_messages[] := coalesce(_pgqueue.lock_bundles(p_claim.head, p_claim.token), '{}');
    v_held   int8multirange := _pgqueue.seqs_of(v_before);
    v_action pgqueue.action;
    v_now    pgqueue.consumer_messages[];
begin
    o_cursor := p_cursor;
    o_gone := '{}';
    if not v_held && (select range_agg(seqs) from unnest(p_actions)) then
        return;
    end if;
    -- first ack and dead_letter: a nack also returns later messages of its key that are still in the claim
    perform _pgqueue.record_completed(
        p_consumer, _pgqueue.remove_messages(v_before, v_held * _pgqueue.completed_by(p_actions)), p_actions,
        p_claim.claim_id);
    foreach v_action in array array(select a from unnest(p_actions) a where action = 'nack'
                                      and _pgqueue.meets(seqs, v_held)
                                    order by lower(seqs)) loop
        v_now := _pgqueue.lock_bundles(p_claim.head, p_claim.token);
        if _pgqueue.seqs_of(v_now) && v_action.seqs then
            o_cursor := _pgqueue.return(p_consumer, o_cursor, v_now, _pgqueue.seqs_of(v_now) * v_action.seqs, 'failed',
                                        clock_timestamp(), v_action.delay,
                                        jsonb_build_object('error', v_action.reason));
        end if;
    end loop;
    o_gone := v_held
        - (select coalesce(range_agg(seqs), '{}') from _pgqueue.bundles_of(p_claim.head, p_claim.token));
    update pgqueue.reader_claims
    set settled = settled + _pgqueue.cardinality(o_gone),
        settled_early = case when p_replayed then settled_early || array(
            select (-b.priority, b.arrival_no, b.priority, _pgqueue.one_more(b.deliver_count),
                    _pgqueue.common(b.seqs, o_gone))::pgqueue.settled_run
            from unnest(v_before) b where _pgqueue.meets(b.seqs, o_gone)) else settled_early end
    where reader = p_claim.reader and claim_id = p_claim.claim_id;
end $$;

-- Acknowledges or dead-letters messages that no claim holds, or a claim whose lease has ended. New messages are taken
-- first, for a bounded time; those that are not reached are taken out of turn, because the batch is not repeated. Needs
-- the consumer's lock. Returns the cursor, and the number of messages. Locks: what is new; expired claims and bundles.
-- It waits for none of them.
create or replace function _pgqueue.settle_unclaimed(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                     p_actions pgqueue.action[], p_seqs int8multirange,
                                                     out o_cursor pgqueue.consumer_cursors, out o_count bigint)
language plpgsql as $$
declare
    v_until    timestamptz := clock_timestamp() + _pgqueue.filter_time();
    v_before   pgqueue.consumer_cursors;
    v_upto     bigint;
    v_ids      int8multirange;
    v_early    record;
    v_bundles  pgqueue.consumer_messages[] := '{}';
    v_taken    record;
    v_screened record;
begin
    o_cursor := p_cursor;
    for i in 1.._pgqueue.limit_takes() loop
        v_upto := upper((_pgqueue.find_new(p_consumer, o_cursor, p_seqs)).o_ids) - 1;
        exit when v_upto is null or (i > 1 and _pgqueue.is_screened(p_consumer) and clock_timestamp() > v_until);
        v_before := o_cursor;
        o_cursor := (_pgqueue.take(p_consumer, o_cursor, greatest(v_upto, o_cursor.next_publication - 1),
                                   _pgqueue.limit_take())).o_cursor;
        exit when o_cursor is not distinct from v_before and (v_before.hints).filter_from is null;
    end loop;
    if v_upto is not null and _pgqueue.try_lock_new(p_consumer.consumer_id) then
        v_early := _pgqueue.take_out(p_consumer, _pgqueue.pass_taken(o_cursor, true), p_seqs);
        o_cursor := v_early.p_cursor;
        v_bundles := v_early.o_bundles;
    elsif v_upto is not null and p_consumer.profile = 'simple' then  -- claims ahead of the cursor are open
        v_ids := int8multirange(int8range(o_cursor.next_publication, null))
                 * (_pgqueue.find_new(p_consumer, o_cursor, p_seqs)).o_ids;
        if _pgqueue.cardinality(v_ids) > _pgqueue.far_ahead() then  -- each would keep a lock
            raise exception 'messages of % publications are new, and a claim of another new message stays open',
                            _pgqueue.cardinality(v_ids)
                using errcode = 'lock_not_available',
                      hint = 'The batch is repeated. Keep transactions that claim short.';
        end if;
        o_cursor := _pgqueue.take_each(p_consumer, o_cursor, v_ids);
    end if;
    o_cursor := (_pgqueue.release_due(p_consumer, o_cursor, p_seqs)).o_cursor;
    v_taken := _pgqueue.take_unclaimed(p_consumer, o_cursor.hints, p_seqs);
    o_cursor.hints := v_taken.o_hints;
    v_screened := _pgqueue.screen_taken(p_consumer, o_cursor, v_taken.o_bundles || v_bundles);
    o_cursor := v_screened.p_cursor;
    o_count := _pgqueue.cardinality(_pgqueue.seqs_of(v_screened.p_bundles));
    perform _pgqueue.record_completed(p_consumer, v_screened.p_bundles, p_actions, null);
end $$;

-- Screens the unfiltered ones of bundles that were taken out, however many are before them. Returns the cursor, and all
-- these bundles, without the messages that do not pass. Needs the consumer's lock.
create or replace function _pgqueue.screen_taken(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                                 inout p_bundles pgqueue.consumer_messages[])
language plpgsql as $$
declare
    v_unfiltered pgqueue.consumer_messages[] := array(select b from unnest(p_bundles) b
                                                      where b.lane = _pgqueue.lane_unfiltered());
    v_screened   record;
    v_refused    int8multirange;
    v_bundle     pgqueue.consumer_messages;
    v_rest       pgqueue.consumer_messages[] := '{}';
begin
    if v_unfiltered = '{}' then
        return;
    end if;
    v_screened := _pgqueue.screen(p_consumer, p_cursor, v_unfiltered, null);
    p_cursor := v_screened.p_cursor;
    v_refused := _pgqueue.seqs_of(v_unfiltered) - v_screened.o_passing;
    p_cursor.forgotten := p_cursor.forgotten + _pgqueue.cardinality(v_refused);
    foreach v_bundle in array p_bundles loop
        v_bundle.seqs := _pgqueue.less(v_bundle.seqs, v_refused);
        if v_bundle.seqs <> '{}' then
            v_rest := v_rest || v_bundle;
        end if;
    end loop;
    p_bundles := v_rest;
end $$;

-- Records the outcome of removed bundles: all their messages are acknowledged or dead-lettered.
--   p_claim_id  the claim that held them; null: none
create or replace function _pgqueue.record_completed(p_consumer pgqueue.consumers,
                                                     p_bundles pgqueue.consumer_messages[],
                                                     p_actions pgqueue.action[], p_claim_id bigint) returns void
language plpgsql as $$
declare
    v_seqs int8multirange := _pgqueue.seqs_of(p_bundles);
    v_dead int8multirange := v_seqs
        * (select coalesce(range_agg(seqs), '{}') from unnest(p_actions) where action = 'dead_letter');
    v_done record;
    v_by   pgqueue.consumer_messages := p_bundles[1];
begin
    if v_dead <> '{}' then
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason,
                                           details, claim_id, note, owner)
        select p_consumer.stream_id, p_consumer.consumer_id, m.seqs, _pgqueue.cardinality(m.seqs), m.priority,
               m.deliver_count, coalesce(m.reason, 'rejected'), m.details, p_claim_id, m.note, m.owner
        from _pgqueue.match_actions(p_bundles, p_actions, v_dead) m;
        if p_consumer.notify_done then
            perform pg_notify(_pgqueue.done_channel(p_consumer.consumer_id), '');
        end if;
    end if;
    if v_dead <> v_seqs then
        if p_claim_id is null then  -- as if they had been claimed now: without a claim they would count as cancelled
            p_claim_id := _pgqueue.new_lease_id();
            v_by.claimed_at := clock_timestamp();
            v_by.owner := current_setting('application_name');
        end if;
        for v_done in
            select details, range_agg(seqs) as seqs, max(deliver_count) as deliver_count
            from _pgqueue.match_actions(p_bundles, p_actions, v_seqs - v_dead) group by details
        loop
            perform _pgqueue.record_done(v_by, p_claim_id, v_done.seqs, _pgqueue.cardinality(v_done.seqs),
                                         v_done.deliver_count, v_done.details);
        end loop;
    end if;
end $$;

-- Matches messages of bundles with the actions that name them. With many actions, the match is by number: a match by
-- sets would compare each bundle with each action.
create or replace function _pgqueue.match_actions(p_bundles pgqueue.consumer_messages[], p_actions pgqueue.action[],
                                                  p_seqs int8multirange)
returns table (seqs int8multirange, priority int, deliver_count int, note jsonb, owner text, reason text, details jsonb)
language sql stable as $$
    with bundle as materialized (
        select * from unnest(p_bundles) with ordinality
    ), action as materialized (
        select * from unnest(p_actions) with ordinality
    ), pair as (
        select b.ordinality as bundle, a.ordinality as action, b.seqs * a.seqs * p_seqs as seqs
        from bundle b join action a on b.seqs && a.seqs
        where cardinality(p_actions) <= 16 and b.seqs * a.seqs && p_seqs
        union all
        select b.ordinality, a.ordinality, range_agg(int8range(seq, seq, '[]'))
        from (select b.ordinality, generate_series(lower(g), upper(g) - 1) as seq
              from bundle b cross join lateral unnest(b.seqs * p_seqs) g) b
        join (select a.ordinality, generate_series(lower(g), upper(g) - 1) as seq
              from action a cross join lateral unnest(a.seqs) g) a using (seq)
        where cardinality(p_actions) > 16
        group by b.ordinality, a.ordinality
    )
    select p.seqs, b.priority,
           case when b.token is null then b.deliver_count else _pgqueue.one_more(b.deliver_count) end, b.note, b.owner,
           a.reason, a.details
    from pair p join bundle b on b.ordinality = p.bundle join action a on a.ordinality = p.action
$$;
