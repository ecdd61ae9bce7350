-- The rights of roles. No role has any right until the owner grants it.
--
-- Public functions run with the rights of their owner, so that no role needs rights on tables, and with pg_catalog as
-- the search_path (function_settings.sql). So a role only needs the right to call a function, except for
--   * the messages of a stream, which Spark's tasks write and read by COPY. A producer writes into pgqueue.written,
--     only with numbers that its transaction reserved, and cannot read it (queue/send/written.sql). A written message
--     is not visible until a function publishes it;
--   * the views, for observers.

-- The group roles.
create or replace function _pgqueue.group_roles() returns text[]
language sql immutable as $$ select '{pgqueue_producer, pgqueue_consumer, pgqueue_observer, pgqueue_admin}'::text[] $$;

-- The group roles that this database uses: those that may use the schema.
create or replace function _pgqueue.roles() returns setof text
language sql stable as $$
    select r.rolname::text
    from unnest(_pgqueue.group_roles()) with ordinality g (name, n) join pg_roles r on r.rolname = g.name
    where exists (select from pg_namespace n cross join lateral aclexplode(n.nspacl) a
                  where n.nspname = 'pgqueue' and a.grantee = r.oid and a.privilege_type = 'USAGE')
    order by g.n
$$;

-- The rest of create_roles. It grants the rights of the schema pgmq, if sql/pgmq/install.sql created it and it belongs
-- to the owner of this schema, because functions of another owner would run with the rights of the caller. And clients
-- only call functions of a schema whose owner they trust (spark_pgqueue/postgres/owners.py): an owner that is neither a
-- superuser nor the database's owner must be in the role pgqueue_owner.
create or replace function _pgqueue.complete_roles() returns void
language plpgsql as $$
declare
    v_owner oid := (select nspowner from pg_namespace where nspname = 'pgqueue');
    v_found boolean := exists (select from pg_roles where rolname = 'pgqueue_owner');
begin
    if exists (select from pg_proc
               where pronamespace = to_regnamespace('pgmq') and pronamespace in (select _pgqueue.schemas())
                 and proname = '_grant' and pronargs = 0 and proowner = v_owner) then
        execute 'select pgmq._grant()';
    end if;
    if pg_has_role(v_owner, (select datdba from pg_database where datname = current_database()), 'member') then
        return;
    end if;
    begin
        if not v_found then
            create role pgqueue_owner nologin;
        end if;
        if not pg_has_role(v_owner, 'pgqueue_owner', 'member') then
            execute format('grant pgqueue_owner to %I', pg_get_userbyid(v_owner));
        end if;
    exception when insufficient_privilege then
        raise warning 'clients of other roles do not trust %: it does not own the database', pg_get_userbyid(v_owner)
            using hint = format('A superuser, or a role with CREATEROLE%s, runs: %sgrant pgqueue_owner to %I.',
                                case when v_found then ' that administers pgqueue_owner' end,
                                case when not v_found then 'create role pgqueue_owner nologin; ' end,
                                pg_get_userbyid(v_owner));
    end;
end $$;

-- Creates the group roles pgqueue_producer, _consumer, _observer and _admin, and grants them their rights. Existing
-- roles remain. The grants apply to all existing and future streams: grant pgqueue_producer to app. Roles belong to the
-- server: all databases with this schema share them and their members. The owner of the schema becomes a member of
-- pgqueue_owner if clients would not trust it otherwise. Returns the roles and their members. Runs with the rights of
-- the caller, which must own the schema, and have the right to create missing roles. Errors: PQ006 when a role with
-- such a name has a login or other attributes; 42501 when the caller may not create roles. Locks: none that others wait
-- for.
create or replace function pgqueue.create_roles() returns table (role text, members text[])
language plpgsql as $$
declare
    v_found pg_roles;
