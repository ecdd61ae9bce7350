-- The functions and triggers of captured tables: the statements that create and drop them, and lookups in the catalog.
--
-- capture() executes the statements, as the table's owner; so does capture_partitions(). Names of tables and columns in
-- statements are always quoted: by format's %I and %L, or by fill_template(), whose parts are quoted.
--
-- The other functions name the table's columns in parsed bodies (begin atomic). So they follow a column that is
-- renamed, and dropping a column that they need is an error. Their argument is a domain over the table's row type. The
-- domain keeps its name when the table is renamed, and no function of another role can match it better.

-- The captured tables, and their partitions that are captured for direct writes. Only note_captures() writes rows,
-- after a check of the triggers, because any role can give a trigger such a name. A table is identified by its OID,
-- which a dump writes as the table's name. A row without its table or trigger is ignored; maintain() deletes it.
-- in use: select format('the capture of table %s', d.root) from pgqueue.captured d
--     join pg_trigger t on t.tgrelid = d.root and t.tgname = format('pgqueue_%s_insert', d.stream_id)
--     where d.relation = d.root
-- on drop_stream
create table if not exists pgqueue.captured (
    relation  regclass not null,
    stream_id int      not null references pgqueue.streams,
    root      regclass not null,  -- the captured table; of a partition its captured table
    primary key (relation, stream_id)
);

-- Columns as SQL, each in a format with its name as %1$I or %1$L.
create or replace function _pgqueue.each_column(p_columns text[], p_format text, p_between text) returns text
language sql immutable as $$
    select string_agg(format(p_format, k), p_between order by i) from unnest(p_columns) with ordinality k (k, i)
$$;

-- The columns of a table, in their order.
create or replace function _pgqueue.column_names(p_table regclass) returns name[]
language sql stable as $$
    select array_agg(attname order by attnum) from pg_attribute
    where attrelid = p_table and attnum > 0 and not attisdropped
$$;

-- The columns of a table's primary key, in their order; null: it has none.
create or replace function _pgqueue.primary_key(p_table regclass) returns text[]
language sql stable as $$
    select array_agg(a.attname::text order by k.i)
    from pg_index x
    cross join lateral unnest(x.indkey) with ordinality k (attnum, i)
    join pg_attribute a on a.attrelid = x.indrelid and a.attnum = k.attnum
    where x.indrelid = p_table and x.indisprimary
$$;

-- The first schema of a table and its partitions whose owner may not act as the table's owner; no row: there is none.
-- The owner of a schema may drop any function in it, create another with its name, or rename the schema. So it could
-- have the triggers of a captured table call its own functions, with the rights of the table's owner.
-- (pg_database_owner stands for the owner of the database.)
create or replace function _pgqueue.foreign_schema(p_table regclass) returns table (name name, owner name)
language sql stable as $$
    select n.nspname, pg_get_userbyid(o.owner)
    from pg_class t
    cross join lateral (select t.oid union select relid from pg_partition_tree(t.oid)) r (relid)
    join pg_class c on c.oid = r.relid and c.relkind in ('r', 'p')
    join pg_namespace n on n.oid = c.relnamespace
    cross join lateral (select case n.nspowner
                                   when 'pg_database_owner'::regrole
                                       then (select datdba from pg_database where datname = current_database())
                                   else n.nspowner end as owner) o
    where t.oid = p_table and not pg_has_role(o.owner, t.relowner, 'member')  -- (a superuser is a member of all)
    order by n.oid limit 1
$$;

-- The names of the objects of a capture, for fill_template(); and the OID of their owner.
--   p_table  the captured table
--   p_name   the name of the triggers' function, without its schema
create or replace function _pgqueue.object_names(p_table regclass, p_name text) returns jsonb
language sql stable as $$
    select jsonb_object_agg(n.part, _pgqueue.sql_name(c.relnamespace, n.name))
           || jsonb_build_object('relation', _pgqueue.sql_name(p_table), 'owner', c.relowner::bigint)
    from pg_class c,
         (values ('run', p_name), ('type', p_name || '_type'), ('key', p_name || '_key'), ('row', p_name || '_row'),
                 ('now', p_name || '_now'), ('done', p_name || '_done')) n (part, name)
    where c.oid = p_table group by c.relowner
$$;

-- The statements that create the functions of a captured table, which only its owner may execute; or those of a
-- partition whose columns have another order, because Postgres maps the rows of a trigger to another row type by the
-- position of columns.
--   p_names   the names of these functions; p_base: those of the table's functions
--   the rest as in capture_script; p_primary: the columns of the primary key; null: none
-- More than 60 lines: a statement for each function, in their order.
create or replace function _pgqueue.function_statements(p_names jsonb, p_base jsonb, p_stream_id int, p_keys text[],
                                                        p_columns text[], p_primary text[], p_old boolean,
                                                        p_outbox boolean) returns setof text
