-- Sending: publishing one message, or several together.

-- Publishes a message to a stream, in the caller's transaction, and returns its number.
-- Postgres cannot prepare a transaction that has notified. So with two-phase commit, a transaction can send only to
-- streams whose setting notify is false.
--   p_data        the payload of a text or json stream, p_data_bytes that of a binary stream; at most the stream's
--                 max_bytes
--   p_key         the key for ordering=key, up to 1,024 bytes; null: not ordered
--   p_headers     a JSON object of at most the stream's max_header_bytes and 100 levels, or null
--   p_priority    -32768 to 32767, for consumers with ordering=none: messages with a higher priority come first
--   p_deliver_at  the message is not delivered before this time; null: it is delivered at once
--   p_consumers   the names of the consumers that get the message; null: all
--   p_expires_at  the message is not delivered from this time on, rounded up to the second: a claim that finds it makes
--                 it a dead letter with reason expired. Null: it never expires
--   p_dedup_key   1 to 1,024 bytes: the message is not published if one with this key was sent within the stream's
--                 dedup_window; null: it is always published
-- Returns its seq, or the seq of the first message with this dedup key. Errors: PQ001, PQ002, PQ003, PQ004, PQ011,
-- PQ013. Locks: the publish lock, shared; the dedup key: a transaction that sends the same key waits for this
-- transaction.
create or replace function pgqueue.send(p_stream text, p_data text, p_key text default null,
                                        p_headers jsonb default null, p_priority int default 0,
                                        p_deliver_at timestamptz default null, p_consumers text[] default null,
                                        p_data_bytes bytea default null, p_dedup_key text default null,
                                        p_expires_at timestamptz default null) returns bigint
language plpgsql as $$
declare
    v_stream    pgqueue.streams;
    v_seq       bigint;
    v_first     bigint;
    v_count     bigint;
    v_headers   boolean;  -- they need the full check
    v_expires   timestamptz;
    v_consumers int[];
begin
    v_stream := s from pgqueue.streams s where s.name = p_stream;
    if v_stream.stream_id is null then
        v_stream := _pgqueue.stream(p_stream);  -- raises, unless the stream was created meanwhile
    end if;
    -- (one check for what most messages do not have: PL/pgSQL prepares each expression again for each message)
    if p_priority is distinct from 0 or p_headers is not null or p_deliver_at is not null or p_consumers is not null
       or p_expires_at is not null then
        perform _pgqueue.check_publication(p_priority, p_deliver_at, p_expires_at);
        v_headers := jsonb_typeof(p_headers) <> 'object'
            or octet_length(p_headers::text) > least(v_stream.max_header_bytes, _pgqueue.short_headers());
        v_expires := _pgqueue.round_up_to_second(p_expires_at);
        v_consumers := _pgqueue.consumer_ids(v_stream.stream_id, p_consumers);
    end if;
    if v_stream.kind <> 'text' or p_data is null or p_data_bytes is not null or v_headers
       or octet_length(p_key) > _pgqueue.max_key_bytes() or octet_length(p_data) > v_stream.max_bytes then
        perform _pgqueue.check_payload(v_stream, p_data, p_data_bytes, p_key, p_headers);
    end if;
    v_seq := nextval(v_stream.message_numbers);
    if p_dedup_key is not null then
        v_first := _pgqueue.take_dedup_key(v_stream, p_dedup_key, v_seq);
        if v_first <> v_seq then
            return v_first;
        end if;
    end if;
    insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
    values (v_seq, v_stream.stream_id, p_key, p_data, p_data_bytes, p_headers);
    -- an assignment is evaluated without a statement, unlike perform
    v_count := _pgqueue.publish(v_stream, int8multirange(int8range(v_seq, v_seq, '[]')), 1, p_priority, p_deliver_at,
                                v_consumers, v_expires, array[p_key]);
    return v_seq;
end $$;

-- Publishes messages together, in the order given, and returns their numbers.
-- They become visible at once, when the caller's transaction commits.
--   p_data, p_keys, p_headers, p_data_bytes  arrays of the same length, or null
--   p_dedup_keys  one per message, null for a message without, or null for all; of messages with the same key in this
--                 call, the first is published
--   the rest      as in send
-- Returns their seqs in that order; for a duplicate, the seq of the first message. Errors: PQ001, PQ002, PQ003, PQ004,
-- PQ013. Locks and two-phase commit: as send; for many messages also the numbers of the stream, for a moment.
-- (More than 60 lines: the checks of its arrays are most of it.)
create or replace function pgqueue.send_batch(p_stream text, p_data text[], p_keys text[] default null,
                                              p_headers jsonb[] default null, p_priority int default 0,
                                              p_deliver_at timestamptz default null, p_consumers text[] default null,
                                              p_data_bytes bytea[] default null, p_dedup_keys text[] default null,
                                              p_expires_at timestamptz default null) returns setof bigint
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_count  int := coalesce(cardinality(p_data), cardinality(p_data_bytes));
    v_id     int := v_stream.stream_id;  -- read once, not for each message
    v_taken  bigint[];
    v_seqs   int8multirange;
    v_first  bigint[];
    v_ids    int[] := _pgqueue.consumer_ids(v_stream.stream_id, p_consumers);
