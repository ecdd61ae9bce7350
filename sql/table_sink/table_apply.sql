-- The commit of a batch to a table. It runs with the rights of the writer, so the grants, policies and triggers of the
-- table apply. The function calls none of the schema _pgqueue, which its caller may not use.

-- Writes the staged rows of a batch into their table, once, as the commit of the batch.
--   p_write_no       of open_table()
--   p_sink, p_batch  as of publish_staged
--   p_table          the name that open_table() returned
--   p_chunks         the chunks of the successful tasks; other rows are ignored
--   p_rows           the number of their rows, as the tasks counted
--   p_path           the search_path for triggers, policies and defaults of the table
-- Returns true; false if this batch (of a batch write: or a later one) was written before, and nothing was changed.
-- Errors: PQ003; 42501; PQ008 when the table was changed since rows were staged, or rows are missing, because of a
-- later write of the batch, maintain() or a crash of Postgres; PQ010 as in publish_staged; 21000 when two rows have one
-- key and no column orders them; 22001 for text that the table would truncate or round; those of the table, its
-- constraints and triggers. Locks: the table, against changes of its columns; those of begin_table_batch(); the rows
-- that it writes, in the order of the keys.
create or replace function pgqueue.apply_table_batch(p_write_no bigint, p_sink text, p_batch bigint, p_table text,
                                                     p_chunks bigint[], p_rows bigint,
                                                     p_path text default current_setting('search_path')) returns boolean
language plpgsql as $$
declare
    v_name       text[];
    v_statements text[];
    v_statement  text;
    v_rows       bigint;
    v_changed    text;
    v_zone       text := current_setting('TimeZone');
begin
    begin
        v_name := parse_ident(p_table);
    exception when invalid_parameter_value then
        null;
    end;
    if cardinality(v_name) is distinct from 2 or p_chunks is null or p_path is null then
        raise exception 'p_table must be a name of open_table(), p_chunks a list and p_path a search path, not %, % '
                        'and %',
                        coalesce(quote_literal(p_table), 'null'), coalesce(p_chunks::text, 'null'),
                        coalesce(quote_literal(p_path), 'null')
            using errcode = 'PQ003', column = 'p_table, p_chunks, p_path';
    end if;
    begin
        execute format('lock table %I.%I in row exclusive mode', v_name[1], v_name[2]);  -- lock: target
    exception when undefined_table or invalid_schema_name then
        raise exception 'table % was dropped while batch % of sink % was written', p_table, p_batch, p_sink
            using errcode = 'PQ008', hint = 'Nothing was written. Create the table, and run the batch again.';
    end;
    v_statements := pgqueue.begin_table_batch(p_write_no, p_sink, p_batch, p_table, p_rows);
    if v_statements is null then
        return false;
    end if;
    perform set_config('TimeZone', 'UTC', true);
    execute v_statements[1] into v_rows, v_changed using p_chunks;
    perform set_config('TimeZone', v_zone, true);
    if v_rows <> p_rows then
        raise exception 'batch % of sink % is not complete: it has % of % staged rows for table %', p_batch, p_sink,
                        v_rows, p_rows, p_table
            using errcode = 'PQ008',
                  hint = 'A crash or a failover deletes staged rows. Nothing was written; run the batch again.';
    elsif v_changed <> '' then
        raise exception 'table % would truncate or round text of column %', p_table, v_changed
            using errcode = '22001', hint = 'Make the column wider, or name it in the sink''s option allowRounding.';
    end if;
    if v_statements[2] is not null then
        execute v_statements[2] into v_rows using p_chunks;
        if v_rows is not null then
            raise exception 'batch % of sink % has two rows of one key for table %', p_batch, p_sink, p_table
                using errcode = '21000',
                      hint = 'Set the option sequenceBy to a column: the row with the highest value wins.';
        end if;
    end if;
    perform set_config('search_path', p_path, true);
    foreach v_statement in array v_statements[3:] loop
        execute v_statement using p_chunks;
    end loop;
    return true;
end $$;
