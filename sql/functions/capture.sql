-- Capture: what is written to a table becomes messages of a stream, in the transaction that writes it.
--
-- A captured table has triggers, one for each kind of statement, which call a function that is made for this table. Function and triggers belong
-- to the owner of the table and stand beside it. For they turn values into text, by types and casts of anybody; so that runs with the rights
-- of the owner, never with those of who writes, nor with those of this schema. The owner sends as every producer does, by _send_captured.
--
-- Further functions name the columns of the table in bodies that Postgres has parsed: so they follow a column that is renamed, and a column
-- that they need is not dropped without an error that says so.
--
-- capture and release run with the rights of their caller (settings.sql): so Postgres itself refuses what the caller may not do.

-- Publishes messages that are JSON already, in their order: rows that a trigger captured. As send_batch, for producers; but nobody looks into
-- their data again.
--   p_headers, p_counts  the headers of the first p_counts[1] messages, of the next p_counts[2], ...
-- Errors: PQ001, PQ003, PQ004. Locks: as send.
create or replace function pgqueue._send_captured(p_stream_id int, p_keys text[], p_data json[], p_headers jsonb[], p_counts int[]) returns void
language plpgsql
as $$
declare
    v_stream  pgqueue.streams := pgqueue._stream_of(p_stream_id);
    v_count   int := cardinality(p_data);
    v_headers jsonb[] := '{}';
    v_seq     bigint;
    v_seqs    bigint[];
begin
    if v_stream.kind = 'binary' then
        raise exception 'captured rows are JSON, and stream % is binary', quote_literal(v_stream.name) using errcode = 'PQ004', column = 'p_data';
    end if;
    for i in 1 .. cardinality(p_headers) loop
        if not pgqueue._headers_fit(p_headers[i], v_stream.max_header_bytes) then
            perform pgqueue._refuse_headers(v_stream, p_headers[i]);
        end if;
        if v_count > 1 then
            v_headers := v_headers || array_fill(p_headers[i], array[p_counts[i]]);
        end if;
    end loop;
    if v_count = 1 and octet_length(p_keys[1]) <= pgqueue._max_key_bytes() is not false and octet_length(p_data[1]::text) <= v_stream.max_bytes then
        -- a row alone, as most: in half of the time
        v_seq := nextval(format('pgqueue.seq_%s', p_stream_id)::regclass);
        insert into pgqueue.messages (seq, stream_id, key, data, headers)
        values (v_seq, p_stream_id, p_keys[1], p_data[1], p_headers[array_position(p_counts, 1)]);
        perform pgqueue._publish(v_stream, int8multirange(int8range(v_seq, v_seq, '[]')), 1, 0, null, null);
        return;
    end if;
    v_seqs := pgqueue._take_seqs(p_stream_id, v_count);
    insert into pgqueue.messages (seq, stream_id, key, data, headers)
    select m.seq, p_stream_id, case when octet_length(m.key) > pgqueue._max_key_bytes() then pgqueue._refuse_key(m.key) else m.key end,
           case when octet_length(m.data) > v_stream.max_bytes then pgqueue._refuse_size(v_stream, octet_length(m.data)) else m.data end, m.headers
    from (select unnest(v_seqs) as seq, unnest(p_keys) as key, unnest(p_data)::text as data, unnest(v_headers) as headers) m;
    perform pgqueue._publish(v_stream, pgqueue._set_of_taken(v_seqs), v_count, 0, null, null);
end $$;

-- Lets every insert, update, delete and truncate of a table become messages of a stream, in the transaction that writes: from the end of this
-- one's on. Called again for a table that is captured, it takes the new arguments in place of the old.
-- A message has the row as JSON in data, the key of the row as key, and headers table, operation, time and transaction.
--   p_table    a table of the caller's, partitioned or not
--   p_stream   a stream of kind json or text
--   p_keys     columns whose values are the message's key, of several as a JSON array; null: those of the primary key; '{}': no key
--   p_columns  columns of the row to publish; null: all, also those that are added later
--   p_old      data is {"old": ..., "new": ...}, with the row as it was before, and after
--   p_outbox   only inserts are captured, and the trigger deletes the rows again, by their primary key
-- Errors: PQ001; PQ003, which also says when the owner of the table may not send; PQ007. Locks: the table against writers, and where it is
-- captured already against readers; gives up (55P03) when others keep it busy for 30 s.
create or replace function pgqueue.capture(p_table regclass, p_stream text, p_keys text[] default null, p_columns text[] default null,
                                           p_old boolean default false, p_outbox boolean default false) returns void
