-- Runs and their transitions. A run is stored, cut, claimed, taken out of a claim, or found as the next one here; elsewhere only
-- by statements that work on many runs at once, where a call for each would cost more than all the rest: _look and _claim_new (core/take.sql),
-- _serve_ready (core/line.sql), _waiting_heads, _store_pieces and _return_by_key (core/keys.sql).

-- Whether a publication is for a consumer.
create or replace function pgqueue._is_for(p_consumers int[], p_consumer_id int) returns boolean
language sql immutable parallel safe
as $$ select p_consumers is null or p_consumer_id = any (p_consumers) $$;

-- Stores a run like p_run with other messages, as runs of at most _limit_ranges() ranges; nothing if there are none.
-- Returns the number of messages.
create or replace function pgqueue._store_run(p_run pgqueue.consumer_messages, p_seqs int8multirange) returns bigint
language plpgsql
as $$
declare
    v_chunk record;
    v_count bigint := 0;
begin
    if p_seqs = int8multirange(range_merge(p_seqs)) and p_seqs <> '{}' then
        p_run.seqs := p_seqs;
        p_run.first_seq := lower(p_seqs);
        p_run.message_count := upper(p_seqs) - lower(p_seqs);
        insert into pgqueue.consumer_messages select p_run.*;
        return p_run.message_count;
    end if;
    for v_chunk in select * from pgqueue._chunks(p_seqs) loop
        p_run.seqs := v_chunk.seqs;
        p_run.first_seq := v_chunk.first_seq;
        p_run.message_count := v_chunk.message_count;
        insert into pgqueue.consumer_messages select p_run.*;
        v_count := v_count + v_chunk.message_count;
    end loop;
    return v_count;
end $$;

-- Stores messages of a run as claimed: they are being delivered once more. Returns how many.
create or replace function pgqueue._claim_run(p_run pgqueue.consumer_messages, p_seqs int8multirange, p_claim_id bigint) returns bigint
language plpgsql
as $$
begin
    p_run.state := 'claimed';
    p_run.claim_id := p_claim_id;
    p_run.deliver_count := p_run.deliver_count + 1;
    p_run.not_visible_until := null;
    p_run.last_delivered_at := clock_timestamp();
    return pgqueue._store_run(p_run, p_seqs);
end $$;

-- Takes messages out of a claim's runs; what is left of those stays claimed.
--   p_set  null: all
-- Returns the messages as runs, as they were. Needs the claim's lock.
create or replace function pgqueue._take_out(p_claim_id bigint, p_set int8multirange) returns setof pgqueue.consumer_messages
language plpgsql
as $$
declare
    v_run  pgqueue.consumer_messages;
    v_part int8multirange;
begin
    for v_run in
        delete from pgqueue.consumer_messages
        where claim_id = p_claim_id and state = 'claimed' and (p_set is null or seqs && p_set)
        returning *
    loop
        if p_set is not null then
            v_part := v_run.seqs * p_set;
            if v_part <> v_run.seqs then
                perform pgqueue._store_run(v_run, v_run.seqs - v_part);
                v_run.seqs := v_part;
                v_run.first_seq := lower(v_part);
                v_run.message_count := pgqueue._cardinality(v_part);
            end if;
        end if;
        return next v_run;
    end loop;
end $$;

-- How many messages a claim holds.
create or replace function pgqueue._held_by(p_claim_id bigint) returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(message_count), 0) from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed');
end $$;

-- The first ready run of a lane from a place on, and what its note says of the size of a claim (at_most); no row when there is none.
create or replace function pgqueue._next_ready(p_consumer_id int, p_from pgqueue.line_place,
                                               out run_ctid tid, out line_no bigint, out first_seq bigint, out not_visible_until timestamptz,
                                               out at_most bigint)
language plpgsql stable
as $$
begin
    select m.ctid, m.line_no, m.first_seq, m.not_visible_until, (m.note ->> 'at_most')::bigint
    into run_ctid, line_no, first_seq, not_visible_until, at_most
    from pgqueue.consumer_messages m
    where m.consumer_id = p_consumer_id and m.state = 'ready' and m.lane = p_from.lane and (m.line_no, m.first_seq) >= (p_from.line_no, p_from.first_seq)
    order by m.line_no, m.first_seq limit 1;
end $$;

-- What is ready is cut for small claims into pieces of the size of a whole claim, so that the next claimers find runs that fit, and runs that
-- are not locked; and one more piece, of what is left. Returns how many, without that one.
create or replace function pgqueue._more_pieces(p_count bigint, p_size bigint) returns bigint
language sql immutable parallel safe
as $$ select case when p_size <= pgqueue._limit_piece_size() then least((p_count - 1) / p_size, pgqueue._limit_pieces() - 1) else 0 end $$;

