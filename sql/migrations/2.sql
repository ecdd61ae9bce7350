-- From version 1: words that explain themselves, gaps in a table of their own, claims with random ids.
--
-- A migration runs once, after the tables that did not exist were created, and only where an older version is installed. It drops the views
-- and functions, which are all made anew afterwards; what was granted on them to others has to be granted again.

do $$
declare
    v_object text;
    v_column text[];
begin
    if (select max(version) from pgqueue.installed) is distinct from 1 then
        return;
    end if;
    -- Everybody who is at work finishes first. So no producer is left that published without the publish lock.
    lock table pgqueue.messages, pgqueue.publications, pgqueue.consumers, pgqueue.consumer_messages, pgqueue.claims, pgqueue.consumer_cursors,
               pgqueue.dead_messages, pgqueue.staged_writes, pgqueue.sink_batches, pgqueue.readers in access exclusive mode;
    drop view if exists pgqueue.message_states, pgqueue.consumer_stats, pgqueue.stream_stats;
    for v_object in select oid::regprocedure::text from pg_proc where pronamespace = 'pgqueue'::regnamespace loop
        execute 'drop function ' || v_object || ' cascade';
    end loop;
    alter table pgqueue.consumer_messages drop constraint if exists consumer_messages_state_check;

    foreach v_column slice 1 in array array[
        ['publications', 'n', 'message_count'], ['claims', 'n', 'message_count'], ['dead_messages', 'n', 'message_count'],
        ['staged_writes', 'n', 'message_count'], ['sink_batches', 'n', 'message_count'],
        ['consumer_messages', 'n', 'message_count'], ['consumer_messages', 'rank', 'lane'],
        ['consumer_messages', 'position', 'arrival_no'], ['consumer_messages', 'turn', 'line_no'],
        ['consumer_cursors', 'turn', 'last_line_no'], ['consumer_cursors', 'more', 'take_was_cut'], ['consumer_cursors', 'due_floor', 'due_from'],
        ['consumer_cursors', 'first_claim', 'busy_from'], ['consumer_cursors', 'aside', 'blocked'],
        ['consumer_cursors', 'mixed_claim', 'unsplit_claim'], ['consumer_cursors', 'heads_first', 'unblocked_first']]
    loop
        execute format('alter table pgqueue.%I rename column %I to %I', v_column[1], v_column[2], v_column[3]);
    end loop;
    alter index pgqueue.consumer_messages_aside rename to consumer_messages_blocked;

    -- what is missing below the end of what was taken is a gap, to be looked into once
    alter table pgqueue.consumer_cursors
        add column next_publication bigint,
        add column gaps bigint[] not null default '{}',
        add column scan_from pgqueue.line_place[] not null default '{}',
        add column scan_lanes_from int,
        add column leases_from timestamptz not null default '-infinity';
    update pgqueue.consumer_cursors
    set next_publication = coalesce(upper(seen), 1),
        gaps = case when int8multirange(int8range(1, coalesce(upper(seen), 1))) <> seen then array[nextval('pgqueue.gap_numbers')] else '{}' end,
        scan_from = array(select (rank, turn, first_seq)::pgqueue.line_place from unnest(floors));
    insert into pgqueue.consumer_gaps (consumer_id, gap_no, publication_ids, range_count, publishers, look)
    select consumer_id, gaps[1], g.ids, (select count(*) from unnest(g.ids)), '{}', true
    from pgqueue.consumer_cursors cross join lateral (select int8multirange(int8range(1, next_publication)) - seen as ids) g
    where gaps <> '{}';
    alter table pgqueue.consumer_cursors
        alter column next_publication set not null,
        drop column seen, drop column watched, drop column watched_below, drop column parked, drop column parked_below, drop column parked_probe,
        drop column floors;
    drop type pgqueue.floor;

    -- ids of claims go on above the old ones
    perform setval('pgqueue.claim_numbers', (pg_sequence_last_value('pgqueue.claims_claim_id_seq') >> 24) + 1);
    alter table pgqueue.claims
        alter column claim_id drop identity,
        add column dead_lettered bigint not null default 0,
        add column arrival_nos int8multirange,
        add column lanes int[];
    update pgqueue.claims c
    set arrival_nos = m.arrival_nos, lanes = m.lanes
    from (select claim_id, range_agg(int8range(arrival_no, arrival_no, '[]')) as arrival_nos, array_agg(distinct lane) as lanes
          from pgqueue.consumer_messages where state = 'claimed' group by claim_id) m
    where m.claim_id = c.claim_id and c.reader is not null;

    alter table pgqueue.readers
        add column used_at timestamptz not null default clock_timestamp(),
        add column planned_by uuid,
        add column planned_to bigint not null default 0;
end $$;
