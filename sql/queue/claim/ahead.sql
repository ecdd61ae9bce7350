-- Claims of new messages ahead of the cursor, without the consumer's lock: so no worker waits for another's commit, and
-- a transaction that stays open withholds only what it has claimed. They are for consumers without order, limits and
-- filter, while nothing is ready and no gap is open.
--
-- Such a claim takes a few publications by a row in taken_ahead for each, where others write the cursor. Each
-- publication is taken once:
--   * Of two such claims, only one gets the lock of the publication (try_lock_publication()). With the lock, it checks
--     again that the publication is new.
--   * These claims share a lock of the consumer (lock: new). A session that takes publications with the cursor, or
--     moves it to another position, has this lock exclusively until its commit. A claim that does not get it
--     exclusively also takes publications one by one (catch_up()).
--   * A publication is taken if it is below the cursor and not in a gap, or if it is in taken_ahead. pass_taken() moves
--     the cursor past the rows of taken_ahead, and deletes them.

-- Claims when nothing is free. Returns the claim. If its id is null, message_count is 0 if the consumer has nothing to
-- claim, and null if a claim with the consumer's lock may find something. Locks: as claim_new_ahead(); maybe the
-- consumer.
create or replace function _pgqueue.claim_when_idle(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                    p_max bigint) returns pgqueue.claimed
language plpgsql as $$
declare
    v_claim pgqueue.claimed;
    v_hints pgqueue.claim_hints := p_cursor.hints;
    v_first bigint := p_cursor.next_publication;
    v_next  pgqueue.publications[];
    v_ahead boolean := false;
begin
    if p_consumer.profile = 'simple' then
        v_next := _pgqueue.next_ahead(p_consumer, p_cursor);
        if v_next is null then  -- a publication that was taken ahead is new to the cursor
            p_cursor.next_publication := _pgqueue.end_of_taken(p_cursor);
        end if;
        v_ahead := v_next is not null or p_cursor.next_publication > v_first;
        -- the hints lack the leases of claims ahead of the cursor, which a claim with the lock checks each second
        if v_ahead and not _pgqueue.not_yet(v_hints.probe_at) then
            return v_claim;
        end if;
    end if;
    if v_next is not null then
        if _pgqueue.rebuilt_lately(v_hints) and (v_hints.due_from <= clock_timestamp()) is not true then
            v_claim := _pgqueue.claim_new_ahead(p_consumer, p_cursor, p_max, v_next);
            if _pgqueue.number_in(v_claim.claim_id) % _pgqueue.limit_ahead() = 0 then
                perform _pgqueue.pass_ahead(p_consumer.consumer_id);
            end if;
        end if;
    elsif not _pgqueue.has_new(p_consumer.stream_id, p_cursor, true)
        and _pgqueue.is_idle(p_consumer, p_cursor, not v_ahead) then
        v_claim.message_count := 0;
    end if;
    return v_claim;
end $$;

