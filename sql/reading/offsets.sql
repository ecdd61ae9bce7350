-- Offsets of offset readers, which read a stream without claiming. An offset is the set of publications that such a
-- reader has read; the reader stores it.
--
-- All publications below next were read, or are dead, except those in the gaps of the offset. Of publications that a
-- limit or a start position has cut, the offset has the number of messages that were read: the first ones by seq. The
-- messages between two offsets are the difference of two sets, and so never change.

-- An offset of an offset reader.
do $$
begin
    if to_regtype('pgqueue.reading_offset') is null then
        create type pgqueue.reading_offset as (
            next_publication bigint, old_ids int8multirange, old_publishers text[], new_ids int8multirange,
            new_publishers text[], cut_publications bigint[], cut_messages bigint[], messages bigint,
            in_archive boolean);  -- its reader also reads the archive
    end if;
end $$;

-- An offset as a JSON value.
create or replace function _pgqueue.offset_json(p_stream pgqueue.streams, p_offset pgqueue.reading_offset) returns jsonb
language plpgsql stable as $$
begin
    return jsonb_build_object('stream', p_stream.name, 'incarnation', p_stream.incarnation,
                              'next', p_offset.next_publication, 'messages', p_offset.messages)
        || case when p_offset.cut_publications = '{}' then '{}' else (
               select jsonb_build_object('cut', jsonb_agg(jsonb_build_array(p, n) order by i))
               from unnest(p_offset.cut_publications, p_offset.cut_messages) with ordinality c (p, n, i)) end
        || case when p_offset.old_ids = '{}' then '{}' else (
               select jsonb_build_object('gaps', jsonb_agg(jsonb_build_object('ids', ids::text, 'publishers', who)
                                                           order by age))
               from (values (1, p_offset.old_ids, p_offset.old_publishers),
                            (2, p_offset.new_ids, p_offset.new_publishers)) g (age, ids, who)
               where ids <> '{}') end;
end $$;

-- An offset as a JSON value for the caller. First it makes all commits that the offset has read durable, also those
-- with synchronous_commit = off: after a crash, the numbers of lost publications would be assigned again. Before
-- PostgreSQL 17, they are durable when the caller's transaction ends.
--   p_known  an offset that the caller passed, and whose publications are durable already
create or replace function _pgqueue.durable_offset(p_stream pgqueue.streams, p_offset pgqueue.reading_offset,
                                                   p_known pgqueue.reading_offset) returns jsonb
language plpgsql as $$
begin
    if p_offset is not distinct from p_known or pg_is_in_recovery()
       or pg_current_wal_insert_lsn() <= pg_current_wal_flush_lsn() then
        return _pgqueue.offset_json(p_stream, p_offset);
    elsif current_setting('server_version_num')::int >= 170000 then
        perform pg_logical_emit_message(false, 'pgqueue', ''::text, true);
    else
        perform _pgqueue.commit_durably();
        perform pg_logical_emit_message(true, 'pgqueue', ''::text);  -- a commit without WAL is not flushed
    end if;
    return _pgqueue.offset_json(p_stream, p_offset);
end $$;

-- The publication ids below the next one that an offset has not read.
create or replace function _pgqueue.unread(p_offset pgqueue.reading_offset) returns int8multirange
language sql immutable parallel safe as $$ select p_offset.old_ids + p_offset.new_ids $$;

-- The publication ids that an offset has not read, including future ones.
create or replace function _pgqueue.unread_from(p_offset pgqueue.reading_offset) returns int8multirange
language sql immutable parallel safe as $$
    select _pgqueue.unread(p_offset) + int8multirange(int8range(p_offset.next_publication, null))
$$;

-- Raises PQ003: a value is not an offset.
create or replace function _pgqueue.refuse_offset(p_argument text, p_what text, p_offset jsonb) returns void
language plpgsql as $$
begin
    raise exception '% is not an offset of a stream: %', p_argument, p_what
        using errcode = 'PQ003', column = p_argument,
              detail = format('The value is %s.', coalesce(left(p_offset::text, 200), 'null')),
              hint = 'Pass an offset that read, read_to or start_offset returned.';
end $$;

