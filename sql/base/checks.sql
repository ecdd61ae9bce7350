-- Checks of arguments: each raises before anything is changed, and names the argument. And checks of the server.

-- Raises PQ006 when a call does not support this kind of consumer. Returns the consumer.
--   p_call  as of begin_claim() (queue/claim/begin.sql)
create or replace function _pgqueue.check_kind(p_call text, p_consumer pgqueue.consumers) returns pgqueue.consumers
language plpgsql as $$
begin
    if p_call = 'group' and p_consumer.partitions is null then
        raise exception 'consumer % of stream % is not a group: its messages are claimed, not read by partition',
            quote_literal(p_consumer.name), quote_literal(p_consumer.stream_name)
            using errcode = 'PQ006', hint = 'Use receive, or create_group with another name.';
    elsif p_call <> 'group' and p_consumer.partitions is not null then
        raise exception '% is a group: its messages are read by partition, not claimed',
            quote_literal(p_consumer.name)
            using errcode = 'PQ006',
                  hint = 'Use lease_partitions and read_partitions, or create_consumer with another name.';
    elsif p_call = 'where' and _pgqueue.is_keyed(p_consumer.profile) then
        raise exception '% delivers by key (an ordering, fair, per_key_limit or per_key_interval), so a condition '
                        'cannot select its messages', quote_literal(p_consumer.name)
            using errcode = 'PQ006',
                  hint = 'Receive with a condition from a consumer with ordering=none, '
                         'or create a consumer with a filter.';
    elsif p_call = 'reader' and _pgqueue.limits_keys(p_consumer) then
        raise exception '% has per-key limits (fair, per_key_limit or per_key_interval), which Spark queries do not '
                        'support', quote_literal(p_consumer.name)
            using errcode = 'PQ006', hint = 'Read another consumer, or remove the limits with alter_consumer.';
    end if;
    return p_consumer;
end $$;

-- Raises PQ007 unless each statement has a new snapshot. Claims and settlements depend on the rows that they read after
-- they have a lock.
create or replace function _pgqueue.check_isolation() returns void
language plpgsql stable as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claiming and settling require transaction isolation read committed, not %',
                        current_setting('transaction_isolation')
            using errcode = 'PQ007', hint = 'Use "begin transaction isolation level read committed", or set the '
                'default: alter role ... set default_transaction_isolation to ''read committed''.';
    end if;
end $$;

-- Raises PQ003 unless a name of a stream or consumer has 1 to 200 characters.
create or replace function _pgqueue.check_name(p_what text, p_name text) returns void
language plpgsql immutable as $$
begin
    if p_name is null or length(p_name) not between 1 and 200 or p_name <> btrim(p_name) then
        raise exception 'the name of a % must be 1 to 200 characters without spaces around it, not %', p_what,
                        coalesce(quote_literal(left(p_name, 210)), 'null') using errcode = 'PQ003', column = 'p_name';
    end if;
end $$;

-- Raises PQ003 unless a number is within its bounds.
create or replace function _pgqueue.check_number(p_argument text, p_value bigint, p_least bigint, p_most bigint)
returns void language plpgsql immutable as $$
begin
    if (p_value between p_least and p_most) is not true then
        raise exception '% must be % to %, not %', p_argument, p_least, p_most, coalesce(p_value::text, 'null')
            using errcode = 'PQ003', column = p_argument;
    end if;
end $$;

-- Raises PQ003 for a number below 1. Null means no limit.
create or replace function _pgqueue.check_positive(p_argument text, p_value bigint) returns void
language plpgsql immutable as $$
begin
    if p_value < 1 then
        raise exception '% must be null or at least 1, not %', p_argument, p_value
            using errcode = 'PQ003', column = p_argument;
    end if;
end $$;

-- Values as a list in a sentence: a, b or c.
create or replace function _pgqueue.any_of(p_values text[]) returns text
language sql immutable as $$ select regexp_replace(array_to_string(p_values, ', '), ', ([^,]*)$', E' or \\1') $$;

