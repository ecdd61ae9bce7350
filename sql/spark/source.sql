-- The Spark source. A checkpoint reader represents one checkpoint. Its claims are fixed, ordered sets, so the offsets
-- (reader, claim) always name the same messages of a micro-batch.

-- Returns the id and kind of a stream, for a Spark query. Errors: PQ001.
create or replace function pgqueue.open_stream(p_stream text) returns table (stream_id int, kind text)
language sql stable as $$ select s.stream_id, s.kind from _pgqueue.stream(p_stream) s $$;

-- Returns all streams with their ids and kinds, for a Spark query that reads streams by a pattern. Errors: none.
create or replace function pgqueue.open_streams() returns table (stream text, stream_id int, kind text)
language sql stable as $$ select s.name, s.stream_id, s.kind from pgqueue.streams s order by s.name collate "C" $$;

-- Returns the id and settings of a consumer, for a Spark query or a worker. The identity is globally unique; the
-- channel is for notifications of the stream. Errors: PQ001, PQ002.
create or replace function pgqueue.open_consumer(p_stream text, p_consumer text)
returns table (stream_id int, kind text, consumer_id int, ordering text, visibility_timeout interval, identity text,
               channel text, keeps_history boolean, paused boolean)
language sql stable as $$
    select s.stream_id, s.kind, c.consumer_id, c.ordering, c.visibility_timeout,
           format('%s-%s-%s', (select oid from pg_database where datname = current_database()), c.consumer_id,
                  (extract(epoch from c.created_at) * 1000000)::bigint), _pgqueue.channel(s.stream_id),
                  c.keep_history is not null, c.paused
    from _pgqueue.consumer(p_stream, p_consumer) c join pgqueue.streams s using (stream_id)
$$;

-- Acknowledges the finished batches of a Spark query, and returns the end offset of its next micro-batch. It
-- acknowledges the claims of the checkpoint reader up to the start offset. Claims beyond the start (after a crash
-- between the claim and the write of the offset log) are the batch; if there are none, it claims available messages.
--   p_start_claim, p_start_messages  the start offset; 0, 0 for a new query
--   p_max                            the maximum number of messages; null: all available (in up to 1,000,000
--                                    publications)
--   p_visibility_timeout             null: the consumer's
--   p_upto_publication               the last publication to claim from; null: no limit
--   p_max_bytes                      the maximum bytes of data, but at least one message; null: no limit
-- Returns one row:
--   claim_id, messages  the end offset; the start offset, if there are no messages
--   claimed             the number of messages of the batch
--   lost                messages acknowledged although their lease had ended: another claim may have them too
--   next_due            when the next delayed message is due or, if there are no messages, the next lease ends
--   bytes               the bytes of data of a new claim; null without p_max_bytes or without a new claim
--   limited             with p_upto_publication: whether there are no messages because the limits of the consumer hold
--                       them back
-- A repetition with the same start returns the same end. Errors: PQ002, PQ003, PQ005, PQ006 for a group or a consumer
-- with limits of keys, PQ007, PQ010; 55P03. Locks: the reader, the consumer, its claims, the schedules that are due,
-- the reader's row. (More than 60 lines: one step of the protocol, in its order.)
create or replace function pgqueue.reader_claim(p_reader uuid, p_consumer_id int, p_start_claim bigint,
                                                p_start_messages bigint, p_max bigint default null,
                                                p_visibility_timeout interval default null,
                                                p_upto_publication bigint default null, p_max_bytes bigint default null)
returns table (claim_id bigint, messages bigint, claimed bigint, lost bigint, next_due timestamptz, bytes bigint,
               limited boolean)
language plpgsql as $$
declare
    v_consumer pgqueue.consumers;
    v_reader   pgqueue.readers;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_claim_id bigint;
    v_acked    record;
    v_fill     record;
