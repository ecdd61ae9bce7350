-- A claim from its beginning to its end: what is due is done first, then it is filled, opened, and shrunk as it is settled.

-- A claim's id. It rises with time; the random low bits make that an id which a crash gave back (synchronous_commit = off forgets the last
-- numbers of a sequence) is not given out again, and that ids cannot be counted up to.
create or replace function pgqueue._new_claim_id() returns bigint
language sql volatile
as $$ select nextval('pgqueue.claim_numbers') << 24 | floor(random() * 16777216)::bigint $$;

-- What is due for a consumer before anything is claimed: expired leases are released, delays that are over end, and
-- new publications are taken, all bounded.
--   p_held   messages that the claim has already: then it is not in need, and releases no other claim
--   p_short  what was ready did not suffice. Otherwise leases are looked at once a second, and while more publications
--            wait than one take takes, none is taken: they are behind what is ready.
--   p_want   take until about this many messages became ready, if there are so many
--   p_upto   no publication after this one; null: all
-- Returns the cursor as it is then; the caller stores it. Needs the consumer's lock.
create or replace function pgqueue._refresh(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_held bigint, p_short boolean,
                                            p_want bigint, p_upto bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_before pgqueue.consumer_cursors;
    v_take   record;
    v_wanted bigint := p_want;
begin
    if p_held = 0 and (p_short or not pgqueue._is_soon(v_cursor.lease_probe)) then
        v_cursor := pgqueue._probe_leases(p_consumer, v_cursor);
    end if;
    if not p_short or p_consumer.by_key then
        v_cursor := pgqueue._end_delays(p_consumer, v_cursor);
    end if;
    -- (a look far ahead is left to those who look first: after a take that was cut nobody did)
    if (p_short or not v_cursor.take_was_cut)
       and pgqueue._has_new(p_consumer.stream_id, v_cursor, not p_short or v_cursor.take_was_cut) then
        for i in 1..pgqueue._limit_takes() loop
            v_before := v_cursor;
            v_take := pgqueue._take(p_consumer, v_cursor, p_upto, pgqueue._limit_take());
            v_cursor := v_take.o_cursor;
            v_wanted := v_wanted - v_take.o_messages;
            exit when not v_cursor.take_was_cut or v_wanted <= 0
                or (v_cursor.next_publication = v_before.next_publication and v_cursor.gaps = v_before.gaps and v_before.sift_from is null)
                or (p_consumer.filtered and i >= pgqueue._limit_sifts());
        end loop;
    end if;
    return v_cursor;
end $$;

-- Serves a claim under the consumer's lock, as far as the limits of the consumer leave room: from what is ready; then, if that is short, from what else
-- can be had.
--   p_want  messages at most
--   p_upto  no publication after this one; null: all
--   p_held  messages that the claim has already
-- Returns the cursor, which the caller stores, and how many messages the claim has.
create or replace function pgqueue._fill(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_claim_id bigint,
                                         p_want bigint, p_upto bigint, p_held bigint default 0,
                                         out o_cursor pgqueue.consumer_cursors, out o_count bigint)
language plpgsql
as $$
declare
    v_served record;
    v_room   record;
begin
    o_cursor := p_cursor;
    o_count := p_held;
    if p_consumer.max_backlog is not null and p_consumer.on_full = 'drop_oldest' then
        o_cursor := pgqueue._drop_oldest(p_consumer, o_cursor);
    end if;
    if p_consumer.throttled then
        v_room := pgqueue._room(p_consumer, o_cursor, p_claim_id, p_want, p_held);
        o_cursor := v_room.p_cursor;
        p_want := v_room.o_want;
        if p_want <= p_held then
            return;
        end if;
    end if;
    <<passes>>
    for v_pass in 1..pgqueue._limit_takes() loop  -- two; more only to get past publications of which nothing is for this consumer, or for now
        o_cursor := pgqueue._refresh(p_consumer, o_cursor, o_count, v_pass > 1, p_want - o_count, p_upto);
        if p_consumer.by_key then
            v_served := pgqueue._serve_ordered(p_consumer, o_cursor, p_claim_id, p_want - o_count, o_count);
            o_cursor := v_served.o_cursor;
            o_count := o_count + v_served.o_count;
            exit when v_served.o_ended;
        elsif o_cursor.scan_from <> '{}' or o_cursor.scan_lanes_from is not null then
            for v_try in 0..5 loop
                v_served := pgqueue._serve_ready(p_consumer.consumer_id, pgqueue._by_age(p_consumer, o_cursor.scan_from), p_claim_id, p_want - o_count, p_want,
                                                 o_count);
                o_count := o_count + v_served.message_count;
                o_cursor := pgqueue._raise_scan_from(o_cursor);
                exit passes when v_served.ended;
                exit when o_count > 0 or o_cursor.scan_from = '{}' or v_try = 5;
                -- all that is ready is held by other claimers, who are about to leave some of it or all: look again. (Waiting for the row would
                -- follow it to a later version, which its owner may be settling while it waits for the lock that is held here.)
                perform pg_sleep(0.0001 * 2 ^ v_try) where v_try > 0;
            end loop;
        end if;
        exit when o_count >= p_want or (o_count > 0 and not o_cursor.take_was_cut);
        -- what is ready and could not be had (behind another claim) stays in the way of what would be taken
        if v_pass > 1 then
            exit when o_count > 0 or not o_cursor.take_was_cut;
            -- it has looked at enough that waits, or for others: the next claim goes on
            exit when v_pass > 2 and (p_consumer.by_key or p_consumer.filtered or o_cursor.next_publication - p_cursor.next_publication
                                                              >= pgqueue._limit_take() * pgqueue._limit_takes());
            o_cursor := pgqueue._raise_scan_from(o_cursor);
            exit when o_cursor.scan_from <> '{}';
        end if;
    end loop;
    if p_consumer.throttled then
        o_cursor := pgqueue._note_delivered(p_consumer, o_cursor, o_count - p_held);
    end if;
end $$;

-- Records a claim, of a reader with the set that it has at first. Its lease is computed here, after all waiting.
--   p_reader  null: a worker's
create or replace function pgqueue._open_claim(p_consumer pgqueue.consumers, p_claim_id bigint, p_count bigint,
                                               p_visibility_timeout interval, p_reader uuid) returns void
language plpgsql
as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_timeout interval := coalesce(p_visibility_timeout, p_consumer.visibility_timeout);
    v_set     record;
begin
    select range_agg(seqs) as seqs, range_agg(int8range(arrival_no, arrival_no, '[]')) as arrival_nos, array_agg(distinct lane) as lanes
    into v_set
    from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed' and p_reader is not null;
    insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout, message_count, remaining,
                                owner, archive, reader, seqs, arrival_nos, lanes)
    values (p_claim_id, p_consumer.consumer_id, p_consumer.by_key, v_now, v_now + v_timeout, v_timeout, p_count, p_count,
            current_setting('application_name'), p_consumer.archives, p_reader, v_set.seqs, v_set.arrival_nos, v_set.lanes);
