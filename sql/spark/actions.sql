-- Actions: what the rows of a Spark write do to messages of consumers. A row names messages by their numbers, not by a
-- claim.
--
-- Which messages a write may settle. Anybody may settle messages that no claim holds. Messages in a worker's live
-- claim belong to that worker: the write passes them over, as a stale claim is; if the lease ended, the write releases
-- the claim, as a claim in need does. Messages in the claims of a Spark query belong to that query, and to writes
-- whose query is not known (Spark Connect does not say it, and people have no claim at all); other queries that read
-- the consumer pass them over. A query also passes over messages that it has lost, or has acted upon before: so to act
-- twice does nothing twice.
--
-- A query's micro-batch keeps the messages on which the query acted: reader_claims.acted has them, as they were, until
-- the batch is acknowledged. So a replay of the batch after a crash has the same rows, whatever became of these
-- messages, and they count as settled, not as lost.
--
-- An action happens once per batch of a sink and consumer, as a publication once per batch and stream. They are noted
-- apart: writes with one txnAppId may publish to one stream, and settle messages of several consumers. An action is an
-- object {"action", "stream", "consumer", "seqs": "{[1,3),[7,8)}", "delay", "reason", "details"}; the last three may be
-- missing.

-- What rows of a write want to be done with messages: action is ack, nack, dead_letter, redrive or retry.
do $$
begin
    if to_regtype('pgqueue.action') is null then
        create type pgqueue.action as (
            action text, stream text, consumer text, seqs int8multirange, delay interval, reason text, details jsonb);
    end if;
end $$;

-- Acknowledges, returns or dead-letters messages by their numbers, for a batch of a sink, once for each consumer.
--   ack          the message is done. details: its result, where the consumer keeps history
--   nack         the message is delivered again, as a failure: not before delay is over, or as the consumer's settings
--                say; reason: its last error. In an ordered consumer the later messages of the key in the same claim
--                go back too, and did not fail. Only for messages that a claim of a query holds
--   dead_letter  the message is given up, with reason (by default rejected) and details
--   p_query_id   the Spark query whose write this is, where that is known
--   p_replayed   whether a micro-batch that has the messages keeps them when it is read again
-- Returns whether actions were done, which is false for a batch that was done before; how many messages were changed by
-- this call; and how many were passed over: done, dead or not published; held by others; for a nack, held by nobody; or
-- of a consumer for which this batch was done before. Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007, PQ010.
-- Locks: the batch; then, consumer by consumer in the order of their ids: claims, the consumer, bundles.
create or replace function pgqueue.settle_messages(p_sink text, p_batch bigint, p_actions jsonb,
                                                   p_query_id text default null, p_replayed boolean default true)
returns table (done boolean, changed bigint, passed_over bigint)
language plpgsql as $$
declare
    v_actions pgqueue.action[] := _pgqueue.actions(p_actions, '{ack,nack,dead_letter}');
    v_begun   pgqueue.action[];
    v_one     record;
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_batch(p_sink, p_batch);
    changed := 0;
    v_begun := _pgqueue.begin_actions(p_sink, p_batch, v_actions, false);
    done := v_begun <> '{}';
    for v_one in select * from _pgqueue.by_consumer(v_begun) loop
        changed := changed + _pgqueue.settle_here(v_one.consumer, v_one.actions, p_query_id, p_replayed);
    end loop;
    passed_over := case when done then _pgqueue.named_by(v_actions) - changed else 0 end;
    return next;
end $$;

-- Actions by consumer, in the order in which consumers are locked.
create or replace function _pgqueue.by_consumer(p_actions pgqueue.action[])
returns table (consumer pgqueue.consumers, actions pgqueue.action[])
language sql stable as $$
    select c, o.actions
    from (select a.stream, a.consumer, array_agg(a) as actions from unnest(p_actions) a group by a.stream, a.consumer) o
    cross join lateral _pgqueue.consumer(o.stream, o.consumer) c order by c.consumer_id
$$;

