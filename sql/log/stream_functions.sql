-- Reading messages: each stream has its own functions for that, whose plans are cached. Planning such a query costs
-- more than the rest of a small claim, and a plan over the parent of all partitions would lock all of them.

do $$
begin
    if to_regtype('pgqueue.received') is null then
        create type pgqueue.received as (
            claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int,
            deliver_count int, inserted_at timestamptz, saved jsonb);
    end if;
    if to_regtype('pgqueue.messages_by_key') is null then
        create type pgqueue.messages_by_key as (nos int[], keys bigint[], seqs int8multirange[], counts bigint[]);
        create type pgqueue.key_texts as (seqs bigint[], keys text[]);
    end if;
end $$;

-- The functions of each stream. Their names end with the stream's id, as in payload_7(). A function without that id
-- calls the one of its first argument, p_stream_id, as in payload(7, ...). Messages that are not stored are left out.
--   payload    the payload of a message of a claim; a row costs less than a set of rows
--   payloads   the payloads of a claim, in the order of delivery. The query sorts ranges, not messages: receive
--              can use only nested loops (function_settings.sql), which preserve the order of the ranges
--                p_seqs     all messages of the claim
--                p_bundles  the bundles of a claim whose messages are not alike; null: they are alike
--   keys       the messages of some sets for each set and key, in the order of the sets and then of the numbers: the
--              number of the set, the hash of the key (null: none), the messages, and how many these are
--                p_lo, p_hi  the lowest number in the sets, and the number after the highest one
--   key_texts  the messages of a set that have a key, and their keys
--   matches    two sets: the messages of some ranges that match a topic and pass a condition (base/conditions.sql),
--              read in the order of the ranges; and those that were not examined
--                p_topic_regex, p_where  null: any message
--                p_max     end with this many; null: all
--                p_safely  call passes_safely()
--                p_until   examine none after this time, except the message p_lo; null: all
-- Columns: the parameters; the type of the result; whether all messages have numbers from %s to below %s; the
-- statements, which return: %1$I is the table, %2$s the payload as jsonb, %3$L the kind of the stream. (More than 60
-- lines: one list.)
create or replace function _pgqueue.stream_functions()
returns table (name text, parameters text, returns text, within text, statements text)
language sql immutable as $f$
    values
        ('payload', 'p_claim_id bigint, p_seq bigint, p_priority int, p_deliver_count int, p_saved jsonb',
         'pgqueue.received', 'p_seq >= %s and p_seq < %s', $q$
            return (p_claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, p_priority, p_deliver_count,
                    m.inserted_at, p_saved)::pgqueue.received from pgqueue.%1$I m where m.seq = p_seq;$q$),
        ('payloads', 'p_claim_id bigint, p_seqs int8multirange, p_priority int, p_bundles bigint[]',
         'setof pgqueue.received', 'lower(p_seqs) >= %s and upper(p_seqs) <= %s', $q$
            if p_bundles is null then
                return query
                select p_claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, p_priority, 1, m.inserted_at,
                       null::jsonb
                from unnest(p_seqs) g
                cross join lateral (select * from pgqueue.%1$I x where x.seq >= lower(g) and x.seq < upper(g)
                                    order by x.seq) m;
            else
                return query
                select p_claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, r.priority, r.deliver_count + 1,
                       m.inserted_at, r.note -> 'saved'
                from (select c.priority, c.deliver_count, c.note, g
                      from unnest(p_bundles) n (number)
                      cross join lateral (select * from pgqueue.consumer_messages m
                                          where m.bundle_no & 1048575 = n.number & 1048575 and m.bundle_no = n.number
                                          limit 1) c
                      cross join lateral unnest(c.seqs) g
                      order by case when c.lane < _pgqueue.lane_delayed() then c.lane end, c.arrival_no, lower(g)) r
                cross join lateral (select * from pgqueue.%1$I x where x.seq >= lower(r.g) and x.seq < upper(r.g)
                                    order by x.seq) m;
            end if;
            return;$q$),
        ('keys', 'p_sets int8multirange[], p_lo bigint, p_hi bigint',
         'pgqueue.messages_by_key', 'p_lo >= %s and p_hi <= %s', $q$
            return (array_agg(i), array_agg(key), array_agg(seqs), array_agg(n))::pgqueue.messages_by_key
            from (select i, key, range_agg(int8range(seq, seq + 1)) as seqs, count(*) as n
                  from (select s.i, m.seq, m.key
                        from unnest(p_sets) with ordinality s (seqs, i)
                        cross join lateral unnest(s.seqs) g
                        cross join lateral (select seq, hashtextextended(key, 0) as key from pgqueue.%1$I
                                            where seq >= lower(g) and seq < upper(g) and seq >= p_lo and seq < p_hi
                                            offset 0) m) e
                  group by i, key order by i, min(seq)) k;$q$),
        ('key_texts', 'p_seqs int8multirange',
         'pgqueue.key_texts', 'lower(p_seqs) >= %s and upper(p_seqs) <= %s', $q$
            return (array_agg(m.seq), array_agg(m.key))::pgqueue.key_texts
            from unnest(p_seqs) g
            cross join lateral (select seq, key from pgqueue.%1$I
                                where seq >= lower(g) and seq < upper(g) and seq >= lower(p_seqs)
                                  and seq < upper(p_seqs) offset 0) m
            where m.key is not null;$q$),
        ('matches', 'p_ranges int8range[], p_lo bigint, p_hi bigint, p_topic_regex text, p_where jsonpath, '
                    'p_max bigint, p_safely boolean, p_until timestamptz',
         'int8multirange[]', 'p_lo >= %s and p_hi <= %s', $q$
            return array[coalesce(range_agg(int8range(f.seq, f.seq + 1)) filter (where f.passes), '{}'),
                         coalesce(range_agg(int8range(f.seq, f.seq + 1)) filter (where f.passes is null), '{}')]
            from (select m.seq, m.passes
                  from unnest(p_ranges) g
                  cross join lateral (
                      select seq, case when clock_timestamp() > p_until and seq > p_lo then null else coalesce(
                                 (p_topic_regex is null or _pgqueue.words(key) ~ p_topic_regex)
                                 and (p_where is null
                                      or case when p_safely
                                              then _pgqueue.passes_safely(p_where, %3$L, key, headers, data)
                                              else _pgqueue.passes(p_where, key, headers, %2$s) end), false)
                             end as passes
                      from pgqueue.%1$I
                      where seq >= lower(g) and seq < upper(g) and seq >= p_lo and seq < p_hi
                      order by seq) m
                  where m.passes is not false
                  limit p_max) f;$q$)
