-- The rights and settings of all functions: one list, from which roles.sql and function_settings.sql derive the rest.

-- The list. Names of internal functions have their schema. A row is for functions of one topic with the same rights and
-- settings.
--   roles     the group roles that may call it; null: none, because it is for other functions, or for the owner of the
--             schema
--   settings  names of run_settings(); or caller: it runs with the rights of its caller
-- (More than 60 lines: one list.)
create or replace function _pgqueue.access() returns table (name text, roles text[], settings text[])
language sql immutable as $$
    select unnest(l.names), l.roles, l.settings from (values
        -- all programs that publish or consume
        ('{schema_version, open_stream, schema_of, server_of}'::text[], '{producer, consumer, observer, admin}'::text[],
         null::text[]),
        ('{open_consumer}', '{consumer, observer, admin}', null),
        ('{outcome}', '{producer, consumer, observer, admin}', '{probe, loop}'),
        ('{listen_done}', '{producer, consumer}', null),
        -- publishing
        ('{send, reserve, publish_written}', '{producer}', null),
        ('{send_batch}', '{producer}', '{plan}'),
        -- a table's changes: the triggers of a captured table send them
        ('{send_captured}', '{producer}', '{plan}'),
        ('{was_truncated, capture_script, note_captures}', '{producer}', null),
        ('{capture, release, change_capture, execute_as}', '{producer}', '{caller}'),
        -- claiming and settling
        ('{claim, nack, defer, extend, is_suspected, dead_letter}', '{consumer}', '{plan, probe, loop}'),
        ('{receive, receive_where}', '{consumer}', '{plan, probe, loop}'),
        ('{as_jsonpath}', '{consumer, admin}', null),
        ('{ack}', '{consumer}', '{plan, probe}'),
        -- waiting
        ('{start_waiting, still_publishing, stop_waiting, next_due, last_publication}', '{consumer}', null),
        -- reading without claiming
        ('{read, read_to, read_plan}', '{consumer}', '{plan, probe, loop}'),
        ('{start_offset, end_offset, offset_lag, size_between, open_streams}', '{consumer}', null),
        ('{archive_files}', '{consumer, admin}', null),
        -- groups
        ('{lease_partitions, plan_partitions, commit_offset}', '{consumer}', '{plan, probe, loop}'),
        ('{leave_group}', '{consumer}', null),
        ('{read_partitions}', '{consumer}', '{plan, probe, loop, serial}'),
        ('{note_offset}', '{consumer}', '{probe, loop}'),
        ('{create_group}', '{admin}', null),
        -- Spark's source: it calls check_timeout() when it is opened, and end_after() before Spark 4.1
        ('{reader_claim, reader_extend, reader_resume, consumer_available, reader_ack, reader_release}',
         '{consumer}', '{plan, probe, loop}'),
        ('{reader_plan, reader_query, reader_lost, reader_others, consumer_backlog, consumer_lag, reader_state,
            reader_fork, recent_size, check_timeout, end_after}', '{consumer}', null),
        -- Spark's sink
        ('{open_sink, is_published, begin_write, stage, publish_staged, unstage}', '{producer}', null),
        ('{begin_write_of}', '{producer, consumer, admin}', null),  -- before messages, and before actions
        ('{settle_messages}', '{consumer}', '{plan, probe, loop}'),
        ('{revive_messages}', '{admin}', null),
        -- ... into a table
        ('{open_table, open_table_write, begin_table_batch}', '{producer}', '{plan, names}'),
        ('{apply_table_batch}', '{producer}', '{caller, digits}'),
        ('{drop_table_write}', '{producer}', null),
        -- monitoring
        ('{peek}', '{consumer, admin}', '{probe, loop}'),
        ('{peek_at}', '{consumer, admin}', '{probe, serial, no_jit}'),
        ('{explain_message, failures, key_stats, scan_claimed}', '{observer, admin}', '{probe, loop}'),
        ('{consumer_position}', '{observer, admin}', null),
        ('{scan, scan_bounds}', '{consumer, observer, admin}', '{probe, loop}'),
        ('{scan_where}', '{consumer, observer, admin}', null),
        -- dead letters
        ('{read_dead}', '{consumer, observer, admin}', null),
        ('{redrive, purge_dead}', '{admin}', '{probe}'),
        -- streams
        ('{create_stream, alter_stream, drop_stream, set_retention, bind, unbind, test_topic}', '{admin}', null),
        -- the archive, and its exporters
        ('{set_archive, drop_archive, export_streams, lock_export, begin_export, export_slices, export_ranges,
            end_export, export_leftovers, forget_leftover}', '{admin}', null),
        -- consumers
        ('{create_consumer, seek, replay, cancel, postpone}', '{admin}', '{plan, probe, loop}'),
        ('{alter_consumer, drop_consumer, retry}', '{admin}', '{probe, loop}'),
        ('{pause, resume}', '{admin}', null),
        -- schedules
        ('{create_schedule, drop_schedule, pause_schedule, resume_schedule, schedule_times,
            as_interval}', '{admin}', null),
        -- housekeeping
        ('{maintain, maintain_all, recover}', '{admin}', null),
        ('{is_restored, numbers_behind}', '{observer, admin}', null),
        -- for the owner of the schema alone
        ('{create_roles}', null, '{caller}'),
        -- only called by the functions above
        ('{_pgqueue.view_unfinished, _pgqueue.shown_claims, _pgqueue.count_claims, _pgqueue.count_taken}', null,
         '{probe, loop}'),
        ('{_pgqueue.error_of_most}', null, '{plan, probe, loop}'),
        ('{_pgqueue.view_dead, _pgqueue.check_keys}', null, '{probe}'),
        ('{_pgqueue.delete_entries}', null, '{plan, probe}'),
        ('{_pgqueue.delete_duplicates, _pgqueue.unfinished_by_key}', null, '{plan, probe, loop}'),
        ('{_pgqueue.settle}', null, '{loop}'),
        ('{_pgqueue.payloads}', null, '{serial}'),
        ('{_pgqueue.store_assigned, _pgqueue.store_waiting, _pgqueue.firsts}', null, '{whole}'),
        ('{_pgqueue.by_key}', null, '{nest}'),
        ('{_pgqueue.return_by_key, _pgqueue.apply_key_limits}', null, '{hash}'),
        ('{_pgqueue.match_actions, _pgqueue.record_completed}', null, '{hash}'),
        ('{_pgqueue.keep_newest}', null, '{probe, hash, no_jit}'),
        ('{_pgqueue.check_written, _pgqueue.entries_of}', null, '{probe, serial, no_jit}'),
        ('{_pgqueue.sql_name}', null, '{names}'),
        -- called for each row that is inserted into pgqueue.written
        ('{_pgqueue.reserved}', '{producer}', null)
    ) l (names, roles, settings)
