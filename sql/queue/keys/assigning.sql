-- Assigning: the order by key. A message is not delivered while an earlier message of its key is unsettled elsewhere.
--
-- The messages that a consumer takes are unassigned at first, keys mixed. A claim with the consumer's lock assigns: it
-- makes bundles of the size of a claim, first of messages that waited for keys that are free now, then of the first
-- unassigned messages. Claims take assigned bundles, and settle them, without the consumer's lock.
--
--   * Keys with few messages are packed: a bundle has several keys, and no key is in two such bundles.
--   * A key with enough messages for a bundle has bundles of its own, each with the one before as its predecessor. Such
--     a bundle can be claimed when its predecessor is deleted (is_deleted()). With ordering=stream, all messages have
--     one key.
--   * The rest waits, and so do messages of keys that are in use or over a limit.
--
-- So the messages of a key are, in this order: in assigned bundles or delayed, waiting, unassigned.
--
-- When may the next message of a key be delivered? All of these must allow it:
--
--   ordering           Its earlier messages are settled: assigned bundles have a predecessor (store_assigned()), other
--                      messages wait while one is delayed, waiting or in a long claim (waiting_ahead()). A claim of all
--                      keys stops all assignments (holds_all_keys()).
--   limits of keys     They allow it (queue/keys/key_limits.sql: apply_key_limits()).
--   a delay            Its time has come (queue/settle/leases.sql: end_delays()).
--
-- What waited is examined again when the bundle for which it waited is deleted (queue/keys/free_keys.sql: free_keys()),
-- or when its time has come. Two more settings act on keys elsewhere: per_key_latest removes older messages before they
-- are ready (queue/keys/newest.sql), and per_key_capacity refuses messages when they are sent
-- (queue/send/key_capacity.sql).

-- For those keys of p_keyed that have more messages waiting, delayed or in long claims: the last long claim, and the
-- first message that waits or is delayed. was_first: p_keyed has the messages that waited first for this key
-- (take_waiting()). With an order, the first message is then the one behind these. If there are none, any message will
-- do, and the query begins at the end, where there are fewer dead rows.
create or replace function _pgqueue.waiting_ahead(p_consumer pgqueue.consumers, p_keyed pgqueue.keyed_messages)
returns table (key bigint, was_first boolean, long_claim bigint, arrival_no bigint, first_seq bigint, tid tid)
language sql stable as $$
    select k, e.key is not null, h.long_claim, w.*
    from (select distinct k from unnest(p_keyed.keys) k) k
    left join (select key, case when p_consumer.ordering <> 'none' then arrival_no end as arrival_no, first_seq
               from unnest(p_keyed.bundles) where lane = _pgqueue.lane_waiting()) e on e.key = k
    left join lateral (select max(bundle_no) as long_claim from pgqueue.consumer_messages
                       where consumer_id = p_consumer.consumer_id and key = k and lane = _pgqueue.lane_long()) h on true
    left join lateral (
        (select arrival_no, first_seq, ctid from pgqueue.consumer_messages
         where consumer_id = p_consumer.consumer_id and key = k and lane = _pgqueue.lane_delayed() and e.key is null
         order by arrival_no desc, first_seq desc limit 1)
        union all
        (select arrival_no, first_seq, ctid from pgqueue.consumer_messages
         where consumer_id = p_consumer.consumer_id and key = k and lane = _pgqueue.lane_waiting()
           and (p_consumer.ordering = 'none' or e.key is not null)
           and (arrival_no, first_seq) >= (coalesce(e.arrival_no, 0), coalesce(e.first_seq, 0))
         order by arrival_no, first_seq limit 1)
        union all
        (select arrival_no, first_seq, ctid from pgqueue.consumer_messages
         where consumer_id = p_consumer.consumer_id and key = k and lane = _pgqueue.lane_waiting()
           and p_consumer.ordering <> 'none' and e.key is null
         order by arrival_no desc, first_seq desc limit 1)
        order by arrival_no, first_seq limit 1) w on true
    where e.key is not null
       or (select true from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id and key = k limit 1)
$$;

