-- Which version this is, and who may use it: nobody, until the owner grants it.

-- The version of this schema. Locks nothing.
create or replace function pgqueue.schema_version() returns int language sql stable
as $$ select max(version) from pgqueue.installed $$;

insert into pgqueue.installed (version) values (2) on conflict do nothing;

revoke all on all functions in schema pgqueue from public;
