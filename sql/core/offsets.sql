-- Offsets of those who read without claiming: what they have read of a stream, as a set of publication ids, which they keep
-- themselves.
--
-- An offset says: all publications below next were read, or are dead; but for those in its gaps; and of some that were not, which a limit or a start
-- has cut, the first so many messages, by seq. What lies between two offsets is the difference of two sets, and so the same for ever. Nobody is
-- waited for: what is not visible when somebody reads is a gap, and read as soon as it is there.
--
-- Gaps are closed by the rule of core/gaps.sql, with what a consumer has in a row written into the offset: who may still fill the gap. So
-- reading writes nothing, and two readers know nothing of each other. And the rule is put more sharply here:
--   * A look begins by noting the last publication id that was given out, then who has the publish lock, and only then looks, no further than
--     to that id. Whoever got one of these ids had the lock before: it has it still, or is over, and then this very look sees what it published.
--   * So a look that finds nobody with the lock closes all gaps, new ones too: the offset is one number. Otherwise a gap
--     stays until none of those who were noted with it has the lock any more.
--   * Gaps are of two ages. New ones join the younger, whose publishers are then all of now; it becomes the older one when that is closed.
--     So an offset has two sets and two lists at most, and no gap stays open for longer than two transactions that publish, one
--     after the other.
--   * Where nothing can be said about who publishes, the gap says so (publishers null): at an old snapshot (isolation above read
--     committed), which may be older than the note; and on a standby, which does not know the locks of its primary. A standby
--     closes what a consumer of the stream has closed on the primary: its cursor is here, and so is what it saw.

-- An offset as a value.
create or replace function pgqueue._offset_json(p_stream pgqueue.streams, p_offset pgqueue.reading_offset) returns jsonb
language plpgsql stable
as $$
begin
    return jsonb_build_object('stream', p_stream.name, 'incarnation', p_stream.incarnation, 'next', p_offset.next_publication,
                              'messages', p_offset.messages)
        || case when p_offset.cut_publications = '{}' then '{}'
                else jsonb_build_object('cut', (select jsonb_agg(jsonb_build_array(p, n) order by i)
                                                from unnest(p_offset.cut_publications, p_offset.cut_messages) with ordinality c (p, n, i))) end
        || case when p_offset.old_ids = '{}' then '{}'
                else jsonb_build_object('gaps', jsonb_build_array(
                         jsonb_build_object('ids', p_offset.old_ids::text, 'publishers', to_jsonb(p_offset.old_publishers)))
                     || case when p_offset.new_ids = '{}' then '[]'
                             else jsonb_build_array(jsonb_build_object('ids', p_offset.new_ids::text, 'publishers', to_jsonb(p_offset.new_publishers))) end)
           end;
end $$;

-- The publication ids that an offset has not read, below its next one.
create or replace function pgqueue._unread(p_offset pgqueue.reading_offset) returns int8multirange
language sql immutable parallel safe
as $$ select p_offset.old_ids + p_offset.new_ids $$;

-- Raises PQ003: a value is no offset.
create or replace function pgqueue._refuse_offset(p_argument text, p_what text, p_offset jsonb) returns void
language plpgsql
as $$
begin
    raise exception '% is no offset of a stream: %', p_argument, p_what
        using errcode = 'PQ003', column = p_argument, detail = format('It is %s.', coalesce(left(p_offset::text, 200), 'null')),
              hint = 'Give an offset as read, read_to or start_offset returned it.';
end $$;

-- A whole number in an offset. Errors: PQ003.
create or replace function pgqueue._offset_number(p_argument text, p_name text, p_value jsonb, p_least bigint, p_offset jsonb) returns bigint
language plpgsql
as $$
begin
    if jsonb_typeof(p_value) is distinct from 'number' or (p_value::numeric between p_least and 4611686018427387904) is not true
       or p_value::numeric <> trunc(p_value::numeric) then
        perform pgqueue._refuse_offset(p_argument, format('its %s is %s', p_name, coalesce(left(p_value::text, 50), 'missing')), p_offset);
    end if;
    return p_value::numeric::bigint;
end $$;

-- What an offset of a stream says. Errors: PQ003 when it is none, PQ005 when it is of another stream or incarnation, or beyond what there is.
create or replace function pgqueue._parse_offset(p_stream pgqueue.streams, p_argument text, p_offset jsonb) returns pgqueue.reading_offset
language plpgsql
as $$
declare
    v_offset pgqueue.reading_offset;
    v_gap    jsonb;
    v_ids    int8multirange;
    v_who    text[];
    v_i      int := 0;
