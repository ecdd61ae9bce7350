-- Streams and consumers by name or id. An error about an unknown one has a hint.

-- The last sequence number of a stream that was assigned; 0: none.
create or replace function _pgqueue.last_seq(p_stream_id int) returns bigint
language plpgsql stable as $$
begin
    return coalesce(pg_sequence_last_value(format('pgqueue.seq_%s', p_stream_id)::regclass), 0);
end $$;

-- The first sequence number of a stream that is stored; null: none.
create or replace function _pgqueue.first_seq(p_stream_id int) returns bigint
language plpgsql stable as $$
declare
    v_first bigint;
begin
    execute format('select min(seq) from pgqueue.messages_%s', p_stream_id) into v_first;
    return v_first;
end $$;

-- The role of the session, even in a function with its owner's rights: the caller of such a function.
create or replace function _pgqueue.caller_role() returns name
language sql stable as $$
    select case current_setting('role') when 'none' then session_user else current_setting('role')::name end
$$;

-- Whether the caller may see the names of streams and consumers. A role that only sends may not.
create or replace function _pgqueue.may_see_names() returns boolean
language sql stable as $$
    select has_table_privilege(c.role, 'pgqueue.stream_stats', 'select')
        or exists (select from pg_proc p
                   where p.pronamespace = 'pgqueue'::regnamespace and p.proname = 'open_streams'
                     and has_function_privilege(c.role, p.oid, 'execute'))
    from (select _pgqueue.caller_role() as role) c
$$;

-- A stream in an error: its name. If the caller gave only its id (stream_of()), the name is shown to a caller that may
-- see names; other callers see the id.
create or replace function _pgqueue.error_name(p_stream pgqueue.streams) returns text
language sql stable as $$
    select coalesce(quote_literal(p_stream.name),
                    (select quote_literal(name) from pgqueue.streams
                     where stream_id = p_stream.stream_id and _pgqueue.may_see_names()),
                    'number ' || p_stream.stream_id)
$$;

-- A consumer of a stream in an error, by the same rule.
create or replace function _pgqueue.error_name(p_stream pgqueue.streams, p_consumer pgqueue.consumers) returns text
language sql stable as $$
    select case when p_stream.name is not null or _pgqueue.may_see_names() then quote_literal(p_consumer.name)
                else 'number ' || p_consumer.consumer_id end
$$;

-- Some names, for the hint of an error; an empty text for a caller that may not see names.
create or replace function _pgqueue.list_names(p_names text[]) returns text
language sql stable as $$
    select case when _pgqueue.may_see_names()
                then format(' Available: %s.', coalesce((select string_agg(quote_literal(n), ', ' order by n)
                                                         from unnest(p_names) n), 'none')) else '' end
$$;

-- A stream by its name. Errors: PQ001. Locks nothing.
create or replace function _pgqueue.stream(p_name text) returns pgqueue.streams
language plpgsql stable as $$
declare
    v_stream pgqueue.streams;
begin
    select * into v_stream from pgqueue.streams where name = p_name;
    if not found then
        raise exception 'unknown stream %', coalesce(quote_literal(p_name), 'null')
            using errcode = 'PQ001',
                  hint = format('Create it: select pgqueue.create_stream(%L).', p_name)
                         || _pgqueue.list_names(array(select name from pgqueue.streams order by name limit 10));
    end if;
    return v_stream;
end $$;

-- A stream by its id, as a running query has it. The name is null, so that errors reveal no names to a caller that
-- tries ids, see error_name(). Errors: PQ001.
create or replace function _pgqueue.stream_of(p_stream_id int) returns pgqueue.streams
language plpgsql stable as $$
declare
    v_stream pgqueue.streams;
begin
    select * into v_stream from pgqueue.streams where stream_id = p_stream_id;
    if not found then
        raise exception 'the stream of this query was dropped'
            using errcode = 'PQ001', hint = 'Create it again and restart the query.';
    end if;
    v_stream.name := null;
    return v_stream;
end $$;

