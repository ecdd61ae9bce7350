-- Claiming: ready runs, in the order of the line, become a claim's.

-- Raises PQ007 unless each statement sees what was committed before it: claims and settlements decide by what they see
-- after they have a lock.
create or replace function pgqueue._check_isolation() returns void
language plpgsql stable
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claims and settlements need transaction isolation read committed, not %', current_setting('transaction_isolation')
            using errcode = 'PQ007', hint = 'begin transaction isolation level read committed';
    end if;
end $$;

-- What is due for a consumer before anything is claimed: expired leases are released, delays that are over end, and
-- new publications are taken, all bounded.
--   p_short  what was ready did not suffice. Otherwise leases are looked at once a second, and while more publications
--            wait than one take takes, none is taken: they are behind what is ready.
--   p_want   take until about this many messages came in, if there are so many
--   p_upto   no publication after this one; null: all
-- Returns the cursor as it is then; the caller stores it. Needs the consumer's lock.
create or replace function pgqueue._refresh(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_short boolean,
                                            p_want bigint, p_upto bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_now    timestamptz := clock_timestamp();
    v_lease  timestamptz;
    v_due    timestamptz;
    v_new    boolean;
    v_seen   int8multirange;
    v_wanted bigint := p_want;
begin
    if p_short or v_cursor.lease_probe <= v_now then
        v_lease := pgqueue._next_expiry(p_consumer.consumer_id);
        v_cursor.lease_probe := v_now + least(interval '1 s', p_consumer.visibility_timeout / 2);
        if v_lease <= v_now then
            v_cursor := pgqueue._expire(p_consumer, v_cursor, v_now);
        end if;
    end if;
    select (select not_visible_until from pgqueue.consumer_messages
            where consumer_id = p_consumer.consumer_id and state = 'delayed' and not_visible_until >= v_cursor.due_floor
            order by not_visible_until limit 1),
           v_cursor.seen <> int8multirange(int8range(1, upper(v_cursor.seen)))
           or exists (select from pgqueue.publications
                      where stream_id = p_consumer.stream_id and publication_id >= coalesce(upper(v_cursor.seen), 1))
    into v_due, v_new;
    if v_due <= v_now then
        v_cursor := pgqueue._end_delays(p_consumer, v_cursor, v_now);
    end if;
    if v_new and (p_short or not v_cursor.more) then
        for i in 1..100 loop
            v_seen := v_cursor.seen;
            v_cursor := pgqueue._take(p_consumer, v_cursor, p_upto, 10000);
            v_wanted := v_wanted - 10000;
            exit when not v_cursor.more or v_cursor.seen = v_seen or v_wanted <= 0;
        end loop;
    end if;
    return v_cursor;
end $$;

-- When the first lease of a consumer ends or ended; null: it has no claims.
create or replace function pgqueue._next_expiry(p_consumer_id int) returns timestamptz
language plpgsql stable
as $$
begin
    return (select lease_until from pgqueue.claims where consumer_id = p_consumer_id and live order by lease_until limit 1);
end $$;

-- Releases the expired claims of a consumer, at most 100. Needs the consumer's lock; locks those claims.
create or replace function pgqueue._expire(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_now timestamptz)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_claim  pgqueue.claims;
begin
    for v_claim in
        select * from pgqueue.claims
        where consumer_id = p_consumer.consumer_id and live and lease_until <= p_now
        order by lease_until limit 100
        for update skip locked  -- one that is locked is being settled or extended
    loop
        v_cursor := pgqueue._return(p_consumer, v_cursor, v_claim, null, interval '0', 'the visibility timeout passed');
        -- a reader's claim is kept, so that it can tell "taken over" from "gone"; a worker's was deleted with its last message
        update pgqueue.claims set live = false, settled = v_claim.settled where claim_id = v_claim.claim_id;
    end loop;
    return v_cursor;
end $$;

-- Makes the delayed runs that are due ready, at most 1,000. Needs the consumer's lock.
create or replace function pgqueue._end_delays(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_now timestamptz) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_places pgqueue.floor[];
    v_last   timestamptz;
    v_n      int;
begin
    with due as (
        select ctid, key, not_visible_until from pgqueue.consumer_messages
        where consumer_id = p_consumer.consumer_id and state = 'delayed'
          and not_visible_until >= v_cursor.due_floor and not_visible_until <= p_now
        order by not_visible_until limit 1000
        for update
    ), ended as (
        update pgqueue.consumer_messages m
        set state = case when (select true from pgqueue.consumer_messages b
                               where b.consumer_id = p_consumer.consumer_id and b.key = due.key and b.state = 'claimed'
                                 and b.claim_id >= v_cursor.first_claim limit 1)
                         then 'waiting' else 'ready' end,
            turn = case when due.key is null then m.position else v_cursor.turn + 1 end,
            not_visible_until = null
        from due
        where m.ctid = due.ctid
        returning m.state, m.rank, m.turn, m.first_seq, due.not_visible_until
    )
    select array_agg((rank, turn, first_seq)::pgqueue.floor) filter (where state = 'ready'), max(not_visible_until), count(*)
    into v_places, v_last, v_n
    from ended;
    v_cursor.turn := v_cursor.turn + 1;
    v_cursor.floors := pgqueue._lower_floors(v_cursor.floors, v_places);
    v_cursor.due_floor := case when v_n < 1000 then p_now else v_last end;
    return v_cursor;
end $$;

-- Serves a claim from the ready runs of a consumer with ordering=none, in the order of the line.
--   p_want  messages at most
-- Passes over runs that other claimers hold. Returns how many messages it got. Locks the runs it takes, one at a time.
create or replace function pgqueue._serve(p_cursor pgqueue.consumer_cursors, p_claim_id bigint, p_want bigint) returns bigint
language plpgsql
as $$
declare
    v_floor pgqueue.floor;
    v_run   record;
    v_n     bigint := 0;
begin
    foreach v_floor in array p_cursor.floors loop
        while v_n < p_want loop
            update pgqueue.consumer_messages
            set state = 'claimed', claim_id = p_claim_id, deliver_count = deliver_count + 1, not_visible_until = null,
                last_delivered_at = clock_timestamp()
            where ctid = (select ctid from pgqueue.consumer_messages
                          where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = v_floor.rank
                            and (turn, first_seq) >= (v_floor.turn, v_floor.first_seq)
                          order by turn, first_seq limit 1
                          for update skip locked)
              and n <= p_want - v_n
            returning n, turn, first_seq into v_run;
            if found then
                v_n := v_n + v_run.n;
                v_floor.turn := v_run.turn;
                v_floor.first_seq := v_run.first_seq + 1;
                continue;
            end if;
            -- there is none, or it is too big
            select ctid, n into v_run from pgqueue.consumer_messages
            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = v_floor.rank
              and (turn, first_seq) >= (v_floor.turn, v_floor.first_seq)
            order by turn, first_seq limit 1 for update skip locked;
            exit when not found;
            if v_run.n > p_want - v_n then
                perform pgqueue._cut(v_run.ctid, p_want - v_n);  -- now the same place holds a run that fits
            end if;
        end loop;
        exit when v_n >= p_want;
    end loop;
    return v_n;
end $$;

-- Waits a moment for the first ready run of a consumer with ordering=none, which another claimer holds: that claimer may itself wait for
-- the lock that the caller has. Returns whether the run was let go. Locks it, if it is still ready.
create or replace function pgqueue._await_run(p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
set lock_timeout = '200ms'
as $$
begin
    perform from pgqueue.consumer_messages
    where ctid = (select ctid from pgqueue.consumer_messages
                  where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = p_cursor.floors[1].rank
                    and (turn, first_seq) >= (p_cursor.floors[1].turn, p_cursor.floors[1].first_seq)
                  order by turn, first_seq limit 1)
    for update;
    return true;
exception when lock_not_available or deadlock_detected then
    return false;
end $$;

-- Inserts a run like p_run with other messages, in runs of at most 64 ranges; nothing if there are none.
-- Returns the number of messages.
create or replace function pgqueue._insert_run(p_run pgqueue.consumer_messages, p_seqs int8multirange) returns bigint
language plpgsql
as $$
declare
    v_n bigint;
begin
    if p_seqs = int8multirange(range_merge(p_seqs)) and p_seqs <> '{}' then
        p_run.seqs := p_seqs;
        p_run.first_seq := lower(p_seqs);
        p_run.n := upper(p_seqs) - lower(p_seqs);
        insert into pgqueue.consumer_messages select p_run.*;
        return p_run.n;
    end if;
    with run as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs, key,
                                               claim_id, not_visible_until, last_delivered_at, last_error)
        select p_run.consumer_id, p_run.state, p_run.rank, p_run.priority, p_run.deliver_count, p_run.position, p_run.turn,
               c.first_seq, c.n, c.seqs, p_run.key, p_run.claim_id, p_run.not_visible_until, p_run.last_delivered_at, p_run.last_error
        from pgqueue._chunks(p_seqs) c
        returning n
    )
    select coalesce(sum(n), 0) into v_n from run;
    return v_n;
