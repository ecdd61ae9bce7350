-- Recurring times: of a cron expression, as in Vixie cron, or of an interval; in a time zone.
--
-- When daylight saving time begins, local times are skipped; when it ends, local times are repeated. An expression with
-- a star in its minutes or hours is for periodic jobs and follows elapsed time: it runs twice in a repeated hour, and
-- not in a skipped one. Any other expression, and an interval of days or months, means a time of the day. It runs once:
-- at the first of two equal times, and at the end of the gap if it is skipped.
--
-- Intermediate times are timestamps without a time zone: local ones, or UTC if their names say so. An addition to a
-- timestamptz would depend on the session's time zone.

-- A parsed cron expression: the allowed values of each field.
do $$
begin
    if to_regtype('pgqueue.cron') is null then
        create type pgqueue.cron as (minutes int[], hours int[], days int[], months int[], weekdays int[],
                                     either_day boolean, by_clock boolean);
    end if;
end $$;

-- The numbers of a field of a cron expression, ascending. Errors: PQ003.
--   p_what      the name of the field, for the error
--   p_lo, p_hi  the allowed numbers
--   p_names     names for p_lo and the following numbers
create or replace function _pgqueue.cron_field(p_cron text, p_what text, p_field text, p_lo int, p_hi int,
                                               p_names text[] default '{}') returns int[]
language plpgsql immutable as $$
declare
    v_item text;
    v_part text[];
    v_ends int[];
    v_step int;
    v_all  int[] := '{}';
begin
    foreach v_item in array string_to_array(lower(p_field collate "C"), ',') loop
        v_part := regexp_match(v_item, '^(?:[*]|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,2}))?$');
        v_ends := array(select case when p ~ '^[0-9]' then p::int else array_position(p_names, p) - 1 + p_lo end
                        from unnest(array[v_part[1], coalesce(v_part[2], v_part[1])]) with ordinality x (p, i)
                        order by i);
        if v_item ~ '^[*]' then
            v_ends := array[p_lo, p_hi];
        elsif v_ends[2] = 0 and v_ends[1] > 0 and p_hi = 7 then
            v_ends[2] := 7;  -- fri-sun
        end if;
        v_step := coalesce(v_part[3]::int, 1);
        if (v_part is not null and p_lo <= v_ends[1] and v_ends[1] <= v_ends[2] and v_ends[2] <= p_hi
            and v_step between 1 and p_hi and (v_part[3] is null or v_part[2] is not null or v_item ~ '^[*]'))
           is not true then
            raise exception 'the % of p_cron must be numbers from %, ranges such as 1-5, *, and */2 or 1-5/2 for every '
                            'second one, separated by commas; not %, as in %',
                            p_what,
                            concat_ws(' to ', p_lo, p_hi || case when p_names <> '{}' then format(
                                ', names from %s to %s', p_names[1], p_names[cardinality(p_names)]) else '' end),
                            quote_literal(left(v_item, 100)), quote_literal(left(p_cron, 200))
                using errcode = 'PQ003', column = 'p_cron';
        end if;
        v_all := v_all || array(select generate_series(v_ends[1], v_ends[2], v_step));
    end loop;
    return array(select distinct case when p_hi = 7 then n % 7 else n end as n from unnest(v_all) n order by n);
end $$;

-- Parses a cron expression. Errors: PQ003.
create or replace function _pgqueue.parse_cron(p_cron text) returns pgqueue.cron
language plpgsql immutable as $$
declare
    v_names  text[] := '{@hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually}';
    v_means  text[] := '{0 * * * *, 0 0 * * *, 0 0 * * *, 0 0 * * 0, 0 0 1 * *, 0 0 1 1 *, 0 0 1 1 *}';
    v_text   text := lower(btrim(p_cron, E' \t\r\n') collate "C");
    v_fields text[] := regexp_split_to_array(coalesce(v_means[array_position(v_names, v_text)], v_text), E'\\s+');
    v_cron   pgqueue.cron;
