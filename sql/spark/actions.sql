-- Actions: what the rows of a write want to be done with messages of consumers, told by their numbers and not by a claim.
--
-- Whose messages. What nobody holds, anybody may settle. What a worker's live claim holds is that worker's: such a message is passed over, as
-- with a stale claim; if its lease ended the claim is released, as for a claimer in need. What the claims of a Spark query hold is for that
-- query, and for writes of which nobody knows a query (Spark Connect does not say, and people have no claim at all); other queries that read
-- the consumer pass it over. What a query has lost, or acted upon before, it passes over too: so to act twice does nothing twice.
--
-- A query's micro-batch keeps the messages on which the query acted: claims.acted has them, as they were, until the batch is acknowledged. So its
-- replay after a crash has the same rows, whatever became of these, and they count as settled, not as lost.
--
-- An action is once per batch of a sink, as what it publishes; that is noted apart, because who settles need not be who publishes. An action is an
-- object {"action", "stream", "consumer", "seqs": "{[1,3),[7,8)}", "delay", "reason", "details"}, where the last three may be missing.

-- Settles messages: action ack, nack or dead_letter.
--   ack          done. details: its result, where the consumer keeps history
--   nack         delivered again, as a failure: not before delay is over, or as the consumer's settings say; reason: its last error. Of an
--                ordered consumer the later messages of the key that the same claim has go back too, and did not fail. Only what is held
--   dead_letter  given up, with reason (by default rejected) and details
--   p_query_id   of the Spark query whose write this is, where that is known
--   p_replayed   whether a micro-batch that has them keeps them, when it is read again
-- Returns whether they were done, not so in a batch that was done before; of how many messages it was true, in this call; and how many were passed
-- over: done, dead or not published; held by others; of a nack, held by nobody.
-- Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007, PQ010. Locks: the batch; then by consumer, in one order: claims, the consumer, runs.
create or replace function pgqueue.settle_messages(p_sink text, p_batch bigint, p_actions jsonb, p_query_id text default null, p_replayed boolean default true)
returns table (done boolean, changed bigint, passed_over bigint)
language plpgsql
as $$
declare
    v_actions pgqueue.action[] := pgqueue._actions(p_actions, '{ack,nack,dead_letter}');
    v_one     record;
    v_changed bigint;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_batch(p_sink, p_batch);
    changed := 0;
    passed_over := 0;
    done := pgqueue._begin_batch(p_sink, -1, p_batch, pgqueue._named_by(v_actions));
    if done then
        for v_one in
            select c as consumer, o.actions
            from (select stream, consumer, array_agg(a) as actions from unnest(v_actions) a group by stream, consumer) o
            cross join lateral pgqueue._consumer(o.stream, o.consumer) c order by c.consumer_id
        loop
            v_changed := pgqueue._settle_here(v_one.consumer, v_one.actions, p_query_id, p_replayed);
            changed := changed + v_changed;
            passed_over := passed_over + pgqueue._named_by(v_one.actions) - v_changed;
        end loop;
    end if;
    return next;
end $$;

-- Brings messages back: action redrive, of dead letters, or retry, of delayed ones; see redrive and retry.
-- Arguments, returns, errors and locks: as settle_messages. Passed over is what is not dead, or not delayed.
create or replace function pgqueue.revive_messages(p_sink text, p_batch bigint, p_actions jsonb) returns table (done boolean, changed bigint, passed_over bigint)
language plpgsql
as $$
declare
    v_actions pgqueue.action[] := pgqueue._actions(p_actions, '{redrive,retry}');
    v_action  pgqueue.action;
    v_seqs    bigint[];
    v_changed bigint;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_batch(p_sink, p_batch);
    changed := 0;
    passed_over := 0;
    done := pgqueue._begin_batch(p_sink, -2, p_batch, pgqueue._named_by(v_actions));
    if done then
        foreach v_action in array array(select a from unnest(v_actions) a cross join lateral pgqueue._consumer(a.stream, a.consumer) c
                                        order by c.consumer_id, a.action) loop
            v_seqs := array(select generate_series(lower(g), upper(g) - 1) from unnest(v_action.seqs) g);
            v_changed := case v_action.action when 'redrive' then pgqueue.redrive(v_action.stream, v_action.consumer, v_seqs, p_max => null)
                                              else pgqueue.retry(v_action.stream, v_action.consumer, v_seqs) end;
            changed := changed + v_changed;
            passed_over := passed_over + greatest(cardinality(v_seqs) - v_changed, 0);
        end loop;
    end if;
    return next;
