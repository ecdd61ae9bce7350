-- Schemas of streams: the columns of the payloads of a json stream, in Spark's DDL. A schema is compiled to a jsonpath
-- when it is set, and each payload is checked with it.
-- in use: select format('the schema of stream %s', name) from pgqueue.streams where schema is not null

-- The types of columns, except decimal, array and struct.
--   names  in Spark's DDL
--   type   in Spark's JSON of a schema
--   fits   the jsonpath predicate for a JSON value that is not null. It is true or false of each value, never unknown
--   words  the allowed values, for errors
create or replace function _pgqueue.schema_types() returns table (names text[], type text, fits text, words text)
language sql immutable as $$
    with day (regex) as (
        values ('(([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])'
                '|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|([0-9]{2}(0[48]|[2468][048]|[13579][26])'
                '|(0[48]|[2468][048]|[13579][26])00)-02-29)')
    ), moment (regex) as (
        select regex || '[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,6})?)?' from day
    )
    values ('{string}'::text[], 'string', '@.type() == "string"', 'a text'),
           ('{boolean}', 'boolean', '@.type() == "boolean"', 'true or false')
    union all
    select names::text[], type, format('@.type() == "number" && @ >= %s && @ <= %s && @ %% 1 == 0', low, high),
           format('a whole number from %s to %s', low, high)
    from (values ('{tinyint, byte}', 'byte', '-128', '127'), ('{smallint, short}', 'short', '-32768', '32767'),
                 ('{int, integer}', 'integer', '-2147483648', '2147483647'),
                 ('{bigint, long}', 'long', '-9223372036854775808', '9223372036854775807')) w (names, type, low, high)
    union all  -- the bounds have the digits of the largest number that is rounded to a finite one
    select names::text[], type, format('@.type() == "number" && @ > -%1$s && @ < %1$s', most), 'a number'
    from (values ('{float, real}', 'float', '3.40282356e38'), ('{double}', 'double', '1.7976931348623158e308'))
         f (names, type, most)
    union all
    select names::text[], type, format('@.type() == "string" && @ like_regex "^%s$"', regex), words
    from (select '{date}', 'date', regex, 'a text such as "2026-01-31"' from day
          union all
          select '{timestamp, timestamp_ltz}', 'timestamp', regex || '(Z|[+-](0[0-9]|1[0-4]):?[0-5][0-9])',
                 'a text such as "2026-01-31T12:00:00.123456Z", or with +01:00 in place of Z' from moment
          union all
          select '{timestamp_ntz}', 'timestamp_ntz', regex,
                 'a text such as "2026-01-31T12:00:00.123456", without a time zone' from moment
          union all
          values ('{binary}', 'binary', '([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?',
                  'a text in base64')) t (names, type, regex, words)
$$;

-- Raises PQ003: a word of a schema is not the expected one.
create or replace function _pgqueue.refuse_schema(p_words text[], p_at int, p_expected text) returns void
language plpgsql immutable as $$
begin
    raise exception 'p_settings: schema has, as word %, %, but % is expected', p_at,
                    coalesce(quote_literal(left(p_words[p_at], 100)), 'nothing'), p_expected
        using errcode = 'PQ003', column = 'p_settings',
              hint = 'Write columns in Spark''s DDL: id bigint not null, name string, tags array<string>.';
end $$;

-- Parses a type from the words of a schema. Returns the type as Spark's JSON, and the position after it. Errors: PQ003.
create or replace function _pgqueue.read_type(p_words text[], p_at int, p_depth int, out o_type jsonb, out o_at int)
language plpgsql immutable as $$
declare
    v_word text := lower(p_words[p_at]);
    v_of   text[];
