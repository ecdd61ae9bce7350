-- The function that the triggers of a captured table call: its source, and the functions that it calls. capture()
-- creates one for each captured table.

-- Publishes the rows that a trigger captured, in their order.
-- The rows are JSON. It works as send_batch, but does not check the JSON again.
--   p_headers, p_counts  the headers of the first p_counts[1] messages, of the next p_counts[2], ...
--   p_table              the trigger's table; null: a trigger of 0.1
-- Errors: PQ001; PQ003, also for a table that is not captured; PQ004. Locks: as send.
create or replace function pgqueue.send_captured(p_stream_id int, p_keys text[], p_data json[], p_headers jsonb[],
                                                 p_counts int[], p_table regclass default null) returns void
language plpgsql as $$
declare
    v_stream  pgqueue.streams;
    v_count   int := cardinality(p_data);
    v_headers jsonb[] := '{}';
    v_seq     bigint;
    v_seqs    bigint[];
begin
    if p_table is not null
       and not exists (select from pgqueue.captured where relation = p_table and stream_id = p_stream_id) then
        perform _pgqueue.refuse_uncaptured(p_table, p_stream_id);
    end if;
    v_stream := _pgqueue.stream_of(p_stream_id);
    if v_stream.kind = 'binary' then
        raise exception 'captured rows are JSON, but stream % is binary', _pgqueue.error_name(v_stream)
            using errcode = 'PQ004', column = 'p_data';
    elsif v_stream.schema is not null then
        perform _pgqueue.check_payload(v_stream, d::text, null, null, null) from unnest(p_data) d;
    end if;
    if v_count = 1 and octet_length(p_keys[1]) <= _pgqueue.max_key_bytes() is not false
       and octet_length(p_data[1]::text) <= v_stream.max_bytes
       and _pgqueue.headers_fit(p_headers[array_position(p_counts, 1)], v_stream.max_header_bytes) then
        -- a fast path for a single row, the usual case
        v_seq := nextval(format('pgqueue.seq_%s', p_stream_id)::regclass);
        insert into pgqueue.messages (seq, stream_id, key, data, headers)
        values (v_seq, p_stream_id, p_keys[1], p_data[1], p_headers[array_position(p_counts, 1)]);
        perform _pgqueue.publish(v_stream, int8multirange(int8range(v_seq, v_seq, '[]')), 1, 0, null, null);
        return;
    elsif (v_count > 0 and v_count = cardinality(p_keys) and cardinality(p_headers) = cardinality(p_counts)
           and v_count = (select sum(n) from unnest(p_counts) n having bool_and(n >= 0 and n is not null))
           and not exists (select from unnest(p_data) d where d is null)) is not true then
        raise exception 'p_data and p_keys must have one element per message, and p_counts must have numbers that '
                        'add up to as many'
            using errcode = 'PQ003', column = 'p_keys, p_data, p_headers, p_counts';
    end if;
    for i in 1 .. cardinality(p_headers) loop
        if not _pgqueue.headers_fit(p_headers[i], v_stream.max_header_bytes) then
            perform _pgqueue.refuse_headers(v_stream, p_headers[i]);
        end if;
        v_headers := v_headers || array_fill(p_headers[i], array[p_counts[i]]);
    end loop;
    v_seqs := _pgqueue.take_seqs(p_stream_id, v_count);
    insert into pgqueue.messages (seq, stream_id, key, data, headers)
    select m.seq, p_stream_id,
           case when octet_length(m.key) > _pgqueue.max_key_bytes() then _pgqueue.refuse_key(m.key) else m.key end,
           case when octet_length(m.data) > v_stream.max_bytes then _pgqueue.refuse_size(v_stream, octet_length(m.data))
                else m.data end,
           m.headers
    from (select unnest(v_seqs) as seq, unnest(p_keys) as key, unnest(p_data)::text as data,
                 unnest(v_headers) as headers) m;
    perform _pgqueue.publish(v_stream, _pgqueue.set_of_taken(v_seqs), v_count, 0, null, null);
end $$;

-- Raises PQ003 for a table that is not captured to a stream, although its trigger sends to it: the table was restored
-- from another database, whose stream had this number, which a stream may have here too. If this snapshot is older than
-- the capture, it does not see the row of captured, but a unique index does.
create or replace function _pgqueue.refuse_uncaptured(p_table regclass, p_stream_id int) returns void
language plpgsql as $$
declare
    v_stream pgqueue.streams;
