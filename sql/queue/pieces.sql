-- Pieces: the order by key. A message is not delivered while an earlier message of its key is unsettled elsewhere.
--
-- The messages that a consumer takes stand in its line (lane 1), keys mixed. The dealer, which is the claim that has
-- the consumer's lock, deals from the front of the line (queue/deal.sql): it cuts pieces of the size of a claim that
-- have no key in common, and puts them into lane 0. A piece is a run: claims take pieces, and settle them, without a
-- lock of the consumer, like the runs of a consumer with ordering=none. The table pieces has the keys of each piece,
-- until the dealer finds that the piece is gone.
--
-- For a small claim of a consumer that is simple, the dealer makes slots (queue/slots.sql) of pieces that were never
-- delivered. Where each slot has one key, all that are dealt at once are one piece: it has a row for each key. A slot
-- of a frequent key has all that was dealt of it, so many messages at a time: their acknowledgement lets the slot go on
-- with the next ones. Nothing else does. Whoever makes a claim of the usual kind of a claimed slot, to let its messages
-- go back, has the consumer's lock, and what comes next becomes a run that waits (base/slots.sql: runs_of_slot()). So
-- all else sees pieces and waiting messages as if there were no slots.
--
-- A message whose key is in an open piece is set aside. It waits until a dealer finds that the key has left that piece.
-- A message that is not visible yet is delayed, in no piece, and its key waits for it. When it is due, the key is free,
-- as if a piece had ended. So the messages of a key are, in this order: in a piece or delayed, waiting, in the line.
--
-- A claimer that takes all there is, as Spark does, needs to know no key (queue/whole_line.sql).

-- Whether only the ready messages of a consumer count as being in pieces, and not those that are claimed.
create or replace function _pgqueue.counts_ready(p_consumer pgqueue.consumers) returns boolean
language sql immutable
as $$ select p_consumer.ordering = 'none' and p_consumer.per_key_limit is null $$;

-- The most messages of a piece. By key a large one would hold up many keys.
create or replace function _pgqueue.largest_piece(p_consumer pgqueue.consumers) returns int
language sql immutable
as $$
    select case p_consumer.ordering when 'key' then _pgqueue.limit_piece_by_key()
                                    else _pgqueue.limit_slice_size() end
$$;

-- Whether a piece is ready.
create or replace function _pgqueue.has_ready_piece(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from unnest(p_cursor.scan_from) f
                   cross join lateral _pgqueue.next_ready(p_cursor.consumer_id, f) m
                   where f.lane = 0 and m.run_ctid is not null);
end $$;

