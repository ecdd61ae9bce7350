-- Runs and their transitions.
--
-- The table names every function that writes consumer_messages, or that calls a function of this file which does.
-- tests/sql/test_transitions.py compares the table with the code, in both directions.
--
-- The helpers of this file store, slice, claim and take out one run. The other functions write many runs with one
-- statement: a call of a helper for each run would cost more than all the rest of that statement.
--
-- The words of the first two columns, for one consumer:
--   new         the message is published, and the consumer has not taken its publication: there is no run
--   unfiltered, ready, delayed, waiting, claimed: the state of its run
--   line        ready in the line of an ordered consumer: lane 1
--   piece       ready in a piece of an ordered consumer: lane 0
--   unclaimed   unfiltered, ready, line, piece, delayed or waiting
--   slot        ready, claimed, or by key waiting, in a row of slots instead of a run (queue/slots.sql)
--   done        acknowledged: there is no run; keep_history keeps a row of archived_messages
--   dead        a row of dead_messages
--   gone        skipped by retention, cancelled, replaced, refused by the filter, or forgotten with the consumer's
--               position
--
--   from                  to                                function         file
--   new                   unfiltered, ready, line, delayed  take_plain       queue/take.sql
--   new                   unfiltered, ready, line, delayed  look             queue/take.sql
--   new                   claimed, ready                    claim_new        queue/claim_new.sql
--   unfiltered            ready, line, delayed, gone        apply_filter     queue/filters.sql
--   unfiltered            as its caller says                unfiltered       queue/filters.sql
--   ready, piece          claimed, dead                     serve_ready      queue/line.sql
--   ready                 ready                             slice_run        queue/runs.sql
--   ready                 dead                              parts_of         claim/matching.sql
--   ready                 claimed                           claim_part       claim/matching.sql
--   ready, line, piece    claimed                           claim_back       spark/claim_back.sql
--   ready, piece          dead                              give_up_expired  queue/runs.sql
--   line                  as its caller says                line_front       queue/deal.sql
--   waiting               as its caller says                waiting_heads    queue/deal.sql
--   line, waiting, piece  piece, slot, waiting, delayed     store_pieces     queue/pieces.sql
--   line, waiting, piece  piece, waiting, delayed           deal_singly      queue/singles.sql
--   piece                 piece, waiting                    break_up         queue/pieces.sql
--   line                  claimed, dead                     claim_below      queue/whole_line.sql
--   line                  slot                              cut_line         queue/whole_line.sql
--   line                  gone                              delete_passed    functions/group_workers.sql
--   delayed               ready, waiting                    end_delays       queue/leases.sql
--   unclaimed             the same, due now                 retry            functions/settle.sql
--   claimed               as its caller says                take_out         queue/runs.sql
--   claimed               done                              ack              queue/settle.sql
--   claimed               done, dead                        finish           queue/settle.sql
--   claimed               done, dead                        settle_held      spark/actions.sql
--   claimed               ready, line, delayed, dead        return           queue/settle.sql
--   claimed               line, waiting, dead               return_by_key    queue/return_by_key.sql
--   claimed               gone                              cancel           functions/cancel.sql
--   claimed               gone                              replace_returned  queue/newest.sql
--   new, unclaimed        the same, later                   put_off          functions/postpone.sql
--   claimed               claimed                           reader_resume    spark/source.sql
--   claimed               claimed                           quarantine       spark/quarantine.sql
--   unclaimed             as its caller says                take_unclaimed   queue/cursor.sql
--   unclaimed             unfiltered, ready, line, delayed  change_lanes     queue/key_limits.sql
--   new, slot             ready                             put_in_line      queue/slots.sql
--   ready                 as its caller says                take_front       claim/slots.sql
--   ready                 slot                              cut              claim/slots.sql
--   slot                  claimed, waiting, line            promote          base/slots.sql
--   slot                  piece, waiting, line              flush            queue/slots.sql
--   slot                  claimed                           claim_matching_slots  claim/slots.sql
--   dead                  ready, line, unfiltered           redrive          functions/dead.sql
--   any                   gone                              forget_runs      queue/runs.sql
--   any                   gone, new                         move             functions/positions.sql
--   any                   gone                              drop_consumer    functions/consumers.sql
--   any                   as its caller says                store_run        queue/runs.sql
--   any                   claimed                           claim_run        queue/runs.sql
--
-- The rows "as its caller says": the callers of take_out() are return(), return_by_key(), finish(), cancel(),
-- replace_returned() and settle_held(); that of take_front() is cut(); those of line_front() and waiting_heads() are
-- deal(), with store_pieces() or deal_singly(): their rows have the target.
-- take_away() calls take_unclaimed(), and the messages are then gone (skip(), cancel()) or dead (drop_oldest()).
-- keep_newest() calls it, and they are gone. settle_free() calls it for a Spark sink, and the messages are then done or
-- dead. postpone() calls it, and put_off() stores the messages again: unfiltered ones as such, others as delayed,
-- waiting or in the line. retry() leaves unfiltered messages as they are.

