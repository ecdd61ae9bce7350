-- Limits of keys without an ordering: each message stands for itself. The dealer reads the keys of the messages, judges
-- each message by the limits of its key (queue/key_limits.sql), and makes pieces of those that may be dealt now.

-- The single messages of runs, as they arrived: of which run each is, the hash of its key, and its number; nulls when
-- there are no messages. A message that is gone comes last, and has no key.
create or replace function _pgqueue.single_messages(p_consumer pgqueue.consumers, p_runs pgqueue.consumer_messages[],
                                                    out o_run_nos int[], out o_keys bigint[], out o_seqs bigint[])
language plpgsql
as $$
declare
    v_sets     int8multirange[] := array(select seqs from unnest(p_runs) with ordinality order by ordinality);
    v_arrivals bigint[] := array(select arrival_no from unnest(p_runs) with ordinality order by ordinality);
begin
    if v_sets = '{}' then
        return;
    end if;
    -- (the bounds of all sets: with them the planner leaves out other tables of the stream)
    execute format($q$
        select array_agg(i order by arrival_no, seq), array_agg(key order by arrival_no, seq),
               array_agg(seq order by arrival_no, seq)
        from (select s.i, s.arrival_no, m.seq, m.key
              from unnest($1, $2) with ordinality s (seqs, arrival_no, i) cross join lateral unnest(s.seqs) g
              cross join lateral (select seq, %2$s as key from pgqueue.messages_%1$s m
                                  where seq >= lower(g) and seq < upper(g) and seq >= $3 and seq < $4) m) e $q$,
        p_consumer.stream_id, _pgqueue.key_of(p_consumer))
    into o_run_nos, o_keys, o_seqs
    using v_sets, v_arrivals, (select min(lower(s)) from unnest(v_sets) s),
          (select max(upper(s)) from unnest(v_sets) s);
    if cardinality(o_seqs) is distinct from (select sum(message_count) from unnest(p_runs)) then
        select o_run_nos || array_agg(i::int), o_keys || array_agg(null::bigint), o_seqs || array_agg(seq)
        into o_run_nos, o_keys, o_seqs
        from unnest(v_sets) with ordinality s (seqs, i) cross join lateral unnest(s.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) seq
        where seq not in (select unnest(o_seqs));
    end if;
end $$;

-- Deals messages of a consumer with ordering=none, as many as the limits leave to each key, into pieces of at most
-- p_size. Messages that are not visible yet are stored as delayed, and those over a limit wait. Returns the cursor.
-- Needs the consumer's lock.
--   p_heads    of each key that is free now, the messages that waited first
--   p_runs     other messages
--   p_line_no  where the pieces stand; null: behind all others
--   p_cuts     store what was never delivered as slots, if these are of that size, and not too many
-- (More than 60 lines: one statement judges and stores, so that everything is counted once.)
create or replace function _pgqueue.deal_singly(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                p_heads pgqueue.keyed_messages, p_runs pgqueue.consumer_messages[],
                                                p_size bigint, p_line_no bigint default null,
                                                p_cuts boolean default false)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_burst  int := case when p_consumer.per_key_interval is not null then p_consumer.per_key_burst end;
    v_single record := _pgqueue.single_messages(p_consumer, p_runs);
    v_all    pgqueue.consumer_messages[] := p_runs || p_heads.runs;
    -- of each free key the messages to look at, a message more than may be dealt; and those keys of which more wait
    v_look   bigint := 1 + least(p_consumer.per_key_limit, v_burst, case when p_consumer.fair then 4 * p_size end,
                                 p_size * _pgqueue.limit_pieces());
    v_fronts int8multirange[] := array(
        select case when n > v_look then _pgqueue.below(seqs, _pgqueue.bound_of(seqs, v_look)) else seqs end
        from unnest(p_heads.seqs, p_heads.message_counts) with ordinality h (seqs, n, i) order by i);
    v_more   bigint[] := array(select k from unnest(p_heads.keys, p_heads.message_counts) h (k, n)
                               where n > v_look
                                  or exists (select from pgqueue.consumer_messages w
                                             where w.consumer_id = p_consumer.consumer_id and w.key = k));
    v_sets   bigint := (select count(*) from unnest(v_all) r cross join lateral unnest(r.seqs));
    v_small  bigint := (p_size - 1) / ((p_size - 1) / _pgqueue.limit_piece_by_key() + 1) + 1;
    v_count  bigint;
    v_slots  bigint;  -- so many of the pieces
    v_first  bigint;  -- the first slot,
    v_middle bigint;  -- and one of those in the middle
    v_due    timestamptz;
    v_held   bigint[];  -- keys of messages that waited, and have to go on
    v_waits  boolean;
