-- Dealing: a claim by key is served from the pieces that are ready (queue/pieces.sql). Where these do not suffice, the
-- claim deals: it makes pieces of the messages that waited for keys that are free now, and of the front of the line.

-- Serves a claim of a consumer that goes by key: from the pieces that are ready, then from those that it deals. The
-- claim looks at a bounded number of messages. If all of these have to wait, it claims nothing; they are set aside, so
-- the next claim looks at later ones. Needs the consumer's lock.
--   p_want  messages at most
--   p_held  messages that the claim has already
--   p_cuts  where no piece is ready, let the claim have a slot: then it is served nothing, and the cursor's slots_until
--           is set
-- Returns the cursor, how many messages the claim got, and whether the claim ends there, as serve_ready() does.
create or replace function _pgqueue.serve_ordered(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  p_claim_id bigint, p_want bigint, p_held bigint, p_cuts boolean,
                                                  out o_cursor pgqueue.consumer_cursors, out o_count bigint,
                                                  out o_ended boolean)
language plpgsql
as $$
declare
    v_deal   record;
    v_broken record;
    v_served pgqueue.served;
    v_looked bigint := 0;
    v_since  timestamptz;
    v_slots  boolean;
begin
    o_cursor := p_cursor;
    o_count := 0;
    o_ended := false;
    while o_count < p_want loop
        if p_consumer.ordering <> 'stream' then
            v_since := clock_timestamp();
            v_served := _pgqueue.serve_ready(o_cursor.consumer_id, o_cursor.scan_from, p_claim_id, p_want - o_count,
                                             null, p_held + o_count);
            o_count := o_count + v_served.message_count;
            if o_count = 0 and not v_served.ended and (o_cursor.scan_from[1]).lane = 0 then
                v_broken := _pgqueue.break_up(p_consumer, o_cursor, p_want);
                o_cursor := v_broken.p_cursor;
                if v_broken.o_broken then
                    v_served := _pgqueue.serve_ready(o_cursor.consumer_id, o_cursor.scan_from, p_claim_id, p_want, null,
                                                     p_held);
                    o_count := v_served.message_count;
                end if;
            end if;
            o_ended := v_served.ended;
            if v_served.message_count > 0 and p_consumer.per_key_interval is not null then
                o_cursor := _pgqueue.spend_tokens(p_consumer, o_cursor, p_claim_id, v_since);
            end if;
        end if;
        -- no deal if the claim has more than half of the messages that it wants: pieces would have the size of the
        -- small rest; and none if a piece is ready: it was too large for the rest
        exit when o_ended or 2 * o_count > p_want or v_looked >= _pgqueue.limit_looks()
            or (o_count > 0 and p_consumer.ordering <> 'stream' and _pgqueue.has_ready_piece(o_cursor));
        p_cuts := p_cuts and o_count = 0;
        v_slots := p_cuts and _pgqueue.has_slot(o_cursor);
        if not v_slots or _pgqueue.may_have_freed(o_cursor) then
            -- beside slots only messages of keys that are free: some of these may have waited for long
            v_deal := _pgqueue.deal(p_consumer, o_cursor, case when not v_slots then p_claim_id end, p_want - o_count,
                                    p_held + o_count, p_cuts, v_slots);
            o_cursor := v_deal.o_cursor;
            o_count := o_count + v_deal.o_claimed;
            v_looked := v_looked + v_deal.o_looked;
            o_ended := v_deal.o_ended;
        end if;
        if p_cuts and o_count = 0 and not o_ended and _pgqueue.has_slot(o_cursor) then
            o_cursor.slots_until := least(o_cursor.lease_probe, _pgqueue.next_delayed(o_cursor));
            exit;
        end if;
        exit when v_deal.o_looked = 0 or v_deal.o_claimed > 0;
    end loop;
    o_cursor := _pgqueue.raise_scan_from(o_cursor);
end $$;

-- Deals: makes pieces of the messages that waited for keys that are free now; and of the front of the line, but only if
-- fewer than limit_stock() keys became free, or if the consumer limits keys. If no piece is open and nothing waits, a
-- large claim, or a claim with ordering=stream, gets the front of the line whole instead, or a slot of it
-- (queue/whole_line.sql). Needs the consumer's lock.
--   p_claim_id  the claim that may have the line whole; null: none
--   p_want      messages that the claim wants
--   p_held      messages that it has already
--   p_cuts      make slots of messages that were never delivered
--   p_waiting   nothing of the front of the line
-- Returns the cursor, how many messages it looked at, how many it claimed, and whether the claim ends there, as
-- serve_ready() does.
-- (More than 60 lines: whether the line is claimed whole, and what is dealt, follow from the same look at the pieces.)
create or replace function _pgqueue.deal(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                         p_claim_id bigint, p_want bigint, p_held bigint, p_cuts boolean,
                                         p_waiting boolean default false,
                                         out o_cursor pgqueue.consumer_cursors, out o_looked bigint,
                                         out o_claimed bigint, out o_ended boolean)
