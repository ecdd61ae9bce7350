-- Serving claims from the ready runs: by lane, and in a lane by place. Of ordered consumers these are pieces, in lane 0; their line, in
-- lane 1, is dealt first (core/keys.sql).

-- Serves a claim from the ready runs, passing over those that other claimers hold. A run whose note has at_most, because it may hold a message that
-- kills its worker, is a claim of its own, and of no more messages: what ended before it ends there. A run that has expired is given up, a bounded
-- number of them.
--   p_scan_from  of the cursor
--   p_want  messages at most
--   p_size  messages that the whole claim wants: a run that is too large is cut for it. Null: of an ordered consumer; there it ends the claim
--   p_held  messages that the claim has already
-- Returns how many messages it got, and in how many runs; and whether the claim ends there, at such a run. Locks the runs it takes, one at a time.
-- (Longer than 60 lines, for the same reason as _claim.)
create or replace function pgqueue._serve_ready(p_consumer_id int, p_scan_from pgqueue.line_place[], p_claim_id bigint, p_want bigint, p_size bigint,
                                                p_held bigint) returns pgqueue.served
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
    foreach v_place in array p_scan_from loop
        exit when p_size is null and v_place.lane > 0;
        while v_served.message_count < p_want loop
            update pgqueue.consumer_messages
            set state = 'claimed', claim_id = p_claim_id, deliver_count = deliver_count + 1, not_visible_until = null,
                last_delivered_at = clock_timestamp()
            where ctid = (select ctid from pgqueue.consumer_messages
                          where consumer_id = p_consumer_id and state = 'ready' and lane = v_place.lane
                            and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
                          order by line_no, first_seq limit 1
                          for update skip locked)
              and message_count <= p_want - v_served.message_count and ((note ? 'at_most') is not true or message_count <= v_alone)
            returning message_count, line_no, first_seq, note, ctid into v_run;
            if found then
                if v_run.note is not null then  -- (who has no notes does not even set up the call)
                    if pgqueue._has_expired(v_run.note) then
                        perform pgqueue._give_up_expired(v_run.ctid, 1);
                        v_alone := null;
                        v_expired := coalesce(v_expired, 0) + 1;
                        v_served.runs := v_served.runs + 1;
                        exit when v_expired >= pgqueue._limit_due();
                        continue;
                    end if;
                end if;
                v_served.message_count := v_served.message_count + v_run.message_count;
                v_served.runs := v_served.runs + 1;
                exit when v_served.message_count = p_want;  -- then nobody asks whether it ended
                v_served.ended := v_alone is not null;
                exit when v_served.ended;
                v_place.line_no := v_run.line_no;
                v_place.first_seq := v_run.first_seq + 1;
                continue;
            end if;
            -- there is none, or it is too big, or it has at_most
            exit when p_size is null and v_served.message_count > 0;
            select ctid, message_count, note, (note ->> 'at_most')::bigint as at_most into v_run from pgqueue.consumer_messages
            where consumer_id = p_consumer_id and state = 'ready' and lane = v_place.lane
              and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
            order by line_no, first_seq limit 1 for update skip locked;
            exit when not found;
            if v_run.note is not null and pgqueue._has_expired(v_run.note) then
                perform pgqueue._give_up_expired(v_run.ctid, 0);
                v_expired := coalesce(v_expired, 0) + 1;
                v_served.runs := v_served.runs + 1;
                exit when v_expired >= pgqueue._limit_due();
                continue;
            end if;
            v_served.ended := v_run.at_most is not null and p_held + v_served.message_count > 0;
            v_fit := least(v_run.at_most, p_want - v_served.message_count);
            v_alone := case when v_run.at_most is not null then v_fit end;
            exit when v_served.ended or (p_size is null and v_run.message_count > v_fit);
            if v_run.message_count > v_fit then
                perform pgqueue._cut(v_run.ctid, v_fit, least(v_run.at_most, p_size));  -- now the same place holds a run that fits
            end if;
        end loop;
        exit when v_served.message_count >= p_want or v_served.ended;
    end loop;
    return v_served;
end $$;

-- Where the line of a consumer with ageing is served: its lanes in the order in which they are to be served now. First comes the lane whose first ready
-- message was sent first, if each priority counts as p_consumer.ageing: so what waits long enough is served, whatever is more urgent. Without ageing
-- the lanes stay in their order.
create or replace function pgqueue._by_age(p_consumer pgqueue.consumers, p_scan_from pgqueue.line_place[]) returns pgqueue.line_place[]
language plpgsql
as $$
declare
    v_scan_from pgqueue.line_place[] := p_scan_from;
begin
    if p_consumer.ageing is not null and cardinality(p_scan_from) > 1 then
        execute format('select array_agg(f order by coalesce(m.inserted_at, ''-infinity'') + f.lane * $3, f.lane) '
                       'from unnest($1) f cross join lateral pgqueue._next_ready($2, f) r left join pgqueue.messages_%s m on m.seq = r.first_seq', p_consumer.stream_id)
        into v_scan_from using p_scan_from, p_consumer.consumer_id, p_consumer.ageing;
    end if;
    return v_scan_from;
end $$;
