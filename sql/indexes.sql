-- One index for each kind of query. No predicate follows from the conditions of another kind: Postgres may choose any
-- partial index whose predicate a query implies, and then read all of it.
--
-- For an existing index, no lock of its table is needed. "create index if not exists" would lock it, and a repeated
-- installation must not wait for workers or block them.
do $$
declare
    v_index text[];
begin
    foreach v_index slice 1 in array array[
        ['consumer_messages_lane',    'consumer_messages (consumer_id, lane, place, first_seq)'],
        ['consumer_messages_number',  'consumer_messages ((bundle_no & 1048575))'],
        ['consumer_messages_key',
            'consumer_messages (consumer_id, key, lane, arrival_no, first_seq) where key is not null'],
        ['publications_urgent',       'publications (stream_id, publication_id) where priority > 0'],
        ['key_tokens_return',         'key_tokens (consumer_id, returns_at)'],
        ['key_tokens_key',            'key_tokens (consumer_id, key, returns_at)'],
        ['key_backlog_key',           'key_backlog (consumer_id, key, seq)'],
        ['key_backlog_seq',           'key_backlog (consumer_id, seq)'],
        ['newest_of_keys_noted',      'newest_of_keys (consumer_id, noted_at)'],
        ['dead_messages_consumer',    'dead_messages (consumer_id, dead_id)'],
        ['dead_messages_first',       'dead_messages (consumer_id, lower(seqs))'],
        ['schedules_next',            'schedules (stream_id, next_at) where not paused'],
        ['completed_messages_done',   'completed_messages (consumer_id, done_at)'],
        ['group_partitions_lease',    'group_partitions (lease_id, version) where lease_id is not null'],
        ['dedup_keys_sent',           'dedup_keys (stream_id, sent_at)'],
        ['staged_chunks_write',       'staged_chunks (sink, batch, write_no) where write_no is not null'],
        ['reservations_transaction',  'reservations (xid)']]
    loop
        -- (a feature and its table may not be installed)
        if to_regclass('pgqueue.' || v_index[1]) is null
           and to_regclass('pgqueue.' || split_part(v_index[2], ' ', 1)) is not null then
            execute format('create index %I on pgqueue.%s', v_index[1], v_index[2]);
        end if;
    end loop;
end $$;

-- Logical replication of all tables (Debezium, an upgrade) refuses changes of a table without a replica identity. So
-- tables without a primary key have the whole row as identity, which costs WAL only with wal_level=logical.
do $$
declare
    v_table name;
begin
    for v_table in
        select c.relname from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and c.relreplident = 'd'
          and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)
    loop
        execute format('alter table pgqueue.%I replica identity full', v_table);  -- lock: table
    end loop;
end $$;
