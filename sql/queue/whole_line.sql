-- Claiming the front of the line whole. A claimer that takes all there is, as Spark does, needs to know no key: while
-- no piece is open it claims the front of the line as one piece with all keys. With ordering=stream every claim is such
-- a piece. For small claims of such a consumer the piece is one slot, with the messages of many claims: each
-- acknowledgement lets the slot go on with those that come next in the line. While the slot is there, nobody else has a
-- piece. So no message waits: what the slot did not deliver, whoever moves what the consumer has puts back into the
-- line.

-- Claims the front of the line, keys mixed, up to the first message that is not visible yet, or that is of a run with
-- at_most (see serve_ready()). No piece is open, except a piece of this claim.
--   p_piece  the piece that the claim has already; null: none
--   p_held   messages that it has already
-- Returns the cursor, how many messages it claimed, and whether the claim ends there.
create or replace function _pgqueue.claim_line(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_claim_id bigint, p_want bigint, p_piece bigint, p_held bigint,
                                               out o_cursor pgqueue.consumer_cursors, out o_count bigint,
                                               out o_ended boolean)
language plpgsql
as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_piece bigint := coalesce(p_piece, p_cursor.last_line_no + 1);
    v_from  pgqueue.line_place;
    v_next  record;
    v_count bigint;
    v_later bigint;  -- the first message of the line_no that is not visible yet, or may not come with others
    v_below bigint;
    v_claimed record;
    v_expired bigint := 0;
begin
    o_cursor := p_cursor;
    o_count := 0;
    o_ended := false;
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = 1;
    while o_count < p_want and v_from.lane is not null and not o_ended loop
        v_next := _pgqueue.next_ready(p_consumer.consumer_id, v_from);
        exit when v_next.line_no is null;
        v_from.line_no := v_next.line_no;
        v_from.first_seq := v_next.first_seq;
        o_ended := v_next.at_most is not null;
        exit when o_ended and p_held + o_count > 0;
        -- the runs of one line_no interleave: they go by seq
        select sum(message_count),
               min(first_seq) filter (where not_visible_until > v_now
                                            or (note ? 'at_most' and first_seq > v_from.first_seq))
        into v_count, v_later
        from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1 and line_no = v_from.line_no
          and first_seq >= v_from.first_seq;
        exit when v_later = v_from.first_seq;
        v_below := least(_pgqueue.line_bound(p_consumer.consumer_id, v_from.line_no, v_from.first_seq, v_count,
                                             least(v_next.at_most, p_want - o_count)), v_later);
        v_claimed := _pgqueue.claim_below(p_consumer.consumer_id, v_from.line_no, v_from.first_seq, v_below, p_claim_id,
                                          v_piece);
        o_count := o_count + v_claimed.o_count;
        v_expired := v_expired + v_claimed.o_expired;
        exit when v_below = v_later or v_expired >= _pgqueue.limit_looks();
    end loop;
    if o_count > 0 and p_piece is null then
        insert into pgqueue.pieces (consumer_id, place, piece, message_count)
        values (p_consumer.consumer_id, v_piece, v_piece, o_count);
        o_cursor.last_line_no := v_piece;
    end if;
end $$;

-- The bound below which the runs of one line_no, from p_first, have p_room messages; beyond all if they have no more.
create or replace function _pgqueue.line_bound(p_consumer_id int, p_line_no bigint, p_first bigint, p_count bigint,
                                               p_room bigint)
returns bigint
language plpgsql stable
as $$
declare
    v_below bigint := 9223372036854775807;
begin
    if p_count <= p_room then
        return v_below;
    end if;
    -- first with the first runs that suffice; then with all runs that begin below that bound
    select _pgqueue.bound_of(range_agg(seqs), p_room) into v_below
    from (select seqs, sum(message_count) over (order by first_seq) - message_count as before
          from pgqueue.consumer_messages
          where consumer_id = p_consumer_id and state = 'ready' and lane = 1 and line_no = p_line_no
            and first_seq >= p_first) r
    where before < p_room;
    select _pgqueue.bound_of(range_agg(seqs), p_room) into v_below
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and state = 'ready' and lane = 1 and line_no = p_line_no
      and first_seq >= p_first and first_seq < v_below;
    return v_below;
