-- Conditions on the rows of tables in Spark (option where). A condition is an SQL expression over the columns of one
-- table. Spark's driver and executors put it into their own statements, which run with the rights of their role. So a
-- condition may only compute and compare: each of its words must be on an allowlist.

-- The allowed words that are neither columns nor functions: words of comparisons, types and parts of times. They
-- include no word of a query, and no type that reads the catalog, such as regclass.
create or replace function _pgqueue.where_words() returns text[]
language sql immutable as $$
    select string_to_array(
        'and or not is null true false unknown isnull notnull distinct from in between symmetric like ilike similar to '
        'escape any some all case when then else end cast as array coalesce nullif greatest least trim both leading '
        'trailing for at time zone with without current_timestamp '
        'text varchar char character varying int integer bigint smallint int2 int4 int8 numeric decimal real double '
        'precision float float4 float8 boolean bool bytea json jsonb jsonpath uuid date timestamp timestamptz interval '
        'epoch year quarter month week day hour minute second dow doy', ' ')
$$;

-- Whether a condition may call a function: all functions of that name are built in, return one value, have no side
-- effects, and depend on their arguments only. (The named functions are stable because they depend on settings such as
-- the time zone.)
create or replace function _pgqueue.is_safe_function(p_function text) returns boolean
language sql stable as $$
    select coalesce(bool_and(oid < 16384 and prokind = 'f' and not proretset and not prosecdef
                             and (provolatile = 'i' or proname = any ('{age, concat, concat_ws, date_add, date_part,
                                  date_subtract, date_trunc, extract, format, length, make_timestamptz, to_char,
                                  to_date, to_json, to_jsonb, to_number, to_timestamp}'))), false)
    from pg_proc where proname = p_function and pronamespace = 'pg_catalog'::regnamespace
$$;

-- Checks a condition on the rows of a table: an SQL expression over its columns.
--   p_where    the expression: columns, literals, operators, types, and built-in functions that only compute
--   p_columns  the names of the table's columns
-- The condition is parsed into words, and rebuilt from them. The time of now() becomes a literal, so that all tasks use
-- the same time. The types are checked by the statement that has the condition. Returns the condition, without
-- parentheses around it, and the columns that it names. Errors: PQ003. Locks: none.
create or replace function pgqueue.scan_where(p_where text, p_columns text[], out condition text, out columns text[])
language plpgsql stable as $$
declare
    v_words text[];
    v_word  text;
    v_name  text;
    v_open  text := '';
begin
    condition := '';
    columns := '{}';
    if octet_length(p_where) <= _pgqueue.max_condition_bytes() then  -- a longer one is not parsed
        v_words := array(select w[1] from regexp_matches(p_where,
            E'now\\s*\\(\\s*\\)|[a-z_][a-z0-9_]*|[0-9]+(?:[.][0-9]*)?(?:e[-+]?[0-9]+)?|[.][0-9]+(?:e[-+]?[0-9]+)?'
            || E'|\'(?:[^\']|\'\')*\'|"(?:[^"]|"")*"|::|[-+*/<>=~!@#%^&|?`]+|\\s+|.', 'gi') w where w[1] !~ E'^\\s');
    end if;
    if coalesce(v_words, '{}') = '{}' then
        raise exception 'p_where must be an expression over columns, of 1 to % bytes, not %',
                        _pgqueue.max_condition_bytes(),
                        coalesce(quote_literal(left(p_where, 50)), 'null')
            using errcode = 'PQ003', column = 'p_where';
    end if;
    for i in 1..cardinality(v_words) loop
        v_word := v_words[i];
        v_name := case when v_word ~ '^"..*"$' then substr(v_word, 2, length(v_word) - 2) else lower(v_word) end;
        if v_word ~ E'^\'..*\'$' or v_word = '''''' then
            -- quote_literal() writes a literal that every session reads in the same way
            v_word := replace(substr(v_word, 2, length(v_word) - 2), '''''', '''');
            perform _pgqueue.check_where_literal(v_word);
            v_word := quote_literal(v_word);
        elsif v_name ~ E'^now\\s*\\(' or v_name = 'current_timestamp' then
            v_word := format('to_timestamp(%s)', extract(epoch from now()));
        elsif v_name = any (p_columns) and v_words[i + 1] is distinct from '(' then
            columns := array(select distinct unnest(columns || v_name));
            v_word := quote_ident(v_name);
        elsif v_word ~ '^["a-zA-Z_]' then
            perform _pgqueue.check_where_word(v_word, v_words[i + 1] = '(', p_columns);
        elsif v_word in ('(', '[') then
            v_open := v_word || v_open;
        elsif v_word in (')', ']') and left(v_open, 1) = translate(v_word, ')]', '([') then
            v_open := substr(v_open, 2);
        elsif v_word !~ '^[0-9.]' and v_word not in (',', '::')
              and (v_word !~ '^[-+*/<>=~!@#%^&|?`]+$' or v_word ~ '--|/[*]') or v_word = '.' then
            raise exception 'p_where must be one expression over columns, and cannot contain %, as in %',
                            quote_literal(v_word), quote_literal(left(p_where, 200))
                using errcode = 'PQ003', column = 'p_where';
        end if;
        condition := condition || ' ' || v_word;
    end loop;
    if v_open <> '' then
        raise exception 'p_where has an unclosed % in %', left(v_open, 1), quote_literal(left(p_where, 200))
            using errcode = 'PQ003', column = 'p_where';
    end if;
end $$;

-- Raises PQ003 unless a condition may have a word that is not a column.
create or replace function _pgqueue.check_where_word(p_word text, p_is_called boolean, p_columns text[])
returns void language plpgsql stable as $$
begin
    if lower(p_word) = any (_pgqueue.where_words()) or p_is_called and _pgqueue.is_safe_function(lower(p_word)) then
        return;
    elsif p_is_called then
        raise exception 'p_where may call only built-in functions without side effects, not %', p_word
            using errcode = 'PQ003', column = 'p_where';
    end if;
    raise exception 'p_where must name columns of the table, which has no column %', p_word
        using errcode = 'PQ003', column = 'p_where',
              hint = _pgqueue.suggestion(p_word, p_columns);
end $$;

-- Raises PQ003 for a text that Postgres converts to a time that depends on the current time, so that each task would
-- get another one.
create or replace function _pgqueue.check_where_literal(p_text text) returns void
language plpgsql stable as $$
begin
    if p_text ~* '[[:<:]](now|today|tomorrow|yesterday)[[:>:]]' and p_text::timestamptz is not null then
        raise exception 'p_where contains the text %, which would mean a different time in each task',
                        quote_literal(p_text)
            using errcode = 'PQ003', column = 'p_where',
                  hint = 'now() and current_timestamp are the same for all tasks: date_trunc(''day'', now()). To '
                         'compare a column with this word, write the word in two parts: ''to'' || ''day''.';
    end if;
exception when data_exception then
    null;  -- not a time
end $$;
