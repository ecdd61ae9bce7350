-- Routing: messages that are sent to a stream are copied to other streams, by the topic of their key.

-- Returns whether a topic matches a key.
--   p_pattern  words separated by dots; * matches one word, # any number of words, including none
--   p_key      null and the empty text have no words
-- Errors: PQ003. Locks: none.
create or replace function pgqueue.test_topic(p_pattern text, p_key text) returns boolean
language plpgsql immutable as $$
begin
    return _pgqueue.words(p_key) ~ _pgqueue.topic_regex('p_pattern', p_pattern);
end $$;

-- Copies messages of a topic to another stream, from now on.
-- The copy is made in the sender's transaction, with payload, key, headers, priority and time of delivery. A stream
-- gets a copy of a message for each path of bindings that leads to it, however many topics match. Messages that are
-- sent to named consumers are not copied, and neither are messages whose send is in progress, or that a Spark write has
-- staged. Safe to repeat.
--   p_topic      as p_pattern of test_topic
--   p_to_stream  of the same kind, with limits at least as large, with no schema or one that is part of the schema of
--                p_stream, and not copied to p_stream itself
-- Errors: PQ001, PQ003, PQ007. Locks: other calls of bind and unbind.
create or replace function pgqueue.bind(p_stream text, p_topic text, p_to_stream text) returns void
language plpgsql as $$
declare
    v_from pgqueue.streams;
    v_to   pgqueue.streams;
begin
    perform _pgqueue.topic_regex('p_topic', p_topic);
    perform _pgqueue.check_isolation();
    perform _pgqueue.lock_bindings();  -- two concurrent calls could create a cycle, and limits could change
    v_from := _pgqueue.stream(p_stream);
    v_to := _pgqueue.stream(p_to_stream);
    if not _pgqueue.takes_all(v_from, v_to) then
        raise exception 'p_to_stream must be a stream of kind % that accepts %, and % of headers, as stream % '
                        'does, '
                        'with no schema or a part of its schema; not %',
            v_from.kind, _pgqueue.counted(v_from.max_bytes, 'byte'), v_from.max_header_bytes, quote_literal(p_stream),
            quote_literal(p_to_stream)
            using errcode = 'PQ003', column = 'p_to_stream';
    end if;
    if exists (with recursive reached as (
                   select v_to.stream_id as stream_id
                   union
                   select b.to_stream_id from reached r join pgqueue.bindings b on b.stream_id = r.stream_id)
               select from reached where stream_id = v_from.stream_id) then
        raise exception 'p_to_stream must be another stream that is not copied to stream %, not %',
            quote_literal(p_stream), quote_literal(p_to_stream)
            using errcode = 'PQ003', column = 'p_to_stream', hint = 'The bindings would form a cycle.';
    end if;
    insert into pgqueue.bindings (stream_id, topic, topic_regex, to_stream_id)
    values (v_from.stream_id, p_topic, _pgqueue.topic_regex('p_topic', p_topic), v_to.stream_id)
    on conflict do nothing;  -- lock: bindings
    perform _pgqueue.lock_stream(v_from.stream_id);
    update pgqueue.streams set bound = true where stream_id = v_from.stream_id and not bound;
end $$;

-- Stops copying messages of a topic to another stream. Messages whose send is in progress may still be copied.
-- Returns whether the topic was bound. Errors: PQ001. Locks: as bind.
create or replace function pgqueue.unbind(p_stream text, p_topic text, p_to_stream text) returns boolean
language plpgsql as $$
declare
    v_from  int := (_pgqueue.stream(p_stream)).stream_id;
    v_to    int := (_pgqueue.stream(p_to_stream)).stream_id;
    v_found boolean;
begin
    perform _pgqueue.lock_bindings();
    perform _pgqueue.lock_stream(v_from);
    delete from pgqueue.bindings where stream_id = v_from and topic = p_topic and to_stream_id = v_to;
    v_found := found;
    update pgqueue.streams set bound = false
    where stream_id = v_from and bound and not exists (select from pgqueue.bindings where stream_id = v_from);
    return v_found;
end $$;
