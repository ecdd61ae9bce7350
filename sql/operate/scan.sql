-- Scanning: the tables of a queue in bulk, for parallel readers (Spark). A scan returns sets of messages as ranges [lo,
-- hi) of seq, with the columns that all messages of a range share. The payloads are read by COPY, as with reader_plan.
-- A scan changes nothing, waits for no lock, and works on a standby. Each call is one statement, with one snapshot.

-- A time that Python and Spark can represent in any time zone; times beyond the year 9999 and infinity become the last
-- such time.
create or replace function _pgqueue.clamp(p_time timestamptz) returns timestamptz
language sql immutable parallel safe as $$
    select case when p_time is not null
                then least(greatest(p_time, '0001-01-02 00:00:00+00'), '9999-12-30 00:00:00+00') end
$$;

-- The time of a place in the history. Places out of range get a time before or after all rows.
create or replace function _pgqueue.time_at(p_place bigint) returns timestamptz
language sql immutable parallel safe as $$
    select timestamptz 'epoch'
           + least(greatest(p_place, -100000000000000000), 9000000000000000000) * interval '1 microsecond'
$$;

-- The query for the rows of a table: sets of messages (seqs), and the table's columns. $1 is the stream, $2 the
-- consumer (null: all). Null for another table. Rows of a large table also have a consumer_id and a place, which order
-- the rows, and a size in messages; $3 and $4 are bounds of the rows. A publication is read by its parts, in place of
-- messages.
--   p_columns  ", a, b": the requested columns. Published messages with equal values are one row: messages that were
--              sent singly have many times, and one priority
create or replace function _pgqueue.table_query(p_table text, p_columns text) returns text
language sql immutable as $$
    select case
        when p_table = 'messages' then
            'select consumer_id, null::bigint as place, range_agg(seqs) as seqs' || p_columns || '
             from (select null::int as consumer_id, seqs, priority, _pgqueue.clamp(published_at) as published_at,
                          _pgqueue.clamp(deliver_at) as deliver_at, _pgqueue.clamp(expires_at) as expires_at, consumers
                   from pgqueue.publications where stream_id = $1) p group by consumer_id' || p_columns
        -- only roles that may read open_claims may see a claim_id, because it allows to settle the claim
        when p_table in ('pending', 'claimed') then
            'select null::int as consumer_id, null::bigint as place, m.seqs, c.name as consumer,
                    _pgqueue.shown_state(m.state, m.not_visible_until) as state, m.priority, m.deliver_count,
                    _pgqueue.clamp(m.not_visible_until) as not_visible_until, m.owner,
                    _pgqueue.clamp(m.lease_until) as lease_until, m.note ->> ''error'' as error'
            || case p_table when 'claimed' then ', m.claim_id, m.claimed_at' else '' end || '
             from pgqueue.consumers c cross join lateral _pgqueue.unfinished(c.consumer_id) m
             where c.stream_id = $1 and ($2 is null or c.consumer_id = $2)'
            || case p_table when 'claimed' then ' and m.state = ''claimed''' else '
             union all
             select null, null, range_agg(p.seqs), c.name, ''new'', p.priority, 0, _pgqueue.clamp(p.deliver_at), null,
                    null, null
             from pgqueue.consumers c cross join lateral _pgqueue.new_sets(c, _pgqueue.cursor($2)) p
             where c.consumer_id = $2 group by c.name, p.priority, p.deliver_at' end
        when p_table = 'dead' then
            'select d.consumer_id, d.dead_id as place, d.message_count as size, d.seqs, c.name as consumer,
                    d.reason, d.note ->> ''error'' as error, d.details::text as details, d.priority, d.deliver_count,
                    d.owner, d.died_at
             from pgqueue.consumers c join pgqueue.dead_messages d on d.consumer_id = c.consumer_id
             where c.stream_id = $1 and ($2 is null or c.consumer_id = $2)
               and ($3 is null or (d.consumer_id, d.dead_id) >= ($3[1], $3[2]))
               and ($4 is null or (d.consumer_id, d.dead_id) <= ($4[1], $4[2]))'
        when p_table = 'archived' then
            'select a.consumer_id, (extract(epoch from a.done_at) * 1000000)::bigint as place, a.message_count as size,
                    a.seqs, c.name as consumer, a.result::text as result, a.deliver_count, a.owner, a.claimed_at,
                    a.done_at
             from pgqueue.consumers c join pgqueue.completed_messages a on a.consumer_id = c.consumer_id
             where c.stream_id = $1 and ($2 is null or c.consumer_id = $2)
               and ($3 is null or (a.consumer_id, a.done_at) >= ($3[1], _pgqueue.time_at($3[2])))
               and ($4 is null or (a.consumer_id, a.done_at) <= ($4[1], _pgqueue.time_at($4[2])))'
        when p_table = 'publications' then
            'select 0 as consumer_id, publication_id as place, 1::bigint as size,
                    int8multirange(int8range(part, part + 1)) as seqs, publication_id, part,
                    _pgqueue.clamp(published_at) as published_at, _pgqueue.clamp(deliver_at) as deliver_at,
                    _pgqueue.clamp(expires_at) as expires_at, priority, message_count, lower(seqs) as first_seq,
                    upper(seqs) - 1 as last_seq, consumers
             from pgqueue.publications
             where stream_id = $1 and ($3 is null or publication_id >= $3[2])
               and ($4 is null or publication_id <= $4[2])' end
$$;

