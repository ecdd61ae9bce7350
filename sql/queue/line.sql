-- Serving claims from the ready runs: by lane, and in a lane by place. Of consumers that go by key the ready runs of
-- lane 0 are pieces. Their line, in lane 1, is dealt first (queue/deal.sql).

-- Serves a claim from the ready runs, and passes over those that other claimers hold. A run whose note has at_most may
-- hold a message that kills its worker. Such a run is a claim of its own, with at most that many messages: a claim that
-- has messages already ends before it. A run that has expired is given up; one claim gives up a bounded number of runs.
--   p_scan_from  of the cursor
--   p_want  messages at most
--   p_size  messages that the whole claim wants: a run that is too large is sliced for it. Null: the consumer goes by
--           key, and such a run ends the claim
--   p_held  messages that the claim has already
-- Returns how many messages it got, in how many runs, and whether the claim ends there, at a run with at_most.
-- Locks the runs that it takes, one at a time.
-- (More than 60 lines, for the same reason as claim().)
create or replace function _pgqueue.serve_ready(p_consumer_id int, p_scan_from pgqueue.line_place[], p_claim_id bigint,
                                                p_want bigint, p_size bigint, p_held bigint)
returns pgqueue.served
language plpgsql
as $$
declare
    v_place pgqueue.line_place;
    v_run   record;
    v_alone bigint;  -- messages of a run with at_most that may be claimed now; null: none
    v_fit   bigint;
    v_expired int;  -- runs; null: none
    v_served pgqueue.served;
begin
    v_served.message_count := 0;
    v_served.runs := 0;
    v_served.ended := false;
    <<lanes>>
    foreach v_place in array p_scan_from loop
        exit when p_size is null and v_place.lane > 0;
        while v_served.message_count < p_want loop
            update pgqueue.consumer_messages
            set state = 'claimed', claim_id = p_claim_id, deliver_count = _pgqueue.one_more(deliver_count),
                not_visible_until = null, last_delivered_at = clock_timestamp()
            where ctid = (select ctid from pgqueue.consumer_messages
                          where consumer_id = p_consumer_id and state = 'ready' and lane = v_place.lane
                            and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
                          order by line_no, first_seq limit 1
                          for update skip locked)  -- lock: run
              and message_count <= p_want - v_served.message_count
              and ((note ? 'at_most') is not true or message_count <= v_alone)
            returning message_count, line_no, first_seq, note, ctid into v_run;
            if found then
                if v_run.note is not null then  -- (without a note not even the call is set up)
                    if _pgqueue.has_expired(v_run.note) then
                        perform _pgqueue.give_up_expired(v_run.ctid, 1);
                        v_alone := null;
                        v_expired := coalesce(v_expired, 0) + 1;
                        v_served.runs := v_served.runs + 1;
                        exit when v_expired >= _pgqueue.limit_due();
                        continue;
                    end if;
                end if;
                v_served.message_count := v_served.message_count + v_run.message_count;
                v_served.runs := v_served.runs + 1;
                exit when v_served.message_count = p_want;  -- then no caller asks whether the claim ended
                v_served.ended := v_alone is not null;
                exit when v_served.ended;
                v_place.line_no := v_run.line_no;
                v_place.first_seq := v_run.first_seq + 1;
                continue;
            end if;
            -- there is no such run, or it is too large, or it has at_most
            exit lanes when p_size is null and v_served.message_count > 0;
            select ctid, message_count, note, (note ->> 'at_most')::bigint as at_most into v_run
            from pgqueue.consumer_messages
            where consumer_id = p_consumer_id and state = 'ready' and lane = v_place.lane
              and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
            order by line_no, first_seq limit 1 for update skip locked;  -- lock: run
            exit when not found;
            if v_run.note is not null and _pgqueue.has_expired(v_run.note) then
                perform _pgqueue.give_up_expired(v_run.ctid, 0);
                v_expired := coalesce(v_expired, 0) + 1;
                v_served.runs := v_served.runs + 1;
                exit when v_expired >= _pgqueue.limit_due();
                continue;
            end if;
            v_served.ended := v_run.at_most is not null and p_held + v_served.message_count > 0;
            v_fit := least(v_run.at_most, p_want - v_served.message_count);
            v_alone := case when v_run.at_most is not null then v_fit end;
            exit lanes when v_served.ended or (p_size is null and v_run.message_count > v_fit);
            if v_run.message_count > v_fit then
                -- then a run that fits stands in the same place
                perform _pgqueue.slice_run(v_run.ctid, v_fit, least(v_run.at_most, p_size));
            end if;
        end loop;
        exit when v_served.message_count >= p_want or v_served.ended;
    end loop;
    return v_served;
end $$;
