-- Claiming for ordered consumers: a message is not delivered while an earlier one of its key is unsettled elsewhere.
--
-- Runs wait in one line in the order of arrival, their keys mixed. While nobody else has a claim and no key stands
-- aside, a claim takes from the front and needs to know no key: one reader that takes everything, as Spark does, pays
-- nothing for the order. Only when a second claimer comes are the runs of the open claim split by key, and when the line
-- reaches a message whose key is busy, delayed or failed, it is set aside into runs of that key:
--
--     waiting  behind an earlier run of its key, or its key is claimed
--     delayed  the first of its key, which is idle; not visible yet
--     ready    the first of its key, which is idle; has its own turn in the line of rank -1
--
-- Runs are set aside as waiting, and only _promote makes one delayed or ready.
--
-- Whether a key is busy is asked with a "limit 1" in place of "exists", which Postgres would now and then answer by reading
-- and hashing all claimed runs.
--
-- So the messages of a key are, in order: claimed, then aside, then in the line. All transitions hold the consumer's lock.
-- With ordering=stream all messages have one key, ''.

-- The key that orders a message of a consumer, as SQL over a message m.
create or replace function pgqueue._key_of(p_consumer pgqueue.consumers) returns text
language sql immutable
as $$ select case p_consumer.ordering when 'stream' then $q$''::text$q$ else 'm.key' end $$;

-- Splits the mixed runs of a claim by key.
--   p_keys  only these keys leave the mixed runs; null: all
create or replace function pgqueue._split_by_key(p_consumer pgqueue.consumers, p_claim_id bigint, p_keys text[]) returns void
language plpgsql
as $$
begin
    execute format($q$
        with mixed as (
            delete from pgqueue.consumer_messages where claim_id = $1 and state = 'claimed' and key is null returning *
        ), element as (
            select r.*, m.seq, case when $2 is null or %2$s = any ($2) then %2$s end as own_key
            from mixed r
            cross join lateral unnest(r.seqs) g
            cross join lateral (select seq, key from pgqueue.messages_%1$s where seq >= lower(g) and seq < upper(g)) m
        ), run as (
            select consumer_id, state, rank, priority, deliver_count, position, turn, own_key, claim_id, last_delivered_at,
                   last_error, range_agg(int8range(seq, seq, '[]')) as seqs
            from element
            group by consumer_id, state, rank, priority, deliver_count, position, turn, own_key, claim_id, last_delivered_at, last_error
        )
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs,
                                               key, claim_id, last_delivered_at, last_error)
        select consumer_id, state, rank, priority, deliver_count, position, turn, c.first_seq, c.n, c.seqs,
               own_key, claim_id, last_delivered_at, last_error
        from run cross join lateral pgqueue._chunks(run.seqs) c $q$,
        p_consumer.stream_id, pgqueue._key_of(p_consumer)) using p_claim_id, p_keys;
end $$;

-- Makes the first run of each idle key among p_keys ready, or delayed if it is. Needs the consumer's lock.
create or replace function pgqueue._promote(p_cursor pgqueue.consumer_cursors, p_keys text[]) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now timestamptz := clock_timestamp();
    v_n   bigint;
    v_due timestamptz;
begin
    if p_cursor.aside = 0 then
        return p_cursor;
    end if;
    with head as (
        select h.ctid, h.not_visible_until, row_number() over (order by h.position, h.first_seq) as i
        from (select distinct k as key from unnest(p_keys) k where k is not null) k
        cross join lateral (
            select m.ctid, m.state, m.not_visible_until, m.position, m.first_seq from pgqueue.consumer_messages m
            where m.consumer_id = p_cursor.consumer_id and m.key = k.key and m.state <> 'claimed'
            order by m.position, m.first_seq limit 1) h
        where h.state = 'waiting'
          and (select true from pgqueue.consumer_messages b
               where b.consumer_id = p_cursor.consumer_id and b.key = k.key and b.state = 'claimed'
                 and b.claim_id >= p_cursor.first_claim limit 1) is null
    ), promoted as (
        update pgqueue.consumer_messages m
        set state = case when m.not_visible_until > v_now then 'delayed' else 'ready' end, turn = p_cursor.turn + head.i,
            not_visible_until = case when m.not_visible_until > v_now then m.not_visible_until end
        from head where m.ctid = head.ctid
        returning m.not_visible_until
    )
    select count(*), min(not_visible_until) into v_n, v_due from promoted;
    if v_n > 0 then
        p_cursor.due_floor := least(p_cursor.due_floor, v_due);
        p_cursor.floors := pgqueue._lower_floors(p_cursor.floors, array[(-1, p_cursor.turn + 1, 0)::pgqueue.floor]);
        p_cursor.turn := p_cursor.turn + v_n;
    end if;
    return p_cursor;
