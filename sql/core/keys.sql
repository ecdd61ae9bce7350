-- Claiming for ordered consumers: a message is not delivered while an earlier one of its key is unsettled elsewhere.
--
-- Runs wait in one line in the order of arrival, their keys mixed. While nobody else has a claim and no key is blocked,
-- a claim takes from the front and needs to know no key: one reader that takes everything, as Spark does, pays
-- nothing for the order. Only when a second claimer comes are the runs of the open claim split by key; and when the line
-- reaches a message whose key is busy, delayed or failed, it is blocked, that is set aside into runs of that key:
--
--     waiting  behind an earlier run of its key, or its key is claimed
--     delayed  the first of its key, which is idle; not visible yet
--     ready    the first of its key, which is idle; has its own place in lane -1
--
-- Runs are set aside as waiting, and only _promote makes one delayed or ready.
--
-- So the messages of a key are, in order: claimed, then set aside, then in the line. All transitions hold the consumer's lock.
-- With ordering=stream all messages have one key, ''.

-- The key that orders a message of a consumer, as SQL over a message m.
create or replace function pgqueue._key_of(p_consumer pgqueue.consumers) returns text
language sql immutable
as $$ select case p_consumer.ordering when 'stream' then $q$''::text$q$ else 'm.key' end $$;

-- Whether a claim holds messages of a key.
--   p_except  other than this one; null: any
create or replace function pgqueue._key_is_claimed(p_cursor pgqueue.consumer_cursors, p_key text, p_except bigint) returns boolean
language plpgsql stable
as $$
begin
    -- "limit 1" in place of "exists", which Postgres would now and then answer by reading and hashing all claimed runs
    return coalesce((select true from pgqueue.consumer_messages
                     where consumer_id = p_cursor.consumer_id and key = p_key and state = 'claimed'
                       and claim_id >= p_cursor.busy_from and claim_id is distinct from p_except limit 1), false);
end $$;

-- Splits the mixed runs of a claim by key. Messages that are gone stay in it, without a key.
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
            select consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, own_key, claim_id, last_delivered_at,
                   last_error, range_agg(int8range(seq, seq, '[]')) as seqs, count(*) as message_count
            from element
            group by consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, own_key, claim_id, last_delivered_at, last_error
        ), gone as (
            select consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, null::text as own_key, claim_id, last_delivered_at,
                   last_error, seqs - (select coalesce(range_agg(seqs), '{}') from run) as seqs
            from mixed
            where (select sum(message_count) from mixed) is distinct from (select sum(message_count) from run)
        )
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs,
                                               key, claim_id, last_delivered_at, last_error)
        select consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, c.first_seq, c.message_count, c.seqs,
               own_key, claim_id, last_delivered_at, last_error
        from (select consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, own_key, claim_id, last_delivered_at, last_error, seqs from run
              union all select * from gone) r
        cross join lateral pgqueue._chunks(r.seqs) c $q$,
        p_consumer.stream_id, pgqueue._key_of(p_consumer)) using p_claim_id, p_keys;
end $$;

-- Makes the first run of each idle key among p_keys ready, or delayed if it is. Needs the consumer's lock.
create or replace function pgqueue._promote(p_cursor pgqueue.consumer_cursors, p_keys text[]) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now timestamptz := clock_timestamp();
    v_count bigint;
    v_due   timestamptz;
