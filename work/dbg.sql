create table if not exists public.dbg(at timestamptz default clock_timestamp(), what text, consumer_id int, key bigint, no bigint, x text);
truncate public.dbg;
create or replace function public.dbgt() returns trigger language plpgsql as $$
begin
  if tg_op = 'DELETE' then
    if old.lane = 1000002 and old.key is not null then insert into public.dbg(what,consumer_id,key,no,x) values ('del held',old.consumer_id,old.key,old.bundle_no,pg_current_xact_id()::text); end if;
    if old.lane = 1000005 then insert into public.dbg(what,consumer_id,key,no,x) values ('take marker',old.consumer_id,old.key,old.bundle_no,pg_current_xact_id()::text); end if;
  elsif tg_op = 'INSERT' then
    if new.lane = 1000005 then insert into public.dbg(what,consumer_id,key,no,x) values ('marker',new.consumer_id,new.key,new.bundle_no,pg_current_xact_id()::text); end if;
    if new.lane = 1000003 and new.place >= 1::bigint<<61 then insert into public.dbg(what,consumer_id,key,no,x) values ('put held+',new.consumer_id,new.key,new.place-(1::bigint<<61),pg_current_xact_id()::text); end if;
  else
    if new.lane = 1000003 and new.place <> -2 and new.place < 1::bigint<<61 and new.place is distinct from old.place then insert into public.dbg(what,consumer_id,key,no,x) values ('upd first',new.consumer_id,new.key,new.place,pg_current_xact_id()::text); end if;
    if new.lane = 1000003 and new.place >= 1::bigint<<61 and new.place is distinct from old.place then insert into public.dbg(what,consumer_id,key,no,x) values ('upd held+',new.consumer_id,new.key,new.place-(1::bigint<<61),pg_current_xact_id()::text); end if;
    if new.lane is distinct from old.lane and 1000002 in (new.lane, old.lane) then insert into public.dbg(what,consumer_id,key,no,x) values ('lane '||old.lane||'->'||new.lane||' keys '||coalesce(new.keys::text,'-')||' n '||new.message_count||' shr '||new.shrunk||' mem '||coalesce(new.members::text,'-')||' tok '||(new.token is not null),new.consumer_id,coalesce(new.key,old.key),new.bundle_no,pg_current_xact_id()::text); end if;
    if new.lane = 1000002 and old.lane = 1000002 and (new.keys is distinct from old.keys or new.seqs is distinct from old.seqs) then insert into public.dbg(what,consumer_id,key,no,x) values ('held: keys '||coalesce(new.keys::text,'-')||' seqs '||old.seqs::text||' -> '||new.seqs::text||' shr '||new.shrunk,new.consumer_id,coalesce(new.key,old.key),new.bundle_no,pg_current_xact_id()::text); end if;
    if new.lane = 1000002 and old.lane = 1000002 and new.key is distinct from old.key then insert into public.dbg(what,consumer_id,key,no,x) values ('key gone',new.consumer_id,old.key,new.bundle_no,pg_current_xact_id()::text); end if;
  end if;
  return null;
end $$;
drop trigger if exists dbg on pgqueue.consumer_messages;
create trigger dbg after insert or update or delete on pgqueue.consumer_messages for each row execute function public.dbgt();
grant all on public.dbg to public;
