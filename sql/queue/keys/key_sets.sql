-- Splitting bundles into the messages of each key. A key is known by its hash: two keys with the same hash wait for
-- each other.

-- Messages of bundles by key: for each set its key (null: none), the index of its bundle in bundles, and whether the
-- limits of the key exclude it.
do $$
begin
    if to_regtype('pgqueue.keyed_messages') is null then
        create type pgqueue.keyed_messages as (
            bundles pgqueue.consumer_messages[], nos int[], keys bigint[], seqs int8multirange[], counts bigint[],
            over_limit boolean[], are_due boolean[]);
    end if;
end $$;

-- The key that orders a message of a consumer, as an SQL expression over a message m.
create or replace function _pgqueue.key_of(p_consumer pgqueue.consumers) returns text
language sql immutable as $$
    select case p_consumer.ordering when 'stream' then '0::bigint' else 'hashtextextended(m.key, 0)' end
$$;

-- Splits bundles by key. Returns the messages for each key and bundle, in the order of the bundles and then of the
-- messages. The key is null for messages without a key, and for messages that are no longer stored.
create or replace function _pgqueue.by_key(p_consumer pgqueue.consumers, p_bundles pgqueue.consumer_messages[])
returns pgqueue.keyed_messages language plpgsql as $$
declare
    v_sets    int8multirange[] := array(select seqs from unnest(p_bundles) with ordinality order by ordinality);
    v_keyed   pgqueue.keyed_messages;
    v_found   pgqueue.messages_by_key;
    v_missing int8multirange;
begin
    v_keyed.bundles := p_bundles;
    if p_consumer.ordering = 'stream' or p_bundles = '{}' then
        v_keyed.nos := array(select i from generate_series(1, cardinality(p_bundles)) i);
        v_keyed.keys := array_fill(0::bigint, array[cardinality(p_bundles)]);
        v_keyed.seqs := v_sets;
        v_keyed.counts := array(select message_count from unnest(p_bundles) with ordinality order by ordinality);
        return v_keyed;
    end if;
    v_found := _pgqueue.keys(p_consumer.stream_id, v_sets, (select min(lower(s)) from unnest(v_sets) s),
                             (select max(upper(s)) from unnest(v_sets) s));
    v_keyed.nos := v_found.nos;
    v_keyed.keys := v_found.keys;
    v_keyed.seqs := v_found.seqs;
    v_keyed.counts := v_found.counts;
    if _pgqueue.count_of(p_bundles) is distinct from (select sum(c) from unnest(v_keyed.counts) c) then
        v_missing := _pgqueue.seqs_of(p_bundles) - coalesce((select range_agg(s) from unnest(v_keyed.seqs) s), '{}');
        select v_keyed.nos || array_agg(p.no::int), v_keyed.keys || array_agg(null::bigint),
               v_keyed.seqs || array_agg(p.part), v_keyed.counts || array_agg(_pgqueue.cardinality(p.part))
        into v_keyed.nos, v_keyed.keys, v_keyed.seqs, v_keyed.counts
        from _pgqueue.parts_of(p_bundles, v_missing) p;
    end if;
    return v_keyed;
end $$;

-- Appends messages by key to others.
create or replace function _pgqueue.after(p_first pgqueue.keyed_messages, p_then pgqueue.keyed_messages)
returns pgqueue.keyed_messages language plpgsql immutable as $$
begin
    if p_first.keys is null then
        return p_then;
    elsif p_then.keys is null then
        return p_first;
    end if;
    return (p_first.bundles || p_then.bundles,
            p_first.nos || array(select i + cardinality(p_first.bundles) from unnest(p_then.nos) i),
            p_first.keys || p_then.keys, p_first.seqs || p_then.seqs, p_first.counts || p_then.counts,
            null, null)::pgqueue.keyed_messages;
end $$;

-- Sorts messages by key by their arrival.
create or replace function _pgqueue.by_arrival(p_keyed pgqueue.keyed_messages) returns pgqueue.keyed_messages
language plpgsql stable as $$
begin
    select array_agg(e.no order by b.arrival_no, lower(e.seqs)), array_agg(e.key order by b.arrival_no, lower(e.seqs)),
           array_agg(e.seqs order by b.arrival_no, lower(e.seqs)), array_agg(e.n order by b.arrival_no, lower(e.seqs))
    into p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts
    from unnest(p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts) e (no, key, seqs, n)
    join unnest(p_keyed.bundles) with ordinality b on b.ordinality = e.no;
    return p_keyed;
end $$;

-- Joins messages of a key that follow each other and are alike: those that waited, and the unassigned ones behind them,
-- unless other messages wait between these.
create or replace function _pgqueue.joined(p_consumer pgqueue.consumers, p_keyed pgqueue.keyed_messages)
returns pgqueue.keyed_messages language plpgsql stable as $$
begin
    if cardinality(p_keyed.keys) = (select count(distinct k) from unnest(p_keyed.keys) k) then
        return p_keyed;
    end if;
    with source as materialized (
        select ordinality as no, row(priority, deliver_count, note, not_visible_until) as kind, arrival_no,
               first_seq, lane = _pgqueue.lane_waiting() as was_first
        from unnest(p_keyed.bundles) with ordinality
    ), entry as (
        select e.*, lag(s.was_first) over in_order as after_first, lag(s.arrival_no) over in_order as arrival_no,
               lag(s.first_seq) over in_order as first_seq,
               s.kind is not distinct from lag(s.kind) over in_order
               and lag(upper(e.seqs)) over in_order <= lower(e.seqs) as follows
        from unnest(p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts) with ordinality e (no, key, seqs, n, i)
        join source s using (no)
        window in_order as (partition by e.key order by e.i)
    ), part as (
        select e.*, count(*) filter (where e.follows is not true or (e.after_first and (
                        select true from pgqueue.consumer_messages
                        where consumer_id = p_consumer.consumer_id and key = e.key and lane = _pgqueue.lane_waiting()
                          and (arrival_no, first_seq) >= (e.arrival_no, e.first_seq) limit 1)))
                    over (partition by key order by i) as stretch
        from entry e
    ), whole as (
        select min(i) as i, min(no) as no, key, range_agg(seqs) as seqs, sum(n)::bigint as n
        from part group by key, stretch
    )
    select array_agg(no order by i), array_agg(key order by i), array_agg(seqs order by i), array_agg(n order by i)
    into p_keyed.nos, p_keyed.keys, p_keyed.seqs, p_keyed.counts
    from whole;
    return p_keyed;
end $$;

-- The keys of a bundle for its column keys: with an order each key once, without one a key for each message.
create or replace function _pgqueue.keys_in(p_consumer pgqueue.consumers, p_bundle pgqueue.consumer_messages)
returns bigint[] language plpgsql as $$
declare
    v_keyed pgqueue.keyed_messages := _pgqueue.by_key(p_consumer, array[p_bundle]);
begin
    return array(select k.key from unnest(v_keyed.keys, v_keyed.counts) k (key, n)
                 cross join lateral generate_series(1, case p_consumer.ordering when 'none' then k.n else 1 end)
                 where k.key is not null);
end $$;
