-- Returning: messages of a claim are delivered again, or dead-lettered.

-- Returns messages of a claim, to be delivered again, or dead-letters them: for all calls that return messages.
--
-- Which message failed: a message is dead-lettered when it was delivered max_deliver_count times and is known to have
-- failed, because the worker named it, or because it was the only message of its claim. If some messages of a claim
-- failed and it is unknown which, all return. If one of them had failed before, the claim is bisected: all get the
-- note that no claim with one of them may have more than half as many messages (at_most). So a message that kills its
-- worker is alone after about log2(n) more failures, and the others are delivered. A claim of a Spark reader holds what
-- a whole query processes, so its end says nothing about single messages.
--   p_bundles  those of the claim, the head first
--   p_set      the messages; null: all
--   p_how      failed: these messages failed; one_failed: at least one of them did; not_failed: none did, and the
--              delivery does not count
--   p_from     when it happened: delays begin then
--   p_delay    how long they are delayed; null: according to the consumer's settings, if they failed
--   p_note     keys for their notes, such as {"error": ...}; null removes a key
-- Returns the cursor, which the caller stores. Needs the claim's lock and the consumer's.
create or replace function _pgqueue.return(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                           p_bundles pgqueue.consumer_messages[], p_set int8multirange, p_how text,
                                           p_from timestamptz, p_delay interval, p_note jsonb)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_failure pgqueue.failure;
    v_latest  record;
    v_back    record;
    v_bundle  pgqueue.consumer_messages;
    v_hints   pgqueue.claim_hints;
begin
    if p_consumer.per_key_latest then
        v_latest := _pgqueue.replace_returned(p_consumer, p_cursor, p_bundles, p_set);
        p_cursor := v_latest.o_cursor;
        p_bundles := v_latest.o_bundles;
        if p_bundles = '{}' then
            return p_cursor;
        end if;
    end if;
    v_hints := p_cursor.hints;
    v_failure := _pgqueue.failure(p_bundles, p_how, p_from, p_delay, p_note, (
        select max(_pgqueue.one_more(b.deliver_count)) from unnest(p_bundles) b
        where p_set is null or _pgqueue.meets(b.seqs, p_set)));
    if p_consumer.ordering <> 'none' and not _pgqueue.stays_assigned(p_consumer, p_bundles, p_set, v_failure) then
        v_back := _pgqueue.return_by_key(p_consumer, v_hints, p_bundles, coalesce(p_set, _pgqueue.seqs_of(p_bundles)),
                                         v_failure);
        p_cursor.hints := v_back.o_hints;
        if p_consumer.per_key_latest then  -- the messages behind the failed ones were returned too
            p_cursor := (_pgqueue.keep_newest(p_consumer, p_cursor, v_back.o_removed, '{}')).p_cursor;
        end if;
        return p_cursor;
    end if;
    foreach v_bundle in array case when p_set is null then p_bundles
                                   else _pgqueue.remove_messages(p_bundles, p_set) end loop
        v_hints := _pgqueue.return_bundle(p_consumer, v_hints, v_bundle, v_failure, p_set is null);
    end loop;
    if p_consumer.ordering <> 'none' and p_bundles[1].lane = _pgqueue.lane_long() then
        v_hints := _pgqueue.mark_firsts(p_consumer, v_hints, p_bundles[1].keys);  -- the bundle is assigned now
    end if;
    p_cursor.hints := v_hints;
    return p_cursor;
end $$;

-- Whether a returned claim is an assigned bundle that may be claimed again unchanged.
create or replace function _pgqueue.stays_assigned(p_consumer pgqueue.consumers, p_bundles pgqueue.consumer_messages[],
                                                   p_set int8multirange, p_failure pgqueue.failure) returns boolean
language plpgsql stable as $$
declare
    v_bundle pgqueue.consumer_messages := p_bundles[1];
    v_note   jsonb := _pgqueue.merged_note(v_bundle.note, p_failure.note);
    v_count  int := _pgqueue.counted_deliveries(_pgqueue.one_more(v_bundle.deliver_count), v_note);
begin
    return p_set is null and cardinality(p_bundles) = 1 and v_bundle.keys is not null
       and _pgqueue.has_few_ranges(v_bundle.seqs)
       and p_consumer.per_key_interval is null
       and not _pgqueue.deliveries_exhausted(p_consumer, v_count, p_failure)
       and _pgqueue.retry_at(p_consumer, v_count, p_failure) is null
       and ((v_note ->> 'at_most')::bigint < v_bundle.message_count) is not true;
end $$;

-- Returns a bundle of a claim: with an order to lane_assigned(), else to its lane. Returns the hints. Needs the claim's
-- lock and the consumer's.
--   p_whole  the bundle is stored, and keeps its number; else it was removed
create or replace function _pgqueue.return_bundle(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                  p_bundle pgqueue.consumer_messages, p_failure pgqueue.failure,
                                                  p_whole boolean) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_bundle  pgqueue.consumer_messages := _pgqueue.freed(p_bundle);
    v_count   int;
    v_at_most bigint;
