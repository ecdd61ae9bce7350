-- What there is, for people and dashboards.

-- The messages that are new for a consumer: counted in the next 1,000 publications, and estimated from them beyond.
create or replace function pgqueue._new_messages(p_consumer_id int) returns bigint
language sql stable
as $$
    with consumer as (
        select c.consumer_id, c.stream_id, coalesce(upper(k.seen), 1) as next,
               int8multirange(int8range(1, coalesce(upper(k.seen), 1))) - k.seen as gaps
        from pgqueue.consumers c cross join lateral pgqueue._cursor(c.consumer_id) k
        where c.consumer_id = p_consumer_id
    ), gap as (
        select coalesce(sum(p.n), 0) as n
        from consumer c
        cross join lateral (select g from unnest(c.gaps) g limit 100) g
        cross join lateral (select n from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= lower(g.g) and publication_id < upper(g.g)
                              and (consumers is null or c.consumer_id = any (consumers))
                            order by publication_id limit 1000) p
    ), sample as (
        select coalesce(sum(p.n) filter (where p.consumers is null or c.consumer_id = any (p.consumers)), 0) as n,
               count(*) as rows, min(p.publication_id) as first, max(p.publication_id) as last, min(c.stream_id) as stream_id
        from consumer c
        cross join lateral (select publication_id, n, consumers from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= c.next
                            order by publication_id limit 1000) p
    )
    select (gap.n + sample.n * case when sample.rows < 1000 then 1
                                    else 1 + (pgqueue.last_publication(sample.stream_id) - sample.last)::numeric / (sample.last - sample.first + 1)
                               end)::bigint
    from gap, sample
$$;

-- How many messages a consumer has not claimed yet; an estimate where very many publications are new.
create or replace function pgqueue.reader_backlog(p_consumer_id int) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select pgqueue._new_messages(p_consumer_id)
           + coalesce((select sum(n) from pgqueue.consumer_messages where consumer_id = p_consumer_id and state <> 'claimed'), 0)::bigint
$$;

-- One row per message and consumer that is not done with it: new (not taken yet), ready, delayed, waiting (behind an earlier
-- message of its key), claimed or dead. To look into a queue with; it unfolds every set that the query's conditions leave.
create or replace view pgqueue.message_states as
    select s.name as stream, c.name as consumer, x.seq, x.state, x.priority, x.deliver_count, x.not_visible_until, x.claim_id,
           x.lease_until, x.last_error
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    cross join lateral (
        select q.seq, 'new' as state, p.priority, 0 as deliver_count, p.deliver_at as not_visible_until,
               null::bigint as claim_id, null::timestamptz as lease_until, null::text as last_error
        from pgqueue._cursor(c.consumer_id) k
        join pgqueue.publications p on p.stream_id = c.stream_id and not k.seen @> p.publication_id
                                   and (p.consumers is null or c.consumer_id = any (p.consumers))
        cross join lateral unnest(p.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        union all
        select q.seq, case when m.state = 'ready' and m.not_visible_until > clock_timestamp() then 'delayed' else m.state end,
               m.priority, m.deliver_count, m.not_visible_until, m.claim_id, l.lease_until, m.last_error
        from pgqueue.consumer_messages m
        left join pgqueue.claims l on l.claim_id = m.claim_id
        cross join lateral unnest(m.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        where m.consumer_id = c.consumer_id
        union all
        select q.seq, 'dead', d.priority, d.deliver_count, null, d.claim_id, null, d.reason
        from pgqueue.dead_messages d
        cross join lateral unnest(d.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        where d.consumer_id = c.consumer_id
    ) x;

-- One row per consumer. Sums over runs and publications, never over messages; new is estimated where more than 1,000
-- publications are new. backlog: all that is not claimed and not dead.
create or replace view pgqueue.consumer_stats as
    select s.name as stream, c.name as consumer, c.ordering, w.new, r.ready, r.delayed, r.waiting, r.claimed,
           (select coalesce(sum(d.n), 0)::bigint from pgqueue.dead_messages d where d.consumer_id = c.consumer_id) as dead,
           w.new + r.ready + r.delayed + r.waiting as backlog,
           l.claims, l.expired, l.next_expiry
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    cross join lateral (select pgqueue._new_messages(c.consumer_id) as new) w
    cross join lateral (
        select coalesce(sum(n) filter (where state = 'ready' and (not_visible_until > clock_timestamp()) is not true), 0)::bigint as ready,
               coalesce(sum(n) filter (where state = 'delayed' or (state = 'ready' and not_visible_until > clock_timestamp())), 0)::bigint as delayed,
               coalesce(sum(n) filter (where state = 'waiting'), 0)::bigint as waiting,
               coalesce(sum(n) filter (where state = 'claimed'), 0)::bigint as claimed
        from pgqueue.consumer_messages where consumer_id = c.consumer_id) r
    cross join lateral (
        select count(*) as claims, count(*) filter (where lease_until <= clock_timestamp()) as expired, min(lease_until) as next_expiry
        from pgqueue.claims where consumer_id = c.consumer_id and live) l;

-- One row per stream. messages is the planner's estimate of what is stored; last_seq, the last number given out, an exact
-- bound of what was ever sent.
create or replace view pgqueue.stream_stats as
    select s.name as stream, s.kind, s.created_at,
           (select count(*) from pgqueue.consumers c where c.stream_id = s.stream_id) as consumers,
           pgqueue.last_publication(s.stream_id) as last_publication,
           greatest(t.reltuples, 0)::bigint as messages,
           pg_total_relation_size(t.oid) as bytes,
           (select count(*) from pgqueue.staged_writes w where w.stream_id = s.stream_id) as staged_blocks,
           coalesce(pg_sequence_last_value(format('pgqueue.seq_%s', s.stream_id)::regclass), 0) as last_seq
    from pgqueue.streams s
    join pg_catalog.pg_class t on t.oid = to_regclass(format('pgqueue.messages_%s', s.stream_id));