begin
    o_at := p_at + 1;
    if v_word in ('array', 'struct') and p_words[o_at] = '<' then
        if p_depth >= 16 then
            perform _pgqueue.refuse_schema(p_words, p_at, 'a type without elements or members, after 16 levels,');
        elsif v_word = 'struct' then
            select r.o_type, r.o_at into o_type, o_at from _pgqueue.read_columns(p_words, o_at + 1, p_depth + 1) r;
        else
            select jsonb_build_object('type', 'array', 'elementType', r.o_type, 'containsNull', true), r.o_at
            into o_type, o_at from _pgqueue.read_type(p_words, o_at + 1, p_depth + 1) r;
        end if;
        if p_words[o_at] is distinct from '>' then
            perform _pgqueue.refuse_schema(p_words, o_at, 'a comma or >');
        end if;
        o_at := o_at + 1;
    elsif v_word in ('decimal', 'dec', 'numeric') then
        v_of := regexp_match(array_to_string(p_words[o_at:o_at + 4], ' '), '^[(] ([0-9]{1,2}) (, ([0-9]{1,2}) )?[)]');
        if v_of is not null then
            o_at := o_at + case when v_of[3] is null then 3 else 5 end;
        elsif p_words[o_at] = '(' then
            perform _pgqueue.refuse_schema(p_words, o_at + 1, 'a precision and a scale, such as 10, 2');
        end if;
        o_type := to_jsonb(format('decimal(%s,%s)', coalesce(v_of[1], '10')::int, coalesce(v_of[3], '0')::int));
        if (v_of[1]::int between 1 and 38 and coalesce(v_of[3], '0')::int <= v_of[1]::int) is false then
            perform _pgqueue.refuse_schema(p_words, p_at + 2, 'a precision from 1 to 38, and a scale of at most that,');
        end if;
    else
        o_type := (select to_jsonb(t.type) from _pgqueue.schema_types() t where v_word = any (t.names));
        if o_type is null then
            perform _pgqueue.refuse_schema(p_words, p_at, format('a type (%s, decimal(10, 2), array<...>, struct<...>)',
                (select string_agg(t.names[1], ', ') from _pgqueue.schema_types() t)));
        end if;
    end if;
end $$;

-- Parses columns from the words of a schema, as read_type().
create or replace function _pgqueue.read_columns(p_words text[], p_at int, p_depth int, out o_type jsonb, out o_at int)
language plpgsql immutable as $$
declare
    v_type   jsonb;
    v_name   text;
    v_not    boolean;
    v_fields jsonb[] := '{}';
begin
    o_at := p_at;
    loop
        v_name := btrim(p_words[o_at], '`');
        if (p_words[o_at] ~ '^(`.+`|[[:alpha:]_][[:alnum:]_]*)$') is not true then
            perform _pgqueue.refuse_schema(p_words, o_at, 'the name of a column');
        elsif exists (select from unnest(v_fields) f where lower(f ->> 'name') = lower(v_name)) then
            perform _pgqueue.refuse_schema(p_words, o_at, 'an unused name (Spark ignores case)');
        end if;
        select r.o_type, r.o_at into v_type, o_at
        from _pgqueue.read_type(p_words, o_at + case when p_words[o_at + 1] = ':' then 2 else 1 end, p_depth) r;
        v_not := lower(p_words[o_at]) is not distinct from 'not';
        if v_not and lower(p_words[o_at + 1]) is distinct from 'null' then
            perform _pgqueue.refuse_schema(p_words, o_at + 1, 'null');
        end if;
        o_at := o_at + case when v_not then 2 else 0 end;
        v_fields := v_fields || jsonb_build_object('name', v_name, 'type', v_type, 'nullable', not v_not, 'metadata',
                                                   '{}'::jsonb);
        exit when p_words[o_at] is distinct from ',';
        o_at := o_at + 1;
    end loop;
    o_type := jsonb_build_object('type', 'struct', 'fields', to_jsonb(v_fields));
end $$;

-- A schema as Spark's JSON; null for none. Errors: PQ003 for a text that is not a schema.
-- on setting: when p_type = 'schema' then _pgqueue.read_schema(p_text) is not null
create or replace function _pgqueue.read_schema(p_schema text) returns jsonb
language plpgsql immutable as $$
declare
    v_words text[];
    v_read  record;
