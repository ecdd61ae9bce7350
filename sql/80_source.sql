-- The Spark source's side. A reader is one checkpoint; its claims are a fixed, ordered set, so that the offsets
-- (reader, claim) say for ever which messages a micro-batch has.

-- Spark's log goes on from what the database said, so the caller's commit is on disk when it returns, also where
-- synchronous_commit is off. (All that was committed before is on disk then, too.)
create or replace function pgqueue._commit_durably() returns void
language plpgsql
as $$
begin
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'local', true);
    end if;
end $$;

-- A stream by name. Errors: PQ001.
create or replace function pgqueue.open_stream(p_stream text) returns table (stream_id int, kind text)
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select s.stream_id, s.kind from pgqueue._stream(p_stream) s $$;

-- A consumer by name. Errors: PQ001, PQ002.
create or replace function pgqueue.open_consumer(p_stream text, p_consumer text)
returns table (stream_id int, kind text, consumer_id int, ordering text, visibility_timeout interval)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select s.stream_id, s.kind, c.consumer_id, c.ordering, c.visibility_timeout
    from pgqueue._consumer(p_stream, p_consumer) c join pgqueue.streams s using (stream_id)
$$;

-- The last publication of a stream that is visible now; 0: none.
create or replace function pgqueue.last_publication(p_stream_id int) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select coalesce((select publication_id from pgqueue.publications where stream_id = p_stream_id order by publication_id desc limit 1), 0) $$;

-- Locks a reader to the end of the transaction. Advisory, so that it gives no transaction id (see _take). The order of
-- locks is reader, consumer, claim, run.
create or replace function pgqueue._lock_reader(p_reader uuid) returns void
language sql
as $$ select pg_advisory_xact_lock(hashtextextended('pgqueue reader ' || p_reader::text, 0)) $$;

-- Raises PQ002, PQ005 or PQ010 unless the reader's checkpoint belongs to this consumer of this database, in this state.
create or replace function pgqueue._check_reader(p_reader pgqueue.readers, p_consumer_id int, p_start_claim bigint, p_claim bigint) returns void
language plpgsql stable
as $$
begin
    if not exists (select from pgqueue.consumers where consumer_id = p_consumer_id) then
        raise exception 'the consumer of this query was dropped'
            using errcode = 'PQ002', hint = 'Create it again and start the query with a new checkpoint.';
    elsif p_reader.reader is null and p_claim > 0 then
        raise exception 'the checkpoint (at claim %) is of a reader that this database does not know', p_claim
            using errcode = 'PQ005',
                  hint = 'It belongs to another database, or its consumer was dropped. Point url at the right database, or start with a new checkpoint.';
    elsif p_reader.consumer_id <> p_consumer_id then
        raise exception 'the checkpoint is of %, not of %', pgqueue._consumer_name(p_reader.consumer_id), pgqueue._consumer_name(p_consumer_id)
            using errcode = 'PQ005', hint = 'Give the stream and consumer that it was made with, or start with a new checkpoint.';
    elsif p_start_claim < p_reader.acked_claim then
        raise exception 'the checkpoint, at claim %, is older than what its query has acknowledged: up to claim %', p_start_claim, p_reader.acked_claim
            using errcode = 'PQ010', hint = 'Use the latest checkpoint, or a new one.';
    elsif p_claim > p_reader.last_claim then
        raise exception 'the checkpoint is ahead of the database: claim % is not known, the last one is %', p_claim, p_reader.last_claim
            using errcode = 'PQ005', hint = 'The database was restored to an earlier state. Start with a new checkpoint.';
    end if;
end $$;

-- A consumer for an error message.
create or replace function pgqueue._consumer_name(p_consumer_id int) returns text
language sql stable
as $$
    select coalesce((select format('consumer %L of stream %L', c.name, s.name)
                     from pgqueue.consumers c join pgqueue.streams s using (stream_id) where c.consumer_id = p_consumer_id),
                    'a dropped consumer')
$$;

-- Raises PQ003 for an offset that cannot be.
create or replace function pgqueue._check_offset(p_reader uuid, p_claim bigint, p_messages bigint) returns void
language plpgsql immutable
as $$
begin
    if p_reader is null or (p_claim >= 0 and p_messages >= 0) is not true then
        raise exception 'p_reader is not null, and p_start_claim, p_end_claim and p_start_messages are at least 0; not %, %, %',
                        coalesce(p_reader::text, 'null'), coalesce(p_claim::text, 'null'), coalesce(p_messages::text, 'null')
            using errcode = 'PQ003';
    end if;
