-- The Spark sink for tables: tasks stage rows, and the driver's commit writes them into the target, once.
--
-- Each write has its own unlogged table of staged rows, which a crash of Postgres or a failover empties. Then the
-- commit fails, because rows are missing, and a restart repeats the batch. The functions here run with the rights of
-- the schema's owner. The statements that write the target run with the rights of the writer
-- (table_sink/table_apply.sql).

-- The writes to tables with staged rows, each in its own table staged_rows_<write_no>. The rows of a killed write
-- remain until the next write of its batch, or until maintain().
-- in use: select format('the staged rows of write %s', write_no) from pgqueue.table_writes
-- on numbers: union all values ('table_write_numbers', false, 'select max(write_no >> 24) from pgqueue.table_writes')
create table if not exists pgqueue.table_writes (
    write_no  bigint      primary key,      -- of open_table(): one write of a batch
    sink      text        not null,
    batch     bigint      not null,
    given     jsonb       not null,         -- p_target of open_table()
    plan      jsonb       not null,         -- of the target at that time (table_sink/table_plan.sql)
    role      text        not null,         -- writes and reads the staged rows
    staged_by text        not null default session_user,
    staged_at timestamptz not null default clock_timestamp()
);

-- The counter of these writes, of 39 bits. It is not that of begin_write(), which a producer could advance by billions
-- in an hour. A call of open_table() checks a table first: at 1,000 calls a second, the numbers last for 17 years.
do $$
begin
    if to_regclass('pgqueue.table_write_numbers') is null then
        create sequence pgqueue.table_write_numbers maxvalue 549755813887 owned by pgqueue.table_writes.write_no;
        -- above the numbers of 0.1.1, which had a counter of 31 bits
        perform setval('pgqueue.table_write_numbers', (max(write_no) >> 24) + 1)
        from pgqueue.table_writes having count(*) > 0;
    end if;
end $$;

-- Checks a write to a table, before rows are staged: the target, the columns, the unique index, and the rights.
--   p_target  an object: table, with its schema, quoted as in SQL; columns, a list of objects with name and type, as in
--             Spark's simpleString; and the options of the sink, each may be null or missing: merge_keys, sequence_by,
--             delete_when and allow_rounding
--   p_role    who writes
-- Returns the name of the table as SQL, and the number of this write, which tasks pass when they stage: a later write
-- of the batch has a higher number. Errors: PQ003; 42501 when the role may not write the table. Locks nothing.
create or replace function pgqueue.open_table(p_target jsonb, p_role text default current_user)
returns table (name text, write_no bigint)
language plpgsql as $$
begin
    perform _pgqueue.check_target(p_target, p_role);
    perform _pgqueue.keep_secret();
    return query select _pgqueue.table_plan(p_target, p_role) ->> 'relation',
                        _pgqueue.signed_write_no(nextval('pgqueue.table_write_numbers'));
end $$;

-- The number of a write, for the role that opened it: a counter of 39 bits, and 24 bits that prove that open_table()
-- returned the number to this role, so that no other role can use it first.
create or replace function _pgqueue.signed_write_no(p_number bigint) returns bigint
language sql stable as $$
    select (p_number << 24) | ('x' || encode(substr(sha256(
               int8send(pg_sequence_last_value('pgqueue.claim_secret')) || int8send(p_number)
               || textsend('write of ' || session_user)), 1, 3), 'hex'))::bit(24)::bigint
$$;

