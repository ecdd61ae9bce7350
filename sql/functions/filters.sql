-- Routing: what is sent to a stream is copied to others, by the topic of its key.

-- Whether a key is of a topic.
--   p_pattern  words with dots between them; * stands for one word, # for any number of them, also none
--   p_key      null and the empty text have no words
-- Errors: PQ003. Locks: none.
create or replace function pgqueue.test_topic(p_pattern text, p_key text) returns boolean
language plpgsql immutable
as $$
begin
    return pgqueue._words(p_key) ~ pgqueue._topic_regex('p_pattern', p_pattern);
end $$;

-- Copies what is sent to a stream from now on, and has a key of this topic, to another stream, in the sender's transaction: payload, key, headers,
-- priority and time of delivery. A message is copied once to a stream, however many bindings say so; what is sent to named consumers
-- only is not copied. Safe to repeat. Sends that are under way are not copied.
--   p_topic      as test_topic's p_pattern
--   p_to_stream  of the same kind, with limits as wide, and not one that is copied to p_stream
-- Errors: PQ001, PQ003, PQ007. Locks: other calls of bind and unbind.
create or replace function pgqueue.bind(p_stream text, p_topic text, p_to_stream text) returns void
language plpgsql
as $$
declare
    v_from pgqueue.streams;
    v_to   pgqueue.streams;
begin
    perform pgqueue._topic_regex('p_topic', p_topic);
    perform pgqueue._check_isolation();
    lock table pgqueue.bindings in share row exclusive mode;  -- two at once might make a circle, and limits may change
    v_from := pgqueue._stream(p_stream);
    v_to := pgqueue._stream(p_to_stream);
    if v_to.kind <> v_from.kind or v_to.max_bytes < v_from.max_bytes or v_to.max_header_bytes < v_from.max_header_bytes then
        raise exception 'p_to_stream is a stream of kind % that takes % bytes, and % of headers, as stream % does; not %', v_from.kind, v_from.max_bytes,
                        v_from.max_header_bytes, quote_literal(p_stream), quote_literal(p_to_stream) using errcode = 'PQ003', column = 'p_to_stream';
    end if;
    if exists (with recursive reached as (
                   select v_to.stream_id as stream_id
                   union
                   select b.to_stream_id from reached r join pgqueue.bindings b on b.stream_id = r.stream_id)
               select from reached where stream_id = v_from.stream_id) then
        raise exception 'p_to_stream is another stream that is not copied to stream %, not %', quote_literal(p_stream), quote_literal(p_to_stream)
            using errcode = 'PQ003', column = 'p_to_stream', hint = 'Messages would go round in a circle.';
    end if;
    insert into pgqueue.bindings (stream_id, topic, topic_regex, to_stream_id)
    values (v_from.stream_id, p_topic, pgqueue._topic_regex('p_topic', p_topic), v_to.stream_id)
    on conflict do nothing;
    update pgqueue.streams set bound = true where stream_id = v_from.stream_id and not bound;
end $$;

-- Copies nothing of this topic any more. Sends that are under way may still be copied.
-- Returns whether it was bound. Errors: PQ001. Locks: as bind.
create or replace function pgqueue.unbind(p_stream text, p_topic text, p_to_stream text) returns boolean
language plpgsql
as $$
declare
    v_from  int := (pgqueue._stream(p_stream)).stream_id;
    v_to    int := (pgqueue._stream(p_to_stream)).stream_id;
    v_found boolean;
begin
    lock table pgqueue.bindings in share row exclusive mode;
    delete from pgqueue.bindings where stream_id = v_from and topic = p_topic and to_stream_id = v_to;
    v_found := found;
    update pgqueue.streams set bound = false
    where stream_id = v_from and bound and not exists (select from pgqueue.bindings where stream_id = v_from);
    return v_found;
end $$;

-- Copies messages that are being published to the streams that their topics are bound to.
create or replace function pgqueue._route(p_stream_id int, p_seqs int8multirange, p_priority int, p_deliver_at timestamptz, p_expires_at timestamptz) returns void
language plpgsql
as $$
declare
    v_target record;
    v_seqs   bigint[];
begin
    for v_target in
        select s.stream_id, (array_agg(s))[1] as stream, array_agg(b.topic_regex) as regexes
        from pgqueue.bindings b join pgqueue.streams s on s.stream_id = b.to_stream_id
        where b.stream_id = p_stream_id group by s.stream_id order by s.stream_id
    loop
        execute format('with copied as (insert into pgqueue.messages_%1$s (seq, key, data, data_bytes, headers) '
                       'select nextval(%2$L::regclass), key, data, data_bytes, headers '
                       'from (select m.* from unnest($1) g '
                       -- (offset: or else, without statistics, all of the stream is read; the bounds of all leave out its other tables)
                       'cross join lateral (select * from pgqueue.messages_%3$s '
                       '                    where seq >= lower(g) and seq < upper(g) and seq >= $3 and seq < $4 offset 0) m '
                       'where pgqueue._words(m.key) ~ any ($2) order by m.seq) m returning seq) '
                       'select array_agg(seq order by seq) from copied', v_target.stream_id, format('pgqueue.seq_%s', v_target.stream_id), p_stream_id)
        into v_seqs using p_seqs, v_target.regexes, lower(p_seqs), upper(p_seqs);
        if v_seqs is not null then
            perform pgqueue._publish(v_target.stream, pgqueue._set_of(v_seqs), cardinality(v_seqs), p_priority, p_deliver_at, null, p_expires_at);
        end if;
    end loop;
end $$;