begin
    perform _pgqueue.check_positive('p_max_bytes', p_max_bytes);
    perform _pgqueue.check_offset(p_reader, p_start_claim, p_start_messages);
    v_consumer := _pgqueue.begin_claim('reader', p_max, p_visibility_timeout, p_reader => p_reader,
                                       p_consumer_id => p_consumer_id);
    v_reader := _pgqueue.check_reader(p_reader, p_consumer_id, p_start_claim, p_start_claim);
    v_stored := _pgqueue.cursor(p_consumer_id);
    v_cursor := v_stored;
    claim_id := p_start_claim;
    messages := p_start_messages;
    claimed := 0;
    v_acked := _pgqueue.acknowledge_upto(p_reader, p_start_claim);
    lost := v_acked.o_lost;

    if v_reader.last_claim > p_start_claim then
        perform pgqueue.reader_extend(p_reader, p_visibility_timeout);
        claim_id := v_reader.last_claim;
        messages := v_reader.messages;
        claimed := messages - p_start_messages;
    elsif not v_consumer.paused then
        v_claim_id := _pgqueue.new_reader_claim_id();
        perform _pgqueue.refuse_behind('claims') where v_claim_id <= v_reader.last_claim;
        p_max := least(p_max, 1000000000000);
        limited := p_upto_publication is not null
            and _pgqueue.limits_hold_back(v_consumer, v_cursor, p_upto_publication);
        if p_max_bytes is null then
            v_fill := _pgqueue.serve_claim(v_consumer, v_cursor, p_max, p_upto_publication, p_reader);
        else
            v_fill := _pgqueue.serve_claim_within(v_consumer, v_cursor, p_max, p_upto_publication, p_reader,
                                                  p_max_bytes);
            bytes := v_fill.o_bytes;
        end if;
        v_cursor := v_fill.o_cursor;
        if (v_fill.o_claimed).claim_id is not null then
            claimed := (v_fill.o_claimed).message_count;
            messages := p_start_messages + claimed;
            claim_id := v_claim_id;
            insert into pgqueue.reader_claims (reader, claim_id, consumer_id, head, token, message_count, seqs,
                                               arrival_nos)
            select p_reader, v_claim_id, p_consumer_id, min(b.bundle_no) filter (where b.head is null),
                   min(b.token), claimed, range_agg(b.seqs), range_agg(int8range(b.arrival_no, b.arrival_no, '[]'))
            from _pgqueue.claimed_bundles(v_fill.o_claimed) b;
        end if;
    end if;

    if v_acked.o_any or claimed > 0 then
        perform _pgqueue.commit_durably();
        insert into pgqueue.readers as r (reader, consumer_id, acked_claim, last_claim, messages, lost)
        values (p_reader, p_consumer_id, p_start_claim, reader_claim.claim_id, reader_claim.messages, reader_claim.lost)
        on conflict (reader) do update  -- lock: reader row
        set acked_claim = excluded.acked_claim, last_claim = excluded.last_claim, messages = excluded.messages,
            lost = r.lost + excluded.lost, used_at = clock_timestamp();
    elsif v_reader.used_at < clock_timestamp() - interval '1 hour' then
        update pgqueue.readers set used_at = clock_timestamp() where reader = p_reader;
    end if;
    perform _pgqueue.save_cursor(v_stored, v_cursor, v_acked.o_any or claimed > 0);
    next_due := _pgqueue.next_due(v_consumer, v_cursor, claimed = 0);
    limited := coalesce(limited and claimed = 0, false);
    return next;
end $$;

-- Extends the claims of a Spark query, as its heartbeat. The leases of the reader's live claims restart.
--   p_visibility_timeout  the claims have it from now on: the query's, which decides when it extends them again. Null:
--                         they keep theirs
-- Returns the number of claims. Errors: PQ003. Locks: those claims.
create or replace function pgqueue.reader_extend(p_reader uuid, p_visibility_timeout interval default null)
returns bigint
language sql as $$
    select pgqueue.check_timeout('p_visibility_timeout', p_visibility_timeout) where p_visibility_timeout is not null;
    with extended as (
        update pgqueue.consumer_messages m  -- lock: bundle
        set visibility_timeout = coalesce(p_visibility_timeout, m.visibility_timeout),
            lease_until = clock_timestamp() + coalesce(p_visibility_timeout, m.visibility_timeout),
            -- a lease that ends earlier now is found at its place; expire() corrects one that ends later
            place = case when m.lane <> _pgqueue.lane_long() then m.place
                         else least(m.place, _pgqueue.place_at(
                             clock_timestamp() + coalesce(p_visibility_timeout, m.visibility_timeout))) end
        from pgqueue.reader_claims r
        where r.reader = p_reader and _pgqueue.is_bundle(m.bundle_no, r.head)
          and m.token = r.token
        returning 1
    )
    select count(*) from extended
$$;

-- Prepares the messages of a micro-batch for a read or a repeated read. It extends the reader's claims, and claims back
-- the free messages of those in (start, end] that the reader lost. A batch that another process had planned counts as
-- delivered again (deliver_count).
--   p_process             the id of the calling process. Planning a batch again counts as a delivery in another
--                         process, but not in the same one. Null: nothing is counted
--   p_quarantine_after    bisect a batch that so many processes started and none finished, see spark/quarantine.sql;
--                         null: never
--   p_visibility_timeout  for all claims of the reader; null: they keep theirs, and messages that are claimed back get
--                         the consumer's
-- Returns one row:
--   planned     the current number of messages of the batch
--   taken_over  messages of the batch that were lost to other claims
--   gone        messages of the batch that were deleted; taken_over + gone is the result of reader_lost
--   returned    messages that were returned because the batch was bisected
--   poison      messages of the batch that became dead letters
-- Errors: PQ002, PQ003, PQ005, PQ007; 55P03; PQ006 for a consumer that has limits of keys now; PQ010 when the batch was
-- acknowledged before. Locks: the reader, the consumer, its claims. (More than 60 lines: one step of the protocol, as
-- reader_claim.)
create or replace function pgqueue.reader_resume(p_reader uuid, p_consumer_id int, p_start_claim bigint,
                                                 p_end_claim bigint, p_process uuid default null,
                                                 p_quarantine_after bigint default null,
                                                 p_visibility_timeout interval default null)
