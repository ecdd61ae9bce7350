-- Capture: rows that are written to a table become messages of a stream, in the same transaction.
--
-- A captured table has triggers, one for each kind of statement. They call a function that is created for this table.
-- The function and the triggers belong to the table's owner, and the function is in the table's schema, because it
-- converts values to text with types and casts that any role may have created. So it runs with the rights of the
-- table's owner, never with those of the role that writes, nor with those of this schema's owner. The table's owner
-- sends as any producer does, with send_captured().
--
-- capture and release run with the rights of their caller (access.sql), and switch to the table owner's role, so that
-- Postgres checks all rights. A schema can be renamed at the same time, so names may change their meaning. Even then,
-- only the owner's own objects are changed; and note_captures() checks the result by OID, in the same transaction, and
-- the schemas, so that a wrong capture is rolled back.

-- The row of a table that may be captured. Errors: PQ003.
create or replace function _pgqueue.capturable_table(p_table regclass) returns pg_class
language plpgsql stable as $$
declare
    v_table  pg_class;
    v_part   pg_class;
    v_schema record;
begin
    select * into v_table from pg_class where oid = p_table;
    if not found then
        raise exception 'p_table must be a table, not %', coalesce(p_table::text || ', which was dropped', 'null')
            using errcode = 'PQ003', column = 'p_table';
    elsif v_table.relkind not in ('r', 'p') or v_table.relpersistence = 't'
          or v_table.relnamespace in ('pgqueue'::regnamespace, 'pg_catalog'::regnamespace) then
        raise exception 'p_table must be a table that is neither temporary nor part of pgqueue, not %',
            _pgqueue.sql_name(p_table)
            using errcode = 'PQ003', column = 'p_table';
    elsif not _pgqueue.may_send(v_table.relowner) then
        raise exception 'p_table belongs to role %, which may not send', pg_get_userbyid(v_table.relowner)
            using errcode = 'PQ003', column = 'p_table',
                  hint = format('Grant it: select pgqueue.create_roles(); grant pgqueue_producer to %I.',
                                pg_get_userbyid(v_table.relowner));
    elsif v_table.relrowsecurity and v_table.relforcerowsecurity
          and not (select rolsuper or rolbypassrls from pg_roles where oid = v_table.relowner) then
        raise exception 'p_table must be a table whose owner can read all rows, not %, where row level security is '
                        'forced on the owner too', _pgqueue.sql_name(p_table)
            using errcode = 'PQ003', column = 'p_table',
                  hint = format('Run first: alter table %s no force row level security.', _pgqueue.sql_name(p_table));
    end if;
    select c.* into v_part
    from pg_partition_tree(p_table) r join pg_class c on c.oid = r.relid
    where c.relowner <> v_table.relowner and c.relkind in ('r', 'p') order by c.oid limit 1;
    if found then
        raise exception 'p_table: partition % of table % belongs to another role, %', _pgqueue.sql_name(v_part.oid),
            _pgqueue.sql_name(p_table), pg_get_userbyid(v_part.relowner)
            using errcode = 'PQ003', column = 'p_table',
                  hint = format('Run first: alter table %s owner to %I.', _pgqueue.sql_name(v_part.oid),
                                pg_get_userbyid(v_table.relowner));
    end if;
    select * into v_schema from _pgqueue.foreign_schema(p_table);
    if found then
        raise exception 'p_table: schema %, of table % or its partitions, belongs to role %, which could replace the '
                        'functions of the capture', quote_ident(v_schema.name), _pgqueue.sql_name(p_table),
                        v_schema.owner
            using errcode = 'PQ003', column = 'p_table',
                  hint = format('Capture a table in a schema of its owner, %1$I; or, if %2$I may do all that %1$I may, '
                                'run first: grant %1$I to %2$I.', pg_get_userbyid(v_table.relowner), v_schema.owner);
    end if;
    return v_table;
end $$;

-- Raises PQ003 unless columns can be captured. Arguments as in capture, and
--   p_primary  the columns of its primary key; null: it has none
create or replace function _pgqueue.check_captured(p_table pg_class, p_primary text[], p_keys text[], p_columns text[],
                                                   p_outbox boolean) returns void
