-- The conversion of a staged value to the type of a column. fit() decides for each pair of types whether the value is
-- preserved; no other function does.

-- The type of a column of staged rows, as in format_type(), for a type of Spark, as in its simpleString; null: the type
-- is refused.
create or replace function _pgqueue.staged_type(p_type text) returns text
language sql immutable as $$
    select t.staged || case when p_type like 'array<%' then '[]' else '' end
    from (values ('boolean', 'boolean'), ('tinyint', 'smallint'), ('smallint', 'smallint'), ('int', 'integer'),
                 ('bigint', 'bigint'), ('float', 'real'), ('double', 'double precision'), ('date', 'date'),
                 ('decimal[(][0-9]+,-?[0-9]+[)]', 'numeric'),
                 ('(string|char|varchar)( collate .*|[(][0-9]+[)])?', 'text'),
                 ('binary', 'bytea'), ('timestamp', 'timestamp with time zone'),
                 ('timestamp_ntz', 'timestamp without time zone'),
                 ('interval (day|hour|minute|second)( to (hour|minute|second))?', 'interval'))
         t (pattern, staged)
    where coalesce(substring(p_type from '^array<(.*)>$'), p_type) ~ ('^' || t.pattern || '$')
$$;

-- The base type of a column, below its domains, which have the modifiers.
-- Returns the base type, with its modifier, as SQL (o_full) and as oid (o_base); for an array, its brackets (o_dims,
-- else ''); of the value, or of the items of the array, the type (o_item) and modifier (o_typmod).
create or replace function _pgqueue.stored_type(p_type oid, p_typmod int, out o_full text, out o_base oid,
                                                out o_dims text, out o_item oid, out o_typmod int)
language sql stable as $$
    with recursive below (type, typmod, depth, is_item) as (
        select p_type, p_typmod, 1, false
        union all
        select case when t.typtype = 'd' then t.typbasetype else t.typelem end,
               case when t.typtype = 'd' then t.typtypmod else b.typmod end, b.depth + 1,
               b.is_item or t.typtype <> 'd'
        from below b join pg_type t on t.oid = b.type
        where t.typtype = 'd' or (t.typcategory = 'A' and t.typelem <> 0 and not b.is_item)
    ), base as (select * from below where not is_item order by depth desc limit 1)
    select format_type(b.type, b.typmod), b.type, case when i.is_item then '[]' else '' end, i.type, i.typmod
    from base b, (select * from below order by depth desc limit 1) i
$$;

