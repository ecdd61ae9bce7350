-- Receiving with a condition: of what is ready, what passes it; the others are left as they are.

-- Claims at most p_max messages that pass a condition, and reads them: those that come first by priority and arrival. The others stay where they are, and
-- this was no delivery of them. It looks at the first p_look messages that are ready; what stands behind these it finds once they are gone.
--   p_where  a jsonpath, asked as that of a filtered consumer: of {key, headers, data}
--   p_look   messages to look at, at most, 1 to 1,000,000
--   p_visibility_timeout, p_ack  as in claim
-- Returns as receive. Errors: PQ001, PQ002, PQ003, PQ006 for an ordered consumer, one with limits of keys or a group, PQ007.
-- Locks, to the end of the transaction: those of ack; the runs of what it claims; if it found nothing in what was ready, or something was due, the consumer.
create or replace function pgqueue.receive_where(p_stream text, p_consumer text, p_where jsonpath, p_max int default 1,
                                                 p_visibility_timeout interval default null, p_look int default 10000, p_ack bigint default null)
returns setof pgqueue.received
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := pgqueue._consumer(p_stream, p_consumer);
    v_claim_id bigint := pgqueue._new_claim_id();
    v_count    bigint := 0;
begin
    perform pgqueue._check_claim(p_max, p_visibility_timeout);
    perform pgqueue._check_number('p_look', p_look, 1, 1000000);
    if p_where is null then
        raise exception 'p_where is a jsonpath such as $.data.total > 100, not null'
            using errcode = 'PQ003', column = 'p_where', hint = 'receive has no condition.';
    end if;
    perform pgqueue._check_condition(p_where);
    if v_consumer.partitions is not null then
        perform pgqueue._refuse_group(v_consumer);
    elsif v_consumer.by_key then
        raise exception '% delivers by key (an ordering, fair, per_key_limit or per_key_interval), and so nothing out of its turn', quote_literal(p_consumer)
            using errcode = 'PQ006', hint = 'Receive with a condition from a consumer with ordering=none, or make a consumer with a filter.';
    end if;
    perform from pgqueue.claims c where c.claim_id = p_ack for update;  -- in the order of locks
    if v_consumer.scheduled then
        perform pgqueue._run_schedules(v_consumer.stream_id);
    end if;
    if v_consumer.paused then
        perform pgqueue._ack(p_ack) where p_ack is not null;
    else
        v_count := pgqueue._claim_where(v_consumer, v_claim_id, p_where, p_max, p_look, p_ack);
    end if;
    if v_count > 0 then
        perform pgqueue._open_claim(v_consumer, v_claim_id, v_count, p_visibility_timeout, null);
        return query execute format('select * from pgqueue._payloads_%s($1)', v_consumer.stream_id) using v_claim_id;
    end if;
end $$;

-- Claims what passes a condition: of what is ready, without a lock of the consumer, if nothing else has to be done first; then, if that has
-- nothing of it, with that lock also of what is due, expired or new. Returns how many messages.
--   p_ack  a claim to acknowledge; null: none
create or replace function pgqueue._claim_where(p_consumer pgqueue.consumers, p_claim_id bigint, p_where jsonpath, p_max int, p_look int, p_ack bigint)
returns bigint
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors := pgqueue._cursor(p_consumer.consumer_id);
    v_cursor pgqueue.consumer_cursors;
    v_room   record;
    v_look   record;
    v_seen   int8multirange := '{}';  -- what was looked at in vain
    v_left   bigint := p_look;
begin
    if pgqueue._is_calm(p_consumer, v_stored) then
        begin
            v_look := pgqueue._look_for(p_consumer, v_stored, p_claim_id, p_where, p_max, v_left, '{}', false);
            v_seen := v_look.o_failed;
            v_left := p_look - pgqueue._cardinality(v_seen);
            if v_look.o_count > 0 or v_left <= 0 then
                perform pgqueue._ack(p_ack) where p_ack is not null;
                return v_look.o_count;
            end if;
            raise exception using errcode = 'PQ099';
        exception when sqlstate 'PQ099' then
            null;  -- unlocks runs that it looked at and that were somebody else's, before it waits for the lock: as _claim does
        end;
    end if;
    perform pgqueue._lock_consumer(p_consumer.consumer_id);
    perform pgqueue._ack(p_ack) where p_ack is not null;  -- it may leave room
    v_stored := pgqueue._cursor(p_consumer.consumer_id);
    v_cursor := v_stored;
    if p_consumer.max_backlog is not null and p_consumer.on_full = 'drop_oldest' then
        v_cursor := pgqueue._drop_oldest(p_consumer, v_cursor);
    end if;
    if p_consumer.throttled then
        v_room := pgqueue._room(p_consumer, v_cursor, p_claim_id, p_max, 0);
        v_cursor := v_room.p_cursor;
        p_max := v_room.o_want;
        if p_max <= 0 then
            perform pgqueue._save_cursor(v_stored, v_cursor, false);
            return 0;
        end if;
    end if;
    for v_pass in 1..2 loop
        v_cursor := pgqueue._refresh(p_consumer, v_cursor, 0, v_pass > 1, v_left, null);
        for v_try in 0..5 loop  -- another claimer has what passes, and is about to leave some of it: as in _fill
            perform pg_sleep(0.0001 * 2 ^ v_try) where v_try > 0;
            v_look := pgqueue._look_for(p_consumer, v_cursor, p_claim_id, p_where, p_max, v_left, v_seen, true);
            v_seen := v_seen + v_look.o_failed;
            v_left := p_look - pgqueue._cardinality(v_seen);
            exit when not v_look.o_busy or v_left <= 0;
        end loop;
        exit when v_look.o_count > 0 or v_left <= 0;
    end loop;
    v_cursor := pgqueue._note_delivered(p_consumer, v_cursor, v_look.o_count);
    perform pgqueue._save_cursor(v_stored, pgqueue._raise_scan_from(v_cursor), v_look.o_count > 0);
    return v_look.o_count;