language plpgsql stable as $$
declare
    v_name    text := _pgqueue.sql_name(p_table.oid);
    v_columns text[] := array(select attname from pg_attribute
                              where attrelid = p_table.oid and attnum > 0 and not attisdropped and attgenerated <> 'v'
                              order by attnum);
    v_unknown record;
    v_secret  text;
begin
    if p_keys is null or array_ndims(p_keys) > 1 then
        raise exception 'p_keys must be a list of columns, and can be omitted only if the table has a primary key, '
                        'but % has none', v_name
            using errcode = 'PQ003', column = 'p_keys',
                  hint = 'Name the columns whose values form the key of a message, or pass ''{}'' for messages '
                         'without a key.';
    elsif p_outbox and p_primary is null then
        raise exception 'p_outbox requires a table with a primary key, by which rows are deleted, but % has none',
                        v_name
            using errcode = 'PQ003', column = 'p_outbox';
    elsif p_columns = '{}' or array_ndims(p_columns) > 1 then
        raise exception 'p_columns must be a list of columns, or null for all'
            using errcode = 'PQ003', column = 'p_columns';
    end if;
    select x.* into v_unknown
    from (select 'p_keys' as argument, unnest(p_keys) as name union all select 'p_columns', unnest(p_columns)) x
    where (x.name = any (v_columns)) is not true limit 1;
    if found then
        raise exception '% names %, which is not a column of % that can be captured', v_unknown.argument,
                        coalesce(quote_ident(v_unknown.name), 'null'), v_name
            using errcode = 'PQ003', column = v_unknown.argument,
                  hint = _pgqueue.suggestion(v_unknown.name, array(select quote_ident(c) from unnest(v_columns) c));
    end if;
    -- a column that the owner has no right to read is not published by accident
    v_secret := (select quote_ident(attname) from pg_attribute
                 where attrelid = p_table.oid and attnum > 0 and not attisdropped
                   and not has_column_privilege(p_table.relowner, p_table.oid, attnum, 'select')
                   and (p_columns is null or attname = any (p_columns || p_keys)) limit 1);
    if v_secret is not null then
        raise exception 'p_columns must be columns that the owner of the table may read, not % of %', v_secret, v_name
            using errcode = 'PQ003', column = 'p_columns';
    end if;
end $$;

-- Whether a role may send the rows of its tables.
create or replace function _pgqueue.may_send(p_role oid) returns boolean
language sql stable as $$
    select has_function_privilege(p_role, 'pgqueue.send_captured(int, text[], json[], jsonb[], int[], regclass)',
                                  'execute')
       and has_schema_privilege(p_role, 'pgqueue', 'usage')
$$;

-- The row versions of the schemas of a table and its partitions, which change whenever a schema is changed.
create or replace function _pgqueue.schemas_of(p_table regclass) returns text[]
language sql stable as $$
    select array_agg(format('%s %s %s', n.oid, n.xmin, n.ctid) order by n.oid) from pg_namespace n
    where n.oid in (select c.relnamespace from pg_class c
                    where c.oid = p_table or c.oid in (select relid from pg_partition_tree(p_table)))
$$;

-- Whether this transaction has written a visible row with that xmin, maybe in a subtransaction.
create or replace function _pgqueue.is_written_here(p_xmin xid) returns boolean
language sql as $$
    -- age() counts from the transaction's own id, which its subtransactions are after
    select case when age(p_xmin) <= 0
                then pg_xact_status((pg_current_xact_id()::text::bigint - age(p_xmin))::text::xid8) = 'in progress'
                else false end
$$;

