-- From version 2, the second part: what 3.sql has set aside is stored in the new form. Its expressions are here,
-- for functions change: names of old_... are tables for these statements.
do $$
declare
    v_last      bigint;  -- the last number of a bundle
    v_stream_id int;
    v_option    record;
begin
    if to_regclass('_pgqueue.consumer_messages') is null then
        return;
    end if;
    -- the settings for vacuum that somebody gave to the tables before
    for v_option in
        select c.relname, split_part(o, '=', 1) as name, split_part(o, '=', 2) as value
        from pg_class c cross join lateral unnest(c.reloptions) o
        where c.relnamespace = '_pgqueue'::regnamespace and c.relname in ('consumer_messages', 'consumer_cursors')
          and o like '%vacuum%'
    loop
        -- lock: table
        execute format('alter table pgqueue.%I set (%I = %L)', v_option.relname, v_option.name, v_option.value);
    end loop;
    -- All claims: the live ones, and those that a reader lost. The number of a claim's head has the 20 bits that are in
    -- its id, and is above all numbers that were given out. Ids of readers' claims are not made of tokens.
    v_last := greatest(pg_sequence_last_value('pgqueue.claim_numbers'), (select max(slot) from _pgqueue.slots),
                       (select max(claim_id) >> 24 from _pgqueue.claims where reader is not null),
                       (select max(greatest(acked_claim, last_claim, planned_to)) >> 24 from pgqueue.readers), 0);
    v_last := ((v_last >> 20) + 1) << 20;
    create table _pgqueue.old_claims as
    with claim as (
        select claim_id, consumer_id, reader, live, claimed_at, lease_until, visibility_timeout, owner,
               case when reader is null then claim_id >> 43 else claim_id & 1048575 end as bits,
               case when reader is null then claim_id & 8796093022207
                    else (uuid_hash_extended(gen_random_uuid(), 0) & 4398046511103) << 1 end as token
        from _pgqueue.claims
        union all
        select (slot & 1048575) << 43 | token, consumer_id, null, true, claimed_at, lease_until, timeout, owner,
               slot & 1048575, token
        from _pgqueue.slots where token is not null
    )
    select *, v_last + ((row_number() over (partition by bits order by claim_id) - 1) << 20) + bits as head from claim;
    v_last := greatest(v_last, (select max(head) from _pgqueue.old_claims));

    -- All that consumers hold, in parts that are alike, and where each stands: held, by a claim; assigned; keyed, if it
    -- waits or is delayed by its key; or free, anywhere else. What is to be held by key, or to wait by key although it
    -- was assigned, is split by key before.
    create table _pgqueue.old_parts as
    with stored as (
        select consumer_id, state, claim_id, priority, deliver_count, arrival_no, not_visible_until, last_delivered_at,
               note, key, case when state = 'claimed' or lane = 0 then piece end as piece, line_no as place, first_seq,
               seqs
        from _pgqueue.consumer_messages where state <> 'claimed' or piece is null
        union all
        -- what a claim has of a piece is one bundle again, so that each of its keys is in one
        select consumer_id, state, claim_id, priority, deliver_count, arrival_no, null, max(last_delivered_at), note,
               null, piece, null, null, range_agg(seqs)
        from _pgqueue.consumer_messages where state = 'claimed' and piece is not null
        group by consumer_id, state, claim_id, priority, deliver_count, arrival_no, note, piece
        union all
        select consumer_id, case when token is null then 'ready' else 'claimed' end, (slot & 1048575) << 43 | token,
               priority, (token is not null)::int, arrival_no, null, claimed_at, null, null,
               case when whole is null or token is not null then piece end, piece, slot, seqs
        from _pgqueue.slots
        union all
        -- what slots would have gone on with
        select consumer_id, 'waiting', null, priority, 0, arrival_no, null, null, null, key, null, null, null, r.seqs
        from _pgqueue.slots s
        cross join lateral (select range_agg(r) as seqs from unnest(s.rest[:coalesce(s.parts, 1)]) r) r
        where rest is not null
    ), judged as materialized (
        select row_number() over () as run_no, c.stream_id, c.ordering, c.profile like '% keyed' as keyed, s.*,
               o.claim_id is not null as claimed, c.ordering = 'stream' or p.consumer_id is not null as whole,
               case when o.claim_id is null and s.key is not null then 'keyed'
                    when o.claim_id is null and (s.piece is null or c.ordering = 'stream') then 'free'
                    when o.claim_id is null and l.is_large then case c.ordering when 'none' then 'free' else 'split' end
                    when o.claim_id is null then 'assigned'
                    when c.profile not like '% keyed' or c.ordering = 'stream' or p.consumer_id is not null
                         or (c.ordering = 'none' and c.per_key_limit is null) then 'held'
                    else 'split' end as stands
        from stored s
        join pgqueue.consumers c using (consumer_id)
        left join _pgqueue.old_claims o on s.state = 'claimed' and o.claim_id = s.claim_id and o.live
        left join _pgqueue.pieces p  -- with all keys
            on s.state = 'claimed' and c.ordering = 'key' and p.consumer_id = s.consumer_id and p.piece = s.piece
               and p.keys is null
        cross join lateral (  -- larger than its note allows: its keys wait, to be assigned again
            select s.note ? 'at_most' and (s.note ->> 'at_most')::bigint < sum(upper(g) - lower(g)) as is_large
            from unnest(s.seqs) g) l
        where s.seqs <> '{}'
    ), beside as (
        select run_no, seqs, dense_rank() over (
                   order by consumer_id, arrival_no, stands, claim_id, key, state = 'unfiltered') as line
        from judged where ordering <> 'none' and stands in ('held', 'keyed', 'free')
    ), crossed as (
        select distinct line
        from (select line, lower(seqs) < max(upper(seqs)) over (
                         partition by line order by lower(seqs)
                         rows between unbounded preceding and 1 preceding) as crosses
              from beside) b
        where crosses
    ), cut as materialized (
        -- With an order, messages of one arrival_no went by their numbers, whichever run they were in. Bundles come one
        -- after the other: so runs that cross are cut where they do.
        select run_no, range_agg(g) as seqs
        from (select run_no, g, row_number() over (partition by line order by g)
                                - row_number() over (partition by run_no order by g) as island
              from beside join crossed using (line) cross join lateral unnest(seqs) g) r
        group by run_no, island
    )
    select row_number() over () as part_no, stands, consumer_id, stream_id, ordering, keyed, whole, state,
           case when claimed then claim_id end as claim_id, priority, deliver_count - claimed::int as deliver_count,
           arrival_no, not_visible_until, last_delivered_at, note, key, place, first_seq,
           coalesce(cut.seqs, judged.seqs) as seqs
    from judged left join cut using (run_no);

    -- By key: the keys of what is assigned, with an order each of them once, else one for each message; and the parts
    -- of each key of what is to be split. Messages without a key, or that are gone, stay together.
    create table _pgqueue.old_keys as select 0::bigint as part_no, '{}'::bigint[] as keys limit 0;
    for v_stream_id in
        select distinct stream_id from _pgqueue.old_parts where stands in ('assigned', 'split')
    loop
        execute format($q$
            create table _pgqueue.old_messages as
            select p.part_no, p.stands, p.ordering, m.seq, m.key
            from _pgqueue.old_parts p
            cross join lateral unnest(p.seqs) g
            cross join lateral (select seq, hashtextextended(key, 0) as key from pgqueue.messages_%1$s
                                where seq >= lower(g) and seq < upper(g) and key is not null offset 0) m
            where p.stream_id = %1$s and p.stands in ('assigned', 'split')
            $q$, v_stream_id);
        insert into _pgqueue.old_keys
        select part_no, case ordering when 'none' then array_agg(key) else array_agg(distinct key) end
        from _pgqueue.old_messages where stands = 'assigned' group by part_no, ordering;
        insert into _pgqueue.old_parts
        select null, case when claim_id is not null then 'held' else 'keyed' end, consumer_id, stream_id, ordering,
               keyed, whole, 'waiting', claim_id, priority, deliver_count, arrival_no, null, last_delivered_at, note,
               k.key, place, first_seq, k.seqs
        from (select part_no, key, range_agg(int8range(seq, seq + 1)) as seqs from _pgqueue.old_messages
              where stands = 'split' group by part_no, key) k
        join _pgqueue.old_parts p using (part_no);
        update _pgqueue.old_parts p
        set stands = case when claim_id is not null then 'held' else 'free' end, seqs = p.seqs - coalesce(k.seqs, '{}')
        from (select part_no, k.seqs
              from _pgqueue.old_parts
              left join (select part_no, range_agg(int8range(seq, seq + 1)) as seqs from _pgqueue.old_messages
                         where stands = 'split' group by part_no) k using (part_no)
              where stream_id = v_stream_id and stands = 'split') k
        where p.part_no = k.part_no;
        drop table _pgqueue.old_messages;
    end loop;

    -- Claims, as they are a second after they were made: the head first, which has the lease. A member has another
    -- number, also in its last 20 bits.
    insert into pgqueue.consumer_messages (
        consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, last_delivered_at, note,
        key, keys, message_count, seqs, token, claimed_at, lease_until, visibility_timeout, owner, members, head,
        reader)
    with bundle as (
        select p.*, o.head, o.token, o.reader, o.claimed_at, o.lease_until, o.visibility_timeout, o.owner,
               row_number() over (partition by p.claim_id order by p.arrival_no, lower(p.seqs)) as i,
               v_last + 2 * row_number() over () as member
        from _pgqueue.old_parts p
        join _pgqueue.old_claims o on o.claim_id = p.claim_id
        where p.stands = 'held' and p.seqs <> '{}'
    ), numbered as (
        select *, case when i = 1 then head
                       else member + ((member & 1048575) = (head & 1048575))::int end as bundle_no
        from bundle
    )
    select consumer_id, bundle_no, 1000002,
           case when i = 1 then (extract(epoch from lease_until) * 1000000)::bigint else 1::bigint << 62 end,
           lower(seqs), arrival_no, priority, deliver_count, last_delivered_at, note, key,
           case when keyed and not whole then array_remove(array[key], null) end, n.message_count, seqs, token,
           case when reader is null then claimed_at else coalesce(last_delivered_at, claimed_at) end,
           case when i = 1 then lease_until end, visibility_timeout, owner,
           case when i = 1 then m.members end, case when i > 1 then head end, reader
    from numbered
    cross join lateral (select sum(upper(g) - lower(g)) as message_count from unnest(seqs) g) n
    left join (select claim_id, array_agg(bundle_no order by i) as members from numbered where i > 1
               group by claim_id) m using (claim_id);
    perform setval('pgqueue.claim_numbers',
                   greatest(v_last, (select max(bundle_no) from pgqueue.consumer_messages)) + 1);

    -- What is assigned, in its order.
    insert into pgqueue.consumer_messages (
        consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, last_delivered_at, note,
        keys, message_count, seqs)
    select consumer_id, d.bundle_no, 0, d.bundle_no, lower(seqs), arrival_no, priority, deliver_count,
           last_delivered_at, note, keys, n.message_count, seqs
    from (select nextval('pgqueue.claim_numbers') as bundle_no, d.*
          from (select p.*, coalesce(k.keys, '{}') as keys
                from _pgqueue.old_parts p left join _pgqueue.old_keys k using (part_no)
                where p.stands = 'assigned' order by p.consumer_id, p.place, p.first_seq) d) d
    cross join lateral (select sum(upper(g) - lower(g)) as message_count from unnest(seqs) g) n;

    -- All else stands where it would have been taken. By key it waits for the last open bundle with its key.
    insert into pgqueue.consumer_messages (
        consumer_id, bundle_no, lane, place, first_seq, arrival_no, priority, deliver_count, key, not_visible_until,
        last_delivered_at, note, message_count, seqs)
    with tail as materialized (
        -- where it waits for that bundle, see queue/keys/waiting.sql
        select consumer_id, k as key, coalesce(max(bundle_no) filter (where lane = 0),
                                               max(bundle_no) + (1::bigint << 61)) as bundle_no
        from pgqueue.consumer_messages cross join lateral unnest(keys) k group by consumer_id, k
    ), bundle as (  -- of at most 64 ranges
        select stands, consumer_id, ordering, keyed, state, priority, deliver_count, arrival_no, not_visible_until,
               last_delivered_at, note, key, c.message_count, c.seqs, t.bundle_no as tail,
               stands = 'keyed' and row_number() over (partition by stands, consumer_id, key
                                                       order by arrival_no, lower(c.seqs)) = 1 as is_first
        from _pgqueue.old_parts p
        left join tail t using (consumer_id, key)
        cross join lateral (
            select sum(upper(g) - lower(g)) as message_count, range_agg(g) as seqs
            from (select g, (row_number() over (order by g) - 1) / 64 as chunk from unnest(p.seqs) g) g
            group by chunk) c
        where stands in ('keyed', 'free')
    ), placed as (
        select *, case when state = 'unfiltered' then 1000004
                       when stands = 'keyed' and (state <> 'delayed' or not is_first or tail is not null) then 1000003
                       when not_visible_until is not null and (ordering = 'none' or state = 'delayed') then 1000001
                       when keyed then 1 else -priority end as lane
        from bundle
    )
    select consumer_id, bundle_no, lane,
           case when lane = 1000001 then (extract(epoch from not_visible_until) * 1000000)::bigint
                when lane = 1000003 and is_first then coalesce(tail, (-1::bigint << 61) + bundle_no)
                when lane = 1000003 then -2
                when lane = 1000004 and not keyed then ((32767 - priority)::bigint << 46) + arrival_no
                else arrival_no end,
           lower(seqs), arrival_no, priority, deliver_count, key, not_visible_until, last_delivered_at, note,
           message_count, seqs
    from (select nextval('pgqueue.claim_numbers') as bundle_no, p.*
          from (select * from placed order by consumer_id, lane, arrival_no, lower(seqs)) p) p;

    insert into pgqueue.reader_claims (reader, claim_id, consumer_id, head, token, message_count, settled, seqs,
                                       arrival_nos, settled_early)
    select c.reader, c.claim_id, c.consumer_id, o.head, o.token, c.message_count, c.settled, coalesce(c.seqs, '{}'),
           case when c.lanes <> '{}' then coalesce(c.arrival_nos, '{}') else '{}' end, c.acted
    from _pgqueue.claims c
    join _pgqueue.old_claims o using (claim_id)
    join pgqueue.readers r on r.reader = c.reader;

    insert into pgqueue.consumer_cursors (consumer_id, version, next_publication, gaps, taken, forgotten, last_arrival,
                                          delivered, delivered_at)
    select distinct on (consumer_id) consumer_id, version, next_publication, gaps, taken, forgotten, last_line_no,
           delivered, delivered_at
    from _pgqueue.consumer_cursors
    order by consumer_id, version desc;

    drop table _pgqueue.old_keys, _pgqueue.old_parts, _pgqueue.old_claims, _pgqueue.consumer_messages,
               _pgqueue.consumer_cursors, _pgqueue.claims, _pgqueue.slots, _pgqueue.pieces;
    drop type pgqueue.line_place;
end $$;
