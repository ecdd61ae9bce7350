-- Storing, cutting and deleting bundles; and all transitions of messages.
--
-- The table names every function that writes consumer_messages, or that calls store_placed() or a function of this
-- file. tests/sql/test_transitions.py compares the table with the code, in both directions.
--
-- The words of the first two columns, for one consumer (queue/state/consumer_messages.sql has the lanes):
--   new         published, in a publication that the consumer has not taken: there is no bundle
--   unfiltered, ready, delayed, waiting, claimed: the state of the bundle
--   unassigned  by key: ready, and not assigned
--   assigned    by key: in an assigned bundle that is not claimed; ready, or waiting for its predecessor
--   free        ready, unassigned or assigned
--   unclaimed   unfiltered, ready, unassigned, assigned, delayed or waiting
--   done        acknowledged: there is no bundle; keep_history keeps a row of completed_messages
--   dead        a row of dead_messages
--   removed     skipped by retention, cancelled, replaced, refused by the filter, or deleted with the consumer or
--               because it moved to another position
--
--   from                 to                                      function            file
--   new                  unfiltered, ready, unassigned, delayed  take_plain          queue/take/take.sql
--   new                  unfiltered, ready, unassigned, delayed  take_all            queue/take/take.sql
--   new                  unfiltered, ready, unassigned, delayed  take_each           queue/take/passing.sql
--   new                  claimed                                 claim_new           queue/claim/making.sql
--   new                  ready, unassigned, assigned             store_for_later     queue/claim/making.sql
--   new                  claimed                                 take_ahead          queue/claim/ahead.sql
--   unfiltered           as its caller says                      take_unfiltered     queue/take/filters.sql
--   unfiltered           ready, unassigned, delayed, removed     apply_filter        queue/take/filters.sql
--   ready, assigned      claimed                                 claim_free          queue/claim/free.sql
--   free                 claimed                                 claim_bundles       queue/claim/making.sql
--   ready, unassigned    ready, dead                             lock_ready          queue/claim/making.sql
--   ready                ready                                   cut_next            queue/claim/free.sql
--   ready                dead                                    collect_matching    queue/claim/matching.sql
--   ready, unassigned    the same                                take_matching       queue/claim/matching.sql
--   assigned             dead                                    lock_assigned       queue/claim/by_key.sql
--   unassigned           as its caller says                      take_unassigned     queue/keys/free_keys.sql
--   waiting              as its caller says                      take_waiting        queue/keys/free_keys.sql
--   unassigned, waiting  assigned                                store_assigned      queue/keys/assigning.sql
--   unassigned, waiting  waiting, delayed                        store_waiting       queue/keys/assigning.sql
--   assigned             unassigned, waiting                     unassign            queue/keys/waiting.sql
--   assigned             waiting                                 unassign_followers  queue/keys/waiting.sql
--   assigned, claimed    the same                                reread_keys         queue/keys/waiting.sql
--   waiting              waiting                                 mark_firsts         queue/keys/waiting.sql
--   delayed, waiting     waiting                                 change_limits       queue/keys/key_limits.sql
--   delayed              ready, unassigned, waiting              end_delays          queue/settle/leases.sql
--   unclaimed            the same, due now                       retry               queue/settle/acknowledge.sql
--   new, unclaimed       the same, later                         postpone            operate/postpone.sql
--   unclaimed            as its caller says                      take_unclaimed      queue/keys/waiting.sql
--   unclaimed            unfiltered, ready, unassigned, delayed  change_lanes        queue/keys/key_limits.sql
--   unassigned           removed                                 delete_passed       groups/group_workers.sql
--   claimed              claimed                                 move_to_long        queue/keys/long_claims.sql
--   claimed              claimed                                 move_all_to_long    queue/claim/by_key.sql
--   claimed              claimed                                 expire              queue/settle/leases.sql
--   claimed              claimed                                 extend              queue/settle/acknowledge.sql
--   claimed              claimed                                 reader_extend       spark/source.sql
--   claimed              claimed                                 reader_resume       spark/source.sql
--   claimed              claimed                                 quarantine          spark/quarantine.sql
--   claimed              done                                    ack                 queue/settle/acknowledge.sql
--   claimed              done, dead                              finish              queue/settle/settle.sql
--   claimed              done, dead                              settle_claimed      spark/actions.sql
--   claimed              unclaimed, dead                         return              queue/settle/return.sql
--   claimed              free, delayed, dead                     return_bundle       queue/settle/return.sql
--   claimed              unassigned, waiting, delayed, dead      return_by_key       queue/settle/return.sql
--   claimed              removed                                 replace_returned    queue/keys/newest.sql
--   claimed              removed                                 take_claimed        operate/cancel.sql
--   dead                 unfiltered, ready, unassigned           redrive             operate/dead_letters.sql
--   any                  removed, new                            move                operate/seek.sql
--   any                  removed                                 drop_consumer       operate/consumer_lifecycle.sql
--   any                  removed                                 delete_bundles      queue/state/bundles.sql
--   free                 dead                                    give_up_expired     queue/state/bundles.sql
--   ready, unassigned    the same                                cut                 queue/state/bundles.sql
--   claimed              the same                                delete_empty_head   queue/state/bundles.sql
--   claimed              the same                                record_freed        queue/state/bundles.sql
--   waiting              waiting                                 take_freed          queue/keys/waiting.sql
--   any                  as its caller says                      remove_messages     queue/state/bundles.sql
--   any                  as its caller says                      store               queue/state/bundles.sql
--   any                  as its caller says                      stored              queue/state/bundles.sql
--   any                  as its caller says                      store_placed        queue/state/placing.sql
--   any                  as its caller says                      store_all_placed    queue/state/placing.sql
--   any                  as its caller says                      replace             queue/state/bundles.sql
--   any                  as its caller says                      delete_bundle       queue/state/bundles.sql
--
-- The rows "as its caller says": lock_ready(), collect_matching(), collect_by_key(), claim_all_keys(),
-- claim_without_lock() and claim_back() lock free bundles, which claim_bundles() claims. assign() calls
-- take_unassigned() and take_waiting(), then store_assigned() and store_waiting(), whose rows have the target. return()
-- calls return_bundle() or return_by_key(). The callers of remove_messages() are in the table. take_unclaimed() has
-- these callers: remove_unclaimed(), after which the messages are removed (skip(), cancel()) or dead (drop_oldest());
-- keep_newest(), after which they are removed; settle_unclaimed() for a Spark sink, after which they are done or dead,
-- or removed if the filter refuses them; and postpone(), which stores unfiltered messages as such, and others as
-- delayed, waiting or unassigned. retry() leaves unfiltered messages as they are.