begin
    if jsonb_typeof(p_offset) is distinct from 'object' then
        perform pgqueue._refuse_offset(p_argument, 'no object', p_offset);
    elsif jsonb_typeof(p_offset -> 'stream') is distinct from 'string' or jsonb_typeof(p_offset -> 'incarnation') is distinct from 'string' then
        perform pgqueue._refuse_offset(p_argument, 'without stream or incarnation', p_offset);
    end if;
    v_offset.next_publication := pgqueue._offset_number(p_argument, 'next', p_offset -> 'next', 1, p_offset);
    v_offset.messages := pgqueue._offset_number(p_argument, 'messages', p_offset -> 'messages', 0, p_offset);
    v_offset.old_ids := '{}';
    v_offset.new_ids := '{}';
    v_offset.cut_publications := '{}';
    v_offset.cut_messages := '{}';
    if p_offset ? 'cut' then
        if not p_offset -> 'cut' @? 'strict $ ? (@.type() == "array" && @.size() > 0 && !exists (@[*] ? (@.type() != "array" || @.size() != 2)))' then
            perform pgqueue._refuse_offset(p_argument, 'its cut is no list of pairs', p_offset);
        end if;
        select array_agg(pgqueue._offset_number(p_argument, 'cut', c -> 0, 1, p_offset)), array_agg(pgqueue._offset_number(p_argument, 'cut', c -> 1, 1, p_offset))
        into v_offset.cut_publications, v_offset.cut_messages
        from jsonb_array_elements(p_offset -> 'cut') c;
    end if;
    if p_offset ? 'gaps' then
        if jsonb_typeof(p_offset -> 'gaps') <> 'array' or jsonb_array_length(p_offset -> 'gaps') not between 1 and 2 then
            perform pgqueue._refuse_offset(p_argument, 'its gaps are no list of one or two', p_offset);
        end if;
        for v_gap in select value from jsonb_array_elements(p_offset -> 'gaps') loop
            begin
                v_ids := (v_gap ->> 'ids')::int8multirange;
                v_who := case when jsonb_typeof(v_gap -> 'publishers') = 'array' then array(select jsonb_array_elements_text(v_gap -> 'publishers')) end;
            exception when data_exception then
                v_ids := null;
            end;
            if v_ids is null or v_ids = '{}' or v_ids <@ int8multirange(int8range(1, v_offset.next_publication)) is not true then
                perform pgqueue._refuse_offset(p_argument, 'a gap is no set of numbers below next', p_offset);
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
    if exists (select from unnest(v_offset.cut_publications) c where c < v_offset.next_publication and not pgqueue._unread(v_offset) @> c) then
        perform pgqueue._refuse_offset(p_argument, 'its cut was read', p_offset);
    elsif v_offset.next_publication < any (v_offset.cut_publications)
          or cardinality(v_offset.cut_publications) > (select count(distinct c) from unnest(v_offset.cut_publications) c) then
        perform pgqueue._refuse_offset(p_argument, 'its cut is beyond next, or there twice', p_offset);
    end if;
    perform pgqueue._check_incarnation(p_stream, p_argument, p_offset, v_offset);
    return v_offset;
end $$;

-- Raises PQ005 unless an offset is of this stream as it is now: the same incarnation; or one that recover() ended, and nothing that it
-- says was read came after that.
create or replace function pgqueue._check_incarnation(p_stream pgqueue.streams, p_argument text, p_json jsonb, p_offset pgqueue.reading_offset)
returns void
language plpgsql
as $$
declare
    v_ended pgqueue.incarnations;
