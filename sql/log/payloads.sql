-- Reading the payloads of a claim: each stream has its own functions for that.

do $$
begin
    if to_regtype('pgqueue.received') is null then
        create type pgqueue.received as (
            claim_id bigint, seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int,
            deliver_count int, inserted_at timestamptz, saved jsonb);
    end if;
end $$;

-- The name of a segment's table.
create or replace function _pgqueue.segment_name(p_stream_id int, p_segment int) returns text
language sql immutable parallel safe as $$
    select format('messages_%s_%s', p_stream_id, coalesce(p_segment::text, 'rest'))
$$;

-- PL/pgSQL statements that read messages of a stream and return: one for each segment, and one for the whole stream.
--   p_within  the condition that all messages have numbers from %s to below %s
--   p_query   the statements for the table %I
create or replace function _pgqueue.by_segment(p_stream_id int, p_within text, p_query text) returns text
language sql stable as $$
    select concat(string_agg(format(E'if %s then%s\n            end if;\n            ', format(p_within, lo, hi),
                                    format(p_query, _pgqueue.segment_name(stream_id, segment))), '' order by lo desc),
                  format(p_query, format('messages_%s', p_stream_id)))
    from pgqueue.segments where stream_id = p_stream_id
$$;

-- Creates, or replaces, the functions of a stream that read the payload of a message, payload_<stream_id>(), and the
-- payloads of a claim in the order of delivery, payloads_<stream_id>(). Each stream has its own functions, whose plans
-- are cached: planning the query costs more than the rest of a small claim, and a plan over the parent of all
-- partitions would lock all of them. For a stream in segments the functions have a plan for each segment, used by
-- claims within one segment, as nearly all are; a new segment replaces the functions. The query sorts the ranges, not
-- the messages: receive can use only nested loops (function_settings.sql), which preserve the order of the ranges.
create or replace function _pgqueue.make_payloads(p_stream_id int) returns void
language plpgsql as $$
declare
    -- the ranges of the messages, in the order of delivery, with the columns of their bundles
    v_unlike text := $q$
                  select c.priority, c.deliver_count + 1 as deliver_count, c.note, g
                  from unnest(p_bundles) n (number)
                  cross join lateral (select * from pgqueue.consumer_messages m
                                      where m.bundle_no & 1048575 = n.number & 1048575 and m.bundle_no = n.number
                                      limit 1) c
                  cross join lateral unnest(c.seqs) g
                  order by case when c.lane < _pgqueue.lane_delayed() then c.lane end, c.arrival_no, lower(g)$q$;
    v_alike  text := $q$
                  select p_priority as priority, 1 as deliver_count, null::jsonb as note, g from unnest(p_seqs) g$q$;
    v_bounds text := case when exists (select from pgqueue.segments where stream_id = p_stream_id)
                          then 'select min(lower(r.g)), max(upper(r.g)) into v_lo, v_hi from (%s) r;' else '' end;
    v_within text := 'v_lo >= %s and v_hi <= %s';
    v_query  text := $q$
            return query
            select p_claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, r.priority, r.deliver_count,
                   m.inserted_at, r.note -> 'saved'
            from (%s) r
            cross join lateral (select * from pgqueue.%%I x where x.seq >= lower(r.g) and x.seq < upper(r.g)
                                order by x.seq) m;
            return;$q$;