end $$;

-- Whether a claim with a condition has nothing to do before it looks at what is ready: no lease may have ended, nothing is due or more urgent, and no limit
-- is to be kept.
create or replace function pgqueue._is_calm(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
as $$
begin
    return not p_consumer.throttled and pgqueue._has_room(p_consumer)
        and p_cursor.scan_lanes_from is null and pgqueue._is_soon(p_cursor.lease_probe)
        and not pgqueue._is_due(p_cursor.consumer_id, p_cursor.due_from)
        and (not pgqueue._has_new(p_consumer.stream_id, p_cursor, false) or pgqueue._can_wait(p_consumer.stream_id, p_cursor));
end $$;

-- Looks at what is ready, and claims what passes a condition. Runs that another claimer is at are passed over.
--   p_look  messages at most
--   p_seen  runs of these alone are passed over: they were looked at
--   p_tidy  give up runs that have expired, a bounded number; else they are passed over
-- Returns how many messages it claimed; which ones it looked at in vain; and whether it got none because another claimer is at what passes.
-- Locks the runs of what it claims.
create or replace function pgqueue._look_for(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_where jsonpath, p_max bigint,
                                             p_look bigint, p_seen int8multirange, p_tidy boolean,
                                             out o_count bigint, out o_failed int8multirange, out o_busy boolean)
language plpgsql
as $$
declare
    v_places  pgqueue.line_place[] := pgqueue._by_age(p_consumer, p_cursor.scan_from);
    v_place   pgqueue.line_place;
    v_runs    pgqueue.consumer_messages[];
    v_run     pgqueue.consumer_messages;
    v_part    pgqueue.consumer_messages;    -- what of it is looked at
    v_parts   pgqueue.consumer_messages[];
    v_claimed record;
    v_left    bigint := p_look;
    v_expired int := 0;
begin
    o_count := 0;
    o_failed := '{}';
    o_busy := false;
    if p_cursor.scan_lanes_from is not null then
        v_places := v_places || array(
            select (l.lane, 0, 0)::pgqueue.line_place
            from (select distinct lane from pgqueue.consumer_messages
                  where consumer_id = p_consumer.consumer_id and state = 'ready' and lane >= p_cursor.scan_lanes_from) l order by l.lane);
    end if;
    foreach v_place in array v_places loop
        loop
            v_runs := pgqueue._first_ready(p_consumer.consumer_id, v_place);
            exit when v_runs = '{}';
            v_place.line_no := v_runs[cardinality(v_runs)].line_no;
            v_place.first_seq := v_runs[cardinality(v_runs)].first_seq + 1;
            v_parts := '{}';
            foreach v_run in array v_runs loop
                continue when v_run.seqs <@ p_seen;
                if pgqueue._has_expired(v_run.note) then
                    if p_tidy and v_expired < pgqueue._limit_due() then
                        v_expired := v_expired + 1;
                        perform pgqueue._give_up_expired(t.tid, 0) from pgqueue._lock_run(v_run) t (tid) where t.tid is not null;
                    end if;
                    continue;
                end if;
                v_part := v_run;
                if v_run.message_count > v_left then
                    v_part.message_count := v_left;
                    v_part.seqs := pgqueue._below(v_run.seqs, pgqueue._bound_of(v_run.seqs, v_part.message_count));
                end if;
                v_parts := v_parts || v_part;
                v_left := v_left - v_part.message_count;
                exit when v_left = 0;
            end loop;
            v_claimed := pgqueue._claim_matching(p_consumer.stream_id, v_runs, v_parts, p_claim_id, p_where, p_max - o_count, o_count);
            o_count := o_count + v_claimed.o_count;
            o_failed := o_failed + v_claimed.o_failed;
            o_busy := (o_busy or v_claimed.o_busy) and o_count = 0;
            if v_claimed.o_ended then
                return;
            end if;
            exit when o_count >= p_max or v_left = 0;
        end loop;
        exit when o_count >= p_max or v_left = 0;
    end loop;
end $$;

-- The first ready runs from a place on, as many as are judged at once, and as they are: nothing is locked.
create or replace function pgqueue._first_ready(p_consumer_id int, p_from pgqueue.line_place) returns pgqueue.consumer_messages[]
language plpgsql stable
as $$
begin
    return array(select w.m from (select m, sum(m.message_count) over (order by m.line_no, m.first_seq) - m.message_count as before
                                  from (select * from pgqueue.consumer_messages r
                                        where r.consumer_id = p_consumer_id and r.state = 'ready' and r.lane = p_from.lane
                                          and (r.line_no, r.first_seq) >= (p_from.line_no, p_from.first_seq)
                                        order by r.line_no, r.first_seq limit pgqueue._limit_looked_for()) m) w
                 where w.before < pgqueue._limit_looked_for() order by (w.m).line_no, (w.m).first_seq);
end $$;

-- Claims what passes a condition in parts of ready runs. Where another claimer has such a run, it goes on with the others.
--   p_runs   the runs; p_parts: what of them is to be judged
--   p_max    messages at most; p_held: messages that the claim has already
-- Returns how many it claimed; whether the claim ends there, as _serve_ready does; the messages of the parts in which none passes; and whether another
-- claimer had some that do.
-- Locks the runs of what it claims.
create or replace function pgqueue._claim_matching(p_stream_id int, p_runs pgqueue.consumer_messages[], p_parts pgqueue.consumer_messages[], p_claim_id bigint,
                                                   p_where jsonpath, p_max bigint, p_held bigint,
                                                   out o_count bigint, out o_ended boolean, out o_failed int8multirange, out o_busy boolean)
language plpgsql
as $$
declare
    v_run    pgqueue.consumer_messages;
    v_want   bigint;
    v_match  int8multirange;
    v_passed int8multirange := '{}';
begin
    o_count := 0;
    o_ended := false;
    loop
        v_want := p_max - o_count;
        v_match := pgqueue._matching(p_stream_id, array(  -- the runs of one line_no interleave
            select g from unnest(p_parts) p cross join lateral unnest(p.seqs) g where not p.seqs && v_passed order by p.line_no, g), null, p_where, v_want);
        v_passed := v_passed + v_match;
        foreach v_run in array p_runs loop
            continue when not v_run.seqs && v_match;
            o_count := o_count + pgqueue._claim_part(v_run, v_match, p_claim_id, p_held + o_count);
            -- such a run is a claim of its own, or the next one's
            o_ended := p_held + o_count > 0 and coalesce(v_run.note ? 'at_most', false);
            exit when o_ended;
        end loop;
        -- fewer than wanted: all were judged
        exit when o_ended or o_count >= p_max or pgqueue._cardinality(v_match) < v_want;
    end loop;
    o_failed := (select coalesce(range_agg(seqs), '{}') from unnest(p_parts) where not seqs && v_passed);
    o_busy := o_count = 0 and v_passed <> '{}';
end $$;

-- Locks a run that is ready, if it is as it was and nobody else has it. Returns where it is; null: not.
create or replace function pgqueue._lock_run(p_run pgqueue.consumer_messages) returns tid
language plpgsql
as $$
begin
    return (select m.ctid from pgqueue.consumer_messages m
            where m.consumer_id = p_run.consumer_id and m.state = 'ready' and m.lane = p_run.lane and m.line_no = p_run.line_no
              and m.first_seq = p_run.first_seq and m.seqs = p_run.seqs
            for update skip locked);
end $$;

-- Claims those of some messages that a ready run has; the others stay ready, at their place. Nothing if the run is another one now.
--   p_held  messages that the claim has already: then it gets nothing of a run with at_most
-- Returns how many messages. Locks the run.
create or replace function pgqueue._claim_part(p_run pgqueue.consumer_messages, p_set int8multirange, p_claim_id bigint, p_held bigint) returns bigint
language plpgsql
as $$
declare
    v_run     pgqueue.consumer_messages;
    v_part    int8multirange;
    v_at_most bigint;
begin
    delete from pgqueue.consumer_messages where ctid = pgqueue._lock_run(p_run) returning * into v_run;
    if not found then
        return 0;
    end if;
    v_part := v_run.seqs * p_set;
    v_at_most := case when p_held > 0 and v_run.note ? 'at_most' then 0 else (v_run.note ->> 'at_most')::bigint end;
    if v_at_most < pgqueue._cardinality(v_part) then
        v_part := case v_at_most when 0 then '{}' else pgqueue._below(v_part, pgqueue._bound_of(v_part, v_at_most)) end;
    end if;
    perform pgqueue._store_run(v_run, v_run.seqs - v_part);
    return pgqueue._claim_run(v_run, v_part, p_claim_id);
end $$;
