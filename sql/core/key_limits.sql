-- Limits of keys, for consumers with ordering=key and, dealt in the same way, with ordering=none: how many messages of a key may be in flight
-- (per_key_limit), how many are delivered in a time (per_key_interval, per_key_burst), and keys in turns (fair).
--
-- The dealer sees to them. Before it makes pieces it splits what it looked at (_within_limits): what each key may have now is dealt, and the rest is set
-- aside, as what has its key in an open piece. It waits until the dealer is told that the key may have more:
--   * a piece of the key is closed. With ordering=key, where the key has no other one, that is all. With ordering=none a key may be in several pieces, whose
--     keys are listed once for each message; where no message in flight counts, a piece is closed when it is claimed, else it is noted when it is;
--   * a gate of the key is over. That is a delayed run of no messages, with the key, its arrival_no -1, and in deliver_count how many messages of the key a
--     claim delivered; it lasts for per_key_interval. So a rate needs no table and no clock but that of delays, and lasts over restarts. Gates are made with
--     the consumer's lock, so that none is due before what due_from says: with a rate every claim has it;
--   * with ordering=none, where more of the key waits and nothing holds it up, a piece of no messages, with the key: the next dealer goes on with it.
-- Keys take turns because pieces do: what becomes free is dealt behind what is ready. With fair a key has in pieces that are ready about its share of four
-- claims, so one that has very much is set aside. A message without a key is in nobody's way, and has no limit.

-- Whether of a consumer only what is ready is in pieces, and nothing that is claimed.
create or replace function pgqueue._counts_ready(p_consumer pgqueue.consumers) returns boolean
language sql immutable
as $$ select p_consumer.ordering = 'none' and p_consumer.per_key_limit is null $$;

-- Splits messages by key into what may be dealt now, as much as the limits leave to each key, and what is held. Of ordering=none, what may be dealt
-- becomes single messages. Needs the consumer's lock. One statement, so that all is counted once.
--   p_size   messages of a piece
--   p_heads  how many of them waited, and are of keys that are free
--   p_more   keys of which more waits, that stays where it is: what comes after that is held
--   p_now    what is not visible then is left as it is
create or replace function pgqueue._within_limits(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_keyed pgqueue.keyed_messages, p_size bigint,
                                                  p_heads int, p_more bigint[], p_now timestamptz) returns pgqueue.keyed_messages
language plpgsql
as $$
declare
    v_none  boolean := p_consumer.ordering = 'none';
    v_share bigint := case when p_consumer.fair then greatest(1, ceil(4.0 * p_size / greatest(1, (select count(distinct k) from unnest(p_keyed.keys) k)))) end;
    v_burst int := case when p_consumer.per_key_interval is not null then p_consumer.per_key_burst end;
    v_keyed pgqueue.keyed_messages;
begin
    v_keyed.runs := p_keyed.runs;
    with source as materialized (
        select ordinality as run_no, arrival_no, not_visible_until > p_now as later from unnest(p_keyed.runs) with ordinality
    ), given as materialized (
        select e.run_no, e.key, e.seqs, e.message_count, e.key is null or s.later is true as free,  -- a message that is not visible yet will come again
               e.i <= p_heads as head, case when v_none then row_number() over (order by s.arrival_no, lower(e.seqs)) else e.i end as i
        from unnest(p_keyed.run_nos, p_keyed.keys, p_keyed.seqs, p_keyed.message_counts) with ordinality e (run_no, key, seqs, message_count, i)
        join source s using (run_no)
    ), entry as materialized (
        select g.*, h.key is not null as behind  -- more of its key waits, before it
        from given g left join (select key, i from given where head and key = any (p_more)) h on h.key = g.key and h.i < g.i
    ), in_pieces as materialized (
        select k as key, count(*) as n, count(*) filter (where not p.claimed) as ready
        from pgqueue.pieces p cross join lateral unnest(p.keys) k
        where v_none and p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from and p.message_count > 0
        group by k
    ), room as materialized (
        select k.key, least(p_consumer.per_key_limit - coalesce(p.n, 0), v_burst - g.used - coalesce(p.ready, 0), v_share - coalesce(p.ready, 0)) as room
        from (select distinct key from entry where not free) k
        left join in_pieces p using (key)
        cross join lateral (select coalesce(sum(d.deliver_count), 0) as used from pgqueue.consumer_messages d
                            where v_burst is not null and d.consumer_id = p_consumer.consumer_id and d.key = k.key and d.arrival_no = -1) g
    ), judged as (
        select e.*, case when e.free then e.message_count
                         when e.behind then 0
                         else greatest(0, least(e.message_count,
                              r.room - sum(e.message_count) over (partition by e.key, e.free order by e.i) + e.message_count)) end::bigint as dealt
        from entry e left join room r using (key)
    ), part as (
        select j.*, case when dealt = 0 then '{}' when dealt < message_count then pgqueue._below(seqs, pgqueue._bound_of(seqs, dealt)) else seqs end as part
        from judged j
    ), split as (
        select i, run_no, key, int8multirange(int8range(s, s + 1)) as seqs, 1::bigint as message_count, false as held
        from part cross join lateral unnest(part) g cross join lateral generate_series(lower(g), upper(g) - 1) s where v_none
        union all
        select i, run_no, key, part, dealt, false from part where not v_none and dealt > 0
        union all
        select i, run_no, key, seqs - part, message_count - dealt, true from part where dealt < message_count
    )
    select array_agg(run_no order by i, held, lower(seqs)), array_agg(key order by i, held, lower(seqs)), array_agg(seqs order by i, held, lower(seqs)),
           array_agg(message_count order by i, held, lower(seqs)), array_agg(held order by i, held, lower(seqs))
    into v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts, v_keyed.held
    from split;
    return v_keyed;
