-- Claims of new messages ahead of the cursor, without the consumer's lock: so no worker waits for another one's commit,
-- and a transaction that stays open keeps from the others only what it has claimed. For consumers without order,
-- limits and filter, while nothing is ready, and no gap is open.
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
-- claim_new_ahead().
create or replace function _pgqueue.claim_at_rest(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  p_max bigint) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_claim pgqueue.claimed;
begin
    if not _pgqueue.has_new(p_consumer.stream_id, p_cursor, true) then
        v_claim.message_count := case when _pgqueue.is_at_rest(p_consumer, p_cursor, true) then 0 end;
    elsif p_consumer.way = 'simple' and _pgqueue.need_not_look((p_cursor.hints).probe_at)
       and _pgqueue.is_at_rest(p_consumer, p_cursor, false) then  -- who looks at the leases does so each second
        v_claim := _pgqueue.claim_new_ahead(p_consumer, p_cursor, p_max, true);
        if _pgqueue.number_in(v_claim.claim_id) % _pgqueue.limit_ahead() = 0 then
            perform _pgqueue.pass_ahead(p_consumer.consumer_id);
        end if;
    end if;
    return v_claim;
end $$;

-- Claims new messages ahead of the cursor: those of the most urgent publications that are plain, that nobody is taking,
-- and that fit.
--   p_at_rest  nothing else can be claimed
-- Returns the claim; its id is null when there is none. Then message_count is 0 if others are taking all that is new,
-- or have taken it, and nothing else can be claimed; and null if a claim with the consumer's lock may find something.
-- Locks: none that others wait for.
create or replace function _pgqueue.claim_new_ahead(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                    p_max bigint, p_at_rest boolean) returns pgqueue.claimed
language plpgsql
as $$
declare
    v_hints    pgqueue.claim_hints := p_cursor.hints;
    v_claim    pgqueue.claimed;
    v_next     record;
    v_ids      bigint[] := '{}';
    v_left     bigint := p_max;
    v_priority int;
    v_looked   boolean := false;
    v_end      bigint;
begin
    if p_consumer.way <> 'simple' or p_cursor.gaps <> '{}' or v_hints.was_cut or v_hints.filter_from is not null
       or _pgqueue.has_free(v_hints) then
        return v_claim;
    end if;
    v_end := _pgqueue.end_of_taken(p_cursor);
    for v_next in select * from _pgqueue.next_ahead(p_consumer, _pgqueue.ids_ahead(p_cursor, v_end), p_max) loop
        exit when v_next.priority <> v_priority;
        if v_next.suffice is not true or not v_next.plain or v_next.message_count > v_left or not
            pg_try_advisory_xact_lock_shared(_pgqueue.lock_class_new(), p_consumer.consumer_id) then  -- lock: new
            exit when v_ids <> '{}';
            return v_claim;
        end if;
        v_looked := true;
        continue when not _pgqueue.try_lock_publication(p_consumer.consumer_id, v_next.publication_id);
        v_priority := v_next.priority;
        v_ids := v_ids || v_next.publication_id;
        v_left := v_left - v_next.message_count;
        exit when v_left = 0;
    end loop;
    if not v_looked then  -- nothing but what was taken ahead; or it is far away
        p_cursor.next_publication := v_end;
        if not p_at_rest or _pgqueue.has_new(p_consumer.stream_id, p_cursor, true) then
            return v_claim;
        end if;
    end if;
    if v_ids <> '{}' then
        v_claim := _pgqueue.take_ahead(p_consumer, v_ids, p_cursor.last_arrival + 1);
    end if;
    if v_claim.claim_id is null then
        v_claim.message_count := 0;
    end if;
    return v_claim;
end $$;

-- The next publications that a claim may take ahead of the cursor, the most urgent first.
--   p_ids   among these
--   p_want  messages
-- Returns for each whether it is plain: in one part, for this consumer, and to be delivered now; and for all whether
-- the first ones are what a claim with the consumer's lock would get, and not so many that it has less work.
create or replace function _pgqueue.next_ahead(p_consumer pgqueue.consumers, p_ids int8multirange, p_want bigint)
returns table (publication_id bigint, message_count bigint, priority int, plain boolean, suffice boolean)
language sql stable
as $$
    select publication_id, message_count, priority, plain,
           count(*) over () <= _pgqueue.limit_ahead()
           and bool_and(plain and before + message_count <= p_want and priority = first)
               filter (where before < p_want) over ()
    from (select *, count(*) over (partition by publication_id) = 1 and expires_at is null
                    and (deliver_at <= clock_timestamp()) is not false
                    and _pgqueue.is_for(consumers, p_consumer.consumer_id)
                    and (select count(*) from unnest(seqs)) <= _pgqueue.limit_ranges() as plain,
                 sum(message_count) over (order by priority desc, publication_id, part) - message_count as before,
                 max(priority) over () as first
          from (select * from _pgqueue.published(p_consumer.stream_id, p_ids)
                limit _pgqueue.limit_ahead() + 1) p) p
    order by priority desc, publication_id
$$;

-- Takes publications ahead of the cursor, and claims their messages, as far as they are still new.
--   p_ids    the caller has their locks; they have the same priority
--   p_place  where their messages stand if they are returned
-- Returns the claim; its id is null when none is new.
create or replace function _pgqueue.take_ahead(p_consumer pgqueue.consumers, p_ids bigint[], p_place bigint)
returns pgqueue.claimed
language sql
as $$
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
              null::jsonb, null::bigint[]
$$;

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
