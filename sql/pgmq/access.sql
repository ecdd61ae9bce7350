-- The rights and settings of functions. As in the schema pgqueue, functions run with the rights of their owner, and
-- PUBLIC has none.

-- Grants the group roles of this database what they need: a producer sends, a consumer reads and settles, an observer
-- monitors, and an admin creates and drops queues. A role that only sends cannot list queues, and a role that only
-- monitors, such as pg_monitor, cannot read messages. Other grants to these roles are revoked. pgqueue grant calls it
-- too.
create or replace function pgmq._grant() returns void
language plpgsql as $$
declare
    v_role text;
begin
    for v_role in select _pgqueue.roles() union all select 'pg_monitor' loop
        execute format('revoke all on all functions in schema pgmq from %1$I; '
                       'revoke all on all tables in schema pgmq from %1$I; grant usage on schema pgmq to %1$I', v_role);
        execute (select string_agg(format('grant execute on function %s to %I', p.oid::regprocedure, v_role), ';')
                 from pg_proc p
                 where p.pronamespace = 'pgmq'::regnamespace
                   and p.proname ~ case v_role
                       when 'pgqueue_producer' then '^(send|validate)'
                       when 'pgqueue_consumer' then '^(read|pop$|delete$|archive$|set_vt$|_rows$)'
                       when 'pgqueue_observer' then '^(metrics|list|test_routing)'
                       when 'pg_monitor' then '^(metrics|list|test_routing)'
                       else '^(create|drop|purge|bind|unbind|list|metrics|validate|test|enable|disable|update|'
                            || 'convert|detach|format|acquire)'
                       end
                   -- of the two functions, the one of the view
                   and (p.proname <> '_rows' or p.pronargs = 1));
        execute (select coalesce(string_agg(format('grant select on %s to %I', c.oid::regclass, v_role), ';'), '')
                 from pg_class c
                 where c.relnamespace = 'pgmq'::regnamespace
                   and ((c.relname = 'meta' and v_role <> 'pgqueue_producer')
                        or (c.relkind = 'v' and v_role = 'pgqueue_consumer')));
    end loop;
end $$;

do $$
declare
    v_object text;
begin
    perform _pgqueue.revoke_install_defaults();
    for v_object in  -- the public functions; the others run within them
        select oid::regprocedure::text from pg_proc
        where pronamespace = 'pgmq'::regnamespace and (proname !~ '^_' or (proname = '_rows' and pronargs = 1))
    loop
        execute format('alter function %s security definer set search_path = pg_catalog, pg_temp', v_object);
    end loop;
    for v_object in
        select p.oid::regprocedure::text from pg_proc p
        where p.pronamespace = 'pgmq'::regnamespace
          and p.proname in ('_claim', '_claims_of', '_settle', '_unsettled', '_hold', '_consumer', '_rows', 'metrics')
    loop
        execute format('alter function %s set plan_cache_mode = force_generic_plan set enable_seqscan = off '
                       'set enable_hashjoin = off set enable_mergejoin = off set jit = off', v_object);
    end loop;
    alter function pgmq._grant() set search_path = pg_catalog, pg_temp;
    perform pgmq._grant();
end $$;
