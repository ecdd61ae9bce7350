-- Prepares a database with an older version for its migrations. Does nothing in a new database, or in one of this
-- version.
--
-- A migration, migrations/<n>.sql, turns version n - 1 into n. install.sql names it after this file. It runs when the
-- table installed has no version n yet, so once, before new tables are made; a second part of it, where there is one,
-- when all are there. Nobody is at work. Views and functions are gone, and are all made again afterwards: grants on
-- them that others made have to be made again, and where an object of others depends on them, the installation fails
-- and nothing is changed.

do $$
declare
    v_until timestamptz := clock_timestamp() + interval '30 s';
begin
    if (select max(version) from pgqueue.installed) >= current_setting('pgqueue.version')::int is not false then
        return;
    end if;
    -- All transactions at work finish first. An installer that waits here with some of the locks keeps others waiting,
    -- and one of those may have the next lock. So it waits for moments only, in all shorter than the second after
    -- which Postgres looks for deadlocks, and lets others pass in between.
    loop
        begin
            set local lock_timeout = '40ms';
            -- views first, as who reads them; a lock of a view would be one of all that it reads, also of pg_class
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
                raise exception 'the schema pgqueue is in use: '
                                'for 30 s there was always a transaction at work with its tables'
                    using errcode = 'lock_not_available',
                          hint = 'Stop workers and queries, or end transactions that are idle, and install again. '
                                 'Nothing was changed.';
            end if;
            perform pg_sleep(0.1);
        end;
    end loop;
    if to_regclass('pgqueue.written') is not null then  -- it holds nothing, and its key is one of the functions
        alter table pgqueue.written detach partition pgqueue.messages;  -- lock: table
        drop table pgqueue.written;  -- lock: table
    end if;
    execute (select 'drop routine ' || string_agg(oid::regprocedure::text, ', ')
             from pg_proc where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace));
end $$;
