-- Claims with a condition: messages that pass it are claimed out of the ready runs of a consumer without an order, and
-- the others stay in their place.

-- Serves a claim with messages that pass a condition, in the order of the line: for such a claim it is what
-- serve_ready() is for others. Runs that other claimers hold are passed over.
--   p_max   messages to claim at most
--   p_look  messages to look at, at most
--   p_seen  messages that were looked at in vain before: runs of these alone are passed over
--   p_tidy  give up runs that have expired, a bounded number; else they are passed over
-- Returns p_seen, with the messages of this look; and message_count, ended and done. ended: the claim got messages, or
-- has looked at p_look. done: another look would find nothing else, because no other claimer holds a message that
-- passes. Locks the runs of the claimed messages.
create or replace function _pgqueue.serve_matching(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                   p_claim_id bigint, p_where jsonpath, p_max bigint, p_look bigint,
                                                   inout p_seen int8multirange, p_tidy boolean,
                                                   out o_served pgqueue.served)
language plpgsql
as $$
declare
    v_places  pgqueue.line_place[] := p_cursor.scan_from;
    v_place   pgqueue.line_place;
    v_runs    pgqueue.consumer_messages[];
    v_parts   record;  -- the parts of the runs that are looked at
    v_claimed record;
    v_left    bigint := p_look - _pgqueue.cardinality(p_seen);
    v_expired int := 0;
    v_busy    boolean := false;
begin
    o_served.message_count := 0;
    if p_cursor.scan_lanes_from is not null then
        v_places := v_places || array(
            select (l.lane, 0, 0)::pgqueue.line_place
            from (select distinct lane from pgqueue.consumer_messages
                  where consumer_id = p_consumer.consumer_id and state = 'ready' and lane >= p_cursor.scan_lanes_from) l
            order by l.lane);
    end if;
    <<places>>
    foreach v_place in array v_places loop
        loop
            exit places when o_served.message_count >= p_max or v_left = 0;
            v_runs := _pgqueue.first_ready(p_consumer.consumer_id, v_place);
            exit when v_runs = '{}';
            v_place.line_no := v_runs[cardinality(v_runs)].line_no;
            v_place.first_seq := v_runs[cardinality(v_runs)].first_seq + 1;
            v_parts := _pgqueue.parts_of(v_runs, p_seen, v_left, v_expired, p_tidy);
            v_left := v_parts.p_left;
            v_expired := v_parts.p_expired;
            v_claimed := _pgqueue.claim_matching(p_consumer.stream_id, v_runs, v_parts.o_parts, p_claim_id, p_where,
                                                 p_max - o_served.message_count, o_served.message_count);
            o_served.message_count := o_served.message_count + v_claimed.o_count;
            p_seen := p_seen + v_claimed.o_failed;
            v_busy := v_busy or v_claimed.o_busy;
            exit places when v_claimed.o_ended;
        end loop;
    end loop;
    o_served.ended := o_served.message_count > 0 or _pgqueue.cardinality(p_seen) >= p_look;
    o_served.done := not v_busy;
end $$;

-- The parts of ready runs that a claim with a condition looks at: without runs that it looked at before, and expired
-- ones.
--   p_seen     messages that were looked at before
--   p_left     messages to look at, at most
--   p_expired  how many runs were given up
--   p_tidy     give up runs that have expired
-- Returns the parts; and p_left and p_expired as they are then.
create or replace function _pgqueue.parts_of(p_runs pgqueue.consumer_messages[], p_seen int8multirange,
                                             inout p_left bigint, inout p_expired int, p_tidy boolean,
                                             out o_parts pgqueue.consumer_messages[])
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part pgqueue.consumer_messages;
begin
    o_parts := '{}';
    foreach v_run in array p_runs loop
        continue when v_run.seqs <@ p_seen;
        if _pgqueue.has_expired(v_run.note) then
            if p_tidy and p_expired < _pgqueue.limit_due() then
                p_expired := p_expired + 1;
                perform _pgqueue.give_up_expired(t.tid, 0) from _pgqueue.lock_run(v_run) t (tid)
                where t.tid is not null;
            end if;
            continue;
        end if;
        v_part := v_run;
        if v_run.message_count > p_left then
            v_part.message_count := p_left;
            v_part.seqs := _pgqueue.below(v_run.seqs, _pgqueue.bound_of(v_run.seqs, v_part.message_count));
        end if;
        o_parts := o_parts || v_part;
        p_left := p_left - v_part.message_count;
        exit when p_left = 0;
    end loop;
end $$;