-- Raises PQ003 for an object that open_table() does not accept, or an unknown role.
create or replace function _pgqueue.check_target(p_target jsonb, p_role text) returns void
language plpgsql stable as $$
begin
    if jsonb_typeof(p_target) is distinct from 'object' or jsonb_typeof(p_target -> 'columns') is distinct from 'array'
       or exists (select from jsonb_array_elements(p_target -> 'columns') c
                  where coalesce(c ->> 'name', '') = '' or c ->> 'type' is null)
       or exists (select from unnest('{merge_keys, allow_rounding}'::text[]) l (name)
                  where jsonb_typeof(p_target -> l.name) not in ('array', 'null')
                     or jsonb_path_exists(p_target -> l.name, 'strict $[*] ? (@.type() != "string")', silent => true))
    then
        raise exception 'p_target must be an object with table, columns with name and type, and lists '
                        'allow_rounding and merge_keys of names of columns, not %',
                        coalesce(left(p_target::text, 100), 'null') using errcode = 'PQ003', column = 'p_target';
    elsif not exists (select from pg_roles where rolname = p_role) or p_role is null then
        raise exception 'p_role must be a role of this server, not %', coalesce(quote_literal(p_role), 'null')
            using errcode = 'PQ003', column = 'p_role';
    end if;
end $$;

-- Finds or creates the table for the staged rows of a write. A task calls it before its first row. It drops the tables
-- of earlier writes of the batch.
--   p_write_no        of open_table()
--   p_sink, p_batch   as of publish_staged
--   p_target, p_role  as of open_table()
-- Returns the name of the table in the schema pgqueue. Its columns are chunk, a random number that the task chooses for
-- the rows of one COPY, and c1, c2 and so on, in the order of p_target. The role may insert into it and read it.
-- Errors: PQ003; 42501; PQ008 when a later write of the batch has begun, or open_table() did not return the number to
-- this role. Locks: the write, until the transaction ends; the tables of earlier writes, if they are not in use.
create or replace function pgqueue.open_table_write(p_write_no bigint, p_sink text, p_batch bigint, p_target jsonb,
                                                    p_role text default current_user) returns text
language plpgsql as $$
declare
    v_name   text := 'staged_rows_' || p_write_no;
    v_plan   jsonb;
    v_others bigint[];  -- writes of the same batch to the table
begin
    perform _pgqueue.check_batch(p_sink, p_batch);
    perform _pgqueue.check_target(p_target, p_role);
    if (p_write_no > 0) is not true then
        raise exception 'p_write_no must be a number of open_table(), not %', coalesce(p_write_no::text, 'null')
            using errcode = 'PQ003', column = 'p_write_no';
    elsif (p_write_no = _pgqueue.signed_write_no(p_write_no >> 24)) is not true then
        raise exception 'p_write_no % is not a number that open_table() returned to role %', p_write_no, session_user
            using errcode = 'PQ008', column = 'p_write_no', hint = 'Run the batch again.';
    end if;
    if not exists (select from pgqueue.table_writes where write_no = p_write_no) then
        v_plan := _pgqueue.table_plan(p_target, p_role);
        v_others := array(select write_no from pgqueue.table_writes
                          where sink = p_sink and batch = p_batch and staged_by = session_user
                            and plan ->> 'relation' = v_plan ->> 'relation');
        perform _pgqueue.refuse_write(p_sink, p_batch) where p_write_no < any (v_others);
        if _pgqueue.await(
               'write ' || p_write_no,
               'insert into pgqueue.table_writes (write_no, sink, batch, given, plan, role) '
               'select $1, $2 ->> 0, ($2 ->> 1)::bigint, $2 -> 2, $2 -> 3, $2 ->> 4 '
               'on conflict do nothing returning 1',  -- lock: table write
               p_write_no, jsonb_build_array(p_sink, p_batch, p_target, v_plan, p_role)) = '1' then
            perform _pgqueue.make_staged_rows(v_name, v_plan, p_role);
            perform pgqueue.drop_table_write(w) from unnest(v_others) w where w < p_write_no;
        end if;
    end if;
    if not exists (select from pgqueue.table_writes
                   where write_no = p_write_no and given = p_target
                     and (sink, batch, role, staged_by) = (p_sink, p_batch, p_role, session_user::text)) then
        raise exception 'p_write_no % belongs to another write', p_write_no
            using errcode = 'PQ008', column = 'p_write_no', hint = 'Run the batch again.';
    end if;
    return v_name;
end $$;