begin
    if p_heads.keys is not null then
        select array_agg(run_no order by arrival_no, seq), array_agg(key order by arrival_no, seq),
               array_agg(seq order by arrival_no, seq)
        into v_single.o_run_nos, v_single.o_keys, v_single.o_seqs
        from (select l.* from unnest(v_single.o_run_nos, v_single.o_keys, v_single.o_seqs) l (run_no, key, seq)
              union all
              select cardinality(p_runs) + h.run_no, h.key, seq
              from unnest(p_heads.run_nos, p_heads.keys, v_fronts) h (run_no, key, seqs)
              cross join lateral unnest(h.seqs) g cross join lateral generate_series(lower(g), upper(g) - 1) seq) m
        join (select ordinality as run_no, arrival_no from unnest(v_all) with ordinality) r using (run_no);
    end if;
    with source as materialized (
        select ordinality as run_no, arrival_no, priority, deliver_count, note,
               case when not_visible_until > v_now then not_visible_until end as due,
               p_cuts and deliver_count = 0 and note is null as fresh,
               dense_rank() over (order by priority, deliver_count, note,
                                           case when not_visible_until > v_now then not_visible_until end) as kind
        from unnest(v_all) with ordinality
    ), message as materialized (
        select m.run_no, m.key, m.seq, m.i, s.kind, s.due, s.arrival_no, m.run_no > cardinality(p_runs) as head,
               m.key is null or s.due is not null as free  -- (what is not visible yet will come again)
        from unnest(v_single.o_run_nos, v_single.o_keys, v_single.o_seqs) with ordinality m (run_no, key, seq, i)
        join source s using (run_no)
    ), asked as materialized (
        select key, count(*) as n from message where not free group by key
    ), in_pieces as materialized (
        select k as key, count(*) as n, count(*) filter (where not p.claimed) as ready
        from pgqueue.pieces p cross join lateral unnest(p.keys) k
        where p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from
        group by k
    ), room as (
        select a.key, a.n, a.key = any (v_more) as more,
               least(p_consumer.per_key_limit - coalesce(p.n, 0),
                     case when p_consumer.fair then s.share - coalesce(p.ready, 0) end,
                     case when v_burst is not null then v_burst - coalesce(p.ready, 0) - coalesce((
                         select sum(spent)::bigint from pgqueue.key_tokens
                         where consumer_id = p_consumer.consumer_id and key = a.key
                           and returns_at >= p_cursor.tokens_from), 0) end) as room
        from asked a left join in_pieces p using (key)
        cross join (select greatest(1, ceil(4.0 * p_size / greatest(1, count(*))))::bigint as share from asked) s
    ), short as materialized (
        select key, room, more from room where room < n or more
    ), held as materialized (
        select i, key, head, run_no, seq
        from (select m.*, row_number() over line > s.room
                          -- more messages of its key wait, and come before it
                          or (s.more and not m.head and bool_or(m.head) over line) as held
              from message m join short s using (key)
              where not m.free
              window line as (partition by key order by i)) j
        where held
    ), size as materialized (  -- of a piece: a run has few ranges
        select case when v_sets + (select count(*) from held) <= _pgqueue.limit_ranges() then p_size
                    else v_small end as size
    ), dealt as (
        select *, (row_number() over (partition by kind order by i) - 1) / (select size from size) as no
        from message where due is null and i not in (select i from held)
    ), piece as materialized (
        select p_cursor.last_line_no + row_number() over (order by min(i)) as piece, min(run_no) as run_no,
               min(arrival_no) as arrival_no, count(*) as message_count, array_remove(array_agg(key), null) as keys,
               case when max(seq) - min(seq) + 1 = count(*) then int8multirange(int8range(min(seq), max(seq) + 1))
                    else (select range_agg(int8range(s, s + 1)) from unnest(array_agg(seq)) s) end as seqs
        from dealt group by kind, no
    ), laid as (
        insert into pgqueue.slots (slot, arrival_no, consumer_id, priority, message_count, seqs, piece)
        select nextval('pgqueue.claim_numbers'), arrival_no, p_consumer.consumer_id, priority, message_count, seqs,
               piece
        from (select p.*, s.priority from piece p join source s using (run_no)
              where s.fresh and (select size from size) = p_size
                and (select count(*) from piece) <= _pgqueue.limit_slots() order by piece) p
        returning slot, piece
    ), opened as (
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq)
        select p_consumer.consumer_id, piece, piece, message_count, keys, 0, 0 from piece
    ), stored as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, piece, note)
        select p_consumer.consumer_id, 'ready', 0, s.priority, s.deliver_count, p.arrival_no,
               coalesce(p_line_no, p.piece), lower(p.seqs), p.message_count, p.seqs, p.piece, s.note
        from piece p join source s using (run_no)
        where piece not in (select piece from laid)
    ), left_over as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, key, not_visible_until, note)
        select p_consumer.consumer_id, r.state, r.lane, s.priority, s.deliver_count, s.arrival_no, s.arrival_no,
               c.first_seq, c.message_count, c.seqs, r.key, s.due, s.note
        from (select run_no, key, 'waiting' as state, 0 as lane, range_agg(seqs) as seqs
              from (select run_no, key, int8multirange(int8range(seq, seq + 1)) as seqs from held
                    union all
                    select cardinality(p_runs) + run_no, key, seqs - front
                    from unnest(p_heads.run_nos, p_heads.keys, p_heads.seqs, v_fronts) h (run_no, key, seqs, front)
                    where seqs <> front) w
              group by run_no, key
              union all
              select run_no, null, 'delayed', 1, range_agg(int8range(seq, seq + 1))
              from message where due is not null group by run_no) r
        join source s using (run_no)
        cross join lateral _pgqueue.split_set(r.seqs) c
    )
    select (select count(*) from piece), (select min(due) from source), array(select key from held where head),
           exists (select from held), s.*
    into v_count, v_due, v_held, v_waits, v_slots, v_first, v_middle
    from (select count(*), min(slot), min(slot) + (count(*) + 1) / 2 from laid) s;
    if v_count > v_slots then
        p_cursor := _pgqueue.lower_scan_from(
            p_cursor, array[(0, coalesce(p_line_no, p_cursor.last_line_no + 1), 0)::pgqueue.line_place]);
    end if;
    if v_slots > 0 then
        p_cursor := _pgqueue.raise_slots(_pgqueue.begin_block_by_key(p_cursor, v_first));
        p_cursor.slots_size := p_size;
        p_cursor.slots_priority := null;
        -- (where a key is full, dealing ahead would find it full)
        p_cursor.slots_more := case when not v_waits then v_middle end;
    end if;
    p_cursor.last_line_no := p_cursor.last_line_no + v_count;
    p_cursor.due_from := least(p_cursor.due_from, v_due);
    p_cursor.waits := p_cursor.waits or v_waits;
    -- note keys as free again, unless a limit held back some of their messages: then a piece or a token frees them
    return _pgqueue.note_freed(p_cursor, array(select (k, 0, 0)::pgqueue.waiting_place from unnest(v_more) k
                                               where k <> all (v_held)));
end $$;