$f$;

-- The name of a segment's table.
create or replace function _pgqueue.segment_name(p_stream_id int, p_segment int) returns text
language sql immutable parallel safe as $$
    select format('messages_%s_%s', p_stream_id, coalesce(p_segment::text, 'rest'))
$$;

-- The statements of a stream's function: one for each segment, and one for the whole stream.
--   p_within, p_statements  as in stream_functions()
create or replace function _pgqueue.by_segment(p_stream_id int, p_within text, p_statements text) returns text
language sql stable as $$
    select (select coalesce(string_agg(format(E'if %s then%s\n            end if;\n            ',
                                              format(p_within, g.lo, g.hi),
                                              format(p_statements, _pgqueue.segment_name(p_stream_id, g.segment),
                                                     d.data, s.kind)), '' order by g.lo desc), '')
            from pgqueue.segments g where g.stream_id = p_stream_id and not g.emptied)
        || format(p_statements, format('messages_%s', p_stream_id), d.data, s.kind)
    from pgqueue.streams s
    cross join lateral (select case s.kind when 'json' then 'data::jsonb' when 'text' then 'to_jsonb(data)'
                                           else 'null' end as data) d
    where s.stream_id = p_stream_id
$$;

-- Creates, or replaces, the functions of a stream. For a stream in segments they have a plan for each segment, used for
-- messages within one segment, as nearly always; a new segment replaces the functions.
create or replace function _pgqueue.make_stream_functions(p_stream_id int) returns void
language plpgsql as $$
declare
    v_made record;