-- A number with its noun: 1 message, 2 messages. Null for null.
create or replace function _pgqueue.counted(p_count bigint, p_noun text) returns text
language sql immutable parallel safe as $$
    select p_count || ' ' || p_noun || case p_count when 1 then '' else 's' end
$$;

-- Raises PQ003 unless a word is one of some words.
create or replace function _pgqueue.check_choice(p_argument text, p_value text, p_choices text[]) returns void
language plpgsql immutable as $$
begin
    if p_value is null or p_value <> all (p_choices) then
        raise exception '% must be %, not %', p_argument, _pgqueue.any_of(p_choices),
                        coalesce(quote_literal(p_value), 'null') using errcode = 'PQ003', column = p_argument;
    end if;
end $$;

-- Rejects a visibility timeout that is out of range. Errors: PQ003 unless the interval is longer than 0 and up to 10
-- years.
create or replace function pgqueue.check_timeout(p_argument text, p_value interval) returns void
language plpgsql immutable as $$
begin
    if (p_value > interval '0' and p_value <= _pgqueue.max_interval()) is not true then
        raise exception '% must be an interval longer than 0 and up to 10 years, not %', p_argument,
                        coalesce(quote_literal(p_value), 'null') using errcode = 'PQ003', column = p_argument;
    end if;
end $$;

-- Raises PQ007, or PQ003 for invalid arguments of a claim.
--   p_call  as of begin_claim() (queue/claim/begin.sql): a reader may claim all messages, a group has a limit
--   p_visibility_timeout  null: the consumer's
create or replace function _pgqueue.check_claim(p_call text, p_max bigint, p_visibility_timeout interval)
returns void language plpgsql stable as $$
begin
    perform _pgqueue.check_isolation();
    if p_call = 'group' then
        perform _pgqueue.check_number('p_max', p_max, 1, 1000000);
    elsif p_max < 1 or (p_max is null and p_call <> 'reader') then
        raise exception 'p_max must be %at least 1, not %', case p_call when 'reader' then 'null or ' else '' end,
                        coalesce(p_max::text, 'null') using errcode = 'PQ003', column = 'p_max';
    end if;
    if p_visibility_timeout is not null then
        perform pgqueue.check_timeout('p_visibility_timeout', p_visibility_timeout);
    end if;
end $$;

-- Raises PQ003 for an invalid priority or time.
create or replace function _pgqueue.check_publication(p_priority int, p_deliver_at timestamptz,
                                                      p_expires_at timestamptz default null) returns void
language plpgsql immutable as $$
begin
    perform _pgqueue.check_number('p_priority', p_priority, -32768, 32767);
    if not isfinite(p_deliver_at) then
        raise exception 'p_deliver_at must be a finite time, not %',
                        p_deliver_at using errcode = 'PQ003', column = 'p_deliver_at';
    elsif not isfinite(p_expires_at) or p_expires_at <= p_deliver_at then
        raise exception 'p_expires_at must be a finite time%, not %',
                        coalesce(' after p_deliver_at, ' || p_deliver_at, ''),
                        p_expires_at
            using errcode = 'PQ003',
                  column = case when p_deliver_at is null then 'p_expires_at' else 'p_expires_at, p_deliver_at' end;
    end if;
end $$;

-- A time, rounded up to the second, so that messages that are sent within a second expire together.
create or replace function _pgqueue.round_up_to_second(p_at timestamptz) returns timestamptz
language sql immutable parallel safe as $$ select date_trunc('second', p_at + interval '999999 us') $$;

-- Raises PQ003: a key is too long for an index.
create or replace function _pgqueue.refuse_key(p_key text) returns text
language plpgsql as $$
begin
    raise exception 'p_key, or one of p_keys, is longer than 1,024 bytes: % (%...)', octet_length(p_key),
                    quote_literal(left(p_key, 50)) using errcode = 'PQ003', column = 'p_key, p_keys';
