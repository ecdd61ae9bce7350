-- The backlog of a consumer: the messages that it has not claimed.

-- Counts the messages of the first p_limit publications of a set, without reading the messages.
--   p_ids       the ids of the publications
--   p_excluded  messages that do not count; null: none
-- Returns how many messages these publications have for the consumer, and how many in all; the number after their
-- highest one; and the ids of the remaining publications: empty when these were all.
create or replace function _pgqueue.first_messages(p_consumer pgqueue.consumers, p_ids int8multirange,
                                                   p_excluded int8multirange, p_limit bigint, out o_count bigint,
                                                   out o_of_all bigint, out o_seqs_end bigint,
                                                   out o_left int8multirange)
language plpgsql stable as $$
begin
    select coalesce(sum(case when _pgqueue.meets(p.seqs, p_excluded)
                             then _pgqueue.cardinality(_pgqueue.less(p.seqs, p_excluded))
                             else p.message_count end)
                        filter (where _pgqueue.is_for(p.consumers, p_consumer.consumer_id)), 0),
           sum(p.message_count), max(upper(p.seqs)),
           case when count(*) < p_limit then '{}'
                else p_ids * int8multirange(int8range(max(p.publication_id) + 1, null)) end
    into o_count, o_of_all, o_seqs_end, o_left
    from (select p.*
          from unnest(p_ids) g
          cross join lateral (select publication_id, message_count, consumers, seqs from pgqueue.publications
                              where stream_id = p_consumer.stream_id and publication_id >= lower(g)
                                and publication_id < coalesce(upper(g), 9223372036854775807)
                              order by publication_id
                              fetch first p_limit rows with ties) p
          order by p.publication_id
          fetch first p_limit rows with ties) p;
end $$;

-- Counts the messages that publications have for a consumer. The count is exact: decisions use it, never
-- estimate_new().
--   p_ids       the ids of the publications
--   p_excluded  messages that do not count; null: none
--   p_enough    the count may end at this number of messages; null: all are counted
create or replace function _pgqueue.messages_in(p_consumer pgqueue.consumers, p_ids int8multirange,
                                                p_excluded int8multirange, p_enough bigint default null) returns bigint
language plpgsql stable as $$
declare
    v_first record;
    v_left  int8multirange := p_ids;
    v_count bigint := 0;
begin
    loop
        v_first := _pgqueue.first_messages(p_consumer, v_left, p_excluded, _pgqueue.limit_counted());
        v_count := v_count + v_first.o_count;
        v_left := v_first.o_left;
        exit when v_left = '{}' or v_count >= p_enough;
    end loop;
    return v_count;
end $$;

-- Counts the messages of a consumer that are new or in some of its bundles.
--   p_taken   how many are in those bundles
--   p_enough  as for messages_in()
create or replace function _pgqueue.with_new(p_consumer_id int, p_taken bigint, p_enough bigint) returns bigint
language plpgsql stable as $$
begin
    return p_taken + coalesce((select _pgqueue.messages_in(c, _pgqueue.new_ids(k), _pgqueue.excluded(k),
                                                     p_enough - p_taken)
                              from pgqueue.consumers c cross join lateral _pgqueue.cursor(c.consumer_id) k
                              where c.consumer_id = p_consumer_id and (p_taken >= p_enough) is not true), 0);
end $$;

-- Estimates how many messages are new for a consumer, for programs that poll every few seconds. It counts the first
-- limit_shown() publications, which takes a millisecond, and uses the numbers assigned since to estimate the rest. The
-- estimate includes numbers that are not published, mostly those of rolled-back transactions. No decision may depend on
-- it.
create or replace function _pgqueue.estimate_new(p_consumer_id int, out o_count bigint, out o_estimated boolean)
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers;
    v_cursor   pgqueue.consumer_cursors;
    v_first    record;
    v_last     bigint;
begin
    select * into v_consumer from pgqueue.consumers where consumer_id = p_consumer_id;
    if not found then
        return;
    end if;
    v_cursor := _pgqueue.cursor(p_consumer_id);
    v_first := _pgqueue.first_messages(v_consumer, _pgqueue.new_ids(v_cursor), _pgqueue.excluded(v_cursor),
                                       _pgqueue.limit_shown());
    o_count := v_first.o_count;
    o_estimated := v_first.o_left <> '{}';
    v_last := _pgqueue.last_seq(v_consumer.stream_id);
    if o_estimated and v_last >= v_first.o_seqs_end then
        -- no stored message has the numbers of trimmed segments, or those that closing a segment skipped
        o_count := o_count + v_first.o_count / v_first.o_of_all::float8
            * _pgqueue.cardinality(int8multirange(int8range(v_first.o_seqs_end, v_last, '[]'))
                                   - (_pgqueue.trimmed(v_consumer.stream_id)).o_seqs
                                   - coalesce((select range_agg(int8range(last_seq + 1, hi)) from pgqueue.segments
                                               where stream_id = v_consumer.stream_id and last_seq < hi - 1), '{}'));
    end if;
end $$;

-- Counts the messages that a consumer has not claimed yet.
--   p_enough  the count may end at this number of messages; null: all are counted
create or replace function pgqueue.consumer_backlog(p_consumer_id int, p_enough bigint default null) returns bigint
language plpgsql stable as $$
begin
    return _pgqueue.with_new(p_consumer_id, (select coalesce(sum(message_count), 0)::bigint
                                             from _pgqueue.unfinished(p_consumer_id)
                                             where state <> 'claimed'), p_enough);
end $$;
