-- The target of a write to a table: checks of its columns, and the plan for the statements.
--
-- A plan has all that the statements need, as JSON. Plans of the same table, columns and options are equal unless the
-- table was changed. Tasks stage rows with one plan; the commit computes another, and compares them.

-- The table with a name. The name has its schema, and is quoted as in SQL. Errors: PQ003 for a table that accepts no
-- rows, or whose rows would not be durable when the batch is recorded.
create or replace function _pgqueue.target_table(p_table text) returns pg_class
language plpgsql stable as $$
declare
    v_name   text[];
    v_table  pg_class;
    v_reason text;
begin
    begin
        v_name := parse_ident(p_table);
    exception when invalid_parameter_value then
        null;
    end;
    if cardinality(v_name) is distinct from 2 then
        raise exception 'p_table must be a table with its schema, quoted as in SQL, such as public.bills, not %',
                        coalesce(quote_literal(p_table), 'null') using errcode = 'PQ003', column = 'p_table';
    end if;
    select c.* into v_table from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = v_name[1] and c.relname = v_name[2] and c.relkind not in ('i', 'I', 'S', 'c', 't');
    if v_table.oid is null then
        raise exception 'p_table must be a table of this database, which has no %',
                        format('%I.%I', v_name[1], v_name[2])
            using errcode = 'PQ003', column = 'p_table',
                  hint = 'Create it. A name that is not in lower case needs quotes: public."Bills".';
    end if;
    v_reason := case
        when v_name[1] in ('pgqueue', '_pgqueue') then 'is a table of the queue: option stream sends messages'
        when v_name[1] in ('pg_catalog', 'information_schema') then 'is a system table'
        when v_table.relkind = 'f' then 'is a foreign table, which would not commit with this server'
        when v_table.relkind not in ('r', 'p', 'v') then 'is not a table'
        when v_table.relpersistence = 't' then 'is a temporary table, which other sessions cannot see'
        when v_table.relpersistence = 'u' then 'is unlogged: a crash would empty it after a batch is recorded'
        when exists (select from pg_partition_tree(v_table.oid) p join pg_class c on c.oid = p.relid
                     where c.relkind = 'f' or c.relpersistence = 'u') then 'has a partition that is unlogged or foreign'
        when v_table.relkind = 'v' and pg_relation_is_updatable(v_table.oid, true) & 8 = 0
            then 'is a view that accepts no rows' end;
    if v_reason is not null then
        raise exception 'p_table cannot be written by a query: % %', p_table, v_reason
            using errcode = 'PQ003', column = 'p_table';
    end if;
    return v_table;
end $$;

-- The number of a column in a list of names: of the same name, or of the only one that differs only in case; null:
-- there is none.
create or replace function _pgqueue.column_number(p_name text, p_names text[]) returns int
language sql immutable as $$
    select coalesce(array_position(p_names, p_name),
                    (select min(n)::int from unnest(p_names) with ordinality u (name, n)
                     where lower(name) = lower(p_name) having count(*) = 1))
$$;

-- A column of a write: its staged type, and the conversion to the table's column. Numbers and times get their precision
-- before rows are compared. Text gets no length, because a cast truncates silently and an insert does not.
--   p_use        p_merge_keys or p_sequence_by, if it names the column; else null
--   p_may_round  whether p_allow_rounding names it
-- Returns an object with name, attnum, staged, cast, which is null where the types are the same, and changes, of
-- text_changes(). Errors: PQ003 for a column that the table has not, does not take, or would round.
create or replace function _pgqueue.written_column(p_table pg_class, p_name text, p_type text, p_use text,
                                                   p_may_round boolean) returns jsonb
language plpgsql stable as $$
declare
    v_names  text[] := array(select attname::text from pg_attribute
                             where attrelid = p_table.oid and attnum > 0 and not attisdropped order by attnum);
    v_staged text := _pgqueue.staged_type(p_type);
    v_found  pg_attribute;
    v_to     record;
    v_fit    text;