end $$;

-- Serves a claim of an ordered consumer. Needs the consumer's lock.
--   p_want  messages at most
-- Returns the cursor; the claim counts as open in it if it has any message.
create or replace function pgqueue._serve_ordered(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  p_claim_id bigint, p_want bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_had    bigint;  -- what the claim has, from an earlier pass
    v_got    bigint;
    v_others boolean; -- other claims are open
begin
    v_had := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed');
    v_others := v_cursor.open_claims > (case when v_had > 0 then 1 else 0 end);
    if v_others and p_consumer.ordering = 'stream' then
        return v_cursor;
    end if;
    if v_others and v_cursor.mixed_claim is not null then
        perform pgqueue._split_by_key(p_consumer, v_cursor.mixed_claim, null);
        v_cursor.mixed_claim := null;
    end if;

    -- keys that stand aside and the line are served first in turn, so that neither starves
    if v_cursor.heads_first or p_consumer.ordering = 'stream' then
        v_cursor := pgqueue._serve_heads(v_cursor, p_claim_id, p_want);
        v_got := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') - v_had;
        v_cursor := pgqueue._serve_line(p_consumer, v_cursor, p_claim_id, p_want - v_got, v_others);
    else
        v_cursor := pgqueue._serve_line(p_consumer, v_cursor, p_claim_id, p_want, v_others);
        v_got := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') - v_had;
        v_cursor := pgqueue._serve_heads(v_cursor, p_claim_id, p_want - v_got);
    end if;
    v_got := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') - v_had;

    if v_got > 0 then
        if v_had = 0 then
            v_cursor.first_claim := case when v_others then least(v_cursor.first_claim, p_claim_id) else p_claim_id end;
            v_cursor.open_claims := v_cursor.open_claims + 1;
        end if;
        if not v_others then
            v_cursor.mixed_claim := p_claim_id;
        end if;
        v_cursor.floors := pgqueue._raise_floors(v_cursor);
        v_cursor.heads_first := not v_cursor.heads_first;
    end if;
    return v_cursor;
end $$;

-- Claims keys that stand aside and are ready, each with what follows in it while there is room.
create or replace function pgqueue._serve_heads(p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_left bigint := p_want;
    v_now  timestamptz := clock_timestamp();
    v_tid  tid;
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
begin
    while v_left > 0 and p_cursor.aside > 0 loop
        select m.ctid into v_tid
        from unnest(p_cursor.floors) f
        cross join lateral (select ctid from pgqueue.consumer_messages
                            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = -1
                              and (turn, first_seq) >= (f.turn, f.first_seq)
                            order by turn, first_seq limit 1) m
        where f.rank = -1;
        exit when not found;
        loop
            delete from pgqueue.consumer_messages where ctid = v_tid returning * into v_run;
            v_part := v_run.seqs;
            if v_run.n > v_left then
                v_part := pgqueue._below(v_run.seqs, pgqueue._bound_of(v_run.seqs, v_left));
                v_run.state := 'waiting';
                perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
            else
                p_cursor.aside := p_cursor.aside - 1;
            end if;
            v_left := v_left - least(v_run.n, v_left);
            v_run.state := 'claimed';
            v_run.claim_id := p_claim_id;
            v_run.deliver_count := v_run.deliver_count + 1;
            v_run.not_visible_until := null;
            v_run.last_delivered_at := v_now;
            perform pgqueue._insert_run(v_run, v_part);
            exit when v_left = 0;
            select ctid into v_tid from pgqueue.consumer_messages
            where consumer_id = p_cursor.consumer_id and key = v_run.key and state <> 'claimed'
            order by position, first_seq limit 1;
            exit when not found
                or (select not_visible_until > v_now from pgqueue.consumer_messages where ctid = v_tid);
        end loop;
    end loop;
    return p_cursor;
end $$;

-- Claims from the front of the line.
--   p_others  other claims are open: their keys are busy, and the claim's own runs are split by key
create or replace function pgqueue._serve_line(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint,
                                               p_want bigint, p_others boolean) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_left  bigint := p_want;
    v_slack bigint := least(4 + p_want / 4, 100);  -- as many more, in place of those that are set aside
    v_now   timestamptz := clock_timestamp();
    v_turn  bigint;
    v_n     bigint;
    v_first bigint;  -- where what is left of the turn begins: dead rows lie before it
    v_later bigint;  -- the first message of the turn that may be delayed
    v_below bigint;
    v_walk  record;
begin
    while v_left > 0 loop
        select m.turn, m.first_seq into v_turn, v_first
        from unnest(p_cursor.floors) f
        cross join lateral (select turn, first_seq from pgqueue.consumer_messages
                            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = 0
                              and (turn, first_seq) >= (f.turn, f.first_seq)
                            order by turn, first_seq limit 1) m
        where f.rank = 0;
        exit when not found;
        -- the runs of one turn interleave: they go by seq
        select sum(n), min(first_seq) filter (where not_visible_until > v_now) into v_n, v_later
        from pgqueue.consumer_messages
        where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = 0 and turn = v_turn and first_seq >= v_first;

        if p_consumer.ordering = 'stream' then
            exit when p_cursor.aside > 0 or v_first = v_later;
            v_below := least(pgqueue._line_bound(p_cursor.consumer_id, v_turn, v_first, v_n, v_left), v_later);
            v_left := v_left - pgqueue._claim_below(p_cursor.consumer_id, v_turn, v_first, v_below, p_claim_id);
        elsif p_cursor.aside = 0 and not p_others and v_later is null then
            v_below := pgqueue._line_bound(p_cursor.consumer_id, v_turn, v_first, v_n, v_left);
            v_left := v_left - pgqueue._claim_below(p_cursor.consumer_id, v_turn, v_first, v_below, p_claim_id);
        else
            v_below := pgqueue._line_bound(p_cursor.consumer_id, v_turn, v_first, v_n, v_left + v_slack);
            select * into v_walk from pgqueue._walk(p_consumer, p_cursor, v_turn, v_first, v_below, p_claim_id, v_left, p_others, v_now);
            v_left := v_left - v_walk.o_claimed;
            p_cursor.aside := p_cursor.aside + v_walk.o_aside;
            p_cursor.due_floor := least(p_cursor.due_floor, v_now);  -- what it set aside as delayed is due later than now
            if v_walk.o_keys <> '{}' then
                if not p_others then
                    perform pgqueue._split_by_key(p_consumer, p_claim_id, v_walk.o_keys);
                end if;
                p_cursor := pgqueue._promote(p_cursor, v_walk.o_keys);
            end if;
            exit when v_slack >= 10000 and v_left < p_want;  -- enough for one claim
            v_slack := least(v_slack * 4, 10000);
        end if;
    end loop;
    return p_cursor;
end $$;

-- The bound below which the runs of a turn in the line, from p_first, have p_room messages; beyond all if they have no more.
create or replace function pgqueue._line_bound(p_consumer_id int, p_turn bigint, p_first bigint, p_n bigint, p_room bigint) returns bigint
language plpgsql stable
as $$
declare
    v_below bigint := 9223372036854775807;
begin
    if p_n <= p_room then
        return v_below;
    end if;
    -- from the first runs that suffice; then once more with the runs that begin below that bound
    select pgqueue._bound_of(range_agg(seqs), p_room) into v_below
    from (select seqs, sum(n) over (order by first_seq) - n as before
          from pgqueue.consumer_messages
          where consumer_id = p_consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first) r
    where before < p_room;
    select pgqueue._bound_of(range_agg(seqs), p_room) into v_below
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first and first_seq < v_below;
    return v_below;
end $$;

-- Claims the messages of a turn in the line, from p_first, below a bound, keys mixed. Returns how many.
create or replace function pgqueue._claim_below(p_consumer_id int, p_turn bigint, p_first bigint, p_below bigint, p_claim_id bigint) returns bigint
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
    v_n    bigint := 0;
begin
    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first and first_seq < p_below
        returning *
    loop
        v_part := pgqueue._below(v_run.seqs, p_below);
        if v_part <> v_run.seqs then
            perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
        end if;
        v_run.state := 'claimed';
        v_run.claim_id := p_claim_id;
        v_run.deliver_count := v_run.deliver_count + 1;
        v_run.not_visible_until := null;
        v_run.last_delivered_at := clock_timestamp();
        v_n := v_n + pgqueue._insert_run(v_run, v_part);
    end loop;
    return v_n;
end $$;

-- Walks the messages of a turn in the line, from p_first, below a bound, by seq: claims those whose key is free and sets the others
-- aside, until p_want are claimed.
-- Returns how many were claimed, how many runs were set aside, and for which keys.
create or replace function pgqueue._walk(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_turn bigint, p_first bigint, p_below bigint,
                                         p_claim_id bigint, p_want bigint, p_split boolean, p_now timestamptz,
                                         out o_claimed bigint, out o_aside bigint, out o_keys text[])
language plpgsql
set enable_hashjoin = on
set enable_nestloop = off
as $$
declare
    v_element record;
    v_stop    bigint;
    v_run     pgqueue.consumer_messages;
begin
    -- only this much is planned again by each call
    execute format($q$
        select array_agg(m.seq) as seq, array_agg(%2$s) as key, array_agg(r.priority) as priority,
               array_agg(r.deliver_count) as deliver_count, array_agg(r.position) as position,
               array_agg(r.not_visible_until) as not_visible_until, array_agg(r.last_error) as last_error
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral (select seq, key from pgqueue.messages_%1$s where seq >= lower(g) and seq < least(upper(g), $3)) m
        where r.consumer_id = $1 and r.state = 'ready' and r.rank = 0 and r.turn = $2 and r.first_seq >= $4 and r.first_seq < $3 $q$,
        p_consumer.stream_id, pgqueue._key_of(p_consumer))
    into v_element using p_consumer.consumer_id, p_turn, p_below, p_first;

    with element as materialized (
        select *, coalesce(not_visible_until > p_now, false) as later
        from unnest(v_element.seq, v_element.key, v_element.priority, v_element.deliver_count, v_element.position,
                    v_element.not_visible_until, v_element.last_error)
             e (seq, key, priority, deliver_count, position, not_visible_until, last_error)
    ), busy as materialized (
        select k.key from (select distinct key from element where key is not null) k
        where (select true from pgqueue.consumer_messages c
               where c.consumer_id = p_consumer.consumer_id and c.key = k.key and c.state = 'claimed'
                 and c.claim_id >= p_cursor.first_claim and c.claim_id <> p_claim_id limit 1)
           or (select true from pgqueue.consumer_messages c
               where c.consumer_id = p_consumer.consumer_id and c.key = k.key and c.state <> 'claimed' limit 1)
    ), judged as (
        select e.*,
               case when e.key is null then e.later
                    else bool_or(b.key is not null or e.later) over (partition by e.key order by e.seq) end as blocked
        from element e left join busy b on b.key = e.key
    ), counted as (
        select *, count(*) filter (where not blocked) over (order by seq) as free from judged
    ), walked as materialized (
        select * from counted where free < p_want or (free = p_want and not blocked)
    ), claimed as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n,
                                               seqs, key, claim_id, last_delivered_at, last_error)
        select p_consumer.consumer_id, 'claimed', 0, r.priority, r.deliver_count + 1, r.position, r.position, c.first_seq, c.n, c.seqs,
               r.own_key, p_claim_id, p_now, r.last_error
        from (select priority, deliver_count, position, last_error, case when p_split then key end as own_key,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from walked where not blocked group by 1, 2, 3, 4, 5) r
        cross join lateral pgqueue._chunks(r.seqs) c
        returning n
    ), aside as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n,
                                               seqs, key, not_visible_until, last_error)
        select p_consumer.consumer_id, case when r.key is null then 'delayed' else 'waiting' end, case when r.key is null then 0 else -1 end,
               r.priority, r.deliver_count, r.position, r.position, c.first_seq, c.n, c.seqs, r.key, r.not_visible_until, r.last_error
        from (select priority, deliver_count, position, last_error, key, not_visible_until, island,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by seq)
                           - row_number() over (partition by key, priority, deliver_count, not_visible_until, last_error order by seq) as island
                    from walked where blocked) i
              group by priority, deliver_count, position, last_error, key, not_visible_until, island) r
        cross join lateral pgqueue._chunks(r.seqs) c
        returning key
    )
    select case when (select count(*) from walked where not blocked) < p_want then p_below - 1 else (select max(seq) from walked) end,
           (select coalesce(sum(n), 0) from claimed),
           (select count(*) from aside where key is not null),
           array(select distinct key from aside where key is not null)
    into v_stop, o_claimed, o_aside, o_keys;

    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' and rank = 0 and turn = p_turn and first_seq >= p_first and first_seq <= v_stop
        returning *
    loop
        perform pgqueue._insert_run(v_run, v_run.seqs - int8multirange(int8range(null, v_stop, '[]')));
    end loop;
end $$;
