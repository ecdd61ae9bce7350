-- Export and import: messages as lines of JSON, out of a stream and into one.
--
-- A line is an object with those of these members that the message has: seq, key, data (the payload, as text) or
-- data_base64 (of a binary stream), headers, priority, deliver_at, expires_at, consumers (to which alone it was
-- published), inserted_at, and dedup_key, which identifies the message and its stream.

-- Returns the next messages of a stream as lines of JSON, in the order of publication.
--   p_after      the place of the last line before; null: from the first on
--   p_max        lines at most; null: any number
--   p_max_bytes  bytes of payloads at most, but one line at least; null: any number
-- Returns a row per line: the line, and its place, from which to go on. No row: there are no more of the messages that
-- were published when the first call was made. A row without a line: the messages there were trimmed meanwhile.
-- Errors: PQ001, PQ003. Locks: none. (More than 60 lines: one statement, and so one snapshot.)
create or replace function pgqueue.export_lines(p_stream text, p_after bigint[] default null, p_max int default null,
                                                p_max_bytes bigint default null)
returns table (line text, place bigint[])
language plpgsql
as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_last   bigint := coalesce(p_after[3],
                                (select max(publication_id) from pgqueue.publications
                                 where stream_id = v_stream.stream_id));
begin
    if p_max < 1 or p_max_bytes < 1 then
        raise exception 'p_max and p_max_bytes are null or at least 1, not % and %',
            coalesce(p_max::text, 'null'), coalesce(p_max_bytes::text, 'null')
            using errcode = 'PQ003', column = 'p_max, p_max_bytes';
    elsif cardinality(p_after) <> 3 or array_position(p_after, null) is not null then
        raise exception 'p_after is null or a place that this function returned'
            using errcode = 'PQ003', column = 'p_after';
    end if;
    return query execute format($q$
        with published as materialized (
            select p.publication_id, p.priority, p.deliver_at, p.expires_at, p.consumers,
                   case when p.publication_id = $1[1] then p.seqs * int8multirange(int8range($1[2] + 1, null))
                        else p.seqs end as seqs
            from pgqueue.publications p
            where p.stream_id = $5 and p.publication_id >= coalesce($1[1], 0) and p.publication_id <= $2
            order by p.publication_id fetch first ($3 + 1) rows with ties
        ), ranged as (
            select p.*, lower(g) as lo, upper(g) as hi from published p cross join lateral unnest(p.seqs) g
        ), placed as (
            select r.*,
                   sum(r.hi - r.lo) over (order by r.publication_id, r.lo rows unbounded preceding)
                   - (r.hi - r.lo) as ahead
            from ranged r
        ), stored as (
            select p.publication_id, p.priority, p.deliver_at, p.expires_at, p.consumers, m.*
            from placed p
            cross join lateral (select x.seq, x.key, x.data, x.data_bytes, x.headers, x.inserted_at
                                from pgqueue.messages_%s x
                                where x.seq >= p.lo and x.seq < p.hi order by x.seq limit $3) m
            where p.ahead < $3
            order by p.publication_id, m.seq limit $3
        ), measured as (
            select s.*,
                   sum(s.bytes) over (order by s.publication_id, s.seq rows unbounded preceding)
                   - s.bytes as bytes_before
            from (select s.*, coalesce(octet_length(s.data), octet_length(s.data_bytes)) as bytes from stored s) s
        )
        select concat('{"seq":', m.seq, ',"key":' || to_json(m.key)::text, ',"data":' || to_json(m.data)::text,
                      ',"data_base64":"' || translate(encode(m.data_bytes, 'base64'), E'\n', '') || '"',
                      ',"headers":' || m.headers::text,
                      ',"priority":' || nullif(m.priority, 0)::text,
                      ',"deliver_at":'
                      || case when m.deliver_at > clock_timestamp() then to_json(m.deliver_at)::text end,
                      ',"expires_at":' || to_json(m.expires_at)::text,
                      ',"consumers":' || to_json(_pgqueue.consumer_names(m.consumers))::text,
                      ',"inserted_at":', to_json(m.inserted_at)::text,
                      ',"dedup_key":"', $6, '/', m.seq, '"}'),
               array[m.publication_id, m.seq, $2]
        from measured m where m.bytes_before < $4 or $4 is null
        order by m.publication_id, m.seq $q$, v_stream.stream_id)
    using p_after, v_last, least(p_max, 2147483646), p_max_bytes, v_stream.stream_id, v_stream.incarnation;
    if not found then
        select array[min(publication_id), 0, v_last] into place from pgqueue.publications
        where stream_id = v_stream.stream_id and publication_id > coalesce(p_after[1], 0) and publication_id <= v_last;
        if place[1] is not null then
            return next;
        end if;
    end if;
