-- Streams: creating, changing and dropping them.

-- Returns the stream with a name, for writing, and checks the consumers to publish to.
-- Errors: PQ001, PQ002, PQ003.
create or replace function pgqueue.open_sink(p_stream text, p_consumers text[] default null)
returns table (stream_id int, kind text)
language sql stable as $$
    select s.stream_id, s.kind
    from _pgqueue.stream(p_stream) s cross join lateral _pgqueue.consumer_ids(s.stream_id, p_consumers)
$$;

-- Stores settings of a stream that were checked; null resets one to its default.
create or replace function _pgqueue.set_stream(p_stream_id int, p_settings jsonb) returns void
language sql as $$
    update pgqueue.streams s
    set (given, notify, max_bytes, max_header_bytes, dedup_window, schema, schema_path)
      = (select _pgqueue.given_names(s.given, p_settings), n.notify, n.max_bytes, n.max_header_bytes, n.dedup_window,
                n.schema, n.schema_path
         from _pgqueue.on_set_stream(jsonb_populate_record(s, _pgqueue.stored_settings('stream', p_settings)),
                                     p_settings) n)
    where s.stream_id = p_stream_id and p_settings <> '{}'
$$;

-- Creates a stream, an append-only sequence of messages.
--   p_name           1 to 200 characters, unique
--   p_kind           the type of its payloads: text, json (checked) or binary
--   p_if_not_exists  return the id of an existing stream of the same kind, whatever its settings, instead of an error
--   p_settings       an object with the value of each setting, as for alter_stream
-- Returns the stream's id. Errors: PQ003, PQ006, PQ011. Locks: a share-update-exclusive lock on messages to attach the
-- partition; sends and reads continue.
create or replace function pgqueue.create_stream(p_name text, p_kind text default 'text',
                                                 p_if_not_exists boolean default false, p_settings jsonb default '{}')
returns int language plpgsql as $$
declare
    v_stream  pgqueue.streams;
    v_columns text := (select string_agg(name, ', ') from _pgqueue.settings() where of_what = 'stream');
begin
    perform _pgqueue.check_name('stream', p_name);
    perform _pgqueue.check_choice('p_kind', p_kind, '{text, json, binary}');
    perform _pgqueue.check_settings('stream', p_settings);
    v_stream.kind := p_kind;
    perform _pgqueue.before_set_stream(v_stream, p_settings);
    perform _pgqueue.check_numbers('streams', '{streams_stream_id_seq}');
    v_stream.stream_id := _pgqueue.await(
        'the name of the stream',
        'insert into pgqueue.streams (name, kind, ' || v_columns || ') '
        'select $2 ->> 0, $2 ->> 1, ' || v_columns || ' from jsonb_populate_record(null::pgqueue.streams, $2 -> 2) '
        'where not exists (select from pgqueue.streams where name = $2 ->> 0) '  -- else it would use up an id
        'on conflict (name) do nothing returning stream_id', null,  -- lock: stream
        jsonb_build_array(p_name, p_kind, _pgqueue.defaults('stream')))::int;
    if v_stream.stream_id is null then
        select * into v_stream from pgqueue.streams where name = p_name;
        if p_if_not_exists and v_stream.kind = p_kind then
            return v_stream.stream_id;
        end if;
        raise exception 'stream % already exists, with kind %', quote_literal(p_name), v_stream.kind
            using errcode = 'PQ006', column = 'p_if_not_exists', hint = case when v_stream.kind = p_kind
                then 'Set p_if_not_exists to use it as it is; to change its settings, use alter_stream.'
                else 'The kind of a stream cannot change: use another name.' end;
    end if;
    perform _pgqueue.set_stream(v_stream.stream_id, p_settings);
    perform _pgqueue.await('the table messages', 'select 0 from _pgqueue.make_tables($1::int, $2 ->> 0)',
                           v_stream.stream_id, jsonb_build_array(p_kind));
    perform _pgqueue.make_stream_functions(v_stream.stream_id);
    perform _pgqueue.revoke_defaults(array[format('pgqueue.messages_%s', v_stream.stream_id)::regclass::oid,
                                           format('pgqueue.seq_%s', v_stream.stream_id)::regclass,
                                           format('pgqueue.publication_%s', v_stream.stream_id)::regclass]
                                     || _pgqueue.functions_of(v_stream.stream_id)::regproc[]::oid[]);
    perform _pgqueue.grant_stream(v_stream.stream_id);
    return v_stream.stream_id;
end $$;

-- Creates the table and the sequences of a stream, and records the sequences.
create or replace function _pgqueue.make_tables(p_stream_id int, p_kind text) returns void
language plpgsql as $$
declare
    v_name text;
