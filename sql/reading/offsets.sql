-- Offsets of offset readers, which read a stream without claiming. An offset is the set of publications that such a
-- reader has read; the reader keeps it.
--
-- An offset says: all publications below next were read, or are dead, except those in its gaps. Of some publications
-- that a limit or a start has cut, the first messages by seq were read, and the offset says how many. What lies
-- between two offsets is the difference of two sets, and so the same for ever.

-- An offset of an offset reader, which reads a stream without claiming.
do $$
begin
    if to_regtype('pgqueue.reading_offset') is null then
        create type pgqueue.reading_offset as (
            next_publication bigint, old_ids int8multirange, old_publishers text[], new_ids int8multirange,
            new_publishers text[], cut_publications bigint[], cut_messages bigint[], messages bigint,
            in_archive boolean);  -- its reader reads the archive, too
    end if;
end $$;

-- An offset as a JSON value.
create or replace function _pgqueue.offset_json(p_stream pgqueue.streams, p_offset pgqueue.reading_offset) returns jsonb
language plpgsql stable as $$
begin
    return jsonb_build_object('stream', p_stream.name, 'incarnation', p_stream.incarnation, 'next',
                              p_offset.next_publication, 'messages', p_offset.messages)
        || case when p_offset.cut_publications = '{}' then '{}'
                else jsonb_build_object('cut', (select jsonb_agg(jsonb_build_array(p, n) order by i)
                                                from unnest(p_offset.cut_publications,
                                                            p_offset.cut_messages) with ordinality c (p, n, i))) end
        || case when p_offset.old_ids = '{}' then '{}'
                else jsonb_build_object('gaps', jsonb_build_array(
                         jsonb_build_object('ids', p_offset.old_ids::text, 'publishers',
                                            to_jsonb(p_offset.old_publishers)))
                     || case when p_offset.new_ids = '{}' then '[]'
                             else jsonb_build_array(jsonb_build_object('ids', p_offset.new_ids::text, 'publishers',
                                                                       to_jsonb(p_offset.new_publishers))) end)
           end;
end $$;

-- Makes what the caller has seen be on disk before it leaves the database, also what others committed with
-- synchronous_commit = off: else a crash forgets it, and its numbers are given out again. Before PostgreSQL 17, what
-- leaves an open transaction is on disk when that transaction ends. Where everything is on disk, this costs nothing.
create or replace function _pgqueue.see_durably() returns void
language plpgsql as $$
begin
    if pg_is_in_recovery() or pg_current_wal_insert_lsn() <= pg_current_wal_flush_lsn() then
        return;
    elsif current_setting('server_version_num')::int >= 170000 then
        perform pg_logical_emit_message(false, 'pgqueue', ''::text, true);
    else
        perform _pgqueue.commit_durably();
        perform pg_logical_emit_message(true, 'pgqueue', ''::text);  -- a commit that writes nothing waits for no disk
    end if;
end $$;

-- An offset as a JSON value that leaves the database: a crash does not forget what it has read.
--   p_known  the caller has given this one: it left before
create or replace function _pgqueue.hand_out(p_stream pgqueue.streams, p_offset pgqueue.reading_offset,
                                             p_known pgqueue.reading_offset) returns jsonb
language plpgsql as $$
begin
    if p_offset is distinct from p_known then
        perform _pgqueue.see_durably();
    end if;
    return _pgqueue.offset_json(p_stream, p_offset);
end $$;

-- The publication ids below the next one that an offset has not read.
create or replace function _pgqueue.unread(p_offset pgqueue.reading_offset) returns int8multirange
language sql immutable parallel safe as $$ select p_offset.old_ids + p_offset.new_ids $$;

-- The publication ids that an offset has not read, also those to come.
create or replace function _pgqueue.ahead_of(p_offset pgqueue.reading_offset) returns int8multirange
language sql immutable parallel safe as $$
    select _pgqueue.unread(p_offset) + int8multirange(int8range(p_offset.next_publication, null))
$$;

-- Raises PQ003: a value is not an offset.
create or replace function _pgqueue.refuse_offset(p_argument text, p_what text, p_offset jsonb) returns void
language plpgsql as $$
begin
    raise exception '% is no offset of a stream: %', p_argument, p_what
        using errcode = 'PQ003', column = p_argument,
              detail = format('It is %s.', coalesce(left(p_offset::text, 200), 'null')),
              hint = 'Give an offset as read, read_to or start_offset returned it.';
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