begin
    execute format($q$
        create or replace function _pgqueue.payloads_%s(p_claim_id bigint, p_seqs int8multirange, p_priority int,
                                                        p_bundles bigint[])
        returns setof pgqueue.received
        language plpgsql
        as $f$
        declare
            v_lo bigint;
            v_hi bigint;
        begin
            if p_bundles is null then
            %s
            %s
            end if;
            %s
            %s
        end $f$ $q$,
        p_stream_id, format(v_bounds, v_alike), _pgqueue.by_segment(p_stream_id, v_within, format(v_query, v_alike)),
        format(v_bounds, v_unlike), _pgqueue.by_segment(p_stream_id, v_within, format(v_query, v_unlike)));
    execute format($q$
        create or replace function _pgqueue.payload_%s(p_claim_id bigint, p_seq bigint, p_priority int,
                                                       p_deliver_count int, p_saved jsonb) returns pgqueue.received
        language plpgsql
        as $f$
        begin
            %s
        end $f$ $q$,
        p_stream_id, _pgqueue.by_segment(p_stream_id, 'p_seq >= %s and p_seq < %s', $q$
            return (p_claim_id, m.seq, m.key, m.data, m.data_bytes, m.headers, p_priority, p_deliver_count,
                    m.inserted_at, p_saved)::pgqueue.received from pgqueue.%I m where m.seq = p_seq;$q$));
    execute format('revoke all on function _pgqueue.payloads_%1$s, _pgqueue.payload_%1$s from public', p_stream_id);
end $$;

-- PL/pgSQL statements that find p_stream_id by binary search, and execute the stream's statement.
--   p_call  the statement; %s: the stream's id
create or replace function _pgqueue.by_stream(p_call text, p_from int, p_count int) returns text
language sql immutable as $$
    select case when p_count = 1 then format(p_call, p_from)
                else format(E'if p_stream_id <= %s then\n%s\nelse\n%s\nend if;', p_from + p_count / 2 - 1,
                            _pgqueue.by_stream(p_call, p_from, p_count / 2),
                            _pgqueue.by_stream(p_call, p_from + p_count / 2, p_count / 2)) end
$$;

-- Creates the functions that read the payloads of a claim, payloads(), and of a claim of one message, payload(): a row
-- costs less than a set of rows. They call the stream's own function. The calls for the first 32 streams are static, so
-- Postgres caches their plans: parsing and planning one call takes a tenth of a small claim. A call finds its stream in
-- five or six comparisons, because PL/pgSQL prepares each again in each transaction. The functions never change:
-- PL/pgSQL looks up a called function only when it is reached, so creating or dropping a stream replaces nothing that a
-- claim uses. More static calls would cost each new session more than they save.
--   p_seqs, p_seq, p_priority, p_deliver_count, p_saved  the messages of a claim, and their common columns
--   p_bundles  the bundles of a claim whose messages are not alike; null: they are alike
do $do$
declare
    v_payloads text := 'return query select * from _pgqueue.payloads_%s(p_claim_id, p_seqs, p_priority, p_bundles);';
    v_payload  text := 'return _pgqueue.payload_%s(p_claim_id, p_seq, p_priority, p_deliver_count, p_saved);';
begin
    execute format($q$
        create or replace function _pgqueue.payloads(p_stream_id int, p_claim_id bigint, p_seqs int8multirange,
                                                     p_priority int, p_bundles bigint[])
        returns setof pgqueue.received
        language plpgsql
        as $f$
        begin
            if p_stream_id <= 16 then
            %s
            elsif p_stream_id <= 32 then
            %s
            else
            return query execute format('select * from _pgqueue.payloads_%%s($1, $2, $3, $4)', p_stream_id)
                using p_claim_id, p_seqs, p_priority, p_bundles;
            end if;
        end $f$ $q$,
        _pgqueue.by_stream(v_payloads, 1, 16), _pgqueue.by_stream(v_payloads, 17, 16));
    execute format($q$
        create or replace function _pgqueue.payload(p_stream_id int, p_claim_id bigint, p_seq bigint, p_priority int,
                                                    p_deliver_count int, p_saved jsonb)
        returns pgqueue.received
        language plpgsql
        as $f$
        declare
            v_row pgqueue.received;
        begin
            if p_stream_id <= 16 then
            %s
            elsif p_stream_id <= 32 then
            %s
            end if;
            execute format('select * from _pgqueue.payload_%%s($1, $2, $3, $4, $5)', p_stream_id)
                into v_row using p_claim_id, p_seq, p_priority, p_deliver_count, p_saved;
            return v_row;
        end $f$ $q$,
        _pgqueue.by_stream(v_payload, 1, 16), _pgqueue.by_stream(v_payload, 17, 16));
end $do$;