begin
    -- a list of millions of numbers would take hours
    if cardinality(v_fields) is distinct from 5 or length(p_cron) > 10000 then
        raise exception 'p_cron must be minute, hour, day of the month, month and day of the week, separated by '
                        'spaces, '
                        'of at most 10,000 characters, or %, not %',
                        array_to_string(v_names, ', ', ''), coalesce(quote_literal(left(p_cron, 200)), 'null')
            using errcode = 'PQ003', column = 'p_cron';
    end if;
    v_cron.minutes := _pgqueue.cron_field(p_cron, 'minute', v_fields[1], 0, 59);
    v_cron.hours := _pgqueue.cron_field(p_cron, 'hour', v_fields[2], 0, 23);
    v_cron.days := _pgqueue.cron_field(p_cron, 'day of the month', v_fields[3], 1, 31);
    v_cron.months := _pgqueue.cron_field(p_cron, 'month', v_fields[4], 1, 12,
                                         '{jan,feb,mar,apr,may,jun,jul,aug,sep,oct,nov,dec}');
    v_cron.weekdays := _pgqueue.cron_field(p_cron, 'day of the week', v_fields[5], 0, 7,
                                           '{sun,mon,tue,wed,thu,fri,sat}');
    v_cron.either_day := v_fields[3] not like '*%' and v_fields[5] not like '*%';
    v_cron.by_clock := v_fields[1] not like '*%' and v_fields[2] not like '*%';
    return v_cron;
end $$;

-- The first local time of a cron expression, from p_from on; null: there is none. Every valid expression has a time
-- within 41 years, the longest time between two February 29 on the same day of the week.
create or replace function _pgqueue.first_match(p_cron pgqueue.cron, p_from timestamp) returns timestamp
language plpgsql immutable as $$
declare
    v_from   timestamp := date_trunc('minute', p_from + interval '59.999999 s');
    v_today  timestamp := date_trunc('day', v_from);
    v_minute int := (select min(60 * h + m) from unnest(p_cron.hours) h cross join unnest(p_cron.minutes) m
                     where v_today + make_interval(mins => 60 * h + m) >= v_from);
    v_day    timestamp := (
        -- in the select list, generate_series computes its rows one by one, up to the limit
        select d from (select generate_series(v_today, v_today + interval '41 years', interval '1 day') as d) x
        where extract(month from d)::int = any (p_cron.months) and (d > v_today or v_minute is not null)
          and case when p_cron.either_day
                   then extract(day from d)::int = any (p_cron.days) or extract(dow from d)::int = any (p_cron.weekdays)
                   else extract(day from d)::int = any (p_cron.days)
                        and extract(dow from d)::int = any (p_cron.weekdays) end
        limit 1);
begin
    return v_day + make_interval(mins => case when v_day = v_today then v_minute
                                              else 60 * p_cron.hours[1] + p_cron.minutes[1] end);
end $$;

-- The offset of a time zone from UTC, at a time in UTC.
create or replace function _pgqueue.utc_offset(p_utc timestamp, p_time_zone text) returns interval
language sql stable as $$ select (p_utc at time zone 'UTC' at time zone p_time_zone) - p_utc $$;

-- The first change of a time zone's offset after p_utc and up to p_to, all in UTC and whole seconds; null: there is
-- none.
create or replace function _pgqueue.clock_change(p_time_zone text, p_utc timestamp, p_to timestamp) returns timestamp
language plpgsql stable as $$
declare
    v_offset interval := _pgqueue.utc_offset(p_utc, p_time_zone);
    v_lo     timestamp;
    v_hi     timestamp;
    v_at     timestamp;
begin
    select min(g) into v_hi
    from (select g from generate_series(p_utc, p_to, '1 day') g union all select p_to) x
    where _pgqueue.utc_offset(g, p_time_zone) <> v_offset;
    v_lo := greatest(v_hi - interval '1 day', p_utc);
    while v_hi - v_lo > interval '1 s' loop
        v_at := date_trunc('second', v_lo + (v_hi - v_lo) / 2);
        if _pgqueue.utc_offset(v_at, p_time_zone) = v_offset then
            v_lo := v_at;
        else
            v_hi := v_at;
        end if;
    end loop;
    return v_hi;
