-- The schemas, and the checks before anything is created in them.

-- The version of this schema: only here and in CHANGELOG.md.
set local pgqueue.version = 3;

-- An upgrade may take longer than the timeouts of the role or the database, which would cancel each attempt.
do $$ begin
    perform set_config(name, '0', true) from pg_settings
    where name in ('statement_timeout', 'transaction_timeout');  -- the latter since PostgreSQL 17
end $$;

do $$
begin
    if current_setting('server_version_num')::int < 150000 then
        raise exception 'pgqueue requires PostgreSQL 15 or later; this server is %', current_setting('server_version')
            using errcode = 'PQ011', hint = 'Upgrade the server.';
    end if;
end $$;

-- Two concurrent installers would fail at each other's "create".
set local lock_timeout = '60s';
do $$ begin perform pg_catalog.pg_advisory_xact_lock(1885826420, 0); end $$;  -- lock: install
-- If a transaction stays open, the installer fails, so that other sessions do not queue behind it for long: run it
-- again. The timeout is shorter than deadlock_timeout (1 s), so that Postgres never ends a worker's transaction as a
-- deadlock.
set local lock_timeout = '500ms';

-- The existing objects, also of the schema pgmq: new ones lose the grants of default privileges, see roles.sql. And the
-- existing functions: those that are not replaced are dropped, see version.sql.
do $$
declare
    v_schemas oid[] := array(select oid from pg_namespace where nspname in ('pgqueue', '_pgqueue'));
begin
    perform set_config('pgqueue.objects_before',
                       (select coalesce(string_agg(o.oid::text, ' '), '')
                        from (select oid, oid as home from pg_namespace
                              union all select oid, relnamespace from pg_class
                              union all select oid, pronamespace from pg_proc
                              union all select oid, typnamespace from pg_type) o
                        where o.home = any (v_schemas || to_regnamespace('pgmq')::oid)), true);
    perform set_config('pgqueue.functions_before',
                       (select coalesce(string_agg(format('%s/%s/%s', oid, xmin, ctid), ' '), '') from pg_proc
                        where pronamespace = any (v_schemas)), true);
end $$;

-- Another owner of the schema could prepare triggers, defaults and casts that the installer, often a superuser, would
-- run. So nothing is installed into a schema that belongs to another role, or has an object of another role. Nor
-- into a schema of another project, whose functions would be dropped (version.sql): one that has objects, but not the
-- table that each version of this project has. pgqueue has the tables, and the public functions and views; _pgqueue has
-- the internal functions.
do $$
declare
    v_there     name[] := array(select nspname from pg_catalog.pg_namespace where nspname in ('pgqueue', '_pgqueue'));
    v_role      oid := (select oid from pg_catalog.pg_roles where rolname = current_user);
    v_installed boolean := exists (select from pg_catalog.pg_attribute
                                   where attrelid = to_regclass('pgqueue.installed') and attname = 'installed_at');
    v_found     record;
begin
    select o.what, o.owner into v_found
    from pg_catalog.pg_namespace n
    cross join lateral (
        select 'schema ' || n.nspname as what, n.nspowner as owner
        union all
        select format('table %s.%s', n.nspname, relname), relowner from pg_catalog.pg_class
        where relnamespace = n.oid and relkind not in ('i', 'I')
        union all
        select format('function %s.%s', n.nspname, proname), proowner from pg_catalog.pg_proc where pronamespace = n.oid
        union all
        select format('type %s.%s', n.nspname, typname), typowner from pg_catalog.pg_type where typnamespace = n.oid) o
    where n.nspname in ('pgqueue', '_pgqueue')
      and (o.owner <> v_role or (not v_installed and o.what <> 'schema ' || n.nspname))
    order by o.owner = v_role limit 1;
    if v_found.owner <> v_role then
        raise exception '%, which belongs to %, already exists, but the installing role is %', v_found.what,
                        pg_catalog.pg_get_userbyid(v_found.owner), current_user
            using errcode = 'PQ011',
                  hint = 'Install as the owner of the schema, or let its owner drop it. Nothing was changed.';
    elsif v_found.owner is not null then
        raise exception '% already exists, but no queue is installed: its schema belongs to another project, or was '
                        'removed in part', v_found.what
            using errcode = 'PQ011',
                  hint = 'Install into another database, or rename that schema. If nothing in it is needed: drop '
                         'schema if exists pgqueue, _pgqueue cascade. Nothing was changed.';
    end if;
    -- without "if not exists": another role may create it at this moment, and its owner would not be checked
    if 'pgqueue' <> all (v_there) then
        create schema pgqueue;
    end if;
    if '_pgqueue' <> all (v_there) then
        create schema _pgqueue;
    end if;
end $$;

create table if not exists pgqueue.installed (
    version      int         not null primary key,
    installed_at timestamptz not null default clock_timestamp()
);

do $$
begin
    if (select max(version) from pgqueue.installed) > current_setting('pgqueue.version')::int then
        raise exception 'the schema pgqueue is version %, newer than this installer (version %)',
                        (select max(version) from pgqueue.installed), current_setting('pgqueue.version')
            using errcode = 'PQ011', hint = 'Upgrade spark-pgqueue. Nothing was changed.';
    end if;
end $$;
