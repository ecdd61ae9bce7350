-- Making a claim of bundles that the caller has locked or, with the consumer's lock, of new messages.

do $$
begin
    if to_regtype('pgqueue.claimed') is null then
        create type pgqueue.claimed as (
            claim_id bigint,      -- null: there is no claim, ...
            message_count bigint, -- ... and then 0: there is nothing to claim
            stream_id int,
            -- for a claim whose messages are alike; else null
            seqs int8multirange, priority int, deliver_count int, saved jsonb,
            bundles bigint[]);    -- for other claims: the bundles, in the order of delivery
    end if;
end $$;

-- Makes one claim of bundles, with the first as its head. Bundles that were never delivered, and have no keys to order,
-- become one. Returns the claim. Needs the locks of the bundles.
--   p_reader  the Spark reader whose claim it is; null: a worker's
create or replace function _pgqueue.claim_bundles(p_consumer pgqueue.consumers, p_bundles pgqueue.consumer_messages[],
                                                  p_reader uuid default null) returns pgqueue.claimed
language plpgsql as $$
declare
    v_head    pgqueue.consumer_messages := p_bundles[1];
    v_token   bigint := _pgqueue.new_token(p_reader is not null or _pgqueue.records_ends(p_consumer));
    v_now     timestamptz := clock_timestamp();
    v_numbers bigint[] := array(select b.bundle_no from unnest(p_bundles) with ordinality b order by b.ordinality);
    v_all     int8multirange := case when cardinality(p_bundles) = 1 then v_head.seqs
                                     else _pgqueue.seqs_of(p_bundles) end;
    v_count   bigint := _pgqueue.count_of(p_bundles);
    v_alike   boolean := v_head.deliver_count = 0 and v_head.note is null;
begin
    if cardinality(p_bundles) > 1 then
        v_alike := v_alike and not _pgqueue.is_keyed(p_consumer.profile) and lower(v_all) >= v_head.first_seq
            and not exists (select from unnest(p_bundles) b
                            where b.deliver_count > 0 or b.note is not null or b.priority <> v_head.priority)
            and _pgqueue.has_few_ranges(v_all);
        if v_alike then
            delete from pgqueue.consumer_messages where ctid = any (_pgqueue.tids(v_numbers[2:]));
            v_head.seqs := v_all;
            v_head.message_count := v_count;
        else
            update pgqueue.consumer_messages
            set token = v_token, claimed_at = v_now, visibility_timeout = p_consumer.visibility_timeout,
                owner = current_setting('application_name'), head = v_head.bundle_no, reader = p_reader
            where ctid = any (_pgqueue.tids(v_numbers[2:]));
        end if;
    end if;
    update pgqueue.consumer_messages
    set token = v_token, claimed_at = v_now, lease_until = v_now + p_consumer.visibility_timeout,
        visibility_timeout = p_consumer.visibility_timeout, owner = current_setting('application_name'),
        members = case when cardinality(v_numbers) > 1 and not v_alike then v_numbers[2:] end, reader = p_reader,
        seqs = v_head.seqs, message_count = v_head.message_count
    where _pgqueue.is_bundle(bundle_no, v_head.bundle_no);
    return (_pgqueue.claim_id(v_head.bundle_no, v_token), v_count, p_consumer.stream_id, v_all, v_head.priority,
            _pgqueue.one_more(v_head.deliver_count), v_head.note -> 'saved',
            case when not v_alike then v_numbers end)::pgqueue.claimed;
end $$;

-- The keys of new messages, if none of them is in use, so that a claim may have them at once when nothing waits. Null:
-- some key is in use, or the messages are too many.
create or replace function _pgqueue.keys_of_new(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                p_seqs int8multirange, p_count bigint) returns bigint[]
language plpgsql as $$
declare
    v_bundle pgqueue.consumer_messages;
    v_keys   bigint[];