language plpgsql
as $$
declare
    v_closed record := _pgqueue.close_pieces(p_consumer, p_cursor);
    -- messages of a piece: p_want divided by v_parts, the least number of pieces that are small enough
    v_parts  bigint := (p_want - 1) / _pgqueue.largest_piece(p_consumer) + 1;
    v_size   bigint := (p_want - 1) / v_parts + 1;
    v_now    timestamptz := clock_timestamp();
    v_keyed  pgqueue.keyed_messages;
    v_heads  pgqueue.keyed_messages;  -- of each free key, the messages that waited first
    v_runs   pgqueue.consumer_messages[] := '{}';  -- of the front of the line
    v_line   record;
begin
    o_cursor := v_closed.o_cursor;
    o_looked := 0;
    o_claimed := 0;
    o_ended := false;
    if v_closed.o_whole is not null then
        -- While a piece with all keys is open, no key becomes free: o_freed is empty. Such a piece is opened only when
        -- no piece with keys is open and no key is blocked (has_blocked_key(); with ordering=stream no message ever
        -- waits). So no message waits then. Until the piece is closed nobody deals, and messages of it that fail go
        -- back to the line.
        if not exists (select from pgqueue.consumer_messages
                       where claim_id = p_claim_id and piece = v_closed.o_whole) then
            if p_consumer.ordering = 'key' and o_cursor.dealt_until < clock_timestamp() + interval '5 s' then
                o_cursor.dealt_until := clock_timestamp() + interval '10 s';
            end if;
            return;
        end if;
    elsif v_closed.o_freed <> '{}' then
        v_heads := _pgqueue.waiting_heads(p_consumer.consumer_id, v_closed.o_freed,
                                          case when p_cuts and p_consumer.ordering <> 'none'
                                               then v_size * _pgqueue.limit_parts() else v_size end);
    end if;

    if v_heads.keys is null and p_claim_id is not null
       and (v_closed.o_whole is not null
            or (v_closed.o_count = 0
                and (p_consumer.ordering = 'stream'
                     or (p_want >= _pgqueue.limit_whole() and not _pgqueue.limits_keys(p_consumer)
                         and o_cursor.dealt_until < clock_timestamp()
                         and not _pgqueue.has_blocked_key(o_cursor))))) then
        if p_cuts and p_consumer.ordering = 'stream' then
            o_cursor := _pgqueue.cut_line(o_cursor, p_want);
            if _pgqueue.has_slot(o_cursor) then
                return;
            end if;
        end if;
        v_line := _pgqueue.claim_line(p_consumer, o_cursor, p_claim_id, p_want, v_closed.o_whole, p_held);
        o_cursor := v_line.o_cursor;
        o_claimed := v_line.o_count;
        o_ended := v_line.o_ended;
        o_looked := o_claimed;
    end if;
    if o_claimed > 0 or o_ended or p_consumer.ordering = 'stream' or v_closed.o_whole is not null then
        return;
    end if;

    if not p_waiting
       and (_pgqueue.limits_keys(p_consumer) or coalesce(cardinality(v_heads.keys), 0) < _pgqueue.limit_stock()) then
        v_runs := _pgqueue.line_front(
            p_consumer, o_cursor,
            case when p_consumer.fair then _pgqueue.limit_looks()
                 -- (few keys are few slots: each goes on)
                 else least(v_size * _pgqueue.limit_pieces()
                            * case when not p_cuts then 1
                                   when cardinality(v_closed.o_freed) between 1 and _pgqueue.limit_stock() then 4
                                   else 2 end,
                            _pgqueue.limit_deal()) end);
    end if;
    o_looked := coalesce((select sum(c) from unnest(v_heads.message_counts) c), 0)
        + coalesce((select sum(message_count) from unnest(v_runs)), 0);
    if o_looked > 0 and p_consumer.ordering = 'none' then
        o_cursor := _pgqueue.deal_singly(p_consumer, o_cursor, v_heads, v_runs, v_size, p_cuts => p_cuts);
    elsif o_looked > 0 then
        v_keyed := case when v_runs = '{}' then v_heads
                        else _pgqueue.after(v_heads, _pgqueue.by_key(p_consumer, v_runs)) end;
        if _pgqueue.limits_keys(p_consumer) then
            v_keyed := _pgqueue.within_limits(p_consumer, o_cursor, v_keyed, v_size, v_now);
        end if;
        o_cursor := _pgqueue.store_pieces(p_consumer, o_cursor, v_keyed, v_size, null, v_now, p_cuts);
    end if;
