-- What an older schema lacks. "create table if not exists" leaves a table of an earlier version as it is, so each
-- version that changes a table adds its steps here, guarded by what was installed, oldest first:
--
--     do $$ begin
--         if (select max(version) from pgqueue.installed) < 2 then
--             alter table pgqueue.consumers add column filter jsonb;
--         end if;
--     end $$;
--
-- Functions and views need no steps: they are replaced by every installation, except those whose arguments change (what was
-- granted on them has to be granted again).

drop function if exists pgqueue.claim(text, text, int, interval), pgqueue.receive(text, text, int, interval);
do $$ begin
    if exists (select from pg_constraint where conrelid = 'pgqueue.consumer_messages'::regclass and contype = 'c') then
        alter table pgqueue.consumer_messages drop constraint consumer_messages_state_check;
    end if;
end $$;