-- Records which capturing triggers a table and its partitions have in the catalog. A trigger counts if its function
-- belongs to the owner of the trigger's table, which is the owner of the captured table and may send. Returns whether
-- it added some whose triggers this transaction did not create.
create or replace function _pgqueue.store_captures(p_table regclass, p_stream_id int) returns boolean
language plpgsql as $$
begin
    delete from pgqueue.captured d
    where d.stream_id = p_stream_id and p_table in (d.relation, d.root)
      and _pgqueue.capture_trigger(d.relation, d.stream_id) is null;
    insert into pgqueue.captured as d (relation, stream_id, root)
    select r.relid, p_stream_id, p_table
    from pg_class c
    cross join lateral (select c.oid union select relid from pg_partition_tree(c.oid)) r (relid)
    join pg_class x on x.oid = r.relid and x.relowner = c.relowner
    join pg_trigger t on t.oid = _pgqueue.capture_trigger(r.relid, p_stream_id)
                     and (r.relid = c.oid) = (t.tgnargs = 0)
    join pg_proc p on p.oid = t.tgfoid and p.proowner = c.relowner and p.pronamespace = c.relnamespace
    where c.oid = p_table and _pgqueue.may_send(c.relowner)
    on conflict (relation, stream_id) do update set root = excluded.root where d.root <> excluded.root;
    return exists (select from pgqueue.captured d
                   join pg_trigger t on t.oid = _pgqueue.capture_trigger(d.relation, d.stream_id)
                   where d.root = p_table and d.stream_id = p_stream_id
                     and _pgqueue.is_written_here(d.xmin) and not _pgqueue.is_written_here(t.xmin));
end $$;

-- Records which capturing triggers a table and its partitions have; for capture and release. It records only what is in
-- the catalog, so any producer may call it at any time. But only a member of the table's owner may add older triggers:
-- these may send then, also those of a table that was restored without its queue. Returns whether the table is
-- captured now; and the versions of the schemas of the table and its partitions: while these are the same, names in
-- these schemas have the same meaning. Errors: PQ001; PQ003 unless the role of the session may add what there is.
-- Locks: the stream, against drop_stream.
create or replace function pgqueue.note_captures(p_table regclass, p_stream text, out captured boolean,
                                                 out schemas text[])
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_owner  oid := (select relowner from pg_class where oid = p_table);
begin
    perform from pgqueue.streams where stream_id = v_stream.stream_id for key share;  -- lock: stream
    if _pgqueue.store_captures(p_table, v_stream.stream_id)
       and not pg_has_role(_pgqueue.caller_role(), v_owner, 'member') then
        raise exception 'p_table must be a table of the session''s role, %, not one that belongs to %',
            quote_ident(_pgqueue.caller_role()), quote_ident(pg_get_userbyid(v_owner))
            using errcode = 'PQ003', column = 'p_table';
    end if;
    captured := _pgqueue.is_captured(p_table, v_stream.stream_id);
    schemas := _pgqueue.schemas_of(p_table);
end $$;

-- Returns the statements with which a table's owner captures the table, or ends the capture, for capture and release.
-- This function changes nothing. Arguments: as in change_capture. Errors: PQ001; PQ003, also when the table's owner may
-- not send. Locks: none.
-- (More than 60 lines: the checks, then the statements in their order.)
create or replace function pgqueue.capture_script(p_table regclass, p_stream text, p_capture boolean,
                                                  p_keys text[] default null, p_columns text[] default null,
                                                  p_old boolean default false, p_outbox boolean default false)
returns setof text language plpgsql stable as $$
declare
    v_stream  pgqueue.streams := _pgqueue.stream(p_stream);
    v_table   pg_class;
    v_primary text[] := _pgqueue.primary_key(p_table);
    v_name    text;
    v_base    jsonb;  -- the names of the table's functions; ...
    v_names   jsonb;  -- ... and of a partition's
    v_part    regclass;
