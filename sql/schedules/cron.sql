-- Times that repeat: of a cron expression, as Vixie's cron reads it, or by an interval; in a time zone.
--
-- Where clocks go forward, a local time does not exist; where they go back, it comes twice. An expression with a star
-- in its minutes or hours is for jobs that run all the time. It goes by the hours that really pass: twice through an
-- hour that is repeated, and not through one that is skipped. Any other expression, and an interval of days or months,
-- means a time of the day. It comes once: at the first of two, and at the end of the gap if it falls into one.
--
-- Times in between are timestamps without a time zone: local ones, or UTC where their names have a u. To add to a
-- timestamptz would go by the session's zone.

-- A cron expression: what each field allows.
do $$
begin
    if to_regtype('pgqueue.cron') is null then
        create type pgqueue.cron as (minutes int[], hours int[], days int[], months int[], weekdays int[],
                                     either_day boolean, by_clock boolean);
    end if;
end $$;

-- A field of a cron expression as numbers, ascending. Errors: PQ003.
--   p_what      the name of the field, for the error
--   p_lo, p_hi  the allowed numbers
--   p_names     words for p_lo and the numbers that follow it
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
                        from unnest(v_part[1:2]) with ordinality x (p, i) where p is not null order by i);
        if v_item ~ '^[*]' then
            v_ends := array[p_lo, p_hi];
        elsif v_ends[2] = 0 and v_ends[1] > 0 and p_hi = 7 then
            v_ends[2] := 7;  -- fri-sun
        end if;
        v_step := coalesce(v_part[3]::int, 1);
        if v_part is null or array_position(v_ends, null) is not null or v_ends[1] < p_lo
           or v_ends[cardinality(v_ends)] > p_hi
           or v_ends[1] > v_ends[2] or v_step not between 1 and p_hi
           or (v_part[3] is not null and cardinality(v_ends) = 1) then
            raise exception 'the % of p_cron has numbers from %, ranges such as 1-5, *, and */2 or 1-5/2 for every '
                            'second one, with commas between them; not %, as in %',
                            p_what,
                            concat_ws(' to ', p_lo, p_hi || case when p_names <> '{}' then format(
                                ', names from %s to %s', p_names[1], p_names[cardinality(p_names)]) else '' end),
                            quote_literal(left(v_item, 100)), quote_literal(left(p_cron, 200))
                using errcode = 'PQ003', column = 'p_cron';
        end if;
        v_all := v_all || array(select generate_series(v_ends[1], v_ends[cardinality(v_ends)], v_step));
    end loop;
    return array(select distinct case when p_hi = 7 then n % 7 else n end as n from unnest(v_all) n order by n);
end $$;

-- Reads a cron expression. Errors: PQ003.
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
        raise exception 'p_cron is minute, hour, day of the month, month and day of the week, with spaces between '
                        'them, of at most 10,000 characters, or %, not %',
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

-- The first local time from p_from on that a cron expression allows; null: there is none. Every expression that comes
-- at all comes within 41 years: that is how long a February 29 may wait for its day of the week.
create or replace function _pgqueue.first_match(p_cron pgqueue.cron, p_from timestamp) returns timestamp
language plpgsql immutable as $$
declare
    v_from   timestamp := date_trunc('minute', p_from + interval '59.999999 s');
    v_day    date := v_from;
    v_minute int := (select min(60 * h + m) from unnest(p_cron.hours) h cross join unnest(p_cron.minutes) m
                     where 60 * h + m >= 60 * extract(hour from v_from) + extract(minute from v_from));
begin
    if v_minute is null then
        v_day := v_day + 1;
    end if;
    while v_day < v_from + interval '41 years' loop
        if extract(month from v_day)::int <> all (p_cron.months) then
            v_day := date_trunc('month', v_day::timestamp) + interval '1 month';
            continue;
        end if;
        exit when case when p_cron.either_day then extract(day from v_day)::int = any (p_cron.days)
            or extract(dow from v_day)::int = any (p_cron.weekdays)
                       else extract(day from v_day)::int = any (p_cron.days)
                           and extract(dow from v_day)::int = any (p_cron.weekdays) end;
        v_day := v_day + 1;
    end loop;
    return case when v_day < v_from + interval '41 years' then
        v_day + make_interval(mins => case when v_day = v_from::date then v_minute
                                           else 60 * p_cron.hours[1] + p_cron.minutes[1] end) end;
end $$;

-- A time in UTC as the local time of a time zone.
create or replace function _pgqueue.local(p_u timestamp, p_time_zone text) returns timestamp
language sql stable as $$ select p_u at time zone 'UTC' at time zone p_time_zone $$;

-- When the clocks of a time zone are changed first, after p_u and up to p_to, all in UTC and whole seconds; null: not
-- in that time.
create or replace function _pgqueue.clock_change(p_time_zone text, p_u timestamp, p_to timestamp) returns timestamp
language plpgsql stable as $$
declare
    v_ahead interval := _pgqueue.local(p_u, p_time_zone) - p_u;
    v_lo    timestamp;
    v_hi    timestamp;
    v_at    timestamp;