begin
    foreach role in array _pgqueue.group_roles() loop
        select * into v_found from pg_roles where rolname = role;
        if not found then
            begin
                execute format('create role %I nologin', role);
            exception when insufficient_privilege then
                raise exception '% may not create the role %', current_user, role
                    using errcode = 'insufficient_privilege', hint = format(
                        'A superuser, or a role with CREATEROLE, runs: %s. Then call create_roles again.',
                        (select string_agg(format('create role %I nologin', name), '; ')
                         from unnest(_pgqueue.group_roles()) name
                         where not exists (select from pg_roles where rolname = name)));
            end;
        elsif v_found.rolcanlogin or v_found.rolsuper or v_found.rolcreaterole or v_found.rolcreatedb
              or v_found.rolreplication or v_found.rolbypassrls then
            raise exception 'role % already exists, and is not a plain group role: '
                            'it can log in or has other attributes', role
                using errcode = 'PQ006', hint = 'Rename or drop it. Nothing was changed.';
        end if;
        execute format('grant usage on schema pgqueue to %I', role);
    end loop;
    perform _pgqueue.grant_roles();
    perform _pgqueue.complete_roles();
    return query
        select g.name, array(select m.rolname::text from pg_auth_members a join pg_roles r on r.oid = a.roleid
                             join pg_roles m on m.oid = a.member
                             where r.rolname = g.name order by 1)
        from unnest(_pgqueue.group_roles()) g (name);
end $$;

-- Grants the group roles of this database their rights, and revokes all others.
create or replace function _pgqueue.grant_roles() returns void
language plpgsql as $$
declare
    v_role text;
begin
    for v_role in select _pgqueue.roles() loop
        execute format('revoke all on all routines in schema pgqueue, _pgqueue from %I', v_role);
        execute (select format('grant execute on routine %s to %I', string_agg(p.oid::regprocedure::text, ', '), v_role)
                 from pg_proc p
                 where p.oid in (select l.function from _pgqueue.listed() l where substr(v_role, 9) = any (l.roles))
                    or (v_role in ('pgqueue_observer', 'pgqueue_admin')
                        and p.oid in (select _pgqueue.view_functions())));
        if v_role = 'pgqueue_producer' then
            grant insert (stream_id, seq, key, data, data_bytes, headers) on pgqueue.written to pgqueue_producer;
        elsif v_role in ('pgqueue_observer', 'pgqueue_admin') then
            execute (select format('grant select on %s to %I', string_agg(oid::regclass::text, ', '), v_role)
                     from pg_class where relnamespace = 'pgqueue'::regnamespace and relkind = 'v');
        end if;
    end loop;
    perform _pgqueue.grant_stream(stream_id) from pgqueue.streams;
end $$;

-- Grants the rights on a stream to the group roles that this database uses.
create or replace function _pgqueue.grant_stream(p_stream_id int) returns void
language plpgsql as $$
declare
    v_role text;
begin
    -- Spark's tasks; an exporter
    for v_role in select r from _pgqueue.roles() r where r in ('pgqueue_consumer', 'pgqueue_admin') loop
        execute format('grant select on pgqueue.messages_%s to %I', p_stream_id, v_role);
    end loop;
end $$;

-- The schemas of this project in this database; pgmq only if it is the interface of this queue, and not pgmq itself.
create or replace function _pgqueue.schemas() returns setof oid
language sql stable as $$
    select n.oid from pg_namespace n
    where n.nspname in ('pgqueue', '_pgqueue')
       or (n.nspname = 'pgmq' and obj_description(n.oid, 'pg_namespace') like 'spark-pgqueue:%'
           and n.nspowner = (select nspowner from pg_namespace where nspname = 'pgqueue'))
$$;

-- The grants on the schemas and their objects, except those of the owner. object and grantee are quoted.
create or replace function _pgqueue.grants() returns table (oid oid, object text, grantee text, privileges text)
language sql stable as $$
    with acl as (
        select oid, 'schema ' || quote_ident(nspname) as object, coalesce(nspacl, acldefault('n', nspowner)) as rights,
               nspowner as owner
        from pg_namespace where oid in (select _pgqueue.schemas())
        union all
        select oid, case relkind when 'S' then 'sequence ' else 'table ' end || oid::regclass,
               coalesce(relacl, acldefault((case relkind when 'S' then 's' else 'r' end)::"char", relowner)), relowner
        from pg_class
        where relnamespace in (select _pgqueue.schemas()) and relkind in ('r', 'p', 'v', 'S')
        union all
        select oid, 'routine ' || oid::regprocedure, coalesce(proacl, acldefault('f', proowner)), proowner
        from pg_proc where pronamespace in (select _pgqueue.schemas())
        union all
        select oid, 'type ' || oid::regtype, coalesce(typacl, acldefault('T', typowner)), typowner
        from pg_type where typnamespace in (select _pgqueue.schemas()) and typelem = 0
    )
    select acl.oid, acl.object, case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end,
           string_agg(lower(a.privilege_type), ', ' order by a.privilege_type)
    from acl cross join lateral aclexplode(acl.rights) a
    where a.grantee <> acl.owner group by acl.oid, acl.object, a.grantee