end $$;

-- Raises PQ004: a payload is too long for its stream.
create or replace function _pgqueue.refuse_size(p_stream pgqueue.streams, p_bytes int) returns text
language plpgsql as $$
begin
    raise exception 'a message of stream % must have at most %, not %', _pgqueue.error_name(p_stream),
                    _pgqueue.counted(p_stream.max_bytes, 'byte'), p_bytes
        using errcode = 'PQ004', column = case p_stream.kind when 'binary' then 'p_data_bytes' else 'p_data' end,
              hint = 'Send a reference to the payload, or raise max_bytes of the stream with alter_stream.';
end $$;

-- Whether headers are an object of at most p_max_bytes that is not nested too deeply. True for null.
create or replace function _pgqueue.headers_fit(p_headers jsonb, p_max_bytes int) returns boolean
language sql immutable parallel safe as $$
    select p_headers is null or (jsonb_typeof(p_headers) = 'object' and octet_length(p_headers::text) <= p_max_bytes
           and (octet_length(p_headers::text) <= _pgqueue.short_headers()
                or not jsonb_path_exists(p_headers, format('$.**{%s}', _pgqueue.max_header_depth() + 1)::jsonpath)))
$$;

-- Raises PQ003: headers do not fit the stream.
create or replace function _pgqueue.refuse_headers(p_stream pgqueue.streams, p_headers jsonb) returns void
language plpgsql as $$
begin
    raise exception 'p_headers must, in stream %, be null or a JSON object of at most % bytes and % levels, not %',
        _pgqueue.error_name(p_stream), p_stream.max_header_bytes, _pgqueue.max_header_depth(),
        case when jsonb_typeof(p_headers) <> 'object' then 'of type ' || jsonb_typeof(p_headers)
             when octet_length(p_headers::text) > p_stream.max_header_bytes
                 then octet_length(p_headers::text) || ' bytes'
             else 'deeper' end
        using errcode = 'PQ003', column = 'p_headers';
end $$;

-- Raises PQ004 unless the payload fits the stream, and PQ003 for headers that do not fit and for a key that is too
-- long. The table of the stream has such a check too, for programs that write there directly; this check names the
-- stream. Errors contain no payload. (There is no exception block around the insert: a subtransaction with an id for
-- every message would slow down every snapshot of the server.)
create or replace function _pgqueue.check_payload(p_stream pgqueue.streams, p_data text, p_data_bytes bytea, p_key text,
                                                  p_headers jsonb) returns void
language plpgsql immutable as $$
begin
    if not _pgqueue.headers_fit(p_headers, p_stream.max_header_bytes) then
        perform _pgqueue.refuse_headers(p_stream, p_headers);
    elsif octet_length(p_key) > _pgqueue.max_key_bytes() then
        perform _pgqueue.refuse_key(p_key);
    elsif coalesce(octet_length(p_data), octet_length(p_data_bytes)) > p_stream.max_bytes then
        perform _pgqueue.refuse_size(p_stream, coalesce(octet_length(p_data), octet_length(p_data_bytes)));
    elsif p_stream.kind = 'binary' and (p_data_bytes is null or p_data is not null) then
        raise exception 'a message of stream % (binary) must have bytes as p_data_bytes, not null, and no text',
                        _pgqueue.error_name(p_stream)
            using errcode = 'PQ004', column = 'p_data_bytes, p_data';
    elsif p_stream.kind <> 'binary' and (p_data is null or p_data_bytes is not null) then
        raise exception 'a message of stream % (%) must have text as p_data, not null, and no bytes',
                        _pgqueue.error_name(p_stream), p_stream.kind
            using errcode = 'PQ004', column = 'p_data, p_data_bytes';
    elsif p_stream.kind = 'json' and p_stream.schema_path is null then
        perform p_data::json;
    elsif p_stream.kind = 'json' and (p_data::jsonb @@ p_stream.schema_path) is not true then
        perform _pgqueue.on_misfit(p_stream, p_data::jsonb);
    end if;