end $$;

-- The actions of a batch, checked: each message is named by one of them. Errors: PQ001, PQ002, PQ003, PQ006.
--   p_allowed  which ones these may be
create or replace function pgqueue._actions(p_actions jsonb, p_allowed text[]) returns pgqueue.action[]
language plpgsql stable
as $$
declare
    v_actions  pgqueue.action[];
    v_action   pgqueue.action;
    v_consumer pgqueue.consumers;
    v_other    text;
begin
    if jsonb_typeof(p_actions) is distinct from 'array' then
        raise exception 'p_actions is a list of objects, not %', coalesce(jsonb_typeof(p_actions), 'null') using errcode = 'PQ003', column = 'p_actions';
    end if;
    v_actions := array(select (a.action, a.stream, a.consumer, a.seqs, a.delay, a.reason, a.details)::pgqueue.action
                       from jsonb_to_recordset(p_actions) as a (action text, stream text, consumer text, seqs int8multirange, delay interval, reason text,
                                                                details jsonb));
    foreach v_action in array v_actions loop
        if (v_action.action = any (p_allowed)) is not true then
            raise exception 'p_action is %, not %', array_to_string(p_allowed, ', '), coalesce(quote_literal(left(v_action.action, 50)), 'null')
                using errcode = 'PQ003', column = 'p_action';
        elsif (isempty(v_action.seqs) or lower_inf(v_action.seqs) or upper_inf(v_action.seqs)) is not false then
            raise exception 'p_seqs is a set of some numbers, not %', coalesce(left(v_action.seqs::text, 100), 'null')
                using errcode = 'PQ003', column = 'p_seqs';
        elsif v_action.delay < interval '0' or v_action.delay > pgqueue._max_interval() then
            raise exception 'p_delay is null or an interval from 0 to 10 years, not %', quote_literal(v_action.delay)
                using errcode = 'PQ003', column = 'p_delay';
        end if;
    end loop;
    for v_consumer in
        select c.* from (select distinct stream, consumer from unnest(v_actions)) o cross join lateral pgqueue._consumer(o.stream, o.consumer) c
    loop
        if v_consumer.partitions is not null then
            perform pgqueue._refuse_group(v_consumer);
        end if;
    end loop;
    for v_action.stream, v_action.consumer in
        select stream, consumer from unnest(v_actions) group by stream, consumer
        having sum(pgqueue._cardinality(seqs)) > pgqueue._cardinality(range_agg(seqs))
    loop
        select a.action, b.action, a.seqs * b.seqs into v_action.action, v_other, v_action.seqs
        from unnest(v_actions) with ordinality a join unnest(v_actions) with ordinality b using (stream, consumer)
        where a.ordinality < b.ordinality and a.seqs && b.seqs and stream = v_action.stream and consumer = v_action.consumer limit 1;
        raise exception 'message % of consumer % of stream % is named by two actions: % and %, or with two reasons, delays or details', lower(v_action.seqs),
                        quote_literal(v_action.consumer), quote_literal(v_action.stream), v_action.action, v_other
            using errcode = 'PQ003', column = 'p_actions', hint = 'Name each message once.';
    end loop;
    return v_actions;
end $$;

-- How many messages actions name.
create or replace function pgqueue._named_by(p_actions pgqueue.action[]) returns bigint
language sql immutable
as $$ select coalesce(sum(pgqueue._cardinality(seqs)), 0)::bigint from unnest(p_actions) $$;

-- Settles messages of one consumer; see settle_messages. Returns of how many it was true.
-- Locks: claims of readers, the consumer, runs.
create or replace function pgqueue._settle_here(p_consumer pgqueue.consumers, p_actions pgqueue.action[], p_query_id text, p_replayed boolean) returns bigint
language plpgsql
as $$
declare
    v_named  int8multirange := (select range_agg(seqs) from unnest(p_actions));
    v_left   int8multirange := v_named;
    v_reader uuid := (select reader from pgqueue.readers where consumer_id = p_consumer.consumer_id and query_id = p_query_id);
    v_claims bigint[];
    v_claim  pgqueue.claims;
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_held   record;
    v_free   record;
    v_count  bigint := 0;