end $$;

-- Takes the messages that waited first of some keys, and deletes them where they wait: of each key at most about p_size
-- messages with the same priority, deliver_count, note and time. Returns them; null if there are none.
create or replace function _pgqueue.waiting_heads(p_consumer_id int, p_freed pgqueue.waiting_place[], p_size bigint)
returns pgqueue.keyed_messages
language plpgsql
as $$
declare
    v_keyed pgqueue.keyed_messages;
    v_tids  tid[];
begin
    with run as materialized (
        select m.*
        from unnest(p_freed) k
        cross join lateral (select ctid as tid, w as run, * from pgqueue.consumer_messages w
                            where consumer_id = p_consumer_id and state = 'waiting' and key = k.key
                              and (arrival_no, first_seq) >= (k.arrival_no, k.first_seq)
                            order by arrival_no, first_seq limit p_size) m
    ), judged as (
        select *, sum(message_count) over line - message_count as before,
               count(*) over line > 1 and (lag(upper(seqs)) over line > first_seq
                                           or (priority, deliver_count, note, not_visible_until)
                                              is distinct from lag((priority, deliver_count, note, not_visible_until))
                                                               over line) as other
        from run
        window line as (partition by key order by arrival_no, first_seq)
    ), alike as (
        select *, bool_or(other) over (partition by key order by arrival_no, first_seq) as later from judged
    ), head as (
        select key, array_agg(tid) as tids, min(arrival_no) as arrival_no, min(first_seq) as first_seq,
               sum(message_count)::bigint as message_count,
               range_agg(seqs) as seqs, (array_agg(run order by arrival_no, first_seq))[1] as run
        from alike where before < p_size and not later
        group by key
    ), numbered as (
        select *, row_number() over (order by arrival_no, first_seq) as i from head
    )
    select array_agg(run order by i), array_agg(i order by i), array_agg(key order by i), array_agg(seqs order by i),
           array_agg(message_count order by i),
           (select array_agg(t) from head cross join unnest(tids) t)
    into v_keyed.runs, v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts, v_tids
    from numbered;
    delete from pgqueue.consumer_messages where ctid = any (v_tids);
    return v_keyed;
end $$;

-- Takes the first messages of the line, about p_room of them, and deletes them there. Returns their runs.
create or replace function _pgqueue.line_front(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_room bigint)
returns pgqueue.consumer_messages[]
language plpgsql
as $$
declare
    v_from  pgqueue.line_place;
    v_last  bigint;  -- runs up to this line_no are taken,
    v_below bigint;  -- and of these only messages below this seq; null: all. Set when the first line_no alone fills
                     -- the room: its runs interleave, so they are cut by seq
    v_run   pgqueue.consumer_messages;
    v_rest  int8multirange;
    v_runs  pgqueue.consumer_messages[] := '{}';
begin
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = 1;
    if v_from.lane is null then
        return v_runs;
    end if;
    with run as materialized (
        select line_no, first_seq, seqs, sum(message_count) over line as upto, lead(first_seq) over line as next
        from (select * from pgqueue.consumer_messages
              where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1
                and (line_no, first_seq) >= (v_from.line_no, v_from.first_seq)
              order by line_no, first_seq limit p_room + 1) m
        window line as (order by line_no, first_seq)
    ), full_at as materialized (
        select line_no, first_seq, next from run where upto >= p_room order by line_no, first_seq limit 1
    )
    select coalesce(max(r.line_no) filter (where r.line_no < f.line_no or f.line_no is null), min(r.line_no)),
           case when min(r.line_no) = min(f.line_no)
                then least(_pgqueue.bound_of(
                               range_agg(r.seqs) filter (where r.line_no = f.line_no and r.first_seq <= f.first_seq),
                               p_room),
                           (select min(n.first_seq) from run n
                            where n.line_no = min(f.line_no) and n.first_seq > min(f.first_seq))) end
    into v_last, v_below
    from run r left join full_at f on true;
    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1
          and (line_no, first_seq) >= (v_from.line_no, v_from.first_seq)
          and line_no <= v_last and (v_below is null or first_seq < v_below)
        returning *
    loop
        if upper(v_run.seqs) > v_below then
            v_rest := v_run.seqs - int8multirange(int8range(null, v_below));
            perform _pgqueue.store_run(v_run, v_rest);
            v_run.seqs := v_run.seqs - v_rest;
            v_run.message_count := _pgqueue.cardinality(v_run.seqs);
        end if;
        v_runs := v_runs || v_run;
    end loop;
    return v_runs;
end $$;
