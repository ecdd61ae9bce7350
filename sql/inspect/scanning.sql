-- Scanning: the tables of a queue in bulk, for parallel readers (Spark). Each call returns sets of messages as ranges
-- [lo, hi) of seq, with what all messages of a range have in common. The messages' payloads are read by COPY, as with
-- reader_plan. Scanning changes nothing and waits for nobody, and works on a standby. Each call is one statement, and
-- so one state of the queue. near() makes times such that every reader can hold them.

-- A time that Python and Spark can hold in any time zone; the last such time for infinity, and for times beyond the
-- year 9999.
create or replace function _pgqueue.near(p_time timestamptz) returns timestamptz
language sql immutable parallel safe
as $$
    select case when p_time is not null
                then least(greatest(p_time, '0001-01-02 00:00:00+00'), '9999-12-30 00:00:00+00') end
$$;

-- Returns the published messages of a stream as ranges, for all consumers, also those not due yet.
--   p_seqs  these alone; null: all
--   p_tell  what else to tell of them: priority, published_at, deliver_at, expires_at, consumers (their names; null:
--           all). The other columns are null. The less is asked for, the fewer the ranges: messages that were sent one
--           by one have many times, and one priority
-- Returns ranges in order that do not overlap. Errors: PQ001, PQ003. Locks: none.
create or replace function pgqueue.scan_messages(p_stream text, p_seqs int8multirange default null,
                                                 p_tell text[] default '{priority}')
returns table (lo bigint, hi bigint, priority int, published_at timestamptz, deliver_at timestamptz,
               expires_at timestamptz, consumers text[])
language plpgsql stable
as $$
declare
    v_stream  pgqueue.streams := _pgqueue.stream(p_stream);
    v_allowed text[] := '{priority, published_at, deliver_at, expires_at, consumers}';
begin
    if p_tell <@ v_allowed is not true then
        raise exception 'p_tell has names out of %, not %', array_to_string(v_allowed, ', '),
                        coalesce(quote_literal(array_to_string(p_tell, ', ', 'null')), 'null')
            using errcode = 'PQ003', column = 'p_tell';
    end if;
    return query
        select lower(g), upper(g), s.priority, s.published_at, s.deliver_at, s.expires_at, s.names
        from (select x.priority, x.published_at, x.deliver_at, x.expires_at,
                     _pgqueue.consumer_names(x.consumers) as names, range_agg(x.seqs) as seqs
              from (select case when 'priority' = any (p_tell) then p.priority end as priority,
                           case when 'published_at' = any (p_tell)
                                then _pgqueue.near(p.published_at) end as published_at,
                           case when 'deliver_at' = any (p_tell) then _pgqueue.near(p.deliver_at) end as deliver_at,
                           case when 'expires_at' = any (p_tell) then _pgqueue.near(p.expires_at) end as expires_at,
                           case when 'consumers' = any (p_tell) then p.consumers end as consumers, p.seqs
                    from pgqueue.publications p
                    where p.stream_id = v_stream.stream_id and (p_seqs is null or p.seqs && p_seqs)) x
              group by x.priority, x.published_at, x.deliver_at, x.expires_at, x.consumers) s
        cross join lateral unnest(s.seqs * coalesce(p_seqs, s.seqs)) g
        order by lower(g);
end $$;

-- Returns the messages that a consumer has not finished, and their states, as ranges.
-- They are those of message_states without dead letters. If the consumer has a filter, new and unfiltered messages were
-- not judged yet, and may be none of its messages.
--   p_seqs  these alone; null: all
-- Returns ranges in order that do not overlap. Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.scan_pending(p_stream text, p_consumer text, p_seqs int8multirange default null)
returns table (lo bigint, hi bigint, consumer text, state text, priority int, deliver_count int,
               not_visible_until timestamptz, owner text, lease_until timestamptz, error text)
language plpgsql stable
as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_cursor   pgqueue.consumer_cursors := _pgqueue.cursor(v_consumer.consumer_id);
begin
    return query
        select lower(g), upper(g), v_consumer.name, x.state, x.priority, x.deliver_count,
               _pgqueue.near(x.not_visible_until), x.owner,
               _pgqueue.near(x.lease_until), x.error
        from (select _pgqueue.shown_state(m.state, m.not_visible_until) as state, m.priority, m.deliver_count,
                     m.not_visible_until, m.owner, m.lease_until, m.note ->> 'error' as error, m.seqs
              from _pgqueue.unfinished(v_consumer.consumer_id) m
              union all
              select 'new', p.priority, 0, p.deliver_at, null, null, null, range_agg(p.seqs)
              from _pgqueue.new_sets(v_consumer, v_cursor) p
              group by p.priority, p.deliver_at) x
        cross join lateral unnest(x.seqs * coalesce(p_seqs, x.seqs)) g
        order by lower(g);
