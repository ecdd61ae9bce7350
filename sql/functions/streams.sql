-- Streams.

-- Creates a stream.
--   p_name              1 to 200 characters, unique
--   p_kind              what its messages hold: text, json (checked) or binary
--   p_if_not_exists     return the id of an existing one of the same kind, whatever its other settings, instead of failing
--   p_notify            notify of each publication, when somebody waits. Commits that notify queue up for a lock of the whole
--                       server: where that is too much, turn it off, and readers find messages within their wait.
--   p_max_bytes         of a payload, 1 to 268,435,456; 16 MB by default
--   p_max_header_bytes  of the headers of a message, as JSON text, 2 to 1,048,576; 64 kB by default
--   p_dedup_window      for how long dedup keys are remembered, see set_dedup_window; null: messages have none
-- Returns the stream's id. Errors: PQ003, PQ006.
-- Locks: a share-update-exclusive lock on messages to attach the partition; sends and reads go on.
create or replace function pgqueue.create_stream(p_name text, p_kind text default 'text', p_if_not_exists boolean default false,
                                                 p_notify boolean default true, p_max_bytes int default 16777216,
                                                 p_max_header_bytes int default 65536, p_dedup_window interval default null) returns int
language plpgsql
set lock_timeout = '10s'
as $$
declare
    v_stream pgqueue.streams;
begin
    perform pgqueue._check_name('stream', p_name);
    if p_kind is null or p_kind not in ('text', 'json', 'binary') then
        raise exception 'p_kind is text, json or binary, not %', coalesce(quote_literal(p_kind), 'null') using errcode = 'PQ003', column = 'p_kind';
    end if;
    perform pgqueue._check_number('p_max_bytes', p_max_bytes, 1, pgqueue._max_max_bytes());
    perform pgqueue._check_number('p_max_header_bytes', p_max_header_bytes, 2, pgqueue._max_max_header_bytes());
    if p_dedup_window is not null then
        perform pgqueue._check_timeout('p_dedup_window', p_dedup_window);
    end if;
    insert into pgqueue.streams (name, kind, notify, max_bytes, max_header_bytes, dedup_window)
    values (p_name, p_kind, coalesce(p_notify, true), p_max_bytes, p_max_header_bytes, p_dedup_window)
    on conflict (name) do nothing
    returning * into v_stream;
    if not found then
        select * into v_stream from pgqueue.streams where name = p_name;
        if p_if_not_exists and v_stream.kind = p_kind then
            return v_stream.stream_id;
        end if;
        raise exception 'stream % exists already, with kind %', quote_literal(p_name), v_stream.kind using errcode = 'PQ006';
    end if;

    execute format('create sequence pgqueue.seq_%s', v_stream.stream_id);
    execute format('create sequence pgqueue.publication_%s cache 1', v_stream.stream_id);
    -- "create table ... partition of" would wait for every writer of every stream; attaching does not
    execute format('create table pgqueue.messages_%1$s (like pgqueue.messages including defaults, primary key (seq))', v_stream.stream_id);
    execute format('alter table pgqueue.messages_%1$s alter %2$s set not null', v_stream.stream_id,
                   case p_kind when 'binary' then 'data_bytes' else 'data' end);
    execute format('alter table pgqueue.messages_%1$s alter stream_id set default %1$s', v_stream.stream_id);
    execute format('alter table pgqueue.messages attach partition pgqueue.messages_%1$s for values in (%1$s)', v_stream.stream_id);
    perform pgqueue._grant_stream(v_stream.stream_id);
    perform pgqueue._make_payloads(v_stream.stream_id);
    return v_stream.stream_id;
end $$;