-- Stores messages as bundles like p_bundle, of at most limit_ranges() ranges each; without messages, none. Returns the
-- number of messages.
create or replace function _pgqueue.store(p_bundle pgqueue.consumer_messages, p_seqs int8multirange) returns bigint
language plpgsql as $$
declare
    v_chunk record;
    v_count bigint := 0;
begin
    if p_seqs = int8multirange(range_merge(p_seqs)) and p_seqs <> '{}' then
        p_bundle.bundle_no := nextval('pgqueue.claim_numbers');
        p_bundle.seqs := p_seqs;
        p_bundle.first_seq := lower(p_seqs);
        p_bundle.message_count := upper(p_seqs) - lower(p_seqs);
        p_bundle.shrunk := coalesce(p_bundle.shrunk, false);
        insert into pgqueue.consumer_messages select p_bundle.*;
        return p_bundle.message_count;
    end if;
    for v_chunk in select * from _pgqueue.split_set(p_seqs) loop
        p_bundle.bundle_no := nextval('pgqueue.claim_numbers');
        p_bundle.seqs := v_chunk.seqs;
        p_bundle.first_seq := v_chunk.first_seq;
        p_bundle.message_count := v_chunk.message_count;
        p_bundle.shrunk := coalesce(p_bundle.shrunk, false);
        insert into pgqueue.consumer_messages select p_bundle.*;
        v_count := v_count + v_chunk.message_count;
    end loop;
    return v_count;