-- Begins the actions of a batch, once for each consumer; see begin_batch(). Returns the actions that were not done
-- before.
create or replace function _pgqueue.begin_actions(p_sink text, p_batch bigint, p_actions pgqueue.action[],
                                                  p_revived boolean) returns pgqueue.action[]
language plpgsql as $$
declare
    v_one   record;
    v_begun pgqueue.action[] := '{}';
begin
    for v_one in select * from _pgqueue.by_consumer(p_actions) loop
        if _pgqueue.begin_batch(row(
            p_sink, (v_one.consumer).stream_id, (v_one.consumer).consumer_id, p_revived, p_batch,
            _pgqueue.named_by(v_one.actions),
            (select sum(hash_record_extended(row(action, seqs), 0))
             from (select action, range_agg(seqs) as seqs from unnest(v_one.actions) group by action) a),
            null, null, '')) then
            v_begun := v_begun || v_one.actions;
        end if;
    end loop;
    return v_begun;
end $$;

-- Redrives or retries messages by their numbers, for a batch of a sink, once for each consumer. Action redrive brings
-- back dead letters, retry delayed messages; see redrive and retry. Arguments, returns, errors and locks: as
-- settle_messages. It passes over messages that are not dead, or not delayed.
create or replace function pgqueue.revive_messages(p_sink text, p_batch bigint, p_actions jsonb)
returns table (done boolean, changed bigint, passed_over bigint)
language plpgsql as $$
declare
    v_actions pgqueue.action[] := _pgqueue.actions(p_actions, '{redrive,retry}');
    v_begun   pgqueue.action[];
    v_action  pgqueue.action;
    v_seqs    bigint[];
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_batch(p_sink, p_batch);
    changed := 0;
    v_begun := _pgqueue.begin_actions(p_sink, p_batch, v_actions, true);
    done := v_begun <> '{}';
    foreach v_action in array array(select a from _pgqueue.by_consumer(v_begun) c cross join lateral unnest(c.actions) a
                                    order by (c.consumer).consumer_id, a.action) loop
        v_seqs := array(select generate_series(lower(g), upper(g) - 1) from unnest(v_action.seqs) g);
        changed := changed + case v_action.action
                                  when 'redrive' then pgqueue.redrive(v_action.stream, v_action.consumer, v_seqs,
                                                                      p_max => null)
                                                  else pgqueue.retry(v_action.stream, v_action.consumer, v_seqs) end;
    end loop;
    passed_over := case when done then greatest(_pgqueue.named_by(v_actions) - changed, 0) else 0 end;
    return next;
end $$;

-- The actions of a list of objects. Errors: PQ003 for numbers and delays that their types cannot hold.
create or replace function _pgqueue.read_actions(p_actions jsonb) returns pgqueue.action[]
language plpgsql stable as $$
begin
    return array(select (a.action, a.stream, a.consumer, a.seqs, a.delay, a.reason, a.details)::pgqueue.action
                 from jsonb_to_recordset(p_actions) as a (action text, stream text, consumer text, seqs int8multirange,
                                                          delay interval, reason text, details jsonb));
exception
    when numeric_value_out_of_range then
        raise exception 'p_seqs holds a number that no message has: the last bigint, or one beyond'
            using errcode = 'PQ003', column = 'p_seqs';
    when interval_field_overflow or datetime_field_overflow then
        raise exception 'p_delay is null or an interval from 0 to 10 years'
            using errcode = 'PQ003', column = 'p_delay';
end $$;

-- The actions of a batch, checked: each message is named by one action. Errors: PQ001, PQ002, PQ003, PQ006.
--   p_allowed  the actions that are allowed
create or replace function _pgqueue.actions(p_actions jsonb, p_allowed text[]) returns pgqueue.action[]
language plpgsql stable as $$
declare
    v_actions  pgqueue.action[];
    v_action   pgqueue.action;
    v_consumer pgqueue.consumers;
    v_other    text;
    -- what a batch may have settled by far; redrive and retry take an array, which may have 1 GB
    v_most     bigint := case when 'redrive' = any (p_allowed) then 100000000 else 1000000000000 end;
