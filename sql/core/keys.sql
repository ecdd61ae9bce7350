-- Claiming for ordered consumers: a message is not delivered while an earlier one of its key is unsettled elsewhere.
--
-- What is taken waits in the line (lane 1), keys mixed. Who has the consumer's lock deals from its front: it cuts pieces of the size of a
-- claim that have no key in common, and puts them into lane 0. A piece is a run: claims take pieces, and settle them, as they do the
-- runs of ordering=none, without a lock of the consumer. The table pieces has the keys of each, until the dealer finds that the piece is gone.
--
-- A message whose key is in an open piece is set aside: it is waiting, and stays so until a dealer finds that its key left that piece. One
-- that is not visible yet is delayed, in no piece, and its key waits for it; when it is due, the key is free as if a piece had ended. So the
-- messages of a key are, in this order: in a piece or delayed, waiting, in the line. A key is known by its hash: two with the same one wait for each other.
--
-- One claimer that takes all there is, as Spark does, needs to know no key: while no piece is open it claims the front of the line as one
-- piece with all keys. With ordering=stream every claim is such a piece.

-- The key that orders a message of a consumer, as SQL over a message m.
create or replace function pgqueue._key_of(p_consumer pgqueue.consumers) returns text
language sql immutable
as $$ select case p_consumer.ordering when 'stream' then '0::bigint' else 'hashtextextended(m.key, 0)' end $$;

-- Serves a claim of an ordered consumer: from the pieces that are ready, then from what is dealt for it. It looks at a bounded number of
-- messages: where all of those wait, it claims nothing, and the next claim goes on behind them. Needs the consumer's lock.
--   p_want  messages at most
--   p_held  messages that the claim has already
-- Returns the cursor, how many messages the claim got, and whether it ends there, as _serve_ready does.
create or replace function pgqueue._serve_ordered(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint, p_held bigint,
                                                  out o_cursor pgqueue.consumer_cursors, out o_count bigint, out o_ended boolean)
language plpgsql
as $$
declare
    v_deal   record;
    v_broken record;
    v_served pgqueue.served;
    v_looked bigint := 0;
    v_since  timestamptz;
begin
    o_cursor := p_cursor;
    o_count := 0;
    o_ended := false;
    while o_count < p_want loop
        if p_consumer.ordering <> 'stream' then
            v_since := clock_timestamp();
            v_served := pgqueue._serve_ready(o_cursor.consumer_id, o_cursor.scan_from, p_claim_id, p_want - o_count, null, p_held + o_count);
            o_count := o_count + v_served.message_count;
            if o_count = 0 and not v_served.ended then
                v_broken := pgqueue._break_up(p_consumer, o_cursor, p_want);
                o_cursor := v_broken.p_cursor;
                if v_broken.o_broken then
                    v_served := pgqueue._serve_ready(o_cursor.consumer_id, o_cursor.scan_from, p_claim_id, p_want, null, p_held);
                    o_count := v_served.message_count;
                end if;
            end if;
            o_ended := v_served.ended;
            if v_served.message_count > 0 and p_consumer.per_key_interval is not null then
                o_cursor := pgqueue._set_gates(p_consumer, o_cursor, p_claim_id, v_since);
            end if;
        end if;
        -- what is missing of a claim is not worth pieces of that size, and if pieces are ready the next one did not fit
        exit when o_ended or 2 * o_count > p_want or v_looked >= pgqueue._limit_looks()
            or (o_count > 0 and p_consumer.ordering <> 'stream' and pgqueue._has_ready_piece(o_cursor));
        v_deal := pgqueue._deal(p_consumer, o_cursor, p_claim_id, p_want - o_count, p_held + o_count);
        o_cursor := v_deal.o_cursor;
        o_count := o_count + v_deal.o_claimed;
        v_looked := v_looked + v_deal.o_looked;
        o_ended := v_deal.o_ended;
        exit when v_deal.o_looked = 0 or v_deal.o_claimed > 0;
    end loop;
    o_cursor := pgqueue._raise_scan_from(o_cursor);
end $$;

-- Claims pieces that are ready, as long as nothing is due: that needs no lock of the consumer. What was published meanwhile comes after them.
-- Returns as _claim_quickly. Locks: the pieces.
create or replace function pgqueue._claim_pieces(p_consumer pgqueue.consumers, p_claim_id bigint, p_max int) returns pgqueue.served
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := pgqueue._cursor(p_consumer.consumer_id);
    v_served pgqueue.served;