language plpgsql stable as $$
declare
    v_same text := _pgqueue.each_column(p_primary, 'x.%1$I = ($1).%1$I', ' and ');
    v_part text;
    -- a role that may execute the triggers' function could publish other rows, with a trigger on another table
    v_from text := concat_ws(', ', 'public', (
        select string_agg(distinct quote_ident(pg_get_userbyid(a.grantee)), ', ')
        from pg_default_acl d cross join aclexplode(d.defaclacl) a
        where d.defaclobjtype = 'f' and a.grantee not in (0, d.defaclrole)
          and d.defaclrole = (p_base -> 'owner')::bigint::oid));
begin
    return next _pgqueue.fill_template('create domain {type} as {relation}', p_names);
    return next _pgqueue.fill_template(
        'create function {key}({type}) returns text language sql stable begin atomic select ', p_names)
        || case cardinality(p_keys)
               when 0 then 'null::text'
               when 1 then format('($1).%I::text', p_keys[1])
               else format('json_build_array(%s)::text', _pgqueue.each_column(p_keys, '($1).%1$I', ', ')) end
        || '; end';
    -- up to 50 columns are a plain expression, which is inlined into the trigger's queries; a call has at most 100
    -- arguments
    return next _pgqueue.fill_template(
        'create function {row}({type}) returns json language sql stable begin atomic select ', p_names)
        || case when p_columns is null then 'row_to_json($1)'
                when cardinality(p_columns) <= 50 then
                    format('json_build_object(%s)', _pgqueue.each_column(p_columns, '%1$L, ($1).%1$I', ', '))
                else format('(select row_to_json(r.*) from (select %s) r)',
                            _pgqueue.each_column(p_columns, '($1).%1$I', ', ')) end || '; end';
    if p_primary is not null then
        -- the current row with this primary key, if it also has this key
        return next _pgqueue.fill_template(
            'create function {now}({type}) returns json language sql stable begin atomic select ', p_names)
            || _pgqueue.fill_template('{row}((x.*)::{type}) from {relation} x where ', p_base)
            || concat_ws(' and ', v_same,
                         _pgqueue.each_column(array(select k from unnest(p_keys) k where k <> all (p_primary)),
                                              'x.%1$I is not distinct from ($1).%1$I', ' and ')) || '; end';
    end if;
    if p_outbox then
        return next _pgqueue.fill_template(
            'create function {done}({type}) returns void language sql begin atomic delete from {relation} x where ',
            p_names) || v_same || '; end';
    end if;
    return next _pgqueue.fill_template('create function {run}() returns trigger language plpgsql security definer '
        -- with row_security, a policy that applies to the owner would silently hide rows from {now}
        'set search_path = pg_catalog, pg_temp set row_security = off set datestyle = ''ISO, YMD'' '
        'set timezone = ''UTC'' set intervalstyle = ''iso_8601'' set extra_float_digits = 1 '
        'set bytea_output = ''hex''', p_names)
        -- a plan for a statement of one row is cached, and must also suit a million rows
        || case when p_outbox then '' else ' set enable_nestloop = off' end
        || format(' as %L', _pgqueue.trigger_body(p_names, p_stream_id, p_base ->> 'relation', p_old, p_outbox,
                                                  p_primary is not null));
    foreach v_part in array array['{run}()', '{key}({type})', '{row}({type})']
                            || case when p_primary is not null then array['{now}({type})'] else '{}' end
                            || case when p_outbox then array['{done}({type})'] else '{}' end loop
        return next _pgqueue.fill_template('revoke all on function ' || v_part, p_names) || ' from ' || v_from;
    end loop;
end $$;

-- The statements that create the triggers of a captured table; or of a partition of it, for direct writes. The truncate
-- of a table is one message; that of a partition, a delete for each row of its leaves.
--   p_function  of the triggers, as SQL
create or replace function _pgqueue.trigger_statements(p_relation regclass, p_table regclass, p_stream_id int,
                                                       p_function text, p_outbox boolean) returns setof text
language sql stable as $$
    -- lock: captured
    select format('create trigger pgqueue_%s_%s %s on %s %s for each statement execute function %s(%s)', p_stream_id,
                  t.kind, t.event, _pgqueue.sql_name(p_relation), t.rows, p_function,
                  case when p_relation <> p_table then quote_literal('partition') end)
    from (values ('insert',   'after insert',    'referencing new table as new_rows'),
                 ('update',   'after update',    'referencing old table as old_rows new table as new_rows'),
                 ('delete',   'after delete',    'referencing old table as old_rows'),
                 ('truncate', 'before truncate', '')) t (kind, event, rows)
    join pg_class c on c.oid = p_relation
    where (t.kind = 'insert' or p_outbox is not true)
      and (t.kind <> 'truncate' or c.relkind = 'r' or p_relation = p_table)