end $$;

-- Stores messages as store() does. Returns the bundles.
create or replace function _pgqueue.stored(p_bundle pgqueue.consumer_messages, p_seqs int8multirange)
returns pgqueue.consumer_messages[] language plpgsql as $$
declare
    v_part    int8multirange;
    v_bundles pgqueue.consumer_messages[] := '{}';
begin
    for v_part in select c.seqs from _pgqueue.split_set(p_seqs) c loop
        perform _pgqueue.store(p_bundle, v_part);
        v_bundles := v_bundles || array(select b from _pgqueue.bundles(array[currval('pgqueue.claim_numbers')]) b);
    end loop;
    return v_bundles;
end $$;

-- Deletes a bundle.
create or replace function _pgqueue.delete_bundle(p_bundle_no bigint) returns void
language sql as $$
    delete from pgqueue.consumer_messages
    where _pgqueue.is_bundle(bundle_no, p_bundle_no)
$$;

-- A bundle as free, without the columns of its claim.
create or replace function _pgqueue.freed(p_bundle pgqueue.consumer_messages) returns pgqueue.consumer_messages
language plpgsql immutable as $$
begin
    p_bundle.first_seq := coalesce(lower(p_bundle.seqs), p_bundle.first_seq);  -- (the first messages may be settled)
    p_bundle.last_delivered_at := coalesce(p_bundle.claimed_at, p_bundle.last_delivered_at);
    p_bundle.token := null;
    p_bundle.claimed_at := null;
    p_bundle.lease_until := null;
    p_bundle.visibility_timeout := null;
    p_bundle.owner := null;
    p_bundle.members := null;
    p_bundle.head := null;
    p_bundle.reader := null;
    return p_bundle;
end $$;

-- Replaces a stored bundle with p_bundle, which has the same number.
create or replace function _pgqueue.replace(p_bundle pgqueue.consumer_messages) returns void
language plpgsql as $$
begin
    update pgqueue.consumer_messages
    set lane = p_bundle.lane, place = p_bundle.place, first_seq = p_bundle.first_seq,
        deliver_count = p_bundle.deliver_count, key = p_bundle.key, predecessor = p_bundle.predecessor,
        not_visible_until = p_bundle.not_visible_until, last_delivered_at = p_bundle.last_delivered_at,
        note = p_bundle.note, keys = p_bundle.keys, shrunk = p_bundle.shrunk, message_count = p_bundle.message_count,
        seqs = p_bundle.seqs, token = p_bundle.token, claimed_at = p_bundle.claimed_at,
        lease_until = p_bundle.lease_until, visibility_timeout = p_bundle.visibility_timeout, owner = p_bundle.owner,
        members = p_bundle.members, head = p_bundle.head, reader = p_bundle.reader
    where _pgqueue.is_bundle(bundle_no, p_bundle.bundle_no);
end $$;

