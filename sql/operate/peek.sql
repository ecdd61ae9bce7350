-- Peeking: looking at messages without claiming them, as a consumer gets them next or by their numbers.

-- Shows the messages that a consumer gets next, with what they hold, and changes nothing.
-- They come in about the order of delivery: ready messages; messages that the consumer's filter has not judged, and
-- that pass it; new messages, of up to limit_take() publications; then messages that wait for their key, and delayed
-- ones. Claimed messages and dead letters are not shown. For people: it may read all that the consumer has not
-- finished.
--   p_max  messages at most, 1 to 100,000
-- Returns a row per message: its state, as in message_states; until when it is delayed; and the last error, of a
-- message that failed.
-- Errors: PQ001, PQ002, PQ003. Locks: none. (More than 60 lines: one statement, and so one snapshot.)
create or replace function pgqueue.peek(p_stream text, p_consumer text, p_max int default 10)
returns table (seq bigint, state text, key text, data text, data_bytes bytea, headers jsonb, priority int,
               deliver_count int, not_visible_until timestamptz, error text, inserted_at timestamptz)
language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    perform _pgqueue.check_number('p_max', p_max, 1, 100000);
    return query execute format($q$
        with run as materialized (
            select r.shown as state, r.lane, r.place, r.first_seq, r.seqs, r.priority, r.deliver_count,
                   r.not_visible_until, r.note ->> 'error' as error,
                   row_number() over (partition by r.state, r.shown order by r.lane, r.place, r.first_seq) as nth
            from (select m.state, m.lane, case m.state when 'waiting' then m.arrival_no else m.place end as place,
                         m.first_seq, m.seqs, m.priority, m.deliver_count, m.not_visible_until, m.note,
                         _pgqueue.shown_state(m.state, m.not_visible_until) as shown
                  from _pgqueue.unfinished(($1).consumer_id) m where m.state <> 'claimed') r
        ), new as materialized (
            select case when p.deliver_at > clock_timestamp() then 'delayed' else 'new' end as state,
                   case ($1).ordering when 'none' then -p.priority else 1 end as lane, p.publication_id as place,
                   lower(p.seqs) as first_seq, p.seqs, p.priority, 0 as deliver_count,
                   p.deliver_at as not_visible_until, null::text as error
            from _pgqueue.cursor(($1).consumer_id) c
            cross join lateral _pgqueue.new_sets($1, c, _pgqueue.limit_take()) p
            limit _pgqueue.limit_take()
        ), unjudged as materialized (
            select range_agg(u.seqs) as seqs
            from (select r.seqs from run r where r.state = 'unfiltered' union all select n.seqs from new n) u
            where ($1).filtered
        ), passing as materialized (
            select _pgqueue.passing(
                       $1, _pgqueue.below(u.seqs, _pgqueue.bound_of(
                               u.seqs, least(_pgqueue.cardinality(u.seqs), _pgqueue.limit_filter())))) as seqs
            from unjudged u where u.seqs <> '{}'
        ), before as (
            select r.state, r.lane, r.place, r.first_seq,
                   case when r.state = 'unfiltered' and ($1).filtered then r.seqs * p.seqs else r.seqs end as seqs,
                   r.priority, r.deliver_count, r.not_visible_until, r.error
            from run r left join passing p on true
            where r.nth <= $2 or r.state = 'unfiltered'
            union all
            select n.state, n.lane, n.place, n.first_seq,
                   case when ($1).filtered then n.seqs * p.seqs else n.seqs end,
                   n.priority, n.deliver_count, n.not_visible_until, n.error
            from new n left join passing p on true
        ), ranged as (
            select b.*, lower(g) as lo, upper(g) as hi,
                   array_position('{ready, unfiltered, new, waiting, delayed}', b.state) as rank,
                   case b.state when 'delayed' then b.not_visible_until end as due
            from before b cross join lateral unnest(b.seqs) g
        ), placed as (
            select r.*, sum(r.hi - r.lo) over w - (r.hi - r.lo) as ahead, row_number() over w as nth
            from ranged r window w as (order by r.rank, r.due, r.lane, r.place, r.lo rows unbounded preceding)
        )
        select m.seq, p.state, m.key, m.data, m.data_bytes, m.headers, p.priority, p.deliver_count, p.not_visible_until,
               p.error, m.inserted_at
        from placed p
        cross join lateral (select x.* from pgqueue.messages_%s x where x.seq >= p.lo and x.seq < p.hi
                            order by x.seq limit $2) m
        where p.ahead < $2
        order by p.nth, m.seq limit $2 $q$, v_consumer.stream_id)
    using v_consumer, p_max;
end $$;

-- Shows published messages of a stream by their numbers, whichever consumers get them.
--   p_seq  from this number on
--   p_max  messages at most, 1 to 100,000
-- Returns a row per message, also with the time of publication, the consumers if it was published to some alone, and
-- the time of delivery if it is not at once.
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

-- Shows how far a consumer is in its stream, for people: the first message that it has not taken.
-- Gaps hold publications before that message.
-- Returns one row: the number of the first message that it has not taken, or the number that the next message will
-- have, at least; when that message was published, null if it was not; how many publications before it are in gaps.
-- Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.consumer_position(p_stream text, p_consumer text)
returns table (next_seq bigint, published_at timestamptz, in_gaps bigint)
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_cursor   pgqueue.consumer_cursors := _pgqueue.cursor(v_consumer.consumer_id);
begin
    in_gaps := _pgqueue.cardinality(_pgqueue.gap_ids(v_cursor));
    select lower(p.seqs), p.published_at into next_seq, published_at
    from pgqueue.publications p
    where p.stream_id = v_consumer.stream_id and p.publication_id >= v_cursor.next_publication
      and not exists (select from pgqueue.taken_ahead a
                      where a.consumer_id = v_consumer.consumer_id and a.publication_id = p.publication_id)
    order by p.publication_id, p.part limit 1;
    next_seq := coalesce(next_seq, _pgqueue.last_seq(v_consumer.stream_id) + 1);
    return next;
end $$;