begin
    v_served.message_count := 0;
    v_served.done := false;
    if pgqueue._is_due(v_cursor.consumer_id, v_cursor.due_from) then
        return v_served;
    elsif (v_cursor.scan_from[1]).lane = 0 and pgqueue._is_soon(v_cursor.lease_probe) then
        v_served := pgqueue._serve_ready(v_cursor.consumer_id, v_cursor.scan_from, p_claim_id, p_max, null, 0);
        v_served.done := v_served.message_count > 0 and random() * pgqueue._limit_behind() >= v_served.runs
            and (v_served.ended or 2 * v_served.message_count > p_max or pgqueue._has_ready_piece(v_cursor));
    elsif v_cursor.scan_from = '{}' and not v_cursor.take_was_cut then
        v_served.done := not exists (select from pgqueue.pieces where consumer_id = p_consumer.consumer_id and place >= v_cursor.pieces_from)
            and pgqueue._is_idle(p_consumer, v_cursor);
    end if;
    return v_served;
end $$;

-- Whether a piece is ready.
create or replace function pgqueue._has_ready_piece(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from unnest(p_cursor.scan_from) f cross join lateral pgqueue._next_ready(p_cursor.consumer_id, f) m
                   where f.lane = 0 and m.run_ctid is not null);
end $$;

-- Deals: makes pieces of what waited for keys that are free now, and of the front of the line. Or claims the front of the line whole.
-- Needs the consumer's lock.
--   p_claim_id  the claim that may have the line whole; null: none
--   p_want      messages that the claim wants
--   p_held      messages that it has already
-- Returns the cursor, how many messages it looked at, how many it claimed, and whether the claim ends there, as _serve_ready does.
create or replace function pgqueue._deal(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint, p_held bigint,
                                         out o_cursor pgqueue.consumer_cursors, out o_looked bigint, out o_claimed bigint, out o_ended boolean)
language plpgsql
as $$
declare
    v_open   record := pgqueue._close_pieces(p_consumer, p_cursor);
    v_parts  bigint := (p_want - 1) / pgqueue._limit_piece_by_key() + 1;
    v_size   bigint := (p_want - 1) / v_parts + 1;  -- of a piece: so that some of them are the claim
    v_keyed  pgqueue.keyed_messages;
    v_heads  pgqueue.keyed_messages;  -- of what waited
    v_line   record;
begin
    o_cursor := v_open.o_cursor;
    o_looked := 0;
    o_claimed := 0;
    o_ended := false;
    if v_open.o_whole is not null then
        if not exists (select from pgqueue.consumer_messages where claim_id = p_claim_id and piece = v_open.o_whole) then
            if p_consumer.ordering = 'key' and o_cursor.dealt_until < clock_timestamp() + interval '5 s' then
                o_cursor.dealt_until := clock_timestamp() + interval '10 s';
            end if;
            return;
        end if;
    elsif v_open.o_freed <> '{}' then
        v_heads := pgqueue._waiting_heads(p_consumer.consumer_id, v_open.o_freed, v_size);
        v_keyed := v_heads;
    end if;

    if v_keyed.keys is null and p_claim_id is not null
       and (v_open.o_whole is not null
            or (v_open.o_count = 0 and (p_consumer.ordering = 'stream'
                                        or (p_want >= pgqueue._limit_whole() and not p_consumer.limits_keys and o_cursor.dealt_until < clock_timestamp()
                                            and not pgqueue._has_delayed_key(o_cursor))))) then
        v_line := pgqueue._claim_line(p_consumer, o_cursor, p_claim_id, p_want, v_open.o_whole, p_held);
        o_cursor := v_line.o_cursor;
        o_claimed := v_line.o_count;
        o_ended := v_line.o_ended;
        o_looked := o_claimed;
    end if;
    if o_claimed > 0 or o_ended or p_consumer.ordering = 'stream' or v_open.o_whole is not null then
        return;
    end if;

    if p_consumer.limits_keys or coalesce(cardinality(v_keyed.keys), 0) < pgqueue._limit_stock() then
        v_keyed := pgqueue._after(v_keyed, pgqueue._line_front(
            p_consumer, o_cursor, case when p_consumer.fair then pgqueue._limit_looks() else least(v_size * pgqueue._limit_pieces(), pgqueue._limit_deal()) end));
    end if;
    if v_keyed.keys is not null then
        o_looked := (select sum(c) from unnest(v_keyed.message_counts) c);
        if p_consumer.limits_keys then
            o_cursor := pgqueue._deal_within_limits(p_consumer, o_cursor, v_keyed, v_heads, v_size);
        else
            o_cursor := pgqueue._store_pieces(p_consumer, o_cursor, v_keyed, v_size, null);
        end if;
    end if;
end $$;