returns table (planned bigint, taken_over bigint, gone bigint, returned bigint, poison bigint)
language plpgsql as $$
declare
    v_consumer  pgqueue.consumers;
    v_reader    pgqueue.readers;
    v_stored    pgqueue.consumer_cursors;
    v_cursor    pgqueue.consumer_cursors;
    v_claim     pgqueue.reader_claims;
    v_restarted boolean;  -- another process planned the batch before
    v_cut       record;
    v_again     bigint[];
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_offset(p_reader, p_start_claim, p_end_claim);
    perform _pgqueue.check_positive('p_quarantine_after', p_quarantine_after);
    v_consumer := _pgqueue.check_kind('reader', _pgqueue.own_reader(p_reader, p_consumer_id));
    v_consumer.visibility_timeout := coalesce(p_visibility_timeout, v_consumer.visibility_timeout);
    v_reader := _pgqueue.check_reader(p_reader, p_consumer_id, p_start_claim, p_end_claim);
    v_stored := _pgqueue.cursor(p_consumer_id);
    v_restarted := coalesce(v_reader.planned_to >= p_end_claim and v_reader.planned_by <> p_process, false);
    v_cut := _pgqueue.quarantine(v_consumer, v_stored, v_reader, p_start_claim, p_end_claim,
                                 case when v_restarted then p_quarantine_after end);
    v_cursor := v_cut.p_cursor;
    returned := v_cut.o_returned;
    poison := v_cut.o_poison;
    perform pgqueue.reader_extend(p_reader, p_visibility_timeout);
    v_again := array(
        select b.bundle_no from pgqueue.reader_claims c cross join lateral _pgqueue.bundles_of(c.head, c.token) b
        where c.reader = p_reader and c.claim_id > p_start_claim
          and c.claim_id <= least(p_end_claim, v_reader.planned_to) and v_reader.planned_by <> p_process);
    update pgqueue.consumer_messages
    set deliver_count = _pgqueue.one_more(deliver_count), claimed_at = clock_timestamp(),
        note = _pgqueue.merged_note(note, '{"spark": 1}')
    where ctid = any (_pgqueue.tids(v_again));
    for v_claim in
        select * from pgqueue.reader_claims c
        where c.reader = p_reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim
          and _pgqueue.remaining(c) = 0 and c.settled < c.message_count
          and c.arrival_nos <> '{}'  -- else its consumer was moved
        order by c.claim_id
    loop
        v_cursor := _pgqueue.claim_back(v_consumer, v_cursor, v_claim);
    end loop;
    select coalesce(sum(_pgqueue.remaining(c) + _pgqueue.cardinality(_pgqueue.seqs_settled_early(c))), 0),
           coalesce(sum(_pgqueue.count_gone(v_consumer.stream_id, c)), 0)
    into planned, gone
    from pgqueue.reader_claims c
    where c.reader = p_reader and c.claim_id > p_start_claim and c.claim_id <= p_end_claim;
    taken_over := pgqueue.reader_lost(p_reader, p_start_claim, p_end_claim) - gone;
    if p_process is not null
       and (v_reader.planned_by is distinct from p_process or v_reader.planned_to < p_end_claim) then
        update pgqueue.readers
        set planned_by = p_process, planned_to = greatest(planned_to, p_end_claim), used_at = clock_timestamp(),
            starts = case when v_restarted then starts + 1 else 1 end,
            first_start = case when v_restarted then first_start else clock_timestamp() end,
            alone = not exists (select from _pgqueue.sibling_readers(v_reader)), isolate = v_cut.o_isolate
        where reader = p_reader;
    end if;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(v_consumer, v_cursor), true);
    return next;
end $$;

-- Of the messages that a reader's claim lost before its query settled them: the number that retention removed from this
-- consumer, or that were deleted. Other trimmed messages had been settled.
create or replace function _pgqueue.count_gone(p_stream_id int, p_claim pgqueue.reader_claims) returns bigint
language plpgsql stable as $$
declare
    v_lost  bigint := p_claim.message_count - _pgqueue.remaining(p_claim) - p_claim.settled;
    v_rest  int8multirange := p_claim.seqs;
    v_skips int8multirange;