-- Stores messages by key as assigned bundles of at most p_size messages. Messages that are not visible yet are delayed,
-- and those that may not be assigned wait. Needs the consumer's lock.
--   p_keyed          in their order; over_limit: over a limit of their key
--   p_keys, p_until  keys without tokens, and when the first tokens come back
--   p_now            what becomes visible by then is visible
-- Returns the hints, and how many messages were assigned. (More than 60 lines: one statement decides and packs, so that
-- everything is counted once.)
create or replace function _pgqueue.store_assigned(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                   p_keyed pgqueue.keyed_messages, p_size bigint, p_keys bigint[],
                                                   p_until timestamptz[], p_now timestamptz,
                                                   out o_hints pgqueue.claim_hints, out o_assigned bigint)
language plpgsql as $$
declare
    v_none        boolean := p_consumer.ordering = 'none';
    v_chain       int := case when _pgqueue.limits_keys(p_consumer) then 1
                              when p_consumer.ordering = 'stream' then _pgqueue.limit_chain_of_stream()
                              else _pgqueue.limit_chain() end;
    v_assigned    pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_any_waiting boolean := p_hints.any_waiting;
    -- a bundle that failed comes before the free assigned ones, unless it has a predecessor
    v_front       bigint := v_assigned.place - 1;
    v_res         record;
begin
    with source as materialized (
        select *, dense_rank() over (order by priority, deliver_count, note, last_delivered_at, due) as kind,
               least(p_size, (note ->> 'at_most')::bigint) as size
        from (select ordinality as no, arrival_no, priority, deliver_count, last_delivered_at, note,
                     lane = _pgqueue.lane_waiting() as was_first,  -- it waited first for its key
                     case when not_visible_until > p_now then not_visible_until end as due
              from unnest(p_keyed.bundles) with ordinality) b
    ), asked as materialized (
        select key, u.tail, coalesce(u.bundles, 0) as bundles, a.long_claim, a.arrival_no, a.first_seq
        from (select k as key, max(m.bundle_no) as tail, count(*) as bundles
              from _pgqueue.assigned(p_consumer.consumer_id, v_assigned) m cross join lateral unnest(m.keys) k
              group by k) u
        full join (select * from _pgqueue.waiting_ahead(p_consumer, p_keyed) where v_any_waiting) a using (key)
    ), twice as materialized (
        select key, min(i) as i from unnest(p_keyed.keys) with ordinality k (key, i)
        where key is not null group by key having count(*) > 1
    ), decided as (
        select e.*, s.kind, s.size, a.tail, coalesce(a.bundles, 0) as bundles,
               case when s.due is not null and (e.key is null or v_none) then 'due'
                    when e.over_limit or e.i > t.i
                         or (a.first_seq is not null and not s.was_first
                             and not (v_none and (s.arrival_no, lower(e.seqs)) < (a.arrival_no, a.first_seq)))
                    then 'wait'
                    when s.due is not null
                    then case when a.tail is null and a.long_claim is null then 'due' else 'wait' end
                    when v_none or e.key is null then 'pack'
                    when e.n >= s.size and coalesce(a.bundles, 0) < v_chain and a.long_claim is null then 'own'
                    when a.tail is null and a.long_claim is null then 'pack' else 'wait' end as what
        from unnest(p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts, p_keyed.over_limit) with ordinality
             e (no, key, seqs, n, over_limit, i)
        join source s using (no) left join asked a using (key) left join twice t using (key)
    ), taken as materialized (  -- how many messages of each: in bundles of their own, or packed
        select i, no, key, seqs, n, kind, size, tail, what, case when what = 'own' then i end as own,
               case what when 'own' then 0 else before end as before,
               case what when 'own' then least(n / size, v_chain - bundles) * size
                         when 'pack' then case when key is null or v_none then n else least(n, size - before % size) end
                         else 0 end as take
        from (select *, sum(most) over (partition by kind order by i rows unbounded preceding) - most as before
              from (select *, case when what <> 'pack' then 0 when key is null or v_none then n
                                   else least(n, size) end::int as most from decided) d) d
    ), bundle as materialized (
        select nextval('pgqueue.claim_numbers') as bundle_no, b.*
        from (select min(i) as i, min(no) as no, bin, own, min(tail) as tail,
                     array_remove(array_agg(key), null) as keys, sum(n::int) filter (where c > 1 is not true) as n,
                     range_agg(seqs) filter (where c > 1 is not true) as seqs
              from (select i, no, key, kind, own, tail, before / size as bin, n, seqs
                    from taken where take = n and before / size = (before + n - 1) / size
                    union all
                    select t.i, t.no, t.key, t.kind, t.own, t.tail, b,
                           least(t.take, (b + 1) * t.size - t.before) - greatest(0, b * t.size - t.before),
                           int8multirange(variadic e.each[greatest(0, b * t.size - t.before) + 1
                                                          :least(t.take, (b + 1) * t.size - t.before)])
                    from taken t
                    cross join lateral (select array(select int8range(s, s + 1) from unnest(t.seqs) g
                                                     cross join lateral generate_series(lower(g), upper(g) - 1) s
                                                     limit t.take) as each offset 0) e
                    cross join lateral generate_series(t.before / t.size, (t.before + t.take - 1) / t.size) b
                    where t.take > 0 and (t.take < t.n or t.before / t.size < (t.before + t.take - 1) / t.size)) p
              left join lateral generate_series(1, case when v_none then p.n end) c on true  -- a key for each message
              group by kind, own, bin
              order by min(i), bin) b
    ), stored as (
        insert into pgqueue.consumer_messages (
            consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, predecessor,
            last_delivered_at, note, keys, message_count, seqs)
        select p_consumer.consumer_id, b.bundle_no, _pgqueue.lane_assigned(),
               case when s.deliver_count > 0 and b.predecessor is null then coalesce(v_front, b.bundle_no)
                    else b.bundle_no end,
               lower(b.seqs), s.arrival_no, s.priority, s.deliver_count, b.predecessor, s.last_delivered_at, s.note,
               b.keys, b.n, b.seqs
        from (select *, case when own is not null
                             then coalesce(lag(bundle_no) over (partition by own order by bin), tail) end as predecessor
              from bundle) b
        join source s using (no)
        order by b.bundle_no
        returning bundle_no, place, first_seq, message_count
    )
    select l.*, w.keyed
    into v_res
    from (select count(*) as n, sum(message_count)::bigint as messages,
                 (array_agg(place order by place, first_seq))[1] as place,
                 (array_agg(first_seq order by place, first_seq))[1] as first_seq,
                 (array_agg(bundle_no order by bundle_no))[1 + 3 * count(*) / 4] as more from stored) l
    cross join (select (p_keyed.bundles, array_agg(no order by i), array_agg(key order by i),
                        array_agg(case take when 0 then seqs
                                            else seqs * int8multirange(int8range(_pgqueue.bound_of(seqs, take), null))
                                            end order by i), null, null,
                        array_agg(what = 'due' order by i))::pgqueue.keyed_messages as keyed
                from taken where take < n) w;
    o_hints := p_hints;
    o_assigned := coalesce(v_res.messages, 0);
    if o_assigned > 0 then
        o_hints := _pgqueue.record_place(o_hints, _pgqueue.lane_assigned(), v_res.place, v_res.first_seq);
        o_hints.prefetch_at := v_res.more;
        o_hints.size := least(p_size, 1 << 30);
    end if;
    if (v_res.keyed).keys is not null then
        o_hints := _pgqueue.store_waiting(p_consumer, o_hints, v_res.keyed, p_keys, p_until, p_now);
    end if;
