-- schema version: 1
--
-- The schema, and the rule that an older installer never touches a newer schema.

do $$
begin
    if current_setting('server_version_num')::int < 150000 then
        raise exception 'pgqueue needs PostgreSQL 15 or later; this server is %', current_setting('server_version')
            using errcode = 'PQ011', hint = 'Upgrade the server.';
    end if;
end $$;

-- two installers at once would trip over each other's "create"
do $$ begin perform pg_advisory_xact_lock(hashtextextended('pgqueue install', 0)); end $$;

create schema if not exists pgqueue;

create table if not exists pgqueue.installed (
    version      int         not null primary key,
    installed_at timestamptz not null default clock_timestamp()
);

do $$
begin
    if (select max(version) from pgqueue.installed) > 1 then
        raise exception 'the schema pgqueue is version %, newer than this installer (version 1)',
                        (select max(version) from pgqueue.installed)
            using errcode = 'PQ011', hint = 'Install the newer spark-pgqueue; nothing was changed.';
    end if;
end $$;
