-- The settings that functions run with, in one place: each of these is a name for a few settings, and the functions that have them.
--
-- What is called for every claim asks for a few rows by index. With statistics that are out of date, as they always are for tables that
-- fill and empty all day, the planner now and then prefers to read everything; so it may not.
do $$
declare
    v_profile record;
    v_name    text;
    v_setting text;
begin
    for v_profile in
        select * from (values
            -- one probe of an index after the other, with a plan that is kept
            ('{plan_cache_mode = force_generic_plan, enable_seqscan = off, enable_bitmapscan = off}'::text[], '{ack, _delete_entries}'::text[]),
            -- ... and no join that reads one side whole
            ('{plan_cache_mode = force_generic_plan, enable_seqscan = off, enable_bitmapscan = off, enable_hashjoin = off, enable_mergejoin = off, jit = off}',
             '{
                 claim,
                 receive,
                 receive_where,
                 nack,
                 defer,
                 extend,
                 is_suspected,
                 dead_letter,
                 reader_claim,
                 reader_resume,
                 reader_extend,
                 reader_ack,
                 reader_release,
                 reader_available,
                 settle_messages,
                 create_consumer,
                 seek,
                 replay,
                 cancel,
                 read,
                 read_to,
                 read_plan,
                 lease_partitions,
                 plan_partitions,
                 read_partitions,
                 commit_offset,
                 _first_of,
                 _judge_keys}'),
            ('{enable_hashjoin = off, enable_mergejoin = off, jit = off}', '{_settle}'),
            -- ... nor one in several processes, which would lose the order of delivery
            ('{max_parallel_workers_per_gather = 0}', '{receive, receive_where, read_partitions}'),
            ('{enable_seqscan = off, enable_bitmapscan = off}', '{_check_keys}'),
            -- sets of messages are joined whole
            ('{enable_hashjoin = on, enable_nestloop = off}', '{_store_pieces}'),
            ('{enable_hashjoin = on}', '{_return_by_key, _within_limits, _told, _end_as_told}'),
            -- ranges of messages are read by index, whatever the statistics of a table that was just written to
            ('{enable_seqscan = off, enable_bitmapscan = off, max_parallel_workers_per_gather = 0, jit = off}', '{_check_written, _entries_of, peek_at, export_lines}'),
            -- a custom plan would hold the arrays as constants
            ('{plan_cache_mode = force_generic_plan}', '{send_batch, import_lines, _send_captured, _take_dedup_keys}')) p (settings, functions)
    loop
        foreach v_name in array v_profile.functions loop
            foreach v_setting in array v_profile.settings loop
                execute format('alter function pgqueue.%I set %s', v_name, v_setting);
            end loop;
        end loop;
    end loop;
    -- What others call runs with the rights of its owner, and finds functions and operators where nobody else can put them.
    -- create_roles and capture need a caller with rights of its own; so does a procedure, or it could not commit.
    for v_name in
        select oid::regprocedure::text from pg_proc
        where pronamespace = 'pgqueue'::regnamespace and prokind = 'f'
          and (proname not like '\_%' or oid in (select pgqueue._view_functions())
               or proname in (select unnest(functions) from pgqueue._role_functions()))
    loop
        execute format('alter function %s set search_path = pg_catalog, pg_temp', v_name);
        if split_part(substr(v_name, 9), '(', 1) <> all (pgqueue._capture_functions() || 'create_roles'::text) then
            execute format('alter function %s security definer', v_name);
        end if;
    end loop;
end $$;
