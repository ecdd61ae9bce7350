-- Who may use it, and which version this is.

revoke all on all functions in schema pgqueue from public;

create or replace function pgqueue.schema_version() returns int language sql stable
    set search_path = pg_catalog, pg_temp
as $$ select max(version) from pgqueue.installed $$;

insert into pgqueue.installed (version) values (1) on conflict do nothing;