-- Whether a key waits for a message of it that is delayed.
create or replace function pgqueue._has_delayed_key(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from pgqueue.consumer_messages
                   where consumer_id = p_cursor.consumer_id and state = 'delayed' and not_visible_until >= p_cursor.due_from and key is not null);
end $$;

-- Closes the pieces that are gone, and takes the keys out of the others that left them. What it frees has to be dealt now: nobody else will know.
-- Returns the cursor; how many pieces are open; of these the one with all keys, if there is one; and the keys that are free, each with the
-- place from which messages of it may wait. Needs the consumer's lock.
create or replace function pgqueue._close_pieces(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 out o_cursor pgqueue.consumer_cursors, out o_count int, out o_whole bigint, out o_freed pgqueue.waiting_place[])
language plpgsql
as $$
declare
    v_piece  pgqueue.pieces;
    v_shrunk bigint[];
    v_ready  boolean := pgqueue._counts_ready(p_consumer);
    v_notes  boolean := p_consumer.ordering = 'none' and (p_consumer.fair or p_consumer.per_key_interval is not null);
    v_twice  boolean;  -- a key may be free for several reasons
begin
    o_cursor := p_cursor;
    with piece as materialized (
        select p.ctid as tid, p.place, p.piece, p.message_count, p.keys, l.held, l.ready = 0 and l.held > 0 and not p.claimed and v_notes as note,
               -- no more keys at once than may be looked at; a piece that is left is closed by the next deal
               sum(case when l.held = 0 then cardinality(p.keys) end) over (order by p.place, p.piece) - cardinality(p.keys) < pgqueue._limit_looks() as close
        from pgqueue.pieces p
        cross join lateral (select coalesce(sum(m.message_count) filter (where m.state = 'ready' or not v_ready), 0) as held,
                                   count(*) filter (where m.state = 'ready') as ready from pgqueue.consumer_messages m
                            where m.consumer_id = p.consumer_id and m.piece = p.piece) l
        where p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from
    ), gone as (
        delete from pgqueue.pieces p where ctid = any (array(select tid from piece where held = 0 and close is not false))
        returning p.piece, p.message_count, p.keys, p.arrival_no, p.first_seq
    ), old as (
        update pgqueue.pieces p
        set place = case when p.place < p_cursor.last_line_no - pgqueue._limit_old() then p_cursor.last_line_no else p.place end,
            claimed = p.claimed or p.piece in (select piece from piece where note)
        where ctid = any (array(select tid from piece
                                where (place < p_cursor.last_line_no - pgqueue._limit_old() or note) and (held > 0 or close is false)))
        returning p.place, p.piece
    )
    select count(*), min(piece) filter (where keys is null), array_agg(piece) filter (where held > 0 and held < message_count and keys is not null),
           least(min(place) filter (where piece not in (select piece from old)), (select min(place) from old), p_cursor.last_line_no),
           coalesce((select array_agg((k, g.arrival_no, g.first_seq)::pgqueue.waiting_place)
                     from (select keys, arrival_no, first_seq from gone union all select keys, 0, 0 from piece where note) g
                     cross join lateral unnest(g.keys) k), '{}'),
           p_consumer.limits_keys or exists (select from gone where message_count = 0)
    into o_count, o_whole, v_shrunk, o_cursor.pieces_from, o_freed, v_twice
    from piece where piece not in (select piece from gone);

    for v_piece in
        select * from pgqueue.pieces where consumer_id = p_consumer.consumer_id and place >= o_cursor.pieces_from and piece = any (v_shrunk)
    loop
        o_freed := o_freed || pgqueue._shrink_piece(p_consumer, v_piece);
    end loop;
    if v_twice then
        o_freed := array(select distinct on (key) f::pgqueue.waiting_place from unnest(o_freed) f order by key, arrival_no, first_seq);
    end if;
end $$;

-- Takes the keys out of a piece of which it has no message any more, all of them where the last were just settled. Returns them.
create or replace function pgqueue._shrink_piece(p_consumer pgqueue.consumers, p_piece pgqueue.pieces) returns pgqueue.waiting_place[]
language plpgsql
as $$
declare
    v_runs  pgqueue.consumer_messages[] := array(select m from pgqueue.consumer_messages m where consumer_id = p_piece.consumer_id and piece = p_piece.piece
                                                                                              and (state = 'ready' or not pgqueue._counts_ready(p_consumer)));
    v_keyed pgqueue.keyed_messages := pgqueue._by_key(p_consumer, v_runs);
    v_left  bigint[] := v_keyed.keys;
