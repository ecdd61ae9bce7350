-- Messages by key: the dealer, and all that goes by key, splits runs into the messages of each key. A key is known by
-- its hash: two keys with the same hash wait for each other.

-- The key that orders a message of a consumer, as an SQL expression over a message m.
create or replace function _pgqueue.key_of(p_consumer pgqueue.consumers) returns text
language sql immutable
as $$ select case p_consumer.ordering when 'stream' then '0::bigint' else 'hashtextextended(m.key, 0)' end $$;

-- Splits runs by key. A message without a key stands for itself, with null as its key. So does a message that is gone.
-- Returns for each key its messages, a set for each kind of run, in the order of the messages; null if there are no
-- messages.
create or replace function _pgqueue.by_key(p_consumer pgqueue.consumers, p_runs pgqueue.consumer_messages[])
returns pgqueue.keyed_messages
language plpgsql
as $$
declare
    v_sets  int8multirange[];
    v_nos   int[];     -- of each set: its number among the runs that are not alike
    v_lines bigint[];  -- of each set: its line_no
    v_lo    bigint;    -- the bounds of all sets: with them the planner leaves out other tables of the stream
    v_hi    bigint;
    v_keyed pgqueue.keyed_messages;
    v_gone  int8multirange;
begin
    with run as materialized (
        select r, r.seqs, r.line_no,
               dense_rank() over (order by r.line_no, r.arrival_no, r.lane, r.piece, r.priority, r.deliver_count,
                                           r.note, r.not_visible_until) as i
        from unnest(p_runs) r
    )
    select array_agg(seqs), array_agg(i), array_agg(line_no),
           (select array_agg(f.r order by f.i) from (select distinct on (i) i, r from run) f),
           min(lower(seqs)), max(upper(seqs))
    into v_sets, v_nos, v_lines, v_keyed.runs, v_lo, v_hi
    from run;
    execute format($q$
        select array_agg(i order by line_no, first_seq), array_agg(key order by line_no, first_seq),
               array_agg(seqs order by line_no, first_seq),
               array_agg(message_count order by line_no, first_seq)
        from (select i, line_no, key, range_agg(int8range(seq, seq + 1)) as seqs, count(*) as message_count,
                     min(seq) as first_seq
              from (select s.i, s.line_no, m.seq, m.key, %3$s as island
                    from unnest($1, $2, $3) s (seqs, i, line_no) cross join lateral unnest(s.seqs) g
                    cross join lateral (select seq, %2$s as key from pgqueue.messages_%1$s m
                                        where seq >= lower(g) and seq < upper(g) and seq >= $4 and seq < $5) m) e
              group by i, line_no, key, case when key is null then seq end, island) k $q$,
        p_consumer.stream_id, _pgqueue.key_of(p_consumer),
        -- the messages of a key may alternate between runs that are not alike
        case when cardinality(v_keyed.runs) = 1 then '0'
             else 'row_number() over (partition by m.key order by s.line_no, m.seq) '
                  '- row_number() over (partition by m.key, s.i order by s.line_no, m.seq)' end)
    into v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts
    using v_sets, v_nos, v_lines, v_lo, v_hi;

    if (select sum(message_count) from unnest(p_runs))
       is distinct from (select sum(c) from unnest(v_keyed.message_counts) c) then
        v_gone := (select range_agg(s) from unnest(v_sets) s)
            - coalesce((select range_agg(s) from unnest(v_keyed.seqs) s), '{}');
        select v_keyed.run_nos || array_agg(s.i), v_keyed.keys || array_agg(null::bigint),
               v_keyed.seqs || array_agg(int8multirange(int8range(e, e + 1))),
               v_keyed.message_counts || array_agg(1::bigint)
        into v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts
        from unnest(v_sets, v_nos) s (seqs, i)
        cross join lateral unnest(s.seqs * v_gone) g cross join lateral generate_series(lower(g), upper(g) - 1) e;
    end if;
    return v_keyed;
end $$;

-- Puts messages by key after others.
create or replace function _pgqueue.after(p_first pgqueue.keyed_messages, p_then pgqueue.keyed_messages)
returns pgqueue.keyed_messages
language plpgsql immutable
as $$
begin
    if p_first.keys is null then
        return p_then;
    elsif p_then.keys is null then
        return p_first;
    end if;
    return (p_first.runs || p_then.runs,
            p_first.run_nos || array(select i + cardinality(p_first.runs) from unnest(p_then.run_nos) i),
            p_first.keys || p_then.keys, p_first.seqs || p_then.seqs, p_first.message_counts || p_then.message_counts,
            null)::pgqueue.keyed_messages;
end $$;