end $$;

-- The end offset of a reader's next micro-batch. Acknowledges its claims up to the start offset; what it claimed beyond
-- (a crash came between the claim and the offset log) is the batch; otherwise claims what is there.
--   p_start_claim, p_start_messages  the start offset; 0, 0 for a new query
--   p_max                            messages at most; null: what is there (of up to 1,000,000 publications)
--   p_visibility_timeout             null: the consumer's
--   p_upto_publication               nothing that was published after it; null: all
-- Returns the end offset, equal to the start when there is nothing; how many messages were claimed; how many were
-- acknowledged after their lease was lost, so that another claimer may have them too; and when the next delayed
-- message is due or the next lease ends.
-- Repeating it with the same start gives the same end. Errors: PQ002, PQ003, PQ005, PQ007, PQ010.
-- Locks: the reader, the consumer's lock, its claims.
create or replace function pgqueue.reader_claim(
    p_reader uuid, p_consumer_id int, p_start_claim bigint, p_start_messages bigint, p_max bigint default null,
    p_visibility_timeout interval default null, p_upto_publication bigint default null)
returns table (claim_id bigint, messages bigint, claimed bigint, lost bigint, next_due timestamptz)
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
    v_consumer pgqueue.consumers;
    v_reader   pgqueue.readers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_claim    pgqueue.claims;
    v_fill     record;
    v_settled  boolean := false;
begin
    perform pgqueue._check_isolation();
    if p_max < 1 then
        raise exception 'p_max is null or at least 1, not %', p_max using errcode = 'PQ003';
    end if;
    perform pgqueue._check_offset(p_reader, p_start_claim, p_start_messages);
    if p_visibility_timeout is not null then
        perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    end if;
    perform pgqueue._lock_reader(p_reader);
    perform pgqueue._lock_consumer(p_consumer_id);
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_start_claim);
    v_stored := pgqueue._cursor(p_consumer_id);
    v_cursor := v_stored;
    claim_id := p_start_claim;
    messages := p_start_messages;
    claimed := 0;
    lost := 0;

    for v_claim in
        select * from pgqueue.claims c where c.reader = p_reader and c.claim_id <= p_start_claim order by c.claim_id for update
    loop
        lost := lost + v_claim.n - v_claim.settled - v_claim.remaining;
        v_cursor := pgqueue._acknowledge(v_cursor, v_claim);
        v_settled := true;
    end loop;

    if v_reader.last_claim > p_start_claim then
        perform pgqueue.reader_extend(p_reader);
        claim_id := v_reader.last_claim;
        messages := v_reader.messages;
        claimed := messages - p_start_messages;
    else
        v_claim.claim_id := nextval('pgqueue.claims_claim_id_seq');
        v_fill := pgqueue._fill(v_consumer, v_cursor, v_claim.claim_id, least(p_max, 1000000000000), p_upto_publication);
        v_cursor := v_fill.o_cursor;
        if v_fill.o_n > 0 then
            claim_id := v_claim.claim_id;
            claimed := v_fill.o_n;
            messages := p_start_messages + claimed;
            perform pgqueue._open_claim(v_consumer, claim_id, claimed, p_visibility_timeout, p_reader);
        end if;
    end if;

    if v_settled or claimed > 0 then
        perform pgqueue._commit_durably();
        insert into pgqueue.readers as r (reader, consumer_id, acked_claim, last_claim, messages, lost)
        values (p_reader, p_consumer_id, p_start_claim, reader_claim.claim_id, reader_claim.messages, reader_claim.lost)
        on conflict (reader) do update
        set acked_claim = excluded.acked_claim, last_claim = excluded.last_claim, messages = excluded.messages, lost = r.lost + excluded.lost;
    end if;
    perform pgqueue._save_cursor(v_stored, v_cursor, v_settled or claimed > 0);
    next_due := least(
        (select not_visible_until from pgqueue.consumer_messages
         where consumer_id = p_consumer_id and state = 'delayed' and not_visible_until >= v_cursor.due_floor order by not_visible_until limit 1),
        (select m.not_visible_until  -- the head of a consumer with ordering=stream is delayed in its line
         from unnest(v_cursor.floors) f
         cross join lateral (select not_visible_until from pgqueue.consumer_messages
                             where consumer_id = p_consumer_id and state = 'ready' and rank = f.rank and (turn, first_seq) >= (f.turn, f.first_seq)
                             order by turn, first_seq limit 1) m
         where claimed = 0 and v_consumer.ordering = 'stream' and f.rank = 0),
        case when claimed = 0 then pgqueue._next_expiry(p_consumer_id) end);
    return next;