begin
    select * into v_found from pg_attribute
    where attrelid = p_table.oid and attname = v_names[_pgqueue.column_number(p_name, v_names)];
    if v_staged is null then
        raise exception 'column % is %, which no table column accepts', p_name, p_type
            using errcode = 'PQ003', column = 'p_columns',
                  hint = 'Select to_json(...) or cast(... as string): a string is converted to the type of the column.';
    elsif v_found.attnum is null then
        raise exception 'table % has no column %: it has %', _pgqueue.sql_name(p_table.oid), p_name,
                        array_to_string(v_names, ', ')
            using errcode = 'PQ003', column = 'p_columns', hint = 'Drop the column, or rename it.';
    elsif v_found.attgenerated <> '' or v_found.attidentity = 'a' then
        raise exception 'column % of table % is generated, and accepts no values', p_name,
                        _pgqueue.sql_name(p_table.oid)
            using errcode = 'PQ003', column = 'p_columns', hint = 'Drop the column from the DataFrame.';
    end if;
    v_to := _pgqueue.stored_type(v_found.atttypid, v_found.atttypmod);
    v_fit := _pgqueue.fit(p_type, v_to.o_item, v_to.o_typmod, v_to.o_dims);
    if v_fit is null then
        raise exception 'column % is %, and must fit column % of table %, which is %', p_name, p_type, v_found.attname,
                        _pgqueue.sql_name(p_table.oid), format_type(v_found.atttypid, v_found.atttypmod)
            using errcode = 'PQ003', column = 'p_columns',
                  hint = format('Cast it in Spark to the type of the column. Conversions that would change values are '
                                'refused. Any string is converted to the type of the column: cast(%s as string).',
                                p_name);
    elsif v_fit = 'rounds' and (p_use is not null or not p_may_round) then
        raise exception 'column % is %, and column % of table % is %, which would round its values%', p_name, p_type,
                        v_found.attname, _pgqueue.sql_name(p_table.oid), v_to.o_full,
                        case p_use when 'p_merge_keys' then ': two keys of p_merge_keys could become one'
                                   when 'p_sequence_by' then ': with p_sequence_by, an older row could remain'
                                   else '' end
            using errcode = 'PQ003', column = concat_ws(', ', coalesce(p_use, 'p_columns'), 'p_allow_rounding'),
                  hint = format('Change the type of the column to %s. Or cast in Spark to a type whose values the '
                                'column preserves.', v_staged)
                         || case when p_use is null then format(' Or add %s to p_allow_rounding.', p_name)
                                 else ' p_allow_rounding does not apply to keys and sequences.' end;
    end if;
    return jsonb_build_object('name', v_found.attname, 'attnum', v_found.attnum, 'staged', v_staged)
        || jsonb_strip_nulls(jsonb_build_object(
               'cast', _pgqueue.written_cast(v_staged, v_to.o_full, v_to.o_base, v_to.o_item, v_to.o_dims),
               'changes', case when v_staged like 'text%' and (p_use is not null or not p_may_round)
                               then _pgqueue.text_changes(v_to.o_item, v_to.o_typmod, v_to.o_dims) end));
end $$;

-- How the values of a key are compared: as in the unique index of these columns. The operators have their schema,
-- because the search_path may lack that of an extension. For a view, which has no index, the types determine it, and
-- Postgres requires the index at the commit.
--   p_attnums  the columns
-- Returns for each column an object with equals, less and collate, a clause. Errors: PQ003 unless a unique index has
-- these columns, is not deferrable, and has all rows.
create or replace function _pgqueue.key_order(p_table pg_class, p_attnums int2[]) returns jsonb[]
language plpgsql stable as $$
declare
    v_index pg_index;
    v_there text;
begin
    select i.* into v_index from pg_index i
    where i.indrelid = p_table.oid and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null
      and i.indexprs is null and i.indnkeyatts = cardinality(p_attnums)
      and p_attnums <@ (i.indkey::int2[])[0:i.indnkeyatts - 1]
    order by i.indexrelid limit 1;
    if v_index.indexrelid is null and p_table.relkind <> 'v' then
        select string_agg(pg_get_indexdef(i.indexrelid)
                          || case when i.indimmediate then '' else ' (deferrable)' end, '; ' order by i.indexrelid)
        into v_there from pg_index i where i.indrelid = p_table.oid and i.indisunique;
        raise exception 'p_merge_keys must be the columns of a unique index of table % that is neither partial nor '
                        'deferrable; it has %', _pgqueue.sql_name(p_table.oid), coalesce(v_there, 'none')
            using errcode = 'PQ003', column = 'p_merge_keys',
                  hint = 'Name the columns of such an index, or create one: create unique index on ... (...).';
    end if;
    return array(
        select jsonb_build_object(
            'equals', _pgqueue.index_operator(c.opfamily, c.opcintype, 3),
            'less', _pgqueue.index_operator(c.opfamily, c.opcintype, 1),
            'collate', coalesce(' collate ' || (
                select _pgqueue.sql_name(l.collnamespace, l.collname) from pg_collation l
                where l.oid = coalesce(x.coll, f.attcollation)), ''))
        from unnest(p_attnums) with ordinality a (attnum, n)
        join pg_attribute f on f.attrelid = p_table.oid and f.attnum = a.attnum
        cross join lateral _pgqueue.stored_type(f.atttypid, -1) b
        left join unnest(v_index.indkey::int2[], v_index.indclass::oid[], v_index.indcollation::oid[])
                  x (attnum, opclass, coll) on x.attnum = a.attnum and x.opclass is not null
        left join lateral (
            select o.opcfamily as opfamily, o.opcintype from pg_opclass o
            where o.oid = x.opclass
               or (x.opclass is null and o.opcdefault and o.opcintype = b.o_base
                   and o.opcmethod = (select oid from pg_am where amname = 'btree'))) c on true
        order by a.n);
