-- Which role may call which function, and with which settings a function runs: one list, from which roles.sql and
-- settings.sql derive the rest.

-- The list. A function of the schema pgqueue has its plain name, an internal one its schema too.
--   roles     the group roles that may call it; null: none, it is for other functions, or for the owner of the schema
--   settings  names of run_settings(), or caller: it runs with the rights of its caller
-- (More than 60 lines: a row for each function.)
create or replace function _pgqueue.access() returns table (name text, roles text[], settings text[])
language sql immutable
as $$
    values
        -- all programs that publish or consume
        ('schema_version', '{producer, consumer, observer, admin}'::text[], null::text[]),
        ('open_stream', '{producer, consumer, observer, admin}', null),
        ('schema_of', '{producer, consumer, observer, admin}', null),
        ('open_consumer', '{consumer, observer, admin}', null),
        ('outcome', '{producer, consumer, observer, admin}', '{probe, loop}'),
        ('listen_done', '{producer, consumer}', null),
        ('server_of', '{producer, consumer, observer, admin}', null),
        -- publishing
        ('send', '{producer}', null),
        ('send_batch', '{producer}', '{plan}'),
        ('import_lines', '{producer}', '{plan}'),
        ('reserve', '{producer}', null),
        ('publish_written', '{producer}', null),
        -- a table's changes: the triggers of a captured table send them
        ('send_captured', '{producer}', '{plan}'),
        ('was_truncated', '{producer}', null),
        ('capture', '{producer}', '{caller}'),
        ('release', '{producer}', '{caller}'),
        ('change_capture', '{producer}', '{caller}'),
        ('execute_as', '{producer}', '{caller}'),
        ('capture_script', '{producer}', null),
        ('note_captures', '{producer}', null),
        -- claiming and settling
        ('claim', '{consumer}', '{plan, probe, loop}'),
        ('receive', '{consumer}', '{plan, probe, loop, serial}'),
        ('receive_where', '{consumer}', '{plan, probe, loop, serial}'),
        ('as_jsonpath', '{consumer, admin}', null),
        ('ack', '{consumer}', '{plan, probe}'),
        ('nack', '{consumer}', '{plan, probe, loop}'),
        ('defer', '{consumer}', '{plan, probe, loop}'),
        ('extend', '{consumer}', '{plan, probe, loop}'),
        ('is_suspected', '{consumer}', '{plan, probe, loop}'),
        ('dead_letter', '{consumer}', '{plan, probe, loop}'),
        -- waiting
        ('start_waiting', '{consumer}', null),
        ('still_publishing', '{consumer}', null),
        ('stop_waiting', '{consumer}', null),
        ('next_due', '{consumer}', null),
        ('last_publication', '{consumer}', null),
        -- reading without claiming
        ('read', '{consumer}', '{plan, probe, loop}'),
        ('start_offset', '{consumer}', null),
        ('end_offset', '{consumer}', null),
        ('read_to', '{consumer}', '{plan, probe, loop}'),
        ('read_plan', '{consumer}', '{plan, probe, loop}'),
        ('offset_lag', '{consumer}', null),
        ('size_between', '{consumer}', null),
        ('open_streams', '{consumer}', null),
        ('archive_files', '{consumer, admin}', null),
        -- groups
        ('lease_partitions', '{consumer}', '{plan, probe, loop}'),
        ('leave_group', '{consumer}', null),
        ('plan_partitions', '{consumer}', '{plan, probe, loop}'),
        ('read_partitions', '{consumer}', '{plan, probe, loop, serial}'),
        ('commit_offset', '{consumer}', '{plan, probe, loop}'),
        ('note_offset', '{consumer}', '{probe, loop}'),
        ('create_group', '{admin}', null),
        -- Spark's source; check_timeout() is asked when it is opened, end_after() by that of older versions of Spark
        ('reader_claim', '{consumer}', '{plan, probe, loop}'),
        ('reader_extend', '{consumer}', '{plan, probe, loop}'),
        ('reader_resume', '{consumer}', '{plan, probe, loop}'),
        ('reader_plan', '{consumer}', null),
        ('reader_query', '{consumer}', null),
        ('reader_lost', '{consumer}', null),
        ('reader_others', '{consumer}', null),
        ('consumer_backlog', '{consumer}', null),
        ('consumer_lag', '{consumer}', null),
        ('consumer_available', '{consumer}', '{plan, probe, loop}'),
        ('reader_ack', '{consumer}', '{plan, probe, loop}'),
        ('reader_state', '{consumer}', null),
        ('reader_release', '{consumer}', '{plan, probe, loop}'),
        ('reader_fork', '{consumer}', null),
        ('recent_size', '{consumer}', null),
        ('check_timeout', '{consumer}', null),
        ('end_after', '{consumer}', null),
        -- Spark's sink
        ('open_sink', '{producer}', null),
        ('is_published', '{producer}', null),
        ('begin_write', '{producer}', null),
        ('stage', '{producer}', null),
        ('publish_staged', '{producer}', null),
        ('unstage', '{producer}', null),
        ('settle_messages', '{consumer}', '{plan, probe, loop}'),
        ('revive_messages', '{admin}', null),
        -- ... into a table
        ('open_table', '{producer}', '{plan}'),
        ('open_table_write', '{producer}', '{plan}'),
        ('begin_table_batch', '{producer}', '{plan}'),
        ('apply_table_batch', '{producer}', '{caller}'),
        ('drop_table_write', '{producer}', null),
        -- looking
        ('peek', '{consumer, admin}', '{probe, loop}'),
        ('peek_at', '{consumer, admin}', '{probe, serial, no_jit}'),
        ('export_lines', '{consumer, admin}', '{probe, serial, no_jit}'),
        ('explain_message', '{observer, admin}', '{probe, loop}'),
        ('failures', '{observer, admin}', '{probe, loop}'),
        ('key_stats', '{observer, admin}', '{probe, loop}'),
        ('consumer_position', '{observer, admin}', null),
        ('scan_messages', '{consumer, observer, admin}', null),
        ('scan_pending', '{consumer, observer, admin}', '{probe, loop}'),
        ('scan_claimed', '{observer, admin}', '{probe, loop}'),
        ('scan_parts', '{consumer, observer, admin}', null),
        ('scan_dead', '{consumer, observer, admin}', null),
        ('scan_archived', '{consumer, observer, admin}', null),
        ('scan_publications', '{consumer, observer, admin}', null),
        ('scan_where', '{consumer, observer, admin}', null),
        -- dead letters
        ('read_dead', '{consumer, observer, admin}', null),
        ('redrive', '{admin}', '{probe}'),
        ('purge_dead', '{admin}', '{probe}'),
        -- streams
        ('create_stream', '{admin}', null),
        ('alter_stream', '{admin}', null),
        ('drop_stream', '{admin}', null),
        ('set_retention', '{admin}', null),
        -- the archive, and its exporters
        ('set_archive', '{admin}', null),
        ('drop_archive', '{admin}', null),
        ('export_streams', '{admin}', null),
        ('lock_export', '{admin}', null),
        ('begin_export', '{admin}', null),
        ('export_slices', '{admin}', null),
        ('export_ranges', '{admin}', null),
        ('end_export', '{admin}', null),
        ('export_leftovers', '{admin}', null),
        ('forget_leftover', '{admin}', null),
        ('bind', '{admin}', null),
        ('unbind', '{admin}', null),
        ('test_topic', '{admin}', null),
        -- consumers
        ('create_consumer', '{admin}', '{plan, probe, loop}'),
        ('alter_consumer', '{admin}', '{probe, loop}'),
        ('drop_consumer', '{admin}', '{probe, loop}'),
        ('seek', '{admin}', '{plan, probe, loop}'),
        ('replay', '{admin}', '{plan, probe, loop}'),
        ('retry', '{admin}', '{probe, loop}'),
        ('cancel', '{admin}', '{plan, probe, loop}'),
        ('postpone', '{admin}', '{plan, probe, loop}'),
        ('pause', '{admin}', null),
        ('resume', '{admin}', null),
        -- schedules
        ('create_schedule', '{admin}', null),
        ('drop_schedule', '{admin}', null),
        ('pause_schedule', '{admin}', null),
        ('resume_schedule', '{admin}', null),
        ('schedule_times', '{admin}', null),
        -- housekeeping
        ('maintain', '{admin}', null),
        ('maintain_all', '{admin}', null),
        ('is_restored', '{observer, admin}', null),
        ('recover', '{admin}', null),
        -- for the owner of the schema alone
        ('create_roles', null, '{caller}'),
        -- only called by the functions above
        ('_pgqueue.seen_runs', null, '{probe, loop}'),
        ('_pgqueue.seen_claims', null, '{probe, loop}'),
        ('_pgqueue.seen_claim', null, '{probe, loop}'),
        ('_pgqueue.first_held', null, '{probe, loop}'),
        ('_pgqueue.seen_dead', null, '{probe}'),
        ('_pgqueue.count_runs', null, '{probe, loop}'),
        ('_pgqueue.failing', null, '{probe, loop}'),
        ('_pgqueue.delete_entries', null, '{plan, probe}'),
        ('_pgqueue.first_of', null, '{plan, probe, loop}'),
        ('_pgqueue.judge_keys', null, '{plan, probe, loop}'),
        ('_pgqueue.settle', null, '{loop}'),
        ('_pgqueue.check_keys', null, '{probe}'),
        ('_pgqueue.store_pieces', null, '{whole}'),
        ('_pgqueue.return_by_key', null, '{hash}'),
        ('_pgqueue.keep_newest', null, '{probe, hash, no_jit}'),
        ('_pgqueue.within_limits', null, '{hash}'),
        ('_pgqueue.told', null, '{hash}'),
        ('_pgqueue.end_as_told', null, '{hash}'),
        ('_pgqueue.check_written', null, '{probe, serial, no_jit}'),
        ('_pgqueue.entries_of', null, '{probe, serial, no_jit}'),
        ('_pgqueue.take_dedup_keys', null, '{plan}'),
        ('_pgqueue.sql_name', null, '{names}'),
        -- asked for each row that is inserted into pgqueue.written
        ('_pgqueue.reserved', '{producer}', null)