-- Creates the table for the staged rows of a write. (Its statistics are not collected, because it is read once.)
create or replace function _pgqueue.make_staged_rows(p_name text, p_plan jsonb, p_role text) returns void
language plpgsql as $$
begin
    execute (select format('create unlogged table pgqueue.%I (chunk bigint not null, %s) '
                           'with (autovacuum_enabled = off)', p_name, string_agg(
                               format('c%s %s', n, c ->> 'staged')
                               || case when c ? 'key' or n = (p_plan -> 'sequence')::int then ' not null' else '' end,
                               ', ' order by n))
             from jsonb_array_elements(p_plan -> 'columns') with ordinality u (c, n));
    perform _pgqueue.revoke_defaults(array[format('pgqueue.%I', p_name)::regclass]);
    execute format('grant insert, select on pgqueue.%I to %I', p_name, p_role);
end $$;

-- Begins the commit of a batch of a table, once; apply_table_batch() calls it.
--   p_write_no       of open_table()
--   p_sink, p_batch  as of publish_staged
--   p_table          the name that open_table() returned
--   p_rows           the number of rows of the batch
-- Returns the statements that write the rows of the chunks $1: the first counts them, and returns the columns whose
-- text would change, for which the time zone must be UTC; the second finds a duplicate key if the others would not
-- (else it is null). Null, and nothing is changed, if the batch was written before. Errors: PQ003; 42501 for the sink
-- of another role; PQ008 when the target was changed since rows were staged, or the write was deleted; PQ010 as in
-- publish_staged. Locks: the batch, against another commit of it; for a merge the target, against other merges.
create or replace function pgqueue.begin_table_batch(p_write_no bigint, p_sink text, p_batch bigint, p_table text,
                                                     p_rows bigint) returns text[]
language plpgsql as $$
declare
    v_write   pgqueue.table_writes;
    v_plan    jsonb;
    v_changed text;
begin
    perform _pgqueue.check_batch(p_sink, p_batch);
    if coalesce(p_table, '') = '' or (p_rows >= 0) is not true then
        raise exception 'p_table must be a name of open_table() and p_rows the number of its rows, not % and %',
                        coalesce(quote_literal(p_table), 'null'), coalesce(p_rows::text, 'null')
            using errcode = 'PQ003', column = 'p_table, p_rows';
    end if;
    if not _pgqueue.begin_batch(row(p_sink, 0, 0, false, p_batch, p_rows, null, null, null, p_table,
                                     _pgqueue.writing_query())) then
        return null;
    end if;
    select * into v_write from pgqueue.table_writes where write_no = p_write_no and sink = p_sink and batch = p_batch;
    if not found then
        raise exception 'batch % of sink % is not complete: its staged rows for table % are gone', p_batch, p_sink,
                        p_table
            using errcode = 'PQ008',
                  hint = 'Either a later write of the batch dropped them: then two drivers run the same query, and '
                         'you must stop one. Or maintain() dropped them as too old. Nothing was written; run the '
                         'batch again.';
    end if;
    begin
        v_plan := _pgqueue.table_plan(v_write.given, v_write.role);
        v_changed := case when v_plan is distinct from v_write.plan
                          then 'a column, a type or an index is different' end;
    exception when sqlstate 'PQ003' then
        v_changed := sqlerrm;
    end;
    if v_changed is not null then
        raise exception 'table % was changed while batch % of sink % was written: %', p_table, p_batch, p_sink,
                        v_changed
            using errcode = 'PQ008',
                  hint = 'Nothing was written. Run the batch again: it uses the table as it is now.';
    end if;
    if v_plan ? 'keys' then
        perform _pgqueue.await(
            'a merge into table ' || p_table, 'select 0 from pg_advisory_xact_lock($1)',  -- lock: merge
            hashtextextended('pgqueue merge ' || (v_plan ->> 'oid'), 0));
    end if;
    return _pgqueue.table_statements(v_plan, 'staged_rows_' || p_write_no);
end $$;