begin
    if p_json ->> 'stream' <> p_stream.name then
        raise exception '% is of stream %, not of stream %', p_argument, quote_literal(left(p_json ->> 'stream', 210)), quote_literal(p_stream.name)
            using errcode = 'PQ005', column = p_argument, hint = 'Give an offset of this stream.';
    end if;
    if p_json ->> 'incarnation' <> p_stream.incarnation::text then
        -- each restore since then has its own last one
        select e.incarnation, e.stream_id, min(l.last_publication), e.ended_at into v_ended
        from pgqueue.incarnations e join pgqueue.incarnations l on l.stream_id = e.stream_id and l.ended_no >= e.ended_no
        where e.stream_id = p_stream.stream_id and e.incarnation::text = p_json ->> 'incarnation'
        group by e.incarnation;
        if not found then
            raise exception '% is of another stream that was named %: of another database, or dropped since', p_argument, quote_literal(p_stream.name)
                using errcode = 'PQ005', column = p_argument, hint = 'Connect to the database that it is of, or begin anew: at "earliest", "latest" or a timestamp.';
        elsif p_offset.next_publication > v_ended.last_publication + 1 or v_ended.last_publication < any (p_offset.cut_publications) then
            raise exception '% is beyond the state to which the database was restored at %: it has read publications up to %, of which % was the last that was restored',
                            p_argument, v_ended.ended_at, p_offset.next_publication - 1, v_ended.last_publication
                using errcode = 'PQ005', column = p_argument,
                      hint = 'What it has read after that is lost here, and its numbers are given to other messages. To read what came after the restore, begin at that time.';
        end if;
    elsif p_offset.next_publication > pgqueue._last_publication_id(p_stream.stream_id) + 1 and not pg_is_in_recovery() then
        raise exception '% is ahead of the database: it has read publications up to %, and the last one is %', p_argument, p_offset.next_publication - 1,
                        pgqueue._last_publication_id(p_stream.stream_id)
            using errcode = 'PQ005', column = p_argument,
                  hint = 'The database was restored to an earlier state, or a standby without the latest commits was promoted. Call recover(), and begin anew with this offset''s reader.';
    end if;
end $$;

-- The offset at a position (core/positions.sql). Errors: PQ003. Locks: the history, shared.
create or replace function pgqueue._offset_at(p_stream pgqueue.streams, p_start text, p_argument text) returns pgqueue.reading_offset
language plpgsql
as $$
declare
    v_seen   record := pgqueue._seen_from(p_stream.stream_id, p_start, p_argument);
    v_offset pgqueue.reading_offset;
begin
    v_offset.next_publication := v_seen.o_next;
    v_offset.old_ids := int8multirange(int8range(1, v_seen.o_next)) - v_seen.o_seen;  -- of whomever: the first look tells
    v_offset.new_ids := '{}';
    v_offset.messages := 0;
    select coalesce(array_agg(c.publication_id order by c.publication_id), '{}'), coalesce(array_agg(c.n order by c.publication_id), '{}')
    into v_offset.cut_publications, v_offset.cut_messages
    from (select p.publication_id, sum(pgqueue._cardinality(p.seqs * v_seen.o_cut))::bigint as n
          from unnest(v_offset.old_ids) g
          cross join lateral (select * from pgqueue.publications
                              where stream_id = p_stream.stream_id and publication_id >= lower(g) and publication_id < upper(g) offset 0) p
          where v_seen.o_cut is not null and p.seqs && v_seen.o_cut and p.consumers is null
          group by p.publication_id) c;
    return v_offset;
end $$;

-- What is before an offset, given as text: see _seen_from for what it returns. Needs the history's lock.
-- Errors: PQ003; PQ005, also when it has read a part of a publication that this snapshot does not see.
create or replace function pgqueue._seen_by(p_stream_id int, p_offset text, p_argument text,
                                            out o_seen int8multirange, out o_next bigint, out o_publishers text[], out o_cut int8multirange)
language plpgsql
as $$
declare
    v_json   jsonb;
    v_offset pgqueue.reading_offset;
begin
    begin
        v_json := p_offset::jsonb;
    exception when invalid_text_representation or untranslatable_character or program_limit_exceeded then
        perform pgqueue._refuse_offset(p_argument, 'no JSON', to_jsonb(p_offset));
    end;
    v_offset := pgqueue._parse_offset(pgqueue._stream_of(p_stream_id), p_argument, v_json);
    o_seen := int8multirange(int8range(1, v_offset.next_publication)) - pgqueue._unread(v_offset);
    -- the next one itself may be cut, and none after it
    o_next := greatest(v_offset.next_publication, (select max(c) + 1 from unnest(v_offset.cut_publications) c));
    o_publishers := pgqueue._publishers(p_stream_id);
    if v_offset.cut_publications <> '{}' then
        if exists (select from unnest(v_offset.cut_publications) c
                   where not (pgqueue._trimmed(p_stream_id)).o_publications @> c
                     and not exists (select from pgqueue.publications where stream_id = p_stream_id and publication_id = c)) then
            raise exception '% has read a part of a publication that this transaction does not see', p_argument
                using errcode = 'PQ005', column = p_argument, hint = 'Use it in a transaction at isolation read committed, and not on a standby that is behind.';
        end if;
        o_cut := pgqueue._before_cut(p_stream_id, v_offset);
    end if;