begin
    begin
        insert into pgqueue.captured (relation, stream_id, root) values (p_table, p_stream_id, p_table);
    exception
        when unique_violation then
            return;
        when foreign_key_violation then
            null;  -- no stream has the number
    end;
    v_stream.stream_id := p_stream_id;
    raise exception 'table % has triggers of a capture, but is not captured to stream %', p_table,
                    _pgqueue.error_name(v_stream)
        using errcode = 'PQ003', column = 'p_table',
              hint = format('The table was restored from another database. Drop the triggers with '
                            'pgqueue.release(%L, ...) and the name of any stream, or call pgqueue.capture.', p_table);
end $$;

-- Returns whether this session's last message to a stream is the truncate of a captured table, in this transaction. It
-- is called for the truncate of a partition: Postgres calls the triggers of the table before those of its partitions,
-- so then the partition is a part of a truncate of the table. The result is read from the stream, which settings of the
-- session cannot change. It is false if the session has sent another message since, or has no last number.
--   p_table  the name in the messages' headers
-- Errors: none. Locks: none.
create or replace function pgqueue.was_truncated(p_stream_id int, p_table text) returns boolean
language plpgsql as $$
declare
    v_seq   bigint;
    v_found boolean;
begin
    begin
        v_seq := currval(format('pgqueue.seq_%s', p_stream_id)::regclass);
    exception when object_not_in_prerequisite_state or undefined_table then
        return false;  -- this session has sent nothing to the stream
    end;
    execute format('select exists (select from pgqueue.messages_%s where seq = $1 '
                   'and headers ->> ''operation'' = ''truncate'' and headers ->> ''table'' = $2 '
                   'and headers ->> ''transaction'' = pg_current_xact_id_if_assigned()::text)', p_stream_id)
    into v_found using v_seq, p_table;
    return v_found;
end $$;

-- Replaces placeholders in SQL: {name} becomes the part with that name. Inserted parts are not searched for
-- placeholders, and unknown names remain.
--   p_parts  each is SQL: a quoted name or literal, a number, or generated SQL
create or replace function _pgqueue.fill_template(p_text text, p_parts jsonb) returns text
language sql immutable as $$
    select string_agg(coalesce(p_parts ->> m[2], m[1]), '' order by i)
    from regexp_matches(p_text, E'([^{]+|\\{(\\w+)\\}|\\{)', 'g') with ordinality r (m, i)
$$;

-- The body of the function of a captured table's triggers.
--
-- Postgres calls a statement's triggers at the end of the statement, after the triggers of nested statements; a merge
-- calls them first for inserted rows, then for updated and deleted ones. A setting of the transaction records whether
-- another statement may have written to the table in between. If so, the current row is sent ({now}), and no delete is
-- sent for a key that exists again. A writer that sets the setting itself only causes more lookups of rows.
--   p_names    as in function_statements
--   p_label    the name of the table in messages
--   p_primary  whether it has a primary key
-- (More than 60 lines: a template, and the list of its parts.)
create or replace function _pgqueue.trigger_body(p_names jsonb, p_stream_id int, p_label text, p_old boolean,
                                                 p_outbox boolean, p_primary boolean) returns text
language plpgsql stable as $$
declare
    v_text  text := $template$
-- Publishes the rows that a statement wrote. Made by pgqueue.capture.
declare
    v_before  text := coalesce(current_setting({setting}, true), '');
    v_written boolean := v_before <> '';        -- this transaction has inserted rows
    v_nested  boolean := v_before = 'nested';   -- ... or wrote some in a trigger
    v_keys    text[];
    v_data    json[];
    v_keys_2  text[];
    v_data_2  json[];
    v_size    int;  -- rows per batch: an array has at most 1 GB
    v_rows    refcursor;
begin
    -- a detached partition is no longer a part of the table
    if tg_nargs > 0 and not exists (select from pg_trigger t where t.tgrelid = pg_partition_root(tg_relid)
                                                               and t.tgname = tg_name and t.tgnargs = 0) then
        return null;
    end if;
    if not v_nested and tg_op <> 'TRUNCATE' and pg_trigger_depth() > 1 then
        perform set_config({setting}, 'nested', true);
    end if;
    if tg_op = 'INSERT' then
        {inserts}
        if not v_written and pg_trigger_depth() = 1 then  -- for later triggers of this transaction
            perform set_config({setting}, 'inserted', true);
        end if;{is_done}
    elsif tg_op = 'DELETE' then
        {deletes}
    elsif tg_op = 'UPDATE' then
        {updates}
    elsif tg_nargs = 0 then
        perform pgqueue.send_captured({stream}, array[null::text], array[{truncated}::json],
                                      array[{headers}'truncate')], '{1}', tg_relid);
    -- only a partition: its rows are deleted
    elsif not pgqueue.was_truncated({stream}, {label}) then
        {truncates}
    end if;
    return null;
