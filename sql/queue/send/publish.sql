-- Publishing: one row makes messages visible. Nothing is written per consumer, except for consumers with
-- per_key_capacity or max_backlog.

-- Copies messages that are being published to the streams that their topics are bound to. A stream that is bound by
-- several paths gets a copy by each.
--   p_staged_at  when the first of them was staged; null: they were not. Later bindings do not copy them: they may not
--                fit the limits that both streams had when they were bound
create or replace function _pgqueue.route(p_stream_id int, p_seqs int8multirange, p_priority int,
                                          p_deliver_at timestamptz, p_expires_at timestamptz,
                                          p_staged_at timestamptz default null) returns void
language plpgsql as $$
declare
    v_target record;
    v_stream pgqueue.streams;
    v_seqs   bigint[];
begin
    for v_target in
        select s.stream_id, (array_agg(s))[1] as stream, array_agg(b.topic_regex) as regexes
        from pgqueue.bindings b join pgqueue.streams s on s.stream_id = b.to_stream_id
        where b.stream_id = p_stream_id and (b.bound_at > p_staged_at) is not true
        group by s.stream_id order by s.stream_id
    loop
        execute format('with copied as (insert into pgqueue.messages_%1$s (seq, key, data, data_bytes, headers) '
                       'select nextval(%2$L::regclass), key, data, data_bytes, headers '
                       'from (select m.* from unnest($1) g '
                       -- (without offset and without statistics, the planner would read the whole stream; the bounds of
                       -- $1 exclude its other tables)
                       'cross join lateral (select * from pgqueue.messages_%3$s '
                       '                    where seq >= lower(g) and seq < upper(g) '
                       'and seq >= lower($1) and seq < upper($1) offset 0) m '
                       'where _pgqueue.words(m.key) ~ any ($2) order by m.seq) m returning seq) '
                       'select array_agg(seq order by seq) from copied', v_target.stream_id,
                       format('pgqueue.seq_%s', v_target.stream_id), p_stream_id)
        into v_seqs using p_seqs, v_target.regexes;
        if v_seqs is not null then
            v_stream := v_target.stream;
            v_stream.name := null;  -- the sender did not name it, see error_name()
            perform _pgqueue.publish(v_stream, _pgqueue.set_of(v_seqs), cardinality(v_seqs), p_priority,
                                     p_deliver_at, null, p_expires_at);
        end if;
    end loop;
end $$;

-- Makes messages visible: the last step of each statement that publishes.
--   p_key  see check_keys()
-- Returns p_count. Errors: PQ011 after a restore without the values of sequences. Locks: the publish lock, shared
-- (notify takes its global lock at commit).
create or replace function _pgqueue.publish(p_stream pgqueue.streams, p_seqs int8multirange, p_count bigint,
                                            p_priority int, p_deliver_at timestamptz, p_consumers int[],
                                            p_expires_at timestamptz default null, p_key text[] default null)
returns bigint language plpgsql as $$
declare
    v_entries pgqueue.key_backlog[];
    v_id      bigint;
begin
    if p_stream.special then  -- (one check, because nearly all streams need none of these)
        if p_stream.limited then
            perform _pgqueue.check_backlog(p_stream, p_count, p_consumers);
        end if;
        if p_stream.keys_limited then
            v_entries := _pgqueue.check_keys(p_stream, p_seqs, p_consumers, p_key);
        end if;
    end if;
    -- before the publication id: by this lock, consumers distinguish open transactions from dead ones
    if not _pgqueue.try_lock_publish(p_stream.stream_id) then
        perform _pgqueue.lock_publish(p_stream.stream_id);
    end if;
    v_id := nextval(p_stream.publication_numbers);
    if v_id < p_stream.publications_from or lower(p_seqs) < 1 then
        perform _pgqueue.refuse_behind('stream ' || _pgqueue.error_name(p_stream));
    end if;
    insert into pgqueue.publications (publication_id, message_count, published_at, deliver_at, stream_id, priority,
                                      seqs, consumers, expires_at)
    values (v_id, p_count, clock_timestamp(), p_deliver_at, p_stream.stream_id,
            p_priority, p_seqs, p_consumers, p_expires_at);
    if p_stream.special then
        insert into pgqueue.key_backlog
        select e.consumer_id, e.key, e.seq, v_id from unnest(v_entries) e;
        if p_stream.bound and p_consumers is null then
            perform _pgqueue.route(p_stream.stream_id, p_seqs, p_priority, p_deliver_at, p_expires_at);
        end if;
    end if;
    -- after the publish lock: a session that starts to wait relies on it, see queue/claim/listen.sql
    if p_stream.notify and _pgqueue.is_waited_for(p_stream.stream_id) then
        perform pg_notify(_pgqueue.channel(p_stream.stream_id), '');
    end if;
    return p_count;
end $$;

-- Raises the error of the first message that does not fit the stream, with its row number and its key. Errors: PQ003,
-- PQ004.
create or replace function _pgqueue.refuse_written(p_stream pgqueue.streams, p_seqs int8multirange) returns void
language plpgsql as $$
declare
    v_message record;
    v_error   text;
    v_column  text;
    v_detail  text;
    v_hint    text;
begin
    for v_message in
        execute format('select m.*, row_number() over (order by m.seq) as no '
                       'from unnest($1) r cross join lateral ('
                       'select * from pgqueue.messages_%s where seq >= lower(r) and seq < upper(r) offset 0) m '
                       'order by m.seq', p_stream.stream_id) using p_seqs
    loop
        perform _pgqueue.check_payload(p_stream, v_message.data, v_message.data_bytes, v_message.key,
                                       v_message.headers);
    end loop;