-- The first ready runs from a place on, as many as are judged at once. Locks nothing.
create or replace function _pgqueue.first_ready(p_consumer_id int, p_from pgqueue.line_place)
returns pgqueue.consumer_messages[]
language plpgsql stable
as $$
begin
    return array(
        select w.m
        from (select m, sum(m.message_count) over (order by m.line_no, m.first_seq) - m.message_count as before
              from (select * from pgqueue.consumer_messages r
                    where r.consumer_id = p_consumer_id and r.state = 'ready' and r.lane = p_from.lane
                      and (r.line_no, r.first_seq) >= (p_from.line_no, p_from.first_seq)
                    order by r.line_no, r.first_seq limit _pgqueue.limit_looked_for()) m) w
        where w.before < _pgqueue.limit_looked_for() order by (w.m).line_no, (w.m).first_seq);
end $$;

-- Claims messages that pass a condition out of parts of ready runs. Where another claimer holds such a run, the claim
-- goes on with the others.
--   p_runs   the runs
--   p_parts  the parts of them that are to be judged
--   p_max    messages at most
--   p_held   messages that the claim has already
-- Returns how many messages it claimed; whether the claim ends there, as serve_ready() does; the messages of the parts
-- in which none passes; and whether it claimed none because another claimer holds those that pass.
-- Locks the runs of the claimed messages.
create or replace function _pgqueue.claim_matching(p_stream_id int, p_runs pgqueue.consumer_messages[],
                                                   p_parts pgqueue.consumer_messages[], p_claim_id bigint,
                                                   p_where jsonpath, p_max bigint, p_held bigint, out o_count bigint,
                                                   out o_ended boolean, out o_failed int8multirange, out o_busy boolean)
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
        v_match := _pgqueue.matching(p_stream_id, array(  -- the runs of one line_no interleave
            select g from unnest(p_parts) p cross join lateral unnest(p.seqs) g where not p.seqs && v_passed
            order by p.line_no, g), null, p_where, v_want);
        v_passed := v_passed + v_match;
        foreach v_run in array p_runs loop
            continue when not v_run.seqs && v_match;
            o_count := o_count + _pgqueue.claim_part(v_run, v_match, p_claim_id, p_held + o_count);
            -- such a run is a claim of its own, or the next claim's
            o_ended := p_held + o_count > 0 and coalesce(v_run.note ? 'at_most', false);
            exit when o_ended;
        end loop;
        -- fewer than wanted: all were judged
        exit when o_ended or o_count >= p_max or _pgqueue.cardinality(v_match) < v_want;
    end loop;
    o_failed := (select coalesce(range_agg(seqs), '{}') from unnest(p_parts) where not seqs && v_passed);
    o_busy := o_count = 0 and v_passed <> '{}';
end $$;

-- Locks the ready run that stands where a run was seen, if there is one and no other session holds it. Returns where it
-- is in the table; null: not locked.
create or replace function _pgqueue.lock_run(p_run pgqueue.consumer_messages) returns tid
language plpgsql
as $$
begin
    return (select m.ctid from pgqueue.consumer_messages m
            where m.consumer_id = p_run.consumer_id and m.state = 'ready' and m.lane = p_run.lane
              and m.line_no = p_run.line_no and m.first_seq = p_run.first_seq
            for update skip locked);  -- lock: run
end $$;

-- Claims those messages of a set that a ready run has now. The others stay ready, at their place. Claims nothing if no
-- ready run stands where the run was seen.
--   p_held  messages that the claim has already: then it gets nothing of a run with at_most
-- Returns how many messages. Locks the run.
create or replace function _pgqueue.claim_part(p_run pgqueue.consumer_messages, p_set int8multirange, p_claim_id bigint,
                                               p_held bigint) returns bigint
language plpgsql
as $$
declare
    v_place   tid := _pgqueue.lock_run(p_run);  -- (in the statement it would be called for each row of the table)
    v_run     pgqueue.consumer_messages;
    v_part    int8multirange;
    v_at_most bigint;
begin
    delete from pgqueue.consumer_messages where ctid = v_place returning * into v_run;
    if not found then
        return 0;
    end if;
    v_part := v_run.seqs * p_set;
    v_at_most := case when p_held > 0 and v_run.note ? 'at_most' then 0 else (v_run.note ->> 'at_most')::bigint end;
    if v_at_most < _pgqueue.cardinality(v_part) then
        v_part := case v_at_most when 0 then '{}' else _pgqueue.below(v_part, _pgqueue.bound_of(v_part, v_at_most)) end;
    end if;
    perform _pgqueue.store_run(v_run, v_run.seqs - v_part);
    return _pgqueue.claim_run(v_run, v_part, p_claim_id);
end $$;