begin
    for v_made in select * from _pgqueue.stream_functions() loop
        execute format(E'create or replace function _pgqueue.%s_%s(%s) returns %s\nlanguage plpgsql as $f$\nbegin\n%s\n'
                       'end $f$', v_made.name, p_stream_id, v_made.parameters, v_made.returns,
                       _pgqueue.by_segment(p_stream_id, v_made.within, v_made.statements));
        execute format('revoke all on function _pgqueue.%s_%s from public', v_made.name, p_stream_id);
    end loop;
end $$;

-- The names of the functions of a stream.
create or replace function _pgqueue.functions_of(p_stream_id int) returns text[]
language sql immutable as $$
    select array_agg(format('_pgqueue.%s_%s', name, p_stream_id)) from _pgqueue.stream_functions()
$$;

-- PL/pgSQL statements that find p_stream_id by binary search, and execute the stream's statement.
--   p_call  the statement; %s: the stream's id
create or replace function _pgqueue.by_stream(p_call text, p_from int, p_count int) returns text
language sql immutable as $$
    select case when p_count = 1 then format(p_call, p_from)
                else format(E'if p_stream_id <= %s then\n%s\nelse\n%s\nend if;', p_from + p_count / 2 - 1,
                            _pgqueue.by_stream(p_call, p_from, p_count / 2),
                            _pgqueue.by_stream(p_call, p_from + p_count / 2, p_count / 2)) end
$$;

-- Creates the functions that call those of a stream. The calls for the first 32 streams are static, so Postgres caches
-- their plans: parsing and planning one call takes a tenth of a small claim. A call finds its stream in five or six
-- comparisons, because PL/pgSQL prepares each again in each transaction. The functions never change: PL/pgSQL looks up
-- a called function only when it is reached, so creating or dropping a stream replaces nothing that a claim uses. More
-- static calls would cost each new session more than they save.
do $do$
declare
    v_made record;
    v_args text;
    v_call text;  -- of the function of a stream that is known
    v_text text;  -- of others
    v_set  boolean;
begin
    for v_made in select * from _pgqueue.stream_functions() loop
        v_args := (select string_agg(a[1], ', ') from regexp_matches(v_made.parameters, '\mp_\w+', 'g') a);
        v_text := 'select * from _pgqueue.' || v_made.name || '_%s('
            || (select string_agg('$' || n, ', ' order by n) from generate_series(1, regexp_count(v_args, '\mp_')) n)
            || ')';
        v_set := v_made.returns ~ '^setof ';
        v_call := case when v_set then 'return query select * from ' else 'return ' end
            || '_pgqueue.' || v_made.name || '_%s(' || v_args || ');';
        execute format($q$
            create or replace function _pgqueue.%1$s(p_stream_id int, %2$s)
            returns %3$s
            language plpgsql
            as $f$
            declare
                v_row %4$s;
            begin
                if p_stream_id <= 16 then
                %5$s
                elsif p_stream_id <= 32 then
                %6$s
                else
                %7$s execute format(%8$L, p_stream_id) %9$s using %10$s;
                end if;
                return %11$s;
            end $f$ $q$,
            v_made.name, v_made.parameters, v_made.returns, regexp_replace(v_made.returns, '^setof ', ''),
            _pgqueue.by_stream(v_call, 1, 16), _pgqueue.by_stream(v_call, 17, 16),
            case when v_set then 'return query' else '' end, v_text,
            case when v_set then '' else 'into v_row' end, v_args, case when v_set then '' else 'v_row' end);
    end loop;
end $do$;