-- Whether a key may have become free. Not so where each open piece still has a slot for each of its keys.
create or replace function _pgqueue.may_have_freed(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql stable
as $$
begin
    return p_cursor.freed_from is not null
        or exists (select from pgqueue.pieces p
                   where consumer_id = p_cursor.consumer_id and place >= p_cursor.pieces_from
                     and not (singly and cardinality(keys) = (
                         select count(key) from pgqueue.slots s
                         where s.consumer_id = p.consumer_id and s.piece = p.piece)));
end $$;

-- Whether messages of a key may wait although no piece is open: the key is noted as free and no dealer has dealt its
-- messages yet, its tokens are spent, or its first message is delayed.
create or replace function _pgqueue.has_blocked_key(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql stable
as $$
begin
    return p_cursor.freed_from is not null or p_cursor.tokens_from is not null or _pgqueue.has_delayed_key(p_cursor);
end $$;

-- Whether messages of a key wait for a message of it that is delayed.
create or replace function _pgqueue.has_delayed_key(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from pgqueue.consumer_messages
                   where consumer_id = p_cursor.consumer_id and state = 'delayed'
                     and not_visible_until >= p_cursor.due_from and key is not null);
end $$;

-- Closes the pieces that are gone: deletes their rows. Of each other piece it deletes the keys of which the piece has
-- no message any more. It also deletes the rows of freed_keys. All keys of these three kinds are free: the caller has
-- to deal the messages that wait for them, because no later dealer can know of these keys. (One call closes pieces with
-- a bounded number of keys; the next call goes on. With ordering=none it may also return the keys of pieces that it
-- finds claimed, and notes that in the piece.) Returns the cursor; how many pieces are open; of these the piece with
-- all keys, if there is one; and the keys that are free, each with the place from which messages of it may wait. Needs
-- the consumer's lock. (More than 60 lines: one statement looks at the pieces and the freed keys, so that they share
-- one bound.)
create or replace function _pgqueue.close_pieces(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 out o_cursor pgqueue.consumer_cursors, out o_count int,
                                                 out o_whole bigint, out o_freed pgqueue.waiting_place[])
language plpgsql
as $$
declare
    v_piece  pgqueue.pieces;
    v_shrunk bigint[];
    v_ready  boolean := _pgqueue.counts_ready(p_consumer);
    v_notes  boolean := p_consumer.ordering = 'none' and (p_consumer.fair or p_consumer.per_key_interval is not null);
    v_waits  boolean := p_consumer.ordering <> 'none' or p_cursor.waits;
    v_twice  boolean;  -- a key may be free for several reasons
begin
    o_cursor := p_cursor;
    with piece as materialized (
        select p.ctid as tid, p.place, p.piece, p.message_count, p.keys, l.held,
               l.ready = 0 and l.held > 0 and not p.claimed and v_notes as note,
               p.singly and l.slots as in_slots,
               case when p.singly and l.slots and cardinality(array_remove(l.keys, null)) < cardinality(p.keys)
                    then array_remove(l.keys, null) end as left_keys
        from pgqueue.pieces p
        cross join lateral (select coalesce(sum(m.message_count) filter (where m.state = 'ready' or not v_ready), 0)
                                   as held,
                                   count(*) filter (where m.state = 'ready') as ready, bool_and(m.slot) as slots,
                                   array_agg(m.key) as keys
                            from (select state, message_count, false as slot, null::bigint as key
                                  from pgqueue.consumer_messages
                                  where consumer_id = p.consumer_id and piece = p.piece
                                  union all
                                  select case when token is null then 'ready' else 'claimed' end, message_count, true,
                                         key
                                  from pgqueue.slots
                                  where consumer_id = p.consumer_id and piece = p.piece) m) l
        where p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from
    ), free as materialized (
        -- no more keys at once than one claim may look at: the next deal goes on with the others
        select *, (sum(cardinality(keys)) over (order by place, noted, tid) - cardinality(keys)
                   < _pgqueue.limit_looks()) is not false as close
        from (select false as noted, tid, place, keys from piece where held = 0
              union all
              select true, ctid, place, keys from pgqueue.freed_keys
              where consumer_id = p_consumer.consumer_id and place >= p_cursor.freed_from) f
    ), gone as (
        delete from pgqueue.pieces p where ctid = any (array(select tid from free where close and not noted))
        returning p.piece, p.keys, p.arrival_no, p.first_seq
    ), noted as (
        delete from pgqueue.freed_keys f where ctid = any (array(select tid from free where close and noted))
        returning f.keys, f.arrival_no, f.first_seq
    ), old as (
        update pgqueue.pieces p
        set place = case when p.place < p_cursor.last_line_no - _pgqueue.limit_old() then p_cursor.last_line_no
                         else p.place end,
            claimed = p.claimed or p.piece in (select piece from piece where note),
            keys = coalesce(f.left_keys, p.keys)
        from piece f
        where f.tid = p.ctid
          and p.ctid = any (array(select tid from piece
                                  where place < p_cursor.last_line_no - _pgqueue.limit_old() or note
                                      or left_keys is not null
                                  except select tid from free where close and not noted))
        returning p.place, p.piece, p.arrival_no, p.first_seq
    )
    select count(*), min(piece) filter (where keys is null),
           array_agg(piece) filter (where held > 0 and held < message_count and keys is not null
                                        and in_slots is not true),
           least(min(place) filter (where piece not in (select piece from old)), (select min(place) from old),
                 p_cursor.last_line_no),
           (select min(place) from free where noted and not close),
           coalesce((select array_agg((k, g.arrival_no, g.first_seq)::pgqueue.waiting_place)
                     from (select keys, arrival_no, first_seq from gone
                           union all
                           select keys, arrival_no, first_seq from noted
                           union all
                           select keys, 0, 0 from piece where note
                           union all
                           select array(select unnest(p.keys) except select unnest(p.left_keys)), o.arrival_no,
                                  o.first_seq
                           from piece p join old o using (piece) where p.left_keys is not null) g
                     cross join lateral unnest(g.keys) k
                     where v_waits), '{}'),
           _pgqueue.limits_keys(p_consumer) or exists (select from noted)
    into o_count, o_whole, v_shrunk, o_cursor.pieces_from, o_cursor.freed_from, o_freed, v_twice
    from piece where piece not in (select piece from gone);

    for v_piece in
        select * from pgqueue.pieces
        where consumer_id = p_consumer.consumer_id and place >= o_cursor.pieces_from and piece = any (v_shrunk)
    loop
        o_freed := o_freed || _pgqueue.shrink_piece(p_consumer, v_piece);
    end loop;
    if v_twice then
        o_freed := array(select distinct on (key) f::pgqueue.waiting_place
                         from unnest(o_freed) f order by key, arrival_no, first_seq);
    end if;
end $$;

-- Deletes from a piece the keys of which the piece has no message any more: all keys, if its last messages were just
-- settled. Returns these keys. (A slot that goes on has as many messages as before. So the count of a piece with a row
-- for each key stays: as long as less than that is held, a key may have left.)
create or replace function _pgqueue.shrink_piece(p_consumer pgqueue.consumers, p_piece pgqueue.pieces)
returns pgqueue.waiting_place[]
language plpgsql
as $$
declare
    v_runs  pgqueue.consumer_messages[] := array(
        select m::pgqueue.consumer_messages
        from (select * from pgqueue.consumer_messages
              where consumer_id = p_piece.consumer_id and piece = p_piece.piece
                and (state = 'ready' or not _pgqueue.counts_ready(p_consumer))
              union all
              select r.* from pgqueue.slots s cross join lateral _pgqueue.runs_of_slot(s) r
              where s.consumer_id = p_piece.consumer_id and s.piece = p_piece.piece and not p_piece.singly
                and r.state <> 'waiting' and (s.token is null or not _pgqueue.counts_ready(p_consumer))) m);
    v_left  bigint[] := case p_consumer.ordering
        when 'none' then (_pgqueue.single_messages(p_consumer, v_runs)).o_keys
        else (_pgqueue.by_key(p_consumer, v_runs)).keys || array(
            select key from pgqueue.slots
            where consumer_id = p_piece.consumer_id and piece = p_piece.piece and p_piece.singly) end;
begin
    update pgqueue.pieces
    set message_count = case when singly then message_count
                             else (select coalesce(sum(r.message_count), 0) from unnest(v_runs) r) end,
        keys = case p_consumer.ordering when 'none' then array_remove(v_left, null)
                                        else array(select k from unnest(p_piece.keys) k where k = any (v_left)) end
    where consumer_id = p_piece.consumer_id and place = p_piece.place and piece = p_piece.piece
      and not (singly and keys <@ v_left);
    return array(select (k, p_piece.arrival_no, p_piece.first_seq)::pgqueue.waiting_place
                 from unnest(p_piece.keys) k where p_consumer.ordering = 'none' or (k = any (v_left)) is not true);
end $$;

-- Stores messages as pieces of at most p_size that have no key in common. Messages that are not visible yet are stored
-- as delayed, and messages whose key is in a piece already as waiting. So the first messages of a key are in a piece,
-- as many as fit, and later ones wait. Whether a key is delayed shows in the first message of it that waits.
--   p_keyed    the messages by key, in their order
--   p_line_no  where the pieces stand; null: behind all others
--   p_now      messages that are visible at that time are visible
--   p_cuts     store what was never delivered as slots
-- Returns the cursor.
-- (More than 60 lines: one statement judges and stores, so that everything is counted once.)
create or replace function _pgqueue.store_pieces(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 p_keyed pgqueue.keyed_messages, p_size bigint, p_line_no bigint,
                                                 p_now timestamptz default clock_timestamp(),
                                                 p_cuts boolean default false)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_delayed boolean := _pgqueue.has_delayed_key(p_cursor);
    v_count   bigint;
    v_runs    bigint;  -- pieces that are no slots
    v_due     timestamptz;
    v_first   bigint;  -- the first slot,
    v_middle  bigint;  -- and one of those in the middle
begin
    with source as materialized (
        select ordinality as run_no, arrival_no, priority, deliver_count, note,
               p_cuts and deliver_count = 0 and note is null and (not_visible_until > p_now) is not true as fresh,
               case when not_visible_until > p_now then not_visible_until end as due,
               -- a piece has one arrival_no. While tokens are spent, a message keeps its own: it may come back from the
               -- piece, and is not to stand before the place that is noted with a token of its key
               dense_rank() over (order by priority, deliver_count, note,
                                           case when not_visible_until > p_now then not_visible_until end,
                                           case when p_cursor.tokens_from is not null then arrival_no end) as kind
        from unnest(p_keyed.runs) with ordinality
    ), open_key as (
        select k as key from pgqueue.pieces p cross join lateral unnest(p.keys) k
        where p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from
        union all
        select k from pgqueue.freed_keys f cross join lateral unnest(f.keys) k
        where f.consumer_id = p_consumer.consumer_id and f.place >= p_cursor.freed_from
    ), judged as (
        select r.run_no, r.key, r.seqs, r.message_count, r.i, s.kind, s.arrival_no, s.due, s.fresh,
               s.fresh and (p_size = 1 or (r.key is not null and r.message_count > p_size)) as single,
               r.key is not null and (
                   r.held is true or r.key in (select key from open_key)
                   or row_number() over (partition by r.key order by r.i) > 1
                   or (v_delayed and (select d.state = 'delayed' from pgqueue.consumer_messages d
                                      where d.consumer_id = p_consumer.consumer_id and d.key = r.key
                                      order by d.arrival_no, d.first_seq limit 1) is true)) as waits
        from unnest(p_keyed.run_nos, p_keyed.keys, p_keyed.seqs, p_keyed.message_counts, p_keyed.held) with ordinality
             r (run_no, key, seqs, message_count, held, i)
        join source s using (run_no)
    ), single as materialized (
        select j.i, j.run_no, j.arrival_no, j.key, j.message_count, c.*
        from judged j
        cross join lateral _pgqueue.cut_parts(j.seqs, p_size) c
        where j.single and not j.waits
    ), packed as (
        select *, sum(least(message_count, p_size)::int) over (partition by kind order by i)
                  - least(message_count, p_size) as before
        from judged where not single and not waits
    ), fitted as (
        select *, least(message_count, case when due is null then p_size - before % p_size else p_size end) as room
        from packed
    ), part as materialized (
        select *, case when room < message_count then _pgqueue.below(seqs, _pgqueue.bound_of(seqs, room))
                       else seqs end as part
        from fitted
    ), piece as materialized (
        select p_cursor.last_line_no + 1 + row_number() over (order by min(i)) as piece, min(run_no) as run_no,
               min(arrival_no) as arrival_no, fresh, min(i) as i,
               range_agg(part) as seqs, sum(room)::bigint as message_count, array_remove(array_agg(key), null) as keys
        from part
        where due is null
        group by kind, fresh, before / p_size
    ), laid as (
        insert into pgqueue.slots (slot, arrival_no, consumer_id, priority, piece, key, rest, size,
                                   message_count, seqs, parts)
        select nextval('pgqueue.claim_numbers'), l.arrival_no, p_consumer.consumer_id, l.priority, l.piece, l.key,
               l.rest, p_size, l.message_count, l.seqs, l.parts
        from (select p.i, p.arrival_no, s.priority, least(p.message_count, p_size) as message_count, p.first as seqs,
                     p_cursor.last_line_no + 1 as piece, p.key, p.rest, p.parts
              from single p join source s using (run_no)
              union all
              select p.i, p.arrival_no, s.priority, p.message_count, p.seqs, p.piece, null, null, null
              from piece p join source s using (run_no) where p.fresh
              order by i) l
        returning slot
    ), opened as (
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq, singly)
        select p_consumer.consumer_id, piece, piece, message_count, keys, arrival_no, lower(seqs), false
        from piece
        union all
        select p_consumer.consumer_id, p_cursor.last_line_no + 1, p_cursor.last_line_no + 1,
               sum(least(message_count, p_size)), array_remove(array_agg(key), null), min(arrival_no),
               min(lower(first)), true
        from single having count(*) > 0
    ), dealt as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, piece, note)
        select p_consumer.consumer_id, 'ready', 0, s.priority, s.deliver_count, p.arrival_no,
               coalesce(p_line_no, p.piece), lower(p.seqs), p.message_count, p.seqs, p.piece, s.note
        from piece p join source s using (run_no)
        where not p.fresh
    ), delayed as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, key, not_visible_until, note)
        select p_consumer.consumer_id, 'delayed', 1, s.priority, s.deliver_count, s.arrival_no, s.arrival_no,
               lower(p.part), p.room, p.part, p.key, s.due, s.note
        from part p join source s using (run_no)
        where p.due is not null
    ), set_aside as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, key, not_visible_until, note)
        select p_consumer.consumer_id, 'waiting', 0, s.priority, s.deliver_count, s.arrival_no, s.arrival_no,
               c.first_seq, c.message_count, c.seqs, w.key, s.due, s.note
        from (select run_no, key, seqs from judged where waits
              union all
              select run_no, key, seqs - part from part where room < message_count
              union all
              select run_no, key, later from single where later <> '{}') w
        join source s using (run_no)
        cross join lateral _pgqueue.split_set(w.seqs) c
    )
    select (select count(*) from piece), (select count(*) from piece where not fresh), (select min(due) from part),
           (select min(slot) from laid), (select min(slot) + (count(*) + 1) / 2 from laid)
    into v_count, v_runs, v_due, v_first, v_middle;
    if v_runs > 0 then
        p_cursor := _pgqueue.lower_scan_from(
            p_cursor, array[(0, coalesce(p_line_no, p_cursor.last_line_no + 1), 0)::pgqueue.line_place]);
    end if;
    if v_first is not null then
        p_cursor := _pgqueue.raise_slots(_pgqueue.begin_block_by_key(p_cursor, v_first));
        p_cursor.slots_size := p_size;
        p_cursor.slots_priority := null;
        p_cursor.slots_more := v_middle;
    end if;
    p_cursor.last_line_no := p_cursor.last_line_no + 1 + v_count;
    p_cursor.due_from := least(p_cursor.due_from, v_due);
    return p_cursor;
