-- Messages in the format of pgmq.

-- A payload in the format of pgmq: as jsonb, or as text if it is nested too deeply or too large for jsonb. It never
-- fails, because a failed read is rolled back, and would be repeated forever.
create or replace function pgmq._message(data text) returns jsonb
language sql immutable as $$ select coalesce(_pgqueue.as_jsonb(data), to_jsonb(data)) $$;

-- The messages of a queue, or those of a set: visible ones, ones that are read and not settled, and delayed ones. It
-- reads all bundles of the consumer and, unless all messages are found there, all new publications.
--   p_set  null: all
create or replace function pgmq._rows(p_consumer pgqueue.consumers, p_set int8multirange)
returns setof pgmq.message_record language plpgsql stable as $$
declare
    v_cursor pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
begin
    return query execute format($q$
        with run as materialized (
            select coalesce(_pgqueue.common(m.seqs, $3), m.seqs) as seqs, m.deliver_count, m.last_delivered_at,
                   coalesce(m.lease_until, m.not_visible_until) as vt
            from _pgqueue.unfinished(($1).consumer_id) m where $3 is null or _pgqueue.meets(m.seqs, $3)
        ), other as materialized (
            select coalesce($3, int8multirange(int8range(null, null))) - coalesce(range_agg(seqs), '{}') as seqs
            from run
        ), found as (
            select * from run
            union all
            select n.seqs, 0, null, n.deliver_at
            from other
            cross join lateral (select _pgqueue.common(seqs, other.seqs) as seqs, deliver_at
                                from _pgqueue.new_sets($1, $2) where other.seqs <> '{}' offset 0) n
            where n.seqs <> '{}'
        )
        select m.seq, r.deliver_count, m.inserted_at, r.last_delivered_at, coalesce(r.vt, m.inserted_at),
               pgmq._message(m.data), m.headers
        from found r cross join lateral unnest(r.seqs) g
        cross join lateral (select * from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g) offset 0) m
        order by m.seq $q$, p_consumer.stream_id)
    using p_consumer, v_cursor, p_set;
end $$;

-- The messages of a queue, for the view q_<queue>.
create or replace function pgmq._rows(queue_name text) returns setof pgmq.message_record
language sql stable as $$ select * from pgmq._rows(pgmq._consumer(queue_name), null) $$;

-- An array of message numbers as a set.
create or replace function pgmq._set(msg_ids bigint[]) returns int8multirange
language sql immutable as $$
    select coalesce(range_agg(int8range(i, i, '[]')), '{}') from unnest(msg_ids) i where i < 9223372036854775807
$$;

-- A number of seconds as the duration of a lease.
create or replace function pgmq._lease(vt integer) returns interval
language sql immutable as $$ select greatest(make_interval(secs => coalesce(vt, 0)), interval '1 microsecond') $$;