-- The query of a scan, with the parameters of table_query. Errors: PQ003 for a column that the table does not have.
create or replace function _pgqueue.scan_query(p_table text, p_columns text[]) returns text
language plpgsql stable as $$
declare
    v_rows    text := _pgqueue.table_query(
                  p_table, coalesce((select string_agg(format(', %I', name), '') from unnest(p_columns) name), ''));
    v_columns text := string_agg(format(', %s.%I', case name when 'consumers' then 'n' else 'm' end, name), ''
                                 order by i) from unnest(p_columns) with ordinality c (name, i);
    v_query   text := format(
        'select lower(g), upper(g)%s from (%s) m %s
         cross join lateral unnest(
             m.seqs * int8multirange(int8range(case when (consumer_id, place) = ($3[1], $3[2]) then $3[3] end, null))
             * int8multirange(int8range(null, case when (consumer_id, place) = ($4[1], $4[2]) then $4[3] end))) g',
        v_columns, v_rows,
        -- there are usually few sets of consumers, so the planner's memoize node caches their names
        case when 'consumers' = any (p_columns)
             then 'cross join lateral (select _pgqueue.consumer_names(m.consumers) as consumers offset 0) n' end);
begin
    execute v_query || ' limit 0' using 0, 0, null::bigint[], null::bigint[];
    return v_query || ' order by m.consumer_id, m.place, 1';
exception when undefined_column then
    raise exception 'p_columns must name columns of table %: %', p_table, sqlerrm
        using errcode = 'PQ003', column = 'p_columns';
end $$;

-- Returns rows of a table of a queue as ranges of messages: lo, hi, and the requested columns, in this order.
-- The tables and their columns are those of Spark, without the columns of stored messages.
--   p_table     messages (published, for all consumers, including those that are not due yet), pending (message_states
--               without dead letters; new and unfiltered messages may not pass the filter), dead, archived (the
--               history: a row per acknowledgement), or publications (lo is the part)
--   p_consumer  of this consumer; null: of all consumers of the stream. Required for pending
--   p_columns   the requested columns. For messages, fewer columns give fewer ranges
--   p_from, p_to  of dead, archived and publications, the rows from one bound to the next of scan_bounds; null: from
--               the first, to the last
-- Returns ranges in order; those of messages and pending do not overlap. Errors: PQ001, PQ002, PQ003. Locks: none.
create or replace function pgqueue.scan(p_stream text, p_table text, p_consumer text default null,
                                        p_columns text[] default '{}', p_from bigint[] default null,
                                        p_to bigint[] default null) returns setof record
language plpgsql stable as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_id     int := case when p_consumer is not null or p_table = 'pending'
                         then (_pgqueue.consumer(p_stream, p_consumer)).consumer_id end;
begin
    perform _pgqueue.check_choice('p_table', p_table, '{messages, pending, dead, archived, publications}');
    return query execute _pgqueue.scan_query(p_table, p_columns) using v_stream.stream_id, v_id, p_from, p_to;
end $$;

-- Returns the messages in live claims as scan does, with the ids and owners of the claims.
-- It is for roles that may read open_claims, because a role that knows a claim_id can settle the claim.
--   p_consumer, p_columns  as for scan
-- Returns ranges in order; those of one consumer do not overlap. Errors: PQ001, PQ002, PQ003. Locks: none.
create or replace function pgqueue.scan_claimed(p_stream text, p_consumer text default null,
                                                p_columns text[] default '{}') returns setof record
language plpgsql stable as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_id     int := case when p_consumer is not null then (_pgqueue.consumer(p_stream, p_consumer)).consumer_id end;
begin
    return query execute _pgqueue.scan_query('claimed', p_columns)
        using v_stream.stream_id, v_id, null::bigint[], null::bigint[];
end $$;

-- Divides dead letters, history or publications into shares of equal size, for parallel readers.
-- These tables can have very many rows. A bound is a consumer, a place and a number. A share has the rows between two
-- bounds, and the messages below the number in the row at the second bound.
--   p_table     dead, archived or publications, as for scan
--   p_consumer  of this consumer; null: of all consumers of the stream
--   p_count     the number of shares; there are at most as many as messages
-- Returns for each bound between two shares the number of all messages, and the bound; for one share only the number.
-- Errors: PQ001, PQ002, PQ003. Locks: none.
create or replace function pgqueue.scan_bounds(p_stream text, p_table text, p_consumer text default null,
                                               p_count bigint default 1) returns table (total bigint, bound bigint[])
language plpgsql stable as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_id     int := case when p_consumer is not null then (_pgqueue.consumer(p_stream, p_consumer)).consumer_id end;
    v_none   bigint[];
begin
    perform _pgqueue.check_number('p_count', p_count, 1, 1000000);
    perform _pgqueue.check_choice('p_table', p_table, '{dead, archived, publications}');
    execute format('select coalesce(sum(size), 0) from (%s) m', _pgqueue.table_query(p_table, ''))
    into total using v_stream.stream_id, v_id, v_none, v_none;
    if p_count = 1 then
        return next;
        return;
    end if;
    -- k shares have the first total * k / p_count messages, rounded down
    return query execute format($q$
        select $5, array[c.consumer_id, c.place, _pgqueue.bound_of(c.seqs, $5 * k / $6 - (c.upto - c.size))]
        from (select m.*, (sum(size) over (order by consumer_id, place, lower(seqs) rows unbounded preceding))::bigint
                          as upto from (%s) m) c
        cross join lateral generate_series(((c.upto - c.size + 1) * $6 + $5 - 1) / $5,
                                           least(((c.upto + 1) * $6 + $5 - 1) / $5, $6) - 1) k
        order by 2 $q$, _pgqueue.table_query(p_table, ''))
    using v_stream.stream_id, v_id, v_none, v_none, total, p_count;
end $$;