exception when invalid_text_representation or untranslatable_character or statement_too_complex
               or numeric_value_out_of_range or program_limit_exceeded then  -- (the last two: limits of jsonb)
    raise exception 'a message of stream % (json), of %, is not valid JSON%', _pgqueue.error_name(p_stream),
                    _pgqueue.counted(octet_length(p_data), 'byte'),
                    case sqlstate when '54001' then ': it is nested too deeply' else '' end
        using errcode = 'PQ004', column = 'p_data', detail = sqlerrm;
end $$;

-- Raises PQ003 for an invalid offset of a checkpoint reader.
create or replace function _pgqueue.check_offset(p_reader uuid, p_claim bigint, p_messages bigint) returns void
language plpgsql immutable as $$
begin
    if p_reader is null or (p_claim >= 0 and p_messages >= 0) is not true then
        raise exception 'p_reader must not be null, and p_start_claim, p_end_claim and p_start_messages must be at '
                        'least 0, '
                        'not %, %, %',
            coalesce(p_reader::text, 'null'), coalesce(p_claim::text, 'null'), coalesce(p_messages::text, 'null')
            using errcode = 'PQ003', column = 'p_reader, p_start_claim, p_end_claim, p_start_messages';
    end if;
end $$;

-- Raises PQ003 for an invalid batch. Spark counts the batches of a query from 0, and a number that Spark never reaches
-- would be above all later batches. A txnVersion is chosen by the user: its bound allows nanoseconds since 1970, and
-- leaves higher numbers unused.
create or replace function _pgqueue.check_batch(p_sink text, p_batch bigint) returns void
language plpgsql immutable as $$
declare
    v_most bigint := case when p_sink like 'txn:%' then 4000000000000000000 else 1000000000000 end;
begin
    if p_sink is null or (p_batch between 0 and v_most) is not true then
        raise exception 'p_sink must not be null and p_batch must be 0 to %, not % and %', v_most,
                        coalesce(quote_literal(p_sink), 'null'), coalesce(p_batch::text, 'null')
            using errcode = 'PQ003', column = 'p_sink, p_batch';
    end if;
end $$;

-- The server of this database: its identifier and timeline, one of which changes with a standby's promotion and with a
-- restore; the database's OID, which a dump does not contain; and when the data directory was created: a base backup
-- and a copied directory have newer files, and a copied volume does not. A column is null if the role may not read it:
-- for the files it must be a superuser, or have pg_stat_file. For a standby, which is a copy, the files are null too.
create or replace function _pgqueue.server(out system_identifier bigint, out timeline int, out database oid,
                                           out files_since bigint)
language plpgsql stable as $$
begin
    database := (select oid from pg_database where datname = current_database());
    select s.system_identifier into system_identifier from pg_control_system() s;
    if pg_is_in_recovery() then
        select c.timeline_id into timeline from pg_control_checkpoint() c;
    else
        timeline := ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int;
        -- of the inode: nothing writes this file after initdb
        files_since := extract(epoch from (pg_stat_file('PG_VERSION')).change)::bigint;
    end if;
exception when insufficient_privilege or feature_not_supported then
    null;
end $$;

-- Records the server of this database, for is_elsewhere().
create or replace function _pgqueue.record_server() returns void
language sql as $$
    insert into pgqueue.servers (system_identifier, timeline, database, files_since) select * from _pgqueue.server()
$$;

-- Whether this database is certainly not on the recorded server. The times of files are not compared: a volume whose
-- owner is set at each mount (`chown -R`, Kubernetes' fsGroup) has newer files, and is the same. See is_restored().
create or replace function _pgqueue.is_elsewhere() returns boolean
language sql stable as $$
    select coalesce((select s.system_identifier <> n.system_identifier or s.timeline <> n.timeline
                            or s.database <> n.database
                     from pgqueue.servers s cross join _pgqueue.server() n order by s.server_no desc limit 1), false)
$$;
