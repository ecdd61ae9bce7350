-- Dealing: the order by key. A message is not delivered while an earlier message of its key is unsettled elsewhere.
--
-- The messages that a consumer takes stand in its line, keys mixed. The dealer, which is a claim that has the
-- consumer's lock, deals: it makes bundles of the size of a claim of the messages that waited for keys that are free
-- now, and of the front of the line. Claims take dealt bundles, and settle them, without a lock of the consumer.
--
--   * Keys with few messages are packed: a bundle has several keys, and no key is in two of them.
--   * A key with enough messages for a bundle has bundles of its own, each behind the one before. A claim may have such
--     a bundle when that one is gone (is_gone()). With ordering=stream all messages are of one key.
--   * What is left over waits, and so do messages of keys that are in use, or over a limit of their key.
--
-- So the messages of a key are, in this order: in dealt bundles or delayed, waiting, in the line.

-- Stores messages by key as dealt bundles of at most p_size. Messages that are not visible yet are delayed, and what
-- may not be dealt waits. Needs the consumer's lock.
--   p_keyed    in their order; held: over a limit of their key
--   p_keys, p_until  keys without tokens, and when the first of these come back
--   p_now      messages that are visible at that time are visible
-- Returns the hints; how many messages were dealt; and whether something waits.
-- (More than 60 lines: one statement judges and stores, so that everything is counted once.)
create or replace function _pgqueue.store_dealt(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                p_keyed pgqueue.keyed_messages, p_size bigint, p_keys bigint[],
                                                p_until timestamptz[], p_now timestamptz,
                                                out o_hints pgqueue.claim_hints, out o_dealt bigint,
                                                out o_waits boolean)
language plpgsql
as $$
declare
    v_id    int := p_consumer.consumer_id;
    v_none  boolean := p_consumer.ordering = 'none';
    v_chain int := case when _pgqueue.limits_keys(p_consumer) then 1
                        when p_consumer.ordering = 'stream' then _pgqueue.limit_chain_of_stream()
                        else _pgqueue.limit_chain() end;
    v_dealt pgqueue.lane_hint := _pgqueue.lane_of(p_hints, _pgqueue.lane_dealt());
    v_parks boolean := p_hints.parks;
    v_front bigint := v_dealt.place - 1;  -- what failed before comes before what is dealt and free
    v_res   record;