end $$;

-- Messages by key as single ones.
create or replace function pgqueue._singly(p_keyed pgqueue.keyed_messages) returns pgqueue.keyed_messages
language plpgsql immutable
as $$
begin
    select array_agg(run_no order by i, s), array_agg(key order by i, s), array_agg(int8multirange(int8range(s, s + 1)) order by i, s), array_agg(1::bigint)
    into p_keyed.run_nos, p_keyed.keys, p_keyed.seqs, p_keyed.message_counts
    from unnest(p_keyed.run_nos, p_keyed.keys, p_keyed.seqs) with ordinality e (run_no, key, seqs, i)
    cross join lateral unnest(seqs) g cross join lateral generate_series(lower(g), upper(g) - 1) s;
    return p_keyed;
end $$;

-- Deals within the limits, see _deal: what may be dealt becomes pieces, and the rest waits. Returns the cursor. Needs the consumer's lock.
--   p_keyed  the messages: first p_heads, which waited for keys that are free now
create or replace function pgqueue._deal_within_limits(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_keyed pgqueue.keyed_messages,
                                                       p_heads pgqueue.keyed_messages, p_size bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_more  bigint[] := '{}';  -- of ordering=none: keys that are free, of which more waits
    v_keyed pgqueue.keyed_messages;
begin
    if p_consumer.ordering = 'none' and p_heads.keys is not null then
        v_more := array(select k from unnest(p_heads.keys) k
                        where exists (select from pgqueue.consumer_messages w where w.consumer_id = p_consumer.consumer_id and w.key = k and w.arrival_no >= 0));
    end if;
    v_keyed := pgqueue._within_limits(p_consumer, p_cursor, p_keyed, p_size, coalesce(cardinality(p_heads.keys), 0), v_more, v_now);
    p_cursor := pgqueue._store_pieces(p_consumer, p_cursor, v_keyed, p_size, null, v_now);
    -- where nothing of a head was held, the next dealer goes on with the key
    v_more := array(select h.key from unnest(p_heads.keys, p_heads.message_counts) h (key, n)
                    where h.key = any (v_more)
                      and (select count(*) from unnest(v_keyed.keys, v_keyed.held) d (key, held) where d.key = h.key and not d.held) >= h.n);
    if v_more <> '{}' then
        p_cursor.last_line_no := p_cursor.last_line_no + 1;
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq)
        values (p_consumer.consumer_id, p_cursor.last_line_no, p_cursor.last_line_no, 0, v_more, 0, 0);
    end if;
    return p_cursor;
end $$;

-- Makes the gates of a claim: of each key, how much of it it delivers since p_since. Returns the cursor. Needs the consumer's lock.
create or replace function pgqueue._set_gates(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint,
                                              p_since timestamptz) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_until timestamptz := clock_timestamp() + p_consumer.per_key_interval;
    v_keyed pgqueue.keyed_messages := pgqueue._by_key(p_consumer, array(
        select m from pgqueue.consumer_messages m where claim_id = p_claim_id and state = 'claimed' and last_delivered_at >= p_since));
begin
    -- what waits of the key comes after what is delivered of it
    insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs, key,
                                           not_visible_until)
    select p_consumer.consumer_id, 'delayed', 1, 0, sum(k.message_count), -1, case p_consumer.ordering when 'none' then 0 else min(r.arrival_no) end,
           case p_consumer.ordering when 'none' then 0 else min(lower(k.seqs)) end, 0, '{}', k.key, v_until
    from unnest(v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts) k (run_no, key, seqs, message_count)
    join (select ordinality as run_no, arrival_no from unnest(v_keyed.runs) with ordinality) r using (run_no)
    where k.key is not null
    group by k.key;
    p_cursor.due_from := least(p_cursor.due_from, v_until);
    return p_cursor;
end $$;