-- Records that the claim has p_left messages now, and ends it when it has none. Needs the claim's lock.
create or replace function _pgqueue.shrink_claim(p_claim pgqueue.claims, p_left bigint) returns void
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

-- Where the unclaimed runs of a consumer stand in their table, for a statement that changes them. Slots are not among
-- them.
create or replace function _pgqueue.unclaimed_places(p_consumer_id int) returns tid[]
language sql stable
as $$
    select array(select ctid from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'ready')
        || array(select ctid from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'delayed')
        || array(select ctid from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'unfiltered')
        || array(select ctid from pgqueue.consumer_messages
                 where consumer_id = p_consumer_id and state = 'waiting' and key is not null)
$$;

-- Ends all claims of a consumer and deletes its runs. Spent tokens stay spent: messages of a key that were delivered
-- lately still count. A reader's claims are kept, as claims that it lost and cannot have back. Returns how many
-- messages the runs had. Needs the consumer's lock. Locks the claims and runs, and waits for sessions that hold some of
-- them.
create or replace function _pgqueue.forget_runs(p_consumer_id int) returns bigint
language plpgsql
as $$
declare
    v_claims bigint[];
    v_gone   bigint;
    v_slots  bigint;
    v_count  bigint := 0;
begin
    loop  -- claims that need no lock of the consumer may be under way, and leave claims and slices of runs
        with ended as (
            -- lock: claim
            delete from pgqueue.claims where consumer_id = p_consumer_id and live and reader is null returning claim_id
        ), lost as (
            -- lock: claim
            update pgqueue.claims set live = false, remaining = 0, lanes = '{}'
            where reader in (select reader from pgqueue.readers where consumer_id = p_consumer_id)
              and (live or lanes <> '{}')
            returning claim_id
        ), slot as (
            -- lock: slot
            delete from pgqueue.slots s where consumer_id = p_consumer_id
            returning message_count + coalesce(_pgqueue.cardinality(_pgqueue.rest_of(s)), 0) as message_count
        )
        select array(select claim_id from ended union all select claim_id from lost),
               (select coalesce(sum(message_count), 0) from slot)
        into v_claims, v_slots;
        with held as (
            delete from pgqueue.consumer_messages where claim_id = any (v_claims) returning message_count
        ), gone as (
            -- lock: run
            delete from pgqueue.consumer_messages where ctid = any (_pgqueue.unclaimed_places(p_consumer_id))
            returning message_count
        )
        select coalesce(sum(message_count), 0) into v_gone from (select * from held union all select * from gone) m;
        v_count := v_count + v_gone + v_slots;
        exit when not exists (select from _pgqueue.unfinished(p_consumer_id) where state <> 'claimed')
            and not exists (select from _pgqueue.live_claims(p_consumer_id));
    end loop;
    delete from pgqueue.pieces where consumer_id = p_consumer_id;
    delete from pgqueue.freed_keys where consumer_id = p_consumer_id;
    return v_count;
end $$;

-- Stores a run like p_run with other messages, as runs of at most limit_ranges() ranges. Without messages it stores
-- nothing. Returns the number of messages.
create or replace function _pgqueue.store_run(p_run pgqueue.consumer_messages, p_seqs int8multirange) returns bigint
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
    for v_chunk in select * from _pgqueue.split_set(p_seqs) loop
        p_run.seqs := v_chunk.seqs;
        p_run.first_seq := v_chunk.first_seq;
        p_run.message_count := v_chunk.message_count;
        insert into pgqueue.consumer_messages select p_run.*;
        v_count := v_count + v_chunk.message_count;
    end loop;
    return v_count;
end $$;