begin
    with source as materialized (
        select ordinality as no, arrival_no, priority, deliver_count, last_delivered_at, note,
               lane = _pgqueue.lane_waiting() as is_head,  -- it waited before all others of its key
               case when not_visible_until > p_now then not_visible_until end as due,
               least(p_size, (note ->> 'at_most')::bigint) as size,
               dense_rank() over (order by priority, deliver_count, note, last_delivered_at,
                                           case when not_visible_until > p_now then not_visible_until end) as kind
        from unnest(p_keyed.bundles) with ordinality
    ), used as materialized (
        select k as key, max(m.bundle_no) as tail, count(*) as bundles
        from _pgqueue.dealt(v_id, v_dealt) m cross join lateral unnest(m.keys) k
        group by k
    ), aside as materialized (  -- what is held, waits or is delayed of each key; nothing is asked where nothing can be
        select k as key, h.tail as held, w.*, e.key is not null as is_head
        from (select distinct k from unnest(case when v_parks then p_keyed.keys end) k where k is not null) k
        left join (select key, case when not v_none then arrival_no end as arrival_no, first_seq
                   from unnest(p_keyed.bundles) where lane = _pgqueue.lane_waiting()) e on e.key = k
        left join lateral (select max(bundle_no) as tail from pgqueue.consumer_messages
                           where consumer_id = v_id and key = k and lane = _pgqueue.lane_held()) h on true
        -- the first of the key that still waits or is delayed. With an order, it is behind what waited; where nothing
        -- of the key did, it does not matter which one it is, and at the end are fewer dead rows
        left join lateral (
            (select arrival_no, first_seq, ctid as tid, lane from pgqueue.consumer_messages
             where consumer_id = v_id and key = k and lane = _pgqueue.lane_delayed() and e.key is null
             order by arrival_no desc, first_seq desc limit 1)
            union all
            (select arrival_no, first_seq, ctid, lane from pgqueue.consumer_messages
             where consumer_id = v_id and key = k and lane = _pgqueue.lane_waiting() and (v_none or e.key is not null)
               and (arrival_no, first_seq) >= (coalesce(e.arrival_no, 0), coalesce(e.first_seq, 0))
             order by arrival_no, first_seq limit 1)
            union all
            (select arrival_no, first_seq, ctid, lane from pgqueue.consumer_messages
             where consumer_id = v_id and key = k and lane = _pgqueue.lane_waiting() and not v_none and e.key is null
             order by arrival_no desc, first_seq desc limit 1)
            order by arrival_no, first_seq limit 1) w on true
    ), asked as materialized (
        select k.key, k.i, u.tail, coalesce(u.bundles, 0) as bundles, a.held, a.arrival_no, a.first_seq,
               a.first_seq is not null as waits, a.tid, a.lane, a.is_head
        from (select key, min(i) as i from unnest(p_keyed.keys) with ordinality k (key, i)
              where key is not null group by key) k
        left join used u on u.key = k.key left join aside a on a.key = k.key
    ), entry as (
        select e.i, e.no, e.key, e.seqs, e.n, s.kind, s.due, s.size, coalesce(a.tail, a.held) as tail, a.held,
               a.bundles,
               a.waits and not s.is_head
               and not (v_none and (s.arrival_no, lower(e.seqs)) < (a.arrival_no, a.first_seq)) as waits,
               e.held is true or e.i > a.i as behind
        from unnest(p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts, p_keyed.held) with ordinality
             e (no, key, seqs, n, held, i)
        join source s using (no) left join asked a using (key)
    ), judged as materialized (
        select e.*,
               case when due is not null and (key is null or v_none) then 'due'
                    when waits or behind is true then 'wait'
                    when due is not null then case when tail is null then 'due' else 'wait' end
                    when v_none or key is null then 'pack'
                    when n >= size and bundles < v_chain and (held is null or tail is null) then 'own'
                    when tail is null then 'pack' else 'wait' end as what
        from entry e
    ), taken as materialized (
        select i, no, key, seqs, n, kind, size, own, case when own is null then before else 0 end as before,
               case when own is not null then least(n / size, v_chain - bundles) * size
                    when key is null or v_none then n
                    else least(n, size - before % size) end as take
        from (select *, sum(most) over (partition by kind, own is null order by i) - most as before
              from (select *, case when what = 'own' then i end as own,  -- a bundle of its own, or packed
                           (case when key is null or v_none then n else least(n, size) end)::int as most
                    from judged where what in ('own', 'pack')) j) j
    ), part as materialized (
        select i, no, key, kind, own, before / size as bin, n, seqs
        from taken where take = n and before / size = (before + n - 1) / size
        union all
        select t.i, t.no, t.key, t.kind, t.own, b as bin,
               least(t.take, (b + 1) * t.size - t.before) - greatest(0, b * t.size - t.before) as n,
               int8multirange(variadic e.each[greatest(0, b * t.size - t.before) + 1
                                              :least(t.take, (b + 1) * t.size - t.before)]) as seqs
        from taken t
        cross join lateral (select array(select int8range(s, s + 1) from unnest(t.seqs) g
                                         cross join lateral generate_series(lower(g), upper(g) - 1) s
                                         limit t.take) as each offset 0) e
        cross join lateral generate_series(t.before / t.size, (t.before + t.take - 1) / t.size) b
        where t.take < t.n or t.before / t.size < (t.before + t.take - 1) / t.size
    ), bundle as materialized (
        select nextval('pgqueue.claim_numbers') as bundle_no, b.*
        from (select min(i) as i, min(no) as no, bin, own, sum(n::int) filter (where c = 1) as n,
                     range_agg(seqs) filter (where c = 1) as seqs, array_remove(array_agg(key), null) as keys
              from part cross join lateral generate_series(1, case when v_none then n else 1 end) c
              group by kind, own, bin
              order by min(i), bin) b
    ), laid as (
        insert into pgqueue.consumer_messages (
            consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, behind,
            last_delivered_at, note, keys, message_count, seqs)
        select v_id, b.bundle_no, _pgqueue.lane_dealt(),
               case when s.deliver_count > 0 then coalesce(v_front, b.bundle_no) else b.bundle_no end,
               lower(b.seqs), s.arrival_no, s.priority, s.deliver_count,
               case when b.own is not null
                    then coalesce(lag(b.bundle_no) over (partition by b.own order by b.bin), a.tail) end,
               s.last_delivered_at, s.note, b.keys, b.n, b.seqs
        from bundle b join source s using (no) left join asked a on b.own is not null and a.key = b.keys[1]
        order by b.bundle_no
        returning bundle_no, place, first_seq, message_count
    ), anchor as materialized (
        select k as key, max(bundle_no) as number from bundle cross join lateral unnest(keys) k group by k
    ), over as (
        select i, no, key, seqs, what from judged where what in ('wait', 'due')
        union all
        select t.i, t.no, t.key, t.seqs * int8multirange(int8range(
                   (select max(upper(p.seqs)) from part p where p.i = t.i), null)), 'wait'
        from taken t where t.take < t.n
    ), stays as (
        select o.i, o.no, o.key, o.what, c.seqs, c.message_count, c.first_seq, s.due, t.until,
               row_number() over (partition by o.key order by s.arrival_no, c.first_seq) = 1
               and (a.waits is not true or ((a.is_head or v_none)
                                            and (s.arrival_no, c.first_seq) < (a.arrival_no, a.first_seq))) as first,
               coalesce(n.number, a.tail, _pgqueue.place_of_held() + a.held) as open
        from over o join source s using (no)
        cross join lateral _pgqueue.split_set(o.seqs) c
        left join anchor n using (key) left join asked a using (key)
        left join unnest(p_keys, p_until) t (key, until) using (key)
    ), demoted as (  -- without an order, what came back stands before others of its key
        update pgqueue.consumer_messages set lane = _pgqueue.lane_waiting(), place = -2
        where ctid = any (array(select a.tid from stays w join asked a using (key) where w.first and a.tid is not null))
          and place <> -2
    ), put as (
        insert into pgqueue.consumer_messages (
            consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, key,
            not_visible_until, last_delivered_at, note, message_count, seqs)
        select v_id, nextval('pgqueue.claim_numbers'),
               case when w.what = 'due' and (w.first or w.key is null or v_none)
                      or (w.first and w.open is null and w.until is not null)
                    then _pgqueue.lane_delayed() else _pgqueue.lane_waiting() end,
               case when w.what = 'due' and (w.first or w.key is null or v_none) then _pgqueue.place_at(w.due)
                    when w.first and w.open is null and w.until is not null then _pgqueue.place_at(w.until)
                    when w.first then coalesce(w.open, _pgqueue.place_of_free() + nextval('pgqueue.claim_numbers'))
                    else -2 end,
               w.first_seq, s.arrival_no, s.priority, s.deliver_count,
               case when w.what = 'due' and v_none then null else w.key end, w.due, s.last_delivered_at, s.note,
               w.message_count, w.seqs
        from stays w join source s using (no)
        order by w.i, w.first_seq
        returning lane, place, key
    )
    select l.*, exists (select from put where key is not null) as parks,
           (select min(place) from put where lane = _pgqueue.lane_delayed()) as due,
           (select min(place) from put where lane = _pgqueue.lane_waiting() and place >= 0) as waits,
           (select min(place) from put where lane = _pgqueue.lane_waiting()) as free
    into v_res
    from (select count(*) as n, sum(message_count)::bigint as messages, min(bundle_no) as first, max(bundle_no) as last,
                 (array_agg(place order by place, first_seq))[1] as place,
                 (array_agg(first_seq order by place, first_seq))[1] as first_seq,
                 (array_agg(bundle_no order by bundle_no))[1 + count(*) / 2] as middle from laid) l;
    o_hints := p_hints;
    o_dealt := coalesce(v_res.messages, 0);
    o_waits := v_res.parks;
    if o_dealt > 0 then
        o_hints := _pgqueue.stands(o_hints, _pgqueue.lane_dealt(), v_res.place, v_res.first_seq);
        o_hints.more := v_res.middle;
        o_hints.size := least(p_size, 1 << 30);
    end if;
    o_hints.parks := o_hints.parks or o_waits;
    o_hints := _pgqueue.waits_at(_pgqueue.waits_at(_pgqueue.due_at(o_hints, v_res.due), v_res.waits), v_res.free);