begin
    v_claims := array(select c.claim_id
                      from pgqueue.readers r join pgqueue.claims c on c.reader = r.reader
                      where r.consumer_id = p_consumer.consumer_id and (v_reader is null or r.reader = v_reader) and c.seqs && v_named
                      order by c.claim_id for update of c);
    perform pgqueue._lock_consumer(p_consumer.consumer_id);
    v_stored := pgqueue._cursor(p_consumer.consumer_id);
    v_cursor := v_stored;
    for v_claim in select * from pgqueue.claims where claim_id = any (v_claims) order by claim_id loop
        v_held := pgqueue._settle_held(p_consumer, v_cursor, v_claim, p_actions, p_replayed);
        v_cursor := v_held.o_cursor;
        v_count := v_count + pgqueue._cardinality(v_held.o_gone * v_named);  -- a nack returns others too
        v_left := v_left - case when v_reader is null then v_held.o_gone else v_claim.seqs end;
    end loop;
    v_left := v_left * (select coalesce(range_agg(seqs), '{}') from unnest(p_actions) where action <> 'nack');
    if v_left <> '{}' then
        v_free := pgqueue._settle_free(p_consumer, v_cursor, p_actions, v_left);
        v_cursor := v_free.o_cursor;
        v_count := v_count + v_free.o_count;
    end if;
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    return v_count;
end $$;

-- Settles messages that a reader's claim holds. Returns the cursor, and which messages left the claim. Needs the claim's lock and the consumer's.
create or replace function pgqueue._settle_held(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims,
                                                p_actions pgqueue.action[], p_replayed boolean,
                                                out o_cursor pgqueue.consumer_cursors, out o_gone int8multirange)
language plpgsql
as $$
declare
    v_claim  pgqueue.claims := p_claim;
    v_before pgqueue.consumer_messages[] := array(select m from pgqueue.consumer_messages m where claim_id = p_claim.claim_id and state = 'claimed');
    v_held   int8multirange := (select range_agg(seqs) from unnest(v_before));
    v_part   int8multirange;
    v_action pgqueue.action;
    v_runs   pgqueue.consumer_messages[];