end $$;

-- Stores messages by key that store_assigned() has not assigned. Messages that are due later (p_keyed.are_due) are
-- delayed if no message of their key is before them; all others wait. The place of the first message of a key says for
-- which bundle it waits, or until when. Arguments: as store_assigned(). Returns the hints. Needs the consumer's lock.
create or replace function _pgqueue.store_waiting(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                  p_keyed pgqueue.keyed_messages, p_keys bigint[],
                                                  p_until timestamptz[], p_now timestamptz) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_none     boolean := p_consumer.ordering = 'none';
    v_assigned pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_assigned());
    v_res      record;
begin
    with used as materialized (
        select k as key, max(m.bundle_no) as tail
        from _pgqueue.assigned(p_consumer.consumer_id, v_assigned) m cross join lateral unnest(m.keys) k
        group by k
    ), ahead as materialized (
        select * from _pgqueue.waiting_ahead(p_consumer, p_keyed) where p_hints.any_waiting
    ), rest as materialized (
        select e.i, e.key, c.*, s.arrival_no, s.priority, s.deliver_count, s.last_delivered_at, s.note,
               case when s.not_visible_until > p_now then s.not_visible_until end as due, a.tid, e.is_due,
               case when v_none or coalesce(u.tail, a.long_claim) is null then t.until end as until,
               e.is_due and (e.key is null or v_none) as is_free,
               row_number() over (partition by e.key order by s.arrival_no, c.first_seq) = 1
               and (a.first_seq is null or ((a.was_first or v_none)
                                            and (s.arrival_no, c.first_seq) < (a.arrival_no, a.first_seq))) as first,
               coalesce(u.tail, _pgqueue.place_behind_long() + a.long_claim) as open
        from unnest(p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.are_due) with ordinality
             e (no, key, seqs, is_due, i)
        join unnest(p_keyed.bundles) with ordinality s on s.ordinality = e.no
        cross join lateral _pgqueue.split_set(e.seqs) c
        left join used u on u.key = e.key left join ahead a on a.key = e.key
        left join unnest(p_keys, p_until) t (key, until) on t.key = e.key
    ), demoted as (  -- without an order, returned messages come before others of their key
        update pgqueue.consumer_messages set lane = _pgqueue.lane_waiting(), place = _pgqueue.place_behind()
        where ctid = any (array(select tid from rest where first and tid is not null))
          and place <> _pgqueue.place_behind()
    ), stored as (
        insert into pgqueue.consumer_messages (
            consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, key,
            not_visible_until, last_delivered_at, note, message_count, seqs)
        select p_consumer.consumer_id, nextval('pgqueue.claim_numbers'),
               case when is_free or (is_due and first) or (first and until is not null)
                    then _pgqueue.lane_delayed() else _pgqueue.lane_waiting() end,
               case when is_free or (is_due and first) then _pgqueue.place_at(due)
                    when first and until is not null then _pgqueue.place_at(greatest(until, due))
                    when first then coalesce(open, _pgqueue.place_of_free() + nextval('pgqueue.claim_numbers'))
                    else _pgqueue.place_behind() end,
               first_seq, arrival_no, priority, deliver_count, case when not (is_due and v_none) then key end, due,
               last_delivered_at, note, message_count, seqs
        from rest
        order by i, first_seq
        returning lane, place, key
    )
    select bool_or(key is not null) as any_waiting, min(place) filter (where lane = _pgqueue.lane_delayed()) as due,
           min(place) filter (where lane = _pgqueue.lane_waiting() and place >= 0) as waits,
           min(place) filter (where lane = _pgqueue.lane_waiting()) as free
    into v_res
    from stored;
    p_hints.any_waiting := p_hints.any_waiting or v_res.any_waiting;
    p_hints := _pgqueue.record_first(_pgqueue.record_due(p_hints, v_res.due), v_res.waits);
    return _pgqueue.record_first(p_hints, v_res.free);