begin
    if p_consumer.ordering = 'none' then
        v_left := (pgqueue._singly(v_keyed)).keys;
    end if;
    update pgqueue.pieces
    set message_count = (select coalesce(sum(message_count), 0) from unnest(v_runs)),
        keys = case p_consumer.ordering when 'none' then array_remove(v_left, null) else array(select k from unnest(p_piece.keys) k where k = any (v_left)) end
    where consumer_id = p_piece.consumer_id and place = p_piece.place and piece = p_piece.piece;
    return array(select (k, p_piece.arrival_no, p_piece.first_seq)::pgqueue.waiting_place
                 from unnest(p_piece.keys) k where p_consumer.ordering = 'none' or (k = any (v_left)) is not true);
end $$;

-- Takes the first that wait of some keys, each at most about p_size messages that are alike, and deletes them.
-- Returns them; null for none.
create or replace function pgqueue._waiting_heads(p_consumer_id int, p_freed pgqueue.waiting_place[], p_size bigint) returns pgqueue.keyed_messages
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
                                              is distinct from lag((priority, deliver_count, note, not_visible_until)) over line) as other
        from run
        window line as (partition by key order by arrival_no, first_seq)
    ), alike as (
        select *, bool_or(other) over (partition by key order by arrival_no, first_seq) as later from judged
    ), head as (
        select key, array_agg(tid) as tids, min(arrival_no) as arrival_no, min(first_seq) as first_seq, sum(message_count)::bigint as message_count,
               range_agg(seqs) as seqs, (array_agg(run order by arrival_no, first_seq))[1] as run
        from alike where before < p_size and not later
        group by key
    ), numbered as (
        select *, row_number() over (order by arrival_no, first_seq) as i from head
    )
    select array_agg(run order by i), array_agg(i order by i), array_agg(key order by i), array_agg(seqs order by i), array_agg(message_count order by i),
           (select array_agg(t) from head cross join unnest(tids) t)
    into v_keyed.runs, v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts, v_tids
    from numbered;
    delete from pgqueue.consumer_messages where ctid = any (v_tids);
    return v_keyed;
end $$;

-- Takes the first messages of the line, some p_room of them, and deletes them there.
-- Returns them by key; null for none.
create or replace function pgqueue._line_front(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_room bigint) returns pgqueue.keyed_messages
language plpgsql
as $$
declare
    v_from  pgqueue.line_place;
    v_last  bigint;  -- the last line_no, and if it is the only one,
    v_below bigint;  -- the bound of its messages: the runs of one line_no interleave, and go by seq
    v_run   pgqueue.consumer_messages;
    v_rest  int8multirange;
    v_runs  pgqueue.consumer_messages[];
begin
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = 1;
    if v_from.lane is null then
        return null;
    end if;
    with run as materialized (
        select line_no, first_seq, seqs, sum(message_count) over line as upto, lead(first_seq) over line as next
        from (select * from pgqueue.consumer_messages
              where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1 and (line_no, first_seq) >= (v_from.line_no, v_from.first_seq)
              order by line_no, first_seq limit p_room + 1) m
        window line as (order by line_no, first_seq)
    ), full_at as (
        select line_no, first_seq, next from run where upto >= p_room order by line_no, first_seq limit 1
    )
    select coalesce(max(r.line_no) filter (where r.line_no < f.line_no or f.line_no is null), min(r.line_no)),
           case when min(r.line_no) = min(f.line_no)
                then least(pgqueue._bound_of(range_agg(r.seqs) filter (where r.line_no = f.line_no and r.first_seq <= f.first_seq), p_room),
                           (select min(n.first_seq) from run n where n.line_no = min(f.line_no) and n.first_seq > min(f.first_seq))) end
    into v_last, v_below
    from run r left join full_at f on true;
    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1 and (line_no, first_seq) >= (v_from.line_no, v_from.first_seq)
          and line_no <= v_last and (v_below is null or first_seq < v_below)
        returning *
    loop
        if upper(v_run.seqs) > v_below then
            v_rest := v_run.seqs - int8multirange(int8range(null, v_below));
            perform pgqueue._store_run(v_run, v_rest);
            v_run.seqs := v_run.seqs - v_rest;
        end if;
        v_runs := v_runs || v_run;
    end loop;
    return pgqueue._by_key(p_consumer, v_runs);
end $$;

