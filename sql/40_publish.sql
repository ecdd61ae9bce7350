-- Publishing: the messages, and one row that says they are visible. Nothing is written per consumer.

-- Makes messages visible: the last step of send and send_batch.
-- Returns the publication id. Locks: none that another producer needs (notify takes its global lock at commit).
create or replace function pgqueue._publish(p_stream pgqueue.streams, p_seqs int8multirange, p_n bigint, p_priority int,
                                            p_deliver_at timestamptz, p_consumers int[]) returns bigint
language plpgsql
as $$
declare
    v_id bigint;
begin
    perform pg_current_xact_id();  -- before the publication id: consumers rely on it to tell running from dead
    v_id := nextval(format('pgqueue.publication_%s', p_stream.stream_id)::regclass);
    insert into pgqueue.publications (publication_id, n, published_at, deliver_at, stream_id, priority, seqs, consumers)
    values (v_id, p_n, clock_timestamp(), p_deliver_at, p_stream.stream_id, p_priority, p_seqs, p_consumers);
    if p_stream.notify then
        perform pg_notify('pgqueue_' || p_stream.stream_id, '');
    end if;
    return v_id;
end $$;

-- Raises PQ003 for a priority or time that cannot be.
create or replace function pgqueue._check_publication(p_priority int, p_deliver_at timestamptz) returns void
language plpgsql immutable
as $$
begin
    if p_priority is null or p_priority not between -32768 and 32767 then
        raise exception 'p_priority is -32768 to 32767, not %', coalesce(p_priority::text, 'null') using errcode = 'PQ003';
    elsif not isfinite(p_deliver_at) then
        raise exception 'p_deliver_at is a time, not %', p_deliver_at using errcode = 'PQ003';
    end if;
end $$;

-- Raises PQ003 for a key that is too long: keys are indexed.
create or replace function pgqueue._refuse_key(p_key text) returns text
language plpgsql
as $$
begin
    raise exception 'p_key, or one of p_keys, is longer than 1,024 bytes: % (%...)', octet_length(p_key), quote_literal(left(p_key, 50)) using errcode = 'PQ003';
end $$;

-- Raises PQ004 unless the payload is one for the stream's kind, and PQ003 for other headers than an object and for a key
-- that is too long. The partition checks it too, for whoever writes there
-- directly; this one names the stream. (No exception block around the insert: a subtransaction with an id for every
-- message would slow down every snapshot of the server.)
create or replace function pgqueue._check_payload(p_stream pgqueue.streams, p_data text, p_data_bytes bytea, p_key text, p_headers jsonb)
returns void
language plpgsql immutable
as $$
begin
    if jsonb_typeof(p_headers) <> 'object' then
        raise exception 'p_headers is a JSON object or null, not %', left(p_headers::text, 100) using errcode = 'PQ003';
    elsif octet_length(p_key) > 1024 then
        perform pgqueue._refuse_key(p_key);
    end if;
    if p_stream.kind = 'binary' then
        if p_data_bytes is null or p_data is not null then
            raise exception 'a message of stream % (binary) has p_data_bytes, and p_data is null', quote_literal(p_stream.name)
                using errcode = 'PQ004';
        end if;
        return;
    end if;
    if p_data is null or p_data_bytes is not null then
        raise exception 'a message of stream % (%) has p_data, not null, and p_data_bytes is null', quote_literal(p_stream.name), p_stream.kind
            using errcode = 'PQ004';
    end if;
    if p_stream.kind = 'json' then
        perform p_data::json;
    end if;
exception when invalid_text_representation or untranslatable_character then
    raise exception 'a message of stream % (json) is not valid JSON: %', quote_literal(p_stream.name), left(p_data, 100)
        using errcode = 'PQ004', detail = sqlerrm;
end $$;

-- Publishes a message, in the caller's transaction.
--   p_data        the payload of a text or json stream; p_data_bytes that of a binary one
--   p_key         what ordering=key goes by, up to 1,024 bytes; null: in no order with others
--   p_headers     a JSON object, or null
--   p_priority    -32768 to 32767, higher is earlier; consumers with ordering=none go by it
--   p_deliver_at  not before; null: at once
--   p_consumers   to these only; null: to all
-- Returns its seq. Errors: PQ001, PQ002, PQ003, PQ004. Locks: none that another producer needs.
create or replace function pgqueue.send(
    p_stream text, p_data text, p_key text default null, p_headers jsonb default null, p_priority int default 0,
    p_deliver_at timestamptz default null, p_consumers text[] default null, p_data_bytes bytea default null)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_stream pgqueue.streams;
    v_seq    bigint;
