-- What an argument may be. Each raises before anything is changed, and names the argument.

-- Raises PQ007 unless each statement sees what was committed before it: claims and settlements decide by what they see
-- after they have a lock.
create or replace function pgqueue._check_isolation() returns void
language plpgsql stable
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claims and settlements need transaction isolation read committed, not %', current_setting('transaction_isolation')
            using errcode = 'PQ007', hint = 'begin transaction isolation level read committed';
    end if;
end $$;

-- Raises PQ003 unless the name of a stream or consumer has 1 to 200 characters.
create or replace function pgqueue._check_name(p_what text, p_name text) returns void
language plpgsql immutable
as $$
begin
    if p_name is null or length(p_name) not between 1 and 200 or p_name <> btrim(p_name) then
        raise exception 'the name of a % is 1 to 200 characters without spaces around, not %', p_what,
                        coalesce(quote_literal(left(p_name, 210)), 'null') using errcode = 'PQ003', column = 'p_name';
    end if;
end $$;

-- Raises PQ003 unless the interval is longer than nothing.
create or replace function pgqueue._check_timeout(p_argument text, p_value interval) returns void
language plpgsql immutable
as $$
begin
    if p_value is null or p_value <= interval '0' or p_value > pgqueue._max_interval() then
        raise exception '% is an interval longer than 0 and up to 10 years, not %', p_argument, coalesce(quote_literal(p_value), 'null')
            using errcode = 'PQ003', column = p_argument;
    end if;
end $$;

-- Raises PQ003 for a priority or time that cannot be.
create or replace function pgqueue._check_publication(p_priority int, p_deliver_at timestamptz) returns void
language plpgsql immutable
as $$
begin
    if p_priority is null or p_priority not between -32768 and 32767 then
        raise exception 'p_priority is -32768 to 32767, not %', coalesce(p_priority::text, 'null') using errcode = 'PQ003', column = 'p_priority';
    elsif not isfinite(p_deliver_at) then
        raise exception 'p_deliver_at is a time, not %', p_deliver_at using errcode = 'PQ003', column = 'p_deliver_at';
    end if;
end $$;

-- Raises PQ003 for a key that is too long: keys are indexed.
create or replace function pgqueue._refuse_key(p_key text) returns text
language plpgsql
as $$
begin
    raise exception 'p_key, or one of p_keys, is longer than 1,024 bytes: % (%...)', octet_length(p_key), quote_literal(left(p_key, 50)) using errcode = 'PQ003', column = 'p_key, p_keys';
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
        raise exception 'p_headers is a JSON object or null, not %', left(p_headers::text, 100) using errcode = 'PQ003', column = 'p_headers';
    elsif octet_length(p_key) > pgqueue._max_key_bytes() then
        perform pgqueue._refuse_key(p_key);
    end if;
    if p_stream.kind = 'binary' then
        if p_data_bytes is null or p_data is not null then
            raise exception 'a message of stream % (binary) has p_data_bytes, and p_data is null', quote_literal(p_stream.name)
                using errcode = 'PQ004', column = 'p_data_bytes, p_data';
        end if;
        return;
    end if;
    if p_data is null or p_data_bytes is not null then
        raise exception 'a message of stream % (%) has p_data, not null, and p_data_bytes is null', quote_literal(p_stream.name), p_stream.kind
            using errcode = 'PQ004', column = 'p_data, p_data_bytes';
    end if;
    if p_stream.kind = 'json' then
        perform p_data::json;
    end if;
exception when invalid_text_representation or untranslatable_character then
    raise exception 'a message of stream % (json) is not valid JSON: %', quote_literal(p_stream.name), left(p_data, 100)
        using errcode = 'PQ004', detail = sqlerrm;
end $$;

-- Raises PQ003 for an offset that cannot be.
create or replace function pgqueue._check_offset(p_reader uuid, p_claim bigint, p_messages bigint) returns void
language plpgsql immutable
as $$
begin
    if p_reader is null or (p_claim >= 0 and p_messages >= 0) is not true then
        raise exception 'p_reader is not null, and p_start_claim, p_end_claim and p_start_messages are at least 0; not %, %, %',
                        coalesce(p_reader::text, 'null'), coalesce(p_claim::text, 'null'), coalesce(p_messages::text, 'null')
            using errcode = 'PQ003', column = 'p_reader, p_start_claim, p_end_claim, p_start_messages';
    end if;
end $$;

-- Raises PQ003 for a batch that cannot be.
create or replace function pgqueue._check_batch(p_sink text, p_batch bigint) returns void
language plpgsql immutable
as $$
begin
    if p_sink is null or (p_batch >= 0) is not true then
        raise exception 'p_sink is not null and p_batch at least 0, not % and %',
                        coalesce(quote_literal(p_sink), 'null'), coalesce(p_batch::text, 'null') using errcode = 'PQ003', column = 'p_sink, p_batch';
    end if;
end $$;