end $$;

-- The offset at a position, for who has read up to another one: what it has read counts as read. So it is that one or a later one, whatever
-- was known at the moment of either of what is dead.
create or replace function pgqueue._offset_not_before(p_from pgqueue.reading_offset, p_to pgqueue.reading_offset) returns pgqueue.reading_offset
language plpgsql
as $$
declare
    v_next   bigint := greatest(p_from.next_publication, p_to.next_publication);
    v_unread int8multirange := (pgqueue._unread(p_to) + int8multirange(int8range(p_to.next_publication, null)))
                               * (pgqueue._unread(p_from) + int8multirange(int8range(p_from.next_publication, null)));
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

-- The publications that the second of two offsets has cut, and of which there is something between them.
create or replace function pgqueue._cut_between(p_from pgqueue.reading_offset, p_to pgqueue.reading_offset) returns int8multirange
language sql immutable
as $$
    select coalesce(range_agg(int8range(t.id, t.id, '[]')), '{}')
    from (select * from unnest(p_to.cut_publications, p_to.cut_messages)
          except select * from unnest(p_from.cut_publications, p_from.cut_messages)) t (id, n)
$$;

-- Raises PQ010 when what lies between two offsets was trimmed, in part or whole: to be asked when it was read. (What is not stored any more was
-- noted as trimmed before, see core/retention.sql.)
create or replace function pgqueue._check_not_trimmed(p_stream pgqueue.streams, p_argument text, p_from pgqueue.reading_offset,
                                                      p_to pgqueue.reading_offset) returns void
language plpgsql
as $$
declare
    v_gone int8multirange := (pgqueue._trimmed(p_stream.stream_id)).o_publications;
begin
    if v_gone = '{}' then
        return;
    end if;
    v_gone := v_gone * (pgqueue._unread(p_from) + int8multirange(int8range(p_from.next_publication, null)))
              - (pgqueue._unread(p_to) + int8multirange(int8range(p_to.next_publication, null))
                 - case when p_to.cut_publications = '{}' then '{}' else pgqueue._cut_between(p_from, p_to) end);
    if v_gone <> '{}' then
        raise exception 'retention has overtaken %: % publications of stream % were trimmed before they were read', p_argument,
                        pgqueue._cardinality(v_gone), quote_literal(p_stream.name)
            using errcode = 'PQ010', column = p_argument,
                  hint = 'What this reader had before it is lost to it. Begin anew, at "earliest" for all that there is; and keep messages longer, see set_retention.';
    end if;
end $$;

-- The last publication id of a stream that was given out; 0: none.
create or replace function pgqueue._last_publication_id(p_stream_id int) returns bigint
language plpgsql stable
as $$
begin
    return coalesce(pg_sequence_last_value(format('pgqueue.publication_%s', p_stream_id)::regclass), 0);
end $$;

-- Who has the publish lock of a stream, for a look that begins afterwards; null when that says nothing about what it will not see.
create or replace function pgqueue._publishers_before(p_stream_id int) returns text[]
language plpgsql
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' or pg_is_in_recovery() then
        return null;
    end if;
    return pgqueue._publishers(p_stream_id);
end $$;

-- Publications as they are read: those of a set of ids, in order of id, until p_max messages are full.
--   p_rows  at most so many publications, or parts of them
-- Returns those that were read whole; the one that was cut, and after how many of its messages; how many messages it is in all; the last
-- id that was walked; and whether a limit ended it.
create or replace function pgqueue._walk(p_stream_id int, p_ids int8multirange, p_max bigint, p_rows int,
                                         out o_read int8multirange, out o_cut bigint, out o_cut_messages bigint, out o_messages bigint,
                                         out o_last bigint, out o_limited boolean)
