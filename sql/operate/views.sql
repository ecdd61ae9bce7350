-- The views, for people and dashboards. view_comments.sql describes their columns.

-- Creates a view, or replaces one that has changed. A view that is up to date is not replaced, because that waits for
-- all transactions that use it, and others queue behind it. A repeated installation must not do that.
create or replace function _pgqueue.make_view(p_name text, p_query text) returns void
language plpgsql as $$
declare
    v_view regclass := to_regclass('pgqueue.' || p_name);
    v_same boolean := false;
begin
    if v_view is not null then
        execute 'create view _pgqueue.new_view as ' || p_query;
        v_same := pg_get_viewdef('_pgqueue.new_view'::regclass) = pg_get_viewdef(v_view);
        drop view _pgqueue.new_view;
    end if;
    if not v_same then
        execute format('create or replace view pgqueue.%I as %s', p_name, p_query);
    end if;
end $$;

-- The unfinished messages of a consumer, for views, with their state as shown. (A function that a view calls has its
-- own settings, so it is never inlined.)
create or replace function _pgqueue.view_unfinished(p_consumer_id int)
returns table (seqs int8multirange, state text, priority int, deliver_count int, not_visible_until timestamptz,
               claim_id bigint, lease_until timestamptz, error text)
language sql stable rows 10 as $$
    select seqs, _pgqueue.shown_state(state, not_visible_until), priority, deliver_count, not_visible_until, claim_id,
           lease_until, note ->> 'error'
    from _pgqueue.unfinished(p_consumer_id)
$$;

-- The dead letters of a consumer, for views.
create or replace function _pgqueue.view_dead(p_consumer_id int) returns setof pgqueue.dead_messages
language sql stable rows 10 as $$ select * from pgqueue.dead_messages where consumer_id = p_consumer_id $$;

-- Each number of a set, for views. It is strict, so that it is not inlined either: the planner would estimate 100,000
-- numbers for each set, and compile the query (JIT), which takes a second.
create or replace function _pgqueue.view_seqs(p_seqs int8multirange) returns setof bigint
language sql immutable strict parallel safe rows 10 as $$
    select generate_series(lower(g), upper(g) - 1) from unnest(p_seqs) g
$$;

-- The number of unfinished messages of a consumer, by state; the first one that could be delivered now; how many were
-- delivered ten times or more; and the number of dead letters.
create or replace function _pgqueue.count_taken(p_consumer_id int, out oldest bigint, out unfiltered bigint,
                                                out ready bigint, out delayed bigint, out waiting bigint,
                                                out claimed bigint, out often bigint, out dead bigint)
language sql stable as $$
    select min(first_seq) filter (where state in ('unfiltered', 'ready', 'delayed') and not later),
           coalesce(sum(message_count) filter (where state = 'unfiltered'), 0),
           coalesce(sum(message_count) filter (where state = 'ready'), 0),
           coalesce(sum(message_count) filter (where state = 'delayed'), 0),
           coalesce(sum(message_count) filter (where state = 'waiting'), 0),
           coalesce(sum(message_count) filter (where state = 'claimed'), 0),
           coalesce(sum(message_count) filter (where deliver_count >= 10), 0),
           (select coalesce(sum(message_count), 0) from pgqueue.dead_messages where consumer_id = p_consumer_id)
    from (select message_count, first_seq, deliver_count, _pgqueue.shown_state(state, not_visible_until) as state,
                 not_visible_until > clock_timestamp() is true as later
          from _pgqueue.unfinished(p_consumer_id)) m
$$;

-- The last error of the message of a consumer that was delivered most often.
create or replace function _pgqueue.error_of_most(p_consumer_id int) returns text
language sql stable as $$
    select m.note ->> 'error' from _pgqueue.unfinished(p_consumer_id) m order by m.deliver_count desc limit 1
$$;

-- The number of live claims of a consumer, how many of their leases have ended, when the first lease ends, and when the
-- oldest claim was made. A claim is stuck if its owner has extended it beyond ten visibility timeouts: the owner is
-- alive, and no other worker gets the messages. (Claims of Spark do not count: a batch may take longer.)
create or replace function _pgqueue.count_claims(p_consumer_id int, out claims bigint, out expired bigint,
                                                 out next_expiry timestamptz, out oldest_claim_at timestamptz,
                                                 out stuck bigint, out stuck_since timestamptz, out stuck_owner text)