begin
    select min(g) into v_hi
    from (select g from generate_series(p_u, p_to, '1 day') g union all select p_to) x
    where _pgqueue.local(g, p_time_zone) - g <> v_ahead;
    v_lo := greatest(v_hi - interval '1 day', p_u);
    while v_hi - v_lo > interval '1 s' loop
        v_at := date_trunc('second', v_lo + (v_hi - v_lo) / 2);
        if _pgqueue.local(v_at, p_time_zone) - v_at = v_ahead then
            v_lo := v_at;
        else
            v_hi := v_at;
        end if;
    end loop;
    return v_hi;
end $$;

-- When a local time comes, in UTC: the first of two; the end of the gap, where it does not exist.
create or replace function _pgqueue.first_at(p_local timestamp, p_time_zone text) returns timestamp
language plpgsql stable as $$
declare
    v_u      timestamp := p_local at time zone p_time_zone at time zone 'UTC';
    v_change timestamp := _pgqueue.clock_change(p_time_zone, v_u - interval '1 day', v_u + interval '1 day');
    v_before timestamp;  -- by the clock of before the change
begin
    if v_change is null then
        return v_u;
    end if;
    v_before := p_local - (_pgqueue.local(v_u - interval '1 day', p_time_zone) - (v_u - interval '1 day'));
    return case when v_before < v_change then v_before
                else greatest(p_local - (_pgqueue.local(v_change, p_time_zone) - v_change), v_change) end;
end $$;

-- The first time of a cron expression after p_after; null: there is none. Errors: PQ003.
create or replace function _pgqueue.next_by_cron(p_cron text, p_time_zone text, p_after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
    v_cron   pgqueue.cron := _pgqueue.parse_cron(p_cron);
    v_u      timestamp := date_trunc('second', p_after at time zone 'UTC');
    v_from   timestamp := date_trunc('minute', _pgqueue.local(v_u, p_time_zone)) + interval '1 minute';  -- local
    v_match  timestamp;
    v_change timestamp;
begin
    if v_cron.by_clock then
        -- a time that a clock shows for the second time, after it was set back, has been there
        v_change := _pgqueue.clock_change(p_time_zone, v_u - interval '1 day', v_u);
        v_from := greatest(v_from, _pgqueue.local(v_change - interval '1 s', p_time_zone) + interval '1 s');
        return _pgqueue.first_at(_pgqueue.first_match(v_cron, v_from), p_time_zone) at time zone 'UTC';
    end if;
    loop
        v_match := _pgqueue.first_match(v_cron, v_from);
        v_match := v_u + (v_match - _pgqueue.local(v_u, p_time_zone));  -- in UTC, as long as the clock is not changed
        v_change := _pgqueue.clock_change(p_time_zone, v_u, v_match);
        if v_change is null then
            return v_match at time zone 'UTC';
        end if;
        v_u := v_change;
        v_from := _pgqueue.local(v_u, p_time_zone);
    end loop;
end $$;

-- The p_n-th time after the start of a schedule that repeats by an interval. Its months and days go by the calendar,
-- the rest by the clock.
create or replace function _pgqueue.nth_time(p_start timestamptz, p_every interval, p_time_zone text, p_n bigint)
returns timestamptz language plpgsql stable as $$
declare
    v_days interval := _pgqueue.calendar_part(p_every);
begin
    return ((case when v_days = interval '0' then p_start at time zone 'UTC'
                  else _pgqueue.first_at((p_start at time zone p_time_zone) + v_days * p_n, p_time_zone) end)
            + (p_every - v_days) * p_n) at time zone 'UTC';
end $$;

-- The months and days of an interval, without its hours.
create or replace function _pgqueue.calendar_part(p_every interval) returns interval
language sql immutable as $$
    select make_interval(years => extract(year from p_every)::int, months => extract(month from p_every)::int,
                         days => extract(day from p_every)::int)
$$;

-- The first time after p_after of a schedule that repeats by an interval.
create or replace function _pgqueue.next_by_interval(p_start timestamptz, p_every interval, p_time_zone text,
                                                     p_after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
    -- an estimate: months differ in length
    v_n    bigint := greatest(0, floor(extract(epoch from p_after - p_start) / extract(epoch from p_every)));
    v_step bigint := 1;
    v_low  bigint := v_n;  -- in the end, of two that follow one another the one whose time is not after p_after
begin
    -- The steps double, so that an estimate that is far from it costs little more than one that is near.
    while v_low >= 0 and _pgqueue.nth_time(p_start, p_every, p_time_zone, v_low) > p_after loop
        v_n := v_low;
        v_low := greatest(v_low - v_step, -1);
        v_step := v_step * 2;
    end loop;
    while _pgqueue.nth_time(p_start, p_every, p_time_zone, v_n) <= p_after loop
        v_low := v_n;
        v_n := v_n + v_step;
        v_step := v_step * 2;
    end loop;
    while v_n - v_low > 1 loop
        if _pgqueue.nth_time(p_start, p_every, p_time_zone, (v_low + v_n) / 2) > p_after then
            v_n := (v_low + v_n) / 2;
        else
            v_low := (v_low + v_n) / 2;
        end if;
    end loop;
    return _pgqueue.nth_time(p_start, p_every, p_time_zone, v_n);
end $$;
