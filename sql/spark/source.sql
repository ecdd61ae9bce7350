-- The Spark source's side. A reader is one checkpoint; its claims are a fixed, ordered set, so that the offsets
-- (reader, claim) say for ever which messages a micro-batch has.

-- A stream by name. Errors: PQ001.
create or replace function pgqueue.open_stream(p_stream text) returns table (stream_id int, kind text)
language sql stable
as $$ select s.stream_id, s.kind from pgqueue._stream(p_stream) s $$;

-- All streams, for who reads those of a pattern. Errors: none.
create or replace function pgqueue.open_streams() returns table (stream text, stream_id int, kind text)
language sql stable
as $$ select s.name, s.stream_id, s.kind from pgqueue.streams s order by s.name collate "C" $$;

-- A consumer by name, with a name that no other consumer has, in no database, and the channel of its stream. Errors: PQ001, PQ002.
create or replace function pgqueue.open_consumer(p_stream text, p_consumer text)
returns table (stream_id int, kind text, consumer_id int, ordering text, visibility_timeout interval, identity text, channel text,
               keeps_history boolean)
language sql stable
as $$
    select s.stream_id, s.kind, c.consumer_id, c.ordering, c.visibility_timeout,
           format('%s-%s-%s', (select oid from pg_database where datname = current_database()), c.consumer_id,
                  (extract(epoch from c.created_at) * 1000000)::bigint), pgqueue._channel(s.stream_id), c.keep_history is not null
    from pgqueue._consumer(p_stream, p_consumer) c join pgqueue.streams s using (stream_id)
$$;

-- The last publication of a stream that is visible now; 0: none.
create or replace function pgqueue.last_publication(p_stream_id int) returns bigint
language sql stable
as $$ select coalesce((select publication_id from pgqueue.publications where stream_id = p_stream_id order by publication_id desc limit 1), 0) $$;

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
                  hint = 'It belongs to another database, or its consumer was dropped, or it was not used for so long that it was forgotten '
                         'and its messages went back. Point url at the right database, or start with a new checkpoint.';
    elsif p_reader.consumer_id <> p_consumer_id then
        raise exception 'the checkpoint is of %, not of %', pgqueue._consumer_name(p_reader.consumer_id), pgqueue._consumer_name(p_consumer_id)
            using errcode = 'PQ005', hint = 'Give the stream and consumer that it was made with, or start with a new checkpoint.';
    elsif p_start_claim < p_reader.acked_claim then
        raise exception 'the checkpoint, at claim %, is older than what its query has acknowledged: up to claim %', p_start_claim, p_reader.acked_claim
            using errcode = 'PQ010', hint = 'Use the latest checkpoint, or a new one. If two drivers run with this checkpoint, stop one of them.';
    elsif p_claim > p_reader.last_claim
          -- a number that was given out again has other random bits
          or (p_claim > p_reader.acked_claim and not exists (select from pgqueue.claims where reader = p_reader.reader and claim_id = p_claim)) then
        raise exception 'the checkpoint is ahead of the database: claim % is not known, the last one is %', p_claim, p_reader.last_claim
            using errcode = 'PQ005',
                  hint = 'The database was restored to an earlier state, or a standby that lacked the last commits was promoted. Start with a new checkpoint: '
                         'what the old one has and the database has not acknowledged is delivered again.';
    end if;
end $$;

-- The end offset of a reader's next micro-batch. Acknowledges its claims up to the start offset; what it claimed beyond
-- (a crash came between the claim and the offset log) is the batch; otherwise claims what is there.
--   p_start_claim, p_start_messages  the start offset; 0, 0 for a new query
--   p_max                            messages at most; null: what is there (of up to 1,000,000 publications)
--   p_visibility_timeout             null: the consumer's
--   p_upto_publication               nothing that was published after it; null: all
--   p_max_bytes                      of data at most, but one message at least; null: any number
-- Returns the end offset, equal to the start when there is nothing; how many messages were claimed; how many were
-- acknowledged after their lease was lost, so that another claimer may have them too; when the next delayed
-- message is due or the next lease ends; and, if p_max_bytes was given and something was claimed now, how many bytes of data that has.
-- Repeating it with the same start gives the same end. Errors: PQ002, PQ003, PQ005, PQ007, PQ010.
-- Locks: the reader, its claims, the consumer. (One step of the protocol, which is read from top to bottom, and so longer than 60 lines.)
create or replace function pgqueue.reader_claim(
    p_reader uuid, p_consumer_id int, p_start_claim bigint, p_start_messages bigint, p_max bigint default null,
    p_visibility_timeout interval default null, p_upto_publication bigint default null, p_max_bytes bigint default null)