language sql stable as $$
    select count(*), count(*) filter (where x.lease_until <= clock_timestamp()), min(x.lease_until), min(x.claimed_at),
           count(*) filter (where s.stuck), min(x.claimed_at) filter (where s.stuck),
           (array_agg(x.owner order by x.claimed_at) filter (where s.stuck))[1]
    from _pgqueue.live_claims(p_consumer_id) x
    cross join lateral (
        select x.reader is null and x.lease_until > clock_timestamp()
               and extract(epoch from clock_timestamp() - x.claimed_at)
                   > 10 * extract(epoch from x.visibility_timeout) as stuck) s
$$;

-- One row per message and consumer that has not finished it. It expands every set that the query's conditions do not
-- exclude.
do $view$ begin perform _pgqueue.make_view('message_states', $query$
    select c.stream_name as stream, c.name as consumer, x.seq, x.state, x.priority, x.deliver_count,
           x.not_visible_until, x.claim_id, x.lease_until, x.last_error
    from pgqueue.consumers c
    cross join lateral (
        select q.seq, 'new' as state, p.priority, 0 as deliver_count, p.deliver_at as not_visible_until,
               null::bigint as claim_id, null::timestamptz as lease_until, null::text as last_error
        from _pgqueue.cursor(c.consumer_id) k
        join pgqueue.publications p on p.stream_id = c.stream_id
          and (p.publication_id >= k.next_publication or _pgqueue.gap_ids(k) @> p.publication_id)
          and not exists (select from pgqueue.taken_ahead a
                          where a.consumer_id = c.consumer_id and a.publication_id = p.publication_id)
          and (p.consumers is null or c.consumer_id = any (p.consumers))
        cross join lateral _pgqueue.view_seqs(p.seqs - coalesce(_pgqueue.excluded(k), '{}')) q (seq)
        union all
        select q.seq, m.state, m.priority, m.deliver_count, m.not_visible_until, m.claim_id, m.lease_until, m.error
        from _pgqueue.view_unfinished(c.consumer_id) m
        cross join lateral _pgqueue.view_seqs(m.seqs) q (seq)
        union all
        select q.seq, 'dead' as state, d.priority, d.deliver_count, null as not_visible_until, d.claim_id,
               null as lease_until, coalesce(d.note ->> 'error', d.reason)
        from _pgqueue.view_dead(c.consumer_id) d
        cross join lateral _pgqueue.view_seqs(d.seqs) q (seq)
    ) x
$query$); end $view$;

-- One row per consumer: how it was created, and its settings: the given ones, and those with their defaults. A group
-- has none.
do $view$ begin perform _pgqueue.make_view('consumer_settings', $query$
    select c.stream_name as stream, c.name as consumer, c.ordering, c.max_deliver_count, c.visibility_timeout,
           c.created_at, c.paused, f.topic, f.condition, s.o_given as settings,
           case when c.partitions is null then s.o_defaults else '{}' end as defaults
    from pgqueue.consumers c left join pgqueue.consumer_filters f using (consumer_id)
    cross join lateral _pgqueue.settings_of('consumer', to_jsonb(c)) s
$query$); end $view$;