begin
    if p_cursor.blocked = 0 then
        return p_cursor;
    end if;
    with head as (
        select h.ctid, h.not_visible_until, row_number() over (order by h.arrival_no, h.first_seq) as i
        from (select distinct k as key from unnest(p_keys) k where k is not null) k
        cross join lateral (
            select m.ctid, m.state, m.not_visible_until, m.arrival_no, m.first_seq from pgqueue.consumer_messages m
            where m.consumer_id = p_cursor.consumer_id and m.key = k.key and m.state <> 'claimed'
            order by m.arrival_no, m.first_seq limit 1) h
        where h.state = 'waiting'
          and not pgqueue._key_is_claimed(p_cursor, k.key, null)
    ), promoted as (
        update pgqueue.consumer_messages m
        set state = case when m.not_visible_until > v_now then 'delayed' else 'ready' end, line_no = p_cursor.last_line_no + head.i,
            not_visible_until = case when m.not_visible_until > v_now then m.not_visible_until end
        from head where m.ctid = head.ctid
        returning m.not_visible_until
    )
    select count(*), min(not_visible_until) into v_count, v_due from promoted;
    if v_count > 0 then
        p_cursor.due_from := least(p_cursor.due_from, v_due);
        p_cursor := pgqueue._lower_scan_from(p_cursor, array[(-1, p_cursor.last_line_no + 1, 0)::pgqueue.line_place]);
        p_cursor.last_line_no := p_cursor.last_line_no + v_count;
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
    v_had := pgqueue._held_by(p_claim_id);
    v_others := v_cursor.open_claims > (case when v_had > 0 then 1 else 0 end);
    if v_others and p_consumer.ordering = 'stream' then
        return v_cursor;
    end if;
    if v_others and v_cursor.unsplit_claim is not null then
        perform pgqueue._split_by_key(p_consumer, v_cursor.unsplit_claim, null);
        v_cursor.unsplit_claim := null;
    end if;

    -- keys that are set aside and the line are served first in turn, so that neither starves
    if v_cursor.unblocked_first or p_consumer.ordering = 'stream' then
        v_cursor := pgqueue._serve_unblocked(v_cursor, p_claim_id, p_want);
        v_got := pgqueue._held_by(p_claim_id) - v_had;
        v_cursor := pgqueue._serve_line(p_consumer, v_cursor, p_claim_id, p_want - v_got, v_others);
    else
        v_cursor := pgqueue._serve_line(p_consumer, v_cursor, p_claim_id, p_want, v_others);
        v_got := pgqueue._held_by(p_claim_id) - v_had;
        v_cursor := pgqueue._serve_unblocked(v_cursor, p_claim_id, p_want - v_got);
    end if;
    v_got := pgqueue._held_by(p_claim_id) - v_had;

    if v_got > 0 then
        if v_had = 0 then
            v_cursor.busy_from := case when v_others then least(v_cursor.busy_from, p_claim_id) else p_claim_id end;
            v_cursor.open_claims := v_cursor.open_claims + 1;
        end if;
        if not v_others then
            v_cursor.unsplit_claim := p_claim_id;
        end if;
        v_cursor := pgqueue._raise_scan_from(v_cursor);
        v_cursor.unblocked_first := not v_cursor.unblocked_first;
    end if;
    return v_cursor;
end $$;