$$;

-- The settings that functions run with, by a name.
--
-- A function that is called for every claim reads a few rows by index. Statistics are out of date for tables that fill
-- and empty all day, and then the planner now and then prefers to read a table whole. These settings forbid that.
create or replace function _pgqueue.run_settings() returns table (name text, settings text[])
language sql immutable
as $$
    values
        -- the plan is kept: to plan costs more than a small claim, and a custom plan would hold arrays as constants
        ('plan',   '{plan_cache_mode = force_generic_plan}'::text[]),
        -- one index probe after the other, also in a table that was just written to
        ('probe',  '{enable_seqscan = off, enable_bitmapscan = off}'),
        -- no join that reads one side whole
        ('loop',   '{enable_hashjoin = off, enable_mergejoin = off, jit = off}'),
        -- no parallel workers, which would lose the order of delivery
        ('serial', '{max_parallel_workers_per_gather = 0}'),
        ('no_jit', '{jit = off}'),
        -- a name is written in one way, whatever the role sets: it is stored, and compared
        ('names', '{quote_all_identifiers = off}'),
        -- sets of messages are joined whole
        ('hash',   '{enable_hashjoin = on}'),
        ('whole',  '{enable_hashjoin = on, enable_nestloop = off}')
$$;

-- The existing functions of the list, with their rights and settings.
create or replace function _pgqueue.listed() returns table (function oid, roles text[], settings text[])
language sql stable
as $$
    select p.oid, a.roles, a.settings
    from _pgqueue.access() a
    join pg_namespace n on n.nspname = case when strpos(a.name, '.') > 0 then split_part(a.name, '.', 1)
                                            else 'pgqueue' end
    join pg_proc p on p.pronamespace = n.oid and p.proname = substr(a.name, strpos(a.name, '.') + 1)
$$;

-- The functions that queries of our views call. They run with the rights of the role that asks.
create or replace function _pgqueue.view_functions() returns setof oid
language sql stable
as $$
    select distinct d.refobjid
    from pg_depend d join pg_rewrite r on r.oid = d.objid join pg_class v on v.oid = r.ev_class
    join pg_proc p on p.oid = d.refobjid
    where d.classid = 'pg_rewrite'::regclass and d.refclassid = 'pg_proc'::regclass
      and v.relnamespace = 'pgqueue'::regnamespace
      and p.pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)
$$;