begin
    o_cursor := p_cursor;
    o_gone := '{}';
    if v_held is null or not v_held && (select range_agg(seqs) from unnest(p_actions)) then
        return;
    end if;
    -- what is done or given up first: a nack returns later messages of its key, unless they are gone
    v_part := v_held * (select coalesce(range_agg(seqs), '{}') from unnest(p_actions) where action <> 'nack');
    if v_part <> '{}' then
        v_runs := array(select r from pgqueue._take_out(v_claim.claim_id, v_part) r);
        perform pgqueue._end_as_told(p_consumer, v_runs, p_actions, v_claim);
        perform pgqueue._shrink_claim(v_claim, v_claim.remaining - pgqueue._cardinality(v_part));
    end if;
    foreach v_action in array array(select a from unnest(p_actions) a where action = 'nack' and seqs && v_held order by lower(seqs)) loop
        select * into v_claim from pgqueue.claims where claim_id = p_claim.claim_id;
        v_held := (select range_agg(seqs) from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed');
        if v_held && v_action.seqs then
            o_cursor := pgqueue._return(p_consumer, o_cursor, v_claim, v_held * v_action.seqs, 'named', clock_timestamp(), v_action.delay,
                                        jsonb_build_object('error', v_action.reason));
        end if;
    end loop;
    o_gone := (select range_agg(seqs) from unnest(v_before))
        - coalesce((select range_agg(seqs) from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed'), '{}');
    if p_replayed then
        update pgqueue.claims
        set acted = acted || array(select (r.lane, r.arrival_no, r.priority, r.deliver_count, r.seqs * o_gone)::pgqueue.acted_run
                                   from unnest(v_before) r where r.seqs && o_gone)
        where claim_id = p_claim.claim_id;
    end if;
end $$;

-- Settles messages that nobody holds, or a claim whose lease ended: acknowledged, or given up. What is new of them is taken first.
-- Returns the cursor, and how many these were. Needs the consumer's lock. Locks: expired claims and runs, and waits for none.
create or replace function pgqueue._settle_free(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_actions pgqueue.action[],
                                                p_seqs int8multirange, out o_cursor pgqueue.consumer_cursors, out o_count bigint)
language plpgsql
as $$
declare
    v_before pgqueue.consumer_cursors;
    v_upto   bigint;
    v_taken  record;
begin
    o_cursor := p_cursor;
    for i in 1..pgqueue._limit_takes() loop
        v_upto := upper((pgqueue._find_new(p_consumer, o_cursor, p_seqs)).o_ids) - 1;
        exit when v_upto is null and not exists (
            select from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id and state = 'unsifted' and seqs && p_seqs);
        v_before := o_cursor;
        o_cursor := (pgqueue._take(p_consumer, o_cursor, greatest(v_upto, o_cursor.next_publication - 1), pgqueue._limit_take())).o_cursor;
        exit when o_cursor is not distinct from v_before;
    end loop;
    o_cursor := (pgqueue._release_due(p_consumer, o_cursor, p_seqs)).o_cursor;
    v_taken := pgqueue._take_unclaimed(p_consumer, o_cursor, p_seqs - coalesce(
        (select range_agg(seqs) from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id and state = 'unsifted'), '{}'));
    o_cursor := v_taken.o_cursor;
    o_count := (select coalesce(sum(message_count), 0) from unnest(v_taken.o_runs));
    perform pgqueue._end_as_told(p_consumer, v_taken.o_runs, p_actions, null) where o_count > 0;
end $$;

-- Notes what became of runs that were taken out, whose messages are all acknowledged or given up: as actions say.
--   p_claim  that had them; null: none
create or replace function pgqueue._end_as_told(p_consumer pgqueue.consumers, p_runs pgqueue.consumer_messages[], p_actions pgqueue.action[],
                                                p_claim pgqueue.claims) returns void
language plpgsql
as $$
declare
    v_seqs  int8multirange := (select range_agg(seqs) from unnest(p_runs));
    v_dead  int8multirange := v_seqs * (select coalesce(range_agg(seqs), '{}') from unnest(p_actions) where action = 'dead_letter');
    v_done  record;
begin
    if v_dead <> '{}' then
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason, details, claim_id, note, owner)
        select p_consumer.stream_id, p_consumer.consumer_id, t.seqs, pgqueue._cardinality(t.seqs), r.priority, r.deliver_count,
               coalesce(a.reason, 'rejected'), a.details, p_claim.claim_id, r.note, p_claim.owner
        from pgqueue._told(p_runs, p_actions, v_dead) t
        join unnest(p_runs) with ordinality r on r.ordinality = t.run_no join unnest(p_actions) with ordinality a on a.ordinality = t.action_no;
        if p_consumer.notify_done then
            perform pg_notify(pgqueue._done_channel(p_consumer.consumer_id), '');
        end if;
    end if;
    if v_dead <> v_seqs then
        if p_claim.claim_id is null then  -- as if it had been claimed now: without a claim it would be cancelled
            p_claim.consumer_id := p_consumer.consumer_id;
            p_claim.claim_id := pgqueue._new_claim_id();
            p_claim.claimed_at := clock_timestamp();
            p_claim.owner := current_setting('application_name');
        end if;
        for v_done in
            select a.details, range_agg(t.seqs) as seqs, max(r.deliver_count) as deliver_count
            from pgqueue._told(p_runs, p_actions, v_seqs - v_dead) t
            join unnest(p_runs) with ordinality r on r.ordinality = t.run_no join unnest(p_actions) with ordinality a on a.ordinality = t.action_no
            group by a.details
        loop
            perform pgqueue._note_done(p_claim, v_done.seqs, pgqueue._cardinality(v_done.seqs), v_done.deliver_count, v_done.details);
        end loop;
    end if;
end $$;

-- Which of these messages are in which of these runs and named by which of these actions. Where both are many they are matched by number: sets
-- would be compared with each other, all with all.
create or replace function pgqueue._told(p_runs pgqueue.consumer_messages[], p_actions pgqueue.action[], p_seqs int8multirange)
returns table (run_no bigint, action_no bigint, seqs int8multirange)
language plpgsql stable
as $$
begin
    if cardinality(p_actions) <= 16 then
        return query
            select r.ordinality, a.ordinality, r.seqs * a.seqs * p_seqs
            from unnest(p_runs) with ordinality r join unnest(p_actions) with ordinality a on r.seqs && a.seqs
            where r.seqs * a.seqs && p_seqs;
    else
        return query
            with run as materialized (
                select r.ordinality as no, s from unnest(p_runs) with ordinality r cross join lateral unnest(r.seqs * p_seqs) g
                cross join lateral generate_series(lower(g), upper(g) - 1) s
            ), told as materialized (
                select a.ordinality as no, s from unnest(p_actions) with ordinality a cross join lateral unnest(a.seqs) g
                cross join lateral generate_series(lower(g), upper(g) - 1) s
            )
            select r.no, t.no, range_agg(int8range(s, s, '[]')) from run r join told t using (s) group by r.no, t.no;
    end if;
end $$;
