-- Who may do what. Nobody may do anything, until the owner grants it.
--
-- What people call runs with the rights of its owner, so that nobody needs rights on the tables behind it, and finds functions and
-- operators in pg_catalog alone (settings.sql). So to allow a function is all there is to allow, except
--   * the messages of a stream, which Spark's tasks write and read by COPY. A producer may write the columns that are its
--     own to write, and read nothing; nobody sees what it wrote until it is published by a function. A number that it writes
--     without having reserved it makes a later message fail that gets it;
--   * the views, for observers.

-- Capture and release, and what they call: with the rights of their caller.
create or replace function pgqueue._capture_functions() returns text[]
language sql immutable
as $$
    select '{capture, release, _captured_table, _check_captured, _lock_captured, _is_captured, _drop_capture, _drop_left_behind, _make_capture,
             _column_names, _each_column, _make_triggers, _capture_function, _capture_rows, _capture_updates, _capture_pieces}'::text[]
$$;

-- The group roles, and the functions that each may call. _check_timeout is asked by the source when it is opened, _end_after by that of older versions of Spark.
create or replace function pgqueue._role_functions() returns table (role text, functions text[])
language sql immutable
as $$
    values ('pgqueue_producer', '{schema_version, open_stream, open_sink, is_published,
                                  send, send_batch,
                                  import_lines,
                                  reserve, publish_written, stage, publish_staged,
                                  outcome, listen_done,
                                  _send_captured}'::text[] || pgqueue._capture_functions()),
           ('pgqueue_consumer', '{schema_version, open_stream, open_consumer, _check_timeout,
                                  claim, receive, receive_where, _jsonpath,
                                  ack, nack, defer, extend, is_suspected, dead_letter, read_dead,
                                  start_waiting, still_publishing, stop_waiting, next_due, last_publication,
                                  outcome, listen_done,
                                  read, start_offset, end_offset, _end_after, read_to, read_plan, offset_lag, size_between, open_streams,
                                  peek, peek_at, export_lines,
                                  scan_messages, scan_pending, scan_parts, scan_dead, scan_archived, scan_publications,
                                  lease_partitions, leave_group, plan_partitions, read_partitions, commit_offset,
                                  reader_claim, reader_extend, reader_resume, reader_plan, reader_query, reader_lost, reader_others, reader_backlog,
                                  reader_lag, reader_available, reader_ack, recent_size,
                                  settle_messages,
                                  reader_state, reader_release, reader_fork}'),
           ('pgqueue_observer', '{schema_version, open_stream, open_consumer,
                                  scan_messages, scan_pending, scan_claimed, scan_parts, scan_dead, scan_archived, scan_publications,
                                  is_restored, read_dead, consumer_position,
                                  explain_message, key_stats, outcome}'),
           ('pgqueue_admin',    '{schema_version, open_stream, open_consumer,
                                  peek, peek_at, export_lines, consumer_position,
                                  scan_messages, scan_pending, scan_claimed, scan_parts, scan_dead, scan_archived, scan_publications,
                                  create_stream, alter_stream, drop_stream, set_dedup_window, set_retention,
                                  create_consumer, alter_consumer, drop_consumer, _jsonpath,
                                  seek, replay, retry, cancel, pause, resume,
                                  read_dead, redrive, purge_dead, revive_messages,
                                  create_group, drop_group, reset_group,
                                  bind, unbind, test_topic,
                                  create_schedule, drop_schedule, pause_schedule, resume_schedule, schedule_times,
                                  maintain, maintain_all,
                                  is_restored, recover,
                                  explain_message, key_stats, outcome}')
$$;

-- The functions that a query of our views calls: as functions do, they run with the rights of whoever asks.
create or replace function pgqueue._view_functions() returns setof oid
language sql stable
as $$
    select distinct d.refobjid
    from pg_depend d join pg_rewrite r on r.oid = d.objid join pg_class v on v.oid = r.ev_class join pg_proc p on p.oid = d.refobjid
    where d.classid = 'pg_rewrite'::regclass and d.refclassid = 'pg_proc'::regclass
      and v.relnamespace = 'pgqueue'::regnamespace and p.pronamespace = 'pgqueue'::regnamespace
$$;