begin
    if p_count > _pgqueue.limit_small() then
        return null;
    end if;
    v_bundle.seqs := p_seqs;
    v_bundle.message_count := p_count;
    v_keys := _pgqueue.keys_in(p_consumer, v_bundle);
    return case when not exists (select from _pgqueue.open_tails(p_consumer.consumer_id, p_hints, v_keys))
                then v_keys end;
end $$;

-- Takes the next publications and claims their messages at once, if nothing is free and they are plain, for this
-- consumer, and due now. Messages beyond p_want become bundles for later claims; with ordering=key, the call does
-- nothing then. Returns the cursor, and the claim; its id is null if nothing was done. Needs the consumer's lock, and
-- catch_up(). (More than 60 lines: the conditions, and one row.)
create or replace function _pgqueue.claim_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                              p_want bigint, p_upto bigint, p_reader uuid,
                                              out o_cursor pgqueue.consumer_cursors, out o_claimed pgqueue.claimed)
language plpgsql as $$
declare
    v_hints pgqueue.claim_hints := p_cursor.hints;
    v_keyed boolean := _pgqueue.is_keyed(p_consumer.profile);
    v_new   record;
    v_first pgqueue.publications;
    v_seqs  int8multirange;  -- of the claim
    v_more  boolean;         -- there are others
    v_keys  bigint[];
    v_token bigint;
    v_now   timestamptz := clock_timestamp();
    v_lane  int;
    v_place bigint;
    v_no    bigint;
begin
    o_cursor := p_cursor;
    if _pgqueue.has_free(v_hints) or _pgqueue.is_screened(p_consumer)
       or v_hints.filter_from is not null  -- these come first: per_key_latest was reset before they were screened
       or (v_keyed and (v_hints.any_waiting or v_hints.all_keys or _pgqueue.limits_keys(p_consumer))) then
        return;
    end if;
    v_new := _pgqueue.next_new(p_consumer, p_cursor, p_upto, _pgqueue.limit_take());
    v_first := v_new.o_first;
    v_seqs := v_new.o_seqs;
    v_more := v_new.o_message_count > p_want;
    if v_new.o_last is null or v_first.deliver_at > v_now or v_first.expires_at is not null
       or not _pgqueue.is_for(v_first.consumers, p_consumer.consumer_id)
       or (v_more and (v_seqs <> int8multirange(range_merge(v_seqs))
                       or (v_keyed and (p_consumer.ordering <> 'stream' or p_want > _pgqueue.limit_small()))))
       or not _pgqueue.has_few_ranges(v_seqs) then
        return;
    end if;
    if v_more then
        v_seqs := int8multirange(int8range(lower(v_seqs), lower(v_seqs) + p_want));
    end if;
    if v_keyed then
        v_keys := _pgqueue.keys_of_new(p_consumer, v_hints, v_seqs, least(v_new.o_message_count, p_want));
        if v_keys is null then
            return;
        end if;
    end if;
    o_cursor.next_publication := v_new.o_last + 1;
    o_cursor.last_arrival := p_cursor.last_arrival + 1;
    o_cursor.taken := o_cursor.taken + v_new.o_message_count;
    v_no := nextval('pgqueue.claim_numbers');
    v_lane := case when v_keyed then _pgqueue.lane_assigned() else -v_first.priority end;
    v_place := case when v_keyed then v_no else o_cursor.last_arrival end;
    v_token := _pgqueue.new_token(p_reader is not null or _pgqueue.records_ends(p_consumer));
    insert into pgqueue.consumer_messages (
        consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, keys, message_count, seqs,
        token, claimed_at, lease_until, visibility_timeout, owner, reader)
    values (p_consumer.consumer_id, v_no, v_lane, v_place, lower(v_seqs), o_cursor.last_arrival, v_first.priority, 0,
            v_keys, least(v_new.o_message_count, p_want), v_seqs, v_token, v_now,
            v_now + p_consumer.visibility_timeout, p_consumer.visibility_timeout, current_setting('application_name'),
            p_reader);
    v_hints.was_cut := v_new.o_count = _pgqueue.limit_take();
    v_hints := _pgqueue.record_place(v_hints, v_lane, v_place, lower(v_seqs), false);
    if v_more then
        v_hints := _pgqueue.store_for_later(p_consumer, v_hints, o_cursor.last_arrival, v_first.priority,
                                            v_new.o_seqs - v_seqs, p_want, v_no);
    end if;
    o_cursor.hints := v_hints;
    o_claimed := (_pgqueue.claim_id(v_no, v_token), least(v_new.o_message_count, p_want), p_consumer.stream_id, v_seqs,
                  v_first.priority, 1, null, null)::pgqueue.claimed;