$$;

-- The OID of the trigger that captures a kind of statement, of a table or a partition; null: there is none. Any role
-- can give a trigger this name. An outbox only has the one for inserts.
create or replace function _pgqueue.capture_trigger(p_relation regclass, p_stream_id int, p_kind text default 'insert')
returns oid language sql stable as $$
    select oid from pg_trigger where tgrelid = p_relation and tgname = format('pgqueue_%s_%s', p_stream_id, p_kind)
$$;

-- Whether a table is captured to a stream; or a partition, for direct writes.
create or replace function _pgqueue.is_captured(p_table regclass, p_stream_id int) returns boolean
language sql stable as $$
    select _pgqueue.capture_trigger(p_table, p_stream_id) is not null
       and exists (select from pgqueue.captured where relation = p_table and stream_id = p_stream_id)
$$;

-- The triggers of a captured table and its partitions, including detached ones; of a partition only its own. And those
-- of captures that this database does not know: the table was restored without its queue, and their numbers are those
-- of streams elsewhere, maybe of another one here.
create or replace function _pgqueue.captured_triggers(p_table regclass, p_stream_id int) returns setof pg_trigger
language sql stable as $$
    select t.*
    from pgqueue.captured d join pg_trigger t on t.tgrelid = d.relation
    where d.stream_id = p_stream_id and p_table in (d.relation, d.root)
      and t.tgname ~ format('^pgqueue_%s_(insert|update|delete|truncate)$', p_stream_id)
    union all
    select t.*
    from pg_class c
    cross join lateral (select c.oid union select relid from pg_partition_tree(c.oid)) r (relid)
    join pg_trigger t on t.tgrelid = r.relid and t.tgname ~ '^pgqueue_[0-9]+_(insert|update|delete|truncate)$'
    join pg_proc p on p.oid = t.tgfoid and p.proowner = c.relowner and p.prosrc like '%Made by pgqueue.capture.%'
    where c.oid = p_table
      and not exists (select from pgqueue.captured d
                      where d.relation = t.tgrelid and d.stream_id::text = split_part(t.tgname, '_', 2))
$$;

-- The OIDs of the table owner's functions that only these triggers need. A partition has its own functions, or those of
-- its table.
create or replace function _pgqueue.captured_functions(p_table regclass, p_stream_id int) returns setof oid
language sql stable as $$
    with run as (
        select p.oid, p.proname, p.pronamespace, p.proowner
        from pg_proc p join pg_class c on c.oid = p_table and p.proowner = c.relowner
        where p.oid in (select tgfoid from _pgqueue.captured_triggers(p_table, p_stream_id))
          and not exists (select from pg_trigger x
                          where x.tgfoid = p.oid
                            and x.oid not in (select oid from _pgqueue.captured_triggers(p_table, p_stream_id)))
    )
    select oid from run
    union
    select f.oid
    from run
    join pg_type t on t.typnamespace = run.pronamespace and t.typname = run.proname || '_type'
    join pg_proc f on f.pronamespace = run.pronamespace and f.proargtypes[0] = t.oid and f.pronargs = 1
                  and f.proowner = run.proowner
                  and f.proname in (run.proname || '_key', run.proname || '_row', run.proname || '_now',
                                    run.proname || '_done')
$$;

-- The statements that drop these triggers and functions; of a partition only its own. None if it is not captured.
create or replace function _pgqueue.drop_statements(p_table regclass, p_stream_id int) returns setof text
language plpgsql stable as $$
declare
    v_functions oid[] := array(select _pgqueue.captured_functions(p_table, p_stream_id));
begin
    return query
        select format('drop trigger %I on %s', tgname, _pgqueue.sql_name(tgrelid))
        from _pgqueue.captured_triggers(p_table, p_stream_id) order by tgrelid, tgname;
    if v_functions <> '{}' then
        -- in one statement, because some call others
        return next (select 'drop function ' || string_agg(format('%s(%s)',
                                _pgqueue.sql_name(p.pronamespace, p.proname),
                                _pgqueue.sql_name(t.typnamespace, t.typname)), ', ')
                     from pg_proc p left join pg_type t on t.oid = p.proargtypes[0] where p.oid = any (v_functions));
        return query
            select distinct 'drop domain ' || _pgqueue.sql_name(t.typnamespace, t.typname)
            from pg_proc p join pg_type t on t.oid = p.proargtypes[0] where p.oid = any (v_functions);
    end if;
end $$;

-- One row per captured table.
do $view$ begin perform _pgqueue.make_view('captures', $query$
    select s.name as stream, format('%I.%I', n.nspname, c.relname) as "table",
           pg_get_userbyid(c.relowner)::text as owner,
           obj_description(t.oid, 'pg_trigger') as options,
           _pgqueue.capture_trigger(c.oid, s.stream_id, 'delete') is null as outbox,
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