returns table (claim_id bigint, messages bigint, claimed bigint, lost bigint, next_due timestamptz, bytes bigint)
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_reader   pgqueue.readers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_claim    pgqueue.claims;
    v_acked    record;
    v_fill     record;
begin
    perform pgqueue._check_isolation();
    if p_max < 1 then
        raise exception 'p_max is null or at least 1, not %', p_max using errcode = 'PQ003', column = 'p_max';
    elsif p_max_bytes < 1 then
        raise exception 'p_max_bytes is null or at least 1, not %', p_max_bytes using errcode = 'PQ003', column = 'p_max_bytes';
    end if;
    perform pgqueue._check_offset(p_reader, p_start_claim, p_start_messages);
    if p_visibility_timeout is not null then
        perform pgqueue._check_timeout('p_visibility_timeout', p_visibility_timeout);
    end if;
    perform pgqueue._lock_reader(p_reader);
    perform from pgqueue.claims c where c.reader = p_reader order by c.claim_id for update;
    perform pgqueue._lock_consumer(p_consumer_id);
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    if v_consumer.partitions is not null then
        perform pgqueue._refuse_group(v_consumer);
    elsif v_consumer.limits_keys then
        perform pgqueue._refuse_limits(v_consumer);
    end if;
    if v_consumer.scheduled then
        perform pgqueue._run_schedules(v_consumer.stream_id);
    end if;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_start_claim);
    v_stored := pgqueue._cursor(p_consumer_id);
    v_cursor := v_stored;
    claim_id := p_start_claim;
    messages := p_start_messages;
    claimed := 0;
    v_acked := pgqueue._acknowledge_upto(p_reader, p_start_claim);
    lost := v_acked.o_lost;

    if v_reader.last_claim > p_start_claim then
        perform pgqueue.reader_extend(p_reader);
        claim_id := v_reader.last_claim;
        messages := v_reader.messages;
        claimed := messages - p_start_messages;
    elsif not v_consumer.paused then
        v_claim.claim_id := pgqueue._new_claim_id();
        if p_max_bytes is null then
            v_fill := pgqueue._fill(v_consumer, v_cursor, v_claim.claim_id, least(p_max, 1000000000000), p_upto_publication);
        else
            v_fill := pgqueue._fill_within(v_consumer, v_cursor, v_claim.claim_id, least(p_max, 1000000000000), p_upto_publication, p_max_bytes);
            bytes := v_fill.o_bytes;
        end if;
        v_cursor := v_fill.o_cursor;
        if v_fill.o_count > 0 then
            claim_id := v_claim.claim_id;
            claimed := v_fill.o_count;
            messages := p_start_messages + claimed;
            perform pgqueue._open_claim(v_consumer, claim_id, claimed, p_visibility_timeout, p_reader);
        end if;
    end if;

    if v_acked.o_any or claimed > 0 then
        perform pgqueue._commit_durably();
        insert into pgqueue.readers as r (reader, consumer_id, acked_claim, last_claim, messages, lost)
        values (p_reader, p_consumer_id, p_start_claim, reader_claim.claim_id, reader_claim.messages, reader_claim.lost)
        on conflict (reader) do update
        set acked_claim = excluded.acked_claim, last_claim = excluded.last_claim, messages = excluded.messages, lost = r.lost + excluded.lost,
            used_at = clock_timestamp();
    elsif v_reader.used_at < clock_timestamp() - interval '1 hour' then
        update pgqueue.readers set used_at = clock_timestamp() where reader = p_reader;
    end if;
    perform pgqueue._save_cursor(v_stored, v_cursor, v_acked.o_any or claimed > 0);
    next_due := pgqueue._next_due(v_consumer, v_cursor, claimed = 0);
    return next;
end $$;

-- Ends a reader's claim, with what it still has. Needs the claim's lock.
create or replace function pgqueue._acknowledge(p_claim pgqueue.claims) returns void
language plpgsql
as $$
begin
    perform pgqueue._shrink_claim(p_claim, p_claim.remaining - pgqueue._finish(p_claim, null, false, null, null));
    delete from pgqueue.claims where claim_id = p_claim.claim_id;