end $$;

-- Stores new messages that a claim leaves, in one range, as bundles of p_size messages for later claims, a bounded
-- number, and the rest as one bundle. With ordering=stream, the former are assigned, each with the one before as its
-- predecessor. Returns the hints. Needs the consumer's lock; no other bundle may be free.
--   p_claimed  the bundle of the claim, which is before them
create or replace function _pgqueue.store_for_later(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                    p_arrival_no bigint, p_priority int, p_seqs int8multirange,
                                                    p_size bigint, p_claimed bigint) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_stream boolean := p_consumer.ordering = 'stream';
    v_lo     bigint := lower(p_seqs);
    v_count  int := case when p_size <= _pgqueue.limit_small()
                         then least(case when v_stream then _pgqueue.limit_chain_of_stream()
                                         else _pgqueue.limit_cut() end - 1, (upper(p_seqs) - v_lo) / p_size) else 0 end;
    v_rest   bigint := v_lo + v_count * p_size;
    v_lane   int := case when v_stream then _pgqueue.lane_unassigned() else -p_priority end;
    v_no     bigint[] := array(select nextval('pgqueue.claim_numbers')
                               from generate_series(1, v_count + (v_rest < upper(p_seqs))::int));
begin
    -- (two statements: one with both costs twice as much)
    insert into pgqueue.consumer_messages (consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority,
                                           deliver_count, predecessor, keys, message_count, seqs)
    select p_consumer.consumer_id, v_no[i], case when is_assigned then _pgqueue.lane_assigned() else v_lane end,
           case when is_assigned then v_no[i] else p_arrival_no end, lo, p_arrival_no, p_priority, 0,
           case when is_assigned then coalesce(v_no[i - 1], p_claimed) end,
           case when is_assigned then '{0}'::bigint[] end, hi - lo, int8multirange(int8range(lo, hi))
    from (select i, v_lo + (i - 1) * p_size as lo, case when i <= v_count then v_lo + i * p_size
                                                        else upper(p_seqs) end as hi,
                 v_stream and i <= v_count as is_assigned
          from generate_series(1, cardinality(v_no)) i) part;
    if v_count > 0 then
        p_hints.prefetch_at := v_no[3 * (v_count + 1) / 4];
        p_hints.size := p_size;
        p_hints := case when v_stream then _pgqueue.record_place(p_hints, _pgqueue.lane_assigned(), v_no[1], v_lo)
                        else _pgqueue.record_place(p_hints, v_lane, p_arrival_no, v_lo) end;
    end if;
    if v_rest < upper(p_seqs) and (v_stream or v_count = 0) then
        p_hints := _pgqueue.record_place(p_hints, v_lane, p_arrival_no, v_rest);
    end if;
    if v_count > 0 or not v_stream then  -- else the first free bundle is not assigned
        p_hints.idle_until := least(p_hints.probe_at, _pgqueue.next_end(p_consumer.consumer_id, p_hints, false));
    end if;
    return p_hints;
end $$;