begin
    if jsonb_typeof(p_actions) is distinct from 'array' then
        raise exception 'p_actions is a list of objects, not %', coalesce(jsonb_typeof(p_actions), 'null')
            using errcode = 'PQ003', column = 'p_actions';
    end if;
    v_actions := _pgqueue.read_actions(p_actions);
    foreach v_action in array v_actions loop
        if (v_action.action = any (p_allowed)) is not true then
            raise exception 'p_action is %, not %', array_to_string(p_allowed, ', '),
                            coalesce(quote_literal(left(v_action.action, 50)), 'null')
                using errcode = 'PQ003', column = 'p_action';
        elsif (isempty(v_action.seqs) or lower_inf(v_action.seqs) or upper_inf(v_action.seqs)) is not false then
            raise exception 'p_seqs is a set of some numbers, not %', coalesce(left(v_action.seqs::text, 100), 'null')
                using errcode = 'PQ003', column = 'p_seqs';
        elsif lower(v_action.seqs) < -v_most or _pgqueue.cardinality(v_action.seqs * '{[0,)}') > v_most then
            raise exception 'p_seqs is a set of at most % numbers, not %', v_most, left(v_action.seqs::text, 100)
                using errcode = 'PQ003', column = 'p_seqs';
        elsif v_action.delay < interval '0' or v_action.delay > _pgqueue.max_interval() then
            raise exception 'p_delay is null or an interval from 0 to 10 years, not %', quote_literal(v_action.delay)
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

-- How many messages actions name.
create or replace function _pgqueue.named_by(p_actions pgqueue.action[]) returns bigint
language sql immutable as $$ select coalesce(sum(_pgqueue.cardinality(seqs)), 0)::bigint from unnest(p_actions) $$;

-- Settles messages of one consumer; see settle_messages. Returns how many it changed. Locks: claims of checkpoint
-- readers, the consumer, bundles.
create or replace function _pgqueue.settle_here(p_consumer pgqueue.consumers, p_actions pgqueue.action[],
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
    v_held   record;
    v_free   record;
    v_count  bigint := 0;
begin
    perform _pgqueue.lock_reader_claims(p_consumer.consumer_id, v_reader, v_named);
    perform _pgqueue.lock_consumer(p_consumer.consumer_id);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_cursor := v_stored;
    for v_claim in
        select * from pgqueue.reader_claims
        where consumer_id = p_consumer.consumer_id and (v_reader is null or reader = v_reader) and seqs && v_named
        order by claim_id
    loop
        v_held := _pgqueue.settle_held(p_consumer, v_cursor, v_claim, p_actions, p_replayed);
        v_cursor := v_held.o_cursor;
        v_count := v_count + _pgqueue.cardinality(v_held.o_gone * v_named);  -- a nack returns others too
        v_left := v_left - case when v_reader is null then v_held.o_gone else v_claim.seqs end;
    end loop;
    v_left := v_left * (select coalesce(range_agg(seqs), '{}') from unnest(p_actions) where action <> 'nack');
    if v_left <> '{}' then
        v_free := _pgqueue.settle_free(p_consumer, v_cursor, p_actions, v_left);
        v_cursor := v_free.o_cursor;
        v_count := v_count + v_free.o_count;
    end if;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(p_consumer, v_cursor), true);
    return v_count;
end $$;

-- Locks the claims of checkpoint readers that had some of these messages, in the order of their ids. Errors: as
-- lock_consumer().
--   p_reader  only of this one; null: of any
create or replace function _pgqueue.lock_reader_claims(p_consumer_id int, p_reader uuid, p_seqs int8multirange)
returns void language plpgsql as $$
begin
    perform _pgqueue.await('claims of ' || _pgqueue.consumer_name(p_consumer_id),
        'select count(*) from (select from pgqueue.reader_claims where consumer_id = $1 '
        'and ($2 ->> 0 is null or reader = ($2 ->> 0)::uuid) and seqs && ($2 ->> 1)::int8multirange '
        'order by claim_id for update) c',  -- lock: reader claim
        p_consumer_id, jsonb_build_array(p_reader, p_seqs::text));