-- Claims keys that were set aside and are ready, each with what follows in it while there is room.
create or replace function pgqueue._serve_unblocked(p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_left bigint := p_want;
    v_from pgqueue.line_place;  -- dead rows lie before it
    v_tid  tid;
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
begin
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = -1;
    while v_left > 0 and p_cursor.blocked > 0 and v_from.lane is not null loop
        v_tid := (pgqueue._next_ready(p_cursor.consumer_id, v_from)).run_ctid;
        exit when v_tid is null;
        loop
            delete from pgqueue.consumer_messages where ctid = v_tid returning * into v_run;
            if v_run.state = 'ready' then
                v_from.line_no := v_run.line_no;
                v_from.first_seq := v_run.first_seq + 1;
            end if;
            v_part := v_run.seqs;
            if v_run.message_count > v_left then
                v_part := pgqueue._below(v_run.seqs, pgqueue._bound_of(v_run.seqs, v_left));
                v_run.state := 'waiting';
                perform pgqueue._store_run(v_run, v_run.seqs - v_part);
            else
                p_cursor.blocked := p_cursor.blocked - 1;
            end if;
            v_left := v_left - least(v_run.message_count, v_left);
            perform pgqueue._claim_run(v_run, v_part, p_claim_id);
            exit when v_left = 0;
            select ctid into v_tid from pgqueue.consumer_messages
            where consumer_id = p_cursor.consumer_id and key = v_run.key and state <> 'claimed'
              and (arrival_no, first_seq) > (v_run.arrival_no, v_run.first_seq)
            order by arrival_no, first_seq limit 1;
            exit when not found
                or (select not_visible_until > clock_timestamp() from pgqueue.consumer_messages where ctid = v_tid);
        end loop;
    end loop;
    return p_cursor;
end $$;

-- Claims from the front of the line. It looks at a bounded number of messages: where all of those are blocked, it claims nothing, and the
-- next claim goes on behind them.
--   p_others  other claims are open: their keys are busy, and the claim's own runs are split by key
create or replace function pgqueue._serve_line(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint,
                                               p_want bigint, p_others boolean) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_left    bigint := p_want;
    v_more    bigint := least(4 + p_want / 4, pgqueue._limit_look());  -- looks at as many more, in place of those that are blocked
    v_looked  bigint := 0;
    v_now     timestamptz := clock_timestamp();
    v_from    pgqueue.line_place;
    v_line_no bigint;
    v_first   bigint;  -- where what is left of its line_no begins: dead rows lie before it
    v_count   bigint;
    v_later   bigint;  -- the first message of the line_no that may be delayed
    v_room    bigint;  -- messages to look at
    v_below   bigint;
    v_walk    record;
begin
    select f.* into v_from from unnest(p_cursor.scan_from) f where f.lane = 0;
    while v_left > 0 and v_from.lane is not null loop
        select n.line_no, n.first_seq into v_line_no, v_first from pgqueue._next_ready(p_cursor.consumer_id, v_from) n;
        exit when v_line_no is null;
        v_from.line_no := v_line_no;
        v_from.first_seq := v_first;
        -- the runs of one line_no interleave: they go by seq
        select sum(message_count), min(first_seq) filter (where not_visible_until > v_now) into v_count, v_later
        from pgqueue.consumer_messages
        where consumer_id = p_cursor.consumer_id and state = 'ready' and lane = 0 and line_no = v_line_no and first_seq >= v_first;

        if p_consumer.ordering = 'stream' then
            exit when p_cursor.blocked > 0 or v_first = v_later;
            v_below := least(pgqueue._line_bound(p_cursor.consumer_id, v_line_no, v_first, v_count, v_left), v_later);
            v_left := v_left - pgqueue._claim_below(p_cursor.consumer_id, v_line_no, v_first, v_below, p_claim_id);
        elsif p_cursor.blocked = 0 and not p_others and v_later is null then
            v_below := pgqueue._line_bound(p_cursor.consumer_id, v_line_no, v_first, v_count, v_left);
            v_left := v_left - pgqueue._claim_below(p_cursor.consumer_id, v_line_no, v_first, v_below, p_claim_id);
        else
            v_room := v_left + least(v_more, greatest(pgqueue._limit_looks() - v_looked, 1));
            v_below := pgqueue._line_bound(p_cursor.consumer_id, v_line_no, v_first, v_count, v_room);
            v_walk := pgqueue._walk(p_consumer, p_cursor, v_line_no, v_first, v_below, least(v_count, v_room), p_claim_id, v_left, p_others, v_now);
            v_left := v_left - v_walk.o_claimed;
            v_looked := v_looked + v_walk.o_looked;
            p_cursor.blocked := p_cursor.blocked + v_walk.o_blocked;
            p_cursor.due_from := least(p_cursor.due_from, v_now);  -- what it set aside as delayed is due later than now
            if v_walk.o_keys <> '{}' then
                if not p_others then
                    perform pgqueue._split_by_key(p_consumer, p_claim_id, v_walk.o_keys);
                end if;
                p_cursor := pgqueue._promote(p_cursor, v_walk.o_keys);
            end if;
            exit when v_looked >= pgqueue._limit_looks() + p_want - v_left;
            v_more := least(v_more * 4, pgqueue._limit_looks());
        end if;
    end loop;
    return p_cursor;
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
          where consumer_id = p_consumer_id and state = 'ready' and lane = 0 and line_no = p_line_no and first_seq >= p_first) r
    where before < p_room;
    select pgqueue._bound_of(range_agg(seqs), p_room) into v_below
    from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and state = 'ready' and lane = 0 and line_no = p_line_no and first_seq >= p_first and first_seq < v_below;
    return v_below;
end $$;

-- Claims the messages of one line_no, from p_first, below a bound, keys mixed. Returns how many.
create or replace function pgqueue._claim_below(p_consumer_id int, p_line_no bigint, p_first bigint, p_below bigint, p_claim_id bigint) returns bigint
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
    v_count bigint := 0;
begin
    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and state = 'ready' and lane = 0 and line_no = p_line_no and first_seq >= p_first and first_seq < p_below
        returning *
    loop
        v_part := pgqueue._below(v_run.seqs, p_below);
        if v_part <> v_run.seqs then
            perform pgqueue._store_run(v_run, v_run.seqs - v_part);
        end if;
        v_count := v_count + pgqueue._claim_run(v_run, v_part, p_claim_id);
    end loop;
    return v_count;
end $$;

-- Walks the messages of one line_no, from p_first, below a bound, by seq: claims those whose key is free and sets the others
-- aside, until p_want are claimed.
--   p_count  how many messages these are
-- Returns how many messages were looked at and claimed, how many runs were set aside, and for which keys. One statement judges, and so is long.
create or replace function pgqueue._walk(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_line_no bigint, p_first bigint, p_below bigint, p_count bigint,
                                         p_claim_id bigint, p_want bigint, p_split boolean, p_now timestamptz,
                                         out o_looked bigint, out o_claimed bigint, out o_blocked bigint, out o_keys text[])
language plpgsql
as $$
declare
    v_element record;
    v_gone    int8multirange;
    v_stop    bigint;
    v_run     pgqueue.consumer_messages;