-- Locks the first free bundles of a lane, as many as a claim may have. A bundle that is too large is cut, also for
-- later claims. A bundle with at_most may hold a message that kills its worker: it becomes a claim of its own, of at
-- most that many messages. Expired bundles become dead letters, a bounded number.
--   p_want   messages at most
--   p_more   the claim already has other messages
--   p_alone  the caller has the consumer's lock. False: bundles with a note are skipped
-- Returns the bundles; how many messages may follow; whether the claim ends with them; and the number from which claims
-- prefetch, if bundles were cut for later claims.
create or replace function _pgqueue.lock_ready(p_consumer_id int, p_lane pgqueue.lane_hint, p_want bigint,
                                               p_more boolean, p_alone boolean,
                                               out o_bundles pgqueue.consumer_messages[], out o_left bigint,
                                               out o_ends boolean, out o_prefetch_at bigint)
language plpgsql as $$
declare
    v_next    refcursor;  -- (a loop would fetch, and lock, more than needed)
    v_bundle  pgqueue.consumer_messages;
    v_at_most bigint;
    v_count   int;
    v_cut     record;
    v_expired int := 0;
begin
    o_bundles := '{}';
    o_ends := false;
    open v_next for
        select * from pgqueue.consumer_messages
        where consumer_id = p_consumer_id and lane = p_lane.lane
          and (place, first_seq) >= (p_lane.place, p_lane.first_seq) and token is null and (p_alone or note is null)
        order by place, first_seq for update skip locked;  -- lock: bundle
    while not o_ends loop
        fetch v_next into v_bundle;
        exit when not found;
        if v_bundle.note is not null and _pgqueue.has_expired(v_bundle.note) then
            perform _pgqueue.give_up_expired(v_bundle);
            v_expired := v_expired + 1;
            o_ends := v_expired >= _pgqueue.limit_due();
            continue;
        end if;
        v_at_most := (v_bundle.note ->> 'at_most')::bigint;
        o_ends := (v_at_most is not null and p_more) or (v_bundle.not_visible_until > clock_timestamp()) is true;
        exit when o_ends;
        if v_bundle.message_count > least(v_at_most, p_want) then
            v_count := case when not p_more and v_bundle.deliver_count = 0 and v_bundle.note is null
                                 and p_want <= _pgqueue.limit_small()
                            then least(_pgqueue.limit_cut(), v_bundle.message_count / p_want) else 1 end;
            v_cut := _pgqueue.cut(v_bundle, least(v_at_most, p_want), v_count);
            v_bundle := v_cut.o_first;
            o_prefetch_at := case when v_count > 1 then v_cut.o_more end;
        end if;
        o_bundles := o_bundles || v_bundle;
        p_more := true;
        p_want := p_want - v_bundle.message_count;
        o_ends := p_want <= 0 or v_at_most is not null;
    end loop;
    close v_next;
    o_left := p_want;
end $$;

-- Claims free bundles of a consumer that does not deliver by key, in the order of the lanes; see lock_ready(). Returns
-- the hints, and the claim; its id is null if nothing is free.
create or replace function _pgqueue.collect(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints, p_want bigint,
                                            p_reader uuid, p_alone boolean default true,
                                            out o_hints pgqueue.claim_hints, out o_claimed pgqueue.claimed)
language plpgsql as $$
declare
    v_lane    pgqueue.lane_hint;
    v_ready   record;
    v_bundles pgqueue.consumer_messages[] := '{}';
    v_left    bigint := p_want;
begin
    o_hints := p_hints;
    foreach v_lane in array p_hints.lanes loop
        continue when v_lane.place is null;
        v_ready := _pgqueue.lock_ready(p_consumer.consumer_id, v_lane, v_left, v_bundles <> '{}', p_alone);
        v_bundles := v_bundles || v_ready.o_bundles;
        v_left := v_ready.o_left;
        if v_ready.o_prefetch_at is not null then
            o_hints.prefetch_at := v_ready.o_prefetch_at;
            o_hints.size := p_want;
        end if;
        exit when v_ready.o_ends;
    end loop;
    if v_bundles <> '{}' then
        o_claimed := _pgqueue.claim_bundles(p_consumer, v_bundles, p_reader);
    end if;
end $$;