-- The statements of begin_table_batch(). In them, t is the table and n has the staged rows. Names are quoted by
-- format(); casts, operators and collations have their schema, so that they do not depend on the search_path. (More
-- than 60 lines: the parts of each statement are next to it.)
create or replace function _pgqueue.table_statements(p_plan jsonb, p_staged text) returns text[]
language plpgsql stable as $$
declare
    v_gone    int := p_plan -> 'gone';
    v_last    int := p_plan -> 'sequence';
    v_chunks  text := format('pgqueue.%I s where s.chunk operator(pg_catalog.=) any ($1)', p_staged);
    v_rows    text := (  -- staged rows, in the target's types; for a sequence also as they were staged, as s1 and so on
        select format('(select %s from %s) n',
                      string_agg(format('s.c%s%s as c%1$s', n, '::' || (c ->> 'cast'))
                                 || case when v_last is not null and c ? 'cast' then format(', s.c%s as s%1$s', n)
                                         else '' end, ', ' order by n), v_chunks)
        from jsonb_array_elements(p_plan -> 'columns') with ordinality u (c, n));
    v_stored  text := 't.' || quote_ident(p_plan -> 'columns' -> (v_last - 1) ->> 'name');
    v_winners text := v_rows;
    v_key     record;
    v_found   text[];
    v_names   text;
    v_values  text;
    v_set     text;
