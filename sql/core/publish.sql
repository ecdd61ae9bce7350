-- Publishing: one row says that messages are visible. Nothing is written per consumer.

-- Makes messages visible: the last step of whoever publishes a statement's messages.
--   p_key  see _check_keys
-- Returns the publication id. Locks: the publish lock, shared (notify takes its global lock at commit).
create or replace function pgqueue._publish(p_stream pgqueue.streams, p_seqs int8multirange, p_count bigint, p_priority int,
                                            p_deliver_at timestamptz, p_consumers int[], p_expires_at timestamptz default null,
                                            p_key text[] default null) returns bigint
language plpgsql
as $$
declare
    v_id      bigint;
    v_entries pgqueue.key_backlog[];
begin
    if p_stream.limited then
        perform pgqueue._check_room(p_stream, p_count, p_consumers);
    end if;
    if p_stream.keys_limited then
        v_entries := pgqueue._check_keys(p_stream, p_seqs, p_consumers, p_key);
    end if;
    -- before the publication id: consumers rely on it to tell running from dead
    if not pgqueue._try_lock_publish(p_stream.stream_id) then
        perform pgqueue._lock_publish(p_stream.stream_id);
    end if;
    v_id := nextval(('pgqueue.publication_' || p_stream.stream_id)::regclass);
    insert into pgqueue.publications (publication_id, message_count, published_at, deliver_at, stream_id, priority, seqs, consumers, expires_at)
    values (v_id, p_count, clock_timestamp(), p_deliver_at, p_stream.stream_id, p_priority, p_seqs, p_consumers, p_expires_at);
    if v_entries is not null then
        insert into pgqueue.key_backlog select e.consumer_id, e.key, e.seq, v_id from unnest(v_entries) e;
    end if;
    if p_stream.bound and p_consumers is null then
        perform pgqueue._route(p_stream.stream_id, p_seqs, p_priority, p_deliver_at, p_expires_at);
    end if;
    -- after the publish lock: whoever begins to wait relies on it, see functions/waiting.sql
    if p_stream.notify and pgqueue._is_waited_for(p_stream.stream_id) then
        perform pg_notify(pgqueue._channel(p_stream.stream_id), '');
    end if;
    return v_id;
end $$;

-- Raises unless all these messages, which the caller wrote into the stream's table itself, are there and such as the stream takes: PQ003
-- when some are missing, else as _check_payload. They stay as they are: nobody updates messages, and a number is taken once.
-- (The table has no check for that: Postgres would read the check's text anew for each statement, and so for each message that is sent alone.)
create or replace function pgqueue._check_written(p_stream pgqueue.streams, p_seqs int8multirange) returns void
language plpgsql
as $$
declare
    v_written bigint;
    v_fit     boolean;
begin
    begin
        execute format('select sum(m.written), bool_and(m.fit) from unnest($1) r cross join lateral ('
                       'select count(*) as written, bool_and(%2$s and octet_length(%3$s) <= %4$s and (octet_length(key) <= %5$s) is not false '
                       'and (headers is null or pgqueue._headers_fit(headers, %6$s))) as fit '
                       'from pgqueue.messages_%1$s where seq >= lower(r) and seq < upper(r) and seq >= %7$s and seq < %8$s) m',  -- for the planner
                       p_stream.stream_id,
                       case p_stream.kind when 'binary' then 'data is null' when 'json' then 'data_bytes is null and data::json is not null' else 'data_bytes is null' end,
                       case p_stream.kind when 'binary' then 'data_bytes' else 'data' end,
                       p_stream.max_bytes, pgqueue._max_key_bytes(), p_stream.max_header_bytes, lower(p_seqs), upper(p_seqs))
        into v_written, v_fit using p_seqs;
    exception when invalid_text_representation or untranslatable_character then
        v_fit := false;
    end;
    if not v_fit then  -- which one, and why
        execute format('select count(pgqueue._check_payload($1, m.data, m.data_bytes, m.key, m.headers)) from unnest($2) r cross join lateral ('
                       'select * from pgqueue.messages_%s where seq >= lower(r) and seq < upper(r) offset 0) m', p_stream.stream_id)
        using p_stream, p_seqs;
    elsif v_written <> pgqueue._cardinality(p_seqs) then
        raise exception 'p_seqs has % numbers, of which % messages are written', pgqueue._cardinality(p_seqs), v_written
            using errcode = 'PQ003', column = 'p_seqs', hint = 'Write a message for each of them first.';
    end if;
end $$;

-- Gives out new numbers of a stream, ascending. Those of many are nearly always one range: who takes many lets others who do wait, who would
-- else get every second number. What is sent alone or copied by a binding (_route) comes in between; and so does who had to wait for a second,
-- which is how long some 2 million take.
-- Locks: the numbers of the stream, until it returns.
create or replace function pgqueue._take_seqs(p_stream_id int, p_count int) returns bigint[]
language plpgsql
as $$
declare
    v_names regclass := ('pgqueue.seq_' || p_stream_id)::regclass;
    v_seqs  bigint[];
begin
    if p_count >= pgqueue._limit_unlocked_seqs() then
        begin
            perform pgqueue._lock_seqs(p_stream_id);
            -- in the select list, generate_series gives its rows one by one; as a table it would store them first
            v_seqs := array(select nextval(v_names) from (select generate_series(1, p_count)) i);
            raise exception using errcode = 'PQ099';
        exception when sqlstate 'PQ099' then
            return v_seqs;  -- and the lock is let go: the transaction may take long. Numbers are not given back
        end;
    end if;
    return array(select nextval(v_names) from (select generate_series(1, p_count)) i);
end $$;

-- Numbers that were given out together, as a set: nearly always one range. (In SQL, so that it becomes a part of the caller's expression.)
create or replace function pgqueue._set_of_taken(p_seqs bigint[]) returns int8multirange
language sql immutable
as $$
    select case when p_seqs[cardinality(p_seqs)] - p_seqs[1] = cardinality(p_seqs) - 1
                then int8multirange(int8range(p_seqs[1], p_seqs[cardinality(p_seqs)], '[]')) else pgqueue._set_of(p_seqs) end
$$;