begin
    if p_capture is not true then
        if not exists (select from _pgqueue.captured_triggers(p_table, v_stream.stream_id)) then
            raise exception 'p_table must be a table that is captured to stream %, not %', quote_literal(p_stream),
                coalesce(p_table::text, 'null')
                using errcode = 'PQ003', column = 'p_table',
                      hint = 'The view pgqueue.captures lists the captured tables.';
        end if;
        return query select _pgqueue.drop_statements(p_table, v_stream.stream_id);
        return;
    elsif v_stream.kind = 'binary' then
        raise exception 'p_stream must be a stream of kind json or text, not %, which is binary',
                        quote_literal(p_stream)
            using errcode = 'PQ003', column = 'p_stream';
    end if;
    v_table := _pgqueue.capturable_table(p_table);
    p_keys := coalesce(p_keys, v_primary);
    p_old := coalesce(p_old, false);
    p_outbox := coalesce(p_outbox, false);
    perform _pgqueue.check_captured(v_table, v_primary, p_keys, p_columns, p_outbox);

    return query select _pgqueue.drop_statements(p_table, v_stream.stream_id);
    -- a short name that needs no quotes, from which the names of the other functions are derived
    v_name := format('pgqueue_%s_%s', v_stream.stream_id,
                     left(regexp_replace(lower(v_table.relname), '[^a-z0-9_]', '', 'g'), 24));
    while exists (select from pg_proc p
                  where p.pronamespace = v_table.relnamespace
                    and p.proname = any (array[v_name, v_name || '_key', v_name || '_row', v_name || '_now',
                                               v_name || '_done'])
                    and p.oid not in (select _pgqueue.captured_functions(p_table, v_stream.stream_id)))
          or exists (select from pg_type t
                     where t.typnamespace = v_table.relnamespace and t.typname = v_name || '_type'
                       and not exists (select from _pgqueue.captured_functions(p_table, v_stream.stream_id) f (oid)
                                       join pg_proc p on p.oid = f.oid and p.proargtypes[0] = t.oid)) loop
        v_name := v_name || '_';
    end loop;
    for v_part in
        select t.relid from (select p_table as relid union select relid from pg_partition_tree(p_table)) t
        order by t.relid <> p_table, t.relid
    loop
        v_names := v_base;
        if v_base is null or _pgqueue.column_names(v_part) <> _pgqueue.column_names(p_table) then
            v_names := _pgqueue.object_names(v_part, concat_ws('_', v_name, nullif(v_part, p_table)::oid));
            v_base := coalesce(v_base, v_names);
            return query select _pgqueue.function_statements(v_names, v_base, v_stream.stream_id, p_keys, p_columns,
                                                             v_primary, p_old, p_outbox);
        end if;
        return query select _pgqueue.trigger_statements(v_part, p_table, v_stream.stream_id, v_names ->> 'run',
                                                        p_outbox);
    end loop;
    return next format('comment on trigger pgqueue_%s_insert on %s is %L', v_stream.stream_id, v_base ->> 'relation',
                       format('key: %s; columns: %s; old rows: %s',
                              coalesce(nullif(array_to_string(p_keys, ', '), ''), 'none'),
                              coalesce(array_to_string(p_columns, ', '), 'all'),
                              case when p_old then 'yes' else 'no' end));
end $$;

-- Executes statements with the role of p_role, and then restores the role; for capture and release.
-- A caller with that role's rights could do the same with set role. Errors: PQ003 when the caller may not set the role.
create or replace function pgqueue.execute_as(p_role text, p_statements text[]) returns void
language plpgsql as $$
declare
    v_role      text := current_setting('role');
    v_other     boolean := current_user <> p_role;
    v_statement text;
begin
    begin
        perform set_config('role', p_role, true) where v_other;
    exception when insufficient_privilege then
        raise exception 'p_table must be a table of the caller, not one that belongs to %', p_role
            using errcode = 'PQ003', column = 'p_table';
    end;
    foreach v_statement in array p_statements loop
        execute v_statement;
    end loop;
    perform set_config('role', v_role, true) where v_other;
end $$;

-- Captures or releases a table: waits for its writers, and executes the statements of capture_script as its owner. Each
-- try for the lock is short, so that sessions that queue behind it wait only briefly. A captured table is also locked
-- against readers, because its triggers are dropped.
--   p_capture  false: release the table
--   the rest as in capture
-- Errors: PQ001, PQ003, PQ007, 55P03; 55006 when a schema is renamed in the meantime. Locks: as capture. It does not
-- use await(): each try looks up the table's name and its captures again, locks as the table's owner, and also fails if
-- the table or its schema was renamed in the meantime.
-- (More than 60 lines: two rounds of statements, of which the first only locks.)
create or replace function pgqueue.change_capture(p_table regclass, p_stream text, p_capture boolean,
                                                  p_keys text[] default null, p_columns text[] default null,
                                                  p_old boolean default false, p_outbox boolean default false)
