-- Before an installation makes anything: the objects that there are in the schemas of this project. The others are made
-- by it, and lose what default privileges grant, see roles.sql.
do $$
begin
    perform set_config('pgqueue.objects_before',
                       (select coalesce(string_agg(o.oid::text, ' '), '')
                        from (select oid, oid as home from pg_namespace
                              union all select oid, relnamespace from pg_class
                              union all select oid, pronamespace from pg_proc
                              union all select oid, typnamespace from pg_type) o
                        where o.home in (select oid from pg_namespace
                                         where nspname in ('pgqueue', '_pgqueue', 'pgmq'))), true);
end $$;
