-- Filters: a consumer with a filter gets only messages whose key matches a topic, or that pass a jsonpath. Publishers
-- do the same as without filters.
--
-- A take for a consumer with a filter stores bundles in lane_unfiltered(). If too few messages are ready, a claim with
-- the consumer's lock filters these bundles, limit_filter() messages at a time, and for filter_time() at most: large
-- messages may take a second each. A message that passes gets its lane and place as any other message; the rest is
-- deleted. The cursor's filter_from says that unfiltered bundles exist. Until all of them are filtered, the consumer
-- takes nothing more.

-- Which of some messages match a topic and pass a condition, and which were not examined, see matches(). If the
-- condition fails for a message, calls passes_safely() for one message after the other.
--   p_for  for how long messages are examined; null: until all are
create or replace function _pgqueue.matching(p_stream_id int, p_ranges int8range[], p_topic_regex text,
                                             p_where jsonpath, p_max bigint, p_for interval default null)
returns int8multirange[]
language plpgsql as $$
declare
    v_lo bigint := (select min(lower(r)) from unnest(p_ranges) r);
    v_hi bigint := (select max(upper(r)) from unnest(p_ranges) r);
begin
    return _pgqueue.matches(p_stream_id, p_ranges, v_lo, v_hi, p_topic_regex, p_where, p_max, false,
                            clock_timestamp() + p_for);
exception when others then
    return _pgqueue.matches(p_stream_id, p_ranges, v_lo, v_hi, p_topic_regex, p_where, p_max, true,
                            clock_timestamp() + p_for);
end $$;

-- Which of some messages pass the filter of a consumer, and which were not examined.
--   p_for  as in matching(): the first message is examined in any case
create or replace function _pgqueue.filtered(p_consumer pgqueue.consumers, p_seqs int8multirange, p_for interval)
returns int8multirange[] language sql as $$
    select _pgqueue.matching(p_consumer.stream_id, array(select unnest(p_seqs)), f.topic_regex, f.condition, null,
                             p_for)
    from pgqueue.consumer_filters f where f.consumer_id = p_consumer.consumer_id
$$;

-- Which of some messages pass the filter of a consumer. All of them are examined.
create or replace function _pgqueue.passing(p_consumer pgqueue.consumers, p_seqs int8multirange) returns int8multirange
language sql as $$ select (_pgqueue.filtered(p_consumer, p_seqs, null))[1] $$;

-- Screens messages that were taken out of unfiltered bundles: with the filter; and with per_key_latest only the newest
-- message of each key passes.
--   p_for  as in matching(): the first message is examined in any case
-- Returns the cursor, the messages that pass, and those that were not examined. Needs the consumer's lock.
create or replace function _pgqueue.screen(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                           p_bundles pgqueue.consumer_messages[], p_for interval,
                                           out o_passing int8multirange, out o_later int8multirange)
language plpgsql as $$
declare
    v_sets   int8multirange[];
    v_newest record;
begin
    o_passing := _pgqueue.seqs_of(p_bundles);
    o_later := '{}';
    if p_consumer.filtered then
        v_sets := _pgqueue.filtered(p_consumer, o_passing, p_for);
        o_passing := v_sets[1];
        o_later := v_sets[2];
    end if;
    if p_consumer.per_key_latest then
        v_newest := _pgqueue.keep_newest(p_consumer, p_cursor, o_passing, p_bundles);
        p_cursor := v_newest.p_cursor;
        o_passing := v_newest.o_newest;
    end if;
end $$;

-- Screens the first unfiltered messages, limit_filter() of them, in the order in which they will be delivered. Ends
-- early after filter_time(), but not before it has screened one message. Returns the cursor, which the caller stores,
-- and how many messages became ready. Needs the consumer's lock.
create or replace function _pgqueue.apply_filter(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 out o_cursor pgqueue.consumer_cursors, out o_messages bigint)
language plpgsql as $$
declare
    v_place    bigint := (p_cursor.hints).filter_from;
    v_left     bigint := _pgqueue.limit_filter();
    v_until    timestamptz := clock_timestamp() + _pgqueue.filter_time();
    v_bundles  pgqueue.consumer_messages[];
    v_bundle   pgqueue.consumer_messages;
    v_placed   pgqueue.consumer_messages[];
    v_screened record;
    v_part     int8multirange;
    v_hints    pgqueue.claim_hints;
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
        v_screened := _pgqueue.screen(p_consumer, o_cursor, v_bundles, v_until - clock_timestamp());
        o_cursor := v_screened.p_cursor;
        v_hints := o_cursor.hints;
        v_placed := '{}';
        foreach v_bundle in array v_bundles loop
            v_part := _pgqueue.common(v_bundle.seqs, v_screened.o_passing);
            o_cursor.forgotten := o_cursor.forgotten + v_bundle.message_count - _pgqueue.cardinality(v_part);
            if v_screened.o_later <> '{}' then
                v_bundle.seqs := _pgqueue.common(v_bundle.seqs, v_screened.o_later);
                o_cursor.forgotten := o_cursor.forgotten - _pgqueue.cardinality(v_bundle.seqs);
                v_placed := v_placed || v_bundle;
            end if;
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
        v_left := case when v_screened.o_later = '{}' and clock_timestamp() < v_until then v_left else 0 end;
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