end $$;

-- Cuts pieces of p_n messages off the front of a ready run: one, and for small claims some more, so that the next
-- claimers find runs that fit, and other claimers runs that are not locked. Locks the run.
create or replace function pgqueue._cut(p_ctid tid, p_n bigint) returns void
language plpgsql
as $$
declare
    v_run   pgqueue.consumer_messages;
    v_rest  int8multirange;
    v_parts int8multirange[];
    v_count int;
begin
    delete from pgqueue.consumer_messages where ctid = p_ctid returning * into v_run;
    v_count := least((v_run.n - 1) / p_n, case when p_n <= 256 then 64 else 1 end);
    if upper(v_run.seqs) - v_run.first_seq = v_run.n then
        v_parts := array(select int8multirange(int8range(v_run.first_seq + i * p_n, v_run.first_seq + (i + 1) * p_n))
                         from generate_series(0, v_count - 1) i);
        v_rest := int8multirange(int8range(v_run.first_seq + v_count * p_n, upper(v_run.seqs)));
    else
        v_rest := v_run.seqs;
        for i in 1..v_count loop
            v_parts[i] := pgqueue._below(v_rest, pgqueue._bound_of(v_rest, p_n));
            v_rest := v_rest - v_parts[i];
        end loop;
    end if;
    insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn, first_seq, n, seqs,
                                           last_delivered_at, last_error)
    select v_run.consumer_id, v_run.state, v_run.rank, v_run.priority, v_run.deliver_count, v_run.position, v_run.turn,
           lower(p.seqs), case when i <= v_count then p_n else v_run.n - v_count * p_n end, p.seqs,
           v_run.last_delivered_at, v_run.last_error
    from unnest(v_parts || v_rest) with ordinality p (seqs, i);