-- Reads an offset of a stream from JSON. (More than 60 lines: one check after the other, in the order of the value's
-- parts.)
--   p_archive  whether its reader reads the archive, too
-- Errors: PQ003 when the value is not an offset, PQ005 when it is of another stream or incarnation, or beyond the last
-- publication.
create or replace function _pgqueue.parse_offset(p_stream pgqueue.streams, p_argument text, p_offset jsonb,
                                                 p_archive boolean default false) returns pgqueue.reading_offset
language plpgsql as $$
declare
    v_offset pgqueue.reading_offset;
    v_gap    jsonb;
    v_ids    int8multirange;
    v_who    text[];
    v_i      int := 0;
begin
    if jsonb_typeof(p_offset) is distinct from 'object' then
        perform _pgqueue.refuse_offset(p_argument, 'no object', p_offset);
    elsif jsonb_typeof(p_offset -> 'stream') is distinct from 'string'
          or jsonb_typeof(p_offset -> 'incarnation') is distinct from 'string' then
        perform _pgqueue.refuse_offset(p_argument, 'without stream or incarnation', p_offset);
    end if;
    v_offset.next_publication := _pgqueue.offset_number(p_argument, 'next', p_offset -> 'next', 1, p_offset);
    v_offset.messages := _pgqueue.offset_number(p_argument, 'messages', p_offset -> 'messages', 0, p_offset);
    v_offset.in_archive := p_archive is true;
    v_offset.old_ids := '{}';
    v_offset.new_ids := '{}';
    v_offset.cut_publications := '{}';
    v_offset.cut_messages := '{}';
    if p_offset ? 'cut' then
        if not p_offset -> 'cut' @? 'strict $ ? (@.type() == "array" && @.size() > 0 '
                                    '&& !exists (@[*] ? (@.type() != "array" || @.size() != 2)))' then
            perform _pgqueue.refuse_offset(p_argument, 'its cut is no list of pairs', p_offset);
        end if;
        select array_agg(_pgqueue.offset_number(p_argument, 'cut', c -> 0, 1, p_offset)),
               array_agg(_pgqueue.offset_number(p_argument, 'cut', c -> 1, 1, p_offset))
        into v_offset.cut_publications, v_offset.cut_messages
        from jsonb_array_elements(p_offset -> 'cut') c;
    end if;
    if p_offset ? 'gaps' then
        if jsonb_typeof(p_offset -> 'gaps') <> 'array'
           or jsonb_array_length(p_offset -> 'gaps') not between 1 and 2 then
            perform _pgqueue.refuse_offset(p_argument, 'its gaps are no list of one or two', p_offset);
        end if;
        for v_gap in select value from jsonb_array_elements(p_offset -> 'gaps') loop
            begin
                v_ids := (v_gap ->> 'ids')::int8multirange;
                v_who := case when jsonb_typeof(v_gap -> 'publishers') = 'array'
                                then array(select jsonb_array_elements_text(v_gap -> 'publishers')) end;
            exception when data_exception then
                v_ids := null;
            end;
            if v_ids is null or v_ids = '{}'
               or v_ids <@ int8multirange(int8range(1, v_offset.next_publication)) is not true then
                perform _pgqueue.refuse_offset(p_argument, 'a gap is no set of numbers below next', p_offset);
            end if;
            if v_i = 0 then
                v_offset.old_ids := v_ids;
                v_offset.old_publishers := v_who;
            else
                v_offset.new_ids := v_ids;
                v_offset.new_publishers := v_who;
            end if;
            v_i := v_i + 1;
        end loop;
    end if;
    if exists (select from unnest(v_offset.cut_publications) c
               where c < v_offset.next_publication and not _pgqueue.unread(v_offset) @> c) then
        perform _pgqueue.refuse_offset(p_argument, 'its cut was read', p_offset);
    elsif v_offset.next_publication < any (v_offset.cut_publications)
          or cardinality(v_offset.cut_publications) > (select count(distinct c)
                                                       from unnest(v_offset.cut_publications) c) then
        perform _pgqueue.refuse_offset(p_argument, 'its cut is beyond next, or there twice', p_offset);
    end if;
    perform _pgqueue.check_incarnation(p_stream, p_argument, p_offset, v_offset);
    return v_offset;