-- The group roles that this database uses: those that may use the schema.
create or replace function pgqueue._roles() returns setof text
language sql stable
as $$
    select f.role
    from pgqueue._role_functions() f join pg_roles r on r.rolname = f.role
    where exists (select from pg_namespace n cross join lateral aclexplode(n.nspacl) a
                  where n.nspname = 'pgqueue' and a.grantee = r.oid and a.privilege_type = 'USAGE')
$$;

-- Makes the group roles pgqueue_producer, pgqueue_consumer, pgqueue_observer and pgqueue_admin, where they do not exist, and grants
-- them what they need, in all streams that there are and will be:  grant pgqueue_producer to app.
-- Roles are the server's: those of another database with this schema are the same, and their members count here too.
-- Returns the roles and who belongs to them. Runs with the rights of the caller, who may create roles and owns the schema.
-- Errors: PQ006 when a role of such a name can do more than belong to a group. Locks: none that others wait for.
create or replace function pgqueue.create_roles() returns table (role text, members text[])
language plpgsql
as $$
declare
    v_found pg_roles;
begin
    for role in select f.role from pgqueue._role_functions() f loop
        select * into v_found from pg_roles where rolname = role;
        if not found then
            execute format('create role %I nologin', role);
        elsif v_found.rolcanlogin or v_found.rolsuper or v_found.rolcreaterole or v_found.rolcreatedb or v_found.rolreplication or v_found.rolbypassrls then
            raise exception 'there is already a role %, and it is not just a group: it may log in or has other attributes', role
                using errcode = 'PQ006', hint = 'Rename or drop it. Nothing was changed.';
        end if;
        execute format('grant usage on schema pgqueue to %I', role);
    end loop;
    perform pgqueue._grant_roles();
    return query
        select f.role, array(select m.rolname::text from pg_auth_members a join pg_roles g on g.oid = a.roleid join pg_roles m on m.oid = a.member
                             where g.rolname = f.role order by 1)
        from pgqueue._role_functions() f;
end $$;

-- Grants the group roles of this database what they need, and takes from them what they do not need any more.
create or replace function pgqueue._grant_roles() returns void
language plpgsql
as $$
declare
    v_role record;
begin
    for v_role in select f.* from pgqueue._role_functions() f join pgqueue._roles() r on r = f.role loop
        execute format('revoke all on all routines in schema pgqueue from %I', v_role.role);
        execute (select format('grant execute on routine %s to %I', string_agg(p.oid::regprocedure::text, ', '), v_role.role)
                 from pg_proc p
                 where p.pronamespace = 'pgqueue'::regnamespace
                   and (p.proname = any (v_role.functions)
                        or (v_role.role in ('pgqueue_observer', 'pgqueue_admin') and p.oid in (select pgqueue._view_functions()))));
        if v_role.role in ('pgqueue_observer', 'pgqueue_admin') then
            execute (select format('grant select on %s to %I', string_agg(oid::regclass::text, ', '), v_role.role)
                     from pg_class where relnamespace = 'pgqueue'::regnamespace and relkind = 'v');
        end if;
    end loop;
    perform pgqueue._grant_stream(stream_id) from pgqueue.streams;
end $$;

-- Grants what the group roles need of a stream, if this database uses them, and nothing to anybody else.
create or replace function pgqueue._grant_stream(p_stream_id int) returns void
language plpgsql
as $$
declare
    v_role text;
begin
    execute format('revoke all on type pgqueue.messages_%s from public', p_stream_id);
    for v_role in select pgqueue._roles() loop
        if v_role = 'pgqueue_producer' then
            execute format('grant insert (seq, key, data, data_bytes, headers) on pgqueue.messages_%s to pgqueue_producer', p_stream_id);
        elsif v_role = 'pgqueue_consumer' then
            execute format('grant select on pgqueue.messages_%s to pgqueue_consumer', p_stream_id);
        end if;
    end loop;
end $$;

-- What Postgres grants to everybody when something is made.
revoke all on all routines in schema pgqueue from public;
do $$
declare
    v_type text;
begin
    for v_type in
        select t.oid::regtype::text from pg_type t
        where t.typnamespace = 'pgqueue'::regnamespace and t.typelem = 0 and has_type_privilege('public', t.oid, 'usage')
    loop
        execute format('revoke all on type %s from public', v_type);
    end loop;
    perform pgqueue._grant_roles();
end $$;