end $$;

-- Makes smaller pieces, at the same place, of the first ready piece if it is too large for a claim, or larger than its
-- note allows (at_most). Returns the cursor, and whether the piece was too large.
create or replace function _pgqueue.break_up(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                             p_want bigint, out o_broken boolean)
language plpgsql
as $$
declare
    v_from  pgqueue.line_place;
    v_run   pgqueue.consumer_messages;
    v_keyed pgqueue.keyed_messages;
begin
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = 0;
    delete from pgqueue.consumer_messages
    where ctid = (select ctid from pgqueue.consumer_messages
                  where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 0
                    and (line_no, first_seq) >= (v_from.line_no, v_from.first_seq)
                  order by line_no, first_seq limit 1
                  for update skip locked)  -- lock: run
      and message_count > least((note ->> 'at_most')::bigint, p_want)
    returning * into v_run;
    o_broken := v_run.piece is not null;
    if o_broken then
        v_keyed := _pgqueue.by_key(p_consumer, array[v_run]);
        -- keys that left the piece before are free when the next dealer closes it
        update pgqueue.pieces set keys = array(select k from unnest(keys) k where (k = any (v_keyed.keys)) is not true)
        where consumer_id = v_run.consumer_id and place >= p_cursor.pieces_from and piece = v_run.piece;
        p_want := least((v_run.note ->> 'at_most')::bigint, p_want);
        if p_consumer.ordering = 'none' then
            p_cursor := _pgqueue.deal_singly(p_consumer, p_cursor, null, array[v_run], p_want, v_run.line_no);
        else
            p_cursor := _pgqueue.store_pieces(p_consumer, p_cursor, v_keyed, p_want, v_run.line_no);
        end if;
    end if;
end $$;