$$;

-- Revokes the grants that a new object gets: to PUBLIC, and by the default privileges of the owner (alter default
-- privileges), which may be meant for other tables. Later grants remain, except those to PUBLIC.
--   p_new  the new objects; tables include their types
create or replace function _pgqueue.revoke_defaults(p_new oid[]) returns void
language plpgsql as $$
declare
    v_new    oid[] := p_new || array(select reltype from pg_class where oid = any (p_new));
    v_revoke text;
begin
    for v_revoke in
        select format('revoke all on %s %s from %s', k.kind,
                      string_agg(substr(g.object, length(k.kind) + 2), ', ' order by g.oid), g.grantee)
        from _pgqueue.grants() g cross join lateral (select split_part(g.object, ' ', 1) as kind) k
        where g.oid = any (v_new) group by k.kind, g.grantee order by k.kind, g.grantee
    loop
        execute v_revoke;
    end loop;
end $$;

-- The grants that this project did not make, and the sessions without rights in the queue that hold its locks: for
-- pgqueue doctor. Any role that can connect can take advisory locks (base/locks.sql).
create or replace function _pgqueue.foreign_rights() returns table (what text, advice text)
language sql stable as $$
    select format('%s may %s %s', g.grantee, g.privileges, g.object),
           format('revoke all on %s from %s', g.object, g.grantee)
    from _pgqueue.grants() g
    where g.grantee <> all (select quote_ident(r) from unnest(_pgqueue.group_roles()) r)
      and not (g.grantee = 'pg_monitor' and g.object ~ '^[a-z]+ pgmq([.]|$)')  -- pgmq._grant() made these
      -- the staged rows of a write, granted to its writer
      and not exists (select from pgqueue.table_writes w
                      where g.oid = to_regclass('pgqueue.staged_rows_' || w.write_no)
                        and g.grantee = quote_ident(w.role))
    union all
    select format('process %s (%s) holds a lock of the queue, but has no rights in it', a.pid, quote_ident(a.usename)),
           format('select pg_terminate_backend(%s)', a.pid)
    from (select distinct pid from pg_locks
          where locktype = 'advisory' and objsubid = 2 and granted
            and classid::bigint between _pgqueue.lock_class_consumer() - 1 and _pgqueue.lock_class_seqs()
            and database = (select oid from pg_database where datname = current_database())) l
    join pg_stat_activity a on a.pid = l.pid
    where not has_schema_privilege(a.usesysid, 'pgqueue', 'usage')
    union all
    -- (as the clients judge it: spark_pgqueue/postgres/owners.py)
    select format('other roles call no functions of %I, which owns the schema, but not the database', o.rolname),
           format('as an administrator: create role pgqueue_owner nologin; grant pgqueue_owner to %I', o.rolname)
    from pg_namespace n
    join pg_roles o on o.oid = n.nspowner
    join pg_database d on d.datname = current_database()
    where n.nspname = 'pgqueue' and not o.rolsuper and not pg_has_role(o.oid, d.datdba, 'member')
      and not exists (select from pg_roles r where r.rolname = 'pgqueue_owner' and pg_has_role(o.oid, r.oid, 'member'))
$$;

-- The same for all objects of an installation, except those in pgqueue.objects_before. Grants to PUBLIC are revoked
-- from these too.
create or replace function _pgqueue.revoke_install_defaults() returns void
language plpgsql as $$
begin
    perform _pgqueue.revoke_defaults(array(
        select g.oid from _pgqueue.grants() g
        where g.grantee = 'public'
           or g.oid <> all (string_to_array(current_setting('pgqueue.objects_before'), ' ')::oid[])));
end $$;

do $$
begin
    perform _pgqueue.revoke_install_defaults();
    perform _pgqueue.grant_roles();
end $$;