end $$;

-- A local time in UTC: the first of two equal times; the end of the gap for a skipped time.
create or replace function _pgqueue.local_to_utc(p_local timestamp, p_time_zone text) returns timestamp
language plpgsql stable as $$
declare
    v_utc    timestamp := p_local at time zone p_time_zone at time zone 'UTC';
    v_change timestamp := _pgqueue.clock_change(p_time_zone, v_utc - interval '1 day', v_utc + interval '1 day');
    -- with the offset before a change
    v_before timestamp := p_local - _pgqueue.utc_offset(v_utc - interval '1 day', p_time_zone);
begin
    return case when v_change is null then v_utc
                when v_before < v_change then v_before
                else greatest(p_local - _pgqueue.utc_offset(v_change, p_time_zone), v_change) end;
end $$;

-- The first time of a cron expression after p_after; null: there is none. Errors: PQ003.
create or replace function _pgqueue.next_by_cron(p_cron text, p_time_zone text, p_after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
    v_cron   pgqueue.cron := _pgqueue.parse_cron(p_cron);
    v_utc    timestamp := date_trunc('second', p_after at time zone 'UTC');
    -- local
    v_from   timestamp := date_trunc('minute', v_utc + _pgqueue.utc_offset(v_utc, p_time_zone)) + interval '1 minute';
    v_match  timestamp;
    v_change timestamp;
begin
    if v_cron.by_clock then
        -- a local time that is repeated has already run
        v_change := _pgqueue.clock_change(p_time_zone, v_utc - interval '1 day', v_utc);
        v_from := greatest(v_from, v_change + _pgqueue.utc_offset(v_change - interval '1 s', p_time_zone));
        return _pgqueue.local_to_utc(_pgqueue.first_match(v_cron, v_from), p_time_zone) at time zone 'UTC';
    end if;
    loop
        -- in UTC, unless the offset changes before it
        v_match := _pgqueue.first_match(v_cron, v_from) - _pgqueue.utc_offset(v_utc, p_time_zone);
        v_change := _pgqueue.clock_change(p_time_zone, v_utc, v_match);
        exit when v_change is null;
        v_utc := v_change;
        v_from := v_utc + _pgqueue.utc_offset(v_utc, p_time_zone);
    end loop;
    return v_match at time zone 'UTC';
end $$;

-- The p_n-th time after the start of a schedule with an interval. Its months and days follow the calendar, the rest
-- elapsed time.
create or replace function _pgqueue.nth_time(p_start timestamptz, p_every interval, p_time_zone text, p_n bigint)
returns timestamptz language plpgsql stable as $$
declare
    v_days interval := date_trunc('day', p_every);  -- its months and days
begin
    return ((case when v_days = interval '0' then p_start at time zone 'UTC'
                  else _pgqueue.local_to_utc((p_start at time zone p_time_zone) + v_days * p_n, p_time_zone) end)
            + (p_every - v_days) * p_n) at time zone 'UTC';
end $$;

-- The first time after p_after of a schedule with an interval.
create or replace function _pgqueue.next_by_interval(p_start timestamptz, p_every interval, p_time_zone text,
                                                     p_after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
    -- the average in seconds: Postgres counts a month as 30 days, but it has 30.436875
    v_every numeric := extract(epoch from p_every) + 86400 * 0.436875 * extract(month from p_every);
    v_n     bigint := greatest(0, floor(extract(epoch from p_after - p_start) / v_every));  -- approximately
begin
    while v_n > 0 and _pgqueue.nth_time(p_start, p_every, p_time_zone, v_n - 1) > p_after loop
        v_n := v_n - 1;
    end loop;
    while _pgqueue.nth_time(p_start, p_every, p_time_zone, v_n) <= p_after loop
        v_n := v_n + 1;
    end loop;
    return _pgqueue.nth_time(p_start, p_every, p_time_zone, v_n);
end $$;
