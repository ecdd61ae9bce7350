-- Gives functions their settings and rights, as access.sql lists them.
--
-- A function that others call runs with the rights of its owner, and finds functions and operators where nobody else
-- can put any. A function with the setting caller needs the rights of its caller; so does a procedure, or it could not
-- commit.
do $$
declare
    v_function record;
    v_setting  text;
begin
    for v_function in
        select p.oid::regprocedure::text as name,
               p.prokind = 'f'
                   and (p.pronamespace = 'pgqueue'::regnamespace or l.roles is not null or v.called) as is_called,
               'caller' = any (l.settings) is true as as_caller,
               array(select unnest(s.settings) from _pgqueue.run_settings() s
                     where s.name = any (l.settings)) as settings
        from pg_proc p
        left join _pgqueue.listed() l on l.function = p.oid
        cross join lateral (select p.oid in (select _pgqueue.view_functions()) as called) v
        where p.pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)
    loop
        foreach v_setting in array v_function.settings loop
            execute format('alter function %s set %s', v_function.name, v_setting);
        end loop;
        if v_function.is_called then
            execute format('alter function %s set search_path = pg_catalog, pg_temp', v_function.name);
            if not v_function.as_caller then
                execute format('alter function %s security definer', v_function.name);
            end if;
        end if;
    end loop;
end $$;