-- Splits runs by key. A message without a key, or that is gone, stands for itself, with null.
-- Returns what each key has of runs that are alike, in the order of the messages; null for none.
create or replace function pgqueue._by_key(p_consumer pgqueue.consumers, p_runs pgqueue.consumer_messages[]) returns pgqueue.keyed_messages
language plpgsql
as $$
declare
    v_sets  int8multirange[];
    v_nos   int[];     -- of each set: among the runs that are not alike
    v_lines bigint[];  -- and where it stands
    v_lo    bigint;    -- the bounds of all, for the planner: it leaves out other tables of the stream
    v_hi    bigint;
    v_keyed pgqueue.keyed_messages;
    v_gone  int8multirange;
begin
    with run as materialized (
        select r, r.seqs, r.line_no, dense_rank() over (order by r.line_no, r.arrival_no, r.lane, r.piece, r.priority, r.deliver_count, r.note,
                                                                 r.not_visible_until) as i
        from unnest(p_runs) r
    )
    select array_agg(seqs), array_agg(i), array_agg(line_no), (select array_agg(f.r order by f.i) from (select distinct on (i) i, r from run) f),
           min(lower(seqs)), max(upper(seqs))
    into v_sets, v_nos, v_lines, v_keyed.runs, v_lo, v_hi
    from run;
    execute format($q$
        select array_agg(i order by line_no, first_seq), array_agg(key order by line_no, first_seq), array_agg(seqs order by line_no, first_seq),
               array_agg(message_count order by line_no, first_seq)
        from (select i, line_no, key, range_agg(int8range(seq, seq + 1)) as seqs, count(*) as message_count, min(seq) as first_seq
              from (select s.i, s.line_no, m.seq, m.key, %3$s as island
                    from unnest($1, $2, $3) s (seqs, i, line_no) cross join lateral unnest(s.seqs) g
                    cross join lateral (select seq, %2$s as key from pgqueue.messages_%1$s m
                                        where seq >= lower(g) and seq < upper(g) and seq >= $4 and seq < $5) m) e
              group by i, line_no, key, case when key is null then seq end, island) k $q$,
        p_consumer.stream_id, pgqueue._key_of(p_consumer),
        -- the messages of a key alternate perhaps between runs that are not alike
        case when cardinality(v_keyed.runs) = 1 then '0' else 'row_number() over (partition by m.key order by s.line_no, m.seq) '
                                                             '- row_number() over (partition by m.key, s.i order by s.line_no, m.seq)' end)
    into v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts
    using v_sets, v_nos, v_lines, v_lo, v_hi;

    if (select sum(message_count) from unnest(p_runs)) is distinct from (select sum(c) from unnest(v_keyed.message_counts) c) then
        v_gone := (select range_agg(s) from unnest(v_sets) s) - coalesce((select range_agg(s) from unnest(v_keyed.seqs) s), '{}');
        select v_keyed.run_nos || array_agg(s.i), v_keyed.keys || array_agg(null::bigint), v_keyed.seqs || array_agg(int8multirange(int8range(e, e + 1))),
               v_keyed.message_counts || array_agg(1::bigint)
        into v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts
        from unnest(v_sets, v_nos) s (seqs, i) cross join lateral unnest(s.seqs * v_gone) g cross join lateral generate_series(lower(g), upper(g) - 1) e;
    end if;
    return v_keyed;
end $$;

-- Messages by key, and others after them.
create or replace function pgqueue._after(p_first pgqueue.keyed_messages, p_then pgqueue.keyed_messages) returns pgqueue.keyed_messages
language plpgsql immutable
as $$
begin
    if p_first.keys is null then
        return p_then;
    elsif p_then.keys is null then
        return p_first;
    end if;
    return (p_first.runs || p_then.runs, p_first.run_nos || array(select i + cardinality(p_first.runs) from unnest(p_then.run_nos) i),
            p_first.keys || p_then.keys, p_first.seqs || p_then.seqs, p_first.message_counts || p_then.message_counts, null)::pgqueue.keyed_messages;
end $$;

-- Makes smaller pieces, at the same place, of the first ready piece if it is too large for a claim, or larger than its note allows (at_most).
-- Returns whether it was.
create or replace function pgqueue._break_up(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors, p_want bigint, out o_broken boolean)
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
                  where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 0 and (line_no, first_seq) >= (v_from.line_no, v_from.first_seq)
                  order by line_no, first_seq limit 1
                  for update skip locked)
      and message_count > least((note ->> 'at_most')::bigint, p_want)
    returning * into v_run;
    o_broken := v_run.piece is not null;
    if o_broken then
        v_keyed := pgqueue._by_key(p_consumer, array[v_run]);
        -- keys that left it before are free when the next dealer closes it
        update pgqueue.pieces set keys = array(select k from unnest(keys) k where (k = any (v_keyed.keys)) is not true)
        where consumer_id = v_run.consumer_id and place >= p_cursor.pieces_from and piece = v_run.piece;
        if p_consumer.ordering = 'none' then
            v_keyed := pgqueue._singly(v_keyed);
        end if;
        p_cursor := pgqueue._store_pieces(p_consumer, p_cursor, v_keyed, least((v_run.note ->> 'at_most')::bigint, p_want), v_run.line_no);
    end if;
