-- Claims without the consumer's lock: one update of the first free bundle, if it has the size of the claim and nothing
-- known comes before it. Nearly all claims of workers end here. Some of them prefetch: with the lock, they prepare the
-- next bundles.

-- Claims the first free bundle of a consumer: by key, one with at most p_max messages, if bundles of about that size
-- were assigned last. Some claims of the last bundles of their size prefetch. Returns the claim. If its id is null,
-- message_count is 0 if the consumer has nothing to claim, and null if a claim with the lock may find something. Locks:
-- the bundle; maybe the consumer. (More than 60 lines: the statements are written out, because the call of a function
-- costs a tenth of a claim.)
create or replace function _pgqueue.claim_free(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                               p_max int) returns pgqueue.claimed
language plpgsql as $$
declare
    v_hints pgqueue.claim_hints := p_cursor.hints;
    v_lane  pgqueue.lane_hint := v_hints.lanes[1];
    v_claim pgqueue.claimed;
begin
    if _pgqueue.not_yet(v_hints.idle_until) is not true then
        return _pgqueue.claim_when_idle(p_consumer, p_cursor, p_max);
    elsif not _pgqueue.is_keyed(p_consumer.profile) then
        if v_lane.place is null then  -- of the more urgent messages, all are claimed
            v_lane := _pgqueue.first_lane(v_hints);
        end if;
        update pgqueue.consumer_messages
        set token = _pgqueue.new_token(_pgqueue.records_ends(p_consumer)), claimed_at = clock_timestamp(),
            lease_until = clock_timestamp() + p_consumer.visibility_timeout,
            visibility_timeout = p_consumer.visibility_timeout, owner = current_setting('application_name')
        where ctid = (select ctid from pgqueue.consumer_messages
                      where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
                        and (place, first_seq) >= (v_lane.place, v_lane.first_seq) and token is null
                      order by place, first_seq limit 1
                      for update skip locked)  -- lock: bundle
          and message_count = p_max and note is null
          and not exists (select from pgqueue.publications
                          where stream_id = p_consumer.stream_id and publication_id >= p_cursor.next_publication
                            and priority > 0 and priority > -v_lane.lane)
        returning _pgqueue.claim_id(bundle_no, token), message_count, p_consumer.stream_id, seqs, priority,
                  deliver_count + 1, null, case when deliver_count > 0 then array[bundle_no] end
        into v_claim;
    elsif p_max >= v_hints.size and p_max < 2::bigint * v_hints.size then
        update pgqueue.consumer_messages m
        set token = _pgqueue.new_token(_pgqueue.records_ends(p_consumer)), claimed_at = clock_timestamp(),
            lease_until = clock_timestamp() + p_consumer.visibility_timeout,
            visibility_timeout = p_consumer.visibility_timeout, owner = current_setting('application_name')
        where ctid = (select ctid from pgqueue.consumer_messages c
                      where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
                        and (place, first_seq) >= (v_lane.place, v_lane.first_seq) and token is null
                        and message_count <= p_max and note is null
                        and (predecessor is null or (select true from pgqueue.consumer_messages b
                                                where _pgqueue.is_bundle(bundle_no, c.predecessor) limit 1) is null)
                        -- with ordering=stream only the first: all others follow it
                        and (p_consumer.ordering <> 'stream'
                             or bundle_no = (select bundle_no from pgqueue.consumer_messages
                                             where consumer_id = p_consumer.consumer_id
                                               and lane = _pgqueue.lane_assigned()
                                               and (place, first_seq) >= (v_lane.place, v_lane.first_seq)
                                               and token is null
                                             order by place, first_seq limit 1))
                      order by place, first_seq limit 1
                      for update skip locked)  -- lock: bundle
        returning _pgqueue.claim_id(m.bundle_no, m.token), m.message_count, p_consumer.stream_id, m.seqs, m.priority,
                  m.deliver_count + 1, null, case when m.deliver_count > 0 then array[m.bundle_no] end
        into v_claim;
    end if;
    -- each fourth claim from this number on; numbers in ids are 20 bits
    if (_pgqueue.number_in(v_claim.claim_id) - v_hints.prefetch_at & 524291) = 0 then
        perform _pgqueue.prefetch(p_consumer, p_cursor);
    elsif v_claim.claim_id is null then
        v_claim.message_count := case when _pgqueue.is_keyed(p_consumer.profile)
                                           and _pgqueue.is_blocked(p_consumer, p_cursor) then 0 end;
        if p_consumer.ordering = 'stream' and v_claim.message_count is null
           and p_max >= v_hints.size and p_max < 2::bigint * v_hints.size then  -- its claim may have ended since
            return _pgqueue.claim_without_lock(p_consumer, p_max);
        end if;
    end if;
    return v_claim;