end $$;

-- Claims: what claim and receive have in common. For arguments, errors and locks see claim.
-- Returns the claim; its number of messages is 0 or null where there is none.
-- (Longer than 60 lines: to call a function takes as long as most of what is asked here, for each message that is claimed alone.)
create or replace function pgqueue._claim(p_stream text, p_consumer text, p_max int, p_visibility_timeout interval, p_ack bigint)
returns pgqueue.claimed
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_claim    pgqueue.claimed;
    v_in_turn  boolean;          -- it needs the consumer's lock
    v_acked    bigint;           -- null: p_ack is still to be acknowledged
    v_quick    pgqueue.served;
    v_max      int;              -- null: p_max
    v_now      timestamptz;
    v_timeout  interval;
begin
    if current_setting('transaction_isolation') <> 'read committed' or p_max is null or p_max < 1 or p_visibility_timeout is not null then
        perform pgqueue._check_claim(p_max, p_visibility_timeout);
    end if;
    -- (a row as one value: column by column costs twice as much)
    v_consumer := (select c from pgqueue.consumers c
                   where c.stream_id = (select stream_id from pgqueue.streams where name = p_stream) and c.name = p_consumer);
    if v_consumer.consumer_id is null then
        perform pgqueue._consumer(p_stream, p_consumer);
    end if;
    if v_consumer.special then  -- (each question costs a little, and nearly all consumers need none of these)
        if v_consumer.partitions is not null then
            perform pgqueue._refuse_group(v_consumer);
        end if;
        if v_consumer.scheduled then
            perform pgqueue._run_schedules(v_consumer.stream_id);
        end if;
        if v_consumer.paused then
            perform pgqueue._ack(p_ack) where p_ack is not null;
            return null;
        end if;
        v_in_turn := v_consumer.ordering = 'stream' or v_consumer.per_key_interval is not null or v_consumer.throttled
            or (v_consumer.max_backlog is not null and pgqueue._has_room(v_consumer) is not true);
    end if;
    v_claim.claim_id := pgqueue._new_claim_id();
    v_claim.stream_id := v_consumer.stream_id;
    if v_in_turn is not true then
        begin
            if p_ack is not null then
                v_acked := pgqueue._ack(p_ack);
            end if;
            if v_consumer.by_key then
                v_quick := pgqueue._claim_pieces(v_consumer, v_claim.claim_id, p_max);
            else
                v_quick := pgqueue._claim_quickly(v_consumer, v_claim.claim_id, p_max);
            end if;
            v_claim.message_count := v_quick.message_count;
            v_in_turn := not v_quick.done;
            if v_in_turn then
                if v_quick.ended then
                    v_max := v_claim.message_count;
                end if;
                if not pgqueue._try_lock_consumer(v_consumer.consumer_id) then
                    -- another claimer is at it: what is ready will do
                    if v_claim.message_count = 0 then
                        v_quick := pgqueue._serve_ready(
                            v_consumer.consumer_id, pgqueue._by_age(v_consumer, (pgqueue._cursor(v_consumer.consumer_id)).scan_from),
                            v_claim.claim_id, p_max, case when not v_consumer.by_key then p_max end, 0);
                        v_claim.message_count := v_quick.message_count;
                    end if;
                    if v_claim.message_count = 0 then
                        raise exception using errcode = 'PQ099';
                    end if;
                    v_in_turn := false;
                end if;
            end if;
        exception when sqlstate 'PQ099' then  -- (PQ000 would stand for all of class PQ)
            -- unlocks the runs that it looked at and that were somebody else's, before it waits for the lock; and takes back the acknowledgement:
            -- who has the lock may come upon those runs, and wait for them although it skips what is locked, where Postgres follows a run to
            -- its last version
            v_acked := case when v_acked = 0 then 0 end;
        end;
    end if;
    if v_in_turn then
        v_claim.message_count := pgqueue._claim_in_turn(v_consumer, v_claim.claim_id, coalesce(v_max, p_max), coalesce(v_claim.message_count, 0),
                                                        case when v_acked is null then p_ack end);
    end if;
    if v_claim.message_count > 0 then
        v_now := clock_timestamp();  -- after all waiting
        v_timeout := coalesce(p_visibility_timeout, v_consumer.visibility_timeout);
        insert into pgqueue.claims (claim_id, consumer_id, ordered, claimed_at, lease_until, visibility_timeout, message_count, remaining, owner, archive)
        values (v_claim.claim_id, v_consumer.consumer_id, v_consumer.by_key, v_now, v_now + v_timeout, v_timeout, v_claim.message_count, v_claim.message_count,
                current_setting('application_name'), v_consumer.archives);
    end if;
    return v_claim;