begin
    if p_schema is null then
        return null;
    elsif length(p_schema) > 16384 then
        raise exception 'p_settings: schema must have at most 16,384 characters, not %', length(p_schema)
            using errcode = 'PQ003', column = 'p_settings';
    end if;
    v_words := array(select m[1] from regexp_matches(p_schema, '(`[^`]*`|[[:alnum:]_]+|[^[:space:]])', 'g')
                           with ordinality w (m, i) order by i);
    v_read := _pgqueue.read_columns(v_words, 1, 0);
    if v_read.o_at <= cardinality(v_words) then
        perform _pgqueue.refuse_schema(v_words, v_read.o_at, 'a comma or the end');
    end if;
    return v_read.o_type;
end $$;

-- The jsonpath predicate of the values, @, of a type. Members that are not in the schema are allowed. (No method is
-- called on an expression in parentheses, because Postgres prints that jsonpath without them, also in a dump.)
create or replace function _pgqueue.type_fits(p_type jsonb) returns text
language plpgsql immutable as $$
declare
    v_of text[] := regexp_match(p_type #>> '{}', '^decimal[(]([0-9]+),([0-9]+)[)]$');
begin
    if v_of is not null then
        return format('(@.type() == "number" && @ > -%1$s && @ < %1$s && @ %% %2$s == 0'
                      ' || @.type() == "string" && @ like_regex "^-?(0%3$s)%4$s$")',
                      '1' || repeat('0', v_of[1]::int - v_of[2]::int),
                      case v_of[2] when '0' then '1' else '0.' || repeat('0', v_of[2]::int - 1) || '1' end,
                      case when v_of[1]::int > v_of[2]::int
                           then format('|[1-9][0-9]{0,%s}', v_of[1]::int - v_of[2]::int - 1) end,
                      case when v_of[2]::int > 0 then format('([.][0-9]{1,%s})?', v_of[2]) end);
    elsif jsonb_typeof(p_type) = 'string' then
        return (select t.fits from _pgqueue.schema_types() t where t.type = p_type #>> '{}');
    elsif p_type ->> 'type' = 'array' then
        return format('@.type() == "array" && !exists(@[*] ? (!(@.type() == "null" || (%s))))',
                      _pgqueue.type_fits(p_type -> 'elementType'));
    end if;
    -- strict, because lax paths unwrap arrays; then a missing member is unknown
    return '@.type() == "object"'
        || (select string_agg(format(case when (f -> 'nullable')::boolean
                                          then ' && ((exists(@.%1$s)) is unknown'
                                               ' || exists(@.%1$s ? (@.type() == "null" || (%2$s))))'
                                          else ' && !((exists(@.%1$s)) is unknown) && exists(@.%1$s ? (%2$s))' end,
                                     f -> 'name', _pgqueue.type_fits(f -> 'type')), '' order by i)
            from jsonb_array_elements(p_type -> 'fields') with ordinality c (f, i));
end $$;

-- The jsonpath that is true for the payloads of a schema; null for none.
-- on set_stream:
--     if p_settings ? 'schema' then
--         p_stream.schema_path := _pgqueue.schema_path(_pgqueue.read_schema(p_stream.schema));
--     end if;
create or replace function _pgqueue.schema_path(p_schema jsonb) returns jsonpath
language sql immutable as $$
    select format('strict exists($ ? (%s))', _pgqueue.type_fits(p_schema))::jsonpath where p_schema is not null
$$;

-- Why a schema or type does not accept all values of an older one: only nullable columns may be added. Null: it does.
create or replace function _pgqueue.schema_change(p_old jsonb, p_new jsonb) returns text
language plpgsql immutable as $$
declare
    v_old  jsonb;
    v_new  jsonb;
    v_what text;
begin
    if p_old = p_new then
        return null;
    elsif p_old ->> 'type' = 'array' and p_new ->> 'type' = 'array' then
        return _pgqueue.schema_change(p_old -> 'elementType', p_new -> 'elementType');
    elsif (p_old ->> 'type' = 'struct' and p_new ->> 'type' = 'struct') is not true then
        return 'has another type';
    end if;
    for v_old, v_new in
        select o, n
        from jsonb_array_elements(p_old -> 'fields') o
        full join jsonb_array_elements(p_new -> 'fields') n on n -> 'name' = o -> 'name'
    loop
        v_what := case when v_new is null then 'is missing'
                       when v_old is null then case v_new -> 'nullable' when 'false' then 'is new, and not null' end
                       when v_old -> 'nullable' <> v_new -> 'nullable' then 'is nullable in only one of the two'
                       else _pgqueue.schema_change(v_old -> 'type', v_new -> 'type') end;
        if v_what is not null then
            return format('column %s %s', coalesce(v_old, v_new) ->> 'name', v_what);
        end if;
    end loop;
    return null;
end $$;

-- Whether messages of a stream may be copied to a stream with a schema. Both are schemas in DDL; null: none.
-- on bind: and _pgqueue.schema_includes(p_from.schema, p_to.schema)
create or replace function _pgqueue.schema_includes(p_schema text, p_to_schema text) returns boolean
language sql immutable as $$
    select p_to_schema is null
        or (p_schema is not null
            and _pgqueue.schema_change(_pgqueue.read_schema(p_to_schema), _pgqueue.read_schema(p_schema)) is null)
$$;

-- Raises PQ004: a payload does not fit the schema of its stream. The error names the first failing column, but not to a
-- caller that only knows the stream's id.
-- on misfit: perform _pgqueue.refuse_misfit(p_stream, p_data);
create or replace function _pgqueue.refuse_misfit(p_stream pgqueue.streams, p_data jsonb) returns void
language plpgsql as $$
begin
    if p_stream.name is null and not _pgqueue.may_see_names() then
        raise exception 'a message of stream % does not fit its schema', _pgqueue.error_name(p_stream)
            using errcode = 'PQ004', column = 'p_data',
                  hint = 'For a role that may read the views of streams, the error names the column.';
    end if;
    raise exception 'a message of stream % does not fit its schema: %', _pgqueue.error_name(p_stream),
        case when jsonb_typeof(p_data) <> 'object' then 'it is not a JSON object, but of type ' || jsonb_typeof(p_data)
             else (select format('column %s is %s%s, but the message has %s', f ->> 'name',
                                 coalesce((select t.words from _pgqueue.schema_types() t where t.type = f ->> 'type'),
                                          f -> 'type' ->> 'type', f ->> 'type'),
                                 case when not (f -> 'nullable')::boolean then ', not null' end,
                                 coalesce('a value of type ' || jsonb_typeof(p_data -> (f ->> 'name')), 'none'))
                   from jsonb_array_elements(_pgqueue.read_schema(p_stream.schema) -> 'fields')
                        with ordinality c (f, i)
                   where (p_data @@ _pgqueue.schema_path(jsonb_build_object('type', 'struct', 'fields',
                                                                            jsonb_build_array(f)))) is not true
                   order by i limit 1) end
        using errcode = 'PQ004', column = 'p_data',
              hint = format('Its schema is: %s', left(p_stream.schema, 1000));
end $$;

-- Raises PQ003 for a schema that the stream cannot have: only JSON has columns, and a schema must accept all that the
-- previous one accepted.
-- on before_set_stream: perform _pgqueue.check_schema(p_stream.kind, p_stream.schema, p_settings);
create or replace function _pgqueue.check_schema(p_kind text, p_old text, p_settings jsonb) returns void
language plpgsql as $$
declare
    v_change text := _pgqueue.schema_change(_pgqueue.read_schema(p_old), _pgqueue.read_schema(p_settings ->> 'schema'))
                     where p_old is not null and p_settings ->> 'schema' is not null;
begin
    if p_settings ->> 'schema' is not null and p_kind <> 'json' then
        raise exception 'p_settings: schema requires a stream of kind json, not %', p_kind
            using errcode = 'PQ003', column = 'p_settings';
    elsif v_change is not null then
        raise exception 'p_settings: schema must accept all messages that the old one accepts: %', v_change
            using errcode = 'PQ003', column = 'p_settings',
                  hint = 'Add nullable columns. To replace the schema, set it to null first.';
    end if;
end $$;

-- Returns the columns of a stream's schema as Spark's JSON, for StructType.fromJson and from_json. Null: the stream has
-- no schema. Errors: PQ001. Locks: none.
create or replace function pgqueue.schema_of(p_stream text) returns jsonb
language sql stable as $$ select _pgqueue.read_schema((_pgqueue.stream(p_stream)).schema) $$;