end $$;

-- Stores messages by key as dealt bundles of at most p_size, as far as the limits of the consumer allow. Returns the
-- hints, and how many messages were dealt. Needs the consumer's lock.
create or replace function _pgqueue.lay(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                        p_keyed pgqueue.keyed_messages, p_size bigint,
                                        out o_hints pgqueue.claim_hints, out o_dealt bigint)
language plpgsql
as $$
declare
    v_now  timestamptz := clock_timestamp();
    v_gate record;
    v_laid record;
begin
    if _pgqueue.limits_keys(p_consumer) then
        v_gate := _pgqueue.gate(p_consumer, p_hints, p_keyed, p_size, v_now);
        v_laid := _pgqueue.store_dealt(p_consumer, p_hints, v_gate.p_keyed, p_size, v_gate.o_keys, v_gate.o_until,
                                       v_now);
    else
        v_laid := _pgqueue.store_dealt(p_consumer, p_hints, p_keyed, p_size, null, null, v_now);
    end if;
    o_hints := v_laid.o_hints;
    o_dealt := v_laid.o_dealt;
end $$;

-- Deals: first what waited for keys that are free now, then the front of the line. Nobody deals while a claim has all
-- keys. Needs the consumer's lock.
--   p_want     messages of a claim
--   p_waiting  nothing of the line
--   p_room     look at so many messages of the line, where that is more than usual: those before had to wait
-- Returns the hints, at how many messages it looked, whether some of these stood in the line, and how many messages
-- it dealt. (More than 60 lines: the steps of a deal, in their order.)
create or replace function _pgqueue.deal(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints, p_want bigint,
                                         p_waiting boolean default false, p_room bigint default 0,
                                         out o_hints pgqueue.claim_hints, out o_looked bigint, out o_line boolean,
                                         out o_dealt bigint)