end $$;

-- Stores messages as pieces of at most p_size which have no key in common; as delayed what is not visible yet; and as waiting what has its key
-- there already.
-- So what comes first of a key is in a piece, as much as fits, and what comes later waits. One statement, so that all is counted
-- once, and so is long. Whether a key is delayed is said by the first message that waits of it.
--   p_keyed    the messages by key, in their order
--   p_line_no  where the pieces stand; null: behind all others
--   p_now      what is visible then is visible
-- Returns the cursor.
create or replace function pgqueue._store_pieces(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_keyed pgqueue.keyed_messages, p_size bigint,
                                                 p_line_no bigint, p_now timestamptz default clock_timestamp())
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_delayed boolean := pgqueue._has_delayed_key(p_cursor);
    v_count   bigint;
    v_due     timestamptz;
begin
    with source as materialized (
        select ordinality as run_no, arrival_no, priority, deliver_count, note, case when not_visible_until > p_now then not_visible_until end as due,
               dense_rank() over (order by priority, deliver_count, note, case when not_visible_until > p_now then not_visible_until end) as kind
        from unnest(p_keyed.runs) with ordinality
    ), open_key as (
        select k as key from pgqueue.pieces p cross join lateral unnest(p.keys) k
        where p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from and p_consumer.ordering <> 'none'
    ), judged as (
        select r.run_no, r.key, r.seqs, r.message_count, r.i, s.kind, s.arrival_no, s.due,
               r.key is not null and (r.held is true or (p_consumer.ordering <> 'none' and (
                   r.key in (select key from open_key) or row_number() over (partition by r.key order by r.i) > 1
                   or (v_delayed and (select d.state = 'delayed' from pgqueue.consumer_messages d
                                      where d.consumer_id = p_consumer.consumer_id and d.key = r.key and d.arrival_no >= 0
                                      order by d.arrival_no, d.first_seq limit 1) is true)))) as waits
        from unnest(p_keyed.run_nos, p_keyed.keys, p_keyed.seqs, p_keyed.message_counts, p_keyed.held) with ordinality r (run_no, key, seqs, message_count, held, i)
        join source s using (run_no)
    ), packed as (
        select *, sum(least(message_count, p_size)::int) over (partition by kind order by i) - least(message_count, p_size) as before
        from judged where not waits
    ), fitted as (
        select *, least(message_count, case when due is null then p_size - before % p_size else p_size end) as room from packed
    ), part as materialized (
        select *, case when room < message_count then pgqueue._below(seqs, pgqueue._bound_of(seqs, room)) else seqs end as part from fitted
    ), piece as materialized (
        select p_cursor.last_line_no + row_number() over (order by min(i)) as piece, min(run_no) as run_no, min(arrival_no) as arrival_no,
               range_agg(part) as seqs, sum(room)::bigint as message_count, array_remove(array_agg(key), null) as keys
        from part
        where due is null
        group by kind, before / p_size
    ), opened as (
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq)
        select p_consumer.consumer_id, piece, piece, message_count, keys, case p_consumer.ordering when 'none' then 0 else arrival_no end,
               case p_consumer.ordering when 'none' then 0 else lower(seqs) end
        from piece
    ), dealt as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs, piece,
                                               note)
        select p_consumer.consumer_id, 'ready', 0, s.priority, s.deliver_count, p.arrival_no,
               coalesce(p_line_no, p.piece), lower(p.seqs), p.message_count, p.seqs, p.piece, s.note
        from piece p join source s using (run_no)
    ), delayed as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs, key,
                                               not_visible_until, note)
        select p_consumer.consumer_id, 'delayed', 1, s.priority, s.deliver_count, s.arrival_no, s.arrival_no, lower(p.part), p.room, p.part,
               case when p_consumer.ordering <> 'none' then p.key end,
               s.due, s.note
        from part p join source s using (run_no)
        where p.due is not null
    ), set_aside as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs, key,
                                               not_visible_until, note)
        select p_consumer.consumer_id, 'waiting', 0, s.priority, s.deliver_count, s.arrival_no, s.arrival_no, c.first_seq, c.message_count, c.seqs, w.key,
               s.due, s.note
        from (select run_no, key, seqs from judged where waits
              union all
              select run_no, key, seqs - part from part where room < message_count) w
        join source s using (run_no)
        cross join lateral pgqueue._chunks(w.seqs) c
    )
    select (select count(*) from piece), (select min(due) from part) into v_count, v_due;
    if v_count > 0 then
        p_cursor := pgqueue._lower_scan_from(p_cursor, array[(0, coalesce(p_line_no, p_cursor.last_line_no + 1), 0)::pgqueue.line_place]);
        p_cursor.last_line_no := p_cursor.last_line_no + v_count;
    end if;
    p_cursor.due_from := least(p_cursor.due_from, v_due);
    return p_cursor;
