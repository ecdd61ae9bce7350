-- What is done with the checkpoint of a Spark query from outside of it, or at its end.

-- Acknowledges a reader's claims up to one that its query has finished: up to an offset that is in Spark's commit log.
-- Returns how many messages were acknowledged, and how many of the same claims other claimers have or had.
-- Safe to repeat, and beside the query itself. Errors: PQ002, PQ003, PQ005, PQ007, PQ010. Locks: the reader, its claims.
create or replace function pgqueue.reader_ack(p_reader uuid, p_consumer_id int, p_start_claim bigint) returns table (acked bigint, lost bigint)
language plpgsql
as $$
declare
    v_reader pgqueue.readers;
    v_acked  record;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_offset(p_reader, p_start_claim, 0);
    perform pgqueue._lock_reader(p_reader);
    perform from pgqueue.claims c where c.reader = p_reader order by c.claim_id for update;
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_start_claim);
    v_acked := pgqueue._acknowledge_upto(p_reader, p_start_claim);
    acked := v_acked.o_acked;
    lost := v_acked.o_lost;
    if v_acked.o_any then
        perform pgqueue._commit_durably();
        update pgqueue.readers r set acked_claim = p_start_claim, lost = r.lost + v_acked.o_lost, used_at = clock_timestamp() where reader = p_reader;
    end if;
    return next;
end $$;

-- Ends a reader's claims up to one, with what they still have. Returns whether there were any, how many messages they had, and how many they had
-- lost before. Needs the locks of the reader and its claims.
create or replace function pgqueue._acknowledge_upto(p_reader uuid, p_claim bigint, out o_any boolean, out o_acked bigint, out o_lost bigint)
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    o_any := false;
    o_acked := 0;
    o_lost := 0;
    for v_claim in select * from pgqueue.claims where reader = p_reader and claim_id <= p_claim order by claim_id loop
        o_any := true;
        o_acked := o_acked + v_claim.remaining;
        o_lost := o_lost + v_claim.message_count - v_claim.settled - v_claim.remaining;
        perform pgqueue._acknowledge(v_claim);
    end loop;
end $$;

-- What a reader has, for who looks at its checkpoint: no row when the database does not know it.
--   p_finished  the claim up to which its query has finished, and ...
--   p_last      ... the last one that its checkpoint has
-- Returns whose reader it is; up to which claim it has acknowledged; how many messages it holds that are finished, that are of the micro-batch that is
-- not, and that no checkpoint has; when the last of its leases
-- ends; and when it last showed a sign of life.
-- Locks nothing.
create or replace function pgqueue.reader_state(p_reader uuid, p_finished bigint, p_last bigint)
returns table (stream text, consumer text, consumer_id int, query_id text, acked_claim bigint, finished bigint, unfinished bigint, unlogged bigint,
               lease_until timestamptz, seen_at timestamptz)
language sql stable
as $$
    select s.name, c.name, c.consumer_id, r.query_id, r.acked_claim, h.finished, h.unfinished, h.unlogged, h.lease_until,
           greatest(r.used_at, h.beat_at)
    from pgqueue.readers r
    join pgqueue.consumers c using (consumer_id)
    join pgqueue.streams s using (stream_id)
    cross join lateral (
        select coalesce(sum(remaining) filter (where claim_id <= p_finished), 0)::bigint as finished,
               coalesce(sum(remaining) filter (where claim_id > p_finished and claim_id <= p_last), 0)::bigint as unfinished,
               coalesce(sum(remaining) filter (where claim_id > p_last), 0)::bigint as unlogged,
               max(m.lease_until) filter (where live) as lease_until,
               max(m.lease_until - m.visibility_timeout) filter (where live) as beat_at
        from pgqueue.claims m where m.reader = r.reader) h
    where r.reader = p_reader
$$;

-- Gives back all that a reader holds, after acknowledging up to what its query has finished, and forgets it: its checkpoint is of no use any more.
-- What goes back was not delivered, and is there for the next claimer at once.
-- Returns how many messages were acknowledged, and how many went back. Errors: PQ002, PQ003, PQ005, PQ007, PQ010; 55006 while its query runs: it holds
-- something, and extended its leases not long ago. Locks: the reader, its claims, the consumer.
create or replace function pgqueue.reader_release(p_reader uuid, p_consumer_id int, p_start_claim bigint) returns table (acked bigint, released bigint)
language plpgsql
as $$
declare
    v_reader   pgqueue.readers;
    v_beat     record;
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
begin
    perform pgqueue._check_isolation();
    perform pgqueue._check_offset(p_reader, p_start_claim, 0);
    perform pgqueue._lock_reader(p_reader);
    perform from pgqueue.claims c where c.reader = p_reader order by c.claim_id for update;
    perform pgqueue._lock_consumer(p_consumer_id);
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_start_claim);
    select max(lease_until - visibility_timeout) as at, max(visibility_timeout) / 3 + interval '5 s' as every into v_beat
    from pgqueue.claims where reader = p_reader and live;
    if v_beat.at > clock_timestamp() - v_beat.every then
        raise exception 'the query of this checkpoint runs, or ran just now: it extended its leases % ago',
                        date_trunc('second', clock_timestamp() - v_beat.at)
            using errcode = '55006', hint = format('Stop it, and try again after %s.', (v_beat.at + v_beat.every)::timestamptz(0));
    end if;
    acked := (pgqueue._acknowledge_upto(p_reader, p_start_claim)).o_acked;
    released := (select coalesce(sum(remaining), 0) from pgqueue.claims where reader = p_reader and live);
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    v_stored := pgqueue._cursor(p_consumer_id);
    perform pgqueue._save_cursor(v_stored, pgqueue._forget_reader(v_consumer, v_stored, p_reader, 'uncounted', null), true);
    return next;
end $$;

-- Forgets a reader, and puts back what it holds. Returns the cursor; the caller stores it. Needs the locks of the reader, its claims and the consumer.
--   p_how, p_note  as in _return
create or replace function pgqueue._forget_reader(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_reader uuid, p_how text, p_note jsonb)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_claim pgqueue.claims;
begin
    for v_claim in select * from pgqueue.claims where reader = p_reader order by claim_id loop
        if v_claim.live then
            p_cursor := pgqueue._return(p_consumer, p_cursor, v_claim, null, p_how, clock_timestamp(), null, p_note);
        end if;
        delete from pgqueue.claims where claim_id = v_claim.claim_id;
    end loop;
    delete from pgqueue.readers where reader = p_reader;
    return p_cursor;
end $$;

-- Makes a reader that goes on where another one is: for a copy of its checkpoint. From then on each of them gets a part of the messages, and each has
-- its own. What the first one holds stays with it.
--   p_start_claim, p_start_messages  the offset up to which its query has finished
-- Returns the new reader. Errors: PQ002, PQ003, PQ005, PQ010. Locks: the reader.
create or replace function pgqueue.reader_fork(p_reader uuid, p_consumer_id int, p_start_claim bigint, p_start_messages bigint) returns uuid
language plpgsql
as $$
declare
    v_reader pgqueue.readers;
    v_fork   uuid := gen_random_uuid();
begin
    perform pgqueue._check_offset(p_reader, p_start_claim, p_start_messages);
    perform pgqueue._lock_reader(p_reader);
    select * into v_reader from pgqueue.readers where reader = p_reader;
    perform pgqueue._check_reader(v_reader, p_consumer_id, p_start_claim, p_start_claim);
    insert into pgqueue.readers (reader, consumer_id, acked_claim, last_claim, messages)
    values (v_fork, p_consumer_id, p_start_claim, p_start_claim, p_start_messages);
    return v_fork;
end $$;