begin
    -- a copy of these sequences without their value returns negative numbers, see log/numbers.sql
    foreach v_name in array _pgqueue.sequences_of(p_stream_id) loop
        execute format('create sequence pgqueue.%I minvalue -1000000000000000 start with -1000000000000000', v_name);
        perform setval(format('pgqueue.%I', v_name)::regclass, 0);
    end loop;
    update pgqueue.streams  -- lock: stream
    set message_numbers = format('pgqueue.seq_%s', stream_id),
        publication_numbers = format('pgqueue.publication_%s', stream_id)
    where stream_id = p_stream_id;
    -- "create table ... partition of" would wait for every writer of every stream; attaching does not
    execute format('create table pgqueue.messages_%1$s (like pgqueue.messages including defaults, primary key (seq))',
                   p_stream_id);
    -- lock: table
    execute format('alter table pgqueue.messages_%1$s alter %2$s set not null, alter stream_id set default %1$s',
                   p_stream_id, case p_kind when 'binary' then 'data_bytes' else 'data' end);
    -- lock: table
    execute format('alter table pgqueue.messages attach partition pgqueue.messages_%1$s for values in (%1$s)',
                   p_stream_id);
end $$;

-- Whether a stream accepts all messages that another one accepts, so that messages may be copied to it.
create or replace function _pgqueue.takes_all(p_from pgqueue.streams, p_to pgqueue.streams) returns boolean
language sql stable as $$
    select p_to.kind = p_from.kind and p_to.max_bytes >= p_from.max_bytes
       and p_to.max_header_bytes >= p_from.max_header_bytes and _pgqueue.on_bind(p_from, p_to)
$$;

-- Changes settings of a stream while it is in use.
-- The new settings apply to messages that are sent from then on.
--   p_settings  an object with the new value of each setting; null: the default, which may change with the version
--     notify            notify waiting sessions of each publication. Commits that notify wait for a lock of the whole
--                       server: if that is too slow, turn it off, and readers poll
--     max_bytes         of a payload, 1 to 268,435,456; 16 MB by default
--     max_header_bytes  of the headers of a message, as JSON text, 2 to 1,048,576; 64 kB by default
--     dedup_window      for how long dedup keys are stored, up to 10 years: within that time after a message was sent,
--                       another message with the same dedup key is not published. It must be longer than the longest
--                       transaction that sends one. A longer window does not restore keys that maintain() has deleted.
--                       Null, the default: the stream accepts no dedup keys, and maintain() deletes its old ones
--     schema            of a json stream: the columns of its payloads, in Spark's DDL, such as id bigint not null, name
--                       string. Payloads that do not fit are refused. Later changes can only add nullable columns.
--                       Null, the default: any JSON
-- Errors: PQ001; PQ003 also when the stream would accept more than a stream that it is copied to, or less than one that
-- is copied to it; or for a schema that does not accept all that the previous one accepted. Locks: other calls of this
-- function; bind and unbind where the limits or the schema change.
create or replace function pgqueue.alter_stream(p_stream text, p_settings jsonb) returns void
language plpgsql as $$
declare
    v_stream pgqueue.streams;
    v_other  text;
begin
    perform _pgqueue.check_settings('stream', p_settings);
    v_stream := _pgqueue.stream(p_stream);
    if p_settings ?| '{max_bytes, max_header_bytes, schema}' then
        perform _pgqueue.lock_bindings();
    end if;
    perform _pgqueue.lock_stream(v_stream.stream_id);
    select * into v_stream from pgqueue.streams where stream_id = v_stream.stream_id;
    perform _pgqueue.before_set_stream(v_stream, p_settings);
    v_stream := jsonb_populate_record(v_stream, _pgqueue.stored_settings('stream', p_settings));
    select s.name into v_other
    from pgqueue.bindings b
    join pgqueue.streams s on s.stream_id in (b.stream_id, b.to_stream_id) and s.stream_id <> v_stream.stream_id
    where p_settings ?| '{max_bytes, max_header_bytes, schema}' and v_stream.stream_id in (b.stream_id, b.to_stream_id)
      and not case s.stream_id when b.to_stream_id then _pgqueue.takes_all(v_stream, s)
                               else _pgqueue.takes_all(s, v_stream) end
    order by s.name limit 1;
    if found then
        raise exception 'p_settings: stream % is bound to stream %, and one of them would accept less '
                        'than is copied to it', quote_literal(p_stream), quote_literal(v_other)
            using errcode = 'PQ003', column = 'p_settings', hint = 'Change the limits of that one first.';
    end if;
    perform _pgqueue.set_stream(v_stream.stream_id, p_settings);
end $$;

-- Deletes a stream with its messages and consumers. The exporter of its archive deletes its files afterwards.
-- Open transactions that use the stream continue, and their messages are deleted with it. The next maintain() drops the
-- tables, and frees their space, unless transactions that are open now are still open. Errors: PQ001; 2BP01 when tables
-- are captured to it; 55P03 after a wait of 30 s for a transaction that holds its consumers. Locks, to the end of the
-- transaction: the stream and its consumers, and bindings: end the transaction at once.
create or replace function pgqueue.drop_stream(p_name text) returns void
language plpgsql as $$
begin
    perform _pgqueue.await('stream ' || quote_literal(p_name), 'select 0 from _pgqueue.delete_stream($2 ->> 0)', null,
                           jsonb_build_array(p_name), p_try => interval '5 ms', p_limit => interval '30 s');
