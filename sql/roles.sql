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
    select '{
        capture,
        release,
        _captured_table,
        _check_captured,
        _lock_captured,
        _is_captured,
        _drop_capture,
        _drop_left_behind,
        _make_capture,
        _column_names,
        _each_column,
        _make_triggers,
        _capture_function,
        _capture_rows,
        _capture_updates,
        _capture_pieces}'::text[]
$$;

-- The group roles, and the functions that each may call.
create or replace function pgqueue._role_functions() returns table (role text, functions text[])
language sql immutable
as $$
    select 'pgqueue_' || r, array_agg(f.name) || case when r = 'producer' then pgqueue._capture_functions() end
    from unnest('{producer, consumer, observer, admin}'::text[]) with ordinality u (r, n) join (values
        -- whoever publishes or consumes
        ('schema_version', '{producer, consumer, observer, admin}'::text[]),
        ('open_stream', '{producer, consumer, observer, admin}'),
        ('open_consumer', '{consumer, observer, admin}'),
        ('outcome', '{producer, consumer, observer, admin}'),
        ('listen_done', '{producer, consumer}'),
        -- publishing
        ('send', '{producer}'),
        ('send_batch', '{producer}'),
        ('import_lines', '{producer}'),
        ('reserve', '{producer}'),
        ('publish_written', '{producer}'),
        -- a table's changes, by the trigger of a captured table
        ('_send_captured', '{producer}'),
        -- claiming and settling
        ('claim', '{consumer}'),
        ('receive', '{consumer}'),
        ('receive_where', '{consumer}'),
        ('_jsonpath', '{consumer, admin}'),
        ('ack', '{consumer}'),
        ('nack', '{consumer}'),
        ('defer', '{consumer}'),
        ('extend', '{consumer}'),
        ('is_suspected', '{consumer}'),
        ('dead_letter', '{consumer}'),
        -- waiting
        ('start_waiting', '{consumer}'),
        ('still_publishing', '{consumer}'),
        ('stop_waiting', '{consumer}'),
        ('next_due', '{consumer}'),
        ('last_publication', '{consumer}'),
        -- reading without claiming
        ('read', '{consumer}'),
        ('start_offset', '{consumer}'),
        ('end_offset', '{consumer}'),
        ('read_to', '{consumer}'),
        ('read_plan', '{consumer}'),
        ('offset_lag', '{consumer}'),
        ('size_between', '{consumer}'),
        ('open_streams', '{consumer}'),
        -- groups
        ('lease_partitions', '{consumer}'),
        ('leave_group', '{consumer}'),
        ('plan_partitions', '{consumer}'),
        ('read_partitions', '{consumer}'),
        ('commit_offset', '{consumer}'),
        ('note_offset', '{consumer}'),
        ('create_group', '{admin}'),
        ('drop_group', '{admin}'),
        ('reset_group', '{admin}'),
        -- Spark's source; _check_timeout is asked when it is opened, _end_after by that of older versions of Spark
        ('reader_claim', '{consumer}'),
        ('reader_extend', '{consumer}'),
        ('reader_resume', '{consumer}'),
        ('reader_plan', '{consumer}'),
        ('reader_query', '{consumer}'),
        ('reader_lost', '{consumer}'),
        ('reader_others', '{consumer}'),
        ('reader_backlog', '{consumer}'),
        ('reader_lag', '{consumer}'),
        ('reader_available', '{consumer}'),
        ('reader_ack', '{consumer}'),
        ('reader_state', '{consumer}'),
        ('reader_release', '{consumer}'),
        ('reader_fork', '{consumer}'),
        ('recent_size', '{consumer}'),
        ('_check_timeout', '{consumer}'),
        ('_end_after', '{consumer}'),
        -- Spark's sink
        ('open_sink', '{producer}'),
        ('is_published', '{producer}'),
        ('stage', '{producer}'),
        ('publish_staged', '{producer}'),
        ('settle_messages', '{consumer}'),
        ('revive_messages', '{admin}'),
        -- looking
        ('peek', '{consumer, admin}'),
        ('peek_at', '{consumer, admin}'),
        ('export_lines', '{consumer, admin}'),
        ('explain_message', '{observer, admin}'),
        ('key_stats', '{observer, admin}'),
        ('consumer_position', '{observer, admin}'),
        ('scan_messages', '{consumer, observer, admin}'),
        ('scan_pending', '{consumer, observer, admin}'),
        ('scan_claimed', '{observer, admin}'),
        ('scan_parts', '{consumer, observer, admin}'),
        ('scan_dead', '{consumer, observer, admin}'),
        ('scan_archived', '{consumer, observer, admin}'),
        ('scan_publications', '{consumer, observer, admin}'),
        -- dead letters
        ('read_dead', '{consumer, observer, admin}'),
        ('redrive', '{admin}'),
        ('purge_dead', '{admin}'),
        -- streams
        ('create_stream', '{admin}'),
        ('alter_stream', '{admin}'),
        ('drop_stream', '{admin}'),
        ('set_dedup_window', '{admin}'),
        ('set_retention', '{admin}'),
        ('bind', '{admin}'),
        ('unbind', '{admin}'),
        ('test_topic', '{admin}'),
        -- consumers
        ('create_consumer', '{admin}'),
        ('alter_consumer', '{admin}'),
        ('drop_consumer', '{admin}'),
        ('seek', '{admin}'),
        ('replay', '{admin}'),
        ('retry', '{admin}'),
        ('cancel', '{admin}'),
        ('pause', '{admin}'),
        ('resume', '{admin}'),
        -- schedules
        ('create_schedule', '{admin}'),
        ('drop_schedule', '{admin}'),
        ('pause_schedule', '{admin}'),
        ('resume_schedule', '{admin}'),
        ('schedule_times', '{admin}'),
        -- housekeeping
        ('maintain', '{admin}'),
        ('maintain_all', '{admin}'),
        ('is_restored', '{observer, admin}'),
        ('recover', '{admin}')) f (name, roles) on r = any (f.roles)
    group by r, n
    order by n
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
