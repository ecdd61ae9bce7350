-- Looking at tables that are captured.

-- One row per table that is captured.
do $view$ begin perform _pgqueue.make_view('captures', $query$
    select s.name as stream, format('%I.%I', n.nspname, c.relname) as "table",
           pg_get_userbyid(c.relowner)::text as owner,
           obj_description(t.oid, 'pg_trigger') as options,
           not exists (select from pg_catalog.pg_trigger x
                       where x.tgrelid = c.oid and x.tgname = format('pgqueue_%s_delete', s.stream_id)) as outbox,
           (select count(*) from pg_partition_tree(c.oid) r
            join pg_catalog.pg_class p on p.oid = r.relid and p.relkind in ('r', 'p')
            where r.level > 0 and not _pgqueue.is_captured(r.relid, s.stream_id)) as uncaptured_partitions
    from pgqueue.captured d
    join pgqueue.streams s using (stream_id)
    join pg_catalog.pg_class c on c.oid = d.root
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    join pg_catalog.pg_trigger t on t.oid = _pgqueue.capture_trigger(d.root, d.stream_id)
    where d.relation = d.root
$query$); end $view$;