begin
    perform _pgqueue.check_publication(p_priority, p_deliver_at, p_expires_at);
    if v_count is null then
        raise exception 'p_data must not be null'
            using errcode = 'PQ003', column = 'p_data', hint = 'Pass an array of payloads.';
    end if;
    if greatest(array_ndims(p_data), array_ndims(p_keys), array_ndims(p_headers), array_ndims(p_data_bytes),
                array_ndims(p_dedup_keys)) > 1 then
        raise exception 'p_data, p_keys, p_headers, p_data_bytes and p_dedup_keys must have one dimension'
            using errcode = 'PQ003', column = 'p_data, p_keys, p_headers, p_data_bytes, p_dedup_keys';
    end if;
    if cardinality(p_keys) <> v_count or cardinality(p_headers) <> v_count or cardinality(p_data_bytes) <> v_count
       or cardinality(p_dedup_keys) <> v_count then
        raise exception 'p_keys, p_headers, p_data_bytes and p_dedup_keys must have one element per message or be '
                        'null: %, %, %, %, %',
            _pgqueue.counted(v_count, 'message'),
            coalesce(_pgqueue.counted(cardinality(p_keys), 'key'), 'no keys'),
            coalesce(_pgqueue.counted(cardinality(p_headers), 'header'), 'no headers'),
            coalesce(_pgqueue.counted(cardinality(p_data_bytes), 'binary payload'), 'no binary payloads'),
            coalesce(_pgqueue.counted(cardinality(p_dedup_keys), 'dedup key'), 'no dedup keys')
            using errcode = 'PQ003', column = 'p_keys, p_headers, p_data_bytes, p_dedup_keys';
    end if;
    if v_count = 0 then
        return;
    end if;
    if v_stream.kind <> 'text' or array_position(p_data, null) is not null or p_data_bytes is not null
        or p_headers is not null then
        perform _pgqueue.check_payload(v_stream, m.data, m.data_bytes, m.key, m.headers)
        from unnest(p_data, p_data_bytes, p_keys, p_headers) m (data, data_bytes, key, headers);
    end if;
    v_taken := _pgqueue.take_seqs(v_id, v_count);
    insert into pgqueue.messages (seq, stream_id, key, data, data_bytes, headers)
    select m.seq, v_id,
           case when octet_length(m.key) > _pgqueue.max_key_bytes() then _pgqueue.refuse_key(m.key) else m.key end,
           case when octet_length(m.data) > v_stream.max_bytes then _pgqueue.refuse_size(v_stream, octet_length(m.data))
                else m.data end,
           m.data_bytes, m.headers
    from (select unnest(v_taken) as seq, unnest(p_keys) as key, unnest(p_data) as data,
                 unnest(p_data_bytes) as data_bytes, unnest(p_headers) as headers) m;
    v_seqs := _pgqueue.set_of_taken(v_taken);
    if p_dedup_keys is not null then
        select * into v_seqs, v_first from _pgqueue.delete_duplicates(v_stream, v_seqs, p_dedup_keys);
        v_count := _pgqueue.cardinality(v_seqs);
    end if;
    if v_count > 0 then
        perform _pgqueue.publish(v_stream, v_seqs, v_count, p_priority, p_deliver_at, v_ids,
                                 _pgqueue.round_up_to_second(p_expires_at));
    end if;
    return query select unnest(coalesce(v_first, v_taken));
end $$;

-- Returns the server of a key, where a stream is on several servers: a number from 0 to p_servers - 1.
-- It is the first four bytes of the SHA-256 of the key in UTF-8, as an unsigned number, modulo p_servers. Spark and
-- clients in other languages compute the same number.
--   p_key      null: the message has no key, and can be sent to any server
--   p_servers  the number of servers, at least 1
-- Returns null for no key. Errors: PQ003. Locks: none.
create or replace function pgqueue.server_of(p_key text, p_servers int) returns int
language plpgsql immutable parallel safe as $$
begin
    perform _pgqueue.check_number('p_servers', p_servers, 1, 2147483647);
    return ('x' || encode(substr(sha256(convert_to(p_key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint % p_servers;
end $$;