begin
    select string_agg(format('%I', c ->> 'name'), ', ' order by n),
           string_agg('n.c' || n, ', ' order by n),
           string_agg(format('%1$I = excluded.%1$I', c ->> 'name'), ', ' order by n) filter (where not c ? 'key')
    into v_names, v_values, v_set
    from jsonb_array_elements(p_plan -> 'columns') with ordinality u (c, n) where n is distinct from v_gone;
    select array[format('select count(*), concat_ws('', '', null%s) from %s',
                        string_agg(format(', case when bool_or(%s) then %L end', format(c ->> 'changes', 's.c' || n),
                                          c ->> 'name'), '' order by n), v_chunks), null]
    into v_found from jsonb_array_elements(p_plan -> 'columns') with ordinality u (c, n) where c ? 'changes';
    if not p_plan ? 'keys' then
        return v_found || format('insert into %s (%s) select %s from %s', p_plan ->> 'relation', v_names, v_values,
                                 v_rows);
    end if;
    select string_agg(format('%I', c ->> 'name'), ', ' order by i) as names,
           string_agg(format('t.%I %s n.c%s%s', c ->> 'name', c #>> '{key,equals}', n, c #>> '{key,collate}'),
                      ' and ' order by i) as same,
           string_agg(format('n.c%s%s using %s', n, c #>> '{key,collate}', c #>> '{key,less}'), ', ' order by i)
               as sorted,
           string_agg(format('n.c%s%s', n, c #>> '{key,collate}'), ', ' order by i) as columns
    into v_key
    from jsonb_array_elements(p_plan -> 'columns') with ordinality u (c, n)
    join jsonb_array_elements_text(p_plan -> 'keys') with ordinality k (place, i) on place::bigint = n;
    if v_last is not null then
        -- the last row of each key, a delete if equal; then by the values, so that the result is deterministic
        v_winners := (
            select format('(select distinct on (%s) n.* from %s order by %s, %s) n', v_key.columns, v_rows,
                          v_key.sorted,
                          string_agg(format('n.%s%s%s desc nulls last', case when c ? 'cast' then 's' else 'c' end, n,
                                            case when c ->> 'staged' like 'text%' then ' collate pg_catalog."C"' end),
                                     ', ' order by n is distinct from v_last, n is distinct from v_gone, n))
            from jsonb_array_elements(p_plan -> 'columns') with ordinality u (c, n));
    elsif v_gone is not null then
        v_found[2] := format('select 1 from %s group by %s having count(*) operator(pg_catalog.>) 1 limit 1', v_rows,
                             v_key.columns);
    end if;
    if v_gone is not null then
        v_found := v_found || format(
            'with held as materialized (select n.* from %1$s t join %2$s on %3$s where n.c%4$s%5$s order by %6$s '
            'for update of t) delete from %1$s t using held n where %3$s%5$s',  -- lock: target row
            p_plan ->> 'relation', v_winners, v_key.same, v_gone,
            case when v_last is null then ''
                 else format(' and (%1$s operator(pg_catalog.<=) n.c%2$s or %1$s is null)', v_stored, v_last) end,
            v_key.sorted);
    end if;
    return v_found || format(
        'insert into %s as t (%s) select %s from %s%s order by %s on conflict (%s) do %s', p_plan ->> 'relation',
        v_names, v_values, v_winners, ' where n.c' || v_gone || ' is not true', v_key.sorted, v_key.names,
        coalesce('update set ' || v_set || case when v_last is null then '' else format(
                     ' where %1$s operator(pg_catalog.<) excluded.%2$s or %1$s is null', v_stored,
                     substr(v_stored, 3)) end, 'nothing'));
end $$;

-- Drops the staged rows of a write that has ended, or will not commit.
--   p_write_no  of open_table()
-- Returns whether they were dropped: not if another role staged them, or if they are in use after a wait of a second;
-- then maintain() drops them. Errors: PQ003. Locks: the write, and its table.
create or replace function pgqueue.drop_table_write(p_write_no bigint) returns boolean
language plpgsql as $$
begin
    if p_write_no is null then
        raise exception 'p_write_no must be a number of open_table(), not null'
            using errcode = 'PQ003', column = 'p_write_no';
    end if;
    return (_pgqueue.await(
        'the staged rows of write ' || p_write_no, 'select to_jsonb(_pgqueue.drop_staged_rows($1, $2 ->> 0))',
        p_write_no, jsonb_build_array(session_user), p_limit => interval '1 s'))::boolean;
exception when lock_not_available or deadlock_detected then
    return false;
end $$;

-- Drops the staged rows of a write. Returns whether the role has staged such rows, and no other session is dropping
-- them. If objects of other roles depend on their table (try_drop()), the rows are deleted, and maintain() drops the
-- table later.
create or replace function _pgqueue.drop_staged_rows(p_write_no bigint, p_role text) returns boolean
language plpgsql as $$
declare
    v_name text := 'staged_rows_' || p_write_no;
begin
    perform from pgqueue.table_writes where write_no = p_write_no and staged_by = p_role
    for update skip locked;  -- lock: table write
    if not found then
        return false;
    end if;
    if _pgqueue.try_drop(format('drop table if exists pgqueue.%I', v_name)) then  -- lock: staged rows
        delete from pgqueue.table_writes where write_no = p_write_no;
    else
        execute format('truncate pgqueue.%I', v_name);  -- lock: staged rows
        -- not again at once: maintain() tries a few writes in a call
        update pgqueue.table_writes set staged_at = clock_timestamp() where write_no = p_write_no;
    end if;
    return true;
end $$;

-- Writes whose staged rows will not be applied, a few of them: those older than p_age, and after an hour, in which
-- repetitions of a batch end, those of written batches. The order is random, because some may be in
-- use for long.
-- on maintained:
--     perform _pgqueue.run_task('select to_jsonb(_pgqueue.drop_staged_rows(($2 -> 0)::bigint, $2 ->> 1))', null,
--                            jsonb_build_array(w.write_no, w.staged_by))
--     from _pgqueue.abandoned_table_writes(p_age) w;
create or replace function _pgqueue.abandoned_table_writes(p_age interval) returns setof pgqueue.table_writes
language sql stable as $$
    select * from pgqueue.table_writes w
    where w.staged_at < clock_timestamp() - p_age
       or (w.staged_at < clock_timestamp() - least(p_age, interval '1 hour')
           and _pgqueue.is_done(w.sink, null, w.batch, w.plan ->> 'relation'))
    order by random() limit 10
$$;