-- The parts of a set that are in bundles, each with the index of its bundle in the array. A set of many ranges is
-- merged with the bundles in order: comparing each bundle with the set would cost ranges times bundles.
create or replace function _pgqueue.parts_of(p_bundles pgqueue.consumer_messages[], p_set int8multirange)
returns table (no bigint, part int8multirange)
language plpgsql stable as $$
begin
    if cardinality(p_bundles) = 1 then
        no := 1;
        part := _pgqueue.common(p_bundles[1].seqs, p_set);
        if part <> '{}' then
            return next;
        end if;
    elsif _pgqueue.has_few_ranges(p_set) then
        return query select b.ordinality, b.seqs * p_set from unnest(p_bundles) with ordinality b where b.seqs && p_set;
    else
        return query
            select m.range[2], range_agg(int8range(m.seq, m.seq + 1))
            from (select e.seq, max(e.range) over (order by e.at, e.seq is not null) as range
                  from (select lower(g) as at, null::bigint as seq, array[lower(g), b.ordinality, upper(g)] as range
                        from unnest(p_bundles) with ordinality b cross join lateral unnest(b.seqs) g
                        union all
                        select s, s, null
                        from unnest(p_set) g cross join lateral generate_series(lower(g), upper(g) - 1) s) e) m
            where m.seq < m.range[3]
            group by 1;
    end if;
end $$;

-- Records, as rows in lane_freed(), that bundles in lane_long() have freed their keys. The session that deletes such a
-- bundle needs no lock of the consumer, and the next assignment need not read all long claims. The place is the time,
-- so that the hint for the lane can leave out rows that are not committed for a while.
create or replace function _pgqueue.record_freed(p_bundles pgqueue.consumer_messages[]) returns void
language sql as $$
    insert into pgqueue.consumer_messages (consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority,
                                           deliver_count, key, message_count, seqs)
    select consumer_id, nextval('pgqueue.claim_numbers'), _pgqueue.lane_freed(),
           _pgqueue.place_at(clock_timestamp()), 0, 0, 0, 0, key, 0, '{}'
    from unnest(p_bundles) where lane = _pgqueue.lane_long() and key is not null
$$;

-- Takes messages out of bundles that the caller has locked, and deletes bundles that become empty. A head stays, even
-- without messages, while it has members (delete_empty_head()). In lane_assigned() it keeps its keys, until
-- reread_keys() finds that it has lost them.
--   p_set  null: all
-- Returns the messages as bundles, as they were.
create or replace function _pgqueue.remove_messages(p_bundles pgqueue.consumer_messages[], p_set int8multirange)
returns pgqueue.consumer_messages[] language plpgsql as $$
declare
    v_bundle pgqueue.consumer_messages;
    v_rest   int8multirange;
    v_taken  pgqueue.consumer_messages[] := '{}';
    v_one    record;
begin
    if p_set is null then
        delete from pgqueue.consumer_messages
        where ctid = any (_pgqueue.tids(array(select b.bundle_no from unnest(p_bundles) b)));
        perform _pgqueue.record_freed(p_bundles);
        return p_bundles;
    end if;
    for v_one in select * from _pgqueue.parts_of(p_bundles, p_set) loop
        v_bundle := p_bundles[v_one.no];
        v_rest := v_bundle.seqs - v_one.part;
        if v_rest = '{}' and v_bundle.lane = _pgqueue.lane_long() then
            perform _pgqueue.record_freed(array[v_bundle]);
        end if;
        if v_rest = '{}' and v_bundle.members is null then
            perform _pgqueue.delete_bundle(v_bundle.bundle_no);
        elsif v_bundle.token is null and v_bundle.key is null and v_bundle.keys is null
              and not _pgqueue.has_few_ranges(v_rest) then
            perform _pgqueue.delete_bundle(v_bundle.bundle_no);
            perform _pgqueue.store(v_bundle, v_rest);
        else
            update pgqueue.consumer_messages
            set seqs = v_rest, message_count = _pgqueue.cardinality(v_rest), shrunk = coalesce(keys <> '{}', false),
                keys = case when v_rest = '{}' and keys is not null and lane = _pgqueue.lane_long() then '{}'
                            else keys end,
                key = case when v_rest <> '{}' then key end,
                first_seq = case when token is null then lower(v_rest) else first_seq end
            where _pgqueue.is_bundle(bundle_no, v_bundle.bundle_no);
        end if;
        v_bundle.seqs := v_one.part;
        v_bundle.first_seq := lower(v_one.part);
        v_bundle.message_count := _pgqueue.cardinality(v_one.part);
        v_taken := v_taken || v_bundle;
    end loop;
    perform _pgqueue.delete_empty_head(p_bundles[1]);
    return v_taken;