end $$;

-- Returns the messages in live claims, and the owners of these claims, as ranges.
--   p_consumer  of this consumer; null: of all consumers of the stream
--   p_seqs      these alone; null: all
-- Returns ranges in order; those of one consumer do not overlap. A role that knows a claim_id can settle the claim: so
-- this is for roles that may see open_claims. Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.scan_claimed(p_stream text, p_consumer text default null,
                                                p_seqs int8multirange default null)
returns table (lo bigint, hi bigint, consumer text, claim_id bigint, owner text, claimed_at timestamptz,
               lease_until timestamptz, priority int, deliver_count int, error text)
language plpgsql stable
as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_id     int := case when p_consumer is not null then (_pgqueue.consumer(p_stream, p_consumer)).consumer_id end;
begin
    return query
        select lower(g), upper(g), c.name, m.claim_id, m.owner, m.claimed_at, _pgqueue.near(m.lease_until), m.priority,
               m.deliver_count, m.note ->> 'error'
        from pgqueue.consumers c
        cross join lateral _pgqueue.unfinished(c.consumer_id) m
        cross join lateral unnest(m.seqs * coalesce(p_seqs, m.seqs)) g
        where m.state = 'claimed' and c.stream_id = v_stream.stream_id and (v_id is null or c.consumer_id = v_id)
        order by lower(g), c.name;
end $$;

-- Divides dead letters, history or publications into parts, for parallel readers.
-- These tables have a row for each time that something happened, which may be very many. A part is what happened
-- between two places; what is too large for one part is divided by numbers of messages, from from_seq to below to_seq
-- (null: from the first, to the last).
--   p_table     dead, archived or publications: what scan_dead, scan_archived and scan_publications return
--   p_consumer  of this consumer; null: of all consumers of the stream. For publications null
--   p_size      messages (publications) in a part at most
--   p_least     so many parts, if there are as many messages; a part is of one consumer, so there may be more
-- Returns the parts, each of one consumer, in the order of their places. Errors: PQ001, PQ002, PQ003. Locks: none.
create or replace function pgqueue.scan_parts(p_stream text, p_table text, p_consumer text default null,
                                              p_size bigint default 125000, p_least bigint default 1)
returns table (consumer text, from_place bigint, to_place bigint, from_seq bigint, to_seq bigint, message_count bigint)
language plpgsql stable
as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_id     int := case when p_consumer is not null then (_pgqueue.consumer(p_stream, p_consumer)).consumer_id end;
    v_rows   text;
begin
    perform _pgqueue.check_number('p_size', p_size, 1, 9223372036854775807);
    perform _pgqueue.check_number('p_least', p_least, 1, 9223372036854775807);
    v_rows := case p_table
        when 'dead' then 'select c.name, d.dead_id as place, d.message_count as n, d.seqs from pgqueue.dead_messages d '
                         'join chosen c using (consumer_id)'
        when 'archived' then 'select c.name, _pgqueue.place(a.done_at) as place, a.message_count as n, a.seqs
                              from pgqueue.archived_messages a join chosen c using (consumer_id)'
        when 'publications' then 'select distinct null::text as name, p.publication_id as place, 1::bigint as n, '
                                 'null::int8multirange as seqs
                                  from pgqueue.publications p where p.stream_id = $1 and $2 is null' end;
    if v_rows is null then
        raise exception 'p_table is dead, archived or publications, not %', coalesce(quote_literal(p_table), 'null')
            using errcode = 'PQ003', column = 'p_table';
    end if;
    -- Rows that are more than half of a part are cut; the others are put together up to half of one: so no part becomes
    -- too large.
    return query execute format($q$
        with chosen as (
            select c.consumer_id, c.name from pgqueue.consumers c
            where c.stream_id = $1 and ($2 is null or c.consumer_id = $2)
        ), happened as materialized (
            select name, place, sum(n)::bigint as n from (%1$s) r group by name, place
        ), sized as (
            select h.*, s.size, greatest(1, s.size / 2) as half
            from happened h
            cross join (select greatest(1, least($3, ceil(sum(n) / $4)::bigint)) as size from happened) s
        ), numbered as (
            select s.*, count(*) filter (where n > half) over w as island,
                   sum(n) filter (where n <= half) over w as upto
            from sized s window w as (partition by name order by place)
        ), large as (
            select r.name, r.place, n.size, range_agg(r.seqs) as seqs
            from numbered n join (%1$s) r on r.name = n.name and r.place = n.place
            where n.n > n.half group by r.name, r.place, n.size
        )
        select name, min(place), max(place), null::bigint, null::bigint, sum(n)::bigint
        from numbered where n <= half group by name, island, div(upto - 1, half)
        union all
        select l.name, l.place, l.place, case when k > 0 then _pgqueue.bound_of(l.seqs, k * l.size) end,
               case when (k + 1) * l.size < c.n then _pgqueue.bound_of(l.seqs, (k + 1) * l.size) end,
               least(l.size, c.n - k * l.size)
        from large l
        cross join lateral (select _pgqueue.cardinality(l.seqs) as n) c
        cross join lateral generate_series(0, (c.n - 1) / l.size) k
        order by 1, 2, 4 nulls first $q$, v_rows)
    using v_stream.stream_id, v_id, p_size, p_least;