-- Whether a column preserves the values of a type.
--   p_type                    as in Spark's simpleString
--   p_item, p_typmod, p_dims  of the column, from stored_type()
-- Returns exact: the stored value equals the sent one, or an error is raised (a number may be too large); rounds:
-- different values may become equal; null: the column does not accept the type. The value of a float is its shortest
-- text, and a decimal is exact in a float that has all its digits. Text is exact, because the commit checks each value
-- with text_changes(). Equality is that of the column, for example of citext.
create or replace function _pgqueue.fit(p_type text, p_item oid, p_typmod int, p_dims text) returns text
language sql stable as $$
    select case
        when t.staged is null or (p_type like 'array<%' and p_dims = '') then null
        when t.staged like 'text%' then case when t.stored = 'money' then 'rounds' else 'exact' end
        when (p_type like 'array<%') <> (p_dims = '[]') then null
        when t.stored in ('smallint', 'integer', 'bigint') then case when n.places <= 0 then 'exact' end
        when t.stored = 'oid' then case when t.item = 'bigint' then 'exact' end  -- a cast of an int wraps
        when t.stored in ('numeric', 'real', 'double precision')
            then case when not n.is_number then null
                      when t.stored = 'numeric' and (p_typmod < 4 or n.places <= n.stored_places)
                        or t.stored = 'real' and (t.item = 'real' or n.digits <= 6)
                        or t.stored = 'double precision' and (t.item in ('real', 'double precision') or n.digits <= 15)
                      then 'exact' else 'rounds' end
        when t.item in ('boolean', 'bytea', 'date') and t.item = t.stored
          or t.item = 'date' and t.stored = 'timestamp without time zone' then 'exact'
        when t.item = t.stored
            then case when format_type(p_item, p_typmod) ~ '[(][0-5][)]'
                        or t.item = 'interval' and format_type(p_item, p_typmod)
                           !~ '^interval( .*second)?([(]6[)])?$'
                      then 'rounds' else 'exact' end
        end
    from (select _pgqueue.staged_type(p_type) as staged, rtrim(_pgqueue.staged_type(p_type), '[]') as item,
                 format_type(p_item, null) as stored) t
    cross join lateral (
        select t.item in ('smallint', 'integer', 'bigint', 'numeric', 'real', 'double precision') as is_number,
               case t.item when 'smallint' then 5 when 'integer' then 10 when 'bigint' then 19
                           when 'numeric' then substring(p_type from '[(]([0-9]+),')::int end as digits,
               case when t.item = 'numeric' then substring(p_type from ',(-?[0-9]+)[)]')::int
                    when t.item in ('smallint', 'integer', 'bigint') then 0 end as places,
               (((p_typmod - 4) & 2047) # 1024) - 1024 as stored_places) n
$$;

-- The cast of a staged value, as SQL; null: it needs none. A float becomes a numeric by its shortest text, because the
-- cast of Postgres drops digits after the 15th, or the 6th. (apply_table_batch() sets extra_float_digits.) The writer's
-- search_path may begin with a schema that has a type named text or date, so these names have their schema, too. Names
-- such as integer, timestamp(3) with time zone, and interval have none: they are keywords.
create or replace function _pgqueue.written_cast(p_staged text, p_full text, p_base oid, p_item oid, p_dims text)
returns text language sql stable as $$
    select case when p_staged ~ '^(real|double precision)' and p_item = 'numeric'::regtype
                then 'pg_catalog.text' || p_dims || '::' else '' end
           || case when i.typnamespace = 'pg_catalog'::regnamespace and i.typname <> 'interval'
                    and regexp_replace(t.name, E'([(][^)]*[)])?(\\[\\])?$', '') = quote_ident(i.typname)
                   then 'pg_catalog.' else '' end || t.name
    from pg_type i
    cross join lateral (select case when i.typcategory in ('S', 'V') then format_type(p_base, -1)
                                    else p_full end as name) t
    where i.oid = p_item and t.name <> p_staged
$$;

-- Whether staged text is changed by the type of a column: digits, a zone, the time of a date, or trailing spaces of
-- varchar(n), which an insert silently truncates; also in the bounds of a range. The value is compared with that of a
-- wider type.
-- Returns a condition, in which %1$s is the text; it needs the time zone UTC. Null: the type never changes text, or
-- raises an error.
create or replace function _pgqueue.text_changes(p_item oid, p_typmod int, p_dims text) returns text
language sql stable as $$
    select case when w.name ~ '^date(multi)?range$'  -- which writes the same days with other bounds
                then '%1$s::text operator(pg_catalog.~) '':'''
                else format('%%1$s::%1$s operator(pg_catalog.<>) %%1$s::%2$s::%1$s', w.wide || p_dims,
                            format_type(p_item, p_typmod) || p_dims
                            || case when w.name in ('real', 'double precision') or w.name ~ '^ts(multi)?range$'
                                    then '::text' || p_dims else '' end) end
           || case when w.name ~ '^(time|interval|ts)'  -- more digits than microseconds
                   then ' or %1$s::text operator(pg_catalog.~) ''[.][0-9]{6}[0-9]*[1-9]''' else '' end
    from (select t.name, case
              when t.name in ('name', '"char"') or (t.name = 'character varying' and p_typmod >= 0) then 'text'
              when t.name in ('real', 'double precision') or (t.name = 'numeric' and p_typmod >= 0)
                  then 'numeric'
              when t.name = 'oid' then 'bigint'
              -- an array of a domain is cast with its lengths
              when p_dims <> '' and p_typmod >= 0 and t.name = 'character' then 'bpchar'
              when p_dims <> '' and p_typmod >= 0 and t.name ~ '^bit' then 'bit varying'
              when t.name = 'date' or t.name ~ '^timestamp' then 'timestamp with time zone'
              when t.name ~ '^ts(tz)?(multi)?range$' then regexp_replace(t.name, '^ts(tz)?', 'tstz')
              when t.name ~ '^date(multi)?range$' then 'text'
              when t.name ~ '^time ' then 'time with time zone'
              when t.name = 'interval' then 'interval' end as wide
          from (select format_type(p_item, null) as name) t) w
    where w.wide is not null
$$;