end $$;

-- Deletes the head of a claim that has neither messages nor members left.
create or replace function _pgqueue.delete_empty_head(p_head pgqueue.consumer_messages) returns void
language plpgsql as $$
begin
    if p_head.members is not null then
        delete from pgqueue.consumer_messages
        where _pgqueue.is_bundle(bundle_no, p_head.bundle_no) and token = p_head.token
          and not exists (select from _pgqueue.bundles_of(p_head.bundle_no, p_head.token) where message_count > 0);
    end if;
end $$;

-- Cuts p_count bundles of p_size messages each from the start of a free bundle that the caller has locked. Returns the
-- first of these, and the number of one of the last quarter (claim_hints.prefetch_at).
create or replace function _pgqueue.cut(p_bundle pgqueue.consumer_messages, p_size bigint, p_count int,
                                        out o_first pgqueue.consumer_messages, out o_more bigint)
language plpgsql as $$
declare
    v_parts int8multirange[] := _pgqueue.parts(p_bundle.seqs, p_size, p_count);
    v_rest  int8multirange := p_bundle.seqs * int8multirange(int8range(upper(v_parts[p_count]), null));
begin
    o_first := p_bundle;
    with stored as (
        insert into pgqueue.consumer_messages (consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority,
                                               deliver_count, not_visible_until, last_delivered_at, note,
                                               message_count, seqs)
        select p_bundle.consumer_id, nextval('pgqueue.claim_numbers'), p_bundle.lane, p_bundle.place, lower(p.s),
               p_bundle.arrival_no, p_bundle.priority, p_bundle.deliver_count, p_bundle.not_visible_until,
               p_bundle.last_delivered_at, p_bundle.note, p_size, p.s
        from (select s from unnest(v_parts) with ordinality u (s, i) order by i) p
        returning bundle_no
    )
    select l.numbers[1], l.numbers[1 + 3 * p_count / 4] into o_first.bundle_no, o_more
    from (select array_agg(bundle_no order by bundle_no) as numbers from stored) l;
    o_first.seqs := v_parts[1];
    o_first.message_count := p_size;
    if v_rest = '{}' then
        perform _pgqueue.delete_bundle(p_bundle.bundle_no);
    else
        update pgqueue.consumer_messages
        set seqs = v_rest, first_seq = lower(v_rest), message_count = message_count - p_size * p_count
        where _pgqueue.is_bundle(bundle_no, p_bundle.bundle_no);
    end if;
end $$;

-- The first messages of a set, in p_count parts of p_size messages each.
create or replace function _pgqueue.parts(p_seqs int8multirange, p_size bigint, p_count bigint) returns int8multirange[]
language plpgsql immutable as $$
declare
    v_lo    bigint := lower(p_seqs);
    v_parts int8multirange[] := '{}';
begin
    if p_seqs = int8multirange(range_merge(p_seqs)) then
        return array(select int8multirange(int8range(v_lo + i * p_size, v_lo + (i + 1) * p_size))
                     from generate_series(0, p_count - 1) i order by i);
    end if;
    for i in 1..p_count loop
        v_parts := v_parts || _pgqueue.below(p_seqs, _pgqueue.bound_of(p_seqs, p_size));
        p_seqs := p_seqs - v_parts[i];
    end loop;
    return v_parts;
end $$;

-- Stores messages of a bundle as dead letters.
--   p_claim_id, p_owner  of the claim that held them; null: no claim held them
create or replace function _pgqueue.dead_letter(p_bundle pgqueue.consumer_messages, p_seqs int8multirange,
                                                p_reason text, p_details jsonb, p_claim_id bigint default null,
                                                p_owner text default null) returns void