begin
    if v_lost = 0 then
        return 0;
    end if;
    v_rest := v_rest - (select coalesce(range_agg(seqs), '{}') from _pgqueue.bundles_of(p_claim.head, p_claim.token));
    v_skips := v_rest * coalesce((select seqs from pgqueue.skips where consumer_id = p_claim.consumer_id), '{}');
    v_rest := v_rest - v_skips - (_pgqueue.trimmed(p_stream_id)).o_seqs - _pgqueue.seqs_settled_early(p_claim);
    -- rows that the query settled before the loss may be deleted too, and are not recorded: so at most v_lost
    return least(_pgqueue.cardinality(v_skips) + _pgqueue.cardinality(v_rest)
                 - _pgqueue.count_stored(p_stream_id, v_rest), v_lost);
end $$;

-- Returns how many messages of a micro-batch its reader has lost to other claims, because a lease ended. A query that
-- has read the batch must not deliver it if the result is larger than taken_over + gone of reader_resume. Locks
-- nothing.
create or replace function pgqueue.reader_lost(p_reader uuid, p_start_claim bigint, p_end_claim bigint) returns bigint
language sql stable as $$
    select coalesce(sum(c.message_count - c.settled - _pgqueue.remaining(c)), 0)::bigint from pgqueue.reader_claims c
    where reader = p_reader and claim_id > p_start_claim and claim_id <= p_end_claim
$$;

-- Returns how many messages other readers of a consumer hold, and when their last lease ends. It is for a query that
-- finds no messages. Locks nothing.
create or replace function pgqueue.reader_others(p_reader uuid, p_consumer_id int)
returns table (messages bigint, until timestamptz)
language sql stable as $$
    select coalesce(sum(_pgqueue.remaining(c)), 0)::bigint, max(h.lease_until)
    from pgqueue.readers r join pgqueue.reader_claims c on c.reader = r.reader
    cross join lateral _pgqueue.bundles_of(c.head, c.token) h
    where r.consumer_id = p_consumer_id and r.reader <> p_reader and h.head is null
      and h.lease_until > clock_timestamp()
$$;

-- Returns the messages of a micro-batch as ranges of numbers [lo, hi), in the order of delivery. Ranges are merged for
-- ordering=none, which guarantees no order beyond priority. Messages that the query has settled by actions are
-- included, as they were, without those that retention has trimmed since. Locks nothing.
create or replace function pgqueue.reader_plan(p_reader uuid, p_start_claim bigint, p_end_claim bigint)
returns table (lo bigint, hi bigint, priority int, deliver_count int)
language sql stable as $$
    with claim as materialized (
        select c, c.claim_id, _pgqueue.is_keyed(o.profile) as keyed
        from pgqueue.reader_claims c join pgqueue.consumers o using (consumer_id)
        where reader = p_reader and claim_id > p_start_claim and claim_id <= p_end_claim
    ), bundle as (
        select r.keyed, r.claim_id, m.arrival_no, m.priority, _pgqueue.one_more(m.deliver_count) as deliver_count,
               m.seqs
        from claim r cross join lateral _pgqueue.bundles_of((r.c).head, (r.c).token) m
        union all
        select r.keyed, r.claim_id, a.arrival_no, a.priority, a.deliver_count, _pgqueue.common(a.seqs, t.seqs)
        from claim r cross join lateral (select _pgqueue.seqs_settled_early(r.c) as seqs offset 0) t
        cross join lateral unnest((r.c).settled_early) a
    ), merged as (
        select array[case when keyed then claim_id else -priority end, case when keyed then arrival_no end] as place,
               priority, deliver_count, range_agg(seqs) as seqs
        from bundle group by 1, priority, deliver_count
    )
    select lower(g), upper(g), priority, deliver_count
    from merged cross join lateral unnest(seqs) g
    order by place, lower(g)
$$;

-- Records the Spark query of a reader, and refuses a second reader of the same query. Errors: PQ009 when another reader
-- of the consumer belongs to the same query, as in a self-join: each would get a part of the messages. Locks: the
-- reader's row.
create or replace function pgqueue.reader_query(p_reader uuid, p_query_id text) returns void
language plpgsql as $$
begin
    perform _pgqueue.await('checkpoint reader ' || p_reader,
        'update pgqueue.readers set query_id = $2 ->> 1 where reader = ($2 ->> 0)::uuid '
        'and query_id is distinct from $2 ->> 1 returning 0',  -- lock: reader row
        null, jsonb_build_array(p_reader, p_query_id));
exception when unique_violation then
    raise exception 'query % reads % twice: each of its two readers would get a part of the messages', p_query_id,
                    (select _pgqueue.consumer_name(consumer_id) from pgqueue.readers where reader = p_reader)
        using errcode = 'PQ009',
              hint = 'Read the consumer once and derive both sides from that, or give each side a consumer of its own.';
end $$;