-- A whole number in an offset. Errors: PQ003.
create or replace function _pgqueue.offset_number(p_argument text, p_name text, p_value jsonb, p_least bigint,
                                                  p_offset jsonb) returns bigint
language plpgsql as $$
begin
    if jsonb_typeof(p_value) is distinct from 'number'
       or (p_value::numeric between p_least and 4611686018427387904) is not true
       or p_value::numeric <> trunc(p_value::numeric) then
        perform _pgqueue.refuse_offset(p_argument,
                                       format('its %s is %s', p_name, coalesce(left(p_value::text, 50), 'missing')),
                                       p_offset);
    end if;
    return p_value::numeric::bigint;
end $$;

-- Reads an offset of a stream from JSON.
--   p_archive  whether its reader also reads the archive
-- Errors: PQ003 when the value is not an offset, PQ005 when it belongs to another stream or incarnation, or is beyond
-- the last publication.
create or replace function _pgqueue.parse_offset(p_stream pgqueue.streams, p_argument text, p_offset jsonb,
                                                 p_archive boolean default false) returns pgqueue.reading_offset
language plpgsql as $$
declare
    v_offset pgqueue.reading_offset := row(1, '{}', null, '{}', null, '{}', '{}', 0,
                                              p_archive is true)::pgqueue.reading_offset;
    v_gaps   jsonb := p_offset -> 'gaps';
begin
    if jsonb_typeof(p_offset) is distinct from 'object' then
        perform _pgqueue.refuse_offset(p_argument, 'it is not an object', p_offset);
    elsif jsonb_typeof(p_offset -> 'stream') is distinct from 'string'
          or jsonb_typeof(p_offset -> 'incarnation') is distinct from 'string' then
        perform _pgqueue.refuse_offset(p_argument, 'it has no stream or incarnation', p_offset);
    end if;
    v_offset.next_publication := _pgqueue.offset_number(p_argument, 'next', p_offset -> 'next', 1, p_offset);
    v_offset.messages := _pgqueue.offset_number(p_argument, 'messages', p_offset -> 'messages', 0, p_offset);
    if p_offset ? 'cut' then
        if not p_offset -> 'cut' @? 'strict $ ? (@.type() == "array" && @.size() > 0 '
                                    '&& !exists (@[*] ? (@.type() != "array" || @.size() != 2)))' then
            perform _pgqueue.refuse_offset(p_argument, 'its cut is not a list of pairs', p_offset);
        end if;
        select array_agg(_pgqueue.offset_number(p_argument, 'cut', c -> 0, 1, p_offset)),
               array_agg(_pgqueue.offset_number(p_argument, 'cut', c -> 1, 1, p_offset))
        into v_offset.cut_publications, v_offset.cut_messages
        from jsonb_array_elements(p_offset -> 'cut') c;
    end if;
    if p_offset ? 'gaps' then
        begin
            select * into v_offset.old_ids, v_offset.old_publishers
            from jsonb_to_record(v_gaps -> 0) g (ids int8multirange, publishers text[])
            where jsonb_array_length(v_gaps) <= 2;
            if jsonb_array_length(v_gaps) = 2 then
                select * into v_offset.new_ids, v_offset.new_publishers
                from jsonb_to_record(v_gaps -> 1) g (ids int8multirange, publishers text[]);
            end if;
        exception when data_exception then
            v_offset.old_ids := null;
        end;
        if (v_offset.old_ids <> '{}' and _pgqueue.unread(v_offset)
                                         <@ int8multirange(int8range(1, v_offset.next_publication))) is not true then
            perform _pgqueue.refuse_offset(
                p_argument, 'its gaps are not a list of one or two sets of numbers below next', p_offset);
        end if;
    end if;
    if exists (select from unnest(v_offset.cut_publications) c group by c
               having count(*) > 1 or c > v_offset.next_publication
                   or (c < v_offset.next_publication and not _pgqueue.unread(v_offset) @> c)) then
        perform _pgqueue.refuse_offset(p_argument, 'its cut was read, is beyond next, or is there twice', p_offset);
    end if;
    perform _pgqueue.check_incarnation(p_stream, p_argument, p_offset, v_offset);
    return v_offset;
end $$;