end $$;

-- Claims the messages of one line_no, from p_first on and below a bound, for a piece with all keys. It gives up
-- messages that have expired. Returns how many messages it claimed, and how many it gave up.
create or replace function _pgqueue.claim_below(p_consumer_id int, p_line_no bigint, p_first bigint, p_below bigint,
                                                p_claim_id bigint, p_piece bigint, out o_count bigint,
                                                out o_expired bigint)
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
begin
    o_count := 0;
    o_expired := 0;
    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and state = 'ready' and lane = 1 and line_no = p_line_no
          and first_seq >= p_first and first_seq < p_below
        returning *
    loop
        v_part := _pgqueue.below(v_run.seqs, p_below);
        if v_part <> v_run.seqs then
            perform _pgqueue.store_run(v_run, v_run.seqs - v_part);
        end if;
        if v_run.note is not null and _pgqueue.has_expired(v_run.note) then
            perform _pgqueue.dead_letter(v_run, v_part, 'expired', null);
            o_expired := o_expired + _pgqueue.cardinality(v_part);
            continue;
        end if;
        v_run.piece := p_piece;
        o_count := o_count + _pgqueue.claim_run(v_run, v_part, p_claim_id);
    end loop;
end $$;

-- Cuts the front of the line, keys mixed, as a slot with all keys, for small claims of a consumer with ordering=stream.
-- Messages that were delivered before, that have a note or a delay, or that are too few for two claims stay in the
-- line. No piece is open. Returns the cursor. Needs the consumer's lock.
--   p_size  messages of a claim
create or replace function _pgqueue.cut_line(p_cursor pgqueue.consumer_cursors, p_size bigint)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_slot  bigint;
    v_piece bigint := p_cursor.last_line_no + 1;
    v_from  pgqueue.line_place;
    v_run   pgqueue.consumer_messages;
    v_front int8multirange;
    v_count bigint;
    v_cut   record;
begin
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = 1;
    delete from pgqueue.consumer_messages
    where ctid = (select ctid from pgqueue.consumer_messages
                  where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = 1
                    and (line_no, first_seq) >= (v_from.line_no, v_from.first_seq)
                  order by line_no, first_seq limit 1)
      and deliver_count = 0 and note is null and not_visible_until is null and message_count > p_size
    returning * into v_run;
    if not found then
        return p_cursor;
    end if;
    -- the runs of one line_no interleave: they go by seq
    v_front := _pgqueue.below(v_run.seqs, coalesce((
        select first_seq from pgqueue.consumer_messages
        where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = 1
          and line_no = v_run.line_no and first_seq > v_run.first_seq
        order by first_seq limit 1), upper(v_run.seqs)));
    v_count := _pgqueue.cardinality(v_front);
    if v_count > p_size then  -- the last claim is filled from what comes next in the line
        v_front := _pgqueue.below(v_front, _pgqueue.bound_of(v_front, v_count - v_count % p_size));
    end if;
    v_cut := c from _pgqueue.cut_parts(v_front, p_size) c;
    perform _pgqueue.store_run(v_run, v_run.seqs - v_front + v_cut.later);
    insert into pgqueue.slots (slot, arrival_no, consumer_id, priority, piece, rest, size, whole, message_count, seqs,
                               parts)
    values (nextval('pgqueue.claim_numbers'), v_run.arrival_no, p_cursor.consumer_id, v_run.priority, v_piece,
            v_cut.rest, p_size, true, _pgqueue.cardinality(v_cut.first), v_cut.first, v_cut.parts)
    returning slot into v_slot;
    insert into pgqueue.pieces (consumer_id, place, piece, message_count)
    values (p_cursor.consumer_id, v_piece, v_piece, _pgqueue.cardinality(v_cut.first));
    p_cursor.last_line_no := v_piece;
    p_cursor := _pgqueue.raise_slots(_pgqueue.begin_block_by_key(p_cursor, v_slot));
    p_cursor.slots_size := p_size;
    p_cursor.slots_priority := null;
    p_cursor.slots_more := null;
    return p_cursor;
end $$;