end $$;

-- Raises PQ005 unless an offset belongs to the stream as it is now: it has the same incarnation; or recover() ended
-- its incarnation, and all that the offset has read came before that.
create or replace function _pgqueue.check_incarnation(p_stream pgqueue.streams, p_argument text, p_json jsonb,
                                                      p_offset pgqueue.reading_offset) returns void
language plpgsql as $$
declare
    v_ended pgqueue.incarnations;
begin
    if p_json ->> 'stream' <> p_stream.name then
        raise exception '% is of stream %, not of stream %', p_argument, quote_literal(left(p_json ->> 'stream', 210)),
                        quote_literal(p_stream.name)
            using errcode = 'PQ005', column = p_argument, hint = 'Give an offset of this stream.';
    end if;
    if p_json ->> 'incarnation' <> p_stream.incarnation::text then
        -- each restore since then has its own last publication
        select e.incarnation, e.stream_id, min(l.last_publication), e.ended_at into v_ended
        from pgqueue.incarnations e
        join pgqueue.incarnations l on l.stream_id = e.stream_id and l.ended_no >= e.ended_no
        where e.stream_id = p_stream.stream_id and e.incarnation::text = p_json ->> 'incarnation'
        group by e.incarnation;
        if not found then
            raise exception '% is of another stream that was named %: of another database, or dropped since',
                            p_argument, quote_literal(p_stream.name)
                using errcode = 'PQ005', column = p_argument,
                      hint = 'Connect to the database of this offset, or begin anew: '
                             'at "earliest", "latest" or a timestamp.';
        elsif p_offset.next_publication > v_ended.last_publication + 1
              or v_ended.last_publication < any (p_offset.cut_publications) then
            raise exception '% is beyond the state to which the database was restored at %: '
                            'it has read publications up to %, and % was the last one that was restored',
                            p_argument, v_ended.ended_at, p_offset.next_publication - 1, v_ended.last_publication
                using errcode = 'PQ005', column = p_argument,
                      hint = 'The later publications are lost here, and their numbers are given to other messages. '
                             'To read the messages that came after the restore, begin at that time.';
        end if;
    elsif p_offset.next_publication > _pgqueue.last_publication_id(p_stream.stream_id) + 1
          and not pg_is_in_recovery() then
        raise exception '% is ahead of the database: it has read publications up to %, and the last one is %',
                        p_argument, p_offset.next_publication - 1, _pgqueue.last_publication_id(p_stream.stream_id)
            using errcode = 'PQ005', column = p_argument,
                  hint = 'The database was restored to an earlier state, or a standby without the latest commits was '
                         'promoted. Call recover(), and let the reader of this offset begin anew.';
    end if;
end $$;

-- The offset at a position, for an offset reader that has read up to another offset: what it has read counts as read.
-- So the result is the position's offset or a later one, even if the two offsets were made with different knowledge of
-- dead publications.
create or replace function _pgqueue.offset_not_before(p_from pgqueue.reading_offset, p_to pgqueue.reading_offset)
returns pgqueue.reading_offset language plpgsql as $$
declare
    v_next   bigint := greatest(p_from.next_publication, p_to.next_publication);
    v_unread int8multirange := _pgqueue.ahead_of(p_to) * _pgqueue.ahead_of(p_from);
    v_offset pgqueue.reading_offset := p_from;
begin
    v_offset.next_publication := v_next;
    v_offset.old_ids := v_unread * int8multirange(int8range(1, v_next));
    v_offset.old_publishers := null;  -- of whomever, as at the beginning
    v_offset.new_ids := '{}';
    v_offset.new_publishers := null;
    select coalesce(array_agg(c.id order by c.id), '{}'), coalesce(array_agg(c.n order by c.id), '{}')
    into v_offset.cut_publications, v_offset.cut_messages
    from (select id, max(n) as n
          from (select * from unnest(p_from.cut_publications, p_from.cut_messages) f (id, n)
                union all select * from unnest(p_to.cut_publications, p_to.cut_messages) t (id, n)) b
          where v_unread @> id
          group by id) c;
    return v_offset;
end $$;

