-- Serving claims from the ready runs: by lane, and in a lane by place. Of ordered consumers these are pieces, in lane 0; their line, in
-- lane 1, is dealt first (core/keys.sql).

-- Serves a claim from the ready runs, passing over those that other claimers hold.
--   p_want  messages at most
--   p_size  messages that the whole claim wants: a run that is too large is cut for it. Null: of an ordered consumer, where the next piece ends it if it is too large
-- Returns how many messages it got. Locks the runs it takes, one at a time.
create or replace function pgqueue._serve(p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint, p_size bigint) returns bigint
language plpgsql
as $$
declare
    v_place pgqueue.line_place;
    v_run   record;
    v_count bigint := 0;
begin
    foreach v_place in array p_cursor.scan_from loop
        exit when p_size is null and v_place.lane > 0;
        while v_count < p_want loop
            update pgqueue.consumer_messages
            set state = 'claimed', claim_id = p_claim_id, deliver_count = deliver_count + 1, not_visible_until = null,
                last_delivered_at = clock_timestamp()
            where ctid = (select ctid from pgqueue.consumer_messages
                          where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = v_place.lane
                            and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
                          order by line_no, first_seq limit 1
                          for update skip locked)
              and message_count <= p_want - v_count
            returning message_count, line_no, first_seq into v_run;
            if found then
                v_count := v_count + v_run.message_count;
                v_place.line_no := v_run.line_no;
                v_place.first_seq := v_run.first_seq + 1;
                continue;
            end if;
            -- there is none, or it is too big
            exit when p_size is null and v_count > 0;
            select ctid, message_count into v_run from pgqueue.consumer_messages
            where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = v_place.lane
              and (line_no, first_seq) >= (v_place.line_no, v_place.first_seq)
            order by line_no, first_seq limit 1 for update skip locked;
            exit when not found;
            exit when p_size is null and v_run.message_count > p_want;
            if v_run.message_count > p_want - v_count then
                perform pgqueue._cut(v_run.ctid, p_want - v_count, p_size);  -- now the same place holds a run that fits
            end if;
        end loop;
        exit when v_count >= p_want;
    end loop;
    return v_count;
end $$;

-- The common claim, in one statement, all or nothing: no lease has to be looked for, nothing is due or new, and the next run has just
-- this size; or it is a piece, and of that size nearly. It needs no lock of the consumer, since it changes nothing of the cursor.
-- Returns the claim, and how many messages it has; null when it takes more than that (or the consumer does not exist). Locks the run.
create or replace function pgqueue._claim_next_run(p_stream text, p_consumer text, p_want int, p_visibility_timeout interval,
                                                   out o_claim_id bigint, out o_count bigint)
language plpgsql
as $$
begin
    with next as materialized (
        select run.ctid, pgqueue._new_claim_id() as claim_id, c.consumer_id, c.ordering <> 'none' as ordered,
               coalesce(p_visibility_timeout, c.visibility_timeout) as visibility_timeout
        from pgqueue.streams s
        join pgqueue.consumers c on c.stream_id = s.stream_id and c.name = p_consumer
        cross join lateral (select next_publication, gaps, take_was_cut, scan_from[1] as line, due_from, lease_probe from pgqueue.consumer_cursors
                            where consumer_id = c.consumer_id order by version desc limit 1) cursor
        cross join lateral (select ctid from pgqueue.consumer_messages
                            where consumer_id = c.consumer_id and state = 'ready' and lane = (line).lane
                              and (line_no, first_seq) >= ((line).line_no, (line).first_seq)
                            order by line_no, first_seq limit 1
                            for update skip locked) run
        where s.name = p_stream and (c.ordering = 'none' or (c.ordering = 'key' and (line).lane = 0))
          and pgqueue._is_soon(lease_probe)
          and (take_was_cut or c.ordering = 'key' or (gaps = '{}' and not exists (
                select from pgqueue.publications
                where stream_id = c.stream_id and publication_id >= next_publication and publication_id < next_publication + pgqueue._limit_unseen())))
          and ((select not_visible_until from pgqueue.consumer_messages
                where consumer_id = c.consumer_id and state = 'delayed' and not_visible_until >= due_from
                order by not_visible_until limit 1) <= clock_timestamp()) is not true
    ), claimed as (
        update pgqueue.consumer_messages m
        set state = 'claimed', claim_id = next.claim_id, deliver_count = deliver_count + 1, not_visible_until = null,
            last_delivered_at = clock_timestamp()
        from next
        where m.ctid = next.ctid and m.message_count <= p_want and case when next.ordered then 2 * m.message_count > p_want else m.message_count = p_want end
        returning next.*, m.message_count
    )
    insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout, message_count, remaining)
    select claim_id, consumer_id, ordered, clock_timestamp(), clock_timestamp() + visibility_timeout, visibility_timeout, message_count, message_count
    from claimed
    returning claim_id, message_count into o_claim_id, o_count;
end $$;