language sql as $$
    insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason,
                                       details, claim_id, note, owner)
    select c.stream_id, c.consumer_id, p_seqs, _pgqueue.cardinality(p_seqs), p_bundle.priority, p_bundle.deliver_count,
           p_reason, p_details, p_claim_id, p_bundle.note, p_owner
    from pgqueue.consumers c
    where c.consumer_id = p_bundle.consumer_id;
    select pg_notify(_pgqueue.done_channel(c.consumer_id), '') from pgqueue.consumers c
    where c.consumer_id = p_bundle.consumer_id and c.notify_done
$$;

-- The note of messages that expire at p_expires_at.
create or replace function _pgqueue.expiry(p_expires_at timestamptz) returns jsonb
language sql immutable as $$ select jsonb_build_object('expires', extract(epoch from p_expires_at)::bigint) $$;

-- Whether messages with this note have expired.
create or replace function _pgqueue.has_expired(p_note jsonb) returns boolean
language plpgsql volatile as $$
begin
    return ((p_note ->> 'expires')::bigint <= extract(epoch from clock_timestamp())) is true;
end $$;

-- Stores a free bundle that has expired as a dead letter, and deletes it.
create or replace function _pgqueue.give_up_expired(p_bundle pgqueue.consumer_messages) returns void
language plpgsql as $$
begin
    perform _pgqueue.delete_bundle(p_bundle.bundle_no);
    perform _pgqueue.dead_letter(p_bundle, p_bundle.seqs, 'expired', null);
end $$;

-- Deletes all that a consumer has taken and not finished, including its claims. Spent tokens stay spent: messages of a
-- key that were delivered lately still count. The claims of a reader stay, as claims that it lost and cannot get back.
-- Returns the number of deleted messages. Needs the consumer's lock. Locks the bundles, and waits for sessions that
-- hold some.
create or replace function _pgqueue.delete_bundles(p_consumer_id int) returns bigint
language plpgsql as $$
declare
    v_deleted bigint;
    v_count   bigint := 0;
begin
    update pgqueue.reader_claims set arrival_nos = '{}' where consumer_id = p_consumer_id and arrival_nos <> '{}';
    loop  -- a session that cuts a bundle without the consumer's lock leaves parts that the first pass did not see
        with deleted as (
            delete from pgqueue.consumer_messages where consumer_id = p_consumer_id  -- lock: bundle
            returning message_count
        )
        select coalesce(sum(message_count), 0) into v_deleted from deleted;
        v_count := v_count + v_deleted;
        exit when not exists (select from pgqueue.consumer_messages where consumer_id = p_consumer_id);
    end loop;
    return v_count;
end $$;

-- A note with the keys of p_keys; a null value removes a key. The value of attempt, a failed delivery, is appended to
-- the list attempts, which keeps the last limit_attempts() entries. The number spark is incremented.
create or replace function _pgqueue.merged_note(p_note jsonb, p_keys jsonb) returns jsonb
language plpgsql immutable as $$
declare
    v_note jsonb := coalesce(p_note, '{}') || coalesce(p_keys, '{}');
begin
    if p_keys ? 'attempt' then
        v_note := v_note || jsonb_build_object('attempts', coalesce(
            case when jsonb_array_length(p_note -> 'attempts') >= _pgqueue.limit_attempts()
                 then (p_note -> 'attempts') - 0 else p_note -> 'attempts' end, '[]')
            || jsonb_build_array(p_keys -> 'attempt'));
    end if;
    if p_note ? 'spark' and jsonb_typeof(p_keys -> 'spark') = 'number' then
        v_note := v_note || jsonb_build_object('spark', _pgqueue.one_more((p_note ->> 'spark')::int));
    end if;
    return nullif(v_note - array(select key from jsonb_each(p_keys) where value = 'null' or key = 'attempt'), '{}');
end $$;