end $$;

-- Stores messages by key as assigned bundles of at most p_size messages, as far as the limits of keys allow. Returns
-- the hints, and how many messages were assigned. Needs the consumer's lock.
create or replace function _pgqueue.assign_within_limits(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                         p_keyed pgqueue.keyed_messages, p_size bigint,
                                                         out o_hints pgqueue.claim_hints, out o_assigned bigint)
language plpgsql as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_limited record;
    v_stored  record;
begin
    if _pgqueue.limits_keys(p_consumer) then
        v_limited := _pgqueue.apply_key_limits(p_consumer, p_hints, p_keyed, p_size, v_now);
        v_stored := _pgqueue.store_assigned(p_consumer, p_hints, v_limited.p_keyed, p_size, v_limited.o_keys,
                                            v_limited.o_until, v_now);
    else
        v_stored := _pgqueue.store_assigned(p_consumer, p_hints, p_keyed, p_size, null, null, v_now);
    end if;
    o_hints := v_stored.o_hints;
    o_assigned := v_stored.o_assigned;
end $$;

-- Assigns messages: first those that waited for keys that are free now, then the first unassigned messages. Nothing is
-- assigned while a claim holds all keys. Needs the consumer's lock.
--   p_want          messages of a claim
--   p_waiting_only  no unassigned messages
--   p_at_least      read this many unassigned messages, if more than usual, because those read before had to wait
-- Returns the hints, how many messages it examined, whether some of these were unassigned, and how many it assigned.
-- (More than 60 lines: the steps of an assignment, in order.)
create or replace function _pgqueue.assign(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints, p_want bigint,
                                           p_waiting_only boolean default false, p_at_least bigint default 0,
                                           out o_hints pgqueue.claim_hints, out o_examined bigint,
                                           out o_any_unassigned boolean, out o_assigned bigint)
