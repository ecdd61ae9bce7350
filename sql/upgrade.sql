-- Prepares a database with an older version for its migrations. Does nothing in a new database, or in one of this
-- version.
--
-- A migration, migrations/<n>.sql, turns version n - 1 into n. install.sql includes it after this file. It runs if the
-- table installed does not have version n yet, so once, before new tables are created; its second part, if there is
-- one, runs after that. No other session uses the tables. Views and functions are dropped, and created again
-- afterwards: other grants on them must be repeated, and if other objects depend on them, the installation fails and
-- nothing is changed.

do $$
declare
    v_until timestamptz := clock_timestamp() + interval '30 s';
begin
    if (select max(version) from pgqueue.installed) >= current_setting('pgqueue.version')::int is not false then
        return;
    end if;
    -- All open transactions end first. An installer that waits here with some of the locks blocks other sessions, and
    -- one of these may hold the next lock. So each try is shorter than deadlock_timeout (1 s), with a pause in between.
    loop
        begin
            set local lock_timeout = '40ms';
            -- views first, as their readers do; a lock of a view would also lock all that it reads, such as pg_class
            execute (select 'drop view ' || string_agg(oid::regclass::text, ', ' order by relname)
                     from pg_class where relnamespace = 'pgqueue'::regnamespace and relkind = 'v');
            -- lock: table
            execute (select format('lock table %s in access exclusive mode',
                                   string_agg(oid::regclass::text, ', ' order by relname))
                     from pg_class
                     where relnamespace = 'pgqueue'::regnamespace and relkind in ('r', 'p')
                       and not relispartition);
            set local lock_timeout = '500ms';
            exit;
        exception when lock_not_available then
            if clock_timestamp() > v_until then
                raise exception 'the schema pgqueue is in use: could not lock its tables within 30 s'
                    using errcode = 'lock_not_available',
                          hint = 'Stop workers and queries, or end idle transactions, and install again. '
                                 'Nothing was changed.';
            end if;
            perform pg_sleep(0.1);
        end;
    end loop;
    if to_regclass('pgqueue.written') is not null then  -- it is empty, and its partition key uses one of the functions
        alter table pgqueue.written detach partition pgqueue.messages;  -- lock: table
        drop table pgqueue.written;  -- lock: table
    end if;
    execute (select 'drop routine ' || string_agg(oid::regprocedure::text, ', ')
             from pg_proc where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace));
end $$;