end $$;

-- Claims the front of the line, keys mixed, up to the first message that is not visible yet, or is of a run with at_most (see _serve_ready). No
-- piece is open, except of this claim.
--   p_piece  the piece that the claim has already; null: none
--   p_held   messages that it has already
-- Returns the cursor, how many messages it claimed, and whether the claim ends there.
create or replace function pgqueue._claim_line(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint, p_piece bigint,
                                               p_held bigint, out o_cursor pgqueue.consumer_cursors, out o_count bigint, out o_ended boolean)
language plpgsql
as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_piece bigint := coalesce(p_piece, p_cursor.last_line_no + 1);
    v_from  pgqueue.line_place;
    v_next  record;
    v_count bigint;
    v_later bigint;  -- the first message of the line_no that may not be visible, or come with others
    v_below bigint;
    v_claimed record;
    v_expired bigint := 0;
begin
    o_cursor := p_cursor;
    o_count := 0;
    o_ended := false;
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = 1;
    while o_count < p_want and v_from.lane is not null and not o_ended loop
        v_next := pgqueue._next_ready(p_consumer.consumer_id, v_from);
        exit when v_next.line_no is null;
        v_from.line_no := v_next.line_no;
        v_from.first_seq := v_next.first_seq;
        o_ended := v_next.at_most is not null;
        exit when o_ended and p_held + o_count > 0;
        -- the runs of one line_no interleave: they go by seq
        select sum(message_count), min(first_seq) filter (where not_visible_until > v_now or (note ? 'at_most' and first_seq > v_from.first_seq))
        into v_count, v_later
        from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1 and line_no = v_from.line_no and first_seq >= v_from.first_seq;
        exit when v_later = v_from.first_seq;
        v_below := least(pgqueue._line_bound(p_consumer.consumer_id, v_from.line_no, v_from.first_seq, v_count,
                                                   least(v_next.at_most, p_want - o_count)), v_later);
        v_claimed := pgqueue._claim_below(p_consumer.consumer_id, v_from.line_no, v_from.first_seq, v_below, p_claim_id, v_piece);
        o_count := o_count + v_claimed.o_count;
        v_expired := v_expired + v_claimed.o_expired;
        exit when v_below = v_later or v_expired >= pgqueue._limit_looks();
    end loop;
    if o_count > 0 and p_piece is null then
        insert into pgqueue.pieces (consumer_id, place, piece, message_count) values (p_consumer.consumer_id, v_piece, v_piece, o_count);
        o_cursor.last_line_no := v_piece;
    end if;
end $$;

-- The bound below which the runs of one line_no, from p_first, have p_room messages; beyond all if they have no more.
create or replace function pgqueue._line_bound(p_consumer_id int, p_line_no bigint, p_first bigint, p_count bigint, p_room bigint) returns bigint
language plpgsql stable
as $$
declare
    v_below bigint := 9223372036854775807;
begin
    if p_count <= p_room then
        return v_below;
    end if;
    -- from the first runs that suffice; then once more with the runs that begin below that bound
    select pgqueue._bound_of(range_agg(seqs), p_room) into v_below
    from (select seqs, sum(message_count) over (order by first_seq) - message_count as before
          from pgqueue.consumer_messages
          where consumer_id = p_consumer_id and state = 'ready' and lane = 1 and line_no = p_line_no and first_seq >= p_first) r
    where before < p_room;
    select pgqueue._bound_of(range_agg(seqs), p_room) into v_below
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and state = 'ready' and lane = 1 and line_no = p_line_no and first_seq >= p_first and first_seq < v_below;
    return v_below;
end $$;