language plpgsql
as $$
begin
    with part as materialized (  -- limited twice, so that no more is read than is wanted: neither of each range nor of all
        select p.*
        from unnest(p_ids) r
        cross join lateral (select publication_id, message_count, consumers from pgqueue.publications
                            where stream_id = p_stream_id and publication_id >= lower(r) and publication_id < upper(r)
                            order by publication_id
                            fetch first p_rows rows with ties) p
        order by p.publication_id
        fetch first p_rows rows with ties
    ), publication as materialized (
        select publication_id, coalesce(sum(message_count) filter (where consumers is null), 0) as n
        from part
        group by publication_id
    ), walked as materialized (
        select publication_id, n, upto
        from (select publication_id, n, sum(n) over (order by publication_id rows unbounded preceding) as upto from publication) w
        where upto - n < p_max
    ), all_of_them as (
        select count(*) as count, min(publication_id) as first, max(publication_id) as last, coalesce(max(upto), 0) as messages,
               max(publication_id) filter (where upto > p_max) as cut, p_max - max(upto - n) filter (where upto > p_max) as cut_messages
        from walked
    )
    select case when a.count = 0 then '{}' when a.last - a.first + 1 = a.count then int8multirange(int8range(a.first, a.last, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from walked) end,
           a.cut, a.cut_messages, least(a.messages, p_max), a.last, a.messages >= p_max or (select count(*) from part) >= p_rows
    into o_read, o_cut, o_cut_messages, o_messages, o_last, o_limited
    from all_of_them a;
    if o_cut is not null then
        o_read := o_read - int8multirange(int8range(o_cut, o_cut, '[]'));
    end if;
end $$;

-- The offset after the next messages, p_max at most, and no publication after p_upto (null: all).
create or replace function pgqueue._read_on(p_stream pgqueue.streams, p_offset pgqueue.reading_offset, p_max bigint, p_upto bigint)
returns pgqueue.reading_offset
language plpgsql
as $$
declare
    v_upto   bigint := greatest(least(pgqueue._last_publication_id(p_stream.stream_id), p_upto), 0);
    v_who    text[] := pgqueue._publishers_before(p_stream.stream_id);  -- after those ids were given out, before the look
    v_offset pgqueue.reading_offset := p_offset;
    v_known  int8multirange;
    v_left   bigint := p_max;
    v_walk   record;
begin
    if pg_is_in_recovery() then
        v_known := pgqueue._taken_by_some(p_stream.stream_id);
    end if;
    if v_offset.cut_publications <> '{}' then
        v_offset := pgqueue._read_cut(p_stream, v_offset, p_max);
        v_left := p_max - (v_offset.messages - p_offset.messages);
        if v_left = 0 then
            return v_offset;
        end if;
    end if;
    if pgqueue._unread(v_offset) <> '{}' then
        v_walk := pgqueue._walk(p_stream.stream_id, pgqueue._unread(v_offset) * int8multirange(int8range(1, v_upto + 1)), v_left, pgqueue._limit_read());
        v_offset := pgqueue._close_gaps(v_offset, v_walk.o_read, case when not v_walk.o_limited and v_upto >= v_offset.next_publication - 1 then v_who end, v_known);
        v_offset.messages := v_offset.messages + v_walk.o_messages;
        if v_walk.o_cut is not null then
            v_offset.cut_publications := array[v_walk.o_cut];
            v_offset.cut_messages := array[v_walk.o_cut_messages];
        end if;
        v_left := v_left - v_walk.o_messages;
        if v_walk.o_limited then
            return v_offset;
        end if;
    end if;
    return pgqueue._read_beyond(p_stream, v_offset, v_left, v_upto, v_who, v_known);
end $$;

-- Reads what is left of the publications that were cut, p_max messages at most.
create or replace function pgqueue._read_cut(p_stream pgqueue.streams, p_offset pgqueue.reading_offset, p_max bigint) returns pgqueue.reading_offset
language plpgsql
as $$
declare
    v_left bigint := p_max;
    v_cut  bigint;
    v_rest bigint;
begin
    while v_left > 0 and p_offset.cut_publications <> '{}' loop
        v_cut := p_offset.cut_publications[1];
        select greatest(coalesce(sum(message_count), 0) - p_offset.cut_messages[1], 0) into v_rest  -- 0: trimmed, see _check_not_trimmed
        from pgqueue.publications where stream_id = p_stream.stream_id and publication_id = v_cut and consumers is null;
        p_offset.messages := p_offset.messages + least(v_rest, v_left);
        if v_rest > v_left then
            p_offset.cut_messages[1] := p_offset.cut_messages[1] + v_left;
            return p_offset;
        end if;
        v_left := v_left - v_rest;
        p_offset.cut_publications := p_offset.cut_publications[2:];
        p_offset.cut_messages := p_offset.cut_messages[2:];
        p_offset.next_publication := greatest(p_offset.next_publication, v_cut + 1);
        p_offset := pgqueue._close_gaps(p_offset, int8multirange(int8range(v_cut, v_cut, '[]')), null, null);
    end loop;
    return p_offset;
end $$;

-- Takes publications out of the gaps of an offset, and closes those that nobody can fill any more.
--   p_who    who had the publish lock before a look into all of the gaps; null: not known, or it was no such look
--   p_known  publications that are visible or dead for sure, known before it; null: nobody asked
create or replace function pgqueue._close_gaps(p_offset pgqueue.reading_offset, p_read int8multirange, p_who text[], p_known int8multirange)
returns pgqueue.reading_offset
language plpgsql
as $$
begin
    p_read := p_read + coalesce(p_known, '{}');
    p_offset.old_ids := p_offset.old_ids - p_read;
    p_offset.new_ids := p_offset.new_ids - p_read;
    if p_who is not null then
        p_offset.old_publishers := array(select w from unnest(p_who) w where (w = any (p_offset.old_publishers)) is not false or w like '-1/%');
        p_offset.new_publishers := array(select w from unnest(p_who) w where (w = any (p_offset.new_publishers)) is not false or w like '-1/%');
        if p_offset.old_publishers = '{}' then
            p_offset.old_ids := '{}';
        end if;
        if p_offset.new_publishers = '{}' then
            p_offset.new_ids := '{}';
        end if;
    end if;
    if p_offset.old_ids = '{}' then
        p_offset.old_ids := p_offset.new_ids;
        p_offset.old_publishers := p_offset.new_publishers;
        p_offset.new_ids := '{}';
    end if;
    if p_offset.new_ids = '{}' then
        p_offset.new_publishers := null;
    end if;
    if p_offset.old_ids = '{}' then
        p_offset.old_publishers := null;
    end if;
    return p_offset;
end $$;

-- Reads on from the next publication, which has not been looked at.
create or replace function pgqueue._read_beyond(p_stream pgqueue.streams, p_offset pgqueue.reading_offset, p_max bigint, p_upto bigint,
                                                p_who text[], p_known int8multirange) returns pgqueue.reading_offset
language plpgsql
as $$
declare
    v_rows   bigint := 64;  -- more each time: nobody knows before how many publications p_max messages are
    v_left   bigint := p_max;
    v_walked bigint := 0;
    v_end    bigint;
    v_room   bigint;
    v_walk   record;
    v_holes  int8multirange;
begin
    while v_left > 0 and v_walked < pgqueue._limit_read() and p_offset.next_publication <= p_upto loop
        v_room := pgqueue._max_offset_ranges() - (select count(*) from unnest(pgqueue._unread(p_offset)));
        v_walk := pgqueue._walk(p_stream.stream_id, int8multirange(int8range(p_offset.next_publication, p_upto, '[]')), v_left, v_rows::int);
        exit when v_walk.o_last is null;
        v_end := coalesce(v_walk.o_cut, v_walk.o_last + 1);
        v_holes := case when v_end > p_offset.next_publication then int8multirange(int8range(p_offset.next_publication, v_end)) else '{}' end
                   - v_walk.o_read - coalesce(p_known, '{}');
        if p_who = '{}' then
            v_holes := '{}';
        elsif (select count(*) from unnest(v_holes)) > v_room then
            if p_known is null then
                p_known := pgqueue._taken_by_some(p_stream.stream_id);  -- nothing that is known after a look says anything about it
            else
                exit when v_room <= 0;
                v_rows := v_room;  -- so many have no more gaps
            end if;
            continue;
        end if;
        if v_holes <> '{}' then
            if p_offset.old_ids = '{}' then
                p_offset.old_ids := v_holes;
                p_offset.old_publishers := p_who;
            else
                p_offset.new_ids := p_offset.new_ids + v_holes;
                p_offset.new_publishers := p_who;
            end if;
        end if;
        p_offset.next_publication := v_end;
        if v_walk.o_cut is not null then
            p_offset.cut_publications := array[v_walk.o_cut];
            p_offset.cut_messages := array[v_walk.o_cut_messages];
        end if;
        p_offset.messages := p_offset.messages + v_walk.o_messages;
        v_left := v_left - v_walk.o_messages;
        v_walked := v_walked + v_rows;
        exit when not v_walk.o_limited;
        v_rows := least(v_rows * 8, pgqueue._limit_read());
    end loop;
    perform pgqueue._warn_of_gaps(p_stream, p_offset, p_who);
    return p_offset;
end $$;

-- Warns of an offset that has become large, and says because of whom.
create or replace function pgqueue._warn_of_gaps(p_stream pgqueue.streams, p_offset pgqueue.reading_offset, p_who text[]) returns void
language plpgsql
as $$
declare
    v_ranges bigint := (select count(*) from unnest(pgqueue._unread(p_offset)));
begin
    if v_ranges >= pgqueue._limit_gap_ranges() then
        raise warning 'the offset has % gaps, because transactions that publish to stream % stay open beside many that were rolled back: %', v_ranges,
            quote_literal(p_stream.name),
            coalesce((select string_agg(distinct coalesce('process ' || l.pid, 'a prepared transaction'), ', ') from pg_locks l
                      where l.locktype = 'advisory' and l.virtualtransaction = any (p_offset.old_publishers || p_offset.new_publishers)), 'not known which, here')
            using hint = format('End them. With %s gaps, reading goes no further until they are over.', pgqueue._max_offset_ranges());
    end if;
end $$;

-- Publications that are visible or dead for sure, in any later look: what consumers of the stream have taken.
create or replace function pgqueue._taken_by_some(p_stream_id int) returns int8multirange
language plpgsql stable
as $$
begin
    return (select coalesce(range_agg(int8multirange(int8range(1, c.next_publication)) - pgqueue._gap_ids(c)), '{}')
            from pgqueue.consumers o
            cross join lateral (select * from pgqueue.consumer_cursors where consumer_id = o.consumer_id order by version desc limit 1) c
            where o.stream_id = p_stream_id);
end $$;

-- Of publications that were cut, the messages before the cut.
create or replace function pgqueue._before_cut(p_stream_id int, p_offset pgqueue.reading_offset) returns int8multirange
language plpgsql stable
as $$
begin
    return (select coalesce(range_agg(pgqueue._below(p.seqs, pgqueue._bound_of(p.seqs, least(c.n, pgqueue._cardinality(p.seqs))))), '{}')
            from unnest(p_offset.cut_publications, p_offset.cut_messages) c (publication_id, n)
            cross join lateral (select range_agg(seqs) as seqs from pgqueue.publications
                                where stream_id = p_stream_id and publication_id = c.publication_id and consumers is null) p
            where p.seqs is not null);  -- trimmed, see _check_not_trimmed
end $$;

-- The messages between two offsets.
create or replace function pgqueue._messages_between(p_stream_id int, p_from pgqueue.reading_offset, p_to pgqueue.reading_offset) returns int8multirange
language plpgsql stable
as $$
declare
    v_ids  int8multirange := (int8multirange(int8range(1, p_to.next_publication)) - pgqueue._unread(p_to))
                             - (int8multirange(int8range(1, p_from.next_publication)) - pgqueue._unread(p_from));
    v_seqs int8multirange;
begin
    with publication as materialized (
        select p.message_count, p.seqs
        from unnest(v_ids) r
        cross join lateral (select * from pgqueue.publications
                            where stream_id = p_stream_id and publication_id >= lower(r) and publication_id < upper(r)
                            offset 0) p  -- or else, without statistics, all of the stream is read once and joined
        where p.consumers is null
    ), all_of_them as (
        select coalesce(sum(message_count), 0) as messages, min(lower(seqs)) as lo, max(upper(seqs)) as hi from publication
    )
    select case when a.messages = 0 then '{}' when a.hi - a.lo = a.messages then int8multirange(int8range(a.lo, a.hi))
                else (select range_agg(seqs) from publication) end
    into v_seqs
    from all_of_them a;
    if p_to.cut_publications <> '{}' then
        v_seqs := v_seqs + pgqueue._before_cut(p_stream_id, p_to);
    end if;
    if p_from.cut_publications <> '{}' then
        v_seqs := v_seqs - pgqueue._before_cut(p_stream_id, p_from);
    end if;
    return v_seqs;
end $$;