returns void language plpgsql set lock_timeout = '100ms' as $$
declare
    v_until     timestamptz := clock_timestamp() + interval '30 s';
    v_table     record;
    v_before    record;
    v_after     record;
    v_statement text;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'capture and release require transaction isolation read committed, not %',
            current_setting('transaction_isolation')
            using errcode = 'PQ007', hint = 'Use "begin transaction isolation level read committed".';
    end if;
    loop
        select r.rolname as owner, format('%I.%I', n.nspname, c.relname) as name into v_table
        from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_roles r on r.oid = c.relowner
        where c.oid = p_table;
        begin
            v_before := pgqueue.note_captures(p_table, p_stream);
            -- raises errors before it waits
            perform pgqueue.capture_script(p_table, p_stream, p_capture, p_keys, p_columns, p_old, p_outbox);
            perform pgqueue.execute_as(v_table.owner, array[
                format('lock table %s in share row exclusive mode', v_table.name)]);  -- lock: captured
            perform pgqueue.execute_as(v_table.owner, array[
                format('lock table %s in access exclusive mode', v_table.name)])  -- lock: captured
            where exists (select from pg_trigger where tgrelid = p_table and tgname ~ '^pgqueue_[0-9]+_[a-z]+$');
            exit when to_regclass(v_table.name) = p_table;
            raise lock_not_available;  -- it was renamed in the meantime
        exception when lock_not_available or undefined_table or invalid_schema_name then
            if clock_timestamp() > v_until then
                raise exception 'could not get the lock of table % within 30 s', p_table
                    using errcode = 'lock_not_available',
                          hint = 'Try again, or end idle transactions that use the table.';
            end if;
            perform pg_sleep(0.2);
        end;
    end loop;
    -- trigger functions of tables of the owner that were dropped with cascade, which also dropped the other functions
    for v_statement in
        select format('drop function %I.%I()', n.nspname, p.proname)
        from pg_proc p join pg_namespace n on n.oid = p.pronamespace join pg_roles r on r.oid = p.proowner
        where p.proname ~ '^pgqueue_[0-9]+_' and p.prorettype = 'trigger'::regtype and r.rolname = v_table.owner
          and p.prosrc like '%Made by pgqueue.capture.%' and not exists (select from pg_trigger where tgfoid = p.oid)
          -- while a dump is restored, functions exist before their triggers do
          and not exists (select from pg_proc k
                          where k.pronamespace = p.pronamespace and k.proname = p.proname || '_key')
    loop
        begin
            perform pgqueue.execute_as(v_table.owner, array[v_statement]);
        exception when undefined_function or lock_not_available or dependent_objects_still_exist then
            null;  -- another session drops it, or uses it
        end;
    end loop;
    -- for the locked table
    perform pgqueue.execute_as(v_table.owner, array(
        select pgqueue.capture_script(p_table, p_stream, p_capture, p_keys, p_columns, p_old, p_outbox)));
    v_after := pgqueue.note_captures(p_table, p_stream);
    if v_after.captured <> p_capture or v_after.schemas <> v_before.schemas then
        raise exception 'the schema of table %, or its owner, was changed in the meantime', p_table
            using errcode = 'object_in_use', hint = 'Nothing was changed: try again.';
    end if;
end $$;

-- Captures a table: each write to it becomes a message of a stream, in the same transaction.
-- All changes after the commit of this transaction are captured. A call for a captured table replaces the arguments of
-- the earlier call. A message has the row as JSON in data, the row's key as key, and the headers table, operation, time
-- and transaction.
--   p_table    a table, partitioned or not, of the caller or of a role that the caller may set (set role)
--   p_stream   a stream of kind json or text
--   p_keys     columns whose values are the message's key, several as a JSON array; null: the primary key; '{}': no key
--   p_columns  columns of the row to publish; null: all, including later ones
--   p_old      data is {"old": ..., "new": ...}, with the row before and after
--   p_outbox   only inserts are captured, and the trigger deletes the inserted rows, by their primary key
-- Errors: PQ001; PQ003, also when the table's owner may not send, or the owner of its schema may not act as it; PQ007;
-- 55P03 when the table is in use for 30 s. Locks: the table against writers; a captured table also against readers.
create or replace function pgqueue.capture(p_table regclass, p_stream text, p_keys text[] default null,
                                           p_columns text[] default null, p_old boolean default false,
                                           p_outbox boolean default false) returns void