-- Raises PQ005 unless an offset belongs to the current stream: it has the same incarnation; or recover() ended its
-- incarnation, and the offset has read only earlier publications.
create or replace function _pgqueue.check_incarnation(p_stream pgqueue.streams, p_argument text, p_json jsonb,
                                                      p_offset pgqueue.reading_offset) returns void
language plpgsql as $$
declare
    v_ended pgqueue.incarnations;
begin
    if p_json ->> 'stream' <> p_stream.name then
        raise exception '% belongs to stream %, not to stream %', p_argument,
                        quote_literal(left(p_json ->> 'stream', 210)), quote_literal(p_stream.name)
            using errcode = 'PQ005', column = p_argument, hint = 'Pass an offset of this stream.';
    end if;
    if p_json ->> 'incarnation' <> p_stream.incarnation::text then
        -- each restore since then has its own last publication
        select e.incarnation, e.stream_id, min(l.last_publication), e.ended_at into v_ended
        from pgqueue.incarnations e
        join pgqueue.incarnations l on l.stream_id = e.stream_id and l.ended_no >= e.ended_no
        where e.stream_id = p_stream.stream_id and e.incarnation::text = p_json ->> 'incarnation'
        group by e.incarnation;
        if not found then
            raise exception '% belongs to another stream named %, in another database or dropped since',
                            p_argument, quote_literal(p_stream.name)
                using errcode = 'PQ005', column = p_argument,
                      hint = 'Connect to the database of this offset, or start again: '
                             'at "earliest", "latest" or a timestamp.';
        elsif p_offset.next_publication > v_ended.last_publication + 1
              or v_ended.last_publication < any (p_offset.cut_publications) then
            raise exception '% is beyond the state to which the database was restored at %: '
                            'it has read publications up to %, and % was the last one that was restored',
                            p_argument, v_ended.ended_at, p_offset.next_publication - 1, v_ended.last_publication
                using errcode = 'PQ005', column = p_argument,
                      hint = 'The later publications are lost, and their numbers are assigned to other messages. '
                             'To read messages that were sent after the restore, start at that time.';
        end if;
    elsif p_offset.next_publication > _pgqueue.last_publication_id(p_stream.stream_id) + 1
          and not pg_is_in_recovery() then
        raise exception '% is ahead of the database: it has read publications up to %, and the last one is %',
                        p_argument, p_offset.next_publication - 1, _pgqueue.last_publication_id(p_stream.stream_id)
            using errcode = 'PQ005', column = p_argument,
                  hint = 'The database was restored to an earlier state, or a standby without the latest commits was '
                         'promoted. Call recover(), and restart the reader of this offset.';
    end if;
end $$;

-- The offset at a position, for an offset reader that has read up to another offset: publications that it has read
-- count as read. So the result is the position's offset or a later one, even if each of the two offsets treats other
-- publications as dead.
create or replace function _pgqueue.merge_offsets(p_from pgqueue.reading_offset, p_to pgqueue.reading_offset)
returns pgqueue.reading_offset language plpgsql as $$
declare
    v_unread int8multirange := _pgqueue.unread_from(p_to) * _pgqueue.unread_from(p_from);
begin
    select coalesce(array_agg(c.id order by c.id), '{}'), coalesce(array_agg(c.n order by c.id), '{}')
    into p_from.cut_publications, p_from.cut_messages
    from (select id, max(n) as n
          from unnest(p_from.cut_publications || p_to.cut_publications,
                      p_from.cut_messages || p_to.cut_messages) b (id, n)
          where v_unread @> id
          group by id) c;
    p_from.next_publication := greatest(p_from.next_publication, p_to.next_publication);
    p_from.old_ids := v_unread * int8multirange(int8range(1, p_from.next_publication));
    p_from.old_publishers := null;  -- not known, as in a start offset
    p_from.new_ids := '{}';
    p_from.new_publishers := null;
    return p_from;
end $$;

-- The publications that the second of two offsets has cut, and that have messages between the offsets.
create or replace function _pgqueue.cut_between(p_from pgqueue.reading_offset, p_to pgqueue.reading_offset)
returns int8multirange language sql immutable as $$
    select coalesce(range_agg(int8range(t.id, t.id, '[]')), '{}')
    from (select * from unnest(p_to.cut_publications, p_to.cut_messages)
          except select * from unnest(p_from.cut_publications, p_from.cut_messages)) t (id, n)
