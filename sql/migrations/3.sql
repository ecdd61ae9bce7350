-- From version 2 (0.1.1). Runs, slots, pieces and the rows of claims become bundles
-- (queue/state/consumer_messages.sql). The ids of claims stay, and so do their leases and the offsets of Spark's
-- readers.
--
-- First what changes its shape is set aside in the other schema, with its indexes, whose names are free then.
do $$
declare
    v_table text;
begin
    if (select max(version) from pgqueue.installed) >= 3 is not false then
        return;
    end if;
    drop type pgqueue.keyed_messages, pgqueue.waiting_place, pgqueue.claimed, pgqueue.served;
    foreach v_table in array '{consumer_messages,consumer_cursors,claims,slots,pieces}'::text[] loop
        execute format('alter table pgqueue.%I set schema _pgqueue', v_table);  -- lock: table
    end loop;
    drop table pgqueue.freed_keys;
    alter table pgqueue.key_tokens drop column arrival_no, drop column first_seq;
    -- and what has another name now
    alter table pgqueue.consumers rename column way to profile;
    alter table pgqueue.group_partitions rename column line_no to arrival_no;
    alter table pgqueue.readers rename column begun to starts;
    alter table pgqueue.readers rename column begun_at to first_start;
    alter table pgqueue.readers rename column asks_alone to isolate;
    alter type pgqueue.acted_run rename to settled_run;
    alter table pgqueue.archived_messages rename to completed_messages;
    alter table pgqueue.decided rename to resolved;
    alter index pgqueue.decided_pkey rename to resolved_pkey;
    alter table pgqueue.consumer_gaps rename column kept to excluded;
    alter index pgqueue.archived_messages_done rename to completed_messages_done;
    alter table pgqueue.late_entries rename to new_capacities;
    alter table pgqueue.new_capacities rename column late_no to capacity_no;
    alter index pgqueue.late_entries_pkey rename to new_capacities_pkey;
    alter sequence pgqueue.late_entries_late_no_seq rename to new_capacities_capacity_no_seq;
    alter table pgqueue.streams rename column passed_over to unused_seqs;
    alter table pgqueue.sink_batches add column query_id text;
    alter table pgqueue.trims add column hidden_ids int8multirange not null default '{}';
    for v_table in
        select relname from pg_class
        where relnamespace = 'pgqueue'::regnamespace and relkind = 'S' and relname ~ '^room_[0-9]+$'
    loop
        execute format('alter sequence pgqueue.%I rename to %I', v_table, replace(v_table, 'room', 'backlog'));
    end loop;
end $$;