language plpgsql
set lock_timeout = '100ms'
as $$
declare
    v_stream  record;
    v_table   record;
    v_primary text[];
    v_name    text;
    v_part    record;
begin
    select * into v_stream from pgqueue.open_sink(p_stream);
    if v_stream.kind = 'binary' then
        raise exception 'p_stream is a stream of kind json or text, not %, which is binary', quote_literal(p_stream)
            using errcode = 'PQ003', column = 'p_stream';
    end if;
    perform pgqueue._captured_table(p_table);
    perform pgqueue._lock_captured(p_table, v_stream.stream_id);
    v_table := pgqueue._captured_table(p_table);  -- as it is from here on
    v_primary := (select array_agg(a.attname::text order by k.i) from pg_index x cross join lateral unnest(x.indkey) with ordinality k (attnum, i)
                  join pg_attribute a on a.attrelid = x.indrelid and a.attnum = k.attnum where x.indrelid = p_table and x.indisprimary);
    p_keys := coalesce(p_keys, v_primary);
    perform pgqueue._check_captured(p_table, v_table.full_name, v_primary, p_keys, p_columns, p_outbox);
    p_old := coalesce(p_old, false);
    p_outbox := coalesce(p_outbox, false);

    perform pgqueue._drop_capture(p_table, v_stream.stream_id);
    perform pgqueue._drop_left_behind();
    -- a name that needs no quotes, and is short, so that others are made of it
    v_name := format('pgqueue_%s_%s', v_stream.stream_id, left(regexp_replace(lower(v_table.name), '[^a-z0-9_]', '', 'g'), 24));
    while exists (select from pg_proc p
                  where p.pronamespace = v_table.namespace::regnamespace
                    and p.proname = any (array[v_name, v_name || '_key', v_name || '_row', v_name || '_now', v_name || '_done'])) loop
        v_name := v_name || '_';
    end loop;
    v_name := format('%I.%I', v_table.namespace, v_name);
    perform pgqueue._make_capture(p_table, p_table, v_name, v_name, v_stream.stream_id, v_table.full_name, p_keys, p_columns, v_primary, p_old, p_outbox);
    for v_part in select relid from pg_partition_tree(p_table) where level > 0 loop
        if pgqueue._column_names(v_part.relid) = pgqueue._column_names(p_table) then
            perform pgqueue._make_triggers(v_part.relid, p_table, v_stream.stream_id, v_name, p_outbox);
        else  -- Postgres turns the rows of a trigger into those of another type by the places of columns
            perform pgqueue._make_capture(v_part.relid, p_table, format('%s_%s', v_name, v_part.relid::oid), v_name, v_stream.stream_id, v_table.full_name,
                                          p_keys, p_columns, v_primary, p_old, p_outbox);
        end if;
    end loop;
    execute format('comment on trigger pgqueue_%s_insert on %s is %L', v_stream.stream_id, v_table.full_name,
                   format('key: %s; columns: %s; old rows: %s', coalesce(nullif(array_to_string(p_keys, ', '), ''), 'none'),
                          coalesce(array_to_string(p_columns, ', '), 'all'), case when p_old then 'yes' else 'no' end));
end $$;

-- A table that may be captured, and by the caller. Errors: PQ003.
create or replace function pgqueue._captured_table(p_table regclass, out name name, out namespace name, out full_name text)
language plpgsql stable
as $$
declare
    v_table pg_class;
begin
    select * into v_table from pg_class where oid = p_table;
    if not found then
        raise exception 'p_table is a table, not %', coalesce(p_table::text || ', which was dropped', 'null') using errcode = 'PQ003', column = 'p_table';
    end if;
    name := v_table.relname;
    namespace := (select nspname from pg_namespace where oid = v_table.relnamespace);
    full_name := format('%I.%I', namespace, name);
    if v_table.relkind not in ('r', 'p') or v_table.relpersistence = 't' or namespace in ('pgqueue', 'pg_catalog') then
        raise exception 'p_table is a table, and not temporary nor one of pgqueue, not %', full_name using errcode = 'PQ003', column = 'p_table';
    elsif not pg_has_role(v_table.relowner, 'usage') then
        raise exception 'p_table is a table of the caller''s, not %, which belongs to %', full_name, pg_get_userbyid(v_table.relowner)
            using errcode = 'PQ003', column = 'p_table';
    elsif not has_function_privilege(v_table.relowner, 'pgqueue._send_captured(int, text[], json[], jsonb[], int[])', 'execute')
          or not has_schema_privilege(v_table.relowner, 'pgqueue', 'usage') then
        raise exception 'p_table belongs to %, who may not send', pg_get_userbyid(v_table.relowner) using errcode = 'PQ003', column = 'p_table',
            hint = format('Grant it: select pgqueue.create_roles(); grant pgqueue_producer to %I.', pg_get_userbyid(v_table.relowner));
    end if;