end $$;

-- Ends a reader's claim, with what it still has. Needs the consumer's lock and the claim's.
create or replace function pgqueue._acknowledge(p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_keys text[];
begin
    with gone as (
        delete from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed' returning key
    )
    select array_agg(distinct key) filter (where key is not null) into v_keys from gone;
    p_cursor := pgqueue._shrink_claim(p_cursor, p_claim, 0, v_keys);
    delete from pgqueue.claims where claim_id = p_claim.claim_id;
    return p_cursor;
end $$;

-- The heartbeat: the leases of a reader's live claims start anew.
-- Returns how many claims that were. Locks: those claims.
create or replace function pgqueue.reader_extend(p_reader uuid) returns bigint
language sql
set search_path = pg_catalog, pg_temp
as $$
    with extended as (
        update pgqueue.claims set lease_until = clock_timestamp() + visibility_timeout
        where reader = p_reader and live
        returning 1
    )
    select count(*) from extended
$$;

-- Prepares the messages of a micro-batch to be read, again if need be: extends the reader's claims in (start, end], and claims
-- back what is free of those that it lost.
-- Returns how many messages the batch has now; how many of it other claimers have or had; and how many are gone.
-- Errors: PQ002, PQ003, PQ005, PQ007; PQ010 when the batch was acknowledged before. Locks: the reader, the consumer's lock, its claims.
create or replace function pgqueue.reader_resume(p_reader uuid, p_consumer_id int, p_start_claim bigint, p_end_claim bigint)
returns table (planned bigint, taken_over bigint, gone bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_consumer pgqueue.consumers;
    v_reader   pgqueue.readers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_claim    pgqueue.claims;
    v_held     int8multirange;
    v_there    bigint;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_offset(p_reader, p_start_claim, 0);
    perform pgqueue._check_offset(p_reader, p_end_claim, 0);
    perform pgqueue._lock_reader(p_reader);
    perform pgqueue._lock_consumer(p_consumer_id);
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_end_claim);
    v_stored := pgqueue._cursor(p_consumer_id);
    v_cursor := v_stored;
    planned := 0;
    taken_over := 0;
    gone := 0;
    perform pgqueue.reader_extend(p_reader);
    for v_claim in
        select * from pgqueue.claims c where c.reader = p_reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim order by c.claim_id for update
    loop
        if not v_claim.live and v_claim.settled < v_claim.n then
            v_cursor := pgqueue._claim_back(v_consumer, v_cursor, v_claim);
            select * into v_claim from pgqueue.claims c where c.claim_id = v_claim.claim_id;
        end if;
        planned := planned + v_claim.remaining;
        if v_claim.remaining + v_claim.settled < v_claim.n then
            select coalesce(range_agg(seqs), '{}') into v_held
            from pgqueue.consumer_messages where consumer_messages.claim_id = v_claim.claim_id and state = 'claimed';
            execute format('select count(*) from unnest($1) g cross join lateral (select from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)) m',
                           v_consumer.stream_id) into v_there using v_claim.seqs - v_held;
            gone := gone + pgqueue._cardinality(v_claim.seqs - v_held) - v_there;
            taken_over := taken_over + least(v_there, v_claim.n - v_claim.remaining - v_claim.settled);
        end if;
    end loop;
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    return next;
end $$;

-- Gives a reader back what is free of a claim that it lost; of an ordered consumer only keys that are idle. Needs the
-- consumer's lock and the claim's.
create or replace function pgqueue._claim_back(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
    v_n    bigint := 0;
begin
    for v_run in
        delete from pgqueue.consumer_messages m
        where m.consumer_id = p_consumer.consumer_id and m.state <> 'claimed' and m.seqs && p_claim.seqs
          and case when not p_claim.ordered then true
                   when m.key is null then p_cursor.open_claims = 0
                   else (select true from pgqueue.consumer_messages b
                         where b.consumer_id = m.consumer_id and b.key = m.key and b.state = 'claimed'
                           and b.claim_id >= p_cursor.first_claim limit 1) is null
                        and (select b.seqs && p_claim.seqs from pgqueue.consumer_messages b
                             where b.consumer_id = m.consumer_id and b.key = m.key and b.state <> 'claimed'
                             order by b.position, b.first_seq limit 1) end
        returning *
    loop
        v_part := v_run.seqs * p_claim.seqs;
        if v_part <> v_run.seqs then
            v_run.state := case when v_run.key is not null then 'waiting' else v_run.state end;
            perform pgqueue._insert_run(v_run, v_run.seqs - v_part);
        end if;
        v_run.state := 'claimed';
        v_run.claim_id := p_claim.claim_id;
        v_run.deliver_count := v_run.deliver_count + 1;
        v_run.not_visible_until := null;
        v_run.last_delivered_at := clock_timestamp();
        v_n := v_n + pgqueue._insert_run(v_run, v_part);
    end loop;
    if v_n = 0 then
        return p_cursor;
    end if;
    update pgqueue.claims
    set live = true, remaining = v_n, settled = least(settled, n - v_n), lease_until = clock_timestamp() + visibility_timeout
    where claim_id = p_claim.claim_id;
    if p_claim.ordered then
        p_cursor.first_claim := case when p_cursor.open_claims = 0 then p_claim.claim_id else least(p_cursor.first_claim, p_claim.claim_id) end;
        p_cursor.open_claims := p_cursor.open_claims + 1;
        if p_cursor.open_claims > 1 and p_cursor.mixed_claim is not null then
            perform pgqueue._split_by_key(p_consumer, p_cursor.mixed_claim, null);
            p_cursor.mixed_claim := null;
        end if;
        p_cursor.aside := (select count(*) from pgqueue.consumer_messages
                           where consumer_id = p_consumer.consumer_id and key is not null and state <> 'claimed');
        if p_cursor.aside > 0 then
            perform pgqueue._split_by_key(p_consumer, p_claim.claim_id, null);
        elsif p_cursor.open_claims = 1 then
            p_cursor.mixed_claim := p_claim.claim_id;
        end if;
    end if;
    return p_cursor;
end $$;

-- The messages of a micro-batch as ranges [lo, hi) of seq, in the order of delivery; merged for ordering=none, where
-- no order is promised beyond priority. Locks nothing.
create or replace function pgqueue.reader_plan(p_reader uuid, p_start_claim bigint, p_end_claim bigint)
returns table (lo bigint, hi bigint, priority int, deliver_count int)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with run as (
        select c.ordered, c.claim_id, m.rank, m.position, m.priority, m.deliver_count, m.seqs
        from pgqueue.claims c join pgqueue.consumer_messages m on m.claim_id = c.claim_id and m.state = 'claimed'
        where c.reader = p_reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim
    ), merged as (
        select claim_id, rank, position, priority, deliver_count, seqs from run where ordered
        union all
        select null, rank, null, priority, deliver_count, range_agg(seqs) from run where not ordered group by rank, priority, deliver_count
    )
    select lower(g), upper(g), priority, deliver_count
    from merged cross join lateral unnest(seqs) g
    order by claim_id, rank, position, lower(g)
$$;

-- Records which query a reader belongs to. Errors: PQ009 when another reader of the consumer belongs to the same query, as in
-- a self-join: each would get a part of the messages. Locks: the reader's row.
create or replace function pgqueue.reader_query(p_reader uuid, p_query_id text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    update pgqueue.readers set query_id = p_query_id where reader = p_reader and query_id is distinct from p_query_id;
exception when unique_violation then
    raise exception 'query % reads % twice: each of its two readers would get a part of the messages', p_query_id,
                    (select pgqueue._consumer_name(consumer_id) from pgqueue.readers where reader = p_reader)
        using errcode = 'PQ009', hint = 'Read the consumer once and derive both sides from that, or give each side a consumer of its own.';
end $$;
