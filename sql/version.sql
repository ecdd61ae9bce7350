-- The version of the schema.

-- Returns the version of this schema. Locks nothing.
create or replace function pgqueue.schema_version() returns int
language sql stable as $$ select max(version) from pgqueue.installed $$;

-- Consumers and streams without a given value of a setting get its default of this version.
do $$
begin
    perform _pgqueue.set_consumer(consumer_id, changed)
    from pgqueue.consumers c
    cross join lateral _pgqueue.changed_defaults(
        to_jsonb(c), to_jsonb(jsonb_populate_record(c, _pgqueue.defaults('consumer')))) changed
    where changed <> '{}';
    perform _pgqueue.set_stream(stream_id, changed)
    from pgqueue.streams s
    cross join lateral _pgqueue.changed_defaults(
        to_jsonb(s), to_jsonb(jsonb_populate_record(s, _pgqueue.defaults('stream')))) changed
    where changed <> '{}';
end $$;

insert into pgqueue.installed (version) values (current_setting('pgqueue.version')::int) on conflict do nothing;

-- Drops functions of earlier versions that this installation has not replaced: with them, calls could be ambiguous, and
-- old functions have old rules. (There are no functions of other roles: see schema.sql.)
do $$
declare
    v_function text;
begin
    for v_function in
        select p.oid::regprocedure::text
        from unnest(string_to_array(current_setting('pgqueue.functions_before'), ' ')) b
        join pg_proc p on format('%s/%s/%s', p.oid, p.xmin, p.ctid) = b
    loop
        execute 'drop routine ' || v_function;
    end loop;
end $$;