end $$;

-- Raises PQ003 unless columns are such as can be captured. Arguments as in capture, and
--   p_name     of the table
--   p_primary  the columns of its primary key; null: it has none
create or replace function pgqueue._check_captured(p_table regclass, p_name text, p_primary text[], p_keys text[], p_columns text[], p_outbox boolean)
returns void
language plpgsql stable
as $$
declare
    v_unknown text;
begin
    if p_keys is null or array_ndims(p_keys) > 1 then
        raise exception 'p_keys is a list of columns, and may be left out where the table has a primary key, which % has not', p_name
            using errcode = 'PQ003', column = 'p_keys', hint = 'Name the columns whose values are a message''s key; ''{}'' for messages without a key.';
    elsif p_outbox and p_primary is null then
        raise exception 'p_outbox is for a table with a primary key, by which rows are deleted, and % has none', p_name
            using errcode = 'PQ003', column = 'p_outbox';
    elsif p_columns = '{}' or array_ndims(p_columns) > 1 then
        raise exception 'p_columns is a list of columns, or null for all' using errcode = 'PQ003', column = 'p_columns';
    end if;
    select format('%s names %s, which is no column of %s that can be captured', x.argument, coalesce(quote_ident(x.name), 'null'), p_name) into v_unknown
    from (select 'p_keys' as argument, unnest(p_keys) as name union all select 'p_columns', unnest(p_columns)) x
    left join pg_attribute a on a.attrelid = p_table and a.attname = x.name and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
    where a.attnum is null limit 1;
    if v_unknown is not null then
        raise exception '%', v_unknown using errcode = 'PQ003', column = split_part(v_unknown, ' ', 1),
            hint = (select 'There are: ' || string_agg(quote_ident(a.attname), ', ' order by a.attnum) || '.' from pg_attribute a
                    where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v');
    end if;
    -- a role that could grant it to itself, but did not, does not publish it by accident
    v_unknown := (select quote_ident(a.attname) from pg_attribute a
                  where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped and not has_column_privilege(p_table, a.attnum, 'select')
                    and (p_columns is null or a.attname = any (p_columns || p_keys)) limit 1);
    if v_unknown is not null then
        raise exception 'p_columns are columns that the caller may read, not % of %', v_unknown, p_name using errcode = 'PQ003', column = 'p_columns';
    end if;
end $$;

-- The columns of a table in their order.
create or replace function pgqueue._column_names(p_table regclass) returns name[]
language sql stable
as $$ select array_agg(attname order by attnum) from pg_attribute where attrelid = p_table and attnum > 0 and not attisdropped $$;

-- Columns in a text, each in this format.
create or replace function pgqueue._each_column(p_columns text[], p_format text, p_between text) returns text
language sql immutable
as $$ select string_agg(format(p_format, k), p_between order by i) from unnest(p_columns) with ordinality k (k, i) $$;

-- Makes the functions and triggers of a table, or of a partition whose columns have another order. Arguments as in capture, and
--   p_name   of the triggers' function; the others add to it
--   p_base   the same of the table
--   p_label  what messages call the table
create or replace function pgqueue._make_capture(p_relation regclass, p_table regclass, p_name text, p_base text, p_stream_id int, p_label text,
                                                 p_keys text[], p_columns text[], p_primary text[], p_old boolean, p_outbox boolean) returns void
language plpgsql
as $$
declare
    v_type     text;  -- of its rows
    v_owner    name;
    v_key      text;
    v_row      text;
    v_same     text;
    v_function text;
begin
    select format('%I.%I', n.nspname, c.relname), pg_get_userbyid(c.relowner) into v_type, v_owner
    from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = p_relation;
    v_key := case when cardinality(p_keys) = 0 then 'null::text'
                  when cardinality(p_keys) = 1 then format('(t).%I::text', p_keys[1])
                  else format('json_build_array(%s)::text', pgqueue._each_column(p_keys, '(t).%1$I', ', ')) end;
    -- up to 50 columns as a plain expression, which becomes a part of the trigger's queries; a call has at most 100 arguments
    v_row := case when p_columns is null then 'row_to_json(t)'
                  when cardinality(p_columns) <= 50 then format('json_build_object(%s)', pgqueue._each_column(p_columns, '%1$L, (t).%1$I', ', '))
                  else format('(select row_to_json(r) from (select %s) r)', pgqueue._each_column(p_columns, '(t).%1$I', ', ')) end;
    execute format('create function %s_key(t %s) returns text language sql stable begin atomic select %s; end', p_name, v_type, v_key);
    execute format('create function %s_row(t %s) returns json language sql stable begin atomic select %s; end', p_name, v_type, v_row);
    v_same := pgqueue._each_column(p_primary, 'x.%1$I = (t).%1$I', ' and ');
    if p_outbox then
        execute format('create function %1$s_done(t %2$s) returns void language sql begin atomic delete from %2$s x where %3$s; end', p_name, v_type, v_same);
    end if;
    if p_primary is not null then
        -- the row that has this primary key now, if it has also this key
        execute format('create function %s_now(t %s) returns json language sql stable begin atomic select %s_row(x) from %s x where %s; end',
                       p_name, v_type, p_base, p_label,
                       concat_ws(' and ', v_same, pgqueue._each_column(array(select k from unnest(p_keys) k where k <> all (p_primary)),
                                                                       'x.%1$I is not distinct from (t).%1$I', ' and ')));
    end if;
    execute pgqueue._capture_function(p_name, p_stream_id, p_label, p_old, p_outbox, p_primary is not null);
    foreach v_function in array array['%1$s()', '%1$s_key(%2$s)', '%1$s_row(%2$s)'] || case when p_outbox then array['%1$s_done(%2$s)'] else '{}' end
                                || case when p_primary is not null then array['%1$s_now(%2$s)'] else '{}' end loop
        v_function := format(v_function, p_name, v_type);
        execute format('revoke all on function %s from public', v_function);
        -- what they do is done as the owner, whoever of its members made them
        if v_owner <> current_user then
            execute format('alter function %s owner to %I', v_function, v_owner);
        end if;
    end loop;
    perform pgqueue._make_triggers(p_relation, p_table, p_stream_id, p_name, p_outbox);
end $$;

-- The statement that makes the function of a captured table's triggers: this text, with what is in braces replaced.
--
-- Postgres calls the triggers of a statement when it is over: after those of statements that it set off itself, and of a merge first for what was
-- inserted, then for what was updated and deleted. So where a statement may have been followed already, which a setting of the transaction says,
-- a row is sent as it is now (_now), and a key is not deleted that is there again.
-- (Longer than 60 lines: a text, and a table of what goes into it.)
create or replace function pgqueue._capture_function(p_name text, p_stream_id int, p_table text, p_old boolean, p_outbox boolean, p_primary boolean)
returns text
language plpgsql
as $$
declare
    v_text text := $template$
-- Publishes what a statement wrote.
create function {name}() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC' set intervalstyle = 'iso_8601' set extra_float_digits = 1
set bytea_output = 'hex'{nestloop}
as $function$
-- Made by pgqueue.capture.
declare
    v_before  text := coalesce(current_setting({setting}, true), '');
    v_written boolean := v_before <> '';        -- this transaction inserted rows before
    v_nested  boolean := v_before = 'nested';   -- ... or wrote some in a trigger
    v_keys    text[];
    v_data    json[];
    v_keys_2  text[];
    v_data_2  json[];
    v_size    int;  -- rows that are sent at once, when there are many: an array has at most 1 GB
    v_rows    refcursor;
begin
    -- a partition that was detached is not a part of the table any more
    if tg_nargs > 0 and not exists (select from pg_inherits where inhrelid = tg_relid) then
        return null;
    end if;
    if not v_nested and tg_op <> 'TRUNCATE' and pg_trigger_depth() > 1 then
        perform set_config({setting}, 'nested', true);
    end if;
    if tg_op = 'INSERT' then
        {inserts}{done}
    elsif tg_op = 'DELETE' then
        {deletes}
    elsif tg_op = 'UPDATE' then
        {updates}
    elsif tg_when = 'AFTER' then
        perform set_config('pgqueue.truncated', '', true);
    elsif tg_nargs = 0 then
        perform set_config('pgqueue.truncated', tg_relid::text, true);
        perform pgqueue._send_captured({stream}, array[null::text], array[{truncated}::json], array[{truncate}], '{1}');
    -- a partition alone: its rows are deleted, those of the others are not
    elsif not exists (select from pg_partition_ancestors(tg_relid) a where a.relid::oid::text = current_setting('pgqueue.truncated', true)) then
        perform set_config('pgqueue.truncated', tg_relid::text, true);
        {truncates}
    end if;
    return null;
end $function$
$template$;
    v_part text[];
    v_del  text := case when p_old then 'json_build_object(''old'', {name}_row(o), ''new'', null)' else '{name}_row(o)' end;
    v_some text := 'v_keys, v_data, array[{delete}], array[cardinality(v_keys)]';
begin
    foreach v_part slice 1 in array array[
        ['{inserts}',   pgqueue._capture_rows('{name}_key(n) as key, {new} as data from new_rows n {still}', '{insert}', true)],
        ['{deletes}',   pgqueue._capture_rows('{name}_key(o) as key, {del} as data from old_rows o {gone}', '{delete}', false)],
        ['{updates}',   pgqueue._capture_updates()],
        ['{truncates}', pgqueue._capture_pieces('execute format(''select array_agg(r.key order by r.i), array_agg(r.data order by r.i) '
            'from (select row_number() over () as i, {name}_key(o) as key, %s as data from %s o) r '
            'group by (r.i - 1) / 1000 order by (r.i - 1) / 1000'', {del_text}, tg_relid::regclass)', 'v_keys, v_data', v_some)],
        ['{new}',       case when p_old then 'json_build_object(''old'', null, ''new'', {now})' else '{now}' end],
        ['{del}',       v_del],
        ['{del_text}',  quote_literal(v_del)],
        ['{old}',       case when p_old then '{name}_row(o)' else 'null::json' end],
        ['{updated}',   case when p_old then 'json_build_object(''old'', x.data, ''new'', y.data)' else 'y.data' end],
        ['{inserted}',  case when p_old then 'json_build_object(''old'', null, ''new'', y.data)' else 'y.data' end],
        ['{both}',      case when p_old then 'array(select json_build_object(''old'', r.o, ''new'', r.n) from unnest(v_data_2, v_data) r (o, n))'
                             else 'v_data' end],
        ['{truncated}', quote_literal(case when p_old then '{"old": null, "new": null}' else '{}' end)],
        ['{done}',      case when p_outbox then E'\n        perform {name}_done(n) from new_rows n;' else '' end],
        ['{now}',       case when p_primary then 'case when v_nested then {name}_now(n) else {name}_row(n) end' else '{name}_row(n)' end],
        ['{still}',     case when p_primary then 'where not v_nested or {name}_now(n) is not null' else '' end],
        ['{is_gone}',   case when p_primary then '(not v_written or {name}_now(o) is null)' else 'true' end],
        ['{gone}',      case when p_primary then 'where not v_written or {name}_now(o) is null' else '' end],
        ['{setting}',   format('''pgqueue.captured_%s_%s''', p_stream_id, to_hex(hashtext(p_table)))],
        -- a plan is kept that was made when a statement wrote a single row: it must do for a million
        ['{nestloop}',  case when p_outbox then '' else ' set enable_nestloop = off' end],
        ['{insert}',    '{headers}''insert'')'],
        ['{update}',    '{headers}''update'')'],
        ['{delete}',    '{headers}''delete'')'],
        ['{truncate}',  '{headers}''truncate'')'],
        -- when there is something to send: a statement without rows needs no id of a transaction
        ['{headers}',   'jsonb_build_object(''table'', {table}, ''time'', clock_timestamp(), ''transaction'', pg_current_xact_id()::text, ''operation'', '],
        ['{table}',     quote_literal(p_table)],
        ['{name}',      p_name],
        ['{stream}',    p_stream_id::text]]
    loop
        v_text := replace(v_text, v_part[1], v_part[2]);
    end loop;
    return v_text;
end $$;

-- The part of that text that sends what a query returns, a row of it at a time.
--   p_query  the query; or execute and an expression for it
--   p_into   the variables for its columns
--   p_send   the arguments of _send_captured after the stream
create or replace function pgqueue._capture_pieces(p_query text, p_into text, p_send text) returns text
language sql immutable
as $$
    select replace(replace(replace($template$open v_rows for {query};
        loop
            fetch v_rows into {into};
            exit when not found;
            perform pgqueue._send_captured({stream}, {send});
        end loop;
        close v_rows;$template$, '{query}', p_query), '{into}', p_into), '{send}', p_send)
$$;

-- The part of that text that sends rows which were inserted, or deleted.
--   p_rows       a select list of key and data, from the rows
--   p_operation  what the headers say
--   p_inserts    those who come after it in this transaction are to know that it inserted rows
create or replace function pgqueue._capture_rows(p_rows text, p_operation text, p_inserts boolean) returns text
language sql immutable
as $$
    select replace(replace(replace(replace($template$select array_agg(r.key), array_agg(r.data) into v_keys, v_data from (select {rows} limit 1001) r;
        if v_keys is null then
            return null;
        end if;{inserts}
        if cardinality(v_keys) <= 1000 then
            perform pgqueue._send_captured({stream}, v_keys, v_data, array[{operation}], array[cardinality(v_keys)]);
        else
            v_size := least(10000, 100000000 / (pg_column_size(v_data) / 1000));
            {pieces}
        end if;$template$,
        '{pieces}', pgqueue._capture_pieces(
            'select array_agg(r.key order by r.i), array_agg(r.data order by r.i) from (select row_number() over () as i, {rows}) r '
            'group by (r.i - 1) / v_size order by (r.i - 1) / v_size',
            'v_keys, v_data', 'v_keys, v_data, array[{operation}], array[cardinality(v_keys)]')),
        '{inserts}', case when p_inserts then $template$
        if not v_written and pg_trigger_depth() = 1 then
            perform set_config({setting}, 'inserted', true);
        end if;$template$ else '' end),
        '{rows}', p_rows),
        '{operation}', p_operation)
$$;

-- The part of that text that sends rows which were updated. A row whose key changed is deleted, and inserted: first all of the one, then all of
-- the other, because the new key of one may be the old one of another.
create or replace function pgqueue._capture_updates() returns text
language sql immutable
as $$
    select $template$select array_agg(r.key), array_agg(r.data) into v_keys_2, v_data_2
        from (select {name}_key(o) as key, {old} as data from old_rows o limit 1001) r;
        select array_agg(r.key), array_agg(r.data) into v_keys, v_data
        from (select {name}_key(n) as key, {now} as data from new_rows n {still} limit 1001) r;
        if v_keys = v_keys_2 and cardinality(v_keys) <= 1000 then
            perform pgqueue._send_captured({stream}, v_keys, {both}, array[{update}], array[cardinality(v_keys)]);
            return null;
        elsif v_keys_2 is null then
            return null;
        end if;
        v_size := least(10000, 100000000 / (coalesce(pg_column_size(v_data), 0) / 1000 + coalesce(pg_column_size(v_data_2), 0) / 1000 + 1));
        $template$ || pgqueue._capture_pieces($template$
            select array_agg(r.key order by r.i), array_agg(r.data order by r.i)
            from (select i, x.key, x.data
                  from (select row_number() over () as i, {name}_key(o) as key, {del} as data, {is_gone} as gone from old_rows o) x
                  full join (select row_number() over () as i, {name}_key(n) as key from new_rows n) y using (i)
                  where x.gone and x.key is distinct from y.key) r
            group by (r.i - 1) / v_size order by (r.i - 1) / v_size$template$,
            'v_keys, v_data', 'v_keys, v_data, array[{delete}], array[cardinality(v_keys)]')
        || E'\n        ' || pgqueue._capture_pieces($template$
            select coalesce(array_agg(r.key order by r.i) filter (where r.same), '{}'), coalesce(array_agg(r.updated order by r.i) filter (where r.same), '{}'),
                   coalesce(array_agg(r.key order by r.i) filter (where not r.same), '{}'),
                   coalesce(array_agg(r.inserted order by r.i) filter (where not r.same), '{}')
            from (select i, y.key, x.i is not null and x.key is not distinct from y.key as same, {updated} as updated, {inserted} as inserted
                  from (select row_number() over () as i, {name}_key(n) as key, {now} as data from new_rows n) y
                  left join (select row_number() over () as i, {name}_key(o) as key, {old} as data from old_rows o) x using (i)
                  where y.data is not null) r
            group by (r.i - 1) / v_size order by (r.i - 1) / v_size$template$,
            'v_keys, v_data, v_keys_2, v_data_2',
            'v_keys || v_keys_2, v_data || v_data_2, array[{update}, {insert}], array[cardinality(v_keys), cardinality(v_keys_2)]')
$$;

-- Makes the triggers of a captured table, or of a partition of it, for what is written straight into that; these have the name of the table's
-- function as an argument, by which _drop_capture knows them. Those that are there stay.
create or replace function pgqueue._make_triggers(p_relation regclass, p_table regclass, p_stream_id int, p_function text, p_outbox boolean) returns void
language plpgsql
as $$
declare
    v_relation record;
    v_of       name := (select f.proname from pg_trigger t join pg_proc f on f.oid = t.tgfoid
                        where t.tgrelid = p_table and t.tgname = format('pgqueue_%s_insert', p_stream_id));
    v_trigger  text[];
begin
    select format('%I.%I', n.nspname, c.relname) as name, c.relkind into v_relation
    from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = p_relation;
    if v_relation.relkind not in ('r', 'p') then
        return;  -- a foreign table has no such triggers
    end if;
    foreach v_trigger slice 1 in array array[
        ['insert',    'after insert',    'referencing new table as new_rows'],
        ['update',    'after update',    'referencing old table as old_rows new table as new_rows'],
        ['delete',    'after delete',    'referencing old table as old_rows'],
        ['truncate',  'before truncate', ''],
        ['truncated', 'after truncate',  '']]
    loop
        continue when exists (select from pg_trigger where tgrelid = p_relation and tgname = format('pgqueue_%s_%s', p_stream_id, v_trigger[1]))
            or (p_outbox and v_trigger[1] <> 'insert')
            or (v_trigger[1] = 'truncated' and v_relation.relkind = 'r');
        execute format('create trigger pgqueue_%s_%s %s on %s %s for each statement execute function %s(%s)', p_stream_id, v_trigger[1], v_trigger[2],
                       v_relation.name, v_trigger[3], p_function, case when p_relation <> p_table then quote_literal(v_of) end);
    end loop;
end $$;

-- Waits until nobody writes to a table, for moments only, so that those who come behind are not kept for long; nor reads it where it is
-- captured, because its triggers are dropped.
create or replace function pgqueue._lock_captured(p_table regclass, p_stream_id int) returns void
language plpgsql
set lock_timeout = '100ms'
as $$
declare
    v_until timestamptz := clock_timestamp() + interval '30 s';
    v_name  text;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'to capture and release tables needs transaction isolation read committed, not %', current_setting('transaction_isolation')
            using errcode = 'PQ007', hint = 'begin transaction isolation level read committed';
    end if;
    loop
        v_name := (select format('%I.%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = p_table);
        begin
            if v_name is null then
                return;  -- dropped; the caller finds out
            end if;
            execute format('lock table %s in share row exclusive mode', v_name);
            if pgqueue._is_captured(p_table, p_stream_id) then
                execute format('lock table %s in access exclusive mode', v_name);
            end if;
            if to_regclass(v_name) is distinct from p_table then
                raise lock_not_available;  -- it was renamed meanwhile
            end if;
            return;
        exception when lock_not_available or undefined_table then
            if clock_timestamp() > v_until then
                raise exception 'table % was in use for 30 s', p_table
                    using errcode = 'lock_not_available', hint = 'Try again, or end transactions that are idle.';
            end if;
            perform pg_sleep(0.2);
        end;
    end loop;
end $$;

-- Whether a table is captured to a stream.
create or replace function pgqueue._is_captured(p_table regclass, p_stream_id int) returns boolean
language sql stable
as $$ select exists (select from pg_trigger where tgrelid = p_table and tgname = format('pgqueue_%s_insert', p_stream_id)) $$;

-- Drops the triggers of a captured table, and of its partitions, with their functions; of a partition only its own. Returns whether there were any.
create or replace function pgqueue._drop_capture(p_table regclass, p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_trigger record;
    v_drop    text;
    v_drops   text[];
begin
    select t.tgfoid, t.tgnargs, t.tgargs, p.pronamespace, p.proname, convert_to(p.proname, 'UTF8') || '\x00'::bytea as argument into v_trigger
    from pg_trigger t join pg_proc p on p.oid = t.tgfoid where t.tgrelid = p_table and t.tgname = format('pgqueue_%s_insert', p_stream_id);
    if not found then
        return false;
    end if;
    with part as (
        -- partitions whose columns have another order have functions of their own; also when they were detached since
        select t.tgrelid, t.tgname, t.tgfoid, p.proname, format('%I.%I', n.nspname, c.relname) as relation, c.reltype
        from pg_trigger t join pg_proc p on p.oid = t.tgfoid join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
        where p.pronamespace = v_trigger.pronamespace and t.tgname like 'pgqueue\_%'
          and case when v_trigger.tgnargs > 0 then t.tgrelid = p_table and t.tgfoid = v_trigger.tgfoid
                   else t.tgfoid = v_trigger.tgfoid or t.tgargs = v_trigger.argument end
    )
    select array_agg(d.command order by d.place) into v_drops
    from (select 1 as place, format('drop trigger %I on %s', tgname, relation) as command from part
          union
          select case when p.proname like '%\_now' then 2 else 3 end, 'drop function ' || p.oid::regprocedure::text  -- _now calls _row
          from part join pg_proc p on p.oid = part.tgfoid
            or (p.pronamespace = v_trigger.pronamespace and p.proargtypes[0] = part.reltype
                and p.proname in (part.proname || '_key', part.proname || '_row', part.proname || '_now', part.proname || '_done'))
          -- a partition may have those of its table
          where v_trigger.tgnargs = 0 or v_trigger.tgargs <> v_trigger.argument) d;
    foreach v_drop in array v_drops loop
        execute v_drop;
    end loop;
    return true;
end $$;

-- Drops the functions of triggers of tables that were dropped with cascade, where the caller may. (Their others went with the type of the rows.)
create or replace function pgqueue._drop_left_behind() returns void
language plpgsql
as $$
declare
    v_function text;
begin
    for v_function in
        select p.oid::regprocedure::text from pg_proc p
        where p.proname ~ '^pgqueue_[0-9]+_' and p.prorettype = 'trigger'::regtype and p.prosrc like '%-- Made by pgqueue.capture.%'
          and pg_has_role(p.proowner, 'usage')
          and not exists (select from pg_trigger where tgfoid = p.oid)
          -- while a dump is restored functions are there, and triggers are not yet
          and not exists (select from pg_proc k where k.pronamespace = p.pronamespace and k.proname = p.proname || '_key')
    loop
        begin
            execute 'drop function ' || v_function;
        exception when undefined_function or lock_not_available or dependent_objects_still_exist then
            null;  -- somebody else is at it, or uses it
        end;
    end loop;
end $$;

-- Captures a table no more; what was captured stays. Errors: PQ001; PQ003 when it is not captured; PQ007. Locks: the table, as capture.
create or replace function pgqueue.release(p_table regclass, p_stream text) returns void
language plpgsql
as $$
declare
    v_stream record;
begin
    select * into v_stream from pgqueue.open_sink(p_stream);
    if pgqueue._is_captured(p_table, v_stream.stream_id) then
        if not pg_has_role((select relowner from pg_class where oid = p_table), 'usage') then
            raise exception 'p_table is a table of the caller''s, not %', p_table using errcode = 'PQ003', column = 'p_table';
        end if;
        perform pgqueue._lock_captured(p_table, v_stream.stream_id);
    end if;
    if not pgqueue._drop_capture(p_table, v_stream.stream_id) then
        raise exception 'p_table is a table that is captured to stream %, not %', quote_literal(p_stream), coalesce(p_table::text, 'null')
            using errcode = 'PQ003', column = 'p_table', hint = 'The view pgqueue.captures lists those that are.';
    end if;
    perform pgqueue._drop_left_behind();
end $$;

-- Makes the triggers of partitions that are new since their table was captured, where the owner of this schema may do so and nobody is in the way.
-- Only those of one owner with their table: a function of one role is not let loose on what others write. Returns how many partitions.
create or replace function pgqueue._capture_partitions() returns bigint
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    v_part  record;
    v_count bigint := 0;
begin
    for v_part in
        select r.relid, t.tgrelid, s.stream_id, f.oid::regproc::text as function,
               not exists (select from pg_trigger d where d.tgrelid = t.tgrelid and d.tgname = format('pgqueue_%s_delete', s.stream_id)) as outbox
        from pgqueue.streams s join pg_trigger t on t.tgname = format('pgqueue_%s_insert', s.stream_id) and t.tgnargs = 0
        join pg_class c on c.oid = t.tgrelid and c.relkind = 'p'
        join pg_proc f on f.oid = t.tgfoid and f.proowner = c.relowner
        cross join lateral pg_partition_tree(c.oid) r
        join pg_class p on p.oid = r.relid and p.relowner = c.relowner and p.relkind in ('r', 'p')
        where r.level > 0 and pg_has_role(c.relowner, 'usage') and pgqueue._column_names(r.relid) = pgqueue._column_names(c.oid)
          and not exists (select from pg_trigger x where x.tgrelid = r.relid and x.tgname = t.tgname)
    loop
        begin
            perform pgqueue._make_triggers(v_part.relid, v_part.tgrelid, v_part.stream_id, v_part.function, v_part.outbox);
            v_count := v_count + 1;
        exception when lock_not_available then
            null;  -- the next time
        end;
    end loop;
    return v_count;
end $$;