-- The next publications for claim_new_ahead(), most urgent first. Null: it may not claim any, or none is visible.
create or replace function _pgqueue.next_ahead(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.publications[] language plpgsql stable as $$
declare
    v_hints pgqueue.claim_hints := p_cursor.hints;
    v_first bigint := p_cursor.next_publication;
    v_last  bigint := _pgqueue.last_publication_id(p_consumer.stream_id);
    v_next  pgqueue.publications[];
begin
    if p_consumer.profile <> 'simple' or p_cursor.gaps <> '{}' or v_hints.lanes is null or v_hints.was_cut
       or v_hints.filter_from is not null or _pgqueue.has_free(v_hints) or v_last < v_first then
        return null;
    elsif v_last < v_first + _pgqueue.far_ahead() then  -- nearly always
        v_next := array(
            select p::pgqueue.publications
            from (select * from pgqueue.publications
                  where stream_id = p_consumer.stream_id and publication_id >= v_first
                    and publication_id <> all (array(
                            select publication_id from pgqueue.taken_ahead
                            where consumer_id = p_consumer.consumer_id and publication_id >= v_first))
                  order by publication_id, part limit _pgqueue.limit_ahead() + 1) p
            order by priority desc, publication_id, part);
    else
        v_next := array(
            select p::pgqueue.publications
            from (select * from _pgqueue.published(p_consumer.stream_id, _pgqueue.ids_ahead(p_cursor))
                  limit _pgqueue.limit_ahead() + 1) p
            order by priority desc, publication_id, part);
    end if;
    return nullif(v_next, '{}');
end $$;

-- Claims new messages ahead of the cursor: those of the most urgent publications that no other session is taking, if
-- they are plain and fit, and are so few that a claim with the consumer's lock would cost more.
--   p_next  as returned by next_ahead()
-- Returns the claim. If its id is null, message_count is 0 if others take or have taken all that is new, and null if a
-- claim with the consumer's lock may find something. Locks: what is new, shared; the publications. Claims do not wait
-- for either.
create or replace function _pgqueue.claim_new_ahead(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                    p_max bigint, p_next pgqueue.publications[]) returns pgqueue.claimed
language plpgsql as $$
declare
    v_claim pgqueue.claimed;
    v_part  pgqueue.publications;
    v_left  bigint := p_max;
begin
    if (cardinality(p_next) between 1 and _pgqueue.limit_ahead()) is not true then
        return v_claim;
    elsif cardinality(p_next) > 1 then
        if exists (select from unnest(p_next) where part > 0) then
            return v_claim;
        end if;
    end if;
    foreach v_part in array p_next loop  -- what a claim with the consumer's lock would get
        v_left := v_left - v_part.message_count;
        if v_left < 0 or v_part.priority <> p_next[1].priority or not _pgqueue.is_plain(p_consumer, v_part) then
            return v_claim;
        end if;
        exit when v_left = 0;
    end loop;
    if not pg_try_advisory_xact_lock_shared(_pgqueue.lock_class_new(), p_consumer.consumer_id) then  -- lock: new
        return v_claim;
    end if;
    return _pgqueue.take_ahead(p_consumer, p_max, p_next, p_cursor.last_arrival + 1);
end $$;

-- Whether the messages of a publication in one part are for this consumer, to be delivered now, without expiry, and in
-- one range. (In SQL, to be inlined.)
create or replace function _pgqueue.is_plain(p_consumer pgqueue.consumers, p_publication pgqueue.publications)
returns boolean language sql volatile as $$
    select p_publication.expires_at is null and (p_publication.deliver_at <= clock_timestamp()) is not false
        and _pgqueue.is_for(p_publication.consumers, p_consumer.consumer_id)
        and p_publication.seqs = int8multirange(range_merge(p_publication.seqs))
$$;

-- Takes publications ahead of the cursor that no other session is taking, while they are still new, plain and fit, and
-- claims their messages. The caller has the lock of what is new. (A statement for each publication: nearly always there
-- is one, and a statement for many takes twice as long.)
--   p_place  the place of the messages if they are returned
-- Returns the claim, as claim_new_ahead() does.
create or replace function _pgqueue.take_ahead(p_consumer pgqueue.consumers, p_max bigint,
                                               p_next pgqueue.publications[], p_place bigint) returns pgqueue.claimed
language plpgsql as $$
declare
    v_claim    pgqueue.claimed;
    v_part     pgqueue.publications;
    v_priority int;
    v_count    bigint := 0;
    v_seqs     int8multirange := '{}';
    v_no       bigint;
    v_token    bigint;
begin
    foreach v_part in array p_next loop
        exit when v_count = p_max or v_part.priority <> v_priority;
        if v_count + v_part.message_count > p_max or not _pgqueue.is_plain(p_consumer, v_part) then
            exit when v_count > 0;
            return v_claim;
        end if;
        continue when not _pgqueue.try_lock_publication(p_consumer.consumer_id, v_part.publication_id);
        -- (The cursor and taken_ahead as of one snapshot, because the session that moves the cursor deletes the rows.
        -- "On conflict" would not ensure that.)
        insert into pgqueue.taken_ahead (consumer_id, publication_id, message_count, lane, place, first_seq)
        select p_consumer.consumer_id, v_part.publication_id, v_part.message_count, -v_part.priority, p_place,
               lower(v_part.seqs)
        where v_part.publication_id >= (select next_publication from pgqueue.consumer_cursors
                                        where consumer_id = p_consumer.consumer_id order by version desc limit 1)
          and not exists (select from pgqueue.taken_ahead
                          where consumer_id = p_consumer.consumer_id and publication_id = v_part.publication_id)
          -- (the consumer may have been changed before the claim had the lock)
          and exists (select from pgqueue.consumers
                      where consumer_id = p_consumer.consumer_id and profile = p_consumer.profile);
        continue when not found;
        v_priority := v_part.priority;
        v_count := v_count + v_part.message_count;
        v_seqs := v_seqs + v_part.seqs;
    end loop;
    if v_count = 0 then
        v_claim.message_count := 0;  -- others have taken all of it, or are taking it
        return v_claim;
    end if;
    v_no := nextval('pgqueue.claim_numbers');
    v_token := _pgqueue.new_token(_pgqueue.records_ends(p_consumer));
    insert into pgqueue.consumer_messages (
        consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, message_count, seqs,
        token, claimed_at, lease_until, visibility_timeout, owner)
    values (p_consumer.consumer_id, v_no, -v_priority, p_place, lower(v_seqs), p_place, v_priority, 0, v_count, v_seqs,
            v_token, clock_timestamp(), clock_timestamp() + p_consumer.visibility_timeout,
            p_consumer.visibility_timeout, current_setting('application_name'));
    return (_pgqueue.claim_id(v_no, v_token), v_count, p_consumer.stream_id, v_seqs, v_priority, 1, null,
            null)::pgqueue.claimed;
end $$;

-- Moves the cursor past what was taken ahead of it, up to the first publication that is not taken, if the consumer's
-- lock is free.
create or replace function _pgqueue.pass_ahead(p_consumer_id int) returns void
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
begin
    if _pgqueue.try_lock_consumer(p_consumer_id) then
        v_stored := _pgqueue.cursor(p_consumer_id);
        perform _pgqueue.save_cursor(v_stored, _pgqueue.pass_taken(v_stored, false), true);
    end if;
end $$;
