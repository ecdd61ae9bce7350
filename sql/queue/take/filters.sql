-- Filters: a consumer with a filter gets only messages whose key matches a topic, or that pass a jsonpath. Publishers
-- do the same as without filters.
--
-- A take for a consumer with a filter stores bundles in lane_unfiltered(). If too few messages are ready, a claim with
-- the consumer's lock filters these bundles, limit_filter() messages at a time. A message that passes gets its lane and
-- place as any other message; the rest is deleted. The cursor's filter_from says that unfiltered bundles exist. Until
-- all of them are filtered, the consumer takes nothing more.

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
        raise exception '% is words with dots between them, of 1 to 1,024 bytes together, not %', p_argument,
                        coalesce(quote_literal(left(p_topic, 50)), 'null')
            using errcode = 'PQ003', column = p_argument;
    end if;
    foreach v_word in array string_to_array(p_topic, '.') loop
        if v_word = '' or (v_word ~ '[*#]' and length(v_word) > 1) then
            raise exception 'a word of % is a text, or * for one word, or # for any number of them, not % as in %',
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
    raise exception '% is a jsonpath such as $.data.total > 100, not %: %',
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
        raise exception 'p_where has up to % bytes, not %', _pgqueue.max_condition_bytes(), octet_length(p_where::text)
            using errcode = 'PQ003', column = 'p_where';
    elsif regexp_replace(p_where::text, E'(^|[^$])"(?:[^"\\\\]|\\\\.)*"', E'\\1', 'g') ~ '[$]"' then
        raise exception 'p_where has no variables, not %', quote_literal(left(p_where::text, 200))
            using errcode = 'PQ003', column = 'p_where';
    elsif regexp_count(regexp_replace(p_where::text, E'"(?:[^"\\\\]|\\\\.)*"', '', 'g'), E'\\*\\*') > 1 then
        raise exception 'p_where has .** once, not %', quote_literal(left(p_where::text, 200))
            using errcode = 'PQ003', column = 'p_where', hint = 'Name the fields on the way, as in $.data.items[*].';
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

-- Which of some messages match a topic and pass a condition. Messages are read in the order of the ranges, and within a
-- range by number.
--   p_topic_regex, p_where  null: any message
--   p_max     end with this many; null: all
--   p_safely  call passes_safely() for one message after the other
create or replace function _pgqueue.matching(p_stream_id int, p_ranges int8range[], p_topic_regex text,
                                             p_where jsonpath, p_max bigint, p_safely boolean default false)
returns int8multirange language plpgsql as $$
declare
    v_matching int8multirange;
    v_kind     text := kind from pgqueue.streams where stream_id = p_stream_id;
begin
    execute format('select range_agg(int8range(f.seq, f.seq + 1)) '
                   'from (select m.seq from unnest($1) g cross join lateral ('
                   'select seq from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)%s%s order by seq) m '
                   'limit $4) f', p_stream_id,
                   case when p_topic_regex is not null then ' and _pgqueue.words(key) ~ $2' end,
                   case when p_where is not null
                        then format(case when p_safely then ' and _pgqueue.passes_safely($3, %L, key, headers, data)'
                                         else ' and _pgqueue.passes($3, key, headers, %2$s)' end, v_kind,
                                    case v_kind when 'json' then 'data::jsonb' when 'text' then 'to_jsonb(data)'
                                                else 'null' end) end)
    into v_matching using p_ranges, p_topic_regex, p_where, p_max;
    return coalesce(v_matching, '{}');
exception when others then
    if p_safely then
        raise;
    end if;
    return _pgqueue.matching(p_stream_id, p_ranges, p_topic_regex, p_where, p_max, true);
end $$;

-- Which of some messages pass the filter of a consumer.
create or replace function _pgqueue.passing(p_consumer pgqueue.consumers, p_seqs int8multirange) returns int8multirange
language sql as $$
    select _pgqueue.matching(p_consumer.stream_id, array(select unnest(p_seqs)), f.topic_regex, f.condition, null)
    from pgqueue.consumer_filters f where f.consumer_id = p_consumer.consumer_id
$$;