language plpgsql as $$
declare
    v_size       bigint := case p_consumer.ordering when 'stream' then p_want
                                                    else least(p_want, _pgqueue.limit_small()) end;
    v_take       bigint := greatest(v_size, least(v_size * 128, _pgqueue.limit_assign()));
    v_waiting    pgqueue.keyed_messages;
    v_unassigned pgqueue.consumer_messages[];
    v_keyed      pgqueue.keyed_messages;
    v_stored     record;
begin
    o_hints := p_hints;
    o_examined := 0;
    o_any_unassigned := false;
    o_assigned := 0;
    if o_hints.all_keys then
        o_hints.all_keys := _pgqueue.holds_all_keys(p_consumer.consumer_id, o_hints);
        if o_hints.all_keys then
            return;
        end if;
    end if;
    o_hints := _pgqueue.reread_keys(p_consumer, _pgqueue.move_overtaken_claims(p_consumer, o_hints));
    if p_consumer.ordering = 'stream' then
        v_take := v_size * greatest(0, _pgqueue.limit_chain_of_stream() - (
            select count(*) from _pgqueue.assigned(p_consumer.consumer_id,
                                                   _pgqueue.lane_of(o_hints, _pgqueue.lane_assigned()))));
    end if;
    if o_hints.any_waiting then
        o_hints := _pgqueue.take_freed(p_consumer, o_hints);
        o_hints := _pgqueue.raise_waiting_hints(p_consumer.consumer_id, o_hints);
        v_waiting := _pgqueue.take_waiting(
            p_consumer, o_hints,
            case when p_consumer.fair then 4 * v_size
                 else v_size * case p_consumer.ordering when 'stream' then _pgqueue.limit_chain_of_stream()
                                                        when 'key' then _pgqueue.limit_chain() else 1 end end);
        -- (of a key with more messages, that many can be claimed at once)
        v_take := v_take - coalesce((select sum(least(n, v_size)) from unnest(v_waiting.counts) n), 0);
        if v_waiting.keys is null then
            o_hints.any_waiting := _pgqueue.may_have_waiting(p_consumer.consumer_id, o_hints);
        end if;
    end if;
    v_keyed := v_waiting;
    if p_consumer.fair then
        v_take := _pgqueue.limit_inspected();
    end if;
    if v_take > 0 and not p_waiting_only and (p_consumer.ordering <> 'stream' or not o_hints.any_waiting
                                              or _pgqueue.took_all_waiting(p_consumer.consumer_id, v_waiting)) then
        v_unassigned := _pgqueue.take_unassigned(p_consumer, o_hints, greatest(v_take, p_at_least));
        if v_unassigned <> '{}' then
            o_any_unassigned := true;
            v_keyed := _pgqueue.after(v_waiting, _pgqueue.by_key(p_consumer, v_unassigned));
            if v_waiting.keys is not null and p_consumer.ordering = 'none' then
                v_keyed := _pgqueue.by_arrival(v_keyed);  -- returned messages are unassigned, before waiting ones
            elsif v_waiting.keys is not null then
                v_keyed := _pgqueue.joined(p_consumer, v_keyed);
            end if;
        end if;
    end if;
    if v_keyed.keys is null then
        return;
    end if;
    o_examined := (select sum(n) from unnest(v_keyed.counts) n);
    v_stored := _pgqueue.assign_within_limits(p_consumer, o_hints, v_keyed, v_size);
    o_hints := v_stored.o_hints;
    o_assigned := v_stored.o_assigned;
    if v_waiting.keys is not null then
        -- if more messages of these keys wait, mark the first of them
        o_hints := _pgqueue.mark_firsts(p_consumer, o_hints, v_waiting.keys, p_consumer.ordering = 'none',
                                        case when p_consumer.ordering <> 'none' then v_waiting.bundles end, true);
    end if;
end $$;

-- Whether a claim may still hold all keys.
create or replace function _pgqueue.holds_all_keys(p_consumer_id int, p_hints pgqueue.claim_hints) returns boolean
language plpgsql stable as $$
begin
    return exists (select from pgqueue.consumer_messages
                   where consumer_id = p_consumer_id and lane = _pgqueue.lane_long()
                     and place >= _pgqueue.place_at(p_hints.long_from) and keys is null and key is null);
end $$;