language plpgsql
as $$
declare
    v_size  bigint := case p_consumer.ordering when 'stream' then p_want
                                               else least(p_want, _pgqueue.limit_small()) end;
    v_room  bigint := greatest(v_size, least(v_size * 128, _pgqueue.limit_deal()));
    v_heads pgqueue.keyed_messages;
    v_line  pgqueue.consumer_messages[];
    v_keyed pgqueue.keyed_messages;
    v_laid  record;
begin
    o_hints := p_hints;
    o_looked := 0;
    o_line := false;
    o_dealt := 0;
    if o_hints.whole then
        o_hints.whole := _pgqueue.is_whole(p_consumer.consumer_id, o_hints);
        if o_hints.whole then
            return;
        end if;
    end if;
    o_hints := _pgqueue.loosen(p_consumer, _pgqueue.let_pass(p_consumer, o_hints));
    if p_consumer.ordering = 'stream' then
        v_room := v_size * greatest(0, _pgqueue.limit_chain_of_stream() - (
            select count(*) from _pgqueue.dealt(p_consumer.consumer_id,
                                                _pgqueue.lane_of(o_hints, _pgqueue.lane_dealt()))));
    end if;
    if o_hints.parks then
        o_hints := _pgqueue.take_freed(p_consumer, o_hints);
        o_hints := _pgqueue.raise_waits(p_consumer.consumer_id, o_hints);
        v_heads := _pgqueue.take_heads(
            p_consumer, o_hints,
            case when p_consumer.fair then 4 * v_size
                 else v_size * case p_consumer.ordering when 'stream' then _pgqueue.limit_chain_of_stream()
                                                        when 'key' then _pgqueue.limit_chain() else 1 end end);
        -- (of a key that has more, so much goes at once)
        v_room := v_room - coalesce((select sum(least(n, v_size)) from unnest(v_heads.counts) n), 0);
        if v_heads.keys is null then
            o_hints.parks := _pgqueue.may_park(p_consumer.consumer_id, o_hints);
        end if;
    end if;
    v_keyed := v_heads;
    if p_consumer.fair then
        v_room := _pgqueue.limit_looks();
    end if;
    if v_room > 0 and not p_waiting and (p_consumer.ordering <> 'stream' or not o_hints.parks
                                         or _pgqueue.were_all(p_consumer.consumer_id, v_heads)) then
        v_line := _pgqueue.line_front(p_consumer, o_hints, greatest(v_room, p_room));
        if v_line <> '{}' then
            o_line := true;
            v_keyed := _pgqueue.after(v_heads, _pgqueue.by_key(p_consumer, v_line));
            if v_heads.keys is not null and p_consumer.ordering = 'none' then
                v_keyed := _pgqueue.by_arrival(v_keyed);  -- what came back is in the line, before what waits
            elsif v_heads.keys is not null then
                v_keyed := _pgqueue.joined(p_consumer, v_keyed);
            end if;
        end if;
    end if;
    if v_keyed.keys is null then
        return;
    end if;
    o_looked := (select sum(n) from unnest(v_keyed.counts) n);
    v_laid := _pgqueue.lay(p_consumer, o_hints, v_keyed, v_size);
    o_hints := v_laid.o_hints;
    o_dealt := v_laid.o_dealt;
    if v_heads.keys is not null then
        -- of keys of which more waits, that is the first now
        o_hints := _pgqueue.park(p_consumer, o_hints, v_heads.keys, p_consumer.ordering = 'none',
                                 case when p_consumer.ordering <> 'none' then v_heads.bundles end);
    end if;
end $$;

-- Whether a claim may still have all keys.
create or replace function _pgqueue.is_whole(p_consumer_id int, p_hints pgqueue.claim_hints) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from pgqueue.consumer_messages
                   where consumer_id = p_consumer_id and lane = _pgqueue.lane_held()
                     and place >= _pgqueue.place_at(p_hints.held_from) and keys is null and key is null);
end $$;
