-- From version 1: words that explain themselves, gaps in a table of their own, claims with random ids.
--
-- A migration runs once, after the tables that did not exist were created, and only where an older version is installed. It drops the views
-- and functions, which are all made anew afterwards; what was granted on them to others has to be granted again, and where something of
-- others depends on them it fails, and nothing is changed.

do $$
declare
    v_object text;
    v_column text[];
    v_staged record;
    v_until  timestamptz := clock_timestamp() + interval '30 s';
begin
    if (select max(version) from pgqueue.installed) is distinct from 1 then
        return;
    end if;
    -- Everybody who is at work finishes first. So no producer is left that published without the publish lock.
    -- Who waits here with some of the locks keeps others waiting, who may have the next one. So it waits for moments only,
    -- shorter all together than the second after which Postgres looks for deadlocks, and lets them pass in between.
    loop
        begin
            set local lock_timeout = '40ms';
            lock table pgqueue.messages, pgqueue.publications, pgqueue.streams, pgqueue.consumers, pgqueue.consumer_messages, pgqueue.claims,
                       pgqueue.consumer_cursors, pgqueue.dead_messages, pgqueue.staged_writes, pgqueue.sink_batches, pgqueue.readers,
                       pgqueue.message_states, pgqueue.consumer_stats, pgqueue.stream_stats in access exclusive mode;
            set local lock_timeout = '500ms';
            exit;
        exception when lock_not_available then
            if clock_timestamp() > v_until then
                raise exception 'the schema pgqueue is in use: for 30 s there was always a transaction at work with its tables'
                    using errcode = 'lock_not_available', hint = 'Stop workers and queries, or end transactions that are idle, and install again. Nothing was changed.';
            end if;
            perform pg_sleep(0.1);
        end;
    end loop;
    drop view if exists pgqueue.message_states, pgqueue.consumer_stats, pgqueue.stream_stats;
    for v_object in select oid::regprocedure::text from pg_proc where pronamespace = 'pgqueue'::regnamespace loop
        execute 'drop function ' || v_object;
    end loop;
    alter table pgqueue.consumer_messages drop constraint if exists consumer_messages_state_check;

    foreach v_column slice 1 in array array[
        ['publications', 'n', 'message_count'], ['claims', 'n', 'message_count'], ['dead_messages', 'n', 'message_count'],
        ['staged_writes', 'n', 'message_count'], ['sink_batches', 'n', 'message_count'],
        ['consumer_messages', 'n', 'message_count'], ['consumer_messages', 'rank', 'lane'],
        ['consumer_messages', 'position', 'arrival_no'], ['consumer_messages', 'turn', 'line_no'],
        ['consumer_cursors', 'turn', 'last_line_no'], ['consumer_cursors', 'more', 'take_was_cut'], ['consumer_cursors', 'due_floor', 'due_from']]
    loop
        execute format('alter table pgqueue.%I rename column %I to %I', v_column[1], v_column[2], v_column[3]);
    end loop;

    -- ordered consumers: what is claimed is a piece with all keys, and all else is in the line, at its place
    drop index pgqueue.consumer_messages_aside, pgqueue.consumer_messages_busy;
    drop index if exists pgqueue.claims_ordered;
    alter table pgqueue.consumer_messages drop column key, add column key bigint, add column piece bigint, add column note jsonb;
    update pgqueue.consumer_messages set note = jsonb_build_object('error', last_error) where last_error is not null;
    alter table pgqueue.consumer_messages drop column last_error;
    alter table pgqueue.claims add column owner text, add column archive boolean not null default false;
    alter table pgqueue.dead_messages add column note jsonb, add column owner text;
    update pgqueue.dead_messages set reason = 'rejected' where reason is null;
    update pgqueue.consumer_messages m
    set lane = 1, line_no = arrival_no, state = case when m.state = 'claimed' then 'claimed' else 'ready' end,
        piece = case when m.state = 'claimed' then (select last_line_no from pgqueue.consumer_cursors k where k.consumer_id = m.consumer_id) + 1 end
    from pgqueue.consumers c
    where c.consumer_id = m.consumer_id and c.ordering <> 'none';
    insert into pgqueue.pieces (consumer_id, place, piece, message_count)
    select consumer_id, piece, piece, sum(message_count) from pgqueue.consumer_messages where piece is not null group by consumer_id, piece;

    -- what is missing below the end of what was taken is a gap, to be looked into once
    alter table pgqueue.consumer_cursors
        add column next_publication bigint,
        add column gaps bigint[] not null default '{}',
        add column scan_from pgqueue.line_place[] not null default '{}',
        add column scan_lanes_from int,
        add column leases_from timestamptz not null default '-infinity',
        add column gaps_probe timestamptz not null default '-infinity',
        add column sift_from bigint,
        add column delivered int[], add column delivered_at timestamptz[],
        add column pieces_from bigint not null default 0,
        add column dealt_until timestamptz not null default '-infinity',
        add column taken bigint not null default 0,
        add column forgotten bigint not null default 0;
    update pgqueue.consumer_cursors
    set next_publication = coalesce(upper(seen), 1),
        gaps = case when int8multirange(int8range(1, coalesce(upper(seen), 1))) <> seen then array[nextval('pgqueue.gap_numbers')] else '{}' end,
        scan_from = case when ordering = 'none' then array(select (rank, turn, first_seq)::pgqueue.line_place from unnest(floors))
                         else array[(1, 0, 0)::pgqueue.line_place] end,
        last_line_no = last_line_no + 1,
        taken = (select coalesce(sum(message_count), 0) from pgqueue.consumer_messages m where m.consumer_id = c.consumer_id)
              + (select coalesce(sum(message_count), 0) from pgqueue.dead_messages d where d.consumer_id = c.consumer_id)
    from pgqueue.consumers c
    where c.consumer_id = consumer_cursors.consumer_id;
    insert into pgqueue.consumer_gaps (consumer_id, gap_no, publication_ids, range_count, publishers, look)
    select consumer_id, gaps[1], g.ids, (select count(*) from unnest(g.ids)), '{}', true
    from pgqueue.consumer_cursors cross join lateral (select int8multirange(int8range(1, next_publication)) - seen as ids) g
    where gaps <> '{}';
    alter table pgqueue.consumer_cursors
        alter column next_publication set not null,
        drop column seen, drop column watched, drop column watched_below, drop column parked, drop column parked_below, drop column parked_probe,
        drop column floors, drop column first_claim, drop column aside, drop column mixed_claim, drop column heads_first,
        drop column open_claims;
    drop type pgqueue.floor;

    alter table pgqueue.consumers
        add column backoff text not null default 'constant',
        add column backoff_base interval,
        add column backoff_cap interval not null default '1 hour',
        add column backoff_jitter float8 not null default 0,
        add column keep_history interval,
        add column notify_done boolean not null default false,
        add column paused boolean not null default false,
        add column filtered boolean not null default false,
        add column max_backlog bigint, add column on_full text not null default 'reject',
        add column per_key_capacity int,
        add column per_key_limit int, add column per_key_interval interval, add column per_key_burst int not null default 1,
        add column max_in_flight int, add column rate_limit int, add column rate_interval interval,
        add column fair boolean not null default false, add column ageing interval;
    alter table pgqueue.consumers
        add column by_key boolean generated always as (ordering <> 'none' or per_key_limit is not null or per_key_interval is not null or fair) stored,
        add column throttled boolean generated always as (max_in_flight is not null or rate_limit is not null) stored,
        add column limits_keys boolean generated always as (per_key_limit is not null or per_key_interval is not null or fair) stored;

    -- ids of claims go on above the old ones
    perform setval('pgqueue.claim_numbers', (pg_sequence_last_value('pgqueue.claims_claim_id_seq') >> 24) + 1);
    alter table pgqueue.claims
        alter column claim_id drop identity,
        add column arrival_nos int8multirange,
        add column lanes int[],
        add column acted pgqueue.acted_run[];
    update pgqueue.claims c
    set arrival_nos = m.arrival_nos, lanes = m.lanes
    from (select claim_id, range_agg(int8range(arrival_no, arrival_no, '[]')) as arrival_nos, array_agg(distinct lane) as lanes
          from pgqueue.consumer_messages where state = 'claimed' group by claim_id) m
    where m.claim_id = c.claim_id and c.reader is not null;

    -- limits of the messages of a stream; what writers write is checked when they stage it, not by the table
    alter table pgqueue.streams add column max_bytes int, add column max_header_bytes int, add column bound boolean not null default false,
        add column dedup_window interval,
        add column passed_over bigint not null default 0,
        add column limited boolean not null default false,
        add column keys_limited boolean not null default false;
    update pgqueue.streams set max_bytes = 16777216, max_header_bytes = 65536;
    alter table pgqueue.streams alter column max_bytes set not null, alter column max_header_bytes set not null;
    alter table pgqueue.consumers add column partitions int, add column scheduled boolean not null default false;
    alter table pgqueue.consumers
        add column special boolean generated always as (partitions is not null or paused or scheduled or max_backlog is not null
                                                        or per_key_interval is not null or max_in_flight is not null or rate_limit is not null
                                                        or ordering = 'stream') stored,
        add column archives boolean generated always as (keep_history is not null or notify_done or per_key_capacity is not null) stored;
    alter table pgqueue.publications add column expires_at timestamptz;
    alter table pgqueue.streams add column incarnation uuid not null default gen_random_uuid();
    for v_object in
        select format('alter table %s drop constraint %I', c.conrelid::regclass, c.conname) from pg_constraint c
        where c.contype = 'c' and c.conrelid in (select inhrelid from pg_inherits where inhparent = 'pgqueue.messages'::regclass)
    loop
        execute v_object;
    end loop;

    -- what was staged has a reservation of what is not published of it
    alter table pgqueue.staged_writes add column reservation_id bigint, add column dedup_keys text[], add column consumers int[],
        add column expires_at timestamptz, add column routed boolean not null default false;
    for v_staged in select * from pgqueue.staged_writes order by staged_id loop
        insert into pgqueue.reservations (stream_id, xid, seqs, reserved_at)
        values (v_staged.stream_id, '0',
                v_staged.seqs - coalesce((select range_agg(g) from pgqueue.publications p cross join lateral unnest(p.seqs) g
                                          where p.stream_id = v_staged.stream_id and p.seqs && v_staged.seqs), '{}')
                              - coalesce((select range_agg(g) from pgqueue.reservations r cross join lateral unnest(r.seqs) g
                                          where r.stream_id = v_staged.stream_id and r.seqs && v_staged.seqs), '{}'),
                v_staged.staged_at)
        returning reservation_id into v_staged.reservation_id;
        update pgqueue.staged_writes set reservation_id = v_staged.reservation_id where staged_id = v_staged.staged_id;
    end loop;
    alter table pgqueue.staged_writes alter column reservation_id set not null;
    alter table pgqueue.readers
        add column used_at timestamptz not null default clock_timestamp(),
        add column planned_by uuid,
        add column planned_to bigint not null default 0,
        add column begun int not null default 0,
        add column begun_at timestamptz;
end $$;