end $$;

-- The heartbeat: the leases of a reader's live claims start anew.
-- Returns how many claims that were. Locks: those claims.
create or replace function pgqueue.reader_extend(p_reader uuid) returns bigint
language sql
as $$
    with extended as (
        update pgqueue.claims set lease_until = clock_timestamp() + visibility_timeout
        where reader = p_reader and live
        returning 1
    )
    select count(*) from extended
$$;

-- The messages of a claim on which its query has acted, but for those that retention took since.
create or replace function pgqueue._acted_seqs(p_claim pgqueue.claims) returns int8multirange
language plpgsql stable
as $$
begin
    return case when p_claim.acted is null then '{}' else (select range_agg(seqs) from unnest(p_claim.acted)) - coalesce(
        (select (pgqueue._trimmed(stream_id)).o_seqs from pgqueue.consumers where consumer_id = p_claim.consumer_id), '{}') end;
end $$;

-- Prepares the messages of a micro-batch to be read, again if need be: extends the reader's claims in (start, end], and claims
-- back what is free of those that it lost. A batch that another process had planned is delivered once more: so says its deliver_count.
--   p_process           who asks: a process that plans a batch twice delivers it once; null: nobody in particular, which counts nothing
--   p_quarantine_after  cut a batch that so many processes began and none finished, see quarantine.sql; null: never
-- Returns how many messages the batch has now; how many of it other claimers have or had; and how many are gone. The last two
-- together are what reader_lost says. And how many went back because it was cut, and how many of it are dead letters for that.
-- Errors: PQ002, PQ003, PQ005, PQ007; PQ006 for a consumer that has limits of keys now; PQ010 when the batch was acknowledged before.
-- Locks: the reader, its claims, the consumer. (One step of the protocol, as reader_claim, and so longer than 60 lines.)
create or replace function pgqueue.reader_resume(p_reader uuid, p_consumer_id int, p_start_claim bigint, p_end_claim bigint,
                                                 p_process uuid default null, p_quarantine_after bigint default null)
returns table (planned bigint, taken_over bigint, gone bigint, returned bigint, poison bigint)
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_reader   pgqueue.readers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_claim    pgqueue.claims;
    v_again    boolean;  -- the process that began it before is another one
    v_missing  record;
    v_cut      record;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_offset(p_reader, p_start_claim, 0);
    perform pgqueue._check_offset(p_reader, p_end_claim, 0);
    if p_quarantine_after < 1 then
        raise exception 'p_quarantine_after is null or at least 1, not %', p_quarantine_after using errcode = 'PQ003', column = 'p_quarantine_after';
    end if;
    perform pgqueue._lock_reader(p_reader);
    perform from pgqueue.claims c where c.reader = p_reader order by c.claim_id for update;
    perform pgqueue._lock_consumer(p_consumer_id);
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    if v_consumer.limits_keys then
        perform pgqueue._refuse_limits(v_consumer);
    end if;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_end_claim);
    v_stored := pgqueue._cursor(p_consumer_id);
    v_cursor := v_stored;
    planned := 0;
    taken_over := 0;
    gone := 0;
    returned := 0;
    poison := 0;
    v_again := coalesce(v_reader.planned_to >= p_end_claim and v_reader.planned_by <> p_process, false);
    if v_again and p_quarantine_after is not null then
        v_cut := pgqueue._quarantine(v_consumer, v_cursor, v_reader, p_start_claim, p_end_claim, p_quarantine_after);
        v_cursor := v_cut.p_cursor;
        returned := v_cut.o_returned;
        poison := v_cut.o_poison;
    end if;
    perform pgqueue.reader_extend(p_reader);
    for v_claim in
        select * from pgqueue.claims c where c.reader = p_reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim order by c.claim_id
    loop
        if v_claim.claim_id <= v_reader.planned_to and v_reader.planned_by <> p_process then
            update pgqueue.consumer_messages set deliver_count = deliver_count + 1, last_delivered_at = clock_timestamp()
            where consumer_messages.claim_id = v_claim.claim_id and state = 'claimed';
        end if;
        if not v_claim.live and v_claim.settled < v_claim.message_count and v_claim.lanes <> '{}' then  -- (none: its consumer was moved)
            v_cursor := pgqueue._claim_back(v_consumer, v_cursor, v_claim);
            select * into v_claim from pgqueue.claims c where c.claim_id = v_claim.claim_id;
        end if;
        planned := planned + v_claim.remaining + pgqueue._cardinality(pgqueue._acted_seqs(v_claim));
        v_missing := pgqueue._missing(v_consumer, v_claim);
        taken_over := taken_over + v_missing.o_taken_over;
        gone := gone + v_missing.o_gone;
    end loop;
    if p_process is not null and (v_reader.planned_by is distinct from p_process or v_reader.planned_to < p_end_claim) then
        update pgqueue.readers
        set planned_by = p_process, planned_to = greatest(planned_to, p_end_claim), used_at = clock_timestamp(),
            begun = case when v_again then begun + 1 else 1 end, begun_at = case when v_again then begun_at else clock_timestamp() end
        where reader = p_reader;
    end if;
    perform pgqueue._save_cursor(v_stored, v_cursor, true);
    return next;
