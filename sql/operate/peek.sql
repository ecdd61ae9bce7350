-- Peeking: reading messages without claiming them, the next ones of a consumer or by their numbers.

-- Shows the next messages of a consumer, with their payloads, and changes nothing.
-- They are listed in approximately the order of delivery: ready messages; unfiltered messages that match the consumer's
-- filter; new messages, of up to limit_take() publications; then messages that wait for their key, and delayed ones.
-- Claimed messages and dead letters are not shown. For interactive use: the call may read all unfinished messages of
-- the consumer.
--   p_max  the maximum number of messages, 1 to 100,000
-- Returns a row per message: its state, as in message_states; until when it is delayed; and its last error.
-- Errors: PQ001, PQ002, PQ003. Locks: none. (The function is stable, so that its statements have one snapshot.)
create or replace function pgqueue.peek(p_stream text, p_consumer text, p_max int default 10)
returns table (seq bigint, state text, key text, data text, data_bytes bytea, headers jsonb, priority int,
               deliver_count int, not_visible_until timestamptz, error text, inserted_at timestamptz)
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_cursor   pgqueue.consumer_cursors := _pgqueue.cursor(v_consumer.consumer_id);
    v_passing  int8multirange;  -- of the unfiltered messages; null: no filter
begin
    perform _pgqueue.check_number('p_max', p_max, 1, 100000);
    if v_consumer.filtered then
        v_passing := coalesce((
            select range_agg(seqs)
            from (select seqs from _pgqueue.unfinished(v_consumer.consumer_id) m where m.state = 'unfiltered'
                  union all
                  (select seqs from _pgqueue.new_sets(v_consumer, v_cursor, _pgqueue.limit_take())
                   limit _pgqueue.limit_take())) u), '{}');
        if _pgqueue.cardinality(v_passing) > _pgqueue.limit_filter() then
            v_passing := _pgqueue.below(v_passing, _pgqueue.bound_of(v_passing, _pgqueue.limit_filter()));
        end if;
        v_passing := _pgqueue.passing(v_consumer, v_passing);
    end if;
    return query execute format($q$
        with pending as (
            -- with ordering=stream, in the order of arrival, whatever their state
            select _pgqueue.shown_state(state, not_visible_until) as state,
                   case ($1).ordering when 'stream' then 0 else lane end as lane,
                   case when state = 'waiting' or ($1).ordering = 'stream' then arrival_no else place end as place,
                   case state when 'unfiltered' then coalesce(seqs * $3, seqs) else seqs end as seqs, priority,
                   deliver_count, not_visible_until, note ->> 'error' as error
            from _pgqueue.unfinished(($1).consumer_id) where state <> 'claimed'
            union all
            (select case when deliver_at > clock_timestamp() then 'delayed' else 'new' end,
                    case ($1).ordering when 'none' then -priority else 1 end, publication_id,
                    coalesce(seqs * $3, seqs), priority, 0, deliver_at, null
             from _pgqueue.new_sets($1, $2, _pgqueue.limit_take()) limit _pgqueue.limit_take())
        ), ranked as (
            select p.*, d.*, row_number() over (partition by state order by d.due, lane, place, lower(seqs)) as nth
            from pending p
            cross join lateral (
                select case when ($1).ordering <> 'stream'
                            then array_position('{ready, unfiltered, new, waiting, delayed}', state) end as rank,
                       case when ($1).ordering <> 'stream' and state = 'delayed' then not_visible_until end as due) d
            where seqs <> '{}'
        ), placed as (
            select r.*, lower(g) as lo, upper(g) as hi,
                   sum(upper(g) - lower(g)) over (order by rank, due, lane, place, lower(g)
                                                  rows unbounded preceding) - (upper(g) - lower(g)) as ahead
            from ranked r cross join lateral unnest(seqs) g where nth <= $4
        )
        select m.seq, p.state, m.key, m.data, m.data_bytes, m.headers, p.priority, p.deliver_count, p.not_visible_until,
               p.error, m.inserted_at
        from placed p
        cross join lateral (select x.* from pgqueue.messages_%s x where x.seq >= p.lo and x.seq < p.hi
                            order by x.seq limit $4) m
        where p.ahead < $4
        order by p.ahead, m.seq limit $4 $q$, v_consumer.stream_id)
    using v_consumer, v_cursor, v_passing, p_max;
end $$;

-- Shows published messages of a stream by their numbers, for all consumers.
--   p_seq  the first number
--   p_max  the maximum number of messages, 1 to 100,000
-- Returns a row per message: also the time of publication, the consumers if it was published to named ones, and the
-- time of delivery if it is delayed.
-- Errors: PQ001, PQ003. Locks: none.
create or replace function pgqueue.peek_at(p_stream text, p_seq bigint, p_max int default 1)
returns table (seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int, inserted_at timestamptz,
               published_at timestamptz, deliver_at timestamptz, consumers text[])
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    perform _pgqueue.check_number('p_seq', p_seq, 1, 9223372036854775806);
    perform _pgqueue.check_number('p_max', p_max, 1, 100000);
    return query execute format($q$
        select m.seq, m.key, m.data, m.data_bytes, m.headers, p.priority, m.inserted_at, p.published_at, p.deliver_at,
               _pgqueue.consumer_names(p.consumers)
        from pgqueue.messages_%s m cross join lateral _pgqueue.publication_of($1, m.seq) p
        where m.seq >= $2 order by m.seq limit $3 $q$, v_stream.stream_id)
    using v_stream.stream_id, p_seq, p_max;
end $$;

-- The names of consumers, without those that were dropped; null for null, which is all consumers.
create or replace function _pgqueue.consumer_names(p_consumers int[]) returns text[]
language sql stable as $$
    select case when p_consumers is not null
                then array(select name from pgqueue.consumers where consumer_id = any (p_consumers) order by name) end
$$;

-- Shows the position of a consumer in its stream: the first message that it has not reached.
-- Gaps are publications before that message that it has not reached either.
-- Returns one row: the number of the first message that it has not reached, or the lowest number that the next message
-- can have; when that message was published, null if there is none; how many publications before it are in gaps.
-- Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.consumer_position(p_stream text, p_consumer text)
returns table (next_seq bigint, published_at timestamptz, in_gaps bigint)
language sql stable as $$
    select coalesce(n.next_seq, _pgqueue.last_seq(c.stream_id) + 1), n.published_at,
           _pgqueue.cardinality(_pgqueue.gap_ids(k))
    from _pgqueue.consumer(p_stream, p_consumer) c
    cross join lateral _pgqueue.cursor(c.consumer_id) k
    left join lateral (
        select lower(p.seqs) as next_seq, p.published_at from pgqueue.publications p
        where p.stream_id = c.stream_id and p.publication_id >= k.next_publication
          and not exists (select from pgqueue.taken_ahead a
                          where a.consumer_id = c.consumer_id and a.publication_id = p.publication_id)
        order by p.publication_id, p.part limit 1) n on true
$$;
