-- Sets the settings and rights of functions, as listed in access.sql.
--
-- A public function runs with the rights of its owner, and with a search_path in which no other role can create
-- functions and operators. A function with the setting caller runs with the rights of its caller, and so does a
-- procedure, because else it could not commit.
do $$
declare
    v_alter text;
begin
    for v_alter in
        -- a full join, which uses a hash: the planner underestimates the number of new functions
        select format('alter function %s%s%s%s', p.oid::regprocedure,
                      (select string_agg(' set ' || setting, '' order by s.n, t.n)
                       from _pgqueue.run_settings() with ordinality s (name, settings, n)
                       cross join lateral unnest(s.settings) with ordinality t (setting, n)
                       where s.name = any (l.settings)),
                      case when c.is_called then ' set search_path = pg_catalog, pg_temp' end,
                      case when c.is_called and 'caller' = any (l.settings) is not true then ' security definer' end)
        from _pgqueue.listed() l
        full join (select * from pg_proc
                   where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)) p on p.oid = l.function
        cross join lateral (
            select p.prokind = 'f'
                   and (p.pronamespace = 'pgqueue'::regnamespace or l.roles is not null
                        or p.oid in (select _pgqueue.view_functions())) as is_called) c
        where c.is_called or l.settings <> '{caller}'
    loop
        execute v_alter;
    end loop;
end $$;