-- Stores messages of a run as claimed, and counts the delivery. Returns how many messages these are.
create or replace function _pgqueue.claim_run(p_run pgqueue.consumer_messages, p_seqs int8multirange, p_claim_id bigint)
returns bigint
language plpgsql
as $$
begin
    p_run.state := 'claimed';
    p_run.claim_id := p_claim_id;
    p_run.deliver_count := _pgqueue.one_more(p_run.deliver_count);
    p_run.not_visible_until := null;
    p_run.last_delivered_at := clock_timestamp();
    return _pgqueue.store_run(p_run, p_seqs);
end $$;

-- Takes messages out of a claim's runs; the rest of those runs stays claimed.
--   p_set  null: all
-- Returns the messages as runs, as they were. Needs the claim's lock.
create or replace function _pgqueue.take_out(p_claim_id bigint, p_set int8multirange)
returns setof pgqueue.consumer_messages
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
                perform _pgqueue.store_run(v_run, v_run.seqs - v_part);
                v_run.seqs := v_part;
                v_run.first_seq := lower(v_part);
                v_run.message_count := _pgqueue.cardinality(v_part);
            end if;
        end if;
        return next v_run;
    end loop;
end $$;

-- How many messages a claim holds.
create or replace function _pgqueue.held_by(p_claim_id bigint) returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(message_count), 0) from pgqueue.consumer_messages
            where claim_id = p_claim_id and state = 'claimed');
end $$;

-- The first ready run of a lane from a place on, and at_most of its note, which bounds the size of a claim; no row when
-- there is no such run.
create or replace function _pgqueue.next_ready(p_consumer_id int, p_from pgqueue.line_place, out run_ctid tid,
                                               out line_no bigint, out first_seq bigint,
                                               out not_visible_until timestamptz, out at_most bigint)
language plpgsql stable
as $$
begin
    select m.ctid, m.line_no, m.first_seq, m.not_visible_until, (m.note ->> 'at_most')::bigint
    into run_ctid, line_no, first_seq, not_visible_until, at_most
    from pgqueue.consumer_messages m
    where m.consumer_id = p_consumer_id and m.state = 'ready' and m.lane = p_from.lane
      and (m.line_no, m.first_seq) >= (p_from.line_no, p_from.first_seq)
    order by m.line_no, m.first_seq limit 1;
end $$;

-- Whether a consumer has a ready run, in the lanes whose first place is remembered.
create or replace function _pgqueue.has_ready(p_cursor pgqueue.consumer_cursors) returns boolean
language sql stable
as $$
    select exists (select from unnest(p_cursor.scan_from) f
                   cross join lateral _pgqueue.next_ready(p_cursor.consumer_id, f) r where r.run_ctid is not null)
$$;

-- How many slices of the size of a whole claim p_count ready messages make, beside one more slice of the rest. A ready
-- run is sliced for small claims, so that the next claimers find runs that fit, and runs that are not locked.
create or replace function _pgqueue.more_slices(p_count bigint, p_size bigint) returns bigint
language sql immutable parallel safe
as $$
    select case when p_size <= _pgqueue.limit_slice_size()
                then least((p_count - 1) / p_size, _pgqueue.limit_pieces() - 1) else 0 end
$$;

-- The slices of a range that is ready, for claims of p_size.
create or replace function _pgqueue.slices(p_lo bigint, p_hi bigint, p_size bigint) returns table (lo bigint, hi bigint)
language sql immutable parallel safe
as $$
    select p_lo + i * p_size, case when i < n.more then p_lo + (i + 1) * p_size else p_hi end
    from (select _pgqueue.more_slices(p_hi - p_lo, p_size) as more) n cross join lateral generate_series(0, n.more) i
$$;

-- Slices a ready run for a claim that wants fewer messages than it has: a first slice of p_first messages, and the
-- others as slices() makes them. Locks the run.
--   p_first  messages of the first slice; fewer than the run has
--   p_size   messages of the other slices
create or replace function _pgqueue.slice_run(p_ctid tid, p_first bigint, p_size bigint) returns void
language plpgsql
as $$
declare
    v_run    pgqueue.consumer_messages;
    v_slices int8multirange[];
    v_rest   int8multirange;
    v_bound  bigint;
    v_whole  boolean;  -- the run is one range