end $template$;
    v_deleted text := case when p_old then 'json_build_object(''old'', {row}(o.r), ''new'', null)'
                           else '{row}(o.r)' end;
    v_parts jsonb := jsonb_build_object(
        'inserts',   _pgqueue.send_rows_sql('insert', '{key}(n.r) as key, {inserted} as data from {new_rows} {still}'),
        'deletes',   _pgqueue.send_rows_sql('delete', '{key}(o.r) as key, {deleted} as data from {old_rows} {gone}'),
        'updates',   _pgqueue.send_updates_sql(p_old),
        'truncates', _pgqueue.send_batches_sql('execute {rows_before} || tg_relid::regclass || {rows_after}', 'delete'),
        'is_done',   case when p_outbox then E'\n        perform {done}(n.r) from {new_rows};' else '' end,
        'inserted',  case when p_old then 'json_build_object(''old'', null, ''new'', {as_now})' else '{as_now}' end,
        'deleted',   v_deleted,
        'old',       case when p_old then '{row}(o.r)' else 'null::json' end,
        'still',     case when p_primary then 'where not v_nested or {now}(n.r) is not null' else '' end,
        'is_gone',   case when p_primary then '(not v_written or {now}(o.r) is null)' else 'true' end,
        'gone',      case when p_primary then 'where not v_written or {now}(o.r) is null' else '' end,
        'as_now',    case when p_primary then 'case when v_nested then {now}(n.r) else {row}(n.r) end'
                          else '{row}(n.r)' end,
        -- (.* is the row, also if a column is named n)
        'new_rows',  '(select (n.*)::{type} as r from new_rows n) n',
        'old_rows',  '(select (o.*)::{type} as r from old_rows o) o',
        -- only with rows: a statement without rows needs no transaction id
        'headers',   'jsonb_build_object(''table'', {label}, ''time'', clock_timestamp(), '
                     '''transaction'', pg_current_xact_id()::text, ''operation'', ');
begin
    for v_depth in 1..3 loop  -- parts contain parts
        v_text := _pgqueue.fill_template(v_text, v_parts);
    end loop;
    -- names come last, so that they are not searched for placeholders
    return _pgqueue.fill_template(v_text, p_names || jsonb_build_object(
        'stream',      p_stream_id,
        'label',       quote_literal(p_label),
        'truncated',   quote_literal(case when p_old then '{"old": null, "new": null}' else '{}' end),
        'setting',     quote_literal(format('pgqueue.captured_%s_%s', p_stream_id, to_hex(hashtext(p_label)))),
        'rows_before', quote_literal(_pgqueue.fill_template(
            'select array_agg(r.key order by r.i), array_agg(r.data order by r.i) '
            'from (select row_number() over () as i, {key}(o.r) as key, ' || v_deleted || ' as data '
            -- (a row of a subquery has no named type, so it can be cast to that of the table)
            'from (select (t.*)::{type} as r from (select * from ', p_names)),
        'rows_after',  quote_literal(') t) o) r group by (r.i - 1) / 1000 order by (r.i - 1) / 1000')));
end $$;

-- The part of the body that sends the rows of a query in batches. The cursor fetches one batch at a time.
--   p_query      a query for arrays of keys and data; or execute and an expression for the query
--   p_operation  the operation for the headers; null: update for the first keys and data, insert for the others
create or replace function _pgqueue.send_batches_sql(p_query text, p_operation text) returns text
language sql immutable as $$
    select _pgqueue.fill_template($template$open v_rows for {query};
        loop
            fetch v_rows into {into};
            exit when not found;
            perform pgqueue.send_captured({stream}, {send}, tg_relid);
        end loop;
        close v_rows;$template$, case when p_operation is null then jsonb_build_object(
            'query', p_query, 'into', 'v_keys, v_data, v_keys_2, v_data_2',
            'send', 'v_keys || v_keys_2, v_data || v_data_2, array[{headers}''update''), {headers}''insert'')], '
                    'array[cardinality(v_keys), cardinality(v_keys_2)]')
        else jsonb_build_object(
            'query', p_query, 'into', 'v_keys, v_data',
            'send', format('v_keys, v_data, array[{headers}%L)], array[cardinality(v_keys)]', p_operation)) end)
$$;

-- The part of the body that sends inserted or deleted rows.
--   p_rows  a select list of key and data, from the rows
create or replace function _pgqueue.send_rows_sql(p_operation text, p_rows text) returns text
language sql immutable as $$
    select _pgqueue.fill_template($template$select array_agg(r.key), array_agg(r.data) into v_keys, v_data
        from (select {rows} limit 1001) r;
        if v_keys is null then
            return null;
        end if;
        if cardinality(v_keys) <= 1000 then
            perform pgqueue.send_captured({stream}, v_keys, v_data, array[{headers}{operation})],
                                          array[cardinality(v_keys)], tg_relid);
        else
            v_size := least(10000, 100000000 / (pg_column_size(v_data) / 1000));
            {batches}
        end if;$template$, jsonb_build_object('rows', p_rows, 'operation', quote_literal(p_operation), 'batches',
        _pgqueue.send_batches_sql(
            'select array_agg(r.key order by r.i), array_agg(r.data order by r.i) '
            'from (select row_number() over () as i, ' || p_rows || ') r '
            'group by (r.i - 1) / v_size order by (r.i - 1) / v_size', p_operation)))
$$;

-- The part of the body that sends updated rows. A row whose key changed becomes a delete and an insert: first all
-- deletes, then all inserts, because the new key of one row may be the old key of another.
create or replace function _pgqueue.send_updates_sql(p_old boolean) returns text
language sql immutable as $$
    select _pgqueue.fill_template($template$select array_agg(r.key), array_agg(r.data) into v_keys_2, v_data_2
        from (select {key}(o.r) as key, {old} as data from {old_rows} limit 1001) r;
        select array_agg(r.key), array_agg(r.data) into v_keys, v_data
        from (select {key}(n.r) as key, {as_now} as data from {new_rows} {still} limit 1001) r;
        if v_keys = v_keys_2 and cardinality(v_keys) <= 1000 then
            perform pgqueue.send_captured({stream}, v_keys, {both}, array[{headers}'update')],
                                          array[cardinality(v_keys)], tg_relid);
            return null;
        elsif v_keys_2 is null then
            return null;
        end if;
        v_size := least(10000, 100000000 / (coalesce(pg_column_size(v_data), 0) / 1000
                                            + coalesce(pg_column_size(v_data_2), 0) / 1000 + 1));
        {send_deletes}
        {send_others}$template$, jsonb_build_object(
            'both', case when p_old then 'array(select json_build_object(''old'', r.o, ''new'', r.n) '
                                         'from unnest(v_data_2, v_data) r (o, n))' else 'v_data' end,
            'send_deletes', _pgqueue.send_batches_sql($template$
            select array_agg(r.key order by r.i), array_agg(r.data order by r.i)
            from (select i, x.key, x.data
                  from (select row_number() over () as i, {key}(o.r) as key, {deleted} as data, {is_gone} as gone
                        from {old_rows}) x
                  full join (select row_number() over () as i, {key}(n.r) as key from {new_rows}) y using (i)
                  where x.gone and x.key is distinct from y.key) r
            group by (r.i - 1) / v_size order by (r.i - 1) / v_size$template$, 'delete'),
            'send_others', _pgqueue.send_batches_sql(_pgqueue.fill_template($template$
            select coalesce(array_agg(r.key order by r.i) filter (where r.same), '{}'),
                   coalesce(array_agg({updated} order by r.i) filter (where r.same), '{}'),
                   coalesce(array_agg(r.key order by r.i) filter (where not r.same), '{}'),
                   coalesce(array_agg({inserted} order by r.i) filter (where not r.same), '{}')
            from (select i, y.key, x.data as old, y.data as new,
                         x.i is not null and x.key is not distinct from y.key as same
                  from (select row_number() over () as i, {key}(n.r) as key, {as_now} as data from {new_rows}) y
                  left join (select row_number() over () as i, {key}(o.r) as key, {old} as data from {old_rows}) x
                  using (i)
                  where y.data is not null) r
            group by (r.i - 1) / v_size order by (r.i - 1) / v_size$template$, case when p_old then jsonb_build_object(
                'updated', 'json_build_object(''old'', r.old, ''new'', r.new)',
                'inserted', 'json_build_object(''old'', null, ''new'', r.new)')
            else '{"updated": "r.new", "inserted": "r.new"}' end), null)))
$$;
