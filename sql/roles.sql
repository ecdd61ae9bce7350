-- Who may do what. Nobody may do anything until the owner grants it.
--
-- Functions that people call run with the rights of their owner, so that nobody needs rights on the tables behind
-- them, and find functions and operators in pg_catalog alone (function_settings.sql). So the right to call a function
-- is all that a role needs, except for
--   * the messages of a stream, which Spark's tasks write and read by COPY. A producer writes into pgqueue.written,
--     with the numbers alone that its transaction reserved, and reads nothing (queue/send/written.sql). Nobody sees a
--     written message until a function publishes it;
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

-- What create_roles does besides. The schema pgmq gets its grants, if sql/pgmq/install.sql made it and it belongs to
-- the owner of this schema: another's functions would run with the rights of the caller. And clients call functions of
-- a schema only where they trust its owner (spark_pgqueue/postgres/owners.py): an owner that is no superuser, and not
-- the database's owner, needs to be in the role pgqueue_owner.
create or replace function _pgqueue.complete_roles() returns void
language plpgsql as $$
declare
    v_owner oid := (select nspowner from pg_namespace where nspname = 'pgqueue');
    v_there boolean := exists (select from pg_roles where rolname = 'pgqueue_owner');
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
        if not v_there then
            create role pgqueue_owner nologin;
        end if;
        if not pg_has_role(v_owner, 'pgqueue_owner', 'member') then
            execute format('grant pgqueue_owner to %I', pg_get_userbyid(v_owner));
        end if;
    exception when insufficient_privilege then
        raise warning 'clients of other roles do not trust %: it does not own the database', pg_get_userbyid(v_owner)
            using hint = format('A superuser, or a role with CREATEROLE%s, runs: %sgrant pgqueue_owner to %I.',
                                case when v_there then ' that administers pgqueue_owner' end,
                                case when not v_there then 'create role pgqueue_owner nologin; ' end,
                                pg_get_userbyid(v_owner));
    end;
end $$;

-- Makes the group roles pgqueue_producer, _consumer, _observer and _admin, and grants them what they need. Roles that
-- exist already stay. The grants hold in all streams that there are and will be:  grant pgqueue_producer to app. Roles
-- belong to the server: another database with this schema has the same ones, and their members count here too. The
-- owner of the schema becomes a member of pgqueue_owner if clients would not trust it otherwise. Returns
-- the roles and their members. Runs with the rights of the caller, who owns the schema, and may create the roles that
-- are missing. Errors: PQ006 when a role of such a name can do more than belong to a group; 42501 when the caller may
-- not create roles. Locks: none that others wait for.
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
            raise exception 'there is already a role %, and it is not just a group: '
                            'it may log in or has other attributes', role
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

-- Grants the group roles of this database what they need, and takes from them what they do not need any more.
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

-- Grants what the group roles need of a stream, if this database uses them, and nothing to anybody else.
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

-- The schemas of this project in this database; pgmq only if it is the face of the queue, and not pgmq itself.
create or replace function _pgqueue.schemas() returns setof oid
language sql stable as $$
    select n.oid from pg_namespace n
    where n.nspname in ('pgqueue', '_pgqueue')
       or (n.nspname = 'pgmq' and obj_description(n.oid, 'pg_namespace') like 'spark-pgqueue:%'
           and n.nspowner = (select nspowner from pg_namespace where nspname = 'pgqueue'))
$$;

-- The grants on the schemas and on what is in them, but for those of the owner. object and grantee are quoted.
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

-- Takes away what Postgres grants by itself when an object is made: to PUBLIC, and by the default privileges of the
-- owner (alter default privileges), which may be meant for quite other tables. What somebody grants later stays, but
-- for grants to PUBLIC.
--   p_new  the objects that were just made; tables stand for their types too
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

-- The grants that this project did not make, and the sessions that hold locks of the queue and have no right in it: for
-- pgqueue doctor. Locks of a class and an id can be held by anybody who may connect (base/locks.sql).
create or replace function _pgqueue.foreign_rights() returns table (what text, advice text)
language sql stable as $$
    select format('%s may %s %s', g.grantee, g.privileges, g.object),
           format('revoke all on %s from %s', g.object, g.grantee)
    from _pgqueue.grants() g
    where g.grantee <> all (select quote_ident(r) from unnest(_pgqueue.group_roles()) r)
      and not (g.grantee = 'pg_monitor' and g.object ~ '^[a-z]+ pgmq([.]|$)')  -- pgmq._grant() made these
      -- the staged rows of a write, for its writer
      and not exists (select from pgqueue.table_writes w
                      where g.oid = to_regclass('pgqueue.staged_rows_' || w.write_no)
                        and g.grantee = quote_ident(w.role))
    union all
    select format('process %s (%s) holds a lock of the queue, and has no right in it', a.pid, quote_ident(a.usename)),
           format('select pg_terminate_backend(%s)', a.pid)
    from (select distinct pid from pg_locks
          where locktype = 'advisory' and objsubid = 2 and granted
            and classid::bigint between _pgqueue.lock_class_consumer() - 1 and _pgqueue.lock_class_seqs()
            and database = (select oid from pg_database where datname = current_database())) l
    join pg_stat_activity a on a.pid = l.pid
    where not has_schema_privilege(a.usesysid, 'pgqueue', 'usage')
$$;

-- The same for all that an installation has made: pgqueue.objects_before has what was there. PUBLIC loses its grants on
-- that, too.
create or replace function _pgqueue.revoke_made() returns void
language plpgsql as $$
begin
    perform _pgqueue.revoke_defaults(array(
        select g.oid from _pgqueue.grants() g
        where g.grantee = 'public'
           or g.oid <> all (string_to_array(current_setting('pgqueue.objects_before'), ' ')::oid[])));
end $$;

do $$
begin
    perform _pgqueue.revoke_made();
    perform _pgqueue.grant_roles();
end $$;