end $$;

-- Settles messages that the claim of a checkpoint reader holds. Needs the claim's lock and the consumer's. Returns the
-- cursor, and the messages that left the claim.
create or replace function _pgqueue.settle_held(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                p_claim pgqueue.reader_claims, p_actions pgqueue.action[],
                                                p_replayed boolean, out o_cursor pgqueue.consumer_cursors,
                                                out o_gone int8multirange)
language plpgsql as $$
declare
    v_before pgqueue.consumer_messages[] := coalesce(_pgqueue.lock_bundles(p_claim.head, p_claim.token), '{}');
    v_held   int8multirange := _pgqueue.seqs_of(v_before);
    v_part   int8multirange;
    v_action pgqueue.action;
    v_now    pgqueue.consumer_messages[];
begin
    o_cursor := p_cursor;
    o_gone := '{}';
    if v_held = '{}' or not v_held && (select range_agg(seqs) from unnest(p_actions)) then
        return;
    end if;
    -- first the messages that are done or given up: a nack returns later messages of its key, unless they are gone
    v_part := v_held * (select coalesce(range_agg(seqs), '{}') from unnest(p_actions) where action <> 'nack');
    if v_part <> '{}' then
        perform _pgqueue.end_named(p_consumer, _pgqueue.remove_messages(v_before, v_part), p_actions, p_claim.claim_id);
    end if;
    foreach v_action in array array(select a from unnest(p_actions) a where action = 'nack' and seqs && v_held
                                    order by lower(seqs)) loop
        v_now := _pgqueue.lock_bundles(p_claim.head, p_claim.token);
        if _pgqueue.seqs_of(v_now) && v_action.seqs then
            o_cursor := _pgqueue.return(p_consumer, o_cursor, v_now, _pgqueue.seqs_of(v_now) * v_action.seqs, 'named',
                                        clock_timestamp(), v_action.delay,
                                        jsonb_build_object('error', v_action.reason));
        end if;
    end loop;
    o_gone := v_held - coalesce((select range_agg(seqs) from _pgqueue.bundles_of_reader(p_claim)), '{}');
    update pgqueue.reader_claims
    set settled = settled + _pgqueue.cardinality(o_gone),
        acted = case when p_replayed then acted || array(
            select (-b.priority, b.arrival_no, b.priority, _pgqueue.one_more(b.deliver_count),
                    b.seqs * o_gone)::pgqueue.acted_run
            from unnest(v_before) b where b.seqs && o_gone) else acted end
    where reader = p_claim.reader and claim_id = p_claim.claim_id;
end $$;

-- Acknowledges or gives up messages that no claim holds, or a claim whose lease ended. New messages are taken first.
-- Needs the consumer's lock. Returns the cursor, and how many messages these were. Locks: expired claims and bundles.
-- It waits for none of them.
create or replace function _pgqueue.settle_free(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                p_actions pgqueue.action[], p_seqs int8multirange,
                                                out o_cursor pgqueue.consumer_cursors, out o_count bigint)
language plpgsql as $$
declare
    v_before pgqueue.consumer_cursors;
    v_upto   bigint;
    v_taken  record;