-- The publications that the second of two offsets has cut, and that have messages between the two offsets.
create or replace function _pgqueue.cut_between(p_from pgqueue.reading_offset, p_to pgqueue.reading_offset)
returns int8multirange language sql immutable as $$
    select coalesce(range_agg(int8range(t.id, t.id, '[]')), '{}')
    from (select * from unnest(p_to.cut_publications, p_to.cut_messages)
          except select * from unnest(p_from.cut_publications, p_from.cut_messages)) t (id, n)
$$;

-- Raises PQ010 when messages between two offsets were trimmed, all or some. The caller asks after it has read them.
-- (Messages that are not stored any more were noted as trimmed before they were deleted, see operate/retention.sql.)
create or replace function _pgqueue.check_not_trimmed(p_stream pgqueue.streams, p_argument text,
                                                      p_from pgqueue.reading_offset, p_to pgqueue.reading_offset)
returns void language plpgsql as $$
declare
    v_gone int8multirange := (_pgqueue.trimmed(p_stream.stream_id, p_from.in_archive)).o_publications;
begin
    if v_gone = '{}' then
        return;
    end if;
    v_gone := v_gone * _pgqueue.ahead_of(p_from)
              - (_pgqueue.ahead_of(p_to)
                 - case when p_to.cut_publications = '{}' then '{}' else _pgqueue.cut_between(p_from, p_to) end);
    if v_gone <> '{}' then
        raise exception 'retention has overtaken %: % publications of stream % were trimmed before they were read',
                        p_argument, _pgqueue.cardinality(v_gone), quote_literal(p_stream.name)
            using errcode = 'PQ010', column = p_argument,
                  hint = case when not p_from.in_archive
                                   and v_gone <@ (_pgqueue.trimmed(p_stream.stream_id)).o_archive
                              then 'They are in the archive: Spark reads them, without a consumer.'
                              else 'This reader has lost these messages. Begin anew, at "earliest" for all that there '
                                   'is; and keep messages longer, see set_retention.' end;
    end if;
end $$;

-- The messages before the cut, of publications that an offset has cut.
create or replace function _pgqueue.before_cut(p_stream_id int, p_offset pgqueue.reading_offset) returns int8multirange
language plpgsql stable as $$
begin
    return (select coalesce(range_agg(_pgqueue.below(
                       p.seqs, _pgqueue.bound_of(p.seqs, least(c.n, _pgqueue.cardinality(p.seqs))))), '{}')
            from unnest(p_offset.cut_publications, p_offset.cut_messages) c (publication_id, n)
            cross join lateral (select range_agg(seqs) as seqs
                                from _pgqueue.readable(p_stream_id, p_offset.in_archive, c.publication_id,
                                                       c.publication_id + 1) x
                                where x.consumers is null) p
            where p.seqs is not null);  -- trimmed, see check_not_trimmed()
end $$;

-- The messages between two offsets.
create or replace function _pgqueue.messages_between(p_stream_id int, p_from pgqueue.reading_offset,
                                                     p_to pgqueue.reading_offset) returns int8multirange
language plpgsql stable as $$
declare
    v_ids  int8multirange := _pgqueue.ahead_of(p_from) - _pgqueue.ahead_of(p_to);
    v_seqs int8multirange;
begin
    with publication as materialized (
        select p.message_count, p.seqs
        from unnest(v_ids) r
        cross join lateral (select * from _pgqueue.readable(p_stream_id, p_to.in_archive, lower(r), upper(r))
                            offset 0) p  -- or else, without statistics, all of the stream is read once and joined
        where p.consumers is null
    ), all_of_them as (
        select coalesce(sum(message_count), 0) as messages, min(lower(seqs)) as lo, max(upper(seqs)) as hi
        from publication
    )
    select case when a.messages = 0 then '{}' when a.hi - a.lo = a.messages then int8multirange(int8range(a.lo, a.hi))
                else (select range_agg(seqs) from publication) end
    into v_seqs
    from all_of_them a;
    if p_to.cut_publications <> '{}' then
        v_seqs := v_seqs + _pgqueue.before_cut(p_stream_id, p_to);
    end if;
    if p_from.cut_publications <> '{}' then
        v_seqs := v_seqs - _pgqueue.before_cut(p_stream_id, p_from);
    end if;
    return v_seqs;
end $$;