begin
    -- only this much is planned again by each call
    execute format($q$
        select array_agg(m.seq) as seq, array_agg(%2$s) as key, array_agg(r.priority) as priority,
               array_agg(r.deliver_count) as deliver_count, array_agg(r.arrival_no) as arrival_no,
               array_agg(r.not_visible_until) as not_visible_until, array_agg(r.last_error) as last_error
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral (select seq, key from pgqueue.messages_%1$s where seq >= lower(g) and seq < least(upper(g), $3)) m
        where r.consumer_id = $1 and r.state = 'ready' and r.lane = 0 and r.line_no = $2 and r.first_seq >= $4 and r.first_seq < $3 $q$,
        p_consumer.stream_id, pgqueue._key_of(p_consumer))
    into v_element using p_consumer.consumer_id, p_line_no, p_below, p_first;
    if p_count <> coalesce(cardinality(v_element.seq), 0) then
        -- messages that are gone are claimed like others without a key, so that they are told, and end
        v_gone := pgqueue._below((select range_agg(seqs) from pgqueue.consumer_messages
                                  where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 0 and line_no = p_line_no
                                    and first_seq >= p_first and first_seq < p_below), p_below) - coalesce(pgqueue._set_of(v_element.seq), '{}');
        select v_element.seq || array_agg(s), v_element.key || array_agg(null::text), v_element.priority || array_agg(r.priority),
               v_element.deliver_count || array_agg(r.deliver_count), v_element.arrival_no || array_agg(r.arrival_no),
               v_element.not_visible_until || array_agg(r.not_visible_until), v_element.last_error || array_agg(r.last_error)
        into v_element.seq, v_element.key, v_element.priority, v_element.deliver_count, v_element.arrival_no, v_element.not_visible_until, v_element.last_error
        from pgqueue.consumer_messages r cross join lateral unnest(r.seqs * v_gone) g cross join lateral generate_series(lower(g), upper(g) - 1) s
        where r.consumer_id = p_consumer.consumer_id and r.state = 'ready' and r.lane = 0 and r.line_no = p_line_no
          and r.first_seq >= p_first and r.first_seq < p_below;
    end if;

    with element as materialized (
        select *, coalesce(not_visible_until > p_now, false) as later
        from unnest(v_element.seq, v_element.key, v_element.priority, v_element.deliver_count, v_element.arrival_no,
                    v_element.not_visible_until, v_element.last_error)
             e (seq, key, priority, deliver_count, arrival_no, not_visible_until, last_error)
    ), busy as materialized (
        select k.key from (select distinct key from element where key is not null) k  -- as _key_is_claimed, 3 us less for each key
        where (select true from pgqueue.consumer_messages c
               where c.consumer_id = p_consumer.consumer_id and c.key = k.key and c.state = 'claimed'
                 and c.claim_id >= p_cursor.busy_from and c.claim_id <> p_claim_id limit 1)
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
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count,
                                               seqs, key, claim_id, last_delivered_at, last_error)
        select p_consumer.consumer_id, 'claimed', 0, r.priority, r.deliver_count + 1, r.arrival_no, r.arrival_no, c.first_seq, c.message_count, c.seqs,
               r.own_key, p_claim_id, p_now, r.last_error
        from (select priority, deliver_count, arrival_no, last_error, case when p_split then key end as own_key,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from walked where not blocked group by 1, 2, 3, 4, 5) r
        cross join lateral pgqueue._chunks(r.seqs) c
        returning message_count
    ), blocked as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count,
                                               seqs, key, not_visible_until, last_error)
        select p_consumer.consumer_id, case when r.key is null then 'delayed' else 'waiting' end, case when r.key is null then 0 else -1 end,
               r.priority, r.deliver_count, r.arrival_no, r.arrival_no, c.first_seq, c.message_count, c.seqs, r.key, r.not_visible_until, r.last_error
        from (select priority, deliver_count, arrival_no, last_error, key, not_visible_until, island,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by seq)
                           - row_number() over (partition by key, priority, deliver_count, not_visible_until, last_error order by seq) as island
                    from walked where blocked) i
              group by priority, deliver_count, arrival_no, last_error, key, not_visible_until, island) r
        cross join lateral pgqueue._chunks(r.seqs) c
        returning key
    )
    select case when (select count(*) from walked where not blocked) < p_want then p_below - 1 else (select max(seq) from walked) end,
           (select count(*) from walked), (select coalesce(sum(message_count), 0) from claimed),
           (select count(*) from blocked where key is not null),
           array(select distinct key from blocked where key is not null)
    into v_stop, o_looked, o_claimed, o_blocked, o_keys;

    for v_run in
        delete from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 0 and line_no = p_line_no and first_seq >= p_first and first_seq <= v_stop
        returning *
    loop
        perform pgqueue._store_run(v_run, v_run.seqs - int8multirange(int8range(null, v_stop, '[]')));
    end loop;