-- Changes settings of a stream: notify, max_bytes, max_header_bytes, dedup_window, as create_stream explains them. What is sent from then on goes
-- by the new ones; what was sent stays as it is.
--   p_settings  an object with the new value of each; null: the default
-- Errors: PQ001; PQ003 also when it would take more than a stream that it is copied to, or less than one that is copied to it.
-- Locks: other calls of this function; bind and unbind where the limits change.
create or replace function pgqueue.alter_stream(p_stream text, p_settings jsonb) returns void
language plpgsql
as $$
declare
    v_settings jsonb := pgqueue._checked_settings('stream', p_settings);
    v_stream   pgqueue.streams := pgqueue._stream(p_stream);
    v_other    text;
begin
    if v_settings ?| '{max_bytes, max_header_bytes}' then
        lock table pgqueue.bindings in share row exclusive mode;
    end if;
    select * into v_stream from pgqueue.streams where stream_id = v_stream.stream_id for no key update;
    v_stream := jsonb_populate_record(v_stream, v_settings);
    select s.name into v_other
    from pgqueue.bindings b join pgqueue.streams s on s.stream_id in (b.stream_id, b.to_stream_id) and s.stream_id <> v_stream.stream_id
    where v_settings ?| '{max_bytes, max_header_bytes}' and v_stream.stream_id in (b.stream_id, b.to_stream_id)
      and case s.stream_id when b.to_stream_id then s.max_bytes < v_stream.max_bytes or s.max_header_bytes < v_stream.max_header_bytes
               else s.max_bytes > v_stream.max_bytes or s.max_header_bytes > v_stream.max_header_bytes end
    order by s.name limit 1;
    if found then
        raise exception 'p_settings: stream % is bound to stream %, and one of them would take less than is copied to it', quote_literal(p_stream), quote_literal(v_other)
            using errcode = 'PQ003', column = 'p_settings', hint = 'Change the limits of that one first.';
    end if;
    update pgqueue.streams
    set notify = v_stream.notify, max_bytes = v_stream.max_bytes, max_header_bytes = v_stream.max_header_bytes, dedup_window = v_stream.dedup_window
    where stream_id = v_stream.stream_id;
end $$;

-- Makes, or makes anew, the function of a stream that reads the payloads of a claim, in the order of delivery: _payloads_<stream_id>.
-- Each stream has one of its own, whose plan is kept: to plan the query costs more than all the rest of a small claim, and a plan over the
-- parent of all partitions would lock all of them. Of a stream that is stored in leaves it has a plan for each leaf, for claims that are
-- in one leaf, as nearly all; and is made anew when there is another one. Not the messages are sorted, but their ranges: the nested loop, to which receive is
-- confined (settings.sql), keeps their order.
create or replace function pgqueue._make_payloads(p_stream_id int) returns void
language plpgsql
as $$
declare
    v_query  text := $q$
            return query
            select p_claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, r.priority, r.deliver_count, m.inserted_at, r.note -> 'saved'
            from (select c.priority, c.deliver_count, c.note, g from pgqueue.consumer_messages c cross join lateral unnest(c.seqs) g
                  where c.claim_id = p_claim_id and c.state = 'claimed'
                  order by c.lane, c.arrival_no, lower(g)) r
            cross join lateral (select * from pgqueue.%I x where x.seq >= lower(r.g) and x.seq < upper(r.g) order by x.seq) m;$q$;
    v_all    text := format(v_query, format('messages_%s', p_stream_id));
    v_leaves text;
begin
    select string_agg(format(E'if v_lo >= %s and v_hi <= %s then%s\n            return;\n            end if;',
                             lo, hi, format(v_query, pgqueue._leaf_name(p_stream_id, leaf))), E'\n            ' order by lo desc)
    into v_leaves
    from pgqueue.leaves where stream_id = p_stream_id;
    execute format($q$
        create or replace function pgqueue._payloads_%s(p_claim_id bigint)
        returns setof pgqueue.received
        language plpgsql
        as $f$
        declare
            v_lo bigint;
            v_hi bigint;
        begin
            %s%s
        end $f$ $q$,
        p_stream_id,
        $q$select min(c.first_seq), max(upper(c.seqs)) into v_lo, v_hi
            from pgqueue.consumer_messages c where c.claim_id = p_claim_id and c.state = 'claimed';
            $q$ || v_leaves,
        v_all);
    execute format('revoke all on function pgqueue._payloads_%s from public', p_stream_id);
