-- schema version: 2
--
-- The schema, and what has to be true before anything is created in it.

do $$
begin
    if current_setting('server_version_num')::int < 150000 then
        raise exception 'pgqueue needs PostgreSQL 15 or later; this server is %', current_setting('server_version')
            using errcode = 'PQ011', hint = 'Upgrade the server.';
    end if;
end $$;

-- Two installers at once would trip over each other's "create".
set local lock_timeout = '60s';
do $$ begin perform pg_catalog.pg_advisory_xact_lock(1885826420, 0); end $$;
-- Behind a transaction that stays open it gives up, so that nobody waits behind it for long: run it again. Sooner than after the
-- second in which Postgres looks for deadlocks, so that it is never a worker who pays for one.
set local lock_timeout = '500ms';

-- Who prepares the schema prepares what the installer, often a superuser, then runs: triggers, defaults, casts. So nothing is
-- installed into a schema, or beside an object in it, that belongs to somebody else.
do $$
declare
    v_foreign text;
begin
    select format('%s, which belongs to %s', o.what, pg_catalog.pg_get_userbyid(o.owner)) into v_foreign
    from (select 'schema pgqueue' as what, nspowner as owner from pg_catalog.pg_namespace where nspname = 'pgqueue'
          union all
          select 'table pgqueue.' || relname, relowner from pg_catalog.pg_class
          where relnamespace = pg_catalog.to_regnamespace('pgqueue') and relkind not in ('i', 'I')
          union all
          select 'function pgqueue.' || proname, proowner from pg_catalog.pg_proc where pronamespace = pg_catalog.to_regnamespace('pgqueue')
          union all
          select 'type pgqueue.' || typname, typowner from pg_catalog.pg_type where typnamespace = pg_catalog.to_regnamespace('pgqueue')) o
    where o.owner <> (select oid from pg_catalog.pg_roles where rolname = current_user)
    limit 1;
    if v_foreign is not null then
        raise exception 'there is already the %, and the installing role is %', v_foreign, current_user
            using errcode = 'PQ011', hint = 'Install as the owner of the schema, or let its owner drop it. Nothing was changed.';
    end if;
end $$;

create schema if not exists pgqueue;

-- The functions that are there: those that are not replaced will be dropped, see version.sql.
do $$
begin
    perform set_config('pgqueue.functions_before', coalesce((select string_agg(format('%s/%s/%s', oid, xmin, ctid), ' ')
                                                             from pg_proc where pronamespace = 'pgqueue'::regnamespace), ''), true);
end $$;

create table if not exists pgqueue.installed (
    version      int         not null primary key,
    installed_at timestamptz not null default clock_timestamp()
);

do $$
begin
    if (select max(version) from pgqueue.installed) > 2 then
        raise exception 'the schema pgqueue is version %, newer than this installer (version 2)',
                        (select max(version) from pgqueue.installed)
            using errcode = 'PQ011', hint = 'Install the newer spark-pgqueue; nothing was changed.';
    end if;
end $$;