$$;

-- The named settings of functions.
--
-- A function that is called for every claim reads a few rows by index. The statistics of tables that fill and empty all
-- day are often out of date, and then the planner sometimes chooses a sequential scan. These settings prevent that.
create or replace function _pgqueue.run_settings() returns table (name text, settings text[])
language sql immutable as $$
    values
        -- a generic plan: planning costs more than a small claim, and a custom plan would have arrays as constants
        ('plan',   '{plan_cache_mode = force_generic_plan}'::text[]),
        -- index scans only, also in a table that has just been written
        ('probe',  '{enable_seqscan = off, enable_bitmapscan = off}'),
        -- no join that reads a whole table
        ('loop',   '{enable_hashjoin = off, enable_mergejoin = off, jit = off}'),
        -- no parallel workers, which would not keep the order of delivery
        ('serial', '{max_parallel_workers_per_gather = 0}'),
        ('no_jit', '{jit = off}'),
        -- names are quoted in one way, whatever the role sets, because they are stored and compared
        ('names', '{quote_all_identifiers = off}'),
        -- the text of a float is the shortest exact one
        ('digits', '{extra_float_digits = 1}'),
        -- sets of messages are joined as a whole
        ('hash',   '{enable_hashjoin = on}'),
        ('whole',  '{enable_hashjoin = on, enable_nestloop = off}'),
        ('nest',   '{enable_nestloop = on}')
$$;

-- The existing functions of the list, with their rights and settings.
create or replace function _pgqueue.listed() returns table (function oid, roles text[], settings text[])
language sql stable as $$
    select p.oid, a.roles, a.settings
    from _pgqueue.access() a
    join pg_namespace n on n.nspname = case when strpos(a.name, '.') > 0 then split_part(a.name, '.', 1)
                                            else 'pgqueue' end
    join pg_proc p on p.pronamespace = n.oid and p.proname = substr(a.name, strpos(a.name, '.') + 1)
$$;

-- The functions that the views call. A view calls them with the rights of the querying role.
create or replace function _pgqueue.view_functions() returns setof oid
language sql stable as $$
    select distinct d.refobjid
    from pg_depend d join pg_rewrite r on r.oid = d.objid join pg_class v on v.oid = r.ev_class
    join pg_proc p on p.oid = d.refobjid
    where d.classid = 'pg_rewrite'::regclass and d.refclassid = 'pg_proc'::regclass
      and v.relnamespace = 'pgqueue'::regnamespace
      and p.pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)
$$;
