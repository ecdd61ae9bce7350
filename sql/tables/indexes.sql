-- One index per question asked. No predicate follows from the conditions of another question: Postgres may take any partial
-- index whose predicate a query implies, and then reads all of it.
--
-- An existing index is left alone without asking for a lock of its table, which "create index if not exists" does: installing
-- again must not wait for workers, nor let them wait.
do $$
declare
    v_index text[];
begin
    foreach v_index slice 1 in array array[
        ['consumer_messages_ready',   'consumer_messages (consumer_id, lane, line_no, first_seq) where state = ''ready'''],
        ['consumer_messages_due',     'consumer_messages (consumer_id, not_visible_until) where state = ''delayed'''],
        ['consumer_messages_unsifted', 'consumer_messages (consumer_id, line_no, first_seq) where state = ''unsifted'''],
        ['consumer_messages_claim',   'consumer_messages (claim_id) where claim_id is not null'],
        ['consumer_messages_piece',   'consumer_messages (consumer_id, piece) where piece is not null'],
        ['consumer_messages_key',     'consumer_messages (consumer_id, key, arrival_no, first_seq) where key is not null'],
        ['pieces_place',              'pieces (consumer_id, place)'],
        ['key_backlog_key',           'key_backlog (consumer_id, key, seq)'],
        ['key_backlog_seq',           'key_backlog (consumer_id, seq)'],
        ['claims_lease',              'claims (consumer_id, lease_until) where live'],
        ['claims_reader',             'claims (reader, claim_id) where reader is not null'],
        ['dead_messages_consumer',    'dead_messages (consumer_id, dead_id)'],
        ['archived_messages_done',    'archived_messages (consumer_id, done_at)'],
        ['group_partitions_lease',    'group_partitions (lease_id, version) where lease_id is not null'],
        ['dedup_keys_sent',           'dedup_keys (stream_id, sent_at)'],
        ['staged_writes_batch',       'staged_writes (sink, stream_id, batch)'],
        ['reservations_transaction',  'reservations (xid)']]
    loop
        if to_regclass('pgqueue.' || v_index[1]) is null then
            execute format('create index %I on pgqueue.%s', v_index[1], v_index[2]);
        end if;
    end loop;
end $$;
