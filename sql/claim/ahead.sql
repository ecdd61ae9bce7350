-- Claims of new messages ahead of the cursor, which need no lock of the consumer: so no worker waits for another one's
-- commit, and a transaction that stays open keeps from the others only what it has claimed. For consumers without
-- order, limits and filter, while nothing is ready, and no gap is open.
--
-- Such a claim takes a few publications, and inserts a row of taken_ahead for each, where others write the cursor. Each
-- publication is taken once:
--   * Of two such claims, one has the lock of the publication (try_lock_publication()). It looks once more, after that,
--     whether the publication is still new.
--   * They share a lock of the consumer (lock: new). Who takes publications with the cursor, or moves it to a position,
--     has this lock alone until its commit. A claim that does not get it alone takes one by one, too (catch_up()).
--   * Taken is what is below the cursor and not in a gap, or in taken_ahead. pass_taken() moves the cursor past rows of
--     taken_ahead, and deletes them.

-- Claims when nothing is free. Returns the claim; its id is null when there is none. Then message_count is 0 if the
-- consumer has nothing to claim, and null if a claim with the consumer's lock may find something. Locks: as
-- claim_new_ahead(); maybe the consumer.
create or replace function _pgqueue.claim_at_rest(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  p_max bigint) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_claim pgqueue.claimed;
    v_ids   int8multirange := case when p_consumer.way = 'simple' then _pgqueue.ids_ahead(p_cursor) end;
begin
    -- (a publication that was taken ahead is new, by the cursor)
    if (upper(v_ids) > p_cursor.next_publication + _pgqueue.far_ahead()) is not true
       and not _pgqueue.has_new(p_consumer.stream_id, p_cursor, true) then
        v_claim.message_count := case when _pgqueue.is_at_rest(p_consumer, p_cursor, true) then 0 end;
    elsif p_consumer.way = 'simple' and _pgqueue.need_not_look((p_cursor.hints).probe_at)
       and _pgqueue.is_at_rest(p_consumer, p_cursor, false) then  -- who looks at the leases does so each second
        v_claim := _pgqueue.claim_new_ahead(p_consumer, p_cursor, p_max, v_ids, true);
        if _pgqueue.number_in(v_claim.claim_id) % _pgqueue.limit_ahead() = 0 then
            perform _pgqueue.pass_ahead(p_consumer.consumer_id);
        end if;
    end if;
    return v_claim;
end $$;

-- Claims new messages ahead of the cursor: those of the most urgent publications, as far as nobody else is taking them,
-- if these are plain and fit, and are not so many that a claim with the consumer's lock has less work.
--   p_ids      as of ids_ahead()
--   p_at_rest  nothing else can be claimed
-- Returns the claim; its id is null when there is none. Then message_count is 0 if others are taking all that is new,
-- or have taken it, and nothing else can be claimed; and null if a claim with the consumer's lock may find something.
-- Locks: what is new, shared; the publications. Claims do not wait for these.
create or replace function _pgqueue.claim_new_ahead(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                    p_max bigint, p_ids int8multirange, p_at_rest boolean)
returns pgqueue.claimed
language plpgsql
as $$
declare
    v_claim    pgqueue.claimed;
    v_next     pgqueue.publications[];
    v_part     pgqueue.publications;
    v_ids      bigint[] := '{}';
    v_left     bigint := p_max;
    v_priority int;