-- A consumer by its id, as a running query has it. Errors: PQ002.
create or replace function _pgqueue.consumer_of(p_consumer_id int) returns pgqueue.consumers
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers;
begin
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    if not found then
        raise exception 'the consumer of this query was dropped'
            using errcode = 'PQ002', hint = 'Create it again and start the query with a new checkpoint.';
    end if;
    return v_consumer;
end $$;

-- A consumer as it is now; null if it was dropped. Whoever gets a consumer's lock reads it again: its settings, which
-- say where messages are stored, may have changed since they were read. The visibility timeout is kept, which may be
-- that of the caller's claim.
create or replace function _pgqueue.consumer_now(p_consumer pgqueue.consumers) returns pgqueue.consumers
language plpgsql stable as $$
declare
    v_timeout interval := p_consumer.visibility_timeout;
begin
    p_consumer := c from pgqueue.consumers c where c.consumer_id = p_consumer.consumer_id;
    p_consumer.visibility_timeout := v_timeout;
    return p_consumer;
end $$;

-- A consumer by its name. Errors: PQ001, PQ002. Locks nothing.
--   p_kind  consumer or group, for errors
create or replace function _pgqueue.consumer(p_stream text, p_name text, p_kind text default 'consumer')
returns pgqueue.consumers language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers;
begin
    select * into v_consumer from pgqueue.consumers where stream_name = p_stream and name = p_name;
    if not found then
        perform _pgqueue.stream(p_stream);
        raise exception 'unknown % % of stream %', p_kind, coalesce(quote_literal(p_name), 'null'),
                        quote_literal(p_stream)
            using errcode = 'PQ002',
                  hint = format('Create it: select pgqueue.create_%s(%L, %L).', p_kind, p_stream, p_name)
                         || _pgqueue.list_names(array(select name from pgqueue.consumers
                                                     where stream_name = p_stream
                                                       and (p_kind = 'consumer' or partitions is not null)
                                                     order by name limit 10));
    end if;
    return v_consumer;
end $$;

-- The ids of consumers of a stream, by their names; null for null. Errors: PQ002 for an unknown name, PQ003 for an
-- empty list.
create or replace function _pgqueue.consumer_ids(p_stream_id int, p_names text[]) returns int[]
language plpgsql stable as $$
declare
    v_ids     int[];
    v_unknown text;
begin
    if p_names is null then
        return null;
    end if;
    select array_agg(distinct c.consumer_id order by c.consumer_id),
           min(coalesce(quote_literal(x.name), 'null')) filter (where c.consumer_id is null)
    into v_ids, v_unknown
    from unnest(p_names) x (name)
    left join pgqueue.consumers c on c.stream_id = p_stream_id and c.name = x.name;
    if v_unknown is not null then
        raise exception 'unknown consumer % in p_consumers', v_unknown
            using errcode = 'PQ002', column = 'p_consumers',
                  hint = 'Name consumers of this stream, or pass null to publish to all.';
    elsif v_ids is null then
        raise exception 'p_consumers is empty: no consumer would get the messages'
            using errcode = 'PQ003', column = 'p_consumers',
                  hint = 'Name consumers of this stream, or pass null to publish to all.';
    end if;
    return v_ids;
end $$;

-- The name of a consumer, for an error message.
create or replace function _pgqueue.consumer_name(p_consumer_id int) returns text
language sql stable as $$
    select coalesce((select format('consumer %L of stream %L', name, stream_name) from pgqueue.consumers
                     where consumer_id = p_consumer_id), 'a dropped consumer')
$$;

-- The name of an object of a schema, as SQL.
create or replace function _pgqueue.sql_name(p_namespace oid, p_name text) returns text
language sql stable as $$ select format('%I.%I', nspname, p_name) from pg_namespace where oid = p_namespace $$;

-- The name of a table, as SQL; null when it was dropped.
create or replace function _pgqueue.sql_name(p_relation regclass) returns text
language sql stable as $$ select _pgqueue.sql_name(relnamespace, relname) from pg_class where oid = p_relation $$;
