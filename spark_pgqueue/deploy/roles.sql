-- Login roles for the parts of an installation, each with the rights of one group role. Safe to repeat. Run it in the
-- queue's database as the schema's owner, who may create roles, or as a superuser:
--   pgqueue deploy roles | psql -v ON_ERROR_STOP=1
-- Then set a password for each role, which psql sends encrypted, so that no log has it: \password queue_worker

begin;
-- Functions of other schemas, such as public.format(text, text), would run with your rights.
set local search_path = pg_catalog, pg_temp;

select pgqueue.create_roles();

do $$
declare
    v_login record;
begin
    for v_login in
        select * from (values
            ('queue_producer', 'pgqueue_producer'),  -- applications: send, and ask for outcomes
            ('queue_worker', 'pgqueue_consumer'),    -- pgqueue work, Spark's source
            ('queue_worker', 'pgqueue_producer'),    -- handlers and queries that send, too
            ('queue_maintain', 'pgqueue_admin'),     -- pgqueue maintain; create, change and move
            ('queue_metrics', 'pgqueue_observer')    -- pgqueue metrics, top, web
        ) l (name, group_role)
    loop
        if not exists (select from pg_roles where rolname = v_login.name) then
            execute format('create role %I login', v_login.name);
        end if;
        execute format('grant %I to %I', v_login.group_role, v_login.name);
        if pg_has_role((select datdba from pg_database where datname = current_database()), 'usage') then
            execute format('grant connect on database %I to %I', current_database(), v_login.name);
        elsif not has_database_privilege(v_login.name, current_database(), 'connect') then
            raise exception '% may not connect to database %', v_login.name, current_database()
                using hint = 'Run this as the database''s owner, or as a superuser.';
        end if;
    end loop;
end $$;

commit;

-- For the alert on open transactions, as a superuser: grant pg_read_all_stats to queue_metrics;