-- Screens the first unfiltered messages, limit_filter() of them, in the order in which they will be delivered: with the
-- filter; and with per_key_latest only the newest message of each key stays. Returns the cursor, which the caller
-- stores, and how many messages became ready. Needs the consumer's lock.
create or replace function _pgqueue.apply_filter(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 out o_cursor pgqueue.consumer_cursors, out o_messages bigint)
language plpgsql as $$
declare
    v_place   bigint := (p_cursor.hints).filter_from;
    v_left    bigint := _pgqueue.limit_filter();
    v_bundles pgqueue.consumer_messages[];
    v_bundle  pgqueue.consumer_messages;
    v_placed  pgqueue.consumer_messages[];
    v_passing int8multirange;
    v_newest  record;
    v_part    int8multirange;
    v_hints   pgqueue.claim_hints;
begin
    o_cursor := p_cursor;
    o_messages := 0;
    loop
        v_place := (select place from pgqueue.consumer_messages
                    where consumer_id = p_consumer.consumer_id and lane = _pgqueue.lane_unfiltered()
                      and place >= v_place
                    order by place limit 1);
        exit when v_place is null or v_left <= 0;
        v_bundles := _pgqueue.take_unfiltered(p_consumer.consumer_id, v_place, v_left);
        v_left := v_left - _pgqueue.count_of(v_bundles);
        v_passing := _pgqueue.seqs_of(v_bundles);
        if p_consumer.filtered then
            v_passing := _pgqueue.passing(p_consumer, v_passing);
        end if;
        if p_consumer.per_key_latest then
            v_newest := _pgqueue.keep_newest(p_consumer, o_cursor, v_passing, v_bundles);
            o_cursor := v_newest.p_cursor;
            v_passing := v_newest.o_newest;
        end if;
        v_hints := o_cursor.hints;
        v_placed := '{}';
        foreach v_bundle in array v_bundles loop
            v_part := v_bundle.seqs * v_passing;
            o_cursor.forgotten := o_cursor.forgotten + v_bundle.message_count - _pgqueue.cardinality(v_part);
            v_bundle.not_visible_until := case when v_bundle.not_visible_until > clock_timestamp()
                                               then v_bundle.not_visible_until end;
            v_bundle := _pgqueue.placed(p_consumer, v_bundle);
            v_bundle.seqs := v_part;
            v_placed := v_placed || v_bundle;
            if v_bundle.not_visible_until is null then
                o_messages := o_messages + _pgqueue.cardinality(v_part);
            end if;
        end loop;
        o_cursor.hints := _pgqueue.store_all_placed(v_hints, v_placed);
    end loop;
    v_hints := o_cursor.hints;
    v_hints.filter_from := v_place;
    v_hints.was_cut := v_place is not null
        or exists (select from pgqueue.publications
                   where stream_id = p_consumer.stream_id and publication_id >= o_cursor.next_publication
                     and publication_id < o_cursor.next_publication + _pgqueue.limit_unseen());
    o_cursor.hints := v_hints;
end $$;

-- Deletes the first p_want unfiltered messages of a place from its bundles, whose messages interleave, in the order of
-- their numbers. Returns them as bundles.
create or replace function _pgqueue.take_unfiltered(p_consumer_id int, p_place bigint, p_want bigint)
returns pgqueue.consumer_messages[] language plpgsql as $$
declare
    v_below   bigint;
    v_bundles pgqueue.consumer_messages[];
begin
    for v_pass in 1..2 loop  -- first only the bundles that suffice; then all that begin below their bound
        select _pgqueue.bound_of(range_agg(seqs), least(sum(message_count), p_want)::bigint) into v_below
        from (select seqs, message_count, first_seq,
                     sum(message_count) over (order by first_seq) - message_count as before
              from pgqueue.consumer_messages
              where consumer_id = p_consumer_id and lane = _pgqueue.lane_unfiltered() and place = p_place) b
        where case v_pass when 1 then before < p_want else first_seq < v_below end;
    end loop;
    v_bundles := array(select b from pgqueue.consumer_messages b
                       where consumer_id = p_consumer_id and lane = _pgqueue.lane_unfiltered() and place = p_place
                         and first_seq < v_below
                       order by first_seq for update);  -- lock: bundle
    return _pgqueue.remove_messages(v_bundles, _pgqueue.below(_pgqueue.seqs_of(v_bundles), v_below));
end $$;