end $$;

-- What a reader's claim has lost and its owner has not settled: what others have or had; and what is gone, because retention took it from this
-- consumer, or somebody deleted it. What was trimmed otherwise had been settled.
create or replace function pgqueue._missing(p_consumer pgqueue.consumers, p_claim pgqueue.claims, out o_taken_over bigint, out o_gone bigint)
language plpgsql stable
as $$
declare
    v_lost  bigint := p_claim.message_count - p_claim.remaining - p_claim.settled;
    v_rest  int8multirange := p_claim.seqs;
    v_skips int8multirange;
    v_there bigint;
begin
    o_taken_over := greatest(v_lost, 0);
    o_gone := 0;
    if v_lost <= 0 then
        return;
    end if;
    v_rest := v_rest - coalesce((select range_agg(seqs) from pgqueue.consumer_messages where claim_id = p_claim.claim_id and state = 'claimed'), '{}');
    v_skips := v_rest * coalesce((select seqs from pgqueue.skips where consumer_id = p_consumer.consumer_id), '{}');
    v_rest := v_rest - v_skips - (pgqueue._trimmed(p_consumer.stream_id)).o_seqs - pgqueue._acted_seqs(p_claim);
    execute format('select count(*) from unnest($1) g cross join lateral (select from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)) m',
                   p_consumer.stream_id) into v_there using v_rest;
    -- what its owner has settled may be deleted too: which ones these are is not known
    o_gone := least(pgqueue._cardinality(v_skips) + pgqueue._cardinality(v_rest) - v_there, v_lost);
    o_taken_over := v_lost - o_gone;
end $$;

-- How many messages of a micro-batch its reader has lost, because a lease ended and another claimer asked for them. Who has read the batch
-- and finds more than reader_resume said before must not deliver it. Locks nothing.
create or replace function pgqueue.reader_lost(p_reader uuid, p_start_claim bigint, p_end_claim bigint) returns bigint
language sql stable
as $$
    select coalesce(sum(message_count - settled - remaining), 0)::bigint from pgqueue.claims
    where reader = p_reader and claim_id > p_start_claim and claim_id <= p_end_claim
$$;

-- What other readers of a consumer hold, and until when if they do not come back: for a query that finds nothing. Locks nothing.
create or replace function pgqueue.reader_others(p_reader uuid, p_consumer_id int) returns table (messages bigint, until timestamptz)
language sql stable
as $$
    select coalesce(sum(c.remaining), 0)::bigint, max(c.lease_until)
    from pgqueue.readers r join pgqueue.claims c on c.reader = r.reader
    where r.consumer_id = p_consumer_id and r.reader <> p_reader and c.live and c.lease_until > clock_timestamp()
$$;