end $$;

-- The place of what happened at a time: in microseconds.
create or replace function _pgqueue.place(p_time timestamptz) returns bigint
language sql immutable parallel safe
as $$ select (extract(epoch from p_time) * 1000000)::bigint $$;

-- The time of a place. Places before all times and behind them have a time before and behind all that happens.
create or replace function _pgqueue.time_at(p_place bigint) returns timestamptz
language sql immutable parallel safe
as $$
    select timestamptz 'epoch'
           + least(greatest(p_place, -100000000000000000), 9000000000000000000) * interval '1 microsecond'
$$;

-- Returns the dead letters of a part as ranges, in the order in which they died.
--   p_from, p_to  the places of the part
--   p_seqs        these messages alone; null: all
-- details is JSON. Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.scan_dead(p_stream text, p_consumer text, p_from bigint, p_to bigint,
                                             p_seqs int8multirange default null)
returns table (lo bigint, hi bigint, consumer text, reason text, error text, details text, priority int,
               deliver_count int, owner text, died_at timestamptz)
language plpgsql stable
as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    return query
        select lower(g), upper(g), v_consumer.name, d.reason, d.note ->> 'error', d.details::text, d.priority,
               d.deliver_count, d.owner, d.died_at
        from pgqueue.dead_messages d
        cross join lateral unnest(d.seqs * coalesce(p_seqs, d.seqs)) g
        where d.consumer_id = v_consumer.consumer_id and d.dead_id between p_from and p_to
        order by d.dead_id, lower(g);
end $$;

-- Returns the history of a part as ranges, in the order of acknowledgement, with results and owners.
-- It is the history of a consumer with keep_history; p_from, p_to and p_seqs as in scan_dead. A message that was
-- delivered again after it was acknowledged comes as often as it was acknowledged. result is JSON. deliver_count is the
-- highest one of the messages that were acknowledged together. Errors: PQ001, PQ002. Locks: none.
create or replace function pgqueue.scan_archived(p_stream text, p_consumer text, p_from bigint, p_to bigint,
                                                 p_seqs int8multirange default null)
returns table (lo bigint, hi bigint, consumer text, result text, deliver_count int, owner text, claimed_at timestamptz,
               done_at timestamptz)
language plpgsql stable
as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    return query
        select lower(g), upper(g), v_consumer.name, a.result::text, a.deliver_count, a.owner, a.claimed_at, a.done_at
        from pgqueue.archived_messages a
        cross join lateral unnest(a.seqs * coalesce(p_seqs, a.seqs)) g
        where a.consumer_id = v_consumer.consumer_id
          and a.done_at between _pgqueue.time_at(p_from) and _pgqueue.time_at(p_to)
        order by a.done_at, lower(g);
end $$;

-- Returns the publications of a part, a row each: when, what and to which consumers.
-- A part's places are ids of publications. A publication whose messages differ in priority or time has a row for each
-- of its parts. first_seq and last_seq are the lowest and the highest number in it; between them there may be messages
-- of others. consumers are names; null: all. Errors: PQ001. Locks: none.
create or replace function pgqueue.scan_publications(p_stream text, p_from bigint, p_to bigint)
returns table (publication_id bigint, part int, published_at timestamptz, deliver_at timestamptz,
               expires_at timestamptz, priority int, message_count bigint, first_seq bigint, last_seq bigint,
               consumers text[])
language plpgsql stable
as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    return query
        select p.publication_id, p.part, _pgqueue.near(p.published_at), _pgqueue.near(p.deliver_at),
               _pgqueue.near(p.expires_at), p.priority, p.message_count,
               lower(p.seqs), upper(p.seqs) - 1, n.names
        from pgqueue.publications p
        -- nearly always there are few sets of consumers
        left join (select d.consumers, _pgqueue.consumer_names(d.consumers) as names
                   from (select distinct x.consumers from pgqueue.publications x
                         where x.stream_id = v_stream.stream_id and x.publication_id between p_from and p_to
                           and x.consumers is not null) d) n
               on n.consumers = p.consumers
        where p.stream_id = v_stream.stream_id and p.publication_id between p_from and p_to
        order by p.publication_id, p.part;
end $$;