-- Raises PQ006: Spark takes all that there is, and knows of no limits.
create or replace function pgqueue._refuse_limits(p_consumer pgqueue.consumers) returns void
language plpgsql
as $$
begin
    raise exception '% has limits of keys (fair, per_key_limit or per_key_interval), which are for workers: Spark claims what there is', quote_literal(p_consumer.name)
        using errcode = 'PQ006', hint = 'Read another consumer, or take the limits back with alter_consumer.';
end $$;

-- Lets a consumer with ordering=none go by key, or no more: what it has taken and nobody has claimed moves from its lanes to the line, or back.
-- Errors: PQ003 unless it is paused, and nothing of it is claimed or being claimed. Locks: the consumer.
create or replace function pgqueue._change_lanes(p_consumer pgqueue.consumers) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_claims bigint;
begin
    perform pgqueue._lock_consumer(p_consumer.consumer_id);
    select * into v_stored from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id order by version desc limit 1;
    if not found then
        return;  -- it is being made
    end if;
    v_cursor := v_stored;
    if p_consumer.by_key then
        update pgqueue.consumer_messages set lane = 1, line_no = arrival_no where consumer_id = p_consumer.consumer_id and state <> 'claimed';
    else
        delete from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id and message_count = 0;
        update pgqueue.consumer_messages
        set lane = -priority, line_no = arrival_no, key = null, piece = null,
            state = case when state = 'unsifted' then state when not_visible_until > clock_timestamp() then 'delayed' else 'ready' end,
            not_visible_until = case when not_visible_until > clock_timestamp() or state = 'unsifted' then not_visible_until end
        where consumer_id = p_consumer.consumer_id and state <> 'claimed';
        delete from pgqueue.pieces where consumer_id = p_consumer.consumer_id;
        v_cursor.due_from := '-infinity';
    end if;
    -- after that: who was claiming some of them is done
    v_claims := (select count(distinct claim_id) from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id and state = 'claimed')
        + (select count(*) from pg_locks where locktype = 'advisory' and not granted and classid = pgqueue._lock_class_consumer()::oid
           and objid = p_consumer.consumer_id::oid and objsubid = 2 and database = (select oid from pg_database where datname = current_database()));
    if not p_consumer.paused or v_claims > 0 then
        raise exception 'p_settings: a consumer with ordering=none begins or ceases to go by key (fair, per_key_limit, per_key_interval) while it is '
                        'paused and has no claims; % is %, and has %',
                        quote_literal(p_consumer.name), case when p_consumer.paused then 'paused' else 'not paused' end, v_claims
            using errcode = 'PQ003', column = 'p_settings',
                  hint = 'Pause it, and wait until its claims are settled or expired, or create it with these settings. Nothing was changed.';
    end if;
    v_cursor.scan_from := '{}';
    v_cursor.scan_lanes_from := null;
    v_cursor := pgqueue._lower_scan_from(v_cursor, array(
        select (lane, min(line_no), 0)::pgqueue.line_place from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' group by lane));
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
end $$;

-- Lets the next dealers look at all keys that wait, because limits of the consumer are other ones now, and tells them of what is in flight, where
-- that did not count before. Locks: the consumer.
create or replace function pgqueue._change_limits(p_consumer pgqueue.consumers) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_keyed  pgqueue.keyed_messages;
    v_count  int;
begin
    perform pgqueue._lock_consumer(p_consumer.consumer_id);
    select * into v_stored from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id order by version desc limit 1;
    if not found then
        return;  -- it is being made
    end if;
    if p_consumer.ordering = 'none' and p_consumer.per_key_limit is not null then
        v_keyed := pgqueue._singly(pgqueue._by_key(p_consumer, array(
            select m from pgqueue.consumer_messages m
            where consumer_id = p_consumer.consumer_id and state = 'claimed'
              and not exists (select from pgqueue.pieces p where p.consumer_id = p_consumer.consumer_id and p.piece = m.piece))));
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq, claimed)
        select p_consumer.consumer_id, v_stored.last_line_no, r.piece, count(*), array_remove(array_agg(k.key), null), 0, 0, true
        from unnest(v_keyed.run_nos, v_keyed.keys) k (run_no, key)
        join (select ordinality as run_no, piece from unnest(v_keyed.runs) with ordinality) r using (run_no)
        group by r.piece;
    end if;
    if p_consumer.per_key_interval is null then
        delete from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id and message_count = 0;
    end if;
    with freed as (
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq)
        select p_consumer.consumer_id, v_stored.last_line_no + part, v_stored.last_line_no + part, 0, array_agg(key), 0, 0
        from (select key, (row_number() over (order by key) - 1) / 1000 + 1 as part
              from (select distinct key from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id and state = 'waiting' and key is not null) w) k
        group by part
        returning 1
    )
    select count(*) into v_count from freed;
    v_cursor := v_stored;
    v_cursor.last_line_no := v_stored.last_line_no + v_count;
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
end $$;