end $$;

-- Publishes messages that are lines of JSON, together and in their order, in the caller's transaction.
-- Where the stream has a dedup_window, a line whose dedup_key was sent within it is passed over: so the same lines come
-- in once. Without a dedup_window, dedup_key is ignored; seq and inserted_at always are.
--   p_lines  objects as export_lines writes them; unknown members and empty lines are passed over. data may be any
--            JSON: what is no text goes as it is written
--   p_first  the number of the first line, for errors
-- Returns how many messages were sent, and how many lines were passed over as duplicates.
-- Errors: PQ001; PQ002, PQ003 and PQ004 with the number of the line. Locks and two-phase commit: as send_batch.
-- (More than 60 lines: its statement names each member of a line.)
create or replace function pgqueue.import_lines(p_stream text, p_lines text[], p_first bigint default 1,
                                                out sent bigint, out duplicates bigint)
language plpgsql
as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_before bigint := _pgqueue.last_seq(v_stream.stream_id);
    v_seqs   bigint[] := '{}';
    v_group  record;
    v_state  text;
    v_hint   text;
    v_column text;
begin
    for v_group in
        with given as (
            select l.i, r.*
            from unnest(p_lines) with ordinality l (line, i)
            cross join lateral json_to_record(l.line::json) r (key text, data text, data_base64 text, headers jsonb,
                                                               priority int, deliver_at timestamptz,
                                                               expires_at timestamptz, consumers text[], dedup_key text)
            where l.line ~ E'\\S'
        ), grouped as (
            select g.*, row_number() over (order by g.i)
                        - row_number()
                            over (partition by g.priority, g.deliver_at, g.expires_at, g.consumers order by g.i) as run
            from given g
        )
        select coalesce(g.priority, 0) as priority, g.deliver_at, g.expires_at, g.consumers, min(g.i) as first,
               array_agg(g.i order by g.i) as numbers,
               array_agg(case v_stream.kind when 'binary' then null else g.data end order by g.i) as data,
               case v_stream.kind
                    when 'binary' then array_agg(decode(g.data_base64, 'base64') order by g.i) end as data_bytes,
               array_agg(g.key order by g.i) as keys, array_agg(g.headers order by g.i) as headers,
               array_agg(g.dedup_key order by g.i) as dedup_keys
        from grouped g group by g.run, g.priority, g.deliver_at, g.expires_at, g.consumers order by min(g.i)
    loop
        if array_position(v_group.data_bytes, null) is not null
            or (v_group.data_bytes is null and array_position(v_group.data, null) is not null) then
            raise exception 'there is no %, which is what stream % of kind % takes',
                case v_stream.kind when 'binary' then 'data_base64' else 'data' end,
                            quote_literal(p_stream), v_stream.kind using errcode = 'PQ003', column = 'p_lines';
        end if;
        v_seqs := v_seqs
            || array(select pgqueue.send_batch(p_stream, case when v_group.data_bytes is null then v_group.data end,
                                               v_group.keys, v_group.headers, v_group.priority, v_group.deliver_at,
                                               v_group.consumers, v_group.data_bytes,
                                               case when v_stream.dedup_window is not null then v_group.dedup_keys end,
                                               v_group.expires_at));
    end loop;
    sent := (select count(distinct s) from unnest(v_seqs) s where s > v_before);
    duplicates := cardinality(v_seqs) - sent;
exception when data_exception or sqlstate 'PQ002' or sqlstate 'PQ003' or sqlstate 'PQ004' then
    if cardinality(p_lines) > 1 then  -- one line at a time finds the wrong one
        perform pgqueue.import_lines(p_stream, array[l.line], p_first + l.i - 1)
        from unnest(p_lines) with ordinality l (line, i);
        raise;
    end if;
    get stacked diagnostics v_state = returned_sqlstate, v_hint = pg_exception_hint, v_column = column_name;
    raise exception 'line %: %', p_first,
        case when v_state like '22%' then 'it is no JSON object with what a message has: ' else '' end || sqlerrm
        using errcode = case when v_state like '22%' then 'PQ003' else v_state end,
            column = coalesce(nullif(v_column, ''), 'p_lines'),
              hint = coalesce(nullif(v_hint, ''), 'Nothing was sent.');
end $$;