exception when sqlstate 'PQ003' or sqlstate 'PQ004' then
    get stacked diagnostics v_error = message_text, v_column = column_name, v_detail = pg_exception_detail,
                            v_hint = pg_exception_hint;
    raise exception '% (row % of % in this write, with %)', v_error, v_message.no,
                    _pgqueue.cardinality(p_seqs),
                    coalesce('key ' || quote_literal(left(v_message.key, 100)), 'no key')
        using errcode = sqlstate, column = v_column,
              detail = coalesce(nullif(v_detail, ''), 'Rows are counted in the order of their numbers.'),
              hint = coalesce(nullif(v_hint, ''), 'None of them was published.');
end $$;

-- Raises unless all these messages, which the caller wrote into the stream's table itself, exist and fit the stream:
-- PQ003 when some are missing, else as check_payload(). No later check is needed: messages are never updated, and a
-- number is assigned once. (The table has no constraint for this: Postgres would parse the constraint again for each
-- statement, and so for each message that is sent alone.)
--   p_digest  compute a digest of the messages
-- Returns the digest.
create or replace function _pgqueue.check_written(p_stream pgqueue.streams, p_seqs int8multirange, p_digest boolean)
returns numeric language plpgsql as $$
declare
    v_written bigint;
    v_fit     boolean;
    v_digest  numeric;
begin
    begin
        execute format('select sum(m.written), bool_and(m.fit), sum(m.digest) from unnest($1) r cross join lateral ('
                       'select count(*) as written, %7$s as digest, '
                       'bool_and(%2$s and octet_length(%3$s) <= %4$s and (octet_length(key) <= %5$s) is not false '
                       'and (headers is null or _pgqueue.headers_fit(headers, %6$s))) as fit '
                       'from pgqueue.messages_%1$s '
                       -- (the bounds of $1 are for the planner)
                       'where seq >= lower(r) and seq < upper(r) and seq >= lower($1) and seq < upper($1)) m',
                       p_stream.stream_id,
                       case when p_stream.kind = 'binary' then 'data is null'
                            when p_stream.kind = 'text' then 'data_bytes is null'
                            when p_stream.schema_path is null then 'data_bytes is null and data::json is not null'
                            else 'data_bytes is null and (data::jsonb @@ $2) is true' end,
                       case p_stream.kind when 'binary' then 'data_bytes' else 'data' end,
                       p_stream.max_bytes, _pgqueue.max_key_bytes(), p_stream.max_header_bytes,
                       case when p_digest
                            then format('sum(hashtextextended(%s, %s) # coalesce(hashtextextended(key, 1), 0) '
                                        '# coalesce(jsonb_hash_extended(headers, 2), 0))',
                                        case p_stream.kind when 'binary' then 'md5(data_bytes)' else 'data' end,
                                        p_stream.stream_id)
                            else 'null::numeric' end)
        into v_written, v_fit, v_digest using p_seqs, p_stream.schema_path;
    exception when invalid_text_representation or untranslatable_character or statement_too_complex
                   or numeric_value_out_of_range or program_limit_exceeded then
        v_fit := false;
    end;
    if not v_fit then
        perform _pgqueue.refuse_written(p_stream, p_seqs);
    elsif v_written <> _pgqueue.cardinality(p_seqs) then
        raise exception 'p_seqs has %, but messages are written for %',
                        _pgqueue.counted(_pgqueue.cardinality(p_seqs), 'number'), v_written
            using errcode = 'PQ003', column = 'p_seqs', hint = 'Write a message for each number first.';
    end if;
    return v_digest;
end $$;

-- Assigns new numbers of a stream, ascending. Numbers of a large call are nearly always one range: other large calls
-- wait for it, because concurrent calls would interleave their numbers. Numbers of single messages and of copies by a
-- binding (route()) may be in between, and those of a call that has waited for a second, the time that some 2 million
-- numbers take. Locks: the numbers of the stream, until it returns.
create or replace function _pgqueue.take_seqs(p_stream_id int, p_count int) returns bigint[]
language plpgsql as $$
declare
    v_names regclass := ('pgqueue.seq_' || p_stream_id)::regclass;
    v_seqs  bigint[];
begin
    if p_count >= _pgqueue.limit_unlocked_seqs() then
        begin
            perform _pgqueue.lock_seqs(p_stream_id);
            -- in the select list, generate_series returns its rows one by one; in FROM it would store them first
            v_seqs := array(select nextval(v_names) from (select generate_series(1, p_count)) i);
            raise exception using errcode = 'PQ099';
        exception when sqlstate 'PQ099' then
            return v_seqs;  -- the exception releases the lock: the transaction may take long. Numbers stay assigned
        end;
    end if;
    return array(select nextval(v_names) from (select generate_series(1, p_count)) i);
end $$;

-- Numbers of one take_seqs(), as a set: nearly always one range. (In SQL, so that it is inlined into the caller's
-- expression.)
create or replace function _pgqueue.set_of_taken(p_seqs bigint[]) returns int8multirange
language sql immutable as $$
    select case when p_seqs[cardinality(p_seqs)] - p_seqs[1] = cardinality(p_seqs) - 1
                then int8multirange(int8range(p_seqs[1], p_seqs[1] + cardinality(p_seqs)))
                else _pgqueue.set_of(p_seqs) end
$$;