language sql as $$ select pgqueue.change_capture(p_table, p_stream, true, p_keys, p_columns, p_old, p_outbox) $$;

-- Ends the capture of a table; its messages remain.
-- If the table was restored without its queue, p_stream may be any stream.
-- Errors: PQ001; PQ003 when the table is not captured, or does not belong to the caller; PQ007; 55P03 as capture.
-- Locks: the table, as capture.
create or replace function pgqueue.release(p_table regclass, p_stream text) returns void
language sql as $$ select pgqueue.change_capture(p_table, p_stream, false) $$;

-- Creates and records the triggers of partitions that are newer than the capture of their table; for maintain(). Only
-- if table, partition and function belong to the owner of this schema: other owners call capture() again. Partitions in
-- use wait for the next call; those whose columns have another order, or whose schema is foreign, for capture().
-- on maintain: perform _pgqueue.run_task('select 0 from _pgqueue.capture_partitions()');
create or replace function _pgqueue.capture_partitions() returns void
language plpgsql set lock_timeout = '50ms' as $$
declare
    v_part      record;
    v_schemas   text[];
    v_statement text;
begin
    delete from pgqueue.captured d where not exists (select from pg_class where oid = d.relation);
    for v_part in
        select r.relid, c.oid as root, d.stream_id, p.oid as function,
               _pgqueue.capture_trigger(c.oid, d.stream_id, 'delete') is null as outbox
        from pgqueue.captured d
        join pg_roles o on o.rolname = current_user
        join pg_class c on c.oid = d.root and c.oid = d.relation and c.relkind = 'p' and c.relowner = o.oid
        join pg_trigger t on t.oid = _pgqueue.capture_trigger(c.oid, d.stream_id)
        join pg_proc p on p.oid = t.tgfoid and p.proowner = o.oid
        cross join lateral pg_partition_tree(c.oid) r
        join pg_class x on x.oid = r.relid and x.relowner = o.oid and x.relkind in ('r', 'p')
        where r.level > 0 and _pgqueue.column_names(r.relid) = _pgqueue.column_names(c.oid)
          and _pgqueue.capture_trigger(r.relid, d.stream_id) is null
          and not exists (select from _pgqueue.foreign_schema(r.relid))
        order by r.relid
    loop
        begin
            perform from pgqueue.streams where stream_id = v_part.stream_id for key share skip locked;  -- lock: stream
            continue when not found;
            v_schemas := _pgqueue.schemas_of(v_part.root);
            for v_statement in  -- lock: captured
                select _pgqueue.trigger_statements(v_part.relid, v_part.root, v_part.stream_id,
                                                   _pgqueue.sql_name(p.pronamespace, p.proname), v_part.outbox)
                from pg_proc p where p.oid = v_part.function
            loop
                execute v_statement;
            end loop;
            perform _pgqueue.store_captures(v_part.root, v_part.stream_id);
            if _pgqueue.schemas_of(v_part.root) <> v_schemas
               or not _pgqueue.is_captured(v_part.relid, v_part.stream_id) then
                raise lock_not_available;  -- names changed while a statement waited
            end if;
        exception when lock_not_available or undefined_object or undefined_table or undefined_function then
            null;  -- the next call tries again
        end;
    end loop;
end $$;

-- Raises 2BP01 if a table is captured to a stream.
-- on before_drop_stream: perform _pgqueue.refuse_captured(p_stream);
create or replace function _pgqueue.refuse_captured(p_stream pgqueue.streams) returns void
language plpgsql as $$
declare
    v_table regclass := (select relation from pgqueue.captured
                         where stream_id = p_stream.stream_id
                           and _pgqueue.capture_trigger(relation, stream_id) is not null
                         order by relation <> root, relation limit 1);
begin
    if v_table is not null then
        raise exception 'table % is captured to stream %', v_table, quote_literal(p_stream.name)
            using errcode = 'dependent_objects_still_exist',
                  hint = format('Run first: select pgqueue.release(%L, %L). Nothing was '
                                'changed.', v_table, p_stream.name);
    end if;
end $$;