begin
    o_cursor := p_cursor;
    for i in 1.._pgqueue.limit_takes() loop
        v_upto := upper((_pgqueue.find_new(p_consumer, o_cursor, p_seqs)).o_ids) - 1;
        exit when v_upto is null and not exists (
            select from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_unfiltered() and seqs && p_seqs);
        v_before := o_cursor;
        o_cursor := (_pgqueue.take(p_consumer, o_cursor, greatest(v_upto, o_cursor.next_publication - 1),
                                   _pgqueue.limit_take())).o_cursor;
        exit when o_cursor is not distinct from v_before and (v_before.hints).filter_from is null;
    end loop;
    o_cursor := (_pgqueue.release_due(p_consumer, o_cursor, p_seqs)).o_cursor;
    v_taken := _pgqueue.take_unclaimed(p_consumer, o_cursor.hints, p_seqs - coalesce(
        (select range_agg(seqs) from pgqueue.consumer_messages
         where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_unfiltered()), '{}'));
    o_cursor.hints := v_taken.o_hints;
    o_count := _pgqueue.count_of(v_taken.o_bundles);
    perform _pgqueue.end_named(p_consumer, v_taken.o_bundles, p_actions, null) where o_count > 0;
end $$;

-- Notes what the actions made of bundles that were taken out: all their messages are acknowledged or given up.
--   p_claim_id  the claim that had them; null: none
create or replace function _pgqueue.end_named(p_consumer pgqueue.consumers, p_bundles pgqueue.consumer_messages[],
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
        select p_consumer.stream_id, p_consumer.consumer_id, n.seqs, _pgqueue.cardinality(n.seqs), b.priority,
               case when b.token is null then b.deliver_count else _pgqueue.one_more(b.deliver_count) end,
               coalesce(a.reason, 'rejected'), a.details, p_claim_id, b.note, b.owner
        from _pgqueue.named_in(p_bundles, p_actions, v_dead) n
        join unnest(p_bundles) with ordinality b on b.ordinality = n.bundle
        join unnest(p_actions) with ordinality a on a.ordinality = n.action;
        if p_consumer.notify_done then
            perform pg_notify(_pgqueue.done_channel(p_consumer.consumer_id), '');
        end if;
    end if;
    if v_dead <> v_seqs then
        if p_claim_id is null then  -- as if it had been claimed now: without a claim it would be cancelled
            p_claim_id := _pgqueue.new_lease_id();
            v_by.claimed_at := clock_timestamp();
            v_by.owner := current_setting('application_name');
        end if;
        for v_done in
            select a.details, range_agg(n.seqs) as seqs,
                   max(case when b.token is null then b.deliver_count else _pgqueue.one_more(b.deliver_count) end)
                       as deliver_count
            from _pgqueue.named_in(p_bundles, p_actions, v_seqs - v_dead) n
            join unnest(p_bundles) with ordinality b on b.ordinality = n.bundle
            join unnest(p_actions) with ordinality a on a.ordinality = n.action
            group by a.details
        loop
            perform _pgqueue.record_done(v_by, p_claim_id, v_done.seqs, _pgqueue.cardinality(v_done.seqs),
                                         v_done.deliver_count, v_done.details);
        end loop;
    end if;
end $$;

-- Matches messages, bundles and actions: which messages are in which bundle and named by which action. When there are
-- many actions, the match is by number: to compare sets would compare all with all.
create or replace function _pgqueue.named_in(p_bundles pgqueue.consumer_messages[], p_actions pgqueue.action[],
                                             p_seqs int8multirange)
returns table (bundle bigint, action bigint, seqs int8multirange)
language plpgsql stable as $$
begin
    if cardinality(p_actions) <= 16 then
        return query
            select b.ordinality, a.ordinality, b.seqs * a.seqs * p_seqs
            from unnest(p_bundles) with ordinality b join unnest(p_actions) with ordinality a on b.seqs && a.seqs
            where b.seqs * a.seqs && p_seqs;
    else
        return query
            with held as materialized (
                select b.ordinality as no, s from unnest(p_bundles) with ordinality b
                cross join lateral unnest(b.seqs * p_seqs) g
                cross join lateral generate_series(lower(g), upper(g) - 1) s
            ), named as materialized (
                select a.ordinality as no, s from unnest(p_actions) with ordinality a
                cross join lateral unnest(a.seqs) g
                cross join lateral generate_series(lower(g), upper(g) - 1) s
            )
            select h.no, n.no, range_agg(int8range(s, s, '[]')) from held h join named n using (s) group by h.no, n.no;
    end if;
end $$;