begin
    if p_consumer.way <> 'simple' or p_cursor.gaps <> '{}' or (p_cursor.hints).was_cut
       or (p_cursor.hints).filter_from is not null or _pgqueue.has_free(p_cursor.hints) then
        return v_claim;
    end if;
    v_next := array(
        select p::pgqueue.publications
        from (select * from _pgqueue.published(p_consumer.stream_id, p_ids)
              limit _pgqueue.limit_ahead() + 1) p
        order by priority desc, publication_id, part);
    if v_next = '{}' then  -- nothing but what was taken ahead; or it is far away
        p_cursor.next_publication := upper(p_ids) - _pgqueue.far_ahead();
        v_claim.message_count := case when p_at_rest and not _pgqueue.has_new(p_consumer.stream_id, p_cursor, true)
                                      then 0 end;
        return v_claim;
    elsif cardinality(v_next) > _pgqueue.limit_ahead()
       or (cardinality(v_next) > 1 and exists (select from unnest(v_next) where part > 0)) then
        return v_claim;
    end if;
    foreach v_part in array v_next loop  -- what a claim with the consumer's lock would get
        v_left := v_left - v_part.message_count;
        if v_left < 0 or v_part.priority <> v_next[1].priority or not _pgqueue.is_plain(p_consumer, v_part) then
            return v_claim;
        end if;
        exit when v_left = 0;
    end loop;
    if not pg_try_advisory_xact_lock_shared(_pgqueue.lock_class_new(), p_consumer.consumer_id) then  -- lock: new
        return v_claim;
    end if;
    v_left := p_max;
    foreach v_part in array v_next loop
        exit when v_left = 0 or v_part.priority <> v_priority;
        if v_part.message_count > v_left or not _pgqueue.is_plain(p_consumer, v_part) then
            exit when v_ids <> '{}';
            return v_claim;
        end if;
        continue when not _pgqueue.try_lock_publication(p_consumer.consumer_id, v_part.publication_id);
        v_priority := v_part.priority;
        v_ids := v_ids || v_part.publication_id;
        v_left := v_left - v_part.message_count;
    end loop;
    if v_ids <> '{}' then
        v_claim := _pgqueue.take_ahead(p_consumer, v_ids, p_cursor.last_arrival + 1);
    end if;
    v_claim.message_count := coalesce(v_claim.message_count, case  -- 0: others have all that is new
        when cardinality(v_ids) in (0, cardinality(v_next)) then 0 end);
    return v_claim;
end $$;

-- Whether the messages of a publication in one part are for this consumer, to be delivered now and at any time, and in
-- one range. (In SQL, so that it becomes a part of the caller's expression.)
create or replace function _pgqueue.is_plain(p_consumer pgqueue.consumers, p_publication pgqueue.publications)
returns boolean
language sql volatile
as $$
    select p_publication.expires_at is null and (p_publication.deliver_at <= clock_timestamp()) is not false
        and _pgqueue.is_for(p_publication.consumers, p_consumer.consumer_id)
        and p_publication.seqs = int8multirange(range_merge(p_publication.seqs))
$$;

-- Takes publications ahead of the cursor, and claims their messages, as far as they are still new.
--   p_ids    the caller has their locks; they have the same priority
--   p_place  where their messages stand if they are returned
-- Returns the claim; its id is null when none is new.
create or replace function _pgqueue.take_ahead(p_consumer pgqueue.consumers, p_ids bigint[], p_place bigint)
returns pgqueue.claimed
language plpgsql
as $$
declare
    v_claim pgqueue.claimed;
begin
    with new as (
        select p.* from pgqueue.publications p
        where p.stream_id = p_consumer.stream_id and p.publication_id = any (p_ids)
          and p.publication_id >= (select next_publication from pgqueue.consumer_cursors
                                   where consumer_id = p_consumer.consumer_id order by version desc limit 1)
          and not exists (select from pgqueue.taken_ahead a
                          where a.consumer_id = p_consumer.consumer_id and a.publication_id = p.publication_id)
          -- (it may have been changed before the claim had the lock)
          and exists (select from pgqueue.consumers c
                      where c.consumer_id = p_consumer.consumer_id and c.way = p_consumer.way)
    ), noted as (
        insert into pgqueue.taken_ahead (consumer_id, publication_id, message_count, lane, place, first_seq)
        select p_consumer.consumer_id, publication_id, message_count, -priority, p_place, lower(seqs) from new
    )
    insert into pgqueue.consumer_messages (
        consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, message_count, seqs,
        token, claimed_at, lease_until, visibility_timeout, owner)
    select p_consumer.consumer_id, nextval('pgqueue.claim_numbers'), -n.priority, p_place, lower(n.seqs), p_place,
           n.priority, 0, n.message_count, n.seqs, _pgqueue.new_token(_pgqueue.notes_ends(p_consumer)),
           clock_timestamp(), clock_timestamp() + p_consumer.visibility_timeout, p_consumer.visibility_timeout,
           current_setting('application_name')
    from (select min(priority) as priority, sum(message_count)::bigint as message_count, range_agg(seqs) as seqs
          from new having count(*) > 0) n
    returning _pgqueue.claim_id(bundle_no, token), message_count, p_consumer.stream_id, seqs, priority, 1,
              null, null
    into v_claim;
    return v_claim;
end $$;

-- Moves the cursor past what was taken ahead of it, up to the first publication that is not taken, if nobody has the
-- consumer's lock.
create or replace function _pgqueue.pass_ahead(p_consumer_id int) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
begin
    if _pgqueue.try_lock_consumer(p_consumer_id) then
        v_stored := _pgqueue.cursor(p_consumer_id);
        perform _pgqueue.save_cursor(v_stored, _pgqueue.pass_taken(v_stored, false), true);
    end if;
end $$;
