-- What there is, for people and dashboards. comments.sql says what each column is.

-- Makes a view, or another of it. One that is as it should be is left alone, because replacing it waits for everybody who looks at it,
-- to the end of their transactions, and lets others wait meanwhile: installing again must not.
create or replace function pgqueue._make_view(p_name text, p_query text) returns void
language plpgsql
as $$
begin
    execute 'create view pgqueue._new_view as ' || p_query;
    if pg_get_viewdef('pgqueue._new_view'::regclass) is distinct from pg_get_viewdef(to_regclass('pgqueue.' || p_name)) then
        execute format('create or replace view pgqueue.%I as %s', p_name, p_query);
    end if;
    drop view pgqueue._new_view;
end $$;

-- One row per message and consumer that is not done with it. To look into a queue with; it unfolds every set that the query's conditions leave.
do $view$ begin perform pgqueue._make_view('message_states', $query$
    select s.name as stream, c.name as consumer, x.seq, x.state, x.priority, x.deliver_count, x.not_visible_until, x.claim_id,
           x.lease_until, x.last_error
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    cross join lateral (
        select q.seq, 'new' as state, p.priority, 0 as deliver_count, p.deliver_at as not_visible_until,
               null::bigint as claim_id, null::timestamptz as lease_until, null::text as last_error
        from pgqueue._cursor(c.consumer_id) k
        join pgqueue.publications p on p.stream_id = c.stream_id and (p.publication_id >= k.next_publication or pgqueue._gap_ids(k) @> p.publication_id)
                                   and (p.consumers is null or c.consumer_id = any (p.consumers))
        cross join lateral unnest(p.seqs - coalesce(pgqueue._kept(k), '{}')) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        union all
        select q.seq, case when m.state in ('ready', 'waiting') and m.not_visible_until > clock_timestamp() then 'delayed' else m.state end,
               m.priority, m.deliver_count, m.not_visible_until, m.claim_id, l.lease_until, m.note ->> 'error'
        from pgqueue.consumer_messages m
        left join pgqueue.claims l on l.claim_id = m.claim_id
        cross join lateral unnest(m.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        where m.consumer_id = c.consumer_id
        union all
        select q.seq, 'dead' as state, d.priority, d.deliver_count, null as not_visible_until, d.claim_id, null as lease_until, coalesce(d.note ->> 'error', d.reason)
        from pgqueue.dead_messages d
        cross join lateral unnest(d.seqs) g
        cross join lateral generate_series(lower(g), upper(g) - 1) q (seq)
        where d.consumer_id = c.consumer_id
    ) x
$query$); end $view$;

-- One row per consumer: how it was created, and its settings that are not the default.
do $view$ begin perform pgqueue._make_view('consumer_settings', $query$
    select s.name as stream, c.name as consumer, c.ordering, c.max_deliver_count, c.visibility_timeout, c.created_at, c.paused,
           f.topic, f.condition, pgqueue._settings_of('consumer', to_jsonb(c)) as settings
    from pgqueue.consumers c join pgqueue.streams s using (stream_id) left join pgqueue.consumer_filters f using (consumer_id)
$query$); end $view$;

-- One row per consumer. Sums over runs and publications, never over messages; new by _new_messages.
do $view$ begin perform pgqueue._make_view('consumer_stats', $query$
    select s.name as stream, c.name as consumer, c.ordering, w.new + r.unsifted as new, r.ready, r.delayed, r.waiting, r.claimed,
           (select coalesce(sum(d.message_count), 0)::bigint from pgqueue.dead_messages d where d.consumer_id = c.consumer_id) as dead,
           w.new + r.unsifted + r.ready + r.delayed + r.waiting as backlog,
           l.claims, l.expired, l.next_expiry,
           k.skipped, c.paused, k.taken, k.taken - k.gone - k.skipped - r.in_hand as settled,
           least(pgqueue._oldest_new(c.consumer_id), pgqueue._sent_at(c.stream_id, r.oldest)) as oldest_at, l.oldest_claim_at
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    cross join lateral (select pgqueue._new_messages(c.consumer_id, pgqueue._limit_shown()) as new offset 0) w  -- (once, though it is shown twice)
    cross join lateral (
        select f.taken, f.forgotten as gone, coalesce((select s.message_count from pgqueue.skips s where s.consumer_id = c.consumer_id), 0) as skipped
        from pgqueue._cursor(c.consumer_id) f) k
    cross join lateral (
        select coalesce(sum(message_count), 0)::bigint as in_hand,
               min(first_seq) filter (where message_count > 0 and state in ('unsifted', 'ready', 'delayed') and (not_visible_until > clock_timestamp()) is not true) as oldest,
               coalesce(sum(message_count) filter (where state = 'unsifted'), 0)::bigint as unsifted,
               coalesce(sum(message_count) filter (where state = 'ready' and (not_visible_until > clock_timestamp()) is not true), 0)::bigint as ready,
               coalesce(sum(message_count) filter (where state = 'delayed' or (state in ('ready', 'waiting') and not_visible_until > clock_timestamp())), 0)::bigint as delayed,
               coalesce(sum(message_count) filter (where state = 'waiting' and (not_visible_until > clock_timestamp()) is not true), 0)::bigint as waiting,
               coalesce(sum(message_count) filter (where state = 'claimed'), 0)::bigint as claimed
        from pgqueue.consumer_messages where consumer_id = c.consumer_id) r
    cross join lateral (
        select count(*) as claims, count(*) filter (where lease_until <= clock_timestamp()) as expired, min(lease_until) as next_expiry,
               min(claimed_at) as oldest_claim_at
        from pgqueue.claims where consumer_id = c.consumer_id and live) l
$query$); end $view$;

-- One row per live claim: who has which messages since when, and until when others leave them to him.
do $view$ begin perform pgqueue._make_view('open_claims', $query$
    select s.name as stream, c.name as consumer, l.claim_id, l.owner, r.query_id as query, l.reader, l.claimed_at, l.lease_until,
           l.lease_until <= clock_timestamp() as expired, l.message_count as messages, l.remaining,
           (select min(m.first_seq) from pgqueue.consumer_messages m where m.claim_id = l.claim_id) as first_seq
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    join pgqueue.claims l on l.consumer_id = c.consumer_id and l.live
    left join pgqueue.readers r on r.reader = l.reader
$query$); end $view$;

-- One row per consumer: how it fares, in one word, and why. Unattended: there is something to claim, or a lease ended, and for a minute nobody has claimed.
do $view$ begin perform pgqueue._make_view('consumer_health', $query$
    select s.name as stream, c.name as consumer, h.status,
           case h.status
               when 'full' then format('%s messages are before it, and max_backlog is %s: %s', t.backlog, c.max_backlog,
                                       case c.on_full when 'reject' then 'what is sent is rejected' else 'the oldest are dropped' end)
               when 'paused' then format('it was paused, with %s messages before it', t.backlog)
               when 'unattended' then format('%s can be claimed and %s, and %s', t.new + t.ready,
                                             case t.expired when 0 then 'no lease ended' else format('the leases of %s claims ended', t.expired) end,
                                             coalesce('nobody has claimed since ' || date_trunc('second', a.since), 'nobody has claimed anything yet'))
               when 'failing' then format('%s died in the last hour: %s', d.died, d.reason)
               else format('%s messages are before it, and %s are claimed', t.backlog, t.claimed) end as because,
           t.backlog, c.max_backlog, a.since as attended_at
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    join pgqueue.consumer_stats t on t.stream = s.name and t.consumer = c.name
    cross join lateral (
        -- a claim that finds something looks at the leases each second or so, and notes when to look again
        select case when c.partitions is null then (select nullif(k.lease_probe, '-infinity') - least(interval '1 s', c.visibility_timeout / 2)
                                                    from pgqueue.consumer_cursors k where k.consumer_id = c.consumer_id order by k.version desc limit 1)
                    -- a reader that has noted its offset is counted on for a while: as long as a batch of it may take
                    else greatest((select max(least(w.lease_until, clock_timestamp())) from pgqueue.group_workers w where w.consumer_id = c.consumer_id),
                                  (select max(least(p.committed_at + pgqueue._reader_patience(), clock_timestamp())) from pgqueue._partitions(c) p
                                   where p.line_no = 0 and p.committed_at is not null)) end as since) a
    cross join lateral (
        select coalesce(sum(message_count), 0) as died, (array_agg(reason))[1] as reason
        from (select message_count, reason, died_at from pgqueue.dead_messages where consumer_id = c.consumer_id order by dead_id desc limit 1000) x
        where died_at > clock_timestamp() - interval '1 hour') d
    cross join lateral (
        select case when t.backlog >= c.max_backlog then 'full'
                    when c.paused then 'paused'
                    when t.new + t.ready + t.expired > 0 and t.claims = t.expired
                         and (a.since > clock_timestamp() - interval '1 minute') is not true then 'unattended'
                    when d.died > 0 then 'failing'
                    else 'ok' end as status) h
$query$); end $view$;

-- One row per set of dead letters that died together, of one claim or for one reason. read_dead() has what they hold.
do $view$ begin perform pgqueue._make_view('dead_letters', $query$
    select s.name as stream, c.name as consumer, d.reason, d.note ->> 'error' as error, d.details, d.message_count, lower(d.seqs) as first_seq,
           upper(d.seqs) - 1 as last_seq, d.priority, d.deliver_count, d.owner, d.claim_id, d.died_at
    from pgqueue.dead_messages d join pgqueue.consumers c using (consumer_id) join pgqueue.streams s on s.stream_id = c.stream_id
$query$); end $view$;

-- One row per binding: messages of the stream whose key is of the topic are copied to the other stream.
do $view$ begin perform pgqueue._make_view('stream_bindings', $query$
    select s.name as stream, b.topic, t.name as to_stream, b.bound_at
    from pgqueue.bindings b join pgqueue.streams s using (stream_id) join pgqueue.streams t on t.stream_id = b.to_stream_id
$query$); end $view$;

-- One row per acknowledgement that is kept (keep_history).
do $view$ begin perform pgqueue._make_view('message_history', $query$
    select s.name as stream, c.name as consumer, a.seqs, a.message_count, a.deliver_count, a.result, a.owner, a.claim_id, a.claimed_at, a.done_at
    from pgqueue.archived_messages a join pgqueue.consumers c using (consumer_id) join pgqueue.streams s using (stream_id)
$query$); end $view$;

-- One row per schedule.
do $view$ begin perform pgqueue._make_view('stream_schedules', $query$
    select s.name as stream, h.name as schedule, h.cron, h.every, h.time_zone, case when not h.paused then h.next_at end as next_at, h.paused,
           h.planned_at as last_planned_at, h.sent_at as last_sent_at, h.seq as last_seq, h.last_error,
           h.key, h.data, h.data_bytes, h.headers, h.priority, h.consumers, h.start_at, h.created_at
    from pgqueue.schedules h join pgqueue.streams s using (stream_id)
$query$); end $view$;

-- One row per stream. A retention passes over many numbers, so last_seq is only a bound of what was sent; sent is without those.
do $view$ begin perform pgqueue._make_view('stream_stats', $query$
    select s.name as stream, s.kind, s.created_at,
           (select count(*) from pgqueue.consumers c where c.stream_id = s.stream_id) as consumers,
           pgqueue.last_publication(s.stream_id) as last_publication,
           (select coalesce(sum(greatest(t.reltuples, 0)), 0)::bigint
            from pgqueue._message_tables(s.stream_id) x join pg_catalog.pg_class t on t.oid = x.name) as messages,
           (select sum(x.bytes)::bigint from pgqueue._message_tables(s.stream_id) x) as bytes,
           (select count(*) from pgqueue.staged_writes w where w.stream_id = s.stream_id) as staged_blocks,
            pgqueue._last_seq(s.stream_id) as last_seq, pgqueue._settings_of('stream', to_jsonb(s)) as settings,
            pgqueue._last_seq(s.stream_id) - s.passed_over as sent
    from pgqueue.streams s
$query$); end $view$;

-- One row per partition of a group: who has it, and how far behind it is, with what is new, of which up to 3,000 publications are counted.
do $view$ begin perform pgqueue._make_view('group_stats', $query$
    select s.name as stream, c.name as "group", p.partition, p.worker, w.lease_until, p.committed_at, array[p.line_no, p.seq] as committed,
           pgqueue._behind(c.consumer_id, p.line_no, p.seq) + n.new as behind
    from pgqueue.consumers c
    join pgqueue.streams s using (stream_id)
    cross join lateral (select pgqueue._new_messages(c.consumer_id, pgqueue._limit_shown()) as new) n
    cross join lateral pgqueue._partitions(c) p
    left join pgqueue.group_workers w on w.consumer_id = c.consumer_id and w.worker = p.worker
    where c.partitions is not null
$query$); end $view$;

-- One row per table that is captured.
do $view$ begin perform pgqueue._make_view('captures', $query$
    select s.name as stream, format('%I.%I', n.nspname, c.relname) as "table", pg_get_userbyid(c.relowner)::text as owner,
           obj_description(t.oid, 'pg_trigger') as options,
           not exists (select from pg_catalog.pg_trigger d where d.tgrelid = t.tgrelid and d.tgname = format('pgqueue_%s_delete', s.stream_id)) as outbox,
           (select count(*) from pg_partition_tree(c.oid) r join pg_catalog.pg_class p on p.oid = r.relid and p.relkind in ('r', 'p')
            where r.level > 0 and not exists (select from pg_catalog.pg_trigger x where x.tgrelid = r.relid and x.tgname = t.tgname)) as uncaptured_partitions
    from pgqueue.streams s
    join pg_catalog.pg_trigger t on t.tgname = format('pgqueue_%s_insert', s.stream_id) and t.tgnargs = 0
    join pg_catalog.pg_class c on c.oid = t.tgrelid
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
$query$); end $view$;