begin
    v_bundle.note := _pgqueue.merged_note(v_bundle.note, p_failure.note);
    v_bundle.deliver_count := _pgqueue.one_more(v_bundle.deliver_count);
    v_count := _pgqueue.counted_deliveries(v_bundle.deliver_count, v_bundle.note);
    v_at_most := (v_bundle.note ->> 'at_most')::bigint;
    if v_bundle.message_count = 0 or _pgqueue.deliveries_exhausted(p_consumer, v_count, p_failure) then
        perform _pgqueue.remove_messages(array[p_bundle], null) where p_whole;
        perform _pgqueue.dead_letter(v_bundle, v_bundle.seqs, 'max deliveries', null,
                                     _pgqueue.claim_id(coalesce(p_bundle.head, p_bundle.bundle_no), p_bundle.token),
                                     p_bundle.owner) where v_bundle.message_count > 0;
        return p_hints;
    end if;
    v_bundle.not_visible_until := _pgqueue.retry_at(p_consumer, v_count, p_failure);
    v_bundle.deliver_count := v_bundle.deliver_count - (not p_failure.counted)::int;
    if p_consumer.ordering <> 'none' then
        v_bundle.lane := _pgqueue.lane_assigned();
        v_bundle.place := v_bundle.bundle_no;
        v_bundle.key := null;
    else
        v_bundle := _pgqueue.placed(p_consumer, v_bundle);
    end if;
    if p_whole and (v_at_most < v_bundle.message_count) is not true
       and _pgqueue.has_few_ranges(v_bundle.seqs)
       and (p_consumer.ordering <> 'none' or not _pgqueue.is_keyed(p_consumer.profile)) then
        perform _pgqueue.replace(v_bundle);
        return case when v_bundle.lane = _pgqueue.lane_delayed() then _pgqueue.record_due(p_hints, v_bundle.place)
                    else _pgqueue.record_place(p_hints, v_bundle.lane, v_bundle.place, v_bundle.first_seq) end;
    end if;
    perform _pgqueue.remove_messages(array[p_bundle], null) where p_whole;
    while v_at_most < _pgqueue.cardinality(v_bundle.seqs) loop
        p_hints := _pgqueue.store_placed(p_hints, v_bundle, _pgqueue.below(
            v_bundle.seqs, _pgqueue.bound_of(v_bundle.seqs, v_at_most)));
        v_bundle.seqs := v_bundle.seqs * int8multirange(int8range(_pgqueue.bound_of(v_bundle.seqs, v_at_most), null));
    end loop;
    return _pgqueue.store_placed(p_hints, v_bundle, v_bundle.seqs);
end $$;

-- Returns messages of a claim to their order: of each key the first message that failed, and all messages behind it in
-- the claim. Messages of assigned bundles wait for the messages of their key that the claim still has; messages that
-- the claim got unassigned are unassigned again.
--   p_set      the messages that failed
--   p_failure  the consequences for them, see failure()
-- Returns the hints, and the messages that left the claim. Needs the claim's lock and the consumer's. (More than 60
-- lines: one statement decides about the messages of all keys.)
create or replace function _pgqueue.return_by_key(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                  p_bundles pgqueue.consumer_messages[], p_set int8multirange,
                                                  p_failure pgqueue.failure, out o_hints pgqueue.claim_hints,
                                                  out o_removed int8multirange)
language plpgsql as $$
declare
    v_head  pgqueue.consumer_messages := p_bundles[1];
    v_keys  bigint[] := array(select k from unnest(p_bundles) b cross join lateral unnest(b.keys) k
                              where _pgqueue.meets(b.seqs, p_set));
    v_some  pgqueue.consumer_messages[] := array(  -- (in lane_long() a key may have several bundles)
        select b from unnest(p_bundles) b
        where v_head.keys is null or _pgqueue.meets(b.seqs, p_set) or b.keys && v_keys);
    v_keyed pgqueue.keyed_messages := _pgqueue.by_key(p_consumer, v_some);
    v_back  record;
    v_kept  record;