end $$;

-- Claims for a consumer with ordering=none. What is so nearly always is found out by a few probes:
--   * nothing is due or more urgent, and something is ready: it is claimed. That changes nothing of the cursor, and needs no lock of it;
--   * nothing is due or ready, but something was published: it is taken and claimed at once;
--   * there is nothing.
-- Returns the number of messages that the claim got; whether that is all, or the caller goes on with the consumer's lock; and whether the claim
-- ends there, as _serve_ready does.
-- Locks: the runs it takes; maybe the consumer.
create or replace function pgqueue._claim_quickly(p_consumer pgqueue.consumers, p_claim_id bigint, p_max int) returns pgqueue.served
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors;
    v_new    pgqueue.publications;  -- the next one; null when there is none or nobody looked
    v_calm   boolean;  -- nothing is due, and which publication is next is known, or the gaps were just looked into
    v_served pgqueue.served;
begin
    v_served.message_count := 0;
    v_served.done := false;
    v_cursor := (select c from pgqueue.consumer_cursors c where c.consumer_id = p_consumer.consumer_id order by c.version desc limit 1);
    if v_cursor.consumer_id is null then
        v_cursor := pgqueue._cursor(p_consumer.consumer_id);  -- says so
    end if;
    v_calm := (v_cursor.take_was_cut or v_cursor.gaps = '{}' or pgqueue._is_soon(v_cursor.gaps_probe))
        and v_cursor.scan_lanes_from is null and not pgqueue._is_due(v_cursor.consumer_id, v_cursor.due_from);
    if v_calm and not v_cursor.take_was_cut then
        select * into v_new from pgqueue.publications
        where stream_id = p_consumer.stream_id and publication_id >= v_cursor.next_publication
          and publication_id < v_cursor.next_publication + pgqueue._limit_unseen()
        order by publication_id, part limit 1;
        if not found and v_cursor.scan_from = '{}' and pgqueue._is_idle(p_consumer, v_cursor) then
            v_served.done := true;
            return v_served;
        end if;
    end if;

    if v_calm and pgqueue._is_soon(v_cursor.lease_probe) then
        if v_cursor.scan_from <> '{}' and (v_new.publication_id is null or pgqueue._can_wait(p_consumer.stream_id, v_cursor)) then
            if p_consumer.ageing is not null then
                v_cursor.scan_from := pgqueue._by_age(p_consumer, v_cursor.scan_from);
            end if;
            v_served := pgqueue._serve_ready(v_cursor.consumer_id, v_cursor.scan_from, p_claim_id, p_max, p_max, 0);
            -- now and then the place where the line begins is stored anew, so that not all that was claimed is walked over
            v_served.done := (v_served.message_count = p_max or v_served.ended
                              or (v_served.message_count > 0 and v_new.publication_id is null and not v_cursor.take_was_cut))
                and random() * pgqueue._limit_behind() >= v_served.runs;
        end if;
        if v_served.message_count = 0 and v_cursor.gaps = '{}' and v_new.publication_id = v_cursor.next_publication then
            v_served.message_count := pgqueue._claim_new(p_consumer, v_cursor, v_new, p_claim_id, p_max);
            v_served.done := v_served.message_count > 0;
        end if;
    end if;
    return v_served;