-- Claims the messages of one line_no, from p_first, below a bound, for a piece with all keys; gives up those that have expired. Returns how many.
create or replace function pgqueue._claim_below(p_consumer_id int, p_line_no bigint, p_first bigint, p_below bigint, p_claim_id bigint, p_piece bigint,
                                                out o_count bigint, out o_expired bigint)
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
        where consumer_id = p_consumer_id and state = 'ready' and lane = 1 and line_no = p_line_no and first_seq >= p_first and first_seq < p_below
        returning *
    loop
        v_part := pgqueue._below(v_run.seqs, p_below);
        if v_part <> v_run.seqs then
            perform pgqueue._store_run(v_run, v_run.seqs - v_part);
        end if;
        if v_run.note is not null and pgqueue._has_expired(v_run.note) then
            perform pgqueue._dead_letter(v_run, v_part, 'expired', null);
            o_expired := o_expired + pgqueue._cardinality(v_part);
            continue;
        end if;
        v_run.piece := p_piece;
        o_count := o_count + pgqueue._claim_run(v_run, v_part, p_claim_id);
    end loop;
end $$;

-- Puts messages of an ordered consumer's claim back: of each key the first failed one and all that follow it in the claim. They go back to
-- where their claim had them from: into the line, or, of a piece, aside to wait for what the claim still has of their key. One statement
-- judges, and so is long.
--   p_set      the messages that failed
--   p_failure  what that means for them
-- Returns the places of what is back in the line.
create or replace function pgqueue._return_by_key(p_consumer pgqueue.consumers, p_claim pgqueue.claims, p_set int8multirange, p_failure pgqueue.failure)
returns pgqueue.line_place[]
language plpgsql
as $$
declare
    v_keyed  pgqueue.keyed_messages := pgqueue._by_key(p_consumer, array(
        select m from pgqueue.consumer_messages m where claim_id = p_claim.claim_id and state = 'claimed' and (lane = 1 or seqs && p_set)));
    v_places pgqueue.line_place[];
    v_gone   int8multirange;
begin
    with run as materialized (
        select k.key, k.seqs, r.lane, r.arrival_no, r.priority, r.deliver_count, r.note
        from unnest(v_keyed.run_nos, v_keyed.keys, v_keyed.seqs) k (run_no, key, seqs)
        cross join lateral (select (v_keyed.runs[k.run_no]).*) r
    ), element as (
        select r.key, r.lane, r.arrival_no, r.priority, r.deliver_count, r.note, s as seq, p_set @> s as failed,
               p_set @> s and pgqueue._is_hopeless(p_consumer, r.deliver_count, p_failure) as dead
        from run r cross join lateral unnest(r.seqs) g cross join lateral generate_series(lower(g), upper(g) - 1) s
        where r.key in (select key from run where seqs && p_set) or (r.key is null and r.seqs && p_set)
    ), judged as (
        select *, case when key is null then failed
                       else bool_or(failed and not dead) over (partition by key order by arrival_no, seq) end and not dead as back
        from element
    ), gone as materialized (
        select key, lane, arrival_no, priority, note, seq, failed, dead, deliver_count - (not (failed and p_failure.counted))::int as deliver_count
        from judged where back or dead
    ), dead_lettered as (
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason, claim_id, note, owner)
        select p_consumer.stream_id, p_consumer.consumer_id, range_agg(int8range(seq, seq, '[]')), count(*), priority, deliver_count,
               'max deliveries', p_claim.claim_id, pgqueue._noted(note, p_failure.note), p_claim.owner
        from gone where dead group by priority, deliver_count, note
    ), back as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs,
                                               key, not_visible_until, note)
        select p_consumer.consumer_id, case when i.waits then 'waiting' else 'ready' end, case when i.waits then 0 else 1 end,
               i.priority, i.deliver_count, i.arrival_no, i.arrival_no, c.first_seq, c.message_count, c.seqs,
               case when i.waits then i.key end, case when i.failed then pgqueue._delayed_until(p_consumer, i.deliver_count, p_failure) end,
               case when i.failed then pgqueue._noted(i.note, p_failure.note) else i.note end
        from (select key, lane = 0 and key is not null as waits, arrival_no, priority, deliver_count, failed, note, island,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by arrival_no, seq)
                              - row_number() over (partition by key, arrival_no, priority, deliver_count, failed, note order by seq) as island
                    from gone where not dead) e
              group by key, lane, arrival_no, priority, deliver_count, failed, note, island) i
        cross join lateral pgqueue._chunks(i.seqs) c
        returning state, lane, line_no, first_seq
    )
    select array(select (lane, line_no, first_seq)::pgqueue.line_place from back where state = 'ready'),
           (select range_agg(int8range(seq, seq, '[]')) from gone)
    into v_places, v_gone;

    perform pgqueue._take_out(p_claim.claim_id, v_gone) where v_gone is not null;
    if p_consumer.notify_done then
        perform pg_notify(pgqueue._done_channel(p_consumer.consumer_id), '');
    end if;
    return v_places;
end $$;