begin
    with entry as materialized (
        select k.key, k.seqs, k.no, r.arrival_no, r.priority, r.deliver_count, r.note, r.claimed_at,
               bool_or(f.failed) over (partition by k.key, case when k.key is null then k.seqs end) as failed
        from unnest(v_keyed.nos, v_keyed.keys, v_keyed.seqs) k (no, key, seqs)
        cross join lateral (select (v_some[k.no]).*) r
        -- (range by range: comparing two sets would cost the ranges of both)
        cross join lateral (select bool_or(p_set && g) as failed from unnest(k.seqs) g) f
    ), element as (
        select e.key, e.no, e.arrival_no, e.priority, e.deliver_count, e.note, e.claimed_at, s as seq,
               p_set @> s as failed,
               p_set @> s and _pgqueue.deliveries_exhausted(p_consumer, _pgqueue.counted_deliveries(
                   _pgqueue.one_more(e.deliver_count), e.note), p_failure) as dead
        from entry e cross join lateral unnest(e.seqs) g cross join lateral generate_series(lower(g), upper(g) - 1) s
        where e.failed
    ), decided as materialized (
        select *, min(seq) filter (where not back and not dead) over (partition by key) as first_kept
        from (select *, case when key is null then failed
                             else bool_or(failed and not dead) over (partition by key order by arrival_no, seq) end
                        and not dead as back
              from element) e
    ), dead_lettered as (
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason,
                                           claim_id, note, owner)
        select p_consumer.stream_id, p_consumer.consumer_id, range_agg(int8range(seq, seq, '[]')), count(*), priority,
               _pgqueue.one_more(deliver_count), 'max deliveries',
               _pgqueue.claim_id(v_head.bundle_no, v_head.token), _pgqueue.merged_note(note, p_failure.note),
               v_head.owner
        from decided where dead group by priority, deliver_count, note
    ), island as materialized (
        select key, arrival_no, priority, deliver_count + (failed and p_failure.counted)::int as deliver_count, failed,
               claimed_at, min(seq) as first_seq, range_agg(int8range(seq, seq, '[]')) as seqs,
               case when failed then _pgqueue.merged_note(note, p_failure.note) else note end as note,
               case when failed then _pgqueue.retry_at(p_consumer, _pgqueue.counted_deliveries(
                   _pgqueue.one_more(deliver_count), note), p_failure) end as due,
               -- nothing of its key is before it, here or in the claim
               min(seq) = min(min(seq)) over (partition by key) and (min(first_kept) < min(seq)) is not true as first
        from (select *, row_number() over (partition by key order by arrival_no, seq)
                        - row_number() over (partition by key, arrival_no, deliver_count, failed, note order by seq)
                        as island
              from decided where back) e
        group by key, arrival_no, priority, deliver_count, failed, note, claimed_at, island
    ), stored as (
        insert into pgqueue.consumer_messages (
            consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, key,
            not_visible_until, last_delivered_at, note, message_count, seqs)
        select p_consumer.consumer_id, nextval('pgqueue.claim_numbers'),
               case when v_head.keys is null or i.key is null then _pgqueue.lane_unassigned()
                    when i.first and i.due is not null and c.first_seq = i.first_seq then _pgqueue.lane_delayed()
                    else _pgqueue.lane_waiting() end,
               case when v_head.keys is null or i.key is null then i.arrival_no
                    when i.first and i.due is not null and c.first_seq = i.first_seq then _pgqueue.place_at(i.due)
                    else _pgqueue.place_behind() end,
               c.first_seq, i.arrival_no, i.priority, i.deliver_count,
               case when v_head.keys is not null then i.key end, i.due, i.claimed_at, i.note, c.message_count, c.seqs
        from island i cross join lateral _pgqueue.split_set(i.seqs) c
        order by i.arrival_no, c.first_seq
        returning lane, place, first_seq, key
    )
    select (select range_agg(int8range(seq, seq, '[]')) from decided where back or dead) as removed,
           (select array_agg(distinct key) from decided
            where (back or dead) and key is not null and v_head.keys is not null) as keys,
           (select min(place) from stored where lane = _pgqueue.lane_delayed()) as due,
           (select array_agg(array[place, first_seq] order by place, first_seq) from stored
            where lane = _pgqueue.lane_unassigned()) as unassigned
    into v_back;
    o_removed := coalesce(v_back.removed, '{}');
    perform _pgqueue.remove_messages(p_bundles, o_removed);
    for v_kept in  -- the keys that the bundles of the claim still have
        select b.no, coalesce(array_agg(distinct k.key) filter (
                   where k.key is not null and exists (select from unnest(k.seqs) g where not o_removed @> g)), '{}')
               as keys
        from generate_series(1, cardinality(v_some)) b (no)
        left join unnest(v_keyed.nos, v_keyed.keys, v_keyed.seqs) k (no, key, seqs) using (no)
        group by b.no
    loop
        update pgqueue.consumer_messages
        set shrunk = false, keys = v_kept.keys, key = case when v_kept.keys <> '{}' then key end
        where _pgqueue.is_bundle(bundle_no, v_some[v_kept.no].bundle_no)
          and keys is not null;
    end loop;
    o_hints := _pgqueue.record_due(p_hints, v_back.due);
    if v_back.unassigned is not null then
        o_hints := _pgqueue.record_place(o_hints, _pgqueue.lane_unassigned(), v_back.unassigned[1][1],
                                         v_back.unassigned[1][2]);
    end if;
    o_hints := _pgqueue.unassign_followers(p_consumer, o_hints, v_back.keys);
    if p_consumer.notify_done then
        perform pg_notify(_pgqueue.done_channel(p_consumer.consumer_id), '');
    end if;
end $$;