end $$;

-- Whether a consumer without anything ready, new or due has nothing else to do either: no publication is far ahead, and no lease ended.
create or replace function pgqueue._is_idle(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors) returns boolean
language plpgsql
as $$
begin
    return date_trunc('minute', clock_timestamp() - interval '2 s') = date_trunc('minute', p_cursor.leases_from)
        and not pgqueue._has_new(p_consumer.stream_id, p_cursor, true)
        and (pgqueue._next_expiry(p_consumer.consumer_id, p_cursor.leases_from) <= clock_timestamp()) is not true;
end $$;

-- Claims with the consumer's lock, whatever is there to be had; see claim. The caller records the claim.
--   p_held  how many messages the claim has already
--   p_ack   a claim to acknowledge before; null: none
-- Returns how many it has then.
create or replace function pgqueue._claim_in_turn(p_consumer pgqueue.consumers, p_claim_id bigint, p_max int, p_held bigint, p_ack bigint) returns bigint
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_fill   record;
begin
    perform from pgqueue.claims where claim_id = p_ack for update;  -- in the order of locks
    perform pgqueue._lock_consumer(p_consumer.consumer_id);
    perform pgqueue._ack(p_ack) where p_ack is not null;
    v_stored := pgqueue._cursor(p_consumer.consumer_id);
    v_fill := pgqueue._fill(p_consumer, v_stored, p_claim_id, p_max, null, p_held);
    perform pgqueue._save_cursor(v_stored, v_fill.o_cursor, v_fill.o_count > 0);
    return v_fill.o_count;
end $$;

-- Records that the claim has p_left messages now, and ends it when it has none. Needs the claim's lock.
create or replace function pgqueue._shrink_claim(p_claim pgqueue.claims, p_left bigint) returns void
language plpgsql
as $$
begin
    if p_claim.reader is null and p_left = 0 then
        delete from pgqueue.claims where claim_id = p_claim.claim_id;
    else
        update pgqueue.claims set live = p_left > 0, remaining = p_left, settled = settled + p_claim.remaining - p_left
        where claim_id = p_claim.claim_id;
    end if;
end $$;