end $$;

-- Deletes a stream and its consumers, in the order of locks. The tables remain: a session that has seen the stream may
-- send to it, seek in it, or copy messages to it. maintain() drops them once all transactions that began before the
-- deletion have ended. So no such call fails, and drop_stream() waits for no sender.
create or replace function _pgqueue.delete_stream(p_name text) returns void
language plpgsql as $$
declare
    v_id int;
begin
    perform _pgqueue.lock_bindings();
    v_id := (_pgqueue.stream(p_name)).stream_id;  -- again: it may have been dropped in the meantime
    -- waits for a maintain() of the stream
    perform pg_advisory_xact_lock(_pgqueue.lock_class_maintain(), v_id);  -- lock: maintain
    perform from pgqueue.streams
    where stream_id = v_id
       or stream_id in (select stream_id from pgqueue.bindings where to_stream_id = v_id)
    order by stream_id for update;  -- lock: stream
    perform _pgqueue.before_drop_stream(s) from pgqueue.streams s where stream_id = v_id;
    delete from pgqueue.bindings where v_id in (stream_id, to_stream_id);
    update pgqueue.streams s set bound = false
    where s.bound and not exists (select from pgqueue.bindings b where b.stream_id = s.stream_id);
    perform _pgqueue.drop_consumer(consumer_id)
    from (select consumer_id from pgqueue.consumers where stream_id = v_id order by consumer_id) c;
    perform _pgqueue.on_drop_stream(v_id);
    delete from pgqueue.streams where stream_id = v_id;
    insert into pgqueue.dropped_streams (stream_id, dropped_by) values (v_id, pg_current_xact_id());
end $$;

-- Drops the tables of a stream that was dropped; or, while transactions that may use the stream are open, records
-- these. The sequences come first: their locks wait for prepared transactions that have a number of the stream. For the
-- last lock, of messages, the senders of all streams wait. If objects of other roles depend on them (try_drop()), the
-- messages are deleted, and the next call tries again to drop the rest. Tables stay with their sequences, because
-- numbers() reads both. Locks: the maintenance of the stream, if it is free; the tables.
create or replace function _pgqueue.drop_tables(p_stream_id int) returns void
language plpgsql as $$
declare
    v_dropped pgqueue.dropped_streams;
    v_open    text[];
    v_table   text := 'messages_' || p_stream_id;
    v_first   boolean;
    v_left    boolean := false;
    v_name    text;
begin
    if not pg_try_advisory_xact_lock(_pgqueue.lock_class_maintain(), p_stream_id) then  -- lock: maintain
        return;
    end if;
    -- a transaction that begins after the snapshot of this statement does not see the stream
    select * into v_dropped from pgqueue.dropped_streams where stream_id = p_stream_id;
    if not found or v_dropped.dropped_by = pg_current_xact_id_if_assigned() then
        return;
    end if;
    v_open := _pgqueue.open_transactions(false);
    update pgqueue.dropped_streams set transactions = v_open where stream_id = p_stream_id and transactions is null;
    if v_open && coalesce(v_dropped.transactions, v_open) then
        return;
    end if;
    perform _pgqueue.on_clear_stream(p_stream_id);
    v_name := (select string_agg('pgqueue.' || s, ', ') from unnest(_pgqueue.sequences_of(p_stream_id)) s
               where to_regclass('pgqueue.' || s) is not null);
    if v_name is not null then
        v_left := not _pgqueue.try_drop('drop sequence ' || v_name);  -- lock: table
    end if;
    v_first := (select relispartition from pg_class where oid = to_regclass('pgqueue.' || v_table));
    if v_first then
        execute format('lock table pgqueue.%I in access exclusive mode', v_table);  -- lock: table
        execute format('alter table pgqueue.messages detach partition pgqueue.%I', v_table);  -- lock: table
        execute 'drop function if exists ' || array_to_string(_pgqueue.functions_of(p_stream_id), ', ');
    end if;
    for v_name in
        select relname from pg_class  -- also segments that were detached
        where relnamespace = 'pgqueue'::regnamespace and relkind in ('r', 'p') and not relispartition
          and relname ~ format('^%s(_[0-9]+)?$', v_table) and not v_left
    loop
        if not _pgqueue.try_drop(format('drop table pgqueue.%I', v_name)) then  -- lock: table
            v_left := true;
        end if;
    end loop;
    if not v_left then
        delete from pgqueue.dropped_streams where stream_id = p_stream_id;
    elsif v_first and to_regclass('pgqueue.' || v_table) is not null then
        execute format('truncate pgqueue.%I', v_table);  -- lock: table
    end if;
end $$;

-- The functions of existing streams are created again: version.sql drops functions that this installation does not
-- create.
do $$
begin
    perform _pgqueue.make_stream_functions(stream_id)
    from (select stream_id from pgqueue.streams order by stream_id for key share) s;  -- lock: stream
end $$;