-- Gives a reader back what is ready of a claim that it lost. What another claimer holds, or has returned with a delay, stays where it is, and
-- of an ordered consumer what waits for it. Needs the claim's lock and the consumer's.
create or replace function pgqueue._claim_back(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_piece bigint;
    v_lanes int[] := p_claim.lanes;
    v_ends  pgqueue.line_place;  -- nothing of the line from this place on
    v_run   pgqueue.consumer_messages;
    v_part  int8multirange;
    v_count bigint := 0;
begin
    p_claim.seqs := p_claim.seqs - pgqueue._acted_seqs(p_claim);  -- what its query returned is for others, too
    if p_claim.ordered then
        v_ends := pgqueue._line_is_free(p_consumer, p_cursor, p_claim);
        if v_ends is not null then
            v_piece := p_cursor.last_line_no + 1;  -- a piece with all keys, as it was
            v_lanes := '{1}';
        else
            p_cursor := pgqueue._deal_places(p_consumer, p_cursor, p_claim);
            v_lanes := '{}';
        end if;
    end if;
    for v_run in
        delete from pgqueue.consumer_messages
        where ctid = any (array(
            select m.ctid
            from unnest(v_lanes) l
            cross join unnest(p_claim.arrival_nos) a
            cross join lateral (select ctid from pgqueue.consumer_messages
                                where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = l
                                  and line_no >= lower(a) and line_no < upper(a)
                                  and first_seq >= lower(p_claim.seqs) and first_seq < upper(p_claim.seqs) and seqs && p_claim.seqs
                                  and (v_ends is null or (line_no, first_seq) < (v_ends.line_no, v_ends.first_seq))
                                for update skip locked) m
            union all
            select m.ctid
            from unnest(p_cursor.scan_from) f
            cross join lateral (select ctid from pgqueue.consumer_messages
                                where p_claim.ordered and v_piece is null and consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 0
                                  and (line_no, first_seq) >= (f.line_no, f.first_seq) and seqs <@ p_claim.seqs
                                for update skip locked) m
            where f.lane = 0))
        returning *
    loop
        v_part := v_run.seqs * p_claim.seqs;
        perform pgqueue._store_run(v_run, v_run.seqs - v_part);
        v_run.piece := coalesce(v_piece, v_run.piece);
        v_count := v_count + pgqueue._claim_run(v_run, v_part, p_claim.claim_id);
    end loop;
    if v_count > 0 then
        update pgqueue.claims
        set live = true, remaining = v_count, settled = least(settled, message_count - v_count), lease_until = clock_timestamp() + visibility_timeout
        where claim_id = p_claim.claim_id;
        if v_piece is not null then
            insert into pgqueue.pieces (consumer_id, place, piece, message_count) values (p_consumer.consumer_id, v_piece, v_piece, v_count);
            p_cursor.last_line_no := v_piece;
        end if;
    end if;
    return p_cursor;
end $$;

-- Up to which place a lost claim of an ordered consumer may have back what is in the line, whole: nobody holds a key, and before that place
-- nothing is delayed. Null: it may not, and if something is delayed of ordering=key what it may have is dealt.
create or replace function pgqueue._line_is_free(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims)
returns pgqueue.line_place
language plpgsql stable
as $$
declare
    v_later pgqueue.line_place;
begin
    if exists (select from pgqueue.pieces p
               where p.consumer_id = p_consumer.consumer_id and p.place >= p_cursor.pieces_from
                 and (p.keys is not null or exists (select from pgqueue.consumer_messages where consumer_id = p.consumer_id and piece = p.piece))) then
        return null;
    elsif pgqueue._has_delayed_key(p_cursor) then
        return null;
    end if;
    select 1, m.line_no, m.first_seq into v_later
    from unnest(p_claim.arrival_nos) a
    cross join lateral (select line_no, first_seq, not_visible_until from pgqueue.consumer_messages
                        where consumer_id = p_consumer.consumer_id and state = 'ready' and lane = 1
                          and line_no >= lower(a) and line_no < upper(a)) m
    where m.not_visible_until > clock_timestamp()
    order by m.line_no, m.first_seq limit 1;
    if not found then
        return (1, upper(p_claim.arrival_nos), 0)::pgqueue.line_place;
    end if;
    return case when p_consumer.ordering = 'stream' then v_later end;
end $$;

-- Deals, as much as one claim looks at, while messages stand in the line where those of a lost claim had their places. So pieces tell
-- which of them are free. Returns the cursor.
create or replace function pgqueue._deal_places(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim pgqueue.claims)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_deal   record;
    v_looked bigint := 0;
begin
    while p_consumer.ordering = 'key' and v_looked < pgqueue._limit_looks() loop
        v_deal := pgqueue._deal(p_consumer, p_cursor, null, pgqueue._limit_piece_by_key(), 0);
        p_cursor := v_deal.o_cursor;
        v_looked := v_looked + v_deal.o_looked;
        exit when v_deal.o_looked = 0 or not exists (
            select from unnest(p_cursor.scan_from) f cross join lateral pgqueue._next_ready(p_consumer.consumer_id, f) m
            where f.lane = 1 and m.line_no < upper(p_claim.arrival_nos));
    end loop;
    return p_cursor;
end $$;

-- The messages of a micro-batch as ranges [lo, hi) of seq, in the order of delivery; merged for ordering=none, where
-- no order is promised beyond priority. Messages on which its query has acted are among them, as they were; but for those that retention took
-- since. Locks nothing.
create or replace function pgqueue.reader_plan(p_reader uuid, p_start_claim bigint, p_end_claim bigint)
returns table (lo bigint, hi bigint, priority int, deliver_count int)
language sql stable
as $$
    with claim as materialized (
        select * from pgqueue.claims where reader = p_reader and claim_id > p_start_claim and claim_id <= p_end_claim
    ), run as (
        select c.ordered, c.claim_id, m.lane, m.arrival_no, m.priority, m.deliver_count, m.seqs
        from claim c join pgqueue.consumer_messages m on m.claim_id = c.claim_id and m.state = 'claimed'
        union all
        select c.ordered, c.claim_id, a.lane, a.arrival_no, a.priority, a.deliver_count, a.seqs * t.seqs
        from claim c cross join lateral (select pgqueue._acted_seqs(c::pgqueue.claims) as seqs offset 0) t cross join lateral unnest(c.acted) a
    ), merged as (
        select claim_id, lane, arrival_no, priority, deliver_count, seqs from run where ordered
        union all
        select null, lane, null, priority, deliver_count, range_agg(seqs) from run where not ordered group by lane, priority, deliver_count
    )
    select lower(g), upper(g), priority, deliver_count
    from merged cross join lateral unnest(seqs) g
    order by claim_id, lane, arrival_no, lower(g)
$$;

-- Records which query a reader belongs to. Errors: PQ009 when another reader of the consumer belongs to the same query, as in
-- a self-join: each would get a part of the messages. Locks: the reader's row.
create or replace function pgqueue.reader_query(p_reader uuid, p_query_id text) returns void
language plpgsql
as $$
begin
    update pgqueue.readers set query_id = p_query_id where reader = p_reader and query_id is distinct from p_query_id;
exception when unique_violation then
    raise exception 'query % reads % twice: each of its two readers would get a part of the messages', p_query_id,
                    (select pgqueue._consumer_name(consumer_id) from pgqueue.readers where reader = p_reader)
        using errcode = 'PQ009', hint = 'Read the consumer once and derive both sides from that, or give each side a consumer of its own.';
end $$;

-- Forgets the readers that were not used for p_age, and hold nothing that a living process still extends: what they had not settled goes
-- back, as when a lease ends. For maintain(). Returns how many that were. Locks: those readers, their claims, their consumers.
create or replace function pgqueue._forget_readers(p_age interval) returns bigint
language plpgsql
as $$
declare
    v_reader   pgqueue.readers;
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
    v_locked   bigint;
    v_count    bigint := 0;
begin
    for v_reader in select * from pgqueue.readers where used_at < clock_timestamp() - p_age order by consumer_id, reader loop
        -- no waiting: the lock of another consumer may be held already, and there is a next time
        continue when not pgqueue._try_lock_reader(v_reader.reader);
        perform from pgqueue.claims where reader = v_reader.reader order by claim_id for update skip locked;
        get diagnostics v_locked = row_count;
        continue when v_locked < (select count(*) from pgqueue.claims where reader = v_reader.reader)
            or not pgqueue._try_lock_consumer(v_reader.consumer_id);
        continue when exists (select from pgqueue.claims where reader = v_reader.reader and live and lease_until > clock_timestamp());
        delete from pgqueue.readers where reader = v_reader.reader and used_at < clock_timestamp() - p_age;
        continue when not found;  -- used, or forgotten, while this waited for the lock
        select * into v_consumer from pgqueue.consumers where consumer_id = v_reader.consumer_id;
        v_stored := pgqueue._cursor(v_reader.consumer_id);
        perform pgqueue._save_cursor(v_stored, pgqueue._forget_reader(v_consumer, v_stored, v_reader.reader, 'unnamed',
                                                                      '{"error": "its reader was not used for long"}'), true);
        v_count := v_count + 1;
    end loop;
    return v_count;
end $$;