-- One row per consumer. It sums over bundles and publications, never over messages; estimate_new() returns the new
-- ones. All programs that show the status of a consumer use this column. The order of the words is their precedence:
-- first what blocks producers or workers, last what may wait.
do $view$ begin perform _pgqueue.make_view('consumer_stats', $query$
    select c.stream_name as stream, c.name as consumer, c.ordering, t.new, r.ready,
           r.delayed, r.waiting, r.claimed, r.dead, t.backlog,
           l.claims, l.expired, l.next_expiry,
           k.skipped, c.paused, k.taken,
           k.taken - k.gone - k.skipped - (r.unfiltered + r.ready + r.delayed + r.waiting + r.claimed) as settled,
           t.oldest_at, l.oldest_claim_at, w.o_estimated as estimated,
           l.stuck, h.status,
           case h.status
               when 'full' then format('%s waiting, and max_backlog is %s: %s', b.messages, c.max_backlog,
                                       case c.on_full when 'reject' then 'sends are rejected'
                                            else 'the oldest are dropped' end)
               when 'paused' then format('paused, with %s waiting', b.messages)
               when 'unattended' then format('%s%s, %s, %s', b.about,
                                             case when t.new + r.ready = 0 and t.oldest_at is not null
                                                  then 'delayed messages are due'
                                                  else t.new + r.ready || ' new or ready' end,
                                             case l.expired when 0 then 'no expired claims'
                                                  else format('expired claims: %s', l.expired) end,
                                             coalesce('last claim at ' || date_trunc('second', a.since),
                                                      'no claim yet'))
                   || coalesce('; ' || _pgqueue.locked_by(c.consumer_id), '')
               when 'failing' then
                   case when d.died > 0 then format('%s dead-lettered in the last hour, the last: %s', d.died, d.reason)
                        else format('%s delivered ten times or more: %s',
                                    r.often, coalesce(_pgqueue.error_of_most(c.consumer_id), 'no reason given')) end
               when 'dead_letters' then format('%s dead letter%s, none from the last hour', r.dead,
                                               case r.dead when 1 then '' else 's' end)
               when 'ok' then format('backlog %s, %s claimed', b.said, r.claimed)
               else '' end
           || case when l.stuck = 0 then ''
                   else format('%sclaims extended beyond ten visibility timeouts: %s, the first by %s since %s',
                               case h.status when 'stuck' then '' else '; ' end, l.stuck,
                               coalesce(nullif(l.stuck_owner, ''), 'a worker'), date_trunc('second', l.stuck_since))
              end as because,
           c.max_backlog, a.since as attended_at
    from pgqueue.consumers c
    cross join lateral _pgqueue.estimate_new(c.consumer_id) w
    cross join lateral (
        select f.taken + coalesce((select sum(a.message_count) from pgqueue.taken_ahead a
                                   where a.consumer_id = c.consumer_id
                                     and a.publication_id >= f.next_publication), 0)::bigint as taken,
               f.forgotten as gone,
               coalesce((select s.message_count from pgqueue.skips s where s.consumer_id = c.consumer_id), 0) as skipped
        from _pgqueue.cursor(c.consumer_id) f) k
    cross join lateral _pgqueue.count_taken(c.consumer_id) r
    cross join lateral _pgqueue.count_claims(c.consumer_id) l
    cross join lateral (
        select n.new, n.new + r.ready + r.delayed + r.waiting as backlog,
               least(_pgqueue.oldest_new(c.consumer_id), _pgqueue.sent_at(c.stream_id, r.oldest)) as oldest_at
        from (select w.o_count + r.unfiltered as new) n offset 0) t    -- offset 0: computed once, not at each use
    cross join lateral (select a.about, a.about || t.backlog as said,
                               format('%s%s message%s', a.about, t.backlog, case t.backlog when 1 then '' else 's' end)
                                   as messages
                        from (select case when w.o_estimated then '~' else '' end as about) a) b
    cross join lateral (
        -- claims that find messages check leases about once a second, and record when to check next
        select case when c.partitions is null
                    then (select nullif((k.hints).probe_at, '-infinity')
                                 - least(interval '1 s', c.visibility_timeout / 2)
                          from pgqueue.consumer_cursors k where k.consumer_id = c.consumer_id
                          order by k.version desc limit 1)
                    -- a reader that has recorded its offset counts as present for as long as a batch may take
                    else greatest((select max(least(w.lease_until, clock_timestamp())) from pgqueue.group_workers w
                                   where w.consumer_id = c.consumer_id),
                                  (select max(least(p.committed_at + _pgqueue.reader_patience(), clock_timestamp()))
                                   from _pgqueue.partitions(c) p
                                   where p.arrival_no = 0 and p.committed_at is not null)) end as since offset 0) a
    cross join lateral (
        select coalesce(sum(message_count), 0) as died, (array_agg(reason))[1] as reason
        from (select message_count, reason, died_at from pgqueue.dead_messages
              where consumer_id = c.consumer_id and r.dead > 0
              order by dead_id desc limit 1000) x
        where died_at > clock_timestamp() - interval '1 hour') d
    cross join lateral (
        select case when case when c.max_backlog is null then false  -- all publications would be counted
                              when w.o_estimated
                              then _pgqueue.backlog_of(c.consumer_id, c.max_backlog) >= c.max_backlog
                              else t.backlog >= c.max_backlog end then 'full'
                    when c.paused then 'paused'
                    -- oldest_at excludes delayed messages
                    when (t.oldest_at is not null or r.ready + l.expired > 0) and l.claims = l.expired
                         and (a.since > clock_timestamp() - interval '1 minute') is not true
                         -- claims that may have nothing check no leases
                         and (c.rate_limit is null
                              or _pgqueue.left_in_rate(c, _pgqueue.cursor(c.consumer_id)) > 0) then 'unattended'
                    when l.stuck > 0 then 'stuck'
                    when d.died > 0 or r.often > 0 then 'failing'  -- long before it is a dead letter
                    when r.dead > 0 then 'dead_letters'
                    else 'ok' end as status offset 0) h
$query$); end $view$;