end $$;

-- An operator of a btree index, as SQL: 1 is less, 3 equals. Those of pg_catalog for an unknown family.
create or replace function _pgqueue.index_operator(p_family oid, p_type oid, p_strategy int) returns text
language sql stable as $$
    select coalesce(
        (select format('operator(%s.%s)', o.oprnamespace::regnamespace, o.oprname)
         from pg_amop m join pg_operator o on o.oid = m.amopopr
         where m.amopfamily = p_family and m.amopstrategy = p_strategy and m.amoplefttype = p_type
           and m.amoprighttype = p_type),
        case p_strategy when 1 then 'operator(pg_catalog.<)' else 'operator(pg_catalog.=)' end)
$$;

-- Raises 42501 unless a role may write the table: insert; for a merge also update, and select of all written columns,
-- which "on conflict" requires; to delete rows, delete.
create or replace function _pgqueue.check_rights(p_table pg_class, p_plan jsonb, p_role text) returns void
language plpgsql stable as $$
declare
    v_lacks text[] := array(
        select r.name from (values ('insert'), ('delete')) r (name)
        where (r.name = 'insert' or p_plan ? 'gone') and not has_table_privilege(p_role, p_table.oid, r.name)
        union all
        select distinct r.name from jsonb_array_elements(p_plan -> 'columns') c
        cross join (values ('select'), ('update')) r (name)
        where p_plan ? 'keys' and c ? 'attnum' and (r.name = 'select' or not c ? 'key')
          and not has_column_privilege(p_role, p_table.oid, (c ->> 'attnum')::int2, r.name));
begin
    if v_lacks <> '{}' then
        raise exception 'role % may not % table %', p_role, array_to_string(v_lacks, ', '),
                        _pgqueue.sql_name(p_table.oid)
            using errcode = 'insufficient_privilege',
                  hint = format('Ask its owner: grant %s on %s to %I', array_to_string(v_lacks, ', '),
                                _pgqueue.sql_name(p_table.oid), p_role);
    end if;
    if not has_schema_privilege(p_role, p_table.relnamespace, 'usage') then
        raise exception 'role % may not use the schema of table %', p_role, _pgqueue.sql_name(p_table.oid)
            using errcode = 'insufficient_privilege',
                  hint = format('Ask its owner: grant usage on schema %s to %I',
                                p_table.relnamespace::regnamespace, p_role);
    end if;
end $$;

-- The plan of a write: columns in their order, each from written_column(), with key for merge keys; the numbers of the
-- columns of sequence_by (sequence) and delete_when (gone).
--   p_target  an object of open_table()
--   p_role   who writes
-- Errors: PQ003, 42501.
create or replace function _pgqueue.table_plan(p_target jsonb, p_role text) returns jsonb
language plpgsql stable as $$
declare
    v_target  record;
    v_table   pg_class;
    v_names   text[];
    v_keys    int[];
    v_order   jsonb[];
    v_gone    int;
    v_last    int;
    v_round   int[];
    v_columns jsonb[];
    v_plan    jsonb;