end $$;

-- Whether nothing can be claimed by key until another claim ends: a claim with ordering=stream is open; or all assigned
-- bundles have predecessors, nothing is new or unassigned, and no waiting key may be assigned.
create or replace function _pgqueue.is_blocked(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns boolean language plpgsql as $$
declare
    v_hints    pgqueue.claim_hints := p_cursor.hints;
    v_assigned pgqueue.lane_hint := v_hints.lanes[1];
begin
    if p_consumer.ordering = 'stream' then
        return exists (select from _pgqueue.assigned(p_consumer.consumer_id, v_assigned) where token is not null);
    end if;
    return v_assigned.lane = _pgqueue.lane_assigned() and cardinality(v_hints.lanes) = 1 and v_hints.lanes_from is null
        and not v_hints.was_cut and not _pgqueue.has_new(p_consumer.stream_id, p_cursor, false)
        and not exists (select from pgqueue.consumer_messages
                        where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_assigned()
                             and (place, first_seq) >= (v_assigned.place, v_assigned.first_seq)
                             and token is null and (predecessor is null or _pgqueue.is_deleted(predecessor)))
        and not _pgqueue.has_free_key(p_consumer, v_hints);
end $$;

-- Prefetches: cuts or assigns more bundles while some are left, so that no claim waits for it. Does nothing if a
-- session has the consumer's lock, or had it since. Locks: the consumer, if it is free.
--   p_cursor  the cursor that the claim has read
create or replace function _pgqueue.prefetch(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns void language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_ready  record;
    v_cursor pgqueue.consumer_cursors;
    v_hints  pgqueue.claim_hints;
begin
    if not _pgqueue.has_more(p_consumer, p_cursor) or not _pgqueue.try_lock_consumer(p_consumer.consumer_id) then
        return;
    end if;
    p_consumer := _pgqueue.consumer_now(p_consumer);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    if v_stored.version <> p_cursor.version then
        raise exception using errcode = 'PQ099';
    end if;
    v_ready := _pgqueue.catch_up(p_consumer, v_stored, null);
    v_cursor := _pgqueue.take_new(p_consumer, v_ready.p_cursor, false, (v_stored.hints).size, v_ready.p_upto);
    v_hints := v_cursor.hints;
    v_hints.prefetch_at := null;
    if _pgqueue.is_keyed(p_consumer.profile) then
        v_hints := (_pgqueue.assign(p_consumer, v_hints, v_hints.size)).o_hints;
    else
        v_hints := _pgqueue.cut_next(p_consumer, v_hints);
    end if;
    v_cursor.hints := v_hints;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(p_consumer, v_cursor), true);
exception when sqlstate 'PQ099' then
    null;  -- the exception releases the lock: the transaction may take long
end $$;

-- Whether there may be something to cut or assign. (Otherwise a claim would hold the lock for nothing.)
create or replace function _pgqueue.has_more(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns boolean language plpgsql stable as $$
declare
    v_hints pgqueue.claim_hints := p_cursor.hints;
    v_lane  pgqueue.lane_hint := case when _pgqueue.is_keyed(p_consumer.profile)
                                      then _pgqueue.lane_of(v_hints, _pgqueue.lane_unassigned())
                                      else _pgqueue.first_lane(v_hints) end;
begin
    return _pgqueue.has_new(p_consumer.stream_id, p_cursor, false)
        or (_pgqueue.is_keyed(p_consumer.profile) and v_hints.any_waiting)
        or exists (select from (select message_count from pgqueue.consumer_messages
                                where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
                                  and (place, first_seq) >= (v_lane.place, v_lane.first_seq) and token is null
                                order by place, first_seq limit 2 * _pgqueue.limit_cut()) f
                   where _pgqueue.is_keyed(p_consumer.profile) or f.message_count >= 2::bigint * v_hints.size);
end $$;

-- Claims while another session has the consumer's lock: free bundles, as they are or cut, or what is new; by key only
-- assigned bundles. Due work is left to the session with the lock. Returns the claim. If its id is null, message_count
-- is as in claim_new_ahead() and is_blocked(), and no bundle is locked.
create or replace function _pgqueue.claim_without_lock(p_consumer pgqueue.consumers, p_max int) returns pgqueue.claimed
language plpgsql as $$
declare
    v_cursor  pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_hints   pgqueue.claim_hints := v_cursor.hints;
    v_bundles pgqueue.consumer_messages[];
    v_claim   pgqueue.claimed;
begin
    if not _pgqueue.has_free(v_hints) then
        return _pgqueue.claim_new_ahead(p_consumer, v_cursor, p_max,
                                         _pgqueue.next_ahead(p_consumer, v_cursor));
    elsif not _pgqueue.is_keyed(p_consumer.profile) then
        return (_pgqueue.collect(p_consumer, v_hints, p_max, null, false)).o_claimed;
    end if;
    v_bundles := _pgqueue.lock_assigned(p_consumer, v_hints, p_max, false);
    if v_bundles <> '{}' then
        return _pgqueue.claim_bundles(p_consumer, v_bundles);
    end if;
    -- (with ordering=stream, another claim has the first assigned bundle, unless this one could not have claimed it)
    v_claim.message_count := case
        when _pgqueue.is_blocked(p_consumer, v_cursor)
             or (p_consumer.ordering = 'stream' and exists (
                     select from _pgqueue.bundles(array[_pgqueue.first_of_stream(
                         p_consumer.consumer_id, _pgqueue.lane_of(v_hints, _pgqueue.lane_assigned()))])
                     where note is null and message_count <= p_max)) then 0 end;
    return v_claim;
end $$;

-- Cuts the next free bundle that is large enough, in the size of the last cut. Returns the hints. Needs the consumer's
-- lock.
create or replace function _pgqueue.cut_next(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints)
returns pgqueue.claim_hints language plpgsql as $$
declare
    v_lane   pgqueue.lane_hint := _pgqueue.first_lane(p_hints);
    v_bundle pgqueue.consumer_messages;
begin
    select b.* into v_bundle
    from (select ctid as tid, message_count, deliver_count, note, place, first_seq from pgqueue.consumer_messages
          where consumer_id = p_consumer.consumer_id and lane = v_lane.lane
            and (place, first_seq) >= (v_lane.place, v_lane.first_seq) and token is null
          order by place, first_seq limit 2 * _pgqueue.limit_cut()) f
    join pgqueue.consumer_messages b on b.ctid = f.tid
    where f.message_count >= 2::bigint * p_hints.size and f.deliver_count = 0 and f.note is null
    order by f.place, f.first_seq limit 1
    for update of b skip locked;  -- lock: bundle
    if v_bundle.token is null and v_bundle.message_count >= 2::bigint * p_hints.size then
        p_hints.prefetch_at := (_pgqueue.cut(v_bundle, p_hints.size, least(
            _pgqueue.limit_cut(), v_bundle.message_count / p_hints.size)::int)).o_more;
    end if;
    return p_hints;
end $$;