begin
    delete from pgqueue.consumer_messages where ctid = p_ctid returning * into v_run;
    v_whole := upper(v_run.seqs) - v_run.first_seq = v_run.message_count;
    if v_whole then
        v_bound := v_run.first_seq + p_first;
        v_slices := int8multirange(int8range(v_run.first_seq, v_bound))
            || array(select int8multirange(int8range(lo, hi)) from _pgqueue.slices(v_bound, upper(v_run.seqs), p_size));
    else
        v_rest := v_run.seqs;
        for i in 0.._pgqueue.more_slices(v_run.message_count - p_first, p_size) loop
            v_slices[i] := _pgqueue.below(
                v_rest, _pgqueue.bound_of(v_rest, case when i = 0 then p_first else p_size end));
            v_rest := v_rest - v_slices[i];
        end loop;
        v_slices := v_slices || v_rest;
    end if;
    insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                           first_seq, message_count, seqs, last_delivered_at, note)
    select v_run.consumer_id, v_run.state, v_run.lane, v_run.priority, v_run.deliver_count, v_run.arrival_no,
           v_run.line_no, lower(p), case when v_whole then upper(p) - lower(p) else _pgqueue.cardinality(p) end, p,
           v_run.last_delivered_at, v_run.note
    from unnest(v_slices) p;
end $$;

-- Keeps messages of a run as dead letters.
--   p_owner  of the claim that held them; null: no claim held them
create or replace function _pgqueue.dead_letter(p_run pgqueue.consumer_messages, p_seqs int8multirange, p_reason text,
                                                p_details jsonb, p_owner text default null)
returns void
language sql
as $$
    insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason,
                                       details, claim_id, note, owner)
    select c.stream_id, c.consumer_id, p_seqs, _pgqueue.cardinality(p_seqs), p_run.priority, p_run.deliver_count,
           p_reason, p_details, p_run.claim_id, p_run.note, p_owner
    from pgqueue.consumers c
    where c.consumer_id = p_run.consumer_id;
    select pg_notify(_pgqueue.done_channel(c.consumer_id), '') from pgqueue.consumers c
    where c.consumer_id = p_run.consumer_id and c.notify_done
$$;

-- The note of messages that expire at a time.
create or replace function _pgqueue.expiry(p_expires_at timestamptz) returns jsonb
language sql immutable
as $$ select jsonb_build_object('expires', extract(epoch from p_expires_at)::bigint) $$;

-- Whether messages with this note have expired.
create or replace function _pgqueue.has_expired(p_note jsonb) returns boolean
language plpgsql volatile
as $$
begin
    return ((p_note ->> 'expires')::bigint <= extract(epoch from clock_timestamp())) is true;
end $$;

-- Keeps a run that has expired as a dead letter, and deletes it.
--   p_deliveries  how many deliveries were counted for the run although no worker got it
create or replace function _pgqueue.give_up_expired(p_ctid tid, p_deliveries int) returns void
language plpgsql
as $$
declare
    v_run pgqueue.consumer_messages;
begin
    delete from pgqueue.consumer_messages where ctid = p_ctid returning * into v_run;
    v_run.deliver_count := v_run.deliver_count - p_deliveries;
    v_run.claim_id := null;
    perform _pgqueue.dead_letter(v_run, v_run.seqs, 'expired', null);
end $$;

-- A note with other keys added; null takes a key out. The key attempt, a failed delivery, comes at the end of the list
-- attempts, which keeps the last limit_attempts() of them. The key spark is added up.
create or replace function _pgqueue.noted(p_note jsonb, p_keys jsonb) returns jsonb
language sql immutable
as $$
    select nullif((coalesce(p_note, '{}') || coalesce(p_keys, '{}')
                   || case when p_keys ? 'attempt'
                           then jsonb_build_object('attempts', coalesce(
                                    case when jsonb_array_length(p_note -> 'attempts') >= _pgqueue.limit_attempts()
                                         then (p_note -> 'attempts') - 0 else p_note -> 'attempts' end, '[]')
                                || jsonb_build_array(p_keys -> 'attempt'))
                           else '{}' end
                   || case when p_note ? 'spark' and jsonb_typeof(p_keys -> 'spark') = 'number'
                           then jsonb_build_object('spark', _pgqueue.one_more((p_note ->> 'spark')::int)) else '{}' end)
                  - array(select key from jsonb_each(p_keys) where value = 'null' or key = 'attempt'), '{}')
$$;