-- The pieces of a range that is ready, for claims of p_size.
create or replace function pgqueue._pieces(p_lo bigint, p_hi bigint, p_size bigint) returns table (lo bigint, hi bigint)
language sql immutable parallel safe
as $$
    select p_lo + i * p_size, case when i < n.more then p_lo + (i + 1) * p_size else p_hi end
    from (select pgqueue._more_pieces(p_hi - p_lo, p_size) as more) n cross join lateral generate_series(0, n.more) i
$$;

-- Cuts a ready run for a claim that wants less of it: a first piece of what is wanted now, and _pieces. Locks the run.
--   p_first  messages of the first piece; fewer than the run has
--   p_size   messages of the other pieces
create or replace function pgqueue._cut(p_ctid tid, p_first bigint, p_size bigint) returns void
language plpgsql
as $$
declare
    v_run    pgqueue.consumer_messages;
    v_pieces int8multirange[];
    v_rest   int8multirange;
    v_bound  bigint;
    v_whole  boolean;  -- one range
begin
    delete from pgqueue.consumer_messages where ctid = p_ctid returning * into v_run;
    v_whole := upper(v_run.seqs) - v_run.first_seq = v_run.message_count;
    if v_whole then
        v_bound := v_run.first_seq + p_first;
        v_pieces := int8multirange(int8range(v_run.first_seq, v_bound))
            || array(select int8multirange(int8range(lo, hi)) from pgqueue._pieces(v_bound, upper(v_run.seqs), p_size));
    else
        v_rest := v_run.seqs;
        for i in 0..pgqueue._more_pieces(v_run.message_count - p_first, p_size) loop
            v_pieces[i] := pgqueue._below(v_rest, pgqueue._bound_of(v_rest, case when i = 0 then p_first else p_size end));
            v_rest := v_rest - v_pieces[i];
        end loop;
        v_pieces := v_pieces || v_rest;
    end if;
    insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no, first_seq, message_count, seqs,
                                           last_delivered_at, note)
    select v_run.consumer_id, v_run.state, v_run.lane, v_run.priority, v_run.deliver_count, v_run.arrival_no, v_run.line_no,
           lower(p), case when v_whole then upper(p) - lower(p) else pgqueue._cardinality(p) end, p, v_run.last_delivered_at, v_run.note
    from unnest(v_pieces) p;
end $$;

-- Keeps messages of a run as dead letters.
--   p_owner  of the claim that held them; null: none did
create or replace function pgqueue._dead_letter(p_run pgqueue.consumer_messages, p_seqs int8multirange, p_reason text, p_details jsonb, p_owner text default null)
returns void
language sql
as $$
    insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason, details, claim_id, note, owner)
    select c.stream_id, c.consumer_id, p_seqs, pgqueue._cardinality(p_seqs), p_run.priority, p_run.deliver_count, p_reason, p_details, p_run.claim_id,
           p_run.note, p_owner
    from pgqueue.consumers c
    where c.consumer_id = p_run.consumer_id;
    select pg_notify(pgqueue._done_channel(c.consumer_id), '') from pgqueue.consumers c where c.consumer_id = p_run.consumer_id and c.notify_done
$$;

-- What a note says of messages that expire at a time.
create or replace function pgqueue._expiry(p_expires_at timestamptz) returns jsonb
language sql immutable
as $$ select jsonb_build_object('expires', extract(epoch from p_expires_at)::bigint) $$;

-- Whether messages with this note have expired.
create or replace function pgqueue._has_expired(p_note jsonb) returns boolean
language plpgsql volatile
as $$
begin
    return ((p_note ->> 'expires')::bigint <= extract(epoch from clock_timestamp())) is true;
end $$;

-- Keeps a run that has expired as a dead letter, and deletes it.
--   p_deliveries  how many were counted for it that were none
create or replace function pgqueue._give_up_expired(p_ctid tid, p_deliveries int) returns void
language plpgsql
as $$
declare
    v_run pgqueue.consumer_messages;
begin
    delete from pgqueue.consumer_messages where ctid = p_ctid returning * into v_run;
    v_run.deliver_count := v_run.deliver_count - p_deliveries;
    v_run.claim_id := null;
    perform pgqueue._dead_letter(v_run, v_run.seqs, 'expired', null);
end $$;

-- A note with other keys in it; null takes a key out.
create or replace function pgqueue._noted(p_note jsonb, p_keys jsonb) returns jsonb
language sql immutable
as $$
    select nullif((coalesce(p_note, '{}') || coalesce(p_keys, '{}')) - array(select key from jsonb_each(p_keys) where value = 'null'), '{}')
$$;