end $$;

-- Puts messages of an ordered consumer's claim aside: of each key the first failed one and all that follow it in the claim.
-- Returns the keys, how many runs now are set aside, and the places of runs without a key that are back in the line. One statement judges, and so is long.
create or replace function pgqueue._return_by_key(
    p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims, p_set int8multirange,
    p_until timestamptz, p_reason text, out o_keys text[], out o_blocked bigint, out o_places pgqueue.line_place[])
language plpgsql
as $$
declare
    v_gone int8multirange;
begin
    if p_cursor.unsplit_claim = p_claim.claim_id then
        if p_set is not null then
            execute format($q$
                select coalesce(array_agg(distinct %2$s) filter (where %2$s is not null), '{}')
                from pgqueue.consumer_messages r
                cross join lateral unnest(r.seqs * $2) g
                cross join lateral (select key from pgqueue.messages_%1$s where seq >= lower(g) and seq < upper(g)) m
                where r.claim_id = $1 and r.state = 'claimed' and r.key is null $q$, p_consumer.stream_id, pgqueue._key_of(p_consumer))
            into o_keys using p_claim.claim_id, p_set;
            -- a key that was set aside was claimed as a run of its own; more of it may have come from the line
            o_keys := o_keys || array(select distinct key from pgqueue.consumer_messages
                                      where claim_id = p_claim.claim_id and state = 'claimed' and case when key is not null then seqs && p_set end);
        end if;
        if o_keys is distinct from '{}' then
            perform pgqueue._split_by_key(p_consumer, p_claim.claim_id, o_keys);
        end if;
    end if;

    with failed as materialized (
        select distinct key from pgqueue.consumer_messages
        where claim_id = p_claim.claim_id and state = 'claimed'
          and case when key is not null then p_set is null or seqs && p_set end  -- opaque: or else the index of busy keys is read for it
    ), element as (
        select r.key, r.arrival_no, r.priority, r.deliver_count, r.last_error, r.claim_id, s as seq,
               coalesce(p_set @> s, true) as failed,
               coalesce(coalesce(p_set @> s, true) and r.deliver_count >= p_consumer.max_deliver_count, false) as dead
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) s
        where r.claim_id = p_claim.claim_id and r.state = 'claimed'
          and (r.key in (select key from failed) or (r.key is null and (p_set is null or r.seqs && p_set)))
    ), judged as (
        select *, case when key is null then failed
                       else bool_or(failed and not dead) over (partition by key order by arrival_no, seq) end and not dead as back
        from element
    ), gone as materialized (
        select key, arrival_no, priority, last_error, claim_id, seq, failed, dead, deliver_count - (not failed)::int as deliver_count
        from judged where back or dead
    ), buried as (
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason, claim_id)
        select p_consumer.stream_id, p_consumer.consumer_id, range_agg(int8range(seq, seq, '[]')), count(*), priority, deliver_count,
               coalesce(p_reason, 'returned'), claim_id
        from gone where dead group by priority, deliver_count, claim_id
    ), back as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs,
                                               key, not_visible_until, last_error)
        select p_consumer.consumer_id,
               case when i.key is not null then 'waiting' when i.failed and p_until is not null then 'delayed' else 'ready' end,
               case when i.key is not null then -1 else 0 end,
               i.priority, i.deliver_count, i.arrival_no, i.arrival_no, c.first_seq, c.message_count, c.seqs,
               i.key, case when i.failed then p_until end, case when i.failed then p_reason else i.last_error end
        from (select key, arrival_no, priority, deliver_count, failed, last_error, island, range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by arrival_no, seq)
                              - row_number() over (partition by key, arrival_no, priority, deliver_count, failed, last_error order by seq) as island
                    from gone where not dead) e
              group by key, arrival_no, priority, deliver_count, failed, last_error, island) i
        cross join lateral pgqueue._chunks(i.seqs) c
        returning state, key, lane, line_no, first_seq
    )
    select array(select key from failed), (select count(*) from back where key is not null),
           array(select (lane, line_no, first_seq)::pgqueue.line_place from back where state = 'ready'),
           (select range_agg(int8range(seq, seq, '[]')) from gone)
    into o_keys, o_blocked, o_places, v_gone;

    perform pgqueue._take_out(p_claim.claim_id, v_gone) where v_gone is not null;
end $$;