end $$;

-- The floors raised to the first ready runs that are there. Exact, because runs become ready only under the
-- consumer's lock; a run that another claimer is cutting is still seen where it was. Needs that lock.
create or replace function pgqueue._raise_floors(p_cursor pgqueue.consumer_cursors) returns pgqueue.floor[]
language plpgsql stable
as $$
begin
    return (
        select coalesce(array_agg((f.rank, m.turn, m.first_seq)::pgqueue.floor order by f.rank), '{}')
        from unnest(p_cursor.floors) f
        cross join lateral (select turn, first_seq from pgqueue.consumer_messages
                            where consumer_id = p_cursor.consumer_id and state = 'ready' and rank = f.rank
                              and (turn, first_seq) >= (f.turn, f.first_seq)
                            order by turn, first_seq limit 1) m);
end $$;

-- Serves a claim under the consumer's lock: from what is ready; then, if that is short, from what else can be had.
--   p_want  messages at most
--   p_upto  no publication after this one; null: all
-- Returns the cursor, which the caller stores, and how many messages the claim got.
create or replace function pgqueue._fill(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint,
                                         p_want bigint, p_upto bigint,
                                         out o_cursor pgqueue.consumer_cursors, out o_n bigint)
language plpgsql
as $$
declare
    v_n    bigint;
    v_stop timestamptz;  -- no more waiting from then on: well before deadlock_timeout