begin
    select * into v_stream from pgqueue.streams where name = p_stream;
    if not found then
        perform pgqueue._stream(p_stream);
    end if;
    if p_priority is distinct from 0 or p_deliver_at is not null then
        perform pgqueue._check_publication(p_priority, p_deliver_at);
    end if;
    if v_stream.kind <> 'text' or p_data is null or p_data_bytes is not null or octet_length(p_key) > 1024
       or jsonb_typeof(p_headers) <> 'object' then
        perform pgqueue._check_payload(v_stream, p_data, p_data_bytes, p_key, p_headers);
    end if;
    insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
    values (nextval(format('pgqueue.seq_%s', v_stream.stream_id)::regclass), v_stream.stream_id, p_key, p_data, p_data_bytes, p_headers)
    returning seq into v_seq;
    perform pgqueue._publish(v_stream, int8multirange(int8range(v_seq, v_seq, '[]')), 1, p_priority, p_deliver_at,
                             case when p_consumers is not null then pgqueue._consumer_ids(v_stream.stream_id, p_consumers) end);
    return v_seq;
end $$;

-- Publishes messages together, in the caller's transaction: they become visible at once, in the order given.
--   p_data, p_keys, p_headers, p_data_bytes  of one length, or null
--   the rest as in send
-- Returns their seqs in that order. Errors: PQ001, PQ002, PQ003, PQ004. Locks: none that another producer needs.
create or replace function pgqueue.send_batch(
    p_stream text, p_data text[], p_keys text[] default null, p_headers jsonb[] default null, p_priority int default 0,
    p_deliver_at timestamptz default null, p_consumers text[] default null, p_data_bytes bytea[] default null)
returns setof bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan  -- a custom plan would hold the arrays as constants
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_n      int := coalesce(cardinality(p_data), cardinality(p_data_bytes));
    v_id     int := v_stream.stream_id;  -- these two are looked up once, not for each message
    v_names  regclass := format('pgqueue.seq_%s', v_stream.stream_id);
    v_before bigint;  -- the last number given out before
    v_last   bigint;
    v_seqs   bigint[];
    v_ids    int[] := pgqueue._consumer_ids(v_stream.stream_id, p_consumers);
begin
    perform pgqueue._check_publication(p_priority, p_deliver_at);
    if v_n is null then
        raise exception 'p_data is null' using errcode = 'PQ003', hint = 'Give an array of payloads.';
    end if;
    if greatest(array_ndims(p_data), array_ndims(p_keys), array_ndims(p_headers), array_ndims(p_data_bytes)) > 1 then
        raise exception 'p_data, p_keys, p_headers and p_data_bytes have one dimension' using errcode = 'PQ003';
    end if;
    if cardinality(p_keys) <> v_n or cardinality(p_headers) <> v_n or cardinality(p_data_bytes) <> v_n then
        raise exception 'p_keys, p_headers and p_data_bytes have one element per message or are null: % messages, % keys, % headers, % bytes',
                        v_n, cardinality(p_keys), cardinality(p_headers), cardinality(p_data_bytes) using errcode = 'PQ003';
    end if;
    if v_n = 0 then
        return;
    end if;
    if v_stream.kind <> 'text' or array_position(p_data, null) is not null or p_data_bytes is not null or p_headers is not null then
        perform pgqueue._check_payload(v_stream, m.data, m.data_bytes, m.key, m.headers)
        from unnest(p_data, p_data_bytes, p_keys, p_headers) m (data, data_bytes, key, headers);
    end if;
    v_before := coalesce(pg_sequence_last_value(v_names), 0);
    insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
    select nextval(v_names), v_id, case when octet_length(m.key) > 1024 then pgqueue._refuse_key(m.key) else m.key end,
           m.data, m.data_bytes, m.headers
    from (select unnest(p_keys) as key, unnest(p_data) as data, unnest(p_data_bytes) as data_bytes, unnest(p_headers) as headers) m;
    v_last := currval(v_names);
    if v_last - v_before = v_n then
        perform pgqueue._publish(v_stream, int8multirange(int8range(v_before + 1, v_last, '[]')), v_n, p_priority, p_deliver_at, v_ids);
        return query select generate_series(v_before + 1, v_last);
        return;
    end if;
    -- another producer took numbers in between: this statement's are those whose rows have the same xmin as the last one
    execute format('select array_agg(seq order by seq) from pgqueue.messages_%1$s where seq > $1 and seq <= $2 '
                   'and xmin = (select xmin from pgqueue.messages_%1$s where seq = $2)', v_stream.stream_id)
    into v_seqs using v_before, v_last;
    perform pgqueue._publish(v_stream, pgqueue._set_of(v_seqs), v_n, p_priority, p_deliver_at, v_ids);
    return query select unnest(v_seqs);
end $$;