$$;

-- Raises PQ010 when some of the messages between two offsets were trimmed. The caller checks after it has read them.
-- (Messages are recorded as trimmed before they are deleted, see operate/retention.sql.)
create or replace function _pgqueue.check_not_trimmed(p_stream pgqueue.streams, p_argument text,
                                                      p_from pgqueue.reading_offset, p_to pgqueue.reading_offset)
returns void language plpgsql as $$
declare
    v_gone int8multirange := (_pgqueue.trimmed(p_stream.stream_id, p_from.in_archive)).o_publications;
begin
    if v_gone = '{}' then
        return;
    end if;
    v_gone := v_gone * _pgqueue.unread_from(p_from)
              - (_pgqueue.unread_from(p_to) - _pgqueue.cut_between(p_from, p_to));
    if v_gone <> '{}' then
        v_gone := v_gone - _pgqueue.trimmed_hidden(p_stream.stream_id);
    end if;
    if v_gone <> '{}' then
        raise exception 'retention has overtaken %: % of stream % trimmed before % read',
                        p_argument, _pgqueue.counted(_pgqueue.cardinality(v_gone), 'publication'),
                        quote_literal(p_stream.name)
                        || case _pgqueue.cardinality(v_gone) when 1 then ' was' else ' were' end,
                        case _pgqueue.cardinality(v_gone) when 1 then 'it was' else 'they were' end
            using errcode = 'PQ010', column = p_argument,
                  hint = case when not p_from.in_archive
                                   and v_gone <@ (_pgqueue.trimmed(p_stream.stream_id)).o_archive
                              then 'They are in the archive: Spark reads them without a consumer.'
                              else 'This reader has lost these messages. Start again, at "earliest" for all stored '
                                   'messages. To keep messages longer, see set_retention.' end;
    end if;
end $$;

-- The messages before the cut, of publications that an offset has cut.
create or replace function _pgqueue.before_cut(p_stream_id int, p_offset pgqueue.reading_offset) returns int8multirange
language sql stable as $$
    select coalesce(range_agg(_pgqueue.below(
               p.seqs, _pgqueue.bound_of(p.seqs, least(c.n, _pgqueue.cardinality(p.seqs))))), '{}')
    from unnest(p_offset.cut_publications, p_offset.cut_messages) c (publication_id, n)
    cross join lateral (select range_agg(seqs) as seqs
                        from _pgqueue.readable(p_stream_id, p_offset.in_archive, c.publication_id,
                                               c.publication_id + 1) x
                        where x.consumers is null) p
    where p.seqs is not null  -- trimmed, see check_not_trimmed()
$$;

-- The messages between two offsets.
create or replace function _pgqueue.messages_between(p_stream_id int, p_from pgqueue.reading_offset,
                                                     p_to pgqueue.reading_offset) returns int8multirange
language plpgsql stable as $$
declare
    v_seqs int8multirange;
begin
    with publication as materialized (
        select p.message_count, p.seqs
        from unnest(_pgqueue.unread_from(p_from) - _pgqueue.unread_from(p_to)) r
        cross join lateral (select * from _pgqueue.readable(p_stream_id, p_to.in_archive, lower(r), upper(r))
                            offset 0) p  -- or else, without statistics, all of the stream is read once and joined
        where p.consumers is null
    ), total as (
        select coalesce(sum(message_count), 0) as messages, min(lower(seqs)) as lo, max(upper(seqs)) as hi
        from publication
    )
    select case when messages = 0 then '{}'
                when hi - lo = messages then int8multirange(int8range(lo, hi))
                else (select range_agg(seqs) from publication) end
    into v_seqs
    from total;
    if p_to.cut_publications <> '{}' then
        v_seqs := v_seqs + _pgqueue.before_cut(p_stream_id, p_to);
    end if;
    if p_from.cut_publications <> '{}' then
        v_seqs := v_seqs - _pgqueue.before_cut(p_stream_id, p_from);
    end if;
    return v_seqs;
end $$;
