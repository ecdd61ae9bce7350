-- What topics and conditions mean: which keys a topic matches, and which messages pass a jsonpath.

-- A regular expression for a topic, on a key with a dot after each of its words: * matches one word, # any number of
-- words. Errors: PQ003.
create or replace function _pgqueue.topic_regex(p_argument text, p_topic text) returns text
language plpgsql immutable as $$
declare
    v_word   text;
    v_before text;
    v_regex  text := '';
begin
    if p_topic is null or p_topic = '' or octet_length(p_topic) > _pgqueue.max_key_bytes() then
        raise exception '% must be words separated by dots, 1 to 1,024 bytes in total, not %', p_argument,
                        coalesce(quote_literal(left(p_topic, 50)), 'null')
            using errcode = 'PQ003', column = p_argument;
    end if;
    foreach v_word in array string_to_array(p_topic, '.') loop
        if v_word = '' or (v_word ~ '[*#]' and length(v_word) > 1) then
            raise exception 'a word of % must be plain text, * for one word or # for any number of words, not % as in '
                            '%',
                            p_argument, quote_literal(v_word),
                            quote_literal(left(p_topic, 100)) using errcode = 'PQ003', column = p_argument;
        end if;
        -- a second # in a row has no effect, and with many of them the expression takes minutes
        continue when v_word = '#' and v_before = '#';
        v_before := v_word;
        v_regex := v_regex || case v_word when '*' then '[^.]*[.]' when '#' then '(?:[^.]*[.])*'
                                          else regexp_replace(v_word, '([^[:alnum:]_ -])', E'\\\\\\1', 'g')
                                               || '[.]' end;
    end loop;
    return '^' || v_regex || '$';
end $$;

-- A key as topics are compared with it.
create or replace function _pgqueue.words(p_key text) returns text
language sql immutable parallel safe as $$ select case when p_key <> '' then p_key || '.' else '' end $$;

-- A JSON path from text; an error about the text names the argument. Postgres's own error for a text that is no
-- jsonpath names no argument. Errors: PQ003.
create or replace function pgqueue.as_jsonpath(p_argument text, p_path text) returns jsonpath
language plpgsql immutable as $$
begin
    return p_path::jsonpath;
exception when others then
    raise exception '% must be a jsonpath such as $.data.total > 100, not %: %',
                    p_argument, quote_literal(left(p_path, 200)), sqlerrm
        using errcode = 'PQ003', column = p_argument;
end $$;

-- Raises PQ003 for a jsonpath that would fail for each message, such as one with variables, which have no values; or
-- that may take minutes and gigabytes for one message: each .** multiplies what the steps before it found by the size
-- of the message. (Other paths may be slow too; a statement_timeout of the caller ends them.)
create or replace function _pgqueue.check_condition(p_where jsonpath) returns void
language plpgsql immutable as $$
begin
    if octet_length(p_where::text) > _pgqueue.max_condition_bytes() then
        raise exception 'p_where must have at most % bytes, not %',
                        _pgqueue.max_condition_bytes(), octet_length(p_where::text)
            using errcode = 'PQ003', column = 'p_where';
    elsif regexp_replace(p_where::text, E'(^|[^$])"(?:[^"\\\\]|\\\\.)*"', E'\\1', 'g') ~ '[$]"' then
        raise exception 'p_where must not contain variables: %', quote_literal(left(p_where::text, 200))
            using errcode = 'PQ003', column = 'p_where';
    elsif regexp_count(regexp_replace(p_where::text, E'"(?:[^"\\\\]|\\\\.)*"', '', 'g'), E'\\*\\*') > 1 then
        raise exception 'p_where must not contain .** more than once: %', quote_literal(left(p_where::text, 200))
            using errcode = 'PQ003', column = 'p_where', hint = 'Name the fields of the path, as in $.data.items[*].';
    end if;
end $$;

-- Whether a message passes a condition: the first item that the path finds in {key, headers, data} is neither false nor
-- null. If the path fails for a message, as when it compares a text as a number, the message does not pass. data is
-- JSON in a json stream, a text in a text stream, and null in a binary stream.
create or replace function _pgqueue.passes(p_where jsonpath, p_key text, p_headers jsonb, p_data jsonb) returns boolean
language sql immutable as $$
    select coalesce(jsonb_path_query_first(jsonb_build_object('key', p_key, 'headers', p_headers, 'data', p_data),
                                           p_where, '{}', true) not in ('false', 'null'), false)
$$;

-- Whether a message passes a condition for which passes() may fail. A message with a value that the condition cannot
-- compare does not pass, and does not stop others. A message that is too large or too deeply nested for jsonb passes,
-- because messages that do not pass are deleted. Any other error, as for a file that cannot be read or a damaged row,
-- is raised.
create or replace function _pgqueue.passes_safely(p_where jsonpath, p_kind text, p_key text, p_headers jsonb,
                                                  p_data text) returns boolean
language plpgsql as $$
declare
    v_data jsonb;
begin
    v_data := case p_kind when 'json' then _pgqueue.as_jsonb(p_data) when 'text' then to_jsonb(p_data) end;
    return (p_kind = 'json' and v_data is null) or _pgqueue.passes(p_where, p_key, p_headers, v_data);
exception
    when data_exception then
        return false;
    when feature_not_supported then  -- a timestamp that is compared with one that has a time zone
        return false;
    when program_limit_exceeded then
        return true;
    when internal_error then  -- so many elements that jsonb needs more than 1 GB for them
        if octet_length(p_data) < 33554432 then
            raise;
        end if;
        return true;
end $$;
