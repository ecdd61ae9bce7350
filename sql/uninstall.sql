-- Removes the schema pgqueue with all that is in it:  psql -f sql/uninstall.sql
-- One transaction. Refuses where others' objects depend on it. The group roles stay: other databases of the server may use them.
\set ON_ERROR_STOP on
\set QUIET on
begin;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
set local lock_timeout = '5s';
do $$
declare
    v_others text;
begin
    if to_regnamespace('pgqueue') is null then
        return;
    end if;
    select string_agg(what, ', ' order by what) into v_others
    from (select distinct coalesce(pg_describe_object('pg_class'::regclass, c.oid, 0), pg_describe_object(d.classid, d.objid, 0)) as what
          from pg_depend d
          left join pg_rewrite w on d.classid = 'pg_rewrite'::regclass and w.oid = d.objid
          left join pg_attrdef a on d.classid = 'pg_attrdef'::regclass and a.oid = d.objid
          left join pg_constraint k on d.classid = 'pg_constraint'::regclass and k.oid = d.objid
          left join pg_trigger t on d.classid = 'pg_trigger'::regclass and t.oid = d.objid
          left join pg_policy p on d.classid = 'pg_policy'::regclass and p.oid = d.objid
          left join pg_class c on c.oid = coalesce(w.ev_class, a.adrelid, nullif(k.conrelid, 0), t.tgrelid, p.polrelid)
          where d.deptype = 'n'
            and ((d.refclassid = 'pg_class'::regclass and d.refobjid in (select oid from pg_class where relnamespace = 'pgqueue'::regnamespace))
                 or (d.refclassid = 'pg_proc'::regclass and d.refobjid in (select oid from pg_proc where pronamespace = 'pgqueue'::regnamespace))
                 or (d.refclassid = 'pg_type'::regclass and d.refobjid in (select oid from pg_type where typnamespace = 'pgqueue'::regnamespace)))
            and coalesce(c.relnamespace, to_regnamespace((pg_identify_object(d.classid, d.objid, 0)).schema)) is distinct from 'pgqueue'::regnamespace
          -- what a captured table depends on is in the text of a function
          union
          select format('capture of %s', tgrelid::regclass) from pg_trigger where tgname ~ '^pgqueue_[0-9]+_insert$') o;
    if v_others is not null then
        raise exception 'others depend on the schema pgqueue: %', v_others
            using errcode = 'dependent_objects_still_exist', hint = 'Drop them first. Nothing was changed.';
    end if;
    drop schema pgqueue cascade;
end $$;
commit;
