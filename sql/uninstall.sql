-- Removes the schemas pgqueue and _pgqueue with all their objects, and the schema pgmq if sql/pgmq/install.sql created
-- it: psql -f sql/uninstall.sql One transaction. It fails while other objects depend on the schemas. The group roles
-- remain, because other databases of the server may use them.
\set ON_ERROR_STOP on
\set QUIET on
begin isolation level read committed read write;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
set local quote_all_identifiers = off;
set local lock_timeout = '5s';
do $$ begin
    perform set_config(name, '0', true) from pg_settings where name in ('statement_timeout', 'transaction_timeout');
end $$;
do $$
declare
    v_others text;
    v_owner  text;
    v_face   oid := (select oid from pg_namespace
                     where nspname = 'pgmq' and obj_description(oid, 'pg_namespace') like 'spark-pgqueue:%');
    v_ours   regnamespace[] := array_remove(
        array[to_regnamespace('pgqueue'), to_regnamespace('_pgqueue'), v_face::regnamespace], null);
begin
    if v_ours = '{}' then
        return;
    end if;
    if not exists (select from pg_attribute
                   where attrelid = to_regclass('pgqueue.installed') and attname = 'installed_at')
       and (exists (select from pg_class where relnamespace = to_regnamespace('pgqueue'))
            or exists (select from pg_proc where pronamespace = to_regnamespace('pgqueue'))) then
        raise exception 'no queue is installed: the schema pgqueue belongs to another project'
            using errcode = 'PQ011', hint = 'Nothing was changed.';
    end if;
    -- `captured` is read below, and may be a view of another role
    select format('%I belongs to %I', o.name, pg_get_userbyid(o.owner)) into v_owner
    from (select oid as home, nspname as name, nspowner as owner from pg_namespace
          union all
          select relnamespace, relname, relowner from pg_class where relname = 'captured') o
    where o.home = any (v_ours::oid[]) and o.owner <> current_user::regrole
      and not pg_has_role(o.owner, session_user, 'member')  -- as for a superuser
    limit 1;
    if v_owner is not null then
        raise exception '%, but the role that removes the schemas is %', v_owner, current_user
            using errcode = 'PQ011', hint = 'Connect as the owner; or drop schema pgqueue, _pgqueue cascade. '
                                            'Nothing was changed.';
    end if;
    select string_agg(what, ', ' order by what) into v_others
    from (select distinct coalesce(pg_describe_object('pg_class'::regclass, c.oid, 0),
                                   pg_describe_object(d.classid, d.objid, 0)) as what
          from pg_depend d
          left join pg_rewrite w on d.classid = 'pg_rewrite'::regclass and w.oid = d.objid
          left join pg_attrdef a on d.classid = 'pg_attrdef'::regclass and a.oid = d.objid
          left join pg_constraint k on d.classid = 'pg_constraint'::regclass and k.oid = d.objid
          left join pg_trigger t on d.classid = 'pg_trigger'::regclass and t.oid = d.objid
          left join pg_policy p on d.classid = 'pg_policy'::regclass and p.oid = d.objid
          left join pg_class c on c.oid = coalesce(w.ev_class, a.adrelid, nullif(k.conrelid, 0), t.tgrelid, p.polrelid)
          where d.deptype = 'n'
            and ((d.refclassid = 'pg_class'::regclass
                  and d.refobjid in (select oid from pg_class where relnamespace = any (v_ours)))
                 or (d.refclassid = 'pg_proc'::regclass
                     and d.refobjid in (select oid from pg_proc where pronamespace = any (v_ours)))
                 or (d.refclassid = 'pg_type'::regclass
                     and d.refobjid in (select oid from pg_type where typnamespace = any (v_ours))))
            and coalesce(c.relnamespace,
                         to_regnamespace((pg_identify_object(d.classid, d.objid, 0)).schema)) = any (v_ours) is not true
         ) o;
    -- pg_depend does not have the dependencies of captured tables, which are in the source of functions
    if to_regclass('pgqueue.captured') is not null then
        v_others := nullif(concat_ws(', ', v_others, (
            select string_agg(format('capture of %s', d.root), ', ' order by d.root)
            from pgqueue.captured d
            join pg_trigger t on t.tgrelid = d.root and t.tgname = format('pgqueue_%s_insert', d.stream_id)
            where d.relation = d.root)), '');
    end if;
    if v_others is not null then
        raise exception 'other objects depend on the schema pgqueue: %', v_others
            using errcode = 'dependent_objects_still_exist', hint = 'Drop them first. Nothing was changed.';
    end if;
    if v_face is not null then
        drop schema pgmq cascade;
    end if;
    drop schema if exists pgqueue, _pgqueue cascade;
end $$;
commit;