begin
    o_cursor := p_cursor;
    o_n := 0;
    for v_pass in 1..100 loop  -- two; more only to get past publications of which nothing is for this consumer, or for now
        o_cursor := pgqueue._refresh(p_consumer, o_cursor, v_pass > 1, p_want - o_n, p_upto);
        if p_consumer.ordering <> 'none' then
            o_cursor := pgqueue._serve_ordered(p_consumer, o_cursor, p_claim_id, p_want - o_n);
            o_n := (select coalesce(sum(n), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed');
        elsif o_cursor.floors <> '{}' then
            v_n := pgqueue._serve(o_cursor, p_claim_id, p_want - o_n);
            o_cursor.floors := pgqueue._raise_floors(o_cursor);
            -- all that is ready is held by other claimers: wait for what they leave
            while v_n = 0 and o_n = 0 and o_cursor.floors <> '{}' loop
                v_stop := coalesce(v_stop, clock_timestamp() + interval '300 ms');
                exit when clock_timestamp() > v_stop;
                if not pgqueue._await_run(o_cursor) then
                    v_stop := '-infinity';
                end if;
                v_n := pgqueue._serve(o_cursor, p_claim_id, p_want);
                o_cursor.floors := pgqueue._raise_floors(o_cursor);
            end loop;
            o_n := o_n + v_n;
        end if;
        exit when o_n >= p_want or (o_n > 0 and not o_cursor.more);
        -- what is ready and could not be had (behind another claim) stays in the way of what would be taken
        exit when v_pass > 1 and (o_n > 0 or not o_cursor.more or pgqueue._raise_floors(o_cursor) <> '{}');
    end loop;
end $$;

-- Records a claim. Its lease is computed here, after all waiting.
create or replace function pgqueue._open_claim(p_consumer pgqueue.consumers, p_claim_id bigint, p_n bigint,
                                               p_visibility_timeout interval, p_reader uuid) returns void
language plpgsql
as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_timeout interval := coalesce(p_visibility_timeout, p_consumer.visibility_timeout);
begin
    insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout, n, remaining, reader, seqs)
    overriding system value
    values (p_claim_id, p_consumer.consumer_id, p_consumer.ordering <> 'none', v_now, v_now + v_timeout, v_timeout, p_n, p_n, p_reader,
            case when p_reader is not null then
                (select range_agg(seqs) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed') end);
end $$;

-- The common claim of a consumer with ordering=none, in one statement, all or nothing: no lease has to be looked for, nothing is due
-- or new, and the next run has just this size. It needs no lock of the consumer, since it changes nothing of the cursor.
-- Returns the claim; null when it takes more than that (or the consumer does not exist). Locks the run.
create or replace function pgqueue._claim_next_run(p_stream text, p_consumer text, p_n int, p_visibility_timeout interval) returns bigint
language plpgsql
as $$
declare
    v_claim_id bigint;
begin
    with next as materialized (
        select run.ctid, nextval('pgqueue.claims_claim_id_seq') as claim_id, c.consumer_id,
               coalesce(p_visibility_timeout, c.visibility_timeout) as visibility_timeout
        from pgqueue.streams s
        join pgqueue.consumers c on c.stream_id = s.stream_id and c.name = p_consumer
        cross join lateral (select seen, more, floors[1] as line, due_floor, lease_probe from pgqueue.consumer_cursors
                            where consumer_id = c.consumer_id order by version desc limit 1) cursor
        cross join lateral (select ctid from pgqueue.consumer_messages
                            where consumer_id = c.consumer_id and state = 'ready' and rank = (line).rank
                              and (turn, first_seq) >= ((line).turn, (line).first_seq)
                            order by turn, first_seq limit 1
                            for update skip locked) run
        where s.name = p_stream and c.ordering = 'none' and lease_probe > clock_timestamp()
          and case when more then true
                   else seen = int8multirange(int8range(1, upper(seen)))
                        and not exists (select from pgqueue.publications where stream_id = c.stream_id and publication_id >= upper(seen)) end
          and ((select not_visible_until from pgqueue.consumer_messages
                where consumer_id = c.consumer_id and state = 'delayed' and not_visible_until >= due_floor
                order by not_visible_until limit 1) <= clock_timestamp()) is not true
    ), claimed as (
        update pgqueue.consumer_messages m
        set state = 'claimed', claim_id = next.claim_id, deliver_count = deliver_count + 1, not_visible_until = null,
            last_delivered_at = clock_timestamp()
        from next where m.ctid = next.ctid and m.n = p_n
        returning next.*
    )
    insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout, n, remaining)
    overriding system value
    select claim_id, consumer_id, false, clock_timestamp(), clock_timestamp() + visibility_timeout, visibility_timeout, p_n, p_n
    from claimed
    returning claim_id into v_claim_id;
    return v_claim_id;
end $$;

-- Claims at most p_max messages for a consumer; the payloads are not read. Bounded: a claim takes some 10,000 new
-- publications at most, or 1,000,000 of which nothing is for this consumer.
--   p_visibility_timeout  null: the consumer's
--   p_ack                 a claim to acknowledge first, as ack does, in the same transaction; null: none
-- Returns the claim and its number of messages, or no row when there is nothing.
-- Errors: PQ001, PQ002, PQ003, PQ007. Locks, to the end of the transaction: those of ack; the runs it takes; unless the next run is
-- all that it needs the consumer's lock, except that ordering=none makes do with what is ready while another claimer has it.
create or replace function pgqueue.claim(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                         p_ack bigint default null)
returns table (claim_id bigint, n bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    v_consumer pgqueue.consumers;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._check_isolation();
    end if;
    if p_max is null or p_max < 1 then
        raise exception 'p_max is at least 1, not %', coalesce(p_max::text, 'null') using errcode = 'PQ003';
    end if;
    if p_visibility_timeout is not null then
        perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    end if;
    if p_ack is not null then
        perform pgqueue._ack(p_ack);
    end if;
    begin
        claim_id := pgqueue._claim_next_run(p_stream, p_consumer, p_max, p_visibility_timeout);
        n := p_max;
        if claim_id is null then
            v_consumer := pgqueue._consumer(p_stream, p_consumer);
            claim_id := nextval('pgqueue.claims_claim_id_seq');
            n := 0;
            if v_consumer.ordering = 'none' and not pgqueue._try_lock_consumer(v_consumer.consumer_id) then
                -- another claimer is at it: what is ready will do
                n := pgqueue._serve(pgqueue._cursor(v_consumer.consumer_id), claim_id, p_max);
                if n = 0 then
                    raise exception using errcode = 'PQ099';
                end if;
                perform pgqueue._open_claim(v_consumer, claim_id, n, p_visibility_timeout, null);
            end if;
        end if;
    exception when sqlstate 'PQ099' then  -- (PQ000 would stand for all of class PQ)
        null;  -- unlocks the runs that it looked at and that were somebody else's, before it waits for the lock
    end;
    if n = 0 then
        n := pgqueue._claim_in_turn(v_consumer, claim_id, p_max, p_visibility_timeout);
    end if;
    if n > 0 then
        return next;
    end if;
end $$;

-- Claims with the consumer's lock, whatever is there to be had; see claim. Returns the number of messages.
create or replace function pgqueue._claim_in_turn(p_consumer pgqueue.consumers, p_claim_id bigint, p_max int, p_visibility_timeout interval)
returns bigint
language plpgsql
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_fill   record;
begin
    perform pgqueue._lock_consumer(p_consumer.consumer_id);
    v_stored := pgqueue._cursor(p_consumer.consumer_id);
    v_fill := pgqueue._fill(p_consumer, v_stored, p_claim_id, p_max, null);
    perform pgqueue._save_cursor(v_stored, v_fill.o_cursor, v_fill.o_n > 0);
    if v_fill.o_n > 0 then
        perform pgqueue._open_claim(p_consumer, p_claim_id, v_fill.o_n, p_visibility_timeout, null);
    end if;
    return v_fill.o_n;
end $$;

-- Claims at most p_max messages and reads them, in the order of delivery.
--   p_visibility_timeout, p_ack  as in claim
-- Returns a row per message; the claim is the same in all of them. Errors and locks: as claim.
create or replace function pgqueue.receive(p_stream text, p_consumer text, p_max int default 1, p_visibility_timeout interval default null,
                                           p_ack bigint default null)
returns table (claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int, deliver_count int,
               inserted_at timestamptz)
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    v_claim_id bigint;
    v_stream   int;
begin
    select c.claim_id into v_claim_id from pgqueue.claim(p_stream, p_consumer, p_max, p_visibility_timeout, p_ack) c;
    if not found then
        return;
    end if;
    v_stream := (select stream_id from pgqueue.streams where name = p_stream);
    -- by name of the partition: a plan over the parent would lock all streams' partitions
    return query execute format($q$
        select r.claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, r.priority, r.deliver_count, m.inserted_at
        from pgqueue.consumer_messages r
        cross join lateral unnest(r.seqs) g
        cross join lateral (select * from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)) m
        where r.claim_id = $1 and r.state = 'claimed'
        order by r.rank, r.position, m.seq $q$, v_stream) using v_claim_id;
end $$;
