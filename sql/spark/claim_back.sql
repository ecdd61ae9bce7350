-- Giving a checkpoint reader back the messages of a claim that it lost, as far as they are free.

-- Gives a checkpoint reader back the ready messages of a claim that it lost. Needs the claim's lock and the
-- consumer's. Messages that another claimer holds, or has returned with a delay, stay where they are, and so do
-- messages of an ordered consumer that wait for them. Returns the cursor.
-- (More than 60 lines: one statement takes the runs from two places of the line.)
create or replace function _pgqueue.claim_back(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_piece bigint;
    v_lanes int[] := p_claim.lanes;
    v_ends  pgqueue.line_place;  -- nothing of the line from this place on
    v_run   pgqueue.consumer_messages;
    v_part  int8multirange;
    v_count bigint := 0;
begin
    p_claim.seqs := p_claim.seqs - _pgqueue.acted_seqs(p_claim);  -- what its query returned is for others, too
    if p_claim.ordered then
        v_ends := _pgqueue.line_is_free(p_consumer, p_cursor, p_claim);
        if v_ends is not null then
            v_piece := p_cursor.last_line_no + 1;  -- a piece with all keys, as it was
            v_lanes := '{1}';
        else
            p_cursor := _pgqueue.deal_places(p_consumer, p_cursor, p_claim);
            v_lanes := '{}';
        end if;
    end if;
    for v_run in
        delete from pgqueue.consumer_messages
        where ctid = any (array(
            select m.ctid
            from unnest(v_lanes) l
            cross join unnest(p_claim.arrival_nos) a
            cross join lateral (select ctid from pgqueue.consumer_messages
                                where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = l
                                  and line_no >= lower(a) and line_no < upper(a)
                                  and first_seq >= lower(p_claim.seqs) and first_seq < upper(p_claim.seqs)
                                  and seqs && p_claim.seqs
                                  and (v_ends is null or (line_no, first_seq) < (v_ends.line_no, v_ends.first_seq))
                                for update skip locked) m  -- lock: run
            union all
            select m.ctid
            from unnest(p_cursor.scan_from) f
            cross join lateral (select ctid from pgqueue.consumer_messages
                                where p_claim.ordered and v_piece is null and consumer_id = p_consumer.consumer_id
                                  and state = 'ready' and lane = 0
                                  and (line_no, first_seq) >= (f.line_no, f.first_seq) and seqs <@ p_claim.seqs
                                for update skip locked) m  -- lock: run
            where f.lane = 0))
        returning *
    loop
        v_part := v_run.seqs * p_claim.seqs;
        perform _pgqueue.store_run(v_run, v_run.seqs - v_part);
        v_run.piece := coalesce(v_piece, v_run.piece);
        v_count := v_count + _pgqueue.claim_run(v_run, v_part, p_claim.claim_id);
    end loop;
    if v_count > 0 then
        update pgqueue.claims
        set live = true, remaining = v_count, settled = least(settled, message_count - v_count),
            lease_until = clock_timestamp() + visibility_timeout
        where claim_id = p_claim.claim_id;
        if v_piece is not null then
            insert into pgqueue.pieces (consumer_id, place, piece, message_count)
            values (p_consumer.consumer_id, v_piece, v_piece, v_count);
            p_cursor.last_line_no := v_piece;
        end if;
    end if;
    return p_cursor;
end $$;

-- Up to which place a lost claim of an ordered consumer may have back the line, whole: no other claim holds a key, and
-- no message before that place is delayed. Null: the claim may not have the line back; with ordering=key its messages
-- are dealt then.
create or replace function _pgqueue.line_is_free(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 p_claim pgqueue.claims)
returns pgqueue.line_place
language plpgsql stable
as $$
declare
    v_later pgqueue.line_place;
begin
    if exists (select from pgqueue.pieces p
               where p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from
                 and (p.keys is not null
                      or exists (select from pgqueue.consumer_messages
                                 where consumer_id = p.consumer_id and piece = p.piece))) then
        return null;
    elsif _pgqueue.has_blocked_key(p_cursor) then
        return null;
    end if;
    select 1, m.line_no, m.first_seq into v_later
    from unnest(p_claim.arrival_nos) a
    cross join lateral (select line_no, first_seq, not_visible_until from pgqueue.consumer_messages
                        where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1
                          and line_no >= lower(a) and line_no < upper(a)) m
    where m.not_visible_until > clock_timestamp()
    order by m.line_no, m.first_seq limit 1;
    if not found then
        return (1, upper(p_claim.arrival_nos), 0)::pgqueue.line_place;
    end if;
    return case when p_consumer.ordering = 'stream' then v_later end;
end $$;

-- Deals, as much as one claim looks at, while messages stand in the line where those of a lost claim had their places.
-- So pieces tell which of them are free. Returns the cursor.
create or replace function _pgqueue.deal_places(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_deal   record;
    v_looked bigint := 0;
begin
    while p_consumer.ordering = 'key' and v_looked < _pgqueue.limit_looks() loop
        v_deal := _pgqueue.deal(p_consumer, p_cursor, null, _pgqueue.limit_piece_by_key(), 0, false);
        p_cursor := v_deal.o_cursor;
        v_looked := v_looked + v_deal.o_looked;
        exit when v_deal.o_looked = 0 or not exists (
            select from unnest(p_cursor.scan_from) f cross join lateral _pgqueue.next_ready(p_consumer.consumer_id, f) m
            where f.lane = 1 and m.line_no < upper(p_claim.arrival_nos));
    end loop;
    return p_cursor;
end $$;