-- One row per live claim: its owner, its messages, its age and its lease.
do $view$ begin perform _pgqueue.make_view('open_claims', $query$
    select c.stream_name as stream, c.name as consumer, l.claim_id, l.owner, r.query_id as query, l.reader,
           l.claimed_at, l.lease_until, l.lease_until <= clock_timestamp() as expired, l.message_count as messages,
           l.remaining, l.first_seq
    from pgqueue.consumers c
    cross join lateral _pgqueue.shown_claims(c.consumer_id) l
    left join pgqueue.readers r on r.reader = l.reader
$query$); end $view$;

-- One row per consumer: its status in one word, and the reason, as in consumer_stats.
do $view$ begin perform _pgqueue.make_view('consumer_health', $query$
    select stream, consumer, status, because, backlog, max_backlog, attended_at, estimated from pgqueue.consumer_stats
$query$); end $view$;

-- One row per set of messages that were dead-lettered together, in one claim or for one reason. read_dead() returns
-- their payloads.
do $view$ begin perform _pgqueue.make_view('dead_letters', $query$
    select c.stream_name as stream, c.name as consumer, d.reason, d.note ->> 'error' as error, d.details,
           d.message_count, lower(d.seqs) as first_seq, upper(d.seqs) - 1 as last_seq, d.priority, d.deliver_count,
           d.owner, d.claim_id, d.died_at
    from pgqueue.consumers c cross join lateral _pgqueue.view_dead(c.consumer_id) d
$query$); end $view$;

-- One row per binding: messages of the stream whose key matches the topic are copied to the other stream.
do $view$ begin perform _pgqueue.make_view('stream_bindings', $query$
    select s.name as stream, b.topic, t.name as to_stream, b.bound_at
    from pgqueue.bindings b join pgqueue.streams s using (stream_id)
    join pgqueue.streams t on t.stream_id = b.to_stream_id
$query$); end $view$;

-- One row per recorded acknowledgement (keep_history).
do $view$ begin perform _pgqueue.make_view('message_history', $query$
    select c.stream_name as stream, c.name as consumer, a.seqs, a.message_count, a.deliver_count, a.result, a.owner,
           a.claim_id, a.claimed_at, a.done_at
    from pgqueue.completed_messages a join pgqueue.consumers c using (consumer_id)
$query$); end $view$;

-- How many messages were sent to a stream. Retention skips many numbers: last_seq is only an upper bound, and this
-- count excludes them. It is null for a moment, while others cannot see yet how many maintain() skips.
create or replace function _pgqueue.sent(p_stream pgqueue.streams) returns bigint
language sql stable as $$
    select l.last_seq - p_stream.unused_seqs
    from _pgqueue.last_seq(p_stream.stream_id) l (last_seq)
    where not exists (select from pgqueue.segments x
                      where x.stream_id = p_stream.stream_id and x.closed_at is null and x.hi <= l.last_seq + 1)
$$;

-- An estimate of the stored messages of a stream, from the planner; before it has statistics of a table: the sent
-- messages without the trimmed ones.
create or replace function _pgqueue.estimate_stored(p_stream pgqueue.streams) returns bigint
language sql stable as $$
    select coalesce(case when bool_or(t.reltuples < 0)
                         then _pgqueue.sent(p_stream)
                              - coalesce((select r.message_count from pgqueue.trims r
                                          where r.stream_id = p_stream.stream_id), 0) end,
                    sum(greatest(t.reltuples, 0)), 0)::bigint
    from _pgqueue.message_tables(p_stream.stream_id) x
    cross join lateral (select reltuples from pg_class where oid = x.name offset 0) t  -- never a scan of pg_class
    where pg_relation_size(x.name) > 0
$$;