end $$;

-- Deletes a stream with its consumers and messages. Errors: PQ001; 2BP01 when tables are captured to it.
-- Locks: its consumers, and for moments all of messages to detach the partition (55P03 after 30 s).
create or replace function pgqueue.drop_stream(p_name text) returns void
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_name);
    v_until  timestamptz := clock_timestamp() + interval '30 s';
    v_table  regclass := (select tgrelid from pg_trigger where tgname = format('pgqueue_%s_insert', v_stream.stream_id) order by tgnargs, tgrelid limit 1);
begin
    if v_table is not null then
        raise exception 'table % is captured to stream %', v_table, quote_literal(p_name)
            using errcode = 'dependent_objects_still_exist', hint = format('First: select pgqueue.release(%L, %L). Nothing was changed.', v_table, p_name);
    end if;
    perform pgqueue.drop_consumer(p_name, name)
    from pgqueue.consumers where stream_id = v_stream.stream_id order by consumer_id;
    loop
        begin
            perform pgqueue._detach_messages(v_stream.stream_id);
            exit;
        exception when lock_not_available then
            -- every sender of every stream waits behind this one: so it waits for moments only, and lets them pass in between
            if clock_timestamp() > v_until then
                raise;
            end if;
            perform pg_sleep(0.2);
        end;
    end loop;
    perform from pgqueue.streams where stream_id = v_stream.stream_id for update;  -- an installer may be making its function anew
    execute format('drop function if exists pgqueue._payloads_%s', v_stream.stream_id);
    execute format('drop table pgqueue.messages_%s', v_stream.stream_id);
    execute format('drop sequence pgqueue.seq_%1$s, pgqueue.publication_%1$s', v_stream.stream_id);
    update pgqueue.streams s set bound = false
    where s.stream_id in (select b.stream_id from pgqueue.bindings b where b.to_stream_id = v_stream.stream_id)
      and not exists (select from pgqueue.bindings b where b.stream_id = s.stream_id and b.to_stream_id <> v_stream.stream_id);
    delete from pgqueue.bindings where v_stream.stream_id in (stream_id, to_stream_id);
    delete from pgqueue.publications where stream_id = v_stream.stream_id;
    delete from pgqueue.retention where stream_id = v_stream.stream_id;
    delete from pgqueue.schedules where stream_id = v_stream.stream_id;
    delete from pgqueue.schedule_turns where stream_id = v_stream.stream_id;
    delete from pgqueue.leaves where stream_id = v_stream.stream_id;
    delete from pgqueue.trims where stream_id = v_stream.stream_id;
    delete from pgqueue.decided where stream_id = v_stream.stream_id;
    delete from pgqueue.staged_writes where stream_id = v_stream.stream_id;
    delete from pgqueue.reservations where stream_id = v_stream.stream_id;
    delete from pgqueue.sink_batches where stream_id = v_stream.stream_id;
    delete from pgqueue.incarnations where stream_id = v_stream.stream_id;
    delete from pgqueue.dedup_keys where stream_id = v_stream.stream_id;
    delete from pgqueue.streams where stream_id = v_stream.stream_id;
end $$;

-- One try to detach the messages of a stream.
create or replace function pgqueue._detach_messages(p_stream_id int) returns void
language plpgsql
set lock_timeout = '50ms'
as $$
begin
    execute format('alter table pgqueue.messages detach partition pgqueue.messages_%s', p_stream_id);
end $$;

-- Streams that are there get theirs anew: one that is not made by this installation is dropped, see version.sql.
do $$
begin
    perform pgqueue._make_payloads(stream_id) from (select stream_id from pgqueue.streams order by stream_id for key share) s;
end $$;