begin
    select * into v_target from jsonb_to_record(p_target)
        g ("table" text, columns jsonb, merge_keys text[], sequence_by text, delete_when text, allow_rounding text[]);
    v_table := _pgqueue.target_table(v_target."table");
    v_names := array(select c ->> 'name' from jsonb_array_elements(v_target.columns) with ordinality u (c, n)
                     order by n);
    v_gone := _pgqueue.option_column(v_names, v_target.delete_when, 'p_delete_when');
    v_last := _pgqueue.option_column(v_names, v_target.sequence_by, 'p_sequence_by');
    v_keys := array(select _pgqueue.option_column(v_names, k, 'p_merge_keys')
                    from unnest(v_target.merge_keys) with ordinality u (k, n) order by n);
    perform _pgqueue.check_option_columns(v_keys, v_last, v_gone, v_target.columns);
    v_round := array(select _pgqueue.option_column(v_names, r, 'p_allow_rounding')
                     from unnest(v_target.allow_rounding) r);
    v_columns := array(
        select case when n = v_gone then jsonb_build_object('staged', 'boolean')
                    else _pgqueue.written_column(v_table, c ->> 'name', c ->> 'type',
                                                 case when n = any (v_keys) then 'p_merge_keys'
                                                      when n = v_last then 'p_sequence_by' end,
                                                 n = any (v_round)) end
        from jsonb_array_elements(v_target.columns) with ordinality u (c, n) order by n);
    if (select count(*) <> count(distinct c ->> 'attnum') from unnest(v_columns) c where c ? 'attnum') then
        raise exception 'two columns of the DataFrame map to one column of table %: %', _pgqueue.sql_name(v_table.oid),
                        array_to_string(v_names, ', ') using errcode = 'PQ003', column = 'p_columns';
    end if;
    if v_keys <> '{}' then
        if v_table.relkind = 'v' and pg_relation_is_updatable(v_table.oid, false) & 12 <> 12 then
            raise exception 'p_merge_keys require a table or a simple view, but % is a view with triggers',
                            _pgqueue.sql_name(v_table.oid) using errcode = 'PQ003', column = 'p_merge_keys';
        end if;
        v_order := _pgqueue.key_order(v_table, array(
            select (v_columns[k] ->> 'attnum')::int2 from unnest(v_keys) with ordinality u (k, n) order by n));
        for i in 1..cardinality(v_keys) loop
            v_columns[v_keys[i]] := v_columns[v_keys[i]] || jsonb_build_object('key', v_order[i]);
        end loop;
    end if;
    v_plan := jsonb_build_object('relation', _pgqueue.sql_name(v_table.oid), 'oid', v_table.oid::bigint,
                                 'columns', v_columns)
        || jsonb_strip_nulls(jsonb_build_object('keys', nullif(v_keys, '{}'), 'sequence', v_last, 'gone', v_gone));
    perform _pgqueue.check_rights(v_table, v_plan, p_role);
    return v_plan;
end $$;

-- The number of the column that an option names; null for null. Errors: PQ003 when there is none.
create or replace function _pgqueue.option_column(p_names text[], p_name text, p_argument text) returns int
language plpgsql immutable as $$
declare
    v_place int := _pgqueue.column_number(p_name, p_names);
begin
    if p_name is not null and v_place is null then
        raise exception '% must name a column of the DataFrame, not %: it has %', p_argument, quote_literal(p_name),
                        array_to_string(p_names, ', ') using errcode = 'PQ003', column = p_argument;
    end if;
    return v_place;
end $$;

-- Raises PQ003 for columns that do not fit their options.
create or replace function _pgqueue.check_option_columns(p_keys int[], p_sequence int, p_gone int, p_columns jsonb)
returns void language plpgsql immutable as $$
declare
    v_type text := p_columns -> (p_sequence - 1) ->> 'type';
begin
    if jsonb_array_length(p_columns) = 0 then
        raise exception 'the DataFrame has no column for the table' using errcode = 'PQ003', column = 'p_columns';
    elsif p_keys = '{}' and (p_sequence is not null or p_gone is not null) then
        raise exception 'p_sequence_by and p_delete_when require p_merge_keys, the columns that identify a row'
            using errcode = 'PQ003', column = 'p_merge_keys, p_sequence_by, p_delete_when';
    elsif (select count(*) <> count(distinct k) from unnest(p_keys || p_sequence || p_gone) k
           where k is not null) then
        raise exception 'p_merge_keys, p_sequence_by and p_delete_when must name different columns, each once'
            using errcode = 'PQ003', column = 'p_merge_keys, p_sequence_by, p_delete_when';
    elsif p_columns -> (p_gone - 1) ->> 'type' <> 'boolean' then
        raise exception 'p_delete_when must name a boolean column, but % is %', p_columns -> (p_gone - 1) ->> 'name',
                        p_columns -> (p_gone - 1) ->> 'type' using errcode = 'PQ003', column = 'p_delete_when';
    elsif v_type !~ '^(tinyint|smallint|int|bigint|float|double|decimal.*|date|timestamp|timestamp_ntz)$' then
        raise exception 'p_sequence_by must name a column of numbers or times, but % is %',
                        p_columns -> (p_sequence - 1) ->> 'name', v_type
            using errcode = 'PQ003', column = 'p_sequence_by';
    end if;
end $$;