-- One row per stream. The sequence of a stream stays locked until the transaction ends, so a query of other columns
-- does not read it: all functions here are stable, and Postgres calls those of the chosen columns.
do $view$ begin perform _pgqueue.make_view('stream_stats', $query$
    select s.name as stream, s.kind, s.created_at,
           (select count(*) from pgqueue.consumers c where c.stream_id = s.stream_id) as consumers,
           pgqueue.last_publication(s.stream_id) as last_publication,
           _pgqueue.estimate_stored(s) as messages,
           (select sum(x.bytes)::bigint from _pgqueue.message_tables(s.stream_id) x) as bytes,
           (select count(*) from pgqueue.staged_chunks w where w.stream_id = s.stream_id) as staged_chunks,
           _pgqueue.last_seq(s.stream_id) as last_seq, g.o_given as settings, g.o_defaults as defaults,
           _pgqueue.sent(s) as sent
    from pgqueue.streams s
    cross join lateral _pgqueue.settings_of('stream', to_jsonb(s)) g
$query$); end $view$;

-- One row per stream: how long its messages are kept, their size, what was trimmed, and which due messages are kept,
-- and why.
do $view$ begin perform _pgqueue.make_view('stream_retention', $query$
    select s.name as stream, r.keep_for, r.keep_messages, r.keep_bytes, coalesce(r.until_done, false) as until_done,
           coalesce(r.unread, 'keep') as unread, r.keep_dead, t.bytes, t.tables,
           (select p.published_at from pgqueue.publications p where p.stream_id = s.stream_id
            order by p.publication_id limit 1) as oldest_at,
           coalesce(m.message_count, 0) as trimmed, m.trimmed_at, l.bytes as held_bytes, l.by as held_by,
           r.maintained_at,
           case when r.stream_id is null and t.bytes >= _pgqueue.large_stream()
                then 'its messages are never deleted: see set_retention'
                when r.maintained_at < clock_timestamp() - interval '1 day'
                then 'maintain() has not run for a day: nothing is trimmed'
                when r.stream_id is not null and r.maintained_at is null
                then 'maintain() has not run yet: nothing is trimmed'
                when h.transaction is not null then 'nothing is trimmed until this transaction ends: ' || h.transaction
                when (select k.sent_at from pgqueue.dedup_keys k where k.stream_id = s.stream_id
                      order by k.sent_at limit 1)
                     < clock_timestamp() - coalesce(s.dedup_window, '0') - interval '1 day'
                then 'maintain() has not run for a day: old dedup keys are kept'
                -- readers by offset leave no row
                when r.stream_id is null
                     and not exists (select from pgqueue.consumers c where c.stream_id = s.stream_id)
                     and not exists (select from pgqueue.bindings b where b.stream_id = s.stream_id)
                     and exists (select from pgqueue.publications p where p.stream_id = s.stream_id)
                then 'no consumer receives its messages: see create_consumer; if read by offset, see set_retention'
           end as advice
    from pgqueue.streams s
    left join pgqueue.retention r using (stream_id)
    left join pgqueue.trims m using (stream_id)
    cross join lateral (select sum(x.bytes)::bigint as bytes, count(*) as tables
                        from _pgqueue.message_tables(s.stream_id) x) t
    cross join lateral (
        select coalesce(sum(pg_total_relation_size(
                            to_regclass(format('pgqueue.%I', _pgqueue.segment_name(h.stream_id, h.segment))))),
                        0)::bigint as bytes,
               array(select distinct b from pgqueue.segments x cross join unnest(x.held_by) b
                     where x.stream_id = s.stream_id order by b) as by
        from pgqueue.segments h where h.stream_id = s.stream_id and h.held_by <> '{}') l
    cross join lateral (select min(b) as transaction from unnest(l.by) b  -- see history_holders()
                        where b ~ E'^(open|prepared) transaction\\M') h
$query$); end $view$;

-- One row per partition of a group: its worker, and its lag, including new messages.
do $view$ begin perform _pgqueue.make_view('group_stats', $query$
    select c.stream_name as stream, c.name as "group", p.partition, p.worker, w.lease_until, p.committed_at,
           array[p.arrival_no, p.seq] as committed,
           _pgqueue.group_lag(c.consumer_id, p.arrival_no, p.seq) + n.o_count as behind, n.o_estimated as estimated
    from pgqueue.consumers c
    cross join lateral _pgqueue.estimate_new(c.consumer_id) n
    cross join lateral _pgqueue.partitions(c) p
    left join pgqueue.group_workers w on w.consumer_id = c.consumer_id and w.worker = p.worker
    where c.partitions is not null
$query$); end $view$;
